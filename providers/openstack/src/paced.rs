// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rate that the cloud takes. OpenStack documents none, and clouds put limits of their own in front of it: the budget begins
//! with a rate that a small cloud serves, and learns from what is throttled.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use serde_json::Value;
use steerage_provider_cloud::{ApiMetrics, Budget, Rate};

use crate::client::{Call, Calls};
use crate::error::{CallError, Result};

const BUDGET: &str = "requests";
const RATE: Rate = Rate { burst: 50, per_second: 20.0 };

/// The budgets, with the rates that they begin with.
pub(crate) fn documented_rates() -> [(&'static str, Rate); 1] {
    [(BUDGET, RATE)]
}

/// Requests that wait for their budget.
pub(crate) struct Paced {
    calls: Arc<dyn Calls>,
    budget: Budget,
    metrics: ApiMetrics,
}

impl Paced {
    pub(crate) fn new(calls: Arc<dyn Calls>, metrics: ApiMetrics) -> Self {
        Self { calls, budget: Budget::new(RATE), metrics }
    }
}

#[async_trait]
impl Calls for Paced {
    async fn send(&self, call: Call) -> Result<Value> {
        let asked = Instant::now();
        let taken = self.budget.take().await;
        self.metrics.budget_waited(BUDGET, asked.elapsed());
        taken.map_err(|used_up| CallError::used_up(call.name(), used_up))?;
        let answer = self.calls.send(call).await;
        if answer.as_ref().is_err_and(CallError::is_throttled) {
            self.budget.throttled();
        }
        self.metrics.budget_rate(BUDGET, self.budget.per_second());
        answer
    }

    async fn project(&self) -> Result<Option<String>> {
        self.calls.project().await
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, Response};

    use super::*;

    struct Throttling;

    #[async_trait]
    impl Calls for Throttling {
        async fn send(&self, call: Call) -> Result<Value> {
            Err(CallError::answered(call.name(), &Response::builder().status(429).body("").unwrap()))
        }

        async fn project(&self) -> Result<Option<String>> {
            Ok(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_requests_slow_the_next_ones_down() {
        let paced = Paced::new(Arc::new(Throttling), ApiMetrics::default());
        let call = || Call::octavia(Method::GET, "GET pools", "pools", None);
        assert!(paced.send(call()).await.unwrap_err().is_throttled());
        assert!((paced.budget.per_second() - 10.0).abs() < 0.1, "{}", paced.budget.per_second());
        let start = tokio::time::Instant::now();
        for _ in 0..3 {
            let _ = paced.send(call()).await;
        }
        assert!(start.elapsed().as_millis() >= 100, "{:?}", start.elapsed());
    }
}
