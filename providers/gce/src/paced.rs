// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rate that Google takes. Its quotas are per minute, region and kind of request; the budget begins with one that all of
//! them allow, and learns from what is throttled. Namespaces take turns in it.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use steerage_provider_api::call_namespace;
use steerage_provider_cloud::{ApiMetrics, MeteredBudget, Rate};

use crate::client::{Call, Calls};
use crate::error::{CallError, Result};

const BUDGET: &str = "requests";
const RATE: Rate = Rate { burst: 50, per_second: 20.0 };

/// The budgets, with the rates that they begin with.
pub(crate) fn initial_rates() -> [(&'static str, Rate); 1] {
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
        self.budget
            .send(&call_namespace::current(), self.calls.send(call), used_up, CallError::is_throttled)
            .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::Response;
    use steerage_provider_api::{Compare, GroupTargets, Provider as _, RequestedSources, TargetSet};

    use super::*;
    use crate::config::tests::config;
    use crate::desired::tests::web;
    use crate::provider::Gce;

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

    /// Notes for whose namespace each request is, and refuses it.
    #[derive(Default)]
    struct Noting(Mutex<Vec<String>>);

    #[async_trait]
    impl Calls for Noting {
        async fn send(&self, call: Call) -> Result<Value> {
            self.0.lock().unwrap().push(call_namespace::current());
            Err(CallError::answered(call.action, &Response::builder().status(500).body("").unwrap()))
        }
    }

    /// The provider sends all of a call from the task in which it is called: no other knows for whom it is. What others wait for takes
    /// turns as a namespace of its own.
    #[tokio::test(start_paused = true)]
    async fn requests_carry_the_namespace_of_their_service() {
        let calls = Arc::new(Noting::default());
        let provider = || Gce::over(config(), calls.clone());
        let (lb, targets) = (web(), GroupTargets::of_nodes(TargetSet::default()));
        let asked = || std::mem::take(&mut *calls.0.lock().unwrap());
        let is_shops = |asked: Vec<String>| {
            !asked.is_empty() && asked.iter().all(|of| of == "shop" || of == call_namespace::ALL)
        };
        let _ = call_namespace::for_owner(&lb.owner, provider().apply(&lb, Compare::Remembered)).await;
        assert!(is_shops(asked()), "apply");
        let _ = call_namespace::for_owner(&lb.owner, provider().set_targets(&lb.owner, &targets)).await;
        assert!(is_shops(asked()), "set_targets");
        let _ = call_namespace::for_owner(
            &lb.owner,
            provider().restrict_sources(&lb.owner, &RequestedSources::default()),
        )
        .await;
        assert!(is_shops(asked()), "restrict_sources");
        let _ = call_namespace::for_owner(&lb.owner, provider().target_health(&lb.owner)).await;
        assert!(is_shops(asked()), "target_health");
        let _ = call_namespace::for_owner(&lb.owner, provider().delete(&lb.owner)).await;
        assert!(is_shops(asked()), "delete");
    }
}
