// SPDX-License-Identifier: Apache-2.0
//! Tables of a target's life.

use std::time::Duration;

use super::*;
use crate::cloud::{Attributes, Balancer, Group, Listener, Transport};

const GROUP: &str = "arn:group";

fn address(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 77, 1, last], 30080))
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn group(targets: &[u8]) -> Group {
    Group {
        check: Check {
            path: Some("/healthz".to_owned()),
            port: Some(10256),
            interval: seconds(5),
            timeout: seconds(4),
            healthy_threshold: 3,
            unhealthy_threshold: 2,
        },
        attributes: Attributes {
            keeps_client_address: true,
            is_sticky: false,
            deregistration_delay: seconds(300),
            ends_flows_after_delay: false,
            unhealthy_flows_end_after: None,
        },
        targets: targets.iter().map(|last| (format!("i-{last}"), address(*last))).collect(),
    }
}

fn cloud_of(group: Group) -> Cloud {
    let listener = Listener { port: 80, transports: vec![Transport::Tcp], group: GROUP.to_owned() };
    Cloud {
        balancers: vec![Balancer { hostname: "web".to_owned(), admitted: None, listeners: vec![listener] }],
        groups: [(GROUP.to_owned(), group)].into(),
    }
}

fn cloud(targets: &[u8]) -> Cloud {
    cloud_of(group(targets))
}

fn key(last: u8) -> Key {
    (GROUP.to_owned(), format!("i-{last}"))
}

/// A target of which these results are known.
fn judged(cloud: &Cloud, results: &[(u8, bool)]) -> Health {
    let mut health = Health::default();
    assert_eq!(health.sync(&cloud.used_groups(), seconds(0)), []);
    for (last, has_passed) in results {
        health.record(&cloud.used_groups(), &key(*last), *has_passed, seconds(0));
    }
    health
}

fn state(health: &Health, cloud: &Cloud, last: u8) -> String {
    health.states(cloud)[GROUP][&format!("i-{last}")].0.clone()
}

#[test]
fn state_follows_results_and_thresholds() {
    let cloud = cloud(&[1]);
    for (results, expected) in [
        (&[][..], "initial"),
        (&[true], "healthy"),
        (&[false], "initial"),
        (&[false, true], "healthy"),
        (&[false, false], "unhealthy"),
        (&[true, false], "healthy"),
        (&[true, false, true, false], "healthy"),
        (&[true, false, false], "unhealthy"),
        (&[false, false, true, true], "unhealthy"),
        (&[false, false, true, true, false, true], "unhealthy"),
        (&[false, false, true, true, true], "healthy"),
    ] {
        let results: Vec<_> = results.iter().map(|has_passed| (1, *has_passed)).collect();
        assert_eq!(state(&judged(&cloud, &results), &cloud, 1), expected, "{results:?}");
    }
}

#[test]
fn only_healthy_targets_get_flows_and_all_if_none_is() {
    let cloud = cloud(&[1, 2, 3]);
    let receivers = |results: &[(u8, bool)]| judged(&cloud, results).receivers(GROUP);
    let all = [address(1), address(2), address(3)];
    assert_eq!(receivers(&[]), all, "none was checked yet");
    assert_eq!(receivers(&[(2, true)]), [address(2)], "a new target waits for its first check");
    assert_eq!(receivers(&[(1, true), (2, true), (2, false), (2, false)]), [address(1)]);
    assert_eq!(receivers(&[(1, true), (1, false), (1, false)]), all, "fail open");
}

#[test]
fn checks_are_due_at_once_and_then_every_interval() {
    let cloud = cloud(&[1]);
    let mut health = judged(&cloud, &[]);
    let first = health.due(&cloud.used_groups(), seconds(0));
    assert_eq!(first.len(), 1);
    assert_eq!((first[0].key.clone(), first[0].address.port()), (key(1), 10256));
    for (at, due) in [(0, 0), (4, 0), (5, 1), (6, 0), (12, 1), (16, 0), (17, 1)] {
        assert_eq!(health.due(&cloud.used_groups(), seconds(at)).len(), due, "at {at} s");
    }
}

#[test]
fn group_without_listener_is_not_checked_and_unused() {
    let mut cloud = cloud(&[1]);
    cloud.balancers.clear();
    let mut health = judged(&cloud, &[]);
    assert_eq!(health.due(&cloud.used_groups(), seconds(9)), []);
    assert_eq!(state(&health, &cloud, 1), "unused");
    assert_eq!(health.receivers(GROUP), []);
}

#[test]
fn deregistered_target_drains_and_gets_nothing_new() {
    let before = cloud(&[1, 2]);
    let mut health = judged(&before, &[(1, true), (2, true)]);
    let after = cloud(&[2]);
    assert_eq!(health.sync(&after.used_groups(), seconds(10)), []);
    assert_eq!((state(&health, &after, 1).as_str(), health.receivers(GROUP)), ("draining", vec![address(2)]));
    assert_eq!(health.due(&after.used_groups(), seconds(10)).len(), 1, "a draining target is not checked");
    health.record(&after.used_groups(), &key(1), false, seconds(11));
    assert_eq!(health.sync(&after.used_groups(), seconds(309)), []);
    assert_eq!(state(&health, &after, 1), "draining");
    assert_eq!(health.sync(&after.used_groups(), seconds(310)), [], "flows stay by AWS's default");
    assert!(!health.states(&after)[GROUP].contains_key("i-1"));
}

#[test]
fn last_target_drains_too() {
    let mut health = judged(&cloud(&[1]), &[(1, true)]);
    health.sync(&cloud(&[]).used_groups(), seconds(1));
    assert_eq!(health.receivers(GROUP), []);
}

#[test]
fn target_that_is_registered_again_begins_anew() {
    let registered = cloud(&[1]);
    let mut health = judged(&registered, &[(1, true)]);
    health.sync(&cloud(&[]).used_groups(), seconds(1));
    health.sync(&registered.used_groups(), seconds(2));
    assert_eq!(state(&health, &registered, 1), "initial");
    assert_eq!(health.due(&registered.used_groups(), seconds(2)).len(), 1);
}

#[test]
fn flows_end_after_the_delay_if_the_attribute_says_so() {
    let with = |targets: &[u8]| {
        let mut group = group(targets);
        group.attributes.ends_flows_after_delay = true;
        group.attributes.deregistration_delay = seconds(7);
        cloud_of(group)
    };
    let mut health = judged(&with(&[1]), &[(1, true)]);
    assert_eq!(health.sync(&with(&[]).used_groups(), seconds(1)), []);
    assert_eq!(health.sync(&with(&[]).used_groups(), seconds(7)), []);
    let released = Released { group: GROUP.to_owned(), target: address(1) };
    assert_eq!(health.sync(&with(&[]).used_groups(), seconds(8)), [released]);
    assert_eq!(health.sync(&with(&[]).used_groups(), seconds(9)), []);
}

#[test]
fn flows_of_an_unhealthy_target_end_when_the_attributes_say_so() {
    let released = Released { group: GROUP.to_owned(), target: address(1) };
    for (after, states) in [
        (None, [("unhealthy", false), ("unhealthy", false), ("unhealthy", false)]),
        (Some(0), [("unhealthy", true), ("unhealthy", false), ("unhealthy", false)]),
        (Some(7), [("unhealthy.draining", false), ("unhealthy", true), ("unhealthy", false)]),
    ] {
        let mut group = group(&[1, 2]);
        group.attributes.unhealthy_flows_end_after = after.map(seconds);
        let cloud = cloud_of(group);
        let mut health = judged(&cloud, &[(1, true), (2, true), (1, false), (1, false)]);
        for (at, (expected, ends)) in [1, 7, 8].into_iter().zip(states) {
            assert_eq!(
                health.sync(&cloud.used_groups(), seconds(at)),
                if ends { vec![released.clone()] } else { vec![] },
                "{after:?}, {at} s"
            );
            assert_eq!(state(&health, &cloud, 1), expected, "{after:?}, {at} s");
            assert_eq!(health.receivers(GROUP), [address(2)], "{after:?}, {at} s");
        }
    }
}

#[test]
fn target_that_recovers_in_time_keeps_its_flows() {
    let mut group = group(&[1]);
    group.attributes.unhealthy_flows_end_after = Some(seconds(7));
    let cloud = cloud_of(group);
    let mut health = judged(&cloud, &[(1, true), (1, false), (1, false), (1, true), (1, true), (1, true)]);
    assert_eq!(health.sync(&cloud.used_groups(), seconds(8)), []);
    assert_eq!(state(&health, &cloud, 1), "healthy");
}

#[test]
fn deleted_group_is_forgotten() {
    let mut health = judged(&cloud(&[1]), &[(1, true)]);
    let nothing = Cloud::default();
    assert_eq!(health.sync(&nothing.used_groups(), seconds(1)), []);
    assert!(health.states(&nothing).is_empty());
    health.record(&nothing.used_groups(), &key(1), true, seconds(1));
    assert!(health.states(&nothing).is_empty());
}
