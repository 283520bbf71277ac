// SPDX-License-Identifier: Apache-2.0
//! The prober with real sockets.

use std::collections::HashSet;
use std::time::Duration;

use super::test_node::{Manner, TestAgent, closed, dropping, probe_of, server};
use super::*;
use steerage_edge_api::{HealthCheckProtocol, TargetState};

/// It asks for no statements.
fn prober(changes: mpsc::UnboundedSender<HealthChange>) -> Prober {
    Prober::new(0, changes, mpsc::channel(1).0, Metrics::default())
}

fn checks(probes: &[&Probe], urgent: &[&Probe]) -> Checks {
    let owned = |probes: &[&Probe]| probes.iter().copied().cloned().collect::<HashSet<_>>();
    Checks::of_probes(&owned(probes), &owned(urgent))
}

/// The next change of a target's health.
async fn heard(changes: &mut mpsc::UnboundedReceiver<HealthChange>) -> (Probe, TargetHealth) {
    loop {
        if let HealthChange::Target(probe, health) = changes.recv().await.expect("a change") {
            return (probe, health);
        }
    }
}

const GOOD: &str = "HTTP/1.1 200 OK\r\n\r\n";
const BAD: &str = "HTTP/1.1 503 Service Unavailable\r\n\r\n";

#[tokio::test]
async fn urgent_target_does_not_wait_for_its_interval() {
    let address = server(vec![BAD, GOOD]).await;
    let (changes, mut changes_rx) = mpsc::unbounded_channel();
    let mut prober = prober(changes);
    let mut probe = probe_of(address, HealthCheckProtocol::Http);
    probe.check.interval_milliseconds = 3_600_000;
    prober.set_checks(&checks(&[&probe], &[]), &HealthByProbe::default(), |_| None);
    assert_eq!(heard(&mut changes_rx).await.1.state, TargetState::Unhealthy);
    // The plan knows only now that no target is healthy.
    prober.set_checks(&checks(&[&probe], &[&probe]), &HealthByProbe::default(), |_| None);
    let soon = tokio::time::timeout(Duration::from_secs(20), heard(&mut changes_rx)).await.expect("soon");
    assert_eq!(soon.1.state, TargetState::Healthy);
}

/// The interval is an hour and the threshold is 10.
#[tokio::test]
async fn expected_target_is_found_soon_and_healthy_by_its_first_pass() {
    let address = server(vec![BAD, BAD, GOOD]).await;
    let (changes, mut changes_rx) = mpsc::unbounded_channel();
    let (mut prober, mut known) = (prober(changes), HealthByProbe::default());
    let mut probe = probe_of(address, HealthCheckProtocol::Http);
    probe.check.interval_milliseconds = 3_600_000;
    (probe.check.healthy_threshold, probe.check.unhealthy_threshold) = (10, 1);
    let healthy =
        TargetHealth { state: TargetState::Healthy, reason: String::new(), ..TargetHealth::default() };
    known.insert(probe.clone(), healthy.clone());
    prober.set_checks(&checks(&[&probe], &[]), &known, |_| None);
    assert_eq!(heard(&mut changes_rx).await.1.state, TargetState::Unhealthy);
    prober.set_expected(&probe, Some(Instant::now()));
    let soon = tokio::time::timeout(Duration::from_secs(20), heard(&mut changes_rx)).await.expect("soon");
    assert_eq!(soon.1, healthy);
}

#[tokio::test]
async fn only_transitions_are_sent() {
    let address = server(vec![GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD]).await;
    let (changes, mut changes_rx) = mpsc::unbounded_channel();
    let mut prober = prober(changes);
    let probe = probe_of(address, HealthCheckProtocol::Http);
    prober.set_checks(&checks(&[&probe], &[]), &HealthByProbe::default(), |_| None);
    for state in [TargetState::Healthy, TargetState::Unhealthy, TargetState::Healthy] {
        let (of, seen) = heard(&mut changes_rx).await;
        assert_eq!((of, seen.state), (probe.clone(), state));
    }
    prober.set_checks(&Checks::default(), &HealthByProbe::default(), |_| None);
    assert!(prober.nodes.is_empty());
}

/// An edited threshold is no new target: a single failed probe after the edit does not make it unhealthy.
#[tokio::test]
async fn edited_check_continues_with_the_health_of_the_target() {
    let address = server(vec![GOOD, BAD, GOOD]).await;
    let (changes, mut changes_rx) = mpsc::unbounded_channel();
    let (mut prober, mut health) = (prober(changes), HealthByProbe::default());
    let mut probe = probe_of(address, HealthCheckProtocol::Http);
    probe.check.interval_milliseconds = 3_600_000;
    prober.set_checks(&checks(&[&probe], &[]), &health, |_| None);
    let (of, first) = heard(&mut changes_rx).await;
    assert_eq!(first.state, TargetState::Healthy);
    health.insert(of, first);
    probe.check.interval_milliseconds = 100;
    prober.set_checks(&checks(&[&probe], &[]), &health, |_| None);
    while prober.tasks.metrics.probes_that_passed() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(changes_rx.try_recv().is_err(), "one of two probes that may fail");
}

/// A prober, and the part of the engine that belongs to it.
struct Engine {
    prober: Prober,
    health: HealthByProbe,
    changes: mpsc::UnboundedReceiver<HealthChange>,
    reports: mpsc::Receiver<StatementReport>,
    /// Probes that have become urgent.
    urgent: HashSet<Probe>,
}

impl Engine {
    fn new(agent: &TestAgent) -> Self {
        let ((changes, changes_rx), (reports, reports_rx)) = (mpsc::unbounded_channel(), mpsc::channel(8));
        let prober = Prober::new(agent.address.port(), changes, reports, Metrics::default());
        Self {
            prober,
            health: HealthByProbe::default(),
            changes: changes_rx,
            reports: reports_rx,
            urgent: HashSet::new(),
        }
    }

    /// With this one probe, whose port the agent states with so many local endpoints.
    async fn stating(agent: &TestAgent, probe: &Probe, endpoints: u32) -> Self {
        agent.set(probe.check.port, Some(endpoints));
        let mut engine = Self::new(agent);
        engine.set(&[probe]);
        assert_eq!(engine.next().await, healthy(Some(endpoints)));
        engine
    }

    fn set(&mut self, probes: &[&Probe]) {
        let checks = checks(probes, &[]);
        self.health.set_checks(&checks);
        self.prober.set_checks(&checks, &self.health, |_| None);
    }

    async fn step(&mut self) -> Option<(Probe, TargetHealth)> {
        tokio::select! {
            Some(change) = self.changes.recv() => {
                let (probe, health) = match change {
                    HealthChange::Target(probe, health) => (probe, health),
                    HealthChange::Stated(address, ports) => {
                        self.health.set_stated(address, ports);
                        return None;
                    }
                    HealthChange::Tunnel(address) => {
                        if self.prober.follows_node(address) {
                            let receiver = self.prober.tunnel_receiver(address);
                            self.health.set_tunnel_receiver(address, receiver);
                        }
                        return None;
                    }
                };
                let health = self.prober.stated_health(&probe).unwrap_or(health);
                if self.health.is_known(&probe, &health) {
                    return None;
                }
                let is_same = self.health.get(&probe).is_some_and(|known| known.says_as(&health));
                self.health.insert(probe.clone(), health.clone());
                (!is_same).then_some((probe, health))
            }
            Some(report) = self.reports.recv() => {
                self.prober.record(&report, &self.health, |probe| self.urgent.contains(probe).then_some(true));
                None
            }
            () = tokio::time::sleep(Duration::from_mins(1)) => panic!("nothing for a minute"),
        }
    }

    /// The next change of health that decides, as state, weight and reason. Where the agent had no core for a second, its node is
    /// probed at first.
    async fn next(&mut self) -> (TargetState, Option<u32>, String) {
        loop {
            if let Some((_, TargetHealth { state, weight, reason, .. })) = self.step().await
                && state != TargetState::Initial
            {
                return (state, weight, reason);
            }
        }
    }

    async fn wait_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        while !is_so(self) {
            self.step().await;
        }
    }

    /// Waits until so many checks are probed, without a change of health.
    async fn wait_until_probed(&mut self, count: usize) {
        while self.prober.nodes.values().map(Node::probed).sum::<usize>() != count {
            assert_eq!(self.step().await, None);
        }
    }
}

fn healthy(weight: Option<u32>) -> (TargetState, Option<u32>, String) {
    (TargetState::Healthy, weight, String::new())
}

fn unhealthy(weight: Option<u32>, reason: &str) -> (TargetState, Option<u32>, String) {
    (TargetState::Unhealthy, weight, reason.to_owned())
}

/// It is not probed in the time of a test, but at its beginning if no health is known.
fn hourly(address: SocketAddr) -> Probe {
    let mut probe = probe_of(address, HealthCheckProtocol::Http);
    probe.check.interval_milliseconds = 3_600_000;
    probe
}

#[tokio::test]
async fn statement_is_obeyed_before_the_interval_ends() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let probe = hourly(to);
    let mut engine = Engine::stating(&agent, &probe, 3).await;
    for _ in 0..3 {
        agent.set(to.port(), Some(0));
        assert_eq!(engine.next().await, unhealthy(None, "no local endpoint"));
        agent.set(to.port(), Some(3));
        assert_eq!(engine.next().await, healthy(Some(3)));
    }
    assert_eq!(engine.prober.nodes.values().map(Node::probed).sum::<usize>(), 0);
    engine.set(&[]);
    assert!(engine.prober.nodes.is_empty());
}

/// Its task may end only after it has sent.
#[tokio::test]
async fn probe_that_ended_late_does_not_overrule_a_statement() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let probe = hourly(to);
    let mut engine = Engine::stating(&agent, &probe, 3).await;
    let late = TargetHealth { state: TargetState::Unhealthy, ..TargetHealth::default() };
    engine.prober.tasks.changes.send(HealthChange::Target(probe.clone(), late)).expect("a receiver");
    while !engine.changes.is_empty() {
        assert_eq!(engine.step().await, None);
    }
    assert_eq!(engine.health.get(&probe).map(|health| health.state), Some(TargetState::Healthy));
}

#[tokio::test]
async fn delayed_weight_follows_without_another_change() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let probe = probe_of(to, HealthCheckProtocol::Http);
    let mut engine = Engine::stating(&agent, &probe, 3).await;
    agent.set(to.port(), Some(5));
    assert_eq!(engine.next().await, healthy(Some(5)));
}

#[tokio::test]
async fn new_check_of_a_stated_port_has_its_health_at_once() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let (probe, (_other, of)) = (hourly(to), closed());
    agent.set(of.port(), Some(0));
    let mut engine = Engine::stating(&agent, &probe, 1).await;
    let new = hourly(of);
    engine.set(&[&probe, &new]);
    while !engine.changes.is_empty() {
        assert_eq!(engine.step().await, None);
    }
    let without = TargetHealth::without_endpoint();
    assert_eq!(engine.prober.stated_health(&new).as_ref(), Some(&without));
    assert_eq!(engine.health.get(&new), Some(&without));
    engine.set(&[&probe]);
    assert_eq!(engine.prober.stated_health(&new), None);
}

#[tokio::test]
async fn ports_without_a_statement_are_probed() {
    let (agent, to) = (TestAgent::start(Manner::Status("404 Not Found")).await, server(vec![GOOD]).await);
    let (probe, tcp) = (probe_of(to, HealthCheckProtocol::Http), probe_of(to, HealthCheckProtocol::Tcp));
    let mut engine = Engine::new(&agent);
    engine.set(&[&probe, &tcp]);
    for _ in 0..2 {
        assert_eq!(engine.next().await, healthy(None));
    }
    engine.wait_until_probed(2).await;
    // The agent comes to state, first of other ports.
    agent.set(1, Some(1));
    agent.set_manner(Manner::States);
    while engine.prober.nodes.values().any(|node| node.mode() != StatementMode::Stating) {
        assert_eq!(engine.step().await, None);
    }
    engine.wait_until_probed(2).await;
    agent.set(to.port(), Some(0));
    assert_eq!(engine.next().await, unhealthy(None, "no local endpoint"));
    engine.wait_until_probed(1).await;
    // It no longer serves the port, on which something else passes. Its last word holds until the probe has ended.
    agent.set(to.port(), None);
    assert_eq!(engine.next().await, unhealthy(None, "no local endpoint"));
    assert_eq!(engine.next().await, healthy(None));
    engine.wait_until_probed(2).await;
}

/// A Service may have lost its last healthy target since the checks were set. The interval is an hour.
#[tokio::test]
async fn probe_that_begins_later_is_as_urgent_as_its_groups_are_then() {
    let (agent, to) = (TestAgent::start(Manner::States).await, server(vec![BAD, GOOD]).await);
    let probe = hourly(to);
    let mut engine = Engine::stating(&agent, &probe, 1).await;
    agent.set(to.port(), Some(0));
    assert_eq!(engine.next().await, unhealthy(None, "no local endpoint"));
    engine.urgent.insert(probe.clone());
    engine.prober.set_urgent(&probe, true);
    agent.set(to.port(), None);
    let soon = async { while engine.next().await != healthy(None) {} };
    tokio::time::timeout(Duration::from_secs(20), soon).await.expect("soon");
}

/// Another program may have the port at one of the node's addresses.
#[tokio::test]
async fn port_that_leaves_the_statement_keeps_its_health_until_a_probe_says_otherwise() {
    const NONE: &str = "HTTP/1.1 503 Service Unavailable\r\nX-Load-Balancing-Endpoint-Weight: 0\r\n\r\n";
    let (agent, of) = (TestAgent::start(Manner::States).await, server(vec![NONE]).await);
    let (_bound, other) = closed();
    agent.set(of.port(), Some(0));
    let (probe, other) = (hourly(of), hourly(other));
    let mut engine = Engine::stating(&agent, &other, 1).await;
    engine.set(&[&probe, &other]);
    agent.set(of.port(), None);
    engine.wait_until(|engine| engine.prober.nodes.values().map(Node::probed).sum::<usize>() == 1).await;
    engine.wait_until(|engine| engine.changes.is_empty()).await;
    assert!(engine.health.has_value(&probe), "nobody else says that it has no endpoint");
    assert_eq!(engine.health.get(&probe).map(|health| health.lacks_endpoint), Some(true));
}

/// Nothing listens while it restarts; the threshold keeps the health.
#[tokio::test]
async fn restarted_agent_changes_no_health_by_its_absence() {
    let (mut agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let probe = hourly(to);
    let mut engine = Engine::stating(&agent, &probe, 2).await;
    agent.stop().await;
    engine.wait_until_probed(1).await;
    agent.set_manner(Manner::Status("503 Service Unavailable"));
    agent.restart(&[]).await;
    agent.set_manner(Manner::States);
    agent.set(to.port(), Some(2));
    engine.wait_until_probed(0).await;
    agent.set(to.port(), Some(0));
    assert_eq!(engine.next().await, unhealthy(None, "no local endpoint"));
}

/// So that a node which does not receive is refused before it counts as healthy.
#[tokio::test]
async fn end_of_the_tunnel_is_sent_before_the_health_and_again_when_it_changes() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    agent.set_tunnel(Some(TunnelReceiver::Failed));
    agent.set(to.port(), Some(1));
    let (probe, mut engine) = (hourly(to), Engine::new(&agent));
    engine.set(&[&probe]);
    let receiver = |engine: &Engine| engine.health.tunnel_receiver(agent.address.ip());
    engine.wait_until(|engine| receiver(engine).is_some() || engine.health.get(&probe).is_some()).await;
    assert_eq!((receiver(&engine), engine.health.get(&probe)), (Some(TunnelReceiver::Failed), None));
    assert_eq!(engine.next().await, healthy(Some(1)));
    for receives in [TunnelReceiver::Receives { vni: 7, port: 10_361 }, TunnelReceiver::Off] {
        agent.set_tunnel(Some(receives));
        engine.wait_until(|engine| receiver(engine) == Some(receives)).await;
    }
    // The agent restarts.
    agent.set_tunnel(None);
    agent.set(to.port(), Some(2));
    engine.wait_until(|engine| engine.health.get(&probe).is_some_and(|known| known.weight == Some(2))).await;
    assert_eq!(receiver(&engine), Some(TunnelReceiver::Off));
    // A node that is followed no longer is forgotten.
    engine.set(&[]);
    assert_eq!(receiver(&engine), None);
}

/// It may state something else, or nothing, when it is followed again.
#[tokio::test]
async fn what_a_node_stated_before_it_was_given_up_does_not_count() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    agent.set_tunnel(Some(TunnelReceiver::Off));
    agent.set(to.port(), Some(1));
    let (probe, mut engine) = (hourly(to), Engine::new(&agent));
    engine.set(&[&probe]);
    // The change waits for the engine.
    let report = engine.reports.recv().await.expect("a report");
    engine.prober.record(&report, &engine.health, |_| None);
    assert_eq!(engine.prober.tunnel_receiver(agent.address.ip()), Some(TunnelReceiver::Off));
    engine.set(&[]);
    agent.set_tunnel(None);
    engine.set(&[&probe]);
    engine.wait_until(|engine| engine.health.get(&probe).is_some()).await;
    assert_eq!(engine.health.tunnel_receiver(agent.address.ip()), None);
}

#[tokio::test]
async fn targets_of_a_removed_agent_stay_for_as_long_as_probes_would_take() {
    let (mut agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let mut probe = probe_of(to, HealthCheckProtocol::Http);
    (probe.check.interval_milliseconds, probe.check.unhealthy_threshold) = (400, 4);
    let mut engine = Engine::stating(&agent, &probe, 2).await;
    let stopped = Instant::now();
    agent.stop().await;
    let (state, _, reason) = engine.next().await;
    assert_eq!(state, TargetState::Unhealthy);
    assert!(reason.contains("refused"), "{reason}");
    assert!(stopped.elapsed() >= Duration::from_millis(3 * 400), "{:?}", stopped.elapsed());
}

#[tokio::test]
async fn silent_node_is_unhealthy_until_it_answers() {
    let (agent, (_listener, _queue, to)) = (TestAgent::start(Manner::States).await, dropping().await);
    let mut probe = probe_of(to, HealthCheckProtocol::Http);
    probe.check.timeout_milliseconds = 1000;
    let mut engine = Engine::stating(&agent, &probe, 2).await;
    agent.set_manner(Manner::Silent);
    assert_eq!(engine.next().await, unhealthy(Some(2), "the node does not answer"));
    agent.set_manner(Manner::States);
    assert_eq!(engine.next().await, healthy(Some(2)));
    assert_eq!(engine.prober.nodes.values().map(Node::probed).sum::<usize>(), 0);
}

/// A firewall may begin to drop packets to the agent's port alone.
#[tokio::test]
async fn node_whose_other_ports_answer_is_probed() {
    let (agent, (_bound, to)) = (TestAgent::start(Manner::States).await, closed());
    let mut probe = hourly(to);
    probe.check.timeout_milliseconds = 1000;
    let mut engine = Engine::stating(&agent, &probe, 2).await;
    agent.set_manner(Manner::Silent);
    engine.wait_until_probed(1).await;
    agent.set_manner(Manner::States);
    engine.wait_until_probed(0).await;
}

/// An agent ends before its node does. Probes of all ports of a node that is gone would keep those of others waiting.
#[tokio::test]
async fn node_that_is_gone_after_its_agent_is_not_probed() {
    let (mut agent, (_listener, _queue, to)) = (TestAgent::start(Manner::States).await, dropping().await);
    let mut probe = hourly(to);
    probe.check.timeout_milliseconds = 1000;
    let mut engine = Engine::stating(&agent, &probe, 2).await;
    agent.stop().await;
    engine.wait_until_probed(1).await;
    agent.set_manner(Manner::Silent);
    agent.restart(&[]).await;
    engine.wait_until_probed(0).await;
    assert_eq!(engine.prober.stated_health(&probe).expect("the last health").state, TargetState::Healthy);
}

#[tokio::test]
async fn probes_continue_from_another_source_address() {
    let to = server(vec![GOOD]).await;
    let (changes, mut changes_rx) = mpsc::unbounded_channel();
    let (mut prober, checks) = (prober(changes), checks(&[&hourly(to)], &[]));
    let gone = Some([192, 0, 2, 1].into());
    prober.set_checks(&checks, &HealthByProbe::default(), |_| gone);
    assert_eq!(heard(&mut changes_rx).await.1.state, TargetState::Initial);
    prober.set_checks(&checks, &HealthByProbe::default(), |_| None);
    assert_eq!(heard(&mut changes_rx).await.1.state, TargetState::Healthy);
}

#[tokio::test]
async fn node_that_never_answered_is_probed() {
    let (agent, to) = (TestAgent::start(Manner::Silent).await, server(vec![GOOD]).await);
    let mut engine = Engine::new(&agent);
    engine.set(&[&hourly(to)]);
    assert_eq!(engine.next().await, healthy(None));
}
