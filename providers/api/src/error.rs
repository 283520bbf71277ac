// SPDX-License-Identifier: Apache-2.0
//! The errors of providers, by what the controller does next.

use std::fmt;
use std::time::Duration;

/// The reason of [`Error::Invalid`] if the Service's load balancer is another controller's, and is not adopted: nobody changes its targets.
pub const ADOPTION_REFUSED: &str = "AdoptionRefused";

/// A provider's error. Users see its message in events and conditions; it never contains a secret.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The request is unsupported: retried when the Service changes, and at the next resync.
    #[error("{message}")]
    Invalid {
        /// A stable `CamelCase` reason, for example `NoFreeAddress`.
        reason: &'static str,
        /// What is wrong, and what to do.
        message: String,
    },
    /// The provider limits the rate of calls: retried later. [`Error::throttled`] makes one with the provider's text.
    #[error("{message}")]
    Throttled {
        /// When to retry, if the provider says so.
        after: Option<Duration>,
        /// What happened, and what happens now.
        message: String,
    },
    /// The credentials lack a permission, or are not accepted: retried, because that may be corrected. [`Error::denied`] makes one for
    /// a missing permission.
    #[error("{0}")]
    Denied(String),
    /// The object changed concurrently: retried with its new version after the backoff.
    #[error("The resource changed, is changing or is gone: {0}. Steerage reads it again and retries.")]
    Conflict(String),
    /// What is under way in the provider has to end first, such as a change or a deletion that Steerage began: retried after the backoff.
    #[error("{0}. Steerage retries when that has ended.")]
    Busy(String),
    /// Any error that may pass: retried with backoff.
    #[error("{0}")]
    Unavailable(String),
}

impl Error {
    /// The reason of [`Error::Unavailable`].
    pub const UNAVAILABLE: &str = "ProviderUnavailable";

    /// The reason of [`Error::Throttled`].
    pub const THROTTLED: &str = "ProviderThrottled";

    /// An [`Error::Invalid`].
    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { reason, message: message.into() }
    }

    /// An [`Error::Throttled`], with the provider's text.
    pub fn throttled(after: Option<Duration>, what: impl fmt::Display) -> Self {
        Self::Throttled { after, message: format!("The provider limits calls: {what}. Steerage retries.") }
    }

    /// An [`Error::Denied`] for a missing permission, which the provider's text names.
    pub fn denied(what: impl fmt::Display) -> Self {
        Self::Denied(format!("The provider denied permission: {what}. Grant it; Steerage retries."))
    }

    /// The stable `CamelCase` reason for events, conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid { reason, .. } => reason,
            Self::Throttled { .. } => Self::THROTTLED,
            Self::Denied(_) => "ProviderDenied",
            Self::Conflict(_) => "ProviderConflict",
            Self::Busy(_) => "ProviderBusy",
            Self::Unavailable(_) => Self::UNAVAILABLE,
        }
    }
}
