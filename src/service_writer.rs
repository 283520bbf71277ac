// SPDX-License-Identifier: Apache-2.0
//! Writes to Services: finalizers, status, and the migration of legacy annotations.
//!
//! Every write names the UID, so that it cannot change a Service created again under the same name. It begins only while this
//! process leads.

use std::time::Duration;

use k8s_openapi::api::core::v1::Service as KubeService;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use steerage_model::{Key, Service, annotations};
use steerage_process::duration;

use crate::lease::Leadership;
use crate::plan;

/// A write that began under the Lease must end before another controller can hold it.
const DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("this controller no longer holds the Lease")]
    NotLeading,
    #[error("the API server did not answer within {}", duration::display(DEADLINE))]
    Deadline,
    #[error("the API server rejected the patch: {0}")]
    Rejected(String),
    #[error("cannot reach the API server")]
    Unreachable(#[source] kube::Error),
}

#[derive(Clone)]
pub(crate) struct ServiceWriter {
    client: Client,
    provider: &'static str,
    leadership: Leadership,
}

impl ServiceWriter {
    pub(crate) fn new(client: Client, provider: &'static str, leadership: Leadership) -> Self {
        Self { client, provider, leadership }
    }

    /// Called before anything is created that the finalizer must outlive.
    pub(crate) async fn add_finalizer(&self, service: &Service) -> Result<(), WriteError> {
        let patch = json!({"metadata": {
            "uid": service.uid,
            "finalizers": [plan::finalizer(service)],
            "annotations": {
                annotations::PROVIDER: self.provider,
                annotations::SERVED_CLASS: plan::served_class(service),
            },
        }});
        self.patch(&service.key, None, &Patch::Strategic(patch)).await
    }

    /// Called after everything that the finalizers stood for was deleted.
    pub(crate) async fn remove_finalizers(
        &self,
        service: &Service,
        finalizers: &[&str],
    ) -> Result<(), WriteError> {
        let written = json!({annotations::PROVIDER: null, annotations::SERVED_CLASS: null});
        let mut metadata = json!({"uid": service.uid, "annotations": written});
        if !finalizers.is_empty() {
            metadata["$deleteFromPrimitiveList/finalizers"] = json!(finalizers);
        }
        self.patch(&service.key, None, &Patch::Strategic(json!({"metadata": metadata}))).await
    }

    /// Removes finalizers of other controllers, when what they stand for is Steerage's. Its own stays.
    pub(crate) async fn remove_replaced_finalizers(
        &self,
        service: &Service,
        finalizers: &[&str],
    ) -> Result<(), WriteError> {
        let metadata = json!({"uid": service.uid, "$deleteFromPrimitiveList/finalizers": finalizers});
        self.patch(&service.key, None, &Patch::Strategic(json!({"metadata": metadata}))).await
    }

    pub(crate) async fn patch_status(&self, key: &Key, patch: Value) -> Result<(), WriteError> {
        self.patch(key, Some("status"), &Patch::Strategic(patch)).await
    }

    /// Applies `patch`, and marks the Service so that it is never applied again.
    pub(crate) async fn migrate_legacy_annotations(
        &self,
        service: &Service,
        mut patch: Value,
    ) -> Result<(), WriteError> {
        let marks = json!({annotations::LEGACY_ANNOTATIONS_MIGRATED: "true"});
        patch["metadata"] = json!({"uid": service.uid, "annotations": marks});
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
        write(&self.leadership, call).await
    }
}

/// Makes a write, only while this process leads.
pub(crate) async fn write<T>(
    leadership: &Leadership,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<(), WriteError> {
    if !leadership.is_held() {
        return Err(WriteError::NotLeading);
    }
    match tokio::time::timeout(DEADLINE, call).await {
        Err(_) => {
            leadership.write_given_up();
            Err(WriteError::Deadline)
        }
        Ok(Ok(_)) => Ok(()),
        // The object is gone, and nothing is left to write.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
        Ok(Err(kube::Error::Api(status))) => Err(WriteError::Rejected(status.message.clone())),
        Ok(Err(error)) => {
            leadership.write_given_up();
            Err(WriteError::Unreachable(error))
        }
    }
}
