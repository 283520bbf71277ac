// SPDX-License-Identifier: Apache-2.0
//! How long each watch has brought nothing, so that its user can stop trusting what it knows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// When each watch last brought an answer, an event or a bookmark. Clones look at the same watches.
///
/// API servers send a bookmark about once a minute, so that a limit on silence must be longer than that.
#[derive(Clone, Debug, Default)]
pub struct Staleness {
    last: Arc<Mutex<BTreeMap<&'static str, Instant>>>,
}

impl Staleness {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Instant>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The watch of `kind` brought something just now, or begins.
    pub(crate) fn heard(&self, kind: &'static str) {
        self.lock().insert(kind, Instant::now());
    }

    /// When the watch of `kind` (its plural, such as `services`) last brought something; at first, when it began. `None` if
    /// there is no such watch.
    pub fn last_heard(&self, kind: &str) -> Option<Instant> {
        self.lock().get(kind).copied()
    }

    /// The watch that has been silent for longest, and for how long. `None` if there is no watch.
    pub fn longest(&self) -> Option<(&'static str, Duration)> {
        let now = Instant::now();
        let oldest = self.lock().iter().map(|(kind, at)| (*at, *kind)).min();
        oldest.map(|(at, kind)| (kind, now.saturating_duration_since(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_longest_silence_counts() {
        let staleness = Staleness::default();
        assert_eq!(staleness.longest(), None);
        staleness.heard("services");
        tokio::time::advance(Duration::from_secs(30)).await;
        staleness.heard("nodes");
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(staleness.longest(), Some(("services", Duration::from_secs(35))));
        staleness.heard("services");
        assert_eq!(staleness.longest(), Some(("nodes", Duration::from_secs(5))));
        assert_eq!(staleness.last_heard("services"), Some(Instant::now()));
        assert_eq!(staleness.last_heard("pods"), None);
    }
}
