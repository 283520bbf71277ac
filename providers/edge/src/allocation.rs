// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of addresses besides the objects: those that a write without an answer may have assigned, those that
//! were released a moment ago, and who waits for one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use steerage_edge_api::{Labels, ReleasedAddress};
use steerage_model::{Family, Key};
use steerage_provider_api::{Error, LoadBalancer, Owner};
use tokio::time::Instant;

use crate::address_set::next;
use crate::allocate::{Taken, is_unchanged};
use crate::entry::Entry;
use crate::index::{Holder, Index};
use crate::objects::{LoadBalancerContent, addresses};
use crate::released::{Released, reuse_delay};
use crate::sharing::{Conflict, Scope, Sharing, conflict};
use crate::{Pool, Request, Requester, allocate, spec};

/// A write has its effect within this time, or never: the deadline of the call, and as long again.
const LATEST_EFFECT: Duration = Duration::from_secs(10);

/// A released address is not given to another Service for this time, if another is free: until all nodes have removed the rules of the
/// Service that had it. kube-proxy needs about a second, in large clusters some tens of seconds (`minSyncPeriod`, and the time of a
/// sync).
const REUSE_AVOIDANCE: Duration = Duration::from_mins(1);

/// An address of two load balancers stays with both for this time. If another program wrote it into one of them, that one gets its own
/// back meanwhile.
const DUPLICATE_GRACE: Duration = Duration::from_mins(1);

/// Released addresses in the status of a pool. An address is about 100 bytes.
const MOST_HELD: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Allocation {
    /// What load balancers may have although their object in the cache lacks it, by object name: a write without an answer may have
    /// succeeded.
    reserved: BTreeMap<String, Reservation>,
    /// Addresses that were released lately.
    released: BTreeMap<IpAddr, Released>,
    /// Load balancers whose address another one has that is served instead, by object name, and since when that is known.
    duplicates: BTreeMap<String, Instant>,
    /// The addresses that the Service of each load balancer publishes, or is about to, by object name.
    confirmed: BTreeMap<String, Vec<IpAddr>>,
    /// The labels of the Service of each load balancer, by object name; not of those that this process has not reconciled yet.
    labels: BTreeMap<String, Arc<Labels>>,
    /// Owners without an address, to retry when a pool changes or an address is released that they may use.
    waiting: BTreeMap<Owner, WaitingRequest>,
}

/// What a load balancer has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AssignedAddresses {
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) sharing: Option<Sharing>,
}

impl AssignedAddresses {
    pub(crate) fn of(entry: &Entry<LoadBalancerContent>) -> Self {
        Self { addresses: addresses(entry), sharing: Sharing::of(entry) }
    }
}

/// What the tries of a load balancer may have led to.
#[derive(Debug)]
struct Reservation {
    /// That of the Service.
    namespace: String,
    /// What each of them would have.
    tries: Vec<AssignedAddresses>,
    /// The time of the last write.
    since: Instant,
}

impl Allocation {
    /// The addresses of a load balancer, which has `current`. They are reserved until
    /// [`Allocation::end_reservation`], also if a later try fails.
    pub(crate) fn allocate(
        &mut self,
        lb: &LoadBalancer,
        current: AssignedAddresses,
        pools: &[Pool],
        namespace_labels: Option<&Labels>,
        index: &Index,
    ) -> Result<Vec<IpAddr>, Error> {
        let result = self.find_addresses(lb, current, pools, namespace_labels, index);
        let confirmed = result.as_ref().unwrap_or(&lb.published).clone();
        self.confirmed.insert(spec::object_name(&lb.owner), confirmed);
        self.labels.insert(spec::object_name(&lb.owner), Arc::clone(&lb.labels));
        result
    }

    fn find_addresses(
        &mut self,
        lb: &LoadBalancer,
        current: AssignedAddresses,
        pools: &[Pool],
        namespace_labels: Option<&Labels>,
        index: &Index,
    ) -> Result<Vec<IpAddr>, Error> {
        let name = spec::object_name(&lb.owner);
        let wanted = Sharing::wanted(lb)?;
        let AssignedAddresses { addresses: current, sharing: present } = current;
        let (resting, held) = self.resting(&lb.owner.service, pools);
        let published = self.undisputed(&lb.owner, &name, &current, present.as_ref(), &lb.published, index);
        let request = Request {
            requester: Requester {
                namespace: lb.owner.service.namespace(),
                namespace_labels,
                labels: &lb.labels,
            },
            families: &lb.families,
            addresses: &lb.requested_addresses,
            pool: lb.pool.as_deref(),
            current: &current,
            published: &published,
            resting: &resting,
            held: &held,
        };
        let taken = self.taken(index, &lb.owner, &name, wanted.as_ref(), present.as_ref(), &current);
        let is_same = is_unchanged(pools, &taken, request);
        if is_same && wanted == present {
            self.waiting.remove(&lb.owner);
            return Ok(current);
        }
        let result = if is_same { Ok(current.clone()) } else { allocate(pools, &taken, request) };
        match result {
            Ok(addresses) => {
                self.waiting.remove(&lb.owner);
                self.released.retain(|address, _| !addresses.contains(address));
                self.reserve(name, lb.owner.service.namespace(), &addresses, wanted);
                Ok(addresses)
            }
            Err(error) => {
                let request = WaitingRequest {
                    namespace: lb.owner.service.namespace().to_owned(),
                    namespace_labels: namespace_labels.cloned(),
                    labels: Arc::clone(&lb.labels),
                    families: lb.families.clone(),
                    addresses: lb.requested_addresses.clone(),
                    pool: lb.pool.clone(),
                    current,
                    key: wanted.map(|wanted| wanted.key),
                };
                self.waiting.insert(lb.owner.clone(), request);
                Err(error)
            }
        }
    }

    /// Adds to what the load balancer of this name may have. What an earlier try reserved stays: it may have succeeded.
    fn reserve(&mut self, name: String, namespace: &str, addresses: &[IpAddr], wanted: Option<Sharing>) {
        let none =
            || Reservation { namespace: namespace.to_owned(), tries: Vec::new(), since: Instant::now() };
        let reserved = self.reserved.entry(name).or_insert_with(none);
        reserved.since = Instant::now();
        let held = AssignedAddresses { addresses: addresses.to_vec(), sharing: wanted };
        if !reserved.tries.contains(&held) {
            reserved.tries.push(held);
        }
    }

    /// Ends the reservation of the load balancer of this name, and returns what each try may have led to.
    pub(crate) fn end_reservation(&mut self, name: &str) -> Option<Vec<AssignedAddresses>> {
        self.reserved.remove(name).map(|reservation| reservation.tries)
    }

    /// A write of the load balancer of this name begins, or ended without an answer: it may have an effect from now on. The
    /// allocation was earlier, and targets are written in between.
    pub(crate) fn renew_reservation(&mut self, name: &str) {
        if let Some(reserved) = self.reserved.get_mut(name) {
            reserved.since = Instant::now();
        }
    }

    /// How long the load balancer of this name keeps an address that another one has, and that is served for the other one.
    pub(crate) fn disputed_for(&self, name: &str) -> Option<Duration> {
        let left = DUPLICATE_GRACE.saturating_sub(self.duplicates.get(name)?.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// The labels of the Service of this load balancer, if they are known.
    pub(crate) fn labels(&self, name: &str) -> Option<&Labels> {
        self.labels.get(name).map(|labels| &**labels)
    }

    /// Whether addresses are reserved for the load balancer of this name.
    pub(crate) fn is_reserved(&self, name: &str) -> bool {
        self.reserved.contains_key(name)
    }

    /// How long a write of this name that was given up may still have an effect.
    pub(crate) fn unsettled(&self, name: &str) -> Option<Duration> {
        let left = LATEST_EFFECT.saturating_sub(self.reserved.get(name)?.since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// The load balancer of `service` had what `before` says, and has what `now` says. Lets the addresses rest that nobody has any more,
    /// and returns the owners that may use one, or a port of one; they no longer wait. The others would only be refused again.
    pub(crate) fn release(
        &mut self,
        service: Option<&Key>,
        before: &AssignedAddresses,
        now: &AssignedAddresses,
        pools: &[Pool],
        index: &Index,
    ) -> Vec<Owner> {
        let is_kept = |address: &IpAddr| now.addresses.contains(address);
        let mut free: Vec<IpAddr> = before.addresses.iter().copied().filter(|a| !is_kept(a)).collect();
        let resting = free.iter().filter(|address| !index.used().contains(**address));
        let released = Released::now(service.cloned());
        self.released.extend(resting.map(|address| (*address, released.clone())));
        let mut keys = Vec::new();
        if before.sharing != now.sharing {
            // Ports of an address that stays may be free, and others may share one that is new.
            free.clone_from(&before.addresses);
            keys.extend(now.sharing.as_ref().map(|sharing| sharing.key.as_str()));
        }
        let may_end = |request: &WaitingRequest| {
            free.iter().any(|address| request.may_use(*address, pools))
                || request.key.as_deref().is_some_and(|key| keys.contains(&key))
        };
        self.waiting.extract_if(.., |_, request| may_end(request)).map(|(owner, _)| owner).collect()
    }

    /// The load balancer of `owner` is being deleted: it waits for no address, and disputes none.
    pub(crate) fn forget(&mut self, owner: &Owner) {
        self.waiting.remove(owner);
        let name = spec::object_name(owner);
        self.duplicates.remove(&name);
        self.confirmed.remove(&name);
        self.labels.remove(&name);
    }

    /// Removes and returns all owners that wait.
    pub(crate) fn take_waiting(&mut self) -> Vec<Owner> {
        std::mem::take(&mut self.waiting).into_keys().collect()
    }

    /// The addresses that other Services had a moment ago, and those that their pools keep for these, with the time that is left. A
    /// Service that is created again may have its own at once.
    fn resting(&mut self, service: &Key, pools: &[Pool]) -> (BTreeSet<IpAddr>, BTreeMap<IpAddr, Duration>) {
        self.released.retain(|address, released| {
            let delay = reuse_delay(*address, pools);
            let is_announced = delay.is_zero() || released.is_over;
            released.since.elapsed() < REUSE_AVOIDANCE.max(delay) || !is_announced
        });
        let of_others =
            || self.released.iter().filter(|(_, released)| released.last.as_ref() != Some(service));
        let rests = |released: &Released| released.since.elapsed() < REUSE_AVOIDANCE;
        let resting = of_others().filter(|(_, released)| rests(released)).map(|(address, _)| *address);
        let held = of_others()
            .filter_map(|(address, released)| Some((*address, released.left(reuse_delay(*address, pools))?)));
        (resting.collect(), held.collect())
    }

    /// Takes in what an earlier process wrote of addresses that were released.
    pub(crate) fn restore(&mut self, released: impl IntoIterator<Item = ReleasedAddress>, index: &Index) {
        for record in released {
            if !index.used().contains(record.address) {
                self.released.entry(record.address).or_insert_with(|| Released::restored(&record));
            }
        }
    }

    /// The addresses that this pool keeps from other Services, the newest if there are too many.
    pub(crate) fn held_by(&self, pool: &Pool, index: &Index) -> Vec<ReleasedAddress> {
        let mut held: Vec<_> = self
            .released
            .iter()
            .filter(|(address, released)| {
                pool.contains(**address)
                    && !index.used().contains(**address)
                    && released.left(pool.reuse_delay).is_some()
            })
            .map(|(address, released)| released.record(*address))
            .collect();
        held.sort_by_key(|record| (std::cmp::Reverse(record.released_at_seconds), record.address));
        held.truncate(MOST_HELD);
        held.sort_by_key(|record| record.address);
        held
    }

    /// When the next address is no longer kept.
    pub(crate) fn next_free(&self, pools: &[Pool]) -> Option<Duration> {
        let left = |(address, released): (&IpAddr, &Released)| released.left(reuse_delay(*address, pools));
        self.released.iter().filter_map(left).min()
    }

    /// The owners that may use an address that is no longer kept; they no longer wait.
    pub(crate) fn end_delays(&mut self, pools: &[Pool]) -> Vec<Owner> {
        let mut free = Vec::new();
        for (address, released) in &mut self.released {
            let was_over = released.is_over;
            released.is_over = released.left(reuse_delay(*address, pools)).is_none();
            if released.is_over && !was_over {
                free.push(*address);
            }
        }
        let may_end = |request: &WaitingRequest| free.iter().any(|address| request.may_use(*address, pools));
        self.waiting.extract_if(.., |_, request| may_end(request)).map(|(owner, _)| owner).collect()
    }

    /// The published addresses without those that another Service publishes for so long that it will keep them. Edge hosts serve an
    /// address for the first of its load balancers by name.
    fn undisputed(
        &mut self,
        owner: &Owner,
        name: &str,
        current: &[IpAddr],
        present: Option<&Sharing>,
        published: &[IpAddr],
        index: &Index,
    ) -> Vec<IpAddr> {
        let confirmed = &self.confirmed;
        // Those with the same key have it together, as the edge sees it.
        let is_instead = |holder: &&Holder| {
            holder.name.as_str() < name
                && conflict(present, holder.sharing.as_deref(), Scope::Cluster) == Some(Conflict::Address)
        };
        // Unknown for a load balancer that this process has not reconciled yet.
        let is_with_other = |address: &IpAddr, if_unknown: bool| {
            let publishes = |holder: &Holder| {
                confirmed
                    .get(&holder.name)
                    .map_or(if_unknown, |published: &Vec<_>| published.contains(address))
            };
            current.contains(address) && index.other_holders(*address, name).filter(is_instead).any(publishes)
        };
        let Some(lost) = published.iter().find(|address| is_with_other(address, true)) else {
            self.duplicates.remove(name);
            return published.to_vec();
        };
        let since = *self.duplicates.entry(name.to_owned()).or_insert_with(|| {
            let other = index.other_holders(*lost, name).find(is_instead).map(|holder| holder.name.as_str());
            tracing::warn!(
                service = %owner.service,
                load_balancer = name,
                other,
                address = %lost,
                grace = ?DUPLICATE_GRACE,
                "address belongs to two load balancers; the other one is served; if it keeps the address, this Service gets another one"
            );
            Instant::now()
        });
        if since.elapsed() < DUPLICATE_GRACE {
            return published.to_vec();
        }
        published.iter().copied().filter(|address| !is_with_other(address, false)).collect()
    }

    fn taken<'a>(
        &'a self,
        index: &'a Index,
        owner: &'a Owner,
        name: &'a str,
        wanted: Option<&'a Sharing>,
        present: Option<&'a Sharing>,
        current: &'a [IpAddr],
    ) -> TakenByOthers<'a> {
        let mut reserved = BTreeMap::<IpAddr, Vec<(&str, Option<&Sharing>)>>::new();
        for (_, of_other) in self.reserved.iter().filter(|(other, _)| *other != name) {
            for held in &of_other.tries {
                for address in &held.addresses {
                    let of_address = reserved.entry(*address).or_default();
                    of_address.push((&of_other.namespace, held.sharing.as_ref()));
                }
            }
        }
        let namespace = owner.service.namespace();
        TakenByOthers { index, namespace, name, current, reserved, wanted, present }
    }
}

/// The addresses that are in use or reserved, as seen by the load balancer `name`.
struct TakenByOthers<'a> {
    index: &'a Index,
    namespace: &'a str,
    name: &'a str,
    /// The addresses of its object.
    current: &'a [IpAddr],
    /// What others reserved: their namespaces, and how they would share the address.
    reserved: BTreeMap<IpAddr, Vec<(&'a str, Option<&'a Sharing>)>>,
    /// How its Service wants to share its addresses.
    wanted: Option<&'a Sharing>,
    /// How its object shares them.
    present: Option<&'a Sharing>,
}

impl TakenByOthers<'_> {
    fn conflict_as(&self, own: Option<&Sharing>, address: IpAddr, scope: Scope) -> Option<Conflict> {
        let holders = self.index.other_holders(address, self.name).map(|holder| holder.sharing.as_deref());
        let reserved = self.reserved.get(&address).into_iter().flatten();
        let tries = reserved.map(|(_, sharing)| *sharing);
        let mut port = None;
        for other in holders.chain(tries) {
            match conflict(own, other, scope) {
                Some(Conflict::Address) => return Some(Conflict::Address),
                conflict => port = port.or(conflict),
            }
        }
        port
    }
}

impl Taken for TakenByOthers<'_> {
    fn conflict(&self, address: IpAddr, scope: Scope) -> Option<Conflict> {
        self.conflict_as(self.wanted, address, scope)
    }

    fn present_conflict(&self, address: IpAddr) -> Option<Conflict> {
        self.conflict_as(self.present, address, Scope::Cluster)
    }

    fn shared(&self) -> BTreeSet<IpAddr> {
        let Some(wanted) = self.wanted else { return BTreeSet::new() };
        let has_key = |(_, sharing): &(&str, Option<&Sharing>)| {
            sharing.is_some_and(|sharing| sharing.key == wanted.key)
        };
        let reserved = self.reserved.iter().filter(|(_, all)| all.iter().any(has_key));
        self.index.of_key(&wanted.key).chain(reserved.map(|(address, _)| *address)).collect()
    }

    fn of_namespace(&self) -> BTreeSet<IpAddr> {
        let is_own = |(namespace, _): &(&str, Option<&Sharing>)| *namespace == self.namespace;
        let reserved = self.reserved.iter().filter(|(_, all)| all.iter().any(is_own));
        let mut held = self.index.of_namespace(self.namespace, self.current);
        held.extend(reserved.map(|(address, _)| *address));
        held
    }

    fn free_from(&self, from: IpAddr) -> Option<IpAddr> {
        let mut free = self.index.used().free_from(from)?;
        while self.reserved.contains_key(&free) {
            free = self.index.used().free_from(next(free)?)?;
        }
        Some(free)
    }
}

/// What an owner without an address waits for.
#[derive(Clone, Debug)]
pub(crate) struct WaitingRequest {
    namespace: String,
    namespace_labels: Option<Labels>,
    labels: Arc<Labels>,
    families: Vec<Family>,
    addresses: Vec<IpAddr>,
    pool: Option<String>,
    /// The addresses that it keeps meanwhile.
    current: Vec<IpAddr>,
    /// By which it wants to share addresses.
    key: Option<String>,
}

impl WaitingRequest {
    /// Whether a free address may end the wait.
    fn may_use(&self, address: IpAddr, pools: &[Pool]) -> bool {
        let family = Family::of(address);
        let requested = self.addresses.iter().find(|requested| Family::of(**requested) == family);
        let is_usable = |pool: &Pool| match &self.pool {
            Some(name) => pool.name == *name,
            None => pool.auto_assign || self.key.is_some(),
        };
        if self.current.contains(&address) {
            return true;
        }
        if let Some(requested) = requested {
            return *requested == address;
        }
        let requester = Requester {
            namespace: &self.namespace,
            namespace_labels: self.namespace_labels.as_ref(),
            labels: &self.labels,
        };
        let is_usable = |pool: &&Pool| is_usable(pool) && pool.admits(requester);
        self.families.contains(&family) && pools.iter().filter(is_usable).any(|pool| pool.contains(address))
    }
}

#[cfg(test)]
pub(crate) mod tests;
