// SPDX-License-Identifier: Apache-2.0
//! Handshakes that began before there were rules for them.

use std::net::TcpStream;
use std::time::Duration;

use steerage_agent::kernel::FlowCleaner;
use steerage_model::Protocol;
use steerage_nft::{Conntrack, ConntrackEntry};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, local, service};
use crate::world::{At, World, ask_on};

/// A client tries a VIP before this node serves it. Conntrack would keep the handshake untranslated for two minutes, and each of its
/// repetitions with it.
#[test]
fn handshake_that_began_before_the_service_is_translated() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let cleaner = world.run(At::Node, || FlowCleaner::start(|_| {}).unwrap());
    for family in FAMILIES {
        let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1]);
        cluster.delete();
        let to = Way::Vip.to(family);
        // What the node returns untranslated vanishes: an ICMP error would end the attempt.
        let (ip, of) = if to.is_ipv4() {
            ("ip -4", steerage_nft::Family::Ip)
        } else {
            ("ip -6", steerage_nft::Family::Ip6)
        };
        world.sh_at(At::Client, &format!("{ip} rule add iif eth0 to {} blackhole", to.ip()));
        let is_meant = |flow: &ConntrackEntry| flow.original.destination == to;
        let mut conntrack = world.run(At::Node, || Conntrack::open().unwrap());
        std::thread::scope(|scope| {
            let connect =
                || world.run(At::Client, || TcpStream::connect_timeout(&to, Duration::from_secs(30)));
            let early = scope.spawn(connect);
            while conntrack.entries(of, is_meant).unwrap().is_empty() {
                std::thread::sleep(Duration::from_millis(20));
            }
            let applied = cluster.set(local(service()), &[At::Pod1]);
            let handshakes = &applied.stale.handshakes;
            assert!(handshakes.iter().any(|at| (at.addr, at.protocol) == (to.ip(), Protocol::Tcp)));
            cleaner.clean(applied.stale);
            let mut early = early.join().expect("no panic").expect("a repetition is translated");
            assert!(ask_on(&mut early).unwrap().starts_with("pod1 "));
        });
        cluster.delete();
    }
}
