// SPDX-License-Identifier: Apache-2.0
//! The plan of one Service: its frontends and their actions, by the rules of kube-proxy 1.36. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{
    Backend, Family, Protocol, Service, ServiceKind, ServicePort, TrafficPolicy, backends, cluster_backends,
    local_backends, local_ready_count, names,
};
use steerage_watch::Index;

use super::affinity::affinity_timeout;
use super::{Action, Endpoints, Frontend, HealthPort, Masquerade, Role, Selection, ServicePlan};
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
        return ServicePlan { reserved: assigned(service, local_node), ..ServicePlan::default() };
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
    let mut frontends = Vec::new();
    let mut hairpins = BTreeSet::new();
    for family in families(service) {
        let allowed = sources(service, family, local_node);
        for port in &service.ports {
            let all = backends(index.slices(&service.key), family, &port.name, port.protocol);
            hairpins
                .extend(all.iter().filter(|b| b.endpoint.is_on(&local_node.node)).map(|b| b.endpoint.addr));
            frontends.extend(port_frontends(service, port, family, &all, allowed.as_ref(), local_node));
        }
    }
    let refusal = |addr: &IpAddr| {
        let mut refusals =
            service.ports.iter().filter_map(|port| local_node.external_ips.refusal(*addr, port.port));
        Some((*addr, refusals.next()?))
    };
    plan.refused = service.external_ips.iter().filter_map(refusal).collect();
    // An address in two roles, such as a VIP that is also an external IP, is served in the first one.
    frontends.sort_by_key(|(_, action)| action.role);
    let mut seen = BTreeSet::new();
    frontends.retain(|(frontend, _)| seen.insert(*frontend));
    plan.frontends = frontends;
    plan.hairpins = hairpins.into_iter().collect();
    plan
}

/// What was assigned to a Service, as far as packets carry it.
fn assigned(service: &Service, local_node: &LocalNode) -> Vec<Frontend> {
    let is_real = service.kind != ServiceKind::ExternalName && !service.headless_label;
    let vips = service.vips().filter(|_| service.kind == ServiceKind::LoadBalancer);
    let addresses: Vec<_> = service.cluster_ips.iter().copied().chain(vips).filter(|_| is_real).collect();
    let mut frontends = Vec::new();
    for port in &service.ports {
        let at = |addr: &IpAddr, number: u16| Frontend { addr: *addr, protocol: port.protocol, port: number };
        frontends.extend(addresses.iter().map(|addr| at(addr, port.port)));
        if let Some(number) = port.node_port.filter(|_| is_real) {
            frontends.extend(local_node.node_port_addresses.iter().map(|addr| at(addr, number)));
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
    Some(HealthPort { port: service.health_port()?, v4: count(Family::V4), v6: count(Family::V6) })
}

fn port_frontends(
    service: &Service,
    port: &ServicePort,
    family: Family,
    all: &[Backend<'_>],
    allowed: Option<&Arc<[IpNet]>>,
    local_node: &LocalNode,
) -> Vec<(Frontend, Action)> {
    let cluster = sockets(&cluster_backends(all, &local_node.node, local_node.zone.as_deref()));
    let local = sockets(&local_backends(all, &local_node.node));
    let local = Endpoints { selection: Selection::Local, list: local };
    let serving: Vec<_> = all.iter().filter(|b| b.endpoint.serving || b.endpoint.ready).copied().collect();
    let serving = sockets(&serving);
    // Nearly always, and there are many.
    let serving = if serving == cluster { Arc::clone(&cluster) } else { serving };
    let base = Action {
        role: Role::ClusterIp,
        created: service.created,
        port: port.port,
        reject: cluster.is_empty() && local.is_empty(),
        targets: Endpoints { selection: Selection::Cluster, list: cluster },
        local: None,
        peers: None,
        masquerade: if local_node.masquerade_all { Masquerade::All } else { Masquerade::NotPods },
        sources: None,
        affinity: service.affinity.map(|affinity| affinity_timeout(affinity.timeout.as_secs())),
        serving,
    };
    // Only for VIPs: a packet to a node's address and node port is for that node alone.
    let is_forwarded = service.external_policy == TrafficPolicy::Local && local.is_empty() && !base.reject;
    let peers = local_node.peers.as_ref().filter(|_| is_forwarded);
    let peers = peers.and_then(|peers| peers.slots(all, family));
    let internal = match service.internal_policy {
        TrafficPolicy::Cluster => base.clone(),
        TrafficPolicy::Local => Action { targets: local.clone(), ..base.clone() },
    };
    let external = match service.external_policy {
        TrafficPolicy::Cluster => Action { masquerade: Masquerade::All, ..base },
        TrafficPolicy::Local => Action { masquerade: Masquerade::Host, local: Some(local), ..base },
    };
    let external = |role| Action { role, ..external.clone() };
    let vip = Action { sources: allowed.cloned(), peers, ..external(Role::Assigned) };

    let at = |addr: IpAddr, number: u16| Frontend { addr, protocol: port.protocol, port: number };
    let of_family = |addr: &IpAddr| Family::of(*addr) == family;
    let mut frontends = Vec::new();
    for addr in service.cluster_ips.iter().copied().filter(of_family) {
        frontends.push((at(addr, port.port), internal.clone()));
    }
    if service.kind == ServiceKind::LoadBalancer {
        for addr in service.vips().filter(of_family) {
            frontends.push((at(addr, port.port), vip.clone()));
        }
    }
    let served = |addr: &IpAddr| local_node.external_ips.refusal(*addr, port.port).is_none();
    for addr in service.external_ips.iter().copied().filter(of_family).filter(served) {
        frontends.push((at(addr, port.port), external(Role::ExternalIp)));
    }
    if let Some(number) = port.node_port.filter(|_| service.kind != ServiceKind::ClusterIp) {
        for addr in local_node.node_port_addresses.iter().copied().filter(of_family) {
            frontends.push((at(addr, number), external(Role::Assigned)));
        }
    }
    frontends
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

fn sockets(backends: &[Backend<'_>]) -> Arc<[SocketAddr]> {
    backends.iter().map(|b| SocketAddr::new(b.endpoint.addr, b.port)).collect()
}
