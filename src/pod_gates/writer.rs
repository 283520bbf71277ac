// SPDX-License-Identifier: Apache-2.0
//! Writes the condition of a pod's readiness gate, and nothing else of the pod.
//!
//! Every write names the UID, so that it cannot change a pod created again under the same name. It begins only while this process
//! leads.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod as KubePod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use steerage_model::{Pod, names};

use super::decide::GateCondition;
use crate::lease::Leadership;
use crate::service_writer::{WriteError, write};

#[derive(Clone)]
pub(crate) struct PodWriter {
    client: Client,
    leadership: Leadership,
}

impl PodWriter {
    pub(crate) fn new(client: Client, leadership: Leadership) -> Self {
        Self { client, leadership }
    }

    pub(super) async fn set(&self, pod: &Pod, condition: &GateCondition) -> Result<(), WriteError> {
        let api: Api<KubePod> = Api::namespaced(self.client.clone(), pod.key.namespace());
        let patch = Patch::Strategic(patch(pod, condition, Timestamp::now()));
        let params = PatchParams::default();
        write(&self.leadership, api.patch_status(pod.key.name(), &params, &patch)).await
    }
}

fn patch(pod: &Pod, condition: &GateCondition, now: Timestamp) -> Value {
    let GateCondition { is_met, reason, message } = condition;
    let status = if *is_met { "True" } else { "False" };
    let mut entry = json!({"type": names::POD_GATE, "status": status, "reason": reason, "message": message});
    // Omitted while the status stays the same, so that the merge keeps the time of the last transition.
    if pod.gate.as_ref().is_none_or(|before| before.is_met != *is_met) {
        entry["lastTransitionTime"] = json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [entry]}})
}

#[cfg(test)]
mod tests {
    use steerage_model::{Key, PodGate};

    use super::*;

    #[test]
    fn patch_names_the_uid_and_keeps_the_time_of_an_equal_status() {
        let pod = |gate: Option<bool>| Pod {
            key: Key::new("shop", "web-1"),
            uid: "u".to_owned(),
            addresses: Vec::new(),
            can_serve: true,
            gate: gate.map(|is_met| PodGate { is_met, reason: String::new() }),
        };
        let condition = |is_met| GateCondition { is_met, reason: "Reason", message: "Text.".to_owned() };
        for (before, is_met, is_transition) in
            [(None, false, true), (Some(false), false, false), (Some(false), true, true)]
        {
            let patch = patch(&pod(before), &condition(is_met), Timestamp::UNIX_EPOCH);
            let mut entry = json!({
                "type": "steerage.dev/load-balancer-ready", "status": if is_met { "True" } else { "False" },
                "reason": "Reason", "message": "Text.",
            });
            if is_transition {
                entry["lastTransitionTime"] = json!("1970-01-01T00:00:00Z");
            }
            assert_eq!(patch, json!({"metadata": {"uid": "u"}, "status": {"conditions": [entry]}}));
        }
    }
}
