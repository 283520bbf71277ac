// SPDX-License-Identifier: Apache-2.0
//! Two edge hosts on one link: one has the VIPs, and no connection is lost when the other takes over.

use std::time::{Duration, Instant};

use steerage_requirements::requires;

use crate::testbed::net::Load;
use crate::testbed::{TestBed, eventually, sh};

/// The kernel of a killed host answers for longer: 6.2s, less the second that may have passed since the last renewal.
const SHORTEST_LEASE: Duration = Duration::from_secs(5);

/// The first host is active.
fn two_hosts() -> TestBed {
    TestBed::pair(|| TestBed::new(2, 3))
}

#[test]
fn standby_takes_over_from_a_killed_host_without_loss() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = two_hosts();
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    let killed = Instant::now();
    testbed.kill(0);
    eventually("the standby holds the addresses", || testbed.has_vips(1));
    std::thread::sleep(Duration::from_secs(1));
    let has_vips = testbed.has_vips(0);
    assert!(has_vips || killed.elapsed() > SHORTEST_LEASE, "the kernel of the killed host still answers");
    testbed.start_ready(0);
    eventually("the returning host does not answer", || !testbed.has_vips(0));
    assert!(testbed.has_vips(1));
    load.stop("kill -9 of the active edge and its return");
}

#[test]
fn killed_host_stops_to_answer_if_another_host_does() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = two_hosts();
    eventually("the lease is limited", || !testbed.keeps_vips_forever(0));
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_secs(8));
    assert!(testbed.has_vips(0), "the process renews it");
    testbed.kill(0);
    eventually("the standby holds the addresses", || testbed.has_vips(1));
    eventually("the kernel of the killed host no longer answers", || !testbed.has_any_vip(0));
    // No host could take over from the second one.
    eventually("its lease lasts longer than if one could", || testbed.lease_left(1) > 2 * SHORTEST_LEASE);
    testbed.kill(1);
    std::thread::sleep(Duration::from_secs(8));
    assert!(testbed.has_vips(1));
    load.stop("kill -9 of both edges, one after the other");
}

#[test]
fn vips_stay_if_all_processes_end() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = two_hosts();
    eventually("the lease is limited", || !testbed.keeps_vips_forever(0));
    // The standby cannot take over in time.
    testbed.stop(1);
    eventually("the first host has the VIPs, and no other one could", || {
        testbed.has_vips(0) && testbed.lease_left(0) > 2 * SHORTEST_LEASE
    });
    assert!(testbed.terminate(0));
    assert!(testbed.keeps_vips_forever(0));
}

#[test]
fn standby_takes_over_from_a_disconnected_host() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = two_hosts();
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    let first = testbed.netns("edge1");
    sh(&format!("ip -n {first} link set eth0 down"));
    eventually("the standby holds the addresses", || testbed.has_vips(1));
    std::thread::sleep(Duration::from_millis(1500));
    load.stop("the active edge's cable pulled");
}

#[test]
fn graceful_shutdown_hands_vips_over() {
    requires!(NetworkNamespace, Program("ip"));
    // The standby has a second and a half for it. If it has no core for as long, the kernel keeps the VIPs.
    let hands_over = |_| {
        let mut testbed = two_hosts();
        let load = Load::start(&testbed.client(), 20);
        std::thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        assert!(testbed.terminate(0));
        let took = begun.elapsed();
        let is_handed_over = testbed.has_vips(1) && !testbed.has_vips(0);
        assert!(is_handed_over || took > Duration::from_millis(1400), "it gave up after {took:?}");
        std::thread::sleep(Duration::from_secs(1));
        load.stop("a graceful hand-over");
        is_handed_over
    };
    assert!((0..3).any(hands_over), "handed over before the end");
}

#[test]
fn host_that_cannot_list_leaves_the_vips_to_one_that_can() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(2, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    // It comes first by name, and is active alone.
    testbed.start_without_api(0);
    eventually("it is active", || testbed.metric(0, "steerage_edge_active").as_deref() == Some("1"));
    testbed.start_ready(1);
    eventually("the host that can serve has the VIPs", || testbed.has_vips(1));
    testbed.wait_until_served_by(&[0, 1, 2]);
    assert_eq!(testbed.metric(0, "steerage_edge_active").as_deref(), Some("0"));
    assert_eq!(testbed.metric(0, "steerage_edge_can_serve").as_deref(), Some("0"));
    // Without another host that can serve, the kernel of the one that ends keeps the VIPs.
    let load = Load::start(&testbed.client(), 20);
    assert!(testbed.terminate(1));
    std::thread::sleep(Duration::from_secs(2));
    assert!(testbed.has_vips(1));
    // Nor does the process that follows give them up: the other host is active by now, and has none.
    eventually("the host without a list is active", || {
        testbed.metric(0, "steerage_edge_active").as_deref() == Some("1")
    });
    testbed.start_ready(1);
    eventually("it is active again", || testbed.metric(1, "steerage_edge_active").as_deref() == Some("1"));
    assert!(testbed.has_vips(1));
    load.stop("SIGTERM and restart of the only host that can serve");
}

#[test]
fn one_host_steps_down_after_a_partition() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = two_hosts();
    let switch = testbed.netns("switch");
    sh(&format!("ip -n {switch} link set p11 nomaster"));
    eventually("both are active", || testbed.has_vips(0) && testbed.has_vips(1));
    sh(&format!("ip -n {switch} link set p11 master br0"));
    eventually("the first host steps down", || !testbed.has_vips(0));
    assert!(testbed.has_vips(1));
    testbed.wait_until_served_by(&[0, 1, 2]);
    // Keeps the test bed alive up to here.
    testbed.kill(0);
}
