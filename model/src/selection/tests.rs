// SPDX-License-Identifier: Apache-2.0
//! Tables of endpoint states and the expected selection.

use std::net::IpAddr;

use super::*;
use crate::{EndpointPort, Hints, Key};

/// An endpoint from a letter: `R`eady, `T`erminating and serving, `X` terminating and not serving, `U`nready.
fn endpoint(last: u8, state: char, node: Option<&str>) -> Endpoint {
    Endpoint {
        addr: IpAddr::from([10, 0, 0, last]),
        node: node.map(Into::into),
        zone: None,
        ready: state == 'R',
        serving: matches!(state, 'R' | 'T'),
        terminating: matches!(state, 'T' | 'X'),
        hints: None,
        unready_pod: None,
    }
}

fn slice(name: &str, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        ports: [EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }].into(),
        endpoints,
        ..EndpointSlice::new(Key::new("ns", name), Key::new("ns", "svc"), Family::V4)
    }
}

/// State and node of one endpoint.
type EndpointState<'a> = (char, Option<&'a str>);
/// Endpoints, and the nodes that they make members, with their counts.
type Membership<'a> = (&'a [EndpointState<'a>], &'a [(&'a str, u32)]);
/// Endpoints, and the last octets of the cluster list and of the local list of node a.
type Lists<'a> = (&'a [EndpointState<'a>], &'a [u8], &'a [u8]);

fn of(states: &[EndpointState<'_>]) -> EndpointSlice {
    let endpoints = states.iter().zip(1..).map(|(&(state, node), last)| endpoint(last, state, node));
    slice("a", endpoints.collect())
}

#[test]
fn membership_follows_ready_endpoints_and_falls_back_to_terminating_ones() {
    let (a, b) = (Some("a"), Some("b"));
    let cases: &[Membership<'_>] = &[
        (&[], &[]),
        (&[('R', a), ('R', a), ('R', b)], &[("a", 2), ("b", 1)]),
        (&[('R', a), ('T', b)], &[("a", 1)]),
        (&[('T', a), ('X', b)], &[("a", 1)]),
        (&[('U', a), ('X', b)], &[]),
        (&[('R', None), ('T', a)], &[]),
    ];
    for (states, expected) in cases {
        let slice = of(states);
        let got: Vec<_> = membership([&slice].into_iter()).into_iter().collect();
        assert_eq!(&got, expected, "{states:?}");
    }
}

#[test]
fn membership_counts_a_dual_stack_pod_once() {
    let v4 = of(&[('R', Some("a"))]);
    let mut v6 = of(&[('R', Some("a"))]);
    v6.family = Family::V6;
    v6.endpoints[0].addr = "fd00::1".parse().unwrap();
    assert_eq!(membership([&v4, &v6].into_iter()), BTreeMap::from([("a", 1)]));
}

#[test]
fn duplicate_address_prefers_the_endpoint_that_is_not_terminating() {
    let (dying, living) =
        (slice("a", vec![endpoint(1, 'T', Some("a"))]), slice("b", vec![endpoint(1, 'R', Some("a"))]));
    for slices in [[&dying, &living], [&living, &dying]] {
        let found = backends(slices.into_iter(), Family::V4, "http", Protocol::Tcp);
        assert_eq!(found.len(), 1);
        assert!(found[0].endpoint.ready);
    }
}

#[test]
fn backends_match_name_protocol_and_family() {
    let one = of(&[('R', Some("a"))]);
    let count = |family, name, protocol| backends([&one].into_iter(), family, name, protocol).len();
    assert_eq!(count(Family::V4, "http", Protocol::Tcp), 1);
    assert_eq!(count(Family::V6, "http", Protocol::Tcp), 0);
    assert_eq!(count(Family::V4, "dns", Protocol::Tcp), 0);
    assert_eq!(count(Family::V4, "http", Protocol::Udp), 0);
}

#[test]
fn named_port_has_the_number_of_each_slice() {
    let http = |port| [EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port }].into();
    let other = EndpointSlice { ports: http(9090), ..slice("b", vec![endpoint(2, 'R', Some("a"))]) };
    let none = EndpointSlice { ports: http(0), ..slice("c", vec![endpoint(3, 'R', Some("a"))]) };
    let one = slice("a", vec![endpoint(1, 'R', Some("a"))]);
    let found = backends([&one, &other, &none].into_iter(), Family::V4, "http", Protocol::Tcp);
    let found: Vec<_> = found.iter().map(|b| (b.endpoint.addr.to_string(), b.port)).collect();
    assert_eq!(found, [("10.0.0.1".to_owned(), 8080), ("10.0.0.2".to_owned(), 9090)]);
}

#[test]
fn forwarding_lists_fall_back_independently() {
    let (a, b) = (Some("a"), Some("b"));
    let cases: &[Lists<'_>] = &[
        (&[('R', a), ('R', b)], &[1, 2], &[1]),
        (&[('T', a), ('R', b)], &[2], &[1]),
        (&[('T', a), ('T', b)], &[1, 2], &[1]),
        (&[('U', a), ('R', b)], &[2], &[]),
        (&[('X', a), ('T', b)], &[2], &[]),
        (&[('U', a), ('X', b)], &[], &[]),
        (&[('R', None)], &[1], &[]),
    ];
    let octets = |list: &[Backend<'_>]| -> Vec<u8> {
        list.iter().map(|b| if let IpAddr::V4(v4) = b.endpoint.addr { v4.octets()[3] } else { 0 }).collect()
    };
    for (states, cluster, local) in cases {
        let one = of(states);
        let all = backends([&one].into_iter(), Family::V4, "http", Protocol::Tcp);
        assert_eq!(&octets(&cluster_backends(&all, "a", None)), cluster, "{states:?}");
        assert_eq!(&octets(&local_backends(&all, "a")), local, "{states:?}");
    }
}

#[test]
fn hints_apply_only_when_all_ready_endpoints_have_them_and_one_matches() {
    let hinted = |zones: [&str; 2], nodes: [&str; 2]| {
        let mut one = of(&[('R', Some("a")), ('R', Some("b"))]);
        for (endpoint, (zone, node)) in one.endpoints.iter_mut().zip(zones.into_iter().zip(nodes)) {
            let list = |s: &str| if s.is_empty() { vec![] } else { vec![s.into()] };
            endpoint.hints = Some(Box::new(Hints { zones: list(zone), nodes: list(node) }));
        }
        one
    };
    let cases = [
        (["z1", "z2"], ["", ""], 1),
        (["z1", ""], ["", ""], 2),
        (["z2", "z3"], ["", ""], 2),
        (["z2", "z1"], ["a", "b"], 1),
        (["z2", "z3"], ["b", "c"], 2),
    ];
    for (zones, nodes, expected) in cases {
        let one = hinted(zones, nodes);
        let all = backends([&one].into_iter(), Family::V4, "http", Protocol::Tcp);
        assert_eq!(cluster_backends(&all, "a", Some("z1")).len(), expected, "{zones:?} {nodes:?}");
    }
}

#[test]
fn hints_never_limit_local_backends() {
    let mut one = of(&[('R', Some("a")), ('R', Some("a")), ('R', Some("b"))]);
    for (endpoint, zone) in one.endpoints.iter_mut().zip(["z2", "z2", "z1"]) {
        endpoint.hints = Some(Box::new(Hints { nodes: vec!["b".into()], zones: vec![zone.into()] }));
    }
    let all = backends([&one].into_iter(), Family::V4, "http", Protocol::Tcp);
    assert_eq!(local_backends(&all, "a").len(), 2);
    assert_eq!(cluster_backends(&all, "a", Some("z1")).len(), 1, "by zone: none is for this node");
    assert_eq!(cluster_backends(&all, "b", Some("z2")).len(), 3, "by node, before the zone");
}

#[test]
fn health_counts_distinct_ready_addresses_of_the_node() {
    let mut one = of(&[('R', Some("a")), ('R', Some("a")), ('T', Some("a")), ('R', Some("b"))]);
    let https = EndpointPort { name: "https".into(), protocol: Protocol::Tcp, port: 8443 };
    one.ports = one.ports.to_vec().into_iter().chain([https]).collect();
    let again = slice("b", one.endpoints.clone());
    assert_eq!(local_ready_count([&one, &again].into_iter(), Family::V4, "a"), 2);
    assert_eq!(local_ready_count([&one].into_iter(), Family::V6, "a"), 0);
}

#[test]
fn endpoints_of_the_lowest_rank_are_kept() {
    let one = slice("a", (1..=5).map(|n| endpoint(n, 'R', Some("a"))).collect());
    let other = slice("b", (6..=9).map(|n| endpoint(n, 'R', Some("b"))).collect());
    let all = [&one, &other];
    let ports = [("http", Protocol::Tcp)];
    let found_by = |slices: &SlicePorts<'_>| -> Vec<IpAddr> {
        slices.backends("http", Protocol::Tcp).iter().map(|b| b.endpoint.addr).collect()
    };
    let addresses = |of: &[u8]| -> Vec<IpAddr> { of.iter().map(|n| endpoint(*n, 'R', None).addr).collect() };
    let rank = |endpoint: &Endpoint| std::cmp::Reverse(endpoint.addr);
    for (most, left_out, found) in
        [(9, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9][..]), (3, 6, &[7, 8, 9]), (0, 8, &[9])]
    {
        let mut slices = SlicePorts::new(all.into_iter(), Family::V4);
        assert_eq!(slices.keep(&ports, most, rank, |_| false, |_| true), left_out);
        assert_eq!(found_by(&slices), addresses(found), "{most}");
    }
    // One of some stays in any case, and only those of the other node count.
    let mut slices = SlicePorts::new(all.into_iter(), Family::V4);
    let is_low = |endpoint: &Endpoint| endpoint.addr <= addresses(&[3])[0];
    assert_eq!(slices.keep(&ports, 3, rank, is_low, |endpoint| endpoint.is_on("b")), 2);
    assert_eq!(found_by(&slices), addresses(&[3, 8, 9]));
}

/// Endpoints count as often as they are looked at: once for each port that their slice has.
#[test]
fn endpoints_of_few_ports_take_less_room() {
    let port = |n: usize| EndpointPort { name: n.to_string(), protocol: Protocol::Tcp, port: 80 };
    let of_ports =
        |name: &str, ports: std::ops::Range<usize>, endpoints: std::ops::Range<u8>| EndpointSlice {
            ports: ports.map(port).collect(),
            ..slice(name, endpoints.map(|n| endpoint(n, 'R', Some("a"))).collect())
        };
    let (many, one) = (of_ports("a", 0..10, 1..6), of_ports("b", 10..11, 10..20));
    let names: Vec<_> = (0..11).map(|n| n.to_string()).collect();
    let ports: Vec<_> = names.iter().map(|name| (name.as_str(), Protocol::Tcp)).collect();
    for (most, left_out, found) in [(60, 0, [5, 10]), (59, 1, [5, 9]), (32, 28, [3, 2]), (0, 49, [1, 1])] {
        let mut slices = SlicePorts::new([&many, &one].into_iter(), Family::V4);
        let rank = |endpoint: &Endpoint| endpoint.addr;
        assert_eq!(slices.keep(&ports, most, rank, |_| false, |_| true), left_out, "{most}");
        let count = |port: &str| slices.backends(port, Protocol::Tcp).len();
        assert_eq!([count("3"), count("10")], found, "{most}");
    }
}
