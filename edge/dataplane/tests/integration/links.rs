// SPDX-License-Identifier: Apache-2.0
//! The program on a real link in network namespaces: a client, an edge host and two nodes at one
//! switch. It outlives its daemon, is adopted, and is replaced without the loss of a packet.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path as FilePath;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use steerage_edge_dataplane::packet::maps::{Event, ListenerKey};
use steerage_edge_dataplane::{
    Dataplane, Hook, Listener, MacAddress, Options, Path, State, TargetState, remove,
};
use steerage_requirements::{Requirement, requires};

use crate::bed::{self, FRESH, Pins, address, table};

const VIPS: [&str; 2] = ["10.0.0.100", "fd00::100"];
const PORT: u16 = 80;
/// Longer than anything takes on a busy machine.
const SOON: Duration = Duration::from_secs(20);

fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().expect("sh");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A client, an edge host and nodes at one switch. Goes with its namespaces.
pub(crate) struct Link {
    prefix: String,
    pub(crate) pins: Pins,
}

impl Link {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("sd{}x{}-", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let link = Self { prefix, pins: Pins::new() };
        let switch = link.netns("switch");
        sh(&format!(
            "ip netns add {switch}; ip -n {switch} link add br0 type bridge mcast_snooping 0; ip -n {switch} link set br0 up"
        ));
        for (name, host) in [("client", 9), ("edge", 1), ("node1", 21), ("node2", 22)] {
            let netns = link.netns(name);
            sh(&format!(
                "ip netns add {netns}; ip -n {netns} link set lo up
                 ip netns exec {netns} sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0 \
                    net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=0
                 ip -n {netns} link add eth0 type veth peer name {name} netns {switch}
                 ip -n {switch} link set {name} master br0 up
                 ip -n {netns} addr add 10.0.0.{host}/24 dev eth0; ip -n {netns} addr add fd00::{host}/64 dev eth0 nodad
                 ip -n {netns} link set eth0 up"
            ));
        }
        for node in ["node1", "node2"] {
            let netns = link.netns(node);
            for vip in VIPS {
                // Others cannot be bound until the kernel has checked them.
                let unchecked = if vip.contains(':') { "nodad" } else { "" };
                sh(&format!("ip -n {netns} addr add {vip} dev lo {unchecked}"));
            }
            serve(&netns, node);
        }
        link
    }

    pub(crate) fn netns(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(crate) fn within<T: Send>(&self, name: &str, body: impl FnOnce() -> T + Send) -> T {
        let netns = self.netns(name);
        thread::scope(|scope| {
            let run = || {
                enter(&netns);
                body()
            };
            scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    pub(crate) fn options(&self, hook: Hook) -> Options {
        Options {
            interface: "eth0".to_owned(),
            mac: self.mac(),
            pins: Some(self.pins.0.join("eth0")),
            hook: Some(hook),
            ..bed::options()
        }
    }

    fn mac(&self) -> MacAddress {
        let text = sh(&format!("ip netns exec {} cat /sys/class/net/eth0/address", self.netns("edge")));
        let bytes: Vec<_> =
            text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).expect("hex")).collect();
        bytes.try_into().expect("six bytes")
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in ["switch", "client", "edge", "node1", "node2"] {
            let _ = Command::new("ip").args(["netns", "del", &self.netns(name)]).status();
        }
    }
}

fn enter(netns: &str) {
    let file = std::fs::File::open(FilePath::new("/run/netns").join(netns)).expect("netns");
    setns(file, CloneFlags::CLONE_NEWNET).expect("setns");
}

/// Each connection and each datagram gets the node's name.
fn serve(netns: &str, name: &'static str) {
    let (sender, ready) = std::sync::mpsc::channel();
    let netns = netns.to_owned();
    thread::spawn(move || {
        enter(&netns);
        let tcp = TcpListener::bind(("::", PORT)).expect("bind");
        let udp = VIPS.map(|vip| UdpSocket::bind((vip, PORT)).expect("bind"));
        sender.send(()).expect("send");
        for udp in udp {
            thread::spawn(move || {
                let mut buffer = [0; 2048];
                while let Ok((_, from)) = udp.recv_from(&mut buffer) {
                    let _ = udp.send_to(name.as_bytes(), from);
                }
            });
        }
        for stream in tcp.incoming() {
            let Ok(mut stream) = stream else { continue };
            thread::spawn(move || {
                let mut byte = [0; 1];
                while matches!(stream.read(&mut byte), Ok(1)) && stream.write_all(name.as_bytes()).is_ok() {}
            });
        }
    });
    ready.recv().expect("the node serves");
}

/// A connection to a VIP, over which the node's name can be asked for.
struct Connection(TcpStream);

impl Connection {
    fn open(vip: &str) -> std::io::Result<Self> {
        let to = SocketAddr::new(address(vip), PORT);
        let stream = TcpStream::connect_timeout(&to, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Self(stream))
    }

    fn node(&mut self) -> std::io::Result<String> {
        self.0.write_all(b"?")?;
        let mut name = [0; 5];
        self.0.read_exact(&mut name)?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }
}

pub(crate) fn state(nodes: &[u32]) -> State {
    let mut state = State::default();
    for vip in VIPS {
        state.vips.insert(address(vip), FRESH);
        for protocol in [6, 17] {
            let table = if address(vip).is_ipv4() { 1 } else { 2 };
            let listener = Listener { table, has_affinity: false, ranges: None };
            state.listeners.insert(ListenerKey::new(address(vip), protocol, PORT), listener);
        }
    }
    let numbers = |base: u32| nodes.iter().map(|node| base + node).collect::<Vec<_>>();
    state.tables = [(1, table(251, &numbers(0))), (2, table(251, &numbers(2)))].into();
    for (number, node) in [(1, "10.0.0.21"), (2, "10.0.0.22"), (3, "fd00::21"), (4, "fd00::22")] {
        state.targets.insert(number, TargetState { address: address(node), path: Path::Neighbour });
    }
    state
}

pub(crate) fn start(options: Options, state: &State) -> Dataplane {
    let hook = options.hook;
    let mut dataplane = Dataplane::load(options).expect("load");
    dataplane.write(state.clone()).expect("write");
    dataplane.leases().set(FRESH, Duration::MAX);
    assert!(!dataplane.is_attached().expect("not yet"));
    assert_eq!(Some(dataplane.attach().expect("attach")), hook);
    assert!(dataplane.is_attached().expect("attached"));
    dataplane
}

/// Those that this kernel has. The data plane prefers the first.
pub(crate) fn hooks() -> &'static [Hook] {
    if has_tcx() { &[Hook::Tcx, Hook::Filter] } else { &[Hook::Filter] }
}

pub(crate) fn has_tcx() -> bool {
    Requirement::Tcx.check().is_ok()
}

/// A kernel without tcx is found out, and one with tcx uses it.
#[test]
fn preferred_hook_is_used_unasked() {
    requires!(NetworkNamespace, Program("ip"));
    let link = Link::new();
    let options = Options { hook: None, ..link.options(hooks()[0]) };
    let mut dataplane = link.within("edge", || Dataplane::load(options).expect("load"));
    assert_eq!(link.within("edge", || dataplane.attach().expect("attach")), hooks()[0]);
}

#[test]
fn clients_reach_both_nodes_through_the_link() {
    requires!(NetworkNamespace, Program("ip"));
    let link = Link::new();
    for &hook in hooks() {
        let dataplane = link.within("edge", || start(link.options(hook), &state(&[1, 2])));
        for vip in VIPS {
            let nodes: BTreeSet<_> = link.within("client", || {
                (0..30)
                    .map(|_| Connection::open(vip).and_then(|mut one| one.node()).expect("served"))
                    .collect()
            });
            assert_eq!(nodes, ["node1", "node2"].map(str::to_owned).into(), "{vip} by {hook:?}");
            let key = ListenerKey::new(address(vip), 6, PORT);
            assert_eq!(dataplane.counts().listeners().expect("counters")[&key].flows, 30);
        }
        let pings =
            link.within("client", || sh("ping -c 3 -i 0.1 -W 2 10.0.0.100; ping -c 3 -i 0.1 -W 2 fd00::100"));
        assert_eq!(pings.matches(" 0% packet loss").count(), 2, "{pings}");
        assert_eq!(dataplane.counts().events().expect("events").get(&Event::Echo), Some(&6));
        link.within("edge", || remove("eth0", &link.pins.0.join("eth0")).expect("remove"));
        // The kernel detaches a link some time after nothing refers to it.
        let is_attached = || link.within("edge", || dataplane.is_attached().expect("list"));
        let begun = Instant::now();
        while hook == Hook::Tcx && is_attached() && begun.elapsed() < SOON {
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(is_attached(), hook == Hook::Filter, "of a filter it is not found out");
        let lost = link.within("client", || Connection::open(VIPS[0]).is_err());
        assert!(lost, "nothing of it stays");
    }
}

/// What a client sends while daemons come and go.
struct Stream {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<(u32, u32)>,
}

impl Stream {
    /// Datagrams, one after the other: the answer to one must come before the next.
    fn start(netns: &str, vip: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, netns, to) = (Arc::clone(&stop), netns.to_owned(), (address(vip), PORT));
        let thread = thread::spawn(move || {
            enter(&netns);
            let any: IpAddr = address(if to.0.is_ipv4() { "0.0.0.0" } else { "::" });
            let (mut sent, mut lost) = (0, 0);
            while !stopped.load(Ordering::Relaxed) {
                let socket = UdpSocket::bind((any, 0)).expect("bind");
                socket.connect(to).expect("connect");
                socket.set_read_timeout(Some(Duration::from_secs(1))).expect("timeout");
                for _ in 0..20 {
                    sent += 1;
                    let answered = socket.send(b"?").is_ok() && socket.recv(&mut [0; 16]).is_ok();
                    lost += u32::from(!answered);
                }
            }
            (sent, lost)
        });
        Self { stop, thread }
    }

    fn stop(self) -> (u32, u32) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("stream")
    }
}

#[test]
fn program_outlives_its_daemon_and_is_replaced_without_loss() {
    requires!(NetworkNamespace, Program("ip"));
    for &hook in hooks() {
        let link = Link::new();
        let wanted = state(&[1, 2]);
        drop(link.within("edge", || start(link.options(hook), &wanted)));
        let mut connections =
            link.within("client", || VIPS.map(|vip| Connection::open(vip).expect("served")));
        let nodes = connections.each_mut().map(|one| one.node().expect("served"));
        let streams = VIPS.map(|vip| Stream::start(&link.netns("client"), vip));
        for _ in 0..5 {
            let mut dataplane = link.within("edge", || Dataplane::load(link.options(hook)).expect("load"));
            assert!(dataplane.is_adopted());
            assert_eq!(dataplane.written(), Some(&wanted), "as the earlier process has written it");
            assert!(dataplane.flows().expect("flows").len() >= 2, "flows are kept");
            link.within("edge", || dataplane.attach().expect("attach"));
            thread::sleep(Duration::from_millis(50));
        }
        for stream in streams {
            let (sent, lost) = stream.stop();
            println!("{hook:?}: {sent} datagrams, {lost} lost");
            assert!(sent > 100 && lost == 0, "{lost} of {sent} lost");
        }
        let now = connections.each_mut().map(|one| one.node().expect("still served"));
        assert_eq!(now, nodes);
        link.within("edge", || remove("eth0", &link.pins.0.join("eth0")).expect("remove"));
    }
}

/// From a filter, of an older kernel, to tcx and back.
#[test]
fn other_hook_takes_over() {
    requires!(NetworkNamespace, Program("ip"), Tcx);
    let link = Link::new();
    let wanted = state(&[1, 2]);
    drop(link.within("edge", || start(link.options(Hook::Filter), &wanted)));
    let dataplane = link.within("edge", || start(link.options(Hook::Tcx), &wanted));
    link.within("client", || Connection::open(VIPS[0]).and_then(|mut one| one.node()).expect("served"));
    let key = ListenerKey::new(address(VIPS[0]), 6, PORT);
    assert_eq!(
        dataplane.counts().listeners().expect("counters")[&key].flows,
        1,
        "one program has the packet"
    );
}

#[test]
fn maps_of_another_layout_and_leftovers_are_not_adopted() {
    requires!(NetworkNamespace, Program("ip"));
    hooks().iter().copied().for_each(leave_maps_of_another_layout);
}

fn leave_maps_of_another_layout(hook: Hook) {
    let link = Link::new();
    let pins = link.pins.0.join("eth0");
    drop(link.within("edge", || start(link.options(hook), &state(&[1, 2]))));
    let maps = std::fs::read_dir(&pins).expect("pins").map(|entry| entry.expect("entry").path());
    let maps = maps.into_iter().find(|path| path.is_dir()).expect("folder of maps");
    std::fs::remove_file(maps.join("GATE")).expect("remove");
    let load = || link.within("edge", || Dataplane::load(link.options(hook)).expect("load"));
    let is_in_use = |dataplane: &Dataplane| link.within("edge", || dataplane.is_in_use());
    let dataplane = load();
    assert!(!dataplane.is_adopted(), "a map is missing");
    link.within("client", || {
        Connection::open(VIPS[0]).and_then(|mut one| one.node()).expect("by the old program")
    });
    assert_eq!(dataplane.leases().get(FRESH), Duration::MAX, "as the earlier process has left it");
    // The old program answers by the leases of this process.
    let forget = || link.within("client", || sh("ip neigh flush dev eth0"));
    dataplane.leases().set(FRESH, Duration::ZERO);
    forget();
    assert!(link.within("client", || Connection::open(VIPS[0]).is_err()), "the lease has ended");
    drop(dataplane);
    // A process that is killed in the first write has written listeners and no VIPs.
    let mut dataplane = load();
    dataplane.leases().set(FRESH, Duration::MAX);
    forget();
    link.within("client", || {
        Connection::open(VIPS[0]).and_then(|mut one| one.node()).expect("by the old program")
    });
    let half = State { vips: std::collections::BTreeMap::new(), ..state(&[1]) };
    dataplane.write(half).expect("write");
    assert!(!is_in_use(&dataplane));
    drop(dataplane);
    let mut dataplane = load();
    assert!(dataplane.is_adopted() && !is_in_use(&dataplane), "the program has the old maps");
    dataplane.write(state(&[1])).expect("write");
    dataplane.leases().set(FRESH, Duration::MAX);
    let others = ["maps-0", "maps-7"].map(|name| pins.join(name));
    assert!(others[0].exists(), "the maps of the attached program are kept");
    std::fs::create_dir(&others[1]).expect("folder");
    link.within("edge", || dataplane.attach().expect("attach"));
    assert!(is_in_use(&dataplane));
    assert!(!others.iter().any(|other| other.exists()), "the program of these maps is no longer attached");
    drop(dataplane);
    let dataplane = load();
    let is_found_out = hook == Hook::Tcx;
    assert_eq!(is_in_use(&dataplane), is_found_out, "an earlier process's program has the same maps");
    for _ in 0..10 {
        let node = link
            .within("client", || Connection::open(VIPS[0]).and_then(|mut one| one.node()).expect("served"));
        assert_eq!(node, "node1");
    }
}

/// The program of the old name would be before that of the new one, with maps that nobody writes.
#[test]
fn program_of_an_earlier_name_of_the_interface_is_removed() {
    requires!(NetworkNamespace, Program("ip"), Tcx);
    let link = Link::new();
    let edge = link.netns("edge");
    let first = link.options(Hook::Tcx);
    let named = |name: &str| Options {
        interface: name.to_owned(),
        pins: Some(link.pins.0.join(name)),
        ..first.clone()
    };
    let rename = |from: &str, to: &str| {
        sh(&format!(
            "ip -n {edge} link set {from} down; ip -n {edge} link set {from} name {to}
             ip -n {edge} link set {to} up; ip -n {edge} addr add fd00::1/64 dev {to} nodad"
        ));
    };
    let add = |name: &str| sh(&format!("ip -n {edge} link add {name} type veth peer name {name}-peer"));
    add("gone");
    add("other");
    for name in ["gone", "other"] {
        drop(link.within("edge", || start(named(name), &state(&[1]))));
    }
    drop(link.within("edge", || start(first.clone(), &state(&[1]))));
    sh(&format!("ip -n {edge} link del gone"));
    // Of other programs.
    std::fs::create_dir_all(link.pins.0.join("cilium/maps-of-it")).expect("folder");
    rename("eth0", "lan0");
    let options = named("lan0");
    let dataplane = link.within("edge", || start(options.clone(), &state(&[2])));
    let node =
        |vip| link.within("client", || Connection::open(vip).and_then(|mut one| one.node()).expect("served"));
    // The kernel detaches the program of the old name a moment after its last descriptor is closed.
    let deadline = Instant::now() + Duration::from_secs(10);
    while node(VIPS[0]) != "node2" && Instant::now() < deadline {}
    for vip in VIPS {
        for _ in 0..10 {
            assert_eq!(node(vip), "node2", "by the program of the new name");
        }
    }
    let folders = || {
        let found = std::fs::read_dir(&link.pins.0).expect("list");
        let name =
            |found: std::io::Result<std::fs::DirEntry>| found.expect("entry").file_name().into_string();
        // The kernel has files of its own there.
        let names = found.map(|found| name(found).expect("name")).filter(|name| !name.contains('.'));
        names.collect::<BTreeSet<_>>()
    };
    assert_eq!(folders(), ["cilium", "lan0", "other"].map(str::to_owned).into());
    drop(dataplane);
    // Another interface gets the name: the link of the first one is not updated but replaced.
    rename("lan0", "eth5");
    add("lan0");
    let mut dataplane = link.within("edge", || Dataplane::load(options.clone()).expect("load"));
    assert!(!link.within("edge", || dataplane.is_in_use()), "the program is attached to another interface");
    link.within("edge", || dataplane.attach().expect("attach"));
    assert!(link.within("edge", || dataplane.is_attached().expect("list")), "attached to this one");
    link.within("client", || {
        assert!(Connection::open(VIPS[0]).is_err(), "no program is attached to the first one");
    });
}

#[test]
fn files_of_other_programs_are_not_removed() {
    requires!(NetworkNamespace, Program("ip"), Tcx);
    let link = Link::new();
    let pins = link.pins.0.join("eth0");
    drop(link.within("edge", || start(link.options(Hook::Tcx), &state(&[1]))));
    let other = link.pins.0.join("cilium");
    for folder in [other.join("x"), pins.join("x"), pins.join("maps-1/x"), pins.join("maps-x")] {
        std::fs::create_dir_all(folder).expect("folder");
    }
    // A pin of the same name, without maps of a data plane beside it.
    std::fs::rename(pins.join("link"), other.join("link")).expect("rename");
    link.within("edge", || {
        for name in ["cilium", "eth0", "none"] {
            remove(name, &link.pins.0.join(name)).expect("remove");
        }
    });
    assert!(other.join("link").exists() && other.join("x").exists());
    let left = [&pins, &pins.join("maps-1")].map(|folder| {
        let found = std::fs::read_dir(folder).expect("list").map(|found| found.expect("entry").file_name());
        found.collect::<BTreeSet<_>>()
    });
    assert_eq!(left[0], ["maps-1", "maps-x", "x"].map(Into::into).into());
    assert_eq!(left[1], ["x"].map(Into::into).into());
    for folder in ["x", "maps-x", "maps-1/x"] {
        std::fs::remove_dir(pins.join(folder)).expect("remove");
    }
    link.within("edge", || remove("eth0", &pins).expect("remove"));
    assert!(!pins.exists(), "nothing else is in it");
}

/// The nodes are reached through VXLAN, as those beyond the link are.
#[test]
fn clients_reach_nodes_through_the_tunnel() {
    const DATA: usize = 200_000;
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"));
    let link = Link::new();
    let edge = link.netns("edge");
    sh(&format!("ip -n {edge} link add vx0 type vxlan external dstport 4789; ip -n {edge} link set vx0 up"));
    let index = sh(&format!("ip netns exec {edge} cat /sys/class/net/vx0/ifindex"));
    for (name, host) in [("node1", 21), ("node2", 22)] {
        let netns = link.netns(name);
        sh(&format!(
            "ip -n {netns} link add vx0 address 02:00:00:00:09:{host} type vxlan id 7 dstport 4789 local 10.0.0.{host}
             ip netns exec {netns} sysctl -qw net.ipv4.conf.vx0.rp_filter=0
             ip -n {netns} link set vx0 up"
        ));
    }
    // As packets are that come from a router: no checksum is left to the device, and none are merged.
    let client = link.netns("client");
    sh(&format!("ip netns exec {client} ethtool -K eth0 tx off tso off gso off >/dev/null"));
    let mut wanted = state(&[1, 2]);
    for (number, target) in &mut wanted.targets {
        let host = if number % 2 == 1 { 0x21 } else { 0x22 };
        target.address = address(if number % 2 == 1 { "10.0.0.21" } else { "10.0.0.22" });
        target.path = Path::Tunnel { mac: [2, 0, 0, 0, 9, host], mtu: 1400, vni: 7 };
    }
    let options = Options { tunnel: index.trim().parse().ok(), ..link.options(hooks()[0]) };
    let dataplane = link.within("edge", || start(options, &wanted));
    for vip in VIPS {
        link.within("client", || {
            let mut connection = Connection::open(vip).expect("served");
            connection.node().expect("served");
            // Segments are as long as the link allows, until the client learns the tunnel's limit.
            let sender = connection.0.try_clone().expect("clone");
            let sent = thread::spawn(move || {
                (&sender).write_all(&vec![b'?'; DATA]).map_err(|error| error.to_string())
            });
            let mut answers = vec![0; DATA * 5];
            connection.0.read_exact(&mut answers).expect("all answers");
            sent.join().expect("sender").expect("sent");
        });
    }
    assert!(dataplane.counts().events().expect("events")[&Event::TooBig] >= 2);
}

#[test]
fn host_whose_lease_has_ended_is_forgotten_by_the_link() {
    requires!(NetworkNamespace, Program("ip"));
    let link = Link::new();
    let dataplane = link.within("edge", || start(link.options(hooks()[0]), &state(&[1, 2])));
    for vip in VIPS {
        let forget = || sh(&format!("ip neigh flush dev eth0; ! ip neigh show {vip} | grep REACHABLE"));
        link.within("client", || {
            forget();
            assert!(Connection::open(vip).is_ok());
        });
        dataplane.leases().set(FRESH, Duration::ZERO);
        link.within("client", || {
            forget();
            assert!(Connection::open(vip).is_err(), "nobody has {vip}");
        });
        dataplane.leases().set(FRESH, Duration::MAX);
        let deadline = Instant::now() + Duration::from_secs(30);
        while link.within("client", || Connection::open(vip).is_err()) {
            assert!(Instant::now() < deadline, "one write brings {vip} back");
        }
    }
}
