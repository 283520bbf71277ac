// SPDX-License-Identifier: Apache-2.0
//! An API server in memory that answers at once: the part of the API that the controller, its peer and edge hosts use, without
//! authentication, admission and validation.
//!
//! It stands in where a real one on the same cores would be what is measured. It is also the edge's provider's other side, so it
//! knows when a provider call arrives, and can leave the calls for one Service without an answer.

mod http_server;
mod store;

use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use http_server::{Answer, Call};
use store::Store;

use super::results::Writes;

/// A provider call: a write of a load balancer or of a shared node set.
#[derive(Debug)]
pub(super) struct ProviderCall {
    /// The object's name.
    pub(super) name: String,
    pub(super) at: Instant,
    /// The spec as far as the call names it.
    pub(super) spec: Value,
}

/// The running server. It ends with its runtime.
pub(crate) struct MemoryServer {
    pub(super) runtime: Runtime,
    shared: Arc<Shared>,
    kubeconfig: PathBuf,
}

#[derive(Default)]
struct Shared {
    store: Mutex<Store>,
    observer: Mutex<Option<UnboundedSender<ProviderCall>>>,
    /// The load balancer whose writes get no answer.
    hanging: Mutex<Option<String>>,
    status_writes: AtomicU64,
    status_bytes: AtomicU64,
}

/// Writes of the edge hosts' status objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StatusWrites {
    pub(crate) count: u64,
    /// Bytes of the objects.
    pub(crate) bytes: u64,
}

impl MemoryServer {
    /// Starts it on loopback, and writes a kubeconfig into `folder`.
    pub(super) fn start(folder: &Path) -> Result<Self> {
        Self::start_at(Ipv4Addr::LOCALHOST, folder)
    }

    /// The same at another address, in the network namespace of the calling thread.
    pub(crate) fn start_at(address: Ipv4Addr, folder: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let shared = Arc::<Shared>::default();
        let answering = Arc::clone(&shared);
        let address = runtime.block_on(http_server::serve(address, move |call| {
            let shared = Arc::clone(&answering);
            async move { shared.answer(call).await }
        }))?;
        let kubeconfig = folder.join("memory.kubeconfig");
        std::fs::write(&kubeconfig, kubeconfig_of(address))
            .with_context(|| format!("cannot write {}", kubeconfig.display()))?;
        Ok(Self { runtime, shared, kubeconfig })
    }

    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Creates or replaces an object, and tells the watches of its resource.
    pub(crate) fn put(&self, resource: &str, name: &str, object: Value) {
        self.store().put(resource, name, object);
    }

    pub(super) fn delete(&self, resource: &str, name: &str) {
        self.store().delete(resource, name);
    }

    /// The number of objects of a resource.
    pub(super) fn count(&self, resource: &str) -> usize {
        self.store().count(resource)
    }

    /// Writes so far.
    pub(super) fn writes(&self) -> Writes {
        let objects = self.requests(&["services", "edgeloadbalancers", "edgenodesets", "addresspools"]);
        Writes { objects, events: self.requests(&["events"]) }
    }

    /// Answered calls of the edge's provider so far.
    pub(super) fn provider_calls_made(&self) -> f64 {
        self.requests(&["edgeloadbalancers", "edgenodesets"])
    }

    fn requests(&self, resources: &[&str]) -> f64 {
        let store = self.store();
        resources.iter().map(|resource| f64::from(store.writes(resource))).sum()
    }

    /// Writes of status objects by edge hosts so far.
    pub(crate) fn status_writes(&self) -> StatusWrites {
        StatusWrites {
            count: self.shared.status_writes.load(Ordering::Relaxed),
            bytes: self.shared.status_bytes.load(Ordering::Relaxed),
        }
    }

    /// When the last list of a resource was answered.
    pub(super) fn last_list(&self) -> Option<Instant> {
        self.store().last_list()
    }

    /// All provider calls from now on.
    pub(super) fn provider_calls(&self) -> UnboundedReceiver<ProviderCall> {
        let (sender, receiver) = unbounded_channel();
        *lock(&self.shared.observer) = Some(sender);
        receiver
    }

    /// Leaves the writes of this load balancer without an answer.
    pub(super) fn hang(&self, load_balancer: Option<String>) {
        *lock(&self.shared.hanging) = load_balancer;
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.shared.store)
    }
}

impl Shared {
    async fn answer(&self, call: Call) -> Answer {
        let at = Instant::now();
        // The peer asks before it starts.
        if call.path == "/healthz" {
            return Answer::Whole(StatusCode::OK, Bytes::from_static(b"ok"));
        }
        let Some(path) = RequestPath::parse(&call.path) else {
            return Answer::status(StatusCode::NOT_FOUND, "NotFound");
        };
        let is_providers = ["edgeloadbalancers", "edgenodesets"].contains(&path.resource.as_str());
        if is_providers && [Method::POST, Method::PATCH].contains(&call.method) {
            let body: Value = serde_json::from_slice(&call.body).unwrap_or_default();
            let in_body = || body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let name = path.name.clone().unwrap_or_else(in_body);
            if let Some(observer) = &*lock(&self.observer) {
                let _ = observer.send(ProviderCall { name: name.clone(), at, spec: body["spec"].clone() });
            }
            let hangs = lock(&self.hanging).as_ref() == Some(&name);
            if hangs {
                return pending().await;
            }
        }
        self.handle(&path, &call)
    }

    fn handle(&self, path: &RequestPath, call: &Call) -> Answer {
        let mut store = lock(&self.store);
        let resource = path.resource.as_str();
        let is_set = |name: &str, value: &str| call.query.get(name).is_some_and(|found| found == value);
        let body = || serde_json::from_slice::<Value>(&call.body).unwrap_or_default();
        match (&call.method, &path.name) {
            (&Method::GET, None) if is_set("watch", "true") => {
                let from = call.query.get("resourceVersion").and_then(|version| version.parse().ok());
                Answer::Stream(store.watch(resource, from.unwrap_or(0), is_set("sendInitialEvents", "true")))
            }
            (&Method::GET, None) => {
                let number = |name: &str| call.query.get(name).and_then(|text| text.parse::<usize>().ok());
                Answer::Whole(
                    StatusCode::OK,
                    store.list(resource, number("limit"), number("continue").unwrap_or(0)),
                )
            }
            // Of edge hosts; thousands of objects that nobody reads.
            (&Method::PATCH, Some(_)) if ["edgehosts", "edgetargethealths"].contains(&resource) => {
                self.status_writes.fetch_add(1, Ordering::Relaxed);
                self.status_bytes.fetch_add(call.body.len().try_into().unwrap_or(0), Ordering::Relaxed);
                Answer::Whole(StatusCode::OK, call.body.clone())
            }
            // Events are counted and forgotten.
            (&Method::POST | &Method::PATCH, _) if resource == "events" => {
                store.count_write(resource);
                Answer::Whole(StatusCode::CREATED, call.body.clone())
            }
            (&Method::POST, None) => {
                let body = body();
                let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                Answer::of(store.create(resource, &name, body), StatusCode::CREATED)
            }
            (&Method::GET, Some(name)) => Answer::of(store.read(resource, name), StatusCode::OK),
            (&Method::PATCH, Some(name)) => Answer::of(store.patch(resource, name, &body()), StatusCode::OK),
            (&Method::PUT, Some(name)) => Answer::of(store.replace(resource, name, body()), StatusCode::OK),
            _ => Answer::status(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }
}

/// What a request is about. All namespaced objects are in one namespace, so its name says nothing.
struct RequestPath {
    resource: String,
    name: Option<String>,
}

impl RequestPath {
    fn parse(path: &str) -> Option<Self> {
        let mut parts = path.trim_matches('/').split('/');
        let skipped = if parts.next()? == "api" { 1 } else { 2 };
        let mut parts = parts.skip(skipped).peekable();
        if parts.next_if_eq(&"namespaces").is_some() {
            parts.next();
        }
        Some(Self { resource: parts.next()?.to_owned(), name: parts.next().map(str::to_owned) })
    }
}

fn kubeconfig_of(address: SocketAddr) -> String {
    // JSON is YAML.
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "memory",
        "clusters": [{"name": "memory", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "memory", "user": {}}],
        "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "memory"}}],
    })
    .to_string()
}

/// The body of an error.
fn status_body(code: StatusCode, reason: &str) -> Bytes {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": code.as_u16(),
    });
    body.to_string().into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
