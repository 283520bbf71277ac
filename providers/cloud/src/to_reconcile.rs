// SPDX-License-Identifier: Apache-2.0
//! Owners that a provider asks the controller to reconcile, where the cloud itself notifies nobody. No I/O.

use std::sync::{Mutex, PoisonError};

use futures::StreamExt;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::stream::{self, BoxStream};
use steerage_provider_api::Owner;

/// What `Provider::changes` returns, and where a provider adds to it.
#[derive(Debug)]
pub struct ToReconcile {
    sender: UnboundedSender<Owner>,
    receiver: Mutex<Option<UnboundedReceiver<Owner>>>,
}

impl Default for ToReconcile {
    fn default() -> Self {
        let (sender, receiver) = unbounded();
        Self { sender, receiver: Mutex::new(Some(receiver)) }
    }
}

impl ToReconcile {
    /// Asks for a reconciliation of this owner.
    pub fn add(&self, owner: Owner) {
        // Without a receiver nobody follows changes.
        let _ = self.sender.unbounded_send(owner);
    }

    /// The owners, for the first caller; nothing for others. Never ends.
    pub fn stream(&self) -> BoxStream<'static, Owner> {
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        let owners = receiver.map_or_else(|| stream::empty().boxed(), StreamExt::boxed);
        owners.chain(stream::pending()).boxed()
    }
}
