// SPDX-License-Identifier: Apache-2.0
//! Holds the removal of many targets at once, so that a wrong label on many nodes does not take a load balancer down before
//! somebody can take it back. Pure: the caller passes the time.
//!
//! One value for each set of targets: the cluster index has those of the shared sets, the applied states those of single Services. See
//! `docs/decisions/0019-mass-removals-are-held.md`.

mod breaker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::Target;
use tokio::time::Instant;

pub(crate) use breaker::{HoldMetrics, HoldingSet, RemovalBreaker};

/// The longest time that a removal may be held.
pub(crate) const LONGEST_HOLD: Duration = Duration::from_secs(30);
/// Removals from one set within this time count together.
const WINDOW: Duration = Duration::from_mins(1);
/// Of a smaller set, every single node is more than a third.
const SMALLEST_SET: usize = 3;

/// One set of targets over time.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemovalHold {
    /// The targets after the last update.
    targets: Arc<[Arc<Target>]>,
    /// Nodes whose removal is held, and until when.
    held: BTreeMap<String, Instant>,
    /// Nodes that were removed within the window although they could have stayed, and when.
    removed: BTreeMap<String, Instant>,
}

impl RemovalHold {
    /// Returns the wanted targets, and those whose removal is held.
    ///
    /// `staying` is a node as a target if nothing forbids that it stays one; `None` if it must leave at once. Additions and such nodes
    /// are never held. Removals are held if they, and those within the last minute, are more than a third of the set; each for `hold`,
    /// or until it is taken back. Both lists of targets are sorted by node.
    pub(crate) fn update(
        &mut self,
        wanted: &Arc<[Arc<Target>]>,
        staying: impl Fn(&str) -> Option<Arc<Target>>,
        hold: Duration,
        now: Instant,
    ) -> Arc<[Arc<Target>]> {
        let is_wanted = |node: &str| wanted.binary_search_by(|target| (*target.node).cmp(node)).is_ok();
        let lost = self.targets.iter().filter(|target| !is_wanted(&target.node));
        let lost: Vec<Arc<Target>> = lost.filter_map(|target| staying(&target.node)).collect();
        self.removed.retain(|node, at| now < *at + WINDOW && !is_wanted(node));
        let before = wanted.len() + lost.len() + self.removed.len();
        let is_mass = before >= SMALLEST_SET && (lost.len() + self.removed.len()) * 3 > before;
        let mut still_held = BTreeMap::new();
        let mut targets = Vec::new();
        for target in lost {
            let held = self.held.get(&target.node).copied();
            let until = held.unwrap_or(now + hold);
            // Labels are taken back node by node: the last one must not leave because the others are back.
            if (is_mass || held.is_some()) && now < until {
                still_held.insert(target.node.clone(), until);
                targets.push(target);
            } else {
                self.removed.insert(target.node.clone(), now);
            }
        }
        self.held = still_held;
        self.targets = if targets.is_empty() {
            Arc::clone(wanted)
        } else {
            targets.extend(wanted.iter().cloned());
            targets.sort_by(|a, b| a.node.cmp(&b.node));
            targets.into()
        };
        Arc::clone(&self.targets)
    }

    /// When the next removal is no longer held.
    pub(crate) fn next_release(&self) -> Option<Instant> {
        self.held.values().min().copied()
    }

    /// The nodes that were held before, and have left although they could have stayed.
    fn left_after<'a>(&'a self, before: &RemovalHold) -> Vec<&'a str> {
        let was_held = |node: &&str| before.held.contains_key(*node);
        self.removed.keys().map(String::as_str).filter(was_held).collect()
    }

    /// The nodes whose removal is held.
    pub(crate) fn held(&self) -> impl ExactSizeIterator<Item = &str> {
        self.held.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests;
