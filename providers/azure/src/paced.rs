// SPDX-License-Identifier: Apache-2.0
//! Keeps to the rates that Azure takes. It limits reads and writes of a subscription apart, and Microsoft.Network has limits of its own for
//! five minutes; the budgets begin with rates that all of them allow, and learn from what is throttled. In each, namespaces take turns.

use std::sync::Arc;

use async_trait::async_trait;
use http::Method;
use steerage_provider_api::call_namespace;
use steerage_provider_cloud::{ApiMetrics, MeteredBudget, Rate};

use crate::client::{ApiAnswer, Call, Calls};
use crate::error::{CallError, Result};

const RATES: [(&str, Rate); 2] =
    [("reads", Rate { burst: 200, per_second: 20.0 }), ("writes", Rate { burst: 100, per_second: 3.0 })];

/// The budgets, with the rates that they begin with.
pub(crate) fn initial_rates() -> [(&'static str, Rate); 2] {
    RATES
}

/// Requests that wait for their budget.
pub(crate) struct Paced {
    calls: Arc<dyn Calls>,
    reads: MeteredBudget,
    writes: MeteredBudget,
}

impl Paced {
    pub(crate) fn new(calls: Arc<dyn Calls>, metrics: ApiMetrics) -> Self {
        let [reads, writes] = RATES.map(move |(name, rate)| MeteredBudget::new(name, rate, metrics.clone()));
        Self { calls, reads, writes }
    }
}

#[async_trait]
impl Calls for Paced {
    async fn send(&self, call: Call) -> Result<ApiAnswer> {
        let budget = if call.method == Method::GET { &self.reads } else { &self.writes };
        let action = call.action;
        let used_up = |used_up| CallError::used_up(action, used_up);
        budget.send(&call_namespace::current(), self.calls.send(call), used_up, CallError::is_throttled).await
    }
}

#[cfg(test)]
mod tests {
    use http::Response;
    use serde_json::Value;

    use super::*;

    struct Throttling;

    #[async_trait]
    impl Calls for Throttling {
        async fn send(&self, call: Call) -> Result<ApiAnswer> {
            Err(CallError::answered(call.action, &Response::builder().status(429).body("").unwrap()))
        }
    }

    struct Answering;

    #[async_trait]
    impl Calls for Answering {
        async fn send(&self, _: Call) -> Result<ApiAnswer> {
            Ok(ApiAnswer::default())
        }
    }

    /// A namespace with many requests delays that of another by one.
    #[tokio::test(start_paused = true)]
    async fn namespaces_take_turns() {
        let paced = Paced::new(Arc::new(Answering), ApiMetrics::default());
        let owner = |namespace: &str| steerage_provider_api::Owner {
            service: steerage_model::Key::new(namespace, "web"),
            uid: "u".to_owned(),
        };
        let call = || paced.send(Call::put("PUT loadBalancers", "/a", None, Value::Null));
        let began = tokio::time::Instant::now();
        let many = owner("many");
        let many = futures::future::join_all((0..130).map(|_| call_namespace::for_owner(&many, call())));
        let one = async {
            // The burst is used up by then.
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            call_namespace::for_owner(&owner("one"), call()).await.unwrap();
            began.elapsed()
        };
        let (_, one) = futures::join!(many, one);
        assert!(one < std::time::Duration::from_secs(3), "{one:?}");
        assert!(began.elapsed() > std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_requests_slow_the_next_ones_of_their_kind_down() {
        let paced = Paced::new(Arc::new(Throttling), ApiMetrics::default());
        let call = Call::put("PUT loadBalancers", "/a", None, Value::Null);
        assert!(paced.send(call).await.unwrap_err().is_throttled());
        assert!((paced.writes.per_second() - 1.5).abs() < 0.1, "{}", paced.writes.per_second());
        assert!((paced.reads.per_second() - 20.0).abs() < 0.1, "reads are another budget");
    }
}
