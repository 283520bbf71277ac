// SPDX-License-Identifier: Apache-2.0
//! What is known of a Service's resources after a change: all of it, or, while it is open whether AWS made the change, only that these target
//! groups were the Service's. Their targets follow until the resources are read again. No I/O.
//!
//! AWS never gives the ARN of a target group to another one. So a group of this list can be gone, but it cannot become another's, and the
//! first answer that one is gone ends the use of all. A group whose tags were not read is not in it.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_provider_api::{Error, Outcome, Owner};
use steerage_provider_cloud::failure::is_unexpected_answer;
use tokio::time::Instant;

use crate::desired::Desired;
use crate::diff::ObservedGroup;
use crate::health_check::HealthCheckSettings;
use crate::observe::Resources;
use crate::refused_listeners::Refused;
use crate::state::{LONGEST_CALL, ServiceState};

/// What users are told of a change that was given up.
const ABANDONED: &str = "A change of the load balancer did not end in time, and AWS may have made it or not. Steerage reads what is there, \
                         and tries again.";

/// Doublings of the wait after a change that failed: 10 s become 5m20s.
const MOST_DOUBLINGS: u32 = 5;

/// The target groups of a Service whose resources must be read again after a change.
#[derive(Debug)]
pub(crate) struct LastKnown {
    pub(crate) owner: Owner,
    /// By name.
    pub(crate) groups: BTreeMap<String, ObservedGroup>,
    /// What is wrong, for users; `None` if the next try surely resolves it.
    failure: Option<String>,
}

/// A change of the structure that failed, so that it is open whether AWS made it.
#[derive(Debug)]
pub(crate) struct FailedChange {
    owner: Owner,
    wanted: Desired,
    /// What is wrong, for users.
    failure: String,
    retry_at: Instant,
}

/// Whether the wanted targets are right for this group, although it may not become what is wanted: AWS asks its nodes the same, and did not
/// get a change to `open_check` without an answer. Of nodes that are checked in another way, only some may have an endpoint. Pods are right
/// in any case.
pub(crate) fn are_right_for(
    group: &ObservedGroup,
    wanted: &Desired,
    open_check: Option<&HealthCheckSettings>,
) -> bool {
    let asks_like = |wanted: &HealthCheckSettings| {
        wanted.asks_like(&group.health) && open_check.is_none_or(|open| wanted.asks_like(open))
    };
    group.has_pods
        || wanted
            .groups
            .iter()
            .any(|wanted| !wanted.has_pods() && wanted.family == group.family() && asks_like(&wanted.health))
}

/// Whether the call that failed in this way changed nothing.
pub(crate) fn is_surely_unchanged(error: &Error) -> bool {
    matches!(error, Error::Throttled { .. } | Error::Denied(_) | Error::Invalid { .. })
        || is_unexpected_answer(error)
}

impl ServiceState {
    /// The resources that are known now.
    pub(crate) fn know(&mut self, owner: &Owner, resources: Resources) {
        self.last_known = None;
        self.resources = Some((owner.clone(), resources));
    }

    /// A change of these resources begins. Until it ends, it may be abandoned.
    pub(crate) fn begin_change(&mut self, owner: &Owner, resources: &Resources) {
        self.keep_groups(owner, resources, Some(ABANDONED.to_owned()));
    }

    /// Puts the resources back after a change that failed, unless the error leaves open what they are.
    pub(crate) fn put_back(&mut self, owner: &Owner, resources: Resources, error: &Error) {
        if is_surely_unchanged(error) {
            // Others do not exist.
            self.names = resources.groups.keys().cloned().collect();
            return self.know(owner, resources);
        }
        match error {
            Error::Throttled { .. } | Error::Denied(_) | Error::Invalid { .. } => {}
            Error::Unavailable(failure) => self.keep_groups(owner, &resources, Some(failure.clone())),
            // AWS has something else than what is known: the next call reads it.
            Error::Conflict(message) if message.contains("NotFound") => self.last_known = None,
            Error::Conflict(_) | Error::Busy(_) => self.keep_groups(owner, &resources, None),
        }
    }

    fn keep_groups(&mut self, owner: &Owner, resources: &Resources, failure: Option<String>) {
        let is_ours = |group: &ObservedGroup| !self.unproven.contains(&group.arn);
        let groups = resources.groups.iter().filter(|(_, group)| is_ours(group));
        let groups = groups.map(|(name, group)| (name.clone(), group.clone())).collect();
        self.last_known = Some(LastKnown { owner: owner.clone(), groups, failure });
    }

    /// Only the list of the start is known, and a read is to replace it: the targets of the listed groups follow until it has.
    pub(crate) fn keep_listed_groups(&mut self) {
        if let Some((owner, listed)) = self.resources.clone() {
            self.keep_groups(&owner, &listed, None);
        }
    }

    /// Whether targets follow in groups of the owner that were known before a change.
    pub(crate) fn follows_last_known(&self, owner: &Owner) -> bool {
        self.open_change(owner).is_some_and(|last| !last.groups.is_empty())
    }

    /// How long to wait after this change of the structure failed: at first the time after which reads show what AWS has made.
    pub(crate) fn wait_after_failed_change(
        &mut self,
        owner: &Owner,
        (wanted, failure): (Desired, String),
        settle: Duration,
    ) -> Duration {
        // A port without the listener that left, or a listener without its certificate, is soon tried again.
        let has_left = !self.left.is_empty() || self.left_certificates.is_missing();
        let doublings = if has_left { 0 } else { self.failed_changes.min(MOST_DOUBLINGS) };
        let wait = settle.saturating_mul(1 << doublings);
        self.failed_changes = self.failed_changes.saturating_add(1);
        let (owner, retry_at) = (owner.clone(), Instant::now() + wait);
        self.failed_change = Some(FailedChange { owner, wanted, failure, retry_at });
        wait
    }

    /// A try to make this change begins. If it is given up, the next one waits as after a failure, and targets go first.
    pub(crate) fn begin_try_of(&mut self, owner: &Owner, wanted: &Desired, settle: Duration) {
        self.failed_change = Some(FailedChange {
            owner: owner.clone(),
            wanted: wanted.clone(),
            failure: ABANDONED.to_owned(),
            retry_at: Instant::now() + LONGEST_CALL + settle,
        });
        self.targets_first = true;
    }

    /// It has ended, in whatever way.
    pub(crate) fn end_try(&mut self) {
        (self.failed_change, self.targets_first) = (None, false);
    }

    /// How long this change still waits, which failed: until then, targets follow. Another one is tried at once.
    pub(crate) fn must_wait_after_failed_change(&self, owner: &Owner, wanted: &Desired) -> Option<Duration> {
        let is_same = |failed: &&FailedChange| (&failed.owner, &failed.wanted) == (owner, wanted);
        let failed = self.failed_change.as_ref().filter(is_same)?;
        let rest = failed.retry_at.saturating_duration_since(Instant::now());
        (!rest.is_zero()).then_some(rest)
    }

    /// Why the owner's resources must be read again, if a change is the cause.
    pub(crate) fn open_failure(&self, owner: &Owner) -> Option<&str> {
        let waiting = self.failed_change.as_ref().filter(|failed| failed.owner == *owner);
        let waiting = waiting.map(|failed| failed.failure.as_str());
        self.open_change(owner).and_then(|last| last.failure.as_deref()).or(waiting)
    }

    /// Reports why a change waits, and what was wrong with its last try.
    pub(crate) fn report_waiting(&self, owner: &Owner, outcome: &mut Outcome) {
        if let Some((reason, message)) = self.incomplete_meanwhile() {
            Refused::told(reason, message).report(outcome);
        }
        if let Some(failure) = self.open_failure(owner) {
            Refused::unavailable(failure.to_owned()).report(outcome);
        }
    }

    /// What was known of the owner before a change of which it is open whether AWS made it.
    fn open_change(&self, owner: &Owner) -> Option<&LastKnown> {
        self.last_known.as_ref().filter(|last| last.owner == *owner && self.resources.is_none())
    }

    /// One of the resources is gone: all must be read.
    pub(crate) fn must_read_all(&mut self) {
        (self.resources, self.complete, self.last_known) = (None, None, None);
    }
}
