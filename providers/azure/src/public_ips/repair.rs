// SPDX-License-Identifier: Apache-2.0
//! Repairs public IPs of Steerage's whose last change failed after Azure had accepted it: while a load balancer refers to such a public IP,
//! Azure takes no change of it. The public IP is written again without what failed: with what it had before, else without a DNS label.
//! `ensure` and the writes of the load balancer call it. It never writes a public IP that is not Steerage's.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use super::{GET, PUT, PublicIps};
use crate::client::{Call, Calls, read};
use crate::desired::NewPublicIp;
use crate::marks::{self, Tags};
use crate::types::PublicIp;

/// What failed is tried again after this time, and after each further failure twice as late. So is anything else, where one thing after
/// another fails: each failure makes the changes of all Services wait.
const FIRST_WAIT: Duration = Duration::from_mins(1);
const LONGEST_WAIT: Duration = Duration::from_hours(1);
/// Between two writes that shall end the state `Failed`.
pub(super) const REPAIR_REST: Duration = Duration::from_secs(20);
/// One that is `Failed` for so long after that, and so many such writes, is taken out of the load balancer: one Service loses its address
/// for a time, where no Service could be changed, not even its targets.
const GIVE_UP: Duration = Duration::from_mins(2);
const REPAIRS: u32 = 4;
/// So long after the last of these writes, the next one is the first of another failure.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// What a Service chooses of a public IP.
#[derive(Clone, Debug)]
struct Settings {
    tags: Tags,
    dns: Option<Value>,
}

/// A time in which something is not tried.
#[derive(Clone, Copy, Debug)]
struct Wait {
    until: Instant,
    length: Duration,
}

impl Wait {
    fn of(length: Duration) -> Self {
        Self { until: Instant::now() + length, length }
    }

    fn doubled(self) -> Duration {
        self.length.saturating_mul(2).min(LONGEST_WAIT)
    }
}

/// The failures of a public IP's changes. No success ends the waits: what succeeds in between may be set only for that.
#[derive(Debug)]
struct Failures {
    /// What failed last.
    wanted: NewPublicIp,
    error: Error,
    /// Until it is tried again: never shorter than the wait of anything else.
    same: Wait,
    /// Until anything else is tried. Who leaves what fails in place for long, and corrects it then, waits only a short time.
    other: Wait,
}

impl Failures {
    /// Whether the next failure is one more of these.
    fn is_recent(&self) -> bool {
        Instant::now() < self.same.until + LONGEST_WAIT
    }

    /// These, if any, and the failure of this.
    fn with(before: Option<Self>, wanted: NewPublicIp, error: &Error) -> Self {
        let (same, other) = match before.filter(Self::is_recent) {
            None => (FIRST_WAIT, FIRST_WAIT),
            Some(before) if before.wanted == wanted => (before.same.doubled(), before.other.length),
            Some(before) => (before.other.doubled(), before.other.doubled()),
        };
        Self { wanted, error: error.clone(), same: Wait::of(same), other: Wait::of(other) }
    }
}

/// Why a change is not made.
#[derive(Clone, Debug)]
pub(super) struct NotTried {
    /// The last failure.
    pub(super) error: Error,
    /// Whether this failed, and not another one before.
    pub(super) is_same: bool,
    pub(super) wait: Duration,
}

/// The writes that shall end the state `Failed`.
#[derive(Clone, Copy, Debug)]
struct Repairs {
    count: u32,
    since: Instant,
    last: Instant,
}

#[derive(Debug, Default)]
struct History {
    /// What it had before its last change.
    before: Option<Settings>,
    failures: Option<Failures>,
    /// The last failure, if no change succeeded since.
    last_error: Option<Error>,
    repairs: Option<Repairs>,
}

/// What is known of changes of public IPs, by name.
#[derive(Debug, Default)]
pub(super) struct ChangeHistories(Mutex<BTreeMap<String, History>>);

impl ChangeHistories {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, History>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A public IP is about to be changed from this.
    pub(super) fn note_before(&self, ip: &PublicIp) {
        if !ip.properties.provisioning_state.unwrap_or_default().is_failed() {
            let before = Settings { tags: ip.tags.clone(), dns: ip.properties.dns_settings.clone() };
            self.lock().entry(ip.name.clone()).or_default().before = Some(before);
        }
    }

    /// The change to this failed.
    pub(super) fn note_failure(&self, name: &str, wanted: NewPublicIp, error: &Error) {
        let mut all = self.lock();
        let history = all.entry(name.to_owned()).or_default();
        history.last_error = Some(error.clone());
        history.failures = Some(Failures::with(history.failures.take(), wanted, error));
    }

    /// Why the change to this is not made now.
    pub(super) fn refusal(&self, name: &str, wanted: &NewPublicIp) -> Option<NotTried> {
        let all = self.lock();
        let failures = all.get(name)?.failures.as_ref()?;
        let is_same = failures.wanted == *wanted;
        let until = if is_same { failures.same.until } else { failures.other.until };
        let wait = until.saturating_duration_since(Instant::now());
        (!wait.is_zero()).then(|| NotTried { error: failures.error.clone(), is_same, wait })
    }

    /// The last failure, whatever was wanted.
    pub(super) fn last_error(&self, name: &str) -> Option<Error> {
        self.lock().get(name)?.last_error.clone()
    }

    /// Its last change succeeded.
    pub(super) fn note_usable(&self, name: &str) {
        if let Some(history) = self.lock().get_mut(name) {
            history.repairs = None;
        }
    }

    /// It is as its Service wants it.
    pub(super) fn note_complete(&self, name: &str) {
        let mut all = self.lock();
        let Some(history) = all.get_mut(name) else { return };
        (history.before, history.last_error, history.repairs) = (None, None, None);
        if !history.failures.as_ref().is_some_and(Failures::is_recent) {
            all.remove(name);
        }
    }

    /// It is gone.
    pub(super) fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Whether the state `Failed` was to be ended before.
    pub(super) fn is_being_repaired(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|history| history.repairs.is_some())
    }

    /// How many writes have not ended the state `Failed`, if it is time for the next one.
    fn begin_repair(&self, name: &str) -> Option<u32> {
        let (mut all, now) = (self.lock(), Instant::now());
        let repairs = &mut all.entry(name.to_owned()).or_default().repairs;
        let before = repairs.filter(|before| now - before.last < FORGOTTEN);
        if before.is_some_and(|before| now - before.last < REPAIR_REST) {
            return None;
        }
        let (count, since) = before.map_or((0, now), |before| (before.count, before.since));
        *repairs = Some(Repairs { count: count + 1, since, last: now });
        Some(count)
    }

    fn extent(&self, name: &str) -> FailureExtent {
        let all = self.lock();
        let Some(repairs) = all.get(name).and_then(|history| history.repairs) else {
            return FailureExtent::Short;
        };
        match repairs.count {
            count if count >= REPAIRS && repairs.since.elapsed() >= GIVE_UP => FailureExtent::GivenUp,
            0 | 1 => FailureExtent::Short,
            _ => FailureExtent::Lasting,
        }
    }

    /// Takes what failed, or may have, out of a public IP. After several tries, all that is not Steerage's own.
    fn take_back(&self, ip: &mut PublicIp, own: &Tags, repairs: u32) {
        let before = self.lock().get(&ip.name).and_then(|history| history.before.clone());
        if let Some(before) = before.filter(|_| repairs < 2) {
            (ip.tags, ip.properties.dns_settings) = (before.tags, before.dns);
        } else {
            ip.properties.dns_settings = None;
            if repairs > 0 {
                ip.tags.retain(|found, _| own.keys().any(|key| key.eq_ignore_ascii_case(found)));
            }
        }
        ip.properties.provisioning_state = None;
    }
}

/// For how long a public IP has been `Failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureExtent {
    /// It is usable, or written again for the first time.
    Short,
    Lasting,
    /// For so long that the load balancer has to be written without it.
    GivenUp,
}

impl PublicIps {
    /// Writes a public IP of Steerage's without what failed, if its last change failed: that ends this state. Also returns whose it is.
    pub(crate) async fn repair(
        &self,
        calls: &dyn Calls,
        path: &str,
    ) -> Result<(FailureExtent, Option<Owner>), Error> {
        let short = FailureExtent::Short;
        let Some(mut ip) = read::<PublicIp>(calls, GET, path).await? else { return Ok((short, None)) };
        let Some(owner) = marks::owner(&self.config.cluster, &ip.tags) else { return Ok((short, None)) };
        let state = ip.properties.provisioning_state.unwrap_or_default();
        if !state.is_failed() {
            if !state.is_busy() {
                self.histories.note_usable(&ip.name);
            }
            return Ok((short, Some(owner)));
        }
        let name = ip.name.clone();
        if let Some(repairs) = self.histories.begin_repair(&name) {
            self.histories.take_back(&mut ip, &marks::of_public_ip(&self.config.cluster, &owner), repairs);
            let etag = ip.etag.clone();
            let body = serde_json::to_value(ip).unwrap_or_default();
            tracing::warn!(service = %owner.service, name, repairs, "last change of the public IP failed; writing it without what failed");
            // It is read again, whatever the answer.
            let _expected = self.known.expect_answer(&name);
            if let Err(failure) = calls.send(Call::put(PUT, path, etag, body)).await {
                let error = Error::from(failure);
                tracing::warn!(service = %owner.service, name, %error, "public IP whose last change failed not written; retrying");
            }
        }
        Ok((self.histories.extent(&name), Some(owner)))
    }

    /// A change that Azure had accepted failed. Whether the Service goes on with what was there before.
    pub(super) async fn note_failure(
        &self,
        calls: &dyn Calls,
        (owner, name): (&Owner, &str),
        wanted: NewPublicIp,
        error: &Error,
        age: Duration,
    ) -> Result<bool, Error> {
        tracing::warn!(service = %owner.service, name, %error, "change of the public IP failed");
        let all = self.all(calls, age).await?;
        let is_in_use = all.get(name).is_some_and(|ip| ip.properties.ip_configuration.is_some());
        let goes_on = is_in_use || self.histories.is_being_repaired(name);
        if goes_on {
            self.histories.note_failure(name, wanted, error);
        }
        Ok(goes_on)
    }
}
