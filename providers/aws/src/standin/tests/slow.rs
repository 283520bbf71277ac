// SPDX-License-Identifier: Apache-2.0
//! An AWS that answers slowly or throttles for long: what needs more time than a call has continues in the next one.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Progress, Provider as _};
use steerage_provider_cloud::ApiMetrics;

use super::driver::{apply, delete, pause, set, wanted};
use crate::Aws;
use crate::desired::tests::config;
use crate::paced::Paced;
use crate::standin::harness::start_instances;
use crate::standin::{Delays, StandIn};

const PORTS: u16 = 30;
/// The controller gives a call up after this time.
const DEADLINE: Duration = Duration::from_mins(1);

fn with_ports(first_node_port: u16) -> LoadBalancer {
    wanted(&(0..PORTS).map(|i| (80 + i, first_node_port + i)).collect::<Vec<_>>(), &[0, 1])
}

/// Each call takes this long.
fn slow(call: Duration) -> Arc<StandIn> {
    let cloud = Arc::new(StandIn::new(Delays { call, ..Delays::real() }, 1));
    start_instances(&cloud, 6);
    cloud.set_unlimited();
    cloud
}

/// Calls as the controller does, which gives no call up. Returns the number of tries.
async fn apply_in_time(aws: &Aws, lb: &LoadBalancer, compare: Compare) -> usize {
    for tries in 1..100 {
        let answer = tokio::time::timeout(DEADLINE, aws.apply(lb, compare)).await;
        let pause = match answer.expect("the call is not given up") {
            Ok(outcome) => match outcome.progress {
                Progress::Done => return tries,
                Progress::Again(after) => after,
            },
            Err(Error::Throttled { after, .. }) => after.unwrap(),
            Err(error) => panic!("{error}"),
        };
        tokio::time::sleep(pause).await;
    }
    panic!("not done");
}

fn count(cloud: &StandIn, names: &[&str]) -> Vec<usize> {
    let calls = cloud.take_calls();
    names.iter().map(|name| calls.iter().filter(|call| call.name == *name).count()).collect()
}

#[tokio::test(start_paused = true)]
async fn slow_change_continues_where_its_last_call_ended() {
    let cloud = slow(Duration::from_secs(3));
    let aws = Aws::over(config(), cloud.clone() as _);
    aws.owned().await.unwrap();
    cloud.take_calls();
    let all = usize::from(PORTS);
    apply_in_time(&aws, &with_ports(30_000), Compare::Remembered).await;
    let names = [
        "CreateLoadBalancer",
        "CreateTargetGroup",
        "RegisterTargets",
        "CreateListener",
        "DescribeTargetGroups",
        "DescribeListeners",
    ];
    assert_eq!(count(&cloud, &names), [1, all, all, all, 0, 0]);
    pause().await;
    // All targets change: two calls for each of the groups.
    let moved = with_ports(30_000).with_nodes(set(&[0, 2]));
    apply_in_time(&aws, &moved, Compare::Remembered).await;
    let names = ["RegisterTargets", "DeregisterTargets", "DescribeTargetGroups"];
    assert_eq!(count(&cloud, &names), [all, all, 0]);
}

/// The attributes of each group are read alone.
#[tokio::test(start_paused = true)]
async fn slow_read_continues_where_its_last_call_ended() {
    let cloud = slow(Duration::from_secs(3));
    apply(&Aws::over(config(), cloud.clone() as _), &with_ports(30_000), Compare::Remembered).await.unwrap();
    pause().await;
    let aws = Aws::over(config(), cloud.clone() as _);
    aws.owned().await.unwrap();
    // Differs from what the lists show, so that everything is read.
    cloud.take_calls();
    apply_in_time(&aws, &with_ports(30_001), Compare::InPlace).await;
    assert_eq!(count(&cloud, &["DescribeTargetGroupAttributes"]), [usize::from(PORTS)]);
    delete(&aws, &with_ports(30_001).owner).await.unwrap();
}

/// AWS takes a read in 1.6 seconds. A complete read is refused again and again, and each try continues it.
#[tokio::test(start_paused = true)]
async fn throttled_read_continues_where_it_was_refused() {
    let cloud = slow(Duration::from_millis(80));
    apply(&Aws::over(config(), cloud.clone() as _), &with_ports(30_000), Compare::Remembered).await.unwrap();
    pause().await;
    let calls = Arc::new(Paced::new(Arc::clone(&cloud), ApiMetrics::default()));
    let aws = Aws::over(config(), Arc::clone(&calls) as _);
    aws.owned().await.unwrap();
    cloud.take_calls();
    calls.slow_down();
    let tries = apply_in_time(&aws, &with_ports(30_001), Compare::InPlace).await;
    assert!(tries > 1);
    assert_eq!(count(&cloud, &["DescribeTargetGroupAttributes"]), [usize::from(PORTS)]);
}
