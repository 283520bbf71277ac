// SPDX-License-Identifier: Apache-2.0
//! The provider as the workers call it: only while this process leads, rate limited, with a deadline and a metric per call, and with the
//! namespace for which the call is.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use steerage_process::duration;
use steerage_provider_api::{
    AdmittedSources, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome, Owner, Progress, Provider,
    RequestedSources, TargetSet, call_namespace,
};
use tokio::time::Instant;

use crate::lease::Leadership;
use crate::metrics::Metrics;
use crate::rate_limit::RateLimiter;
use crate::recovery::Recovery;

/// For one call, which may consist of many requests to the cloud.
const DEADLINE: Duration = Duration::from_mins(1);

pub(crate) struct LeaderProvider {
    inner: Arc<dyn Provider>,
    leadership: Leadership,
    rate_limiter: RateLimiter,
    metrics: Metrics,
    recovery: Recovery,
}

impl LeaderProvider {
    pub(crate) fn new(
        inner: Arc<dyn Provider>,
        leadership: Leadership,
        rate_limiter: RateLimiter,
        metrics: Metrics,
    ) -> Self {
        Self { inner, leadership, rate_limiter, metrics, recovery: Recovery::default() }
    }

    pub(crate) async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        self.change("apply", &lb.owner, self.inner.apply(lb, compare)).await
    }

    pub(crate) async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        self.change("set_targets", owner, self.inner.set_targets(owner, targets)).await
    }

    pub(crate) async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        self.call("restrict_sources", Some(owner), self.inner.restrict_sources(owner, requested)).await
    }

    pub(crate) async fn set_shared(&self, set: &TargetSet) -> Result<(), Error> {
        self.call("set_shared", None, self.inner.set_shared(set)).await
    }

    pub(crate) async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let deleted = self.call("delete", Some(owner), self.inner.delete(owner)).await;
        if matches!(deleted, Ok(Progress::Done)) {
            self.recovery.forget(owner);
        }
        deleted
    }

    pub(crate) async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        self.call("target_health", Some(owner), self.inner.target_health(owner)).await
    }

    pub(crate) async fn owned(&self) -> Result<Vec<Owner>, Error> {
        self.call("owned", None, self.inner.owned()).await
    }

    pub(crate) fn reports_health(&self) -> bool {
        self.inner.reports_health()
    }

    pub(crate) fn source_annotations(&self) -> &'static [&'static str] {
        self.inner.source_annotations()
    }

    pub(crate) fn replaced_finalizers(&self) -> &'static [&'static str] {
        self.inner.replaced_finalizers()
    }

    /// Waits until the provider answers calls of which the last try had no answer. Returns how many, for one listener.
    pub(crate) async fn answered(&self) -> usize {
        self.recovery.answered().await
    }

    /// A call whose outcome may have a part that failed.
    async fn change(
        &self,
        name: &'static str,
        owner: &Owner,
        call: impl Future<Output = Result<Outcome, Error>>,
    ) -> Result<Outcome, Error> {
        let reason = |outcome: &Outcome| outcome.incomplete.as_ref().map(|(reason, _)| *reason);
        self.recorded_call(name, Some(owner), call, reason).await
    }

    async fn call<T>(
        &self,
        name: &'static str,
        owner: Option<&Owner>,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        self.recorded_call(name, owner, call, |_| None).await
    }

    /// `failed` is the reason why a part of a result failed.
    async fn recorded_call<T>(
        &self,
        name: &'static str,
        owner: Option<&Owner>,
        call: impl Future<Output = Result<T, Error>>,
        failed: impl Fn(&T) -> Option<&'static str>,
    ) -> Result<T, Error> {
        let asked = Instant::now();
        self.rate_limiter.acquire().await;
        self.metrics.rate_limit_waited(asked.elapsed());
        if !self.leadership.is_held() {
            return Err(Error::Unavailable("this controller no longer holds the Lease".to_owned()));
        }
        let before = Instant::now();
        let call = within_deadline(call);
        let result = match owner {
            Some(owner) => call_namespace::for_owner(owner, call).await,
            None => call.await,
        };
        // The provider gave up a write without an answer, or a connection broke.
        let reason = match &result {
            Ok(done) => failed(done),
            Err(error) => Some(error.reason()),
        };
        if reason == Some(Error::UNAVAILABLE) {
            self.leadership.write_given_up();
        }
        self.recovery.note(owner, name, &result, reason);
        self.metrics.called(name, reason.unwrap_or("ok"), before.elapsed());
        result
    }
}

/// The answer to a provider call, or an error after the deadline.
pub(crate) async fn within_deadline<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(DEADLINE, call).await.unwrap_or_else(|_| {
        let deadline = duration::display(DEADLINE);
        Err(Error::Unavailable(format!("The provider did not finish within {deadline}. Steerage retries.")))
    })
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;
    use crate::reconcile::tests::{Silent, reconciler, silent_client};

    #[tokio::test]
    async fn calls_name_the_namespace_of_their_service() {
        let reconciler = reconciler(Arc::new(Silent::default()), silent_client());
        let owner = Owner { service: Key::new("shop", "web"), uid: "u".to_owned() };
        for (owner, namespace) in [(Some(&owner), "shop"), (None, "")] {
            let called =
                reconciler.provider.call("apply", owner, async { Ok(call_namespace::current()) }).await;
            assert_eq!(called.unwrap(), namespace);
        }
    }
}
