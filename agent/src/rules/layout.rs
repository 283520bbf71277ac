// SPDX-License-Identifier: Apache-2.0
//! The layout of a table: names, types and sizes of its sets and maps.

use steerage_nft::{DataType, Family, RowShape, Set};

use crate::plan::MOST_ENDPOINTS;

/// The name of our table in each family.
pub const TABLE: &str = "steerage";
/// A frontend with up to this number of endpoints has its own slots, in the map for exactly that number.
pub(crate) const SHORT: u32 = 8;
/// Classes of lists with more endpoints: the least that holds them is less than four times their number.
pub(crate) const LONG: [u32; 6] = [16, 64, 256, 1024, 4096, 16_384];
/// The number of endpoints of the longest list: plans have no longer ones.
pub(crate) const LONGEST: u32 = LONG[LONG.len() - 1];
const _: () = assert!(LONGEST as usize == MOST_ENDPOINTS, "plans and rules have the same longest list");
/// The slots of a frontend's local list start here.
pub const LOCAL_OFFSET: u32 = 1 << 16;

/// One of the two lists of endpoints that a frontend may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// For everybody, or under external policy Local for clients on this node.
    Cluster,
    /// Under external policy Local, for clients outside this node.
    Local,
}

impl Side {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Cluster, Self::Local];

    /// How the names of its chains and sets end.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Cluster => "",
            Self::Local => "-local",
        }
    }
}

/// The class of a list with this many endpoints.
pub(crate) fn long_class(endpoints: usize) -> u32 {
    LONG.into_iter()
        .find(|class| usize::try_from(*class).is_ok_and(|class| class >= endpoints))
        .unwrap_or(LONGEST)
}

/// A set or map that the agent fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetId {
    /// Frontends at addresses that are not cluster addresses: VIPs, node ports and external IPs. At cluster addresses all packets are the
    /// agent's, whatever their port.
    ExternalFrontends,
    /// Frontends without any usable endpoint in the cluster.
    Rejected,
    /// Frontends at cluster addresses whose packets are dropped: internal policy Local, and no endpoint on this node.
    DroppedClusterFrontends,
    /// Frontends with allowed sources: the number of the list.
    Restricted,
    /// Allowed sources with prefixes of one length: number of the list and the first address of the network.
    Sources(u8),
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
    /// Frontends with affinity: the number of the namespace.
    Namespaces,
    /// Namespaces by the division of their places for clients: the number of the namespace.
    Shares(u32),
    /// Endpoints that a client may keep: hash of the endpoint, and frontend.
    Sticky(Side),
    /// Endpoints of frontends with this number of them: frontend and slot.
    Slots(u32),
    /// Frontends with long lists: the number of the list.
    Lists(Side),
    /// Frontends with long lists of one class.
    Long(Side, u32),
    /// Endpoints of long lists: number of the list and slot.
    Endpoints,
    /// Frontends without an endpoint on this node whose packets are forwarded to other nodes.
    WithoutLocal,
    /// Nodes that have an endpoint: frontend and slot.
    Peers,
    /// What long lists hold: number of the list.
    Digests,
}

impl SetId {
    /// Its name in the table, which is part of the layout: another one would have each node's table replaced.
    pub fn name(self) -> String {
        match self {
            Self::ExternalFrontends => "frontends".to_owned(),
            Self::Rejected => "rejected".to_owned(),
            Self::DroppedClusterFrontends => "dropped".to_owned(),
            Self::Restricted => "restricted".to_owned(),
            Self::Sources(length) => format!("sources-{length}"),
            Self::Split => "split".to_owned(),
            Self::Masqueraded => "masqueraded".to_owned(),
            Self::ClusterAddresses => "cluster-addresses".to_owned(),
            Self::Hairpins => "hairpins".to_owned(),
            Self::Affine => "affine".to_owned(),
            Self::AffineFor(seconds) => format!("affine-{seconds}"),
            Self::Namespaces => "namespaces".to_owned(),
            Self::Shares(shares) => format!("shares-{shares}"),
            Self::Sticky(side) => format!("sticky{}", side.suffix()),
            Self::Slots(count) => format!("slots-{count}"),
            Self::Lists(side) => format!("lists{}", side.suffix()),
            Self::Long(side, class) => format!("long{}-{class}", side.suffix()),
            Self::Endpoints => "endpoints".to_owned(),
            Self::WithoutLocal => "without-local".to_owned(),
            Self::Peers => "peers".to_owned(),
            Self::Digests => "digests".to_owned(),
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
            Self::Shares(_) => Set::new(name, &[DataType::Mark]),
            Self::Sources(_) => Set::new(name, &[DataType::Mark, addr]),
            Self::Sticky(_) => Set::new(name, &[DataType::Mark, a, b, c]).maps_to(&ends),
            Self::Slots(_) => Set::new(name, &[a, b, c, DataType::Mark]).maps_to(&ends),
            Self::Lists(_) | Self::Restricted | Self::Namespaces => {
                Set::new(name, &frontend).maps_to(&[DataType::Mark])
            }
            Self::Endpoints => Set::new(name, &[DataType::Mark, DataType::Mark]).maps_to(&ends),
            Self::Peers => Set::new(name, &[a, b, c, DataType::Mark]).maps_to(&[addr]),
            Self::Digests => Set::new(name, &[DataType::Mark]).maps_to(&[DataType::Mark; 3]),
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
            Self::Shares(_) => plain(4),
            Self::Sources(_) => plain(4 + addr),
            Self::Sticky(_) | Self::Slots(_) => RowShape { data: addr + 4, ..plain(frontend + 4) },
            Self::Lists(_) | Self::Restricted | Self::Namespaces => RowShape { data: 4, ..plain(frontend) },
            Self::Endpoints => RowShape { data: addr + 4, ..plain(8) },
            Self::Peers => RowShape { data: addr, ..plain(frontend + 4) },
            Self::Digests => RowShape { data: 12, ..plain(4) },
            _ => plain(frontend),
        }
    }

    /// The frontend in the key of an element, where each element is of a frontend.
    pub(super) fn frontend_of_key(self, key: &[u8]) -> Option<&[u8]> {
        let (before, behind) = match self {
            Self::ExternalFrontends
            | Self::Rejected
            | Self::DroppedClusterFrontends
            | Self::Restricted
            | Self::Split
            | Self::Masqueraded
            | Self::Affine
            | Self::AffineFor(_)
            | Self::Namespaces
            | Self::Lists(_)
            | Self::Long(..)
            | Self::WithoutLocal => (0, 0),
            Self::Slots(_) | Self::Peers => (0, size_of::<u32>()),
            Self::Sticky(_) => (size_of::<u32>(), 0),
            Self::Sources(_)
            | Self::ClusterAddresses
            | Self::Hairpins
            | Self::Shares(_)
            | Self::Endpoints
            | Self::Digests => return None,
        };
        key.get(before..key.len().checked_sub(behind)?)
    }
}

/// The family of the addresses of a table.
pub(super) fn model_family(family: Family) -> steerage_model::Family {
    if family == Family::Ip6 { steerage_model::Family::V6 } else { steerage_model::Family::V4 }
}

pub(super) fn address_type(family: Family) -> DataType {
    if family == Family::Ip6 { DataType::Ipv6Addr } else { DataType::Ipv4Addr }
}
