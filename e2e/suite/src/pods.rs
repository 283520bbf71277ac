// SPDX-License-Identifier: Apache-2.0
//! Backends: agnhost's netexec, whose readiness the case sets, and requests made by such a pod.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use steerage_model::Family;

use crate::net::{self, encode};
use crate::wait::{TIMEOUT, until};

const IMAGE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// A readiness gate: the pod is not ready until the case sets this condition.
pub const GATE: &str = "steerage.dev/e2e";
/// The label that names a backend's node.
pub const NODE: &str = "e2e-node";
/// Where netexec serves HTTP.
pub const HTTP: u16 = 8080;

/// A backend on a node. After SIGTERM it continues to serve for `linger` seconds.
pub fn echo(name: &str, app: &str, node: &str, linger: u32) -> Result<Pod> {
    let mut spec = template(linger);
    spec["nodeName"] = node.into();
    spec["readinessGates"] = json!([{ "conditionType": GATE }]);
    let pod = json!({ "metadata": { "name": name, "labels": { "app": app, NODE: node } }, "spec": spec });
    serde_json::from_value(pod).context("no Pod")
}

/// The path that answers 200 as long as the backend serves.
pub const HEALTH_PATH: &str = "/healthz";
/// Seconds within which a backend closes its connections and exits.
const EXIT_WITHIN: u32 = 5;

/// How a backend ends that serves for so many more seconds.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// It fails its readiness probe meanwhile. Then it exits at once, and a request that it has not read yet is answered by a reset.
    Unready(u32),
    /// It passes its readiness probe meanwhile, in a `preStop` hook. Then it closes its connections between two requests, and exits.
    Ready(u32),
}

/// A Deployment of backends with readiness probes, spread over the nodes.
pub fn deployment(name: &str, app: &str, replicas: usize, end: End) -> Result<Deployment> {
    let (mut spec, path) = match end {
        End::Unready(linger) => (template(linger), "/readyz"),
        End::Ready(linger) => {
            // The signal comes when the hook has returned, while connections are closed.
            let mut spec = template(EXIT_WITHIN);
            let exit = format!("/exit?code=0&wait={linger}s&timeout={EXIT_WITHIN}s");
            spec["terminationGracePeriodSeconds"] = (linger + 2 * EXIT_WITHIN).into();
            spec["containers"][0]["lifecycle"] =
                json!({ "preStop": { "httpGet": { "path": exit, "port": HTTP } } });
            (spec, HEALTH_PATH)
        }
    };
    let labels = json!({ "app": app });
    spec["containers"][0]["readinessProbe"] =
        json!({ "httpGet": { "path": path, "port": HTTP }, "periodSeconds": 1 });
    spec["topologySpreadConstraints"] = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": labels }, "matchLabelKeys": ["pod-template-hash"],
    }]);
    let deployment = json!({
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "strategy": { "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
            "template": { "metadata": { "labels": labels }, "spec": spec },
        },
    });
    serde_json::from_value(deployment).context("no Deployment")
}

fn template(linger: u32) -> Value {
    json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": linger,
        "tolerations": [{ "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300 }],
        "containers": [{
            "name": "echo",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "args": ["netexec", format!("--http-port={HTTP}"), "--udp-port=8081", format!("--delay-shutdown={linger}")],
        }],
    })
}

/// The address of a pod in one family.
pub fn address(pod: &Pod, family: Family) -> Result<IpAddr> {
    let addresses = pod.status.as_ref().and_then(|status| status.pod_ips.as_ref());
    addresses
        .into_iter()
        .flatten()
        .filter_map(|address| address.ip.parse().ok())
        .find(|address| Family::of(*address) == family)
        .with_context(|| format!("pod {} has no {family} address", pod.name_any()))
}

/// Whether a pod has a condition.
pub fn has_condition(pod: &Pod, condition: &str) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|found| found.type_ == condition && found.status == "True")
}

#[derive(Deserialize)]
struct Dialled {
    #[serde(default)]
    responses: Vec<String>,
    #[serde(default)]
    errors: Vec<String>,
}

/// Lets a pod send `request` over `http` or `udp`; returns the answer. For a caller that asks again, or expects none.
pub async fn dial(pod: &Pod, protocol: &str, to: SocketAddr, request: &str) -> Result<String> {
    dial_within(net::ANSWER_TIMEOUT, pod, protocol, to, request).await
}

/// The same, for a caller that asks once.
pub async fn dial_once(pod: &Pod, protocol: &str, to: SocketAddr, request: &str) -> Result<String> {
    dial_within(net::ONLY_ANSWER_TIMEOUT, pod, protocol, to, request).await
}

async fn dial_within(
    limit: Duration,
    pod: &Pod,
    protocol: &str,
    to: SocketAddr,
    request: &str,
) -> Result<String> {
    let path = format!(
        "/dial?protocol={protocol}&host={}&port={}&tries=1&request={}",
        encode(&to.ip().to_string()),
        to.port(),
        encode(request)
    );
    let answer = net::get_within(limit, 0, control(pod)?, &path).await?;
    let dialled: Dialled =
        serde_json::from_str(&answer.body).with_context(|| format!("/dial answers {}", answer.body))?;
    ensure!(dialled.errors.is_empty(), "pod {} asks {to}: {:?}", pod.name_any(), dialled.errors);
    dialled
        .responses
        .into_iter()
        .next()
        .with_context(|| format!("pod {} got no answer of {to}", pod.name_any()))
}

/// The pod's own server, without a Service in between.
fn control(pod: &Pod) -> Result<SocketAddr> {
    Ok(SocketAddr::new(address(pod, Family::V4)?, HTTP))
}

/// Makes a pod and returns it once it has its addresses. A new namespace has no service account for a moment.
pub async fn create(client: &kube::Client, namespace: &str, pod: &Pod) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let name = pod.name_any();
    until(format!("pod {name}"), TIMEOUT, async || pods.create(&PostParams::default(), pod).await).await
}

/// Sets the readiness gate of a backend.
pub async fn set_ready(client: &kube::Client, pod: &Pod, ready: bool) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let status = if ready { "True" } else { "False" };
    let change = json!({ "status": { "conditions": [{ "type": GATE, "status": status }] } });
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(change)).await?;
    Ok(())
}

/// Returns when a pod is ready, or no longer.
pub async fn wait_ready(client: &kube::Client, pod: &Pod, ready: bool) -> Result<Pod> {
    let what = if ready { "readiness" } else { "no readiness" };
    wait_for(client, pod, what, |pod| has_condition(pod, "Ready") == ready).await
}

/// Returns a pod once it fits.
pub async fn wait_for(
    client: &kube::Client,
    pod: &Pod,
    what: &str,
    fits: impl Fn(&Pod) -> bool,
) -> Result<Pod> {
    let name = pod.name_any();
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    until(format!("{what} of pod {name}"), TIMEOUT + Duration::from_secs(30), async || {
        match pods.get(&name).await {
            Ok(pod) if fits(&pod) => Ok(pod),
            Ok(pod) => Err(format!("{:?}", pod.status.map(|status| (status.phase, status.conditions)))),
            Err(error) => Err(error.to_string()),
        }
    })
    .await
}
