// SPDX-License-Identifier: Apache-2.0
//! The health of members, as Octavia's status tree has it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use steerage_provider_api::{Error, Health, HealthState, Owner, PartHealth, TargetHealth};

use crate::adoption::is_part;
use crate::client::{Call, object};
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::types::Listener;

/// Read health again after this time, because Octavia does not notify.
const HEALTH_POLL: Duration = Duration::from_mins(1);
/// The same while no member is healthy.
pub(crate) const HEALTH_POLL_UNDECIDED: Duration = Duration::from_secs(15);

#[derive(Deserialize)]
struct Statuses {
    loadbalancer: StatusTree,
}

#[derive(Deserialize)]
struct StatusTree {
    #[serde(default)]
    listeners: Vec<ListenerStatus>,
}

#[derive(Deserialize)]
struct ListenerStatus {
    name: String,
    #[serde(default)]
    pools: Vec<PoolStatus>,
}

#[derive(Deserialize)]
struct PoolStatus {
    #[serde(default)]
    members: Vec<MemberStatus>,
}

#[derive(Deserialize)]
struct MemberStatus {
    name: String,
    operating_status: String,
}

impl OpenStack {
    pub(crate) async fn read_health(&self, owner: &Owner, entry: &ServiceState) -> Result<Health, Error> {
        // In a shared load balancer, the others' listeners say nothing of this Service.
        let mut own: Option<BTreeSet<String>> = None;
        let id = if let Some(tree) = entry.known(owner) {
            if entry.shared().is_some() {
                let mine =
                    |listener: &&Listener| is_part(owner, &tree.balancer, &listener.name, &listener.tags);
                own =
                    Some(tree.listeners.iter().filter(mine).map(|listener| listener.name.clone()).collect());
            }
            tree.balancer.id.clone()
        } else {
            let all = self.balancers_of(&owner.service);
            let mine = all.await?.into_iter().find(|(of, _)| of == owner);
            if let Some((_, balancer)) = mine {
                balancer.id
            } else {
                let Some((_, balancer)) = self.shared_balancer_of(owner).await? else {
                    return Ok(Health::default());
                };
                own = Some(self.shared_listeners(owner).await?);
                balancer.id
            }
        };
        let call = Call::octavia(Method::GET, "GET status", &format!("loadbalancers/{id}/status"), None);
        let name = call.name();
        let answer = match self.calls.send(call).await {
            Ok(answer) => answer,
            Err(failure) if failure.is_not_found() => return Ok(Health::default()),
            Err(failure) => return Err(failure.into()),
        };
        let Statuses { mut loadbalancer } = object(&name, answer, "statuses")?;
        if let Some(own) = own {
            loadbalancer.listeners.retain(|listener| own.contains(&listener.name));
        }
        let members =
            entry.known(owner).into_iter().flat_map(|tree| &tree.pools).flat_map(|pool| &pool.members);
        let disabled = members.filter(|member| !member.admin_state_up).map(|member| member.name.clone());
        Ok(health(loadbalancer, &disabled.collect()))
    }
}

/// The status does not say which members are disabled.
fn health(tree: StatusTree, disabled: &BTreeSet<String>) -> Health {
    let mut worst: BTreeMap<String, TargetHealth> = BTreeMap::new();
    let mut parts = Vec::new();
    let has_parts = tree.listeners.len() > 1;
    for listener in tree.listeners {
        let members = listener.pools.into_iter().flat_map(|pool| pool.members);
        let members: Vec<(MemberStatus, (HealthState, &str))> = members
            .map(|member| (state(&member.operating_status, disabled.contains(&member.name)), member))
            .map(|(s, m)| (m, s))
            .collect();
        if has_parts {
            let states = members.iter().map(|(_, (state, _))| *state);
            parts.push(PartHealth::of(format!("listener {}", listener.name), states));
        }
        for (member, (state, reason)) in members {
            let found =
                TargetHealth { target: member.name.clone(), family: None, state, reason: reason.to_owned() };
            match worst.get(&member.name) {
                Some(known) if !found.state.is_worse_than(known.state) => {}
                _ => drop(worst.insert(member.name, found)),
            }
        }
    }
    let targets: Vec<TargetHealth> = worst.into_values().collect();
    let is_steady = targets.iter().any(|target| target.state == HealthState::Healthy);
    let due = if is_steady { HEALTH_POLL } else { HEALTH_POLL_UNDECIDED };
    Health { targets, parts, due: Some(due) }
}

/// A member's state, and why.
fn state(operating: &str, is_disabled: bool) -> (HealthState, &'static str) {
    match operating {
        "ONLINE" => (HealthState::Healthy, ""),
        "NO_MONITOR" => {
            (HealthState::Initial, "Octavia has not checked it yet, or has no health monitor for it")
        }
        "DRAINING" => (HealthState::Draining, ""),
        "OFFLINE" if is_disabled => (HealthState::Unused, "it is disabled in Octavia"),
        // Octavia's state of a new member.
        "OFFLINE" => (HealthState::Initial, "Octavia has not checked it yet"),
        "ERROR" => (HealthState::Unhealthy, "Octavia's health monitor fails"),
        _ => (HealthState::Initial, "Octavia does not know yet"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use steerage_model::Protocol;
    use steerage_provider_api::Provider as _;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, ids, settle};

    #[test]
    fn node_has_the_worst_state_of_its_ports() {
        let member = |name: &str, state: &str| json!({ "name": name, "operating_status": state, "address": "10.0.0.1" });
        let tree = json!({ "listeners": [
            { "name": "a", "pools": [{ "members": [member("n1", "ONLINE"), member("n2", "ERROR")] }] },
            { "name": "b", "pools": [{ "members": [member("n1", "NO_MONITOR"), member("n2", "ONLINE")] }] },
            { "name": "c" },
        ]});
        let health = health(serde_json::from_value(tree).unwrap(), &BTreeSet::new());
        let states: Vec<_> = health.targets.iter().map(|t| (t.target.as_str(), t.state)).collect();
        assert_eq!(states, [("n1", HealthState::Initial), ("n2", HealthState::Unhealthy)]);
        let served: Vec<_> = health.parts.iter().map(|part| part.is_served).collect();
        assert_eq!(served, [Some(true), Some(true), Some(false)]);
        assert_eq!(health.due, Some(HEALTH_POLL_UNDECIDED));
    }

    /// As after its deletion by others, before it is made anew.
    #[tokio::test(start_paused = true)]
    async fn health_of_a_load_balancer_that_is_not_there_is_read_again() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        assert_eq!(provider.target_health(&lb.owner).await.unwrap().due, Some(HEALTH_POLL_UNDECIDED));
        settle(&provider, &lb).await.unwrap();
        cloud.remove("loadbalancers", &ids(&cloud)[0]);
        assert_eq!(provider.target_health(&lb.owner).await.unwrap().due, Some(HEALTH_POLL_UNDECIDED));
    }

    #[test]
    fn new_member_is_not_disabled() {
        assert_eq!(state("OFFLINE", false).0, HealthState::Initial);
        assert_eq!(state("OFFLINE", true).0, HealthState::Unused);
    }
}
