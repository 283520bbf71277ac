// SPDX-License-Identifier: Apache-2.0
//! Looks after load balancers that several Services share: lets one Service at a time change one, removes what a Service has there, and
//! deletes a load balancer that nobody uses. `shared` decides what is wanted, `shared_use` remembers.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::desired::Desired;
use crate::finish::SetTargets;
use crate::groups_in_use::in_use;
use crate::inventory::Inventory;
use crate::observe::Resources;
use crate::provider::{Aws, RELEASE_POLL};
use crate::reasons;
use crate::shared::{self, LoadBalancerUse};
use crate::shared_use::SharedUse;
use crate::state::ServiceState;
use crate::wanted_targets::WantedTargets;

/// A Service waits for this time while another one changes the load balancer, and then makes room for others.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// A Service that gets no turn comes again: after this time, or as its place in the line says.
const BUSY_POLL: Duration = Duration::from_secs(2);
/// A Service in line tries again after this time for each place, so that the first meets the end of a change soon, and many cost few tries.
const TURN_POLL: Duration = Duration::from_millis(500);
/// The longest of these waits.
const MAX_TURN_POLL: Duration = Duration::from_secs(5);
/// A Service that comes later than this after the wait that it was given loses its place: it may be gone.
const KEEPS_PLACE: Duration = Duration::from_secs(10);
/// A shared load balancer without any target group stays for this time: a Service may be about to use it.
const UNUSED_AFTER: Duration = Duration::from_mins(10);
/// A Service that is deleted waits this long for the end of its load balancer. Later, lists show that nobody uses it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(30);

/// A change of a shared load balancer. One that is abandoned may have changed something until then.
struct Change {
    used: OwnedMutexGuard<SharedUse>,
    is_over: bool,
}

impl Deref for Change {
    type Target = SharedUse;

    fn deref(&self) -> &SharedUse {
        &self.used
    }
}

impl DerefMut for Change {
    fn deref_mut(&mut self) -> &mut SharedUse {
        &mut self.used
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        if !self.is_over {
            self.used.written = Instant::now();
        }
    }
}

/// Everything is as it was; call again.
pub(crate) fn again(after: Duration) -> Outcome {
    Outcome { progress: Progress::Again(after), ..Outcome::done() }
}

/// When a Service in line tries again that has so many before it.
fn turn_poll(before: usize) -> Duration {
    let places = u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1);
    TURN_POLL.saturating_mul(places).min(MAX_TURN_POLL)
}

/// The same outcome of a Service that waits for its turn: it comes again then.
fn again_in_turn(outcome: Outcome, wait: Duration) -> Outcome {
    match outcome.progress {
        Progress::Again(_) => Outcome { progress: Progress::Again(wait), ..outcome },
        Progress::Done => Outcome { retry_refused: Some(wait), ..outcome },
    }
}

fn is_port_in_use(outcome: &Result<Outcome, Error>) -> bool {
    outcome.as_ref().is_err_and(|error| error.reason() == reasons::PORT_IN_USE)
}

/// The wanted ports that others have, as far as it is known.
fn ports_of_others(owner: &Owner, wanted: &Desired, entry: &ServiceState) -> BTreeSet<u16> {
    let wanted = wanted.listeners.iter().map(|listener| listener.port);
    match &entry.resources {
        Some((known, Resources { foreign_listeners, .. })) if known == owner => {
            wanted.filter(|port| foreign_listeners.iter().any(|other| other.port == *port)).collect()
        }
        _ => wanted.collect(),
    }
}

impl Aws {
    /// Brings a Service in place at a shared load balancer. Only its own targets change without the lock.
    pub(crate) async fn apply_shared(
        &self,
        shared: &str,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let owner = &lb.owner;
        let is_in_place = entry.is_complete(owner, &wanted)
            && !entry.must_verify()
            && !entry.must_compare
            && entry.subnets.tried.is_some()
            && (!entry.has_ipv6(owner) || entry.source_nat.tried.is_some());
        if compare == Compare::Remembered && is_in_place {
            self.leave_line(owner, entry);
            return self.apply_wanted(lb, wanted, entry, compare).await;
        }
        // A turn at the load balancer would be lost where the change may not begin.
        if (entry.must_compare || entry.has_change_to_try(owner, &wanted, compare))
            && let Err(wait) = self.changes.check(owner, entry.has_failed_change())
        {
            entry.waits_at_gate = Some(wait);
            let mut outcome = self.follow_targets(lb, &wanted, entry, compare).await;
            entry.report_failing(owner, &mut outcome);
            entry.report_waiting(owner, &mut outcome);
            return Ok(again_in_turn(outcome, wait.after));
        }
        let used = match self.lock_in_turn(shared, owner).await {
            Ok(used) => used,
            Err(wait) => {
                self.changes.let_pass(owner);
                let mut outcome = self.follow_targets(lb, &wanted, entry, compare).await;
                entry.report_failing(owner, &mut outcome);
                return Ok(again_in_turn(outcome, wait));
            }
        };
        if let Some(wait) = self.check_use(owner, LoadBalancerUse::Shared(shared.to_owned()), entry).await? {
            return Ok(again(wait));
        }
        let started = Instant::now();
        let mut used = Change { used, is_over: false };
        entry.others_wrote = Some(used.written);
        let compare = if entry.must_compare { Compare::InPlace } else { compare };
        entry.subnets.added = entry.subnets.added.max(Some(used.zone_added));
        let was_known = entry.resources.is_some();
        let mut outcome = self.apply_wanted(lb, wanted.clone(), entry, compare).await;
        if was_known && is_port_in_use(&outcome) {
            // The port's owner may have left since the last read.
            (entry.resources, entry.complete) = (None, None);
            outcome = self.apply_wanted(lb, wanted.clone(), entry, Compare::InPlace).await;
        }
        if entry.written.is_some_and(|own| own >= started) {
            used.written = Instant::now();
        }
        used.is_over = true;
        entry.must_compare &= outcome.is_err();
        entry.incomplete = outcome.as_ref().ok().and_then(|outcome| outcome.incomplete.clone());
        used.zone_added = entry.subnets.added.map_or(used.zone_added, |own| own.max(used.zone_added));
        for (arn, port) in std::mem::take(&mut entry.freed) {
            self.free(&mut used, arn, port);
        }
        let mut waits_for = BTreeSet::new();
        if is_port_in_use(&outcome) {
            waits_for = ports_of_others(owner, &wanted, entry);
            if used.was_freed(&waits_for, self.config.settle) {
                return Err(Error::Conflict(format!("AWS may still show a deleted listener of {shared}")));
            }
        }
        used.wait_for(owner, waits_for);
        outcome
    }

    /// The Service no longer waits for its turn to change a shared load balancer: it is in place, or refused.
    pub(crate) fn leave_line(&self, owner: &Owner, entry: &ServiceState) {
        if let Some(LoadBalancerUse::Shared(shared)) = entry.uses.get(owner) {
            self.shared_lines.leave(shared, owner);
        }
        self.changes.leave(owner);
    }

    /// Another Service changes the load balancer, or changes of others hang, which can take a minute. The targets of this one follow meanwhile in the groups that it
    /// has. Whatever becomes of them, it comes again in its turn.
    async fn follow_targets(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Outcome {
        entry.must_compare |= compare == Compare::InPlace;
        let targets = WantedTargets::new(&self.config, &lb.owner.service, &lb.targets());
        if !entry.is_complete(&lb.owner, wanted) {
            self.follow_meanwhile(&lb.owner, entry, (&targets, Some(wanted))).await;
            return again(BUSY_POLL);
        }
        let limits = self.limits(entry, Compare::Remembered);
        let SetTargets { refused, exceeded, .. } = match self.converge_targets(entry, &targets, limits).await
        {
            Ok(set) => set,
            Err(error) => {
                tracing::debug!(service = %lb.owner.service, %error, "targets not set; retrying");
                return again(BUSY_POLL);
            }
        };
        let Some(ingress) = entry.complete.as_ref().and_then(|complete| complete.ingress.clone()) else {
            return Outcome { refused, ..again(BUSY_POLL) };
        };
        // Only a comparison waits: nothing that the Service's status should say.
        let incomplete = entry.incomplete.clone();
        let retry_refused = Some(BUSY_POLL);
        let mut outcome = Outcome { ingress, refused, incomplete, retry_refused, ..Outcome::done() };
        if let Some(exceeded) = exceeded.filter(|_| outcome.incomplete.is_none()) {
            exceeded.report(&mut outcome);
        }
        outcome
    }

    /// Calls those who wait for the port of a listener that was deleted.
    fn free(&self, used: &mut SharedUse, arn: String, port: u16) {
        for owner in used.deleted(arn, port) {
            self.to_reconcile.add(owner);
        }
    }

    /// Waits until it is the owner's turn to change this shared load balancer; when to come again if that takes longer. Whoever came first
    /// is first: else one that changes all the time would seldom leave a gap that another one meets.
    async fn lock_in_turn(
        &self,
        shared: &str,
        owner: &Owner,
    ) -> Result<OwnedMutexGuard<SharedUse>, Duration> {
        let line = shared.to_owned();
        let before = self
            .shared_lines
            .join(&line, (owner, owner.service.namespace()), |before| turn_poll(before) + KEEPS_PLACE);
        if before == 0
            && let Some(used) = self.lock_shared(shared, LOCK_TIMEOUT).await
        {
            self.shared_lines.take(&line, owner);
            return Ok(used);
        }
        Err(turn_poll(before))
    }

    /// Waits until no other Service changes this shared load balancer; `None` if that takes longer.
    async fn lock_shared(&self, shared: &str, patience: Duration) -> Option<OwnedMutexGuard<SharedUse>> {
        let start = *self.first_call.get_or_init(Instant::now);
        let unknown = || SharedUse::unknown_before(start);
        self.shared_uses.lock_within(patience, &shared.to_owned(), unknown).await
    }

    /// Refuses a Service that has something at another load balancer than it requests. Returns when to call again if reads do not tell
    /// yet.
    pub(crate) async fn check_use(
        &self,
        owner: &Owner,
        wanted: LoadBalancerUse,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        if let Some(now) = entry.uses.get(owner).filter(|now| **now != wanted).cloned() {
            let has_any = |found: &Resources| {
                let has_balancer = now == LoadBalancerUse::Own && found.balancer.is_some();
                has_balancer || !found.groups.is_empty() || !found.listeners.is_empty()
            };
            let known = entry.resources.as_ref().filter(|(known, _)| known == owner);
            let is_there = match known {
                Some((_, found)) if has_any(found) => true,
                _ => match entry.unsettled(self.config.settle) {
                    Some(wait) => return Ok(Some(wait)),
                    None => has_any(&self.read(owner, entry).await?.mine),
                },
            };
            if is_there {
                return Err(shared::immutable(&now, &wanted));
            }
            entry.must_read_all();
        }
        entry.uses.insert(owner.clone(), wanted);
        Ok(None)
    }

    /// Removes the listeners and target groups of the owner from the shared load balancer, and the load balancer after the last one.
    /// Returns when to call again; `None` if nothing of the owner is left.
    pub(crate) async fn leave_shared(
        &self,
        owner: &Owner,
        shared: &str,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let mut used = match self.lock_in_turn(shared, owner).await {
            Ok(used) => used,
            Err(wait) => return Ok(Some(wait)),
        };
        if let Some(wait) = entry.unsettled(self.config.settle) {
            // Reads may not show what was just created.
            return Ok(Some(wait));
        }
        let seen = self.read(owner, entry).await?;
        if let (None, Some(problem)) = (&seen.mine.balancer, seen.foreign.first()) {
            return Err(Error::invalid(reasons::OBJECT_NOT_OWNED, problem));
        }
        if entry.resources.as_ref().is_some_and(|(known, _)| known == owner) {
            (entry.resources, entry.complete) = (None, None);
            entry.leaving.clear();
        }
        used.wait_for(owner, BTreeSet::new());
        for listener in &seen.mine.listeners {
            tracing::info!(service = %owner.service, shared, port = listener.port, "deleting listener");
            self.note_change();
            entry.written = Some(Instant::now());
            self.client.delete_listener(&listener.arn).await?;
            self.free(&mut used, listener.arn.clone(), listener.port);
        }
        for (name, group) in &seen.mine.groups {
            tracing::info!(service = %owner.service, name, "deleting target group");
            entry.written = Some(Instant::now());
            if let Some(retry) = self.delete_group(&group.arn, &mut entry.groups_in_use).await? {
                return if retry.is_overdue { Err(in_use(name, &group.arn)) } else { Ok(Some(retry.after)) };
            }
            entry.registered.remove(&group.arn);
        }
        if entry.resources.is_none() {
            entry.names.retain(|name| seen.stale.groups.contains_key(name));
        }
        let since = *entry.left_shared.get_or_insert_with(Instant::now);
        let Some(balancer) = &seen.mine.balancer else { return Ok(None) };
        let mut others = seen.mine.foreign_listeners.iter().chain(&seen.stale.listeners);
        if others.any(|listener| !used.is_deleted(&listener.arn)) {
            return Ok(None);
        }
        // Another Service may have a listener that this read does not show.
        let has_groups = !seen.mine.foreign_groups.is_empty() || !seen.stale.groups.is_empty();
        let wait = used.unsettled(self.config.settle).or(has_groups.then_some(RELEASE_POLL));
        match wait {
            Some(wait) if since.elapsed() < LEAVE_TIMEOUT => Ok(Some(wait)),
            Some(_) => Ok(None),
            None => self.delete_shared_balancer(shared, balancer).await.map(|()| None),
        }
    }

    async fn delete_shared_balancer(&self, shared: &str, balancer: &Balancer) -> Result<(), Error> {
        tracing::info!(shared, name = balancer.name, "deleting shared load balancer, which no Service uses");
        self.note_change();
        match self.client.delete_balancer(&balancer.arn).await {
            // The operator may have protected it. Services are deleted all the same.
            Err(failure) if failure.is("OperationNotPermitted") => {
                let error = failure.message();
                tracing::info!(
                    shared,
                    name = balancer.name,
                    error,
                    "shared load balancer not deleted; trying again later"
                );
                Ok(())
            }
            done => Ok(done?),
        }
    }

    /// Deletes shared load balancers that no list has shown in use for some time, as after a crash between two calls.
    pub(crate) async fn delete_unused_shared(&self, read: &Inventory) {
        for (shared, balancer) in self.unused_for_long(read) {
            // A Service that holds the lock uses the load balancer.
            let Some(used) = self.lock_shared(&shared, Duration::ZERO).await else { continue };
            if used.unsettled(UNUSED_AFTER).is_some() {
                continue;
            }
            let deleted = match self.client.listeners(&balancer.arn).await {
                Ok(Some(listeners)) if listeners.is_empty() => {
                    self.delete_shared_balancer(&shared, &balancer).await
                }
                Ok(_) => Ok(()),
                Err(failure) => Err(failure.into()),
            };
            if let Err(error) = deleted {
                tracing::warn!(shared, %error, "shared load balancer that no Service uses not deleted; trying again later");
            }
        }
    }

    fn unused_for_long(&self, read: &Inventory) -> Vec<(String, Balancer)> {
        let mut since = self.unused_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.retain(|arn, _| read.unused_shared.iter().any(|(_, balancer)| balancer.arn == *arn));
        let mut is_due = |balancer: &Balancer| {
            since.entry(balancer.arn.clone()).or_insert_with(Instant::now).elapsed() >= UNUSED_AFTER
        };
        read.unused_shared.iter().filter(|(_, balancer)| is_due(balancer)).cloned().collect()
    }
}
