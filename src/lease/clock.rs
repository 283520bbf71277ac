// SPDX-License-Identifier: Apache-2.0
//! The machine's clock for the lease.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since the machine's start, that it slept included: a leadership must not outlive a suspended machine's sleep, as it would by
/// `std::time::Instant`, which stands still meanwhile (`CLOCK_BOOTTIME` of `clock_gettime(2)`).
pub(super) fn now() -> Duration {
    // The clock exists since Linux 2.6.39. Were it refused all the same, every leadership would count as over.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}
