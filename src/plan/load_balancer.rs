// SPDX-License-Identifier: Apache-2.0
//! The structure of a Service's load balancer. Its targets are planned apart, because they depend on the steering that is in place.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_model::annotations::{self, is_written_by_controller};
use steerage_model::{Family, Service, ServicePort};
use steerage_provider_api::{
    Addressing, Capabilities, GroupKey, GroupTargets, Listener, LoadBalancer, Owner, Steering, TargetGroup,
    TargetSet, Targets,
};

use super::health_check::health_check;
use super::node_labels::check_node_labels;
use super::pods::pod_port;
use super::{Config, PlanError, has_pod_targets};

/// Pairs of a port and a source range of one Service. kube-proxy writes each pair on every node as soon as the Service has an address, in
/// its mode iptables as a rule: decision 32.
const MOST_SOURCES: usize = 10_000;

/// The load balancer without targets.
pub(crate) fn load_balancer(
    service: &Service,
    steering: Steering,
    config: &Config,
) -> Result<LoadBalancer, PlanError> {
    let capabilities = &config.capabilities;
    let annotations = service.annotations.iter().filter(|(name, _)| !is_written_by_controller(name));
    check_node_labels(service, config)?;
    if service.annotations.contains_key(annotations::SHARED_LOAD_BALANCER)
        && !capabilities.shared_load_balancers
    {
        return Err(PlanError::SharedLoadBalancersNotSupported);
    }
    if service.annotations.contains_key(annotations::ADDRESS_SHARING_KEY) && !capabilities.address_pools {
        return Err(PlanError::SharedAddressesNotSupported);
    }
    let families = families(service, capabilities)?;
    let listeners = listeners(service, config)?;
    let health_check = health_check(service, steering, config)?;
    let affinity = service.affinity.filter(|_| capabilities.affinity);
    let mut groups: Vec<TargetGroup> = Vec::new();
    for listener in &listeners {
        if groups.iter().all(|group| group.key != listener.group) {
            let (key, health_check) = (listener.group.clone(), health_check.clone());
            let targets = Targets::Nodes(TargetSet::default());
            groups.push(TargetGroup { key, health_check, affinity, targets });
        }
    }
    let lb = LoadBalancer {
        owner: Owner { service: service.key.clone(), uid: service.uid.clone() },
        families,
        listeners,
        groups,
        requested_addresses: requested_addresses(service)?,
        pool: service.annotations.get(annotations::ADDRESS_POOL).map(|pool| pool.trim().to_owned()),
        published: service.ingress.iter().filter_map(|ingress| ingress.ip).collect(),
        published_hostnames: service.ingress.iter().filter_map(|ingress| ingress.hostname.clone()).collect(),
        source_ranges: service.source_ranges.clone(),
        labels: if capabilities.address_pools { Arc::clone(&service.labels) } else { Arc::default() },
        annotations: annotations.map(|(name, value)| (name.clone(), value.clone())).collect(),
    };
    Ok(lb.with_targets(&GroupTargets::default()))
}

/// Equal for two versions of a Service that request the same, whatever this controller wrote to it in between.
pub(crate) fn fingerprint(service: &Service) -> u64 {
    let Service {
        key,
        uid,
        kind,
        cluster_ips,
        external_ips,
        ports,
        external_policy,
        internal_policy,
        affinity,
        health_check_node_port,
        source_ranges,
        class,
        load_balancer_ip,
        families,
        allocate_node_ports,
        has_selector,
        annotations,
        labels,
        proxy_name,
        headless_label,
        finalizers: _,
        deleting,
        generation: _,
        created: _,
        ingress: _,
        conditions: _,
    } = service;
    let mut hasher = DefaultHasher::new();
    (key, uid, kind, cluster_ips, external_ips, ports).hash(&mut hasher);
    (external_policy, internal_policy, affinity, health_check_node_port, source_ranges).hash(&mut hasher);
    (class, load_balancer_ip, families, allocate_node_ports, has_selector).hash(&mut hasher);
    (labels, proxy_name, headless_label, deleting).hash(&mut hasher);
    for annotation in annotations.iter().filter(|(name, _)| !is_written_by_controller(name)) {
        annotation.hash(&mut hasher);
    }
    hasher.finish()
}

fn families(service: &Service, capabilities: &Capabilities) -> Result<Vec<Family>, PlanError> {
    let mut families = service.families.clone();
    if families.is_empty() {
        families = service.cluster_ips.iter().map(|address| Family::of(*address)).collect();
    }
    if families.is_empty() || service.cluster_ips.is_empty() {
        return Err(PlanError::NoIpFamily);
    }
    if families.contains(&Family::V6) && !capabilities.ipv6 {
        return Err(PlanError::IpFamilyNotSupported(Family::V6));
    }
    Ok(families)
}

fn listeners(service: &Service, config: &Config) -> Result<Vec<Listener>, PlanError> {
    if service.ports.is_empty() {
        return Err(PlanError::NoPorts);
    }
    let (ports, ranges) = (service.ports.len(), service.source_ranges.len());
    // kube-proxy has read a published one already, and no change of it would be made any more.
    if service.ingress.is_empty() && ports.saturating_mul(ranges) > MOST_SOURCES {
        return Err(PlanError::TooManySourceRanges { ports, ranges, most: MOST_SOURCES });
    }
    let of_pods = has_pod_targets(service, config)?;
    let group = |port| of_pods.then(|| GroupKey::Pods(pod_port(service, port)));
    service.ports.iter().map(|port| listener(port, group(port), &config.capabilities)).collect()
}

/// `group` is that of pods, if they are targets.
fn listener(
    port: &ServicePort,
    group: Option<GroupKey>,
    capabilities: &Capabilities,
) -> Result<Listener, PlanError> {
    let ServicePort { ref name, protocol, port, node_port, .. } = *port;
    if !capabilities.protocols.contains(&protocol) {
        return Err(PlanError::ProtocolNotSupported { port, protocol });
    }
    let group = match (group, capabilities.addressing, node_port) {
        (Some(group), _, _) => group,
        (None, Addressing::Vip, _) => GroupKey::Vip,
        (None, Addressing::NodePort, Some(node_port)) => GroupKey::NodePort(node_port),
        (None, Addressing::NodePort, None) => return Err(PlanError::NoNodePort { port }),
    };
    Ok(Listener { name: name.clone(), protocol, port, group })
}

/// The annotation can name one address per family, and takes precedence over the field.
fn requested_addresses(service: &Service) -> Result<Vec<IpAddr>, PlanError> {
    let annotated =
        service.annotations.get(annotations::ADDRESSES).map(|text| (annotations::ADDRESSES, text));
    let field = service.load_balancer_ip.as_ref().map(|text| ("spec.loadBalancerIP", text));
    let Some((field, text)) = annotated.or(field).filter(|(_, text)| !text.trim().is_empty()) else {
        return Ok(Vec::new());
    };
    text.split(',')
        .map(str::trim)
        .map(|value| {
            value.parse().map_err(|_| PlanError::InvalidRequestedAddress { field, value: value.to_owned() })
        })
        .collect()
}
