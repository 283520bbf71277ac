// SPDX-License-Identifier: Apache-2.0
//! Servers and clients in network namespaces, on threads of their own.

use std::collections::BTreeSet;
use std::sync::mpsc;

use nix::sched::{CloneFlags, setns};

use super::{
    Arc, AtomicBool, BufRead, BufReader, CHECK, Duration, File, IpAddr, Ordering, PORT, Read, SocketAddr,
    TcpListener, TcpStream, UdpSocket, VIP4, VIP6, Write, thread,
};

/// Longer than any gap that a takeover may leave.
pub(crate) const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Moves this thread into a network namespace.
fn enter(netns: &str) {
    let file = File::open(format!("/run/netns/{netns}")).expect("namespace");
    setns(file, CloneFlags::CLONE_NEWNET).expect("setns");
}

/// Runs `body` in a network namespace.
pub(crate) fn within<T: Send>(netns: &str, body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let run = || {
            enter(netns);
            body()
        };
        scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A node's servers: TCP and UDP on the port, and the health check.
pub(crate) fn serve(netns: &str, name: &str, healthy: Arc<AtomicBool>) {
    let (name, netns) = (name.to_owned(), netns.to_owned());
    let (ready, wait) = mpsc::channel();
    thread::spawn(move || {
        enter(&netns);
        let tcp = TcpListener::bind(("::", PORT)).expect("bind");
        let check = TcpListener::bind(("::", CHECK)).expect("bind");
        let udp: Vec<_> = [VIP4, VIP6].map(|vip| UdpSocket::bind((vip, PORT)).expect("bind")).into();
        ready.send(()).expect("ready");
        for socket in udp {
            let name = name.clone();
            thread::spawn(move || {
                let mut buffer = vec![0; 65_536];
                while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                    let answer = format!("{name} {from} {length}");
                    let _ = socket.send_to(answer.as_bytes(), from);
                }
            });
        }
        thread::spawn(move || {
            for stream in check.incoming() {
                let Ok(mut stream) = stream else { continue };
                let healthy = healthy.load(Ordering::Relaxed);
                let _ = stream.read(&mut [0; 1024]);
                let status = if healthy { "200 OK" } else { "503 Service Unavailable" };
                let _ =
                    stream.write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes());
            }
        });
        for stream in tcp.incoming() {
            let (Ok(stream), name) = (stream, name.clone()) else { continue };
            thread::spawn(move || serve_connection(&stream, &name));
        }
    });
    wait.recv().expect("the node serves");
}

/// Sends the names of node and client, then echoes every line.
fn serve_connection(mut stream: &TcpStream, name: &str) -> Option<()> {
    let peer = stream.peer_addr().ok()?;
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    stream.write_all(format!("{name} {peer}\n").as_bytes()).ok()?;
    for line in BufReader::new(stream).lines() {
        stream.write_all(format!("{}\n", line.ok()?).as_bytes()).ok()?;
    }
    Some(())
}

/// A client's connection.
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
    pub(crate) node: String,
    pub(crate) seen: SocketAddr,
    pub(crate) own: SocketAddr,
}

impl Connection {
    /// In the current namespace.
    pub(crate) fn open(vip: &str) -> std::io::Result<Self> {
        Self::open_within(vip, CLIENT_TIMEOUT)
    }

    pub(crate) fn open_within(vip: &str, timeout: Duration) -> std::io::Result<Self> {
        let to = SocketAddr::new(vip.parse::<IpAddr>().expect("address"), PORT);
        let stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        let own = stream.local_addr()?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let (node, seen) = line.trim().split_once(' ').ok_or(std::io::ErrorKind::UnexpectedEof)?;
        Ok(Self { node: node.to_owned(), seen: seen.parse().expect("address"), own, stream })
    }

    /// Sends a line and expects it back.
    pub(crate) fn echo(&mut self, text: &str) -> std::io::Result<()> {
        self.stream.get_mut().write_all(format!("{text}\n").as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        if line.trim() == text { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// The nodes that serve `count` connections; `failed` is among them if one fails.
pub(crate) fn responding_nodes(netns: &str, vip: &str, count: usize) -> Vec<String> {
    within(netns, || {
        let node = |_| match Connection::open_within(vip, Duration::from_millis(500)) {
            Ok(connection) => connection.node,
            Err(_) => "failed".to_owned(),
        };
        // The first failure is enough.
        let mut nodes = BTreeSet::new();
        for number in 0..count {
            nodes.insert(node(number));
            if nodes.contains("failed") {
                break;
            }
        }
        nodes.into_iter().collect()
    })
}

/// The node that replied, the client's own address, the address that the node saw, and the length.
type Reply = (String, SocketAddr, SocketAddr, usize);

/// Sends a datagram and waits for the reply for so long that only a lost one takes longer.
pub(crate) fn query_udp(vip: &str, length: usize) -> Option<Reply> {
    let any = if vip.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).expect("bind");
    query_udp_from(&socket, vip, length)
}

pub(crate) fn query_udp_from(socket: &UdpSocket, vip: &str, length: usize) -> Option<Reply> {
    query_udp_within(socket, vip, length, Duration::from_secs(20))
}

pub(crate) fn query_udp_within(
    socket: &UdpSocket,
    vip: &str,
    length: usize,
    timeout: Duration,
) -> Option<Reply> {
    socket.connect((vip, PORT)).expect("connect");
    socket.set_read_timeout(Some(timeout)).expect("timeout");
    socket.send(&vec![b'x'; length]).ok()?;
    let mut buffer = [0; 256];
    let length = socket.recv(&mut buffer).ok()?;
    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
    let mut words = text.split(' ');
    let node = words.next()?.to_owned();
    let seen = words.next()?.parse().ok()?;
    Some((node, socket.local_addr().ok()?, seen, words.next()?.parse().ok()?))
}

/// Opens connections one after the other and holds some long ones, until stopped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<(usize, Vec<String>)>,
}

impl Load {
    pub(crate) fn start(netns: &str, long: usize) -> Self {
        let (stop, netns) = (Arc::new(AtomicBool::new(false)), netns.to_owned());
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            enter(&netns);
            let mut failed = Vec::new();
            let mut count = 0;
            let mut connections: Vec<_> = (0..long)
                .map(|number| Connection::open([VIP4, VIP6][number % 2]).expect("a long one"))
                .collect();
            while !stopped.load(Ordering::Relaxed) {
                let vip = [VIP4, VIP6][count % 2];
                count += 1;
                if let Err(error) = Connection::open(vip).and_then(|mut connection| connection.echo("once")) {
                    failed.push(format!("{vip}: {error}"));
                }
                if let Some(connection) = connections.get_mut(count % long.max(1))
                    && let Err(error) = connection.echo("still there")
                {
                    failed.push(format!("a long one to {}: {error}", connection.node));
                }
                thread::sleep(Duration::from_millis(10));
            }
            for connection in &mut connections {
                if let Err(error) = connection.echo("still there") {
                    failed.push(format!("a long one to {} at the end: {error}", connection.node));
                }
            }
            (count, failed)
        });
        Self { stop, thread }
    }

    /// Stops, and returns the number of short connections and what failed.
    pub(crate) fn finish(self) -> (usize, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("load")
    }

    /// Stops and asserts that nothing failed.
    pub(crate) fn stop(self, event: &str) {
        let (count, failed) = self.finish();
        println!("{event}: {count} connections, {} failed", failed.len());
        assert!(failed.is_empty(), "{event}: of {count} connections failed: {failed:?}");
    }
}
