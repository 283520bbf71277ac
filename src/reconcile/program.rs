// SPDX-License-Identifier: Apache-2.0
//! Gives the provider a Service's load balancer with its targets. Called by `ensure`, which reports the result.
//!
//! A rejected structure does not stop the targets: what exists keeps its structure, and its targets follow the endpoints.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Service;
use steerage_provider_api::{
    Compare, Error, GroupTargets, LoadBalancer, Outcome, Progress, Steering, TargetSet,
};
use tokio::time::Instant;

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::{AcceptedCheck, AppliedState, GivenTargets};
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
    targets: GroupTargets,
    /// Why they are the last ones.
    pub(super) frozen: Option<String>,
}

/// For which structure targets are planned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// The planned one.
    Planned,
    /// That in place, which may be reached in another way than the planned one.
    OfAnyStructure,
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
        let planned = self.plan_targets(snapshot, applied, steering, Wanted::Planned);
        let lb = plan::with_last_resort(lb.with_targets(&planned.targets), &planned.plan, &self.config);
        let error = match self.program(snapshot, applied, request, &lb, steering, &planned).await {
            Err(ReconcileError::Provider(error @ Error::Invalid { .. })) => error,
            Err(ReconcileError::Provider(error @ Error::Denied(_))) => {
                // A permission may be missing for a part of the structure only.
                // A process that starts without it finds the planned one in place in most cases, and the provider has passed its targets
                // on. Others would make nodes leave and return at each try.
                let if_unknown = if applied.accepted_pods.is_none() { steering } else { Steering::Api };
                let (_, planned) = self.keep_structure(snapshot, applied, request, if_unknown).await;
                return (Err(error.into()), None, planned);
            }
            result => {
                if result.is_ok() {
                    applied.end_quota_wait();
                }
                return (result, None, planned);
            }
        };
        let why = (error.reason(), error.to_string());
        applied.note_rejection(lb, why.clone());
        // The provider may have rejected the structure before it looked at what follows with the targets, such as source ranges.
        if let Some(given) = &mut applied.targets {
            given.is_complete = false;
        }
        let (kept, planned) = self.keep_structure(snapshot, applied, request, Steering::Api).await;
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
        let is_same = |before: &LoadBalancer| before.targets() == lb.targets() && before.has_structure_of(lb);
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
        applied.begin_try();
        let accepted = applied.accepted.take();
        let requested = AcceptedCheck::of(steering, service);
        let result = self.provider.apply(lb, compare(request)).await;
        applied.accepted = match &result {
            Ok(Outcome { progress: Progress::Done, .. }) => Some(requested),
            // The health check may be changed already or not, unless it is to stay as it was.
            _ => accepted.filter(|before| before.is_same_check(requested)),
        };
        if matches!(result, Err(Error::Invalid { .. }))
            && applied.accepted_pods != Some(planned.plan.pods.is_some())
        {
            // A part of the load balancer may have the new kind of targets already, and the rest the old one.
            applied.accepted_pods = None;
        }
        let progress = self.record(snapshot, applied, request, planned, result)?;
        if progress == Progress::Done {
            applied.accepted_pods = Some(planned.plan.pods.is_some());
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
        if_unknown: Steering,
    ) -> (ReconcileResult, PlannedTargets) {
        // The check in place was made for one steering, policy and port. Where it was made for others, only nodes with an endpoint are
        // right: they pass any check.
        let steering = match applied.accepted {
            Some(check) if check == AcceptedCheck::of(check.steering, &snapshot.service) => check.steering,
            Some(_) => Steering::Api,
            None => if_unknown,
        };
        let planned = self.plan_targets(snapshot, applied, steering, Wanted::OfAnyStructure);
        let is_same = |given: &GivenTargets| given.is_complete && given.targets == planned.targets;
        let is_same = applied.targets.as_ref().is_some_and(is_same);
        if is_same && !request.full && !is_due(applied.retry_refused_at) {
            return (Ok(Progress::Done), planned);
        }
        (applied.in_place, applied.retry_refused_at) = (None, None);
        let result = self.provider.set_targets(&owner_of(&snapshot.service), &planned.targets).await;
        let result = self.record(snapshot, applied, request, &planned, result);
        applied.retry_for_quota();
        (result, planned)
    }

    /// The targets for a steering, or those that the provider was given last while a watch is stale.
    fn plan_targets(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        steering: Steering,
        wanted: Wanted,
    ) -> PlannedTargets {
        let service = &snapshot.service;
        let of_pods = plan::has_pod_targets(service, &self.config).unwrap_or(false);
        let any = wanted == Wanted::OfAnyStructure;
        // Of a structure that this process has seen accepted, it knows which targets it has.
        let (may_have_nodes, may_have_pods) = match applied.accepted_pods {
            Some(has_pods) if any => (!has_pods, has_pods),
            _ => (any || !of_pods, of_pods || any && self.config.capabilities.pod_targets.is_some()),
        };
        let pods = may_have_pods.then(|| self.cluster.pod_targets(service, &self.config));
        let nodes = if may_have_nodes {
            Some(self.plan_nodes(snapshot, applied, steering))
        } else {
            applied.hold = RemovalHold::default();
            None
        };
        applied.depends = Some(nodes.as_ref().map(|plan| plan.depends.clone()).unwrap_or_default());
        // Nobody knows which nodes an unreadable annotation meant before this process began.
        let chosen = nodes.as_ref().filter(|plan| plan.is_by_endpoints || applied.has_read_labels);
        let now = GroupTargets {
            nodes: chosen.map(|plan| plan.set.clone()),
            pods: pods.clone().unwrap_or_default(),
        };
        let plan = match (of_pods, nodes) {
            (false, Some(nodes)) => nodes,
            _ => TargetPlan::of_pods(pods.unwrap_or_default()),
        };
        let last = applied.targets.as_ref().map(|given| now.frozen_at(&given.targets));
        let (targets, frozen) = match last.filter(|last| *last != now).zip(self.frozen()) {
            Some((last, why)) => (last, Some(why)),
            None => (now, None),
        };
        applied.frozen_until = frozen.as_ref().map(|_| Instant::now() + FROZEN_RETRY);
        PlannedTargets { plan, targets, frozen }
    }

    /// The nodes for a steering, with those whose removal is held.
    fn plan_nodes(&self, snapshot: &Snapshot, applied: &mut AppliedState, steering: Steering) -> TargetPlan {
        let Snapshot { service, endpoints, nodes } = snapshot;
        // An unreadable annotation is refused, and what exists keeps its nodes.
        if let Ok(labels) = plan::node_labels(service, &self.config) {
            (applied.node_labels, applied.has_read_labels) = (labels, true);
        }
        let labels = applied.node_labels.as_ref();
        let mut plan = plan::targets(service, endpoints, nodes, steering, labels, &self.config);
        if !plan.is_by_endpoints && plan.labels().is_some() {
            if plan.misses_labels {
                // A label that somebody takes away by mistake moves no traffic.
                let kept = nodes.able(&applied.labelled_nodes, service.is_labelled_for_agent());
                if !kept.is_empty() {
                    let kept = TargetSet::own(kept).with_endpoint_nodes(plan.set.endpoint_nodes.take());
                    (plan.set, plan.ineligible) = (kept, Vec::new());
                }
            } else {
                let names = plan.set.targets.iter().map(|target| Arc::from(&*target.node));
                applied.labelled_nodes = names.collect();
            }
        }
        if plan.set.shared.is_none() {
            let staying = |node: &str| plan::staying_target(node, &plan, endpoints, nodes, &self.config);
            let set = HoldingSet::Own(&service.key);
            let held = self.breaker.update(set, &mut applied.hold, &plan.set.targets, staying);
            plan.set.targets = held;
        } else {
            applied.hold = RemovalHold::default();
        }
        plan
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
        let targets = &planned.targets;
        let is_complete = result.as_ref().is_ok_and(|outcome| outcome.progress == Progress::Done);
        // A rejected structure leaves the targets as they were, or adds some that are wanted.
        if !matches!(result, Err(Error::Invalid { .. })) {
            let given = GivenTargets { targets: targets.clone(), is_complete };
            let before = applied.targets.replace(given);
            if is_complete && !before.is_some_and(|before| before.is_complete && before.targets == *targets) {
                if let Some(changed) = request.endpoints_changed {
                    self.metrics.targets_programmed(changed.elapsed());
                }
                tracing::info!(service = %snapshot.service.key, targets = targets.count(), "targets set");
                super::log_target_reasons(snapshot, &planned.plan);
            }
        }
        let mut outcome = result?;
        // An annotation of the provider may have requested it, or the provider does not know who has it.
        let addresses = outcome.ingress.iter().filter_map(|ingress| ingress.ip);
        if let Err(error) = self.cluster.check_addresses(&snapshot.service, addresses) {
            let message = format!("{error}, so it is not published. {}.", error.remedy());
            outcome.ingress.clear();
            outcome.incomplete.get_or_insert((error.reason(), message));
        }
        if !outcome.ingress.is_empty() {
            applied.ingress = outcome.ingress;
        }
        applied.refused_targets = outcome.refused;
        if let Some((reason, message)) = &outcome.incomplete
            && applied.incomplete.as_ref().is_none_or(|before| before.0 != *reason)
        {
            tracing::warn!(service = %snapshot.service.key, reason, message, "load balancer not programmed completely; the condition steerage.dev/Programmed says why");
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

#[cfg(test)]
mod tests;
