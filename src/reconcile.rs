// SPDX-License-Identifier: Apache-2.0
//! Reconciles one load balancer: compares what its Service requests with what is in place, and writes the difference.
//!
//! Called by the workers, at most once at a time for each serialisation key.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Service;
use steerage_process::duration;
use steerage_provider_api::{Error, Owner, Progress, SharedSet};
use steerage_watch::Staleness;
use steerage_watch::events::{Recorder, ServiceRecorder};
use tokio::time::Instant;

use crate::applied::{AppliedState, AppliedStates};
use crate::cluster_index::{ClusterIndex, Snapshot};
use crate::leader_provider::LeaderProvider;
use crate::metrics::Metrics;
use crate::plan::{self, Config, TargetPlan};
use crate::pod_gates::PodGates;
use crate::queue::ReconcileOutcome;
use crate::removal_hold::RemovalBreaker;
use crate::repeated_logs::RepeatedLogs;
use crate::request_queue::ReconcileRequest;
use crate::service_reader::{ReadError, ServiceReader};
use crate::service_writer::{ServiceWriter, WriteError};
use program::is_due;

mod ensure;
mod health;
mod pause;
mod program;
mod sources;
mod teardown;

/// The shortest wait for what is due, also if a reconcile ended before it got to it.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// Wait before a call that the provider refused because there were too many.
const THROTTLED_RETRY: Duration = Duration::from_secs(10);
/// The same for targets, for which clients wait. The provider's budget keeps the rate.
const URGENT_THROTTLED_RETRY: Duration = Duration::from_secs(1);
/// The provider is asked again after this time, however long it wants to be left alone: a gateway in maintenance may say an hour and be back
/// in a minute.
const LONGEST_THROTTLED_RETRY: Duration = Duration::from_mins(5);
/// The same for targets.
const LONGEST_URGENT_THROTTLED_RETRY: Duration = Duration::from_secs(30);

/// Why a reconcile could not be completed.
#[derive(Debug, thiserror::Error)]
enum ReconcileError {
    #[error(transparent)]
    Provider(#[from] Error),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("the provider has everything, and the status of the Service is not written")]
    Unreported,
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("the API server still has the Service, but the watch does not show it")]
    MissedByWatch,
}

type ReconcileResult = Result<Progress, ReconcileError>;

pub(crate) struct Reconciler {
    pub(crate) provider: LeaderProvider,
    pub(crate) cluster: Arc<ClusterIndex>,
    pub(crate) config: Config,
    pub(crate) reader: ServiceReader,
    pub(crate) writer: ServiceWriter,
    pub(crate) recorder: Recorder,
    pub(crate) metrics: Metrics,
    pub(crate) applied: Arc<AppliedStates>,
    pub(crate) staleness: Staleness,
    /// Targets are frozen after this long without watch data; `None` disables.
    pub(crate) freeze_targets_after: Option<Duration>,
    /// Holds mass removals from the Services' own sets of targets.
    pub(crate) breaker: RemovalBreaker,
    /// Every load balancer is compared with the provider about this often.
    pub(crate) resync_period: Duration,
    /// What the readiness gates of pods need; `None` if pods do not wait.
    pub(crate) pod_gates: Option<Arc<PodGates>>,
    /// Whether Services are patched to what their legacy annotations request.
    pub(crate) migrate_legacy_annotations: bool,
    /// What is refused again and again.
    pub(crate) repeated_logs: RepeatedLogs,
}

impl Reconciler {
    pub(crate) async fn reconcile(
        &self,
        owner: &Owner,
        request: &ReconcileRequest,
    ) -> ReconcileOutcome<ReconcileRequest> {
        let known = self.applied.get(owner);
        let mut snapshot = self.cluster.snapshot(owner, &self.config);
        if known.is_none() && snapshot.as_ref().is_some_and(|s| self.is_managed(&s.service)) {
            // Known before the look at the cluster that counts: every later change, of nodes too, then adds a request.
            self.applied.put(owner, AppliedState::default());
            snapshot = self.cluster.snapshot(owner, &self.config);
        }
        let is_known = known.is_some();
        let exists = is_known || request.exists_at_provider;
        let mut applied = known.unwrap_or_default();
        let counted = applied.conditions;
        // Not in a request that took the place of one for targets: a comparison may wait for the provider for long.
        let may_compare = !(request.is_urgent() && request.is_of_targets());
        let full = request.full || is_due(applied.compare_at) && may_compare || applied.is_paused;
        let request = &ReconcileRequest { full, ..*request };
        if full {
            applied.forget_pending_writes();
        }
        if full || applied.compare_at.is_none() {
            // Spread, so that load balancers that were compared at once drift apart.
            let period = self.resync_period.mul_f64(0.8 + fastrand::f64() * 0.4);
            applied.compare_at = Some(Instant::now() + period);
        }
        applied.is_paused = false;
        let (result, keep_if_done, keep_if_not_done) = match &snapshot {
            Some(Snapshot { service, .. }) if self.is_paused(service) => {
                (self.pause(service, &mut applied).await, true, true)
            }
            Some(snapshot) if self.is_managed(&snapshot.service) => {
                applied.fingerprint = Some(plan::fingerprint(&snapshot.service));
                (self.ensure(snapshot, &mut applied, request).await, true, true)
            }
            Some(snapshot) => {
                applied.forget_load_balancer();
                let result = self.tear_down(&snapshot.service, owner, &mut applied, exists).await;
                (result, false, is_known)
            }
            // An owner that only the provider named stays unknown, so that the next comparison checks it again.
            None if exists => (self.delete_orphan(owner).await, false, is_known),
            None => (Ok(Progress::Done), false, false),
        };
        let is_done = matches!(result, Ok(Progress::Done));
        let due = applied.due_at().filter(|_| keep_if_done).map(|at| {
            // A comparison that was put off is part of the next request, whatever else that one is for.
            (at, ReconcileRequest { full: is_due(applied.compare_at), ..ReconcileRequest::default() })
        });
        let is_kept = (is_done && keep_if_done) || (!is_done && keep_if_not_done);
        let conditions = applied.conditions.filter(|_| is_kept);
        let looks_at_labels = applied.node_labels.is_some();
        let follows = applied.targets.as_ref().is_some_and(|given| given.is_complete);
        self.metrics.conditions.replace(self.config.classes.provider, counted, conditions);
        if is_kept {
            self.applied.put(owner, applied);
        } else {
            self.applied.remove(owner);
        }
        self.metrics.load_balancers.set(i64::try_from(self.applied.len()).unwrap_or(i64::MAX));
        self.metrics.holds.set_own(self.applied.holding());
        // What the next try owes to clients. Their targets are set, whatever becomes of the structure: the next event is not to wait for the
        // backoff of a permission that is missing for hours.
        let is_denied = matches!(result, Err(ReconcileError::Provider(Error::Denied(_))));
        let request = if is_denied && follows { &request.without_urgency() } else { request };
        let outcome = self.outcome(owner, request, result, due, !keep_if_done);
        // A node that changed meanwhile was compared with the plan before this one.
        let is_outdated = keep_if_done
            && snapshot.as_ref().is_some_and(|snapshot| self.is_outdated(snapshot, looks_at_labels));
        match outcome {
            ReconcileOutcome::Done | ReconcileOutcome::RequeueAfter(..) if is_outdated => {
                let next = match outcome {
                    ReconcileOutcome::RequeueAfter(_, next) => next,
                    _ => ReconcileRequest::default(),
                };
                ReconcileOutcome::RequeueAfter(Duration::ZERO, next)
            }
            outcome => outcome,
        }
    }

    /// Whether nodes changed since, in what a plan may look at.
    fn is_outdated(&self, snapshot: &Snapshot, looks_at_labels: bool) -> bool {
        let now = self.cluster.nodes();
        snapshot.nodes.generation != now.generation
            || looks_at_labels && snapshot.nodes.revision != now.revision
    }

    fn is_managed(&self, service: &Service) -> bool {
        plan::is_managed(service, &self.config.classes)
    }

    /// Whether the Service is this controller's, and paused. Also one that is being deleted.
    fn is_paused(&self, service: &Service) -> bool {
        let is_ours =
            self.is_managed(service) || !plan::owned_finalizers(service, &self.config.classes).is_empty();
        is_ours && plan::is_paused(service) == Ok(true)
    }

    fn outcome(
        &self,
        owner: &Owner,
        request: &ReconcileRequest,
        result: ReconcileResult,
        due: Option<(Instant, ReconcileRequest)>,
        is_deletion: bool,
    ) -> ReconcileOutcome<ReconcileRequest> {
        let service = &owner.service;
        // A wait is repeated not in full: otherwise every event during it would compare everything. The provider forgets what it cannot
        // be sure of. A failure may come before the comparison, so it repeats the request as it is.
        let again = ReconcileRequest { may_change: request.may_change || request.full, ..*request };
        let done = match due {
            Some((at, next)) => ReconcileOutcome::RequeueAfter(
                at.saturating_duration_since(Instant::now()).max(MIN_WAIT),
                next,
            ),
            None => ReconcileOutcome::Done,
        };
        let (label, outcome) = match result {
            Ok(Progress::Done) => ("done", done),
            Ok(Progress::Again(after)) => {
                ("again", ReconcileOutcome::RequeueAfter(after, ReconcileRequest { full: false, ..again }))
            }
            // The provider still lists the load balancer, so every resync adds a request.
            Err(ReconcileError::Provider(Error::Invalid { reason, message })) if is_deletion => {
                tracing::warn!(
                    %service, reason, message,
                    "provider refused the deletion; keeping the load balancer and the finalizer until the next resync"
                );
                ("rejected", done)
            }
            // A change of the Service adds a request. The comparison of the resync asks the provider again.
            Err(ReconcileError::Provider(Error::Invalid { reason, message })) => {
                // Each address that is freed is tried by all Services that wait for one.
                if self.repeated_logs.is_news(service, reason) {
                    tracing::warn!(
                        %service, reason, message,
                        "provider refused the Service; keeping what exists, retrying at the next resync or when the Service changes"
                    );
                } else {
                    tracing::debug!(%service, reason, message, "provider refused the Service again");
                }
                ("rejected", done)
            }
            Err(ReconcileError::Provider(error)) => {
                // Not after the backoff: that of many failures goes on for minutes after the provider takes calls again.
                let after = match &error {
                    Error::Throttled { after, .. } => Some(throttled_wait(*after, again.is_urgent())),
                    _ => None,
                };
                let retry_in = after.map(|after| duration::rounded(after).to_string());
                let is_news = after.is_none() || self.repeated_logs.is_news(service, "Throttled");
                match (is_news, is_deletion) {
                    (true, true) => {
                        tracing::warn!(%service, %error, retry_in, "load balancer not deleted; keeping the finalizer and retrying");
                    }
                    (true, false) => {
                        tracing::warn!(%service, %error, retry_in, "load balancer not programmed; retrying");
                    }
                    (false, _) => tracing::debug!(%service, %error, retry_in, "throttled; retrying"),
                }
                let outcome = match error {
                    Error::Unavailable(_) => ReconcileOutcome::Unanswered(again),
                    _ => ReconcileOutcome::Failed(after, again),
                };
                ("failed", outcome)
            }
            Err(ReconcileError::Write(error)) => {
                let error = steerage_model::chain(&error);
                tracing::warn!(%service, error, "Service not written; retrying after the backoff");
                ("failed", ReconcileOutcome::Failed(None, again))
            }
            // Logged already. What is due says when the write is tried again.
            Err(ReconcileError::Unreported) => ("failed", done),
            Err(error @ (ReconcileError::Read(_) | ReconcileError::MissedByWatch)) => {
                let error = steerage_model::chain(&error);
                tracing::warn!(
                    %service, uid = owner.uid, error,
                    "Service not confirmed as deleted; keeping its load balancer and checking again"
                );
                ("failed", ReconcileOutcome::Failed(None, again))
            }
        };
        self.metrics.reconciled(label);
        outcome
    }

    fn events<'a>(&'a self, service: &'a Service) -> ServiceRecorder<'a> {
        ServiceRecorder::new(&self.recorder, service)
    }

    /// Gives the provider a shared set as it is now. `None` while targets are frozen.
    pub(crate) async fn set_shared(&self, set: SharedSet) -> Option<Result<(), Error>> {
        if self.frozen().is_some() {
            return None;
        }
        let set = self.cluster.nodes().set(set);
        Some(self.provider.set_shared(&set).await)
    }

    /// Whether targets must not change now.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen().is_some()
    }

    /// Why targets must not change now, if a watch is stale.
    fn frozen(&self) -> Option<String> {
        let (kind, silence) = self.staleness.longest()?;
        let limit = self.freeze_targets_after.filter(|limit| silence > *limit)?;
        let limit = duration::display(limit);
        Some(format!(
            "The watch of {kind} has had no data for more than {limit}. The last targets are kept. \
             Check the connection to the API server."
        ))
    }
}

/// When to call again after the provider refused a call because there were too many. `after` is the provider's own wish.
fn throttled_wait(after: Option<Duration>, is_urgent: bool) -> Duration {
    let (usual, longest) = if is_urgent {
        (URGENT_THROTTLED_RETRY, LONGEST_URGENT_THROTTLED_RETRY)
    } else {
        (THROTTLED_RETRY, LONGEST_THROTTLED_RETRY)
    };
    after.unwrap_or(usual).min(longest)
}

fn log_target_reasons(snapshot: &Snapshot, targets: &TargetPlan) {
    // Pods are targets for one reason: they are endpoints.
    if targets.pods.is_some() || !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let Snapshot { service, endpoints, nodes } = snapshot;
    for (node, reason) in plan::target_reasons(service, endpoints, nodes, targets) {
        tracing::debug!(service = %service.key, node, %reason, "target decision");
    }
}

#[cfg(test)]
pub(crate) mod tests;
