// SPDX-License-Identifier: Apache-2.0
//! What can fail.

use std::io;

/// An error of the data plane.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused the program or one of its maps.
    #[error("the eBPF program cannot be loaded")]
    Load(#[from] aya::EbpfError),
    /// The kernel refused the program.
    #[error("the eBPF program is refused")]
    Program(#[from] aya::programs::ProgramError),
    /// The traffic control layer refused the program's hook.
    #[error("the eBPF program cannot be attached")]
    Attach(#[from] aya::programs::tc::TcError),
    /// A pinned link cannot be used.
    #[error("the pinned link cannot be used")]
    Link(#[from] aya::programs::links::LinkError),
    /// A map cannot be opened.
    #[error("a map of the eBPF program cannot be opened")]
    Map(#[from] aya::maps::MapError),
    /// The object file lacks something: it is of another version than this crate.
    #[error("the eBPF object file has no {0}")]
    Missing(&'static str),
    /// An operation on a map or a file failed.
    #[error("cannot {doing} {what}")]
    Io {
        /// What was done.
        doing: &'static str,
        /// To what.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A map has no room for more.
    #[error("{0} is full")]
    Full(&'static str),
}

impl Error {
    pub(crate) fn io(doing: &'static str, what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { doing, what, source }
    }
}
