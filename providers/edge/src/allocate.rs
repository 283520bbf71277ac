// SPDX-License-Identifier: Apache-2.0
//! Which addresses a load balancer gets. Pure: called by the provider under its allocation lock.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_model::{Family, shown};
use steerage_provider_api::Error;

use crate::address_set::next;
use crate::{AddressSet, Pool, Range};

/// There is no address pool at all.
pub const NO_ADDRESS_POOL: &str = "NoAddressPool";
/// No pool that may be used has a free address of a family that the Service needs.
pub const NO_FREE_ADDRESS: &str = "NoFreeAddress";
/// The requested address is in no pool, or not in the requested one.
pub const ADDRESS_OUTSIDE_POOLS: &str = "AddressOutsidePools";
/// The requested address belongs to another Service.
pub const ADDRESS_IN_USE: &str = "AddressInUse";
/// There is no pool of the requested name.
pub const UNKNOWN_POOL: &str = "UnknownPool";
/// The requested pool is not for Services of this namespace.
pub const POOL_NOT_ADMITTED: &str = "PoolNotAdmitted";
/// The requested addresses do not fit the families of the Service.
pub const INVALID_ADDRESS: &str = "InvalidAddress";

/// What one load balancer requests.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The namespace of the Service.
    pub namespace: &'a str,
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
}

/// The addresses of all other load balancers.
pub trait Taken {
    /// Whether another load balancer has the address.
    fn contains(&self, address: IpAddr) -> bool;

    /// The lowest address from `from` on, of its family, that no load balancer has.
    fn free_from(&self, from: IpAddr) -> Option<IpAddr>;
}

impl Taken for AddressSet {
    fn contains(&self, address: IpAddr) -> bool {
        self.contains(address)
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
    allowed.retain(|pool| pool.admits(request.namespace));
    allowed.sort_by(|a, b| (b.priority, &a.name).cmp(&(a.priority, &b.name)));
    match wanted {
        Some(name) if exists && allowed.is_empty() => {
            let message = format!(
                "AddressPool `{}` is not for Services of namespace {}. {} Name one of: {}; or ask for the namespace to be added to it.",
                shown(name),
                request.namespace,
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
    is_satisfied(pools, request) && !is_foreign(taken, request)
}

/// Whether an address in the object is that of another load balancer. The Service never published it: another program wrote it.
fn is_foreign(taken: &impl Taken, request: Request<'_>) -> bool {
    request.current.iter().any(|address| taken.contains(*address) && !request.published.contains(address))
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
    if let Some(address) = of_family(request.addresses) {
        let is_current = request.current.contains(&address);
        if taken.contains(address) && !(is_current && is_published(address)) {
            let message = format!(
                "Address {address} belongs to another Service. {} Request another, or free it there.",
                result(request)
            );
            return Err(Error::invalid(ADDRESS_IN_USE, message));
        }
        let is_kept = is_current || is_edited && is_published(address);
        if in_pools(address) || is_kept && may_stay(address) {
            return Ok(address);
        }
        return Err(if all.is_empty() { no_pool(request) } else { outside(address, all, request) });
    }
    let current = of_family(request.current)
        .filter(|address| may_stay(*address) && (is_published(*address) || !taken.contains(*address)));
    let published = of_family(request.published).filter(|address| {
        !taken.contains(*address) && (in_pools(*address) || is_edited && may_stay(*address))
    });
    if let Some(address) = current.or(published) {
        return Ok(address);
    }
    let ranges = allowed
        .iter()
        .filter(|pool| pool.auto_assign || request.pool.is_some())
        .flat_map(|pool| &pool.ranges)
        .filter(|range| range.family() == family);
    lowest_free(ranges, taken, request.resting)
        .ok_or_else(|| if all.is_empty() { no_pool(request) } else { nothing_free(family, request) })
}

/// The first free address of the ranges, if possible one that does not rest.
fn lowest_free<'a>(
    ranges: impl Iterator<Item = &'a Range>,
    taken: &impl Taken,
    resting: &BTreeSet<IpAddr>,
) -> Option<IpAddr> {
    let mut rests = None;
    for range in ranges {
        let mut free = taken.free_from(range.first());
        while let Some(address) = free.filter(|address| range.contains(*address)) {
            if !resting.contains(&address) {
                return Some(address);
            }
            rests = rests.or(Some(address));
            free = next(address).and_then(|address| taken.free_from(address));
        }
    }
    rests
}

/// The result of a refused request, for messages: a load balancer that exists is left as it is.
fn result(request: Request<'_>) -> String {
    let current: Vec<String> = request.current.iter().map(ToString::to_string).collect();
    if current.is_empty() {
        "No address is assigned.".to_owned()
    } else {
        format!("The load balancer keeps {}.", current.join(" and "))
    }
}

fn no_pool(request: Request<'_>) -> Error {
    let message = format!("There is no AddressPool. {} Create one in Steerage's namespace.", result(request));
    Error::invalid(NO_ADDRESS_POOL, message)
}

fn outside(address: IpAddr, pools: &[Pool], request: Request<'_>) -> Error {
    let result = result(request);
    let message = match request.pool {
        Some(name) => {
            format!(
                "Address {address} is not in AddressPool `{name}`. {result} Request an address and a pool that fit."
            )
        }
        None => format!(
            "Address {address} is in no AddressPool for namespace {}. {result} Add it to one of: {}; or request another.",
            request.namespace,
            names(pools, request)
        ),
    };
    Error::invalid(ADDRESS_OUTSIDE_POOLS, message)
}

fn nothing_free(family: Family, request: Request<'_>) -> Error {
    let result = result(request);
    let message = match request.pool {
        Some(name) => {
            format!("AddressPool `{name}` has no free {family} address. {result} Add some to it.")
        }
        None => format!(
            "No AddressPool with autoAssign for namespace {} has a free {family} address. {result} Add some to one, or name a pool.",
            request.namespace
        ),
    };
    Error::invalid(NO_FREE_ADDRESS, message)
}

/// The pools that Services of the namespace may use: others are none of a tenant's business.
fn names(pools: &[Pool], request: Request<'_>) -> String {
    let admitted = pools.iter().filter(|pool| pool.admits(request.namespace));
    let mut names: Vec<&str> = admitted.map(|pool| pool.name.as_str()).collect();
    names.sort_unstable();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests;
