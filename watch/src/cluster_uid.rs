// SPDX-License-Identifier: Apache-2.0
//! Reads the UID of the cluster, which is that of the namespace `kube-system`: it lives as long as the cluster. A cluster that is set
//! up again has another one; a copy of etcd has the same. Called by the controller, which marks cloud resources with it, and by the
//! edge, whose hosts ignore those of other clusters.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};

const NAMESPACE: &str = "kube-system";
const DEADLINE: Duration = Duration::from_secs(5);

/// Why the UID is unknown.
#[derive(Debug, thiserror::Error)]
pub enum ClusterUidError {
    /// The API server did not answer.
    #[error("the API server did not answer within {} s", DEADLINE.as_secs())]
    NoAnswer,
    /// The API server refused the request, or cannot be reached.
    #[error("cannot get the namespace kube-system")]
    Request(#[source] Box<kube::Error>),
    /// The answer has none.
    #[error("the namespace kube-system has no UID")]
    Missing,
}

/// Reads the UID, with one request of 5 s at most. It needs the right to get the namespace `kube-system`.
pub async fn cluster_uid(client: &Client) -> Result<String, ClusterUidError> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let found = tokio::time::timeout(DEADLINE, namespaces.get_metadata(NAMESPACE))
        .await
        .map_err(|_| ClusterUidError::NoAnswer)?
        .map_err(|error| ClusterUidError::Request(Box::new(error)))?;
    found.metadata.uid.filter(|uid| !uid.is_empty()).ok_or(ClusterUidError::Missing)
}
