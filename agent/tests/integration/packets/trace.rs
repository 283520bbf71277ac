// SPDX-License-Identifier: Apache-2.0
//! `steerage-agent explain --trace`: the way of live packets.

use std::time::Duration;

use steerage_agent::explain::{PacketQuery, TracedPacket};
use steerage_agent::kernel::trace_packet;
use steerage_agent::plan::Frontend;
use steerage_model::{Family, Protocol};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, local, service};
use crate::world::{At, World};

/// Traces the next packet from the client, which sends until there is a trace.
fn traced(world: &World, family: Family, protocol: Protocol) -> TracedPacket {
    let to = Way::Vip.to(family);
    let frontend = Frontend { addr: to.ip(), protocol, port: to.port() };
    let query = PacketQuery::new(frontend, Some(At::Client.addr(family))).unwrap();
    std::thread::scope(|scope| {
        let trace =
            scope.spawn(|| world.run(At::Node, || trace_packet(query, Duration::from_mins(1)).unwrap()));
        while !trace.is_finished() {
            // Of other senders nothing is traced.
            let _ = world.ask(At::Pod2, to, protocol);
            let _ = world.ask(At::Client, to, protocol);
        }
        trace.join().unwrap().expect("a packet")
    })
}

/// The path of `steerage-agent explain` holds for the packet, and what other tables do to it is seen, too.
#[test]
fn traced_packet_names_our_chains_and_a_foreign_drop() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    for family in FAMILIES {
        let ip = if family == Family::V4 { "ip" } else { "ip6" };
        let pod = At::Pod1.socket(family);
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let packet = traced(&world, family, protocol).to_string();
            for part in [
                &format!("packet    {}", At::Client.addr(family)).replace("fd01::2", "[fd01::2]"),
                ", received from out0",
                &format!("table     {ip} steerage"),
                "prerouting, rule 2: go to services",
                "services, rule 5: go to to-cluster",
                ": accept",
                &format!(" to {pod}"),
                "postrouting, rule ",
                "verdict   no table dropped it: it went on and left by pod0",
            ] {
                assert!(packet.contains(part), "{part}\n{packet}");
            }
            assert!(!packet.contains("steerage-trace"), "{packet}");
        }
    }
    world.sh_at(
        At::Node,
        "nft add table inet firewall; nft add chain inet firewall forward \"{ type filter hook forward priority 0 ; policy accept ; }\"; \
         nft add rule inet firewall forward tcp dport 8080 drop comment \\\"no-web\\\"",
    );
    for family in FAMILIES {
        let packet = traced(&world, family, Protocol::Tcp).to_string();
        let end = "dropped or rejected by rule 1 \"no-web\" (handle ";
        assert!(packet.contains("services, rule 5: go to to-cluster") && packet.contains(end), "{packet}");
        assert!(packet.ends_with("of chain forward of table inet firewall\n"), "{packet}");
    }
    world.sh_at(At::Node, "nft delete table inet firewall");
    // The policy of a later table at a hook where another one accepts; its chain has rules that do not match, or none.
    for (hook, rule) in [
        ("prerouting", ""),
        ("forward", "; nft add rule inet strict forward tcp dport 9999 accept"),
        ("forward", ""),
        ("postrouting", "; nft add rule inet strict postrouting tcp dport 9999 return"),
    ] {
        world.sh_at(At::Node, &format!(
            "nft add table inet first; nft add table inet strict; \
             nft add chain inet first {hook} \"{{ type filter hook {hook} priority 200 ; policy accept ; }}\"; \
             nft add rule inet first {hook} ct state new accept; \
             nft add chain inet strict {hook} \"{{ type filter hook {hook} priority 210 ; policy drop ; }}\"{rule}"
        ));
        for family in FAMILIES {
            let packet = traced(&world, family, Protocol::Tcp).to_string();
            let end = format!("dropped by the policy of chain {hook} of table inet strict\n");
            assert!(
                packet.contains(&format!("{hook}, policy: drop\n")) && packet.ends_with(&end),
                "{packet}"
            );
        }
        world.sh_at(At::Node, "nft delete table inet first; nft delete table inet strict");
    }
    // Our own drops have a reason.
    cluster.set(local(service()), &[At::Far]);
    let packet = traced(&world, Family::V4, Protocol::Tcp).to_string();
    assert!(packet.contains(" (no-local-endpoint) of chain to-local of table ip steerage\n"), "{packet}");
    let tables = world.sh_at(At::Node, "nft list tables");
    assert!(!tables.contains("trace"), "nothing stays behind: {tables}");
}

#[test]
fn trace_without_packets_ends_in_time_and_leaves_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let to = Way::Vip.to(Family::V4);
    let query =
        PacketQuery::new(Frontend { addr: to.ip(), protocol: Protocol::Tcp, port: to.port() }, None).unwrap();
    let found = world.run(At::Node, || trace_packet(query, Duration::from_millis(200)).unwrap());
    assert!(found.is_none());
    assert_eq!(world.sh_at(At::Node, "nft list tables"), "");
}
