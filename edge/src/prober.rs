// SPDX-License-Identifier: Apache-2.0
//! Probes targets, as a cloud's load balancer does: one task for each thing to probe, shared by all load balancers that ask for
//! the same. Tells the engine what has changed, at once; decides nothing.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheckProtocol, TargetState};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use crate::hash;
use crate::health::{HealthTracker, Probe, ProbeResult, TargetHealth};
use crate::metrics::Metrics;

/// Probes under way at a time; more wait their turn.
const CONCURRENT: usize = 512;
/// The shortest interval, whatever is asked for.
const SHORTEST: Duration = Duration::from_millis(100);
/// The most that an answer's head may be.
const LONGEST_HEAD: usize = 8192;

/// The probes that are running.
#[derive(Debug)]
pub(crate) struct Prober {
    tasks: HashMap<Probe, JoinHandle<()>>,
    slots: Arc<Semaphore>,
    changes: mpsc::UnboundedSender<(Probe, TargetHealth)>,
    metrics: Metrics,
}

impl Prober {
    /// A prober that tells of changes by `changes`.
    pub(crate) fn new(changes: mpsc::UnboundedSender<(Probe, TargetHealth)>, metrics: Metrics) -> Self {
        Self { tasks: HashMap::new(), slots: Arc::new(Semaphore::new(CONCURRENT)), changes, metrics }
    }

    /// Probes exactly these, each from the address that `source` gives.
    pub(crate) fn set(&mut self, probes: &HashSet<Probe>, source: impl Fn(IpAddr) -> Option<IpAddr>) {
        self.tasks.retain(|probe, task| {
            let keep = probes.contains(probe);
            if !keep {
                task.abort();
            }
            keep
        });
        for probe in probes {
            if !self.tasks.contains_key(probe) {
                let worker = Worker {
                    probe: probe.clone(),
                    source: source(probe.address),
                    slots: Arc::clone(&self.slots),
                    changes: self.changes.clone(),
                    metrics: self.metrics.clone(),
                };
                self.tasks.insert(probe.clone(), tokio::spawn(worker.run()));
            }
        }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.tasks.values().for_each(JoinHandle::abort);
    }
}

struct Worker {
    probe: Probe,
    source: Option<IpAddr>,
    slots: Arc<Semaphore>,
    changes: mpsc::UnboundedSender<(Probe, TargetHealth)>,
    metrics: Metrics,
}

impl Worker {
    async fn run(self) {
        let check = &self.probe.check;
        let interval = Duration::from_millis(check.interval_milliseconds.into()).max(SHORTEST);
        let limit = Duration::from_millis(check.timeout_milliseconds.max(1).into());
        let mut tracker = HealthTracker::default();
        let mut first = true;
        let mut ticks = tokio::time::interval(interval);
        // A probe that lasted longer than the interval is not followed by a burst.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Ok(slot) = self.slots.acquire().await else { return };
            let outcome = match tokio::time::timeout(limit, probe(&self.probe, self.source)).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => ProbeResult::Failed(error.to_string()),
                Err(_) => ProbeResult::Failed(format!("no answer within {} ms", limit.as_millis())),
            };
            drop(slot);
            self.metrics.probe(matches!(outcome, ProbeResult::Passed(_)));
            if tracker.record(check, outcome, Instant::now())
                && self.changes.send((self.probe.clone(), tracker.health().clone())).is_err()
            {
                return;
            }
            if std::mem::take(&mut first) && tracker.health().state != TargetState::Initial {
                // Targets that came together are not probed together for ever. By a hash, so that a test can foresee it.
                let spread = hash::bytes(self.probe.address.to_string().as_bytes()) % 1000;
                tokio::time::sleep(interval.mul_f64(f64::from(u32::try_from(spread).unwrap_or(0)) / 1000.0))
                    .await;
                ticks.reset();
            }
        }
    }
}

/// One probe. A connection each: a node is asked whether it takes new connections, and one that was kept open would be answered by
/// a process that no longer listens.
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
    // Whoever wrote the path must not write headers with it.
    if !path.starts_with('/') || path.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return Ok(ProbeResult::Failed(format!("{path:?} is not a path")));
    }
    let version = env!("CARGO_PKG_VERSION");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: steerage-edge/{version}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") && head.len() < LONGEST_HEAD {
        if stream.read_buf(&mut head).await? == 0 {
            break;
        }
    }
    Ok(parse_response(&String::from_utf8_lossy(&head)))
}

/// Only 200 is good: that is what clouds take for good.
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
        None if head.is_empty() => ProbeResult::Failed("closed without an answer".to_owned()),
        None => ProbeResult::Failed("not an HTTP answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_edge_api::HealthCheck;
    use tokio::net::TcpListener;

    #[test]
    fn responses_are_classified() {
        let bad = |reason: &str| ProbeResult::Failed(reason.to_owned());
        for (head, outcome) in [
            ("HTTP/1.1 200 OK\r\nx-load-balancing-endpoint-weight: 3\r\n\r\n", ProbeResult::Passed(Some(3))),
            ("HTTP/1.0 200 OK\r\nX-Load-Balancing-Endpoint-Weight:many\r\n\r\n", ProbeResult::Passed(None)),
            ("HTTP/1.1 200 OK\r\n\r\nX-Load-Balancing-Endpoint-Weight: 7", ProbeResult::Passed(None)),
            ("HTTP/1.1 204 No Content\r\n\r\n", bad("status 204")),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", bad("status 503")),
            ("", bad("closed without an answer")),
            ("SSH-2.0-x\r\n", bad("not an HTTP answer")),
        ] {
            assert_eq!(parse_response(head), outcome, "{head}");
        }
    }

    /// Answers each connection with the next of `answers`, the last for ever.
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
            timeout_milliseconds: 100,
            healthy_threshold: 1,
            unhealthy_threshold: 2,
        };
        Probe { address: address.ip(), check }
    }

    #[tokio::test]
    async fn only_transitions_are_sent() {
        const GOOD: &str = "HTTP/1.1 200 OK\r\n\r\n";
        const BAD: &str = "HTTP/1.1 503 Service Unavailable\r\n\r\n";
        let address = server(vec![GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD]).await;
        let (changes, mut heard) = mpsc::unbounded_channel();
        let mut prober = Prober::new(changes, Metrics::default());
        let probe = probe_of(address, HealthCheckProtocol::Http);
        prober.set(&[probe.clone()].into(), |_| None);
        for state in [TargetState::Healthy, TargetState::Unhealthy, TargetState::Healthy] {
            let (of, seen) = heard.recv().await.expect("a change");
            assert_eq!((of, seen.state), (probe.clone(), state));
        }
        prober.set(&HashSet::new(), |_| None);
        assert!(prober.tasks.is_empty());
    }

    #[tokio::test]
    async fn tcp_probe_passes_when_a_connection_opens() {
        let address = server(vec![""]).await;
        let open = probe_of(address, HealthCheckProtocol::Tcp);
        assert_eq!(super::probe(&open, None).await.expect("probe"), ProbeResult::Passed(None));
        let mut closed = open.clone();
        let free = TcpListener::bind("127.0.0.1:0").await.expect("bind").local_addr().expect("address");
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
