// SPDX-License-Identifier: Apache-2.0
//! Whether a resource is as it should be, although GCE writes the same thing in another way. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::object::relative;

/// The fields whose values differ from the wanted ones, with these. What others set besides stays.
pub(crate) fn changes(wanted: &Value, present: &Value) -> Map<String, Value> {
    let fields = wanted.as_object().into_iter().flatten();
    let other = fields.filter(|(key, value)| {
        let is_range_of_it = || match key.as_str() {
            "ports" => single_port(value).is_some() && single_port(value) == range_of_one(present),
            _ => false,
        };
        !is_same(value, present.get(*key).unwrap_or(&Value::Null)) && !is_range_of_it()
    });
    other.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The port of a list of one.
fn single_port(ports: &Value) -> Option<&str> {
    match ports.as_array()?.as_slice() {
        [port] => port.as_str(),
        _ => None,
    }
}

/// The port of a forwarding rule that has a range of one instead of a list.
fn range_of_one(rule: &Value) -> Option<&str> {
    let (first, last) = rule.get("portRange")?.as_str()?.split_once('-')?;
    (first == last).then_some(first)
}

fn is_same(wanted: &Value, present: &Value) -> bool {
    match wanted {
        Value::Object(fields) => {
            fields.iter().all(|(key, value)| is_same(value, present.get(key).unwrap_or(&Value::Null)))
        }
        _ => canonical(wanted) == canonical(present),
    }
}

/// One form of what has many: URLs, ranges, the order of a list, and what is empty.
fn canonical(value: &Value) -> Value {
    match value {
        Value::String(text) => canonical_text(text),
        Value::Array(all) => {
            let mut all: Vec<Value> = all.iter().map(canonical).collect();
            all.sort_by_key(Value::to_string);
            if all.is_empty() { Value::Null } else { Value::Array(all) }
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| (key.clone(), canonical(value)));
            Value::Object(fields.filter(|(_, value)| !value.is_null()).collect())
        }
        Value::Bool(false) => Value::Null,
        other => other.clone(),
    }
}

fn canonical_text(text: &str) -> Value {
    // What GCE leaves out if it is so.
    if matches!(text, "" | "NONE" | "MAGLEV") {
        return Value::Null;
    }
    if let Some(net) = network(text) {
        return net.to_string().into();
    }
    relative(text).into()
}

/// A range or an address.
fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

/// The address of a forwarding rule or address, whose IPv6 forms have the length of a range.
pub(crate) fn address(text: &str) -> Option<IpAddr> {
    text.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_gce_writes_differently_is_the_same() {
        for (wanted, present) in [
            (
                json!({ "a": "projects/p/global/networks/n" }),
                json!({ "a": "https://www.googleapis.com/compute/v1/projects/p/global/networks/n" }),
            ),
            (json!({ "a": ["b", "a"] }), json!({ "a": ["a", "b"] })),
            (json!({ "ports": ["80"] }), json!({ "portRange": "80-80" })),
            (json!({ "a": false }), json!({})),
            (json!({ "a": null }), json!({})),
            (json!({ "a": "NONE" }), json!({})),
            (json!({ "a": ["203.0.113.1"] }), json!({ "a": ["203.0.113.1/32"] })),
            (json!({ "a": ["2001:db8:0:0::/96"] }), json!({ "a": ["2001:db8::/96"] })),
            (json!({ "a": { "b": 1 } }), json!({ "a": { "b": 1, "theirs": 2 }, "more": 3 })),
            (
                json!({ "a": [{ "p": "tcp", "ports": ["80", "443"] }, { "p": "udp", "ports": ["53"] }] }),
                json!({ "a": [{ "ports": ["53"], "p": "udp" }, { "ports": ["443", "80"], "p": "tcp" }] }),
            ),
        ] {
            assert!(changes(&wanted, &present).is_empty(), "{wanted} {present}");
        }
        for (wanted, present) in [
            (json!({ "ports": ["80"] }), json!({ "portRange": "80-81" })),
            (json!({ "ports": ["80", "81"] }), json!({ "portRange": "80-80" })),
            (json!({ "a": "x" }), json!({})),
            (json!({ "a": ["80"] }), json!({ "a": ["80", "443"] })),
            (json!({ "a": ["203.0.113.1"] }), json!({ "a": ["203.0.113.0/24"] })),
            (json!({ "a": { "b": 1 } }), json!({ "a": { "b": 2 } })),
            (json!({ "a": null }), json!({ "a": "WEIGHTED_GCP_RENDEZVOUS" })),
        ] {
            assert_eq!(Value::Object(changes(&wanted, &present)), wanted, "{present}");
        }
    }

    #[test]
    fn address_is_read_with_and_without_a_length() {
        assert_eq!(address("2001:db8::/96"), "2001:db8::".parse().ok());
        assert_eq!(address("203.0.113.1"), "203.0.113.1".parse().ok());
        assert_eq!(address("projects/p"), None);
    }
}
