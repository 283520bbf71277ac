// SPDX-License-Identifier: Apache-2.0
//! The loop: takes inputs, plans, withdraws health, writes, publishes health.
//!
//! It writes at once when idle; inputs that arrive during a write are taken together in the next one. Nothing is written before
//! Services, slices and this node have been listed; what the lists bring is planned while they arrive.

mod address_listing;
mod foreign;
mod health_ports;
mod log_lines;
mod planner;
mod unserved;
mod write_retry;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use anyhow::Context as _;
use ipnet::IpNet;
use steerage_model::{EndpointSlice, Key, NodeAgent};
use steerage_process::{Pending, duration};
use steerage_watch::Event;
use steerage_watch::events::Recorder;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::debug_request::{DebugCommand, DebugReply, DebugRequest};
use crate::explain::{ExplainContext, explain};
use crate::health::{HealthCheckPorts, Listeners, ProxyHealth};
use crate::input::Input;
use crate::kernel::{Dataplane, FlowCleaner, NextHops, Written, host_addresses};
use crate::metrics::{Metrics, PendingMetrics};
use crate::plan::{Budgets, Frontend, HealthPorts, ServicePlan, has_load_balancer};
use crate::rules::{KernelState, Ruleset};
use crate::settings::AgentSettings;
use address_listing::AddressListing;
use foreign::ForeignState;
use planner::Planner;
use unserved::UnservedReports;
use write_retry::WriteRetry;

/// Pause between readings of long lists that a start believed.
const LISTS_INTERVAL: Duration = Duration::from_millis(10);
/// Running agents begin the watch of all Nodes within this time, and not all at once: a user may cause it by an external IP.
const NODES_SPREAD: Duration = Duration::from_secs(5);
/// Services are planned for so long, and those that are left after the write of these. One of them may take longer.
const PLAN_TIME: Duration = Duration::from_millis(50);
/// Slower writes are logged.
const SLOW_WRITE: Duration = Duration::from_millis(200);

/// The loop's parts.
pub struct Agent {
    /// From flags.
    pub settings: AgentSettings,
    /// What the kernel should hold.
    pub ruleset: Ruleset,
    /// The writer of it.
    pub dataplane: Dataplane,
    /// Knows the ways to other nodes, if packets are forwarded to them.
    pub next_hops: Option<NextHops>,
    /// Starts the watch of all Nodes within the time that is sent. `None`: they are watched anyway.
    pub cluster_nodes: Option<oneshot::Sender<Duration>>,
    /// Deletes stale UDP flows.
    pub cleaner: FlowCleaner,
    /// What health-check ports answer.
    pub ports: HealthCheckPorts,
    /// Whether load balancers may rely on this node.
    pub proxy_health: ProxyHealth,
    /// The servers on health-check ports.
    pub listeners: Listeners,
    /// Publishes events.
    pub recorder: Recorder,
    /// The annotations to put on the Node, and whether they have to be put there.
    pub annotations: (NodeAgent, watch::Sender<bool>),
    /// The agent's metrics.
    pub metrics: Metrics,
    /// Done when the rules are in the kernel for the first time.
    pub first: Option<Pending>,
}

/// What changes from round to round.
struct LoopState {
    planner: Planner,
    /// All lists were complete once.
    listed: bool,
    host_addresses: AddressListing,
    /// Ways to other nodes may have changed.
    routes_changed: bool,
    /// When a failed write is tried again.
    retry: Option<Instant>,
    writes: WriteRetry,
    /// When more long lists are read.
    read_lists: Option<Instant>,
    ports: health_ports::PortState,
    pending: PendingMetrics,
    unserved: UnservedReports,
    foreign: ForeignState,
}

impl Agent {
    /// Runs until `shutdown`, and leaves the rules in the kernel.
    pub async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        // Without them the first write would take a predecessor's node ports away.
        let host_addresses = self.settings.host_addresses().context("cannot list the host's addresses")?;
        let mut state = LoopState {
            planner: Planner::new(host_addresses, Budgets::new(self.settings.element_limits)),
            listed: false,
            host_addresses: AddressListing::default(),
            routes_changed: true,
            retry: None,
            writes: WriteRetry::default(),
            read_lists: None,
            ports: health_ports::PortState::default(),
            pending: PendingMetrics::default(),
            unserved: UnservedReports::default(),
            foreign: ForeignState::default(),
        };
        loop {
            let deadline = self.next_deadline(&state);
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                input = inputs.recv() => match input {
                    Some(input) => self.take(&mut state, input),
                    None => return Ok(()),
                },
                () = sleep_until(deadline) => {},
            }
            while let Ok(input) = inputs.try_recv() {
                self.take(&mut state, input);
            }
            let (addresses, list) = (&mut state.planner.host_addresses, || self.settings.host_addresses());
            state.host_addresses.update(addresses, StdInstant::now(), list);
            self.proxy_health.round_begun();
            self.step(&mut state);
            self.show_eligible(&state);
            self.read_lists(&mut state);
            self.proxy_health.round_ended();
            self.ports.expire();
            self.open_ports(&mut state);
        }
    }

    /// When there is something to do without an input. An idle agent has no deadline.
    fn next_deadline(&self, state: &LoopState) -> Option<Instant> {
        let pure =
            [state.planner.next(StdInstant::now()), self.ports.next_expiry(), state.host_addresses.due()];
        let pure = pure.map(|at| at.map(Instant::from_std));
        [state.retry, state.read_lists, state.ports.reopen].into_iter().chain(pure).flatten().min()
    }

    fn take(&mut self, state: &mut LoopState, input: Input) {
        match input {
            Input::Service(event) => {
                if matches!(event, Event::Apply(_) | Event::Delete { .. }) {
                    self.metrics.kube_proxy.service_changed();
                }
                state.planner.index.apply_service(event);
            }
            Input::Slice(event) => {
                if matches!(event, Event::Apply(_) | Event::Delete { .. }) {
                    self.metrics.kube_proxy.endpoints_changed();
                }
                if let Event::Apply(EndpointSlice {
                    service, family, last_change_trigger: Some(at), ..
                }) = &event
                {
                    state.pending.triggered(service, *family, *at);
                }
                state.planner.index.apply_slice(event);
            }
            Input::Node(event) => {
                if self.settings.forward_to_peers.is_some() {
                    state.planner.on_cluster_node(event.clone());
                }
                state.planner.index.apply_node(event);
            }
            Input::ClusterNode(event) => state.planner.on_cluster_node(event),
            Input::TooManyNodes => state.planner.give_cluster_nodes_up(),
            Input::ServiceCidr(event) => state.planner.on_service_cidr(event),
            Input::Foreign(noticed) => self.take_noticed(state, noticed),
            Input::HostAddresses => state.host_addresses.request(StdInstant::now()),
            Input::Routes => state.routes_changed = true,
            // The client may be gone.
            Input::Debug(DebugRequest { command, reply }) => {
                drop(reply.send(self.debug_reply(state, &command)));
            }
        }
    }

    fn debug_reply(&mut self, state: &mut LoopState, command: &DebugCommand) -> DebugReply {
        let planner = &state.planner;
        let Some((local_node, pods)) = planner.planned_node().filter(|_| state.listed) else {
            return DebugReply::Text(
                "the agent has not listed Services, slices and its node yet\n".to_owned(),
            );
        };
        match command {
            DebugCommand::Explain(query) => {
                let host = host_addresses().unwrap_or_else(|_| planner.host_addresses.clone());
                let ruleset = &self.ruleset;
                let (index, local_node) = (&planner.index, &local_node);
                let context = ExplainContext { ruleset, index, local_node, pods, host: &host };
                DebugReply::Text(explain(*query, context).to_string())
            }
            DebugCommand::Dump { .. } => {
                // It shows the order of the lists.
                let wrong = tokio::task::block_in_place(|| self.dataplane.read_all_lists(&mut self.ruleset));
                self.repaired_lists(state, wrong);
                DebugReply::Ruleset(Box::new(self.ruleset.clone()), self.dataplane.written_rules())
            }
        }
    }

    /// Plans, and writes what is due.
    fn step(&mut self, state: &mut LoopState) {
        let synced = state.planner.index.has_synced();
        if synced && !std::mem::replace(&mut state.listed, true) {
            tracing::info!("Services, slices and the node are listed");
        }
        self.show_eligible(state);
        let is_damaged = self.repair_first(state);
        self.find_peers(state);
        let begun = StdInstant::now();
        // The first write has everything: what it lacks would leave a predecessor's tables, and a tenant who changes
        // Services all the time could delay it without limit.
        let is_first = self.first.is_some();
        let is_over = || !is_first && begun.elapsed() >= PLAN_TIME;
        let desired = self.ruleset.desired();
        let Some(updates) = state.planner.plan(&self.settings, begun, desired, is_over) else { return };
        let mut reconfigured = state.planner.pods().is_some_and(|pods| self.ruleset.set_pods(pods));
        if let Some(cidrs) = state.planner.take_service_cidrs() {
            reconfigured |= self.ruleset.set_unassigned(self.settings.unassigned(cidrs));
        }
        if reconfigured || is_damaged {
            self.dataplane.mark_out_of_sync();
        }
        state.pending.note(&updates, |service| state.planner.is_waiting(service));
        if state.planner.wants_cluster_nodes()
            && let Some(start) = self.cluster_nodes.take()
        {
            let spread = if is_first { Duration::ZERO } else { NODES_SPREAD };
            // The process ends if nobody takes it.
            let _ = start.send(spread);
        }
        // A first write without external IPs would take them from a predecessor's tables.
        if !synced || is_first && state.planner.awaits_cluster_nodes() {
            // The loop would wake again and again for a write that was to be repeated.
            state.retry = None;
            return self.ruleset.stage(updates);
        }
        if state.retry.is_some_and(|at| Instant::now() < at) {
            // A failed write waits. Each of its repetitions compares everything: changes must not make them more frequent.
            self.withdraw_health(state, &updates);
            self.ruleset.stage(updates);
        } else if updates.is_empty() && self.dataplane.state() == KernelState::InSync {
            if !state.planner.has_waiting() {
                self.metrics.kube_proxy.settled();
            }
            self.ask_for_annotations(state);
        } else if self.write(state, updates) {
            self.ask_for_annotations(state);
        }
    }

    /// Whether load balancers may use this node: not before its rules are in the kernel.
    fn show_eligible(&self, state: &LoopState) {
        if state.planner.index.has_synced() {
            let is_eligible = self.first.is_none() && state.planner.is_eligible(&self.settings);
            self.proxy_health.set_eligible(is_eligible);
        }
    }

    /// Finds out where other nodes are reached, if packets are forwarded to them.
    fn find_peers(&mut self, state: &mut LoopState) {
        let (Some(flags), Some(next_hops)) = (&self.settings.forward_to_peers, &mut self.next_hops) else {
            return;
        };
        let all = std::mem::take(&mut state.routes_changed);
        let mut failure = if all { next_hops.update_devices().err() } else { None };
        let mut next_hop = |addr| {
            next_hops.next_hop(addr).unwrap_or_else(|error| {
                failure = Some(error);
                None
            })
        };
        let unreachable = state.planner.find_peers(&self.settings, flags, all, &mut next_hop);
        if let Some(error) = failure {
            tracing::warn!(%error, "ways to other nodes not found; packets without a local endpoint are not forwarded to them");
        }
        if let Some(nodes) = unreachable {
            tracing::info!(
                nodes,
                "packets are not forwarded to nodes that are neither on the link nor behind one of --forward-tunnel-devices"
            );
            self.metrics.unreachable_peers.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        }
    }

    /// Has health checks fail at once where the rules will serve less.
    fn withdraw_health(&mut self, state: &LoopState, updates: &BTreeMap<Key, ServicePlan>) {
        for (key, plan) in updates {
            let balanced = state.planner.index.service(key).is_some_and(has_load_balancer);
            self.ports.withdraw(key, plan.health.as_ref(), balanced);
        }
    }

    /// Withdraws health before the write, and publishes it after: a probe never finds more than the rules serve. Returns whether
    /// the write succeeded.
    fn write(&mut self, state: &mut LoopState, updates: BTreeMap<Key, ServicePlan>) -> bool {
        self.withdraw_health(state, &updates);
        let health = updates.iter().filter_map(|(key, plan)| Some((key.clone(), plan.health.clone()?)));
        let health: HealthPorts = health.collect();
        self.proxy_health.queued();
        self.metrics.kube_proxy.queued(self.dataplane.families());
        let started = StdInstant::now();
        // A large load takes its time in the kernel.
        let result = tokio::task::block_in_place(|| self.dataplane.write(&mut self.ruleset, updates));
        let took = started.elapsed();
        self.report_found(state);
        let index = &state.planner.index;
        state.unserved.report(&mut self.ruleset, index, &self.settings.node, &self.recorder);
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.refused_external_ips.set(count(self.ruleset.desired().refused_count()));
        self.metrics.shadowed_frontends.set(count(self.ruleset.desired().shadowed_count()));
        self.metrics.reduced_services.set(count(self.ruleset.desired().reduced_count()));
        self.metrics.write_duration.observe(took.as_secs_f64());
        for write in self.dataplane.writes() {
            self.metrics.kube_proxy.wrote(write);
        }
        match result {
            Ok(written) => {
                // Others committed before anybody watched them: everything is compared once more.
                state.retry = (self.dataplane.state() == KernelState::Unknown).then(Instant::now);
                state.writes.succeeded();
                if written.full {
                    Self::report_repaired(state, written.elements);
                }
                let is_waiting = |service: &Key| state.planner.is_waiting(service);
                state.pending.written(&self.metrics.kube_proxy, self.dataplane.families(), is_waiting);
                let ranges = if written.full { self.take_ranges_to_sweep(state) } else { BTreeMap::new() };
                self.written(written, &health, took, ranges);
            }
            Err(error) => {
                self.metrics.failures.inc();
                state.retry = Some(Instant::now() + state.writes.failed(&error));
                return false;
            }
        }
        true
    }

    fn written(
        &mut self,
        written: Written,
        health: &HealthPorts,
        took: Duration,
        ranges: BTreeMap<Frontend, Arc<[IpNet]>>,
    ) {
        let Written { elements, full, wrong_lists } = written;
        if took >= SLOW_WRITE && full && elements == 0 {
            tracing::info!(took = %duration::rounded(took), "tables compared, nothing to write; that took longer than 200ms");
        } else if took >= SLOW_WRITE {
            tracing::info!(elements, full, took = %duration::rounded(took), "rules written; the write took longer than 200ms");
        } else {
            tracing::debug!(elements, full, took = %duration::rounded(took), "rules written");
        }
        self.metrics.writes.inc();
        self.metrics.full_writes.inc_by(u64::from(full));
        self.metrics.elements.inc_by(u64::try_from(elements).unwrap_or(u64::MAX));
        self.metrics.last_write.set(jiff::Timestamp::now().as_second());
        let desired = self.ruleset.desired();
        self.metrics.frontends.set(i64::try_from(desired.frontend_count()).unwrap_or(i64::MAX));
        if full {
            // Plans of failed writes are in the kernel now, too.
            self.ports.publish(&desired.health_ports());
        } else {
            self.ports.publish(health);
        }
        self.metrics.health_ports.set(i64::try_from(self.ports.count()).unwrap_or(i64::MAX));
        self.proxy_health.updated();
        let mut stale = if full || wrong_lists > 0 {
            self.ruleset.take_all_stale_flows()
        } else {
            self.ruleset.take_stale_flows()
        };
        stale.sources = ranges;
        self.cleaner.clean(stale);
        if let Some(first) = self.first.take() {
            tracing::info!(elements, took = %duration::rounded(took), "rules written for the first time");
            first.done();
        }
    }

    /// Reads some of the long lists that a start believed, if that is due, and repairs them.
    fn read_lists(&mut self, state: &mut LoopState) {
        let now = Instant::now();
        if !self.dataplane.has_unread_lists() {
            state.read_lists = None;
        } else if state.read_lists.is_none_or(|at| at <= now) {
            // Also the next round after a failure, which compares everything.
            state.read_lists = Some(now + LISTS_INTERVAL);
            let wrong = tokio::task::block_in_place(|| self.dataplane.read_some_lists(&mut self.ruleset));
            self.repaired_lists(state, wrong);
        }
    }

    /// After a reading that no write follows.
    fn repaired_lists(&mut self, state: &mut LoopState, wrong: usize) {
        self.report_found(state);
        if wrong > 0 {
            self.cleaner.clean(self.ruleset.take_all_stale_flows());
        }
    }

    /// Asks for the Node's annotations to be written, if they are missing and the rules are in the kernel.
    fn ask_for_annotations(&self, state: &LoopState) {
        let (wanted, ask) = &self.annotations;
        let missing = self.first.is_none() && state.planner.annotations(&self.settings) != Some(wanted);
        ask.send_if_modified(|asked| std::mem::replace(asked, missing) != missing);
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
