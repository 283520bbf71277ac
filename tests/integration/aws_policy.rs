// SPDX-License-Identifier: Apache-2.0
//! The admission policy of `docs/providers/aws.md` in a real API server: it refuses annotations of tenants, and lets the controller
//! work.

use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use steerage_requirements::requires;

use crate::support::{Cluster, eventually, parse};

const PAGE: &str = include_str!("../../docs/providers/aws.md");
pub(crate) const RESOURCES: [&str; 2] = ["validatingadmissionpolicies", "validatingadmissionpolicybindings"];
pub(crate) const CONTROLLER: &str = "system:serviceaccount:steerage-system:steerage-controller";
const SCHEME: &str = "service.beta.kubernetes.io/aws-load-balancer-scheme";

/// The policy of a guide and its binding, as YAML.
pub(crate) fn documents(page: &'static str) -> [&'static str; 2] {
    let section = page.split_once("## Tenants").expect("a section").1;
    let text = section.split_once("```yaml\n").expect("an example").1.split_once("```").expect("its end").0;
    text.split_once("---\n").expect("two documents").into()
}

pub(crate) fn url(resource: &str) -> String {
    format!("/apis/admissionregistration.k8s.io/v1/{resource}")
}

pub(crate) fn is_refused<T>(result: kube::Result<T>) -> bool {
    match result {
        Err(kube::Error::Api(status)) if status.message.contains("platform team") => true,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => false,
    }
}

async fn patch(services: &Api<Service>, name: &str, change: Value) -> kube::Result<Service> {
    services.patch(name, &PatchParams::default(), &Patch::Merge(change)).await
}

#[tokio::test]
async fn documented_policy_refuses_tenants_and_lets_the_controller_work() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("tenants", 1).await;
    let (tenant, controller) = (cluster.services_as("tenant").await, cluster.services_as(CONTROLLER).await);
    let annotation = || json!({"metadata": {"annotations": {(SCHEME): "internal"}}});
    let label = || json!({"metadata": {"labels": {"a": "b"}}});
    cluster.service("old", annotation()).await;
    for (resource, text) in RESOURCES.into_iter().zip(documents(PAGE)) {
        let request = http::Request::post(url(resource)).header("content-type", "application/yaml");
        let request = request.body(text.as_bytes().to_vec()).expect("request");
        cluster.client.request::<Value>(request).await.expect("created");
    }

    let (mut new, trial) = (annotation(), PostParams { dry_run: true, ..PostParams::default() });
    new["metadata"]["name"] = json!("new");
    new["spec"] = json!({"ports": [{"port": 80}]});
    let new: Service = parse(new);
    eventually("the policy", async || is_refused(tenant.create(&trial, &new).await).then_some(())).await;
    let mut plain = new.clone();
    plain.metadata.annotations = None;
    assert!(!is_refused(tenant.create(&PostParams::default(), &plain).await));
    assert!(is_refused(patch(&tenant, "new", annotation()).await));
    assert!(is_refused(patch(&tenant, "old", label()).await), "it has the annotation");

    let finalizer = |list: Value| json!({"metadata": {"finalizers": list}});
    assert!(!is_refused(patch(&controller, "old", finalizer(json!(["steerage.dev/load-balancer"]))).await));
    tenant.delete("old", &DeleteParams::default()).await.expect("deleted");
    assert!(!is_refused(patch(&tenant, "old", label()).await), "it is being deleted");
    assert!(!is_refused(patch(&controller, "old", finalizer(Value::Null)).await));
    assert!(tenant.get_opt("old").await.expect("an answer").is_none());

    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    let platform = Patch::Merge(json!({"metadata": {"labels": {"team": "platform"}}}));
    namespaces.patch(&cluster.namespace, &PatchParams::default(), &platform).await.expect("namespace");
    eventually("the exception", async || {
        (!is_refused(patch(&tenant, "new", annotation()).await)).then_some(())
    })
    .await;

    // Later tests may use the server again, once the policy is no longer enforced.
    for resource in RESOURCES {
        let request = http::Request::delete(format!("{}/aws-load-balancer-annotations", url(resource)));
        let request = request.body(Vec::new()).expect("request");
        cluster.client.request::<Value>(request).await.expect("deleted");
    }
    let tenants = Patch::Merge(json!({"metadata": {"labels": {"team": null}}}));
    namespaces.patch(&cluster.namespace, &PatchParams::default(), &tenants).await.expect("namespace");
    eventually("the end of the policy", async || {
        let another = json!({"metadata": {"annotations": {(SCHEME): "internet-facing"}}});
        (!is_refused(patch(&tenant, "new", another).await)).then_some(())
    })
    .await;
}
