// SPDX-License-Identifier: Apache-2.0
//! The state that the provider's calls and watch tasks share: the caches, the allocation, the notifier.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Client;
use steerage_edge_api::{
    AddressPool, AddressPoolSpec, EdgeHost, EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet,
    EdgeNodeSetSpec, EdgeTargetHealth, ReleasedAddress,
};
use steerage_model::{Family, Key};
use steerage_provider_api::{Error, LoadBalancer, Owner, ProviderNotice};
use steerage_watch::Event;
use tokio::sync::{Notify, OnceCell};

use crate::allocation::{Allocation, AssignedAddresses};
use crate::calls::Failure;
use crate::entry::{Change, Entry};
use crate::index::Index;
use crate::namespaces::{Namespace, Namespaces};
use crate::notifier::Notifier;
use crate::objects::{HealthContent, HostContent, LoadBalancerContent, NodeSetContent, Objects, PoolContent};
use crate::pools::PoolUsage;
use crate::{Pool, kept, pools, spec};

/// Timeout of the first lists.
const LISTED_WITHIN: Duration = Duration::from_secs(10);

mod health_changes;
mod pool_reports;
mod shared_sets;

pub use pool_reports::ADDRESS_POOL_NEARLY_FULL;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) balancers: Objects<LoadBalancerContent>,
    pub(crate) node_sets: Objects<NodeSetContent>,
    pub(crate) pools: Objects<PoolContent>,
    pub(crate) health: Objects<HealthContent>,
    pub(crate) hosts: Objects<HostContent>,
    pub(crate) notifier: Notifier<Owner>,
    pub(crate) namespaces: Namespaces,
    /// Held while a shared set is compared and written, so that one of many load balancers writes it.
    pub(crate) node_set_lock: tokio::sync::Mutex<()>,
    /// The newest value of each shared set, by name.
    offered_sets: Mutex<BTreeMap<&'static str, OfferedSet>>,
    /// The last version of each shared set that was compared, and the equal value.
    known_sets: Mutex<BTreeMap<&'static str, (String, Arc<EdgeNodeSetSpec>)>>,
    /// What the shared sets that load balancers use must contain, by name.
    wanted_sets: Mutex<BTreeMap<String, Arc<EdgeNodeSetSpec>>>,
    /// Load balancers that may use a shared set although their object in the cache does not, by object name.
    users: Mutex<BTreeMap<String, &'static str>>,
    /// The load balancers of writes without a response yet, by object name.
    writing: Mutex<BTreeMap<String, EdgeLoadBalancerSpec>>,
    /// Those of which the last write had no answer, and that were not read since, by object name.
    unread: Mutex<BTreeSet<String>>,
    allocation: Mutex<Allocation>,
    pub(crate) activated: OnceCell<()>,
    stale_pools: Notify,
    /// The namespace of all objects.
    namespace: String,
    pub(crate) notices: Notifier<ProviderNotice>,
    /// The kept addresses, and whether users were told.
    kept: Mutex<kept::KnownKept>,
    /// The pools and families that users were told are nearly full.
    full_pools: Mutex<BTreeSet<(String, String)>>,
    /// The nodes that users were told are drained.
    drained: Mutex<BTreeSet<String>>,
}

/// A value of a shared set.
#[derive(Debug)]
struct OfferedSet {
    generation: u64,
    spec: Arc<EdgeNodeSetSpec>,
    /// What [`spec::refused`] found in it for load balancers with these families.
    refused: BTreeMap<Vec<Family>, Vec<(String, String)>>,
}

impl Shared {
    pub(crate) fn new(client: &Client, namespace: &str) -> Self {
        Self {
            balancers: Objects::new::<EdgeLoadBalancer>(client, namespace, "edgeloadbalancers"),
            node_sets: Objects::new::<EdgeNodeSet>(client, namespace, "edgenodesets"),
            pools: Objects::new::<AddressPool>(client, namespace, "addresspools"),
            health: Objects::new::<EdgeTargetHealth>(client, namespace, "edgetargethealths"),
            hosts: Objects::new::<EdgeHost>(client, namespace, "edgehosts"),
            notifier: Notifier::default(),
            namespaces: Namespaces::default(),
            node_set_lock: tokio::sync::Mutex::default(),
            offered_sets: Mutex::default(),
            known_sets: Mutex::default(),
            wanted_sets: Mutex::default(),
            users: Mutex::default(),
            writing: Mutex::default(),
            unread: Mutex::default(),
            allocation: Mutex::default(),
            activated: OnceCell::new(),
            stale_pools: Notify::new(),
            namespace: namespace.to_owned(),
            notices: Notifier::default(),
            kept: Mutex::default(),
            full_pools: Mutex::default(),
            drained: Mutex::default(),
        }
    }

    /// Returns when all kinds have been listed.
    pub(crate) async fn listed(&self) {
        self.balancers.cache.listed().await;
        self.node_sets.cache.listed().await;
        self.pools.cache.listed().await;
        self.health.cache.listed().await;
        self.hosts.cache.listed().await;
    }

    /// Makes sure that the caches are fit to act on. The first time it reads the load balancers from the API server itself: the watch
    /// may lag behind the last writes of another controller that held the Lease until now.
    pub(crate) async fn activate(&self) -> Result<(), Error> {
        self.wait_for_lists().await?;
        self.need_namespaces();
        self.namespaces.settled().await;
        let first = async || {
            self.balancers.refresh().await?;
            self.restore_released();
            self.pools_are_stale();
            Ok(())
        };
        self.activated.get_or_try_init(first).await.copied()
    }

    /// Takes in the released addresses that an earlier process wrote.
    fn restore_released(&self) {
        let released: Vec<ReleasedAddress> = self.pools.cache.read(|rows| {
            let statuses = rows.filter_map(|entry| entry.content.as_ref().ok()?.status.clone());
            statuses.flat_map(|status| status.released).collect()
        });
        let mut allocation = self.allocation();
        self.balancers.cache.index(|index| allocation.restore(released, index));
    }

    /// Namespaces are watched from the first pool on that selects them by their labels.
    fn need_namespaces(&self) {
        let selects = |entry: &Entry<PoolContent>| {
            entry.content.as_ref().is_ok_and(|content| content.spec.namespace_selector.is_some())
        };
        if self.pools.cache.read(|rows| rows.filter(|entry| selects(entry)).count() > 0) {
            self.namespaces.need();
        }
    }

    /// The labels of namespaces changed: Services that wait may use a pool now.
    pub(crate) fn on_namespace(&self, event: Event<Namespace>) {
        if self.namespaces.apply(event) {
            let waiting = self.allocation().take_waiting();
            self.notify(&waiting);
            self.pools_are_stale();
        }
    }

    /// Waits until all kinds have been listed. Unlike [`Shared::activate`], it lets nothing be written.
    pub(crate) async fn wait_for_lists(&self) -> Result<(), Error> {
        tokio::time::timeout(LISTED_WITHIN, self.listed()).await.map_err(|_elapsed| {
            let message =
                "The edge's objects are not listed yet. Steerage retries. Check that the CRDs are installed, and that `helm upgrade` has \
                 given the controller this version's Role (list and watch edgehosts).";
            Error::Unavailable(message.to_owned())
        })
    }

    fn known_pools(&self) -> Vec<Pool> {
        self.pools.cache.read(|rows| {
            rows.filter_map(|entry| Some(Pool::new(&entry.name, &entry.content.as_ref().ok()?.spec)))
                .collect()
        })
    }

    /// The use of each pool, by its name. Empty until pools and load balancers are listed: a part of a list would show free pools.
    pub(crate) fn pool_usages(&self) -> Vec<(String, PoolUsage)> {
        if !self.pools.cache.is_listed() || !self.balancers.cache.is_listed() {
            return Vec::new();
        }
        let pools = self.known_pools();
        self.balancers.cache.index(|index| {
            let of_pool = |pool: &Pool| {
                pools::usage(pool, index.used())
                    .into_iter()
                    .map(|usage| (pool.name.clone(), usage))
                    .collect::<Vec<_>>()
            };
            pools.iter().flat_map(of_pool).collect()
        })
    }

    /// Allocates the addresses of a load balancer and reserves them until [`Shared::end_reservation`].
    pub(crate) fn allocate(&self, lb: &LoadBalancer) -> Result<Vec<IpAddr>, Error> {
        let current = self.balancers.cache.get(&spec::object_name(&lb.owner));
        let current = current.map(|entry| AssignedAddresses::of(&entry)).unwrap_or_default();
        let pools = self.known_pools();
        let namespace_labels = self.namespaces.labels(lb.owner.service.namespace());
        let mut allocation = self.allocation();
        if allocation.labels(&spec::object_name(&lb.owner)) != Some(&*lb.labels) {
            // A pool may not be for the Service any more.
            self.pools_are_stale();
        }
        self.balancers
            .cache
            .index(|index| allocation.allocate(lb, current, &pools, namespace_labels.as_ref(), index))
    }

    /// The load balancer of `service` had what `before` says, and has what `now` says: a released address rests, and the owners that may
    /// use it, or a port of it, are notified.
    pub(crate) fn on_release(
        &self,
        service: Option<&Key>,
        before: &AssignedAddresses,
        now: &AssignedAddresses,
    ) {
        if before == now {
            return;
        }
        let pools = self.known_pools();
        let mut allocation = self.allocation();
        let release = |index: &Index| allocation.release(service, before, now, &pools, index);
        let owners = self.balancers.cache.index(release);
        drop(allocation);
        self.notify(&owners);
        // They also have what was released.
        self.pools_are_stale();
    }

    /// When the next released address is free for other Services.
    fn next_free(&self) -> Option<Duration> {
        self.allocation().next_free(&self.known_pools())
    }

    /// Notifies the owners that may use an address that is no longer kept for the Service that had it.
    fn end_delays(&self) {
        let pools = self.known_pools();
        let owners = self.allocation().end_delays(&pools);
        self.notify(&owners);
    }

    fn notify(&self, owners: &[Owner]) {
        for owner in owners {
            self.notifier.send(owner);
        }
    }

    /// The load balancer of `owner` is being deleted.
    pub(crate) fn forget(&self, owner: &Owner) {
        self.allocation().forget(owner);
    }

    /// A pool changed. If its specification did, Services that wait for an address may get one; its status changes with every address.
    pub(crate) fn on_pool(&self, change: &Change<PoolContent>) {
        if is_edited(change) {
            self.need_namespaces();
            let waiting = self.allocation().take_waiting();
            self.notify(&waiting);
        }
        self.pools_are_stale();
    }

    /// The statuses of pools may differ from what they should be, until [`Shared::keep_pool_statuses`] writes them.
    pub(crate) fn pools_are_stale(&self) {
        self.stale_pools.notify_one();
    }

    /// Protects a shared set from deletion while the load balancer of this name may use it: a write without an answer may have
    /// succeeded.
    pub(crate) fn about_to_use(&self, name: String, set: &'static str) {
        self.users().insert(name, set);
    }

    /// The cache shows the load balancer of this owner as it is: what was kept in case a write had succeeded is released.
    pub(crate) fn end_reservation(&self, owner: &Owner) {
        let name = &spec::object_name(owner);
        self.users().remove(name);
        let Some(reserved) = self.allocation().end_reservation(name) else { return };
        let now =
            self.balancers.cache.get(name).map(|entry| AssignedAddresses::of(&entry)).unwrap_or_default();
        for held in reserved {
            self.on_release(Some(&owner.service), &held, &now);
        }
    }

    /// How long the load balancer of this name keeps an address that is served for another one.
    pub(crate) fn disputed_for(&self, name: &str) -> Option<Duration> {
        self.allocation().disputed_for(name)
    }

    /// Whether a write of this name had no answer, and its effect was not read since.
    pub(crate) fn is_reserved(&self, name: &str) -> bool {
        self.allocation().is_reserved(name)
    }

    /// How long a write of this name that was given up may still have an effect.
    pub(crate) fn unsettled(&self, name: &str) -> Option<Duration> {
        self.allocation().unsettled(name)
    }

    fn users(&self) -> MutexGuard<'_, BTreeMap<String, &'static str>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A write of a load balancer begins, and ends with the result's drop. The watch may deliver it before its response arrives.
    pub(crate) fn begin_write(&self, name: &str, wanted: &EdgeLoadBalancerSpec) -> OwnWrite<'_> {
        self.writing().insert(name.to_owned(), wanted.clone());
        self.allocation().renew_reservation(name);
        OwnWrite { shared: self, name: name.to_owned(), is_answered: false }
    }

    fn writing(&self) -> MutexGuard<'_, BTreeMap<String, EdgeLoadBalancerSpec>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unread(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object of a load balancer. After a write without an answer it is read: the cache may show what was before it, and the watch
    /// be late.
    pub(crate) async fn balancer(&self, name: &str) -> Result<Option<Entry<LoadBalancerContent>>, Error> {
        let known = self.balancers.cache.get(name);
        if !self.unread().contains(name) {
            return Ok(known);
        }
        let new = self.balancers.reread(name).await?;
        self.unread().remove(name);
        if new != known {
            // The watch will not report what the response revealed.
            self.on_balancer(&Change { old: known, new: new.clone() });
        }
        Ok(new)
    }

    /// Whether this is the effect of a write of the provider that has no response yet.
    fn is_own_write(&self, new: &Entry<LoadBalancerContent>) -> bool {
        let is_named = new.owner.as_ref().is_some_and(|owner| spec::object_name(owner) == new.name);
        let writing = self.writing();
        let written = writing.get(&new.name).zip(new.content.as_ref().ok());
        is_named && !new.deleting && written.is_some_and(|(wanted, content)| content.spec == *wanted)
    }

    /// The watch brought a change of a load balancer's object.
    pub(crate) fn on_balancer(&self, change: &Change<LoadBalancerContent>) {
        let (old, new) = (change.old.as_ref(), change.new.as_ref());
        if !new.is_some_and(|new| self.is_own_write(new)) {
            // Both: another program may have changed the labels that name the owner.
            let owners: BTreeSet<&Owner> =
                old.into_iter().chain(new).filter_map(|entry| entry.owner.as_ref()).collect();
            for owner in owners {
                self.notifier.send(owner);
            }
        }
        let (before, now) = (
            old.map(AssignedAddresses::of).unwrap_or_default(),
            new.map(AssignedAddresses::of).unwrap_or_default(),
        );
        if before.addresses != now.addresses {
            self.pools_are_stale();
        }
        let service = old.and_then(|entry| entry.owner.as_ref()).map(|owner| &owner.service);
        self.on_release(service, &before, &now);
    }

    fn allocation(&self) -> MutexGuard<'_, Allocation> {
        self.allocation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A write of a load balancer that has no response yet.
pub(crate) struct OwnWrite<'a> {
    shared: &'a Shared,
    name: String,
    is_answered: bool,
}

impl OwnWrite<'_> {
    /// Ends the write with this result. After an error of the API server itself the write may still have an effect.
    pub(crate) fn end(mut self, result: Result<(), Failure>) -> Result<(), Failure> {
        let refuses = |failure: &Failure| failure.code().is_some_and(|code| code < 500);
        self.is_answered = result.as_ref().err().is_none_or(refuses);
        result
    }
}

impl Drop for OwnWrite<'_> {
    fn drop(&mut self) {
        self.shared.writing().remove(&self.name);
        if !self.is_answered {
            self.shared.unread().insert(self.name.clone());
            self.shared.allocation().renew_reservation(&self.name);
        }
    }
}

/// Whether a pool's specification changed, not only its status.
fn is_edited(change: &Change<PoolContent>) -> bool {
    fn spec(entry: Option<&Entry<PoolContent>>) -> Option<&AddressPoolSpec> {
        entry.and_then(|entry| entry.content.as_ref().ok()).map(|content| &content.spec)
    }
    spec(change.old.as_ref()) != spec(change.new.as_ref())
}

#[cfg(test)]
mod tests;
