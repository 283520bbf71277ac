// SPDX-License-Identifier: Apache-2.0
//! The alpha and beta annotations that preceded `externalTrafficPolicy: Local`.
//!
//! The API server defaults `externalTrafficPolicy` to `Cluster`, so the field does not show whether a user chose it. The patch is
//! therefore made once, and never over a later choice.

use serde_json::{Value, json};
use steerage_model::{Service, ServiceKind, TrafficPolicy, annotations, shown};

/// What the legacy annotations of a Service request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LegacyRequest {
    /// Nothing, or what the Service has already.
    None,
    /// An annotation has an invalid value: what is wrong and what to do.
    Invalid(String),
    /// The policy Local, by this JSON merge patch of the Service.
    Local(Value),
}

pub(crate) fn legacy_request(service: &Service) -> LegacyRequest {
    let is_migrated = service.annotations.contains_key(annotations::LEGACY_ANNOTATIONS_MIGRATED);
    if service.kind != ServiceKind::LoadBalancer || is_migrated {
        return LegacyRequest::None;
    }
    // The beta annotation takes precedence over the alpha one.
    let find = |names: [&'static str; 2]| {
        names.into_iter().find_map(|name| Some((name, service.annotations.get(name)?.trim())))
    };
    let traffic = [annotations::BETA_EXTERNAL_TRAFFIC, annotations::ALPHA_EXTERNAL_TRAFFIC];
    let Some((name, value)) = find(traffic) else { return LegacyRequest::None };
    match value {
        "Global" => return LegacyRequest::None,
        "OnlyLocal" if service.external_policy == TrafficPolicy::Local => return LegacyRequest::None,
        "OnlyLocal" => {}
        _ => return invalid(name, value, "Set spec.externalTrafficPolicy and remove the annotation"),
    }
    let mut spec = json!({"externalTrafficPolicy": "Local"});
    let port = [annotations::BETA_HEALTH_CHECK_NODE_PORT, annotations::ALPHA_HEALTH_CHECK_NODE_PORT];
    if let Some((name, value)) = find(port) {
        match value.parse::<u16>() {
            Ok(port @ 1..) => spec["healthCheckNodePort"] = json!(port),
            _ => return invalid(name, value, "Write a port number, or remove the annotation"),
        }
    }
    LegacyRequest::Local(json!({"spec": spec}))
}

fn invalid(name: &str, value: &str, remedy: &str) -> LegacyRequest {
    let value = shown(value);
    let message = format!("Annotation {name} has the invalid value `{value}`. It is ignored. {remedy}.");
    LegacyRequest::Invalid(message)
}

/// The command by which a user makes the patch.
pub(crate) fn kubectl_patch(service: &Service, patch: &Value) -> String {
    let (namespace, name) = (service.key.namespace(), service.key.name());
    format!("kubectl patch service --namespace {namespace} {name} --type merge --patch '{patch}'")
}
