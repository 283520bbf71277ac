// SPDX-License-Identifier: Apache-2.0
//! What exists of a Service's load balancer, as it was read last, with the changes since then. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::Value;
use steerage_model::Family;

use crate::compare;
use crate::config::Config;
use crate::object::{Id, Kind, last, relative};
use crate::step::{Endpoint, Step};

/// The resources of an owner.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tree {
    /// The owner's.
    pub(crate) own: BTreeMap<Id, Value>,
    /// Those that Services share and this one needs.
    pub(crate) shared: BTreeMap<Id, Value>,
    /// The endpoints of the owner's groups.
    pub(crate) members: BTreeMap<Id, BTreeSet<Endpoint>>,
    /// Requested addresses that were looked for, by name or address; `None` if there is none.
    pub(crate) given: BTreeMap<String, Option<Value>>,
}

impl Tree {
    pub(crate) fn get(&self, id: &Id) -> Option<&Value> {
        self.own.get(id).or_else(|| self.shared.get(id))
    }

    pub(crate) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (&Id, &Value)> {
        self.own.iter().filter(move |(id, _)| id.kind == kind)
    }

    /// The addresses to which firewall rules admit clients.
    pub(crate) fn admitted(&self) -> BTreeSet<IpAddr> {
        self.of_kind(Kind::Firewall).flat_map(|(_, rule)| Self::destinations(rule)).collect()
    }

    /// The addresses to which a firewall rule admits clients.
    pub(crate) fn destinations(firewall: &Value) -> impl Iterator<Item = IpAddr> {
        let ranges = firewall.get("destinationRanges").and_then(Value::as_array).into_iter().flatten();
        ranges.filter_map(|range| compare::address(range.as_str()?))
    }

    /// Those that have a fingerprint, which is not known: the changes need it.
    pub(crate) fn without_fingerprint(&self, steps: &[Step]) -> Vec<Id> {
        let has_one = |kind| matches!(kind, Kind::BackendService | Kind::ForwardingRule);
        let patched = steps.iter().filter_map(|step| match step {
            Step::Patch { id, .. } if has_one(id.kind) => Some(id),
            _ => None,
        });
        let is_unread = |id: &&Id| self.get(id).is_some_and(|known| known.get("fingerprint").is_none());
        patched.filter(is_unread).cloned().collect()
    }

    /// Whether the endpoints of all groups are known.
    pub(crate) fn has_all_members(&self) -> bool {
        self.of_kind(Kind::Group).all(|(id, _)| self.members.contains_key(id))
    }

    /// The paths of a backend service's backends.
    pub(crate) fn backends(service: &Value) -> BTreeSet<String> {
        let all = service.get("backends").and_then(Value::as_array).into_iter().flatten();
        all.filter_map(|backend| backend.get("group")?.as_str()).map(|url| relative(url).to_owned()).collect()
    }

    /// The paths of a backend service's health checks.
    pub(crate) fn checks(service: &Value) -> BTreeSet<String> {
        let all = service.get("healthChecks").and_then(Value::as_array).into_iter().flatten();
        all.filter_map(Value::as_str).map(|url| relative(url).to_owned()).collect()
    }

    /// Whether a backend service of the owner has a health check that is none of these.
    pub(crate) fn uses_other_checks<'a>(&self, ids: impl Iterator<Item = &'a Id>, config: &Config) -> bool {
        let wanted: BTreeSet<String> = ids.map(|id| id.path(config)).collect();
        self.of_kind(Kind::BackendService).any(|(_, found)| !Self::checks(found).is_subset(&wanted))
    }

    /// Whether a backend service of the owner has it.
    pub(crate) fn is_used(&self, id: &Id, config: &Config) -> bool {
        let path = id.path(config);
        self.of_kind(Kind::BackendService)
            .any(|(_, found)| Self::backends(found).contains(&path) || Self::checks(found).contains(&path))
    }

    /// A request succeeded. False if its result has to be read.
    pub(crate) fn note(&mut self, step: &Step, is_shared: bool) -> bool {
        let all = if is_shared { &mut self.shared } else { &mut self.own };
        match step {
            // GCE chooses the address.
            Step::Insert { id, .. } if id.kind == Kind::Address => return false,
            Step::Insert { id, body } => {
                all.insert(id.clone(), body.clone());
                if id.kind == Kind::Group {
                    self.members.entry(id.clone()).or_default();
                }
            }
            Step::Patch { id, changes } => {
                let Some(Value::Object(known)) = all.get_mut(id) else { return false };
                known.extend(changes.as_object().cloned().unwrap_or_default());
                // GCE writes another one.
                known.remove("fingerprint");
            }
            Step::Delete { id } => {
                all.remove(id);
                self.members.remove(id);
                // A requested address was read with what used it then: it is read again.
                if id.kind == Kind::ForwardingRule {
                    self.given.retain(|_, found| !found.as_ref().is_some_and(|found| is_user(id, found)));
                }
            }
            Step::Attach { id, endpoints } => {
                self.members.entry(id.clone()).or_default().extend(endpoints.iter().cloned());
            }
            Step::Detach { id, endpoints } => {
                if let Some(known) = self.members.get_mut(id) {
                    known.retain(|endpoint| !endpoints.contains(endpoint));
                }
            }
        }
        true
    }

    /// The addresses to which packets come, one of each family. `None` if a family has two, of which the Service leaves one.
    pub(crate) fn serving(&self) -> Option<Vec<IpAddr>> {
        let all: BTreeSet<IpAddr> =
            self.of_kind(Kind::ForwardingRule).filter_map(|(_, rule)| address_of(rule)).collect();
        let families: BTreeSet<Family> = all.iter().copied().map(Family::of).collect();
        (families.len() == all.len()).then(|| all.into_iter().collect())
    }
}

/// Whether the reserved address names a user of this name.
fn is_user(id: &Id, address: &Value) -> bool {
    let users = address.get("users").and_then(Value::as_array).into_iter().flatten();
    users.filter_map(Value::as_str).any(|user| last(user) == id.name)
}

/// The address that a forwarding rule or address has, as other resources write it.
pub(crate) fn address_of(resource: &Value) -> Option<IpAddr> {
    let text = resource.get("IPAddress").or_else(|| resource.get("address"))?.as_str()?;
    compare::address(text)
}

/// An address as a forwarding rule and a firewall rule write it: GCE gives a load balancer 96 bits of IPv6.
pub(crate) fn written(address: IpAddr) -> String {
    match Family::of(address) {
        Family::V4 => address.to_string(),
        Family::V6 => format!("{address}/96"),
    }
}
