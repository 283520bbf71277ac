// SPDX-License-Identifier: Apache-2.0
//! Reads one Service from the API server. A watch may lag or miss an object, so a deletion that cannot be undone asks here first.

use std::time::Duration;

use kube::Client;
use kube::api::GetParams;
use kube::core::Request;
use steerage_model::{Key, Service};
use steerage_process::duration;
use steerage_watch::{Kind as _, Malformed, Services};

/// For one call.
const DEADLINE: Duration = Duration::from_secs(5);

/// Why it is unknown whether a Service exists.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("the API server did not answer within {}", duration::display(DEADLINE))]
    Deadline,
    #[error("the name of the Service is invalid")]
    Name(#[source] kube::core::request::Error),
    #[error("cannot read the Service")]
    Failed(#[source] kube::Error),
    #[error("the Service is unreadable")]
    Malformed(#[from] Malformed),
}

#[derive(Clone)]
pub(crate) struct ServiceReader {
    client: Client,
}

impl ServiceReader {
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The Service as the API server has it now; `None` if it does not exist.
    pub(crate) async fn get(&self, key: &Key) -> Result<Option<Service>, ReadError> {
        let path = format!("/api/v1/namespaces/{}/services", key.namespace());
        let request = Request::new(path).get(key.name(), &GetParams::default()).map_err(ReadError::Name)?;
        match tokio::time::timeout(DEADLINE, self.client.request_text(request)).await {
            Err(_) => Err(ReadError::Deadline),
            Ok(Ok(json)) => Ok(Services::project(&json, &mut Vec::new())?),
            // Only the API server's own answer counts, not the 404 of a proxy.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 && status.reason == "NotFound" => {
                Ok(None)
            }
            Ok(Err(error)) => Err(ReadError::Failed(error)),
        }
    }
}
