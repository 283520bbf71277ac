// SPDX-License-Identifier: Apache-2.0
//! A Compute Engine in memory, on tokio's clock: changes are operations that take time, references must exist, what is used cannot be deleted,
//! and what changes takes no other change. It knows the requests of this crate and nothing else, and notes those that GCE would find wrong.
//! For the controller's simulation, and for tests of what the stand-in behind HTTP does not do on request.

mod addresses;
mod content;
mod endpoints;
mod fields;
mod lists;
mod operations;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::client::{Call, Calls};
use crate::error::{CallError, Result};
use crate::object::{Kind, url};
use operations::{Effect, Operation};

/// Where everything is.
pub(crate) const PROJECT: &str = "projects/p";
pub(crate) const REGION: &str = "projects/p/regions/r";
pub(crate) const ZONES: [&str; 2] = ["r-a", "r-b"];
pub(crate) const NETWORK: &str = "projects/p/global/networks/n";
/// The subnets of the network, each with what its addresses begin with.
pub(crate) const SUBNETS: [(&str, &str); 2] = [
    ("projects/p/regions/r/subnetworks/s", "10.128.0"),
    ("projects/p/regions/r/subnetworks/other", "10.129.0"),
];

/// What GCE refuses.
#[derive(Clone, Debug)]
struct Refusal {
    status: u16,
    reason: &'static str,
    message: String,
    /// Whether no correct client asks for it.
    is_wrong: bool,
}

fn refused(status: u16, reason: &'static str, message: impl Into<String>) -> Refusal {
    Refusal { status, reason, message: message.into(), is_wrong: false }
}

fn wrong(what: impl Into<String>) -> Refusal {
    Refusal { is_wrong: true, ..refused(400, "invalid", what) }
}

fn not_found(path: &str) -> Refusal {
    refused(404, "notFound", format!("The resource '{path}' was not found"))
}

type Answered<T = Value> = std::result::Result<T, Refusal>;

/// A resource.
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    pub(crate) kind: Kind,
    id: u64,
    pub(crate) data: Map<String, Value>,
    /// What it will be when its operation ends.
    pub(crate) changing: Option<Map<String, Value>>,
    /// When others see it.
    seen_at: Instant,
    /// Whether it can be used.
    pub(crate) is_ready: bool,
    /// Whether it is being deleted.
    pub(crate) is_leaving: bool,
    /// Whether an operation keeps others from changing it.
    pub(crate) is_busy: bool,
    /// Of a group: addresses by VM.
    pub(crate) endpoints: BTreeMap<String, String>,
}

impl Resource {
    fn is_seen(&self) -> bool {
        self.seen_at <= Instant::now()
    }
}

struct Store {
    began: Instant,
    number: u64,
    /// By path.
    resources: BTreeMap<String, Resource>,
    /// Addresses of VMs by path.
    machines: BTreeMap<String, String>,
    /// By path, in the order in which they were begun.
    operations: Vec<Operation>,
    /// The last external address.
    external: u16,
    /// What operations on forwarding rules take more than others.
    rules_take: Duration,
    /// Requests that no correct client makes.
    wrong: Vec<String>,
}

/// The cloud.
#[derive(Clone)]
pub(crate) struct Scripted(Arc<Mutex<Store>>);

impl Scripted {
    /// A project with a network and nothing in it.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Store {
            began: Instant::now(),
            number: 0,
            resources: BTreeMap::new(),
            machines: BTreeMap::new(),
            operations: Vec::new(),
            external: 0,
            rules_take: Duration::ZERO,
            wrong: Vec::new(),
        })))
    }

    /// As it is now.
    fn store(&self) -> MutexGuard<'_, Store> {
        let mut store = self.0.lock().unwrap();
        store.settle();
        store
    }

    /// What a request does, and its answer.
    pub(crate) fn at_once(&self, call: &Call) -> Result<Value> {
        let mut store = self.store();
        store.answer(call).map_err(|refusal| {
            if refusal.is_wrong {
                let body = call.body.clone().unwrap_or_default();
                store.wrong.push(format!("{} {}: {} {body}", call.action, call.path, refusal.message));
            }
            CallError::answered(call.action, &response(&refusal))
        })
    }

    /// The requests that no correct client makes.
    pub(crate) fn wrong(&self) -> Vec<String> {
        self.store().wrong.clone()
    }

    /// The resources that exist, by path.
    pub(crate) fn resources(&self) -> BTreeMap<String, Resource> {
        self.store().resources.clone()
    }

    /// The VMs of a group that stay when all that runs has ended.
    pub(crate) fn staying(&self, path: &str) -> Vec<String> {
        let store = self.store();
        let Some(group) = store.resources.get(path) else { return Vec::new() };
        let leaving =
            store.operations.iter().filter(|operation| !operation.is_done).filter_map(|operation| {
                match &operation.effect {
                    Effect::Detach(of, names) if *of == group.id => Some(names),
                    _ => None,
                }
            });
        let leaving: Vec<&String> = leaving.flatten().collect();
        group.endpoints.keys().filter(|name| !leaving.contains(name)).cloned().collect()
    }

    /// Puts a resource in place, past all operations.
    pub(crate) fn put(&self, kind: Kind, path: &str, data: &Value) {
        let data = data.as_object().unwrap().clone();
        let mut store = self.store();
        let mut made = store.made(kind, path, data, Instant::now());
        made.is_ready = true;
        made.is_busy = false;
        store.resources.insert(path.to_owned(), made);
    }

    /// Changes a resource as somebody else does; `None` removes it. False if something is being done to it.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Resource) -> Option<()>) -> bool {
        let mut store = self.store();
        let is_free = |found: &&mut Resource| found.is_ready && !found.is_busy && !found.is_leaving;
        let Some(found) = store.resources.get_mut(path).filter(is_free) else { return false };
        if change(found).is_none() {
            store.resources.remove(path);
        } else {
            seal(found.kind, &mut found.data);
        }
        true
    }

    /// A VM runs, or is gone with its endpoints. One that comes again has another address.
    pub(crate) fn set_machine(&self, zone: &str, name: &str, runs: bool) {
        let path = format!("{PROJECT}/zones/{zone}/instances/{name}");
        let mut store = self.store();
        if !runs {
            store.machines.remove(&path);
            let of_zone = format!("{PROJECT}/zones/{zone}/");
            for (_, group) in store.resources.iter_mut().filter(|(path, _)| path.starts_with(&of_zone)) {
                group.endpoints.remove(name);
            }
        } else if !store.machines.contains_key(&path) {
            store.number += 1;
            let number = store.number;
            let mut all = (0..120).map(|step| format!("{}.{}", SUBNETS[0].1, 2 + (number + step) % 120));
            let free = all.find(|address| !store.machines.values().any(|taken| taken == address));
            store.machines.insert(path, free.unwrap());
        }
    }

    /// From now on operations on forwarding rules take so much longer.
    #[cfg(test)]
    pub(crate) fn slow_rules(&self, by: Duration) {
        self.store().rules_take = by;
    }

    /// The VMs with their addresses, by path.
    pub(crate) fn machines(&self) -> BTreeMap<String, String> {
        self.store().machines.clone()
    }

    pub(crate) fn set_machines(&self, machines: BTreeMap<String, String>) {
        self.store().machines = machines;
    }
}

fn response(refusal: &Refusal) -> Response<String> {
    let errors = json!([{ "domain": "global", "reason": refusal.reason, "message": refusal.message }]);
    let body = json!({ "error": { "code": refusal.status, "message": refusal.message, "errors": errors } });
    Response::builder().status(refusal.status).body(body.to_string()).unwrap()
}

/// With a fingerprint, if the kind has one.
fn seal(kind: Kind, data: &mut Map<String, Value>) {
    if !matches!(kind, Kind::BackendService | Kind::ForwardingRule) {
        return;
    }
    data.remove("fingerprint");
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in Value::from(data.clone()).to_string().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    data.insert("fingerprint".to_owned(), format!("{hash:016x}").into());
}

impl Store {
    fn made(&mut self, kind: Kind, path: &str, mut data: Map<String, Value>, seen_at: Instant) -> Resource {
        self.number += 1;
        data.insert("id".to_owned(), self.number.to_string().into());
        data.insert("selfLink".to_owned(), url(path).into());
        seal(kind, &mut data);
        Resource {
            kind,
            id: self.number,
            data,
            changing: None,
            seen_at,
            is_ready: false,
            is_leaving: false,
            is_busy: true,
            endpoints: BTreeMap::new(),
        }
    }

    fn seen(&self, path: &str) -> Answered<&Resource> {
        self.resources.get(path).filter(|found| found.is_seen()).ok_or_else(|| not_found(path))
    }

    fn answer(&mut self, call: &Call) -> Answered {
        let rest = call.path.strip_prefix("projects/p/").ok_or_else(|| not_found(&call.path))?;
        let parts: Vec<&str> = rest.split('/').collect();
        let scope = match parts.as_slice() {
            ["regions", "r"] => {
                let zones: Vec<String> =
                    ZONES.iter().map(|zone| url(&format!("{PROJECT}/zones/{zone}"))).collect();
                return expect(call, "regions.get", &Method::GET)
                    .map(|()| json!({ "name": "r", "zones": zones }));
            }
            ["aggregated", collection] => return self.aggregated(call, collection),
            ["global", ..] => 1,
            ["regions", "r", ..] => 2,
            ["zones", zone, ..] if ZONES.contains(zone) => 2,
            _ => return Err(wrong("there is no such place")),
        };
        let place = format!("{PROJECT}/{}", parts[..scope].join("/"));
        match &parts[scope..] {
            ["operations", _] => self.operation(call),
            ["instances"] if parts[0] == "zones" => self.instances(call, &place),
            [collection, rest @ ..] => {
                let kind = Kind::ALL.into_iter().find(|kind| kind.collection() == *collection);
                let kind = kind.filter(|kind| place_of(*kind) == parts[0]);
                let kind = kind.ok_or_else(|| wrong("there is no such collection"))?;
                self.of_kind(call, kind, rest)
            }
            [] => Err(wrong("there is no such request")),
        }
    }

    fn of_kind(&mut self, call: &Call, kind: Kind, rest: &[&str]) -> Answered {
        let collection = collection(kind);
        let named = |action: &str| format!("{collection}.{action}");
        match (&call.method, rest) {
            (&Method::GET, []) => {
                expect(call, &named("list"), &Method::GET)?;
                self.list(call, kind)
            }
            (&Method::GET, [_]) => {
                expect(call, &named("get"), &Method::GET)?;
                self.seen(&call.path)?;
                Ok(self.shown(&call.path))
            }
            (&Method::POST, []) => {
                expect(call, &named("insert"), &Method::POST)?;
                self.insert(call, kind)
            }
            (&Method::PATCH, [_]) => {
                expect(call, &named("patch"), &Method::PATCH)?;
                self.patch(call, kind)
            }
            (&Method::DELETE, [_]) => {
                expect(call, &named("delete"), &Method::DELETE)?;
                self.delete(call)
            }
            (&Method::POST, [_, action]) => {
                expect(call, &named(action), &Method::POST)?;
                let path = call.path.rsplit_once('/').map_or("", |(path, _)| path);
                match (kind, *action) {
                    (Kind::Group, "attachNetworkEndpoints") => self.attach(call, path),
                    (Kind::Group, "detachNetworkEndpoints") => self.detach(call, path),
                    (Kind::Group, "listNetworkEndpoints") => self.list_endpoints(path),
                    (Kind::BackendService, "getHealth") => self.health(call, path),
                    _ => Err(wrong("there is no such method")),
                }
            }
            _ => Err(wrong("there is no such method")),
        }
    }

    fn insert(&mut self, call: &Call, kind: Kind) -> Answered {
        let body = fields::checked(kind, call.body.as_ref(), false)?;
        let name = body.get("name").and_then(Value::as_str).unwrap_or_default();
        if !fields::is_name(name) {
            return Err(wrong(format!("resource.name: '{name}'")));
        }
        let path = format!("{}/{name}", call.path);
        if self.resources.contains_key(&path) {
            return Err(refused(409, "alreadyExists", format!("The resource '{path}' already exists")));
        }
        let data = self.content(kind, &path, body)?;
        let takes = self.next_time(kind);
        let made = self.made(kind, &path, data, Instant::now() + takes / 5);
        let effect = Effect::Insert(made.id);
        self.resources.insert(path.clone(), made);
        Ok(self.begin("insert", &path, takes, effect))
    }

    fn patch(&mut self, call: &Call, kind: Kind) -> Answered {
        let mut changes = fields::checked(kind, call.body.as_ref(), true)?;
        let found = self.seen(&call.path)?;
        let fingerprint = changes.remove("fingerprint");
        if fingerprint.is_some() && fingerprint.as_ref() != found.data.get("fingerprint") {
            return Err(refused(412, "conditionNotMet", "Invalid fingerprint."));
        }
        let (id, mut data) = (found.id, found.data.clone());
        fields::merge(&mut data, changes);
        let mut data = self.content(kind, &call.path, data)?;
        seal(kind, &mut data);
        self.refuse_if_busy(&call.path)?;
        let found = self.resources.get_mut(&call.path).unwrap();
        found.changing = Some(data);
        found.is_busy = true;
        let takes = self.next_time(kind);
        Ok(self.begin("patch", &call.path, takes, Effect::Update(id)))
    }

    fn delete(&mut self, call: &Call) -> Answered {
        let found = self.seen(&call.path)?;
        let (id, kind) = (found.id, found.kind);
        self.refuse_if_busy(&call.path)?;
        self.refuse_if_used(&call.path)?;
        let found = self.resources.get_mut(&call.path).unwrap();
        (found.is_leaving, found.is_busy) = (true, true);
        let takes = self.next_time(kind);
        Ok(self.begin("delete", &call.path, takes, Effect::Delete(id)))
    }

    fn refuse_if_busy(&self, path: &str) -> Answered<()> {
        match self.resources.get(path) {
            Some(found) if found.is_busy => Err(not_ready(path)),
            _ => Ok(()),
        }
    }

    /// Some changes take longer than others, in an order that repeats.
    fn next_time(&mut self, kind: Kind) -> Duration {
        self.number += 1;
        let more = if kind == Kind::ForwardingRule { self.rules_take } else { Duration::ZERO };
        Duration::from_millis(200 + 300 * (self.number % 7)) + more
    }
}

fn not_ready(path: &str) -> Refusal {
    refused(400, "resourceNotReady", format!("The resource '{path}' is not ready"))
}

/// The name of a kind in methods.
fn collection(kind: Kind) -> &'static str {
    match kind {
        Kind::HealthCheck => "regionHealthChecks",
        Kind::BackendService => "regionBackendServices",
        kind => kind.collection(),
    }
}

/// Where resources of a kind are.
fn place_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Firewall => "global",
        Kind::Group => "zones",
        _ => "regions",
    }
}

/// The request must be the one that its name says.
fn expect(call: &Call, action: &str, method: &Method) -> Answered<()> {
    if call.action == action && call.method == *method {
        return Ok(());
    }
    Err(wrong(format!("the request is called {}, and it is {action}", call.action)))
}

#[async_trait]
impl Calls for Scripted {
    async fn send(&self, call: Call) -> Result<Value> {
        // Others ask meanwhile.
        tokio::task::yield_now().await;
        self.at_once(&call)
    }
}

#[cfg(test)]
mod tests;
