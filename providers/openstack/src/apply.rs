// SPDX-License-Identifier: Apache-2.0
//! Brings a load balancer in place: one change at a time, because Octavia takes the next one only when the last is complete. Nothing
//! waits: the controller calls again.

use std::collections::BTreeSet;
use std::net::IpAddr;

use http::Method;
use ipnet::IpNet;
use steerage_model::{Family, Ingress};
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use steerage_provider_cloud::Refusals;

use crate::client::{Call, object};
use crate::desired::{Desired, Nodes, WantedAddress};
use crate::diff::diff;
use crate::error::CallError;
use crate::provider::OpenStack;
use crate::state::{Complete, ServiceState, Tree};
use crate::step::Step;
use crate::types::{Balancer, Provisioning};
use crate::{observe, reasons};

/// Members that one call finds refused, each by a request of its own.
const MAX_REFUSED: usize = 20;

/// What there is of an owner.
pub(crate) enum Present {
    /// No load balancer.
    Nothing,
    /// A load balancer, or the one of an earlier Service of the name, that cannot be changed now.
    Busy,
    /// One in `ERROR`.
    Broken(Balancer),
    /// One that can be changed, with all that is in it.
    Ready(Box<Tree>),
}

/// The outcome of a change that is not complete.
pub(crate) fn again(entry: &ServiceState, provider: &OpenStack) -> Outcome {
    Outcome { progress: Progress::Again(entry.poll(provider.config.poll)), ..Outcome::done() }
}

impl OpenStack {
    pub(crate) async fn apply_wanted(
        &self,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let (owner, nodes) = (&lb.owner, wanted.nodes());
        entry.refused.retain(|address| nodes.contains_key(address));
        let mut reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
        if compare == Compare::Remembered
            && let Some(complete) = &entry.complete
            && complete.owner == *owner
            && complete.wanted == reduced
        {
            let (ingress, incomplete) = (complete.ingress.clone(), complete.incomplete.clone());
            return Ok(Outcome { incomplete, ..finished(entry, &nodes, wanted.refused, ingress) });
        }
        if compare == Compare::InPlace && entry.complete.is_some() {
            entry.forget();
        }
        let tree = match self.present(owner, entry, true).await? {
            Present::Busy => return Ok(again(entry, self)),
            Present::Nothing => return self.create(lb, &wanted, entry).await,
            Present::Broken(balancer) => return self.remake(&wanted, balancer, entry).await,
            Present::Ready(tree) => tree,
        };
        check_kept(&tree.balancer, &wanted)?;
        for _ in 0..=MAX_REFUSED {
            let steps = diff(owner, &tree, &reduced, entry.last_pool.as_deref())?;
            let Some(step) = steps.into_iter().next() else {
                let (ingress, incomplete) = self.ensure_address(lb, &wanted, &tree.balancer, entry).await?;
                entry.note_working();
                entry.complete = Some(Complete {
                    owner: owner.clone(),
                    wanted: reduced,
                    ingress: ingress.clone(),
                    incomplete: incomplete.clone(),
                });
                return Ok(Outcome { incomplete, ..finished(entry, &nodes, wanted.refused, ingress) });
            };
            if self.make(&step, entry, &nodes).await? {
                break;
            }
            reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
        }
        Ok(again(entry, self))
    }

    /// Finds the owner's load balancer, and reads what is not known of it. If `is_writing`, those of earlier Services of the name go, and
    /// a second one of the owner.
    pub(crate) async fn present(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        is_writing: bool,
    ) -> Result<Present, Error> {
        let calls = &*self.calls;
        let mut balancer = None;
        if let Some(known) = entry.known(owner).map(|tree| tree.balancer.clone()) {
            balancer = if entry.changing.is_some() {
                let now = observe::balancer(calls, &known.id).await?;
                if let (Some(now), Some((_, tree))) = (&now, &mut entry.tree) {
                    tree.balancer = now.clone();
                }
                now
            } else {
                Some(known)
            };
        }
        if balancer.is_none() {
            entry.forget();
            let all = observe::balancers(calls, &self.config.cluster, Some(&owner.service)).await?;
            let mut mine: Vec<Balancer> = Vec::new();
            for (of, found) in all {
                if of == *owner && mine.is_empty() {
                    mine.push(found);
                } else if is_writing {
                    self.remove(&of, &found, of != *owner).await?;
                    entry.sent();
                    return Ok(Present::Busy);
                }
            }
            balancer = mine.pop();
        }
        let Some(balancer) = balancer else { return Ok(Present::Nothing) };
        if entry.known(owner).is_none() {
            let tree = Tree::empty(balancer.clone());
            (entry.tree, entry.is_verified) = (Some((owner.clone(), tree)), false);
        }
        match balancer.provisioning_status {
            Provisioning::Pending | Provisioning::Deleting => {
                entry.changing.get_or_insert_with(tokio::time::Instant::now);
                return Ok(Present::Busy);
            }
            Provisioning::Error => return Ok(Present::Broken(balancer)),
            Provisioning::Active => entry.changing = None,
        }
        if !entry.is_verified {
            let tree = observe::tree(calls, owner, balancer.clone()).await?;
            (entry.tree, entry.is_verified) = (Some((owner.clone(), tree)), true);
        }
        match entry.known(owner) {
            Some(tree) => Ok(Present::Ready(Box::new(tree.clone()))),
            None => Ok(Present::Nothing),
        }
    }

    /// Makes a change. False if nothing was changed, because a member was refused.
    pub(crate) async fn make(
        &self,
        step: &Step,
        entry: &mut ServiceState,
        nodes: &Nodes,
    ) -> Result<bool, Error> {
        if !entry.may_make(step) {
            return Err(Error::Unavailable(format!(
                "Octavia accepted a change and does not show it ({step}). Steerage makes it again later. Look at Octavia's logs."
            )));
        }
        if let Step::SetMembers { name, .. } = step {
            // Also if it fails: the others do not wait for it.
            entry.last_pool = Some(name.clone());
        }
        let answer = match self.calls.send(step.call()).await {
            Ok(answer) => answer,
            Err(failure) if failure.is_busy() => {
                entry.sent();
                return Ok(true);
            }
            Err(failure) => {
                let is_of_members = matches!(step, Step::SetMembers { .. });
                if is_of_members && note_refused(&failure, nodes, &mut entry.refused) {
                    return Ok(false);
                }
                entry.note_failed();
                return Err(failure.into());
            }
        };
        tracing::info!(change = %step, "load balancer changed");
        entry.note_made(step);
        entry.sent();
        let is_certain = entry.tree.as_mut().is_some_and(|(_, tree)| tree.note(step, &answer));
        entry.is_verified &= is_certain;
        Ok(true)
    }

    async fn create(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let (vip, is_required) = self.vip(lb, wanted, entry).await?;
        let nodes = wanted.nodes();
        for _ in 0..=MAX_REFUSED {
            let reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
            let body = Some(reduced.creation(vip.filter(|vip| entry.refused_vip != Some(*vip))));
            let call = Call::octavia(Method::POST, "POST loadbalancers", "loadbalancers", body);
            let name = call.name();
            match self.calls.send(call).await {
                Ok(answer) => {
                    let known = Tree::created(&answer);
                    entry.is_verified = known.is_some();
                    let tree = match known {
                        Some(tree) => tree,
                        None => Tree::empty(object(&name, answer, "loadbalancer")?),
                    };
                    tracing::info!(service = %lb.owner.service, id = tree.balancer.id, "load balancer created");
                    entry.sent();
                    entry.tree = Some((lb.owner.clone(), tree));
                    return Ok(again(entry, self));
                }
                Err(failure) if note_refused(&failure, &nodes, &mut entry.refused) => {}
                Err(failure) => match vip.filter(|vip| is_taken(&failure, *vip)) {
                    Some(vip) if is_required => return Err(taken(vip, &failure)),
                    // Somebody else has it by now: another one is better than none.
                    Some(vip) if entry.refused_vip != Some(vip) => entry.refused_vip = Some(vip),
                    _ => return Err(failure.into()),
                },
            }
        }
        Ok(again(entry, self))
    }

    /// The VIP to ask for, and whether it is the only one that will do.
    async fn vip(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &ServiceState,
    ) -> Result<(Option<IpAddr>, bool), Error> {
        let subnet = observe::subnet(&*self.calls, &wanted.subnet).await?.ok_or_else(|| {
            let message = format!(
                "The subnet {} of VIPs does not exist, or the project does not see it. No load balancer is created. Correct \
                 --openstack-subnet-id or the annotation {}.",
                wanted.subnet,
                crate::annotations::SUBNET
            );
            Error::invalid(reasons::REJECTED_BY_PROVIDER, message)
        })?;
        let is_v4 = wanted.family == Family::V4;
        if (subnet.ip_version == 4) != is_v4 {
            let message = format!(
                "The Service has {} addresses, and the subnet {} of VIPs has IPv{} ones. No load balancer is created. Name another subnet \
                 by {}, or change spec.ipFamilies.",
                wanted.family,
                wanted.subnet,
                subnet.ip_version,
                crate::annotations::SUBNET
            );
            return Err(Error::invalid(reasons::SUBNET_FAMILY_DIFFERS, message));
        }
        Ok(match &wanted.address {
            WantedAddress::Internal(Some(requested)) => (Some(*requested), true),
            // Clients know the address that it had.
            WantedAddress::Internal(None) => {
                let mut published = lb.published.iter().copied();
                let range: Option<IpNet> = subnet.cidr.parse().ok();
                let known = entry
                    .kept_vip
                    .or_else(|| published.find(|ip| range.is_some_and(|range| range.contains(ip))));
                (known, false)
            }
            WantedAddress::Floating { .. } | WantedAddress::Given(_) => (None, false),
        })
    }

    /// Deletes a load balancer in `ERROR`, so that another one takes its place. Its address stays if it can.
    async fn remake(
        &self,
        wanted: &Desired,
        balancer: Balancer,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let id = &balancer.id;
        if !entry.may_remake() {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}, which Steerage made anew a moment ago. It is made anew again later. \
                 Look at the load balancer and at Octavia's logs."
            )));
        }
        tracing::warn!(id, "load balancer in ERROR; deleting it and creating another one");
        if matches!(wanted.address, WantedAddress::Internal(_)) {
            entry.kept_vip = balancer.vip_address;
        }
        self.delete_balancer(id).await?;
        entry.note_remade();
        entry.sent();
        Ok(again(entry, self))
    }
}

/// Refuses what Octavia cannot change.
fn check_kept(balancer: &Balancer, wanted: &Desired) -> Result<(), Error> {
    let immutable = |what: &str, has: &str, wants: &str| {
        let message = format!(
            "The {what} should be {wants}, and the load balancer of the Service has {has}, which Octavia cannot change. The present one is \
             kept. Restore the request, or create the Service again."
        );
        Err(Error::invalid(reasons::ADDRESS_IMMUTABLE, message))
    };
    if let (WantedAddress::Internal(Some(requested)), Some(vip)) = (&wanted.address, balancer.vip_address)
        && *requested != vip
    {
        return immutable("address", &vip.to_string(), &requested.to_string());
    }
    match &balancer.vip_subnet_id {
        Some(subnet) if wanted.is_subnet_requested && *subnet != wanted.subnet => {
            return immutable("subnet", subnet, &wanted.subnet);
        }
        _ => {}
    }
    match &balancer.provider {
        Some(provider) if *provider != wanted.provider => {
            immutable("Octavia provider", provider, &wanted.provider)
        }
        _ => Ok(()),
    }
}

/// The outcome of a complete change.
fn finished(
    entry: &mut ServiceState,
    nodes: &Nodes,
    refused: Vec<(String, String)>,
    ingress: Vec<Ingress>,
) -> Outcome {
    // What is not waiting was tried and accepted.
    let waiting: BTreeSet<IpAddr> =
        nodes.keys().copied().filter(|address| entry.refused.must_wait(address)).collect();
    entry.refused.retain(|address| waiting.contains(address));
    Outcome { ingress, ..refusals(nodes, refused, entry) }
}

/// A complete outcome with the refused nodes: those that cannot be members, and those that Octavia refuses.
pub(crate) fn refusals(nodes: &Nodes, mut refused: Vec<(String, String)>, entry: &ServiceState) -> Outcome {
    let mut retry_refused = None;
    for (address, node) in nodes.iter().filter(|(address, _)| entry.refused.must_wait(address)) {
        let why = entry.refused.reason(address).unwrap_or_default();
        refused.push((node.clone(), why.to_owned()));
        retry_refused = Some(Refusals::<IpAddr>::FIRST_WAIT);
    }
    Outcome { refused, retry_refused, ..Outcome::done() }
}

/// Notes the members whose addresses a refusal names. False if it names none.
pub(crate) fn note_refused(failure: &CallError, nodes: &Nodes, refused: &mut Refusals<IpAddr>) -> bool {
    if !failure.is_rejected() {
        return false;
    }
    let named = addresses(failure.message()).filter(|address| nodes.contains_key(address));
    let named: BTreeSet<IpAddr> = named.collect();
    for address in &named {
        refused.add(*address, &format!("Octavia refuses its address: {}", failure.message()));
    }
    !named.is_empty()
}

/// Whether a creation failed because of its VIP. Octavia shows Neutron's conflict as an error of its own.
fn is_taken(failure: &CallError, vip: IpAddr) -> bool {
    failure.message().contains("ConflictException") || addresses(failure.message()).any(|named| named == vip)
}

fn taken(vip: IpAddr, failure: &CallError) -> Error {
    let message = format!(
        "The Service requests the address {vip}, which the subnet of VIPs does not give: {}. No load balancer is created. Request another \
         address.",
        failure.message().trim_end_matches('.')
    );
    Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message)
}

/// The addresses that a text names.
fn addresses(text: &str) -> impl Iterator<Item = IpAddr> + '_ {
    let is_part = |c: char| c.is_ascii_hexdigit() || matches!(c, '.' | ':');
    text.split(move |c| !is_part(c)).filter_map(|part| part.trim_end_matches(['.', ':']).parse().ok())
}

#[cfg(test)]
mod tests {
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

    #[tokio::test(start_paused = true)]
    async fn change_that_failed_is_made_when_octavia_works_again() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
        let changed = planned(&[WEB], &[1, 2]);
        for _ in 0..4 {
            cloud.fail("PUT members", 500, "oops");
            assert_eq!(settle(&provider, &changed).await.unwrap_err().reason(), "ProviderUnavailable");
        }
        settle(&provider, &changed).await.unwrap();
        assert_eq!(cloud.all("pools")[0]["members"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn addresses_are_found_in_messages() {
        let found = |text: &str| addresses(text).map(|ip| ip.to_string()).collect::<Vec<_>>();
        assert_eq!(found("169.254.169.254 is not a valid option for member address"), ["169.254.169.254"]);
        assert_eq!(found("IP address 2001:db8::1, not 10.0.0.7. It"), ["2001:db8::1", "10.0.0.7"]);
        assert!(found("Listener 45e25bcb-83b0-404c-ba45-c68e4b97fbec: port 80").is_empty());
    }
}
