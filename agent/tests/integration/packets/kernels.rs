// SPDX-License-Identifier: Apache-2.0
//! Rules for kernels that lack a feature, on the kernel that runs the tests. `hack/vm-test` runs all packet tests on other kernels.

use std::time::Duration;

use steerage_agent::rules::{Feature, Features};
use steerage_model::{Family, Protocol};
use steerage_nft::{Batch, Element, Field, Nft, Table, concat};
use steerage_requirements::requires;

use crate::packets::affinity::{answering, at};
use crate::packets::cluster::{Cluster, FAMILIES, Way, local, service, with_affinity};
use crate::world::{At, Lost, World};

const LONG: Duration = Duration::from_hours(3);
const PODS: [At; 3] = [At::Pod1, At::Pod2, At::Far];

fn without(feature: Feature) -> Features {
    Features::default().without(feature)
}

/// The clients of the map of affinity.
fn clients(world: &World) -> usize {
    world.sh_at(At::Node, "nft list map ip steerage affinity").matches(" expires ").count()
}

/// Rules that delete nothing: the agent itself forgets the clients of a removed endpoint, and only those.
#[test]
fn without_deletion_client_keeps_endpoint_until_it_is_removed() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::on_kernel(&world, service.clone(), &PODS, without(Feature::Deletion));
    let listing = world.sh_at(At::Node, "nft list table ip steerage");
    assert!(!listing.contains("delete @"), "{listing}");
    for family in FAMILIES {
        for way in [Way::ClusterIp, Way::Vip, Way::NodePort] {
            let first = answering(&world, At::Client, way, family);
            assert_eq!(first.len(), 1, "{family} {way:?}: {first:?}");
            let kept = at(first.first().unwrap());
            let others: Vec<_> = PODS.into_iter().filter(|pod| *pod != kept).collect();
            cluster.set(service.clone(), &others);
            let second = answering(&world, At::Client, way, family);
            assert_eq!(second.len(), 1, "{family} {way:?}: {second:?}");
            assert!(second.is_disjoint(&first));
            // The endpoint is back, but the client has another one now.
            cluster.set(service.clone(), &PODS);
            assert_eq!(answering(&world, At::Client, way, family), second);
        }
    }
}

#[test]
fn without_deletion_only_clients_of_the_removed_endpoint_are_forgotten() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::on_kernel(&world, service.clone(), &PODS, without(Feature::Deletion));
    let kept = answering(&world, At::Client, Way::Vip, Family::V4);
    // A client of an endpoint that is gone, one that is about to expire, and one of a frontend that nobody has.
    let client = |frontend: [u8; 4], left| {
        let key =
            [Field::V4(frontend.into()), Field::Proto(6), Field::Port(80), Field::V4([10, 1, 0, 9].into())];
        Element::entry(concat(&key), concat(&[Field::Number(1)])).expires(left)
    };
    let table = Table::new(steerage_nft::Family::Ip, "steerage");
    let add = |element: Element| {
        let mut batch = Batch::new();
        batch.add_elements(&table, "affinity", &[element]);
        world.run(At::Node, || Nft::open().unwrap().commit(batch).unwrap());
    };
    for element in [
        client([192, 0, 2, 10], LONG),
        client([192, 0, 2, 77], LONG),
        client([10, 96, 0, 10], Duration::from_secs(2)),
    ] {
        add(element);
    }
    assert_eq!(clients(&world), 4);
    // A change that removes no endpoint searches nothing.
    cluster.set(service.clone(), &[At::Pod1, At::Pod2, At::Far, At::Node]);
    assert_eq!(clients(&world), 4);
    let gone = PODS.into_iter().find(|pod| !kept.contains(pod.name())).unwrap();
    let rest: Vec<_> = PODS.into_iter().filter(|pod| *pod != gone).collect();
    cluster.set(service.clone(), &rest);
    assert_eq!(clients(&world), 1, "the client of an endpoint that is still there");
    assert_eq!(answering(&world, At::Client, Way::Vip, Family::V4), kept);
    // A new process does not know what happened before it.
    add(client([192, 0, 2, 10], LONG));
    cluster.restart(&world);
    assert_eq!(clients(&world), 1);
    assert_eq!(answering(&world, At::Client, Way::Vip, Family::V4), kept);
}

/// A connection to a removed endpoint that still carries something makes its client no client of that again.
#[test]
fn connection_to_a_removed_endpoint_is_not_recorded_with_and_without_deletion() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    for features in [without(Feature::Deletion), Features::default()] {
        let mut cluster = Cluster::on_kernel(&world, service.clone(), &[At::Pod1], features);
        let to = Way::Vip.to(Family::V4);
        let mut stream = world.run(At::Client, || std::net::TcpStream::connect(to).unwrap());
        cluster.set(service.clone(), &[At::Pod2]);
        crate::world::ask_on(&mut stream).unwrap();
        assert_eq!(clients(&world), 0);
        drop(stream);
        world.sh_at(At::Node, "nft delete table ip steerage; nft delete table ip6 steerage");
    }
}

#[test]
fn without_counters_packets_are_dropped_and_rejected_all_the_same() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::on_kernel(&world, local(service()), &[At::Far], without(Feature::Counters));
    for family in FAMILIES {
        assert_eq!(world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp), Err(Lost::Silence));
    }
    assert!(!world.sh_at(At::Node, "nft list ruleset").contains("counter"));
    cluster.set(service(), &[]);
    for family in FAMILIES {
        assert_eq!(world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp), Err(Lost::Refused));
    }
    // A kernel with counters takes the table over.
    cluster.ruleset.set_features(Features::default());
    cluster.restart(&world);
    assert!(world.sh_at(At::Node, "nft list ruleset").contains("counter name"));
}

#[test]
fn without_limits_clients_are_remembered() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    let _cluster = Cluster::on_kernel(&world, service, &PODS, without(Feature::Limits));
    assert!(!world.sh_at(At::Node, "nft list ruleset").contains("limit rate"));
    assert_eq!(answering(&world, At::Client, Way::Vip, Family::V4).len(), 1);
    assert_eq!(clients(&world), 1);
}
