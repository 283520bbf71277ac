// SPDX-License-Identifier: Apache-2.0
//! Frontends that change all the time, under traffic: while an endpoint exists no packet is lost, and none goes on untranslated.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use steerage_agent::plan::{ServicePlan, plan_service};
use steerage_model::{EndpointSlice, Event, Family, Key, Protocol, Service};

use crate::cluster::{Cluster, FAMILIES, Way, local, place, service, slices, with_affinity};
use crate::world::{At, World, ask_udp, udp_socket};

/// How long each kind of change goes on.
const TIME: Duration = Duration::from_secs(4);

/// Changes things while clients outside and in a pod open new connections to the VIP, by UDP and TCP and both families. Every
/// datagram has to be answered, no TCP handshake may have to be repeated, and nothing may leave the node with the VIP still as
/// its destination.
fn under_traffic(world: &World, mut change: impl FnMut(u32)) {
    for (family, to) in [("ip", Way::Vip.to(Family::V4)), ("ip6", Way::Vip.to(Family::V6))] {
        let to = to.ip();
        world.sh_at(
            At::Node,
            &format!(
                "nft add table {family} probe; \
                 nft \"add chain {family} probe post {{ type filter hook postrouting priority 300 ; }}\"; \
                 nft add rule {family} probe post {family} daddr {to} counter"
            ),
        );
    }
    let before = [At::Client, At::Pod2].map(|at| repeated_handshakes(world, at));
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
        let end = Instant::now() + TIME;
        while Instant::now() < end && !clients.iter().any(std::thread::ScopedJoinHandle::is_finished) {
            change(changes);
            changes += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
    for family in ["ip", "ip6"] {
        let text = world
            .sh_at(At::Node, &format!("nft list chain {family} probe post; nft delete table {family} probe"));
        assert!(text.contains("counter packets 0 bytes 0"), "{text}");
    }
    assert_eq!([At::Client, At::Pod2].map(|at| repeated_handshakes(world, at)), before);
    let sent = sent.load(Ordering::Relaxed);
    println!("{sent} connections, {changes} changes");
    assert!(sent > 100 && changes > 4, "{sent} connections, {changes} changes");
}

/// `TCPSynRetrans` of a namespace.
fn repeated_handshakes(world: &World, at: At) -> String {
    let text = world.sh_at(at, "cat /proc/net/netstat");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let found = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "TCPSynRetrans");
    found.expect("the counter").1.to_owned()
}

/// Slices that lead to ports of the pods from 9000 on, one slice a port, so that there are many endpoints.
fn on_ports(pods: &[At], count: u16) -> Vec<EndpointSlice> {
    let of_port = |port: u16| {
        slices(pods).into_iter().map(move |mut slice| {
            slice.key.name = format!("{}-{port}", slice.key.name);
            for of in &mut slice.ports {
                of.port = port;
            }
            slice
        })
    };
    (9000..9000 + count).flat_map(of_port).collect()
}

/// Makes the pods' servers answer on those ports too.
fn answer_on_ports(world: &World) {
    for at in [At::Pod1, At::Far] {
        world.sh_at(
            at,
            "nft add table inet ports; \
             nft \"add chain inet ports in { type nat hook prerouting priority -100 ; }\"; \
             nft add rule inet ports in meta l4proto { tcp, udp } th dport 9000-9099 redirect to :8080",
        );
    }
}

#[test]
fn no_packet_is_lost_while_a_vip_moves_between_exact_maps_and_slot_tables() {
    let world = World::new();
    answer_on_ports(&world);
    let pods = [At::Pod1, At::Far];
    let mut cluster = Cluster::new(&world, service(), &[]);
    cluster.set_slices(service(), on_ports(&pods, 1));
    let all = on_ports(&pods, 20);
    // Endpoints: 2, 10, 40, 2, 18: maps 2, 128, 1024.
    under_traffic(&world, |change| {
        // Two slices a port, one for each family.
        let kept = [1, 5, 20, 1, 9][change as usize % 5] * 2;
        let policy = if change % 2 == 0 { service() } else { local(service()) };
        let (more, fewer) = all.split_at(kept);
        cluster.index.on_service(Event::Apply(policy));
        for slice in more {
            cluster.index.on_slice(Event::Apply(slice.clone()));
        }
        for slice in fewer {
            cluster.index.on_slice(Event::Delete(slice.key.clone()));
        }
        cluster.apply();
    });
}

#[test]
fn no_packet_is_lost_while_affinity_comes_goes_and_changes() {
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
fn no_packet_is_lost_while_a_vip_moves_between_services() {
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    // Another Service, with addresses and node port of its own, and the same ports on another endpoint.
    let other_key = Key::new("shop", "other");
    let mut other = Service { key: other_key.clone(), ..local(service()) };
    other.cluster_ips = ["10.96.0.11", "fd96::11"].map(|addr| addr.parse().unwrap()).to_vec();
    other.external_ips.clear();
    other.health_check_node_port = Some(31001);
    for port in &mut other.ports {
        port.node_port = Some(30081);
    }
    for mut slice in slices(&[At::Pod2, At::Pod1, At::Far]) {
        slice.key.name.push_str("-other");
        slice.service = other_key.clone();
        cluster.index.on_slice(Event::Apply(slice));
    }
    under_traffic(&world, |change| {
        let mut both = [service(), other.clone()];
        // Now one, now the other, and between them both at once.
        match change % 4 {
            0 => both[1].ingress.clear(),
            2 => both[0].ingress.clear(),
            _ => {}
        }
        let updates = both.map(|service| {
            cluster.index.on_service(Event::Apply(service.clone()));
            (service.key.clone(), plan_service(&service, &cluster.index, &place()))
        });
        let updates: BTreeMap<Key, ServicePlan> = updates.into();
        cluster.dataplane.apply(updates, &cluster.pods).expect("apply");
    });
}
