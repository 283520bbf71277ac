// SPDX-License-Identifier: Apache-2.0
//! Subnets that tags offer, and names of subnets.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Family;
use steerage_provider_api::{Compare, LoadBalancer, Provider as _};

use super::driver::{apply, changes, set, standin, wanted};
use crate::annotations::SUBNETS;
use crate::client::Tags;
use crate::config::Config;
use crate::desired::tests::config;
use crate::standin::StandIn;
use crate::subnets::Subnet;
use crate::{Aws, standin::Kind};

const INTERNAL: &str = "kubernetes.io/role/internal-elb";

/// A provider without `--aws-subnets`.
fn by_tags(cloud: &Arc<StandIn>) -> Aws {
    Aws::over(Config { subnets: Vec::new(), ..config() }, Arc::clone(cloud) as _)
}

fn named(index: usize, subnets: &str) -> LoadBalancer {
    let mut lb = wanted(&[(80, 30080)], &[0, 1]);
    lb.owner.service = steerage_model::Key::new("shop", format!("web-{index}"));
    if !subnets.is_empty() {
        lb.annotations.insert(SUBNETS.to_owned(), subnets.to_owned());
    }
    lb
}

/// Adds a subnet in a zone of its own.
fn add(cloud: &StandIn, id: &str, tag: (&str, &str)) {
    cloud.change(|cloud| {
        let tags = Tags::from([(tag.0.to_owned(), tag.1.to_owned())]);
        let zone = format!("zone of {id}");
        let (id, has_ipv6) = (id.to_owned(), id.contains("v6"));
        cloud.subnets.push(Subnet { id, zone, tags, free: 200, has_ipv6, is_on_outpost: false });
    });
}

/// Until every read shows the present state, and what was read before is too old.
async fn wait_for_reads() {
    tokio::time::sleep(Duration::from_mins(2)).await;
}

fn placed(cloud: &StandIn) -> Vec<Vec<String>> {
    cloud.cloud().balancers.into_values().map(|found| found.placed.into_keys().collect()).collect()
}

fn lookups(cloud: &StandIn) -> usize {
    cloud
        .take_calls()
        .iter()
        .filter(|call| call.name == "DescribeSubnets" && call.kind == Kind::Ec2Read)
        .count()
}

#[tokio::test(start_paused = true)]
async fn tags_decide_at_the_creation_and_add_zones_later() {
    let cloud = standin(1);
    let aws = by_tags(&cloud);
    let error = apply(&aws, &named(0, ""), Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "SubnetsNotFound");
    assert!(cloud.cloud().balancers.is_empty() && cloud.cloud().security_groups.is_empty());
    add(&cloud, "subnet-1", (INTERNAL, "1"));
    wait_for_reads().await;
    apply(&aws, &named(0, ""), Compare::Remembered).await.unwrap();
    add(&cloud, "subnet-2", (INTERNAL, "1"));
    wait_for_reads().await;
    cloud.take_calls();
    apply(&aws, &named(0, ""), Compare::Remembered).await.unwrap();
    assert_eq!(cloud.take_calls().len(), 0, "nothing changed, as far as is known");
    apply(&aws, &named(0, ""), Compare::InPlace).await.unwrap();
    let both = vec![vec!["subnet-1".to_owned(), "subnet-2".to_owned()]];
    assert_eq!((placed(&cloud), lookups(&cloud)), (both.clone(), 1));
    // What leaves the offer stays, and another subnet of a zone changes nothing.
    cloud.change(|cloud| {
        cloud.subnets[0].tags.clear();
        let other = Subnet { id: "subnet-0".to_owned(), ..cloud.subnets[1].clone() };
        cloud.subnets.push(other);
    });
    for is_restarted in [false, true] {
        wait_for_reads().await;
        let restarted = is_restarted.then(|| by_tags(&cloud));
        let aws = restarted.as_ref().unwrap_or(&aws);
        apply(aws, &named(0, ""), Compare::InPlace).await.unwrap();
        wait_for_reads().await;
        apply(aws, &named(0, ""), Compare::InPlace).await.unwrap();
        assert_eq!((placed(&cloud), changes(&cloud)), (both.clone(), vec![]), "restarted: {is_restarted}");
    }
}

#[tokio::test(start_paused = true)]
async fn names_are_compared_and_one_read_serves_many_services() {
    let cloud = standin(1);
    let aws = by_tags(&cloud);
    add(&cloud, "subnet-1", ("Name", "private-a"));
    add(&cloud, "subnet-2", ("Name", "private-b"));
    tokio::time::sleep(Duration::from_mins(1)).await;
    let services: Vec<LoadBalancer> = (0..5).map(|index| named(index, "private-b,subnet-1")).collect();
    let creations = services.iter().map(|lb| apply(&aws, lb, Compare::Remembered));
    for made in futures::future::join_all(creations).await {
        made.unwrap();
    }
    assert_eq!(
        (placed(&cloud), lookups(&cloud)),
        (vec![vec!["subnet-1".to_owned(), "subnet-2".to_owned()]; 5], 1)
    );
    apply(&aws, &named(0, "private-b,subnet-1"), Compare::InPlace).await.unwrap();
    wait_for_reads().await;
    for _ in 0..2 {
        let outcome = apply(&aws, &named(0, "private-c"), Compare::InPlace).await.unwrap();
        assert_eq!(outcome.incomplete.unwrap().0, "SubnetsNotFound");
    }
    assert_eq!(changes(&cloud), [""; 0]);
}

/// Names of subnets change nothing of a load balancer that exists, so it does not wait for EC2 because of them.
#[tokio::test(start_paused = true)]
async fn ports_and_targets_change_while_ec2_does_not_answer() {
    let cloud = standin(1);
    let aws = by_tags(&cloud);
    add(&cloud, "subnet-1", ("Name", "private-a"));
    tokio::time::sleep(Duration::from_mins(1)).await;
    apply(&aws, &named(0, "private-a"), Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(5)).await;
    cloud.fail_ec2(Some(""));
    let more = wanted(&[(80, 30080), (81, 30081)], &[0, 1]);
    let lb = LoadBalancer { listeners: more.listeners, groups: more.groups, ..named(0, "private-a") };
    let lb = lb.with_nodes(set(&[2]));
    let mut outcome = aws.apply(&lb, Compare::InPlace).await.unwrap();
    while cloud.cloud().listeners.len() < 2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
    }
    // The rule of the new port waits for EC2.
    assert!(outcome.incomplete.is_some());
    let now = cloud.cloud();
    assert!(now.groups.values().all(|group| group.registered().any(|id| id == "i-2")));
    cloud.fail_ec2(None);
    changes(&cloud);
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
}

/// A load balancer with IPv6 gets subnets that have it, and a refusal names the others.
#[tokio::test(start_paused = true)]
async fn subnets_without_ipv6_are_named() {
    let cloud = standin(1);
    let aws = by_tags(&cloud);
    add(&cloud, "subnet-1", (INTERNAL, "1"));
    add(&cloud, "subnet-v6-2", (INTERNAL, "1"));
    wait_for_reads().await;
    let dual = || LoadBalancer { families: vec![Family::V4, Family::V6], ..named(0, "") };
    let error = apply(&aws, &dual(), Compare::Remembered).await.unwrap_err();
    let message = error.to_string();
    assert_eq!(error.reason(), "RejectedByProvider");
    assert!(message.contains("Without an IPv6 range: subnet-1."), "{message}");
    assert!(cloud.cloud().balancers.is_empty());
    // Another subnet in that zone has it.
    cloud.change(|cloud| {
        let zone = cloud.subnets[0].zone.clone();
        cloud.subnets.push(Subnet { id: "subnet-v6-3".to_owned(), zone, ..cloud.subnets[1].clone() });
    });
    wait_for_reads().await;
    apply(&aws, &dual(), Compare::Remembered).await.unwrap();
    let both = vec![vec!["subnet-v6-2".to_owned(), "subnet-v6-3".to_owned()]];
    assert_eq!(placed(&cloud), both);
    // A zone without it is not added, and holds up no other.
    add(&cloud, "subnet-4", (INTERNAL, "1"));
    wait_for_reads().await;
    let outcome = apply(&aws, &dual(), Compare::InPlace).await.unwrap();
    assert_eq!((placed(&cloud), outcome.incomplete), (both, None));
    // An existing load balancer keeps its type.
    let v4 = |subnets: &str| LoadBalancer { families: vec![Family::V4], ..named(1, subnets) };
    apply(&aws, &v4("subnet-1,subnet-v6-2"), Compare::Remembered).await.unwrap();
    wait_for_reads().await;
    let dual = LoadBalancer { families: vec![Family::V4, Family::V6], ..v4("subnet-1,subnet-v6-2") };
    let (reason, message) = apply(&aws, &dual, Compare::Remembered).await.unwrap().incomplete.unwrap();
    assert!(reason == "RejectedByProvider" && message.contains("IPv6 range: subnet-1."), "{message}");
}
