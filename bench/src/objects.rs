// SPDX-License-Identifier: Apache-2.0
//! The objects of the benchmark's cluster. Pure functions from numbers to Services and EndpointSlices.

use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use crate::testbed::{NODE, PODS, VIPS};

/// Name of the node, in every testbed.
pub const NODE_NAME: &str = "bench";
/// Endpoints of each Service.
pub const ENDPOINTS: u32 = 3;
/// Every hundredth Service has an endpoint on the node, because a node has some hundred pods however many Services exist.
const LOCAL: u32 = 100;
/// The node of all other endpoints.
const REMOTE_NODE: &str = "elsewhere";
/// Every tenth Service has a load balancer.
const BALANCED: u32 = 10;
/// The Service for measuring first packets.
pub const PROBE: &str = "probe";
/// The Service for measuring health checks.
pub const HEALTH: &str = "health";

/// The ports of pods.
pub mod port {
    /// Echoes one byte.
    pub const ECHO: u16 = 8080;
    /// Receives everything.
    pub const SINK: u16 = 8081;
    /// Records the arrival of datagrams.
    pub const PROBE: u16 = 9000;
}

/// The ports of Services, see [`port`].
pub mod service_port {
    /// Echoes one byte.
    pub const ECHO: u16 = 80;
    /// Receives everything.
    pub const SINK: u16 = 81;
    /// Records the arrival of datagrams.
    pub const PROBE: u16 = 53;
}

/// One of the two endpoint sets of a Service. They have no address in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The initial set.
    A,
    /// The other set.
    B,
}

impl Side {
    /// The other set.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Name of a numbered Service and of its EndpointSlice.
pub fn name(number: u32) -> String {
    format!("s{number}")
}

/// Whether a numbered Service has a load balancer.
pub fn has_load_balancer(number: u32) -> bool {
    number.is_multiple_of(BALANCED)
}

/// The VIP of a numbered Service.
pub fn vip(number: u32) -> Ipv4Addr {
    offset(VIPS.0, 1 + number)
}

/// The endpoints of the probe Service.
pub fn probe_addresses(side: Side) -> Vec<Ipv4Addr> {
    let first = if side == Side::A { 16 } else { 32 };
    (0..ENDPOINTS).map(|index| offset(PODS.0, first + index)).collect()
}

/// The endpoints of a numbered Service.
pub fn addresses(number: u32, side: Side) -> Vec<Ipv4Addr> {
    let first = 256 + (number * 2 + u32::from(side == Side::B)) * ENDPOINTS;
    (0..ENDPOINTS).map(|index| offset(PODS.0, first + index)).collect()
}

/// A numbered Service.
pub fn service(number: u32) -> Result<Service, serde_json::Error> {
    let kind = if has_load_balancer(number) { "LoadBalancer" } else { "ClusterIP" };
    build(&json!({
        "metadata": { "name": name(number) },
        "spec": { "type": kind, "ports": [{ "port": service_port::ECHO, "targetPort": port::ECHO }] },
    }))
}

/// The EndpointSlice of a numbered Service.
pub fn slice(number: u32) -> Result<EndpointSlice, serde_json::Error> {
    let ports = json!([{ "name": "", "port": port::ECHO, "protocol": "TCP" }]);
    slice_of(&name(number), &ports, &numbered_endpoints(number, Side::A))
}

/// The endpoints of a numbered Service, in the form of an EndpointSlice.
pub fn numbered_endpoints(number: u32, side: Side) -> Value {
    let local = |index: usize| index == 0 && number.is_multiple_of(LOCAL);
    let to_endpoint = |(index, address): (usize, &Ipv4Addr)| {
        endpoint(*address, if local(index) { NODE_NAME } else { REMOTE_NODE })
    };
    addresses(number, side).iter().enumerate().map(to_endpoint).collect()
}

/// The Service for measuring first packets and throughput.
pub fn probe() -> Result<(Service, EndpointSlice), serde_json::Error> {
    let service = build(&json!({
        "metadata": { "name": PROBE },
        "spec": { "type": "ClusterIP", "ports": [
            { "name": "probe", "port": service_port::PROBE, "protocol": "UDP" },
            { "name": "sink", "port": service_port::SINK },
        ] },
    }))?;
    let ports = json!([
        { "name": "probe", "port": port::PROBE, "protocol": "UDP" },
        { "name": "sink", "port": port::SINK, "protocol": "TCP" },
    ]);
    Ok((service, slice_of(PROBE, &ports, &endpoints(&probe_addresses(Side::A)))?))
}

/// The Service for measuring health checks.
pub fn health() -> Result<(Service, EndpointSlice), serde_json::Error> {
    let service = build(&json!({
        "metadata": { "name": HEALTH },
        "spec": {
            "type": "LoadBalancer", "externalTrafficPolicy": "Local",
            "ports": [{ "port": service_port::ECHO, "targetPort": port::ECHO }],
        },
    }))?;
    let ports = json!([{ "name": "", "port": port::ECHO, "protocol": "TCP" }]);
    Ok((service, slice_of(HEALTH, &ports, &endpoints(&[offset(PODS.0, 48)]))?))
}

/// The endpoints of the health Service: one, or none.
pub fn health_endpoints(present: bool) -> Value {
    if present { endpoints(&[offset(PODS.0, 48)]) } else { json!([]) }
}

/// The node.
pub fn node() -> Result<Node, serde_json::Error> {
    let cidr = format!("{}/{}", PODS.0, PODS.1);
    build(&json!({
        "metadata": { "name": NODE_NAME },
        "spec": { "podCIDR": cidr, "podCIDRs": [cidr] },
    }))
}

/// The node's status.
pub fn node_status() -> Value {
    json!({ "status": {
        "addresses": [{ "type": "InternalIP", "address": NODE }],
        "conditions": [{ "type": "Ready", "status": "True", "reason": "Bench", "message": "" }],
    } })
}

/// The load-balancer status of a Service.
pub fn balancer_status(address: Ipv4Addr) -> Value {
    json!({ "status": { "loadBalancer": { "ingress": [{ "ip": address, "ipMode": "VIP" }] } } })
}

/// Ready endpoints on the node, in the form of an EndpointSlice.
pub fn endpoints(addresses: &[Ipv4Addr]) -> Value {
    addresses.iter().map(|address| endpoint(*address, NODE_NAME)).collect()
}

fn endpoint(address: Ipv4Addr, node: &str) -> Value {
    json!({
        "addresses": [address], "nodeName": node,
        "conditions": { "ready": true, "serving": true, "terminating": false },
    })
}

fn slice_of(service: &str, ports: &Value, endpoints: &Value) -> Result<EndpointSlice, serde_json::Error> {
    build(&json!({
        "metadata": { "name": service, "labels": {
            "kubernetes.io/service-name": service,
            "endpointslice.kubernetes.io/managed-by": "bench.steerage.dev",
        } },
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": endpoints,
    }))
}

fn build<T: for<'a> serde::Deserialize<'a>>(value: &Value) -> Result<T, serde_json::Error> {
    T::deserialize(value)
}

fn offset(base: Ipv4Addr, by: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(base) + by)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn addresses_are_unique() {
        let sides = [Side::A, Side::B];
        let mut all: Vec<_> =
            (0..30_000).flat_map(|number| sides.map(|side| addresses(number, side))).collect();
        all.extend(sides.map(probe_addresses));
        let flat: Vec<_> = all.into_iter().flatten().collect();
        let unique: BTreeSet<_> = flat.iter().collect();
        assert_eq!(unique.len(), flat.len());
        let last = u32::from(PODS.0) + (1 << (32 - PODS.1));
        assert!(
            flat.iter().all(|address| u32::from(*address) < last),
            "all addresses are in the pod network"
        );
        assert!(u32::from(vip(30_000)) < u32::from(VIPS.0) + (1 << (32 - VIPS.1)));
    }

    #[test]
    fn one_in_ten_has_a_load_balancer() {
        assert_eq!((0..1000).filter(|number| has_load_balancer(*number)).count(), 100);
        assert_eq!(service(10).unwrap().spec.unwrap().type_.unwrap(), "LoadBalancer");
        assert_eq!(slice(11).unwrap().endpoints.unwrap_or_default().len(), 3);
    }
}
