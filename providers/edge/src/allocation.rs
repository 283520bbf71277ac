// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of addresses besides the objects: those that a write without an answer may have assigned, those that
//! were released a moment ago, and who waits for one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::{Family, Key};
use steerage_provider_api::{Error, LoadBalancer, Owner};
use tokio::time::Instant;

use crate::address_set::next;
use crate::allocate::{Taken, is_unchanged};
use crate::index::Index;
use crate::{Pool, Request, allocate, spec};

/// A write has its effect within this time, or never: the deadline of the call, and as long again.
const LATEST_EFFECT: Duration = Duration::from_secs(10);

/// A released address is not given to another Service for this time, if another is free: until all nodes have removed the rules of the
/// Service that had it. kube-proxy needs about a second, in large clusters some tens of seconds (`minSyncPeriod`, and the time of a
/// sync).
const REST: Duration = Duration::from_mins(1);

/// An address of two load balancers stays with both for this time. If another program wrote it into one of them, that one gets its own
/// back meanwhile.
const DUPLICATE_PATIENCE: Duration = Duration::from_mins(1);

#[derive(Debug, Default)]
pub(crate) struct Allocation {
    /// Addresses of load balancers whose object in the cache may lack them, by object name: a write without an answer may have
    /// succeeded. With the time of the last such write.
    reserved: BTreeMap<String, (Vec<IpAddr>, Instant)>,
    /// When each address was last released, for [`REST`], and the Service that had it.
    released: BTreeMap<IpAddr, (Instant, Option<Key>)>,
    /// Load balancers whose address another one has that is served instead, by object name, and since when that is known.
    duplicates: BTreeMap<String, Instant>,
    /// The addresses that the Service of each load balancer publishes, or is about to, by object name.
    confirmed: BTreeMap<String, Vec<IpAddr>>,
    /// Owners without an address, to retry when a pool changes or an address is released that they may use.
    waiting: BTreeMap<Owner, WaitingRequest>,
}

impl Allocation {
    /// The addresses of a load balancer, which has `current`. They are reserved until
    /// [`Allocation::end_reservation`], also if a later try fails.
    pub(crate) fn allocate(
        &mut self,
        lb: &LoadBalancer,
        current: Vec<IpAddr>,
        pools: &[Pool],
        index: &Index,
    ) -> Result<Vec<IpAddr>, Error> {
        let result = self.find_addresses(lb, current, pools, index);
        let confirmed = result.as_ref().unwrap_or(&lb.published).clone();
        self.confirmed.insert(spec::object_name(&lb.owner), confirmed);
        result
    }

    fn find_addresses(
        &mut self,
        lb: &LoadBalancer,
        current: Vec<IpAddr>,
        pools: &[Pool],
        index: &Index,
    ) -> Result<Vec<IpAddr>, Error> {
        let name = spec::object_name(&lb.owner);
        let resting = self.resting(&lb.owner.service);
        let published = self.undisputed(&name, &current, &lb.published, index);
        let request = Request {
            namespace: lb.owner.service.namespace(),
            families: &lb.families,
            addresses: &lb.requested_addresses,
            pool: lb.pool.as_deref(),
            current: &current,
            published: &published,
            resting: &resting,
        };
        let taken = self.taken(index, &name);
        if is_unchanged(pools, &taken, request) {
            self.waiting.remove(&lb.owner);
            return Ok(current);
        }
        match allocate(pools, &taken, request) {
            Ok(addresses) => {
                self.waiting.remove(&lb.owner);
                // Those of an earlier try stay: it may have succeeded.
                let (reserved, since) =
                    self.reserved.entry(name).or_insert_with(|| (Vec::new(), Instant::now()));
                *since = Instant::now();
                for address in &addresses {
                    if !reserved.contains(address) {
                        reserved.push(*address);
                    }
                }
                Ok(addresses)
            }
            Err(error) => {
                let request = WaitingRequest {
                    namespace: lb.owner.service.namespace().to_owned(),
                    families: lb.families.clone(),
                    addresses: lb.requested_addresses.clone(),
                    pool: lb.pool.clone(),
                };
                self.waiting.insert(lb.owner.clone(), request);
                Err(error)
            }
        }
    }

    /// Ends the reservation of the load balancer of this name, and returns its addresses.
    pub(crate) fn end_reservation(&mut self, name: &str) -> Option<Vec<IpAddr>> {
        self.reserved.remove(name).map(|(addresses, _)| addresses)
    }

    /// A write of the load balancer of this name begins, or ended without an answer: it may have an effect from now on. The
    /// allocation was earlier, and targets are written in between.
    pub(crate) fn renew_reservation(&mut self, name: &str) {
        if let Some((_, since)) = self.reserved.get_mut(name) {
            *since = Instant::now();
        }
    }

    /// How long the load balancer of this name keeps an address that another one has, and that is served for the other one.
    pub(crate) fn disputed_for(&self, name: &str) -> Option<Duration> {
        let left = DUPLICATE_PATIENCE.saturating_sub(self.duplicates.get(name)?.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Whether addresses are reserved for the load balancer of this name.
    pub(crate) fn is_reserved(&self, name: &str) -> bool {
        self.reserved.contains_key(name)
    }

    /// How long a write of this name that was given up may still have an effect.
    pub(crate) fn unsettled(&self, name: &str) -> Option<Duration> {
        let (_, since) = self.reserved.get(name)?;
        let left = LATEST_EFFECT.saturating_sub(since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Lets the addresses rest that `service` had, and returns the owners that may use one; they no longer wait. The others would only
    /// be refused again.
    pub(crate) fn release(
        &mut self,
        service: Option<&Key>,
        released: &[IpAddr],
        pools: &[Pool],
    ) -> Vec<Owner> {
        let now = Instant::now();
        self.released.extend(released.iter().map(|address| (*address, (now, service.cloned()))));
        let may_end =
            |request: &WaitingRequest| released.iter().any(|address| request.may_use(*address, pools));
        self.waiting.extract_if(.., |_, request| may_end(request)).map(|(owner, _)| owner).collect()
    }

    /// The load balancer of `owner` is being deleted: it waits for no address, and disputes none.
    pub(crate) fn forget(&mut self, owner: &Owner) {
        self.waiting.remove(owner);
        let name = spec::object_name(owner);
        self.duplicates.remove(&name);
        self.confirmed.remove(&name);
    }

    /// Removes and returns all owners that wait.
    pub(crate) fn take_waiting(&mut self) -> Vec<Owner> {
        std::mem::take(&mut self.waiting).into_keys().collect()
    }

    /// The addresses that other Services had a moment ago. A Service that is created again may have its own at once.
    fn resting(&mut self, service: &Key) -> BTreeSet<IpAddr> {
        self.released.retain(|_, (since, _)| since.elapsed() < REST);
        let of_others = self.released.iter().filter(|(_, (_, last))| last.as_ref() != Some(service));
        of_others.map(|(address, _)| *address).collect()
    }

    /// The published addresses without those that another Service publishes for so long that it will keep them. Edge hosts serve an
    /// address for the first of its load balancers by name.
    fn undisputed(
        &mut self,
        name: &str,
        current: &[IpAddr],
        published: &[IpAddr],
        index: &Index,
    ) -> Vec<IpAddr> {
        let confirmed = &self.confirmed;
        // Unknown for a load balancer that this process has not reconciled yet.
        let is_with_other = |address: &IpAddr, if_unknown: bool| {
            let publishes = |holder| {
                confirmed.get(holder).map_or(if_unknown, |published: &Vec<_>| published.contains(address))
            };
            current.contains(address) && index.holders_before(*address, name).any(publishes)
        };
        let Some(lost) = published.iter().find(|address| is_with_other(address, true)) else {
            self.duplicates.remove(name);
            return published.to_vec();
        };
        let since = *self.duplicates.entry(name.to_owned()).or_insert_with(|| {
            tracing::warn!(load_balancer = name, address = %lost, "address belongs to two load balancers; the first by name is served");
            Instant::now()
        });
        if since.elapsed() < DUPLICATE_PATIENCE {
            return published.to_vec();
        }
        published.iter().copied().filter(|address| !is_with_other(address, false)).collect()
    }

    fn taken<'a>(&self, index: &'a Index, name: &'a str) -> TakenByOthers<'a> {
        let others = self.reserved.iter().filter(|(other, _)| *other != name);
        TakenByOthers { index, name, reserved: others.flat_map(|(_, (list, _))| list).copied().collect() }
    }
}

/// The addresses that are in use or reserved, as seen by the load balancer `name`.
struct TakenByOthers<'a> {
    index: &'a Index,
    name: &'a str,
    /// Reserved by others.
    reserved: BTreeSet<IpAddr>,
}

impl Taken for TakenByOthers<'_> {
    fn contains(&self, address: IpAddr) -> bool {
        self.reserved.contains(&address) || self.index.is_used_by_others(address, self.name)
    }

    fn free_from(&self, from: IpAddr) -> Option<IpAddr> {
        let mut free = self.index.used().free_from(from)?;
        while self.reserved.contains(&free) {
            free = self.index.used().free_from(next(free)?)?;
        }
        Some(free)
    }
}

/// What an owner without an address waits for.
#[derive(Clone, Debug)]
pub(crate) struct WaitingRequest {
    namespace: String,
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
        if let Some(requested) = requested {
            return *requested == address;
        }
        let is_usable = |pool: &&Pool| is_usable(pool) && pool.admits(&self.namespace);
        self.families.contains(&family) && pools.iter().filter(is_usable).any(|pool| pool.contains(address))
    }
}

#[cfg(test)]
pub(crate) mod tests;
