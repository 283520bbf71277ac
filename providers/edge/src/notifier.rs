// SPDX-License-Identifier: Apache-2.0
//! Sends values to subscribers: owners whose load balancer changed at the provider's side, and what to tell users.

use std::sync::{Mutex, PoisonError};

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use tokio::sync::mpsc;

#[derive(Debug)]
pub(crate) struct Notifier<T> {
    subscribers: Mutex<Vec<mpsc::UnboundedSender<T>>>,
}

impl<T> Default for Notifier<T> {
    fn default() -> Self {
        Self { subscribers: Mutex::default() }
    }
}

impl<T: Clone + Send + 'static> Notifier<T> {
    /// Sends `value` to every subscriber. Whether there is one.
    pub(crate) fn send(&self, value: &T) -> bool {
        let mut subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.retain(|subscriber| subscriber.send(value.clone()).is_ok());
        !subscribers.is_empty()
    }

    /// Values from now on. Never ends.
    pub(crate) fn subscribe(&self) -> BoxStream<'static, T> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        let values = stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|value| (value, receiver))
        });
        values.chain(stream::pending()).boxed()
    }
}
