// SPDX-License-Identifier: Apache-2.0
//! Reads the health of a load balancer's targets, which the provider tells when asked, and when to read it again.

use std::time::Duration;

use steerage_model::Service;
use tokio::time::Instant;

use super::Reconciler;
use crate::applied::{AppliedState, HealthRead};
use crate::cluster_index::owner_of;
use crate::lease::clock;
use crate::pod_gates::PodGates;
use crate::status::HealthSummary;

/// Wait before the health of the targets is read again after a failure.
const HEALTH_RETRY: Duration = Duration::from_secs(30);

impl Reconciler {
    /// An error keeps what was read last: it says nothing about the targets.
    pub(super) async fn read_health(&self, service: &Service, applied: &mut AppliedState) {
        let (owner, began) = (owner_of(service), Instant::now());
        let due = match self.provider.target_health(&owner).await {
            Ok(health) => {
                applied.health = Some(HealthSummary::new(&health));
                (applied.health_read_at, applied.health_failure) = (Some(began), None);
                let (time, interval) = (clock::time_of_day(), health.due);
                applied.last_health_read = Some(HealthRead { at: began, time, interval });
                if let Some(gates) = self.gates_of(service) {
                    gates.record(&owner, &health.targets, began);
                }
                health.due
            }
            Err(error) => {
                applied.health_read_at = None;
                // Once in an outage: health is read often.
                if applied.health_failure.is_some() {
                    tracing::debug!(service = %service.key, %error, "health of the targets not read; retrying");
                } else {
                    tracing::warn!(service = %service.key, %error, "health of the targets not read; retrying");
                }
                applied.health_failure.get_or_insert(error.reason());
                Some(HEALTH_RETRY)
            }
        };
        // With jitter, so that load balancers created together are not always read together.
        let spread = 0.9 + fastrand::f64() * 0.2;
        applied.health_due_at = due.map(|due| Instant::now() + due.mul_f64(spread));
    }

    /// The readiness gates, if pods of this Service wait for theirs.
    fn gates_of(&self, service: &Service) -> Option<&PodGates> {
        self.pod_gates.as_deref().filter(|_| self.cluster.has_waiting_pods(service, &self.config))
    }

    /// Health is read soon again while pods wait for it. After a failed read it is not: the provider may be busy.
    pub(super) fn poll_for_waiting_pods(&self, service: &Service, applied: &mut AppliedState) {
        if let Some((gates, read_at)) = self.gates_of(service).zip(applied.health_read_at) {
            let due = read_at + gates.poll();
            applied.health_due_at = Some(applied.health_due_at.map_or(due, |at| at.min(due)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use serde_json::Value;
    use steerage_provider_api::{HealthState, TargetHealth};
    use steerage_watch::Event;

    use super::*;
    use crate::reconcile::tests::{
        Polled, add_nodes, local_service, reconciler, recording, set_endpoints, show_status,
    };
    use crate::request_queue::ReconcileRequest;

    /// A read of health may wait for half a minute, as the change before it did.
    #[tokio::test(start_paused = true)]
    async fn outage_is_shown_before_health_is_read() {
        let (provider, (client, bodies)) = (Arc::new(Polled::default()), recording());
        let reconciler = reconciler(Arc::<Polled>::clone(&provider), client);
        add_nodes(&reconciler, "ab");
        set_endpoints(&reconciler, "a");
        let service = local_service();
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        reconciler.reconcile(&owner_of(&service), &ReconcileRequest::FULL).await;
        bodies.lock().expect("lock").clear();
        provider.set_down(true);
        *provider.health_hangs.lock().expect("lock") = Duration::from_secs(30);
        let owner = owner_of(&service);
        let reconcile = reconciler.reconcile(&owner, &ReconcileRequest::FULL);
        let waits = tokio::time::timeout(Duration::from_secs(1), reconcile).await.is_err();
        let bodies = bodies.lock().expect("lock");
        let conditions = bodies.iter().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
        let reasons: Vec<&str> = conditions.filter_map(|found| found["reason"].as_str()).collect();
        assert!(waits && reasons.contains(&"ProviderUnavailable"), "{reasons:?}");
    }

    /// Pods become ready while the provider hangs.
    #[tokio::test(start_paused = true)]
    async fn endpoints_that_came_meanwhile_are_not_missing() {
        let provider = Arc::new(Polled::default());
        let (client, bodies) = recording();
        let reconciler = reconciler(Arc::<Polled>::clone(&provider), client);
        add_nodes(&reconciler, "ab");
        let service = local_service();
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let owner = owner_of(&service);
        reconciler.reconcile(&owner, &ReconcileRequest::FULL).await;
        let reason = || {
            let bodies = std::mem::take(&mut *bodies.lock().expect("lock"));
            let conditions =
                bodies.iter().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
            let mut found = conditions.filter(|condition| condition["type"] == "steerage.dev/Serving");
            found.next_back().map(|condition| condition["reason"].as_str().unwrap_or_default().to_owned())
        };
        assert_eq!(reason().as_deref(), Some("NoEndpoints"));
        provider.set_down(true);
        *provider.health_hangs.lock().expect("lock") = Duration::from_secs(30);
        let come = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            reason();
            set_endpoints(&reconciler, "a");
        };
        tokio::join!(reconciler.reconcile(&owner, &ReconcileRequest::FULL), come);
        assert_eq!(reason().as_deref(), Some("HealthUnknown"));
    }

    /// Status and message of the condition `Serving`, as far as written.
    fn serving(bodies: &[Value]) -> Vec<(String, String)> {
        let conditions = bodies.iter().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
        let found = conditions.filter(|condition| condition["type"] == "steerage.dev/Serving");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        found.map(|condition| (text(&condition["status"]), text(&condition["message"]))).collect()
    }

    /// What was read stays the verdict for some intervals: a short outage of the provider's API is no news. Then nobody knows.
    #[tokio::test(start_paused = true)]
    async fn verdict_ends_when_health_cannot_be_read_for_long() {
        let provider = Arc::new(Polled::default());
        let (client, bodies) = recording();
        let mut reconciler = reconciler(Arc::<Polled>::clone(&provider), client);
        // A comparison writes the status again.
        reconciler.resync_period = Duration::from_hours(24);
        add_nodes(&reconciler, "a");
        set_endpoints(&reconciler, "a");
        let service = local_service();
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let healthy = TargetHealth {
            target: "a".to_owned(),
            family: None,
            state: HealthState::Healthy,
            reason: String::new(),
        };
        *provider.health.lock().expect("lock") = vec![healthy];
        let after = async |seconds: u64, hides: bool| {
            provider.hides_health.store(hides, Ordering::Release);
            tokio::time::advance(Duration::from_secs(seconds)).await;
            bodies.lock().expect("lock").clear();
            reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
            let written = bodies.lock().expect("lock").clone();
            show_status(&reconciler, &owner_of(&service), &written);
            serving(&written).pop()
        };
        assert_eq!(after(0, false).await.map(|(status, _)| status).as_deref(), Some("True"));
        // The interval is 10 s: three of them would be too few.
        for _ in 0..5 {
            assert_eq!(after(35, true).await, None, "nothing changes");
        }
        let (status, message) = after(35, true).await.expect("a change");
        assert_eq!(status, "Unknown", "{message}");
        assert!(
            message.contains("was last read at 20") && message.contains("(ProviderUnavailable)"),
            "{message}"
        );
        assert_eq!(after(35, true).await, None, "the message does not change");
        assert_eq!(after(35, false).await.map(|(status, _)| status).as_deref(), Some("True"));
        // Reads that fail now and then are no outage.
        for hides in [true, true, false, true, true, false, true, true] {
            assert_eq!(after(60, hides).await, None);
        }
        // Of health that is read rarely, three intervals count.
        provider.set_slow();
        assert_eq!(after(35, false).await, None);
        assert_eq!(after(179, true).await, None);
        assert_eq!(after(35, true).await.map(|(status, _)| status).as_deref(), Some("Unknown"));
    }
}
