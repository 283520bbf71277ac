// SPDX-License-Identifier: Apache-2.0
//! Takes away the sources that a Service no longer admits while it is refused, one listener after the other.

use std::collections::BTreeSet;

use ipnet::IpNet;
use serde_json::json;
use steerage_model::Family;
use steerage_provider_api::{AdmittedSources, Error, Owner, RequestedSources, intersection};

use crate::adoption::is_part;
use crate::apply::{Present, kept_in_error, not_shown};
use crate::config::Driver;
use crate::provider::OpenStack;
use crate::sources::{allowed, is_nobody, nobody, requested_sources};
use crate::state::ServiceState;
use crate::step::Step;
use crate::types::{Listener, Provisioning};

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
        let requested = requested_sources(&requested.ranges, &requested.annotations)?;
        // What is remembered may not be who may connect.
        entry.is_verified = false;
        let present = self.present(owner, entry, None).await;
        if self.config.driver() == Driver::Ovn {
            return self.restrict_rules(owner, &requested, &present, entry).await;
        }
        let tree = match present? {
            Present::Nothing => return Ok(Restricted::To(None)),
            Present::Busy => return Ok(Restricted::Again),
            Present::Broken(balancer) => return Err(kept_in_error(&balancer, "source ranges")),
            Present::Ready(tree) => tree,
        };
        let families = tree.balancer.families();
        let mut admitted = BTreeSet::new();
        let is_ours = |listener: &&Listener| is_part(owner, &tree.balancer, &listener.name, &listener.tags);
        for listener in tree.listeners.iter().filter(is_ours) {
            let present = ranges(listener);
            let narrowed = narrowed(present.as_deref(), &requested, &families);
            // Octavia writes the ranges before it carries them out: in ERROR, they may not be who is admitted.
            let is_failed = listener.provisioning_status == Provisioning::Error && !narrowed.is_empty();
            if is_failed || narrowed != sorted(listener) {
                let changes = json!({ "allowed_cidrs": narrowed });
                let port = format!("{} {}", listener.protocol, listener.protocol_port);
                let step = Step::UpdateListener { id: listener.id.clone(), port, changes };
                if !entry.may_make(&step) {
                    return Err(if is_failed { removal_failed(&step) } else { not_shown(&step) });
                }
                entry.begin();
                match self.calls.send(step.call()).await {
                    Ok(_) => {
                        entry.note_made(&step);
                        tracing::info!(service = %owner.service, change = %step, "sources of a refused Service removed");
                    }
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

    /// With OVN, rules alone decide: the state of the load balancer does not matter.
    async fn restrict_rules(
        &self,
        owner: &Owner,
        requested: &[IpNet],
        present: &Result<Present, Error>,
        entry: &mut ServiceState,
    ) -> Result<Restricted, Error> {
        // Members are checked from these.
        let configured = [Family::V4, Family::V6].map(|family| self.config.nodes_subnet(family).to_owned());
        let mut subnets = BTreeSet::from(configured);
        if let Some(tree) = entry.known(owner) {
            let pools =
                tree.pools.iter().filter(|pool| is_part(owner, &tree.balancer, &pool.name, &pool.tags));
            subnets
                .extend(pools.flat_map(|pool| &pool.members).filter_map(|member| member.subnet_id.clone()));
        }
        let subnets: Vec<String> = subnets.into_iter().collect();
        let admitted = self.narrow_rules(owner, requested, &subnets, entry).await?;
        if matches!(present, Ok(Present::Nothing)) {
            return Ok(Restricted::To(None));
        }
        // Of the rules that are not managed nothing is known, and OVN itself admits everybody.
        let admitted = admitted.map_or(AdmittedSources::Everybody, AdmittedSources::WithOthers);
        Ok(Restricted::To(Some(admitted)))
    }
}

/// A removal of sources that Octavia's worker failed as often as it may be sent.
fn removal_failed(step: &Step) -> Error {
    Error::Unavailable(format!(
        "Octavia accepted the removal of sources and failed it ({step}): the listener is in ERROR, and may admit the former sources, whatever \
         allowed_cidrs it shows. Steerage makes the change again later. Look at Octavia's logs."
    ))
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
fn narrowed(present: Option<&[IpNet]>, requested: &[IpNet], families: &[Family]) -> Vec<String> {
    match (present, requested) {
        (None, requested) => allowed(requested, families),
        (Some(present), []) => allowed(present, families),
        (Some(present), requested) => {
            let both: Vec<IpNet> = intersection(present, requested).into_iter().collect();
            if both.is_empty() {
                // Something is requested, but nothing of it is admitted.
                let first = families.first().copied().unwrap_or(Family::V4);
                return vec![nobody(first).to_owned()];
            }
            allowed(&both, families)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use steerage_model::Protocol;
    use steerage_provider_api::Provider as _;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    /// Rules are Neutron's: a load balancer that Octavia does not change keeps nobody admitted.
    #[tokio::test(start_paused = true)]
    async fn rules_are_narrowed_whatever_the_state_of_the_load_balancer() {
        for state in ["ERROR", "PENDING_UPDATE", "ACTIVE"] {
            let cloud = Scripted::new();
            let provider = cloud.provider_with(|config| {
                "ovn".clone_into(&mut config.provider);
                config.security_group = Some("nodes".to_owned());
            });
            let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
            settle(&provider, &lb).await.unwrap();
            for balancer in crate::scripted::ids(&cloud) {
                cloud.set("loadbalancers", ("id", &balancer), &json!({ "provisioning_status": state }));
            }
            let requested =
                RequestedSources { ranges: nets(&["192.0.2.0/24"]), ..RequestedSources::default() };
            let mut entry = ServiceState::default();
            let narrowed = provider.restrict(&lb.owner, &requested, &mut entry).await.unwrap();
            assert!(matches!(narrowed, Restricted::To(Some(AdmittedSources::WithOthers(_)))), "{state}");
            let mut sources: Vec<_> = cloud
                .all("security-group-rules")
                .iter()
                .map(|rule| rule["remote_ip_prefix"].as_str().unwrap().to_owned())
                .collect();
            sources.sort();
            assert_eq!(sources, ["10.0.0.0/24", "192.0.2.0/24"], "{state}");
        }
    }

    /// Octavia's API shows the ranges of a change that its worker failed.
    #[tokio::test(start_paused = true)]
    async fn ranges_of_a_failed_change_are_sent_again() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        settle(&provider, &lb).await.unwrap();
        let requested = RequestedSources { ranges: nets(&["10.0.0.0/8"]), ..RequestedSources::default() };
        cloud.break_worker(Some("PUT listeners"));
        let failing = async || provider.restrict_sources(&lb.owner, &requested).await.unwrap_err();
        // Each keeps the load balancer from other changes while Octavia works on it: they are few.
        let mut told = Vec::new();
        while told.last() != Some(&"ProviderUnavailable") {
            told.push(failing().await.reason());
        }
        assert!((3..6).contains(&told.len()), "{told:?}");
        assert!(told[..told.len() - 1].iter().all(|reason| *reason == "ProviderBusy"), "{told:?}");
        cloud.writes();
        let text = failing().await.to_string();
        assert!(text.contains("may admit the former sources"), "{text}");
        assert!(cloud.writes().is_empty());
        cloud.break_worker(None);
        tokio::time::advance(std::time::Duration::from_mins(10)).await;
        provider.restrict_sources(&lb.owner, &requested).await.unwrap_err();
        let admitted = provider.restrict_sources(&lb.owner, &requested).await.unwrap();
        assert_eq!(admitted, Some(AdmittedSources::Only(["10.0.0.0/8".to_owned()].into())));
        assert_eq!(cloud.all("listeners")[0]["provisioning_status"], "ACTIVE");
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancer_in_error_is_named_while_its_service_is_refused() {
        let cloud = Scripted::new();
        let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        settle(&cloud.provider(), &lb).await.unwrap();
        let provider = cloud.provider();
        let id = crate::scripted::ids(&cloud).remove(0);
        cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "ERROR" }));
        let requested = RequestedSources::default();
        for error in [
            provider.restrict_sources(&lb.owner, &requested).await.unwrap_err(),
            provider.set_targets(&lb.owner, &lb.targets()).await.unwrap_err(),
        ] {
            let command = format!("`openstack loadbalancer failover {id}`.");
            assert!(
                error.reason() == "ProviderUnavailable" && error.to_string().contains(&command),
                "{error}"
            );
        }
    }

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
            let got = narrowed(present.as_deref(), &nets(requested), &[Family::V4]);
            assert_eq!(got, expected, "{present:?} {requested:?}");
        }
    }
}
