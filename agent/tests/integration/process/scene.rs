// SPDX-License-Identifier: Apache-2.0
//! A node with an API server and an agent. The agent uses a relay, which can cut off the agent alone.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use steerage_model::Family;
use steerage_testserver::Server;

use crate::world::{At, PORT, World};

pub(crate) const FRONT: u16 = 80;
/// Long, because other tests may load the machine.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) server: Server,
    relay: Relay,
    pub(crate) folder: std::path::PathBuf,
}

impl Scene {
    pub(crate) fn new(name: &str) -> Self {
        let world = World::new();
        let server = world.run(At::Node, || Server::start().expect("server"));
        let text = std::fs::read_to_string(server.kubeconfig()).unwrap();
        let real = text.split("https://").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let relay = world.run(At::Node, || Relay::start(real.parse().unwrap()));
        let folder = std::env::temp_dir().join(format!("steerage-agent-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("kubeconfig"), text.replace(real, &relay.address.to_string())).unwrap();
        let scene = Self { world, server, relay, folder };
        scene.put("v1", "Namespace", "shop", json!({}));
        scene.node("node");
        scene
    }

    pub(crate) fn node(&self, name: &str) {
        self.put(
            "v1",
            "Node",
            name,
            json!({ "spec": { "podCIDRs": ["10.244.0.0/24", "fd44::/64"], "podCIDR": "10.244.0.0/24" } }),
        );
        let addresses = [Family::V4, Family::V6]
            .map(|family| json!({ "type": "InternalIP", "address": At::Node.addr(family).to_string() }));
        self.status("v1", "Node", name, &json!({ "addresses": addresses }));
    }

    /// Creates a Service with one VIP, TCP and UDP, labelled for the agent.
    pub(crate) fn service(&self, name: &str, vip: IpAddr, more: &Value) {
        let port =
            |protocol: &str| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": FRONT });
        let mut spec = json!({ "type": "LoadBalancer", "ports": [port("TCP"), port("UDP")],
            "allocateLoadBalancerNodePorts": false, "loadBalancerClass": "example.com/none" });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let labels = json!({ "service.kubernetes.io/service-proxy-name": "steerage" });
        self.put("v1", "Service", name, json!({ "metadata": { "labels": labels }, "spec": spec }));
        let ingress = json!([{ "ip": vip.to_string(), "ipMode": "VIP" }]);
        self.status("v1", "Service", name, &json!({ "loadBalancer": { "ingress": ingress } }));
    }

    /// Leaves a Service to kube-proxy, or to an agent that replaces it.
    pub(crate) fn unlabel(&self, name: &str) {
        let patch = Patch::Merge(
            json!({ "metadata": { "labels": { "service.kubernetes.io/service-proxy-name": null } } }),
        );
        self.api("v1", "Service", async |api| {
            api.patch(name, &PatchParams::default(), &patch).await.map(drop)
        });
    }

    /// The endpoints of a Service, on `node` all but those that are far.
    pub(crate) fn endpoints(&self, service: &str, node: &str, pods: &[At]) {
        let endpoint = |at: &At| {
            json!({ "addresses": [at.addr(Family::V4).to_string()], "conditions": { "ready": true },
                "nodeName": if *at == At::Far { "other" } else { node } })
        };
        let port =
            |protocol: &str| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT });
        let slice = json!({
            "metadata": {
                "labels": { "kubernetes.io/service-name": service },
                "annotations": {
                    "endpoints.kubernetes.io/last-change-trigger-time": jiff::Timestamp::now().to_string(),
                },
            },
            "addressType": "IPv4",
            "ports": [port("TCP"), port("UDP")],
            "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        });
        self.put("discovery.k8s.io/v1", "EndpointSlice", service, slice);
    }

    pub(crate) fn put(&self, version: &str, kind: &str, name: &str, mut object: Value) {
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        object["metadata"]["name"] = name.into();
        let parameters = PatchParams::apply("test").force();
        self.api(version, kind, async |api| {
            api.patch(name, &parameters, &Patch::Apply(&object)).await.map(drop)
        });
    }

    /// Nodes without addresses, from `node-0` on.
    pub(crate) fn make_nodes(&self, number: usize) {
        self.api("v1", "Node", async |api| {
            let made = (0..number).map(|at| {
                let api = api.clone();
                async move {
                    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": format!("node-{at}") } });
                    let node = serde_json::from_value::<DynamicObject>(node).unwrap();
                    api.create(&PostParams::default(), &node).await.map(drop)
                }
            });
            stream::iter(made).buffer_unordered(32).try_collect::<()>().await
        });
    }

    pub(crate) fn status(&self, version: &str, kind: &str, name: &str, status: &Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        self.api(version, kind, async |api| {
            api.patch_status(name, &PatchParams::default(), &patch).await.map(drop)
        });
    }

    pub(crate) fn delete(&self, version: &str, kind: &str, name: &str) {
        self.api(version, kind, async |api| api.delete(name, &DeleteParams::default()).await.map(drop));
    }

    pub(crate) fn get(&self, version: &str, kind: &str, name: &str) -> Value {
        self.api(version, kind, async |api| {
            api.get(name).await.map(|found| serde_json::to_value(found).unwrap())
        })
    }

    /// The notes of the events on this node with this reason.
    pub(crate) fn node_events(&self, reason: &str) -> Vec<String> {
        let all = self.api("v1", "Event", async |api| api.list(&ListParams::default()).await);
        let noted = |event: &DynamicObject| {
            (event.data["reason"] == reason)
                .then(|| event.data["message"].as_str().unwrap_or_default().to_owned())
        };
        all.items.iter().filter_map(noted).collect()
    }

    /// The notes of the events on Services with this reason.
    pub(crate) fn service_events(&self, reason: &str) -> Vec<String> {
        let all = self.api("events.k8s.io/v1", "Event", async |api| api.list(&ListParams::default()).await);
        let is_asked = |event: &&DynamicObject| event.data["reason"] == reason;
        let note = |event: &DynamicObject| event.data["note"].as_str().unwrap_or_default().to_owned();
        all.items.iter().filter(is_asked).map(note).collect()
    }

    /// Calls the API server without the relay.
    fn api<T: Send>(
        &self,
        version: &str,
        kind: &str,
        call: impl AsyncFn(Api<DynamicObject>) -> kube::Result<T> + Sync,
    ) -> T {
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        self.world.run(At::Node, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client: Client = self.server.client().await.unwrap();
                let api = match kind {
                    "Node" | "Namespace" | "ServiceCIDR" => Api::all_with(client, &resource),
                    // Of objects without a namespace.
                    "Event" if version == "v1" && group.is_empty() => {
                        Api::namespaced_with(client, "default", &resource)
                    }
                    _ => Api::namespaced_with(client, "shop", &resource),
                };
                let begun = Instant::now();
                loop {
                    match call(api.clone()).await {
                        // The server is busy, or not ready for this kind of object.
                        Err(kube::Error::Api(status))
                            if matches!(status.code, 429 | 503) && begun.elapsed() < PATIENCE =>
                        {
                            tokio::time::sleep(Duration::from_millis(100)).await;
                        }
                        answer => return answer.unwrap_or_else(|error| panic!("{kind}: {error}")),
                    }
                }
            })
        })
    }

    /// Opens or closes the relay. Closing it cuts open connections.
    pub(crate) fn reach(&self, reachable: bool) {
        self.relay.open.store(reachable, Ordering::Relaxed);
        if !reachable {
            self.relay
                .pipes
                .lock()
                .unwrap()
                .drain(..)
                .for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        }
    }

    /// Runs a subcommand of the agent on the node until it ends.
    pub(crate) fn command(&self, arguments: &[&str]) -> (ExitStatus, String) {
        let output = self.world.run(At::Node, || {
            Command::new(env!("CARGO_BIN_EXE_steerage-agent")).args(arguments).output().unwrap()
        });
        let text =
            [output.stdout, output.stderr].map(|part| String::from_utf8_lossy(&part).into_owned()).concat();
        (output.status, text)
    }

    /// Starts the agent without waiting for it.
    pub(crate) fn start(&self, node: &str) -> Agent<'_> {
        self.start_binary(Path::new(env!("CARGO_BIN_EXE_steerage-agent")), node, &[])
    }

    /// The command, with the only capability that the chart grants.
    pub(crate) fn start_binary(&self, binary: &Path, node: &str, more: &[&str]) -> Agent<'_> {
        let log = self.folder.join("agent.log");
        let output = File::options().create(true).append(true).open(&log).unwrap();
        let child = self.world.run(At::Node, || {
            Command::new("setpriv")
                .args(["--bounding-set", "-all,+net_admin", "--inh-caps", "-all", "--no-new-privs"])
                .arg(binary)
                .args(["--node-name", node, "--nodeport-addresses", "primary"])
                .args(more)
                .arg("--kubeconfig")
                .arg(self.folder.join("kubeconfig"))
                .stdin(Stdio::null())
                .stdout(output.try_clone().unwrap())
                .stderr(output)
                .spawn()
                .unwrap()
        });
        Agent { scene: self, child }
    }

    /// Starts the agent and waits until its rules are in the kernel.
    pub(crate) fn started(&self, node: &str) -> Agent<'_> {
        self.started_with(node, &[])
    }

    /// Like `start`, with additional flags.
    pub(crate) fn started_with(&self, node: &str, flags: &[&str]) -> Agent<'_> {
        let agent = self.start_binary(Path::new(env!("CARGO_BIN_EXE_steerage-agent")), node, flags);
        agent.wait_ready();
        agent
    }

    /// The logs of all agents that were started.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("agent.log")).unwrap_or_default()
    }

    pub(crate) fn nft(&self, line: &str) -> String {
        self.world.sh_at(At::Node, &format!("nft \"{line}\""))
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.log());
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A running agent. Killed on drop.
pub(crate) struct Agent<'s> {
    scene: &'s Scene,
    child: Child,
}

impl Agent<'_> {
    pub(crate) fn wait_ready(&self) {
        eventually("the agent is ready", || self.get("/readyz").is_some_and(|text| text.contains(" 200 ")));
    }

    /// The value of a metric; 0 if there is no such metric.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").expect("metrics");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().expect("a number"))
    }

    /// The sum of a metric over all its labels.
    pub(crate) fn metric_sum(&self, name: &str) -> u64 {
        let text = self.get("/metrics").expect("metrics");
        let of_it =
            |line: &str| line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once(' ')?.1.parse::<u64>().ok();
        text.lines().filter_map(of_it).sum()
    }

    /// Stops the process, or lets it continue.
    pub(crate) fn pause(&self, paused: bool) {
        let signal = if paused { Signal::SIGSTOP } else { Signal::SIGCONT };
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn get(&self, path: &str) -> Option<String> {
        self.get_at("127.0.0.1:10358", path)
    }

    /// The response of one of the agent's servers.
    pub(crate) fn get_at(&self, address: &str, path: &str) -> Option<String> {
        self.scene.world.run(At::Node, || {
            let mut stream = TcpStream::connect(address).ok()?;
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).ok()?;
            Some(text)
        })
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the elapsed time.
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    begun.elapsed()
}

/// Relays connections while it is open.
struct Relay {
    address: SocketAddr,
    open: Arc<AtomicBool>,
    pipes: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// Starts the relay in the network namespace of the calling thread. Its threads end with the process.
    fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self {
            address: listener.local_addr().unwrap(),
            open: Arc::new(AtomicBool::new(true)),
            pipes: Arc::default(),
        };
        let (open, pipes) = (Arc::clone(&relay.open), Arc::clone(&relay.pipes));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(to) else { continue };
                if !open.load(Ordering::Relaxed) {
                    continue;
                }
                let ends = || (near.try_clone().unwrap(), far.try_clone().unwrap());
                let (a, b) = ends();
                pipes.lock().unwrap().extend([a, b]);
                let (a, b) = ends();
                std::thread::spawn(move || pass(a, b));
                std::thread::spawn(move || pass(far, near));
            }
        });
        relay
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
