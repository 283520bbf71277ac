// SPDX-License-Identifier: Apache-2.0
//! An administrator's own load balancer uses a target group of a Service, so that AWS does not delete the group.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Compare, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, changes, delete, pause, provider, standin, wanted};
use super::security_groups::assert_empty;
use super::shared::{config_of_web, sharing};
use crate::Aws;
use crate::client::{NewBalancer, Tags};
use crate::config::Scheme;
use crate::ip_address_type::IpAddressType;
use crate::reasons;
use crate::source_nat::SourceNat;
use crate::standin::StandIn;
use crate::standin::cloud::{Forward, NetworkLb};

const MINUTE: Duration = Duration::from_mins(1);

/// The administrator's load balancer forwards to all target groups.
fn plant_listeners(cloud: &StandIn) {
    cloud.change(|cloud| {
        let made = NewBalancer {
            name: "theirs".to_owned(),
            ip_address_type: IpAddressType::Ipv4,
            source_nat: SourceNat::Off,
            scheme: Scheme::Internal,
            subnets: Vec::new(),
            security_groups: BTreeSet::new(),
        };
        let balancer = cloud.arn("loadbalancer/net", "theirs");
        cloud.balancers.insert(balancer.clone(), NetworkLb::new(made, Tags::new(), Instant::now()));
        for (group, port) in cloud.groups.keys().cloned().zip(1000..).collect::<Vec<_>>() {
            let arn = cloud.arn("listener/net", "theirs");
            let (balancer, protocol) = (balancer.clone(), "TCP".to_owned());
            let forward = Forward { balancer, port, protocol, group, tags: Tags::new(), tls: None };
            cloud.listeners.insert(arn, forward);
        }
    });
}

fn remove_listeners(cloud: &StandIn) {
    cloud.change(|cloud| {
        let theirs: Vec<String> = cloud
            .balancers
            .iter()
            .filter(|(_, found)| found.made.name == "theirs")
            .map(|(arn, _)| arn.clone())
            .collect();
        cloud.balancers.retain(|arn, _| !theirs.contains(arn));
        cloud.listeners.retain(|_, found| !theirs.contains(&found.balancer));
        cloud.note_use(Instant::now());
    });
}

#[tokio::test(start_paused = true)]
async fn group_that_keeps_a_service_from_being_deleted_is_reported_and_seldom_tried() {
    let (alone, shared) = (wanted(&[(80, 30080)], &[0, 1]), sharing("web", "a", 80));
    for lb in [alone, shared] {
        let cloud = standin(1);
        let aws = Aws::over(config_of_web(), cloud.clone() as _);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        plant_listeners(&cloud);
        pause().await;
        cloud.take_calls();
        let start = Instant::now();
        let error = delete(&aws, &lb.owner).await.unwrap_err();
        assert_eq!(error.reason(), reasons::TARGET_GROUP_IN_USE, "{error}");
        assert!(error.to_string().contains("--target-group-arns arn:aws:"), "{error}");
        assert!(start.elapsed() >= 10 * MINUTE && start.elapsed() < 12 * MINUTE, "{:?}", start.elapsed());
        let calls = cloud.take_calls();
        let tries = calls.iter().filter(|call| call.name == "DeleteTargetGroup").count();
        assert!(tries <= 16, "{tries} tries");
        remove_listeners(&cloud);
        pause().await;
        delete(&aws, &lb.owner).await.unwrap();
        assert_empty(&cloud, "after the use");
    }
}

/// The Service has nothing to do with it, and is in place.
#[tokio::test(start_paused = true)]
async fn replaced_group_that_others_use_is_seldom_tried_and_goes_in_the_end() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    plant_listeners(&cloud);
    pause().await;
    let lb = wanted(&[(80, 30081)], &[0]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    changes(&cloud);
    // As if endpoints moved all the time.
    for _ in 0..60 {
        tokio::time::sleep(MINUTE).await;
        let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
        assert!(outcome.progress == Progress::Done && !outcome.ingress.is_empty(), "{outcome:?}");
        assert!(outcome.retry_refused.is_some_and(|after| after <= 5 * MINUTE), "{outcome:?}");
    }
    let tries = changes(&cloud).len();
    assert!((10..=13).contains(&tries), "{tries} tries in an hour");
    remove_listeners(&cloud);
    tokio::time::sleep(5 * MINUTE).await;
    let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
    assert_eq!((changes(&cloud), outcome.retry_refused), (vec!["DeleteTargetGroup"], None));
    assert_eq!(cloud.cloud().groups.len(), 1);
}
