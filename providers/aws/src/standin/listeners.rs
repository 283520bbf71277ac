// SPDX-License-Identifier: Apache-2.0
//! Listeners.

use async_trait::async_trait;

use super::cloud::{Cloud, Forward};
use super::{Kind, StandIn};
use crate::client::{CallError, ListenerCalls, Result, Tags};
use crate::diff::ObservedListener;

fn observed(arn: &str, found: &Forward) -> ObservedListener {
    ObservedListener {
        arn: arn.to_owned(),
        port: found.port,
        protocol: found.protocol.clone(),
        group_arn: Some(found.group.clone()),
        tags: Tags::new(),
    }
}

/// Whether a listener can forward to the group, and has targets to spare.
fn check_group(
    cloud: &Cloud,
    quota: usize,
    action: &'static str,
    (balancer, protocol, group): (&str, &str, &str),
) -> Result<()> {
    let refuse = |code: &str, message: String| Err(CallError::made_up(action, code, message));
    let Some(found) = cloud.groups.get(group) else {
        return refuse("TargetGroupNotFound", format!("Target groups '{group}' not found"));
    };
    if found.protocol != protocol {
        return refuse("IncompatibleProtocols", format!("{protocol} listener, {} group", found.protocol));
    }
    let other =
        cloud.listeners.values().any(|forward| forward.group == group && forward.balancer != balancer);
    if other {
        return refuse("TargetGroupAssociationLimit", "one load balancer for a group".to_owned());
    }
    let mut groups: Vec<&String> =
        cloud.listeners.values().filter(|f| f.balancer == balancer).map(|f| &f.group).collect();
    let group = group.to_owned();
    groups.push(&group);
    groups.sort();
    groups.dedup();
    let targets: usize =
        groups.iter().filter_map(|arn| cloud.groups.get(*arn)).map(|g| g.registered().count()).sum();
    if targets > quota {
        return refuse("TooManyTargets", format!("{targets} targets, at most {quota}"));
    }
    Ok(())
}

#[async_trait]
impl ListenerCalls for StandIn {
    async fn listeners(&self, balancer: &str) -> Result<Option<Vec<ObservedListener>>> {
        self.read("DescribeListeners", 1, balancer.to_owned(), |cloud, _| {
            let of = cloud.listeners.iter().filter(|(_, forward)| forward.balancer == balancer);
            let all = of.map(|(arn, found)| observed(arn, found)).collect();
            Ok(cloud.balancers.contains_key(balancer).then_some(all))
        })
        .await
    }

    async fn create_listener(
        &self,
        balancer: &str,
        port: u16,
        protocol: &str,
        group: &str,
        tags: &Tags,
    ) -> Result<ObservedListener> {
        let action = "CreateListener";
        self.write(action, Kind::Mutation, format!("{balancer} {port}"), |cloud, now| {
            let refuse = |code: &str| Err(CallError::made_up(action, code, format!("port {port}")));
            let Some(found) = cloud.balancers.get(balancer) else { return refuse("LoadBalancerNotFound") };
            let name = found.made.name.clone();
            let count = cloud.listeners.values().filter(|f| f.balancer == balancer).count();
            if cloud.listeners.values().any(|f| f.balancer == balancer && f.port == port) {
                return refuse("DuplicateListener");
            }
            if count >= self.quotas.listeners {
                return refuse("TooManyListeners");
            }
            check_group(cloud, self.quotas.targets, action, (balancer, protocol, group))?;
            let made = Forward {
                balancer: balancer.to_owned(),
                port,
                protocol: protocol.to_owned(),
                group: group.to_owned(),
                tags: tags.clone(),
            };
            let arn = cloud.arn("listener/net", &name);
            let answer = observed(&arn, &made);
            cloud.listeners.insert(arn, made);
            cloud.note_use(now);
            Ok(answer)
        })
        .await
    }

    async fn modify_listener(&self, arn: &str, protocol: Option<&str>, group: &str) -> Result<()> {
        let action = "ModifyListener";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, now| {
            let Some(found) = cloud.listeners.get(arn).cloned() else {
                return Err(CallError::made_up(action, "ListenerNotFound", arn));
            };
            let protocol = protocol.unwrap_or(&found.protocol);
            check_group(cloud, self.quotas.targets, action, (&found.balancer, protocol, group))?;
            let changed = Forward { protocol: protocol.to_owned(), group: group.to_owned(), ..found };
            cloud.listeners.insert(arn.to_owned(), changed);
            cloud.note_use(now);
            Ok(())
        })
        .await
    }

    async fn delete_listener(&self, arn: &str) -> Result<()> {
        self.write("DeleteListener", Kind::Mutation, arn.to_owned(), |cloud, now| {
            cloud.listeners.remove(arn);
            cloud.note_use(now);
            Ok(())
        })
        .await
    }
}
