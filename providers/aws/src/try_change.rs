// SPDX-License-Identifier: Apache-2.0
//! One try to change or compare a Service's structure: when it may begin, and what a try that is given up leaves behind. `provider` calls
//! it, and it calls `restructure`.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Owner};

use tokio::time::Instant;

use crate::change_gate::ChangeWait;
use crate::desired::Desired;
use crate::provider::Aws;
use crate::state::ServiceState;
use crate::wanted_targets::WantedTargets;

/// What users are told of a change that waits because others hang.
pub(crate) const WAITS_AT_GATE: &str = "The change of the load balancer waits for its turn: AWS left changes unanswered in the last minute, or the last change of this Service \
     failed. Until AWS answers, few changes are made at a time, and namespaces take turns. Targets follow meanwhile if the load \
     balancer exists. Check the AWS Health Dashboard for Elastic Load Balancing in this region.";

impl Aws {
    /// Changes or compares the structure, unless that must wait. Returns when to call again; `None` if it is in place.
    pub(crate) async fn try_change(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        targets: &WantedTargets,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Option<Duration>, Error> {
        if compare == Compare::Remembered
            && let Some(wait) = entry.must_wait_after_failed_change(&lb.owner, wanted)
        {
            return Ok(Some(wait));
        }
        entry.adopt_list(&lb.owner);
        let entered = match self.changes.enter(&lb.owner, entry.has_failed_change()) {
            Ok(entered) => entered,
            Err(wait) => return self.wait_at_gate(&lb.owner, wanted, entry, compare, wait),
        };
        entry.failed_change = None;
        if std::mem::take(&mut entry.targets_first) {
            // The calls of the change may wait for the budget, ten seconds each, or hang.
            self.follow_meanwhile(&lb.owner, entry, (targets, Some(wanted))).await;
        }
        entry.begin_try_of(&lb.owner, wanted, self.config.settle);
        let done = entered.calls().measure(self.restructure(lb, wanted, targets, entry, compare)).await;
        entry.end_try();
        // Target groups that hang say nothing of changes.
        let is_of_targets = !entry.failing.since(entry.began).is_empty();
        let is_unanswered = matches!(done, Err(Error::Unavailable(_))) || entry.has_failed_change();
        entered.end(is_of_targets || !is_unanswered);
        done
    }

    /// The change, or the comparison, must wait because others hang. Returns when to call again; `None` if nothing is to be done.
    pub(crate) fn wait_at_gate(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
        compare: Compare,
        wait: ChangeWait,
    ) -> Result<Option<Duration>, Error> {
        entry.waits_at_gate = Some(wait);
        let (is_complete, must_verify) = (entry.is_complete(owner, wanted), entry.must_verify());
        match (compare, &mut entry.complete) {
            // What is served goes on, and is published. The rest is tried again then.
            (Compare::Remembered, Some(complete)) if is_complete => {
                let again = Instant::now() + wait.after;
                complete.retry = complete.retry.map(|at| at.max(again));
                complete.verify = complete.verify.map(|at| at.max(again));
                Ok(None)
            }
            (Compare::Remembered, _) => Ok(Some(wait.after)),
            // Nothing is known to be wrong: the next comparison finds it.
            (Compare::InPlace, _) if is_complete && !must_verify => {
                self.changes.leave(owner);
                entry.waits_at_gate = None;
                Ok(None)
            }
            // The caller must not forget what to compare.
            (Compare::InPlace, _) => {
                Err(Error::Throttled { after: Some(wait.after), message: WAITS_AT_GATE.to_owned() })
            }
        }
    }
}
