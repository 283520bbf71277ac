// SPDX-License-Identifier: Apache-2.0
//! Compact descriptions of clusters, and the plans for them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use steerage_agent::kernel::{Dataplane, Written};
use steerage_agent::local_node::{LocalNode, LocalPods};
use steerage_agent::plan::{ServicePlan, plan_service};
use steerage_agent::rules::Ruleset;
use steerage_model::{
    Affinity, Endpoint, EndpointPort, EndpointSlice, Family, Ingress, Key, Protocol, Service, ServiceKind,
    ServicePort, TrafficPolicy, names,
};
use steerage_nft::Error;
use steerage_watch::{Event, Index};

pub(crate) const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// A dual-stack Service with three protocols, and the numbers of its endpoints.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) kind: ServiceKind,
    /// Endpoints on this node, and elsewhere. Their addresses are counted from `first` on.
    pub(crate) here: u16,
    pub(crate) elsewhere: u16,
    pub(crate) first: u16,
    pub(crate) external: TrafficPolicy,
    pub(crate) internal: TrafficPolicy,
    /// Seconds.
    pub(crate) affinity: Option<u32>,
    pub(crate) sources: Vec<IpNet>,
    /// Numbers of the external address and of the node port: Services may ask for the same ones.
    pub(crate) shared: u8,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            kind: ServiceKind::LoadBalancer,
            here: 0,
            elsewhere: 1,
            first: 0,
            external: TrafficPolicy::Cluster,
            internal: TrafficPolicy::Cluster,
            affinity: None,
            sources: Vec::new(),
            shared: 0,
        }
    }
}

/// Services by number.
pub(crate) type World = BTreeMap<u8, Spec>;

/// An address: `net` says of what kind.
pub(crate) fn addr(family: Family, net: u8, host: u16) -> IpAddr {
    let [high, low] = host.to_be_bytes();
    match family {
        Family::V4 => Ipv4Addr::new(10, net, high, low).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, net.into(), 0, 0, 0, 0, 0, host).into(),
    }
}

const CLUSTER: u8 = 96;
const VIP: u8 = 97;
const EXTERNAL: u8 = 98;
const POD: u8 = 244;
const NODE: u8 = 1;
pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn both(net: u8, host: u16) -> Vec<IpAddr> {
    FAMILIES.map(|family| addr(family, net, host)).to_vec()
}

pub(crate) fn cluster_ip(family: Family, number: u8) -> IpAddr {
    addr(family, CLUSTER, number.into())
}

fn key(number: u8) -> Key {
    Key::new("shop", format!("s{number}"))
}

fn service(number: u8, spec: &Spec) -> Service {
    let node_port = (spec.kind != ServiceKind::ClusterIp).then(|| 30_000 + u16::from(spec.shared));
    let port = |protocol: Protocol| ServicePort::new(protocol.to_string(), protocol, 80, node_port);
    let ingress = |ip: IpAddr| Ingress { ip: Some(ip), hostname: None, ip_mode: None };
    Service {
        kind: spec.kind,
        cluster_ips: both(CLUSTER, number.into()),
        external_ips: both(EXTERNAL, spec.shared.into()),
        ingress: both(VIP, number.into()).into_iter().map(ingress).collect(),
        ports: PROTOCOLS.map(port).to_vec(),
        external_policy: spec.external,
        internal_policy: spec.internal,
        affinity: spec.affinity.map(|seconds| Affinity { timeout: Duration::from_secs(seconds.into()) }),
        source_ranges: spec.sources.clone(),
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(key(number))
    }
}

fn slice(number: u8, spec: &Spec, family: Family) -> EndpointSlice {
    let endpoint = |n: u16| {
        Endpoint::ready(addr(family, POD, n), if n - spec.first < spec.here { "node" } else { "other" })
    };
    EndpointSlice {
        ports: PROTOCOLS
            .map(|protocol| EndpointPort { name: protocol.to_string(), protocol, port: 8080 })
            .into(),
        endpoints: (spec.first..).take((spec.here + spec.elsewhere).into()).map(endpoint).collect(),
        ..EndpointSlice::new(Key::new("shop", format!("s{number}-{family}")), key(number), family)
    }
}

fn place() -> LocalNode {
    LocalNode {
        node: "node".to_owned(),
        addresses: both(NODE, 1),
        node_port_addresses: both(NODE, 1),
        ..LocalNode::default()
    }
}

pub(crate) fn pod_networks() -> LocalPods {
    LocalPods::Networks(vec!["10.244.0.0/24".parse().unwrap(), "fd00:f4::/64".parse().unwrap()])
}

/// The plans of a world, and empty ones for the Services of `gone` that are not in it.
pub(crate) fn plans(world: &World, gone: impl IntoIterator<Item = Key>) -> BTreeMap<Key, ServicePlan> {
    let mut index = Index::default();
    for (number, spec) in world {
        index.apply_service(Event::Apply(service(*number, spec)));
        for family in FAMILIES {
            index.apply_slice(Event::Apply(slice(*number, spec, family)));
        }
    }
    let mut plans: BTreeMap<_, _> = gone.into_iter().map(|key| (key, ServicePlan::default())).collect();
    let planned: BTreeSet<_> = index.services().map(|service| service.key.clone()).collect();
    for key in planned {
        plans.insert(key.clone(), plan_service(index.service(&key).unwrap(), &index, &place()));
    }
    plans
}

/// A ruleset and its writer.
pub(crate) struct Proxy {
    pub(crate) ruleset: Ruleset,
    pub(crate) dataplane: Dataplane,
}

impl Proxy {
    /// Opens the writer in the network namespace of the calling thread.
    pub(crate) fn open() -> Self {
        Self { ruleset: Ruleset::default(), dataplane: Dataplane::open().unwrap() }
    }

    /// Writes these plans.
    pub(crate) fn write(
        &mut self,
        updates: BTreeMap<Key, ServicePlan>,
        pods: &LocalPods,
    ) -> Result<Written, Error> {
        if self.ruleset.set_pods(pods) {
            self.dataplane.mark_out_of_sync();
        }
        self.dataplane.write(&mut self.ruleset, updates)
    }
}
