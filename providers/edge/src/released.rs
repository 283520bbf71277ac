// SPDX-License-Identifier: Apache-2.0
//! Addresses that were released, and for how long other Services do not get them. Pure but for the clocks.
//!
//! The pools' statuses have those that a pool keeps by `reuseDelaySeconds`, for the next process.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use steerage_edge_api::ReleasedAddress;
use steerage_model::Key;
use tokio::time::Instant;

use crate::Pool;

/// An address that was released.
#[derive(Clone, Debug)]
pub(crate) struct Released {
    pub(crate) since: Instant,
    /// The same in seconds since 1970.
    at: i64,
    /// The Service that had it.
    pub(crate) last: Option<Key>,
    /// Whether those that wait were told that it is no longer kept.
    pub(crate) is_over: bool,
}

impl Released {
    pub(crate) fn now(last: Option<Key>) -> Self {
        Self { since: Instant::now(), at: now(), last, is_over: false }
    }

    /// A time that is to come, by a clock that was wrong, counts as now.
    pub(crate) fn restored(record: &ReleasedAddress) -> Self {
        let ago = Duration::from_secs(u64::try_from(now() - record.released_at_seconds).unwrap_or(0));
        let present = Instant::now();
        let since = present.checked_sub(ago).unwrap_or(present);
        let last = (!record.name.is_empty()).then(|| Key::new(&*record.namespace, &*record.name));
        Self { since, at: record.released_at_seconds.min(now()), last, is_over: false }
    }

    pub(crate) fn record(&self, address: IpAddr) -> ReleasedAddress {
        let text = |part: fn(&Key) -> &str| self.last.as_ref().map(part).unwrap_or_default().to_owned();
        let (namespace, name) = (text(Key::namespace), text(Key::name));
        ReleasedAddress { address, released_at_seconds: self.at, namespace, name }
    }

    /// What is left of this delay.
    pub(crate) fn left(&self, delay: Duration) -> Option<Duration> {
        let left = delay.saturating_sub(self.since.elapsed());
        (!left.is_zero()).then_some(left)
    }
}

/// For how long the pools keep this address: the longest time of those that have it.
pub(crate) fn reuse_delay(address: IpAddr, pools: &[Pool]) -> Duration {
    let delays = pools.iter().filter(|pool| !pool.reuse_delay.is_zero() && pool.contains(address));
    delays.map(|pool| pool.reuse_delay).max().unwrap_or(Duration::ZERO)
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
