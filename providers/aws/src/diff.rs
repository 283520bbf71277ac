// SPDX-License-Identifier: Apache-2.0
//! What to do to get from what is there to what is asked for: pure. Applied in its order, every prefix of it leaves clients served.

use std::collections::BTreeMap;

use crate::desired::{Desired, Group, Health};

/// A target group of ours as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenGroup {
    pub(crate) arn: String,
    pub(crate) health: Health,
    /// Whether an HTTP check takes nothing but 200 for healthy; true for a TCP check.
    pub(crate) strict: bool,
    pub(crate) attributes: BTreeMap<String, String>,
}

/// A listener of ours as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenFront {
    pub(crate) arn: String,
    pub(crate) port: u16,
    pub(crate) protocol: String,
    /// The target group that it forwards to, if it forwards to exactly one.
    pub(crate) group_arn: Option<String>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Make the group.
    CreateGroup(Group),
    /// Set its health check.
    ModifyHealth { arn: String, health: Health },
    /// Set these of its attributes. By name: the group may only just have been made.
    SetAttributes { group: String, attributes: BTreeMap<&'static str, String> },
    /// Make the listener.
    CreateFront { port: u16, protocol: &'static str, group: String },
    /// Point the listener elsewhere, after the targets of its present group are registered there too.
    SwitchFront { arn: String, protocol: Option<&'static str>, group: String, from_arn: Option<String> },
    /// Delete the listener.
    DeleteFront { arn: String },
    /// Delete a group that nothing forwards to any more.
    DeleteGroup { name: String, arn: String },
}

/// The steps from `groups` (by name) and `fronts` to `desired`.
pub(crate) fn steps(
    desired: &Desired,
    groups: &BTreeMap<String, SeenGroup>,
    fronts: &[SeenFront],
) -> Vec<Step> {
    let mut steps = Vec::new();
    for group in &desired.groups {
        let seen = groups.get(&group.name);
        match seen {
            None => steps.push(Step::CreateGroup(group.clone())),
            Some(seen) if seen.health != group.health || !seen.strict => {
                steps.push(Step::ModifyHealth { arn: seen.arn.clone(), health: group.health.clone() });
            }
            Some(_) => {}
        }
        let mut attributes = group.attributes.clone();
        attributes.retain(|key, value| seen.and_then(|s| s.attributes.get(*key)) != Some(value));
        if !attributes.is_empty() {
            steps.push(Step::SetAttributes { group: group.name.clone(), attributes });
        }
    }
    for front in &desired.fronts {
        let Some(seen) = fronts.iter().find(|f| f.port == front.port) else {
            steps.push(Step::CreateFront {
                port: front.port,
                protocol: front.protocol,
                group: front.group.clone(),
            });
            continue;
        };
        let there = groups.get(&front.group).is_some_and(|g| seen.group_arn.as_ref() == Some(&g.arn));
        if !there || seen.protocol != front.protocol {
            steps.push(Step::SwitchFront {
                arn: seen.arn.clone(),
                protocol: (seen.protocol != front.protocol).then_some(front.protocol),
                group: front.group.clone(),
                from_arn: seen.group_arn.clone(),
            });
        }
    }
    for seen in fronts.iter().filter(|s| desired.fronts.iter().all(|f| f.port != s.port)) {
        steps.push(Step::DeleteFront { arn: seen.arn.clone() });
    }
    for (name, seen) in groups.iter().filter(|(name, _)| desired.groups.iter().all(|g| g.name != **name)) {
        steps.push(Step::DeleteGroup { name: name.clone(), arn: seen.arn.clone() });
    }
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::{config, planned};

    /// What applying the steps makes, were every call to succeed.
    fn apply(steps: &[Step], groups: &mut BTreeMap<String, SeenGroup>, fronts: &mut Vec<SeenFront>) {
        for step in steps {
            match step.clone() {
                Step::CreateGroup(group) => {
                    let arn = format!("arn:{}", group.name);
                    let seen =
                        SeenGroup { arn, health: group.health, strict: true, attributes: BTreeMap::new() };
                    assert!(groups.insert(group.name, seen).is_none());
                }
                Step::ModifyHealth { arn, health } => {
                    let seen = groups.values_mut().find(|g| g.arn == arn).unwrap();
                    (seen.health, seen.strict) = (health, true);
                }
                Step::SetAttributes { group, attributes } => {
                    let new = attributes.into_iter().map(|(k, v)| (k.to_owned(), v));
                    groups.get_mut(&group).unwrap().attributes.extend(new);
                }
                Step::CreateFront { port, protocol, group } => {
                    assert!(fronts.iter().all(|f| f.port != port));
                    let group_arn = Some(groups[&group].arn.clone());
                    fronts.push(SeenFront {
                        arn: format!("front:{port}"),
                        port,
                        protocol: protocol.to_owned(),
                        group_arn,
                    });
                }
                Step::SwitchFront { arn, protocol, group, .. } => {
                    let front = fronts.iter_mut().find(|f| f.arn == arn).unwrap();
                    front.protocol = protocol.map_or_else(|| front.protocol.clone(), str::to_owned);
                    front.group_arn = Some(groups[&group].arn.clone());
                }
                Step::DeleteFront { arn } => fronts.retain(|f| f.arn != arn),
                Step::DeleteGroup { name, arn } => {
                    assert!(
                        fronts.iter().all(|f| f.group_arn.as_ref() != Some(&arn)),
                        "deleted while in use"
                    );
                    groups.remove(&name).unwrap();
                }
            }
        }
    }

    fn ports() -> impl Strategy<Value = Vec<(Protocol, u16, u16)>> {
        let port = (prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)], 1..6u16, 30000..30004u16);
        proptest::collection::vec(port, 0..5).prop_map(|mut ports| {
            // A port has one node port, whatever its protocols.
            ports.sort_by_key(|p| (p.1, p.0));
            ports.dedup_by_key(|p| p.1);
            ports
        })
    }

    proptest! {
        #[test]
        fn any_prefix_and_then_the_rest_ends_where_asked(from in ports(), to in ports(), cut in 0..20usize) {
            let (mut groups, mut fronts) = (BTreeMap::new(), Vec::new());
            let from = desired(&config(), &planned(&from)).unwrap();
            let to = desired(&config(), &planned(&to)).unwrap();
            let first = steps(&from, &groups, &fronts);
            apply(&first, &mut groups, &mut fronts);
            prop_assert!(steps(&from, &groups, &fronts).is_empty());
            let change = steps(&to, &groups, &fronts);
            apply(&change[..cut.min(change.len())], &mut groups, &mut fronts);
            let rest = steps(&to, &groups, &fronts);
            apply(&rest, &mut groups, &mut fronts);
            prop_assert_eq!(steps(&to, &groups, &fronts), vec![]);
            prop_assert_eq!(groups.len(), to.groups.len());
            prop_assert_eq!(fronts.len(), to.fronts.len());
        }
    }

    #[test]
    fn a_new_node_port_gets_a_group_of_its_own_before_the_old_one_goes() {
        let (mut groups, mut fronts) = (BTreeMap::new(), Vec::new());
        let of = |node_port| desired(&config(), &planned(&[(Protocol::Tcp, 80, node_port)])).unwrap();
        apply(&steps(&of(30080), &groups, &fronts), &mut groups, &mut fronts);
        let kinds: Vec<_> = steps(&of(30081), &groups, &fronts)
            .iter()
            .map(|s| match s {
                Step::CreateGroup(_) => "create",
                Step::SetAttributes { .. } => "attributes",
                Step::SwitchFront { protocol: None, from_arn: Some(_), .. } => "switch",
                Step::DeleteGroup { .. } => "delete",
                _ => "other",
            })
            .collect();
        assert_eq!(kinds, ["create", "attributes", "switch", "delete"]);
    }

    #[test]
    fn a_health_check_is_changed_in_place() {
        let (mut groups, mut fronts) = (BTreeMap::new(), Vec::new());
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        apply(&steps(&desired(&config(), &lb).unwrap(), &groups, &fronts), &mut groups, &mut fronts);
        lb.health_check.port = 32001;
        let steps = steps(&desired(&config(), &lb).unwrap(), &groups, &fronts);
        assert!(matches!(steps.as_slice(), [Step::ModifyHealth { health, .. }] if health.port == 32001));
    }
}
