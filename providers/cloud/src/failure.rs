// SPDX-License-Identifier: Apache-2.0
//! The provider's error for a cloud's. Each provider says what its cloud's codes mean; the words and the redaction are the same for
//! all. Pure.

use std::fmt;
use std::time::Duration;

use steerage_provider_api::Error;

use crate::{Cloud, reasons};

/// What an error of a cloud means for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The cloud limits the rate of calls, and may say when to call again.
    Throttled(Option<Duration>),
    /// The credentials lack a permission.
    Denied,
    /// The cloud does not accept the credentials.
    BadCredentials,
    /// The source of the credentials gave none: nothing was sent.
    NoCredentials,
    /// Somebody changed the resource meanwhile, or a read showed an old state.
    Conflict,
    /// The cloud forbids it for this resource, as with deletion protection.
    Forbidden,
    /// A quota is used up.
    QuotaExceeded,
    /// A network has no address left. Its reason is that of a quota.
    NoFreeAddress,
    /// The request is wrong.
    Rejected,
    /// The cloud answered with an error that nobody expects here. It changed nothing, and may pass.
    Unexpected,
    /// Anything else: it may pass, and no answer too. It may have changed something.
    Failed,
}

/// A cloud's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure<'a> {
    /// The cloud.
    pub cloud: Cloud,
    /// The call, such as `ELBv2 CreateListener`.
    pub call: &'a str,
    /// The cloud's code; empty without an answer.
    pub code: &'a str,
    /// The cloud's message, or what happened instead of an answer. Nothing of the request may be in it.
    pub message: &'a str,
}

/// What [`Meaning::BadCredentials`] tells after the cloud's name, and no other error does.
const NOT_ACCEPTED: &str = "does not accept the credentials";

/// What [`Meaning::Unexpected`] tells after the cloud's name, and no other error does.
const UNEXPECTED: &str = "gave an unexpected answer";

/// Whether the error tells of an unexpected answer: the call changed nothing.
pub fn is_unexpected_answer(error: &Error) -> bool {
    matches!(error, Error::Unavailable(message) if message.contains(UNEXPECTED))
}

/// Whether the error tells that the cloud does not accept the credentials: it is one of every call.
pub fn is_of_credentials(error: &Error) -> bool {
    matches!(error, Error::Denied(message) if message.contains(NOT_ACCEPTED))
}

impl Failure<'_> {
    /// The provider's error. A refusal says that what the cloud accepted before stays.
    pub fn error(&self, meaning: Meaning) -> Error {
        self.told(meaning, &format!(" What {} accepted before stays as it is.", self.cloud.title))
    }

    /// The same for a refusal after which something is missing that was there before.
    pub fn error_of_loss(&self, meaning: Meaning) -> Error {
        self.told(meaning, "")
    }

    fn told(&self, meaning: Meaning, stays: &str) -> Error {
        let Cloud { title, name } = self.cloud;
        let refused = |reason: &'static str, problem: &str, advice: &str| {
            let text = self.to_string();
            let text = text.trim_end_matches('.');
            Error::invalid(reason, format!("{problem}: {text}.{stays} {advice}"))
        };
        match meaning {
            Meaning::Throttled(after) => Error::throttled(after, self),
            Meaning::Denied => Error::denied(self),
            // The cloud's message is left out: for a wrong signature AWS's quotes the signed request with the session token.
            Meaning::BadCredentials => Error::Denied(format!(
                "{title} {NOT_ACCEPTED} ({}: {}). Nothing is changed. Check the source of the credentials and the clock; \
                 Steerage retries.",
                self.call, self.code
            )),
            // Not `Denied`: an outage of the source looks the same, and passes.
            Meaning::NoCredentials => Error::Unavailable(format!(
                "No credentials for {title} ({}: {}). Nothing is changed. Check which identity the controller has, and that the controller \
                 may use it; Steerage retries.",
                self.call, self.message
            )),
            Meaning::Conflict => Error::Conflict(self.to_string()),
            Meaning::Forbidden => refused(
                reasons::OPERATION_NOT_PERMITTED,
                &format!("{title} forbids the request"),
                "Lift what forbids it, or take the change back.",
            ),
            Meaning::QuotaExceeded => refused(
                reasons::QUOTA_EXCEEDED,
                &format!("A quota or limit of {title} is used up"),
                "Raise the quota that the message names, or delete what is no longer needed.",
            ),
            Meaning::NoFreeAddress => refused(
                reasons::QUOTA_EXCEEDED,
                &format!("A network of {title} has no free address"),
                "Add a subnet or addresses to the network that the message names, or delete what is no longer needed.",
            ),
            // The cloud names the value in its message.
            Meaning::Rejected => refused(
                reasons::REJECTED_BY_PROVIDER,
                &format!("{title} rejects the request"),
                &format!("Correct the annotation or --{name}-… flag that names the rejected value."),
            ),
            Meaning::Unexpected => Error::Unavailable(format!(
                "{title} {UNEXPECTED}: {self}. The call changed nothing. Steerage retries."
            )),
            Meaning::Failed => Error::Unavailable(format!("{title} failed: {self}. Steerage retries.")),
        }
    }
}

impl fmt::Display for Failure<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cloud: _, call, code, message } = self;
        match *code {
            "" => write!(f, "{call}: {message}"),
            code => write!(f, "{call}: {code}: {message}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Failure<'static> {
        let cloud = Cloud { title: "AWS", name: "aws" };
        Failure { cloud, call: "ELBv2 CreateListener", code: "Code", message: "token=SECRET." }
    }

    fn error(meaning: Meaning) -> Error {
        failure().error(meaning)
    }

    #[test]
    fn error_names_call_and_code_and_what_to_do() {
        let text = "ELBv2 CreateListener: Code: token=SECRET.";
        assert_eq!(
            error(Meaning::Throttled(None)).to_string(),
            format!("The provider limits calls: {text}. Steerage retries.")
        );
        assert_eq!(
            error(Meaning::Rejected).to_string(),
            format!(
                "AWS rejects the request: {text} What AWS accepted before stays as it is. Correct the annotation or --aws-… flag that \
                 names the rejected value."
            )
        );
        for (meaning, reason) in [
            (Meaning::Denied, "ProviderDenied"),
            (Meaning::Conflict, "ProviderConflict"),
            (Meaning::Forbidden, "OperationNotPermitted"),
            (Meaning::QuotaExceeded, "QuotaExceeded"),
            (Meaning::NoFreeAddress, "QuotaExceeded"),
            (Meaning::Failed, "ProviderUnavailable"),
            (Meaning::Unexpected, "ProviderUnavailable"),
        ] {
            let error = error(meaning);
            assert_eq!(error.reason(), reason);
            assert!(error.to_string().contains("ELBv2 CreateListener: Code"), "{error}");
        }
    }

    #[test]
    fn loss_is_not_told_as_what_stays() {
        let told = failure().error_of_loss(Meaning::QuotaExceeded);
        assert_eq!(told.reason(), "QuotaExceeded");
        assert_eq!(
            told.to_string(),
            "A quota or limit of AWS is used up: ELBv2 CreateListener: Code: token=SECRET. Raise the quota that the message names, or delete \
             what is no longer needed."
        );
    }

    /// To raise a quota adds no address.
    #[test]
    fn network_without_addresses_is_not_told_as_a_quota() {
        let told = error(Meaning::NoFreeAddress).to_string();
        assert!(told.starts_with("A network of AWS has no free address: "), "{told}");
        assert!(told.contains("Add a subnet") && !told.contains("quota"), "{told}");
    }

    #[test]
    fn refused_credentials_show_nothing_of_the_request() {
        assert!(!super::is_of_credentials(&error(Meaning::Denied)));
        let told = error(Meaning::BadCredentials);
        assert!(super::is_of_credentials(&told), "{told}");
        assert_eq!(
            told.to_string(),
            "AWS does not accept the credentials (ELBv2 CreateListener: Code). Nothing is changed. Check the source of the credentials and \
             the clock; Steerage retries."
        );
        assert_eq!(told.reason(), "ProviderDenied");
    }

    #[test]
    fn missing_credentials_are_retried_and_told_apart() {
        let told = error(Meaning::NoCredentials);
        assert!(told.to_string().starts_with("No credentials for AWS (ELBv2 CreateListener: "), "{told}");
        assert_eq!(told.reason(), Error::UNAVAILABLE);
    }
}
