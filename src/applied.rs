// SPDX-License-Identifier: Apache-2.0
//! What this process last applied for each load balancer, so that the provider is asked only for what changed.
//!
//! In memory only: after a restart or a change of leader everything is compared with the provider once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use serde_json::Value;
use steerage_model::{Ingress, Key, Service, TrafficPolicy};
use steerage_provider_api::{AdmittedSources, GroupTargets, LoadBalancer, Owner, RequestedSources, Steering};
use steerage_provider_cloud::reasons::{ALL_TARGETS_REFUSED, QUOTA_EXCEEDED};
use tokio::time::{Duration, Instant};

use crate::condition_metrics::ConditionStatuses;
use crate::plan::{NodeChange, NodeDependence, NodeLabels};
use crate::removal_hold::RemovalHold;
use crate::status::{self, DesiredStatus, HealthSummary, ReasonMessage};
use crate::write_retry::WriteRetry;
use crate::written_status::WrittenStatus;

/// The event about missing endpoints waits this long: the EndpointSlices of a new Service follow it.
const ENDPOINTS_GRACE: Duration = Duration::from_secs(5);
/// What was read of health is out of date after so many intervals in which every read failed.
const HEALTH_OUTDATED_AFTER: u32 = 3;
/// And no earlier than this: a short outage of the provider's API says nothing about targets.
const MIN_HEALTH_OUTDATED: Duration = Duration::from_mins(3);
/// A conflict is reported after this long: the next tries resolve most.
const CONFLICT_GRACE: Duration = Duration::from_secs(10);
/// Conflicts further apart than this are no row. A provider may have to wait and read before it meets the next one.
const CONFLICT_ROW: Duration = Duration::from_mins(6);
/// Until a change is tried again for which a quota had no room, if the provider does not say when.
const FIRST_QUOTA_WAIT: Duration = Duration::from_secs(30);
/// The longest such wait: each one is twice as long as the one before.
const LONGEST_QUOTA_WAIT: Duration = Duration::from_mins(5);
/// The topic of the event about missing endpoints.
pub(crate) const SERVE: &str = "Serve";
/// The topic of the event about a status that the API server rejects.
pub(crate) const REPORT: &str = "Report";

/// What a health check is made for. With the same, the same targets are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AcceptedCheck {
    pub(crate) steering: Steering,
    policy: TrafficPolicy,
    port: Option<u16>,
}

impl AcceptedCheck {
    pub(crate) fn of(steering: Steering, service: &Service) -> Self {
        Self { steering, policy: service.external_policy, port: service.health_check_node_port }
    }

    /// Whether both are made for the same check: `health-check` and `fused` steering have the same.
    pub(crate) fn is_same_check(self, other: Self) -> bool {
        let asks_nodes = (self.steering.asks_nodes(), other.steering.asks_nodes());
        asks_nodes.0 == asks_nodes.1 && Self { steering: other.steering, ..self } == other
    }
}

/// What was last applied for one load balancer.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppliedState {
    /// The fingerprint of the Service at the last reconcile.
    pub(crate) fingerprint: Option<u64>,
    /// The fingerprint of the Service whose legacy annotations could not be migrated.
    pub(crate) failed_migration: Option<u64>,
    /// The load balancer in place; `None` if the provider's last call failed or was not complete, and while `rejected`.
    pub(crate) in_place: Option<LoadBalancer>,
    /// What the health check of the structure in place was made for; `None` if the provider's last call may have changed it.
    pub(crate) accepted: Option<AcceptedCheck>,
    /// Whether the targets of the structure that was last in place are pods; `None` if this process has seen none in place.
    pub(crate) accepted_pods: Option<bool>,
    /// The load balancer that the provider rejected, and why.
    pub(crate) rejected: Option<(LoadBalancer, ReasonMessage)>,
    /// The sources to which the load balancer of the refused Service was restricted, and who may connect; why nobody knows, if they cannot
    /// be read. `None` while the Service is not refused, and after a failure.
    pub(crate) restricted: Option<(RequestedSources, Result<Option<AdmittedSources>, String>)>,
    /// The sources that the Service requested before, when they were last in force as far as they could be.
    pub(crate) last_sources: Option<RequestedSources>,
    /// Why the first of the last tries to restrict the sources failed; `None` if the last one did not.
    pub(crate) restriction_failure: Option<&'static str>,
    /// The targets that the provider was last given.
    pub(crate) targets: Option<GivenTargets>,
    /// The nodes on which the last plan depended; `None` before the first.
    pub(crate) depends: Option<NodeDependence>,
    /// The labels of target nodes that the Service last asked for, readably.
    pub(crate) node_labels: Option<NodeLabels>,
    /// Whether this process has read what the Service asks for.
    pub(crate) has_read_labels: bool,
    /// The nodes that had the labels, when some had them last.
    pub(crate) labelled_nodes: Vec<Arc<str>>,
    /// The removals from the Service's own set of targets.
    pub(crate) hold: RemovalHold,
    /// The addresses or names that the provider gave.
    pub(crate) ingress: Vec<Ingress>,
    /// What the metric of conditions counts for this load balancer.
    pub(crate) conditions: Option<ConditionStatuses>,
    /// Targets that the provider refused, with the reason.
    pub(crate) refused_targets: Vec<(String, String)>,
    /// Why a part of the structure is not in place, from the last call.
    pub(crate) incomplete: Option<ReasonMessage>,
    /// When to look at frozen targets again.
    pub(crate) frozen_until: Option<Instant>,
    /// When the provider may accept refused targets.
    pub(crate) retry_refused_at: Option<Instant>,
    /// The wait for room in a quota, while the provider rejects the load balancer for it, and when it ends.
    quota_wait: Option<Duration>,
    quota_due: Option<Instant>,
    /// The last read of the targets' health that succeeded.
    pub(crate) last_health_read: Option<HealthRead>,
    /// Why the first read after it failed; `None` if the last one succeeded.
    pub(crate) health_failure: Option<&'static str>,
    /// The targets' health at the last read.
    pub(crate) health: Option<HealthSummary>,
    /// When that read began; `None` before the first, and after a failed one.
    pub(crate) health_read_at: Option<Instant>,
    /// When to read it again; `None` if the provider notifies.
    pub(crate) health_due_at: Option<Instant>,
    /// When nodes without an agent will have had the time to get one.
    pub(crate) agents_due_at: Option<Instant>,
    /// The last changes that met those of somebody else.
    conflict: Option<Conflicts>,
    /// Since when the Service has had no usable endpoint.
    no_endpoints_since: Option<Instant>,
    /// When to compare everything with the provider, although nothing is known to have changed.
    pub(crate) compare_at: Option<Instant>,
    /// The Service was paused at the last reconcile.
    pub(crate) is_paused: bool,
    /// The finalizer was written, and the index does not show it yet.
    pub(crate) finalizer_pending: bool,
    written_status: WrittenStatus,
    /// When to write the status again, and to remove finalizers of another controller.
    pub(crate) status_retry: WriteRetry,
    pub(crate) finalizers_retry: WriteRetry,
    /// The last event of each topic.
    published: BTreeMap<&'static str, ReasonMessage>,
}

/// Changes in a row that met those of somebody else.
#[derive(Clone, Debug)]
struct Conflicts {
    since: Instant,
    last: Instant,
    /// What the first one met.
    met: String,
}

/// A read of the targets' health.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HealthRead {
    pub(crate) at: Instant,
    /// The same for users.
    pub(crate) time: Timestamp,
    /// When the provider wanted the next one; `None` if it notifies.
    pub(crate) interval: Option<Duration>,
}

/// Targets that the provider was given.
#[derive(Clone, Debug)]
pub(crate) struct GivenTargets {
    pub(crate) targets: GroupTargets,
    /// Whether they are in place. Otherwise some may be.
    pub(crate) is_complete: bool,
}

impl AppliedState {
    /// When to reconcile again although nothing changed.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        let release = self.hold.next_release();
        let alarm = self.no_endpoints_since.map(|since| since + ENDPOINTS_GRACE);
        let alarm = alarm.filter(|_| !self.published.contains_key(SERVE));
        let due = [
            self.retry_refused_at,
            self.health_due_at,
            self.compare_at,
            self.frozen_until,
            self.agents_due_at,
            self.status_retry.due_at(),
            self.written_status.due_at(),
            self.finalizers_retry.due_at(),
            release,
            alarm,
        ];
        due.into_iter().flatten().min()
    }

    /// Since when the targets' health could not be read, and why, if what was read last says too little about now.
    pub(crate) fn outdated_health(&self) -> Option<(Timestamp, &'static str)> {
        let (read, failure) = (self.last_health_read?, self.health_failure?);
        let interval = read.interval.unwrap_or_default();
        let limit = interval.saturating_mul(HEALTH_OUTDATED_AFTER).max(MIN_HEALTH_OUTDATED);
        (read.at.elapsed() > limit).then_some((read.time, failure))
    }

    /// Notes that a change met one of somebody else. Returns what the first of a row met, once the row has lasted: others would write the
    /// status, and publish an event, at every try. Waits and calls without an answer do not end a row.
    pub(crate) fn note_conflict(&mut self, met: &str) -> Option<String> {
        let now = Instant::now();
        let row = self.conflict.take().filter(|row| now - row.last < CONFLICT_ROW);
        let row = row.unwrap_or_else(|| Conflicts { since: now, last: now, met: met.to_owned() });
        let row = self.conflict.insert(Conflicts { last: now, ..row });
        (row.last - row.since >= CONFLICT_GRACE).then(|| row.met.clone())
    }

    /// No change meets one of somebody else any more.
    pub(crate) fn end_conflicts(&mut self) {
        self.conflict = None;
    }

    /// Notes whether the Service has a usable endpoint now.
    pub(crate) fn note_endpoints(&mut self, has_any: bool) {
        self.no_endpoints_since = (!has_any).then(|| self.no_endpoints_since.unwrap_or_else(Instant::now));
    }

    /// Whether the Service has had no usable endpoint for so long that its EndpointSlices should exist.
    pub(crate) fn is_without_endpoints_for_long(&self) -> bool {
        self.no_endpoints_since.is_some_and(|since| since.elapsed() >= ENDPOINTS_GRACE)
    }

    /// Nothing is due, and nothing is known to be in place.
    pub(crate) fn pause(&mut self) {
        self.is_paused = true;
        (self.in_place, self.retry_refused_at, self.frozen_until) = (None, None, None);
        self.restricted = None;
        (self.health_due_at, self.compare_at, self.no_endpoints_since) = (None, None, None);
        (self.agents_due_at, self.conflict) = (None, None);
        (self.status_retry, self.finalizers_retry) = Default::default();
        self.hold = RemovalHold::default();
    }

    /// The provider rejects this load balancer.
    pub(crate) fn note_rejection(&mut self, lb: LoadBalancer, why: ReasonMessage) {
        let next = self.quota_wait.map_or(FIRST_QUOTA_WAIT, |wait| (wait * 2).min(LONGEST_QUOTA_WAIT));
        self.quota_wait = (why.0 == QUOTA_EXCEEDED).then_some(next);
        self.quota_due = self.quota_wait.map(|wait| Instant::now() + wait);
        self.rejected = Some((lb, why));
    }

    /// No quota keeps the load balancer from being as it is wanted.
    pub(crate) fn end_quota_wait(&mut self) {
        (self.quota_wait, self.quota_due) = (None, None);
    }

    /// The load balancer is tried now: what it finds says whether and when a quota is tried again.
    pub(crate) fn begin_try(&mut self) {
        (self.in_place, self.rejected, self.retry_refused_at, self.quota_due) = (None, None, None, None);
    }

    /// A quota may have room although nothing of the Service changes: it is tried again when its wait ends, however often targets change
    /// meanwhile, or when the provider says so before.
    pub(crate) fn retry_for_quota(&mut self) {
        let due = [self.retry_refused_at, self.quota_due];
        self.retry_refused_at = due.into_iter().flatten().min();
    }

    /// Why the provider rejects this load balancer, if it is the one that it rejected last. A quota may have room, and targets may be
    /// accepted, when the provider says that it is to be called again.
    pub(crate) fn rejection_of(&self, lb: &LoadBalancer) -> Option<ReasonMessage> {
        let is_due = self.retry_refused_at.is_some_and(|at| at <= Instant::now());
        self.rejected
            .as_ref()
            .filter(|(_, (reason, _))| ![QUOTA_EXCEEDED, ALL_TARGETS_REFUSED].contains(reason) || !is_due)
            .filter(|(rejected, _)| rejected.has_structure_of(lb))
            .map(|(_, why)| why.clone())
    }

    /// What to write so that the Service has this status. `None` if it has, or if that was written and the index does not show it yet.
    pub(crate) fn status_patch(&mut self, service: &Service, desired: &DesiredStatus) -> Option<Value> {
        let patch = status::patch(service, desired, Timestamp::now());
        if patch.is_none() {
            self.written_status.forget();
        }
        patch.filter(|_| !self.written_status.is_pending(service, desired, Instant::now()))
    }

    pub(crate) fn set_status_written(&mut self, service: &Service, desired: DesiredStatus) {
        self.written_status.set(service, desired, Instant::now());
    }

    /// Whether an event differs from the last one of its topic; `None` ends the topic.
    pub(crate) fn is_new_event(&mut self, topic: &'static str, event: Option<&ReasonMessage>) -> bool {
        match event {
            None => {
                self.published.remove(topic);
                false
            }
            Some(event) => self.published.insert(topic, event.clone()).as_ref() != Some(event),
        }
    }

    /// The load balancer is being deleted. If the Service wants it back before that is complete, the provider must make it again.
    pub(crate) fn forget_load_balancer(&mut self) {
        (self.in_place, self.accepted, self.accepted_pods) = (None, None, None);
        (self.rejected, self.targets, self.retry_refused_at, self.restricted) = (None, None, None, None);
        self.end_quota_wait();
        (self.health, self.health_read_at, self.health_due_at) = (None, None, None);
        (self.last_health_read, self.health_failure) = (None, None);
        (self.last_sources, self.restriction_failure, self.incomplete) = (None, None, None);
        self.ingress.clear();
    }

    /// Forgets which writes to the Service are pending, so that its status and finalizer are compared again.
    pub(crate) fn forget_pending_writes(&mut self) {
        self.written_status.forget();
        self.finalizer_pending = false;
    }
}

/// The states of all load balancers. At most one task works on each, so a worker takes a copy and puts it back.
#[derive(Debug, Default)]
pub(crate) struct AppliedStates {
    by_owner: Mutex<BTreeMap<Owner, AppliedState>>,
    /// Those of which removals of targets are held.
    holding: Mutex<BTreeSet<Owner>>,
}

impl AppliedStates {
    pub(crate) fn get(&self, owner: &Owner) -> Option<AppliedState> {
        self.lock(|states| states.get(owner).cloned())
    }

    /// The fingerprint of the owner's Service at its last reconcile.
    pub(crate) fn fingerprint(&self, owner: &Owner) -> Option<u64> {
        self.lock(|states| states.get(owner)?.fingerprint)
    }

    pub(crate) fn put(&self, owner: &Owner, state: AppliedState) {
        self.set_holding(owner, state.hold.held().len() > 0);
        self.lock(|states| states.insert(owner.clone(), state));
    }

    pub(crate) fn remove(&self, owner: &Owner) {
        self.set_holding(owner, false);
        self.lock(|states| states.remove(owner));
    }

    fn set_holding(&self, owner: &Owner, is_holding: bool) {
        let mut holding = self.holding.lock().unwrap_or_else(PoisonError::into_inner);
        if is_holding {
            holding.insert(owner.clone());
        } else {
            holding.remove(owner);
        }
    }

    /// The number of load balancers of which removals of targets are held.
    pub(crate) fn holding(&self) -> usize {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock(|states| states.len())
    }

    /// The owners for which a change of nodes may change the plan.
    pub(crate) fn concerned_by(&self, change: &NodeChange, shared_sets: bool) -> Vec<Owner> {
        let is_concerned = |state: &AppliedState| {
            state.depends.as_ref().is_none_or(|plan| change.concerns(plan, shared_sets))
        };
        self.lock(|states| {
            let concerned = states.iter().filter(|(_, state)| is_concerned(state));
            concerned.map(|(owner, _)| owner.clone()).collect()
        })
    }

    #[cfg(test)]
    pub(crate) fn owners(&self) -> Vec<Owner> {
        self.lock(|states| states.keys().cloned().collect())
    }

    /// The owners of this Service's name: more than one when it was deleted and created again.
    pub(crate) fn owners_of(&self, service: &Key) -> Vec<Owner> {
        let from = Owner { service: service.clone(), uid: String::new() };
        self.lock(|states| {
            let owners = states.range(from..).map(|(owner, _)| owner);
            owners.take_while(|owner| owner.service == *service).cloned().collect()
        })
    }

    fn lock<T>(&self, with: impl FnOnce(&mut BTreeMap<Owner, AppliedState>) -> T) -> T {
        with(&mut self.by_owner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_check_and_fused_steering_have_the_same_check() {
        let check = |steering, port| {
            let mut service = Service::new(Key::new("default", "web"));
            service.health_check_node_port = Some(port);
            AcceptedCheck::of(steering, &service)
        };
        let asked = check(Steering::HealthCheck, 1);
        assert!(asked.is_same_check(check(Steering::Fused, 1)) && asked.is_same_check(asked));
        assert!(!asked.is_same_check(check(Steering::Fused, 2)), "another port");
        assert!(!asked.is_same_check(check(Steering::Api, 1)), "the node's service proxy");
    }
}
