// SPDX-License-Identifier: Apache-2.0
//! Reads the existing resources of one Service: completely, by names and tags, or with two calls if they are already known.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::{
    ClusterId,
    marks::{self, Ownership},
};

use crate::client::{Balancer, Calls, Tags, read_tags};
use crate::diff::{ObservedGroup, ObservedListener};
use crate::labels;
use crate::names;
use crate::partial_read::Reader;
use crate::shared::LoadBalancerUse;

/// The resources of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) balancer: Option<Balancer>,
    /// By name.
    pub(crate) groups: BTreeMap<String, ObservedGroup>,
    pub(crate) listeners: Vec<ObservedListener>,
    /// Listeners that another program added to the load balancer, or that are of another Service. They are not changed.
    pub(crate) foreign_listeners: Vec<ObservedListener>,
    /// Target groups of others that listeners of the load balancer use, by name. They are not changed. Only a complete read shows them.
    pub(crate) foreign_groups: BTreeMap<String, ObservedGroup>,
    /// Attributes of the load balancer. They are read only if its tags say that annotations set some.
    pub(crate) balancer_attributes: BTreeMap<String, String>,
    /// Tags of the load balancer, as last read or written.
    pub(crate) balancer_tags: Tags,
}

impl Resources {
    /// Whether a listener forwards to the target group.
    pub(crate) fn uses(&self, group: &str) -> bool {
        let mut all = self.listeners.iter().chain(&self.foreign_listeners);
        all.any(|listener| listener.group_arn.as_deref() == Some(group))
    }

    /// The tags of one of the resources; `None` if it is not there.
    pub(crate) fn tags_of(&mut self, arn: &str) -> Option<&mut Tags> {
        if self.balancer.as_ref().is_some_and(|balancer| balancer.arn == arn) {
            return Some(&mut self.balancer_tags);
        }
        let groups = self.groups.values_mut().map(|group| (&group.arn, &mut group.tags));
        let listeners = self.listeners.iter_mut().map(|listener| (&listener.arn, &mut listener.tags));
        groups.chain(listeners).find(|(of, _)| *of == arn).map(|(_, tags)| tags)
    }

    /// The tags that resources of the owner have lost, by ARN.
    pub(crate) fn lost_tags(&self, cluster: &ClusterId, owner: &Owner) -> Vec<(String, Tags)> {
        let balancer = self.balancer.iter().map(|balancer| (&balancer.arn, &self.balancer_tags));
        let balancer = balancer.filter(|(_, tags)| marks::is_balancer_of(cluster, owner, tags));
        let groups = self.groups.values().map(|group| (&group.arn, &group.tags));
        let listeners = self.listeners.iter().map(|listener| (&listener.arn, &listener.tags));
        let all = balancer.chain(groups).chain(listeners);
        all.filter_map(|(arn, tags)| Some((arn.clone(), marks::lost(cluster, owner, tags)?))).collect()
    }
}

/// The attributes of a load balancer, if its tags say that annotations set some.
async fn balancer_attributes(
    client: &dyn Calls,
    arn: &str,
    tags: &Tags,
) -> Result<BTreeMap<String, String>, Error> {
    if labels::remembered(tags).is_empty() {
        return Ok(BTreeMap::new());
    }
    Ok(client.balancer_attributes(arn).await?)
}

/// The result of reading everything.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observation {
    /// Resources of the owner.
    pub(crate) mine: Resources,
    /// Resources of the same Service with another UID, without attributes, and with listeners only at a shared load balancer.
    pub(crate) stale: Resources,
    /// For each resource that has a wanted name but not the tags of this Service: what is wrong and what to do.
    pub(crate) foreign: Vec<String>,
}

/// Reads the load balancer, which is at the ARN `adopted` or has Steerage's name, its target groups and the target groups with the given
/// names, and the tags of all of them.
pub(crate) async fn read_all(
    reader: &mut Reader<'_>,
    cluster: &ClusterId,
    owner: &Owner,
    groups: &BTreeSet<String>,
    usage: &LoadBalancerUse,
    adopted: Option<&str>,
) -> Result<Observation, Error> {
    let client = reader.client;
    let mut balancer = match adopted {
        Some(arn) => client.balancer_at(arn).await?,
        None => None,
    };
    if balancer.is_none() {
        let name = match usage {
            LoadBalancerUse::Own => names::load_balancer(cluster, &owner.service),
            LoadBalancerUse::Shared(shared) => names::shared_load_balancer(cluster, shared),
        };
        balancer = client.balancer_named(&name).await?;
    }
    let mut found = match &balancer {
        Some(balancer) => client.groups_of(&balancer.arn).await?,
        None => BTreeMap::new(),
    };
    for name in groups {
        if !found.contains_key(name)
            && let Some(group) = reader.group_named(name).await?
        {
            found.insert(name.clone(), group);
        }
    }
    let arns: Vec<String> =
        balancer.iter().map(|b| b.arn.clone()).chain(found.values().map(|g| g.arn.clone())).collect();
    let tags = read_tags(client, &arns).await?;
    let ownership = |name: &str, arn: &str, is_of: fn(&ClusterId, &Owner, &Tags) -> bool| {
        let tags = tags.get(arn).ok_or_else(|| not_visible(name))?;
        // One that has lost a tag is put right.
        let is_mine = is_of(cluster, owner, tags);
        Ok::<_, Error>(if is_mine { Ownership::Ours(owner.clone()) } else { marks::ownership(cluster, tags) })
    };
    let not_owned = |name: &str, arn: &str, wanted: &Tags, ownership: &Ownership| {
        let tags = tags.get(arn).cloned().unwrap_or_default();
        not_owned(cluster, (owner, name), (wanted, &tags), ownership)
    };
    let of_owner = marks::of_owner(cluster, owner);
    let mut seen = Observation::default();
    if let Some(balancer) = balancer {
        match ownership(&balancer.name, &balancer.arn, marks::is_balancer_of)? {
            Ownership::Ours(found) if found == *owner => seen.mine.balancer = Some(balancer),
            Ownership::Ours(found) if found.service == owner.service => seen.stale.balancer = Some(balancer),
            Ownership::Shared(found) if *usage == LoadBalancerUse::Shared(found.clone()) => {
                seen.mine.balancer = Some(balancer);
            }
            other => {
                let wanted = match usage {
                    LoadBalancerUse::Shared(shared) => marks::of_shared(cluster, shared),
                    LoadBalancerUse::Own => of_owner.clone(),
                };
                seen.foreign.push(not_owned(&balancer.name, &balancer.arn, &wanted, &other));
            }
        }
    }
    for (name, mut group) in found {
        match ownership(&name, &group.arn, marks::is_of)? {
            Ownership::Ours(found) if found == *owner => drop(seen.mine.groups.insert(name, group)),
            Ownership::Ours(found) if found.service == owner.service => {
                seen.stale.groups.insert(name, group);
            }
            other if groups.contains(&name) => {
                seen.foreign.push(not_owned(&name, &group.arn, &of_owner, &other));
            }
            // Used by a foreign listener of this load balancer.
            _ => {
                group.tags = tags.get(&group.arn).cloned().unwrap_or_default();
                seen.mine.foreign_groups.insert(name, group);
            }
        }
    }
    for group in seen.mine.groups.values_mut() {
        group.attributes = reader.attributes(&group.arn).await?;
        group.tags = tags.get(&group.arn).cloned().unwrap_or_default();
    }
    if let Some(balancer) = &seen.mine.balancer {
        seen.mine.balancer_tags = tags.get(&balancer.arn).cloned().unwrap_or_default();
        seen.mine.balancer_attributes =
            balancer_attributes(client, &balancer.arn, &seen.mine.balancer_tags).await?;
        let is_shared = *usage != LoadBalancerUse::Own;
        let listeners = listeners(reader, (cluster, owner), balancer, is_shared).await?;
        (seen.mine.listeners, seen.mine.foreign_listeners) = listeners.unwrap_or_default();
        if matches!(usage, LoadBalancerUse::Shared(_)) {
            share_out(cluster, owner, &mut seen);
        }
    }
    reader.finish();
    Ok(seen)
}

/// Tells the listeners of the owner, and of its predecessors, from those of the other Services that share the load balancer.
fn share_out(cluster: &ClusterId, owner: &Owner, seen: &mut Observation) {
    for listener in std::mem::take(&mut seen.mine.listeners) {
        let listeners = match marks::owner(cluster, &listener.tags) {
            _ if marks::is_of(cluster, owner, &listener.tags) => &mut seen.mine.listeners,
            Some(found) if found.service == owner.service => &mut seen.stale.listeners,
            _ => &mut seen.mine.foreign_listeners,
        };
        listeners.push(listener);
    }
}

/// Our listeners of a load balancer, and those of others; `None` if it does not exist. Of a shared one, only the certificates of the
/// owner's are read.
async fn listeners(
    reader: &mut Reader<'_>,
    (cluster, owner): (&ClusterId, &Owner),
    balancer: &Balancer,
    is_shared: bool,
) -> Result<Option<(Vec<ObservedListener>, Vec<ObservedListener>)>, Error> {
    let client = reader.client;
    let Some(mut listeners) = client.listeners(&balancer.arn).await? else { return Ok(None) };
    let arns: Vec<String> = listeners.iter().map(|f| f.arn.clone()).collect();
    let tags = read_tags(client, &arns).await?;
    for listener in &mut listeners {
        listener.tags = tags.get(&listener.arn).cloned().unwrap_or_default();
        let is_mine = marks::is_of(cluster, owner, &listener.tags);
        let is_read = is_mine || !is_shared && marks::owner(cluster, &listener.tags).is_some();
        if let Some(tls) = listener.tls.as_mut().filter(|_| is_read) {
            tls.others = reader.other_certificates(&listener.arn).await?;
        }
    }
    if let Some(new) = listeners.iter().find(|listener| !tags.contains_key(&listener.arn)) {
        return Err(not_visible(&format!("{}:{}", balancer.name, new.port)));
    }
    let ours = |listener: &ObservedListener| {
        marks::is_of(cluster, owner, &listener.tags) || marks::owner(cluster, &listener.tags).is_some()
    };
    Ok(Some(listeners.into_iter().partition(ours)))
}

/// Reads what a list does not show of these resources: attributes and listeners. Returns `None` if the load balancer is gone.
pub(crate) async fn fill(
    reader: &mut Reader<'_>,
    cluster: &ClusterId,
    owner: &Owner,
    mut listed: Resources,
) -> Result<Option<Resources>, Error> {
    let Some(balancer) = &listed.balancer else { return Ok(None) };
    let Some(listeners) = listeners(reader, (cluster, owner), balancer, false).await? else {
        return Ok(None);
    };
    (listed.listeners, listed.foreign_listeners) = listeners;
    listed.balancer_attributes =
        balancer_attributes(reader.client, &balancer.arn, &listed.balancer_tags).await?;
    for group in listed.groups.values_mut() {
        group.attributes = reader.attributes(&group.arn).await?;
    }
    reader.finish();
    Ok(Some(listed))
}

/// A read shows a resource that another read does not show: it is new, or just deleted. Whose it is, is unknown.
pub(crate) fn not_visible(name: &str) -> Error {
    Error::Conflict(format!("AWS does not show the tags of {name} yet"))
}

/// How to give a resource whose tags somebody changed the wanted ones again, and what the other way costs.
pub(crate) fn put_back_tags(wanted: &Tags, tags: &Tags) -> String {
    let missing = marks::missing_text(wanted, tags);
    if missing.is_empty() {
        let names: Vec<&str> = wanted.keys().map(String::as_str).collect();
        return format!(
            "If Steerage made it, remove its tags whose names begin with steerage.dev/, except {}.",
            names.join(", ")
        );
    }
    format!(
        "If Steerage made it for this Service, put these tags back: {missing}. To delete it instead ends connections, and a new load \
         balancer has another hostname."
    )
}

/// What is wrong with a resource that has a wanted name, and what to do.
fn not_owned(
    cluster: &ClusterId,
    (owner, name): (&Owner, &str),
    (wanted, tags): (&Tags, &Tags),
    ownership: &Ownership,
) -> String {
    let put_back = put_back_tags(wanted, tags);
    let ClusterId { name: cluster, uid: own } = cluster;
    let tag = marks::CLUSTER_UID;
    match ownership {
        Ownership::SameName(None) if tags.get(marks::UID) == Some(&owner.uid) => {
            format!("The AWS resource {name} lacks its tag {tag}. It is not changed. {put_back}")
        }
        Ownership::SameName(uid) => {
            let found = uid.as_deref().map_or("missing".to_owned(), |uid| format!("`{uid}`"));
            let put_back = if uid.is_none() { format!(" {put_back}") } else { String::new() };
            format!(
                "The AWS resource {name} has this cluster's --aws-cluster-name `{cluster}`, but its tag {tag} is {found}, and the \
                 UID of this cluster is `{own}`. It is not changed.{put_back} If this cluster is a copy, set another --aws-cluster-name \
                 here. If this cluster replaces another one, follow docs/providers/aws-restore.md: \
                 the tags {tag} and {} must change together, or the load balancer is deleted.",
                marks::UID
            )
        }
        Ownership::Ours(other) => {
            format!("The AWS resource {name} belongs to the Service {}. It is not changed.", other.service)
        }
        Ownership::Shared(shared) => {
            format!(
                "The AWS resource {name} belongs to the shared load balancer {shared}. It is not changed."
            )
        }
        Ownership::Foreign => format!(
            "The AWS resource {name} exists without the tags of this Service. It is not changed, and changes of the Service wait. \
             {put_back} If another program made it, remove it with that program."
        ),
    }
}

/// Reads the known resources again, with two calls, and more if annotations set attributes of the load balancer, or
/// several certificates, or name what only the load balancer itself shows (`with_balancer`). Returns `None` if a resource appeared or vanished; then `read_all` must
/// read everything. Does not read the attributes of target groups. No listener needs the groups that are leaving, or that none has used
/// yet.
pub(crate) async fn refresh(
    reader: &mut Reader<'_>,
    known: &Resources,
    is_leaving: impl Fn(&str) -> bool,
    with_balancer: bool,
) -> Result<Option<Resources>, Error> {
    let client = reader.client;
    let Some(balancer) = known.balancer.clone() else { return Ok(None) };
    let balancer = if with_balancer { client.balancer_at(&balancer.arn).await? } else { Some(balancer) };
    let Some(balancer) = balancer else { return Ok(None) };
    let Some(mut listeners) = client.listeners(&balancer.arn).await? else { return Ok(None) };
    let mut groups = client.groups_of(&balancer.arn).await?;
    let arns = |listeners: &[ObservedListener]| -> BTreeSet<String> {
        listeners.iter().map(|f| f.arn.clone()).collect()
    };
    let is_used = |arn: &String| known.listeners.iter().any(|of| of.group_arn.as_ref() == Some(arn));
    let is_spare = |name: &str, group: &ObservedGroup| is_leaving(name) || !is_used(&group.arn);
    let (ours, theirs) = (arns(&known.listeners), arns(&known.foreign_listeners));
    if arns(&listeners) != &ours | &theirs
        || !known
            .groups
            .iter()
            .all(|(name, g)| is_spare(name, g) || groups.get(name).is_some_and(|s| s.arn == g.arn))
    {
        return Ok(None);
    }
    // Ignores groups that only a foreign listener uses.
    groups.retain(|name, _| known.groups.contains_key(name));
    for (name, group) in known.groups.iter().filter(|(name, group)| is_spare(name, group)) {
        groups.entry(name.clone()).or_insert_with(|| group.clone());
    }
    for (name, group) in &mut groups {
        if let Some(known) = known.groups.get(name) {
            (group.attributes, group.tags) = (known.attributes.clone(), known.tags.clone());
        }
    }
    for listener in &mut listeners {
        // The tags of foreign ones too: those of a load balancer that is adopted may be still to be taken over.
        let mut all = known.listeners.iter().chain(&known.foreign_listeners);
        let Some(known) = all.find(|known| known.arn == listener.arn) else { continue };
        listener.tags.clone_from(&known.tags);
        if let (Some(tls), Some(known)) = (&mut listener.tls, &known.tls)
            && !known.others.is_empty()
        {
            tls.others = reader.other_certificates(&listener.arn).await?;
        }
    }
    let (listeners, foreign_listeners) = listeners.into_iter().partition(|f| ours.contains(&f.arn));
    let balancer_attributes = balancer_attributes(client, &balancer.arn, &known.balancer_tags).await?;
    reader.finish();
    let balancer = Some(balancer);
    Ok(Some(Resources {
        balancer,
        groups,
        listeners,
        foreign_listeners,
        balancer_attributes,
        ..known.clone()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_what_is_missing_or_what_is_too_much() {
        let cluster = ClusterId { name: "prod".to_owned(), uid: "c1".to_owned() };
        let wanted = marks::of_shared(&cluster, "web");
        let mut tags = wanted.clone();
        tags.insert(marks::UID.to_owned(), "u1".to_owned());
        let text = put_back_tags(&wanted, &tags);
        assert!(text.contains("remove its tags") && text.contains(marks::SHARED), "{text}");
        tags.remove(marks::CLUSTER);
        let text = put_back_tags(&wanted, &tags);
        assert!(text.contains("steerage.dev/cluster with the value `prod` (it is missing)"), "{text}");
    }
}
