// SPDX-License-Identifier: Apache-2.0
//! Probes targets as a cloud's load balancer does, with one task for each address and check. It sends changes of health to the
//! engine at once, and decides nothing.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::HealthCheckProtocol;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;

use steerage_process::duration;

use crate::channel::send_if_changed;
use crate::hash;
use crate::health::{HealthByProbe, HealthTracker, Probe, ProbeResult, TargetHealth};
use crate::metrics::Metrics;
use crate::probe_schedule::ProbeSchedule;

const CONCURRENT_PROBES: usize = 512;
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of a response's head.
const MAX_HEAD: usize = 8192;

#[derive(Debug)]
pub(crate) struct Prober {
    tasks: HashMap<Probe, ProbeTask>,
    permits: Arc<Semaphore>,
    changes: mpsc::UnboundedSender<(Probe, TargetHealth)>,
    metrics: Metrics,
}

#[derive(Debug)]
struct ProbeTask {
    handle: JoinHandle<()>,
    is_urgent: watch::Sender<bool>,
}

impl Drop for ProbeTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl Prober {
    /// Sends changes of health to `changes`.
    pub(crate) fn new(changes: mpsc::UnboundedSender<(Probe, TargetHealth)>, metrics: Metrics) -> Self {
        Self { tasks: HashMap::new(), permits: Arc::new(Semaphore::new(CONCURRENT_PROBES)), changes, metrics }
    }

    /// Probes exactly these, each from the source address that `source` returns. Those in `urgent` are probed sooner. New ones
    /// begin with the health that is known.
    pub(crate) fn set_probes(
        &mut self,
        probes: &HashSet<Probe>,
        urgent: &HashSet<Probe>,
        known: &HealthByProbe,
        source: impl Fn(IpAddr) -> Option<IpAddr>,
    ) {
        self.tasks.retain(|probe, _| probes.contains(probe));
        for probe in probes {
            let is_urgent = urgent.contains(probe);
            if let Some(task) = self.tasks.get(probe) {
                send_if_changed(&task.is_urgent, is_urgent);
                continue;
            }
            let (sender, receiver) = watch::channel(is_urgent);
            let worker = Worker {
                probe: probe.clone(),
                known: known.get(probe).cloned(),
                source: source(probe.address),
                is_urgent: receiver,
                permits: Arc::clone(&self.permits),
                changes: self.changes.clone(),
                metrics: self.metrics.clone(),
            };
            let task = ProbeTask { handle: tokio::spawn(worker.run()), is_urgent: sender };
            self.tasks.insert(probe.clone(), task);
        }
    }
}

struct Worker {
    probe: Probe,
    known: Option<TargetHealth>,
    source: Option<IpAddr>,
    /// Whether no target of its group is healthy.
    is_urgent: watch::Receiver<bool>,
    permits: Arc<Semaphore>,
    changes: mpsc::UnboundedSender<(Probe, TargetHealth)>,
    metrics: Metrics,
}

impl Worker {
    async fn run(mut self) {
        let check = &self.probe.check;
        let interval = Duration::from_millis(check.interval_milliseconds.into()).max(MIN_INTERVAL);
        let limit = Duration::from_millis(check.timeout_milliseconds.max(1).into());
        let started = Instant::now();
        let mut tracker = HealthTracker::new(self.known.take(), started);
        let mut schedule = ProbeSchedule::new(interval, spread(self.probe.address), started);
        loop {
            let Ok(permit) = self.permits.acquire().await else { return };
            let result = match tokio::time::timeout(limit, probe(&self.probe, self.source)).await {
                Ok(Ok(result)) => result,
                Ok(Err(error)) => ProbeResult::Unanswered(error.to_string()),
                Err(_) => ProbeResult::Unanswered(format!("no response within {}", duration::display(limit))),
            };
            drop(permit);
            self.metrics.count_probe(matches!(result, ProbeResult::Passed(_)));
            let now = Instant::now();
            schedule.record(&result, now);
            if tracker.record(check, result, now)
                && self.changes.send((self.probe.clone(), tracker.health().clone())).is_err()
            {
                return;
            }
            let initial_delay = tracker.initial_delay(interval, now);
            loop {
                schedule.set_urgent(*self.is_urgent.borrow_and_update(), Instant::now());
                tokio::select! {
                    () = tokio::time::sleep_until(schedule.due(initial_delay).into()) => break,
                    changed = self.is_urgent.changed() => if changed.is_err() { return },
                }
            }
        }
    }
}

/// From 0 to 1. Targets that were added together must not be probed together.
fn spread(address: IpAddr) -> f64 {
    let thousandths = hash::bytes(address.to_string().as_bytes()) % 1000;
    f64::from(u32::try_from(thousandths).unwrap_or(0)) / 1000.0
}

/// Each probe opens a connection: the question is whether the node accepts new ones. A process that no longer listens still
/// answers on an open one.
async fn probe(probe: &Probe, source: Option<IpAddr>) -> io::Result<ProbeResult> {
    let to = SocketAddr::new(probe.address, probe.check.port);
    let socket = if to.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
    if let Some(source) = source {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    let stream = socket.connect(to).await?;
    match probe.check.protocol {
        HealthCheckProtocol::Tcp => Ok(ProbeResult::Passed(None)),
        HealthCheckProtocol::Http => http(stream, to, probe.check.path.as_deref().unwrap_or("/")).await,
    }
}

async fn http(mut stream: TcpStream, to: SocketAddr, path: &str) -> io::Result<ProbeResult> {
    // The path must not inject headers.
    if !path.starts_with('/') || path.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return Ok(ProbeResult::Failed(format!("`{path}` is not a path")));
    }
    let version = env!("CARGO_PKG_VERSION");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: steerage-edge/{version}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") && head.len() < MAX_HEAD {
        if stream.read_buf(&mut head).await? == 0 {
            break;
        }
    }
    Ok(parse_response(&String::from_utf8_lossy(&head)))
}

/// Only status 200 passes, as in the clouds.
fn parse_response(head: &str) -> ProbeResult {
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    let code = status.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
    match code {
        Some("200") => {
            let weight = lines
                .take_while(|line| !line.is_empty())
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("x-load-balancing-endpoint-weight"))
                .and_then(|(_, value)| value.trim().parse().ok());
            ProbeResult::Passed(weight)
        }
        Some(code) => ProbeResult::Failed(format!("status {code}")),
        None if head.is_empty() => ProbeResult::Failed("connection closed without a response".to_owned()),
        None => ProbeResult::Failed("not an HTTP response".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_edge_api::{HealthCheck, TargetState};
    use tokio::net::TcpListener;

    #[test]
    fn responses_are_classified() {
        let failed = |reason: &str| ProbeResult::Failed(reason.to_owned());
        for (head, result) in [
            ("HTTP/1.1 200 OK\r\nx-load-balancing-endpoint-weight: 3\r\n\r\n", ProbeResult::Passed(Some(3))),
            ("HTTP/1.0 200 OK\r\nX-Load-Balancing-Endpoint-Weight:many\r\n\r\n", ProbeResult::Passed(None)),
            ("HTTP/1.1 200 OK\r\n\r\nX-Load-Balancing-Endpoint-Weight: 7", ProbeResult::Passed(None)),
            ("HTTP/1.1 204 No Content\r\n\r\n", failed("status 204")),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", failed("status 503")),
            ("", failed("connection closed without a response")),
            ("SSH-2.0-x\r\n", failed("not an HTTP response")),
        ] {
            assert_eq!(parse_response(head), result, "{head}");
        }
    }

    /// Answers each connection with the next of `answers`, and from then on with the last.
    async fn server(answers: Vec<&'static str>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        tokio::spawn(async move {
            let mut answers = answers.into_iter().peekable();
            while let Ok((mut stream, _)) = listener.accept().await {
                let answer = if answers.len() > 1 { answers.next() } else { answers.peek().copied() };
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.unwrap_or_default().as_bytes()).await;
            }
        });
        address
    }

    fn probe_of(address: SocketAddr, protocol: HealthCheckProtocol) -> Probe {
        let check = HealthCheck {
            protocol,
            port: address.port(),
            path: Some("/healthz".to_owned()),
            interval_milliseconds: 100,
            // The server answers at once, but may have no core.
            timeout_milliseconds: 30_000,
            healthy_threshold: 1,
            unhealthy_threshold: 2,
        };
        Probe { address: address.ip(), check }
    }

    const GOOD: &str = "HTTP/1.1 200 OK\r\n\r\n";
    const BAD: &str = "HTTP/1.1 503 Service Unavailable\r\n\r\n";

    #[tokio::test]
    async fn urgent_target_does_not_wait_for_its_interval() {
        let address = server(vec![BAD, GOOD]).await;
        let (changes, mut heard) = mpsc::unbounded_channel();
        let mut prober = Prober::new(changes, Metrics::default());
        let mut probe = probe_of(address, HealthCheckProtocol::Http);
        probe.check.interval_milliseconds = 3_600_000;
        let probes: HashSet<_> = [probe].into();
        prober.set_probes(&probes, &HashSet::new(), &HealthByProbe::default(), |_| None);
        assert_eq!(heard.recv().await.expect("a change").1.state, TargetState::Unhealthy);
        // The plan knows only now that no target is healthy.
        prober.set_probes(&probes, &probes, &HealthByProbe::default(), |_| None);
        let soon = tokio::time::timeout(Duration::from_secs(20), heard.recv()).await.expect("soon");
        assert_eq!(soon.expect("a change").1.state, TargetState::Healthy);
    }

    #[tokio::test]
    async fn only_transitions_are_sent() {
        let address = server(vec![GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD]).await;
        let (changes, mut heard) = mpsc::unbounded_channel();
        let mut prober = Prober::new(changes, Metrics::default());
        let probe = probe_of(address, HealthCheckProtocol::Http);
        prober.set_probes(&[probe.clone()].into(), &HashSet::new(), &HealthByProbe::default(), |_| None);
        for state in [TargetState::Healthy, TargetState::Unhealthy, TargetState::Healthy] {
            let (of, seen) = heard.recv().await.expect("a change");
            assert_eq!((of, seen.state), (probe.clone(), state));
        }
        prober.set_probes(&HashSet::new(), &HashSet::new(), &HealthByProbe::default(), |_| None);
        assert!(prober.tasks.is_empty());
    }

    /// An edited threshold is no new target: a single failed probe after the edit does not make it unhealthy.
    #[tokio::test]
    async fn edited_check_continues_with_the_health_of_the_target() {
        let address = server(vec![GOOD, BAD, GOOD]).await;
        let (changes, mut heard) = mpsc::unbounded_channel();
        let (mut prober, mut health) = (Prober::new(changes, Metrics::default()), HealthByProbe::default());
        let mut probe = probe_of(address, HealthCheckProtocol::Http);
        probe.check.interval_milliseconds = 3_600_000;
        prober.set_probes(&[probe.clone()].into(), &HashSet::new(), &health, |_| None);
        let (of, first) = heard.recv().await.expect("a change");
        assert_eq!(first.state, TargetState::Healthy);
        health.insert(of, first);
        probe.check.interval_milliseconds = 100;
        prober.set_probes(&[probe].into(), &HashSet::new(), &health, |_| None);
        while prober.metrics.probes_that_passed() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(heard.try_recv().is_err(), "one of two probes that may fail");
    }

    #[tokio::test]
    async fn tcp_probe_passes_when_a_connection_opens() {
        let address = server(vec![""]).await;
        let open = probe_of(address, HealthCheckProtocol::Tcp);
        assert_eq!(super::probe(&open, None).await.expect("probe"), ProbeResult::Passed(None));
        let mut closed = open.clone();
        // Bound, so that nobody else takes it, and not listening.
        let free = tokio::net::TcpSocket::new_v4().expect("socket");
        free.bind("127.0.0.1:0".parse().expect("address")).expect("bind");
        closed.check.port = free.local_addr().expect("address").port();
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
