// SPDX-License-Identifier: Apache-2.0
//! A node behind the router, which edge hosts reach through their tunnel. It is set up by the commands of `docs/off-link-nodes.md`, as a
//! node without the agent, or by the agent's program.

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde_json::{Value, json};
use steerage_model::TunnelReceiver;
use steerage_requirements::requires;

use crate::testbed::agent::Agent as StatingAgent;
use crate::testbed::net::{self, Connection, Load, query_udp};
use crate::testbed::{PORT, TestBed, VIP4, VIP6, eventually, sh};

const FLAGS: [&str; 2] = ["--tunnel-vni", "7"];
const FAR: &str = "far";

/// A test bed with one edge host, one node on the link and one behind the router, whose end of the tunnel is made by hand.
fn with_far_node() -> TestBed {
    let testbed = with_bare_far_node();
    let far = testbed.netns(FAR);
    let device = |family: &str, name: &str| {
        format!(
            "ip netns exec {far} ip {family} link add {name} address 02:53:54:00:00:07 type vxlan id 7 dstport 10361 nolearning
             ip netns exec {far} ip addr add 127.83.84.1/32 dev {name} scope host
             ip netns exec {far} sysctl -qw net.ipv4.conf.{name}.rp_filter=2
             ip netns exec {far} ip link set {name} arp off addrgenmode none up\n"
        )
    };
    sh(&(device("-4", "steerage-vx4") + &device("-6", "steerage-vx6")));
    testbed
}

fn with_bare_far_node() -> TestBed {
    let testbed = TestBed::new(1, 1);
    let (far, router) = (testbed.netns(FAR), testbed.netns("router"));
    sh(&format!(
        "ip netns add {far}; ip -n {far} link set lo up
         ip netns exec {far} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
         ip -n {far} link add eth0 type veth peer name far netns {router}
         ip -n {far} addr add 10.2.0.40/24 dev eth0; ip -n {far} addr add fd02::40/64 dev eth0 nodad
         ip -n {router} addr add 10.2.0.1/24 dev far; ip -n {router} addr add fd02::1/64 dev far nodad
         ip -n {far} link set eth0 up; ip -n {router} link set far up
         ip -n {far} route add default via 10.2.0.1; ip -n {far} route add default via fd02::1
         ip netns exec {far} sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
         ip -n {far} addr add {VIP4}/32 dev lo; ip -n {far} addr add {VIP6}/128 dev lo nodad"
    ));
    net::serve(&far, FAR, Arc::new(AtomicBool::new(true)));
    // As packets are that come from a network card: no checksum is left to the device, and none are merged.
    sh(&format!("ip netns exec {} ethtool -K eth0 tx off tso off gso off >/dev/null", testbed.client()));
    testbed.apply_load_balancer(&[0], |object| {
        let far = json!({"node": FAR, "weight": 1, "addresses": ["10.2.0.40", "fd02::40"]});
        object["spec"]["targets"].as_array_mut().expect("targets").push(far);
    });
    testbed
}

fn wait_until_served_by(testbed: &TestBed, names: &[&str]) {
    for vip in [VIP4, VIP6] {
        eventually(&format!("{names:?} serve {vip}"), || {
            net::responding_nodes(&testbed.client(), vip, 40) == names
        });
    }
}

/// What the edge says of the far node, of both families.
fn far_statuses(testbed: &TestBed) -> Vec<Value> {
    let health = testbed.target_health(0);
    let targets = health["spec"]["targets"].as_array().cloned().unwrap_or_default();
    targets.into_iter().filter(|target| target["node"] == FAR).collect()
}

fn devices(netns: &str) -> String {
    sh(&format!("ip -n {netns} -o link show type vxlan"))
}

#[test]
fn node_behind_a_router_is_served_through_the_tunnel() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"));
    let mut testbed = with_far_node();
    let edge = testbed.netns("edge1");
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &["node21"]);
    eventually("the far node is refused", || {
        let far = far_statuses(&testbed);
        far.len() == 2 && far.iter().all(|far| far.to_string().contains("--tunnel-vni"))
    });
    assert!(testbed.terminate(0));

    testbed.flags = FLAGS.to_vec();
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &[FAR, "node21"]);
    assert_eq!(testbed.metric(0, "steerage_edge_tunnel_ready").as_deref(), Some("1"));
    // Many segments, longer than fits into the tunnel until the client learns it, and datagrams that it cuts.
    for (vip, mtu) in [(VIP4, 1450), (VIP6, 1430)] {
        net::within(&testbed.client(), || {
            let to_far = || loop {
                let connection = Connection::open(vip).expect("served");
                if connection.node == FAR {
                    return connection;
                }
            };
            let mut connection = to_far();
            assert_eq!(connection.own, connection.seen, "the client's own address");
            for _ in 0..3 {
                connection.echo(&"x".repeat(200_000)).expect("a long line");
            }
            let learned = sh(&format!("ip route get {vip}"));
            assert!(learned.contains(&format!("mtu {mtu}")), "{learned}");
            for length in [100, 1_400, 3_000] {
                let mut nodes = std::collections::BTreeSet::new();
                for _ in 0..30 {
                    let (node, own, seen, received) = query_udp(vip, length).expect("an answer");
                    assert_eq!((own, received), (seen, length));
                    nodes.insert(node);
                }
                assert!(nodes.contains(FAR), "{length} bytes: {nodes:?}");
            }
        });
    }
    let text = testbed.get(0, "/metrics");
    let too_big = text.lines().find(|line| line.contains("too_big") && !line.starts_with('#'));
    assert!(too_big.is_some_and(|line| !line.ends_with(" 0")), "{too_big:?}");

    // The kernel forwards without the process, the next one adopts the device, and a device that is gone comes back.
    let load = Load::start(&testbed.client(), 20);
    let made = devices(&edge);
    testbed.kill(0);
    std::thread::sleep(Duration::from_secs(1));
    testbed.start_ready(0);
    std::thread::sleep(Duration::from_secs(2));
    load.stop("kill -9 and restart of the edge host");
    assert_eq!(devices(&edge), made);
    sh(&format!("ip -n {edge} link delete steerage-vx"));
    eventually("the device is made again", || devices(&edge).contains("steerage-vx"));
    assert_ne!(devices(&edge), made);
    wait_until_served_by(&testbed, &[FAR, "node21"]);

    assert!(testbed.terminate(0));
    testbed.clean_up(0);
    assert_eq!(devices(&edge), "");
}

/// Its health checks pass all the time.
#[test]
fn node_that_states_that_it_does_not_receive_gets_nothing_through_the_tunnel() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"));
    let mut testbed = with_far_node();
    let far = StatingAgent::start_in(&testbed.netns(FAR), 0);
    let near = StatingAgent::start(&testbed.nodes[0], 0);
    testbed.flags = FLAGS.to_vec();
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &[FAR, "node21"]);
    let far_netns = testbed.netns(FAR);
    let to_far =
        || ["steerage-vx4", "steerage-vx6"].map(|device| received(&far_netns, device)).iter().sum::<u64>();
    let receives = TunnelReceiver::Receives { vni: 7, port: 10_361 };
    for (stated, reason) in [
        (TunnelReceiver::EdgeHost, "steerage-vx has the port"),
        (TunnelReceiver::Off, "--edge-tunnel-vni"),
        (
            TunnelReceiver::Receives { vni: 8, port: 10_361 },
            "it receives VNI 8 at port 10361, not 7 at 10361",
        ),
    ] {
        // What a node on the link receives by a tunnel does not matter.
        near.set_tunnel(Some(stated));
        far.set_tunnel(Some(stated));
        wait_until_served_by(&testbed, &["node21"]);
        let before = to_far();
        wait_until_served_by(&testbed, &["node21"]);
        assert_eq!(to_far(), before, "packets are lost");
        eventually("the reason is reported", || {
            let far = far_statuses(&testbed);
            let is_refused = |far: &Value| {
                far["state"] == "Refused" && far["reason"].as_str().is_some_and(|why| why.contains(reason))
            };
            far.len() == 2 && far.iter().all(is_refused)
        });
        let counts = testbed.target_health(0)["spec"]["counts"].clone();
        let refused = counts.as_array().into_iter().flatten().map(|counts| counts["refused"].clone());
        assert_eq!(refused.collect::<Vec<_>>(), [1, 1], "{counts}");
        far.set_tunnel(Some(receives));
        wait_until_served_by(&testbed, &[FAR, "node21"]);
    }
    eventually("nothing is refused", || {
        let far = far_statuses(&testbed);
        far.len() == 2 && far.iter().all(|far| far["state"] == "Healthy")
    });

    // The next process of the edge does not try the node first.
    far.set_tunnel(Some(TunnelReceiver::Failed));
    wait_until_served_by(&testbed, &["node21"]);
    let before = to_far();
    testbed.kill(0);
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &["node21"]);
    assert_eq!(to_far(), before, "packets are lost");
    far.set_tunnel(Some(receives));
    wait_until_served_by(&testbed, &[FAR, "node21"]);
}

/// The number of packets that a device has received.
fn received(netns: &str, device: &str) -> u64 {
    let shown = sh(&format!("ip -n {netns} -s link show {device}"));
    let numbers = shown.lines().nth(3).expect("received").split_whitespace();
    numbers.map(|number| number.parse::<u64>().expect("a number")).nth(1).expect("packets")
}

/// The agent's program on the far node, which makes its end of the tunnel from its flags alone: its API server does not answer. A rule
/// translates as a Service proxy does, TCP alone.
struct Agent(Child);

impl Agent {
    fn start(testbed: &TestBed) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_steerage-edge")).with_file_name("steerage-agent");
        assert!(program.exists(), "build the workspace: {} is missing", program.display());
        let path = testbed.folder.join("agent-kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "none"}}],
        });
        std::fs::write(&path, config.to_string()).expect("write");
        let log = std::fs::File::create(testbed.folder.join("agent.log")).expect("log");
        let child = Command::new("ip")
            .args(["netns", "exec", &testbed.netns(FAR)])
            .arg(program)
            .args(["--node-name=far", "--edge-tunnel-vni=7", "--edge-tunnel-sources=10.0.0.11,fd00::11"])
            .args([format!("--edge-tunnel-vips={VIP4},{VIP6}"), "--kubeconfig".to_owned()])
            .arg(&path)
            .stderr(log)
            .spawn();
        Self(child.expect("agent"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn agent_receives_what_the_edge_sends_through_the_tunnel() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"), Program("nft"));
    let mut testbed = with_bare_far_node();
    let far = testbed.netns(FAR);
    sh(&format!(
        "ip netns exec {far} nft \"add table inet proxy; add chain inet proxy pre {{ type nat hook prerouting priority dstnat; }}; \
         add rule inet proxy pre ip daddr {VIP4} tcp dport {PORT} dnat ip to 10.2.0.40; \
         add rule inet proxy pre ip6 daddr {VIP6} tcp dport {PORT} dnat ip6 to fd02::40\"
         ip netns exec {far} sysctl -qw net.ipv4.conf.all.rp_filter=1"
    ));
    let agent = Agent::start(&testbed);
    eventually("the agent's devices", || devices(&far).lines().count() == 2);
    testbed.flags = FLAGS.to_vec();
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &[FAR, "node21"]);
    for vip in [VIP4, VIP6] {
        net::within(&testbed.client(), || {
            let mut connection = loop {
                let connection = Connection::open(vip).expect("served");
                if connection.node == FAR {
                    break connection;
                }
            };
            assert_eq!(connection.own, connection.seen);
            connection.echo(&"x".repeat(200_000)).expect("a long line");
            // Nothing translates datagrams there, so the agent's rules drop them, although a socket has the address.
            let asked: Vec<_> = (0..20)
                .filter_map(|_| {
                    let any = if vip.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
                    let socket = UdpSocket::bind(any).expect("bind");
                    net::query_udp_within(&socket, vip, 100, Duration::from_millis(100))
                })
                .collect();
            assert!(asked.iter().all(|(node, ..)| node != FAR), "{asked:?}");
        });
    }
    let counters = sh(&format!("ip netns exec {far} nft list counters table ip steerage-edge-tunnel"));
    let after = |reason: &str| {
        counters.split_once(reason).expect("a counter").1.split_once("packets ").expect("a number").1
    };
    assert!(!after("not-translated").starts_with("0 "), "{counters}");
    assert!(after("no-edge-host").starts_with("0 ") && after("no-vip").starts_with("0 "), "{counters}");

    // Both ends are made again, in any order, and connections outlive both processes.
    let load = Load::start(&testbed.client(), 20);
    testbed.kill(0);
    drop(agent);
    std::thread::sleep(Duration::from_millis(500));
    let _agent = Agent::start(&testbed);
    testbed.start_ready(0);
    std::thread::sleep(Duration::from_secs(2));
    load.stop("kill -9 and restart of the edge and of the agent");
}

/// Another program's device of the name is no tunnel, and the nodes on the link are served all the same.
#[test]
fn tunnel_without_its_device_is_reported_and_harms_nothing_else() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"));
    let mut testbed = with_far_node();
    let edge = testbed.netns("edge1");
    sh(&format!("ip -n {edge} link add steerage-vx type bridge"));
    testbed.flags = FLAGS.to_vec();
    testbed.start_ready(0);
    wait_until_served_by(&testbed, &["node21"]);
    eventually("the far node is refused", || {
        let far = far_statuses(&testbed);
        far.len() == 2 && far.iter().all(|far| far.to_string().contains("not Steerage's"))
    });
    assert_eq!(testbed.metric(0, "steerage_edge_tunnel_ready").as_deref(), Some("0"));
    sh(&format!("ip -n {edge} link delete steerage-vx"));
    wait_until_served_by(&testbed, &[FAR, "node21"]);
    // The way to it gets shorter: it is a neighbour, as after a change of the network.
    sh(&format!(
        "ip -n {edge} route add 10.2.0.0/24 via 10.0.0.1; ip -n {edge} route del default via 10.0.0.1"
    ));
    wait_until_served_by(&testbed, &[FAR, "node21"]);
    sh(&format!("ip -n {edge} route del 10.2.0.0/24"));
    eventually("there is no route", || {
        far_statuses(&testbed).iter().any(|far| far.to_string().contains("no route to it"))
    });
}

/// A sender takes nothing in, whatever is sent to its port.
#[test]
fn edge_host_receives_nothing_through_its_tunnel() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"));
    let mut testbed = with_far_node();
    let (edge, far) = (testbed.netns("edge1"), testbed.netns(FAR));
    testbed.flags = FLAGS.to_vec();
    testbed.start_ready(0);
    let own = ["198.51.100.9", "fd99::9"];
    sh(&format!(
        "ip -n {edge} addr add {}/32 dev lo; ip -n {edge} addr add {}/128 dev lo nodad",
        own[0], own[1]
    ));
    let sockets = net::within(&edge, || {
        own.map(|own| {
            let socket = UdpSocket::bind((own, PORT)).expect("bind");
            socket.set_nonblocking(true).expect("set");
            socket
        })
    });
    sh(&format!("ip -n {far} link delete steerage-vx4; ip -n {far} link delete steerage-vx6"));
    for (own, device, remote) in [(own[0], "i4", "10.0.0.11"), (own[1], "i6", "fd00::11")] {
        sh(&format!(
            "ip -n {far} link add {device} type vxlan id 7 dstport 10361 remote {remote}; ip -n {far} link set {device} up
             ip -n {far} route add {own} dev {device}
             ip -n {far} neigh add {own} lladdr 02:53:54:ff:ff:ff dev {device}"
        ));
    }
    let before = received(&edge, "steerage-vx");
    let send = || {
        net::within(&far, || {
            for (own, any) in [(own[0], "10.2.0.40:0"), (own[1], "[fd02::40]:0")] {
                UdpSocket::bind(any).expect("bind").send_to(b"x", (own, PORT)).expect("send");
            }
        });
    };
    for rp_filter in [0, 2] {
        sh(&format!("ip netns exec {edge} sysctl -qw net.ipv4.conf.all.rp_filter={rp_filter}"));
        send();
    }
    eventually("the packets have come to the device", || received(&edge, "steerage-vx") >= before + 4);
    std::thread::sleep(Duration::from_millis(200));
    for socket in &sockets {
        assert!(socket.recv(&mut [0; 10]).is_err(), "{socket:?} has received");
    }
    // As a device without these attributes does.
    sh(&format!(
        "ip -n {edge} link set steerage-vx mtu 1500; ip -n {edge} addr add 127.83.84.1/32 dev steerage-vx scope host
         ip netns exec {edge} sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.steerage-vx.rp_filter=2"
    ));
    eventually("such packets are received otherwise", || {
        send();
        sockets.iter().all(|socket| socket.recv(&mut [0; 10]).is_ok())
    });
}
