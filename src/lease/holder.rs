// SPDX-License-Identifier: Apache-2.0
//! The API calls of a candidate: acquire, renew and release the Lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, PostParams};
use steerage_model::chain;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::candidate::{Candidate, CandidateStep, LeaseTiming};
use super::clock;
use super::record::{self, LeaseRecord};

#[derive(Clone, Debug)]
pub(crate) struct LeaseOptions {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Unique to this process: the pod's name and a suffix.
    pub(crate) identity: String,
    pub(crate) timing: LeaseTiming,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    #[error("lost the lease {namespace}/{name}: {holder} holds it")]
    Taken { namespace: String, name: String, holder: String },
    #[error("lost the lease {namespace}/{name}: not renewed in time")]
    Expired { namespace: String, name: String },
}

/// Whether this process holds the Lease now. Clones share the answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leadership {
    /// Milliseconds of [`clock::now`]; zero if the Lease is not held.
    until: Arc<AtomicU64>,
    /// When the last write was given up whose effect may still come, in the same unit; zero if there was none.
    given_up: Arc<AtomicU64>,
}

/// A write that was given up has its effect within this time, or never.
const LATEST_EFFECT: Duration = Duration::from_secs(5);

impl Leadership {
    /// Whether a write may begin now. It must end within five seconds, before another controller may begin one.
    pub(crate) fn is_held(&self) -> bool {
        clock::now().as_millis() < u128::from(self.until.load(Ordering::Acquire))
    }

    /// Records that a write was given up without an answer.
    pub(crate) fn write_given_up(&self) {
        self.given_up.store(u64::try_from(clock::now().as_millis()).unwrap_or(u64::MAX), Ordering::Release);
    }

    /// The time in which a write that was given up may still have its effect.
    fn until_settled(&self) -> Duration {
        let given_up = self.given_up.load(Ordering::Acquire);
        if given_up == 0 {
            return Duration::ZERO;
        }
        (Duration::from_millis(given_up) + LATEST_EFFECT).saturating_sub(clock::now())
    }

    /// Held for a day, for tests of what the lease holder does.
    #[cfg(test)]
    pub(crate) fn held() -> Self {
        let leadership = Self::default();
        leadership.set(Some(clock::now() + Duration::from_hours(24)));
        leadership
    }

    fn set(&self, until: Option<Duration>) {
        let until = until.map_or(0, |until| u64::try_from(until.as_millis()).unwrap_or(0));
        self.until.store(until, Ordering::Release);
    }
}

/// Waits until this process holds the Lease; `None` if `stop` was cancelled first.
pub(crate) async fn acquire(
    client: Client,
    options: LeaseOptions,
    stop: &CancellationToken,
) -> Option<HeldLease> {
    let candidate = Candidate::new(options.identity.clone(), options.timing, clock::now());
    let api = Api::namespaced(client, &options.namespace);
    let mut held = HeldLease {
        api,
        options,
        candidate,
        lease: None,
        leadership: Leadership::default(),
        logged_holder: None,
    };
    while !held.leadership.is_held() {
        tokio::select! {
            biased;
            // A write may be in flight. If it succeeds after the release, others wait until the lease expires.
            () = stop.cancelled() => {
                held.release().await;
                return None;
            }
            () = held.step() => {}
        }
    }
    tracing::info!(lease = %held.title(), identity = held.options.identity, "acquired the lease");
    Some(held)
}

pub(crate) struct HeldLease {
    api: Api<Lease>,
    options: LeaseOptions,
    candidate: Candidate,
    /// As last read or written.
    lease: Option<Lease>,
    leadership: Leadership,
    logged_holder: Option<String>,
}

impl HeldLease {
    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Renews the Lease until `stop`, then releases it. Cancel `stop` only after the last write.
    pub(crate) async fn hold_until(mut self, stop: CancellationToken) -> Result<(), LeaseError> {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.release().await;
                    return Ok(());
                }
                () = self.step() => {}
            }
            if !self.leadership.is_held() {
                self.leadership.set(None);
                let LeaseOptions { namespace, name, identity, .. } = self.options;
                return Err(match self.candidate.holder() {
                    Some(holder) if holder != identity => {
                        LeaseError::Taken { namespace, name, holder: holder.to_owned() }
                    }
                    _ => LeaseError::Expired { namespace, name },
                });
            }
        }
    }

    fn title(&self) -> String {
        format!("{}/{}", self.options.namespace, self.options.name)
    }

    /// Takes the next step, for at most as long as the Lease is held.
    async fn step(&mut self) {
        let now = clock::now();
        let left = self.candidate.held_until().and_then(|until| until.checked_sub(now));
        let left = left.filter(|left| !left.is_zero()).unwrap_or(Duration::MAX);
        let call = self.options.timing.call.min(left);
        match self.candidate.step(now) {
            CandidateStep::Sleep(wait) => tokio::time::sleep(wait.min(left)).await,
            CandidateStep::Read => match timeout(call, self.api.get_opt(&self.options.name)).await {
                Ok(Ok(lease)) => {
                    self.candidate.observed(lease.as_ref().map(LeaseRecord::of), clock::now());
                    self.lease = lease;
                    self.log_holder();
                }
                Ok(Err(error)) => self.failed("read", &chain(&error)),
                Err(_) => self.failed("read", "no answer in time"),
            },
            CandidateStep::Write => {
                let LeaseOptions { namespace, name, identity, timing } = &self.options;
                let lease = self.lease.clone().unwrap_or_else(|| record::new(namespace, name));
                let lease = record::held_by(lease, identity, timing.duration);
                let sent = clock::now();
                match timeout(call, write(&self.api, name, &lease)).await {
                    Ok(Ok(lease)) => {
                        self.candidate.renewed(LeaseRecord::of(&lease), sent, clock::now());
                        self.lease = Some(lease);
                    }
                    Ok(Err(error)) => self.failed("write", &chain(&error)),
                    Err(_) => self.failed("write", "no answer in time"),
                }
            }
        }
        self.leadership.set(self.candidate.held_until());
    }

    fn failed(&mut self, call: &str, error: &str) {
        tracing::warn!(lease = %self.title(), call, error, "lease call failed; retrying");
        self.candidate.failed(clock::now(), fastrand::f64());
    }

    fn log_holder(&mut self) {
        let holder = self.candidate.holder().filter(|holder| *holder != self.options.identity);
        if holder != self.logged_holder.as_deref() {
            self.logged_holder = holder.map(str::to_owned);
            if let Some(holder) = &self.logged_holder {
                tracing::info!(lease = %self.title(), holder, "another replica holds the lease; standing by");
            }
        }
    }

    /// Releases the Lease if this process holds it, so that the next candidate does not wait; but not before the last write that was
    /// given up can no longer have an effect. Tries twice: a renewal whose answer was lost makes the first attempt fail.
    async fn release(&mut self) {
        let settled = self.leadership.until_settled();
        self.leadership.set(None);
        tokio::time::sleep(settled).await;
        for _ in 0..2 {
            let LeaseOptions { name, identity, timing, .. } = &self.options;
            let released = async {
                let Some(lease) = self.api.get_opt(name).await? else { return Ok(()) };
                if LeaseRecord::of(&lease).holder.as_ref() == Some(identity) {
                    write(&self.api, name, &record::released(lease)).await?;
                }
                Ok::<_, kube::Error>(())
            };
            match timeout(timing.call, released).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => {
                    tracing::warn!(lease = %self.title(), error = chain(&error), "releasing the lease failed; others wait until it expires");
                }
                Err(_) => {
                    tracing::warn!(lease = %self.title(), "releasing the lease timed out; others wait until it expires");
                }
            }
        }
    }
}

/// Creates the Lease, or replaces the version it was derived from; the API server rejects a write over any other version.
async fn write(api: &Api<Lease>, name: &str, lease: &Lease) -> Result<Lease, kube::Error> {
    if lease.metadata.resource_version.is_some() {
        api.replace(name, &PostParams::default(), lease).await
    } else {
        api.create(&PostParams::default(), lease).await
    }
}
