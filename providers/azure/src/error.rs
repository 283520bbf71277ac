// SPDX-License-Identifier: Apache-2.0
//! Errors of requests and of operations, and the provider error that each becomes. Pure.

use std::time::Duration;

use http::{Response, StatusCode, header};
use serde_json::Value;
use steerage_model::shortened;
use steerage_provider_api::Error;
use steerage_provider_cloud::UsedUp;
use steerage_provider_cloud::failure::{Failure, Meaning};
use steerage_provider_cloud::http::TransportError;

use crate::AZURE;

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

/// Azure's code for a change that refers to what is being changed itself, or whose last change failed.
pub(crate) const NOT_READY: &str = "ReferencedResourceNotProvisioned";
/// Characters of Azure's message that are shown.
const SHOWN: usize = 600;

/// A failed request, or an operation that failed after its request was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallError {
    /// What was requested, such as `PUT loadBalancers`.
    action: &'static str,
    /// The status; `None` without an answer.
    status: Option<StatusCode>,
    /// Azure's code, such as `InUseSubnetCannotBeDeleted`; empty if there is none.
    code: String,
    /// The codes of its details.
    inner: Box<[String]>,
    message: String,
    /// What Azure names as wrong, besides the message.
    named: Box<[String]>,
    /// When to send it again.
    after: Option<Duration>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Answered,
    NoCredentials,
    /// The credentials are not accepted, or their source says so.
    BadCredentials,
    UsedUp,
}

/// The time in a `Retry-After`.
pub(crate) fn retry_after(answer: &Response<impl AsRef<[u8]>>) -> Option<Duration> {
    let text = answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

impl CallError {
    /// The error that an answer says.
    pub(crate) fn answered(action: &'static str, answer: &Response<impl AsRef<[u8]>>) -> Self {
        let body: Value = serde_json::from_slice(answer.body().as_ref()).unwrap_or_default();
        let of = body.get("error").unwrap_or(&body);
        let mut error = Self::of_body(action, of);
        if error.message.is_empty() && body.is_null() {
            error.message =
                shortened(String::from_utf8_lossy(answer.body().as_ref()).trim(), SHOWN).into_owned();
        }
        Self { status: Some(answer.status()), after: retry_after(answer), ..error }
    }

    /// The error of an operation that failed.
    pub(crate) fn of_operation(action: &'static str, operation: &Value) -> Self {
        let error = Self::of_body(action, operation.get("error").unwrap_or(&Value::Null));
        Self { status: Some(StatusCode::BAD_REQUEST), ..error }
    }

    /// The error of an operation that failed, and which Azure does not know any more.
    pub(crate) fn without_result(action: &'static str) -> Self {
        let message = "The change failed after Azure had accepted it, and why could not be read. The activity log has it.";
        Self {
            status: Some(StatusCode::BAD_REQUEST),
            code: "Unknown".to_owned(),
            ..Self::unusable(action, message)
        }
    }

    fn of_body(action: &'static str, error: &Value) -> Self {
        let get =
            |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut named = vec![get(error, "target")];
        let (mut message, mut inner) = (get(error, "message"), Vec::new());
        for detail in error.get("details").and_then(Value::as_array).into_iter().flatten().take(10) {
            inner.push(get(detail, "code"));
            named.extend([get(detail, "target"), get(detail, "message")]);
            let more = get(detail, "message");
            if !more.is_empty() && !message.contains(&more) {
                message = format!("{message} {more}");
            }
        }
        Self {
            code: get(error, "code"),
            inner: inner.into(),
            named: named.into(),
            ..Self::unusable(action, message)
        }
    }

    /// There is no answer.
    pub(crate) fn unanswered(action: &'static str, why: &TransportError) -> Self {
        Self::unusable(action, why.to_string())
    }

    /// No token was got. The request was not sent.
    pub(crate) fn without_credentials(action: &'static str, message: impl Into<String>) -> Self {
        Self { kind: Kind::NoCredentials, ..Self::unusable(action, message) }
    }

    /// The credentials are wrong.
    pub(crate) fn bad_credentials(action: &'static str, code: String) -> Self {
        Self { kind: Kind::BadCredentials, code, ..Self::unusable(action, "") }
    }

    /// An answer that cannot be read, or a request that cannot be made.
    pub(crate) fn unusable(action: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            action,
            status: None,
            code: String::new(),
            inner: Box::default(),
            message,
            named: Box::default(),
            after: None,
            kind: Kind::Answered,
        }
    }

    /// A request that was not sent, because Azure would refuse it.
    pub(crate) fn used_up(action: &'static str, UsedUp { after, .. }: UsedUp) -> Self {
        let message = "Steerage's rate of requests to Azure is reached; the request was not sent. Steerage retries. If this lasts, look at \
                       steerage_controller_azure_api_budget_rate (reads below 20 or writes below 3: Azure throttles; otherwise many Services \
                       changed at once).";
        Self { after: Some(after), kind: Kind::UsedUp, ..Self::unusable(action, message) }
    }

    /// Everything that Azure says is wrong.
    pub(crate) fn text(&self) -> String {
        format!("{} {}", self.message, self.named.join(" "))
    }

    /// Whether Azure's code is this one, also where another one is around it.
    pub(crate) fn is_code(&self, code: &str) -> bool {
        self.inner.iter().chain([&self.code]).any(|of| of.eq_ignore_ascii_case(code))
    }

    pub(crate) fn is_unauthorized(&self) -> bool {
        self.status == Some(StatusCode::UNAUTHORIZED)
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status == Some(StatusCode::NOT_FOUND) && self.code != "ResourceGroupNotFound"
    }

    /// Whether what was asked for is not there any more.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.status, Some(StatusCode::NOT_FOUND | StatusCode::GONE))
    }

    /// Whether the change was for another version: reading it again helps at once.
    pub(crate) fn is_changed(&self) -> bool {
        self.status == Some(StatusCode::PRECONDITION_FAILED) || self.is_code("PreconditionFailed")
    }

    /// When Azure wants the request again, if it says so.
    pub(crate) fn after(&self) -> Option<Duration> {
        self.after
    }

    /// Whether something else changed the resource, or is changing it: reading it again helps.
    pub(crate) fn is_stale(&self) -> bool {
        const BUSY: [&str; 8] = [
            "AnotherOperationInProgress",
            "CanceledAndSupersededDueToAnotherOperation",
            "InUse",
            "OperationPreempted",
            "PreconditionFailed",
            NOT_READY,
            "Canceled",
            "RetryableError",
        ];
        self.status == Some(StatusCode::PRECONDITION_FAILED)
            || BUSY.iter().any(|code| self.code.eq_ignore_ascii_case(code))
            || self.is_code(NOT_READY)
    }

    /// Whether Azure had too many requests.
    pub(crate) fn is_throttled(&self) -> bool {
        self.kind != Kind::UsedUp && matches!(self.meaning(), Meaning::Throttled(_))
    }

    /// Whether Azure refuses what was requested, so that the same request would be refused again: it is wrong, a policy forbids it, or it
    /// refers to what the identity may not use. With less in it, it may be taken.
    pub(crate) fn is_rejected(&self) -> bool {
        let is_about_content = ["LinkedAuthorizationFailed", "RequestDisallowedByPolicy"];
        matches!(self.meaning(), Meaning::Rejected | Meaning::QuotaExceeded)
            || is_about_content.iter().any(|code| self.code.eq_ignore_ascii_case(code))
    }

    fn meaning(&self) -> Meaning {
        match self.kind {
            Kind::NoCredentials => return Meaning::NoCredentials,
            Kind::BadCredentials => return Meaning::BadCredentials,
            Kind::UsedUp => return Meaning::Throttled(self.after),
            Kind::Answered => {}
        }
        let Some(status) = self.status else { return Meaning::Failed };
        let is = |codes: &[&str]| codes.iter().any(|code| self.code.eq_ignore_ascii_case(code));
        if is(&["ScopeLocked", "RequestDisallowedByPolicy", "ReadOnlyDisabledSubscription"]) {
            return Meaning::Forbidden;
        }
        // Also of an operation, which has no status.
        if is(&["LinkedAuthorizationFailed"]) {
            return Meaning::Denied;
        }
        let is_limit =
            ["Limit", "Quota"].iter().any(|part| self.code.contains(part)) && status.is_client_error();
        match status.as_u16() {
            // Azure says so of what is being changed, not of too many requests.
            429 if self.is_stale() => Meaning::Conflict,
            429 => Meaning::Throttled(self.after),
            503 if self.after.is_some() => Meaning::Throttled(self.after),
            401 => Meaning::BadCredentials,
            403 if is(&["AuthorizationFailed"]) => Meaning::Denied,
            _ if self.is_stale() => Meaning::Conflict,
            _ if is_limit => Meaning::QuotaExceeded,
            403 => Meaning::Denied,
            // The resource group or the subscription that a flag names.
            404 if is(&["ResourceGroupNotFound", "SubscriptionNotFound", "InvalidResourceReference"]) => {
                Meaning::Rejected
            }
            404 => Meaning::Conflict,
            400 | 405 | 409 | 422 if is(&["InternalServerError"]) => Meaning::Failed,
            400 | 405 | 409 | 422 => Meaning::Rejected,
            _ => Meaning::Failed,
        }
    }
}

impl From<CallError> for Error {
    fn from(failure: CallError) -> Self {
        if failure.kind == Kind::UsedUp {
            return Self::Throttled { after: failure.after, message: failure.message };
        }
        let message = shortened(failure.message.trim_end_matches([' ', '.']), SHOWN);
        let code = match (failure.status, failure.code.as_str()) {
            (Some(status), "") => status.as_u16().to_string(),
            (_, code) => code.to_owned(),
        };
        Failure { cloud: AZURE, call: failure.action, code: &code, message: &message }
            .error(failure.meaning())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn failure(status: u16, headers: &[(&str, &str)], body: &str) -> CallError {
        let mut answer = Response::builder().status(status);
        for (name, value) in headers {
            answer = answer.header(*name, *value);
        }
        CallError::answered("PUT loadBalancers", &answer.body(body.as_bytes()).unwrap())
    }

    #[test]
    fn every_error_says_what_to_do() {
        for (status, code, reason) in [
            (400, "InvalidResourceName", "RejectedByProvider"),
            (400, "PublicIPAddressInUse", "RejectedByProvider"),
            (400, "SubnetIsFull", "RejectedByProvider"),
            (400, "PublicIPCountLimitReached", "QuotaExceeded"),
            (400, "LoadBalancerRuleCountLimitReached", "QuotaExceeded"),
            (400, "ReferencedResourceNotProvisioned", "ProviderConflict"),
            (401, "ExpiredAuthenticationToken", "ProviderDenied"),
            (403, "AuthorizationFailed", "ProviderDenied"),
            (403, "LinkedAuthorizationFailed", "ProviderDenied"),
            (400, "LinkedAuthorizationFailed", "ProviderDenied"),
            (403, "RequestDisallowedByPolicy", "OperationNotPermitted"),
            (404, "ResourceNotFound", "ProviderConflict"),
            (404, "ResourceGroupNotFound", "RejectedByProvider"),
            (409, "AnotherOperationInProgress", "ProviderConflict"),
            (409, "CanceledAndSupersededDueToAnotherOperation", "ProviderConflict"),
            (409, "ScopeLocked", "OperationNotPermitted"),
            (412, "PreconditionFailed", "ProviderConflict"),
            (429, "RetryableError", "ProviderConflict"),
            (429, "TooManyRequests", "ProviderThrottled"),
            (500, "InternalServerError", "ProviderUnavailable"),
            (504, "GatewayTimeout", "ProviderUnavailable"),
        ] {
            let body = json!({ "error": { "code": code, "message": "Something of MINE.", "details": [] } })
                .to_string();
            let error = Error::from(failure(status, &[], &body));
            assert_eq!(error.reason(), reason, "{status} {code}");
            assert!(error.to_string().contains(code), "{error}");
        }
        let plain = Error::from(failure(502, &[], "<html>bad gateway</html>"));
        assert!(plain.to_string().contains("PUT loadBalancers: 502: <html>bad gateway"), "{plain}");
        let throttled = Error::from(failure(429, &[("retry-after", "17")], ""));
        assert!(matches!(throttled, Error::Throttled { after: Some(after), .. } if after.as_secs() == 17));
    }

    /// As <https://github.com/coreos/tectonic-installer/issues/1460> shows it.
    #[test]
    fn code_within_a_retryable_error_is_found() {
        let message = "Cannot proceed with operation because resource /ips/a used by resource /lb is not in Succeeded state.";
        let body = json!({ "error": { "code": "RetryableError", "message": "A retryable error occurred.",
            "details": [{ "code": "ReferencedResourceNotProvisioned", "message": message }] } });
        let failure = failure(429, &[], &body.to_string());
        assert!(failure.is_code(NOT_READY) && failure.is_stale() && !failure.is_throttled());
        assert!(Error::from(failure).to_string().contains("/ips/a"));
    }

    #[test]
    fn details_and_targets_say_what_is_wrong() {
        let body = json!({ "error": { "code": "InvalidRequestFormat", "message": "Cannot parse the request.", "target": "/a/b",
            "details": [{ "code": "X", "message": "10.0.0.9 is wrong", "target": "/c/d" }] } });
        let failure = failure(400, &[], &body.to_string());
        let text = failure.text();
        assert!(["/a/b", "10.0.0.9", "/c/d"].iter().all(|part| text.contains(part)), "{text}");
        assert!(failure.is_rejected() && Error::from(failure).to_string().contains("10.0.0.9 is wrong"));
        let operation =
            json!({ "status": "Failed", "error": { "code": "Canceled", "message": "superseded" } });
        assert!(CallError::of_operation("PUT loadBalancers", &operation).is_stale());
    }

    #[test]
    fn refused_credentials_show_nothing_of_the_request() {
        let body =
            json!({ "error": "invalid_client", "error_description": "secret SECRET is wrong" }).to_string();
        let told = Error::from(failure(401, &[], &body)).to_string();
        assert!(!told.contains("SECRET"), "{told}");
        let told =
            Error::from(CallError::bad_credentials("POST token", "invalid_client".to_owned())).to_string();
        assert!(told.contains("does not accept the credentials (POST token: invalid_client)"), "{told}");
    }
}
