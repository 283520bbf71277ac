// SPDX-License-Identifier: Apache-2.0
//! Connections in conntrack that may have to end, because the rules no longer lead where they lead. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::plan::Frontend;

/// Frontends whose connections may be stale.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StaleFlows {
    /// UDP, each with the endpoints whose flows may stay.
    pub udp: BTreeMap<Frontend, Arc<[SocketAddr]>>,
    /// TCP and SCTP: a handshake that went on untranslated, while the rules were missing, has to begin anew.
    pub handshakes: BTreeSet<Frontend>,
}

impl StaleFlows {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.udp.is_empty() && self.handshakes.is_empty()
    }

    /// Adds others, which are newer.
    pub fn extend(&mut self, other: Self) {
        self.udp.extend(other.udp);
        self.handshakes.extend(other.handshakes);
    }

    /// Takes over what is newer about the same frontends.
    pub fn replace(&mut self, newer: &Self) {
        for (frontend, serving) in &mut self.udp {
            if let Some(newer) = newer.udp.get(frontend) {
                *serving = Arc::clone(newer);
            }
        }
    }
}
