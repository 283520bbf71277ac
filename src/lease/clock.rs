// SPDX-License-Identifier: Apache-2.0
//! The clock of the lease, and the time for users.

use std::time::Duration;

use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

/// Time since boot, including suspends (`CLOCK_BOOTTIME`, see `clock_gettime(2)`). `std::time::Instant` stops during a suspend, so a
/// lease would seem held after it expired.
pub(super) fn now() -> Duration {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return now;
    }
    // Available since Linux 2.6.39. If it fails, every lease counts as expired.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}

/// The time as users know it.
pub(crate) fn time_of_day() -> Timestamp {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return Timestamp::UNIX_EPOCH.saturating_add(now).unwrap_or(Timestamp::MAX);
    }
    Timestamp::now()
}

#[cfg(test)]
pub(crate) use simulated::simulate;

/// The paused clock of a simulation, which runs in one thread.
#[cfg(test)]
mod simulated {
    use std::cell::Cell;
    use std::time::Duration;

    use tokio::time::Instant;

    thread_local! {
        static STARTED: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    /// From now on this thread uses the runtime's clock.
    pub(crate) fn simulate() {
        STARTED.set(Some(Instant::now()));
    }

    pub(super) fn now() -> Option<Duration> {
        STARTED.get().map(|started| Duration::from_hours(1) + started.elapsed())
    }
}
