// SPDX-License-Identifier: Apache-2.0
//! The invariant of mass removals: while no node is deleted, the holder of the Lease removes at most a third of a shared set within
//! half a minute, counting nodes that it cannot have held for that long.
//!
//! A node counts if it was eligible until less than half a minute ago, in the truth that every process has seen by then. A process
//! counts once it has written something, half a minute ago: a new holder knows no earlier targets.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Key;
use tokio::time::{Duration, Instant};

use super::objects::Resource;
use super::process::NAMESPACE;
use super::world::{ProcessId, World};
use crate::removal_hold::LONGEST_HOLD;

/// The lag of a watch, a hold, and a call that takes its time.
const LOOK_BACK: Duration = Duration::from_mins(4);
/// The size from which removals are held.
const SMALLEST_SET: usize = 3;

/// What happened to the nodes in truth.
#[derive(Debug, Default)]
pub(super) struct NodeHistory {
    /// The last deletion of any node.
    deleted_at: Option<Instant>,
    nodes: BTreeMap<String, NodeTimes>,
}

#[derive(Debug)]
struct NodeTimes {
    /// `None` if every process has listed it first of all.
    created_at: Option<Instant>,
    /// The last times when it was excluded: from, and to if it is over.
    excluded: Vec<(Instant, Option<Instant>)>,
}

impl NodeHistory {
    /// `is_first`: no process runs yet.
    pub(super) fn put(&mut self, node: &str, is_excluded: bool, is_first: bool) {
        let now = Instant::now();
        let new = NodeTimes { created_at: (!is_first).then_some(now), excluded: Vec::new() };
        let times = self.nodes.entry(node.to_owned()).or_insert(new);
        match times.excluded.last_mut().filter(|(_, end)| end.is_none()) {
            None if is_excluded => times.excluded.push((now, None)),
            Some((_, end)) if !is_excluded => *end = Some(now),
            _ => {}
        }
    }

    pub(super) fn deleted(&mut self, node: &str) {
        if self.nodes.remove(node).is_some() {
            self.deleted_at = Some(Instant::now());
        }
    }

    fn has_no_deletion(&self) -> bool {
        self.deleted_at.is_none_or(|at| at.elapsed() > LOOK_BACK)
    }

    /// Whether every process has seen the node as eligible, until half a minute ago at least.
    fn was_eligible(&self, node: &str) -> bool {
        let Some(times) = self.nodes.get(node) else { return false };
        let overlaps = |(start, end): &(Instant, Option<Instant>)| {
            start.elapsed() >= LONGEST_HOLD && end.is_none_or(|end| end.elapsed() <= LOOK_BACK)
        };
        times.created_at.is_none_or(|at| at.elapsed() > LOOK_BACK) && !times.excluded.iter().any(overlaps)
    }
}

/// The nodes of the shared sets, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SharedSets(BTreeMap<String, BTreeSet<String>>);

impl SharedSets {
    pub(super) fn of(world: &World) -> Self {
        let simulated = world.cloud.sets.iter().map(|(set, nodes)| (set.as_str().to_owned(), nodes.clone()));
        let edge = ["eligible", "agents"].into_iter().filter_map(|set| {
            let json = world.api.get(Resource::EdgeNodeSets, &Key::new(NAMESPACE, set))?;
            let nodes = json["spec"]["targets"].as_array()?.iter().filter_map(|t| t["node"].as_str());
            Some((set.to_owned(), nodes.filter(|node| *node != "by-hand").map(str::to_owned).collect()))
        });
        Self(simulated.chain(edge).collect())
    }
}

/// Of one process.
#[derive(Debug, Default)]
pub(super) struct Removals {
    first_write: Option<Instant>,
    /// Removals that were not held for their whole time: when, from which set, which node.
    early: Vec<(Instant, String, String)>,
}

/// Checks a write of a process: `before` is what there was.
pub(super) fn check(world: &mut World, process: ProcessId, before: &SharedSets) {
    let (after, now) = (SharedSets::of(world), Instant::now());
    let removals = &mut world.processes[process].removals;
    let is_known = removals.first_write.get_or_insert(now).elapsed() >= LONGEST_HOLD;
    if !is_known || !world.nodes.has_no_deletion() {
        return;
    }
    let mut found = Vec::new();
    for (set, new) in &after.0 {
        let Some(old) = before.0.get(set) else { continue };
        let removed: Vec<_> = old.difference(new).filter(|node| world.nodes.was_eligible(node)).collect();
        removals.early.retain(|(at, of, node)| {
            at.elapsed() < LONGEST_HOLD && !(of == set && (new.contains(node) || removed.contains(&node)))
        });
        removals.early.extend(removed.iter().map(|node| (now, set.clone(), (*node).clone())));
        let early = || removals.early.iter().filter(|(_, of, _)| of == set).map(|(_, _, node)| node);
        let members: BTreeSet<&String> = old.union(new).chain(early()).collect();
        if !removed.is_empty() {
            found.push((set.clone(), early().count(), members.len()));
        }
    }
    for (set, early, members) in found {
        world.record("node removed at once", &set);
        if members >= SMALLEST_SET && early * 3 > members {
            let identity = world.identity(process).to_owned();
            world.violation(&format!("{identity} removes {early} of {members} nodes from {set} at once"));
        }
    }
}
