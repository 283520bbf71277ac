// SPDX-License-Identifier: Apache-2.0
//! The admission policies of the guides of GCE, Azure and OpenStack in a real API server: each refuses what tenants may not, and nothing
//! else.

use k8s_openapi::api::core::v1::Service;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use steerage_requirements::requires;

use crate::aws_policy::{CONTROLLER, RESOURCES, documents, is_refused, url};
use crate::support::{Cluster, eventually, parse};

const CLOUDS: [(&str, &str, &[&str]); 3] = [
    (
        include_str!("../../docs/providers/gce.md"),
        "gce-load-balancers",
        &["networking.gke.io/load-balancer-ip-addresses", "steerage.dev/addresses"],
    ),
    (
        include_str!("../../docs/providers/azure.md"),
        "azure-load-balancers",
        &[
            "service.beta.kubernetes.io/azure-load-balancer-ipv4",
            "service.beta.kubernetes.io/azure-pip-name",
            "steerage.dev/addresses",
        ],
    ),
    (
        include_str!("../../docs/providers/openstack.md"),
        "openstack-load-balancers",
        &[
            "loadbalancer.openstack.org/floating-network-id",
            "loadbalancer.openstack.org/load-balancer-id",
            "service.beta.kubernetes.io/openstack-internal-load-balancer",
            "steerage.dev/addresses",
        ],
    ),
];

fn ports(count: u16) -> Value {
    let port = |port: u16| json!({"name": format!("p{port}"), "port": port});
    (1..=count).map(port).collect()
}

fn ranges(count: u16) -> Value {
    (0..count).map(|i| format!("10.{}.{}.0/24", i / 256, i % 256)).collect()
}

/// What tenants may not.
fn forbidden(annotations: &[&str]) -> Vec<Value> {
    let mut all: Vec<Value> =
        annotations.iter().map(|name| json!({"metadata": {"annotations": {(*name): "x"}}})).collect();
    all.extend([
        json!({"spec": {"loadBalancerIP": "10.0.0.1"}}),
        json!({"spec": {"externalIPs": ["192.0.2.1"]}}),
        json!({"spec": {"ports": ports(101), "loadBalancerSourceRanges": ranges(100)}}),
    ]);
    all
}

#[tokio::test]
async fn documented_policies_refuse_tenants_and_no_more() {
    requires!(KubeApiserver);
    for (page, policy, annotations) in CLOUDS {
        // The API server may be the one of the cloud before.
        let cluster = Cluster::new(policy, 1).await;
        let (tenant, controller) =
            (cluster.services_as("tenant").await, cluster.services_as(CONTROLLER).await);
        for name in ["old", "new"] {
            let spec = json!({"type": "LoadBalancer", "ports": ports(1)});
            let service: Service = parse(json!({"metadata": {"name": name}, "spec": spec}));
            controller.create(&PostParams::default(), &service).await.expect("created");
        }
        for (resource, text) in RESOURCES.into_iter().zip(documents(page)) {
            let request = http::Request::post(url(resource)).header("content-type", "application/yaml");
            let request = request.body(text.as_bytes().to_vec()).expect("request");
            cluster.client.request::<Value>(request).await.expect("created");
        }
        let trial = PatchParams { dry_run: true, ..PatchParams::default() };
        let try_as = async |services: &kube::Api<Service>, change: &Value| {
            is_refused(services.patch("new", &trial, &Patch::Merge(change)).await)
        };
        let forbidden = forbidden(annotations);
        eventually("the policy", async || try_as(&tenant, &forbidden[0]).await.then_some(())).await;
        for change in &forbidden {
            assert!(try_as(&tenant, change).await, "{policy}: {change}");
            assert!(!try_as(&controller, change).await, "{policy}: {change}");
        }
        for change in [
            json!({"metadata": {"annotations": {"steerage.dev/steering": "api"}}}),
            json!({"spec": {"loadBalancerIP": "", "externalIPs": []}}),
            json!({"spec": {"ports": ports(100), "loadBalancerSourceRanges": ranges(100)}}),
            json!({"spec": {"type": "ClusterIP"}}),
        ] {
            assert!(!try_as(&tenant, &change).await, "{policy}: {change}");
        }
        // Later tests may use the server again, once the policy is no longer enforced.
        for resource in RESOURCES {
            let request = http::Request::delete(format!("{}/{policy}", url(resource)));
            let request = request.body(Vec::new()).expect("request");
            cluster.client.request::<Value>(request).await.expect("deleted");
        }
        eventually("the end of the policy", async || (!try_as(&tenant, &forbidden[0]).await).then_some(()))
            .await;
    }
}
