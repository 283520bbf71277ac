// SPDX-License-Identifier: Apache-2.0
//! The tasks that `/readyz` waits for.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

/// The pending tasks. Clones share them.
///
/// A process without any registered task is not ready either: register all tasks before the first wait.
#[derive(Clone, Debug)]
pub struct Readiness {
    state: Arc<watch::Sender<ReadinessState>>,
}

#[derive(Debug, Default)]
struct ReadinessState {
    pending: BTreeMap<u64, String>,
    registered: u64,
}

impl ReadinessState {
    fn names(&self) -> Vec<String> {
        if self.registered == 0 { vec!["start".to_owned()] } else { self.pending.values().cloned().collect() }
    }

    fn is_ready(&self) -> bool {
        self.registered > 0 && self.pending.is_empty()
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self { state: Arc::new(watch::Sender::new(ReadinessState::default())) }
    }
}

impl Readiness {
    /// Makes readiness wait for `name` until [`Pending::done`]: at the start, or again later.
    #[must_use = "a dropped task stays pending until the process ends"]
    pub fn task(&self, name: &str) -> Pending {
        let mut id = 0;
        self.state.send_modify(|state| {
            if state.is_ready() {
                tracing::warn!(pending = name, "no longer ready");
            }
            id = state.registered;
            state.registered += 1;
            state.pending.insert(id, name.to_owned());
        });
        Pending { state: Arc::clone(&self.state), id }
    }

    /// The names of the pending tasks, in the order of registration.
    pub fn pending(&self) -> Vec<String> {
        self.state.borrow().names()
    }

    /// Whether no task is pending.
    pub fn is_ready(&self) -> bool {
        self.state.borrow().is_ready()
    }

    /// Returns when no task is pending.
    pub async fn wait(&self) {
        // The sender is held by `self`, so the wait cannot fail.
        let _ = self.state.subscribe().wait_for(ReadinessState::is_ready).await;
    }
}

/// A pending task. Dropping it without [`Pending::done`] leaves it pending: a task that failed did not succeed.
#[derive(Debug)]
pub struct Pending {
    state: Arc<watch::Sender<ReadinessState>>,
    id: u64,
}

impl Pending {
    /// Completes the task.
    pub fn done(self) {
        self.state.send_modify(|state| {
            let Some(name) = state.pending.remove(&self.id) else { return };
            if state.is_ready() {
                tracing::info!(done = name, "ready");
            } else {
                tracing::info!(done = name, pending = ?state.names(), "task done; waiting for others");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn process_is_ready_when_all_tasks_are_done() {
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
        assert!(!readiness.is_ready(), "a dropped task is not done");
    }

    #[test]
    fn tasks_of_the_same_name_are_counted_separately() {
        let readiness = Readiness::default();
        let (a, b) = (readiness.task("watch"), readiness.task("watch"));
        a.done();
        assert_eq!(readiness.pending(), ["watch"]);
        b.done();
        assert!(readiness.is_ready());
    }

    #[tokio::test]
    async fn wait_ends_with_the_last_task() {
        let readiness = Readiness::default();
        let task = readiness.task("services");
        let short = Duration::from_millis(20);
        assert!(tokio::time::timeout(short, readiness.wait()).await.is_err(), "still pending");
        task.done();
        tokio::time::timeout(Duration::from_secs(5), readiness.wait()).await.expect("ready");
    }
}
