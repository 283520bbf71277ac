// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between us and the kernel. Every fallible function of the crate returns [`Error`].

use std::fmt;

use nix::errno::Errno;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the netlink socket failed.
    #[error("{call}: {errno}")]
    Socket {
        /// The call.
        call: &'static str,
        /// Its error number.
        errno: Errno,
    },
    /// The kernel refused; of a batch, nothing was applied.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Somebody committed to nftables in this namespace since the generation that the batch was built on (ERESTART).
    /// Nothing was applied.
    #[error("the ruleset changed meanwhile: nothing was applied")]
    Stale,
    /// The ruleset changed while it was read, more often than we were willing to try again.
    #[error("{0}: the ruleset kept changing while it was read")]
    Torn(&'static str),
    /// The kernel dropped answers because our receive buffer was full (ENOBUFS): what happened is unknown.
    #[error("answers were lost: the receive buffer was full")]
    Overrun,
    /// The kernel did not answer in the way it should.
    #[error("no answer to: {0}")]
    NoAnswer(String),
    /// A request does not fit the 64 KiB of a netlink attribute.
    #[error("a request is too long for netlink")]
    TooLong,
}

impl Error {
    /// Whether the kernel says that something named in the request does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.errno == Errno::ENOENT)
    }

    /// Whether the kernel lacks what the request needs: a family that is switched off, an expression not built in.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Refused(refusal) if matches!(refusal.errno, Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP))
    }
}

/// The kernel's refusal of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The operation that was refused, in words.
    pub operation: String,
    /// The error number.
    pub errno: Errno,
    /// The kernel's own message, when it gave one (`NLMSGERR_ATTR_MSG`).
    pub message: Option<String>,
    /// Where in the operation's message the kernel found fault, in bytes (`NLMSGERR_ATTR_OFFS`).
    pub offset: Option<u32>,
    /// How many further operations of the batch were refused.
    pub others: usize,
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.errno)?;
        if let Some(message) = &self.message {
            write!(f, ": {message}")?;
        }
        if let Some(offset) = self.offset {
            write!(f, " (at byte {offset} of the request)")?;
        }
        if self.others > 0 {
            write!(f, " (and {} more)", self.others)?;
        }
        Ok(())
    }
}
