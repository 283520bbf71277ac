// SPDX-License-Identifier: Apache-2.0
//! Which subnets of the VPC a new load balancer gets where no IDs are given: those of a name, or those that tags offer. Pure.
//!
//! The tags are those that the AWS Load Balancer Controller, eksctl and kops use.

use std::collections::BTreeMap;

use steerage_model::shown;
use steerage_provider_api::Error;

use crate::annotations::SUBNETS;
use crate::client::Tags;
use crate::config::Scheme;
use crate::reasons;

/// Tag: the name of a subnet or security group, for people.
pub(crate) const NAME_TAG: &str = "Name";
/// Tags that begin with it name the clusters that may use the subnet. Without any, all may.
const CLUSTER_PREFIX: &str = "kubernetes.io/cluster/";
/// AWS needs this many free addresses in a subnet.
const MIN_FREE: u32 = 8;

/// A subnet as EC2 shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subnet {
    pub(crate) id: String,
    /// The availability zone.
    pub(crate) zone: String,
    pub(crate) tags: Tags,
    /// Addresses that are free.
    pub(crate) free: u32,
    /// Whether it has an IPv6 range.
    pub(crate) has_ipv6: bool,
    /// Whether it is on an Outpost, where no network load balancer is.
    pub(crate) is_on_outpost: bool,
}

/// The tag of subnets for load balancers of this scheme.
fn role_tag(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::InternetFacing => "kubernetes.io/role/elb",
        Scheme::Internal => "kubernetes.io/role/internal-elb",
    }
}

/// The IDs for a list of IDs and names, in its order.
pub(crate) fn named(all: &[Subnet], vpc: &str, names: &[String]) -> Result<Vec<String>, Error> {
    let of_name = |name: &String| {
        if name.starts_with("subnet-") {
            return Ok(name.clone());
        }
        let mut found = all.iter().filter(|subnet| subnet.tags.get(NAME_TAG) == Some(name));
        let shown = shown(name);
        let problem = match (found.next(), found.next()) {
            (Some(subnet), None) => return Ok(subnet.id.clone()),
            (Some(one), Some(other)) => {
                format!("{} and {} of {vpc} both have the tag {NAME_TAG}=`{shown}`", one.id, other.id)
            }
            (None, _) => format!("no subnet of {vpc} has the tag {NAME_TAG}=`{shown}`"),
        };
        let message = format!(
            "Annotation {SUBNETS} names `{shown}`, but {problem}. No load balancer is created or changed. Use the name of one subnet, or \
             its ID."
        );
        Err(Error::invalid(reasons::SUBNETS_NOT_FOUND, message))
    };
    let ids = names.iter().map(of_name).collect::<Result<Vec<String>, Error>>()?;
    match ids.iter().enumerate().find(|(at, id)| ids[..*at].contains(id)) {
        None => Ok(ids),
        Some((_, id)) => {
            let message = format!(
                "Annotation {SUBNETS} names the subnet {id} twice. No load balancer is created or changed. Keep one."
            );
            Err(Error::invalid(reasons::INVALID_ANNOTATION, message))
        }
    }
}

/// Whether a subnet may be used by the cluster; `Some(true)` if its tags name the cluster.
fn is_for(subnet: &Subnet, cluster: &str) -> Option<bool> {
    let mut clusters = subnet.tags.keys().filter_map(|key| key.strip_prefix(CLUSTER_PREFIX)).peekable();
    if clusters.peek().is_none() {
        return Some(false);
    }
    clusters.any(|name| name == cluster).then_some(true)
}

/// The IDs of the subnets that tags offer for load balancers of this scheme: one for each zone, in the order of the zones. Of several in
/// a zone, one with IPv6 comes first if the load balancer `has_ipv6`, then one whose tags name the cluster, and then the one with the
/// lowest ID.
pub(crate) fn offered(
    all: &[Subnet],
    vpc: &str,
    (scheme, has_ipv6): (Scheme, bool),
    cluster: &str,
) -> Result<Vec<String>, Error> {
    let role = role_tag(scheme);
    let has_role =
        |subnet: &&Subnet| subnet.tags.get(role).is_some_and(|value| matches!(value.as_str(), "" | "1"));
    let mut chosen: BTreeMap<&str, (bool, bool, &str)> = BTreeMap::new();
    let mut without_room = Vec::new();
    for subnet in all.iter().filter(has_role).filter(|subnet| !subnet.is_on_outpost) {
        let Some(names_cluster) = is_for(subnet, cluster) else { continue };
        if subnet.free < MIN_FREE {
            without_room.push(subnet.id.as_str());
            continue;
        }
        let offer = (has_ipv6 && !subnet.has_ipv6, !names_cluster, subnet.id.as_str());
        let best = chosen.entry(&subnet.zone).or_insert(offer);
        *best = offer.min(*best);
    }
    if chosen.is_empty() {
        let why = if without_room.is_empty() {
            format!(
                "No subnet of {vpc} has the tag {role} with the value 1, and is free for the cluster {cluster}"
            )
        } else {
            format!(
                "The subnets of {vpc} with the tag {role} have fewer than {MIN_FREE} free addresses: {}",
                without_room.join(", ")
            )
        };
        let message = format!(
            "{why}. No load balancer is created. Tag one subnet in each zone that has nodes, or name subnets by annotation {SUBNETS} or \
             by --aws-subnets."
        );
        return Err(Error::invalid(reasons::SUBNETS_NOT_FOUND, message));
    }
    Ok(chosen.into_values().map(|(_, _, id)| id.to_owned()).collect())
}

/// Those of the subnets with these IDs that have no IPv6 range. Unknown ones may have one.
pub(crate) fn without_ipv6<'a>(all: &[Subnet], ids: impl Iterator<Item = &'a String>) -> Vec<&'a String> {
    let lacks = |id: &&String| all.iter().any(|subnet| subnet.id == **id && !subnet.has_ipv6);
    ids.filter(lacks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERNAL: &str = "kubernetes.io/role/internal-elb";

    fn subnet(id: &str, zone: &str, tags: &[(&str, &str)]) -> Subnet {
        let tags = tags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let (id, zone) = (id.to_owned(), zone.to_owned());
        Subnet { id, zone, tags, free: 200, has_ipv6: false, is_on_outpost: false }
    }

    fn find(all: &[Subnet], scheme: Scheme) -> Result<Vec<String>, String> {
        offered(all, "vpc-1", (scheme, false), "prod").map_err(|error| {
            assert_eq!(error.reason(), "SubnetsNotFound");
            error.to_string()
        })
    }

    #[test]
    fn one_subnet_of_each_zone_is_chosen_by_scheme_and_cluster() {
        let all = [
            subnet("subnet-4", "b", &[(INTERNAL, "1")]),
            subnet("subnet-2", "a", &[(INTERNAL, "1")]),
            subnet("subnet-3", "a", &[(INTERNAL, ""), ("kubernetes.io/cluster/prod", "shared")]),
            subnet("subnet-1", "a", &[(INTERNAL, "1"), ("kubernetes.io/cluster/other", "owned")]),
            subnet("subnet-0", "b", &[(INTERNAL, "0")]),
            subnet("subnet-5", "b", &[("kubernetes.io/role/elb", "1")]),
            Subnet { is_on_outpost: true, ..subnet("subnet-6", "c", &[(INTERNAL, "1")]) },
        ];
        assert_eq!(find(&all, Scheme::Internal).unwrap(), ["subnet-3", "subnet-4"]);
        assert_eq!(find(&all, Scheme::InternetFacing).unwrap(), ["subnet-5"]);
    }

    #[test]
    fn subnets_with_ipv6_come_first_for_load_balancers_that_have_it() {
        let with_v6 = |subnet: Subnet| Subnet { has_ipv6: true, ..subnet };
        let all = [
            subnet("subnet-1", "a", &[(INTERNAL, "1"), ("kubernetes.io/cluster/prod", "shared")]),
            with_v6(subnet("subnet-2", "a", &[(INTERNAL, "1")])),
            with_v6(subnet("subnet-3", "a", &[(INTERNAL, "0")])),
            subnet("subnet-4", "b", &[(INTERNAL, "1")]),
        ];
        for (has_ipv6, chosen, lacking) in [
            (false, ["subnet-1", "subnet-4"], &["subnet-1", "subnet-4"][..]),
            (true, ["subnet-2", "subnet-4"], &["subnet-4"]),
        ] {
            let found = offered(&all, "vpc-1", (Scheme::Internal, has_ipv6), "prod").unwrap();
            assert_eq!(found, chosen);
            assert_eq!(without_ipv6(&all, found.iter()), lacking);
        }
        let unknown = "subnet-9".to_owned();
        assert!(without_ipv6(&all, [&unknown].into_iter()).is_empty());
    }

    #[test]
    fn subnets_without_room_are_left_out_and_named() {
        let full = Subnet { free: 7, ..subnet("subnet-1", "a", &[(INTERNAL, "1")]) };
        let free = subnet("subnet-2", "a", &[(INTERNAL, "1")]);
        assert_eq!(find(&[full.clone(), free], Scheme::Internal).unwrap(), ["subnet-2"]);
        let message = find(&[full], Scheme::Internal).unwrap_err();
        assert!(message.contains("subnet-1") && message.contains("free addresses"), "{message}");
        let message = find(&[], Scheme::InternetFacing).unwrap_err();
        assert!(message.contains("kubernetes.io/role/elb") && message.contains("vpc-1"), "{message}");
    }

    #[test]
    fn names_must_be_those_of_one_subnet() {
        let all = [
            subnet("subnet-1", "a", &[(NAME_TAG, "private-a")]),
            subnet("subnet-2", "b", &[(NAME_TAG, "private-b")]),
            subnet("subnet-3", "c", &[(NAME_TAG, "private-b")]),
        ];
        let find = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            named(&all, "vpc-1", &names).map_err(|error| (error.reason(), error.to_string()))
        };
        assert_eq!(find(&["subnet-9", "private-a"]).unwrap(), ["subnet-9", "subnet-1"]);
        for (names, reason, part) in [
            (&["private-b"][..], "SubnetsNotFound", "subnet-2 and subnet-3"),
            (&["private-c"], "SubnetsNotFound", "`private-c`"),
            (&["subnet-1", "private-a"], "InvalidAnnotation", "subnet-1 twice"),
        ] {
            let (found, message) = find(names).unwrap_err();
            assert!(found == reason && message.contains(part), "{found}: {message}");
        }
    }
}
