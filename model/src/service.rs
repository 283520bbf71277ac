// SPDX-License-Identifier: Apache-2.0
//! The projection of a Service: the fields that load balancers and service proxies need.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use crate::{Key, names};

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(addr: IpAddr) -> Self {
        if addr.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// A transport protocol that a Service port can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// The IANA protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

/// `spec.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceKind {
    /// Reachable inside the cluster only.
    ClusterIp,
    /// Also on a port of every node.
    NodePort,
    /// Also through a load balancer.
    LoadBalancer,
    /// A DNS alias, which no service proxy serves.
    ExternalName,
}

/// `externalTrafficPolicy` and `internalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// Any endpoint of the cluster.
    Cluster,
    /// Only endpoints of the node that the packet reached.
    Local,
}

/// `sessionAffinity: ClientIP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Affinity {
    /// Time after a client's last new connection until it may get another endpoint.
    pub timeout: Duration,
}

/// One entry of `spec.ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    /// The port's name; empty for a single unnamed port.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that clients use on `ClusterIP` and VIP.
    pub port: u16,
    /// The port that the pods listen on.
    pub target_port: TargetPort,
    /// The port on every node, where one is allocated.
    pub node_port: Option<u16>,
}

impl ServicePort {
    /// A port whose pods listen on the same port.
    pub fn new(name: impl Into<String>, protocol: Protocol, port: u16, node_port: Option<u16>) -> Self {
        Self { name: name.into(), protocol, port, target_port: TargetPort::Number(port), node_port }
    }
}

/// `spec.ports[].targetPort`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetPort {
    /// The same port of every pod.
    Number(u16),
    /// Each pod's port of this name and the Service port's protocol.
    Name(String),
}

/// `status.loadBalancer.ingress[].ipMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IpMode {
    /// Packets reach the node with the VIP as destination: the service proxy serves it.
    Vip,
    /// The load balancer terminates connections: the service proxy ignores the address.
    Proxy,
}

/// One entry of `status.loadBalancer.ingress`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ingress {
    /// The address, if the entry has one.
    pub ip: Option<IpAddr>,
    /// The DNS name, if the entry has one.
    pub hostname: Option<String>,
    /// `None` counts as [`IpMode::Vip`].
    pub ip_mode: Option<IpMode>,
}

/// One entry of `status.conditions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The condition's type, for example `steerage.dev/Programmed`.
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The machine-readable reason.
    pub reason: String,
    /// The message for users.
    pub message: String,
    /// The observed generation, where one was set.
    pub observed_generation: Option<i64>,
}

/// The fields of a Service that Steerage uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub key: Key,
    /// The object's UID: a new Service of the same name has another one.
    pub uid: String,
    /// `spec.type`.
    pub kind: ServiceKind,
    /// `spec.clusterIPs`; empty for a headless Service.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// `spec.ports`.
    pub ports: Vec<ServicePort>,
    /// `spec.externalTrafficPolicy`.
    pub external_policy: TrafficPolicy,
    /// `spec.internalTrafficPolicy`.
    pub internal_policy: TrafficPolicy,
    /// `spec.sessionAffinity: ClientIP` with its timeout.
    pub affinity: Option<Affinity>,
    /// `spec.healthCheckNodePort`.
    pub health_check_node_port: Option<u16>,
    /// `spec.loadBalancerSourceRanges`, those that parse.
    pub source_ranges: Vec<IpNet>,
    /// `spec.loadBalancerClass`.
    pub class: Option<String>,
    /// `spec.loadBalancerIP` as written.
    pub load_balancer_ip: Option<String>,
    /// `spec.ipFamilies`.
    pub families: Vec<Family>,
    /// `spec.allocateLoadBalancerNodePorts`.
    pub allocate_node_ports: bool,
    /// Whether `spec.selector` is set. Without one the user writes the endpoints.
    pub has_selector: bool,
    /// The annotations that [`names::is_kept`] keeps.
    pub annotations: BTreeMap<String, String>,
    /// `metadata.labels` of a `LoadBalancer` Service.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The value of the label [`names::PROXY_NAME_LABEL`].
    pub proxy_name: Option<String>,
    /// Whether the label [`names::HEADLESS_LABEL`] is set.
    pub headless_label: bool,
    /// `metadata.finalizers`.
    pub finalizers: Vec<String>,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// `metadata.creationTimestamp`, in seconds since 1970; 0 if the object has none.
    pub created: i64,
    /// `metadata.generation`, where the API server keeps one.
    pub generation: Option<i64>,
    /// `status.loadBalancer.ingress`.
    pub ingress: Vec<Ingress>,
    /// `status.conditions`.
    pub conditions: Vec<Condition>,
}

impl Service {
    /// An empty `ClusterIP` Service, for building one field by field.
    pub fn new(key: Key) -> Self {
        Self {
            key,
            uid: String::new(),
            kind: ServiceKind::ClusterIp,
            cluster_ips: Vec::new(),
            external_ips: Vec::new(),
            ports: Vec::new(),
            external_policy: TrafficPolicy::Cluster,
            internal_policy: TrafficPolicy::Cluster,
            affinity: None,
            health_check_node_port: None,
            source_ranges: Vec::new(),
            class: None,
            load_balancer_ip: None,
            families: Vec::new(),
            allocate_node_ports: true,
            has_selector: true,
            annotations: BTreeMap::new(),
            labels: Arc::default(),
            proxy_name: None,
            headless_label: false,
            finalizers: Vec::new(),
            deleting: false,
            created: 0,
            generation: None,
            ingress: Vec::new(),
            conditions: Vec::new(),
        }
    }

    /// Whether `finalizer` is set on the object.
    pub fn has_finalizer(&self, finalizer: &str) -> bool {
        self.finalizers.iter().any(|f| f == finalizer)
    }

    /// Whether the label assigns the Service to the agent, not to kube-proxy.
    pub fn is_labelled_for_agent(&self) -> bool {
        self.proxy_name.as_deref() == Some(names::PROXY_NAME)
    }

    /// The addresses whose packets a load balancer delivers unchanged, so that the service proxy must serve them.
    pub fn vips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.ingress.iter().filter(|i| i.ip_mode != Some(IpMode::Proxy)).filter_map(|i| i.ip)
    }

    /// The health-check node port of a Service of type `LoadBalancer` with external traffic policy Local.
    pub fn health_port(&self) -> Option<u16> {
        (self.kind == ServiceKind::LoadBalancer && self.external_policy == TrafficPolicy::Local)
            .then_some(self.health_check_node_port)
            .flatten()
    }
}
