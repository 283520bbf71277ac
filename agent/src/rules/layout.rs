// SPDX-License-Identifier: Apache-2.0
//! The names, types and numbers of the layout: sets, maps, classes.

use steerage_nft::{DataType, Family, RowShape, Set};

/// The name of our table in each family.
pub const TABLE: &str = "steerage";
/// Up to so many endpoints have a map of exactly their number.
pub(crate) const EXACT: u32 = 8;
/// The sizes of the slot tables for more; powers of two.
pub(crate) const LARGE: [u32; 3] = [128, 1024, 8192];
/// The slots of a frontend's local list start here.
pub const LOCAL_OFFSET: u32 = 1 << 16;
/// Clients remembered per affinity timeout; when full, further ones are spread at random.
const AFFINITY_SIZE: u32 = 1 << 18;

/// The sizes of all classes of maps.
pub(crate) fn classes() -> impl Iterator<Item = u32> {
    (1..=EXACT).chain(LARGE)
}

/// A set or map that the agent fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetId {
    /// Frontends but those of cluster addresses: whatever is sent here is ours.
    Frontends,
    /// Frontends without any usable endpoint in the cluster.
    Rejected,
    /// Frontends of cluster addresses without any endpoint that this node may use: internal policy Local.
    Dropped,
    /// Frontends that only some sources may use.
    Restricted,
    /// Those sources: frontend and range of source addresses.
    Sources,
    /// Frontends that have a list of local endpoints too.
    Split,
    /// Frontends all of whose clients are masqueraded.
    Masqueraded,
    /// Cluster addresses: whatever is sent here is ours. Clients outside this node's pods are masqueraded, ports that lead nowhere are
    /// rejected.
    ClusterAddresses,
    /// Endpoints on this node, as source and destination.
    Hairpins,
    /// Frontends with affinity.
    Affine,
    /// Those of one timeout, in seconds.
    AffineFor(u32),
    /// The endpoints that a client of a frontend with affinity may be kept on: hash of the endpoint, and the frontend.
    Sticky,
    /// The same for the local list.
    StickyLocal,
    /// Where frontends of so many endpoints lead: frontend and slot.
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
    pub fn shape(self, family: steerage_model::Family) -> RowShape {
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

/// The map that the kernel itself fills: frontend and client, to the hash of the client's endpoint.
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
