// SPDX-License-Identifier: Apache-2.0
//! Tells whoever listens which owners to look at again.

use std::sync::{Mutex, PoisonError};

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use steerage_provider_api::Owner;
use tokio::sync::mpsc;

/// The listeners.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    listeners: Mutex<Vec<mpsc::UnboundedSender<Owner>>>,
}

impl Bell {
    /// Tells every listener of `owner`.
    pub(crate) fn ring(&self, owner: &Owner) {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.send(owner.clone()).is_ok());
    }

    /// A new listener, which hears what happens from now on. It never ends.
    pub(crate) fn listen(&self) -> BoxStream<'static, Owner> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        let heard = stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|owner| (owner, receiver))
        });
        heard.chain(stream::pending()).boxed()
    }
}
