// SPDX-License-Identifier: Apache-2.0
//! One look at one load balancer: what it should be now, the calls and writes that make it so. Called by the workers, at most once
//! at a time for each.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Service;
use steerage_provider_api::{Error, Owner, Progress};
use steerage_watch::Staleness;
use steerage_watch::events::{Recorder, ServiceRecorder};
use tokio::time::Instant;

use crate::applied::AppliedStates;
use crate::cluster_index::ClusterIndex;
use crate::guarded_provider::GuardedProvider;
use crate::metrics::Metrics;
use crate::plan::{self, Config, NodeTargets, TargetPlan};
use crate::queue::{QueueItem, TaskOutcome};
use crate::service_writer::{ServiceWriter, WriteError};

mod ensure;
mod teardown;

/// ReasonMessage a load balancer is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReconcileRequest {
    /// When endpoints changed that it does not follow yet.
    pub(crate) since: Option<Instant>,
    /// Everything is to be compared, with the provider too.
    pub(crate) all: bool,
    /// The provider holds something for it, whether we remember it or not.
    pub(crate) owned: bool,
}

impl QueueItem for ReconcileRequest {
    fn merge(&mut self, other: Self) {
        self.since = match (self.since, other.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.all |= other.all;
        self.owned |= other.owned;
    }

    fn urgent(&self) -> bool {
        self.since.is_some()
    }
}

/// How it went.
#[derive(Debug)]
enum ReconcileOutcome {
    /// Nothing is left to do.
    Done,
    /// The provider needs time.
    Again(Duration),
    /// The provider failed.
    Provider(Error),
    /// A write to the Service failed.
    Write(WriteError),
}

impl From<WriteError> for ReconcileOutcome {
    fn from(error: WriteError) -> Self {
        Self::Write(error)
    }
}

/// Everything that a look needs.
pub(crate) struct Reconciler {
    pub(crate) provider: GuardedProvider,
    pub(crate) cluster: Arc<ClusterIndex>,
    pub(crate) config: Config,
    pub(crate) writer: ServiceWriter,
    pub(crate) recorder: Recorder,
    pub(crate) metrics: Metrics,
    pub(crate) applied: AppliedStates,
    pub(crate) staleness: Staleness,
    /// Silence of a watch after which targets stay as they are; `None` for ever trusting.
    pub(crate) freeze_targets_after: Option<Duration>,
    /// Whether Services are changed to what their old annotations ask for.
    pub(crate) migrate: bool,
}

/// What the index says of a Service, at one moment.
struct Seen {
    service: Service,
    nodes: Arc<NodeTargets>,
}

impl Reconciler {
    /// Looks at one load balancer.
    pub(crate) async fn reconcile(
        &self,
        owner: &Owner,
        request: ReconcileRequest,
    ) -> TaskOutcome<ReconcileRequest> {
        let seen = self.cluster.read(|index, nodes| {
            let service = index.service(&owner.service).filter(|service| service.uid == owner.uid)?;
            Some(Seen { service: service.clone(), nodes: Arc::clone(nodes) })
        });
        let known = self.applied.get(owner);
        let mut state = known.clone().unwrap_or_default();
        if request.all {
            state.invalidate();
        }
        let (outcome, keep) = match seen {
            Some(seen) if plan::is_managed(&seen.service, &self.config.classes) => {
                state.fingerprint = Some(plan::fingerprint(&seen.service));
                (self.serve(&seen, &mut state, &request).await, true)
            }
            Some(seen) => {
                let held = known.is_some() || request.owned;
                let outcome = self.release(&seen.service, owner, &mut state, held).await;
                let keep = !matches!(outcome, Ok(ReconcileOutcome::Done)) && known.is_some();
                (outcome, keep)
            }
            None if known.is_some() || request.owned => {
                let outcome = self.delete(owner).await;
                let keep = !matches!(outcome, Ok(ReconcileOutcome::Done));
                (outcome, keep)
            }
            None => (Ok(ReconcileOutcome::Done), false),
        };
        if keep {
            self.applied.put(owner, state);
        } else {
            self.applied.remove(owner);
        }
        self.metrics.load_balancers.set(i64::try_from(self.applied.len()).unwrap_or(i64::MAX));
        self.outcome(owner, &request, outcome.unwrap_or_else(|outcome| outcome))
    }

    fn outcome(
        &self,
        owner: &Owner,
        request: &ReconcileRequest,
        outcome: ReconcileOutcome,
    ) -> TaskOutcome<ReconcileRequest> {
        match outcome {
            ReconcileOutcome::Done => {
                self.metrics.reconciled("done");
                TaskOutcome::Done
            }
            ReconcileOutcome::Again(after) => {
                self.metrics.reconciled("again");
                TaskOutcome::Again(after, ReconcileRequest { all: true, ..*request })
            }
            // No retry helps until the Service or the configuration changes, and both bring it back here.
            ReconcileOutcome::Provider(Error::Invalid { reason, message }) => {
                self.metrics.reconciled("refused");
                tracing::warn!(service = %owner.service, reason, message, "refused");
                TaskOutcome::Done
            }
            ReconcileOutcome::Provider(error) => {
                self.metrics.reconciled("failed");
                tracing::warn!(service = %owner.service, %error, "failed, to be tried again");
                let after = if let Error::Throttled { after, .. } = &error { *after } else { None };
                TaskOutcome::Failed(after, ReconcileRequest { all: true, ..*request })
            }
            ReconcileOutcome::Write(error) => {
                self.metrics.reconciled("failed");
                tracing::warn!(service = %owner.service, %error, "cannot write to the Service, to be tried again");
                TaskOutcome::Failed(None, ReconcileRequest { all: true, ..*request })
            }
        }
    }

    fn events<'a>(&'a self, service: &'a Service) -> ServiceRecorder<'a> {
        ServiceRecorder::new(&self.recorder, service)
    }

    /// Deletes what outlived its Service.
    async fn delete(&self, owner: &Owner) -> Result<ReconcileOutcome, ReconcileOutcome> {
        tracing::info!(service = %owner.service, uid = owner.uid, "deleting a load balancer whose Service is gone");
        match self.provider.delete(owner).await.map_err(ReconcileOutcome::Provider)? {
            Progress::Done => Ok(ReconcileOutcome::Done),
            Progress::Again(after) => Ok(ReconcileOutcome::Again(after)),
        }
    }

    /// For how long the watches may already be telling old news, if that is too long.
    fn frozen(&self) -> Option<String> {
        let (kind, silence) = self.staleness.longest()?;
        let limit = self.freeze_targets_after.filter(|limit| silence > *limit)?;
        Some(format!("the watch of {kind} has been silent for more than {limit:?}: targets stay as they are"))
    }

    /// Logs why each node is a target or not, for those who ask for that much.
    fn explain(&self, seen: &Seen, targets: &TargetPlan) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let key = &seen.service.key;
        let reasons = self
            .cluster
            .read(|index, _| plan::target_reasons(&seen.service, index.slices(key), &seen.nodes, targets));
        for (node, reason) in reasons {
            tracing::debug!(service = %key, node, %reason, "target or not");
        }
    }

    /// Whether a Service of our provider's is one that we would have to be asked for by flag, and are not.
    fn is_left_to_others(&self, service: &Service) -> bool {
        let plain = service.kind == steerage_model::ServiceKind::LoadBalancer && !service.deleting;
        plain && service.class.is_none() && !self.config.classes.serve_unset
    }
}
