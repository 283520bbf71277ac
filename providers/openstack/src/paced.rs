// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rate that the cloud takes. OpenStack documents none, and clouds put limits of their own in front of it: the budget begins
//! with a rate that a small cloud serves, and learns from what is throttled. A cloud that is only slow refuses nothing, so the number of
//! requests without an answer has a limit, too. Namespaces take turns in both.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use steerage_provider_api::call_namespace;
use steerage_provider_cloud::{ApiMetrics, MeteredBudget, Rate};

use crate::client::{Call, Calls};
use crate::error::{CallError, Result};

const BUDGET: &str = "requests";
const RATE: Rate = Rate { burst: 50, per_second: 20.0 };

/// Requests without an answer at the same time, of which one namespace has at most half. Octavia answers a handful at once; more of them only
/// wait there, where nobody takes turns.
const MAX_IN_FLIGHT: usize = 12;

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
        Self { calls, budget: MeteredBudget::new(BUDGET, RATE, metrics).with_max_in_flight(MAX_IN_FLIGHT) }
    }
}

#[async_trait]
impl Calls for Paced {
    async fn send(&self, call: Call) -> Result<Value> {
        let action = call.name();
        let used_up = |used_up| CallError::used_up(action, used_up);
        self.budget
            .send(&call_namespace::current(), self.calls.send(call), used_up, CallError::is_throttled)
            .await
    }

    async fn project(&self) -> Result<Option<String>> {
        self.calls.project().await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{Method, Response};
    use steerage_model::Protocol;
    use steerage_provider_api::{GroupTargets, Provider as _, RequestedSources, TargetSet};

    use super::*;
    use crate::desired::tests::planned;
    use crate::options::tests::config;
    use crate::provider::OpenStack;
    use crate::scripted::{Scripted, settle};

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

    /// Notes for whose namespace each request is.
    struct Noting(Scripted, Mutex<Vec<String>>);

    #[async_trait]
    impl Calls for Noting {
        async fn send(&self, call: Call) -> Result<Value> {
            self.1.lock().unwrap().push(call_namespace::current());
            self.0.send(call).await
        }

        async fn project(&self) -> Result<Option<String>> {
            self.0.project().await
        }
    }

    /// The provider sends all of a call from the task in which it is called: no other knows for whom it is. What others wait for takes
    /// turns as a namespace of its own.
    #[tokio::test(start_paused = true)]
    async fn requests_carry_the_namespace_of_their_service() {
        let calls = Arc::new(Noting(Scripted::new(), Mutex::default()));
        let provider = OpenStack::over(config("amphora"), calls.clone());
        let (lb, targets) =
            (planned(&[(Protocol::Tcp, 80, 30080)], &[1]), GroupTargets::of_nodes(TargetSet::default()));
        let asked = || std::mem::take(&mut *calls.1.lock().unwrap());
        let namespace = lb.owner.service.namespace();
        let is_its = |asked: Vec<String>| {
            !asked.is_empty() && asked.iter().all(|of| of == namespace || of == call_namespace::ALL)
        };
        call_namespace::for_owner(&lb.owner, settle(&provider, &lb)).await.unwrap();
        let applied = asked();
        assert!([namespace, call_namespace::ALL].iter().all(|of| applied.iter().any(|asked| asked == of)));
        assert!(is_its(applied), "apply");
        let _ = call_namespace::for_owner(&lb.owner, provider.set_targets(&lb.owner, &targets)).await;
        assert!(is_its(asked()), "set_targets");
        let _ = call_namespace::for_owner(
            &lb.owner,
            provider.restrict_sources(&lb.owner, &RequestedSources::default()),
        )
        .await;
        assert!(is_its(asked()), "restrict_sources");
        let _ = call_namespace::for_owner(&lb.owner, provider.target_health(&lb.owner)).await;
        assert!(is_its(asked()), "target_health");
        let _ = call_namespace::for_owner(&lb.owner, provider.delete(&lb.owner)).await;
        assert!(is_its(asked()), "delete");
    }
}
