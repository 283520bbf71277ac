// SPDX-License-Identifier: Apache-2.0
//! Adopts the load balancer that another controller created for a Service: reads it, and marks it and what the other controller made of it
//! as Steerage's. The usual steps follow: own target groups, switched listeners, and the other controller's groups leave. It changes
//! nothing but tags, and nothing that `adoption` refuses. Without the flag, it refuses a second load balancer beside that one.
//!
//! The load balancer gets its tags first: from then on it is found again after a restart, and deleted with its Service. A listener gets its
//! tags after its group, so that no group is forgotten.

use std::collections::BTreeSet;

use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use crate::adoption::{self, Candidate, Hostname, Verdict};
use crate::client::{Balancer, Tags, read_tags};
use crate::desired::Desired;
use crate::diff::ObservedGroup;
use crate::names;
use crate::observe::{Resources, not_visible};
use crate::provider::Aws;
use crate::security_group::Security;
use crate::state::ServiceState;

impl Aws {
    /// Takes over the load balancer that the Service publishes, if it has none of Steerage's, and continues what was interrupted.
    pub(crate) async fn adopt(
        &self,
        owner: &Owner,
        wanted: &Desired,
        published: &[String],
        entry: &mut ServiceState,
        resources: &mut Resources,
    ) -> Result<(), Error> {
        if self.config.adopt.is_empty() {
            return match resources.balancer {
                Some(_) => Ok(()),
                None => self.check_unadopted(owner, published).await,
            };
        }
        if resources.balancer.is_none() {
            let Some(found) = self.candidate(owner, wanted, published).await? else { return Ok(()) };
            let arn = found.balancer.arn.clone();
            match adoption::judge(&self.config, owner, wanted, &found)? {
                Verdict::Ours => {
                    entry.adopted = Some(arn);
                    *resources = self.read(owner, entry).await?.mine;
                }
                Verdict::Of(peer) => {
                    let (service, name) = (&owner.service, &found.balancer.name);
                    tracing::info!(%service, name, from = peer.name(), "adopting load balancer");
                    let marks = self.mark(owner, &arn, entry).await?;
                    // Not before: without the tags it is another's.
                    entry.adopted = Some(arn);
                    let Candidate { balancer, tags, listeners, groups, .. } = found;
                    resources.balancer = Some(balancer);
                    resources.balancer_tags = tags.into_iter().chain(marks).collect();
                    (resources.foreign_listeners, resources.foreign_groups) = (listeners, groups);
                }
            }
        }
        self.adopt_listeners(owner, entry, resources).await
    }

    /// What the provider would adopt for the Service, in words; `None` if nothing.
    pub(crate) async fn preview_adoption(
        &self,
        owner: &Owner,
        wanted: &Desired,
        published: &[String],
    ) -> Result<Option<String>, Error> {
        let Some(found) = self.candidate(owner, wanted, published).await? else { return Ok(None) };
        Ok(match adoption::judge(&self.config, owner, wanted, &found)? {
            Verdict::Ours => None,
            Verdict::Of(peer) => {
                Some(format!("adopts the load balancer {} of {}", found.balancer.name, peer.name()))
            }
        })
    }

    /// Refuses a second load balancer for a Service that publishes one which the flag would adopt. Costs a call only if the Service
    /// publishes another host name than Steerage's.
    pub(crate) async fn check_unadopted(&self, owner: &Owner, published: &[String]) -> Result<(), Error> {
        let Some(found) = self.published_balancer(owner, published).await? else { return Ok(()) };
        let mut tags = read_tags(&*self.client, std::slice::from_ref(&found.arn)).await?;
        let tags = tags.remove(&found.arn).ok_or_else(|| not_visible(&found.arn))?;
        adoption::check_unadopted(&self.config.cluster, owner, &found.name, &tags)
    }

    async fn candidate(
        &self,
        owner: &Owner,
        wanted: &Desired,
        published: &[String],
    ) -> Result<Option<Candidate>, Error> {
        match self.published_balancer(owner, published).await? {
            Some(balancer) => Ok(Some(self.look(owner, wanted, balancer).await?)),
            None => Ok(None),
        }
    }

    /// The load balancer that the Service publishes, unless it has Steerage's name.
    async fn published_balancer(
        &self,
        owner: &Owner,
        published: &[String],
    ) -> Result<Option<Balancer>, Error> {
        let own = names::load_balancer(&self.config.cluster, &owner.service);
        for hostname in published {
            let Some(Hostname { balancer: name, is_network }) = Hostname::parse(hostname) else { continue };
            if name.eq_ignore_ascii_case(&own) {
                continue;
            }
            let is_it = |found: &Balancer| found.hostname.eq_ignore_ascii_case(hostname);
            let mut found = self.client.balancer_named(name).await?.filter(is_it);
            if found.is_none() {
                // The name has capital letters, which the status lacks, or the load balancer is gone.
                found = self.client.all_balancers().await?.into_iter().find(is_it);
            }
            match found {
                Some(balancer) => return Ok(Some(balancer)),
                None if is_network || self.config.adopt.is_empty() => {}
                None => {
                    let why = "No network or application load balancer has this host name: it is a classic one, or was deleted. If it was \
                               deleted, clear status.loadBalancer of the Service; else create another Service, and move clients to it.";
                    return Err(adoption::refused(name, why));
                }
            }
        }
        Ok(None)
    }

    /// Reads what decides whether the load balancer can be adopted.
    async fn look(&self, owner: &Owner, wanted: &Desired, balancer: Balancer) -> Result<Candidate, Error> {
        let client = &*self.client;
        let mut listeners = client.listeners(&balancer.arn).await?.unwrap_or_default();
        let mut groups = client.groups_of(&balancer.arn).await?;
        let arns = listeners.iter().map(|found| &found.arn).chain(groups.values().map(|found| &found.arn));
        let arns: Vec<String> = arns.chain([&balancer.arn]).cloned().collect();
        let mut tags = read_tags(client, &arns).await?;
        let mut take = |arn: &str| tags.remove(arn).ok_or_else(|| not_visible(arn));
        for listener in &mut listeners {
            listener.tags = take(&listener.arn)?;
        }
        for group in groups.values_mut() {
            group.tags = take(&group.arn)?;
        }
        let tags = take(&balancer.arn)?;
        let (mut front_groups, mut backend_groups, mut named_groups) = Default::default();
        // What began does not wait for EC2.
        if !balancer.security_groups.is_empty() && adoption::is_adoptable(&self.config, &owner.service, &tags)
        {
            match &wanted.security {
                Security::Rules(_) => {
                    let front = adoption::front_tags(&self.config.cluster, &owner.service);
                    front_groups = self.security_group_ids(&front).await?;
                    backend_groups =
                        self.security_group_ids(&adoption::backend_tags(&self.config.cluster)).await?;
                }
                Security::Named(named) => named_groups = self.named_group_ids(named).await?,
                Security::Open => {}
            }
        }
        Ok(Candidate { balancer, tags, listeners, groups, front_groups, backend_groups, named_groups })
    }

    /// Of the security groups of an adopted load balancer, those that stay beside Steerage's own: rules of the nodes name them.
    pub(crate) async fn groups_that_stay(
        &self,
        owner: &Owner,
        balancer: &Balancer,
    ) -> Result<BTreeSet<String>, Error> {
        if balancer.name == names::load_balancer(&self.config.cluster, &owner.service) {
            return Ok(BTreeSet::new());
        }
        let backend = self.security_group_ids(&adoption::backend_tags(&self.config.cluster)).await?;
        Ok(backend.intersection(&balancer.security_groups).cloned().collect())
    }

    async fn security_group_ids(&self, tags: &Tags) -> Result<BTreeSet<String>, Error> {
        Ok(self.client.security_groups(tags).await?.into_iter().map(|group| group.id).collect())
    }

    /// Takes over the listeners of the other controller, and the groups to which they forward. Those of somebody else stay.
    async fn adopt_listeners(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        resources: &mut Resources,
    ) -> Result<(), Error> {
        let is_theirs = |tags: &Tags| adoption::is_adoptable(&self.config, &owner.service, tags);
        let (theirs, others): (Vec<_>, Vec<_>) =
            resources.foreign_listeners.iter().cloned().partition(|listener| is_theirs(&listener.tags));
        for mut listener in theirs {
            let is_its = |group: &ObservedGroup| listener.group_arn.as_ref() == Some(&group.arn);
            // One that also serves a listener of somebody else stays.
            let is_shared = others.iter().any(|other| other.group_arn == listener.group_arn);
            let group =
                resources.foreign_groups.iter().find(|(_, group)| is_its(group) && is_theirs(&group.tags));
            if let Some((name, mut group)) = group.filter(|_| !is_shared).map(|(n, g)| (n.clone(), g.clone()))
            {
                // Tells how long its connections need after the last listener left it.
                group.attributes = self.client.attributes(&group.arn).await?;
                group.tags.extend(self.mark(owner, &group.arn, entry).await?);
                resources.foreign_groups.remove(&name);
                entry.names.insert(name.clone());
                resources.groups.insert(name, group);
            }
            if let Some(tls) = &mut listener.tls {
                tls.others = self.client.other_certificates(&listener.arn).await?;
            }
            listener.tags.extend(self.mark(owner, &listener.arn, entry).await?);
            resources.foreign_listeners.retain(|found| found.arn != listener.arn);
            resources.listeners.push(listener);
        }
        Ok(())
    }

    /// Makes the resource the owner's. Returns the tags that it got.
    async fn mark(&self, owner: &Owner, arn: &str, entry: &mut ServiceState) -> Result<Tags, Error> {
        let tags = marks::of_owner(&self.config.cluster, owner);
        self.note_change();
        entry.written = Some(Instant::now());
        self.client.add_tags(arn, &tags).await?;
        Ok(tags)
    }
}
