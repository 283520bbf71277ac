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

use crate::{GCE, reasons};

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

/// Characters of Google's message that are shown.
const SHOWN: usize = 600;

/// A failed request, or an operation that failed after its request was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallError {
    /// The method, such as `forwardingRules.insert`.
    pub(crate) action: &'static str,
    /// The status; `None` without an answer.
    status: Option<StatusCode>,
    /// Google's reason, such as `resourceInUseByAnotherResource`; empty if there is none.
    reason: String,
    message: String,
    /// When to send it again.
    after: Option<Duration>,
    is_used_up: bool,
    has_no_credentials: bool,
}

impl CallError {
    /// The error that an answer says.
    pub(crate) fn answered(action: &'static str, answer: &Response<impl AsRef<[u8]>>) -> Self {
        let (reason, message) = text(answer.body().as_ref());
        let seconds = answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let after = seconds.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        Self { status: Some(answer.status()), reason, after, ..Self::unusable(action, message) }
    }

    /// The error of an operation; `None` if it succeeded, or is not done.
    pub(crate) fn of_operation(action: &'static str, operation: &Value) -> Option<Self> {
        let first = operation.get("error")?.get("errors")?.get(0)?;
        let get = |key: &str| first.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let status = operation.get("httpErrorStatusCode").and_then(Value::as_u64);
        let status = status.and_then(|status| StatusCode::from_u16(u16::try_from(status).ok()?).ok());
        let status = status.or(Some(StatusCode::BAD_REQUEST));
        Some(Self { status, reason: get("code"), ..Self::unusable(action, get("message")) })
    }

    /// There is no answer.
    pub(crate) fn unanswered(action: &'static str, why: &TransportError) -> Self {
        Self::unusable(action, why.to_string())
    }

    /// No credentials were found, or they gave no token. The request was not sent.
    pub(crate) fn without_credentials(action: &'static str, message: String) -> Self {
        Self { has_no_credentials: true, ..Self::unusable(action, message) }
    }

    /// An answer that cannot be read, or a request that cannot be made.
    pub(crate) fn unusable(action: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            action,
            status: None,
            reason: String::new(),
            message,
            after: None,
            is_used_up: false,
            has_no_credentials: false,
        }
    }

    /// A request that was not sent, because Google would refuse it.
    pub(crate) fn used_up(action: &'static str, UsedUp { after, .. }: UsedUp) -> Self {
        let message = "Steerage's rate of requests to GCE is reached; the request was not sent. Steerage retries. If this lasts, look at \
                       steerage_controller_gce_api_budget_rate (below 20: Google throttles; otherwise many Services changed at once).";
        Self { after: Some(after), is_used_up: true, ..Self::unusable(action, message) }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status == Some(StatusCode::NOT_FOUND) || self.is("notFound") || self.is("resourceNotFound")
    }

    /// Whether a resource of the name exists.
    pub(crate) fn is_existing(&self) -> bool {
        self.is("alreadyExists") || self.is("resourceAlreadyExists")
    }

    /// Whether something else uses the resource.
    pub(crate) fn is_in_use(&self) -> bool {
        self.is("resourceInUseByAnotherResource") || self.is("resourceInUse")
    }

    /// Whether something else has the address that is requested.
    fn has_taken_address(&self) -> bool {
        self.is("ipInUseByAnotherResource")
    }

    /// Whether a change of the same resource has not ended, or what was read is old: reading again helps.
    pub(crate) fn is_stale(&self) -> bool {
        self.is("resourceNotReady")
            || self.is("conditionNotMet")
            || self.is("resourceOperationRateExceeded")
            || self.status == Some(StatusCode::PRECONDITION_FAILED)
    }

    /// Whether the request may have been carried out, or may still be.
    pub(crate) fn may_have_effect(&self) -> bool {
        let is_sent = !self.is_used_up && !self.has_no_credentials;
        is_sent && self.status.is_none_or(|status| status.is_server_error())
    }

    /// Whether the credentials lack the permission.
    pub(crate) fn is_denied(&self) -> bool {
        self.meaning() == Meaning::Denied
    }

    /// Whether Google had too many requests.
    pub(crate) fn is_throttled(&self) -> bool {
        !self.is_used_up && matches!(self.meaning(), Meaning::Throttled(_))
    }

    /// Whether the request was not made, or refused only because there were too many: what is known stays so.
    pub(crate) fn is_unmade(&self) -> bool {
        self.is_used_up || self.is_throttled()
    }

    /// Whether a quota has no room for it, so that nothing was changed by it.
    pub(crate) fn is_beyond_quota(&self) -> bool {
        self.meaning() == Meaning::QuotaExceeded
    }

    /// Whether Google finds the request wrong, so that nothing was changed by it.
    pub(crate) fn is_rejected(&self) -> bool {
        self.meaning() == Meaning::Rejected || self.is_not_found()
    }

    /// An answer has `camelCase`, an operation `SCREAMING_CASE`.
    fn is(&self, reason: &str) -> bool {
        let letters = |text: &str| text.replace('_', "").to_ascii_lowercase();
        letters(&self.reason) == letters(reason)
    }

    fn meaning(&self) -> Meaning {
        if self.has_no_credentials {
            return Meaning::NoCredentials;
        }
        let Some(status) = self.status else { return Meaning::Failed };
        let is_one_of = |reasons: &[&str]| reasons.iter().any(|reason| self.is(reason));
        if is_one_of(&["rateLimitExceeded", "userRateLimitExceeded", "operationRateExceeded"]) {
            return Meaning::Throttled(self.after);
        }
        if is_one_of(&["quotaExceeded", "limitExceeded", "resourceExhausted"]) {
            return Meaning::QuotaExceeded;
        }
        if self.is("ipSpaceExhausted") {
            return Meaning::NoFreeAddress;
        }
        if self.is_stale() || self.is_existing() {
            return Meaning::Conflict;
        }
        if self.is_in_use() {
            return Meaning::Failed;
        }
        // With 400 or 409: reading again does not help.
        if self.has_taken_address() {
            return Meaning::Rejected;
        }
        match status.as_u16() {
            401 => Meaning::BadCredentials,
            403 => Meaning::Denied,
            429 => Meaning::Throttled(self.after),
            503 if self.after.is_some() => Meaning::Throttled(self.after),
            // A list, or what a flag or a creation names, such as a region or a network.
            404 if self.action.ends_with("ist") || self.action == "regions.get" => Meaning::Rejected,
            404 if self.action.ends_with(".insert") && !self.names_own() => Meaning::Rejected,
            404 | 409 | 412 => Meaning::Conflict,
            400 | 422 => Meaning::Rejected,
            _ => Meaning::Failed,
        }
    }

    /// Whether the message names a resource that Steerage makes: it was there when it was read.
    fn names_own(&self) -> bool {
        let own = ["/backendServices/", "/healthChecks/", "/networkEndpointGroups/", "/addresses/"];
        own.iter().any(|part| self.message.contains(part))
    }

    /// The provider's error where something is missing without the request that was there before.
    pub(crate) fn error_of_loss(&self) -> Error {
        self.told(|failure| failure.error_of_loss(self.meaning()))
    }

    fn told(&self, error: impl FnOnce(Failure<'_>) -> Error) -> Error {
        if self.is_used_up {
            return Error::Throttled { after: self.after, message: self.message.clone() };
        }
        let message = self.message.trim_end_matches([' ', '.']);
        let message = shortened(message, SHOWN);
        let code = match (self.status, self.reason.as_str()) {
            (None, _) => String::new(),
            (Some(status), "") => status.as_u16().to_string(),
            (Some(status), reason) => format!("{} {reason}", status.as_u16()),
        };
        let failure = Failure { cloud: GCE, call: self.action, code: &code, message: &message };
        if self.has_taken_address() {
            let message = format!(
                "Something else has the requested address: {failure}. What GCE accepted before stays as it is. Request another address, or \
                 delete what uses this one. Look for it in `gcloud compute forwarding-rules list`, `gcloud compute addresses list` and \
                 `gcloud compute instances list`."
            );
            return Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message);
        }
        error(failure)
    }
}

impl From<CallError> for Error {
    fn from(failure: CallError) -> Self {
        failure.told(|told| told.error(failure.meaning()))
    }
}

/// Reason and message of an answer.
fn text(body: &[u8]) -> (String, String) {
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(error) = parsed.get("error") else {
        return (String::new(), shortened(String::from_utf8_lossy(body).trim(), SHOWN).into_owned());
    };
    let get = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let first = error.get("errors").and_then(|all| all.get(0));
    let reason = first.and_then(|first| get(first, "reason")).or_else(|| get(error, "status"));
    let message = get(error, "message").or_else(|| first.and_then(|first| get(first, "message")));
    (reason.unwrap_or_default(), message.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use steerage_provider_cloud::CallLimit;

    use super::*;

    fn answered(action: &'static str, status: u16, reason: &str, message: &str) -> CallError {
        let errors = [json!({ "domain": "global", "reason": reason, "message": message })];
        let body = json!({ "error": { "code": status, "message": message, "errors": errors } });
        let answer = Response::builder().status(status).body(body.to_string().into_bytes());
        CallError::answered(action, &answer.unwrap())
    }

    fn done(action: &'static str, status: u64, code: &str, message: &str) -> CallError {
        let errors = [json!({ "code": code, "message": message })];
        let operation =
            json!({ "status": "DONE", "httpErrorStatusCode": status, "error": { "errors": errors } });
        CallError::of_operation(action, &operation).unwrap()
    }

    #[test]
    fn every_error_says_what_to_do() {
        let (fr, bs, hc) =
            ("forwardingRules.insert", "regionBackendServices.patch", "regionHealthChecks.delete");
        for (failure, reason, part) in [
            (
                answered(fr, 400, "invalid", "Invalid value for field 'ports'"),
                "RejectedByProvider",
                "'ports'",
            ),
            (answered(fr, 400, "resourceNotReady", "not ready"), "ProviderConflict", "not ready"),
            (
                answered(hc, 400, "resourceInUseByAnotherResource", "used by x"),
                "ProviderUnavailable",
                "used by x",
            ),
            (answered(fr, 401, "authError", "token SECRET"), "ProviderDenied", "does not accept"),
            (answered(fr, 403, "forbidden", "Required permission"), "ProviderDenied", "Required permission"),
            (
                answered(fr, 403, "quotaExceeded", "Quota 'FORWARDING_RULES'"),
                "QuotaExceeded",
                "FORWARDING_RULES",
            ),
            (answered(fr, 403, "rateLimitExceeded", "slow down"), "ProviderThrottled", "slow down"),
            (
                answered(fr, 404, "notFound", "'projects/p/global/networks/n' was not found"),
                "RejectedByProvider",
                "networks/n",
            ),
            (
                answered(fr, 404, "notFound", "'projects/p/regions/r/backendServices/b' was not found"),
                "ProviderConflict",
                "backendServices/b",
            ),
            (answered(bs, 404, "notFound", "gone"), "ProviderConflict", "gone"),
            (
                answered("regions.get", 404, "notFound", "'projects/p/regions/r' was not found"),
                "RejectedByProvider",
                "--gce-",
            ),
            (answered("addresses.list", 404, "notFound", "no project"), "RejectedByProvider", "no project"),
            (answered(fr, 409, "alreadyExists", "exists"), "ProviderConflict", "exists"),
            (answered(bs, 412, "conditionNotMet", "Invalid fingerprint."), "ProviderConflict", "fingerprint"),
            (answered(fr, 429, "rateLimitExceeded", "slow"), "ProviderThrottled", "slow"),
            (answered(fr, 503, "backendError", "try later"), "ProviderUnavailable", "try later"),
            (
                done(fr, 403, "QUOTA_EXCEEDED", "Quota 'STATIC_ADDRESSES' exceeded"),
                "QuotaExceeded",
                "STATIC_ADDRESSES",
            ),
            (
                done(fr, 400, "IP_SPACE_EXHAUSTED", "IP space of 'subnetworks/s' is exhausted"),
                "QuotaExceeded",
                "A network of GCE has no free address",
            ),
            (
                done(fr, 400, "IP_IN_USE_BY_ANOTHER_RESOURCE", "IP is used"),
                "AddressNotAvailable",
                "IP is used",
            ),
            (
                done("addresses.insert", 409, "IP_IN_USE_BY_ANOTHER_RESOURCE", "IP is used by a VM"),
                "AddressNotAvailable",
                "Request another address",
            ),
            (done(hc, 400, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "used"), "ProviderUnavailable", "used"),
            (done(bs, 412, "CONDITION_NOT_MET", "stale"), "ProviderConflict", "stale"),
            (done(fr, 409, "RESOURCE_ALREADY_EXISTS", "exists"), "ProviderConflict", "exists"),
            (done(fr, 403, "RATE_LIMIT_EXCEEDED", "slow"), "ProviderThrottled", "slow"),
            (done(fr, 503, "INTERNAL_ERROR", "oops"), "ProviderUnavailable", "oops"),
        ] {
            let error = Error::from(failure.clone());
            assert_eq!(error.reason(), reason, "{failure:?}");
            assert!(error.to_string().contains(part), "{error}");
            assert!(!error.to_string().contains("SECRET"), "{error}");
        }
    }

    #[test]
    fn reasons_of_answers_and_operations_are_the_same() {
        assert!(answered("a.delete", 400, "resourceInUseByAnotherResource", "").is_in_use());
        assert!(done("a.delete", 400, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "").is_in_use());
        assert!(done("a.insert", 409, "RESOURCE_ALREADY_EXISTS", "").is_existing());
        assert!(answered("a.insert", 409, "alreadyExists", "").is_existing());
        assert!(answered("a.delete", 404, "notFound", "").is_not_found());
        assert!(CallError::of_operation("a.insert", &json!({ "status": "DONE" })).is_none());
    }

    #[test]
    fn request_that_was_not_sent_makes_nothing_unknown() {
        let used_up = UsedUp { after: Duration::from_secs(1), limit: CallLimit::Rate };
        assert!(CallError::used_up("a.insert", used_up).is_unmade());
        assert!(answered("a.insert", 429, "rateLimitExceeded", "slow").is_unmade());
        assert!(!answered("a.insert", 503, "backendError", "oops").is_unmade());
    }

    #[test]
    fn time_to_wait_is_read() {
        let answer = Response::builder().status(429).header("retry-after", "7").body(Vec::new()).unwrap();
        let error = Error::from(CallError::answered("a.get", &answer));
        assert!(matches!(error, Error::Throttled { after: Some(after), .. } if after.as_secs() == 7));
    }
}
