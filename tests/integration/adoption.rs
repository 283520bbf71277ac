// SPDX-License-Identifier: Apache-2.0
//! The controller's binary takes over a Service of the AWS Load Balancer Controller, with a real API server and moto.

use kube::api::{Patch, PatchParams};
use serde_json::json;
use steerage_requirements::requires;
use steerage_testmoto::{Release, Server};

use crate::support::{Cluster, eventually};

const CLASS: &str = "service.k8s.aws/nlb";
const THEIRS: &str = "service.k8s.aws/resources";
const OWN: &str = "steerage.dev/load-balancer";

/// A load balancer of the other controller for the Service `adopt/web`, with port 80 on this node port. Returns its host name.
fn plant(
    moto: &Server,
    subnets: &[String],
    vpc: &str,
    instance: &str,
    node_port: &str,
) -> anyhow::Result<String> {
    let tags = [
        ("Tags.member.1.Key", "elbv2.k8s.aws/cluster"),
        ("Tags.member.1.Value", "cloud"),
        ("Tags.member.2.Key", "service.k8s.aws/stack"),
        ("Tags.member.2.Value", "adopt/web"),
    ];
    let call = |action: &str, parameters: &[(&str, &str)], element: &str| {
        let mut found = moto.elbv2(action, &[parameters, &tags].concat(), element)?;
        anyhow::Ok(found.remove(0))
    };
    let balancer = [
        ("Name", "k8s-adopt-web-0123456789"),
        ("Type", "network"),
        ("Scheme", "internal"),
        ("Subnets.member.1", subnets[0].as_str()),
        ("Subnets.member.2", subnets[1].as_str()),
    ];
    let arn = call("CreateLoadBalancer", &balancer, "LoadBalancerArn")?;
    let group =
        [("Name", "k8s-adopt-web-9876543210"), ("Protocol", "TCP"), ("Port", node_port), ("VpcId", vpc)];
    let group = call("CreateTargetGroup", &group, "TargetGroupArn")?;
    let of_group = ("TargetGroupArn", group.as_str());
    // The test does not wait for the connections of the group.
    let delay = [
        ("Attributes.member.1.Key", "deregistration_delay.timeout_seconds"),
        ("Attributes.member.1.Value", "0"),
    ];
    moto.elbv2("ModifyTargetGroupAttributes", &[&[of_group][..], &delay].concat(), "RequestId")?;
    moto.elbv2("RegisterTargets", &[of_group, ("Targets.member.1.Id", instance)], "RequestId")?;
    let listener = [
        ("LoadBalancerArn", arn.as_str()),
        ("Protocol", "TCP"),
        ("Port", "80"),
        ("DefaultActions.member.1.Type", "forward"),
        ("DefaultActions.member.1.TargetGroupArn", group.as_str()),
    ];
    call("CreateListener", &listener, "ListenerArn")?;
    Ok(moto.elbv2("DescribeLoadBalancers", &[], "DNSName")?.remove(0))
}

#[tokio::test]
async fn service_of_another_controller_keeps_its_load_balancer_and_goes_with_it() {
    requires!(KubeApiserver, Moto);
    let cluster = Cluster::new("adopt", 1).await;
    let moto = Server::start(Release::USUAL).expect("moto");
    let (vpc, subnets) = moto.network().expect("network");
    let instance = moto.instances(&subnets[0], 1).expect("instances").remove(0);
    cluster.provider_id("node-a", &format!("aws:///us-east-1a/{instance}")).await;
    let theirs = json!({"metadata": {"finalizers": [THEIRS]}, "spec": {"loadBalancerClass": CLASS}});
    let service = cluster.service("web", theirs).await;
    cluster.endpoints("web", &["node-a"]).await;
    let node_port = service.spec.and_then(|spec| spec.ports?[0].node_port).expect("a node port").to_string();
    let hostname = plant(&moto, &subnets, &vpc, &instance, &node_port).expect("their load balancer");
    let published = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": [{"hostname": hostname}]}}}));
    let written = cluster.services().patch_status("web", &PatchParams::default(), &published).await;
    written.expect("their status");

    let (joined, endpoint) = (subnets.join(","), format!("http://{}", moto.addr()));
    let flags = [
        ["--aws-cluster-name", "cloud"],
        ["--aws-vpc-id", vpc.as_str()],
        ["--aws-subnets", joined.as_str()],
        ["--aws-region", "us-east-1"],
        ["--aws-elbv2-endpoint", endpoint.as_str()],
        ["--aws-ec2-endpoint", endpoint.as_str()],
        ["--serve-classes", CLASS],
    ];
    let flags = flags.as_flattened();
    let adopting = [flags, &["--aws-adopt", "aws-load-balancer-controller"]].concat();
    let (succeeded, log) = cluster.dry_run("aws", &adopting).await;
    assert!(succeeded && log.contains("adopts the load balancer k8s-adopt-web-0123456789"), "{log}");

    let controller = cluster.controller_of("aws", "one", &adopting);
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    let metadata = eventually("their finalizer to go", async || {
        let metadata = cluster.services().get("web").await.ok()?.metadata;
        (metadata.finalizers.as_deref() == Some(&[OWN.to_owned()])).then_some(metadata)
    })
    .await;
    assert_eq!(metadata.annotations.expect("annotations")["steerage.dev/served-class"], CLASS);
    let status = cluster.services().get("web").await.expect("the Service").status;
    let ingress = status.and_then(|status| status.load_balancer?.ingress).expect("an ingress");
    assert_eq!(ingress[0].hostname.as_ref(), Some(&hostname));
    let names = moto.elbv2("DescribeTargetGroups", &[], "TargetGroupName").expect("groups");
    assert!(names.len() == 1 && names[0].starts_with("st-"), "{names:?}");

    // The migration is over: without the flag, the load balancer is found again, and goes with its Service.
    drop(controller);
    let _controller = cluster.controller_of("aws", "two", flags);
    cluster.delete("web").await;
    eventually("the end of the Service", async || {
        cluster.services().get_opt("web").await.ok()?.is_none().then_some(())
    })
    .await;
    assert!(moto.elbv2("DescribeLoadBalancers", &[], "DNSName").is_err(), "no load balancer is left");
}
