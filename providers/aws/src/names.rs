// SPDX-License-Identifier: Apache-2.0
//! Which of a Service's resources at AWS has which name. Pure and stable: a changed name would orphan the old resource.

use steerage_model::{Family, Key};
use steerage_provider_api::{Owner, PodPort};
pub(crate) use steerage_provider_cloud::names::{digest, prefix};
use steerage_provider_cloud::{ClusterId, names::resource};

use crate::config::Config;

/// The name of a Service's load balancer. It does not depend on the UID, so a re-created Service finds the resources of its
/// predecessor.
pub(crate) fn load_balancer(cluster: &ClusterId, service: &Key) -> String {
    resource(cluster, service, &["load-balancer"])
}

/// The name of the load balancer that several Services share under this name.
pub(crate) fn shared_load_balancer(cluster: &ClusterId, shared: &str) -> String {
    // No Service has an empty namespace.
    resource(cluster, &Key::new("", shared), &["shared-load-balancer"])
}

/// The name of an owner's security group. It depends on the UID: AWS releases the predecessor's only minutes after its load balancer.
pub(crate) fn security_group(cluster: &ClusterId, owner: &Owner) -> String {
    resource(cluster, &owner.service, &["security-group", &owner.uid])
}

/// The name of a Service's target group. It depends on everything that cannot change in place: protocol, node port, IP family and VPC.
pub(crate) fn target_group(
    config: &Config,
    service: &Key,
    protocol: &str,
    (node_port, family): (u16, Family),
) -> String {
    let node_port = node_port.to_string();
    of_family(config, service, &["target-group", protocol, &node_port, &config.vpc], family)
}

/// The name of a Service's target group of pods on this port. It depends on everything that cannot change in place.
pub(crate) fn pod_group(
    config: &Config,
    service: &Key,
    protocol: &str,
    (port, family): (&PodPort, Family),
) -> String {
    let port = match port {
        PodPort::Number(number) => number.to_string(),
        PodPort::Name(name, of) => format!("{name}/{of}"),
    };
    of_family(config, service, &["pod-target-group", protocol, &port, &config.vpc], family)
}

/// Groups had no IPv6 in earlier versions: the name of one with IPv4 says nothing of it.
fn of_family(config: &Config, service: &Key, parts: &[&str], family: Family) -> String {
    let family = (family == Family::V6).then_some("IPv6");
    let parts: Vec<&str> = parts.iter().copied().chain(family).collect();
    resource(&config.cluster, service, &parts)
}

#[cfg(test)]
mod tests {
    use steerage_model::Protocol;

    use super::*;

    fn in_vpc(vpc: &str) -> Config {
        let config = crate::desired::tests::config();
        Config { vpc: vpc.to_owned(), cluster: cluster("c"), ..config }
    }

    fn cluster(name: &str) -> ClusterId {
        ClusterId { name: name.to_owned(), uid: "cluster-1".to_owned() }
    }

    #[test]
    fn names_depend_on_every_part() {
        let (a, b) = (Key::new("a", "web"), Key::new("b", "web"));
        let mut names = vec![
            load_balancer(&cluster("c"), &a),
            load_balancer(&cluster("c"), &b),
            load_balancer(&cluster("d"), &a),
            shared_load_balancer(&cluster("c"), "web"),
            shared_load_balancer(&cluster("c"), "other"),
            target_group(&in_vpc("vpc-1"), &a, "TCP", (30080, Family::V4)),
            target_group(&in_vpc("vpc-1"), &a, "UDP", (30080, Family::V4)),
            target_group(&in_vpc("vpc-1"), &a, "TCP", (30081, Family::V4)),
            target_group(&in_vpc("vpc-2"), &a, "TCP", (30080, Family::V4)),
            pod_group(&in_vpc("vpc-1"), &a, "TCP", (&PodPort::Number(30080), Family::V4)),
            pod_group(&in_vpc("vpc-2"), &a, "TCP", (&PodPort::Number(30080), Family::V4)),
            pod_group(&in_vpc("vpc-1"), &a, "UDP", (&PodPort::Number(30080), Family::V4)),
            pod_group(
                &in_vpc("vpc-1"),
                &a,
                "TCP",
                (&PodPort::Name("30080".to_owned(), Protocol::Tcp), Family::V4),
            ),
            pod_group(
                &in_vpc("vpc-1"),
                &a,
                "TCP",
                (&PodPort::Name("30080".to_owned(), Protocol::Udp), Family::V4),
            ),
            pod_group(&in_vpc("vpc-1"), &b, "TCP", (&PodPort::Number(30080), Family::V4)),
        ];
        names.push(target_group(&in_vpc("vpc-1"), &a, "TCP", (30080, Family::V6)));
        names.push(pod_group(&in_vpc("vpc-1"), &a, "TCP", (&PodPort::Number(30080), Family::V6)));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 17);
    }

    #[test]
    fn names_never_change_between_versions() {
        assert_eq!(load_balancer(&cluster("prod"), &Key::new("shop", "web")), "st-md5by-web-2fgth2ybw44vzj5");
    }
}
