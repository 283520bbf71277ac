// SPDX-License-Identifier: Apache-2.0
//! Readiness gates of pods: sets the condition of each waiting pod when its load balancers find it healthy.
//!
//! Runs only while this process leads. The reconciler registers the pods and reads their health; this module decides from that, and
//! writes nothing but the one condition. It never takes a condition back: a load balancer must not end the cluster's own traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use steerage_model::{Key, Pod, chain};
use steerage_process::duration;
use steerage_provider_api::{Owner, TargetHealth};
use steerage_watch::Backoff;
use steerage_watch::events::{Notice, Severity, Subject};
use tokio::sync::Notify;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::cluster_index::WaitingPod;
use crate::reasons;
use crate::reconcile::Reconciler;
use crate::service_writer::WriteError;
use decide::{GateCondition, PodService, ReadHealth, SERVICE_GRACE, SLICES_GRACE, decide};
pub(crate) use metrics::PodGateMetrics;
pub(crate) use writer::PodWriter;

mod decide;
mod metrics;
mod writer;

/// Read the health of a load balancer this often while pods wait for it.
const HEALTH_POLL: Duration = Duration::from_secs(10);
/// All load balancers together read the health of at most one target group in this time because of waiting pods. AWS refills the calls
/// that only read at about ten a second.
const HEALTH_READ_SHARE: Duration = Duration::from_millis(250);
/// Look at waiting pods this often: their Services and EndpointSlices may have changed, or their time is over.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// At least this time between two looks: many pods change at once.
const PAUSE: Duration = Duration::from_millis(100);
/// And this many times as long as a look took, which holds the index: tenants may have many ports and pods.
const PAUSE_FACTOR: u32 = 10;
/// A written condition that the watch does not show is written again after this time.
const WRITE_AGAIN: Duration = Duration::from_secs(30);
/// Writes at a time.
const WRITES: usize = 8;
/// Between writes that failed.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// The health of the load balancers for which pods wait. The reconciler writes it, and the task here reads it.
#[derive(Debug, Default)]
pub(crate) struct PodGates {
    health: Mutex<BTreeMap<Owner, ReadHealth>>,
    /// Target groups for which pods wait.
    groups: AtomicU32,
    changed: Notify,
}

impl PodGates {
    /// Records the health of a load balancer for which pods wait. The read began at `at`.
    pub(crate) fn record(&self, owner: &Owner, targets: &[TargetHealth], at: Instant) {
        self.lock().insert(owner.clone(), ReadHealth::new(targets, at));
        self.changed.notify_one();
    }

    /// Read the health of a load balancer this often while pods wait for it.
    pub(crate) fn poll(&self) -> Duration {
        HEALTH_POLL.max(HEALTH_READ_SHARE.saturating_mul(self.groups.load(Ordering::Relaxed)))
    }

    /// Keeps what is known of the load balancers for which pods wait, and counts their target groups.
    fn retain(&self, waiting: &BTreeMap<Key, WaitingPod>) {
        let services = waiting.values().flat_map(|pod| &pod.services);
        let groups: BTreeSet<_> = services
            .flat_map(|(owner, addresses)| addresses.iter().map(move |address| (owner, address.port())))
            .collect();
        let owners: BTreeSet<&Owner> = groups.iter().map(|(owner, _)| *owner).collect();
        self.groups.store(u32::try_from(groups.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.lock().retain(|owner, _| owners.contains(owner));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Owner, ReadHealth>> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets the conditions until `stop`, then waits for the running writes.
pub(crate) async fn run(
    reconciler: Arc<Reconciler>,
    gates: Arc<PodGates>,
    writer: PodWriter,
    stop: CancellationToken,
) {
    let mut task = GateTask {
        reconciler,
        gates,
        writer,
        waits: BTreeMap::new(),
        writes: JoinSet::new(),
        writing: BTreeMap::new(),
    };
    loop {
        let began = Instant::now();
        let is_waiting = task.look();
        let pause = PAUSE.max(began.elapsed() * PAUSE_FACTOR);
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(ended) = task.writes.join_next_with_id() => task.on_write_end(ended),
            () = task.reconciler.cluster.pods_changed() => {}
            () = task.gates.changed.notified() => {}
            () = tokio::time::sleep(LOOK_AGAIN), if is_waiting => {}
        }
        while let Some(ended) = task.writes.try_join_next_with_id() {
            task.on_write_end(ended);
        }
    }
    while task.writes.join_next().await.is_some() {}
}

/// What this process knows of a waiting pod.
#[derive(Clone, Debug)]
struct Wait {
    since: Instant,
    /// The last condition that was sent.
    sent: Option<GateCondition>,
    is_writing: bool,
    failures: u32,
    /// Not before then is the same sent again, or anything after a failure.
    again_at: Instant,
}

impl Wait {
    fn begin(now: Instant) -> Self {
        Self { since: now, sent: None, is_writing: false, failures: 0, again_at: now }
    }

    /// Whether this condition may be sent now.
    fn may_send(&self, wanted: &GateCondition, now: Instant) -> bool {
        let is_sent = self.sent.as_ref().is_some_and(|sent| sent.reason == wanted.reason);
        // Its answer may be lost, or the watch may be late: it is never taken back.
        let takes_back = !wanted.is_met && self.sent.as_ref().is_some_and(|sent| sent.is_met);
        !self.is_writing && !takes_back && (now >= self.again_at || self.failures == 0 && !is_sent)
    }
}

type Written = (Pod, GateCondition, Result<(), WriteError>);

struct GateTask {
    reconciler: Arc<Reconciler>,
    gates: Arc<PodGates>,
    writer: PodWriter,
    /// By the pod's UID.
    waits: BTreeMap<String, Wait>,
    writes: JoinSet<Written>,
    /// The pod of each task in `writes`, to name the one whose task panicked.
    writing: BTreeMap<Id, (Key, String)>,
}

impl GateTask {
    /// Decides for all waiting pods, and starts the writes. Returns whether any pod waits.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        let waiting = self.reconciler.cluster.waiting_pods(&self.reconciler.config);
        self.reconciler.metrics.pod_gates.set_waiting(waiting.len());
        self.gates.retain(&waiting);
        let uids: BTreeSet<&str> = waiting.values().map(|found| found.pod.uid.as_str()).collect();
        self.waits.retain(|uid, _| uids.contains(uid.as_str()));
        let is_current = !self.reconciler.is_frozen();
        let mut due: Vec<(&Pod, GateCondition)> = Vec::new();
        for WaitingPod { pod, services, may_have_service } in waiting.values() {
            let wait = self.waits.entry(pod.uid.clone()).or_insert_with(|| Wait::begin(now));
            let wanted = {
                let health = self.gates.lock();
                let of = services.iter().map(|(owner, addresses)| PodService {
                    key: &owner.service,
                    addresses,
                    health: health.get(owner),
                });
                let services: Vec<_> = of.collect();
                let grace = if *may_have_service { SLICES_GRACE } else { SERVICE_GRACE };
                decide(pod, &services, grace, wait.since, now, is_current)
            };
            due.extend(wanted.filter(|wanted| wait.may_send(wanted, now)).map(|wanted| (pod, wanted)));
        }
        // Pods that are healthy do not wait for reports about others.
        due.sort_by_key(|(_, wanted)| !wanted.is_met);
        for (pod, wanted) in due.into_iter().take(WRITES.saturating_sub(self.writes.len())) {
            let Some(wait) = self.waits.get_mut(&pod.uid) else { continue };
            (wait.is_writing, wait.sent) = (true, Some(wanted.clone()));
            let (writer, pod) = (self.writer.clone(), pod.clone());
            let of = (pod.key.clone(), pod.uid.clone());
            let task = self.writes.spawn(async move {
                let result = writer.set(&pod, &wanted).await;
                (pod, wanted, result)
            });
            self.writing.insert(task.id(), of);
        }
        !waiting.is_empty()
    }

    fn on_write_end(&mut self, ended: Result<(Id, Written), JoinError>) {
        let now = Instant::now();
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let of = self.writing.remove(&id);
        let (pod, condition, result) = match ended {
            Ok((_, written)) => written,
            Err(error) => {
                let Some((pod, uid)) = of else { return };
                tracing::error!(%pod, uid, %error, "task that writes a readiness gate panicked; retrying; report this as a bug");
                if let Some(wait) = self.waits.get_mut(&uid) {
                    wait.is_writing = false;
                }
                return;
            }
        };
        if result.is_ok() {
            self.report(&pod, &condition);
        }
        // The watch may have shown the written condition already, or the end of the pod.
        let Some(wait) = self.waits.get_mut(&pod.uid) else { return };
        wait.is_writing = false;
        match result {
            Ok(()) => (wait.failures, wait.again_at) = (0, now + WRITE_AGAIN),
            Err(error) => {
                wait.failures = wait.failures.saturating_add(1);
                let delay = BACKOFF.delay(wait.failures, fastrand::f64());
                wait.again_at = now + delay;
                let retry_in = duration::rounded(delay);
                tracing::warn!(pod = %pod.key, error = chain(&error), %retry_in, "readiness gate not written; retrying");
            }
        }
    }

    fn report(&self, pod: &Pod, condition: &GateCondition) {
        let GateCondition { is_met, reason, message } = condition;
        self.reconciler.metrics.pod_gates.written(reason);
        tracing::info!(pod = %pod.key, uid = pod.uid, is_met, reason, note = message, "readiness gate set");
        if *reason == reasons::GATE_TIMED_OUT {
            self.reconciler.recorder.publish(Notice {
                subject: Subject::pod(pod),
                severity: Severity::Warning,
                reason,
                action: "Gate",
                note: message.clone(),
            });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
