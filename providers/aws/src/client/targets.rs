// SPDX-License-Identifier: Apache-2.0
//! Calls about the targets of a target group.

use async_trait::async_trait;
use elb::types::{TargetDescription, TargetHealthStateEnum};
use steerage_provider_api::HealthState;

use super::{CallError, Client, Result, TargetCalls, elb};
use crate::target_id::TargetId;

/// A registered target, as described by AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegisteredTarget {
    pub(crate) id: TargetId,
    pub(crate) state: HealthState,
    pub(crate) reason: String,
}

#[async_trait]
impl TargetCalls for Client {
    async fn targets(&self, group: &str) -> Result<Vec<RegisteredTarget>> {
        let answer = self.elb.describe_target_health().target_group_arn(group).send().await;
        let answer = answer.map_err(CallError::of("DescribeTargetHealth"))?;
        let mut targets = Vec::new();
        for described in answer.target_health_descriptions.unwrap_or_default() {
            let (Some(target), Some(health)) = (described.target, described.target_health) else { continue };
            let code = health.reason.as_ref().map_or("", |r| r.as_str());
            let state = match health.state {
                Some(TargetHealthStateEnum::Initial) => HealthState::Initial,
                Some(TargetHealthStateEnum::Healthy) => HealthState::Healthy,
                Some(TargetHealthStateEnum::Draining) => HealthState::Draining,
                Some(TargetHealthStateEnum::Unused) if code == "Target.NotRegistered" => continue,
                Some(TargetHealthStateEnum::Unused) => HealthState::Unused,
                _ => HealthState::Unhealthy,
            };
            let told = [code, health.description.as_deref().unwrap_or_default()];
            let reason = told.into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join(": ");
            let port = target.port.and_then(|port| u16::try_from(port).ok());
            let id = TargetId::of(target.id.as_deref().unwrap_or_default(), port);
            targets.push(RegisteredTarget { id, state, reason });
        }
        Ok(targets)
    }

    async fn register(&self, group: &str, ids: &[TargetId]) -> Result<()> {
        let call = self.elb.register_targets().target_group_arn(group).set_targets(Some(sdk_targets(ids)));
        call.send().await.map(drop).map_err(CallError::of("RegisterTargets"))
    }

    async fn deregister(&self, group: &str, ids: &[TargetId]) -> Result<()> {
        let call = self.elb.deregister_targets().target_group_arn(group).set_targets(Some(sdk_targets(ids)));
        call.send().await.map(drop).map_err(CallError::of("DeregisterTargets"))
    }
}

fn sdk_targets(ids: &[TargetId]) -> Vec<TargetDescription> {
    let described =
        |id: &TargetId| TargetDescription::builder().id(id.id()).set_port(id.port().map(i32::from)).build();
    ids.iter().map(described).collect()
}
