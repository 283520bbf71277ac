// SPDX-License-Identifier: Apache-2.0
//! What a Service's status should say, and the patch that makes it so. Pure.
//!
//! Only the ingress of our own Services and the three conditions of ours are ever touched.

use jiff::Timestamp;
use serde_json::{Value, json};
use steerage_model::{Condition, Ingress, IpMode, Service, names};
use steerage_provider_api::{HealthState, TargetHealth};

use crate::reasons;

/// A reason and a sentence.
pub(crate) type ReasonMessage = (&'static str, String);

/// How the targets are doing, as far as a status tells it: a state for each would be too much to keep for every load balancer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HealthSummary {
    healthy: bool,
    probing: bool,
    /// Some of the targets that cannot be used, with the reason.
    unused: Vec<(String, String)>,
    /// How many there are.
    unused_count: usize,
}

impl HealthSummary {
    /// How many unusable targets are told by name.
    const SHOWN: usize = 5;

    /// The sum of what the provider says of each target.
    pub(crate) fn of(targets: &[TargetHealth]) -> Self {
        let is = |state| targets.iter().any(|target| target.state == state);
        let unused = || targets.iter().filter(|t| t.state == HealthState::Unused && !t.reason.is_empty());
        Self {
            healthy: is(HealthState::Healthy),
            probing: targets.is_empty() || is(HealthState::Initial),
            unused: unused().take(Self::SHOWN).map(|t| (t.node.clone(), t.reason.clone())).collect(),
            unused_count: unused().count(),
        }
    }
}

/// What to say of targets that the provider refused at once, or found unusable later.
pub(crate) fn refused(refused: &[(String, String)], health: Option<&HealthSummary>) -> Option<ReasonMessage> {
    let unused = health.map(|health| health.unused.as_slice()).unwrap_or_default();
    let count = refused.len() + health.map_or(0, |health| health.unused_count);
    let shown: Vec<String> = refused
        .iter()
        .chain(unused)
        .take(HealthSummary::SHOWN)
        .map(|(node, why)| format!("{node}: {why}"))
        .collect();
    let more = count.saturating_sub(shown.len());
    let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
    (count > 0).then(|| (reasons::TARGETS_REFUSED, format!("{}{rest}", shown.join("; "))))
}

/// What is known of a load balancer.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusInputs {
    /// What keeps it from being as asked; `None` when it is.
    pub(crate) unprogrammed: Option<ReasonMessage>,
    /// What to publish; `None` to leave what is there.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// Whether the Service has an endpoint that takes traffic.
    pub(crate) usable_endpoint: bool,
    /// Whether the Service selects its endpoints; without a selector somebody has to write them.
    pub(crate) has_selector: bool,
    /// How many targets it has.
    pub(crate) targets: usize,
    /// What the provider says of them; `None` when it has not been asked yet.
    pub(crate) health: Option<HealthSummary>,
    /// What is amiss while the rest works, worst first.
    pub(crate) degraded: Vec<ReasonMessage>,
}

/// What the status should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DesiredStatus {
    /// `None` to leave what is there.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// The three conditions of ours.
    pub(crate) conditions: Vec<Condition>,
}

/// Conditions and ingress that follow from the inputs.
pub(crate) fn desired(inputs: &StatusInputs, generation: Option<i64>) -> DesiredStatus {
    let condition = |kind: &str, status: &str, (reason, message): ReasonMessage| Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
    };
    let programmed = if let Some(why) = &inputs.unprogrammed {
        condition(names::PROGRAMMED, "False", why.clone())
    } else {
        let why = (reasons::PROGRAMMED, "the load balancer is as the Service asks".to_owned());
        condition(names::PROGRAMMED, "True", why)
    };
    let (status, why) = serving(inputs);
    let degraded = match inputs.degraded.first() {
        None => condition(names::DEGRADED, "False", (reasons::AS_EXPECTED, "nothing is amiss".to_owned())),
        Some((reason, _)) => {
            let all: Vec<&str> = inputs.degraded.iter().map(|(_, message)| message.as_str()).collect();
            condition(names::DEGRADED, "True", (reason, all.join("; ")))
        }
    };
    let conditions = vec![programmed, condition(names::SERVING, status, why), degraded];
    DesiredStatus { ingress: inputs.ingress.clone(), conditions }
}

/// ReasonMessage nobody could answer, and what to do.
pub(crate) fn no_endpoints(has_selector: bool) -> ReasonMessage {
    let message = if has_selector {
        "the Service has no endpoint that could answer: see whether its pods are there and ready"
    } else {
        "the Service has no selector and no endpoint: set spec.selector, or write EndpointSlices for it"
    };
    (reasons::NO_ENDPOINTS, message.to_owned())
}

/// Whether a client gets an answer. No counts in the sentence: it would change with every endpoint that moves.
fn serving(inputs: &StatusInputs) -> (&'static str, ReasonMessage) {
    let why = |reason, message: &str| (reason, message.to_owned());
    if !inputs.usable_endpoint {
        return ("False", no_endpoints(inputs.has_selector));
    }
    if inputs.targets == 0 {
        return ("False", why(reasons::NO_TARGETS, "there is no node that the load balancer may use"));
    }
    match &inputs.health {
        Some(health) if health.healthy => {
            ("True", why(reasons::SERVING, "at least one target answers its health check"))
        }
        Some(health) if !health.probing => {
            ("False", why(reasons::TARGETS_UNHEALTHY, "no target answers its health check"))
        }
        _ => (
            "Unknown",
            why(reasons::HEALTH_UNKNOWN, "the provider has not yet told how the targets are doing"),
        ),
    }
}

/// The strategic merge patch of the status; `None` if it says all that already.
pub(crate) fn patch(service: &Service, desired: &DesiredStatus, now: Timestamp) -> Option<Value> {
    let mut status = json!({});
    if let Some(ingress) = desired.ingress.as_ref().filter(|ingress| !same_ingress(ingress, &service.ingress))
    {
        status["loadBalancer"] = json!({"ingress": ingress.iter().map(ingress_json).collect::<Vec<_>>()});
    }
    let changed: Vec<Value> = desired
        .conditions
        .iter()
        .filter_map(|condition| {
            let old = service.conditions.iter().find(|old| old.kind == condition.kind);
            (old != Some(condition)).then(|| condition_json(condition, old, now))
        })
        .collect();
    if !changed.is_empty() {
        status["conditions"] = Value::Array(changed);
    }
    (status != json!({})).then(|| json!({"metadata": {"uid": service.uid}, "status": status}))
}

/// The patch that takes away all that is ours; `None` if nothing is left.
pub(crate) fn clearing_patch(service: &Service, with_ingress: bool) -> Option<Value> {
    let mut status = json!({});
    if with_ingress && !service.ingress.is_empty() {
        status["loadBalancer"] = json!({"ingress": null});
    }
    let ours = [names::PROGRAMMED, names::SERVING, names::DEGRADED];
    let gone: Vec<Value> = service
        .conditions
        .iter()
        .filter(|condition| ours.contains(&condition.kind.as_str()))
        .map(|condition| json!({"$patch": "delete", "type": condition.kind}))
        .collect();
    if !gone.is_empty() {
        status["conditions"] = Value::Array(gone);
    }
    (status != json!({})).then(|| json!({"metadata": {"uid": service.uid}, "status": status}))
}

/// An absent `ipMode` beside an address counts as `VIP`, which the API server fills in.
fn same_ingress(a: &[Ingress], b: &[Ingress]) -> bool {
    let full = |list: &[Ingress]| -> Vec<Ingress> {
        list.iter()
            .map(|ingress| Ingress {
                ip_mode: ingress.ip.and(ingress.ip_mode.or(Some(IpMode::Vip))),
                ..ingress.clone()
            })
            .collect()
    };
    full(a) == full(b)
}

fn ingress_json(ingress: &Ingress) -> Value {
    let mut entry = json!({});
    if let Some(ip) = ingress.ip {
        entry["ip"] = json!(ip);
        let mode = match ingress.ip_mode {
            Some(IpMode::Proxy) => "Proxy",
            Some(IpMode::Vip) | None => "VIP",
        };
        entry["ipMode"] = json!(mode);
    }
    if let Some(hostname) = &ingress.hostname {
        entry["hostname"] = json!(hostname);
    }
    entry
}

fn condition_json(condition: &Condition, old: Option<&Condition>, now: Timestamp) -> Value {
    let Condition { kind, status, reason, message, observed_generation } = condition;
    let mut entry = json!({"type": kind, "status": status, "reason": reason, "message": message});
    if let Some(generation) = observed_generation {
        entry["observedGeneration"] = json!(generation);
    }
    // Left out while the status stays: the merge then keeps the time of the last transition.
    if old.is_none_or(|old| old.status != *status) {
        entry["lastTransitionTime"] = json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    entry
}

#[cfg(test)]
mod tests;
