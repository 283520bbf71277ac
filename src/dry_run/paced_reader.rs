// SPDX-License-Identifier: Apache-2.0
//! The provider as a dry run reads it: at the rate of `--provider-qps`, with a deadline for each call, and again after a failure that
//! may pass. So the limits of a cloud slow a dry run down, but do not end it.

use std::sync::Arc;
use std::time::Duration;

use steerage_process::duration;
use steerage_provider_api::{Error, Provider};
use steerage_watch::Backoff;

use crate::leader_provider::within_deadline;
use crate::rate_limit::RateLimiter;

/// Calls for one answer.
const TRIES: usize = 5;
/// The first wait between two of them, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

pub(super) struct PacedReader {
    provider: Arc<dyn Provider>,
    rate_limiter: RateLimiter,
}

impl PacedReader {
    pub(super) fn new(provider: Arc<dyn Provider>, rate_limiter: RateLimiter) -> Self {
        Self { provider, rate_limiter }
    }

    /// Whether the provider reports targets, so that they can be compared.
    pub(super) fn reports_health(&self) -> bool {
        self.provider.reports_health()
    }

    /// The answer to a call that only reads. An error that remains after all tries, or that a try cannot change.
    pub(super) async fn read<T>(
        &self,
        call: impl AsyncFn(&dyn Provider) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        for _ in 1..TRIES {
            self.rate_limiter.acquire().await;
            let error = match within_deadline(call(&*self.provider)).await {
                Err(error) if may_pass(&error) => error,
                answer => return answer,
            };
            let asked = if let Error::Throttled { after, .. } = &error { *after } else { None };
            let wait = asked.unwrap_or_else(|| backoff.next_delay());
            tracing::warn!(%error, retry_in = %duration::rounded(wait), "provider not read; retrying");
            tokio::time::sleep(wait).await;
        }
        self.rate_limiter.acquire().await;
        within_deadline(call(&*self.provider)).await
    }
}

fn may_pass(error: &Error) -> bool {
    match error {
        Error::Throttled { .. } | Error::Conflict(_) | Error::Busy(_) | Error::Unavailable(_) => true,
        Error::Invalid { .. } | Error::Denied(_) => false,
    }
}
