// SPDX-License-Identifier: Apache-2.0
//! Target groups whose targets AWS does not let Steerage change: the others go first, and few of them cost a call in each try. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::client::CallError;

/// Groups in which a try may fail before it leaves the rest to the next one.
const MAX_FAILURES: usize = 3;

/// The groups of one Service, by name, each with the time of its last failure.
#[derive(Debug, Default)]
pub(crate) struct FailingGroups {
    by_name: BTreeMap<String, Instant>,
}

/// What failed in one pass over the groups.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    count: usize,
    worst: Option<CallError>,
}

impl FailingGroups {
    /// The groups of a pass, those that failed at the end.
    pub(crate) fn in_order<'a, T>(
        &self,
        groups: impl Iterator<Item = (&'a String, T)>,
    ) -> Vec<(&'a String, T)> {
        let mut all: Vec<_> = groups.collect();
        all.sort_by_key(|(name, _)| self.by_name.get(*name).copied());
        all
    }

    /// Those that failed since then.
    pub(crate) fn since(&self, began: Option<Instant>) -> BTreeSet<String> {
        let failed = self.by_name.iter().filter(|(_, at)| began.is_some_and(|began| **at >= began));
        failed.map(|(name, _)| name.clone()).collect()
    }

    /// Notes the result for a group. Returns whether the pass goes on: it does not where AWS takes no further call.
    pub(crate) fn note(
        &mut self,
        name: &str,
        result: Result<(), CallError>,
        failures: &mut Failures,
    ) -> bool {
        let Err(failure) = result else {
            self.by_name.remove(name);
            return true;
        };
        if failure.is_of_all_calls() {
            // It says nothing of the group.
            failures.set(failure);
            return false;
        }
        self.by_name.insert(name.to_owned(), Instant::now());
        failures.count += 1;
        // The next one may get no answer either, for half a minute.
        let goes_on = failures.count < MAX_FAILURES && !failure.is_unanswered();
        if failures.worst.is_none() || failure.is_not_found() {
            failures.set(failure);
        }
        goes_on
    }

    /// Forgets groups that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&String) -> bool) {
        self.by_name.retain(|name, _| is_there(name));
    }
}

impl Failures {
    fn set(&mut self, failure: CallError) {
        // That a group is gone ends the use of what is known.
        if self.worst.as_ref().is_none_or(|worst| !worst.is_not_found()) {
            self.worst = Some(failure);
        }
    }

    /// The failure that decides what comes next: that a group is gone, else that no further call was made, else the first.
    pub(crate) fn worst(self) -> Option<CallError> {
        self.worst
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn failure(code: &str) -> Result<(), CallError> {
        Err(CallError::made_up("RegisterTargets", code, ""))
    }

    fn in_order(groups: &FailingGroups) -> String {
        let all = ["a", "b", "c", "d"].map(str::to_owned);
        groups
            .in_order(all.iter().map(|name| (name, ())))
            .into_iter()
            .map(|(name, ())| name.as_str())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn failing_groups_go_last() {
        let mut groups = FailingGroups::default();
        let mut failures = Failures::default();
        tokio::time::advance(Duration::from_secs(1)).await;
        let began = Instant::now();
        assert!(groups.note("a", failure("ServiceUnavailable"), &mut failures));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(groups.note("b", failure("AccessDenied"), &mut failures));
        assert!(groups.note("c", Ok(()), &mut failures));
        assert_eq!(in_order(&groups), "cdab");
        assert_eq!(groups.since(Some(began)), ["a", "b"].map(str::to_owned).into());
        assert!(groups.since(Some(began + Duration::from_secs(2))).is_empty());
        assert!(groups.note("a", Ok(()), &mut failures));
        assert_eq!(in_order(&groups), "acdb");
        assert!(!groups.note("d", failure("InternalFailure"), &mut failures), "three are enough");
        assert!(failures.worst().is_some_and(|worst| worst.is("ServiceUnavailable")));
        assert!(!groups.note("d", failure(""), &mut Failures::default()), "no answer");
    }

    #[test]
    fn worst_failure_decides() {
        let worst = |codes: &[&str]| {
            let (mut groups, mut failures) = (FailingGroups::default(), Failures::default());
            let goes_on = codes.iter().map(|code| groups.note(code, failure(code), &mut failures)).last();
            (failures.worst().map(|worst| worst.is(codes[codes.len() - 1])), goes_on)
        };
        assert_eq!(worst(&["AccessDenied", "TargetGroupNotFound"]), (Some(true), Some(true)));
        assert_eq!(worst(&["AccessDenied", "Throttling"]), (Some(true), Some(false)));
        assert_eq!(worst(&["TargetGroupNotFound", "Throttling"]), (Some(false), Some(false)));
        assert_eq!(worst(&["ExpiredToken"]), (Some(true), Some(false)));
        assert_eq!(worst(&["AccessDenied", "ServiceUnavailable"]), (Some(false), Some(true)));
    }
}
