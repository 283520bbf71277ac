// SPDX-License-Identifier: Apache-2.0
//! Attaches the security groups that an annotation names to an existing load balancer, in place of Steerage's own one. `security_group_sync`
//! calls it, and deletes the own one afterwards. It changes no rule.
//!
//! One call replaces all groups, so clients always have the old groups or the new ones.

use std::collections::BTreeSet;

use steerage_provider_api::{Compare, Error, Owner};
use steerage_provider_cloud::LastAttempt;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::named_groups::{NamedGroups, check_own};
use crate::provider::Aws;
use crate::state::{KnownSecurityGroup, ServiceState};

impl Aws {
    /// Makes the groups of a load balancer the named ones.
    pub(crate) async fn sync_named_groups(
        &self,
        owner: &Owner,
        named: &NamedGroups,
        balancer: &Balancer,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<(), Error> {
        let known = entry.named_groups.as_ref().filter(|_| compare == Compare::Remembered);
        if let Some(result) = known.and_then(|known| known.result(named, &balancer.security_groups)) {
            return result;
        }
        let result = self.attach_named(owner, named, balancer, entry).await;
        let attached = entry.balancer(owner).map(|balancer| balancer.security_groups.clone());
        let attached = attached.unwrap_or_default();
        entry.named_groups = LastAttempt::new(named.clone(), attached, result.as_ref().err());
        result?;
        // The list of the start may not have it, and an answer may be lost.
        if compare != Compare::Remembered && !entry.security_groups.contains_key(owner) {
            let own = self.security_groups_of_owner(owner).await?.into_iter().next();
            entry.security_groups.extend(own.map(|own| (owner.clone(), KnownSecurityGroup::from_read(own))));
        }
        Ok(())
    }

    async fn attach_named(
        &self,
        owner: &Owner,
        named: &NamedGroups,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let ids = self.named_group_ids(named).await?;
        check_own(&ids, entry.security_groups.get(owner).map(|known| known.group.id.as_str()))?;
        if balancer.security_groups == ids {
            return Ok(());
        }
        tracing::info!(service = %owner.service, security_groups = ?ids, "attaching the named security groups");
        match self.set_security_groups(owner, balancer, &ids, entry).await {
            // Nobody creates these groups here: AWS will not know them a moment later either.
            Err(failure) if failure.is("InvalidSecurityGroup") => Err(failure.rejected()),
            done => Ok(done?),
        }
    }

    /// Replaces the security groups of a load balancer.
    pub(crate) async fn set_security_groups(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        ids: &BTreeSet<String>,
        entry: &mut ServiceState,
    ) -> crate::client::Result<()> {
        let all: Vec<String> = ids.iter().cloned().collect();
        self.note_change();
        entry.written = Some(Instant::now());
        if let Err(failure) = self.client.set_security_groups(&balancer.arn, &all).await {
            if failure.is_not_found() {
                // The load balancer is gone: the next call reads everything.
                (entry.resources, entry.complete) = (None, None);
            }
            return Err(failure);
        }
        if let Some(known) = entry.balancer_mut(owner) {
            known.security_groups.clone_from(ids);
        }
        Ok(())
    }
}
