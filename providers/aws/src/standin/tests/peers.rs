// SPDX-License-Identifier: Apache-2.0
//! Load balancers as cloud-provider-aws and the AWS Load Balancer Controller leave them: their names, tags, groups and security groups.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::LoadBalancer;
use tokio::time::Instant;

use super::driver::{standin, wanted};
use super::security_groups::{ALL, rule};
use crate::Aws;
use crate::client::{NewBalancer, Tags};
use crate::config::{Config, Peer, Scheme};
use crate::desired::tests::config;
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::IpAddressType;
use crate::security_group::SecurityGroup;
use crate::source_nat::SourceNat;
use crate::standin::balancers::hostname;
use crate::standin::cloud::{Forward, Group, NetworkLb, Registration};
use crate::standin::{Cloud, StandIn};

/// What the other controllers called the load balancer.
pub(super) const NAME: &str = "a0123456789abcdef0123456789abcde";
/// Its ARN.
pub(super) const ARN: &str = "arn:aws:elasticloadbalancing:us-east-1:1:loadbalancer/net/theirs/1";

pub(super) const CCM: Peer = Peer::CloudProviderAws;
pub(super) const ALBC: Peer = Peer::AwsLoadBalancerController;

/// The tags that a controller gives to what it makes for a Service.
pub(super) fn tags_of(peer: Peer, cluster: &str, service: &str) -> Tags {
    let tags = match peer {
        CCM => [
            (format!("kubernetes.io/cluster/{cluster}"), "owned"),
            ("kubernetes.io/service-name".to_owned(), service),
        ],
        ALBC => {
            [("elbv2.k8s.aws/cluster".to_owned(), cluster), ("service.k8s.aws/stack".to_owned(), service)]
        }
    };
    tags.map(|(key, value)| (key, value.to_owned())).into()
}

/// A provider that adopts what these controllers made.
pub(super) fn adopting(cloud: &Arc<StandIn>, peers: &[Peer]) -> Aws {
    let adopt = peers.iter().copied().collect();
    Aws::over(Config { adopt, ..config() }, Arc::clone(cloud) as _)
}

/// The Service with these ports, as the other controller left it.
pub(super) fn service(ports: &[(u16, u16)]) -> LoadBalancer {
    LoadBalancer { published_hostnames: vec![hostname(NAME)], ..wanted(ports, &[0, 1]) }
}

fn group(port: u16, tags: &Tags) -> Group {
    let since = Instant::now();
    let registration = Registration { since, draining: None };
    Group {
        name: format!("k8s-shop-web-{port}"),
        protocol: "TCP".to_owned(),
        port,
        has_pods: false,
        is_ipv6: false,
        vpc: config().vpc,
        health: HealthCheckSettings {
            path: None,
            port: None,
            interval: 30,
            timeout: 10,
            healthy: 3,
            unhealthy: 3,
        },
        attributes: [("deregistration_delay.timeout_seconds".to_owned(), "600".to_owned())].into(),
        tags: tags.clone(),
        targets: ["i-0", "i-1"].map(|id| ((id.to_owned(), port), registration.clone())).into(),
        used: Some(since),
        held_until: None,
        served: None,
    }
}

/// Adds the load balancer of another controller, with listeners on these ports, each with a group for its node port.
fn plant(cloud: &mut Cloud, peer: Peer, ports: &[(u16, u16)]) {
    let tags = tags_of(peer, &config().cluster.name, "shop/web");
    let made = NewBalancer {
        name: NAME.to_owned(),
        ip_address_type: IpAddressType::Ipv4,
        source_nat: SourceNat::Off,
        scheme: Scheme::Internal,
        subnets: vec![("subnet-a".to_owned(), None)],
        security_groups: BTreeSet::new(),
    };
    let long_ago = Instant::now();
    let mut balancer = NetworkLb::new(made, tags.clone(), long_ago);
    if peer == ALBC {
        balancer.security_groups = ["sg-front", "sg-back"].map(str::to_owned).into();
        let mark = |key: &str, value: &str| Tags::from([(key.to_owned(), value.to_owned())]);
        let front =
            mark("service.k8s.aws/resource", "ManagedLBSecurityGroup").into_iter().chain(tags.clone());
        let mut back = mark("elbv2.k8s.aws/resource", "backend-sg");
        back.insert("elbv2.k8s.aws/cluster".to_owned(), config().cluster.name);
        for (id, tags) in [("sg-front", front.collect()), ("sg-back", back)] {
            let others = if id == "sg-front" { [rule("tcp", 80, ALL)].into() } else { BTreeSet::new() };
            let made = SecurityGroup {
                id: id.to_owned(),
                name: id.to_owned(),
                vpc: config().vpc,
                tags,
                others,
                ..SecurityGroup::default()
            };
            cloud.security_groups.insert(id.to_owned(), made);
        }
    }
    cloud.balancers.insert(ARN.to_owned(), balancer);
    for (port, node_port) in ports {
        let to = format!("arn:aws:elasticloadbalancing:us-east-1:1:targetgroup/theirs/{node_port}");
        cloud.groups.insert(to.clone(), group(*node_port, &tags));
        let forward = Forward {
            balancer: ARN.to_owned(),
            port: *port,
            protocol: "TCP".to_owned(),
            group: to,
            tags: tags.clone(),
            tls: None,
        };
        cloud
            .listeners
            .insert(format!("arn:aws:elasticloadbalancing:us-east-1:1:listener/net/theirs/{port}"), forward);
    }
    cloud.note_use(long_ago);
}

/// The stand-in with that load balancer, minutes later.
pub(super) async fn planted(seed: u64, peer: Peer, ports: &[(u16, u16)]) -> Arc<StandIn> {
    let cloud = standin(seed);
    cloud.change(|cloud| plant(cloud, peer, ports));
    tokio::time::sleep(Duration::from_mins(10)).await;
    cloud
}
