// SPDX-License-Identifier: Apache-2.0
//! Three edge hosts on one link: each VIP has one of them, and a host that ends takes down no VIP.

use serde_json::{Value, json};
use steerage_edge_api::Shards;
use steerage_requirements::requires;

use crate::testbed::net::{Load, query_udp, within};
use crate::testbed::{TestBed, VIP4, VIP6, eventually, sh};

/// So many that each host has some.
const VIPS: std::ops::Range<u8> = 101..117;
const HOSTS: [usize; 3] = [0, 1, 2];

/// The hosts start at the same time, as after a power cut.
fn three_hosts() -> TestBed {
    let mut testbed = TestBed::new(3, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    for number in VIPS {
        testbed.apply_load_balancer(&[0, 1, 2], |object| {
            object["metadata"] =
                json!({"name": format!("lb{number}"), "uid": format!("u-{number}"), "generation": 1});
            object["spec"]["addresses"] = json!([format!("10.0.0.{number}")]);
        });
    }
    for host in HOSTS {
        testbed.start(host);
    }
    for host in HOSTS {
        testbed.wait_until_ready(host);
    }
    testbed
}

fn all_vips() -> Vec<String> {
    let numbered = VIPS.map(|number| format!("10.0.0.{number}"));
    [VIP4, VIP6].map(str::to_owned).into_iter().chain(numbered).collect()
}

/// The hosts that answer for each VIP.
fn hosts_of_vips(testbed: &TestBed) -> Vec<Vec<usize>> {
    let hosts = |vip: String| HOSTS.into_iter().filter(|host| testbed.answers(*host, &vip)).collect();
    all_vips().into_iter().map(hosts).collect()
}

fn wait_until_each_vip_has_one_host(testbed: &TestBed) {
    let mut last = Vec::new();
    eventually("each VIP has one host", || {
        let (hosts, before) = (hosts_of_vips(testbed), std::mem::take(&mut last));
        last.clone_from(&hosts);
        // Twice: a host that has just taken over is not always seen beside the other.
        hosts.iter().all(|hosts| hosts.len() == 1) && hosts == before
    });
}

/// The first of them that was ready had all VIPs, and has offered theirs to the others after 10 s.
fn wait_until_shared_out(testbed: &TestBed) {
    eventually("each host has some of the VIPs, and each VIP has one host", || {
        let hosts = hosts_of_vips(testbed);
        HOSTS.into_iter().all(|host| hosts.contains(&vec![host]))
            && hosts.iter().all(|hosts| hosts.len() == 1)
    });
    std::thread::sleep(std::time::Duration::from_secs(5));
    wait_until_each_vip_has_one_host(testbed);
}

#[test]
fn hosts_share_out_the_vips_and_others_take_those_of_a_dead_one() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = three_hosts();
    testbed.wait_until_served_by(&[0, 1, 2]);
    let load = Load::start(&testbed.client(), 20);
    wait_until_shared_out(&testbed);
    load.stop("VIPs that move to hosts that have joined");
    testbed.wait_until_served_by(&[0, 1, 2]);
    let before = hosts_of_vips(&testbed);
    let owner = before[0][0];
    // All report for the load balancer, and each says of which shards it has the addresses.
    for host in HOSTS {
        let has_one = before[..2].contains(&vec![host]);
        eventually("it says whether it answers for the load balancer", || {
            let report = testbed.target_health(host)["spec"].clone();
            let shards = report["shards"].as_array().cloned().unwrap_or_default();
            let active = testbed.edge_host(host)["spec"]["activeShards"].clone();
            let Some(active) = active.as_str().and_then(|text| text.parse::<Shards>().ok()) else {
                return false;
            };
            let is_active = |shard: &Value| active.iter().any(|own| json!(own.index()) == *shard);
            shards.len() == 2 && shards.iter().any(is_active) == has_one
        });
    }
    let shards = |host| testbed.metric(host, "steerage_edge_active_shards")?.parse::<u32>().ok();
    eventually("the hosts have all shards together", || {
        HOSTS.into_iter().filter_map(shards).sum::<u32>() == 128
    });

    let load = Load::start(&testbed.client(), 20);
    testbed.kill(owner);
    eventually("another host has its first VIP", || {
        HOSTS.into_iter().any(|host| host != owner && testbed.answers(host, VIP4))
    });
    std::thread::sleep(std::time::Duration::from_secs(1));
    let after = hosts_of_vips(&testbed);
    for (before, after) in before.iter().zip(&after) {
        if before[0] != owner {
            assert_eq!(before, after, "VIPs of other hosts stay");
        }
    }
    testbed.start_ready(owner);
    eventually("it gets VIPs again", || hosts_of_vips(&testbed).contains(&vec![owner]));
    wait_until_each_vip_has_one_host(&testbed);
    load.stop("kill -9 of one of three edge hosts and its return");
}

#[test]
fn host_that_ends_hands_its_vips_over_to_several() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = three_hosts();
    wait_until_each_vip_has_one_host(&testbed);
    testbed.wait_until_served_by(&[0, 1, 2]);
    let owner = hosts_of_vips(&testbed)[0][0];
    let load = Load::start(&testbed.client(), 20);
    assert!(testbed.terminate(owner));
    wait_until_each_vip_has_one_host(&testbed);
    assert!(!hosts_of_vips(&testbed).contains(&vec![owner]));
    load.stop("SIGTERM of one of three edge hosts");
}

#[test]
fn hosts_that_did_not_hear_each_other_share_out_the_vips_again() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = three_hosts();
    wait_until_each_vip_has_one_host(&testbed);
    let switch = testbed.netns("switch");
    sh(&format!("ip -n {switch} link set p11 nomaster"));
    eventually("the host that hears nobody answers for all", || {
        hosts_of_vips(&testbed).iter().all(|hosts| hosts.len() == 2 && hosts.contains(&0))
    });
    sh(&format!("ip -n {switch} link set p11 master br0"));
    wait_until_each_vip_has_one_host(&testbed);
    testbed.wait_until_served_by(&[0, 1, 2]);
}

/// A node forwards what it answers for to all nodes, also to itself, and takes what the other nodes forward to it.
#[test]
fn nodes_can_be_the_edge_hosts() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::on_nodes(3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    for host in HOSTS {
        testbed.start_ready(host);
    }
    testbed.wait_until_served_by(&[0, 1, 2]);
    let length = 1000;
    for vip in [VIP4, VIP6] {
        let reply = within(&testbed.client(), || query_udp(vip, length)).expect("a reply");
        assert_eq!(
            (reply.2.ip(), reply.3),
            (reply.1.ip(), length),
            "{vip}: the node sees the client, and all of the datagram"
        );
        let large = within(&testbed.client(), || query_udp(vip, 4 * length)).expect("a reply to fragments");
        assert_eq!(large.3, 4 * length);
    }
    let load = Load::start(&testbed.client(), 20);
    testbed.kill(0);
    eventually("another node answers for the VIPs", || (1..3).any(|host| testbed.answers(host, VIP4)));
    std::thread::sleep(std::time::Duration::from_secs(2));
    testbed.start_ready(0);
    assert!(testbed.terminate(1));
    testbed.wait_until_served_by(&[0, 1, 2]);
    load.stop("kill -9 and SIGTERM of edge hosts on nodes");
}
