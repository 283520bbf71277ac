// SPDX-License-Identifier: Apache-2.0
//! Packets at frontends: spreading, ports, addresses, marks and source ranges.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};

use steerage_model::{Family, Key, Protocol};
use steerage_nft::{Conntrack, ConntrackEntry};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, NODE_PORT, Way, local, service, slices, with_affinity};
use crate::world::{At, Lost, World, ask_on, ask_udp, udp_socket};

const LONG: std::time::Duration = std::time::Duration::from_hours(3);

/// Sends a request from a new port. Returns the answering pod, the port that it saw, and the port that was used.
fn ports(world: &World, from: At, to: SocketAddr) -> (String, u16, u16) {
    world.run(from, || {
        let mut stream = TcpStream::connect(to).expect("connect");
        let own = stream.local_addr().expect("address").port();
        let text = ask_on(&mut stream).expect("an answer");
        let (who, seen) = text.split_once(' ').expect("who and whom");
        (who.to_owned(), seen.parse::<SocketAddr>().expect("address").port(), own)
    })
}

#[test]
fn connections_are_spread_evenly() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, service(), &[At::Pod1, At::Pod2, At::Far]);
    let mut shares = BTreeMap::new();
    world.run(At::Client, || {
        for _ in 0..600 {
            let to = Way::Vip.to(Family::V4);
            let (who, _) = ask_udp(&udp_socket(to), to).expect("an answer");
            *shares.entry(who).or_insert(0) += 1;
        }
    });
    // 200 each, with a standard deviation of 12.
    assert!(shares.len() == 3 && shares.values().all(|share| (140..260).contains(share)), "{shares:?}");
}

#[test]
fn source_port_is_kept_under_local_and_random_under_cluster() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    for family in FAMILIES {
        for way in Way::EXTERNAL {
            let (_, seen, own) = ports(&world, At::Client, way.to(family));
            assert_eq!(seen, own, "{family} {way:?}");
        }
    }
    cluster.set(service(), &[At::Pod1]);
    for family in FAMILIES {
        let kept = (0..5).filter(|_| {
            let (_, seen, own) = ports(&world, At::Client, Way::Vip.to(family));
            seen == own
        });
        assert!(kept.count() < 2, "{family}");
    }
    let text = world.sh_at(At::Node, "nft list table ip steerage");
    let masquerading = || text.lines().filter(|line| line.split(' ').any(|word| word == "masquerade"));
    assert!(masquerading().count() > 2 && masquerading().all(|line| line.contains("fully-random")), "{text}");
}

#[test]
fn same_port_of_two_protocols_reaches_separate_endpoints() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut slices = slices(&[At::Pod1]);
    let more = crate::packets::cluster::slices(&[At::Pod2]);
    slices.extend(more.into_iter().map(|mut slice| {
        slice.key = Key::new("shop", format!("{}-udp", slice.key.name()));
        slice
    }));
    for slice in &mut slices {
        let udp = slice.key.name().ends_with("-udp");
        let mut ports = slice.ports.to_vec();
        ports.retain(|port| (port.protocol == Protocol::Udp) == udp);
        slice.ports = ports.into();
    }
    let mut cluster = Cluster::new(&world, service(), &[]);
    cluster.set_slices(service(), slices);
    for family in FAMILIES {
        for way in [Way::ClusterIp, Way::NodePort, Way::Vip, Way::ExternalIp] {
            for (protocol, who) in [(Protocol::Tcp, "pod1"), (Protocol::Udp, "pod2")] {
                let answer = world.ask(At::Client, way.to(family), protocol);
                assert_eq!(answer.expect("an answer").0, who, "{way:?} {family} {protocol}");
            }
        }
    }
}

#[test]
fn node_ports_are_served_on_listed_addresses_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, service(), &[At::Pod1]);
    world.own(At::Node, &["10.9.9.9", "fd09::9"]);
    for other in ["10.9.9.9", "fd09::9"] {
        let to = SocketAddr::new(other.parse().expect("address"), NODE_PORT);
        assert_eq!(world.ask(At::Client, to, Protocol::Tcp), Err(Lost::Refused), "{to}: nobody listens");
    }
    for family in FAMILIES {
        world
            .ask(At::Client, Way::NodePort.to(family), Protocol::Tcp)
            .expect("the primary address is served");
    }
}

#[test]
fn packet_mark_is_restored() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, with_affinity(local(service()), LONG), &[At::Pod1, At::Pod2]);
    world.sh_at(
        At::Node,
        "nft add table ip probe; \
         nft \"add chain ip probe first { type filter hook prerouting priority -300 ; }\"; \
         nft \"add chain ip probe last { type filter hook postrouting priority 300 ; }\"; \
         nft add rule ip probe first ip saddr 10.1.0.2 meta mark set 0x1234; \
         nft add rule ip probe last ip saddr 10.1.0.2 meta mark 0x1234 counter comment same; \
         nft add rule ip probe last ip saddr 10.1.0.2 meta mark != 0x1234 counter comment other",
    );
    for _ in 0..3 {
        world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer");
    }
    let text = world.sh_at(At::Node, "nft list chain ip probe last");
    let count = |what: &str| {
        let line = text.lines().find(|line| line.contains(what)).expect("the rule");
        line.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a count").to_owned()
    };
    assert_ne!(count("\"same\""), "0", "{text}");
    assert_eq!(count("\"other\""), "0", "{text}");
}

#[test]
fn source_ranges_apply_to_node_and_allow_vip_as_source() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = local(service());
    service.source_ranges = ["10.9.0.0/16", "fd09::/16"].map(|net| net.parse().unwrap()).to_vec();
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Pod1]);
    world.own(At::Node, &["192.0.2.10", "2001:db8::10"]);
    for family in FAMILIES {
        let answer = world.ask(At::Node, Way::Vip.to(family), Protocol::Tcp);
        assert_eq!(answer, Err(Lost::Silence), "{family}: the node is not in the range");
    }
    service.source_ranges = ["10.1.0.1/32", "fd01::1/128"].map(|net| net.parse().unwrap()).to_vec();
    cluster.set(service, &[At::Pod1]);
    for family in FAMILIES {
        // The packet's source is the VIP itself: it is an address of this host.
        let answer = world.ask(At::Node, Way::Vip.to(family), Protocol::Tcp);
        assert_eq!(answer.expect("an answer").0, "pod1", "{family}");
        assert_eq!(world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp), Err(Lost::Silence));
    }
}

#[test]
fn source_range_change_keeps_established_connections() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = local(service());
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Pod1]);
    let mut streams = FAMILIES
        .map(|family| world.run(At::Client, || TcpStream::connect(Way::Vip.to(family)).expect("connect")));
    service.source_ranges = ["10.9.0.0/16", "fd09::/16"].map(|net| net.parse().unwrap()).to_vec();
    cluster.set(service, &[At::Pod1]);
    for (stream, family) in streams.iter_mut().zip(FAMILIES) {
        assert!(ask_on(stream).expect("replies are not filtered").starts_with("pod1 "));
        assert_eq!(world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp), Err(Lost::Silence));
    }
}

/// Anybody who may write EndpointSlices can name a node's address and node port. A node translates a connection once: the packet comes
/// to the host itself, where nobody listens, and circles only if the next node port is that of another node.
#[test]
fn endpoint_at_own_node_port_does_not_loop() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let own_port = slices(&[At::Node]).into_iter().map(|mut slice| {
        let mut ports = slice.ports.to_vec();
        for port in &mut ports {
            port.port = NODE_PORT;
        }
        slice.ports = ports.into();
        slice
    });
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    cluster.set_slices(service(), own_port.collect());
    for family in FAMILIES {
        for way in [Way::NodePort, Way::Vip] {
            let socket = world.run(At::Client, || udp_socket(way.to(family)));
            assert_eq!(ask_udp(&socket, way.to(family)), Err(Lost::Refused));
            let of = if family == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
            let mut conntrack = world.run(At::Node, || Conntrack::open().unwrap());
            let ports = [way.to(family).port(), NODE_PORT];
            let found = conntrack.entries(of, |flow| ports.contains(&flow.original.destination.port()));
            let sent = |flow: &&ConntrackEntry| flow.original.source.ip() != At::Client.addr(family);
            let found = found.unwrap();
            assert_eq!(found.iter().filter(sent).count(), 0, "no other flow came of it: {found:?}");
        }
    }
}
