// SPDX-License-Identifier: Apache-2.0
//! What is known of a node from its statements: which health checks they decide, and how. Pure; `node` asks it for each check, and
//! `statement_task` makes the requests.
//!
//! A statement is obeyed at once. Silence after statements is judged as failed probes would be: all requests to the node count for
//! each of its checks. A node that answers, but states nothing, is probed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheck, HealthCheckProtocol};
use steerage_model::{Statement, TunnelReceiver};

use super::stated_tunnel::StatedTunnel;
use crate::health::ProbeResult;
use crate::port_set::PortSet;

/// Why a target is unhealthy, in its status.
const NOT_HEALTHY: &str = "the node's service proxy is not healthy";
pub(super) const SILENT: &str = "the node does not answer";

/// The result of a request for a statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StatementResult {
    Stated(Statement),
    /// The node refuses the connection or answers otherwise, with the reason.
    NotStated(String),
    /// No answer in time, or no route, with the reason.
    Unanswered(String),
}

/// What decides the health of a node's targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum StatementMode {
    /// Nothing yet: the first request has not ended.
    #[default]
    Asked,
    /// Probes, because the node makes no statements.
    Probed,
    /// Its statements, and probes for the ports that they do not list.
    Stating,
    /// Its last statement, until it has been silent for too long.
    Silent,
}

/// The ports whose checks have to be decided again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AffectedPorts {
    These(Vec<u16>),
    All,
}

impl AffectedPorts {
    const NONE: Self = Self::These(Vec::new());
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The first request will tell.
    Wait,
    /// No statement decides this check.
    Probe,
    Obey(ProbeResult),
    /// The node is silent, but not yet for long enough.
    Keep,
}

/// After so many requests without a statement, ports without an endpoint are probed, too. They are most ports of a node, and an agent
/// that restarts states again sooner.
const FAILURES_UNTIL_ALL_PROBED: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct NodeStatement {
    mode: StatementMode,
    is_healthy: bool,
    /// The number of local endpoints of the ports that have any.
    endpoints: HashMap<u16, u32>,
    /// All ports that it states. Nodes that state the same share it.
    ports: Arc<PortSet>,
    tunnel: StatedTunnel,
    /// The ports are what it stated before it stated no more. They say whom its silence concerns: an agent ends before its node does.
    is_former: bool,
    /// The requests since then that brought an answer, but no statement; or the first requests, until one is answered.
    failures: u32,
    silence: Option<Silence>,
}

/// The requests since the last answer.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// When the first of them began.
    begun: Instant,
    requests: u32,
}

impl NodeStatement {
    pub(super) fn mode(&self) -> StatementMode {
        self.mode
    }

    /// The ports that the node states, while that decides the health of those without endpoints.
    pub(super) fn ports(&self) -> Option<&Arc<PortSet>> {
        let is_deciding = match self.mode {
            StatementMode::Asked => false,
            StatementMode::Stating => true,
            StatementMode::Probed | StatementMode::Silent => {
                self.failures < FAILURES_UNTIL_ALL_PROBED && !self.ports.is_empty()
            }
        };
        is_deciding.then_some(&self.ports)
    }

    /// Those of them that have local endpoints.
    pub(super) fn ports_with_endpoints(&self) -> impl Iterator<Item = u16> {
        let is_deciding = self.ports().is_some();
        self.endpoints.keys().copied().filter(move |_| is_deciding)
    }

    /// What it states of its end of the tunnel, or stated last, if that still counts.
    pub(super) fn tunnel_receiver(&self) -> Option<TunnelReceiver> {
        self.tunnel.receiver()
    }

    /// Holds this set instead of its own, which is equal.
    pub(super) fn share(&mut self, share: impl FnOnce(&Arc<PortSet>) -> Arc<PortSet>) {
        self.ports = share(&self.ports);
    }

    /// A request that began at this time has ended. A node is probed once the first `patience` requests brought no statement.
    pub(super) fn record(
        &mut self,
        result: &StatementResult,
        begun: Instant,
        patience: u32,
    ) -> AffectedPorts {
        let before = self.mode;
        let knows_ports = matches!(before, StatementMode::Stating | StatementMode::Silent);
        // Changes of what is not known say nothing.
        let stated = match result {
            StatementResult::Stated(statement) => {
                Some(statement).filter(|stated| stated.complete || knows_ports && !self.is_former)
            }
            StatementResult::NotStated(_) | StatementResult::Unanswered(_) => None,
        };
        match result {
            StatementResult::Unanswered(_) => self.tunnel.on_silence(),
            _ => self.tunnel.record(stated.and_then(|statement| statement.edge_tunnel), begun),
        }
        if let Some(statement) = stated {
            (self.silence, self.is_former, self.failures) = (None, false, 0);
            self.mode = StatementMode::Stating;
            let affected = self.apply(statement);
            return if before == StatementMode::Stating { affected } else { AffectedPorts::All };
        }
        match result {
            StatementResult::Unanswered(_) if !self.ports.is_empty() => {
                self.mode = StatementMode::Silent;
                let silence = self.silence.get_or_insert(Silence { begun, requests: 0 });
                silence.requests = silence.requests.saturating_add(1);
                AffectedPorts::All
            }
            StatementResult::Unanswered(_)
                if before == StatementMode::Asked && self.failures + 1 < patience =>
            {
                self.failures += 1;
                AffectedPorts::NONE
            }
            StatementResult::Stated(_) | StatementResult::NotStated(_) | StatementResult::Unanswered(_) => {
                (self.mode, self.silence, self.is_former) = (StatementMode::Probed, None, true);
                self.failures = self.failures.saturating_add(1);
                let is_same = before == StatementMode::Probed && self.failures != FAILURES_UNTIL_ALL_PROBED;
                if is_same { AffectedPorts::NONE } else { AffectedPorts::All }
            }
        }
    }

    fn apply(&mut self, statement: &Statement) -> AffectedPorts {
        let Statement { complete, healthy, ports, edge_tunnel: _, revision: _ } = statement;
        let is_all = *complete || *healthy != self.is_healthy;
        self.is_healthy = *healthy;
        if *complete {
            (self.endpoints, self.ports) = (HashMap::new(), Arc::default());
        }
        for (port, endpoints) in ports {
            match endpoints {
                Some(endpoints) if *endpoints > 0 => self.endpoints.insert(*port, *endpoints),
                Some(_) | None => self.endpoints.remove(port),
            };
            if endpoints.is_none() {
                Arc::make_mut(&mut self.ports).remove(*port);
            } else if !self.ports.contains(*port) {
                Arc::make_mut(&mut self.ports).insert(*port);
            }
        }
        if is_all { AffectedPorts::All } else { AffectedPorts::These(ports.keys().copied().collect()) }
    }

    /// How the health of a target with this check is decided now.
    pub(super) fn verdict(&self, check: &HealthCheck, now: Instant) -> Verdict {
        if check.protocol != HealthCheckProtocol::Http {
            return Verdict::Probe;
        }
        if self.mode == StatementMode::Asked {
            return Verdict::Wait;
        }
        if self.lacks_endpoint(check) {
            // Whatever has become of the node, it has none of the Service's endpoints.
            return Verdict::Obey(ProbeResult::NoEndpoint);
        }
        if self.mode == StatementMode::Probed || !self.ports.contains(check.port) {
            return Verdict::Probe;
        }
        let endpoints = self.endpoints.get(&check.port).copied();
        match self.silence {
            Some(silence) if silence.is_long(check, now) => {
                Verdict::Obey(ProbeResult::Unanswered(SILENT.to_owned()))
            }
            Some(_) => Verdict::Keep,
            None if !self.is_healthy => Verdict::Obey(ProbeResult::Failed(NOT_HEALTHY.to_owned())),
            None => Verdict::Obey(ProbeResult::Passed(endpoints)),
        }
    }

    /// Whether it says that the target of this check has no endpoint.
    pub(super) fn lacks_endpoint(&self, check: &HealthCheck) -> bool {
        check.protocol == HealthCheckProtocol::Http
            && self.ports().is_some_and(|ports| ports.contains(check.port))
            && !self.endpoints.contains_key(&check.port)
    }
}

impl Silence {
    /// Whether probes of this check would have failed as often by now. The time alone is not enough: the first request may have
    /// been held for an interval before the node fell silent.
    fn is_long(self, check: &HealthCheck, now: Instant) -> bool {
        let threshold = check.unhealthy_threshold.max(1);
        let interval = Duration::from_millis(check.interval_milliseconds.into());
        let timeout = Duration::from_millis(check.timeout_milliseconds.into());
        let needed = interval.saturating_mul(threshold - 1).saturating_add(timeout);
        self.requests >= threshold && now.duration_since(self.begun) >= needed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};
    use std::collections::BTreeMap;

    const PORT: u16 = 30_001;

    fn check() -> HealthCheck {
        HealthCheck {
            protocol: HealthCheckProtocol::Http,
            port: PORT,
            path: Some("/healthz".to_owned()),
            interval_milliseconds: 1000,
            timeout_milliseconds: 400,
            healthy_threshold: 2,
            unhealthy_threshold: 3,
        }
    }

    impl NodeStatement {
        fn record_now(&mut self, result: &StatementResult, begun: Instant) -> AffectedPorts {
            self.record(result, begun, 1)
        }
    }

    fn stated(complete: bool, healthy: bool, ports: &[(u16, Option<u32>)]) -> StatementResult {
        let ports = ports.iter().copied().collect();
        StatementResult::Stated(Statement {
            revision: "r".to_owned(),
            complete,
            healthy,
            ports,
            edge_tunnel: None,
        })
    }

    fn receiving(complete: bool, edge_tunnel: Option<TunnelReceiver>) -> StatementResult {
        let StatementResult::Stated(statement) = stated(complete, true, &[(PORT, Some(1))]) else {
            unreachable!("it is stated")
        };
        StatementResult::Stated(Statement { edge_tunnel, ..statement })
    }

    fn not_stated() -> StatementResult {
        StatementResult::NotStated("status 404".to_owned())
    }

    fn unanswered() -> StatementResult {
        StatementResult::Unanswered("no route".to_owned())
    }

    fn passed(count: u32) -> Verdict {
        Verdict::Obey(ProbeResult::Passed(Some(count)))
    }

    fn failed(reason: &str) -> Verdict {
        Verdict::Obey(ProbeResult::Failed(reason.to_owned()))
    }

    #[test]
    fn last_results_decide() {
        let (start, none) = (Instant::now(), AffectedPorts::NONE);
        let all = || AffectedPorts::All;
        let some = |port: u16| AffectedPorts::These(vec![port]);
        let mut node = NodeStatement::default();
        assert_eq!(node.verdict(&check(), start), Verdict::Wait);
        for (result, affected, verdict, mode) in [
            (unanswered(), all(), Verdict::Probe, StatementMode::Probed),
            (not_stated(), none.clone(), Verdict::Probe, StatementMode::Probed),
            (stated(false, true, &[(PORT, Some(1))]), none.clone(), Verdict::Probe, StatementMode::Probed),
            (stated(true, true, &[(PORT, Some(2)), (1, Some(0))]), all(), passed(2), StatementMode::Stating),
            (stated(false, true, &[]), none.clone(), passed(2), StatementMode::Stating),
            (stated(false, true, &[(1, Some(7))]), some(1), passed(2), StatementMode::Stating),
            (
                stated(false, true, &[(PORT, Some(0))]),
                some(PORT),
                Verdict::Obey(ProbeResult::NoEndpoint),
                StatementMode::Stating,
            ),
            (
                stated(false, false, &[]),
                all(),
                Verdict::Obey(ProbeResult::NoEndpoint),
                StatementMode::Stating,
            ),
            (
                stated(false, false, &[(PORT, Some(3))]),
                some(PORT),
                failed(NOT_HEALTHY),
                StatementMode::Stating,
            ),
            (stated(false, true, &[]), all(), passed(3), StatementMode::Stating),
            (stated(false, true, &[(PORT, None)]), some(PORT), Verdict::Probe, StatementMode::Stating),
            (stated(true, true, &[(PORT, Some(4))]), all(), passed(4), StatementMode::Stating),
            (unanswered(), all(), Verdict::Keep, StatementMode::Silent),
            (stated(false, true, &[]), all(), passed(4), StatementMode::Stating),
            (stated(true, true, &[]), all(), Verdict::Probe, StatementMode::Stating),
            (stated(true, true, &[(PORT, Some(5))]), all(), passed(5), StatementMode::Stating),
            (unanswered(), all(), Verdict::Keep, StatementMode::Silent),
            (not_stated(), all(), Verdict::Probe, StatementMode::Probed),
        ] {
            let tcp = HealthCheck { protocol: HealthCheckProtocol::Tcp, ..check() };
            assert_eq!(node.record_now(&result, start), affected, "{result:?}");
            assert_eq!((node.verdict(&check(), start), node.mode()), (verdict, mode), "{result:?}");
            assert_eq!(node.verdict(&tcp, start), Verdict::Probe, "another answer than the agent's");
        }
    }

    #[test]
    fn silence_lasts_as_long_as_failed_probes() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let silent = || Verdict::Obey(ProbeResult::Unanswered(SILENT.to_owned()));
        let mut node = NodeStatement::default();
        node.record_now(&stated(true, true, &[(PORT, Some(1))]), start);
        // The first one was held before the node fell silent.
        for (begun, ended, verdict) in [
            (0, 1400, Verdict::Keep),
            (1400, 1800, Verdict::Keep),
            (2400, 2800, silent()),
            (3400, 3800, silent()),
        ] {
            node.record_now(&unanswered(), at(begun));
            assert_eq!(node.verdict(&check(), at(ended)), verdict, "{ended}");
        }
        let slow = HealthCheck { interval_milliseconds: 10_000, ..check() };
        assert_eq!(node.verdict(&slow, at(20_399)), Verdict::Keep, "its own interval counts");
        assert_eq!(node.verdict(&slow, at(20_400)), silent());
        let patient = HealthCheck { unhealthy_threshold: 5, interval_milliseconds: 0, ..check() };
        assert_eq!(node.verdict(&patient, at(20_400)), Verdict::Keep, "its own threshold counts");
        node.record_now(&stated(false, true, &[]), at(21_000));
        assert_eq!(node.verdict(&check(), at(21_000)), passed(1));
        node.record_now(&unanswered(), at(22_000));
        assert_eq!(node.verdict(&check(), at(60_000)), Verdict::Keep, "silence begins anew");
    }

    #[test]
    fn silence_after_the_end_of_the_agent_is_judged_as_without_it() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut node = NodeStatement::default();
        node.record_now(&stated(true, true, &[(PORT, Some(1))]), start);
        node.record_now(&not_stated(), at(1000));
        assert_eq!(node.verdict(&check(), at(1000)), Verdict::Probe, "the port may answer");
        for (begun, verdict) in [
            (2000, Verdict::Keep),
            (3000, Verdict::Keep),
            (4000, Verdict::Obey(ProbeResult::Unanswered(SILENT.to_owned()))),
        ] {
            assert_eq!(node.record_now(&unanswered(), at(begun)), AffectedPorts::All);
            assert_eq!(node.verdict(&check(), at(begun + 400)), verdict, "{begun}");
        }
        node.record_now(&stated(false, true, &[(PORT, Some(2))]), at(5000));
        assert_eq!(node.verdict(&check(), at(5000)), Verdict::Probe, "changes of what another agent stated");
        node.record_now(&stated(true, true, &[(1, Some(2))]), at(5000));
        node.record_now(&unanswered(), at(6000));
        assert_eq!(node.verdict(&check(), at(6000)), Verdict::Probe, "the new agent never stated it");
    }

    #[test]
    fn node_with_many_checks_is_probed_only_after_some_silence() {
        let (now, mut node) = (Instant::now(), NodeStatement::default());
        for _ in 0..2 {
            assert_eq!(node.record(&unanswered(), now, 3), AffectedPorts::NONE);
            assert_eq!(node.verdict(&check(), now), Verdict::Wait);
        }
        assert_eq!(node.record(&unanswered(), now, 3), AffectedPorts::All);
        assert_eq!(node.verdict(&check(), now), Verdict::Probe);
        let mut node = NodeStatement::default();
        for result in [not_stated(), unanswered(), stated(true, true, &[(PORT, Some(1))])] {
            node.record(&result, now, 3);
        }
        assert_eq!(node.verdict(&check(), now), passed(1), "its agent was late");
    }

    /// Another service proxy may have taken over, or a firewall drop packets to the agent's port.
    #[test]
    fn former_statement_is_not_obeyed_once_all_ports_are_probed() {
        let now = Instant::now();
        let mut node = NodeStatement::default();
        node.record_now(&stated(true, true, &[(PORT, Some(0))]), now);
        let without = Verdict::Obey(ProbeResult::NoEndpoint);
        for failure in 1..=FAILURES_UNTIL_ALL_PROBED {
            assert_eq!(node.verdict(&check(), now), without, "an agent that restarts");
            let is_affected = failure == 1 || failure == FAILURES_UNTIL_ALL_PROBED;
            assert_eq!(node.record_now(&not_stated(), now) == AffectedPorts::All, is_affected);
        }
        assert_eq!((node.verdict(&check(), now), node.ports()), (Verdict::Probe, None));
        assert_eq!(node.record_now(&unanswered(), now), AffectedPorts::All);
        assert_eq!(node.verdict(&check(), now), Verdict::Keep, "a lost packet changes no health");
        assert_eq!(node.record_now(&not_stated(), now), AffectedPorts::All);
        assert_eq!(node.verdict(&check(), now), Verdict::Probe);
        node.record_now(&stated(true, true, &[(PORT, Some(0))]), now);
        assert_eq!(node.verdict(&check(), now), without);
    }

    /// An agent that restarts says nothing at first.
    #[test]
    fn end_of_the_tunnel_is_what_was_stated_last() {
        let now = Instant::now();
        let mut node = NodeStatement::default();
        let (receives, off) = (TunnelReceiver::Receives { vni: 7, port: 10_361 }, TunnelReceiver::Off);
        for (result, expected) in [
            (receiving(false, Some(off)), None),
            (receiving(true, None), None),
            (receiving(false, Some(off)), Some(off)),
            (receiving(false, Some(receives)), Some(receives)),
            (receiving(true, Some(off)), Some(off)),
            (unanswered(), Some(off)),
            (not_stated(), Some(off)),
            (receiving(false, Some(receives)), Some(off)),
            (receiving(true, None), Some(off)),
            (receiving(false, Some(receives)), Some(receives)),
        ] {
            node.record_now(&result, now);
            assert_eq!(node.tunnel_receiver(), expected, "{result:?}");
        }
        let at = |seconds| now + Duration::from_secs(seconds);
        for second in 0..1200 {
            node.record_now(&unanswered(), at(second));
            assert_eq!(node.tunnel_receiver(), Some(receives), "silence says nothing");
        }
        for second in 1200..1500 {
            node.record_now(&not_stated(), at(second));
            assert_eq!(node.tunnel_receiver(), Some(receives), "an agent that waits for its restart");
        }
        node.record_now(&not_stated(), at(3000));
        assert_eq!(node.tunnel_receiver(), None, "the agent is gone");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Complete(bool, BTreeMap<u16, u32>),
        Changes(bool, BTreeMap<u16, Option<u32>>),
        NotStated,
        Unanswered,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let ports = || proptest::collection::btree_map(1_u16..6, 0_u32..3, 0..5);
        let changes = proptest::collection::btree_map(1_u16..6, proptest::option::of(0_u32..3), 0..4);
        let step = prop_oneof![
            (any::<bool>(), ports()).prop_map(|(healthy, ports)| Step::Complete(healthy, ports)),
            (any::<bool>(), changes).prop_map(|(healthy, ports)| Step::Changes(healthy, ports)),
            Just(Step::NotStated),
            Just(Step::Unanswered),
        ];
        proptest::collection::vec(step, 0..30)
    }

    proptest! {
        /// Who decides the affected ports again, and no others, has the verdicts of the whole statement.
        #[test]
        fn affected_ports_are_all_that_change(steps in steps()) {
            let now = Instant::now();
            let (mut node, mut truth) = (NodeStatement::default(), None);
            let verdicts = |node: &NodeStatement| -> BTreeMap<u16, Verdict> {
                (1..6).map(|port| (port, node.verdict(&HealthCheck { port, ..check() }, now))).collect()
            };
            let mut followed = verdicts(&node);
            for step in steps {
                let result = match step {
                    Step::Complete(healthy, ports) => {
                        truth = Some((healthy, ports.clone()));
                        let ports: Vec<_> = ports.into_iter().map(|(port, count)| (port, Some(count))).collect();
                        stated(true, healthy, &ports)
                    }
                    Step::Changes(healthy, changes) => {
                        if let Some((is_healthy, ports)) = &mut truth {
                            *is_healthy = healthy;
                            for (port, count) in &changes {
                                match count {
                                    Some(count) => ports.insert(*port, *count),
                                    None => ports.remove(port),
                                };
                            }
                        }
                        stated(false, healthy, &changes.into_iter().collect::<Vec<_>>())
                    }
                    Step::NotStated => {
                        truth = None;
                        not_stated()
                    }
                    Step::Unanswered => unanswered(),
                };
                let affected = node.record_now(&result, now);
                let present = verdicts(&node);
                match affected {
                    AffectedPorts::All => followed.clone_from(&present),
                    AffectedPorts::These(ports) => for port in ports {
                        if let Some(verdict) = present.get(&port) {
                            followed.insert(port, verdict.clone());
                        }
                    }
                }
                prop_assert_eq!(&followed, &present);
                if node.mode() == StatementMode::Stating {
                    let (healthy, ports) = truth.as_ref().expect("stated");
                    for (port, verdict) in present {
                        let expected = match ports.get(&port) {
                            None => Verdict::Probe,
                            Some(0) => Verdict::Obey(ProbeResult::NoEndpoint),
                            Some(_) if !healthy => failed(NOT_HEALTHY),
                            Some(count) => passed(*count),
                        };
                        prop_assert_eq!(verdict, expected);
                    }
                }
            }
        }
    }
}
