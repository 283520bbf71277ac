// SPDX-License-Identifier: Apache-2.0
//! One process of a replica: the real controller with a simulated network.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use steerage_process::{Component, Process};
use steerage_provider_api::{Provider, Steering};
use steerage_provider_edge::EdgeProvider;
use steerage_watch::{Backoff, Watches};
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use super::api_server;
use super::cloud::{self, SimulatedProvider};
use super::removals::Removals;
use super::vendor::CloudLink;
use super::world::{ProcessId, ProcessState, ProviderKind, SharedWorld, World};
use crate::controller::{self, Components};
use crate::lease::{LeaseOptions, LeaseTiming};
use crate::plan::Config;
use crate::removal_hold::LONGEST_HOLD;
use crate::workers::WorkerOptions;

pub(super) const NAMESPACE: &str = "steerage-system";
pub(super) const LEASE: &str = "steerage-controller";
/// Short, so that a run is.
pub(super) const RESYNC: Duration = Duration::from_mins(2);

/// Shorter than the flag may be, and than many lags and parts of the network.
const FREEZE: Duration = Duration::from_secs(40);

/// The flags that the plans depend on.
pub(super) fn config(world: &World) -> Config {
    let capabilities = match (&world.vendor, world.provider) {
        (Some(cloud), _) => cloud.capabilities(),
        (None, ProviderKind::Edge) => steerage_provider_edge::capabilities(),
        (None, provider) => cloud::capabilities(provider == ProviderKind::Shared),
    };
    let has_api_only = !capabilities.steerings.contains(&Steering::HealthCheck);
    let is_api = world.provider == ProviderKind::Own || has_api_only;
    let is_fused = world.is_fused && capabilities.steerings.contains(&Steering::Fused);
    let steering = match (is_api, is_fused) {
        (true, _) => Steering::Api,
        (false, true) => Steering::Fused,
        (false, false) => Steering::HealthCheck,
    };
    Config::with_defaults(capabilities, steering)
}

pub(super) struct Running {
    pub(super) id: ProcessId,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Starts a replica's next process.
    pub(super) fn start(world: &SharedWorld, replica: usize) -> Self {
        let (id, kind, freezes, config, vendor) = {
            let mut world = world.lock();
            let (id, now) = (world.processes.len(), Instant::now());
            let identity = format!("replica-{replica}-{id}");
            world.record("process started", &identity);
            world.processes.push(ProcessState {
                identity,
                is_alive: true,
                api_cut: now,
                cloud_cut: now,
                watches_cut: now,
                removals: Removals::default(),
            });
            (id, world.provider, world.freezes, config(&world), world.vendor.clone())
        };
        let admin = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let component = Component { name: "controller", version: "0", admin };
        let (process, failures) = Process::unsupervised(component);
        let client = api_server::client(world, id);
        let watches = process.metrics().register("watch", |registry| Watches::new(client.clone(), registry));
        let provider: Arc<dyn Provider> = match (vendor, kind) {
            (Some(cloud), _) => cloud.provider(Arc::new(CloudLink { world: world.clone(), process: id })),
            (None, ProviderKind::Edge) => {
                Arc::new(EdgeProvider::new(&client, &watches.dispensable(), NAMESPACE))
            }
            _ => Arc::new(SimulatedProvider::new(world, id)),
        };
        let identity = world.lock().identity(id).to_owned();
        let components = Components {
            watches,
            client,
            config,
            provider,
            lease: LeaseOptions {
                namespace: NAMESPACE.to_owned(),
                name: LEASE.to_owned(),
                identity: identity.clone(),
                timing: LeaseTiming::default(),
            },
            workers: WorkerOptions { workers: 4, resync_period: RESYNC, orphan_grace_period: RESYNC },
            backoff: Backoff::new(Duration::from_secs(1), Duration::from_mins(1)),
            identity,
            provider_qps: if matches!(kind, ProviderKind::Vendor(_)) { 20 } else { 1000 },
            freeze_targets_after: freezes.then_some(FREEZE),
            mass_removal_hold: LONGEST_HOLD,
            migrate_legacy_annotations: false,
        };
        let shutdown = process.shutdown().clone();
        let world = world.clone();
        let task = tokio::spawn(async move {
            let result = Box::pin(controller::run(process, components)).await;
            drop(failures);
            let mut world = world.lock();
            let why = result.err().map_or_else(String::new, |error| error.to_string());
            let details = format!("{} {why}", world.identity(id));
            world.record("process ended", &details);
            world.processes[id].is_alive = false;
            world.crashing.push(id);
            world.wake.notify_one();
        });
        Self { id, shutdown, task }
    }

    /// Ends the process as SIGTERM does.
    pub(super) fn terminate(&self) {
        self.shutdown.cancel();
    }

    /// Ends the process at once: nothing of it runs on, and it answers no call.
    pub(super) fn kill(self, world: &SharedWorld) {
        world.lock().processes[self.id].is_alive = false;
        self.task.abort();
        self.shutdown.cancel();
    }
}
