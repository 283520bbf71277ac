// SPDX-License-Identifier: Apache-2.0
//! The address plan of a lab: its hosts, their namespaces and addresses. Pure.
//!
//! Labs share no network, so all use the same addresses. Only the names of the namespaces differ.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The node segment.
pub const NODES_IPV4: &str = "10.77.0.0/16";
/// The node segment.
pub const NODES_IPV6: &str = "fd77::/64";
/// All pods.
pub const PODS_IPV4: &str = "10.244.0.0/16";
/// All pods.
pub const PODS_IPV6: &str = "fd44::/16";
/// `ClusterIP`s.
pub const SERVICES_IPV4: &str = "10.96.0.0/16";
/// `ClusterIP`s.
pub const SERVICES_IPV6: &str = "fd96::/112";
/// VIPs in the chart's address pools.
pub const VIPS_IPV4: &str = "10.77.200.0/24";
/// VIPs in the chart's address pools.
pub const VIPS_IPV6: &str = "fd77::c800/120";
/// The nodes in a cloud: what the VPC has of [`NODES_IPV4`] beside [`VIPS_IPV4`].
pub const INSTANCES_IPV4: &str = "10.77.0.0/20";
/// Floating IPs in OpenStack, external VIPs in GCE and Azure. The router leads to them; no host has one but by a cloud's agent.
pub const FLOATING_IPV4: &str = "10.79.0.0/24";
/// External VIPs in GCE and Azure.
pub const EXTERNAL_IPV6: &str = "fd79::/64";
/// Cluster DNS.
pub const DNS_IPV4: &str = "10.96.0.10";
/// Cluster DNS.
pub const DNS_IPV6: &str = "fd96::a";
/// The TCP port of the API server.
pub const API_PORT: u16 = 6443;
/// Maximum number of workers, and of edges: the last byte of an address.
const MOST: u8 = 99;

/// The service proxy of the nodes.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    strum::Display,
    strum::EnumString,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum ServiceProxy {
    /// kube-proxy in nftables mode, a process of the node.
    KubeProxy,
    /// Steerage's agent, installed by the chart.
    #[serde(alias = "steerage")]
    Agent,
}

/// A simulated cloud around the nodes.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    strum::Display,
    strum::EnumString,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Cloud {
    /// AWS: its API by moto, and network load balancers on the router.
    Aws,
    /// Azure: a stand-in of its API, and load balancers on the router.
    Azure,
    /// GCE: a stand-in of its API, and load balancers on the router.
    Gce,
    /// OpenStack: its real APIs, floating IPs on the router, and load balancers on a host of their own.
    #[value(name = "openstack")]
    #[serde(rename = "openstack")]
    #[strum(serialize = "openstack")]
    OpenStack,
}

/// The role of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// etcd, API server, controller manager, scheduler.
    ControlPlane,
    /// Runs a kubelet. Its number, from 1.
    Node(u8),
    /// Runs Steerage's edge. Its number, from 1.
    Edge(u8),
    /// The load balancers of OpenStack, beside the nodes.
    Amphora,
    /// Outside of the cluster, on a segment of its own. Its number, from 1.
    Client(u8),
}

/// One machine of the lab: a network namespace with one interface `eth0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its role.
    pub role: Role,
    /// `node1`, `edge1`, `amphora`, `client1`, `cp`; for a node also its name in Kubernetes.
    pub name: String,
    /// The name of its network namespace under /run/netns.
    pub netns: String,
    /// Its IPv4 address, in a /16.
    pub ipv4: Ipv4Addr,
    /// Its IPv6 address, in a /64.
    pub ipv6: Ipv6Addr,
}

impl Host {
    /// The router's address on this host's segment.
    pub fn gateways(&self) -> (Ipv4Addr, Ipv6Addr) {
        let [first, second, ..] = self.ipv4.octets();
        let [prefix, ..] = self.ipv6.segments();
        (Ipv4Addr::new(first, second, 0, 1), Ipv6Addr::new(prefix, 0, 0, 0, 0, 0, 0, 1))
    }

    /// The router's bridge of this host's segment.
    pub fn bridge(&self) -> &'static str {
        if matches!(self.role, Role::Client(_)) { "clients" } else { "nodes" }
    }

    /// A MAC address that survives a restart of the host, as a machine's does.
    pub fn mac(&self) -> String {
        mac(self.ipv4)
    }
}

/// The MAC address of the interface with this address.
pub(crate) fn mac(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// The composition of a lab. All addresses and names derive from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The lab's name; its namespaces are called `<name>-…`.
    pub name: String,
    /// Number of nodes.
    pub workers: u8,
    /// Number of edge hosts.
    pub edges: u8,
    /// The service proxy of the nodes.
    pub service_proxy: ServiceProxy,
    /// The cloud; without one, Steerage's edge is the load balancer.
    #[serde(default)]
    pub cloud: Option<Cloud>,
    /// After this long without a heartbeat a node becomes `NotReady`; as kube-controller-manager takes it: `50s`.
    pub node_monitor_grace_period: String,
}

impl Plan {
    /// Checks the name and the numbers.
    pub fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        if self.workers == 0 || self.workers > MOST || self.edges > MOST {
            return Err(Error::Refused(format!("a lab has 1 to {MOST} workers and at most {MOST} edges")));
        }
        if self.cloud.is_some() && self.edges > 0 {
            return Err(Error::Refused("a lab with a cloud has no edge hosts: leave out --edges".into()));
        }
        Ok(())
    }

    /// The namespace of the router.
    pub fn router(&self) -> String {
        format!("{}-router", self.name)
    }

    /// The host of the control plane.
    pub fn control_plane(&self) -> Host {
        self.host(Role::ControlPlane)
    }

    /// The nodes, in order.
    pub fn nodes(&self) -> Vec<Host> {
        (1..=self.workers).map(|i| self.host(Role::Node(i))).collect()
    }

    /// The edge hosts, in order.
    pub fn edges(&self) -> Vec<Host> {
        (1..=self.edges).map(|i| self.host(Role::Edge(i))).collect()
    }

    /// The host of OpenStack's load balancers.
    pub fn amphora(&self) -> Option<Host> {
        (self.cloud == Some(Cloud::OpenStack)).then(|| self.host(Role::Amphora))
    }

    /// The two clients.
    pub fn clients(&self) -> [Host; 2] {
        [self.host(Role::Client(1)), self.host(Role::Client(2))]
    }

    /// Every host but the router.
    pub fn hosts(&self) -> Vec<Host> {
        let mut hosts = vec![self.control_plane()];
        hosts.extend(self.nodes());
        hosts.extend(self.edges());
        hosts.extend(self.amphora());
        hosts.extend(self.clients());
        hosts
    }

    /// The host of this name.
    pub fn find(&self, name: &str) -> Result<Host> {
        self.hosts().into_iter().find(|host| host.name == name).ok_or_else(|| {
            let names: Vec<_> = self.hosts().into_iter().map(|host| host.name).collect();
            Error::Refused(format!("lab {} has no host {name}; it has {}", self.name, names.join(", ")))
        })
    }

    /// The node of this name, and its number.
    pub fn find_node(&self, name: &str) -> Result<(Host, u8)> {
        let host = self.find(name)?;
        match host.role {
            Role::Node(number) => Ok((host, number)),
            _ => Err(Error::Refused(format!("{name} is not a node of lab {}", self.name))),
        }
    }

    /// The API server as every host sees it.
    pub fn api_server(&self) -> String {
        format!("https://{}:{API_PORT}", self.control_plane().ipv4)
    }

    fn host(&self, role: Role) -> Host {
        let (name, segment, third, fourth) = match role {
            Role::ControlPlane => ("cp".to_owned(), 77, 0, 2),
            Role::Node(i) => (format!("node{i}"), 77, 1, i),
            Role::Edge(i) => (format!("edge{i}"), 77, 2, i),
            Role::Amphora => ("amphora".to_owned(), 77, 3, 1),
            Role::Client(i) => (format!("client{i}"), 78, 1, i),
        };
        let prefix = if segment == 77 { 0xfd77 } else { 0xfd78 };
        Host {
            role,
            netns: format!("{}-{name}", self.name),
            name,
            ipv4: Ipv4Addr::new(10, segment, third, fourth),
            ipv6: Ipv6Addr::new(prefix, 0, 0, 0, 0, 0, third.into(), fourth.into()),
        }
    }
}

/// A lab's name: short, and without a hyphen, so that `a-*` cannot belong to another lab.
pub fn check_name(name: &str) -> Result<()> {
    let fits = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 12
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    if fits {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{name:?} is not a valid lab name: use at most 12 characters of a-z and 0-9, the first a letter"
    )))
}

/// The pod networks of a node: `10.244.i.0/24` and `fd44:i::/64`.
pub fn pod_cidrs(node: u8) -> (String, String) {
    (format!("10.244.{node}.0/24"), format!("fd44:{node:x}::/64"))
}

/// The zone of a node: zones a, b and c in turn.
pub fn zone(node: u8) -> String {
    format!("zone-{}", ["a", "b", "c"][usize::from(node.saturating_sub(1) % 3)])
}

#[cfg(test)]
impl Plan {
    /// Two workers, one edge host, kube-proxy.
    pub(crate) fn example() -> Self {
        Self {
            name: "lab".into(),
            workers: 2,
            edges: 1,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn plan(workers: u8, edges: u8) -> Plan {
        Plan {
            name: "lab".into(),
            workers,
            edges,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        }
    }

    #[test]
    fn addresses_are_as_documented() {
        let plan = plan(3, 1);
        let node = plan.find("node2").unwrap();
        assert_eq!(node.netns, "lab-node2");
        assert_eq!(node.ipv4.to_string(), "10.77.1.2");
        assert_eq!(node.ipv6.to_string(), "fd77::1:2");
        assert_eq!(node.gateways().0.to_string(), "10.77.0.1");
        assert_eq!(node.gateways().1.to_string(), "fd77::1");
        assert_eq!(node.mac(), "02:00:0a:4d:01:02");
        let client = plan.find("client1").unwrap();
        assert_eq!(
            (client.ipv4.to_string(), client.ipv6.to_string()),
            ("10.78.1.1".into(), "fd78::1:1".into())
        );
        assert_eq!(plan.control_plane().ipv6.to_string(), "fd77::2");
        assert_eq!(pod_cidrs(1), ("10.244.1.0/24".to_owned(), "fd44:1::/64".to_owned()));
        assert_eq!((zone(1), zone(3), zone(4)), ("zone-a".into(), "zone-c".into(), "zone-a".into()));
    }

    #[test]
    fn an_unknown_host_is_refused_with_the_names_there_are() {
        let error = plan(1, 0).find("node7").unwrap_err().to_string();
        assert!(error.contains("cp, node1, client1, client2"), "{error}");
        assert!(plan(1, 1).find_node("edge1").is_err());
    }

    #[test]
    fn cloud_takes_the_place_of_edge_hosts() {
        let in_cloud = |edges| Plan { cloud: Some(Cloud::Aws), ..plan(2, edges) };
        in_cloud(0).check().unwrap();
        assert!(in_cloud(1).check().unwrap_err().to_string().contains("--edges"));
    }

    #[test]
    fn load_balancers_of_openstack_have_a_host_on_the_node_segment() {
        let plan = Plan { cloud: Some(Cloud::OpenStack), ..plan(2, 0) };
        let amphora = plan.find("amphora").unwrap();
        assert_eq!((amphora.ipv4.to_string().as_str(), amphora.bridge()), ("10.77.3.1", "nodes"));
        let aws = Plan { cloud: Some(Cloud::Aws), ..plan };
        assert_eq!(aws.amphora(), None);
    }

    #[test]
    fn names_can_not_be_taken_for_another_labs() {
        for good in ["lab", "a", "lab2"] {
            check_name(good).unwrap();
        }
        for bad in ["", "lab-2", "2lab", "Lab", "a/b", "averyverylongname"] {
            check_name(bad).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn no_two_hosts_share_anything(workers in 1..=MOST, edges in 0..=MOST) {
            let plan = plan(workers, edges);
            plan.check().unwrap();
            let hosts = plan.hosts();
            let distinct = |key: fn(&Host) -> String| hosts.iter().map(key).collect::<BTreeSet<_>>().len();
            prop_assert_eq!(distinct(|h| h.netns.clone()), hosts.len());
            prop_assert_eq!(distinct(|h| h.ipv4.to_string()), hosts.len());
            prop_assert_eq!(distinct(|h| h.ipv6.to_string()), hosts.len());
            prop_assert_eq!(distinct(Host::mac), hosts.len());
        }
    }
}
