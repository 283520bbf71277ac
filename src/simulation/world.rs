// SPDX-License-Identifier: Apache-2.0
//! The state of the simulated world, which replicas, API server and cloud share, and the record of what happened in it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_conformance::simulated::SimulatedCloud;
use tokio::sync::Notify;
use tokio::time::{Duration, Instant};

use super::api_server::ApiServer;
use super::cloud::Cloud;
use super::removals::{NodeHistory, Removals};
use super::vendor::Vendor;

/// The index of a replica's process in [`World::processes`]. A restarted replica is another process.
pub(super) type ProcessId = usize;

/// The provider of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderKind {
    /// A simulated cloud, where each load balancer has its own targets.
    Own,
    /// The same with shared sets.
    Shared,
    /// The real provider of the edge, whose objects are in the API server.
    Edge,
    /// The real provider of a vendor's cloud, on its stand-in.
    Vendor(Vendor),
}

impl ProviderKind {
    /// That of a seed in a run of no vendor.
    pub(super) fn of_seed(seed: u64) -> Self {
        [Self::Own, Self::Shared, Self::Edge][(seed % 3) as usize]
    }
}

/// How often something goes wrong. All zero after chaos.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Chance that a call is refused.
    pub(super) refuse: f64,
    /// Chance that the request of a call is lost.
    pub(super) lose_request: f64,
    /// Chance that a call has its effect, and its answer is lost.
    pub(super) lose_answer: f64,
    /// Chance that a request arrives twice.
    pub(super) repeat: f64,
    /// Chance that a call is slow, by up to half a minute.
    pub(super) slow: f64,
    /// Chance that the caller crashes when its call has had its effect.
    pub(super) crash: f64,
    /// Chance that a watch lags, seldom by more than ten seconds.
    pub(super) lag: f64,
    /// Chance that a list that may be old is old.
    pub(super) old_list: f64,
}

#[derive(Debug)]
pub(super) struct ProcessState {
    /// The identity in the Lease.
    pub(super) identity: String,
    pub(super) is_alive: bool,
    /// Until when the API server cannot be reached.
    pub(super) api_cut: Instant,
    /// Until when the cloud cannot be reached.
    pub(super) cloud_cut: Instant,
    /// Watches opened before this moment are cut.
    pub(super) watches_cut: Instant,
    pub(super) removals: Removals,
}

/// What happened in a run, for comparison and for the summary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    counts: BTreeMap<&'static str, u64>,
    /// Of everything that happened, in order.
    history: u64,
}

impl Report {
    pub(super) fn add(&mut self, other: &Self) {
        for (what, count) in &other.counts {
            *self.counts.entry(what).or_default() += count;
        }
        self.history ^= other.history;
    }

    pub(super) fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    pub(super) fn shows_every_fault(&self) -> bool {
        let others = ["nodes excluded at once", "node removed at once", "targets frozen"];
        self.shows_every_fault_of_a_cloud() && others.iter().all(|what| self.count(what) > 0)
    }

    pub(super) fn shows_every_fault_of_a_cloud(&self) -> bool {
        let faults = [
            "call refused",
            "request lost",
            "answer lost",
            "request repeated",
            "call slow",
            "crash after a call",
            "crash",
            "shutdown",
            "watch cut",
            "watch expired",
            "old list",
            "part from the API server",
            "part from the cloud",
            "late effect",
            "change by hand",
            "conflict of versions",
            "Service created again",
        ];
        faults.iter().all(|what| self.count(what) > 0)
    }
}

pub(super) struct World {
    pub(super) rng: fastrand::Rng,
    pub(super) faults: Faults,
    pub(super) api: ApiServer,
    pub(super) cloud: Cloud,
    pub(super) nodes: NodeHistory,
    pub(super) provider: ProviderKind,
    /// The cloud, if it is a vendor's.
    pub(super) vendor: Option<Arc<dyn SimulatedCloud>>,
    /// Whether a stale watch freezes targets.
    pub(super) freezes: bool,
    /// Whether the steering is `fused`, where the provider supports that.
    pub(super) is_fused: bool,
    pub(super) processes: Vec<ProcessState>,
    /// Processes that crash now.
    pub(super) crashing: Vec<ProcessId>,
    pub(super) violations: Vec<String>,
    pub(super) started: Instant,
    /// When each Service was created, by UID.
    pub(super) created: BTreeMap<String, Instant>,
    /// When each Service was changed last, by name.
    pub(super) changed: BTreeMap<Key, Instant>,
    /// When somebody last changed a vendor's cloud by hand.
    pub(super) changed_by_hand: Option<Instant>,
    /// Wakes the scenario: a process crashes.
    pub(super) wake: Arc<Notify>,
    report: Report,
    is_logged: bool,
}

/// Shared by everything in a simulation.
#[derive(Clone)]
pub(super) struct SharedWorld(Arc<Mutex<World>>);

impl SharedWorld {
    pub(super) fn new(seed: u64, provider: ProviderKind) -> Self {
        let vendor = match provider {
            ProviderKind::Vendor(vendor) => Some(vendor.cloud(seed)),
            _ => None,
        };
        let is_logged = std::env::var(super::VARIABLE).is_ok_and(|text| text.parse::<u64>().is_ok());
        Self(Arc::new(Mutex::new(World {
            rng: fastrand::Rng::with_seed(seed),
            faults: Faults::default(),
            api: ApiServer::default(),
            cloud: Cloud::default(),
            nodes: NodeHistory::default(),
            provider,
            vendor,
            freezes: seed % 4 == 3,
            is_fused: seed / 8 % 2 == 1,
            processes: Vec::new(),
            crashing: Vec::new(),
            violations: Vec::new(),
            started: Instant::now(),
            created: BTreeMap::new(),
            changed: BTreeMap::new(),
            changed_by_hand: None,
            wake: Arc::default(),
            report: Report::default(),
            is_logged,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    /// Records that something happened, by its kind and its details.
    pub(super) fn record(&mut self, what: &'static str, details: &str) {
        let at = self.started.elapsed();
        *self.report.counts.entry(what).or_default() += 1;
        let mut hasher = DefaultHasher::new();
        (self.report.history, at, what, details).hash(&mut hasher);
        self.report.history = hasher.finish();
        if self.is_logged {
            eprintln!("{:>9.3} {what}: {details}", at.as_secs_f64());
        }
    }

    pub(super) fn violation(&mut self, what: &str) {
        self.record("violation", what);
        let at = self.started.elapsed();
        self.violations.push(format!("after {:.3} s: {what}", at.as_secs_f64()));
    }

    pub(super) fn report(&self) -> &Report {
        &self.report
    }

    /// The time since a Service was created.
    pub(super) fn age(&self, owner: &Owner) -> Duration {
        self.created.get(&owner.uid).map_or(Duration::ZERO, Instant::elapsed)
    }

    pub(super) fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.f64() < probability
    }

    /// A duration in this range of milliseconds.
    pub(super) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.rng.u64(range))
    }

    pub(super) fn identity(&self, process: ProcessId) -> &str {
        &self.processes[process].identity
    }
}
