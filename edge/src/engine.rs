// SPDX-License-Identifier: Apache-2.0
//! The loop: gathers what the API, the link, the peers and the probes report, plans, and makes the kernel follow.
//!
//! It writes differences only. When it ends, the program and its maps stay in the kernel: losing this process must not take traffic
//! down.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use steerage_process::Pending;
use tokio::time::MissedTickBehavior;

use crate::drains::Drains;
use crate::endpoint_nodes::{EndpointNodes, ListChange};
use crate::health::HealthByProbe;
use crate::host::HostNetwork;
use crate::index::{Index, IndexChange};
use crate::kernel::Kernel;
use crate::link::ability::AbilityReport;
use crate::link::conflicts::AddressConflicts;
use crate::link::membership::Membership;
use crate::link::route::Link;
use crate::metrics::Metrics;
use crate::plan::{Assignments, Changed, PlannedGroups, Room};
use crate::plan_pace::PlanPace;
use crate::prober::Prober;
use crate::timer::sleep_until;
use crate::vips::{ServedVips, VipRoles};

mod channels;
mod follow;
mod health;
mod host;
mod leave;
mod reconcile;

pub(crate) use channels::{Inputs, Outputs, ReadinessGates};
pub(crate) use leave::LONGEST_HAND_OVER;
use leave::Leaving;

/// How often the host's network is read.
pub(crate) const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

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
        let mut leaving = Leaving::default();
        loop {
            self.report_ability();
            // Probes whose health has changed, or load balancers, if nothing else has.
            let (mut changed, mut of_index) = (None, None);
            let mut ports = BTreeSet::new();
            tokio::select! {
                () = inputs.shutdown.cancelled(), if leaving.is_not_begun() => {
                    leaving = self.begin_to_leave(inputs.hand_over_wait);
                }
                () = leaving.until_due() => match self.continue_to_leave(&leaving) {
                    Some(next) => leaving = next,
                    None => break,
                },
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
                    leaving = self.look_for_successor(leaving);
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
            if self.has_left(&mut leaving) {
                break;
            }
        }
        self.hand_over();
        Ok(())
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
}

fn done(gate: &mut Option<Pending>) {
    if let Some(pending) = gate.take() {
        pending.done();
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
