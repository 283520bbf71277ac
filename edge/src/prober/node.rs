// SPDX-License-Identifier: Apache-2.0
//! The checks of one node address: for each, whether the node's statement decides it, or a task that probes. `Prober` owns the nodes
//! and hands over what its tasks report.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheck, TargetState};
use steerage_model::TunnelReceiver;

use super::HealthChange;
use super::node_statement::{AffectedPorts, NodeStatement, SILENT, StatementMode, Verdict};
use super::probe_task::{Pace, ProbeTask, ProbeTasks};
use super::statement_task::{RequestSettings, StatementReport, StatementTask};
use crate::checks::{CheckSet, HttpChecks, urgency};
use crate::health::{HealthByProbe, HealthTracker, Probe, ProbeResult, TargetHealth};
use crate::port_set::{PortSet, PortSetPool};

/// A node with more checks is probed only after [`PATIENCE_WITH_MANY`] requests without a statement: its agent may have been slow once,
/// and each check is a task.
const MANY_CHECKS: usize = 64;
const PATIENCE_WITH_MANY: u32 = 3;

#[derive(Debug)]
pub(super) struct Node {
    address: IpAddr,
    pub(super) source: Option<IpAddr>,
    /// The number of checks in all sets.
    checks: usize,
    /// All checks of the node.
    sets: Vec<Arc<CheckSet>>,
    /// Those that are probed or have a local endpoint, by port. Of the others the node states that they have none, or will soon state
    /// something.
    judged: HashMap<u16, HashMap<HealthCheck, Judge>>,
    statement: NodeStatement,
    /// What was sent last of the ports that it states.
    sent_ports: Option<Arc<PortSet>>,
    /// What was sent last of its end of the tunnel.
    sent_tunnel: Option<TunnelReceiver>,
    /// Runs while a statement may decide a check.
    task: Option<StatementTask>,
    /// Ports whose weight changed too soon after its last change; it follows later.
    delayed_weights: HashSet<u16>,
}

/// What decides the health of a target with one check.
#[derive(Debug)]
enum Judge {
    Probes(ProbeTask),
    Statements(HealthTracker),
}

/// What judging a check takes.
#[derive(Clone, Copy)]
pub(super) struct JudgeContext<'a> {
    pub(super) tasks: &'a ProbeTasks,
    /// The health that is known.
    pub(super) known: &'a HealthByProbe,
    pub(super) urgency: Urgency<'a>,
    pub(super) now: Instant,
}

/// Whether a probe is urgent; `None` where the sets of checks say so.
pub(super) type Urgency<'a> = &'a dyn Fn(&Probe) -> Option<bool>;

impl Node {
    pub(super) fn new(address: IpAddr) -> Self {
        Self {
            address,
            source: None,
            sets: Vec::new(),
            checks: 0,
            judged: HashMap::new(),
            statement: NodeStatement::default(),
            sent_ports: None,
            sent_tunnel: None,
            task: None,
            delayed_weights: HashSet::new(),
        }
    }

    pub(super) fn mode(&self) -> StatementMode {
        self.statement.mode()
    }

    pub(super) fn tunnel_receiver(&self) -> Option<TunnelReceiver> {
        self.statement.tunnel_receiver()
    }

    /// The number of ports that the node states.
    pub(super) fn stated_ports(&self) -> usize {
        self.statement.ports().map_or(0, |ports| ports.len())
    }

    /// Has exactly the checks of these sets from now on, so many together. [`judge_new`](Self::judge_new) follows.
    pub(super) fn set_checks(&mut self, sets: &[Arc<CheckSet>], count: usize) {
        (self.sets, self.checks) = (sets.to_vec(), count);
        self.judged.retain(|_, judged| {
            judged.retain(|check, judge| {
                let is_urgent = urgency(sets, check);
                judge.set_urgent(is_urgent.unwrap_or_default());
                is_urgent.is_some()
            });
            !judged.is_empty()
        });
    }

    /// Decides the checks that nothing decides yet.
    pub(super) fn judge_new(&mut self, context: JudgeContext<'_>) {
        for port in self.undecided_ports() {
            let judged = self.judged.get(&port);
            let is_judged = |check: &HealthCheck| judged.is_some_and(|judged| judged.contains_key(check));
            if !self.sets.iter().flat_map(|set| set.at(port)).all(is_judged) {
                self.judge(port, context);
            }
        }
    }

    /// The ports with a check that is no matter of the ports that the node states.
    fn undecided_ports(&self) -> BTreeSet<u16> {
        match self.statement.ports() {
            Some(stated) => {
                let others = self.sets.iter().flat_map(|set| set.undecided_ports(stated));
                let has_check = |port: &u16| self.sets.iter().any(|set| !set.at(*port).is_empty());
                self.statement.ports_with_endpoints().filter(has_check).chain(others).collect()
            }
            // The first answer tells.
            None if self.mode() == StatementMode::Asked && self.task.is_some() => {
                self.sets.iter().flat_map(|set| set.other_ports()).copied().collect()
            }
            None => self.sets.iter().flat_map(|set| set.ports()).collect(),
        }
    }

    /// Sets the urgency of a check.
    pub(super) fn set_urgent(&mut self, probe: &Probe, is_urgent: bool) {
        if let Some(judge) = self.judge_of(probe) {
            judge.set_urgent(is_urgent);
        }
    }

    /// Since when the target of this probe is expected to pass, if it is probed.
    pub(super) fn set_expected(&self, probe: &Probe, expected: Option<Instant>) {
        if let Some(Judge::Probes(task)) = self.judge_of(probe) {
            task.set_expected(expected);
        }
    }

    /// How the node is to be asked for statements; `None` without a check that they could decide.
    pub(super) fn request_settings(&self) -> Option<RequestSettings> {
        let http = self.sets.iter().filter_map(|set| set.http()).reduce(HttpChecks::least)?;
        let milliseconds = |count: u32| Duration::from_millis(count.into());
        let (interval, timeout) =
            (milliseconds(http.interval_milliseconds), milliseconds(http.timeout_milliseconds));
        Some(RequestSettings::new(self.source, interval, timeout, http.port))
    }

    /// Begins to ask, continues with other settings, or ends.
    pub(super) fn set_requests(
        &mut self,
        settings: Option<RequestSettings>,
        tasks: &ProbeTasks,
        spawn: impl FnOnce(RequestSettings) -> StatementTask,
    ) {
        match (&self.task, settings) {
            (Some(task), Some(settings)) => task.set(settings),
            (None, Some(settings)) => self.task = Some(spawn(settings)),
            (_, None) => {
                (self.task, self.statement) = (None, NodeStatement::default());
                self.send_tunnel(tasks);
                if self.sent_ports.take().is_some() {
                    // Without a receiver the process is ending.
                    let _ = tasks.changes.send(HealthChange::Stated(self.address, Arc::default()));
                }
            }
        }
    }

    /// Probes from another source address, with the health that is known.
    pub(super) fn set_source(&mut self, source: Option<IpAddr>, tasks: &ProbeTasks) {
        self.source = source;
        for (check, judge) in self.judged.values_mut().flatten() {
            if let Judge::Probes(task) = judge {
                let (known, pace) = (task.health(), task.pace());
                let probe = Probe { address: self.address, check: check.clone() };
                *judge = Judge::Probes(tasks.spawn(probe, known, source, pace, true));
            }
        }
    }

    pub(super) fn checks(&self) -> usize {
        self.checks
    }

    /// Whether it has this check.
    pub(super) fn has(&self, probe: &Probe) -> bool {
        urgency(&self.sets, &probe.check).is_some()
    }

    fn judge_of(&self, probe: &Probe) -> Option<&Judge> {
        self.judged.get(&probe.check.port)?.get(&probe.check)
    }

    /// A request has ended; whether it is one of the present task.
    pub(super) fn record(
        &mut self,
        report: &StatementReport,
        shared: &mut PortSetPool,
        context: JudgeContext<'_>,
    ) -> bool {
        if self.task.as_ref().map(|task| task.number) != Some(report.task) {
            return false;
        }
        let has_many = self.checks() > MANY_CHECKS;
        let patience = if has_many { PATIENCE_WITH_MANY } else { 1 };
        let affected = self.statement.record(&report.result, report.begun, patience);
        self.statement.share(|ports| shared.share(ports));
        self.send_tunnel(context.tasks);
        let dropped = self.dropped_ports();
        if !dropped.is_empty() {
            self.send_ports(context.tasks);
        }
        let delayed_weights = std::mem::take(&mut self.delayed_weights);
        let ports: BTreeSet<u16> = match affected {
            AffectedPorts::All => self.judged.keys().copied().chain(self.undecided_ports()).collect(),
            AffectedPorts::These(ports) => delayed_weights.into_iter().chain(ports).collect(),
        };
        for port in ports {
            self.judge(port, context);
        }
        for port in dropped {
            self.send_health(port, context);
        }
        self.send_ports(context.tasks);
        true
    }

    /// Those of the ports that were sent last that the node does not state any more, while it states others.
    fn dropped_ports(&self) -> Vec<u16> {
        match (&self.sent_ports, self.statement.ports()) {
            (Some(sent), Some(stated)) if !Arc::ptr_eq(sent, stated) => sent.without(stated).collect(),
            _ => Vec::new(),
        }
    }

    /// Sends what is known of the targets of a port that the node does not state any more: nobody else says that they have no endpoint.
    fn send_health(&self, port: u16, context: JudgeContext<'_>) {
        for (check, judge) in self.judged.get(&port).into_iter().flatten() {
            if let Some(health) = judge.health() {
                send(&Probe { address: self.address, check: check.clone() }, &health, context);
            }
        }
    }

    /// Sends the ports that the node states if they are others than before: after the health of those that have endpoints, as in between
    /// they would have none; but before that of ports which it states no more, which would be taken for stated ones.
    pub(super) fn send_ports(&mut self, tasks: &ProbeTasks) {
        if let Some(ports) = self.statement.ports()
            && self.sent_ports.as_ref() != Some(ports)
        {
            self.sent_ports = Some(Arc::clone(ports));
            // Without a receiver the process is ending.
            let _ = tasks.changes.send(HealthChange::Stated(self.address, Arc::clone(ports)));
        }
    }

    /// Sends what the node states of its end of the tunnel if that differs from before.
    fn send_tunnel(&mut self, tasks: &ProbeTasks) {
        let receiver = self.statement.tunnel_receiver();
        if std::mem::replace(&mut self.sent_tunnel, receiver) != receiver {
            // Without a receiver the process is ending.
            let _ = tasks.changes.send(HealthChange::Tunnel(self.address));
        }
    }

    /// Decides the checks of a port as the statement says now.
    fn judge(&mut self, port: u16, context: JudgeContext<'_>) {
        let checks: HashSet<&HealthCheck> = self.sets.iter().flat_map(|set| set.at(port)).collect();
        let mut judged = self.judged.remove(&port).unwrap_or_default();
        for check in checks {
            let before = judged.remove(check);
            let probe = Probe { address: self.address, check: check.clone() };
            let judge = match self.statement.verdict(check, context.now) {
                Verdict::Wait if self.task.is_some() => before,
                Verdict::Wait | Verdict::Probe => Some(self.probing(&probe, before, context)),
                Verdict::Keep => Some(Judge::Statements(keeping(&probe, before, context))),
                Verdict::Obey(ProbeResult::NoEndpoint) => {
                    if before.is_some() || context.known.has_value(&probe) {
                        obeying(&probe, before, ProbeResult::NoEndpoint, context);
                    }
                    None
                }
                Verdict::Obey(result) => {
                    let weight = match &result {
                        ProbeResult::Passed(weight) => Some(*weight),
                        _ => None,
                    };
                    let tracker = obeying(&probe, before, result, context);
                    if weight.is_some_and(|weight| !tracker.has_weight(weight)) {
                        self.delayed_weights.insert(port);
                    }
                    Some(Judge::Statements(tracker))
                }
            };
            judged.extend(judge.map(|judge| (probe.check, judge)));
        }
        if !judged.is_empty() {
            self.judged.insert(port, judged);
        }
    }

    /// Probes go on, or begin.
    fn probing(&self, probe: &Probe, before: Option<Judge>, context: JudgeContext<'_>) -> Judge {
        let (known, at_once) = match before {
            Some(Judge::Probes(task)) => return Judge::Probes(task),
            // Its last statement counts as a passed or failed probe: the threshold must not be reached sooner than by probes. Nor
            // must all ports of a node be probed together.
            Some(Judge::Statements(tracker)) => {
                (Some(tracker.health().clone()), tracker.health().state == TargetState::Initial)
            }
            // Of most ports of a node that states nothing any more, its last statement said that they have no endpoint.
            None => {
                let known = context.known.get(probe).cloned();
                let was_stated = known.is_some() && !context.known.has_value(probe);
                (known, !(was_stated && self.mode() == StatementMode::Probed))
            }
        };
        let is_urgent = (context.urgency)(probe).or_else(|| urgency(&self.sets, &probe.check));
        let is_urgent = is_urgent.unwrap_or_default();
        let pace = Pace { is_urgent, expected: None };
        Judge::Probes(context.tasks.spawn(probe.clone(), known, self.source, pace, at_once))
    }

    /// The health that the node's statements have decided.
    pub(super) fn stated_health(&self, probe: &Probe) -> Option<TargetHealth> {
        match self.judge_of(probe) {
            Some(Judge::Statements(tracker)) => Some(tracker.health().clone()),
            Some(Judge::Probes(_)) => None,
            None => {
                let lacks = self.has(probe) && self.statement.lacks_endpoint(&probe.check);
                lacks.then(TargetHealth::without_endpoint)
            }
        }
    }

    /// The number of checks that are probed.
    #[cfg(test)]
    pub(super) fn probed(&self) -> usize {
        self.judged.values().flatten().filter(|(_, judge)| matches!(judge, Judge::Probes(_))).count()
    }
}

impl Judge {
    fn set_urgent(&self, is_urgent: bool) {
        if let Self::Probes(task) = self {
            task.set_urgent(is_urgent);
        }
    }

    fn health(&self) -> Option<TargetHealth> {
        match self {
            Self::Probes(task) => task.health(),
            Self::Statements(tracker) => Some(tracker.health().clone()),
        }
    }
}

/// The health stays. Without any, the target has been tried and is undecided.
fn keeping(probe: &Probe, before: Option<Judge>, context: JudgeContext<'_>) -> HealthTracker {
    let mut tracker = tracker(probe, before, context);
    if tracker.health().state == TargetState::Initial
        && tracker.record(&probe.check, ProbeResult::Unanswered(SILENT.to_owned()), context.now)
    {
        send(probe, tracker.health(), context);
    }
    tracker
}

/// The node says so.
fn obeying(
    probe: &Probe,
    before: Option<Judge>,
    result: ProbeResult,
    context: JudgeContext<'_>,
) -> HealthTracker {
    let mut tracker = tracker(probe, before, context);
    if tracker.obey(result, context.now) {
        send(probe, tracker.health(), context);
    }
    tracker
}

fn tracker(probe: &Probe, before: Option<Judge>, context: JudgeContext<'_>) -> HealthTracker {
    match before {
        Some(Judge::Statements(tracker)) => tracker,
        Some(Judge::Probes(task)) => HealthTracker::new(task.health(), context.now),
        None => HealthTracker::new(context.known.get(probe).cloned(), context.now),
    }
}

fn send(probe: &Probe, health: &TargetHealth, context: JudgeContext<'_>) {
    // Without a receiver the process is ending.
    let _ = context.tasks.changes.send(HealthChange::Target(probe.clone(), health.clone()));
}
