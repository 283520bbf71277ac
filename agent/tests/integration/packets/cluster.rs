// SPDX-License-Identifier: Apache-2.0
//! The cluster of the node under test: one Service, its endpoints, and a data plane that follows them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use steerage_agent::kernel::{Dataplane, Written};
use steerage_agent::local_node::{LocalNode, LocalPods};
use steerage_agent::plan::{ServicePlan, plan_service};
use steerage_agent::rules::{Features, Ruleset, StaleFlows};
use steerage_model::{
    Affinity, Endpoint, EndpointPort, EndpointSlice, Family, Ingress, Key, Protocol, Service, ServiceKind,
    ServicePort, TrafficPolicy, names,
};
use steerage_watch::{Event, Index};

use crate::world::{At, PORT, World};

pub(crate) const FRONT: u16 = 80;
pub(crate) const NODE_PORT: u16 = 30080;

/// The ways to a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ClusterIp,
    NodePort,
    Vip,
    ExternalIp,
}

impl Way {
    pub(crate) const EXTERNAL: [Self; 3] = [Self::NodePort, Self::Vip, Self::ExternalIp];

    pub(crate) fn to(self, family: Family) -> SocketAddr {
        let text = match (self, family) {
            (Self::NodePort, _) => return SocketAddr::new(At::Node.addr(family), NODE_PORT),
            (Self::ClusterIp, Family::V4) => "10.96.0.10",
            (Self::ClusterIp, Family::V6) => "fd96::10",
            (Self::Vip, Family::V4) => "192.0.2.10",
            (Self::Vip, Family::V6) => "2001:db8::10",
            (Self::ExternalIp, Family::V4) => "198.51.100.10",
            (Self::ExternalIp, Family::V6) => "2001:db8:1::10",
        };
        SocketAddr::new(text.parse().expect("address"), FRONT)
    }
}

pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

pub(crate) fn key() -> Key {
    Key::new("shop", "web")
}

/// A `LoadBalancer` Service with every kind of frontend, labelled for the agent.
pub(crate) fn service() -> Service {
    let both = |way: Way| FAMILIES.map(|family| way.to(family).ip()).to_vec();
    let port = |protocol: Protocol| ServicePort::new(protocol.to_string(), protocol, FRONT, Some(NODE_PORT));
    let ingress = |ip: IpAddr| Ingress { ip: Some(ip), hostname: None, ip_mode: None };
    Service {
        kind: ServiceKind::LoadBalancer,
        cluster_ips: both(Way::ClusterIp),
        external_ips: both(Way::ExternalIp),
        ingress: both(Way::Vip).into_iter().map(ingress).collect(),
        ports: vec![port(Protocol::Tcp), port(Protocol::Udp)],
        health_check_node_port: Some(31000),
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(key())
    }
}

pub(crate) fn local(mut service: Service) -> Service {
    service.external_policy = TrafficPolicy::Local;
    service
}

pub(crate) fn with_affinity(mut service: Service, timeout: Duration) -> Service {
    service.affinity = Some(Affinity { timeout });
    service
}

/// The slices of the Service, one per family.
pub(crate) fn slices(pods: &[At]) -> Vec<EndpointSlice> {
    FAMILIES
        .map(|family| EndpointSlice {
            ports: [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| EndpointPort { name: protocol.to_string(), protocol, port: PORT })
                .into(),
            endpoints: pods
                .iter()
                .map(|at| Endpoint::ready(at.addr(family), if *at == At::Far { "other" } else { "node" }))
                .collect(),
            ..EndpointSlice::new(Key::new("shop", format!("web-{family}")), key(), family)
        })
        .to_vec()
}

pub(crate) fn place() -> LocalNode {
    let own = FAMILIES.map(|family| At::Node.addr(family)).to_vec();
    LocalNode {
        node: "node".to_owned(),
        zone: None,
        addresses: own.clone(),
        node_port_addresses: own,
        kube_proxy_replacement: false,
        ..LocalNode::default()
    }
}

/// What a write did, and the flows to clean up after it.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) elements: usize,
    pub(crate) full: bool,
    pub(crate) stale: StaleFlows,
}

/// An index and a data plane that follows it.
pub(crate) struct Cluster {
    pub(crate) index: Index,
    pub(crate) ruleset: Ruleset,
    pub(crate) dataplane: Dataplane,
    /// How local pods are detected.
    pub(crate) pods: LocalPods,
}

impl Cluster {
    /// Opens the data plane in the node's namespace, with one Service.
    pub(crate) fn new(world: &World, service: Service, pods: &[At]) -> Self {
        Self::on_kernel(world, service, pods, Features::default())
    }

    /// The same on a kernel with these features.
    pub(crate) fn on_kernel(world: &World, service: Service, pods: &[At], features: Features) -> Self {
        let mut index = Index::default();
        index.apply_service(Event::Init);
        index.apply_slice(Event::Init);
        index.apply_service(Event::InitDone);
        index.apply_slice(Event::InitDone);
        let by_network = LocalPods::Networks(pod_networks());
        let mut ruleset = Ruleset::default();
        ruleset.set_features(features);
        let mut cluster = Self { index, ruleset, dataplane: open(world), pods: by_network };
        cluster.set(service, pods);
        cluster
    }

    /// Restarts: opens the tables again and follows the same index, as a new process would.
    pub(crate) fn restart(&mut self, world: &World) -> Applied {
        let features = self.ruleset.config().features.clone();
        self.ruleset = Ruleset::default();
        self.ruleset.set_features(features);
        self.dataplane = open(world);
        self.apply()
    }

    pub(crate) fn set(&mut self, service: Service, pods: &[At]) -> Applied {
        self.set_slices(service, slices(pods))
    }

    pub(crate) fn set_slices(&mut self, service: Service, slices: Vec<EndpointSlice>) -> Applied {
        self.index.apply_service(Event::Apply(service));
        for slice in slices {
            self.index.apply_slice(Event::Apply(slice));
        }
        self.apply()
    }

    pub(crate) fn delete(&mut self) -> Applied {
        self.index.apply_service(Event::Delete { key: key(), version: String::new() });
        self.apply()
    }

    pub(crate) fn delete_slice(&mut self, key: Key) {
        self.index.apply_slice(Event::Delete { key, version: String::new() });
    }

    pub(crate) fn apply(&mut self) -> Applied {
        let plan = self.index.service(&key()).map(|service| plan_service(service, &self.index, &place()));
        self.write([(key(), plan.unwrap_or_default())].into())
    }

    /// Writes these plans.
    pub(crate) fn write(&mut self, updates: BTreeMap<Key, ServicePlan>) -> Applied {
        if self.ruleset.set_pods(&self.pods) {
            self.dataplane.mark_out_of_sync();
        }
        let Written { elements, full, .. } = self.dataplane.write(&mut self.ruleset, updates).expect("write");
        let stale = if full { self.ruleset.take_all_stale_flows() } else { self.ruleset.take_stale_flows() };
        Applied { elements, full, stale }
    }
}

pub(crate) fn pod_networks() -> Vec<ipnet::IpNet> {
    ["10.244.0.0/24", "fd44::/64"].map(|net| net.parse().expect("network")).to_vec()
}

fn open(world: &World) -> Dataplane {
    world.run(At::Node, || Dataplane::open().expect("open"))
}
