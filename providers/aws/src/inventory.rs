// SPDX-License-Identifier: Apache-2.0
//! The resources that this cluster owns in the region, from lists with many resources in each call.
//!
//! The provider reads them once when it starts, for the first comparison of each Service: no other call finds a target group that
//! no load balancer uses, as after a crash. `owned` reads them again. Everything else looks resources up by ARN or name.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::{Balancer, Elbv2, ListedGroup, TAGS_BATCH, Tags, read_tags};
use crate::config::ClusterId;
use crate::names::{self, Ownership};

/// A list that takes longer begins again.
const MAX_READING: Duration = Duration::from_mins(1);

/// The listed resources of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) balancer: Option<Balancer>,
    pub(crate) balancer_tags: Tags,
    pub(crate) groups: Vec<ListedGroup>,
}

#[derive(Clone, Debug)]
pub(crate) struct Inventory {
    pub(crate) read: Instant,
    /// All names with this cluster's prefix, whoever has them.
    names: BTreeSet<String>,
    owned: BTreeMap<Owner, Listed>,
    /// All owners, until `owned` returned them.
    pub(crate) owners: Option<Vec<Owner>>,
}

/// Lists that are being read. After a failure, as by throttling, the next try continues.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    started: Option<Instant>,
    balancers: Option<Vec<Balancer>>,
    groups: Option<Vec<ListedGroup>>,
    /// The resources whose tags were read, and the tags of those that exist.
    asked: BTreeSet<String>,
    tags: BTreeMap<String, Tags>,
}

impl Reading {
    /// Lists load balancers and target groups. Reads the tags of those whose name has this cluster's prefix.
    pub(crate) async fn complete(
        &mut self,
        client: &dyn Elbv2,
        cluster: &ClusterId,
    ) -> Result<Inventory, Error> {
        if self.started.is_none_or(|started| started.elapsed() > MAX_READING) {
            *self = Self { started: Some(Instant::now()), ..Self::default() };
        }
        let prefix = names::prefix(cluster);
        if self.balancers.is_none() {
            let mut found = client.all_balancers().await?;
            found.retain(|balancer| balancer.name.starts_with(&prefix));
            self.balancers = Some(found);
        }
        if self.groups.is_none() {
            let mut found = client.all_groups().await?;
            found.retain(|group| group.name.starts_with(&prefix));
            self.groups = Some(found);
        }
        let balancers = self.balancers.iter().flatten().map(|b| &b.arn);
        let arns = balancers.chain(self.groups.iter().flatten().map(|g| &g.group.arn));
        let rest: Vec<String> = arns.filter(|arn| !self.asked.contains(*arn)).cloned().collect();
        for some in rest.chunks(TAGS_BATCH) {
            self.tags.extend(read_tags(client, some).await?);
            self.asked.extend(some.iter().cloned());
        }
        let Self { started, balancers, groups, tags, .. } = std::mem::take(self);
        let read = started.unwrap_or_else(Instant::now);
        Ok(Inventory::new(cluster, read, balancers.unwrap_or_default(), groups.unwrap_or_default(), &tags))
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
        let mut inventory = Self { read, names: names.collect(), owned: BTreeMap::new(), owners: None };
        let mut other_clusters = Vec::new();
        let mut owner = |name: &str, arn: &str| match names::ownership(cluster, tags.get(arn)?) {
            Ownership::Ours(owner) => Some(owner),
            Ownership::SameName(_) => {
                other_clusters.push(name.to_owned());
                None
            }
            Ownership::Foreign => None,
        };
        for balancer in balancers {
            if let Some(owner) = owner(&balancer.name, &balancer.arn) {
                let listed = inventory.owned.entry(owner).or_default();
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
                "AWS resources with this --aws-cluster-name have the UID of another cluster, or none; leaving them unchanged"
            );
        }
        inventory.owners = Some(inventory.owned.keys().cloned().collect());
        inventory
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
