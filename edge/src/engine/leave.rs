// SPDX-License-Identifier: Apache-2.0
//! How the engine leaves: it asks other hosts to take the VIPs over, and at the end says what the kernel keeps.

use std::time::Duration;

use tokio::time::Instant;

use super::Engine;

/// Time that a leaving host waits for another one to become active, at least.
const HAND_OVER_LIMIT: Duration = Duration::from_millis(1500);

impl Engine {
    /// Lets the other hosts know this host's flows, for as long as `flush_limit`, and asks them to take over. Returns when this host ends
    /// at the latest: not before `at`.
    pub(super) async fn begin_to_leave(&mut self, flush_limit: Duration, at: Instant) -> Instant {
        self.kernel.flush_flows(self.membership.live, flush_limit).await;
        self.is_leaving = true;
        self.outputs.leaving.send_replace(true);
        at.max(Instant::now() + HAND_OVER_LIMIT)
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
