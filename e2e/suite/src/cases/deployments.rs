// SPDX-License-Identifier: Apache-2.0
//! Deployments of backends, and what changes their pods: scaling, a rolling update, and the drain of a node.

use anyhow::{Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{EvictParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::pods::{End, deployment};
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// Both kinds of steering: names of Services, and names and labels of their backends.
pub(super) const MODES: [&str; 2] = ["api", "health-check"];

/// Makes Deployments of these names.
pub(super) async fn make(test: &TestContext, names: &[&str], replicas: usize, end: End) -> Result<()> {
    let deployments = test.api::<Deployment>();
    for name in names {
        let made = deployment(name, name, replicas, end)?;
        let create = async || deployments.create(&PostParams::default(), &made).await;
        until("a Deployment", TIMEOUT, create).await?;
    }
    for name in names {
        rolled_out(test, name, Some(1)).await?;
    }
    Ok(())
}

/// Changes the number of backends; does not wait for them.
pub(super) async fn scale(test: &TestContext, name: &str, replicas: usize) -> Result<()> {
    test.patch_any::<Deployment>(name, json!({ "spec": { "replicas": replicas } })).await.map(drop)
}

/// Replaces all pods. Returns when the new ones are ready; old ones may still serve.
pub(super) async fn update(test: &TestContext, names: &[&str]) -> Result<()> {
    let update = json!({ "spec": { "template": { "metadata": { "annotations": { "e2e": "2" } } } } });
    change(test, names, update).await
}

/// The same, by any change of the pods.
pub(super) async fn change(test: &TestContext, names: &[&str], change: Value) -> Result<()> {
    let mut generations = Vec::new();
    for name in names {
        let deployment: Deployment = test.patch_any(name, change.clone()).await?;
        generations.push((name, deployment.metadata.generation));
    }
    for (name, generation) in generations {
        rolled_out(test, name, generation).await?;
    }
    Ok(())
}

/// Cordons a node and evicts its backends, which may still serve when this returns.
pub(super) async fn drain(test: &TestContext, node: &str) -> Result<()> {
    cordon(test, node, true).await?;
    for app in MODES {
        for pod in test.pods(app).await? {
            if pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node) {
                test.api::<Pod>().evict(&pod.name_any(), &EvictParams::default()).await?;
            }
        }
    }
    Ok(())
}

/// Marks a node as unschedulable, or no longer.
pub(super) async fn cordon(test: &TestContext, node: &str, on: bool) -> Result<()> {
    let nodes: Api<Node> = Api::all(test.client().clone());
    let change = json!({ "spec": { "unschedulable": on } });
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(change)).await?;
    Ok(())
}

async fn rolled_out(test: &TestContext, name: &str, generation: Option<i64>) -> Result<()> {
    until("ready backends", TIMEOUT * 3, async || -> Result<()> {
        let deployment = test.api::<Deployment>().get(name).await?;
        let wanted = deployment.spec.and_then(|spec| spec.replicas);
        let status = deployment.status.unwrap_or_default();
        ensure!(status.observed_generation >= generation, "not observed yet");
        ensure!(
            status.updated_replicas == wanted && status.ready_replicas == wanted && status.replicas == wanted,
            "{status:?}"
        );
        Ok(())
    })
    .await
}
