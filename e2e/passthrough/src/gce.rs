// SPDX-License-Identifier: Apache-2.0
//! What Compute Engine's API says about passthrough network load balancers: forwarding rules, regional backend services, the endpoints of
//! zonal groups, health checks and firewall rules.
//!
//! [`Answers`] is what was read, and the rest is pure. As Google documents: a rule without a healthy target sends to all. Checks are
//! addressed to the VIP. Connections over TCP stay with a target that fails its checks, those over UDP do not. A detached endpoint keeps its
//! connections for the draining time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use serde_json::{Value, json};
use steerage_nlb::cloud::{Attributes, Check, Group, Transport};
use steerage_nlb::probe::Prober;
use steerage_testclouds::StandIn;

use crate::args::Node;
use crate::cloud::{Affinity, Cloud, Filter, Pool, Rule, range};

/// How Google's probers call themselves.
pub const PROBER: Prober = Prober { agent: "GoogleHC/1.0", source: None, mark: 0 };
/// Addresses of probers, out of the documented ranges: IPv4, external IPv6, internal IPv6.
pub const PROBERS: [&str; 3] = ["35.191.0.1", "2600:1901:8001::1", "2600:2d00:1:b029::1"];

/// What the API answered: resources as they are, but for those that no rule uses.
#[derive(Debug, Default)]
pub struct Answers {
    /// `forwardingRules`
    pub rules: Vec<Value>,
    /// `backendServices`, by URL.
    pub services: BTreeMap<String, Value>,
    /// `healthChecks`, by URL.
    pub checks: BTreeMap<String, Value>,
    /// The endpoints of groups, by the group's URL.
    pub endpoints: BTreeMap<String, Vec<Value>>,
    /// `firewalls`
    pub firewalls: Vec<Value>,
    /// `instances`, by zone and name.
    pub instances: BTreeMap<String, Value>,
}

impl Answers {
    /// Reads everything.
    pub fn read(api: &StandIn) -> Result<Self> {
        let region = api.setting("region").to_owned();
        let list = |path: &str| items(api, path);
        let by_url = |found: Vec<Value>| {
            let named = found.into_iter().map(|item| (text(&item, "selfLink").to_owned(), item));
            named.collect::<BTreeMap<_, _>>()
        };
        let mut answers = Self {
            rules: list(&format!("regions/{region}/forwardingRules"))?,
            services: by_url(list(&format!("regions/{region}/backendServices"))?),
            checks: by_url(list(&format!("regions/{region}/healthChecks"))?),
            firewalls: list("global/firewalls")?,
            ..Self::default()
        };
        let zones = list("zones")?;
        for zone in zones.iter().map(|zone| text(zone, "name")) {
            for instance in list(&format!("zones/{zone}/instances"))? {
                answers.instances.insert(format!("{zone}/{}", text(&instance, "name")), instance);
            }
        }
        for service in answers.services.values() {
            for group in each(service, "backends").map(|backend| text(backend, "group")) {
                let Some((_, path)) = group.split_once("/zones/") else { continue };
                let path = format!("zones/{path}/listNetworkEndpoints");
                let answer = send(api, "POST", &path, Some(&json!({})))?;
                // A group that is gone has no endpoints.
                let found = answer.iter().flat_map(|answer| each(answer, "items"));
                let found = found.map(|item| item["networkEndpoint"].clone()).collect();
                answers.endpoints.insert(group.to_owned(), found);
            }
        }
        Ok(answers)
    }

    /// The values.
    pub fn cloud(&self) -> Cloud {
        let mut cloud = Cloud { filters: self.filters(), ..Cloud::default() };
        for (rule, pool, name) in self.rules.iter().filter_map(|rule| self.rule(rule)) {
            cloud.rules.push(rule);
            cloud.pools.insert(name, pool);
        }
        cloud
    }

    /// A rule, its pool, and the pool's name, which is the rule's. What refers to something that is not there yet is left out.
    fn rule(&self, rule: &Value) -> Option<(Rule, Pool, String)> {
        let name = text(rule, "name").to_owned();
        // IPv6 addresses are ranges, of which the first address is the VIP.
        let vip: IpAddr = text(rule, "IPAddress").split('/').next()?.parse().ok()?;
        let transport = transport(text(rule, "IPProtocol"))?;
        let ports = if rule["allPorts"] == true {
            vec![0..=u16::MAX]
        } else if let Some(one) = rule["portRange"].as_str() {
            vec![range(one)?]
        } else {
            strings(rule, "ports").filter_map(range).collect()
        };
        let service = self.services.get(text(rule, "backendService"))?;
        let check = self.checks.get(strings(service, "healthChecks").next()?)?;
        let tracking = &service["connectionTrackingPolicy"];
        let persistence = text(tracking, "connectionPersistenceOnUnhealthyBackends");
        let is_kept = match persistence {
            "NEVER_PERSIST" => false,
            "ALWAYS_PERSIST" => true,
            _ => transport == Transport::Tcp,
        };
        let draining = number(&service["connectionDraining"]["drainingTimeoutSec"]).unwrap_or(0);
        let group = Group {
            check: health_check(check)?,
            attributes: Attributes {
                keeps_client_address: true,
                is_sticky: false,
                deregistration_delay: Duration::from_secs(draining),
                ends_flows_after_delay: true,
                unhealthy_flows_end_after: (!is_kept).then_some(Duration::ZERO),
            },
            targets: self.targets(service, vip.is_ipv4()),
        };
        let prober = match (vip.is_ipv4(), text(rule, "loadBalancingScheme")) {
            (true, _) => PROBERS[0],
            (false, "INTERNAL") => PROBERS[2],
            (false, _) => PROBERS[1],
        };
        let pool = Pool { group, checked_at: Some(vip), prober: prober.parse().ok()? };
        let affinity = match text(service, "sessionAffinity") {
            "CLIENT_IP" | "CLIENT_IP_PROTO" | "CLIENT_IP_NO_DESTINATION" => Affinity::Client,
            _ => Affinity::Flow,
        };
        let is_weighted = text(service, "localityLbPolicy").starts_with("WEIGHTED");
        let pool_name = name.clone();
        let rule = Rule { vip, transport, ports, pool: name, affinity, is_weighted, fails_open: true };
        Some((rule, pool, pool_name))
    }

    /// The endpoints of a backend service, by zone and VM, at their address of one IP family.
    fn targets(&self, service: &Value, is_v4: bool) -> BTreeMap<String, SocketAddr> {
        let mut targets = BTreeMap::new();
        for group in each(service, "backends").map(|backend| text(backend, "group")) {
            let zone = group.split('/').rev().nth(2).unwrap_or_default();
            for endpoint in self.endpoints.get(group).into_iter().flatten() {
                let id = format!("{zone}/{}", last(text(endpoint, "instance")));
                let address = if is_v4 {
                    text(endpoint, "ipAddress").parse().ok()
                } else {
                    self.instances.get(&id).and_then(ipv6)
                };
                if let Some(address) = address {
                    targets.insert(id, SocketAddr::new(address, 0));
                }
            }
        }
        targets
    }

    /// The firewall rules for ingress, as they decide: by priority, denials first. Only those that apply to all VMs or have a tag that all
    /// VMs have.
    fn filters(&self) -> Vec<Filter> {
        let has_tag = |tag: &str| {
            self.instances.values().all(|instance| strings(&instance["tags"], "items").any(|own| own == tag))
        };
        let applies = |rule: &&Value| {
            let mut tags = strings(rule, "targetTags").peekable();
            rule["direction"] == "INGRESS"
                && rule["disabled"] != true
                && (tags.peek().is_none() || tags.any(has_tag))
        };
        let mut rules: Vec<_> = self.firewalls.iter().filter(applies).collect();
        let denies = |rule: &Value| each(rule, "denied").next().is_some();
        rules.sort_by_key(|rule| (number(&rule["priority"]), !denies(rule)));
        let of = |rule: &Value| {
            let (allows, field) = if denies(rule) { (false, "denied") } else { (true, "allowed") };
            let (sources, destinations) = (nets(rule, "sourceRanges"), nets(rule, "destinationRanges"));
            let entries = each(rule, field).filter_map(move |entry| {
                let transport = match text(entry, "IPProtocol") {
                    "all" => None,
                    other => Some(transport(other)?),
                };
                let ports = strings(entry, "ports").filter_map(range).collect();
                let (sources, destinations) = (sources.clone(), destinations.clone());
                Some(Filter { allows, sources, destinations, transport, ports })
            });
            entries.collect::<Vec<_>>()
        };
        rules.into_iter().flat_map(of).collect()
    }
}

/// The network tag of all nodes.
pub const TAG: &str = "node";
/// The nodes' subnet in the default network.
pub const SUBNET: &str = "nodes";
/// The addresses of nodes and internal load balancers.
const SUBNET_RANGE: &str = "10.77.0.0/16";

/// Makes the nodes' subnet, and a virtual machine for each node. `vips` has the range of external IPv6 addresses.
pub fn seed(api: &StandIn, nodes: &[Node], vips: &[IpNet]) -> Result<()> {
    let mut subnet = json!({
        "project": api.setting("project"), "name": SUBNET, "network": "default", "cidr": SUBNET_RANGE,
    });
    if let Some(range) = vips.iter().find(|range| range.addr().is_ipv6()) {
        subnet["stack"] = "IPV4_IPV6".into();
        subnet["access"] = "EXTERNAL".into();
        subnet["prefix"] = range.to_string().into();
    }
    api.control("POST", "subnetworks", Some(&subnet))?;
    let instance = |node: &Node| {
        json!({
            "name": node.name, "zone": node.zone, "address": node.ipv4, "address_v6": node.ipv6, "tags": [TAG],
            "subnetwork": SUBNET,
        })
    };
    api.add_instances(&nodes.iter().map(instance).collect::<Vec<_>>())
}

/// Gives the stand-in what was found of a target: the rule's name, zone and VM as key.
pub fn report(api: &StandIn, found: &BTreeMap<String, Value>) -> Result<()> {
    api.control("POST", "health", Some(&json!(found))).map(drop)
}

fn health_check(check: &Value) -> Option<Check> {
    let is_http = check["type"] == "HTTP";
    let settings = if is_http { &check["httpHealthCheck"] } else { &check["tcpHealthCheck"] };
    let seconds = |field: &str| number(&check[field]).map(Duration::from_secs);
    let count = |field: &str| number(&check[field]).and_then(|value| u32::try_from(value).ok());
    Some(Check {
        path: is_http.then(|| settings["requestPath"].as_str().unwrap_or("/").to_owned()),
        port: Some(u16::try_from(number(&settings["port"])?).ok()?),
        interval: seconds("checkIntervalSec").unwrap_or(Duration::from_secs(5)),
        timeout: seconds("timeoutSec").unwrap_or(Duration::from_secs(5)),
        healthy_threshold: count("healthyThreshold").unwrap_or(2),
        unhealthy_threshold: count("unhealthyThreshold").unwrap_or(2),
    })
}

fn ipv6(instance: &Value) -> Option<IpAddr> {
    let interface = each(instance, "networkInterfaces").next()?;
    let external = each(interface, "ipv6AccessConfigs").next().map(|config| text(config, "externalIpv6"));
    external.unwrap_or_else(|| text(interface, "ipv6Address")).parse().ok()
}

fn transport(name: &str) -> Option<Transport> {
    match name.to_ascii_lowercase().as_str() {
        "tcp" | "6" => Some(Transport::Tcp),
        "udp" | "17" => Some(Transport::Udp),
        _ => None,
    }
}

pub(crate) fn text<'a>(of: &'a Value, field: &str) -> &'a str {
    of[field].as_str().unwrap_or_default()
}

pub(crate) fn each<'a>(of: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    of[field].as_array().into_iter().flatten()
}

pub(crate) fn strings<'a>(of: &'a Value, field: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    each(of, field).filter_map(Value::as_str)
}

fn nets(of: &Value, field: &str) -> Vec<IpNet> {
    strings(of, field).filter_map(net).collect()
}

/// A range, or an address.
pub(crate) fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

pub(crate) fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// All items of a list.
fn items(api: &StandIn, path: &str) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    let mut page = String::new();
    loop {
        let answer = send(api, "GET", &format!("{path}{page}"), None)?.context("no list")?;
        found.extend(each(&answer, "items").cloned());
        match answer["nextPageToken"].as_str() {
            Some(token) => page = format!("?pageToken={token}"),
            None => return Ok(found),
        }
    }
}

/// The answer of a call; `None` if there is no such thing.
fn send(api: &StandIn, method: &str, path: &str, body: Option<&Value>) -> Result<Option<Value>> {
    let path = format!("/compute/v1/projects/{}/{path}", api.setting("project"));
    let (status, answer) = api.send(method, &path, &[], body)?;
    if status == 404 {
        return Ok(None);
    }
    ensure!(status == 200, "{method} {path}: {status} {answer}");
    Ok(Some(answer))
}

#[cfg(test)]
mod tests;
