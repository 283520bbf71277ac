// SPDX-License-Identifier: Apache-2.0
//! Pods as targets: registered by address, beside instances while one replaces the other, and never for a group of another kind.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{
    Compare, GroupKey, GroupTargets, HealthState, LoadBalancer, PodTarget, Progress, Provider as _,
};

use super::driver::{apply, changes, own_set, pause, provider, set, standin, wanted};
use crate::desired::tests::planned_with_pods;
use crate::standin::StandIn;
use crate::standin::harness::pod_address;

/// The load balancer with the pods of these numbers in every group.
pub(super) fn with_pods(lb: &LoadBalancer, pods: &[usize]) -> LoadBalancer {
    lb.clone().with_targets(&targets(lb, pods))
}

fn targets(lb: &LoadBalancer, pods: &[usize]) -> GroupTargets {
    let mut targets = GroupTargets::default();
    for group in &lb.groups {
        let GroupKey::Pods(port) = &group.key else { continue };
        let number: u16 = port.to_string().parse().unwrap();
        let pod = |pod: &usize| PodTarget { address: (pod_address(*pod), number).into(), zone: None };
        targets.pods.insert(port.clone(), pods.iter().map(pod).collect::<Arc<[_]>>());
    }
    targets
}

/// Port 80 leads to port 8080 of the pods, and port 53 with both protocols to port 5353.
fn web(pods: &[usize]) -> LoadBalancer {
    let ports = [(Protocol::Tcp, 80, 8080), (Protocol::Udp, 53, 5353), (Protocol::Tcp, 53, 5353)];
    with_pods(&planned_with_pods(&ports), pods)
}

/// `port/protocol: targets` of each target group, those of pods with their port.
fn groups(cloud: &StandIn) -> Vec<String> {
    let cloud = cloud.cloud();
    let mut groups: Vec<String> = cloud
        .groups
        .values()
        .map(|group| {
            let live = group.targets.iter().filter(|(_, registration)| registration.draining.is_none());
            let shown =
                live.map(|((id, port), _)| if group.has_pods { format!("{id}:{port}") } else { id.clone() });
            format!("{}/{}: {}", group.port, group.protocol, shown.collect::<Vec<_>>().join(" "))
        })
        .collect();
    groups.sort();
    groups
}

#[tokio::test(start_paused = true)]
async fn pods_are_registered_by_address_and_port() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &web(&[0, 1]), Compare::Remembered).await.unwrap();
    let shown = ["5353/TCP_UDP: 10.2.0.0:5353 10.2.0.1:5353", "8080/TCP: 10.2.0.0:8080 10.2.0.1:8080"];
    assert_eq!(groups(&cloud), shown);
    for group in cloud.cloud().groups.values() {
        assert_eq!((group.health.port, &group.health.path), (None, &None), "the port that receives packets");
        assert_eq!(group.attributes["preserve_client_ip.enabled"], "true");
    }
    cloud.take_calls();
    let fresh = provider(&cloud);
    apply(&fresh, &web(&[0, 1]), Compare::InPlace).await.unwrap();
    assert_eq!(changes(&cloud), [""; 0], "another process finds them as they are");
    // A rolling update: the new pod joins, and the old one leaves without waiting, because it ends anyway.
    let outcome = fresh.apply(&web(&[1, 2]), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.progress, Progress::Done);
    assert_eq!(changes(&cloud), ["RegisterTargets", "DeregisterTargets"].repeat(2));
    assert_eq!(groups(&cloud)[1], "8080/TCP: 10.2.0.1:8080 10.2.0.2:8080");
    tokio::time::sleep(Duration::from_mins(5)).await;
    let health = fresh.target_health(&web(&[]).owner).await.unwrap().targets;
    let names: Vec<_> = health.iter().map(|target| target.target.as_str()).collect();
    assert_eq!(names, ["10.2.0.1:5353", "10.2.0.1:8080", "10.2.0.2:5353", "10.2.0.2:8080"]);
    assert!(health.iter().all(|target| target.state == HealthState::Healthy));
}

/// Each port is checked at its own pods. A fresh process knows them from lists.
#[tokio::test(start_paused = true)]
async fn ports_without_a_healthy_pod_are_named() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let mut lb = web(&[0]);
    let of_53 = targets(&lb, &[1]).pods.into_iter().filter(|(port, _)| port.to_string() == "5353");
    let mut pods = lb.targets();
    pods.pods.extend(of_53);
    lb = lb.with_targets(&pods);
    let owner = lb.owner.clone();
    cloud.change(|cloud| {
        let address = pod_address(1).to_string();
        cloud.instances.get_mut(&address).unwrap().passes = (false, tokio::time::Instant::now());
    });
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(5)).await;
    let fresh = provider(&cloud);
    apply(&fresh, &lb, Compare::Remembered).await.unwrap();
    for aws in [&aws, &fresh] {
        let mut parts = aws.target_health(&lb.owner).await.unwrap().parts;
        parts.sort_by(|a, b| a.name.cmp(&b.name));
        let shown: Vec<_> = parts.iter().map(|part| (part.name.as_str(), part.is_served)).collect();
        assert_eq!(shown, [("port 53 (TCP_UDP)", Some(false)), ("port 80 (TCP)", Some(true))]);
    }
    // No pod has the port at all: health checks have nothing to do with that.
    let of_53 = targets(&lb, &[]).pods.into_iter().filter(|(port, _)| port.to_string() == "5353");
    pods.pods.extend(of_53);
    apply(&fresh, &lb.with_targets(&pods), Compare::Remembered).await.unwrap();
    pause().await;
    let parts = fresh.target_health(&owner).await.unwrap().parts;
    let told = "port 53 (TCP_UDP), whose targetPort no ready endpoint has";
    assert!(parts.iter().any(|part| part.name == told && part.is_served == Some(false)), "{parts:?}");
}

#[tokio::test(start_paused = true)]
async fn refused_pod_is_named_by_its_address_and_stops_no_other() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let outcome = apply(&aws, &web(&[0, 77, 1]), Compare::Remembered).await.unwrap();
    assert_eq!(groups(&cloud)[1], "8080/TCP: 10.2.0.0:8080 10.2.0.1:8080");
    let names: Vec<_> = outcome.refused.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["10.2.0.77:5353", "10.2.0.77:8080"]);
    assert!(outcome.refused[0].1.contains("addresses of the VPC"), "{:?}", outcome.refused);
}

/// A listener changes from one kind of group to the other, which has its targets by then.
#[tokio::test(start_paused = true)]
async fn instances_and_pods_replace_each_other() {
    let cloud = standin(2);
    let aws = provider(&cloud);
    let (nodes, pods) = (
        wanted(&[(80, 30080)], &[0, 1]),
        with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &[2, 3]),
    );
    cloud.set_invariant(Box::new(|_, after| {
        let mut used = after.listeners.values().filter_map(|forward| after.groups.get(&forward.group));
        let empty = used.find(|group| group.registered().next().is_none());
        empty.map(|group| format!("the listener forwards to the empty group {}", group.name))
    }));
    let shown = ["30080/TCP: i-0 i-1", "8080/TCP: 10.2.0.2:8080 10.2.0.3:8080"];
    for (next, last) in [(&nodes, shown[0]), (&pods, shown[1]), (&nodes, shown[0])] {
        apply(&aws, next, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_mins(10)).await;
        apply(&aws, next, Compare::InPlace).await.unwrap();
        assert_eq!(groups(&cloud), [last]);
    }
    // While the old group keeps its connections, it keeps its targets.
    for _ in 0..10 {
        aws.apply(&pods, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(groups(&cloud), shown);
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn targets_of_a_kept_structure_follow_by_its_kind_and_port() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &web(&[0, 1]), Compare::Remembered).await.unwrap();
    let one = planned_with_pods(&[(Protocol::Tcp, 80, 8080), (Protocol::Tcp, 81, 9090)]);
    let moved = GroupTargets { nodes: Some(own_set(&[4])), ..targets(&one, &[1, 5]) };
    for instance in [aws, provider(&cloud)] {
        instance.set_targets(&one.owner, &moved).await.unwrap();
        assert_eq!(
            groups(&cloud),
            ["5353/TCP_UDP: 10.2.0.1:5353", "8080/TCP: 10.2.0.1:8080 10.2.0.5:8080"],
            "the group of a port that is not planned keeps its pods, but not 10.2.0.0, which is no endpoint any more"
        );
    }
    let cloud = standin(1);
    let aws = provider(&cloud);
    let nodes = wanted(&[(80, 30080)], &[0]);
    apply(&aws, &nodes, Compare::Remembered).await.unwrap();
    aws.set_targets(&nodes.owner, &targets(&one, &[1])).await.unwrap();
    assert_eq!(groups(&cloud), ["30080/TCP: i-0"], "no nodes were given");
    aws.set_targets(&nodes.owner, &GroupTargets::of_nodes(set(&[]))).await.unwrap();
    assert_eq!(groups(&cloud), ["30080/TCP: "], "none is wanted");
}

/// The listener stays on its group until the new one has a target, and the present targets follow until then.
#[tokio::test(start_paused = true)]
async fn listener_never_switches_to_a_group_without_targets() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0, 1]), Compare::Remembered).await.unwrap();
    let ports = [(Protocol::Tcp, 80, 8080)];
    let served = || {
        let cloud = cloud.cloud();
        let listener = cloud.listeners.values().next().unwrap();
        cloud.groups[&listener.group].port
    };
    // All are refused: the structure is, and the nodes of the present one follow.
    let outside = with_pods(&planned_with_pods(&ports), &[77, 78]);
    let error = apply(&aws, &outside, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "AllTargetsRefused");
    assert!(error.to_string().contains("10.2.0.77:8080"), "{error}");
    aws.set_targets(&outside.owner, &GroupTargets::of_nodes(set(&[1, 2]))).await.unwrap();
    assert_eq!((served(), groups(&cloud)[0].as_str()), (30080, "30080/TCP: i-1 i-2"));
    // None is ready: the change waits for one.
    let none = with_pods(&planned_with_pods(&ports), &[]);
    let outcome = aws.apply(&none, Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
    assert_eq!(served(), 30080);
    cloud.take_calls();
    aws.apply(&none, Compare::Remembered).await.unwrap();
    assert_eq!(cloud.take_calls().len(), 0, "waiting costs no call");
    apply(&aws, &with_pods(&planned_with_pods(&ports), &[3]), Compare::Remembered).await.unwrap();
    assert_eq!(served(), 8080);
    // A changed port of the pods waits too, and addresses that are no endpoint any more leave the present group.
    let other = [(Protocol::Tcp, 80, 9090)];
    aws.apply(&with_pods(&planned_with_pods(&other), &[]), Compare::Remembered).await.unwrap();
    assert_eq!(served(), 8080, "the slices do not show the new port yet, and may list no endpoint");
    apply(&aws, &with_pods(&planned_with_pods(&other), &[3]), Compare::Remembered).await.unwrap();
    assert_eq!(served(), 9090);
}

/// What one Service requests costs a limited number of calls at a time, and less and less of them.
#[tokio::test(start_paused = true)]
async fn many_refused_pods_cost_few_calls() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    let lb = with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &[0]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    let many: Vec<usize> = (0..1).chain(100..200).collect();
    let lb = with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &many);
    cloud.take_calls();
    let mut tries = 0;
    // Each try ends soon: others wait for its worker.
    while let Err(error) = aws.apply(&lb, Compare::Remembered).await {
        assert!(matches!(error, steerage_provider_api::Error::Throttled { .. }), "{error}");
        let calls = cloud.take_calls().len();
        assert!(calls <= 5, "{calls}");
        tries += 1;
    }
    assert_eq!(tries, 4);
    for _ in 0..2 {
        let calls = cloud.take_calls().len();
        assert!(calls <= 5, "{calls}");
        aws.apply(&lb, Compare::Remembered).await.unwrap();
    }
}
