// SPDX-License-Identifier: Apache-2.0
//! Why a load balancer gets no address, or keeps what it has, as errors with their messages. Pure. No message names another Service.

use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Family;
use steerage_model::annotations::ADDRESS_SHARING_KEY;
use steerage_provider_api::Error;
use steerage_provider_cloud::reasons::PORT_IN_USE;

use super::{
    ADDRESS_HELD, ADDRESS_IN_USE, ADDRESS_LIMIT_REACHED, ADDRESS_OUTSIDE_POOLS, NO_ADDRESS_POOL,
    NO_FREE_ADDRESS, Request,
};
use crate::Pool;
use crate::sharing::Conflict;

/// The result of a refused request, for messages: a load balancer that exists is left as it is.
pub(super) fn result(request: Request<'_>) -> String {
    let current: Vec<String> = request.current.iter().map(ToString::to_string).collect();
    if current.is_empty() {
        "No address is assigned.".to_owned()
    } else {
        format!("The load balancer keeps {}.", current.join(" and "))
    }
}

pub(super) fn in_use(address: IpAddr, conflict: Conflict, request: Request<'_>) -> Error {
    let result = result(request);
    match conflict {
        Conflict::Port(protocol, port) => {
            let message = format!(
                "Port {protocol} {port} of address {address} belongs to another Service with the same {ADDRESS_SHARING_KEY}. {result} Use \
                 another port or another key, or free the port there."
            );
            Error::invalid(PORT_IN_USE, message)
        }
        Conflict::Address if request.current.contains(&address) => {
            let message = format!(
                "Other Services share address {address}, and the annotation {ADDRESS_SHARING_KEY} was changed or removed. {result} Restore \
                 the annotation, or request another address."
            );
            Error::invalid(ADDRESS_IN_USE, message)
        }
        Conflict::Address => {
            let message = format!(
                "Address {address} belongs to another Service. {result} Request another, or free it there."
            );
            Error::invalid(ADDRESS_IN_USE, message)
        }
    }
}

pub(super) fn held(address: IpAddr, left: Duration, request: Request<'_>) -> Error {
    let message = format!(
        "Address {address} was released lately. {} A Service of another name gets it in {} s (reuseDelaySeconds of its AddressPool). Wait, \
         or request another.",
        result(request),
        left.as_secs().max(1)
    );
    Error::invalid(ADDRESS_HELD, message)
}

pub(super) fn limit_reached(pool: &Pool, family: Family, request: Request<'_>) -> Error {
    let message = format!(
        "Services of namespace {} have {} {family} addresses of AddressPool `{}` or more, which is its maxAddressesPerNamespace. {} Delete \
         Services, let them share an address ({ADDRESS_SHARING_KEY}), or ask for a higher limit.",
        request.requester.namespace,
        pool.max_addresses_per_namespace.unwrap_or(0),
        pool.name,
        result(request)
    );
    Error::invalid(ADDRESS_LIMIT_REACHED, message)
}

pub(super) fn no_pool(request: Request<'_>) -> Error {
    let message = format!("There is no AddressPool. {} Create one in Steerage's namespace.", result(request));
    Error::invalid(NO_ADDRESS_POOL, message)
}

pub(super) fn outside(address: IpAddr, pools: &[Pool], request: Request<'_>) -> Error {
    let result = result(request);
    let message = match request.pool {
        Some(name) => {
            format!(
                "Address {address} is not in AddressPool `{name}`. {result} Request an address and a pool that fit."
            )
        }
        None => format!(
            "Address {address} is in no AddressPool for namespace {}. {result} Add it to one of: {}; or request another.",
            request.requester.namespace,
            names(pools, request)
        ),
    };
    Error::invalid(ADDRESS_OUTSIDE_POOLS, message)
}

pub(super) fn nothing_free(family: Family, request: Request<'_>) -> Error {
    let result = result(request);
    let held = request.held.keys().filter(|address| Family::of(**address) == family).count();
    let held = if held > 0 {
        format!(" Released lately, and kept from other Services (reuseDelaySeconds): {held}.")
    } else {
        String::new()
    };
    let message = match request.pool {
        Some(name) => {
            format!("AddressPool `{name}` has no free {family} address.{held} {result} Add some to it.")
        }
        None => format!(
            "No AddressPool with autoAssign for namespace {} has a free {family} address.{held} {result} Add some to one, or name a pool.",
            request.requester.namespace
        ),
    };
    Error::invalid(NO_FREE_ADDRESS, message)
}

/// The pools that the Service may use: others are none of a tenant's business.
pub(super) fn names(pools: &[Pool], request: Request<'_>) -> String {
    let admitted = pools.iter().filter(|pool| pool.admits(request.requester));
    let mut names: Vec<&str> = admitted.map(|pool| pool.name.as_str()).collect();
    names.sort_unstable();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
