// SPDX-License-Identifier: Apache-2.0
//! Continuous changes of frontends under traffic: while an endpoint exists, no packet is lost or passes untranslated.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use socket2::{Domain, Socket, Type};
use steerage_agent::plan::{ServicePlan, plan_service};
use steerage_agent::rules::LARGEST_STEP;
use steerage_model::{Endpoint, EndpointPort, EndpointSlice, Family, Key, Protocol, Service, ServicePort};
use steerage_requirements::requires;
use steerage_watch::{Event, Index};

use crate::packets::cluster::{Cluster, FAMILIES, Way, key, local, place, service, slices, with_affinity};
use crate::packets::long_lists::{answer_on_ports, on_ports};
use crate::world::{At, World, ask_udp, udp_socket};

/// `IPPROTO_RAW`: packets with their headers.
const RAW_IP: i32 = 255;
/// Duration of each kind of change.
const TIME: Duration = Duration::from_secs(4);
/// Matches the first packet of a handshake, in a rule.
const SYN: &str = "tcp flags & (syn | ack) == syn";
/// Matches its answer.
const SYN_ACK: &str = "tcp flags & (syn | ack) == syn | ack";

/// Applies changes while an external client and a pod open new connections to the VIP, by UDP and TCP, in both families. Every
/// datagram must be answered, the node may lose no packet of a handshake, and none may leave it with the VIP as its destination.
fn under_traffic(world: &World, mut change: impl FnMut(u32)) {
    for (family, to) in [("ip", Way::Vip.to(Family::V4)), ("ip6", Way::Vip.to(Family::V6))] {
        let to = to.ip();
        world.sh_at(
            At::Node,
            &format!(
                "nft add table {family} probe; \
                 nft \"add chain {family} probe pre {{ type filter hook prerouting priority -150 ; }}\"; \
                 nft \"add rule {family} probe pre {family} daddr {to} {SYN} counter\"; \
                 nft \"add rule {family} probe pre ct direction reply ct original {family} daddr {to} {SYN_ACK} counter\"; \
                 nft \"add chain {family} probe post {{ type filter hook postrouting priority 300 ; }}\"; \
                 nft \"add rule {family} probe post {family} daddr {to} counter\"; \
                 nft \"add rule {family} probe post ct direction original ct original {family} daddr {to} {SYN} counter\"; \
                 nft \"add rule {family} probe post {family} saddr {to} {SYN_ACK} counter\""
            ),
        );
    }
    let (stop, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    let mut changes = 0;
    std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for (at, family) in
            [At::Client, At::Pod2].into_iter().flat_map(|at| FAMILIES.map(|family| (at, family)))
        {
            let (stop, sent, to) = (&stop, &sent, Way::Vip.to(family));
            clients.push(scope.spawn(move || {
                world.run(at, || {
                    while !stop.load(Ordering::Relaxed) {
                        let answer = ask_udp(&udp_socket(to), to);
                        assert!(answer.is_ok(), "{at:?} {family}: {answer:?}");
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }));
            clients.push(scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let answer = world.ask(at, to, Protocol::Tcp);
                    assert!(answer.is_ok(), "{at:?} {family}: {answer:?}");
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        let _stop_at_end = StopOnDrop(&stop);
        let end = Instant::now() + TIME;
        while (Instant::now() < end || changes <= 4 || sent.load(Ordering::Relaxed) <= 100)
            && !clients.iter().any(std::thread::ScopedJoinHandle::is_finished)
        {
            change(changes);
            changes += 1;
        }
    });
    for family in ["ip", "ip6"] {
        let counts = || -> [u64; 5] {
            let text = world.sh_at(At::Node, &format!("nft list table {family} probe"));
            let number = |rest: &str| rest.split(' ').next().and_then(|number| number.parse().ok());
            let counts: Vec<_> = text.split("packets ").skip(1).filter_map(number).collect();
            counts.try_into().expect("five counters")
        };
        let is_complete = |[syns, answers, untranslated, syns_sent, answers_sent]: [u64; 5]| {
            untranslated == 0 && (syns_sent, answers_sent) == (syns, answers)
        };
        // A repeated one may still be on its way.
        let end = Instant::now() + Duration::from_secs(10);
        while !is_complete(counts()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(100));
        }
        let counts = counts();
        assert!(is_complete(counts) && counts[0].min(counts[1]) > 0, "{family}: {counts:?}");
        world.sh_at(At::Node, &format!("nft delete table {family} probe"));
    }
    let sent = sent.load(Ordering::Relaxed);
    println!("{sent} connections, {changes} changes");
    assert!(sent > 100 && changes > 4, "{sent} connections, {changes} changes");
}

#[test]
fn no_packet_is_lost_while_vip_changes_map_class() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    answer_on_ports(&world);
    let pods = [At::Pod1, At::Far];
    let mut cluster = Cluster::new(&world, service(), &[]);
    cluster.set_slices(service(), on_ports(&pods, 1));
    let all = on_ports(&pods, 20);
    // Endpoints: 2, 10, 40, 2, 18: the map of 2, and lists of classes 16 and 64.
    under_traffic(&world, |change| {
        // Two slices a port, one for each family.
        let kept = [1, 5, 20, 1, 9][change as usize % 5] * 2;
        let policy = if change % 2 == 0 { service() } else { local(service()) };
        let (more, fewer) = all.split_at(kept);
        cluster.index.apply_service(Event::Apply(policy));
        for slice in more {
            cluster.index.apply_slice(Event::Apply(slice.clone()));
        }
        for slice in fewer {
            cluster.delete_slice(slice.key.clone());
        }
        cluster.apply();
    });
}

/// The plan of another Service, whose endpoints nobody asks: 9,000 elements a family.
fn bulk() -> (Key, ServicePlan) {
    let key = Key::new("shop", "bulk");
    let ports = 1..=9_u16;
    let service = Service {
        cluster_ips: ["10.96.0.12", "fd96::12"].map(|addr| addr.parse().unwrap()).to_vec(),
        ports: ports
            .clone()
            .map(|port| ServicePort::new(port.to_string(), Protocol::Tcp, port, None))
            .collect(),
        ..Service { key: key.clone(), ..service() }
    };
    let service = Service { ingress: Vec::new(), external_ips: Vec::new(), ..service };
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    for family in FAMILIES {
        let addr = |n: u32| match family {
            Family::V4 => IpAddr::from(Ipv4Addr::from_bits(0x0af5_0000 + n)),
            Family::V6 => IpAddr::from(Ipv6Addr::from_bits((0xfd45 << 112) + u128::from(n))),
        };
        let port = |port: u16| EndpointPort { name: port.to_string(), protocol: Protocol::Tcp, port };
        index.apply_slice(Event::Apply(EndpointSlice {
            ports: ports.clone().map(port).collect(),
            endpoints: (0..1000).map(|n| Endpoint::ready(addr(n), "other")).collect(),
            ..EndpointSlice::new(Key::new("shop", format!("bulk-{family}")), key.clone(), family)
        }));
    }
    (key, plan_service(&service, &index, &place()))
}

/// Each change comes together with one of another Service that is too large for one transaction.
#[test]
fn no_packet_is_lost_while_changes_are_written_in_steps() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    answer_on_ports(&world);
    let mut cluster = Cluster::new(&world, service(), &[]);
    cluster.set_slices(service(), on_ports(&[At::Pod1, At::Far], 1));
    let (all, (bulk_key, bulk)) = (on_ports(&[At::Pod1, At::Far], 20), bulk());
    // Endpoints: 2, 10, 40, 18, and again: the bulk comes as often with fewer of them as with more.
    under_traffic(&world, |change| {
        let kept = [1, 5, 20, 9, 1, 20, 5][change as usize % 7] * 2;
        let (more, fewer) = all.split_at(kept);
        let policy = if change % 2 == 0 { service() } else { local(service()) };
        cluster.index.apply_service(Event::Apply(policy.clone()));
        for slice in more {
            cluster.index.apply_slice(Event::Apply(slice.clone()));
        }
        for slice in fewer {
            cluster.delete_slice(slice.key.clone());
        }
        let bulk = if change % 2 == 0 { bulk.clone() } else { ServicePlan::default() };
        let plan = plan_service(&policy, &cluster.index, &place());
        let applied = cluster.write([(key(), plan), (bulk_key.clone(), bulk)].into());
        assert!(applied.full || applied.elements > 2 * LARGEST_STEP, "{applied:?}");
    });
}

#[test]
fn no_packet_is_lost_while_affinity_changes() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1, At::Far]);
    let lists = [&[At::Pod1, At::Far][..], &[At::Pod1], &[At::Far], &[At::Pod1, At::Far]];
    under_traffic(&world, |change| {
        let change = change as usize;
        let timeout = [0, 60, 3600][change % 3];
        let mut service = service();
        if timeout > 0 {
            service = with_affinity(service, Duration::from_secs(timeout));
        }
        cluster.set(service, lists[change % lists.len()]);
    });
}

#[test]
fn no_packet_is_lost_while_vip_moves_between_services() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    // Another Service, with its own addresses and node port, and the same ports on another endpoint.
    let other_key = Key::new("shop", "other");
    let mut other = Service { key: other_key.clone(), ..local(service()) };
    other.cluster_ips = ["10.96.0.11", "fd96::11"].map(|addr| addr.parse().unwrap()).to_vec();
    other.external_ips.clear();
    other.health_check_node_port = Some(31001);
    for port in &mut other.ports {
        port.node_port = Some(30081);
    }
    for mut slice in slices(&[At::Pod2, At::Pod1, At::Far]) {
        slice.key = Key::new("shop", format!("{}-other", slice.key.name()));
        slice.service = other_key.clone();
        cluster.index.apply_slice(Event::Apply(slice));
    }
    under_traffic(&world, |change| {
        let mut both = [service(), other.clone()];
        // Alternates between the Services, with both at once in between.
        match change % 4 {
            0 => both[1].ingress.clear(),
            2 => both[0].ingress.clear(),
            _ => {}
        }
        let updates = both.map(|service| {
            cluster.index.apply_service(Event::Apply(service.clone()));
            (service.key.clone(), plan_service(&service, &cluster.index, &place()))
        });
        let updates: BTreeMap<Key, ServicePlan> = updates.into();
        cluster.write(updates);
    });
}

/// Sends datagrams of new flows as fast as possible until stopped. Returns their number.
fn flood(to: SocketAddrV4, stop: &AtomicBool) -> u32 {
    let socket: UdpSocket = Socket::new(Domain::IPV4, Type::RAW, Some(RAW_IP.into())).unwrap().into();
    let mut sent = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        let [_, high, a, b] = sent.to_be_bytes();
        // The kernel fills in identification and checksum.
        let mut packet = vec![0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 64, high];
        packet.extend(to.ip().octets());
        packet.extend([a, b]);
        packet.extend(to.port().to_be_bytes());
        packet.extend([0, 12, 0, 0]);
        packet.extend(b"who?");
        // Not sent if the queue is full.
        sent = sent.wrapping_add(u32::from(socket.send_to(&packet, to).is_ok()));
    }
    sent
}

/// A node with a Service of one endpoint that nobody answers for, whose entries expire soon, and counters of its packets before and
/// after the agent's rules.
fn flooded(world: &World, address: Ipv4Addr) -> (Cluster, Vec<EndpointSlice>) {
    world.sh_at(
        At::Pod1,
        "nft add table ip hush; \
         nft \"add chain ip hush in { type filter hook input priority 0 ; }\"; \
         nft add rule ip hush in udp dport 9000-9099 drop",
    );
    world.sh_at(
        At::Node,
        &format!(
            "nft add table ip flood; \
             nft \"add chain ip flood before {{ type filter hook prerouting priority -150 ; }}\"; \
             nft add rule ip flood before ip daddr {address} udp dport 80 counter; \
             nft \"add chain ip flood after {{ type filter hook forward priority 0 ; }}\"; \
             nft add rule ip flood after ct direction original ct original ip daddr {address} ip daddr != {address} counter; \
             sysctl -qw net.netfilter.nf_conntrack_udp_timeout=1"
        ),
    );
    let mut slim = local(service());
    slim.ports.retain(|port| port.protocol == Protocol::Udp);
    slim.cluster_ips.truncate(1);
    slim.ingress.truncate(1);
    slim.external_ips.clear();
    let mut many = on_ports(&[At::Pod1], 8);
    many.retain(|slice| slice.family == Family::V4);
    let mut cluster = Cluster::new(world, slim.clone(), &[]);
    cluster.set_slices(slim, many.clone());
    (cluster, many)
}

/// Sets a flag at the end of a scope.
pub(crate) struct StopOnDrop<'s>(pub(crate) &'s AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Applies changes during a flood. Every datagram must be translated.
fn under_flood(world: &World, to: SocketAddrV4, mut change: impl FnMut()) {
    let stop = AtomicBool::new(false);
    let mut changes = 0;
    let sent = std::thread::scope(|scope| {
        // Also if a change panics: else the flood would not end.
        let stop_at_end = StopOnDrop(&stop);
        let sender = scope.spawn(|| world.run(At::Client, || flood(to, &stop)));
        let end = Instant::now() + TIME;
        while Instant::now() < end || changes < 20 {
            change();
            changes += 1;
        }
        drop(stop_at_end);
        sender.join().expect("the flood")
    });
    std::thread::sleep(Duration::from_millis(500));
    let count = |chain: &str| -> u64 {
        let text = world.sh_at(At::Node, &format!("nft list chain ip flood {chain}"));
        let number = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        number.and_then(|number| number.parse().ok()).expect("a count")
    };
    let (before, after) = (count("before"), count("after"));
    println!("{sent} datagrams sent, {before} came, {after} went on, {changes} changes");
    assert!(before > 1000, "{before} datagrams");
    assert_eq!(after, before);
}

/// A packet's walk through the maps takes a microsecond, and a change must fall into it, which takes many of both. When the VIP
/// moves from the last exact map to the first, the walk may pass the new map before the change and the old map after it.
#[test]
fn no_packet_of_flood_is_lost_while_vip_changes_map() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let SocketAddr::V4(to) = Way::Vip.to(Family::V4) else { panic!("IPv4") };
    let (mut cluster, many) = flooded(&world, *to.ip());
    let mut few = false;
    under_flood(&world, to, || {
        few = !few;
        for slice in &many[1..] {
            if few {
                cluster.delete_slice(slice.key.clone());
            } else {
                cluster.index.apply_slice(Event::Apply(slice.clone()));
            }
        }
        cluster.apply();
    });
}

/// Sets that Services need come and go with the rules that look in them, also while the agent restarts.
#[test]
fn no_packet_of_flood_is_lost_while_sets_come_and_go() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let SocketAddr::V4(to) = Way::Vip.to(Family::V4) else { panic!("IPv4") };
    let (mut cluster, _) = flooded(&world, *to.ip());
    let slim = cluster.index.service(&key()).expect("the Service").clone();
    let mut more = on_ports(&[At::Pod1], 20);
    more.retain(|slice| slice.family == Family::V4);
    let mut change = 0;
    under_flood(&world, to, || {
        change += 1;
        let mut service = slim.clone();
        match change % 4 {
            // Each time of another length.
            0 => {
                let network = format!("10.1.64.0/{}", 8 + change % 17);
                service.source_ranges = vec![network.parse().expect("a network")];
            }
            1 => service = with_affinity(service, Duration::from_secs(change)),
            2 => {
                for slice in &more[8..] {
                    cluster.index.apply_slice(Event::Apply(slice.clone()));
                }
            }
            _ => {
                for slice in &more[8..] {
                    cluster.delete_slice(slice.key.clone());
                }
            }
        }
        cluster.index.apply_service(Event::Apply(service));
        // What the change needs comes with a running process, or a new one; in any case that deletes what was needed before.
        if change % 8 < 4 {
            cluster.apply();
        }
        cluster.restart(&world);
    });
}

/// Lists of sources, some of them so large that they change in several transactions, are exchanged while an admitted network floods the
/// VIP. A datagram of it must never meet a frontend whose list lacks the network.
#[test]
fn no_admitted_packet_of_flood_is_lost_while_source_ranges_change() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let SocketAddr::V4(to) = Way::Vip.to(Family::V4) else { panic!("IPv4") };
    let (mut cluster, _) = flooded(&world, *to.ip());
    let slim = cluster.index.service(&key()).expect("the Service").clone();
    // No two of these are one.
    let other = |n: u32| IpNet::from(IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + 2 * n)));
    let mut counts = [20_000, 19_000, 3, 4, 18_000, 5, 6, 0].into_iter().cycle();
    let mut most = 0;
    under_flood(&world, to, || {
        let count = counts.next().expect("a cycle");
        let admitted = "10.1.64.0/24".parse().expect("a network");
        let source_ranges =
            if count == 0 { Vec::new() } else { (0..count).map(other).chain([admitted]).collect() };
        cluster.index.apply_service(Event::Apply(Service { source_ranges, ..slim.clone() }));
        most = most.max(cluster.apply().elements);
    });
    assert!(most > 4 * LARGEST_STEP, "{most} elements");
}
