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
use crate::state::{Complete, SERVING_REMAKE_WAIT, ServiceState, Tree};
use crate::step::Step;
use crate::types::{Balancer, FloatingIp, Provisioning};
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
        if compare == Compare::InPlace && entry.changing.is_none() {
            entry.forget();
        }
        // It is complete again when all that follows is done.
        entry.complete = None;
        let tree = match self.present(owner, entry, Some(&lb.published)).await? {
            Present::Busy => return Ok(again(entry, self)),
            Present::Nothing => return self.create(lb, &wanted, entry).await,
            Present::Broken(balancer) => return self.remake(lb, &wanted, balancer, entry).await,
            Present::Ready(tree) => tree,
        };
        check_kept(&tree.balancer, &wanted)?;
        for _ in 0..=MAX_REFUSED {
            let steps = diff(owner, &tree, &reduced, entry.last_pool.as_deref())?;
            let Some(step) = steps.into_iter().next() else {
                self.look_for_others(owner, &tree.balancer, entry).await?;
                let (ingress, incomplete) = self.ensure_address(lb, &wanted, &tree.balancer, entry).await?;
                self.remove_others(owner, entry).await?;
                entry.note_working();
                self.note_remade(&owner.service);
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

    /// Finds the owner's load balancer, and reads what is not known of it. When writing, with the published addresses, those of earlier
    /// Services of the name go.
    pub(crate) async fn present(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        writing: Option<&[IpAddr]>,
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
            let (mine, earlier): (Vec<_>, Vec<_>) = all.into_iter().partition(|(of, _)| of == owner);
            if let Some((of, found)) = earlier.into_iter().next().filter(|_| writing.is_some()) {
                if found.provisioning_status.is_pending() {
                    entry.note_pending(&found)?;
                }
                self.remove(&of, &found, true).await?;
                entry.changing.get_or_insert_with(tokio::time::Instant::now);
                return Ok(Present::Busy);
            }
            let mut mine: Vec<Balancer> = mine.into_iter().map(|(_, balancer)| balancer).collect();
            if mine.len() > 1 {
                let ours = self.own_floating_ips(owner).await?;
                let known = entry.addressed.iter().filter(|known| known.uid == owner.uid);
                let mut published: Vec<IpAddr> = known.map(|known| known.address).collect();
                published.extend(writing.unwrap_or_default());
                mine.sort_by_key(|balancer| preference(balancer, &published, &ours));
            }
            let mut mine = mine.into_iter();
            balancer = mine.next();
            (entry.spare, entry.is_listed) = (mine.collect(), true);
        }
        let Some(balancer) = balancer else { return Ok(Present::Nothing) };
        if entry.known(owner).is_none() {
            let tree = Tree::empty(balancer.clone());
            (entry.tree, entry.is_verified) = (Some((owner.clone(), tree)), false);
        }
        if !balancer.provisioning_status.is_pending() {
            entry.note_settled();
        }
        match balancer.provisioning_status {
            Provisioning::Pending | Provisioning::Deleting => {
                entry.changing.get_or_insert_with(tokio::time::Instant::now);
                entry.note_pending(&balancer)?;
                return Ok(Present::Busy);
            }
            Provisioning::Error => return Ok(Present::Broken(balancer)),
            Provisioning::Active => entry.changing = None,
        }
        if !entry.is_verified {
            let tree = observe::tree(calls, owner, balancer.clone()).await?;
            entry.note_read(owner, tree);
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
        let (was_verified, was_changing) = (entry.is_verified, entry.changing);
        entry.begin();
        let answer = match self.calls.send(step.call()).await {
            Ok(answer) => answer,
            Err(failure) if failure.is_busy() => {
                entry.sent();
                return Ok(true);
            }
            Err(failure) => {
                let is_of_members = matches!(step, Step::SetMembers { .. });
                if is_of_members && note_refused(&failure, nodes, &mut entry.refused) {
                    // Nothing was changed.
                    (entry.is_verified, entry.changing) = (was_verified, was_changing);
                    return Ok(false);
                }
                entry.note_failed();
                let error = Error::from(failure);
                if matches!(error, Error::Throttled { .. }) {
                    // Nothing was changed.
                    (entry.is_verified, entry.changing) = (was_verified, was_changing);
                }
                return Err(error);
            }
        };
        tracing::info!(change = %step, "load balancer changed");
        entry.note_made(step);
        entry.sent();
        let is_certain = entry.tree.as_mut().is_some_and(|(_, tree)| tree.note(step, &answer));
        entry.is_verified = was_verified && is_certain;
        Ok(true)
    }

    async fn create(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let (vip, is_required) = self.vip(lb, wanted, entry).await?;
        if wanted.member_subnet != wanted.subnet
            && observe::subnet(&*self.calls, &wanted.member_subnet).await?.is_none()
        {
            let message = format!(
                "The subnet {} of nodes does not exist, or the project does not see it. No load balancer is created. Correct \
                 --openstack-member-subnet-id or the annotation {}.",
                wanted.member_subnet,
                crate::annotations::MEMBER_SUBNET
            );
            return Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, message));
        }
        let nodes = wanted.nodes();
        for _ in 0..=MAX_REFUSED {
            let reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
            let body = Some(reduced.creation(vip.filter(|vip| entry.refused_vip != Some(*vip))));
            let call = Call::octavia(Method::POST, "POST loadbalancers", "loadbalancers", body);
            let name = call.name();
            match self.calls.send(call).await {
                Ok(answer) => {
                    let (tree, is_known) = match Tree::created(&answer) {
                        Some(tree) => (tree, true),
                        None => (Tree::empty(object(&name, answer, "loadbalancer")?), false),
                    };
                    tracing::info!(service = %lb.owner.service, id = tree.balancer.id, "load balancer created");
                    entry.sent();
                    entry.note_read(&lb.owner, tree);
                    (entry.is_verified, entry.is_listed) = (is_known, false);
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

    /// Replaces a load balancer in `ERROR`, which Octavia changes no more. The new one comes first where a floating IP can move to it;
    /// else the old one goes, and its address stays if it can.
    async fn remake(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        balancer: Balancer,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let id = &balancer.id;
        let is_serving = balancer.is_serving();
        if is_serving && entry.is_kept(id) {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}, and changes it no more, but it still serves. It is kept for {} minutes, and \
                 then made anew. To repair it: openstack loadbalancer failover {id}.",
                SERVING_REMAKE_WAIT.as_secs() / 60
            )));
        }
        if !entry.may_remake() {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}, which Steerage made anew a moment ago. It is made anew again later. \
                 Look at the load balancer and at Octavia's logs."
            )));
        }
        if !self.may_remake(&lb.owner.service) {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}. Steerage makes load balancers anew one after the other, and another one \
                 is not complete yet."
            )));
        }
        // One that replaced it before, and failed.
        if let Some(failed) =
            entry.spare.iter().find(|spare| spare.provisioning_status != Provisioning::Deleting)
        {
            tracing::warn!(id = failed.id, "load balancer in ERROR; deleting it");
            entry.changing.get_or_insert_with(tokio::time::Instant::now);
            self.delete_balancer(&failed.id).await?;
            entry.note_remade();
            entry.sent();
            return Ok(again(entry, self));
        }
        if !matches!(wanted.address, WantedAddress::Internal(_)) {
            tracing::warn!(id, "load balancer in ERROR; creating another one");
            match self.create(lb, wanted, entry).await {
                Err(Error::Invalid { reason: reasons::QUOTA_EXCEEDED, .. }) if !is_serving => {}
                result => {
                    entry.note_remade();
                    return result;
                }
            }
        }
        tracing::warn!(id, "load balancer in ERROR; deleting it and creating another one");
        if matches!(wanted.address, WantedAddress::Internal(_)) {
            entry.kept_vip = balancer.vip_address;
        }
        entry.begin();
        self.delete_balancer(id).await?;
        entry.note_remade();
        entry.sent();
        Ok(again(entry, self))
    }

    /// Looks once for other load balancers of the owner: the answer to a creation may have been lost.
    async fn look_for_others(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if !entry.is_listed {
            let all = observe::balancers(&*self.calls, &self.config.cluster, Some(&owner.service)).await?;
            let others = all.into_iter().filter(|(of, found)| of == owner && found.id != balancer.id);
            (entry.spare, entry.is_listed) = (others.map(|(_, found)| found).collect(), true);
        }
        Ok(())
    }

    /// Deletes the owner's other load balancers. One that cannot be deleted now goes at a later resync.
    async fn remove_others(&self, owner: &Owner, entry: &mut ServiceState) -> Result<(), Error> {
        for other in std::mem::take(&mut entry.spare) {
            self.remove(owner, &other, false).await?;
        }
        Ok(())
    }
}

/// Which of several load balancers of an owner is the one: what serves clients, and not an empty one that only came first.
pub(crate) fn preference(
    balancer: &Balancer,
    published: &[IpAddr],
    ours: &[FloatingIp],
) -> (bool, bool, bool, Option<String>, String) {
    let has_floating = ours.iter().any(|ip| ip.port_id.is_some() && ip.port_id == balancer.vip_port_id);
    let is_known = has_floating || balancer.vip_address.is_some_and(|vip| published.contains(&vip));
    (
        balancer.provisioning_status == Provisioning::Deleting,
        balancer.provisioning_status == Provisioning::Error,
        !is_known,
        balancer.created_at.clone(),
        balancer.id.clone(),
    )
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
    use std::time::Duration;

    use serde_json::json;
    use steerage_model::Protocol;
    use steerage_provider_api::Provider as _;

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

    fn in_error(cloud: &Scripted, id: &str, operating: &str) {
        let changes = json!({ "provisioning_status": "ERROR", "operating_status": operating });
        cloud.set("loadbalancers", ("id", id), &changes);
    }

    fn ids(cloud: &Scripted) -> Vec<String> {
        cloud.all("loadbalancers").iter().map(|found| found["id"].as_str().unwrap().to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancer_in_error_that_serves_is_kept_for_a_while() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[WEB], &[1]);
        let before = settle(&provider, &lb).await.unwrap();
        let old = ids(&cloud);
        in_error(&cloud, &old[0], "DEGRADED");
        cloud.writes();
        for _ in 0..9 {
            let error = provider.apply(&lb, Compare::InPlace).await.unwrap_err();
            assert!(error.to_string().contains(&old[0]), "{error}");
            tokio::time::advance(Duration::from_mins(1)).await;
        }
        assert!(cloud.writes().is_empty());
        tokio::time::advance(Duration::from_mins(1)).await;
        assert!(matches!(provider.apply(&lb, Compare::InPlace).await.unwrap().progress, Progress::Again(_)));
        assert_eq!(settle(&provider, &lb).await.unwrap().ingress, before.ingress);
        // The address moves before the old one goes.
        assert_eq!(cloud.writes(), ["POST loadbalancers", "PUT floatingips", "DELETE loadbalancers"]);
        assert!(ids(&cloud).len() == 1 && ids(&cloud) != old);
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancers_are_made_anew_one_after_the_other() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lbs = ["a", "b"].map(|name| {
            let owner = Owner { service: steerage_model::Key::new("shop", name), uid: name.to_owned() };
            LoadBalancer { owner, ..planned(&[WEB], &[1]) }
        });
        for lb in &lbs {
            settle(&provider, lb).await.unwrap();
        }
        for id in ids(&cloud) {
            in_error(&cloud, &id, "OFFLINE");
        }
        cloud.writes();
        provider.apply(&lbs[0], Compare::InPlace).await.unwrap();
        let error = provider.apply(&lbs[1], Compare::InPlace).await.unwrap_err();
        assert!(error.to_string().contains("one after the other"), "{error}");
        assert_eq!(cloud.writes(), ["POST loadbalancers"]);
        settle(&provider, &lbs[0]).await.unwrap();
        settle(&provider, &lbs[1]).await.unwrap();
    }

    /// The new one fails too: the old one has the address, and stays.
    #[tokio::test(start_paused = true)]
    async fn failed_replacement_is_deleted_and_not_the_one_with_the_address() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[WEB], &[1]);
        settle(&provider, &lb).await.unwrap();
        let old = ids(&cloud)[0].clone();
        in_error(&cloud, &old, "OFFLINE");
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        let new = ids(&cloud)[1].clone();
        in_error(&cloud, &new, "OFFLINE");
        for _ in 0..3 {
            let _ = provider.apply(&lb, Compare::Remembered).await;
            tokio::time::advance(Duration::from_secs(10)).await;
        }
        assert_eq!(ids(&cloud), [old]);
        tokio::time::advance(Duration::from_mins(1)).await;
        let _ = provider.apply(&lb, Compare::Remembered).await;
        settle(&provider, &lb).await.unwrap();
        assert_eq!(ids(&cloud).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_answer_of_a_creation_leaves_one_load_balancer() {
        for is_restarted in [false, true] {
            for annotations in [&[][..], &[(crate::annotations::INTERNAL, "true")]] {
                let cloud = Scripted::new();
                let mut provider = cloud.provider();
                let mut lb = planned(&[WEB], &[1]);
                let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
                lb.annotations = pairs.collect();
                cloud.lose("POST loadbalancers");
                cloud.hide("loadbalancers");
                settle(&provider, &lb).await.unwrap_err();
                // The list does not have it yet.
                assert!(matches!(
                    provider.apply(&lb, Compare::Remembered).await.unwrap().progress,
                    Progress::Again(_)
                ));
                let made = ids(&cloud);
                assert_eq!(made.len(), 2);
                cloud.show();
                let first = settle(&provider, &lb).await.unwrap();
                assert_eq!(ids(&cloud), made[1..]);
                // Another one turns up, older than the one that serves.
                let mut lost = cloud.all("loadbalancers")[0].clone();
                for (key, value) in
                    [("id", "old"), ("vip_port_id", "x"), ("vip_address", "10.0.0.9"), ("created_at", "2025")]
                {
                    lost[key] = value.into();
                }
                cloud.add("loadbalancers", &lost);
                if is_restarted {
                    provider = cloud.provider();
                }
                lb.published = vec![first.ingress[0].ip.unwrap()];
                let preview = provider.preview(&lb).await.unwrap().unwrap();
                assert_eq!(preview, ["load balancer old, a second one: deleted"]);
                provider.apply(&lb, Compare::InPlace).await.unwrap();
                assert_eq!(settle(&provider, &lb).await.unwrap().ingress, first.ingress);
                assert_eq!(ids(&cloud), made[1..]);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn subnet_of_nodes_that_does_not_exist_is_named() {
        let cloud = Scripted::new();
        let provider = cloud.provider_with(|config| "nowhere".clone_into(&mut config.member_subnet));
        let error = settle(&provider, &planned(&[WEB], &[1])).await.unwrap_err();
        assert_eq!(error.reason(), "RejectedByProvider");
        assert!(error.to_string().contains("--openstack-member-subnet-id"), "{error}");
        assert!(cloud.writes().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancer_that_stays_pending_is_told() {
        for (is_earlier, is_deleting) in [(false, false), (false, true), (true, false)] {
            let cloud = Scripted::new();
            let provider = cloud.provider();
            let mut lb = planned(&[WEB], &[1]);
            settle(&provider, &lb).await.unwrap();
            let id = ids(&cloud)[0].clone();
            cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "PENDING_UPDATE" }));
            if is_earlier {
                "u2".clone_into(&mut lb.owner.uid);
            }
            let provider = cloud.provider();
            let mut waits = Vec::new();
            let error = loop {
                let wait = if is_deleting {
                    provider.delete(&lb.owner).await
                } else {
                    provider.apply(&lb, Compare::Remembered).await.map(|outcome| outcome.progress)
                };
                match wait {
                    Ok(Progress::Again(wait)) => waits.push(wait.max(Duration::from_millis(500))),
                    Ok(Progress::Done) => panic!("it is done"),
                    Err(error) => break error,
                }
                assert!(waits.len() < 200, "it is never told");
                tokio::time::advance(*waits.last().unwrap()).await;
            };
            assert!(error.to_string().contains(&id), "{error}");
            assert!(waits.iter().sum::<Duration>() >= Duration::from_mins(10), "{waits:?}");
            assert!(waits.len() < 60 && waits[waits.len() - 1] > Duration::from_secs(30), "{waits:?}");
            // The next question has the same answer.
            assert!(provider.apply(&lb, Compare::Remembered).await.is_err());
            cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "ACTIVE" }));
            settle(&provider, &lb).await.unwrap();
        }
    }
}
