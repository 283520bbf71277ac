// SPDX-License-Identifier: Apache-2.0
//! How the engine follows changes that need no plan: of health, of the nodes with an endpoint, and of a few load balancers.
//!
//! Each call either follows all, or says that only a plan can.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use steerage_edge_dataplane::StateChange;
use steerage_model::TunnelReceiver;

use super::{Engine, number};
use crate::index::IndexChange;
use crate::link::conflicts::AddressConflicts;
use crate::plan::{
    Amended, Changed, ChangedStatus, HealthInputs, LoadBalancerStatus, PlannedGroups, Retargeted,
};
use crate::status::Statuses;
use crate::vips::{WITHHELD, change_set};

impl Engine {
    /// A node's statement about its tunnel devices has changed. A plan follows if that decides whether the node gets new connections.
    /// Returns whether the node is refused from now on.
    pub(super) fn follow_tunnel(&mut self, address: IpAddr) -> bool {
        if !self.prober.follows_node(address) {
            return false;
        }
        let receiver = self.prober.tunnel_receiver(address);
        let before = self.health.set_tunnel_receiver(address, receiver);
        if receiver == Some(TunnelReceiver::Unknown) && before != receiver {
            tracing::info!(target_address = %address, "unknown tunnel state in the node's statement; treating the node as receiving");
        }
        let Ok(path) = self.host.reach(address) else { return false };
        let [before, now] = [before, receiver].map(|stated| self.host.refusal(address, &path, stated));
        if before == now {
            return false;
        }
        match &now {
            Some(reason) => {
                tracing::warn!(target_address = %address, reason, "node does not receive from the tunnel; sending it no new connections");
            }
            None => {
                tracing::info!(target_address = %address, "node no longer refused; sending it new connections");
            }
        }
        self.pace.request(Instant::now());
        now.is_some()
    }

    /// Lets the kernel follow load balancers that have changed, and nothing else has. Returns false where only a plan can tell what
    /// follows.
    pub(super) fn follow_load_balancers(&mut self, change: &IndexChange) -> bool {
        self.warmed_up
            && self.kernel.is_programmed()
            && self.follow_endpoints(&change.endpoints)
            && (change.load_balancers.is_empty() || self.amend(&change.load_balancers))
    }

    /// Lets this host answer for VIPs that are found to be free. Returns false where only a plan can tell what follows.
    pub(super) fn follow_conflicts(&mut self, next: AddressConflicts) -> bool {
        let before = std::mem::replace(&mut self.conflicts, next);
        if before.taken != self.conflicts.taken || self.groups.is_none() || !self.kernel.is_programmed() {
            return false;
        }
        let changed = before.free.symmetric_difference(&self.conflicts.free);
        let planned = changed.copied().filter(|vip| self.kernel.is_planned(*vip));
        let leases: BTreeMap<IpAddr, u32> =
            planned.map(|vip| (vip, self.lease(vip, self.host.lease(vip)))).collect();
        let vips = leases.iter().map(|(vip, lease)| (*vip, Some(*lease))).collect();
        if !self.write_change(StateChange { vips, ..StateChange::default() }) {
            return false;
        }
        let held = leases.into_iter().map(|(vip, lease)| (vip, lease != WITHHELD)).collect();
        self.vips.change_held(self.roles(), &held, &self.conflicts.taken);
        true
    }

    /// Lets the kernel follow these load balancers. Returns false where only a plan can tell what follows.
    fn amend(&mut self, changed: &BTreeSet<String>) -> bool {
        let now = Instant::now();
        for name in changed {
            match self.index.load_balancer(name) {
                Some(object) => self.lists.extend(self.endpoints.update(object, now)),
                None => self.endpoints.remove(name),
            }
        }
        let Some(mut groups) = self.groups.take() else { return false };
        let mut assignments = std::mem::take(&mut self.assignments);
        let amended = groups.amend(&self.plan_inputs(now), &mut assignments, changed);
        let healthy_vips = groups.healthy_vips();
        (self.groups, self.assignments) = (Some(groups), assignments);
        let Some(Amended { mut state, statuses, reports }) = amended else { return false };
        self.healthy_vips = healthy_vips;
        let planned = state.vips.iter().map(|(vip, lease)| (*vip, lease.is_some())).collect();
        self.outputs.monitored_vips.send_if_modified(|vips| change_set(vips, &planned));
        self.kernel.change_planned_vips(&self.link, &planned);
        for (vip, lease) in &mut state.vips {
            *lease = lease.map(|lease| self.lease(*vip, lease));
        }
        let is_held = |lease: &Option<u32>| lease.is_some_and(|lease| lease != WITHHELD);
        let held: BTreeMap<IpAddr, bool> =
            state.vips.iter().map(|(vip, lease)| (*vip, is_held(lease))).collect();
        if !self.write_change(state) {
            return false;
        }
        let checks = self.groups.as_mut().map(PlannedGroups::take_changed_checks).unwrap_or_default();
        for (address, sets) in &checks {
            self.health.set_checks_of(*address, sets);
        }
        let checks = checks.iter().map(|(address, sets)| (*address, sets.as_slice()));
        self.prober.set_checks_of(checks, &self.health, |target| self.host.source_for(target));
        let is_planned = |vip: &IpAddr| planned.get(vip).copied().unwrap_or_default();
        let taken = self.conflicts.taken.iter().filter(|(vip, _)| is_planned(vip));
        let taken = taken.map(|(vip, mac)| (*vip, *mac)).collect();
        self.vips.change_held(self.roles(), &held, &taken);
        self.expect();
        self.publish_changed(statuses, reports);
        true
    }

    /// Writes this alone; whether the kernel has it. If not, the next plan repeats it, and its statuses say why.
    fn write_change(&mut self, change: StateChange) -> bool {
        self.kernel.write_change(change);
        self.kernel.error().is_none()
    }

    fn publish_changed(
        &self,
        statuses: BTreeMap<String, Option<LoadBalancerStatus>>,
        reports: Vec<ChangedStatus>,
    ) {
        self.metrics.healthy.set(number(self.health.healthy()));
        if statuses.is_empty() && reports.is_empty() {
            return;
        }
        self.outputs.status.send_modify(|status| {
            for (name, of_name) in statuses {
                status.load_balancers.set(&name, of_name);
            }
            set_reports(&mut status.load_balancers, reports);
            self.count(&status.load_balancers);
        });
    }

    pub(super) fn count(&self, load_balancers: &Statuses) {
        self.metrics.load_balancers.set(number(load_balancers.len()));
        self.metrics.problems.set(number(load_balancers.with_problem()));
        self.metrics.probes.set(number(self.prober.checks()));
    }

    /// Lets the kernel follow the changed lists of these load balancers, as [`retarget`](Self::retarget) does.
    fn follow_endpoints(&mut self, load_balancers: &BTreeSet<String>) -> bool {
        let now = Instant::now();
        let changed = load_balancers.iter().filter_map(|name| self.index.load_balancer(name));
        let lists: Vec<_> = changed.filter_map(|changed| self.endpoints.update(changed, now)).collect();
        let is_followed = self.retarget(Changed { lists: &lists, ..Changed::default() });
        self.lists.extend(lists);
        if is_followed {
            self.expect();
            let generations = load_balancers.iter().filter_map(|name| {
                self.index.load_balancer(name).map(|load_balancer| (name, load_balancer.generation))
            });
            self.outputs.status.send_modify(|status| {
                for (name, generation) in generations {
                    status.load_balancers.change(name, |status| status.generation = generation);
                }
            });
        }
        is_followed
    }

    /// Lets the prober know of the changed lists, once it follows the targets of the present groups.
    pub(super) fn expect(&mut self) {
        let Some(groups) = &self.groups else { return };
        for list in std::mem::take(&mut self.lists) {
            tracing::debug!(
                load_balancer = list.load_balancer,
                joined = ?list.joined,
                left = ?list.left,
                "nodes with an endpoint changed"
            );
            for (probe, since) in groups.expected(&list) {
                self.prober.set_expected(&probe, since);
            }
        }
    }

    /// Lets the kernel follow what has changed. Returns false where only a plan can tell what follows.
    pub(super) fn retarget(&mut self, changed: Changed<'_>) -> bool {
        let Some(groups) = &mut self.groups else { return false };
        let inputs = HealthInputs {
            health: &self.health,
            endpoints: &self.endpoints,
            room: self.room,
            now: Instant::now(),
        };
        let Some(Retargeted { tables, statuses, urgent }) =
            groups.retarget(inputs, &mut self.assignments, changed)
        else {
            return false;
        };
        for (probe, is_urgent) in &urgent {
            self.prober.set_urgent(probe, *is_urgent);
        }
        self.healthy_vips = groups.healthy_vips();
        let tables = tables.into_iter().map(|(number, table)| (number, Some(table))).collect();
        if !self.write_change(StateChange { tables, ..StateChange::default() }) {
            return false;
        }
        self.publish_changed(BTreeMap::new(), statuses);
        true
    }
}

fn set_reports(load_balancers: &mut Statuses, reports: Vec<ChangedStatus>) {
    for ChangedStatus { load_balancer, position, targets } in reports {
        load_balancers.change(&load_balancer, |status| {
            if let Some(list) = status.targets.get_mut(position) {
                *list = targets;
            }
        });
    }
}
