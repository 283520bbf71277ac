// SPDX-License-Identifier: Apache-2.0
//! Answering endpoints, and the client address that they see: for each frontend, policy and place.

use std::collections::BTreeSet;
use steerage_model::{Family, Protocol, TrafficPolicy};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, key, local, place, pod_networks, service, slices};
use crate::world::{At, Lost, World};
use steerage_agent::local_node::{LocalNode, LocalPods};
use steerage_agent::plan::plan_service;

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// Sends requests until each of `who` has answered. Nobody else may answer, and all must see `seen`.
fn expect(world: &World, from: At, way: Way, who: &[At], seen: Option<At>) {
    for family in FAMILIES {
        for protocol in PROTOCOLS {
            let mut missing: BTreeSet<_> = who.iter().map(|at| at.name()).collect();
            for _ in 0..200 {
                let answer = world.ask(from, way.to(family), protocol);
                let Ok((name, peer)) = answer else {
                    panic!("{from:?} by {way:?} {family} {protocol}: {answer:?}")
                };
                assert!(who.iter().any(|at| at.name() == name), "{from:?} by {way:?}: {name} answered");
                if let Some(seen) = seen {
                    assert_eq!(peer.ip(), seen.addr(family), "{from:?} by {way:?} {protocol} seen by {name}");
                }
                missing.remove(name.as_str());
                if missing.is_empty() {
                    break;
                }
            }
            assert!(missing.is_empty(), "{from:?} by {way:?} {family} {protocol}: never {missing:?}");
        }
    }
}

fn expect_lost(world: &World, from: At, way: Way, lost: Lost) {
    for family in FAMILIES {
        for protocol in PROTOCOLS {
            let answer = world.ask(from, way.to(family), protocol);
            assert_eq!(answer, Err(lost), "{from:?} by {way:?} {family} {protocol}");
        }
    }
}

#[test]
fn cluster_policy_masquerades_external_traffic_to_all_endpoints() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, service(), &[At::Pod1, At::Far]);
    for way in Way::EXTERNAL {
        expect(&world, At::Client, way, &[At::Pod1, At::Far], Some(At::Node));
        expect(&world, At::Pod2, way, &[At::Pod1, At::Far], Some(At::Node));
        expect(&world, At::Node, way, &[At::Pod1, At::Far], Some(At::Node));
    }
}

#[test]
fn cluster_ip_keeps_only_local_pod_addresses() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, service(), &[At::Pod1, At::Far]);
    expect(&world, At::Pod2, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Pod2));
    expect(&world, At::Node, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Node));
    expect(&world, At::Client, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Node));
}

#[test]
fn masquerade_all_hides_pods_at_cluster_ips_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Far]);
    let all = LocalNode { masquerade_all: true, ..place() };
    let plan = plan_service(&local(service()), &cluster.index, &all);
    cluster.write([(key(), plan)].into());
    for from in [At::Pod2, At::Node, At::Client] {
        expect(&world, from, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Node));
    }
    expect(&world, At::Client, Way::Vip, &[At::Pod1], Some(At::Client));
    expect(&world, At::Pod2, Way::Vip, &[At::Pod1, At::Far], Some(At::Pod2));
}

#[test]
fn local_policy_keeps_client_address_and_uses_local_endpoints() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Far]);
    for way in Way::EXTERNAL {
        expect(&world, At::Client, way, &[At::Pod1], Some(At::Client));
        // Internal clients reach every endpoint, and a pod keeps its address.
        expect(&world, At::Pod2, way, &[At::Pod1, At::Far], Some(At::Pod2));
        expect(&world, At::Node, way, &[At::Pod1, At::Far], Some(At::Node));
    }
}

#[test]
fn local_pods_are_detected_by_network_or_interface() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, local(service()), &[At::Pod1, At::Far]);
    let one = |at: At| LocalPods::Interface(at.interface().to_owned());
    let all = LocalPods::InterfacePrefix("pod".to_owned());
    let elsewhere = LocalPods::Networks(vec!["10.9.0.0/16".parse().unwrap(), "fd09::/64".parse().unwrap()]);
    for (pods, known) in [(one(At::Pod2), true), (all, true), (one(At::Pod1), false), (elsewhere, false)] {
        cluster.pods = pods.clone();
        cluster.apply();
        println!("{pods:?}");
        // A sender that is not detected as a pod counts as external.
        let who = if known { &[At::Pod1, At::Far][..] } else { &[At::Pod1] };
        expect(&world, At::Pod2, Way::Vip, who, Some(At::Pod2));
        let seen = if known { At::Pod2 } else { At::Node };
        expect(&world, At::Pod2, Way::ClusterIp, &[At::Pod1, At::Far], Some(seen));
        expect(&world, At::Client, Way::Vip, &[At::Pod1], Some(At::Client));
        expect(&world, At::Client, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Node));
        expect(&world, At::Node, Way::Vip, &[At::Pod1, At::Far], Some(At::Node));
        world.sh_at(At::Node, "nft list ruleset; nft -j list ruleset");
    }
    // Clients keep their addresses at cluster IPs, so the remote pod has to answer by the node.
    world.sh_at(At::Far, "ip route del blackhole 10.1.0.2; ip -6 route del blackhole fd01::2");
    cluster.pods = LocalPods::default();
    cluster.apply();
    expect(&world, At::Pod2, Way::Vip, &[At::Pod1], Some(At::Pod2));
    expect(&world, At::Client, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Client));
    expect(&world, At::Node, Way::ClusterIp, &[At::Pod1, At::Far], Some(At::Node));
}

#[test]
fn local_policy_without_local_endpoint_drops_external_traffic_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, local(service()), &[At::Far]);
    for way in Way::EXTERNAL {
        expect_lost(&world, At::Client, way, Lost::Silence);
        expect(&world, At::Pod2, way, &[At::Far], Some(At::Pod2));
        expect(&world, At::Node, way, &[At::Far], Some(At::Node));
    }
}

#[test]
fn internal_policy_local_affects_cluster_ips_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = service();
    service.internal_policy = TrafficPolicy::Local;
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Pod1, At::Far]);
    expect(&world, At::Pod2, Way::ClusterIp, &[At::Pod1], Some(At::Pod2));
    expect(&world, At::Client, Way::Vip, &[At::Pod1, At::Far], Some(At::Node));
    cluster.set(service, &[At::Far]);
    expect_lost(&world, At::Pod2, Way::ClusterIp, Lost::Silence);
}

#[test]
fn service_without_endpoints_is_rejected() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[]);
    let ways = [Way::ClusterIp, Way::NodePort, Way::Vip, Way::ExternalIp];
    for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
        let mut service = service();
        service.external_policy = policy;
        cluster.set(service, &[]);
        for way in ways {
            for from in [At::Client, At::Pod1, At::Node] {
                expect_lost(&world, from, way, Lost::Refused);
            }
        }
    }
}

#[test]
fn terminating_endpoints_serve_as_last_resort() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut slices = slices(&[At::Pod1, At::Pod2]);
    for slice in &mut slices {
        let pod = &mut slice.endpoints[0];
        (pod.ready, pod.serving, pod.terminating) = (false, true, true);
    }
    let mut cluster = Cluster::new(&world, local(service()), &[]);
    cluster.set_slices(local(service()), slices.clone());
    expect(&world, At::Client, Way::Vip, &[At::Pod2], Some(At::Client));
    for slice in &mut slices {
        slice.endpoints.truncate(1);
    }
    cluster.set_slices(local(service()), slices);
    expect(&world, At::Client, Way::Vip, &[At::Pod1], Some(At::Client));
    expect(&world, At::Pod2, Way::ClusterIp, &[At::Pod1], Some(At::Pod2));
}

#[test]
fn pod_reaches_itself_through_service() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    for service in [service(), local(service())] {
        let _cluster = Cluster::new(&world, service, &[At::Pod1]);
        for way in [Way::ClusterIp, Way::Vip, Way::NodePort] {
            expect(&world, At::Pod1, way, &[At::Pod1], Some(At::Node));
        }
    }
}

#[test]
fn source_ranges_affect_vips_only() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = local(service());
    service.source_ranges = ["10.1.0.0/30", "fd01::/126"].map(|net| net.parse().unwrap()).to_vec();
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Pod1]);
    expect(&world, At::Client, Way::Vip, &[At::Pod1], Some(At::Client));
    expect_lost(&world, At::Pod2, Way::Vip, Lost::Silence);
    service.source_ranges = ["10.244.0.12/32", "fd44::12/128"].map(|net| net.parse().unwrap()).to_vec();
    cluster.set(service.clone(), &[At::Pod1]);
    expect_lost(&world, At::Client, Way::Vip, Lost::Silence);
    expect(&world, At::Pod2, Way::Vip, &[At::Pod1], Some(At::Pod2));
    for way in [Way::NodePort, Way::ExternalIp] {
        expect(&world, At::Client, way, &[At::Pod1], Some(At::Client));
    }
    // A list with one family closes the other family.
    service.source_ranges = vec!["0.0.0.0/1".parse().unwrap()];
    cluster.set(service, &[At::Pod1]);
    assert!(world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).is_ok());
    assert_eq!(world.ask(At::Client, Way::Vip.to(Family::V6), Protocol::Tcp), Err(Lost::Silence));
}

#[test]
fn other_ports_of_cluster_ip_are_rejected_and_of_vip_pass() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, service(), &[At::Pod1]);
    for family in FAMILIES {
        let mut other = Way::ClusterIp.to(family);
        other.set_port(81);
        assert_eq!(world.ask(At::Pod2, other, Protocol::Tcp), Err(Lost::Refused));
    }
    // The packet to the VIP goes where the node's route leads: back to the client, which has no such address.
    world.own(At::Client, &["192.0.2.10", "2001:db8::10"]);
    for family in FAMILIES {
        let mut other = Way::Vip.to(family);
        other.set_port(81);
        assert_eq!(
            world.ask(At::Pod2, other, Protocol::Tcp),
            Err(Lost::Refused),
            "refused by the host behind"
        );
    }
}

#[test]
fn loopback_node_ports_and_proxy_mode_addresses_are_not_served() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = service();
    for ingress in &mut service.ingress {
        ingress.ip_mode = Some(steerage_model::IpMode::Proxy);
    }
    let cluster = Cluster::new(&world, service, &[At::Pod1]);
    let loopback = "127.0.0.1:30080".parse().unwrap();
    assert_eq!(world.ask(At::Node, loopback, Protocol::Tcp), Err(Lost::Refused));
    assert!(cluster.ruleset.desired().actions().all(|(front, _)| front.addr != Way::Vip.to(Family::V4).ip()));
}

#[test]
fn host_network_endpoint_is_reached() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut slices = slices(&[At::Node]);
    for slice in &mut slices {
        slice.endpoints[0].node = Some("node".into());
    }
    let mut cluster = Cluster::new(&world, local(service()), &[]);
    cluster.set_slices(local(service()), slices);
    expect(&world, At::Client, Way::Vip, &[At::Node], Some(At::Client));
    expect(&world, At::Pod1, Way::ClusterIp, &[At::Node], Some(At::Pod1));
    expect(&world, At::Node, Way::ClusterIp, &[At::Node], None);
}

#[test]
fn nft_lists_whole_ruleset() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut service = local(service());
    service.source_ranges = vec!["10.1.0.0/30".parse().unwrap()];
    service.affinity = Some(steerage_model::Affinity { timeout: std::time::Duration::from_hours(3) });
    let _cluster = Cluster::new(&world, service, &[At::Pod1, At::Pod2, At::Far]);
    let text = world.sh_at(At::Node, "nft list ruleset; nft -j list ruleset");
    assert!(text.contains("table ip6 steerage") && text.contains("192.0.2.10 . tcp . 80"), "{text}");
    assert_eq!(place().node_port_addresses.len(), pod_networks().len());
}
