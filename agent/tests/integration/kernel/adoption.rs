// SPDX-License-Identifier: Apache-2.0
//! A new process takes over long lists by their digests, and what another program did to them while no agent ran is repaired.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use steerage_agent::foreign::ForeignChange;
use steerage_agent::kernel::Written;
use steerage_agent::rules::{BaseRuleset, KernelLists, KernelState, SetId, Side, TABLE, kernel_lists};
use steerage_model::{Family, Key, ServiceKind};
use steerage_nft::{Batch, Change, Element, Field, Nft, ObjectKind, Row, Rows, Table, concat};
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::cluster::{Proxy, Spec, World, plans, pod_networks};
use crate::kernel::ruleset::ruleset;

/// Endpoints of the first Service: a list of class 64.
pub(super) const COUNT: u16 = 40;

pub(super) fn world(first: u16, elsewhere: u16) -> World {
    let spec = |first, elsewhere| Spec { kind: ServiceKind::ClusterIp, first, elsewhere, ..Spec::default() };
    [(1, spec(first, elsewhere)), (2, spec(500, 10)), (3, spec(600, 3))].into()
}

pub(super) fn follow(proxy: &mut Proxy, world: &World) -> Written {
    let gone: Vec<_> = proxy.ruleset.desired().services().cloned().collect();
    proxy.write(plans(world, gone), &pod_networks()).unwrap()
}

pub(super) fn nothing(proxy: &mut Proxy) -> Written {
    proxy.write(BTreeMap::new(), &pod_networks()).unwrap()
}

pub(super) fn table() -> Table {
    Table::new(steerage_nft::Family::Ip, TABLE)
}

/// The endpoints of all lists as the kernel has them, slot by slot.
fn lists() -> KernelLists {
    let endpoints = SetId::Endpoints;
    let shape = endpoints.row_shape(Family::V4);
    kernel_lists(&Nft::open().unwrap().rows(&table(), &endpoints.name(), shape).unwrap())
}

/// The digests that the kernel has.
fn digests() -> Rows {
    let digests = SetId::Digests;
    Nft::open().unwrap().rows(&table(), &digests.name(), digests.row_shape(Family::V4)).unwrap()
}

/// The number of the list of the first Service's port.
fn list(proxy: &Proxy) -> u32 {
    *proxy.ruleset.lists_of([&Key::new("shop", "s1")], Family::V4).first().expect("a long list")
}

fn slot(list: u32, slot: u32) -> Vec<u8> {
    concat(&[Field::Number(list), Field::Number(slot)])
}

fn end(host: u8) -> Vec<u8> {
    concat(&[Field::V4([10, 9, 9, host].into()), Field::Port(9)])
}

/// Lists with a history, so that their order is not that of a new process.
pub(super) fn shuffled() -> Proxy {
    let mut proxy = Proxy::open();
    follow(&mut proxy, &world(100, COUNT));
    follow(&mut proxy, &world(101, COUNT));
    follow(&mut proxy, &world(90, COUNT));
    proxy
}

#[test]
fn new_process_believes_digests_and_writes_nothing() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let before = {
            shuffled();
            lists()
        };
        let mut proxy = Proxy::open();
        let written = follow(&mut proxy, &world(90, COUNT));
        assert_eq!(written, Written { full: true, ..Written::default() });
        assert!(proxy.dataplane.has_unread_lists());
        assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 0, "they are what they should be");
        assert!(!proxy.dataplane.has_unread_lists() && proxy.dataplane.state() == KernelState::InSync);
        assert_eq!(lists(), before);
        // Also to a comparison of everything, because their order is known now.
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// Another program commits something else during the first comparison, which is then repeated. It has not touched the tables: lists are
/// still believed.
#[test]
fn commit_of_another_program_does_not_have_lists_read() {
    requires!(NetworkNamespace, Program("nft"));
    let is_met = || {
        in_new_netns(|| {
            drop(shuffled());
            let (mut proxy, stop) = (Proxy::open(), Arc::new(AtomicBool::new(false)));
            let is_over = Arc::clone(&stop);
            proxy.dataplane.watch_foreign(move |_| !is_over.load(Ordering::Relaxed));
            let first = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut nft, other) =
                        (Nft::open().unwrap(), Table::new(steerage_nft::Family::Ip, "other"));
                    while !stop.load(Ordering::Relaxed) {
                        let mut batch = Batch::new();
                        batch.destroy_table(&other);
                        nft.commit(batch).unwrap();
                        std::thread::sleep(Duration::from_micros(500));
                    }
                });
                let first = follow(&mut proxy, &world(90, COUNT));
                stop.store(true, Ordering::Relaxed);
                first
            });
            // Between two commits, or replaced because of too many.
            if proxy.dataplane.state() == KernelState::InSync || first.elements > 0 {
                return false;
            }
            let second = nothing(&mut proxy);
            assert_eq!(second, Written { full: true, ..Written::default() });
            assert_eq!(proxy.dataplane.state(), KernelState::InSync);
            assert!(proxy.dataplane.has_unread_lists(), "they were read");
            assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 0);
            true
        })
    };
    assert!((0..100).any(|_| is_met()), "nobody committed during a comparison");
}

/// An endpoint is replaced: of three protocols in two families, an element goes, and one comes, with their digests.
#[test]
fn change_after_adoption_reads_the_list_before() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        drop(shuffled());
        let before = lists();
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        let written = follow(&mut proxy, &world(91, COUNT));
        assert_eq!(written.elements, 6 * (2 + 2), "{written:?}");
        let number = list(&proxy);
        let moved = lists()[&number].iter().zip(&before[&number]).filter(|(new, old)| new != old).count();
        assert_eq!(moved, 1, "all others keep their slots");
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

#[test]
fn list_that_changed_while_no_agent_ran_is_read_and_keeps_its_order() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        drop(shuffled());
        let before = lists();
        let mut proxy = Proxy::open();
        let written = follow(&mut proxy, &world(91, COUNT));
        assert_eq!(written.elements, 6 * (2 + 2), "{written:?}");
        let number = list(&proxy);
        let moved = lists()[&number].iter().zip(&before[&number]).filter(|(new, old)| new != old).count();
        assert_eq!(moved, 1);
        // Gone, and shorter than a list.
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(91, 5));
        assert!(!lists().contains_key(&number));
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// Another program changed a list while no agent ran, so its digest is wrong: adopted as it is, then found and repaired.
#[test]
fn foreign_change_while_no_agent_ran_is_found_and_repaired() {
    requires!(NetworkNamespace, Program("nft"));
    for harm in ["deleted", "exchanged", "beyond its end", "all deleted"] {
        in_new_netns(|| {
            let number = list(&shuffled());
            let whole = lists();
            let (table, endpoints) = (table(), SetId::Endpoints.name());
            let mut batch = Batch::new();
            match harm {
                "deleted" => {
                    batch.delete_elements(&table, &endpoints, &[Element::key(slot(number, 7))]);
                }
                "exchanged" => {
                    batch.delete_elements(&table, &endpoints, &[Element::key(slot(number, 7))]);
                    batch.add_elements(&table, &endpoints, &[Element::entry(slot(number, 7), end(1))]);
                }
                // Packets look at the slots of the whole class.
                "beyond its end" => {
                    let foreign = Element::entry(slot(number, 63), end(1));
                    batch.add_elements(&table, &endpoints, &[foreign]);
                }
                _ => {
                    batch.flush_set(&table, &endpoints);
                }
            }
            Nft::open().unwrap().commit(batch).unwrap();
            let mut proxy = Proxy::open();
            assert_eq!(follow(&mut proxy, &world(90, COUNT)).elements, 0, "{harm}: adopted");
            let differing = proxy.dataplane.read_all_lists(&mut proxy.ruleset);
            // Of three protocols and two Services.
            assert_eq!(differing, if harm == "all deleted" { 6 } else { 1 }, "{harm}");
            let found = proxy.dataplane.take_found().to_string();
            assert!(
                found.starts_with("ip steerage: ") && found.ends_with(" of endpoints"),
                "{harm}: {found}"
            );
            assert_eq!(proxy.dataplane.state(), KernelState::InSync, "{harm}");
            let slots = |lists: &BTreeMap<u32, Vec<_>>| -> BTreeMap<_, _> {
                lists.iter().map(|(number, slots)| (*number, slots.len())).collect()
            };
            assert_eq!(slots(&lists()), slots(&whole), "{harm}");
            if harm != "all deleted" {
                assert_eq!(lists(), whole, "{harm}: each endpoint has its slot");
            }
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(nothing(&mut proxy).elements, 0, "{harm}");
        });
    }
}

/// Digests themselves are wrong, or gone: the lists are compared.
#[test]
fn foreign_digests_are_not_believed() {
    requires!(NetworkNamespace, Program("nft"));
    for harm in ["exchanged", "too long", "gone", "all gone", "foreign"] {
        in_new_netns(|| {
            let number = list(&shuffled());
            let (table, digests) = (table(), SetId::Digests.name());
            let key = |list| concat(&[Field::Number(list)]);
            let digest = |length| concat(&[length, 1, 2].map(Field::Number));
            let mut batch = Batch::new();
            match harm {
                "exchanged" | "too long" => {
                    let length = if harm == "too long" { u32::MAX } else { COUNT.into() };
                    batch.delete_elements(&table, &digests, &[Element::key(key(number))]);
                    batch.add_elements(&table, &digests, &[Element::entry(key(number), digest(length))]);
                }
                "gone" => {
                    batch.delete_elements(&table, &digests, &[Element::key(key(number))]);
                }
                "all gone" => {
                    batch.flush_set(&table, &digests);
                }
                _ => {
                    batch.add_elements(&table, &digests, &[Element::entry(key(7), digest(100))]);
                }
            }
            Nft::open().unwrap().commit(batch).unwrap();
            let mut proxy = Proxy::open();
            let gone = proxy.ruleset.desired().services().cloned().collect::<Vec<_>>();
            // Without a digest, slots are taken to be free. If they are not, the first write is refused, and the next one compares
            // everything.
            if proxy.write(plans(&world(90, COUNT), gone), &pod_networks()).is_err() {
                assert!(harm.ends_with("gone"), "{harm}");
                nothing(&mut proxy);
            }
            proxy.dataplane.read_all_lists(&mut proxy.ruleset);
            if proxy.dataplane.state() == KernelState::Unknown {
                nothing(&mut proxy);
            }
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(nothing(&mut proxy).elements, 0, "{harm}");
            let fresh = in_new_netns(|| {
                follow(&mut Proxy::open(), &world(90, COUNT));
                ruleset()
            });
            assert_eq!(ruleset(), fresh, "{harm}");
        });
    }
}

/// A repair of what a notification names takes over the order of lists that were only believed. The comparison after it believes lists
/// again, unless the repair failed or not all of the change is known.
#[test]
fn repair_of_a_believed_list_keeps_its_order() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let number = list(&shuffled());
        let whole = lists();
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        let mut batch = Batch::new();
        batch.delete_elements(&table(), &SetId::Endpoints.name(), &[Element::key(slot(number, 3))]);
        Nft::open().unwrap().commit(batch).unwrap();
        assert!(proxy.dataplane.has_unread_lists());
        let mut change = ForeignChange::default();
        let name = Some(SetId::Endpoints.name());
        change.add(Change {
            port: 1,
            table: table(),
            object: ObjectKind::Elements,
            name,
            deleted: true,
            is_dormant: false,
            base: None,
        });
        assert_eq!(proxy.dataplane.repair_first(&mut proxy.ruleset, &change).unwrap(), 1);
        assert_eq!(lists(), whole);
        for is_repaired in [true, false] {
            proxy.dataplane.foreign_change_noticed(is_repaired);
            assert!(!proxy.dataplane.has_unread_lists(), "first the tables are compared");
            let written = nothing(&mut proxy);
            assert!(written.full && written.elements == 0, "{written:?}");
            assert_eq!(proxy.dataplane.has_unread_lists(), is_repaired);
            assert_eq!(lists(), whole);
        }
    });
}

/// What the monitor tells can be less than what was done, and a listing can lack elements: lists are read after the comparison all the
/// same, and so are slots that a list grows into.
#[test]
fn lists_that_a_repair_left_wrong_are_found_between_updates() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let number = list(&shuffled());
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        proxy.dataplane.mark_out_of_sync();
        nothing(&mut proxy);
        proxy.dataplane.read_all_lists(&mut proxy.ruleset);
        let whole = lists();
        let mut batch = Batch::new();
        batch.delete_elements(&table(), &SetId::Endpoints.name(), &[Element::key(slot(number, 3))]);
        Nft::open().unwrap().commit(batch).unwrap();
        proxy.dataplane.foreign_change_noticed(true);
        let written = nothing(&mut proxy);
        assert!(written.full && written.elements == 0, "{written:?}");
        assert_ne!(lists(), whole, "the digests are what they were");
        let mut rounds = 0;
        while proxy.dataplane.has_unread_lists() {
            proxy.dataplane.read_some_lists(&mut proxy.ruleset);
            rounds += 1;
            assert!(rounds < 100, "they are read in a few steps");
        }
        assert!(!proxy.dataplane.take_found().is_empty());
        assert_eq!(lists()[&number].len(), whole[&number].len());
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// A change of a Service reads and repairs its believed list before, and other lists stay believed.
#[test]
fn change_of_a_service_repairs_its_believed_list_before() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let number = list(&shuffled());
        let mut batch = Batch::new();
        batch.delete_elements(&table(), &SetId::Endpoints.name(), &[Element::key(slot(number, 3))]);
        Nft::open().unwrap().commit(batch).unwrap();
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        let only = plans(&[(1, world(91, COUNT)[&1].clone())].into(), []);
        let written = proxy.write(only, &pod_networks()).unwrap();
        assert_eq!((written.wrong_lists, written.full), (1, false), "{written:?}");
        assert!(proxy.dataplane.has_unread_lists());
        assert!(!proxy.dataplane.take_found().is_empty());
        assert_eq!(lists()[&number].len(), usize::from(COUNT));
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// Services are deleted soon after a start, before their lists are read. If an element is missing the write is refused, and the next one
/// compares everything.
#[test]
fn list_that_ends_after_a_start_is_deleted_unread() {
    requires!(NetworkNamespace, Program("nft"));
    for harm in ["exchanged", "deleted"] {
        in_new_netns(|| {
            let number = list(&shuffled());
            let (table, endpoints, third) = (table(), SetId::Endpoints.name(), slot(number, 3));
            let mut batch = Batch::new();
            batch.delete_elements(&table, &endpoints, &[Element::key(third.clone())]);
            if harm == "exchanged" {
                batch.add_elements(&table, &endpoints, &[Element::entry(third, end(1))]);
            }
            Nft::open().unwrap().commit(batch).unwrap();
            let mut proxy = Proxy::open();
            follow(&mut proxy, &world(90, COUNT));
            let mut fewer = world(90, COUNT);
            fewer.remove(&1);
            let gone = plans(&fewer, [Key::new("shop", "s1")]);
            match proxy.write(gone, &pod_networks()) {
                Ok(written) => assert_eq!((written.wrong_lists, harm), (0, "exchanged"), "it was read"),
                Err(error) => {
                    assert!(error.is_not_found() && harm == "deleted", "{harm}: {error}");
                    assert!(nothing(&mut proxy).full);
                }
            }
            assert!(!lists().contains_key(&number), "{harm}");
            proxy.dataplane.read_all_lists(&mut proxy.ruleset);
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(nothing(&mut proxy).elements, 0, "{harm}");
        });
    }
}

/// A table of another version or without all chains is replaced, and one without digests is believed in nothing: endpoints keep their
/// slots all the same.
#[test]
fn upgrade_keeps_the_order_of_lists() {
    requires!(NetworkNamespace, Program("nft"));
    for other in ["version", "digests", "base chain"] {
        in_new_netns(|| {
            let mut before = Proxy::open();
            before.ruleset.set_forward_to_peers(other == "version");
            for first in [100, 101, 90] {
                follow(&mut before, &world(first, COUNT));
            }
            let mut batch = Batch::new();
            for table in [table(), Table::new(steerage_nft::Family::Ip6, TABLE)] {
                match other {
                    "digests" => _ = batch.delete_set(&table, &SetId::Digests.name()),
                    "base chain" => _ = batch.delete_chain(&table, "output"),
                    _ => {}
                }
            }
            Nft::open().unwrap().commit(batch).unwrap();
            let whole = lists();
            let mut proxy = Proxy::open();
            let written = follow(&mut proxy, &world(90, COUNT));
            // The digests of three protocols and two Services in two families, or everything.
            let is_enough = if other == "digests" { written.elements == 12 } else { written.elements > 300 };
            assert!(is_enough, "{written:?}");
            assert_eq!(lists(), whole, "{other}");
            assert!(!proxy.dataplane.has_unread_lists(), "{other}: all of them were read or written");
            assert_eq!(digests().len(), 6, "{other}");
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(nothing(&mut proxy).elements, 0, "{other}");
        });
    }
}

/// A process that is killed while it loads a new table leaves digests, and some of the lists.
#[test]
fn table_that_was_loaded_in_part_is_not_believed() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let proxy = shuffled();
        let whole = lists();
        let mut batch = Batch::new();
        batch.flush_set(&table(), &SetId::Endpoints.name());
        let chains = BaseRuleset::new(steerage_nft::Family::Ip, proxy.ruleset.config()).chains;
        for chain in chains.iter().filter(|chain| chain.chain.is_base()) {
            batch.delete_chain(&table(), &chain.name);
        }
        Nft::open().unwrap().commit(batch).unwrap();
        drop(proxy);
        let mut proxy = Proxy::open();
        assert!(follow(&mut proxy, &world(90, COUNT)).elements > 150);
        let lengths = |lists: KernelLists| lists.into_iter().map(|(list, slots)| (list, slots.len()));
        assert!(lengths(lists()).eq(lengths(whole)));
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// A list whose digest is gone is taken to be new. It is read afterwards, too: packets look beyond its end.
#[test]
fn list_that_seems_new_is_read_afterwards() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let number = list(&shuffled());
        let (table, endpoints) = (table(), SetId::Endpoints.name());
        let mut batch = Batch::new();
        let key = Element::key(concat(&[Field::Number(number)]));
        batch.delete_elements(&table, &SetId::Digests.name(), &[key]);
        let slots: Vec<_> = (0..u32::from(COUNT)).map(|at| Element::key(slot(number, at))).collect();
        batch.delete_elements(&table, &endpoints, &slots);
        batch.add_elements(&table, &endpoints, &[Element::entry(slot(number, 63), end(1))]);
        Nft::open().unwrap().commit(batch).unwrap();
        let mut proxy = Proxy::open();
        assert_eq!(follow(&mut proxy, &world(90, COUNT)).elements, usize::from(COUNT) + 1);
        assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 1);
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// The list's number was another one's before, whose endpoints another tenant has chosen for their digest.
#[test]
fn list_of_other_frontends_is_not_believed() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let number = list(&shuffled());
        let whole = lists();
        let (table, endpoints, frontends) = (table(), SetId::Endpoints.name(), SetId::Lists(Side::Cluster));
        let mut nft = Nft::open().unwrap();
        let rows = nft.rows(&table, &frontends.name(), frontends.row_shape(Family::V4)).unwrap();
        let of_list = |row: &Row<'_>| row.data == Some(&number.to_ne_bytes());
        let keys: Vec<_> = rows.iter().filter(of_list).map(|row| row.key.to_vec()).collect();
        assert!(!keys.is_empty());
        let mut batch = Batch::new();
        for key in keys {
            batch.delete_elements(&table, &frontends.name(), &[Element::key(key.clone())]);
            let other = concat(&[Field::Number(number.wrapping_add(1))]);
            batch.add_elements(&table, &frontends.name(), &[Element::entry(key, other)]);
        }
        batch.delete_elements(&table, &endpoints, &[Element::key(slot(number, 7))]);
        batch.add_elements(&table, &endpoints, &[Element::entry(slot(number, 7), end(1))]);
        nft.commit(batch).unwrap();
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        let sorted = |lists: &KernelLists| {
            let mut slots = lists[&number].clone();
            slots.sort_unstable();
            slots
        };
        assert_eq!(sorted(&lists()), sorted(&whole), "with the first write");
        proxy.dataplane.read_all_lists(&mut proxy.ruleset);
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// Slots beyond a list's class are nobody's business until the list grows into them.
#[test]
fn list_that_grows_after_a_start_is_read() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let few = 12;
        let number = {
            let mut proxy = Proxy::open();
            follow(&mut proxy, &world(100, few));
            list(&proxy)
        };
        let mut batch = Batch::new();
        batch.add_elements(&table(), &SetId::Endpoints.name(), &[Element::entry(slot(number, 40), end(1))]);
        Nft::open().unwrap().commit(batch).unwrap();
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(100, few));
        assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 0, "no packet looks there");
        follow(&mut proxy, &world(100, few + 8));
        assert!(proxy.dataplane.has_unread_lists());
        assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 1);
        assert_eq!(lists()[&number].len(), usize::from(few) + 8);
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
        // Everything was compared: from now on nobody else's slots are there.
        follow(&mut proxy, &world(100, few + 60));
        assert!(!proxy.dataplane.has_unread_lists());
    });
}

/// A change of the node concerns all Services, and no endpoint.
#[test]
fn update_without_other_endpoints_reads_no_list() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        drop(shuffled());
        let mut proxy = Proxy::open();
        follow(&mut proxy, &world(90, COUNT));
        let number = list(&proxy);
        let mut batch = Batch::new();
        batch.delete_elements(&table(), &SetId::Endpoints.name(), &[Element::key(slot(number, 3))]);
        Nft::open().unwrap().commit(batch).unwrap();
        let mut other = world(90, COUNT);
        other.get_mut(&1).unwrap().kind = ServiceKind::NodePort;
        let written = proxy.write(plans(&other, []), &pod_networks()).unwrap();
        assert_eq!((written.wrong_lists, proxy.dataplane.has_unread_lists()), (0, true), "{written:?}");
        assert_eq!(proxy.dataplane.read_all_lists(&mut proxy.ruleset), 1);
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(nothing(&mut proxy).elements, 0);
    });
}

/// No rule refers to the map of digests, so that `nft` makes it anew with another type, or a small one.
#[test]
fn map_of_digests_of_another_type_is_replaced() {
    requires!(NetworkNamespace, Program("nft"));
    for definition in
        ["type mark : mark ;", "typeof meta mark : meta mark . meta mark . meta mark ; size 1 ;"]
    {
        in_new_netns(|| {
            let mut proxy = shuffled();
            let whole = digests();
            for line in [
                "delete map ip steerage digests".to_owned(),
                format!("add map ip steerage digests {{ {definition} }}"),
            ] {
                assert!(Command::new("nft").arg(&line).status().unwrap().success(), "nft {line}");
            }
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(nothing(&mut proxy).elements, whole.len(), "{definition}");
            assert_eq!(digests(), whole);
            assert_eq!(follow(&mut proxy, &world(91, COUNT)).elements, 6 * (2 + 2));
        });
    }
}
