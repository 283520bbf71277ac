// SPDX-License-Identifier: Apache-2.0
//! Says by annotations of the own Node that an agent runs there, in which mode and version. The controller sends Services
//! labelled for the agent only to such nodes.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use steerage_model::{AgentMode, NodeAgent, names};
use steerage_process::duration;
use tokio::sync::watch;

/// Time for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two tries.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The annotations of an agent with these flags.
pub fn node_agent(kube_proxy_replacement: bool, version: &str) -> NodeAgent {
    let mode = if kube_proxy_replacement { AgentMode::KubeProxyReplacement } else { AgentMode::Labelled };
    NodeAgent { mode: mode.name().to_owned(), version: version.to_owned() }
}

/// Writes the annotations whenever that is asked for (`true`), until the sender is gone.
pub async fn keep_annotated(
    client: Client,
    node: String,
    agent: NodeAgent,
    mut asked: watch::Receiver<bool>,
) {
    let nodes: Api<Node> = Api::all(client);
    let NodeAgent { mode, version } = &agent;
    let patch = patch(Some(mode), Some(version));
    let parameters = PatchParams::default();
    while asked.wait_for(|asked| *asked).await.is_ok() {
        let call = nodes.patch_metadata(&node, &parameters, &patch);
        let error = match tokio::time::timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(_)) => {
                tracing::info!(%node, mode, version, "Node annotated");
                // Asked again when the watch shows other values.
                if asked.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Ok(Err(error)) => steerage_model::chain(&error),
            Err(_) => "no reply in time".to_owned(),
        };
        tracing::warn!(%node, error, retry_in = %duration::display(RETRY_INTERVAL), "Node not annotated; retrying");
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Removes the annotations. A Node that is gone has none.
pub async fn remove_annotations(client: Client, node: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client);
    let patch = patch(None, None);
    let parameters = PatchParams::default();
    let call = nodes.patch_metadata(node, &parameters, &patch);
    match tokio::time::timeout(CALL_TIMEOUT, call).await.context("no reply from the API server in time")? {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => Ok(done.map(drop)?),
    }
}

/// Sets the annotations, or removes them.
fn patch(mode: Option<&str>, version: Option<&str>) -> Patch<serde_json::Value> {
    let annotations = json!({ names::AGENT_MODE: mode, names::AGENT_VERSION: version });
    Patch::Merge(json!({ "metadata": { "annotations": annotations } }))
}
