// SPDX-License-Identifier: Apache-2.0
//! Several nodes with the agent's rules on one link, and one behind a router: each with a pod, in network namespaces. The client is the
//! router, and its load balancer lags: it sends everything for the Service to node `a`.

use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use steerage_agent::explain::{ExplainContext, Explanation, PacketQuery, explain};
use steerage_agent::kernel::{Dataplane, NextHops};
use steerage_agent::local_node::{LocalNode, LocalPods};
use steerage_agent::peers::ForwardToPeers;
use steerage_agent::plan::{Frontend, PeerNodes, plan_service};
use steerage_agent::rules::{Ruleset, flow_seed};
use steerage_model::{Endpoint, EndpointPort, EndpointSlice, Family, Key, Node, Protocol};
use steerage_watch::{Event, Index};

use crate::packets::cluster::{FAMILIES, Way, key, local, service};
use crate::world::{Answer, PORT, ask_tcp, ask_udp, run_shell, serve_tcp, serve_udp, udp_socket};

/// Longest wait for what must come.
const LIMIT: Duration = Duration::from_mins(1);

/// A node. The last one is off the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum On {
    A = 1,
    B = 2,
    C = 3,
    D = 4,
}

impl On {
    pub(crate) const ALL: [Self; 4] = [Self::A, Self::B, Self::C, Self::D];

    pub(crate) fn name(self) -> &'static str {
        ["a", "b", "c", "d"][self as usize - 1]
    }

    fn pod_name(self) -> &'static str {
        ["pod-a", "pod-b", "pod-c", "pod-d"][self as usize - 1]
    }

    pub(crate) fn addr(self, family: Family) -> IpAddr {
        let link = if self == Self::D { 2 } else { 1 };
        address(family, &format!("10.{link}.0.1{}", self as u8), &format!("fd0{link}::1{}", self as u8))
    }

    pub(crate) fn pod(self, family: Family) -> SocketAddr {
        let addr = address(family, &format!("10.244.{}.2", self as u8), &format!("fd44:{}::2", self as u8));
        SocketAddr::new(addr, PORT)
    }

    fn object(self) -> Node {
        let nets = [format!("10.244.{}.0/24", self as u8), format!("fd44:{}::/64", self as u8)];
        Node {
            name: self.name().to_owned(),
            addresses: FAMILIES.map(|family| self.addr(family)).to_vec(),
            pod_cidrs: nets.map(|net| net.parse().expect("network")).to_vec(),
            ..Node::default()
        }
    }
}

/// The client's address on the link.
pub(crate) fn client(family: Family) -> IpAddr {
    address(family, "10.1.0.2", "fd01::2")
}

fn address(family: Family, v4: &str, v6: &str) -> IpAddr {
    if family == Family::V4 { v4 } else { v6 }.parse().expect("address")
}

/// The network namespaces. Removed on drop.
pub(crate) struct Link {
    prefix: String,
    names: Vec<&'static str>,
    stop: Arc<AtomicBool>,
    servers: Vec<std::thread::JoinHandle<()>>,
}

impl Link {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("stl{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let names =
            ["switch", "client"].into_iter().chain(On::ALL.iter().flat_map(|on| [on.name(), on.pod_name()]));
        let mut link = Self { prefix, names: names.collect(), stop: Arc::default(), servers: Vec::new() };
        for name in link.names.clone() {
            run_shell(&format!("ip netns add {}", link.namespace(name)));
            link.sh(
                name,
                "ip link set lo up; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 \
                 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
                 net.ipv6.conf.default.accept_dad=0",
            );
        }
        link.sh("switch", "ip link add br0 type bridge mcast_snooping 0; ip link set br0 up");
        link.cable("client", &["10.1.0.2/24", "fd01::2/64"]);
        for on in On::ALL {
            link.add_node(on);
        }
        link.sh(
            "client",
            &FAMILIES
                .map(|family| format!("ip route add {} via {}", Way::Vip.to(family).ip(), On::A.addr(family)))
                .join("; "),
        );
        for on in On::ALL {
            link.serve(on);
        }
        link.meet();
        link
    }

    /// Connects a namespace to the switch.
    fn cable(&self, name: &str, addresses: &[&str]) {
        let (here, switch) = (self.namespace(name), self.namespace("switch"));
        run_shell(&format!("ip -n {here} link add eth0 type veth peer name {name} netns {switch}"));
        self.sh("switch", &format!("ip link set dev {name} master br0 up"));
        self.sh(name, "ip link set eth0 up");
        for address in addresses {
            self.sh(name, &format!("ip addr add {address} dev eth0"));
        }
    }

    fn add_node(&self, on: On) {
        let (name, n) = (on.name(), on as u8);
        let [v4, v6] = FAMILIES.map(|family| on.addr(family));
        let link = if on == On::D { 2 } else { 1 };
        if on == On::D {
            let (node, client) = (self.namespace(name), self.namespace("client"));
            run_shell(&format!("ip -n {node} link add eth0 type veth peer name eth1 netns {client}"));
            self.sh(
                "client",
                "ip link set eth1 up; ip addr add 10.2.0.2/24 dev eth1; ip addr add fd02::2/64 dev eth1",
            );
            self.sh(
                name,
                &format!("ip link set eth0 up; ip addr add {v4}/24 dev eth0; ip addr add {v6}/64 dev eth0"),
            );
        } else {
            self.cable(name, &[&format!("{v4}/24"), &format!("{v6}/64")]);
        }
        self.sh(
            name,
            &format!("ip route add default via 10.{link}.0.2; ip route add default via fd0{link}::2"),
        );
        let (node, pod) = (self.namespace(name), self.namespace(on.pod_name()));
        run_shell(&format!("ip -n {node} link add pod0 type veth peer name eth0 netns {pod}"));
        self.sh(name, &format!("ip link set pod0 up; ip addr add 10.244.{n}.1/24 dev pod0; ip addr add fd44:{n}::1/64 dev pod0"));
        self.sh(
            on.pod_name(),
            &format!(
                "ip link set eth0 up; ip addr add 10.244.{n}.2/24 dev eth0; ip addr add fd44:{n}::2/64 dev eth0; \
                 ip route add default via 10.244.{n}.1; ip route add default via fd44:{n}::1"
            ),
        );
        self.sh(
            "client",
            &format!("ip route add 10.244.{n}.0/24 via {v4}; ip route add fd44:{n}::/64 via {v6}"),
        );
    }

    fn serve(&mut self, on: On) {
        for (protocol, family) in
            FAMILIES.into_iter().flat_map(|family| [(Protocol::Tcp, family), (Protocol::Udp, family)])
        {
            let (enter, stop) = (self.entering(on.pod_name()), Arc::clone(&self.stop));
            let (bound, ready) = std::sync::mpsc::channel();
            self.servers.push(std::thread::spawn(move || {
                enter();
                if protocol == Protocol::Tcp {
                    let listener = bound_once(|| TcpListener::bind(on.pod(family)));
                    bound.send(()).expect("ready");
                    serve_tcp(on.name(), &listener, &stop);
                } else {
                    let socket = bound_once(|| UdpSocket::bind(on.pod(family)));
                    bound.send(()).expect("ready");
                    serve_udp(on.name(), &socket, &stop);
                }
            }));
            ready.recv().expect("the server is bound");
        }
    }

    /// Waits until all link-layer addresses are resolved.
    fn meet(&self) {
        let begun = Instant::now();
        for (family, on) in FAMILIES.into_iter().flat_map(|family| On::ALL.map(|on| (family, on))) {
            while self.ask(on.pod(family), Protocol::Udp).is_err() {
                assert!(begun.elapsed() < LIMIT, "{on:?} cannot be reached by {family}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Sends one request from the client and waits for the response.
    pub(crate) fn ask(&self, to: SocketAddr, protocol: Protocol) -> Answer {
        self.ask_from("client", to, protocol)
    }

    pub(crate) fn ask_from(&self, name: &str, to: SocketAddr, protocol: Protocol) -> Answer {
        self.run(name, || match protocol {
            Protocol::Tcp => ask_tcp(to),
            _ => ask_udp(&udp_socket(to), to),
        })
    }

    /// Runs `work` on a new thread in a namespace.
    pub(crate) fn run<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> T {
        let enter = self.entering(name);
        std::thread::scope(|scope| {
            let body = || {
                enter();
                work()
            };
            match scope.spawn(body).join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn entering(&self, name: &str) -> impl Fn() + Send + Sync + 'static {
        let path = format!("/run/netns/{}", self.namespace(name));
        move || {
            let file = std::fs::File::open(&path).expect("namespace");
            setns(file.as_fd(), CloneFlags::CLONE_NEWNET).expect("setns");
        }
    }

    /// Runs a shell line in a namespace and returns its output.
    pub(crate) fn sh(&self, name: &str, line: &str) -> String {
        run_shell(&format!("nsenter --net=/run/netns/{} sh -ec '{line}'", self.namespace(name)))
    }

    fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(name)]).status();
        }
    }
}

/// The data plane of one node, which follows what it believes of the endpoints.
pub(crate) struct Agent {
    on: On,
    flags: Option<ForwardToPeers>,
    next_hops: NextHops,
    enter: Box<dyn Fn() + Send + Sync>,
    dataplane: Dataplane,
    ruleset: Ruleset,
    index: Index,
    local_node: LocalNode,
}

impl Agent {
    /// With these tunnel devices.
    pub(crate) fn new(link: &Link, on: On, tunnel_devices: &[&str]) -> Self {
        let tunnel_devices = tunnel_devices.iter().map(|name| (*name).to_owned()).collect();
        let flags = Some(ForwardToPeers { tunnel_devices });
        let next_hops = link.run(on.name(), || NextHops::open().expect("open"));
        let mut agent = Self { flags, ..Self::without_forwarding(link, on, next_hops) };
        agent.ruleset.set_forward_to_peers(true);
        agent
    }

    fn without_forwarding(link: &Link, on: On, next_hops: NextHops) -> Self {
        let dataplane = link.run(on.name(), || Dataplane::open().expect("open"));
        let mut ruleset = Ruleset::default();
        ruleset.set_seed(flow_seed(on.name()));
        let enter = Box::new(link.entering(on.name()));
        let (index, local_node) = Default::default();
        Self { on, flags: None, next_hops, enter, dataplane, ruleset, index, local_node }
    }

    /// What `steerage-agent explain` says of a TCP packet from outside.
    pub(crate) fn explained(&self, to: SocketAddr) -> Explanation {
        let pods = LocalPods::Networks(self.on.object().pod_cidrs);
        let host = &self.local_node.addresses;
        let context = ExplainContext {
            ruleset: &self.ruleset,
            index: &self.index,
            local_node: &self.local_node,
            pods: &pods,
            host,
        };
        let frontend = Frontend { addr: to.ip(), protocol: Protocol::Tcp, port: to.port() };
        explain(PacketQuery::new(frontend, None).expect("one family"), context)
    }

    /// Writes the rules for the Service with pods on these nodes.
    pub(crate) fn apply(&mut self, pods: &[On]) {
        let service = local(service());
        let mut index = Index::default();
        index.apply_service(Event::Apply(service.clone()));
        for slice in slices(pods) {
            index.apply_slice(Event::Apply(slice));
        }
        let peers = self.flags.as_ref().map(|flags| {
            let mut peers = PeerNodes::new(flow_seed(self.on.name()));
            // Devices are those of the calling thread's namespace.
            std::thread::scope(|scope| {
                let update = || {
                    (self.enter)();
                    self.next_hops.update_devices().expect("devices");
                };
                scope.spawn(update).join().expect("devices");
            });
            for on in On::ALL.into_iter().filter(|on| *on != self.on) {
                let found =
                    flags.addresses(&on.object(), |addr| self.next_hops.next_hop(addr).expect("a route"));
                peers.set(on.name(), found);
            }
            Arc::new(peers)
        });
        let Node { name, addresses, pod_cidrs, .. } = self.on.object();
        let local_node = LocalNode {
            node: name,
            node_port_addresses: addresses.clone(),
            addresses,
            peers,
            ..LocalNode::default()
        };
        self.ruleset.set_pods(&LocalPods::Networks(pod_cidrs));
        let plan = plan_service(&service, &index, &local_node);
        self.dataplane.write(&mut self.ruleset, [(key(), plan)].into()).expect("write");
        (self.index, self.local_node) = (index, local_node);
    }
}

/// The kernel takes an IPv6 address into use on a worker of its own: until then nothing can be bound to it.
fn bound_once<T>(bind: impl Fn() -> std::io::Result<T>) -> T {
    let begun = Instant::now();
    loop {
        match bind() {
            Ok(socket) => return socket,
            Err(error) => assert!(begun.elapsed() < LIMIT, "bind: {error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn slices(pods: &[On]) -> Vec<EndpointSlice> {
    FAMILIES
        .map(|family| EndpointSlice {
            ports: [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| EndpointPort { name: protocol.to_string(), protocol, port: PORT })
                .into(),
            endpoints: pods.iter().map(|on| Endpoint::ready(on.pod(family).ip(), on.name())).collect(),
            ..EndpointSlice::new(Key::new("shop", format!("web-{family}")), key(), family)
        })
        .to_vec()
}
