// SPDX-License-Identifier: Apache-2.0
//! Names and tags of AWS resources. Pure and stable: a changed name would orphan the old resource.
//!
//! A name only tells where to look. The tags tell who owns a resource.

use std::collections::BTreeMap;

use steerage_model::Key;
use steerage_provider_api::Owner;

/// Tag: the cluster's name.
pub(crate) const CLUSTER_TAG: &str = "steerage.dev/cluster";
/// Tag: `namespace/name` of the Service.
pub(crate) const SERVICE_TAG: &str = "steerage.dev/service";
/// Tag: the Service's UID.
pub(crate) const UID_TAG: &str = "steerage.dev/uid";

/// Characters of the Service's name in a resource name, for people.
const SHOWN: usize = 12;

/// The prefix of all names of a cluster: 9 characters.
pub(crate) fn prefix(cluster: &str) -> String {
    format!("st-{}-", &digest(&[cluster])[..5])
}

/// The name of a Service's load balancer. It does not depend on the UID, so a re-created Service finds the resources of its
/// predecessor.
pub(crate) fn load_balancer(cluster: &str, service: &Key) -> String {
    name(cluster, service, &["load-balancer"])
}

/// The name of a Service's target group. It depends on everything that cannot change in place: protocol, node port and VPC.
pub(crate) fn target_group(
    cluster: &str,
    service: &Key,
    protocol: &str,
    node_port: u16,
    vpc: &str,
) -> String {
    name(cluster, service, &["target-group", protocol, &node_port.to_string(), vpc])
}

/// At most 32 letters, digits and hyphens. No hyphen is first, last or next to another.
fn name(cluster: &str, service: &Key, parts: &[&str]) -> String {
    let mut shown = String::new();
    for c in service.name().chars().take(SHOWN) {
        if c.is_ascii_alphanumeric() {
            shown.push(c);
        } else if !shown.ends_with('-') && !shown.is_empty() {
            shown.push('-');
        }
    }
    let whole: Vec<&str> =
        [cluster, service.namespace(), service.name()].into_iter().chain(parts.iter().copied()).collect();
    let hash = &digest(&whole)[..10];
    match shown.trim_end_matches('-') {
        "" => format!("{}{hash}", prefix(cluster)),
        shown => format!("{}{shown}-{hash}", prefix(cluster)),
    }
}

/// 12 characters of base 32 from 64 bits of FNV-1a over the parts. A final mix makes every character depend on every bit.
fn digest(parts: &[&str]) -> String {
    let bytes = parts.iter().flat_map(|p| p.bytes().chain([0]));
    let mut hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    let letters = b"abcdefghijklmnopqrstuvwxyz234567";
    (0..12)
        .filter_map(|i| letters.get(usize::try_from((hash >> (5 * i)) & 31).ok()?))
        .map(|l| char::from(*l))
        .collect()
}

/// The tags that mark a resource as the owner's.
pub(crate) fn tags(cluster: &str, owner: &Owner) -> BTreeMap<String, String> {
    [
        (CLUSTER_TAG, cluster.to_owned()),
        (SERVICE_TAG, owner.service.to_string()),
        (UID_TAG, owner.uid.clone()),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .into()
}

/// The owner according to the tags; `None` if the resource is not this cluster's.
pub(crate) fn owner(cluster: &str, tags: &BTreeMap<String, String>) -> Option<Owner> {
    if tags.get(CLUSTER_TAG)? != cluster {
        return None;
    }
    let (namespace, name) = tags.get(SERVICE_TAG)?.split_once('/')?;
    Some(Owner { service: Key::new(namespace, name), uid: tags.get(UID_TAG)?.clone() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_name_is_one_that_elbv2_takes(cluster in ".{1,40}", namespace in "[a-z0-9-]{1,63}", service in ".{0,63}") {
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
            load_balancer("c", &a),
            load_balancer("c", &b),
            load_balancer("d", &a),
            target_group("c", &a, "TCP", 30080, "vpc-1"),
            target_group("c", &a, "UDP", 30080, "vpc-1"),
            target_group("c", &a, "TCP", 30081, "vpc-1"),
            target_group("c", &a, "TCP", 30080, "vpc-2"),
        ];
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 7);
    }

    #[test]
    fn names_never_change_between_versions() {
        assert_eq!(load_balancer("prod", &Key::new("shop", "web")), "st-4bs33-web-eubxlamuit");
    }

    #[test]
    fn owner_needs_all_tags() {
        let owner_of = |cluster: &str, tags: &BTreeMap<String, String>| owner(cluster, tags);
        let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let tags = tags("prod", &owner);
        assert_eq!(owner_of("prod", &tags), Some(owner));
        assert_eq!(owner_of("test", &tags), None);
        for key in tags.keys() {
            let mut less = tags.clone();
            less.remove(key);
            assert_eq!(owner_of("prod", &less), None, "without {key}");
        }
    }
}
