// SPDX-License-Identifier: Apache-2.0
//! What packets see of one edge host: real TCP and UDP, both families, in network namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod bed;

use std::sync::atomic::Ordering;
use std::time::Duration;

use bed::net::{Load, Talk, ask, ask_by, within};
use bed::{Bed, PORT, VIP4, VIP6, eventually, sh};
use serde_json::json;
use steerage_requirements::requires;

#[test]
fn nodes_see_the_client_and_all_take_part() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1, 2]);
    within(&bed.client(), || {
        for vip in [VIP4, VIP6] {
            let mut talk = Talk::open(vip).expect("connect");
            assert_eq!(talk.seen, talk.own, "the client's address and port are kept");
            talk.say("hello").expect("say");
            let mut nodes = std::collections::BTreeSet::new();
            for _ in 0..40 {
                let (node, own, seen, _) = ask(vip, 10).expect("an answer");
                assert_eq!(own.port(), seen.port());
                nodes.insert(node);
            }
            assert_eq!(nodes.len(), 3, "datagrams are spread: {nodes:?}");
        }
    });
    let client = bed.client();
    for vip in [VIP4, VIP6] {
        sh(&format!("ip netns exec {client} ping -c 1 -W 2 {vip}"));
    }
    // The whole ruleset can be listed while it works, flows and all.
    let edge = bed.netns("edge1");
    let listed =
        sh(&format!("ip netns exec {edge} nft list ruleset; ip netns exec {edge} nft -j list ruleset"));
    assert!(listed.contains("map flows4"), "{listed}");
}

#[test]
fn only_listeners_are_reached() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 1);
    bed.balance(&[0], |lb| lb["spec"]["listeners"] = json!([{"protocol": "TCP", "port": PORT}]));
    bed.start_ready(0);
    bed.settle(&[0]);
    within(&bed.client(), || {
        assert_eq!(ask(VIP4, 10), None, "no UDP listener");
        let wait = Duration::from_millis(300);
        for port in [81, bed::CHECK, 10359] {
            let to = (VIP4.parse::<std::net::IpAddr>().expect("address"), port).into();
            let error = std::net::TcpStream::connect_timeout(&to, wait).expect_err("no listener");
            assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{port}: dropped, not refused");
        }
    });
}

#[test]
fn source_ranges_bound_who_comes_in() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 1);
    bed.balance(&[0], |lb| lb["spec"]["sourceRanges"] = json!(["10.1.0.2/32", "fd99::/64"]));
    bed.start_ready(0);
    within(&bed.client(), || {
        eventually("the first address comes in", || {
            Talk::open_within(VIP4, Duration::from_millis(300)).is_ok()
        });
        assert!(Talk::open_within(VIP6, Duration::from_millis(300)).is_err(), "another family's range");
        let socket = std::net::UdpSocket::bind("10.1.0.3:0").expect("bind");
        assert_eq!(ask_by(&socket, VIP4, 10), None, "another address");
    });
}

#[test]
fn a_client_with_affinity_stays_on_its_node() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.balance(&[0, 1, 2], |lb| lb["spec"]["affinity"] = json!({"timeoutSeconds": 10_800}));
    bed.start_ready(0);
    within(&bed.client(), || {
        for vip in [VIP4, VIP6] {
            eventually("it is served", || Talk::open_within(vip, Duration::from_millis(300)).is_ok());
            let first = Talk::open(vip).expect("connect").node;
            for _ in 0..20 {
                assert_eq!(Talk::open(vip).expect("connect").node, first);
                assert_eq!(ask(vip, 10).expect("answer").0, first);
            }
        }
    });
}

#[test]
fn big_datagrams_arrive_whole() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1, 2]);
    within(&bed.client(), || {
        for vip in [VIP4, VIP6] {
            for _ in 0..10 {
                assert_eq!(ask(vip, 5000).expect("an answer").3, 5000);
            }
        }
    });
}

#[test]
fn health_diverts_and_fails_open() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.nodes[2].healthy.store(false, Ordering::Relaxed);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1]);
    let long = within(&bed.client(), || Talk::open(VIP4).expect("connect"));
    let first = usize::from(long.node == bed.nodes[1].name);
    // The node of a long connection fails its check: the connection stays, new ones go elsewhere, and so do datagrams.
    let socket = within(&bed.client(), || {
        let bound = |_| std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
        (0..50)
            .map(bound)
            .find(|socket| ask_by(socket, VIP4, 1).expect("answer").0 == long.node)
            .expect("a socket whose datagrams go to the same node")
    });
    bed.nodes[first].healthy.store(false, Ordering::Relaxed);
    bed.settle(&[1 - first]);
    let mut long = long;
    long.say("still there").expect("the long connection");
    assert_eq!(ask_by(&socket, VIP4, 1).expect("answer").0, bed.nodes[1 - first].name);
    // Nobody healthy: everybody is used.
    bed.nodes[1 - first].healthy.store(false, Ordering::Relaxed);
    bed.settle(&[0, 1, 2]);
    bed.nodes[2].healthy.store(true, Ordering::Relaxed);
    bed.settle(&[2]);
    eventually("the report follows", || {
        let states: Vec<_> = bed.report(0)["spec"]["targets"]
            .as_array()
            .map(|targets| targets.iter().map(|target| target["state"].clone()).collect())
            .unwrap_or_default();
        states == ["Unhealthy", "Unhealthy", "Unhealthy", "Unhealthy", "Healthy", "Healthy"]
    });
}

#[test]
fn long_connections_survive_changes_of_membership() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.balance(&[0, 1], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1]);
    let load = Load::start(&bed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    for nodes in [&[0, 1, 2][..], &[2], &[0, 2], &[1]] {
        bed.balance(nodes, |_| {});
        bed.settle(nodes);
    }
    load.stop("four changes of membership");
}

#[test]
fn kill_and_restart_lose_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.nodes[2].healthy.store(false, Ordering::Relaxed);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1]);
    let load = Load::start(&bed.client(), 20);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        bed.kill(0);
        std::thread::sleep(Duration::from_millis(600));
        assert!(bed.holds(0), "the kernel answers on");
        bed.start_ready(0);
    }
    assert!(bed.terminate(0), "SIGTERM ends it as succeeded");
    std::thread::sleep(Duration::from_millis(500));
    assert!(bed.holds(0), "nobody takes over, so the kernel goes on");
    load.stop("three kills and restarts, one graceful end");
    let edge = bed.netns("edge1");
    sh(&format!("ip netns exec {edge} {} cleanup", env!("CARGO_BIN_EXE_steerage-edge")));
    assert!(!bed.holds(0));
    assert_eq!(sh(&format!("ip netns exec {edge} nft list ruleset")), "");
}

#[test]
fn a_bounced_packet_is_not_spread_again() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 1);
    bed.balance(&[0], |_| {});
    bed.start_ready(0);
    bed.settle(&[0]);
    let node = bed.netns(&bed.nodes[0].name);
    // The node forgets the address and becomes the router that it is for its pods: packets for it come back.
    sh(&format!(
        "ip -n {node} addr del {VIP4}/32 dev lo
         ip netns exec {node} nft 'table ip count {{ chain c {{ type filter hook prerouting priority 0;
            ip daddr {VIP4} tcp flags syn counter; }}; }}'"
    ));
    std::thread::sleep(Duration::from_millis(1200));
    within(&bed.client(), || {
        assert!(Talk::open_within(VIP4, Duration::from_millis(300)).is_err());
    });
    let counted = sh(&format!("ip netns exec {node} nft list table ip count"));
    assert!(counted.contains("counter packets 1 "), "the node must see the packet once: {counted}");
}

#[test]
fn targets_off_the_link_and_addresses_in_use_are_reported() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 2);
    // Somebody else has the IPv4 address already.
    let stranger = bed.netns(&bed.nodes[1].name);
    sh(&format!("ip -n {stranger} addr add {VIP4}/32 dev eth0"));
    sh(&format!("ip netns exec {stranger} sysctl -qw net.ipv4.conf.all.arp_ignore=0"));
    bed.balance(&[0], |lb| {
        let far = json!({"node": "far", "addresses": ["192.0.2.7"], "weight": 1});
        lb["spec"]["targets"].as_array_mut().expect("targets").push(far);
    });
    bed.start_ready(0);
    eventually("the problem is reported", || {
        bed.report(0)["spec"]["problem"].as_str().is_some_and(|problem| {
            problem.contains(&format!("{VIP4} is in use on the link by 02:00:00:00:00:16"))
        })
    });
    let targets = bed.report(0)["spec"]["targets"].clone();
    let far = targets.as_array().expect("targets").iter().find(|target| target["node"] == "far").cloned();
    let far = far.expect("far");
    assert_eq!(far["state"], "Refused");
    assert!(far["reason"].as_str().expect("reason").contains("behind a gateway"), "{far}");
    assert!(!bed.holds(0), "it does not take what is somebody else's");
    within(&bed.client(), || drop(Talk::open(VIP6).expect("the other address is served")));
    // Once it is free, it is taken.
    sh(&format!("ip -n {stranger} addr del {VIP4}/32 dev eth0"));
    sh(&format!("ip netns exec {stranger} sysctl -qw net.ipv4.conf.all.arp_ignore=1"));
    eventually("the address is taken", || bed.holds(0));
    bed.settle(&[0]);
}

#[test]
fn errors_about_a_connection_reach_its_node() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = Bed::new(1, 3);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.settle(&[0, 1, 2]);
    // Behind the router packets must be smaller: it tells the sender, which is the virtual address, by ICMP.
    let router = bed.netns("router");
    sh(&format!(
        "ip -n {router} route replace 10.1.0.0/16 dev client src 10.1.0.1 mtu 1300
         ip -n {router} -6 route replace fd01::/64 dev client metric 1 mtu 1300"
    ));
    within(&bed.client(), || {
        for vip in [VIP4, VIP6] {
            for _ in 0..6 {
                let mut talk = Talk::open(vip).expect("connect");
                talk.say(&"x".repeat(20_000)).expect("the node learns what fits");
            }
        }
    });
    for client in ["10.1.0.2", "fd01::2"] {
        let route = |node: &bed::Node| {
            sh(&format!("ip -n {} route get {client}", bed.netns(&node.name))).contains("mtu 1300")
        };
        assert!(bed.nodes.iter().any(route), "no node has learnt what fits on the way to {client}");
    }
}
