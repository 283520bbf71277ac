// SPDX-License-Identifier: Apache-2.0
//! A stand-in for `ELBv2` and EC2 that behaves as AWS documents it, or as its users observe it, where moto does not: time, eventual
//! consistency, throttling, quotas, dependencies. It takes the place of the SDK behind [`Calls`](crate::client::Calls), and runs on
//! tokio's clock, so that a test with a paused clock sees minutes pass at once. It knows nothing of this provider.

pub(crate) mod balancers;
mod buckets;
pub(crate) mod cloud;
pub(crate) mod faults;
mod groups;
#[cfg(test)]
pub(crate) mod harness;
mod linked;
mod listeners;
mod security_groups;
mod simulated;
pub(crate) mod snapshot;
mod subnets;
mod targets;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::call_clock;
use crate::client::{CallError, Result};
use buckets::Buckets;
pub(crate) use buckets::Kind;
pub(crate) use cloud::{Cloud, Delays, Quotas};
use faults::{Fault, Faults};
pub use simulated::SimulatedAws;

/// A call that was made, whether or not it failed.
#[derive(Clone, Debug)]
pub(crate) struct MadeCall {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

/// Says what is wrong with a change from one state to another, if anything is.
pub(crate) type Invariant = Box<dyn Fn(&Cloud, &Cloud) -> Option<String> + Send>;

struct Inner {
    /// Every state since the start, the newest last: reads may see an older one.
    history: Vec<(Instant, Cloud)>,
    buckets: Buckets,
    random: fastrand::Rng,
    faults: Faults,
    /// The code of all answers of EC2.
    ec2_fails: Option<&'static str>,
    /// For how long a call to `ELBv2` waits before it gets no answer.
    elb_hangs: Option<Duration>,
    calls: Vec<MadeCall>,
    invariant: Option<Invariant>,
    violations: Vec<String>,
}

/// The stand-in.
pub(crate) struct StandIn {
    pub(crate) delays: Delays,
    pub(crate) quotas: Quotas,
    inner: Mutex<Inner>,
}

impl StandIn {
    pub(crate) fn new(delays: Delays, seed: u64) -> Self {
        let inner = Inner {
            history: vec![(Instant::now(), Cloud::default())],
            buckets: Buckets::full(Instant::now()),
            random: fastrand::Rng::with_seed(seed),
            faults: Faults::None,
            ec2_fails: None,
            elb_hangs: None,
            calls: Vec::new(),
            invariant: None,
            violations: Vec::new(),
        };
        Self { delays, quotas: Quotas::default(), inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest state.
    pub(crate) fn cloud(&self) -> Cloud {
        self.inner().newest().clone()
    }

    /// Changes the state, as another program or the passing of events does.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Cloud)) {
        let mut inner = self.inner();
        let mut cloud = inner.newest().clone();
        change(&mut cloud);
        inner.history.push((Instant::now(), cloud));
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        self.inner().faults = faults;
    }

    /// Whether a fault is still to come.
    pub(crate) fn has_faults(&self) -> bool {
        !matches!(self.inner().faults, Faults::None)
    }

    /// From now on, every call to EC2 fails with this code and changes nothing. With an empty code, EC2 does not answer.
    pub(crate) fn fail_ec2(&self, code: Option<&'static str>) {
        self.inner().ec2_fails = code;
    }

    /// From now on, every call to `ELBv2` waits for this long, gets no answer and changes nothing.
    pub(crate) fn hang_elb(&self, time: Option<Duration>) {
        self.inner().elb_hangs = time;
    }

    pub(crate) fn set_unlimited(&self) {
        self.inner().buckets = Buckets::unlimited();
    }

    /// Checks this after every call that changed something.
    pub(crate) fn set_invariant(&self, invariant: Invariant) {
        self.inner().invariant = Some(invariant);
    }

    /// What the invariant found so far.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    /// The calls since the last time.
    pub(crate) fn take_calls(&self) -> Vec<MadeCall> {
        std::mem::take(&mut self.inner().calls)
    }

    /// A read of `pages` pages. It may see a state that is some seconds old.
    async fn read<T>(
        &self,
        name: &'static str,
        pages: usize,
        body: String,
        see: impl FnOnce(&Cloud, Instant) -> Result<T>,
    ) -> Result<T> {
        self.read_of(Kind::Read, name, pages, body, see).await
    }

    /// As [`read`](Self::read), at the rate of this kind.
    async fn read_of<T>(
        &self,
        kind: Kind,
        name: &'static str,
        pages: usize,
        body: String,
        see: impl FnOnce(&Cloud, Instant) -> Result<T>,
    ) -> Result<T> {
        self.call(name, kind, pages, body, |inner| {
            let now = Instant::now();
            let lag = Duration::from_secs_f64(self.delays.lag.as_secs_f64() * inner.random.f64());
            let seen = inner.history.iter().rev().find(|(since, _)| *since + lag <= now);
            let (_, cloud) = seen.unwrap_or(&inner.history[0]);
            see(cloud, now)
        })
        .await
    }

    /// A change, which an error leaves undone as a whole.
    async fn write<T>(
        &self,
        name: &'static str,
        kind: Kind,
        body: String,
        act: impl FnOnce(&mut Cloud, Instant) -> Result<T>,
    ) -> Result<T> {
        self.call(name, kind, 1, body, |inner| {
            let now = Instant::now();
            let mut cloud = inner.newest().clone();
            let done = act(&mut cloud, now)?;
            let wrong = inner.invariant.as_ref().and_then(|invariant| invariant(inner.newest(), &cloud));
            if let Some(wrong) = wrong {
                inner.violations.push(format!("after {name}: {wrong}"));
            }
            inner.history.push((now, cloud));
            Ok(done)
        })
        .await
    }

    async fn call<T>(
        &self,
        name: &'static str,
        kind: Kind,
        tokens: usize,
        body: String,
        act: impl FnOnce(&mut Inner) -> Result<T>,
    ) -> Result<T> {
        let running = call_clock::begin();
        let answer = self.answer(name, kind, tokens, body, act).await;
        running.end(answer.is_err());
        answer
    }

    async fn answer<T>(
        &self,
        name: &'static str,
        kind: Kind,
        tokens: usize,
        body: String,
        act: impl FnOnce(&mut Inner) -> Result<T>,
    ) -> Result<T> {
        if !self.delays.call.is_zero() {
            tokio::time::sleep(self.delays.call).await;
        }
        let hangs = self.inner().elb_hangs.filter(|_| !kind.is_ec2());
        if let Some(time) = hangs {
            tokio::time::sleep(time).await;
            return Err(CallError::made_up(name, "", "timeout"));
        }
        // IAM names the resource.
        let denied = format!("not authorized to perform {name} on {body}");
        let fault = {
            let mut inner = self.inner();
            inner.calls.extend((0..tokens).map(|_| MadeCall { name, kind }));
            inner.next_fault(name, kind, body)
        };
        if matches!(fault, Some(Fault::Hang)) {
            tokio::time::sleep(Duration::from_secs(30)).await;
        }
        let mut inner = self.inner();
        let unanswered = || CallError::made_up(name, "", "connection closed");
        match fault {
            Some(Fault::Before | Fault::Hang) => return Err(unanswered()),
            Some(Fault::Code("AccessDenied")) => {
                return Err(CallError::made_up(name, "AccessDenied", denied));
            }
            Some(Fault::Code(code)) => return Err(CallError::made_up(name, code, "made up")),
            Some(Fault::After) | None => {}
        }
        if let Some(code) = inner.ec2_fails
            && kind.is_ec2()
        {
            return Err(CallError::made_up(name, code, "EC2 fails"));
        }
        if !inner.buckets.take(kind, tokens, Instant::now()) {
            return Err(CallError::made_up(name, kind.throttled(), "Rate exceeded"));
        }
        let done = act(&mut inner)?;
        if matches!(fault, Some(Fault::After)) { Err(unanswered()) } else { Ok(done) }
    }
}

impl Inner {
    fn newest(&self) -> &Cloud {
        let (_, cloud) = &self.history[self.history.len() - 1];
        cloud
    }

    fn next_fault(&mut self, name: &'static str, kind: Kind, body: String) -> Option<Fault> {
        let Self { faults, random, .. } = self;
        faults.next(random, name, kind, body)
    }
}
