// SPDX-License-Identifier: Apache-2.0
//! The objects of the simulated API server as JSON, and the patches that the controller sends.

use serde_json::{Map, Value, json};
use steerage_model::{Key, names};

const EDGE_API: &str = "steerage.dev/v1alpha1";

/// The kinds that the simulated API server stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Resource {
    Services,
    EndpointSlices,
    Nodes,
    Leases,
    AddressPools,
    EdgeLoadBalancers,
    EdgeNodeSets,
    EdgeTargetHealths,
    EdgeHosts,
}

impl Resource {
    /// By a path such as `/api/v1/namespaces/shop/services/web/status`: the resource, the namespace, and what follows the plural.
    pub(super) fn of_path(path: &str) -> Option<(Self, String, Vec<String>)> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (namespace, rest) = match parts.as_slice() {
            ["api", _, "namespaces", namespace, rest @ ..]
            | ["apis", _, _, "namespaces", namespace, rest @ ..] => (*namespace, rest),
            ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => ("", rest),
            _ => return None,
        };
        let (plural, rest) = rest.split_first()?;
        let resource = match *plural {
            "services" => Self::Services,
            "endpointslices" => Self::EndpointSlices,
            "nodes" => Self::Nodes,
            "leases" => Self::Leases,
            "addresspools" => Self::AddressPools,
            "edgeloadbalancers" => Self::EdgeLoadBalancers,
            "edgenodesets" => Self::EdgeNodeSets,
            "edgetargethealths" => Self::EdgeTargetHealths,
            "edgehosts" => Self::EdgeHosts,
            _ => return None,
        };
        Some((resource, namespace.to_owned(), rest.iter().map(|part| (*part).to_owned()).collect()))
    }

    pub(super) fn kind(self) -> (&'static str, &'static str) {
        match self {
            Self::Services => ("v1", "Service"),
            Self::EndpointSlices => ("discovery.k8s.io/v1", "EndpointSlice"),
            Self::Nodes => ("v1", "Node"),
            Self::Leases => ("coordination.k8s.io/v1", "Lease"),
            Self::AddressPools => (EDGE_API, "AddressPool"),
            Self::EdgeLoadBalancers => (EDGE_API, "EdgeLoadBalancer"),
            Self::EdgeNodeSets => (EDGE_API, "EdgeNodeSet"),
            Self::EdgeTargetHealths => (EDGE_API, "EdgeTargetHealth"),
            Self::EdgeHosts => (EDGE_API, "EdgeHost"),
        }
    }
}

/// What the scenario chooses about a Service.
#[derive(Clone, Debug)]
pub(super) struct ServiceSpec {
    pub(super) ports: Vec<u16>,
    pub(super) is_local: bool,
    pub(super) annotations: Map<String, Value>,
    pub(super) source_ranges: Vec<&'static str>,
}

/// An object of one of the edge's kinds that nobody of these replicas made: it has no label of theirs.
pub(super) fn foreign(resource: Resource, key: &Key) -> Value {
    let targets = json!([{"node": "node-of-others", "addresses": ["192.0.2.201"], "weight": 1}]);
    let spec = match resource {
        Resource::EdgeLoadBalancers => json!({
            "service": {"namespace": "others", "name": "web", "uid": "uid-of-others"},
            "addresses": ["192.0.2.200"],
            "listeners": [{"protocol": "TCP", "port": 80}],
            "healthCheck": {
                "protocol": "TCP", "port": 30080, "intervalMilliseconds": 1000, "timeoutMilliseconds": 1000,
                "healthyThreshold": 1, "unhealthyThreshold": 3,
            },
            "targets": targets,
        }),
        _ => json!({"targets": targets}),
    };
    let labels = json!({"app": "of-others"});
    json!({"metadata": {"namespace": key.namespace(), "name": key.name(), "labels": labels}, "spec": spec})
}

pub(super) fn service(key: &Key, uid: &str, number: u16, spec: &ServiceSpec) -> Value {
    let ports: Vec<Value> = spec
        .ports
        .iter()
        .map(|port| json!({"name": format!("p{port}"), "protocol": "TCP", "port": port, "nodePort": 30000 + port}))
        .collect();
    let mut service = json!({
        "metadata": {
            "namespace": key.namespace(), "name": key.name(), "uid": uid, "generation": 1,
            "annotations": spec.annotations,
        },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "steerage.dev/edge", "selector": {"app": key.name()},
            "clusterIP": format!("10.96.0.{}", number % 250 + 1), "clusterIPs": [format!("10.96.0.{}", number % 250 + 1)],
            "ipFamilies": ["IPv4"], "ports": ports,
            "externalTrafficPolicy": if spec.is_local { "Local" } else { "Cluster" },
        },
        "status": {"loadBalancer": {}},
    });
    if !spec.source_ranges.is_empty() {
        service["spec"]["loadBalancerSourceRanges"] = json!(spec.source_ranges);
    }
    if spec.is_local {
        service["spec"]["healthCheckNodePort"] = json!(32000);
    }
    service
}

/// The slice of a Service, with one ready endpoint on each of these nodes.
pub(super) fn slice(service: &Key, ports: &[u16], nodes: &[String]) -> Value {
    let endpoint = |(index, node): (usize, &String)| json!({"addresses": [format!("10.0.0.{}", index + 1)], "nodeName": node, "conditions": {"ready": true}});
    json!({
        "metadata": {
            "namespace": service.namespace(), "name": format!("{}-a", service.name()),
            "labels": {names::SLICE_SERVICE_LABEL: service.name()},
        },
        "addressType": "IPv4",
        "endpoints": nodes.iter().enumerate().map(endpoint).collect::<Vec<_>>(),
        "ports": ports.iter().map(|port| json!({"name": format!("p{port}"), "protocol": "TCP", "port": port})).collect::<Vec<_>>(),
    })
}

pub(super) fn node(name: &str, provider_id: Option<String>, number: u16, is_excluded: bool) -> Value {
    // A vendor's cloud may give the addresses of documentation to load balancers.
    let network = if provider_id.is_some() { "10.240.0" } else { "192.0.2" };
    let provider_id = provider_id.unwrap_or_else(|| format!("sim:///{name}"));
    let mut labels = json!({});
    if is_excluded {
        labels[names::EXCLUDE_LABEL] = json!("");
    }
    // By number, so that a Service may ask for some.
    labels["tier"] = json!(if number.is_multiple_of(2) { "web" } else { "batch" });
    json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"providerID": provider_id},
        "status": {"addresses": [{"type": "InternalIP", "address": format!("{network}.{number}")}]},
    })
}

pub(super) fn pool(namespace: &str, name: &str, addresses: &str) -> Value {
    json!({
        "metadata": {"namespace": namespace, "name": name, "uid": name},
        "spec": {"addresses": [addresses], "autoAssign": true},
    })
}

/// Applies a patch of the controller, strategic or merge, as far as the controller uses them.
pub(super) fn patch(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    for (key, value) in patch {
        // Preconditions, which the caller has checked.
        if key == "uid" || key == "resourceVersion" {
            continue;
        }
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = value.as_array().cloned().unwrap_or_default();
            if let Some(present) = object.get_mut(list).and_then(Value::as_array_mut) {
                present.retain(|entry| !gone.contains(entry));
            }
            continue;
        }
        match (key.as_str(), value) {
            (_, Value::Null) => {
                if let Some(object) = object.as_object_mut() {
                    object.remove(key);
                }
            }
            ("finalizers", Value::Array(added)) => {
                let mut all = object.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
                all.extend(added.iter().filter(|entry| !all.contains(entry)).cloned().collect::<Vec<_>>());
                object[key] = Value::Array(all);
            }
            ("conditions", Value::Array(changed)) => {
                let mut all = object.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
                for condition in changed {
                    let old = all.iter().position(|old| old["type"] == condition["type"]);
                    match (old, condition.get("$patch")) {
                        (Some(at), Some(_)) => drop(all.remove(at)),
                        (Some(at), None) => patch_into(&mut all[at], condition),
                        (None, Some(_)) => {}
                        (None, None) => all.push(without_time(condition)),
                    }
                }
                object[key] = Value::Array(all);
            }
            (_, Value::Object(_)) => {
                if !object.get(key).is_some_and(Value::is_object) {
                    object[key] = json!({});
                }
                self::patch(&mut object[key], value);
            }
            _ => object[key] = value.clone(),
        }
    }
}

/// The time is the machine's: whether a repeated patch changes something must not depend on it.
fn without_time(condition: &Value) -> Value {
    let mut condition = condition.clone();
    if let Some(condition) = condition.as_object_mut() {
        condition.remove("lastTransitionTime");
    }
    condition
}

fn patch_into(object: &mut Value, changes: &Value) {
    for (key, value) in without_time(changes).as_object().into_iter().flatten() {
        object[key] = value.clone();
    }
}
