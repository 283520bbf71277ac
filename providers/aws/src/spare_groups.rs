// SPDX-License-Identifier: Apache-2.0
//! Deletes target groups that changes left behind which AWS refused in the end: otherwise a Service that is refused again and again would
//! use up the account's quota. `apply` calls it before it creates others. Groups that leave a structure in place are `finish`'s.

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::desired::Desired;
use crate::diff::ObservedGroup;
use crate::names;
use crate::observe::Resources;
use crate::provider::Aws;
use crate::registered::MAX_HOLD;
use crate::state::ServiceState;

impl Aws {
    /// Deletes own groups that are neither wanted nor used: at once if no listener ever used them, and else when they have left for as long
    /// as connections may last. False if AWS does not show the tags of one yet.
    pub(crate) async fn delete_spare_groups(
        &self,
        owner: &Owner,
        wanted: &Desired,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        let is_wanted = |name: &String| wanted.groups.iter().any(|group| group.name == *name);
        let spare = resources.groups.iter().filter(|(name, group)| {
            !is_wanted(name) && !resources.uses(&group.arn) && !entry.left.need(&group.arn)
        });
        let spare: Vec<(String, String)> =
            spare.map(|(name, group)| (name.clone(), group.arn.clone())).collect();
        if spare.iter().any(|(_, arn)| entry.unproven.contains(arn))
            && !self.prove(owner, wanted.shared.as_ref(), resources, entry).await?
        {
            return Ok(false);
        }
        let prefix = names::prefix(&self.config.cluster);
        for (name, arn) in spare {
            if !entry.unused.contains(&name) {
                let since = *entry.leaving.entry(name.clone()).or_insert_with(Instant::now);
                // Of an adopted load balancer: its connections belong to clients that know of no change.
                let drain = resources.groups.get(&name).map(ObservedGroup::drain);
                let drain = drain.filter(|_| !name.starts_with(&prefix)).unwrap_or_default();
                if since.elapsed() < MAX_HOLD.max(drain) {
                    continue;
                }
            }
            if entry.groups_in_use.must_wait(&arn).is_some() {
                continue;
            }
            entry.check_time()?;
            tracing::info!(service = %owner.service, name, "deleting target group that no listener uses");
            entry.written = Some(Instant::now());
            match self.delete_group(&arn, &mut entry.groups_in_use).await {
                Ok(None) => {
                    resources.groups.remove(&name);
                    entry.forget_group(&name, &arn);
                }
                // Something uses it that no read shows.
                Ok(Some(_)) => drop(entry.unused.remove(&name)),
                // What is wanted does not wait for what is not. If the quota is used up, AWS says so.
                Err(failure) => {
                    entry.groups_in_use.refused(&arn, self.config.target_group_release);
                    tracing::warn!(
                        service = %owner.service, name, error = %Error::from(failure),
                        "target group that no listener uses not deleted; retrying with a later change"
                    );
                }
            }
        }
        Ok(true)
    }
}
