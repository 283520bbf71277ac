// SPDX-License-Identifier: Apache-2.0
//! Calls to the API server: each has a deadline, and its error says what to do next.

use std::future::Future;
use std::time::Duration;

use kube::Error as KubeError;
use steerage_model::chain;
use steerage_provider_api::Error;

/// Timeout of a call: a write that started under the Lease must complete before another candidate can take it.
const DEADLINE: Duration = Duration::from_secs(5);

/// Runs a call under the deadline.
pub(crate) async fn call<T>(what: impl Future<Output = Result<T, KubeError>>) -> Result<T, Failure> {
    match tokio::time::timeout(DEADLINE, what).await {
        Ok(result) => result.map_err(Failure::Kube),
        Err(_) => Err(Failure::Deadline),
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The API server's error, or a failed connection.
    Kube(KubeError),
    /// No response in time. The call may have succeeded.
    Deadline,
}

impl Failure {
    /// The HTTP status, if there was a response.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Kube(KubeError::Api(status)) => Some(status.code),
            _ => None,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = match failure {
            Failure::Deadline => {
                return Self::Unavailable(
                    "The API server did not answer in time. Steerage retries.".to_owned(),
                );
            }
            Failure::Kube(error) => error,
        };
        let KubeError::Api(status) = &error else {
            return Self::Unavailable(format!(
                "Cannot reach the API server: {}. Steerage retries.",
                chain(&error)
            ));
        };
        let message = status.message.clone();
        match status.code {
            401 | 403 => Self::denied(message),
            // Another program changed the object, or created one of that name.
            404 | 409 => Self::Conflict(message),
            429 => {
                let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                let after = (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)));
                Self::throttled(after, message)
            }
            400 | 422 => Self::invalid(REJECTED_BY_API_SERVER, message),
            _ => Self::Unavailable(format!("The API server failed: {message}. Steerage retries.")),
        }
    }
}

/// The API server finds an object invalid: most likely the CRDs are of another version than the controller.
pub const REJECTED_BY_API_SERVER: &str = "RejectedByAPIServer";
