// SPDX-License-Identifier: Apache-2.0
//! The state that the provider's calls and watch tasks share: the caches, the allocation, the notifier.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Client;
use serde_json::Value;
use steerage_edge_api::{
    AddressPool, AddressPoolSpec, EdgeLoadBalancer, EdgeNodeSet, EdgeNodeSetSpec, EdgeTargetHealth,
};
use steerage_model::Family;
use steerage_provider_api::{Error, LoadBalancer, Owner, SharedSet, TargetSet};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::allocate::unchanged;
use crate::entry::{Change, Entry};
use crate::notifier::Notifier;
use crate::objects::{HealthContent, LoadBalancerContent, NodeSetContent, Objects, PoolContent};
use crate::pools::Outside;
use crate::{Pool, Request, allocate, pools, spec};

/// A creation has its effect within this time, or never: the deadline of the call, and as long again.
const LATEST_EFFECT: Duration = Duration::from_secs(10);

/// A released address is not given to another Service for this time, if another is free: until all nodes have removed the rules of the
/// Service that had it. kube-proxy may need some tens of seconds (`minSyncPeriod`, and the time of a sync).
const REST: Duration = Duration::from_mins(1);

/// Timeout of the first lists.
const LISTED_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) balancers: Objects<LoadBalancerContent>,
    pub(crate) node_sets: Objects<NodeSetContent>,
    pub(crate) pools: Objects<PoolContent>,
    pub(crate) health: Objects<HealthContent>,
    pub(crate) notifier: Notifier,
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
    allocation: Mutex<Allocation>,
    activated: OnceCell<()>,
    pool_lock: tokio::sync::Mutex<()>,
    stale_pools: AtomicBool,
    /// The addresses outside all pools that were logged.
    outside: Mutex<BTreeSet<Outside>>,
}

/// A value of a shared set.
#[derive(Debug)]
struct OfferedSet {
    generation: u64,
    spec: Arc<EdgeNodeSetSpec>,
}

#[derive(Debug, Default)]
struct Allocation {
    /// Addresses of load balancers whose object in the cache may lack them, by object name: a write without an answer may have
    /// succeeded. With the time of the last such write.
    reserved: BTreeMap<String, (Vec<IpAddr>, Instant)>,
    /// When each address was last released, for [`REST`].
    released: BTreeMap<IpAddr, Instant>,
    /// Owners without an address, to retry when a pool changes or an address is released that they may use.
    waiting: BTreeMap<Owner, WaitingRequest>,
}

impl Allocation {
    /// The addresses that were released a moment ago.
    fn resting(&mut self) -> BTreeSet<IpAddr> {
        self.released.retain(|_, since| since.elapsed() < REST);
        self.released.keys().copied().collect()
    }
}

/// What an owner without an address waits for.
#[derive(Debug)]
struct WaitingRequest {
    families: Vec<Family>,
    addresses: Vec<IpAddr>,
    pool: Option<String>,
}

impl WaitingRequest {
    /// Whether a free address may end the wait.
    fn may_use(&self, address: IpAddr, pools: &[Pool]) -> bool {
        let family = Family::of(address);
        let requested = self.addresses.iter().find(|requested| Family::of(**requested) == family);
        let is_usable = |pool: &Pool| match &self.pool {
            Some(name) => pool.name == *name,
            None => pool.auto_assign,
        };
        match requested {
            Some(requested) => *requested == address,
            None => {
                self.families.contains(&family)
                    && pools.iter().any(|pool| is_usable(pool) && pool.contains(address))
            }
        }
    }
}

impl Shared {
    pub(crate) fn new(client: &Client, namespace: &str) -> Self {
        Self {
            balancers: Objects::new::<EdgeLoadBalancer>(client, namespace, "edgeloadbalancers"),
            node_sets: Objects::new::<EdgeNodeSet>(client, namespace, "edgenodesets"),
            pools: Objects::new::<AddressPool>(client, namespace, "addresspools"),
            health: Objects::new::<EdgeTargetHealth>(client, namespace, "edgetargethealths"),
            notifier: Notifier::default(),
            node_set_lock: tokio::sync::Mutex::default(),
            offered_sets: Mutex::default(),
            known_sets: Mutex::default(),
            wanted_sets: Mutex::default(),
            users: Mutex::default(),
            allocation: Mutex::default(),
            activated: OnceCell::new(),
            pool_lock: tokio::sync::Mutex::default(),
            stale_pools: AtomicBool::new(false),
            outside: Mutex::default(),
        }
    }

    /// Returns when all kinds have been listed.
    pub(crate) async fn listed(&self) {
        self.balancers.cache.listed().await;
        self.node_sets.cache.listed().await;
        self.pools.cache.listed().await;
        self.health.cache.listed().await;
    }

    /// Makes sure that the caches are fit to act on. The first time it reads the load balancers from the API server itself: the watch
    /// may lag behind the last writes of another controller that held the Lease until now.
    pub(crate) async fn activate(&self) -> Result<(), Error> {
        if tokio::time::timeout(LISTED_WITHIN, self.listed()).await.is_err() {
            let message =
                "The edge's objects are not listed yet. Steerage retries. Check that the CRDs are installed.";
            return Err(Error::Unavailable(message.to_owned()));
        }
        self.activated.get_or_try_init(|| async { Ok(self.balancers.refresh().await?) }).await.copied()
    }

    /// All addresses in use by objects other than `name`.
    fn taken(&self, allocation: &Allocation, name: &str) -> BTreeSet<IpAddr> {
        let mut taken: BTreeSet<IpAddr> = self
            .balancers
            .cache
            .read(|rows| rows.filter(|entry| entry.name != name).flat_map(addresses).collect());
        let reserved = allocation.reserved.iter().filter(|(other, _)| *other != name);
        taken.extend(reserved.flat_map(|(_, (list, _))| list));
        taken
    }

    fn known_pools(&self) -> Vec<Pool> {
        self.pools.cache.read(|rows| {
            rows.filter_map(|entry| Some(Pool::new(&entry.name, &entry.content.as_ref().ok()?.spec)))
                .collect()
        })
    }

    /// Allocates the addresses of a load balancer and reserves them until [`Shared::confirm`].
    pub(crate) fn allocate(&self, lb: &LoadBalancer) -> Result<Vec<IpAddr>, Error> {
        let name = spec::object_name(&lb.owner);
        let current = self.balancers.cache.get(&name).map(|entry| addresses(&entry)).unwrap_or_default();
        let pools = self.known_pools();
        let mut allocation = self.allocation();
        let resting = allocation.resting();
        let request = Request {
            families: &lb.families,
            addresses: &lb.requested_addresses,
            pool: lb.pool.as_deref(),
            current: &current,
            published: &lb.published,
            resting: &resting,
        };
        if unchanged(&pools, request, || self.taken(&allocation, &name)) {
            allocation.waiting.remove(&lb.owner);
            return Ok(current);
        }
        match allocate(&pools, &self.taken(&allocation, &name), request) {
            Ok(addresses) => {
                allocation.waiting.remove(&lb.owner);
                allocation.reserved.insert(name, (addresses.clone(), Instant::now()));
                Ok(addresses)
            }
            Err(error) => {
                let request = WaitingRequest {
                    families: lb.families.clone(),
                    addresses: lb.requested_addresses.clone(),
                    pool: lb.pool.clone(),
                };
                allocation.waiting.insert(lb.owner.clone(), request);
                Err(error)
            }
        }
    }

    /// Notifies all owners that wait for an address.
    fn notify_waiting(&self) {
        let waiting = std::mem::take(&mut self.allocation().waiting);
        for owner in waiting.keys() {
            self.notifier.notify(owner);
        }
    }

    /// A load balancer had the addresses `before` and has `now`: a released one rests, and the owners that may use it are notified. The
    /// others would only be refused again.
    pub(crate) fn on_release(&self, before: &[IpAddr], now: &[IpAddr]) {
        let released: Vec<IpAddr> = before.iter().copied().filter(|address| !now.contains(address)).collect();
        if released.is_empty() {
            return;
        }
        let pools = self.known_pools();
        let freed = |request: &WaitingRequest| released.iter().any(|free| request.may_use(*free, &pools));
        let owners: Vec<Owner> = {
            let mut allocation = self.allocation();
            allocation.released.extend(released.iter().map(|address| (*address, Instant::now())));
            allocation.waiting.extract_if(.., |_, request| freed(request)).map(|(owner, _)| owner).collect()
        };
        for owner in &owners {
            self.notifier.notify(owner);
        }
    }

    /// Removes `owner` from those that wait for an address.
    pub(crate) fn not_waiting(&self, owner: &Owner) {
        self.allocation().waiting.remove(owner);
    }

    /// A pool changed. If its specification did, Services that wait for an address may get one; its status changes with every address.
    pub(crate) fn on_pool(&self, change: &Change<PoolContent>) {
        if is_edited(change) {
            self.notify_waiting();
        }
        self.pools_are_stale();
    }

    /// The statuses of pools may differ from what they should be, until [`Shared::write_pools`] succeeds.
    pub(crate) fn pools_are_stale(&self) {
        self.stale_pools.store(true, Ordering::Release);
    }

    /// Writes the status of every pool for which it differs, if any may. Does nothing before the first call of the provider. Only
    /// throttling is returned; other errors are logged, because no load balancer depends on this status.
    pub(crate) async fn write_pools(&self) -> Result<(), Error> {
        if !self.activated.initialized() {
            return Ok(());
        }
        let _one_at_a_time = self.pool_lock.lock().await;
        while self.stale_pools.swap(false, Ordering::AcqRel) {
            if !self.write_stale_pools().await? {
                break;
            }
        }
        Ok(())
    }

    /// The addresses of load balancers that are in no pool; new ones are logged.
    fn find_outside(&self) -> BTreeSet<Outside> {
        let pools = self.known_pools();
        let is_outside = |address: &IpAddr| !pools.iter().any(|pool| pool.contains(*address));
        // The name is made only for the few that are reported: this runs with every change of an address.
        let outside = |entry: &Entry<LoadBalancerContent>, address: IpAddr| {
            let holder = match &entry.owner {
                Some(owner) => format!("Service {}", owner.service),
                None => format!("EdgeLoadBalancer {}", entry.name),
            };
            Outside { holder, address }
        };
        let found: BTreeSet<Outside> = self.balancers.cache.read(|rows| {
            rows.flat_map(|entry| {
                let found = addresses(entry).into_iter().filter(is_outside);
                found.map(move |address| outside(entry, address))
            })
            .collect()
        });
        let mut logged = self.outside.lock().unwrap_or_else(PoisonError::into_inner);
        for Outside { holder, address } in found.difference(&logged) {
            tracing::warn!(holder, %address, "assigned address is in no AddressPool; keeping it");
        }
        logged.clone_from(&found);
        found
    }

    /// Whether all were written.
    async fn write_stale_pools(&self) -> Result<bool, Error> {
        let mut all_written = true;
        let taken = self.taken(&Allocation::default(), "");
        let outside = self.find_outside();
        let stale: Vec<_> = self.pools.cache.read(|rows| {
            rows.filter_map(|entry| {
                let content = entry.content.as_ref().ok()?;
                let status = pools::status(&entry.name, &content.spec, &taken, &outside);
                (content.status.as_ref() != Some(&status)).then(|| (entry.name.clone(), status))
            })
            .collect()
        });
        for (pool, status) in stale {
            match self.pools.patch_status(&pool, &status).await {
                // The watch will not report an edit that came with the response.
                Ok(changes) => {
                    for change in changes.iter().filter(|change| is_edited(change)) {
                        self.on_pool(change);
                    }
                }
                Err(failure) => {
                    all_written = false;
                    self.pools_are_stale();
                    let error = Error::from(failure);
                    tracing::warn!(%pool, %error, "AddressPool status not written; retrying with the next change");
                    if matches!(error, Error::Throttled { .. }) {
                        return Err(error);
                    }
                }
            }
        }
        Ok(all_written)
    }

    /// Protects a shared set from deletion while the load balancer of this name may use it: a write without an answer may have
    /// succeeded.
    pub(crate) fn about_to_use(&self, name: String, set: &'static str) {
        self.users().insert(name, set);
    }

    /// The cache shows the load balancer of this name as it is: what was kept in case a write had succeeded is released.
    pub(crate) fn confirm(&self, name: &str) {
        self.users().remove(name);
        let Some((reserved, _)) = self.allocation().reserved.remove(name) else { return };
        let now = self.balancers.cache.get(name).map(|entry| addresses(&entry)).unwrap_or_default();
        self.on_release(&reserved, &now);
    }

    /// How long a creation of this name that was given up may still have an effect.
    pub(crate) fn unsettled(&self, name: &str) -> Option<Duration> {
        let since = self.allocation().reserved.get(name).map(|(_, since)| *since)?;
        let left = LATEST_EFFECT.saturating_sub(since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Whether a load balancer uses a shared set, or may.
    pub(crate) fn is_used(&self, set: &str) -> bool {
        self.users().values().any(|used| *used == set)
            || self.balancers.cache.read(|rows| {
                rows.filter_map(|entry| entry.content.as_ref().ok())
                    .any(|content| content.spec.node_set.as_deref() == Some(set))
            })
    }

    /// The newest value of a shared set: this one, or a newer one that came before.
    pub(crate) fn offer_set(&self, which: SharedSet, set: &TargetSet) -> Arc<EdgeNodeSetSpec> {
        let mut offered = self.offered_sets.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = offered.get(which.as_str()).filter(|newest| newest.generation >= set.generation);
        if let Some(newest) = newest {
            return Arc::clone(&newest.spec);
        }
        let spec = Arc::new(EdgeNodeSetSpec { targets: spec::shared_targets(set) });
        offered.insert(which.as_str(), OfferedSet { generation: set.generation, spec: Arc::clone(&spec) });
        spec
    }

    /// Whether this version of a shared set was found equal to this value.
    pub(crate) fn is_known_set(&self, set: &str, version: &str, wanted: &Arc<EdgeNodeSetSpec>) -> bool {
        let known = self.known_sets.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(set).is_some_and(|(known, spec)| known == version && Arc::ptr_eq(spec, wanted))
    }

    /// Records that this version of a shared set equals this value.
    pub(crate) fn set_known(&self, set: &'static str, version: String, wanted: Arc<EdgeNodeSetSpec>) {
        self.known_sets.lock().unwrap_or_else(PoisonError::into_inner).insert(set, (version, wanted));
    }

    /// Records what a shared set must contain; `None` if it is not needed any more.
    pub(crate) fn want_set(&self, set: &str, wanted: Option<Arc<EdgeNodeSetSpec>>) {
        let mut sets = self.wanted_sets.lock().unwrap_or_else(PoisonError::into_inner);
        match wanted {
            Some(wanted) => drop(sets.insert(set.to_owned(), wanted)),
            None => drop(sets.remove(set)),
        }
    }

    /// Another program changed or deleted a node set. Its load balancers would have other targets, or none.
    pub(crate) fn on_node_set(&self, change: &Change<NodeSetContent>) {
        let Some(entry) = change.new.as_ref().or(change.old.as_ref()) else { return };
        let content = change.new.as_ref().filter(|new| new.managed).and_then(|new| new.content.as_ref().ok());
        {
            let sets = self.wanted_sets.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(wanted) = sets.get(entry.name.as_str()) else { return };
            // The watch may deliver a write of the provider before its response arrives.
            if content.is_some_and(|content| content.spec == **wanted) {
                return;
            }
        }
        let is_foreign = |entry: Option<&Entry<NodeSetContent>>| entry.is_some_and(|entry| !entry.managed);
        if is_foreign(change.old.as_ref()) && is_foreign(change.new.as_ref()) {
            return;
        }
        tracing::warn!(
            node_set = entry.name,
            "another program changed or deleted the EdgeNodeSet; reconciling all load balancers"
        );
        // All: one whose targets were refused does not name the set yet.
        let owners: Vec<Owner> =
            self.balancers.cache.read(|rows| rows.filter_map(|entry| entry.owner.clone()).collect());
        for owner in &owners {
            self.notifier.notify(owner);
        }
    }

    fn users(&self) -> MutexGuard<'_, BTreeMap<String, &'static str>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another program changed a load balancer's object.
    pub(crate) fn on_balancer(&self, change: &Change<LoadBalancerContent>) {
        let (old, new) = (change.old.as_ref(), change.new.as_ref());
        // Both: another program may have changed the labels that name the owner.
        let owners: BTreeSet<&Owner> =
            old.into_iter().chain(new).filter_map(|entry| entry.owner.as_ref()).collect();
        for owner in owners {
            self.notifier.notify(owner);
        }
        let (before, now) = (old.map(addresses).unwrap_or_default(), new.map(addresses).unwrap_or_default());
        if before != now {
            self.pools_are_stale();
        }
        self.on_release(&before, &now);
    }

    /// A host's report on a load balancer changed.
    pub(crate) fn on_health(&self, change: &Change<HealthContent>) {
        let content =
            change.new.as_ref().or(change.old.as_ref()).and_then(|entry| entry.content.as_ref().ok());
        let owner = content
            .and_then(|content| self.balancers.cache.get(&content.spec.load_balancer))
            .and_then(|entry| entry.owner);
        if let Some(owner) = owner {
            self.notifier.notify(&owner);
        }
    }

    fn allocation(&self) -> MutexGuard<'_, Allocation> {
        self.allocation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a pool's specification changed, not only its status.
fn is_edited(change: &Change<PoolContent>) -> bool {
    fn spec(entry: Option<&Entry<PoolContent>>) -> Option<&AddressPoolSpec> {
        entry.and_then(|entry| entry.content.as_ref().ok()).map(|content| &content.spec)
    }
    spec(change.old.as_ref()) != spec(change.new.as_ref())
}

/// The addresses of an object, also of one that this version cannot fully read.
pub(crate) fn addresses(entry: &Entry<LoadBalancerContent>) -> Vec<IpAddr> {
    match &entry.content {
        Ok(content) => content.spec.addresses.clone(),
        Err(raw) => {
            let list = raw.pointer("/spec/addresses").and_then(Value::as_array);
            list.into_iter().flatten().filter_map(|text| text.as_str()?.parse().ok()).collect()
        }
    }
}

#[cfg(test)]
mod tests;
