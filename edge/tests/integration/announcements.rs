// SPDX-License-Identifier: Apache-2.0
//! An edge host announces its VIPs again whenever routers may have learned something else: after a restart, when its interface was
//! disconnected, and when the interface has another Ethernet address.

use std::time::{Duration, Instant};

use steerage_requirements::requires;

use crate::testbed::net::Load;
use crate::testbed::{TestBed, VIP4, VIP6, eventually, sh};

const FIRST: &str = "02:00:00:00:00:0b";

fn serving_host() -> TestBed {
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    // An added VIP is announced for 8 s, several times.
    std::thread::sleep(Duration::from_secs(9));
    testbed
}

/// The router learns another Ethernet address for the VIPs. It keeps that until it sends packets to them, or an announcement comes.
fn mislead_router(testbed: &TestBed) {
    let router = testbed.netns("router");
    for vip in [VIP4, VIP6] {
        sh(&format!("ip -n {router} neigh replace {vip} lladdr 02:00:00:00:00:fe dev eth0 nud stale"));
    }
}

/// Every minute VIPs are announced anyway.
fn assert_announced_soon(testbed: &TestBed, mac: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let router = testbed.netns("router");
    for vip in [VIP4, VIP6] {
        while !sh(&format!("ip -n {router} neigh show {vip} dev eth0")).contains(mac) {
            assert!(Instant::now() < deadline, "{vip} was not announced");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn restarted_host_announces_the_vips_that_it_adopts() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = serving_host();
    testbed.kill(0);
    mislead_router(&testbed);
    testbed.start_ready(0);
    assert_announced_soon(&testbed, FIRST);
}

#[test]
fn reconnected_host_announces_its_vips() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = serving_host();
    let switch = testbed.netns("switch");
    sh(&format!("ip -n {switch} link set p11 down"));
    std::thread::sleep(Duration::from_secs(2));
    mislead_router(&testbed);
    sh(&format!("ip -n {switch} link set p11 up"));
    assert_announced_soon(&testbed, FIRST);
}

#[test]
fn host_with_another_ethernet_address_announces_it_and_stays_active() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(2, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.start_ready(1);
    testbed.wait_until_served_by(&[0, 1, 2]);
    std::thread::sleep(Duration::from_secs(9));
    let load = Load::start(&testbed.client(), 20);
    // As a bond does that has `fail_over_mac=active`.
    let (edge, router) = (testbed.netns("edge1"), testbed.netns("router"));
    sh(&format!("ip -n {edge} link set eth0 address 02:00:00:00:00:aa"));
    for vip in [VIP4, VIP6] {
        eventually("the router knows the new address", || {
            sh(&format!("ip -n {router} neigh show {vip} dev eth0")).contains("02:00:00:00:00:aa")
        });
    }
    std::thread::sleep(Duration::from_secs(2));
    load.stop("another Ethernet address");
    assert_eq!(testbed.metric(0, "steerage_edge_active").as_deref(), Some("1"), "the process goes on");
    assert!(testbed.has_vips(0) && !testbed.has_vips(1));
    // The other host knows it by its new address: no claim is foreign, and it takes over from it.
    testbed.kill(0);
    eventually("the standby holds the addresses", || testbed.has_vips(1));
    testbed.wait_until_served_by(&[0, 1, 2]);
}
