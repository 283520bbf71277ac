// SPDX-License-Identifier: Apache-2.0
//! The desired status of a Service, and the patch that makes it so. Pure.
//!
//! Changes only Steerage's three conditions, and the ingress of Services that this controller manages.

use jiff::Timestamp;
use serde_json::{Value, json};
use steerage_model::{Condition, Ingress, IpMode, Service, names, printable};
use steerage_provider_api::{Health, HealthState, PartHealth};

use crate::reasons;

/// A stable reason and a message for users.
pub(crate) type ReasonMessage = (&'static str, String);

/// The health of a load balancer's targets, reduced to what a status says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HealthSummary {
    has_healthy: bool,
    is_undecided: bool,
    /// Parts of the load balancer without a healthy target, while others have one.
    unserved: Vec<String>,
    /// Some of the unusable targets, with the reason.
    unusable: Vec<(String, String)>,
    unusable_count: usize,
}

impl HealthSummary {
    /// Unusable targets that a message names.
    const SHOWN: usize = 5;

    pub(crate) fn new(health: &Health) -> Self {
        let Health { targets, omitted, parts, due: _ } = health;
        let omitted_count = |state| omitted.get(&state).copied().unwrap_or_default();
        let any = |state| omitted_count(state) > 0 || targets.iter().any(|target| target.state == state);
        let any_part = |is_served| parts.iter().any(|part| part.is_served == is_served);
        let unusable = || targets.iter().filter(|t| t.state == HealthState::Unused && !t.reason.is_empty());
        // A target that all parts share can be healthy for one of them only.
        let has_healthy = any(HealthState::Healthy) || any_part(Some(true));
        let unserved = parts.iter().filter(|part| has_healthy && part.is_served == Some(false));
        Self {
            has_healthy,
            is_undecided: targets.is_empty() && omitted.is_empty()
                || any(HealthState::Initial)
                || any_part(None),
            unserved: unserved.map(|part: &PartHealth| part.name.clone()).collect(),
            unusable: unusable().take(Self::SHOWN).map(|t| (t.target.clone(), t.reason.clone())).collect(),
            unusable_count: unusable().count() + omitted_count(HealthState::Unused),
        }
    }

    /// The parts without a healthy target, for users; `None` if there are none.
    fn unserved(&self) -> Option<String> {
        /// Parts that a message names.
        const SHOWN: usize = 10;
        let shown = self.unserved.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
        match self.unserved.len() {
            0 => None,
            count if count > SHOWN => Some(format!("{shown}, and {} more", count - SHOWN)),
            _ => Some(shown),
        }
    }

    /// Reports parts without a healthy target.
    pub(crate) fn unserved_parts(&self) -> Option<ReasonMessage> {
        let parts = self.unserved()?;
        let message = format!(
            "No target passes its health check for {parts}. The other ports that have a listener are served. Check that the pods accept \
             connections there, and that firewalls admit the load balancer."
        );
        Some((reasons::PARTLY_UNHEALTHY, message))
    }
}

/// Reports targets that the provider refused, or found unusable later.
pub(crate) fn refused_targets(
    refused: &[(String, String)],
    health: Option<&HealthSummary>,
) -> Option<ReasonMessage> {
    let unusable = health.map(|health| health.unusable.as_slice()).unwrap_or_default();
    let count = refused.len() + health.map_or(0, |health| health.unusable_count);
    let shown: Vec<String> = refused
        .iter()
        .chain(unusable)
        .take(HealthSummary::SHOWN)
        .map(|(target, why)| format!("{target}: {why}"))
        .collect();
    let more = count.saturating_sub(shown.len());
    let rest = match more {
        0 => String::new(),
        _ if shown.is_empty() => format!("{more} targets"),
        _ => format!("; and {more} more"),
    };
    (count > 0).then(|| {
        let message = format!(
            "Not used as targets: {}{rest}. The others are used. Fix what each reason names; Steerage tries again.",
            shown.join("; ")
        );
        (reasons::TARGETS_REFUSED, message)
    })
}

/// Reports a part that is not in place, which the provider's message names.
pub(crate) fn partly_programmed((_, message): &ReasonMessage) -> ReasonMessage {
    let message = format!("A part of the Service is not in place, and the rest works. {message}");
    (reasons::PARTLY_PROGRAMMED, message)
}

/// What the status follows from.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusInputs {
    /// Why the load balancer is not as requested; `None` when it is.
    pub(crate) unprogrammed: Option<ReasonMessage>,
    /// What to publish; `None` keeps what is published.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// Whether clients can know an address of the load balancer: the Service publishes one, or will now.
    pub(crate) is_published: bool,
    /// Whether an endpoint of the Service takes traffic.
    pub(crate) has_usable_endpoint: bool,
    /// Whether the Service has a selector; without one, users write its `EndpointSlices`.
    pub(crate) has_selector: bool,
    /// The number of targets.
    pub(crate) targets: usize,
    /// Whether pods are targets; otherwise nodes are.
    pub(crate) has_pod_targets: bool,
    /// Whether targets get nothing while none is healthy.
    pub(crate) fails_closed: bool,
    /// Whether the provider never reports the health of targets.
    pub(crate) reports_no_health: bool,
    /// `None` until the provider was asked.
    pub(crate) health: Option<HealthSummary>,
    /// Since when it cannot be read, and why, if it is out of date.
    pub(crate) outdated_health: Option<(Timestamp, &'static str)>,
    /// What is wrong while the load balancer works, worst first.
    pub(crate) degraded: Vec<ReasonMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DesiredStatus {
    /// `None` keeps what is published.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// Steerage's three conditions.
    pub(crate) conditions: Vec<Condition>,
}

pub(crate) fn desired(inputs: &StatusInputs, generation: Option<i64>) -> DesiredStatus {
    let condition = |kind: &str, status: &str, (reason, message): ReasonMessage| Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: printable(&message).into_owned(),
        observed_generation: generation,
    };
    let programmed = if let Some(why) = &inputs.unprogrammed {
        condition(names::PROGRAMMED, "False", why.clone())
    } else {
        let why = (reasons::PROGRAMMED, "The load balancer is as requested.".to_owned());
        condition(names::PROGRAMMED, "True", why)
    };
    let (status, why) = serving(inputs);
    let degraded = match inputs.degraded.first() {
        None => {
            condition(names::DEGRADED, "False", (reasons::AS_EXPECTED, "No problem is known.".to_owned()))
        }
        Some((reason, _)) => {
            let sentence = |(_, message): &ReasonMessage| format!("{}.", message.trim_end_matches('.'));
            let all: Vec<String> = inputs.degraded.iter().map(sentence).collect();
            condition(names::DEGRADED, "True", (reason, all.join(" ")))
        }
    };
    let conditions = vec![programmed, condition(names::SERVING, status, why), degraded];
    DesiredStatus { ingress: inputs.ingress.clone(), conditions }
}

/// Whether the Service's conditions already say this.
pub(crate) fn has(service: &Service, (reason, message): &ReasonMessage) -> bool {
    let message = printable(message.trim_end_matches('.'));
    service.conditions.iter().any(|found| found.reason == *reason && found.message.contains(&*message))
}

/// The status of a paused Service: what was published last stays.
pub(crate) fn paused((reason, message): ReasonMessage, generation: Option<i64>) -> DesiredStatus {
    let degraded = Condition {
        kind: names::DEGRADED.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        message: printable(&message).into_owned(),
        observed_generation: generation,
    };
    DesiredStatus { ingress: None, conditions: vec![degraded] }
}

/// Whether this reason of `Programmed` is a problem. Else the provider only needs time.
pub(crate) fn is_final((reason, _): &ReasonMessage) -> bool {
    *reason != reasons::PROGRESSING
}

pub(crate) fn no_endpoints(has_selector: bool) -> ReasonMessage {
    let message = if has_selector {
        "The Service has no endpoint that takes traffic. Connections fail. \
         Check that pods match spec.selector and are ready."
    } else {
        "The Service has no selector and no endpoint. Connections fail. \
         Set spec.selector, or create EndpointSlices for the Service."
    };
    (reasons::NO_ENDPOINTS, message.to_owned())
}

/// Whether clients get an answer. The messages contain no counts, which would change with every endpoint.
fn serving(inputs: &StatusInputs) -> (&'static str, ReasonMessage) {
    let why = |reason, message: &str| (reason, message.to_owned());
    if !inputs.has_usable_endpoint {
        return ("False", no_endpoints(inputs.has_selector));
    }
    if inputs.targets == 0 && inputs.has_pod_targets {
        let message = "No endpoint has a port of the Service. Connections fail. \
                       Check spec.ports, and the EndpointSlices of the Service.";
        return ("False", why(reasons::NO_TARGETS, message));
    }
    if inputs.targets == 0 {
        let message = "No node is eligible as a target. Connections fail. \
                       Check the nodes' taints and exclusion labels.";
        return ("False", why(reasons::NO_TARGETS, message));
    }
    if let Some((reason, _)) =
        inputs.unprogrammed.as_ref().filter(|why| !inputs.is_published && is_final(why))
    {
        let message = format!(
            "No port is served: the Service has no load balancer, or one that is not complete, and publishes no address. The condition \
             steerage.dev/Programmed says why ({reason})."
        );
        return ("False", (reasons::NOT_PROGRAMMED, message));
    }
    if let Some((read, failure)) = inputs.outdated_health {
        let message = format!(
            "The health of the targets was last read at {}. Since then it cannot be read ({failure}). Traffic is not affected by that, and \
             Steerage retries. See the controller's log.",
            read.strftime("%Y-%m-%dT%H:%M:%SZ")
        );
        return ("Unknown", (reasons::HEALTH_UNKNOWN, message));
    }
    match &inputs.health {
        Some(health) if health.has_healthy => {
            let message = match health.unserved() {
                None => "At least one target passes its health check.".to_owned(),
                Some(parts) => format!("At least one target passes its health check, but none for {parts}."),
            };
            ("True", (reasons::SERVING, message))
        }
        Some(health) if !health.is_undecided && inputs.has_pod_targets => {
            let message = "No pod passes its health check. The provider may use all pods. Check that they accept \
                           connections on targetPort, and that firewalls admit the load balancer.";
            ("False", why(reasons::TARGETS_UNHEALTHY, message))
        }
        Some(health) if !health.is_undecided => {
            let result =
                if inputs.fails_closed { "Connections fail." } else { "The provider may use all targets." };
            let message = format!(
                "No target passes its health check. {result} Check the health-check port on the nodes, and firewalls."
            );
            ("False", (reasons::TARGETS_UNHEALTHY, message))
        }
        _ if inputs.reports_no_health => {
            let message =
                "The provider does not report the health of targets. That alone affects no traffic.";
            ("Unknown", why(reasons::HEALTH_UNKNOWN, message))
        }
        _ => {
            let message = "The provider has not reported the health of the targets yet, or it cannot be read: then the controller's log says \
                           why. That alone affects no traffic.";
            ("Unknown", why(reasons::HEALTH_UNKNOWN, message))
        }
    }
}

/// The strategic merge patch of the status; `None` if nothing differs.
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

/// That the published addresses become others, for an event: clients that use the old ones lose their connections.
pub(crate) fn changed_addresses(service: &Service, desired: &DesiredStatus) -> Option<ReasonMessage> {
    let shown = |list: &[Ingress]| {
        let address = |entry: &Ingress| entry.ip.map(|ip| ip.to_string()).or_else(|| entry.hostname.clone());
        let mut shown: Vec<_> = list.iter().filter_map(address).collect();
        shown.sort_unstable();
        shown.join(", ")
    };
    let (old, new) = (shown(&service.ingress), shown(desired.ingress.as_deref()?));
    let is_changed = !old.is_empty() && !new.is_empty() && old != new;
    is_changed.then(|| {
        (
            reasons::ADDRESSES_CHANGED,
            format!("The published addresses are {new} now. Before, they were {old}."),
        )
    })
}

/// The patch that removes Steerage's conditions, and the ingress if asked for; `None` if there are none.
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

/// An address without `ipMode` equals one with `VIP`, the API server's default.
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
    // Omitted while the status stays the same, so that the merge keeps the time of the last transition.
    if old.is_none_or(|old| old.status != *status) {
        entry["lastTransitionTime"] = json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    entry
}

#[cfg(test)]
mod tests;
