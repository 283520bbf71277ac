// SPDX-License-Identifier: Apache-2.0
//! The controller's binary with the provider for AWS, against a real API server and moto behind a proxy that counts requests.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use steerage_provider_conformance::{Proxy, Upstream};
use steerage_requirements::requires;
use steerage_testmoto::{Release, Server, classify};

use crate::support::{Cluster, eventually};

/// The targets in all target groups of the Service.
fn registered(moto: &Server, uid: &str) -> BTreeSet<String> {
    moto.targets(uid).expect("targets").into_values().flatten().collect()
}

#[tokio::test]
async fn endpoints_change_targets_under_api_steering_and_cost_no_request_under_health_check_steering() {
    requires!(KubeApiserver, Moto);
    let cluster = Cluster::new("cloud", 1).await;
    let moto = Server::start(Release::USUAL).expect("moto");
    let (vpc, subnets) = moto.network().expect("network");
    let instances = moto.instances(&subnets[0], 2).expect("instances");
    for (node, instance) in ["node-a", "node-b"].into_iter().zip(&instances) {
        cluster.provider_id(node, &format!("aws:///us-east-1a/{instance}")).await;
    }
    let proxy = Proxy::start(Upstream::http(moto.addr()), classify).await.expect("proxy");
    let (subnets, endpoint) = (subnets.join(","), proxy.url());
    let flags = [
        ["--aws-cluster-name", "cloud"],
        ["--aws-vpc-id", vpc.as_str()],
        ["--aws-subnets", subnets.as_str()],
        ["--aws-region", "us-east-1"],
        ["--aws-elbv2-endpoint", endpoint.as_str()],
        ["--aws-ec2-endpoint", endpoint.as_str()],
    ];
    let controller = cluster.controller_of("aws", "one", flags.as_flattened());

    let class = json!({"loadBalancerClass": "steerage.dev/aws"});
    let checked = cluster.service("checked", json!({"spec": class})).await;
    let api = json!({"annotations": {"steerage.dev/steering": "api"}});
    let by_api = cluster.service("by-api", json!({"metadata": api, "spec": class})).await;
    let uid = |service: &k8s_openapi::api::core::v1::Service| service.metadata.uid.clone().expect("a UID");
    let (checked, by_api) = (uid(&checked), uid(&by_api));
    let (first, both) = (BTreeSet::from([instances[0].clone()]), BTreeSet::from_iter(instances.clone()));
    cluster.endpoints("checked", &["node-a"]).await;
    cluster.endpoints("by-api", &["node-a"]).await;
    for service in ["checked", "by-api"] {
        cluster.condition(service, "Programmed", "True", "Programmed").await;
    }
    eventually("the checked targets", async || (registered(&moto, &checked) == both).then_some(())).await;
    eventually("the targets by API", async || (registered(&moto, &by_api) == first).then_some(())).await;
    let created = "steerage_controller_aws_api_requests_total{api=\"ELBv2\",action=\"CreateLoadBalancer\",code=\"200\"} 2";
    controller.measures(created).await;

    // Under health-check steering, changed endpoints cost no request. The controller also reads health from time to time. If it does so
    // meanwhile, endpoints change once more.
    let mut seen = Vec::new();
    for _ in 0..4 {
        eventually("an end of the requests", async || {
            proxy.reset();
            tokio::time::sleep(Duration::from_secs(5)).await;
            proxy.calls().is_empty().then_some(())
        })
        .await;
        for nodes in [&["node-b"][..], &["node-a", "node-b"], &[], &["node-a"]] {
            cluster.endpoints("checked", nodes).await;
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
        seen = proxy.calls().into_iter().map(|call| call.name).collect::<Vec<_>>();
        assert!(seen.iter().all(|name| name == "DescribeTargetHealth"), "{seen:?}");
        if seen.is_empty() {
            break;
        }
    }
    assert!(seen.is_empty(), "{seen:?}");

    // Under api steering, a moved endpoint is a registration and then a deregistration.
    cluster.endpoints("by-api", &["node-b"]).await;
    let second = BTreeSet::from([instances[1].clone()]);
    eventually("the new target", async || (registered(&moto, &by_api) == second).then_some(())).await;
    let writes: Vec<_> = proxy.writes().into_iter().map(|call| call.name).collect();
    assert_eq!(writes, ["RegisterTargets", "DeregisterTargets"]);

    // Pods as targets need no node port, and no node's provider ID.
    let target_type = "service.beta.kubernetes.io/aws-load-balancer-nlb-target-type";
    let pods = json!({
        "metadata": {"annotations": {target_type: "ip"}},
        "spec": {
            "loadBalancerClass": "steerage.dev/aws",
            "allocateLoadBalancerNodePorts": false,
            "ports": [{"name": "web", "port": 80, "targetPort": 8080}],
        },
    });
    let pods = uid(&cluster.service("pods", pods).await);
    for addresses in [&["10.0.1.1", "10.0.1.2"][..], &["10.0.1.2", "10.0.1.3"]] {
        let at: Vec<_> = addresses.iter().map(|address| ("elsewhere", (*address).to_owned())).collect();
        cluster.pods("pods", &at).await;
        let wanted = addresses.iter().map(|address| (*address).to_owned()).collect::<BTreeSet<_>>();
        eventually("the pods", async || (registered(&moto, &pods) == wanted).then_some(())).await;
    }
    cluster.condition("pods", "Serving", "True", "TargetsHealthy").await;
    let wrong = json!({"metadata": {"annotations": {"steerage.dev/steering": "health-check"}}});
    cluster.change("pods", wrong).await;
    cluster.condition("pods", "Programmed", "False", "SteeringNotSupported").await;
    cluster.pods("pods", &[("elsewhere", "10.0.1.4".to_owned())]).await;
    let last = BTreeSet::from(["10.0.1.4".to_owned()]);
    eventually("the pod of a refused Service", async || (registered(&moto, &pods) == last).then_some(()))
        .await;

    // A dry run beside this controller sends nothing that writes, compares targets by instance, and checks the annotations.
    let wrong = json!({"annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "public"}});
    cluster.service("refused", json!({"metadata": wrong, "spec": class})).await;
    proxy.reset();
    let (succeeded, log) = cluster.dry_run("aws", flags.as_flattened()).await;
    assert!(succeeded, "{log}");
    let line = |service: &str| {
        let about = format!("cloud/{service}\"");
        log.lines()
            .find(|line| line.contains(&about))
            .unwrap_or_else(|| panic!("nothing of {service}: {log}"))
    };
    assert!(line("by-api").contains("\"unknown\""), "{log}");
    assert!(line("checked").contains("\"unknown\""), "{log}");
    assert!(line("refused").contains("\"refuse\"") && line("refused").contains("UnknownScheme"), "{log}");
    let (calls, writes) = (proxy.calls(), proxy.writes());
    assert!(!calls.is_empty() && writes.is_empty(), "{writes:?}");
}
