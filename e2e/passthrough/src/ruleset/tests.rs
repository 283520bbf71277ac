// SPDX-License-Identifier: Apache-2.0
//! Tables of routes and rules; `tests/packets.rs` has packets.

use std::time::Duration;

use steerage_nlb::cloud::{Attributes, Check, Group};

use super::*;
use crate::cloud::{Pool, Rule};

const VIP: &str = "198.18.0.7";

fn vip() -> IpAddr {
    VIP.parse().unwrap()
}

fn target(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 77, 1, last], 0))
}

fn route(targets: &[(u32, u32)]) -> Route {
    Route {
        vip: vip(),
        transport: Transport::Tcp,
        ports: vec![80..=80],
        pool: "web".to_owned(),
        affinity: Affinity::Flow,
        targets: targets.to_vec(),
    }
}

fn cloud(targets: &[u8], rule: Rule) -> Cloud {
    let group = Group {
        check: Check {
            path: None,
            port: Some(10256),
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(4),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        },
        attributes: Attributes {
            keeps_client_address: true,
            is_sticky: false,
            deregistration_delay: Duration::ZERO,
            ends_flows_after_delay: true,
            unhealthy_flows_end_after: None,
        },
        targets: targets.iter().map(|last| (format!("n{last}"), target(*last))).collect(),
    };
    let pool = Pool { group, checked_at: None, prober: [35, 191, 0, 1].into() };
    Cloud { rules: vec![rule], pools: [("web".to_owned(), pool)].into(), filters: Vec::new() }
}

fn rule() -> Rule {
    Rule {
        vip: vip(),
        transport: Transport::Tcp,
        ports: vec![80..=80],
        pool: "web".to_owned(),
        affinity: Affinity::Flow,
        is_weighted: false,
        fails_open: true,
    }
}

fn key(last: u8) -> Key {
    ("web".to_owned(), format!("n{last}"))
}

/// The health of targets, of which these passed a check.
fn judged(cloud: &Cloud, passed: &[u8]) -> Health {
    let mut health = Health::default();
    health.sync(&cloud.groups(), Duration::ZERO);
    for last in passed {
        health.record(&cloud.groups(), &key(*last), true, Duration::ZERO);
    }
    health
}

/// The rules of one chain.
fn rules(chain: &str, filters: &[Filter], routes: &[Route]) -> Vec<String> {
    let vips = ["198.18.0.0/16", "fd79::/64"].map(|range| range.parse().unwrap());
    let text = ruleset(&vips, "nodes", filters, routes);
    let (_, filled) = text.split_once("flush").unwrap();
    let (_, rest) = filled.split_once(&format!("chain {chain} {{\n")).unwrap();
    rest.lines().take_while(|line| *line != "\t}").map(|line| line.trim().to_owned()).collect()
}

#[test]
fn flows_get_the_marks_of_healthy_targets() {
    let cloud = cloud(&[1, 2, 3], rule());
    let mut marks = Marks::default();
    let mut found = |passed: &[u8]| {
        routes(&cloud, &judged(&cloud, passed), &BTreeMap::new(), &mut marks).remove(0).targets
    };
    assert_eq!(found(&[1, 3]), [(1, 1), (2, 1)]);
    assert_eq!(found(&[3]), [(2, 1)], "a target keeps its mark");
    assert_eq!(found(&[]).len(), 3, "all if none is healthy");
}

#[test]
fn rule_that_fails_closed_forwards_nothing_without_a_healthy_target() {
    let cloud = cloud(&[1, 2], Rule { fails_open: false, ..rule() });
    let mut marks = Marks::default();
    let none = routes(&cloud, &judged(&cloud, &[]), &BTreeMap::new(), &mut marks);
    assert_eq!(none[0].targets, []);
    assert_eq!(rules("balance", &[], &none), ["ip daddr 198.18.0.7 jump admit"]);
    let one = routes(&cloud, &judged(&cloud, &[2]), &BTreeMap::new(), &mut marks);
    assert_eq!(one[0].targets, [(1, 1)]);
}

#[test]
fn weights_are_those_that_targets_answered() {
    let cloud = cloud(&[1, 2, 3], Rule { is_weighted: true, ..rule() });
    let mut marks = Marks::default();
    let health = judged(&cloud, &[1, 2, 3]);
    let mut found = |weights: &[(u8, u32)]| {
        let weights = weights.iter().map(|(last, weight)| (key(*last), *weight)).collect();
        routes(&cloud, &health, &weights, &mut marks).remove(0).targets
    };
    assert_eq!(found(&[(1, 2), (2, 0), (3, 5)]), [(1, 2), (2, 5)], "the second gets nothing");
    assert_eq!(found(&[(1, 0)]).len(), 3, "all are equal if all weigh nothing");
}

#[test]
fn flows_are_spread_by_a_hash_in_proportion_to_weights() {
    let two = Route { ports: vec![80..=80, 90..=99], ..route(&[(1, 2), (7, 1)]) };
    assert_eq!(
        rules("balance", &[], &[two]),
        [
            "ip daddr 198.18.0.7 jump admit",
            "ip daddr 198.18.0.7 tcp dport { 80, 90-99 } ct mark set jhash ip saddr . tcp sport . ip daddr . tcp dport mod 3 \
             seed 0x5eed map { 0-1 : 1, 2 : 7 }",
        ]
    );
    let of_client = Route {
        vip: "fd79::8000:0:0".parse().unwrap(),
        transport: Transport::Udp,
        affinity: Affinity::Client,
        ..route(&[(1, 1)])
    };
    assert_eq!(
        rules("balance", &[], &[of_client])[1],
        "ip6 daddr fd79::8000:0:0 udp dport { 80 } ct mark set jhash ip6 saddr mod 1 seed 0x5eed map { 0 : 1 }"
    );
}

#[test]
fn what_no_filter_admits_is_dropped() {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    let clients = Filter {
        allows: true,
        sources: nets(&["10.78.1.1/32", "192.0.2.0/24"]),
        destinations: nets(&["198.18.0.7/32"]),
        transport: Some(Transport::Tcp),
        ports: vec![80..=80, 90..=99],
    };
    let all = Filter { allows: false, transport: Some(Transport::Udp), ..Filter::default() };
    assert_eq!(
        rules("admit", &[clients, all, Filter { allows: true, ..Filter::default() }], &[]),
        [
            "meta nfproto ipv4 ip saddr { 10.78.1.1/32, 192.0.2.0/24 } ip daddr { 198.18.0.7/32 } tcp dport { 80, 90-99 } return",
            "meta nfproto ipv4 meta l4proto udp drop",
            "meta nfproto ipv6 meta l4proto udp drop",
            "meta nfproto ipv4 return",
            "meta nfproto ipv6 return",
            "drop",
        ]
    );
}

#[test]
fn vips_are_reached_from_outside_only_and_by_a_mark() {
    assert_eq!(
        rules("steer", &[], &[]),
        [
            "iifname != \"nodes\" ct state new ct mark 0 jump balance",
            "iifname != \"nodes\" ct direction original ct mark != 0 meta mark set ct mark",
            "ip daddr { 198.18.0.0/16 } meta mark 0 drop",
            "ip6 daddr { fd79::/64 } meta mark 0 drop",
        ]
    );
}

#[test]
fn flows_end_with_their_port_and_not_with_a_change_of_targets() {
    let mut marks = Marks::default();
    let before = [Route { ports: vec![80..=80, 81..=81], ..route(&[(1, 1)]) }];
    let mut of = |after: &[Route]| ended(&before, after, &[], &mut marks);
    assert_eq!(of(&[Route { targets: Vec::new(), ..before[0].clone() }]), []);
    assert_eq!(of(&[Route { ports: vec![0..=65535], ..before[0].clone() }]), [], "a range has the ports");
    let flows = |kept| Ended { vip: vip(), transport: Transport::Tcp, kept, mark: None };
    assert_eq!(of(&[route(&[(1, 1)])]), [flows(vec![80..=80])], "one port is gone");
    assert_eq!(of(&[Route { transport: Transport::Udp, ..before[0].clone() }]), [flows(Vec::new())]);
}

#[test]
fn flows_to_a_released_target_end_where_its_pool_is_used() {
    let mut marks = Marks::default();
    marks.of(target(9).ip());
    let other = Route { pool: "other".to_owned(), transport: Transport::Udp, ..route(&[(1, 1)]) };
    let routes = [route(&[(1, 1)]), other];
    let released = [Released { group: "web".to_owned(), target: target(1) }];
    let found = ended(&routes, &routes, &released, &mut marks);
    assert_eq!(found, [Ended { vip: vip(), transport: Transport::Tcp, kept: Vec::new(), mark: Some(2) }]);
}
