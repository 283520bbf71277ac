// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rate that Google takes. Its quotas are per minute, region and kind of request; the budget begins with one that all of
//! them allow, and learns from what is throttled.

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
        let action = call.action;
        let used_up = |used_up| CallError::used_up(action, used_up);
        self.budget.send("", self.calls.send(call), used_up, CallError::is_throttled).await
    }
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    struct Throttling;

    #[async_trait]
    impl Calls for Throttling {
        async fn send(&self, call: Call) -> Result<Value> {
            Err(CallError::answered(call.action, &Response::builder().status(429).body("").unwrap()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_requests_slow_the_next_ones_down() {
        let paced = Paced::new(Arc::new(Throttling), ApiMetrics::default());
        let call = || Call::get("regions.get", "projects/p/regions/r".to_owned());
        assert!(paced.send(call()).await.unwrap_err().is_throttled());
        assert!((paced.budget.per_second() - 10.0).abs() < 0.1, "{}", paced.budget.per_second());
    }
}
