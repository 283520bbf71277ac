// SPDX-License-Identifier: Apache-2.0
//! Services with more endpoints than a frontend has slots of its own, and the choice of an endpoint by the flow.

use std::collections::BTreeMap;

use steerage_model::{EndpointSlice, Family, Key};
use steerage_nft::Conntrack;
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, service, slices};
use crate::world::{At, World, ask_udp, udp_socket};

/// Slices that lead to ports of the pods from 9000 on, one slice a port, so that there are many endpoints.
pub(crate) fn on_ports(pods: &[At], count: u16) -> Vec<EndpointSlice> {
    let of_port = |port: u16| {
        slices(pods).into_iter().map(move |mut slice| {
            slice.key = Key::new("shop", format!("{}-{port}", slice.key.name()));
            let mut ports = slice.ports.to_vec();
            for of in &mut ports {
                of.port = port;
            }
            slice.ports = ports.into();
            slice
        })
    };
    (9000..9000 + count).flat_map(of_port).collect()
}

/// Redirects those ports to the pods' servers.
pub(crate) fn answer_on_ports(world: &World) {
    for at in [At::Pod1, At::Pod2, At::Far] {
        world.sh_at(
            at,
            "nft add table inet ports; \
             nft \"add chain inet ports in { type nat hook prerouting priority -100 ; }\"; \
             nft add rule inet ports in meta l4proto { tcp, udp } th dport 9000-9099 redirect to :8080",
        );
    }
}

/// The flows at the node's VIP by the port of their endpoint.
pub(crate) fn endpoints_of_flows(world: &World, family: Family) -> BTreeMap<u16, u32> {
    let nft = if family == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
    let to = Way::Vip.to(family);
    let flows = world.run(At::Node, || {
        Conntrack::open().unwrap().entries(nft, |flow| flow.original.destination == to).unwrap()
    });
    let mut counts = BTreeMap::new();
    for flow in flows {
        *counts.entry(flow.reply.source.port()).or_default() += 1;
    }
    counts
}

/// For each number of endpoints in the classes 16, 64 and 256, and where a class begins: as even as independent random choices.
#[test]
fn connections_are_spread_evenly_over_long_lists() {
    const EACH: u32 = 40;
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("conntrack"));
    let world = World::new();
    answer_on_ports(&world);
    for count in [9_u16, 16, 17, 40, 64, 65, 100] {
        let mut cluster = Cluster::new(&world, service(), &[]);
        cluster.set_slices(service(), on_ports(&[At::Far], count));
        for family in FAMILIES {
            let to = Way::Vip.to(family);
            world.sh_at(At::Node, "conntrack -F 2>/dev/null");
            world.run(At::Client, || {
                for _ in 0..EACH * u32::from(count) {
                    udp_socket(to).send_to(b"?", to).unwrap();
                }
            });
            let counts = endpoints_of_flows(&world, family);
            assert_eq!(counts.len(), usize::from(count), "{family}: {counts:?}");
            // Chi-squared, by its degrees of freedom: 1 on average. Above 2.5 once in 10,000 tries with 9 endpoints, and less often
            // with more.
            let mean = f64::from(counts.values().sum::<u32>()) / f64::from(count);
            let square = |seen: &u32| (f64::from(*seen) - mean).powi(2) / mean;
            let chi = counts.values().map(square).sum::<f64>() / f64::from(count - 1);
            assert!(chi < 4.0, "{count} endpoints, {family}: {chi}, {counts:?}");
        }
    }
}

/// What a flow's packets choose depends on its address and port alone: after the node has lost its conntrack entries, or when two
/// packets of one socket race, they have one endpoint.
#[test]
fn flow_without_conntrack_entry_finds_its_endpoint_again() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("conntrack"));
    let world = World::new();
    answer_on_ports(&world);
    let pods = [At::Pod1, At::Pod2, At::Far];
    let mut cluster = Cluster::new(&world, service(), &pods);
    for long in [false, true] {
        if long {
            let many = pods.into_iter().flat_map(|pod| {
                on_ports(&[pod], 10).into_iter().map(move |mut slice| {
                    slice.key = Key::new("shop", format!("{}-{}", slice.key.name(), pod.name()));
                    slice
                })
            });
            cluster.set_slices(service(), many.collect());
        }
        for family in FAMILIES {
            let to = Way::Vip.to(family);
            let sockets: Vec<_> = world.run(At::Client, || (0..30).map(|_| udp_socket(to)).collect());
            let ask = || -> Vec<_> {
                sockets.iter().map(|socket| ask_udp(socket, to).expect("an answer").0).collect()
            };
            let first = ask();
            assert!(first.iter().any(|who| *who != first[0]), "spread: {first:?}");
            world.sh_at(At::Node, "conntrack -F 2>/dev/null");
            assert_eq!(ask(), first, "{family}, long: {long}");
            // A new process has the same seed.
            cluster.restart(&world);
            world.sh_at(At::Node, "conntrack -F 2>/dev/null");
            assert_eq!(ask(), first, "{family}, long: {long}");
        }
    }
}
