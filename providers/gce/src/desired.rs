// SPDX-License-Identifier: Apache-2.0
//! The resources that a planned load balancer needs. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};
use steerage_model::{Family, Protocol};
use steerage_provider_api::{Error, LoadBalancer, Owner};
use steerage_provider_cloud::annotation::{self, conflict};
use steerage_provider_cloud::{ClusterId, names};

use crate::checks::Checks;
use crate::config::Config;
use crate::object::{Id, Kind};
use crate::options::{Options, Tier};
use crate::step::Endpoint;
use crate::unset_fields::UNSET;
use crate::{annotations, marks, peers, reasons};

/// Ports that a forwarding rule lists.
const MAX_PORTS: usize = 5;

/// Where the address of a family comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Steerage reserves it.
    Own(Id, Value),
    /// A reserved address of this name.
    Name(String),
    /// This address: a reserved one, or for an internal load balancer one that Steerage reserves by this request.
    Literal(IpAddr, Option<(Id, Value)>),
}

/// What clients of one IP family connect to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frontend {
    pub(crate) family: Family,
    pub(crate) source: Source,
    /// Forwarding rules without their address.
    pub(crate) rules: BTreeMap<Id, Value>,
    /// The rule that admits clients, without the address.
    pub(crate) firewall: Option<(Id, Value)>,
}

/// A group of endpoints in a zone and subnet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WantedGroup {
    pub(crate) body: Value,
    pub(crate) endpoints: BTreeSet<Endpoint>,
}

/// A load balancer as it should be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Desired {
    pub(crate) owner: Owner,
    pub(crate) is_internal: bool,
    pub(crate) tier: Tier,
    /// The health check, and the firewall rules for it. Services share those of nodes.
    pub(crate) checks: BTreeMap<Id, Value>,
    pub(crate) are_checks_shared: bool,
    pub(crate) check: Id,
    /// The backend service, without backends.
    pub(crate) backend: (Id, Value),
    pub(crate) frontends: Vec<Frontend>,
    pub(crate) groups: BTreeMap<Id, WantedGroup>,
    /// What is requested and not done.
    pub(crate) incomplete: Option<(&'static str, String)>,
}

impl Desired {
    /// Every resource of the owner that is wanted.
    pub(crate) fn ids(&self) -> BTreeSet<Id> {
        let mut all: BTreeSet<Id> = self.groups.keys().cloned().collect();
        all.insert(self.backend.0.clone());
        if !self.are_checks_shared {
            all.extend(self.checks.keys().cloned());
        }
        for frontend in &self.frontends {
            match &frontend.source {
                Source::Own(id, _) | Source::Literal(_, Some((id, _))) => drop(all.insert(id.clone())),
                Source::Name(_) | Source::Literal(_, None) => {}
            }
            all.extend(frontend.rules.keys().cloned());
            all.extend(frontend.firewall.iter().map(|(id, _)| id.clone()));
        }
        all
    }

    /// The endpoints of each group.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (&Id, &BTreeSet<Endpoint>)> {
        self.groups.iter().map(|(id, group)| (id, &group.endpoints))
    }

    /// What of it Services share.
    pub(crate) fn shared(&self) -> BTreeSet<Id> {
        if self.are_checks_shared { self.checks.keys().cloned().collect() } else { BTreeSet::new() }
    }
}

/// Names and descriptions of a Service's resources.
#[derive(Clone, Copy)]
pub(crate) struct Names<'a> {
    pub(crate) config: &'a Config,
    pub(crate) owner: &'a Owner,
}

impl Names<'_> {
    pub(crate) fn cluster(&self) -> &ClusterId {
        &self.config.cluster
    }

    pub(crate) fn name(&self, parts: &[&str]) -> String {
        names::resource(self.cluster(), &self.owner.service, parts)
    }

    /// The rule that admits clients of a family.
    pub(crate) fn firewall(&self, family: Family) -> Id {
        Id::new(Kind::Firewall, self.name(&["firewall", of(family)]))
    }

    /// The group of a subnet in a zone.
    pub(crate) fn group(&self, zone: &str, subnetwork: &str) -> Id {
        Id::zonal(Kind::Group, zone, self.name(&["group", subnetwork]))
    }

    /// What a new group says, besides its name.
    pub(crate) fn group_body(&self, id: &Id, subnetwork: &str) -> Value {
        json!({
            "name": id.name,
            "description": marks::of_owner(self.cluster(), self.owner),
            "networkEndpointType": "GCE_VM_IP",
            "network": self.config.network,
            "subnetwork": subnetwork,
        })
    }
}

/// A family in names.
pub(crate) fn of(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPV4",
        Family::V6 => "IPV6",
    }
}

/// What a planned load balancer needs, without its targets.
pub(crate) fn desired(lb: &LoadBalancer, config: &Config) -> Result<Desired, Error> {
    peers::check(&lb.annotations)?;
    let options = Options::read(&lb.annotations, config)?;
    if let Some(pool) = &lb.pool {
        let message = format!(
            "The Service names the AddressPool {pool}, and GCE has none. No load balancer is created or changed. Remove \
             steerage.dev/address-pool."
        );
        return Err(Error::invalid(reasons::ADDRESS_POOL_NOT_SUPPORTED, message));
    }
    if options.tier == Tier::Standard && lb.families.contains(&Family::V6) {
        let problem =
            format!("IPv6 has only the tier Premium, and {} asks for Standard.", annotations::NETWORK_TIER);
        return Err(conflict(&problem, "Remove the annotation, or IPv6 from spec.ipFamilies."));
    }
    let names = Names { config, owner: &lb.owner };
    let description = marks::of_owner(&config.cluster, &lb.owner);
    let scheme = if options.is_internal { "INTERNAL" } else { "EXTERNAL" };
    let Some(group) = lb.groups.first() else {
        return Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, "The Service has no port. Add one."));
    };
    let checks = Checks::new(lb, &group.health_check, &names);
    let mut backend = json!({
        "description": description,
        "loadBalancingScheme": scheme,
        // Forwarding rules of TCP and of UDP refer to it.
        "protocol": "UNSPECIFIED",
        "sessionAffinity": if group.affinity.is_some() { "CLIENT_IP" } else { "NONE" },
        "connectionDraining": { "drainingTimeoutSec": 30 },
        "healthChecks": [checks.check.url(config)],
    });
    let is_weighted = options.is_weighted && group.health_check.is_of_service;
    backend["localityLbPolicy"] = match (is_weighted, options.is_internal) {
        (true, false) => "WEIGHTED_MAGLEV".into(),
        (true, true) => "WEIGHTED_GCP_RENDEZVOUS".into(),
        (false, false) => "MAGLEV".into(),
        (false, true) => Value::Null,
    };
    let backend_id = Id::new(Kind::BackendService, names.name(&["backend-service", scheme]));
    backend["name"] = backend_id.name.clone().into();
    let sources = sources(lb)?;
    let mut frontends = Vec::new();
    let mut given = given(lb, &options)?;
    for family in &lb.families {
        let requested = given.remove(family);
        frontends.push(frontend(lb, *family, requested, &options, &backend_id, &sources, &names));
    }
    if let Some((family, _)) = given.first_key_value() {
        let problem = format!("The Service requests an {family} address, and does not have this IP family.");
        return Err(conflict(&problem, "Remove the address, or change spec.ipFamilies."));
    }
    let incomplete = (options.is_weighted && !is_weighted).then(|| {
        let message = format!(
            "Annotation {} asks for weights, which health checks of the Service report. Its nodes have equal weights. Set \
             externalTrafficPolicy to Local and steerage.dev/steering to health-check, or remove the annotation.",
            annotations::WEIGHTED
        );
        (reasons::WEIGHTS_NOT_AVAILABLE, message)
    });
    Ok(Desired {
        owner: lb.owner.clone(),
        is_internal: options.is_internal,
        tier: options.tier,
        check: checks.check,
        checks: checks.all,
        are_checks_shared: checks.are_shared,
        backend: (backend_id, backend),
        frontends,
        groups: BTreeMap::new(),
        incomplete,
    })
}

/// The ranges that may connect; empty if everybody may.
pub(crate) fn requested_sources(
    ranges: &[IpNet],
    annotations: &BTreeMap<String, String>,
) -> Result<Vec<IpNet>, Error> {
    if ranges.is_empty() { annotation::source_ranges(annotations) } else { Ok(ranges.to_vec()) }
}

fn sources(lb: &LoadBalancer) -> Result<Vec<IpNet>, Error> {
    requested_sources(&lb.source_ranges, &lb.annotations)
}

/// The requested ranges of a family; `None` if nobody of it may connect.
pub(crate) fn ranges(sources: &[IpNet], family: Family) -> Option<Vec<String>> {
    if sources.is_empty() {
        return Some(vec![if family == Family::V4 { "0.0.0.0/0" } else { "::/0" }.to_owned()]);
    }
    let own = sources.iter().filter(|range| Family::of(range.addr()) == family);
    let all: BTreeSet<String> = own.map(|range| range.trunc().to_string()).collect();
    (!all.is_empty()).then(|| all.into_iter().collect())
}

/// A requested address.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Given {
    Name(String),
    Literal(IpAddr),
}

/// The requested addresses by family. The family of a name is not known yet: one name is of the first family, the second one of the other.
fn given(lb: &LoadBalancer, options: &Options) -> Result<BTreeMap<Family, Given>, Error> {
    if !options.addresses.is_empty() && !lb.requested_addresses.is_empty() {
        let problem = format!(
            "{} and steerage.dev/addresses or spec.loadBalancerIP both request addresses.",
            annotations::ADDRESSES
        );
        return Err(conflict(&problem, "Remove one of them."));
    }
    let mut all = BTreeMap::new();
    for (name, family) in options.addresses.iter().zip([lb.families.first(), lb.families.get(1)]) {
        let Some(family) = family else {
            let problem =
                format!("{} names two addresses, and the Service has one IP family.", annotations::ADDRESSES);
            return Err(conflict(&problem, "Remove one of the names."));
        };
        all.insert(*family, Given::Name(name.clone()));
    }
    for address in &lb.requested_addresses {
        if all.insert(Family::of(*address), Given::Literal(*address)).is_some() {
            return Err(conflict("Two addresses of one IP family are requested.", "Request one."));
        }
    }
    Ok(all)
}

fn frontend(
    lb: &LoadBalancer,
    family: Family,
    given: Option<Given>,
    options: &Options,
    backend: &Id,
    sources: &[IpNet],
    names: &Names<'_>,
) -> Frontend {
    let config = names.config;
    let description = marks::of_owner(&config.cluster, &lb.owner);
    let scheme = if options.is_internal { "INTERNAL" } else { "EXTERNAL" };
    // Of external IPv4 addresses no subnet is known.
    let has_subnet = options.is_internal || family == Family::V6;
    let subnetwork = if has_subnet { options.subnetwork.as_str() } else { "" };
    let requested = match &given {
        None => String::new(),
        Some(Given::Name(name)) => name.clone(),
        Some(Given::Literal(address)) => address.to_string(),
    };
    // A forwarding rule of another address, tier or subnet is another one, which exists before the old one goes.
    let tier = options.tier.as_str();
    let place = [of(family), scheme, tier, subnetwork, requested.as_str()];
    let named = |kind: &str, more: &str| names.name(&[&[kind], &place[..], &[more]].concat());
    let own = |literal: Option<IpAddr>| {
        let id = Id::new(Kind::Address, named("address", ""));
        let mut body = json!({ "name": id.name, "description": description, "addressType": scheme });
        if !options.is_internal {
            body["networkTier"] = tier.into();
        }
        if has_subnet {
            body["subnetwork"] = subnetwork.into();
        }
        match family {
            Family::V4 if options.is_internal => body["purpose"] = "SHARED_LOADBALANCER_VIP".into(),
            Family::V4 => {}
            Family::V6 => {
                body["ipVersion"] = "IPV6".into();
                body["ipv6EndpointType"] = "NETLB".into();
            }
        }
        if let Some(address) = literal {
            body["address"] = address.to_string().into();
        }
        (id, body)
    };
    let source = match given {
        None => {
            let (id, body) = own(None);
            Source::Own(id, body)
        }
        Some(Given::Name(name)) => Source::Name(name),
        Some(Given::Literal(address)) => {
            Source::Literal(address, options.is_internal.then(|| own(Some(address))))
        }
    };
    let mut rules = BTreeMap::new();
    let mut allowed = Vec::new();
    for (protocol, name) in [(Protocol::Tcp, "TCP"), (Protocol::Udp, "UDP")] {
        let of_protocol = lb.listeners.iter().filter(|listener| listener.protocol == protocol);
        let ports: BTreeSet<u16> = of_protocol.map(|listener| listener.port).collect();
        let (Some(first), Some(last)) = (ports.first(), ports.last()) else { continue };
        allowed.push(json!({ "IPProtocol": name.to_ascii_lowercase(), "ports": spans(&ports) }));
        let id = Id::new(Kind::ForwardingRule, named("forwarding-rule", name));
        let mut body = json!({
            "name": id.name,
            "description": description,
            "IPProtocol": name,
            "backendService": backend.url(config),
            "loadBalancingScheme": scheme,
        });
        if ports.len() <= MAX_PORTS {
            body["ports"] = ports.iter().map(u16::to_string).collect();
        } else if options.is_internal {
            body["allPorts"] = true.into();
        } else {
            body["portRange"] = format!("{first}-{last}").into();
        }
        if options.is_internal {
            body["network"] = config.network.clone().into();
            body["allowGlobalAccess"] = options.has_global_access.into();
        } else {
            body["networkTier"] = tier.into();
        }
        if has_subnet {
            body["subnetwork"] = subnetwork.into();
        }
        if family == Family::V6 {
            body["ipVersion"] = "IPV6".into();
        }
        rules.insert(id, body);
    }
    let firewall = ranges(sources, family).map(|ranges| {
        let id = names.firewall(family);
        let body = firewall(&id, &description, &ranges, &json!(allowed), config);
        (id, body)
    });
    Frontend { family, source, rules, firewall }
}

pub(crate) fn firewall(
    id: &Id,
    description: &str,
    sources: &[String],
    allowed: &Value,
    config: &Config,
) -> Value {
    let mut rule = json!({
        "name": id.name,
        "description": description,
        "network": config.network,
        "direction": "INGRESS",
        "priority": 1000,
        "sourceRanges": sources,
        "targetTags": config.node_tags,
        "allowed": allowed,
    });
    for field in UNSET {
        rule[field.name] = field.value;
    }
    rule
}

/// Ports as a firewall rule lists them: ports that follow each other are a range, because a rule has a limit of entries.
fn spans(ports: &BTreeSet<u16>) -> Vec<String> {
    let mut spans: Vec<(u16, u16)> = Vec::new();
    for port in ports {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*port) => *last = *port,
            _ => spans.push((*port, *port)),
        }
    }
    let text = |(first, last): (u16, u16)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    spans.into_iter().map(text).collect()
}

#[cfg(test)]
pub(crate) mod tests;
