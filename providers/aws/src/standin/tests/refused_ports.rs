// SPDX-License-Identifier: Apache-2.0
//! One port of a Service cannot be served: AWS denies its listener, has no room for its target group, or its new group can have no target.
//! The others become what is wanted, and the Service is published.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::{Key, Protocol};
use steerage_provider_api::{Compare, LoadBalancer, Owner, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, apply_now, changes, delete, pause, provider, standin, standin_with, wanted};
use super::pods::with_pods;
use super::refused_listeners::{GOOD, refusal, served, web};
use crate::Aws;
use crate::desired::tests::planned_with_pods;
use crate::reasons;
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Quotas, StandIn};

/// Calls `apply` when the outcome says so, for this long. Returns how often AWS was asked for this.
async fn tries(cloud: &StandIn, aws: &Aws, lb: &LoadBalancer, what: &str, time: Duration) -> usize {
    let start = Instant::now();
    changes(cloud);
    let mut tries = 0;
    while start.elapsed() < time {
        let outcome = aws.apply(lb, Compare::Remembered).await.unwrap();
        tries += changes(cloud).into_iter().filter(|call| *call == what).count();
        let wait = match outcome.progress {
            Progress::Again(wait) => wait,
            Progress::Done => outcome.retry_refused.expect("another try"),
        };
        tokio::time::sleep(wait).await;
    }
    tries
}

#[tokio::test(start_paused = true)]
async fn denied_listener_holds_up_no_other_port_and_is_retried_with_backoff() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Each("CreateListener", " 443", Fault::Code("AccessDenied")));
    let outcome = apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap();
    let (reason, message) = refusal(&outcome);
    assert_eq!(reason, "ProviderDenied");
    assert!(message.contains("the listener of port 443. Not served: port 443. "), "{message}");
    assert!(message.contains("AccessDenied") && message.contains("Grant it"), "{message}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (81, (30081, 2))]));
    let tries = tries(&cloud, &aws, &web(GOOD), "CreateListener", Duration::from_mins(30)).await;
    assert!((6..=9).contains(&tries), "{tries}");
    // Where only targets are set, it is still reported.
    let followed = aws.set_targets(&web("").owner, &web(GOOD).targets()).await.unwrap();
    assert_eq!(followed.incomplete, outcome.incomplete);
    cloud.set_faults(Faults::None);
    let outcome = aws.apply(&web(GOOD), Compare::Remembered).await.unwrap();
    assert_eq!((outcome.incomplete, outcome.retry_refused), (None, None));
    assert_eq!(served(&cloud)[&443], (30443, 2));
}

/// No port is served: the caller tries again as after any denial.
#[tokio::test(start_paused = true)]
async fn service_all_of_whose_listeners_are_denied_is_denied() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Each("CreateListener", "", Fault::Code("AccessDenied")));
    let error = apply_now(&aws, &web(GOOD), Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "ProviderDenied", "{error}");
    cloud.set_faults(Faults::None);
    assert_eq!(apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap().incomplete, None);
}

fn other(ports: &[(u16, u16)]) -> LoadBalancer {
    let owner = Owner { service: Key::new("shop", "other"), uid: "u-other".to_owned() };
    LoadBalancer { owner, ..wanted(ports, &[0]) }
}

#[tokio::test(start_paused = true)]
async fn port_without_room_for_its_target_group_holds_up_no_other() {
    let cloud = standin_with(1, Quotas { groups: 3, ..Quotas::default() });
    let aws = provider(&cloud);
    apply(&aws, &other(&[(90, 30090)]), Compare::Remembered).await.unwrap();
    let ports: Vec<_> = (0..20).map(|i| (80 + i, 30_080 + i)).collect();
    changes(&cloud);
    let many = wanted(&ports, &[0, 1]);
    apply_now(&aws, &many, Compare::Remembered).await.unwrap();
    let tried = changes(&cloud).into_iter().filter(|call| *call == "CreateTargetGroup").count();
    assert_eq!(tried, 4, "two, and two that are refused");
    let outcome = apply(&aws, &many, Compare::Remembered).await.unwrap();
    let (reason, message) = refusal(&outcome);
    assert_eq!(reason, reasons::QUOTA_EXCEEDED);
    assert!(message.contains("the target group of port 82. Not served: ports 82, 83, 84,"), "{message}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (81, (30081, 2)), (90, (30090, 1))]));
    let tries = tries(&cloud, &aws, &many, "CreateTargetGroup", Duration::from_mins(30)).await;
    assert!((12..=18).contains(&tries), "{tries}");
    delete(&aws, &other(&[]).owner).await.unwrap();
    pause().await;
    aws.apply(&many, Compare::InPlace).await.unwrap();
    assert_eq!(served(&cloud)[&82], (30082, 2));
}

/// A listener that exists keeps its group, whose targets follow, and the others change.
#[tokio::test(start_paused = true)]
async fn changed_port_without_room_keeps_its_group() {
    let cloud = standin_with(1, Quotas { groups: 3, ..Quotas::default() });
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080), (81, 30081)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    let moved = wanted(&[(80, 31080), (81, 31081)], &[0, 1]);
    let outcome = apply_now(&aws, &moved, Compare::Remembered).await.unwrap();
    let (_, message) = outcome.incomplete.as_ref().unwrap();
    assert!(message.contains("Served, but not as requested: port 81. "), "{message}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (31080, 2)), (81, (30081, 2))]));
    let outcome = apply(&aws, &moved, Compare::Remembered).await.unwrap();
    assert_eq!(refusal(&outcome).0, reasons::QUOTA_EXCEEDED);
    tokio::time::sleep(Duration::from_mins(10)).await;
    let outcome = apply(&aws, &moved, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete, None, "the group that left made room");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (31080, 2)), (81, (31081, 2))]));
}

#[tokio::test(start_paused = true)]
async fn port_without_pods_holds_up_no_other() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let of = |a, b| with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, a), (Protocol::Tcp, 81, b)]), &[0, 1]);
    apply(&aws, &of(8080, 8081), Compare::Remembered).await.unwrap();
    pause().await;
    let changed = of(9090, 9091);
    let mut targets = changed.targets();
    for (port, pods) in &mut targets.pods {
        if port.to_string() == "9090" {
            *pods = [].into();
        }
    }
    let waiting = changed.clone().with_targets(&targets);
    let outcome = apply_now(&aws, &waiting, Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
    assert_eq!(outcome.incomplete, None, "EndpointSlices may come in a moment");
    let behind = |port| served(&cloud)[&port];
    assert_eq!((behind(80).0, behind(81)), (8080, (9091, 2)));
    pause().await;
    let outcome = aws.apply(&waiting, Compare::Remembered).await.unwrap();
    let (reason, message) = outcome.incomplete.unwrap();
    assert!(reason == reasons::NO_TARGETS_YET && message.contains("target port: port 80."), "{message}");
    assert_eq!(apply(&aws, &changed, Compare::Remembered).await.unwrap().incomplete, None);
    assert_eq!((behind(80), behind(81)), ((9090, 2), (9091, 2)));
}

/// The Service with pods, of which none has port 9090.
pub(super) fn without_pods_on_9090(lb: &LoadBalancer) -> LoadBalancer {
    let mut targets = lb.targets();
    for (port, pods) in &mut targets.pods {
        if port.to_string() == "9090" {
            *pods = [].into();
        }
    }
    lb.clone().with_targets(&targets)
}

/// The waiting port keeps its pods, also where the controller sets targets alone, and switches when there are some.
#[tokio::test(start_paused = true)]
async fn port_without_pods_beside_a_refused_one_keeps_its_own() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let one = with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &[0, 1]);
    apply(&aws, &one, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("CreateListener", " 443", Fault::Code("InvalidConfigurationRequest")));
    let ports = [(Protocol::Tcp, 80, 9090), (Protocol::Tcp, 81, 8081), (Protocol::Tcp, 443, 8443)];
    let changed = with_pods(&planned_with_pods(&ports), &[0, 1]);
    let waiting = without_pods_on_9090(&changed);
    let outcome = apply_now(&aws, &waiting, Compare::Remembered).await.unwrap();
    let (_, message) = outcome.incomplete.as_ref().unwrap();
    assert!(message.contains("Not served: port 443."), "{message}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (8080, 2)), (81, (8081, 2))]));
    aws.set_targets(&waiting.owner, &waiting.targets()).await.unwrap();
    assert_eq!(served(&cloud)[&80], (8080, 2));
    let outcome = apply(&aws, &changed, Compare::Remembered).await.unwrap();
    assert!(refusal(&outcome).1.contains("Not served: port 443."), "{outcome:?}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (9090, 2)), (81, (8081, 2))]));
}

/// No pod has the new target port, and perhaps none ever will.
#[tokio::test(start_paused = true)]
async fn only_port_without_pods_keeps_its_own() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let of = |port| with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, port)]), &[0, 1]);
    apply(&aws, &of(8080), Compare::Remembered).await.unwrap();
    pause().await;
    let waiting = without_pods_on_9090(&of(9090));
    for _ in 0..3 {
        let outcome = apply_now(&aws, &waiting, Compare::Remembered).await.unwrap();
        assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
        assert_eq!(served(&cloud), BTreeMap::from([(80, (8080, 2))]));
        pause().await;
    }
    let outcome = aws.apply(&waiting, Compare::InPlace).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, reasons::NO_TARGETS_YET);
    apply(&aws, &of(9090), Compare::Remembered).await.unwrap();
    assert_eq!(served(&cloud), BTreeMap::from([(80, (9090, 2))]));
}

/// What AWS refused is tried again while another port waits for targets.
#[tokio::test(start_paused = true)]
async fn denied_port_is_retried_while_another_one_waits() {
    for compare in [Compare::Remembered, Compare::InPlace] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        let one = with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &[0, 1]);
        apply(&aws, &one, Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Each("CreateListener", "", Fault::Code("AccessDenied")));
        let ports = [(Protocol::Tcp, 80, 9090), (Protocol::Tcp, 443, 8443), (Protocol::Tcp, 444, 8444)];
        let waiting = without_pods_on_9090(&with_pods(&planned_with_pods(&ports), &[0, 1]));
        apply_now(&aws, &waiting, Compare::Remembered).await.unwrap();
        cloud.set_faults(Faults::None);
        if compare == Compare::Remembered {
            aws.apply(&waiting, compare).await.unwrap();
            assert_eq!(served(&cloud).len(), 1, "not at once");
            pause().await;
        }
        aws.apply(&waiting, compare).await.unwrap();
        assert_eq!(served(&cloud), BTreeMap::from([(80, (8080, 2)), (443, (8443, 2)), (444, (8444, 2))]));
    }
}

/// Nothing is known of any port.
#[tokio::test(start_paused = true)]
async fn credentials_that_are_not_accepted_refuse_no_port() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    changes(&cloud);
    cloud.set_faults(Faults::Each("CreateListener", "", Fault::Code("ExpiredToken")));
    let more = wanted(&[(80, 30080), (81, 30081), (82, 30082)], &[0]);
    let error = apply_now(&aws, &more, Compare::Remembered).await.unwrap_err();
    assert!(error.to_string().contains("does not accept the credentials"), "{error}");
    assert!(!error.to_string().contains("port 81"), "{error}");
    assert_eq!(changes(&cloud).iter().filter(|call| **call == "CreateListener").count(), 1);
    cloud.set_faults(Faults::None);
    apply(&aws, &more, Compare::Remembered).await.unwrap();
    assert_eq!(served(&cloud).len(), 3);
}

/// No port is served. Where the controller sets targets alone, it learns when to try again.
#[tokio::test(start_paused = true)]
async fn service_that_a_quota_refuses_says_when_to_try_again() {
    let cloud = standin_with(1, Quotas { listeners: 0, ..Quotas::default() });
    let aws = provider(&cloud);
    let waits = async |lb: &LoadBalancer| {
        let error = apply(&aws, lb, Compare::Remembered).await.unwrap_err();
        assert_eq!(error.reason(), reasons::QUOTA_EXCEEDED, "{error}");
        aws.set_targets(&lb.owner, &lb.targets()).await.unwrap().retry_refused.unwrap().as_secs()
    };
    let lb = wanted(&[(80, 30080)], &[0]);
    assert_eq!([waits(&lb).await, waits(&lb).await, waits(&lb).await], [30, 60, 120]);
    assert_eq!(waits(&wanted(&[(81, 30081)], &[0])).await, 30, "another change");
}
