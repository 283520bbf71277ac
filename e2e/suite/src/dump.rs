// SPDX-License-Identifier: Apache-2.0
//! Diagnostics of a failed case: one folder per case. Never fails the case itself.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, LogParams};
use kube::{Api, Resource, ResourceExt as _};
use serde::{Serialize, de::DeserializeOwned};
use steerage_edge_api::{AddressPool, EdgeHost, EdgeLoadBalancer, EdgeNodeSet, EdgeTargetHealth};
use tokio::task::block_in_place;

use crate::events;
use crate::system;
use crate::test_context::TestContext;

/// Writes objects, events, logs and rules into a folder of the case's name.
pub async fn write(test: &TestContext, case: &str) {
    let folder = test.suite.logs.join(case.replace("::", "-"));
    if let Err(error) = fs::create_dir_all(&folder) {
        eprintln!("{}: {error}", folder.display());
        return;
    }
    objects(test.api::<Service>(), &folder, "services").await;
    objects(test.api::<Pod>(), &folder, "pods").await;
    objects(test.api::<EndpointSlice>(), &folder, "endpointslices").await;
    let client = test.client();
    objects(Api::<Node>::all(client.clone()), &folder, "nodes").await;
    objects(Api::<EdgeLoadBalancer>::all(client.clone()), &folder, "edgeloadbalancers").await;
    objects(Api::<EdgeNodeSet>::all(client.clone()), &folder, "edgenodesets").await;
    objects(Api::<EdgeTargetHealth>::all(client.clone()), &folder, "edgetargethealths").await;
    objects(Api::<EdgeHost>::all(client.clone()), &folder, "edgehosts").await;
    objects(Api::<AddressPool>::all(client.clone()), &folder, "addresspools").await;
    let seen = events::all(client, &test.namespace).await;
    save(&folder, "events.txt", &seen.map_or_else(|error| format!("{error:#}"), |events| events.join("\n")));
    pod_logs(test, &folder).await;
    let mut hosts = test.suite.cluster(|cluster| [cluster.nodes(), cluster.edges()].concat());
    hosts.extend(test.suite.openstack().map(|openstack| openstack.amphora().clone()));
    for host in hosts {
        for (name, command) in [
            ("rules", ["nft", "list", "ruleset"].as_slice()),
            ("addresses", &["ip", "address"]),
            ("connections", &["conntrack", "-L"]),
        ] {
            let text = test.suite.cluster(|cluster| cluster.exec(&host.name, command));
            let text = text.unwrap_or_else(|error| format!("{error:#}"));
            save(&folder, &format!("{}-{name}.txt", host.name), &text);
        }
    }
    if let Some(aws) = test.suite.aws() {
        for (name, seen) in block_in_place(|| aws.describe()) {
            save(&folder, &format!("aws-{name}.txt"), &seen.unwrap_or_else(|error| format!("{error:#}")));
        }
    }
    if let Some(openstack) = test.suite.openstack() {
        let seen = block_in_place(|| openstack.snapshot());
        save(&folder, "openstack.txt", &seen.unwrap_or_else(|error| format!("{error:#}")));
    }
    if let Some(passthrough) = test.suite.passthrough() {
        let seen = block_in_place(|| passthrough.snapshot());
        save(&folder, "cloud.txt", &seen.unwrap_or_else(|error| format!("{error:#}")));
        let rules = block_in_place(|| passthrough.rules());
        save(&folder, "router.txt", &rules.unwrap_or_else(|error| format!("{error:#}")));
    }
    for log in test.suite.cluster(|cluster| cluster.logs()) {
        let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The control plane's logs are long, and their folder outlives the run.
        if ["edge", "aws", "amphora", "openstack", "passthrough"].iter().any(|start| name.starts_with(start))
            || name.contains("kube-proxy")
        {
            let _ = fs::copy(&log, folder.join(name));
        }
    }
    eprintln!("diagnostics of {case}: {}", folder.display());
}

async fn objects<K>(api: Api<K>, folder: &Path, name: &str)
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    let text = match api.list(&ListParams::default()).await {
        Ok(mut list) => {
            list.items.iter_mut().for_each(|object| object.managed_fields_mut().clear());
            serde_json::to_string_pretty(&list.items).unwrap_or_default()
        }
        Err(error) => format!("{error:#}"),
    };
    save(folder, &format!("{name}.json"), &text);
}

async fn pod_logs(test: &TestContext, folder: &Path) {
    let pods: Api<Pod> = Api::namespaced(test.client().clone(), system::NAMESPACE);
    let Ok(list) = pods.list(&ListParams::default()).await else { return };
    for pod in list {
        let name = pod.name_any();
        for previous in [false, true] {
            let parameters = LogParams { previous, tail_lines: Some(2000), ..LogParams::default() };
            if let Ok(text) = pods.logs(&name, &parameters).await {
                let suffix = if previous { "-previous" } else { "" };
                save(folder, &format!("{name}{suffix}.log"), &text);
            }
        }
    }
}

fn save(folder: &Path, name: &str, text: &str) {
    if let Err(error) = fs::write(folder.join(name), text) {
        eprintln!("{name}: {error}");
    }
}
