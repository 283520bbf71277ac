// SPDX-License-Identifier: Apache-2.0
//! The controller's life: watch, wait for the Lease, work, give the Lease back.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use steerage_process::Process;
use steerage_provider_api::Provider;
use steerage_watch::Watches;
use steerage_watch::events::Recorder;
use tokio_util::sync::CancellationToken;

use crate::applied::AppliedStates;
use crate::cluster_index::{self, ClusterIndex};
use crate::guarded_provider::GuardedProvider;
use crate::lease;
use crate::metrics::Metrics;
use crate::plan::Config;
use crate::rate_limit::RateLimiter;
use crate::reconcile::Reconciler;
use crate::service_writer::ServiceWriter;
use crate::workers;

/// What the flags have been made into.
pub(crate) struct Parts {
    pub(crate) client: Client,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) config: Config,
    pub(crate) lease: lease::LeaseOptions,
    pub(crate) workers: workers::WorkerOptions,
    pub(crate) identity: String,
    pub(crate) provider_qps: u32,
    pub(crate) freeze_targets_after: Option<Duration>,
    pub(crate) migrate: bool,
}

/// Runs until the process is asked to end, or the Lease is lost.
pub(crate) async fn run(process: Process, parts: Parts) -> anyhow::Result<()> {
    let Parts {
        client,
        provider,
        config,
        lease,
        workers,
        identity,
        provider_qps,
        freeze_targets_after,
        migrate,
    } = parts;
    let metrics = process.metrics().register("controller", Metrics::new);
    let watches = process.metrics().register("watch", |registry| Watches::new(client.clone(), registry));
    let cluster = Arc::new(ClusterIndex::default());
    cluster_index::follow(&process, &cluster, &watches);

    // A standby watches too, and is ready: all that it lacks is the Lease.
    let stop = process.shutdown();
    let Some(held) = lease::acquire(client.clone(), lease, stop).await else { return Ok(()) };
    metrics.leader.set(1);
    let leadership = held.leadership();
    let released = CancellationToken::new();
    let keeping = held.hold_until(released.clone());

    let working = async {
        tokio::select! {
            () = stop.cancelled() => return,
            () = cluster.synced() => {}
        }
        let (recorder, recording) = process
            .metrics()
            .register("", |registry| Recorder::new(client.clone(), "controller", &identity, registry));
        let events = tokio::spawn(recording);
        let changes = provider.changes();
        let reconciler = Arc::new(Reconciler {
            writer: ServiceWriter::new(client.clone(), config.classes.provider),
            provider: GuardedProvider::new(
                provider,
                leadership,
                RateLimiter::new(f64::from(provider_qps), provider_qps.saturating_mul(2)),
                metrics.clone(),
            ),
            cluster,
            config,
            recorder,
            metrics: metrics.clone(),
            applied: AppliedStates::default(),
            staleness: watches.staleness().clone(),
            freeze_targets_after,
            migrate,
        });
        workers::work(reconciler, changes, workers, stop.clone()).await;
        // The last recorder is gone with the reconciler; what was told is written out.
        let _ = events.await;
    };
    let (mut keeping, mut working) = (std::pin::pin!(keeping), std::pin::pin!(working));
    let kept = tokio::select! {
        // Nothing more may be written: the work is dropped where it stands.
        lost = &mut keeping => lost,
        () = &mut working => {
            released.cancel();
            keeping.await
        }
    };
    metrics.leader.set(0);
    Ok(kept?)
}
