// SPDX-License-Identifier: Apache-2.0
//! What remains when the structure is in place: targets, target groups that leave, and whether the load balancer is active.

use std::time::Duration;

use futures::FutureExt as _;
use steerage_model::Ingress;
use steerage_provider_api::{Compare, Error, Outcome, Owner, Progress};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::client::{Balancer, CallError};
use crate::diff::ObservedGroup;
use crate::failing_groups::Retry;
use crate::group_pass::{self, Lender};
use crate::groups_in_use::RetryDeletion;
use crate::observe::Resources;
use crate::provider::{Aws, RELEASE_POLL};
use crate::refused_listeners::Refused;
use crate::registered::{HOLD_POLL, MAX_HOLD};
use crate::security_group_sync::again_after;
use crate::state::ServiceState;
use crate::target_id::TargetId;
use crate::targets::{self, Limits, SharedRefusals};
use crate::wanted_targets::WantedTargets;
use crate::{names, reasons};

/// What remains when the targets are set as far as AWS accepts them.
#[derive(Debug)]
pub(crate) struct SetTargets {
    /// The refused ones, each with the reason.
    pub(crate) refused: Vec<(String, String)>,
    /// When to call again for targets that wait before they leave.
    pub(crate) held: Option<Duration>,
    /// The quota that has no room for some.
    pub(crate) exceeded: Option<Refused>,
}

/// What remains of one group.
#[derive(Default)]
struct ConvergedGroup {
    /// When to call again for targets that wait before they leave.
    held: Option<Duration>,
    /// The quota has no room for some.
    exceeded: Option<CallError>,
}

impl Aws {
    /// Sets the targets of a load balancer whose structure is in place, deletes what left it, and asks whether it is active.
    pub(crate) async fn finish(
        &self,
        entry: &mut ServiceState,
        targets: &WantedTargets,
        limits: Limits,
    ) -> Result<Outcome, Error> {
        let SetTargets { refused, held, exceeded } = self.converge_targets(entry, targets, limits).await?;
        let released = self.release_groups(entry).await?;
        let mut waits: Vec<Duration> = held.into_iter().chain(released).collect();
        let mut ingress = Vec::new();
        // Until then, AWS may not show a new load balancer.
        let is_settled = entry.unsettled(self.config.settle).is_none();
        let mut is_gone = false;
        if let (Some(complete), Some((_, resources))) = (&mut entry.complete, &mut entry.resources) {
            let (since_asked, poll) =
                (complete.asked.map(|asked| asked.elapsed()), self.config.activation_poll);
            if complete.ingress.is_none() && since_asked.is_none_or(|since| since >= poll) {
                complete.asked = Some(Instant::now());
                match self.ingress(resources).await {
                    Ok(found) => complete.ingress = found,
                    Err(Error::Conflict(_)) => is_gone = is_settled,
                    Err(error) => return Err(error),
                }
            }
            match (&complete.ingress, complete.asked) {
                (Some(known), _) => ingress.clone_from(known),
                (None, asked) => {
                    let since_asked = asked.map_or(poll, |asked| asked.elapsed());
                    waits.push(poll.saturating_sub(since_asked));
                }
            }
        }
        if is_gone {
            (entry.resources, entry.complete) = (None, None);
            return Err(Error::Conflict("the new load balancer no longer exists".to_owned()));
        }
        entry.is_published |= !ingress.is_empty();
        let progress = waits.into_iter().min().map_or(Progress::Done, Progress::Again);
        let mut outcome =
            Outcome { progress, ingress, refused, retry_refused: entry.again(), ..Outcome::done() };
        if let Some(exceeded) = exceeded {
            exceeded.report(&mut outcome);
        }
        Ok(outcome)
    }

    /// The hostname of a load balancer whose Service is refused now. It may have been refused before the load balancer was active: clients
    /// use that one all the same. A failure only puts it off.
    pub(crate) async fn publish_kept(&self, owner: &Owner, entry: &mut ServiceState, outcome: &mut Outcome) {
        let is_new = entry.unsettled(self.config.settle).is_some();
        let is_listening = entry.is_partial && entry.is_listening_by_list;
        let Some((_, resources)) = entry.resources.as_mut().filter(|(of, _)| of == owner) else { return };
        if resources.balancer.is_none() || resources.listeners.is_empty() && !is_listening {
            return;
        }
        match self.ingress(resources).await {
            Ok(Some(ingress)) => {
                entry.is_published = true;
                outcome.ingress = ingress;
            }
            Ok(None) => again_after(outcome, self.config.activation_poll),
            Err(error) => {
                tracing::debug!(service = %owner.service, %error, "load balancer not published yet; retrying");
                // One that AWS could not create, or that is gone, never becomes active. A new one may not be shown yet.
                let may_come = match error {
                    Error::Invalid { .. } => false,
                    Error::Conflict(_) => is_new,
                    _ => true,
                };
                if may_come {
                    again_after(outcome, self.config.activation_poll);
                }
            }
        }
    }

    /// The hostname to publish; `None` until the load balancer is active, because resolvers cache for long that a name does not
    /// exist. A conflict if AWS does not show it.
    async fn ingress(&self, resources: &mut Resources) -> Result<Option<Vec<Ingress>>, Error> {
        let Some(known) = &resources.balancer else { return Ok(None) };
        if !known.active {
            let look = self.new_balancers.look(&*self.client, &known.arn).await?;
            let Some(now) = look else {
                return Err(Error::Conflict(format!("AWS does not show the load balancer {}", known.name)));
            };
            if now.active || now.failed.is_some() {
                self.new_balancers.forget(&now.arn);
            }
            if let Some(why) = &now.failed {
                let message = format!(
                    "AWS could not create the load balancer {}: {why}. It stays unusable. Re-create the Service.",
                    now.name
                );
                return Err(Error::invalid(reasons::LOAD_BALANCER_FAILED, message));
            }
            // What it has besides may be an old state: what was requested is known better.
            let Balancer { placed, security_groups, ip_address_type, source_nat, .. } = known.clone();
            resources.balancer =
                Some(Balancer { placed, security_groups, ip_address_type, source_nat, ..now });
        }
        let active = resources.balancer.as_ref().filter(|b| b.active);
        Ok(active.map(|b| vec![Ingress { ip: None, hostname: Some(b.hostname.clone()), ip_mode: None }]))
    }

    /// Makes the targets of all target groups the wanted ones, as far as a quota has room.
    pub(crate) async fn converge_targets(
        &self,
        entry: &mut ServiceState,
        wanted: &WantedTargets,
        limits: Limits,
    ) -> Result<SetTargets, Error> {
        let retry = if limits.compare == Compare::InPlace { Retry::Now } else { Retry::UnlessAllFail };
        self.converge_where((|_, _| true, retry), entry, wanted, limits).await
    }

    /// The same for some of the target groups.
    pub(crate) async fn converge_where(
        &self,
        (is_followed, retry): (impl Fn(&String, &ObservedGroup) -> bool + Send + Sync, Retry),
        entry: &mut ServiceState,
        wanted: &WantedTargets,
        limits: Limits,
    ) -> Result<SetTargets, Error> {
        let names = wanted.all();
        entry.refused_targets.retain(|id| names.contains_key(id));
        let ServiceState {
            resources,
            last_known,
            registered,
            refused_targets,
            unproven,
            unfollowed,
            failing,
            ..
        } = &mut *entry;
        let known = resources.as_ref().map(|(owner, known)| (owner, &known.groups));
        let known = known.or_else(|| last_known.as_ref().map(|last| (&last.owner, &last.groups)));
        // One whose tags were not read may be another's.
        let is_ours = |(_, group): &(&String, &ObservedGroup)| !unproven.contains(&group.arn);
        let groups = || known.iter().flat_map(|(_, groups)| *groups).filter(is_ours);
        failing.retain(|name| known.is_some_and(|(_, groups)| groups.contains_key(name)));
        let mut refused = wanted.refused_nodes(groups().map(|(_, group)| group));
        // Its lines name only the target group.
        let service = known.map(|(owner, _)| tracing::field::display(owner.service.clone()));
        let span = tracing::warn_span!("targets", service);
        let is_tried =
            |name: &String, group: &ObservedGroup| !unfollowed.contains(name) && is_followed(name, group);
        let followed = groups().filter(|(name, group)| is_tried(name, group));
        failing.hold(|name| groups().any(|(found, group)| found == name && !is_tried(found, group)));
        let (lender, refusals) = (Lender::new(registered), SharedRefusals::new(refused_targets));
        let (lender, refusals) = (&lender, &refusals);
        // The other groups follow all the same.
        let before = failing.names();
        let pass = group_pass::over(followed, (failing, retry), |name, group| {
            let converged = self.converge_group(name, group, wanted, (lender, refusals), limits);
            converged.instrument(span.clone()).boxed()
        });
        let (done, failures) = pass.await;
        let mut held = done.iter().filter_map(|(_, found)| found.held).min();
        let has_recovered =
            done.iter().any(|(name, found)| found.exceeded.is_none() && before.contains(*name));
        let exceeded = done.into_iter().find_map(|(_, found)| found.exceeded);
        if has_recovered
            && let Some(complete) = &mut entry.complete
            && complete.refused.as_ref().is_some_and(|refused| refused.awaits_targets)
        {
            // A listener may wait for the group.
            (complete.retry, held) = (Some(Instant::now()), Some(Duration::ZERO));
        }
        if let Some(failure) = failures.fatal() {
            if failure.is_not_found() {
                // The next call reads everything.
                entry.must_read_all();
            }
            return Err(failure.clone().into());
        }
        if let Some(failure) = failures.of_all() {
            return Err(failure.clone().into());
        }
        for (id, name) in &names {
            if let Some(why) = entry.refused_targets.reason(id) {
                refused.push((name.clone(), refusal(id, why)));
            }
        }
        refused.sort();
        entry.target_names = names;
        let exceeded = exceeded.map(|failure: CallError| Refused::of_targets(&failure.into()));
        entry.note_room_for_targets(exceeded.is_none());
        Ok(SetTargets { refused, held, exceeded })
    }

    /// The same for one target group. One for which no targets are given keeps its own, except addresses that no endpoint has any more.
    async fn converge_group(
        &self,
        name: &str,
        group: &ObservedGroup,
        wanted: &WantedTargets,
        (lender, refused): (&Lender<'_>, &SharedRefusals<'_>),
        limits: Limits,
    ) -> Result<ConvergedGroup, CallError> {
        let (client, arn) = (&*self.client, group.arn.as_str());
        let mut registered = lender.lend(arn);
        let limits = Limits { may_hold: wanted.may_hold(group), ..limits };
        let staying;
        let targets = match wanted.of(name, group) {
            Some(targets) => targets,
            None if wanted.drops_ended(group) => {
                let known = targets::known(client, arn, &mut registered, limits).await?;
                let Some(found) = wanted.staying(group, known.ids()) else {
                    return Ok(ConvergedGroup::default());
                };
                staying = found;
                &staying
            }
            None => return Ok(ConvergedGroup::default()),
        };
        match targets::converge(client, arn, &mut registered, targets, refused, limits).await {
            Ok(held) => Ok(ConvergedGroup { held, exceeded: None }),
            Err(failure) if failure.is_quota() => Ok(ConvergedGroup { held: None, exceeded: Some(failure) }),
            Err(failure) => Err(failure),
        }
    }

    /// Deletes target groups that no listener uses any more. Their connections live until then, so each stays until the groups that
    /// replace it have a healthy target, within limits. Returns when to call again.
    async fn release_groups(&self, entry: &mut ServiceState) -> Result<Option<Duration>, Error> {
        if entry.leaving.is_empty() {
            return Ok(None);
        }
        let Some((owner, resources)) = &mut entry.resources else { return Ok(Some(RELEASE_POLL)) };
        let may_wait = |since: Instant| since.elapsed() < MAX_HOLD;
        let mut is_undecided = false;
        if entry.leaving.values().copied().any(may_wait) {
            // AWS checks no target of a group whose listener it refused.
            let is_used = |arn: &str| resources.listeners.is_empty() || resources.uses(arn);
            let replaces = |(name, group): &(&String, &ObservedGroup)| {
                !entry.leaving.contains_key(*name) && is_used(&group.arn)
            };
            for (_, group) in resources.groups.iter().filter(replaces) {
                let Some(known) = entry.registered.get_mut(&group.arn) else { continue };
                if known.needs_look(&entry.target_names) {
                    let settle = self.config.settle;
                    known.look(&targets::listing(&*self.client, &group.arn, known, settle).await?);
                }
                if known.is_undecided() {
                    is_undecided = true;
                    break;
                }
            }
        }
        let mut waits = Vec::new();
        let prefix = names::prefix(&self.config.cluster);
        for (name, since) in entry.leaving.clone() {
            if let Some(group) = resources.groups.get(&name) {
                if is_undecided && may_wait(since) {
                    waits.push(HOLD_POLL);
                    continue;
                }
                // Of an adopted load balancer: its connections belong to clients that know of no change.
                let rest = group.drain().saturating_sub(since.elapsed());
                if !name.starts_with(&prefix) && !rest.is_zero() {
                    waits.push(rest);
                    continue;
                }
                let mut retry = entry.groups_in_use.must_wait(&group.arn);
                if retry.is_none() {
                    tracing::info!(service = %owner.service, name, "deleting target group that is no longer used");
                    entry.written = Some(Instant::now());
                    retry = self.delete_group(&group.arn, &mut entry.groups_in_use).await?;
                    if retry.is_some_and(|retry| retry.is_overdue) {
                        tracing::warn!(
                            service = %owner.service, name, group_arn = group.arn,
                            "target group that is no longer used not deleted, because another load balancer uses it; retrying"
                        );
                    }
                }
                if let Some(RetryDeletion { after, is_overdue }) = retry {
                    // Something else uses it. The Service has nothing to do with that.
                    waits.extend((!is_overdue).then_some(after));
                    continue;
                }
                entry.registered.remove(&group.arn);
                resources.groups.remove(&name);
            }
            entry.leaving.remove(&name);
            entry.names.remove(&name);
        }
        Ok(waits.into_iter().min())
    }
}

/// What users are told of a target that AWS refuses.
pub(crate) fn refusal(id: &TargetId, why: &str) -> String {
    match id {
        TargetId::Instance(_) => format!("AWS refuses instance {id}: {why}"),
        TargetId::Pod(_) => format!(
            "AWS refuses pod {id}: {why} Use a network plugin that gives pods addresses of the VPC, or nodes as targets."
        ),
    }
}
