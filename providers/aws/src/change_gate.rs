// SPDX-License-Identifier: Apache-2.0
//! How many Services may change or compare their load balancers while AWS does not answer: each such call occupies a worker of the
//! controller for half a minute, in which targets of others do not follow. Namespaces take turns. `provider` asks. No I/O.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_provider_api::Owner;
use tokio::time::Instant;

use crate::call_clock::CallClock;

/// Services that change at a time while changes hang: of those whose own last change failed, and of others, for which these leave a
/// place.
const PLACES: (usize, usize) = (3, 1);
/// A call that failed after this time had no answer.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// So long after the last one, a change may hang.
const SUSPECTED_FOR: Duration = Duration::from_mins(1);
/// A Service that finds no place comes again after this time, if it is one of the next. Its targets follow meanwhile.
const SOON: Duration = Duration::from_secs(2);
/// The same for each round of places that others have before it, and the longest of these waits.
const ROUND: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));
/// A Service that comes later than this after the wait that it was given loses its turn: it may be gone.
const KEEPS_TURN: Duration = Duration::from_secs(10);
/// Users are told of a wait that is longer than this.
const TOLD_AFTER: Duration = Duration::from_secs(30);

/// The changes of all Services.
#[derive(Debug, Default)]
pub(crate) struct ChangeGate {
    state: Mutex<GateState>,
}

#[derive(Debug, Default)]
struct GateState {
    /// When a change last hung.
    hung: Option<Instant>,
    /// In the order in which they came.
    waiting: Vec<WaitingChange>,
    /// The namespace of each change that has a place, and which.
    running: Vec<(String, Place)>,
    /// Namespaces that had a turn, the last one last, while changes wait.
    served: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    OfFailed,
    OfOthers,
}

#[derive(Debug)]
struct WaitingChange {
    owner: Owner,
    has_failed: bool,
    since: Instant,
    /// Without another try it loses its turn then.
    until: Instant,
    /// Whether it waits for something else, too: others do not wait for it.
    lets_pass: bool,
}

/// A change that must wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChangeWait {
    /// When to come again.
    pub(crate) after: Duration,
    /// Whether it waits for so long that users are told.
    pub(crate) is_long: bool,
}

/// One change, from its begin to its end.
#[must_use]
pub(crate) struct EnteredChange<'a> {
    gate: &'a ChangeGate,
    calls: Arc<CallClock>,
    is_answered: bool,
    place: Option<(String, Place)>,
}

impl ChangeGate {
    /// Begins a change. It must wait if it may hang, because the last one of this Service failed or another one hung a moment ago, and there
    /// are enough of those. The namespace with the fewest running ones is next, of several the one whose last turn is longest ago, and in it
    /// whoever came first.
    pub(crate) fn enter(&self, owner: &Owner, has_failed: bool) -> Result<EnteredChange<'_>, ChangeWait> {
        let place = self.lock().enter(owner, has_failed)?;
        Ok(EnteredChange { gate: self, calls: Arc::default(), is_answered: false, place })
    }

    /// Whether the change would have to wait, which then keeps its turn.
    pub(crate) fn check(&self, owner: &Owner, has_failed: bool) -> Result<(), ChangeWait> {
        self.lock().check(owner, has_failed).map(drop)
    }

    /// The Service waits for something else first. It keeps its turn, and others do not wait for it.
    pub(crate) fn let_pass(&self, owner: &Owner) {
        let mut state = self.lock();
        if let Some(own) = state.waiting.iter_mut().find(|other| other.owner == *owner) {
            own.lets_pass = true;
        }
    }

    /// The Service no longer wants to change anything.
    pub(crate) fn leave(&self, owner: &Owner) {
        self.lock().leave(owner);
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn may_hang(&self) -> bool {
        self.hung.is_some_and(|at| at.elapsed() < SUSPECTED_FOR)
    }

    fn enter(&mut self, owner: &Owner, has_failed: bool) -> Result<Option<(String, Place)>, ChangeWait> {
        let place = self.check(owner, has_failed)?;
        let namespace = owner.service.namespace();
        let taken = place.map(|place| (namespace.to_owned(), place));
        if let Some(taken) = &taken {
            self.running.push(taken.clone());
            self.served.retain(|other| other != namespace);
            self.served.push(namespace.to_owned());
        }
        self.leave(owner);
        Ok(taken)
    }

    fn leave(&mut self, owner: &Owner) {
        self.waiting.retain(|other| other.owner != *owner);
        if self.waiting.is_empty() {
            self.served.clear();
        }
    }

    /// The place that the change may have; `None` if it needs none.
    fn check(&mut self, owner: &Owner, has_failed: bool) -> Result<Option<Place>, ChangeWait> {
        if !has_failed && !self.may_hang() {
            return Ok(None);
        }
        let now = Instant::now();
        self.waiting.retain(|other| other.owner == *owner || other.until > now);
        let at = self.waiting.iter().position(|other| other.owner == *owner).unwrap_or_else(|| {
            let owner = owner.clone();
            self.waiting.push(WaitingChange { owner, has_failed, since: now, until: now, lets_pass: false });
            self.waiting.len() - 1
        });
        (self.waiting[at].has_failed, self.waiting[at].lets_pass) = (has_failed, false);
        let order = self.order();
        let before: Vec<bool> = order
            .iter()
            .take_while(|other| **other != at)
            .map(|other| self.waiting[*other].has_failed)
            .collect();
        if let Some(place) = self.place(&before, has_failed) {
            return Ok(Some(place));
        }
        let rounds = u32::try_from(before.len() / (PLACES.0 + PLACES.1)).unwrap_or(u32::MAX);
        let after = if rounds == 0 { SOON } else { ROUND.0.saturating_mul(rounds).min(ROUND.1) };
        let own = &mut self.waiting[at];
        own.until = now + after + KEEPS_TURN;
        Err(ChangeWait { after, is_long: own.since.elapsed() >= TOLD_AFTER })
    }

    /// Those that wait, in the order of their turns: as if the first of each namespace began, then the second.
    fn order(&self) -> Vec<usize> {
        // Running ones of each namespace, and those that begin before.
        let mut ahead: BTreeMap<&str, usize> = BTreeMap::new();
        for (namespace, _) in &self.running {
            *ahead.entry(namespace).or_default() += 1;
        }
        let mut ranked = Vec::new();
        for (at, change) in self.waiting.iter().enumerate().filter(|(_, change)| !change.lets_pass) {
            let namespace = change.owner.service.namespace();
            let served = self.served.iter().position(|other| other == namespace).map_or(0, |turn| turn + 1);
            let ahead = ahead.entry(namespace).or_default();
            ranked.push((*ahead, served, at));
            *ahead += 1;
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, at)| at).collect()
    }

    /// The place that is left if those before take theirs. For each of them: whether its last change failed.
    fn place(&self, before: &[bool], has_failed: bool) -> Option<Place> {
        let taken = |place: Place| self.running.iter().filter(|(_, other)| *other == place).count();
        let mut free = (
            PLACES.0.saturating_sub(taken(Place::OfFailed)),
            PLACES.1.saturating_sub(taken(Place::OfOthers)),
        );
        let mut take = |has_failed: bool| {
            let (place, left) = if has_failed || free.1 == 0 {
                (Place::OfFailed, &mut free.0)
            } else {
                (Place::OfOthers, &mut free.1)
            };
            *left = left.checked_sub(1)?;
            Some(place)
        };
        for other in before {
            take(*other);
        }
        take(has_failed)
    }
}

impl EnteredChange<'_> {
    /// Measures the calls of the change.
    pub(crate) fn calls(&self) -> Arc<CallClock> {
        Arc::clone(&self.calls)
    }

    /// The change ended, and whether AWS answered. One that is given up is dropped instead.
    pub(crate) fn end(mut self, is_answered: bool) {
        self.is_answered = is_answered;
    }
}

impl Drop for EnteredChange<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if !self.is_answered && self.calls.longest_failure() >= HANGS_AFTER {
            state.hung = Some(Instant::now());
        }
        if let Some(place) = &self.place
            && let Some(at) = state.running.iter().position(|other| other == place)
        {
            state.running.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    fn owner(namespace: &str, number: usize) -> Owner {
        Owner { service: Key::new(namespace, format!("web-{number}")), uid: format!("{namespace}-{number}") }
    }

    /// A call of the change fails after so long.
    async fn call(entered: &EnteredChange<'_>, time: Duration) {
        let call = entered.calls().begin();
        tokio::time::advance(time).await;
        call.end(true);
    }

    async fn hang(gate: &ChangeGate, namespace: &str) {
        let entered = gate.enter(&owner(namespace, 1000), false).unwrap();
        call(&entered, Duration::from_secs(30)).await;
        entered.end(false);
    }

    /// How many of twenty changes begin at a time.
    fn count(gate: &ChangeGate, has_failed: bool) -> usize {
        let all: Vec<Owner> = (0..20).map(|number| owner("shop", number)).collect();
        let entered: Vec<_> = all.iter().filter_map(|owner| gate.enter(owner, has_failed).ok()).collect();
        let count = entered.len();
        for entered in entered {
            entered.end(true);
        }
        for owner in &all {
            gate.leave(owner);
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn few_changes_begin_after_one_hung() {
        let gate = ChangeGate::default();
        let all = PLACES.0 + PLACES.1;
        assert_eq!((count(&gate, false), count(&gate, true)), (20, PLACES.0));
        gate.enter(&owner("shop", 0), false).unwrap().end(false);
        assert_eq!(count(&gate, false), 20, "it failed at once");
        for (is_answered, expected) in [(true, 20), (false, all)] {
            let entered = gate.enter(&owner("shop", 0), false).unwrap();
            call(&entered, Duration::from_secs(30)).await;
            entered.end(is_answered);
            assert_eq!(count(&gate, false), expected, "{is_answered}");
        }
        tokio::time::advance(SUSPECTED_FOR).await;
        assert_eq!(count(&gate, false), 20);
        let waits_for_budget = gate.enter(&owner("shop", 0), false).unwrap();
        for _ in 0..10 {
            call(&waits_for_budget, Duration::from_secs(1)).await;
            tokio::time::advance(Duration::from_secs(5)).await;
        }
        waits_for_budget.end(false);
        assert_eq!(count(&gate, false), 20, "each of its calls took a second");
        let given_up = gate.enter(&owner("shop", 0), false).unwrap();
        let running = given_up.calls().begin();
        tokio::time::advance(SUSPECTED_FOR).await;
        drop(running);
        drop(given_up);
        assert_eq!(count(&gate, false), all);
        let failing: Vec<_> =
            (100..120).filter_map(|number| gate.enter(&owner("shop", number), true).ok()).collect();
        assert_eq!(count(&gate, false), PLACES.1, "those that fail leave a place to others");
        drop(failing);
    }

    /// One namespace has thirty changes that hang for half a minute, and comes again all the time. Another one's changes wait for a hang at
    /// most, and while both have some, each has half of the places.
    #[tokio::test(start_paused = true)]
    async fn namespaces_take_turns() {
        for has_failed in [false, true] {
            let gate = ChangeGate::default();
            hang(&gate, "many").await;
            let mut running: Vec<(Instant, EnteredChange<'_>, &str)> = Vec::new();
            let mut began = Vec::new();
            let start = Instant::now();
            while began.len() < 6 && start.elapsed() < Duration::from_mins(10) {
                let now = Instant::now();
                let is_over = |(at, ..): &(Instant, EnteredChange<'_>, &str)| *at <= now;
                for (_, ended, _) in running.extract_if(.., |found| is_over(found)) {
                    ended.end(false);
                }
                // The many come first each time.
                let many = (0..30).map(|number| ("many", number));
                let one = (0..6).filter(|_| start.elapsed() >= Duration::from_secs(10));
                for (namespace, number) in many.chain(one.map(|number| ("one", number))) {
                    if namespace == "one" && began.contains(&number) {
                        continue;
                    }
                    if let Ok(entered) = gate.enter(&owner(namespace, number), has_failed) {
                        running.push((now + Duration::from_secs(30), entered, namespace));
                        if namespace == "one" {
                            began.push(number);
                            let waited = start.elapsed().saturating_sub(Duration::from_secs(10));
                            let most = Duration::from_secs(31 + 30 * u64::try_from(number).unwrap());
                            assert!(waited <= most, "{number} waited {waited:?}");
                        }
                    }
                }
                tokio::time::advance(Duration::from_secs(1)).await;
            }
            assert_eq!(began, (0..6).collect::<Vec<_>>(), "whoever came first is first");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turn_is_kept_until_its_change_stays_away_or_lets_others_pass() {
        let gate = ChangeGate::default();
        hang(&gate, "shop").await;
        let running: Vec<_> =
            (0..4).map(|number| gate.enter(&owner("shop", number), false).unwrap()).collect();
        let first = gate.enter(&owner("shop", 10), false).err().unwrap();
        assert_eq!(first, ChangeWait { after: SOON, is_long: false });
        assert!(gate.enter(&owner("shop", 11), false).is_err());
        for ended in running {
            ended.end(false);
        }
        let later: Vec<_> = (0..4).map(|number| gate.enter(&owner("shop", number), false)).collect();
        let begun: Vec<bool> = later.iter().map(Result::is_ok).collect();
        assert_eq!(begun, [true, true, false, false], "two places are kept for those that wait");
        let may_begin = |number: usize| gate.check(&owner("shop", number), false).is_ok();
        gate.let_pass(&owner("shop", 10));
        assert_eq!([2, 3].map(may_begin), [true, false]);
        assert_eq!([10, 2].map(may_begin), [true, false], "it has kept its turn");
        tokio::time::advance(SOON + KEEPS_TURN).await;
        assert!(may_begin(30), "all others stayed away");
    }

    #[tokio::test(start_paused = true)]
    async fn long_wait_is_told() {
        let gate = ChangeGate::default();
        hang(&gate, "shop").await;
        let running: Vec<_> =
            (0..4).map(|number| gate.enter(&owner("shop", number), false).unwrap()).collect();
        let mut told = Vec::new();
        for _ in 0..8 {
            told.push(gate.enter(&owner("shop", 10), false).err().unwrap().is_long);
            tokio::time::advance(Duration::from_secs(5)).await;
        }
        assert_eq!(told, [false, false, false, false, false, false, true, true]);
        let many = (11..40).map(|number| gate.enter(&owner("shop", number), false).err().unwrap().after);
        assert_eq!(many.max(), Some(ROUND.1));
        drop(running);
    }
}
