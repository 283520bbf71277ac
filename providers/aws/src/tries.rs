// SPDX-License-Identifier: Apache-2.0
//! When what AWS refused is tried again while a part of the change waits, or after all of it was refused. `restructure` asks. No I/O.

use steerage_provider_api::{Compare, Error};
use tokio::time::Instant;

use crate::desired::Desired;
use crate::reasons;
use crate::refused_listeners::{Refused, retry_after};
use crate::state::ServiceState;

impl ServiceState {
    /// A try to make this change begins.
    pub(crate) fn begin_try(&mut self, wanted: &Desired, compare: Compare) {
        if self.refused_answers.begin(wanted) {
            self.refused_tries = 0;
        }
        self.retry_rejected = None;
        // After calls that were throttled, the answers stay known, so that the change ends.
        let is_compared = compare != Compare::Remembered && self.waiting_ports.is_some();
        if is_compared || self.retry_meanwhile.is_some_and(|at| at <= Instant::now()) {
            self.refused_answers.forget();
            self.retry_meanwhile = None;
        }
    }

    /// These ports wait for targets, and AWS refused a part of the rest.
    pub(crate) fn note_waiting(&mut self, ports: Vec<u16>, refused: Option<Refused>) {
        let since = self.waiting_ports.take().filter(|(before, _)| *before == ports);
        self.waiting_ports = Some((ports, since.map_or_else(Instant::now, |(_, since)| since)));
        if self.retry_meanwhile.is_none()
            && let Some(wait) = refused.as_ref().and_then(|found| found.retry(self.refused_tries))
        {
            self.retry_meanwhile = Some(Instant::now() + wait);
            self.refused_tries = self.refused_tries.saturating_add(1);
        }
        self.refused_meanwhile = refused;
    }

    /// Whether a quota had room for all targets.
    pub(crate) fn note_room_for_targets(&mut self, has_room: bool) {
        if has_room {
            (self.retry_targets, self.exceeded_tries) = (None, 0);
        } else if self.retry_targets.is_none_or(|at| at <= Instant::now()) {
            self.retry_targets = Some(Instant::now() + retry_after(self.exceeded_tries));
            self.exceeded_tries = self.exceeded_tries.saturating_add(1);
        }
    }

    /// The structure is refused as a whole. At a quota, AWS may accept it although the Service does not change.
    pub(crate) fn note_rejected(&mut self, error: &Error) {
        if error.reason() == reasons::QUOTA_EXCEEDED {
            self.retry_rejected = Some(Instant::now() + retry_after(self.refused_tries));
            self.refused_tries = self.refused_tries.saturating_add(1);
        }
    }
}
