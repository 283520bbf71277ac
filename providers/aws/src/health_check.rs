// SPDX-License-Identifier: Apache-2.0
//! The health check of the target groups: that of the plan within the limits of `ELBv2`, and the annotations of AWS's own
//! controllers: for its times and thresholds and, where pods are targets, for what it asks. Pure.

use std::ops::RangeInclusive;
use std::time::Duration;

use steerage_model::{annotations as common, shown};
use steerage_provider_api::{Error, GroupKey, HealthCheck, HealthProtocol, LoadBalancer, TargetGroup};
use steerage_provider_cloud::annotation;

use crate::annotations::{
    CHECK_HEALTHY, CHECK_INTERVAL, CHECK_PATH, CHECK_PORT, CHECK_PROTOCOL, CHECK_TIMEOUT, CHECK_UNHEALTHY,
    TARGET_TYPE,
};
use crate::reasons;

const INTERVALS: RangeInclusive<i32> = 5..=300;
const TIMEOUTS: RangeInclusive<i32> = 2..=120;
const COUNTS: RangeInclusive<i32> = 2..=10;

/// A health check within the limits of `ELBv2`. Interval and timeout are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HealthCheckSettings {
    /// Path of an HTTP check; `None` means a TCP check.
    pub(crate) path: Option<String>,
    /// `None` means the port on which each target receives packets.
    pub(crate) port: Option<u16>,
    pub(crate) interval: i32,
    pub(crate) timeout: i32,
    pub(crate) healthy: i32,
    pub(crate) unhealthy: i32,
}

impl HealthCheckSettings {
    /// Whether both ask the same of a target, however often.
    pub(crate) fn asks_like(&self, other: &Self) -> bool {
        (&self.path, self.port) == (&other.path, other.port)
    }
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
        annotation::invalid(name, &format!("has the wrong value `{}`", shown(text)), &advice)
    })?;
    if lb.annotations.contains_key(own) && value != planned {
        return Err(annotation::conflict(
            &format!("Annotations {name} and {own} contradict each other."),
            "Keep only one of them.",
        ));
    }
    Ok(Some(value))
}

/// What is asked of pods: by the annotations, else a TCP check of the port on which they receive packets.
fn read_pod_check(lb: &LoadBalancer, protocol: &str, check: &mut HealthCheckSettings) -> Result<(), Error> {
    let text = |name: &str| lb.annotations.get(name).map(|text| text.trim());
    let path = text(CHECK_PATH);
    match text(CHECK_PROTOCOL).map(str::to_ascii_lowercase).as_deref() {
        None | Some("tcp") => {
            if path.is_some() {
                let problem =
                    format!("Annotation {CHECK_PATH} names a path, but the health check is a TCP check.");
                let advice = format!("Set {CHECK_PROTOCOL} to http, or remove the path.");
                return Err(annotation::conflict(&problem, &advice));
            }
        }
        Some("http") => check.path = Some(path.unwrap_or("/").to_owned()),
        Some(other) => {
            let problem = format!("has the unsupported value `{}`", shown(other));
            return Err(annotation::invalid(CHECK_PROTOCOL, &problem, "Use tcp or http."));
        }
    }
    if let Some(path) = path.filter(|path| !path.starts_with('/') || path.len() > 1024) {
        let problem = format!("has the wrong value `{}`", shown(path));
        return Err(annotation::invalid(
            CHECK_PATH,
            &problem,
            "Begin it with /, with at most 1,024 characters.",
        ));
    }
    match text(CHECK_PORT) {
        None | Some("traffic-port") => {}
        Some(port) => match port.parse() {
            Ok(port) if port != 0 => check.port = Some(port),
            _ => {
                let problem = format!("has the wrong value `{}`", shown(port));
                return Err(annotation::invalid(
                    CHECK_PORT,
                    &problem,
                    "Use traffic-port, or a number from 1 to 65535.",
                ));
            }
        },
    }
    if protocol == "UDP" && check.port.is_none() {
        return Err(annotation::conflict(
            "Pods are targets of a UDP port, on which AWS cannot check their health.",
            &format!("Name a TCP port of the pods in {CHECK_PORT}."),
        ));
    }
    Ok(())
}

/// What is asked of nodes is Steerage's choice: an annotation that requests something else is refused.
fn check_nodes(lb: &LoadBalancer) -> Result<(), Error> {
    for (name, accepted) in [(CHECK_PROTOCOL, "http"), (CHECK_PATH, "/healthz"), (CHECK_PORT, "")] {
        let Some(text) = lb.annotations.get(name).map(|text| text.trim()) else { continue };
        let is_accepted = text == accepted || name == CHECK_PROTOCOL && text.eq_ignore_ascii_case(accepted);
        if accepted.is_empty() || !is_accepted {
            let message = format!(
                "Annotation {name} requests another health check than that of the nodes' service proxy, which externalTrafficPolicy \
                 and steerage.dev/steering choose. No load balancer is created or changed. Remove the annotation, or choose pods as \
                 targets by {TARGET_TYPE}: ip."
            );
            return Err(Error::invalid(reasons::ANNOTATION_NOT_SUPPORTED, message));
        }
    }
    Ok(())
}

/// The health check of a group. With PROXY protocol, AWS sends the header to the health-check port too, where no service proxy
/// understands it: a TCP check still finds a dead node, but would not see which nodes have an endpoint.
pub(crate) fn health_check(
    lb: &LoadBalancer,
    group: &TargetGroup,
    protocol: &str,
    has_proxy_protocol: bool,
) -> Result<HealthCheckSettings, Error> {
    let plan = &group.health_check;
    let of_pods = matches!(group.key, GroupKey::Pods(_));
    let mut check = clamped(plan);
    if of_pods {
        read_pod_check(lb, protocol, &mut check)?;
    } else {
        check_nodes(lb)?;
    }
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
        return Err(annotation::conflict(&message, &format!("Lower it, or raise {CHECK_INTERVAL}.")));
    }
    if has_proxy_protocol && !of_pods {
        if plan.is_of_service {
            return Err(annotation::conflict(
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
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::tests::{planned, planned_with_pods};

    fn made(plan: HealthCheck, pairs: &[(&str, &str)]) -> Result<[i32; 4], (&'static str, String)> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut lb = LoadBalancer { annotations: pairs.collect(), ..planned(&[(Protocol::Tcp, 80, 30080)]) };
        lb.groups[0].health_check = plan;
        let check = health_check(&lb, &lb.groups[0], "TCP", false)
            .map_err(|error| (error.reason(), error.to_string()))?;
        Ok([check.interval, check.timeout, check.healthy, check.unhealthy])
    }

    fn plan(interval: u64, timeout: u64, healthy: u32, unhealthy: u32) -> HealthCheck {
        HealthCheck {
            interval: Duration::from_secs(interval),
            timeout: Duration::from_secs(timeout),
            healthy_threshold: healthy,
            unhealthy_threshold: unhealthy,
            ..crate::desired::tests::check()
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

    fn asked(lb: &LoadBalancer, pairs: &[(&str, &str)]) -> Result<String, (&'static str, String)> {
        let mut lb = lb.clone();
        lb.annotations.extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let made = health_check(&lb, &lb.groups[0], "TCP", true)
            .map_err(|error| (error.reason(), error.to_string()))?;
        let port = made.port.map_or_else(|| "traffic-port".to_owned(), |port| port.to_string());
        Ok(made.path.map_or_else(|| port.clone(), |path| format!("{port}{path}")))
    }

    #[test]
    fn annotations_choose_what_is_asked_of_pods() {
        let pods = planned_with_pods(&[(Protocol::Tcp, 80, 8080)]);
        let ok = |pairs: &[(&str, &str)]| asked(&pods, pairs).unwrap();
        assert_eq!(ok(&[]), "traffic-port");
        assert_eq!(ok(&[(CHECK_PROTOCOL, "TCP"), (CHECK_PORT, "9000")]), "9000");
        assert_eq!(
            ok(&[(CHECK_PROTOCOL, "http")]),
            "traffic-port/",
            "also with PROXY protocol, which the pods read"
        );
        let all = [(CHECK_PROTOCOL, "HTTP"), (CHECK_PATH, " /ready?x=1 "), (CHECK_PORT, "traffic-port")];
        assert_eq!(ok(&all), "traffic-port/ready?x=1");
        let of_udp = |pairs: &[(&str, &str)]| {
            let mut lb = pods.clone();
            lb.annotations
                .extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
            health_check(&lb, &lb.groups[0], "UDP", false)
                .map(|check| check.port)
                .map_err(|error| error.reason())
        };
        assert_eq!(of_udp(&[]), Err("ConflictingAnnotations"), "no answer to a TCP check");
        assert_eq!(of_udp(&[(CHECK_PORT, "8080")]), Ok(Some(8080)));
        for (pairs, reason, part) in [
            (&[(CHECK_PROTOCOL, "https")][..], "InvalidAnnotation", "tcp or http"),
            (&[(CHECK_PATH, "/")], "ConflictingAnnotations", "to http"),
            (&[(CHECK_PROTOCOL, "http"), (CHECK_PATH, "ready")], "InvalidAnnotation", "Begin it with /"),
            (&[(CHECK_PORT, "0")], "InvalidAnnotation", "65535"),
            (&[(CHECK_PORT, "http")], "InvalidAnnotation", "traffic-port"),
        ] {
            let (found, message) = asked(&pods, pairs).unwrap_err();
            assert_eq!(found, reason, "{message}");
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn nodes_are_asked_for_their_service_proxy_only() {
        let nodes = planned(&[(Protocol::Tcp, 80, 30080)]);
        let accepted = [(CHECK_PROTOCOL, "HTTP"), (CHECK_PATH, "/healthz")];
        assert_eq!(
            asked(&nodes, &accepted),
            Ok("32000".to_owned()),
            "a TCP check, because of PROXY protocol"
        );
        for pair in
            [(CHECK_PROTOCOL, "tcp"), (CHECK_PATH, "/"), (CHECK_PORT, "traffic-port"), (CHECK_PORT, "")]
        {
            let (reason, message) = asked(&nodes, &[pair]).unwrap_err();
            assert_eq!(reason, "AnnotationNotSupported");
            assert!(message.contains(pair.0) && message.contains("target-type: ip"), "{message}");
        }
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
