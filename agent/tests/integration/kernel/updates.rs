// SPDX-License-Identifier: Apache-2.0
//! Any sequence of updates leaves what one full load leaves; a refused one leaves what was there, and is made good in full.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use steerage_agent::local_node::LocalPods;
use steerage_agent::plan::ServicePlan;
use steerage_agent::rules::KernelState;
use steerage_model::{Key, ServiceKind, TrafficPolicy};
use steerage_nft::{Batch, Chain, Element, Errno, Error, Family, Field, Nft, Table, concat};
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::cluster::{Proxy, Spec, World, plans, pod_networks};
use crate::kernel::ruleset::{nft, ruleset};

/// Makes the data plane follow the world, as the agent would.
fn follow(proxy: &mut Proxy, world: &World, pods: &LocalPods) -> Result<(), Error> {
    let updates = updates(proxy, world);
    proxy.write(updates, pods).map(drop)
}

fn updates(proxy: &Proxy, world: &World) -> BTreeMap<Key, ServicePlan> {
    let gone: Vec<_> = proxy.ruleset.desired().services().cloned().collect();
    plans(world, gone)
}

/// What a process leaves that starts with this world on an empty host.
fn loaded_at_once(world: &World, pods: &LocalPods) -> Vec<String> {
    in_new_netns(|| {
        follow(&mut Proxy::open(), world, pods).unwrap();
        ruleset()
    })
}

fn specs() -> impl Strategy<Value = Spec> {
    let kind = prop_oneof![Just(ServiceKind::ClusterIp), Just(ServiceKind::LoadBalancer)];
    let policy = || prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)];
    let sources = prop_oneof![
        3 => Just(&[][..]),
        1 => Just(&["192.0.2.0/24"][..]),
        1 => Just(&["192.0.2.0/25", "192.0.2.7/32", "2001:db8::/32"][..]),
    ];
    let affinity = prop_oneof![2 => Just(None), 1 => Just(Some(30)), 1 => Just(Some(60))];
    (kind, 0_u16..4, 0_u16..14, 0_u16..6, policy(), policy(), affinity, sources, 0_u8..3).prop_map(
        |(kind, here, elsewhere, first, external, internal, affinity, sources, shared)| Spec {
            kind,
            here,
            elsewhere,
            first,
            external,
            internal,
            affinity,
            sources: sources.iter().map(|net| net.parse().unwrap()).collect(),
            shared,
        },
    )
}

/// Worlds that follow each other, each with whether the node has pod networks, and whether the process restarts before it.
fn histories() -> impl Strategy<Value = Vec<(World, bool, bool)>> {
    let world = proptest::collection::btree_map(0_u8..5, specs(), 0..5);
    proptest::collection::vec((world, proptest::bool::weighted(0.8), proptest::bool::weighted(0.1)), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn incremental_updates_equal_full_load(history in histories()) {
        requires!(Ok(()); NetworkNamespace, Program("nft"));
        let networks = |with: bool| if with { pod_networks() } else { LocalPods::default() };
        let found = in_new_netns(|| {
            let mut proxy = Proxy::open();
            // At last a new process, which deletes what only Services before have needed, and finds nothing else to write.
            let end = history.last().map(|(world, pods, _)| (world.clone(), *pods, true));
            for (number, (world, pods, restart)) in history.iter().chain(&end).enumerate() {
                let pods = networks(*pods);
                if *restart {
                    proxy = Proxy::open();
                }
                let updates = updates(&proxy, world);
                let written = proxy.write(updates, &pods).unwrap();
                assert!(number < history.len() || written.elements == 0, "{written:?}");
            }
            ruleset()
        });
        let (world, pods, _) = history.last().unwrap();
        let wanted = loaded_at_once(world, &networks(*pods));
        prop_assert!(wanted.len() > 60, "two tables were listed");
        prop_assert_eq!(found, wanted);
    }
}

fn two(elsewhere: u16) -> World {
    let spec = |first| Spec { elsewhere, first, ..Spec::default() };
    [(1, spec(0)), (2, spec(100))].into()
}

/// The kernel takes some of these repairs in one order only.
#[test]
fn what_another_program_did_while_no_agent_ran_is_repaired_in_one_transaction() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    // Needs base chains that the table does not have.
    let mut with_affinity = two(4);
    for spec in with_affinity.values_mut() {
        spec.affinity = Some(30);
    }
    let jumping = "add chain ip steerage long-16; \
                   add map ip steerage foreign { type ipv4_addr : verdict; elements = { 10.0.0.1 : jump long-16 } ; }";
    for (harm, world) in [
        ("add table ip steerage { flags dormant ; }", with_affinity),
        ("add chain ip6 steerage other { type filter hook input priority 0 ; }", two(4)),
        (jumping, two(4)),
        ("add set ip steerage sources-2 { type ipv4_addr ; }", two(4)),
    ] {
        in_new_netns(|| {
            follow(&mut Proxy::open(), &two(4), &pods).unwrap();
            nft(&[harm]);
            follow(&mut Proxy::open(), &world, &pods).unwrap_or_else(|error| panic!("{harm}: {error}"));
            assert_eq!(ruleset(), loaded_at_once(&world, &pods), "{harm}");
        });
    }
}

/// Rules that come back without their elements would admit clients that source ranges exclude: a Service that needs a set more does not
/// bring them back alone.
#[test]
fn new_set_does_not_bring_back_damaged_rules_without_elements() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    let restricted = |sources: &[&str]| -> World {
        let sources = sources.iter().map(|net| net.parse().unwrap()).collect();
        [(1, Spec { kind: ServiceKind::LoadBalancer, elsewhere: 2, sources, ..Spec::default() })].into()
    };
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        follow(&mut proxy, &restricted(&["192.0.2.0/24"]), &pods).unwrap();
        nft(&[
            "flush chain ip steerage services; flush chain ip steerage check-source; flush map ip steerage restricted",
        ]);
        let both = restricted(&["192.0.2.0/24", "198.51.0.0/16"]);
        let refused = follow(&mut proxy, &both, &pods);
        assert!(matches!(refused, Err(Error::StaleGeneration)), "{refused:?}");
        let chain = nft(&["list chain ip steerage services"]);
        assert!(!chain.contains("vmap") && !chain.contains("jump"), "{chain}");
        proxy.write(BTreeMap::new(), &pods).unwrap();
        assert_eq!(ruleset(), loaded_at_once(&both, &pods));
    });
}

/// What a foreign hand did makes the last operation of the batch impossible, after others that are possible: the kernel applies
/// none of them. The next write compares everything, and comes to the same as a full load.
#[test]
fn rejected_update_changes_nothing_and_is_repaired() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    let slot = |number: u32| {
        let front = [Field::V4([10, 98, 0, 0].into()), Field::Proto(17), Field::Port(80)];
        concat(&[front[0], front[1], front[2], Field::Number(number)])
    };
    let end = concat(&[Field::V4([10, 9, 9, 9].into()), Field::Port(9)]);
    let table = Table::new(Family::Ip, "steerage");
    let sabotage = |what: &str| {
        let mut batch = Batch::new();
        match what {
            // An element to delete is gone: ENOENT.
            "delete" => batch.delete_elements(&table, "slots-4", &[Element::key(slot(3))]),
            // An element to add is there with other data: EEXIST.
            "add" => batch.add_elements(&table, "slots-5", &[Element::entry(slot(4), end.clone())]),
            // Where to add is no more: ENOENT.
            _ => batch.delete_table(&table),
        };
        Nft::open().unwrap().commit(batch).unwrap();
    };
    for what in ["delete", "add", "table"] {
        in_new_netns(|| {
            let mut proxy = Proxy::open();
            follow(&mut proxy, &two(4), &pods).unwrap();
            sabotage(what);
            let before = only(Family::Ip);
            let refused = follow(&mut proxy, &two(5), &pods);
            assert!(matches!(&refused, Err(Error::Kernel(_))), "{what}: {refused:?}");
            assert_eq!(only(Family::Ip), before, "{what}");
            assert_eq!(proxy.dataplane.state(), KernelState::Unknown);
            let applied = proxy.write(BTreeMap::new(), &pods).unwrap();
            assert!(applied.full, "{applied:?}");
            let stale = proxy.ruleset.take_stale_flows();
            assert!(!stale.is_empty(), "the plans of the refused write are kept");
            assert_eq!(ruleset(), loaded_at_once(&two(5), &pods), "{what}");
        });
    }
}

/// The full load itself is refused: a set is too small for what has to go into it.
#[test]
fn rejected_load_changes_nothing_and_is_repaired() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        follow(&mut proxy, &two(4), &pods).unwrap();
        // The table as it is, but for one set, which does not change while a rule refers to it.
        let listing = nft(&["list", "set", "ip", "steerage", "hairpins"]);
        assert!(listing.contains("type ipv4_addr . ipv4_addr"), "{listing}");
        let world = Spec { here: 3, first: 200, ..Spec::default() };
        let mut crowded = two(4);
        crowded.insert(3, world);
        nft(&["flush chain ip steerage translated; delete set ip steerage hairpins; \
               add set ip steerage hairpins { type ipv4_addr . ipv4_addr ; flags constant ; }"]);
        proxy.dataplane.mark_out_of_sync();
        let before = only(Family::Ip);
        let refused = follow(&mut proxy, &crowded, &pods);
        assert!(matches!(&refused, Err(Error::Kernel(r)) if r.errno == Errno::EBUSY), "{refused:?}");
        assert_eq!(only(Family::Ip), before);
        assert_eq!(proxy.dataplane.state(), KernelState::Unknown);
        nft(&["delete table ip steerage"]);
        proxy.write(BTreeMap::new(), &pods).unwrap();
        assert_eq!(ruleset(), loaded_at_once(&crowded, &pods));
    });
}

/// Another program made a set anew, with room for less than it may have to hold.
#[test]
fn table_with_a_set_of_another_size_is_replaced() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        follow(&mut proxy, &two(4), &pods).unwrap();
        nft(&["flush chain ip steerage translated; delete set ip steerage hairpins; \
               add set ip steerage hairpins { type ipv4_addr . ipv4_addr ; size 2 ; }"]);
        proxy.dataplane.mark_out_of_sync();
        follow(&mut proxy, &two(4), &pods).unwrap();
        assert_eq!(ruleset(), loaded_at_once(&two(4), &pods));
    });
}

/// An agent was killed while it filled a new table: sets and some of their elements are there, the chains are not.
#[test]
fn interrupted_load_is_completed() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    in_new_netns(|| {
        follow(&mut Proxy::open(), &two(4), &pods).unwrap();
        let (table, mut nft) = (Table::new(Family::Ip, "steerage"), Nft::open().unwrap());
        let chains = nft.chains(&table).unwrap();
        let mut batch = Batch::new();
        for chain in &chains {
            batch.flush_chain(&table, chain);
        }
        for chain in &chains {
            batch.delete_chain(&table, chain);
        }
        batch.flush_set(&table, "slots-4");
        nft.commit(batch).unwrap();
        follow(&mut Proxy::open(), &two(4), &pods).unwrap();
        assert_eq!(ruleset(), loaded_at_once(&two(4), &pods));
    });
}

/// Others commit all the time: every read of ours is overtaken sooner or later. It still comes to an end, and to the right one.
#[test]
fn concurrent_commits_do_not_block_writes() {
    requires!(NetworkNamespace, Program("nft"));
    let pods = pod_networks();
    in_new_netns(|| {
        let (stop, commits) = (AtomicBool::new(false), std::sync::atomic::AtomicU32::new(0));
        let foreign = Table::new(Family::Ip, "foreign");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut nft = Nft::open().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let mut batch = Batch::new();
                    batch.add_table(&foreign, None);
                    batch.add_chain(&foreign, &Chain::regular("c")).delete_table(&foreign);
                    nft.commit(batch).unwrap();
                    commits.fetch_add(1, Ordering::Relaxed);
                }
            });
            let result = std::panic::catch_unwind(|| {
                for round in 0..10 {
                    let mut proxy = Proxy::open();
                    follow(&mut proxy, &two(4 + round), &pods).unwrap();
                    follow(&mut proxy, &two(5 + round), &pods).unwrap();
                    proxy.dataplane.mark_out_of_sync();
                    proxy.write(BTreeMap::new(), &pods).unwrap();
                }
            });
            stop.store(true, Ordering::Relaxed);
            result.unwrap();
        });
        println!("{} commits of others", commits.load(Ordering::Relaxed));
        assert_eq!(ruleset(), loaded_at_once(&two(14), &pods));
    });
}

/// The listing of our table of one family.
fn only(family: Family) -> Vec<String> {
    let of = format!("\"family\":\"{}\"", family.name());
    ruleset().into_iter().filter(|line| line.contains(&of)).collect()
}
