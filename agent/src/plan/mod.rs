// SPDX-License-Identifier: Apache-2.0
//! What the node should do, as plain values: which frontends exist, where each leads, which health-check ports answer what.
//!
//! Pure: from the model's index and this node's place in the cluster. `crate::rules` turns it into elements of kernel maps.

mod affinity;
mod budget;
mod desired;
mod endpoints;
mod external_ips;
mod local_gaps;
mod peers;
mod policy_transition;
mod port_endpoints;
mod service;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Protocol};

pub use affinity::AFFINITY_TIMEOUTS;
pub use budget::{Budgets, ElementLimits, FRONTEND_ELEMENTS, LEAST_ELEMENTS, Reduced, ReducedService};
pub use desired::{Affected, Desired, Shadowed};
pub use endpoints::{Endpoints, Selection, Used, sample, sample_serving};
pub use external_ips::{ClusterNodes, ExternalIps, NodeNetworks, Refusal, RefusedExternalIp};
pub use local_gaps::LocalGaps;
pub use peers::{PEER_SLOTS, PeerAddresses, PeerNodes};
pub use policy_transition::{POLICY_GRACE_PERIOD, PolicyTransitions, has_load_balancer};
pub use port_endpoints::MOST_ENDPOINTS;
pub use service::{assigned, least_needs, plan_service, serves};

/// An address, protocol and port that clients send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frontend {
    /// The address.
    pub addr: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

impl Frontend {
    /// The family of its address.
    pub fn family(&self) -> Family {
        Family::of(self.addr)
    }
}

/// Which clients' packets get the node's address as their source. Those of a pod to itself do in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masquerade {
    /// Those of all clients: external traffic under policy Cluster, and with `--masquerade-all` traffic to a `ClusterIP`.
    All,
    /// Those of all clients but this node's pods: a `ClusterIP` otherwise.
    AllButLocalPods,
    /// Those of this host only: external traffic under policy Local keeps the client's address.
    HostOnly,
}

/// What a frontend is to its Service. Of several Services with one frontend, that with the first role is served, and of those the
/// oldest: a user may name any address in `externalIPs`, and the API server assigns the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A cluster IP.
    ClusterIp,
    /// An address of its load balancer.
    Vip,
    /// A node port.
    NodePort,
    /// An address of `externalIPs`.
    ExternalIp,
}

/// What to do with packets to one frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// What the frontend is to its Service.
    pub role: Role,
    /// When the Service was created, in seconds since 1970.
    pub created: i64,
    /// The number of the Service's port.
    pub port: u16,
    /// The endpoints to send them to; without any they are dropped.
    pub targets: Endpoints,
    /// External policy Local: the endpoints for clients outside this node, which are its local ones.
    pub local: Option<Endpoints>,
    /// External policy Local without a local endpoint: nodes that have one, by the slot of the flow. They get clients' packets unchanged.
    pub peers: Option<Arc<[IpAddr]>>,
    /// Reject them: no endpoint in the cluster is usable.
    pub reject: bool,
    /// Which source addresses are replaced.
    pub masquerade: Masquerade,
    /// The allowed source networks; `None`: all.
    pub sources: Option<Arc<[IpNet]>>,
    /// Seconds for which a client keeps its endpoint, one of [`AFFINITY_TIMEOUTS`].
    pub affinity: Option<u32>,
    /// UDP: the endpoints whose flows are kept, in order; those of both lists, and others. Empty for other protocols.
    pub serving: Arc<[SocketAddr]>,
}

/// A health-check node port and the counts behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthPort {
    /// The port.
    pub port: u16,
    /// Ready IPv4 endpoints on this node; `None`: the Service lacks the family.
    pub v4: Option<usize>,
    /// The same for IPv6.
    pub v6: Option<usize>,
    /// The addresses of the load balancer. Some clouds address health checks to them, as GCE does.
    pub vips: Arc<[IpAddr]>,
}

/// What a plan lacks from the beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Omitted {
    /// Endpoints in its lists, because of the budget.
    pub endpoints: usize,
    /// Frontends.
    pub frontends: usize,
    /// A port has more endpoints than a list has room for.
    pub has_full_list: bool,
}

/// What this node should do for one Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// Its frontends, each once.
    pub frontends: Vec<(Frontend, Action)>,
    /// Its cluster addresses, of which other ports are rejected.
    pub cluster_addresses: Vec<IpAddr>,
    /// The addresses of its endpoints on this node, which may send to themselves.
    pub hairpins: Vec<IpAddr>,
    /// Its health-check port.
    pub health: Option<HealthPort>,
    /// Where no external IP is served: at its health-check port, because packets are translated before they reach a socket; at the
    /// frontends of a Service that another proxy serves, because that one comes later; and where it was assigned one and is not planned
    /// yet.
    pub reserved: Vec<Frontend>,
    /// Its external IPs that are not served.
    pub refused: Vec<(IpAddr, Refusal)>,
    /// What is not in it, because no limit has room for it.
    pub omitted: Omitted,
    /// It needs more elements than it may have.
    pub reduced: Option<Reduced>,
}

impl ServicePlan {
    /// The networks that its frontends admit, once for all frontends that share a list: to compare long lists for each of thousands of
    /// ports would take seconds.
    pub(crate) fn source_lists(&self) -> impl Iterator<Item = &Arc<[IpNet]>> {
        let mut seen = HashSet::new();
        let lists = self.frontends.iter().filter_map(|(_, action)| action.sources.as_ref());
        lists.filter(move |networks| seen.insert(networks.as_ptr()))
    }
}

/// Health-check ports by Service.
pub type HealthPorts = std::collections::BTreeMap<Key, HealthPort>;

#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
