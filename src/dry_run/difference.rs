// SPDX-License-Identifier: Apache-2.0
//! How the planned targets differ from those that the provider has. Pure.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use steerage_provider_api::{GroupTargets, HealthState, TargetHealth};

use crate::node_list::first_nodes;

/// A planned target, with its names.
struct Named {
    name: String,
    instance: Option<String>,
}

/// The nodes and pods.
fn named(planned: &GroupTargets) -> Vec<Named> {
    let nodes = planned.nodes.iter().flat_map(|set| set.targets.iter()).map(|target| {
        let instance = target.provider_id.as_deref().and_then(|id| id.rsplit('/').next());
        Named { name: target.node.clone(), instance: instance.map(str::to_owned) }
    });
    let pods = planned.pods.values().flat_map(|pods| pods.iter().map(|pod| pod.address));
    let pods: BTreeSet<SocketAddr> = pods.collect();
    nodes.chain(pods.iter().map(|pod| Named { name: pod.to_string(), instance: None })).collect()
}

/// The targets that would be added and removed. A provider that does not know a node names its instance.
pub(super) fn of_targets(planned: &GroupTargets, found: &[TargetHealth]) -> Vec<String> {
    let is = |target: &Named, health: &TargetHealth| {
        target.name == health.target || target.instance.as_ref() == Some(&health.target)
    };
    let planned = named(planned);
    let registered = || found.iter().filter(|health| health.state != HealthState::Draining);
    let added = planned.iter().filter(|target| !registered().any(|health| is(target, health)));
    let added: Vec<&str> = added.map(|target| target.name.as_str()).collect();
    let removed = registered().filter(|health| !planned.iter().any(|target| is(target, health)));
    let removed: Vec<&str> = removed.map(|health| health.target.as_str()).collect();
    let list =
        |what: &str, nodes: &[&str]| (!nodes.is_empty()).then(|| format!("{what} {}", first_nodes(nodes)));
    list("adds the targets", &added).into_iter().chain(list("removes the targets", &removed)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use steerage_provider_api::{PodPort, PodTarget, Target, TargetSet};

    use super::*;

    fn of(nodes: impl IntoIterator<Item = Target>) -> GroupTargets {
        GroupTargets::of_nodes(TargetSet::own(nodes))
    }

    fn target(node: &str, id: &str) -> Target {
        Target {
            node: node.to_owned(),
            addresses: Vec::new(),
            provider_id: Some(format!("aws:///zone/{id}")),
            zone: None,
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    }

    fn health(node: &str, state: HealthState) -> TargetHealth {
        TargetHealth { target: node.to_owned(), family: None, state, reason: String::new() }
    }

    #[test]
    fn targets_are_compared_by_node_or_instance() {
        let planned = of([target("a", "i-1"), target("b", "i-2")]);
        let same = [health("a", HealthState::Healthy), health("i-2", HealthState::Unhealthy)];
        assert_eq!(of_targets(&planned, &same), [""; 0]);
        let other = [health("i-3", HealthState::Healthy), health("a", HealthState::Draining)];
        let changes = ["adds the targets a, b", "removes the targets i-3"];
        assert_eq!(of_targets(&planned, &other), changes, "a draining target is registered no more");
        let many: Vec<Target> = (0..12).map(|n| target(&format!("n{n}"), &format!("i-{n}"))).collect();
        let changes = of_targets(&of(many), &[]);
        assert!(changes[0].ends_with("n9 and 2 more"), "{changes:?}");
    }

    #[test]
    fn pods_are_compared_by_address() {
        let pod = |port| PodTarget { address: ([10, 2, 0, 1], port).into(), zone: None };
        let group = |port| (PodPort::Number(port), Arc::from([pod(port)]));
        let planned = GroupTargets { pods: [group(80), group(443)].into(), ..GroupTargets::default() };
        let same = ["10.2.0.1:80", "10.2.0.1:443"].map(|pod| health(pod, HealthState::Initial));
        assert_eq!(of_targets(&planned, &same), [""; 0]);
        let changes = ["adds the targets 10.2.0.1:80, 10.2.0.1:443", "removes the targets 10.2.0.1:81"];
        assert_eq!(of_targets(&planned, &[health("10.2.0.1:81", HealthState::Healthy)]), changes);
    }
}
