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
pub(crate) type Why = (&'static str, String);

/// What is known of a load balancer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// What keeps it from being as asked; `None` when it is.
    pub(crate) unprogrammed: Option<Why>,
    /// What to publish; `None` to leave what is there.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// Whether the Service has an endpoint that takes traffic.
    pub(crate) usable_endpoint: bool,
    /// How many targets it has.
    pub(crate) targets: usize,
    /// What the provider says of them; `None` when it has not been asked yet.
    pub(crate) health: Option<Vec<TargetHealth>>,
    /// What is amiss while the rest works, worst first.
    pub(crate) degraded: Vec<Why>,
}

/// What the status should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Desired {
    /// `None` to leave what is there.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// The three conditions of ours.
    pub(crate) conditions: Vec<Condition>,
}

/// Conditions and ingress that follow from the facts.
pub(crate) fn desired(facts: &Facts, generation: Option<i64>) -> Desired {
    let condition = |kind: &str, status: &str, (reason, message): Why| Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
    };
    let programmed = match &facts.unprogrammed {
        Some(why) => condition(names::PROGRAMMED, "False", why.clone()),
        None => {
            let why = (reasons::PROGRAMMED, "the load balancer is as the Service asks".to_owned());
            condition(names::PROGRAMMED, "True", why)
        }
    };
    let (status, why) = serving(facts);
    let degraded = match facts.degraded.first() {
        None => condition(names::DEGRADED, "False", (reasons::NOT_DEGRADED, "nothing is amiss".to_owned())),
        Some((reason, _)) => {
            let all: Vec<&str> = facts.degraded.iter().map(|(_, message)| message.as_str()).collect();
            condition(names::DEGRADED, "True", (reason, all.join("; ")))
        }
    };
    let conditions = vec![programmed, condition(names::SERVING, status, why), degraded];
    Desired { ingress: facts.ingress.clone(), conditions }
}

/// Whether a client gets an answer. No counts in the sentence: it would change with every endpoint that moves.
fn serving(facts: &Facts) -> (&'static str, Why) {
    let why = |reason, message: &str| (reason, message.to_owned());
    if !facts.usable_endpoint {
        return ("False", why(reasons::NO_ENDPOINTS, "the Service has no endpoint that could answer"));
    }
    if facts.targets == 0 {
        return ("False", why(reasons::NO_TARGETS, "there is no node that the load balancer may use"));
    }
    let is = |state| facts.health.iter().flatten().any(|target| target.state == state);
    if is(HealthState::Healthy) {
        ("True", why(reasons::SERVING, "at least one target answers its health check"))
    } else if facts.health.is_none()
        || is(HealthState::Initial)
        || facts.health.as_ref().is_some_and(Vec::is_empty)
    {
        ("Unknown", why(reasons::NOT_PROBED_YET, "the provider has not yet told how the targets are doing"))
    } else {
        ("False", why(reasons::TARGETS_UNHEALTHY, "no target answers its health check"))
    }
}

/// The strategic merge patch of the status; `None` if it says all that already.
pub(crate) fn patch(service: &Service, desired: &Desired, now: Timestamp) -> Option<Value> {
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
