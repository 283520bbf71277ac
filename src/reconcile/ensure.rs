// SPDX-License-Identifier: Apache-2.0
//! Ensures the load balancer of a managed Service: finalizer, structure, targets, status. Where the structure is in place, targets
//! go first, but not where a new check must decide about them.

use std::time::Duration;

use jiff::Timestamp;
use steerage_model::{Service, annotations, names};
use steerage_provider_api::{Error, LoadBalancer, Progress, Steering};

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::AppliedState;
use crate::cluster_index::Snapshot;
use crate::plan::{self, LegacyRequest, PlanError, TargetPlan};
use crate::reasons;
use crate::request_queue::ReconcileRequest;
use crate::status::{self, HealthSummary, ReasonMessage, StatusInputs};

/// The consequence for a Service whose plan failed, by whether it has a load balancer.
const KEPT: &str = "The previous load balancer is kept";
const NOT_CREATED: &str = "No load balancer is created or changed";

/// While targets are frozen, a change of them that had failed before is tried again after this time.
const FROZEN_RETRY: Duration = Duration::from_mins(1);

impl Reconciler {
    pub(super) async fn ensure(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
    ) -> ReconcileResult {
        let service = &snapshot.service;
        if self.handle_legacy_annotations(service, applied, request).await {
            // The watch brings the patched Service, and with it a request.
            return Ok(Progress::Done);
        }
        self.ensure_finalizer(service, applied).await?;
        let wanted = plan::steering(service, &self.config)
            .and_then(|steering| Ok((plan::load_balancer(service, steering, &self.config)?, steering)));
        let (lb, steering) = match (&wanted, &applied.structure) {
            // An unsupported change keeps the load balancer, and its targets still follow the endpoints.
            (Ok((lb, steering)), _) | (Err(_), Some((lb, steering))) => (lb.clone(), *steering),
            (Err(error), None) => {
                let targets = self.plan_targets(snapshot, self.config.default_steering);
                let why = plan_error(error, NOT_CREATED);
                self.report_status(snapshot, applied, &targets, Some(why), Vec::new()).await?;
                return Ok(Progress::Done);
            }
        };
        let targets = self.plan_targets(snapshot, steering);
        let is_changed = applied.targets_digest.is_some_and(|digest| digest != targets.digest);
        let frozen = self.frozen().filter(|_| is_changed);
        let mut degraded: Vec<ReasonMessage> =
            frozen.iter().map(|message| (reasons::TARGETS_FROZEN, message.clone())).collect();
        let result =
            self.program(snapshot, applied, request, (&lb, steering), &targets, frozen.is_some()).await;
        if matches!(result, Err(ReconcileError::Provider(Error::Conflict(_)))) {
            // The next try resolves it; not worth an event or a condition.
            return result;
        }
        if request.full
            && let Ok(health) = self.provider.target_health(&lb.owner).await
        {
            applied.health = Some(HealthSummary::new(&health));
        }
        let unprogrammed = match (&wanted, &result) {
            (Err(error), _) => {
                let message = "Requested configuration is unsupported; keeping the previous one.";
                degraded.push((reasons::UNSUPPORTED_CHANGE, message.to_owned()));
                Some(plan_error(error, KEPT))
            }
            (_, Err(ReconcileError::Provider(error))) => Some((error.reason(), error.to_string())),
            (_, Ok(Progress::Again(_))) => {
                let message = "The provider has not completed the change. Steerage checks again.";
                Some((reasons::PROGRESSING, message.to_owned()))
            }
            _ => None,
        };
        self.report_status(snapshot, applied, &targets, unprogrammed, degraded).await?;
        result
    }

    fn plan_targets(&self, snapshot: &Snapshot, steering: Steering) -> TargetPlan {
        let Snapshot { service, endpoints, nodes } = snapshot;
        plan::targets(service, endpoints, nodes, steering, &self.config)
    }

    /// Writes the difference in structure and targets to the provider.
    async fn program(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        (lb, steering): (&LoadBalancer, Steering),
        targets: &TargetPlan,
        is_frozen: bool,
    ) -> ReconcileResult {
        let is_probed_first =
            applied.structure.as_ref().is_some_and(|(_, before)| is_check_first(*before, steering));
        let in_place = applied.structure.as_ref().map(|(in_place, _)| in_place.clone());
        let is_changed = applied.targets_digest != Some(targets.digest) && !is_frozen;
        if let (Some(in_place), true) = (&in_place, is_changed && !is_probed_first)
            && let again @ Progress::Again(_) =
                self.set_targets(snapshot, applied, request, in_place, targets).await?
        {
            return Ok(again);
        }
        let is_in_place = in_place.is_some_and(|in_place| is_same_structure(&in_place, lb));
        if is_in_place && !applied.program_failed && !request.full {
            return Ok(Progress::Done);
        }
        if applied.structure.is_none() && applied.ingress.is_empty() && snapshot.service.ingress.is_empty() {
            let ensuring = (reasons::ENSURING, "Creating the load balancer.".to_owned());
            if applied.is_new_event("Ensure", Some(&ensuring)) {
                self.events(&snapshot.service).normal("Ensure", ensuring.0, &ensuring.1);
            }
        }
        let failed = std::mem::replace(&mut applied.program_failed, true);
        let ensured = self.provider.ensure(lb).await?;
        // Frozen targets stay as they are, also if the last change of them failed.
        applied.program_failed = failed && is_frozen;
        if !ensured.ingress.is_empty() {
            applied.ingress = ensured.ingress;
        }
        if ensured.progress != Progress::Done {
            return Ok(ensured.progress);
        }
        applied.structure = Some((lb.clone(), steering));
        // `ensure` may have created target groups. Frozen targets stay untouched in those that existed.
        if is_frozen {
            let is_pending = applied.program_failed;
            return Ok(if is_pending { Progress::Again(FROZEN_RETRY) } else { Progress::Done });
        }
        self.set_targets(snapshot, applied, request, lb, targets).await
    }

    async fn set_targets(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        lb: &LoadBalancer,
        targets: &TargetPlan,
    ) -> ReconcileResult {
        let set =
            self.provider.set_targets(lb, &targets.set(&snapshot.nodes)).await.inspect_err(|error| {
                // Some targets may have been set: the recorded digest may no longer match the provider.
                applied.program_failed = true;
                // The structure is not the one that was applied: the next try ensures it again.
                if matches!(error, Error::Conflict(_)) {
                    applied.structure = None;
                }
            })?;
        applied.refused_targets = set.refused;
        if set.progress == Progress::Done && applied.targets_digest != Some(targets.digest) {
            applied.targets_digest = Some(targets.digest);
            if let Some(changed) = request.endpoints_changed {
                self.metrics.targets_programmed(changed.elapsed());
            }
            tracing::info!(service = %snapshot.service.key, targets = targets.count, "targets set");
            super::log_target_reasons(snapshot, targets);
        }
        Ok(set.progress)
    }

    /// Publishes events and writes the status, where they differ from the last ones.
    async fn report_status(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        targets: &TargetPlan,
        unprogrammed: Option<ReasonMessage>,
        mut degraded: Vec<ReasonMessage>,
    ) -> Result<(), ReconcileError> {
        let Snapshot { service, endpoints, .. } = snapshot;
        degraded.extend(self.degraded(service, applied, targets));
        let no_endpoints = (!endpoints.is_usable).then(|| status::no_endpoints(service.has_selector));
        let events = self.events(service);
        let was_programmed =
            service.conditions.iter().any(|c| c.kind == names::PROGRAMMED && c.status == "True");
        if unprogrammed.is_none() && !was_programmed && !applied.ingress.is_empty() {
            let ensured = (reasons::ENSURED, "The load balancer is programmed.".to_owned());
            if applied.is_new_event("Ensured", Some(&ensured)) {
                events.normal("Ensure", ensured.0, &ensured.1);
            }
        }
        let is_final = |why: &&ReasonMessage| why.0 != reasons::PROGRESSING;
        for (action, why) in [
            ("Program", unprogrammed.as_ref().filter(is_final)),
            ("Degrade", degraded.first()),
            ("Serve", no_endpoints.as_ref()),
        ] {
            if applied.is_new_event(action, why)
                && let Some((reason, message)) = why
            {
                events.warning(action, reason, message);
            }
        }
        let inputs = StatusInputs {
            unprogrammed,
            ingress: (!applied.ingress.is_empty()).then(|| applied.ingress.clone()),
            has_usable_endpoint: endpoints.is_usable,
            has_selector: service.has_selector,
            targets: targets.count,
            health: applied.health.clone(),
            degraded,
        };
        let desired = status::desired(&inputs, service.generation);
        if let Some(patch) = status::patch(service, &desired, Timestamp::now())
            && !applied.is_status_written(service, &desired)
        {
            self.writer.patch_status(&service.key, patch).await?;
            applied.set_status_written(service, desired);
        }
        Ok(())
    }

    /// What is wrong while the load balancer works, worst first.
    fn degraded(
        &self,
        service: &Service,
        applied: &AppliedState,
        targets: &TargetPlan,
    ) -> Vec<ReasonMessage> {
        /// Nodes named in a message.
        const SHOWN: usize = 20;
        let refused = status::refused_targets(&applied.refused_targets, applied.health.as_ref());
        let mut found: Vec<ReasonMessage> = refused.into_iter().collect();
        let list = |names: &mut dyn Iterator<Item = &str>| names.take(SHOWN).collect::<Vec<_>>().join(", ");
        if !targets.without_agent.is_empty() {
            let nodes = list(&mut targets.without_agent.iter().map(String::as_str));
            let (label, value) = (names::PROXY_NAME_LABEL, names::PROXY_NAME);
            let message = format!(
                "The Service is labelled {label}={value}, but these nodes have no agent: {nodes}. They are not \
                 targets, and the Service is unreachable from them. Run the agent on them."
            );
            found.push((reasons::NODES_WITHOUT_AGENT, message));
        }
        if !targets.ineligible.is_empty() {
            let nodes = list(&mut targets.ineligible.iter().map(|(node, _)| node.as_str()));
            let message = format!(
                "All endpoints are on ineligible nodes: {nodes}. They stay targets. \
                 Move the pods to eligible nodes."
            );
            found.push((reasons::ONLY_INELIGIBLE_NODES, message));
        }
        if service.affinity.is_some() && !self.config.capabilities.affinity {
            let message = "The provider does not support sessionAffinity ClientIP. \
                           Only the nodes keep a client on its endpoint. Remove spec.sessionAffinity.";
            found.push((reasons::AFFINITY_NOT_SUPPORTED, message.to_owned()));
        }
        found
    }

    async fn ensure_finalizer(
        &self,
        service: &Service,
        applied: &mut AppliedState,
    ) -> Result<(), ReconcileError> {
        let provider = service.annotations.get(annotations::PROVIDER).map(String::as_str);
        if service.has_finalizer(plan::finalizer(service)) && provider == Some(self.config.classes.provider) {
            applied.finalizer_pending = false;
        } else if !applied.finalizer_pending {
            self.writer.add_finalizer(service).await?;
            applied.finalizer_pending = true;
        }
        Ok(())
    }

    /// Reports legacy annotations, or applies them. Returns whether the Service was patched.
    async fn handle_legacy_annotations(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
    ) -> bool {
        let events = self.events(service);
        let warning = match plan::legacy_request(service) {
            LegacyRequest::None => None,
            LegacyRequest::Invalid(message) => Some((reasons::INVALID_LEGACY_ANNOTATION, message)),
            // The patch failed, and the Service has not changed since.
            LegacyRequest::Local(_) if applied.failed_migration == applied.fingerprint && !request.full => {
                return false;
            }
            LegacyRequest::Local(patch) if self.migrate_legacy_annotations => {
                match self.writer.migrate_legacy_annotations(service, patch).await {
                    Ok(()) => {
                        let message = "Patched the spec once to what the legacy annotations request. \
                                       Edit the spec from now on.";
                        events.normal("Migrate", reasons::LEGACY_MIGRATED, message);
                        return true;
                    }
                    Err(error) => {
                        applied.failed_migration = applied.fingerprint;
                        let error = steerage_model::chain(&error);
                        let message = format!(
                            "Applying the legacy annotations failed: {error}. The spec is used as it is. \
                             Set spec.externalTrafficPolicy."
                        );
                        Some((reasons::LEGACY_MIGRATION_FAILED, message))
                    }
                }
            }
            LegacyRequest::Local(patch) => {
                let command = plan::kubectl_patch(service, &patch);
                let message = format!(
                    "Legacy annotations request externalTrafficPolicy Local. The spec is used as it is. Run: {command}"
                );
                Some((reasons::LEGACY_ANNOTATIONS, message))
            }
        };
        if applied.is_new_event("Legacy", warning.as_ref())
            && let Some((reason, message)) = &warning
        {
            events.warning("Migrate", reason, message);
        }
        false
    }
}

/// What is wrong, what happens now, what to do.
fn plan_error(error: &PlanError, consequence: &str) -> ReasonMessage {
    (error.reason(), format!("{error}. {consequence}. {}.", error.remedy()))
}

/// Whether two structures request the same. The published addresses are a result, not a request.
fn is_same_structure(a: &LoadBalancer, b: &LoadBalancer) -> bool {
    *a == LoadBalancer { published: a.published.clone(), ..b.clone() }
}

/// Whether the health check must change before the targets: nodes without an endpoint would pass the check of `api` steering.
fn is_check_first(before: Steering, after: Steering) -> bool {
    before != after && after == Steering::HealthCheck
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_to_health_check_steering_writes_the_check_before_the_targets() {
        assert!(is_check_first(Steering::Api, Steering::HealthCheck));
        assert!(!is_check_first(Steering::HealthCheck, Steering::Api), "exact targets pass any check");
        assert!(!is_check_first(Steering::HealthCheck, Steering::HealthCheck));
    }
}
