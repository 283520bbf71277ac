// SPDX-License-Identifier: Apache-2.0
//! Whose a resource is. Octavia's objects have tags, which are written with them. Neutron takes tags of a floating IP only in a second
//! request, so a floating IP has its marks in its description. Pure.

use std::collections::BTreeMap;

use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_cloud::ClusterId;
use steerage_provider_cloud::marks;

use crate::types::Balancer;

/// Tag of a pool: the node port of its members, for a pool that has none.
const NODE_PORT: &str = "steerage.dev/node-port";
/// Tag of a pool: the port on which its members are checked.
const CHECK_PORT: &str = "steerage.dev/check-port";
/// A floating IP's description begins with it.
const FLOATING: &str = "steerage.dev: ";
/// That of one which was Steerage's until its Service requested it.
const REQUESTED: &str = "Requested by the Kubernetes Service ";
/// That of one which the operator reserves.
const RESERVED: &str = "Reserved for the Kubernetes namespace ";

fn tag(key: &str, value: &str) -> String {
    format!("{key}={value}")
}

/// The tags of a Service's load balancer.
pub(crate) fn of_balancer(cluster: &ClusterId, owner: &Owner) -> Vec<String> {
    marks::of_owner(cluster, owner).iter().map(|(key, value)| tag(key, value)).collect()
}

/// The tags of a load balancer that Services share under this name.
pub(crate) fn of_shared(cluster: &ClusterId, shared: &str) -> Vec<String> {
    marks::of_shared(cluster, shared).iter().map(|(key, value)| tag(key, value)).collect()
}

/// The same, for a list's filter; without a name, those of everything of the cluster.
pub(crate) fn shared_filter(cluster: &ClusterId, shared: Option<&str>) -> String {
    let mut tags = vec![tag(marks::CLUSTER_UID, &cluster.uid)];
    tags.extend(shared.map(|shared| tag(marks::SHARED, shared)));
    tags.join(",")
}

/// The name under which Services share a load balancer, if it is this cluster's.
pub(crate) fn shared_name(cluster: &ClusterId, tags: &[String]) -> Option<String> {
    match marks::ownership(cluster, &pairs(tags)) {
        marks::Ownership::Shared(name) => Some(name),
        _ => None,
    }
}

/// The Service of this cluster that a listener or pool of a shared load balancer is of.
pub(crate) fn part_owner(cluster: &ClusterId, tags: &[String]) -> Option<Owner> {
    marks::owner(cluster, &pairs(tags))
}

/// Whether a load balancer of the owner's own has lost tags, and those that are left still say whose it is.
pub(crate) fn has_lost_tags(cluster: &ClusterId, owner: &Owner, tags: &[String]) -> bool {
    let pairs = pairs(tags);
    marks::lost(cluster, owner, &pairs).is_some() && marks::is_balancer_of(cluster, owner, &pairs)
}

/// Whether a tag is missing that says whose a load balancer is, and none says that it is another one's.
pub(crate) fn is_missing_owner_tags(cluster: &ClusterId, owner: &Owner, tags: &[String]) -> bool {
    let (pairs, service) = (pairs(tags), owner.service.to_string());
    let ours = [(marks::CLUSTER_UID, &cluster.uid), (marks::SERVICE, &service), (marks::UID, &owner.uid)];
    let is_another = ours.iter().any(|(key, value)| pairs.get(*key).is_some_and(|found| found != *value));
    let lacks = ours.iter().any(|(key, _)| !pairs.contains_key(*key));
    lacks && !is_another
}

fn pairs(tags: &[String]) -> BTreeMap<String, String> {
    let pairs = tags.iter().filter_map(|tag| tag.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// The tags that all load balancers of a Service have, of whatever incarnation, for a list's filter.
pub(crate) fn filter(cluster: &ClusterId, service: Option<&Key>) -> String {
    let mut tags = vec![tag(marks::CLUSTER_UID, &cluster.uid)];
    tags.extend(service.map(|service| tag(marks::SERVICE, &service.to_string())));
    tags.join(",")
}

/// The tags of a listener and of a health monitor in a load balancer of the Service's own.
pub(crate) fn of_part(owner: &Owner) -> Vec<String> {
    vec![tag(marks::UID, &owner.uid)]
}

/// The tags of a pool. `of_part` are those that all parts have.
pub(crate) fn of_pool(of_part: &[String], ports: PoolPorts) -> Vec<String> {
    let mut tags = of_part.to_vec();
    tags.push(tag(NODE_PORT, &ports.node_port.to_string()));
    tags.extend(ports.check_port.map(|port| tag(CHECK_PORT, &port.to_string())));
    tags
}

/// The ports of members that do not exist yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolPorts {
    pub(crate) node_port: u16,
    pub(crate) check_port: Option<u16>,
}

/// The ports in a pool's tags.
pub(crate) fn pool_ports(tags: &[String]) -> Option<PoolPorts> {
    let get = |key: &str| tags.iter().find_map(|tag| tag.strip_prefix(key)?.strip_prefix('=')?.parse().ok());
    Some(PoolPorts { node_port: get(NODE_PORT)?, check_port: get(CHECK_PORT) })
}

/// Whether a listener, pool or health monitor is the owner's.
pub(crate) fn is_part(tags: &[String], owner: &Owner) -> bool {
    tags.contains(&tag(marks::UID, &owner.uid))
}

/// Whether a listener, pool or health monitor in a shared load balancer is the Service's, of whatever incarnation.
pub(crate) fn is_of_service(tags: &[String], of_balancer: &[String], service: &Key) -> bool {
    let has_cluster = |tag: &String| tag.starts_with(marks::CLUSTER_UID) && of_balancer.contains(tag);
    tags.contains(&tag(marks::SERVICE, &service.to_string())) && tags.iter().any(has_cluster)
}

/// Whether it is another Service's in a shared load balancer.
pub(crate) fn is_of_some_service(tags: &[String], of_balancer: &[String]) -> bool {
    let has_cluster = |tag: &String| tag.starts_with(marks::CLUSTER_UID) && of_balancer.contains(tag);
    tags.iter().any(has_cluster) && tags.iter().any(|tag| tag.starts_with(marks::SERVICE))
}

/// The tags that an object should have: the wanted ones, and those of others. `None` if it has them.
pub(crate) fn merged(present: &[String], wanted: &[String]) -> Option<Vec<String>> {
    let key = |tag: &str| tag.split_once('=').map_or(tag, |(key, _)| key).to_owned();
    let ours: Vec<String> =
        wanted.iter().map(|tag| key(tag)).chain([NODE_PORT, CHECK_PORT].map(str::to_owned)).collect();
    let mut all: Vec<String> = present.iter().filter(|tag| !ours.contains(&key(tag))).cloned().collect();
    all.extend(wanted.iter().cloned());
    let sorted = |tags: &[String]| {
        let mut tags = tags.to_vec();
        tags.sort();
        tags
    };
    (sorted(&all) != sorted(present)).then_some(all)
}

/// The owner of a load balancer, if it is this cluster's.
pub(crate) fn owner(cluster: &ClusterId, balancer: &Balancer) -> Option<Owner> {
    marks::owner(cluster, &pairs(&balancer.tags))
}

/// The description of a floating IP, and of a rule of a security group, that Steerage created for a Service: 246 characters with the longest names, and Neutron takes 255.
pub(crate) fn floating(cluster: &ClusterId, owner: &Owner) -> String {
    format!("{FLOATING}cluster-uid={} service={} uid={}", cluster.uid, owner.service, owner.uid)
}

/// The description of a rule of a security group that all of the cluster's Services share.
pub(crate) fn shared_rule(cluster: &ClusterId) -> String {
    format!("{FLOATING}cluster-uid={}", cluster.uid)
}

/// The description of the floating IP of a shared load balancer.
pub(crate) fn shared_floating(cluster: &ClusterId, shared: &str) -> String {
    format!("{FLOATING}cluster-uid={} shared-load-balancer={shared}", cluster.uid)
}

/// Whether a floating IP with this description is of Steerage, in whatever cluster.
pub(crate) fn is_floating(description: &str) -> bool {
    description.starts_with(FLOATING)
}

/// The description of a floating IP that Steerage made and whose Service requests it.
pub(crate) fn requested(service: &Key) -> String {
    format!("{REQUESTED}{service}")
}

/// The only namespace whose Services may request a user's floating IP, by its description: Steerage's own, or an operator's.
pub(crate) fn reserved_for(description: &str) -> Option<&str> {
    if let Some(service) = description.strip_prefix(REQUESTED) {
        return service.split_once('/').map(|(namespace, _)| namespace);
    }
    let namespace = description.strip_prefix(RESERVED)?.split_whitespace().next()?;
    // A name ends in a letter or a digit: what follows is the sentence's.
    Some(namespace.trim_end_matches(|last: char| last.is_ascii_punctuation()))
}

/// The owner of a floating IP with this description, if Steerage created it for this cluster.
pub(crate) fn floating_owner(cluster: &ClusterId, description: &str) -> Option<Owner> {
    let rest = description.strip_prefix(FLOATING)?.strip_prefix("cluster-uid=")?;
    let (service, uid) = rest.strip_prefix(&cluster.uid)?.strip_prefix(" service=")?.split_once(" uid=")?;
    let (namespace, name) = service.split_once('/')?;
    Some(Owner { service: Key::new(namespace, name), uid: uid.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(uid: &str) -> ClusterId {
        ClusterId { name: "prod".to_owned(), uid: uid.to_owned() }
    }

    fn web() -> Owner {
        Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() }
    }

    #[test]
    fn floating_ip_is_the_owners_only_in_the_same_cluster() {
        let description = floating(&cluster("c1"), &web());
        assert_eq!(description, "steerage.dev: cluster-uid=c1 service=shop/web uid=u1");
        assert_eq!(floating_owner(&cluster("c1"), &description), Some(web()));
        assert_eq!(floating_owner(&cluster("c"), &description), None);
        assert_eq!(floating_owner(&cluster("c2"), &description), None);
        for foreign in
            ["", "Floating IP for Kubernetes external service from cluster prod", "steerage.dev: x"]
        {
            assert_eq!(floating_owner(&cluster("c1"), foreign), None, "{foreign}");
        }
        let uid = "00000000-0000-0000-0000-000000000000";
        let longest = Owner { service: Key::new("n".repeat(63), "s".repeat(63)), uid: uid.to_owned() };
        assert!(floating(&cluster(uid), &longest).len() <= 255);
    }

    #[test]
    fn description_reserves_a_floating_ip_for_a_namespace() {
        assert_eq!(reserved_for(&requested(&web().service)), Some("shop"));
        for (description, namespace) in [
            ("Reserved for the Kubernetes namespace shop", Some("shop")),
            ("Reserved for the Kubernetes namespace shop by the network team", Some("shop")),
            ("Reserved for the Kubernetes namespace shop-1, ticket 4711", Some("shop-1")),
            ("Reserved for the Kubernetes namespace shop.", Some("shop")),
            ("reserved for shop", None),
            ("", None),
        ] {
            assert_eq!(reserved_for(description), namespace, "{description}");
        }
    }

    #[test]
    fn tags_of_others_stay() {
        let wanted = of_pool(&of_part(&web()), PoolPorts { node_port: 30080, check_port: Some(32000) });
        assert_eq!(pool_ports(&wanted), Some(PoolPorts { node_port: 30080, check_port: Some(32000) }));
        assert_eq!(merged(&wanted, &wanted), None);
        let mut present = wanted.clone();
        present.insert(0, "team=a".to_owned());
        assert_eq!(merged(&present, &wanted), None);
        let changed = of_pool(&of_part(&web()), PoolPorts { node_port: 30081, check_port: None });
        let merged = merged(&present, &changed).unwrap();
        assert_eq!(merged, ["team=a", "steerage.dev/uid=u1", "steerage.dev/node-port=30081"]);
        assert!(is_part(&merged, &web()) && !is_part(&["team=a".to_owned()], &web()));
    }
}
