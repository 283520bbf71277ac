// SPDX-License-Identifier: Apache-2.0
//! What a node's statements say of its end of the edge's tunnel, and for how long the last stated value counts. Pure, owned by
//! `node_statement`.

use std::time::{Duration, Instant};

use steerage_model::TunnelReceiver;

/// A stated value is kept for this long while the node answers without it. Its agent may be ended: the kubelet waits 5
/// minutes at most before it starts a container again, and its pause after a failed pull of an image is as long. A node that did not
/// receive still does not receive then, but passes its probes, so all that was sent to it would be lost. After this time the agent is
/// taken to be gone for good, and something else may have made the devices.
const KEPT_WITHOUT_STATEMENT: Duration = Duration::from_mins(10);

#[derive(Debug, Default)]
pub(super) struct StatedTunnel {
    receiver: Option<TunnelReceiver>,
    /// Since when all answers lack it.
    missing_since: Option<Instant>,
}

impl StatedTunnel {
    /// What was stated last, if it still counts.
    pub(super) fn receiver(&self) -> Option<TunnelReceiver> {
        self.receiver
    }

    /// The node has answered at about this time. `stated`: what its answer says; an agent that has just started, or that knows no tunnel,
    /// says nothing.
    pub(super) fn record(&mut self, stated: Option<TunnelReceiver>, at: Instant) {
        if stated.is_some() {
            *self = Self { receiver: stated, missing_since: None };
            return;
        }
        let since = *self.missing_since.get_or_insert(at);
        if at.saturating_duration_since(since) >= KEPT_WITHOUT_STATEMENT {
            self.receiver = None;
        }
    }

    /// The node does not answer: it may be starting, and its agent with it.
    pub(super) fn on_silence(&mut self) {
        self.missing_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: Option<TunnelReceiver> = Some(TunnelReceiver::Off);
    const FAILED: Option<TunnelReceiver> = Some(TunnelReceiver::Failed);

    #[test]
    fn last_value_counts_for_ten_minutes_of_answers_without_one() {
        let start = Instant::now();
        let mut tunnel = StatedTunnel::default();
        for (second, stated, expected) in [
            (0, None, None),
            (700, OFF, OFF),
            (701, None, OFF),
            (1300, None, OFF),
            (1301, None, None),
            (1302, None, None),
            (1303, FAILED, FAILED),
            (1800, None, FAILED),
            (2300, OFF, OFF),
            (2800, None, OFF),
            (3399, None, OFF),
            (3400, None, None),
        ] {
            tunnel.record(stated, start + Duration::from_secs(second));
            assert_eq!(tunnel.receiver(), expected, "{second}");
        }
    }

    /// Its agent ended before the node did, and starts after the node's other programs.
    #[test]
    fn last_value_of_a_node_that_was_off_counts_while_it_starts() {
        let at = |seconds| Instant::now() + Duration::from_secs(seconds);
        let mut tunnel = StatedTunnel::default();
        tunnel.record(OFF, at(0));
        tunnel.record(None, at(1));
        tunnel.on_silence();
        for (second, expected) in [(4000, OFF), (4500, OFF), (4601, None)] {
            tunnel.record(None, at(second));
            assert_eq!(tunnel.receiver(), expected, "{second}");
        }
    }
}
