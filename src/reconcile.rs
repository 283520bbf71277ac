// SPDX-License-Identifier: Apache-2.0
//! Reconciles one load balancer: compares what its Service requests with what is in place, and writes the difference.
//!
//! Called by the workers, at most once at a time for each serialisation key.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::{Service, ServiceKind};
use steerage_process::duration;
use steerage_provider_api::{Error, Owner, Progress};
use steerage_watch::Staleness;
use steerage_watch::events::{Recorder, ServiceRecorder};

use crate::applied::{AppliedState, AppliedStates};
use crate::cluster_index::{ClusterIndex, Snapshot};
use crate::guarded_provider::GuardedProvider;
use crate::metrics::Metrics;
use crate::plan::{self, Config, TargetPlan};
use crate::queue::ReconcileOutcome;
use crate::request_queue::ReconcileRequest;
use crate::service_reader::{ReadError, ServiceReader};
use crate::service_writer::{ServiceWriter, WriteError};

mod ensure;
mod teardown;

/// Why a reconcile could not be completed.
#[derive(Debug, thiserror::Error)]
enum ReconcileError {
    #[error(transparent)]
    Provider(#[from] Error),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("the API server still has the Service, but the watch does not show it")]
    MissedByWatch,
}

type ReconcileResult = Result<Progress, ReconcileError>;

pub(crate) struct Reconciler {
    pub(crate) provider: GuardedProvider,
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
    /// Whether Services are patched to what their legacy annotations request.
    pub(crate) migrate_legacy_annotations: bool,
}

impl Reconciler {
    pub(crate) async fn reconcile(
        &self,
        owner: &Owner,
        request: &ReconcileRequest,
    ) -> ReconcileOutcome<ReconcileRequest> {
        let known = self.applied.get(owner);
        let mut snapshot = self.cluster.snapshot(owner);
        if known.is_none() && snapshot.as_ref().is_some_and(|s| self.is_managed(&s.service)) {
            // Known before the look at the cluster that counts: every later change, of nodes too, then adds a request.
            self.applied.put(owner, AppliedState::default());
            snapshot = self.cluster.snapshot(owner);
        }
        let is_known = known.is_some();
        let exists = is_known || request.exists_at_provider;
        let mut applied = known.unwrap_or_default();
        if request.full {
            applied.forget_pending_writes();
        }
        let (result, keep_if_done, keep_if_not_done) = match &snapshot {
            Some(snapshot) if self.is_managed(&snapshot.service) => {
                applied.fingerprint = Some(plan::fingerprint(&snapshot.service));
                (self.ensure(snapshot, &mut applied, request).await, true, true)
            }
            Some(snapshot) => {
                let result = self.tear_down(&snapshot.service, owner, &mut applied, exists).await;
                (result, false, is_known)
            }
            // An owner that only the provider named stays unknown, so that the next comparison checks it again.
            None if exists => (self.delete_orphan(owner).await, false, is_known),
            None => (Ok(Progress::Done), false, false),
        };
        let is_done = matches!(result, Ok(Progress::Done));
        if (is_done && keep_if_done) || (!is_done && keep_if_not_done) {
            self.applied.put(owner, applied);
        } else {
            self.applied.remove(owner);
        }
        self.metrics.load_balancers.set(i64::try_from(self.applied.len()).unwrap_or(i64::MAX));
        self.outcome(owner, request, result)
    }

    fn is_managed(&self, service: &Service) -> bool {
        plan::is_managed(service, &self.config.classes)
    }

    fn outcome(
        &self,
        owner: &Owner,
        request: &ReconcileRequest,
        result: ReconcileResult,
    ) -> ReconcileOutcome<ReconcileRequest> {
        let service = &owner.service;
        let again = ReconcileRequest { full: true, ..request.clone() };
        let (label, outcome) = match result {
            Ok(Progress::Done) => ("done", ReconcileOutcome::Done),
            Ok(Progress::Again(after)) => ("again", ReconcileOutcome::RequeueAfter(after, again)),
            // Only a change of the Service or of the configuration helps, and either adds a request.
            Err(ReconcileError::Provider(Error::Invalid { reason, message })) => {
                tracing::warn!(%service, reason, message, "provider rejected the Service; waiting for a change");
                ("refused", ReconcileOutcome::Done)
            }
            Err(ReconcileError::Provider(error)) => {
                let after = if let Error::Throttled { after, .. } = &error { *after } else { None };
                let retry_in = after.map(|after| duration::rounded(after).to_string());
                tracing::warn!(%service, %error, retry_in, "load balancer not programmed; retrying");
                ("failed", ReconcileOutcome::Failed(after, again))
            }
            Err(ReconcileError::Write(error)) => {
                let error = steerage_model::chain(&error);
                tracing::warn!(%service, error, "Service not written; retrying after the backoff");
                ("failed", ReconcileOutcome::Failed(None, again))
            }
            Err(error @ (ReconcileError::Read(_) | ReconcileError::MissedByWatch)) => {
                let error = steerage_model::chain(&error);
                tracing::warn!(
                    %service, uid = owner.uid, error,
                    "load balancer without a Service kept; checking again after the backoff"
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

    /// Whether the Service would be managed if `--serve-unset-class` were set.
    fn is_unmanaged_by_flag(&self, service: &Service) -> bool {
        let is_load_balancer = service.kind == ServiceKind::LoadBalancer && !service.deleting;
        is_load_balancer && service.class.is_none() && !self.config.classes.serve_unset
    }
}

fn log_target_reasons(snapshot: &Snapshot, targets: &TargetPlan) {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let Snapshot { service, endpoints, nodes } = snapshot;
    for (node, reason) in plan::target_reasons(service, endpoints, nodes, targets) {
        tracing::debug!(service = %service.key, node, %reason, "target decision");
    }
}

#[cfg(test)]
pub(crate) mod tests;
