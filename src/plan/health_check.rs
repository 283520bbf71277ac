// SPDX-License-Identifier: Apache-2.0
//! The health check of a Service's targets.

use std::time::Duration;

use steerage_model::{Service, TrafficPolicy, annotations};
use steerage_process::duration;
use steerage_provider_api::{HealthCheck, HealthProtocol, LoadBalancer, Steering};

use super::{Config, PlanError, TargetPlan, has_pod_targets};

/// kube-proxy and the agent answer this path on the node's port and on every health-check node port.
const PATH: &str = "/healthz";
/// The longest timeout that is derived from an interval.
const MAX_DERIVED_TIMEOUT: Duration = Duration::from_secs(5);

/// The health check of Services without annotations for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HealthCheckDefaults {
    /// `None`: one second, or the provider's minimum if that is longer.
    pub(crate) interval: Option<Duration>,
    /// `None`: four fifths of the interval.
    pub(crate) timeout: Option<Duration>,
    pub(crate) healthy_threshold: u32,
    pub(crate) unhealthy_threshold: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("the provider supports health-check intervals from {} to {}", duration::display(*min), duration::display(*max))]
pub(crate) struct UnsupportedInterval {
    min: Duration,
    max: Duration,
}

impl HealthCheckDefaults {
    /// Checks the flags against the provider's range once, so that not every Service has to report it.
    pub(crate) fn check(&self, (min, max): (Duration, Duration)) -> Result<(), UnsupportedInterval> {
        let fits = self.interval.is_none_or(|interval| (min..=max).contains(&interval));
        if fits { Ok(()) } else { Err(UnsupportedInterval { min, max }) }
    }
}

/// Under the policy Local and health-check or fused steering the check covers this Service on the node; otherwise it covers the node's
/// service proxy. Of pods, a check finds whether the port accepts connections.
pub(crate) fn health_check(
    service: &Service,
    steering: Steering,
    config: &Config,
) -> Result<HealthCheck, PlanError> {
    let of_pods = has_pod_targets(service, config)?;
    let is_of_service = !of_pods && service.external_policy == TrafficPolicy::Local && steering.asks_nodes();
    let port = if of_pods {
        None
    } else if is_of_service {
        Some(service.health_check_node_port.ok_or(PlanError::NoHealthCheckNodePort)?)
    } else if service.is_labelled_for_agent() {
        Some(config.agent_healthz_port)
    } else {
        Some(config.proxy_healthz_port)
    };
    let protocol = if of_pods { HealthProtocol::Tcp } else { HealthProtocol::Http { path: PATH.to_owned() } };
    let (min, max) = config.capabilities.health_interval;
    let defaults = &config.health;
    let in_range = |text: &str| {
        let range =
            || format!("the provider supports {} to {}", duration::display(min), duration::display(max));
        nonzero_duration(text).and_then(|i| if (min..=max).contains(&i) { Ok(i) } else { Err(range()) })
    };
    let interval = read(service, annotations::HEALTH_CHECK_INTERVAL, in_range)?
        .unwrap_or_else(|| defaults.interval.unwrap_or(Duration::from_secs(1).clamp(min, max)));
    let up_to_interval = |text: &str| {
        let limit = || format!("the timeout must not exceed the interval of {}", duration::display(interval));
        nonzero_duration(text).and_then(|t| if t <= interval { Ok(t) } else { Err(limit()) })
    };
    let timeout = read(service, annotations::HEALTH_CHECK_TIMEOUT, up_to_interval)?.unwrap_or_else(|| {
        defaults.timeout.unwrap_or((interval * 4 / 5).min(MAX_DERIVED_TIMEOUT)).min(interval)
    });
    let healthy_threshold = read(service, annotations::HEALTH_CHECK_HEALTHY_THRESHOLD, threshold)?;
    let unhealthy_threshold = read(service, annotations::HEALTH_CHECK_UNHEALTHY_THRESHOLD, threshold)?;
    Ok(HealthCheck {
        protocol,
        port,
        is_of_service,
        interval,
        timeout,
        healthy_threshold: healthy_threshold.unwrap_or(defaults.healthy_threshold),
        unhealthy_threshold: unhealthy_threshold.unwrap_or(defaults.unhealthy_threshold),
    })
}

/// Nodes that are targets only because no eligible one is left fail the health check of their service proxy, and serve nevertheless. A
/// load balancer that sends nothing to unhealthy targets asks whether their port accepts connections instead.
pub(crate) fn with_last_resort(mut lb: LoadBalancer, targets: &TargetPlan, config: &Config) -> LoadBalancer {
    if !config.capabilities.fails_open && !targets.ineligible.is_empty() {
        // Where the check covers the Service, it says which nodes have an endpoint.
        for group in lb.groups.iter_mut().filter(|group| !group.health_check.is_of_service) {
            (group.health_check.protocol, group.health_check.port) = (HealthProtocol::Tcp, None);
        }
    }
    lb
}

fn read<T>(
    service: &Service,
    name: &'static str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, PlanError> {
    let Some(value) = service.annotations.get(name).map(|value| value.trim()) else { return Ok(None) };
    let invalid = |problem| PlanError::InvalidAnnotation { name, value: value.to_owned(), problem };
    parse(value).map(Some).map_err(invalid)
}

/// Reads a duration that is not zero, for flags and annotations.
pub(crate) fn nonzero_duration(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        Duration::ZERO => Err("must be longer than 0s".to_owned()),
        duration => Ok(duration),
    }
}

fn threshold(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 1..=100) => Ok(count),
        _ => Err("write a whole number from 1 to 100".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit_and_are_not_zero() {
        for (text, milliseconds) in
            [("500ms", 500), ("2s", 2000), ("1m", 60_000), ("0.25s", 250), ("1h", 3_600_000)]
        {
            assert_eq!(nonzero_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "0", "0s", "10", "-1s", "5 parsecs", "NaN", "1e99"] {
            assert!(nonzero_duration(text).is_err(), "{text}");
        }
        assert_eq!(nonzero_duration("10"), Err("write the unit, for example 10s".to_owned()));
    }

    #[test]
    fn thresholds_are_small_and_not_zero() {
        assert_eq!(threshold("2"), Ok(2));
        for text in ["0", "101", "two", "-1", ""] {
            assert!(threshold(text).is_err(), "{text}");
        }
    }
}
