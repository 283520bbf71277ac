// SPDX-License-Identifier: Apache-2.0
//! Brings a load balancer in place: all changes that can be made now, and none of those that wait for them. Nothing waits: the controller
//! calls again.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::Ordering;

use futures::future::try_join_all;
use serde_json::Value;
use steerage_model::{Family, Ingress, IpMode};
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress, TargetSet};
use steerage_provider_cloud::Refusals;
use tokio::time::Instant;

use crate::denied::DENIED_WAIT;
use crate::desired::{Desired, Frontend, Source, desired};
use crate::diff::{Diff, takes_address_away};
use crate::instances::{Limit, Placed, keep, place, with_groups};
use crate::known::{Claim, Content};
use crate::leaving::last_endpoints;
use crate::object::{Id, Kind};
use crate::provider::{Gce, INVENTORY_AGE};
use crate::rule_quota::{self, SOON, unserved};
use crate::shared::Cleaned;
use crate::state::{Complete, ServiceState};
use crate::step::{Endpoint, Step};
use crate::tree::{Tree, address_of};
use crate::{firewall_command, marks, reasons, unended};

/// Rounds of changes whose operations end at once.
const MAX_ROUNDS: usize = 12;

impl Gce {
    /// The outcome of a change that is not complete.
    pub(crate) fn again(&self, entry: &ServiceState) -> Outcome {
        let outcome = Outcome { progress: Progress::Again(self.poll(entry)), ..Outcome::done() };
        unended::with_unended(outcome, entry, &self.config)
    }

    /// What is wanted, with its targets.
    pub(crate) async fn wanted(&self, lb: &LoadBalancer, refresh: bool) -> Result<(Desired, Placed), Error> {
        let wanted = desired(lb, &self.config)?;
        let nodes = lb.nodes();
        let needs_all = lb.groups.first().is_some_and(|group| group.health_check.is_of_service);
        let limit = Limit { is_internal: wanted.is_internal, needs_all, uid: &lb.owner.uid };
        let placed = self.placed(&nodes, limit, refresh).await?;
        let zones = self.zones().await?;
        let wanted = with_groups(wanted, &placed, &zones, &self.config);
        Ok((wanted, placed))
    }

    pub(crate) async fn placed(
        &self,
        nodes: &TargetSet,
        limit: Limit<'_>,
        refresh: bool,
    ) -> Result<Placed, Error> {
        let known = self.instances(nodes, refresh).await?;
        Ok(place(nodes, &known, limit, &self.config))
    }

    pub(crate) async fn apply_wanted(
        &self,
        lb: &LoadBalancer,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let owner = &lb.owner;
        // What Services share stays as long as one of them is known to need it.
        let (mut wanted, placed) = self.wanted(lb, compare == Compare::InPlace).await?;
        entry.refused.retain(|name| placed.nodes.contains_key(name));
        without(&mut wanted, |endpoint| entry.refused.must_wait(&endpoint.instance));
        entry.nodes.clone_from(&placed.nodes);
        if !self.settle(entry).await? {
            return Ok(self.again(entry));
        }
        entry.note_wanted();
        if entry.denied.expire() {
            entry.forget();
        }
        if compare == Compare::Remembered
            && let Some(complete) = &entry.complete
            && complete.wanted == wanted
        {
            let ingress = complete.ingress.clone();
            return Ok(finished(entry, &wanted, &placed, ingress, self.lacks_firewalls()));
        }
        if compare == Compare::InPlace {
            entry.forget();
            entry.denied.clear();
        }
        entry.complete = None;
        entry.end_deletion();
        if !self.shared.begin_use(self, &owner.service, wanted.shared()).await {
            return Ok(self.again(entry));
        }
        for _ in 0..MAX_ROUNDS {
            self.read_all(owner, entry).await?;
            if let Some((old, tree)) = entry.earlier.first().cloned() {
                if !self.clear_earlier(&old, &tree, entry).await? {
                    return Ok(self.again(entry));
                }
                continue;
            }
            self.look_for(&wanted, owner, entry).await?;
            without(&mut wanted, |endpoint| entry.refused.must_wait(&endpoint.instance));
            let Some(tree) = entry.known(owner) else { continue };
            if tree.uses_other_checks(wanted.checks.keys(), &self.config) {
                self.shared.note_moving(&owner.service).await;
            }
            let mut towards = placed.with_kept(wanted.clone(), tree);
            let last = last_endpoints(towards.endpoints(), tree, &placed, entry, &self.config);
            let is_kept = !last.is_empty();
            keep(&mut towards, last, tree);
            leave_stuck(&mut towards, tree, |id| entry.is_changing(id));
            let diff = Diff { config: &self.config, tree, denied: &entry.denied, published: &lb.published };
            let (steps, left) = entry.denied.split(diff.towards(&towards)?);
            let (steps, held) = self.within_rule_quota(lb, &towards, tree, steps);
            let given = self.claim_given(owner, &wanted, tree)?;
            self.address_owners.keep_claims(owner, &(&given | &tree.admitted()));
            let unread = tree.without_fingerprint(&steps);
            if !unread.is_empty() {
                self.read_again(owner, &unread, entry).await?;
                continue;
            }
            if steps.is_empty() && held > 0 {
                return Ok(self.waits_for_rule_quota(entry));
            }
            if steps.is_empty() {
                let Some(ingress) = reached(&wanted, tree, &lb.published) else {
                    return Err(self.without_address());
                };
                let stale = entry.denied.stale(&left, tree);
                if self::ingress(&wanted, tree).as_ref() != Some(&ingress) {
                    // The new address is announced when clients are admitted to it.
                    entry.announced = Some(ingress.clone());
                }
                entry.denied.forget_all(&stale);
                let mut outcome = finished(entry, &wanted, &placed, ingress.clone(), self.lacks_firewalls());
                if !entry.pending.is_empty() {
                    outcome.progress = self.again(entry).progress;
                    return Ok(unended::with_unended(outcome, entry, &self.config));
                }
                self.shared.end_moving(&owner.service).await;
                match self.shared.clean_later(self).await? {
                    // The last endpoints leave as soon as they may.
                    Cleaned::Done if is_kept => {}
                    Cleaned::Done => entry.complete = Some(Complete { wanted: wanted.clone(), ingress }),
                    Cleaned::Pending => outcome.progress = self.again(entry).progress,
                    Cleaned::Later(wait) => {
                        outcome.retry_refused = Some(outcome.retry_refused.map_or(wait, |due| due.min(wait)));
                    }
                }
                return Ok(outcome);
            }
            // The new address is published before the old one goes.
            if takes_address_away(&steps, tree, &towards)
                && let Some(ingress) =
                    reached(&wanted, tree, &lb.published).filter(|new| entry.announced.as_ref() != Some(new))
            {
                entry.announced = Some(ingress.clone());
                return Ok(Outcome { ingress, ..self.again(entry) });
            }
            let Some(steps) = self.sendable(owner, steps, entry).await? else { continue };
            if !self.send_all(owner, &steps, entry).await? {
                return Ok(self.again(entry));
            }
        }
        Ok(self.again(entry))
    }

    /// The changes without new rules that wait for a Service whose rule is being replaced, and how many wait.
    fn within_rule_quota(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        tree: &Tree,
        steps: Vec<Step>,
    ) -> (Vec<Step>, usize) {
        let mut quota = self.rule_quota();
        let service = &lb.owner.service;
        quota.look(service, !lb.published.is_empty(), wanted, tree);
        if let Some(list) = self.inventory.last() {
            let service_of = |found: &Value| Some(self.owner(found)?.service);
            quota.note_list(list.began, || rule_quota::unruled(&list.found, service_of));
        }
        if steps.is_empty() {
            quota.forget(service);
        }
        quota.begin(service, &steps, wanted, tree);
        quota.split(service, steps)
    }

    /// The outcome while new rules wait.
    fn waits_for_rule_quota(&self, entry: &ServiceState) -> Outcome {
        let message = "The quota of forwarding rules is used up, or may be, and Steerage is replacing a rule of another Service. New rules of \
                       this Service wait until that one is made, for a minute at most after the old one is gone. Steerage tries again \
                       every second. If this lasts, raise the quota.";
        let outcome = Outcome { progress: Progress::Again(SOON), ..self.again(entry) };
        if !self.rule_quota().is_full() {
            // It waits for some seconds, and nothing is wrong.
            return outcome;
        }
        Outcome { incomplete: Some((reasons::QUOTA_EXCEEDED, message.to_owned())), ..outcome }
    }

    /// A Service whose rule was deleted to be replaced is not served: it is tried again at once, and told what is missing.
    pub(crate) fn told_of_lost_rule(
        &self,
        lb: &LoadBalancer,
        result: Result<Outcome, Error>,
        entry: &ServiceState,
    ) -> Result<Outcome, Error> {
        let error = match result {
            Err(error @ (Error::Invalid { .. } | Error::Denied(_))) => error,
            other => return other,
        };
        let service = &lb.owner.service;
        let (wait, is_replacing) = {
            let quota = self.rule_quota();
            (quota.retry_in(service), quota.is_replacing(service))
        };
        let Some(wait) = wait else { return Err(error) };
        let Ok(wanted) = desired(lb, &self.config) else { return Err(error) };
        let is_deletion =
            |step: &Step, id: &Id| matches!(step, Step::Delete { id: deleted } if deleted == id);
        let leaves = |id: &Id| entry.pending.iter().any(|pending| is_deletion(&pending.step, id));
        let missing = match entry.known(&lb.owner) {
            Some(tree) => unserved(&wanted, tree, leaves),
            None => "some ports".to_owned(),
        };
        if missing.is_empty() {
            return Err(error);
        }
        let why = if is_replacing { "Steerage deleted a rule to replace it, and the" } else { "the" };
        // The rule itself may be refused, or what it needs, such as a firewall rule.
        let message = format!(
            "The forwarding rule of {missing} is missing: {why} change is refused. No client reaches these ports. Steerage tries again \
             every {}s. {error}",
            wait.as_secs()
        );
        Ok(Outcome {
            progress: Progress::Again(wait),
            incomplete: Some((error.reason(), message)),
            ..Outcome::done()
        })
    }

    fn lacks_firewalls(&self) -> bool {
        self.lacks_firewalls.load(Ordering::Relaxed)
    }

    fn without_address(&self) -> Error {
        let message = format!(
            "GCE does not show the address of the load balancer. Steerage retries. If this lasts, look at its forwarding rules: \
             `gcloud compute forwarding-rules list --project={} --regions={}`.",
            self.config.project, self.config.region
        );
        Error::Unavailable(message)
    }

    /// Notes the addresses of the user that the Service requests, and returns them. Of Services that request one at the same time, the first
    /// one gets it: the firewall rules of another one must not admit clients to it.
    fn claim_given(&self, owner: &Owner, wanted: &Desired, tree: &Tree) -> Result<BTreeSet<IpAddr>, Error> {
        let mut given = BTreeSet::new();
        for frontend in &wanted.frontends {
            let address = match &frontend.source {
                Source::Own(..) => None,
                Source::Name(name) => tree.given.get(name).and_then(Option::as_ref).and_then(address_of),
                Source::Literal(address, _) => Some(*address),
            };
            let Some(address) = address else { continue };
            self.address_owners.claim(owner, address, reasons::ADDRESS_NOT_AVAILABLE)?;
            given.insert(address);
        }
        Ok(given)
    }

    /// Deletes what an earlier Service of the name left. False if an operation has to end first.
    async fn clear_earlier(&self, old: &Owner, tree: &Tree, entry: &mut ServiceState) -> Result<bool, Error> {
        let diff = Diff { config: &self.config, tree, denied: &entry.denied, published: &[] };
        let (steps, left) = entry.denied.split(diff.away());
        if !steps.is_empty() {
            return self.send_all(old, &steps, entry).await;
        }
        self.address_owners.forget(old);
        if !left.is_empty() {
            self.claim_admitted(old, tree);
        }
        entry.earlier.remove(0);
        self.shared.end_earlier().await;
        Ok(true)
    }

    /// Firewall rules of an earlier Service of the name are left: they admit its clients to addresses that nothing has.
    fn claim_admitted(&self, old: &Owner, tree: &Tree) {
        for address in tree.admitted() {
            if let Err(error) = self.address_owners.claim(old, address, reasons::ADDRESS_NOT_AVAILABLE) {
                tracing::warn!(service = %old.service, %address, %error, "firewall rule of an earlier Service admits its clients to the address of another Service");
            }
        }
    }

    /// A Service is refused: others may request what it does not get, but not where its firewall rules admit its clients.
    pub(crate) fn release_claims(&self, owner: &Owner, entry: &ServiceState) {
        if entry.pending.is_empty()
            && let Some(tree) = entry.known(owner)
        {
            self.address_owners.keep_claims(owner, &tree.admitted());
        }
    }

    /// Reads resources of the owner whose fingerprints are not known.
    async fn read_again(&self, owner: &Owner, ids: &[Id], entry: &mut ServiceState) -> Result<(), Error> {
        for id in ids {
            let found = self.read_joined(id).await?;
            let Some(tree) = entry.tree_of(owner) else { continue };
            match found {
                Some(mut found) => {
                    // It is not read once more if it has none.
                    let fields = found.as_object_mut();
                    fields.map(|fields| fields.entry("fingerprint").or_insert(Value::Null));
                    tree.own.insert(id.clone(), found);
                }
                None => entry.forget(),
            }
        }
        Ok(())
    }

    /// The steps that can be sent. `None` if what they are for is not so any more.
    async fn sendable(
        &self,
        owner: &Owner,
        steps: Vec<Step>,
        entry: &mut ServiceState,
    ) -> Result<Option<Vec<Step>>, Error> {
        let are_true = self.others_stay(owner, &steps, entry).await?;
        Ok(if are_true { self.claimed(owner, steps, entry) } else { None })
    }

    /// The steps without those that make what another Service makes at this time. `None` if one exists by now.
    fn claimed(&self, owner: &Owner, steps: Vec<Step>, entry: &mut ServiceState) -> Option<Vec<Step>> {
        let (mut kept, mut exists) = (Vec::new(), false);
        for step in steps {
            let claim = match &step {
                Step::Insert { id, body } if marks::is_shared(&self.config.cluster, body) => {
                    self.shared.claim(id, &owner.service)
                }
                _ => Claim::Own,
            };
            match claim {
                Claim::Own => kept.push(step),
                Claim::Other => {}
                Claim::Exists(content) => {
                    exists = true;
                    if let Some(tree) = entry.tree_of(owner) {
                        tree.shared.insert(step.id().clone(), content);
                    }
                }
            }
        }
        (!exists).then_some(kept)
    }

    /// Reads all of the owner that is not known.
    pub(crate) async fn read_all(&self, owner: &Owner, entry: &mut ServiceState) -> Result<(), Error> {
        // A deletion that was not completed did not look at endpoints.
        if entry.known(owner).is_some_and(Tree::has_all_members) {
            return Ok(());
        }
        let is_first_look = !entry.is_seen && !self.has_just_ended(&owner.service);
        let mut owners = self.read_owners(&owner.service, is_first_look).await?;
        let mut tree = owners.remove(owner).unwrap_or_default();
        // The list says how many endpoints each group has.
        let is_empty = |group: &Value| is_first_look && group.get("size").and_then(Value::as_u64) == Some(0);
        let (empty, groups): (Vec<_>, Vec<_>) =
            tree.of_kind(Kind::Group).partition(|(_, group)| is_empty(group));
        let began = Instant::now();
        let mut members = self.read_members(groups.into_iter().map(|(id, _)| id)).await?;
        members.extend(empty.into_iter().map(|(id, _)| (id.clone(), BTreeSet::new())));
        tree.members = members;
        entry.note_read(owner, tree, owners.into_iter().collect());
        entry.note_looked(began);
        entry.is_first_look = is_first_look;
        Ok(())
    }

    /// Reads what is wanted and has another owner, or none.
    pub(crate) async fn look_for(
        &self,
        wanted: &Desired,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let shared: Vec<Id> =
            wanted.shared().into_iter().filter(|id| !entry.looked_for.contains(id)).collect();
        let Some(tree) = entry.known(owner) else { return Ok(()) };
        let keys = wanted.frontends.iter().filter_map(|frontend| match &frontend.source {
            Source::Own(..) => None,
            Source::Name(name) => Some(name.clone()),
            Source::Literal(address, _) => Some(address.to_string()),
        });
        let keys: BTreeSet<String> = keys.filter(|key| !tree.given.contains_key(key)).collect();
        let is_first_look = entry.is_first_look;
        let found = shared.iter().map(|id| async move {
            let known = if is_first_look { self.known_shared(id) } else { None };
            if let Some(Content(known)) = known {
                return Ok(known);
            }
            let found = match self.read_joined(id).await {
                Err(failure) if id.kind == Kind::Firewall && failure.is_denied() => None,
                other => other?,
            };
            Ok::<_, Error>(found.filter(|found| marks::is_shared(&self.config.cluster, found)))
        });
        let found = try_join_all(found).await?;
        let given = try_join_all(keys.iter().map(|key| self.read_address(key))).await?;
        if let Some((_, tree)) = &mut entry.tree {
            tree.shared
                .extend(shared.iter().cloned().zip(found).filter_map(|(id, found)| Some((id, found?))));
            tree.given.extend(keys.into_iter().zip(given));
        }
        entry.looked_for.extend(shared);
        Ok(())
    }

    /// What is known of a shared resource for a first look; `None` if it has to be read.
    fn known_shared(&self, id: &Id) -> Option<Content> {
        let list = self.inventory.last().filter(|list| list.began.elapsed() < INVENTORY_AGE);
        if let Some(content) = self.shared.content(id, list.as_ref().map(|list| list.began)) {
            return Some(content);
        }
        let list = list?;
        let found = list.found.iter().find(|(of, _)| of == id).map(|(_, found)| found);
        Some(Content(found.filter(|found| marks::is_shared(&self.config.cluster, found)).cloned()))
    }
}

/// The same groups without some endpoints.
pub(crate) fn without(wanted: &mut Desired, is_refused: impl Fn(&Endpoint) -> bool) {
    for group in wanted.groups.values_mut() {
        group.endpoints.retain(|endpoint| !is_refused(endpoint));
    }
}

/// Groups whose change does not end stay as they are, and the others go on.
fn leave_stuck(wanted: &mut Desired, tree: &Tree, is_changing: impl Fn(&Id) -> bool) {
    for (id, group) in wanted.groups.iter_mut().filter(|(id, _)| is_changing(id)) {
        if let Some(present) = tree.members.get(id) {
            group.endpoints.clone_from(present);
        }
    }
}

/// The addresses of the forwarding rules, in the Service's order; `None` if one is not known.
fn ingress(wanted: &Desired, tree: &Tree) -> Option<Vec<Ingress>> {
    let of = |frontend: &Frontend| {
        let rule = frontend.rules.keys().find_map(|id| tree.get(id))?;
        Some(published(address_of(rule)?))
    };
    wanted.frontends.iter().map(of).collect()
}

/// The same, but the old address of an IP family while nobody is admitted to the new one: it serves, and clients know it.
fn reached(wanted: &Desired, tree: &Tree, published: &[IpAddr]) -> Option<Vec<Ingress>> {
    let admitted = tree.admitted();
    let of = |frontend: &Frontend, new: Ingress| {
        let is_admitted = |address: &IpAddr| admitted.contains(address);
        if frontend.firewall.is_none() || new.ip.as_ref().is_none_or(is_admitted) {
            return new;
        }
        let rules = tree.of_kind(Kind::ForwardingRule).filter_map(|(_, rule)| address_of(rule));
        let old = rules.filter(|address| Family::of(*address) == frontend.family && Some(*address) != new.ip);
        let rank = |address: &IpAddr| (published.contains(address), is_admitted(address));
        let old = old.filter(|address| rank(address) != (false, false)).max_by_key(rank);
        old.map_or(new, self::published)
    };
    let new = ingress(wanted, tree)?;
    Some(wanted.frontends.iter().zip(new).map(|(frontend, new)| of(frontend, new)).collect())
}

fn published(address: IpAddr) -> Ingress {
    Ingress { ip: Some(address), hostname: None, ip_mode: Some(IpMode::Vip) }
}

/// The addresses of a Service that is refused now: it may have been refused before they were published, while its rules serve. While it
/// moves to another one, its status may have the old one, which serves, too.
pub(crate) fn kept(tree: &Tree, entry: &ServiceState) -> Vec<Ingress> {
    match tree.serving() {
        Some(all) => all.into_iter().map(published).collect(),
        None => entry.announced.clone().unwrap_or_default(),
    }
}

fn finished(
    entry: &mut ServiceState,
    wanted: &Desired,
    placed: &Placed,
    ingress: Vec<Ingress>,
    lacks_firewalls: bool,
) -> Outcome {
    let waiting: BTreeSet<String> =
        placed.nodes.keys().filter(|name| entry.refused.must_wait(name)).cloned().collect();
    entry.refused.retain(|name| waiting.contains(name));
    let mut outcome = refusals(placed, entry);
    outcome.incomplete.clone_from(&wanted.incomplete);
    let tree = entry.tree.as_ref().map(|(_, tree)| tree);
    let is_moving = tree.and_then(|tree| self::ingress(wanted, tree)).is_some_and(|new| new != ingress);
    outcome.ingress = ingress;
    if let Some(effect) = entry.denied.effect(tree) {
        let (mut old, mut unread) = ("", "");
        if is_moving {
            old = " The old address serves, and stays published, until clients are admitted to the new one.";
        }
        if lacks_firewalls {
            unread = " Steerage may not read these rules either: it does not see it if somebody else changes them.";
        }
        let message = format!(
            "The credentials may not change firewall rules of the network. All else is in place, but {effect}.{old}{unread} {}: {}",
            firewall_command::GRANT,
            entry.denied.all_commands()
        );
        outcome.incomplete = Some((reasons::FIREWALL_NOT_PERMITTED, message));
        outcome.retry_refused = Some(DENIED_WAIT);
    }
    outcome
}

/// A complete outcome with the refused nodes.
pub(crate) fn refusals(placed: &Placed, entry: &ServiceState) -> Outcome {
    let mut refused = placed.refused.clone();
    let mut retry_refused = (!refused.is_empty()).then_some(Refusals::<String>::FIRST_WAIT);
    for (name, node) in placed.nodes.iter().filter(|(name, _)| entry.refused.must_wait(name)) {
        refused.push((node.clone(), entry.refused.reason(name).unwrap_or_default().to_owned()));
        retry_refused = Some(Refusals::<String>::FIRST_WAIT);
    }
    Outcome { refused, retry_refused, ..Outcome::done() }
}
