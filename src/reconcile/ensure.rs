// SPDX-License-Identifier: Apache-2.0
//! Ensures the load balancer of a managed Service: finalizer, load balancer with its targets, status.

use std::time::SystemTime;

use steerage_model::{Service, annotations, names};
use steerage_process::duration;
use steerage_provider_api::{ADOPTION_REFUSED, Error, LoadBalancer, Progress, Steering};
use steerage_provider_cloud::reasons::QUOTA_EXCEEDED;
use tokio::time::Instant;

use super::program::{PlannedTargets, exists, is_due};
use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::{self, AppliedState};
use crate::cluster_index::{Snapshot, owner_of};
use crate::condition_metrics::ConditionStatuses;
use crate::plan::{self, LegacyRequest, PlanError, TargetPlan};
use crate::reasons;
use crate::request_queue::ReconcileRequest;
use crate::service_writer::WriteError;
use crate::status::{self, HealthSummary, ReasonMessage, StatusInputs};
use crate::write_retry::WriteRetry;

/// The consequence for a Service whose plan failed, by whether it has a load balancer.
const KEPT: &str = "The previous load balancer is kept";
const NOT_CREATED: &str = "No load balancer is created or changed";

impl Reconciler {
    /// The load balancer that the Service specifies, without targets, and its steering.
    fn plan(&self, service: &Service) -> Result<(LoadBalancer, Steering), PlanError> {
        plan::is_paused(service)?;
        let steering = plan::steering(service, &self.config)?;
        let lb = plan::load_balancer(service, steering, &self.config)?;
        self.cluster.check_addresses(service, lb.requested_addresses.iter().copied())?;
        Ok((lb, steering))
    }

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
        let wanted = self.plan(service);
        let (result, rejected, planned) = match wanted {
            Ok((lb, steering)) => match applied.rejection_of(&lb).filter(|_| !request.full) {
                Some(why) => {
                    let (kept, planned) =
                        self.keep_structure(snapshot, applied, request, Steering::Api).await;
                    (kept, Some(why), planned)
                }
                None => self.program_or_keep(snapshot, applied, request, lb, steering).await,
            },
            Err(error) => {
                applied.end_quota_wait();
                let (kept, planned) = self.keep_structure(snapshot, applied, request, Steering::Api).await;
                let consequence = if exists(service, applied) { KEPT } else { NOT_CREATED };
                (kept, Some(plan_error(&error, consequence)), planned)
            }
        };
        let conflict = note_conflict(&result, applied);
        if matches!(conflict, Conflict::Passing) && rejected.is_none() {
            // The next try resolves most: not worth an event or a condition.
            return result;
        }
        let is_refused = match &rejected {
            Some((reason, _)) => *reason != ADOPTION_REFUSED,
            // Of what is denied, the provider may not have come to the sources.
            None => matches!(result, Err(ReconcileError::Provider(Error::Denied(_)))),
        };
        let (result, sources) = if is_refused {
            self.restrict_sources(service, applied, request, result).await
        } else {
            let is_in_place = rejected.is_none() && matches!(result, Ok(Progress::Done));
            self.note_accepted_sources(service, applied, is_in_place);
            (result, None)
        };
        let PlannedTargets { plan: targets, frozen, .. } = planned;
        let mut degraded: Vec<ReasonMessage> =
            frozen.map(|message| (reasons::TARGETS_FROZEN, message)).into_iter().collect();
        if let Some((reason, _)) = &rejected
            && (*reason == ADOPTION_REFUSED || exists(service, applied))
        {
            degraded.push(unsupported_change(service, reason, sources.as_deref()));
        }
        // A load balancer may be there, as where AWS rejects a listener, but no client knows it.
        let is_published = exists(service, applied);
        let incomplete = applied.incomplete.as_ref().filter(|_| is_published);
        degraded.extend(incomplete.map(status::partly_programmed));
        if let Err(ReconcileError::Provider(error @ Error::Denied(_))) = &result
            && is_published
        {
            let told = sources.as_ref().map(|told| format!(" {told}")).unwrap_or_default();
            degraded.push((
                reasons::PARTLY_PROGRAMMED,
                format!("A change of the Service is not in place. {error}{told}"),
            ));
        }
        let rejected = rejected.map(|(reason, message)| {
            if is_published {
                return (reason, message);
            }
            let message = message.trim_end_matches(['.', ' ']);
            (reason, format!("{message}. No port of the Service is served."))
        });
        let unprogrammed = rejected.or_else(|| match &result {
            Err(ReconcileError::Provider(error)) => Some((error.reason(), conflict.text_of(error))),
            Ok(_) if applied.incomplete.is_some() => applied.incomplete.clone(),
            Ok(Progress::Again(_)) => {
                let message = "The provider has not completed the change. Steerage checks again.";
                Some((reasons::PROGRESSING, message.to_owned()))
            }
            _ => None,
        });
        let is_down = matches!(&result, Err(ReconcileError::Provider(Error::Unavailable(_))));
        self.poll_for_waiting_pods(service, applied);
        let is_health_due = request.full || applied.health.is_none() || is_due(applied.health_due_at);
        if exists(service, applied) && is_health_due {
            if is_down {
                // The read may have to wait for an answer too.
                let reported = self
                    .report_status(snapshot, applied, &targets, unprogrammed.clone(), degraded.clone())
                    .await;
                if let Err(error) = reported {
                    return self.unreported(service, applied, result, &error);
                }
            }
            self.read_health(service, applied).await;
        }
        self.poll_for_waiting_pods(service, applied);
        let is_programmed = unprogrammed.is_none() && matches!(result, Ok(Progress::Done));
        let mut result = result;
        if let Err(error) = self.report_status(snapshot, applied, &targets, unprogrammed, degraded).await {
            result = self.unreported(service, applied, result, &error);
        }
        if is_programmed {
            result = self.remove_replaced_finalizers(service, applied, result).await;
        }
        result
    }

    /// The result of a reconcile whose status could not be written. The provider has what it is to have: only the write is tried again,
    /// and endpoints do not wait for it.
    fn unreported(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        result: ReconcileResult,
        error: &WriteError,
    ) -> ReconcileResult {
        let retry_in = applied.status_retry.failed();
        // An API server that does not answer takes no event either.
        if let WriteError::Rejected(message) = error {
            let message = format!(
                "The API server rejects the status of the Service: {message}. Its conditions and addresses may be out of date; the load \
                 balancer is not. Look for an admission webhook or policy that rejects the write."
            );
            let rejection = (reasons::STATUS_NOT_WRITTEN, message);
            if applied.is_new_event(applied::REPORT, Some(&rejection)) {
                self.events(service).warning("Report", rejection.0, &rejection.1);
            }
        }
        let (error, retry_in) = (steerage_model::chain(error), duration::display(retry_in));
        tracing::warn!(service = %service.key, error, %retry_in, "status of the Service not written; retrying");
        unwritten(result, applied.status_retry)
    }

    /// Another controller's load balancer is Steerage's now. That controller has stopped, and its finalizer would block the deletion of the Service.
    async fn remove_replaced_finalizers(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        result: ReconcileResult,
    ) -> ReconcileResult {
        let replaced = self.provider.replaced_finalizers().iter().copied();
        let replaced: Vec<&str> = replaced.filter(|finalizer| service.has_finalizer(finalizer)).collect();
        if replaced.is_empty() {
            applied.finalizers_retry.succeeded();
            return result;
        }
        if applied.finalizers_retry.is_waiting() {
            return result;
        }
        tracing::info!(service = %service.key, finalizers = ?replaced, "removing finalizers of another controller");
        let Err(error) = self.writer.remove_replaced_finalizers(service, &replaced).await else {
            applied.finalizers_retry.succeeded();
            return result;
        };
        let retry_in = applied.finalizers_retry.failed();
        let (error, retry_in) = (steerage_model::chain(&error), duration::display(retry_in));
        tracing::warn!(service = %service.key, error, %retry_in, "finalizers of another controller not removed; retrying");
        unwritten(result, applied.finalizers_retry)
    }

    /// Publishes events and writes the status, where they differ from the last ones.
    async fn report_status(
        &self,
        snapshot: &Snapshot,
        applied: &mut AppliedState,
        targets: &TargetPlan,
        unprogrammed: Option<ReasonMessage>,
        mut degraded: Vec<ReasonMessage>,
    ) -> Result<(), WriteError> {
        let Snapshot { service, endpoints, .. } = snapshot;
        degraded.extend(self.degraded(service, applied, targets));
        let now = SystemTime::now();
        let grace = targets.without_agent.iter().filter_map(|missing| missing.grace(now)).min();
        applied.agents_due_at = grace.map(|grace| Instant::now() + grace);
        // Pods that wait for their readiness gate are targets, though no endpoint takes traffic yet.
        let was_usable = endpoints.is_usable || targets.has_pods();
        // The provider may have needed a minute. The targets of newer endpoints are set next.
        let has_newer = !was_usable && self.has_usable_endpoint(service);
        let is_usable = was_usable || has_newer;
        let no_endpoints = (!is_usable).then(|| status::no_endpoints(service.has_selector));
        applied.note_endpoints(is_usable);
        // The first report of a process is no news if the status has it: an earlier process published the event.
        let is_first = applied.conditions.is_none();
        let is_old = |why: &ReasonMessage| is_first && status::has(service, why);
        let alarm = no_endpoints.filter(|why| applied.is_without_endpoints_for_long() || is_old(why));
        let events = self.events(service);
        let was_programmed =
            service.conditions.iter().any(|c| c.kind == names::PROGRAMMED && c.status == "True");
        if unprogrammed.is_none() && !was_programmed && !applied.ingress.is_empty() {
            let ensured = (reasons::ENSURED, "The load balancer is programmed.".to_owned());
            if applied.is_new_event("Ensured", Some(&ensured)) {
                events.normal("Ensure", ensured.0, &ensured.1);
            }
        }
        let is_final = |why: &&ReasonMessage| status::is_final(why);
        for (action, why) in [
            ("Program", unprogrammed.as_ref().filter(is_final)),
            ("Degrade", degraded.first()),
            (applied::SERVE, alarm.as_ref()),
        ] {
            if applied.is_new_event(action, why)
                && let Some((reason, message)) = why.filter(|why| !is_old(why))
            {
                events.warning(action, reason, message);
            }
        }
        let inputs = StatusInputs {
            unprogrammed,
            ingress: (!applied.ingress.is_empty()).then(|| applied.ingress.clone()),
            is_published: exists(service, applied),
            has_usable_endpoint: is_usable,
            has_selector: service.has_selector,
            targets: targets.targets().count().max(usize::from(has_newer)),
            has_pod_targets: targets.pods.is_some(),
            fails_closed: !self.config.capabilities.fails_open,
            reports_no_health: !self.provider.reports_health(),
            health: applied.health.clone(),
            outdated_health: applied.outdated_health(),
            degraded,
        };
        let desired = status::desired(&inputs, service.generation);
        let unprogrammed = inputs.unprogrammed.as_ref().map(|(reason, _)| *reason);
        let statuses = ConditionStatuses::new(service, &desired.conditions);
        applied.conditions = Some(statuses.because_of(unprogrammed));
        match applied.status_patch(service, &desired) {
            None => drop(applied.is_new_event("Publish", None)),
            Some(_) if applied.status_retry.is_waiting() => return Ok(()),
            Some(patch) => {
                self.writer.patch_status(&service.key, patch).await?;
                let changed = status::changed_addresses(service, &desired);
                if applied.is_new_event("Publish", changed.as_ref())
                    && let Some((reason, message)) = &changed
                {
                    events.normal("Publish", reason, message);
                }
                applied.set_status_written(service, desired);
            }
        }
        applied.status_retry.succeeded();
        applied.is_new_event(applied::REPORT, None);
        Ok(())
    }

    fn has_usable_endpoint(&self, service: &Service) -> bool {
        let now = self.cluster.snapshot(&owner_of(service), &self.config);
        now.is_some_and(|now| now.endpoints.is_usable)
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
        // The last verdict stays while health cannot be read: `Serving` says since when.
        found.extend(applied.health.as_ref().and_then(HealthSummary::unserved_parts));
        let list = |names: &mut dyn Iterator<Item = &str>| names.take(SHOWN).collect::<Vec<_>>().join(", ");
        let now = SystemTime::now();
        let mut without_agent =
            targets.without_agent.iter().filter(|missing| missing.grace(now).is_none()).peekable();
        if without_agent.peek().is_some() {
            let nodes = list(&mut without_agent.map(|missing| missing.node.as_str()));
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
                "No eligible node can serve the Service. These ineligible nodes stay targets: {nodes}. \
                 Make nodes eligible, or move the pods to eligible nodes."
            );
            found.push((reasons::ONLY_INELIGIBLE_NODES, message));
        }
        if let Some(labels) = targets.labels().filter(|_| targets.misses_labels) {
            let message = format!(
                "The Service asks for nodes with the labels {labels}, but no eligible node that can serve it has them. Those that had them \
                 before stay targets while they can serve; if there are none, other nodes are. Restore the labels, or correct the annotation."
            );
            found.push((reasons::NO_NODE_WITH_LABELS, message));
        }
        if service.affinity.is_some() && !self.config.capabilities.affinity {
            let message = "The provider does not support sessionAffinity ClientIP. \
                           Only the nodes keep a client on its endpoint. Remove spec.sessionAffinity.";
            found.push((reasons::AFFINITY_NOT_SUPPORTED, message.to_owned()));
        }
        let ignored = plan::ignored_annotations(service);
        found.extend(ignored.map(|message| (reasons::ANNOTATION_IGNORED, message)));
        found
    }

    async fn ensure_finalizer(
        &self,
        service: &Service,
        applied: &mut AppliedState,
    ) -> Result<(), ReconcileError> {
        let provider = service.annotations.get(annotations::PROVIDER).map(String::as_str);
        let served = service.annotations.get(annotations::SERVED_CLASS).map(String::as_str);
        if service.has_finalizer(plan::finalizer(service))
            && provider == Some(self.config.classes.provider)
            && served == plan::served_class(service)
        {
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

/// Whether a change met one of somebody else, or an earlier one that has not ended.
enum Conflict {
    No,
    /// For the first time, or for a short time.
    Passing,
    /// Again and again, the first time this.
    Lasting(String),
}

impl Conflict {
    /// What users are told of an error. Each try may meet something else, which would write the status each time.
    fn text_of(self, error: &Error) -> String {
        match self {
            Self::Lasting(first) => first,
            Self::No | Self::Passing => error.to_string(),
        }
    }
}

/// Notes in `applied` what a result says of conflicts.
fn note_conflict(result: &ReconcileResult, applied: &mut AppliedState) -> Conflict {
    match result {
        Err(ReconcileError::Provider(error @ (Error::Conflict(_) | Error::Busy(_)))) => {
            applied.note_conflict(&error.to_string()).map_or(Conflict::Passing, Conflict::Lasting)
        }
        Ok(Progress::Done) | Err(ReconcileError::Provider(Error::Invalid { .. })) => {
            applied.end_conflicts();
            Conflict::No
        }
        _ => Conflict::No,
    }
}

/// The result of a reconcile of which something could not be written to the Service, and is tried again.
fn unwritten(result: ReconcileResult, retry: WriteRetry) -> ReconcileResult {
    let retry_in = retry.due_at().map(|at| at.saturating_duration_since(Instant::now()));
    match result {
        Ok(Progress::Done) => Err(ReconcileError::Unreported),
        Ok(Progress::Again(after)) => Ok(Progress::Again(retry_in.map_or(after, |wait| wait.min(after)))),
        result => result,
    }
}

/// The result of a refusal for the load balancer that the Service publishes, with who may connect. If its class is not Steerage's, that one
/// may still be another controller's: Steerage marks the Service before it knows.
fn unsupported_change(service: &Service, reason: &str, sources: Option<&str>) -> ReasonMessage {
    let advice = "The condition steerage.dev/Programmed says what to fix.";
    let told = sources.map(|sources| format!(" {sources}")).unwrap_or_default();
    if reason == QUOTA_EXCEEDED {
        let result = "A quota of the provider is used up. The load balancer keeps what could not be changed, unless the provider can only \
                      replace it, as GCE does ports; its targets still follow the endpoints, and Steerage tries again.";
        return (reasons::PARTLY_PROGRAMMED, format!("{result}{told} {advice}"));
    }
    let may_be_foreign = service.class.is_none() || plan::served_class(service).is_some();
    let result = if reason == ADOPTION_REFUSED {
        "The load balancer that the Service publishes is of another controller, and is not adopted. Steerage does not change its targets."
    } else if may_be_foreign {
        "The requested configuration is unsupported. If the load balancer is Steerage's, it keeps what could not be changed, and its targets still \
         follow the endpoints. If it is another controller's, it is not adopted, and Steerage does not change its targets."
    } else {
        "The requested configuration is unsupported. The load balancer keeps what could not be changed, and its targets still follow the endpoints."
    };
    (reasons::UNSUPPORTED_CHANGE, format!("{result}{told} {advice}"))
}

/// What is wrong, what happens now, what to do.
fn plan_error(error: &PlanError, consequence: &str) -> ReasonMessage {
    (error.reason(), format!("{error}. {consequence}. {}.", error.remedy()))
}

#[cfg(test)]
mod tests;
