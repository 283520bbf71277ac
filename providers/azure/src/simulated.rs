// SPDX-License-Identifier: Apache-2.0
//! The Azure in memory for the controller's simulation: the provider of each process on it, over the simulation's network, and a look
//! from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use http::{Method, Response};
use ipnet::{IpNet, Ipv4Net};
use serde_json::{Map, Value, json};
use steerage_model::Key;
use steerage_provider_api::{Owner, Provider};
use steerage_provider_cloud::http::TransportError;
use steerage_provider_cloud::{ApiMetrics, ClusterId};
use steerage_provider_conformance::Snapshot;
use steerage_provider_conformance::simulated::{
    CallFault, CarriedCall, Network, SeenLoadBalancer, SimulatedCloud, carry,
};

use crate::annotations;
use crate::client::{ApiAnswer, Call, Calls};
use crate::config::Config;
use crate::error::{CallError, Result};
use crate::marks::{self, Mark};
use crate::paced::Paced;
use crate::provider::Azure;
use crate::scripted::{GROUP, Scripted, parts};

/// Where the resources are.
const NETWORK: &str = "/subscriptions/sub/resourceGroups/rg/providers/Microsoft.Network";
const PARTS: [&str; 4] = ["frontendIPConfigurations", "backendAddressPools", "loadBalancingRules", "probes"];
/// A part of the name of what others made.
const FOREIGN: &str = "of-others";

/// A subscription of Azure for the controller's simulation.
pub struct SimulatedAzure(Scripted);

fn config() -> Config {
    Config {
        cluster: ClusterId { name: "simulated".to_owned(), uid: "cluster-1".to_owned() },
        subscription: "sub".to_owned(),
        resource_group: "rg".to_owned(),
        location: "westeurope".to_owned(),
        network: format!("{NETWORK}/virtualNetworks/vnet"),
        subnet: Some("nodes".to_owned()),
        security_group: Some(GROUP.to_owned()),
        priority: 2000,
        zones: Vec::new(),
        endpoint: "https://management.azure.com".to_owned(),
        poll: Duration::from_secs(1),
    }
}

/// The requests of one process.
struct Linked {
    cloud: Scripted,
    network: Arc<dyn Network>,
}

#[async_trait]
impl Calls for Linked {
    async fn send(&self, call: Call) -> Result<ApiAnswer> {
        let (cloud, action) = (self.cloud.clone(), call.action);
        let carried = CarriedCall { name: action, is_write: call.method != Method::GET };
        let broken = || {
            let why = TransportError::Connection("connection closed".to_owned());
            CallError::unanswered(action, &why)
        };
        match carry(&*self.network, carried, move || cloud.send(call.clone()).now_or_never()).await {
            Ok(answer) => answer.unwrap_or_else(|| Err(broken())),
            Err(CallFault::Broken) => Err(broken()),
            Err(CallFault::Throttled) => {
                let mut refused =
                    Response::new(json!({ "error": { "code": "TooManyRequests" } }).to_string());
                *refused.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                Err(CallError::answered(action, &refused))
            }
        }
    }
}

/// The Service whose mark it is: one of the simulation's, since no part of a load balancer says its name.
fn owner_of(mark: &Mark) -> Option<Owner> {
    let mut services = (0..16).map(|number| Key::new("shop", format!("web-{number}")));
    services.find_map(|service| mark.owner(&config().cluster, &service))
}

/// The UID in the name of a part, as Kubernetes writes it.
fn uid_of(part: &Value) -> Option<String> {
    let mark = Mark::read(&config().cluster, part["name"].as_str()?)?;
    owner_of(&mark).map(|owner| owner.uid)
}

/// The UIDs of the Services that have or use a part of a load balancer, or, without one, the load balancer.
fn users(balancer: &Value, part: &Value) -> String {
    if let Some(uid) = uid_of(part) {
        return format!(" of \"{uid}\"");
    }
    let uses = |rule: &&Value| {
        let of = &rule["properties"];
        part.is_null() || ["backendAddressPool", "probe"].iter().any(|field| of[field]["id"] == part["id"])
    };
    let uids: BTreeSet<String> =
        parts(balancer, "loadBalancingRules").filter(uses).filter_map(uid_of).collect();
    uids.iter().flat_map(|uid| [" of \"", uid, "\""]).collect()
}

/// Without what depends on history: versions, states and the numbers of priority.
fn plain(value: &Value) -> Value {
    const LEFT_OUT: [&str; 5] = ["etag", "id", "priority", "provisioningState", "privateIPAddress"];
    match value {
        Value::Object(all) => {
            let is_reference = all.len() == 1 && all.contains_key("id");
            let is_kept =
                |key: &str, value: &Value| (is_reference || !LEFT_OUT.contains(&key)) && *value != json!([]);
            let kept = all.iter().filter(|(key, value)| is_kept(key, value));
            Value::Object(kept.map(|(key, value)| (key.clone(), plain(value))).collect::<Map<_, _>>())
        }
        Value::Array(all) => {
            let mut all: Vec<Value> = all.iter().map(plain).collect();
            all.sort_by_key(ToString::to_string);
            Value::Array(all)
        }
        other => other.clone(),
    }
}

fn strings(value: &Value, one: &str, many: &str) -> Vec<String> {
    let many = value[many].as_array().into_iter().flatten();
    let all = many.chain([&value[one]]).filter_map(Value::as_str);
    all.map(str::to_owned).collect()
}

impl SimulatedAzure {
    /// A subscription with nothing of the cluster.
    pub fn new() -> Self {
        let cloud = Scripted::new();
        let tags = json!({ "team": FOREIGN });
        let rule = json!({ "name": format!("ssh-{FOREIGN}"), "properties": {
            "protocol": "Tcp", "access": "Allow", "direction": "Inbound", "priority": 100, "sourcePortRange": "*",
            "sourceAddressPrefix": "198.51.100.0/24", "destinationAddressPrefix": "*", "destinationPortRange": "22",
        } });
        cloud.put(GROUP, json!({ "location": "westeurope", "properties": { "securityRules": [rule] } }));
        for kind in ["loadBalancers", "publicIPAddresses"] {
            let body = json!({ "location": "westeurope", "tags": tags, "properties": { "note": FOREIGN } });
            cloud.put(&format!("{NETWORK}/{kind}/{FOREIGN}"), body);
        }
        Self(cloud)
    }

    /// The owner and address of each frontend, by its ID in lower case.
    fn frontends(&self) -> BTreeMap<String, (Owner, String)> {
        let mut found = BTreeMap::new();
        for balancer in self.0.all("loadBalancers") {
            for part in parts(&balancer, "frontendIPConfigurations") {
                let of = &part["properties"];
                let public = of["publicIPAddress"]["id"].as_str().and_then(|id| self.0.get(id));
                let address = match &public {
                    Some(ip) => &ip["properties"]["ipAddress"],
                    None => &of["privateIPAddress"],
                };
                let mark = part["name"].as_str().and_then(|name| Mark::read(&config().cluster, name));
                let owner = mark.and_then(|mark| owner_of(&mark));
                if let (Some(id), Some(owner), Some(address)) = (part["id"].as_str(), owner, address.as_str())
                {
                    found.insert(id.to_ascii_lowercase(), (owner, address.to_owned()));
                }
            }
        }
        found
    }

    /// Who may connect where: one entry for each rule, source and address.
    fn admitted(&self, owners: &BTreeMap<String, String>) -> Vec<(String, String)> {
        let group = self.0.get(GROUP).unwrap_or_default();
        let mut all = Vec::new();
        for rule in parts(&group, "securityRules") {
            let of = &rule["properties"];
            if rule["name"].as_str().is_some_and(|name| name.contains(FOREIGN)) {
                all.push((rule["name"].to_string(), plain(of).to_string()));
                continue;
            }
            let ports = strings(of, "destinationPortRange", "destinationPortRanges");
            for source in strings(of, "sourceAddressPrefix", "sourceAddressPrefixes") {
                for destination in strings(of, "destinationAddressPrefix", "destinationAddressPrefixes") {
                    let address = destination.trim_end_matches("/32").to_owned();
                    let owner = owners.get(&address).cloned().unwrap_or(address);
                    let what =
                        format!("{} {} {ports:?} {source} to \"{owner}\"", of["access"], of["protocol"]);
                    all.push((what.clone(), what));
                }
            }
        }
        all
    }
}

impl Default for SimulatedAzure {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedCloud for SimulatedAzure {
    fn provider(&self, network: Arc<dyn Network>) -> Arc<dyn Provider> {
        let calls = Arc::new(Linked { cloud: self.0.clone(), network });
        Arc::new(Azure::over(config(), Arc::new(Paced::new(calls, ApiMetrics::default()))))
    }

    fn provider_id(&self, node: &str) -> String {
        format!(
            "azure:///subscriptions/sub/resourceGroups/rg/providers/Microsoft.Compute/virtualMachines/{node}"
        )
    }

    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[
            (annotations::INTERNAL, "true"),
            (annotations::IDLE_TIMEOUT, "10"),
            (annotations::DISABLE_TCP_RESET, "true"),
        ]
    }

    fn refused(&self) -> (&'static str, &'static str) {
        (annotations::IDLE_TIMEOUT, "soon")
    }

    fn load_balancers(&self) -> BTreeMap<Owner, SeenLoadBalancer> {
        let frontends = self.frontends();
        let mut found = BTreeMap::<Owner, SeenLoadBalancer>::new();
        let group = self.0.get(GROUP).unwrap_or_default();
        for (owner, address) in frontends.values() {
            let seen = found.entry(owner.clone()).or_default();
            seen.address.clone_from(address);
            for rule in parts(&group, "securityRules") {
                let of = &rule["properties"];
                let is_for = |to: &String| to.trim_end_matches("/32") == address;
                let to = strings(of, "destinationAddressPrefix", "destinationAddressPrefixes");
                if of["access"] == "Allow" && to.iter().any(is_for) {
                    let from = strings(of, "sourceAddressPrefix", "sourceAddressPrefixes");
                    let range = |from: &String| match from.as_str() {
                        "*" | "Internet" => Some(IpNet::V4(Ipv4Net::default())),
                        range => range.parse().ok(),
                    };
                    seen.sources.extend(from.iter().filter_map(range));
                }
            }
        }
        for balancer in self.0.all("loadBalancers") {
            for rule in parts(&balancer, "loadBalancingRules") {
                let of = &rule["properties"];
                let id = |field: &str| of[field]["id"].as_str().unwrap_or_default().to_ascii_lowercase();
                let Some((owner, _)) = frontends.get(&id("frontendIPConfiguration")) else { continue };
                let (pool, mut nodes) = (id("backendAddressPool"), BTreeSet::new());
                for part in parts(&balancer, "backendAddressPools") {
                    if part["id"].as_str().is_some_and(|id| id.eq_ignore_ascii_case(&pool)) {
                        let members = part["properties"]["loadBalancerBackendAddresses"].as_array();
                        let names =
                            members.into_iter().flatten().filter_map(|member| member["name"].as_str());
                        nodes.extend(names.map(str::to_owned));
                    }
                }
                let port = of["frontendPort"].as_u64().and_then(|port| u16::try_from(port).ok());
                let seen = found.entry(owner.clone()).or_default();
                seen.listeners.entry(port.unwrap_or_default()).or_default().extend(nodes);
            }
        }
        found
    }

    fn snapshot(&self) -> Snapshot {
        let owners = self.frontends().into_values().map(|(owner, address)| (address, owner.uid)).collect();
        let mut all: Snapshot = self.admitted(&owners).into_iter().collect();
        for mut body in self.0.all("publicIPAddresses") {
            if let Some(properties) = body["properties"].as_object_mut() {
                properties.remove("ipAddress");
            }
            all.insert(format!("public IP {}", body["name"]), plain(&body).to_string());
        }
        for mut body in self.0.all("loadBalancers") {
            let (name, of_all) = (body["name"].to_string(), users(&body, &Value::Null));
            for kind in PARTS {
                for part in parts(&body, kind) {
                    let of = users(&body, part);
                    all.insert(format!("{kind} {name} {}", part["name"]), format!("{}{of}", plain(part)));
                }
            }
            if let Some(properties) = body["properties"].as_object_mut() {
                properties.retain(|kind, _| !PARTS.contains(&kind.as_str()));
            }
            // Which Services are named depends on those that are refused.
            if let Some(tags) = body["tags"].as_object_mut() {
                tags.retain(|tag, _| !tag.starts_with(marks::LIST));
            }
            all.insert(format!("load balancer {name}"), format!("{}{of_all}", plain(&body)));
        }
        all
    }

    fn foreign(&self) -> Snapshot {
        let mut all = self.snapshot();
        all.retain(|name, content| name.contains(FOREIGN) || content.contains(FOREIGN));
        all
    }

    fn empty(&self) -> Arc<dyn SimulatedCloud> {
        Arc::new(Self::new())
    }

    fn change_by_hand(&self, number: u64) -> Option<String> {
        let is_idle = |body: &Value| body["properties"]["provisioningState"] == "Succeeded";
        let group = self.0.get(GROUP)?;
        if number.is_multiple_of(4) && is_idle(&group) {
            let mut gone = None;
            self.0.change(GROUP, |body| {
                let rules = body["properties"]["securityRules"].as_array_mut();
                // The last one is never that of others.
                gone = rules.filter(|rules| rules.len() > 1).and_then(Vec::pop);
            });
            return gone.map(|rule| format!("no security rule {}", rule["name"]));
        }
        let owned = |body: &Value| is_idle(body) && parts(body, "loadBalancingRules").next().is_some();
        let balancer = self.0.all("loadBalancers").into_iter().find(owned)?;
        let path = balancer["id"].as_str()?.to_owned();
        let kind = if number % 4 == 1 { "loadBalancingRules" } else { "backendAddressPools" };
        let count = u64::try_from(parts(&balancer, kind).count()).unwrap_or(1).max(1);
        let chosen = usize::try_from((number / 4) % count).unwrap_or_default();
        let mut what = None;
        self.0.change(&path, |body| {
            let Some(all) = body["properties"][kind].as_array_mut() else { return };
            if kind == "loadBalancingRules" {
                what = Some(format!("no rule {}", all.remove(chosen)["name"]));
                return;
            }
            let Some(pool) = all.get_mut(chosen) else { return };
            let network = json!({ "id": config().network });
            let member = json!({ "name": "by-hand", "properties": { "ipAddress": "10.240.0.200", "virtualNetwork": network } });
            if let Some(members) = pool["properties"]["loadBalancerBackendAddresses"].as_array_mut()
                && !members.iter().any(|known| known["name"] == "by-hand")
            {
                members.push(member);
                what = Some(format!("a member of {}", pool["name"]));
            }
        });
        what
    }
}
