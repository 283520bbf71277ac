// SPDX-License-Identifier: Apache-2.0
//! Target groups whose targets AWS does not let Steerage change: the others follow all the same, and few of them cost a call in each try.
//! `group_pass` asks which to try. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_provider_api::{Error, Outcome, Owner};
use tokio::time::Instant;

use crate::client::CallError;
use crate::refused_listeners::Refused;
use crate::security_group_sync::again_after;
use crate::state::ServiceState;

/// Groups in which a try may fail before it leaves the rest to the next one.
pub(crate) const MAX_FAILURES: usize = 3;
/// The first wait before another try, which doubles, and the longest one: dead nodes leave soon after an outage.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The same where an answer did not come for long: meanwhile, the Service's other targets do not change.
const RETRY_HANGING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(1));
/// A group whose call failed after this time hangs.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// The groups of one Service that fail, by name.
#[derive(Debug, Default)]
pub(crate) struct FailingGroups {
    by_name: BTreeMap<String, FailingGroup>,
    /// Those that the last pass could not try, because they wait for a change of the structure.
    held: BTreeSet<String>,
}

#[derive(Debug)]
struct FailingGroup {
    failure: CallError,
    at: Instant,
    /// Failures in a row.
    count: u32,
    hangs: bool,
}

impl FailingGroup {
    fn retry_at(&self) -> Instant {
        let (first, longest) = if self.hangs { RETRY_HANGING } else { RETRY };
        self.at + first.saturating_mul(1 << self.count.saturating_sub(1).min(8)).min(longest)
    }
}

/// Which groups a pass leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// None: everything is compared.
    Now,
    /// Those whose wait has not ended.
    WhenDue,
    /// The same, but none if all fail: the caller waits itself after such a failure, and less if AWS answers others again.
    UnlessAllFail,
    /// Those whose wait has not ended, and all that hang: a change of the structure does not wait for them. If all fail, those that hang
    /// and whose wait has not ended.
    NotHanging,
}

/// What failed in one pass over the groups.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Groups that failed in this pass.
    count: usize,
    /// Those, and the ones that were left out, with their failures.
    groups: BTreeMap<String, CallError>,
    /// What ends the use of what is known, or says something of all calls.
    fatal: Option<CallError>,
    /// Groups that have their targets.
    followed: usize,
}

impl FailingGroups {
    /// The groups that a pass tries, those that failed at the end.
    pub(crate) fn to_try<'a, T>(
        &self,
        groups: impl Iterator<Item = (&'a String, T)>,
        retry: Retry,
        failures: &mut Failures,
    ) -> Vec<(&'a String, T)> {
        let mut all: Vec<_> = groups.collect();
        let failing = |name: &String| self.by_name.get(name);
        all.sort_by_key(|(name, _)| failing(name).map(|found| found.at));
        let all_fail = all.iter().all(|(name, _)| failing(name).is_some());
        if retry != Retry::Now && !(all_fail && retry == Retry::UnlessAllFail) {
            let now = Instant::now();
            let waits = |found: &&FailingGroup| match (retry, all_fail) {
                (Retry::NotHanging, true) => found.hangs && found.retry_at() > now,
                (Retry::NotHanging, false) => found.hangs || found.retry_at() > now,
                _ => found.retry_at() > now,
            };
            all.retain(|(name, _)| {
                let left_out = failing(name).filter(waits);
                failures.groups.extend(left_out.map(|found| ((*name).clone(), found.failure.clone())));
                left_out.is_none()
            });
        }
        all
    }

    /// Those that failed since then.
    pub(crate) fn since(&self, began: Option<Instant>) -> BTreeSet<String> {
        let failed = self.by_name.iter().filter(|(_, found)| began.is_some_and(|began| found.at >= began));
        failed.map(|(name, _)| name.clone()).collect()
    }

    /// Notes the result for a group, and how long its longest call took that failed. Returns whether the pass goes on: it does not where AWS takes no further call.
    pub(crate) fn note(
        &mut self,
        name: &str,
        (result, took): (Result<(), CallError>, Duration),
        failures: &mut Failures,
    ) -> bool {
        let Err(failure) = result else {
            self.by_name.remove(name);
            failures.followed += 1;
            return true;
        };
        if failure.is_of_all_calls() {
            // It says nothing of the group.
            failures.set_fatal(failure);
            return false;
        }
        let count = self.by_name.get(name).map_or(0, |found| found.count).saturating_add(1);
        self.by_name.insert(
            name.to_owned(),
            FailingGroup { failure: failure.clone(), at: Instant::now(), count, hangs: took >= HANGS_AFTER },
        );
        failures.count += 1;
        if failure.is_not_found() {
            failures.set_fatal(failure);
        } else {
            failures.groups.insert(name.to_owned(), failure);
        }
        failures.count < MAX_FAILURES
    }

    /// Forgets groups that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&String) -> bool) {
        self.by_name.retain(|name, _| is_there(name));
    }

    /// Notes for which groups a pass may not set the targets now. When it may is not a question of time.
    pub(crate) fn hold(&mut self, is_held: impl Fn(&String) -> bool) {
        self.held = self.by_name.keys().filter(|name| is_held(name)).cloned().collect();
    }

    /// All that fail.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.by_name.keys().cloned().collect()
    }

    /// When the next one is tried again.
    fn retry(&self) -> Option<Duration> {
        let free = self.by_name.iter().filter(|(name, _)| !self.held.contains(*name));
        let due = free.map(|(_, found)| found.retry_at()).min();
        due.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

impl Failures {
    fn set_fatal(&mut self, failure: CallError) {
        // That a group is gone ends the use of what is known.
        if self.fatal.as_ref().is_none_or(|before| !before.is_not_found()) {
            self.fatal = Some(failure);
        }
    }

    /// Groups that failed in this pass.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Adds the groups of these names that are meant, with the failures that `failing` has of them.
    pub(crate) fn add_of(
        &mut self,
        failing: &FailingGroups,
        names: &BTreeSet<String>,
        is_meant: impl Fn(&str) -> bool,
    ) {
        let meant = names.iter().filter(|name| is_meant(name));
        let found = meant.filter_map(|name| Some((name.clone(), failing.by_name.get(name)?.failure.clone())));
        self.groups.extend(found);
    }

    /// Notes a group that the pass left to the next try, because others failed.
    pub(crate) fn leave_out(&mut self, name: &str) {
        if let Some(first) = self.groups.values().next().cloned() {
            self.groups.insert(name.to_owned(), first);
        }
    }

    /// What decides where nothing else can be done: that a group is gone, else that AWS takes no further call.
    pub(crate) fn fatal(&self) -> Option<&CallError> {
        self.fatal.as_ref()
    }

    /// The failure of all groups; `None` if some have their targets.
    pub(crate) fn of_all(&self) -> Option<&CallError> {
        self.groups.values().next().filter(|_| self.followed == 0)
    }

    /// The groups that failed, by name.
    pub(crate) fn groups(&self) -> &BTreeMap<String, CallError> {
        &self.groups
    }
}

impl ServiceState {
    /// Reports the groups that fail while others follow, and asks for the next try.
    pub(crate) fn report_failing(&self, owner: &Owner, outcome: &mut Outcome) {
        if let Some(retry) = self.failing.retry() {
            again_after(outcome, retry.max(RETRY.0));
        }
        let (mut ports, mut first) = (Vec::new(), None);
        for (name, found) in &self.failing.by_name {
            if let Some(of_group) = self.ports_of_group(owner, name) {
                ports.extend(of_group);
                first = first.or(Some(&found.failure));
            }
        }
        let Some(failure) = first else { return };
        ports.sort_unstable();
        ports.dedup();
        let ports: Vec<String> =
            ports.iter().map(|(port, protocol)| format!("port {port} ({protocol})")).collect();
        let error = Error::from(failure.clone());
        let message = format!("The targets of {} are not as wanted. {error}", ports.join(", "));
        Refused::told(error.reason(), message).report(outcome);
    }

    /// The ports that lead to the target group of this name; `None` if the failure of their listeners is told already.
    fn ports_of_group(&self, owner: &Owner, name: &str) -> Option<Vec<(u16, String)>> {
        let known = self.resources.as_ref().filter(|(known, _)| known == owner).map(|(_, known)| known);
        if let Some((known, group)) =
            known.and_then(|known| known.groups.get(name).map(|group| (known, group)))
        {
            let lead = known.listeners.iter().filter(|found| found.group_arn.as_ref() == Some(&group.arn));
            let ports: Vec<_> = lead.map(|found| (found.port, found.protocol.clone())).collect();
            if !ports.is_empty() {
                return Some(ports);
            }
            if self.complete.as_ref().is_some_and(|complete| complete.refused.is_some()) {
                return None;
            }
        }
        let wanted =
            self.wanted.iter().filter(|(of, _)| of == owner).flat_map(|(_, wanted)| &wanted.listeners);
        let lead = wanted.filter(|listener| listener.group == name);
        let ports: Vec<_> = lead.map(|listener| (listener.port, listener.protocol.to_owned())).collect();
        (!ports.is_empty()).then_some(ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Ended = (Result<(), CallError>, Duration);

    fn failure(code: &str) -> Ended {
        (Err(CallError::made_up("RegisterTargets", code, "")), Duration::ZERO)
    }

    fn hanging() -> Ended {
        (failure("").0, Duration::from_secs(30))
    }

    fn tried(groups: &FailingGroups, retry: Retry) -> String {
        let all = ["a", "b", "c", "d"].map(str::to_owned);
        let named = all.iter().map(|name| (name, ()));
        let tried = groups.to_try(named, retry, &mut Failures::default());
        tried.into_iter().map(|(name, ())| name.as_str()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn failing_groups_go_last_and_wait() {
        let mut groups = FailingGroups::default();
        let mut failures = Failures::default();
        tokio::time::advance(Duration::from_secs(1)).await;
        let began = Instant::now();
        assert!(groups.note("a", failure("ServiceUnavailable"), &mut failures));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(groups.note("b", failure("ServiceUnavailable"), &mut failures));
        assert!(groups.note("c", (Ok(()), Duration::ZERO), &mut failures));
        assert_eq!((tried(&groups, Retry::WhenDue), failures.count()), ("cd".to_owned(), 2));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(tried(&groups, Retry::WhenDue), "cdab");
        assert_eq!(groups.since(Some(began)), ["a", "b"].map(str::to_owned).into());
        assert!(groups.since(Some(began + Duration::from_secs(2))).is_empty());
        groups.note("b", failure("ServiceUnavailable"), &mut Failures::default());
        tokio::time::advance(Duration::from_millis(1500)).await;
        assert_eq!(tried(&groups, Retry::WhenDue), "cda", "the wait doubles");
        groups.note("b", hanging(), &mut Failures::default());
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(tried(&groups, Retry::WhenDue), "cda");
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(tried(&groups, Retry::WhenDue), "cdab");
        assert_eq!(tried(&groups, Retry::NotHanging), "cda");
        for name in ["c", "d"] {
            groups.note(name, failure("AccessDenied"), &mut Failures::default());
        }
        assert_eq!(tried(&groups, Retry::UnlessAllFail), "abcd", "nothing else is to be done");
        assert_eq!(
            (tried(&groups, Retry::WhenDue), tried(&groups, Retry::NotHanging)),
            ("ab".into(), "abcd".into())
        );
        groups.note("b", hanging(), &mut Failures::default());
        assert_eq!(tried(&groups, Retry::NotHanging), "acd", "one that hangs has its own wait");
        assert!(groups.note("a", (Ok(()), Duration::ZERO), &mut failures));
        assert_eq!(tried(&groups, Retry::WhenDue), "a", "the others wait again");
        assert!(!groups.note("d", failure("InternalFailure"), &mut failures), "three are enough");
    }

    #[test]
    fn worst_failure_decides() {
        let worst = |codes: &[&str]| {
            let (mut groups, mut failures) = (FailingGroups::default(), Failures::default());
            let goes_on = codes.iter().map(|code| groups.note(code, failure(code), &mut failures)).last();
            let last = codes[codes.len() - 1];
            (failures.fatal().map(|worst| worst.is(last)), goes_on == Some(true))
        };
        assert_eq!(worst(&["AccessDenied", "TargetGroupNotFound"]), (Some(true), true));
        assert_eq!(worst(&["AccessDenied", "Throttling"]), (Some(true), false));
        assert_eq!(worst(&["TargetGroupNotFound", "Throttling"]), (Some(false), false));
        assert_eq!(worst(&["ExpiredToken"]), (Some(true), false));
        assert_eq!(worst(&["AccessDenied", "ServiceUnavailable"]), (None, true));
        let (mut groups, mut failures) = (FailingGroups::default(), Failures::default());
        groups.note("a", failure("AccessDenied"), &mut failures);
        assert!(failures.of_all().is_some_and(|failure| failure.is("AccessDenied")));
        groups.note("b", (Ok(()), Duration::ZERO), &mut failures);
        assert!(failures.of_all().is_none());
    }
}
