// SPDX-License-Identifier: Apache-2.0
//! A table has the sets that its Services need, and the rules that look in them: they come before the elements, and a new process
//! deletes what nobody needs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use steerage_agent::kernel::Written;
use steerage_agent::rules::{BaseRuleset, KernelState, RulesetConfig, TABLE, UsedSets};
use steerage_model::Family;
use steerage_nft::{Batch, Nft, Table};
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::cluster::{Proxy, Spec, World, plans, pod_networks};
use crate::kernel::ruleset::{nft, ruleset};

fn table() -> Table {
    Table::new(steerage_nft::Family::Ip, TABLE)
}

fn follow(proxy: &mut Proxy, world: &World) -> Written {
    let gone: Vec<_> = proxy.ruleset.desired().services().cloned().collect();
    proxy.write(plans(world, gone), &pod_networks()).unwrap()
}

/// Restarts, and follows the same world.
fn restart(proxy: &mut Proxy, world: &World) -> Written {
    *proxy = Proxy::open();
    follow(proxy, world)
}

/// Services without anything that not all need.
fn plain() -> World {
    [(1, Spec { elsewhere: 3, ..Spec::default() }), (2, Spec { first: 50, ..Spec::default() })].into()
}

fn with(change: impl FnOnce(&mut Spec)) -> World {
    let mut world = plain();
    change(world.get_mut(&2).unwrap());
    world
}

/// Each kind of Service that needs more, with the names of the sets and chains for it.
fn special() -> [(World, Vec<&'static str>); 3] {
    let ranges = |spec: &mut Spec| {
        spec.sources = ["192.0.2.0/24", "2001:db8::/32"].map(|net| net.parse().unwrap()).to_vec();
    };
    [
        (with(ranges), vec!["sources-24"]),
        (with(|spec| spec.elsewhere = 40), vec!["long-64"]),
        (with(|spec| spec.affinity = Some(30)), vec!["affine", "affine-30", "new-clients-30", "candidates"]),
    ]
}

/// The sets and chains that `names` are of.
fn found(names: &[&str]) -> usize {
    let mut kernel = Nft::open().unwrap();
    let (sets, chains) = (kernel.sets(&table()).unwrap(), kernel.chains(&table()).unwrap());
    names.iter().filter(|name| sets.iter().chain(&chains).any(|found| found == *name)).count()
}

fn generation() -> u32 {
    Nft::open().unwrap().generation().unwrap()
}

fn loaded_at_once(world: &World) -> Vec<String> {
    in_new_netns(|| {
        follow(&mut Proxy::open(), world);
        ruleset()
    })
}

#[test]
fn table_has_the_sets_that_services_need() {
    requires!(NetworkNamespace, Program("nft"));
    for (world, names) in special() {
        in_new_netns(|| {
            let mut proxy = Proxy::open();
            follow(&mut proxy, &plain());
            assert_eq!(found(&names), 0, "{names:?}");
            let written = follow(&mut proxy, &world);
            assert!(!written.full, "the tables were in sync: {written:?}");
            assert_eq!(found(&names), names.len(), "{names:?}");
            assert_eq!(ruleset(), loaded_at_once(&world), "{names:?}");
            follow(&mut proxy, &plain());
            assert_eq!(found(&names), names.len(), "they stay while the process runs: {names:?}");
            // Whatever is compared, nothing is to be written.
            proxy.dataplane.mark_out_of_sync();
            let before = generation();
            assert_eq!(proxy.write(BTreeMap::new(), &pod_networks()).unwrap().elements, 0);
            assert_eq!(generation(), before, "{names:?}");
            restart(&mut proxy, &plain());
            assert_eq!(found(&names), 0, "{names:?}");
            assert_eq!(ruleset(), loaded_at_once(&plain()), "{names:?}");
        });
    }
}

/// A packet that met the old rules must not meet a frontend that needs the new ones: it would be dropped.
#[test]
fn rules_come_before_the_elements_that_need_them() {
    requires!(NetworkNamespace, Program("nft"));
    // A new process, too, if its predecessor's table is whole.
    for (restarts, (world, names)) in
        [false, true].into_iter().flat_map(|after| special().map(|of| (after, of)))
    {
        in_new_netns(|| {
            let mut proxy = Proxy::open();
            follow(&mut proxy, &plain());
            let before = generation();
            if restarts {
                restart(&mut proxy, &world)
            } else {
                follow(&mut proxy, &world)
            };
            // Two for each family.
            let others = if restarts { TRIALS } else { 0 };
            assert_eq!(generation() - before, 4 + others, "{names:?}, restarts: {restarts}");
            assert_eq!(proxy.dataplane.state(), KernelState::InSync);
            let before = generation();
            follow(&mut proxy, &plain());
            follow(&mut proxy, &world);
            assert_eq!(generation() - before, 4, "the rules are there: {names:?}");
        });
    }
}

/// Commits of a start that is not a load: it makes a table for a moment in each family, to compare rules with, and deletes it.
const TRIALS: u32 = 4;

/// Other programs commit all the time, so that no generation of the ruleset lasts until a write: what is written needs none.
#[test]
fn new_sets_beside_commits_of_others_need_no_comparison() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        follow(&mut proxy, &plain());
        let stop = AtomicBool::new(false);
        // A set for each length.
        let worlds: Vec<_> = (9..=32)
            .map(|length| with(|spec| spec.sources = vec![format!("10.0.0.0/{length}").parse().unwrap()]))
            .collect();
        let results = std::thread::scope(|scope| {
            for number in 0..3 {
                let (stop, other) = (&stop, Table::new(steerage_nft::Family::Ip, format!("other-{number}")));
                scope.spawn(move || {
                    let mut nft = Nft::open().unwrap();
                    while !stop.load(Ordering::Relaxed) {
                        let mut batch = Batch::new();
                        batch.destroy_table(&other);
                        nft.commit(batch).unwrap();
                    }
                });
            }
            let mut write = |world| {
                let gone: Vec<_> = proxy.ruleset.desired().services().cloned().collect();
                proxy.write(plans(world, gone), &pod_networks())
            };
            let results: Vec<_> = worlds.iter().map(&mut write).collect();
            stop.store(true, Ordering::Relaxed);
            results
        });
        for result in results {
            assert!(result.as_ref().is_ok_and(|written| !written.full), "{result:?}");
        }
        let last = worlds.last().expect("a world");
        restart(&mut proxy, last);
        assert!(ruleset() == loaded_at_once(last), "the rules are not what a load makes");
    });
}

#[test]
fn restart_with_the_same_services_changes_no_table() {
    requires!(NetworkNamespace, Program("nft"));
    for (world, names) in special() {
        in_new_netns(|| {
            let mut proxy = Proxy::open();
            follow(&mut proxy, &world);
            let before = generation();
            assert_eq!(restart(&mut proxy, &world).elements, 0);
            assert_eq!(generation() - before, TRIALS, "{names:?}");
        });
    }
}

/// Rules that come back before the elements would admit what these forbid: a repair is one transaction.
#[test]
fn deleted_set_comes_back_with_its_rules() {
    requires!(NetworkNamespace, Program("nft"));
    let [(world, _), ..] = special();
    for harm in [
        "flush chain ip steerage check-source; delete set ip steerage sources-24",
        "flush set ip steerage sources-24; flush chain ip steerage check-source",
        "flush ruleset",
    ] {
        for restarts in [false, true] {
            in_new_netns(|| {
                let mut proxy = Proxy::open();
                follow(&mut proxy, &world);
                nft(&[harm]);
                proxy.dataplane.mark_out_of_sync();
                let before = generation();
                if restarts {
                    restart(&mut proxy, &world)
                } else {
                    follow(&mut proxy, &world)
                };
                let others = if restarts { TRIALS } else { 0 };
                assert!(harm == "flush ruleset" || generation() - before == 1 + others, "{harm}");
                assert_eq!(ruleset(), loaded_at_once(&world), "{harm}");
            });
        }
    }
}

/// Tables before had all sets that any Service may need.
#[test]
fn table_with_all_sets_is_taken_over_without_a_load() {
    requires!(NetworkNamespace, Program("nft"));
    let [(world, _), ..] = special();
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world);
        let config = RulesetConfig { used: UsedSets::all(), ..proxy.ruleset.config().clone() };
        let base_ruleset = BaseRuleset::new(table().family, &config);
        let elements = proxy.ruleset.all_elements(Family::V4);
        let mut batch = Batch::new();
        batch.destroy_table(&table()).add_table(&table(), Some(&base_ruleset.version));
        for (_, set) in &base_ruleset.sets {
            batch.add_set(&table(), set);
        }
        for counter in &base_ruleset.counters {
            batch.add_counter(&table(), counter);
        }
        for chain in &base_ruleset.chains {
            batch.add_chain(&table(), &chain.chain);
            for rule in &chain.rules {
                batch.add_rule(&table(), &chain.name, rule);
            }
        }
        for (id, rows) in elements.sets() {
            batch.add_rows(&table(), &id.name(), rows.iter());
        }
        Nft::open().unwrap().commit(batch).unwrap();
        assert_eq!(found(&["sources-24", "sources-28", "long-16384", "affine-5"]), 4);
        let before = generation();
        assert_eq!(restart(&mut proxy, &world).elements, 0);
        assert_eq!(generation() - before, TRIALS + 1, "the surplus is deleted");
        assert_eq!(ruleset(), loaded_at_once(&world));
    });
}
