// SPDX-License-Identifier: Apache-2.0
//! The simulated API server: objects with versions and their history, and the requests that the controller makes.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use steerage_model::Key;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use super::invariants::{self, LoadBalancers};
use super::link::{self, Failed, Link};
use super::objects::{self, Resource};
use super::watch_stream;
use super::world::{ProcessId, SharedWorld, World};

type Objects = BTreeMap<(Resource, Key), Value>;

/// One write.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) at: Instant,
    pub(super) key: Key,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) kind: &'static str,
    pub(super) object: Value,
}

#[derive(Default)]
pub(super) struct ApiServer {
    objects: Objects,
    version: u64,
    history: BTreeMap<Resource, Vec<Change>>,
    /// Watches from older versions are refused.
    pub(super) compacted: u64,
    /// Not `watch` channels, which wake their receivers in random order.
    changed: BTreeMap<Resource, Arc<Notify>>,
}

impl ApiServer {
    pub(super) fn version(&self) -> u64 {
        self.version.max(1)
    }

    /// Resolves with the next change of a kind.
    pub(super) fn changed(&mut self, resource: Resource) -> OwnedNotified {
        Arc::clone(self.changed.entry(resource).or_default()).notified_owned()
    }

    /// Lets all watches look again.
    pub(super) fn wake_watches(&self) {
        self.changed.values().for_each(|changed| changed.notify_waiters());
    }

    pub(super) fn get(&self, resource: Resource, key: &Key) -> Option<&Value> {
        self.objects.get(&(resource, key.clone()))
    }

    pub(super) fn list(&self, resource: Resource) -> impl Iterator<Item = (&Key, &Value)> {
        self.objects
            .iter()
            .filter(move |((kind, _), _)| *kind == resource)
            .map(|((_, key), object)| (key, object))
    }

    /// The objects of a kind as they were at a version.
    pub(super) fn list_at(&self, resource: Resource, version: u64) -> Vec<Value> {
        let mut objects = BTreeMap::new();
        for change in self.changes(resource).iter().take_while(|change| change.version <= version) {
            match change.kind {
                "DELETED" => drop(objects.remove(&change.key)),
                _ => drop(objects.insert(&change.key, &change.object)),
            }
        }
        objects.into_values().cloned().collect()
    }

    /// The first change of a kind after a version.
    pub(super) fn change_after(&self, resource: Resource, version: u64) -> Option<&Change> {
        let changes = self.changes(resource);
        changes.get(changes.partition_point(|change| change.version <= version))
    }

    fn changes(&self, resource: Resource) -> &[Change] {
        self.history.get(&resource).map_or(&[], Vec::as_slice)
    }

    /// Creates or replaces an object.
    pub(super) fn put(&mut self, resource: Resource, key: &Key, mut object: Value) -> Value {
        let version = self.version() + 1;
        let (api_version, kind) = resource.kind();
        object["apiVersion"] = json!(api_version);
        object["kind"] = json!(kind);
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let is_new = self.objects.insert((resource, key.clone()), object.clone()).is_none();
        self.push(version, resource, key, if is_new { "ADDED" } else { "MODIFIED" }, object.clone());
        object
    }

    /// Deletes an object, or marks it while it has finalizers.
    pub(super) fn delete(&mut self, resource: Resource, key: &Key) {
        let Some(mut object) = self.get(resource, key).cloned() else { return };
        if object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
            if object["metadata"].get("deletionTimestamp").is_none() {
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                self.put(resource, key, object);
            }
            return;
        }
        self.objects.remove(&(resource, key.clone()));
        let version = self.version() + 1;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        self.push(version, resource, key, "DELETED", object);
    }

    fn push(&mut self, version: u64, resource: Resource, key: &Key, kind: &'static str, object: Value) {
        self.version = version;
        // Nobody lists or watches Leases.
        if resource != Resource::Leases {
            let change = Change { version, at: Instant::now(), key: key.clone(), kind, object };
            self.history.entry(resource).or_default().push(change);
        }
        if let Some(changed) = self.changed.get(&resource) {
            changed.notify_waiters();
        }
    }
}

/// The client of a process.
pub(super) fn client(world: &SharedWorld, process: ProcessId) -> Client {
    let world = world.clone();
    let service = tower::service_fn(move |request| answer(world.clone(), process, request));
    Client::new(service, "default")
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn answer(
    world: SharedWorld,
    process: ProcessId,
    request: Request<Body>,
) -> Result<Response<watch_stream::ResponseBody>, BoxError> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let query: BTreeMap<String, String> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let path = parts.uri.path().to_owned();
    let response = link::call(&world, process, Link::Api, move |world| {
        if query.get("watch").is_some_and(|watch| watch == "true") {
            return watch_stream::open(world, process, &path, &query);
        }
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let (status, answer) = handle(&mut world.lock(), process, &parts.method, &path, &query, body);
        response(status, answer.to_string())
    });
    match response.await {
        Ok(response) => Ok(response),
        Err(Failed::Refused) => Ok(status(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests")),
        Err(Failed::Broken) => Err("connection reset".into()),
    }
}

fn response(status: StatusCode, text: String) -> Response<watch_stream::ResponseBody> {
    let mut response = Response::new(watch_stream::whole(text));
    *response.status_mut() = status;
    response
}

/// An error as the API server writes it.
pub(super) fn status(code: StatusCode, reason: &str) -> Response<watch_stream::ResponseBody> {
    response(code, status_json(code, reason).to_string())
}

pub(super) fn status_json(code: StatusCode, reason: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason,
        "code": code.as_u16(),
    })
}

fn handle(
    world: &mut World,
    process: ProcessId,
    method: &Method,
    path: &str,
    query: &BTreeMap<String, String>,
    body: Value,
) -> (StatusCode, Value) {
    let failed = |code: StatusCode, reason: &str| (code, status_json(code, reason));
    if path.contains("/events.k8s.io/") {
        return (StatusCode::CREATED, body);
    }
    let Some((resource, namespace, rest)) = Resource::of_path(path) else {
        return failed(StatusCode::NOT_FOUND, "NotFound");
    };
    let named = rest.first().map(|name| Key::new(&namespace, name));
    let details = format!("{} {method} {path} {}", world.identity(process), body["spec"]["addresses"]);
    match (method.as_str(), named) {
        ("GET", None) => {
            let is_cached = query.get("resourceVersion").is_some_and(|version| version == "0");
            let version = watch_stream::list_version(world, is_cached);
            let items = world.api.list_at(resource, version);
            let (api_version, kind) = resource.kind();
            let list = json!({
                "kind": format!("{kind}List"), "apiVersion": api_version,
                "metadata": {"resourceVersion": version.to_string()}, "items": items,
            });
            (StatusCode::OK, list)
        }
        ("GET", Some(key)) => {
            if resource == Resource::Services {
                world.record("Service read", &details);
            }
            match world.api.get(resource, &key) {
                Some(object) => (StatusCode::OK, object.clone()),
                None => failed(StatusCode::NOT_FOUND, "NotFound"),
            }
        }
        ("POST", None) => {
            let key = Key::new(&namespace, body["metadata"]["name"].as_str().unwrap_or_default());
            if world.api.get(resource, &key).is_some() {
                world.record("conflict of versions", &details);
                return failed(StatusCode::CONFLICT, "AlreadyExists");
            }
            let mut object = body;
            if object["metadata"].get("uid").is_none() {
                let uid = format!("object-{}", world.api.version() + 1);
                object["metadata"]["uid"] = json!(uid);
            }
            (
                StatusCode::CREATED,
                write(world, process, resource, &details, |world| world.api.put(resource, &key, object)),
            )
        }
        ("DELETE", Some(key)) => {
            let Some(old) = world.api.get(resource, &key).cloned() else {
                return failed(StatusCode::NOT_FOUND, "NotFound");
            };
            if body["preconditions"].get("uid").is_some_and(|uid| *uid != old["metadata"]["uid"]) {
                return failed(StatusCode::CONFLICT, "Conflict");
            }
            write(world, process, resource, &details, |world| world.api.delete(resource, &key));
            (StatusCode::OK, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
        }
        ("PUT", Some(key)) => {
            let Some(old) = world.api.get(resource, &key) else {
                return failed(StatusCode::NOT_FOUND, "NotFound");
            };
            if old["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
                world.record("conflict of versions", &details);
                return failed(StatusCode::CONFLICT, "Conflict");
            }
            (StatusCode::OK, world.api.put(resource, &key, body))
        }
        ("PATCH", Some(key)) => patch(world, process, resource, &key, &body),
        _ => failed(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
    }
}

/// Writes an object of a replica, and checks the invariants. Nobody else writes the Lease.
fn write<T>(
    world: &mut World,
    process: ProcessId,
    resource: Resource,
    details: &str,
    write: impl FnOnce(&mut World) -> T,
) -> T {
    if resource == Resource::Leases {
        return write(world);
    }
    let what = if resource == Resource::Services { "Service patched" } else { "edge object written" };
    world.record(what, details);
    let before = LoadBalancers::of(world);
    let result = write(world);
    invariants::on_write(world, process, details, &before);
    result
}

fn patch(
    world: &mut World,
    process: ProcessId,
    resource: Resource,
    key: &Key,
    body: &Value,
) -> (StatusCode, Value) {
    let Some(old) = world.api.get(resource, key).cloned() else {
        return (StatusCode::NOT_FOUND, status_json(StatusCode::NOT_FOUND, "NotFound"));
    };
    let is_other =
        |field: &str| body["metadata"].get(field).is_some_and(|value| *value != old["metadata"][field]);
    let details = format!("{} {resource:?} {key} {}", world.identity(process), body["spec"]["addresses"]);
    if is_other("uid") || is_other("resourceVersion") {
        world.record("conflict of versions", &details);
        return (StatusCode::CONFLICT, status_json(StatusCode::CONFLICT, "Conflict"));
    }
    let mut object = old.clone();
    objects::patch(&mut object, body);
    if object == old {
        return (StatusCode::OK, old);
    }
    let is_frozen = |condition: &Value| condition["reason"] == crate::reasons::TARGETS_FROZEN;
    if body["status"]["conditions"].as_array().is_some_and(|all| all.iter().any(is_frozen)) {
        world.record("targets frozen", &details);
    }
    let object = write(world, process, resource, &details, |world| {
        let object = world.api.put(resource, key, object);
        if object["metadata"].get("deletionTimestamp").is_some() {
            world.api.delete(resource, key);
        }
        object
    });
    (StatusCode::OK, object)
}
