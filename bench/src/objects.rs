// SPDX-License-Identifier: Apache-2.0
//! The objects of the benchmark's cluster. Pure functions from numbers to Services and EndpointSlices.

use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use crate::testbed::{NODE, PODS, VIPS};

/// Name of the node, in every testbed.
pub const NODE_NAME: &str = "bench";
/// Endpoints of the probe Service, and of a usual one.
pub const ENDPOINTS: u32 = 3;
/// Endpoints of an EndpointSlice, as Kubernetes' controller makes them.
const SLICE: usize = 100;
/// Endpoints that the API server takes in one EndpointSlice: the probe Service's change all at once.
const MOST_OF_A_SLICE: u32 = 1000;
/// Where the addresses of the probe Service's endpoints begin, after those of all others.
const PROBE_ADDRESSES: u32 = 1_040_000;
/// A Service with more endpoints changes one at a time.
pub const FEW: u32 = 8;
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

/// How many endpoints the numbered Services have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Each has this many.
    Even(u32),
    /// Most have three, one in a hundred has 100 to 300, and one in a thousand 1,000 to 5,000.
    Tail,
}

impl Shape {
    /// The number of endpoints of a numbered Service.
    pub fn endpoints(self, number: u32) -> u32 {
        match self {
            Self::Even(endpoints) => endpoints,
            Self::Tail if number % 1000 == 501 => 1000 + number / 1000 * 1777 % 4001,
            Self::Tail if number % 100 == 51 => 100 + number / 100 * 67 % 201,
            Self::Tail => ENDPOINTS,
        }
    }

    /// The endpoints of a numbered Service. No two Services and sides have one in common, with up to 30,000 Services in the tail.
    pub fn addresses(self, number: u32, side: Side) -> Vec<Ipv4Addr> {
        let endpoints = self.endpoints(number);
        let of = |start: u32, index: u32, most: u32| start + (index * 2 + u32::from(side == Side::B)) * most;
        let first = match self {
            Self::Tail if endpoints >= 1000 => of(400_000, number / 1000, 5000),
            Self::Tail if endpoints >= 100 => of(200_000, number / 100, 300),
            Self::Even(_) | Self::Tail => of(256, number, endpoints),
        };
        (0..endpoints).map(|index| offset(PODS.0, first + index)).collect()
    }
}

/// Name of a numbered Service and of its first EndpointSlice.
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

/// The number of endpoints of the probe Service.
pub fn probe_endpoints(shape: Shape) -> u32 {
    match shape {
        Shape::Even(endpoints) => endpoints.min(MOST_OF_A_SLICE),
        Shape::Tail => ENDPOINTS,
    }
}

/// The endpoints of the probe Service.
pub fn probe_addresses(side: Side, shape: Shape) -> Vec<Ipv4Addr> {
    let endpoints = probe_endpoints(shape);
    let first = PROBE_ADDRESSES + if side == Side::A { 0 } else { MOST_OF_A_SLICE };
    (0..endpoints).map(|index| offset(PODS.0, first + index)).collect()
}

/// A numbered Service.
pub fn service(number: u32) -> Result<Service, serde_json::Error> {
    let kind = if has_load_balancer(number) { "LoadBalancer" } else { "ClusterIP" };
    build(&json!({
        "metadata": { "name": name(number) },
        "spec": { "type": kind, "ports": [{ "port": service_port::ECHO, "targetPort": port::ECHO }] },
    }))
}

/// The EndpointSlices of a numbered Service.
pub fn slices(shape: Shape, number: u32) -> Result<Vec<EndpointSlice>, serde_json::Error> {
    let ports = json!([{ "name": "", "port": port::ECHO, "protocol": "TCP" }]);
    let service = name(number);
    let addresses = shape.addresses(number, Side::A);
    let slice = |(part, addresses): (usize, &[Ipv4Addr])| {
        let name = if part == 0 { service.clone() } else { format!("{service}-{part}") };
        let endpoints = numbered_endpoints(number, part == 0, addresses);
        slice_of(&name, &service, &ports, &endpoints)
    };
    addresses.chunks(SLICE).enumerate().map(slice).collect()
}

/// The endpoints of the first EndpointSlice of a numbered Service after its change to a side: all of few, or else one.
pub fn changed_endpoints(shape: Shape, number: u32, side: Side) -> Value {
    let mut addresses = shape.addresses(number, side);
    if shape.endpoints(number) > FEW {
        let changed = addresses.first().copied();
        addresses = shape.addresses(number, Side::A);
        addresses.truncate(SLICE);
        if let (Some(first), Some(changed)) = (addresses.first_mut(), changed) {
            *first = changed;
        }
    }
    numbered_endpoints(number, true, &addresses)
}

/// Endpoints of a numbered Service, in the form of an EndpointSlice.
fn numbered_endpoints(number: u32, is_first: bool, addresses: &[Ipv4Addr]) -> Value {
    let local = |index: usize| is_first && index == 0 && number.is_multiple_of(LOCAL);
    let to_endpoint = |(index, address): (usize, &Ipv4Addr)| {
        endpoint(*address, if local(index) { NODE_NAME } else { REMOTE_NODE })
    };
    addresses.iter().enumerate().map(to_endpoint).collect()
}

/// The Service for measuring first packets and throughput.
pub fn probe(shape: Shape) -> Result<(Service, EndpointSlice), serde_json::Error> {
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
    Ok((service, slice_of(PROBE, PROBE, &ports, &endpoints(&probe_addresses(Side::A, shape)))?))
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
    Ok((service, slice_of(HEALTH, HEALTH, &ports, &endpoints(&[offset(PODS.0, 48)]))?))
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

fn slice_of(
    name: &str,
    service: &str,
    ports: &Value,
    endpoints: &Value,
) -> Result<EndpointSlice, serde_json::Error> {
    build(&json!({
        "metadata": { "name": name, "labels": {
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
        for (shape, services) in [(Shape::Even(3), 30_000), (Shape::Even(1000), 500), (Shape::Tail, 30_000)] {
            let of = |number| sides.map(|side| shape.addresses(number, side));
            let mut all: Vec<_> = (0..services).flat_map(of).collect();
            all.extend(sides.map(|side| probe_addresses(side, shape)));
            let flat: Vec<_> = all.into_iter().flatten().collect();
            let unique: BTreeSet<_> = flat.iter().collect();
            assert_eq!(unique.len(), flat.len(), "{shape:?}");
            let last = u32::from(PODS.0) + (1 << (32 - PODS.1));
            assert!(
                flat.iter().all(|address| u32::from(*address) < last),
                "all addresses are in the pod network"
            );
        }
        assert!(u32::from(vip(30_000)) < u32::from(VIPS.0) + (1 << (32 - VIPS.1)));
    }

    #[test]
    fn one_in_ten_has_a_load_balancer() {
        assert_eq!((0..1000).filter(|number| has_load_balancer(*number)).count(), 100);
        assert_eq!(service(10).unwrap().spec.unwrap().type_.unwrap(), "LoadBalancer");
        let sizes = |shape, number| -> Vec<usize> {
            let slices = slices(shape, number).unwrap();
            slices.into_iter().map(|slice| slice.endpoints.unwrap_or_default().len()).collect()
        };
        assert_eq!(sizes(Shape::Even(3), 11), [3]);
        assert_eq!(sizes(Shape::Even(250), 11), [100, 100, 50]);
    }

    #[test]
    fn the_tail_has_few_services_and_most_endpoints() {
        let counts: Vec<_> = (0..10_000).map(|number| Shape::Tail.endpoints(number)).collect();
        let between = |low, high| counts.iter().filter(|count| (low..=high).contains(*count)).count();
        assert_eq!((between(3, 3), between(100, 300), between(1000, 5000)), (9890, 100, 10));
        let long: u32 = counts.iter().filter(|count| **count > 3).sum();
        assert!((40_000..60_000).contains(&long), "{long}");
    }

    #[test]
    fn a_change_of_a_long_service_is_one_endpoint() {
        let addresses = |side| -> BTreeSet<String> {
            let of = changed_endpoints(Shape::Even(1000), 7, side);
            of.as_array().unwrap().iter().map(|endpoint| endpoint["addresses"].to_string()).collect()
        };
        assert_eq!(addresses(Side::A).len(), 100);
        assert_eq!(addresses(Side::A).difference(&addresses(Side::B)).count(), 1);
    }
}
