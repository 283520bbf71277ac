// SPDX-License-Identifier: Apache-2.0
//! The task that probes one target with one check, as a cloud's load balancer does. `node` starts one for each check that no
//! statement decides. It sends changes of health, and decides nothing beyond them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::HealthCheckProtocol;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;

use super::http::{self, Response};
use super::{HealthChange, MIN_INTERVAL, no_response, spread};
use crate::channel::send_if_changed;
use crate::health::{HealthTracker, Probe, ProbeResult, TargetHealth};
use crate::metrics::Metrics;
use crate::probe_schedule::{EXPECTED_FOR, ProbeSchedule};

const CONCURRENT_PROBES: usize = 512;

/// What all tasks share.
#[derive(Clone, Debug)]
pub(super) struct ProbeTasks {
    permits: Arc<Semaphore>,
    pub(super) changes: mpsc::UnboundedSender<HealthChange>,
    pub(super) metrics: Metrics,
}

#[derive(Debug)]
pub(super) struct ProbeTask {
    handle: JoinHandle<()>,
    pace: watch::Sender<Pace>,
    health: watch::Receiver<Option<TargetHealth>>,
}

/// What makes a target be probed sooner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pace {
    /// No target of its group is healthy.
    pub(super) is_urgent: bool,
    /// Since when it is expected to pass, if it is.
    pub(super) expected: Option<Instant>,
}

impl Drop for ProbeTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl ProbeTasks {
    pub(super) fn new(changes: mpsc::UnboundedSender<HealthChange>, metrics: Metrics) -> Self {
        Self { permits: Arc::new(Semaphore::new(CONCURRENT_PROBES)), changes, metrics }
    }

    /// Begins with the health that is known; at once, or at the target's position in the interval.
    pub(super) fn spawn(
        &self,
        probe: Probe,
        known: Option<TargetHealth>,
        source: Option<IpAddr>,
        pace: Pace,
        at_once: bool,
    ) -> ProbeTask {
        let (sender, receiver) = watch::channel(pace);
        let (health_sender, health) = watch::channel(known);
        let worker =
            Worker { probe, health: health_sender, source, pace: receiver, at_once, tasks: self.clone() };
        ProbeTask { handle: tokio::spawn(worker.run()), pace: sender, health }
    }
}

impl ProbeTask {
    /// The health that the probes have found, or that was known before.
    pub(super) fn health(&self) -> Option<TargetHealth> {
        self.health.borrow().clone()
    }

    pub(super) fn pace(&self) -> Pace {
        *self.pace.borrow()
    }

    /// An urgent target is probed sooner.
    pub(super) fn set_urgent(&self, is_urgent: bool) {
        send_if_changed(&self.pace, Pace { is_urgent, ..self.pace() });
    }

    /// A target that is expected to pass since this time is probed at once and again, and its first pass decides alone.
    pub(super) fn set_expected(&self, expected: Option<Instant>) {
        send_if_changed(&self.pace, Pace { expected, ..self.pace() });
    }
}

struct Worker {
    probe: Probe,
    health: watch::Sender<Option<TargetHealth>>,
    source: Option<IpAddr>,
    pace: watch::Receiver<Pace>,
    at_once: bool,
    tasks: ProbeTasks,
}

impl Worker {
    async fn run(mut self) {
        let check = &self.probe.check;
        let interval = Duration::from_millis(check.interval_milliseconds.into()).max(MIN_INTERVAL);
        let limit = Duration::from_millis(check.timeout_milliseconds.max(1).into());
        let started = Instant::now();
        let mut tracker = HealthTracker::new(self.health.borrow().clone(), started);
        let mut schedule =
            ProbeSchedule::new(interval, spread(SocketAddr::new(self.probe.address, check.port)), started);
        if !self.at_once && !wait(&mut self.pace, &mut schedule, &mut tracker, None).await {
            return;
        }
        loop {
            let Ok(permit) = self.tasks.permits.acquire().await else { return };
            schedule.begin(Instant::now());
            let result = match tokio::time::timeout(limit, probe(&self.probe, self.source)).await {
                Ok(Ok(result)) => result,
                Ok(Err(error)) => ProbeResult::Unanswered(error.to_string()),
                Err(_) => ProbeResult::Unanswered(no_response(limit)),
            };
            drop(permit);
            self.tasks.metrics.count_probe(matches!(result, ProbeResult::Passed(_)));
            let now = Instant::now();
            schedule.record(&result, now);
            if tracker.record(check, result, now) {
                self.health.send_replace(Some(tracker.health().clone()));
                let change = HealthChange::Target(self.probe.clone(), tracker.health().clone());
                if self.tasks.changes.send(change).is_err() {
                    return;
                }
            }
            let initial_delay = tracker.initial_delay(interval, now);
            if !wait(&mut self.pace, &mut schedule, &mut tracker, initial_delay).await {
                return;
            }
        }
    }
}

/// Waits until a probe is due; false if none will be.
async fn wait(
    pace: &mut watch::Receiver<Pace>,
    schedule: &mut ProbeSchedule,
    tracker: &mut HealthTracker,
    initial_delay: Option<Duration>,
) -> bool {
    loop {
        let Pace { is_urgent, expected } = *pace.borrow_and_update();
        schedule.set_urgent(is_urgent, Instant::now());
        if schedule.expect(expected) {
            tracker.expect(expected.map(|since| since + EXPECTED_FOR));
        }
        tokio::select! {
            () = tokio::time::sleep_until(schedule.due(initial_delay).into()) => return true,
            changed = pace.changed() => if changed.is_err() { return false },
        }
    }
}

async fn probe(probe: &Probe, source: Option<IpAddr>) -> io::Result<ProbeResult> {
    let to = SocketAddr::new(probe.address, probe.check.port);
    let mut stream = http::connect(to, source).await?;
    match probe.check.protocol {
        HealthCheckProtocol::Tcp => Ok(ProbeResult::Passed(None)),
        HealthCheckProtocol::Http => {
            let path = probe.check.path.as_deref().unwrap_or("/");
            // The path must not inject headers.
            if !path.starts_with('/') || path.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
                return Ok(ProbeResult::Failed(format!("`{path}` is not a path")));
            }
            Ok(classify(&http::get(&mut stream, to, path).await?))
        }
    }
}

/// Only status 200 passes, as in the clouds. kube-proxy and the agent say the number of local endpoints also where it is zero.
fn classify(response: &Response) -> ProbeResult {
    let weight = response.header("x-load-balancing-endpoint-weight");
    match (response.status(), weight) {
        (Some("200"), _) => ProbeResult::Passed(weight.and_then(|value| value.parse().ok())),
        (Some("503"), Some("0")) => ProbeResult::NoEndpoint,
        _ => ProbeResult::Failed(response.why_not()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_node::{closed as closed_address, probe_of, server};
    use super::*;

    #[test]
    fn responses_are_classified() {
        let failed = |reason: &str| ProbeResult::Failed(reason.to_owned());
        for (head, result) in [
            ("HTTP/1.1 200 OK\r\nx-load-balancing-endpoint-weight: 3\r\n\r\n", ProbeResult::Passed(Some(3))),
            ("HTTP/1.0 200 OK\r\nX-Load-Balancing-Endpoint-Weight:many\r\n\r\n", ProbeResult::Passed(None)),
            ("HTTP/1.1 200 OK\r\n\r\nX-Load-Balancing-Endpoint-Weight: 7", ProbeResult::Passed(None)),
            ("HTTP/1.1 204 No Content\r\n\r\n", failed("status 204")),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", failed("status 503")),
            (
                "HTTP/1.1 503 Service Unavailable\r\nX-Load-Balancing-Endpoint-Weight: 0\r\n\r\n",
                ProbeResult::NoEndpoint,
            ),
            (
                "HTTP/1.1 503 Service Unavailable\r\nX-Load-Balancing-Endpoint-Weight: 2\r\n\r\n",
                failed("status 503"),
            ),
            ("", failed("connection closed without a response")),
            ("SSH-2.0-x\r\n", failed("not an HTTP response")),
        ] {
            assert_eq!(classify(&Response::of_head(head)), result, "{head}");
        }
    }

    #[tokio::test]
    async fn tcp_probe_passes_when_a_connection_opens() {
        let address = server(vec![""]).await;
        let open = probe_of(address, HealthCheckProtocol::Tcp);
        assert_eq!(super::probe(&open, None).await.expect("probe"), ProbeResult::Passed(None));
        let mut closed = open.clone();
        let (_bound, free) = closed_address();
        closed.check.port = free.port();
        assert!(super::probe(&closed, None).await.is_err());
        assert!(super::probe(&open, Some("192.0.2.1".parse().expect("address"))).await.is_err(), "not ours");
    }

    #[tokio::test]
    async fn path_cannot_inject_a_header() {
        let address = server(vec!["HTTP/1.1 200 OK\r\n\r\n"]).await;
        let mut probe = probe_of(address, HealthCheckProtocol::Http);
        probe.check.path = Some("/ HTTP/1.1\r\nX: y".to_owned());
        assert!(matches!(super::probe(&probe, None).await.expect("probe"), ProbeResult::Failed(_)));
    }
}
