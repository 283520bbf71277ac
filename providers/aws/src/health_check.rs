// SPDX-License-Identifier: Apache-2.0
//! The health check of the target groups: that of the plan within the limits of `ELBv2`, and the annotations of AWS's own
//! controllers for its times and thresholds. Pure.

use std::ops::RangeInclusive;
use std::time::Duration;

use steerage_model::annotations as common;
use steerage_provider_api::{Error, HealthCheck, HealthProtocol, LoadBalancer};

use crate::annotations::{CHECK_HEALTHY, CHECK_INTERVAL, CHECK_TIMEOUT, CHECK_UNHEALTHY};
use crate::list;

const INTERVALS: RangeInclusive<i32> = 5..=300;
const TIMEOUTS: RangeInclusive<i32> = 2..=120;
const COUNTS: RangeInclusive<i32> = 2..=10;

/// A health check within the limits of `ELBv2`. Interval and timeout are in seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HealthCheckSettings {
    /// Path of an HTTP check; `None` means a TCP check.
    pub(crate) path: Option<String>,
    pub(crate) port: u16,
    pub(crate) interval: i32,
    pub(crate) timeout: i32,
    pub(crate) healthy: i32,
    pub(crate) unhealthy: i32,
}

fn seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_secs()).unwrap_or(i32::MAX)
}

fn clamped(check: &HealthCheck) -> HealthCheckSettings {
    let clamp = |n: i32, range: &RangeInclusive<i32>| n.clamp(*range.start(), *range.end());
    let count = |n: u32| clamp(i32::try_from(n).unwrap_or(i32::MAX), &COUNTS);
    let interval = clamp(seconds(check.interval), &INTERVALS);
    HealthCheckSettings {
        path: match &check.protocol {
            HealthProtocol::Http { path } => Some(path.clone()),
            HealthProtocol::Tcp => None,
        },
        port: check.port,
        interval,
        timeout: clamp(seconds(check.timeout), &TIMEOUTS).min(interval),
        healthy: count(check.healthy_threshold),
        unhealthy: count(check.unhealthy_threshold),
    }
}

/// The value of an annotation; `None` without it. It must agree with Steerage's own annotation, whose value the plan has.
fn read(
    lb: &LoadBalancer,
    (name, own): (&str, &str),
    range: &RangeInclusive<i32>,
    planned: i32,
) -> Result<Option<i32>, Error> {
    let Some(text) = lb.annotations.get(name).map(|text| text.trim()) else { return Ok(None) };
    let value = text.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| {
        let advice = format!("Use a whole number from {} to {}, without a unit.", range.start(), range.end());
        list::invalid(name, &format!("has the wrong value `{text}`"), &advice)
    })?;
    if lb.annotations.contains_key(own) && value != planned {
        return Err(list::conflict(
            &format!("Annotations {name} and {own} contradict each other."),
            "Keep only one of them.",
        ));
    }
    Ok(Some(value))
}

/// The health check. With PROXY protocol, AWS sends the header to the health-check port too, where no service proxy understands it: a
/// TCP check still finds a dead node, but would not see which nodes have an endpoint.
pub(crate) fn health_check(
    lb: &LoadBalancer,
    has_proxy_protocol: bool,
) -> Result<HealthCheckSettings, Error> {
    let plan = &lb.health_check;
    let mut check = clamped(plan);
    let count = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    let named = [
        ((CHECK_INTERVAL, common::HEALTH_CHECK_INTERVAL), &INTERVALS, seconds(plan.interval)),
        ((CHECK_TIMEOUT, common::HEALTH_CHECK_TIMEOUT), &TIMEOUTS, seconds(plan.timeout)),
        ((CHECK_HEALTHY, common::HEALTH_CHECK_HEALTHY_THRESHOLD), &COUNTS, count(plan.healthy_threshold)),
        (
            (CHECK_UNHEALTHY, common::HEALTH_CHECK_UNHEALTHY_THRESHOLD),
            &COUNTS,
            count(plan.unhealthy_threshold),
        ),
    ];
    let mut values = [None; 4];
    for (value, (names, range, planned)) in values.iter_mut().zip(named) {
        *value = read(lb, names, range, planned)?;
    }
    let [interval, timeout, healthy, unhealthy] = values;
    check.interval = interval.unwrap_or(check.interval);
    check.timeout = timeout.unwrap_or(check.timeout.min(check.interval));
    check.healthy = healthy.unwrap_or(check.healthy);
    check.unhealthy = unhealthy.unwrap_or(check.unhealthy);
    if check.timeout > check.interval {
        let message = format!(
            "Annotation {CHECK_TIMEOUT} is {}s, longer than the interval of the health check, {}s.",
            check.timeout, check.interval
        );
        return Err(list::conflict(&message, &format!("Lower it, or raise {CHECK_INTERVAL}.")));
    }
    if has_proxy_protocol {
        if plan.is_of_service {
            return Err(list::conflict(
                "PROXY protocol is enabled, but AWS sends its header to the health-check node port too, which does not \
                 understand it: no node would be healthy.",
                "Set the annotation steerage.dev/steering to api or spec.externalTrafficPolicy to Cluster, or disable PROXY \
                 protocol.",
            ));
        }
        check.path = None;
    }
    Ok(check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::planned;

    fn made(plan: HealthCheck, pairs: &[(&str, &str)]) -> Result<[i32; 4], (&'static str, String)> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let lb = LoadBalancer { annotations: pairs.collect(), health_check: plan, ..planned(&[]) };
        let check = health_check(&lb, false).map_err(|error| (error.reason(), error.to_string()))?;
        Ok([check.interval, check.timeout, check.healthy, check.unhealthy])
    }

    fn plan(interval: u64, timeout: u64, healthy: u32, unhealthy: u32) -> HealthCheck {
        HealthCheck {
            interval: Duration::from_secs(interval),
            timeout: Duration::from_secs(timeout),
            healthy_threshold: healthy,
            unhealthy_threshold: unhealthy,
            ..planned(&[]).health_check
        }
    }

    #[test]
    fn plan_is_clamped_to_limits() {
        let of = |a, b, c, d| made(plan(a, b, c, d), &[]).unwrap();
        assert_eq!(of(1, 1, 1, 1), [5, 2, 2, 2]);
        assert_eq!(of(10, 6, 3, 3), [10, 6, 3, 3]);
        assert_eq!(of(5, 60, 2, 2), [5, 5, 2, 2]);
        assert_eq!(of(9999, 9999, 99, u32::MAX), [300, 120, 10, 10]);
    }

    #[test]
    fn annotations_replace_the_plan() {
        let all =
            [(CHECK_INTERVAL, "30"), (CHECK_TIMEOUT, " 10 "), (CHECK_HEALTHY, "4"), (CHECK_UNHEALTHY, "5")];
        assert_eq!(made(plan(5, 3, 2, 2), &all), Ok([30, 10, 4, 5]));
        assert_eq!(
            made(plan(20, 15, 2, 2), &[(CHECK_INTERVAL, "10")]),
            Ok([10, 10, 2, 2]),
            "the timeout follows"
        );
        let both = [(CHECK_INTERVAL, "10"), (common::HEALTH_CHECK_INTERVAL, "10s")];
        assert_eq!(made(plan(10, 3, 2, 2), &both), Ok([10, 3, 2, 2]));
    }

    #[test]
    fn wrong_annotations_are_refused() {
        for (pairs, reason, part) in [
            (&[(CHECK_INTERVAL, "10s")][..], "InvalidAnnotation", "without a unit"),
            (&[(CHECK_INTERVAL, "4")], "InvalidAnnotation", "5 to 300"),
            (&[(CHECK_TIMEOUT, "1")], "InvalidAnnotation", "2 to 120"),
            (&[(CHECK_HEALTHY, "11")], "InvalidAnnotation", "2 to 10"),
            (&[(CHECK_UNHEALTHY, "")], "InvalidAnnotation", "2 to 10"),
            (&[(CHECK_TIMEOUT, "6")], "ConflictingAnnotations", "interval"),
            (
                &[(CHECK_INTERVAL, "10"), (common::HEALTH_CHECK_INTERVAL, "5s")],
                "ConflictingAnnotations",
                "contradict",
            ),
        ] {
            let (found, message) = made(plan(5, 3, 2, 2), pairs).unwrap_err();
            assert_eq!(found, reason, "{message}");
            assert!(message.contains(part) && message.contains(pairs[0].0), "{message}");
        }
    }
}
