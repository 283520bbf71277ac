// SPDX-License-Identifier: Apache-2.0
//! Readiness gates of pods: the controller's binary with the provider for AWS, against a real API server and moto. Nothing here is a
//! kubelet or a controller of EndpointSlices: the test writes what they would.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use steerage_requirements::requires;
use steerage_testmoto::{Release, Server};

use crate::support::{Cluster, Controller, answered, eventually, parse};

const LABEL: &str = "steerage.dev/readiness-gate";
const GATE: &str = "steerage.dev/load-balancer-ready";
const SERVICE: &str = "gated";

struct Gates {
    cluster: Cluster,
    moto: Server,
    flags: Vec<String>,
}

impl Gates {
    async fn new(name: &str) -> Self {
        let cluster = Cluster::new(name, 1).await;
        let moto = Server::start(Release::USUAL).expect("moto");
        let (vpc, subnets) = moto.network().expect("network");
        let endpoint = format!("http://{}", moto.addr());
        let flags = [
            ("--aws-cluster-name", name),
            ("--aws-vpc-id", &vpc),
            ("--aws-subnets", &subnets.join(",")),
            ("--aws-region", "us-east-1"),
            ("--aws-elbv2-endpoint", &endpoint),
            ("--aws-ec2-endpoint", &endpoint),
        ];
        let flags = flags.iter().flat_map(|(flag, value)| [(*flag).to_owned(), (*value).to_owned()]);
        let flags = flags.collect();
        // A controller of service accounts would make it, and the API server admits no pod without one.
        let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), name);
        let account = parse(json!({"metadata": {"name": "default"}}));
        answered("an account", async || accounts.create(&PostParams::default(), &account).await).await;
        Self { cluster, moto, flags }
    }

    fn controller(&self, identity: &str, more: &[&str]) -> Controller {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.cluster.controller_of("aws", identity, &flags)
    }

    fn api<T>(&self) -> Api<T>
    where
        T: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.cluster.client.clone(), &self.cluster.namespace)
    }

    /// Creates the Service, and returns its UID.
    async fn service(&self) -> String {
        let service: Service = self
            .cluster
            .service(
                SERVICE,
                json!({
                    "metadata": {"annotations": {"service.beta.kubernetes.io/aws-load-balancer-nlb-target-type": "ip"}},
                    "spec": {
                        "loadBalancerClass": "steerage.dev/aws",
                        "allocateLoadBalancerNodePorts": false,
                        "ports": [{"name": "web", "port": 80, "targetPort": 8080}],
                    },
                }),
            )
            .await;
        service.metadata.uid.expect("a UID")
    }

    /// Creates a pod with the gate that has this address, and whose containers are ready. Returns its UID.
    async fn pod(&self, name: &str, address: &str) -> String {
        let pods = self.api::<Pod>();
        let pod: Pod = parse(json!({
            "metadata": {"name": name, "labels": {LABEL: "true"}},
            "spec": {
                "nodeName": "node-a",
                "automountServiceAccountToken": false,
                "readinessGates": [{"conditionType": GATE}],
                "containers": [{"name": "web", "image": "web"}],
            },
        }));
        let pod = answered("a pod", async || pods.create(&PostParams::default(), &pod).await).await;
        let conditions = json!([
            {"type": "ContainersReady", "status": "True"},
            {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"},
        ]);
        let ips = json!([{"ip": address}]);
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": ips, "conditions": conditions}});
        self.write_status(name, &status).await;
        pod.metadata.uid.expect("a UID")
    }

    async fn write_status(&self, pod: &str, status: &Value) {
        let (pods, patch) = (self.api::<Pod>(), Patch::Strategic(status));
        answered("a status", async || pods.patch_status(pod, &PatchParams::default(), &patch).await).await;
    }

    async fn delete(&self, pod: &str) {
        let pods = self.api::<Pod>();
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        answered("a deletion", async || pods.delete(pod, &now).await).await;
    }

    /// Has the Service's endpoints be these pods, given by name, UID and address, and whether each is ready.
    async fn endpoints(&self, pods: &[(&str, &str, &str, bool)]) {
        let api = self.api::<EndpointSlice>();
        let endpoint = |(name, uid, address, is_ready): &(&str, &str, &str, bool)| {
            json!({
                "addresses": [address], "nodeName": "node-a",
                "conditions": {"ready": is_ready, "serving": is_ready, "terminating": false},
                "targetRef": {"kind": "Pod", "namespace": self.cluster.namespace, "name": name, "uid": uid},
            })
        };
        let slice = Patch::Apply(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": SERVICE, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4", "ports": [{"name": "web", "port": 8080}],
            "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        }));
        let params = PatchParams::apply("test").force();
        answered("a slice", async || api.patch(SERVICE, &params, &slice).await).await;
    }

    /// The condition of a pod's gate, if it has one.
    async fn gate(&self, pod: &str) -> Option<PodCondition> {
        let pods = self.api::<Pod>();
        let found = answered("the pod", async || pods.get(pod).await).await;
        found.status?.conditions?.into_iter().find(|condition| condition.type_ == GATE)
    }

    async fn wait_gate(&self, pod: &str, status: &str, reason: &str) -> PodCondition {
        eventually(&format!("{GATE}={status} ({reason}) on {pod}"), async || {
            let gate = self.gate(pod).await?;
            (gate.status == status && gate.reason.as_deref() == Some(reason)).then_some(gate)
        })
        .await
    }

    /// Waits until exactly these addresses are registered for the Service.
    async fn wait_registered(&self, uid: &str, addresses: &[&str]) {
        let wanted: BTreeSet<String> = addresses.iter().map(|address| (*address).to_owned()).collect();
        eventually(&format!("{addresses:?} to be registered"), async || {
            let found: BTreeSet<String> =
                self.moto.targets(uid).expect("targets").into_values().flatten().collect();
            (found == wanted).then_some(())
        })
        .await;
    }

    /// Has AWS report this state of all targets with these addresses.
    fn report(&self, states: &[(&str, &str)]) {
        let groups = self.moto.health().expect("health").into_keys();
        let state = |(address, state): &(&str, &str)| {
            ((*address).to_owned(), ((*state).to_owned(), "Target.Reason".to_owned()))
        };
        let states: BTreeMap<_, _> = states.iter().map(state).collect();
        self.moto.set_health(&groups.map(|group| (group, states.clone())).collect()).expect("health");
    }

    /// Removes the pods, which another test would meet.
    async fn clean(&self) {
        let pods = self.api::<Pod>();
        for pod in answered("pods", async || pods.list(&ListParams::default()).await).await {
            self.delete(&pod.name_any()).await;
        }
    }
}

#[tokio::test]
async fn gated_pod_is_registered_before_it_is_ready_and_ready_when_it_is_healthy() {
    requires!(KubeApiserver, Moto);
    let gates = Gates::new("gates").await;
    let controller = gates.controller("one", &["--pod-readiness-gates"]);
    let service = gates.service().await;
    let first = gates.pod("first", "10.0.1.1").await;
    gates.endpoints(&[("first", &first, "10.0.1.1", false)]).await;
    gates.wait_registered(&service, &["10.0.1.1"]).await;
    gates.wait_gate("first", "True", "TargetHealthy").await;
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": ""}]}});
    gates.write_status("first", &ready).await;
    gates.endpoints(&[("first", &first, "10.0.1.1", true)]).await;

    // A rolling update: the new pod waits for AWS, and the old one serves on.
    gates.report(&[("10.0.1.1", "healthy"), ("10.0.1.2", "initial")]);
    let second = gates.pod("second", "10.0.1.2").await;
    let both = [("first", first.as_str(), "10.0.1.1", true), ("second", second.as_str(), "10.0.1.2", false)];
    gates.endpoints(&both).await;
    gates.wait_registered(&service, &["10.0.1.1", "10.0.1.2"]).await;
    let waits = gates.wait_gate("second", "False", "Registering").await;
    assert!(waits.last_transition_time.is_some() && waits.message.is_some(), "{waits:?}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = gates.cluster.settled_writes(&["pods"]).await;
    assert_eq!(gates.gate("second").await.expect("the condition").status, "False");

    // A restart writes nothing, and continues.
    gates.cluster.kill(controller).await;
    let controller = gates.controller("two", &["--pod-readiness-gates"]);
    controller.measures("steerage_controller_pods_waiting 1").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(gates.cluster.writes(&["pods"]).await, before);
    gates.wait_registered(&service, &["10.0.1.1", "10.0.1.2"]).await;
    gates.report(&[("10.0.1.1", "healthy"), ("10.0.1.2", "healthy")]);
    let met = gates.wait_gate("second", "True", "TargetHealthy").await;
    assert!(met.message.is_some_and(|message| message.contains("healthy in every load balancer")));
    // The kubelet and the slices follow a moment later: until then, the pod stays a target.
    tokio::time::sleep(Duration::from_secs(1)).await;
    gates.wait_registered(&service, &["10.0.1.1", "10.0.1.2"]).await;
    gates.write_status("second", &ready).await;
    gates.endpoints(&[("second", &second, "10.0.1.2", true)]).await;
    gates.wait_registered(&service, &["10.0.1.2"]).await;

    // The gate never takes a pod out of the cluster's own traffic.
    gates.report(&[("10.0.1.2", "unhealthy")]);
    let third = gates.pod("third", "10.0.1.3").await;
    gates.endpoints(&[("second", &second, "10.0.1.2", true), ("third", &third, "10.0.1.3", false)]).await;
    gates.wait_gate("third", "False", "Registering").await;
    assert_eq!(gates.gate("second").await.expect("the condition").status, "True");
    gates.clean().await;
}

#[tokio::test]
async fn pod_of_the_same_name_with_another_uid_gets_nothing_of_the_earlier_one() {
    requires!(KubeApiserver, Moto);
    let gates = Gates::new("gates-uid").await;
    let _controller = gates.controller("one", &["--pod-readiness-gates"]);
    let service = gates.service().await;
    let earlier = gates.pod("web-0", "10.0.1.1").await;
    gates.endpoints(&[("web-0", &earlier, "10.0.1.1", false)]).await;
    gates.wait_gate("web-0", "True", "TargetHealthy").await;
    // While the target is registered: of others moto knows no group.
    gates.report(&[("10.0.1.1", "healthy")]);
    gates.delete("web-0").await;

    // The slice still shows the earlier pod, with the address that the new one got.
    let later = gates.pod("web-0", "10.0.1.1").await;
    assert_ne!(earlier, later);
    gates.wait_registered(&service, &[]).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(gates.gate("web-0").await.is_none());

    // A patch for the earlier pod, as a controller with an old view would send it.
    let pods = gates.api::<Pod>();
    let condition = json!({"type": GATE, "status": "True"});
    let patch =
        Patch::Strategic(json!({"metadata": {"uid": earlier}, "status": {"conditions": [condition]}}));
    let refused = pods.patch_status("web-0", &PatchParams::default(), &patch).await;
    let names_uid = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.message.contains("metadata.uid"));
    assert!(refused.as_ref().is_err_and(names_uid), "{refused:?}");

    gates.endpoints(&[("web-0", &later, "10.0.1.1", false)]).await;
    gates.wait_gate("web-0", "True", "TargetHealthy").await;
    gates.clean().await;
}

#[tokio::test]
async fn pods_do_not_wait_without_the_flag() {
    requires!(KubeApiserver, Moto);
    let gates = Gates::new("gates-off").await;
    let _controller = gates.controller("one", &[]);
    let service = gates.service().await;
    let pod = gates.pod("web-0", "10.0.1.1").await;
    let other = gates.pod("web-1", "10.0.1.2").await;
    gates.endpoints(&[("web-0", &pod, "10.0.1.1", false), ("web-1", &other, "10.0.1.2", true)]).await;
    gates.wait_registered(&service, &["10.0.1.2"]).await;
    tokio::time::sleep(Duration::from_secs(12)).await;
    gates.wait_registered(&service, &["10.0.1.2"]).await;
    assert!(gates.gate("web-0").await.is_none());
    gates.clean().await;
}
