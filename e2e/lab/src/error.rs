// SPDX-License-Identifier: Apache-2.0
//! Errors of labs. Their messages say what to do next.

use std::io;

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of a lab's verb.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed, on a file, a mount or a namespace.
    #[error("{doing}: {source}")]
    Io {
        /// The attempted action.
        doing: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A command failed.
    #[error("`{command}` failed ({outcome}): {output}")]
    Command {
        /// The command line.
        command: String,
        /// Its exit status.
        outcome: String,
        /// The end of its output.
        output: String,
    },
    /// A wait timed out.
    #[error("{what} did not happen within {seconds} s; {hint}")]
    Timeout {
        /// The awaited event.
        what: String,
        /// The limit, in seconds.
        seconds: u64,
        /// Where to look.
        hint: String,
    },
    /// The action is not possible in this state of the lab or the machine; the text says what to do.
    #[error("{0}")]
    Refused(String),
    /// A certificate could not be made.
    #[error("making the certificate of {subject}: {source}")]
    Certificate {
        /// The subject of the certificate.
        subject: String,
        /// The error of the library.
        source: rcgen::Error,
    },
    /// A file of the lab is not the expected JSON.
    #[error("{path} is not readable as JSON: {source}")]
    Json {
        /// The file.
        path: String,
        /// The error of the parser.
        source: serde_json::Error,
    },
}

/// Adds the attempted action to an [`io::Error`].
pub trait Doing<T> {
    /// Wraps the error with the attempted action.
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
