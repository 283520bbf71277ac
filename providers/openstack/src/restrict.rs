// SPDX-License-Identifier: Apache-2.0
//! Takes away the sources that a Service no longer admits while it is refused, one listener after the other.

use std::collections::BTreeSet;

use ipnet::IpNet;
use serde_json::json;
use steerage_model::Family;
use steerage_provider_api::{AdmittedSources, Error, Owner, RequestedSources, intersection};

use crate::apply::Present;
use crate::config::Driver;
use crate::desired::{allowed, is_nobody};
use crate::marks;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::step::Step;
use crate::types::Listener;

/// How far sources were taken away.
pub(crate) enum Restricted {
    /// More changes are needed.
    Again,
    /// To these; `None` if there is no load balancer.
    To(Option<AdmittedSources>),
}

impl OpenStack {
    /// Returns who may connect, as it is read now.
    pub(crate) async fn restrict(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
        entry: &mut ServiceState,
    ) -> Result<Restricted, Error> {
        // What is remembered may not be who may connect.
        entry.is_verified = false;
        let tree = match self.present(owner, entry, None).await? {
            Present::Nothing => return Ok(Restricted::To(None)),
            Present::Busy => return Ok(Restricted::Again),
            Present::Broken(_) => {
                return Err(Error::Unavailable("Octavia reports ERROR for the load balancer".to_owned()));
            }
            Present::Ready(tree) => tree,
        };
        let family = tree.balancer.vip_address.map_or(Family::V4, Family::of);
        let mut admitted = BTreeSet::new();
        for listener in tree.listeners.iter().filter(|listener| marks::is_part(&listener.tags, owner)) {
            let present = ranges(listener);
            let narrowed = narrowed(present.as_deref(), &requested.ranges, family);
            if self.config.driver() == Driver::Amphora && narrowed != sorted(listener) {
                let changes = json!({ "allowed_cidrs": narrowed });
                let port = format!("{} {}", listener.protocol, listener.protocol_port);
                let step = Step::UpdateListener { id: listener.id.clone(), port, changes };
                entry.begin();
                match self.calls.send(step.call()).await {
                    Ok(_) => tracing::info!(service = %owner.service, change = %step, "sources taken away"),
                    Err(failure) if failure.is_busy() => {}
                    Err(failure) => return Err(failure.into()),
                }
                entry.sent();
                return Ok(Restricted::Again);
            }
            admitted.extend(sorted(listener).into_iter().map(|all| (listener.id.clone(), all)));
            if sorted(listener).is_empty() {
                return Ok(Restricted::To(Some(AdmittedSources::Everybody)));
            }
        }
        let admitted = admitted.into_iter().map(|(_, range)| range).filter(|range| !is_nobody(range));
        Ok(Restricted::To(Some(AdmittedSources::Only(admitted.collect()))))
    }
}

fn sorted(listener: &Listener) -> Vec<String> {
    let mut all = listener.allowed_cidrs.clone().unwrap_or_default();
    all.sort();
    all
}

/// What a listener admits; `None` if everybody.
fn ranges(listener: &Listener) -> Option<Vec<IpNet>> {
    let all = listener.allowed_cidrs.as_ref().filter(|all| !all.is_empty())?;
    Some(all.iter().filter_map(|range| range.parse().ok()).collect())
}

/// The ranges that are admitted and requested. Empty if that is everybody.
fn narrowed(present: Option<&[IpNet]>, requested: &[IpNet], family: Family) -> Vec<String> {
    match (present, requested) {
        (None, requested) => allowed(requested, family),
        (Some(present), []) => allowed(present, family),
        (Some(present), requested) => {
            let both: Vec<IpNet> = intersection(present, requested).into_iter().collect();
            if both.is_empty() {
                // Something is requested, but nothing of it is admitted.
                let other =
                    [Family::V4, Family::V6].map(|of| if of == Family::V4 { "0.0.0.0/32" } else { "::/128" });
                return vec![other[usize::from(family == Family::V6)].to_owned()];
            }
            allowed(&both, family)
        }
    }
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
            (None, &[][..], &[][..]),
            (None, &["10.0.0.0/8", "2001:db8::/32"], &["10.0.0.0/8"]),
            (None, &["2001:db8::/32"], &["0.0.0.0/32"]),
            (Some(&["10.0.0.0/8"][..]), &[], &["10.0.0.0/8"]),
            (Some(&["10.0.0.0/8"]), &["10.1.0.0/16", "192.0.2.0/24"], &["10.1.0.0/16"]),
            (Some(&["10.0.0.0/8"]), &["192.0.2.0/24"], &["0.0.0.0/32"]),
            (Some(&["0.0.0.0/32"]), &["0.0.0.0/0"], &["0.0.0.0/32"]),
        ] {
            let present = present.map(nets);
            let got = narrowed(present.as_deref(), &nets(requested), Family::V4);
            assert_eq!(got, expected, "{present:?} {requested:?}");
        }
    }
}
