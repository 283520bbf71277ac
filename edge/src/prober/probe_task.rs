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
use crate::probe_schedule::ProbeSchedule;

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
    is_urgent: watch::Sender<bool>,
    health: watch::Receiver<Option<TargetHealth>>,
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
        is_urgent: bool,
        at_once: bool,
    ) -> ProbeTask {
        let (sender, receiver) = watch::channel(is_urgent);
        let (health_sender, health) = watch::channel(known);
        let worker = Worker {
            probe,
            health: health_sender,
            source,
            is_urgent: receiver,
            at_once,
            tasks: self.clone(),
        };
        ProbeTask { handle: tokio::spawn(worker.run()), is_urgent: sender, health }
    }
}

impl ProbeTask {
    /// The health that the probes have found, or that was known before.
    pub(super) fn health(&self) -> Option<TargetHealth> {
        self.health.borrow().clone()
    }

    pub(super) fn is_urgent(&self) -> bool {
        *self.is_urgent.borrow()
    }

    /// An urgent target is probed sooner.
    pub(super) fn set_urgent(&self, is_urgent: bool) {
        send_if_changed(&self.is_urgent, is_urgent);
    }
}

struct Worker {
    probe: Probe,
    health: watch::Sender<Option<TargetHealth>>,
    source: Option<IpAddr>,
    /// Whether no target of its group is healthy.
    is_urgent: watch::Receiver<bool>,
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
        if !self.at_once && !wait(&mut self.is_urgent, &mut schedule, None).await {
            return;
        }
        loop {
            let Ok(permit) = self.tasks.permits.acquire().await else { return };
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
            if !wait(&mut self.is_urgent, &mut schedule, initial_delay).await {
                return;
            }
        }
    }
}

/// Waits until a probe is due; false if none will be.
async fn wait(
    is_urgent: &mut watch::Receiver<bool>,
    schedule: &mut ProbeSchedule,
    initial_delay: Option<Duration>,
) -> bool {
    loop {
        schedule.set_urgent(*is_urgent.borrow_and_update(), Instant::now());
        tokio::select! {
            () = tokio::time::sleep_until(schedule.due(initial_delay).into()) => return true,
            changed = is_urgent.changed() => if changed.is_err() { return false },
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
