// SPDX-License-Identifier: Apache-2.0
//! How the targets of a Service are probed.

use std::time::Duration;

use steerage_model::{Service, TrafficPolicy};
use steerage_provider_api::{HealthCheck, HealthProtocol, Steering};

use super::{Config, PlanError};

/// Service annotation: time between two probes.
pub(crate) const INTERVAL: &str = "steerage.dev/health-check-interval";
/// Service annotation: how long a probe may take.
pub(crate) const TIMEOUT: &str = "steerage.dev/health-check-timeout";
/// Service annotation: good probes in a row that make a target healthy.
pub(crate) const HEALTHY: &str = "steerage.dev/health-check-healthy-threshold";
/// Service annotation: bad probes in a row that make it unhealthy.
pub(crate) const UNHEALTHY: &str = "steerage.dev/health-check-unhealthy-threshold";

/// The path of every health check: what kube-proxy and our agent answer on both ports.
const PATH: &str = "/healthz";
/// Longest timeout that follows from an interval.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The health check of Services that do not change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Defaults {
    /// Time between two probes; `None` for one second, or the shortest that the provider takes.
    pub(crate) interval: Option<Duration>,
    /// How long a probe may take; `None` for four fifths of the interval.
    pub(crate) timeout: Option<Duration>,
    /// Good probes in a row that make a target healthy.
    pub(crate) healthy_threshold: u32,
    /// Bad probes in a row that make it unhealthy.
    pub(crate) unhealthy_threshold: u32,
}

/// ReasonMessage defaults do not fit the provider.
#[derive(Debug, thiserror::Error)]
#[error("the provider takes health-check intervals from {0:?} to {1:?}")]
pub(crate) struct Problem(Duration, Duration);

impl Defaults {
    /// Whether the flags fit the provider, so that no Service has to say so one by one.
    pub(crate) fn check(&self, (least, most): (Duration, Duration)) -> Result<(), Problem> {
        let fits = self.interval.is_none_or(|interval| (least..=most).contains(&interval));
        if fits { Ok(()) } else { Err(Problem(least, most)) }
    }
}

/// The health check: of the Service on this very node under the policy Local and health-check steering, else of the node's
/// service proxy.
pub(crate) fn health_check(
    service: &Service,
    steering: Steering,
    config: &Config,
) -> Result<HealthCheck, PlanError> {
    let port = match (service.external_policy, steering) {
        (TrafficPolicy::Local, Steering::HealthCheck) => {
            service.health_check_node_port.ok_or(PlanError::NoHealthCheckNodePort)?
        }
        _ if service.is_labelled_for_agent() => config.agent_healthz_port,
        _ => config.proxy_healthz_port,
    };
    let (least, most) = config.capabilities.health_interval;
    let defaults = &config.health;
    let interval = match read(service, INTERVAL, duration)? {
        Some(interval) if (least..=most).contains(&interval) => interval,
        Some(_) => return Err(invalid(INTERVAL, format!("the provider takes {least:?} to {most:?}"))),
        None => defaults.interval.unwrap_or(Duration::from_secs(1).clamp(least, most)),
    };
    let timeout = match read(service, TIMEOUT, duration)? {
        Some(timeout) if timeout > interval => {
            return Err(invalid(TIMEOUT, format!("it must not exceed the interval of {interval:?}")));
        }
        Some(timeout) => timeout,
        None => defaults.timeout.unwrap_or((interval * 4 / 5).min(LONGEST_TIMEOUT)).min(interval),
    };
    Ok(HealthCheck {
        protocol: HealthProtocol::Http { path: PATH.to_owned() },
        port,
        interval,
        timeout,
        healthy_threshold: read(service, HEALTHY, threshold)?.unwrap_or(defaults.healthy_threshold),
        unhealthy_threshold: read(service, UNHEALTHY, threshold)?.unwrap_or(defaults.unhealthy_threshold),
    })
}

fn read<T>(
    service: &Service,
    name: &'static str,
    parse: fn(&str) -> Result<T, String>,
) -> Result<Option<T>, PlanError> {
    service.annotations.get(name).map(|text| parse(text.trim())).transpose().map_err(|p| invalid(name, p))
}

fn invalid(name: &'static str, problem: String) -> PlanError {
    PlanError::InvalidAnnotation { name, problem }
}

/// `500ms`, `2s`, `1m`, or a bare number of seconds; not zero. Shared with the flags.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: write for example 500ms, 2s or 1m");
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        _ => return Err(wrong()),
    };
    let duration = Duration::try_from_secs_f64(seconds).map_err(|_| wrong())?;
    if duration.as_millis() == 0 { Err(wrong()) } else { Ok(duration) }
}

fn threshold(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 1..=100) => Ok(count),
        _ => Err(format!("{text:?} is not a whole number from 1 to 100")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, milliseconds) in
            [("500ms", 500), ("2s", 2000), ("10", 10_000), ("1m", 60_000), ("0.25s", 250)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "0", "0.1ms", "-1s", "5 parsecs", "1h", "NaN", "1e99"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn thresholds_are_small_and_not_zero() {
        assert_eq!(threshold("2"), Ok(2));
        for text in ["0", "101", "two", "-1", ""] {
            assert!(threshold(text).is_err(), "{text}");
        }
    }
}
