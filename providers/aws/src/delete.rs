// SPDX-License-Identifier: Apache-2.0
//! Deletes the resources of a Service, in an order that each call can be repeated: the load balancer, then its target groups, which
//! AWS releases only seconds later.

use std::time::Duration;

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::{CallError, read_tags};
use crate::names::{self, Ownership};
use crate::observe::Resources;
use crate::provider::{Aws, RELEASE_POLL};
use crate::reasons;
use crate::state::{Condemned, ServiceState};

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

impl Aws {
    /// Deletes everything of the owner. Returns when to call again; `None` if nothing is left.
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        if entry.condemned.as_ref().is_none_or(|condemned| condemned.owner != *owner) {
            let resources = match self.to_delete(owner, entry).await? {
                Ok(resources) => resources,
                Err(wait) => return Ok(Some(wait)),
            };
            if entry.resources.as_ref().is_some_and(|(known, _)| known == owner) {
                (entry.resources, entry.complete) = (None, None);
                entry.leaving.clear();
            }
            entry.condemned = Some(Condemned::new(owner, &resources));
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
        let is_own = |arn: &str| {
            let ownership = tags.get(arn).map(|tags| names::ownership(&self.config.cluster, tags));
            matches!(ownership, Some(Ownership::Ours(found)) if found == *owner)
        };
        let mut proven = known.clone();
        proven.balancer = proven.balancer.filter(|balancer| is_own(&balancer.arn));
        proven.groups.retain(|_, group| is_own(&group.arn));
        Ok(Ok(proven))
    }

    /// Continues a deletion. Returns when to call again; `None` if nothing is left.
    pub(crate) async fn execute(&self, entry: &mut ServiceState) -> Result<Option<Duration>, Error> {
        let Some(condemned) = &mut entry.condemned else { return Ok(None) };
        let service = condemned.owner.service.clone();
        if let Some((name, arn)) = &condemned.balancer {
            tracing::info!(%service, name, "deleting load balancer");
            self.note_change();
            entry.written = Some(Instant::now());
            if let Err(failure) = self.client.delete_balancer(arn).await {
                let error = refused(failure, name, arn);
                if matches!(error, Error::Invalid { .. }) {
                    // Nothing is deleted yet, and the Service may want it back.
                    entry.condemned = None;
                }
                return Err(error);
            }
            condemned.balancer = None;
            if !condemned.groups.is_empty() {
                return Ok(Some(RELEASE_POLL));
            }
        }
        while let Some((name, arn)) = condemned.groups.first_key_value() {
            tracing::info!(%service, name, "deleting target group");
            self.note_change();
            entry.written = Some(Instant::now());
            if !self.client.delete_group(arn).await? {
                // Without one of its own, a load balancer uses it that no read had shown: the next call reads everything.
                if !condemned.had_balancer {
                    entry.condemned = None;
                    (entry.resources, entry.complete) = (None, None);
                }
                return Ok(Some(RELEASE_POLL));
            }
            entry.registered.remove(arn);
            entry.names.remove(name);
            condemned.groups.pop_first();
        }
        entry.condemned = None;
        Ok(None)
    }
}
