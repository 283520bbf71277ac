// SPDX-License-Identifier: Apache-2.0
//! The resources that this cluster owns in the region.
//!
//! The provider lists them once when it starts: no other call finds a target group that no load balancer uses, as after a
//! crash. `owned` lists them again. Everything else looks resources up by name.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Key;
use steerage_provider_api::{Error, Owner};

use crate::client::{Elbv2, read_tags};
use crate::config::ClusterId;
use crate::names::{self, Ownership};

/// Owners, each with the name of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inventory {
    owned: Vec<(Owner, String)>,
}

impl Inventory {
    /// Lists load balancers and target groups. Reads the tags of those whose name has this cluster's prefix.
    pub(crate) async fn read(client: &dyn Elbv2, cluster: &ClusterId) -> Result<Self, Error> {
        let prefix = names::prefix(cluster);
        let balancers = client.all_balancers().await?.into_iter().map(|b| (b.name, b.arn));
        let mut found: Vec<(String, String)> = balancers.collect();
        found.extend(client.all_groups().await?.into_iter().map(|g| (g.name, g.group.arn)));
        found.retain(|(name, _)| name.starts_with(&prefix));
        let arns: Vec<String> = found.iter().map(|(_, arn)| arn.clone()).collect();
        let tags = read_tags(client, &arns).await?;
        let (mut owned, mut other_clusters) = (Vec::new(), Vec::new());
        for (name, arn) in found {
            match tags.get(&arn).map(|tags| names::ownership(cluster, tags)) {
                Some(Ownership::Ours(owner)) => owned.push((owner, name)),
                Some(Ownership::SameName(_)) => other_clusters.push(name),
                Some(Ownership::Foreign) | None => {}
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
        Ok(Self { owned })
    }

    /// All owners, sorted.
    pub(crate) fn owners(&self) -> Vec<Owner> {
        let owners: BTreeSet<&Owner> = self.owned.iter().map(|(owner, _)| owner).collect();
        owners.into_iter().cloned().collect()
    }

    /// The names of each Service's resources, for any UID of the Service.
    pub(crate) fn by_service(self) -> BTreeMap<Key, BTreeSet<String>> {
        let mut services: BTreeMap<Key, BTreeSet<String>> = BTreeMap::new();
        for (owner, name) in self.owned {
            services.entry(owner.service).or_default().insert(name);
        }
        services
    }
}
