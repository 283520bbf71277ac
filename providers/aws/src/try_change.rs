// SPDX-License-Identifier: Apache-2.0
//! One try to change or compare a Service's structure: when it may begin, and what a try that is given up leaves behind. `provider` calls
//! it, and it calls `restructure`.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer};

use crate::change_gate::COMES_AGAIN;
use crate::desired::Desired;
use crate::provider::Aws;
use crate::state::ServiceState;
use crate::wanted_targets::WantedTargets;

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
        let Some(entered) = self.changes.enter(entry.failed_change.is_some()) else {
            return match compare {
                Compare::Remembered => Ok(Some(COMES_AGAIN)),
                // Nothing is known to be wrong: the next comparison finds it.
                Compare::InPlace if !entry.must_verify() && entry.is_complete(&lb.owner, wanted) => Ok(None),
                // The caller must not forget what to compare.
                Compare::InPlace => {
                    let message = "AWS did not answer changes of other Services. Steerage makes few at a time, and retries.";
                    Err(Error::Throttled { after: Some(COMES_AGAIN), message: message.to_owned() })
                }
            };
        };
        entry.failed_change = None;
        if std::mem::take(&mut entry.targets_first) {
            // The calls of the change may wait for the budget, ten seconds each, or hang.
            self.follow_meanwhile(&lb.owner, entry, (targets, Some(wanted))).await;
        }
        entry.begin_try_of(&lb.owner, wanted, self.config.settle);
        let done = self.restructure(lb, wanted, targets, entry, compare).await;
        entry.end_try();
        // Target groups that hang say nothing of changes.
        if entry.failing.since(entry.began).is_empty() {
            entered.end(&done);
        } else {
            entered.end(&Ok::<(), Error>(()));
        }
        done
    }
}
