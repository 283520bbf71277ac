// SPDX-License-Identifier: Apache-2.0
//! What follows from the change of a few load balancers without a plan: only they, and those that name the same addresses, are accepted
//! and get targets again. Pure, called by `engine`.
//!
//! A plan costs as much as there are load balancers. It must come to the same result as a plan; where that is not certain it comes to
//! none, and whatever it has done to the numbers and tables until then is what a plan may begin with.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_dataplane::StateChange;
use steerage_edge_dataplane::packet::maps::ListenerKey;

use super::accept::{Accepted, accept_these};
use super::ledger::Counted;
use super::report::GroupReport;
use super::retarget::{ChangedStatus, PlannedGroup, PlannedGroups, drains};
use super::select::{Frontend, Selection, select};
use super::targets::TargetGroup;
use super::{Assignments, LoadBalancerStatus, PlanInputs, serve, statuses};
use crate::checks::CheckSet;
use crate::index::LoadBalancer;
use crate::numbers::target_state;

/// What has changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Amended {
    /// Of what the kernel's maps should hold.
    pub(crate) state: StateChange,
    /// By name of the load balancer; `None` of one that is gone.
    pub(crate) statuses: BTreeMap<String, Option<LoadBalancerStatus>>,
    /// Of other load balancers.
    pub(crate) reports: Vec<ChangedStatus>,
}

/// A group before the change.
struct Before {
    group: TargetGroup,
    vips: u32,
}

/// Groups that may change, by position; `None` of those that were not there.
type Touched = BTreeMap<usize, Option<Before>>;

impl PlannedGroups {
    /// What the change of these load balancers leads to; `None` if only a plan can say. The node sets and the host's network have to be
    /// those of the last plan.
    pub(crate) fn amend(
        &mut self,
        inputs: &PlanInputs<'_>,
        assignments: &mut Assignments,
        changed: &BTreeSet<String>,
    ) -> Option<Amended> {
        if !self.is_settled || self.is_due(inputs.now) || !self.ledger.is_valid(inputs.now) {
            return None;
        }
        let names = self.ledger.affected(inputs.index, changed)?;
        let objects: Vec<&LoadBalancer> =
            names.iter().filter_map(|name| inputs.index.load_balancer(name)).collect();
        let accepted = accept_these(inputs, &objects);
        let lacks_targets = accepted.iter().any(|accepted| accepted.targets.is_none());
        if lacks_targets || !self.ledger.fits(&names, &accepted, inputs.room) {
            return None;
        }
        let selection = select(inputs, &accepted, assignments, &mut self.ledger.reachables);
        let waits = |frontend: &Frontend<'_>| frontend.group != frontend.reported;
        if selection.is_waiting || selection.frontends.iter().any(waits) {
            return None;
        }
        // From here on the groups are of no use unless all succeeds.
        self.is_settled = false;
        let amended = self.follow(inputs, assignments, &names, &accepted, selection)?;
        self.is_settled = true;
        Some(amended)
    }

    fn follow(
        &mut self,
        inputs: &PlanInputs<'_>,
        assignments: &mut Assignments,
        names: &BTreeSet<String>,
        accepted: &[Accepted<'_>],
        selection: Selection<'_>,
    ) -> Option<Amended> {
        let Selection { groups, frontends, in_use, .. } = selection;
        let mut amended = Amended {
            statuses: names.iter().map(|name| (name.clone(), None)).collect(),
            ..Amended::default()
        };
        let new = statuses(inputs.index, accepted, &groups, &frontends);
        amended.statuses.extend(new.into_iter().map(|(name, status)| (name, Some(status))));
        let mut touched = Touched::new();
        let mut old = (BTreeSet::new(), Vec::new());
        for name in names {
            self.take_out(name, &mut touched, &mut old);
        }
        for accepted in accepted {
            self.ledger.enter(accepted);
        }
        let positions: Vec<usize> =
            groups.into_iter().map(|group| self.put_in(group, &mut touched)).collect();
        let mut places = BTreeMap::<&str, usize>::new();
        for Frontend { load_balancer, group, .. } in &frontends {
            let (name, position) = (load_balancer.object.name.as_str(), *positions.get(*group)?);
            let place = places.entry(name).or_default();
            self.groups.get_mut(&position)?.add_user(name, *place);
            self.ledger.use_group(name, position);
            *place += 1;
        }
        let was_node = assignments.is_node(inputs.host, &self.ledger);
        let mut has_draining = false;
        for (position, before) in touched {
            has_draining |= self.settle(position, before.as_ref(), names, assignments, &mut amended);
        }
        if has_draining {
            self.collect_draining();
        }
        for (address, is_used) in self.ledger.take_touched() {
            if let Some(number) = assignments.number(address, is_used, inputs.now) {
                amended.state.targets.insert(number, Some(target_state(address, inputs.host)));
            }
        }
        let is_node = assignments.is_node(inputs.host, &self.ledger);
        if is_node != was_node || !self.used.fits(inputs.room) || assignments.has_too_many_removed() {
            return None;
        }
        amended.state.senders = self.ledger.senders.changed(inputs.host, is_node);
        let (vips, listeners) = old;
        amended.state.vips.extend(vips.iter().map(|vip| (*vip, None)));
        amended.state.listeners.extend(listeners.iter().map(|key| (*key, None)));
        let number = |group: usize| {
            let planned = self.groups.get(positions.get(group)?)?;
            assignments.table_number(&planned.group.key)
        };
        let (vips, listeners) = serve(inputs.host, &frontends, number);
        assignments.serve(&amended.state, &listeners, in_use);
        amended.state.vips.extend(vips.into_iter().map(|(vip, lease)| (vip, Some(lease))));
        amended.state.listeners.extend(listeners.into_iter().map(|(key, listener)| (key, Some(listener))));
        Some(amended)
    }

    /// The checks of each address that has others since the plan, or since this was called. They take time for each load balancer with
    /// a target at the same addresses, which packets need not wait for.
    pub(crate) fn take_changed_checks(&mut self) -> BTreeMap<IpAddr, Vec<Arc<CheckSet>>> {
        self.ledger.checks.changed()
    }

    /// Forgets what the load balancer used. Collects its addresses and listeners.
    fn take_out(
        &mut self,
        name: &str,
        touched: &mut Touched,
        (vips, listeners): &mut (BTreeSet<IpAddr>, Vec<ListenerKey>),
    ) {
        let Some(entry) = self.ledger.take(name) else { return };
        for position in entry.groups {
            let Some(planned) = self.groups.get_mut(&position) else { continue };
            touched.entry(position).or_insert_with(|| Some(planned.before()));
            planned.remove_user(name);
        }
        vips.extend(entry.claims);
        listeners.extend(entry.listeners);
    }

    /// Returns the position of the group, which replaces the one with its key, if there is one.
    fn put_in(&mut self, group: TargetGroup, touched: &mut Touched) -> usize {
        if let Some(position) = self.position(&group.key)
            && let Some(planned) = self.groups.get_mut(&position)
        {
            touched.entry(position).or_insert_with(|| Some(planned.before()));
            planned.group = group;
            return position;
        }
        let position = self.insert(group);
        touched.insert(position, None);
        position
    }

    /// Lets all that counts follow one group, and removes it if nobody uses it. Returns whether draining nodes may be others.
    fn settle(
        &mut self,
        position: usize,
        before: Option<&Before>,
        names: &BTreeSet<String>,
        assignments: &mut Assignments,
        amended: &mut Amended,
    ) -> bool {
        let Some(planned) = self.groups.get(&position) else { return false };
        let now = (planned.vips > 0).then(|| Counted::new(&planned.group, planned.vips));
        if now.is_some() {
            let group = &planned.group;
            assignments.remember(group);
            let table = assignments.retarget(group, &mut self.used);
            amended.state.tables.extend(table.map(|(number, table)| (number, Some(table))));
            self.next_change = self.next_change.into_iter().chain(group.next_change).min();
            let others = planned.reported.iter().filter(|(name, _)| !names.contains(name));
            if before.is_some_and(|before| before.group.report != group.report) {
                amended.reports.extend(others.map(|user| changed_report(user, &group.report)));
            }
        }
        let was = before.map(|before| Counted::new(&before.group, before.vips));
        self.healthy_vips += now.as_ref().map_or(0, Counted::healthy_vips);
        self.healthy_vips -= was.as_ref().map_or(0, Counted::healthy_vips);
        let is_same = is_same(was.as_ref(), now.as_ref());
        if !is_same {
            // First what is new: what both have must not be forgotten in between.
            if let Some(now) = &now {
                self.ledger.count(&planned.group, now);
            }
            if let Some((before, was)) = before.zip(was.as_ref()) {
                self.ledger.discount(&before.group, was);
            }
        }
        let mut targets = was.iter().chain(&now).flat_map(|counted| &counted.reachable.targets);
        let has_draining = !is_same && targets.any(drains);
        if now.is_none()
            && let Some(planned) = self.remove(position)
        {
            let number = assignments.forget(&planned.group.key, &mut self.used);
            amended.state.tables.extend(number.map(|number| (number, None)));
        }
        has_draining
    }
}

/// Whether a group counts as it did.
fn is_same(was: Option<&Counted>, now: Option<&Counted>) -> bool {
    match (was, now) {
        (Some(was), Some(now)) => {
            Arc::ptr_eq(&was.reachable, &now.reachable)
                && was.is_healthy == now.is_healthy
                && (was.vips > 0) == (now.vips > 0)
        }
        (was, now) => was.is_none() && now.is_none(),
    }
}

fn changed_report((name, position): &(String, usize), report: &Arc<GroupReport>) -> ChangedStatus {
    ChangedStatus { load_balancer: name.clone(), position: *position, targets: Arc::clone(report) }
}

impl PlannedGroup {
    fn before(&self) -> Before {
        Before { group: self.group.clone(), vips: self.vips }
    }
}
