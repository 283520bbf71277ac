// SPDX-License-Identifier: Apache-2.0
//! The adoption of load balancers of other controllers, through the wire format.

use std::collections::BTreeSet;

use aws_sdk_elasticloadbalancingv2 as elb;
use elb::types::{Action, ActionTypeEnum, LoadBalancerSchemeEnum, LoadBalancerTypeEnum, ProtocolEnum, Tag};
use elb::types::{TargetDescription, TargetGroupAttribute};
use steerage_model::Protocol;
use steerage_provider_api::{LoadBalancer, Provider as _};
use steerage_provider_aws::{Config, Peer};
use steerage_provider_conformance::{Harness as _, converge, converge_deleted, fixture};
use steerage_requirements::requires;

use crate::listener;
use crate::moto::Moto;

const NAME: &str = "a0123456789abcdef0123456789abcde";

/// A load balancer as the other controller leaves it, with port 80 on node port 30080. Returns its ARN and host name.
async fn plant(moto: &Moto, peer: Peer, groups: &[String]) -> anyhow::Result<(String, String)> {
    let (cluster, service) = (&moto.config.cluster.name, "conformance/web");
    let tags = match peer {
        Peer::CloudProviderAws => [
            (format!("kubernetes.io/cluster/{cluster}"), "owned"),
            ("kubernetes.io/service-name".to_owned(), service),
        ],
        Peer::AwsLoadBalancerController => [
            ("elbv2.k8s.aws/cluster".to_owned(), cluster.as_str()),
            ("service.k8s.aws/stack".to_owned(), service),
        ],
    };
    let tags = tags.map(|(key, value)| Tag::builder().key(key).value(value).build()).to_vec();
    let made = moto
        .elb
        .create_load_balancer()
        .name(NAME)
        .r#type(LoadBalancerTypeEnum::Network)
        .scheme(LoadBalancerSchemeEnum::Internal)
        .set_subnets(Some(moto.config.subnets.clone()))
        .set_security_groups((!groups.is_empty()).then(|| groups.to_vec()))
        .set_tags(Some(tags.clone()));
    let made = made.send().await?.load_balancers.unwrap_or_default().remove(0);
    let arn = made.load_balancer_arn.unwrap_or_default();
    let group = moto
        .elb
        .create_target_group()
        .name("k8s-conforma-web-0123456789")
        .protocol(ProtocolEnum::Tcp)
        .port(30080)
        .vpc_id(&moto.config.vpc)
        .set_tags(Some(tags.clone()));
    let group = group.send().await?.target_groups.unwrap_or_default().remove(0);
    let group = group.target_group_arn.unwrap_or_default();
    // The test does not wait for their connections.
    let delay =
        TargetGroupAttribute::builder().key("deregistration_delay.timeout_seconds").value("0").build();
    moto.elb.modify_target_group_attributes().target_group_arn(&group).attributes(delay).send().await?;
    let target = TargetDescription::builder().id(&moto.instances[0]).port(30080).build();
    moto.elb.register_targets().target_group_arn(&group).targets(target).send().await?;
    let forward = Action::builder().r#type(ActionTypeEnum::Forward).target_group_arn(&group).build();
    let listener = moto.elb.create_listener().load_balancer_arn(&arn).protocol(ProtocolEnum::Tcp).port(80);
    listener.default_actions(forward).set_tags(Some(tags)).send().await?;
    Ok((arn, made.dns_name.unwrap_or_default()))
}

/// The security groups that the AWS Load Balancer Controller makes: one for the Service, and one for the cluster.
async fn plant_security_groups(moto: &Moto) -> anyhow::Result<Vec<String>> {
    let mut ids = Vec::new();
    let cluster = moto.config.cluster.name.as_str();
    for tags in [
        [
            ("service.k8s.aws/resource", "ManagedLBSecurityGroup"),
            ("service.k8s.aws/stack", "conformance/web"),
        ],
        [("elbv2.k8s.aws/resource", "backend-sg"), ("Name", "backend")],
    ] {
        let id = moto.security_group(&format!("k8s-{}", ids.len())).await?;
        for (key, value) in tags.into_iter().chain([("elbv2.k8s.aws/cluster", cluster)]) {
            moto.tag(&id, key, value).await?;
        }
        ids.push(id);
    }
    Ok(ids)
}

fn wanted(moto: &Moto, hostname: String) -> LoadBalancer {
    let listeners = vec![listener(Protocol::Tcp, 80, 30080), listener(Protocol::Tcp, 443, 30443)];
    let lb = fixture::with_listeners(fixture::first(moto, &fixture::owner("web", 1)), listeners);
    LoadBalancer { published_hostnames: vec![hostname], ..fixture::with_targets(moto, &lb, &[0, 1]) }
}

/// The names of all security groups that the load balancer has.
async fn attached(moto: &Moto) -> BTreeSet<String> {
    let ids = moto.balancers().await.unwrap().remove(0).security_groups.unwrap_or_default();
    let groups = moto.ec2.describe_security_groups(&[]).await.unwrap().into_iter();
    groups.filter(|group| ids.contains(&group.group_id)).map(|group| group.group_name).collect()
}

#[tokio::test]
async fn load_balancer_of_each_controller_is_adopted_and_deleted() {
    requires!(Moto);
    for peer in [Peer::CloudProviderAws, Peer::AwsLoadBalancerController] {
        let moto = Moto::start(4).await.unwrap();
        let has_groups = peer == Peer::AwsLoadBalancerController;
        let groups = if has_groups { plant_security_groups(&moto).await.unwrap() } else { Vec::new() };
        let (arn, hostname) = plant(&moto, peer, &groups).await.unwrap();
        let lb = wanted(&moto, hostname.clone());
        let theirs = moto.listeners(&arn).await.unwrap().remove(0).listener_arn;
        let adopting = moto.provider(Config { adopt: BTreeSet::from([peer]), ..moto.config.clone() });
        let preview = adopting.preview(&lb).await.unwrap().unwrap();
        assert!(preview[0].contains(NAME), "{preview:?}");
        assert_eq!(moto.proxy().writes().len(), 0);
        let outcome = converge(&adopting, &lb).await.unwrap();
        assert_eq!(outcome.ingress[0].hostname, Some(hostname));
        for aws in [&adopting, &moto.provider(moto.config.clone())] {
            converge(aws, &lb).await.unwrap();
            let balancers = moto.balancers().await.unwrap();
            assert_eq!(balancers.len(), 1);
            assert_eq!(balancers[0].load_balancer_arn(), Some(arn.as_str()));
            assert_eq!(moto.tags(&arn).await.unwrap()["steerage.dev/uid"], lb.owner.uid);
            let listeners = moto.listeners(&arn).await.unwrap();
            assert!(listeners.len() == 2 && listeners.iter().any(|found| found.listener_arn == theirs));
            for group in moto.groups().await.unwrap() {
                assert!(group.target_group_name().unwrap().starts_with("st-"), "{group:?}");
                assert_eq!(moto.ids(group.target_group_arn().unwrap()).await.unwrap().len(), 2);
            }
            if has_groups {
                let names = attached(&moto).await;
                assert!(names.len() == 2 && names.contains("k8s-1") && !names.contains("k8s-0"), "{names:?}");
            }
        }
        let restarted = moto.provider(moto.config.clone());
        assert_eq!(restarted.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
        converge_deleted(&restarted, &lb.owner).await.unwrap();
        assert!(moto.balancers().await.unwrap().is_empty() && moto.groups().await.unwrap().is_empty());
        assert!(moto.security_groups().await.unwrap().is_empty());
    }
}
