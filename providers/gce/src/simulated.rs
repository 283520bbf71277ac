// SPDX-License-Identifier: Apache-2.0
//! The Compute Engine in memory for the controller's simulation: the provider of each process on it, over the simulation's network, and a
//! look from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response};
use ipnet::IpNet;
use serde_json::{Map, Value, json};
use steerage_provider_api::{Owner, Provider};
use steerage_provider_cloud::http::TransportError;
use steerage_provider_cloud::{ApiMetrics, ClusterId};
use steerage_provider_conformance::Snapshot;
use steerage_provider_conformance::simulated::{
    CallFault, CarriedCall, Network, SeenLoadBalancer, SimulatedCloud, carry,
};

use crate::annotations;
use crate::client::{Call, Calls};
use crate::config::Config;
use crate::error::{CallError, Result};
use crate::marks;
use crate::object::{Kind, last, relative, url};
use crate::paced::Paced;
use crate::provider::Gce;
use crate::scripted::{NETWORK, PROJECT, REGION, Resource, SUBNETS, Scripted, ZONES};

/// A part of the name of what others made.
const FOREIGN: &str = "of-others";
/// A VM in each zone that is no node.
const BY_HAND: &str = "by-hand";

/// A project of GCE for the controller's simulation.
pub struct SimulatedGce(Scripted);

fn config() -> Config {
    Config {
        cluster: ClusterId { name: "simulated".to_owned(), uid: "cluster-1".to_owned() },
        project: "p".to_owned(),
        region: "r".to_owned(),
        network: NETWORK.to_owned(),
        subnetwork: SUBNETS[0].0.to_owned(),
        node_tags: vec!["node".to_owned()],
        zones: Vec::new(),
        endpoint: "https://compute.googleapis.com".to_owned(),
        poll: Duration::from_millis(500),
    }
}

/// The requests of one process.
struct Linked {
    cloud: Scripted,
    network: Arc<dyn Network>,
}

#[async_trait]
impl Calls for Linked {
    async fn send(&self, call: Call) -> Result<Value> {
        let (cloud, action) = (self.cloud.clone(), call.action);
        let is_read = call.method == Method::GET
            || ["networkEndpointGroups.listNetworkEndpoints", "regionBackendServices.getHealth"]
                .contains(&action);
        let carried = CarriedCall { name: action, is_write: !is_read };
        match carry(&*self.network, carried, move || cloud.at_once(&call)).await {
            Ok(answer) => answer,
            Err(CallFault::Broken) => Err(CallError::unanswered(
                action,
                &TransportError::Connection("connection closed".to_owned()),
            )),
            Err(CallFault::Throttled) => {
                let errors = json!([{ "reason": "rateLimitExceeded", "domain": "usageLimits" }]);
                let mut refused =
                    Response::new(json!({ "error": { "code": 403, "errors": errors } }).to_string());
                *refused.status_mut() = http::StatusCode::FORBIDDEN;
                Err(CallError::answered(action, &refused))
            }
        }
    }
}

fn zone_of(node: &str) -> &'static str {
    let number: usize = node.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or_default();
    ZONES[number % ZONES.len()]
}

fn owner_of(data: &Map<String, Value>) -> Option<Owner> {
    marks::owner(&config().cluster, &Value::from(data.clone()))
}

fn is_shared(found: &Resource) -> bool {
    marks::is_shared(&config().cluster, &Value::from(found.data.clone()))
}

fn texts<'a>(data: &'a Map<String, Value>, field: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    data.get(field).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

fn text<'a>(data: &'a Map<String, Value>, field: &str) -> &'a str {
    data.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// The paths of a backend service's groups.
fn groups(service: &Map<String, Value>) -> BTreeSet<String> {
    let backends = service.get("backends").and_then(Value::as_array).into_iter().flatten();
    backends.filter_map(|backend| backend["group"].as_str()).map(|url| relative(url).to_owned()).collect()
}

impl SimulatedGce {
    /// A project with nothing of the cluster.
    pub fn new() -> Self {
        let cloud = Scripted::new();
        for zone in ZONES {
            cloud.set_machine(zone, BY_HAND, true);
        }
        let subnet = url(SUBNETS[0].0);
        let common = json!({ "name": FOREIGN, "description": "{\"team\":\"a\"}" });
        let put = |kind: Kind, place: &str, more: Value| {
            let mut data = common.clone();
            data.as_object_mut()
                .into_iter()
                .for_each(|data| data.extend(more.as_object().cloned().unwrap_or_default()));
            let path = format!("{place}/{}/{FOREIGN}", kind.collection());
            cloud.put(kind, &path, &data);
            url(&path)
        };
        let address = "198.18.255.1";
        put(
            Kind::Address,
            REGION,
            json!({ "addressType": "EXTERNAL", "networkTier": "PREMIUM", "address": address }),
        );
        let probe = json!({ "port": 10256, "requestPath": "/healthz" });
        let check = json!({ "type": "HTTP", "checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 2, "unhealthyThreshold": 2, "httpHealthCheck": probe });
        let check = put(Kind::HealthCheck, REGION, check);
        let zone = format!("{PROJECT}/zones/{}", ZONES[0]);
        let group =
            json!({ "networkEndpointType": "GCE_VM_IP", "network": url(NETWORK), "subnetwork": subnet });
        let group = put(Kind::Group, &zone, group);
        let backend = json!({ "group": group, "balancingMode": "CONNECTION" });
        let service = json!({ "loadBalancingScheme": "EXTERNAL", "protocol": "TCP", "healthChecks": [check], "backends": [backend] });
        let service = put(Kind::BackendService, REGION, service);
        let allowed = json!([{ "IPProtocol": "tcp", "ports": ["22", "10256"] }]);
        let rule = json!({ "network": url(NETWORK), "sourceRanges": ["198.51.100.0/24"], "targetTags": ["node"], "allowed": allowed });
        put(Kind::Firewall, &format!("{PROJECT}/global"), rule);
        let rule = json!({
            "IPAddress": address, "IPProtocol": "TCP", "ports": ["80"], "backendService": service, "loadBalancingScheme": "EXTERNAL",
            "networkTier": "PREMIUM",
        });
        put(Kind::ForwardingRule, REGION, rule);
        Self(cloud)
    }

    /// The UIDs of the Services that have or use a resource.
    fn users(all: &BTreeMap<String, Resource>, path: &str, found: &Resource) -> BTreeSet<String> {
        if let Some(owner) = owner_of(&found.data) {
            return BTreeSet::from([owner.uid]);
        }
        if !is_shared(found) {
            return BTreeSet::new();
        }
        let port_of = |check: &Resource| {
            let probe = check.data.get("tcpHealthCheck").or_else(|| check.data.get("httpHealthCheck"));
            probe.map(|probe| probe["port"].to_string())
        };
        let port = found.data.get("allowed").and_then(|allowed| allowed[0]["ports"][0].as_str());
        let is_used = |service: &&Resource| {
            texts(&service.data, "healthChecks").any(|check| {
                let check = relative(check);
                check == path || (port.is_some() && all.get(check).and_then(port_of).as_deref() == port)
            })
        };
        let services = all.values().filter(|found| found.kind == Kind::BackendService).filter(is_used);
        services.filter_map(|service| owner_of(&service.data)).map(|owner| owner.uid).collect()
    }

    fn owned(&self, kind: Kind) -> Vec<String> {
        let is_owned =
            |found: &Resource| found.kind == kind && (owner_of(&found.data).is_some() || is_shared(found));
        self.0.resources().into_iter().filter(|(_, found)| is_owned(found)).map(|(path, _)| path).collect()
    }
}

impl Default for SimulatedGce {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedCloud for SimulatedGce {
    fn provider(&self, network: Arc<dyn Network>) -> Arc<dyn Provider> {
        let calls = Arc::new(Linked { cloud: self.0.clone(), network });
        Arc::new(Gce::over(config(), Arc::new(Paced::new(calls, ApiMetrics::default()))))
    }

    fn provider_id(&self, node: &str) -> String {
        format!("gce://p/{}/{node}", zone_of(node))
    }

    fn set_machine(&self, node: &str, runs: bool) {
        self.0.set_machine(zone_of(node), node, runs);
    }

    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[
            (annotations::LOAD_BALANCER_TYPE, "Internal"),
            (annotations::GLOBAL_ACCESS, "false"),
            (annotations::GLOBAL_ACCESS, "true"),
            (annotations::NETWORK_TIER, "Standard"),
            (annotations::SUBNET, "other"),
        ]
    }

    fn refused(&self) -> (&'static str, &'static str) {
        (annotations::NETWORK_TIER, "Bronze")
    }

    fn is_refused(&self, of_service: &BTreeMap<String, String>) -> bool {
        let has = |name: &str| of_service.contains_key(name);
        let is = |name: &str, value: &str| of_service.get(name).is_some_and(|found| found == value);
        let is_internal = has(annotations::LOAD_BALANCER_TYPE);
        let conflicts =
            if is_internal { has(annotations::NETWORK_TIER) } else { is(annotations::GLOBAL_ACCESS, "true") };
        conflicts || is(annotations::NETWORK_TIER, "Bronze")
    }

    /// Google changes no ports of a forwarding rule.
    fn replaces_listeners(&self) -> bool {
        true
    }

    fn load_balancers(&self) -> BTreeMap<Owner, SeenLoadBalancer> {
        let all = self.0.resources();
        let mut found = BTreeMap::<Owner, SeenLoadBalancer>::new();
        let owned = all.values().filter_map(|one| Some((owner_of(&one.data)?, one)));
        for (owner, resource) in owned.filter(|(_, one)| !one.is_leaving) {
            let seen = found.entry(owner.clone()).or_default();
            if resource.kind != Kind::ForwardingRule || !resource.is_ready {
                continue;
            }
            let (rule, mut nodes) = (&resource.data, BTreeSet::new());
            text(rule, "IPAddress").clone_into(&mut seen.address);
            if let Some(service) = all.get(relative(text(rule, "backendService"))) {
                let mut paths = groups(&service.data);
                if let Some(changing) = &service.changing {
                    paths.retain(|path| groups(changing).contains(path));
                }
                nodes.extend(paths.iter().flat_map(|path| self.0.staying(path)));
            }
            for port in texts(rule, "ports").filter_map(|port| port.parse().ok()) {
                seen.listeners.entry(port).or_default().extend(nodes.iter().cloned());
            }
            let firewalls = all.values().filter(|one| one.kind == Kind::Firewall);
            for firewall in firewalls.filter(|one| owner_of(&one.data).as_ref() == Some(&owner)) {
                for content in [Some(&firewall.data), firewall.changing.as_ref()].into_iter().flatten() {
                    if texts(content, "destinationRanges")
                        .any(|range| range.trim_end_matches("/32") == seen.address)
                    {
                        seen.sources.extend(
                            texts(content, "sourceRanges").filter_map(|range| range.parse::<IpNet>().ok()),
                        );
                    }
                }
            }
        }
        found
    }

    fn snapshot(&self) -> Snapshot {
        const LEFT_OUT: [&str; 4] = ["id", "selfLink", "fingerprint", "address"];
        let all = self.0.resources();
        let reserved = all.values().filter(|found| found.kind == Kind::Address);
        let names: BTreeMap<&str, &str> =
            reserved.map(|found| (text(&found.data, "address"), text(&found.data, "name"))).collect();
        let plain = |data: &Map<String, Value>| {
            let mut plain = data.clone();
            plain.retain(|field, _| !LEFT_OUT.contains(&field.as_str()));
            let named = |address: &str| *names.get(address.trim_end_matches("/32")).unwrap_or(&"unreserved");
            if let Some(address) = plain.get_mut("IPAddress") {
                *address = named(address.as_str().unwrap_or_default()).into();
            }
            let destinations: Vec<&str> = texts(data, "destinationRanges").map(named).collect();
            if !destinations.is_empty() {
                plain.insert("destinationRanges".to_owned(), destinations.into());
            }
            for list in plain.values_mut().filter_map(Value::as_array_mut) {
                list.sort_by_key(ToString::to_string);
            }
            Value::from(plain)
        };
        let mut snapshot: Snapshot = all
            .iter()
            .map(|(path, found)| {
                let uids = Self::users(&all, path, found);
                let of: String = uids.iter().flat_map(|uid| [" of \"", uid, "\""]).collect();
                let path = path.trim_start_matches("projects/p/");
                (path.to_owned(), format!("{} {:?}{of}", plain(&found.data), found.endpoints))
            })
            .collect();
        for (number, what) in self.0.wrong().into_iter().enumerate() {
            snapshot.insert(format!("wrong request {number}"), what);
        }
        snapshot
    }

    fn foreign(&self) -> Snapshot {
        let mut all = self.snapshot();
        all.retain(|path, _| last(path) == FOREIGN);
        all
    }

    fn empty(&self) -> Arc<dyn SimulatedCloud> {
        let empty = Self::new();
        empty.0.set_machines(self.0.machines());
        Arc::new(empty)
    }

    fn change_by_hand(&self, number: u64) -> Option<String> {
        let (what, number) = (number % 7, usize::try_from(number / 7 % 1_000_000).unwrap_or_default());
        let kind = match what {
            0 | 1 => Kind::Firewall,
            2 => Kind::ForwardingRule,
            3 | 4 => Kind::Group,
            5 => Kind::HealthCheck,
            _ => Kind::BackendService,
        };
        let all = self.owned(kind);
        let path = all.get(number % all.len().max(1))?.clone();
        let zone = path.split('/').nth(3).unwrap_or_default();
        let by_hand = self.0.machines().get(&format!("{PROJECT}/zones/{zone}/instances/{BY_HAND}")).cloned();
        let mut done = String::new();
        let is_free = self.0.change(&path, |found| {
            let name = text(&found.data, "name").to_owned();
            let mut set = |field: &str, value: Value| {
                done = format!("{field} of {name}");
                found.data.insert(field.to_owned(), value);
            };
            match what {
                0 | 2 => {
                    done = format!("no {} {name}", kind.collection());
                    return None;
                }
                1 => set("sourceRanges", json!(["192.0.2.0/24"])),
                3 => {
                    done = format!("a VM in {path}");
                    found.endpoints.insert(BY_HAND.to_owned(), by_hand.unwrap_or_default());
                }
                4 => {
                    if let Some((gone, _)) = found.endpoints.pop_first() {
                        done = format!("{gone} not in {path}");
                    }
                }
                5 => set("healthyThreshold", json!(9)),
                _ => set("connectionDraining", json!({ "drainingTimeoutSec": 5 })),
            }
            Some(())
        });
        (is_free && !done.is_empty()).then_some(done)
    }
}
