// SPDX-License-Identifier: Apache-2.0
//! Services that choose their target nodes by labels.

use super::*;

/// Asks for nodes with the label `tier=web`.
pub(super) fn choosing() -> Service {
    annotated(annotations::TARGET_NODE_LABELS, "tier=web")
}

pub(super) fn web(node: &mut Node) {
    node.labels = Arc::new([("tier".to_owned(), "web".to_owned())].into());
}

#[test]
fn labels_choose_the_target_nodes_of_every_mode() {
    let nodes = [
        node("a", web),
        node("b", |_| ()),
        node("c", web),
        node("x", |n| {
            web(n);
            n.excluded = true;
        }),
    ];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let slices = [slice(vec![ready("a", 1), ready("b", 2)])];
    assert_eq!(shown(&choosing(), &slices, &nodes, Steering::Api).0, "a*1", "with an endpoint");
    let mut cluster = choosing();
    cluster.external_policy = TrafficPolicy::Cluster;
    for (service, mode) in
        [(&choosing(), Steering::HealthCheck), (&cluster, Steering::Api), (&cluster, Steering::HealthCheck)]
    {
        let (list, plan) = shown(service, &slices, &nodes, mode);
        assert_eq!((list.as_str(), plan.misses_labels), ("a*1,c*1", false), "{mode}");
    }
    let (_, plan) = shown(&cluster, &slices, &nodes, Steering::Api);
    let reasons = target_reasons(&cluster, &EndpointSummary::new(slices.iter()), &nodes, &plan);
    assert_eq!(reasons[0].1.to_string(), "eligible, and with the labels if the Service asks for some");
    assert_eq!(reasons[1].1, TargetReason::NoLabels);
}

#[test]
fn other_nodes_are_targets_while_none_with_the_labels_can_serve() {
    let nodes = [
        node("a", |_| ()),
        node("b", |_| ()),
        node("x", |n| {
            web(n);
            n.excluded = true;
        }),
        node("new", |n| {
            web(n);
            n.addresses.clear();
        }),
    ];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let of = |endpoints, mode| {
        let (list, plan) = shown(&choosing(), &[slice(endpoints)], &nodes, mode);
        (list, plan.misses_labels)
    };
    let missed = |list: &str| (list.to_owned(), true);
    assert_eq!(of(vec![ready("a", 1)], Steering::Api), missed("a*1"));
    assert_eq!(of(vec![ready("x", 1)], Steering::Api), missed("x*1"), "the last resort");
    assert_eq!(of(vec![ready("a", 1)], Steering::HealthCheck), missed("a*1,b*1,new*1"));
    let (_, plan) = shown(&choosing(), &[slice(vec![ready("a", 1)])], &nodes, Steering::Api);
    let endpoints = EndpointSummary::new([slice(vec![ready("a", 1)])].iter());
    assert_eq!(target_reasons(&choosing(), &endpoints, &nodes, &plan)[0].1, TargetReason::DespiteLabels);
}

/// Sets that are equal are one, whatever labels chose them: a tenant must not fill the memory with copies.
#[test]
fn equal_choices_share_their_targets() {
    let all = [node("a", web), node("b", web), node("c", |_| ())];
    let nodes = NodeTargets::new(all.iter(), 1, &NodeTargets::default(), false);
    let set = |labels: &str, nodes: &NodeTargets| {
        let mut service = annotated(annotations::TARGET_NODE_LABELS, labels);
        service.external_policy = TrafficPolicy::Cluster;
        shown(&service, &[], nodes, Steering::HealthCheck).1.set.targets
    };
    let (web, none) = (set("tier=web", &nodes), set("tier=none", &nodes));
    assert!(Arc::ptr_eq(&none, &nodes.set(SharedSet::Eligible).targets), "all others");
    let mut labelled = all.clone();
    for node in &mut labelled[..2] {
        node.labels =
            Arc::new([("tier", "web"), ("os", "linux")].map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }
    let now = NodeTargets::new(labelled.iter(), 2, &nodes, false);
    assert!(now.differs_only_in_labels(&nodes));
    assert!(Arc::ptr_eq(&set("tier=web", &now), &set("os=linux", &now)));
    assert!(Arc::ptr_eq(&web[0], &set("os=linux", &now)[0]), "a node that is as before");
    let many = (0..3000).map(|n| format!("tier=t{n}"));
    assert!(many.into_iter().all(|labels| set(&labels, &now).len() == 3));
}

#[test]
fn missing_labels_are_reported_without_endpoints_too() {
    let nodes = [node("a", |_| ())];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    assert!(shown(&choosing(), &[], &nodes, Steering::Api).1.misses_labels);
}
