// SPDX-License-Identifier: Apache-2.0
//! Prints progress with the seconds since the verb began, on standard error, and waits for conditions.

use std::fmt::Display;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Interval between two evaluations of a condition.
const POLL: Duration = Duration::from_millis(100);

/// Prints progress.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    start: Instant,
}

impl Progress {
    /// Starts the clock.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Prints one line with the seconds since the start.
    pub fn say(&self, line: impl Display) {
        eprintln!("[{:5.1} s] {line}", self.start.elapsed().as_secs_f64());
    }
}

/// Evaluates `done` every 100 ms until it is true. An error of `done` ends the wait at once.
pub fn wait(
    what: &str,
    limit: Duration,
    hint: impl FnOnce() -> String,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    while !done()? {
        if start.elapsed() > limit {
            return Err(Error::Timeout { what: what.to_owned(), seconds: limit.as_secs(), hint: hint() });
        }
        sleep(POLL);
    }
    Ok(())
}
