// SPDX-License-Identifier: Apache-2.0
//! Whose a resource is. Load balancers and public IPs have tags. What is in a load balancer has none: its name has a digest of the Service
//! and the Service's UID. Names of Services without a public IP of their own are in tags of the load balancer. Pure.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::{Family, Key};
use steerage_provider_api::Owner;
use steerage_provider_cloud::marks::{self, Ownership};
use steerage_provider_cloud::{ClusterId, names};

/// Azure's longest name of most resources and parts.
pub(crate) const LONGEST_NAME: usize = 80;
/// Azure's longest value of a tag.
const LONGEST_VALUE: usize = 256;
/// Tags with names of Services. Azure has 50 tags for a resource; the others are the cluster's and the user's.
const MOST_LISTS: usize = 40;
/// Tags of lists of Services begin with it.
pub(crate) const LIST: &str = "steerage.dev_services-";

pub(crate) type Tags = BTreeMap<String, String>;

/// Azure forbids the slash in names of tags.
fn tag(mark: &str) -> String {
    mark.replace('/', "_")
}

fn of(marks: BTreeMap<String, String>) -> Tags {
    marks.into_iter().map(|(key, value)| (tag(&key), value)).collect()
}

/// The tags of a load balancer of the cluster.
pub(crate) fn of_balancer(cluster: &ClusterId) -> Tags {
    of(marks::of_cluster(cluster))
}

/// The tags of a Service's public IP.
pub(crate) fn of_public_ip(cluster: &ClusterId, owner: &Owner) -> Tags {
    of(marks::of_owner(cluster, owner))
}

/// Tags as users read them.
pub(crate) fn shown(tags: &Tags) -> String {
    let all = tags.iter().map(|(key, value)| format!("{key} with the value `{value}`"));
    all.collect::<Vec<_>>().join(", ")
}

fn read(tags: &Tags) -> BTreeMap<String, String> {
    let all = [marks::CLUSTER, marks::CLUSTER_UID, marks::SERVICE, marks::UID];
    all.into_iter().filter_map(|mark| Some((mark.to_owned(), tags.get(&tag(mark))?.clone()))).collect()
}

/// The owner of a public IP; `None` if it is not one of this cluster.
pub(crate) fn owner(cluster: &ClusterId, tags: &Tags) -> Option<Owner> {
    marks::owner(cluster, &read(tags))
}

/// The tag that says that another controller, or another cluster's Steerage, created a public IP.
pub(crate) fn of_others<'a>(cluster: &ClusterId, tags: &'a Tags) -> Option<&'a str> {
    const OTHERS: [&str; 2] = ["k8s-azure-service", "k8s-azure-cluster-name"];
    let is_ours = owner(cluster, tags).is_some();
    let says = |name: &&String| {
        let name = name.to_ascii_lowercase();
        OTHERS.contains(&name.as_str())
            || !is_ours
                && [marks::CLUSTER, marks::CLUSTER_UID, marks::SERVICE, marks::UID].map(tag).contains(&name)
    };
    tags.keys().find(says).map(String::as_str)
}

/// Whether a load balancer is this cluster's.
pub(crate) fn is_balancer(cluster: &ClusterId, tags: &Tags) -> bool {
    let marks = read(tags);
    let own = marks::of_cluster(cluster);
    own.iter().all(|(key, value)| marks.get(key) == Some(value))
        && marks::ownership(cluster, &marks) == Ownership::Foreign
}

/// What says whose a part is, in its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark {
    /// The cluster's prefix with a digest of the Service.
    pub(crate) base: String,
    /// The Service's UID without hyphens.
    pub(crate) uid: String,
}

impl Mark {
    pub(crate) fn new(cluster: &ClusterId, owner: &Owner) -> Self {
        let uid = owner.uid.chars().filter(char::is_ascii_alphanumeric).take(32);
        Self { base: base(cluster, &owner.service), uid: uid.collect() }
    }

    /// The name of a part: at most 78 characters.
    pub(crate) fn part(&self, rest: &str) -> String {
        format!("{}_{}_{rest}", self.base, self.uid)
    }

    /// Whether a frontend of the Service with this name has an address of the family.
    pub(crate) fn is_frontend(&self, family: Family, name: &str) -> bool {
        name.starts_with(&self.part(suffix(family)))
    }

    /// Reads the mark in a name of this cluster.
    pub(crate) fn read(cluster: &ClusterId, name: &str) -> Option<Self> {
        let mut parts = name.split('_');
        let (base, uid, _) = (parts.next()?, parts.next()?, parts.next()?);
        base.starts_with(&names::prefix(cluster)).then(|| Self { base: base.to_owned(), uid: uid.to_owned() })
    }

    /// The owner, if the Service is this one.
    pub(crate) fn owner(&self, cluster: &ClusterId, service: &Key) -> Option<Owner> {
        (base(cluster, service) == self.base)
            .then(|| Owner { service: service.clone(), uid: hyphenated(&self.uid) })
    }
}

/// The start of the names of a Service's parts: 32 characters at most, without an underscore.
fn base(cluster: &ClusterId, service: &Key) -> String {
    names::resource(cluster, service, &["azure"])
}

/// A UID as Kubernetes writes it.
fn hyphenated(uid: &str) -> String {
    if uid.len() != 32 || !uid.is_ascii() {
        return uid.to_owned();
    }
    [&uid[..8], &uid[8..12], &uid[12..16], &uid[16..20], &uid[20..]].join("-")
}

pub(crate) fn suffix(family: Family) -> &'static str {
    match family {
        Family::V4 => "v4",
        Family::V6 => "v6",
    }
}

/// The Services in the tags of a load balancer.
pub(crate) fn listed(tags: &Tags) -> BTreeSet<Key> {
    let lists = tags.iter().filter(|(key, _)| key.starts_with(LIST));
    let items = lists.flat_map(|(_, value)| value.split(','));
    items.filter_map(|item| item.split_once('/')).map(|(namespace, name)| Key::new(namespace, name)).collect()
}

/// Whether a namespace has at most half of what the tags of a load balancer take.
pub(crate) fn is_fair(services: &BTreeSet<Key>, namespace: &str) -> bool {
    let of_it = services.iter().filter(|service| service.namespace() == namespace);
    let characters: usize = of_it.map(|service| service.to_string().len() + 1).sum();
    characters <= MOST_LISTS * LONGEST_VALUE / 2
}

/// Writes the Services into the tags of a load balancer. False if there is no room: then nothing changes.
pub(crate) fn list(tags: &mut Tags, services: &BTreeSet<Key>) -> bool {
    let mut lists: Vec<String> = Vec::new();
    for service in services.iter().map(ToString::to_string) {
        match lists.last_mut().filter(|list| list.len() + 1 + service.len() <= LONGEST_VALUE) {
            Some(list) => {
                list.push(',');
                list.push_str(&service);
            }
            None => lists.push(service),
        }
    }
    if lists.len() > MOST_LISTS {
        return false;
    }
    tags.retain(|key, _| !key.starts_with(LIST));
    tags.extend(lists.into_iter().enumerate().map(|(index, list)| (format!("{LIST}{index:02}"), list)));
    true
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const UID: &str = "8e2f5c1a-7d40-4a5e-9b1c-2f6d3e4a5b6c";

    pub(crate) fn cluster() -> ClusterId {
        ClusterId { name: "prod".to_owned(), uid: "c1".to_owned() }
    }

    fn web() -> Owner {
        Owner { service: Key::new("shop", "web"), uid: UID.to_owned() }
    }

    #[test]
    fn name_of_a_part_says_whose_it_is() {
        let longest = Owner { service: Key::new("n".repeat(63), "s".repeat(63)), uid: UID.to_owned() };
        for owner in [web(), longest] {
            let mark = Mark::new(&cluster(), &owner);
            let name = mark.part("tcp-65535-v4");
            assert!(name.len() <= LONGEST_NAME, "{name}");
            let read = Mark::read(&cluster(), &name).unwrap();
            assert_eq!(read, mark);
            assert_eq!(read.owner(&cluster(), &owner.service), Some(owner));
            assert_eq!(read.owner(&cluster(), &Key::new("shop", "other")), None);
        }
        let other = ClusterId { name: "test".to_owned(), ..cluster() };
        assert_eq!(Mark::read(&other, &Mark::new(&cluster(), &web()).part("v4")), None);
        for foreign in ["a1b2", "kubernetes", "st-x", "a_b_c"] {
            assert_eq!(Mark::read(&cluster(), foreign), None, "{foreign}");
        }
    }

    #[test]
    fn tags_say_whose_public_ips_and_load_balancers_are() {
        let tags = of_public_ip(&cluster(), &web());
        assert!(tags.keys().all(|key| !key.contains(['<', '>', '%', '&', '\\', '?', '/'])));
        assert_eq!(owner(&cluster(), &tags), Some(web()));
        let copy = ClusterId { uid: "c2".to_owned(), ..cluster() };
        assert_eq!(owner(&copy, &tags), None);
        let own = of_balancer(&cluster());
        assert!(is_balancer(&cluster(), &own) && !is_balancer(&copy, &own));
        assert!(!is_balancer(&cluster(), &tags) && !is_balancer(&cluster(), &Tags::new()));
    }

    #[test]
    fn lists_of_services_fit_into_tags_or_are_refused() {
        let mut tags = Tags::from([("team".to_owned(), "a".to_owned())]);
        let some: BTreeSet<Key> = (0..300).map(|i| Key::new("shop", format!("service-{i}"))).collect();
        assert!(list(&mut tags, &some));
        assert!(tags.values().all(|value| value.len() <= 256) && tags.len() <= 45);
        assert_eq!(listed(&tags), some);
        let many: BTreeSet<Key> = (0..300).map(|i| Key::new("n".repeat(63), format!("{i:063}"))).collect();
        assert!(!list(&mut tags, &many));
        assert_eq!(listed(&tags), some);
        assert!(!is_fair(&many, &"n".repeat(63)) && is_fair(&many, "shop") && is_fair(&some, "shop"));
        assert!(list(&mut tags, &BTreeSet::new()));
        assert_eq!(tags.len(), 1);
    }
}
