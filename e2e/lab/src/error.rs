// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a lab, in words that say what to do next.

use std::io;

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of a lab's verb.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, a mount, a namespace: the operating system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was tried.
        doing: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A command ended with an error.
    #[error("`{command}` failed ({outcome}): {output}")]
    Command {
        /// The command line.
        command: String,
        /// Its exit status.
        outcome: String,
        /// The end of what it said.
        output: String,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s; {hint}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long, in seconds.
        seconds: u64,
        /// Where to look.
        hint: String,
    },
    /// The lab is not in a state in which this can be done; the text says what to do.
    #[error("{0}")]
    Refused(String),
    /// A certificate could not be made.
    #[error("making the certificate of {subject}: {source}")]
    Certificate {
        /// Whose certificate.
        subject: String,
        /// The library's answer.
        source: rcgen::Error,
    },
    /// A file of the lab does not hold what it should.
    #[error("{path} is not readable as JSON: {source}")]
    Json {
        /// The file.
        path: String,
        /// The parser's answer.
        source: serde_json::Error,
    },
}

/// Gives an [`io::Error`] the words of what was tried.
pub trait Doing<T> {
    /// Wraps the error with what was being done.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: what(), source })
    }
}

impl<T> Doing<T> for nix::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|errno| Error::Io { doing: what(), source: errno.into() })
    }
}
