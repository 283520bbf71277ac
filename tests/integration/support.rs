// SPDX-License-Identifier: Apache-2.0
//! A real API server with the edge's CRDs, the controller's binary, and helpers for both.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use steerage_edge_api::{AddressPool, EdgeLoadBalancer};
use steerage_testserver::Server;
use tokio::sync::{Semaphore, SemaphorePermit};

/// A controller manages all Services of its cluster, so a test has a server for itself. Servers take memory and seconds to start:
/// there are two, which later tests use again.
static TURNS: Semaphore = Semaphore::const_new(2);
static UNUSED: Mutex<Vec<Server>> = Mutex::new(Vec::new());

/// Longest wait for an expected state.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The cluster, owned by one test.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    /// Present until the drop.
    server: Option<Server>,
    _turn: SemaphorePermit<'static>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).extend(self.server.take());
    }
}

impl Cluster {
    /// An empty cluster with two nodes and a pool of this many IPv4 addresses.
    pub(crate) async fn new(name: &str, addresses: u8) -> Self {
        let turn = TURNS.acquire().await.expect("a semaphore that is never closed");
        let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let server = unused.unwrap_or_else(|| Server::start().expect("server"));
        let client = server.client().await.expect("client");
        let cluster = Self { client, namespace: name.to_owned(), server: Some(server), _turn: turn };
        cluster.clean().await;
        for crd in steerage_edge_api::crds() {
            cluster.install(&crd).await;
        }
        let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
        let namespace: Namespace = parse(json!({"metadata": {"name": name}}));
        answered("the namespace", async || namespaces.create(&PostParams::default(), &namespace).await).await;
        for (name, ip) in [("node-a", "10.1.0.1"), ("node-b", "10.1.0.2")] {
            cluster.node(name, ip).await;
        }
        cluster.pool("default", &format!("10.9.0.1-10.9.0.{addresses}")).await;
        cluster
    }

    /// Creates a CRD, and waits until the API server serves its objects: for a moment after it says so, it does not.
    async fn install(&self, crd: &CustomResourceDefinition) {
        let api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        eventually("the CRD to be served", async || {
            let _ = api.create(&PostParams::default(), crd).await;
            let found = api.get_opt(&crd.name_any()).await.ok()??;
            let conditions = found.status?.conditions?;
            conditions.iter().find(|c| c.type_ == "Established" && c.status == "True")?;
            let (spec, version) = (&crd.spec, crd.spec.versions.first()?);
            let path = format!("/apis/{}/{}/{}", spec.group, version.name, spec.names.plural);
            self.client.request_text(http::Request::get(path).body(Vec::new()).ok()?).await.ok().map(drop)
        })
        .await;
    }

    /// Removes what the last test left.
    async fn clean(&self) {
        let services: Api<Service> = Api::all(self.client.clone());
        let nodes: Api<Node> = Api::all(self.client.clone());
        eventually("an empty cluster", async || {
            let mut left = 0;
            for service in services.list(&ListParams::default()).await.ok()? {
                let (namespace, name) = (service.namespace().expect("namespace"), service.name_any());
                if namespace == "default" && name == "kubernetes" {
                    continue;
                }
                left += 1;
                let api: Api<Service> = Api::namespaced(self.client.clone(), &namespace);
                let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                let _ = api.patch(&name, &PatchParams::default(), &patch).await;
                let _ = api.delete(&name, &DeleteParams::default()).await;
            }
            for node in nodes.list(&ListParams::default()).await.ok()? {
                left += 1;
                let _ = nodes.delete(&node.name_any(), &DeleteParams::default()).await;
            }
            (left == 0).then_some(())
        })
        .await;
    }

    pub(crate) async fn node(&self, name: &str, ip: &str) {
        let api: Api<Node> = Api::all(self.client.clone());
        let node: Node = parse(json!({"metadata": {"name": name}}));
        answered("a node", async || api.create(&PostParams::default(), &node).await).await;
        let status = Patch::Merge(json!({"status": {"addresses": [{"type": "InternalIP", "address": ip}]}}));
        answered("its status", async || api.patch_status(name, &PatchParams::default(), &status).await).await;
    }

    /// Labels a node so that load balancers do not use it.
    pub(crate) async fn exclude(&self, node: &str) {
        let api: Api<Node> = Api::all(self.client.clone());
        let labels = Patch::Merge(
            json!({"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}}}),
        );
        answered("a label", async || api.patch(node, &PatchParams::default(), &labels).await).await;
    }

    pub(crate) async fn provider_id(&self, node: &str, id: &str) {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"providerID": id}}));
        answered("a provider ID", async || api.patch(node, &PatchParams::default(), &patch).await).await;
    }

    pub(crate) async fn pool(&self, name: &str, range: &str) {
        let api: Api<AddressPool> = Api::namespaced(self.client.clone(), &self.namespace);
        let pool: AddressPool = parse(json!({"apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
            "metadata": {"name": name}, "spec": {"addresses": [range]}}));
        answered("a pool", async || api.create(&PostParams::default(), &pool).await).await;
    }

    pub(crate) fn services(&self) -> Api<Service> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The same for a client with the name of this user and all rights.
    pub(crate) async fn services_as(&self, user: &str) -> Api<Service> {
        let server = self.server.as_ref().expect("server");
        let path = server.kubeconfig_for(user, &["system:masters"]).expect("kubeconfig");
        let kubeconfig = Kubeconfig::read_from(path).expect("kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        Api::namespaced(Client::try_from(config.expect("config")).expect("client"), &self.namespace)
    }

    pub(crate) fn balancers(&self) -> Api<EdgeLoadBalancer> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a Service of the edge's class and the policy Local, changed by a merge patch.
    pub(crate) async fn service(&self, name: &str, change: Value) -> Service {
        let mut service = json!({
            "metadata": {"name": name},
            "spec": {
                "type": "LoadBalancer",
                "loadBalancerClass": "steerage.dev/edge",
                "externalTrafficPolicy": "Local",
                "selector": {"app": name},
                "ports": [{"name": "web", "port": 80}],
            },
        });
        merge(&mut service, change);
        let (services, service) = (self.services(), parse(service));
        answered("a Service", async || services.create(&PostParams::default(), &service).await).await
    }

    pub(crate) async fn change(&self, name: &str, change: Value) -> Service {
        let (services, change) = (self.services(), Patch::Merge(change));
        answered("a change", async || services.patch(name, &PatchParams::default(), &change).await).await
    }

    pub(crate) async fn delete(&self, name: &str) {
        let services = self.services();
        let _ = answered("a deletion", async || services.delete(name, &DeleteParams::default()).await).await;
    }

    /// Has the Service's endpoints be ready on these nodes, and nowhere else.
    pub(crate) async fn endpoints(&self, service: &str, nodes: &[&str]) {
        let numbered = nodes.iter().zip(1..).map(|(node, i)| (*node, format!("10.2.0.{i}")));
        self.pods(service, &numbered.collect::<Vec<_>>()).await;
    }

    /// Has the Service's endpoints be ready on these nodes with these addresses, and nowhere else.
    pub(crate) async fn pods(&self, service: &str, pods: &[(&str, String)]) {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &self.namespace);
        let endpoint = |(node, address): &(&str, String)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}});
        let endpoints: Vec<Value> = pods.iter().map(endpoint).collect();
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "ports": [{"name": "web", "port": 8080}], "endpoints": endpoints,
        });
        let (params, slice) = (PatchParams::apply("test").force(), Patch::Apply(slice));
        answered("a slice", async || api.patch(service, &params, &slice).await).await;
    }

    /// The load balancer of a Service, if there is one.
    pub(crate) async fn balancer_of(&self, service: &str) -> Option<EdgeLoadBalancer> {
        let balancers = self.balancers();
        let list = answered("balancers", async || balancers.list(&ListParams::default()).await).await;
        list.items.into_iter().find(|balancer| balancer.spec.service.name == service)
    }

    /// Waits until the Service has a load balancer with exactly these targets (or the shared set of that name).
    pub(crate) async fn targets(&self, service: &str, expected: &[&str]) {
        eventually(&format!("targets of {service} to be {expected:?}"), async || {
            let spec = self.balancer_of(service).await?.spec;
            let mut found: Vec<String> = spec.targets.into_iter().map(|target| target.node).collect();
            found.extend(spec.node_set.map(|set| format!("set:{set}")));
            (found == expected).then_some(())
        })
        .await;
    }

    /// Waits for an address in the status, and returns it.
    pub(crate) async fn address(&self, service: &str) -> String {
        eventually(&format!("an address of {service}"), async || {
            let service = self.services().get_opt(service).await.ok()??;
            service.status?.load_balancer?.ingress?.first()?.ip.clone()
        })
        .await
    }

    /// The status of the condition `Programmed` now.
    pub(crate) async fn programmed(&self, service: &str) -> String {
        let services = self.services();
        let found = answered("the Service", async || services.get(service).await).await;
        let status = found.status.expect("a status");
        let mut conditions = status.conditions.unwrap_or_default().into_iter();
        conditions.find(|c| c.type_ == "steerage.dev/Programmed").expect("the condition").status
    }

    /// Waits until a condition of Steerage has this status and reason, and returns its message.
    pub(crate) async fn condition(&self, service: &str, kind: &str, status: &str, reason: &str) -> String {
        eventually(&format!("{kind}={status} ({reason}) on {service}"), async || {
            let found = self.services().get_opt(service).await.ok()??;
            let conditions = found.status?.conditions?;
            let condition = conditions.into_iter().find(|c| c.type_ == format!("steerage.dev/{kind}"))?;
            (condition.status == status && condition.reason == reason).then_some(condition.message)
        })
        .await
    }

    /// Waits for an event about a Service, and returns its note.
    pub(crate) async fn event(&self, service: &str, reason: &str) -> String {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        eventually(&format!("event {reason} on {service}"), async || {
            let events = api.list(&ListParams::default()).await.ok()?;
            let about = |event: &Event| {
                event.regarding.as_ref().and_then(|o| o.name.clone()).as_deref() == Some(service)
            };
            let found =
                events.into_iter().find(|event| about(event) && event.reason.as_deref() == Some(reason));
            found?.note
        })
        .await
    }

    /// The number of writes of these resources, from the API server's own metrics.
    pub(crate) async fn writes(&self, resources: &[&str]) -> u64 {
        let request = http::Request::get("/metrics").body(Vec::new()).expect("request");
        let text = self.client.request_text(request).await.expect("metrics");
        let counts = |line: &&str| {
            line.starts_with("apiserver_request_total{")
                && ["POST", "PUT", "PATCH", "APPLY", "DELETE"]
                    .iter()
                    .any(|verb| line.contains(&format!("verb=\"{verb}\"")))
                && resources.iter().any(|resource| line.contains(&format!("resource=\"{resource}\"")))
        };
        let value = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<u64>().ok());
        text.lines().filter(counts).filter_map(value).sum()
    }

    /// The same number, once no write has come for longer than a controller waits with one (a pool's status: 1 s), also where its
    /// threads have no core for some seconds.
    pub(crate) async fn settled_writes(&self, resources: &[&str]) -> u64 {
        eventually("an end of the writes", async || {
            let before = self.writes(resources).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            (self.writes(resources).await == before).then_some(before)
        })
        .await
    }

    /// The Leases of the namespace. Their writes cannot be counted: an API server renews one for itself.
    pub(crate) async fn leases(&self) -> Vec<Lease> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        answered("leases", async || api.list(&ListParams::default()).await).await.items
    }

    /// The events of the namespace. Their writes cannot be counted either: the API server may report what it repairs.
    pub(crate) async fn events(&self) -> Vec<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        answered("events", async || api.list(&ListParams::default()).await).await.items
    }

    /// Kills a controller and frees its Lease, so that the next one does not wait until this expires.
    pub(crate) async fn kill(&self, controller: Controller) {
        controller.kill();
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let free = Patch::Merge(json!({"spec": {"holderIdentity": ""}}));
        for lease in self.leases().await {
            let name = lease.name_any();
            answered("a free Lease", async || api.patch(&name, &PatchParams::default(), &free).await).await;
        }
    }

    /// Starts a controller with the edge's provider.
    pub(crate) fn controller(&self, identity: &str, flags: &[&str]) -> Controller {
        self.controller_of("edge", identity, flags)
    }

    /// Runs a dry run to its end. Returns whether it succeeded, and its log.
    pub(crate) async fn dry_run(&self, provider: &str, flags: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_steerage"));
        command
            .args(["--dry-run", "--provider", provider, "--namespace", &self.namespace])
            .args(["--admin-address", "127.0.0.1:0", "--log-format", "json"])
            .args(flags)
            .envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")])
            .env("KUBECONFIG", self.server.as_ref().expect("server").kubeconfig());
        // Beside the test's own servers.
        let output = tokio::task::spawn_blocking(move || command.output()).await.expect("a task");
        let output = output.expect("dry run");
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    }

    /// Starts a controller.
    pub(crate) fn controller_of(&self, provider: &str, identity: &str, flags: &[&str]) -> Controller {
        let child = Command::new(env!("CARGO_BIN_EXE_steerage"))
            .args([
                "--provider",
                provider,
                "--namespace",
                &self.namespace,
                "--leader-elect-identity",
                identity,
            ])
            .args(["--admin-address", "127.0.0.1:0", "--log-level", "info"])
            .args([
                // A holder that has no core for some seconds does not lose its Lease.
                "--leader-elect-lease-duration",
                "15s",
                "--leader-elect-renew-deadline",
                "10s",
                "--leader-elect-retry-period",
                "500ms",
            ])
            .args(flags)
            .env("KUBECONFIG", self.server.as_ref().expect("server").kubeconfig())
            // moto does not check them.
            .envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")])
            .stderr(Stdio::inherit())
            .spawn()
            .expect("controller");
        Controller { child }
    }
}

/// A running controller; killed when dropped.
pub(crate) struct Controller {
    child: Child,
}

impl Controller {
    /// Waits until its metrics have this line.
    pub(crate) async fn measures(&self, line: &str) {
        eventually(line, async || self.metrics()?.lines().any(|known| known == line).then_some(())).await;
    }

    /// Its metrics, from the only port at which it listens.
    fn metrics(&self) -> Option<String> {
        let folder = format!("/proc/{}", self.child.id());
        let links = std::fs::read_dir(format!("{folder}/fd")).ok()?.flatten();
        let open: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
        let sockets = std::fs::read_to_string(format!("{folder}/net/tcp")).ok()?;
        let port = sockets.lines().find_map(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let (address, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
            // The kernel's TCP_LISTEN.
            let is_own = *state == "0A" && open.contains(&format!("socket:[{inode}]").into());
            is_own.then(|| u16::from_str_radix(address.split_once(':')?.1, 16).ok())?
        })?;
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// Sends SIGTERM, and returns whether it exited successfully.
    pub(crate) fn stop(mut self) -> bool {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
        self.child.wait().expect("wait").success()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until `ask` returns a value.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let before = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(before.elapsed() < TIMEOUT, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Repeats a call for as long as the API server refuses it only for now: it is busy or not ready (429, 503), or another write came
/// first (409, which for a creation means something else).
pub(crate) async fn answered<T>(what: &str, mut call: impl AsyncFnMut() -> kube::Result<T>) -> T {
    let is_passing = |status: &kube::core::Status| {
        matches!(status.code, 429 | 503)
            || status.reason == "Conflict"
            || status.message.contains("etcdserver:")
    };
    eventually(what, async || match call().await {
        Err(kube::Error::Api(status)) if is_passing(&status) => None,
        answer => Some(answer.unwrap_or_else(|error| panic!("{what}: {error}"))),
    })
    .await
}

pub(crate) fn parse<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                if value.is_null() {
                    into.remove(&key);
                } else {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (into, change) => *into = change,
    }
}
