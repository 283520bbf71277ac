// SPDX-License-Identifier: Apache-2.0
//! Reads the existing resources of one Service: completely, by names and tags, or with two calls if they are already known.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::{Error, Owner};

use crate::client::{Balancer, Client};
use crate::diff::{ObservedGroup, ObservedListener};
use crate::names;

/// The resources of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) balancer: Option<Balancer>,
    /// By name.
    pub(crate) groups: BTreeMap<String, ObservedGroup>,
    pub(crate) listeners: Vec<ObservedListener>,
    /// Listeners that another program added to the load balancer. They are not changed.
    pub(crate) foreign_listeners: Vec<ObservedListener>,
}

/// The result of reading everything.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observation {
    /// Resources of the owner.
    pub(crate) mine: Resources,
    /// Resources of the same Service with another UID, without listeners and attributes.
    pub(crate) stale: Resources,
    /// Resources that have a wanted name but not the tags of this Service.
    pub(crate) foreign: BTreeSet<String>,
}

/// Reads the load balancer, its target groups and the target groups with the given names, and the tags of all of them.
pub(crate) async fn read_all(
    client: &Client,
    cluster: &str,
    owner: &Owner,
    groups: &BTreeSet<String>,
) -> Result<Observation, Error> {
    let balancer = client.balancer_named(&names::load_balancer(cluster, &owner.service)).await?;
    let mut found = match &balancer {
        Some(balancer) => client.groups_of(&balancer.arn).await?,
        None => BTreeMap::new(),
    };
    for name in groups {
        if !found.contains_key(name)
            && let Some(group) = client.group_named(name).await?
        {
            found.insert(name.clone(), group);
        }
    }
    let arns: Vec<String> =
        balancer.iter().map(|b| b.arn.clone()).chain(found.values().map(|g| g.arn.clone())).collect();
    let tags = if arns.is_empty() { BTreeMap::new() } else { client.tags(&arns).await? };
    // Some(true): this owner. Some(false): the same Service with another UID. None: another owner.
    let is_owners = |arn: &str| {
        let found = names::owner(cluster, tags.get(arn)?)?;
        (found.service == owner.service).then_some(found.uid == owner.uid)
    };
    let mut seen = Observation::default();
    if let Some(balancer) = balancer {
        match is_owners(&balancer.arn) {
            Some(true) => seen.mine.balancer = Some(balancer),
            Some(false) => seen.stale.balancer = Some(balancer),
            None => drop(seen.foreign.insert(balancer.name)),
        }
    }
    for (name, group) in found {
        match is_owners(&group.arn) {
            Some(true) => drop(seen.mine.groups.insert(name, group)),
            Some(false) => drop(seen.stale.groups.insert(name, group)),
            None if groups.contains(&name) => drop(seen.foreign.insert(name)),
            // Used by a foreign listener of this load balancer.
            None => {}
        }
    }
    for group in seen.mine.groups.values_mut() {
        group.attributes = client.attributes(&group.arn).await?;
    }
    if let Some(balancer) = &seen.mine.balancer {
        let listeners = client.listeners(&balancer.arn).await?.unwrap_or_default();
        let arns: Vec<String> = listeners.iter().map(|f| f.arn.clone()).collect();
        let tags = if arns.is_empty() { BTreeMap::new() } else { client.tags(&arns).await? };
        let ours = |listener: &ObservedListener| {
            tags.get(&listener.arn).is_some_and(|t| names::owner(cluster, t).is_some())
        };
        (seen.mine.listeners, seen.mine.foreign_listeners) = listeners.into_iter().partition(ours);
    }
    Ok(seen)
}

/// Reads the known resources again, with two calls. Returns `None` if a resource appeared or vanished; then `read_all` must
/// read everything. Does not read the attributes of target groups.
pub(crate) async fn refresh(client: &Client, known: &Resources) -> Result<Option<Resources>, Error> {
    let Some(balancer) = &known.balancer else { return Ok(None) };
    let Some(listeners) = client.listeners(&balancer.arn).await? else { return Ok(None) };
    let mut groups = client.groups_of(&balancer.arn).await?;
    let arns = |listeners: &[ObservedListener]| -> BTreeSet<String> {
        listeners.iter().map(|f| f.arn.clone()).collect()
    };
    let (ours, theirs) = (arns(&known.listeners), arns(&known.foreign_listeners));
    if arns(&listeners) != &ours | &theirs
        || !known.groups.iter().all(|(name, g)| groups.get(name).is_some_and(|s| s.arn == g.arn))
    {
        return Ok(None);
    }
    // Ignores groups that only a foreign listener uses.
    groups.retain(|name, _| known.groups.contains_key(name));
    for (name, group) in &mut groups {
        group.attributes = known.groups.get(name).map(|g| g.attributes.clone()).unwrap_or_default();
    }
    let (listeners, foreign_listeners) = listeners.into_iter().partition(|f| ours.contains(&f.arn));
    Ok(Some(Resources { balancer: known.balancer.clone(), groups, listeners, foreign_listeners }))
}
