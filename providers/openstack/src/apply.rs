// SPDX-License-Identifier: Apache-2.0
//! Brings a load balancer in place: one change at a time, because Octavia takes the next one only when the last is complete. Nothing
//! waits: the controller calls again.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Ingress;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use steerage_provider_cloud::Refusals;
use steerage_provider_cloud::shared::LoadBalancerUse;

use crate::adoption::names_another;
use crate::desired::{Desired, Nodes};
use crate::diff::diff;
use crate::error::CallError;
use crate::node_rules_sync::{Opened, RulesState, rules_failed};
use crate::observe;
use crate::provider::OpenStack;
use crate::reasons;
use crate::shared::check_families;
use crate::state::{Complete, ServiceState, Tree};
use crate::step::Step;
use crate::types::{Balancer, Member, Provisioning};
use crate::vips::{WantedVip, missing};

/// Members that one call finds refused, each by a request of its own.
pub(crate) const MAX_REFUSED: usize = 20;

/// When a rule that the nodes' security group refused is tried again, and the deletion of an address that the Service left.
const RETRY: Duration = Duration::from_mins(1);

/// What there is of an owner.
pub(crate) enum Present {
    /// No load balancer.
    Nothing,
    /// A load balancer, or the one of an earlier Service of the name, that cannot be changed now.
    Busy,
    /// One in `ERROR`.
    Broken(Box<Balancer>),
    /// One that can be changed, with all that is in it.
    Ready(Box<Tree>),
}

/// The outcome of a change that is not complete.
pub(crate) fn again(entry: &ServiceState, provider: &OpenStack) -> Outcome {
    Outcome { progress: Progress::Again(entry.poll(provider.config.poll)), ..Outcome::done() }
}

/// The error about a load balancer in `ERROR` of a Service that is refused: only an accepted Service's is replaced.
pub(crate) fn kept_in_error(balancer: &Balancer, what: &str) -> Error {
    let id = &balancer.id;
    Error::Unavailable(format!(
        "Octavia reports ERROR for the load balancer {id}, and changes it no more. Its {what} stay as they are while the Service is refused. \
         Correct the Service, or repair the load balancer, as Octavia's administrator: `openstack loadbalancer failover {id}`."
    ))
}

fn shared_in_error(balancer: &Balancer) -> Error {
    let id = &balancer.id;
    Error::Unavailable(format!(
        "Octavia reports ERROR for the shared load balancer {id}, and changes it no more. It may still serve. To repair it, as \
         Octavia's administrator: `openstack loadbalancer failover {id}`. If it is deleted, its Services create another one."
    ))
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
            entry.rules = RulesState::Unknown;
        }
        // It is complete again when all that follows is done.
        entry.complete = None;
        let tree = match self.present(owner, entry, Some(&lb.published)).await? {
            Present::Busy => return Ok(again(entry, self)),
            Present::Nothing => return self.begin_new(lb, &wanted, entry).await,
            Present::Broken(balancer) if wanted.shared.is_some() => return Err(shared_in_error(&balancer)),
            Present::Broken(balancer) => return self.replace(lb, &wanted, &balancer, entry).await,
            Present::Ready(tree) => tree,
        };
        entry.end_deletion();
        check_kept(&tree.balancer, &wanted)?;
        let families = tree.balancer.families();
        if let Some(shared) = &wanted.shared {
            check_families(shared, &wanted.families, &families)?;
        }
        // A Service that is refused opens nothing.
        diff(owner, &tree, &reduced.clone().for_families(&families), None)?;
        let Opened { is_more, missing: mut missing_rule } = self.open_rules(owner, &reduced, entry).await;
        if is_more {
            return Ok(again(entry, self));
        }
        for _ in 0..=MAX_REFUSED {
            let fitting = reduced.clone().for_families(&families).keeping_pools(entry.is_at_pool_quota());
            let steps = diff(owner, &tree, &fitting, entry.last_pool.as_deref())?;
            let Some(step) = steps.into_iter().next() else {
                if !self.is_carried_out(owner, &tree.balancer.id, entry).await? {
                    return Ok(again(entry, self));
                }
                // What follows may fail for long, and concerns this Service alone.
                self.reconcile_waiting(owner, entry);
                self.look_for_others(owner, &tree.balancer, entry).await?;
                let (ingress, mut incomplete) =
                    self.ensure_address(lb, &wanted, &tree.balancer, entry).await?;
                if incomplete.is_none() && families.len() < wanted.families.len() {
                    let (network, version) = (wanted.network.as_deref(), self.version().await?);
                    incomplete = missing(&wanted.families, &wanted.vips, network, &tree.balancer, version);
                }
                incomplete = incomplete.or_else(|| names_another(&wanted, &tree.balancer));
                if let Some(shared) = &wanted.shared {
                    if let Some(wait) = self.leave_others(owner, shared, entry).await? {
                        return Ok(Outcome { progress: Progress::Again(wait), ..Outcome::done() });
                    }
                } else {
                    self.remove_others(owner, entry).await?;
                }
                let is_left = self.try_release_left(owner, wanted.shared.as_deref(), entry).await;
                match self.close_rules(owner, entry).await {
                    // What was removed may have made room, or admitted what rules of all Services have to admit now.
                    Ok(true) => {
                        let opened = self.open_rules(owner, &reduced, entry).await;
                        if opened.is_more {
                            return Ok(again(entry, self));
                        }
                        missing_rule = opened.missing;
                    }
                    Ok(_) => {}
                    Err(error) => missing_rule = missing_rule.or_else(|| Some(rules_failed(&error))),
                }
                let mut retry = is_left.then_some(RETRY);
                if let Some(missing_rule) = missing_rule {
                    (incomplete, retry) = (Some(missing_rule), Some(RETRY));
                }
                entry.note_working();
                self.end_replacement(&owner.service);
                entry.complete = Some(Complete {
                    owner: owner.clone(),
                    wanted: reduced,
                    ingress: ingress.clone(),
                    incomplete: incomplete.clone(),
                });
                if retry.is_some() {
                    entry.complete = None;
                }
                let outcome = finished(entry, &nodes, wanted.refused, ingress);
                return Ok(Outcome { incomplete, retry_refused: outcome.retry_refused.or(retry), ..outcome });
            };
            let step = if entry.is_at_member_quota() { step.of_final_members(&fitting) } else { step };
            self.check_member_subnets(&tree, &step).await?;
            if let (Step::DeleteListener { .. }, Some(shared)) = (&step, &wanted.shared) {
                entry.freed_port_of = Some(shared.clone());
            }
            if self.make(&step, entry, &nodes).await? {
                break;
            }
            reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
        }
        Ok(again(entry, self))
    }

    /// Takes over the load balancer of the Service that is not known as such, or creates one.
    async fn begin_new(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        if let Some(outcome) = self.restore_tags(lb, wanted, entry).await? {
            return Ok(outcome);
        }
        match self.adopt(lb, wanted, entry).await? {
            Some(outcome) => Ok(outcome),
            None => self.create(lb, wanted, entry).await,
        }
    }

    /// Finds the owner's load balancer, and reads what is not known of it. When writing, with the published addresses, those of earlier
    /// Services of the name go.
    pub(crate) async fn present(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        writing: Option<&[IpAddr]>,
    ) -> Result<Present, Error> {
        let mut balancer = None;
        if let Some(known) = entry.known(owner).map(|tree| tree.balancer.clone()) {
            balancer = if entry.changing.is_some() {
                let now = self.balancer(&known.id).await?;
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
            let (mine, earlier) = self.found(owner, entry, writing.is_some()).await?;
            if let Some((of, found)) = earlier.into_iter().next().filter(|_| writing.is_some()) {
                if found.provisioning_status.is_pending() {
                    entry.note_pending(&found)?;
                }
                self.remove(&of, &found, true).await?;
                entry.note_deletion(&found)?;
                entry.changing.get_or_insert_with(tokio::time::Instant::now);
                return Ok(Present::Busy);
            }
            let mut mine =
                self.by_preference(owner, mine, writing.unwrap_or_default(), entry).await?.into_iter();
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
            Provisioning::Error => return Ok(Present::Broken(Box::new(balancer))),
            Provisioning::Active => {
                if entry.is_verified && entry.is_check_due() {
                    self.check_change(owner, &balancer.id, entry).await?;
                }
                entry.changing = None;
            }
        }
        if !entry.is_verified {
            let tree = self.tree(owner, balancer.clone()).await?;
            let failed = tree.failed(owner);
            entry.note_read(owner, tree);
            if entry.unchecked_since.is_some() {
                entry.note_failed_parts(&balancer.id, &failed)?;
                entry.is_verified = true;
            }
        }
        match entry.known(owner) {
            Some(tree) => Ok(Present::Ready(Box::new(tree.clone()))),
            None => Ok(Present::Nothing),
        }
    }

    /// The owner's load balancers, or the shared one that it uses, and those of earlier Services of its name.
    async fn found(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        is_writing: bool,
    ) -> Result<(Vec<Balancer>, Vec<(Owner, Balancer)>), Error> {
        if let Some(shared) = entry.shared() {
            let found = self.shared_by_preference(shared).await?;
            if !found.is_empty() {
                self.end_shared_creation(shared);
            }
            return Ok((found, Vec::new()));
        }
        let all = self.balancers_of(&owner.service).await?;
        let (mine, earlier): (Vec<_>, Vec<_>) = all.into_iter().partition(|(of, _)| of == owner);
        let mut mine: Vec<Balancer> = mine.into_iter().map(|(_, balancer)| balancer).collect();
        if mine.is_empty() && is_writing {
            self.check_use(owner, &LoadBalancerUse::Own, entry).await?;
        } else if mine.is_empty()
            && let Some((shared, balancer)) = self.shared_balancer_of(owner).await?
        {
            entry.usage = LoadBalancerUse::Shared(shared);
            mine.push(balancer);
        }
        Ok((mine, earlier))
    }

    /// Refuses another subnet of members that does not exist. Octavia looks at it only for new members, and writes it for those that are
    /// there, after which it carries out no change of the load balancer's members.
    async fn check_member_subnets(&self, tree: &Tree, step: &Step) -> Result<(), Error> {
        let Step::SetMembers { pool, members, .. } = step else { return Ok(()) };
        let Some(pool) = tree.pools.iter().find(|known| known.id == *pool) else { return Ok(()) };
        let subnet = |of: &Member| of.subnet_id.clone();
        let changes = |member: &&Member| {
            pool.members.iter().any(|known| known.key() == member.key() && subnet(known) != subnet(member))
        };
        let changed: BTreeSet<String> = members.iter().filter(changes).filter_map(subnet).collect();
        for id in changed {
            if observe::subnet(&*self.calls, &id).await?.is_none() {
                return Err(missing_member_subnet(&id, "Members stay as they are."));
            }
        }
        Ok(())
    }

    /// Makes a change. False if nothing was changed, because a member was refused.
    pub(crate) async fn make(
        &self,
        step: &Step,
        entry: &mut ServiceState,
        nodes: &Nodes,
    ) -> Result<bool, Error> {
        if !entry.may_make(step) {
            return Err(not_shown(step));
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
                let is_quota = failure.is_quota();
                if is_quota && (is_of_members && entry.note_member_quota() || entry.note_pool_quota(step)) {
                    // Nothing was changed. What needs no more members, or no other pool, may still be taken.
                    (entry.is_verified, entry.changing) = (was_verified, was_changing);
                    return Ok(false);
                }
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
        let service = entry.tree.as_ref().map(|(owner, _)| tracing::field::display(&owner.service));
        tracing::info!(service, change = %step, "load balancer changed");
        entry.note_made(step);
        entry.sent();
        // If another one fails, the load balancer is in ERROR.
        if !matches!(step, Step::UpdateBalancer { .. }) {
            entry.unchecked_since.get_or_insert_with(tokio::time::Instant::now);
        }
        let is_certain = entry.tree.as_mut().is_some_and(|(_, tree)| tree.note(step, &answer));
        entry.is_verified = was_verified && is_certain;
        Ok(true)
    }
}

/// The subnet of nodes does not exist.
pub(crate) fn missing_member_subnet(id: &str, consequence: &str) -> Error {
    let message = format!(
        "The subnet {id} of nodes does not exist, or the project does not see it. {consequence} Correct --openstack-member-subnet-id, \
         --openstack-ipv6-member-subnet-id or the annotation {}.",
        crate::annotations::MEMBER_SUBNET
    );
    Error::invalid(reasons::REJECTED_BY_PROVIDER, message)
}

/// Refuses what Octavia cannot change.
pub(crate) fn check_kept(balancer: &Balancer, wanted: &Desired) -> Result<(), Error> {
    let immutable = |what: &str, has: &str, wants: &str| {
        let message = format!(
            "The {what} should be {wants}, and the load balancer of the Service has {has}, which Octavia cannot change. The present one is \
             kept. Restore the request, or create the Service again."
        );
        Err(Error::invalid(reasons::ADDRESS_IMMUTABLE, message))
    };
    for wanted in &wanted.vips {
        if let (Some(requested), Some((vip, _))) = (wanted.requested, balancer.vip(wanted.family))
            && requested != vip
        {
            return immutable("address", &vip.to_string(), &requested.to_string());
        }
    }
    match (&balancer.vip_subnet_id, wanted.vips.first()) {
        (Some(subnet), Some(WantedVip { subnet: Some(first), .. }))
            if wanted.is_subnet_requested && subnet != first =>
        {
            return immutable("subnet", subnet, first);
        }
        _ => {}
    }
    for (what, requested, present) in [
        ("flavor", &wanted.flavor, &balancer.flavor_id),
        ("availability zone", &wanted.availability_zone, &balancer.availability_zone),
    ] {
        if let Some(requested) = requested.as_ref().filter(|_| requested != present) {
            return immutable(what, present.as_deref().unwrap_or("the default one"), requested);
        }
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

/// The addresses that a text names.
pub(crate) fn addresses(text: &str) -> impl Iterator<Item = IpAddr> + '_ {
    let is_part = |c: char| c.is_ascii_hexdigit() || matches!(c, '.' | ':');
    text.split(move |c| !is_part(c)).filter_map(|part| part.trim_end_matches(['.', ':']).parse().ok())
}

/// A change that was accepted as often as it may be.
pub(crate) fn not_shown(step: &Step) -> Error {
    Error::Unavailable(format!(
        "Octavia accepted a change and does not show it ({step}). Steerage makes it again later. Look at Octavia's logs."
    ))
}

#[cfg(test)]
mod tests;
