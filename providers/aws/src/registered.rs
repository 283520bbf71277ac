// SPDX-License-Identifier: Apache-2.0
//! The registered targets of a target group, as last read or changed, and when others may leave. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_provider_api::{Compare, HealthState};
use tokio::time::Instant;

use crate::client::{CallError, RegisteredTarget};
use crate::target_id::{TargetId, TargetNames};
use crate::targets::Limits;

/// Read the targets from AWS again after this time, to repair changes by others.
const MAX_CACHE_AGE: Duration = Duration::from_mins(10);
/// Targets that must leave wait at most this long for the health of those that replace them.
pub(crate) const MAX_HOLD: Duration = Duration::from_mins(5);
/// Look at health again after this time while targets wait.
pub(crate) const HOLD_POLL: Duration = Duration::from_secs(15);

/// A listing of targets also tells their health for this time.
const SHARED_AGE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(crate) struct RegisteredIds {
    /// With the state of the last read.
    ids: BTreeMap<TargetId, HealthState>,
    /// Targets of a call whose answer left open what it did.
    unconfirmed: BTreeSet<TargetId>,
    /// `None` for a new group, which no read may show yet.
    read: Option<Instant>,
    written: Option<Instant>,
    /// Since when targets that must leave wait.
    held: Option<Instant>,
    looked: Option<Instant>,
    /// What the listing said.
    listing: Vec<RegisteredTarget>,
}

impl RegisteredIds {
    /// From a listing. A draining target is no longer registered.
    pub(crate) fn of(targets: &[RegisteredTarget]) -> Self {
        let registered = targets.iter().filter(|t| t.state != HealthState::Draining);
        Self {
            ids: registered.map(|t| (t.id.clone(), t.state)).collect(),
            unconfirmed: BTreeSet::new(),
            read: Some(Instant::now()),
            written: None,
            held: None,
            looked: None,
            listing: targets.to_vec(),
        }
    }

    /// Of a group that was created a moment ago.
    pub(crate) fn new() -> Self {
        Self { read: None, written: Some(Instant::now()), ..Self::of(&[]) }
    }

    /// Takes over a listing, unless it may be older than the last change. Then only the states count.
    pub(crate) fn refresh(&mut self, targets: &[RegisteredTarget], settle: Duration) {
        if self.is_settled(settle) {
            let (held, looked) = (self.held, Some(Instant::now()));
            *self = Self { held, looked, listing: Vec::new(), ..Self::of(targets) };
        } else {
            self.look(targets);
        }
    }

    /// The listing, if it was made a moment ago and nothing was changed since.
    pub(crate) fn just_read(&self) -> Option<Vec<RegisteredTarget>> {
        let is_recent = self.read.is_some_and(|read| read.elapsed() < SHARED_AGE);
        (self.written.is_none() && is_recent).then(|| self.listing.clone())
    }

    pub(crate) fn is_settled(&self, settle: Duration) -> bool {
        self.written.is_none_or(|written| written.elapsed() >= settle)
    }

    /// Whether a read would tell more. What was changed in the last seconds may be newer than a read.
    pub(crate) fn is_reliable(&self, limits: Limits) -> bool {
        limits.compare == Compare::Remembered
            || self.read.is_some_and(|read| read.elapsed() < MAX_CACHE_AGE)
            || !self.is_settled(limits.settle)
    }

    pub(crate) fn has(&self, id: &TargetId) -> bool {
        self.ids.contains_key(id) && !self.unconfirmed.contains(id)
    }

    /// The targets that are or may be registered, but not wanted.
    pub(crate) fn others(&self, wanted: &TargetNames) -> Vec<TargetId> {
        let all: BTreeSet<&TargetId> = self.ids.keys().chain(&self.unconfirmed).collect();
        all.into_iter().filter(|id| !wanted.contains_key(*id)).cloned().collect()
    }

    /// Those of the others that may leave to make room: not the last one while no wanted one is registered.
    pub(crate) fn replaceable(&self, wanted: &TargetNames) -> Vec<TargetId> {
        let mut others = self.others(wanted);
        if !self.ids.keys().any(|id| wanted.contains_key(id) && self.has(id)) {
            others.pop();
        }
        others
    }

    /// The registered targets.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &TargetId> {
        self.ids.keys()
    }

    /// Whether no target is registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Notes a call with these targets that is about to be made, so that an abandoned one leaves them unconfirmed. Returns those that
    /// were unconfirmed before.
    pub(crate) fn mark_unconfirmed(&mut self, ids: &[TargetId]) -> BTreeSet<TargetId> {
        let before = self.unconfirmed.clone();
        self.unconfirmed.extend(ids.iter().cloned());
        self.written = Some(Instant::now());
        before
    }

    /// Takes back the marks of a failed call, if it surely changed nothing.
    pub(crate) fn restore(&mut self, before: BTreeSet<TargetId>, failure: &CallError) {
        // It may have been sent long after it was noted.
        self.written = Some(Instant::now());
        if !failure.leaves_open() {
            self.unconfirmed = before;
        }
    }

    pub(crate) fn set_registered(&mut self, ids: &[TargetId]) {
        self.written = Some(Instant::now());
        for id in ids {
            self.unconfirmed.remove(id);
            self.ids.insert(id.clone(), HealthState::Initial);
        }
        self.looked = None;
    }

    pub(crate) fn set_deregistered(&mut self, ids: &[TargetId]) {
        self.written = Some(Instant::now());
        for id in ids {
            self.unconfirmed.remove(id);
            self.ids.remove(id);
        }
    }

    /// Notes the states of a listing.
    pub(crate) fn look(&mut self, targets: &[RegisteredTarget]) {
        self.looked = Some(Instant::now());
        for target in targets {
            if let Some(state) = self.ids.get_mut(&target.id) {
                *state = target.state;
            }
        }
    }

    fn any_healthy(&self, is_of: impl Fn(&TargetId) -> bool) -> bool {
        self.ids.iter().any(|(id, state)| is_of(id) && *state == HealthState::Healthy)
    }

    /// Whether the health of the targets decides if others may leave, and was not read lately.
    pub(crate) fn needs_look(&self, wanted: &TargetNames) -> bool {
        !wanted.is_empty()
            && !self.any_healthy(|id| wanted.contains_key(id))
            && self.looked.is_none_or(|looked| looked.elapsed() >= HOLD_POLL)
    }

    /// Whether there are targets, but none was healthy.
    pub(crate) fn is_undecided(&self) -> bool {
        !self.ids.is_empty() && !self.any_healthy(|_| true)
    }

    /// When to look again, if targets must wait before they leave: none of the wanted is healthy, but one that must leave is. A target
    /// whose node is gone fails its checks, and holds nothing.
    pub(crate) fn hold(&mut self, wanted: &TargetNames) -> Option<Duration> {
        let must_wait = self.ids.keys().any(|id| wanted.contains_key(id))
            && !self.any_healthy(|id| wanted.contains_key(id))
            && self.any_healthy(|id| !wanted.contains_key(id));
        let since = *self.held.get_or_insert_with(Instant::now);
        (must_wait && since.elapsed() < MAX_HOLD).then_some(HOLD_POLL)
    }

    /// Nothing waits.
    pub(crate) fn release(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call waits for its budget for longer than reads are old, and the read after it shows the state before it.
    #[tokio::test(start_paused = true)]
    async fn a_late_call_is_newer_than_the_read_after_it() {
        let settle = Duration::from_secs(10);
        let target = |name: &str| RegisteredTarget {
            id: TargetId::of(name, Some(80)),
            state: HealthState::Healthy,
            reason: String::new(),
        };
        let (stays, leaves) = (target("i-1"), target("i-2"));
        let mut known = RegisteredIds::of(&[stays.clone(), leaves.clone()]);
        known.mark_unconfirmed(std::slice::from_ref(&leaves.id));
        tokio::time::advance(2 * settle).await;
        known.set_deregistered(std::slice::from_ref(&leaves.id));
        known.refresh(&[stays.clone(), leaves.clone()], settle);
        assert!(known.has(&stays.id) && !known.has(&leaves.id));
        let comes = target("i-3");
        known.mark_unconfirmed(std::slice::from_ref(&comes.id));
        tokio::time::advance(2 * settle).await;
        known.set_registered(std::slice::from_ref(&comes.id));
        known.refresh(std::slice::from_ref(&stays), settle);
        assert!(known.has(&comes.id));
        tokio::time::advance(settle).await;
        known.refresh(&[stays], settle);
        assert!(!known.has(&comes.id), "somebody else removed it");
    }
}
