// SPDX-License-Identifier: Apache-2.0
//! Edge hosts tell each other the flows that stay on a node although their slots have moved.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use steerage_requirements::requires;

use crate::testbed::net::Load;
use crate::testbed::{TestBed, eventually, sh};

/// Long connections.
const LONG: usize = 60;
const EXCEPTIONS: &str = "steerage_edge_flow_exceptions";
const RECEIVED: &str = "steerage_edge_flow_exceptions_received_total";
const PEERS: &str = "steerage_edge_flow_peers";

fn number(testbed: &TestBed, edge: usize, metric: &str) -> usize {
    testbed.metric(edge, metric).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Two hosts and eight of nine nodes. Returns the active host, the other one, and what becomes of long connections.
fn eight_nodes(has_exchange: bool) -> (TestBed, [usize; 2], Load) {
    let mut testbed = TestBed::new(2, 9);
    testbed.has_exchange = has_exchange;
    let nodes: Vec<_> = (0..8).collect();
    testbed.apply_load_balancer(&nodes, |_| {});
    testbed.start_ready(0);
    testbed.start_ready(1);
    testbed.wait_until_served_by(&nodes);
    eventually("one host is active", || testbed.has_vips(0) != testbed.has_vips(1));
    let hosts = if testbed.has_vips(0) { [0, 1] } else { [1, 0] };
    if has_exchange {
        eventually("the hosts are connected", || {
            hosts.iter().all(|host| number(&testbed, *host, PEERS) == 1)
        });
    }
    let load = Load::start(&testbed.client(), LONG);
    // All but a few slots move.
    eventually("the long connections are open", || long_connections(&testbed) >= LONG);
    let nodes: Vec<_> = (0..9).collect();
    testbed.apply_load_balancer(&nodes, |_| {});
    testbed.wait_until_served_by(&nodes);
    (testbed, hosts, load)
}

/// Waits until a host gets no more exceptions: the slots of each family move when a node has passed its check there. A host that dies
/// before it has told others of a change takes the flows with it.
fn wait_until_told(testbed: &TestBed, host: usize) {
    eventually("the exceptions are told", || {
        let before = number(testbed, host, RECEIVED);
        std::thread::sleep(Duration::from_secs(2));
        before > LONG / 2 && number(testbed, host, RECEIVED) == before
    });
}

/// The client's connections to VIPs.
fn long_connections(testbed: &TestBed) -> usize {
    let client = testbed.client();
    let connections = sh(&format!("ip netns exec {client} ss -Htn state established dport = :80"));
    connections.lines().count()
}

#[test]
fn connections_survive_takeovers_although_their_slots_have_moved() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"));
    let (mut testbed, [first, second], load) = eight_nodes(true);
    eventually("the exceptions are found", || number(&testbed, first, EXCEPTIONS) > LONG / 2);
    wait_until_told(&testbed, second);
    testbed.kill(first);
    eventually("the standby holds the addresses", || testbed.has_vips(second));
    eventually("it has the exceptions", || testbed.get(second, "/readyz").starts_with("HTTP/1.1 200"));
    std::thread::sleep(Duration::from_secs(2));
    // And back.
    testbed.start_ready(first);
    eventually("the returned host does not answer", || !testbed.has_vips(first));
    eventually("the hosts are connected", || {
        [first, second].iter().all(|host| number(&testbed, *host, PEERS) == 1)
    });
    eventually("the exceptions are told back", || number(&testbed, first, RECEIVED) > LONG / 2);
    assert!(testbed.terminate(second));
    eventually("the first host holds the addresses again", || testbed.has_vips(first));
    std::thread::sleep(Duration::from_secs(2));
    load.stop("kill -9 of the active edge after slots have moved, and a hand-over back");
}

/// What the test above protects from.
#[test]
fn connections_break_at_a_takeover_without_the_exchange() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"));
    let (mut testbed, [first, second], load) = eight_nodes(false);
    testbed.kill(first);
    eventually("the standby holds the addresses", || testbed.has_vips(second));
    std::thread::sleep(Duration::from_secs(2));
    let (_, failed) = load.finish();
    let broken: BTreeSet<_> = failed.iter().filter(|failure| failure.contains("a long one")).collect();
    assert!(!broken.is_empty(), "{failed:?}");
    assert_eq!(testbed.metric(second, "steerage_edge_flow_exchange").as_deref(), Some("0"));
}

#[test]
fn hosts_with_different_keys_do_not_exchange() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(2, 1);
    testbed.apply_load_balancer(&[0], |_| {});
    testbed.start_ready(0);
    let failures = "steerage_edge_flow_session_failures_total";
    // A key is read for each session.
    eventually("the key can be used", || number(&testbed, 0, "steerage_edge_flow_exchange") == 1);
    let key = testbed.folder.join("key");
    let own = fs::read(&key).expect("read");
    let other = testbed.folder.join("other-key");
    fs::write(&other, "another key of at least thirty-two bytes").expect("write");
    testbed.start_with_key(1, &other);
    eventually("both refuse the other one", || {
        [0, 1].iter().all(|host| number(&testbed, *host, failures) > 0)
    });
    assert_eq!((number(&testbed, 0, PEERS), number(&testbed, 1, PEERS)), (0, 0));
    fs::write(&other, own).expect("write");
    eventually("the hosts are connected", || [0, 1].iter().all(|host| number(&testbed, *host, PEERS) == 1));
}

/// Only from hosts that send heartbeats, and only on the link.
#[test]
fn others_cannot_connect() {
    requires!(NetworkNamespace, Program("ip"), Program("ss"));
    let mut testbed = TestBed::new(1, 1);
    testbed.apply_load_balancer(&[0], |_| {});
    testbed.start_ready(0);
    let edge = testbed.netns("edge1");
    let listening = || sh(&format!("ip netns exec {edge} ss -Hltn sport = :10360"));
    eventually("it listens on both addresses", || {
        let listening = listening();
        listening.contains("10.0.0.11") && listening.contains("[fd00::11]")
    });
    let listening = listening();
    assert!(listening.lines().all(|line| line.contains("%eth0")), "{listening}");
    // A connection is closed without a word.
    let answer = crate::testbed::net::within(&testbed.nodes[0].netns, || {
        use std::io::Read as _;
        let mut stream = std::net::TcpStream::connect("10.0.0.11:10360").expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map(|_| answer)
    });
    assert!(answer.as_ref().map_or(true, Vec::is_empty), "{answer:?}");
}
