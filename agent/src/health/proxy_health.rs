// SPDX-License-Identifier: Apache-2.0
//! Whether load balancers may rely on the node. The agent's loop writes it; the health servers read it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

/// A change that waits this long for the kernel, or its plan, means a stuck data plane (twice kube-proxy's sync period).
const STUCK: Duration = Duration::from_mins(1);

/// Whether load balancers may rely on this node. Clones share it.
#[derive(Clone, Default)]
pub struct ProxyHealth(Arc<Mutex<ProxyHealthInner>>);

/// Measures the longest silence of a watch.
type Silence = Box<dyn Fn() -> Option<Duration> + Send>;

#[derive(Default)]
struct ProxyHealthInner {
    /// Since when a change waits for the kernel.
    pending: Option<Instant>,
    /// When the round of the loop began.
    round: Option<Instant>,
    /// The longest silence that is healthy, and its measurement.
    silence: Option<(Duration, Silence)>,
    updated: Option<Timestamp>,
    eligible: bool,
}

impl std::fmt::Debug for ProxyHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyHealth").field("is_current", &self.is_current()).finish_non_exhaustive()
    }
}

impl ProxyHealth {
    /// A round of the loop begins: it plans what has changed, and writes it.
    pub fn round_begun(&self) {
        self.lock().round = Some(Instant::now());
    }

    /// The round has ended. What it could not write still waits.
    pub fn round_ended(&self) {
        self.lock().round = None;
    }

    /// A change waits for the kernel, since this round began.
    pub fn queued(&self) {
        let mut state = self.lock();
        let since = state.round.unwrap_or_else(Instant::now);
        state.pending.get_or_insert(since);
    }

    /// All planned changes are in the kernel. Others may wait for their turn: a tenant who changes very many Services makes no node
    /// unhealthy.
    pub fn updated(&self) {
        let mut state = self.lock();
        state.pending = None;
        state.updated = Some(Timestamp::now());
    }

    /// Sets whether load balancers may use the node: it exists, is not being deleted, and is not about to be.
    pub fn set_eligible(&self, eligible: bool) {
        self.lock().eligible = eligible;
    }

    /// Makes the node unhealthy while `silence`, the longest silence of a watch, exceeds the limit.
    pub fn limit_watch_silence(
        &self,
        limit: Duration,
        silence: impl Fn() -> Option<Duration> + Send + 'static,
    ) {
        self.lock().silence = Some((limit, Box::new(silence)));
    }

    /// Whether load balancers may rely on this node: the data plane is current, and no watch is silent for too long.
    pub fn is_healthy(&self) -> bool {
        let heard = |(limit, silence): &(Duration, Silence)| silence().is_none_or(|silent| silent <= *limit);
        self.is_current() && self.lock().silence.as_ref().is_none_or(heard)
    }

    /// Whether the data plane is current: no change waits for too long, and nothing is planned for too long.
    pub fn is_current(&self) -> bool {
        self.is_current_at(Instant::now())
    }

    fn is_current_at(&self, now: Instant) -> bool {
        self.busy_at(now) < STUCK
    }

    /// How long a change waits for the kernel, or the loop plans and writes.
    pub fn busy_for(&self) -> Duration {
        self.busy_at(Instant::now())
    }

    fn busy_at(&self, now: Instant) -> Duration {
        let state = self.lock();
        let since = state.pending.into_iter().chain(state.round).min();
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// See [`ProxyHealth::set_eligible`].
    pub fn is_eligible(&self) -> bool {
        self.lock().eligible
    }

    /// When all changes were in the kernel last.
    pub fn last_updated(&self) -> Option<Timestamp> {
        self.lock().updated
    }

    fn lock(&self) -> MutexGuard<'_, ProxyHealthInner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_data_plane_is_unhealthy_until_a_write_succeeds() {
        let proxy_health = ProxyHealth::default();
        assert!(proxy_health.is_current_at(Instant::now() + STUCK * 2), "nothing is pending");
        proxy_health.queued();
        let start = Instant::now();
        assert!(proxy_health.is_current_at(start + STUCK / 2));
        // Further changes do not start the clock again.
        proxy_health.queued();
        assert!(!proxy_health.is_current_at(start + STUCK));
        proxy_health.updated();
        assert!(proxy_health.is_current_at(start + STUCK));
    }

    #[test]
    fn planning_that_takes_too_long_is_unhealthy() {
        let proxy_health = ProxyHealth::default();
        proxy_health.round_begun();
        let start = Instant::now();
        assert!(proxy_health.is_current_at(start + STUCK / 2));
        assert!(!proxy_health.is_current_at(start + STUCK));
        // What was planned waits since then.
        std::thread::sleep(Duration::from_millis(2));
        proxy_health.queued();
        proxy_health.round_ended();
        assert!(!proxy_health.is_current_at(start + STUCK));
        proxy_health.updated();
        assert!(proxy_health.is_current_at(start + STUCK));
        // Nothing had to be written.
        proxy_health.round_begun();
        proxy_health.round_ended();
        assert_eq!(proxy_health.busy_for(), Duration::ZERO);
    }
}
