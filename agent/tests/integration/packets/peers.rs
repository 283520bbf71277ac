// SPDX-License-Identifier: Apache-2.0
//! A node without a local endpoint forwards clients' packets to a node that has one: unchanged, and once.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use steerage_agent::explain::PacketVerdict;
use steerage_agent::kernel::{CountedPackets, counted_packets};
use steerage_agent::rules::DropReason;
use steerage_model::{Family, Protocol};
use steerage_nft::Conntrack;
use steerage_requirements::requires;

use crate::packets::cluster::{FAMILIES, NODE_PORT, Way};
use crate::packets::link::{Agent, Link, On, client};
use crate::world::{Lost, ask_on, ask_udp, udp_socket};

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];
/// Longest wait for what must come.
const LIMIT: Duration = Duration::from_mins(1);
const ON_LINK: [On; 3] = [On::A, On::B, On::C];

fn agents(link: &Link, nodes: &[On], pods: &[On]) -> Vec<Agent> {
    nodes
        .iter()
        .map(|on| {
            let mut agent = Agent::new(link, *on, &[]);
            agent.apply(pods);
            agent
        })
        .collect()
}

fn apply(agents: &mut [Agent], pods: &[On]) {
    for agent in agents {
        agent.apply(pods);
    }
}

/// How many packets a node has forwarded, and dropped because another one had forwarded them.
fn counted(link: &Link, on: On, family: Family) -> (u64, u64) {
    let CountedPackets { dropped, forwarded, .. } =
        link.run(on.name(), || counted_packets().expect("readable"));
    let of = |reason| dropped.iter().find(|dropped| (dropped.family, dropped.reason) == (family, reason));
    let forwarded = forwarded.into_iter().find(|(of, _)| *of == family).expect("a counter").1;
    (forwarded, of(DropReason::AlreadyForwarded).expect("a counter").packets)
}

/// Conntrack entries of a node for the VIP.
fn entries(link: &Link, on: On, family: Family) -> usize {
    let (vip, family) = (
        Way::Vip.to(family),
        if family == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 },
    );
    link.run(on.name(), || {
        let mut conntrack = Conntrack::open().expect("conntrack");
        conntrack.entries(family, |entry| entry.original.destination == vip).expect("entries").len()
    })
}

#[test]
fn packets_without_local_endpoint_reach_another_node_with_the_clients_address() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let agents = agents(&link, &ON_LINK, &[On::B, On::C]);
    for family in FAMILIES {
        let nodes = [On::B, On::C].map(|on| on.addr(family)).into();
        let explained = agents[0].explained(Way::Vip.to(family));
        assert_eq!(explained.verdict, PacketVerdict::ForwardedToNodes(nodes), "{explained}");
        assert_eq!(explained.path, ["received", "to-peer"], "{explained}");
        for protocol in PROTOCOLS {
            let mut who = BTreeSet::new();
            for _ in 0..40 {
                let answer = link.ask(Way::Vip.to(family), protocol);
                let Ok((name, peer)) = answer else { panic!("{family} {protocol}: {answer:?}") };
                assert_eq!(peer.ip(), client(family), "{family} {protocol}");
                who.insert(name);
            }
            assert_eq!(who, ["b", "c"].map(str::to_owned).into(), "{family} {protocol}");
        }
        assert_eq!(entries(&link, On::A, family), 0, "{family}");
        assert!(entries(&link, On::B, family) > 0, "{family}");
        let (forwarded, twice) = counted(&link, On::A, family);
        assert!(forwarded >= 80 + 40 && twice == 0, "{family}: {forwarded} {twice}");
        // The port of the node itself, and clients on it.
        let mut node_port = Way::Vip.to(family);
        node_port.set_ip(On::A.addr(family));
        node_port.set_port(NODE_PORT);
        assert_eq!(link.ask(node_port, Protocol::Udp), Err(Lost::Silence), "{family}");
        for name in ["pod-a", "a"] {
            assert!(link.ask_from(name, Way::Vip.to(family), Protocol::Tcp).is_ok(), "{family} {name}");
        }
        assert_eq!(entries(&link, On::A, family), 2, "{family}: of the pod and the host");
    }
    let text = link.sh("a", "nft list ruleset; nft -j list ruleset");
    assert!(text.contains("dup to ip daddr . meta l4proto . th dport"), "{text}");
}

/// Large datagrams arrive in fragments, which connection tracking puts together first.
#[test]
fn fragmented_datagrams_are_forwarded_whole() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let _agents = agents(&link, &ON_LINK, &[On::B]);
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        link.run("client", || {
            let socket = udp_socket(to);
            socket.connect(to).unwrap();
            socket.send(&[b'?'; 4000]).unwrap();
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{family}: {error}"));
            assert!(buffer[..length].starts_with(b"b "), "{family}");
        });
    }
}

#[test]
fn connections_of_this_node_stay_and_forwarded_ones_keep_their_node() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let mut agents = agents(&link, &ON_LINK, &[On::A]);
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        let open = || link.run("client", || TcpStream::connect(to).unwrap());
        let served_by = |stream: &mut TcpStream| ask_on(stream).map(|text| text[..1].to_owned());
        apply(&mut agents, &[On::A]);
        let mut old = open();
        let datagrams = link.run("client", || udp_socket(to));
        assert_eq!(served_by(&mut old).unwrap(), "a");
        // The endpoint here is gone from the slices, and still answers what it has begun.
        apply(&mut agents, &[On::B, On::C]);
        assert_eq!(served_by(&mut old).unwrap(), "a", "{family}");
        let mut streams: Vec<_> = (0..24)
            .map(|_| {
                let mut stream = open();
                (served_by(&mut stream).unwrap(), stream)
            })
            .collect();
        let by_node = |streams: &[(String, TcpStream)]| {
            streams.iter().fold(BTreeMap::new(), |mut counts: BTreeMap<String, usize>, (name, _)| {
                *counts.entry(name.clone()).or_default() += 1;
                counts
            })
        };
        assert_eq!(by_node(&streams).len(), 2, "{family}: {:?}", by_node(&streams));
        let (who, _) = link.run("client", || ask_udp(&datagrams, to)).unwrap();
        assert!(["b", "c"].contains(&who.as_str()));
        for (name, stream) in &mut streams {
            assert_eq!(served_by(stream).unwrap(), *name, "{family}");
        }
        // When a node leaves, the connections of the other one stay there.
        apply(&mut agents, &[On::B]);
        for (name, stream) in streams.iter_mut().filter(|(name, _)| name == "b") {
            assert_eq!(served_by(stream).unwrap(), *name, "{family}");
        }
        // This node has left nothing behind that would keep a flow from its new endpoint.
        apply(&mut agents, &[On::A, On::B]);
        assert_eq!(link.run("client", || ask_udp(&datagrams, to)).unwrap().0, "a", "{family}");
        assert_eq!(served_by(&mut old).unwrap(), "a", "{family}");
    }
}

/// Each node believes that others have the endpoint.
#[test]
fn a_packet_is_forwarded_once_even_if_nodes_disagree() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let believed = [(On::A, vec![On::B, On::C]), (On::B, vec![On::A, On::C]), (On::C, vec![On::A, On::B])];
    let _agents: Vec<_> = believed.iter().flat_map(|(on, pods)| agents(&link, &[*on], pods)).collect();
    for family in FAMILIES {
        for _ in 0..5 {
            assert_eq!(link.ask(Way::Vip.to(family), Protocol::Udp), Err(Lost::Silence));
        }
        let [a, b, c] = ON_LINK.map(|on| counted(&link, on, family));
        assert_eq!(a, (5, 0), "{family}");
        assert_eq!((b.0, c.0, b.1 + c.1), (0, 0, 5), "{family}: {b:?} {c:?}");
    }
}

#[test]
fn nodes_off_the_link_get_packets_by_an_allowed_tunnel_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let others: Vec<_> = agents(&link, &[On::D], &[On::D]);
    let mut here = Agent::new(&link, On::A, &[]);
    here.apply(&[On::D]);
    let lost = |why: &str| {
        for family in FAMILIES {
            assert_eq!(link.ask(Way::Vip.to(family), Protocol::Udp), Err(Lost::Silence), "{why}");
            assert_eq!(counted(&link, On::A, family), (0, 0), "{why}");
        }
    };
    lost("a router is on the way");
    // As Flannel does it: a route to the node's pods by its address in the tunnel.
    for (on, other) in [(On::A, On::D), (On::D, On::A)] {
        let (n, m) = (on as u8, other as u8);
        link.sh(on.name(), &format!(
            "ip link add tunnel0 address 02:00:00:00:99:0{n} type vxlan id 7 dstport 8472 local {} nolearning; \
             ip link set tunnel0 up; ip addr add 10.99.0.{n}/24 dev tunnel0; ip addr add fd99::{n}/64 dev tunnel0; \
             bridge fdb append 02:00:00:00:99:0{m} dev tunnel0 dst {}; \
             ip neigh add 10.99.0.{m} lladdr 02:00:00:00:99:0{m} dev tunnel0; \
             ip neigh add fd99::{m} lladdr 02:00:00:00:99:0{m} dev tunnel0; \
             ip route add 10.244.{m}.0/24 via 10.99.0.{m}; ip route add fd44:{m}::/64 via fd99::{m}",
            on.addr(Family::V4), other.addr(Family::V4)
        ));
    }
    here.apply(&[On::D]);
    lost("the tunnel is not allowed");
    drop(here);
    let mut here = Agent::new(&link, On::A, &["tunnel1", "tunnel0"]);
    here.apply(&[On::D]);
    for family in FAMILIES {
        for protocol in PROTOCOLS {
            let (name, peer) = link.ask(Way::Vip.to(family), protocol).expect("an answer");
            assert_eq!((name.as_str(), peer.ip()), ("d", client(family)), "{family} {protocol}");
        }
    }
    // What is too large for the tunnel comes back as an ICMP error, and the client sends smaller packets.
    for family in FAMILIES {
        let answered = link.run("client", || {
            let mut stream = TcpStream::connect(Way::Vip.to(family)).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(&[b'?'; 4000]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answers = String::new();
            stream.read_to_string(&mut answers).unwrap();
            answers.matches("d ").count()
        });
        assert_eq!(answered, 4000, "{family}");
    }
    drop(others);
}
