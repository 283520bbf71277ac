// SPDX-License-Identifier: Apache-2.0
//! How many events may be published: a token bucket. Pure. Used for the events of each object, and by programs whose events of one kind
//! repeat on every node.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::correlate::forget_older_half;

/// The limit of all namespaces together, in those of one.
const NAMESPACES: u32 = 10;
/// Maximum number of namespaces whose limits are remembered, to bound memory.
const REMEMBERED: usize = 1024;

/// Some at once, and one more after each interval.
#[derive(Debug)]
pub struct EventLimit {
    burst: u32,
    refill: Duration,
    left: u32,
    /// When the last one was added.
    filled: Instant,
}

/// For events of one kind that all nodes publish: what causes them may repeat, and must not fill the API server. The log has all.
impl Default for EventLimit {
    fn default() -> Self {
        Self::new(10, Duration::from_mins(1), Instant::now())
    }
}

impl EventLimit {
    /// `burst` events at once, and one more after each `refill`.
    pub fn new(burst: u32, refill: Duration, now: Instant) -> Self {
        Self { burst, refill, left: burst, filled: now }
    }

    /// Takes one; false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        while self.left < self.burst && now.duration_since(self.filled) >= self.refill {
            self.left += 1;
            self.filled += self.refill;
        }
        if self.left == self.burst {
            self.filled = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }

    /// When one was last added, or all were there.
    pub(super) fn filled(&self) -> Instant {
        self.filled
    }
}

/// A limit for each namespace, so that the events about one tenant's objects leave room for those about another's, and ten times as
/// much for all together.
#[derive(Debug)]
pub struct NamespaceLimits {
    all: EventLimit,
    namespaces: HashMap<String, EventLimit>,
}

impl Default for NamespaceLimits {
    fn default() -> Self {
        let EventLimit { burst, refill, filled, .. } = EventLimit::default();
        let all = EventLimit::new(burst * NAMESPACES, refill / NAMESPACES, filled);
        Self { all, namespaces: HashMap::new() }
    }
}

impl NamespaceLimits {
    /// Takes one of a namespace; false if it has none left, or all together have none.
    pub fn take(&mut self, namespace: &str, now: Instant) -> bool {
        if !self.namespaces.contains_key(namespace) {
            if self.namespaces.len() >= REMEMBERED {
                forget_older_half(&mut self.namespaces, EventLimit::filled);
            }
            let (EventLimit { burst, refill, .. }, name) = (EventLimit::default(), namespace.to_owned());
            self.namespaces.insert(name, EventLimit::new(burst, refill, now));
        }
        let of_namespace = self.namespaces.get_mut(namespace);
        of_namespace.is_some_and(|limit| limit.take(now)) && self.all.take(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_about_one_namespace_leave_room_for_others() {
        let start = Instant::now();
        let mut limits = NamespaceLimits::default();
        let mut published = |namespace: &str, now| (0..100).filter(|_| limits.take(namespace, now)).count();
        assert_eq!(published("noisy", start), 10);
        assert_eq!(published("quiet", start), 10);
        let others: usize = (0..98).map(|n| published(&n.to_string(), start)).sum();
        assert_eq!(others, 80, "all together have a limit, too");
        assert_eq!(published("noisy", start + Duration::from_mins(1)), 1);
        assert_eq!(published("quiet", start + Duration::from_mins(1)), 1);
    }

    #[test]
    fn limits_of_namespaces_take_bounded_memory() {
        let mut limits = NamespaceLimits::default();
        let start = Instant::now();
        for number in 0..3 * u64::try_from(REMEMBERED).expect("small") {
            limits.take(&number.to_string(), start + Duration::from_millis(number));
            assert!(limits.namespaces.len() <= REMEMBERED);
        }
    }

    #[test]
    fn events_are_limited() {
        const REFILL: Duration = Duration::from_mins(1);
        let start = Instant::now();
        let mut limit = EventLimit::default();
        let mut published = |now| (0..100).filter(|_| limit.take(now)).count();
        assert_eq!(published(start), 10);
        assert_eq!(published(start + REFILL / 2), 0);
        assert_eq!(published(start + REFILL), 1);
        assert_eq!(published(start + 100 * REFILL), 10);
        assert_eq!(published(start + 100 * REFILL), 0);
    }
}
