// SPDX-License-Identifier: Apache-2.0
//! The marks that say whose a resource in a cloud is, as pairs of key and value. Each provider writes them as its cloud can: as tags,
//! labels, or in a description. Pure.

use std::collections::BTreeMap;

use steerage_model::Key;
use steerage_provider_api::Owner;

/// Mark: the cluster's name.
pub const CLUSTER: &str = "steerage.dev/cluster";
/// Mark: the cluster's UID.
pub const CLUSTER_UID: &str = "steerage.dev/cluster-uid";
/// Mark: `namespace/name` of the Service.
pub const SERVICE: &str = "steerage.dev/service";
/// Mark: the Service's UID.
pub const UID: &str = "steerage.dev/uid";
/// Mark: the name of a shared load balancer, on the load balancer and on what its Services have there.
pub const SHARED: &str = "steerage.dev/shared-load-balancer";

/// A cluster, as the marks of its resources name it. Clusters with the same name, such as a copy, differ in the UID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterId {
    /// The name that the operator gave; names of resources depend on it.
    pub name: String,
    /// UID of the namespace `kube-system`. It never changes.
    pub uid: String,
}

/// The marks of a resource as the cluster's.
pub fn of_cluster(cluster: &ClusterId) -> BTreeMap<String, String> {
    [(CLUSTER, &cluster.name), (CLUSTER_UID, &cluster.uid)]
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .into()
}

/// The marks of a resource as the owner's.
pub fn of_owner(cluster: &ClusterId, owner: &Owner) -> BTreeMap<String, String> {
    let mut marks = of_cluster(cluster);
    marks.insert(SERVICE.to_owned(), owner.service.to_string());
    marks.insert(UID.to_owned(), owner.uid.clone());
    marks
}

/// The marks of a load balancer as the one that Services share under this name.
pub fn of_shared(cluster: &ClusterId, shared: &str) -> BTreeMap<String, String> {
    let mut marks = of_cluster(cluster);
    marks.insert(SHARED.to_owned(), shared.to_owned());
    marks
}

/// The cluster and Service to which a resource belongs, according to its marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// A Service of this cluster.
    Ours(Owner),
    /// The load balancer that Services of this cluster share under this name.
    Shared(String),
    /// Another cluster with this cluster's name. The UID is absent if someone removed the mark.
    SameName(Option<String>),
    /// Anything else.
    Foreign,
}

/// Reads the marks of a resource.
pub fn ownership(cluster: &ClusterId, marks: &BTreeMap<String, String>) -> Ownership {
    let get = |key: &str| marks.get(key).map(String::as_str);
    if get(CLUSTER) != Some(&cluster.name) {
        return Ownership::Foreign;
    }
    let uid = get(CLUSTER_UID);
    if uid != Some(&cluster.uid) {
        return Ownership::SameName(uid.map(str::to_owned));
    }
    match (get(SERVICE), get(UID), get(SHARED)) {
        (Some(service), Some(uid), _) => match service.split_once('/') {
            Some((namespace, name)) => {
                Ownership::Ours(Owner { service: Key::new(namespace, name), uid: uid.to_owned() })
            }
            None => Ownership::Foreign,
        },
        (None, None, Some(shared)) => Ownership::Shared(shared.to_owned()),
        _ => Ownership::Foreign,
    }
}

/// The marks that a resource of this owner has lost, if those that are left still say whose it is: the UIDs of the cluster and of the
/// owner, which nobody else has. `None` if none is lost, if one of the two is, or if another mark differs.
pub fn lost(
    cluster: &ClusterId,
    owner: &Owner,
    marks: &BTreeMap<String, String>,
) -> Option<BTreeMap<String, String>> {
    let mut wanted = of_owner(cluster, owner);
    let has = |key: &str| marks.get(key).is_some_and(|found| wanted.get(key) == Some(found));
    if !has(CLUSTER_UID) || !has(UID) || wanted.keys().any(|key| marks.contains_key(key) && !has(key)) {
        return None;
    }
    wanted.retain(|key, _| !marks.contains_key(key));
    (!wanted.is_empty()).then_some(wanted)
}

/// Whether the resource is surely this owner's, also if it has lost a mark.
pub fn is_of(cluster: &ClusterId, owner: &Owner, marks: &BTreeMap<String, String>) -> bool {
    ownership(cluster, marks) == Ownership::Ours(owner.clone()) || lost(cluster, owner, marks).is_some()
}

/// The same of a load balancer: one that Services share is no single Service's, whatever marks somebody added.
pub fn is_balancer_of(cluster: &ClusterId, owner: &Owner, marks: &BTreeMap<String, String>) -> bool {
    !marks.contains_key(SHARED) && is_of(cluster, owner, marks)
}

/// Those of the wanted marks that a resource lacks, for users: each key with its value, and what is there instead.
pub fn missing_text(wanted: &BTreeMap<String, String>, marks: &BTreeMap<String, String>) -> String {
    let missing = wanted.iter().filter(|(key, value)| marks.get(*key) != Some(value));
    let texts = missing.map(|(key, value)| {
        let found = marks.get(key).map_or("missing".to_owned(), |found| format!("`{found}`"));
        format!("{key} with the value `{value}` (it is {found})")
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// The owner according to the marks; `None` if the resource is not this cluster's.
pub fn owner(cluster: &ClusterId, marks: &BTreeMap<String, String>) -> Option<Owner> {
    match ownership(cluster, marks) {
        Ownership::Ours(owner) => Some(owner),
        Ownership::Shared(_) | Ownership::SameName(_) | Ownership::Foreign => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(name: &str) -> ClusterId {
        ClusterId { name: name.to_owned(), uid: "cluster-1".to_owned() }
    }

    fn web() -> Owner {
        Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() }
    }

    #[test]
    fn owner_needs_all_marks() {
        let marks = of_owner(&cluster("prod"), &web());
        assert_eq!(owner(&cluster("prod"), &marks), Some(web()));
        assert_eq!(ownership(&cluster("test"), &marks), Ownership::Foreign);
        for key in marks.keys() {
            let mut less = marks.clone();
            less.remove(key);
            assert_eq!(owner(&cluster("prod"), &less), None, "without {key}");
        }
    }

    #[test]
    fn uids_say_whose_a_resource_is_that_lost_another_mark() {
        let (prod, all) = (cluster("prod"), of_owner(&cluster("prod"), &web()));
        assert!(is_of(&prod, &web(), &all) && lost(&prod, &web(), &all).is_none());
        for key in all.keys() {
            let mut less = all.clone();
            let value = less.remove(key).unwrap();
            let is_sure = ![CLUSTER_UID, UID].contains(&key.as_str());
            let expected = is_sure.then(|| BTreeMap::from([(key.clone(), value)]));
            assert_eq!(lost(&prod, &web(), &less), expected, "without {key}");
            assert_eq!(is_of(&prod, &web(), &less), is_sure);
            less.insert(key.clone(), "other".to_owned());
            assert_eq!(lost(&prod, &web(), &less), None, "another {key}");
        }
        let mut less = all.clone();
        less.remove(SERVICE);
        assert_eq!(lost(&prod, &Owner { uid: "u2".to_owned(), ..web() }, &less), None);
        less.insert(UID.to_owned(), "u0".to_owned());
        assert_eq!(
            missing_text(&of_owner(&prod, &web()), &less),
            "steerage.dev/service with the value `shop/web` (it is missing), steerage.dev/uid with the value `u1` (it is `u0`)"
        );
    }

    #[test]
    fn shared_load_balancer_is_no_services() {
        let marks = of_shared(&cluster("prod"), "web");
        assert_eq!(ownership(&cluster("prod"), &marks), Ownership::Shared("web".to_owned()));
        assert_eq!(owner(&cluster("prod"), &marks), None);
        assert_eq!(ownership(&cluster("test"), &marks), Ownership::Foreign);
        let mut member = of_owner(&cluster("prod"), &web());
        member.insert(SHARED.to_owned(), "web".to_owned());
        assert!(matches!(ownership(&cluster("prod"), &member), Ownership::Ours(_)));
        assert!(
            is_of(&cluster("prod"), &web(), &member) && !is_balancer_of(&cluster("prod"), &web(), &member)
        );
        member.remove(UID);
        assert_eq!(ownership(&cluster("prod"), &member), Ownership::Foreign, "half of a Service's marks");
    }

    #[test]
    fn copy_of_a_cluster_owns_nothing_of_the_original() {
        let mut marks = of_owner(&cluster("prod"), &web());
        let copy = ClusterId { uid: "cluster-2".to_owned(), ..cluster("prod") };
        assert_eq!(ownership(&copy, &marks), Ownership::SameName(Some("cluster-1".to_owned())));
        marks.remove(CLUSTER_UID);
        assert_eq!(ownership(&copy, &marks), Ownership::SameName(None));
    }
}
