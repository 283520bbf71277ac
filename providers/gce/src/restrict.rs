// SPDX-License-Identifier: Apache-2.0
//! Takes away the sources that a Service no longer admits while it is refused.

use std::collections::BTreeSet;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use steerage_model::Family;
use steerage_provider_api::{AdmittedSources, Error, Owner, RequestedSources, intersection};

use crate::desired::{Names, requested_sources};
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::step::Step;
use crate::unset_fields::{Effect, UNSET};

/// How far sources were taken away.
pub(crate) enum Restricted {
    /// Operations have not ended.
    Again,
    /// To these; `None` if there is no load balancer.
    To(Option<AdmittedSources>),
}

impl Gce {
    /// Returns who may connect, as it is read now.
    pub(crate) async fn restrict(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
        entry: &mut ServiceState,
    ) -> Result<Restricted, Error> {
        let requested = requested_sources(&requested.ranges, &requested.annotations)?;
        if !self.settle(entry).await? {
            return Ok(Restricted::Again);
        }
        let names = Names { config: &self.config, owner };
        let (mut steps, mut admitted, mut is_there) = (Vec::new(), BTreeSet::new(), false);
        for family in [Family::V4, Family::V6] {
            let id = names.firewall(family);
            let found = match self.read(&id).await {
                Err(failure) if failure.is_denied() => {
                    return Ok(Restricted::To(Some(AdmittedSources::NotPermitted)));
                }
                other => other?,
            };
            let Some(found) = found.filter(|found| self.owner(found).as_ref() == Some(owner)) else {
                continue;
            };
            is_there = true;
            match narrowing(&found, &requested, family) {
                Narrowing::None(present) => admitted.extend(present),
                Narrowing::Delete => steps.push(Step::Delete { id }),
                Narrowing::Patch(changes) => steps.push(Step::Patch { id, changes }),
            }
        }
        if !steps.is_empty() {
            for step in &steps {
                tracing::info!(service = %owner.service, change = %step, "removing sources of a refused Service");
            }
            // An earlier refusal may be of another right.
            for step in &steps {
                entry.denied.forget(step.id());
            }
            let sent = self.send_all(owner, &steps, entry).await;
            entry.forget();
            sent?;
            if steps.iter().any(|step| entry.denied.has(step)) {
                return Ok(Restricted::To(Some(AdmittedSources::NotPermitted)));
            }
            return Ok(Restricted::Again);
        }
        if !is_there {
            let owners = self.read_owners(&owner.service, false).await?;
            if !owners.contains_key(owner) {
                return Ok(Restricted::To(None));
            }
        }
        if admitted.iter().any(|range| range.prefix_len() == 0) {
            return Ok(Restricted::To(Some(AdmittedSources::Everybody)));
        }
        let admitted = admitted.iter().map(IpNet::to_string).collect();
        Ok(Restricted::To(Some(AdmittedSources::Only(admitted))))
    }
}

/// How a rule comes to admit nobody who is not requested.
#[derive(Debug, PartialEq, Eq)]
enum Narrowing {
    /// It admits these, who all are.
    None(BTreeSet<IpNet>),
    /// A rule without a source would admit everybody.
    Delete,
    Patch(Value),
}

fn narrowing(rule: &Value, requested: &[IpNet], family: Family) -> Narrowing {
    let is_set =
        |field: &str| rule.get(field).and_then(Value::as_array).is_some_and(|values| !values.is_empty());
    let others =
        UNSET.into_iter().filter(|field| field.effect == Effect::AdmitsTooMany && is_set(field.name));
    let others: Vec<_> = others.collect();
    let mut present = ranges(rule);
    if others.is_empty() && !is_set("sourceRanges") {
        present.insert(everybody(family));
    }
    let left = narrowed(&present, requested, family);
    if requested.is_empty() || (left.is_none() && others.is_empty()) {
        return Narrowing::None(present);
    }
    let is_nobody_left = left.as_ref().unwrap_or(&present).is_empty();
    if is_nobody_left {
        return Narrowing::Delete;
    }
    let mut changes = json!({});
    if let Some(left) = left {
        changes["sourceRanges"] = left.iter().map(IpNet::to_string).collect();
    }
    for field in others {
        changes[field.name] = field.value;
    }
    Narrowing::Patch(changes)
}

fn everybody(family: Family) -> IpNet {
    match family {
        Family::V4 => Ipv4Net::default().into(),
        Family::V6 => Ipv6Net::default().into(),
    }
}

/// The ranges that a rule admits.
fn ranges(rule: &Value) -> BTreeSet<IpNet> {
    let all = rule.get("sourceRanges").and_then(Value::as_array).into_iter().flatten();
    all.filter_map(|range| range.as_str()?.parse().ok()).collect()
}

/// The ranges that are admitted and requested; `None` if all are.
fn narrowed(present: &BTreeSet<IpNet>, requested: &[IpNet], family: Family) -> Option<BTreeSet<IpNet>> {
    if requested.is_empty() {
        return None;
    }
    let present: Vec<IpNet> = present.iter().copied().collect();
    let both = intersection(&present, requested);
    let both: BTreeSet<IpNet> = both.into_iter().filter(|range| Family::of(range.addr()) == family).collect();
    (both != present.iter().map(IpNet::trunc).collect()).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn nobody_is_admitted_who_was_not() {
        for (present, requested, expected) in [
            (&["0.0.0.0/0"][..], &[][..], None),
            (&["0.0.0.0/0"], &["10.0.0.0/8", "2001:db8::/32"], Some(&["10.0.0.0/8"][..])),
            (&["10.0.0.0/8"], &["10.1.0.0/16", "192.0.2.0/24"], Some(&["10.1.0.0/16"])),
            (&["10.0.0.0/8"], &["192.0.2.0/24"], Some(&[])),
            (&["10.0.0.0/8"], &["0.0.0.0/0"], None),
            (&["10.0.0.0/8"], &["2001:db8::/32"], Some(&[])),
        ] {
            let present = nets(present).into_iter().collect();
            let got = narrowed(&present, &nets(requested), Family::V4);
            assert_eq!(
                got,
                expected.map(|texts| nets(texts).into_iter().collect()),
                "{present:?} {requested:?}"
            );
        }
    }
}
