// SPDX-License-Identifier: Apache-2.0
//! What the condition of a waiting pod's readiness gate should be. Pure: no I/O and no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use steerage_model::{Key, Pod};
use steerage_provider_api::{HealthState, TargetHealth};
use tokio::time::{Duration, Instant};

use crate::reasons;

/// A pod without a Service waits this long, where no Service of its namespace has pods as targets.
pub(super) const SERVICE_GRACE: Duration = Duration::from_secs(10);
/// The same where one has: while the controllers of the cluster change their leader, EndpointSlices come late. Without them, no pod is a
/// target, and the old ones would be replaced by pods that nobody checked.
pub(super) const SLICES_GRACE: Duration = Duration::from_mins(2);
/// An unhealthy pod is reported after this long. Healthy ones then cost two writes.
pub(super) const UNHEALTHY_AFTER: Duration = Duration::from_mins(1);
/// A pod waits for its load balancers for this long: while the provider fails, pods are replaced all the same, but slowly.
pub(super) const GATE_TIMEOUT: Duration = Duration::from_mins(10);
/// Services that a message names.
const SHOWN: usize = 5;

/// The health of a load balancer's targets, as last read.
#[derive(Clone, Debug)]
pub(super) struct ReadHealth {
    at: Instant,
    /// By address and port.
    states: BTreeMap<SocketAddr, (HealthState, String)>,
}

impl ReadHealth {
    /// Targets that are no pods are left out. A read that began at `at` says nothing about later targets.
    pub(super) fn new(targets: &[TargetHealth], at: Instant) -> Self {
        let pod = |target: &TargetHealth| {
            let address = target.target.parse().ok()?;
            Some((address, (target.state, target.reason.clone())))
        };
        Self { at, states: targets.iter().filter_map(pod).collect() }
    }
}

/// One of the load balancers that have the pod as a target.
#[derive(Clone, Debug)]
pub(super) struct PodService<'a> {
    pub(super) key: &'a Key,
    /// The addresses at which the pod must be healthy.
    pub(super) addresses: &'a BTreeSet<SocketAddr>,
    pub(super) health: Option<&'a ReadHealth>,
}

/// An address that is not healthy, with the provider's reason; `None` if it is not registered.
type Unhealthy<'a> = (SocketAddr, Option<&'a str>);

impl PodService<'_> {
    fn unhealthy(&self, since: Instant) -> Vec<Unhealthy<'_>> {
        // What was read before may be of an earlier pod with the same address.
        let health = self.health.filter(|health| health.at >= since);
        let state = |address| health.and_then(|health| health.states.get(address));
        let unhealthy = self.addresses.iter().filter_map(|address| match state(address) {
            Some((HealthState::Healthy, _)) => None,
            found => Some((*address, found.map(|(_, reason)| reason.as_str()))),
        });
        unhealthy.collect()
    }
}

/// The condition of a readiness gate as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GateCondition {
    pub(super) is_met: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// The condition to write for a pod that waits `since`; `None` if it has the right one, or has to wait for its Services.
/// `is_current`: the view of the cluster is not stale. A pod without a Service waits for `grace`.
pub(super) fn decide(
    pod: &Pod,
    services: &[PodService<'_>],
    grace: Duration,
    since: Instant,
    now: Instant,
    is_current: bool,
) -> Option<GateCondition> {
    let waited = now.saturating_duration_since(since);
    let of = |is_met, reason, message| GateCondition { is_met, reason, message };
    if services.is_empty() {
        let is_over = waited >= grace && (is_current || waited >= GATE_TIMEOUT);
        let message = "No Service of Steerage has the pod as a target.".to_owned();
        return is_over.then(|| of(true, reasons::NO_LOAD_BALANCER, message));
    }
    let unhealthy = services.iter().map(|service| (service.key, service.unhealthy(since)));
    let unhealthy: Vec<_> = unhealthy.filter(|(_, found)| !found.is_empty()).collect();
    if unhealthy.is_empty() {
        let message = "The pod is healthy in every load balancer that has it as a target.".to_owned();
        return Some(of(true, reasons::TARGET_HEALTHY, message));
    }
    if waited >= GATE_TIMEOUT {
        let minutes = GATE_TIMEOUT.as_secs() / 60;
        let message = format!(
            "The pod is not healthy after {minutes}m: {}. It becomes ready all the same. Check the Service, and the health check of its \
             targets.",
            details(&unhealthy)
        );
        return Some(of(true, reasons::GATE_TIMED_OUT, message));
    }
    let known = pod.gate.as_ref().map(|gate| gate.reason.as_str());
    let is_registered = unhealthy.iter().flat_map(|(_, found)| found).all(|(_, reason)| reason.is_some());
    if is_registered && waited >= UNHEALTHY_AFTER {
        let message =
            format!("The load balancer does not find the pod healthy yet: {}.", details(&unhealthy));
        let wanted = of(false, reasons::TARGET_NOT_HEALTHY, message);
        return (known != Some(wanted.reason)).then_some(wanted);
    }
    // A restart begins to wait anew, and does not take back what was reported.
    if known.is_some() {
        return None;
    }
    let message = "The pod becomes ready when it is healthy in every load balancer that has it as a target.";
    Some(of(false, reasons::REGISTERING, message.to_owned()))
}

/// The addresses at which the pod is not healthy.
fn details(unhealthy: &[(&Key, Vec<Unhealthy<'_>>)]) -> String {
    let all = unhealthy.iter().flat_map(|(key, found)| found.iter().map(move |found| (key, found)));
    let shown = all.take(SHOWN).map(|(key, (address, reason))| match reason {
        Some("") => format!("{address} of Service {key}"),
        Some(reason) => format!("{address} of Service {key} ({reason})"),
        None => format!("{address} of Service {key} (not registered)"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
