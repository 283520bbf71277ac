// SPDX-License-Identifier: Apache-2.0
//! IPv6 through the wire format, on moto.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_elasticloadbalancingv2::types::{AvailabilityZone, IpAddressType, TargetGroupIpAddressTypeEnum};
use steerage_ec2::Filter;
use steerage_model::{Family, Protocol};
use steerage_provider_api::LoadBalancer;
use steerage_provider_conformance::{Harness as _, converge, fixture};
use steerage_requirements::requires;

use crate::moto::Moto;
use crate::{calls, listener, made};

/// The IP address types of the only load balancer and of its target group, and the sources that its security group admits.
async fn shown(moto: &Moto) -> (IpAddressType, Option<TargetGroupIpAddressTypeEnum>, Vec<String>) {
    let balancer = moto.balancers().await.unwrap().remove(0);
    let groups = moto.groups().await.unwrap();
    assert_eq!(groups.len(), 1, "{groups:?}");
    let filter = Filter::new("group-id", &balancer.security_groups()[0]);
    let found = moto.ec2.describe_security_groups(&[filter]).await.unwrap().remove(0);
    let rules = found.ip_permissions;
    let v4 = rules.iter().flat_map(|rule| &rule.ip_ranges).map(|range| range.cidr_ip.clone());
    let v6 = rules.iter().flat_map(|rule| &rule.ipv6_ranges).map(|range| range.cidr_ipv6.clone());
    let sources = v4.chain(v6).collect();
    (balancer.ip_address_type.unwrap(), groups[0].ip_address_type.clone(), sources)
}

#[tokio::test]
async fn families_of_a_service_change() {
    requires!(Moto);
    let (moto, aws, lb) = made(3, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let of = |families: &[Family], ranges: &[&str]| LoadBalancer {
        families: families.to_vec(),
        source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
        ..lb.clone()
    };
    let (all, some) = (["0.0.0.0/0", "::/0"], ["192.0.2.0/24", "2001:db8::/32"]);
    let v6 = TargetGroupIpAddressTypeEnum::Ipv6;
    assert_eq!(shown(&moto).await.0, IpAddressType::Ipv4);
    for (families, ranges, kind, group, sources) in [
        (&[Family::V4, Family::V6][..], &[][..], IpAddressType::Dualstack, None, &all[..]),
        (&[Family::V6], &some, IpAddressType::Dualstack, Some(&v6), &some),
        (&[Family::V4], &some, IpAddressType::Ipv4, None, &some[..1]),
    ] {
        let lb = of(families, ranges);
        converge(&aws, &lb).await.unwrap();
        let (found, of_group, admitted) = shown(&moto).await;
        assert_eq!(
            (found, admitted.as_slice()),
            (kind, &sources.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()[..])
        );
        assert_eq!(of_group.as_ref() == Some(&v6), group.is_some(), "{of_group:?}");
        // Another process finds everything in place.
        moto.proxy().reset();
        converge(&moto.provider(moto.config.clone()), &lb).await.unwrap();
        assert!(moto.proxy().writes().is_empty(), "{:?}", calls(&moto));
    }
}

/// Whether source NAT is on, and the prefix in each subnet.
async fn source_nat(moto: &Moto) -> (bool, BTreeMap<String, String>) {
    let balancer = moto.balancers().await.unwrap().remove(0);
    let is_on = balancer.enable_prefix_for_ipv6_source_nat.is_some_and(|found| found.as_str() == "on");
    let zones = balancer.availability_zones.unwrap_or_default().into_iter();
    let prefix = |zone: AvailabilityZone| Some((zone.subnet_id?, zone.source_nat_ipv6_prefixes?.pop()?));
    (is_on, zones.filter_map(prefix).collect())
}

#[tokio::test]
async fn udp_of_targets_with_ipv6_takes_source_nat() {
    requires!(Moto);
    let (tcp, udp) = (listener(Protocol::Tcp, 80, 30080), listener(Protocol::Udp, 53, 30053));
    let (moto, aws, lb) = made(3, vec![tcp.clone()]).await;
    let v6 = LoadBalancer { families: vec![Family::V6], ..lb };
    converge(&aws, &v6).await.unwrap();
    assert_eq!(source_nat(&moto).await, (false, BTreeMap::new()));
    let mut both = fixture::with_listeners(v6.clone(), vec![tcp, udp]);
    converge(&aws, &both).await.unwrap();
    let (is_on, chosen) = source_nat(&moto).await;
    let subnets: BTreeSet<&String> = chosen.keys().collect();
    assert_eq!((is_on, subnets), (true, moto.config.subnets.iter().collect()), "{chosen:?}");
    // Another process finds everything in place, and changes one prefix of two.
    moto.proxy().reset();
    let aws = moto.provider(moto.config.clone());
    converge(&aws, &both).await.unwrap();
    assert!(moto.proxy().writes().is_empty(), "{:?}", calls(&moto));
    let prefix = "2001:db8:0:1:2::/80";
    let name = |suffix: &str| format!("service.beta.kubernetes.io/aws-load-balancer-{suffix}");
    both.annotations.insert(name("subnets"), moto.config.subnets.join(","));
    both.annotations.insert(name("source-nat-ipv6-prefixes"), format!("{prefix},auto_assigned"));
    converge(&aws, &both).await.unwrap();
    let mut expected = chosen;
    expected.insert(moto.config.subnets[0].clone(), prefix.to_owned());
    assert_eq!(source_nat(&moto).await, (true, expected));
    // Without UDP and the annotation it ends, with IPv6 alone too.
    for families in [vec![Family::V6], vec![Family::V4]] {
        converge(&aws, &both).await.unwrap();
        converge(&aws, &LoadBalancer { families, ..v6.clone() }).await.unwrap();
        assert_eq!(source_nat(&moto).await, (false, BTreeMap::new()));
        converge(&aws, &v6).await.unwrap();
    }
}
