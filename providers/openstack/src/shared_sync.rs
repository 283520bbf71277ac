// SPDX-License-Identifier: Apache-2.0
//! Looks after load balancers that several Services share: lets one Service at a time change one, finds what a Service has there, removes
//! it, and deletes a load balancer that nobody uses. `shared` decides what is wanted.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use steerage_provider_cloud::shared::{LoadBalancerUse, immutable};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::apply::not_shown;
use crate::client::{Call, list_of_project};
use crate::desired::Desired;
use crate::error::CallError;
use crate::marks;
use crate::observe;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::step::Step;
use crate::types::{Balancer, FloatingIp, Provisioning, Reference};

/// A Service waits for this time while another one changes the load balancer, and then makes room for others.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// A Service that gets no turn comes again after this time.
const BUSY_POLL: Duration = Duration::from_millis(500);
/// The longest time between two looks at a shared load balancer that is `PENDING`.
const LONGEST_BUSY_POLL: Duration = Duration::from_secs(5);
/// For how long a Service that is complete takes its parts away from a second load balancer of the name, before the next resync does.
const LONGEST_LEAVING: Duration = Duration::from_mins(2);
/// After a creation without an answer, no other load balancer of the name is created for this time: it may be in no list yet.
const UNANSWERED: Duration = Duration::from_mins(3);

/// A listener or pool of a Service in a shared load balancer.
#[derive(Clone, Debug, Deserialize)]
struct Part {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    loadbalancers: Vec<Reference>,
}

/// How far a Service has left a load balancer.
enum LeaveProgress {
    NothingLeft,
    /// The load balancer cannot be changed now.
    Pending(Box<Balancer>),
    /// A listener or pool was removed. There may be more.
    PartRemoved,
    /// The whole load balancer is being deleted.
    BalancerDeleted,
}

/// Listeners, then pools.
struct Parts {
    listeners: Vec<Part>,
    pools: Vec<Part>,
}

impl Parts {
    fn all(&self) -> impl Iterator<Item = &Part> {
        self.listeners.iter().chain(&self.pools)
    }

    /// The load balancers that they are in.
    fn balancers(&self) -> BTreeSet<&str> {
        self.all().flat_map(|part| &part.loadbalancers).map(|of| of.id.as_str()).collect()
    }
}

fn later(after: Duration) -> Outcome {
    Outcome { progress: Progress::Again(after), ..Outcome::done() }
}

impl OpenStack {
    async fn parts(&self, filter: (&str, &str)) -> Result<Parts, CallError> {
        let call = |action, path| Call::octavia(Method::GET, action, path, None);
        let calls = &*self.calls;
        Ok(Parts {
            listeners: list_of_project(calls, call("GET listeners", "listeners"), "listeners", &[filter])
                .await?,
            pools: list_of_project(calls, call("GET pools", "pools"), "pools", &[filter]).await?,
        })
    }

    /// What an owner has in shared load balancers.
    async fn parts_of(&self, owner: &Owner) -> Result<Parts, CallError> {
        let tags = marks::of_balancer(&self.config.cluster, owner).join(",");
        self.parts(("tags", &tags)).await
    }

    /// The owners of listeners and pools in shared load balancers.
    pub(crate) async fn part_owners(&self) -> Result<BTreeSet<Owner>, CallError> {
        let tags = marks::shared_filter(&self.config.cluster, None);
        let parts = self.parts(("tags", &tags)).await?;
        Ok(parts.all().filter_map(|part| marks::part_owner(&self.config.cluster, &part.tags)).collect())
    }

    /// The load balancers that are shared under a name, or all shared ones, the oldest first.
    pub(crate) async fn shared_balancers(&self, shared: Option<&str>) -> Result<Vec<Balancer>, CallError> {
        let tags = marks::shared_filter(&self.config.cluster, shared);
        let mut found = observe::balancers_with(&*self.calls, "tags", &tags).await?;
        let is_it = |balancer: &Balancer| {
            let name = marks::shared_name(&self.config.cluster, &balancer.tags);
            name.is_some_and(|name| shared.is_none_or(|shared| shared == name))
        };
        found.retain(is_it);
        found.sort_by(|one, other| (&one.created_at, &one.id).cmp(&(&other.created_at, &other.id)));
        Ok(found)
    }

    /// Those that are shared under a name, the one that its Services use first: a lost answer to a creation leaves two. It is the one with the
    /// address that clients know, then the one that most Services use.
    pub(crate) async fn shared_by_preference(&self, shared: &str) -> Result<Vec<Balancer>, CallError> {
        let found = self.shared_balancers(Some(shared)).await?;
        if found.len() < 2 {
            return Ok(found);
        }
        let ours = self.own_floating_ips(&marks::shared_floating(&self.config.cluster, shared)).await?;
        let mut keyed = Vec::new();
        for balancer in found {
            let parts = self.parts(("loadbalancer_id", &balancer.id)).await?;
            let users: BTreeSet<Owner> =
                parts.all().filter_map(|part| marks::part_owner(&self.config.cluster, &part.tags)).collect();
            let has_address = ours.iter().any(|ip| ip.port_id.as_deref() == Some(balancer.floating_port()));
            let status = balancer.provisioning_status;
            let key = (
                status == Provisioning::Deleting,
                !has_address,
                Reverse(users.len()),
                status == Provisioning::Error,
            );
            keyed.push((key, balancer));
        }
        // The oldest first among equals.
        keyed.sort_by_key(|(key, _)| *key);
        Ok(keyed.into_iter().map(|(_, balancer)| balancer).collect())
    }

    /// The shared load balancer in which the owner has something, with its name.
    pub(crate) async fn shared_balancer_of(
        &self,
        owner: &Owner,
    ) -> Result<Option<(String, Balancer)>, CallError> {
        for id in self.parts_of(owner).await?.balancers() {
            let Some(balancer) = self.balancer(id).await? else { continue };
            if let Some(name) = marks::shared_name(&self.config.cluster, &balancer.tags) {
                return Ok(Some((name, balancer)));
            }
        }
        Ok(None)
    }

    /// The names of the owner's listeners in shared load balancers.
    pub(crate) async fn shared_listeners(&self, owner: &Owner) -> Result<BTreeSet<String>, CallError> {
        Ok(self.parts_of(owner).await?.listeners.into_iter().map(|part| part.name).collect())
    }

    /// Waits a moment until no other Service changes the load balancer.
    async fn lock_shared(&self, shared: &str) -> Option<OwnedMutexGuard<()>> {
        self.shared_locks.lock_within(LOCK_TIMEOUT, &shared.to_owned(), || ()).await
    }

    /// Brings a Service in place at a shared load balancer.
    pub(crate) async fn apply_shared(
        &self,
        shared: &str,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let is_known = entry.complete.as_ref().is_some_and(|complete| {
            let reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
            complete.owner == lb.owner && complete.wanted == reduced
        });
        if compare == Compare::Remembered && is_known {
            // Nothing changes, so nobody is in the way.
            return self.apply_wanted(lb, wanted, entry, compare).await;
        }
        let Some(_lock) = self.lock_shared(shared).await else { return Ok(later(BUSY_POLL)) };
        let usage = LoadBalancerUse::Shared(shared.to_owned());
        if entry.usage != usage {
            entry.forget();
            self.check_use(&lb.owner, &usage, entry).await?;
            entry.usage = usage;
        }
        self.shared_users.note_accepted(&lb.owner.service);
        self.apply_wanted(lb, wanted, entry, compare).await
    }

    /// Refuses a Service that has something at another load balancer than it requests. [`Error::Busy`] while that is being deleted, as after
    /// a change of the Service's `type` and back. A deletion that has begun is continued: what it has left there serves only some clients.
    pub(crate) async fn check_use(
        &self,
        owner: &Owner,
        wanted: &LoadBalancerUse,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some((present, balancer)) = self.other_use(owner, wanted).await? else {
            self.reconcile_waiting(owner, entry);
            return Ok(());
        };
        if balancer.provisioning_status != Provisioning::Deleting {
            if !entry.is_being_deleted(owner) {
                return Err(immutable(&present, wanted, "address"));
            }
            self.delete_all(owner, entry).await?;
        }
        let id = &balancer.id;
        Err(Error::Busy(format!("What the Service has at the load balancer {id} is being deleted")))
    }

    /// Another load balancer than the owner requests, at which it has something.
    async fn other_use(
        &self,
        owner: &Owner,
        wanted: &LoadBalancerUse,
    ) -> Result<Option<(LoadBalancerUse, Balancer)>, CallError> {
        if let Some((name, balancer)) = self.shared_balancer_of(owner).await? {
            let present = LoadBalancerUse::Shared(name);
            if present != *wanted {
                return Ok(Some((present, balancer)));
            }
        }
        if *wanted == LoadBalancerUse::Own {
            return Ok(None);
        }
        let all = self.balancers_of(&owner.service).await?;
        let own = all.into_iter().find(|(of, _)| of == owner);
        Ok(own.map(|(_, balancer)| (LoadBalancerUse::Own, balancer)))
    }

    /// Deletes the address of a shared load balancer that the Service left, unless it uses that one now. Returns when to call again; `None`
    /// if it is done.
    pub(crate) async fn release_left(
        &self,
        used: Option<&str>,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let Some(left) = entry.left_shared.clone() else { return Ok(None) };
        if used != Some(left.as_str()) {
            let Some(_lock) = self.lock_shared(&left).await else { return Ok(Some(BUSY_POLL)) };
            self.release_shared(&left).await?;
        }
        entry.left_shared = None;
        Ok(None)
    }

    /// Removes what a Service has in shared load balancers, and those that nobody uses. Returns when to call again; `None` if nothing is
    /// left.
    pub(crate) async fn leave_shared(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let parts = self.parts_of(owner).await?;
        for id in parts.balancers() {
            let Some(balancer) = self.balancer(id).await? else { continue };
            let Some(shared) = marks::shared_name(&self.config.cluster, &balancer.tags) else { continue };
            let Some(_lock) = self.lock_shared(&shared).await else { return Ok(Some(BUSY_POLL)) };
            match self.leave_one(owner, &shared, id, entry).await? {
                LeaveProgress::NothingLeft => {}
                LeaveProgress::Pending(balancer) => return self.wait_to_leave(&balancer, entry).map(Some),
                LeaveProgress::PartRemoved => {
                    entry.leaving = Some(id.to_owned());
                    return Ok(Some(self.config.poll));
                }
                LeaveProgress::BalancerDeleted => return Ok(Some(self.config.poll.max(BUSY_POLL))),
            }
        }
        if let Some(wait) = self.release_left(None, entry).await? {
            return Ok(Some(wait));
        }
        self.reconcile_waiting(owner, entry);
        if entry.had_own {
            return Ok(None);
        }
        // What fails here is none of this Service's.
        match self.delete_unused(entry).await {
            Ok(true) => return Ok(Some(self.config.poll.max(BUSY_POLL))),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "shared load balancers without ports are left over; the next Service that leaves one tries again");
            }
        }
        Ok(None)
    }

    /// Deletes a shared load balancer without any port, as a crash may leave it. False if there is none.
    async fn delete_unused(&self, entry: &mut ServiceState) -> Result<bool, Error> {
        let mut failed = None;
        for balancer in self.shared_balancers(None).await? {
            let Some(shared) = marks::shared_name(&self.config.cluster, &balancer.tags) else { continue };
            let Some(_lock) = self.lock_shared(&shared).await else { continue };
            if balancer.provisioning_status.is_pending()
                || self.parts(("loadbalancer_id", &balancer.id)).await?.all().next().is_some()
            {
                continue;
            }
            match self.delete_shared(&shared, &balancer, entry).await {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(false), Err)
    }

    /// Removes one thing that the Service has in a load balancer that is shared under this name, whose lock the caller holds; the whole, if
    /// nobody else has anything in it.
    async fn leave_one(
        &self,
        owner: &Owner,
        shared: &str,
        id: &str,
        entry: &mut ServiceState,
    ) -> Result<LeaveProgress, Error> {
        let Some(balancer) = self.balancer(id).await? else {
            entry.freed_port_of = Some(shared.to_owned());
            return Ok(LeaveProgress::NothingLeft);
        };
        // By UID: a Service of the same name may have taken the others over.
        let is_mine = |part: &Part| marks::is_part(&part.tags, owner);
        if balancer.provisioning_status == Provisioning::Deleting {
            entry.freed_port_of = Some(shared.to_owned());
            // An earlier process may have begun that.
            if entry.left_shared.is_none() && self.parts(("loadbalancer_id", id)).await?.all().all(is_mine) {
                entry.left_shared = Some(shared.to_owned());
            }
            return Ok(LeaveProgress::Pending(Box::new(balancer)));
        }
        if balancer.provisioning_status.is_pending() {
            return Ok(LeaveProgress::Pending(Box::new(balancer)));
        }
        entry.note_settled();
        let all = self.parts(("loadbalancer_id", id)).await?;
        if all.all().all(is_mine) {
            entry.freed_port_of = Some(shared.to_owned());
            self.delete_shared(shared, &balancer, entry).await?;
            entry.note_deletion(&balancer)?;
            return Ok(LeaveProgress::BalancerDeleted);
        }
        if balancer.provisioning_status == Provisioning::Error {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the shared load balancer {id}, and lets nobody change it. The Service's ports are removed \
                 when it is repaired. To repair it, as Octavia's administrator: `openstack loadbalancer failover {id}`."
            )));
        }
        let step = match (
            all.listeners.iter().find(|part| is_mine(part)),
            all.pools.iter().find(|part| is_mine(part)),
        ) {
            (Some(listener), _) => {
                Step::DeleteListener { id: listener.id.clone(), port: listener.name.clone() }
            }
            (None, Some(pool)) => Step::DeletePool { id: pool.id.clone(), name: pool.name.clone() },
            (None, None) => return Ok(LeaveProgress::NothingLeft),
        };
        if !entry.may_make(&step) {
            return Err(not_shown(&step));
        }
        if matches!(step, Step::DeleteListener { .. }) {
            // Also if its answer is lost.
            entry.freed_port_of = Some(shared.to_owned());
        }
        match self.calls.send(step.call()).await {
            Ok(_) => {
                entry.note_made(&step);
                tracing::info!(service = %owner.service, shared, change = %step, "shared load balancer changed");
            }
            Err(failure) if failure.is_busy() || failure.is_not_found() => {}
            Err(failure) => return Err(failure.into()),
        }
        entry.sent();
        Ok(LeaveProgress::PartRemoved)
    }

    /// When to look again at a shared load balancer that cannot be changed now. An error if that is so for long.
    pub(crate) fn wait_to_leave(
        &self,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<Duration, Error> {
        entry.leaving = Some(balancer.id.clone());
        entry.changing.get_or_insert_with(Instant::now);
        entry.note_pending(balancer)?;
        // Others may change it all the time: who looks rarely never sees it between two changes.
        Ok(entry.poll(self.config.poll.max(BUSY_POLL)).min(LONGEST_BUSY_POLL))
    }

    /// Removes what a Service that is complete has in other load balancers of the name. Returns when to call again; `None` if nothing is
    /// left, or what is left goes at a later resync.
    pub(crate) async fn leave_others(
        &self,
        owner: &Owner,
        shared: &str,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        while let Some(other) = entry.spare.first().map(|other| other.id.clone()) {
            let since = *entry.leaving_since.get_or_insert_with(Instant::now);
            let left = if since.elapsed() < LONGEST_LEAVING {
                self.leave_one(owner, shared, &other, entry).await
            } else {
                Ok(LeaveProgress::NothingLeft)
            };
            match left {
                Ok(LeaveProgress::NothingLeft) => {}
                Ok(_) => return Ok(Some(self.config.poll.max(BUSY_POLL))),
                // It does no harm where it is.
                Err(error) => {
                    tracing::warn!(service = %owner.service, shared, id = other, %error, "Service's ports in a second load balancer of the name not removed; retrying at a later resync");
                }
            }
            entry.spare.remove(0);
            entry.leaving_since = None;
        }
        Ok(None)
    }

    /// [`Self::release_left`] for a Service that is served: a failure is logged and tried again. Returns whether the address is still there.
    pub(crate) async fn try_release_left(
        &self,
        owner: &Owner,
        used: Option<&str>,
        entry: &mut ServiceState,
    ) -> bool {
        match self.release_left(used, entry).await {
            Ok(wait) => wait.is_some(),
            Err(error) => {
                let shared = entry.left_shared.as_deref().unwrap_or_default();
                tracing::warn!(service = %owner.service, shared, %error, "address of the shared load balancer that the Service left not deleted; retrying");
                true
            }
        }
    }

    /// The load balancer goes first: if another Service changes it meanwhile, Octavia refuses, and the address stays. The address goes only
    /// if no other load balancer of the name is there, whose Services have it. False if it cannot be deleted now.
    async fn delete_shared(
        &self,
        shared: &str,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        tracing::info!(shared, id = balancer.id, "deleting shared load balancer, which no Service uses");
        let is_begun = self.delete_balancer(&balancer.id).await?;
        if is_begun {
            entry.left_shared = Some(shared.to_owned());
        }
        Ok(is_begun)
    }

    /// Deletes the floating IP of a name that has no load balancer any more, and that no Service names.
    async fn release_shared(&self, shared: &str) -> Result<(), Error> {
        if self.shared_users.keeps(shared) {
            return Ok(());
        }
        let others = self.shared_balancers(Some(shared)).await?;
        if others.iter().all(|other| other.provisioning_status == Provisioning::Deleting) {
            let ports: Vec<&str> = others.iter().map(Balancer::floating_port).collect();
            let mut ips =
                self.own_floating_ips(&marks::shared_floating(&self.config.cluster, shared)).await?;
            ips.retain(|ip| ip.port_id.as_deref().is_none_or(|port| ports.contains(&port)));
            self.release(None, &ips).await?;
        }
        self.shared_users.note_released(shared);
        Ok(())
    }

    /// Refuses to take the address from another load balancer of the name, whose Services would lose it: the one that has it is the one.
    pub(crate) async fn check_shared_address(
        &self,
        shared: &str,
        ip: &FloatingIp,
        port: &str,
    ) -> Result<(), Error> {
        let Some(other) = ip.port_id.as_deref().filter(|other| *other != port) else { return Ok(()) };
        let has_it = |balancer: &Balancer| {
            balancer.provisioning_status != Provisioning::Deleting && balancer.floating_port() == other
        };
        if self.shared_balancers(Some(shared)).await?.iter().any(has_it) {
            return Err(Error::Conflict(format!(
                "another load balancer of the name {shared} has its address"
            )));
        }
        Ok(())
    }

    /// A load balancer of the name is about to be created. Refused for some minutes after a request without an answer: what it made may be
    /// in no list yet, and another one would divide the Services.
    pub(crate) fn begin_shared_creation(&self, shared: &str) -> Result<(), Error> {
        let mut begun = self.shared_creations.lock().unwrap_or_else(PoisonError::into_inner);
        if begun.get(shared).is_some_and(|at| at.elapsed() < UNANSWERED) {
            return Err(Error::Unavailable(format!(
                "Octavia did not answer the creation of the shared load balancer {shared}. Steerage looks for it, and creates another one \
                 only after {} minutes.",
                UNANSWERED.as_secs() / 60
            )));
        }
        begun.insert(shared.to_owned(), Instant::now());
        Ok(())
    }

    /// The creation has an answer.
    pub(crate) fn end_shared_creation(&self, shared: &str) {
        self.shared_creations.lock().unwrap_or_else(PoisonError::into_inner).remove(shared);
    }
}

#[cfg(test)]
mod tests;
