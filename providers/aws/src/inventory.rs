// SPDX-License-Identifier: Apache-2.0
//! The resources that this cluster owns in the region, from lists with many resources in each call.
//!
//! The provider reads them once when it starts, for the first comparison of each Service: no other call finds a target group that
//! no load balancer uses, as after a crash. `owned` reads them again. Everything else looks resources up by ARN or name.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::{Balancer, Elbv2, ListedGroup, read_tags};
use crate::config::ClusterId;
use crate::names::{self, Ownership};

/// The listed resources of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) balancer: Option<Balancer>,
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

impl Inventory {
    /// Lists load balancers and target groups. Reads the tags of those whose name has this cluster's prefix.
    pub(crate) async fn read(client: &dyn Elbv2, cluster: &ClusterId) -> Result<Self, Error> {
        let prefix = names::prefix(cluster);
        let read = Instant::now();
        let mut balancers = client.all_balancers().await?;
        balancers.retain(|balancer| balancer.name.starts_with(&prefix));
        let mut groups = client.all_groups().await?;
        groups.retain(|group| group.name.starts_with(&prefix));
        let arns = balancers.iter().map(|b| b.arn.clone()).chain(groups.iter().map(|g| g.group.arn.clone()));
        let tags = read_tags(client, &arns.collect::<Vec<_>>()).await?;
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
                inventory.owned.entry(owner).or_default().balancer = Some(balancer);
            }
        }
        for group in groups {
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
        Ok(inventory)
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
