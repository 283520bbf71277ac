// SPDX-License-Identifier: Apache-2.0
//! A line for each object that one caller at a time may change, for callers that do not wait but come again: whoever came first is first,
//! however often others come meanwhile.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The lines, by object. Holds no lock on the objects themselves: the first in line still has to get it.
#[derive(Debug)]
pub struct Lines<K, W> {
    waiting: Mutex<HashMap<K, VecDeque<Waiting<W>>>>,
}

#[derive(Debug)]
struct Waiting<W> {
    who: W,
    /// Without another try it loses its place then.
    until: Instant,
}

impl<K, W> Default for Lines<K, W> {
    fn default() -> Self {
        Self { waiting: Mutex::default() }
    }
}

impl<K: Clone + Eq + Hash, W: Clone + PartialEq> Lines<K, W> {
    /// The number of callers before this one, which joins the line of an object or stays in it. It keeps its place for the time that `keep`
    /// gives for that number.
    pub fn join(&self, key: &K, who: &W, keep: impl FnOnce(usize) -> Duration) -> usize {
        let now = Instant::now();
        let mut waiting = self.lock();
        let line = waiting.entry(key.clone()).or_default();
        line.retain(|other| other.who == *who || other.until > now);
        let before = line.iter().position(|other| other.who == *who).unwrap_or(line.len());
        let until = now + keep(before);
        match line.get_mut(before) {
            Some(known) => known.until = until,
            None => line.push_back(Waiting { who: who.clone(), until }),
        }
        before
    }

    /// The caller has what it waited for, or no longer wants it.
    pub fn leave(&self, key: &K, who: &W) {
        let mut waiting = self.lock();
        if let Some(line) = waiting.get_mut(key) {
            line.retain(|other| other.who != *who);
            if line.is_empty() {
                waiting.remove(key);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, VecDeque<Waiting<W>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_stays_first_until_it_leaves_or_stays_away() {
        let lines = Lines::default();
        let join = |who: &'static str| lines.join(&"web", &who, |_| Duration::from_secs(10));
        assert_eq!([join("a"), join("b"), join("c"), join("b"), join("a")], [0, 1, 2, 1, 0]);
        assert_eq!(lines.join(&"other", &"c", |_| Duration::ZERO), 0, "another line");
        lines.leave(&"web", &"a");
        assert_eq!([join("a"), join("b"), join("c")], [2, 0, 1], "whoever comes again is last");
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!([join("c"), join("a")], [1, 2]);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!([join("c"), join("a"), join("b")], [0, 1, 2], "b stayed away");
        for who in ["a", "b", "c"] {
            lines.leave(&"web", &who);
        }
        lines.leave(&"web", &"c");
        assert_eq!(lines.lock().len(), 1);
    }
}
