// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rate that the cloud takes. OpenStack documents none, and clouds put limits of their own in front of it: the budget begins
//! with a rate that a small cloud serves, and learns from what is throttled.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use steerage_provider_cloud::{ApiMetrics, MeteredBudget, Rate};

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
    budget: MeteredBudget,
}

impl Paced {
    pub(crate) fn new(calls: Arc<dyn Calls>, metrics: ApiMetrics) -> Self {
        Self { calls, budget: MeteredBudget::new(BUDGET, RATE, metrics) }
    }
}

#[async_trait]
impl Calls for Paced {
    async fn send(&self, call: Call) -> Result<Value> {
        let action = call.name();
        let used_up = |used_up| CallError::used_up(action, used_up);
        self.budget.send("", self.calls.send(call), used_up, CallError::is_throttled).await
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
