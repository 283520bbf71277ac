// SPDX-License-Identifier: Apache-2.0
//! Counts and durations of the requests to a cloud, by action. Pure, apart from the counters; a provider's client reports each
//! request.

use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::{Cloud, Rate};

/// The code of a request that the cloud carries out.
const OK: &str = "200";

/// Longest code that becomes a label. Those of AWS's `ELBv2` have up to 40 characters.
const LONGEST_CODE: usize = 64;

/// An API of a cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Api {
    /// Its name in metrics and messages.
    pub name: &'static str,
    /// Every action that the provider requests. No action is in two APIs of a cloud.
    pub actions: &'static [&'static str],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByAction {
    api: &'static str,
    action: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCode {
    api: &'static str,
    action: String,
    code: Cow<'static, str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByBudget {
    budget: &'static str,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestResult<'a> {
    /// The cloud carried it out.
    Done,
    /// The cloud, or something in between, answered with an error: its code, if it has one, and the HTTP status.
    Refused(Option<&'a str>, u16),
    /// No answer came in time.
    Timeout,
    /// No connection, or one that broke.
    Connection,
    /// Anything else, such as a request that was not sent because no credentials were found.
    Other,
}

/// Metrics of the requests to a cloud. Clones share them.
#[derive(Clone, Debug)]
pub struct ApiMetrics {
    requests: Family<ByCode, Counter>,
    durations: Family<ByAction, Histogram, fn() -> Histogram>,
    budget_waits: Family<ByBudget, Histogram, fn() -> Histogram>,
    budget_rates: Family<ByBudget, Gauge<f64, AtomicU64>>,
}

impl Default for ApiMetrics {
    /// Metrics that no registry has.
    fn default() -> Self {
        // Up to 20s: a client waits for 30s.
        let histogram: fn() -> Histogram = || Histogram::new(exponential_buckets(0.01, 2.0, 12));
        Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(histogram),
            budget_waits: Family::new_with_constructor(histogram),
            budget_rates: Family::default(),
        }
    }
}

impl ApiMetrics {
    /// Registers the metrics. They begin with zero for every action, so that an alert does not miss the first request of a process, and
    /// with the rate of every budget.
    pub fn new(
        registry: &mut Registry,
        cloud: Cloud,
        apis: impl IntoIterator<Item = Api>,
        budgets: &[(&'static str, Rate)],
    ) -> Self {
        let Cloud { title, name } = cloud;
        let metrics = Self::default();
        for (budget, rate) in budgets {
            drop(metrics.budget_waits.get_or_create(&ByBudget { budget }));
            metrics.budget_rate(budget, rate.per_second);
        }
        let budgets = budgets.iter().map(|(budget, _)| *budget).collect::<Vec<_>>().join(", ");
        for api in apis {
            for action in api.actions {
                let (api, action) = (api.name, (*action).to_owned());
                let done = ByCode { api, action: action.clone(), code: OK.into() };
                metrics.requests.get_or_create(&done).inc_by(0);
                drop(metrics.durations.get_or_create(&ByAction { api, action }));
            }
        }
        registry.register(
            format!("{name}_api_requests"),
            format!(
                "Requests to {title}, by API, action, and code: 200; the code of {title}'s error, or else the HTTP status; timeout, \
                 connection (none, or it broke) or other (such as no credentials)"
            ),
            metrics.requests.clone(),
        );
        registry.register(
            format!("{name}_api_request_duration_seconds"),
            format!("Duration of requests to {title} until the answer is read, by API and action"),
            metrics.durations.clone(),
        );
        registry.register(
            format!("{name}_api_budget_wait_seconds"),
            format!("Time that calls waited because {title} limits their rate, or answers others first, by budget: {budgets}"),
            metrics.budget_waits.clone(),
        );
        registry.register(
            format!("{name}_api_budget_rate"),
            format!(
                "Calls per second that Steerage makes at most, by budget: {budgets}. Halved when {title} throttles, raised while calls wait"
            ),
            metrics.budget_rates.clone(),
        );
        metrics
    }

    /// A call waited for its budget.
    pub fn budget_waited(&self, budget: &'static str, waited: Duration) {
        self.budget_waits.get_or_create(&ByBudget { budget }).observe(waited.as_secs_f64());
    }

    /// A budget has this rate, in calls per second.
    pub fn budget_rate(&self, budget: &'static str, per_second: f64) {
        self.budget_rates.get_or_create(&ByBudget { budget }).set(per_second);
    }

    /// Counts a request of this action.
    pub fn requested(&self, api: &'static str, action: &str, result: RequestResult<'_>, took: Duration) {
        let action = action.to_owned();
        self.durations.get_or_create(&ByAction { api, action: action.clone() }).observe(took.as_secs_f64());
        self.requests.get_or_create(&ByCode { api, action, code: code(result) }).inc();
    }
}

/// The label's value. Bounded, whatever answers in the cloud's place.
fn code(result: RequestResult<'_>) -> Cow<'static, str> {
    match result {
        RequestResult::Done => OK.into(),
        RequestResult::Refused(Some(code), _) if is_code(code) => code.to_owned().into(),
        // An error that nobody can read does not count as a success.
        RequestResult::Refused(_, status) if !(200..300).contains(&status) => status.to_string().into(),
        RequestResult::Timeout => "timeout".into(),
        RequestResult::Connection => "connection".into(),
        RequestResult::Refused(..) | RequestResult::Other => "other".into(),
    }
}

/// Whether `text` looks like the code of an error, such as AWS's `Throttling` or `InvalidGroup.NotFound`.
fn is_code(text: &str) -> bool {
    text.len() <= LONGEST_CODE
        && text.starts_with(|first: char| first.is_ascii_uppercase())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '.')
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn only_codes_become_labels() {
        let refused = |text, status| code(RequestResult::Refused(Some(text), status));
        for known in ["Throttling", "AccessDenied", "TargetGroupNotFound", "InvalidGroup.NotFound"] {
            assert_eq!(refused(known, 400), known);
        }
        let long = "A".repeat(LONGEST_CODE + 1);
        for odd in ["", "throttling", "Not a code", "Über", "A\"} 1", long.as_str(), "403"] {
            assert_eq!(refused(odd, 403), "403", "{odd}");
        }
        assert_eq!(code(RequestResult::Refused(None, 503)), "503");
        assert_eq!(code(RequestResult::Refused(None, 200)), "other", "an error that cannot be read");
        let others =
            [RequestResult::Done, RequestResult::Timeout, RequestResult::Connection, RequestResult::Other];
        assert_eq!(others.map(code), ["200", "timeout", "connection", "other"]);
    }

    #[test]
    fn every_action_begins_with_zero() {
        let (mut registry, mut text) = (Registry::default(), String::new());
        let cloud = Cloud { title: "AWS", name: "aws" };
        let apis = [
            Api { name: "ELBv2", actions: &["AddTags", "CreateListener"] },
            Api { name: "EC2", actions: &["CreateSecurityGroup"] },
        ];
        let metrics =
            ApiMetrics::new(&mut registry, cloud, apis, &[("changes", Rate { burst: 20, per_second: 3.0 })]);
        let took = Duration::from_millis(30);
        metrics.requested("ELBv2", "AddTags", RequestResult::Refused(Some("Throttling"), 400), took);
        encode(&mut text, &registry).unwrap();
        let has = |line: &str| assert!(text.contains(line), "{line}: {text}");
        for api in apis {
            for action in api.actions {
                let labels = format!("api=\"{}\",action=\"{action}\"", api.name);
                has(&format!("aws_api_requests_total{{{labels},code=\"200\"}} 0\n"));
                has(&format!("aws_api_request_duration_seconds_count{{{labels}}} "));
            }
        }
        has("aws_api_requests_total{api=\"ELBv2\",action=\"AddTags\",code=\"Throttling\"} 1\n");
        has("aws_api_request_duration_seconds_bucket{le=\"0.04\",api=\"ELBv2\",action=\"AddTags\"} 1\n");
        has("aws_api_budget_rate{budget=\"changes\"} 3.0\n");
        has("aws_api_budget_wait_seconds_count{budget=\"changes\"} 0\n");
        has("aws_api_request_duration_seconds_bucket{le=\"0.02\",api=\"ELBv2\",action=\"AddTags\"} 0\n");
    }
}
