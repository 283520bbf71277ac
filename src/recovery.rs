// SPDX-License-Identifier: Apache-2.0
//! Finds out that the provider answers again: a change succeeds of which the last try failed because the provider did not answer. Reads
//! of health say nothing about changes, and a refusal may come without any call to the provider.
//!
//! The leader's provider notes every call. The workers then end the waits of some Services that failed for the same reason; each of
//! these that succeeds is another such call. So few calls try a provider that still fails, and many follow one that works.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use steerage_provider_api::{Error, Owner};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Recovery {
    /// Calls whose last try the provider did not answer, by owner; those for no load balancer in particular have none.
    unanswered: Mutex<BTreeSet<(Option<Owner>, &'static str)>>,
    answered: AtomicUsize,
    changed: Notify,
}

impl Recovery {
    /// Notes the end of a call. `failed` is the reason why a part of what it was to do failed: where the provider did not answer in that
    /// part, others need not try yet.
    pub(crate) fn note<T>(
        &self,
        owner: Option<&Owner>,
        call: &'static str,
        result: &Result<T, Error>,
        failed: Option<&str>,
    ) {
        if call == "target_health" {
            return;
        }
        let mut unanswered = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(_) if failed == Some(Error::UNAVAILABLE) => drop(unanswered.insert((owner.cloned(), call))),
            Err(Error::Unavailable(_)) => drop(unanswered.insert((owner.cloned(), call))),
            // The first two are retried at a rate of their own.
            Err(Error::Throttled { .. } | Error::Conflict(_) | Error::Busy(_) | Error::Invalid { .. }) => {}
            Ok(_) | Err(Error::Denied(_)) => {
                if !unanswered.is_empty() && unanswered.remove(&(owner.cloned(), call)) {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Forgets the calls for a load balancer that is deleted.
    pub(crate) fn forget(&self, owner: &Owner) {
        let mut unanswered = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        unanswered.retain(|(of, _)| of.as_ref() != Some(owner));
    }

    /// Waits until calls are answered again. Returns how many, for one listener.
    pub(crate) async fn answered(&self) -> usize {
        self.changed.notified().await;
        self.answered.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures::FutureExt as _;
    use futures::StreamExt as _;
    use steerage_model::{Key, Service};
    use steerage_watch::Event;
    use tokio::time::Instant;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::reconcile::tests::{Polled, accepting, local_service, reconciler};
    use crate::workers::{self, WorkerOptions};

    fn owner(name: &str) -> Owner {
        Owner { service: Key::new("default", name), uid: name.to_owned() }
    }

    #[test]
    fn only_a_call_that_failed_before_says_that_the_provider_answers_again() {
        let recovery = Recovery::default();
        let (a, b) = (owner("a"), owner("b"));
        let down = Err::<(), _>(Error::Unavailable(String::new()));
        let throttled = Err::<(), _>(Error::throttled(None, ""));
        let counted = || recovery.answered().now_or_never().unwrap_or_default();
        recovery.note(Some(&a), "apply", &Ok(()), None);
        assert_eq!(counted(), 0);
        recovery.note(Some(&a), "apply", &down, None);
        recovery.note(Some(&b), "apply", &Ok(()), None);
        recovery.note(Some(&a), "apply", &Ok(()), Some(Error::UNAVAILABLE));
        recovery.note(Some(&a), "target_health", &Ok(()), None);
        recovery.note(Some(&a), "apply", &throttled, None);
        assert_eq!(counted(), 0);
        recovery.note(None, "owned", &down, None);
        recovery.note(Some(&a), "apply", &Err::<(), _>(Error::invalid("Reason", "")), None);
        recovery.note(None, "owned", &Ok(()), None);
        assert_eq!((counted(), counted()), (1, 0), "a refusal may come without a call");
        recovery.note(Some(&a), "apply", &Err::<(), _>(Error::Denied(String::new())), None);
        assert_eq!(counted(), 1);
        recovery.note(Some(&a), "target_health", &down, None);
        recovery.note(Some(&a), "target_health", &Ok(()), None);
        assert_eq!(counted(), 0);
        recovery.note(Some(&a), "apply", &down, None);
        recovery.forget(&a);
        recovery.note(Some(&a), "apply", &Ok(()), None);
        assert_eq!(counted(), 0);
    }

    /// A Service that is created in an outage waits for its backoff, which the outage makes long. The first that tries again after its end
    /// shows the others that it is over.
    #[tokio::test(start_paused = true)]
    async fn services_do_not_wait_for_their_backoff_when_an_outage_is_over() {
        const NEW: usize = 40;
        let provider = Arc::new(Polled::default());
        let reconciler = Arc::new(reconciler(Arc::<Polled>::clone(&provider), accepting()));
        let requests = reconciler.cluster.requests();
        let options = WorkerOptions {
            workers: 8,
            resync_period: Duration::from_hours(24),
            orphan_grace_period: Duration::from_mins(10),
        };
        let (changes, stop) = (futures::stream::pending().boxed(), CancellationToken::new());
        let running = workers::run(Arc::clone(&reconciler), requests, changes, options, stop.clone());
        let running = tokio::spawn(running);
        provider.set_down(true);
        for number in 0..NEW {
            let key = Key::new("default", format!("new-{number}"));
            let uid = key.name().to_owned();
            reconciler.cluster.on_service(Event::Apply(Service { key, uid, ..local_service() }));
        }
        let in_place = || {
            let owners = reconciler.applied.owners().into_iter();
            let states = owners.filter_map(|owner| reconciler.applied.get(&owner));
            states.filter(|state| state.in_place.is_some()).count()
        };
        tokio::time::sleep(Duration::from_hours(1)).await;
        let tries = provider.applied_count();
        tokio::time::sleep(Duration::from_hours(1)).await;
        // The backoff has reached its end: half of five minutes at least.
        let tries = provider.applied_count() - tries;
        assert!(tries <= NEW * 24, "{tries} tries in an hour");
        assert_eq!(in_place(), 0);
        provider.set_down(false);
        let began = Instant::now();
        while in_place() < NEW {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(45), "{took:?}");
        stop.cancel();
        running.abort();
    }
}
