// SPDX-License-Identifier: Apache-2.0
//! Names of resources in a cloud. Pure and stable: a changed name would orphan the old resource.
//!
//! A name only tells where to look. The [marks](crate::marks) tell who owns a resource.

use sha2::{Digest as _, Sha256};
use steerage_model::Key;

use crate::ClusterId;

/// Characters of the Service's name in a resource name, for people.
const SHOWN: usize = 7;
/// Characters of the digest: 75 bits.
const DIGEST: usize = 15;

/// The prefix of all names of a cluster: 9 characters. Names do not depend on the cluster's UID, so that a restored cluster finds
/// its resources after their hand-over.
pub fn prefix(cluster: &ClusterId) -> String {
    format!("st-{}-", &digest(&[&cluster.name])[..5])
}

/// The name of a resource of a Service: at most 32 letters, digits and hyphens, which every cloud accepts. No hyphen is first, last or
/// next to another. `parts` say which of the Service's resources it is; what cannot change in place belongs to them.
pub fn resource(cluster: &ClusterId, service: &Key, parts: &[&str]) -> String {
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
pub fn digest(parts: &[&str]) -> String {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cluster(name: &str) -> ClusterId {
        ClusterId { name: name.to_owned(), uid: "cluster-1".to_owned() }
    }

    proptest! {
        #[test]
        fn every_name_is_one_that_all_clouds_take(name in ".{1,40}", namespace in "[a-z0-9-]{1,63}", service in ".{0,63}") {
            let cluster = cluster(&name);
            let name = resource(&cluster, &Key::new(namespace, service), &["target-group", "TCP_UDP", "32767"]);
            prop_assert!(name.len() <= 32, "{name}");
            prop_assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{name}");
            prop_assert!(!name.contains("--") && !name.ends_with('-'), "{name}");
            prop_assert!(name.starts_with(&prefix(&cluster)), "{name}");
        }
    }

    #[test]
    fn name_depends_on_cluster_service_and_parts_and_on_nothing_else() {
        let (a, b) = (Key::new("a", "web"), Key::new("b", "web"));
        let mut names = vec![
            resource(&cluster("c"), &a, &["x", "1"]),
            resource(&cluster("d"), &a, &["x", "1"]),
            resource(&cluster("c"), &b, &["x", "1"]),
            resource(&cluster("c"), &a, &["x1"]),
            resource(&cluster("c"), &a, &["x"]),
        ];
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 5);
        let copy = ClusterId { uid: "cluster-2".to_owned(), ..cluster("c") };
        assert_eq!(resource(&copy, &a, &["x"]), resource(&cluster("c"), &a, &["x"]));
    }
}
