// SPDX-License-Identifier: Apache-2.0
//! The load balancer in Octavia that a planned one needs. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};
use steerage_model::{Family, Protocol};
use steerage_provider_api::{
    Error, GroupKey, HealthCheck, HealthProtocol, Listener, LoadBalancer, TargetGroup, TargetSet,
};
use steerage_provider_cloud::names;

use crate::config::{Config, Driver};
use crate::marks::{self, PoolPorts};
use crate::options::{Options, lacks};
use crate::types::{Check, Limits, Member, Persistence, Provisioning};
use crate::{annotations, peers, reasons};

/// Octavia's largest weight.
const MAX_WEIGHT: u32 = 256;

/// Which address clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WantedAddress {
    /// The VIP itself, this one if given.
    Internal(Option<IpAddr>),
    /// A floating IP that Steerage creates and deletes.
    Floating { network: String, subnet: Option<String> },
    /// A floating IP of the user.
    Given(IpAddr),
}

/// A load balancer as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Desired {
    pub(crate) name: String,
    pub(crate) tags: Vec<String>,
    pub(crate) provider: String,
    pub(crate) family: Family,
    pub(crate) subnet: String,
    /// The nodes' subnet.
    pub(crate) member_subnet: String,
    /// Whether the Service names the subnet itself.
    pub(crate) is_subnet_requested: bool,
    pub(crate) address: WantedAddress,
    /// Whether the Service itself asks for no floating IP, or for one of a network. Otherwise a flag does, and a present one stays.
    pub(crate) is_address_requested: bool,
    pub(crate) has_proxy_protocol: bool,
    pub(crate) listeners: Vec<WantedListener>,
    /// Tags of listeners and monitors.
    pub(crate) part_tags: Vec<String>,
    /// Nodes that cannot be members, with the reason.
    pub(crate) refused: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedListener {
    pub(crate) name: String,
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    /// Sorted; empty admits everybody.
    pub(crate) allowed_cidrs: Vec<String>,
    pub(crate) limits: Option<Limits>,
    pub(crate) pool: WantedPool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedPool {
    /// Depends on what cannot change in place.
    pub(crate) name: String,
    pub(crate) protocol: &'static str,
    pub(crate) algorithm: &'static str,
    pub(crate) persistence: Option<Persistence>,
    pub(crate) tags: Vec<String>,
    pub(crate) monitor_name: String,
    pub(crate) check: Check,
    pub(crate) members: Members,
}

/// Members by address and port.
pub(crate) type Members = BTreeMap<(IpAddr, u16), Member>;

/// The nodes of members, by address.
pub(crate) type Nodes = BTreeMap<IpAddr, String>;

/// What a planned load balancer needs.
pub(crate) fn desired(lb: &LoadBalancer, config: &Config) -> Result<Desired, Error> {
    peers::check(&lb.annotations)?;
    let options = Options::read(&lb.annotations, config)?;
    if let Some(pool) = &lb.pool {
        let message = format!(
            "The Service names the AddressPool {pool}, and OpenStack has none. No load balancer is created or changed. Remove \
             steerage.dev/address-pool."
        );
        return Err(Error::invalid(reasons::ADDRESS_POOL_NOT_SUPPORTED, message));
    }
    let &[family] = lb.families.as_slice() else {
        let message = "The Service has two IP families, and a load balancer of OpenStack has one. No load balancer is created or changed. \
                       Set spec.ipFamilyPolicy to SingleStack.";
        return Err(Error::invalid(reasons::DUAL_STACK_NOT_SUPPORTED, message));
    };
    let driver = config.driver();
    if driver == Driver::Ovn && !lb.source_ranges.is_empty() {
        return Err(lacks("source ranges", "spec.loadBalancerSourceRanges"));
    }
    let service = &lb.owner.service;
    let name = |parts: &[&str]| names::resource(&config.cluster, service, parts);
    let mut refused = BTreeMap::new();
    let mut listeners = Vec::new();
    for listener in &lb.listeners {
        let Some((group, ports)) = group(lb, listener) else { continue };
        let ports = PoolPorts { check_port: ports.check_port.filter(|_| driver == Driver::Amphora), ..ports };
        let (protocol, port) = (protocol(listener.protocol), listener.port.to_string());
        let pool_protocol = match (listener.protocol, options.proxy_protocol) {
            (Protocol::Tcp, Some(version)) => version.as_str(),
            _ => protocol,
        };
        let affinity = group.affinity.as_ref().map(|affinity| Persistence {
            r#type: "SOURCE_IP".to_owned(),
            // Octavia takes a timeout only for UDP.
            persistence_timeout: (listener.protocol == Protocol::Udp).then_some(affinity.timeout.as_secs()),
        });
        let parts = [protocol, port.as_str(), pool_protocol];
        let nodes = group.nodes().cloned().unwrap_or_default();
        let pool = WantedPool {
            name: name(&["pool", parts[0], parts[1], parts[2]]),
            protocol: pool_protocol,
            algorithm: options.algorithm,
            persistence: affinity,
            tags: marks::of_pool(&lb.owner, ports),
            monitor_name: name(&["monitor", parts[0], parts[1], parts[2]]),
            check: check(&group.health_check, listener.protocol, driver),
            members: members(&nodes, ports, family, &options.member_subnet, driver, &mut refused),
        };
        listeners.push(WantedListener {
            name: name(&["listener", protocol, &port]),
            protocol,
            port: listener.port,
            allowed_cidrs: allowed(&lb.source_ranges, family),
            limits: options.limits.clone(),
            pool,
        });
    }
    let address = address(lb, family, &options, config)?;
    let is_address_requested = match &address {
        WantedAddress::Internal(_) => options.internal == Some(true) || family == Family::V6,
        WantedAddress::Floating { .. } => options.floating_network.is_some(),
        WantedAddress::Given(_) => true,
    };
    Ok(Desired {
        name: name(&["load-balancer"]),
        tags: marks::of_balancer(&config.cluster, &lb.owner),
        provider: config.provider.clone(),
        family,
        subnet: options.subnet.clone(),
        member_subnet: options.member_subnet.clone(),
        is_subnet_requested: lb.annotations.contains_key(annotations::SUBNET),
        address,
        is_address_requested,
        has_proxy_protocol: options.proxy_protocol.is_some(),
        listeners,
        part_tags: marks::of_part(&lb.owner),
        refused: refused.into_iter().collect(),
    })
}

/// The group of a listener, with its ports.
fn group<'a>(lb: &'a LoadBalancer, listener: &Listener) -> Option<(&'a TargetGroup, PoolPorts)> {
    let group = lb.group(&listener.group)?;
    match listener.group {
        GroupKey::NodePort(node_port) => {
            Some((group, PoolPorts { node_port, check_port: group.health_check.port }))
        }
        // The capabilities say so: the plan makes no other.
        GroupKey::Vip | GroupKey::Pods(_) => None,
    }
}

fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
        Protocol::Sctp => "SCTP",
    }
}

fn address(
    lb: &LoadBalancer,
    family: Family,
    options: &Options,
    config: &Config,
) -> Result<WantedAddress, Error> {
    let network = options.floating_network.clone().or_else(|| config.floating_network.clone());
    // Floating IPs translate IPv4.
    let is_internal = options.internal.unwrap_or(network.is_none() || family == Family::V6);
    let unavailable = |problem: &str, advice: &str| {
        let message = format!("{problem} No load balancer is created or changed. {advice}");
        Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message)
    };
    let requested = match lb.requested_addresses.as_slice() {
        [] => None,
        [one] if Family::of(*one) == family => Some(*one),
        [one] => {
            let problem = format!("The Service requests the address {one}, which is not of its IP family.");
            return Err(unavailable(&problem, "Request an address of the family."));
        }
        _ => {
            let problem = "The Service requests several addresses, and a load balancer has one.";
            return Err(unavailable(problem, "Request one."));
        }
    };
    match (is_internal, requested) {
        (true, requested) => Ok(WantedAddress::Internal(requested)),
        (false, _) if family == Family::V6 => Err(unavailable(
            "The Service requests a floating IP, and OpenStack has none for IPv6.",
            "Remove the annotation: an address of an IPv6 subnet needs no floating IP.",
        )),
        (false, Some(given)) => Ok(WantedAddress::Given(given)),
        (false, None) => {
            let network = network.ok_or_else(|| {
                let name = annotations::FLOATING_NETWORK;
                let message = format!(
                    "The Service needs a floating IP, and no external network is known. No load balancer is created or changed. Set \
                     --openstack-floating-network-id, or the annotation {name}."
                );
                Error::invalid(reasons::NO_FLOATING_NETWORK, message)
            })?;
            Ok(WantedAddress::Floating { network, subnet: options.floating_subnet.clone() })
        }
    }
}

/// What admits nobody: an empty list admits everybody.
fn nobody(family: Family) -> &'static str {
    match family {
        Family::V4 => "0.0.0.0/32",
        Family::V6 => "::/128",
    }
}

/// Source ranges of the VIP's family, which are all that Octavia takes. If none is left, nobody is admitted.
pub(crate) fn allowed<'a>(ranges: impl IntoIterator<Item = &'a IpNet>, family: Family) -> Vec<String> {
    let mut is_restricted = false;
    let mut allowed = BTreeSet::new();
    for range in ranges {
        is_restricted = true;
        if Family::of(range.addr()) == family {
            allowed.insert(range.trunc().to_string());
        }
    }
    if is_restricted && allowed.is_empty() {
        allowed.insert(nobody(family).to_owned());
    }
    allowed.into_iter().collect()
}

/// Whether a listener's range admits nobody.
pub(crate) fn is_nobody(range: &str) -> bool {
    [Family::V4, Family::V6].into_iter().any(|family| nobody(family) == range)
}

/// The health monitor.
fn check(check: &HealthCheck, protocol: Protocol, driver: Driver) -> Check {
    let delay = check.interval.as_secs().max(2);
    let base = Check {
        r#type: String::new(),
        delay,
        // Octavia counts in seconds, and a check must end before the next one begins.
        timeout: check.timeout.as_secs().clamp(1, delay - 1),
        max_retries: check.healthy_threshold.clamp(1, 10),
        max_retries_down: check.unhealthy_threshold.clamp(1, 10),
        http_method: None,
        url_path: None,
        expected_codes: None,
    };
    let of = |kind: &str| Check { r#type: kind.to_owned(), ..base.clone() };
    match (driver, &check.protocol, protocol) {
        // OVN checks the port on which members receive packets.
        (Driver::Ovn, _, Protocol::Udp) => of("UDP-CONNECT"),
        // So does any other driver, if no other port is named.
        (Driver::Amphora, HealthProtocol::Tcp, Protocol::Udp) if check.port.is_none() => of("UDP-CONNECT"),
        (Driver::Ovn, ..) | (Driver::Amphora, HealthProtocol::Tcp, _) => of("TCP"),
        (Driver::Amphora, HealthProtocol::Http { path }, _) => Check {
            http_method: Some("GET".to_owned()),
            url_path: Some(path.clone()),
            expected_codes: Some("200".to_owned()),
            ..of("HTTP")
        },
    }
}

/// The members for these nodes. Those without an address of the family are refused.
pub(crate) fn members(
    nodes: &TargetSet,
    ports: PoolPorts,
    family: Family,
    subnet: &str,
    driver: Driver,
    refused: &mut BTreeMap<String, String>,
) -> Members {
    let heaviest = nodes.targets.iter().map(|target| target.weight).max().unwrap_or(1).max(1);
    let weight = |of: u32| match driver {
        Driver::Ovn => 1,
        Driver::Amphora if heaviest <= MAX_WEIGHT => of.max(1),
        Driver::Amphora => {
            let scaled = u64::from(of) * u64::from(MAX_WEIGHT) / u64::from(heaviest);
            u32::try_from(scaled).unwrap_or(MAX_WEIGHT).clamp(1, MAX_WEIGHT)
        }
    };
    let mut members = Members::new();
    for target in &*nodes.targets {
        let Some(address) = target.addresses.iter().copied().find(|ip| Family::of(*ip) == family) else {
            let why = format!(
                "the node has no internal {family} address; set one, or let the cloud controller manager set it"
            );
            refused.insert(target.node.clone(), why);
            continue;
        };
        let member = Member {
            address,
            protocol_port: ports.node_port,
            name: target.node.clone(),
            weight: weight(target.weight),
            monitor_port: ports.check_port,
            subnet_id: Some(subnet.to_owned()),
            backup: false,
            admin_state_up: true,
            provisioning_status: Provisioning::Active,
        };
        members.insert(member.key(), member);
    }
    members
}

impl Desired {
    /// Without the members for which `is_refused` is true.
    #[must_use]
    pub(crate) fn without(mut self, is_refused: impl Fn(&IpAddr) -> bool) -> Self {
        for listener in &mut self.listeners {
            listener.pool.members.retain(|(address, _), _| !is_refused(address));
        }
        self
    }

    /// The nodes of the members.
    pub(crate) fn nodes(&self) -> Nodes {
        let members = self.listeners.iter().flat_map(|listener| listener.pool.members.values());
        members.map(|member| (member.address, member.name.clone())).collect()
    }

    /// One request for the whole load balancer.
    pub(crate) fn creation(&self, vip: Option<IpAddr>) -> Value {
        let listeners: Vec<Value> = self
            .listeners
            .iter()
            .map(|listener| {
                let mut pool = listener.pool.body();
                pool["members"] = listener.pool.members.values().map(Member::body).collect();
                pool["healthmonitor"] = listener.pool.monitor_body(&self.part_tags);
                let mut body = listener.body(&self.part_tags);
                body["default_pool"] = pool;
                body
            })
            .collect();
        let mut body = json!({
            "name": self.name,
            "provider": self.provider,
            "vip_subnet_id": self.subnet,
            "tags": self.tags,
            "admin_state_up": true,
            "listeners": listeners,
        });
        if let Some(vip) = vip {
            body["vip_address"] = vip.to_string().into();
        }
        json!({ "loadbalancer": body })
    }
}

impl WantedListener {
    /// Without its pool.
    pub(crate) fn body(&self, tags: &[String]) -> Value {
        let mut body = json!({
            "name": self.name,
            "protocol": self.protocol,
            "protocol_port": self.port,
            "admin_state_up": true,
            "tags": tags,
        });
        if !self.allowed_cidrs.is_empty() {
            body["allowed_cidrs"] = self.allowed_cidrs.clone().into();
        }
        if let Some(limits) = &self.limits {
            set_limits(&mut body, limits);
        }
        body
    }
}

/// Adds the fields that have a value.
pub(crate) fn set_limits(body: &mut Value, limits: &Limits) {
    for (name, value) in [
        ("connection_limit", limits.connection_limit),
        ("timeout_client_data", limits.timeout_client_data),
        ("timeout_member_connect", limits.timeout_member_connect),
        ("timeout_member_data", limits.timeout_member_data),
        ("timeout_tcp_inspect", limits.timeout_tcp_inspect),
    ] {
        if let Some(value) = value {
            body[name] = value.into();
        }
    }
}

impl WantedPool {
    /// Without members and monitor.
    pub(crate) fn body(&self) -> Value {
        let mut body = json!({
            "name": self.name,
            "protocol": self.protocol,
            "lb_algorithm": self.algorithm,
            "admin_state_up": true,
            "tags": self.tags,
        });
        if let Some(persistence) = &self.persistence {
            body["session_persistence"] = persistence.body();
        }
        body
    }

    pub(crate) fn monitor_body(&self, tags: &[String]) -> Value {
        let mut body = serde_json::to_value(&self.check).unwrap_or_default();
        body["name"] = self.monitor_name.clone().into();
        body["admin_state_up"] = true.into();
        body["tags"] = tags.into();
        body
    }
}

#[cfg(test)]
pub(crate) mod tests;
