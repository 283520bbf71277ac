// SPDX-License-Identifier: Apache-2.0
//! What a call would change in an object of the edge, in words. Pure.

use std::collections::BTreeSet;

use serde_json::Value;
use steerage_edge_api::{EdgeLoadBalancerSpec, EdgeNodeSetSpec};

use crate::spec::merge_patch;

/// Nodes named of one set.
const SHOWN: usize = 10;

/// The fields of an `EdgeLoadBalancer` that would change, as JSON.
pub(crate) fn of_object(current: &EdgeLoadBalancerSpec, wanted: &EdgeLoadBalancerSpec) -> Option<String> {
    let json = |spec| serde_json::to_value(spec).unwrap_or(Value::Null);
    let patch = merge_patch(&json(current), &json(wanted))?;
    Some(format!("patches the EdgeLoadBalancer's spec by {patch}"))
}

/// The nodes that an `EdgeNodeSet` would get and lose; `current` is `None` if it does not exist.
pub(crate) fn of_set(
    name: &str,
    current: Option<&EdgeNodeSetSpec>,
    wanted: &EdgeNodeSetSpec,
) -> Option<String> {
    let Some(current) = current else {
        return Some(format!("creates EdgeNodeSet {name} with {} targets", wanted.targets.len()));
    };
    if current == wanted {
        return None;
    }
    let names = |set: &EdgeNodeSetSpec| -> BTreeSet<String> {
        set.targets.iter().map(|target| target.node.clone()).collect()
    };
    let (old, new) = (names(current), names(wanted));
    let list = |what: &str, nodes: Vec<&String>| {
        let shown: Vec<&str> = nodes.iter().take(SHOWN).map(|node| node.as_str()).collect();
        let more = nodes.len().saturating_sub(SHOWN);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!nodes.is_empty()).then(|| format!(", {what} {}{rest}", shown.join(" ")))
    };
    let added = list("adds", new.difference(&old).collect()).unwrap_or_default();
    let removed = list("removes", old.difference(&new).collect()).unwrap_or_default();
    Some(format!("patches EdgeNodeSet {name}{added}{removed}"))
}

#[cfg(test)]
mod tests {
    use steerage_edge_api::EdgeTarget;

    use super::*;

    fn targets(nodes: &[&str]) -> EdgeNodeSetSpec {
        let target = |node: &&str| EdgeTarget {
            node: (*node).to_owned(),
            addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            weight: 1,
            drain_reason: String::new(),
        };
        EdgeNodeSetSpec { targets: nodes.iter().map(target).collect(), draining: Vec::new() }
    }

    #[test]
    fn nodes_of_a_set_are_named() {
        let (old, new) = (targets(&["a", "b"]), targets(&["b", "c"]));
        assert_eq!(of_set("eligible", Some(&old), &old), None);
        let change = of_set("eligible", Some(&old), &new).expect("a change");
        assert_eq!(change, "patches EdgeNodeSet eligible, adds c, removes a");
        let mut heavy = old.clone();
        heavy.targets[0].weight = 2;
        assert_eq!(of_set("e", Some(&old), &heavy).as_deref(), Some("patches EdgeNodeSet e"));
        assert_eq!(of_set("e", None, &new).as_deref(), Some("creates EdgeNodeSet e with 2 targets"));
    }
}
