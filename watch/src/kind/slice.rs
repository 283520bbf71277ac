// SPDX-License-Identifier: Apache-2.0
//! `EndpointSlice`s.

use std::net::IpAddr;
use std::time::SystemTime;

use jiff::Timestamp;
use serde::Deserialize;
use steerage_model::{Endpoint, EndpointPort, EndpointSlice, Family, Hints, Key, PodRef, names};

use super::json::{Meta, address_or_note, exact, or_default, protocol_or_note};
use super::{Kind, Malformed, Selectors};

/// All slices of Services that are not headless. They are never selected by the label that names a service proxy: only the label
/// of the Service counts.
#[derive(Clone, Copy, Debug)]
pub struct EndpointSlices;

impl Kind for EndpointSlices {
    type Object = EndpointSlice;

    fn name(&self) -> &'static str {
        "endpointslices"
    }

    fn path(&self) -> String {
        "/apis/discovery.k8s.io/v1/endpointslices".to_owned()
    }

    fn selectors(&self) -> Selectors {
        let labels = format!("{},!{}", names::SLICE_SERVICE_LABEL, names::HEADLESS_LABEL);
        Selectors { labels: Some(labels), fields: None }
    }

    fn key(&self, key: Key) -> Key {
        key
    }

    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<EndpointSlice>, Malformed> {
        let wire: Wire = serde_json::from_str(json)?;
        let labels = &wire.metadata.labels;
        let service = labels.get(names::SLICE_SERVICE_LABEL).filter(|name| !name.is_empty());
        let Some(service) = service.filter(|_| !labels.contains_key(names::HEADLESS_LABEL)) else {
            return Ok(None);
        };
        let family = match wire.address_type.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            "FQDN" => return Ok(None),
            _ => return Err(Malformed::Unknown { field: "addressType", value: wire.address_type }),
        };
        let triggered = wire.metadata.annotations.0.get(names::TRIGGER_TIME);
        Ok(Some(EndpointSlice {
            // Only a metric uses it: an invalid time is ignored.
            last_change_trigger: triggered
                .and_then(|text| text.parse::<Timestamp>().ok())
                .map(SystemTime::from),
            service: Key::new(&wire.metadata.namespace, service),
            key: Key::new(wire.metadata.namespace, wire.metadata.name),
            family,
            ports: wire.ports.into_iter().filter_map(|p| port(p, notes)).collect(),
            endpoints: exact(wire.endpoints.into_iter().filter_map(|e| endpoint(e, family, notes))),
        }))
    }
}

fn port(wire: WirePort, notes: &mut Vec<String>) -> Option<EndpointPort> {
    // A port without a number means all ports, which no Service port maps to.
    let port = wire.port?;
    let protocol = protocol_or_note("ports", wire.protocol.as_deref(), notes)?;
    Some(EndpointPort { name: wire.name.unwrap_or_default(), protocol, port })
}

fn endpoint(wire: WireEndpoint, family: Family, notes: &mut Vec<String>) -> Option<Endpoint> {
    let Some(text) = wire.addresses.first() else {
        notes.push("endpoints: ignoring an endpoint without an address".to_owned());
        return None;
    };
    let addr: IpAddr = address_or_note("endpoints[].addresses", text, notes)?;
    if Family::of(addr) != family {
        notes.push(format!("endpoints[].addresses: ignoring `{text}`, which is not {family}"));
        return None;
    }
    let ready = wire.conditions.ready.unwrap_or(true);
    let serving = wire.conditions.serving.unwrap_or(ready);
    let terminating = wire.conditions.terminating.unwrap_or(false);
    let pod = wire.target_ref.filter(|pod| pod.kind == "Pod" && !serving && !terminating);
    let names = |list: Vec<Named>| exact(list.into_iter().map(|named| named.name.into()));
    let WireHints { for_nodes, for_zones } = wire.hints;
    let hinted = !for_nodes.is_empty() || !for_zones.is_empty();
    Some(Endpoint {
        addr,
        node: wire.node_name.filter(|name| !name.is_empty()).map(Into::into),
        zone: wire.zone.filter(|name| !name.is_empty()).map(Into::into),
        ready,
        serving,
        terminating,
        hints: hinted.then(|| Box::new(Hints { nodes: names(for_nodes), zones: names(for_zones) })),
        unready_pod: pod.map(|pod| Box::new(PodRef { name: pod.name, uid: pod.uid })),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    metadata: Meta,
    address_type: String,
    #[serde(default, deserialize_with = "or_default")]
    ports: Vec<WirePort>,
    #[serde(default, deserialize_with = "or_default")]
    endpoints: Vec<WireEndpoint>,
}

#[derive(Deserialize)]
struct WirePort {
    name: Option<String>,
    protocol: Option<String>,
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireEndpoint {
    #[serde(default, deserialize_with = "or_default")]
    addresses: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    conditions: Conditions,
    node_name: Option<String>,
    zone: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    hints: WireHints,
    target_ref: Option<TargetRef>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TargetRef {
    kind: String,
    name: String,
    uid: String,
}

#[derive(Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WireHints {
    #[serde(deserialize_with = "or_default")]
    for_nodes: Vec<Named>,
    #[serde(deserialize_with = "or_default")]
    for_zones: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[cfg(test)]
mod tests;
