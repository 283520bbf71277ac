// SPDX-License-Identifier: Apache-2.0
//! Who may use what is free of the quota of forwarding rules. The quota counts the rules of all Services, and another port needs another
//! rule: the old one goes first, and where the quota is full, a waiting Service could take what it frees. `apply` asks before it makes
//! rules, and `send` notes which are gone and made. Never asks GCE. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;
use steerage_model::Key;
use tokio::time::Instant;

use crate::desired::Desired;
use crate::object::{Id, Kind};
use crate::state::STUCK;
use crate::step::Step;
use crate::tree::Tree;

/// How long others wait for a Service to fill again what it freed. It starts when the old rule is gone.
const CLAIM: Duration = Duration::from_mins(1);
/// How long others wait before that: a deletion frees its quota before anybody sees that its operation ended.
const DELETION: Duration = STUCK;
/// The quota counts as full for this time after it refused a rule. Otherwise whoever replaces rules all the time would keep all others
/// waiting.
const FULL: Duration = Duration::from_mins(10);
/// How long a Service waits while nothing says that the quota is full: the first request to be refused could be the one that replaces.
const UNSURE: Duration = Duration::from_secs(15);
/// After its start a process does not know what an earlier one freed. The start ends so long after the last first look at a Service that
/// an earlier process served: a Service that nobody looks at may be gone.
const START: Duration = Duration::from_secs(30);
/// No start is longer.
const LONGEST_START: Duration = Duration::from_mins(10);
/// When a Service asks again.
pub(crate) const SOON: Duration = Duration::from_secs(1);
/// The same after its claim.
const LATER: Duration = Duration::from_secs(10);

/// A Service's claim to the quota of a rule that it deletes to replace it.
#[derive(Debug)]
struct Claim {
    /// Whether the old rule is gone.
    is_gone: bool,
    /// When others wait for it no longer.
    until: Instant,
}

/// What an earlier process freed is not known at the start.
#[derive(Debug)]
struct Start {
    began: Instant,
    ends: Instant,
}

/// Who may make forwarding rules.
#[derive(Debug, Default)]
pub(crate) struct RuleQuota {
    /// By Service and deleted rule.
    claims: BTreeMap<Key, BTreeMap<Id, Claim>>,
    /// Since when new rules of a Service wait for claims of others.
    waiting: BTreeMap<Key, Instant>,
    refused_at: Option<Instant>,
    start: Option<Start>,
    /// The Services that this process looked at.
    looked_at: BTreeSet<Key>,
    /// The Services that make no rules: those that this process deletes, whatever is left of them, and those that are refused.
    without_rules: BTreeSet<Key>,
}

impl RuleQuota {
    /// The Service is looked at. A Service that clients know and that lacks rules had them when an earlier process ended.
    pub(crate) fn look(&mut self, service: &Key, is_published: bool, wanted: &Desired, tree: &Tree) {
        let now = Instant::now();
        // A deletion whose answer was lost.
        let gone = |(id, claim): &(&Id, &Claim)| !claim.is_gone && tree.get(id).is_none();
        let gone: Vec<Id> =
            self.claims.get(service).into_iter().flatten().filter(gone).map(|(id, _)| id.clone()).collect();
        for id in &gone {
            self.note_gone(service, id);
        }
        let start = self.start.get_or_insert(Start { began: now, ends: now + START });
        if !self.looked_at.insert(service.clone()) || now >= start.ends {
            return;
        }
        if !tree.own.is_empty() {
            start.ends = (now + START).min(start.began + LONGEST_START);
        }
        if is_published {
            let lacking = lacking(wanted, tree).into_iter();
            let claims = lacking.map(|id| (id, Claim { is_gone: true, until: now + CLAIM }));
            self.claims.entry(service.clone()).or_default().extend(claims);
        }
    }

    /// The changes are about to be sent: the quota of rules that they delete to replace them is the Service's.
    pub(crate) fn begin(&mut self, service: &Key, steps: &[Step], wanted: &Desired, tree: &Tree) {
        let of_rules = steps.iter().filter(|step| step.id().kind == Kind::ForwardingRule);
        let deleted =
            of_rules.filter(|step| matches!(step, Step::Delete { .. })).map(|step| step.id().clone());
        let deleted: BTreeSet<Id> = deleted.collect();
        // A rule that goes after the Service moved to another address frees quota for anybody.
        let replaced =
            deleted.iter().filter(|id| wanted.frontends.iter().any(|one| one.rules.contains_key(id)));
        let lacking = lacking(wanted, tree).len() + replaced.count();
        let claims = self.claims.entry(service.clone()).or_default();
        // A rule that is there and stays was not deleted after all, or is there again.
        claims.retain(|id, claim| tree.get(id).is_none() || (deleted.contains(id) && !claim.is_gone));
        let until = Instant::now() + DELETION;
        for id in deleted.into_iter().take(lacking) {
            claims.entry(id).or_insert(Claim { is_gone: false, until });
        }
        if claims.is_empty() {
            self.claims.remove(service);
        }
    }

    /// The changes that can be sent, and how many new rules wait for Services that replace one. `unruled` are the Services that lacked
    /// rules at the start.
    pub(crate) fn split(
        &mut self,
        service: &Key,
        mut steps: Vec<Step>,
        unruled: impl FnOnce() -> BTreeSet<Key>,
    ) -> (Vec<Step>, usize) {
        let now = Instant::now();
        let is_live = |claim: &Claim| claim.until > now;
        let is_claimed =
            || self.claims.iter().any(|(of, claims)| of != service && claims.values().any(is_live));
        let is_known = |of: &Key| self.looked_at.contains(of) || self.without_rules.contains(of);
        let is_unknown = || self.is_starting() && unruled().iter().any(|of| !is_known(of));
        if !(is_claimed() || is_unknown()) {
            self.waiting.remove(service);
            return (steps, 0);
        }
        let is_new = |step: &Step| matches!(step, Step::Insert { id, .. } if id.kind == Kind::ForwardingRule);
        if !steps.iter().any(is_new) {
            return (steps, 0);
        }
        let since = *self.waiting.entry(service.clone()).or_insert(now);
        if !self.is_full() && now - since >= UNSURE {
            return (steps, 0);
        }
        let own = self.claims.get(service).into_iter().flat_map(BTreeMap::values);
        let mut free = own.filter(|claim| is_live(claim)).count();
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

    fn is_starting(&self) -> bool {
        self.start.as_ref().is_some_and(|start| Instant::now() < start.ends)
    }

    /// Whether the quota counts as full.
    pub(crate) fn is_full(&self) -> bool {
        self.is_starting() || self.refused_at.is_some_and(|at| at.elapsed() < FULL)
    }

    /// The Service's rule is deleted.
    pub(crate) fn note_gone(&mut self, service: &Key, rule: &Id) {
        let claim = self.claims.get_mut(service).and_then(|claims| claims.get_mut(rule));
        if let Some(claim) = claim.filter(|claim| !claim.is_gone) {
            *claim = Claim { is_gone: true, until: Instant::now() + CLAIM };
        }
    }

    /// The Service has the rule.
    pub(crate) fn note_inserted(&mut self, service: &Key, rule: &Id) {
        let Some(claims) = self.claims.get_mut(service) else { return };
        if claims.remove(rule).is_none() {
            claims.pop_first();
        }
        if claims.is_empty() {
            self.claims.remove(service);
        }
    }

    /// The quota had no room for a rule.
    pub(crate) fn note_refused(&mut self) {
        self.refused_at = Some(Instant::now());
    }

    /// The Service is being deleted.
    pub(crate) fn note_deletion(&mut self, service: &Key) {
        self.note_invalid(service);
        self.forget(service);
    }

    /// The Service is refused.
    pub(crate) fn note_invalid(&mut self, service: &Key) {
        self.without_rules.insert(service.clone());
    }

    /// The Service lacks no rule, or wants none.
    pub(crate) fn forget(&mut self, service: &Key) {
        self.claims.remove(service);
        self.waiting.remove(service);
    }

    /// When a Service that lost its rule asks again; `None` if it lost none.
    pub(crate) fn retry_in(&self, service: &Key) -> Option<Duration> {
        let lost = self.claims.get(service)?.values().filter(|claim| claim.is_gone);
        let until = lost.map(|claim| claim.until).max()?;
        Some(if until > Instant::now() { SOON } else { LATER })
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

/// Which ports have no rule now, as a condition tells it; empty if all have one.
pub(crate) fn unserved(wanted: &Desired, tree: &Tree) -> String {
    let rules = wanted.frontends.iter().flat_map(|frontend| &frontend.rules);
    let missing = rules.filter(|(id, _)| tree.get(id).is_none());
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
