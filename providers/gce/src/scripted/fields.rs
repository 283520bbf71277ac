// SPDX-License-Identifier: Apache-2.0
//! The fields of requests, with their types, as far as this crate writes them.

use serde_json::{Map, Value};

use super::{Answered, wrong};
use crate::object::Kind;

#[derive(Clone, Copy)]
enum Type {
    Text,
    Number,
    Flag,
    Texts,
    Part(&'static [(&'static str, Type)]),
    Parts(&'static [(&'static str, Type)]),
}

use Type::{Flag, Number, Part, Parts, Text, Texts};

const PROBE: &[(&str, Type)] =
    &[("port", Number), ("portSpecification", Text), ("proxyHeader", Text), ("requestPath", Text)];

fn fields(kind: Kind) -> &'static [(&'static str, Type)] {
    match kind {
        Kind::Address => &[
            ("addressType", Text),
            ("networkTier", Text),
            ("subnetwork", Text),
            ("purpose", Text),
            ("address", Text),
        ],
        Kind::HealthCheck => &[
            ("type", Text),
            ("checkIntervalSec", Number),
            ("timeoutSec", Number),
            ("healthyThreshold", Number),
            ("unhealthyThreshold", Number),
            ("tcpHealthCheck", Part(PROBE)),
            ("httpHealthCheck", Part(PROBE)),
        ],
        Kind::Group => &[("networkEndpointType", Text), ("network", Text), ("subnetwork", Text)],
        Kind::BackendService => &[
            ("loadBalancingScheme", Text),
            ("protocol", Text),
            ("sessionAffinity", Text),
            ("localityLbPolicy", Text),
            ("connectionDraining", Part(&[("drainingTimeoutSec", Number)])),
            ("healthChecks", Texts),
            ("backends", Parts(&[("group", Text), ("balancingMode", Text), ("capacityScaler", Number)])),
            ("fingerprint", Text),
        ],
        Kind::Firewall => &[
            ("network", Text),
            ("direction", Text),
            ("priority", Number),
            ("disabled", Flag),
            ("sourceTags", Texts),
            ("sourceServiceAccounts", Texts),
            ("targetServiceAccounts", Texts),
            ("sourceRanges", Texts),
            ("destinationRanges", Texts),
            ("targetTags", Texts),
            ("allowed", Parts(&[("IPProtocol", Text), ("ports", Texts)])),
        ],
        Kind::ForwardingRule => &[
            ("IPAddress", Text),
            ("IPProtocol", Text),
            ("ports", Texts),
            ("portRange", Text),
            ("allPorts", Flag),
            ("backendService", Text),
            ("loadBalancingScheme", Text),
            ("networkTier", Text),
            ("network", Text),
            ("subnetwork", Text),
            ("allowGlobalAccess", Flag),
            ("fingerprint", Text),
        ],
    }
}

fn is_of(value: &Value, of: Type) -> bool {
    let texts = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(Value::is_string));
    let part = |value: &Value, fields: &[(&str, Type)]| {
        let known = |(name, value): (&String, &Value)| {
            fields.iter().any(|(field, of)| field == name && is_of(value, *of))
        };
        value.as_object().is_some_and(|all| all.iter().all(known))
    };
    match of {
        // In a patch, null clears a field; elsewhere it is none.
        _ if value.is_null() => true,
        Text => value.is_string(),
        Number => value.is_number(),
        Flag => value.is_boolean(),
        Texts => texts(value),
        Part(fields) => part(value, fields),
        Parts(fields) => value.as_array().is_some_and(|all| all.iter().all(|value| part(value, fields))),
    }
}

/// The fields of a request's body. Refuses what GCE does not know, or this crate does not write.
pub(super) fn checked(kind: Kind, body: Option<&Value>, is_patch: bool) -> Answered<Map<String, Value>> {
    let mut body = body.and_then(Value::as_object).cloned().ok_or_else(|| wrong("there is no body"))?;
    for (name, value) in &body {
        let common = [("name", Text), ("description", Text)];
        let known = fields(kind).iter().chain(common.iter()).find(|(field, _)| field == name);
        if !known.is_some_and(|(_, of)| is_of(value, *of)) {
            return Err(wrong(format!("resource.{name}: {value}")));
        }
    }
    if !is_patch {
        body.retain(|_, value| !value.is_null());
        if body.contains_key("fingerprint") {
            return Err(wrong("a fingerprint of what does not exist"));
        }
    }
    let never = match kind {
        Kind::Address | Kind::Group => is_patch,
        // Google changes nothing else of a forwarding rule.
        Kind::ForwardingRule => {
            is_patch && body.keys().any(|name| !["allowGlobalAccess", "fingerprint"].contains(&name.as_str()))
        }
        _ => is_patch && body.contains_key("name"),
    };
    if never {
        return Err(wrong("the field cannot be changed"));
    }
    Ok(body)
}

/// Applies a JSON merge patch.
pub(super) fn merge(old: &mut Map<String, Value>, patch: Map<String, Value>) {
    for (name, value) in patch {
        match (value, old.get_mut(&name)) {
            (Value::Null, _) => drop(old.remove(&name)),
            (Value::Object(fields), Some(Value::Object(of))) => merge(of, fields),
            (value, _) => drop(old.insert(name, value)),
        }
    }
}

pub(super) fn is_name(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    (1..=63).contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && !name.ends_with('-')
        && name.chars().all(is_letter)
}
