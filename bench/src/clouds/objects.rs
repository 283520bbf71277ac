// SPDX-License-Identifier: Apache-2.0
//! The objects in the API server, as JSON. Pure.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

/// The cluster's name at both programs.
pub(super) const CLUSTER: &str = "bench";

/// Keeps a node from all load balancers.
pub(super) const EXCLUDE: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// Name of a Service and of its EndpointSlice.
pub(super) fn service_name(number: u32) -> String {
    format!("web-{number}")
}

pub(super) fn service(number: u32, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": service_name(number), "annotations": annotations},
        "spec": {
            "type": "LoadBalancer", "externalTrafficPolicy": "Local", "selector": {"app": service_name(number)},
            "ports": [{"port": 80, "targetPort": 8080}],
        },
    })
}

/// glbc starts no controller without it, also not those that do without Ingresses.
pub(super) fn default_backend() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "default-http-backend"},
        "spec": {"type": "NodePort", "ports": [{"name": "http", "port": 80, "targetPort": 8080}]},
    })
}

/// One endpoint, on this node.
pub(super) fn slice(number: u32, node: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": service_name(number), "labels": {"kubernetes.io/service-name": service_name(number)},
        },
        "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints(number, node),
    })
}

pub(super) fn endpoints(number: u32, node: &str) -> Value {
    let address = Ipv4Addr::from(0x0a80_0000 + number);
    json!([{
        "addresses": [address], "nodeName": node, "conditions": {"ready": true, "serving": true},
        // glbc passes over endpoints that are no pod's.
        "targetRef": {"kind": "Pod", "namespace": "default", "name": service_name(number)},
    }])
}

/// A node that is a machine of the cloud.
pub(super) fn node(name: &str, provider_id: &str, pods: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "spec": {"providerID": provider_id, "podCIDR": pods, "podCIDRs": [pods]},
    })
}

pub(super) fn node_status(address: Ipv4Addr) -> Value {
    json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
    }})
}
