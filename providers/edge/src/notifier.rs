// SPDX-License-Identifier: Apache-2.0
//! Notifies subscribers of owners whose load balancer changed at the provider's side.

use std::sync::{Mutex, PoisonError};

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use steerage_provider_api::Owner;
use tokio::sync::mpsc;

#[derive(Debug, Default)]
pub(crate) struct Notifier {
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Owner>>>,
}

impl Notifier {
    /// Sends `owner` to every subscriber.
    pub(crate) fn notify(&self, owner: &Owner) {
        let mut subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.retain(|subscriber| subscriber.send(owner.clone()).is_ok());
    }

    /// Owners from now on. Never ends.
    pub(crate) fn subscribe(&self) -> BoxStream<'static, Owner> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        let owners = stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|owner| (owner, receiver))
        });
        owners.chain(stream::pending()).boxed()
    }
}
