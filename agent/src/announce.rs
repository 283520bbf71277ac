// SPDX-License-Identifier: Apache-2.0
//! Tells the cluster, by an annotation of the own Node, that Services labelled for the agent are served here. The controller
//! sends such Services only to nodes that say so.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use steerage_model::names;
use tokio::sync::watch;

/// Time for one call.
const CALL: Duration = Duration::from_secs(5);
/// Time between two tries.
const RETRY: Duration = Duration::from_secs(5);

/// What the annotation says.
pub fn announcement(all_services: bool, version: &str) -> String {
    format!("{}/{version}", if all_services { "all" } else { "labelled" })
}

/// Writes the annotation whenever it is asked to (`true`), until the asker is gone.
pub async fn announce(client: Client, node: String, value: String, mut asked: watch::Receiver<bool>) {
    let nodes: Api<Node> = Api::all(client);
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { names::NODE_AGENT: value } } }));
    let parameters = PatchParams::default();
    while asked.wait_for(|asked| *asked).await.is_ok() {
        let call = nodes.patch_metadata(&node, &parameters, &patch);
        let error = match tokio::time::timeout(CALL, call).await {
            Ok(Ok(_)) => {
                tracing::info!(%node, value, "announced on the node");
                // Asked again when the watch shows another value.
                if asked.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::warn!(%node, error, "cannot announce on the node yet");
        tokio::time::sleep(RETRY).await;
    }
}

/// Takes the annotation away. A Node that is gone has none.
pub async fn withdraw(client: Client, node: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client);
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { names::NODE_AGENT: null } } }));
    let parameters = PatchParams::default();
    let call = nodes.patch_metadata(node, &parameters, &patch);
    match tokio::time::timeout(CALL, call).await.context("the API server did not answer in time")? {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => Ok(done.map(drop)?),
    }
}
