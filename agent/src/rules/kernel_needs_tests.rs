// SPDX-License-Identifier: Apache-2.0
//! Every expression of the rules, each attribute of it, and each value that needs a newer kernel than the attribute: with the first
//! Linux that has it. A rule that uses something else fails here, and belongs into this table and, if Linux 5.15 lacks it, among the
//! features that are tried at start. docs/kernels.md has the same table.

use std::collections::BTreeSet;

use steerage_nft::{Family, KernelExpression};

use super::features::{Feature, Features};
use super::{BaseRuleset, RulesetConfig, UsedSets};
use crate::local_node::LocalPods;

/// The oldest kernel that the rules are written for.
const OLDEST: (u32, u32) = (5, 15);

/// An expression, with its attributes.
#[derive(Clone, Copy)]
struct Known {
    name: &'static str,
    attributes: &'static [u16],
    /// An attribute whose values are numbers with versions of their own.
    values: Option<(u16, &'static [u32])>,
    since: (u32, u32),
}

const fn known(name: &'static str, attributes: &'static [u16], since: (u32, u32)) -> Known {
    Known { name, attributes, values: None, since }
}

const fn with_values(known: Known, attribute: u16, values: &'static [u32]) -> Known {
    Known { values: Some((attribute, values)), ..known }
}

/// Registers of four bytes, which all expressions use, came with Linux 4.1.
const KNOWN: [Known; 25] = [
    known("payload", &[1, 2, 3, 4], (3, 13)),
    known("cmp", &[1, 2, 3], (3, 13)),
    known("bitwise", &[1, 2, 3, 4, 5], (3, 13)),
    known("immediate", &[1, 2], (3, 13)),
    known("lookup", &[1, 2], (3, 13)),
    // With a destination: a map.
    known("lookup", &[1, 2, 3], (3, 13)),
    // Inverted.
    known("lookup", &[1, 2, 5], (4, 8)),
    // Mark, input interface's name, protocol.
    with_values(known("meta", &[1, 2], (3, 14)), 2, &[3, 6, 16]),
    // Sets the mark.
    with_values(known("meta", &[2, 3], (3, 14)), 2, &[3]),
    // State, direction, status.
    with_values(known("ct", &[1, 2], (3, 13)), 2, &[0, 1, 2]),
    // Ports.
    with_values(known("ct", &[1, 2, 3], (3, 13)), 2, &[11, 12]),
    // Addresses of one family.
    with_values(known("ct", &[1, 2, 3], (4, 17)), 2, &[19, 20, 21, 22]),
    // Of the source and of the destination.
    with_values(known("fib", &[1, 2, 3], (4, 10)), 3, &[1, 2]),
    // jhash with a seed, and with an offset.
    with_values(known("hash", &[1, 2, 3, 4, 5, 7], (4, 12)), 7, &[0]),
    with_values(known("hash", &[1, 2, 3, 4, 5, 6, 7], (4, 12)), 7, &[0]),
    with_values(known("nat", &[1, 2, 3, 5], (3, 13)), 1, &[1]),
    // Ports chosen at random.
    with_values(known("masq", &[1], (3, 18)), 1, &[16]),
    // Packets that are not yet routed are rejected since 5.9.
    with_values(known("reject", &[1, 2], (5, 9)), 1, &[0]),
    // Updates in a map.
    with_values(known("dynset", &[1, 3, 4, 5, 6], (4, 1)), 3, &[1]),
    // Updates of a set, with a limit.
    with_values(known("dynset", &[1, 3, 4, 6, 7], (4, 1)), 3, &[1]),
    // Deletion from a map.
    with_values(known("dynset", &[1, 3, 4, 5], (5, 4)), 3, &[2]),
    known("limit", &[1, 2, 3, 4, 5], (4, 3)),
    with_values(known("objref", &[1, 2], (4, 10)), 1, &[1]),
    // Writes to a header, with its checksum: the TTL of what is forwarded to another node.
    known("payload", &[2, 3, 4, 5, 6, 7, 8], (4, 10)),
    known("dup", &[1], (4, 3)),
];

impl Known {
    fn is(&self, expression: &KernelExpression) -> bool {
        let attributes = expression.attributes.keys().copied().collect::<Vec<_>>();
        let value = |attribute: u16| {
            let bytes = expression.attributes.get(&attribute)?;
            Some(bytes.iter().fold(0, |number: u32, byte| number << 8 | u32::from(*byte)))
        };
        self.name == expression.name
            && self.attributes == attributes
            && self.values.is_none_or(|(attribute, values)| {
                value(attribute).is_some_and(|value| values.contains(&value))
            })
    }
}

/// The rules with everything that flags and Services may ask for.
fn ruleset(family: Family, pods: LocalPods, features: Features) -> BaseRuleset {
    let config = RulesetConfig {
        pods,
        used: UsedSets::all(),
        unassigned: vec!["192.0.2.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()],
        drop_invalid: true,
        forward_to_peers: true,
        features,
        ..RulesetConfig::default()
    };
    BaseRuleset::new(family, &config)
}

fn expressions(ruleset: &BaseRuleset) -> impl Iterator<Item = KernelExpression> {
    let rules = ruleset.chains.iter().flat_map(|chain| &chain.rules);
    rules.flat_map(steerage_nft::Rule::kernel_expressions)
}

fn all_pods() -> [LocalPods; 3] {
    let networks = vec!["10.244.0.0/24".parse().unwrap(), "fd44::/64".parse().unwrap()];
    [
        LocalPods::Networks(networks),
        LocalPods::Interface("cni0".to_owned()),
        LocalPods::InterfacePrefix("veth".to_owned()),
    ]
}

#[test]
fn every_expression_is_known_and_in_linux_5_15() {
    let mut used = BTreeSet::new();
    for family in [Family::Ip, Family::Ip6] {
        for pods in all_pods() {
            for expression in expressions(&ruleset(family, pods, Features::default())) {
                let at = KNOWN.iter().position(|known| known.is(&expression));
                used.insert(at.unwrap_or_else(|| {
                    panic!("{expression:?} is not in the table: which Linux brought it?")
                }));
            }
        }
    }
    let unused: Vec<_> = (0..KNOWN.len())
        .filter(|at| !used.contains(at))
        .map(|at| (KNOWN[at].name, KNOWN[at].attributes))
        .collect();
    assert!(unused.is_empty(), "{unused:?}");
    let newer: Vec<_> = KNOWN.iter().filter(|known| known.since > OLDEST).map(|known| known.name).collect();
    assert!(
        newer.is_empty(),
        "{newer:?}: a feature that is tried at start, and rules for kernels without it?"
    );
}

/// What the agent does without a feature is to leave it out of the rules.
#[test]
fn rules_do_without_what_the_kernel_lacks() {
    type Check = fn(&KernelExpression) -> bool;
    let uses = |features: Features, is_it: Check| {
        let [pods, ..] = all_pods();
        expressions(&ruleset(Family::Ip6, pods, features)).any(|expression| is_it(&expression))
    };
    let deletes: Check = |expression| {
        expression.name == "dynset" && expression.attributes.get(&3).is_some_and(|op| op.ends_with(&[2]))
    };
    let checks: [(Feature, Check); 3] = [
        (Feature::Counters, |expression| expression.name == "objref"),
        (Feature::Limits, |expression| expression.name == "limit"),
        (Feature::Deletion, deletes),
    ];
    for (feature, is_it) in checks {
        assert!(uses(Features::default(), is_it), "{feature:?}");
        assert!(!uses(Features::default().without(feature), is_it), "{feature:?}");
    }
}

/// A look-up of a map's key that does not ask for the value: Ubuntu's 5.15.0-25 refuses such a rule (EINVAL), and newer kernels take it.
#[test]
fn maps_are_looked_up_with_their_values() {
    let without = Feature::ALL.map(|feature| Features::default().without(feature));
    for features in without.into_iter().chain([Features::default()]) {
        for (family, pods) in
            [Family::Ip, Family::Ip6].into_iter().flat_map(|family| all_pods().map(|pods| (family, pods)))
        {
            let ruleset = ruleset(family, pods, features.clone());
            let is_map = |name: &[u8]| {
                ruleset
                    .sets
                    .iter()
                    .any(|(set, of)| of.is_map() && name.strip_suffix(&[0]) == Some(set.as_bytes()))
            };
            let mut values = 0;
            for expression in expressions(&ruleset).filter(|expression| expression.name == "lookup") {
                let asks = expression.attributes.contains_key(&3);
                values += u32::from(asks);
                assert!(asks || !is_map(&expression.attributes[&1]), "{expression:?}");
            }
            assert!(values > 0);
        }
    }
}
