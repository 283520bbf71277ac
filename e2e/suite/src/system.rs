// SPDX-License-Identifier: Apache-2.0
//! Steerage's own pods: finds them by the chart's labels, kills and scales them, changes their flags.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use steerage_edge_api::{EdgeHost, EdgeTargetHealth, HOST_LABEL};

use crate::pods::has_condition;
use crate::suite::Suite;
use crate::wait::{TIMEOUT, until};

/// The namespace of the chart.
pub const NAMESPACE: &str = "steerage-system";
/// The controller's component label.
pub const CONTROLLER: &str = "controller";
/// The agent's component label.
pub const AGENT: &str = "agent";
/// The component label of edges on nodes.
pub const EDGE: &str = "edge";
/// The controller's Deployment and Lease.
const NAME: &str = "steerage-controller";

/// The pods of a component that are not being deleted.
pub async fn pods(suite: &Suite, component: &str) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(suite.client.clone(), NAMESPACE);
    let labels = format!("app.kubernetes.io/name=steerage,app.kubernetes.io/component={component}");
    let mut found = pods.list(&ListParams::default().labels(&labels)).await?.items;
    found.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    Ok(found)
}

/// The node of a pod.
pub fn node_of(pod: &Pod) -> Option<&String> {
    pod.spec.as_ref()?.node_name.as_ref()
}

/// Ends a pod's first container with SIGKILL.
pub fn kill_container(suite: &Suite, pod: &Pod) -> Result<()> {
    let node = node_of(pod).context("the pod has no node")?;
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let id = statuses
        .and_then(|all| all.first()?.container_id.as_deref())
        .context("the pod has_condition no container")?;
    let (_, id) = id.split_once("://").context("an id without a runtime")?;
    // The kubelet names a container's cgroup after it.
    let script = format!(
        "killed=1; for group in /proc/[0-9]*/cgroup; do if grep -q {id} $group 2>/dev/null; then \
         process=${{group%/cgroup}}; kill -9 ${{process#/proc/}} && killed=0; fi; done; exit $killed"
    );
    suite.cluster(|cluster| cluster.exec(node, &["sh", "-c", &script])).map(drop)
}

/// How often a pod's first container was started again.
pub fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.and_then(|all| all.first()).map_or(0, |status| status.restart_count)
}

/// The name of the pod that holds the controller's Lease.
pub async fn lease_holder(suite: &Suite) -> Result<String> {
    let leases: Api<Lease> = Api::namespaced(suite.client.clone(), NAMESPACE);
    let lease = leases.get(NAME).await?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty());
    holder.context("the Lease has no holder")
}

/// The Deployment's number of controllers.
pub async fn replicas(suite: &Suite) -> Result<usize> {
    let deployment = deployments(suite).get(NAME).await?;
    Ok(usize::try_from(deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1))?)
}

/// Scales the controller and waits until exactly this many are ready.
pub async fn scale(suite: &Suite, replicas: usize) -> Result<()> {
    let change = json!({ "spec": { "replicas": replicas } });
    deployments(suite).patch(NAME, &PatchParams::default(), &Patch::Merge(change)).await?;
    wait_controllers(suite, replicas).await
}

/// Waits until exactly this many controllers run, all ready and of the latest version.
pub async fn wait_controllers(suite: &Suite, replicas: usize) -> Result<()> {
    until(format!("{replicas} ready controllers"), TIMEOUT * 2, async || -> Result<()> {
        let status = deployments(suite).get(NAME).await?;
        let observed = status.status.clone().unwrap_or_default();
        ensure!(observed.observed_generation == status.metadata.generation, "the Deployment is not observed");
        ensure!(
            observed.updated_replicas.unwrap_or(0) == i32::try_from(replicas)?,
            "{:?} controllers are of the present version",
            observed.updated_replicas
        );
        let all: Api<Pod> = Api::namespaced(suite.client.clone(), NAMESPACE);
        let labels = format!("app.kubernetes.io/name=steerage,app.kubernetes.io/component={CONTROLLER}");
        let pods = all.list(&ListParams::default().labels(&labels)).await?.items;
        let ready = pods.iter().filter(|pod| has_condition(pod, "Ready")).count();
        ensure!(pods.len() == replicas && ready == replicas, "{} controllers, {ready} ready", pods.len());
        Ok(())
    })
    .await
}

/// Adds an argument to the controller or removes it, and waits until all controllers run so.
pub async fn set_argument(suite: &Suite, argument: &str, given: bool) -> Result<()> {
    let deployment = deployments(suite).get(NAME).await?;
    let spec = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.template.spec.as_ref())
        .context("an empty Deployment")?;
    let container = spec.containers.first().context("no container")?;
    let mut arguments = container.args.clone().unwrap_or_default();
    arguments.retain(|present| present != argument);
    if given {
        arguments.push(argument.to_owned());
    }
    let change = json!({
        "spec": { "template": { "spec": { "containers": [{ "name": container.name, "args": arguments }] } } },
    });
    let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    deployments(suite).patch(NAME, &PatchParams::default(), &Patch::Strategic(change)).await?;
    wait_controllers(suite, usize::try_from(replicas)?).await
}

/// Adds an argument to the agents or removes it, and waits until all agents run so.
pub async fn set_agent_argument(suite: &Suite, argument: &str, given: bool) -> Result<()> {
    let agents: Api<DaemonSet> = Api::namespaced(suite.client.clone(), NAMESPACE);
    let name = "steerage-agent";
    let before = agents.get(name).await?;
    let pod = before.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let container = pod.and_then(|pod| pod.containers.first()).context("an empty DaemonSet")?;
    let mut arguments = container.args.clone().unwrap_or_default();
    arguments.retain(|present| present != argument);
    if given {
        arguments.push(argument.to_owned());
    }
    let change = json!({
        "spec": {
            "updateStrategy": { "rollingUpdate": { "maxUnavailable": "100%" } },
            "template": { "spec": { "containers": [{ "name": container.name, "args": arguments }] } },
        },
    });
    roll_out(&agents, name, change).await
}

/// Restarts the edges on the nodes, as `kubectl rollout restart` does, and waits until all are ready.
pub async fn restart_edges(suite: &Suite) -> Result<()> {
    let now = format!("{:?}", steerage_meter::capture::now());
    let annotations = json!({ "kubectl.kubernetes.io/restartedAt": now });
    let change = json!({ "spec": { "template": { "metadata": { "annotations": annotations } } } });
    roll_out(&Api::namespaced(suite.client.clone(), NAMESPACE), "steerage-edge", change).await
}

/// Deletes what a host that is an edge host no longer has written.
pub async fn delete_edge_host(suite: &Suite, host: &str) -> Result<()> {
    let hosts: Api<EdgeHost> = Api::namespaced(suite.client.clone(), NAMESPACE);
    hosts.delete(host, &DeleteParams::default()).await?;
    let reports: Api<EdgeTargetHealth> = Api::namespaced(suite.client.clone(), NAMESPACE);
    let of_host = ListParams::default().labels(&format!("{HOST_LABEL}={host}"));
    reports.delete_collection(&DeleteParams::default(), &of_host).await?;
    Ok(())
}

async fn roll_out(all: &Api<DaemonSet>, name: &str, change: Value) -> Result<()> {
    let patched = all.patch(name, &PatchParams::default(), &Patch::Strategic(change)).await?;
    let generation = patched.metadata.generation;
    until(format!("the rollout of {name}"), TIMEOUT * 3, async || -> Result<()> {
        let status = all.get(name).await?.status.unwrap_or_default();
        let wanted = status.desired_number_scheduled;
        ensure!(status.observed_generation >= generation, "not observed yet");
        ensure!(
            status.updated_number_scheduled == Some(wanted) && status.number_available == Some(wanted),
            "{status:?}"
        );
        Ok(())
    })
    .await
}

/// Waits until a component's killed pod has restarted and is ready.
pub async fn wait_restarted(suite: &Suite, component: &str, killed: &Pod) -> Result<()> {
    until(format!("pod {} after its death", killed.name_any()), TIMEOUT * 2, async || -> Result<()> {
        let pods = pods(suite, component).await?;
        let pod = pods.iter().find(|pod| pod.name_any() == killed.name_any()).context("the pod is gone")?;
        ensure!(restarts(pod) > restarts(killed), "it was not started again");
        ensure!(has_condition(pod, "Ready"), "it is not ready");
        Ok(())
    })
    .await
}

fn deployments(suite: &Suite) -> Api<Deployment> {
    Api::namespaced(suite.client.clone(), NAMESPACE)
}
