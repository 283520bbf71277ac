// SPDX-License-Identifier: Apache-2.0

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proptest::prelude::*;
use steerage_model::{Family, Key, Protocol};
use steerage_nft::Rows;

use super::*;
use crate::local_node::LocalPods;
use crate::plan::{Action, Endpoints, Frontend, Masquerade, Omitted, Role, Selection, ServicePlan};

fn target(n: u8) -> SocketAddr {
    SocketAddr::new(IpAddr::from([10, 244, 0, n]), 8080)
}

fn frontend(n: u8) -> Frontend {
    Frontend { addr: IpAddr::from([10, 96, 0, n]), protocol: Protocol::Tcp, port: 80 }
}

fn action(targets: &[u8], local: Option<&[u8]>) -> Action {
    let list = |numbers: &[u8]| -> Arc<[SocketAddr]> { numbers.iter().map(|n| target(*n)).collect() };
    Action {
        role: Role::Vip,
        created: 0,
        port: 80,
        targets: Endpoints { selection: Selection::Cluster, list: list(targets) },
        local: local.map(|local| Endpoints { selection: Selection::Local, list: list(local) }),
        peers: None,
        reject: targets.is_empty(),
        masquerade: Masquerade::All,
        sources: None,
        affinity: None,
        serving: list(targets),
    }
}

/// The plan of one Service with these frontends.
fn service(frontends: Vec<(Frontend, Action)>) -> BTreeMap<Key, ServicePlan> {
    [(Key::new("n", "s"), ServicePlan { frontends, ..ServicePlan::default() })].into()
}

/// What the plan of one Service with this one frontend comes to.
fn elements(action: Action) -> Elements {
    let mut ruleset = Ruleset::default();
    ruleset.stage(service(vec![(frontend(1), action)]));
    ruleset.all_elements(Family::V4)
}

fn names(elements: &Elements) -> BTreeMap<String, usize> {
    elements.sets().map(|(set, rows)| (set.name(), rows.len())).collect()
}

fn counted(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[test]
fn a_frontend_becomes_elements() {
    let elements = |action: &Action| {
        let mut ruleset = Ruleset::default();
        ruleset.stage(service(vec![(frontend(1), action.clone())]));
        let elements = ruleset.all_elements(Family::V4);
        let used = UsedSets::of_table(Family::V4, names(&elements).keys().map(String::as_str));
        assert_eq!(ruleset.config().used, used, "the sets that have elements, and no others");
        for (model, family) in
            [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)]
        {
            let base_ruleset = BaseRuleset::new(family, ruleset.config());
            let all = ruleset.all_elements(model);
            let missing: Vec<_> = all.sets().filter(|(id, _)| !base_ruleset.filled.contains(id)).collect();
            assert!(missing.is_empty(), "{model}: {missing:?}");
        }
        names(&elements)
    };
    assert_eq!(
        elements(&action(&[1, 2, 3], Some(&[1]))),
        counted(&[("frontends", 1), ("split", 1), ("masqueraded", 1), ("slots-3", 3), ("slots-1", 1)])
    );
    assert_eq!(
        elements(&action(&[], None)),
        counted(&[("frontends", 1), ("rejected", 1), ("masqueraded", 1)])
    );
    let many: Vec<u8> = (1..=9).collect();
    let mut sticky = action(&many, Some(&many));
    sticky.affinity = Some(30);
    sticky.sources = Some(["192.0.2.0/24".parse().unwrap(), "198.51.100.7/32".parse().unwrap()].into());
    assert_eq!(
        elements(&sticky),
        counted(&[
            ("frontends", 1),
            ("split", 1),
            ("masqueraded", 1),
            ("affine", 1),
            ("affine-30", 1),
            ("shares-1", 1),
            ("namespaces", 1),
            ("sticky", 9),
            ("sticky-local", 9),
            ("restricted", 1),
            ("sources-24", 1),
            ("sources-32", 1),
            ("lists", 1),
            ("lists-local", 1),
            ("long-16", 1),
            ("long-local-16", 1),
            ("endpoints", 18),
            ("digests", 2),
        ])
    );
}

#[test]
fn frontends_of_a_port_share_a_long_list() {
    let many: Vec<u8> = (1..=100).collect();
    let mut ruleset = Ruleset::default();
    let local = action(&many, Some(&many[..50]));
    let mut internal = action(&many[..50], None);
    internal.targets.selection = Selection::Local;
    ruleset.stage(service(vec![
        (frontend(1), local.clone()),
        (frontend(2), local),
        (frontend(3), action(&many, None)),
        (frontend(4), internal),
    ]));
    let counts = names(&ruleset.all_elements(Family::V4));
    let of = |set: &str| counts.get(set).copied().unwrap_or_default();
    assert_eq!(of("endpoints"), 150, "each list once");
    assert_eq!((of("lists"), of("lists-local")), (4, 2));
    assert_eq!((of("long-256"), of("long-64"), of("long-local-64")), (3, 1, 2));
    let other = frontend(5);
    let mut more = service(vec![(other, action(&many, None))]);
    more = more.into_values().map(|plan| (Key::new("n", "t"), plan)).collect();
    ruleset.stage(more);
    assert_eq!(names(&ruleset.all_elements(Family::V4))["endpoints"], 250, "another Service has its own");
}

fn nets(list: &[&str]) -> Arc<[ipnet::IpNet]> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

/// A thousand ports with a thousand networks are not a million elements.
#[test]
fn frontends_share_lists_of_sources() {
    let with = |name: &str, list: &[&str]| {
        let restricted = Action { sources: Some(nets(list)), ..action(&[1], None) };
        let frontends = (1..5).map(|n| (frontend(n), restricted.clone())).collect();
        (Key::new("n", name), ServicePlan { frontends, ..ServicePlan::default() })
    };
    let old = ["192.0.2.0/25", "198.51.100.7/32"];
    let new = ["192.0.2.0/25", "203.0.113.0/24", "2001:db8::/32"];
    let mut ruleset = Ruleset::default();
    ruleset.stage([with("a", &old), with("b", &old)].into());
    let sources = |ruleset: &Ruleset| {
        let found = names(&ruleset.all_elements(Family::V4))
            .into_iter()
            .filter(|(name, _)| name.starts_with("sources"));
        found.collect::<BTreeMap<_, _>>()
    };
    assert_eq!(sources(&ruleset), counted(&[("sources-26", 2), ("sources-32", 1)]));
    let Difference::Elements([v4, v6]) = ruleset.update([with("a", &new)].into(), KernelState::InSync) else {
        panic!("chains do not change");
    };
    assert_eq!([26, 24].map(|length| v4.add[&SetId::Sources(length)].len()), [2, 1], "a list of its own");
    assert_eq!(v6.add[&SetId::Sources(32)].len(), 1);
    assert!(!v4.delete.contains_key(&SetId::Sources(32)), "b uses the old list");
    let _ = ruleset.update([(Key::new("n", "b"), ServicePlan::default())].into(), KernelState::InSync);
    assert_eq!(sources(&ruleset), counted(&[("sources-26", 2), ("sources-24", 1)]), "that of a");
    let _ = ruleset.update([(Key::new("n", "a"), ServicePlan::default())].into(), KernelState::InSync);
    assert_eq!(sources(&ruleset), counted(&[]));
}

#[test]
fn one_endpoint_less_is_a_small_change() {
    let elements = |targets: &[u8]| elements(action(targets, None));
    assert_eq!(difference(&elements(&[1, 2, 3]), &elements(&[1, 3])).count(), 5);
    assert!(difference(&elements(&[1, 2]), &elements(&[1, 2])).is_empty());
}

#[test]
fn a_changed_endpoint_of_a_long_list_costs_five_elements() {
    let many: Vec<u8> = (1..=100).collect();
    let with = |numbers: &[u8]| service((1..5).map(|n| (frontend(n), action(numbers, None))).collect());
    let mut ruleset = Ruleset::default();
    ruleset.stage(with(&many));
    let mut changes = |numbers: &[u8]| match ruleset.update(with(numbers), KernelState::InSync) {
        Difference::Elements([v4, _]) => v4.count(),
        Difference::Full => panic!("chains do not change"),
    };
    assert_eq!(changes(&many), 0);
    assert_eq!(
        changes(&many[1..]),
        3 + 2,
        "the last endpoint moves to the slot of the first; and the digest"
    );
    assert_eq!(changes(&many), 1 + 2, "the new one has the last slot");
    assert_eq!(
        changes(&many[..63]),
        37 + 2 + 4 * 2 + 2,
        "the list shrinks, one endpoint moves, and each frontend changes its set"
    );
}

#[test]
fn a_new_process_takes_over_the_order_of_the_kernels_lists() {
    let many: Vec<u8> = (1..=100).collect();
    let plan = |numbers: &[u8]| service(vec![(frontend(1), action(numbers, None))]);
    let mut old = Ruleset::default();
    old.stage(plan(&many));
    let _ = old.update(plan(&many[10..]), KernelState::InSync);
    let kernel = old.all_elements(Family::V4);
    let mut new = Ruleset::default();
    new.stage(plan(&many[10..]));
    assert!(!difference(&kernel, &new.all_elements(Family::V4)).is_empty(), "its own order is another one");
    let endpoints = kernel.sets().find(|(id, _)| **id == SetId::Endpoints).unwrap().1;
    new.adopt(Family::V4, &kernel_lists(endpoints));
    assert!(difference(&kernel, &new.all_elements(Family::V4)).is_empty());
}

proptest! {
    /// What the rules choose, computed: no endpoint gets much less than its share, however many there are.
    #[test]
    fn long_lists_are_even(count in 9_u32..2000) {
        let class = super::layout::long_class(count as usize);
        prop_assert!(count > class / 4 && count <= class, "the first quarter is full");
        let (n, m) = (f64::from(count), f64::from(class));
        let (mut left, mut first, mut last) = (1.0_f64, 0.0, 0.0);
        for (tries, modulus) in [(6, m), (5, m / 2.0), (1, m / 4.0)] {
            for _ in 0..tries {
                first += left / modulus;
                last += if modulus >= n { left / modulus } else { 0.0 };
                left *= 1.0 - n.min(modulus) / modulus;
            }
        }
        prop_assert!(left.abs() < 1e-9, "every flow finds an endpoint");
        prop_assert!(first * n < 1.01 && last * n > 0.98, "{} and {} of the mean", first * n, last * n);
    }
}

#[test]
fn configuration_changes_only_the_chains_that_mention_it() {
    let base_ruleset = |config: &RulesetConfig| BaseRuleset::new(steerage_nft::Family::Ip, config);
    let plain = base_ruleset(&RulesetConfig::default());
    let configured = base_ruleset(&RulesetConfig {
        pods: LocalPods::Networks(vec!["10.244.0.0/24".parse().unwrap(), "fd44::/64".parse().unwrap()]),
        unassigned: vec!["192.0.2.0/24".parse().unwrap()],
        ..RulesetConfig::default()
    });
    assert_eq!(plain.version, configured.version);
    let digests = |base_ruleset: &BaseRuleset| -> BTreeMap<String, String> {
        base_ruleset.chains.iter().map(|chain| (chain.name.clone(), chain.digest.clone())).collect()
    };
    let (plain, configured) = (digests(&plain), digests(&configured));
    let changed: Vec<_> =
        plain.iter().filter(|(name, of)| configured[*name] != **of).map(|(name, _)| name.as_str()).collect();
    assert_eq!(changed, ["to-split", "translated", "unassigned"]);
    assert_eq!(configured.len(), plain.len());
}

/// A table that lacks what no Service needs has the same version as one with everything, and is not replaced.
#[test]
fn tables_with_and_without_sets_that_services_need_have_one_version() {
    let (none, all) =
        (RulesetConfig::default(), RulesetConfig { used: UsedSets::all(), ..RulesetConfig::default() });
    for family in [steerage_nft::Family::Ip, steerage_nft::Family::Ip6] {
        let (none, all) = (BaseRuleset::new(family, &none), BaseRuleset::new(family, &all));
        assert_eq!(none.version, all.version);
        let names = |rules: &BaseRuleset| -> BTreeSet<String> {
            rules.chains.iter().map(|chain| chain.name.clone()).collect()
        };
        let added: Vec<_> = names(&all).difference(&names(&none)).cloned().collect();
        assert!(added.iter().any(|name| name == "remember-received"), "{added:?}");
        assert!(added.iter().any(|name| name == "long-local-64"), "{added:?}");
        for name in names(&all) {
            assert_eq!(BaseRuleset::is_optional(&name), added.contains(&name), "{name}");
        }
        let rules = |rules: &BaseRuleset| rules.chains.iter().map(|chain| chain.rules.len()).sum::<usize>();
        assert!(rules(&none) * 8 < rules(&all), "{} of {}", rules(&none), rules(&all));
        assert!(none.sets.len() * 3 < all.sets.len(), "{} of {}", none.sets.len(), all.sets.len());
        assert!(!none.sets.iter().any(|(name, _)| name.starts_with("sources-") || name.contains("affin")));
        let restricted = none.chains.iter().find(|chain| chain.name == "check-source").unwrap();
        assert_eq!(restricted.rules.len(), 2, "a list of sources without networks admits nobody");
    }
}

/// Services by number, each with the frontends that it claims and their targets.
type World = BTreeMap<u8, Vec<Front>>;
/// A frontend's number, its targets and its local ones.
type Front = (u8, Vec<u8>, Option<Vec<u8>>);

fn plans(world: &World) -> BTreeMap<Key, ServicePlan> {
    let plan = |frontends: &Vec<Front>| ServicePlan {
        frontends: frontends
            .iter()
            .map(|(n, targets, local)| (frontend(*n), action(targets, local.as_deref())))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect(),
        cluster_addresses: frontends.iter().map(|(n, _, _)| frontend(*n).addr).collect(),
        hairpins: frontends
            .iter()
            .flat_map(|(_, targets, _)| targets.iter().map(|n| target(*n).ip()))
            .collect(),
        health: None,
        reserved: Vec::new(),
        refused: Vec::new(),
        omitted: Omitted::default(),
        reduced: None,
    };
    world.iter().map(|(name, frontends)| (Key::new("n", name.to_string()), plan(frontends))).collect()
}

fn worlds() -> impl Strategy<Value = Vec<World>> {
    let list = || {
        proptest::collection::btree_set(0_u8..14, 0..12).prop_map(|set| set.into_iter().collect::<Vec<_>>())
    };
    let front = (0_u8..6, list(), proptest::option::of(list()));
    let service = proptest::collection::vec(front, 0..3);
    proptest::collection::vec(proptest::collection::btree_map(0_u8..4, service, 0..4), 1..8)
}

/// By set and key, what a kernel map gives.
type KernelElements = BTreeMap<(SetId, Vec<u8>), Option<Vec<u8>>>;

fn held<'a>(sets: impl Iterator<Item = (&'a SetId, &'a Rows)>) -> KernelElements {
    let entries = |(id, rows): (&'a SetId, &'a Rows)| {
        rows.iter().map(|row| ((*id, row.key.to_vec()), row.data.map(<[u8]>::to_vec)))
    };
    sets.flat_map(entries).collect()
}

proptest! {
    /// Written difference by difference, the kernel holds what one full load would give, whoever claims what when.
    #[test]
    fn any_sequence_of_updates_equals_the_full_load(worlds in worlds()) {
        let mut ruleset = Ruleset::default();
        let mut kernel = KernelElements::new();
        for world in &worlds {
            let mut updates = plans(world);
            for gone in ruleset.desired().services() {
                updates.entry(gone.clone()).or_default();
            }
            let Difference::Elements([changes, _]) = ruleset.update(updates, KernelState::InSync) else {
                panic!("chains do not change");
            };
            for (key, data) in held(changes.delete.iter()) {
                prop_assert_eq!(kernel.remove(&key), Some(data), "what is deleted was there");
            }
            let base_ruleset = BaseRuleset::new(steerage_nft::Family::Ip, ruleset.config());
            prop_assert!(changes.add.keys().all(|id| base_ruleset.filled.contains(id)), "{:?}", changes.add.keys());
            for (key, data) in held(changes.add.iter()) {
                prop_assert_eq!(kernel.insert(key, data), None, "what is added was not there");
            }
            let mut fresh = Ruleset::default();
            fresh.stage(plans(world));
            prop_assert_eq!(ruleset.desired().shadowed_count(), fresh.desired().shadowed_count());
            // Only the order of long lists depends on their history.
            let written = ruleset.all_elements(Family::V4);
            for (_, endpoints) in written.sets().filter(|(id, _)| **id == SetId::Endpoints) {
                fresh.adopt(Family::V4, &kernel_lists(endpoints));
            }
            let fresh = fresh.all_elements(Family::V4);
            prop_assert_eq!(fresh.len(), kernel.len(), "no element twice");
            prop_assert_eq!(&kernel, &held(fresh.sets()));
        }
    }
}

#[test]
fn rows_have_the_lengths_of_their_sets() {
    for (model, family) in [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)] {
        let all = RulesetConfig { used: UsedSets::all(), ..RulesetConfig::default() };
        for id in BaseRuleset::new(family, &all).filled {
            assert_eq!(id.row_shape(model), id.set(family).row_shape(), "{}", id.name());
        }
    }
}

#[test]
fn forwarding_to_peers_is_in_the_rules_only_if_it_is_on() {
    let on = RulesetConfig { forward_to_peers: true, ..RulesetConfig::default() };
    for family in [steerage_nft::Family::Ip, steerage_nft::Family::Ip6] {
        let (without, with) =
            (BaseRuleset::new(family, &RulesetConfig::default()), BaseRuleset::new(family, &on));
        let added = |of: fn(&BaseRuleset) -> Vec<String>| {
            let without = of(&without);
            of(&with).into_iter().filter(|name| !without.contains(name)).collect::<Vec<_>>()
        };
        assert_eq!(
            added(|rules| rules.sets.iter().map(|(name, _)| name.clone()).collect()),
            ["without-local", "peers"]
        );
        assert_eq!(added(|rules| rules.chains.iter().map(|chain| chain.digest.clone()).collect()).len(), 2);
        assert_eq!(
            added(|rules| rules.counters.iter().map(|name| (*name).to_owned()).collect()),
            ["already-forwarded", "forwarded"]
        );
        assert_ne!(without.version, with.version, "a process with another flag replaces the table");
    }
    let far = action(&[2], Some(&[]));
    let peers: Arc<[IpAddr]> = (0..8).map(|n| IpAddr::from([10, 0, 0, n % 3])).collect();
    let dropped = names(&elements(far.clone()));
    let forwarded = names(&elements(Action { peers: Some(peers), ..far }));
    let mut expected = dropped;
    expected.extend(counted(&[("without-local", 1), ("peers", 8)]));
    assert_eq!(forwarded, expected);
}
