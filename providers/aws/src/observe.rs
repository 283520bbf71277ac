// SPDX-License-Identifier: Apache-2.0
//! Reads what is there for one Service, in full by names and tags, or, when that is known already, in two calls.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::{Error, Owner};

use crate::client::{Balancer, Client};
use crate::diff::{SeenFront, SeenGroup};
use crate::names;

/// What one owner has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) balancer: Option<Balancer>,
    /// By name.
    pub(crate) groups: BTreeMap<String, SeenGroup>,
    pub(crate) fronts: Vec<SeenFront>,
    /// Listeners that somebody else added to the load balancer: left alone.
    pub(crate) foreign_fronts: Vec<SeenFront>,
}

/// What a full reading found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The owner's.
    pub(crate) mine: View,
    /// What belongs to the same Service's earlier lives. Without listeners and attributes.
    pub(crate) stale: View,
    /// Names in our way that are not ours.
    pub(crate) foreign: BTreeSet<String>,
}

/// Reads the load balancer with the target groups that it uses, and those of these names, looking at the tags of all.
pub(crate) async fn full(
    client: &Client,
    cluster: &str,
    owner: &Owner,
    groups: &BTreeSet<String>,
) -> Result<Seen, Error> {
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
    // Some(true): the owner's; Some(false): an earlier life's.
    let whose = |arn: &str| {
        let found = names::owner(cluster, tags.get(arn)?)?;
        (found.service == owner.service).then_some(found.uid == owner.uid)
    };
    let mut seen = Seen::default();
    if let Some(balancer) = balancer {
        match whose(&balancer.arn) {
            Some(true) => seen.mine.balancer = Some(balancer),
            Some(false) => seen.stale.balancer = Some(balancer),
            None => drop(seen.foreign.insert(balancer.name)),
        }
    }
    for (name, group) in found {
        match whose(&group.arn) {
            Some(true) => drop(seen.mine.groups.insert(name, group)),
            Some(false) => drop(seen.stale.groups.insert(name, group)),
            None if groups.contains(&name) => drop(seen.foreign.insert(name)),
            // A foreign listener's, on our load balancer.
            None => {}
        }
    }
    for group in seen.mine.groups.values_mut() {
        group.attributes = client.attributes(&group.arn).await?;
    }
    if let Some(balancer) = &seen.mine.balancer {
        let fronts = client.listeners(&balancer.arn).await?.unwrap_or_default();
        let arns: Vec<String> = fronts.iter().map(|f| f.arn.clone()).collect();
        let tags = if arns.is_empty() { BTreeMap::new() } else { client.tags(&arns).await? };
        let ours =
            |front: &SeenFront| tags.get(&front.arn).is_some_and(|t| names::owner(cluster, t).is_some());
        (seen.mine.fronts, seen.mine.foreign_fronts) = fronts.into_iter().partition(ours);
    }
    Ok(seen)
}

/// Reads again what `known` says, in two calls; `None` where something came or went, so that only a full reading can tell.
/// The attributes of the groups are taken as known.
pub(crate) async fn again(client: &Client, known: &View) -> Result<Option<View>, Error> {
    let Some(balancer) = &known.balancer else { return Ok(None) };
    let Some(fronts) = client.listeners(&balancer.arn).await? else { return Ok(None) };
    let mut groups = client.groups_of(&balancer.arn).await?;
    let arns = |fronts: &[SeenFront]| -> BTreeSet<String> { fronts.iter().map(|f| f.arn.clone()).collect() };
    let (ours, theirs) = (arns(&known.fronts), arns(&known.foreign_fronts));
    if arns(&fronts) != &ours | &theirs
        || !known.groups.iter().all(|(name, g)| groups.get(name).is_some_and(|s| s.arn == g.arn))
    {
        return Ok(None);
    }
    // Groups that only a foreign listener uses are nothing of ours.
    groups.retain(|name, _| known.groups.contains_key(name));
    for (name, group) in &mut groups {
        group.attributes = known.groups.get(name).map(|g| g.attributes.clone()).unwrap_or_default();
    }
    let (fronts, foreign_fronts) = fronts.into_iter().partition(|f| ours.contains(&f.arn));
    Ok(Some(View { balancer: known.balancer.clone(), groups, fronts, foreign_fronts }))
}
