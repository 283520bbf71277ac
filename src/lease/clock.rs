// SPDX-License-Identifier: Apache-2.0
//! The clock of the lease.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since boot, including suspends (`CLOCK_BOOTTIME`, see `clock_gettime(2)`). `std::time::Instant` stops during a suspend, so a
/// lease would seem held after it expired.
pub(super) fn now() -> Duration {
    // Available since Linux 2.6.39. If it fails, every lease counts as expired.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}
