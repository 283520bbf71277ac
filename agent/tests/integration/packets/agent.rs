// SPDX-License-Identifier: Apache-2.0
//! The whole agent on the node under test, with simulated watches.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use steerage_agent::agent::Agent;
use steerage_agent::health::{HealthCheckPorts, Listeners, ProxyHealth, server_runtime};
use steerage_agent::input::Input;
use steerage_agent::kernel::{AddressWatch, Dataplane, FlowCleaner, Noticed};
use steerage_agent::metrics::Metrics;
use steerage_agent::node_annotations::node_agent;
use steerage_agent::plan::{ElementLimits, POLICY_GRACE_PERIOD};
use steerage_agent::rules::{Ruleset, SetId, TABLE};
use steerage_agent::settings::{AgentSettings, DetectLocal, NodePortAddresses};
use steerage_model::{
    Endpoint, EndpointPort, EndpointSlice, Family, Key, Node, Protocol, Service, ServiceKind, ServicePort,
};
use steerage_nft::{Batch, Monitor, Nft, Notification, ObjectKind, Table};
use steerage_process::{Readiness, prometheus_client::registry::Registry};
use steerage_requirements::requires;
use steerage_watch::events::Recorder;
use steerage_watch::{Backoff, Event};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::packets::cluster::{FAMILIES, NODE_PORT, Way, local, pod_networks, service, slices};
use crate::world::{At, Lost, World};

const HEALTH_PORT: u16 = 31000;
/// Longer than anything takes on a busy machine, and shorter than kube-proxy's sync period.
const SOON: Duration = Duration::from_secs(25);

/// A running agent. Stops on drop.
pub(crate) struct Running<'a> {
    world: &'a World,
    inputs: mpsc::UnboundedSender<Input>,
    shutdown: CancellationToken,
    metrics: Metrics,
    proxy_health: ProxyHealth,
    runtime: Option<Runtime>,
}

impl<'a> Running<'a> {
    /// Starts the agent without any listed objects.
    fn new(world: &'a World, node_port_addresses: NodePortAddresses) -> Self {
        Self::start(world, node_port_addresses, ElementLimits::default())
    }

    /// The same, with these budgets.
    pub(crate) fn with_limits(world: &'a World, element_limits: ElementLimits) -> Self {
        Self::start(world, NodePortAddresses::Primary, element_limits)
    }

    fn start(
        world: &'a World,
        node_port_addresses: NodePortAddresses,
        element_limits: ElementLimits,
    ) -> Self {
        let settings = AgentSettings {
            node: "node".to_owned(),
            kube_proxy_replacement: false,
            node_port_addresses,
            detect_local: DetectLocal::NodeCidrs,
            masquerade_all: false,
            node_ip: None,
            unassigned: Vec::new(),
            deny_external_ips: false,
            api_server: None,
            element_limits,
            forward_to_peers: None,
        };
        let enter = world.entering(At::Node);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .on_thread_start(enter)
            .enable_all()
            .build()
            .unwrap();
        let (inputs, queue) = mpsc::unbounded_channel();
        // Services have external IPs, which wait for the cluster's nodes.
        for event in [Event::Init, Event::InitDone] {
            inputs.send(Input::ClusterNode(event)).unwrap();
        }
        let shutdown = CancellationToken::new();
        let (sender, readdressed, stop) = (inputs.clone(), inputs.clone(), shutdown.clone());
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        let shared = metrics.clone();
        let proxy_health = ProxyHealth::default();
        let health = proxy_health.clone();
        runtime.spawn(async move {
            // No API server: the tests ignore the agent's events.
            let client =
                kube::Client::try_from(kube::Config::new("http://127.0.0.1:9".parse().unwrap())).unwrap();
            let (recorder, _writer) = Recorder::new(client, "agent", "node", &mut registry);
            let mut dataplane = Dataplane::open().unwrap();
            dataplane.watch_foreign(move |noticed| match noticed {
                Noticed::Nothing => !sender.is_closed(),
                noticed => sender.send(Input::Foreign(noticed)).is_ok(),
            });
            let addresses = AddressWatch::open().unwrap();
            tokio::spawn(async move {
                while addresses.changed().await.is_ok() && readdressed.send(Input::HostAddresses).is_ok() {}
            });
            let ports = HealthCheckPorts::default();
            let agent = Agent {
                settings,
                ruleset: Ruleset::default(),
                dataplane,
                next_hops: None,
                cluster_nodes: None,
                cleaner: FlowCleaner::start(|_| {}).unwrap(),
                ports: ports.clone(),
                proxy_health: health.clone(),
                listeners: Listeners::new(ports, health, server_runtime().unwrap()),
                recorder,
                annotations: (node_agent(false, "test"), watch::channel(false).0),
                metrics: shared,
                first: Some(Readiness::default().task("rules")),
            };
            agent.run(queue, stop).await.unwrap();
        });
        Self { world, inputs, shutdown, metrics, proxy_health, runtime: Some(runtime) }
    }

    /// Lists the node, a Service and its endpoints.
    pub(crate) fn list(&self, service: Service, pods: &[At]) {
        self.send(Input::Node(Event::Init));
        self.node();
        self.send(Input::Node(Event::InitDone));
        self.send(Input::Service(Event::Init));
        self.send(Input::Service(Event::InitApply(service)));
        self.send(Input::Service(Event::InitDone));
        self.send(Input::Slice(Event::Init));
        for slice in slices(pods) {
            self.send(Input::Slice(Event::InitApply(slice)));
        }
        self.send(Input::Slice(Event::InitDone));
    }

    fn node(&self) {
        self.send(Input::Node(Event::Apply(Node {
            name: "node".to_owned(),
            addresses: FAMILIES.map(|family| At::Node.addr(family)).to_vec(),
            pod_cidrs: pod_networks(),
            ..Node::default()
        })));
    }

    fn service(&self, service: Service) {
        self.send(Input::Service(Event::Apply(service)));
    }

    fn endpoints(&self, slices: Vec<EndpointSlice>) {
        for slice in slices {
            self.send(Input::Slice(Event::Apply(slice)));
        }
    }

    pub(crate) fn send(&self, input: Input) {
        self.inputs.send(input).expect("the agent runs");
    }

    pub(crate) fn asks(&self, way: Way, family: Family) -> Result<String, Lost> {
        self.world.ask(At::Client, way.to(family), Protocol::Tcp).map(|(who, _)| who)
    }

    /// Status and weight that the health-check port gives a client; `None`: it is closed.
    fn health(&self, port: u16, family: Family) -> Option<(u16, usize)> {
        self.health_at(SocketAddr::new(At::Node.addr(family), port))
    }

    fn health_at(&self, address: SocketAddr) -> Option<(u16, usize)> {
        let text = self.world.run(At::Client, || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        });
        let text = text.ok()?;
        let status = text.split(' ').nth(1)?.parse().ok()?;
        let weight = text.lines().find_map(|line| line.strip_prefix("x-load-balancing-endpoint-weight: "))?;
        Some((status, weight.parse().ok()?))
    }

    pub(crate) fn healthy(&self, port: u16, expected: Option<(u16, usize)>) {
        for family in FAMILIES {
            soon(&format!("{expected:?} from {port}, {family}"), || self.health(port, family) == expected);
        }
    }

    /// Whether a node port is served at this address.
    fn at(&self, address: &str) -> Result<String, Lost> {
        let to = SocketAddr::new(address.parse().unwrap(), NODE_PORT);
        self.world.ask(At::Client, to, Protocol::Tcp).map(|(who, _)| who)
    }

    fn generation(&self) -> u32 {
        self.world.run(At::Node, || Nft::open().unwrap().generation().unwrap())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(SOON);
        }
    }
}

pub(crate) fn soon(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !check() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn running(world: &World) -> Running<'_> {
    Running::new(world, NodePortAddresses::Primary)
}

#[test]
fn no_write_before_initial_lists() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.send(Input::Node(Event::Init));
    agent.node();
    agent.send(Input::Node(Event::InitDone));
    agent.send(Input::Service(Event::Init));
    agent.send(Input::Service(Event::InitApply(local(service()))));
    agent.send(Input::Service(Event::InitDone));
    agent.send(Input::Slice(Event::Init));
    agent.endpoints(slices(&[At::Pod1]));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(world.sh_at(At::Node, "nft list tables"), "");
    assert_eq!(agent.health(HEALTH_PORT, Family::V4), None, "no answer before the rules are there");
    agent.send(Input::Slice(Event::InitDone));
    soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
    agent.healthy(HEALTH_PORT, Some((200, 1)));
}

/// A Service of a tenant with very many endpoints on very many ports, of which hardly any are served.
fn endless(number: u8, ports: u16) -> [Input; 2] {
    let (key, ports) = (Key::new("tenant", number.to_string()), 1..=ports);
    let port = |port: u16| ServicePort::new(port.to_string(), Protocol::Tcp, port, None);
    let of_slice = |port: u16| EndpointPort { name: port.to_string(), protocol: Protocol::Tcp, port };
    let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(0x0af4_0000 + n).into(), "other");
    let service = Service {
        cluster_ips: vec![IpAddr::from([10, 96, 1, number])],
        ports: ports.clone().map(port).collect(),
        ..Service { key: key.clone(), ..service() }
    };
    let service =
        Service { kind: ServiceKind::ClusterIp, ingress: Vec::new(), external_ips: Vec::new(), ..service };
    let slice = EndpointSlice {
        ports: ports.map(of_slice).collect(),
        endpoints: (0..1000).map(endpoint).collect(),
        ..EndpointSlice::new(Key::new("tenant", format!("{number}-1")), key, Family::V4)
    };
    [Input::Slice(Event::Apply(slice)), Input::Service(Event::Apply(service))]
}

/// A plan that takes too long fails health checks, as a write does.
#[test]
fn health_notices_how_long_planning_takes() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = Running::with_limits(&world, ElementLimits { service: 500, namespace: 1_000 });
    agent.list(service(), &[At::Pod1]);
    soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
    soon("an idle loop", || agent.proxy_health.busy_for() == Duration::ZERO);
    let (planned, mut longest) = (|| agent.metrics.reduced_services.get(), Duration::ZERO);
    // A write of so few elements takes some milliseconds, and the plan some 300 on a usual machine. It is enough to notice one of
    // several: this thread may have no core during a plan.
    let is_noticed = |number| {
        let before = planned();
        for input in endless(number, 400) {
            agent.send(input);
        }
        let end = Instant::now() + SOON;
        while planned() == before {
            assert!(Instant::now() < end, "never planned");
            longest = longest.max(agent.proxy_health.busy_for());
        }
        longest > Duration::from_millis(50)
    };
    assert!((1..=10).any(is_noticed), "{longest:?}");
    println!("planned for {longest:?}");
    soon("an idle loop", || agent.proxy_health.busy_for() == Duration::ZERO);
}

/// The commits in order: how many cluster addresses of IPv4 each added, and whether it replaced a single endpoint.
fn commits(monitor: &mut Monitor) -> Vec<(usize, bool)> {
    let (addresses, single) = (SetId::ClusterAddresses.name(), SetId::Slots(1).name());
    let (mut all, mut running) = (Vec::new(), (0, false));
    while let Some(notifications) = monitor.receive().unwrap() {
        for notification in notifications {
            match notification {
                Notification::Commit(_) => all.push(std::mem::take(&mut running)),
                Notification::Change(change) => {
                    let is_of = |set: &String| {
                        change.object == ObjectKind::Elements
                            && change.table == Table::new(steerage_nft::Family::Ip, TABLE)
                            && change.name.as_ref() == Some(set)
                    };
                    running.0 += usize::from(!change.deleted && is_of(&addresses));
                    running.1 |= change.deleted && is_of(&single);
                }
            }
        }
    }
    all
}

/// All Services of a tenant change at once, and take long to plan.
#[test]
fn other_namespaces_do_not_wait_for_all_plans_of_a_tenant() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let is_met = || {
        let world = World::new();
        let agent = Running::with_limits(&world, ElementLimits { service: 500, namespace: 1_000_000 });
        agent.list(service(), &[At::Pod1]);
        soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
        let tenant = 12;
        let all: Vec<_> = (1..=tenant).flat_map(|number| endless(number, 100)).collect();
        let planned = || agent.metrics.reduced_services.get();
        let mut monitor = world.run(At::Node, || Monitor::open().unwrap());
        for input in all {
            agent.send(input);
        }
        agent.endpoints(slices(&[At::Pod2]));
        // The others were planned before the agent could know of the change.
        let is_in_time = planned() == 0;
        let begun = Instant::now();
        soon("the change", || agent.asks(Way::Vip, Family::V4) == Ok("pod2".to_owned()));
        let took = begun.elapsed();
        for count in 1..=tenant {
            soon(&format!("{count} Services"), || planned() >= i64::from(count));
        }
        // The kernel's order: this thread may see the change long after it.
        let commits = commits(&mut monitor);
        let added = |of: &[(usize, bool)]| of.iter().map(|(addresses, _)| addresses).sum::<usize>();
        assert_eq!(added(&commits), usize::from(tenant), "{commits:?}");
        let change = commits.iter().position(|(_, is_replaced)| *is_replaced).expect("the change");
        let before = added(&commits[..=change]);
        println!("{took:?}, after {before} of the tenant's Services, which took {:?}", begun.elapsed());
        if is_in_time {
            assert!(before <= usize::from(tenant / 2), "{before} were first: {commits:?}");
        }
        is_in_time
    };
    assert!(std::iter::repeat_with(is_met).take(10).any(|is_met| is_met), "never in time");
}

/// Each repetition of a failed write reads and writes everything.
#[test]
fn changes_do_not_repeat_failed_writes_more_often() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let owner = world.run(At::Node, || {
        let mut owner = Nft::open().unwrap();
        let mut batch = Batch::new();
        batch.add_owned_table(&Table::new(steerage_nft::Family::Ip, TABLE));
        owner.commit(batch).unwrap();
        owner
    });
    let started = Instant::now();
    let agent = running(&world);
    agent.list(local(service()), &[At::Pod1]);
    soon("a failure", || agent.metrics.failures.get() > 0);
    let lists = [&[At::Pod1, At::Far][..], &[At::Pod2]];
    let begun = Instant::now();
    let mut changes = 0_u32;
    while begun.elapsed() < Duration::from_secs(2) || changes <= 20 {
        agent.endpoints(slices(lists[changes as usize % 2]));
        changes += 1;
        std::thread::sleep(Duration::from_millis(5));
    }
    let (failures, took) = (agent.metrics.failures.get(), started.elapsed());
    // After 0.1, 0.2, 0.4 and 0.8 s and so on, or half of that with the least jitter.
    let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    let earliest = (1..)
        .scan(Duration::ZERO, |at, failed| Some(std::mem::replace(at, *at + backoff.delay(failed, 0.0))));
    let most = earliest.take_while(|at| *at <= took).count();
    assert!(failures <= most as u64, "{failures} failures in {took:?} with {changes} changes");
    assert_eq!(agent.health(HEALTH_PORT, Family::V4), None, "never written");
    agent.endpoints(slices(&[At::Pod2]));
    drop(owner);
    soon("the last change", || agent.asks(Way::Vip, Family::V4) == Ok("pod2".to_owned()));
}

#[test]
fn health_check_port_follows_service() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(service(), &[At::Pod1, At::Pod2, At::Far]);
    soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
    assert_eq!(agent.health(HEALTH_PORT, Family::V4), None, "policy Cluster has none");
    agent.service(local(service()));
    agent.healthy(HEALTH_PORT, Some((200, 2)));
    let mut moved = local(service());
    moved.health_check_node_port = Some(HEALTH_PORT + 1);
    agent.service(moved.clone());
    agent.healthy(HEALTH_PORT + 1, Some((200, 2)));
    agent.healthy(HEALTH_PORT, None);
    // A terminating endpoint serves, but does not count as ready.
    let mut leaving = slices(&[At::Pod1]);
    for slice in &mut leaving {
        set_terminating(&mut slice.endpoints[0]);
    }
    agent.endpoints(leaving);
    agent.healthy(HEALTH_PORT + 1, Some((503, 0)));
    // Health is withdrawn before the rules are written.
    for family in FAMILIES {
        soon("the other endpoint", || agent.asks(Way::Vip, family) == Ok("pod1".to_owned()));
    }
    agent.endpoints(slices(&[At::Far]));
    agent.healthy(HEALTH_PORT + 1, Some((503, 0)));
    moved.kind = ServiceKind::NodePort;
    agent.service(moved);
    agent.healthy(HEALTH_PORT + 1, None);
}

/// GCE addresses its health checks to the VIP, which its guest agent makes the node's own.
#[test]
fn health_checks_of_vips_are_answered() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(local(service()), &[At::Pod1, At::Pod2, At::Far]);
    agent.healthy(HEALTH_PORT, Some((200, 2)));
    for family in FAMILIES {
        let vip = Way::Vip.to(family).ip();
        let check = SocketAddr::new(vip, HEALTH_PORT);
        assert_eq!(agent.health_at(check), None, "no packet arrives");
        world.run(At::Node, || {
            let route = ["route", "add", "local", &vip.to_string(), "dev", "lo"];
            assert!(Command::new("ip").args(route).status().unwrap().success());
        });
        soon(&format!("the check at {vip}"), || agent.health_at(check) == Some((200, 2)));
        assert!(agent.asks(Way::Vip, family).is_ok(), "clients are served as before");
    }
    let moved = Service { ingress: service().ingress[1..].to_vec(), ..local(service()) };
    agent.service(moved);
    let [gone, kept] = FAMILIES.map(|family| SocketAddr::new(Way::Vip.to(family).ip(), HEALTH_PORT));
    soon("the VIP that is gone", || agent.health_at(gone).is_none());
    assert_eq!(agent.health_at(kept), Some((200, 2)));
}

fn set_terminating(endpoint: &mut Endpoint) {
    (endpoint.ready, endpoint.serving, endpoint.terminating) = (false, true, true);
}

#[test]
fn each_change_is_one_transaction_and_idle_agent_writes_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(service(), &[At::Pod1]);
    soon("the Service", || FAMILIES.into_iter().all(|family| agent.asks(Way::Vip, family).is_ok()));
    let before = agent.generation();
    for _ in 0..3 {
        agent.node();
        agent.service(service());
        agent.endpoints(slices(&[At::Pod1]));
        std::thread::sleep(Duration::from_millis(700));
    }
    assert_eq!(agent.generation(), before, "nothing changed");
    // A change is seen within two seconds: one of several, since the machine may have no core for as long.
    let mut fastest = Duration::MAX;
    for (count, pod) in (1..).zip([At::Pod2, At::Pod1].into_iter().cycle().take(8)) {
        let mut one = slices(&[pod]);
        one.truncate(1);
        let start = Instant::now();
        agent.endpoints(one);
        soon("the change", || agent.asks(Way::Vip, Family::V4) == Ok(pod.name().to_owned()));
        fastest = fastest.min(start.elapsed());
        assert_eq!(agent.generation(), before + count, "the other family has nothing to write");
        if fastest < Duration::from_secs(2) {
            return;
        }
    }
    panic!("the fastest of all changes took {fastest:?}");
}

#[test]
fn foreign_change_is_detected_and_reverted() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(service(), &[At::Pod1]);
    let served = || FAMILIES.into_iter().all(|family| agent.asks(Way::Vip, family).is_ok());
    soon("the Service", served);
    for harm in ["nft delete table ip steerage", "nft flush map ip6 steerage slots-1", "nft flush ruleset"] {
        world.sh_at(At::Node, harm);
        soon(&format!("repair after {harm}"), served);
    }
}

#[test]
fn node_ports_follow_host_addresses() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = Running::new(&world, "10.9.0.0/16,fd09::/64".parse().unwrap());
    agent.list(local(service()), &[At::Pod1]);
    soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
    let own = ["10.9.0.1", "fd09::1"];
    world.sh_at(At::Node, "ip addr add 10.9.0.1/32 dev lo; ip -6 addr add fd09::1/128 dev lo nodad");
    for address in own {
        soon(address, || agent.at(address) == Ok("pod1".to_owned()));
        let probe = || TcpStream::connect((address, HEALTH_PORT));
        soon("the health-check port", || world.run(At::Client, || probe().is_ok()));
    }
    assert_eq!(agent.asks(Way::NodePort, Family::V4), Err(Lost::Refused), "not the primary one");
    world.sh_at(At::Node, "ip addr del 10.9.0.1/32 dev lo; ip -6 addr del fd09::1/128 dev lo");
    // The packet then leaves by the default route, to a host that has not got the address either.
    world.sh_at(At::Client, "ip addr add 10.9.0.1/32 dev lo; ip -6 addr add fd09::1/128 dev lo nodad");
    for address in own {
        soon(address, || {
            world.ask(At::Pod2, SocketAddr::new(address.parse().unwrap(), NODE_PORT), Protocol::Tcp).is_err()
        });
    }
}

#[test]
fn change_to_local_drops_nothing_during_policy_transition() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let agent = running(&world);
    agent.list(service(), &[At::Far]);
    soon("the Service", || agent.asks(Way::Vip, Family::V4).is_ok());
    let start = Instant::now();
    agent.service(local(service()));
    agent.healthy(HEALTH_PORT, Some((503, 0)));
    // With a local endpoint, Local applies at once.
    agent.endpoints(slices(&[At::Pod1, At::Far]));
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        let kept = || {
            world
                .ask(At::Client, to, Protocol::Tcp)
                .is_ok_and(|(who, seen)| who == "pod1" && seen.ip() == At::Client.addr(family))
        };
        soon("the own endpoint", kept);
    }
    agent.endpoints(slices(&[At::Far]));
    // Each has a slice, and so an input, of its own.
    for family in FAMILIES {
        soon("the far endpoint", || agent.asks(Way::Vip, family) == Ok("far".to_owned()));
    }
    let mut answers = 0;
    while start.elapsed() + Duration::from_secs(2) < POLICY_GRACE_PERIOD {
        for (way, family) in Way::EXTERNAL.into_iter().flat_map(|way| FAMILIES.map(|family| (way, family))) {
            let (asked, answer) = (start.elapsed(), agent.asks(way, family));
            // What was asked at the end of the transition, for want of a core, says nothing about it.
            if start.elapsed() < POLICY_GRACE_PERIOD {
                assert_eq!(answer, Ok("far".to_owned()), "{way:?} {family} {asked:?}");
                answers += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(answers > 100);
    std::thread::sleep(POLICY_GRACE_PERIOD.saturating_sub(start.elapsed()));
    soon("silence", || agent.asks(Way::Vip, Family::V4) == Err(Lost::Silence));
    // And back: served everywhere at once, and the old port is answered for the load balancer that still probes it.
    agent.service(service());
    soon("the Service", || agent.asks(Way::Vip, Family::V4) == Ok("far".to_owned()));
    assert_eq!(agent.health(HEALTH_PORT, Family::V4), Some((503, 0)));
    // Nobody stands before this one: nobody is waited for.
    let mut bare = service();
    bare.ingress.clear();
    agent.service(bare.clone());
    soon("a closed port", || agent.health(HEALTH_PORT, Family::V4).is_none());
    agent.service(local(bare));
    soon("silence", || agent.asks(Way::NodePort, Family::V4) == Err(Lost::Silence));
}
