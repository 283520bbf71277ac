// SPDX-License-Identifier: Apache-2.0
//! A target as AWS names it. No I/O.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// A target. Steerage registers instances without a port, so each has its group's port, and the instance alone names the target. A
/// target that somebody registered on another port counts as the same.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum TargetId {
    /// An EC2 instance.
    Instance(String),
    /// A pod's address and port.
    Pod(SocketAddr),
}

/// The names for users of targets: of nodes, and addresses with ports of pods.
pub(crate) type TargetNames = BTreeMap<TargetId, String>;

impl TargetId {
    /// From AWS's description.
    pub(crate) fn of(id: &str, port: Option<u16>) -> Self {
        match (id.parse::<IpAddr>(), port) {
            (Ok(address), Some(port)) => Self::Pod(SocketAddr::new(address, port)),
            _ => Self::Instance(id.to_owned()),
        }
    }

    /// What AWS's messages call it.
    pub(crate) fn id(&self) -> String {
        match self {
            Self::Instance(id) => id.clone(),
            Self::Pod(address) => address.ip().to_string(),
        }
    }

    /// The port, of a pod.
    pub(crate) fn port(&self) -> Option<u16> {
        match self {
            Self::Instance(_) => None,
            Self::Pod(address) => Some(address.port()),
        }
    }
}

/// For logs.
impl fmt::Debug for TargetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for TargetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Instance(id) => f.write_str(id),
            Self::Pod(address) => write!(f, "{address}"),
        }
    }
}
