// SPDX-License-Identifier: Apache-2.0
//! The next step of a candidate, and whether it holds the lease. Pure: the caller passes the time of any monotonic clock.

use std::time::Duration;

use super::record::LeaseRecord;

#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseTiming {
    /// Others wait this long after the last observed renewal before they take over.
    pub(crate) duration: Duration,
    /// The holder stops leading this long after it sent its last successful renewal. Less than `duration`: the difference allows for
    /// clocks of different speed, and for a write in flight to land.
    pub(crate) deadline: Duration,
    /// Between two renewals, or two reads of a waiting candidate.
    pub(crate) retry: Duration,
    /// Timeout of one call.
    pub(crate) call: Duration,
}

impl Default for LeaseTiming {
    /// The defaults of kube-controller-manager, with a call timeout that allows several attempts.
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
            call: Duration::from_secs(2),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaseDecision {
    /// It does not exist.
    Create,
    /// It was released, or has expired.
    Take,
    /// This candidate holds it.
    Renew,
    /// Another candidate holds it, for at least this long.
    Wait(Duration),
}

/// Decides about a record whose last change was observed `age` ago, by the candidate's own clock.
pub(super) fn decide(
    me: &str,
    record: Option<&LeaseRecord>,
    seen_before: bool,
    age: Duration,
    timing: &LeaseTiming,
) -> LeaseDecision {
    let wait = |duration: Duration| match duration.checked_sub(age) {
        None | Some(Duration::ZERO) => None,
        Some(left) => Some(LeaseDecision::Wait(left)),
    };
    match record {
        // The holder of a deleted Lease learns of the deletion only at its next renewal.
        None if seen_before => wait(timing.duration).unwrap_or(LeaseDecision::Create),
        None => LeaseDecision::Create,
        Some(LeaseRecord { holder: None, .. }) => LeaseDecision::Take,
        Some(LeaseRecord { holder: Some(holder), .. }) if holder == me => LeaseDecision::Renew,
        Some(record) => wait(record.duration.unwrap_or(timing.duration)).unwrap_or(LeaseDecision::Take),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CandidateStep {
    Sleep(Duration),
    Read,
    /// Acquire or renew the lease in the version that was last read.
    Write,
}

#[derive(Clone, Debug)]
pub(super) struct Candidate {
    me: String,
    timing: LeaseTiming,
    record: Option<LeaseRecord>,
    seen_before: bool,
    /// When the record's present version was first observed.
    changed: Duration,
    /// Whether the last read allows a write.
    may_write: bool,
    not_before: Duration,
    held_until: Option<Duration>,
}

impl Candidate {
    pub(super) fn new(me: String, timing: LeaseTiming, now: Duration) -> Self {
        Self {
            me,
            timing,
            record: None,
            seen_before: false,
            changed: now,
            may_write: false,
            not_before: now,
            held_until: None,
        }
    }

    pub(super) fn step(&self, now: Duration) -> CandidateStep {
        match self.not_before.checked_sub(now) {
            Some(wait) if !wait.is_zero() => CandidateStep::Sleep(wait),
            _ if self.may_write => CandidateStep::Write,
            _ => CandidateStep::Read,
        }
    }

    /// Until when the lease is held. Nothing may be written after that.
    pub(super) fn held_until(&self) -> Option<Duration> {
        self.held_until
    }

    /// The holder at the last read.
    pub(super) fn holder(&self) -> Option<&str> {
        self.record.as_ref().and_then(|record| record.holder.as_deref())
    }

    /// The version that the next write replaces; `None` if it creates the Lease.
    #[cfg(test)]
    pub(super) fn version(&self) -> Option<&str> {
        self.record.as_ref().map(|record| record.version.as_str())
    }

    /// Records a read of the Lease.
    pub(super) fn observed(&mut self, record: Option<LeaseRecord>, now: Duration) {
        let version = |record: &Option<LeaseRecord>| record.as_ref().map(|record| record.version.clone());
        if version(&record) != version(&self.record) {
            self.changed = now;
        }
        self.seen_before |= record.is_some();
        self.record = record;
        let age = now.saturating_sub(self.changed);
        let decision = decide(&self.me, self.record.as_ref(), self.seen_before, age, &self.timing);
        if decision != LeaseDecision::Renew {
            // Taken over or deleted: by a user, or because renewals came too late.
            self.held_until = None;
        }
        match decision {
            LeaseDecision::Create | LeaseDecision::Take | LeaseDecision::Renew => self.may_write = true,
            LeaseDecision::Wait(left) => self.not_before = now.saturating_add(left.min(self.timing.retry)),
        }
    }

    /// Records a successful write that was sent at `sent`.
    pub(super) fn renewed(&mut self, record: LeaseRecord, sent: Duration, now: Duration) {
        self.record = Some(record);
        self.seen_before = true;
        self.changed = now;
        self.held_until = Some(sent.saturating_add(self.timing.deadline));
        self.not_before = sent.saturating_add(self.timing.retry);
        self.may_write = true;
    }

    /// Records a failed call. Its effect is unknown, because only the answer may be lost, so the Lease must be read again. `jitter` is
    /// from 0 to 1.
    pub(super) fn failed(&mut self, now: Duration, jitter: f64) {
        self.may_write = false;
        let wait = self.timing.retry.mul_f64(0.25 + jitter.clamp(0.0, 1.0) / 4.0);
        self.not_before = now.saturating_add(wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holder: Option<&str>, seconds: u64) -> LeaseRecord {
        LeaseRecord {
            version: "1".into(),
            holder: holder.map(str::to_owned),
            duration: Some(Duration::from_secs(seconds)),
        }
    }

    #[test]
    fn a_decision_follows_from_holder_and_age() {
        let timing = LeaseTiming::default();
        let other = record(Some("other"), 20);
        let unlimited = LeaseRecord { duration: None, ..other.clone() };
        let s = Duration::from_secs;
        for (record, seen, age, want) in [
            (None, false, 0, LeaseDecision::Create),
            (None, true, 5, LeaseDecision::Wait(s(10))),
            (None, true, 15, LeaseDecision::Create),
            (Some(record(None, 20)), true, 0, LeaseDecision::Take),
            (Some(record(Some("me"), 20)), true, 99, LeaseDecision::Renew),
            (Some(other.clone()), true, 0, LeaseDecision::Wait(s(20))),
            (Some(other.clone()), true, 19, LeaseDecision::Wait(s(1))),
            (Some(other), true, 20, LeaseDecision::Take),
            (Some(unlimited.clone()), true, 14, LeaseDecision::Wait(s(1))),
            (Some(unlimited), true, 15, LeaseDecision::Take),
        ] {
            assert_eq!(decide("me", record.as_ref(), seen, s(age), &timing), want, "{record:?} {age}");
        }
    }

    #[test]
    fn lease_counts_from_before_the_call() {
        let timing = LeaseTiming::default();
        let s = Duration::from_secs;
        let mut candidate = Candidate::new("me".into(), timing, s(100));
        assert_eq!(candidate.step(s(100)), CandidateStep::Read);
        candidate.observed(None, s(100));
        assert_eq!(candidate.step(s(100)), CandidateStep::Write);
        candidate.renewed(record(Some("me"), 15), s(100), s(102));
        assert_eq!(candidate.held_until(), Some(s(110)));
        candidate.failed(s(104), 1.0);
        assert_eq!(candidate.held_until(), Some(s(110)), "a failure neither ends nor extends it");
        assert_eq!(candidate.step(s(104)), CandidateStep::Sleep(s(1)));
        candidate.observed(Some(LeaseRecord { version: "2".into(), ..record(Some("other"), 15) }), s(105));
        assert_eq!(candidate.held_until(), None);
    }
}
