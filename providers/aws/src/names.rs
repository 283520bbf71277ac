// SPDX-License-Identifier: Apache-2.0
//! Names and tags of AWS resources. Pure and stable: a changed name would orphan the old resource.
//!
//! A name only tells where to look. The tags tell who owns a resource.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};
use steerage_model::Key;
use steerage_provider_api::{Owner, PodPort};

use crate::config::{ClusterId, Config};

/// Tag: the cluster's name.
pub(crate) const CLUSTER_TAG: &str = "steerage.dev/cluster";
/// Tag: the cluster's UID.
pub(crate) const CLUSTER_UID_TAG: &str = "steerage.dev/cluster-uid";
/// Tag: `namespace/name` of the Service.
pub(crate) const SERVICE_TAG: &str = "steerage.dev/service";
/// Tag: the Service's UID.
pub(crate) const UID_TAG: &str = "steerage.dev/uid";
/// Tag: the name of a shared load balancer, on the load balancer and on what its Services have there.
pub(crate) const SHARED_TAG: &str = "steerage.dev/shared-load-balancer";

/// Characters of the Service's name in a resource name, for people.
const SHOWN: usize = 7;
/// Characters of the digest: 75 bits.
const DIGEST: usize = 15;

/// The prefix of all names of a cluster: 9 characters. Names do not depend on the cluster's UID, so that a restored cluster finds
/// its resources after their hand-over.
pub(crate) fn prefix(cluster: &ClusterId) -> String {
    format!("st-{}-", &digest(&[&cluster.name])[..5])
}

/// The name of a Service's load balancer. It does not depend on the UID, so a re-created Service finds the resources of its
/// predecessor.
pub(crate) fn load_balancer(cluster: &ClusterId, service: &Key) -> String {
    name(cluster, service, &["load-balancer"])
}

/// The name of the load balancer that several Services share under this name.
pub(crate) fn shared_load_balancer(cluster: &ClusterId, shared: &str) -> String {
    // No Service has an empty namespace.
    name(cluster, &Key::new("", shared), &["shared-load-balancer"])
}

/// The name of an owner's security group. It depends on the UID: AWS releases the predecessor's only minutes after its load balancer.
pub(crate) fn security_group(cluster: &ClusterId, owner: &Owner) -> String {
    name(cluster, &owner.service, &["security-group", &owner.uid])
}

/// The name of a Service's target group. It depends on everything that cannot change in place: protocol, node port and VPC.
pub(crate) fn target_group(
    cluster: &ClusterId,
    service: &Key,
    protocol: &str,
    node_port: u16,
    vpc: &str,
) -> String {
    name(cluster, service, &["target-group", protocol, &node_port.to_string(), vpc])
}

/// The name of a Service's target group of pods on this port. It depends on everything that cannot change in place.
pub(crate) fn pod_group(config: &Config, service: &Key, protocol: &str, port: &PodPort) -> String {
    let port = match port {
        PodPort::Number(number) => number.to_string(),
        PodPort::Name(name, of) => format!("{name}/{of}"),
    };
    name(&config.cluster, service, &["pod-target-group", protocol, &port, &config.vpc])
}

/// At most 32 letters, digits and hyphens. No hyphen is first, last or next to another.
fn name(cluster: &ClusterId, service: &Key, parts: &[&str]) -> String {
    let mut shown = String::new();
    for c in service.name().chars().take(SHOWN) {
        if c.is_ascii_alphanumeric() {
            shown.push(c);
        } else if !shown.ends_with('-') && !shown.is_empty() {
            shown.push('-');
        }
    }
    let whole: Vec<&str> = [cluster.name.as_str(), service.namespace(), service.name()]
        .into_iter()
        .chain(parts.iter().copied())
        .collect();
    let hash = &digest(&whole)[..DIGEST];
    match shown.trim_end_matches('-') {
        "" => format!("{}{hash}", prefix(cluster)),
        shown => format!("{}{shown}-{hash}", prefix(cluster)),
    }
}

/// 16 characters of base 32: the first 80 bits of SHA-256 over the parts. Nobody can choose the name of a Service so that another's
/// resources get the same names.
pub(crate) fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    let hash = hash.finalize();
    let mut bits = hash.iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1));
    let letters = b"abcdefghijklmnopqrstuvwxyz234567";
    let letter = |_| {
        let index = bits.by_ref().take(5).fold(0, |index, bit| index << 1 | usize::from(bit));
        letters.get(index).map(|letter| char::from(*letter))
    };
    (0..16).filter_map(letter).collect()
}

/// The tags that mark a resource as the cluster's.
pub(crate) fn cluster_tags(cluster: &ClusterId) -> BTreeMap<String, String> {
    [(CLUSTER_TAG, &cluster.name), (CLUSTER_UID_TAG, &cluster.uid)]
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .into()
}

/// The tags that mark a resource as the owner's.
pub(crate) fn tags(cluster: &ClusterId, owner: &Owner) -> BTreeMap<String, String> {
    let mut tags = cluster_tags(cluster);
    tags.insert(SERVICE_TAG.to_owned(), owner.service.to_string());
    tags.insert(UID_TAG.to_owned(), owner.uid.clone());
    tags
}

/// The tags that mark a load balancer as the one that Services share under this name.
pub(crate) fn shared_tags(cluster: &ClusterId, shared: &str) -> BTreeMap<String, String> {
    let mut tags = cluster_tags(cluster);
    tags.insert(SHARED_TAG.to_owned(), shared.to_owned());
    tags
}

/// The cluster and Service to which a resource belongs, according to its tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// A Service of this cluster.
    Ours(Owner),
    /// The load balancer that Services of this cluster share under this name.
    Shared(String),
    /// Another cluster with this cluster's name. The UID is absent if someone removed the tag.
    SameName(Option<String>),
    /// Anything else.
    Foreign,
}

/// Reads the tags of a resource.
pub(crate) fn ownership(cluster: &ClusterId, tags: &BTreeMap<String, String>) -> Ownership {
    let get = |key: &str| tags.get(key).map(String::as_str);
    if get(CLUSTER_TAG) != Some(&cluster.name) {
        return Ownership::Foreign;
    }
    let uid = get(CLUSTER_UID_TAG);
    if uid != Some(&cluster.uid) {
        return Ownership::SameName(uid.map(str::to_owned));
    }
    match (get(SERVICE_TAG), get(UID_TAG), get(SHARED_TAG)) {
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

/// The owner according to the tags; `None` if the resource is not this cluster's.
pub(crate) fn owner(cluster: &ClusterId, tags: &BTreeMap<String, String>) -> Option<Owner> {
    match ownership(cluster, tags) {
        Ownership::Ours(owner) => Some(owner),
        Ownership::Shared(_) | Ownership::SameName(_) | Ownership::Foreign => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use steerage_model::Protocol;

    use super::*;

    fn in_vpc(vpc: &str) -> Config {
        let config = crate::desired::tests::config();
        Config { vpc: vpc.to_owned(), cluster: cluster("c"), ..config }
    }

    fn cluster(name: &str) -> ClusterId {
        ClusterId { name: name.to_owned(), uid: "cluster-1".to_owned() }
    }

    proptest! {
        #[test]
        fn every_name_is_one_that_elbv2_takes(name in ".{1,40}", namespace in "[a-z0-9-]{1,63}", service in ".{0,63}") {
            let cluster = cluster(&name);
            let key = Key::new(namespace, service);
            let names =
                [load_balancer(&cluster, &key), target_group(&cluster, &key, "TCP_UDP", 32767, "vpc-0123456789abcdef0")];
            for name in names {
                prop_assert!(name.len() <= 32, "{name}");
                prop_assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{name}");
                prop_assert!(!name.contains("--") && !name.ends_with('-'), "{name}");
                prop_assert!(name.starts_with(&prefix(&cluster)), "{name}");
            }
        }
    }

    #[test]
    fn names_depend_on_every_part() {
        let (a, b) = (Key::new("a", "web"), Key::new("b", "web"));
        let mut names = vec![
            load_balancer(&cluster("c"), &a),
            load_balancer(&cluster("c"), &b),
            load_balancer(&cluster("d"), &a),
            shared_load_balancer(&cluster("c"), "web"),
            shared_load_balancer(&cluster("c"), "other"),
            target_group(&cluster("c"), &a, "TCP", 30080, "vpc-1"),
            target_group(&cluster("c"), &a, "UDP", 30080, "vpc-1"),
            target_group(&cluster("c"), &a, "TCP", 30081, "vpc-1"),
            target_group(&cluster("c"), &a, "TCP", 30080, "vpc-2"),
            pod_group(&in_vpc("vpc-1"), &a, "TCP", &PodPort::Number(30080)),
            pod_group(&in_vpc("vpc-2"), &a, "TCP", &PodPort::Number(30080)),
            pod_group(&in_vpc("vpc-1"), &a, "UDP", &PodPort::Number(30080)),
            pod_group(&in_vpc("vpc-1"), &a, "TCP", &PodPort::Name("30080".to_owned(), Protocol::Tcp)),
            pod_group(&in_vpc("vpc-1"), &a, "TCP", &PodPort::Name("30080".to_owned(), Protocol::Udp)),
            pod_group(&in_vpc("vpc-1"), &b, "TCP", &PodPort::Number(30080)),
        ];
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 15);
    }

    #[test]
    fn names_never_change_between_versions() {
        assert_eq!(load_balancer(&cluster("prod"), &Key::new("shop", "web")), "st-md5by-web-2fgth2ybw44vzj5");
    }

    #[test]
    fn owner_needs_all_tags() {
        let owned = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let tags = tags(&cluster("prod"), &owned);
        assert_eq!(owner(&cluster("prod"), &tags), Some(owned));
        assert_eq!(ownership(&cluster("test"), &tags), Ownership::Foreign);
        for key in tags.keys() {
            let mut less = tags.clone();
            less.remove(key);
            assert_eq!(owner(&cluster("prod"), &less), None, "without {key}");
        }
    }

    #[test]
    fn shared_load_balancer_is_no_services() {
        let tags = shared_tags(&cluster("prod"), "web");
        assert_eq!(ownership(&cluster("prod"), &tags), Ownership::Shared("web".to_owned()));
        assert_eq!(owner(&cluster("prod"), &tags), None);
        assert_eq!(ownership(&cluster("test"), &tags), Ownership::Foreign);
        let mut member =
            super::tags(&cluster("prod"), &Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() });
        member.insert(SHARED_TAG.to_owned(), "web".to_owned());
        assert!(matches!(ownership(&cluster("prod"), &member), Ownership::Ours(_)));
        member.remove(UID_TAG);
        assert_eq!(ownership(&cluster("prod"), &member), Ownership::Foreign, "half of a Service's tags");
    }

    #[test]
    fn copy_of_a_cluster_owns_nothing_of_the_original() {
        let owned = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let mut tags = tags(&cluster("prod"), &owned);
        let copy = ClusterId { uid: "cluster-2".to_owned(), ..cluster("prod") };
        assert_eq!(ownership(&copy, &tags), Ownership::SameName(Some("cluster-1".to_owned())));
        tags.remove(CLUSTER_UID_TAG);
        assert_eq!(ownership(&copy, &tags), Ownership::SameName(None));
        assert_eq!(load_balancer(&copy, &owned.service), load_balancer(&cluster("prod"), &owned.service));
    }
}
