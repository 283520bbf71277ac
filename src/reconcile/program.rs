// SPDX-License-Identifier: Apache-2.0
//! Gives the provider a Service's load balancer with its targets. Called by `ensure`, which reports the result.
//!
//! A rejected structure does not stop the targets: what exists keeps its structure, and its targets follow the endpoints.

use std::time::Duration;

use steerage_model::Service;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Progress, Steering, TargetSet};
use tokio::time::Instant;

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::{AppliedState, GivenTargets};
use crate::cluster_index::{Snapshot, owner_of};
use crate::plan::{self, TargetPlan};
use crate::reasons;
use crate::removal_hold::{HoldingSet, RemovalHold};
use crate::request_queue::ReconcileRequest;
use crate::status::ReasonMessage;

/// Wait before frozen targets are looked at again: the thaw is no event.
const FROZEN_RETRY: Duration = Duration::from_secs(5);

/// The targets for the provider.
pub(super) struct PlannedTargets {
    pub(super) plan: TargetPlan,
    /// Those of the plan, or the last ones.
    set: TargetSet,
    /// Why they are the last ones.
    pub(super) frozen: Option<String>,
}

impl Reconciler {
    /// Programs the load balancer. If it is rejected, what exists stays, and the second value says why.
    pub(super) async fn program_or_keep(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        lb: LoadBalancer,
        steering: Steering,
    ) -> (ReconcileResult, Option<ReasonMessage>, PlannedTargets) {
        let planned = self.plan_targets(snapshot, applied, steering);
        let lb = LoadBalancer { targets: planned.set.clone(), ..lb };
        let error = match self.program(snapshot, applied, request, &lb, steering, &planned).await {
            Err(ReconcileError::Provider(error @ Error::Invalid { .. })) => error,
            Err(ReconcileError::Provider(error @ Error::Denied(_))) => {
                // A permission may be missing for a part of the structure only.
                let (_, planned) = self.keep_structure(snapshot, applied, request).await;
                return (Err(error.into()), None, planned);
            }
            result => return (result, None, planned),
        };
        let why = (error.reason(), error.to_string());
        applied.rejected = Some((lb, why.clone()));
        let (kept, planned) = self.keep_structure(snapshot, applied, request).await;
        // The error ends the retries: only a change of the Service or of the configuration helps, and either adds a request.
        let result = match kept {
            Ok(Progress::Done) => Err(error.into()),
            other => other,
        };
        (result, Some(why), planned)
    }

    /// Passes the load balancer to the provider, unless it is in place.
    async fn program(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        lb: &LoadBalancer,
        steering: Steering,
        planned: &PlannedTargets,
    ) -> ReconcileResult {
        let is_same = |before: &LoadBalancer| before.targets == lb.targets && before.has_structure_of(lb);
        if applied.in_place.as_ref().is_some_and(is_same)
            && !request.full
            && !is_due(applied.retry_refused_at)
        {
            return Ok(Progress::Done);
        }
        let service = &snapshot.service;
        if !exists(service, applied) {
            let ensuring = (reasons::ENSURING, "Creating the load balancer.".to_owned());
            if applied.is_new_event("Ensure", Some(&ensuring)) {
                self.events(service).normal("Ensure", ensuring.0, &ensuring.1);
            }
        }
        (applied.in_place, applied.rejected, applied.retry_refused_at) = (None, None, None);
        let accepted = applied.accepted.take();
        let result = self.provider.apply(lb, compare(request)).await;
        applied.accepted = match &result {
            Ok(_) => Some((steering, service.external_policy)),
            // The health check may be changed already.
            Err(Error::Denied(_)) => accepted.filter(|before| *before == (steering, service.external_policy)),
            Err(_) => None,
        };
        let progress = self.record(snapshot, applied, request, planned, result)?;
        if progress == Progress::Done {
            applied.in_place = Some(lb.clone());
        }
        Ok(progress)
    }

    /// The requested structure is unsupported. The existing load balancer keeps its own, and its targets follow the endpoints.
    pub(super) async fn keep_structure(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
    ) -> (ReconcileResult, PlannedTargets) {
        // The check in place was made for one steering and policy. Where it is unknown or was made for another policy, only nodes with
        // an endpoint are right: they pass any check.
        let steering = match applied.accepted {
            Some((steering, policy)) if policy == snapshot.service.external_policy => steering,
            _ => Steering::Api,
        };
        let planned = self.plan_targets(snapshot, applied, steering);
        let is_same = |given: &GivenTargets| given.is_complete && given.set == planned.set;
        let is_same = applied.targets.as_ref().is_some_and(is_same);
        if is_same && !request.full && !is_due(applied.retry_refused_at) {
            return (Ok(Progress::Done), planned);
        }
        (applied.in_place, applied.retry_refused_at) = (None, None);
        let result = self.provider.set_targets(&owner_of(&snapshot.service), &planned.set).await;
        (self.record(snapshot, applied, request, &planned, result), planned)
    }

    /// The targets for a steering, or those that the provider was given last while a watch is stale.
    fn plan_targets(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        steering: Steering,
    ) -> PlannedTargets {
        let Snapshot { service, endpoints, nodes } = snapshot;
        let mut plan = plan::targets(service, endpoints, nodes, steering, &self.config);
        if plan.set.shared.is_none() {
            let staying = |node: &str| plan::staying_target(node, endpoints, nodes, &self.config);
            let set = HoldingSet::Own(&service.key);
            let held = self.breaker.update(set, &mut applied.hold, &plan.set.targets, staying);
            plan.set = TargetSet::own(held);
        } else {
            applied.hold = RemovalHold::default();
        }
        applied.depends = Some(plan.depends.clone());
        let last = applied.targets.as_ref().map(|given| &given.set).filter(|last| **last != plan.set);
        let (set, frozen) = match last.and_then(|last| Some((last, self.frozen()?))) {
            Some((last, why)) => (last.clone(), Some(why)),
            None => (plan.set.clone(), None),
        };
        applied.frozen_until = frozen.as_ref().map(|_| Instant::now() + FROZEN_RETRY);
        PlannedTargets { plan, set, frozen }
    }

    /// Records the result of a call that gave the provider these targets.
    fn record(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        planned: &PlannedTargets,
        result: Result<Outcome, Error>,
    ) -> ReconcileResult {
        let set = &planned.set;
        let is_complete = result.as_ref().is_ok_and(|outcome| outcome.progress == Progress::Done);
        // A rejected structure leaves the targets as they were, or adds some that are wanted.
        if !matches!(result, Err(Error::Invalid { .. })) {
            let given = GivenTargets { set: set.clone(), is_complete };
            let before = applied.targets.replace(given);
            if is_complete && !before.is_some_and(|before| before.is_complete && before.set == *set) {
                if let Some(changed) = request.endpoints_changed {
                    self.metrics.targets_programmed(changed.elapsed());
                }
                tracing::info!(service = %snapshot.service.key, targets = set.targets.len(), "targets set");
                super::log_target_reasons(snapshot, &planned.plan);
            }
        }
        let outcome = result?;
        if !outcome.ingress.is_empty() {
            applied.ingress = outcome.ingress;
        }
        applied.refused_targets = outcome.refused;
        if let Some((reason, message)) = &outcome.incomplete
            && applied.incomplete.as_ref().is_none_or(|before| before.0 != *reason)
        {
            tracing::warn!(service = %snapshot.service.key, reason, message, "load balancer not programmed completely");
        }
        applied.incomplete = outcome.incomplete;
        applied.retry_refused_at = outcome.retry_refused.map(|after| Instant::now() + after);
        Ok(outcome.progress)
    }
}

/// Whether this time has come.
pub(super) fn is_due(at: Option<Instant>) -> bool {
    at.is_some_and(|at| at <= Instant::now())
}

/// A request for a full comparison follows a change at the provider, or the resync. After a failure the provider remembers nothing.
fn compare(request: &ReconcileRequest) -> Compare {
    if request.full { Compare::InPlace } else { Compare::Remembered }
}

/// Whether the Service has a load balancer.
pub(super) fn exists(service: &Service, applied: &AppliedState) -> bool {
    !applied.ingress.is_empty() || !service.ingress.is_empty()
}
