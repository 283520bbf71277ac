// SPDX-License-Identifier: Apache-2.0
//! From a Service to the structure of its load balancer, or the reason why there can be none.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::net::IpAddr;

use steerage_model::{Family, Service, ServicePort, names};
use steerage_provider_api::{Addressing, Capabilities, Listener, LoadBalancer, Owner, Steering};

use super::health_check::health_check;
use super::{Config, MIGRATED, PROVIDER, PlanError};

/// The structure of a Service's load balancer under this steering.
pub(crate) fn load_balancer(
    service: &Service,
    steering: Steering,
    config: &Config,
) -> Result<LoadBalancer, PlanError> {
    let capabilities = &config.capabilities;
    Ok(LoadBalancer {
        owner: Owner { service: service.key.clone(), uid: service.uid.clone() },
        families: families(service, capabilities)?,
        listeners: listeners(service, capabilities)?,
        health_check: health_check(service, steering, config)?,
        affinity: service.affinity.filter(|_| capabilities.affinity),
        requested_addresses: requested_addresses(service)?,
        pool: service.annotations.get(names::ADDRESS_POOL).map(|pool| pool.trim().to_owned()),
        published: service.ingress.iter().filter_map(|ingress| ingress.ip).collect(),
        source_ranges: service.source_ranges.clone(),
        annotations: service.annotations.clone().into_iter().filter(|(name, _)| !is_note(name)).collect(),
    })
}

/// Whether an annotation is our own note, which asks for nothing.
fn is_note(name: &str) -> bool {
    [PROVIDER, MIGRATED].contains(&name)
}

/// Equal for two versions of a Service that ask for the same, whatever was written to status and finalizers between them.
pub(crate) fn fingerprint(service: &Service) -> u64 {
    let mut asked = service.clone();
    asked.annotations.retain(|name, _| !is_note(name));
    asked.finalizers.clear();
    asked.conditions.clear();
    asked.ingress.clear();
    asked.generation = None;
    let mut hasher = DefaultHasher::new();
    format!("{asked:?}").hash(&mut hasher);
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

fn listeners(service: &Service, capabilities: &Capabilities) -> Result<Vec<Listener>, PlanError> {
    if service.ports.is_empty() {
        return Err(PlanError::NoPorts);
    }
    service.ports.iter().map(|port| listener(port, capabilities)).collect()
}

fn listener(port: &ServicePort, capabilities: &Capabilities) -> Result<Listener, PlanError> {
    let ServicePort { name, protocol, port, node_port } = port.clone();
    if !capabilities.protocols.contains(&protocol) {
        return Err(PlanError::ProtocolNotSupported { port, protocol });
    }
    if capabilities.addressing == Addressing::NodePort && node_port.is_none() {
        return Err(PlanError::NoNodePort { port });
    }
    Ok(Listener { name, protocol, port, node_port })
}

/// The addresses that the user asks for: the annotation, which can name one of each family, before the field.
fn requested_addresses(service: &Service) -> Result<Vec<IpAddr>, PlanError> {
    let annotated = service.annotations.get(names::ADDRESSES).map(|text| (names::ADDRESSES, text));
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
