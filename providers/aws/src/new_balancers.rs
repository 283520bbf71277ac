// SPDX-License-Identifier: Apache-2.0
//! Whether new load balancers are active, which takes AWS minutes. Each Service that waits for its own asks every few seconds, and one call
//! reads for up to twenty of them. Nobody waits for others to ask: who asks reads for those who asked before, and they find the answer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::{BALANCERS_BATCH, Balancer, CallError, Calls};

/// AWS may show a new load balancer only after this time, and refuses a call that names one that it does not show.
const VISIBLE_AFTER: Duration = Duration::from_secs(5);
/// Who has not asked for so long does not wait any more.
const MAX_SILENCE: Duration = Duration::from_mins(5);

/// The load balancers that are waited for, and what was read of them.
#[derive(Debug)]
pub(crate) struct NewBalancers {
    /// What was read is news for so long: the time between two questions for one load balancer.
    poll: Duration,
    /// By ARN.
    waiting: Mutex<BTreeMap<String, Waiting>>,
    /// One caller reads at a time. Those who waited for a read that failed have its failure too.
    failed: tokio::sync::Mutex<Option<(Instant, CallError)>>,
}

#[derive(Debug)]
struct Waiting {
    /// Since when it is waited for.
    since: Instant,
    asked: Instant,
    /// What another Service's call read, and when, until it is taken.
    read: Option<(Instant, Balancer)>,
}

impl Waiting {
    fn new() -> Self {
        let now = Instant::now();
        Self { since: now, asked: now, read: None }
    }

    /// What was read less than `poll` ago.
    fn fresh(&self, poll: Duration) -> Option<&Balancer> {
        self.read.as_ref().filter(|(at, _)| at.elapsed() < poll).map(|(_, found)| found)
    }
}

impl NewBalancers {
    pub(crate) fn new(poll: Duration) -> Self {
        Self { poll, waiting: Mutex::default(), failed: tokio::sync::Mutex::default() }
    }

    /// A load balancer was created. Its Service will ask.
    pub(crate) fn expect(&self, arn: &str) {
        self.waiting().insert(arn.to_owned(), Waiting::new());
    }

    /// When this load balancer was last asked for, or created.
    pub(crate) fn asked(&self, arn: &str) -> Option<Instant> {
        self.waiting().get(arn).map(|one| one.asked)
    }

    /// Nobody waits for this load balancer any more.
    pub(crate) fn forget(&self, arn: &str) {
        self.waiting().remove(arn);
    }

    /// The load balancer as AWS shows it, or showed it a moment ago; `None` if it does not exist.
    pub(crate) async fn look(&self, client: &dyn Calls, arn: &str) -> Result<Option<Balancer>, CallError> {
        let asked = Instant::now();
        let mut failed = self.failed.lock().await;
        if let Some(found) = self.take(arn) {
            return Ok(Some(found));
        }
        if let Some((at, failure)) = &*failed
            && *at > asked
        {
            return Err(failure.clone());
        }
        let mut arns = self.others(arn);
        if arns.is_empty() {
            return self.read_one(client, arn, &mut failed).await;
        }
        arns.push(arn.to_owned());
        match client.balancers_at(&arns).await {
            Ok(found) => {
                let own = found.iter().find(|balancer| balancer.arn == arn).cloned();
                if own.is_none() {
                    self.forget(arn);
                }
                self.note(found.into_iter().filter(|balancer| balancer.arn != arn));
                Ok(own)
            }
            // AWS does not say which one is gone. The others ask again.
            Err(failure) if failure.is_not_found() => {
                for other in &arns {
                    self.forget(other);
                }
                self.read_one(client, arn, &mut failed).await
            }
            Err(failure) => {
                *failed = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    async fn read_one(
        &self,
        client: &dyn Calls,
        arn: &str,
        failed: &mut Option<(Instant, CallError)>,
    ) -> Result<Option<Balancer>, CallError> {
        let read = client.balancer_at(arn).await;
        if matches!(read, Ok(None)) {
            // Calls for others must not name it.
            self.forget(arn);
        }
        *failed = read.as_ref().err().map(|failure| (Instant::now(), failure.clone()));
        read
    }

    /// What was read for this one a moment ago. The same is not returned twice.
    fn take(&self, arn: &str) -> Option<Balancer> {
        let mut waiting = self.waiting();
        let own = waiting.entry(arn.to_owned()).or_insert_with(Waiting::new);
        own.asked = Instant::now();
        let found = own.fresh(self.poll).cloned();
        own.read = None;
        found
    }

    /// Others for which the same call can read: those who will ask next, and for whom nothing is read yet.
    fn others(&self, arn: &str) -> Vec<String> {
        let mut waiting = self.waiting();
        waiting.retain(|_, one| one.asked.elapsed() < MAX_SILENCE);
        let is_due = |one: &Waiting| one.since.elapsed() >= VISIBLE_AFTER && one.fresh(self.poll).is_none();
        let mut others: Vec<_> = waiting.iter().filter(|(other, one)| *other != arn && is_due(one)).collect();
        others.sort_by_key(|(_, one)| one.asked);
        others.into_iter().take(BALANCERS_BATCH - 1).map(|(other, _)| other.clone()).collect()
    }

    fn note(&self, found: impl Iterator<Item = Balancer>) {
        let mut waiting = self.waiting();
        for balancer in found {
            if let Some(one) = waiting.get_mut(&balancer.arn) {
                one.read = Some((Instant::now(), balancer));
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<String, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
