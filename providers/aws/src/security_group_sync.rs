// SPDX-License-Identifier: Apache-2.0
//! Brings the security group of a load balancer in place: creates it, changes its rules, attaches it, and deletes those of predecessors.
//! It changes neither groups of others nor rules that others added.
//!
//! EC2 is another API than `ELBv2`, and fails independently. So `provider` calls this after the targets, which do not wait for it. What
//! EC2's answers leave open is settled by trying again: a rule that is there already, or gone already, is what was wanted.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Compare, Error, Outcome, Owner, Progress};
use steerage_provider_cloud::{LastAttempt, marks};
use tokio::time::Instant;

use crate::annotations::{DISABLE_SECURITY_GROUP, SECURITY_GROUPS};
use crate::client::{Balancer, CallError, Tags};
use crate::delete::retry_after;
use crate::desired::Desired;
use crate::named_groups::check_own;
use crate::observe::not_visible;
use crate::provider::{Aws, RELEASE_POLL};
use crate::reasons;
use crate::restrict::with_kept_ports;
use crate::security_group::{NewSecurityGroup, Rule, Security, SecurityGroup, new_security_group};
use crate::state::{KnownSecurityGroup, ServiceState};

/// Rules whose answer was lost are sent again, which costs a call each. If they are more, the group is read, as soon as reads show them.
pub(crate) const MAX_RESENT: usize = 10;
/// Longest time between two tries after a failure of what neither ports nor targets depend on.
const MAX_RETRY: Duration = Duration::from_mins(1);

/// Refuses what a load balancer cannot become: AWS neither gives it its first security group, nor takes the last.
pub(crate) fn check(wanted: &Desired, balancer: &Balancer) -> Result<(), Error> {
    let security = &wanted.security;
    let has_group = !balancer.security_groups.is_empty();
    let problem = match security {
        Security::Rules(_) if !has_group && !security.is_open_to_all(wanted.ip_address_type) => {
            "The Service restricts its sources, but its load balancer was created without a security group, and AWS cannot add one. The \
             source ranges have no effect: every client that reaches the load balancer may connect. Other changes of the Service wait. \
             Remove the source ranges, or create the Service again, which changes its hostname."
                .to_owned()
        }
        Security::Open if has_group => format!(
            "Annotation {DISABLE_SECURITY_GROUP} requests a load balancer without a security group, but this one has a group, and AWS \
             cannot take it away. The group and its rules are kept. Other changes of the Service wait. Remove the annotation, or create \
             the Service again, which changes its hostname."
        ),
        Security::Named(_) if !has_group => format!(
            "Annotation {SECURITY_GROUPS} names security groups, but the load balancer was created without one, and AWS cannot add the \
             first. Every client that reaches the load balancer may connect. Other changes of the Service wait. Remove the annotation, or \
             create the Service again, which changes its hostname."
        ),
        _ => return Ok(()),
    };
    Err(Error::invalid(reasons::SECURITY_GROUP_IMMUTABLE, problem))
}

impl Aws {
    /// The IDs of the security groups that a new load balancer gets: that of Steerage with its rules, or those that are named.
    pub(crate) async fn ensure_security_groups(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<BTreeSet<String>, Error> {
        let rules = match &wanted.security {
            Security::Rules(rules) => rules,
            Security::Named(named) => {
                let ids = self.named_group_ids(named).await?;
                check_own(&ids, entry.security_groups.get(owner).map(|known| known.group.id.as_str()))?;
                return Ok(ids);
            }
            Security::Open => return Ok(BTreeSet::new()),
        };
        if !entry.security_groups.contains_key(owner) {
            self.create_security_group(owner, entry).await?;
        }
        match self.sync_rules(owner, rules, entry).await {
            // Some clients are better than none. What follows the creation reports it.
            Err(Error::Invalid { reason: reasons::QUOTA_EXCEEDED, .. }) => {}
            done => done?,
        }
        let own = entry.security_groups.get(owner).map(|known| known.group.id.clone());
        Ok(own.into_iter().chain(self.config.backend_security_group.clone()).collect())
    }

    /// Deletes the group of a load balancer that is refused, as well as it can: it would use up the account's quota.
    pub(crate) async fn drop_security_group(&self, owner: &Owner, entry: &mut ServiceState) {
        if let Some(known) = entry.security_groups.get(owner)
            && self.client.delete_security_group(&known.group.id).await.is_ok_and(|is_gone| is_gone)
        {
            entry.security_groups.remove(owner);
        }
    }

    /// Brings the security groups in place, after all else. A failure becomes a part of the outcome: the targets, which may have to
    /// change again at any moment, do not wait for EC2.
    pub(crate) async fn secure(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
        outcome: &mut Outcome,
    ) {
        self.secure_after(None, owner, entry, compare, outcome).await;
    }

    /// The same after sources were removed. If EC2 did not answer, another call would only keep the Service waiting. If it refused that,
    /// others may be added all the same.
    pub(crate) async fn secure_after(
        &self,
        failure: Option<Error>,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
        outcome: &mut Outcome,
    ) {
        let synced = match failure {
            Some(error @ Error::Unavailable(_)) => Err(error),
            other => {
                let synced = self.sync_security_group(owner, entry, compare).await;
                synced.and(other.map_or(Ok(()), Err))
            }
        };
        let cleaned = self.delete_spare_security_groups(owner, entry, outcome).await;
        let is_transient =
            |done: &Result<(), Error>| matches!(done, Err(error) if !matches!(error, Error::Invalid { .. }));
        if is_transient(&synced) || cleaned.is_err() {
            again_after(outcome, retry_wait(entry.security_failures));
            entry.security_failures += 1;
        } else {
            entry.security_failures = 0;
        }
        if let Err(error) = cleaned {
            tracing::warn!(service = %owner.service, %error, "security group that is no longer used not deleted; retrying");
        }
        // The next try resolves a conflict.
        if let Err(error) = synced
            && !matches!(error, Error::Conflict(_))
        {
            outcome.incomplete = Some((error.reason(), error.to_string()));
        }
    }

    /// Brings the security group of an existing load balancer in place. A load balancer without any is left as it is.
    pub(crate) async fn sync_security_group(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<(), Error> {
        let Some(wanted) = entry.wanted.clone().filter(|(of, _)| of == owner) else {
            return self.restrict_present(owner, entry).await.map(|_| ());
        };
        let balancer = entry.balancer(owner).cloned();
        let security =
            balancer.as_ref().map_or(&wanted.1.security, |balancer| wanted.1.security_of(balancer));
        let rules = match (security, &balancer) {
            // The group may have less than what was accepted last: nothing comes back.
            (Security::Rules(_), balancer)
                if entry.is_restricted(owner) && entry.may_be_attached(owner, balancer.as_ref()) =>
            {
                return self.restrict_present(owner, entry).await.map(|_| ());
            }
            (Security::Rules(rules), _) => &entry.restricted(owner, rules),
            (Security::Named(named), Some(balancer)) if !balancer.security_groups.is_empty() => {
                return self.sync_named_groups(owner, named, balancer, entry, compare).await;
            }
            _ => return Ok(()),
        };
        match &balancer {
            Some(balancer) if balancer.security_groups.is_empty() => return Ok(()),
            // Unknown after a failure: the rules may still change.
            None if !entry.security_groups.contains_key(owner) => return Ok(()),
            _ => {}
        }
        let synced = self.sync_own_group(owner, &wanted.1, rules, balancer.as_ref(), entry, compare).await;
        if let (Some(balancer), Some(known)) = (balancer, entry.security_groups.get(owner)) {
            let id = known.group.id.clone();
            // A group that clients do not use yet waits for its rules. What nodes admit does not: rules may lack room for days.
            if synced.is_ok() || balancer.security_groups.contains(&id) {
                let attached = self.attach(owner, &balancer, id, entry, compare).await;
                return synced.and(attached);
            }
        }
        synced
    }

    /// Brings Steerage's group and its rules in place.
    async fn sync_own_group(
        &self,
        owner: &Owner,
        wanted: &Desired,
        rules: &BTreeSet<Rule>,
        balancer: Option<&Balancer>,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<(), Error> {
        let is_settled =
            |known: &KnownSecurityGroup| known.written.is_none_or(|at| at.elapsed() >= self.config.settle);
        // What lost its tags is looked for again until it has them.
        let is_compared = compare != Compare::Remembered || entry.security_group_taken.is_some();
        let is_due = |known: &KnownSecurityGroup| {
            (is_compared || !known.group.doubtful.is_empty()) && is_settled(known)
        };
        if entry.security_groups.get(owner).is_none_or(is_due) {
            self.read_security_group(owner, entry, balancer).await?;
        }
        let known = entry.security_groups.get(owner).map(|known| &known.group);
        if known.is_some_and(|group| group.doubtful.len() > MAX_RESENT) {
            return Err(Error::Unavailable(
                "AWS gave no answer to a change of the security group. Steerage reads it.".to_owned(),
            ));
        }
        let is_kept = |port| entry.may_serve(owner, wanted, port);
        match known {
            Some(group) => self.sync_rules(owner, &with_kept_ports(rules, &group.own, is_kept), entry).await,
            None => self.sync_rules(owner, rules, entry).await,
        }
    }

    /// Reads the owner's security group, and creates it if there is none.
    async fn read_security_group(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        balancer: Option<&Balancer>,
    ) -> Result<(), Error> {
        let attached = balancer.map(|balancer| balancer.security_groups.clone()).unwrap_or_default();
        if let Some(group) = self.find_security_group(owner, &attached).await? {
            entry.security_group_taken = None;
            entry.security_groups.insert(owner.clone(), KnownSecurityGroup::from_read(group));
            return Ok(());
        }
        // AWS deletes no group that a load balancer uses. So EC2 shows an old state, or somebody took a tag away.
        let known = entry.security_groups.get(owner).map(|known| known.group.id.clone());
        if let (Some(id), Some(balancer)) = (known, balancer)
            && balancer.security_groups.contains(&id)
        {
            let since = *entry.security_group_taken.get_or_insert_with(Instant::now);
            if since.elapsed() < self.config.settle {
                return Err(not_visible(&format!("the security group {id}")));
            }
            let message = format!(
                "The security group {id} of the load balancer no longer has the tags of this Service. Its rules are not changed any \
                 more. Restore its tags steerage.dev/…, as docs/providers/aws.md lists them."
            );
            return Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message));
        }
        entry.security_groups.remove(owner);
        self.create_security_group(owner, entry).await
    }

    /// The owner's security group as EC2 shows it.
    pub(crate) async fn find_security_group(
        &self,
        owner: &Owner,
        attached: &BTreeSet<String>,
    ) -> Result<Option<SecurityGroup>, Error> {
        let found = self.security_groups_of_owner(owner).await?;
        Ok(SecurityGroup::choose(found, &new_security_group(&self.config, owner), attached))
    }

    /// All security groups that the tags say are the owner's.
    pub(crate) async fn security_groups_of_owner(&self, owner: &Owner) -> Result<Vec<SecurityGroup>, Error> {
        let found = self.security_groups_with(&marks::of_owner(&self.config.cluster, owner)).await?;
        Ok(found.into_iter().filter(|(of, _)| of == owner).map(|(_, group)| group).collect())
    }

    /// The security groups of all UIDs of a Service.
    async fn security_groups_of_service(&self, owner: &Owner) -> Result<Vec<(Owner, SecurityGroup)>, Error> {
        let mut tags = marks::of_owner(&self.config.cluster, owner);
        tags.remove(marks::UID);
        let mut found = self.security_groups_with(&tags).await?;
        found.retain(|(of, _)| of.service == owner.service);
        Ok(found)
    }

    async fn security_groups_with(&self, tags: &Tags) -> Result<Vec<(Owner, SecurityGroup)>, Error> {
        let found = self.client.security_groups(tags).await?.into_iter();
        let ours = found.filter_map(|group| Some((marks::owner(&self.config.cluster, &group.tags)?, group)));
        Ok(ours.collect())
    }

    async fn create_security_group(&self, owner: &Owner, entry: &mut ServiceState) -> Result<(), Error> {
        let wanted = new_security_group(&self.config, owner);
        let NewSecurityGroup { name, vpc, .. } = wanted.clone();
        let tags = marks::of_owner(&self.config.cluster, owner);
        tracing::info!(service = %owner.service, name, "creating security group");
        self.note_change();
        entry.security_group_created = Some(Instant::now());
        let group = match self.client.create_security_group(&wanted, &tags).await {
            Ok(id) => SecurityGroup { id, name, vpc, tags, ..SecurityGroup::default() },
            // An answer was lost, or the list of the start did not have it.
            Err(failure) if failure.is("InvalidGroup.Duplicate") => {
                let found = self.find_security_group(owner, &BTreeSet::new()).await?;
                found.ok_or_else(|| self.taken(&wanted, &tags, entry))?
            }
            Err(failure) => return Err(failure.into()),
        };
        entry.security_group_taken = None;
        let known =
            KnownSecurityGroup { written: Some(Instant::now()), ..KnownSecurityGroup::from_read(group) };
        entry.security_groups.insert(owner.clone(), known);
        Ok(())
    }

    /// The name exists, but EC2 does not show the tags of this Service on the group: it is new, or it is not ours.
    fn taken(&self, wanted: &NewSecurityGroup, tags: &Tags, entry: &mut ServiceState) -> Error {
        let NewSecurityGroup { name, vpc, .. } = wanted;
        let since = entry.security_group_taken.get_or_insert_with(Instant::now);
        if since.elapsed() < self.config.settle {
            return not_visible(&format!("the security group {name}"));
        }
        let message = format!(
            "The security group {name} exists in {vpc} without the tags of this Service. It is not changed, and no load balancer is \
             created. If Steerage made it for this Service, put these tags back: {}. Delete the group only if another program made it.",
            marks::missing_text(tags, &Tags::new())
        );
        Error::invalid(reasons::OBJECT_NOT_OWNED, message)
    }

    /// Deletes Steerage's security groups that the load balancer does not use, which nothing waits for: those of the Service's predecessors,
    /// and its own one if an annotation names others. Adds to the outcome when to call again.
    async fn delete_spare_security_groups(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        if entry.has_predecessors {
            for (of, group) in self.security_groups_of_service(owner).await? {
                if of != *owner {
                    entry.security_groups.entry(of).or_insert_with(|| KnownSecurityGroup::from_read(group));
                }
            }
            entry.has_predecessors = false;
        }
        let mut spare: Vec<Owner> = entry.security_groups.keys().filter(|of| *of != owner).cloned().collect();
        if entry.has_spare_group(owner) {
            if entry.has_settled_security_groups(self.config.settle) {
                spare.push(owner.clone());
            } else {
                // EC2 may not show it yet, and would call it missing instead of deleting it.
                again_after(outcome, self.config.settle);
            }
        }
        for of in spare {
            let Some(known) = entry.security_groups.get_mut(&of) else { continue };
            if self.delete_security_group(&of, &known.group.id, &mut known.in_use_since).await? {
                entry.security_groups.remove(&of);
                continue;
            }
            let (wait, is_overdue) = retry_after(known.in_use_since, RELEASE_POLL);
            if is_overdue {
                // Something else uses it. The Service has nothing to do with that.
                outcome.retry_refused = Some(outcome.retry_refused.map_or(wait, |other| other.min(wait)));
            } else {
                again_after(outcome, wait);
            }
        }
        Ok(())
    }

    /// Attaches the group, and the one that nodes admit. If the load balancer has the first, others that somebody attached stay; else it
    /// takes their place: an annotation named them, or somebody attached them instead.
    async fn attach(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        id: String,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<(), Error> {
        let has = &balancer.security_groups;
        let backend = self.config.backend_security_group.as_ref();
        if has.contains(&id) && backend.is_none_or(|backend| has.contains(backend)) {
            return Ok(());
        }
        let known = entry.attached.as_ref().filter(|_| compare == Compare::Remembered);
        if let Some(result) = known.and_then(|known| known.result(&id, has)) {
            return result;
        }
        if let Some(known) = entry.security_groups.get_mut(owner) {
            known.in_use_since = None;
        }
        // The call replaces all groups, and somebody may have attached one since the last read.
        let read = self.client.balancer_at(&balancer.arn).await?;
        let now = read.map_or_else(|| has.clone(), |found| found.security_groups);
        // Beside Steerage's own one, all stay. In the place of others, those of an adopted load balancer that rules of the nodes name.
        let mut own =
            if now.contains(&id) { now.clone() } else { self.groups_that_stay(owner, balancer).await? };
        own.insert(id.clone());
        let wanted: BTreeSet<String> = own.iter().chain(backend).cloned().collect();
        tracing::info!(service = %owner.service, security_groups = ?wanted, "attaching security groups");
        let done = match self.set_security_groups(owner, balancer, &wanted, entry).await {
            Err(failure) if self.is_about_backend_group(&failure) => {
                // Who may connect does not depend on it.
                if !now.contains(&id) {
                    self.set_security_groups(owner, balancer, &own, entry).await?;
                }
                Err(failure.rejected())
            }
            Err(failure) => {
                if failure.is("InvalidSecurityGroup") && entry.has_settled_security_groups(self.config.settle)
                {
                    // It is gone: the next call creates another.
                    entry.security_groups.remove(owner);
                }
                Err(failure.into())
            }
            Ok(()) => Ok(()),
        };
        let has = entry.balancer(owner).map(|balancer| balancer.security_groups.clone()).unwrap_or_default();
        entry.attached = LastAttempt::new(id, has, done.as_ref().err());
        done
    }

    /// Whether AWS does not know the group that nodes admit. Nobody creates it here: AWS will not know it a moment later either.
    pub(crate) fn is_about_backend_group(&self, failure: &CallError) -> bool {
        let backend = self.config.backend_security_group.as_deref();
        failure.is("InvalidSecurityGroup") && backend.is_some_and(|id| failure.message().contains(id))
    }
}

/// When to try again after so many failures in a row before this one.
pub(crate) fn retry_wait(failures: u32) -> Duration {
    RELEASE_POLL.saturating_mul(1 << failures.min(5)).min(MAX_RETRY)
}

/// Calls again after this time for a comparison that waits. Nothing that the Service's status should say.
pub(crate) fn compare_soon(outcome: &mut Outcome, wait: Duration) {
    outcome.retry_refused = Some(outcome.retry_refused.map_or(wait, |other| other.min(wait)));
}

/// Calls again after this time, or earlier if the outcome says so.
pub(crate) fn again_after(outcome: &mut Outcome, wait: Duration) {
    outcome.progress = match outcome.progress {
        Progress::Again(other) => Progress::Again(other.min(wait)),
        Progress::Done => Progress::Again(wait),
    };
}
