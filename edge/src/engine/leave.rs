// SPDX-License-Identifier: Apache-2.0
//! How the engine leaves: it tells other hosts the flows, asks them to take the VIPs over, and at the end says what the kernel keeps.
//! It follows all changes meanwhile.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use steerage_process::duration;
use tokio::time::Instant;

use super::Engine;

/// Maximum time that a leaving host waits until the others know its flows.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);
/// Time that a leaving host waits for another one to become active, at least.
const HAND_OVER_LIMIT: Duration = Duration::from_millis(1500);
/// Time that a leaving host keeps its VIPs after that. Both hosts forward alike, and the other one has just begun.
const HAND_OVER_OVERLAP: Duration = Duration::from_millis(500);
/// What the hand-over can add to `--hand-over-wait`: a host that can serve may appear at the last moment of the wait.
pub(crate) const LONGEST_HAND_OVER: Duration = FLUSH_LIMIT.saturating_add(HAND_OVER_LIMIT);

/// The steps of a shutdown.
#[derive(Default)]
pub(super) enum Leaving {
    /// The process is not ending.
    #[default]
    NotBegun,
    /// No other host can serve. This host leaves at this time all the same.
    Waiting(Instant),
    /// The other hosts are told this host's flows. It keeps its VIPs until this time at least, unless others answer for them.
    Flushing(Flush, Instant),
    /// The other hosts are asked to take over. This host ends at this time at the latest.
    HandingOver(Instant),
}

/// Ends when the others know, or at its limit.
type Flush = Pin<Box<dyn Future<Output = ()> + Send>>;

impl fmt::Debug for Leaving {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBegun => formatter.write_str("NotBegun"),
            Self::Waiting(until) => formatter.debug_tuple("Waiting").field(until).finish(),
            Self::Flushing(_, until) => formatter.debug_tuple("Flushing").field(until).finish(),
            Self::HandingOver(until) => formatter.debug_tuple("HandingOver").field(until).finish(),
        }
    }
}

impl Leaving {
    pub(super) fn is_not_begun(&self) -> bool {
        matches!(self, Self::NotBegun)
    }

    /// Waits until [`Engine::continue_to_leave`] is due. Cancel-safe.
    pub(super) async fn until_due(&mut self) {
        match self {
            Self::NotBegun => std::future::pending().await,
            Self::Waiting(until) | Self::HandingOver(until) => tokio::time::sleep_until(*until).await,
            Self::Flushing(flush, _) => flush.await,
        }
    }
}

impl Engine {
    /// The process is to end. `wait`: how long this host serves on for others that can serve.
    pub(super) fn begin_to_leave(&self, wait: Duration) -> Leaving {
        let until = Instant::now() + wait;
        if self.membership.has_standby || !self.vips.has_any() {
            return self.flush(FLUSH_LIMIT, until);
        }
        if !wait.is_zero() {
            tracing::info!(wait = %duration::display(wait), "no other edge host can serve; waiting for one");
        }
        Leaving::Waiting(until)
    }

    /// The other hosts may be others than before.
    pub(super) fn look_for_successor(&self, leaving: Leaving) -> Leaving {
        match leaving {
            Leaving::Waiting(until) if self.membership.has_standby => self.flush(FLUSH_LIMIT, until),
            leaving => leaving,
        }
    }

    /// What was awaited has come, or its time is over. `None`: this host has left.
    pub(super) fn continue_to_leave(&mut self, leaving: &Leaving) -> Option<Leaving> {
        let until = match *leaving {
            Leaving::NotBegun => return Some(Leaving::NotBegun),
            // A host that cannot serve yet may hear of the flows all the same. Nothing waits for that.
            Leaving::Waiting(_) => return Some(self.flush(Duration::ZERO, Instant::now())),
            Leaving::Flushing(_, until) => until,
            Leaving::HandingOver(_) => return None,
        };
        self.is_leaving = true;
        self.outputs.leaving.send_replace(true);
        Some(Leaving::HandingOver(until.max(Instant::now() + HAND_OVER_LIMIT)))
    }

    /// Whether there is nothing more to hand over.
    pub(super) fn has_left(&self, leaving: &mut Leaving) -> bool {
        let Leaving::HandingOver(until) = leaving else { return false };
        if !self.vips.has_any() {
            return true;
        }
        if self.vips.are_answered_by(self.membership.others_active) {
            *until = (*until).min(Instant::now() + HAND_OVER_OVERLAP);
        }
        false
    }

    fn flush(&self, limit: Duration, until: Instant) -> Leaving {
        Leaving::Flushing(Box::pin(self.kernel.flush_flows(self.membership.live, limit)), until)
    }

    /// The process ends.
    pub(super) fn hand_over(self) {
        self.vips.leave(&self.membership);
        match self.vips.count_unanswered(self.membership.others_active) {
            0 => tracing::info!("VIPs handed over to other edge hosts"),
            vips => tracing::info!(
                vips,
                "no other edge host answers for these VIPs yet; the kernel continues to answer; to retire this host, run `steerage-edge cleanup`"
            ),
        }
    }
}
