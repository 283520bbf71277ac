// SPDX-License-Identifier: Apache-2.0
//! Compares the output of `steerage-agent explain` with the fate of packets.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use steerage_agent::explain::{ExplainContext, Explanation, PacketQuery, PacketVerdict, explain};
use steerage_agent::local_node::LocalPods;
use steerage_agent::plan::Frontend;
use steerage_model::{Family, Protocol, Service, TrafficPolicy};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, local, place, pod_networks, service};
use crate::world::{At, Lost, World};

/// The senders, each with its own address.
const SENDERS: [At; 5] = [At::Client, At::Node, At::Pod1, At::Pod2, At::Far];

fn explained(cluster: &Cluster, from: IpAddr, to: SocketAddr) -> Explanation {
    let (place, pods) = (place(), LocalPods::Networks(pod_networks()));
    let mut ruleset = cluster.ruleset.clone();
    ruleset.set_unassigned(vec!["192.0.2.0/24".parse().unwrap()]);
    let host = &place.addresses;
    let known =
        ExplainContext { ruleset: &ruleset, index: &cluster.index, local_node: &place, pods: &pods, host };
    let frontend = Frontend { addr: to.ip(), protocol: Protocol::Tcp, port: to.port() };
    explain(PacketQuery::new(frontend, Some(from)).unwrap(), known)
}

/// Sends two requests from each place to each frontend. Returns a summary of the results.
fn compare(world: &World, cluster: &Cluster, senders: &[At], ways: &[Way]) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    for family in FAMILIES {
        for (at, way) in senders.iter().flat_map(|at| ways.iter().map(move |way| (*at, *way))) {
            let (from, to) = (at.addr(family), way.to(family));
            let said = explained(cluster, from, to);
            let case = format!("{at:?} {way:?} {family}:\n{said}");
            for _ in 0..2 {
                match (world.ask(at, to, Protocol::Tcp), &said.verdict) {
                    (Ok((who, peer)), PacketVerdict::Forwarded(targets)) => {
                        found.insert("sent");
                        let endpoint = SENDERS.into_iter().find(|at| at.name() == who).unwrap();
                        assert!(targets.contains(&endpoint.socket(family)), "{who} answered\n{case}");
                        // The host's own address is what it is masqueraded with; an endpoint's to itself always is.
                        if at != At::Node && endpoint != at {
                            assert_eq!(peer.ip() != from, said.masqueraded, "seen as {peer}\n{case}");
                            found.insert(if said.masqueraded { "masqueraded" } else { "kept" });
                        }
                    }
                    (Err(Lost::Refused), PacketVerdict::Rejected) => drop(found.insert("rejected")),
                    (Err(Lost::Silence), PacketVerdict::Dropped) => {
                        found.insert("dropped");
                        break;
                    }
                    (answer, _) => panic!("{answer:?}\n{case}"),
                }
            }
        }
    }
    found
}

#[test]
fn explain_matches_packet_results() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let all = [Way::ClusterIp, Way::NodePort, Way::Vip, Way::ExternalIp];
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1, At::Far]);
    assert_eq!(compare(&world, &cluster, &SENDERS, &all), BTreeSet::from(["sent", "masqueraded", "kept"]));
    cluster.set(local(service()), &[At::Pod1, At::Far]);
    assert_eq!(compare(&world, &cluster, &SENDERS, &all), BTreeSet::from(["sent", "masqueraded", "kept"]));
    cluster.set(local(service()), &[At::Far]);
    assert!(compare(&world, &cluster, &[At::Client, At::Pod1], &[Way::Vip]).contains("dropped"));
    let inward = Service { internal_policy: TrafficPolicy::Local, ..service() };
    cluster.set(inward, &[At::Far]);
    assert_eq!(compare(&world, &cluster, &[At::Pod1], &[Way::ClusterIp]), BTreeSet::from(["dropped"]));
    let ranged = Service { source_ranges: vec!["10.1.0.2/32".parse().unwrap()], ..service() };
    cluster.set(ranged, &[At::Pod1]);
    assert!(
        compare(&world, &cluster, &[At::Client, At::Node], &[Way::Vip])
            .is_superset(&["sent", "dropped"].into())
    );
    cluster.set(service(), &[]);
    assert_eq!(compare(&world, &cluster, &SENDERS, &all), BTreeSet::from(["rejected"]));
}

#[test]
fn explain_reports_unserved_addresses() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[At::Pod1]);
    let client = At::Client.addr(Family::V4);
    let other_port = SocketAddr::new(Way::ClusterIp.to(Family::V4).ip(), 81);
    let said = explained(&cluster, client, other_port);
    assert_eq!(said.verdict, PacketVerdict::Rejected);
    assert!(said.to_string().contains("shop/web has the address, and the ports 80/TCP, 80/UDP"), "{said}");
    assert_eq!(world.ask(At::Client, other_port, Protocol::Tcp), Err(Lost::Refused));

    let elsewhere = SocketAddr::new("10.77.0.1".parse().unwrap(), crate::packets::cluster::NODE_PORT);
    let said = explained(&cluster, client, elsewhere).to_string();
    assert!(
        said.contains("is the node port of shop/web, which this node serves at 10.1.0.1, fd01::1"),
        "{said}"
    );

    cluster.set(Service { proxy_name: None, ..service() }, &[At::Pod1]);
    let said = explained(&cluster, client, Way::Vip.to(Family::V4));
    assert_eq!(said.verdict, PacketVerdict::Dropped, "the address is guarded");
    assert!(said.to_string().contains("kube-proxy serves it"), "{said}");
    assert_eq!(explained(&cluster, client, Way::ExternalIp.to(Family::V4)).verdict, PacketVerdict::Untouched);
}
