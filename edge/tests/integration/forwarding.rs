// SPDX-License-Identifier: Apache-2.0
//! One edge host with real TCP and UDP packets of both families, in network namespaces.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use steerage_requirements::requires;

use crate::testbed::net::{
    Connection, Load, query_udp, query_udp_from, query_udp_within, responding_nodes, within,
};
use crate::testbed::{CHECK, Node, PORT, TestBed, VIP4, VIP6, eventually, sh};

/// An edge host that serves a load balancer with three nodes.
fn serving() -> TestBed {
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    testbed
}

#[test]
fn client_address_is_kept_and_all_nodes_are_used() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = serving();
    within(&testbed.client(), || {
        for vip in [VIP4, VIP6] {
            let mut connection = Connection::open(vip).expect("connect");
            assert_eq!(connection.seen, connection.own, "the client's address and port are kept");
            connection.echo("hello").expect("say");
            let mut nodes = std::collections::BTreeSet::new();
            for _ in 0..40 {
                let (node, own, seen, _) = query_udp(vip, 10).expect("an answer");
                assert_eq!(own.port(), seen.port());
                nodes.insert(node);
            }
            assert_eq!(nodes.len(), 3, "datagrams are spread: {nodes:?}");
        }
    });
    let client = testbed.client();
    for vip in [VIP4, VIP6] {
        sh(&format!("ip netns exec {client} ping -c 1 -W 2 {vip}"));
    }
    let text = testbed.get(0, "/metrics");
    for vip in [VIP4, VIP6] {
        let flows = format!("steerage_edge_vip_flows_total{{vip=\"{vip}\"}} ");
        let flows = text.lines().find_map(|line| line.strip_prefix(&flows)?.parse::<u32>().ok());
        assert!(flows.is_some_and(|flows| flows >= 41), "{flows:?} flows to {vip}: {text}");
    }
    assert!(text.contains("steerage_edge_link_requests_total{kind=\"echo\"} 2"), "{text}");
}

#[test]
fn traffic_to_other_ports_is_dropped() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 1);
    testbed
        .apply_load_balancer(&[0], |lb| lb["spec"]["listeners"] = json!([{"protocol": "TCP", "port": PORT}]));
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0]);
    within(&testbed.client(), || {
        let wait = Duration::from_millis(700);
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
        assert_eq!(query_udp_within(&socket, VIP4, 10, wait), None, "no UDP listener");
        for port in [81, CHECK, 10359] {
            let to = (VIP4.parse::<std::net::IpAddr>().expect("address"), port).into();
            let error = std::net::TcpStream::connect_timeout(&to, wait).expect_err("no listener");
            assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{port}: dropped, not refused");
        }
    });
}

#[test]
fn source_ranges_restrict_clients() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 1);
    testbed.apply_load_balancer(&[0], |lb| lb["spec"]["sourceRanges"] = json!(["10.1.0.2/32", "fd99::/64"]));
    testbed.start_ready(0);
    within(&testbed.client(), || {
        eventually("the first address comes in", || {
            Connection::open_within(VIP4, Duration::from_millis(300)).is_ok()
        });
        assert!(Connection::open_within(VIP6, Duration::from_millis(300)).is_err(), "another family's range");
        let socket = std::net::UdpSocket::bind("10.1.0.3:0").expect("bind");
        let wait = Duration::from_millis(700);
        assert_eq!(query_udp_within(&socket, VIP4, 10, wait), None, "another address");
    });
}

/// Two load balancers at the same VIPs: one has TCP and source ranges, the other one UDP.
#[test]
fn load_balancers_share_vips_and_nothing_else() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 2);
    let tcp = |testbed: &TestBed, ranges: Value| {
        testbed.apply_load_balancer(&[0], |lb| {
            lb["spec"]["sharingKey"] = json!("web");
            lb["spec"]["listeners"] = json!([{"protocol": "TCP", "port": PORT}]);
            lb["spec"]["sourceRanges"] = ranges;
        });
    };
    let udp = |testbed: &TestBed| {
        testbed.apply_load_balancer(&[1], |lb| {
            lb["metadata"] = json!({"name": "lb-udp", "uid": "u-2", "generation": 1});
            lb["spec"]["sharingKey"] = json!("web");
            lb["spec"]["listeners"] = json!([{"protocol": "UDP", "port": PORT}]);
        });
    };
    tcp(&testbed, json!(["10.1.0.3/32"]));
    udp(&testbed);
    testbed.start_ready(0);
    let (wait, client) = (Duration::from_millis(700), testbed.client());
    let names: Vec<_> = testbed.nodes.iter().map(|node| node.name.clone()).collect();
    let bind = |vip: &str| {
        std::net::UdpSocket::bind(if vip.contains(':') { "[::]:0" } else { "0.0.0.0:0" }).expect("bind")
    };
    let is_silent = |vip: &str| within(&client, || query_udp_within(&bind(vip), vip, 10, wait).is_none());
    let node_by_udp = |vip| within(&client, || query_udp(vip, 10).map(|reply| reply.0));
    for vip in [VIP4, VIP6] {
        eventually("datagrams come in", || !is_silent(vip));
        for _ in 0..10 {
            assert_eq!(node_by_udp(vip).as_ref(), Some(&names[1]), "its targets are its own");
        }
        let refused = within(&client, || Connection::open_within(vip, wait).is_err());
        assert!(refused, "the other one does not open its ranges: {vip}");
    }
    tcp(&testbed, json!([]));
    eventually("connections come in", || within(&client, || Connection::open_within(VIP4, wait).is_ok()));
    let mut long = within(&client, || Connection::open(VIP4).expect("connect"));
    for vip in [VIP4, VIP6] {
        assert_eq!(responding_nodes(&client, vip, 10), [names[0].as_str()]);
        assert_eq!(node_by_udp(vip).as_ref(), Some(&names[1]));
        sh(&format!("ip netns exec {client} ping -c 1 -W 2 {vip}"));
    }
    testbed.delete_load_balancer("lb-udp");
    eventually("its listener is gone", || is_silent(VIP4) && is_silent(VIP6));
    assert_eq!(responding_nodes(&client, VIP4, 10), [names[0].as_str()]);
    long.echo("still there").expect("the connection of the one that stays");
    udp(&testbed);
    eventually("datagrams come in again", || !is_silent(VIP4));
    long.echo("still there").expect("the connection");
}

#[test]
fn client_with_affinity_stays_on_its_node() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |lb| lb["spec"]["affinity"] = json!({"timeoutSeconds": 10_800}));
    testbed.start_ready(0);
    within(&testbed.client(), || {
        for vip in [VIP4, VIP6] {
            eventually("it is served", || Connection::open_within(vip, Duration::from_millis(300)).is_ok());
            let first = Connection::open(vip).expect("connect").node;
            for _ in 0..20 {
                assert_eq!(Connection::open(vip).expect("connect").node, first);
                assert_eq!(query_udp(vip, 10).expect("answer").0, first);
            }
        }
    });
}

#[test]
fn fragmented_datagrams_arrive_whole() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = serving();
    within(&testbed.client(), || {
        for vip in [VIP4, VIP6] {
            for _ in 0..10 {
                assert_eq!(query_udp(vip, 5000).expect("an answer").3, 5000);
            }
        }
    });
}

#[test]
fn unhealthy_targets_are_avoided_until_all_fail() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.nodes[2].healthy.store(false, Ordering::Relaxed);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    let long = within(&testbed.client(), || Connection::open(VIP4).expect("connect"));
    let first = usize::from(long.node == testbed.nodes[1].name);
    // The node of a long connection fails its check: the connection stays, new ones and datagrams go elsewhere.
    let socket = within(&testbed.client(), || {
        let bound = |_| std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
        (0..50)
            .map(bound)
            .find(|socket| query_udp_from(socket, VIP4, 1).expect("answer").0 == long.node)
            .expect("a socket whose datagrams go to the same node")
    });
    testbed.nodes[first].healthy.store(false, Ordering::Relaxed);
    testbed.wait_until_served_by(&[1 - first]);
    let mut long = long;
    long.echo("still there").expect("the long connection");
    assert_eq!(query_udp_from(&socket, VIP4, 1).expect("answer").0, testbed.nodes[1 - first].name);
    // No target is healthy: those are used that were, until shortly before.
    testbed.nodes[1 - first].healthy.store(false, Ordering::Relaxed);
    testbed.wait_until_served_by(&[0, 1]);
    testbed.nodes[2].healthy.store(true, Ordering::Relaxed);
    testbed.wait_until_served_by(&[2]);
    eventually("the report follows", || {
        let states: Vec<_> = testbed.target_health(0)["spec"]["targets"]
            .as_array()
            .map(|targets| targets.iter().map(|target| target["state"].clone()).collect())
            .unwrap_or_default();
        states == ["Unhealthy", "Unhealthy", "Unhealthy", "Unhealthy", "Healthy", "Healthy"]
    });
}

#[test]
fn draining_node_keeps_its_connections_and_gets_no_new_ones() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    let mut long = within(&testbed.client(), || Connection::open(VIP4).expect("connect"));
    let draining = testbed.nodes.iter().position(|node| node.name == long.node).expect("a node");
    let others: Vec<usize> = (0..3).filter(|node| *node != draining).collect();
    let mut target = testbed.nodes[draining].target();
    target["drainReason"] = json!("the node is cordoned");
    testbed.apply_load_balancer(&others, |lb| lb["spec"]["draining"] = json!([target]));
    testbed.wait_until_served_by(&others);
    long.echo("still there").expect("the long connection");
    eventually("the drain is reported", || {
        let health = testbed.target_health(0);
        let targets = health["spec"]["targets"].as_array().cloned().unwrap_or_default();
        let drains = targets
            .iter()
            .filter(|target| target["use"] == "Draining" && target["useReason"] == "the node is cordoned");
        targets.len() == 6 && drains.count() == 2
    });
    let name = testbed.nodes[draining].name.clone();
    let forwards = |testbed: &TestBed| {
        let nodes = testbed.edge_host(0)["spec"]["drainingNodes"].as_array().cloned().unwrap_or_default();
        nodes.iter().find(|node| node["node"] == name.as_str()).map(|node| node["forwards"] == true)
    };
    eventually("the host says that it forwards to the node", || forwards(&testbed) == Some(true));
    long.echo("still there").expect("the long connection");
    let last = Instant::now();
    while forwards(&testbed) != Some(false) {
        assert!(last.elapsed() < Duration::from_secs(90), "the node is not quiet");
        std::thread::sleep(Duration::from_millis(500));
    }
    // The kernel's counters are read once a second.
    assert!(last.elapsed() > Duration::from_secs(58), "the last packet counts");
    long.echo("still there").expect("the long connection");
    for node in others {
        testbed.nodes[node].healthy.store(false, Ordering::Relaxed);
    }
    testbed.wait_until_served_by(&[draining]);
    long.echo("still there").expect("the long connection");
}

#[test]
fn target_that_is_ready_late_does_not_wait_for_its_interval() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    for node in &testbed.nodes {
        node.healthy.store(false, Ordering::Relaxed);
    }
    testbed.apply_load_balancer(&[0, 1, 2], |lb| {
        lb["spec"]["healthCheck"]["intervalMilliseconds"] = json!(3_600_000);
    });
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    testbed.nodes[1].healthy.store(true, Ordering::Relaxed);
    testbed.wait_until_served_by(&[1]);
}

/// A flip from `api` to `health-check` steering, on nodes that open the health-check port late.
#[test]
fn last_targets_are_kept_while_no_new_one_answers() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0]);
    testbed.apply_load_balancer(&[0, 1, 2], |lb| lb["spec"]["healthCheck"]["port"] = json!(31_000));
    eventually("the new targets are reported", || {
        testbed.target_health(0)["spec"]["targets"].as_array().is_some_and(|targets| targets.len() == 6)
    });
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(6) {
        for vip in [VIP4, VIP6] {
            assert_eq!(
                responding_nodes(&testbed.client(), vip, 10),
                [testbed.nodes[0].name.as_str()],
                "{:?}",
                begun.elapsed()
            );
        }
    }
    testbed.wait_until_served_by(&[0, 1, 2]);
}

#[test]
fn refusing_target_does_not_delay_a_restart() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(2, 2);
    testbed.apply_load_balancer(&[0, 1], |lb| {
        // The second edge host, on which no program runs.
        let refusing = json!({"node": "refusing", "addresses": ["10.0.0.12", "fd00::12"], "weight": 1});
        lb["spec"]["targets"].as_array_mut().expect("targets").push(refusing);
    });
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    // One of several restarts: the machine may have no core for as long.
    let restart = |_| {
        testbed.kill(0);
        let begun = Instant::now();
        testbed.start_ready(0);
        begun.elapsed()
    };
    let bound = Duration::from_millis(2500);
    assert!((0..5).map(restart).any(|elapsed| elapsed < bound), "none was ready within {bound:?}");
    eventually("the reason is reported before the target is unhealthy", || {
        let health = testbed.target_health(0);
        let is_refusing = |target: &Value| {
            target["node"] == "refusing"
                && target["state"] == "Initial"
                && target["reason"].as_str().is_some_and(|reason| reason.contains("refused"))
        };
        health["spec"]["targets"].as_array().is_some_and(|targets| targets.iter().any(is_refusing))
    });
}

#[test]
fn long_connections_survive_target_changes() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.apply_load_balancer(&[0, 1], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    for nodes in [&[0, 1, 2][..], &[2], &[0, 2], &[1]] {
        testbed.apply_load_balancer(nodes, |_| {});
        testbed.wait_until_served_by(nodes);
    }
    load.stop("four changes of membership");
}

#[test]
fn kill_and_restart_lose_no_connection() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 3);
    testbed.nodes[2].healthy.store(false, Ordering::Relaxed);
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1]);
    let load = Load::start(&testbed.client(), 20);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        testbed.kill(0);
        std::thread::sleep(Duration::from_millis(600));
        assert!(testbed.has_vips(0), "the kernel still answers");
        testbed.start_ready(0);
    }
    assert!(testbed.terminate(0), "SIGTERM ends the process with success");
    std::thread::sleep(Duration::from_millis(500));
    assert!(testbed.has_vips(0), "no host takes over, so the VIPs stay");
    load.stop("three kills and restarts, one graceful end");
    let edge = testbed.netns("edge1");
    assert!(sh(&format!("ip -n {edge} addr show dev eth0")).contains("ff02::1:ff00:107"));
    let bpf = testbed.bpf_dir(0);
    let program = env!("CARGO_BIN_EXE_steerage-edge");
    sh(&format!("ip netns exec {edge} {program} --bpf-dir {} cleanup", bpf.display()));
    assert!(!bpf.exists());
    assert!(!sh(&format!("ip -n {edge} addr show dev eth0")).contains("ff02::1:ff00:107"));
    within(&testbed.client(), || {
        assert!(Connection::open_within(VIP4, Duration::from_millis(300)).is_err(), "nothing forwards");
    });
}

#[test]
fn removed_program_is_attached_again() {
    requires!(NetworkNamespace, Program("ip"), Tcx);
    let testbed = serving();
    // The pin is all that holds the program at the link.
    let link = testbed.bpf_dir(0).join("eth0/link");
    std::fs::remove_file(&link).expect("remove");
    eventually("the program is pinned again", || link.exists());
    testbed.wait_until_served_by(&[0, 1, 2]);
}

#[test]
fn rules_of_an_earlier_version_are_removed_once_the_program_forwards() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut testbed = TestBed::new(1, 3);
    let edge = testbed.netns("edge1");
    sh(&format!(
        "ip netns exec {edge} nft 'table netdev steerage-edge {{ chain ingress {{ type filter hook ingress device eth0 priority 0; \
         ip daddr {VIP4} drop; }}; }}'"
    ));
    testbed.apply_load_balancer(&[0, 1, 2], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    eventually("they are removed", || sh(&format!("ip netns exec {edge} nft list tables")).is_empty());
}

#[test]
fn packet_returned_by_a_node_is_not_forwarded_again() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 1);
    testbed.apply_load_balancer(&[0], |_| {});
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0]);
    let node = testbed.netns(&testbed.nodes[0].name);
    let client = testbed.client();
    // The node loses the VIP and routes packets to it back to the link.
    sh(&format!("ip -n {node} addr del {VIP4}/32 dev lo"));
    for (netns, hook) in [(&client, "output"), (&node, "prerouting")] {
        sh(&format!(
            "ip netns exec {netns} nft 'table ip count {{ chain c {{ type filter hook {hook} priority 0;
               ip daddr {VIP4} tcp flags syn counter; }}; }}'"
        ));
    }
    std::thread::sleep(Duration::from_millis(1200));
    within(&client, || {
        assert!(Connection::open_within(VIP4, Duration::from_millis(300)).is_err());
    });
    // The client may send a packet again, but the node must receive each once.
    let counted = |netns: &str| {
        let text = sh(&format!("ip netns exec {netns} nft list table ip count"));
        let number = text.split("counter packets ").nth(1).and_then(|rest| rest.split(' ').next());
        number.and_then(|number| number.parse::<u32>().ok()).expect("a counter")
    };
    eventually("the node receives what the client sent", || counted(&node) >= counted(&client));
    std::thread::sleep(Duration::from_millis(300));
    let sent = counted(&client);
    assert!(sent > 0 && counted(&node) == sent, "of {sent} packets the node received {}", counted(&node));
}

#[test]
fn off_link_targets_and_address_conflicts_are_reported() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = TestBed::new(1, 2);
    // Another host has the IPv4 address already.
    let other = testbed.netns(&testbed.nodes[1].name);
    sh(&format!("ip -n {other} addr add {VIP4}/32 dev eth0"));
    sh(&format!("ip netns exec {other} sysctl -qw net.ipv4.conf.all.arp_ignore=0"));
    testbed.apply_load_balancer(&[0], |lb| {
        let far = json!({"node": "far", "addresses": ["192.0.2.7"], "weight": 1});
        lb["spec"]["targets"].as_array_mut().expect("targets").push(far);
    });
    testbed.start_ready(0);
    eventually("the problem is reported", || {
        testbed.target_health(0)["spec"]["problem"].as_str().is_some_and(|problem| {
            problem.contains(&format!("{VIP4} is in use on the link by 02:00:00:00:00:16"))
        })
    });
    let targets = testbed.target_health(0)["spec"]["targets"].clone();
    let far = targets.as_array().expect("targets").iter().find(|target| target["node"] == "far").cloned();
    let far = far.expect("far");
    assert_eq!(far["state"], "Refused");
    assert!(far["reason"].as_str().expect("reason").contains("behind a gateway"), "{far}");
    assert!(!testbed.has_vips(0), "a VIP in conflict is not answered for");
    within(&testbed.client(), || drop(Connection::open(VIP6).expect("the other address is served")));
    // Once the address is free, the edge answers for it.
    sh(&format!("ip -n {other} addr del {VIP4}/32 dev eth0"));
    sh(&format!("ip netns exec {other} sysctl -qw net.ipv4.conf.all.arp_ignore=1"));
    eventually("the VIP is served", || testbed.has_vips(0));
    testbed.wait_until_served_by(&[0]);
}

#[test]
fn icmp_errors_reach_the_node_of_their_connection() {
    requires!(NetworkNamespace, Program("ip"));
    let testbed = serving();
    // The path behind the router has a smaller MTU: the router reports it by ICMP to the sender, which is the VIP.
    let router = testbed.netns("router");
    sh(&format!(
        "ip -n {router} route replace 10.1.0.0/16 dev client src 10.1.0.1 mtu 1300
         ip -n {router} -6 route replace fd01::/64 dev client metric 1 mtu 1300"
    ));
    within(&testbed.client(), || {
        for vip in [VIP4, VIP6] {
            for _ in 0..6 {
                let mut connection = Connection::open(vip).expect("connect");
                connection.echo(&"x".repeat(20_000)).expect("the node learns the MTU");
            }
        }
    });
    for client in ["10.1.0.2", "fd01::2"] {
        let route = |node: &Node| {
            sh(&format!("ip -n {} route get {client}", testbed.netns(&node.name))).contains("mtu 1300")
        };
        assert!(testbed.nodes.iter().any(route), "no node has learned the MTU of the path to {client}");
    }
}
