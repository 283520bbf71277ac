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

/// The old rule of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OldRule {
    /// Its deletion is about to be sent, or runs.
    Leaving,
    /// This process deleted it.
    Gone,
    /// An earlier process deleted it, or it never existed: where clients know an address without any rule, one is gone.
    Unknown { is_address_without_rule: bool },
}

/// A Service's claim to the quota of a rule that it deletes to replace it.
#[derive(Clone, Copy, Debug)]
struct Claim {
    old: OldRule,
    /// Whether the Service still wants a rule of this name.
    is_wanted: bool,
    /// When others wait for it no longer.
    until: Instant,
}

impl Claim {
    fn new(old: OldRule) -> Self {
        let time = if old == OldRule::Leaving { DELETION } else { CLAIM };
        Self { old, is_wanted: true, until: Instant::now() + time }
    }

    fn is_live(&self) -> bool {
        self.until > Instant::now()
    }

    /// The old rule is gone.
    fn end_deletion(&mut self) {
        if self.old == OldRule::Leaving {
            *self = Self { is_wanted: self.is_wanted, ..Self::new(OldRule::Gone) };
        }
    }

    /// Whether this process deletes the old rule, or did.
    fn is_certain(&self) -> bool {
        !matches!(self.old, OldRule::Unknown { .. })
    }

    /// Whether the Service still has to replace the old rule. A deletion that does not end stops nothing else.
    fn is_open(&self) -> bool {
        self.old == OldRule::Gone || self.is_live()
    }
}

/// What the Services other than one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OtherClaims {
    /// Nothing that it waits for.
    None,
    /// Rules that may have existed.
    Uncertain,
    /// Rules that this process deletes.
    Certain,
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
    /// Those that lacked rules at the start, and when the list of it began.
    unruled: Option<(Instant, BTreeSet<Key>)>,
    /// The Services that make no rules: those that this process deletes, whatever is left of them, and those that are refused.
    without_rules: BTreeSet<Key>,
}

impl RuleQuota {
    /// The Service is looked at. At the start, one that clients know and that lacks rules may have lost them in an earlier process.
    pub(crate) fn look(&mut self, service: &Key, is_published: bool, wanted: &Desired, tree: &Tree) {
        let claims = self.claims.entry(service.clone()).or_default();
        // What an earlier process deleted to replace it would have been made by now.
        claims.retain(|_, claim| claim.is_certain() || claim.is_live());
        // A deletion whose answer was lost.
        for (_, claim) in claims.iter_mut().filter(|(id, _)| tree.get(id).is_none()) {
            claim.end_deletion();
        }
        self.look_at_start(service, is_published, wanted, tree);
        self.drop_empty(service);
    }

    fn look_at_start(&mut self, service: &Key, is_published: bool, wanted: &Desired, tree: &Tree) {
        let now = Instant::now();
        let start = self.start.get_or_insert(Start { began: now, ends: now + START });
        if now >= start.ends {
            self.looked_at.clear();
            self.without_rules.clear();
            self.unruled = None;
            return;
        }
        if !self.looked_at.insert(service.clone()) {
            return;
        }
        if !tree.own.is_empty() {
            start.ends = (now + START).min(start.began + LONGEST_START);
        }
        if !is_published {
            return;
        }
        let claims = self.claims.entry(service.clone()).or_default();
        for frontend in &wanted.frontends {
            let is_address_without_rule = frontend.rules.keys().all(|id| tree.get(id).is_none());
            let missing = frontend.rules.keys().filter(|id| tree.get(id).is_none()).cloned();
            claims.extend(missing.map(|id| (id, Claim::new(OldRule::Unknown { is_address_without_rule }))));
        }
    }

    /// The list of everything that serves the first looks. While another one is read, or was not readable, the last one counts.
    pub(crate) fn note_list(&mut self, began: Instant, unruled: impl FnOnce() -> BTreeSet<Key>) {
        let is_known = self.unruled.as_ref().is_some_and(|(of, _)| *of == began);
        if self.is_starting() && !is_known {
            self.unruled = Some((began, unruled()));
        }
    }

    /// These changes are about to be sent: the quota of rules that they delete to replace them is the Service's.
    pub(crate) fn begin(&mut self, service: &Key, steps: &[Step], wanted: &Desired, tree: &Tree) {
        let is_wanted = |id: &Id| wanted.frontends.iter().any(|frontend| frontend.rules.contains_key(id));
        let of_rules = steps.iter().filter(|step| step.id().kind == Kind::ForwardingRule);
        let deleted = of_rules.filter(|step| matches!(step, Step::Delete { .. })).map(Step::id);
        let (replaced, others): (Vec<&Id>, Vec<&Id>) = deleted.partition(|id| is_wanted(id));
        let lacking = lacking(wanted, tree).len() + replaced.len();
        // A rule that goes after the Service moved to another address frees quota for anybody.
        let deleted: Vec<&Id> = replaced.into_iter().chain(others).take(lacking).collect();
        let claims = self.claims.entry(service.clone()).or_default();
        // A rule that is there and stays was not deleted after all, or is there again.
        let leaves = |id: &Id, claim: &Claim| deleted.contains(&id) && claim.old == OldRule::Leaving;
        claims.retain(|id, claim| lacking > 0 && (tree.get(id).is_none() || leaves(id, claim)));
        for id in deleted {
            claims.entry(id.clone()).or_insert(Claim::new(OldRule::Leaving));
        }
        for (id, claim) in claims {
            claim.is_wanted = is_wanted(id);
        }
        self.drop_empty(service);
    }

    fn drop_empty(&mut self, service: &Key) {
        if self.claims.get(service).is_some_and(BTreeMap::is_empty) {
            self.claims.remove(service);
        }
    }

    /// The changes that can be sent, and how many new rules wait for rules that are being replaced.
    pub(crate) fn split(&mut self, service: &Key, mut steps: Vec<Step>) -> (Vec<Step>, usize) {
        let new: Vec<&Id> = steps.iter().filter(|step| is_new_rule(step)).map(Step::id).collect();
        if new.is_empty() {
            return (steps, 0);
        }
        let others = self.other_claims(service);
        let count = new.len();
        let none = BTreeMap::new();
        let admitted = admitted(&new, self.claims.get(service).unwrap_or(&none), others);
        steps.retain(|step| !is_new_rule(step) || admitted.contains(step.id()));
        (steps, count - admitted.len())
    }

    /// The claims for which a Service with new rules waits.
    fn other_claims(&mut self, service: &Key) -> OtherClaims {
        let now = Instant::now();
        let others =
            self.claims.iter().filter(|(of, _)| *of != service).flat_map(|(_, claims)| claims.values());
        let (mut is_claimed, mut is_certain) = (false, false);
        for claim in others.filter(|claim| claim.is_live()) {
            (is_claimed, is_certain) = (true, is_certain || claim.is_certain());
        }
        let is_known = |of: &Key| self.looked_at.contains(of) || self.without_rules.contains(of);
        let mut unruled = self.unruled.iter().flat_map(|(_, unruled)| unruled);
        let mut is_anybody_lacking = || self.is_starting() && unruled.any(|of| !is_known(of));
        if !(is_claimed || is_anybody_lacking()) {
            self.waiting.remove(service);
            return OtherClaims::None;
        }
        let since = *self.waiting.entry(service.clone()).or_insert(now);
        if !self.is_full() && now - since >= UNSURE {
            return OtherClaims::None;
        }
        if is_certain { OtherClaims::Certain } else { OtherClaims::Uncertain }
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
        if let Some(claim) = self.claims.get_mut(service).and_then(|claims| claims.get_mut(rule)) {
            claim.end_deletion();
        }
    }

    /// The Service has the rule.
    pub(crate) fn note_inserted(&mut self, service: &Key, rule: &Id) {
        let Some(claims) = self.claims.get_mut(service) else { return };
        if claims.remove(rule).is_none() {
            // It has the place of a rule of another name.
            let spare = claims.iter().find(|(_, claim)| !claim.is_wanted && claim.old == OldRule::Gone);
            if let Some(spare) = spare.map(|(id, _)| id.clone()) {
                claims.remove(&spare);
            }
        }
        self.drop_empty(service);
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
        let has_ended = self.start.as_ref().is_some_and(|start| Instant::now() >= start.ends);
        if !has_ended {
            self.without_rules.insert(service.clone());
        }
    }

    /// The Service lacks no rule, or wants none.
    pub(crate) fn forget(&mut self, service: &Key) {
        self.claims.remove(service);
        self.waiting.remove(service);
    }

    /// When a Service that lost a rule, or is about to, asks again; `None` if it lost none.
    pub(crate) fn retry_in(&self, service: &Key) -> Option<Duration> {
        let open = self.claims.get(service)?.values().filter(|claim| claim.is_open());
        open.map(|claim| if claim.is_live() { SOON } else { LATER }).min()
    }

    /// Whether this process deletes a rule of the Service to replace it, or did.
    pub(crate) fn is_replacing(&self, service: &Key) -> bool {
        let claims = self.claims.get(service).into_iter().flat_map(BTreeMap::values);
        claims.into_iter().any(|claim| claim.is_certain() && claim.is_open())
    }
}

/// Which of its new rules a Service may make now. While it replaces a rule, no other new rule of it may take the place: only the rule of
/// the same name, or one for an old rule whose name is not wanted any more.
fn admitted(new: &[&Id], own: &BTreeMap<Id, Claim>, others: OtherClaims) -> BTreeSet<Id> {
    let is_replacing = own.values().any(|claim| claim.is_certain() && claim.is_open());
    let is_place = |claim: &Claim| match claim.old {
        OldRule::Leaving => false,
        OldRule::Gone => others == OtherClaims::None || claim.is_live(),
        // It gives way to what is known to be replaced.
        OldRule::Unknown { is_address_without_rule } => {
            is_address_without_rule && !is_replacing && others != OtherClaims::Certain && claim.is_live()
        }
    };
    let mut spare = own.values().filter(|claim| !claim.is_wanted && is_place(claim)).count();
    let mut may = |id: &Id| {
        if others == OtherClaims::None && !is_replacing || own.get(id).is_some_and(is_place) {
            return true;
        }
        let has_spare = spare > 0;
        spare = spare.saturating_sub(1);
        has_spare
    };
    new.iter().filter(|id| may(id)).map(|id| (*id).clone()).collect()
}

fn is_new_rule(step: &Step) -> bool {
    matches!(step, Step::Insert { id, .. } if id.kind == Kind::ForwardingRule)
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

/// Which ports have no rule now, or one that `leaves`, as a condition tells it; empty if all have one.
pub(crate) fn unserved(wanted: &Desired, tree: &Tree, leaves: impl Fn(&Id) -> bool) -> String {
    let rules = wanted.frontends.iter().flat_map(|frontend| &frontend.rules);
    let missing = rules.filter(|(id, _)| tree.get(id).is_none() || leaves(id));
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
