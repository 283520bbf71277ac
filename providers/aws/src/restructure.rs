// SPDX-License-Identifier: Apache-2.0
//! Makes the structure of a load balancer the wanted one: from what is remembered, listed or read, by the steps of `apply`.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Owner};
use tokio::time::Instant;

use crate::apply::Stepped;
use crate::desired::Desired;
use crate::observe::{self, Resources};
use crate::partial_read::Reader;
use crate::provider::Aws;
use crate::state::{Complete, FirstLook, PendingDeletion, ServiceState};
use crate::wanted_targets::WantedTargets;
use crate::{reasons, shared};

/// Look again after this time for a created resource that AWS does not show yet.
const VISIBLE_POLL: Duration = Duration::from_secs(1);

/// Look again after this time for targets of a group to which a listener is to switch. New endpoints lead to a call at once.
const EMPTY_POLL: Duration = Duration::from_secs(15);

impl Aws {
    /// The owner's current resources. Deletes resources of the same Service with another UID first, and returns when to call again
    /// while their deletion is not complete, or while reads may show an old state.
    async fn observe(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Result<Resources, Duration>, Error> {
        if let Some(wait) = self.take_back_deletion(owner, entry).await? {
            return Ok(Err(wait));
        }
        if let Some(pending) = &mut entry.deletion {
            // Wanted again, the new load balancer takes the security group, which AWS would not release for minutes. That of a predecessor
            // is deleted later, in nobody's way.
            entry.has_predecessors |= pending.owner != *owner;
            pending.keep_security_groups();
        }
        if let Some(wait) = self.execute(entry).await? {
            return Ok(Err(wait));
        }
        let unsettled = entry.unsettled(self.config.settle);
        if unsettled.is_none() {
            entry.must_read |= std::mem::take(&mut entry.is_read_early);
        }
        if let Some(known) = entry.take_resources(owner) {
            if (compare == Compare::Remembered && !entry.must_read) || unsettled.is_some() {
                return Ok(Ok(known));
            }
            // Reads change nothing: until they say more, targets follow in the groups that are known.
            entry.resources = Some((owner.clone(), known.clone()));
            if !entry.must_read {
                let (written, until) = (entry.written, entry.must_end());
                let ServiceState { leaving, reading, .. } = &mut *entry;
                let is_leaving = |name: &str| leaving.contains_key(name);
                let mut reader = Reader::new(&*self.client, reading, written, until);
                let refreshed =
                    observe::refresh(&mut reader, &known, is_leaving, wanted.compares_balancer()).await?;
                if let Some(resources) = refreshed {
                    entry.resources = None;
                    return Ok(Ok(resources));
                }
                entry.must_read = true;
            }
        } else if let Some(wait) = unsettled {
            return Ok(Err(wait));
        }
        let seen = self.read(owner, entry).await?;
        (entry.resources, entry.last_known, entry.must_read) = (None, None, false);
        entry.open_checks.clear();
        // The others were never created.
        let is_there =
            |name: &String| seen.mine.groups.contains_key(name) || seen.stale.groups.contains_key(name);
        entry.names.retain(is_there);
        entry.unproven.clear();
        let leaves =
            |name: &String| seen.mine.groups.get(name).is_some_and(|group| !seen.mine.uses(&group.arn));
        entry.leaving.retain(|name, _| leaves(name));
        entry.registered.retain(|_, known| !known.is_settled(self.config.settle));
        if let Some(message) = seen.foreign.first() {
            if seen.mine.balancer.is_none() {
                self.drop_security_group(owner, entry).await;
            }
            return Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message));
        }
        if seen.stale != Resources::default() {
            for listener in &seen.stale.listeners {
                self.note_change();
                entry.written = Some(Instant::now());
                self.client.delete_listener(&listener.arn).await?;
                entry.freed.push((listener.arn.clone(), listener.port));
            }
            entry.has_predecessors = true;
            entry.deletion = Some(PendingDeletion::replaced(owner, &seen.stale));
            if let Some(wait) = self.execute(entry).await? {
                return Ok(Err(wait));
            }
        }
        Ok(Ok(seen.mine))
    }

    /// Puts tags back that somebody removed from resources of the owner: without them, the next process finds these only by their names.
    async fn restore_tags(&self, owner: &Owner, resources: &mut Resources, entry: &mut ServiceState) {
        for (arn, lost) in resources.lost_tags(&self.config.cluster, owner) {
            let tags: Vec<&String> = lost.keys().collect();
            tracing::warn!(service = %owner.service, arn, ?tags, "tags missing; restoring");
            self.note_change();
            entry.written = Some(Instant::now());
            match self.client.add_tags(&arn, &lost).await {
                Ok(()) => {
                    if let Some(known) = resources.tags_of(&arn) {
                        known.extend(lost);
                    }
                }
                // What remains of its tags says whose it is.
                Err(failure) => {
                    let error = Error::from(failure);
                    tracing::warn!(service = %owner.service, arn, %error, "tags not restored; trying again with the next change");
                }
            }
        }
    }

    /// The owner is wanted again. Clients keep the hostname of a load balancer whose deletion was not made. Returns when to call again, if
    /// AWS may not show yet whether it was.
    async fn take_back_deletion(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let unsettled = entry.unsettled(self.config.settle);
        let pending = entry.deletion.as_mut().filter(|pending| pending.is_final && pending.owner == *owner);
        let Some(pending) = pending else { return Ok(None) };
        let Some((_, arn)) = &pending.balancer else { return Ok(None) };
        if pending.is_sent {
            if unsettled.is_some() {
                return Ok(unsettled);
            }
            if self.client.balancer_at(arn).await?.is_none() {
                pending.note_deleted();
                return Ok(None);
            }
        }
        entry.deletion = None;
        Ok(None)
    }

    /// Makes the structure the wanted one. Returns when to call again; `None` if it is in place.
    pub(crate) async fn restructure(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        targets: &WantedTargets,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Option<Duration>, Error> {
        let owner = &lb.owner;
        let wanted_names: BTreeSet<String> = wanted.groups.iter().map(|g| g.name.clone()).collect();
        entry.leaving.retain(|name, _| !wanted_names.contains(name));
        // A failure leaves what the list said as it is.
        let listed =
            entry.resources.as_ref().filter(|_| entry.is_partial && entry.is_complete(owner, wanted));
        let filled = match listed {
            Some((_, listed)) => {
                let (listed, written, until) = (listed.clone(), entry.written, entry.must_end());
                let mut reader = Reader::new(&*self.client, &mut entry.reading, written, until);
                observe::fill(&mut reader, &self.config.cluster, owner, listed).await?
            }
            None => None,
        };
        if entry.is_partial {
            entry.keep_listed_groups();
        }
        entry.drop_partial();
        let has_nothing = matches!(std::mem::take(&mut entry.first_look), FirstLook::Nothing);
        let is_new = has_nothing && wanted.shared.is_none();
        let mut resources = match filled.or_else(|| is_new.then(Resources::default)) {
            Some(resources) => resources,
            None => match self.observe(owner, wanted, entry, compare).await? {
                Ok(resources) => resources,
                Err(wait) => return Ok(Some(wait)),
            },
        };
        self.restore_tags(owner, &mut resources, entry).await;
        entry.begin_change(owner, &resources);
        let published = &lb.published_hostnames;
        entry.is_published |= !published.is_empty();
        if wanted.shared.is_none()
            && let Err(error) = self.adopt(owner, wanted, published, entry, &mut resources).await
        {
            entry.put_back(owner, resources, &error);
            return Err(error);
        }
        if wanted.shared.is_some()
            && self.config.adopt.is_empty()
            && resources.groups.is_empty()
            && let Err(error) = self.check_unadopted(owner, published).await
        {
            entry.put_back(owner, resources, &error);
            return Err(error);
        }
        if wanted.shared.is_some() && !self.config.adopt.is_empty() {
            let hostname = resources.balancer.as_ref().map(|balancer| balancer.hostname.as_str());
            let is_other = |found: &String| hostname.is_none_or(|own| !own.eq_ignore_ascii_case(found));
            if let Some(other) = published.iter().find(|found| is_other(found)) {
                let error = shared::publishes_another(other);
                entry.put_back(owner, resources, &error);
                return Err(error);
            }
        }
        entry.names.extend(resources.groups.keys().cloned());
        // A read that showed an old state may have marked one of them.
        let is_used =
            |name: &String| resources.groups.get(name).is_some_and(|group| resources.uses(&group.arn));
        entry.leaving.retain(|name, _| !is_used(name));
        entry.begin_try(wanted, compare);
        let stepped = self.apply_steps(owner, wanted, targets, &mut resources, entry).await;
        // A change that continues soon.
        if !matches!(stepped, Err(Error::Throttled { .. }) | Ok(Stepped::Empty(..) | Stepped::Unproven)) {
            entry.refused_answers.forget();
        }
        entry.refused_meanwhile = None;
        if !matches!(stepped, Ok(Stepped::Empty(..))) {
            (entry.waiting_ports, entry.retry_meanwhile) = (None, None);
        }
        let refused = match stepped {
            Ok(Stepped::Done(refused)) => refused,
            Ok(Stepped::Unproven) => {
                entry.know(owner, resources);
                return Ok(Some(VISIBLE_POLL));
            }
            Ok(Stepped::Empty(ports, refused)) => {
                entry.note_waiting(ports, refused);
                entry.know(owner, resources);
                // The present groups follow meanwhile.
                self.follow_meanwhile(owner, entry, (targets, Some(wanted))).await;
                return Ok(Some(EMPTY_POLL));
            }
            Ok(Stepped::Failing(error)) => {
                // What a registration may have done is noted for each target.
                entry.know(owner, resources);
                return Err(error);
            }
            Err(error) => {
                entry.put_back(owner, resources, &error);
                entry.note_rejected(&error);
                return Err(error);
            }
        };
        // A new load balancer needs minutes: asking at once would only cost a call.
        let asked = resources.balancer.as_ref().and_then(|balancer| self.new_balancers.asked(&balancer.arn));
        // Those of refused listeners too.
        entry.names = resources.groups.keys().chain(entry.leaving.keys()).cloned().collect();
        entry.know(owner, resources);
        let wait = refused.as_ref().and_then(|refused| refused.retry(entry.refused_tries));
        entry.refused_tries = if wait.is_some() { entry.refused_tries.saturating_add(1) } else { 0 };
        let retry = wait.map(|wait| Instant::now() + wait);
        entry.complete =
            Some(Complete { structure: wanted.clone(), refused, retry, ingress: None, asked, verify: None });
        Ok(None)
    }
}
