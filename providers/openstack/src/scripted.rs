// SPDX-License-Identifier: Apache-2.0
//! A cloud in memory for tests of what the real services never do on request: failures at a chosen call, `ERROR` while serving, and
//! objects that others change in between. The controller's simulation runs on it, too.

mod octavia;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response, StatusCode};
use serde_json::{Map, Value, json};
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress, Provider as _};

use crate::client::{Call, Calls};
#[cfg(test)]
use crate::config::Config;
use crate::error::{CallError, Result};
#[cfg(test)]
use crate::options::tests::config;
use crate::provider::OpenStack;

/// The project of the credentials.
const PROJECT: &str = "p1";

/// What happens to the next request of an action.
pub(crate) struct Fault {
    action: &'static str,
    /// The error; without one, the answer is lost.
    answer: Option<(u16, String)>,
    is_done: bool,
}

#[derive(Default)]
struct Objects {
    next: usize,
    all: Vec<(String, Map<String, Value>)>,
    writes: Vec<String>,
    calls: Vec<String>,
    faults: VecDeque<Fault>,
    /// A floating IP that cannot be attached.
    unattachable: Option<String>,
    /// A kind whose lists are empty.
    hidden: Option<&'static str>,
    hanging: Option<&'static str>,
    /// Changes of parts that Octavia accepts and its worker fails.
    failing: Option<&'static str>,
    /// When what Octavia does to a load balancer is complete, by ID; `None` if everything is complete at once, and nothing is refused.
    pending: Option<BTreeMap<String, tokio::time::Instant>>,
}

/// The cloud.
#[derive(Clone, Default)]
pub(crate) struct Scripted(Arc<Mutex<Objects>>);

impl Scripted {
    /// One with the subnets of VIPs and of nodes.
    pub(crate) fn new() -> Self {
        let cloud = Self::default();
        for id in ["subnet", "members"] {
            cloud.add("subnets", &json!({ "id": id, "cidr": "10.0.0.0/24", "ip_version": 4 }));
        }
        cloud
    }

    #[cfg(test)]
    pub(crate) fn provider(&self) -> OpenStack {
        self.provider_with(|_| {})
    }

    #[cfg(test)]
    pub(crate) fn provider_with(&self, change: impl FnOnce(&mut Config)) -> OpenStack {
        let mut config = config("amphora");
        config.floating_network = Some("net".to_owned());
        config.poll = Duration::ZERO;
        change(&mut config);
        OpenStack::over(config, Arc::new(self.clone()))
    }

    /// The next request of this action fails; if `is_done`, it was made nevertheless.
    pub(crate) fn fail(&self, action: &'static str, status: u16, message: &str) {
        let answer = Some((status, message.to_owned()));
        self.0.lock().unwrap().faults.push_back(Fault { action, answer, is_done: false });
    }

    /// The next request of this action is made, and nobody answers.
    pub(crate) fn hang(&self, action: &'static str) {
        self.0.lock().unwrap().hanging = Some(action);
    }

    pub(crate) fn remove(&self, kind: &str, id: &str) {
        self.0.lock().unwrap().delete(kind, id);
    }

    /// The next request of this action is made, and its answer is lost.
    pub(crate) fn lose(&self, action: &'static str) {
        self.0.lock().unwrap().faults.push_back(Fault { action, answer: None, is_done: true });
    }

    /// Refuses to attach a floating IP.
    pub(crate) fn break_connecting(&self, id: &str) {
        self.0.lock().unwrap().unattachable = Some(id.to_owned());
    }

    /// Lists of a kind do not show what was just created.
    pub(crate) fn hide(&self, kind: &'static str) {
        self.0.lock().unwrap().hidden = Some(kind);
    }

    pub(crate) fn show(&self) {
        self.0.lock().unwrap().hidden = None;
    }

    /// From now on, Octavia accepts changes of this action, and its worker fails them: the part is in `ERROR`, the load balancer `ACTIVE`.
    pub(crate) fn break_worker(&self, action: Option<&'static str>) {
        self.0.lock().unwrap().failing = action;
    }

    pub(crate) fn mend(&self) {
        self.0.lock().unwrap().unattachable = None;
    }

    /// Objects of a kind, such as `floatingips`.
    pub(crate) fn all(&self, kind: &str) -> Vec<Value> {
        let objects = self.0.lock().unwrap();
        objects.all.iter().filter(|(of, _)| of == kind).map(|(_, found)| found.clone().into()).collect()
    }

    /// Changes the objects of a kind whose field has this value.
    pub(crate) fn set(&self, kind: &str, (key, value): (&str, &str), changes: &Value) {
        let mut objects = self.0.lock().unwrap();
        for (_, found) in
            objects.all.iter_mut().filter(|(of, it)| of == kind && it.get(key) == Some(&json!(value)))
        {
            found.extend(changes.as_object().unwrap().clone());
        }
    }

    pub(crate) fn add(&self, kind: &str, body: &Value) -> String {
        self.0.lock().unwrap().create(kind, body)
    }

    /// The writes since the last question.
    pub(crate) fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().writes)
    }

    fn answers_never(&self, call: &Call) -> bool {
        let mut objects = self.0.lock().unwrap();
        let is_it = objects.hanging.take_if(|action| *action == call.action).is_some();
        if is_it {
            let _ = objects.answer(call);
        }
        is_it
    }

    /// All calls since the last question.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }
}

/// Applies until it is complete.
pub(crate) async fn settle(provider: &OpenStack, lb: &LoadBalancer) -> Result<Outcome, Error> {
    for _ in 0..60 {
        let outcome = provider.apply(lb, Compare::Remembered).await?;
        if outcome.progress == Progress::Done {
            return Ok(outcome);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("it does not end");
}

/// The IDs of the load balancers.
pub(crate) fn ids(cloud: &Scripted) -> Vec<String> {
    cloud.all("loadbalancers").iter().map(|found| found["id"].as_str().unwrap().to_owned()).collect()
}

/// Deletes until it is complete.
pub(crate) async fn deleted(provider: &OpenStack, owner: &Owner) {
    for _ in 0..60 {
        if provider.delete(owner).await.unwrap() == Progress::Done {
            return;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("it does not end");
}

impl Objects {
    fn create(&mut self, kind: &str, body: &Value) -> String {
        self.next += 1;
        let id = format!("{kind}-{}", self.next);
        let mut object = body.as_object().unwrap().clone();
        let id = object.entry("id").or_insert_with(|| id.clone().into()).as_str().unwrap_or(&id).to_owned();
        let mut defaults = json!({ "project_id": PROJECT, "provisioning_status": "ACTIVE", "operating_status": "ONLINE", "admin_state_up": true });
        match kind {
            "loadbalancers" => {
                defaults["vip_address"] = self.free(kind, "vip_address", "10.0.0", 100).into();
                defaults["vip_port_id"] = format!("port-of-{id}").into();
                let [hour, minute, second] = [self.next / 3600, self.next / 60 % 60, self.next % 60];
                defaults["created_at"] = format!("2026-01-01T{hour:02}:{minute:02}:{second:02}").into();
            }
            "floatingips" => {
                defaults["floating_ip_address"] =
                    self.free(kind, "floating_ip_address", "203.0.113", 0).into();
                defaults["port_id"] = Value::Null;
                defaults["revision_number"] = 1.into();
            }
            "listeners" => defaults["default_pool_id"] = Value::Null,
            "pools" => defaults["session_persistence"] = Value::Null,
            _ => {}
        }
        for (key, value) in defaults.as_object().unwrap() {
            object.entry(key.clone()).or_insert_with(|| value.clone());
        }
        if let Some(of) = object.get("loadbalancer_id").cloned() {
            object.insert("loadbalancers".to_owned(), json!([{ "id": of }]));
        }
        for listener in take(&mut object, "listeners") {
            let mut listener = listener;
            listener["loadbalancer_id"] = id.clone().into();
            if let Some(mut pool) = listener.as_object_mut().unwrap().remove("default_pool") {
                pool["loadbalancer_id"] = id.clone().into();
                let monitor = pool.as_object_mut().unwrap().remove("healthmonitor");
                let pool = self.create("pools", &pool);
                if let Some(mut monitor) = monitor {
                    monitor["pool_id"] = pool.clone().into();
                    self.create("healthmonitors", &monitor);
                }
                listener["default_pool_id"] = pool.into();
            }
            self.create("listeners", &listener);
        }
        if let Some(pool) = object.get("pool_id").cloned() {
            object.insert("pools".to_owned(), json!([{ "id": pool }]));
            let pool = self.find("pools", pool.as_str().unwrap()).unwrap();
            pool.insert("healthmonitor_id".to_owned(), id.clone().into());
        }
        self.all.push((kind.to_owned(), object));
        id
    }

    /// An address that no object of the kind has, of those that end with more than `above`.
    fn free(&self, kind: &str, field: &str, prefix: &str, above: usize) -> String {
        let count = 254 - above;
        let all =
            (0..count).map(|number| format!("{prefix}.{}", above + 1 + (self.next - 1 + number) % count));
        let is_used = |address: &String| {
            self.all.iter().any(|(of, found)| of == kind && found.get(field) == Some(&json!(address)))
        };
        all.into_iter().find(|address| !is_used(address)).unwrap()
    }

    fn find(&mut self, kind: &str, id: &str) -> Option<&mut Map<String, Value>> {
        let is_it = |(of, found): &&mut (String, Map<String, Value>)| {
            of == kind && found.get("id") == Some(&json!(id))
        };
        self.all.iter_mut().find(is_it).map(|(_, found)| found)
    }

    /// Octavia's and Neutron's filters.
    fn list(&self, kind: &str, query: &str) -> Vec<Value> {
        let filter: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        let passes = |found: &Map<String, Value>| {
            filter.iter().all(|(key, value)| match key.as_str() {
                "tags" => value.split(',').all(|tag| {
                    found.get("tags").and_then(Value::as_array).is_some_and(|tags| tags.contains(&json!(tag)))
                }),
                key => found.get(key) == Some(&json!(value)),
            })
        };
        let found = self.all.iter().filter(|(of, found)| of == kind && passes(found));
        found.map(|(_, found)| found.clone().into()).collect()
    }

    fn delete(&mut self, kind: &str, id: &str) {
        let of = |found: &Map<String, Value>, key: &str| found.get(key) == Some(&json!(id));
        if kind == "loadbalancers" {
            let ports: Vec<Value> = self
                .all
                .iter()
                .filter(|(_, found)| of(found, "id"))
                .map(|(_, it)| it["vip_port_id"].clone())
                .collect();
            for (_, ip) in self
                .all
                .iter_mut()
                .filter(|(kind, ip)| kind == "floatingips" && ports.contains(&ip["port_id"]))
            {
                ip.insert("port_id".to_owned(), Value::Null);
            }
        }
        self.all.retain(|(_, found)| !of(found, "id") && !of(found, "loadbalancer_id"));
    }

    /// The answer to a creation has all parts.
    fn show_parts(&mut self, balancer: &mut Value) {
        let of = |kind: &str| -> Vec<Value> {
            let is_its = |(of, found): &&(String, Map<String, Value>)| {
                of == kind && found.get("loadbalancer_id") == Some(&balancer["id"])
            };
            self.all.iter().filter(is_its).map(|(_, found)| found.clone().into()).collect()
        };
        let (listeners, mut pools) = (of("listeners"), of("pools"));
        for pool in &mut pools {
            let monitor = pool["healthmonitor_id"].as_str().map(ToOwned::to_owned);
            let monitor = monitor.and_then(|id| self.find("healthmonitors", &id).cloned());
            pool["healthmonitor"] = monitor.into();
            if pool["members"].is_null() {
                pool["members"] = json!([]);
            }
        }
        (balancer["listeners"], balancer["pools"]) = (listeners.into(), pools.into());
    }

    /// The listeners in Octavia's status tree.
    fn statuses(&self, balancer: &str) -> Vec<Value> {
        let of = |kind: &str, key: &str, value: &Value| -> Vec<Map<String, Value>> {
            let is_it =
                |(of, found): &&(String, Map<String, Value>)| of == kind && found.get(key) == Some(value);
            self.all.iter().filter(is_it).map(|(_, found)| found.clone()).collect()
        };
        let shown = |found: &Map<String, Value>| {
            let keys = ["id", "name", "provisioning_status", "operating_status"];
            let pairs = keys.iter().filter_map(|key| Some(((*key).to_owned(), found.get(*key)?.clone())));
            pairs.collect::<Map<String, Value>>()
        };
        let listeners = of("listeners", "loadbalancer_id", &json!(balancer)).into_iter().map(|listener| {
            let pools = of("pools", "id", &listener["default_pool_id"]).into_iter().map(|found| {
                let mut pool = shown(&found);
                let mut members = found.get("members").and_then(Value::as_array).cloned().unwrap_or_default();
                for member in &mut members {
                    member["operating_status"] = "ONLINE".into();
                }
                pool.insert("members".to_owned(), members.into());
                let monitor =
                    found.get("healthmonitor_id").and_then(|id| of("healthmonitors", "id", id).pop());
                pool.insert("health_monitor".to_owned(), json!(monitor.as_ref().map(shown)));
                pool
            });
            let pools: Vec<_> = pools.collect();
            let mut listener = shown(&listener);
            listener.insert("pools".to_owned(), json!(pools));
            Value::from(listener)
        });
        listeners.collect()
    }

    fn answer(&mut self, call: &Call) -> std::result::Result<Value, (u16, String)> {
        let path = call.path.trim_start_matches("/v2.0/lbaas/").trim_start_matches("/v2.0/");
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let parts: Vec<&str> = path.split('/').collect();
        let singular = |kind: &str| kind.strip_suffix('s').unwrap_or(kind).replace('-', "_");
        let plural = |kind: &str| kind.replace('-', "_");
        let missing = || (404, "not found".to_owned());
        let status = if self.failing == Some(call.action) { "ERROR" } else { "ACTIVE" };
        let changes =
            call.body.as_ref().map(|body| body.as_object().unwrap().values().next().unwrap().clone());
        match (&call.method, parts.as_slice()) {
            (&Method::GET, [kind]) if self.hidden == Some(*kind) => Ok(json!({ plural(kind): [] })),
            (&Method::GET, [kind]) => Ok(json!({ plural(kind): self.list(kind, query) })),
            (&Method::GET, [_, id, "members"]) => {
                let members = self.find("pools", id).ok_or_else(missing)?.get("members").cloned();
                Ok(json!({ "members": members.unwrap_or_else(|| json!([])) }))
            }
            (&Method::GET, [kind, id, "status"]) => {
                self.find(kind, id).ok_or_else(missing)?;
                Ok(json!({ "statuses": { "loadbalancer": { "listeners": self.statuses(id) } } }))
            }
            (&Method::GET, [kind, id]) => {
                Ok(json!({ singular(kind): self.find(kind, id).ok_or_else(missing)? }))
            }
            (&Method::PUT, [_, id, "members"]) => {
                let pool = self.find("pools", id).ok_or_else(missing)?;
                let mut members = changes.unwrap().as_array().unwrap().clone();
                if status == "ERROR" {
                    // Those that go are still there.
                    let key = |member: &Value| (member["address"].clone(), member["protocol_port"].clone());
                    let old = pool.get("members").and_then(Value::as_array).cloned().unwrap_or_default();
                    let going = old.into_iter().filter(|old| members.iter().all(|new| key(new) != key(old)));
                    members.extend(going.collect::<Vec<_>>());
                }
                for member in &mut members {
                    member["provisioning_status"] = status.into();
                }
                pool.insert("members".to_owned(), members.into());
                Ok(Value::Null)
            }
            (&Method::PUT, [kind, id]) => {
                if *kind == "floatingips" {
                    let port = &changes.as_ref().unwrap()["port_id"];
                    let used =
                        self.list(kind, "").into_iter().any(|ip| ip["port_id"] == *port && ip["id"] != **id);
                    let is_broken = self.unattachable.as_deref() == Some(*id);
                    if (used || is_broken) && !port.is_null() {
                        return Err((409, "that fixed IP already has a floating IP".to_owned()));
                    }
                }
                let found = self.find(kind, id).ok_or_else(missing)?;
                if let Some(revision) = found.get("revision_number").and_then(Value::as_u64) {
                    if call.if_match.is_some_and(|wanted| wanted != revision) {
                        return Err((412, "Constrained to another revision".to_owned()));
                    }
                    found.insert("revision_number".to_owned(), (revision + 1).into());
                }
                found.extend(changes.unwrap().as_object().unwrap().clone());
                if ["listeners", "pools", "healthmonitors"].contains(kind) {
                    found.insert("provisioning_status".to_owned(), status.into());
                }
                Ok(json!({ singular(kind): found }))
            }
            (&Method::POST, [kind]) => {
                let changes = changes.unwrap();
                if *kind == "floatingips" && !changes["port_id"].is_null() {
                    let port = &changes["port_id"];
                    if self.list(kind, "").into_iter().any(|ip| ip["port_id"] == *port) {
                        return Err((409, "that fixed IP already has a floating IP".to_owned()));
                    }
                }
                let id = self.create(kind, &changes);
                if status == "ERROR" {
                    self.find(kind, &id)
                        .ok_or_else(missing)?
                        .insert("provisioning_status".to_owned(), status.into());
                }
                let mut made = Value::from(self.find(kind, &id).unwrap().clone());
                if *kind == "loadbalancers" {
                    self.show_parts(&mut made);
                }
                Ok(json!({ singular(kind): made }))
            }
            (&Method::DELETE, [kind, id]) => {
                let found = self.find(kind, id).ok_or_else(missing)?;
                if status == "ERROR" {
                    found.insert("provisioning_status".to_owned(), status.into());
                } else {
                    self.delete(kind, id);
                }
                Ok(Value::Null)
            }
            _ => Err((400, format!("{} {}", call.method, call.path))),
        }
    }
}

fn take(object: &mut Map<String, Value>, key: &str) -> Vec<Value> {
    object.remove(key).and_then(|found| found.as_array().cloned()).unwrap_or_default()
}

#[async_trait]
impl Calls for Scripted {
    async fn send(&self, call: Call) -> Result<Value> {
        if self.answers_never(&call) {
            std::future::pending::<()>().await;
        }
        // Others ask meanwhile.
        tokio::task::yield_now().await;
        self.at_once(&call)
    }

    async fn project(&self) -> Result<Option<String>> {
        Ok(Some(PROJECT.to_owned()))
    }
}

impl Scripted {
    /// What a request does, and its answer.
    pub(crate) fn at_once(&self, call: &Call) -> Result<Value> {
        let failed = |(status, message): (u16, String)| {
            let body = json!({ "faultstring": message }).to_string();
            let status = StatusCode::from_u16(status).unwrap();
            CallError::answered(call.name(), &Response::builder().status(status).body(body).unwrap())
        };
        let mut objects = self.0.lock().unwrap();
        objects.calls.push(call.action.to_owned());
        if call.method != Method::GET {
            objects.writes.push(call.action.to_owned());
        }
        let index = objects.faults.iter().position(|fault| fault.action == call.action);
        let Some(fault) = index.and_then(|index| objects.faults.remove(index)) else {
            return objects.checked_answer(call).map_err(failed);
        };
        if fault.is_done {
            let _ = objects.answer(call);
        }
        Err(match fault.answer {
            Some(answer) => failed(answer),
            None => CallError::unusable(call.name(), "no answer in time"),
        })
    }
}
