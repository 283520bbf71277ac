// SPDX-License-Identifier: Apache-2.0
//! Changes under traffic: restarts, moves between map classes, UDP flows, foreign changes.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use steerage_agent::kernel::{FlowCleaner, FlowWalk, clean_up};
use steerage_agent::plan::ServicePlan;
use steerage_agent::rules::KernelState;
use steerage_model::{Family, Protocol};
use steerage_nft::{Batch, Conntrack, ConntrackEntry, Nft, Table};
use steerage_requirements::requires;
use steerage_watch::Event;

use crate::packets::churn::StopOnDrop;
use crate::packets::cluster::{Applied, Cluster, FAMILIES, Way, key, local, service, slices, with_affinity};
use crate::world::{At, Lost, World, ask_on, ask_udp, udp_socket};

#[test]
fn restart_changes_no_table_and_keeps_connections() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Far]);
    let mut streams: Vec<_> = FAMILIES
        .map(|family| world.run(At::Client, || TcpStream::connect(Way::Vip.to(family)).expect("connect")))
        .into();
    let mut ask =
        || streams.iter_mut().for_each(|stream| assert!(ask_on(stream).unwrap().starts_with("pod1 ")));
    ask();
    let generation = || world.run(At::Node, || Nft::open().unwrap().generation().unwrap());
    let (before, tables) = (generation(), world.sh_at(At::Node, "nft --handle list ruleset"));
    let applied = cluster.restart(&world);
    assert_eq!((applied.elements, applied.full), (0, true));
    // In each family a table of its own for a moment, to compare rules with.
    assert_eq!(generation() - before, 4);
    assert_eq!(world.sh_at(At::Node, "nft --handle list ruleset"), tables);
    ask();
    // Established connections keep their endpoint when the endpoints change.
    cluster.set(local(service()), &[At::Pod1, At::Pod2]);
    ask();
}

/// The last Service with affinity was deleted while no agent ran, and `nf_conntrack_tcp_be_liberal` set.
#[test]
fn restart_deletes_chains_that_are_not_needed_any_more() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let sticky = with_affinity(local(service()), Duration::from_hours(3));
    let mut cluster = Cluster::new(&world, sticky, &[At::Pod1, At::Far]);
    cluster.ruleset.set_drop_invalid(true);
    cluster.dataplane.mark_out_of_sync();
    cluster.apply();
    cluster.set(local(service()), &[At::Pod1, At::Far]);
    let chains = ["remember-received", "remember-sent", "invalid"];
    let has = |chain: &str| world.sh_at(At::Node, "nft list ruleset").contains(&format!("chain {chain} "));
    assert!(chains.iter().all(|chain| has(chain)));
    let applied = cluster.restart(&world);
    assert_eq!((applied.elements, applied.full), (0, true), "the tables are not replaced");
    assert!(!chains.iter().any(|chain| has(chain)));
    assert_eq!(world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer").0, "pod1");
}

#[test]
fn changes_during_downtime_are_applied_at_start() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1, At::Pod2]);
    cluster.delete_slice(steerage_model::Key::new("shop", "web-IPv4"));
    let applied = cluster.restart(&world);
    assert!(applied.elements > 0 && applied.full);
    let refused = world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp);
    assert_eq!(refused, Err(crate::world::Lost::Refused));
    world.ask(At::Client, Way::Vip.to(Family::V6), Protocol::Tcp).expect("the other family is served");
}

/// The VIP moves between two and three endpoints, so from map to map, while a client sends datagrams from ever new ports: each
/// must be translated, and so answered.
#[test]
fn no_packet_passes_untranslated_while_vip_changes_map() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Pod2]);
    world.sh_at(
        At::Node,
        "nft add table ip probe; \
         nft \"add chain ip probe post { type filter hook postrouting priority 300 ; }\"; \
         nft add rule ip probe post ip daddr 192.0.2.10 counter",
    );
    let (stop, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    let mut moves = 0_u32;
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            world.run(At::Client, || {
                let to = Way::Vip.to(Family::V4);
                while !stop.load(Ordering::Relaxed) {
                    let answer = ask_udp(&udp_socket(to), to);
                    assert!(answer.is_ok(), "datagram {}: {answer:?}", sent.load(Ordering::Relaxed));
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        let stop_at_end = StopOnDrop(&stop);
        let end = Instant::now() + Duration::from_secs(4);
        // A machine without a free core needs longer for as much.
        while (Instant::now() < end || moves <= 100 || sent.load(Ordering::Relaxed) <= 100)
            && !client.is_finished()
        {
            cluster.set(local(service()), &[At::Pod1, At::Pod2, At::Far]);
            cluster.set(service(), &[At::Pod1, At::Pod2, At::Far]);
            cluster.set(local(service()), &[At::Pod1]);
            cluster.set(local(service()), &[At::Pod1, At::Pod2]);
            moves += 4;
        }
        drop(stop_at_end);
        client.join().expect("every datagram was answered");
    });
    let sent = sent.into_inner();
    let text = world.sh_at(At::Node, "nft list chain ip probe post");
    assert!(text.contains("counter packets 0 bytes 0"), "{text}");
    assert!(sent > 100 && moves > 100, "{sent} datagrams, {moves} moves");
    println!("{sent} datagrams, {moves} moves");
}

#[test]
fn only_udp_flows_of_removed_endpoint_end() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        cleaner.clean(cluster.set(local(service()), &[At::Pod1]).stale);
        let socket = world.run(At::Client, || udp_socket(to));
        assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
        // Another endpoint is added: the flow stays.
        cleaner.clean(cluster.set(local(service()), &[At::Pod1, At::Pod2]).stale);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
        let applied = cluster.set(local(service()), &[At::Pod2]);
        assert!(applied.stale.udp.keys().any(|frontend| frontend.addr == to.ip()));
        cleaner.clean(applied.stale);
        eventually(|| ask_udp(&socket, to).is_ok_and(|(who, _)| who == "pod2"));
        // No endpoint at all: the flow goes too, and the client is told.
        cleaner.clean(cluster.set(local(service()), &[]).stale);
        eventually(|| ask_udp(&socket, to) == Err(crate::world::Lost::Refused));
        let mut conntrack = world.run(At::Node, || Conntrack::open().unwrap());
        let of = if family == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
        let left = conntrack.entries(of, |flow| flow.original.destination == to).unwrap();
        assert_eq!(left, []);
    }
}

/// The flows of a client that leave translated for this address.
fn translated_flows(world: &World, to: SocketAddr) -> usize {
    let of = if to.is_ipv4() { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
    let mut conntrack = world.run(At::Node, || Conntrack::open().unwrap());
    let is_translated = |flow: &ConntrackEntry| {
        flow.original.destination == to && flow.reply.source != flow.original.destination
    };
    conntrack.entries(of, is_translated).unwrap().len()
}

/// Has a UDP flow by every way and family, and removes the Service by `remove`: all flows have to end.
fn udp_flows_end(remove: impl FnOnce(&World, &mut Cluster) -> Applied) {
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
    let ways = [Way::ClusterIp, Way::Vip, Way::NodePort, Way::ExternalIp];
    let all: Vec<_> = ways.into_iter().flat_map(|way| FAMILIES.map(|family| way.to(family))).collect();
    for to in &all {
        let socket = world.run(At::Client, || udp_socket(*to));
        assert_eq!(ask_udp(&socket, *to).unwrap().0, "pod1");
        assert_eq!(translated_flows(&world, *to), 1);
    }
    let applied = remove(&world, &mut cluster);
    cleaner.clean(applied.stale);
    for to in all {
        eventually(|| translated_flows(&world, to) == 0);
    }
}

/// A packet that had chosen the old endpoint before a change becomes an entry after the first search: the second one deletes it.
#[test]
fn udp_flow_that_begins_after_the_first_search_ends() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let to = Way::Vip.to(Family::V4);
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    let (walked, walks) = channel();
    let done = move |walk| walked.send(walk).unwrap();
    let cleaner = world.run(At::Node, || FlowCleaner::start(done).unwrap());
    // A slow machine may search twice before the entry is there.
    let is_met = || {
        cluster.set(local(service()), &[At::Pod1]);
        cleaner.clean(cluster.set(local(service()), &[At::Pod2]).stale);
        let first = walks.recv_timeout(Duration::from_mins(1)).expect("a search");
        assert!(matches!(first, FlowWalk::Done(_)), "{first:?}");
        // The rules of before stand for the packet's late arrival: nobody is told of this change.
        cluster.set(local(service()), &[At::Pod1]);
        let socket = world.run(At::Client, || udp_socket(to));
        assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
        let is_in_time = walks.try_recv().is_err();
        cluster.set(local(service()), &[At::Pod2]);
        if !is_in_time {
            return false;
        }
        assert_eq!(translated_flows(&world, to), 1, "the entry of the late packet");
        let second = walks.recv_timeout(Duration::from_mins(1)).expect("a second search");
        assert!(matches!(second, FlowWalk::Done(_)), "{second:?}");
        assert_eq!(translated_flows(&world, to), 0);
        assert_eq!(ask_udp(&socket, to).unwrap().0, "pod2");
        true
    };
    assert!(std::iter::repeat_with(is_met).take(10).any(|is_met| is_met), "never in time");
}

#[test]
fn udp_flows_of_service_deleted_while_a_failed_write_waits_end() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    udp_flows_end(|world, cluster| {
        world.sh_at(At::Node, "nft delete table ip steerage; nft delete table ip6 steerage");
        cluster.dataplane.mark_out_of_sync();
        cluster.ruleset.stage([(key(), ServicePlan::default())].into());
        cluster.write(BTreeMap::new())
    });
}

#[test]
fn udp_flows_of_service_deleted_while_no_agent_ran_end() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    udp_flows_end(|world, cluster| {
        cluster.index.apply_service(Event::Delete { key: key(), version: String::new() });
        cluster.restart(world)
    });
}

/// Another program owns the agent's table of IPv4, which so cannot be written.
#[test]
fn family_that_cannot_be_written_does_not_hold_back_the_other() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let owned = world.run(At::Node, || {
        let mut owner = Nft::open().unwrap();
        let mut batch = Batch::new();
        batch.add_owned_table(&Table::new(steerage_nft::Family::Ip, "steerage"));
        owner.commit(batch).unwrap();
        owner
    });
    let write = || Cluster::new(&world, service(), &[At::Pod1]);
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(write));
    assert!(failed.is_err());
    assert_eq!(world.ask(At::Client, Way::Vip.to(Family::V6), Protocol::Tcp).expect("an answer").0, "pod1");
    drop(owned);
    // A process that another test has just forked has the socket too, until it executes its program.
    let tables = || world.run(At::Node, || Nft::open().unwrap().tables(steerage_nft::Family::Ip).unwrap());
    eventually(|| !tables().iter().any(|table| table.name == "steerage"));
    Cluster::new(&world, service(), &[At::Pod1]);
    assert_eq!(world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer").0, "pod1");
}

#[test]
fn untranslated_and_node_port_udp_flows_end_but_tcp_stays() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    for family in FAMILIES {
        // A new one, which has nothing to search for again.
        let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
        let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
        cluster.delete();
        // Sent before the Service exists: the flow passes untranslated and stays so.
        let to = Way::Vip.to(family);
        let early = world.run(At::Pod2, || udp_socket(to));
        assert_eq!(ask_udp(&early, to), Err(Lost::Silence));
        let applied = cluster.set(local(service()), &[At::Pod1]);
        assert_eq!(ask_udp(&early, to), Err(Lost::Silence), "the flow is still there");
        cleaner.clean(applied.stale);
        eventually(|| ask_udp(&early, to).is_ok_and(|(who, _)| who == "pod1"));

        let to = Way::NodePort.to(family);
        let socket = world.run(At::Client, || udp_socket(to));
        assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
        let mut stream = world.run(At::Client, || TcpStream::connect(to).unwrap());
        assert!(ask_on(&mut stream).unwrap().starts_with("pod1 "));
        cleaner.clean(cluster.set(local(service()), &[At::Pod2]).stale);
        eventually(|| ask_udp(&socket, to).is_ok_and(|(who, _)| who == "pod2"));
        assert!(ask_on(&mut stream).unwrap().starts_with("pod1 "), "its endpoint still lives");
        cluster.delete();
    }
}

/// `nft flush ruleset`, for example by a reload of Debian's nftables.service. What passes until the repair must not stay as it is.
#[test]
fn connections_that_began_without_rules_are_translated_after_the_repair() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        // What the node returns untranslated vanishes. Sent around until its TTL expires, it would end the connection at times: the
        // kernel limits such ICMP errors.
        let rule = format!("rule add iif eth0 to {} blackhole", to.ip());
        world.sh_at(At::Client, &format!("ip -{} {rule}", if to.is_ipv4() { 4 } else { 6 }));
        let mut kept = world.run(At::Client, || TcpStream::connect(to).unwrap());
        assert!(ask_on(&mut kept).unwrap().starts_with("pod1 "));
        world.sh_at(At::Node, "nft flush ruleset");
        let socket = world.run(At::Client, || udp_socket(to));
        assert!(ask_udp(&socket, to).is_err());
        std::thread::scope(|scope| {
            let connect =
                || world.run(At::Client, || TcpStream::connect_timeout(&to, Duration::from_secs(30)));
            let early = scope.spawn(connect);
            // Its first packet is on its way.
            std::thread::sleep(Duration::from_millis(300));
            cluster.dataplane.mark_out_of_sync();
            let applied = cluster.apply();
            assert!(applied.full);
            cleaner.clean(applied.stale);
            let mut early = early.join().expect("no panic").expect("a repetition is translated");
            assert!(ask_on(&mut early).unwrap().starts_with("pod1 "));
        });
        eventually(|| ask_udp(&socket, to).is_ok_and(|(who, _)| who == "pod1"));
        assert!(ask_on(&mut kept).unwrap().starts_with("pod1 "), "established connections stay");
    }
}

#[test]
fn terminating_endpoint_keeps_udp_flows_and_gets_no_new_ones() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
    let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
    let to = Way::Vip.to(Family::V4);
    let socket = world.run(At::Client, || udp_socket(to));
    assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
    let mut slices = slices(&[At::Pod1, At::Pod2]);
    for slice in &mut slices {
        let pod = &mut slice.endpoints[0];
        (pod.ready, pod.serving, pod.terminating) = (false, true, true);
    }
    let applied = cluster.set_slices(local(service()), slices.clone());
    assert!(!applied.stale.is_empty());
    cleaner.clean(applied.stale);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(ask_udp(&socket, to).unwrap().0, "pod1");
    assert_eq!(world.ask(At::Client, to, Protocol::Udp).unwrap().0, "pod2");
    // No longer serving: the flow ends.
    for slice in &mut slices {
        slice.endpoints[0].serving = false;
    }
    cleaner.clean(cluster.set_slices(local(service()), slices).stale);
    eventually(|| ask_udp(&socket, to).is_ok_and(|(who, _)| who == "pod2"));
}

#[test]
fn foreign_changes_are_reverted_and_foreign_tables_kept() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1, At::Pod2]);
    let works = || {
        for family in FAMILIES {
            world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp).expect("an answer");
        }
    };
    works();
    world.sh_at(At::Node, "nft add table ip foreign; nft add chain ip foreign mine");
    for harm in [
        "nft delete table ip steerage",
        "nft flush table ip6 steerage",
        "nft flush map ip steerage slots-2",
        "nft flush chain ip steerage services",
        "nft add rule ip steerage to-cluster drop",
        "nft add set ip steerage other \"{ type ipv4_addr ; }\"",
        "nft add chain ip steerage other",
        "nft add element ip steerage frontends \"{ 192.0.2.99 . tcp . 80 }\"",
    ] {
        world.sh_at(At::Node, harm);
        cluster.dataplane.mark_out_of_sync();
        cluster.apply();
        works();
        // Everything is repaired.
        cluster.dataplane.mark_out_of_sync();
        assert_eq!(cluster.apply().elements, 0, "{harm}");
        let text = world.sh_at(At::Node, "nft list table ip steerage");
        assert!(!text.contains("192.0.2.99") && !text.contains("other"), "{harm}: {text}");
    }
    let tables = || world.run(At::Node, || Nft::open().unwrap().tables(steerage_nft::Family::Ip).unwrap());
    world.run(At::Node, || clean_up().unwrap());
    assert_eq!(tables().into_iter().map(|table| table.name).collect::<Vec<_>>(), ["foreign"]);
}

#[test]
fn next_write_repairs_failed_write() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1, At::Pod2]);
    // The kernel's state differs from the cached one, so the difference cannot be applied.
    world.sh_at(At::Node, "nft flush map ip steerage slots-2");
    cluster.delete_slice(steerage_model::Key::new("shop", "web-IPv4"));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cluster.apply()));
    assert!(result.is_err());
    assert_eq!(cluster.dataplane.state(), KernelState::Unknown);
    let applied = cluster.apply();
    assert!(applied.full && !applied.stale.is_empty(), "the flows of the failed write are not forgotten");
    let refused = world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Udp);
    assert_eq!(refused, Err(crate::world::Lost::Refused));
}

#[test]
fn deleted_service_leaves_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Far]);
    cluster.delete();
    let table = Table::new(steerage_nft::Family::Ip, "steerage");
    let mut nft = world.run(At::Node, || Nft::open().unwrap());
    for set in nft.sets(&table).unwrap() {
        assert_eq!(nft.elements(&table, &set).unwrap(), [], "{set}");
    }
}

fn eventually(mut check: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_mins(1);
    while !check() {
        assert!(Instant::now() < end, "never");
        std::thread::sleep(Duration::from_millis(20));
    }
}
