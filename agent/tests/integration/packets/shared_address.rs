// SPDX-License-Identifier: Apache-2.0
//! Services that share an address on different ports: each has its own endpoints, policy, sources and health.

use std::net::SocketAddr;

use steerage_agent::input::Input;
use steerage_model::{EndpointSlice, Family, Key, Protocol, Service, TrafficPolicy};
use steerage_requirements::requires;
use steerage_watch::Event;

use crate::packets::agent::{running, soon};
use crate::packets::cluster::{FAMILIES, FRONT, NODE_PORT, Way, local, service, slices};
use crate::world::{At, Lost, World};

const HEALTH_PORT: u16 = 31000;

/// The second Service at the VIP, in another namespace.
fn second() -> Service {
    let mut second = Service {
        cluster_ips: ["10.96.0.11", "fd96::11"].map(|ip| ip.parse().expect("ip")).to_vec(),
        external_ips: Vec::new(),
        health_check_node_port: Some(HEALTH_PORT + 1),
        created: 1,
        ..local(service())
    };
    second.key = Key::new("other", "web");
    for port in &mut second.ports {
        (port.port, port.node_port) = (FRONT + 1, Some(NODE_PORT + 1));
    }
    second
}

fn second_slices(pods: &[At]) -> Vec<EndpointSlice> {
    let of_second = |mut slice: EndpointSlice| {
        slice.key = Key::new("other", slice.key.name());
        slice.service = second().key;
        slice
    };
    slices(pods).into_iter().map(of_second).collect()
}

/// Who answers at the VIP, and by which address it sees the client if that is not the client's own.
fn asks(world: &World, family: Family, port: u16, protocol: Protocol) -> Result<String, Lost> {
    let to = SocketAddr::new(Way::Vip.to(family).ip(), port);
    let (who, seen) = world.ask(At::Client, to, protocol)?;
    let is_own = seen.ip() == At::Client.addr(family);
    Ok(if is_own { who } else { format!("{who} to {}", seen.ip()) })
}

/// Waits until each of the Services answers so, for TCP and UDP of both families.
fn answers(world: &World, first: Result<&str, Lost>, second: Result<&str, Lost>) {
    for family in FAMILIES {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for (port, expected) in [(FRONT, first), (FRONT + 1, second)] {
                soon(&format!("{expected:?} at {protocol} port {port} of {family}"), || {
                    asks(world, family, port, protocol) == expected.map(str::to_owned)
                });
            }
        }
    }
}

#[test]
fn services_at_one_address_are_served_apart() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(local(service()), &[At::Pod1, At::Far]);
    let apply = |service: Service| agent.send(Input::Service(Event::Apply(service)));
    let endpoints = |slices: Vec<EndpointSlice>| {
        for slice in slices {
            agent.send(Input::Slice(Event::Apply(slice)));
        }
    };
    apply(second());
    endpoints(second_slices(&[At::Pod2, At::Far]));
    answers(&world, Ok("pod1"), Ok("pod2"));
    agent.healthy(HEALTH_PORT, Some((200, 1)));
    agent.healthy(HEALTH_PORT + 1, Some((200, 1)));

    // The last local endpoint of one is no matter of the other.
    endpoints(second_slices(&[At::Far]));
    agent.healthy(HEALTH_PORT + 1, Some((503, 0)));
    agent.healthy(HEALTH_PORT, Some((200, 1)));
    answers(&world, Ok("pod1"), Err(Lost::Silence));

    // Nor are its sources.
    endpoints(second_slices(&[At::Pod2]));
    apply(Service { source_ranges: vec!["203.0.113.0/24".parse().expect("range")], ..second() });
    answers(&world, Ok("pod1"), Err(Lost::Silence));
    apply(Service { source_ranges: Vec::new(), ..second() });
    answers(&world, Ok("pod1"), Ok("pod2"));

    // Nor its policy: clients of the other one are not masqueraded.
    apply(Service { external_policy: TrafficPolicy::Cluster, health_check_node_port: None, ..service() });
    for family in FAMILIES {
        let masqueraded = format!("far to {}", At::Node.addr(family));
        soon("masquerade", || asks(&world, family, FRONT, Protocol::Tcp).as_ref() == Ok(&masqueraded));
        assert_eq!(asks(&world, family, FRONT + 1, Protocol::Tcp).as_deref(), Ok("pod2"));
    }
    apply(local(service()));
    answers(&world, Ok("pod1"), Ok("pod2"));

    // The address stays served while one of them has it.
    agent.send(Input::Service(Event::Delete { key: service().key, version: String::new() }));
    let gone = |family| asks(&world, family, FRONT, Protocol::Tcp).is_err();
    soon("the end of the first", || FAMILIES.into_iter().all(gone));
    for family in FAMILIES {
        assert_eq!(asks(&world, family, FRONT + 1, Protocol::Tcp).as_deref(), Ok("pod2"));
    }
    agent.healthy(HEALTH_PORT, None);
    agent.healthy(HEALTH_PORT + 1, Some((200, 1)));
    apply(local(service()));
    answers(&world, Ok("pod1"), Ok("pod2"));
}
