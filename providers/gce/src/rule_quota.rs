// SPDX-License-Identifier: Apache-2.0
//! Whose a freed place in the quota of forwarding rules is. The quota counts the rules of all Services, and another port needs another rule:
//! where the quota is full, the old rule goes first, and a waiting Service could take its place. `apply` asks before it makes rules, and
//! tells what became of them. Never asks GCE. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;
use steerage_model::Key;
use tokio::time::Instant;

use crate::desired::Desired;
use crate::object::{Id, Kind};
use crate::step::Step;
use crate::tree::Tree;

/// A Service that cannot finish keeps the others waiting for no longer.
const CLAIM: Duration = Duration::from_mins(1);
/// The quota counts as full for this time after it refused a rule. Otherwise whoever replaces rules all the time would keep all others
/// waiting.
const FULL: Duration = Duration::from_mins(10);
/// After its start a process does not know what an earlier one freed.
const START: Duration = Duration::from_secs(30);
/// When a Service asks again.
pub(crate) const SOON: Duration = Duration::from_secs(1);
/// The same after its claim.
const LATER: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Claim {
    /// The rules that were deleted to be replaced.
    owed: BTreeSet<Id>,
    until: Instant,
}

/// The places that Services freed to fill them again.
#[derive(Debug, Default)]
pub(crate) struct RuleQuota {
    claims: BTreeMap<Key, Claim>,
    refused_at: Option<Instant>,
    started_at: Option<Instant>,
    /// The Services that this process looked at.
    looked_at: BTreeSet<Key>,
    /// The Services that this process deletes: what is left of them wants no rules.
    deleted: BTreeSet<Key>,
}

impl RuleQuota {
    /// The Service is looked at. A Service that clients know and that lacks rules had them when an earlier process ended.
    pub(crate) fn look(&mut self, service: &Key, is_published: bool, wanted: &Desired, tree: &Tree) {
        let now = Instant::now();
        let started_at = *self.started_at.get_or_insert(now);
        let is_first = self.looked_at.insert(service.clone());
        if is_first && is_published && now - started_at < START {
            self.claim(service, lacking(wanted, tree));
        }
    }

    /// The changes are about to be sent: the places of rules that they delete to replace them are the Service's.
    pub(crate) fn begin(&mut self, service: &Key, steps: &[Step], wanted: &Desired, tree: &Tree) {
        let of_rules = steps.iter().filter(|step| step.id().kind == Kind::ForwardingRule);
        let deleted =
            of_rules.filter(|step| matches!(step, Step::Delete { .. })).map(|step| step.id().clone());
        let deleted: BTreeSet<Id> = deleted.collect();
        // A rule that goes after the Service moved to another address frees a place for anybody.
        let replaced =
            deleted.iter().filter(|id| wanted.frontends.iter().any(|one| one.rules.contains_key(id)));
        let lacking = lacking(wanted, tree).len() + replaced.count();
        self.claim(service, deleted.into_iter().take(lacking).collect());
    }

    fn claim(&mut self, service: &Key, rules: BTreeSet<Id>) {
        if rules.is_empty() {
            return;
        }
        let new = || Claim { owed: BTreeSet::new(), until: Instant::now() + CLAIM };
        self.claims.entry(service.clone()).or_insert_with(new).owed.extend(rules);
    }

    /// The changes that can be sent, and how many new rules wait for Services that fill a place again. `unruled` are the Services that
    /// lacked rules at the start.
    pub(crate) fn split(
        &self,
        service: &Key,
        mut steps: Vec<Step>,
        unruled: impl FnOnce() -> BTreeSet<Key>,
    ) -> (Vec<Step>, usize) {
        let now = Instant::now();
        let is_within = |at: Option<Instant>, time: Duration| at.is_some_and(|at| now - at < time);
        let is_starting = is_within(self.started_at, START);
        let is_full = is_starting || is_within(self.refused_at, FULL);
        let is_claimed = || self.claims.iter().any(|(of, claim)| of != service && claim.until > now);
        let is_known = |of: &Key| self.looked_at.contains(of) || self.deleted.contains(of);
        let is_unknown = || is_starting && unruled().iter().any(|of| !is_known(of));
        let is_new = |step: &Step| matches!(step, Step::Insert { id, .. } if id.kind == Kind::ForwardingRule);
        if !is_full || !steps.iter().any(is_new) || !(is_claimed() || is_unknown()) {
            return (steps, 0);
        }
        let own = self.claims.get(service).filter(|claim| claim.until > now);
        let mut free = own.map_or(0, |claim| claim.owed.len());
        let mut held = 0;
        steps.retain(|step| {
            if !is_new(step) {
                return true;
            }
            let may = free > 0;
            (free, held) = (free.saturating_sub(1), held + usize::from(!may));
            may
        });
        (steps, held)
    }

    /// The Service has the rule.
    pub(crate) fn note_inserted(&mut self, service: &Key, rule: &Id) {
        let Some(claim) = self.claims.get_mut(service) else { return };
        if !claim.owed.remove(rule) {
            claim.owed.pop_first();
        }
        if claim.owed.is_empty() {
            self.claims.remove(service);
        }
    }

    /// The quota had no place for a rule.
    pub(crate) fn note_refused(&mut self) {
        self.refused_at = Some(Instant::now());
    }

    /// The Service is being deleted.
    pub(crate) fn note_deletion(&mut self, service: &Key) {
        self.deleted.insert(service.clone());
        self.forget(service);
    }

    /// The Service lacks no rule, or wants none.
    pub(crate) fn forget(&mut self, service: &Key) {
        self.claims.remove(service);
    }

    /// When a Service that lost its rule asks again; `None` if it lost none.
    pub(crate) fn retry_in(&self, service: &Key) -> Option<Duration> {
        let claim = self.claims.get(service)?;
        Some(if claim.until > Instant::now() { SOON } else { LATER })
    }
}

/// The rules that are wanted and do not exist.
fn lacking(wanted: &Desired, tree: &Tree) -> BTreeSet<Id> {
    let rules = wanted.frontends.iter().flat_map(|frontend| frontend.rules.keys());
    rules.filter(|id| tree.get(id).is_none()).cloned().collect()
}

/// The Services that have a backend service and fewer rules than their firewall rules admit protocols.
pub(crate) fn unruled(found: &[(Id, Value)], service_of: impl Fn(&Value) -> Option<Key>) -> BTreeSet<Key> {
    // Whether it has a backend service; protocols; rules.
    let mut all: BTreeMap<Key, (bool, usize, usize)> = BTreeMap::new();
    for (id, resource) in found {
        let Some(service) = service_of(resource) else { continue };
        let counts = all.entry(service).or_default();
        match id.kind {
            Kind::BackendService => counts.0 = true,
            Kind::Firewall if resource.get("destinationRanges").is_some() => {
                counts.1 += resource.get("allowed").and_then(Value::as_array).map_or(0, Vec::len);
            }
            Kind::ForwardingRule => counts.2 += 1,
            _ => {}
        }
    }
    let lacks =
        |(has_backend, protocols, rules): (bool, usize, usize)| has_backend && rules < protocols.max(1);
    all.into_iter().filter(|(_, counts)| lacks(*counts)).map(|(service, _)| service).collect()
}

/// Which ports have no rule now, as a condition tells it.
pub(crate) fn unserved(wanted: &Desired, tree: Option<&Tree>) -> String {
    let rules = wanted.frontends.iter().flat_map(|frontend| &frontend.rules);
    let missing = rules.filter(|(id, _)| tree.is_none_or(|tree| tree.get(id).is_none()));
    let mut parts: Vec<String> = missing.map(|(_, rule)| ports(rule)).collect();
    parts.dedup();
    parts.join(", and ")
}

fn ports(rule: &Value) -> String {
    let text = |field: &str| rule.get(field).and_then(Value::as_str);
    let protocol = text("IPProtocol").unwrap_or_default();
    if let Some(range) = text("portRange") {
        return format!("the {protocol} ports {range}");
    }
    let ports = rule.get("ports").and_then(Value::as_array).into_iter().flatten();
    let ports: Vec<&str> = ports.filter_map(Value::as_str).collect();
    match ports.as_slice() {
        [] => format!("all {protocol} ports"),
        [port] => format!("the {protocol} port {port}"),
        all => format!("the {protocol} ports {}", all.join(", ")),
    }
}

#[cfg(test)]
mod tests;
