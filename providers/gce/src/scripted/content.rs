// SPDX-License-Identifier: Apache-2.0
//! The content of each kind of resource: what GCE adds, and what it refuses.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde_json::{Map, Value, json};

use super::addresses::subnet;
use super::{Answered, NETWORK, SUBNETS, Store, not_found, not_ready, refused, wrong};
use crate::object::{Kind, relative, url};

type Content = Map<String, Value>;

fn text<'a>(data: &'a Content, field: &str) -> &'a str {
    data.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn default(data: &mut Content, field: &str, value: impl Into<Value>) {
    data.entry(field).or_insert_with(|| value.into());
}

/// The value has to be one of these.
fn one_of(data: &Content, field: &str, allowed: &[&str]) -> Answered<()> {
    if allowed.contains(&text(data, field)) {
        Ok(())
    } else {
        Err(wrong(format!("resource.{field}: {:?}", data.get(field))))
    }
}

fn between(data: &Content, field: &str, low: u64, high: u64) -> Answered<u64> {
    let value = data.get(field).and_then(Value::as_u64).filter(|value| (low..=high).contains(value));
    value.ok_or_else(|| wrong(format!("resource.{field}: {:?}", data.get(field))))
}

fn is_port(text: &str) -> bool {
    text.parse::<u16>().is_ok()
}

/// The first and the last port of `80` or `80-90`.
fn span(text: &str) -> Answered<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok((first, last)),
        _ => Err(wrong(format!("the ports {text}"))),
    }
}

/// The ports that a rule forwards.
fn spans(rule: &Content) -> Answered<Vec<(u16, u16)>> {
    if let Some(all) = rule.get("ports").and_then(Value::as_array) {
        return all.iter().filter_map(Value::as_str).map(span).collect();
    }
    rule.get("portRange")
        .and_then(Value::as_str)
        .map_or_else(|| Ok(vec![(0, u16::MAX)]), |range| Ok(vec![span(range)?]))
}

/// Whether two rules want the same packets.
fn collide(one: &Content, other: &Content) -> Answered<bool> {
    let (one_spans, others) = (spans(one)?, spans(other)?);
    let meet = one_spans.iter().any(|a| others.iter().any(|b| a.0 <= b.1 && b.0 <= a.1));
    Ok(text(one, "IPProtocol") == text(other, "IPProtocol") && meet)
}

/// The paths of resources that a resource uses.
fn references(data: &Content) -> Vec<String> {
    let list = |field: &str| data.get(field).and_then(Value::as_array).into_iter().flatten();
    let checks = list("healthChecks").filter_map(Value::as_str);
    let groups = list("backends").filter_map(|backend| backend["group"].as_str());
    let service = data.get("backendService").and_then(Value::as_str);
    checks.chain(groups).chain(service).map(|url| relative(url).to_owned()).collect()
}

impl Store {
    /// What uses a resource, also what is being created or changed.
    pub(super) fn users<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a String> {
        let uses = move |data: &Content| references(data).iter().any(|used| used == path);
        let all = self.resources.iter();
        all.filter(move |(_, found)| uses(&found.data) || found.changing.as_ref().is_some_and(uses))
            .map(|(path, _)| path)
    }

    pub(super) fn refuse_if_used(&self, path: &str) -> Answered<()> {
        let Some(user) = self.users(path).next() else { return Ok(()) };
        let message = format!("The resource '{path}' is already being used by '{user}'");
        Err(refused(400, "resourceInUseByAnotherResource", message))
    }

    /// What a changed resource names may have gone meanwhile.
    pub(super) fn refuse_if_lacking(&self, path: &str) -> Answered<()> {
        let changing = self.resources.get(path).and_then(|found| found.changing.as_ref());
        changing.into_iter().flat_map(references).try_for_each(|used| self.seen(&used).map(drop))
    }

    /// The path of a URL. What is there has to be ready for use.
    pub(super) fn resolve(&self, reference: &str, kinds: &[Kind]) -> Answered<String> {
        let path = relative(reference);
        if reference != url(path) {
            return Err(wrong(format!("'{reference}' is no URL")));
        }
        let found =
            self.resources.get(path).filter(|found| found.is_seen()).ok_or_else(|| not_found(path))?;
        if !kinds.contains(&found.kind) {
            return Err(wrong(format!("'{reference}' is of another kind")));
        }
        if found.is_leaving || !found.is_ready {
            return Err(not_ready(path));
        }
        Ok(path.to_owned())
    }

    fn place(data: &mut Content, field: &str, known: &[&str]) -> Answered<()> {
        let path = relative(text(data, field)).to_owned();
        if !known.contains(&path.as_str()) {
            return Err(wrong(format!("resource.{field}: '{path}'")));
        }
        data.insert(field.to_owned(), url(&path).into());
        Ok(())
    }

    /// The content of a new or changed resource.
    pub(super) fn content(&mut self, kind: Kind, path: &str, mut data: Content) -> Answered<Content> {
        default(&mut data, "description", "");
        match kind {
            Kind::Address => self.address(&mut data)?,
            Kind::HealthCheck => health_check(&mut data)?,
            Kind::Group => {
                one_of(&data, "networkEndpointType", &["GCE_VM_IP"])?;
                Self::place(&mut data, "network", &[NETWORK])?;
                Self::place(&mut data, "subnetwork", &SUBNETS.map(|(path, _)| path))?;
            }
            Kind::BackendService => self.backend_service(&mut data)?,
            Kind::Firewall => firewall(&mut data)?,
            Kind::ForwardingRule if self.resources.contains_key(path) => {
                if data.contains_key("allowGlobalAccess") {
                    one_of(&data, "loadBalancingScheme", &["INTERNAL"])?;
                }
            }
            Kind::ForwardingRule => self.forwarding_rule(&mut data)?,
        }
        Ok(data)
    }

    fn address(&mut self, data: &mut Content) -> Answered<()> {
        default(data, "addressType", "EXTERNAL");
        default(data, "networkTier", "PREMIUM");
        one_of(data, "addressType", &["EXTERNAL", "INTERNAL"])?;
        one_of(data, "networkTier", &["PREMIUM", "STANDARD"])?;
        if text(data, "addressType") == "EXTERNAL" {
            if ["purpose", "subnetwork", "address"].iter().any(|field| data.contains_key(*field)) {
                return Err(wrong("it is for internal addresses"));
            }
        } else {
            default(data, "purpose", "GCE_ENDPOINT");
            one_of(data, "purpose", &["GCE_ENDPOINT", "SHARED_LOADBALANCER_VIP"])?;
            one_of(data, "networkTier", &["PREMIUM"])?;
            Self::place(data, "subnetwork", &SUBNETS.map(|(path, _)| path))?;
        }
        if !data.contains_key("address") {
            let place = subnet(data).map(str::to_owned);
            data.insert("address".to_owned(), self.free_address(place.as_deref())?.into());
        } else if self.reservation(data).is_some() || !self.rules_at(data).is_empty() {
            return Err(refused(
                409,
                "ipInUseByAnotherResource",
                "The IP is already being used by another resource.",
            ));
        }
        Ok(())
    }

    fn backend_service(&self, data: &mut Content) -> Answered<()> {
        default(data, "sessionAffinity", "NONE");
        default(data, "timeoutSec", 30);
        one_of(data, "loadBalancingScheme", &["EXTERNAL", "INTERNAL"])?;
        one_of(data, "protocol", &["TCP", "UDP", "UNSPECIFIED"])?;
        one_of(data, "sessionAffinity", &["NONE", "CLIENT_IP", "CLIENT_IP_PROTO", "CLIENT_IP_PORT_PROTO"])?;
        let weighted = if text(data, "loadBalancingScheme") == "EXTERNAL" {
            "WEIGHTED_MAGLEV"
        } else {
            "WEIGHTED_GCP_RENDEZVOUS"
        };
        one_of(data, "localityLbPolicy", &["", "MAGLEV", weighted])?;
        let draining =
            data.get("connectionDraining").and_then(|draining| draining["drainingTimeoutSec"].as_u64());
        if draining.unwrap_or_default() > 3600 {
            return Err(wrong("resource.connectionDraining"));
        }
        let checks = data.get("healthChecks").and_then(Value::as_array).cloned().unwrap_or_default();
        let backends = data.get("backends").and_then(Value::as_array).cloned().unwrap_or_default();
        if checks.len() > 1 || (checks.is_empty() && !backends.is_empty()) {
            return Err(wrong("resource.healthChecks"));
        }
        for check in &checks {
            self.resolve(check.as_str().unwrap_or_default(), &[Kind::HealthCheck])?;
        }
        let mut groups = BTreeSet::new();
        let mut listed = Vec::new();
        for mut backend in backends {
            let group = self.resolve(backend["group"].as_str().unwrap_or_default(), &[Kind::Group])?;
            if backend["balancingMode"] != "CONNECTION" || !groups.insert(group) {
                return Err(wrong(format!("resource.backends: {backend}")));
            }
            if backend["capacityScaler"].is_null() {
                backend["capacityScaler"] = json!(1.0);
            }
            listed.push(backend);
        }
        if !listed.is_empty() {
            data.insert("backends".to_owned(), listed.into());
        }
        Ok(())
    }

    fn forwarding_rule(&self, data: &mut Content) -> Answered<()> {
        default(data, "networkTier", "PREMIUM");
        one_of(data, "loadBalancingScheme", &["EXTERNAL", "INTERNAL"])?;
        one_of(data, "IPProtocol", &["TCP", "UDP"])?;
        one_of(data, "networkTier", &["PREMIUM", "STANDARD"])?;
        let service = self.resolve(text(data, "backendService"), &[Kind::BackendService])?;
        let service = &self.resources[&service].data;
        if text(service, "loadBalancingScheme") != text(data, "loadBalancingScheme")
            || !["UNSPECIFIED", text(data, "IPProtocol")].contains(&text(service, "protocol"))
        {
            return Err(wrong("resource.backendService"));
        }
        let is_internal = text(data, "loadBalancingScheme") == "INTERNAL";
        let ports: Vec<&str> = data
            .get("ports")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let given =
            ["ports", "portRange", "allPorts"].iter().filter(|field| data.contains_key(**field)).count();
        let distinct: BTreeSet<&&str> = ports.iter().collect();
        let are_ports_wrong =
            ports.len() > 5 || distinct.len() < ports.len() || !ports.iter().all(|port| is_port(port));
        if given != 1 || are_ports_wrong || (is_internal && data.contains_key("portRange")) {
            return Err(wrong("resource.ports"));
        }
        spans(data)?;
        if is_internal {
            default(data, "allowGlobalAccess", false);
            one_of(data, "networkTier", &["PREMIUM"])?;
            Self::place(data, "network", &[NETWORK])?;
            Self::place(data, "subnetwork", &SUBNETS.map(|(path, _)| path))?;
        } else if ["network", "subnetwork", "allowGlobalAccess"].iter().any(|field| data.contains_key(*field))
        {
            return Err(wrong("it is for internal forwarding rules"));
        }
        // This crate names an address that it has reserved, as one does who wants to keep it.
        if text(data, "IPAddress").is_empty() {
            return Err(wrong("resource.IPAddress"));
        }
        let Some(reservation) = self.reservation(data) else {
            return Err(refused(
                400,
                "invalid",
                "Specified IP address is not reserved by this project in this region.",
            ));
        };
        if text(reservation, "networkTier") != text(data, "networkTier") {
            return Err(wrong("resource.networkTier"));
        }
        let is_shared = !is_internal || text(reservation, "purpose") == "SHARED_LOADBALANCER_VIP";
        for other in self.rules_at(data) {
            if !is_shared || collide(other, data)? {
                let message = "Specified IP address is in-use and would result in a conflict.";
                return Err(refused(400, "invalid", message));
            }
        }
        Ok(())
    }
}

fn health_check(data: &mut Content) -> Answered<()> {
    one_of(data, "type", &["TCP", "HTTP"])?;
    let (field, other) = match text(data, "type") {
        "TCP" => ("tcpHealthCheck", "httpHealthCheck"),
        _ => ("httpHealthCheck", "tcpHealthCheck"),
    };
    let interval = between(data, "checkIntervalSec", 1, 300)?;
    between(data, "timeoutSec", 1, interval)?;
    between(data, "healthyThreshold", 1, 10)?;
    between(data, "unhealthyThreshold", 1, 10)?;
    let probe = data.get_mut(field).and_then(Value::as_object_mut).ok_or_else(|| wrong(field))?;
    between(probe, "port", 1, 65535)?;
    default(probe, "proxyHeader", "NONE");
    if field == "httpHealthCheck" {
        default(probe, "requestPath", "/");
    }
    let has_path = text(probe, "requestPath").starts_with('/');
    if data.contains_key(other) || has_path != (field == "httpHealthCheck") {
        return Err(wrong(format!("resource.{field}")));
    }
    Ok(())
}

fn firewall(data: &mut Content) -> Answered<()> {
    default(data, "direction", "INGRESS");
    default(data, "disabled", false);
    one_of(data, "direction", &["INGRESS"])?;
    between(data, "priority", 0, 65535)?;
    Store::place(data, "network", &[NETWORK])?;
    for field in ["sourceRanges", "destinationRanges"] {
        let all = data.get(field).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
        for range in all {
            let net: Option<Ipv4Net> =
                range.parse().ok().or_else(|| range.parse::<Ipv4Addr>().map(Ipv4Net::from).ok());
            if net.is_none_or(|net| net != net.trunc()) {
                return Err(wrong(format!("resource.{field}: {range}")));
            }
        }
    }
    let allowed = data.get("allowed").and_then(Value::as_array).cloned().unwrap_or_default();
    if allowed.is_empty() {
        return Err(wrong("resource.allowed"));
    }
    for entry in allowed {
        let ports = entry["ports"].as_array().cloned().unwrap_or_default();
        let are_ports = ports.iter().filter_map(Value::as_str).try_for_each(|port| span(port).map(drop));
        if !["tcp", "udp"].contains(&entry["IPProtocol"].as_str().unwrap_or_default()) || are_ports.is_err() {
            return Err(wrong(format!("resource.allowed: {entry}")));
        }
    }
    // Without one, the rule admits everybody.
    let has_sources = data.get("sourceRanges").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    if !has_sources {
        data.insert("sourceRanges".to_owned(), json!(["0.0.0.0/0"]));
    }
    Ok(())
}
