// SPDX-License-Identifier: Apache-2.0
//! Changes of firewall rules that the credentials may not make, as in a Shared VPC. No I/O.
//!
//! Each is remembered as exactly the request that was refused, and waits. Any other request is tried: the right may have been granted
//! since then, and a new load balancer or a deletion is not to wait for that.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ipnet::IpNet;
use serde_json::Value;
use tokio::time::Instant;

use crate::object::{Id, Kind};
use crate::step::Step;
use crate::tree::{Tree, address_of};
use crate::unset_fields::{Effect, unset_by};

/// After this time a refused change is tried again.
pub(crate) const DENIED_WAIT: Duration = Duration::from_mins(5);

#[derive(Clone, Debug)]
struct DeniedChange {
    step: Step,
    at: Instant,
    /// By which somebody else makes it.
    command: String,
}

/// A firewall rule, and whether the refused change makes it or keeps it: an earlier Service's of the name is deleted before another one is
/// made.
pub(crate) type DeniedKey = (Id, bool);

fn key(step: &Step) -> DeniedKey {
    (step.id().clone(), !matches!(step, Step::Delete { .. }))
}

/// The last refused change of each firewall rule, and its last refused deletion.
#[derive(Clone, Debug, Default)]
pub(crate) struct Denied {
    changes: BTreeMap<DeniedKey, DeniedChange>,
    /// Whether one was refused since the last report.
    is_news: bool,
}

impl Denied {
    /// The change was refused.
    pub(crate) fn note(&mut self, step: &Step, command: String) {
        let change = DeniedChange { step: step.clone(), at: Instant::now(), command };
        self.changes.insert(key(step), change);
        self.is_news = true;
    }

    /// The rule was changed, or is about to be changed in another way.
    pub(crate) fn forget(&mut self, id: &Id) {
        self.changes.retain(|(of, _), _| of != id);
    }

    /// These are not wanted any more.
    pub(crate) fn forget_all(&mut self, keys: &BTreeSet<DeniedKey>) {
        self.changes.retain(|key, _| !keys.contains(key));
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Forgets refusals after which the same change can be tried again: somebody may have granted the right, or made the change. True if
    /// there were some.
    pub(crate) fn expire(&mut self) -> bool {
        let before = self.changes.len();
        self.changes.retain(|_, change| change.at.elapsed() < DENIED_WAIT);
        self.changes.len() < before
    }

    /// Whether exactly this change was refused.
    pub(crate) fn has(&self, step: &Step) -> bool {
        self.changes.get(&key(step)).is_some_and(|change| change.step == *step)
    }

    /// Whether the last change of this rule was refused.
    pub(crate) fn has_change_of(&self, id: &Id) -> bool {
        self.changes.keys().any(|(of, _)| of == id)
    }

    /// The changes that can be tried, and those that are left to others.
    pub(crate) fn split(&self, steps: Vec<Step>) -> (Vec<Step>, Vec<Step>) {
        steps.into_iter().partition(|step| !self.has(step))
    }

    /// The refused changes that are not wanted any more. Deletions of what an earlier Service of the name left are.
    pub(crate) fn stale(&self, left: &[Step], tree: &Tree) -> BTreeSet<DeniedKey> {
        let is_earlier = |step: &Step| matches!(step, Step::Delete { .. }) && tree.get(step.id()).is_none();
        let stale = self.changes.values().filter(|change| !left.contains(&change.step));
        stale.filter(|change| !is_earlier(&change.step)).map(|change| key(&change.step)).collect()
    }

    /// The commands that make all of the changes.
    pub(crate) fn all_commands(&self) -> String {
        self.commands(|_| true)
    }

    /// The commands that make these changes.
    pub(crate) fn commands_of(&self, steps: &[Step]) -> String {
        self.commands(|change| steps.contains(&change.step))
    }

    fn commands(&self, is_meant: impl Fn(&DeniedChange) -> bool) -> String {
        let meant = self.changes.values().filter(|change| is_meant(change));
        meant.map(|change| change.command.as_str()).collect::<Vec<_>>().join(" && ")
    }

    /// Whether a refusal was not reported yet. Then it is.
    pub(crate) fn report(&mut self) -> bool {
        std::mem::take(&mut self.is_news)
    }

    /// When the first change can be tried again.
    pub(crate) fn due_in(&self) -> Duration {
        let waits = self.changes.values().map(|change| DENIED_WAIT.saturating_sub(change.at.elapsed()));
        waits.min().unwrap_or_default()
    }

    /// What clients notice; `None` if nothing was refused.
    pub(crate) fn effect(&self, tree: Option<&Tree>) -> Option<&'static str> {
        if self.changes.is_empty() {
            return None;
        }
        let any = |is_so: fn(&Step, Option<&Tree>) -> bool| {
            self.changes.values().any(|change| is_so(&change.step, tree))
        };
        Some(match (any(admits_too_few), any(admits_too_many)) {
            (true, true) => {
                "packets may not arrive, and clients outside the requested source ranges may still connect"
            }
            (true, false) => "packets may not arrive",
            (false, true) => "clients outside the requested source ranges may still connect",
            (false, false) => "firewall rules that nothing needs are left",
        })
    }
}

/// Whether the rule in place lacks something that the change adds.
fn admits_too_few(step: &Step, tree: Option<&Tree>) -> bool {
    let changes = match step {
        Step::Insert { .. } => return true,
        Step::Patch { changes, .. } => changes,
        Step::Delete { .. } | Step::Attach { .. } | Step::Detach { .. } => return false,
    };
    let present = tree.and_then(|tree| tree.get(step.id()));
    let of = |rule: Option<&Value>, field: &str| -> Vec<Value> {
        rule.and_then(|rule| rule.get(field)?.as_array().cloned()).unwrap_or_default()
    };
    let lacks = |field: &str| {
        let present = of(present, field);
        of(Some(changes), field).iter().any(|value| !present.contains(value))
    };
    // Somebody disabled the rule, or let it admit to others.
    let is_unset = unset_by(changes).any(|field| field.effect == Effect::AdmitsTooFew);
    let is_outside = is_outside(&ranges(Some(changes)), &ranges(present));
    is_unset || is_outside || ["destinationRanges", "allowed", "targetTags"].into_iter().any(lacks)
}

/// Whether the rule in place admits clients that it would not admit after the change.
fn admits_too_many(step: &Step, tree: Option<&Tree>) -> bool {
    let present = tree.and_then(|tree| tree.get(step.id()));
    match step {
        Step::Patch { changes, .. } => {
            let is_wide =
                changes.get("sourceRanges").is_some() && is_outside(&ranges(present), &ranges(Some(changes)));
            is_wide || unset_by(changes).any(|field| field.effect == Effect::AdmitsTooMany)
        }
        // No range of the IP family is requested any more.
        Step::Delete { .. } => tree.zip(present).is_some_and(|(tree, rule)| {
            let serving = |address| {
                tree.of_kind(Kind::ForwardingRule).any(|(_, rule)| address_of(rule) == Some(address))
            };
            Tree::destinations(rule).any(serving)
        }),
        Step::Insert { .. } | Step::Attach { .. } | Step::Detach { .. } => false,
    }
}

fn ranges(rule: Option<&Value>) -> Vec<IpNet> {
    let all = rule.and_then(|rule| rule.get("sourceRanges")?.as_array()).into_iter().flatten();
    all.filter_map(|range| range.as_str()?.parse().ok()).collect()
}

/// Whether one of the ranges is in none of the others.
fn is_outside(ranges: &[IpNet], others: &[IpNet]) -> bool {
    ranges.iter().any(|range| !others.iter().any(|other| other.contains(range)))
}

#[cfg(test)]
pub(crate) mod tests;
