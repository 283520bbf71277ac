// SPDX-License-Identifier: Apache-2.0
//! Sets targets while a change or a comparison of the structure waits: registrations have a budget of their own, and often work when other
//! changes fail. `provider` and `shared_sync` call it.

use steerage_provider_api::{Compare, Error, Owner};

use crate::desired::Desired;
use crate::diff::ObservedGroup;
use crate::failing_groups::{MAX_FAILURES, Retry};
use crate::last_known::are_right_for;
use crate::provider::Aws;
use crate::state::ServiceState;
use crate::wanted_targets::WantedTargets;

impl Aws {
    /// Sets the targets of the present groups. Where a change may have been made or not, these are the groups that were known before. Groups
    /// whose nodes AWS checks in another way than `wanted`, or may check so, keep theirs. Nothing is done if no groups are known.
    pub(crate) async fn follow(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        (targets, wanted): (&WantedTargets, Option<&Desired>),
    ) -> Result<(), Error> {
        let limits = self.limits(entry, Compare::Remembered);
        // The caller has just tried these.
        let tried = entry.failing.since(entry.began);
        if tried.len() >= MAX_FAILURES {
            // The others may fail too. The next call continues.
            return Ok(());
        }
        if entry.is_known(owner) || entry.follows_last_known(owner) {
            let open_checks = entry.open_checks.clone();
            let is_right = |group: &ObservedGroup| {
                wanted.is_none_or(|wanted| are_right_for(group, wanted, open_checks.get(&group.arn)))
            };
            let is_followed = |name: &String, group: &ObservedGroup| !tried.contains(name) && is_right(group);
            let converge = self.converge_where((is_followed, Retry::WhenDue), entry, targets, limits);
            // The change before may have hung for half a minute. A call that is given up leaves its targets unconfirmed.
            let ended = tokio::time::timeout_at(limits.until, converge).await;
            ended.unwrap_or_else(|_| Err(Error::Unavailable("AWS did not answer in time".to_owned())))?;
        } else {
            entry.failing.hold(|_| true);
        }
        Ok(())
    }

    /// The same where the structure waits, whatever becomes of the targets.
    pub(crate) async fn follow_meanwhile(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        targets: (&WantedTargets, Option<&Desired>),
    ) {
        if let Err(error) = self.follow(owner, entry, targets).await {
            tracing::debug!(service = %owner.service, %error, "targets wait like the structure");
        }
    }
}
