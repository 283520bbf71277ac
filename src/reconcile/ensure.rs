// SPDX-License-Identifier: Apache-2.0
//! A Service that is to be served: finalizer, structure, targets, status, in that order; targets first where the structure stands.

use jiff::Timestamp;
use steerage_model::{Service, names};
use steerage_provider_api::{Error, LoadBalancer, Progress, Steering};

use super::{ReconcileOutcome, ReconcileRequest, Reconciler, Seen};
use crate::applied::AppliedState;
use crate::plan::{self, Legacy, PlanError, TargetPlan};
use crate::reasons;
use crate::status::{self, HealthSummary, ReasonMessage, StatusInputs};

impl Reconciler {
    pub(super) async fn serve(
        &self,
        seen: &Seen,
        state: &mut AppliedState,
        request: &ReconcileRequest,
    ) -> Result<ReconcileOutcome, ReconcileOutcome> {
        let service = &seen.service;
        if self.follow_legacy(service, state, request).await {
            // The watch brings the Service as it is now.
            return Ok(ReconcileOutcome::Done);
        }
        self.hold(service, state).await?;
        let wanted = plan::steering(service, &self.config)
            .and_then(|steering| Ok((plan::load_balancer(service, steering, &self.config)?, steering)));
        let (lb, steering) = match (&wanted, &state.applied) {
            // Where what it asks for cannot be had, what stands goes on, and follows its endpoints.
            (Ok((lb, steering)), _) | (Err(_), Some((lb, steering))) => (lb.clone(), *steering),
            (Err(error), None) => {
                let targets = self.targets(seen, self.config.default_steering);
                return self
                    .conclude(seen, state, &targets, Some(why(error)), Vec::new(), Ok(ReconcileOutcome::Done))
                    .await;
            }
        };
        let targets = self.targets(seen, steering);
        let frozen = self.frozen().filter(|_| state.targets.is_some_and(|digest| digest != targets.digest));
        let mut degraded: Vec<ReasonMessage> =
            frozen.iter().map(|message| (reasons::TARGETS_FROZEN, message.clone())).collect();
        let outcome = self.program(seen, state, request, (&lb, steering), &targets, frozen.is_some()).await;
        if matches!(outcome, Err(ReconcileOutcome::Provider(Error::Conflict(_)))) {
            // Passes by itself, in a moment: not worth anybody's attention.
            return outcome;
        }
        if request.all
            && let Ok(health) = self.provider.target_health(&lb.owner).await
        {
            state.health = Some(HealthSummary::of(&health));
        }
        let unprogrammed = match (&wanted, &outcome) {
            (Err(error), _) => {
                degraded
                    .push((reasons::UNSUPPORTED_CHANGE, "the load balancer was left as it was".to_owned()));
                Some(why(error))
            }
            (_, Err(ReconcileOutcome::Provider(error))) => Some((error.reason(), error.to_string())),
            (_, Ok(ReconcileOutcome::Again(_))) => {
                Some((reasons::PROGRESSING, "the provider is at work".to_owned()))
            }
            _ => None,
        };
        self.conclude(seen, state, &targets, unprogrammed, degraded, outcome).await
    }

    fn targets(&self, seen: &Seen, steering: Steering) -> TargetPlan {
        let service = &seen.service;
        self.cluster.read(|index, _| {
            let slices: Vec<_> = index.slices(&service.key).collect();
            plan::targets(service, slices.iter().copied(), &seen.nodes, steering, &self.config)
        })
    }

    /// Brings structure and targets to what is planned.
    async fn program(
        &self,
        seen: &Seen,
        state: &mut AppliedState,
        request: &ReconcileRequest,
        (lb, steering): (&LoadBalancer, Steering),
        targets: &TargetPlan,
        frozen: bool,
    ) -> Result<ReconcileOutcome, ReconcileOutcome> {
        let stands = state.applied.as_ref().map(|(applied, _)| applied.clone());
        let same = stands.as_ref().is_some_and(|applied| same_structure(applied, lb));
        let moved = state.targets != Some(targets.digest) && !frozen;
        if let (Some(applied), true) = (&stands, moved)
            && let Progress::Again(after) = self.set_targets(seen, state, request, applied, targets).await?
        {
            return Ok(ReconcileOutcome::Again(after));
        }
        if same && !request.all {
            return Ok(ReconcileOutcome::Done);
        }
        if state.applied.is_none() && state.ingress.is_empty() && seen.service.ingress.is_empty() {
            let why = (reasons::ENSURING, "making the load balancer".to_owned());
            if state.is_news("Ensure", Some(&why)) {
                self.events(&seen.service).normal("Ensure", why.0, &why.1);
            }
        }
        let ensured = self.provider.ensure(lb).await.map_err(ReconcileOutcome::Provider)?;
        if !ensured.ingress.is_empty() {
            state.ingress = ensured.ingress;
        }
        if let Progress::Again(after) = ensured.progress {
            return Ok(ReconcileOutcome::Again(after));
        }
        state.applied = Some((lb.clone(), steering));
        // Target groups may be new. While frozen, those that were known good are not touched.
        if frozen {
            return Ok(ReconcileOutcome::Done);
        }
        match self.set_targets(seen, state, request, lb, targets).await? {
            Progress::Done => Ok(ReconcileOutcome::Done),
            Progress::Again(after) => Ok(ReconcileOutcome::Again(after)),
        }
    }

    async fn set_targets(
        &self,
        seen: &Seen,
        state: &mut AppliedState,
        request: &ReconcileRequest,
        lb: &LoadBalancer,
        targets: &TargetPlan,
    ) -> Result<Progress, ReconcileOutcome> {
        let set = self.provider.set_targets(lb, &targets.set(&seen.nodes)).await.map_err(|error| {
            // The structure is not what it was thought to be: the next try makes it anew.
            if matches!(error, Error::Conflict(_)) {
                state.applied = None;
            }
            ReconcileOutcome::Provider(error)
        })?;
        state.refused = set.refused;
        if set.progress == Progress::Done && state.targets != Some(targets.digest) {
            state.targets = Some(targets.digest);
            if let Some(since) = request.since {
                self.metrics.lagged(since.elapsed());
            }
            tracing::info!(service = %seen.service.key, targets = targets.count, "targets set");
            self.explain(seen, targets);
        }
        Ok(set.progress)
    }

    /// Events and status.
    async fn conclude(
        &self,
        seen: &Seen,
        state: &mut AppliedState,
        targets: &TargetPlan,
        unprogrammed: Option<ReasonMessage>,
        mut degraded: Vec<ReasonMessage>,
        outcome: Result<ReconcileOutcome, ReconcileOutcome>,
    ) -> Result<ReconcileOutcome, ReconcileOutcome> {
        let service = &seen.service;
        degraded.extend(self.degraded(service, state, targets));
        let no_endpoints = (!targets.usable_endpoint).then(|| status::no_endpoints(service.has_selector));
        let events = self.events(service);
        let was_programmed =
            service.conditions.iter().any(|c| c.kind == names::PROGRAMMED && c.status == "True");
        if unprogrammed.is_none() && !was_programmed && !state.ingress.is_empty() {
            let why = (reasons::ENSURED, "the load balancer is in place".to_owned());
            if state.is_news("Ensured", Some(&why)) {
                events.normal("Ensure", why.0, &why.1);
            }
        }
        let progressing = |why: &&ReasonMessage| why.0 != reasons::PROGRESSING;
        for (action, why) in [
            ("Program", unprogrammed.as_ref().filter(progressing)),
            ("Degrade", degraded.first()),
            ("Serve", no_endpoints.as_ref()),
        ] {
            if state.is_news(action, why)
                && let Some(why) = why
            {
                events.warning(action, why.0, &why.1);
            }
        }
        let inputs = StatusInputs {
            unprogrammed,
            ingress: (!state.ingress.is_empty()).then(|| state.ingress.clone()),
            usable_endpoint: targets.usable_endpoint,
            has_selector: service.has_selector,
            targets: targets.count,
            health: state.health.clone(),
            degraded,
        };
        let desired = status::desired(&inputs, service.generation);
        if let Some(patch) = status::patch(service, &desired, Timestamp::now())
            && !state.is_written(service, &desired)
        {
            self.writer.patch_status(&service.key, patch).await?;
            state.wrote(service, desired);
        }
        outcome
    }

    /// What is amiss while the rest works.
    fn degraded(&self, service: &Service, state: &AppliedState, targets: &TargetPlan) -> Vec<ReasonMessage> {
        let refused = status::refused(&state.refused, state.health.as_ref());
        let mut found: Vec<ReasonMessage> = refused.into_iter().collect();
        let list = |names: &mut dyn Iterator<Item = &str>| names.collect::<Vec<_>>().join(", ");
        if !targets.without_agent.is_empty() {
            let nodes = list(&mut targets.without_agent.iter().map(String::as_str).take(20));
            let message = format!(
                "the Service is labelled {}={}, and these nodes have no agent: {nodes}",
                names::PROXY_NAME_LABEL,
                names::PROXY_NAME
            );
            found.push((reasons::NODES_WITHOUT_AGENT, message));
        }
        if !targets.ineligible.is_empty() {
            let nodes = list(&mut targets.ineligible.iter().map(|(node, _)| node.as_str()).take(20));
            let message = format!("all endpoints are on nodes that load balancers should not use: {nodes}");
            found.push((reasons::ONLY_INELIGIBLE_NODES, message));
        }
        if service.affinity.is_some() && !self.config.capabilities.affinity {
            let message = "sessionAffinity: ClientIP is kept on the nodes, but not by the load balancer";
            found.push((reasons::AFFINITY_NOT_SUPPORTED, message.to_owned()));
        }
        found
    }

    /// Sets our finalizer unless it stands, or is on its way.
    async fn hold(&self, service: &Service, state: &mut AppliedState) -> Result<(), ReconcileOutcome> {
        let provider = service.annotations.get(plan::PROVIDER).map(String::as_str);
        if service.has_finalizer(plan::finalizer(service)) && provider == Some(self.config.classes.provider) {
            state.holding = false;
        } else if !state.holding {
            self.writer.add_finalizer(service).await?;
            state.holding = true;
        }
        Ok(())
    }

    /// Tells of old annotations, or follows them. `true` if the Service was changed.
    async fn follow_legacy(
        &self,
        service: &Service,
        state: &mut AppliedState,
        request: &ReconcileRequest,
    ) -> bool {
        let events = self.events(service);
        let why = match plan::legacy(service) {
            Legacy::None => None,
            Legacy::Invalid(problem) => Some((reasons::INVALID_LEGACY_ANNOTATION, problem)),
            // It was refused once, and nothing has changed since.
            Legacy::Local(_) if state.unmigrated == state.fingerprint && !request.all => return false,
            Legacy::Local(patch) if self.migrate => match self.writer.migrate(service, patch).await {
                Ok(()) => {
                    let message =
                        "changed once to what the old annotations ask for; edit the spec from now on";
                    events.normal("Migrate", reasons::LEGACY_MIGRATED, message);
                    return true;
                }
                Err(error) => {
                    state.unmigrated = state.fingerprint;
                    let message = format!("cannot follow the old annotations: {error}");
                    Some((reasons::LEGACY_MIGRATION_FAILED, message))
                }
            },
            Legacy::Local(patch) => {
                let command = plan::legacy_command(service, &patch);
                let message = format!("the old annotations ask for externalTrafficPolicy Local: {command}");
                Some((reasons::LEGACY_ANNOTATIONS, message))
            }
        };
        if state.is_news("Legacy", why.as_ref())
            && let Some(why) = &why
        {
            events.warning("Migrate", why.0, &why.1);
        }
        false
    }
}

fn why(error: &PlanError) -> ReasonMessage {
    (error.reason(), error.to_string())
}

/// Whether two structures ask for the same. What is published is an echo of what came of it.
fn same_structure(a: &LoadBalancer, b: &LoadBalancer) -> bool {
    *a == LoadBalancer { published: a.published.clone(), ..b.clone() }
}
