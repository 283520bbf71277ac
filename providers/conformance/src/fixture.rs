// SPDX-License-Identifier: Apache-2.0
//! The load balancers and target sets of the checks.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{
    GroupKey, HealthCheck, HealthProtocol, Listener, LoadBalancer, Owner, TargetGroup, TargetSet, Targets,
};

use crate::Harness;

/// Namespace of all Services of the suite.
pub const NAMESPACE: &str = "conformance";

/// The owner for the given incarnation of a Service: each has the same name and another UID.
pub fn owner(name: &str, incarnation: u32) -> Owner {
    // FNV-1a, but any fixed function from names to UIDs would do.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let uid = format!("{:08x}-{:04x}-4000-8000-{incarnation:012}", hash >> 32, hash & 0xffff);
    Owner { service: Key::new(NAMESPACE, name), uid }
}

/// A load balancer with a TCP and a UDP listener.
pub fn first(harness: &impl Harness, owner: &Owner) -> LoadBalancer {
    build(
        harness,
        owner,
        vec![listener("web", Protocol::Tcp, 80, 30080), listener("dns", Protocol::Udp, 53, 30053)],
        10,
    )
}

/// A changed version of [`first`]: one listener removed, one with another node port, one added, and another health check.
pub fn second(harness: &impl Harness, owner: &Owner) -> LoadBalancer {
    build(
        harness,
        owner,
        vec![listener("web", Protocol::Tcp, 80, 30081), listener("tls", Protocol::Tcp, 443, 30443)],
        20,
    )
}

/// The load balancer with the targets of the harness with these indices.
pub fn with_targets(harness: &impl Harness, lb: &LoadBalancer, indices: &[usize]) -> LoadBalancer {
    lb.clone().with_nodes(targets(harness, indices))
}

/// The targets of the harness with these indices.
pub fn targets(harness: &impl Harness, indices: &[usize]) -> TargetSet {
    TargetSet::own(indices.iter().map(|i| harness.target(*i)).collect::<Vec<_>>())
}

fn listener(name: &str, protocol: Protocol, port: u16, node_port: u16) -> Listener {
    Listener { name: name.to_owned(), protocol, port, group: GroupKey::NodePort(node_port) }
}

/// The same load balancer with other listeners, and a group for each of their keys.
#[must_use]
pub fn with_listeners(lb: LoadBalancer, listeners: Vec<Listener>) -> LoadBalancer {
    let nodes = lb.nodes();
    let check = lb.groups.first().map(|group| group.health_check.clone());
    let mut groups: Vec<TargetGroup> = Vec::new();
    for listener in &listeners {
        let Some(health_check) = check.clone() else { break };
        if groups.iter().all(|group| group.key != listener.group) {
            let (key, targets) = (listener.group.clone(), Targets::Nodes(TargetSet::default()));
            groups.push(TargetGroup { key, health_check, affinity: None, targets });
        }
    }
    LoadBalancer { listeners, groups, ..lb }.with_nodes(nodes)
}

/// As [`with_listeners`], for a provider that reaches nodes by VIP.
#[must_use]
pub fn by_vip(lb: LoadBalancer) -> LoadBalancer {
    let listeners = lb.listeners.iter().map(|listener| Listener { group: GroupKey::Vip, ..listener.clone() });
    let listeners = listeners.collect();
    with_listeners(lb, listeners)
}

fn build(harness: &impl Harness, owner: &Owner, listeners: Vec<Listener>, interval: u64) -> LoadBalancer {
    let health_check = HealthCheck {
        protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
        is_of_service: false,
        port: Some(32000),
        interval: Duration::from_secs(interval),
        timeout: Duration::from_secs(5),
        healthy_threshold: 2,
        unhealthy_threshold: 2,
    };
    let groups = listeners.iter().map(|listener| TargetGroup {
        key: listener.group.clone(),
        health_check: health_check.clone(),
        affinity: None,
        targets: Targets::Nodes(TargetSet::default()),
    });
    let mut lb = LoadBalancer {
        owner: owner.clone(),
        families: vec![Family::V4],
        groups: groups.collect(),
        listeners,
        requested_addresses: Vec::new(),
        pool: None,
        published: Vec::new(),
        published_hostnames: Vec::new(),
        labels: std::sync::Arc::default(),
        source_ranges: Vec::new(),
        annotations: BTreeMap::new(),
    };
    harness.adapt(&mut lb);
    lb
}
