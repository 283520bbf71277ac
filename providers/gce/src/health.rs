// SPDX-License-Identifier: Apache-2.0
//! The health of endpoints, as GCE's probes see it.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::try_join_all;
use http::Method;
use serde_json::{Value, json};
use steerage_provider_api::{Error, Health, HealthState, Owner, TargetHealth};

use crate::client::Call;
use crate::error::CallError;
use crate::object::{Id, Kind, last};
use crate::provider::Gce;
use crate::state::ServiceState;

/// Read health again after this time, because GCE does not notify.
const HEALTH_POLL: Duration = Duration::from_mins(1);
/// The same while no endpoint is healthy.
const HEALTH_POLL_UNDECIDED: Duration = Duration::from_secs(15);

impl Gce {
    /// Reads the health of all groups with endpoints.
    pub(crate) async fn read_health(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Health, Error> {
        if !entry.pending.is_empty() {
            // What is remembered is not what is in place.
            return Ok(Health { due: Some(HEALTH_POLL_UNDECIDED), ..Health::default() });
        }
        if !self.settle_unknown().await? {
            return Ok(Health { due: Some(HEALTH_POLL_UNDECIDED), ..Health::default() });
        }
        self.read_all(owner, entry).await?;
        let Some(tree) = entry.known(owner) else { return Ok(Health::default()) };
        let Some((service, _)) = tree.of_kind(Kind::BackendService).next() else {
            return Ok(Health::default());
        };
        let groups: Vec<&Id> =
            tree.members.iter().filter(|(_, members)| !members.is_empty()).map(|(id, _)| id).collect();
        let answers = groups.iter().map(|group| async move {
            let path = format!("{}/getHealth", service.path(&self.config));
            let call = Call::new(Method::POST, "regionBackendServices.getHealth", path);
            let call = call.with_body(json!({ "group": group.url(&self.config) }));
            match self.calls.send(call).await {
                Err(failure) if failure.is_not_found() => Ok(Value::Null),
                other => other,
            }
        });
        let answers = try_join_all(answers).await.map_err(|failure: CallError| Error::from(failure))?;
        // A VM whose health GCE does not tell yet is in no answer.
        let mut states: BTreeMap<String, (HealthState, &str)> = BTreeMap::new();
        for endpoint in tree.members.values().flatten() {
            let initial = (HealthState::Initial, "GCE has not checked it yet");
            states.insert(endpoint.instance.clone(), initial);
        }
        for (name, state) in answers.iter().flat_map(read) {
            states.insert(name, state);
        }
        Ok(health(states, &entry.nodes))
    }
}

/// The states of VMs in an answer.
fn read(answer: &Value) -> Vec<(String, (HealthState, &'static str))> {
    let all = answer.get("healthStatus").and_then(Value::as_array).into_iter().flatten();
    all.filter_map(|status| {
        let name = last(status.get("instance")?.as_str()?).to_owned();
        let state = match status.get("healthState").and_then(Value::as_str).unwrap_or_default() {
            "HEALTHY" => (HealthState::Healthy, ""),
            "UNHEALTHY" => (HealthState::Unhealthy, "GCE's health check fails"),
            "DRAINING" => (HealthState::Draining, ""),
            _ => (HealthState::Initial, "GCE does not know yet"),
        };
        Some((name, state))
    })
    .collect()
}

fn health(states: BTreeMap<String, (HealthState, &str)>, nodes: &BTreeMap<String, String>) -> Health {
    let target = |(name, (state, reason)): (String, (HealthState, &str))| TargetHealth {
        target: nodes.get(&name).cloned().unwrap_or(name),
        family: None,
        state,
        reason: reason.to_owned(),
    };
    let targets: Vec<TargetHealth> = states.into_iter().map(target).collect();
    let is_steady = targets.iter().any(|target| target.state == HealthState::Healthy);
    let due = if is_steady { HEALTH_POLL } else { HEALTH_POLL_UNDECIDED };
    Health { targets, omitted: BTreeMap::new(), parts: Vec::new(), due: Some(due) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_those_of_nodes() {
        let status = |name: &str, state: &str| json!({ "instance": format!("https://x/projects/p/zones/r-a/instances/{name}"), "healthState": state });
        let answer = json!({ "healthStatus": [status("a", "HEALTHY"), status("b", "UNHEALTHY"), status("c", "UNKNOWN")] });
        let nodes = BTreeMap::from([("a".to_owned(), "node-a".to_owned())]);
        let found = health(read(&answer).into_iter().collect(), &nodes);
        let states: Vec<_> = found.targets.iter().map(|t| (t.target.as_str(), t.state)).collect();
        let expected =
            [("b", HealthState::Unhealthy), ("c", HealthState::Initial), ("node-a", HealthState::Healthy)];
        assert_eq!(states.len(), 3);
        assert!(expected.iter().all(|state| states.contains(state)), "{states:?}");
        assert_eq!(found.due, Some(HEALTH_POLL));
        assert!(read(&Value::Null).is_empty());
    }
}
