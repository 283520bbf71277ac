// SPDX-License-Identifier: Apache-2.0
//! For how long the roles of this host hold, by the heartbeats that it has sent. Pure; `membership` asks.
//!
//! A process that was stopped, starved of its processor or disconnected continues with the roles that it had. Others may have its VIPs
//! for a long time by then, and it learns that only from their heartbeats: until then it must take nothing back.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Sending {
    /// The time without heartbeats after which the others find this host dead.
    timeout: Duration,
    last: Instant,
    /// When it has sent again after such a time.
    resumed: Option<Instant>,
}

impl Sending {
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, last: now, resumed: None }
    }

    /// This host has sent a heartbeat.
    pub(super) fn on_sent(&mut self, now: Instant) {
        if now >= self.silent_at() {
            self.resumed = Some(now);
        }
        self.last = now;
    }

    /// Until when the roles hold if no further heartbeat is sent. `None` if others may have taken over and this host has not listened
    /// for long enough to know.
    pub(super) fn roles_hold_until(&self, now: Instant) -> Option<Instant> {
        let has_listened = self.resumed.is_none_or(|resumed| now >= resumed + self.timeout);
        (has_listened && now < self.silent_at()).then(|| self.silent_at())
    }

    /// When the others find this host dead.
    fn silent_at(&self) -> Instant {
        self.last + self.timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(600);

    #[test]
    fn roles_hold_while_others_hear_this_host() {
        let start = Instant::now();
        let mut sending = Sending::new(TIMEOUT, start);
        let mut now = start;
        // The longest time that is no silence.
        for wait in [TIMEOUT / 3, TIMEOUT / 3, TIMEOUT * 99 / 100, TIMEOUT / 3] {
            assert_eq!(sending.roles_hold_until(now), Some(now + TIMEOUT));
            now += wait;
            assert!(sending.roles_hold_until(now).is_some(), "{wait:?}");
            sending.on_sent(now);
        }
    }

    #[test]
    fn roles_hold_again_after_a_silence_once_others_were_heard() {
        let start = Instant::now();
        let mut sending = Sending::new(TIMEOUT, start);
        let resumed = start + TIMEOUT;
        assert_eq!(sending.roles_hold_until(resumed), None, "before it has sent again");
        sending.on_sent(resumed);
        assert_eq!(sending.roles_hold_until(resumed), None, "before it can have heard anybody");
        let next = resumed + TIMEOUT / 2;
        sending.on_sent(next);
        assert_eq!(sending.roles_hold_until(next), None);
        assert_eq!(sending.roles_hold_until(resumed + TIMEOUT), Some(next + TIMEOUT));
    }
}
