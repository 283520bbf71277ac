// SPDX-License-Identifier: Apache-2.0
//! Why a list or a watch failed, and what follows from it. Pure.

use kube::Error as ClientError;
use kube_runtime::watcher::Error;

use super::connection::TransportError;

/// Why a list or a watch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The resource version, or the token of a list, is too old (410).
    Expired,
    /// The API server does not serve this resource (404).
    Missing,
    /// The API server finds the request invalid (400, 422).
    Invalid,
    /// This program may not read the objects (401, 403).
    Denied,
    /// The API server has no capacity, or none of its backends has (429, 503).
    Busy,
    /// The API server answered with another error.
    Refused,
    /// Unreadable data.
    Malformed,
    /// No data for too long.
    Idle,
    /// The watch ended before it brought data.
    Empty,
    /// No response, or the connection broke.
    Cut,
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        match error {
            Error::NoResourceVersion => Self::Malformed,
            Error::WatchError(status) => Self::of_status(status.code),
            Error::InitialListFailed(error) | Error::WatchStartFailed(error) | Error::WatchFailed(error) => {
                match error {
                    ClientError::Api(status) => Self::of_status(status.code),
                    ClientError::SerdeError(_) => Self::Malformed,
                    _ => Self::of_connection(error),
                }
            }
        }
    }

    fn of_connection(error: &ClientError) -> Self {
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = next {
            match error.downcast_ref() {
                Some(TransportError::Silence(_)) => return Self::Idle,
                Some(TransportError::Empty) => return Self::Empty,
                _ => next = error.source(),
            }
        }
        Self::Cut
    }

    fn of_status(code: u16) -> Self {
        match code {
            410 => Self::Expired,
            404 => Self::Missing,
            400 | 422 => Self::Invalid,
            401 | 403 => Self::Denied,
            429 | 503 => Self::Busy,
            // The library takes an unreadable line of a watch for a status with defaults only.
            0 => Self::Malformed,
            _ => Self::Refused,
        }
    }

    /// Whether the version that the watch has reached is of no use any more.
    pub(super) fn needs_list(self) -> bool {
        matches!(self, Self::Expired | Self::Malformed)
    }

    /// Whether the API server may never accept the same watch again.
    pub(super) fn may_last(self) -> bool {
        matches!(self, Self::Invalid | Self::Refused)
    }

    /// Whether a response that began ended too early.
    pub(super) fn is_end(self) -> bool {
        matches!(self, Self::Idle | Self::Empty | Self::Cut)
    }

    /// The label in metrics.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::Denied => "denied",
            Self::Busy => "busy",
            Self::Refused => "refused",
            Self::Malformed => "malformed",
            Self::Idle => "idle",
            Self::Empty => "empty",
            Self::Cut => "cut",
        }
    }
}
