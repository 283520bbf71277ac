// SPDX-License-Identifier: Apache-2.0
//! When the table of routes is read: another program may have changed it, or the fence. Pure; `routes` asks.

use std::time::{Duration, Instant};

/// How often the table is read.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often it is read after the routes' lifetime, for [`INTERVAL`]: less than the renewals' interval, so that each of them reads.
const AFTER_EXPIRY: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
pub(super) struct TableReads {
    last: Option<Instant>,
    /// When the routes' lifetime was found to be over.
    expired_at: Option<Instant>,
}

impl TableReads {
    /// When the table was read last; `None` if it has not been read yet.
    pub(super) fn last(&self) -> Option<Instant> {
        self.last
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_after_expiry = self.expired_at.is_some_and(|at| now.duration_since(at) <= INTERVAL);
        let interval = if is_after_expiry { AFTER_EXPIRY } else { INTERVAL };
        self.last.is_none_or(|last| now.duration_since(last) >= interval)
    }

    pub(super) fn on_read(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// The routes' lifetime was found to be over. The fence removes them, now or in a moment.
    pub(super) fn on_expiry(&mut self, now: Instant) {
        self.expired_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a suspend both processes go on at once: this one may read the table before the fence has removed the routes.
    #[test]
    fn table_is_read_again_and_again_after_the_routes_have_expired() {
        let (mut reads, begun) = (TableReads::default(), Instant::now());
        let mut read = Vec::new();
        for second in 0..20 {
            let now = begun + Duration::from_secs(second);
            if second == 7 {
                reads.on_expiry(now);
            }
            if reads.is_due(now) {
                reads.on_read(now);
                read.push(second);
            }
        }
        assert_eq!(read, [0, 5, 7, 8, 9, 10, 11, 12, 17]);
    }
}
