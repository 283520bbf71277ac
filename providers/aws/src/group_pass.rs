// SPDX-License-Identifier: Apache-2.0
//! One pass over target groups, one after the other, so that a Service takes one place in the budget of all. A group whose call hangs holds
//! up no other one: the next begins beside it, but not beside one that waits for the budget. `finish` and `apply` call it.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};

use crate::call_clock::CallClock;
use crate::client::CallError;
use crate::diff::ObservedGroup;
use crate::failing_groups::{FailingGroups, Failures, MAX_FAILURES, Retry};
use crate::registered::RegisteredIds;

/// The next group begins when the calls of the one before have taken this time.
const PATIENCE: Duration = Duration::from_secs(2);

/// The registered targets of all groups, of which each task takes those of its own.
pub(crate) struct Lender<'a>(Mutex<&'a mut HashMap<String, RegisteredIds>>);

impl<'a> Lender<'a> {
    pub(crate) fn new(registered: &'a mut HashMap<String, RegisteredIds>) -> Self {
        Self(Mutex::new(registered))
    }

    fn lock(&self) -> MutexGuard<'_, &'a mut HashMap<String, RegisteredIds>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of the group with this ARN, until they are dropped.
    pub(crate) fn lend(&self, group: &str) -> Lent<'_, 'a> {
        Lent { lender: self, own: self.lock().remove_entry(group).into_iter().collect() }
    }
}

/// The registered targets of one group. They return also if the call is given up.
pub(crate) struct Lent<'a, 'b> {
    lender: &'a Lender<'b>,
    own: HashMap<String, RegisteredIds>,
}

impl Deref for Lent<'_, '_> {
    type Target = HashMap<String, RegisteredIds>;

    fn deref(&self) -> &Self::Target {
        &self.own
    }
}

impl DerefMut for Lent<'_, '_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.own
    }
}

impl Drop for Lent<'_, '_> {
    fn drop(&mut self) {
        self.lender.lock().extend(self.own.drain());
    }
}

/// Starts a task for each of the groups, those that failed last, and notes in `failing` which fail. Returns what the others returned.
pub(crate) async fn over<'a, T>(
    groups: impl Iterator<Item = (&'a String, &'a ObservedGroup)>,
    (failing, retry): (&mut FailingGroups, Retry),
    mut start: impl FnMut(&'a String, &'a ObservedGroup) -> BoxFuture<'a, Result<T, CallError>>,
) -> (Vec<(&'a String, T)>, Failures) {
    let (mut done, mut failures) = (Vec::new(), Failures::default());
    let mut rest = failing.to_try(groups, retry, &mut failures).into_iter().peekable();
    let mut running = FuturesUnordered::new();
    let mut goes_on = true;
    let mut last = Arc::new(CallClock::default());
    loop {
        // As if those that hang had failed.
        let may_begin = |running: usize, failed: usize| goes_on && running + failed < MAX_FAILURES;
        if may_begin(running.len(), failures.count())
            && let Some((name, group)) = rest.next()
        {
            let clock = Arc::new(CallClock::default());
            last = Arc::clone(&clock);
            let measured = Arc::clone(&clock).measure(start(name, group));
            running.push(measured.map(move |result| (name, result, clock.longest_failure())));
        }
        let has_next = rest.peek().is_some() && may_begin(running.len(), failures.count());
        tokio::select! {
            biased;
            ended = running.next() => {
                let Some((name, result, took)) = ended else { break };
                let noted = result.map(|found| done.push((name, found)));
                goes_on &= failing.note(name, (noted, took), &mut failures);
            }
            () = last.has_taken(PATIENCE), if has_next => {}
        }
    }
    // No listener may come to a group that may have old targets still.
    for (name, _) in rest {
        failures.leave_out(name);
    }
    (done, failures)
}
