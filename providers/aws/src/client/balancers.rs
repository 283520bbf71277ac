// SPDX-License-Identifier: Apache-2.0
//! Calls about load balancers, and about tags.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use elb::types::{
    AvailabilityZone, EnablePrefixForIpv6SourceNatEnum, IpAddressType as SdkIpAddressType, LoadBalancer,
    LoadBalancerAttribute, LoadBalancerSchemeEnum, LoadBalancerStateEnum, LoadBalancerTypeEnum,
    SubnetMapping,
};

use super::{BalancerCalls, CallError, Client, Result, Tags, elb, empty, sdk_tags, unless_not_found};
use crate::attributes::Values;
use crate::config::Scheme;
use crate::ip_address_type::IpAddressType;
use crate::placement::{Address, Placed};
use crate::source_nat::SourceNat;

/// A load balancer, as described by AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Balancer {
    pub(crate) arn: String,
    pub(crate) name: String,
    pub(crate) hostname: String,
    pub(crate) active: bool,
    /// AWS's reason if the load balancer could not be created.
    pub(crate) failed: Option<String>,
    pub(crate) scheme: Option<Scheme>,
    pub(crate) placed: Placed,
    /// IDs of its security groups.
    pub(crate) security_groups: BTreeSet<String>,
    pub(crate) vpc: String,
    /// Whether it is a network load balancer.
    pub(crate) is_network: bool,
    /// Over which IP families clients reach it.
    pub(crate) ip_address_type: IpAddressType,
    pub(crate) source_nat: SourceNat,
}

/// A load balancer to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewBalancer {
    pub(crate) name: String,
    pub(crate) scheme: Scheme,
    pub(crate) ip_address_type: IpAddressType,
    pub(crate) source_nat: SourceNat,
    /// One for each availability zone, with the address that is requested there.
    pub(crate) subnets: Vec<(String, Option<Address>)>,
    /// The IDs of its security groups. Without one, it can never get one.
    pub(crate) security_groups: BTreeSet<String>,
}

#[async_trait]
impl BalancerCalls for Client {
    async fn balancer_named(&self, name: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().names(name).send().await;
        let found = unless_not_found("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    async fn balancer_at(&self, arn: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().load_balancer_arns(arn).send().await;
        let found = unless_not_found("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    async fn balancers_at(&self, arns: &[String]) -> Result<Vec<Balancer>> {
        let call = self.elb.describe_load_balancers().set_load_balancer_arns(Some(arns.to_vec()));
        let answer = call.send().await.map_err(CallError::of("DescribeLoadBalancers"))?;
        Ok(answer.load_balancers.unwrap_or_default().into_iter().map(balancer).collect())
    }

    async fn all_balancers(&self) -> Result<Vec<Balancer>> {
        let pages = self.elb.describe_load_balancers().page_size(400).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(CallError::of("DescribeLoadBalancers"))?;
        Ok(all.into_iter().map(balancer).collect())
    }

    async fn create_balancer(&self, wanted: &NewBalancer, tags: &Tags) -> Result<Balancer> {
        let scheme = match wanted.scheme {
            Scheme::Internal => LoadBalancerSchemeEnum::Internal,
            Scheme::InternetFacing => LoadBalancerSchemeEnum::InternetFacing,
        };
        let groups: Vec<String> = wanted.security_groups.iter().cloned().collect();
        let groups = (!groups.is_empty()).then_some(groups);
        let call = self
            .elb
            .create_load_balancer()
            .name(&wanted.name)
            .r#type(LoadBalancerTypeEnum::Network)
            .scheme(scheme)
            .ip_address_type(SdkIpAddressType::from(wanted.ip_address_type.as_str()))
            .set_enable_prefix_for_ipv6_source_nat(
                wanted.source_nat.is_on().then(|| enable(&wanted.source_nat)),
            )
            .set_subnet_mappings(Some(mappings(wanted.subnets.iter().cloned(), &wanted.source_nat)))
            .set_security_groups(groups)
            .set_tags(Some(sdk_tags(tags)));
        let made = call.send().await.map_err(CallError::of("CreateLoadBalancer"))?;
        let made = made.load_balancers.unwrap_or_default().into_iter().next();
        Ok(balancer(made.ok_or_else(|| empty("CreateLoadBalancer"))?))
    }

    async fn delete_balancer(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_load_balancer().load_balancer_arn(arn).send().await;
        unless_not_found("DeleteLoadBalancer", "LoadBalancerNotFound", answer).map(drop)
    }

    async fn set_security_groups(&self, arn: &str, groups: &[String]) -> Result<()> {
        let call = self.elb.set_security_groups().load_balancer_arn(arn);
        let answer = call.set_security_groups(Some(groups.to_vec())).send().await;
        answer.map(drop).map_err(CallError::of("SetSecurityGroups"))
    }

    async fn set_subnets(
        &self,
        arn: &str,
        subnets: &Placed,
        source_nat: Option<&SourceNat>,
    ) -> Result<SourceNat> {
        let requested = source_nat.cloned().unwrap_or_default();
        let call = self
            .elb
            .set_subnets()
            .load_balancer_arn(arn)
            .set_enable_prefix_for_ipv6_source_nat(source_nat.map(enable))
            .set_subnet_mappings(Some(mappings(subnets.clone(), &requested)));
        let answer = call.send().await.map_err(CallError::of("SetSubnets"))?;
        let zones = answer.availability_zones.unwrap_or_default();
        Ok(shown(answer.enable_prefix_for_ipv6_source_nat.as_ref(), &zones).or_requested(requested))
    }

    async fn set_ip_address_type(&self, arn: &str, kind: IpAddressType) -> Result<()> {
        let call = self.elb.set_ip_address_type().load_balancer_arn(arn);
        let answer = call.ip_address_type(SdkIpAddressType::from(kind.as_str())).send().await;
        answer.map(drop).map_err(CallError::of("SetIpAddressType"))
    }

    async fn balancer_attributes(&self, arn: &str) -> Result<BTreeMap<String, String>> {
        let answer = self.elb.describe_load_balancer_attributes().load_balancer_arn(arn).send().await;
        let answer = answer.map_err(CallError::of("DescribeLoadBalancerAttributes"))?;
        let pairs =
            answer.attributes.unwrap_or_default().into_iter().filter_map(|a| Some((a.key?, a.value?)));
        Ok(pairs.collect())
    }

    async fn set_balancer_attributes(&self, arn: &str, attributes: &Values) -> Result<()> {
        let one =
            |(key, value): (&&str, &String)| LoadBalancerAttribute::builder().key(*key).value(value).build();
        let call = self
            .elb
            .modify_load_balancer_attributes()
            .load_balancer_arn(arn)
            .set_attributes(Some(attributes.iter().map(one).collect()));
        call.send().await.map(drop).map_err(CallError::of("ModifyLoadBalancerAttributes"))
    }

    async fn add_tags(&self, arn: &str, tags: &Tags) -> Result<()> {
        let call = self.elb.add_tags().resource_arns(arn).set_tags(Some(sdk_tags(tags)));
        call.send().await.map(drop).map_err(CallError::of("AddTags"))
    }

    async fn remove_tags(&self, arn: &str, keys: &[String]) -> Result<()> {
        let call = self.elb.remove_tags().resource_arns(arn).set_tag_keys(Some(keys.to_vec()));
        call.send().await.map(drop).map_err(CallError::of("RemoveTags"))
    }

    async fn tags(&self, arns: &[String]) -> Result<BTreeMap<String, Tags>> {
        let answer = self.elb.describe_tags().set_resource_arns(Some(arns.to_vec())).send().await;
        let answer = answer.map_err(CallError::of("DescribeTags"))?;
        let mut tags = BTreeMap::new();
        for described in answer.tag_descriptions.unwrap_or_default() {
            let pairs = described.tags.unwrap_or_default().into_iter();
            let pairs = pairs.filter_map(|t| Some((t.key?, t.value.unwrap_or_default())));
            tags.insert(described.resource_arn.unwrap_or_default(), pairs.collect());
        }
        Ok(tags)
    }
}

fn mappings(
    subnets: impl IntoIterator<Item = (String, Option<Address>)>,
    source_nat: &SourceNat,
) -> Vec<SubnetMapping> {
    let one = |(subnet, address): (String, Option<Address>)| {
        let prefix = source_nat.prefix(&subnet);
        let mapping = SubnetMapping::builder().subnet_id(subnet).set_source_nat_ipv6_prefix(prefix);
        match address {
            None => mapping.build(),
            Some(Address::Elastic(id)) => mapping.allocation_id(id).build(),
            Some(Address::Private(ip)) => mapping.private_ipv4_address(ip.to_string()).build(),
        }
    };
    subnets.into_iter().map(one).collect()
}

fn enable(source_nat: &SourceNat) -> EnablePrefixForIpv6SourceNatEnum {
    EnablePrefixForIpv6SourceNatEnum::from(source_nat.as_str())
}

/// The source NAT that AWS shows.
fn shown(enabled: Option<&EnablePrefixForIpv6SourceNatEnum>, zones: &[AvailabilityZone]) -> SourceNat {
    if enabled != Some(&EnablePrefixForIpv6SourceNatEnum::On) {
        return SourceNat::Off;
    }
    let prefix = |zone: &AvailabilityZone| zone.source_nat_ipv6_prefixes().first()?.parse().ok();
    let prefixes = zones.iter().filter_map(|zone| Some((zone.subnet_id.clone()?, prefix(zone)?)));
    SourceNat::On(prefixes.collect())
}

/// A subnet of a load balancer. AWS shows an allocation or a private address only if it was requested.
fn placed(zone: AvailabilityZone) -> Option<(String, Option<Address>)> {
    let shown = zone.load_balancer_addresses.unwrap_or_default().into_iter().find_map(|shown| {
        let private = |text: String| text.parse().ok().map(Address::Private);
        shown.allocation_id.map(Address::Elastic).or_else(|| shown.private_ipv4_address.and_then(private))
    });
    Some((zone.subnet_id?, shown))
}

fn balancer(found: LoadBalancer) -> Balancer {
    let state = found.state.unwrap_or_else(|| elb::types::LoadBalancerState::builder().build());
    let failed = (state.code == Some(LoadBalancerStateEnum::Failed))
        .then(|| state.reason.unwrap_or_else(|| "AWS gave no reason".to_owned()));
    let zones = found.availability_zones.unwrap_or_default();
    Balancer {
        source_nat: shown(found.enable_prefix_for_ipv6_source_nat.as_ref(), &zones),
        arn: found.load_balancer_arn.unwrap_or_default(),
        name: found.load_balancer_name.unwrap_or_default(),
        hostname: found.dns_name.unwrap_or_default().to_ascii_lowercase(),
        // `active_impaired` still forwards traffic.
        active: matches!(
            state.code,
            Some(LoadBalancerStateEnum::Active | LoadBalancerStateEnum::ActiveImpaired)
        ),
        failed,
        placed: zones.into_iter().filter_map(placed).collect(),
        scheme: found.scheme.and_then(|s| Scheme::parse(s.as_str())),
        security_groups: found.security_groups.unwrap_or_default().into_iter().collect(),
        vpc: found.vpc_id.unwrap_or_default(),
        is_network: found.r#type == Some(LoadBalancerTypeEnum::Network),
        ip_address_type: match found.ip_address_type {
            None | Some(SdkIpAddressType::Ipv4) => IpAddressType::Ipv4,
            Some(_) => IpAddressType::DualStack,
        },
    }
}
