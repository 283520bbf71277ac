// SPDX-License-Identifier: Apache-2.0
//! Which Service may replace its load balancer in `ERROR`: one at a time, and one whose replacements fail leaves turns to others. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::Key;
use tokio::time::Instant;

/// After this time it is another Service's turn, although the load balancer is not complete.
const LONGEST_REPLACEMENT: Duration = Duration::from_mins(10);

/// The turns.
#[derive(Debug, Default)]
pub(crate) struct ReplacementTurns {
    /// The Service whose load balancer is replaced, and since when.
    current: Option<(Key, Instant)>,
    /// When Services asked that had to wait.
    waiting: BTreeMap<Key, Instant>,
    /// When the last turn of Services began whose load balancers are not complete.
    last: BTreeMap<Key, Instant>,
}

impl ReplacementTurns {
    /// Whether it is this Service's turn.
    pub(crate) fn may_begin(&mut self, service: &Key) -> bool {
        let now = Instant::now();
        let is_old = |at: &Instant| now.duration_since(*at) >= LONGEST_REPLACEMENT;
        self.current.take_if(|(_, since)| is_old(since));
        self.waiting.retain(|_, asked| !is_old(asked));
        if let Some((current, _)) = &self.current {
            let is_its = current == service;
            if !is_its {
                self.waiting.insert(service.clone(), now);
            }
            return is_its;
        }
        self.waiting.insert(service.clone(), now);
        // Whoever had no turn for the longest time.
        let first = self.waiting.keys().min_by_key(|waiting| (self.last.get(*waiting), *waiting != service));
        if first != Some(service) {
            return false;
        }
        self.waiting.remove(service);
        self.last.insert(service.clone(), now);
        self.current = Some((service.clone(), now));
        true
    }

    /// The Service has to wait for a reason of its own: nobody waits for it meanwhile.
    pub(crate) fn forgo(&mut self, service: &Key) {
        self.waiting.remove(service);
    }

    /// Its load balancer is complete, or gone.
    pub(crate) fn end(&mut self, service: &Key) {
        self.current.take_if(|(of, _)| of == service);
        self.waiting.remove(service);
        self.last.remove(service);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two whose load balancers always fail, and a third one: all ask every ten seconds.
    #[tokio::test(start_paused = true)]
    async fn service_whose_load_balancer_always_fails_leaves_turns_to_others() {
        let mut turns = ReplacementTurns::default();
        let [a, b, c] = ["a", "b", "c"].map(|name| Key::new("shop", name));
        let mut seen = Vec::new();
        assert!(turns.may_begin(&a));
        for _ in 0..60 {
            for one in [&a, &b] {
                if turns.may_begin(one) && seen.last() != Some(one) {
                    seen.push((*one).clone());
                }
            }
            tokio::time::advance(Duration::from_secs(10)).await;
        }
        for _ in 0..240 {
            for one in [&a, &b, &c] {
                if turns.may_begin(one) && seen.last() != Some(one) {
                    seen.push((*one).clone());
                }
            }
            tokio::time::advance(Duration::from_secs(10)).await;
        }
        assert_eq!(seen, [&a, &b, &c, &a, &b].map(Clone::clone));
        // One that is complete makes room at once.
        let mut turns = ReplacementTurns::default();
        assert!(turns.may_begin(&a) && !turns.may_begin(&b));
        turns.end(&a);
        assert!(turns.may_begin(&b) && !turns.may_begin(&a));
        // One that was repaired meanwhile is waited for by nobody.
        turns.end(&a);
        turns.end(&b);
        assert!(turns.may_begin(&c));
        // Nor one that may not begin now, although it had no turn for longer.
        let mut turns = ReplacementTurns::default();
        assert!(turns.may_begin(&a) && !turns.may_begin(&b));
        tokio::time::advance(LONGEST_REPLACEMENT).await;
        assert!(turns.may_begin(&b) && !turns.may_begin(&a));
        tokio::time::advance(LONGEST_REPLACEMENT / 2).await;
        assert!(!turns.may_begin(&a));
        tokio::time::advance(LONGEST_REPLACEMENT / 2).await;
        assert!(!turns.may_begin(&b), "`a` asked a moment ago");
        turns.forgo(&a);
        assert!(turns.may_begin(&b));
    }
}
