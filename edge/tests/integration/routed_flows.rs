// SPDX-License-Identifier: Apache-2.0
//! A router spreads connections over two edge hosts and moves them when one leaves or returns, after the slots of nearly all of them have
//! moved.

use std::time::Duration;

use steerage_requirements::requires;

use crate::routes::{is_spread_over, routed_with, two_hosts_of};
use crate::testbed::bird::Bird;
use crate::testbed::net::Load;
use crate::testbed::{TestBed, eventually, sh};

/// Long connections, so many that each host has some.
const LONG: usize = 60;
const EXCEPTIONS: &str = "steerage_edge_flow_exceptions";
const RECEIVED: &str = "steerage_edge_flow_exceptions_received_total";

fn number(testbed: &TestBed, edge: usize, metric: &str) -> usize {
    testbed.metric(edge, metric).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The client's connections to VIPs.
fn long_connections(testbed: &TestBed) -> usize {
    let client = testbed.client();
    sh(&format!("ip netns exec {client} ss -Htn state established dport = :80")).lines().count()
}

/// Two hosts with long connections to eight nodes, and then a ninth one.
fn moved_slots(has_exchange: bool) -> (TestBed, [Bird; 3], Load) {
    let mut testbed = routed_with(2, 9);
    testbed.has_exchange = has_exchange;
    let nodes: Vec<_> = (0..9).collect();
    testbed.apply_load_balancer(&nodes[..8], |_| {});
    let (testbed, birds) = two_hosts_of(testbed, &nodes[..8], false);
    if has_exchange {
        eventually("the hosts are connected", || {
            [0, 1].iter().all(|host| number(&testbed, *host, "steerage_edge_flow_peers") == 1)
        });
    }
    let load = Load::start(&testbed.client(), LONG);
    eventually("the long connections are open", || long_connections(&testbed) >= LONG);
    testbed.apply_load_balancer(&nodes, |_| {});
    testbed.wait_until_served_by(&nodes);
    if has_exchange {
        eventually("flows are told", || {
            [EXCEPTIONS, RECEIVED].iter().all(|metric| {
                let of_hosts = [0, 1].map(|host| number(&testbed, host, metric));
                of_hosts.into_iter().sum::<usize>() > LONG / 8
            })
        });
        // The slots of each family move when a node has passed its check there.
        std::thread::sleep(Duration::from_secs(5));
    }
    (testbed, birds, load)
}

/// Lets a host leave and return, and then the other one. The first of them does not answer for the VIPs on the link.
fn leave_in_turn(testbed: &mut TestBed, mut leave: impl FnMut(&mut TestBed, usize)) {
    for edge in [1, 0] {
        leave(testbed, edge);
        let other = u8::from(edge == 0);
        eventually("the router uses the other host", || is_spread_over(testbed, &[other]));
        std::thread::sleep(Duration::from_secs(3));
        testbed.start_ready(edge);
        eventually("the router uses both hosts", || is_spread_over(testbed, &[0, 1]));
        std::thread::sleep(Duration::from_secs(3));
    }
}

#[test]
fn connections_survive_when_routers_move_them_as_hosts_end_and_return() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"), Program("bird"));
    let (mut testbed, _birds, load) = moved_slots(true);
    leave_in_turn(&mut testbed, |testbed, edge| {
        assert!(testbed.terminate(edge));
        // A machine that starts anew: it has no flow of its own.
        testbed.clean_up(edge);
    });
    load.stop("SIGTERM and the return of each of two hosts that a router uses, after slots have moved");
}

#[test]
fn connections_survive_when_routers_move_them_from_killed_hosts() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"), Program("bird"));
    let (mut testbed, _birds, load) = moved_slots(true);
    leave_in_turn(&mut testbed, TestBed::kill);
    load.stop("kill -9 and the return of each of two hosts that a router uses, after slots have moved");
}

/// What the tests above protect from.
#[test]
fn connections_break_without_the_exchange_when_routers_move_them() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"), Program("bird"));
    let (mut testbed, _birds, load) = moved_slots(false);
    assert!(testbed.terminate(1));
    std::thread::sleep(Duration::from_secs(2));
    let (_, failed) = load.finish();
    assert!(failed.iter().any(|failure| failure.contains("a long one")), "{failed:?}");
}
