// SPDX-License-Identifier: Apache-2.0
//! Errors of requests, and the provider error that each becomes. Pure.

use std::time::Duration;

use http::{Response, StatusCode, header};
use serde_json::Value;
use steerage_model::shortened;
use steerage_provider_api::Error;
use steerage_provider_cloud::failure::{Failure, Meaning};
use steerage_provider_cloud::http::TransportError;
use steerage_provider_cloud::{CallLimit, UsedUp};

use crate::OPENSTACK;
use crate::client::KEYSTONE;

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

/// Characters of OpenStack's message that are shown.
const SHOWN: usize = 600;

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallError {
    /// API and action, such as `Octavia POST loadbalancers`.
    call: String,
    /// The status, without an answer `None`.
    status: Option<StatusCode>,
    /// Neutron's type, such as `OverQuota`; empty if there is none.
    kind: String,
    message: String,
    /// When to send it again.
    after: Option<Duration>,
    is_used_up: bool,
    /// Whether it answers to the request for a list, which exists where the API does.
    is_list: bool,
}

impl CallError {
    /// The error that an answer says.
    pub(crate) fn answered(call: String, answer: &Response<impl AsRef<[u8]>>) -> Self {
        let (kind, message) = text(answer.body().as_ref());
        let seconds = answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let after = seconds.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        Self { call, status: Some(answer.status()), kind, message, after, is_used_up: false, is_list: false }
    }

    /// There is no answer.
    pub(crate) fn unanswered(call: String, why: &TransportError) -> Self {
        Self::unusable(call, why.to_string())
    }

    /// An answer that cannot be read, or a request that cannot be made.
    pub(crate) fn unusable(call: String, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            call,
            status: None,
            kind: String::new(),
            message,
            after: None,
            is_used_up: false,
            is_list: false,
        }
    }

    /// A request that was not sent: its rate is reached, or too many requests are without an answer.
    pub(crate) fn used_up(call: String, UsedUp { after, limit }: UsedUp) -> Self {
        let message = match limit {
            CallLimit::Rate => {
                "The request was not sent: Steerage's rate of requests to OpenStack is reached. Steerage retries. If this lasts, look at \
                 steerage_controller_openstack_api_budget_rate (below 20: the cloud throttles; otherwise many Services changed at once)."
            }
            CallLimit::InFlight => {
                "The request was not sent: too many requests are without an answer. Steerage retries. If this lasts, look at \
                 steerage_controller_openstack_api_request_duration_seconds (seconds: OpenStack is slow)."
            }
        };
        Self { after: Some(after), is_used_up: true, ..Self::unusable(call, message) }
    }

    pub(crate) fn status(&self) -> Option<StatusCode> {
        self.status
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status == Some(StatusCode::NOT_FOUND)
    }

    /// The failure of a request for a list.
    pub(crate) fn of_list(self) -> Self {
        Self { is_list: true, ..self }
    }

    /// Whether something else changes the load balancer just now: Octavia takes one change at a time.
    pub(crate) fn is_busy(&self) -> bool {
        let says = |text: &str| self.message.contains(text);
        self.status == Some(StatusCode::CONFLICT) && (says("immutable") || says("Invalid state PENDING"))
    }

    /// Whether nobody knows if it was carried out: there is no answer, or only one of a proxy.
    pub(crate) fn is_unanswered(&self) -> bool {
        !self.is_used_up && self.status.is_none_or(|status| matches!(status.as_u16(), 502 | 504))
    }

    /// Whether OpenStack finds the request wrong, so that nothing was changed by it.
    pub(crate) fn is_rejected(&self) -> bool {
        self.meaning() == Meaning::Rejected
    }

    /// Whether it is about a rule of a security group that exists.
    pub(crate) fn is_existing_rule(&self) -> bool {
        self.status == Some(StatusCode::CONFLICT) && self.kind == "SecurityGroupRuleExists"
    }

    /// Whether OpenStack refuses it, also because of a quota.
    pub(crate) fn is_refused(&self) -> bool {
        matches!(self.meaning(), Meaning::Rejected | Meaning::QuotaExceeded | Meaning::NoFreeAddress)
    }

    /// Whether a quota is reached.
    pub(crate) fn is_quota(&self) -> bool {
        self.meaning() == Meaning::QuotaExceeded
    }

    /// Whether the cloud had too many requests.
    pub(crate) fn is_throttled(&self) -> bool {
        !self.is_used_up && matches!(self.meaning(), Meaning::Throttled(_))
    }

    /// Whether it was not made because there are too many.
    pub(crate) fn must_wait(&self) -> bool {
        self.is_used_up || self.is_throttled()
    }

    fn meaning(&self) -> Meaning {
        let Some(status) = self.status else { return Meaning::Failed };
        let says = |part: &str| self.message.to_ascii_lowercase().contains(part);
        let is_quota = self.kind.contains("Quota") || says("quota has been met") || says("quota exceeded");
        match status.as_u16() {
            401 => Meaning::BadCredentials,
            403 | 409 | 413 if is_quota => Meaning::QuotaExceeded,
            403 => Meaning::Denied,
            // The external network or the subnet has no address left.
            409 if self.kind.contains("IpAddressGenerationFailure") => Meaning::NoFreeAddress,
            404 | 409 | 412 => self.meaning_of_conflict(status),
            413 | 429 => Meaning::Throttled(self.after),
            503 if self.after.is_some() => Meaning::Throttled(self.after),
            // 501: the provider driver lacks an option.
            400 | 422 | 501 => Meaning::Rejected,
            _ => Meaning::Failed,
        }
    }

    /// What was read may be gone or changed since: then reading it again helps. Nothing helps a request that names something else which
    /// does not exist, or whose object cannot be beside one that does.
    fn meaning_of_conflict(&self, status: StatusCode) -> Meaning {
        let names = |what: &[&str]| what.iter().any(|what| self.message.contains(what));
        let is_creation = self.call.contains(" POST ");
        match status {
            // Keystone, or the root of an API, is not where it should be.
            _ if self.is_list
                || self.call.starts_with(KEYSTONE.name)
                || self.call.ends_with(" GET versions") =>
            {
                Meaning::Failed
            }
            StatusCode::NOT_FOUND if self.call.contains("floatingips") => {
                if self.kind == "FloatingIPNotFound" { Meaning::Conflict } else { Meaning::Rejected }
            }
            StatusCode::NOT_FOUND if names(&["Subnet"]) => Meaning::Rejected,
            StatusCode::NOT_FOUND if is_creation && !names(&["Load Balancer", "Listener", "Pool"]) => {
                Meaning::Rejected
            }
            // Somebody attached another one meanwhile.
            StatusCode::CONFLICT if self.kind == "FloatingIPPortAlreadyAssociated" => Meaning::Conflict,
            StatusCode::CONFLICT if is_creation && !self.is_busy() => Meaning::Rejected,
            _ => Meaning::Conflict,
        }
    }

    fn error(&self, meaning: Meaning) -> Error {
        if self.is_used_up {
            return Error::Throttled { after: self.after, message: self.message.clone() };
        }
        let message = self.message.trim_end_matches([' ', '.']);
        let message = shortened(message, SHOWN);
        let code = match (self.status, self.kind.as_str()) {
            (None, _) => String::new(),
            (Some(status), "") => status.as_u16().to_string(),
            (Some(status), kind) => format!("{} {kind}", status.as_u16()),
        };
        Failure { cloud: OPENSTACK, call: &self.call, code: &code, message: &message }.error(meaning)
    }
}

impl From<CallError> for Error {
    fn from(failure: CallError) -> Self {
        failure.error(failure.meaning())
    }
}

/// Type and message of an error, as the three services write it.
fn text(body: &[u8]) -> (String, String) {
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    let get = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    if let Some(fault) = get(&parsed, "faultstring") {
        return (String::new(), fault);
    }
    for (key, kind) in [("NeutronError", "type"), ("error", "title")] {
        if let Some(error) = parsed.get(key) {
            let kind = if key == "error" { None } else { get(error, kind) };
            let message = get(error, "message").or_else(|| error.as_str().map(str::to_owned));
            return (kind.unwrap_or_default(), message.unwrap_or_default());
        }
    }
    (String::new(), shortened(String::from_utf8_lossy(body).trim(), SHOWN).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_that_was_not_sent_says_which_limit_it_waits_for() {
        let told = |limit| {
            let used_up = UsedUp { after: Duration::from_secs(1), limit };
            Error::from(CallError::used_up("Octavia GET pools".to_owned(), used_up)).to_string()
        };
        let (rate, in_flight) = ("rate of requests to OpenStack", "too many requests are without an answer");
        let by_rate = told(CallLimit::Rate);
        assert!(by_rate.contains(rate) && !by_rate.contains(in_flight), "{by_rate}");
        let by_answers = told(CallLimit::InFlight);
        assert!(by_answers.contains(in_flight) && !by_answers.contains(rate), "{by_answers}");
    }

    fn failure(status: u16, headers: &[(&str, &str)], body: &str) -> CallError {
        let mut answer = Response::builder().status(status);
        for (name, value) in headers {
            answer = answer.header(*name, *value);
        }
        CallError::answered("Octavia POST listeners".to_owned(), &answer.body(body.as_bytes()).unwrap())
    }

    /// Bodies as the services of version 2025.2 wrote them.
    #[test]
    fn every_error_says_what_to_do() {
        let octavia =
            |text: &str| format!(r#"{{"faultcode":"Client","faultstring":"{text}","debuginfo":null}}"#);
        let neutron = |kind: &str, text: &str| {
            format!(r#"{{"NeutronError":{{"type":"{kind}","message":"{text}","detail":""}}}}"#)
        };
        let immutable = octavia("Load Balancer 1 is immutable and cannot be updated.");
        for (status, headers, body, reason, part) in [
            (
                400,
                &[][..],
                octavia("169.254.169.254 is not a valid option for member address"),
                "RejectedByProvider",
                "169.254.169.254",
            ),
            (401, &[], String::new(), "ProviderDenied", "does not accept the credentials"),
            (
                403,
                &[],
                octavia("Policy does not allow this request to be performed."),
                "ProviderDenied",
                "Policy does not allow",
            ),
            (
                403,
                &[],
                octavia("Quota has been met for resources: Load Balancer"),
                "QuotaExceeded",
                "Load Balancer",
            ),
            (404, &[], octavia("Load Balancer 1 not found."), "ProviderConflict", "not found"),
            (409, &[], immutable.clone(), "ProviderConflict", "immutable"),
            (
                409,
                &[],
                neutron("OverQuota", "Quota exceeded for resources: ['floatingip']."),
                "QuotaExceeded",
                "floatingip",
            ),
            (
                409,
                &[],
                neutron("IpAddressGenerationFailure", "No more IP addresses available on network 1."),
                "QuotaExceeded",
                "A network of OpenStack has no free address: Octavia POST listeners: 409 IpAddressGenerationFailure: No more IP",
            ),
            (413, &[("retry-after", "7")], String::new(), "ProviderThrottled", "Octavia POST listeners: 413"),
            (429, &[], "slow down".to_owned(), "ProviderThrottled", "slow down"),
            (
                501,
                &[],
                octavia(
                    "Provider 'ovn' does not support a requested option: OVN provider does not support HTTP",
                ),
                "RejectedByProvider",
                "OVN provider",
            ),
            (503, &[("retry-after", "7")], String::new(), "ProviderThrottled", "503"),
            (503, &[], "<html>no backend</html>".to_owned(), "ProviderUnavailable", "no backend"),
            (500, &[], octavia("oops"), "ProviderUnavailable", "oops"),
        ] {
            let error = Error::from(failure(status, headers, &body));
            assert_eq!(error.reason(), reason, "{status} {body}");
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(failure(409, &[], &immutable).is_busy());
        let pending = octavia("Invalid state PENDING_UPDATE of loadbalancer resource 1");
        assert!(failure(409, &[], &pending).is_busy());
        assert!(!failure(409, &[], &neutron("OverQuota", "x")).is_busy());
        let throttled = Error::from(failure(429, &[("retry-after", "7")], ""));
        assert!(matches!(throttled, Error::Throttled { after: Some(after), .. } if after.as_secs() == 7));
    }

    #[test]
    fn only_what_was_read_can_have_changed() {
        for (call, status, kind, text, reason) in [
            ("Octavia PUT pools", 404, "", "Pool 1 not found.", "ProviderConflict"),
            ("Octavia DELETE listeners", 409, "", "in use", "ProviderConflict"),
            ("Octavia PUT members", 404, "", "Subnet 1 not found.", "RejectedByProvider"),
            ("Octavia POST loadbalancers", 404, "", "Subnet 1 not found.", "RejectedByProvider"),
            ("Octavia POST listeners", 404, "", "Load Balancer 1 not found.", "ProviderConflict"),
            ("Octavia POST listeners", 409, "", "Another Listener uses the port", "RejectedByProvider"),
            ("Octavia POST pools", 409, "", "Load Balancer 1 is immutable and cannot", "ProviderConflict"),
            (
                "Neutron PUT floatingips",
                404,
                "ExternalGatewayForFloatingIPNotFound",
                "no",
                "RejectedByProvider",
            ),
            ("Neutron PUT floatingips", 404, "FloatingIPNotFound", "no", "ProviderConflict"),
            ("Neutron POST floatingips", 409, "FloatingIPPortAlreadyAssociated", "has", "ProviderConflict"),
            ("Keystone POST tokens", 404, "", "", "ProviderUnavailable"),
            ("Octavia GET versions", 404, "", "", "ProviderUnavailable"),
        ] {
            let body = format!(r#"{{"NeutronError":{{"type":"{kind}","message":"{text}","detail":""}}}}"#);
            let answer = Response::builder().status(status).body(body.into_bytes()).unwrap();
            let failure = CallError::answered(call.to_owned(), &answer);
            assert_eq!(Error::from(failure.clone()).reason(), reason, "{call} {text}");
            assert_eq!(Error::from(failure.of_list()).reason(), "ProviderUnavailable");
        }
    }

    #[test]
    fn refused_login_shows_nothing_of_the_request() {
        let body = r#"{"error":{"code":401,"message":"password SECRET is wrong","title":"Unauthorized"}}"#;
        let told = Error::from(failure(401, &[], body)).to_string();
        assert!(!told.contains("SECRET"), "{told}");
    }
}
