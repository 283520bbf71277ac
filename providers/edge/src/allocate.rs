// SPDX-License-Identifier: Apache-2.0
//! Which addresses a load balancer gets. Pure: called by the provider under its allocation lock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_edge_api::AddressSharing;
use steerage_model::{Family, shown};
use steerage_provider_api::Error;

use crate::address_set::next;
use crate::sharing::{Conflict, Scope};
use crate::{AddressSet, Pool, Range, Requester};

mod refusals;

use refusals::{held, in_use, limit_reached, names, no_pool, nothing_free, outside, result};

/// There is no address pool at all.
pub const NO_ADDRESS_POOL: &str = "NoAddressPool";
/// No pool that may be used has a free address of a family that the Service needs.
pub const NO_FREE_ADDRESS: &str = "NoFreeAddress";
/// The requested address is in no pool, or not in the requested one.
pub const ADDRESS_OUTSIDE_POOLS: &str = "AddressOutsidePools";
/// The requested address belongs to another Service, or the Service shares its address with others and no longer may.
pub const ADDRESS_IN_USE: &str = "AddressInUse";
/// The Services of the namespace have as many addresses of the pool as one namespace may have.
pub const ADDRESS_LIMIT_REACHED: &str = "AddressLimitReached";
/// The requested address was released lately, and is kept for the Service that had it.
pub const ADDRESS_HELD: &str = "AddressHeld";
/// There is no pool of the requested name.
pub const UNKNOWN_POOL: &str = "UnknownPool";
/// The requested pool is not for this Service.
pub const POOL_NOT_ADMITTED: &str = "PoolNotAdmitted";
/// The requested addresses do not fit the families of the Service.
pub const INVALID_ADDRESS: &str = "InvalidAddress";

/// What one load balancer requests.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The Service.
    pub requester: Requester<'a>,
    /// The families to serve, one address each.
    pub families: &'a [Family],
    /// Requested addresses, at most one of each family.
    pub addresses: &'a [IpAddr],
    /// The requested pool.
    pub pool: Option<&'a str>,
    /// The current addresses. They stay even when their pool has shrunk, unless the user requests others, or another program wrote an
    /// address of another load balancer into the object.
    pub current: &'a [IpAddr],
    /// What the Service's status shows; taken again if a pool still has it, or if the object had other addresses.
    pub published: &'a [IpAddr],
    /// Free addresses that another load balancer had a moment ago. They are given only when no other is free, or on request: a node
    /// may still forward them to the last Service's pods.
    pub resting: &'a BTreeSet<IpAddr>,
    /// Free addresses that are kept for the Service that had them, and for how long.
    pub held: &'a BTreeMap<IpAddr, Duration>,
}

/// The addresses of all other load balancers.
pub trait Taken {
    /// Why the load balancer cannot have the address as its Service now wants it.
    fn conflict(&self, address: IpAddr, scope: Scope) -> Option<Conflict>;

    /// The same of the load balancer as its object is.
    fn present_conflict(&self, address: IpAddr) -> Option<Conflict>;

    /// The addresses of load balancers with the same key.
    fn shared(&self) -> BTreeSet<IpAddr>;

    /// The addresses of other load balancers of the namespace.
    fn of_namespace(&self) -> BTreeSet<IpAddr>;

    /// The lowest address from `from` on, of its family, that no load balancer has.
    fn free_from(&self, from: IpAddr) -> Option<IpAddr>;
}

/// Of load balancers that share nothing.
impl Taken for AddressSet {
    fn conflict(&self, address: IpAddr, _: Scope) -> Option<Conflict> {
        self.present_conflict(address)
    }

    fn present_conflict(&self, address: IpAddr) -> Option<Conflict> {
        self.contains(address).then_some(Conflict::Address)
    }

    fn shared(&self) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }

    fn of_namespace(&self) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }

    fn free_from(&self, from: IpAddr) -> Option<IpAddr> {
        self.free_from(from)
    }
}

/// Allocates one address for each family, in the families' order. `taken` are the addresses of all other load balancers. The same
/// arguments always give the same addresses: the lowest free one of the first pool by priority and name, if possible one that does not rest.
pub fn allocate(pools: &[Pool], taken: &impl Taken, request: Request<'_>) -> Result<Vec<IpAddr>, Error> {
    let allowed = allowed(pools, request)?;
    fits(request)?;
    request.families.iter().map(|family| one(pools, &allowed, taken, request, *family)).collect()
}

/// The pools that this request may use, by priority and name.
fn allowed<'a>(pools: &'a [Pool], request: Request<'_>) -> Result<Vec<&'a Pool>, Error> {
    let wanted = request.pool;
    let mut allowed: Vec<&Pool> = match wanted {
        Some(name) => pools.iter().filter(|pool| pool.name == name).collect(),
        None => pools.iter().collect(),
    };
    let exists = !allowed.is_empty();
    allowed.retain(|pool| pool.admits(request.requester));
    allowed.sort_by(|a, b| (b.priority, &a.name).cmp(&(a.priority, &b.name)));
    match wanted {
        Some(name) if exists && allowed.is_empty() => {
            let message = format!(
                "AddressPool `{}` is not for this Service of namespace {}. {} Name one of: {}; or ask its operator to admit the Service.",
                shown(name),
                request.requester.namespace,
                result(request),
                names(pools, request)
            );
            Err(Error::invalid(POOL_NOT_ADMITTED, message))
        }
        Some(name) if allowed.is_empty() => {
            let message = format!(
                "AddressPool `{}` does not exist. {} Create it, or name one of: {}.",
                shown(name),
                result(request),
                names(pools, request)
            );
            Err(Error::invalid(UNKNOWN_POOL, message))
        }
        _ => Ok(allowed),
    }
}

/// Whether the current addresses stay.
pub(crate) fn is_unchanged(pools: &[Pool], taken: &impl Taken, request: Request<'_>) -> bool {
    is_satisfied(pools, request)
        && !is_foreign(taken, request)
        && request.current.iter().all(|address| newly_in_conflict(taken, *address).is_none())
}

/// Whether an address in the object is that of another load balancer. The Service never published it: another program wrote it.
fn is_foreign(taken: &impl Taken, request: Request<'_>) -> bool {
    let is_with_other = |address: &IpAddr| taken.present_conflict(*address).is_some();
    request.current.iter().any(|address| is_with_other(address) && !request.published.contains(address))
}

/// Why the load balancer could not have an address of its own any more if its key or its ports became as its Service now wants them.
/// The namespaces no longer matter: those that share it stay.
fn newly_in_conflict(taken: &impl Taken, address: IpAddr) -> Option<Conflict> {
    taken.conflict(address, Scope::Cluster).filter(|_| taken.present_conflict(address).is_none())
}

/// Who may share an address: one that is in several pools, only whom all of them permit.
fn scope(pools: &[Pool], address: IpAddr) -> Scope {
    let mut of_address = pools.iter().filter(|pool| pool.contains(address)).peekable();
    if of_address.peek().is_some() && of_address.all(|pool| pool.sharing == AddressSharing::Cluster) {
        Scope::Cluster
    } else {
        Scope::Namespace
    }
}

/// Whether the pool may have shrunk: no pool has the address now.
fn is_outside(pools: &[Pool], address: IpAddr) -> bool {
    !pools.iter().any(|pool| pool.contains(address))
}

fn is_satisfied(pools: &[Pool], request: Request<'_>) -> bool {
    let families: Vec<Family> = request.current.iter().map(|address| Family::of(*address)).collect();
    families == request.families
        && request.addresses.iter().all(|address| request.current.contains(address))
        && request.pool.is_none_or(|name| {
            let pool = pools.iter().find(|pool| pool.name == name);
            let stays = |pool: &Pool, address| pool.contains(address) || is_outside(pools, address);
            pool.is_some_and(|pool| request.current.iter().all(|address| stays(pool, *address)))
        })
}

/// At most one requested address for each family, and none for a family that is not served.
fn fits(request: Request<'_>) -> Result<(), Error> {
    for (i, address) in request.addresses.iter().enumerate() {
        let family = Family::of(*address);
        if !request.families.contains(&family) {
            let message = format!(
                "Requested address {address} is {family}, which spec.ipFamilies lacks. {} Remove it, or add {family}.",
                result(request)
            );
            return Err(Error::invalid(INVALID_ADDRESS, message));
        }
        if request.addresses.iter().skip(i + 1).any(|other| Family::of(*other) == family) {
            let message = format!(
                "More than one {family} address is requested. {} Request at most one.",
                result(request)
            );
            return Err(Error::invalid(INVALID_ADDRESS, message));
        }
    }
    Ok(())
}

fn one(
    all: &[Pool],
    allowed: &[&Pool],
    taken: &impl Taken,
    request: Request<'_>,
    family: Family,
) -> Result<IpAddr, Error> {
    let in_pools = |address: IpAddr| allowed.iter().any(|pool| pool.contains(address));
    let of_family = |list: &[IpAddr]| list.iter().copied().find(|address| Family::of(*address) == family);
    let is_published = |address: IpAddr| request.published.contains(&address);
    let may_stay = |address: IpAddr| request.pool.is_none() || in_pools(address) || is_outside(all, address);
    // The addresses of an object that another program edited are restored, like those of one that it left alone.
    let is_edited = is_foreign(taken, request);
    let limits = Limits::new(allowed, taken, family);
    if let Some(address) = of_family(request.addresses) {
        let is_current = request.current.contains(&address);
        let conflict = if is_current && is_published(address) {
            newly_in_conflict(taken, address)
        } else {
            taken.conflict(address, scope(all, address))
        };
        if let Some(conflict) = conflict {
            return Err(in_use(address, conflict, request));
        }
        let is_kept = is_current || is_edited && is_published(address);
        if is_kept && (in_pools(address) || may_stay(address)) {
            return Ok(address);
        }
        if in_pools(address) {
            let of_address = || allowed.iter().filter(|pool| pool.contains(address));
            return if let Some(left) = request.held.get(&address) {
                Err(held(address, *left, request))
            } else if let Some(pool) = of_address().find(|pool| limits.is_reached(pool, address))
                && of_address().all(|pool| limits.is_reached(pool, address))
            {
                Err(limit_reached(pool, family, request))
            } else {
                Ok(address)
            };
        }
        return Err(if all.is_empty() { no_pool(request) } else { outside(address, all, request) });
    }
    let current = of_family(request.current)
        .filter(|address| may_stay(*address))
        .filter(|address| is_published(*address) || taken.present_conflict(*address).is_none());
    if let Some(address) = current {
        return match newly_in_conflict(taken, address) {
            Some(conflict) => Err(in_use(address, conflict, request)),
            None => Ok(address),
        };
    }
    let is_free = |address: IpAddr| taken.conflict(address, scope(all, address)).is_none();
    let published = of_family(request.published)
        .filter(|address| is_free(*address) && (in_pools(*address) || is_edited && may_stay(*address)))
        .filter(|address| !request.held.contains_key(address));
    if let Some(address) = published {
        return Ok(address);
    }
    let may_have = |address: IpAddr| {
        allowed.iter().any(|pool| pool.contains(address) && !limits.is_reached(pool, address))
    };
    if let Some(shared) = shared(all, taken, request, family, may_have) {
        return shared;
    }
    let usable = || allowed.iter().filter(|pool| pool.auto_assign || request.pool.is_some());
    let ranges = usable()
        .filter(|pool| !limits.is_full(pool))
        .flat_map(|pool| &pool.ranges)
        .filter(|range| range.family() == family);
    lowest_free(ranges, taken, request).ok_or_else(|| match usable().find(|pool| limits.is_full(pool)) {
        Some(pool) => limit_reached(pool, family, request),
        None if all.is_empty() => no_pool(request),
        None => nothing_free(family, request),
    })
}

/// What other load balancers of the namespace have of the pools with a limit.
struct Limits {
    /// By the name of the pool.
    held: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl Limits {
    fn new(allowed: &[&Pool], taken: &impl Taken, family: Family) -> Self {
        let mut limited = allowed.iter().filter(|pool| pool.max_addresses_per_namespace.is_some()).peekable();
        if limited.peek().is_none() {
            return Self { held: BTreeMap::new() };
        }
        let of_namespace = taken.of_namespace();
        let of_pool = |pool: &&&Pool| {
            let held = of_namespace.iter().copied().filter(|a| Family::of(*a) == family && pool.contains(*a));
            (pool.name.clone(), held.collect())
        };
        Self { held: limited.map(|pool| of_pool(&pool)).collect() }
    }

    /// Whether the namespace may have no other address of the pool.
    fn is_full(&self, pool: &Pool) -> bool {
        let count = self.held.get(&pool.name).map_or(0, BTreeSet::len);
        pool.max_addresses_per_namespace
            .is_some_and(|most| count >= usize::try_from(most).unwrap_or(usize::MAX))
    }

    /// Whether the namespace may not have this address of the pool. One that it has already is counted.
    fn is_reached(&self, pool: &Pool, address: IpAddr) -> bool {
        self.is_full(pool) && !self.held.get(&pool.name).is_some_and(|held| held.contains(&address))
    }
}

/// The address that other Services with the same key have, if they may share one; refused if each of them has one of the ports.
fn shared(
    all: &[Pool],
    taken: &impl Taken,
    request: Request<'_>,
    family: Family,
    may_have: impl Fn(IpAddr) -> bool,
) -> Option<Result<IpAddr, Error>> {
    let mut refused = None;
    for address in taken.shared() {
        if Family::of(address) != family || !may_have(address) {
            continue;
        }
        match taken.conflict(address, scope(all, address)) {
            None => return Some(Ok(address)),
            Some(Conflict::Address) => {}
            Some(port) => refused = refused.or(Some(Err(in_use(address, port, request)))),
        }
    }
    refused
}

/// The first free address of the ranges, if possible one that does not rest.
fn lowest_free<'a>(
    ranges: impl Iterator<Item = &'a Range>,
    taken: &impl Taken,
    request: Request<'_>,
) -> Option<IpAddr> {
    let mut rests = None;
    for range in ranges {
        let mut free = taken.free_from(range.first());
        while let Some(address) = free.filter(|address| range.contains(*address)) {
            if !request.held.contains_key(&address) {
                if !request.resting.contains(&address) {
                    return Some(address);
                }
                rests = rests.or(Some(address));
            }
            free = next(address).and_then(|address| taken.free_from(address));
        }
    }
    rests
}

#[cfg(test)]
mod tests;
