// SPDX-License-Identifier: Apache-2.0
//! Targets. Those without a port of their own have that of their group.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::cloud::{Cloud, Group, Registration};
use super::{Kind, StandIn};
use crate::call_clock;
use crate::client::{CallError, RegisteredTarget, Result, TargetCalls};
use crate::target_id::TargetId;

fn missing(action: &'static str, group: &str) -> CallError {
    CallError::made_up(action, "TargetGroupNotFound", format!("Target groups '{group}' not found"))
}

/// The targets of all target groups that share a load balancer with this one.
fn targets_beside(cloud: &Cloud, group: &str) -> usize {
    let balancer = cloud.listeners.values().find(|f| f.group == group).map(|f| &f.balancer);
    let shares = |arn: &String| {
        arn == group || cloud.listeners.values().any(|f| f.group == *arn && Some(&f.balancer) == balancer)
    };
    cloud.groups.iter().filter(|(arn, _)| shares(arn)).map(|(_, found)| found.registered().count()).sum()
}

/// What distinguishes a target from others of the group.
fn key(id: &TargetId, group: &Group) -> (String, u16) {
    (id.id(), id.port().unwrap_or(group.port))
}

impl Cloud {
    fn check_registration(&self, action: &'static str, group: &str) -> Result<()> {
        let code = self.groups.get(group).and_then(|found| self.failing_groups.get(&found.port));
        code.map_or(Ok(()), |code| Err(CallError::made_up(action, code, "made up")))
    }
}

impl StandIn {
    async fn hang_for(&self, action: &'static str, group: &str) -> Result<()> {
        let cloud = self.cloud();
        if cloud.groups.get(group).is_some_and(|found| cloud.hanging_groups.contains(&found.port)) {
            let running = call_clock::begin();
            tokio::time::sleep(Duration::from_secs(30)).await;
            running.end(true);
            return Err(CallError::made_up(action, "", "timeout"));
        }
        Ok(())
    }
}

fn joined(ids: &[TargetId]) -> String {
    ids.iter().map(TargetId::id).collect::<Vec<_>>().join(",")
}

#[async_trait]
impl TargetCalls for StandIn {
    async fn targets(&self, group: &str) -> Result<Vec<RegisteredTarget>> {
        let action = "DescribeTargetHealth";
        self.read(action, 1, group.to_owned(), |cloud, now| {
            let found = cloud.groups.get(group).ok_or_else(|| missing(action, group))?;
            let described = |(key, registration): (&(String, u16), &Registration)| {
                let (state, reason) = cloud.health(&self.delays, found, &key.0, registration, now);
                RegisteredTarget { id: TargetId::of(&key.0, Some(key.1)), state, reason: reason.to_owned() }
            };
            Ok(found.listed(now).map(described).collect())
        })
        .await
    }

    async fn register(&self, group: &str, ids: &[TargetId]) -> Result<()> {
        let action = "RegisterTargets";
        self.hang_for(action, group).await?;
        self.write(action, Kind::Registration, joined(ids), |cloud, now| {
            let runs = |id: &TargetId| cloud.instances.get(&id.id()).is_some_and(|found| found.running);
            let bad = ids.iter().filter(|id| !runs(id)).map(|id| format!("'{}'", id.id()));
            let bad: Vec<String> = bad.collect();
            if let (Some(first), Some(TargetId::Pod(_))) = (bad.first(), ids.first()) {
                let message =
                    format!("The IP address {first} is not within a range that is valid for the VPC");
                return Err(CallError::made_up(action, "ValidationError", message));
            }
            if !bad.is_empty() {
                let message = format!(
                    "The following targets are not in a running state and cannot be registered: {}",
                    bad.join(", ")
                );
                return Err(CallError::made_up(action, "InvalidTarget", message));
            }
            cloud.check_registration(action, group)?;
            let found = cloud.groups.get_mut(group).ok_or_else(|| missing(action, group))?;
            let is_other = |id: &&TargetId| matches!(id, TargetId::Pod(at) if at.is_ipv6() != found.is_ipv6);
            if let Some(id) = ids.iter().find(is_other) {
                let message = format!("The IP address '{}' is of another IP address type", id.id());
                return Err(CallError::made_up(action, "ValidationError", message));
            }
            for id in ids {
                let key = key(id, found);
                let registration =
                    found.targets.entry(key).or_insert(Registration { since: now, draining: None });
                if registration.draining.is_some() {
                    *registration = Registration { since: now, draining: None };
                }
            }
            if targets_beside(cloud, group) > self.quotas.targets {
                return Err(CallError::made_up(action, "TooManyTargets", "quota"));
            }
            Ok(())
        })
        .await
    }

    async fn deregister(&self, group: &str, ids: &[TargetId]) -> Result<()> {
        let action = "DeregisterTargets";
        self.hang_for(action, group).await?;
        self.write(action, Kind::Registration, joined(ids), |cloud, now: Instant| {
            cloud.check_registration(action, group)?;
            let found = cloud.groups.get_mut(group).ok_or_else(|| missing(action, group))?;
            for id in ids {
                // Unknown ones are no error.
                let key = key(id, found);
                if found.used.is_none() {
                    found.targets.remove(&key);
                } else if let Some(registration) = found.targets.get_mut(&key) {
                    registration.draining.get_or_insert(now);
                }
            }
            Ok(())
        })
        .await
    }
}
