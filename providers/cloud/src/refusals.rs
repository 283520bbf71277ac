// SPDX-License-Identifier: Apache-2.0
//! What a cloud refused a moment ago, and when to try it again. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// The longest wait.
const MAX_WAIT: Duration = Duration::from_hours(1);

/// Targets, or other items of one object, that the cloud refused while it accepted the others.
#[derive(Clone, Debug)]
pub struct Refusals<K> {
    refused: BTreeMap<K, Refusal>,
}

#[derive(Clone, Debug)]
struct Refusal {
    /// The cloud's message.
    why: String,
    at: Instant,
    /// From then until the next try.
    wait: Duration,
}

impl<K> Default for Refusals<K> {
    fn default() -> Self {
        Self { refused: BTreeMap::new() }
    }
}

impl<K> Refusals<K> {
    /// Wait before a refused item is tried again. After each further refusal it doubles, up to an hour.
    pub const FIRST_WAIT: Duration = Duration::from_mins(1);
}

impl<K: Ord> Refusals<K> {
    /// The cloud refused the item.
    pub fn add(&mut self, item: K, why: &str) {
        let before = self.refused.get(&item).map(|refusal| refusal.wait.saturating_mul(2).min(MAX_WAIT));
        let wait = before.unwrap_or(Self::FIRST_WAIT);
        self.refused.insert(item, Refusal { why: why.to_owned(), at: Instant::now(), wait });
    }

    /// Whether nothing was refused.
    pub fn is_empty(&self) -> bool {
        self.refused.is_empty()
    }

    /// Whether it is too early to try the item again.
    pub fn must_wait(&self, item: &K) -> bool {
        self.refused.get(item).is_some_and(|refusal| refusal.at.elapsed() < refusal.wait)
    }

    /// The cloud's message about the item, if it was refused.
    pub fn reason(&self, item: &K) -> Option<&str> {
        self.refused.get(item).map(|refusal| refusal.why.as_str())
    }

    /// Forgets the items for which `keep` is false: they were accepted, or are no longer wanted.
    pub fn retain(&mut self, mut keep: impl FnMut(&K) -> bool) {
        self.refused.retain(|item, _| keep(item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_double_until_the_item_is_accepted() {
        let mut refusals = Refusals::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            refusals.add("i-1", "stopped");
            let start = Instant::now();
            while refusals.must_wait(&"i-1") {
                tokio::time::advance(Duration::from_mins(1)).await;
            }
            waits.push(start.elapsed().as_secs() / 60);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(refusals.reason(&"i-1"), Some("stopped"));
        assert!(!refusals.must_wait(&"i-2"));
        refusals.retain(|item| *item != "i-1");
        assert!(refusals.is_empty() && refusals.reason(&"i-1").is_none());
    }
}
