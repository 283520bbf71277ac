// SPDX-License-Identifier: Apache-2.0
//! Errors of `ELBv2` calls, and the provider error that each becomes.

use std::fmt::Debug;

use aws_sdk_elasticloadbalancingv2::error::{ProvideErrorMetadata, SdkError};
use steerage_model::chain;
use steerage_provider_api::Error;

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

/// A failed call.
#[derive(Debug)]
pub(crate) struct CallError {
    action: &'static str,
    /// Code from AWS; empty if AWS did not reply.
    code: String,
    message: String,
}

impl CallError {
    /// Turns the error of the call `action` into a `CallError`.
    pub(super) fn of<E, R>(action: &'static str) -> impl FnOnce(SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
        R: Debug + 'static,
    {
        move |error| {
            let code = error.code().unwrap_or_default().to_owned();
            // The chain contains nothing of the request, so no secret.
            let message = error.message().map_or_else(|| chain(&error), str::to_owned);
            Self { action, code, message }
        }
    }

    /// A failure that a stand-in makes up. Without a code, AWS did not answer.
    #[cfg(test)]
    pub(crate) fn made_up(action: &'static str, code: &str, message: impl Into<String>) -> Self {
        Self { action, code: code.to_owned(), message: message.into() }
    }

    pub(crate) fn is(&self, code: &str) -> bool {
        self.code == code
    }

    /// Whether a resource that the call names does not exist, or is not visible yet.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self.code.as_str(), "LoadBalancerNotFound" | "TargetGroupNotFound" | "ListenerNotFound")
    }

    /// Whether a quota is used up.
    pub(crate) fn is_quota(&self) -> bool {
        self.code.starts_with("TooMany") && self.code != "TooManyRequestsException"
    }

    /// Whether the call may have changed something all the same.
    pub(crate) fn leaves_open(&self) -> bool {
        self.code.is_empty() || self.code.starts_with("Internal") || self.code.starts_with("Service")
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<CallError> for Error {
    fn from(failure: CallError) -> Self {
        let CallError { action, code, message } = failure;
        let text = format!("ELBv2 {action}: {code}: {message}");
        match code.as_str() {
            "" => Self::Unavailable(format!("AWS failed: ELBv2 {action}: {message}. Steerage retries.")),
            "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "TooManyRequestsException" => {
                Self::Throttled { after: None, message: text }
            }
            "AccessDenied" | "AccessDeniedException" | "UnauthorizedOperation" => Self::Denied(text),
            // AWS's message is left out: for a wrong signature it quotes the signed request with the session token.
            "SignatureDoesNotMatch"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "IncompleteSignature"
            | "MissingAuthenticationToken"
            | "AuthFailure"
            | "OptInRequired" => {
                Self::Denied(format!("ELBv2 {action}: {code}: AWS does not accept the credentials"))
            }
            // An Elastic IP address that something else uses.
            "ResourceInUse" if action == "CreateLoadBalancer" => rejected(&text),
            "DuplicateLoadBalancerName"
            | "DuplicateTargetGroupName"
            | "DuplicateListener"
            | "ResourceInUse"
            | "LoadBalancerNotFound"
            | "TargetGroupNotFound"
            | "ListenerNotFound"
            | "PriorityInUse" => Self::Conflict(text),
            "OperationNotPermitted" => Self::invalid(crate::reasons::OPERATION_NOT_PERMITTED, text),
            code if code.starts_with("TooMany") => Self::invalid(crate::reasons::QUOTA_EXCEEDED, text),
            code if code.starts_with("Invalid")
                || code.starts_with("Unsupported")
                || matches!(
                    code,
                    "ALPNPolicyNotSupported"
                        | "AllocationIdNotFound"
                        | "AvailabilityZoneNotSupported"
                        | "CertificateNotFound"
                        | "IncompatibleProtocols"
                        | "SSLPolicyNotFound"
                        | "SubnetNotFound"
                        | "ValidationError"
                ) =>
            {
                rejected(&text)
            }
            _ => Self::Unavailable(format!("AWS failed: {text}. Steerage retries.")),
        }
    }
}

/// Why AWS rejects a value, and what to do: AWS names the value in its text.
fn rejected(text: &str) -> Error {
    let text = text.trim_end_matches('.');
    let message = format!(
        "AWS rejects the request: {text}. What AWS accepted before stays as it is. Correct the annotation or --aws-… flag that names \
         the rejected value."
    );
    Error::invalid(crate::reasons::REJECTED_BY_PROVIDER, message)
}

/// The answer, or `None` if the error has the given "not found" code.
pub(super) fn unless_not_found<T, E, R>(
    action: &'static str,
    code: &str,
    answer: Result<T, SdkError<E, R>>,
) -> Result<Option<T>>
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: Debug + 'static,
{
    match answer.map_err(CallError::of(action)) {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.is(code) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// The error for an answer without the created object.
pub(super) fn empty(action: &'static str) -> CallError {
    CallError { action, code: String::new(), message: "AWS returned an empty answer".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: &str) -> Error {
        CallError { action: "CreateListener", code: code.to_owned(), message: "token=SECRET".to_owned() }
            .into()
    }

    #[test]
    fn codes_map_to_provider_errors() {
        for code in ["Throttling", "ThrottlingException", "RequestLimitExceeded"] {
            assert!(matches!(error(code), Error::Throttled { .. }), "{code}");
        }
        for code in ["AccessDenied", "ExpiredToken", "SignatureDoesNotMatch"] {
            assert!(matches!(error(code), Error::Denied(_)), "{code}");
        }
        for code in ["DuplicateListener", "TargetGroupNotFound"] {
            assert!(matches!(error(code), Error::Conflict(_)), "{code}");
        }
        assert_eq!(error("TooManyTargetGroups").reason(), "QuotaExceeded");
        for code in ["InvalidSubnet", "AllocationIdNotFound", "AvailabilityZoneNotSupported"] {
            assert_eq!(error(code).reason(), "RejectedByProvider", "{code}");
        }
        let in_use = |action| {
            Error::from(CallError { action, code: "ResourceInUse".to_owned(), message: String::new() })
        };
        assert_eq!(in_use("CreateLoadBalancer").reason(), "RejectedByProvider", "an Elastic IP address");
        assert!(matches!(in_use("DeleteTargetGroup"), Error::Conflict(_)));
        assert_eq!(error("OperationNotPermitted").reason(), "OperationNotPermitted");
        for code in ["", "InternalFailure", "ServiceUnavailable"] {
            assert!(matches!(error(code), Error::Unavailable(_)), "{code}");
        }
    }

    #[test]
    fn error_names_call_and_hides_secrets() {
        assert_eq!(
            error("Throttling").to_string(),
            "The provider limits calls: ELBv2 CreateListener: Throttling: token=SECRET. Steerage retries."
        );
        assert_eq!(
            error("SubnetNotFound").to_string(),
            "AWS rejects the request: ELBv2 CreateListener: SubnetNotFound: token=SECRET. What AWS accepted before stays as it is. \
             Correct the annotation or --aws-… flag that names the rejected value."
        );
        let told = error("SignatureDoesNotMatch").to_string();
        assert!(told.contains("CreateListener") && !told.contains("SECRET"), "{told}");
    }
}
