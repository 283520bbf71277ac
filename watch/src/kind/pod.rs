// SPDX-License-Identifier: Apache-2.0
//! Pods with Steerage's readiness gate.

use std::net::IpAddr;

use serde::Deserialize;
use steerage_model::{Key, Pod, PodGate, names};

use super::json::{Meta, address_or_note, or_default};
use super::{Kind, Malformed, Selectors};

/// The pods with Steerage's readiness gate, of those with its label: so the API server sends no other pods.
#[derive(Clone, Copy, Debug)]
pub struct Pods;

/// The kubelet's reason while only readiness gates keep a pod from being ready.
const ONLY_GATES: &str = "ReadinessGatesNotReady";

impl Kind for Pods {
    type Object = Pod;

    fn name(&self) -> &'static str {
        "pods"
    }

    fn path(&self) -> String {
        "/api/v1/pods".to_owned()
    }

    fn selectors(&self) -> Selectors {
        Selectors { labels: Some(format!("{}=true", names::POD_GATE_LABEL)), fields: None }
    }

    fn key(&self, key: Key) -> Key {
        key
    }

    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<Pod>, Malformed> {
        let Wire { metadata, spec, status } = serde_json::from_str(json)?;
        let is_selected = metadata.labels.get(names::POD_GATE_LABEL).is_some_and(|value| value == "true");
        let mut gates = spec.readiness_gates.iter().map(|gate| gate.condition_type.as_str());
        if !is_selected || !gates.any(|gate| gate == names::POD_GATE) {
            return Ok(None);
        }
        let condition = |kind: &str| status.conditions.iter().find(|condition| condition.kind == kind);
        let is_true = |kind: &str| condition(kind).is_some_and(Condition::is_true);
        let others = spec.readiness_gates.iter().map(|gate| gate.condition_type.as_str());
        let has_others = others.filter(|gate| *gate != names::POD_GATE).all(is_true);
        let gate = condition(names::POD_GATE)
            .map(|condition| PodGate { is_met: condition.is_true(), reason: condition.reason.clone() });
        // With the gate met, only the kubelet says whether the pod is ready, and it says so a moment later. Where the node died, the node
        // controller says that the pod is not ready, and leaves the condition of the containers as it was.
        let follows = !gate.as_ref().is_some_and(|gate| gate.is_met)
            || condition("Ready").is_some_and(|ready| ready.is_true() || ready.reason == ONLY_GATES);
        let is_up = metadata.deletion_timestamp.is_none() && is_true("ContainersReady");
        let mut addresses = Vec::with_capacity(status.pod_ips.len());
        for PodIp { ip } in &status.pod_ips {
            addresses.extend(address_or_note::<IpAddr>("status.podIPs", ip, notes));
        }
        Ok(Some(Pod {
            key: Key::new(metadata.namespace, metadata.name),
            uid: metadata.uid,
            addresses,
            can_serve: is_up && has_others && follows,
            gate,
        }))
    }
}

#[derive(Deserialize)]
struct Wire {
    metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    spec: Spec,
    #[serde(default, deserialize_with = "or_default")]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    #[serde(deserialize_with = "or_default")]
    readiness_gates: Vec<Gate>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Gate {
    condition_type: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<Condition>,
    #[serde(rename = "podIPs", deserialize_with = "or_default")]
    pod_ips: Vec<PodIp>,
}

#[derive(Deserialize)]
struct PodIp {
    ip: String,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    #[serde(default, deserialize_with = "or_default")]
    reason: String,
}

impl Condition {
    fn is_true(&self) -> bool {
        self.status == "True"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn project(pod: &Value) -> Option<Pod> {
        Pods::project(&pod.to_string(), &mut Vec::new()).expect("a pod")
    }

    /// A pod with these conditions, given as `type=status` or `type=status:reason`.
    fn pod(conditions: &[&str]) -> Value {
        let condition = |text: &&str| {
            let (kind, rest) = text.split_once('=').expect("a status");
            let (status, reason) = rest.split_once(':').unwrap_or((rest, ""));
            json!({"type": kind, "status": status, "reason": reason})
        };
        let conditions: Vec<_> = conditions.iter().map(condition).collect();
        json!({
            "metadata": {"namespace": "shop", "name": "web-1", "uid": "u", "labels": {names::POD_GATE_LABEL: "true"}},
            "spec": {"readinessGates": [{"conditionType": "example.com/other"}, {"conditionType": names::POD_GATE}]},
            "status": {"conditions": conditions, "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]},
        })
    }

    #[test]
    fn only_pods_with_label_and_gate_are_projected() {
        let gated = pod(&[]);
        assert_eq!(
            project(&gated),
            Some(Pod {
                key: Key::new("shop", "web-1"),
                uid: "u".to_owned(),
                addresses: vec![[10, 0, 0, 1].into(), "fd00::1".parse().expect("an address")],
                can_serve: false,
                gate: None,
            })
        );
        for (path, value) in [
            ("/spec/readinessGates", json!([{"conditionType": "example.com/other"}])),
            ("/spec/readinessGates", Value::Null),
            ("/metadata/labels", json!({names::POD_GATE_LABEL: "false"})),
        ] {
            let mut other = gated.clone();
            *other.pointer_mut(path).expect("a field") = value;
            assert_eq!(project(&other), None, "{path}");
        }
    }

    #[test]
    fn pod_can_serve_when_only_its_gate_is_missing_and_while_the_kubelet_follows() {
        let (up, other) = ("ContainersReady=True", "example.com/other=True");
        let met = "steerage.dev/load-balancer-ready=True:TargetHealthy";
        let unmet = "steerage.dev/load-balancer-ready=False:Registering";
        let waiting = "Ready=False:ReadinessGatesNotReady";
        for (conditions, can_serve, is_waiting) in [
            (&[up, other, waiting][..], true, true),
            (&[up, other, unmet, waiting], true, true),
            (&[up, other], true, true),
            (&[up, waiting], false, false),
            (&[up, "example.com/other=False"], false, false),
            (&["ContainersReady=False", other], false, false),
            (&[other], false, false),
            (&[up, other, met, waiting], true, false),
            (&[up, other, met, "Ready=True"], true, false),
            (&[up, other, met, "Ready=False"], false, false),
            (&[up, other, met], false, false),
        ] {
            let found = project(&pod(conditions)).expect("gated");
            assert_eq!((found.can_serve, found.is_waiting()), (can_serve, is_waiting), "{conditions:?}");
        }
        let mut deleted = pod(&[up, other, waiting]);
        deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert!(!project(&deleted).expect("gated").can_serve);
    }
}
