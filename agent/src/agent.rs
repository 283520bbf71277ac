// SPDX-License-Identifier: Apache-2.0
//! The loop: takes in what the watches say, plans, lowers health, writes, raises health.
//!
//! It applies at once when idle; what comes in while a write runs is taken together in the next one. Nothing is written before
//! Services, slices and this node have been listed; what the lists bring is planned while they come.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use steerage_model::{EndpointSlice, Key, Node, Service, ServiceCidr};
use steerage_process::Pending;
use steerage_watch::events::{Notice, Recorder, Severity, Subject};
use steerage_watch::{Event, Index, Store};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::debug_socket::{DebugCommand, DebugReply, DebugRequest};
use crate::dump::Snapshot;
use crate::explain::{ExplainContext, explain};
use crate::health::{HealthCheckPorts, Listeners, ProxyHealth};
use crate::kernel::{Applied, Dataplane, FlowCleaner};
use crate::local_node::{LocalNode, LocalPods};
use crate::metrics::Metrics;
use crate::plan::{HealthPorts, PolicyTransitions, ServicePlan, has_load_balancer, plan_service};
use crate::settings::{AgentSettings, host_addresses};

/// Waits after failed writes: from the first, doubling, to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// A write that takes longer is told.
const SLOW: Duration = Duration::from_millis(200);
/// How often busy ports are tried again.
const REOPEN: Duration = Duration::from_secs(2);

/// What the loop hears.
#[allow(clippy::large_enum_variant, reason = "moved once through a queue; a box would cost more")]
#[derive(Debug)]
pub enum Input {
    /// From the watch of Services.
    Service(Event<Service>),
    /// From the watch of slices.
    Slice(Event<EndpointSlice>),
    /// From the watch of this node.
    Node(Event<Node>),
    /// From the watch of the networks of cluster IPs, where there is one: nothing waits for it.
    ServiceCidr(Event<ServiceCidr>),
    /// Somebody else changed our tables.
    Foreign,
    /// Addresses of this host came or went.
    Addresses,
    /// Somebody asks.
    Debug(DebugRequest),
}

/// What the loop works with.
pub struct Agent {
    /// What flags say.
    pub settings: AgentSettings,
    /// The rules in the kernel.
    pub dataplane: Dataplane,
    /// Ends stale UDP flows.
    pub cleaner: FlowCleaner,
    /// What health-check ports answer.
    pub ports: HealthCheckPorts,
    /// Whether the data plane follows.
    pub proxy_health: ProxyHealth,
    /// The servers on those ports.
    pub listeners: Listeners,
    /// Tells users.
    pub recorder: Recorder,
    /// Whether the node has to be annotated, and the value.
    pub announcement: (watch::Sender<bool>, String),
    /// Counts.
    pub metrics: Metrics,
    /// Done when the rules are in the kernel for the first time.
    pub first: Option<Pending>,
}

impl Agent {
    /// Follows the inputs until `shutdown`; then leaves the rules as they are.
    pub async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let mut state = LoopState { host: self.settings.host_addresses(), ..LoopState::default() };
        loop {
            let wake = self.next_deadline(&state);
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                input = inputs.recv() => match input {
                    Some(input) => self.take(&mut state, input),
                    None => return Ok(()),
                },
                () = until(wake) => {},
            }
            while let Ok(input) = inputs.try_recv() {
                self.take(&mut state, input);
            }
            if std::mem::take(&mut state.readdressed) {
                state.host = self.settings.host_addresses();
            }
            self.step(&mut state);
            self.ports.expire();
            self.open_ports(&mut state);
        }
    }

    /// When there is something to do though nothing is heard. An idle agent has none.
    fn next_deadline(&self, state: &LoopState) -> Option<Instant> {
        let retry = state.retry.map(|(at, _)| at);
        let pure = [state.transitions.next(), self.ports.next_expiry()].map(|at| at.map(Instant::from_std));
        [retry, state.reopen].into_iter().chain(pure).flatten().min()
    }

    fn take(&self, state: &mut LoopState, input: Input) {
        match input {
            Input::Service(event) => {
                if matches!(event, Event::Apply(_) | Event::Delete(_)) {
                    self.metrics.kube_proxy.service_changed();
                }
                state.index.apply_service(event);
            }
            Input::Slice(event) => {
                if matches!(event, Event::Apply(_) | Event::Delete(_)) {
                    self.metrics.kube_proxy.endpoints_changed();
                }
                if let Event::Apply(EndpointSlice { service, last_change_trigger: Some(at), .. }) = &event {
                    state.triggers.push((service.clone(), *at));
                }
                state.index.apply_slice(event);
            }
            Input::Node(event) => state.index.apply_node(event),
            Input::ServiceCidr(event) => {
                // A list counts once it is complete, so that the rules are not written for each of its items.
                let whole = !matches!(event, Event::Init | Event::InitApply(_));
                state.service_cidrs.apply(event, |_, _| {});
                state.numbered |= whole;
            }
            Input::Foreign => {
                tracing::warn!("somebody else may have changed our tables: they are compared");
                self.metrics.foreign_changes.inc();
                state.foreign = true;
            }
            Input::Addresses => state.readdressed = true,
            // Who asked may be gone.
            Input::Debug(DebugRequest { command, reply }) => {
                drop(reply.send(self.debug_reply(state, &command)))
            }
        }
    }

    fn debug_reply(&self, state: &LoopState, command: &DebugCommand) -> DebugReply {
        let Some((local_node, pods)) = state.local_node.as_ref().filter(|_| state.listed) else {
            return DebugReply::Text("the agent does not know the cluster yet\n".to_owned());
        };
        let host = host_addresses();
        let desired = self.dataplane.desired();
        let unserved = &self.dataplane.shape().unserved;
        let known = ExplainContext { desired, index: &state.index, local_node, pods, host: &host, unserved };
        match command {
            DebugCommand::Explain(question) => DebugReply::Text(explain(*question, known).to_string()),
            DebugCommand::Dump { .. } => {
                let shape = self.dataplane.shape().clone();
                DebugReply::Snapshot(Box::new(Snapshot { desired: desired.clone(), shape }))
            }
        }
    }

    /// Plans and writes what is due.
    fn step(&mut self, state: &mut LoopState) {
        let synced = state.index.has_synced();
        if synced && !std::mem::replace(&mut state.listed, true) {
            tracing::info!("Services, slices and the node are listed");
        }
        let own = state.index.node(&self.settings.node);
        if synced {
            self.proxy_health.set_eligible(own.is_some_and(|node| !node.deleting && !node.autoscaler_taint));
        }
        let local_node =
            own.map(|node| (self.settings.local_node(node, &state.host), self.settings.pods(node)));
        // A node that went from the API keeps the place it had, until the machine goes too.
        let Some((local_node, pods)) = local_node.or_else(|| state.local_node.clone()) else { return };
        let announced = own.and_then(|node| node.agent.clone());

        if std::mem::take(&mut state.numbered) {
            self.dataplane.drop_unassigned(self.settings.unserved(&state.service_cidrs));
        }
        let updates = state.updates(local_node, pods);
        state.note(&updates);
        if !synced {
            self.dataplane.stage(updates);
            return;
        }
        if std::mem::take(&mut state.foreign) {
            self.dataplane.mark_out_of_sync();
        }
        let due = state.retry.is_none_or(|(at, _)| Instant::now() >= at);
        if updates.is_empty() && !(self.dataplane.is_out_of_sync() && due) {
            if !self.dataplane.is_out_of_sync() {
                self.metrics.kube_proxy.settled();
            }
            self.ask_to_announce(announced.as_deref());
            return;
        }
        for (key, plan) in &updates {
            let balanced = state.index.service(key).is_some_and(has_load_balancer);
            self.ports.withdraw(key, plan.health.as_ref(), balanced);
        }
        let raised = updates.iter().filter_map(|(key, plan)| Some((key.clone(), plan.health.clone()?)));
        let raised: HealthPorts = raised.collect();
        self.proxy_health.queued();
        self.metrics.kube_proxy.queued();
        let started = std::time::Instant::now();
        let pods = state.local_node.as_ref().map(|(_, pods)| pods.clone()).unwrap_or_default();
        // A large load takes its time in the kernel.
        let result = tokio::task::block_in_place(|| self.dataplane.apply(updates, &pods));
        self.metrics.apply_seconds.observe(started.elapsed().as_secs_f64());
        match result {
            Ok(applied) => {
                state.retry = None;
                let triggers = std::mem::take(&mut state.triggers).into_iter().map(|(_, at)| at);
                self.metrics.kube_proxy.synced(applied.full, started.elapsed(), triggers);
                let [internal, external] = &state.not_local;
                self.metrics.kube_proxy.without_local_endpoints(internal.len(), external.len());
                self.applied(applied, &raised, started.elapsed());
                self.ask_to_announce(announced.as_deref());
            }
            Err(error) => {
                self.metrics.failures.inc();
                self.metrics.kube_proxy.failed();
                let wait = state.retry.map_or(BACKOFF.0, |(_, wait)| (wait * 2).min(BACKOFF.1));
                tracing::error!(%error, wait_seconds = wait.as_secs_f64(), "rules could not be written");
                state.retry = Some((Instant::now() + wait, wait));
            }
        }
    }

    fn applied(&mut self, applied: Applied, raised: &HealthPorts, took: Duration) {
        let Applied { elements, full, udp } = applied;
        let seconds = took.as_secs_f64();
        if took >= SLOW {
            tracing::info!(elements, full, seconds, "rules are in the kernel; the write took long");
        } else {
            tracing::debug!(elements, full, seconds, "rules are in the kernel");
        }
        self.metrics.applies.inc();
        self.metrics.full_applies.inc_by(u64::from(full));
        self.metrics.elements.inc_by(u64::try_from(elements).unwrap_or(u64::MAX));
        self.metrics.last_apply.set(jiff::Timestamp::now().as_second());
        let desired = self.dataplane.desired();
        self.metrics.frontends.set(i64::try_from(desired.frontend_count()).unwrap_or(i64::MAX));
        if full {
            // Earlier plans may have waited for this write too.
            self.ports.publish(&desired.health_ports());
        } else {
            self.ports.publish(raised);
        }
        self.metrics.health_ports.set(i64::try_from(self.ports.count()).unwrap_or(i64::MAX));
        self.proxy_health.updated();
        self.cleaner.clean(udp);
        if let Some(first) = self.first.take() {
            tracing::info!(elements, seconds, "rules are in the kernel for the first time");
            first.done();
        }
    }

    fn ask_to_announce(&self, announced: Option<&str>) {
        let (ask, value) = &self.announcement;
        let missing = self.first.is_none() && announced != Some(value.as_str());
        ask.send_if_modified(|asked| std::mem::replace(asked, missing) != missing);
    }

    fn open_ports(&mut self, state: &mut LoopState) {
        let Some((local_node, _)) = &state.local_node else { return };
        let version = (self.ports.version(), local_node.node_port_addresses.clone());
        let again = state.reopen.is_some_and(|at| at <= Instant::now());
        // Not before the rules are in the kernel: then the first answer is the right one.
        if self.first.is_some() || (state.opened.as_ref() == Some(&version) && !again) {
            return;
        }
        state.opened = Some(version);
        let busy = self.listeners.reconcile(&local_node.node_port_addresses);
        state.reopen = self.listeners.has_busy_ports().then(|| Instant::now() + REOPEN);
        for busy in busy {
            tracing::warn!(
                service = %busy.service, address = %busy.address, error = %busy.error,
                "health check port cannot be opened"
            );
            if let Some(service) = state.index.service(&busy.service) {
                self.recorder.publish(Notice {
                    subject: Subject::service(service),
                    severity: Severity::Warning,
                    reason: "FailedToStartServiceHealthcheck",
                    action: "Listen",
                    note: format!(
                        "node {} cannot listen on {} for health checks: {}; it keeps trying, and the load balancer does not \
                         see this node until the port is free",
                        local_node.node, busy.address, busy.error
                    ),
                });
            }
        }
    }
}

/// What the loop knows.
#[derive(Default)]
struct LoopState {
    index: Index,
    /// All lists were complete once.
    listed: bool,
    /// This node's place and what tells its pods, as last planned with.
    local_node: Option<(LocalNode, LocalPods)>,
    host: Vec<IpAddr>,
    /// The host's addresses have to be read again.
    readdressed: bool,
    foreign: bool,
    service_cidrs: Store<ServiceCidr>,
    /// Those have been heard of.
    numbered: bool,
    /// Services whose load balancers may be late.
    transitions: PolicyTransitions,
    /// The version of the ports, and the addresses, for which servers were opened.
    opened: Option<(u64, Vec<IpAddr>)>,
    /// When busy ports are tried again.
    reopen: Option<Instant>,
    /// When a failed write is tried again, and how long that was waited for.
    retry: Option<(Instant, Duration)>,
    /// What the slices say that changed since the last write: for which Service, and when that began which they reflect.
    triggers: Vec<(Key, SystemTime)>,
    /// Services of internal, and of external, policy Local that have endpoints, but none on this node.
    not_local: [BTreeSet<Key>; 2],
}

impl LoopState {
    /// Notes for the metrics what the plans say.
    fn note(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        // What is served by others is not ours to count.
        self.triggers
            .retain(|(service, _)| updates.get(service).is_none_or(|plan| !plan.frontends.is_empty()));
        for (key, plan) in updates {
            for (set, lacks) in self.not_local.iter_mut().zip(plan.lacks_local()) {
                if lacks {
                    set.insert(key.clone());
                } else {
                    set.remove(key);
                }
            }
        }
    }

    /// The plans that changed.
    fn updates(&mut self, local_node: LocalNode, pods: LocalPods) -> BTreeMap<Key, ServicePlan> {
        let now = Instant::now().into_std();
        let mut dirty = self.index.take_dirty().services;
        for key in &dirty {
            self.transitions.observe(key, self.index.service(key), now);
        }
        dirty.extend(self.transitions.expire(now));
        let moved = self.local_node.as_ref().map(|(old, _)| old) != Some(&local_node);
        let shaped = self.local_node.as_ref().map(|(_, old)| old) != Some(&pods);
        let plan = |key: &Key| {
            let plan = self.index.service(key).map(|service| plan_service(service, &self.index, &local_node));
            let mut plan = plan.unwrap_or_default();
            if self.transitions.contains(key) {
                plan.fall_back_to_cluster_policy();
            }
            (key.clone(), plan)
        };
        if moved || shaped {
            dirty.extend(self.index.services().map(|service| service.key.clone()));
        }
        let updates = dirty.iter().map(plan).collect();
        self.local_node = Some((local_node, pods));
        updates
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
