// SPDX-License-Identifier: Apache-2.0
//! What can go wrong at a provider, sorted by what should happen next.

use std::time::Duration;

/// A provider's error. Its message is shown to the user in an event and a condition; it never holds a secret.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user asked for something that cannot be had: no retry helps until the Service or the configuration changes.
    #[error("{message}")]
    Invalid {
        /// A stable `CamelCase` reason, for example `NoFreeAddress`.
        reason: &'static str,
        /// What is wrong and what to do.
        message: String,
    },
    /// The provider asks for fewer calls.
    #[error("the provider throttles: {message}")]
    Throttled {
        /// When to come again, where the provider says so.
        after: Option<Duration>,
        /// The provider's words.
        message: String,
    },
    /// The credentials do not allow it.
    #[error("not allowed: {0}")]
    Denied(String),
    /// Somebody else changed the same thing at the same time; the next try sees it.
    #[error("changed by somebody else meanwhile: {0}")]
    Conflict(String),
    /// Anything that may pass by itself.
    #[error("{0}")]
    Unavailable(String),
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { reason, message: message.into() }
    }

    /// The stable `CamelCase` reason for events, conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid { reason, .. } => reason,
            Self::Throttled { .. } => "ProviderThrottled",
            Self::Denied(_) => "ProviderDenied",
            Self::Conflict(_) => "ProviderConflict",
            Self::Unavailable(_) => "ProviderUnavailable",
        }
    }
}
