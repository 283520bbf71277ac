// SPDX-License-Identifier: Apache-2.0
//! The resources that this cluster owns in the region, from lists with many resources in each call.
//!
//! The provider reads them once when it starts, for the first comparison of each Service: no other call finds a target group that
//! no load balancer uses, as after a crash. `owned` reads them again. Everything else looks resources up by ARN or name.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use steerage_model::{Key, chain};
use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::{
    ClusterId,
    marks::{self, Ownership},
};
use tokio::time::Instant;

use crate::client::{Balancer, Calls, ListedGroup, TAGS_BATCH, Tags, read_tags};
use crate::config::Config;
use crate::first_look::use_of;
use crate::names;
use crate::security_group::SecurityGroup;
use crate::shared::LoadBalancerUse;

/// Longest wait for the list of EC2, beside those of `ELBv2`.
const EC2_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a throttled list of EC2 is tried.
const EC2_TRIES: u32 = 3;
/// Lists begin again if AWS answered nothing for so long: something else may have changed meanwhile.
const MAX_PAUSE: Duration = Duration::from_mins(2);

/// The listed resources of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) balancer: Option<Balancer>,
    pub(crate) balancer_tags: Tags,
    pub(crate) groups: Vec<ListedGroup>,
    pub(crate) security_groups: Vec<SecurityGroup>,
}

#[derive(Clone, Debug)]
pub(crate) struct Inventory {
    pub(crate) read: Instant,
    /// All names with this cluster's prefix, whoever has them.
    names: BTreeSet<String>,
    owned: BTreeMap<Owner, Listed>,
    /// Shared load balancers that no target group uses, with their names of sharing.
    pub(crate) unused_shared: Vec<(String, Balancer)>,
    /// All owners, until `owned` returned them.
    pub(crate) owners: Option<Vec<Owner>>,
}

/// Lists that are being read. After a failure, as by throttling, the next try continues.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// When the lists began, and when AWS last answered.
    started: Option<(Instant, Instant)>,
    balancers: Option<Vec<Balancer>>,
    groups: Option<Vec<ListedGroup>>,
    security_groups: Option<Vec<SecurityGroup>>,
    /// How often EC2 failed.
    ec2_failures: u32,
    /// The resources whose tags were read, and the tags of those that exist.
    asked: BTreeSet<String>,
    tags: BTreeMap<String, Tags>,
    /// When the last try failed, and why.
    failed: Option<(Instant, Error)>,
}

impl Reading {
    /// Continues the lists for a caller that began to wait then. Those who waited for a try that failed have its failure too: one after the
    /// other, their own tries would take as long as AWS's silence times their number.
    pub(crate) async fn complete_for(
        &mut self,
        asked: Instant,
        client: &dyn Calls,
        config: &Config,
    ) -> Result<Inventory, Error> {
        if let Some((at, error)) = &self.failed
            && *at > asked
        {
            return Err(error.clone());
        }
        let done = self.complete(client, config).await;
        self.failed = done.as_ref().err().map(|error| (Instant::now(), error.clone()));
        done
    }

    /// Lists load balancers and target groups. Reads the tags of those that may be this cluster's.
    async fn complete(&mut self, client: &dyn Calls, config: &Config) -> Result<Inventory, Error> {
        let cluster = &config.cluster;
        if self.started.is_none_or(|(_, answered)| answered.elapsed() > MAX_PAUSE) {
            let (ec2_failures, now) = (self.ec2_failures, Instant::now());
            *self = Self { started: Some((now, now)), ec2_failures, ..Self::default() };
        }
        // EC2 may need long for an answer, or give none.
        let is_asked = self.security_groups.is_none() && self.ec2_failures < EC2_TRIES;
        let security_groups =
            async { if is_asked { Some(list_security_groups(client, cluster).await) } else { None } };
        let (listed, security_groups) = tokio::join!(self.load_balancers(client, config), security_groups);
        match security_groups {
            Some(Ok(found)) => self.security_groups = Some(found),
            Some(Err(error)) => self.note_ec2_failure(error)?,
            None => {}
        }
        listed?;
        let Self { started, balancers, groups, security_groups, tags, .. } = std::mem::take(self);
        let read = started.map_or_else(Instant::now, |(began, _)| began);
        let mut inventory =
            Inventory::new(cluster, read, balancers.unwrap_or_default(), groups.unwrap_or_default(), &tags);
        inventory.add_security_groups(cluster, security_groups.unwrap_or_default());
        Ok(inventory)
    }

    /// Lists load balancers and target groups with their tags. An adopted load balancer has a name of others: it is found by the groups
    /// with this cluster's prefix that its listeners use. Until they do, only its tags tell, and those of the groups that leave it. So
    /// while load balancers are adopted, the tags of all are read.
    async fn load_balancers(&mut self, client: &dyn Calls, config: &Config) -> Result<(), Error> {
        if self.balancers.is_none() {
            self.balancers = Some(client.all_balancers().await?);
            self.note_answer();
        }
        if self.groups.is_none() {
            let mut groups = client.all_groups().await?;
            if config.adopt.is_empty() {
                let prefix = names::prefix(&config.cluster);
                groups.retain(|group| group.name.starts_with(&prefix));
                let used: BTreeSet<&String> = groups.iter().flat_map(|group| &group.balancers).collect();
                let is_ours = |found: &Balancer| found.name.starts_with(&prefix) || used.contains(&found.arn);
                self.balancers.iter_mut().for_each(|all| all.retain(is_ours));
            }
            self.groups = Some(groups);
            self.note_answer();
        }
        let balancers = self.balancers.iter().flatten().map(|b| &b.arn);
        let arns = balancers.chain(self.groups.iter().flatten().map(|g| &g.group.arn));
        let rest: Vec<String> = arns.filter(|arn| !self.asked.contains(*arn)).cloned().collect();
        for some in rest.chunks(TAGS_BATCH) {
            self.tags.extend(read_tags(client, some).await?);
            self.asked.extend(some.iter().cloned());
            self.note_answer();
        }
        Ok(())
    }

    fn note_answer(&mut self) {
        if let Some((_, answered)) = &mut self.started {
            *answered = Instant::now();
        }
    }

    /// The load balancers do not wait for EC2: each Service reads its own group later. An account that throttles is asked some times more.
    fn note_ec2_failure(&mut self, error: Error) -> Result<(), Error> {
        self.ec2_failures += 1;
        match error {
            error @ Error::Throttled { .. } if self.ec2_failures < EC2_TRIES => return Err(error),
            error @ Error::Denied(_) => tracing::error!(
                error = %chain(&error),
                "listing security groups denied; creating no load balancer and completing no deletion until it is allowed"
            ),
            error => {
                tracing::warn!(error = %chain(&error), "listing security groups failed; reading them for each Service");
            }
        }
        self.security_groups = Some(Vec::new());
        Ok(())
    }
}

/// The cluster's security groups.
async fn list_security_groups(client: &dyn Calls, cluster: &ClusterId) -> Result<Vec<SecurityGroup>, Error> {
    let tags = marks::of_cluster(cluster);
    match tokio::time::timeout(EC2_TIMEOUT, client.security_groups(&tags)).await {
        Ok(found) => Ok(found?),
        Err(_) => Err(Error::Unavailable("EC2 does not answer".to_owned())),
    }
}

impl Inventory {
    fn new(
        cluster: &ClusterId,
        read: Instant,
        balancers: Vec<Balancer>,
        groups: Vec<ListedGroup>,
        tags: &BTreeMap<String, Tags>,
    ) -> Self {
        let names = balancers.iter().map(|b| b.name.clone()).chain(groups.iter().map(|g| g.name.clone()));
        let used: BTreeSet<&String> = groups.iter().flat_map(|group| &group.balancers).collect();
        let shared = |balancer: &Balancer| match marks::ownership(cluster, tags.get(&balancer.arn)?) {
            Ownership::Shared(shared) => Some(shared),
            _ => None,
        };
        let unused = balancers.iter().filter(|balancer| !used.contains(&balancer.arn));
        let unused_shared =
            unused.filter_map(|balancer| Some((shared(balancer)?, balancer.clone()))).collect();
        let (names, owned) = (names.collect(), BTreeMap::new());
        let mut inventory = Self { read, names, owned, unused_shared, owners: None };
        let mut other_clusters = Vec::new();
        let mut owner = |name: &str, arn: &str| match marks::ownership(cluster, tags.get(arn)?) {
            Ownership::Ours(owner) => Some(owner),
            Ownership::SameName(_) => {
                other_clusters.push(name.to_owned());
                None
            }
            Ownership::Shared(_) | Ownership::Foreign => None,
        };
        for balancer in balancers {
            if let Some(owner) = owner(&balancer.name, &balancer.arn) {
                let (own_name, service) =
                    (names::load_balancer(cluster, &owner.service), owner.service.clone());
                let listed = inventory.owned.entry(owner).or_default();
                if let Some(other) = &listed.balancer {
                    // The adoption of one was given up halfway, and another was created.
                    let surplus = if other.name == own_name { &balancer } else { other };
                    tracing::warn!(
                        service = %service,
                        name = surplus.name,
                        "two load balancers have the tags of this Service; this one is not changed any more: delete it, or remove its tags steerage.dev/…"
                    );
                    if other.name == own_name {
                        continue;
                    }
                }
                listed.balancer_tags = tags.get(&balancer.arn).cloned().unwrap_or_default();
                listed.balancer = Some(balancer);
            }
        }
        for mut group in groups {
            group.group.tags = tags.get(&group.group.arn).cloned().unwrap_or_default();
            if let Some(owner) = owner(&group.name, &group.group.arn) {
                inventory.owned.entry(owner).or_default().groups.push(group);
            }
        }
        if let Some(example) = other_clusters.first() {
            tracing::warn!(
                cluster = cluster.name,
                count = other_clusters.len(),
                example,
                "AWS resources with this --aws-cluster-name have the UID of another cluster, or none; leaving them unchanged (see \
                 docs/providers/aws-restore.md)"
            );
        }
        inventory
    }

    /// Adds those that belong to a Service of this cluster.
    fn add_security_groups(&mut self, cluster: &ClusterId, groups: Vec<SecurityGroup>) {
        for group in groups {
            if let Some(owner) = marks::owner(cluster, &group.tags) {
                self.owned.entry(owner).or_default().security_groups.push(group);
            }
        }
        self.owners = Some(self.owned.keys().cloned().collect());
    }

    /// Where the owners' resources are that are at shared load balancers.
    pub(crate) fn shared_uses(&self) -> HashMap<Owner, LoadBalancerUse> {
        let uses = self.owned.iter().filter_map(|(owner, listed)| Some((owner.clone(), use_of(listed)?)));
        uses.filter(|(_, usage)| *usage != LoadBalancerUse::Own).collect()
    }

    /// Takes out the resources of the Service, for each UID of the Service: they change from now on.
    pub(crate) fn take(&mut self, service: &Key) -> BTreeMap<Owner, Listed> {
        let owners: Vec<Owner> =
            self.owned.keys().filter(|owner| owner.service == *service).cloned().collect();
        owners.into_iter().filter_map(|owner| self.owned.remove_entry(&owner)).collect()
    }

    /// Whether a resource in the region has the name.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}
