// SPDX-License-Identifier: Apache-2.0
//! The command by which somebody else makes a change of a firewall rule that the credentials may not make, as in a Shared VPC. Pure.

use std::fmt::Write as _;

use serde_json::Value;

use crate::config::Config;
use crate::step::Step;
use crate::unset_fields::unset_by;

/// What to do about a change that the credentials may not make. The commands follow, and end the message: so they can be copied.
pub(crate) const GRANT: &str = "Grant compute.firewalls.*, compute.networks.updatePolicy and compute.globalOperations.* in the network's \
                                project, or let an administrator of the network run";

/// The `gcloud` command for a change of a firewall rule.
pub(crate) fn command(step: &Step, config: &Config) -> String {
    let (id, project) = (step.id(), config.network_project());
    let rules = "gcloud compute firewall-rules";
    match step {
        Step::Delete { .. } => format!("{rules} delete {} --project={project} --quiet", id.name),
        Step::Patch { changes, .. } => {
            let set = options(changes, "--rules");
            let unset: String = unset_by(changes).flat_map(|field| [" ", field.option]).collect();
            format!("{rules} update {} --project={project}{set}{unset}", id.name)
        }
        Step::Insert { body, .. } => {
            let network = config.network.rsplit('/').next().unwrap_or_default();
            // Without the marks, Steerage would not know the rule as its own.
            let description = body.get("description").and_then(Value::as_str).unwrap_or_default();
            format!(
                "{rules} create {} --project={project} --network={network} --direction=INGRESS --priority=1000 \
                 --description='{description}'{}",
                id.name,
                options(body, "--allow")
            )
        }
        Step::Attach { .. } | Step::Detach { .. } => String::new(),
    }
}

fn options(body: &Value, allow: &str) -> String {
    let mut text = String::new();
    let list = |field: &str| {
        let all = body.get(field)?.as_array()?.iter().filter_map(Value::as_str);
        Some(all.collect::<Vec<_>>().join(","))
    };
    if let Some(allowed) = body.get("allowed").and_then(Value::as_array) {
        let mut all = Vec::new();
        for entry in allowed {
            let protocol = entry.get("IPProtocol").and_then(Value::as_str).unwrap_or_default();
            let ports = entry.get("ports").and_then(Value::as_array).into_iter().flatten();
            all.extend(ports.filter_map(Value::as_str).map(|port| format!("{protocol}:{port}")));
        }
        let _ = write!(text, " {allow}={}", all.join(","));
    }
    for (field, option) in [
        ("sourceRanges", "--source-ranges"),
        ("destinationRanges", "--destination-ranges"),
        ("targetTags", "--target-tags"),
    ] {
        if let Some(all) = list(field) {
            let _ = write!(text, " {option}={all}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::config;
    use crate::object::{Id, Kind};

    #[test]
    fn command_does_what_the_request_would() {
        let config = Config { network: "projects/host/global/networks/n".to_owned(), ..config() };
        let id = Id::new(Kind::Firewall, "st-x");
        let body = json!({
            "name": "st-x", "description": "{\"a\":\"b\"}", "sourceRanges": ["0.0.0.0/0"], "destinationRanges": ["203.0.113.1"],
            "targetTags": ["a", "b"], "allowed": [{ "IPProtocol": "tcp", "ports": ["80", "443"] }, { "IPProtocol": "udp", "ports": ["53"] }],
        });
        assert_eq!(
            command(&Step::Insert { id: id.clone(), body }, &config),
            "gcloud compute firewall-rules create st-x --project=host --network=n --direction=INGRESS --priority=1000 \
             --description='{\"a\":\"b\"}' --allow=tcp:80,tcp:443,udp:53 --source-ranges=0.0.0.0/0 --destination-ranges=203.0.113.1 \
             --target-tags=a,b"
        );
        let changes = json!({ "sourceRanges": ["10.0.0.0/8"] });
        assert_eq!(
            command(&Step::Patch { id: id.clone(), changes }, &config),
            "gcloud compute firewall-rules update st-x --project=host --source-ranges=10.0.0.0/8"
        );
        let changes = json!({ "disabled": false, "sourceTags": null });
        assert_eq!(
            command(&Step::Patch { id: id.clone(), changes }, &config),
            "gcloud compute firewall-rules update st-x --project=host --no-disabled --source-tags="
        );
        assert_eq!(
            command(&Step::Delete { id }, &config),
            "gcloud compute firewall-rules delete st-x --project=host --quiet"
        );
    }
}
