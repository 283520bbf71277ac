// SPDX-License-Identifier: Apache-2.0
//! ELBv2 fails with changes of the structure, or does not answer, and takes registrations: targets follow meanwhile.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, changes, delete, own_set, pause, provider, standin, wanted};
use super::follow::registered;
use super::refused_listeners::served;
use super::security_groups::assert_empty;
use crate::Aws;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};

const FAULTS: [Fault; 4] =
    [Fault::Code("ServiceUnavailable"), Fault::Code("InternalFailure"), Fault::Before, Fault::After];

/// Another interval of the health check.
pub(super) fn with_interval(mut lb: LoadBalancer, seconds: u64) -> LoadBalancer {
    for group in &mut lb.groups {
        group.health_check.interval = Duration::from_secs(seconds);
    }
    lb
}

/// Nodes are checked on another port, as under another traffic policy.
fn with_other_check(mut lb: LoadBalancer) -> LoadBalancer {
    for group in &mut lb.groups {
        group.health_check.port = Some(32001);
    }
    lb
}

/// The wait that the outcome asks for. It names the failure of this call.
#[track_caller]
pub(super) fn waits_for(outcome: &Outcome, action: &str) -> Duration {
    let (reason, message) = outcome.incomplete.as_ref().unwrap_or_else(|| panic!("{action}: {outcome:?}"));
    assert!(*reason == Error::UNAVAILABLE && message.contains(action), "{action}: {outcome:?}");
    let Progress::Again(after) = outcome.progress else { panic!("{outcome:?}") };
    after
}

/// Calls until a change fails: AWS shows what was created only after a moment.
pub(super) async fn until_failure(aws: &Aws, lb: &LoadBalancer) -> Outcome {
    for _ in 0..20 {
        let outcome = aws.apply(lb, Compare::Remembered).await.unwrap();
        match outcome.progress {
            Progress::Again(after) if outcome.incomplete.is_none() => tokio::time::sleep(after).await,
            _ => return outcome,
        }
    }
    panic!("no failure");
}

/// Changes that the provider makes by these calls.
pub(super) fn changed(action: &str, nodes: &[usize]) -> LoadBalancer {
    let nodes = own_set(nodes);
    match action {
        "ModifyListener" => wanted(&[(80, 31080)], &[]).with_nodes(nodes),
        "ModifyTargetGroup" => with_interval(wanted(&[(80, 30080)], &[]), 20).with_nodes(nodes),
        _ => wanted(&[(80, 30080), (81, 30081)], &[]).with_nodes(nodes),
    }
}

#[tokio::test(start_paused = true)]
async fn targets_follow_while_a_change_of_the_structure_fails() {
    for action in [
        "CreateTargetGroup",
        "ModifyTargetGroupAttributes",
        "ModifyTargetGroup",
        "ModifyListener",
        "CreateListener",
    ] {
        for fault in FAULTS {
            let told = format!("{action}, {fault:?}");
            let cloud = standin(1);
            let aws = provider(&cloud);
            apply(&aws, &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0, 1])), Compare::Remembered)
                .await
                .unwrap();
            pause().await;
            cloud.set_faults(Faults::Each(action, "", fault));
            waits_for(&until_failure(&aws, &changed(action, &[1, 2])).await, action);
            assert_eq!(registered(&cloud, 30080), ["i-1", "i-2"], "{told}");
            // Before reads show what AWS has made, and with no other call than those for targets.
            changes(&cloud);
            let outcome = aws.apply(&changed(action, &[2, 3]), Compare::Remembered).await.unwrap();
            let after = waits_for(&outcome, action);
            assert_eq!(registered(&cloud, 30080), ["i-2", "i-3"], "{told}");
            let made = changes(&cloud);
            let is_of_targets = |call: &str| ["RegisterTargets", "DeregisterTargets"].contains(&call);
            assert!(made.iter().all(|call| is_of_targets(call)), "{told}: {made:?}");
            // The next try fails like the first.
            tokio::time::sleep(after).await;
            let outcome = until_failure(&aws, &changed(action, &[3, 4])).await;
            if !matches!(fault, Fault::After) {
                waits_for(&outcome, action);
                assert_eq!(registered(&cloud, 30080), ["i-3", "i-4"], "{told}");
            }
            cloud.set_faults(Faults::None);
            let outcome = apply(&aws, &changed(action, &[4, 5]), Compare::Remembered).await.unwrap();
            assert_eq!(outcome.incomplete, None, "{told}");
            assert!(served(&cloud).values().all(|(_, count)| *count == 2), "{told}: {:?}", served(&cloud));
            pause().await;
            delete(&aws, &changed(action, &[]).owner).await.unwrap();
            assert_empty(&cloud, &told);
        }
    }
}

/// Only some of the wanted nodes may have an endpoint, and the check in place would find all of them healthy.
#[tokio::test(start_paused = true)]
async fn nodes_that_may_be_checked_in_another_way_do_not_follow() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("ModifyTargetGroup", "", Fault::Code("ServiceUnavailable")));
    let changed = with_other_check(wanted(&[(80, 30080)], &[0, 1]));
    waits_for(&aws.apply(&changed, Compare::Remembered).await.unwrap(), "ModifyTargetGroup");
    assert_eq!(registered(&cloud, 30080), ["i-0"]);
    // Nor those of an earlier structure: AWS may have made the change.
    let back = wanted(&[(80, 30080)], &[0, 2]);
    aws.apply(&back, Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud, 30080), ["i-0"]);
    // Until a read shows what AWS has.
    tokio::time::sleep(Duration::from_secs(11)).await;
    apply(&aws, &back, Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud, 30080), ["i-0", "i-2"]);
}

/// AWS answered, so nothing has changed, and the load balancer need not be read again. A conflict ends only what is known of its structure.
#[tokio::test(start_paused = true)]
async fn targets_follow_after_an_answer_that_nobody_expects() {
    for (action, code) in [("CreateTargetGroup", "SomethingNew"), ("CreateListener", "ResourceInUse")] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered)
            .await
            .unwrap();
        pause().await;
        cloud.set_faults(Faults::Each(action, "", Fault::Code(code)));
        cloud.take_calls();
        let mut answer = aws.apply(&changed("CreateTargetGroup", &[0, 1]), Compare::Remembered).await;
        while let Ok(Outcome { progress: Progress::Again(after), incomplete: None, .. }) = answer {
            tokio::time::sleep(after).await;
            answer = aws.apply(&changed("CreateTargetGroup", &[0, 1]), Compare::Remembered).await;
        }
        assert_eq!(registered(&cloud, 30080), ["i-0", "i-1"], "{code}: {answer:?}");
        let _ = aws.apply(&changed("CreateTargetGroup", &[1, 2]), Compare::Remembered).await;
        assert_eq!(registered(&cloud, 30080), ["i-1", "i-2"], "{code}");
        if code == "SomethingNew" {
            waits_for(&answer.unwrap(), "SomethingNew");
            let calls: Vec<_> = cloud.take_calls().into_iter().map(|call| call.name).collect();
            let of_targets = ["RegisterTargets", "DeregisterTargets"];
            let is_read = |name: &&str| name.starts_with("Describe");
            assert!(!calls.iter().any(is_read), "{calls:?}");
            assert_eq!(calls.iter().filter(|name| **name == action).count(), 1, "{calls:?}");
            assert!(of_targets.iter().all(|name| calls.contains(name)), "{calls:?}");
        }
        cloud.set_faults(Faults::None);
        apply(&aws, &changed("CreateTargetGroup", &[1, 2]), Compare::Remembered).await.unwrap();
        assert_eq!(registered(&cloud, 30081), ["i-1", "i-2"], "{code}");
    }
}

/// Everything hangs. A try ends before the controller gives it up.
#[tokio::test(start_paused = true)]
async fn try_in_which_nothing_is_answered_ends_in_time() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.hang_elb(Some(Duration::from_secs(30)));
    let began = Instant::now();
    let outcome = aws.apply(&changed("CreateTargetGroup", &[0, 1]), Compare::Remembered).await.unwrap();
    waits_for(&outcome, "CreateTargetGroup");
    assert!(began.elapsed() <= Duration::from_secs(45), "{:?}", began.elapsed());
    cloud.hang_elb(None);
    let outcome = aws.apply(&changed("CreateTargetGroup", &[0, 1]), Compare::Remembered).await.unwrap();
    waits_for(&outcome, "CreateTargetGroup");
    assert_eq!(registered(&cloud, 30080), ["i-0", "i-1"]);
}

/// The controller gave the change up in the middle.
#[tokio::test(start_paused = true)]
async fn targets_follow_after_an_abandoned_change() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.hang_elb(Some(Duration::from_mins(5)));
    let lb = changed("CreateTargetGroup", &[0]);
    let change = aws.apply(&lb, Compare::Remembered);
    assert!(tokio::time::timeout(Duration::from_mins(1), change).await.is_err());
    cloud.hang_elb(None);
    let outcome = aws.apply(&changed("CreateTargetGroup", &[0, 1]), Compare::Remembered).await.unwrap();
    waits_for(&outcome, "did not end in time");
    assert_eq!(registered(&cloud, 30080), ["i-0", "i-1"]);
}

/// Users see which port a failure concerns, whatever AWS answers.
#[tokio::test(start_paused = true)]
async fn failure_of_a_change_names_its_ports() {
    for code in ["ServiceUnavailable", "AccessDenied"] {
        for (action, port) in [
            ("CreateTargetGroup", "port 81"),
            ("CreateListener", "port 81"),
            ("ModifyTargetGroup", "port 80"),
            ("ModifyListener", "port 80"),
        ] {
            let cloud = standin(1);
            let aws = provider(&cloud);
            apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
            pause().await;
            cloud.set_faults(Faults::Each(action, "", Fault::Code(code)));
            let lb = changed(action, &[0]);
            let mut answer = aws.apply(&lb, Compare::Remembered).await;
            while let Ok(Outcome { progress: Progress::Again(after), incomplete: None, .. }) = answer {
                tokio::time::sleep(after).await;
                answer = aws.apply(&lb, Compare::Remembered).await;
            }
            let told = answer.map_or_else(|error| error.to_string(), |outcome| outcome.incomplete.unwrap().1);
            assert!(told.contains(action) && told.contains(port), "{code}, {action}: {told}");
        }
    }
}

/// A new Service has nothing to follow in. It says what it waits for all the same.
#[tokio::test(start_paused = true)]
async fn new_service_names_the_failure_while_it_waits() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Each("CreateLoadBalancer", "", Fault::Code("ServiceUnavailable")));
    let lb = wanted(&[(80, 30080)], &[0]);
    let mut error = aws.apply(&lb, Compare::Remembered).await.unwrap_err();
    while matches!(error, Error::Conflict(_)) {
        // EC2 shows the security group only after a moment.
        tokio::time::sleep(Duration::from_secs(1)).await;
        error = aws.apply(&lb, Compare::Remembered).await.unwrap_err();
    }
    let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
    waits_for(&outcome, "CreateLoadBalancer");
    assert_eq!(outcome.incomplete.unwrap().1, error.to_string(), "the condition does not change");
    cloud.set_faults(Faults::None);
    assert_eq!(apply(&aws, &lb, Compare::Remembered).await.unwrap().incomplete, None);
}

pub(super) fn ten_ports(nodes: &[usize]) -> LoadBalancer {
    wanted(&(0..10).map(|i| (80 + i, 30_080 + i)).collect::<Vec<_>>(), &[]).with_nodes(own_set(nodes))
}

pub(super) fn groups_with(cloud: &StandIn, target: &str) -> usize {
    (30_080..30_090).filter(|port| registered(cloud, *port).iter().any(|id| id == target)).count()
}

/// A try makes few calls that fail, however many target groups there are.
#[tokio::test(start_paused = true)]
async fn registrations_that_fail_too_are_few() {
    const ALL: &[&str] = &["CreateTargetGroup", "ModifyTargetGroup", "RegisterTargets", "DeregisterTargets"];
    for code in ["ServiceUnavailable", "AccessDenied"] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Every(ALL, Fault::Code(code)));
        changes(&cloud);
        for more in [1, 2, 3] {
            let _ = aws.apply(&with_interval(ten_ports(&[0, more]), 20), Compare::Remembered).await;
            let tried = changes(&cloud);
            assert!((1..=4).contains(&tried.len()), "{code}: {tried:?}");
            pause().await;
        }
        cloud.set_faults(Faults::None);
        apply(&aws, &with_interval(ten_ports(&[0, 1]), 20), Compare::Remembered).await.unwrap();
        assert_eq!(groups_with(&cloud, "i-1"), 10);
    }
}

/// A group whose targets AWS does not let Steerage change holds up no other one: when targets change, and when the structure does.
#[tokio::test(start_paused = true)]
async fn failing_group_holds_up_no_other() {
    for code in ["AccessDenied", "ServiceUnavailable", ""] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
        pause().await;
        let failing = [30_080, 30_083].map(|port| (port, code));
        cloud.change(|cloud| cloud.failing_groups = failing.into());
        let outcome = aws.apply(&ten_ports(&[0, 1]), Compare::Remembered).await.unwrap();
        assert_eq!(groups_with(&cloud, "i-1"), 8, "{code}: at once");
        let (reason, message) = outcome.incomplete.expect("the groups still fail");
        assert_eq!(reason, if code == "AccessDenied" { "ProviderDenied" } else { "ProviderUnavailable" });
        let told = "The targets of port 80 (TCP), port 83 (TCP) are not as wanted. ";
        assert!(message.starts_with(told) && message.contains("RegisterTargets"), "{message}");
        // The next endpoints wait for nothing, and those groups cost no call.
        let Progress::Again(after) = outcome.progress else { panic!("{:?}", outcome.progress) };
        assert!(!outcome.ingress.is_empty() && after <= Duration::from_secs(10));
        changes(&cloud);
        let next = aws.apply(&ten_ports(&[0, 1, 3]), Compare::Remembered).await.unwrap();
        assert_eq!((groups_with(&cloud, "i-3"), changes(&cloud).len()), (8, 8), "{code}");
        assert_eq!(next.incomplete, Some((reason, message)), "the condition does not change");
        pause().await;
        for _ in 0..3 {
            let _ = aws.apply(&with_interval(ten_ports(&[0, 1, 2]), 20), Compare::Remembered).await;
        }
        assert_eq!(groups_with(&cloud, "i-2"), 8, "{code}");
        cloud.change(|cloud| cloud.failing_groups.clear());
        pause().await;
        apply(&aws, &with_interval(ten_ports(&[0, 1, 2]), 20), Compare::Remembered).await.unwrap();
        assert_eq!(groups_with(&cloud, "i-2"), 10, "{code}");
    }
}

/// A group that is gone ends the use of what was known, also if another one failed before.
#[tokio::test(start_paused = true)]
async fn group_that_is_gone_ends_the_use_of_what_was_known() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("ModifyTargetGroup", "", Fault::Code("ServiceUnavailable")));
    aws.apply(&with_interval(ten_ports(&[0, 1]), 20), Compare::Remembered).await.unwrap();
    cloud.change(|cloud| {
        cloud.failing_groups = [(30_080, "ServiceUnavailable")].into();
        let gone = cloud.groups.iter().find(|(_, group)| group.port == 30_085).map(|(arn, _)| arn.clone());
        cloud.listeners.retain(|_, listener| Some(&listener.group) != gone.as_ref());
        cloud.groups.retain(|_, group| group.port != 30_085);
    });
    aws.apply(&with_interval(ten_ports(&[0, 2]), 20), Compare::Remembered).await.unwrap();
    changes(&cloud);
    let outcome = aws.apply(&with_interval(ten_ports(&[0, 3]), 20), Compare::Remembered).await.unwrap();
    assert_eq!((changes(&cloud).len(), groups_with(&cloud, "i-3")), (0, 0), "{outcome:?}");
    cloud.set_faults(Faults::None);
    cloud.change(|cloud| cloud.failing_groups.clear());
    pause().await;
    apply(&aws, &with_interval(ten_ports(&[0, 3]), 20), Compare::Remembered).await.unwrap();
    assert_eq!(groups_with(&cloud, "i-3"), 10);
}

/// Another Service of the name uses none of what its predecessor had.
#[tokio::test(start_paused = true)]
async fn successor_does_not_follow_in_groups_of_its_predecessor() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("CreateTargetGroup", "", Fault::Code("ServiceUnavailable")));
    aws.apply(&changed("CreateTargetGroup", &[0]), Compare::Remembered).await.unwrap();
    let mut next = changed("CreateTargetGroup", &[0, 1]);
    next.owner.uid = "u-next".to_owned();
    for _ in 0..3 {
        let _ = aws.apply(&next, Compare::Remembered).await;
        assert!(registered(&cloud, 30080).iter().all(|id| id == "i-0"));
    }
}

/// Each try reads all resources of the Service, also for hours.
#[tokio::test(start_paused = true)]
async fn change_that_fails_again_and_again_is_tried_more_rarely() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0, 1]));
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    for round in 0..2 {
        pause().await;
        cloud.set_faults(Faults::Each("ModifyTargetGroup", "", Fault::Code("ServiceUnavailable")));
        let changed = with_interval(lb.clone(), 20 + round);
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = waits_for(&until_failure(&aws, &changed).await, "ModifyTargetGroup");
            tokio::time::sleep(wait).await;
            waits.push(wait);
        }
        assert!(waits.is_sorted_by(|a, b| *b == *a * 2 || *b == waits[0] * 32), "{waits:?}");
        assert_eq!(waits[7], waits[0] * 32, "{waits:?}");
        cloud.set_faults(Faults::None);
        assert_eq!(apply(&aws, &changed, Compare::Remembered).await.unwrap().incomplete, None);
    }
}

/// Listeners of other groups are added, changed and deleted, and a new target group that fails gets no listener's traffic.
#[tokio::test(start_paused = true)]
async fn failing_group_holds_up_no_other_listener() {
    for code in ["AccessDenied", "ServiceUnavailable"] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        let before = wanted(&[(80, 30_080), (81, 30_081), (82, 30_082)], &[0]);
        apply(&aws, &before, Compare::Remembered).await.unwrap();
        pause().await;
        let failing = [30_080, 30_092].map(|port| (port, code));
        cloud.change(|cloud| cloud.failing_groups = failing.into());
        // Port 81 goes, 85 comes, and 82 is to lead to a group that gets no target.
        let after = wanted(&[(80, 30_080), (82, 30_092), (85, 30_085)], &[0, 1]);
        for _ in 0..4 {
            let _ = aws.apply(&after, Compare::Remembered).await;
            pause().await;
        }
        let now = served(&cloud);
        assert_eq!(now.keys().copied().collect::<Vec<_>>(), [80, 82, 85], "{code}: {now:?}");
        assert_eq!((now[&82], now[&85].1), ((30_082, 2), 2), "{code}: {now:?}");
        cloud.change(|cloud| cloud.failing_groups.clear());
        apply(&aws, &after, Compare::Remembered).await.unwrap();
        assert!(served(&cloud).values().all(|(_, count)| *count == 2), "{code}: {:?}", served(&cloud));
        assert_eq!(served(&cloud)[&82].0, 30_092);
    }
}

/// The resources are known, and the change of the check is not made yet: AWS asks nodes what those without an endpoint pass, too.
#[tokio::test(start_paused = true)]
async fn nodes_do_not_follow_before_their_check_is_changed() {
    for code in ["Throttling", "AccessDenied", "ServiceUnavailable"] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Every(&["ModifyTargetGroup", "DescribeListeners"], Fault::Code(code)));
        let lb = with_other_check(wanted(&[(80, 30080)], &[0, 1, 2]));
        for compare in [Compare::InPlace, Compare::Remembered, Compare::Remembered] {
            let _ = aws.apply(&lb, compare).await;
            assert_eq!(registered(&cloud, 30080), ["i-0"], "{code}");
            pause().await;
        }
        cloud.set_faults(Faults::None);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        assert_eq!(registered(&cloud, 30080), ["i-0", "i-1", "i-2"], "{code}");
    }
}

/// Its other ports are served and published, and the last one follows as soon as AWS takes it.
#[tokio::test(start_paused = true)]
async fn new_service_is_published_beside_a_listener_that_fails() {
    for fault in [FAULTS[0], FAULTS[2], FAULTS[3], Fault::Hang] {
        for failing in [" 80", " 81", " 82"] {
            let told = format!("{fault:?} at{failing}");
            let cloud = standin(1);
            let aws = provider(&cloud);
            cloud.set_faults(Faults::Each("CreateListener", failing, fault));
            let lb = wanted(&[(80, 30080), (81, 30081), (82, 30082)], &[0, 1]);
            let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
            assert!(!outcome.ingress.is_empty(), "{told}");
            if !matches!(fault, Fault::After) {
                let (reason, message) = outcome.incomplete.unwrap();
                assert_eq!(reason, Error::UNAVAILABLE, "{told}");
                assert!(message.contains(&format!("Not served: port{failing}.")), "{told}: {message}");
                assert_eq!(served(&cloud).len(), 2, "{told}");
            }
            cloud.set_faults(Faults::None);
            tokio::time::sleep(Duration::from_mins(6)).await;
            let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
            assert_eq!((outcome.incomplete, served(&cloud).len()), (None, 3), "{told}");
            delete(&aws, &lb.owner).await.unwrap();
            assert_empty(&cloud, &told);
        }
    }
}
