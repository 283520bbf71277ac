// SPDX-License-Identifier: Apache-2.0
//! Writes what this host reports: its own `EdgeHost`, and one `EdgeTargetHealth` for each load balancer.
//!
//! It writes only what has changed, and each object at most once a second. It retries with backoff, and the engine never waits
//! for it.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
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
use steerage_process::duration;
use steerage_watch::Backoff;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::plan::LoadBalancerStatus;
use crate::shards::{Shard, Shards};

/// The least time between two writes of one object.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two comparisons of what is written with what is to be: each costs as much as there are load balancers.
const COMPARE_INTERVAL: Duration = Duration::from_millis(200);
/// Even half of its first delay is no less than [`WRITE_INTERVAL`].
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(10));
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// An unchanged object is written again after this time, in case another client has changed it.
const RESYNC_PERIOD: Duration = Duration::from_mins(10);
const CONCURRENT_WRITES: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostStatus {
    pub(crate) interface: String,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// The shards for which this host is active.
    pub(crate) active: Shards,
    /// By name.
    pub(crate) load_balancers: BTreeMap<String, LoadBalancerStatus>,
}

#[derive(Clone)]
pub(crate) enum StatusSink {
    Api {
        client: Box<kube::Client>,
        namespace: String,
    },
    /// One JSON file for each object.
    Directory(PathBuf),
}

/// One object to write.
#[derive(Clone, Debug, PartialEq)]
enum StatusObject {
    Host(EdgeHostSpec),
    /// `active`: the shards of its VIPs for which this host is active.
    TargetHealth {
        status: LoadBalancerStatus,
        active: Shards,
    },
}

/// The last write of one object.
#[derive(Debug)]
struct WriteRecord {
    /// `None` after a failure.
    written: Option<StatusObject>,
    at: Instant,
    not_before: Instant,
    backoff: Backoff,
}

pub(crate) struct StatusWriter {
    sink: StatusSink,
    /// The host's name.
    host: String,
    metrics: Metrics,
    /// By name of the load balancer; the host's own has the empty name.
    records: HashMap<String, WriteRecord>,
}

impl StatusWriter {
    pub(crate) fn new(sink: StatusSink, host: String, metrics: Metrics) -> Self {
        Self { sink, host, metrics, records: HashMap::new() }
    }

    /// Runs until the engine is gone, then writes the last changes.
    pub(crate) async fn run(mut self, mut status: watch::Receiver<HostStatus>) -> anyhow::Result<()> {
        loop {
            let now = status.borrow_and_update().clone();
            let next = self.write(&now, false).await;
            tokio::time::sleep(COMPARE_INTERVAL).await;
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    let last = status.borrow().clone();
                    let _ = tokio::time::timeout(WRITE_INTERVAL, self.write(&last, true)).await;
                    return Ok(());
                },
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Writes what is due, or everything that has changed. Returns when the next write is due.
    async fn write(&mut self, status: &HostStatus, is_last: bool) -> Instant {
        let now = Instant::now();
        if status.interface.is_empty() {
            return now + RESYNC_PERIOD;
        }
        let wanted = objects(status);
        self.records.retain(|name, _| wanted.contains_key(name));
        let mut next = now + RESYNC_PERIOD;
        let mut due = Vec::new();
        for (name, object) in wanted {
            let record = self.records.get(&name);
            let is_old = record.is_none_or(|record| now >= record.at + RESYNC_PERIOD);
            if !is_old && record.is_some_and(|record| record.written.as_ref() == Some(&object)) {
                continue;
            }
            match record.map(|record| record.not_before) {
                Some(then) if then > now && !is_last => next = next.min(then),
                _ => due.push((name, object)),
            }
        }
        let (sink, host) = (&self.sink, &self.host);
        let writes = due.into_iter().map(|(name, object)| async move {
            let write = tokio::time::timeout(WRITE_TIMEOUT, write_object(sink, host, &name, &object));
            let result = write.await.unwrap_or_else(|_| Err(anyhow::anyhow!("timed out")));
            (name, object, result)
        });
        let results: Vec<_> =
            futures::stream::iter(writes).buffer_unordered(CONCURRENT_WRITES).collect().await;
        for (name, object, result) in results {
            next = next.min(self.record(name, object, result));
        }
        next
    }

    /// Returns when the object is to be written again.
    fn record(&mut self, name: String, object: StatusObject, result: anyhow::Result<()>) -> Instant {
        let now = Instant::now();
        let mut backoff = self.records.get(&name).map_or(BACKOFF, |record| record.backoff);
        let (record, again) = match result {
            Ok(()) => {
                self.metrics.status_writes.inc();
                let not_before = now + WRITE_INTERVAL;
                let record = WriteRecord { written: Some(object), at: now, not_before, backoff: BACKOFF };
                (record, now + RESYNC_PERIOD)
            }
            Err(error) => {
                self.metrics.status_write_failures.inc();
                let retry_in = backoff.next_delay();
                let not_before = now + retry_in;
                let object = if name.is_empty() {
                    format!("EdgeHost/{}", self.host)
                } else {
                    format!("EdgeTargetHealth/{name}.{}", self.host)
                };
                tracing::warn!(
                    object,
                    error = steerage_model::chain(error.as_ref()),
                    retry_in = %duration::rounded(retry_in),
                    "status not written; retrying"
                );
                (WriteRecord { written: None, at: now, not_before, backoff }, not_before)
            }
        };
        self.records.insert(name, record);
        again
    }
}

fn objects(status: &HostStatus) -> BTreeMap<String, StatusObject> {
    let target_health = |load_balancer: &LoadBalancerStatus| StatusObject::TargetHealth {
        status: load_balancer.clone(),
        active: status.active & load_balancer.vips.iter().map(|vip| Shard::of(*vip)).collect(),
    };
    let mut objects: BTreeMap<_, _> =
        status.load_balancers.iter().map(|(name, status)| (name.clone(), target_health(status))).collect();
    let host = EdgeHostSpec {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        interface: status.interface.clone(),
        addresses: status.addresses.clone(),
        active: !status.active.is_empty(),
        shards: status.active.len(),
    };
    objects.insert(String::new(), StatusObject::Host(host));
    objects
}

async fn write_object(
    sink: &StatusSink,
    host: &str,
    name: &str,
    object: &StatusObject,
) -> anyhow::Result<()> {
    match object {
        StatusObject::Host(spec) => put(sink, host, &EdgeHost::new(host, spec.clone())).await,
        StatusObject::TargetHealth { status, active } => {
            put(sink, host, &target_health(host, name, status, *active)).await
        }
    }
}

/// Owned by the load balancer, and so deleted with it. Of a load balancer whose VIPs are on several hosts, each reports the
/// targets of its own ones.
fn target_health(host: &str, name: &str, status: &LoadBalancerStatus, active: Shards) -> EdgeTargetHealth {
    let is_active = !active.is_empty();
    let is_reported = |vip: &IpAddr| !is_active || active.contains(Shard::of(*vip));
    let lists = status.targets.iter().zip(&status.served).filter(|(_, vip)| is_reported(vip));
    let mut targets: Vec<_> =
        lists.flat_map(|(targets, _): (&Arc<Vec<_>>, _)| targets.iter().cloned()).collect();
    targets.sort_by(|a, b| (&a.node, a.address).cmp(&(&b.node, b.address)));
    let spec = EdgeTargetHealthSpec {
        load_balancer: name.to_owned(),
        host: host.to_owned(),
        active: is_active,
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
        StatusSink::Api { client, namespace } => {
            let api = Api::<K>::namespaced(client.as_ref().clone(), namespace);
            let params = PatchParams::apply(&format!("steerage-edge-{host}")).force();
            let patched = api.patch(&name, &params, &Patch::Apply(object)).await;
            patched.map(drop).with_context(|| format!("cannot write {name}"))
        }
        StatusSink::Directory(directory) => {
            let path = directory.join(format!("{}.{name}.json", K::kind(&())));
            replace_file(&path, &serde_json::to_vec_pretty(object)?)
                .await
                .with_context(|| format!("cannot write {}", path.display()))
        }
    }
}

/// By renaming, so that no reader sees half of it.
async fn replace_file(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    tokio::fs::write(&new, text).await?;
    tokio::fs::rename(&new, path).await
}
