// SPDX-License-Identifier: Apache-2.0
//! The controller's one queue. Watches, the provider, the resync and failed tasks add requests; only the workers take them out.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::Owner;
use steerage_watch::Backoff;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::queue::{Queue, ReconcileOutcome, Request, Which};

/// Why a load balancer is reconciled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReconcileRequest {
    /// When the first endpoint changed that its targets do not reflect yet.
    pub(crate) endpoints_changed: Option<Instant>,
    /// Clients use the load balancer: the Service publishes it.
    pub(crate) is_published: bool,
    /// A node changed that is, was or should be a target: connections may go to one that is dead.
    pub(crate) nodes_changed: bool,
    /// Compare everything, with the provider too, instead of only what changed.
    pub(crate) full: bool,
    /// The provider listed it as existing, whether this process remembers it or not.
    pub(crate) exists_at_provider: bool,
    /// More than its targets may have to change: the Service did, or an earlier try is not complete.
    pub(crate) may_change: bool,
}

impl ReconcileRequest {
    /// A request to compare everything.
    pub(crate) const FULL: Self = Self {
        endpoints_changed: None,
        is_published: false,
        nodes_changed: false,
        full: true,
        exists_at_provider: false,
        may_change: true,
    };
}

impl ReconcileRequest {
    fn merge(&mut self, other: Self) {
        self.endpoints_changed = match (self.endpoints_changed, other.endpoints_changed) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.is_published |= other.is_published;
        self.nodes_changed |= other.nodes_changed;
        self.full |= other.full;
        self.exists_at_provider |= other.exists_at_provider;
        self.may_change |= other.may_change;
    }

    /// The same, if the targets are in place already.
    pub(crate) fn without_urgency(self) -> Self {
        Self { endpoints_changed: None, nodes_changed: false, ..self }
    }

    /// Whether it changes and compares nothing but targets.
    pub(crate) fn is_of_targets(&self) -> bool {
        !self.may_change && !self.full
    }

    /// Clients notice late targets. What else there is to do, such as comparisons and new load balancers, comes after them.
    pub(crate) fn is_urgent(&self) -> bool {
        self.endpoints_changed.is_some() && self.is_published || self.nodes_changed
    }
}

/// The requests of all owners that share a serialisation key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestBatch(pub(crate) BTreeMap<Owner, ReconcileRequest>);

impl RequestBatch {
    /// Makes all requests full.
    pub(crate) fn compare_all(&mut self) {
        self.0.values_mut().for_each(|request| request.full = true);
    }
}

impl Request for RequestBatch {
    fn merge(&mut self, other: Self) {
        for (owner, request) in other.0 {
            self.0.entry(owner).or_default().merge(request);
        }
    }

    fn is_urgent(&self) -> bool {
        self.0.values().any(ReconcileRequest::is_urgent)
    }

    /// A provider that does not answer changes of anything else may still take targets.
    fn is_quick(&self) -> bool {
        self.is_urgent() && self.0.values().all(ReconcileRequest::is_of_targets)
    }

    /// Namespaces take turns.
    fn group(&self) -> &str {
        self.0.keys().next().map_or("", |owner| owner.service.namespace())
    }
}

/// The provider's serialisation key of an owner.
type KeyOf = Box<dyn Fn(&Owner) -> String + Send + Sync>;

pub(crate) struct RequestQueue {
    key_of: KeyOf,
    inner: Mutex<Inner>,
    changed: Notify,
}

struct Inner {
    queue: Queue<RequestBatch>,
    /// A node concerns every load balancer. The flag stands for all their requests, so that a burst costs one of each.
    nodes_changed: bool,
}

impl RequestQueue {
    pub(crate) fn new(key_of: impl Fn(&Owner) -> String + Send + Sync + 'static, backoff: Backoff) -> Self {
        let inner = Inner { queue: Queue::new(backoff), nodes_changed: false };
        Self { key_of: Box::new(key_of), inner: Mutex::new(inner), changed: Notify::new() }
    }

    /// Adds a request. `reset_backoff` ends a backoff, because the cause of the failure may be gone.
    pub(crate) fn add(&self, owner: &Owner, request: ReconcileRequest, reset_backoff: bool) {
        let key = (self.key_of)(owner);
        let batch = RequestBatch([(owner.clone(), request)].into());
        self.lock().queue.add(&key, batch, reset_backoff, Instant::now());
        self.changed.notify_one();
    }

    /// Records that a node changed. The workers then add requests for the load balancers that the change affects.
    pub(crate) fn set_nodes_changed(&self) {
        self.lock().nodes_changed = true;
        self.changed.notify_one();
    }

    /// Whether a node changed since the last call.
    pub(crate) fn take_nodes_changed(&self) -> bool {
        std::mem::take(&mut self.lock().nodes_changed)
    }

    /// Returns when something was added. For one listener.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Removes what the watches added while this process did not lead.
    pub(crate) fn clear(&self) {
        let mut inner = self.lock();
        inner.queue.clear();
        inner.nodes_changed = false;
    }

    /// The next key that is due, with its requests, of those that `which` allows.
    pub(crate) fn start_next(&self, which: Which) -> Option<(String, RequestBatch)> {
        self.lock().queue.start_next(which, Instant::now())
    }

    /// Records the end of a key's task.
    pub(crate) fn finish(&self, key: &str, outcome: ReconcileOutcome<RequestBatch>) {
        self.lock().queue.finish(key, outcome, Instant::now(), fastrand::f64());
    }

    /// Records that the provider answers so many calls of which the last try had no answer.
    pub(crate) fn provider_answers(&self, calls: usize) {
        self.lock().queue.provider_answers(calls, Instant::now(), fastrand::f64);
    }

    /// When the next key is due, of those that `which` allows, or may be.
    pub(crate) fn next_due(&self, which: Which) -> Option<Instant> {
        self.lock().queue.next_due(which)
    }

    /// The number of keys that wait.
    pub(crate) fn depth(&self) -> usize {
        self.lock().queue.depth()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RequestQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestQueue").field("depth", &self.depth()).finish_non_exhaustive()
    }
}
