// SPDX-License-Identifier: Apache-2.0
//! Which target group each VIP uses: the one that its load balancer names, or its last one while that is safer.
//!
//! A VIP that gets other targets, as by a change of steering, keeps its last ones until all new ones have been tried and one is
//! healthy, at most [`MAX_WAIT`], and at most [`MAX_WAIT_FOR_HEALTHY`] while none is: fail open would send packets to nodes that
//! drop them. Last targets of which none is healthy are no safer. A VIP also keeps its last targets while its node set does not exist. Kept targets are still probed. Edge hosts decide
//! alone, so they may differ for as long.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_dataplane::packet::maps::ListenerKey;

use super::accept::Accepted;
use super::reachable::ReachableByTargets;
use super::targets::{TableKey, TargetGroup, Targets};
use super::{Assignments, PlanInputs};
use crate::index::LoadBalancer;

/// A probe that hangs must not keep a VIP on nodes that may be gone.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(3);
/// While no new target is healthy and a last one is. Targets without an answer are decided after 10 s and a timeout.
pub(super) const MAX_WAIT_FOR_HEALTHY: Duration = Duration::from_secs(15);

/// The targets of each VIP, of each load balancer that has it.
pub(super) type TargetsInUse = HashMap<IpAddr, Vec<Arc<InUse>>>;

/// The targets that a VIP uses.
#[derive(Clone, Debug)]
pub(super) struct InUse {
    /// The name and the UID of its load balancer: another one never gets these targets.
    owner: (String, String),
    key: TableKey,
    targets: Targets,
    /// Since when the VIP waits for probes of other targets.
    waiting_since: Option<Instant>,
}

impl InUse {
    /// How long the VIP has waited for probes of other targets.
    fn waited(&self, now: Instant) -> Duration {
        self.waiting_since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }
}

/// A VIP that is served for a load balancer.
pub(super) struct Frontend<'a> {
    pub(super) load_balancer: &'a Accepted<'a>,
    pub(super) vip: IpAddr,
    /// The position of the group that it uses.
    pub(super) group: usize,
    /// The position of the group that the status is about: what the load balancer names.
    pub(super) reported: usize,
}

pub(super) struct Selection<'a> {
    pub(super) groups: Vec<TargetGroup>,
    pub(super) frontends: Vec<Frontend<'a>>,
    pub(super) in_use: TargetsInUse,
    /// Whether a VIP waits for probes.
    pub(super) is_waiting: bool,
}

/// The groups, each once.
struct Groups<'a> {
    inputs: &'a PlanInputs<'a>,
    previous: &'a Assignments,
    list: Vec<TargetGroup>,
    positions: HashMap<TableKey, usize>,
    of_targets: &'a mut ReachableByTargets,
}

impl Groups<'_> {
    /// The position of the group with this key, which has these targets unless it exists.
    fn position(&mut self, key: &TableKey, other: &TableKey, targets: &Targets, first: ListenerKey) -> usize {
        if let Some(position) = self.positions.get(key) {
            return *position;
        }
        let group = self.group(key.clone(), other, targets, first);
        self.push(group)
    }

    /// A group without memory has that of the group with the other key.
    fn group(
        &mut self,
        key: TableKey,
        other: &TableKey,
        targets: &Targets,
        first: ListenerKey,
    ) -> TargetGroup {
        let before = self.previous.memory(&key, other, &first, self.inputs.now);
        let PlanInputs { host, health, .. } = self.inputs;
        let reachable = self.of_targets.reachable(targets, key.is_v6(), host, health);
        TargetGroup::new(self.inputs.health_inputs(), key, targets, reachable, first, &before)
    }

    fn push(&mut self, group: TargetGroup) -> usize {
        let position = self.list.len();
        self.positions.insert(group.key.clone(), position);
        self.list.push(group);
        position
    }

    /// The position of the VIP's last group, if it is safer than the one that the load balancer names, whose health is unknown.
    fn kept(&mut self, named: usize, last: &InUse, first: ListenerKey) -> Option<usize> {
        let is_served = self.list.get(named).is_some_and(TargetGroup::has_healthy);
        let is_patient = last.waited(self.inputs.now) < MAX_WAIT;
        let is_safer = |group: &TargetGroup| {
            !group.reachable.targets.is_empty() && (group.has_healthy() || is_patient && !is_served)
        };
        if let Some(position) = self.positions.get(&last.key) {
            return self.list.get(*position).is_some_and(is_safer).then_some(*position);
        }
        let group = self.group(last.key.clone(), &last.key, &last.targets, first);
        is_safer(&group).then(|| self.push(group))
    }
}

pub(super) fn select<'a>(
    inputs: &PlanInputs<'_>,
    accepted: &'a [Accepted<'a>],
    previous: &Assignments,
    of_targets: &mut ReachableByTargets,
) -> Selection<'a> {
    let last = &previous.in_use;
    let mut groups = Groups { inputs, previous, list: Vec::new(), positions: HashMap::new(), of_targets };
    let mut vips = Vec::new();
    // Groups that are named come first: a kept one with the same key is then theirs, with the present targets.
    for load_balancer in accepted {
        for vip in load_balancer.vips.iter().copied() {
            let key = TableKey::new(load_balancer.object, vip);
            // Without a listener nothing is served, but targets are still probed and reported.
            let first = load_balancer.listeners(vip).next().unwrap_or(ListenerKey::new(vip, 0, 0));
            let other = TableKey::of_other_steering(load_balancer.object, vip);
            let targets = load_balancer.targets.as_ref();
            let named = targets.map(|targets| groups.position(&key, &other, targets, first));
            vips.push((load_balancer, vip, first, key, named));
        }
    }
    let mut selection =
        Selection { groups: Vec::new(), frontends: Vec::new(), in_use: HashMap::new(), is_waiting: false };
    let mut without_targets = Vec::new();
    for (load_balancer, vip, first, key, named) in vips {
        let object = load_balancer.object;
        let mut of_vip = last.get(&vip).into_iter().flatten();
        let last = of_vip.find(|last| last.owner.0 == object.name && last.owner.1 == object.uid);
        let (used, waiting_since) = match (named, last) {
            (Some(named), Some(last)) if may_wait(&groups, named, &key, last, inputs.now) => {
                match groups.kept(named, last, first) {
                    Some(kept) => (kept, last.waiting_since.or(Some(inputs.now))),
                    None => (named, None),
                }
            }
            (Some(named), _) => (named, None),
            (None, Some(last)) => (groups.position(&last.key, &last.key, &last.targets, first), None),
            (None, None) => {
                without_targets.push((load_balancer, vip, first, key));
                continue;
            }
        };
        selection.is_waiting |= waiting_since.is_some();
        selection.frontends.push(Frontend {
            load_balancer,
            vip,
            group: used,
            reported: named.unwrap_or(used),
        });
        if let Some(group) = groups.list.get(used) {
            selection.in_use.entry(vip).or_default().push(in_use(group, object, waiting_since, last));
        }
    }
    let none = Targets::OfNodeSet(Arc::default());
    for (load_balancer, vip, first, key) in without_targets {
        let position = groups.position(&key, &key, &none, first);
        selection.frontends.push(Frontend { load_balancer, vip, group: position, reported: position });
    }
    selection.groups = groups.list;
    selection
}

/// What the next plan has to know. It is the same value where nothing has changed.
fn in_use(
    group: &TargetGroup,
    object: &LoadBalancer,
    waiting_since: Option<Instant>,
    last: Option<&Arc<InUse>>,
) -> Arc<InUse> {
    let is_same = |last: &&Arc<InUse>| {
        last.key == group.key && last.targets.is_same(&group.targets) && last.waiting_since == waiting_since
    };
    last.filter(is_same).map_or_else(
        || {
            Arc::new(InUse {
                owner: (object.name.clone(), object.uid.clone()),
                key: group.key.clone(),
                targets: group.targets.clone(),
                waiting_since,
            })
        },
        Arc::clone,
    )
}

/// Whether a VIP may keep its last targets, although its load balancer names others.
fn may_wait(groups: &Groups<'_>, named: usize, key: &TableKey, last: &InUse, now: Instant) -> bool {
    let named = groups.list.get(named);
    let is_known = named.is_none_or(TargetGroup::is_health_known);
    let is_served = named.is_some_and(TargetGroup::has_healthy);
    let limit = if is_served { MAX_WAIT } else { MAX_WAIT_FOR_HEALTHY };
    last.key != *key && !is_known && last.waited(now) < limit
}
