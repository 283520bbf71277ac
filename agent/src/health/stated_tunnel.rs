// SPDX-License-Identifier: Apache-2.0
//! What is stated of the node's end of edge hosts' tunnel. [`crate::kernel::EdgeTunnelKeeper`] finds it out, and [`super::statement`]
//! reads it and waits for its changes. Plain values.

use std::sync::Arc;

use steerage_model::{Family, TunnelReceiver};
use tokio::sync::watch;

use super::stated_ports::PerFamily;

/// What is stated at addresses of each family. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct StatedTunnel(Arc<watch::Sender<PerFamily<StatedReceiver>>>);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StatedReceiver {
    /// The number of the last change; 0 before the first.
    pub(super) change: u64,
    /// `None` before the agent has looked: whatever an earlier process has set up stays in the kernel.
    pub(super) receiver: Option<TunnelReceiver>,
}

impl StatedTunnel {
    /// States this at addresses of the family. The same again is no change.
    pub fn set(&self, family: Family, receiver: TunnelReceiver) {
        self.0.send_if_modified(|stated| {
            let stated = stated.get_mut(family);
            let is_change = stated.receiver != Some(receiver);
            if is_change {
                *stated = StatedReceiver { change: stated.change + 1, receiver: Some(receiver) };
            }
            is_change
        });
    }

    /// What is stated at addresses of the family.
    pub(super) fn get(&self, family: Family) -> StatedReceiver {
        *self.0.borrow().get(family)
    }

    /// Waits until something else is stated at addresses of the family than with this change.
    pub(super) async fn changed_since(&self, family: Family, known: u64) {
        let mut stated = self.0.subscribe();
        // The sender lives as long as `self`.
        let _ = stated.wait_for(|stated| stated.get(family).change != known).await;
    }
}
