// SPDX-License-Identifier: Apache-2.0
//! Errors of calls, and the provider error that each becomes.

use std::error::Error as StdError;
use std::fmt::Debug;
use std::time::Duration;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_elasticloadbalancingv2::error::{ProvideErrorMetadata, SdkError};
use steerage_model::{chain, shortened};
use steerage_provider_api::Error;
use steerage_provider_cloud::UsedUp;
use steerage_provider_cloud::failure::{Failure, Meaning};

use super::{APIS, ELBV2};
use crate::AWS;

/// EC2 appends some thousand encoded characters to a refusal.
const ENCODED: &str = "Encoded authorization failure message";

/// The code of a call that was not sent because the source of the credentials gave none. No code of AWS.
const NO_CREDENTIALS: &str = "NoCredentials";

/// Characters of AWS's message that are shown: some repeat what was sent.
const SHOWN: usize = 600;

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

/// A failed call.
#[derive(Clone, Debug)]
pub(crate) struct CallError {
    action: &'static str,
    /// Code from AWS, or [`NO_CREDENTIALS`]; empty if AWS did not reply.
    code: String,
    message: String,
    /// When to make a call that was not made.
    after: Option<Duration>,
}

/// The code of a call that was not made, because AWS would refuse it, or because no time is left.
const USED_UP: &str = "RateUsedUp";

impl CallError {
    /// A call of this kind, such as `reads of ELBv2`, that was not made.
    pub(crate) fn used_up(kind: &'static str, UsedUp { after, .. }: UsedUp) -> Self {
        let message = format!(
            "AWS's rate for {kind} is reached; the call was not sent. Steerage retries. If this lasts, look at \
             steerage_controller_aws_api_budget_rate."
        );
        Self { action: kind, code: USED_UP.to_owned(), message, after: Some(after) }
    }

    /// A call that was not made, because the provider call that needs it has no time left.
    pub(crate) fn out_of_time() -> Self {
        let message = "The change needs more calls than one try has time for. Steerage continues.".to_owned();
        Self { action: "", code: USED_UP.to_owned(), message, after: Some(Duration::from_secs(1)) }
    }

    /// A call that AWS did not answer within this time. It may have made it.
    pub(crate) fn unanswered(action: &'static str, within: Duration) -> Self {
        let message = format!("no answer within {}s", within.as_secs());
        Self { action, code: String::new(), message, after: None }
    }

    /// Turns the error of the call `action` into a `CallError`.
    pub(super) fn of<E, R>(action: &'static str) -> impl FnOnce(SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
        R: Debug + 'static,
    {
        move |error| {
            let code = error.code().unwrap_or_else(|| code_without_answer(&error)).to_owned();
            // The chain contains nothing of the request, so no secret.
            let message = error.message().map_or_else(|| chain(&error), str::to_owned);
            Self { action, code, message, after: None }
        }
    }

    /// Turns the error of the call `action` to EC2 into a `CallError`.
    pub(super) fn of_ec2(action: &'static str) -> impl FnOnce(steerage_ec2::Error) -> Self {
        move |error| {
            let code = error.code().unwrap_or_else(|| code_without_answer(&error)).to_owned();
            let message = error.message().map_or_else(|| chain(&error), str::to_owned);
            Self { action, code, message, after: None }
        }
    }

    /// A failure that a stand-in makes up. Without a code, AWS did not answer.
    #[cfg(any(test, feature = "stand-in"))]
    pub(crate) fn made_up(action: &'static str, code: &str, message: impl Into<String>) -> Self {
        Self { action, code: code.to_owned(), message: message.into(), after: None }
    }

    pub(crate) fn is(&self, code: &str) -> bool {
        self.code == code
    }

    /// Whether a resource that the call names does not exist, or is not visible yet.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(
            self.code.as_str(),
            "LoadBalancerNotFound" | "TargetGroupNotFound" | "ListenerNotFound" | "InvalidGroup.NotFound"
        )
    }

    /// Whether AWS had too many calls.
    pub(crate) fn is_throttled(&self) -> bool {
        self.code != USED_UP && matches!(self.meaning(), Meaning::Throttled(_))
    }

    /// Whether AWS takes no such call now, whatever it is for: it has too many, or does not accept the credentials.
    pub(crate) fn is_of_all_calls(&self) -> bool {
        matches!(self.meaning(), Meaning::Throttled(_) | Meaning::BadCredentials | Meaning::NoCredentials)
    }

    /// Whether a quota is used up.
    pub(crate) fn is_quota(&self) -> bool {
        is_quota(&self.code)
    }

    /// Whether the call may have changed something all the same.
    pub(crate) fn leaves_open(&self) -> bool {
        self.code.is_empty()
            || self.code.starts_with("Internal")
            || self.code.starts_with("Service")
            || self.code == "Unavailable"
            || ["Timeout", "Gateway"].iter().any(|part| self.code.contains(part))
    }

    /// The error of a request that AWS refuses, where its code alone leaves open whether it would accept it later.
    pub(crate) fn rejected(&self) -> Error {
        self.error(Meaning::Rejected)
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<CallError> for Error {
    fn from(failure: CallError) -> Self {
        failure.error(failure.meaning())
    }
}

impl CallError {
    fn error(&self, meaning: Meaning) -> Error {
        if self.code == USED_UP {
            return Error::Throttled { after: self.after, message: self.message.clone() };
        }
        let message = self.message.split(ENCODED).next().unwrap_or_default().trim_end_matches([' ', '.']);
        let (call, message) = (format!("{} {}", api_of(self.action), self.action), shortened(message, SHOWN));
        Failure { cloud: AWS, call: &call, code: &self.code, message: &message }.error(meaning)
    }

    fn meaning(&self) -> Meaning {
        match self.code.as_str() {
            USED_UP => Meaning::Throttled(self.after),
            "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "TooManyRequestsException" => {
                Meaning::Throttled(None)
            }
            "AccessDenied" | "AccessDeniedException" | "UnauthorizedOperation" => Meaning::Denied,
            "SignatureDoesNotMatch"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "IncompleteSignature"
            | "MissingAuthenticationToken"
            | "AuthFailure"
            | "OptInRequired" => Meaning::BadCredentials,
            NO_CREDENTIALS => Meaning::NoCredentials,
            // An Elastic IP address that something else uses.
            "ResourceInUse" if matches!(self.action, "CreateLoadBalancer" | "SetSubnets") => {
                Meaning::Rejected
            }
            // A new security group, which ELBv2 does not see yet.
            "InvalidSecurityGroup" if matches!(self.action, "CreateLoadBalancer" | "SetSecurityGroups") => {
                Meaning::Conflict
            }
            "DuplicateLoadBalancerName"
            | "DuplicateTargetGroupName"
            | "DuplicateListener"
            | "ResourceInUse"
            | "LoadBalancerNotFound"
            | "TargetGroupNotFound"
            | "ListenerNotFound"
            | "PriorityInUse"
            | "DependencyViolation"
            | "InvalidGroup.Duplicate"
            | "InvalidGroup.InUse"
            | "InvalidGroup.NotFound"
            | "InvalidPermission.Duplicate"
            | "InvalidPermission.NotFound" => Meaning::Conflict,
            "OperationNotPermitted" => Meaning::Forbidden,
            code if is_quota(code) => Meaning::QuotaExceeded,
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
                Meaning::Rejected
            }
            _ if self.leaves_open() => Meaning::Failed,
            _ => Meaning::Unexpected,
        }
    }
}

/// What stands for AWS's code where AWS did not reply.
fn code_without_answer(error: &(dyn StdError + 'static)) -> &'static str {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<CredentialsError>() {
            return NO_CREDENTIALS;
        }
        cause = error.source();
    }
    ""
}

/// The name of the API that has this action.
fn api_of(action: &str) -> &'static str {
    APIS.iter().map(|api| api.api).find(|api| api.actions.contains(&action)).unwrap_or(ELBV2.api).name
}

fn is_quota(code: &str) -> bool {
    (code.starts_with("TooMany") && code != "TooManyRequestsException")
        || matches!(
            code,
            "RulesPerSecurityGroupLimitExceeded"
                | "SecurityGroupLimitExceeded"
                | "SecurityGroupsPerInterfaceLimitExceeded"
        )
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
    CallError { action, code: String::new(), message: "AWS returned an empty answer".to_owned(), after: None }
}

#[cfg(test)]
mod tests {
    use steerage_provider_cloud::CallLimit;
    use steerage_provider_cloud::failure::is_unexpected_answer;

    use super::*;

    fn error(code: &str) -> Error {
        CallError::made_up("CreateListener", code, "token=SECRET").into()
    }

    fn error_of(action: &'static str, code: &str) -> Error {
        CallError::made_up(action, code, "").into()
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
        let elastic_ip = error_of("CreateLoadBalancer", "ResourceInUse");
        assert_eq!(elastic_ip.reason(), "RejectedByProvider");
        assert!(matches!(error_of("DeleteTargetGroup", "ResourceInUse"), Error::Conflict(_)));
        assert_eq!(error("OperationNotPermitted").reason(), "OperationNotPermitted");
        for code in ["", "InternalFailure", "ServiceUnavailable", "RequestTimeout"] {
            assert!(
                matches!(error(code), Error::Unavailable(_)) && !is_unexpected_answer(&error(code)),
                "{code}"
            );
        }
        assert!(is_unexpected_answer(&error("SomethingElse")));
    }

    #[test]
    fn codes_of_ec2_map_to_provider_errors() {
        for code in ["RequestLimitExceeded", "Throttling"] {
            assert!(matches!(error_of("DescribeSecurityGroups", code), Error::Throttled { .. }), "{code}");
        }
        for code in ["UnauthorizedOperation", "AuthFailure"] {
            assert!(matches!(error_of("CreateSecurityGroup", code), Error::Denied(_)), "{code}");
        }
        for (action, code) in [
            ("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
            ("AuthorizeSecurityGroupIngress", "InvalidPermission.Duplicate"),
            ("CreateSecurityGroup", "InvalidGroup.Duplicate"),
            ("DeleteSecurityGroup", "DependencyViolation"),
            ("DeleteSecurityGroup", "InvalidGroup.InUse"),
            ("RevokeSecurityGroupIngress", "InvalidPermission.NotFound"),
            ("CreateLoadBalancer", "InvalidSecurityGroup"),
            ("SetSecurityGroups", "InvalidSecurityGroup"),
        ] {
            assert!(matches!(error_of(action, code), Error::Conflict(_)), "{action}: {code}");
        }
        for (action, code) in [
            ("AuthorizeSecurityGroupIngress", "RulesPerSecurityGroupLimitExceeded"),
            ("CreateSecurityGroup", "SecurityGroupLimitExceeded"),
            ("SetSecurityGroups", "SecurityGroupsPerInterfaceLimitExceeded"),
        ] {
            assert_eq!(error_of(action, code).reason(), "QuotaExceeded", "{code}");
        }
        for code in ["InvalidVpcID.NotFound", "InvalidParameterValue"] {
            assert_eq!(error_of("CreateSecurityGroup", code).reason(), "RejectedByProvider", "{code}");
        }
        for code in ["InternalError", "Unavailable"] {
            assert!(matches!(error_of("CreateSecurityGroup", code), Error::Unavailable(_)), "{code}");
        }
    }

    #[test]
    fn codes_of_both_apis_are_classified() {
        let failure = |code| CallError::made_up("CreateSecurityGroup", code, "");
        assert!(failure("InvalidGroup.NotFound").is_not_found());
        assert!(!failure("InvalidGroup.Duplicate").is_not_found());
        for code in ["TooManyTargets", "RulesPerSecurityGroupLimitExceeded", "SecurityGroupLimitExceeded"] {
            assert!(failure(code).is_quota(), "{code}");
        }
        for code in ["TooManyRequestsException", "RequestLimitExceeded"] {
            assert!(!failure(code).is_quota(), "{code}");
        }
        for code in ["", "InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"] {
            assert!(failure(code).leaves_open(), "{code}");
        }
        assert!(!failure("InvalidGroup.Duplicate").leaves_open());
    }

    #[test]
    fn refusal_of_ec2_is_cut_before_its_encoded_part() {
        let told =
            "You are not authorized to perform this operation. Encoded authorization failure message: x5Y";
        let failure = CallError::made_up("CreateSecurityGroup", "UnauthorizedOperation", told);
        let shown = Error::from(failure).to_string();
        let wanted = "EC2 CreateSecurityGroup: UnauthorizedOperation: You are not authorized to perform this operation.";
        assert!(shown.contains(wanted) && !shown.contains("Encoded") && !shown.contains(".."), "{shown}");
    }

    #[test]
    fn call_that_was_not_sent_names_its_kind_and_no_times() {
        let used_up = UsedUp { after: Duration::from_secs(12), limit: CallLimit::Rate };
        let error = Error::from(CallError::used_up("reads of ELBv2", used_up));
        assert!(matches!(&error, Error::Throttled { after: Some(after), .. } if after.as_secs() == 12));
        assert_eq!(
            error.to_string(),
            "AWS's rate for reads of ELBv2 is reached; the call was not sent. Steerage retries. If this lasts, look at \
             steerage_controller_aws_api_budget_rate."
        );
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
