// SPDX-License-Identifier: Apache-2.0
//! When the next plan is made that changed health asks for. `engine` plans at once what the API or the host asks for. Pure.
//!
//! A plan costs as much as there are load balancers. Thousands of nodes may begin to state within a second, and a plan for each would
//! leave no time to hear the next one.

use std::time::{Duration, Instant};

/// Plans take at most one part in so many of the time.
const MIN_PARTS: u32 = 4;
/// Whatever a plan costs, the next one comes after this time.
const MAX_PAUSE: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PlanPace {
    /// Earliest time of the next requested plan; `None` before the first plan.
    not_before: Option<Instant>,
    due: Option<Instant>,
}

impl PlanPace {
    /// A plan is needed, and may wait for the next one's turn.
    pub(crate) fn request(&mut self, now: Instant) {
        let due = self.not_before.map_or(now, |not_before| not_before.max(now));
        self.due.get_or_insert(due);
    }

    /// A plan was made in this time.
    pub(crate) fn record(&mut self, begun: Instant, ended: Instant) {
        let pause = (ended.duration_since(begun) * (MIN_PARTS - 1)).min(MAX_PAUSE);
        *self = Self { not_before: Some(ended + pause), due: None };
    }

    /// When a requested plan is due.
    pub(crate) fn due(&self) -> Option<tokio::time::Instant> {
        self.due.map(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_leave_time_for_news() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut pace = PlanPace::default();
        let due = |pace: &PlanPace| pace.due().map(|due| due.into_std().duration_since(start).as_millis());
        assert_eq!(due(&pace), None);
        pace.request(at(5));
        assert_eq!(due(&pace), Some(5));
        pace.record(at(5), at(105));
        assert_eq!(due(&pace), None);
        pace.request(at(110));
        pace.request(at(120));
        assert_eq!(due(&pace), Some(405));
        pace.record(at(405), at(405));
        pace.request(at(406));
        assert_eq!(due(&pace), Some(406), "a small cluster's plan costs nothing");
        pace.record(at(406), at(9_406));
        pace.request(at(9_407));
        assert_eq!(due(&pace), Some(12_406));
    }
}
