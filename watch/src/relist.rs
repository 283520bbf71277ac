// SPDX-License-Identifier: Apache-2.0
//! Lists everything again on request: what watches have delivered may be older than what another process has seen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

/// Requests of new lists, and the watches that have completed them. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Relist {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of requests.
    requested: u64,
    /// The last request that each watch has completed, by kind.
    completed: BTreeMap<&'static str, u64>,
}

impl Relist {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A watch of `kind` takes part.
    pub(crate) fn add(&self, kind: &'static str) {
        self.lock().completed.insert(kind, 0);
    }

    /// The number of requests so far.
    pub(crate) fn requested(&self) -> u64 {
        self.lock().requested
    }

    /// Resolves when something changed after this call.
    pub(crate) fn changed(&self) -> OwnedNotified {
        Arc::clone(&self.changed).notified_owned()
    }

    /// The user of the watch of `kind` has taken a whole list that began after this many requests.
    pub(crate) fn complete(&self, kind: &'static str, request: u64) {
        if let Some(completed) = self.lock().completed.get_mut(kind) {
            *completed = request.max(*completed);
        }
        self.changed.notify_waiters();
    }

    /// The kinds whose last requested list is not complete.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let state = self.lock();
        let missing = state.completed.iter().filter(|(_, completed)| **completed < state.requested);
        missing.map(|(kind, _)| *kind).collect()
    }

    /// Requests a list from every watch, and waits until the users of all of them have taken it.
    pub(crate) async fn run(&self) {
        let request = {
            let mut state = self.lock();
            state.requested += 1;
            state.requested
        };
        self.changed.notify_waiters();
        loop {
            let changed = self.changed();
            if self.lock().completed.values().all(|completed| *completed >= request) {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn ends_when_every_watch_has_completed_a_list_that_began_later() {
        let relist = Relist::default();
        relist.add("nodes");
        relist.add("services");
        let mut running = Box::pin(relist.run());
        assert!((&mut running).now_or_never().is_none());
        assert_eq!(relist.requested(), 1);
        relist.complete("nodes", 1);
        relist.complete("services", 0);
        assert!((&mut running).now_or_never().is_none(), "the list of services began before");
        relist.complete("services", 1);
        assert!(running.now_or_never().is_some());
    }
}
