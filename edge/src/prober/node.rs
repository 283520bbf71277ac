// SPDX-License-Identifier: Apache-2.0
//! The checks of one node address: for each, whether the node's statement decides it, or a task that probes. `Prober` owns the nodes
//! and hands over what its tasks report.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheckProtocol, TargetState};

use super::node_statement::{AffectedPorts, NodeStatement, SILENT, StatementMode, Verdict};
use super::probe_task::{ProbeTask, ProbeTasks};
use super::statement_task::{RequestSettings, StatementReport, StatementTask};
use crate::health::{HealthTracker, Probe, ProbeResult, TargetHealth};

#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) source: Option<IpAddr>,
    /// By the port of the check.
    checks: HashMap<u16, Vec<NodeCheck>>,
    statement: NodeStatement,
    /// Runs while a statement may decide a check.
    task: Option<StatementTask>,
    /// Ports with a weight that changed too soon after the last change.
    held_back: HashSet<u16>,
}

#[derive(Debug)]
struct NodeCheck {
    probe: Probe,
    is_urgent: bool,
    judge: Judge,
}

/// What decides the health of a target with one check.
#[derive(Debug)]
enum Judge {
    /// Nothing yet. The health may be known from earlier.
    None(Option<TargetHealth>),
    Probes(ProbeTask),
    Statements(HealthTracker),
}

impl Node {
    pub(super) fn is_empty(&self) -> bool {
        self.checks.is_empty()
    }

    pub(super) fn mode(&self) -> StatementMode {
        self.statement.mode()
    }

    /// The number of ports that the node states.
    pub(super) fn stated_ports(&self) -> usize {
        self.statement.len()
    }

    /// Drops all checks but these; whether there were others.
    pub(super) fn retain(&mut self, wanted: &HashSet<Probe>) -> bool {
        let mut has_dropped = false;
        self.checks.retain(|_, checks| {
            let before = checks.len();
            checks.retain(|check| wanted.contains(&check.probe));
            has_dropped |= checks.len() != before;
            !checks.is_empty()
        });
        has_dropped
    }

    /// Adds a check, or sets its urgency; whether it is new. A new one begins with the health that is known.
    pub(super) fn set(
        &mut self,
        probe: &Probe,
        is_urgent: bool,
        known: impl FnOnce() -> Option<TargetHealth>,
    ) -> bool {
        if self.set_urgent(probe, is_urgent) {
            return false;
        }
        let check = NodeCheck { probe: probe.clone(), is_urgent, judge: Judge::None(known()) };
        self.checks.entry(probe.check.port).or_default().push(check);
        true
    }

    /// Sets the urgency of a check; whether there is one.
    pub(super) fn set_urgent(&mut self, probe: &Probe, is_urgent: bool) -> bool {
        let checks = self.checks.get_mut(&probe.check.port).into_iter().flatten();
        let Some(check) = checks.into_iter().find(|check| check.probe == *probe) else { return false };
        check.is_urgent = is_urgent;
        if let Judge::Probes(task) = &check.judge {
            task.set_urgent(is_urgent);
        }
        true
    }

    /// How the node is to be asked for statements; `None` without a check that they could decide.
    pub(super) fn request_settings(&self) -> Option<RequestSettings> {
        let checks = self.checks.values().flatten().map(|check| &check.probe.check);
        let http = || checks.clone().filter(|check| check.protocol == HealthCheckProtocol::Http);
        let milliseconds = |count: u32| Duration::from_millis(count.into());
        let interval = milliseconds(http().map(|check| check.interval_milliseconds).min()?);
        let timeout = milliseconds(http().map(|check| check.timeout_milliseconds).min()?);
        let other_port = http().map(|check| check.port).min()?;
        Some(RequestSettings::new(self.source, interval, timeout, other_port))
    }

    /// Begins to ask, continues with other settings, or ends.
    pub(super) fn set_requests(
        &mut self,
        settings: Option<RequestSettings>,
        spawn: impl FnOnce(RequestSettings) -> StatementTask,
    ) {
        match (&self.task, settings) {
            (Some(task), Some(settings)) => task.set(settings),
            (None, Some(settings)) => self.task = Some(spawn(settings)),
            (_, None) => (self.task, self.statement) = (None, NodeStatement::default()),
        }
    }

    /// Probes from another source address, with the health that is known.
    pub(super) fn set_source(&mut self, source: Option<IpAddr>, tasks: &ProbeTasks) {
        self.source = source;
        for check in self.checks.values_mut().flatten() {
            if let Judge::Probes(task) = &check.judge {
                let known = task.health();
                let task = tasks.spawn(check.probe.clone(), known, source, check.is_urgent, true);
                check.judge = Judge::Probes(task);
            }
        }
    }

    /// Whether it has this check.
    pub(super) fn has(&self, probe: &Probe) -> bool {
        self.check(probe).is_some()
    }

    fn check(&self, probe: &Probe) -> Option<&NodeCheck> {
        self.checks.get(&probe.check.port)?.iter().find(|check| check.probe == *probe)
    }

    /// A request has ended; whether it is one of the present task.
    pub(super) fn record(&mut self, report: &StatementReport, tasks: &ProbeTasks, now: Instant) -> bool {
        if self.task.as_ref().map(|task| task.number) != Some(report.task) {
            return false;
        }
        match self.statement.record(&report.result, report.begun) {
            AffectedPorts::All => self.judge_all(tasks, now),
            AffectedPorts::These(ports) => {
                let held_back = std::mem::take(&mut self.held_back);
                for port in held_back.into_iter().chain(ports) {
                    self.judge(port, tasks, now);
                }
            }
        }
        true
    }

    pub(super) fn judge_all(&mut self, tasks: &ProbeTasks, now: Instant) {
        self.held_back.clear();
        let ports: Vec<_> = self.checks.keys().copied().collect();
        for port in ports {
            self.judge(port, tasks, now);
        }
    }

    /// Decides the checks of a port as the statement says now.
    pub(super) fn judge(&mut self, port: u16, tasks: &ProbeTasks, now: Instant) {
        for check in self.checks.get_mut(&port).into_iter().flatten() {
            let is_asked = self.task.is_some();
            match self.statement.verdict(&check.probe.check, now) {
                Verdict::Wait if is_asked => {}
                Verdict::Wait | Verdict::Probe => check.probe(self.source, tasks),
                Verdict::Keep => check.keep(tasks, now),
                Verdict::Obey(result) => {
                    if check.obey(result, tasks, now) {
                        self.held_back.insert(port);
                    }
                }
            }
        }
    }

    /// The health that the node's statements have decided.
    pub(super) fn stated_health(&self, probe: &Probe) -> Option<&TargetHealth> {
        match &self.check(probe)?.judge {
            Judge::Statements(tracker) => Some(tracker.health()),
            Judge::None(_) | Judge::Probes(_) => None,
        }
    }

    /// The number of checks that are probed.
    #[cfg(test)]
    pub(super) fn probed(&self) -> usize {
        self.checks.values().flatten().filter(|check| matches!(check.judge, Judge::Probes(_))).count()
    }
}

impl NodeCheck {
    fn probe(&mut self, source: Option<IpAddr>, tasks: &ProbeTasks) {
        let (known, at_once) = match &mut self.judge {
            Judge::Probes(_) => return,
            Judge::None(known) => (known.take(), true),
            // Its last statement counts as a passed or failed probe: the threshold must not be reached sooner than by probes. Nor
            // must all ports of a node be probed together.
            Judge::Statements(tracker) => {
                (Some(tracker.health().clone()), tracker.health().state == TargetState::Initial)
            }
        };
        self.judge = Judge::Probes(tasks.spawn(self.probe.clone(), known, source, self.is_urgent, at_once));
    }

    /// Whether its weight is held back.
    fn obey(&mut self, result: ProbeResult, tasks: &ProbeTasks, now: Instant) -> bool {
        let weight = match &result {
            ProbeResult::Passed(weight) => Some(*weight),
            ProbeResult::NoEndpoint | ProbeResult::Failed(_) | ProbeResult::Unanswered(_) => None,
        };
        self.decide(tasks, now, |tracker, _| tracker.obey(result, now));
        let Judge::Statements(tracker) = &self.judge else { return false };
        weight.is_some_and(|weight| !tracker.has_weight(weight))
    }

    /// The health stays. Without any, the target has been tried and is undecided.
    fn keep(&mut self, tasks: &ProbeTasks, now: Instant) {
        self.decide(tasks, now, |tracker, probe| {
            let is_new = tracker.health().state == TargetState::Initial;
            is_new && tracker.record(&probe.check, ProbeResult::Unanswered(SILENT.to_owned()), now)
        });
    }

    /// Sends the health if `change` says that it has changed.
    fn decide(
        &mut self,
        tasks: &ProbeTasks,
        now: Instant,
        change: impl FnOnce(&mut HealthTracker, &Probe) -> bool,
    ) {
        let known = match &mut self.judge {
            Judge::None(known) => Some(known.take()),
            Judge::Probes(task) => Some(task.health()),
            Judge::Statements(_) => None,
        };
        if let Some(known) = known {
            self.judge = Judge::Statements(HealthTracker::new(known, now));
        }
        if let Judge::Statements(tracker) = &mut self.judge
            && change(tracker, &self.probe)
        {
            // Without a receiver the process is ending.
            let _ = tasks.changes.send((self.probe.clone(), tracker.health().clone()));
        }
    }
}
