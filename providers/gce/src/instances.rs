// SPDX-License-Identifier: Apache-2.0
//! The VMs of nodes: in which group of endpoints each belongs, and which cannot be an endpoint. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use steerage_provider_api::{Target, TargetSet};
use steerage_provider_cloud::names;

use crate::config::Config;
use crate::desired::{Desired, Names, WantedGroup};
use crate::object::{Id, relative};
use crate::step::Endpoint;
use crate::tree::Tree;

/// Nodes of an internal load balancer, and of an external one, that GCE takes.
const MAX_INTERNAL: usize = 250;
const MAX_EXTERNAL: usize = 3000;

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Its subnets in the network, with its IPv4 address in each. The first one is that of its first interface there.
    subnets: Vec<(String, String)>,
    tags: BTreeSet<String>,
}

impl Instance {
    /// What a list says of a VM, with its name.
    pub(crate) fn read(resource: &Value, config: &Config) -> Option<(String, Self)> {
        let text = |of: &Value, field: &str| of.get(field).and_then(Value::as_str).map(str::to_owned);
        let interfaces = resource.get("networkInterfaces").and_then(Value::as_array).into_iter().flatten();
        let in_network = interfaces.filter(|interface| {
            text(interface, "network").is_none_or(|network| is_same_network(&network, &config.network))
        });
        let subnets = in_network.filter_map(|interface| {
            let subnet = relative(interface.get("subnetwork")?.as_str()?).to_owned();
            Some((subnet, text(interface, "networkIP").unwrap_or_default()))
        });
        let tags = resource.get("tags").and_then(|tags| tags.get("items")).and_then(Value::as_array);
        let tags = tags.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
        Some((text(resource, "name")?, Self { subnets: subnets.collect(), tags: tags.collect() }))
    }

    pub(crate) fn first_subnet(&self) -> Option<&str> {
        self.subnets.first().map(|(subnet, _)| subnet.as_str())
    }

    /// Its subnet: that of the flag, if it is there.
    fn place(&self, config: &Config) -> Option<&(String, String)> {
        let of_flag = self.subnets.iter().find(|(subnet, _)| *subnet == config.subnetwork);
        of_flag.or(self.subnets.first())
    }
}

/// A project has a number, too.
fn is_same_network(url: &str, path: &str) -> bool {
    relative(url) == path || crate::object::last(url) == crate::object::last(path)
}

/// The VMs by zone and name, as far as they were read.
pub(crate) type Instances = BTreeMap<String, BTreeMap<String, Instance>>;

/// Why no VM is known of such a node.
const WITHOUT_ZONE: &str = "its Node has neither spec.providerID nor the label topology.kubernetes.io/zone, which say where its VM is";

/// Where a node's VM is: zone and name, or why it cannot be an endpoint.
pub(crate) fn location<'a>(target: &'a Target, config: &Config) -> Result<(&'a str, &'a str), String> {
    let (zone, name) = match target.provider_id.as_deref().map(|id| (id, id.strip_prefix("gce://"))) {
        None => {
            let zone = target.zone.as_deref().filter(|zone| !zone.is_empty());
            let zone = zone.ok_or_else(|| WITHOUT_ZONE.to_owned())?;
            (zone, target.node.as_str())
        }
        Some((id, None)) => return Err(format!("its providerID {id} is not GCE's")),
        Some((id, Some(path))) => match path.split('/').collect::<Vec<_>>()[..] {
            [project, zone, name] if project == config.project => (zone, name),
            [project, _, _] => return Err(format!("its VM is in the project {project}")),
            _ => return Err(format!("its providerID {id} does not name a VM")),
        },
    };
    let in_region = zone.strip_prefix(config.region.as_str()).is_some_and(|rest| rest.starts_with('-'));
    if in_region {
        return Ok((zone, name));
    }
    Err(format!("its zone `{zone}` is not in the region {}", config.region))
}

/// The zones whose VMs have to be read for these nodes.
pub(crate) fn unknown_zones(nodes: &TargetSet, known: &Instances, config: &Config) -> BTreeSet<String> {
    let places = nodes.targets.iter().filter_map(|target| location(target, config).ok());
    let unknown = places.filter(|(zone, name)| known.get(*zone).is_none_or(|all| !all.contains_key(*name)));
    unknown.map(|(zone, _)| zone.to_owned()).collect()
}

/// Endpoints by zone and subnet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) endpoints: BTreeMap<(String, String), BTreeSet<Endpoint>>,
    /// The nodes of VMs.
    pub(crate) nodes: BTreeMap<String, String>,
    /// Nodes that cannot be endpoints, each with the reason.
    pub(crate) refused: Vec<(String, String)>,
    /// VMs of such nodes, by zone and name, that stay if they are endpoints already: a wrong flag must not take away what serves.
    pub(crate) kept: BTreeSet<(String, String)>,
}

impl Placed {
    /// The endpoints in place that stay although nothing new is attached for their nodes.
    pub(crate) fn kept_of<'a>(&'a self, tree: &'a Tree) -> impl Iterator<Item = (&'a Id, &'a Endpoint)> {
        let all =
            tree.members.iter().flat_map(|(id, members)| members.iter().map(move |member| (id, member)));
        all.filter(|(id, member)| {
            let zone = id.zone.clone().unwrap_or_default();
            self.kept.contains(&(zone, member.instance.clone()))
        })
    }

    /// What is wanted together with what stays.
    pub(crate) fn with_kept(&self, mut wanted: Desired, tree: &Tree) -> Desired {
        keep(&mut wanted, self.kept_of(tree), tree);
        wanted
    }
}

/// Endpoints in place stay, also in groups that are not wanted any more.
pub(crate) fn keep<'a>(
    wanted: &mut Desired,
    kept: impl IntoIterator<Item = (&'a Id, &'a Endpoint)>,
    tree: &Tree,
) {
    for (id, endpoint) in kept {
        let body = tree.get(id).cloned().unwrap_or_default();
        let group = WantedGroup { body, endpoints: BTreeSet::new() };
        wanted.groups.entry(id.clone()).or_insert(group).endpoints.insert(endpoint.clone());
    }
}

/// How many nodes a load balancer takes, and which of them if there are more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit<'a> {
    pub(crate) is_internal: bool,
    /// Whether health checks choose the nodes that have an endpoint, so that no node may be missing.
    pub(crate) needs_all: bool,
    pub(crate) uid: &'a str,
}

/// Finds the endpoints of nodes.
pub(crate) fn place(nodes: &TargetSet, known: &Instances, limit: Limit<'_>, config: &Config) -> Placed {
    let mut placed = Placed::default();
    let max = if limit.is_internal { MAX_INTERNAL } else { MAX_EXTERNAL };
    let mut chosen: Vec<&Target> = nodes.targets.iter().map(AsRef::as_ref).collect();
    if chosen.len() > max {
        // The same ones as long as they exist, and others for other Services.
        chosen.sort_by_cached_key(|target| names::digest(&[limit.uid, &target.node]));
        for target in chosen.split_off(max) {
            if limit.needs_all {
                let why = format!(
                    "a load balancer has at most {max} nodes; use `api` steering, which needs only nodes with endpoints"
                );
                placed.refused.push((target.node.clone(), why));
            }
        }
    }
    for target in chosen {
        match endpoint(target, known, config) {
            Ok((place, endpoint)) => {
                placed.nodes.insert(endpoint.instance.clone(), target.node.clone());
                placed.endpoints.entry(place).or_default().insert(endpoint);
            }
            Err(why) => {
                let vm = location(target, config).ok();
                let vm = vm.filter(|(zone, name)| known.get(*zone).is_none_or(|all| all.contains_key(*name)));
                if let Some((zone, name)) = vm {
                    // Health is told by the node's name.
                    placed.nodes.insert(name.to_owned(), target.node.clone());
                    placed.kept.insert((zone.to_owned(), name.to_owned()));
                }
                placed.refused.push((target.node.clone(), why));
            }
        }
    }
    placed.refused.sort();
    placed
}

type Place = (String, String);

fn endpoint(target: &Target, known: &Instances, config: &Config) -> Result<(Place, Endpoint), String> {
    let (zone, name) = location(target, config)?;
    let all = known.get(zone).ok_or_else(|| format!("the VMs of the zone {zone} could not be read"))?;
    let instance = all.get(name);
    let instance = instance.ok_or_else(|| format!("no VM {name} exists in the zone {zone}"))?;
    let Some((subnet, address)) = instance.place(config) else {
        return Err(format!("its VM has no interface in the network {}", config.network));
    };
    if !config.node_tags.iter().any(|tag| instance.tags.contains(tag)) {
        return Err(format!(
            "its VM has none of the network tags {}, to which firewall rules admit; add one, or correct --gce-node-tags",
            config.node_tags.join(", ")
        ));
    }
    let endpoint = Endpoint { instance: name.to_owned(), address: address.clone() };
    Ok(((zone.to_owned(), subnet.clone()), endpoint))
}

/// The same load balancer with its groups: one in each zone, so that an endpoint that moves needs no other.
pub(crate) fn with_groups(
    mut wanted: Desired,
    placed: &Placed,
    zones: &[String],
    config: &Config,
) -> Desired {
    let of_zones = zones.iter().map(|zone| (zone.clone(), config.subnetwork.clone()));
    let places: BTreeSet<Place> = placed.endpoints.keys().cloned().chain(of_zones).collect();
    let owner = wanted.owner.clone();
    let names = Names { config, owner: &owner };
    wanted.groups = places
        .into_iter()
        .map(|(zone, subnet)| {
            let id = names.group(&zone, &subnet);
            let body = names.group_body(&id, &subnet);
            let endpoints = placed.endpoints.get(&(zone, subnet)).cloned().unwrap_or_default();
            (id, WantedGroup { body, endpoints })
        })
        .collect();
    wanted
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use serde_json::json;

    use super::*;
    use crate::config::tests::config;

    fn target(node: &str, provider_id: Option<&str>) -> Target {
        Target {
            node: node.to_owned(),
            addresses: vec![IpAddr::from([10, 0, 0, 1])],
            provider_id: provider_id.map(str::to_owned),
            zone: Some("r-a".to_owned()),
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    }

    fn vm(name: &str, subnets: &[&str], tags: &[&str]) -> (String, Instance) {
        let interfaces: Vec<Value> = subnets
            .iter()
            .map(|subnet| {
                json!({ "network": "https://x/compute/v1/projects/p/global/networks/n", "networkIP": "10.0.0.1",
                        "subnetwork": format!("https://x/compute/v1/projects/p/regions/r/subnetworks/{subnet}") })
            })
            .collect();
        let vm = json!({ "name": name, "networkInterfaces": interfaces, "tags": { "items": tags } });
        Instance::read(&vm, &config()).unwrap()
    }

    fn known(vms: impl IntoIterator<Item = (String, Instance)>) -> Instances {
        BTreeMap::from([("r-a".to_owned(), vms.into_iter().collect())])
    }

    const EXTERNAL: Limit<'_> = Limit { is_internal: false, needs_all: false, uid: "u" };

    /// Nodes in several subnets (cloud-provider-gcp issues 313 and 605) have a group in each.
    #[test]
    fn nodes_are_endpoints_of_the_group_of_their_zone_and_subnet() {
        let known = known([
            vm("a", &["s"], &["node"]),
            vm("b", &["other"], &["node", "x"]),
            vm("c", &["other", "s"], &["node"]),
        ]);
        let nodes = ["a", "b", "c"].map(|name| target(name, Some(&format!("gce://p/r-a/{name}"))));
        let placed = place(&TargetSet::own(nodes), &known, EXTERNAL, &config());
        assert!(placed.refused.is_empty(), "{placed:?}");
        let names = |subnet: &str| -> Vec<&str> {
            let place = ("r-a".to_owned(), format!("projects/p/regions/r/subnetworks/{subnet}"));
            placed.endpoints[&place].iter().map(|endpoint| endpoint.instance.as_str()).collect()
        };
        assert_eq!((names("s"), names("other")), (vec!["a", "c"], vec!["b"]));
    }

    #[test]
    fn nodes_that_cannot_be_endpoints_are_refused_with_the_reason() {
        let known = known([vm("a", &["s"], &[]), vm("b", &[], &["node"])]);
        for (id, part) in [
            (Some("aws:///x/i-1"), "not GCE's"),
            (Some("gce://other/r-a/a"), "project other"),
            (Some("gce://p/a"), "does not name a VM"),
            (Some("gce://p/q-a/a"), "not in the region"),
            (Some("gce://p/r-a/gone"), "no VM gone"),
            (Some("gce://p/r-b/a"), "could not be read"),
            (Some("gce://p/r-a/a"), "none of the network tags node"),
            (Some("gce://p/r-a/b"), "no interface"),
            (None, "no VM node"),
        ] {
            let placed = place(&TargetSet::own([target("node", id)]), &known, EXTERNAL, &config());
            let [(node, why)] = placed.refused.as_slice() else { panic!("{id:?}: {placed:?}") };
            assert!(node == "node" && why.contains(part), "{id:?}: {why}");
        }
        for zone in [None, Some(String::new())] {
            let unknown = Target { zone, ..target("node", None) };
            let placed = place(&TargetSet::own([unknown]), &known, EXTERNAL, &config());
            let [(_, why)] = placed.refused.as_slice() else { panic!("{placed:?}") };
            let expected = "neither spec.providerID nor the label topology.kubernetes.io/zone";
            assert!(why.contains(expected), "{why}");
        }
    }

    /// A wrong flag, a tag that somebody removed, or a zone that cannot be read take nothing away that serves.
    #[test]
    fn refused_nodes_keep_the_endpoints_that_they_have() {
        let known = known([vm("a", &["s"], &[]), vm("b", &[], &["node"])]);
        for (id, is_kept) in [
            ("gce://p/r-a/a", true),
            ("gce://p/r-a/b", true),
            ("gce://p/r-b/c", true),
            ("gce://p/r-a/gone", false),
            ("gce://other/r-a/a", false),
        ] {
            let placed = place(&TargetSet::own([target("node", Some(id))]), &known, EXTERNAL, &config());
            let parts: Vec<&str> = id.rsplit('/').collect();
            let (name, zone) = (parts[0], parts[1]);
            let group = Id::zonal(crate::object::Kind::Group, zone, "g");
            let endpoint = Endpoint { instance: name.to_owned(), address: "10.0.0.1".to_owned() };
            let mut tree = Tree::default();
            tree.members.insert(group.clone(), BTreeSet::from([endpoint]));
            let wanted = crate::desired::desired(&crate::desired::tests::web(), &config()).unwrap();
            let wanted = placed.with_kept(wanted, &tree);
            assert_eq!(wanted.groups.contains_key(&group), is_kept, "{id}");
            let steps = crate::diff::detached(wanted.endpoints(), &tree);
            assert!(!is_kept || steps.is_empty(), "{id}: {steps:?}");
            assert_eq!(placed.refused.len(), 1, "it is reported: {id}");
        }
    }

    #[test]
    fn only_zones_with_unknown_vms_are_read() {
        let known = known([vm("a", &["s"], &["node"])]);
        let zones = |id: &str| unknown_zones(&TargetSet::own([target("n", Some(id))]), &known, &config());
        assert!(zones("gce://p/r-a/a").is_empty() && zones("aws:///x/i-1").is_empty());
        assert_eq!(zones("gce://p/r-a/b"), BTreeSet::from(["r-a".to_owned()]));
        assert_eq!(zones("gce://p/r-b/a"), BTreeSet::from(["r-b".to_owned()]));
    }

    #[test]
    fn large_clusters_have_a_stable_choice_of_nodes() {
        let names: Vec<String> = (0..300).map(|i| format!("n{i}")).collect();
        let known = known(names.iter().map(|name| vm(name, &["s"], &["node"])));
        let nodes = |count: usize| {
            let all = names.iter().take(count);
            TargetSet::own(all.map(|name| target(name, Some(&format!("gce://p/r-a/{name}")))))
        };
        let internal = Limit { is_internal: true, ..EXTERNAL };
        let chosen = |count, limit| place(&nodes(count), &known, limit, &config());
        let all = chosen(300, internal);
        assert_eq!((all.nodes.len(), all.refused.len()), (250, 0));
        // A node less moves at most one other.
        let fewer = chosen(299, internal);
        assert!(fewer.nodes.keys().filter(|name| !all.nodes.contains_key(*name)).count() <= 1);
        let other = chosen(300, Limit { uid: "v", ..internal });
        assert_ne!(other.nodes, all.nodes);
        let checked = chosen(300, Limit { needs_all: true, ..internal });
        assert_eq!(checked.refused.len(), 50);
        assert_eq!(chosen(300, EXTERNAL).nodes.len(), 300);
    }
}
