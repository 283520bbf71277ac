// SPDX-License-Identifier: Apache-2.0
//! Looks after load balancers that several Services share: keeps their Services from changing one at the same time, removes what one
//! Service has there, and deletes a load balancer that nobody uses. `shared` decides what is wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::desired::Desired;
use crate::inventory::Inventory;
use crate::provider::{Aws, RELEASE_POLL};
use crate::reasons;
use crate::shared::{self, Place};
use crate::state::ServiceState;

/// What is known of a shared load balancer, behind the lock of its Services.
#[derive(Debug, Default)]
pub(crate) struct SharedUse {
    /// When one of them last changed something: reads show it only later.
    written: Option<Instant>,
    /// The listeners that were deleted, by ARN: reads may still show them.
    deleted: BTreeMap<String, Instant>,
    /// Services that were refused a port of others. They are called again when a port becomes free.
    waiting: BTreeSet<Owner>,
}

/// A shared load balancer without any target group stays for this time: a Service may be about to use it.
const UNUSED_AFTER: Duration = Duration::from_mins(10);

impl SharedUse {
    fn unsettled(&self, settle: Duration) -> Option<Duration> {
        let rest = (self.written? + settle).saturating_duration_since(Instant::now());
        (!rest.is_zero()).then_some(rest)
    }
}

/// The ports that an owner has at its load balancer, by listener.
fn ports(owner: &Owner, entry: &ServiceState) -> BTreeMap<String, u16> {
    let known = entry.resources.as_ref().filter(|(known, _)| known == owner);
    let listeners = known.into_iter().flat_map(|(_, resources)| &resources.listeners);
    listeners.map(|listener| (listener.arn.clone(), listener.port)).collect()
}

impl Aws {
    /// Brings a Service in place at a shared load balancer.
    pub(crate) async fn apply_shared(
        &self,
        shared: &str,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let mut used = self.lock_shared(shared).await;
        self.check_place(&lb.owner, Place::Shared(shared.to_owned()), entry).await?;
        let before = ports(&lb.owner, entry);
        let outcome = self.apply_wanted(lb, wanted, entry, compare).await;
        used.written = used.written.max(entry.written);
        let after = ports(&lb.owner, entry);
        let gone = before.keys().filter(|listener| !after.contains_key(*listener));
        if outcome.is_ok() && self.note_deleted(&mut used, gone) {
            tracing::debug!(service = %lb.owner.service, shared, "ports of a shared load balancer became free");
        }
        if matches!(&outcome, Err(error) if error.reason() == reasons::PORT_IN_USE) {
            if used.deleted.values().any(|at| at.elapsed() < self.config.settle) {
                return Err(Error::Conflict(format!("AWS may still show a deleted listener of {shared}")));
            }
            used.waiting.insert(lb.owner.clone());
        } else {
            used.waiting.remove(&lb.owner);
        }
        outcome
    }

    /// Remembers deleted listeners, and calls those who wait for a port. Returns whether there are any.
    fn note_deleted<'a>(&self, used: &mut SharedUse, listeners: impl Iterator<Item = &'a String>) -> bool {
        used.deleted.retain(|_, at| at.elapsed() < UNUSED_AFTER);
        let count = used.deleted.len();
        used.deleted.extend(listeners.map(|listener| (listener.clone(), Instant::now())));
        let is_some = used.deleted.len() > count;
        if is_some {
            for owner in std::mem::take(&mut used.waiting) {
                // Without a receiver nobody follows changes.
                let _ = self.to_reconcile.0.unbounded_send(owner);
            }
        }
        is_some
    }

    /// Waits until no other Service changes this shared load balancer.
    pub(crate) async fn lock_shared(&self, shared: &str) -> OwnedMutexGuard<SharedUse> {
        let lock = {
            let mut locks = self.shared_locks.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(locks.entry(shared.to_owned()).or_default())
        };
        lock.lock_owned().await
    }

    /// Refuses a Service that has its ports at another load balancer than it requests.
    pub(crate) async fn check_place(
        &self,
        owner: &Owner,
        wanted: Place,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if let Some(now) = entry.places.get(owner).filter(|now| **now != wanted).cloned() {
            let seen = self.read(owner, entry).await?.mine;
            let has_balancer = now == Place::Own && seen.balancer.is_some();
            if has_balancer || !seen.groups.is_empty() || !seen.listeners.is_empty() {
                return Err(shared::immutable(&now, &wanted));
            }
            // Nothing was created there.
            (entry.resources, entry.complete) = (None, None);
        }
        entry.places.insert(owner.clone(), wanted);
        Ok(())
    }

    /// Removes the listeners and target groups of the owner from the shared load balancer, and the load balancer after the last one.
    /// Returns when to call again; `None` if nothing is left.
    pub(crate) async fn leave_shared(
        &self,
        owner: &Owner,
        shared: &str,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let mut used = self.lock_shared(shared).await;
        if let Some(wait) = entry.unsettled(self.config.settle) {
            // Reads may not show what was just created.
            return Ok(Some(wait));
        }
        let seen = self.read(owner, entry).await?.mine;
        if entry.resources.as_ref().is_some_and(|(known, _)| known == owner) {
            (entry.resources, entry.complete) = (None, None);
            entry.leaving.clear();
        }
        for listener in &seen.listeners {
            tracing::info!(service = %owner.service, shared, port = listener.port, "deleting listener");
            self.note_change();
            self.client.delete_listener(&listener.arn).await?;
            self.note_deleted(&mut used, std::iter::once(&listener.arn));
        }
        for (name, group) in &seen.groups {
            tracing::info!(service = %owner.service, name, "deleting target group");
            self.note_change();
            if !self.client.delete_group(&group.arn).await? {
                return Ok(Some(RELEASE_POLL));
            }
            entry.registered.remove(&group.arn);
            if entry.resources.is_none() {
                entry.names.remove(name);
            }
        }
        let is_used = seen.foreign_listeners.iter().any(|listener| !used.deleted.contains_key(&listener.arn));
        if let Some(balancer) = seen.balancer.filter(|_| !is_used) {
            if let Some(wait) = used.unsettled(self.config.settle) {
                // Another Service may have a listener that reads do not show yet.
                return Ok(Some(wait));
            }
            self.delete_shared_balancer(shared, &balancer).await?;
        }
        Ok(None)
    }

    async fn delete_shared_balancer(&self, shared: &str, balancer: &Balancer) -> Result<(), Error> {
        tracing::info!(shared, name = balancer.name, "deleting shared load balancer, which no Service uses");
        self.note_change();
        match self.client.delete_balancer(&balancer.arn).await {
            // No Service waits for it.
            Err(failure) if failure.is("OperationNotPermitted") => {
                tracing::warn!(
                    shared,
                    name = balancer.name,
                    error = failure.message(),
                    "AWS refuses to delete a shared load balancer that no Service uses; trying again later. If it is protected, lift that"
                );
                Ok(())
            }
            done => Ok(done?),
        }
    }

    /// Deletes shared load balancers that no list has shown in use for some time, as after a crash between two calls.
    pub(crate) async fn delete_unused_shared(&self, read: &Inventory) {
        for (shared, balancer) in self.unused_for_long(read) {
            let used = self.lock_shared(&shared).await;
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
