// SPDX-License-Identifier: Apache-2.0
//! How the planned targets differ from those that the provider has. Pure.

use steerage_provider_api::{HealthState, Target, TargetHealth};

use crate::node_list::first_nodes;

/// The nodes that would be added and removed. A provider that does not know a node names its instance.
pub(super) fn of_targets(planned: &[Target], found: &[TargetHealth]) -> Vec<String> {
    let is = |target: &Target, health: &TargetHealth| {
        let id = target.provider_id.as_deref().and_then(|id| id.rsplit('/').next());
        target.node == health.node || id == Some(health.node.as_str())
    };
    let registered = || found.iter().filter(|health| health.state != HealthState::Draining);
    let added = planned.iter().filter(|target| !registered().any(|health| is(target, health)));
    let added: Vec<&str> = added.map(|target| target.node.as_str()).collect();
    let removed = registered().filter(|health| !planned.iter().any(|target| is(target, health)));
    let removed: Vec<&str> = removed.map(|health| health.node.as_str()).collect();
    let list =
        |what: &str, nodes: &[&str]| (!nodes.is_empty()).then(|| format!("{what} {}", first_nodes(nodes)));
    list("adds the targets", &added).into_iter().chain(list("removes the targets", &removed)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        TargetHealth { node: node.to_owned(), family: None, state, reason: String::new() }
    }

    #[test]
    fn targets_are_compared_by_node_or_instance() {
        let planned = [target("a", "i-1"), target("b", "i-2")];
        let same = [health("a", HealthState::Healthy), health("i-2", HealthState::Unhealthy)];
        assert_eq!(of_targets(&planned, &same), [""; 0]);
        let other = [health("i-3", HealthState::Healthy), health("a", HealthState::Draining)];
        let changes = ["adds the targets a, b", "removes the targets i-3"];
        assert_eq!(of_targets(&planned, &other), changes, "a draining target is registered no more");
        let many: Vec<Target> = (0..12).map(|n| target(&format!("n{n}"), &format!("i-{n}"))).collect();
        let changes = of_targets(&many, &[]);
        assert!(changes[0].ends_with("n9 and 2 more"), "{changes:?}");
    }
}
