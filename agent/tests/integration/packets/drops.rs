// SPDX-License-Identifier: Apache-2.0
//! What is dropped or rejected is counted by its reason, and packets that connection tracking cannot place do not pass.

use std::collections::BTreeMap;
use std::net::{SocketAddr, SocketAddrV4};

use socket2::{Domain, Socket, Type};
use steerage_agent::kernel::counted_packets;
use steerage_agent::rules::DropReason;
use steerage_model::{Family, Protocol, TrafficPolicy};
use steerage_requirements::requires;

use crate::packets::affinity::segment;
use crate::packets::cluster::{Cluster, Way, local, service};
use crate::world::{At, World};

/// A packet that resets a connection which nobody has (RST).
const RESET: u8 = 4;

fn counted(world: &World, family: Family) -> BTreeMap<DropReason, u64> {
    let all = world.run(At::Node, || counted_packets().expect("readable").dropped);
    let of_family = all.into_iter().filter(|dropped| dropped.family == family && dropped.packets > 0);
    of_family.map(|dropped| (dropped.reason, dropped.packets)).collect()
}

#[test]
fn drops_are_counted_by_their_reason() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    let lost = |to: SocketAddr| world.ask(At::Client, to, Protocol::Udp).expect_err("lost");
    let vip = Way::Vip.to(Family::V4);
    assert_eq!(counted(&world, Family::V4), BTreeMap::new());

    let mut ranged = service();
    ranged.source_ranges = vec!["10.9.0.0/16".parse().unwrap()];
    cluster.set(ranged, &[At::Pod1]);
    lost(vip);
    cluster.set(service(), &[]);
    lost(vip);
    cluster.set(local(service()), &[At::Far]);
    lost(vip);
    let mut internal = service();
    internal.internal_policy = TrafficPolicy::Local;
    cluster.set(internal, &[At::Far]);
    lost(Way::ClusterIp.to(Family::V4));
    lost(SocketAddr::new(Way::ClusterIp.to(Family::V4).ip(), 81));
    cluster.ruleset.set_unassigned(vec!["192.0.2.0/24".parse().unwrap()]);
    cluster.dataplane.mark_out_of_sync();
    cluster.apply();
    lost("192.0.2.99:80".parse().unwrap());
    // As for a packet that meets a list before a change, and its elements after the next one.
    cluster.set(service(), &[At::Pod1]);
    world.sh_at(At::Node, "nft flush map ip steerage slots-1");
    lost(vip);
    let found = counted(&world, Family::V4);
    for reason in DropReason::ALL {
        let expected = match reason {
            DropReason::NoLocalEndpoint => 2..=2,
            DropReason::Invalid | DropReason::AlreadyForwarded => 0..=0,
            _ => 1..=1,
        };
        let count = found.get(&reason).copied().unwrap_or_default();
        assert!(expected.contains(&count), "{reason:?}: {count} of {found:?}");
    }
    assert_eq!(counted(&world, Family::V6), BTreeMap::new());
}

/// The answer of a pod that comes too late, or outside the window, must not reach the client with the pod's address.
#[test]
fn packets_of_no_known_connection_do_not_pass() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    world.sh_at(
        At::Client,
        "nft add table ip seen; \
         nft \"add chain ip seen in { type filter hook prerouting priority -300 ; }\"; \
         nft add rule ip seen in ip saddr 10.244.0.11 tcp flags rst counter",
    );
    let (SocketAddr::V4(from), SocketAddr::V4(to)) =
        (At::Pod1.socket(Family::V4), SocketAddr::new(At::Client.addr(Family::V4), 4242))
    else {
        panic!("IPv4 addresses")
    };
    let arrives = |dropped: bool, cluster: &mut Cluster| {
        cluster.ruleset.set_drop_invalid(dropped);
        cluster.dataplane.mark_out_of_sync();
        cluster.apply();
        let before = world.sh_at(At::Client, "nft list chain ip seen in");
        world.run(At::Pod1, || {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
            socket
                .send_to(
                    &segment(*from.ip(), to, RESET),
                    &SocketAddr::V4(SocketAddrV4::new(*to.ip(), 0)).into(),
                )
                .unwrap();
        });
        // The next packet on the same way has been there, too.
        world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Udp).expect("an answer");
        world.sh_at(At::Client, "nft list chain ip seen in") != before
    };
    assert!(arrives(false, &mut cluster), "as without the agent");
    assert!(!arrives(true, &mut cluster));
    assert_eq!(counted(&world, Family::V4), [(DropReason::Invalid, 1)].into());
    assert!(world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).is_ok());
}
