// SPDX-License-Identifier: Apache-2.0
//! The provider for Steerage's edge: writes `EdgeLoadBalancer` objects, and assigns their addresses.
//!
//! Only the lease holder calls it, so only it assigns addresses. Reads come from watches: a steady state costs no call. It never
//! talks to an edge host; edge hosts read what it writes.

mod address_set;
mod allocate;
mod allocation;
mod cache;
mod calls;
mod entry;
mod health;
mod index;
mod notifier;
mod objects;
mod pool;
mod pool_metrics;
mod pools;
mod preview;
mod provider;
mod shared;
mod sources;
pub mod spec;
mod use_rules;

pub use address_set::AddressSet;
pub use allocate::{
    ADDRESS_IN_USE, ADDRESS_OUTSIDE_POOLS, INVALID_ADDRESS, NO_ADDRESS_POOL, NO_FREE_ADDRESS,
    POOL_NOT_ADMITTED, Request, Taken, UNKNOWN_POOL, allocate,
};
pub use calls::REJECTED_BY_API_SERVER;
pub use pool::{Pool, Range};
pub use pool_metrics::register_sample_metrics;
pub use provider::{EdgeProvider, OBJECT_NOT_OWNED, capabilities};

use steerage_provider_cloud::reasons;

/// Every reason that this provider's errors carry besides those of all providers: name, meaning, what to do.
pub const REASONS: &[(&str, &str, &str)] = &[
    (NO_ADDRESS_POOL, "There is no AddressPool.", "Create one in Steerage's namespace."),
    (
        NO_FREE_ADDRESS,
        "No AddressPool that the Service may use has a free address of a family that it needs.",
        "Add addresses of the family to a pool, or free some. Waiting Services then get theirs.",
    ),
    (
        ADDRESS_OUTSIDE_POOLS,
        "The requested address is in no AddressPool, or not in the requested one.",
        "Request an address that a pool contains, or add it to one.",
    ),
    (
        ADDRESS_IN_USE,
        "The requested address belongs to another Service.",
        "Request another address, or free this one.",
    ),
    (
        POOL_NOT_ADMITTED,
        "The requested AddressPool is not for Services of this namespace.",
        "Name another one, or ask its operator to add the namespace.",
    ),
    (UNKNOWN_POOL, "There is no AddressPool of the requested name.", "Create it, or name an existing one."),
    (
        INVALID_ADDRESS,
        "The requested addresses do not fit `spec.ipFamilies`.",
        "Request at most one address of each family in `spec.ipFamilies`.",
    ),
    (
        reasons::INVALID_ANNOTATION,
        "The annotation `service.beta.kubernetes.io/load-balancer-source-ranges` has something that is no range, \
         `steerage.dev/panic-threshold` no percentage, or `steerage.dev/slow-start` no such time. The controller gives the same reason \
         for its own annotations.",
        "Use ranges such as `192.0.2.0/24`, separated by commas; a percentage from `0` to `100`; a time from `1s` to `15m`.",
    ),
    (
        reasons::UNKNOWN_ANNOTATION,
        "An annotation `service.beta.kubernetes.io/…` has almost the name of one that the edge reads.",
        "Correct the name; the message has the nearest known one.",
    ),
    (
        spec::TOO_MANY_SOURCE_RANGES,
        "The Service has more source ranges than the edge supports: 1,000 of each IP family after merging.",
        "Use larger ranges, or split the Service.",
    ),
    (
        OBJECT_NOT_OWNED,
        "An object of the name that Steerage needs exists, but is not Steerage's.",
        "Restore the labels that the message names, or delete that object.",
    ),
    (
        REJECTED_BY_API_SERVER,
        "The API server finds an object of the edge invalid: most likely the CRDs are of another version.",
        "Install the CRDs of the controller's version.",
    ),
];
