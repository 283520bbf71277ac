// SPDX-License-Identifier: Apache-2.0
//! What a reconcile does while the cluster changes beside it.

use std::future::pending;

use async_trait::async_trait;
use futures::stream::BoxStream;
use kube::Client;
use prometheus_client::registry::Registry;
use steerage_model::{IpMode, Protocol};
use steerage_provider_api::{
    Addressing, Capabilities, Compare, LoadBalancer, Outcome, Provider, Steering, TargetHealth, TargetSet,
};
use steerage_watch::{Backoff, Event};

use super::*;
use crate::cluster_index::owner_of;
use crate::cluster_index::tests::service;
use crate::lease::Leadership;
use crate::plan::{HealthCheckDefaults, ManagedClasses};

use crate::rate_limit::RateLimiter;
use crate::request_queue::RequestQueue;

/// A provider that never answers.
struct Silent;

#[async_trait]
impl Provider for Silent {
    fn name(&self) -> &'static str {
        "edge"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            steerings: &[Steering::Api],
            protocols: &[Protocol::Tcp],
            addressing: Addressing::Vip,
            ip_mode: Some(IpMode::Vip),
            ipv6: true,
            weights: true,
            affinity: true,
            health_interval: (Duration::from_secs(1), Duration::from_mins(1)),
        }
    }

    async fn apply(&self, _: &LoadBalancer, _: Compare) -> Result<Outcome, Error> {
        pending().await
    }

    async fn set_targets(&self, _: &Owner, _: &TargetSet) -> Result<Outcome, Error> {
        pending().await
    }

    async fn target_health(&self, _: &Owner) -> Result<Vec<TargetHealth>, Error> {
        pending().await
    }

    async fn delete(&self, _: &Owner) -> Result<Progress, Error> {
        pending().await
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        pending().await
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        Box::pin(futures::stream::pending())
    }
}

/// A reconciler whose API server never answers either.
fn reconciler() -> Reconciler {
    let classes = ManagedClasses { provider: "edge", serve_unset: false };
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let applied = Arc::<AppliedStates>::default();
    let cluster = Arc::new(ClusterIndex::new(classes.clone(), requests, Arc::clone(&applied)));
    for event in [Event::Init, Event::InitApply(service()), Event::InitDone] {
        cluster.on_service(event);
    }
    let service =
        tower::service_fn(|_| pending::<Result<http::Response<kube::client::Body>, std::io::Error>>());
    let client = Client::new(service, "default");
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let limiter = RateLimiter::new(1000.0, 1000);
    Reconciler {
        provider: GuardedProvider::new(Arc::new(Silent), Leadership::default(), limiter, metrics.clone()),
        cluster,
        config: Config {
            capabilities: Silent.capabilities(),
            default_steering: Steering::Api,
            classes,
            proxy_healthz_port: 10256,
            agent_healthz_port: 10357,
            health: HealthCheckDefaults {
                interval: None,
                timeout: None,
                healthy_threshold: 2,
                unhealthy_threshold: 2,
            },
        },
        writer: ServiceWriter::new(client.clone(), "edge"),
        recorder: Recorder::new(client, "controller", "test", &mut registry).0,
        metrics,
        applied,
        staleness: Staleness::default(),
        freeze_targets_after: None,
        migrate_legacy_annotations: false,
    }
}

/// Otherwise a change of a node, or the end of the Service, during the first reconcile would add no request for it.
#[tokio::test]
async fn owner_is_known_while_its_first_reconcile_runs() {
    let reconciler = reconciler();
    let owner = owner_of(&service());
    let request = ReconcileRequest::FULL;
    let mut running = std::pin::pin!(reconciler.reconcile(&owner, &request));
    assert!(futures::poll!(&mut running).is_pending());
    assert_eq!(reconciler.applied.owners(), std::slice::from_ref(&owner));
}
