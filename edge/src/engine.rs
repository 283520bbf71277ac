// SPDX-License-Identifier: Apache-2.0
//! The loop: gathers what the API, the link, the peers and the probes report, plans, and makes the kernel follow.
//!
//! It writes differences only. When it ends, the program and its maps stay in the kernel: losing this process must not take traffic
//! down.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_dataplane::State;
use steerage_process::{Pending, duration};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::channel::send_if_changed;
use crate::drains::Drains;
use crate::endpoint_nodes::{EndpointNodes, ListChange};
use crate::health::{HealthByProbe, Probe};
use crate::host::HostNetwork;
use crate::index::{Index, IndexChange};
use crate::kernel::Kernel;
use crate::link::ability::AbilityReport;
use crate::link::conflicts::AddressConflicts;
use crate::link::mac::{Mac, display_mac};
use crate::link::membership::Membership;
use crate::link::route::Link;
use crate::metrics::Metrics;
use crate::plan::{Assignments, Changed, LoadBalancerStatus, Plan, PlanInputs, PlannedGroups, Room, plan};
use crate::plan_pace::PlanPace;
use crate::probe_schedule::EXPECTED_FOR;
use crate::prober::{HealthChange, Prober, StatementReport};
use crate::status::{HostStatus, Statuses};
use crate::timer::sleep_until;
use crate::vips::{ServedVips, VipRoles, WITHHELD};

mod channels;
mod follow;
mod leave;

pub(crate) use channels::{Inputs, Outputs, ReadinessGates};

/// Then other inputs have their turn: nodes that state without end must not keep the engine from all else.
const MOST_STATEMENTS_AT_ONCE: usize = 16;
/// How often the host's network is read.
pub(crate) const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// A bond without members can have no address for a moment.
const NO_MAC: Mac = [0; 6];
/// A process that finds maps waits this long for its first probes, while the kernel forwards by those: without probes no target
/// counts as healthy, and packets would go to all of them.
const WARM_UP_LIMIT: Duration = Duration::from_secs(3);
/// A process announces VIPs of an earlier one after this time at the latest, if it cannot list the load balancers.
const ADOPTED_WAIT: Duration = Duration::from_secs(5);
/// Maximum time that a leaving host waits until the others know its flows.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);
/// Time that a leaving host keeps its VIPs after that. Both hosts forward alike, and the other one has just begun.
const HAND_OVER_OVERLAP: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Engine {
    link: Link,
    kernel: Kernel,
    room: Room,
    vips: ServedVips,
    prober: Prober,
    metrics: Metrics,
    outputs: Outputs,
    gates: ReadinessGates,
    index: Index,
    health: HealthByProbe,
    endpoints: EndpointNodes,
    /// Changed lists of which the prober has not heard.
    lists: Vec<ListChange>,
    host: HostNetwork,
    membership: Membership,
    conflicts: AddressConflicts,
    assignments: Assignments,
    /// The groups of the last plan, while the kernel follows it.
    groups: Option<PlannedGroups>,
    synced_at: Option<Instant>,
    warmed_up: bool,
    /// A VIP waits for probes of its new targets, for a limited time.
    is_waiting: bool,
    pace: PlanPace,
    drains: Drains,
    /// The number of VIPs with a healthy target.
    healthy_vips: u32,
    /// Among the changes of health that are being read, a node states that it does not receive from the tunnel.
    has_new_refusal: bool,
    /// The process is ending.
    is_leaving: bool,
}

impl Engine {
    /// Reads the state of the host, and changes nothing.
    pub(crate) fn new(
        link: Link,
        kernel: Kernel,
        vips: ServedVips,
        prober: Prober,
        metrics: Metrics,
        outputs: Outputs,
        gates: ReadinessGates,
    ) -> anyhow::Result<Self> {
        let adopted = kernel.adopted();
        let listeners = adopted.listeners.len();
        let mut engine = Self {
            host: HostNetwork { interface: link.name.clone(), index: link.index, ..HostNetwork::default() },
            assignments: Assignments::adopt(&adopted),
            link,
            room: kernel.room()?,
            kernel,
            vips,
            prober,
            metrics,
            outputs,
            gates,
            index: Index::default(),
            health: HealthByProbe::default(),
            endpoints: EndpointNodes::default(),
            lists: Vec::new(),
            membership: Membership::default(),
            conflicts: AddressConflicts::default(),
            groups: None,
            synced_at: None,
            warmed_up: listeners == 0,
            is_waiting: false,
            pace: PlanPace::default(),
            drains: Drains::default(),
            healthy_vips: 0,
            has_new_refusal: false,
            is_leaving: false,
        };
        engine.refresh()?;
        tracing::info!(
            interface = engine.link.name,
            vips = adopted.vips.len(),
            listeners,
            "read the host's network and the kernel's maps"
        );
        Ok(engine)
    }

    /// Runs until shutdown, and until the VIPs are handed over where another host is there.
    pub(crate) async fn run(mut self, mut inputs: Inputs) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(REFRESH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        // When this host leaves at the latest, although no other one can serve; and when it ends at the latest.
        let (mut end, mut deadline) = (None, None);
        loop {
            self.report_ability();
            // Probes whose health has changed, or load balancers, if nothing else has.
            let (mut changed, mut of_index) = (None, None);
            let mut ports = BTreeSet::new();
            tokio::select! {
                () = inputs.shutdown.cancelled(), if end.is_none() => {
                    let at = *end.insert(tokio::time::Instant::now() + inputs.hand_over_wait);
                    if self.membership.has_standby || !self.vips.has_any() {
                        deadline = Some(self.begin_to_leave(FLUSH_LIMIT, at).await);
                    } else if !inputs.hand_over_wait.is_zero() {
                        tracing::info!(wait = %duration::display(inputs.hand_over_wait), "no other edge host can serve; waiting for one");
                    }
                }
                () = sleep_until(end), if deadline.is_none() && end.is_some() => {
                    deadline = Some(self.begin_to_leave(Duration::ZERO, tokio::time::Instant::now()).await);
                }
                () = sleep_until(deadline), if deadline.is_some() => break,
                Some(event) = inputs.events.recv() => {
                    let mut change = IndexChange::default();
                    self.index.apply(event, &mut change);
                    while let Ok(event) = inputs.events.try_recv() {
                        self.index.apply(event, &mut change);
                    }
                    if change == IndexChange::default() && self.groups.is_some() {
                        // A list has shown nothing new.
                        continue;
                    }
                    of_index = change.is_of_load_balancers().then_some(change);
                }
                Some(change) = inputs.health.recv() => {
                    changed = self.read_health(change, &mut inputs.health, &mut ports);
                }
                Some(report) = inputs.statements.recv() => {
                    self.record_statements(&report, &mut inputs.statements);
                    continue;
                }
                () = sleep_until(self.pace.due()) => {}
                Ok(()) = inputs.membership.changed() => {
                    let next = inputs.membership.borrow_and_update().clone();
                    self.update_membership(next);
                    if let Some(at) = end.filter(|_| deadline.is_none() && self.membership.has_standby) {
                        deadline = Some(self.begin_to_leave(FLUSH_LIMIT, at).await);
                    }
                }
                Ok(()) = inputs.conflicts.changed() => {
                    let next = inputs.conflicts.borrow_and_update().clone();
                    if tokio::task::block_in_place(|| self.follow_conflicts(next)) {
                        continue;
                    }
                }
                Some((vip, mac)) = inputs.claims.recv() => {
                    self.vips.defend(self.roles(), vip, mac, Instant::now());
                    continue;
                }
                _ = ticks.tick() => {
                    let is_due = self.groups.as_ref().is_some_and(|groups| groups.is_due(Instant::now()));
                    let has_changed = tokio::task::block_in_place(|| self.refresh())?;
                    self.follow_drains();
                    if !has_changed && self.warmed_up && !self.is_waiting {
                        if !is_due {
                            continue;
                        }
                        changed = Some(Vec::new());
                    }
                }
            }
            tokio::task::block_in_place(|| {
                if let Some(changed) = changed {
                    let ports = Vec::from_iter(ports);
                    if !self.retarget(Changed { probes: &changed, ports: &ports, lists: &[] }) {
                        self.pace.request(Instant::now());
                    }
                } else if let Some(change) = of_index
                    && self.follow_load_balancers(&change)
                {
                    // No plan is needed.
                } else {
                    let begun = Instant::now();
                    self.reconcile();
                    self.pace.record(begun, Instant::now());
                }
            });
            if let Some(deadline) = &mut deadline {
                if !self.vips.has_any() {
                    break;
                }
                if self.vips.are_answered_by(self.membership.others_active) {
                    *deadline = (*deadline).min(tokio::time::Instant::now() + HAND_OVER_OVERLAP);
                }
            }
        }
        self.hand_over();
        Ok(())
    }

    /// Records this report, and some of those that wait.
    fn record_statements(&mut self, report: &StatementReport, more: &mut mpsc::Receiver<StatementReport>) {
        let urgency = |probe: &Probe| self.groups.as_ref()?.urgency(probe);
        self.prober.record(report, &self.health, urgency);
        for _ in 0..MOST_STATEMENTS_AT_ONCE {
            let Ok(report) = more.try_recv() else { break };
            self.prober.record(&report, &self.health, urgency);
        }
    }

    fn report_ability(&self) {
        self.outputs.abilities.send_replace(AbilityReport {
            at: Instant::now(),
            has_synced: self.index.has_synced(),
            is_programmed: self.kernel.is_programmed(),
            healthy_vips: self.healthy_vips,
        });
    }

    fn roles(&self) -> VipRoles {
        VipRoles::new(&self.membership, self.is_leaving)
    }

    /// Reads this change, and those that wait. Returns the probes whose health has changed; `None` if a plan has to follow at once.
    fn read_health(
        &mut self,
        change: HealthChange,
        more: &mut mpsc::UnboundedReceiver<HealthChange>,
        ports: &mut BTreeSet<u16>,
    ) -> Option<Vec<Probe>> {
        let mut changed = Vec::from_iter(self.update_health(change, ports));
        while let Ok(change) = more.try_recv() {
            changed.extend(self.update_health(change, ports));
        }
        // A refused node that is healthy would get connections until the plan, which waits only in a large cluster.
        let is_refused = std::mem::take(&mut self.has_new_refusal);
        let plans_now = is_refused && self.pace.due().is_some_and(|due| due <= tokio::time::Instant::now());
        (!plans_now).then_some(changed)
    }

    /// Returns the probe if that is news. Adds ports that a node states now and did not, or no longer.
    fn update_health(&mut self, change: HealthChange, changed_ports: &mut BTreeSet<u16>) -> Option<Probe> {
        let (probe, health) = match change {
            HealthChange::Target(probe, health) => (probe, health),
            HealthChange::Stated(address, ports) => {
                if self.prober.follows_node(address) {
                    match self.health.set_stated(address, ports) {
                        Some(ports) => changed_ports.extend(ports),
                        // All groups count the nodes that have never stated anything. That rarely changes which targets a group uses,
                        // so the plan may wait.
                        None => self.pace.request(Instant::now()),
                    }
                }
                return None;
            }
            HealthChange::Tunnel(address, receiver) => {
                self.has_new_refusal |= self.follow_tunnel(address, receiver);
                return None;
            }
        };
        let health = self.prober.stated_health(&probe).unwrap_or(health);
        // A result may come after the last load balancer with this check has gone.
        if !self.prober.follows(&probe) || self.health.is_known(&probe, &health) {
            return None;
        }
        let known = self.health.get(&probe);
        if known.is_some_and(|known| !known.says_as(&health)) {
            tracing::info!(
                target_address = %probe.address,
                port = probe.check.port,
                state = ?health.state,
                weight = health.weight,
                reason = health.reason,
                "target health changed"
            );
        } else {
            // After a start there is one for each endpoint, and so where a node begins or ends to state them.
            tracing::debug!(target_address = %probe.address, port = probe.check.port, state = ?health.state, "target health known");
        }
        self.health.insert(probe.clone(), health);
        Some(probe)
    }

    fn update_membership(&mut self, next: Membership) {
        let before = std::mem::replace(&mut self.membership, next);
        let Membership { active, live, settled, .. } = self.membership;
        let gained = active - before.active;
        if active != before.active {
            let lost = before.active - active;
            tracing::info!(
                gained = gained.len(),
                lost = lost.len(),
                shards = active.len(),
                peers = live,
                "role changed: this host is active for these shards of the VIPs"
            );
            self.metrics.takeovers.inc_by(gained.len().into());
        }
        let left = self.membership.departures.since(&before.departures) & active;
        let announced = gained | left;
        if !announced.is_empty() {
            if self.kernel.is_programmed() {
                self.vips.announce_shards(announced);
            } else {
                // Those of an earlier process: the load balancer of one may be gone, which the first plan shows.
                self.vips.announce_all_in(ADOPTED_WAIT);
            }
        }
        self.metrics.active.set((!active.is_empty()).into());
        self.metrics.shards.set(active.len().into());
        self.metrics.peers.set(i64::try_from(live).unwrap_or(i64::MAX));
        if settled {
            done(&mut self.gates.settled);
        }
    }

    /// Reads the host's network; whether it differs from what is known, or a write is to be repeated.
    fn refresh(&mut self) -> anyhow::Result<bool> {
        self.refresh_link()?;
        self.vips.tick(Instant::now());
        let host = self.kernel.network(&self.host)?;
        send_if_changed(&self.outputs.addresses, host.own_addresses());
        let host_changed = match &self.groups {
            Some(groups) => !host.is_alike(&self.host, || groups.target_addresses(&self.assignments)),
            None => host != self.host,
        };
        self.host = host;
        let must_write = self.kernel.repair(&self.link);
        Ok(host_changed || must_write)
    }

    /// Announces the VIPs again if the interface was disconnected or has another Ethernet address: it may lead to another port of
    /// the switch, and clients' routers know the old address.
    fn refresh_link(&mut self) -> anyhow::Result<()> {
        let link = self.kernel.link(&self.link)?;
        let was_disconnected = link.carrier_changes != self.link.carrier_changes;
        if link.mac != self.link.mac && link.mac != NO_MAC {
            tracing::warn!(
                interface = link.name,
                old = %display_mac(self.link.mac),
                new = %display_mac(link.mac),
                "the interface's Ethernet address has changed; announcing the VIPs if this host is active"
            );
            self.kernel.set_mac(link.mac);
            self.outputs.mac.send_replace(link.mac);
            self.link = link;
            self.vips.announce_all();
        } else if was_disconnected && link.has_carrier {
            tracing::info!(
                interface = link.name,
                "the interface is connected again; announcing the VIPs if this host is active"
            );
            self.link = link;
            // Another host may have taken over, and its heartbeat not have come yet.
            self.vips.announce_all_when_heard();
        }
        Ok(())
    }

    fn reconcile(&mut self) {
        self.groups = None;
        self.host.peers.clone_from(&self.membership.peers);
        self.host.conflicts.clone_from(&self.conflicts.taken);
        if !self.index.has_synced() {
            // Without the API only the lease can be decided. The maps stay as they were left.
            return;
        }
        done(&mut self.gates.synced);
        if !self.membership.settled {
            // The plan needs the other hosts: their addresses are no VIPs.
            return;
        }
        let now = Instant::now();
        self.lists.retain(|list| now < list.at + EXPECTED_FOR);
        self.lists.extend(self.endpoints.sync(&self.index, now));
        let Plan { state, checks, is_tried, statuses, is_waiting, groups, assignments } =
            plan(&self.plan_inputs(now), &self.assignments);
        self.assignments = assignments;
        self.is_waiting = is_waiting;
        self.healthy_vips = groups.healthy_vips();
        self.health.set_checks(&checks);
        self.prober.set_checks(&checks, &self.health, |target| self.host.source_for(target));
        let vips: BTreeSet<_> = state.vips.keys().copied().collect();
        // All, also those in conflict: the detection checks each.
        send_if_changed(&self.outputs.monitored_vips, vips.clone());
        self.kernel.set_planned_vips(&self.link, vips);
        let synced_at = *self.synced_at.get_or_insert(now);
        // A target counts once its first probe has ended, answered or not: one that refuses must not delay all VIPs.
        self.warmed_up |= is_tried || now.duration_since(synced_at) >= WARM_UP_LIMIT;
        if !self.warmed_up {
            return;
        }
        if self.write(state) {
            self.groups = Some(groups);
            self.expect();
        }
        self.publish(statuses);
    }

    fn plan_inputs(&self, now: Instant) -> PlanInputs<'_> {
        PlanInputs {
            index: &self.index,
            host: &self.host,
            health: &self.health,
            endpoints: &self.endpoints,
            room: self.room,
            now,
        }
    }

    /// Writes the maps; whether the kernel has all. This host does not answer for VIPs that another machine on the link may have.
    fn write(&mut self, mut state: State) -> bool {
        for (vip, lease) in &mut state.vips {
            *lease = self.lease(*vip, *lease);
        }
        let held = state.vips.iter().filter(|(_, lease)| **lease != WITHHELD).map(|(vip, _)| *vip).collect();
        let taken = self.conflicts.taken.iter().filter(|(vip, _)| state.vips.contains_key(vip));
        let taken = taken.map(|(vip, mac)| (*vip, *mac)).collect();
        let was_programmed = self.kernel.is_programmed();
        if !self.kernel.write(&self.link, state) {
            return false;
        }
        self.vips.forward(&self.membership);
        self.vips.set_held(self.roles(), &held, &taken);
        done(&mut self.gates.programmed);
        if !was_programmed {
            self.vips.announce_pending();
        }
        true
    }

    /// The lease of a VIP for which the plan has this one.
    fn lease(&self, vip: IpAddr, planned: u32) -> u32 {
        let is_free = self.conflicts.free.contains(&vip) || self.vips.held().contains(&vip);
        if is_free { planned } else { WITHHELD }
    }

    /// Reports the draining nodes, and which of them get no more packets.
    fn follow_drains(&mut self) {
        if let Some(groups) = &self.groups {
            self.drains.set_nodes(groups.draining());
        }
        let number = |address| self.assignments.target_number(address);
        let packets = |address| number(address).map_or(Ok(0), |number| self.kernel.packets_to(number));
        let report = self.drains.follow(packets, Instant::now());
        self.outputs.status.send_if_modified(|status| {
            let has_changed = !status.interface.is_empty() && status.draining != report;
            if has_changed {
                status.draining = report;
            }
            has_changed
        });
    }

    fn publish(&self, mut statuses: BTreeMap<String, LoadBalancerStatus>) {
        if let Some(error) = self.kernel.error() {
            for status in statuses.values_mut() {
                status.problem = format!(
                    "The kernel does not have the last change: {error}. It forwards as before. The edge host retries."
                );
            }
        }
        let load_balancers: Statuses = statuses.into_iter().collect();
        self.count(&load_balancers);
        self.metrics.healthy.set(number(self.health.healthy()));
        self.outputs.status.send_replace(HostStatus {
            interface: self.link.name.clone(),
            addresses: self.host.own_addresses(),
            active: self.membership.active,
            draining: self.drains.report(),
            load_balancers,
        });
    }
}

fn done(gate: &mut Option<Pending>) {
    if let Some(pending) = gate.take() {
        pending.done();
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
