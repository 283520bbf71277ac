// SPDX-License-Identifier: Apache-2.0
//! The OpenStack in memory for the controller's simulation: the provider of each process on it, over the simulation's network, and a look
//! from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response, StatusCode};
use ipnet::{IpNet, Ipv4Net};
use serde_json::{Value, json};
use steerage_provider_api::{Owner, Provider};
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
use crate::paced::Paced;
use crate::provider::OpenStack;
use crate::scripted::Scripted;
use crate::types::Balancer;

/// A part of the name of what others made.
const FOREIGN: &str = "of-others";
/// What of an object depends on history, or is where it is by its place in the snapshot.
const LEFT_OUT: [&str; 18] = [
    "id",
    "created_at",
    "default_pool_id",
    "floating_ip_address",
    "healthmonitor_id",
    "listeners",
    "loadbalancer_id",
    "loadbalancers",
    "members",
    "operating_status",
    "pool_id",
    "pools",
    "port_id",
    "provisioning_status",
    "revision_number",
    "updated_at",
    "vip_address",
    "vip_port_id",
];

/// A project of OpenStack for the controller's simulation.
pub struct SimulatedOpenStack(Scripted);

fn config() -> Config {
    Config {
        cluster: ClusterId { name: "simulated".to_owned(), uid: "cluster-1".to_owned() },
        subnet: "subnet".to_owned(),
        member_subnet: "members".to_owned(),
        ipv6_subnet: None,
        ipv6_member_subnet: None,
        security_group: None,
        node_ports: 30_000..=32_767,
        floating_network: Some("public".to_owned()),
        shared_load_balancers: BTreeMap::new(),
        adopt: None,
        provider: "amphora".to_owned(),
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
        let (cloud, name) = (self.cloud.clone(), call.name());
        let carried = CarriedCall { name: call.action, is_write: call.method != Method::GET };
        match carry(&*self.network, carried, move || cloud.at_once(&call)).await {
            Ok(answer) => answer,
            Err(CallFault::Broken) => Err(CallError::unusable(name, "connection closed")),
            Err(CallFault::Throttled) => {
                let mut refused = Response::new(json!({ "faultstring": "too many requests" }).to_string());
                *refused.status_mut() = StatusCode::TOO_MANY_REQUESTS;
                Err(CallError::answered(name, &refused))
            }
        }
    }

    async fn project(&self) -> Result<Option<String>> {
        self.cloud.project().await
    }
}

/// Without what depends on history.
fn plain(object: &Value) -> Value {
    let fields = object.as_object().into_iter().flatten();
    let kept = fields.filter(|(key, value)| !LEFT_OUT.contains(&key.as_str()) && !value.is_null());
    kept.map(|(key, value)| {
        let mut value = value.clone();
        if let Some(all) = value.as_array_mut() {
            all.sort_by_key(ToString::to_string);
        }
        (key.clone(), value)
    })
    .collect()
}

/// The members of a pool, in any order.
fn members(pool: &Value) -> Value {
    let all = pool["members"].as_array().into_iter().flatten();
    let mut all: Vec<Value> = all.map(plain).collect();
    all.sort_by_key(ToString::to_string);
    all.into()
}

impl SimulatedOpenStack {
    /// A project with nothing of the cluster.
    pub fn new() -> Self {
        let cloud = Scripted::strict();
        let pool = json!({ "name": FOREIGN, "protocol": "TCP", "lb_algorithm": "ROUND_ROBIN" });
        let listener =
            json!({ "name": FOREIGN, "protocol": "TCP", "protocol_port": 80, "default_pool": pool });
        let balancer = json!({ "name": FOREIGN, "tags": ["team=a"], "vip_subnet_id": "subnet", "listeners": [listener] });
        cloud.add("loadbalancers", &balancer);
        cloud.add("floatingips", &json!({ "description": FOREIGN, "floating_network_id": "public" }));
        Self(cloud)
    }

    /// The load balancers that nobody deletes, with the owner of those of the cluster.
    fn balancers(&self) -> Vec<(Value, Option<Owner>)> {
        let mut all = self.0.all("loadbalancers");
        all.retain(|found| found["provisioning_status"] != "PENDING_DELETE");
        let of = |found: &Value| {
            let balancer: Balancer = serde_json::from_value(found.clone()).ok()?;
            marks::owner(&config().cluster, &balancer)
        };
        all.into_iter()
            .map(|found| {
                let owner = of(&found);
                (found, owner)
            })
            .collect()
    }

    fn parts(&self, kind: &str, field: &str, id: &Value) -> Vec<Value> {
        let mut all = self.0.all(kind);
        all.retain(|found| found[field] == *id);
        all
    }
}

impl Default for SimulatedOpenStack {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedCloud for SimulatedOpenStack {
    fn provider(&self, network: Arc<dyn Network>) -> Arc<dyn Provider> {
        let calls = Arc::new(Linked { cloud: self.0.clone(), network });
        Arc::new(OpenStack::over(config(), Arc::new(Paced::new(calls, ApiMetrics::default()))))
    }

    fn provider_id(&self, node: &str) -> String {
        format!("openstack:///{node}")
    }

    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[
            (annotations::INTERNAL, "true"),
            (annotations::LB_METHOD, "LEAST_CONNECTIONS"),
            (annotations::CONNECTION_LIMIT, "100"),
            (annotations::PROXY_PROTOCOL, "v2"),
        ]
    }

    fn refused(&self) -> (&'static str, &'static str) {
        (annotations::CONNECTION_LIMIT, "many")
    }

    fn load_balancers(&self) -> BTreeMap<Owner, SeenLoadBalancer> {
        let mut found = BTreeMap::<Owner, SeenLoadBalancer>::new();
        for (balancer, owner) in self.balancers() {
            let Some(owner) = owner else { continue };
            let seen = found.entry(owner).or_default();
            let floating = self.parts("floatingips", "port_id", &balancer["vip_port_id"]);
            let address = floating.first().map_or(&balancer["vip_address"], |ip| &ip["floating_ip_address"]);
            address.as_str().unwrap_or_default().clone_into(&mut seen.address);
            for listener in self.parts("listeners", "loadbalancer_id", &balancer["id"]) {
                let port = listener["protocol_port"].as_u64().and_then(|port| u16::try_from(port).ok());
                let nodes = seen.listeners.entry(port.unwrap_or_default()).or_default();
                for pool in self.parts("pools", "id", &listener["default_pool_id"]) {
                    let members = pool["members"].as_array().into_iter().flatten();
                    nodes.extend(members.filter_map(|member| member["name"].as_str().map(str::to_owned)));
                }
                match listener["allowed_cidrs"].as_array().filter(|all| !all.is_empty()) {
                    None => drop(seen.sources.insert(IpNet::V4(Ipv4Net::default()))),
                    Some(all) => {
                        seen.sources
                            .extend(all.iter().filter_map(|range| range.as_str()?.parse::<IpNet>().ok()));
                    }
                }
            }
        }
        found
    }

    fn snapshot(&self) -> Snapshot {
        let mut all = Snapshot::new();
        for (balancer, owner) in self.balancers() {
            let of = owner.map_or_else(String::new, |owner| format!(" of \"{}\"", owner.uid));
            let name = balancer["name"].to_string();
            let mut add = |what: String, content: &Value| {
                let copies =
                    (1..).map(|copy| if copy == 1 { what.clone() } else { format!("{what}, {copy}") });
                let free = copies.into_iter().find(|key| !all.contains_key(key));
                free.map(|key| all.insert(key, format!("{content}{of}")));
            };
            add(format!("load balancer {name}"), &plain(&balancer));
            let mut used = BTreeSet::new();
            for listener in self.parts("listeners", "loadbalancer_id", &balancer["id"]) {
                let which = format!("{name} {} {}", listener["protocol"], listener["protocol_port"]);
                add(format!("listener {which}"), &plain(&listener));
                for pool in self.parts("pools", "id", &listener["default_pool_id"]) {
                    used.insert(pool["id"].to_string());
                    add(format!("pool {which}"), &plain(&pool));
                    add(format!("members {which}"), &members(&pool));
                    for monitor in self.parts("healthmonitors", "pool_id", &pool["id"]) {
                        add(format!("health monitor {which}"), &plain(&monitor));
                    }
                }
            }
            for pool in self.parts("pools", "loadbalancer_id", &balancer["id"]) {
                if !used.contains(&pool["id"].to_string()) {
                    add(format!("pool {name} without a listener"), &plain(&pool));
                }
            }
        }
        for ip in self.0.all("floatingips") {
            let of = marks::floating_owner(&config().cluster, ip["description"].as_str().unwrap_or_default());
            let of = of.map_or_else(String::new, |owner| format!(" of \"{}\"", owner.uid));
            let is_used = !ip["port_id"].is_null();
            all.insert(
                format!("floating IP {}", ip["description"]),
                format!("{} used {is_used}{of}", plain(&ip)),
            );
        }
        all
    }

    fn foreign(&self) -> Snapshot {
        let mut all = self.snapshot();
        all.retain(|name, _| name.contains(FOREIGN));
        all
    }

    fn empty(&self) -> Arc<dyn SimulatedCloud> {
        Arc::new(Self::new())
    }

    fn change_by_hand(&self, number: u64) -> Option<String> {
        if !self.0.is_settled() {
            return None;
        }
        let chosen = |all: Vec<Value>| {
            let count = u64::try_from(all.len()).ok().filter(|count| *count > 0)?;
            all.into_iter().nth(usize::try_from((number / 3) % count).unwrap_or_default())
        };
        let ours = self.balancers().into_iter().filter(|(_, owner)| owner.is_some());
        let balancer = chosen(ours.map(|(balancer, _)| balancer).collect())?;
        match number % 3 {
            0 => {
                let listener = chosen(self.parts("listeners", "loadbalancer_id", &balancer["id"]))?;
                self.0.remove("listeners", listener["id"].as_str()?);
                Some(format!("no listener {} {}", balancer["name"], listener["protocol_port"]))
            }
            1 => {
                let pool = chosen(self.parts("pools", "loadbalancer_id", &balancer["id"]))?;
                let monitor = chosen(self.parts("healthmonitors", "pool_id", &pool["id"]))?;
                self.0.remove("healthmonitors", monitor["id"].as_str()?);
                self.0.set("pools", ("id", pool["id"].as_str()?), &json!({ "healthmonitor_id": null }));
                Some(format!("no health monitor of {}", pool["name"]))
            }
            _ => {
                let pool = chosen(self.parts("pools", "loadbalancer_id", &balancer["id"]))?;
                let mut members = pool["members"].as_array().cloned().unwrap_or_default();
                if members.iter().any(|member| member["name"] == "by-hand") {
                    return None;
                }
                members.push(json!({ "name": "by-hand", "address": "10.240.0.200", "protocol_port": 30080, "weight": 1 }));
                self.0.set("pools", ("id", pool["id"].as_str()?), &json!({ "members": members }));
                Some(format!("a member of {}", pool["name"]))
            }
        }
    }
}
