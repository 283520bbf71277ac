// SPDX-License-Identifier: Apache-2.0
//! A node with pods, a remote pod and a client, each in a network namespace. Their servers return their name and the client's
//! address.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use steerage_model::{Family, Protocol};

/// The port that all pods serve.
pub(crate) const PORT: u16 = 8080;
/// A client's timeout. Only dropped packets take that long, and datagrams whose server has no core: see
/// [`until_all_are_answered`].
const PATIENCE: Duration = Duration::from_millis(1500);
/// Longest wait for what must come.
const LIMIT: Duration = Duration::from_mins(1);

/// A place to send from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum At {
    /// Outside the cluster.
    Client,
    /// The node under test.
    Node,
    /// A pod on it.
    Pod1,
    /// Another pod on it.
    Pod2,
    /// A pod on another node.
    Far,
}

impl At {
    const ALL: [Self; 5] = [Self::Client, Self::Node, Self::Pod1, Self::Pod2, Self::Far];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Node => "node",
            Self::Pod1 => "pod1",
            Self::Pod2 => "pod2",
            Self::Far => "far",
        }
    }

    /// Its address. The node's is in the network that it shares with the client.
    pub(crate) fn addr(self, family: Family) -> IpAddr {
        let text = match (self, family) {
            (Self::Client, Family::V4) => "10.1.0.2",
            (Self::Client, Family::V6) => "fd01::2",
            (Self::Node, Family::V4) => "10.1.0.1",
            (Self::Node, Family::V6) => "fd01::1",
            (Self::Pod1, Family::V4) => "10.244.0.11",
            (Self::Pod1, Family::V6) => "fd44::11",
            (Self::Pod2, Family::V4) => "10.244.0.12",
            (Self::Pod2, Family::V6) => "fd44::12",
            (Self::Far, Family::V4) => "10.244.1.11",
            (Self::Far, Family::V6) => "fd44:1::11",
        };
        text.parse().expect("address")
    }

    /// The node's interface on the way there; pods' begin alike.
    pub(crate) fn interface(self) -> &'static str {
        match self {
            Self::Node => "lo",
            Self::Client => "out0",
            Self::Far => "out1",
            Self::Pod1 => "pod0",
            Self::Pod2 => "pod1",
        }
    }

    pub(crate) fn socket(self, family: Family) -> SocketAddr {
        SocketAddr::new(self.addr(family), PORT)
    }
}

/// The places with servers.
const SERVERS: [At; 4] = [At::Pod1, At::Pod2, At::Far, At::Node];

/// Why a request got no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The packet was rejected.
    Refused,
    /// No reply until the timeout.
    Silence,
    /// The TTL expired: without rules, packets to a virtual address loop between routers. Or a router knows no route.
    Unreachable,
}

/// The answering server, and the client's address as it saw it.
pub(crate) type Answer = Result<(String, SocketAddr), Lost>;

/// The network namespaces. Removed on drop.
pub(crate) struct World {
    prefix: String,
    stop: Arc<AtomicBool>,
    servers: Vec<std::thread::JoinHandle<()>>,
}

impl World {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("sta{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut world = Self { prefix, stop: Arc::default(), servers: Vec::new() };
        for at in At::ALL {
            run_shell(&format!("ip netns add {}", world.namespace(at)));
            world.sh_at(
                at,
                "ip link set lo up; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
            );
        }
        for at in At::ALL.into_iter().filter(|at| *at != At::Node) {
            world.join(at);
        }
        // A default route, without which the node cannot send to virtual addresses.
        world.sh_at(At::Node, "ip route add default via 10.1.0.2; ip -6 route add default via fd01::2");
        for at in SERVERS {
            world.serve(at);
        }
        world.meet();
        // The remote pod answers clients outside by another way, as on a real cluster: a packet that it gets with such a client's
        // address is lost.
        world.sh_at(At::Far, "ip route add blackhole 10.1.0.2; ip -6 route add blackhole fd01::2");
        world
    }

    /// Waits until all link-layer addresses are resolved. IPv6 takes a while on new links.
    fn meet(&self) {
        let begun = Instant::now();
        for family in [Family::V4, Family::V6] {
            for (from, to) in At::ALL.into_iter().flat_map(|from| SERVERS.map(|to| (from, to))) {
                while self.ask(from, to.socket(family), Protocol::Udp).is_err() {
                    assert!(begun.elapsed() < LIMIT, "{from:?} cannot reach {to:?} by {family}");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    /// Gives a place more addresses. The kernel takes an IPv6 address into use on a worker of its own; until then it has a route to
    /// it that answers "network unreachable".
    pub(crate) fn own(&self, at: At, addresses: &[impl AsRef<str>]) {
        for address in addresses.iter().map(AsRef::as_ref) {
            let (length, options) = if address.contains(':') { (128, "nodad") } else { (32, "") };
            self.sh_at(at, &format!("ip addr add {address}/{length} dev lo {options}"));
            let begun = Instant::now();
            while !self.sh_at(at, &format!("ip route get {address} || true")).starts_with("local ") {
                assert!(begun.elapsed() < LIMIT, "{address} is not in use");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Runs `work` on a new thread in the namespace.
    pub(crate) fn run<T: Send>(&self, at: At, work: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.namespace(at));
        std::thread::scope(|scope| {
            let body = || {
                let file = std::fs::File::open(path).expect("namespace");
                setns(file.as_fd(), CloneFlags::CLONE_NEWNET).expect("setns");
                work()
            };
            match scope.spawn(body).join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves the calling thread into the namespace.
    pub(crate) fn entering(&self, at: At) -> impl Fn() + Send + Sync + 'static {
        let path = format!("/run/netns/{}", self.namespace(at));
        move || {
            let file = std::fs::File::open(&path).expect("namespace");
            setns(file.as_fd(), CloneFlags::CLONE_NEWNET).expect("setns");
        }
    }

    /// Sends one request and waits for the response.
    pub(crate) fn ask(&self, from: At, to: SocketAddr, protocol: Protocol) -> Answer {
        self.run(from, || match protocol {
            Protocol::Tcp => ask_tcp(to),
            _ => ask_udp(&udp_socket(to), to),
        })
    }

    /// Runs a shell line in a namespace and returns its output.
    pub(crate) fn sh_at(&self, at: At, line: &str) -> String {
        let namespace = self.namespace(at);
        run_shell(&format!("nsenter --net=/run/netns/{namespace} sh -ec '{line}'"))
    }

    fn namespace(&self, at: At) -> String {
        format!("{}-{}", self.prefix, at.name())
    }

    /// Connects the node and another namespace by a veth pair.
    fn join(&self, at: At) {
        let (node, other) = (self.namespace(At::Node), self.namespace(at));
        let name = at.interface();
        run_shell(&format!("ip -n {node} link add {name} type veth peer name eth0 netns {other}"));
        let (v4, v6) = (at.addr(Family::V4), at.addr(Family::V6));
        let (gateway4, gateway6) = (At::Node.addr(Family::V4), At::Node.addr(Family::V6));
        self.sh_at(
            at,
            &format!(
                "ip link set eth0 up; ip addr add {v4}/32 dev eth0; ip -6 addr add {v6}/128 dev eth0 nodad; \
             ip route add {gateway4} dev eth0; ip -6 route add {gateway6} dev eth0; \
             ip route add default via {gateway4}; ip -6 route add default via {gateway6}"
            ),
        );
        self.sh_at(At::Node, &format!(
            "ip link set {name} up; ip addr add {gateway4}/32 dev {name}; ip -6 addr add {gateway6}/128 dev {name} nodad; \
             ip route add {v4} dev {name}; ip -6 route add {v6} dev {name}"
        ));
    }

    fn serve(&mut self, at: At) {
        let path = format!("/run/netns/{}", self.namespace(at));
        for (protocol, family) in [
            (Protocol::Tcp, Family::V4),
            (Protocol::Tcp, Family::V6),
            (Protocol::Udp, Family::V4),
            (Protocol::Udp, Family::V6),
        ] {
            let (path, stop) = (path.clone(), Arc::clone(&self.stop));
            let (bound, ready) = std::sync::mpsc::channel();
            self.servers.push(std::thread::spawn(move || {
                let file = std::fs::File::open(path).expect("namespace");
                setns(file.as_fd(), CloneFlags::CLONE_NEWNET).expect("setns");
                let here = at.socket(family);
                if protocol == Protocol::Tcp {
                    let listener = TcpListener::bind(here).expect("bind");
                    bound.send(()).expect("ready");
                    serve_tcp(at.name(), &listener, &stop);
                } else {
                    let socket = UdpSocket::bind(here).expect("bind");
                    bound.send(()).expect("ready");
                    serve_udp(at.name(), &socket, &stop);
                }
            }));
            ready.recv().expect("the server is bound");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
        for at in At::ALL {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(at)]).status();
        }
    }
}

/// A connected UDP socket, so that it receives ICMP errors. It uses a new port: an earlier flow with the same ports would keep
/// its old translation.
pub(crate) fn udp_socket(to: SocketAddr) -> UdpSocket {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = loop {
        let port = 10_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 20_000;
        match UdpSocket::bind((any, port)) {
            Ok(socket) => break socket,
            Err(error) => assert_eq!(error.kind(), ErrorKind::AddrInUse, "bind"),
        }
    };
    socket.set_read_timeout(Some(PATIENCE)).expect("timeout");
    socket
}

pub(crate) fn ask_udp(socket: &UdpSocket, to: SocketAddr) -> Answer {
    let mut buffer = [0; 128];
    // What came from others before the socket was connected is no answer.
    let drain = || -> std::io::Result<()> {
        socket.set_nonblocking(true)?;
        while socket.recv(&mut [0; 128]).is_ok() {}
        socket.set_nonblocking(false)
    };
    let connected = socket.connect(to).and_then(|()| drain());
    let exchange =
        connected.and_then(|()| socket.send(b"who?")).and_then(|_| match socket.recv(&mut buffer) {
            Err(error) if is_timeout(&error) => {
                until_all_are_answered();
                socket.set_read_timeout(Some(Duration::from_millis(50)))?;
                let late = socket.recv(&mut buffer);
                socket.set_read_timeout(Some(PATIENCE))?;
                late
            }
            received => received,
        });
    answer(exchange.map(|length| String::from_utf8_lossy(&buffer[..length]).into_owned()))
}

/// How many datagrams each running server has answered, and [`IDLE`] more for each time that none was there.
static TURNS: Mutex<Vec<Weak<AtomicU64>>> = Mutex::new(Vec::new());
const IDLE: u64 = 1000;

/// Waits until every server has answered all datagrams that had come to it, or as many as a queue holds. An answer that a client
/// lacks after that is lost; before, its server may only have had no core.
fn until_all_are_answered() {
    let mut turns = TURNS.lock().expect("lock");
    turns.retain(|turns| turns.strong_count() > 0);
    let before: Vec<_> =
        turns.iter().filter_map(Weak::upgrade).map(|turns| (turns.load(Ordering::Relaxed), turns)).collect();
    drop(turns);
    let begun = Instant::now();
    // Twice: the first time may have begun before the datagram came.
    let is_done = |(before, turns): &(u64, Arc<AtomicU64>)| {
        turns.load(Ordering::Relaxed) >= before.saturating_add(2 * IDLE)
    };
    while !before.iter().all(is_done) && begun.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

pub(crate) fn ask_tcp(to: SocketAddr) -> Answer {
    let exchange = TcpStream::connect_timeout(&to, PATIENCE).and_then(|mut stream| ask_on(&mut stream));
    answer(exchange)
}

/// Sends one request on an open connection.
pub(crate) fn ask_on(stream: &mut TcpStream) -> std::io::Result<String> {
    // A dropped handshake has failed before.
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"?")?;
    let mut buffer = [0; 128];
    let length = stream.read(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

fn answer(exchange: std::io::Result<String>) -> Answer {
    match exchange {
        Ok(text) => {
            let (who, seen) = text.split_once(' ').expect("who and whom");
            Ok((who.to_owned(), seen.parse().expect("address")))
        }
        Err(error) => match error.kind() {
            // A datagram that the output hook rejects fails at once with EPERM.
            ErrorKind::ConnectionRefused | ErrorKind::PermissionDenied => Err(Lost::Refused),
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Err(Lost::Silence),
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Err(Lost::Unreachable),
            // The standard library's words for a connection that ended between two of its calls.
            _ if error.to_string().contains("POLLHUP") => Err(Lost::Refused),
            _ => panic!("{error}"),
        },
    }
}

pub(crate) fn serve_tcp(name: &'static str, listener: &TcpListener, stop: &Arc<AtomicBool>) {
    listener.set_nonblocking(true).expect("nonblocking");
    while !stop.load(Ordering::Relaxed) {
        let Ok((mut stream, peer)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).expect("blocking");
        std::thread::spawn(move || {
            let mut question = [0; 1];
            while stream.read_exact(&mut question).is_ok() {
                if stream.write_all(format!("{name} {peer}").as_bytes()).is_err() {
                    break;
                }
            }
        });
    }
}

pub(crate) fn serve_udp(name: &'static str, socket: &UdpSocket, stop: &AtomicBool) {
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
    let mut buffer = [0; 64];
    let turns = Arc::new(AtomicU64::new(0));
    TURNS.lock().expect("lock").push(Arc::downgrade(&turns));
    while !stop.load(Ordering::Relaxed) {
        if let Ok((_, peer)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(format!("{name} {peer}").as_bytes(), peer);
            turns.fetch_add(1, Ordering::Relaxed);
        } else {
            turns.fetch_add(IDLE, Ordering::Relaxed);
        }
    }
    // Nobody waits for a server that has ended.
    turns.store(u64::MAX, Ordering::Relaxed);
}

pub(crate) fn run_shell(line: &str) -> String {
    let output = Command::new("sh").args(["-ec", line]).output().expect("sh");
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
