// SPDX-License-Identifier: Apache-2.0
//! What the program in the kernel does after its process: it forwards on, and leaves the packets to the kernel once other hosts have
//! the VIPs.

use std::time::{Duration, Instant};

use steerage_requirements::requires;

use crate::testbed::net::{Load, responding_nodes};
use crate::testbed::{TestBed, VIP4, VIP6, eventually, sh};

/// The time of a program whose process handed all VIPs over; of one whose process was killed beside another host, with its lease.
const HANDED_OVER: Duration = Duration::from_secs(10);
const KILLED: Duration = Duration::from_secs(66);
/// A renewal is due each second, and processes wait for a core.
const LATE: Duration = Duration::from_secs(4);
/// The time of a program whose process lost sight of the other host a moment ago.
const LONGEST: Duration = Duration::from_mins(2);

/// The Ethernet address of the second node.
const SECOND: &str = "02:00:00:00:00:16";

/// Two of three nodes are edge hosts, and the first one has the VIPs.
fn two_nodes() -> TestBed {
    TestBed::pair(|| TestBed::on_nodes(3))
}

fn is_limited(testbed: &TestBed, host: usize) -> bool {
    testbed.forwarding_left(host).is_some_and(|left| left.saturating_add(LATE) > KILLED && left <= LONGEST)
}

/// The process of the first node has handed everything over, and only that node is a target.
fn first_node_retired() -> TestBed {
    let mut testbed = two_nodes();
    eventually("its time is limited", || is_limited(&testbed, 0));
    let load = Load::start(&testbed.client(), 20);
    assert!(testbed.terminate(0));
    eventually("the other host has the VIPs", || testbed.has_vips(1) && !testbed.has_any_vip(0));
    assert!(testbed.forwarding_left(0).is_some_and(|left| left <= HANDED_OVER));
    std::thread::sleep(HANDED_OVER + Duration::from_secs(1));
    load.stop("SIGTERM of an edge host on a node, and the end of its program's time");
    testbed
}

/// The program of the node would take the frames of the new host for a client's, and forward them by its last tables.
#[test]
fn node_that_was_an_edge_host_serves_what_a_later_edge_host_forwards() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = first_node_retired();
    testbed.apply_load_balancer(&[0], |object| object["metadata"]["generation"] = 2.into());
    testbed.start_ready(2);
    testbed.kill(1);
    eventually("the later host has the VIPs", || testbed.has_vips(2));
    testbed.wait_until_served_by(&[0]);
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_secs(2));
    load.stop("a later edge host that forwards to a node that was one");
    for vip in [VIP4, VIP6] {
        assert_eq!(responding_nodes(&testbed.client(), vip, 100), ["node21"]);
    }
}

#[test]
fn program_of_a_killed_process_has_a_limited_time_only_beside_another_host() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::on_nodes(2);
    testbed.apply_load_balancer(&[0, 1], |_| {});
    testbed.start_ready(0);
    eventually("alone, its time has no end", || testbed.forwarding_left(0).is_none());
    testbed.start_ready(1);
    for host in [0, 1] {
        eventually("its time is limited", || is_limited(&testbed, host));
    }
    // It is renewed.
    std::thread::sleep(LATE);
    for host in [0, 1] {
        assert!(is_limited(&testbed, host), "{:?}", testbed.forwarding_left(host));
    }
    let load = Load::start(&testbed.client(), 20);
    testbed.kill(0);
    let killed = Instant::now();
    eventually("the other one has the VIPs", || testbed.has_vips(1));
    eventually("the other one's time is that of a lease of a minute", || {
        testbed.forwarding_left(1).is_none_or(|left| left > KILLED)
    });
    let left = testbed.forwarding_left(0).expect("limited");
    let whole = left + killed.elapsed();
    assert!(whole.saturating_add(LATE) > KILLED && whole <= LONGEST, "{left:?}");
    testbed.start_ready(0);
    eventually("it is renewed again", || is_limited(&testbed, 0));
    // The last one keeps all, without end.
    assert!(testbed.terminate(0));
    assert!(testbed.terminate(1));
    assert_eq!(testbed.forwarding_left(1), None);
    std::thread::sleep(HANDED_OVER + Duration::from_secs(1));
    assert_eq!(testbed.forwarding_left(0), Some(Duration::ZERO), "the other one had all");
    load.stop("kill -9 and SIGTERM, until no process is left");
}

/// It does not know what the other host knows, and begins to forward again when there is nobody else.
#[test]
fn retired_host_that_starts_without_the_api_server_forwards_only_if_no_other_can() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = first_node_retired();
    let load = Load::start(&testbed.client(), 20);
    testbed.start_without_api(0);
    eventually("it runs", || testbed.metric(0, "steerage_edge_peers").as_deref() == Some("1"));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(testbed.forwarding_left(0), Some(Duration::ZERO), "another host can serve");
    load.stop("the start of a host that cannot list");
    testbed.kill(1);
    eventually("it answers and forwards", || {
        // In this order: it forwards first, and both may begin between two looks.
        let answers = testbed.has_any_vip(0);
        let forwards = testbed.forwarding_left(0).is_none_or(|left| !left.is_zero());
        assert!(forwards || !answers, "it answers for what it does not forward");
        testbed.has_vips(0) && forwards
    });
    testbed.wait_until_served_by(&[0, 1, 2]);
}

/// A process that is stopped renews nothing, and its program's time ends. One that continues renews it, and takes nothing back from
/// the host that has its VIPs, although it was active when it was stopped, and an announcement is due since then.
#[test]
fn host_whose_process_continues_forwards_again() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = two_nodes();
    eventually("its time is limited", || is_limited(&testbed, 0));
    let load = Load::start(&testbed.client(), 20);
    testbed.stop(0);
    eventually("the other host has the VIPs", || testbed.has_vips(1));
    let left = testbed.forwarding_left(0).expect("limited");
    assert!(left <= LONGEST);
    std::thread::sleep(left + Duration::from_secs(1));
    assert_eq!(testbed.forwarding_left(0), Some(Duration::ZERO));
    testbed.resume(0);
    eventually("it is renewed", || is_limited(&testbed, 0));
    std::thread::sleep(Duration::from_secs(1));
    let router = testbed.netns("router");
    for vip in [VIP4, VIP6] {
        let neighbour = sh(&format!("ip -n {router} neigh show {vip} dev eth0"));
        assert!(neighbour.contains(SECOND), "the host that was stopped has announced {vip}: {neighbour}");
    }
    load.stop("SIGSTOP for more than a minute, and SIGCONT");
}

/// Where the only edge host moves to another node, its process ends before that of the new one has begun.
#[test]
fn only_host_waits_for_its_successor() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::on_nodes(2);
    testbed.flags = vec!["--hand-over-wait", "18s"];
    testbed.apply_load_balancer(&[0], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0]);
    let load = Load::start(&testbed.client(), 20);
    let mut first = testbed.begin_to_terminate(0);
    std::thread::sleep(Duration::from_secs(3));
    assert!(first.try_wait().expect("wait").is_none(), "it waits");
    // It follows changes meanwhile, and its connections stay where they are, also with the successor.
    testbed.apply_load_balancer(&[0, 1], |object| object["metadata"]["generation"] = 2.into());
    testbed.wait_until_served_by(&[0, 1]);
    testbed.start_ready(1);
    assert!(first.wait().expect("wait").success());
    assert!(testbed.has_vips(1) && !testbed.has_any_vip(0));
    assert!(testbed.forwarding_left(0).is_some_and(|left| left <= HANDED_OVER));
    std::thread::sleep(HANDED_OVER + Duration::from_secs(1));
    load.stop("SIGTERM of the only edge host, and the start of its successor");
}

/// Its process ended while no other one could serve, and the host that serves now knows it.
#[test]
fn host_that_answers_without_a_process_is_found() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = two_nodes();
    testbed.stop(1);
    eventually("it is alone", || testbed.metric(0, "steerage_edge_peers").as_deref() == Some("0"));
    assert!(testbed.terminate(0));
    assert!(testbed.keeps_vips_forever(0));
    testbed.resume(1);
    eventually("the other host has the VIPs", || testbed.has_vips(1));
    assert!(testbed.keeps_vips_forever(0), "and so has the one without a process");
    let found = || testbed.metric(1, "steerage_edge_unattended_hosts");
    assert_eq!(found().as_deref(), Some("0"));
    eventually("it is found", || found().as_deref() == Some("1"));
    testbed.clean_up(0);
    eventually("it answers no more", || found().as_deref() == Some("0"));
}
