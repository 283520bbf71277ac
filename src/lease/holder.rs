// SPDX-License-Identifier: Apache-2.0
//! The calls of a lease: acquire, keep, give back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::candidate::{Candidate, CandidateStep, LeaseTiming};
use super::clock;
use super::record::{self, LeaseRecord};

/// Which lease, and who wants it.
#[derive(Clone, Debug)]
pub(crate) struct LeaseOptions {
    /// Namespace of the Lease.
    pub(crate) namespace: String,
    /// Name of the Lease.
    pub(crate) name: String,
    /// Who we are: the pod's name and something that no other process ever has.
    pub(crate) identity: String,
    /// Its times.
    pub(crate) timing: LeaseTiming,
}

/// Why the lease is held no more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    /// It could not be renewed in time, or somebody took it.
    #[error("lost the lease {namespace}/{name}; its holder, as far as known: {holder}")]
    Lost {
        /// Namespace of the Lease.
        namespace: String,
        /// Name of the Lease.
        name: String,
        /// The last holder that was read.
        holder: String,
    },
}

/// Tells whether the lease is held, at the moment of asking. Clones are the same leadership.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leadership {
    /// In milliseconds of [`clock::now`]; zero if it is not held.
    until: Arc<AtomicU64>,
}

impl Leadership {
    /// Whether we may write now. A write that is begun should land within five seconds, before anybody else may begin.
    pub(crate) fn is_held(&self) -> bool {
        clock::now().as_millis() < u128::from(self.until.load(Ordering::Acquire))
    }

    fn set(&self, until: Option<Duration>) {
        let until = until.map_or(0, |until| u64::try_from(until.as_millis()).unwrap_or(0));
        self.until.store(until, Ordering::Release);
    }
}

/// Waits until the lease is held. `None`: `stop` was cancelled before.
pub(crate) async fn acquire(
    client: Client,
    options: LeaseOptions,
    stop: &CancellationToken,
) -> Option<HeldLease> {
    let candidate = Candidate::new(options.identity.clone(), options.timing, clock::now());
    let api = Api::namespaced(client, &options.namespace);
    let mut held =
        HeldLease { api, options, candidate, lease: None, leadership: Leadership::default(), holder: None };
    while !held.leadership.is_held() {
        tokio::select! {
            biased;
            // A write may be under way; if it succeeded, the others wait for the lease to run out.
            () = stop.cancelled() => {
                held.release().await;
                return None;
            }
            () = held.step() => {}
        }
    }
    tracing::info!(lease = %held.title(), identity = held.options.identity, "holding the lease");
    Some(held)
}

/// The lease, held.
pub(crate) struct HeldLease {
    api: Api<Lease>,
    options: LeaseOptions,
    candidate: Candidate,
    /// The object as it was last read or written.
    lease: Option<Lease>,
    leadership: Leadership,
    /// The holder that was last logged.
    holder: Option<String>,
}

impl HeldLease {
    /// The leadership, for whoever writes.
    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Keeps the lease until `stop`, then gives it back. Cancel `stop` only when nobody writes any more.
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
                let holder = self.candidate.holder().unwrap_or("nobody").to_owned();
                let LeaseOptions { namespace, name, .. } = self.options;
                return Err(LeaseError::Lost { namespace, name, holder });
            }
        }
    }

    fn title(&self) -> String {
        format!("{}/{}", self.options.namespace, self.options.name)
    }

    /// Makes the next step, which takes no longer than the leadership lasts.
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
                Ok(Err(error)) => self.failed("read", &error.to_string()),
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
                    Ok(Err(error)) => self.failed("write", &error.to_string()),
                    Err(_) => self.failed("write", "no answer in time"),
                }
            }
        }
        self.leadership.set(self.candidate.held_until());
    }

    fn failed(&mut self, call: &str, error: &str) {
        tracing::warn!(lease = %self.title(), call, error, "call for the lease failed");
        // Any source of difference between candidates does; the clock's last digits need no further dependency.
        let jitter = f64::from(clock::now().subsec_nanos() % 1000) / 1000.0;
        self.candidate.failed(clock::now(), jitter);
    }

    fn log_holder(&mut self) {
        let holder = self.candidate.holder().filter(|holder| *holder != self.options.identity);
        if holder != self.holder.as_deref() {
            self.holder = holder.map(str::to_owned);
            if let Some(holder) = &self.holder {
                tracing::info!(lease = %self.title(), holder, "waiting: another holds the lease");
            }
        }
    }

    /// Gives the lease back, if it is ours, so that the next need not wait. Tries twice: a renewal whose answer was lost makes the
    /// first one fail.
    async fn release(&mut self) {
        self.leadership.set(None);
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
                Ok(Err(error)) => tracing::warn!(lease = %self.title(), %error, "cannot give the lease back"),
                Err(_) => tracing::warn!(lease = %self.title(), "cannot give the lease back in time"),
            }
        }
    }
}

/// Creates the lease, or replaces the version that it was made from; any other version is refused by the API server.
async fn write(api: &Api<Lease>, name: &str, lease: &Lease) -> Result<Lease, kube::Error> {
    if lease.metadata.resource_version.is_some() {
        api.replace(name, &PostParams::default(), lease).await
    } else {
        api.create(&PostParams::default(), lease).await
    }
}
