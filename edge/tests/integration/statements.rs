// SPDX-License-Identifier: Apache-2.0
//! Nodes whose agents state their local endpoints: the edge obeys at once, and judges a silent node by its checks' thresholds.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};
use steerage_requirements::requires;

use crate::testbed::agent::{Agent, STATED};
use crate::testbed::net::responding_nodes;
use crate::testbed::{TestBed, VIP4, VIP6, eventually, sh};

/// An edge host that serves a load balancer with two nodes, whose agents state two endpoints each.
fn stating(interval_milliseconds: u32) -> (TestBed, [Agent; 2]) {
    stating_to(1, interval_milliseconds)
}

/// With so many edge hosts, of which the first one runs.
fn stating_to(edges: u8, interval_milliseconds: u32) -> (TestBed, [Agent; 2]) {
    let mut testbed = TestBed::new(edges, 2);
    let agents = [0, 1].map(|node| Agent::start(&testbed.nodes[node], 2));
    testbed.apply_load_balancer(&[0, 1], |lb| {
        let check = &mut lb["spec"]["healthCheck"];
        check["port"] = json!(STATED);
        check["intervalMilliseconds"] = json!(interval_milliseconds);
    });
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    (testbed, agents)
}

/// The reasons of the targets of a node.
fn reasons(testbed: &TestBed, node: usize) -> Vec<String> {
    let health = testbed.target_health(0);
    let targets = health["spec"]["targets"].as_array().cloned().unwrap_or_default();
    let of_node = targets.into_iter().filter(|target| target["node"] == json!(testbed.nodes[node].name));
    of_node.map(|target| target["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

fn all_are(reasons: &[String], expected: &str) -> bool {
    reasons.len() == 2 && reasons.iter().all(|reason| reason == expected)
}

#[test]
fn target_leaves_when_its_node_says_so() {
    requires!(NetworkNamespace, Program("ip"));
    let (testbed, agents) = stating(3_600_000);
    let stating = "steerage_edge_statement_nodes{by=\"statements\"}";
    eventually("all addresses state", || testbed.metric(0, stating).as_deref() == Some("4"));
    agents[0].set(0);
    testbed.wait_until_served_by(&[1]);
    eventually("it is counted, and not listed", || {
        let counts = testbed.target_health(0)["spec"]["counts"].clone();
        let is_counted = |counts: &Value| counts["withoutEndpoint"] == 1 && counts["omitted"] == 1;
        counts.as_array().is_some_and(|counts| counts.len() == 2 && counts.iter().all(is_counted))
            && reasons(&testbed, 0).is_empty()
    });
    agents[0].set(2);
    agents[1].set(0);
    testbed.wait_until_served_by(&[0]);
    agents[1].set(1);
    testbed.wait_until_served_by(&[0, 1]);
}

/// The last endpoint is terminating and still serves: the node says that it has none.
#[test]
fn last_node_with_an_endpoint_is_used_after_that_and_by_the_next_process() {
    requires!(NetworkNamespace, Program("ip"));
    let (mut testbed, agents) = stating(3_600_000);
    agents[0].set(0);
    testbed.wait_until_served_by(&[1]);
    std::thread::sleep(Duration::from_millis(1500));
    agents[1].set(0);
    eventually("the reason is reported", || all_are(&reasons(&testbed, 1), "no local endpoint"));
    let last = [testbed.nodes[1].name.clone()];
    for vip in [VIP4, VIP6] {
        assert_eq!(responding_nodes(&testbed.client(), vip, 40), last);
    }
    testbed.kill(0);
    testbed.start_ready(0);
    eventually("the next process has asked", || {
        testbed.metric(0, "steerage_edge_statement_nodes{by=\"statements\"}").as_deref() == Some("4")
    });
    std::thread::sleep(Duration::from_millis(500));
    for vip in [VIP4, VIP6] {
        assert_eq!(responding_nodes(&testbed.client(), vip, 40), last);
    }
    agents[0].set(1);
    testbed.wait_until_served_by(&[0]);
}

#[test]
fn silent_node_leaves_after_its_threshold() {
    requires!(NetworkNamespace, Program("ip"));
    let (testbed, _agents) = stating(500);
    let switch = testbed.netns("switch");
    sh(&format!("ip -n {switch} link set p21 nomaster"));
    testbed.wait_until_served_by(&[1]);
    eventually("the reason is reported", || all_are(&reasons(&testbed, 0), "the node does not answer"));
    assert_eq!(testbed.target_health(0)["spec"]["targets"].as_array().map(Vec::len), Some(4));
    sh(&format!("ip -n {switch} link set p21 master br0"));
    testbed.wait_until_served_by(&[0, 1]);
}

/// The other host never hears of its flows, so that it waits for as long as it may.
#[test]
fn leaving_host_obeys_statements_while_it_waits_for_others_to_know_its_flows() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let (mut testbed, agents) = stating_to(2, 3_600_000);
    testbed.start_ready(1);
    eventually("the hosts are connected", || {
        [0, 1].iter().all(|host| testbed.metric(*host, "steerage_edge_flow_peers").as_deref() == Some("1"))
    });
    eventually("the other host can serve", || testbed.forwarding_left(0).is_some());
    let edge = testbed.netns("edge1");
    sh(&format!(
        "ip netns exec {edge} nft 'table inet cut {{ chain out {{ type filter hook output priority 0;
             tcp dport 10360 drop; tcp sport 10360 drop; }}; }}'"
    ));
    let log = testbed.folder.join("edge1.log");
    let log = || fs::read_to_string(&log).expect("log");
    let mut leaving = testbed.begin_to_terminate(0);
    eventually("it is leaving", || log().contains("shutting down"));
    std::thread::sleep(Duration::from_millis(200));
    agents[0].set(0);
    assert!(leaving.wait().expect("wait").success());
    let log = log();
    let (_, log) = log.split_once("shutting down").expect("the signal");
    let [obeyed, flushed] =
        ["target health changed", "some edge hosts do not have this host's flow exceptions"]
            .map(|line| log.find(line).unwrap_or_else(|| panic!("{line}: {log}")));
    assert!(obeyed < flushed, "{log}");
}
