// SPDX-License-Identifier: Apache-2.0
//! The node's end of the edge's tunnel. The client is an edge host as well: it sends what it asks through a VXLAN device of its own.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use serde_json::json;
use steerage_model::{Protocol, STATEMENT_PATH, Statement, TunnelReceiver};
use steerage_requirements::requires;

use crate::process::scene::{Agent, FRONT, Scene, eventually};
use crate::world::{Answer, At, Lost, PORT};

const VIP: &str = "192.0.2.10";
/// In the range of VIPs, and no Service has it.
const UNASSIGNED: &str = "192.0.2.11";
const FLAGS: [&str; 3] =
    ["--edge-tunnel-vni=7", "--edge-tunnel-sources=10.1.0.2,fd01::2", "--edge-tunnel-vips=192.0.2.0/24"];
/// As [`FLAGS`], where the node is an edge host itself.
const ON_AN_EDGE_HOST: [&str; 3] =
    ["--edge-tunnel-vni=7", "--edge-tunnel-sources=10.1.0.1,10.1.0.2", "--edge-tunnel-vips=192.0.2.0/24"];

/// Sends what goes to these addresses through a tunnel.
fn send_through_tunnel(scene: &Scene, from: At, vni: u32, remote: &str, addresses: &[&str]) {
    let device = format!("sender{vni}");
    let world = &scene.world;
    world.sh_at(
        from,
        &format!(
            "ip link add {device} type vxlan id {vni} dstport 10361 remote {remote} nolearning; ip link set {device} up"
        ),
    );
    let own = from.addr(steerage_model::Family::V4);
    for address in addresses {
        world.sh_at(from, &format!("ip route replace {address} dev {device} src {own}"));
        world.sh_at(from, &format!("ip neigh replace {address} lladdr 02:53:54:00:00:07 dev {device}"));
    }
}

fn drops(scene: &Scene, reason: &str) -> u64 {
    let text = scene.nft(&format!("list counter ip steerage-edge-tunnel {reason}"));
    let (_, rest) = text.split_once("packets ").expect("a counter");
    rest.split(' ').next().and_then(|count| count.parse().ok()).expect("a number")
}

fn devices(scene: &Scene) -> String {
    scene.world.sh_at(At::Node, "ip -o link show type vxlan")
}

fn ask(scene: &Scene, from: At, address: &str, port: u16, protocol: Protocol) -> Answer {
    scene.world.ask(from, format!("{address}:{port}").parse().unwrap(), protocol)
}

#[test]
fn edge_hosts_reach_vips_through_the_tunnel_and_nobody_anything_else() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("setpriv"), KubeApiserver);
    let scene = Scene::new("edge-tunnel");
    // The client itself is neither on the link nor behind it: replies go to it by the node's own routes.
    scene.service("web", VIP.parse().unwrap(), &json!({ "externalTrafficPolicy": "Local" }));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started_with("node", &FLAGS);
    send_through_tunnel(&scene, At::Client, 7, "10.1.0.1", &[VIP, UNASSIGNED, "10.244.0.12"]);
    let served = |answer: Answer| {
        answer.is_ok_and(|(pod, client)| {
            pod == "pod1" && client.ip() == At::Client.addr(steerage_model::Family::V4)
        })
    };
    eventually("the tunnel is ready", || agent.metric("steerage_agent_edge_tunnel_ready") == 1);
    for rp_filter in [0, 1, 2] {
        scene.world.sh_at(At::Node, &format!("sysctl -qw net.ipv4.conf.all.rp_filter={rp_filter}"));
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let answer = ask(&scene, At::Client, VIP, FRONT, protocol);
            assert!(served(answer.clone()), "rp_filter {rp_filter}: {answer:?}");
        }
    }
    scene.world.sh_at(At::Node, "sysctl -qw net.ipv4.conf.all.rp_filter=0");
    let (status, text) = scene.command(&["check"]);
    assert!(status.success() && !text.contains("steerage-vx"), "{text}");

    // A pod behind the load balancer's back, an address of no Service, and other ports of the VIP.
    for (address, port, reason) in [
        ("10.244.0.12", PORT, "no-vip"),
        (UNASSIGNED, FRONT, "not-translated"),
        (VIP, FRONT + 1, "not-translated"),
    ] {
        let before = drops(&scene, reason);
        assert_eq!(
            ask(&scene, At::Client, address, port, Protocol::Udp),
            Err(Lost::Silence),
            "{address}:{port}"
        );
        assert!(drops(&scene, reason) > before, "{address}:{port}");
    }

    // No edge host, and a pod with the address of one.
    send_through_tunnel(&scene, At::Far, 7, "10.1.0.1", &[VIP]);
    let before = drops(&scene, "no-edge-host");
    assert_eq!(ask(&scene, At::Far, VIP, FRONT, Protocol::Udp), Err(Lost::Silence));
    assert!(drops(&scene, "no-edge-host") > before);
    // Its device would go on to look for IPv6 routers.
    scene.world.sh_at(At::Far, "ip link delete sender7");
    let after = drops(&scene, "no-edge-host");
    scene.world.own(At::Pod2, &["10.1.0.2"]);
    let forged = drops(&scene, "forged");
    for (number, to) in [(1, "10.1.0.1:10361"), (2, "10.1.0.3:10361")] {
        scene.world.run(At::Pod2, || {
            UdpSocket::bind("10.1.0.2:0").unwrap().send_to(&[0; 100], to).unwrap();
        });
        eventually("the forged packet is dropped", || drops(&scene, "forged") == forged + number);
    }

    // The kernel's device takes what is sent to all hosts of a link, and what a Service of a tenant leads to the node's port.
    scene.nft(
        "add table ip tenant; add chain ip tenant pre { type nat hook prerouting priority dstnat; }; \
         add rule ip tenant pre udp dport 53 dnat to 10.1.0.1:10361",
    );
    for (number, to) in [(1, "255.255.255.255:10361"), (2, "10.96.0.99:53")] {
        scene.world.run(At::Pod1, || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_broadcast(true).unwrap();
            socket.send_to(&[0; 100], to).unwrap();
        });
        eventually("a pod is no edge host", || drops(&scene, "no-edge-host") == after + number);
    }

    // Both are made again, and another agent adopts them.
    let made = devices(&scene);
    assert_eq!(made.lines().count(), 2, "{made}");
    drop(agent);
    assert!(served(ask(&scene, At::Client, VIP, FRONT, Protocol::Tcp)), "without an agent, too");
    let agent = scene.started_with("node", &FLAGS);
    eventually("the tunnel is ready", || agent.metric("steerage_agent_edge_tunnel_ready") == 1);
    assert_eq!(devices(&scene), made);
    scene.nft("delete table ip steerage-edge-tunnel");
    scene.world.sh_at(At::Node, "ip link delete steerage-vx4");
    eventually("the device is made again", || devices(&scene).lines().count() == 2);
    eventually("the table is written again", || {
        scene.nft("list tables").lines().any(|table| table == "table ip steerage-edge-tunnel")
    });
    assert!(served(ask(&scene, At::Client, VIP, FRONT, Protocol::Tcp)));
    drop(agent);

    let agent = scene.started("node");
    assert_eq!(devices(&scene), "", "the flags are gone");
    assert!(!scene.nft("list tables").contains("tunnel"));
    assert_eq!(agent.metric("steerage_agent_edge_tunnel_ready"), 0);
    eventually("it states so", || stated(&agent) == [Some(TunnelReceiver::Off); 2]);
}

/// Otherwise pods of that node could speak for it to all other nodes.
#[test]
fn pods_and_processes_of_an_edge_host_cannot_send_as_it() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("setpriv"), KubeApiserver);
    let scene = Scene::new("edge-tunnel-host");
    let agent = scene.started_with("node", &ON_AN_EDGE_HOST);
    eventually("the tunnel is ready", || agent.metric("steerage_agent_edge_tunnel_ready") == 1);
    // As a network plug-in does it.
    scene.nft(
        "add table ip cni; add chain ip cni post { type nat hook postrouting priority srcnat; }; \
         add rule ip cni post ip saddr 10.244.0.0/24 masquerade",
    );
    let arrived = scene.world.run(At::Client, || UdpSocket::bind("10.1.0.2:10361").unwrap());
    arrived.set_nonblocking(true).unwrap();
    for (number, from) in [(1, At::Pod1), (2, At::Node)] {
        scene.world.run(from, || {
            // A process's datagram that a rule drops is an error of its own.
            let _ = UdpSocket::bind("0.0.0.0:0").unwrap().send_to(&[0; 100], "10.1.0.2:10361");
        });
        eventually("it is dropped", || drops(&scene, "forged") == number);
    }
    assert!(arrived.recv(&mut [0; 200]).is_err());
    // What the kernel's own tunnel sends is the edge's: packets of other hosts, which no process of this one has sent.
    send_through_tunnel(&scene, At::Node, 8, "10.1.0.2", &[UNASSIGNED]);
    scene.world.run(At::Pod1, || {
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(&[0; 100], "192.0.2.11:80").unwrap();
    });
    // With the headers of VXLAN, Ethernet, IPv4 and UDP. The device itself looks for IPv6 routers.
    let is_sent = |length| length == 8 + 14 + 20 + 8 + 100;
    eventually("the tunnel's packet arrives", || arrived.recv(&mut [0; 200]).is_ok_and(is_sent));
    drop(agent);
    let (status, text) = scene.command(&["cleanup"]);
    assert!(status.success(), "{text}");
    assert!(!devices(&scene).contains("steerage-vx") && !scene.nft("list tables").contains("steerage"));
}

#[test]
fn node_that_does_not_receive_has_failed_unless_an_edge_host_has_the_port() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("setpriv"), KubeApiserver);
    let scene = Scene::new("edge-tunnel-port");
    let at_node = |commands: &str| scene.world.sh_at(At::Node, commands);
    at_node("ip link add other type vxlan external dstport 10361; ip link set other up");
    let agent = scene.started_with("node", &FLAGS);
    let shown =
        || ["ready", "failed"].map(|what| agent.metric(&format!("steerage_agent_edge_tunnel_{what}")));
    let is_stated = |what: &str, receivers: [TunnelReceiver; 2]| {
        eventually(what, || stated(&agent) == receivers.map(Some));
    };
    let receives = TunnelReceiver::Receives { vni: 7, port: 10_361 };
    eventually("another program has the port", || shown() == [0, 1]);
    is_stated("it has failed", [TunnelReceiver::Failed; 2]);
    at_node("ip link delete other");
    scene.world.run(At::Node, || steerage_tunnel::ensure(&steerage_tunnel::sender(10_361)).expect("made"));
    eventually("an edge host has the port", || shown() == [0, 0]);
    is_stated("an edge host has the port", [TunnelReceiver::EdgeHost; 2]);
    at_node("ip link delete steerage-vx");
    eventually("the port is free", || shown() == [1, 0]);
    is_stated("both families receive", [receives; 2]);
    // The next process says nothing, or the same: its predecessor's devices are there all the time.
    drop(agent);
    let agent = scene.started_with("node", &FLAGS);
    eventually("it states", || {
        let stated = stated(&agent);
        assert!(stated.iter().flatten().all(|receiver| *receiver == receives), "{stated:?}");
        stated == [Some(receives); 2]
    });
    drop(agent);
    let _other = scene.world.run(At::Node, || {
        for name in steerage_tunnel::RECEIVERS {
            steerage_tunnel::remove(name).expect("removed");
        }
        UdpSocket::bind("0.0.0.0:10361").expect("free")
    });
    let agent = scene.started_with("node", &FLAGS);
    eventually("IPv6 alone receives", || stated(&agent) == [Some(TunnelReceiver::Failed), Some(receives)]);
    // Each second, and not only when the port of IPv4 is tried again, 30 s later.
    let begun = Instant::now();
    at_node("ip link delete steerage-vx6");
    eventually("the device of IPv6 is made again", || devices(&scene).contains("steerage-vx6"));
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

/// What the agent states of its end of the tunnel at addresses of IPv4 and of IPv6.
fn stated(agent: &Agent<'_>) -> [Option<TunnelReceiver>; 2] {
    ["127.0.0.1:10356", "[::1]:10356"].map(|address| {
        let text = agent.get_at(address, STATEMENT_PATH)?;
        let (_, body) = text.split_once("\r\n\r\n")?;
        serde_json::from_str::<Statement>(body).ok()?.edge_tunnel
    })
}
