// SPDX-License-Identifier: Apache-2.0
//! The annotations by which Services asked for what is `externalTrafficPolicy: Local` today.
//!
//! The API server fills `externalTrafficPolicy: Cluster` in where nobody wrote anything, so that the field alone cannot tell an old
//! manifest from a choice. Hence the patch is made once, and never over a later choice.

use serde_json::{Value, json};
use steerage_model::{Service, ServiceKind, TrafficPolicy, names};

/// Service annotation that remembers that the old annotations were followed, so that a later edit by a user wins.
pub(crate) const MIGRATED: &str = "steerage.dev/legacy-annotations-migrated";

/// What the old annotations of a Service call for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Legacy {
    /// Nothing.
    None,
    /// They cannot be read: what is wrong.
    Invalid(String),
    /// They ask for the policy Local: the patch, which is a JSON merge patch of the Service.
    Local(Value),
}

/// Reads the old annotations.
pub(crate) fn legacy(service: &Service) -> Legacy {
    if service.kind != ServiceKind::LoadBalancer || service.annotations.contains_key(MIGRATED) {
        return Legacy::None;
    }
    let find = |names: [&'static str; 2]| {
        names.into_iter().find_map(|name| Some((name, service.annotations.get(name)?.trim())))
    };
    let Some((name, value)) = find(names::LEGACY_EXTERNAL_TRAFFIC) else { return Legacy::None };
    match value {
        "Global" => return Legacy::None,
        "OnlyLocal" if service.external_policy == TrafficPolicy::Local => return Legacy::None,
        "OnlyLocal" => {}
        _ => return Legacy::Invalid(format!("annotation {name}: {value:?} is neither OnlyLocal nor Global")),
    }
    let mut spec = json!({"externalTrafficPolicy": "Local"});
    if let Some((name, value)) = find(names::LEGACY_HEALTH_CHECK_NODE_PORT) {
        match value.parse::<u16>() {
            Ok(port @ 1..) => spec["healthCheckNodePort"] = json!(port),
            _ => return Legacy::Invalid(format!("annotation {name}: {value:?} is not a port")),
        }
    }
    Legacy::Local(json!({"spec": spec}))
}

/// The command that makes the patch.
pub(crate) fn command(service: &Service, patch: &Value) -> String {
    let (namespace, name) = (service.key.namespace(), service.key.name());
    format!("kubectl patch service --namespace {namespace} {name} --type merge --patch '{patch}'")
}
