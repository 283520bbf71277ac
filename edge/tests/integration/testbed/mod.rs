// SPDX-License-Identifier: Apache-2.0
//! A link in network namespaces: a switch, a router with a client behind it, edge hosts that run the real binary, and nodes that
//! serve the VIPs as nodes with kube-proxy do. It needs root, and removes everything it made.

pub(crate) mod agent;
pub(crate) mod bird;
pub(crate) mod frr;
pub(crate) mod net;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, Map, MapData};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{FORWARDING, Vip};

/// Of two hosts the first is preferred for both, so that neither moves.
pub(crate) const VIP4: &str = "10.0.0.100";
pub(crate) const VIP6: &str = "fd00::107";
pub(crate) const PORT: u16 = 80;
pub(crate) const CHECK: u16 = 10256;

/// Runs a shell command that must succeed.
pub(crate) fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().expect("sh");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !condition() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The time since the start of the kernel.
fn boot_time() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).expect("time").into()
}

pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) netns: String,
    pub(crate) healthy: Arc<AtomicBool>,
    number: u8,
}

impl Node {
    pub(crate) fn target(&self) -> Value {
        let number = self.number;
        json!({
            "node": self.name, "weight": 1, "podCidrs": [format!("10.244.{number}.0/24")],
            "addresses": [format!("10.0.0.{number}"), format!("fd00::{number}")],
        })
    }
}

pub(crate) struct TestBed {
    prefix: String,
    pub(crate) nodes: Vec<Node>,
    pub(crate) folder: PathBuf,
    /// Whether the hosts exchange flow exceptions.
    pub(crate) has_exchange: bool,
    edges: Vec<(String, Option<Child>)>,
    /// Further flags of edge processes.
    pub(crate) flags: Vec<&'static str>,
}

impl TestBed {
    /// No edge process runs yet.
    pub(crate) fn new(edges: u8, nodes: u8) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // The end is marked: `1` must not match the namespaces of `10` when they are removed.
        let prefix = format!("se{}x{}-", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(&prefix);
        fs::create_dir_all(folder.join("status")).expect("folder");
        let bpf = folder.join("bpf");
        fs::create_dir_all(&bpf).expect("folder");
        mount(Some("bpf"), &bpf, Some("bpf"), MsFlags::empty(), None::<&str>).expect("mount");
        fs::write(folder.join("key"), "a key of at least thirty-two bytes").expect("write");
        let mut testbed = Self {
            prefix,
            nodes: Vec::new(),
            folder,
            has_exchange: true,
            edges: Vec::new(),
            flags: Vec::new(),
        };
        let (switch, router, client) =
            (testbed.netns("switch"), testbed.netns("router"), testbed.netns("client"));
        for netns in [&switch, &router, &client] {
            sh(&format!("ip netns add {netns}; ip -n {netns} link set lo up"));
        }
        sh(&format!(
            "ip -n {switch} link add br0 type bridge mcast_snooping 0; ip -n {switch} link set br0 up
             ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 \
                net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
             ip netns exec {client} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
             ip -n {client} link add eth0 type veth peer name client netns {router}
             ip -n {client} addr add 10.1.0.2/16 dev eth0; ip -n {client} addr add 10.1.0.3/16 dev eth0
             ip -n {client} addr add fd01::2/64 dev eth0 nodad; ip -n {client} link set eth0 up
             ip -n {router} addr add 10.1.0.1/16 dev client; ip -n {router} addr add fd01::1/64 dev client nodad
             ip -n {router} link set client up
             ip -n {client} route add default via 10.1.0.1; ip -n {client} route add default via fd01::1"
        ));
        testbed.connect_to_switch(&router, 1);
        for number in 1..=edges {
            let netns = testbed.netns(&format!("edge{number}"));
            sh(&format!("ip netns add {netns}; ip -n {netns} link set lo up"));
            testbed.connect_to_switch(&netns, 10 + number);
            sh(&format!(
                "ip -n {netns} route add default via 10.0.0.1; ip -n {netns} route add default via fd00::1"
            ));
            testbed.edges.push((format!("edge{number}"), None));
        }
        for number in 1..=nodes {
            let node = testbed.node(20 + number);
            testbed.nodes.push(node);
        }
        testbed
    }

    /// The nodes are the edge hosts. No edge process runs yet.
    pub(crate) fn on_nodes(nodes: u8) -> Self {
        let mut testbed = Self::new(0, nodes);
        testbed.edges = testbed.nodes.iter().map(|node| (node.name.clone(), None)).collect();
        testbed
    }

    /// Of three nodes, with the two first edge hosts running. The first one is active. Where it had no core for three heartbeats, the
    /// second one is, and another pair is made.
    pub(crate) fn pair(make: impl Fn() -> Self) -> Self {
        let attempts = std::iter::repeat_with(|| {
            let mut testbed = make();
            testbed.apply_load_balancer(&[0, 1, 2], |_| {});
            testbed.start_ready(0);
            testbed.start_ready(1);
            testbed.wait_until_served_by(&[0, 1, 2]);
            eventually("one host is active", || testbed.has_vips(0) != testbed.has_vips(1));
            testbed
        });
        attempts.take(3).find(|testbed| testbed.has_vips(0)).expect("the host that started first is active")
    }

    pub(crate) fn netns(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// IPv6 addresses are added with `nodad`: others cannot be bound until the kernel has checked them.
    fn connect_to_switch(&self, netns: &str, number: u8) {
        let switch = self.netns("switch");
        sh(&format!(
            "ip netns exec {netns} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
             ip -n {netns} link add eth0 address 02:00:00:00:00:{number:02x} type veth peer name p{number} netns {switch}
             ip -n {switch} link set p{number} master br0 up
             ip -n {netns} addr add 10.0.0.{number}/24 dev eth0; ip -n {netns} addr add fd00::{number}/64 dev eth0 nodad
             ip -n {netns} link set eth0 up"
        ));
    }

    fn node(&self, number: u8) -> Node {
        let name = format!("node{number}");
        let netns = self.netns(&name);
        sh(&format!("ip netns add {netns}; ip -n {netns} link set lo up"));
        self.connect_to_switch(&netns, number);
        sh(&format!(
            "ip netns exec {netns} sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
             ip -n {netns} addr add {VIP4}/32 dev lo; ip -n {netns} addr add {VIP6}/128 dev lo nodad
             ip -n {netns} route add default via 10.0.0.1; ip -n {netns} route add default via fd00::1"
        ));
        let node = Node { name: name.clone(), netns, healthy: Arc::new(AtomicBool::new(true)), number };
        net::serve(&node.netns, &name, Arc::clone(&node.healthy));
        node
    }

    /// Writes a load balancer with these nodes as targets, after `change` has modified it.
    pub(crate) fn apply_load_balancer(&self, nodes: &[usize], change: impl FnOnce(&mut Value)) {
        let targets: Vec<_> = nodes.iter().map(|node| self.nodes[*node].target()).collect();
        let mut object = json!({
            "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeLoadBalancer",
            "metadata": {"name": "lb", "uid": "u-1", "generation": 1},
            "spec": {
                "service": {"namespace": "default", "name": "web", "uid": "s-1"},
                "addresses": [VIP4, VIP6],
                "listeners": [{"protocol": "TCP", "port": PORT}, {"protocol": "UDP", "port": PORT}],
                "healthCheck": {
                    "protocol": "HTTP", "port": CHECK, "path": "/healthz", "intervalMilliseconds": 100,
                    "timeoutMilliseconds": 1000, "healthyThreshold": 1, "unhealthyThreshold": 2,
                },
                "targets": targets,
            },
        });
        change(&mut object);
        let name = object["metadata"]["name"].as_str().expect("name").to_owned();
        let new = self.folder.join("new");
        fs::write(&new, object.to_string()).expect("write");
        fs::rename(new, self.folder.join(format!("{name}.json"))).expect("rename");
    }

    /// Deletes the load balancer of this name.
    pub(crate) fn delete_load_balancer(&self, name: &str) {
        fs::remove_file(self.folder.join(format!("{name}.json"))).expect("remove");
    }

    pub(crate) fn start(&mut self, edge: usize) {
        let folder = self.folder.clone();
        self.start_with(edge, |command| {
            command.arg("--objects-dir").arg(&folder).arg("--status-dir").arg(folder.join("status"));
        });
    }

    /// Starts an edge host whose API server does not answer.
    pub(crate) fn start_without_api(&mut self, edge: usize) {
        let path = self.folder.join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "expired"}}],
        });
        fs::write(&path, config.to_string()).expect("write");
        self.start_with(edge, |command| {
            command.arg("--kubeconfig").arg(&path);
        });
    }

    /// Starts an edge host with this file of a key.
    pub(crate) fn start_with_key(&mut self, edge: usize, key: &Path) {
        let folder = self.folder.clone();
        self.start_with(edge, |command| {
            command.arg("--objects-dir").arg(&folder).arg("--status-dir").arg(folder.join("status"));
            command.env("STEERAGE_PEERS_KEY_FILE", key);
        });
    }

    fn start_with(&mut self, edge: usize, change: impl FnOnce(&mut Command)) {
        let name = self.edges[edge].0.clone();
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.join(format!("{name}.log")))
            .expect("log");
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.netns(&name), env!("CARGO_BIN_EXE_steerage-edge")])
            .args(["--host-name", &name, "--log-level", "debug", "--admin-address", "127.0.0.1:10359"])
            .args(["--group", "test"])
            .arg("--bpf-dir")
            .arg(self.bpf_dir(edge))
            .args(["--peers-port", if self.has_exchange { "10360" } else { "0" }])
            .env("STEERAGE_PEERS_KEY_FILE", self.folder.join("key"))
            .args(&self.flags)
            .stderr(Stdio::from(log));
        change(&mut command);
        self.edges[edge].1 = Some(command.spawn().expect("edge"));
    }

    pub(crate) fn start_ready(&mut self, edge: usize) {
        self.start(edge);
        self.wait_until_ready(edge);
    }

    pub(crate) fn wait_until_ready(&self, edge: usize) {
        eventually("the edge is ready", || self.get(edge, "/readyz").starts_with("HTTP/1.1 200"));
    }

    /// The response of its administration server.
    pub(crate) fn get(&self, edge: usize, path: &'static str) -> String {
        net::within(&self.netns(&self.edges[edge].0), move || {
            let Ok(mut stream) = TcpStream::connect("127.0.0.1:10359") else { return String::new() };
            let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            let mut text = String::new();
            let _ = stream.write_all(request.as_bytes());
            let _ = stream.read_to_string(&mut text);
            text
        })
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(&mut self, edge: usize) {
        let mut child = self.edges[edge].1.take().expect("running");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Sends SIGSTOP.
    pub(crate) fn stop(&self, edge: usize) {
        let child = self.edges[edge].1.as_ref().expect("running");
        sh(&format!("kill -STOP {}", child.id()));
    }

    /// Sends SIGTERM to all at once, and waits for their ends.
    pub(crate) fn terminate_all(&mut self) {
        let mut children: Vec<_> = self.edges.iter_mut().filter_map(|(_, child)| child.take()).collect();
        let ids: Vec<_> = children.iter().map(|child| child.id().to_string()).collect();
        sh(&format!("kill -TERM {}", ids.join(" ")));
        for child in &mut children {
            assert!(child.wait().expect("wait").success());
        }
    }

    /// Sends SIGCONT.
    pub(crate) fn resume(&self, edge: usize) {
        let child = self.edges[edge].1.as_ref().expect("running");
        sh(&format!("kill -CONT {}", child.id()));
    }

    /// Runs `steerage-edge cleanup` on an edge host.
    pub(crate) fn clean_up(&self, edge: usize) {
        let (netns, binary) = (self.netns(&self.edges[edge].0), env!("CARGO_BIN_EXE_steerage-edge"));
        sh(&format!("ip netns exec {netns} {binary} --bpf-dir {} cleanup", self.bpf_dir(edge).display()));
    }

    /// Sends SIGTERM; whether the process ended with success.
    pub(crate) fn terminate(&mut self, edge: usize) -> bool {
        self.begin_to_terminate(edge).wait().expect("wait").success()
    }

    /// Sends SIGTERM.
    pub(crate) fn begin_to_terminate(&mut self, edge: usize) -> Child {
        let child = self.edges[edge].1.take().expect("running");
        sh(&format!("kill -TERM {}", child.id()));
        child
    }

    /// The value of one of its metrics.
    pub(crate) fn metric(&self, edge: usize, name: &str) -> Option<String> {
        let text = self.get(edge, "/metrics");
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(' ')?.to_owned()))
    }

    /// Where an edge host keeps its program and maps.
    pub(crate) fn bpf_dir(&self, edge: usize) -> PathBuf {
        self.folder.join("bpf").join(&self.edges[edge].0)
    }

    /// Whether the kernel of an edge host answers for both VIPs.
    pub(crate) fn has_vips(&self, edge: usize) -> bool {
        self.answered_vips(edge) == 2
    }

    pub(crate) fn has_any_vip(&self, edge: usize) -> bool {
        self.answered_vips(edge) > 0
    }

    /// Whether the kernel of an edge host answers for its VIPs without end.
    pub(crate) fn keeps_vips_forever(&self, edge: usize) -> bool {
        [VIP4, VIP6].iter().all(|vip| self.lease(edge, vip) == u64::MAX)
    }

    fn answered_vips(&self, edge: usize) -> usize {
        [VIP4, VIP6].into_iter().filter(|vip| self.answers(edge, vip)).count()
    }

    /// Whether the kernel of an edge host answers for a VIP.
    pub(crate) fn answers(&self, edge: usize, vip: &str) -> bool {
        Duration::from_nanos(self.lease(edge, vip)) > boot_time()
    }

    /// How long the program goes on to answer for both VIPs.
    pub(crate) fn lease_left(&self, edge: usize) -> Duration {
        let until = [VIP4, VIP6].map(|vip| self.lease(edge, vip)).into_iter().min().unwrap_or_default();
        Duration::from_nanos(until).saturating_sub(boot_time())
    }

    /// Until when the program answers for a VIP: nanoseconds since the start of the kernel; zero for a VIP that it does not serve.
    fn lease(&self, edge: usize, vip: &str) -> u64 {
        let vip: IpAddr = vip.parse().expect("address");
        let Some(vips) = self.map(edge, "VIPS") else { return 0 };
        let vips = HashMap::<_, V6, Vip>::try_from(Map::HashMap(vips)).expect("VIPs");
        let Ok(vip) = vips.get(&vip.into(), 0) else { return 0 };
        self.leases(edge).get(&vip.lease, 0).expect("a lease")
    }

    fn leases(&self, edge: usize) -> Array<MapData, u64> {
        Array::try_from(Map::Array(self.map(edge, "LEASES").expect("leases"))).expect("leases")
    }

    /// How long the program of an edge host forwards without its process; `None` without end.
    pub(crate) fn forwarding_left(&self, edge: usize) -> Option<Duration> {
        let until = self.leases(edge).get(&FORWARDING, 0).expect("a time");
        let clock = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).expect("time"));
        (until != 0).then(|| Duration::from_nanos(until).saturating_sub(clock))
    }

    /// A pinned map of an edge host.
    fn map(&self, edge: usize, name: &str) -> Option<MapData> {
        let layouts = fs::read_dir(self.bpf_dir(edge).join("eth0")).ok()?.flatten().map(|entry| entry.path());
        let pin = layouts.map(|layout| layout.join(name)).find(|pin| pin.exists())?;
        Some(MapData::from_pin(pin).expect("a map"))
    }

    /// The EdgeTargetHealth of an edge host for the load balancer `lb`.
    pub(crate) fn target_health(&self, edge: usize) -> Value {
        self.status_object(&format!("EdgeTargetHealth.lb.{}.json", self.edges[edge].0))
    }

    /// The EdgeHost of an edge host.
    pub(crate) fn edge_host(&self, edge: usize) -> Value {
        self.status_object(&format!("EdgeHost.{}.json", self.edges[edge].0))
    }

    fn status_object(&self, file: &str) -> Value {
        let path = self.folder.join("status").join(file);
        fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    pub(crate) fn client(&self) -> String {
        self.netns("client")
    }

    /// Waits until all of these nodes, and no others, serve new connections.
    pub(crate) fn wait_until_served_by(&self, nodes: &[usize]) {
        let mut wanted: Vec<_> = nodes.iter().map(|node| self.nodes[*node].name.clone()).collect();
        wanted.sort();
        for vip in [VIP4, VIP6] {
            eventually(&format!("{wanted:?} serve {vip}"), || {
                net::responding_nodes(&self.client(), vip, 40) == wanted
            });
        }
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        for (_, child) in &mut self.edges {
            if let Some(child) = child {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        if thread::panicking() {
            for (name, _) in &self.edges {
                let log = fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default();
                eprintln!("--- {name}\n{log}");
            }
        }
        let list = Command::new("ip").args(["netns", "list"]).output().expect("ip");
        for netns in String::from_utf8_lossy(&list.stdout).lines().filter_map(|line| line.split(' ').next()) {
            if netns.starts_with(&self.prefix) {
                let _ = Command::new("ip").args(["netns", "del", netns]).status();
            }
        }
        let _ = umount2(&self.folder.join("bpf"), MntFlags::MNT_DETACH);
        let _ = fs::remove_dir_all(&self.folder);
    }
}
