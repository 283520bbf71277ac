// SPDX-License-Identifier: Apache-2.0
//! Writes to Services: finalizers, status, and the one change that old annotations ask for. Every write names the UID, so that
//! none can hit a Service made anew under the same name.

use std::time::Duration;

use k8s_openapi::api::core::v1::Service as KubeService;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use steerage_model::{Key, Service};

use crate::plan;

/// Longest time for a write: one that was begun under the Lease must land before anybody else may hold it.
const DEADLINE: Duration = Duration::from_secs(5);

/// ReasonMessage a write failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("the API server did not answer in time")]
    Deadline,
    #[error("the API server refuses: {0}")]
    Refused(String),
    #[error("cannot reach the API server: {0}")]
    Unreachable(#[source] kube::Error),
}

/// Writes to Services.
#[derive(Clone)]
pub(crate) struct ServiceWriter {
    client: Client,
    provider: &'static str,
}

impl ServiceWriter {
    pub(crate) fn new(client: Client, provider: &'static str) -> Self {
        Self { client, provider }
    }

    /// Sets our finalizer, before anything is made that it must outlive.
    pub(crate) async fn add_finalizer(&self, service: &Service) -> Result<(), WriteError> {
        let patch = json!({"metadata": {
            "uid": service.uid,
            "finalizers": [plan::finalizer(service)],
            "annotations": {plan::PROVIDER: self.provider},
        }});
        self.patch(&service.key, None, &Patch::Strategic(patch)).await
    }

    /// Takes our finalizers away: all that they stood for is gone.
    pub(crate) async fn remove_finalizers(
        &self,
        service: &Service,
        finalizers: &[&str],
    ) -> Result<(), WriteError> {
        let mut metadata = json!({"uid": service.uid, "annotations": {plan::PROVIDER: null}});
        if !finalizers.is_empty() {
            metadata["$deleteFromPrimitiveList/finalizers"] = json!(finalizers);
        }
        self.patch(&service.key, None, &Patch::Strategic(json!({"metadata": metadata}))).await
    }

    /// Writes a patch of the status.
    pub(crate) async fn patch_status(&self, key: &Key, patch: Value) -> Result<(), WriteError> {
        self.patch(key, Some("status"), &Patch::Strategic(patch)).await
    }

    /// Follows old annotations, and remembers that it did.
    pub(crate) async fn migrate(&self, service: &Service, mut patch: Value) -> Result<(), WriteError> {
        patch["metadata"] = json!({"uid": service.uid, "annotations": {plan::MIGRATED: "true"}});
        self.patch(&service.key, None, &Patch::Merge(patch)).await
    }

    async fn patch(
        &self,
        key: &Key,
        subresource: Option<&str>,
        patch: &Patch<Value>,
    ) -> Result<(), WriteError> {
        let api: Api<KubeService> = Api::namespaced(self.client.clone(), key.namespace());
        let params = PatchParams::default();
        let call = async {
            match subresource {
                Some(_) => api.patch_status(key.name(), &params, patch).await,
                None => api.patch(key.name(), &params, patch).await,
            }
        };
        match tokio::time::timeout(DEADLINE, call).await {
            Err(_) => Err(WriteError::Deadline),
            Ok(Ok(_)) => Ok(()),
            // It is gone, and with it what there was to write.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
            Ok(Err(kube::Error::Api(status))) => Err(WriteError::Refused(status.message.clone())),
            Ok(Err(error)) => Err(WriteError::Unreachable(error)),
        }
    }
}
