// SPDX-License-Identifier: Apache-2.0
//! Which ports of a load balancer have a healthy target. No I/O.

use steerage_provider_api::{HealthState, Owner, PartHealth};

use crate::client::RegisteredTarget;
use crate::observe::Resources;
use crate::state::ServiceState;

/// The health of the ports that lead to a target group; `None` if none does, or if its targets were changed a moment ago.
pub(crate) fn part(
    owner: &Owner,
    arn: &str,
    targets: &[RegisteredTarget],
    entry: &ServiceState,
    is_settled: bool,
) -> Option<PartHealth> {
    let states = targets.iter().map(|target| target.state).filter(|state| *state != HealthState::Draining);
    let states: Vec<HealthState> = states.collect();
    // Nodes have no such port of their own.
    let has_pods = |(_, resources): &(Owner, Resources)| {
        resources.groups.values().any(|group| group.arn == arn && group.has_pods)
    };
    let lacks_pods = states.is_empty() && entry.resources.as_ref().is_some_and(has_pods);
    let why = if lacks_pods { ", whose targetPort no ready endpoint has" } else { "" };
    let part = PartHealth::of(format!("{}{why}", ports(owner, arn, entry)?), states.into_iter());
    Some(part).filter(|_| is_settled || !targets.is_empty())
}

/// The ports that lead to a target group, for users: of its listeners, or of those that are wanted if a list is all that is known.
fn ports(owner: &Owner, arn: &str, entry: &ServiceState) -> Option<String> {
    let (_, resources) = entry.resources.as_ref().filter(|(known, _)| known == owner)?;
    let leads_there = resources.listeners.iter().filter(|found| found.group_arn.as_deref() == Some(arn));
    let mut ports: Vec<_> = leads_there.map(|found| (found.port, found.protocol.as_str())).collect();
    if resources.listeners.is_empty() {
        let (name, _) = resources.groups.iter().find(|(_, group)| group.arn == arn)?;
        let (_, wanted) = entry.wanted.as_ref().filter(|(of, _)| of == owner)?;
        let leads_there = wanted.listeners.iter().filter(|wanted| wanted.group == *name);
        ports.extend(leads_there.map(|wanted| (wanted.port, wanted.protocol)));
    }
    ports.sort_unstable();
    let shown: Vec<String> =
        ports.iter().map(|(port, protocol)| format!("port {port} ({protocol})")).collect();
    (!shown.is_empty()).then(|| shown.join(", "))
}
