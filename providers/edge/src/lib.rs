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
mod drained;
mod entry;
mod health;
mod index;
mod kept;
mod namespaces;
mod notifier;
mod objects;
mod pool;
mod pool_metrics;
mod pools;
mod preview;
mod provider;
mod released;
mod shared;
mod sharing;
mod sources;
pub mod spec;
mod use_rules;

pub use address_set::AddressSet;
pub use allocate::{
    ADDRESS_HELD, ADDRESS_IN_USE, ADDRESS_LIMIT_REACHED, ADDRESS_OUTSIDE_POOLS, INVALID_ADDRESS,
    NO_ADDRESS_POOL, NO_FREE_ADDRESS, POOL_NOT_ADMITTED, Request, Taken, UNKNOWN_POOL, allocate,
};
pub use calls::REJECTED_BY_API_SERVER;
pub use drained::DRAINED;
pub use kept::ADDRESS_KEPT;
pub use pool::{Pool, Range, Requester};
pub use pool_metrics::register_sample_metrics;
pub use provider::{EdgeProvider, OBJECT_NOT_OWNED, capabilities};
pub use shared::ADDRESS_POOL_NEARLY_FULL;
pub use sharing::{Conflict, Scope};

use steerage_provider_cloud::reasons;

/// The action of events about addresses.
const ASSIGN_ADDRESS: &str = "AssignAddress";

/// Every event that this provider publishes besides its errors: reason, meaning, what to do.
pub const EVENTS: &[(&str, &str, &str)] = &[
    (
        ADDRESS_KEPT,
        "Of a Service: an AddressPool was changed or deleted, or labels were, so that no pool would give the Service its address any \
         more. The load balancer keeps it. Once for each time, and once more after a restart of the controller.",
        "Add the address to a pool, admit the Service, or request another address.",
    ),
    (
        ADDRESS_POOL_NEARLY_FULL,
        "Of an AddressPool: at most a tenth of its addresses of an IP family is free, of ten or more. `status.problem` says so as long \
         as it is true.",
        "Add addresses, or another pool.",
    ),
    (
        DRAINED,
        "Of a Node that drains: no edge host that answers for a shard of the VIPs has forwarded a packet to it for a minute. A connection \
         without a packet for so long is not seen. The `EdgeHost` objects say which host still forwards (`drainingNodes`). That of a \
         killed host keeps its last content, and counts only for shards that no other host has taken over.",
        "Nothing: the node may be stopped. If it is an edge host, it then hands its VIPs over.",
    ),
];

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
        "The requested address belongs to another Service. Or the Service shares its address with others, and its annotation \
         `steerage.dev/address-sharing-key` was changed or removed: it keeps what it has.",
        "Request another address, or free this one. Or restore the annotation.",
    ),
    (
        reasons::PORT_IN_USE,
        "Another Service with the same `steerage.dev/address-sharing-key` has a port that this one requests. The Service gets no address, \
         or keeps its load balancer as it is. It is tried again when the port becomes free.",
        "Use another port, or another key.",
    ),
    (
        POOL_NOT_ADMITTED,
        "The requested AddressPool is not for this Service: its `namespaces`, `namespaceSelector` or `serviceSelector` do not match.",
        "Name another one, or ask its operator to admit the Service.",
    ),
    (
        ADDRESS_LIMIT_REACHED,
        "Services of the namespace have as many addresses of the AddressPool as its `maxAddressesPerNamespace` permits. Services keep what \
         they have.",
        "Delete Services, let them share addresses, name another pool, or ask for a higher limit. Waiting Services then get theirs.",
    ),
    (
        ADDRESS_HELD,
        "The requested address was released lately, and the `reuseDelaySeconds` of its AddressPool keeps it from Services of other names.",
        "Wait: the Service gets it then. Or request another one.",
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
