// SPDX-License-Identifier: Apache-2.0
//! Tells the cluster what this host sees: its own `EdgeHost` and one `EdgeTargetHealth` for each load balancer.
//!
//! Writes only what has changed, at most once a second for each object, tries again with growing pauses, and never holds
//! forwarding up: the engine leaves its load_balancers here and goes on.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use steerage_edge_api::{EdgeHost, EdgeHostSpec, EdgeLoadBalancer, EdgeTargetHealth, EdgeTargetHealthSpec};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::plan::LoadBalancerStatus;

/// The least time between two writes of one object.
const APART: Duration = Duration::from_secs(1);
/// The longest pause after failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A write that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// What has not changed is written again after this time, in case somebody else has changed it.
const AGAIN: Duration = Duration::from_mins(10);
/// Writes under way at a time.
const CONCURRENT: usize = 8;

/// What the engine has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostStatus {
    /// The interface's name.
    pub(crate) interface: String,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether it is the active one.
    pub(crate) active: bool,
    /// What it has found of each load balancer.
    pub(crate) load_balancers: BTreeMap<String, LoadBalancerStatus>,
}

/// Where reports go.
#[derive(Clone)]
pub(crate) enum StatusSink {
    /// The API server, and the namespace.
    Api(Box<kube::Client>, String),
    /// A folder: one JSON file an object.
    Folder(PathBuf),
}

/// One object to write.
#[derive(Clone, Debug, PartialEq)]
enum StatusObject {
    Host(EdgeHostSpec),
    Health(LoadBalancerStatus, bool),
}

/// What is known of one object's writes.
#[derive(Debug)]
struct WriteRecord {
    /// What was last written, if that went well.
    written: Option<StatusObject>,
    /// Not before this time.
    next: Instant,
    at: Instant,
    failures: u32,
}

/// The reporter.
pub(crate) struct StatusWriter {
    sink: StatusSink,
    host: String,
    metrics: Metrics,
    records: HashMap<String, WriteRecord>,
}

impl StatusWriter {
    /// A reporter for the host of this name.
    pub(crate) fn new(sink: StatusSink, host: String, metrics: Metrics) -> Self {
        Self { sink, host, metrics, records: HashMap::new() }
    }

    /// Runs until the engine has gone; then writes once more what has changed.
    pub(crate) async fn run(mut self, mut reports: watch::Receiver<HostStatus>) -> anyhow::Result<()> {
        loop {
            let now = reports.borrow_and_update().clone();
            let next = self.write(&now, false).await;
            tokio::select! {
                changed = reports.changed() => if changed.is_err() {
                    let last = reports.borrow().clone();
                    let _ = tokio::time::timeout(APART, self.write(&last, true)).await;
                    return Ok(());
                },
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Writes what is due; returns when to come again.
    async fn write(&mut self, reports: &HostStatus, all: bool) -> Instant {
        if reports.interface.is_empty() {
            return Instant::now() + AGAIN;
        }
        let mut wanted: BTreeMap<String, StatusObject> = reports
            .load_balancers
            .iter()
            .map(|(name, status)| (name.clone(), StatusObject::Health(status.clone(), reports.active)))
            .collect();
        wanted.insert(
            String::new(),
            StatusObject::Host(EdgeHostSpec {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                interface: reports.interface.clone(),
                addresses: reports.addresses.clone(),
                active: reports.active,
            }),
        );
        self.records.retain(|name, _| wanted.contains_key(name));
        let now = Instant::now();
        let mut next = now + AGAIN;
        let mut due = Vec::new();
        for (name, object) in wanted {
            let record = self.records.get(&name);
            let stale = record.is_none_or(|record| now >= record.at + AGAIN);
            if !stale && record.is_some_and(|record| record.written.as_ref() == Some(&object)) {
                continue;
            }
            match record.map(|record| record.next) {
                Some(then) if then > now && !all => next = next.min(then),
                _ => due.push((name, object)),
            }
        }
        let (sink, host) = (&self.sink, &self.host);
        let writes = due.into_iter().map(|(name, object)| async move {
            let write = tokio::time::timeout(TIMEOUT, store(sink, host, &name, &object));
            let result = write.await.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in time")));
            (name, object, result)
        });
        let mut done = futures::stream::iter(writes).buffer_unordered(CONCURRENT);
        let mut results = Vec::new();
        while let Some(result) = done.next().await {
            results.push(result);
        }
        drop(done);
        for (name, object, result) in results {
            next = next.min(self.note(name, object, result));
        }
        next
    }

    fn note(&mut self, name: String, object: StatusObject, result: anyhow::Result<()>) -> Instant {
        let now = Instant::now();
        let failures = self.records.get(&name).map_or(0, |record| record.failures);
        let (written, failures, pause) = match result {
            Ok(()) => {
                self.metrics.status_writes.inc();
                (Some(object), 0, APART)
            }
            Err(error) => {
                self.metrics.status_write_failures.inc();
                let failures = failures.saturating_add(1);
                let pause = APART.saturating_mul(1 << failures.min(6)).min(LONGEST_PAUSE);
                tracing::warn!(
                    load_balancer = name,
                    error = format!("{error:#}"),
                    "cannot report; trying again"
                );
                (None, failures, pause)
            }
        };
        let again = if written.is_some() { now + AGAIN } else { now + pause };
        self.records.insert(name, WriteRecord { written, next: now + pause, at: now, failures });
        again
    }
}

async fn store(sink: &StatusSink, host: &str, name: &str, object: &StatusObject) -> anyhow::Result<()> {
    match object {
        StatusObject::Host(spec) => put(sink, host, &EdgeHost::new(host, spec.clone())).await,
        StatusObject::Health(status, active) => put(sink, host, &health(host, name, status, *active)).await,
    }
}

/// The object that says how a load balancer's targets are, owned by the load balancer so that it goes with it.
fn health(host: &str, name: &str, status: &LoadBalancerStatus, active: bool) -> EdgeTargetHealth {
    let mut targets: Vec<_> =
        status.targets.iter().flat_map(|targets: &Arc<Vec<_>>| targets.iter().cloned()).collect();
    targets.sort_by(|a, b| (&a.node, a.address).cmp(&(&b.node, b.address)));
    let spec = EdgeTargetHealthSpec {
        load_balancer: name.to_owned(),
        host: host.to_owned(),
        active,
        observed_generation: status.generation,
        problem: status.problem.clone(),
        targets,
    };
    let mut object = EdgeTargetHealth::new(&format!("{name}.{host}"), spec);
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: EdgeLoadBalancer::api_version(&()).into_owned(),
        kind: EdgeLoadBalancer::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: status.uid.clone(),
        ..OwnerReference::default()
    }]);
    object
}

async fn put<K>(sink: &StatusSink, host: &str, object: &K) -> anyhow::Result<()>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Serialize
        + DeserializeOwned
        + Clone
        + std::fmt::Debug,
{
    let name = object.name_any();
    match sink {
        StatusSink::Api(client, namespace) => {
            let api = Api::<K>::namespaced(client.as_ref().clone(), namespace);
            let by = PatchParams::apply(&format!("steerage-edge-{host}")).force();
            api.patch(&name, &by, &Patch::Apply(object))
                .await
                .with_context(|| format!("cannot write {name}"))?;
        }
        StatusSink::Folder(folder) => {
            let path = folder.join(format!("{}.{name}.json", K::kind(&())));
            let (text, whole) = (serde_json::to_vec_pretty(object)?, path.with_extension("new"));
            // Renamed, so that nobody reads half of it.
            tokio::fs::write(&whole, text)
                .await
                .with_context(|| format!("cannot write {}", whole.display()))?;
            tokio::fs::rename(&whole, &path)
                .await
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}
