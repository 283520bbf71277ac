// SPDX-License-Identifier: Apache-2.0
//! `fused` steering with nodes that make no statements: a changed list of nodes with an endpoint is followed long before the next probe.

use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;
use steerage_requirements::requires;

use crate::testbed::TestBed;

/// No test waits for a probe of it.
const INTERVAL_MILLISECONDS: u32 = 3_600_000;

/// Both nodes are targets, and these have an endpoint.
fn list(testbed: &TestBed, listed: &[usize]) {
    let listed: Vec<_> = listed.iter().map(|node| testbed.nodes[*node].name.clone()).collect();
    testbed.apply_load_balancer(&[0, 1], |lb| {
        lb["spec"]["endpointNodes"] = json!(listed);
        lb["spec"]["healthCheck"]["intervalMilliseconds"] = json!(INTERVAL_MILLISECONDS);
    });
}

#[test]
fn node_that_leaves_the_list_gets_no_connections_for_a_time_although_it_passed() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 2);
    list(&testbed, &[0]);
    testbed.start_ready(0);
    // The first list is no news: both nodes pass.
    testbed.wait_until_served_by(&[0, 1]);
    list(&testbed, &[0, 1]);
    list(&testbed, &[1]);
    testbed.wait_until_served_by(&[1]);
    list(&testbed, &[0, 1]);
    testbed.wait_until_served_by(&[0, 1]);
    list(&testbed, &[1]);
    testbed.wait_until_served_by(&[1]);
    // Nobody has said anything since, and its last answer was that it serves.
    testbed.wait_until_served_by(&[0, 1]);
}

#[test]
fn node_that_joins_the_list_is_used_as_soon_as_it_passes() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 2);
    testbed.nodes[1].healthy.store(false, Ordering::Relaxed);
    list(&testbed, &[0]);
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0]);
    list(&testbed, &[0, 1]);
    // Its service proxy needs a moment.
    sleep(Duration::from_secs(1));
    testbed.wait_until_served_by(&[0]);
    testbed.nodes[1].healthy.store(true, Ordering::Relaxed);
    testbed.wait_until_served_by(&[0, 1]);
}

/// As while the API server or the controller is away.
#[test]
fn list_that_does_not_change_decides_nothing() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 2);
    let name = testbed.nodes[0].name.clone();
    testbed.apply_load_balancer(&[0, 1], |lb| lb["spec"]["endpointNodes"] = json!([name]));
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    testbed.nodes[0].healthy.store(false, Ordering::Relaxed);
    testbed.wait_until_served_by(&[1]);
    testbed.nodes[0].healthy.store(true, Ordering::Relaxed);
    testbed.wait_until_served_by(&[0, 1]);
}
