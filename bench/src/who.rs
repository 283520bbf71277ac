// SPDX-License-Identifier: Apache-2.0
//! The two sides of a comparison. Every other module names results, namespaces and API users by them.

/// The side that a program is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Who {
    /// Steerage's program.
    Ours,
    /// The program that it is compared with.
    Peer,
}

impl Who {
    /// Both sides.
    pub const ALL: [Self; 2] = [Self::Ours, Self::Peer];

    /// Key in JSON, and part of the names of namespaces and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Peer => "peer",
        }
    }

    /// User at the API server.
    pub fn user(self) -> &'static str {
        match self {
            Self::Ours => "bench-ours",
            Self::Peer => "bench-peer",
        }
    }

    /// Name of the program in tables of the agent.
    pub fn title(self) -> &'static str {
        match self {
            Self::Ours => "agent",
            Self::Peer => "kube-proxy",
        }
    }
}
