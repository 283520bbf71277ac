// SPDX-License-Identifier: Apache-2.0
//! Calls about target groups and their attributes.

use std::collections::BTreeMap;

use async_trait::async_trait;
use elb::types::{
    Matcher, ProtocolEnum, TargetGroup, TargetGroupAttribute, TargetGroupIpAddressTypeEnum, TargetTypeEnum,
};
use steerage_model::Family;

use super::{CallError, Client, GroupCalls, Result, Tags, elb, empty, sdk_tags, unless_not_found};
use crate::attributes::Values;
use crate::desired::DesiredGroup;
use crate::diff::ObservedGroup;
use crate::health_check::HealthCheckSettings;

/// A target group of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedGroup {
    pub(crate) name: String,
    pub(crate) group: ObservedGroup,
    /// ARNs of the load balancers with a listener that forwards to the group.
    pub(crate) balancers: Vec<String>,
}

/// Sets the health check on the builder of a call. `CreateTargetGroup` and `ModifyTargetGroup` have the same fields, but no
/// common type.
macro_rules! with_health_check {
    ($call:expr, $health:expr) => {{
        let health: &HealthCheckSettings = $health;
        $call
            .health_check_protocol(health_protocol(health))
            .set_health_check_path(health.path.clone())
            .set_matcher(matcher(health))
            .health_check_port(health.port.map_or("traffic-port".to_owned(), |port| port.to_string()))
            .health_check_interval_seconds(health.interval)
            .health_check_timeout_seconds(health.timeout)
            .healthy_threshold_count(health.healthy)
            .unhealthy_threshold_count(health.unhealthy)
    }};
}

#[async_trait]
impl GroupCalls for Client {
    async fn group_named(&self, name: &str) -> Result<Option<ObservedGroup>> {
        let answer = self.elb.describe_target_groups().names(name).send().await;
        let found = unless_not_found("DescribeTargetGroups", "TargetGroupNotFound", answer)?;
        Ok(found
            .and_then(|f| f.target_groups.unwrap_or_default().into_iter().next())
            .map(|g| observed_group(&g).1))
    }

    async fn groups_of(&self, balancer: &str) -> Result<BTreeMap<String, ObservedGroup>> {
        let pages =
            self.elb.describe_target_groups().load_balancer_arn(balancer).into_paginator().items().send();
        let found = match unless_not_found(
            "DescribeTargetGroups",
            "TargetGroupNotFound",
            pages.try_collect().await,
        ) {
            Err(failure) if failure.is("LoadBalancerNotFound") => None,
            other => other?,
        };
        Ok(found.unwrap_or_default().iter().map(observed_group).collect())
    }

    async fn all_groups(&self) -> Result<Vec<ListedGroup>> {
        let pages = self.elb.describe_target_groups().page_size(400).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(CallError::of("DescribeTargetGroups"))?;
        let listed = |found: &TargetGroup| {
            let (name, group) = observed_group(found);
            ListedGroup { name, group, balancers: found.load_balancer_arns.clone().unwrap_or_default() }
        };
        Ok(all.iter().map(listed).collect())
    }

    async fn attributes(&self, group: &str) -> Result<BTreeMap<String, String>> {
        let answer = self.elb.describe_target_group_attributes().target_group_arn(group).send().await;
        let answer = answer.map_err(CallError::of("DescribeTargetGroupAttributes"))?;
        let pairs =
            answer.attributes.unwrap_or_default().into_iter().filter_map(|a| Some((a.key?, a.value?)));
        Ok(pairs.collect())
    }

    async fn create_group(&self, wanted: &DesiredGroup, vpc: &str, tags: &Tags) -> Result<ObservedGroup> {
        let call = self
            .elb
            .create_target_group()
            .name(&wanted.name)
            .target_type(if wanted.has_pods() { TargetTypeEnum::Ip } else { TargetTypeEnum::Instance })
            .set_ip_address_type((wanted.family == Family::V6).then_some(TargetGroupIpAddressTypeEnum::Ipv6))
            .protocol(ProtocolEnum::from(wanted.protocol))
            .port(wanted.port().into())
            .vpc_id(vpc)
            .set_tags(Some(sdk_tags(tags)));
        let call = with_health_check!(call, &wanted.health);
        let made = call.send().await.map_err(CallError::of("CreateTargetGroup"))?;
        let made = made.target_groups.unwrap_or_default().into_iter().next();
        Ok(observed_group(&made.ok_or_else(|| empty("CreateTargetGroup"))?).1)
    }

    async fn modify_health(&self, group: &str, health: &HealthCheckSettings) -> Result<()> {
        let call = with_health_check!(self.elb.modify_target_group().target_group_arn(group), health);
        call.send().await.map(drop).map_err(CallError::of("ModifyTargetGroup"))
    }

    async fn set_attributes(&self, group: &str, attributes: &Values) -> Result<()> {
        let one =
            |(key, value): (&&str, &String)| TargetGroupAttribute::builder().key(*key).value(value).build();
        let call = self
            .elb
            .modify_target_group_attributes()
            .target_group_arn(group)
            .set_attributes(Some(attributes.iter().map(one).collect()));
        call.send().await.map(drop).map_err(CallError::of("ModifyTargetGroupAttributes"))
    }

    async fn delete_group(&self, arn: &str) -> Result<bool> {
        let answer = self.elb.delete_target_group().target_group_arn(arn).send().await;
        match unless_not_found("DeleteTargetGroup", "TargetGroupNotFound", answer) {
            Ok(_) => Ok(true),
            Err(failure) if failure.is("ResourceInUse") => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

fn observed_group(found: &TargetGroup) -> (String, ObservedGroup) {
    let http = found.health_check_protocol == Some(ProtocolEnum::Http);
    let codes = found.matcher.as_ref().and_then(|m| m.http_code.as_deref());
    let seen = ObservedGroup {
        arn: found.target_group_arn.clone().unwrap_or_default(),
        has_pods: found.target_type == Some(TargetTypeEnum::Ip),
        is_ipv6: found.ip_address_type == Some(TargetGroupIpAddressTypeEnum::Ipv6),
        health: HealthCheckSettings {
            path: http.then(|| found.health_check_path.clone().unwrap_or_default()),
            port: found.health_check_port.as_deref().and_then(|port| port.parse().ok()),
            interval: found.health_check_interval_seconds.unwrap_or_default(),
            timeout: found.health_check_timeout_seconds.unwrap_or_default(),
            healthy: found.healthy_threshold_count.unwrap_or_default(),
            unhealthy: found.unhealthy_threshold_count.unwrap_or_default(),
        },
        only_200: !http || codes == Some("200"),
        attributes: BTreeMap::new(),
        tags: Tags::new(),
    };
    (found.target_group_name.clone().unwrap_or_default(), seen)
}

fn health_protocol(health: &HealthCheckSettings) -> ProtocolEnum {
    if health.path.is_some() { ProtocolEnum::Http } else { ProtocolEnum::Tcp }
}

/// `/healthz` says 200 or 503, nothing else is a yes.
fn matcher(health: &HealthCheckSettings) -> Option<Matcher> {
    health.path.is_some().then(|| Matcher::builder().http_code("200").build())
}
