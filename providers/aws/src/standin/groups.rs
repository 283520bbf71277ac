// SPDX-License-Identifier: Apache-2.0
//! Target groups. A group is in use while a listener forwards to it, and some seconds after its load balancer was deleted.

use std::collections::BTreeMap;

use async_trait::async_trait;
use steerage_model::Family;

use super::cloud::{Cloud, Group};
use super::{Kind, StandIn};
use crate::attributes::Values;
use crate::client::{CallError, GroupCalls, ListedGroup, Result, Tags};
use crate::desired::DesiredGroup;
use crate::diff::ObservedGroup;
use crate::health_check::HealthCheckSettings;

fn observed(arn: &str, found: &Group) -> ObservedGroup {
    let health = found.health.clone();
    let (attributes, tags) = (BTreeMap::new(), Tags::new());
    let (has_pods, is_ipv6) = (found.has_pods, found.is_ipv6);
    ObservedGroup { arn: arn.to_owned(), has_pods, is_ipv6, health, only_200: true, attributes, tags }
}

/// The attributes of a new group.
fn defaults(protocol: &str, has_pods: bool) -> BTreeMap<String, String> {
    let mut all = vec![
        ("deregistration_delay.timeout_seconds", "300"),
        (
            "deregistration_delay.connection_termination.enabled",
            if protocol.ends_with("UDP") { "true" } else { "false" },
        ),
        ("load_balancing.cross_zone.enabled", "use_load_balancer_configuration"),
        ("preserve_client_ip.enabled", if has_pods && !protocol.ends_with("UDP") { "false" } else { "true" }),
        ("proxy_protocol_v2.enabled", "false"),
        ("target_group_health.dns_failover.minimum_healthy_targets.count", "1"),
        ("target_group_health.dns_failover.minimum_healthy_targets.percentage", "off"),
        ("target_group_health.unhealthy_state_routing.minimum_healthy_targets.count", "1"),
        ("target_group_health.unhealthy_state_routing.minimum_healthy_targets.percentage", "off"),
    ];
    if protocol != "TLS" {
        all.push(("stickiness.enabled", "false"));
        all.push(("stickiness.type", "source_ip"));
    }
    if matches!(protocol, "TCP" | "TLS") {
        all.push(("target_health_state.unhealthy.connection_termination.enabled", "true"));
        all.push(("target_health_state.unhealthy.draining_interval_seconds", "0"));
    }
    all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn found<'a>(cloud: &'a mut Cloud, action: &'static str, arn: &str) -> Result<&'a mut Group> {
    let missing =
        || CallError::made_up(action, "TargetGroupNotFound", format!("Target groups '{arn}' not found"));
    cloud.groups.get_mut(arn).ok_or_else(missing)
}

#[async_trait]
impl GroupCalls for StandIn {
    async fn group_named(&self, name: &str) -> Result<Option<ObservedGroup>> {
        self.read("DescribeTargetGroups", 1, name.to_owned(), |cloud, _| {
            Ok(cloud.groups.iter().find(|(_, group)| group.name == name).map(|(arn, g)| observed(arn, g)))
        })
        .await
    }

    async fn groups_of(&self, balancer: &str) -> Result<BTreeMap<String, ObservedGroup>> {
        self.read("DescribeTargetGroups", 1, balancer.to_owned(), |cloud, _| {
            let used = cloud.listeners.values().filter(|forward| forward.balancer == balancer);
            let found = used.filter_map(|forward| cloud.groups.get_key_value(&forward.group));
            Ok(found.map(|(arn, group)| (group.name.clone(), observed(arn, group))).collect())
        })
        .await
    }

    async fn all_groups(&self) -> Result<Vec<ListedGroup>> {
        let pages = self.cloud().groups.len().div_ceil(400).max(1);
        self.read("DescribeTargetGroups", pages, String::new(), |cloud, _| {
            let listed = |(arn, found): (&String, &Group)| {
                let of = cloud.listeners.values().filter(|forward| forward.group == *arn);
                let mut balancers: Vec<String> = of.map(|forward| forward.balancer.clone()).collect();
                balancers.dedup();
                ListedGroup { name: found.name.clone(), group: observed(arn, found), balancers }
            };
            Ok(cloud.groups.iter().map(listed).collect())
        })
        .await
    }

    async fn attributes(&self, group: &str) -> Result<BTreeMap<String, String>> {
        let action = "DescribeTargetGroupAttributes";
        self.read(action, 1, group.to_owned(), |cloud, _| {
            let missing = || CallError::made_up(action, "TargetGroupNotFound", group);
            cloud.groups.get(group).map(|group| group.attributes.clone()).ok_or_else(missing)
        })
        .await
    }

    async fn create_group(&self, wanted: &DesiredGroup, vpc: &str, tags: &Tags) -> Result<ObservedGroup> {
        let action = "CreateTargetGroup";
        self.write(action, Kind::Mutation, wanted.name.clone(), |cloud, _| {
            if let Some((arn, same)) = cloud.groups.iter().find(|(_, group)| group.name == wanted.name) {
                let is_same = (same.protocol.as_str(), same.port, same.vpc.as_str(), &same.health)
                    == (wanted.protocol, wanted.port(), vpc, &wanted.health)
                    && same.has_pods == wanted.has_pods()
                    && same.is_ipv6 == (wanted.family == Family::V6);
                let message = format!("A target group with the same name '{}' exists", wanted.name);
                let refused = CallError::made_up(action, "DuplicateTargetGroupName", message);
                return if is_same { Ok(observed(arn, same)) } else { Err(refused) };
            }
            if cloud.groups.len() >= self.quotas.groups {
                return Err(CallError::made_up(action, "TooManyTargetGroups", "quota"));
            }
            let made = Group {
                name: wanted.name.clone(),
                protocol: wanted.protocol.to_owned(),
                port: wanted.port(),
                has_pods: wanted.has_pods(),
                is_ipv6: wanted.family == Family::V6,
                vpc: vpc.to_owned(),
                health: wanted.health.clone(),
                attributes: defaults(wanted.protocol, wanted.has_pods()),
                tags: tags.clone(),
                targets: BTreeMap::new(),
                used: None,
                held_until: None,
                served: None,
            };
            let arn = cloud.arn("targetgroup", &wanted.name);
            let answer = observed(&arn, &made);
            cloud.groups.insert(arn, made);
            Ok(answer)
        })
        .await
    }

    async fn modify_health(&self, group: &str, health: &HealthCheckSettings) -> Result<()> {
        let action = "ModifyTargetGroup";
        self.write(action, Kind::Mutation, group.to_owned(), |cloud, _| {
            found(cloud, action, group)?.health = health.clone();
            Ok(())
        })
        .await
    }

    async fn set_attributes(&self, group: &str, attributes: &Values) -> Result<()> {
        let action = "ModifyTargetGroupAttributes";
        self.write(action, Kind::Mutation, group.to_owned(), |cloud, _| {
            let group = found(cloud, action, group)?;
            for (key, value) in attributes {
                let Some(at) = group.attributes.get_mut(*key) else {
                    let message = format!("Target group attribute key '{key}' is not supported");
                    return Err(CallError::made_up(action, "InvalidConfigurationRequest", message));
                };
                value.clone_into(at);
            }
            Ok(())
        })
        .await
    }

    async fn delete_group(&self, arn: &str) -> Result<bool> {
        self.write("DeleteTargetGroup", Kind::Mutation, arn.to_owned(), |cloud, now| {
            let is_held =
                |group: &Group| group.used.is_some() || group.held_until.is_some_and(|until| now < until);
            if cloud.groups.get(arn).is_some_and(is_held) {
                return Ok(false);
            }
            cloud.groups.remove(arn);
            Ok(true)
        })
        .await
    }
}
