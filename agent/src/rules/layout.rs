// SPDX-License-Identifier: Apache-2.0
//! The layout of a table: names, types and sizes of its sets and maps.

use steerage_nft::{DataType, Family, RowShape, Set};

/// The name of our table in each family.
pub const TABLE: &str = "steerage";
/// Up to this number of endpoints, a map of exactly that many slots.
pub(crate) const EXACT: u32 = 8;
/// Sizes of slot tables for more endpoints: powers of two.
pub(crate) const LARGE: [u32; 3] = [128, 1024, 8192];
/// The slots of a frontend's local list start here.
pub const LOCAL_OFFSET: u32 = 1 << 16;
/// Clients per affinity timeout. Further ones have no affinity.
const AFFINITY_SIZE: u32 = 1 << 18;

/// The sizes of all classes of maps.
pub(crate) fn classes() -> impl Iterator<Item = u32> {
    (1..=EXACT).chain(LARGE)
}

/// A set or map that the agent fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetId {
    /// Frontends except those of cluster addresses.
    Frontends,
    /// Frontends without any usable endpoint in the cluster.
    Rejected,
    /// Frontends of cluster addresses without an endpoint for this node: internal policy Local.
    Dropped,
    /// Frontends with allowed sources.
    Restricted,
    /// Allowed sources: frontend and range of source addresses.
    Sources,
    /// Frontends with a second list, of local endpoints.
    Split,
    /// Frontends that masquerade all clients.
    Masqueraded,
    /// Cluster addresses. All clients but local pods are masqueraded; ports that no Service has are rejected.
    ClusterAddresses,
    /// Endpoints on this node, as source and destination.
    Hairpins,
    /// Frontends with affinity.
    Affine,
    /// Frontends with affinity of one timeout, in seconds.
    AffineFor(u32),
    /// Endpoints that a client may keep: hash of the endpoint, and frontend.
    Sticky,
    /// The same for the local list.
    StickyLocal,
    /// Endpoints of frontends with a table of this size: frontend and slot.
    Slots(u32),
}

impl SetId {
    /// Its name in the table.
    pub fn name(self) -> String {
        match self {
            Self::Frontends => "frontends".to_owned(),
            Self::Rejected => "rejected".to_owned(),
            Self::Dropped => "dropped".to_owned(),
            Self::Restricted => "restricted".to_owned(),
            Self::Sources => "sources".to_owned(),
            Self::Split => "split".to_owned(),
            Self::Masqueraded => "masqueraded".to_owned(),
            Self::ClusterAddresses => "cluster-addresses".to_owned(),
            Self::Hairpins => "hairpins".to_owned(),
            Self::Affine => "affine".to_owned(),
            Self::AffineFor(seconds) => format!("affine-{seconds}"),
            Self::Sticky => "sticky".to_owned(),
            Self::StickyLocal => "sticky-local".to_owned(),
            Self::Slots(class) => format!("slots-{class}"),
        }
    }

    /// The set to create.
    pub(crate) fn set(self, family: Family) -> Set {
        let addr = address_type(family);
        let frontend = [addr, DataType::InetProto, DataType::InetService];
        let [a, b, c] = frontend;
        let ends = [addr, DataType::InetService];
        let name = self.name();
        match self {
            Self::ClusterAddresses => Set::new(name, &[addr]),
            Self::Hairpins => Set::new(name, &[addr, addr]),
            Self::Sources => Set::new(name, &[a, b, c, addr]).interval(),
            Self::Sticky | Self::StickyLocal => Set::new(name, &[DataType::Mark, a, b, c]).maps_to(&ends),
            Self::Slots(_) => Set::new(name, &[a, b, c, DataType::Mark]).maps_to(&ends),
            _ => Set::new(name, &frontend),
        }
    }
}

impl SetId {
    /// The lengths of its elements.
    pub fn row_shape(self, family: steerage_model::Family) -> RowShape {
        let addr = if family == steerage_model::Family::V6 { 16 } else { 4 };
        // Protocol and port take a word each.
        let frontend = addr + 8;
        let plain = |key| RowShape { key, range: false, data: 0 };
        match self {
            Self::ClusterAddresses => plain(addr),
            Self::Hairpins => plain(2 * addr),
            Self::Sources => RowShape { range: true, ..plain(frontend + addr) },
            Self::Sticky | Self::StickyLocal | Self::Slots(_) => {
                RowShape { data: addr + 4, ..plain(frontend + 4) }
            }
            _ => plain(frontend),
        }
    }
}

/// The map that packets fill: frontend and client, to the hash of the client's endpoint.
pub(crate) fn affinity_name(seconds: u32) -> String {
    format!("affinity-{seconds}")
}

pub(crate) fn affinity_set(family: Family, seconds: u32) -> Set {
    let addr = address_type(family);
    Set::new(affinity_name(seconds), &[addr, DataType::InetProto, DataType::InetService, addr])
        .maps_to(&[DataType::Mark])
        .expiring(None)
        .dynamic()
        .size(AFFINITY_SIZE)
}

fn address_type(family: Family) -> DataType {
    if family == Family::Ip6 { DataType::Ipv6Addr } else { DataType::Ipv4Addr }
}
