// SPDX-License-Identifier: Apache-2.0
//! Runs the controller: watch, acquire the Lease, reconcile, release the Lease. The components come from `args`.

use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use kube::Client;
use steerage_process::Process;
use steerage_provider_api::Provider;
use steerage_watch::events::Recorder;
use steerage_watch::{Backoff, Watches};
use tokio_util::sync::CancellationToken;

use crate::applied::AppliedStates;
use crate::cluster_index::{self, ClusterIndex};
use crate::leader_provider::LeaderProvider;
use crate::lease;
use crate::metrics::Metrics;
use crate::plan::Config;
use crate::pod_gates::{self, PodGates, PodWriter};
use crate::provider_notices;
use crate::rate_limit::RateLimiter;
use crate::reconcile::Reconciler;
use crate::removal_hold::RemovalBreaker;
use crate::repeated_logs::RepeatedLogs;
use crate::request_queue::RequestQueue;
use crate::service_reader::ServiceReader;
use crate::service_writer::ServiceWriter;
use crate::workers;

/// What the flags configure.
pub(crate) struct Components {
    pub(crate) client: Client,
    pub(crate) watches: Watches,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) config: Config,
    pub(crate) lease: lease::LeaseOptions,
    pub(crate) workers: workers::WorkerOptions,
    pub(crate) backoff: Backoff,
    pub(crate) identity: String,
    pub(crate) provider_qps: u32,
    pub(crate) freeze_targets_after: Option<Duration>,
    /// Zero holds nothing.
    pub(crate) mass_removal_hold: Duration,
    pub(crate) migrate_legacy_annotations: bool,
}

/// Runs until shutdown, or until the Lease is lost.
pub(crate) async fn run(process: Process, components: Components) -> anyhow::Result<()> {
    let Components {
        client,
        watches,
        provider,
        config,
        lease,
        workers,
        backoff,
        identity,
        provider_qps,
        freeze_targets_after,
        mass_removal_hold,
        migrate_legacy_annotations,
    } = components;
    let metrics = process.metrics().register("controller", Metrics::new);
    let keys = Arc::clone(&provider);
    let requests = Arc::new(RequestQueue::new(move |owner| keys.serialization_key(owner), backoff));
    let applied = Arc::new(AppliedStates::default());
    let cluster = ClusterIndex::new(config.classes.clone(), Arc::clone(&requests), Arc::clone(&applied));
    let breaker = RemovalBreaker::new(mass_removal_hold, metrics.holds.clone());
    let cluster = cluster.with_cordoned_nodes_drained(config.drain_cordoned_nodes);
    let cluster = Arc::new(cluster.with_breaker(breaker.clone()));
    cluster_index::follow(&process, &cluster, &watches, config.pod_readiness_gates);

    // A standby also watches, and is ready: it lacks only the Lease.
    let stop = process.shutdown();
    let Some(held) = lease::acquire(client.clone(), lease, stop).await else { return Ok(()) };
    metrics.leader.set(1);
    metrics.conditions.begin(config.classes.provider);
    let leadership = held.leadership();
    let release = CancellationToken::new();
    let holding = held.hold_until(release.clone());

    let working = async {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            // An earlier holder of the Lease may have seen more than this process' watches have brought: what it has built must not
            // be taken down because of an old view.
            () = watches.relist() => {}
        }
        let (recorder, recording) = process.metrics().register("controller", |registry| {
            Recorder::new(client.clone(), "controller", &identity, registry)
        });
        let events = tokio::spawn(recording);
        let changes = provider.changes();
        let telling = provider_notices::publish(provider.notices(), Arc::clone(&cluster), recorder.clone());
        let rate_limiter = RateLimiter::of_qps(provider_qps);
        let pod_gates = config.pod_readiness_gates.then(Arc::<PodGates>::default);
        let pod_writer = PodWriter::new(client.clone(), leadership.clone());
        let reconciler = Arc::new(Reconciler {
            reader: ServiceReader::new(client.clone()),
            writer: ServiceWriter::new(client.clone(), config.classes.provider, leadership.clone()),
            provider: LeaderProvider::new(provider, leadership, rate_limiter, metrics.clone()),
            cluster,
            config,
            recorder,
            metrics: metrics.clone(),
            applied,
            staleness: watches.staleness().clone(),
            freeze_targets_after,
            breaker,
            resync_period: workers.resync_period,
            pod_gates: pod_gates.clone(),
            migrate_legacy_annotations,
            repeated_logs: RepeatedLogs::default(),
        });
        let gating =
            pod_gates.map(|gates| pod_gates::run(Arc::clone(&reconciler), gates, pod_writer, stop.clone()));
        let working = workers::run(reconciler, requests, changes, workers, stop.clone());
        tokio::select! {
            _ = async { tokio::join!(working, OptionFuture::from(gating)) } => {}
            () = telling => {}
        }
        // The last recorder went with the reconciler, so this ends when all events are written.
        let _ = events.await;
    };
    let (mut holding, mut working) = (std::pin::pin!(holding), std::pin::pin!(working));
    let result = tokio::select! {
        biased;
        // Without the Lease nothing may be written: the work is dropped at once.
        lost = &mut holding => lost,
        () = &mut working => {
            release.cancel();
            holding.await
        }
    };
    metrics.leader.set(0);
    Ok(result?)
}
