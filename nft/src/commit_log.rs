// SPDX-License-Identifier: Apache-2.0
//! The generations of the ruleset to which own commits led. A listener whose notifications were lost finds out by them whether anybody
//! else committed meanwhile.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The last own commits that are remembered. Of earlier ones it is not known whose they are.
const REMEMBERED: usize = 4096;

/// The generation after this one. The kernel skips 0.
#[must_use]
pub fn next_generation(generation: u32) -> u32 {
    generation.checked_add(1).unwrap_or(1)
}

/// Whether a generation comes after another one.
#[must_use]
pub fn is_later_generation(generation: u32, than: u32) -> bool {
    generation.wrapping_sub(than).cast_signed() > 0
}

/// The commits of the connections that log them, see [`Nft::log_commits`](crate::Nft::log_commits). Clones share it.
#[derive(Debug, Clone, Default)]
pub struct CommitLog(Arc<Mutex<Commits>>);

#[derive(Debug, Default)]
struct Commits {
    /// Commits whose generations are not known yet.
    running: usize,
    /// Those to which the others led, in order.
    generations: VecDeque<u32>,
}

impl CommitLog {
    /// Whether every commit after generation `from`, up to generation `to`, was made by these connections. `None` while one of them
    /// commits: ask again later. `to` must have been read before the call.
    #[must_use]
    pub fn covers(&self, from: u32, to: u32) -> Option<bool> {
        let commits = self.lock();
        if commits.running > 0 {
            return None;
        }
        let own: HashSet<u32> = commits.generations.iter().copied().collect();
        let mut next = from;
        while next != to {
            next = next_generation(next);
            if !own.contains(&next) {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Forgets the commits up to this generation.
    pub fn forget_until(&self, generation: u32) {
        let generations = &mut self.lock().generations;
        while generations.pop_front_if(|of| !is_later_generation(*of, generation)).is_some() {}
    }

    /// A commit that is about to begin, and ends with the returned value.
    pub(crate) fn begin(&self) -> RunningCommit {
        self.lock().running += 1;
        RunningCommit(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Commits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts as running until dropped.
pub(crate) struct RunningCommit(CommitLog);

impl RunningCommit {
    /// The commit led to this generation.
    pub(crate) fn led_to(self, generation: u32) {
        let mut commits = self.0.lock();
        if commits.generations.len() >= REMEMBERED {
            commits.generations.pop_front();
        }
        commits.generations.push_back(generation);
    }
}

impl Drop for RunningCommit {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(generations: &[u32]) -> CommitLog {
        let log = CommitLog::default();
        for generation in generations {
            log.begin().led_to(*generation);
        }
        log
    }

    #[test]
    fn commits_of_others_are_gaps() {
        let own = log(&[5, 6, 8]);
        assert_eq!(own.covers(4, 6), Some(true));
        assert_eq!(own.covers(8, 8), Some(true), "nobody committed");
        assert_eq!(own.covers(4, 8), Some(false), "7 is not ours");
        assert_eq!(own.covers(8, 9), Some(false));
        own.forget_until(5);
        assert_eq!((own.covers(4, 6), own.covers(5, 6)), (Some(false), Some(true)));
    }

    #[test]
    fn generations_skip_zero() {
        let own = log(&[u32::MAX, 1, 2]);
        assert_eq!(own.covers(u32::MAX - 1, 2), Some(true));
        own.forget_until(u32::MAX);
        assert_eq!((own.covers(u32::MAX - 1, 2), own.covers(u32::MAX, 2)), (Some(false), Some(true)));
    }

    #[test]
    fn nothing_is_known_while_a_commit_runs() {
        let own = log(&[5]);
        let running = own.begin();
        assert_eq!(own.covers(4, 5), None);
        drop(running);
        assert_eq!(own.covers(4, 5), Some(true), "a refused commit leads nowhere");
    }

    #[test]
    fn old_commits_are_forgotten() {
        let last = u32::try_from(REMEMBERED).unwrap() + 1;
        let own = log(&(1..=last).collect::<Vec<_>>());
        assert_eq!((own.covers(0, last), own.covers(1, last)), (Some(false), Some(true)));
    }
}
