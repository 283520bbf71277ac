// SPDX-License-Identifier: Apache-2.0
//! Another host that gets this host's flow exceptions: what it gets waits until its session sends it.

use std::time::Instant;

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use crate::peers::items::Item;

#[derive(Debug)]
pub(super) struct Follower {
    pub(super) items: Sender<Item>,
    /// Since the last complete list; `None` if it needs one.
    pub(super) listed: Option<Instant>,
}

impl Follower {
    /// Returns whether the item will be sent. If not, the host needs a complete list.
    pub(super) fn send(&mut self, item: Item) -> bool {
        match self.items.try_send(item) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Closed(_)) => {
                self.listed = None;
                false
            }
        }
    }
}
