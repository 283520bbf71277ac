// SPDX-License-Identifier: Apache-2.0
//! Sends values to other tasks only when they change, so that a receiver wakes up for a reason.

use tokio::sync::watch;

pub(crate) fn send_if_changed<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|current| {
        let changed = *current != value;
        *current = value;
        changed
    });
}
