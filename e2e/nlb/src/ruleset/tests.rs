// SPDX-License-Identifier: Apache-2.0
//! Tables of routes and rules; the kernel accepts the rules; `tests/packets.rs` has packets.

use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::cloud::{Attributes, Balancer, Check, Group, Listener, TargetKind};

fn target(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 77, 1, last], 30080))
}

fn group(transports: &[Transport], targets: &[u8]) -> Group {
    Group {
        check: Check {
            path: None,
            port: None,
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(4),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        },
        attributes: Attributes::of(&BTreeMap::new(), TargetKind::Instance, transports),
        targets: targets.iter().map(|last| (format!("i-{last}"), target(*last))).collect(),
    }
}

fn listener(port: u16, transports: &[Transport], group: &str) -> Listener {
    Listener { port, transports: transports.to_vec(), group: group.to_owned() }
}

fn subnet() -> Ipv4Net {
    "10.77.200.0/24".parse().unwrap()
}

fn route(receivers: &[u8]) -> Route {
    Route {
        address: [10, 77, 200, 4].into(),
        port: 80,
        transport: Transport::Tcp,
        group: "a".to_owned(),
        receivers: receivers.iter().map(|last| target(*last)).collect(),
        is_sticky: false,
        keeps_client_address: true,
        sources: None,
    }
}

/// The rules of one chain.
fn rules(chain: &str, routes: &[Route]) -> Vec<String> {
    let text = ruleset(subnet(), routes);
    let (_, filled) = text.split_once("flush").unwrap();
    let (_, rest) = filled.split_once(&format!("chain {chain} {{\n")).unwrap();
    rest.lines().take_while(|line| *line != "\t}").map(|line| line.trim().to_owned()).collect()
}

#[test]
fn flows_are_spread_by_a_hash_over_the_receivers() {
    assert_eq!(
        rules("prerouting", &[route(&[1, 2])]),
        [
            "ip daddr 10.77.200.4 tcp dport 80 dnat ip to jhash ip saddr . tcp sport . ip daddr . tcp dport mod 2 \
          seed 0x5eed map { 0 : 10.77.1.1 . 30080, 1 : 10.77.1.2 . 30080 }"
        ]
    );
}

#[test]
fn sticky_flows_are_hashed_by_the_client_alone() {
    let route = Route { is_sticky: true, transport: Transport::Udp, ..route(&[1]) };
    assert_eq!(
        rules("prerouting", &[route]),
        [
            "ip daddr 10.77.200.4 udp dport 80 dnat ip to jhash ip saddr mod 1 seed 0x5eed map { 0 : 10.77.1.1 . 30080 }"
        ]
    );
}

#[test]
fn listener_without_receivers_is_silent() {
    assert!(rules("prerouting", &[route(&[])]).is_empty());
    assert_eq!(rules("forward", &[]), ["ip daddr 10.77.200.0/24 drop"]);
}

#[test]
fn other_sources_are_dropped_before_they_are_forwarded() {
    let sources = |texts: &[&str]| Some(texts.iter().map(|text| text.parse().unwrap()).collect());
    let fenced = Route { sources: sources(&["10.78.1.2/32", "192.0.2.0/24"]), ..route(&[1]) };
    let found = rules("prerouting", &[fenced]);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0], "ip daddr 10.77.200.4 tcp dport 80 ip saddr != { 10.78.1.2/32, 192.0.2.0/24 } drop");
    let closed = Route { sources: sources(&[]), ..route(&[1]) };
    assert_eq!(rules("prerouting", &[closed])[0], "ip daddr 10.77.200.4 tcp dport 80 drop");
}

#[test]
fn only_listeners_that_hide_the_client_are_masqueraded() {
    let hiding = Route { keeps_client_address: false, port: 81, ..route(&[1]) };
    assert_eq!(
        rules("postrouting", &[route(&[1]), hiding]),
        ["meta l4proto tcp ct original ip daddr 10.77.200.4 ct original proto-dst 81 masquerade"]
    );
}

#[test]
fn routes_follow_listeners_groups_and_health() {
    let both = [Transport::Tcp, Transport::Udp];
    let mut hiding = group(&[Transport::Tcp], &[2]);
    hiding.attributes.keeps_client_address = false;
    let cloud = Cloud {
        balancers: vec![
            Balancer {
                hostname: "web".to_owned(),
                admitted: None,
                listeners: vec![
                    listener(81, &[Transport::Tcp], "b"),
                    listener(80, &both, "a"),
                    listener(82, &[Transport::Tcp], "deleted"),
                    // TLS
                    listener(443, &[], "b"),
                ],
            },
            Balancer {
                hostname: "new".to_owned(),
                admitted: None,
                listeners: vec![listener(80, &both, "a")],
            },
        ],
        groups: [("a".to_owned(), group(&both, &[1, 2])), ("b".to_owned(), hiding)].into(),
    };
    let mut addresses = Addresses::new(subnet());
    addresses.update(["web"]);
    let mut health = Health::default();
    health.sync(&cloud.used_groups(), Duration::ZERO);
    health.record(&cloud.used_groups(), &("a".to_owned(), "i-2".to_owned()), true, Duration::ZERO);
    let udp = Route { transport: Transport::Udp, ..route(&[2]) };
    let hidden = Route { port: 81, group: "b".to_owned(), keeps_client_address: false, ..route(&[2]) };
    assert_eq!(routes(&cloud, &health, &addresses), [route(&[2]), udp, hidden]);
}

#[test]
fn flows_of_a_listener_end_with_it_and_not_with_a_change() {
    let other = Route { port: 81, ..route(&[1]) };
    let before = [route(&[1]), other];
    let gone = Ended { address: before[1].address, port: 81, transport: Transport::Tcp, target: None };
    assert_eq!(ended(&before, &[route(&[2])], &[]), [gone]);
    assert_eq!(ended(&before, &before, &[]), []);
}

#[test]
fn flows_to_a_released_target_end_where_its_group_is_used() {
    let other = Route { port: 81, group: "b".to_owned(), ..route(&[1]) };
    let routes = [route(&[2]), Route { transport: Transport::Udp, ..route(&[2]) }, other];
    let released = [Released { group: "a".to_owned(), target: target(1) }];
    let found = ended(&routes, &routes, &released);
    let flows =
        |transport| Ended { address: routes[0].address, port: 80, transport, target: Some(target(1)) };
    assert_eq!(found, [flows(Transport::Tcp), flows(Transport::Udp)]);
}
