// SPDX-License-Identifier: Apache-2.0
//! Load balancers and tags. The name of a load balancer is taken only by one with other settings; otherwise creating it again
//! returns the existing one, whose tags may be another's.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::cloud::{Cloud, NetworkLb};
use super::{Kind, StandIn};
use crate::attributes::Values;
use crate::client::{
    BALANCERS_BATCH, Balancer, BalancerCalls, CallError, NewBalancer, Result, TAGS_BATCH, Tags,
};
use crate::ip_address_type::IpAddressType;
use crate::placement::Placed;
use crate::source_nat::SourceNat;

impl StandIn {
    fn balancer(&self, arn: &str, found: &NetworkLb, now: Instant) -> Balancer {
        Balancer {
            arn: arn.to_owned(),
            name: found.made.name.clone(),
            hostname: hostname(&found.made.name),
            active: now >= found.created + self.delays.provisioning,
            failed: None,
            scheme: Some(found.made.scheme),
            placed: found.placed.clone(),
            security_groups: found.security_groups.clone(),
            vpc: found.vpc.clone(),
            is_network: found.is_network,
            ip_address_type: found.ip_address_type,
            source_nat: found.source_nat.clone(),
        }
    }
}

/// The host name of a load balancer.
pub(crate) fn hostname(name: &str) -> String {
    format!("{}-0123456789abcdef.elb.us-east-1.amazonaws.com", name.to_ascii_lowercase())
}

/// Why AWS refuses a change of subnets. A zone has one subnet, also while it changes, and an address never changes.
fn refused_subnets(cloud: &Cloud, present: &Placed, wanted: &Placed) -> Option<(&'static str, String)> {
    let zone_of =
        |id: &String| cloud.subnets.iter().find(|subnet| subnet.id == *id).map(|subnet| &subnet.zone);
    if wanted.is_empty() {
        return Some(("ValidationError", "At least one subnet must be specified".to_owned()));
    }
    let mut zones = BTreeSet::new();
    for (id, address) in wanted {
        let Some(zone) = zone_of(id) else {
            return Some(("SubnetNotFound", format!("The subnet ID '{id}' does not exist")));
        };
        let is_taken = |other: &String| other != id && zone_of(other) == Some(zone);
        if !zones.insert(zone) || !present.contains_key(id) && present.keys().any(is_taken) {
            return Some((
                "InvalidConfigurationRequest",
                format!("The Availability Zone '{zone}' is already associated"),
            ));
        }
        if present.get(id).is_some_and(|has| has != address) {
            return Some(("InvalidConfigurationRequest", format!("The address in '{id}' cannot change")));
        }
    }
    None
}

/// Why AWS refuses this source NAT.
fn refused_source_nat(
    cloud: &Cloud,
    (arn, found): (&str, &NetworkLb),
    requested: &SourceNat,
    subnets: &Placed,
) -> Option<&'static str> {
    match requested {
        SourceNat::Off if found.source_nat.is_on() && cloud.has_udp(arn) => Some("a listener has UDP"),
        SourceNat::On(_) if found.ip_address_type == IpAddressType::Ipv4 => {
            Some("source NAT needs dualstack")
        }
        SourceNat::On(given) if given.keys().any(|id| !subnets.contains_key(id)) => {
            Some("a prefix is for another subnet")
        }
        SourceNat::Off | SourceNat::On(_) => None,
    }
}

/// Of these messages, only that about target groups names the ARN.
fn untaggable(action: &'static str, arn: &str) -> CallError {
    let (code, message) = if arn.contains(":targetgroup/") {
        ("TargetGroupNotFound", format!("Target groups '{arn}' not found"))
    } else if arn.contains(":listener/") {
        ("ListenerNotFound", "One or more listeners not found".to_owned())
    } else {
        ("LoadBalancerNotFound", "One or more load balancers not found".to_owned())
    };
    CallError::made_up(action, code, message)
}

#[async_trait]
impl BalancerCalls for StandIn {
    async fn balancer_named(&self, name: &str) -> Result<Option<Balancer>> {
        self.read("DescribeLoadBalancers", 1, name.to_owned(), |cloud, now| {
            let found = cloud.balancers.iter().find(|(_, balancer)| balancer.made.name == name);
            Ok(found.map(|(arn, found)| self.balancer(arn, found, now)))
        })
        .await
    }

    async fn balancer_at(&self, arn: &str) -> Result<Option<Balancer>> {
        self.read("DescribeLoadBalancers", 1, arn.to_owned(), |cloud, now| {
            Ok(cloud.balancers.get(arn).map(|found| self.balancer(arn, found, now)))
        })
        .await
    }

    async fn balancers_at(&self, arns: &[String]) -> Result<Vec<Balancer>> {
        let action = "DescribeLoadBalancers";
        self.read(action, 1, arns.join(","), |cloud, now| {
            if arns.len() > BALANCERS_BATCH {
                return Err(CallError::made_up(action, "ValidationError", "too many ARNs"));
            }
            let missing = || {
                let message = "One or more load balancers not found";
                CallError::made_up(action, "LoadBalancerNotFound", message)
            };
            let shown = |arn: &String| {
                let found = cloud.balancers.get(arn).ok_or_else(missing)?;
                Ok(self.balancer(arn, found, now))
            };
            arns.iter().map(shown).collect()
        })
        .await
    }

    async fn all_balancers(&self) -> Result<Vec<Balancer>> {
        let pages = self.cloud().balancers.len().div_ceil(400).max(1);
        self.read("DescribeLoadBalancers", pages, String::new(), |cloud, now| {
            Ok(cloud.balancers.iter().map(|(arn, found)| self.balancer(arn, found, now)).collect())
        })
        .await
    }

    async fn create_balancer(&self, wanted: &NewBalancer, tags: &Tags) -> Result<Balancer> {
        let (action, name) = ("CreateLoadBalancer", wanted.name.as_str());
        self.write(action, Kind::Mutation, name.to_owned(), |cloud, now| {
            if let Some((arn, same)) = cloud.balancers.iter().find(|(_, balancer)| balancer.made.name == name)
            {
                return if same.made == *wanted {
                    Ok(self.balancer(arn, same, now))
                } else {
                    let message = format!("A load balancer with the same name '{name}' exists");
                    Err(CallError::made_up(action, "DuplicateLoadBalancerName", message))
                };
            }
            let mut groups = wanted.security_groups.iter();
            if let Some(group) = groups.find(|group| !cloud.knows_security_group(group, now)) {
                let message = format!("Security group '{group}' does not exist");
                return Err(CallError::made_up(action, "InvalidSecurityGroup", message));
            }
            if wanted.source_nat.is_on() && wanted.ip_address_type == IpAddressType::Ipv4 {
                return Err(CallError::made_up(
                    action,
                    "InvalidConfigurationRequest",
                    "source NAT needs dualstack",
                ));
            }
            if wanted.ip_address_type == IpAddressType::DualStack
                && let Some(message) = cloud.lacks_ipv6(wanted.subnets.iter().map(|(id, _)| id))
            {
                return Err(CallError::made_up(action, "InvalidSubnet", message));
            }
            let mut made = NetworkLb::new(wanted.clone(), tags.clone(), now);
            made.source_nat = cloud.assigned(&wanted.source_nat, &made.placed);
            let arn = cloud.arn("loadbalancer/net", name);
            let answer = self.balancer(&arn, &made, now);
            cloud.balancers.insert(arn, made);
            Ok(Balancer { active: self.delays.provisioning == Duration::ZERO, ..answer })
        })
        .await
    }

    async fn delete_balancer(&self, arn: &str) -> Result<()> {
        let action = "DeleteLoadBalancer";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, now| {
            let protection =
                cloud.balancers.get(arn).and_then(|b| b.attributes.get("deletion_protection.enabled"));
            if protection.is_some_and(|protection| protection == "true") {
                let message =
                    format!("Load balancer '{arn}' cannot be deleted because deletion protection is enabled");
                return Err(CallError::made_up(action, "OperationNotPermitted", message));
            }
            let Cloud { listeners, groups, balancers, security_group_held_until, .. } = cloud;
            for forward in listeners.values().filter(|forward| forward.balancer == arn) {
                if let Some(group) = groups.get_mut(&forward.group) {
                    group.held_until = Some(now + self.delays.release);
                }
            }
            listeners.retain(|_, forward| forward.balancer != arn);
            let used = balancers.remove(arn).map(|found| found.security_groups).unwrap_or_default();
            security_group_held_until.extend(used.into_iter().map(|id| (id, now + self.delays.release)));
            cloud.note_use(now);
            Ok(())
        })
        .await
    }

    async fn set_security_groups(&self, arn: &str, groups: &[String]) -> Result<()> {
        let action = "SetSecurityGroups";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, now| {
            let refuse = |code: &str, message: &str| Err(CallError::made_up(action, code, message));
            if let Some(unknown) = groups.iter().find(|id| !cloud.knows_security_group(id, now)) {
                return refuse("InvalidSecurityGroup", unknown);
            }
            let Some(found) = cloud.balancers.get_mut(arn) else {
                return refuse("LoadBalancerNotFound", arn);
            };
            if found.security_groups.is_empty() || groups.is_empty() {
                return refuse("InvalidConfigurationRequest", "from or to no security groups");
            }
            found.security_groups = groups.iter().cloned().collect();
            Ok(())
        })
        .await
    }

    async fn set_subnets(
        &self,
        arn: &str,
        subnets: &Placed,
        source_nat: Option<&SourceNat>,
    ) -> Result<SourceNat> {
        let action = "SetSubnets";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, _| {
            let Some(found) = cloud.balancers.get(arn) else {
                return Err(CallError::made_up(action, "LoadBalancerNotFound", arn));
            };
            if let Some((code, message)) = refused_subnets(cloud, &found.placed, subnets) {
                return Err(CallError::made_up(action, code, message));
            }
            if found.ip_address_type == IpAddressType::DualStack
                && let Some(message) = cloud.lacks_ipv6(subnets.keys())
            {
                return Err(CallError::made_up(action, "InvalidSubnet", message));
            }
            let requested = source_nat.cloned().unwrap_or_default();
            if let Some(message) = refused_source_nat(cloud, (arn, found), &requested, subnets) {
                return Err(CallError::made_up(action, "InvalidConfigurationRequest", message));
            }
            let assigned = cloud.assigned(&requested, subnets);
            if let Some(found) = cloud.balancers.get_mut(arn) {
                found.placed.clone_from(subnets);
                found.source_nat.clone_from(&assigned);
            }
            Ok(assigned)
        })
        .await
    }

    async fn set_ip_address_type(&self, arn: &str, kind: IpAddressType) -> Result<()> {
        let action = "SetIpAddressType";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, _| {
            if cloud.keeps_ip_address_types {
                return Err(CallError::made_up(action, "InvalidConfigurationRequest", "a subnet lacks IPv6"));
            }
            let used = cloud.listeners.values().filter(|listener| listener.balancer == arn);
            let has_v6 = used.filter_map(|listener| cloud.groups.get(&listener.group)).any(|g| g.is_ipv6);
            if kind == IpAddressType::Ipv4 && has_v6 {
                let message = "a target group has the IP address type ipv6";
                return Err(CallError::made_up(action, "InvalidConfigurationRequest", message));
            }
            let refused = match cloud.balancers.get(arn) {
                Some(found) if kind == found.ip_address_type => None,
                Some(found) if found.source_nat.is_on() => Some("source NAT needs dualstack"),
                // Its targets have IPv4.
                Some(_) if cloud.has_udp(arn) => Some("a listener has UDP"),
                Some(found) if kind == IpAddressType::DualStack => cloud.lacks_ipv6(found.placed.keys()),
                _ => None,
            };
            if let Some(message) = refused {
                return Err(CallError::made_up(action, "InvalidConfigurationRequest", message));
            }
            match cloud.balancers.get_mut(arn) {
                Some(found) => found.ip_address_type = kind,
                None => return Err(CallError::made_up(action, "LoadBalancerNotFound", arn)),
            }
            Ok(())
        })
        .await
    }

    async fn balancer_attributes(&self, arn: &str) -> Result<BTreeMap<String, String>> {
        let action = "DescribeLoadBalancerAttributes";
        self.read(action, 1, arn.to_owned(), |cloud, _| {
            let missing = || CallError::made_up(action, "LoadBalancerNotFound", arn);
            cloud.balancers.get(arn).map(|found| found.attributes.clone()).ok_or_else(missing)
        })
        .await
    }

    async fn set_balancer_attributes(&self, arn: &str, attributes: &Values) -> Result<()> {
        let action = "ModifyLoadBalancerAttributes";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, _| {
            let refuse = |code: &str, message: String| Err(CallError::made_up(action, code, message));
            let Some(found) = cloud.balancers.get_mut(arn) else {
                return refuse("LoadBalancerNotFound", arn.to_owned());
            };
            for (key, value) in attributes {
                let Some(at) = found.attributes.get_mut(*key) else {
                    return refuse(
                        "ValidationError",
                        format!("Load balancer attribute key '{key}' is not recognized"),
                    );
                };
                value.clone_into(at);
            }
            let bucket = &found.attributes["access_logs.s3.bucket"];
            if found.attributes["access_logs.s3.enabled"] == "true" && !bucket.starts_with("writable") {
                return refuse("InvalidConfigurationRequest", format!("Access Denied for bucket: {bucket}"));
            }
            Ok(())
        })
        .await
    }

    async fn add_tags(&self, arn: &str, tags: &Tags) -> Result<()> {
        let action = "AddTags";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, _| {
            let found = cloud.tags_mut(arn).ok_or_else(|| untaggable(action, arn))?;
            found.extend(tags.clone());
            if found.len() > 50 {
                return Err(CallError::made_up(action, "TooManyTags", "50 tags"));
            }
            if found.values().any(|value| value.chars().count() > 256) {
                return Err(CallError::made_up(action, "ValidationError", "256 characters"));
            }
            Ok(())
        })
        .await
    }

    async fn remove_tags(&self, arn: &str, keys: &[String]) -> Result<()> {
        let action = "RemoveTags";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, _| {
            let found = cloud.tags_mut(arn).ok_or_else(|| untaggable(action, arn))?;
            found.retain(|key, _| !keys.contains(key));
            Ok(())
        })
        .await
    }

    async fn tags(&self, arns: &[String]) -> Result<BTreeMap<String, Tags>> {
        let action = "DescribeTags";
        self.read(action, 1, String::new(), |cloud, _| {
            if arns.len() > TAGS_BATCH {
                return Err(CallError::made_up(action, "ValidationError", "too many ARNs"));
            }
            let tags_of = |arn: &String| {
                let (balancer, group) = (cloud.balancers.get(arn), cloud.groups.get(arn));
                let found = balancer.map(|b| &b.tags).or(group.map(|g| &g.tags));
                let found = found.or(cloud.listeners.get(arn).map(|listener| &listener.tags));
                let found = found.ok_or_else(|| untaggable(action, arn))?;
                Ok((arn.clone(), found.clone()))
            };
            arns.iter().map(tags_of).collect()
        })
        .await
    }
}
