// SPDX-License-Identifier: Apache-2.0
//! IPv6 through the wire format, on moto.

use aws_sdk_elasticloadbalancingv2::types::{IpAddressType, TargetGroupIpAddressTypeEnum};
use steerage_ec2::Filter;
use steerage_model::{Family, Protocol};
use steerage_provider_api::LoadBalancer;
use steerage_provider_conformance::{Harness as _, converge};
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
