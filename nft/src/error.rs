// SPDX-License-Identifier: Apache-2.0
//! The errors of this crate. Every fallible function returns [`Error`].

use std::fmt;

use nix::errno::Errno;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the netlink socket failed.
    #[error("{call}: {errno}")]
    Socket {
        /// Name of the system call.
        call: &'static str,
        /// Error number.
        errno: Errno,
    },
    /// The kernel rejected an operation. If it was part of a batch, nothing of the batch was applied.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Someone committed to nftables in this network namespace after the generation of the batch (ERESTART). Nothing was
    /// applied.
    #[error("the ruleset changed since it was read; nothing was applied")]
    StaleGeneration,
    /// Others changed the ruleset during every attempt at this listing.
    #[error("{0}: the ruleset changed during every attempt")]
    DumpInterrupted(&'static str),
    /// The kernel dropped replies or notifications because the receive buffer was full (ENOBUFS). Their content is unknown.
    #[error("netlink messages were lost because the receive buffer was full")]
    Overrun,
    /// The kernel sent no reply, or not the expected one.
    #[error("{0}: no reply from the kernel")]
    NoReply(String),
    /// A part of the request does not fit the 64 KiB of a netlink attribute.
    #[error("the request exceeds the 64 KiB of a netlink attribute")]
    TooLong,
}

impl Error {
    /// Whether an object that the request names does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Kernel(error) if error.errno == Errno::ENOENT)
    }

    /// Whether an object exists already, or belongs to another connection. Without `CAP_NET_ADMIN` everything seems to.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Kernel(error) if matches!(error.errno, Errno::EEXIST | Errno::EPERM))
    }

    /// Whether the kernel lacks what the request needs, such as a disabled family or an expression that is not built in.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Kernel(error) if matches!(error.errno, Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP))
    }
}

/// The kernel's error for one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelError {
    /// The rejected operation, in words.
    pub operation: String,
    /// Error number.
    pub errno: Errno,
    /// The kernel's message, if it sent one (`NLMSGERR_ATTR_MSG`).
    pub message: Option<String>,
    /// Offset of the fault in the operation's message, in bytes (`NLMSGERR_ATTR_OFFS`).
    pub offset: Option<u32>,
    /// Number of other operations of the batch that the kernel rejected.
    pub others: usize,
}

impl std::error::Error for KernelError {}

impl fmt::Display for KernelError {
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
