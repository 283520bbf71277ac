// SPDX-License-Identifier: Apache-2.0
//! What every cluster has and no chart of ours installs: Node objects, the kubelets' reader role, cluster DNS. Pure.

use serde_json::{Value, json};

use crate::addresses::{DNS_IPV4, DNS_IPV6, Host, Plan, Role, pod_cidrs, zone};
use crate::credentials::KUBELET_CLIENT;

const COREFILE: &str = "\
.:53 {
    errors
    health {
        lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus :9153
    cache 30
    loadbalance
}
";

/// The nodes with their pod networks, zones and, in a cloud, machines, and the API server's right to speak to kubelets.
pub fn nodes(plan: &Plan, provider_id: impl Fn(&Host) -> Option<String>) -> Value {
    let mut items = vec![json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": "lab:kubelet-api-admin" },
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin",
        },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBELET_CLIENT }],
    })];
    items.extend(plan.nodes().iter().filter_map(|host| {
        let Role::Node(number) = host.role else { return None };
        let (ipv4, ipv6) = pod_cidrs(number);
        let mut spec = json!({ "podCIDR": ipv4, "podCIDRs": [ipv4, ipv6] });
        if let Some(id) = provider_id(host) {
            spec["providerID"] = id.into();
        }
        Some(json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": host.name, "labels": {
                "kubernetes.io/hostname": host.name,
                "topology.kubernetes.io/region": "lab",
                "topology.kubernetes.io/zone": zone(number),
            } },
            "spec": spec,
        }))
    }));
    list(&items)
}

/// Cluster DNS under its usual name and addresses.
pub fn dns(image: &str) -> Value {
    let labels = json!({ "k8s-app": "kube-dns" });
    let meta = json!({ "name": "coredns", "namespace": "kube-system" });
    list(&[
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": { "name": "lab:coredns" },
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                { "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"] },
            ],
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": { "name": "lab:coredns" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "lab:coredns" },
            "subjects": [{ "kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system" }],
        }),
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": { "Corefile": COREFILE } }),
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": 2,
                "selector": { "matchLabels": labels },
                "template": { "metadata": { "labels": labels }, "spec": pod(image, &labels) },
            },
        }),
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "kube-dns", "namespace": "kube-system", "labels": labels },
            "spec": {
                "selector": labels,
                "clusterIP": DNS_IPV4,
                "clusterIPs": [DNS_IPV4, DNS_IPV6],
                "ipFamilyPolicy": "PreferDualStack",
                "ports": [
                    { "name": "dns", "port": 53, "protocol": "UDP" },
                    { "name": "dns-tcp", "port": 53, "protocol": "TCP" },
                    { "name": "metrics", "port": 9153, "protocol": "TCP" },
                ],
            },
        }),
    ])
}

fn pod(image: &str, labels: &Value) -> Value {
    json!({
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "tolerations": [{ "operator": "Exists" }],
        // The death of one node must not take the cluster's names away.
        "affinity": { "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "podAffinityTerm": {
                "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": labels },
            },
        }] } },
        "containers": [{
            "name": "coredns",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "args": ["-conf", "/etc/coredns/Corefile"],
            "ports": [{ "containerPort": 53, "protocol": "UDP" }, { "containerPort": 53, "protocol": "TCP" }],
            "readinessProbe": { "httpGet": { "path": "/ready", "port": 8181 }, "periodSeconds": 1 },
            "volumeMounts": [{ "name": "config", "mountPath": "/etc/coredns", "readOnly": true }],
        }],
        "volumes": [{ "name": "config", "configMap": { "name": "coredns" } }],
    })
}

fn list(items: &[Value]) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::ServiceProxy;

    #[test]
    fn every_node_has_its_networks_and_zone() {
        let plan = Plan {
            name: "lab".into(),
            workers: 3,
            edges: 0,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        };
        let nodes = nodes(&plan, |_| None);
        assert_eq!(nodes["items"].as_array().unwrap().len(), 4);
        assert_eq!(nodes["items"][2]["spec"]["podCIDRs"], json!(["10.244.2.0/24", "fd44:2::/64"]));
        assert_eq!(nodes["items"][3]["metadata"]["labels"]["topology.kubernetes.io/zone"], "zone-c");
    }
}
