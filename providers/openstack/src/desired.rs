// SPDX-License-Identifier: Apache-2.0
//! The load balancer in Octavia that a planned one needs. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};
use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{
    Error, GroupKey, HealthCheck, HealthProtocol, Listener, LoadBalancer, TargetGroup, TargetSet,
};
use steerage_provider_cloud::annotation::conflict;
use steerage_provider_cloud::names;

use crate::config::{Config, Driver};
use crate::marks::{self, PoolPorts};
use crate::node_rules::MAX_RULES;
use crate::options::Options;
use crate::sources::{allowed, nobody, requested_sources};
use crate::types::{Check, Limits, Member, Persistence, Provisioning};
use crate::vips::{WantedVip, vips};
use crate::{annotations, peers, reasons, shared};

/// Octavia's largest weight.
const MAX_WEIGHT: u32 = 256;

/// Which address clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WantedAddress {
    /// The VIP itself.
    Internal,
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
    /// The name under which Services share the load balancer.
    pub(crate) shared: Option<String>,
    pub(crate) provider: String,
    /// The Service's families; the first one is that of members, except of OVN's.
    pub(crate) families: Vec<Family>,
    /// The first one cannot be left out.
    pub(crate) vips: Vec<WantedVip>,
    /// The network whose subnets VIPs are of, if the Service names one.
    pub(crate) network: Option<String>,
    pub(crate) flavor: Option<String>,
    pub(crate) availability_zone: Option<String>,
    /// The load balancer of another controller that the Service names.
    pub(crate) adopts: Option<String>,
    /// Whether the Service names the subnet itself.
    pub(crate) is_subnet_requested: bool,
    pub(crate) address: WantedAddress,
    /// Whether the Service itself asks for no floating IP, or for one of a network. Otherwise a flag does, and a present one stays.
    pub(crate) is_address_requested: bool,
    pub(crate) has_proxy_protocol: bool,
    /// Who may connect; empty admits everybody.
    pub(crate) sources: Vec<IpNet>,
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
    /// Whether its check port is the Service's, and not that of the nodes' proxy.
    pub(crate) is_own_check: bool,
    /// Whether it stays when its members' checks move to another port. Otherwise another pool takes its place.
    pub(crate) keeps_pool: bool,
    pub(crate) members: Members,
}

/// Members by address and port.
pub(crate) type Members = BTreeMap<(IpAddr, u16), Member>;

/// The nodes of members, by address.
pub(crate) type Nodes = BTreeMap<IpAddr, String>;

/// What a planned load balancer needs.
pub(crate) fn desired(lb: &LoadBalancer, config: &Config) -> Result<Desired, Error> {
    match shared::merged(config, lb)? {
        Some((name, merged)) => own(&merged, config, Some(name)),
        None => own(lb, config, None),
    }
}

/// The same with the annotations as they are, at the load balancer that is shared under this name.
pub(crate) fn own(lb: &LoadBalancer, config: &Config, shared: Option<String>) -> Result<Desired, Error> {
    peers::check(&lb.annotations)?;
    let options = Options::read(&lb.annotations, config)?;
    let sources = requested_sources(&lb.source_ranges, &lb.annotations)?;
    check_supported(lb, &sources, config, shared.is_some())?;
    let driver = config.driver();
    let of_whole = match &shared {
        Some(_) => {
            LoadBalancer { families: shared::families(config, options.network.is_some()), ..lb.clone() }
        }
        None => lb.clone(),
    };
    if let Some(shared) = &shared {
        shared::check_families(shared, &lb.families, &of_whole.families)?;
    }
    let mut vips = vips(&of_whole, &options, config);
    let address = address(lb, &mut vips, &options, config)?;
    // A proxy reaches members of one family for clients of both. OVN translates addresses within a family.
    let reached = if driver == Driver::Ovn { lb.families.len() } else { 1 };
    let with_vips = lb.families.iter().filter_map(|family| {
        let vip = vips.iter().find(|vip| vip.family == *family)?;
        Some((*family, vip.member_subnet.as_str()))
    });
    let reached: Vec<(Family, &str)> = with_vips.take(reached).collect();
    let service = &lb.owner.service;
    let name = |parts: &[&str]| names::resource(&config.cluster, service, parts);
    let part_tags = match &shared {
        Some(_) => marks::of_balancer(&config.cluster, &lb.owner),
        None => marks::of_part(&lb.owner),
    };
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
            tags: marks::of_pool(&part_tags, ports),
            monitor_name: name(&["monitor", parts[0], parts[1], parts[2]]),
            check: check(&group.health_check, listener.protocol, driver),
            is_own_check: group.health_check.is_of_service,
            keeps_pool: false,
            members: members(&nodes, ports, &reached, driver, &mut refused),
        };
        listeners.push(WantedListener {
            name: name(&["listener", protocol, &port]),
            protocol,
            port: listener.port,
            allowed_cidrs: if driver == Driver::Ovn {
                Vec::new()
            } else {
                allowed(&sources, &of_whole.families)
            },
            limits: options.limits.clone(),
            pool,
        });
    }
    let has_v4 = vips.iter().any(|vip| vip.family == Family::V4);
    let is_address_requested = requests_address(&address, &options, has_v4 || shared.is_some());
    Ok(Desired {
        name: match &shared {
            Some(shared) => {
                names::resource(&config.cluster, &Key::new("", shared), &["shared-load-balancer"])
            }
            None => name(&["load-balancer"]),
        },
        tags: match &shared {
            Some(shared) => marks::of_shared(&config.cluster, shared),
            None => marks::of_balancer(&config.cluster, &lb.owner),
        },
        shared,
        provider: config.provider.clone(),
        network: options.network.clone(),
        flavor: options.flavor.clone(),
        availability_zone: options.availability_zone.clone(),
        adopts: options.load_balancer.clone(),
        families: lb.families.clone(),
        vips,
        is_subnet_requested: lb.annotations.contains_key(annotations::SUBNET),
        address,
        is_address_requested,
        has_proxy_protocol: options.proxy_protocol.is_some(),
        sources: if driver == Driver::Ovn { sources } else { Vec::new() },
        listeners,
        part_tags,
        refused: refused.into_iter().collect(),
    })
}

/// Whether the Service itself decides about the floating IP. A load balancer that `keeps_address`, such as a shared one, gives it up only
/// if its annotations, or the operator's file, say so.
fn requests_address(address: &WantedAddress, options: &Options, keeps_address: bool) -> bool {
    match address {
        WantedAddress::Internal => options.internal == Some(true) || !keeps_address,
        WantedAddress::Floating { .. } => options.floating_network.is_some(),
        WantedAddress::Given(_) => true,
    }
}

/// Refuses what OpenStack, or its provider driver, does not have.
fn check_supported(
    lb: &LoadBalancer,
    sources: &[IpNet],
    config: &Config,
    is_shared: bool,
) -> Result<(), Error> {
    if let Some(pool) = &lb.pool {
        let message = format!(
            "The Service names the AddressPool {pool}, and OpenStack has none. No load balancer is created or changed. Remove \
             steerage.dev/address-pool."
        );
        return Err(Error::invalid(reasons::ADDRESS_POOL_NOT_SUPPORTED, message));
    }
    if config.driver() == Driver::Ovn && !sources.is_empty() && config.security_group.is_none() {
        let message = "The Service limits its clients. The Octavia provider ovn has no source ranges, and Steerage does not know the security \
                       group of the nodes whose rules would restrict clients. No load balancer is created or changed. Set \
                       --openstack-node-security-group-id, remove the ranges, or use the Octavia provider amphora.";
        return Err(Error::invalid(reasons::NO_SECURITY_GROUP, message));
    }
    check_rules(lb, sources, config, is_shared)
}

/// Refuses a Service that needs too many rules of its own in the nodes' security group: their quota is that of the whole project.
fn check_rules(lb: &LoadBalancer, sources: &[IpNet], config: &Config, is_shared: bool) -> Result<(), Error> {
    if config.security_group.is_none() {
        return Ok(());
    }
    let families = lb.families.len().max(1);
    let of_port = match config.driver() {
        Driver::Ovn if sources.is_empty() => families,
        // Members are checked from their subnets.
        Driver::Ovn => sources.len() + families,
        // Its port and that of checks.
        Driver::Amphora if lb.annotations.contains_key(annotations::MEMBER_SUBNET) && !is_shared => 2,
        Driver::Amphora => 0,
    };
    let count = of_port.saturating_mul(lb.listeners.len());
    if count <= MAX_RULES {
        return Ok(());
    }
    let message = format!(
        "The Service needs up to {count} rules of the nodes' security group, and Steerage makes at most {MAX_RULES} for one Service. No load \
         balancer is created or changed. Use fewer ports or source ranges, or split the Service."
    );
    Err(Error::invalid(reasons::TOO_MANY_SECURITY_GROUP_RULES, message))
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

/// Which address clients of IPv4 connect to. Requested addresses that are VIPs are noted.
fn address(
    lb: &LoadBalancer,
    vips: &mut [WantedVip],
    options: &Options,
    config: &Config,
) -> Result<WantedAddress, Error> {
    let network = options.floating_network.clone().or_else(|| config.floating_network.clone());
    // Floating IPs translate IPv4.
    let has_v4 = vips.iter().any(|vip| vip.family == Family::V4);
    let is_internal = options.internal.unwrap_or(network.is_none() || !has_v4);
    if !is_internal && !has_v4 {
        let message = "The Service requests a floating IP, and OpenStack has none for IPv6. No load balancer is created or changed. Remove \
                       the annotation: an address of an IPv6 subnet needs no floating IP.";
        return Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message));
    }
    let mut given = None;
    for requested in lb.requested_addresses.iter().copied() {
        let family = Family::of(requested);
        let Some(vip) = vips.iter_mut().find(|vip| vip.family == family) else {
            let problem =
                format!("The Service requests the address {requested}, which is not of its IP families.");
            return Err(conflict(&problem, "Request an address of the family."));
        };
        let is_floating = family == Family::V4 && !is_internal;
        let place = if is_floating { &mut given } else { &mut vip.requested };
        if place.replace(requested).is_some() {
            let problem =
                format!("The Service requests several {family} addresses, and a load balancer has one.");
            return Err(conflict(&problem, "Request one."));
        }
    }
    match (is_internal, given) {
        (true, _) => Ok(WantedAddress::Internal),
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

/// The members for these nodes, of each of the families, through its subnet. Nodes without an address of a family are refused.
pub(crate) fn members(
    nodes: &TargetSet,
    ports: PoolPorts,
    reached: &[(Family, &str)],
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
    let pairs = nodes.targets.iter().flat_map(|target| reached.iter().map(move |of| (target, of)));
    for (target, (family, subnet)) in pairs {
        let Some(address) = target.addresses.iter().copied().find(|ip| Family::of(*ip) == *family) else {
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
            subnet_id: Some((*subnet).to_owned()),
            backup: false,
            admin_state_up: true,
            provisioning_status: Provisioning::Active,
        };
        members.insert(member.key(), member);
    }
    members
}

impl Desired {
    /// What of it a load balancer with VIPs of these families can have: Octavia adds none to one that exists.
    #[must_use]
    pub(crate) fn for_families(mut self, families: &[Family]) -> Self {
        if families.len() < 2 {
            for listener in &mut self.listeners {
                let is_there = |range: &String| {
                    range.parse::<IpNet>().is_ok_and(|range| families.contains(&Family::of(range.addr())))
                };
                if !listener.allowed_cidrs.is_empty() {
                    listener.allowed_cidrs.retain(is_there);
                    if listener.allowed_cidrs.is_empty() {
                        listener
                            .allowed_cidrs
                            .push(nobody(families.first().copied().unwrap_or(Family::V4)).to_owned());
                    }
                }
            }
            if self.provider == crate::config::OVN {
                return self.without(|address| !families.contains(&Family::of(*address)));
            }
        }
        self
    }

    /// The same in the pools that are there, if the project has no quota for others.
    #[must_use]
    pub(crate) fn keeping_pools(mut self, is_at_quota: bool) -> Self {
        for listener in &mut self.listeners {
            listener.pool.keeps_pool = is_at_quota;
        }
        self
    }

    /// Without the members for which `is_refused` is true.
    #[must_use]
    pub(crate) fn without(mut self, is_refused: impl Fn(&IpAddr) -> bool) -> Self {
        for listener in &mut self.listeners {
            listener.pool.members.retain(|(address, _), _| !is_refused(address));
        }
        self
    }

    /// Whether clients know a VIP: the first one if it is internal, and that of IPv6, which no floating IP translates to.
    pub(crate) fn publishes_vip(&self) -> bool {
        self.address == WantedAddress::Internal || self.vips.iter().any(|vip| vip.family == Family::V6)
    }

    /// The nodes of the members.
    pub(crate) fn nodes(&self) -> Nodes {
        let members = self.listeners.iter().flat_map(|listener| listener.pool.members.values());
        members.map(|member| (member.address, member.name.clone())).collect()
    }

    /// One request for the whole load balancer.
    ///
    /// `vips` are their subnets and addresses.
    pub(crate) fn creation(&self, vips: &[(&str, Option<IpAddr>)]) -> Value {
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
            "tags": self.tags,
            "admin_state_up": true,
            "listeners": listeners,
        });
        for (name, value) in [("flavor_id", &self.flavor), ("availability_zone", &self.availability_zone)] {
            if let Some(value) = value {
                body[name] = value.as_str().into();
            }
        }
        if let Some((subnet, address)) = vips.first() {
            body["vip_subnet_id"] = (*subnet).into();
            if let Some(address) = address {
                body["vip_address"] = address.to_string().into();
            }
        }
        let more = vips.iter().skip(1).map(|(subnet, address)| match address {
            Some(address) => json!({ "subnet_id": subnet, "ip_address": address }),
            None => json!({ "subnet_id": subnet }),
        });
        let more: Vec<Value> = more.collect();
        if !more.is_empty() {
            body["additional_vips"] = more.into();
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
