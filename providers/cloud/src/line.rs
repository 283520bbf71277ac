// SPDX-License-Identifier: Apache-2.0
//! A line for each object that one caller at a time may change, for callers that do not wait but come again. Groups of callers take turns:
//! the one that had none for longest is first, and in it whoever came first, however often others come meanwhile.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The lines, by object. Holds no lock on the objects themselves: the first in line still has to get it.
#[derive(Debug)]
pub struct Lines<K, W> {
    lines: Mutex<HashMap<K, Line<W>>>,
}

#[derive(Debug)]
struct Line<W> {
    /// In the order in which they came.
    waiting: VecDeque<Waiting<W>>,
    /// The groups that had a turn, the last one last, while anybody waits.
    served: Vec<String>,
}

impl<W> Default for Line<W> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), served: Vec::new() }
    }
}

#[derive(Debug)]
struct Waiting<W> {
    who: W,
    group: String,
    /// Without another try it loses its place then.
    until: Instant,
}

impl<K, W> Default for Lines<K, W> {
    fn default() -> Self {
        Self { lines: Mutex::default() }
    }
}

impl<K: Clone + Eq + Hash, W: Clone + PartialEq> Lines<K, W> {
    /// The number of callers before this one of a group, which joins the line of an object or stays in it. It keeps its place for the time
    /// that `keep` gives for that number.
    pub fn join(&self, key: &K, (who, group): (&W, &str), keep: impl FnOnce(usize) -> Duration) -> usize {
        let now = Instant::now();
        let mut lines = self.lock();
        let line = lines.entry(key.clone()).or_default();
        line.waiting.retain(|other| other.who == *who || other.until > now);
        if !line.waiting.iter().any(|other| other.who == *who) {
            line.waiting.push_back(Waiting { who: who.clone(), group: group.to_owned(), until: now });
        }
        let before = line.before(who);
        if let Some(own) = line.waiting.iter_mut().find(|other| other.who == *who) {
            own.until = now + keep(before);
        }
        before
    }

    /// The caller has what it waited for: now others of its group come after those of the other groups.
    pub fn take(&self, key: &K, who: &W) {
        let mut lines = self.lock();
        if let Some(line) = lines.get_mut(key)
            && let Some(group) =
                line.waiting.iter().find(|other| other.who == *who).map(|own| own.group.clone())
        {
            line.served.retain(|other| *other != group);
            line.served.push(group);
        }
        drop(lines);
        self.leave(key, who);
    }

    /// The caller no longer wants what it waited for.
    pub fn leave(&self, key: &K, who: &W) {
        let mut lines = self.lock();
        if let Some(line) = lines.get_mut(key) {
            line.waiting.retain(|other| other.who != *who);
            if line.waiting.is_empty() {
                lines.remove(key);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Line<W>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: PartialEq> Line<W> {
    /// How many have their turn before this one: first one of each group, then the second of each.
    fn before(&self, who: &W) -> usize {
        let mut places: HashMap<&str, usize> = HashMap::new();
        let ranked = self.waiting.iter().enumerate().map(|(arrival, waiting)| {
            let place = places.entry(&waiting.group).or_default();
            *place += 1;
            let served = self.served.iter().position(|group| *group == waiting.group).map_or(0, |at| at + 1);
            ((*place, served, arrival), waiting)
        });
        let ranked: Vec<_> = ranked.collect();
        let own = ranked.iter().find(|(_, waiting)| waiting.who == *who).map(|(rank, _)| *rank);
        ranked.iter().filter(|(rank, _)| own.is_some_and(|own| *rank < own)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_stays_first_until_it_leaves_or_stays_away() {
        let lines = Lines::default();
        let join = |who: &'static str| lines.join(&"web", (&who, "shop"), |_| Duration::from_secs(10));
        assert_eq!([join("a"), join("b"), join("c"), join("b"), join("a")], [0, 1, 2, 1, 0]);
        assert_eq!(lines.join(&"other", (&"c", "shop"), |_| Duration::ZERO), 0, "another line");
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

    /// One namespace with many callers, which come again after each turn, delays another by one turn.
    #[tokio::test(start_paused = true)]
    async fn groups_take_turns() {
        let lines = Lines::default();
        let join = |who: u32| {
            lines.join(&"web", (&who, if who < 49 { "many" } else { "one" }), |_| Duration::from_secs(10))
        };
        for who in 0..49 {
            assert_eq!(join(who), usize::try_from(who).unwrap());
        }
        assert_eq!(join(49), 1, "the first of the others was there before");
        lines.take(&"web", &0);
        assert_eq!((join(49), join(1), join(0)), (0, 1, 49));
        lines.take(&"web", &49);
        assert_eq!((join(1), join(49), join(2)), (0, 1, 2), "who comes again waits for a turn of the others");
    }
}
