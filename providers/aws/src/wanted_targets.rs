// SPDX-License-Identifier: Apache-2.0
//! The wanted targets of each target group: instances of nodes, or pods. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::{Family, Key};
use steerage_provider_api::{GroupTargets, PodTarget, Target, TargetSet};

use crate::config::Config;
use crate::diff::ObservedGroup;
use crate::names;
use crate::target_id::{TargetId, TargetNames};

/// The protocols of target groups.
const PROTOCOLS: [&str; 4] = ["TCP", "UDP", "TCP_UDP", "TLS"];

/// The wanted targets of all target groups of a Service.
pub(crate) struct WantedTargets {
    /// Of every group of nodes; `None` if such groups keep those that they have.
    nodes: Option<TargetNames>,
    /// The pods of each port and IP family.
    pods: Vec<TargetNames>,
    /// The index in `pods` by name of a group. The other groups of pods keep those that they have.
    groups: BTreeMap<String, usize>,
    /// Nodes that have no instance, each with a message.
    refused: Vec<(String, String)>,
    may_hold: bool,
}

impl WantedTargets {
    pub(crate) fn new(config: &Config, service: &Key, targets: &GroupTargets) -> Self {
        let (mut nodes, mut refused, mut may_hold) = (None, Vec::new(), false);
        if let Some(set) = &targets.nodes {
            let found;
            (found, refused) = instances(set);
            nodes = Some(found);
            may_hold = set.shared.is_some();
        }
        let (mut pods, mut groups) = (Vec::new(), BTreeMap::new());
        for (port, found) in &targets.pods {
            for family in [Family::V4, Family::V6] {
                for protocol in PROTOCOLS {
                    groups.insert(names::pod_group(config, service, protocol, (port, family)), pods.len());
                }
                pods.push(addresses(found, family));
            }
        }
        Self { nodes, pods, groups, refused, may_hold }
    }

    /// The targets of a group; `None` if it keeps those that it has.
    pub(crate) fn of(&self, name: &str, group: &ObservedGroup) -> Option<&TargetNames> {
        if group.has_pods { self.pods.get(*self.groups.get(name)?) } else { self.nodes.as_ref() }
    }

    /// Whether a group for which [`of`](Self::of) has no targets loses those whose pods ended.
    pub(crate) fn drops_ended(&self, group: &ObservedGroup) -> bool {
        // Where no group has any, slices may lack a changed port, and say nothing about addresses.
        group.has_pods && self.pods.iter().any(|pods| !pods.is_empty())
    }

    /// Which of the registered targets of a group may stay for which [`of`](Self::of) has none: of pods, those whose address is still an
    /// endpoint. An address that is not may be another pod's by now. `None` if all may.
    pub(crate) fn staying<'a>(
        &self,
        group: &ObservedGroup,
        registered: impl Iterator<Item = &'a TargetId>,
    ) -> Option<TargetNames> {
        if !self.drops_ended(group) {
            return None;
        }
        let address = |id: &TargetId| match id {
            TargetId::Pod(address) => Some(address.ip()),
            TargetId::Instance(_) => None,
        };
        let endpoints: BTreeSet<IpAddr> =
            self.pods.iter().flatten().filter_map(|(id, _)| address(id)).collect();
        let stays = |id: &&TargetId| address(id).is_some_and(|address| endpoints.contains(&address));
        Some(registered.filter(stays).map(|id| (id.clone(), id.to_string())).collect())
    }

    /// The nodes that cannot be targets of these groups, each with a message.
    pub(crate) fn refused_nodes<'a>(
        &self,
        mut groups: impl Iterator<Item = &'a ObservedGroup>,
    ) -> Vec<(String, String)> {
        if groups.any(|group| !group.has_pods) { self.refused.clone() } else { Vec::new() }
    }

    /// Whether targets that must leave this group may wait for the health of others. Only a node of a shared set may: it still serves.
    /// One that left a set of its own has no endpoint any more, which its health check does not tell: new connections to it would fail.
    /// A pod that is no target any more ends.
    pub(crate) fn may_hold(&self, group: &ObservedGroup) -> bool {
        self.may_hold && !group.has_pods
    }

    /// All targets, of whichever group.
    pub(crate) fn all(&self) -> TargetNames {
        let all = self.nodes.iter().chain(&self.pods).flatten();
        all.map(|(id, name)| (id.clone(), name.clone())).collect()
    }
}

/// The node names by instance, and the nodes that have no instance, each with a message.
fn instances(set: &TargetSet) -> (TargetNames, Vec<(String, String)>) {
    let (mut instances, mut refused) = (TargetNames::new(), Vec::new());
    for target in set.targets.iter() {
        match instance(target) {
            Ok(id) => drop(instances.insert(TargetId::Instance(id), target.node.clone())),
            Err(why) => refused.push((target.node.clone(), why)),
        }
    }
    (instances, refused)
}

/// The instance in a provider ID `aws:///<zone>/<instance>`.
fn instance(target: &Target) -> Result<String, String> {
    let Some(id) = target.provider_id.as_deref().filter(|id| !id.is_empty()) else {
        return Err("The node has no spec.providerID. Set it by a cloud controller manager or by kubelet's --provider-id.".to_owned());
    };
    let last = id.strip_prefix("aws://").and_then(|path| path.rsplit('/').next());
    match last {
        Some(instance) if instance.starts_with("i-") && instance.len() > 2 => Ok(instance.to_owned()),
        _ => Err(format!("spec.providerID `{id}` names no EC2 instance. Use the form aws:///<zone>/i-<id>.")),
    }
}

/// The addresses of one family of pods with their ports, each of which has a health of its own.
fn addresses(pods: &[PodTarget], family: Family) -> TargetNames {
    let of_family = pods.iter().filter(|pod| Family::of(pod.address.ip()) == family);
    of_family.map(|pod| (TargetId::Pod(pod.address), pod.address.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use steerage_provider_api::PodPort;

    use super::*;
    use crate::desired::tests::config;

    fn target(node: &str, provider_id: Option<&str>) -> Target {
        Target {
            node: node.to_owned(),
            addresses: Vec::new(),
            provider_id: provider_id.map(str::to_owned),
            zone: None,
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    }

    #[test]
    fn provider_id_names_instance() {
        let set = TargetSet::own([
            target("a", Some("aws:///eu-west-1a/i-0abc")),
            target("b", None),
            target("c", Some("aws:///eu-west-1a/fargate-ip-10-0-0-1")),
            target("d", Some("gce://project/zone/i-0abc")),
            target("e", Some("aws:///i-0def")),
        ]);
        let (found, refused) = instances(&set);
        let found: Vec<_> = found.into_iter().map(|(id, node)| (id.to_string(), node)).collect();
        assert_eq!(found, [("i-0abc".to_owned(), "a".to_owned()), ("i-0def".to_owned(), "e".to_owned())]);
        assert_eq!(refused.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>(), ["b", "c", "d"]);
        assert!(refused.iter().all(|(_, why)| why.contains("providerID")));
    }

    #[test]
    fn a_group_that_no_targets_are_given_for_keeps_its_own() {
        let service = Key::new("shop", "web");
        let pod = PodTarget { address: ([10, 2, 0, 1], 8080).into(), zone: None };
        let port = PodPort::Number(8080);
        let pods = GroupTargets { nodes: None, pods: [(port.clone(), Arc::from([pod]))].into() };
        let wanted = WantedTargets::new(&config(), &service, &pods);
        let (of_nodes, of_pods) =
            (ObservedGroup::default(), ObservedGroup { has_pods: true, ..ObservedGroup::default() });
        assert_eq!(wanted.of("any", &of_nodes), None);
        assert_eq!(wanted.of("another port's", &of_pods), None);
        let name = names::pod_group(&config(), &service, "TCP_UDP", (&port, Family::V4));
        let found: Vec<_> = wanted
            .of(&name, &of_pods)
            .unwrap()
            .iter()
            .map(|(id, name)| (id.to_string(), name.clone()))
            .collect();
        assert_eq!(found, [("10.2.0.1:8080".to_owned(), "10.2.0.1:8080".to_owned())]);
        let old = ["10.2.0.1", "10.2.0.9"].map(|address| TargetId::of(address, Some(7070)));
        let stays = wanted.staying(&of_pods, old.iter()).unwrap();
        assert_eq!(stays.keys().collect::<Vec<_>>(), [&old[0]], "the other address is no endpoint");
        assert_eq!(wanted.staying(&of_nodes, old.iter()), None);
        let none = GroupTargets { nodes: None, pods: [(port, Arc::from([]))].into() };
        let wanted = WantedTargets::new(&config(), &service, &none);
        assert_eq!(wanted.staying(&of_pods, old.iter()), None, "all");
        let nodes = GroupTargets::of_nodes(TargetSet::own([target("a", Some("aws:///z/i-1"))]));
        let wanted = WantedTargets::new(&config(), &service, &nodes);
        assert_eq!(wanted.of("any", &of_nodes).map(BTreeMap::len), Some(1));
        assert_eq!(wanted.of(&name, &of_pods), None);
    }
}
