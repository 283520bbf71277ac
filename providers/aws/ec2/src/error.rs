// SPDX-License-Identifier: Apache-2.0
//! How an action fails.

use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_runtime_api::client::result::SdkError;
use aws_smithy_types::error::ErrorMetadata;
use aws_smithy_types::error::metadata::ProvideErrorMetadata;

/// A failed action. Nothing of it is from the request, so no secret.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// EC2 refused the action, or did not answer.
    #[error(transparent)]
    Failed(#[from] Box<SdkError<Refusal, HttpResponse>>),
    /// EC2 did what it was asked, and its answer is of another form than documented.
    #[error("EC2 did it, but its answer is not readable")]
    Unreadable(#[from] quick_xml::DeError),
}

impl Error {
    /// EC2's code; none if EC2 did not answer.
    pub fn code(&self) -> Option<&str> {
        self.metadata()?.code()
    }

    /// EC2's message; none if EC2 did not answer.
    pub fn message(&self) -> Option<&str> {
        self.metadata()?.message()
    }

    fn metadata(&self) -> Option<&ErrorMetadata> {
        match self {
            Self::Failed(failed) => failed.as_service_error().map(|refusal| &refusal.metadata),
            Self::Unreadable(_) => None,
        }
    }
}

/// EC2's refusal of an action, with EC2's code and message. An answer that is no XML has neither.
/// <https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html>
#[derive(Debug, thiserror::Error)]
#[error("{metadata}")]
pub struct Refusal {
    pub(crate) metadata: ErrorMetadata,
}

impl ProvideErrorMetadata for Refusal {
    fn meta(&self) -> &ErrorMetadata {
        &self.metadata
    }
}
