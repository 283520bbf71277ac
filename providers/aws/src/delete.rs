// SPDX-License-Identifier: Apache-2.0
//! Deletes the resources of a Service, in an order that each call can be repeated: the load balancer, then its target groups, which
//! AWS releases only seconds later, then its security group, which AWS releases minutes later.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::{ClusterId, marks};
use tokio::time::Instant;

use crate::client::{CallError, Tags, read_tags};
use crate::groups_in_use::{GroupsInUse, RetryDeletion, in_use as group_in_use};
use crate::observe::Resources;
use crate::provider::{Aws, RELEASE_POLL};
use crate::reasons;
use crate::state::{PendingDeletion, PendingSecurityGroups, ServiceState};

/// AWS releases target groups some seconds after their load balancer, and its security group some minutes after it. After this time,
/// something else uses what AWS does not delete.
const RELEASE_TIMEOUT: Duration = Duration::from_mins(10);
/// Longest time between two tries to delete what is in use.
const MAX_RELEASE_POLL: Duration = Duration::from_mins(5);

/// Says what to do if AWS forbids the deletion. Steerage does not lift the protection, whoever requested it.
fn refused(failure: CallError, name: &str, arn: &str) -> Error {
    if !failure.is("OperationNotPermitted") {
        return failure.into();
    }
    let message = format!(
        "AWS refuses to delete the load balancer {name}: {}. It and the Service stay until AWS allows the deletion. If it is \
         protected, lift that: aws elbv2 modify-load-balancer-attributes --load-balancer-arn {arn} --attributes \
         Key=deletion_protection.enabled,Value=false",
        failure.message()
    );
    Error::invalid(reasons::OPERATION_NOT_PERMITTED, message)
}

/// Names the commands that find what keeps AWS from deleting a security group.
fn in_use(id: &str) -> Error {
    let message = format!(
        "AWS does not delete the security group {id}, because something uses it. The load balancer is gone; the Service stays until the \
         group is deleted. Steerage tries again at the next resync. Remove the use. Inbound rules of other groups: \
         aws ec2 describe-security-groups --filters Name=ip-permission.group-id,Values={id} ; outbound rules: \
         aws ec2 describe-security-groups --filters Name=egress.ip-permission.group-id,Values={id} ; network interfaces: \
         aws ec2 describe-network-interfaces --filters Name=group-id,Values={id}"
    );
    Error::invalid(reasons::SECURITY_GROUP_IN_USE, message)
}

/// Whether AWS should have released by now what is in use since then.
pub(crate) fn is_overdue(in_use_since: Instant) -> bool {
    in_use_since.elapsed() >= RELEASE_TIMEOUT
}

/// When to try again to delete what is in use, after `shortest` at the earliest, and whether AWS should have released it by now.
pub(crate) fn retry_after(in_use_since: Option<Instant>, shortest: Duration) -> (Duration, bool) {
    let since = in_use_since.map(|since| since.elapsed()).unwrap_or_default();
    let is_overdue = in_use_since.is_some_and(is_overdue);
    // Not long after the time at which the user is told.
    let rest = if is_overdue { MAX_RELEASE_POLL } else { RELEASE_TIMEOUT.saturating_sub(since) };
    ((since / 2).min(MAX_RELEASE_POLL).min(rest).max(shortest), is_overdue)
}

impl Aws {
    /// Deletes everything of the owner. Returns when to call again; `None` if nothing is left.
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        if entry.deletion.as_ref().is_some_and(|pending| pending.owner == *owner && !pending.is_final)
            && let Some(wait) = self.execute(entry).await?
        {
            return Ok(Some(wait));
        }
        if entry.deletion.as_ref().is_none_or(|pending| pending.owner != *owner) {
            let resources = match self.to_delete(owner, entry).await? {
                Ok(resources) => resources,
                Err(wait) => return Ok(Some(wait)),
            };
            if entry.resources.as_ref().is_some_and(|(known, _)| known == owner) {
                (entry.resources, entry.complete) = (None, None);
                entry.leaving.clear();
            }
            entry.deletion = Some(PendingDeletion::all(owner, &resources));
        }
        self.execute(entry).await
    }

    /// The owner's resources by their tags, read now. Otherwise when to call again.
    async fn to_delete(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Result<Resources, Duration>, Error> {
        entry.adopt_list(owner);
        if let Some((known, resources)) = &entry.resources
            && known == owner
            && entry.names.iter().all(|name| resources.groups.contains_key(name))
        {
            return self.proven(owner, resources, entry.unsettled(self.config.settle)).await;
        }
        if entry.resources.is_none()
            && let Some(wait) = entry.unsettled(self.config.settle)
        {
            return Ok(Err(wait));
        }
        let seen = self.read(owner, entry).await?;
        if entry.resources.is_none() {
            // The others were never created.
            entry
                .names
                .retain(|name| seen.mine.groups.contains_key(name) || seen.stale.groups.contains_key(name));
        }
        Ok(Ok(seen.mine))
    }

    /// Those of the known resources that are the owner's. One without tags is gone or, while reads are not settled, not visible yet.
    async fn proven(
        &self,
        owner: &Owner,
        known: &Resources,
        unsettled: Option<Duration>,
    ) -> Result<Result<Resources, Duration>, Error> {
        let groups = known.groups.values().map(|group| group.arn.clone());
        let arns: Vec<String> = known.balancer.iter().map(|b| b.arn.clone()).chain(groups).collect();
        let tags = read_tags(&*self.client, &arns).await?;
        if let Some(wait) = unsettled
            && arns.iter().any(|arn| !tags.contains_key(arn))
        {
            return Ok(Err(wait));
        }
        let is_own = |arn: &str, is_of: fn(&ClusterId, &Owner, &Tags) -> bool| {
            tags.get(arn).is_some_and(|tags| is_of(&self.config.cluster, owner, tags))
        };
        let mut proven = known.clone();
        proven.balancer = proven.balancer.filter(|balancer| is_own(&balancer.arn, marks::is_balancer_of));
        proven.groups.retain(|_, group| is_own(&group.arn, marks::is_of));
        Ok(Ok(proven))
    }

    /// Continues a deletion. Returns when to call again; `None` if nothing is left.
    pub(crate) async fn execute(&self, entry: &mut ServiceState) -> Result<Option<Duration>, Error> {
        let Some(pending) = &mut entry.deletion else { return Ok(None) };
        let service = pending.owner.service.clone();
        if let Some((name, arn)) = &pending.balancer {
            tracing::info!(%service, name, "deleting load balancer");
            self.note_change();
            entry.written = Some(Instant::now());
            pending.is_sent = true;
            if let Err(failure) = self.client.delete_balancer(arn).await {
                pending.is_sent = failure.leaves_open();
                let error = refused(failure, name, arn);
                if matches!(error, Error::Invalid { .. }) {
                    // Nothing is deleted yet, and the Service may want it back.
                    entry.deletion = None;
                }
                return Err(error);
            }
            self.new_balancers.forget(arn);
            if entry.adopted.as_ref() == Some(arn) {
                entry.adopted = None;
            }
            pending.note_deleted();
        }
        // Also if the Service's own changes bring it here sooner.
        let held = pending.held_for(self.config.target_group_release);
        if held.is_some() && !pending.groups.is_empty() {
            return Ok(held);
        }
        while let Some((name, arn)) = pending.groups.first_key_value() {
            tracing::info!(%service, name, "deleting target group");
            entry.written = Some(Instant::now());
            if let Some(RetryDeletion { after, is_overdue }) =
                self.delete_group(arn, &mut entry.groups_in_use).await?
            {
                let done = if is_overdue { Err(group_in_use(name, arn)) } else { Ok(Some(after)) };
                // Without one of its own, a load balancer uses it that no read had shown: the next call reads everything.
                if pending.balancer_deleted.is_none() {
                    entry.deletion = None;
                    (entry.resources, entry.complete) = (None, None);
                }
                return done;
            }
            entry.registered.remove(arn);
            entry.names.remove(name);
            pending.groups.pop_first();
        }
        let wait = self.delete_security_groups(entry).await?;
        if wait.is_none() {
            entry.deletion = None;
        }
        Ok(wait)
    }

    /// Deletes a target group. If something uses it, or did when that was last tried, returns when to try again.
    pub(crate) async fn delete_group(
        &self,
        arn: &str,
        in_use: &mut GroupsInUse,
    ) -> Result<Option<RetryDeletion>, CallError> {
        if let Some(retry) = in_use.must_wait(arn).filter(|retry| !retry.is_overdue) {
            return Ok(Some(retry));
        }
        self.note_change();
        if !self.client.delete_group(arn).await? {
            return Ok(Some(in_use.refused(arn, self.config.target_group_release)));
        }
        in_use.deleted(arn);
        Ok(None)
    }

    /// Deletes the security groups of a deletion. Returns when to call again.
    async fn delete_security_groups(&self, entry: &mut ServiceState) -> Result<Option<Duration>, Error> {
        let Some(pending) = &entry.deletion else { return Ok(None) };
        let owner = pending.owner.clone();
        let read = match pending.security_groups {
            PendingSecurityGroups::Unread => {
                // EC2 shows a new group later, and until then calls it missing when it should delete it.
                if !entry.has_settled_security_groups(self.config.settle) {
                    return Ok(Some(self.config.settle));
                }
                let found = self.security_groups_of_owner(&owner).await?.into_iter().map(|group| group.id);
                Some(found.collect::<BTreeSet<String>>())
            }
            PendingSecurityGroups::Ids { .. } => None,
        };
        let Some(pending) = &mut entry.deletion else { return Ok(None) };
        if let Some(ids) = read {
            pending.security_groups = PendingSecurityGroups::Ids { ids, in_use_since: None };
        }
        let held = pending.held_for(self.config.security_group_release);
        let PendingSecurityGroups::Ids { ids, in_use_since } = &mut pending.security_groups else {
            return Ok(None);
        };
        if held.is_some() && !ids.is_empty() {
            return Ok(held);
        }
        while let Some(id) = ids.first() {
            if !self.delete_security_group(&owner, id, in_use_since).await? {
                let (wait, is_overdue) = retry_after(*in_use_since, RELEASE_POLL);
                return if is_overdue { Err(in_use(id)) } else { Ok(Some(wait)) };
            }
            if entry.security_groups.get(&owner).is_some_and(|known| known.group.id == *id) {
                entry.security_groups.remove(&owner);
            }
            ids.pop_first();
        }
        Ok(None)
    }

    /// Tries to delete a security group. False while something uses it.
    pub(crate) async fn delete_security_group(
        &self,
        owner: &Owner,
        id: &str,
        in_use_since: &mut Option<Instant>,
    ) -> Result<bool, Error> {
        if in_use_since.is_none() {
            tracing::info!(service = %owner.service, uid = owner.uid, security_group = id, "deleting security group");
        } else {
            tracing::debug!(service = %owner.service, security_group = id, "trying again to delete security group");
        }
        self.note_change();
        let is_gone = self.client.delete_security_group(id).await?;
        if !is_gone {
            in_use_since.get_or_insert_with(Instant::now);
        }
        Ok(is_gone)
    }
}
