// SPDX-License-Identifier: Apache-2.0
//! A budget whose waits and rate are metrics. What paces the calls of every cloud.

use tokio::time::Instant;

use super::{Budget, Rate, UsedUp};
use crate::api_metrics::ApiMetrics;

/// A budget, the name of which is a label of its metrics.
#[derive(Debug)]
pub struct MeteredBudget {
    name: &'static str,
    budget: Budget,
    metrics: ApiMetrics,
}

/// A call that waits for its budget: counted also if it is refused or given up.
struct Waiting<'a> {
    of: &'a MeteredBudget,
    since: Instant,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.of.metrics.budget_waited(self.of.name, self.since.elapsed());
    }
}

impl MeteredBudget {
    /// A budget that begins with the documented rate.
    pub fn new(name: &'static str, documented: Rate, metrics: ApiMetrics) -> Self {
        Self { name, budget: Budget::new(documented), metrics }
    }

    /// As [`Budget::with_max_in_flight`].
    #[must_use]
    pub fn with_max_in_flight(self, calls: usize) -> Self {
        Self { budget: self.budget.with_max_in_flight(calls), ..self }
    }

    /// Makes a call of the group after its turn, and learns from the answer. `used_up` is the error if it would wait for too long.
    pub async fn send<T, E>(
        &self,
        group: &str,
        call: impl Future<Output = Result<T, E>>,
        used_up: impl FnOnce(UsedUp) -> E,
        is_throttled: impl FnOnce(&E) -> bool,
    ) -> Result<T, E> {
        let waiting = Waiting { of: self, since: Instant::now() };
        let taken = self.budget.take(group).await;
        drop(waiting);
        let permit = taken.map_err(used_up)?;
        let answer = call.await;
        drop(permit);
        if answer.as_ref().is_err_and(is_throttled) {
            self.budget.throttled();
        }
        self.metrics.budget_rate(self.name, self.budget.per_second());
        answer
    }

    /// As [`Budget::slow_down`].
    pub fn slow_down(&self) {
        self.budget.slow_down();
    }

    /// As [`Budget::per_second`].
    pub fn per_second(&self) -> f64 {
        self.budget.per_second()
    }
}
