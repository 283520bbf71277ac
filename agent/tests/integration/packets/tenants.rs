// SPDX-License-Identifier: Apache-2.0
//! A hostile tenant: whatever a user may write into one namespace, at random, beside another tenant's Service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use steerage_agent::input::Input;
use steerage_agent::kernel::read_table;
use steerage_agent::plan::ElementLimits;
use steerage_agent::rules::{BaseRuleset, LARGEST_STEP, RulesetConfig, TABLE, UsedSets};
use steerage_model::{
    Affinity, Endpoint, EndpointPort, EndpointSlice, Family, Key, Protocol, Service, ServiceKind,
    ServicePort, TrafficPolicy, names,
};
use steerage_nft::{Monitor, Nft, Notification, ObjectKind, Table};
use steerage_requirements::requires;
use steerage_watch::Event;

use crate::packets::agent::{Running, soon};
use crate::packets::churn::StopOnDrop;
use crate::packets::cluster::{FAMILIES, NODE_PORT, Way, service};
use crate::world::{At, World};

/// What the tenant does in all.
const STEPS: usize = 200;
/// The tenant's Services.
const SERVICES: u8 = 12;
/// What this test's own packets may add to the maps that packets fill.
const OF_PACKETS: usize = 1_000;
/// So small that a commit of all that the tenant may have, before and after, is smaller than the largest step: without limits commits
/// would be larger.
const LIMITS: ElementLimits = ElementLimits { service: 1_500, namespace: 3_100 };
const LARGEST_COMMIT: usize = 2 * LIMITS.namespace;
const _: () = assert!(LARGEST_COMMIT < LARGEST_STEP, "steps bound it, and not the limits");

fn any_of<T: Copy>(random: &mut Rng, values: &[T]) -> T {
    values[random.usize(..values.len())]
}

/// An address that matters to somebody else, or any.
fn address(random: &mut Rng, family: Family) -> IpAddr {
    let ways = [Way::ClusterIp, Way::Vip, Way::ExternalIp].map(|way| way.to(family).ip());
    let hosts = [At::Node, At::Client, At::Pod1, At::Pod2, At::Far].map(|at| at.addr(family));
    let any = match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from(random.u32(..))),
        Family::V6 => IpAddr::V6(Ipv6Addr::from(random.u128(..))),
    };
    any_of(random, &[ways[0], ways[1], ways[2], hosts[0], hosts[1], hosts[2], hosts[3], hosts[4], any, any])
}

fn key(random: &mut Rng) -> Key {
    Key::new("hostile", random.u8(..SERVICES).to_string())
}

/// A Service as the API server admits it: cluster IPs and node ports are its own, the others are the tenant's choice.
fn hostile_service(random: &mut Rng) -> Service {
    let key = key(random);
    let number: u8 = key.name().parse().expect("a number");
    let kinds = [ServiceKind::ClusterIp, ServiceKind::NodePort, ServiceKind::LoadBalancer];
    let kind = any_of(random, &kinds);
    let policies = [TrafficPolicy::Cluster, TrafficPolicy::Local];
    let ports = any_of(random, &[1, 2, 30, 300]);
    let port = |n: u16, random: &mut Rng| {
        let protocol = any_of(random, &[Protocol::Tcp, Protocol::Udp, Protocol::Sctp]);
        // A node port of its own for each, beside that of the other tenant.
        let node_port = NODE_PORT + 1 + u16::from(number) * 300 + n;
        let front = if n == 0 { 80 } else { random.u16(1..) };
        ServicePort::new(
            n.to_string(),
            protocol,
            front,
            (kind != ServiceKind::ClusterIp).then_some(node_port),
        )
    };
    let ranges = any_of(random, &[0, 0, 1, 50, 3000]);
    Service {
        kind,
        cluster_ips: vec![
            IpAddr::from([10, 96, 9, number]),
            format!("fd96::9:{number:x}").parse().expect("ip"),
        ],
        external_ips: (0..random.usize(..6))
            .map(|_| {
                let family = any_of(random, &FAMILIES);
                address(random, family)
            })
            .collect(),
        ports: (0..ports).map(|n| port(n, random)).collect(),
        source_ranges: (0..ranges).map(|_| IpAddr::V4(Ipv4Addr::from(random.u32(..))).into()).collect(),
        affinity: random.bool().then(|| Affinity { timeout: Duration::from_secs(random.u64(1..=86_400)) }),
        external_policy: any_of(random, &policies),
        internal_policy: any_of(random, &policies),
        proxy_name: (random.u8(..8) > 0).then(|| names::PROXY_NAME.to_owned()),
        // Later than the other tenant's.
        created: 1,
        ..Service::new(key)
    }
}

fn hostile_slice(random: &mut Rng) -> EndpointSlice {
    let (service, family) = (key(random), any_of(random, &FAMILIES));
    let name = format!("{}-{}", service.name(), random.u8(..8));
    let port = |n: u16, random: &mut Rng| EndpointPort {
        name: n.to_string(),
        protocol: any_of(random, &[Protocol::Tcp, Protocol::Udp]),
        port: random.u16(1..),
    };
    let count = any_of(random, &[0, 1, 5, 100, 100]);
    let endpoint = |random: &mut Rng| {
        let node = any_of(random, &["node", "other"]);
        let ready = Endpoint::ready(address(random, family), node);
        Endpoint { ready: random.bool(), serving: random.bool(), terminating: random.bool(), ..ready }
    };
    EndpointSlice {
        ports: (0..any_of(random, &[1, 30, 100])).map(|n| port(n, random)).collect(),
        endpoints: (0..count).map(|_| endpoint(random)).collect(),
        ..EndpointSlice::new(Key::new("hostile", name), service, family)
    }
}

fn step(random: &mut Rng) -> Input {
    match random.u8(..10) {
        0 => Input::Service(Event::Delete { key: key(random), version: String::new() }),
        1..=4 => Input::Service(Event::Apply(hostile_service(random))),
        _ => Input::Slice(Event::Apply(hostile_slice(random))),
    }
}

/// The commits of a network namespace's tables `steerage`, as the kernel tells them.
#[derive(Debug, Default)]
struct Commits {
    /// The elements that the commits have changed so far.
    elements: Vec<usize>,
    /// Those of a commit that has not ended.
    running: usize,
    /// Notifications were lost: the sizes of some commits are not known.
    has_gap: bool,
}

impl Commits {
    fn note(&mut self, notification: &Notification) {
        match notification {
            Notification::Change(change)
                if change.object == ObjectKind::Elements && change.table.name == TABLE =>
            {
                self.running += 1;
            }
            Notification::Change(_) => {}
            Notification::Commit(_) => {
                let elements = std::mem::take(&mut self.running);
                if !std::mem::take(&mut self.has_gap) {
                    self.elements.push(elements);
                }
            }
        }
    }
}

/// Notes commits until stopped.
fn watch_commits(world: &World, stop: &AtomicBool) -> Commits {
    let mut commits = Commits::default();
    world.run(At::Node, || {
        let mut monitor = Monitor::open().expect("a monitor");
        while !stop.load(Ordering::Relaxed) {
            monitor.wait(Duration::from_millis(50)).expect("waits");
            loop {
                match monitor.receive() {
                    Ok(Some(notifications)) => notifications.iter().for_each(|told| commits.note(told)),
                    Ok(None) => break,
                    Err(steerage_nft::Error::Overrun) => (commits.running, commits.has_gap) = (0, true),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    commits
}

/// Everything in the sets and maps of both tables, also what packets put there.
fn listed(world: &World) -> usize {
    world.run(At::Node, || {
        let mut nft = Nft::open().expect("a socket");
        let mut count = 0;
        for family in [steerage_nft::Family::Ip, steerage_nft::Family::Ip6] {
            let table = Table::new(family, TABLE);
            for set in nft.sets(&table).expect("the table") {
                // One that has gone meanwhile has none.
                count += nft.elements(&table, &set).map_or(0, |elements| elements.len());
            }
        }
        count
    })
}

/// The elements of both tables.
fn elements(world: &World) -> usize {
    let families = [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)];
    let count = |(model, family)| {
        let all = RulesetConfig { used: UsedSets::all(), ..RulesetConfig::default() };
        let base_ruleset = BaseRuleset::new(family, &all);
        read_table(model, &base_ruleset).expect("readable").map_or(0, |table| table.elements.len())
    };
    world.run(At::Node, || families.map(count).into_iter().sum())
}

#[test]
fn hostile_tenant_disturbs_nobody() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    let world = World::new();
    let agent = Running::with_limits(&world, LIMITS);
    agent.list(service(), &[At::Pod1, At::Far]);
    let answers = |family, what: &str| {
        for way in [Way::ClusterIp, Way::Vip, Way::NodePort, Way::ExternalIp] {
            let who = agent.asks(way, family);
            assert!(
                matches!(who.as_deref(), Ok("pod1" | "far")),
                "{way:?} {family}: {who:?} {what}, seed {seed}"
            );
        }
    };
    soon("served", || agent.asks(Way::Vip, Family::V4).is_ok());
    let own = elements(&world);
    let (mut most, stop) = (0, AtomicBool::new(false));
    let commits = std::thread::scope(|scope| {
        let stop_at_end = StopOnDrop(&stop);
        let commits = scope.spawn(|| watch_commits(&world, &stop));
        for number in 0..STEPS {
            let input = step(&mut random);
            agent.send(input);
            if number % 4 == 0 {
                answers(FAMILIES[number / 4 % 2], &format!("in step {number}"));
                // Until its budget is shared out anew a namespace may have old elements and new ones.
                let all = listed(&world);
                let limit = own + 2 * LIMITS.namespace + OF_PACKETS;
                assert!(all <= limit, "{all} elements in step {number}, seed {seed}");
            }
            if number % 20 == 19 {
                let of_tenant = elements(&world).saturating_sub(own);
                most = most.max(of_tenant);
                assert!(of_tenant <= LIMITS.namespace, "{of_tenant} elements in step {number}, seed {seed}");
            }
        }
        drop(stop_at_end);
        commits.join().expect("the watch")
    });
    let largest = commits.elements.iter().max().copied().unwrap_or_default();
    println!("{} commits, the largest of {largest} elements; most {most}", commits.elements.len());
    assert!(commits.elements.len() > STEPS / 20, "{commits:?}");
    assert!(largest <= LARGEST_COMMIT, "a commit of {largest} elements, seed {seed}");
    for family in FAMILIES {
        answers(family, "in the end");
    }
    assert!(
        most > LIMITS.namespace / 20,
        "the tenant had only {most} elements: it tried nothing, seed {seed}"
    );
    for number in 0..SERVICES {
        let key = Key::new("hostile", number.to_string());
        agent.send(Input::Service(Event::Delete { key, version: String::new() }));
    }
    soon("clean again", || elements(&world) == own);
}
