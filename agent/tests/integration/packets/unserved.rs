// SPDX-License-Identifier: Apache-2.0
//! `--drop-unassigned-vips`: what comes for a load balancer's address and matches nothing goes no further, and nothing of it is kept.

use std::net::SocketAddr;

use steerage_model::{Family, Protocol};
use steerage_nft::Conntrack;
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, local, service, slices};
use crate::world::{At, Lost, World, ask_udp, udp_socket};

/// An unassigned address of the range, which a host behind the node has.
fn unserved(family: Family) -> SocketAddr {
    let text = if family == Family::V4 { "192.0.2.99:80" } else { "[2001:db8::99]:80" };
    text.parse().unwrap()
}

fn guarded(world: &World) -> Cluster {
    world.own(At::Client, &["192.0.2.99", "2001:db8::99"]);
    let mut cluster = Cluster::new(world, local(service()), &[At::Pod1]);
    for family in FAMILIES {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let answer = world.ask(At::Pod2, unserved(family), protocol);
            assert_eq!(answer, Err(Lost::Refused), "without the flag it goes on to the host behind");
        }
    }
    let ranges = ["192.0.2.0/24", "2001:db8::/120"].map(|net| net.parse().unwrap());
    assert!(cluster.ruleset.set_unassigned(ranges.to_vec()));
    cluster.dataplane.mark_out_of_sync();
    cluster.apply();
    cluster
}

#[test]
fn unassigned_vip_is_dropped_without_conntrack_entry() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = guarded(&world);
    for family in FAMILIES {
        let mut other_port = Way::Vip.to(family);
        other_port.set_port(81);
        for (from, to) in [(At::Pod2, unserved(family)), (At::Node, unserved(family)), (At::Pod2, other_port)]
        {
            // Sent by the host itself, the drop is an error at once.
            let lost = if from == At::Node { [Lost::Refused, Lost::Silence] } else { [Lost::Silence; 2] };
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let answer = world.ask(from, to, protocol).expect_err("dropped");
                assert!(lost.contains(&answer), "{from:?} to {to} by {protocol}: {answer:?}");
            }
        }
        // A flow that began before the Service is translated once rules exist. No entry needs to be deleted.
        let socket = world.run(At::Pod2, || udp_socket(unserved(family)));
        assert_eq!(ask_udp(&socket, unserved(family)), Err(Lost::Silence));
        let of = if family == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
        let mut conntrack = world.run(At::Node, || Conntrack::open().unwrap());
        let stuck = conntrack.entries(of, |flow| {
            flow.original.destination == unserved(family)
                && flow.original.source.ip() == At::Pod2.addr(family)
                && flow.original.source.port() == socket.local_addr().unwrap().port()
        });
        assert_eq!(stuck.unwrap(), []);
        let mut more = local(service());
        more.ingress[0].ip = Some(unserved(Family::V4).ip());
        more.ingress[1].ip = Some(unserved(Family::V6).ip());
        cluster.set(more, &[At::Pod1]);
        assert_eq!(ask_udp(&socket, unserved(family)).expect("an answer").0, "pod1");
        cluster.set(local(service()), &[At::Pod1]);
    }
    world.sh_at(At::Node, "nft list ruleset; nft -j list ruleset");
}

#[test]
fn unassigned_vip_drop_spares_services_and_other_rules() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = guarded(&world);
    for family in FAMILIES {
        for (from, seen) in [(At::Client, At::Client), (At::Pod2, At::Pod2), (At::Node, At::Node)] {
            let (who, peer) = world.ask(from, Way::Vip.to(family), Protocol::Tcp).expect("served");
            assert_eq!((who.as_str(), peer.ip()), ("pod1", seen.addr(family)));
        }
    }
    // A Service without endpoints is rejected, as outside the range.
    cluster.set_slices(local(service()), slices(&[]));
    assert_eq!(world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp), Err(Lost::Refused));
    // The host's own address responds, here with a reset.
    world.own(At::Node, &["192.0.2.77"]);
    let own = "192.0.2.77:81".parse().unwrap();
    for from in [At::Client, At::Node] {
        assert_eq!(world.ask(from, own, Protocol::Tcp), Err(Lost::Refused), "{from:?}");
    }
    // Another proxy on the node serves an address of the range with later rules.
    world.sh_at(
        At::Node,
        "nft add table ip other; \
         nft \"add chain ip other in { type nat hook prerouting priority -100 ; }\"; \
         nft add rule ip other in ip daddr 192.0.2.50 tcp dport 80 dnat to 10.244.0.11:8080",
    );
    let theirs = "192.0.2.50:80".parse().unwrap();
    assert_eq!(world.ask(At::Client, theirs, Protocol::Tcp).expect("served").0, "pod1");
}
