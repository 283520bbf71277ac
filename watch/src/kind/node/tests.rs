// SPDX-License-Identifier: Apache-2.0
use super::*;
use serde_json::{Value, json};

fn project(json: &Value) -> (Node, Vec<String>) {
    let mut notes = Vec::new();
    let node = Nodes::project(&json.to_string(), &mut notes).expect("readable").expect("projected");
    (node, notes)
}

#[test]
fn node_is_projected_completely() {
    let (node, notes) = project(&json!({
        "metadata": {
            "name": "n1", "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
            "labels": { "topology.kubernetes.io/zone": "z1", "node.kubernetes.io/exclude-from-external-load-balancers": "" },
            "annotations": {
                "steerage.dev/agent-mode": "labelled", "steerage.dev/agent-version": "0.1.0", "volumes.kubernetes.io/x": "true"
            }
        },
        "spec": {
            "podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:1::/64"], "providerID": "aws:///z1/i-1",
            "unschedulable": true,
            "taints": [{ "key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule" }]
        },
        "status": {
            "addresses": [
                { "type": "InternalIP", "address": "10.0.0.1" }, { "type": "ExternalIP", "address": "192.0.2.01" },
                { "type": "Hostname", "address": "n1" }, { "type": "InternalIP", "address": "fd00::1" }
            ],
            "conditions": [{ "type": "Ready", "status": "True" }], "images": [{ "names": ["x"] }]
        }
    }));
    assert!(notes.is_empty(), "{notes:?}");
    let want = Node {
        name: "n1".into(),
        addresses: vec!["10.0.0.1".parse().expect("address"), "fd00::1".parse().expect("address")],
        external_addresses: vec!["192.0.2.1".parse().expect("address")],
        provider_id: Some("aws:///z1/i-1".into()),
        zone: Some("z1".into()),
        labels: std::sync::Arc::new(
            [(names::ZONE_LABEL, "z1"), (names::EXCLUDE_LABEL, "")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
        ),
        pod_cidrs: vec!["10.244.1.0/24".parse().expect("range"), "fd00:1::/64".parse().expect("range")],
        excluded: true,
        deleting: true,
        autoscaler_taint: true,
        cordoned: true,
        shutting_down: false,
        drain_requested: false,
        created: Some(std::time::UNIX_EPOCH + std::time::Duration::from_hours(24 * 20_454)),
        agent: Some(NodeAgent { mode: "labelled".into(), version: "0.1.0".into() }),
    };
    assert_eq!(node, want);
}

#[test]
fn a_bare_node_is_eligible() {
    let (node, notes) =
        project(&json!({ "metadata": { "name": "n1" }, "spec": {}, "status": { "addresses": null } }));
    assert_eq!(node, Node { name: "n1".into(), ..Node::default() });
    assert!(notes.is_empty() && node.eligibility(true).is_ok());
}

#[test]
fn the_exclusion_labels_value_decides() {
    for (value, excluded) in [("", true), ("true", true), ("yes", true), ("false", false), ("0", false)] {
        let labels = json!({ names::EXCLUDE_LABEL: value });
        let (node, _) = project(&json!({ "metadata": { "name": "n1", "labels": labels } }));
        assert_eq!(node.excluded, excluded, "{value}");
    }
}

#[test]
fn other_taints_do_not_matter() {
    let taints = json!([{ "key": "node.kubernetes.io/not-ready", "effect": "NoExecute" }]);
    let (node, _) = project(&json!({ "metadata": { "name": "n1" }, "spec": { "taints": taints } }));
    assert!(!node.autoscaler_taint);
}

#[test]
fn drains_are_read_from_the_annotation_and_from_the_kubelets_condition() {
    let drains = |annotation: &str, status: &str, message: &str| {
        let conditions = json!([
            { "type": "MemoryPressure", "status": "False" },
            { "type": "Ready", "status": status, "reason": "KubeletNotReady", "message": message },
        ]);
        let annotations = json!({ names::DRAIN: annotation });
        let (node, notes) = project(&json!({
            "metadata": { "name": "n1", "annotations": annotations }, "status": { "conditions": conditions }
        }));
        assert!(notes.is_empty(), "{notes:?}");
        (node.drain_requested, node.shutting_down)
    };
    assert_eq!(drains("true", "True", "kubelet is posting ready status"), (true, false));
    assert_eq!(drains("false", "False", "node is shutting down"), (false, true));
    assert_eq!(drains("", "Unknown", "node is shutting down"), (false, false), "it is gone");
    assert_eq!(drains("yes", "False", "container runtime is down"), (false, false));
}

#[test]
fn parts_that_cannot_be_read_are_left_out_and_named() {
    let (node, notes) = project(&json!({
        "metadata": { "name": "n1" }, "spec": { "podCIDR": "10.244.0.0/240" },
        "status": { "addresses": [{ "type": "InternalIP", "address": "ten" }, { "type": "InternalIP", "address": "10.0.0.1" }] }
    }));
    assert_eq!((node.addresses.len(), node.pod_cidrs.len(), notes.len()), (1, 0, 2), "{notes:?}");
}

#[test]
fn one_node_is_selected_by_name() {
    assert_eq!(Nodes::one("n1").selectors().fields.as_deref(), Some("metadata.name=n1"));
    assert_eq!(Nodes::all().selectors(), Selectors::default());
}
