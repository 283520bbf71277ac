// SPDX-License-Identifier: Apache-2.0
//! The recorder of events (`events.k8s.io/v1`), which users see with `kubectl describe`. It never blocks its callers.
//!
//! An equal event increments the series of the earlier one. An event with another note is a new one, so that the newest state is
//! always visible. Events are queued; while the API server is unavailable they are dropped, counted and logged.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use steerage_model::{Node, Pod, Service, chain, printable};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

mod correlate;
mod limit;
mod service;

pub use limit::{EventLimit, NamespaceLimits};
pub use service::ServiceRecorder;

use correlate::{Correlator, Step};

/// Capacity of the queue.
const QUEUE: usize = 256;
/// Timeout of one call.
const CALL: Duration = Duration::from_secs(5);
/// The API's limits on `note` and `action`, in bytes.
const NOTE: usize = 1024;

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// Such as `v1`.
    pub api_version: String,
    /// Such as `Service`.
    pub kind: String,
    /// Empty for objects without one.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// The object's UID; empty if it is not known.
    pub uid: String,
}

impl Subject {
    /// A Service.
    pub fn service(service: &Service) -> Self {
        Self {
            api_version: "v1".to_owned(),
            kind: "Service".to_owned(),
            namespace: service.key.namespace().to_owned(),
            name: service.key.name().to_owned(),
            uid: service.uid.clone(),
        }
    }

    /// A pod.
    pub fn pod(pod: &Pod) -> Self {
        Self {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            namespace: pod.key.namespace().to_owned(),
            name: pod.key.name().to_owned(),
            uid: pod.uid.clone(),
        }
    }

    /// A node. Its UID is its name, as in kubelet's and kube-proxy's events: `kubectl describe` selects by it.
    pub fn node(node: &Node) -> Self {
        Self::node_named(node.name.clone())
    }

    /// The same of the node with this name.
    pub fn node_named(name: String) -> Self {
        Self {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            namespace: String::new(),
            uid: name.clone(),
            name,
        }
    }

    /// Events of cluster-scoped objects are in `default`.
    fn event_namespace(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }
}

/// For log lines: `Service/shop/web`, `Node/a`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{}/{}", self.kind, self.name),
            namespace => write!(f, "{}/{namespace}/{}", self.kind, self.name),
        }
    }
}

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// A normal operation.
    Normal,
    /// A request of the user is not met.
    Warning,
}

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Notice {
    /// The object.
    pub subject: Subject,
    /// The type.
    pub severity: Severity,
    /// Machine-readable, in `CamelCase`.
    pub reason: &'static str,
    /// The attempted action: machine-readable, in `CamelCase`.
    pub action: &'static str,
    /// The message for users, cut to 1 KiB.
    pub note: String,
}

/// Queues notices. Clones share the queue.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: mpsc::Sender<Notice>,
    dropped: Counter,
}

impl Recorder {
    /// A recorder, and the task that writes its events and ends when all clones are dropped. The reporting controller is
    /// `steerage.dev/<component>`; `instance` is the name of the pod or node.
    pub fn new(
        client: Client,
        component: &str,
        instance: &str,
        registry: &mut Registry,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let dropped = register_metrics(registry);
        let (queue, inbox) = mpsc::channel(QUEUE);
        let writer = Writer {
            client,
            component: format!("steerage.dev/{component}"),
            instance: instance.to_owned(),
            dropped: dropped.clone(),
            correlator: Correlator::default(),
            number: 0,
        };
        (Self { queue, dropped }, writer.run(inbox))
    }

    /// Queues a notice, or drops it when the queue is full. Never waits.
    pub fn publish(&self, notice: Notice) {
        if let Err(error) = self.queue.try_send(notice) {
            self.dropped.inc();
            let (notice, why) = match error {
                mpsc::error::TrySendError::Full(notice) => (notice, "queue full"),
                mpsc::error::TrySendError::Closed(notice) => (notice, "queue closed"),
            };
            tracing::warn!(
                object = %notice.subject,
                reason = notice.reason,
                error = why,
                dropped = self.dropped.get(),
                "event not queued; event dropped"
            );
        }
    }
}

/// Registers the metrics of a [`Recorder`]: the counter of events that were not written.
pub fn register_metrics(registry: &mut Registry) -> Counter {
    let dropped = Counter::default();
    registry.register("events_dropped", "Kubernetes Events that were not written", dropped.clone());
    dropped
}

struct Writer {
    client: Client,
    component: String,
    instance: String,
    dropped: Counter,
    correlator: Correlator,
    number: u64,
}

impl Writer {
    async fn run(mut self, mut inbox: mpsc::Receiver<Notice>) {
        while let Some(notice) = inbox.recv().await {
            let step = self.correlator.step(&notice, Instant::now());
            let written = match step {
                Step::Create => self.create(&notice).await,
                Step::Count { name, count } => self.count(&notice, &name, count).await,
                Step::Wait => continue,
                Step::TooMany => Err("rate limit of the object reached".to_owned()),
            };
            if let Err(error) = written {
                if error.contains(NAMESPACE_TERMINATING) {
                    // It takes no new objects, and its Events are deleted with it.
                    tracing::debug!(object = %notice.subject, reason = notice.reason, "namespace terminating; event not written");
                    continue;
                }
                self.dropped.inc();
                tracing::warn!(
                    object = %notice.subject,
                    reason = notice.reason,
                    error,
                    dropped = self.dropped.get(),
                    "event not written; event dropped"
                );
            }
        }
    }

    async fn create(&mut self, notice: &Notice) -> Result<(), String> {
        let now = Timestamp::now();
        self.number += 1;
        // The time makes it unique across restarts, the number within a process.
        let name = format!("{}.{:x}.{:x}", notice.subject.name, now.as_microsecond(), self.number);
        let event = self.event(notice, &name, now);
        let created = timeout(CALL, self.api(notice).create(&PostParams::default(), &event)).await;
        flatten(created)?;
        self.correlator.created(notice.clone(), name, Instant::now());
        Ok(())
    }

    async fn count(&mut self, notice: &Notice, name: &str, count: i32) -> Result<(), String> {
        let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
        let patch = Patch::Merge(serde_json::json!({ "series": series }));
        let api = self.api(notice);
        match timeout(CALL, api.patch(name, &PatchParams::default(), &patch)).await {
            // Expired, by default after an hour, or deleted: create a new one.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => self.create(notice).await,
            patched => flatten(patched),
        }
    }

    fn api(&self, notice: &Notice) -> Api<Event> {
        Api::namespaced(self.client.clone(), notice.subject.event_namespace())
    }

    fn event(&self, notice: &Notice, name: &str, now: Timestamp) -> Event {
        let Notice { subject, severity, reason, action, note } = notice;
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: some(subject.event_namespace()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            regarding: Some(ObjectReference {
                api_version: some(&subject.api_version),
                kind: some(&subject.kind),
                namespace: some(&subject.namespace),
                name: some(&subject.name),
                uid: some(&subject.uid),
                ..ObjectReference::default()
            }),
            type_: Some(
                match severity {
                    Severity::Normal => "Normal",
                    Severity::Warning => "Warning",
                }
                .to_owned(),
            ),
            reason: some(reason),
            action: some(action),
            note: Some(shown_note(note)),
            reporting_controller: some(&self.component),
            reporting_instance: some(&self.instance),
            ..Event::default()
        }
    }
}

/// What the API server's refusal says of a namespace that is being deleted (its plug-in `NamespaceLifecycle`).
const NAMESPACE_TERMINATING: &str = "because it is being terminated";

fn flatten<T>(result: Result<Result<T, kube::Error>, tokio::time::error::Elapsed>) -> Result<(), String> {
    match result {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err("no response in time".to_owned()),
    }
}

/// A note as users may see it.
fn shown_note(note: &str) -> String {
    truncate(&printable(note), NOTE)
}

/// At most `max` bytes of `text`, in whole characters.
fn truncate(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let mark = '…';
    let end = (0..=max - mark.len_utf8()).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}{mark}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_truncated_between_characters() {
        assert_eq!(truncate("short", 10), "short");
        assert_eq!(truncate("ööööö", 8), "öö…");
        assert!(truncate(&"é".repeat(2000), NOTE).len() <= NOTE);
    }

    #[test]
    fn control_characters_of_notes_are_escaped() {
        assert_eq!(shown_note("the value `\u{1b}[31mapi`"), "the value `\\u{1b}[31mapi`");
        assert!(shown_note(&"\u{1b}".repeat(1000)).len() <= NOTE);
    }
}
