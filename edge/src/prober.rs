// SPDX-License-Identifier: Apache-2.0
//! Finds the health of targets. Asks each node what it states of all its health-check ports at once, and probes what no statement
//! decides as a cloud's load balancer does. The engine hands back the reports of the tasks that ask, and receives changes of
//! health. The prober decides nothing about load balancers.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_model::TunnelReceiver;
use steerage_process::duration;
use tokio::sync::{Semaphore, mpsc};

use crate::checks::{CheckCounts, CheckSet, Checks};
use crate::hash;
use crate::health::{HealthByProbe, Probe, TargetHealth};
use crate::metrics::Metrics;
use crate::port_set::{PortSet, PortSetPool};

mod http;
mod node;
mod node_statement;
mod probe_task;
mod stated_tunnel;
mod statement_request;
mod statement_schedule;
mod statement_task;
#[cfg(test)]
mod test_node;
#[cfg(test)]
mod tests;

use node::{JudgeContext, Node};
pub(crate) use node_statement::{StatementMode, StatementResult};
use probe_task::ProbeTasks;
use statement_request::COMPLETE_AT_ONCE;
pub(crate) use statement_task::StatementReport;
use statement_task::{StatementTask, first_spread};

/// What the engine hears of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HealthChange {
    /// The health of one target.
    Target(Probe, TargetHealth),
    /// The ports that a node states from now on. It has no local endpoint of those whose health is not sent. That stays so until probes
    /// say otherwise, also when it states nothing any more.
    Stated(IpAddr, Arc<PortSet>),
    /// What a node states of its end of the tunnel has changed: [`Prober::tunnel_receiver`] has it. Sent before the health that the same
    /// statement decides. The address may have been given up meanwhile, and be followed again since.
    Tunnel(IpAddr),
}

#[derive(Debug)]
pub(crate) struct Prober {
    nodes: HashMap<IpAddr, Node>,
    /// The number of checks of all nodes.
    checks: usize,
    /// Where nodes state; `None` if they are not to be asked.
    statements_port: Option<u16>,
    /// The number of the last task that asks a node.
    last_task: u64,
    reports: mpsc::Sender<StatementReport>,
    tasks: ProbeTasks,
    /// The turns of nodes to be read.
    turns: Arc<Semaphore>,
    /// The ports that nodes state.
    shared: PortSetPool,
}

impl Prober {
    /// Asks nodes for statements on this port, unless it is zero. Sends changes of health to `changes`. The engine hands what
    /// arrives on `reports` back to [`record`](Self::record).
    pub(crate) fn new(
        statements_port: u16,
        changes: mpsc::UnboundedSender<HealthChange>,
        reports: mpsc::Sender<StatementReport>,
        metrics: Metrics,
    ) -> Self {
        let tasks = ProbeTasks::new(changes, metrics);
        let statements_port = Some(statements_port).filter(|port| *port != 0);
        let (turns, shared) = (Arc::new(Semaphore::new(COMPLETE_AT_ONCE)), PortSetPool::default());
        Self {
            nodes: HashMap::new(),
            checks: 0,
            statements_port,
            last_task: 0,
            reports,
            tasks,
            turns,
            shared,
        }
    }

    /// Follows exactly these, each from the source address that `source` returns. New ones begin with the health that is known.
    pub(crate) fn set_checks(
        &mut self,
        checks: &Checks,
        known: &HealthByProbe,
        source: impl Fn(IpAddr) -> Option<IpAddr>,
    ) {
        let gone: Vec<_> =
            self.nodes.keys().copied().filter(|address| checks.of(*address).is_empty()).collect();
        self.set_checks_of(gone.into_iter().map(|address| (address, [].as_slice())), known, &source);
        self.set_checks_of(checks.iter(), known, &source);
    }

    /// The same for these addresses alone; without a set an address is no longer followed.
    pub(crate) fn set_checks_of<'a>(
        &mut self,
        changed: impl Iterator<Item = (IpAddr, &'a [Arc<CheckSet>])> + Clone,
        known: &HealthByProbe,
        source: impl Fn(IpAddr) -> Option<IpAddr>,
    ) {
        let now = Instant::now();
        let new = changed
            .clone()
            .filter(|(address, sets)| !sets.is_empty() && !self.nodes.contains_key(address))
            .count();
        let spread = first_spread(new);
        let mut counts = CheckCounts::default();
        for (address, sets) in changed {
            if sets.is_empty() {
                if let Some(node) = self.nodes.remove(&address) {
                    self.checks -= node.checks();
                    self.tasks.metrics.count_node(node.mode(), StatementMode::Asked);
                }
                continue;
            }
            let node = self.nodes.entry(address).or_insert_with(|| Node::new(address));
            self.checks -= node.checks();
            node.set_checks(sets, counts.of(sets));
            self.checks += node.checks();
            let source = source(address);
            if node.source != source {
                node.set_source(source, &self.tasks);
            }
            let before = node.mode();
            let settings = self.statements_port.and_then(|port| Some((port, node.request_settings()?)));
            let (port, settings) = settings.unzip();
            node.set_requests(settings, &self.tasks, |settings| {
                self.last_task += 1;
                let to = SocketAddr::new(address, port.unwrap_or_default());
                let (reports, turns) = (self.reports.clone(), Arc::clone(&self.turns));
                StatementTask::spawn(self.last_task, to, settings, reports, turns, spread)
            });
            self.tasks.metrics.count_node(before, node.mode());
            node.judge_new(JudgeContext { tasks: &self.tasks, known, urgency: &|_| None, now });
            node.send_ports(&self.tasks);
        }
    }

    /// The number of checks of all addresses.
    pub(crate) fn checks(&self) -> usize {
        self.checks
    }

    /// Probes this one sooner, or no longer so.
    pub(crate) fn set_urgent(&mut self, probe: &Probe, is_urgent: bool) {
        if let Some(node) = self.nodes.get_mut(&probe.address) {
            node.set_urgent(probe, is_urgent);
        }
    }

    /// Since this time the target of this probe is expected to pass, because its node has got an endpoint; `None`: it is not. Only
    /// the pace of probes and the first pass depend on it. A statement needs neither.
    pub(crate) fn set_expected(&self, probe: &Probe, expected: Option<Instant>) {
        if let Some(node) = self.nodes.get(&probe.address) {
            node.set_expected(probe, expected);
        }
    }

    /// A node has answered, or not. `urgency` says whether a probe is urgent now: the sets of checks are those of the time when they
    /// were given.
    pub(crate) fn record(
        &mut self,
        report: &StatementReport,
        known: &HealthByProbe,
        urgency: impl Fn(&Probe) -> Option<bool>,
    ) {
        let address = report.address;
        let Some(node) = self.nodes.get_mut(&address) else { return };
        let before = node.mode();
        let context = JudgeContext { tasks: &self.tasks, known, urgency: &urgency, now: Instant::now() };
        if node.record(report, &mut self.shared, context) {
            self.tasks.metrics.count_statement(&report.result);
            self.tasks.metrics.count_node(before, node.mode());
            log(address, node, before, &report.result);
        }
    }

    /// What the node of this address states of its end of the tunnel; `None`: nothing that counts.
    pub(crate) fn tunnel_receiver(&self, address: IpAddr) -> Option<TunnelReceiver> {
        self.nodes.get(&address)?.tunnel_receiver()
    }

    /// Whether it has checks at this address.
    pub(crate) fn follows_node(&self, address: IpAddr) -> bool {
        self.nodes.contains_key(&address)
    }

    /// Whether it finds the health of this probe's target.
    pub(crate) fn follows(&self, probe: &Probe) -> bool {
        self.nodes.get(&probe.address).is_some_and(|node| node.has(probe))
    }

    /// The health that the node's statements have decided. It wins over the last result of a probe that has ended meanwhile.
    pub(crate) fn stated_health(&self, probe: &Probe) -> Option<TargetHealth> {
        self.nodes.get(&probe.address)?.stated_health(probe)
    }
}

fn log(address: IpAddr, node: &Node, before: StatementMode, result: &StatementResult) {
    use StatementMode::{Asked, Probed, Silent, Stating};
    let reason = match result {
        StatementResult::Stated(_) => "",
        StatementResult::NotStated(reason) | StatementResult::Unanswered(reason) => reason.as_str(),
    };
    match (before, node.mode()) {
        (Asked | Probed, Stating) => {
            let ports = node.stated_ports();
            tracing::info!(node_address = %address, ports, "the node states its local endpoints; no more probes of these ports");
        }
        (Silent, Stating) => {
            tracing::info!(node_address = %address, "the node answers again");
        }
        (Stating, Silent) => {
            tracing::info!(
                node_address = %address,
                reason,
                "the node does not answer; its targets become unhealthy after their thresholds"
            );
        }
        (Stating | Silent, Probed) => {
            tracing::info!(
                node_address = %address,
                reason,
                "the node no longer states its local endpoints; probing its ports with endpoints now, the others after 5 requests"
            );
        }
        (Asked, Probed) => {
            tracing::debug!(node_address = %address, reason, "the node makes no statements; probing each port");
        }
        _ => {}
    }
}

/// No target and no node is asked more often than this, whatever a check says.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Why a request that ended at its limit says nothing.
fn no_response(limit: Duration) -> String {
    format!("no response within {}", duration::display(limit))
}

/// From 0 to 1. What was added together must not be asked together: neither many nodes, nor many ports of one.
fn spread(to: SocketAddr) -> f64 {
    let thousandths = hash::bytes(to.to_string().as_bytes()) % 1000;
    f64::from(u32::try_from(thousandths).unwrap_or(0)) / 1000.0
}
