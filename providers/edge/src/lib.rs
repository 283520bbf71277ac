// SPDX-License-Identifier: Apache-2.0
//! The provider for our own edge: writes `EdgeLoadBalancer` objects and gives out their addresses.
//!
//! Called by the controller, and only where that holds the Lease: nobody else gives out addresses. A steady state costs no call, for
//! everything that is read is kept up by watches. It never talks to an edge host; those read what it writes.

mod allocate;
mod cache;
mod calls;
mod entry;
mod health;
mod notifier;
mod objects;
mod pool;
mod pools;
mod provider;
mod shared;
pub mod spec;

pub use allocate::{
    ADDRESS_IN_USE, ADDRESS_OUTSIDE_POOLS, INVALID_ADDRESS, NO_ADDRESS_POOL, NO_FREE_ADDRESS, Request,
    UNKNOWN_POOL, allocate,
};
pub use calls::REJECTED_BY_API_SERVER;
pub use pool::{Pool, Range};
pub use provider::{EdgeProvider, OBJECT_NOT_OWNED};

/// Every reason that this provider's errors carry besides those of all providers, with its meaning.
pub const REASONS: &[(&str, &str)] = &[
    (NO_ADDRESS_POOL, "There is no AddressPool at all."),
    (
        NO_FREE_ADDRESS,
        "No AddressPool that may be used has a free address of a family that the Service needs.",
    ),
    (
        ADDRESS_OUTSIDE_POOLS,
        "The requested address is in no AddressPool, or not in the one that was asked for.",
    ),
    (ADDRESS_IN_USE, "The requested address belongs to another Service."),
    (UNKNOWN_POOL, "There is no AddressPool of the requested name."),
    (INVALID_ADDRESS, "The requested addresses do not fit spec.ipFamilies."),
    (spec::PROTOCOL_NOT_SUPPORTED, "A port has a protocol that the edge cannot forward."),
    (OBJECT_NOT_OWNED, "An object of the name that Steerage needs exists, but is not Steerage's."),
    (
        REJECTED_BY_API_SERVER,
        "The API server finds an object of the edge invalid: most likely the CRDs are of another version.",
    ),
];
