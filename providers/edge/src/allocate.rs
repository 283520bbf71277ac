// SPDX-License-Identifier: Apache-2.0
//! Which addresses a load balancer gets. Pure: called by the provider under its allocation lock.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_model::Family;
use steerage_provider_api::Error;

use crate::Pool;

/// There is no address pool at all.
pub const NO_ADDRESS_POOL: &str = "NoAddressPool";
/// No pool that may be used has a free address of a family that the Service needs.
pub const NO_FREE_ADDRESS: &str = "NoFreeAddress";
/// The requested address is in no pool, or not in the pool that was asked for.
pub const ADDRESS_OUTSIDE_POOLS: &str = "AddressOutsidePools";
/// The requested address belongs to another Service.
pub const ADDRESS_IN_USE: &str = "AddressInUse";
/// There is no pool of the requested name.
pub const UNKNOWN_POOL: &str = "UnknownPool";
/// The requested addresses do not fit the families of the Service.
pub const INVALID_ADDRESS: &str = "InvalidAddress";

/// What one load balancer asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The families to serve, one address each.
    pub families: &'a [Family],
    /// Addresses that the user asked for, at most one of each family.
    pub addresses: &'a [IpAddr],
    /// The pool that the user asked for.
    pub pool: Option<&'a str>,
    /// What the load balancer has now. It stays even when its pool has shrunk, unless the user asks for something else.
    pub current: &'a [IpAddr],
    /// What the Service's status shows; taken again if a pool still has it.
    pub published: &'a [IpAddr],
}

/// Gives out one address for each family, in the families' order. `taken` are the addresses of all other load balancers. The same arguments always give the same addresses: the lowest free one of the first pool by name.
pub fn allocate(
    pools: &[Pool],
    taken: &BTreeSet<IpAddr>,
    request: Request<'_>,
) -> Result<Vec<IpAddr>, Error> {
    let allowed = allowed(pools, request.pool)?;
    fits(request)?;
    request.families.iter().map(|family| one(pools, &allowed, taken, request, *family)).collect()
}

/// The pools that this request may use, by name.
fn allowed<'a>(pools: &'a [Pool], wanted: Option<&str>) -> Result<Vec<&'a Pool>, Error> {
    let mut allowed: Vec<&Pool> = match wanted {
        Some(name) => pools.iter().filter(|pool| pool.name == name).collect(),
        None => pools.iter().collect(),
    };
    allowed.sort_by(|a, b| a.name.cmp(&b.name));
    match wanted {
        Some(name) if allowed.is_empty() => {
            let message =
                format!("there is no AddressPool {name:?}: create it, or name one of {}", names(pools));
            Err(Error::invalid(UNKNOWN_POOL, message))
        }
        _ => Ok(allowed),
    }
}

/// What a load balancer has, if that is all that it asks for: by far the most frequent case, and answered without a look at
/// anybody else's.
pub(crate) fn unchanged(pools: &[Pool], request: Request<'_>) -> bool {
    let families: Vec<Family> = request.current.iter().map(|address| Family::of(*address)).collect();
    families == request.families
        && request.addresses.iter().all(|address| request.current.contains(address))
        && request.pool.is_none_or(|name| {
            let pool = pools.iter().find(|pool| pool.name == name);
            pool.is_some_and(|pool| request.current.iter().all(|address| pool.contains(*address)))
        })
}

/// At most one requested address for each family, and none for a family that is not served.
fn fits(request: Request<'_>) -> Result<(), Error> {
    for (i, address) in request.addresses.iter().enumerate() {
        let family = Family::of(*address);
        if !request.families.contains(&family) {
            let message =
                format!("{address} was asked for, but the Service has no {family} in spec.ipFamilies");
            return Err(Error::invalid(INVALID_ADDRESS, message));
        }
        if request.addresses.iter().skip(i + 1).any(|other| Family::of(*other) == family) {
            let message = format!("more than one {family} address was asked for: ask for one");
            return Err(Error::invalid(INVALID_ADDRESS, message));
        }
    }
    Ok(())
}

fn one(
    all: &[Pool],
    allowed: &[&Pool],
    taken: &BTreeSet<IpAddr>,
    request: Request<'_>,
    family: Family,
) -> Result<IpAddr, Error> {
    let in_pools = |address: IpAddr| allowed.iter().any(|pool| pool.contains(address));
    let of_family = |list: &[IpAddr]| list.iter().copied().find(|address| Family::of(*address) == family);
    if let Some(address) = of_family(request.addresses) {
        if taken.contains(&address) {
            let message =
                format!("{address} belongs to another Service: ask for another address, or free it there");
            return Err(Error::invalid(ADDRESS_IN_USE, message));
        }
        if in_pools(address) {
            return Ok(address);
        }
        return Err(if all.is_empty() { no_pool() } else { outside(address, all, request.pool) });
    }
    let current = of_family(request.current).filter(|a| request.pool.is_none() || in_pools(*a));
    let published = of_family(request.published).filter(|a| in_pools(*a));
    if let Some(address) = current.or(published).filter(|address| !taken.contains(address)) {
        return Ok(address);
    }
    let free = allowed
        .iter()
        .filter(|pool| pool.auto_assign || request.pool.is_some())
        .flat_map(|pool| &pool.ranges)
        .filter(|range| range.family() == family)
        .flat_map(|range| range.addresses())
        .find(|address| !taken.contains(address));
    free.ok_or_else(|| if all.is_empty() { no_pool() } else { nothing_free(family, request.pool) })
}

fn no_pool() -> Error {
    Error::invalid(NO_ADDRESS_POOL, "there is no AddressPool: create one in the namespace of Steerage")
}

fn outside(address: IpAddr, pools: &[Pool], wanted: Option<&str>) -> Error {
    let message = match wanted {
        Some(name) => {
            format!("{address} is not in AddressPool {name:?}: ask for an address or a pool that fit")
        }
        None => format!(
            "{address} is in no AddressPool (there are {}): add it to one, or ask for another",
            names(pools)
        ),
    };
    Error::invalid(ADDRESS_OUTSIDE_POOLS, message)
}

fn nothing_free(family: Family, wanted: Option<&str>) -> Error {
    let message = match wanted {
        Some(name) => format!("AddressPool {name:?} has no free {family} address: add some to it"),
        None => format!(
            "no AddressPool with autoAssign has a free {family} address: add some to one, or name a pool"
        ),
    };
    Error::invalid(NO_FREE_ADDRESS, message)
}

fn names(pools: &[Pool]) -> String {
    let mut names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    names.sort_unstable();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests;
