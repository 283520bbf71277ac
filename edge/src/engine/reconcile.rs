// SPDX-License-Identifier: Apache-2.0
//! How the engine makes a whole plan, and lets the kernel, the prober and the status follow it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_dataplane::State;

use super::{Engine, done, number};
use crate::channel::send_if_changed;
use crate::plan::{LoadBalancerStatus, Plan, PlanInputs, plan};
use crate::probe_schedule::EXPECTED_FOR;
use crate::status::{HostStatus, Statuses};
use crate::vips::WITHHELD;

/// A process that finds maps waits this long for its first probes, while the kernel forwards by those: without probes no target
/// counts as healthy, and packets would go to all of them.
const WARM_UP_LIMIT: Duration = Duration::from_secs(3);

impl Engine {
    pub(super) fn reconcile(&mut self) {
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

    pub(super) fn plan_inputs(&self, now: Instant) -> PlanInputs<'_> {
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
    pub(super) fn lease(&self, vip: IpAddr, planned: u32) -> u32 {
        let is_free = self.conflicts.free.contains(&vip) || self.vips.held().contains(&vip);
        if is_free { planned } else { WITHHELD }
    }

    /// Reports the draining nodes, and which of them get no more packets.
    pub(super) fn follow_drains(&mut self) {
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
