// SPDX-License-Identifier: Apache-2.0
//! The changes that can be made now, so that clients are served after each. What has to wait for another change is found by the next
//! comparison. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use steerage_model::Family;
use steerage_provider_api::Error;

use crate::compare::changes;
use crate::config::Config;
use crate::denied::Denied;
use crate::desired::{Desired, Frontend, Source};
use crate::given::check_given;
use crate::object::{Id, Kind, url};
use crate::step::{Endpoint, Step};
use crate::tree::{Tree, address_of, written};

/// Endpoints of one request.
const MAX_ENDPOINTS: usize = 500;

/// Finds the changes.
pub(crate) struct Diff<'a> {
    pub(crate) config: &'a Config,
    pub(crate) tree: &'a Tree,
    /// Changes of firewall rules that are left to those who may make them.
    pub(crate) denied: &'a Denied,
    /// The addresses that clients know.
    pub(crate) published: &'a [IpAddr],
}

impl Diff<'_> {
    /// The changes towards a load balancer, in the order in which they depend on each other. Empty if it is complete. Those that the
    /// credentials may not make are among them, and the others do not wait for these.
    pub(crate) fn towards(&self, wanted: &Desired) -> Result<Vec<Step>, Error> {
        let addresses = self.addresses(wanted)?;
        let mut steps = self.new_addresses(wanted);
        // The owner's own resources come first: they say that there is something to delete.
        if wanted.are_checks_shared && self.tree.own.is_empty() {
            steps.extend(self.new_groups(wanted));
            return Ok(steps);
        }
        for (id, body) in &wanted.checks {
            steps.extend(self.ensured(id, body));
        }
        steps.extend(self.new_groups(wanted));
        let attaching = attached(wanted.endpoints(), self.tree);
        let adds = !attaching.is_empty();
        steps.extend(attaching);
        let backend = self.tree.get(&wanted.backend.0);
        steps.extend(self.backend(wanted, backend, adds));
        let paths: BTreeSet<String> = wanted.groups.keys().map(|id| id.path(self.config)).collect();
        let serves_all = !adds && backend.is_some_and(|found| Tree::backends(found).is_superset(&paths));
        if serves_all {
            steps.extend(detached(wanted.endpoints(), self.tree));
        }
        let has_checks = wanted.checks.iter().all(|(id, body)| self.is_there(id, body));
        let is_ready = serves_all && has_checks;
        steps.extend(self.admit(wanted, &addresses));
        steps.extend(self.rules(wanted, &addresses, is_ready));
        // While nobody admits clients to the new address, the old one serves.
        let is_admitted = !steps.iter().any(|step| self.denied.has(step))
            && wanted.frontends.iter().all(|frontend| {
                let address = addresses.get(&frontend.family);
                address.is_some_and(|address| self.is_admitted(frontend, *address))
            });
        steps.extend(self.leftovers(Some((wanted, &addresses)), is_ready, is_admitted));
        Ok(steps)
    }

    /// The changes that delete all of the owner.
    pub(crate) fn away(&self) -> Vec<Step> {
        self.leftovers(None, true, true)
    }

    /// Whether it is there, or left to others.
    fn is_there(&self, id: &Id, body: &Value) -> bool {
        self.tree.get(id).is_some() || self.denied.has(&Step::Insert { id: id.clone(), body: body.clone() })
    }

    /// The addresses of frontends that are known.
    fn addresses(&self, wanted: &Desired) -> Result<BTreeMap<Family, IpAddr>, Error> {
        let mut all = BTreeMap::new();
        for frontend in &wanted.frontends {
            let found = match &frontend.source {
                Source::Own(id, _) => self.tree.get(id),
                Source::Name(name) => check_given(wanted, frontend, name, self.tree, self.config)?,
                Source::Literal(address, own) => {
                    let given = check_given(wanted, frontend, &address.to_string(), self.tree, self.config)?;
                    given.or_else(|| own.as_ref().and_then(|(id, _)| self.tree.get(id)))
                }
            };
            all.extend(found.and_then(address_of).map(|address| (frontend.family, address)));
        }
        Ok(all)
    }

    fn new_addresses(&self, wanted: &Desired) -> Vec<Step> {
        let missing = wanted.frontends.iter().filter_map(|frontend| match &frontend.source {
            Source::Own(id, body) => Some((id, body)),
            Source::Literal(address, Some((id, body))) => {
                matches!(self.tree.given.get(&address.to_string()), Some(None)).then_some((id, body))
            }
            Source::Name(_) | Source::Literal(_, None) => None,
        });
        let missing = missing.filter(|(id, _)| self.tree.get(id).is_none());
        missing.map(|(id, body)| Step::Insert { id: id.clone(), body: body.clone() }).collect()
    }

    fn new_groups(&self, wanted: &Desired) -> Vec<Step> {
        let missing = wanted.groups.iter().filter(|(id, _)| self.tree.get(id).is_none());
        missing.map(|(id, group)| Step::Insert { id: id.clone(), body: group.body.clone() }).collect()
    }

    /// Creates or changes a resource that can change in place.
    fn ensured(&self, id: &Id, body: &Value) -> Option<Step> {
        let Some(present) = self.tree.get(id) else {
            return Some(Step::Insert { id: id.clone(), body: body.clone() });
        };
        let changes = changes(body, present);
        (!changes.is_empty()).then(|| Step::Patch { id: id.clone(), changes: changes.into() })
    }

    fn backend(&self, wanted: &Desired, present: Option<&Value>, adds: bool) -> Option<Step> {
        let (id, body) = &wanted.backend;
        let has_groups = wanted.groups.keys().all(|id| self.tree.get(id).is_some());
        // Also the rules that admit its checks.
        let has_check = wanted.checks.iter().all(|(id, body)| self.is_there(id, body));
        let paths: BTreeSet<String> = wanted.groups.keys().map(|id| id.path(self.config)).collect();
        let backend = |path: &String| json!({ "group": url(path), "balancingMode": "CONNECTION" });
        let Some(present) = present else {
            let mut body = body.clone();
            body["backends"] = paths.iter().map(backend).collect();
            return (has_groups && has_check).then(|| Step::Insert { id: id.clone(), body });
        };
        let mut changes = changes(body, present);
        if !has_check {
            changes.remove("healthChecks");
        }
        let now = Tree::backends(present);
        if has_groups {
            let has_all = now.is_superset(&paths) && !adds;
            let own: BTreeSet<String> =
                self.tree.of_kind(Kind::Group).map(|(id, _)| id.path(self.config)).collect();
            // Backends that others added stay.
            let is_kept = |path: &&String| paths.contains(*path) || !own.contains(*path) || !has_all;
            let mut next: BTreeSet<String> = now.iter().filter(is_kept).cloned().collect();
            next.extend(paths);
            if next != now {
                let listed = present.get("backends").and_then(Value::as_array).into_iter().flatten();
                let as_is = |path: &String| {
                    let mut all = listed.clone();
                    let is_it = |found: &&Value| {
                        found["group"].as_str().is_some_and(|url| crate::object::relative(url) == path)
                    };
                    all.find(is_it).cloned().unwrap_or_else(|| backend(path))
                };
                changes.insert("backends".to_owned(), next.iter().map(as_is).collect());
            }
        }
        patch(id, changes, present)
    }

    /// Firewall rules that admit clients.
    fn admit(&self, wanted: &Desired, addresses: &BTreeMap<Family, IpAddr>) -> Vec<Step> {
        let of = |frontend: &Frontend| self.admission(frontend, *addresses.get(&frontend.family)?);
        wanted.frontends.iter().filter_map(of).collect()
    }

    fn admission(&self, frontend: &Frontend, address: IpAddr) -> Option<Step> {
        let (id, body) = frontend.firewall.as_ref()?;
        // Also for clients of the address that it replaces.
        let mut all: BTreeSet<IpAddr> = self.rule_addresses(frontend.family).collect();
        all.insert(address);
        let mut body = body.clone();
        body["destinationRanges"] = all.into_iter().map(written).collect();
        self.ensured(id, &body)
    }

    fn rule_addresses(&self, family: Family) -> impl Iterator<Item = IpAddr> {
        let all = self.tree.of_kind(Kind::ForwardingRule).filter_map(|(_, rule)| address_of(rule));
        all.filter(move |address| Family::of(*address) == family)
    }

    /// Whether clients of the frontend are admitted.
    fn is_admitted(&self, frontend: &Frontend, address: IpAddr) -> bool {
        let Some((id, _)) = &frontend.firewall else { return true };
        let mut destinations = self.tree.get(id).into_iter().flat_map(Tree::destinations);
        destinations.any(|admitted| admitted == address)
    }

    /// Whether nothing is done any more to admit clients of the frontend.
    fn is_admission_over(&self, frontend: &Frontend, address: IpAddr) -> bool {
        self.is_admitted(frontend, address)
            || self.admission(frontend, address).is_some_and(|step| self.denied.has(&step))
    }

    fn rules(&self, wanted: &Desired, addresses: &BTreeMap<Family, IpAddr>, is_ready: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        for frontend in &wanted.frontends {
            let Some(address) = addresses.get(&frontend.family).copied() else { continue };
            for (id, body) in &frontend.rules {
                let mut body = body.clone();
                body["IPAddress"] = written(address).into();
                let Some(present) = self.tree.get(id) else {
                    // A rule that others wait for to go has the same address.
                    let is_free = self.conflicting(wanted, address).next().is_none();
                    if is_ready && is_free && self.is_admission_over(frontend, address) {
                        steps.push(Step::Insert { id: id.clone(), body });
                    }
                    continue;
                };
                let mut changes = changes(&body, present);
                let in_place = changes.remove("allowGlobalAccess");
                changes.remove("IPAddress");
                if address_of(present) != Some(address) || !changes.is_empty() {
                    // It cannot change: its address is held until the next one exists.
                    if is_ready {
                        steps.push(Step::Delete { id: id.clone() });
                    }
                } else if let Some(value) = in_place {
                    let changes = json!({ "allowGlobalAccess": value });
                    steps.extend(patch(id, changes.as_object().cloned().unwrap_or_default(), present));
                }
            }
        }
        steps
    }

    /// Rules of the owner at the address that are not wanted.
    fn conflicting(&self, wanted: &Desired, address: IpAddr) -> impl Iterator<Item = &Id> {
        let names: BTreeSet<Id> =
            wanted.frontends.iter().flat_map(|frontend| frontend.rules.keys()).cloned().collect();
        let all = self.tree.of_kind(Kind::ForwardingRule);
        let at_address = all.filter(move |(_, rule)| address_of(rule) == Some(address));
        at_address.map(|(id, _)| id).filter(move |id| !names.contains(id))
    }

    /// Deletes what is not wanted, and nothing needs.
    fn leftovers(
        &self,
        wanted: Option<(&Desired, &BTreeMap<Family, IpAddr>)>,
        is_ready: bool,
        is_admitted: bool,
    ) -> Vec<Step> {
        let names = wanted.map(|(wanted, _)| wanted.ids()).unwrap_or_default();
        let used: BTreeSet<IpAddr> =
            wanted.into_iter().flat_map(|(_, addresses)| addresses.values().copied()).collect();
        let rules: Vec<(&Id, &Value)> = self.tree.of_kind(Kind::ForwardingRule).collect();
        let rule_ids: BTreeSet<&Id> = rules.iter().map(|(id, _)| *id).collect();
        let has_all_rules =
            names.iter().filter(|id| id.kind == Kind::ForwardingRule).all(|id| rule_ids.contains(id));
        let old_rules = rules.iter().filter(|(id, _)| !names.contains(id)).count();
        let at = |address: Option<IpAddr>| rules.iter().any(|(_, rule)| address_of(rule) == address);
        let refers = |path: &str| {
            let of = |rule: &Value| rule.get("backendService").and_then(Value::as_str).map(str::to_owned);
            rules.iter().any(|(_, rule)| of(rule).is_some_and(|url| crate::object::relative(&url) == path))
        };
        let admitted = self.tree.admitted();
        // Where the Service moves again before clients are admitted to its last address: so it has two at most.
        let is_unknown = |address: IpAddr| {
            let is_known_one =
                |other: IpAddr| Family::of(other) == Family::of(address) && self.published.contains(&other);
            !self.published.contains(&address)
                && !admitted.contains(&address)
                && rules.iter().filter_map(|(_, rule)| address_of(rule)).any(is_known_one)
        };
        let has_old_check = self.tree.of_kind(Kind::HealthCheck).any(|(id, _)| !names.contains(id));
        let is_free = |id: &Id, found: &Value| match id.kind {
            Kind::ForwardingRule => {
                let address = address_of(found);
                let is_in_the_way = address.is_some_and(|address| used.contains(&address));
                let is_replaced = has_all_rules && is_admitted;
                is_ready && (is_replaced || is_in_the_way || address.is_some_and(is_unknown))
            }
            Kind::BackendService => !refers(&id.path(self.config)),
            Kind::HealthCheck | Kind::Group => !self.tree.is_used(id, self.config),
            // Rules that admit a check or clients go after what they admit to.
            Kind::Firewall => old_rules == 0 && !has_old_check,
            Kind::Address => {
                let address = address_of(found);
                !at(address) && address.is_none_or(|address| !used.contains(&address))
            }
        };
        let old = self.tree.own.iter().filter(|(id, _)| !names.contains(id));
        let mut old: Vec<&Id> = old.filter(|(id, found)| is_free(id, found)).map(|(id, _)| id).collect();
        // What refers to another comes first.
        old.reverse();
        old.into_iter().map(|id| Step::Delete { id: id.clone() }).collect()
    }
}

/// Whether clients of a published address lose it by these changes.
pub(crate) fn takes_address_away(steps: &[Step], tree: &Tree, wanted: &Desired) -> bool {
    let kept: BTreeSet<&Id> = wanted.frontends.iter().flat_map(|frontend| frontend.rules.keys()).collect();
    let rules = || tree.of_kind(Kind::ForwardingRule);
    let stay: BTreeSet<IpAddr> =
        rules().filter(|(id, _)| kept.contains(id)).filter_map(|(_, rule)| address_of(rule)).collect();
    steps.iter().any(|step| match step {
        Step::Delete { id } if id.kind == Kind::ForwardingRule => {
            tree.get(id).and_then(address_of).is_some_and(|address| !stay.contains(&address))
        }
        _ => false,
    })
}

/// A change of a resource that GCE refuses if somebody else changed it meanwhile.
fn patch(id: &Id, mut changes: serde_json::Map<String, Value>, present: &Value) -> Option<Step> {
    if changes.is_empty() {
        return None;
    }
    if let Some(fingerprint) = present.get("fingerprint").filter(|known| !known.is_null()) {
        changes.insert("fingerprint".to_owned(), fingerprint.clone());
    }
    Some(Step::Patch { id: id.clone(), changes: changes.into() })
}

/// Adds endpoints to groups that exist.
pub(crate) fn attached<'a>(
    wanted: impl Iterator<Item = (&'a Id, &'a BTreeSet<Endpoint>)>,
    tree: &Tree,
) -> Vec<Step> {
    let missing = wanted.filter_map(|(id, all)| {
        let present = tree.members.get(id)?;
        let missing = all.iter().filter(|endpoint| !has(present, endpoint));
        let endpoints: BTreeSet<Endpoint> = missing.take(MAX_ENDPOINTS).cloned().collect();
        (!endpoints.is_empty()).then(|| Step::Attach { id: id.clone(), endpoints })
    });
    missing.collect()
}

/// Removes endpoints.
pub(crate) fn detached<'a>(
    wanted: impl Iterator<Item = (&'a Id, &'a BTreeSet<Endpoint>)>,
    tree: &Tree,
) -> Vec<Step> {
    let old = wanted.filter_map(|(id, all)| {
        let old = tree.members.get(id)?.iter().filter(|endpoint| !has(all, endpoint));
        let endpoints: BTreeSet<Endpoint> = old.take(MAX_ENDPOINTS).cloned().collect();
        (!endpoints.is_empty()).then(|| Step::Detach { id: id.clone(), endpoints })
    });
    old.collect()
}

/// A VM that is made anew under its name can have another address. The address may be left out.
pub(crate) fn has(all: &BTreeSet<Endpoint>, endpoint: &Endpoint) -> bool {
    let is_same = |a: &str, b: &str| a == b || a.is_empty() || b.is_empty();
    all.iter().any(|found| found.instance == endpoint.instance && is_same(&found.address, &endpoint.address))
}

#[cfg(test)]
mod tests;
