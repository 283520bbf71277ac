// SPDX-License-Identifier: Apache-2.0
//! What must have happened before the process is ready.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

/// What is still pending. Clones look at the same state.
///
/// A process for which nothing was ever awaited is not ready either: register all tasks before the first wait.
#[derive(Clone, Debug)]
pub struct Readiness {
    state: Arc<watch::Sender<State>>,
}

#[derive(Debug, Default)]
struct State {
    pending: BTreeMap<u64, String>,
    registered: u64,
}

impl State {
    fn names(&self) -> Vec<String> {
        if self.registered == 0 { vec!["start".to_owned()] } else { self.pending.values().cloned().collect() }
    }

    fn is_ready(&self) -> bool {
        self.registered > 0 && self.pending.is_empty()
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self { state: Arc::new(watch::Sender::new(State::default())) }
    }
}

impl Readiness {
    /// Makes readiness wait for `name`, at the start or again later, until [`Pending::done`].
    #[must_use = "what is dropped stays pending for ever"]
    pub fn task(&self, name: &str) -> Pending {
        let mut id = 0;
        self.state.send_modify(|state| {
            if state.is_ready() {
                tracing::warn!(pending = name, "not ready any more");
            }
            id = state.registered;
            state.registered += 1;
            state.pending.insert(id, name.to_owned());
        });
        Pending { state: Arc::clone(&self.state), id }
    }

    /// The names of what is pending, in the order of registration.
    pub fn pending(&self) -> Vec<String> {
        self.state.borrow().names()
    }

    /// Whether nothing is pending.
    pub fn is_ready(&self) -> bool {
        self.state.borrow().is_ready()
    }

    /// Returns when nothing is pending.
    pub async fn wait(&self) {
        // The sender is held by `self`, so the wait cannot fail.
        let _ = self.state.subscribe().wait_for(State::is_ready).await;
    }
}

/// Holds readiness back until [`Pending::done`]. Dropped without it, the task stays pending: what died did not succeed.
#[derive(Debug)]
pub struct Pending {
    state: Arc<watch::Sender<State>>,
    id: u64,
}

impl Pending {
    /// The task is done.
    pub fn done(self) {
        self.state.send_modify(|state| {
            let Some(name) = state.pending.remove(&self.id) else { return };
            if state.is_ready() {
                tracing::info!(done = name, "ready");
            } else {
                tracing::info!(done = name, pending = ?state.names(), "not yet ready");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn it_is_ready_only_when_all_is_done() {
        let readiness = Readiness::default();
        assert_eq!(readiness.pending(), ["start"], "before anything was registered");
        let (services, nodes) = (readiness.task("services"), readiness.task("nodes"));
        assert_eq!(readiness.clone().pending(), ["services", "nodes"]);
        services.done();
        assert!(!readiness.is_ready());
        nodes.done();
        assert!(readiness.is_ready());
        let again = readiness.task("shutdown");
        assert_eq!(readiness.pending(), ["shutdown"]);
        drop(again);
        assert!(!readiness.is_ready(), "what is dropped was not done");
    }

    #[test]
    fn equal_names_are_counted_apart() {
        let readiness = Readiness::default();
        let (a, b) = (readiness.task("watch"), readiness.task("watch"));
        a.done();
        assert_eq!(readiness.pending(), ["watch"]);
        b.done();
        assert!(readiness.is_ready());
    }

    #[tokio::test]
    async fn waiting_ends_with_the_last_task() {
        let readiness = Readiness::default();
        let task = readiness.task("services");
        let short = Duration::from_millis(20);
        assert!(tokio::time::timeout(short, readiness.wait()).await.is_err(), "still pending");
        task.done();
        tokio::time::timeout(Duration::from_secs(5), readiness.wait()).await.expect("ready");
    }
}
