// SPDX-License-Identifier: Apache-2.0
//! Target health from the reports of the edge hosts. Pure.

use std::collections::BTreeSet;

use steerage_edge_api::{EdgeTargetHealthSpec, TargetState, TargetStatus, TargetUse};
use steerage_model::Family;
use steerage_provider_api::{HealthState, PartHealth, TargetHealth};

/// The health of a load balancer's targets, from the reports of all hosts: only that of the active host counts. Without an
/// active host no host serves the address, and the health is unknown.
pub(crate) fn targets<'a>(reports: impl Iterator<Item = &'a EdgeTargetHealthSpec>) -> Vec<TargetHealth> {
    let mut found = Vec::new();
    for report in reports.filter(|report| report.active) {
        found.extend(report.targets.iter().map(target));
        if !report.problem.is_empty() {
            found.push(TargetHealth {
                target: report.host.clone(),
                family: None,
                state: HealthState::Unused,
                reason: report.problem.clone(),
            });
        }
    }
    found
}

/// The same for each IP family.
pub(crate) fn parts(targets: &[TargetHealth]) -> Vec<PartHealth> {
    let families: BTreeSet<Family> = targets.iter().filter_map(|target| target.family).collect();
    let states = |family| {
        targets.iter().filter(move |target| target.family == Some(family)).map(|target| target.state)
    };
    families.into_iter().map(|family| PartHealth::of(family.to_string(), states(family))).collect()
}

fn target(status: &TargetStatus) -> TargetHealth {
    TargetHealth {
        target: status.node.clone(),
        family: Some(Family::of(status.address)),
        state: match (status.usage, status.state) {
            (Some(TargetUse::Draining), _) => HealthState::Draining,
            (_, TargetState::Initial) => HealthState::Initial,
            (_, TargetState::Healthy) => HealthState::Healthy,
            (_, TargetState::Unhealthy) => HealthState::Unhealthy,
            (_, TargetState::Refused) => HealthState::Unused,
        },
        reason: if status.reason.is_empty() { &status.use_reason } else { &status.reason }.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(host: &str, active: bool, problem: &str) -> EdgeTargetHealthSpec {
        EdgeTargetHealthSpec {
            load_balancer: "lb".to_owned(),
            host: host.to_owned(),
            active,
            observed_generation: 1,
            problem: problem.to_owned(),
            targets: vec![TargetStatus {
                node: format!("seen-by-{host}"),
                address: "10.0.0.1".parse().expect("ip"),
                state: TargetState::Healthy,
                reason: String::new(),
                weight: 1,
                usage: None,
                use_reason: String::new(),
            }],
        }
    }

    #[test]
    fn each_family_has_a_health_of_its_own() {
        let mut active = report("active", true, "");
        active.targets.push(TargetStatus {
            address: "2001:db8::1".parse().expect("ip"),
            state: TargetState::Unhealthy,
            ..active.targets[0].clone()
        });
        let health = parts(&targets([active].iter()));
        let shown: Vec<_> = health.iter().map(|part| (part.name.as_str(), part.is_served)).collect();
        assert_eq!(shown, [("IPv4", Some(true)), ("IPv6", Some(false))]);
    }

    #[test]
    fn target_that_drains_serves_no_new_connection() {
        let mut active = report("active", true, "");
        (active.targets[0].usage, active.targets[0].use_reason) =
            (Some(TargetUse::Draining), "the node is cordoned".to_owned());
        let health = targets([active].iter());
        assert_eq!(
            (health[0].state, health[0].reason.as_str()),
            (HealthState::Draining, "the node is cordoned")
        );
        assert_eq!(parts(&health)[0].is_served, Some(false));
    }

    #[test]
    fn only_the_active_host_counts_and_its_problem_is_reported() {
        let reports = [report("standby", false, "idle"), report("active", true, "the address is in use")];
        let found = targets(reports.iter());
        let seen: Vec<_> = found.iter().map(|t| (t.target.as_str(), t.state)).collect();
        assert_eq!(seen, [("seen-by-active", HealthState::Healthy), ("active", HealthState::Unused)]);
    }
}
