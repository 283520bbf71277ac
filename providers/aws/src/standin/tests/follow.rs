// SPDX-License-Identifier: Apache-2.0
//! Targets and rules follow while a change of the structure, or a comparison, waits.

use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Progress, Provider as _};

use super::driver::{apply, apply_now, changes, own_set, pause, provider, set, standin, wanted};
use super::pods::with_pods;
use super::security_groups::{OFFICE, from, group, rule};
use super::shared::{config_of_web, sharing};
use crate::Aws;
use crate::desired::tests::planned_with_pods;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};
use crate::standin::harness::pod_address;

/// The targets of the group on this port.
pub(super) fn registered(cloud: &StandIn, port: u16) -> Vec<String> {
    let groups = cloud.cloud().groups;
    let found = groups.values().filter(|group| group.port == port);
    found.flat_map(|group| group.registered().cloned().collect::<Vec<_>>()).collect()
}

fn is_throttled<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Throttled { .. }))
}

/// Calls until AWS throttles.
async fn until_throttled(aws: &Aws, cloud: &StandIn, lb: &LoadBalancer) -> Result<Outcome, Error> {
    for _ in 0..20 {
        let answer = aws.apply(lb, Compare::Remembered).await;
        if !cloud.has_faults() {
            return answer;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    panic!("no such call");
}

/// Port 80 leads to this port of the pods, and port 81 to another one.
fn on_port(target_port: u16, pods: &[usize]) -> LoadBalancer {
    let planned = planned_with_pods(&[(Protocol::Tcp, 80, target_port), (Protocol::Tcp, 81, 7070)]);
    let (mut lb, other) = (with_pods(&planned, pods), with_pods(&planned, &[0]));
    lb.groups[1] = other.groups[1].clone();
    lb
}

/// A port comes while AWS takes no such changes, and a node leaves.
#[tokio::test(start_paused = true)]
async fn targets_follow_while_a_change_of_the_structure_is_throttled() {
    for action in ["CreateTargetGroup", "DescribeTags", "ModifyTargetGroupAttributes", "CreateListener"] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &wanted(&[(80, 30080)], &[0, 1]), Compare::Remembered).await.unwrap();
        pause().await;
        let changed = wanted(&[(80, 30080), (81, 30081)], &[1, 2]).with_nodes(own_set(&[1, 2]));
        cloud.set_faults(Faults::Once(action, Fault::Code("Throttling")));
        assert!(is_throttled(&until_throttled(&aws, &cloud, &changed).await), "{action}");
        assert_eq!(registered(&cloud, 30080), ["i-1", "i-2"], "{action}");
        apply(&aws, &changed, Compare::Remembered).await.unwrap();
        assert_eq!(registered(&cloud, 30081), ["i-1", "i-2"], "{action}");
    }
}

/// Calls of a change wait for their budget before they are refused. In the next try, targets do not wait for that again.
#[tokio::test(start_paused = true)]
async fn targets_go_first_after_a_change_was_throttled() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    let changed = |nodes| wanted(&[(80, 30080), (81, 30081)], &[0]).with_nodes(own_set(nodes));
    cloud.set_faults(Faults::Each("CreateTargetGroup", "", Fault::Code("Throttling")));
    changes(&cloud);
    assert!(is_throttled(&aws.apply(&changed(&[0, 1]), Compare::Remembered).await));
    assert_eq!(changes(&cloud)[..2], ["CreateTargetGroup", "RegisterTargets"]);
    assert!(is_throttled(&aws.apply(&changed(&[1, 2]), Compare::Remembered).await));
    assert_eq!(changes(&cloud), ["RegisterTargets", "DeregisterTargets", "CreateTargetGroup"]);
}

/// A group that AWS returned under a wanted name may be another program's, until its tags are read.
#[tokio::test(start_paused = true)]
async fn nothing_is_registered_in_a_group_whose_tags_were_not_read() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (lb, changed) = (wanted(&[(80, 30080)], &[0]), wanted(&[(80, 30080), (81, 30081)], &[0]));
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("DescribeTags", Fault::Code("Throttling")));
    assert!(is_throttled(&aws.apply(&changed, Compare::Remembered).await));
    aws.set_targets(&lb.owner, &lb.targets()).await.unwrap();
    assert_eq!(registered(&cloud, 30081), [""; 0]);
}

/// Another Service changed the load balancer, so that the comparison reads everything.
#[tokio::test(start_paused = true)]
async fn targets_follow_while_a_complete_read_is_throttled() {
    for action in ["DescribeTags", "DescribeTargetGroupAttributes"] {
        let cloud = standin(1);
        let aws = Aws::over(config_of_web(), cloud.clone() as _);
        let a = sharing("web", "a", 80);
        apply(&aws, &a, Compare::Remembered).await.unwrap();
        pause().await;
        apply(&aws, &sharing("web", "b", 443), Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Once(action, Fault::Code("Throttling")));
        let moved = a.clone().with_nodes(set(&[0, 1, 2]));
        assert!(is_throttled(&aws.apply(&moved, Compare::InPlace).await), "{action}");
        assert_eq!(registered(&cloud, 30080), ["i-0", "i-1", "i-2"], "{action}");
        // While another Service changes the load balancer too.
        let lock = aws.shared_uses.lock(&"web".to_owned(), || unreachable!("it is in use")).await;
        let moved = a.clone().with_nodes(set(&[0, 1, 2, 3]));
        let outcome = aws.apply(&moved, Compare::InPlace).await.unwrap();
        assert!(matches!(outcome.progress, Progress::Again(_)));
        assert_eq!(registered(&cloud, 30080), ["i-0", "i-1", "i-2", "i-3"], "{action}");
        drop(lock);
        apply(&aws, &a, Compare::InPlace).await.unwrap();
    }
}

/// A call may be given up at any moment of a comparison. Nothing was changed until then, and the targets follow at once.
#[tokio::test(start_paused = true)]
async fn abandoned_comparison_forgets_nothing() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[0, 1]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    // The first read is sent, and its answer late.
    let comparison = aws.apply(&lb, Compare::InPlace);
    assert!(tokio::time::timeout(Duration::from_millis(100), comparison).await.is_err());
    cloud.take_calls();
    aws.apply(&wanted(&[(80, 30080)], &[0, 1, 2]), Compare::Remembered).await.unwrap();
    let calls: Vec<_> = cloud.take_calls().into_iter().map(|call| call.name).collect();
    assert_eq!(calls, ["RegisterTargets"]);
}

/// The new port of the pods has none that is ready, and stays so. A source that must not connect any more does not wait for them.
#[tokio::test(start_paused = true)]
async fn rules_follow_while_a_change_of_the_structure_waits() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let ranges =
        |lb: LoadBalancer, ranges: &[&str]| LoadBalancer { source_ranges: from(ranges).source_ranges, ..lb };
    let (office, home) = (OFFICE, "192.0.2.0/24");
    apply(&aws, &ranges(on_port(8080, &[0]), &[office, home]), Compare::Remembered).await.unwrap();
    pause().await;
    let next = ranges(on_port(9090, &[]), &[home]);
    for _ in 0..3 {
        let outcome = apply_now(&aws, &next, Compare::Remembered).await.unwrap();
        let Progress::Again(after) = outcome.progress else { panic!("{outcome:?}") };
        assert_eq!(group(&cloud).own, [rule("tcp", 80, home), rule("tcp", 81, home)].into());
        assert_eq!(registered(&cloud, 8080), [pod_address(0).to_string()]);
        tokio::time::sleep(after).await;
    }
}
