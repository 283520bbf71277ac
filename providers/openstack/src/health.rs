// SPDX-License-Identifier: Apache-2.0
//! What Octavia's status tree has: the health of members, and the parts whose last change failed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use steerage_provider_api::{Error, Health, HealthState, Owner, PartHealth, TargetHealth};

use crate::adoption::is_part;
use crate::client::{Call, object};
use crate::error::CallError;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::types::{Listener, Provisioning, active};

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
    #[serde(default)]
    id: String,
    name: String,
    #[serde(default = "active")]
    provisioning_status: Provisioning,
    #[serde(default)]
    pools: Vec<PoolStatus>,
}

#[derive(Deserialize)]
struct PoolStatus {
    #[serde(default)]
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default = "active")]
    provisioning_status: Provisioning,
    #[serde(default)]
    health_monitor: Option<MonitorStatus>,
    #[serde(default)]
    members: Vec<MemberStatus>,
}

#[derive(Deserialize)]
struct MonitorStatus {
    #[serde(default = "active")]
    provisioning_status: Provisioning,
}

#[derive(Deserialize)]
struct MemberStatus {
    name: String,
    #[serde(default = "active")]
    provisioning_status: Provisioning,
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
        let Some(mut loadbalancer) = self.status(&id).await? else { return Ok(Health::default()) };
        if let Some(own) = own {
            loadbalancer.listeners.retain(|listener| own.contains(&listener.name));
        }
        let members =
            entry.known(owner).into_iter().flat_map(|tree| &tree.pools).flat_map(|pool| &pool.members);
        let disabled = members.filter(|member| !member.admin_state_up).map(|member| member.name.clone());
        Ok(health(loadbalancer, &disabled.collect()))
    }
}

impl OpenStack {
    /// The status tree of a load balancer; `None` if it is gone.
    async fn status(&self, id: &str) -> Result<Option<StatusTree>, CallError> {
        let call = Call::octavia(Method::GET, "GET status", &format!("loadbalancers/{id}/status"), None);
        let name = call.name();
        match self.calls.send(call).await {
            Ok(answer) => object::<Statuses>(&name, answer, "statuses").map(|all| Some(all.loadbalancer)),
            Err(failure) if failure.is_not_found() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Whether all changes since the last look were carried out. If not, all is read again.
    pub(crate) async fn is_carried_out(
        &self,
        owner: &Owner,
        id: &str,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        if entry.unchecked_since.is_none() {
            return Ok(true);
        }
        self.check_change(owner, id, entry).await?;
        Ok(entry.is_verified)
    }

    /// Looks whether Octavia carried changes out. If its worker fails a change of a part, the load balancer is `ACTIVE` again, and
    /// only the part is in `ERROR`.
    pub(crate) async fn check_change(
        &self,
        owner: &Owner,
        id: &str,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some(status) = self.status(id).await? else {
            return Err(Error::Conflict(format!("the load balancer {id} is gone")));
        };
        let failed = failed(&status, &entry.known(owner).map(|tree| tree.others(owner)).unwrap_or_default());
        if !failed.is_empty() {
            tracing::warn!(service = %owner.service, id, parts = ?failed, "Octavia failed a change; repeating it");
        }
        entry.note_failed_parts(id, &failed)
    }
}

/// The parts in `ERROR`, without those of others.
fn failed(tree: &StatusTree, others: &BTreeSet<&str>) -> BTreeSet<String> {
    let mut failed = BTreeSet::new();
    let mut note = |status: Provisioning, what: String| {
        if status == Provisioning::Error {
            failed.insert(what);
        }
    };
    for listener in tree.listeners.iter().filter(|part| !others.contains(part.id.as_str())) {
        note(listener.provisioning_status, format!("listener {}", listener.name));
        for pool in listener.pools.iter().filter(|part| !others.contains(part.id.as_str())) {
            note(pool.provisioning_status, format!("pool {}", pool.name));
            if let Some(monitor) = &pool.health_monitor {
                note(monitor.provisioning_status, format!("health monitor of pool {}", pool.name));
            }
            for member in &pool.members {
                note(member.provisioning_status, format!("members of pool {}", pool.name));
            }
        }
    }
    failed
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
    Health { targets, omitted: BTreeMap::new(), parts, due: Some(due) }
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

    /// As after its deletion by others, before it is replaced.
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

    /// As Octavia's API shows it.
    #[test]
    fn parts_in_error_are_named_without_those_of_others() {
        let listener = |id: &str, status: &str, monitor: &str, member: &str| {
            json!({ "id": id, "name": id, "provisioning_status": status, "operating_status": "ONLINE", "pools": [{
                "id": format!("pool-{id}"), "name": format!("p-{id}"), "provisioning_status": "ACTIVE",
                "health_monitor": { "id": "m", "type": "HTTP", "provisioning_status": monitor },
                "members": [{ "name": "n1", "operating_status": "ONLINE", "provisioning_status": member }],
            }] })
        };
        let tree = json!({ "listeners": [
            listener("a", "ERROR", "ACTIVE", "ACTIVE"), listener("b", "ACTIVE", "ERROR", "ERROR"), listener("c", "ERROR", "ERROR", "ERROR"),
        ]});
        let tree: StatusTree = serde_json::from_value(tree).unwrap();
        let found = failed(&tree, &BTreeSet::from(["c", "pool-c"]));
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            ["health monitor of pool p-b", "listener a", "members of pool p-b"]
        );
    }
}
