// SPDX-License-Identifier: Apache-2.0
//! What Azure's API says about Standard load balancers: rules with floating IP, pools by address, probes, public IPs, and the rules of
//! network security groups.
//!
//! [`Answers`] is what was read, and the rest is pure. As Azure documents: without a healthy target no new flow is forwarded. Probes are
//! addressed to the target. Flows over TCP stay with a target whose probe fails, those over UDP do not. What becomes of the flows of a
//! target that leaves its pool is not documented: here they end, which is the worse case for clients.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Result, ensure};
use ipnet::IpNet;
use serde_json::{Value, json};
use steerage_nlb::cloud::{Attributes, Check, Group, Transport};
use steerage_nlb::probe::Prober;
use steerage_testclouds::StandIn;

use crate::args::Node;
use crate::cloud::{Affinity, Cloud, Filter, Pool, Rule, range};
use crate::gce::{each, net, number, strings, text};

/// How Azure's probers call themselves.
pub const PROBER: Prober = Prober { agent: "Load Balancer Agent", source: None, mark: 0 };
/// The addresses of probers.
pub const PROBERS: [&str; 2] = ["168.63.129.16", "fe80::1234:5678:9abc"];
/// The virtual network of the nodes.
pub const NETWORK: &str = "lab";
/// The subnet of the nodes, and of internal load balancers.
pub const SUBNET: &str = "nodes";
/// Its ranges.
const SUBNET_RANGES: [&str; 2] = ["10.77.0.0/16", "fd77::/64"];
/// The clients' network, which is a peer of the nodes': it belongs to the service tag `VirtualNetwork`.
const PEER_RANGES: [&str; 2] = ["10.78.0.0/16", "fd78::/64"];
const VERSION: &str = "2025-05-01";
/// Probes of the API have no time-out.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What the API answered: resources as they are.
#[derive(Debug, Default)]
pub struct Answers {
    /// `loadBalancers`
    pub balancers: Vec<Value>,
    /// `publicIPAddresses`
    pub public_ips: Vec<Value>,
    /// `networkSecurityGroups`
    pub security_groups: Vec<Value>,
}

impl Answers {
    /// Reads everything.
    pub fn read(api: &StandIn) -> Result<Self> {
        Ok(Self {
            balancers: items(api, "loadBalancers")?,
            public_ips: items(api, "publicIPAddresses")?,
            security_groups: items(api, "networkSecurityGroups")?,
        })
    }

    /// The values.
    pub fn cloud(&self) -> Cloud {
        let mut cloud = Cloud { filters: self.filters(), ..Cloud::default() };
        for balancer in self.balancers.iter().map(|balancer| &balancer["properties"]) {
            for rule in each(balancer, "loadBalancingRules").map(|rule| &rule["properties"]) {
                for transport in transports(text(rule, "protocol")) {
                    if let Some((rule, pool)) = self.rule(balancer, rule, transport) {
                        cloud.pools.insert(rule.pool.clone(), pool);
                        cloud.rules.push(rule);
                    }
                }
            }
        }
        cloud
    }

    /// A rule and its pool. Without floating IP, nothing is forwarded: packets would have to be changed.
    fn rule(&self, balancer: &Value, rule: &Value, transport: Transport) -> Option<(Rule, Pool)> {
        let id = |field: &str| text(&rule[field], "id").to_lowercase();
        let part = |collection: &str, id: &str| {
            each(balancer, collection).find(|part| text(part, "id").eq_ignore_ascii_case(id))
        };
        if rule["enableFloatingIP"] != true {
            return None;
        }
        let front = &part("frontendIPConfigurations", &id("frontendIPConfiguration"))?["properties"];
        let vip = self.address(front)?;
        let probe = part("probes", &id("probe"))?;
        let port = u16::try_from(number(&rule["frontendPort"])?).ok()?;
        let mut pools = vec![id("backendAddressPool")];
        pools.extend(each(rule, "backendAddressPools").map(|pool| text(pool, "id").to_lowercase()));
        pools.dedup();
        let mut targets = BTreeMap::new();
        for pool in pools.iter().filter_map(|pool| part("backendAddressPools", pool)) {
            for address in each(&pool["properties"], "loadBalancerBackendAddresses") {
                let address: IpAddr = text(&address["properties"], "ipAddress").parse().ok()?;
                if address.is_ipv4() == vip.is_ipv4() {
                    targets.insert(address.to_string(), SocketAddr::new(address, 0));
                }
            }
        }
        let is_kept = transport == Transport::Tcp;
        let group = Group {
            check: health_check(&probe["properties"])?,
            attributes: Attributes {
                keeps_client_address: true,
                is_sticky: false,
                deregistration_delay: Duration::ZERO,
                ends_flows_after_delay: true,
                unhealthy_flows_end_after: (!is_kept).then_some(Duration::ZERO),
            },
            targets,
        };
        let prober = PROBERS[usize::from(vip.is_ipv6())].parse().ok()?;
        let affinity = match text(rule, "loadDistribution") {
            "SourceIP" | "SourceIPProtocol" => Affinity::Client,
            _ => Affinity::Flow,
        };
        // Probes are of a pool, not of a rule.
        let name = format!("{}|{}|{}", pools.join("+"), id("probe"), transport.as_str());
        let rule = Rule {
            vip,
            transport,
            ports: vec![port..=port],
            pool: name,
            affinity,
            is_weighted: false,
            fails_open: false,
        };
        Some((rule, Pool { group, checked_at: None, prober }))
    }

    /// The address of a frontend.
    fn address(&self, front: &Value) -> Option<IpAddr> {
        let public = text(&front["publicIPAddress"], "id");
        if public.is_empty() {
            return text(front, "privateIPAddress").parse().ok();
        }
        let found = self.public_ips.iter().find(|ip| text(ip, "id").eq_ignore_ascii_case(public));
        text(&found?["properties"], "ipAddress").parse().ok()
    }

    /// The rules of all groups for inbound packets, in the order of their priorities, with those that every group has at its end.
    fn filters(&self) -> Vec<Filter> {
        let groups = self.security_groups.iter().map(|group| &group["properties"]);
        let rules = groups.flat_map(|group| {
            each(group, "securityRules")
                .chain(each(group, "defaultSecurityRules"))
                .map(|rule| &rule["properties"])
        });
        let mut rules: Vec<_> = rules.filter(|rule| rule["direction"] == "Inbound").collect();
        rules.sort_by_key(|rule| number(&rule["priority"]));
        rules.into_iter().filter_map(filter).collect()
    }
}

/// Makes the network of the nodes. The group of the nodes' subnet is the stand-in's.
pub fn seed(api: &StandIn, _nodes: &[Node]) -> Result<()> {
    let group = json!({ "id": api.azure_id("networkSecurityGroups/nodes") });
    let subnet = json!({ "addressPrefixes": SUBNET_RANGES, "networkSecurityGroup": group });
    let properties = json!({
        "addressSpace": { "addressPrefixes": SUBNET_RANGES },
        "subnets": [{ "name": SUBNET, "properties": subnet }],
    });
    api.add_resource("virtualNetworks", NETWORK, &properties)
}

fn transports(protocol: &str) -> Vec<Transport> {
    match protocol.to_ascii_lowercase().as_str() {
        "tcp" => vec![Transport::Tcp],
        "udp" => vec![Transport::Udp],
        "all" => vec![Transport::Tcp, Transport::Udp],
        _ => Vec::new(),
    }
}

fn health_check(probe: &Value) -> Option<Check> {
    let path = probe["requestPath"].as_str().map(str::to_owned);
    let threshold = number(&probe["probeThreshold"]).and_then(|count| u32::try_from(count).ok());
    let threshold = threshold.filter(|count| *count > 0).unwrap_or(1);
    Some(Check {
        path,
        port: Some(u16::try_from(number(&probe["port"])?).ok()?),
        interval: Duration::from_secs(number(&probe["intervalInSeconds"]).unwrap_or(15)),
        timeout: TIMEOUT,
        healthy_threshold: threshold,
        unhealthy_threshold: threshold,
    })
}

/// `None` if the rule can match no packet of the lab, such as one for an unknown service tag.
fn filter(rule: &Value) -> Option<Filter> {
    let transport = match text(rule, "protocol").to_ascii_lowercase().as_str() {
        "*" => None,
        other => Some(*transports(other).first()?),
    };
    let ports = all(rule, "destinationPortRange", "destinationPortRanges");
    let ports: Option<Vec<RangeInclusive<u16>>> = if ports.contains(&"*") {
        Some(Vec::new())
    } else {
        let ranges: Vec<_> = ports.into_iter().filter_map(range).collect();
        (!ranges.is_empty()).then_some(ranges)
    };
    Some(Filter {
        allows: rule["access"] == "Allow",
        sources: prefixes(&all(rule, "sourceAddressPrefix", "sourceAddressPrefixes"))?,
        destinations: prefixes(&all(rule, "destinationAddressPrefix", "destinationAddressPrefixes"))?,
        transport,
        ports: ports?,
    })
}

fn all<'a>(rule: &'a Value, one: &str, many: &str) -> Vec<&'a str> {
    rule[one].as_str().into_iter().chain(strings(rule, many)).collect()
}

/// Ranges and service tags as ranges; none if they are everything.
fn prefixes(texts: &[&str]) -> Option<Vec<IpNet>> {
    let mut nets = Vec::new();
    for text in texts {
        match *text {
            "*" | "Internet" => return Some(Vec::new()),
            "VirtualNetwork" => nets.extend(SUBNET_RANGES.into_iter().chain(PEER_RANGES).filter_map(net)),
            "AzureLoadBalancer" => nets.extend(PROBERS.into_iter().filter_map(net)),
            other => nets.extend(net(other)),
        }
    }
    (!nets.is_empty()).then_some(nets)
}

/// All items of a list.
fn items(api: &StandIn, kind: &str) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    let mut path = format!("{}?api-version={VERSION}", api.azure_id(kind));
    loop {
        let (status, answer) = api.send("GET", &path, &[], None)?;
        ensure!(status == 200, "GET {path}: {status} {answer}");
        found.extend(each(&answer, "value").cloned());
        match answer["nextLink"].as_str().and_then(|link| link.split_once("/subscriptions")) {
            Some((_, rest)) => path = format!("/subscriptions{rest}"),
            None => return Ok(found),
        }
    }
}

#[cfg(test)]
mod tests;
