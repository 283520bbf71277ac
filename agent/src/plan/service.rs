// SPDX-License-Identifier: Apache-2.0
//! The plan of one Service: its frontends and their actions, by the rules of kube-proxy 1.36. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{
    Backend, Endpoint, Family, Protocol, Service, ServiceKind, ServicePort, SlicePorts, TrafficPolicy,
    cluster_backends, local_backends, local_ready_count, names,
};
use steerage_watch::Index;

use super::affinity::affinity_timeout;
use super::budget::FRONTEND_ELEMENTS;
use super::endpoints::sample_rank;
use super::port_endpoints::{Collected, MOST_ENDPOINTS, PortEndpoints, PortUse};
use super::{
    Action, Endpoints, Frontend, HealthPort, Masquerade, Omitted, Refusal, Role, Selection, ServicePlan,
};
use crate::hash::flow_seed;
use crate::local_node::LocalNode;

/// Whether this agent serves the Service: one labelled for it, and in place of kube-proxy also an unlabelled one.
pub fn serves(service: &Service, kube_proxy_replacement: bool) -> bool {
    let ours = match service.proxy_name.as_deref() {
        Some(name) => name == names::PROXY_NAME,
        None => kube_proxy_replacement,
    };
    ours && service.kind != ServiceKind::ExternalName
        && !service.headless_label
        && !service.cluster_ips.is_empty()
}

/// What this node should do for `service`.
pub fn plan_service(service: &Service, index: &Index, local_node: &LocalNode) -> ServicePlan {
    if !serves(service, local_node.kube_proxy_replacement) {
        return ServicePlan { reserved: assigned(service, local_node, |_| true), ..ServicePlan::default() };
    }
    let mut plan = ServicePlan {
        cluster_addresses: service.cluster_ips.clone(),
        health: health(service, index, local_node),
        ..ServicePlan::default()
    };
    if let Some(health) = &plan.health {
        let at = |addr: &IpAddr| Frontend { addr: *addr, protocol: Protocol::Tcp, port: health.port };
        plan.reserved = local_node.node_port_addresses.iter().map(at).collect();
    }
    let ports = plan_endpoints(service, index, local_node, &mut plan);
    let external = plan_external_ips(service, local_node, &mut plan);
    plan_frontends(service, &ports, &external, local_node, &mut plan);
    plan
}

/// The elements that the plan of a Service needs at least, without the plan: that of a Service with thousands of ports takes long.
pub fn least_needs(service: &Service, index: &Index, local_node: &LocalNode) -> usize {
    let ports: BTreeSet<_> = service.ports.iter().map(|port| (port.protocol, port.port)).collect();
    let most = local_node.element_limits.service;
    let frontends = ports.len() * service.cluster_ips.len() * FRONTEND_ELEMENTS;
    if !serves(service, local_node.kube_proxy_replacement) || ports.len() < service.ports.len() {
        return 0;
    }
    // A small one is planned at once: looking its ports up in all slices would take as long as the plan.
    let endpoints: usize = index.slices(&service.key).map(|slice| slice.endpoints.len()).sum();
    if frontends >= most || frontends + ports.len() * endpoints < most {
        return frontends;
    }
    let (mut needs, mut looks) = (frontends, most_looks(most));
    for family in
        families(service).into_iter().filter(|family| has_cluster_lists(service, *family, local_node))
    {
        let slices = SlicePorts::new(index.slices(&service.key), family);
        let mut last: Option<(Group<'_>, usize)> = None;
        for port in &service.ports {
            let group = Group::new(&slices, port);
            let known = last.as_ref().filter(|(of, _)| group.number_as(of).is_some());
            let length = known.map_or_else(
                || {
                    let all = slices.backends(&port.name, port.protocol);
                    looks = looks.saturating_sub(all.len());
                    cluster_backends(&all, &local_node.node, local_node.zone.as_deref()).len()
                },
                |(_, length)| *length,
            );
            needs += length.min(MOST_ENDPOINTS);
            if needs >= most || looks == 0 {
                return needs;
            }
            last = Some((group, length));
        }
    }
    needs
}

/// Whether frontends of all ports lead to all endpoints of a family.
fn has_cluster_lists(service: &Service, family: Family, local_node: &LocalNode) -> bool {
    let is_of = |addr: &IpAddr| Family::of(*addr) == family;
    let has_vip = || service.kind == ServiceKind::LoadBalancer && service.vips().any(|vip| is_of(&vip));
    let has_node_ports = || {
        service.kind != ServiceKind::ClusterIp
            && local_node.node_port_addresses.iter().any(is_of)
            && service.ports.iter().all(|port| port.node_port.is_some())
    };
    service.internal_policy == TrafficPolicy::Cluster || has_vip() || has_node_ports()
}

/// The external IPs that are served, but for ports of API servers. Those that are not served at one port at least go to `refused`.
fn plan_external_ips(service: &Service, local_node: &LocalNode, plan: &mut ServicePlan) -> Vec<IpAddr> {
    let rules = &local_node.external_ips;
    let ports: BTreeSet<u16> = service.ports.iter().map(|port| port.port).collect();
    let mut external = Vec::new();
    for addr in &service.external_ips {
        let everywhere = rules.refusal_everywhere(*addr);
        if everywhere.is_none() {
            external.push(*addr);
        }
        let at_port = || rules.is_api_server_at_any(*addr, &ports).then_some(Refusal::ApiServer);
        let refusal = everywhere.or_else(at_port);
        plan.refused.extend(refusal.filter(|refusal| !refusal.is_temporary()).map(|why| (*addr, why)));
    }
    external
}

/// A port of a Service in one family.
struct FamilyPort<'a> {
    port: &'a ServicePort,
    family: Family,
    endpoints: PortEndpoints,
    /// The nodes to which packets to a VIP are forwarded.
    peers: Peers,
}

/// Nodes, if packets are forwarded to any.
type Peers = Option<Arc<[IpAddr]>>;

/// What decides on the endpoints of a port.
struct Group<'a> {
    protocol: Protocol,
    /// Of the port, with the places of the slices that have it.
    numbers: &'a [(usize, u16)],
}

impl<'a> Group<'a> {
    fn new(slices: &'a SlicePorts<'_>, port: &'a ServicePort) -> Self {
        Self { protocol: port.protocol, numbers: slices.numbers(&port.name, port.protocol) }
    }

    /// The number of this port, if its endpoints are those of the other one apart from that.
    fn number_as(&self, other: &Group<'_>) -> Option<u16> {
        let (own, others) = [self, other].map(|group| group.numbers.iter().map(|(place, _)| *place)).into();
        let is_same = self.protocol == other.protocol && own.eq(others);
        self.number().filter(|_| is_same && other.number().is_some())
    }

    /// The number that the port has in all slices.
    fn number(&self) -> Option<u16> {
        let (_, first) = self.numbers.first()?;
        self.numbers.iter().all(|(_, number)| number == first).then_some(*first)
    }
}

/// The most endpoints that are looked at in a family, each once for each port that it has, by the elements that the Service may have. One that needs
/// more, with thousands of ports and of endpoints, would keep the loop busy for seconds, and is served by a few of its endpoints in any
/// case.
fn most_looks(elements: usize) -> usize {
    elements.saturating_mul(2).clamp(1 << 18, 1 << 20)
}

/// Which lists a Service's frontends have.
#[derive(Debug, Clone, Copy)]
struct Lists {
    /// Those of traffic policy Cluster.
    cluster: bool,
    /// Those of traffic policy Local.
    local: bool,
}

impl Lists {
    fn of(service: &Service) -> Self {
        let is_internal_local = service.internal_policy == TrafficPolicy::Local;
        let is_external = service.kind != ServiceKind::ClusterIp || !service.external_ips.is_empty();
        Self {
            cluster: is_external || !is_internal_local,
            local: is_internal_local || is_external && service.external_policy == TrafficPolicy::Local,
        }
    }

    /// The order in which endpoints are looked at: ready ones of this node first, where nobody can replace them, and those that
    /// terminate after all ready ones. See also [`Lists::is_spare`].
    fn rank(self, endpoint: &Endpoint, local_node: &LocalNode, seed: u32) -> (u8, u32) {
        let is_here = self.local && endpoint.is_on(&local_node.node);
        let rank = match (endpoint.ready, endpoint.is_serving_terminating()) {
            (true, _) if is_here => 0,
            (true, _) if self.cluster => 1,
            (_, true) if is_here => 2,
            (true, _) => 3,
            (_, true) => 4,
            _ => 5,
        };
        (rank, sample_rank(endpoint.addr, seed))
    }

    /// Whether each port keeps one such endpoint in any case: clients outside may have nothing else here.
    fn is_spare(self, endpoint: &Endpoint, local_node: &LocalNode) -> bool {
        let is_usable = endpoint.ready || endpoint.is_serving_terminating();
        self.local && is_usable && endpoint.is_on(&local_node.node)
    }
}

/// The endpoints of all ports, as far as they can fit into the Service's budget.
fn plan_endpoints<'a>(
    service: &'a Service,
    index: &Index,
    local_node: &LocalNode,
    plan: &mut ServicePlan,
) -> Vec<FamilyPort<'a>> {
    let lists = Lists::of(service);
    let seed = flow_seed(&local_node.node);
    let mut collected = Collected::new(local_node.element_limits.service, seed);
    let most = most_looks(local_node.element_limits.service);
    let names: Vec<_> = service.ports.iter().map(|port| (port.name.as_str(), port.protocol)).collect();
    let mut left_out = 0;
    let mut ports = Vec::new();
    let mut hairpins = BTreeSet::new();
    for family in families(service) {
        let mut slices = SlicePorts::new(index.slices(&service.key), family);
        let rank = |endpoint: &Endpoint| lists.rank(endpoint, local_node, seed);
        let is_spare = |endpoint: &Endpoint| lists.is_spare(endpoint, local_node);
        // Those of other nodes are in no list then.
        let counts = |endpoint: &Endpoint| lists.cluster || endpoint.is_on(&local_node.node);
        left_out += slices.keep(&names, most, rank, is_spare, counts);
        let mut last: Option<(Group<'_>, PortEndpoints, Peers)> = None;
        for port in &service.ports {
            let group = Group::new(&slices, port);
            // Nearly always all ports have the same endpoints, at numbers of their own.
            let known = last.as_ref().and_then(|(of, endpoints, peers)| {
                Some((endpoints.at_port(group.number_as(of)?), peers.clone()))
            });
            let (endpoints, to_peers) = known.unwrap_or_else(|| {
                let all = slices.backends(&port.name, port.protocol);
                let here = all.iter().filter(|b| b.endpoint.is_on(&local_node.node));
                hairpins.extend(here.map(|b| b.endpoint.addr));
                let Lists { cluster, local } = lists;
                let port = PortUse { protocol: port.protocol, cluster, local };
                let endpoints = PortEndpoints::new(&all, port, local_node);
                let to_peers = peers(service, &all, family, local_node);
                last = Some((group, endpoints.clone(), to_peers.clone()));
                (endpoints, to_peers)
            });
            collected.add(endpoints);
            ports.push((port, family, to_peers));
        }
    }
    plan.hairpins = hairpins.into_iter().collect();
    let (endpoints, omitted) = collected.finish();
    plan.omitted = Omitted { endpoints: omitted.endpoints + left_out, ..omitted };
    let with_endpoints = |((port, family, peers), endpoints)| FamilyPort { port, family, endpoints, peers };
    ports.into_iter().zip(endpoints).map(with_endpoints).collect()
}

/// Frontends of a port that stay or are left out together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FrontendPart {
    All(Role),
    /// At the node's own address of the family, or at its first one if node ports are not served there.
    MainNodePort,
    /// At its others.
    OtherNodePorts,
}

impl FrontendPart {
    fn role(self) -> Role {
        match self {
            Self::All(role) => role,
            Self::MainNodePort | Self::OtherNodePorts => Role::NodePort,
        }
    }

    /// Those of a port's addresses in the part's role that are in the part.
    fn of(self, mut addresses: Vec<(IpAddr, u16)>, local_node: &LocalNode) -> Vec<(IpAddr, u16)> {
        if let Self::All(_) = self {
            return addresses;
        }
        let is_own = |(addr, _): &(IpAddr, u16)| local_node.addresses.contains(addr);
        let main = addresses.iter().find(|at| is_own(at)).or(addresses.first()).copied();
        addresses.retain(|at| (Some(*at) == main) == (self == Self::MainNodePort));
        addresses
    }
}

/// The parts of all ports, the ones that stay first.
const PARTS_BY_PRIORITY: [&[FrontendPart]; 4] = [
    &[FrontendPart::All(Role::ClusterIp)],
    &[FrontendPart::All(Role::Vip), FrontendPart::MainNodePort],
    &[FrontendPart::OtherNodePorts],
    &[FrontendPart::All(Role::ExternalIp)],
];

/// The frontends of all ports. A frontend in two roles, such as a VIP that is also an external IP, is served in the first one: cluster
/// IP, VIP, node port, external IP. Those that no budget has room for are counted only: the last ones. So VIPs and node ports of one port
/// stay together, of both families: a load balancer needs one or the other, and nodes have many addresses, of which it needs one.
fn plan_frontends(
    service: &Service,
    ports: &[FamilyPort<'_>],
    external: &[IpAddr],
    local_node: &LocalNode,
    plan: &mut ServicePlan,
) {
    let most = local_node.element_limits.service / FRONTEND_ELEMENTS;
    let sources: BTreeMap<_, _> =
        families(service).into_iter().map(|family| (family, sources(service, family, local_node))).collect();
    let vips = vips_at_node_ports(service, ports, external, local_node);
    let mut seen = BTreeSet::new();
    // Stable: of each port, the families stay in order.
    let mut by_port: Vec<_> = ports.iter().collect();
    by_port.sort_by_key(|of| (of.port.port, of.port.protocol));
    for group in PARTS_BY_PRIORITY {
        for (of, part) in by_port.iter().flat_map(|of| group.iter().map(move |part| (*of, *part))) {
            let role = part.role();
            let room = most.saturating_sub(plan.frontends.len());
            if room == 0 && role == Role::ExternalIp {
                plan.omitted.frontends +=
                    external.iter().filter(|addr| Family::of(**addr) == of.family).count();
                continue;
            }
            let at = part.of(addresses(service, of, role, external, local_node), local_node);
            plan.omitted.frontends += at.len().saturating_sub(room);
            if room == 0 {
                continue;
            }
            let allowed = sources.get(&of.family).and_then(Option::as_ref);
            for (addr, number) in at.into_iter().take(room) {
                let frontend = Frontend { addr, protocol: of.port.protocol, port: number };
                let is_vip = role == Role::NodePort && vips.contains(&frontend);
                if !is_vip && seen.insert(frontend) {
                    let sources = allowed.filter(|_| role == Role::Vip).cloned();
                    // Only for VIPs: a packet to a node's address and node port is for that node alone.
                    let peers = of.peers.clone().filter(|_| role == Role::Vip);
                    let action = action(service, of, role, local_node);
                    plan.frontends.push((frontend, Action { peers, sources, ..action }));
                }
            }
        }
    }
}

/// The frontends of VIPs that are addresses of node ports: there a node port of the Service may be at one of them.
fn vips_at_node_ports(
    service: &Service,
    ports: &[FamilyPort<'_>],
    external: &[IpAddr],
    local_node: &LocalNode,
) -> BTreeSet<Frontend> {
    if !service.vips().any(|vip| local_node.node_port_addresses.contains(&vip)) {
        return BTreeSet::new();
    }
    let at = |of: &FamilyPort<'_>| {
        let protocol = of.port.protocol;
        let at = addresses(service, of, Role::Vip, external, local_node).into_iter();
        at.map(move |(addr, port)| Frontend { addr, protocol, port }).collect::<Vec<_>>()
    };
    ports.iter().flat_map(at).collect()
}

/// The nodes to which a port's packets are forwarded: under external policy Local, without an endpoint on this node.
fn peers(service: &Service, all: &[Backend<'_>], family: Family, local_node: &LocalNode) -> Peers {
    let peers = local_node.peers.as_ref()?;
    let is_forwarded =
        service.external_policy == TrafficPolicy::Local && local_backends(all, &local_node.node).is_empty();
    peers.slots(all, family).filter(|_| is_forwarded)
}

/// What was assigned to a Service at addresses that are meant, as far as packets carry it.
pub fn assigned(
    service: &Service,
    local_node: &LocalNode,
    is_meant: impl Fn(&IpAddr) -> bool,
) -> Vec<Frontend> {
    if service.kind == ServiceKind::ExternalName || service.headless_label {
        return Vec::new();
    }
    let vips = service.vips().filter(|_| service.kind == ServiceKind::LoadBalancer);
    let addresses: Vec<_> = service.cluster_ips.iter().copied().chain(vips).filter(&is_meant).collect();
    let of_node: Vec<_> = local_node.node_port_addresses.iter().copied().filter(&is_meant).collect();
    let mut frontends = Vec::new();
    if addresses.is_empty() && of_node.is_empty() {
        return frontends;
    }
    for port in &service.ports {
        let at = |addr: &IpAddr, number: u16| Frontend { addr: *addr, protocol: port.protocol, port: number };
        frontends.extend(addresses.iter().map(|addr| at(addr, port.port)));
        if let Some(number) = port.node_port {
            frontends.extend(of_node.iter().map(|addr| at(addr, number)));
        }
    }
    frontends
}

fn families(service: &Service) -> BTreeSet<Family> {
    service.cluster_ips.iter().map(|addr| Family::of(*addr)).collect()
}

fn health(service: &Service, index: &Index, local_node: &LocalNode) -> Option<HealthPort> {
    let families = families(service);
    let count = |family| {
        families
            .contains(&family)
            .then(|| local_ready_count(index.slices(&service.key), family, &local_node.node))
    };
    let (v4, v6) = (count(Family::V4), count(Family::V6));
    // Only what stands for a load balancer: a server on every address would take the ports of others.
    let is_one = |vip: &IpAddr| !(vip.is_unspecified() || vip.is_loopback() || vip.is_multicast());
    Some(HealthPort { port: service.health_port()?, v4, v6, vips: service.vips().filter(is_one).collect() })
}

/// The addresses of a port in one role, of which `external` are external IPs, each with the number of the port.
fn addresses(
    service: &Service,
    of: &FamilyPort<'_>,
    role: Role,
    external: &[IpAddr],
    local_node: &LocalNode,
) -> Vec<(IpAddr, u16)> {
    let of_family = |addr: &IpAddr| Family::of(*addr) == of.family;
    let port = of.port.port;
    match role {
        Role::ClusterIp => {
            service.cluster_ips.iter().copied().filter(of_family).map(|addr| (addr, port)).collect()
        }
        Role::Vip => {
            let vips = service.vips().filter(|_| service.kind == ServiceKind::LoadBalancer);
            vips.filter(of_family).map(|addr| (addr, port)).collect()
        }
        Role::NodePort => {
            let node_port = of.port.node_port.filter(|_| service.kind != ServiceKind::ClusterIp);
            let at = local_node.node_port_addresses.iter().copied().filter(of_family);
            node_port.map_or_else(Vec::new, |number| at.map(|addr| (addr, number)).collect())
        }
        Role::ExternalIp => {
            let served = |addr: &IpAddr| !local_node.external_ips.is_api_server(*addr, port);
            external.iter().copied().filter(of_family).filter(served).map(|addr| (addr, port)).collect()
        }
    }
}

/// What happens to packets to a port in one role, without the allowed sources.
fn action(service: &Service, of: &FamilyPort<'_>, role: Role, local_node: &LocalNode) -> Action {
    let at_cluster_ip = if local_node.masquerade_all { Masquerade::All } else { Masquerade::AllButLocalPods };
    let PortEndpoints { cluster, local, serving, reject } = &of.endpoints;
    let local = || Endpoints { selection: Selection::Local, list: Arc::clone(local) };
    let cluster = || Endpoints { selection: Selection::Cluster, list: Arc::clone(cluster) };
    let (targets, local, masquerade) = match (role, service.internal_policy, service.external_policy) {
        (Role::ClusterIp, TrafficPolicy::Cluster, _) => (cluster(), None, at_cluster_ip),
        (Role::ClusterIp, TrafficPolicy::Local, _) => (local(), None, at_cluster_ip),
        (_, _, TrafficPolicy::Cluster) => (cluster(), None, Masquerade::All),
        (_, _, TrafficPolicy::Local) => (cluster(), Some(local()), Masquerade::HostOnly),
    };
    Action {
        role,
        created: service.created,
        port: of.port.port,
        reject: *reject,
        targets,
        local,
        peers: None,
        masquerade,
        sources: None,
        affinity: service.affinity.map(|affinity| affinity_timeout(affinity.timeout.as_secs())),
        serving: Arc::clone(serving),
    }
}

/// The sources allowed at VIPs of this family. A list that names only the other family allows none: limiting the sources does not
/// mean "and every client by IPv6" (kube-proxy leaves such a family open).
fn sources(service: &Service, family: Family, local_node: &LocalNode) -> Option<Arc<[IpNet]>> {
    let ranges = &service.source_ranges;
    let of_family = |net: &&IpNet| Family::of(net.addr()) == family;
    if ranges.is_empty() || ranges.iter().filter(of_family).any(|net| net.prefix_len() == 0) {
        return None;
    }
    let mut allowed: BTreeSet<IpNet> = ranges.iter().filter(of_family).map(IpNet::trunc).collect();
    // If the VIP is an address of this host, the host's own packets to it have it as their source, too.
    if local_node.addresses.iter().any(|own| allowed.iter().any(|net| net.contains(own))) {
        allowed.extend(service.vips().filter(|vip| Family::of(*vip) == family).map(IpNet::from));
    }
    Some(IpNet::aggregate(&allowed.into_iter().collect()).into())
}
