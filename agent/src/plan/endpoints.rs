// SPDX-License-Identifier: Apache-2.0
//! The endpoints that a Service's port leads to. Pure.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

/// Which of a port's endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selection {
    /// All that are usable: traffic policy Cluster.
    Cluster,
    /// Those on this node: traffic policy Local.
    Local,
}

/// Endpoints of a port of a Service, in the order of its slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoints {
    /// Which these are. All frontends of a port have the same endpoints of one selection.
    pub selection: Selection,
    /// Their addresses and ports.
    pub list: Arc<[SocketAddr]>,
}

impl Deref for Endpoints {
    type Target = [SocketAddr];

    fn deref(&self) -> &[SocketAddr] {
        &self.list
    }
}
