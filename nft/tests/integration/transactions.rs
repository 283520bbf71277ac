// SPDX-License-Identifier: Apache-2.0
//! Batches on the real kernel: atomic commits, errors that name the operation, and listings of what was committed. Each test
//! runs in its own network namespace and needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use steerage_nft::*;
use steerage_requirements::{in_new_netns, requires};

fn table() -> Table {
    Table::new(Family::Ip, "test")
}

fn entry(key: u32, value: u16) -> Element {
    Element::entry(concat(&[Field::Number(key)]), concat(&[Field::Port(value)]))
}

/// Loads a table with the map `m` from numbers to ports.
fn loaded() -> Nft {
    let mut nft = Nft::open().unwrap();
    let mut batch = Batch::new();
    batch
        .add_table(&table(), Some("for tests"))
        .add_set(&table(), &Set::new("m", &[DataType::Mark]).maps_to(&[DataType::InetService]))
        .add_chain(&table(), &Chain::regular("c"))
        .add_rule(&table(), "c", &Rule::new().counter().comment("first"))
        .add_rule(&table(), "c", &Rule::new().drop().comment("second"));
    nft.commit(batch).unwrap();
    nft
}

fn contents(nft: &mut Nft) -> BTreeSet<Element> {
    nft.elements(&table(), "m").unwrap().into_iter().collect()
}

#[test]
fn committed_objects_are_listed() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let info = nft.table(&table()).unwrap().unwrap();
        assert_eq!(info.comment.as_deref(), Some("for tests"));
        assert_eq!(nft.chains(&table()).unwrap(), ["c"]);
        assert_eq!(nft.sets(&table()).unwrap(), ["m"]);
        let comments: Vec<_> =
            nft.rules(&table()).unwrap().into_iter().map(|rule| rule.comment.unwrap()).collect();
        assert_eq!(comments, ["first", "second"]);
        assert_eq!(nft.table(&Table::new(Family::Ip6, "test")).unwrap(), None);
    });
}

#[test]
fn failed_batch_changes_nothing_and_names_operation() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let generation = nft.generation().unwrap();
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &[entry(1, 80)]);
        batch.delete_elements(&table(), "m", &[entry(7, 80)]);
        batch.add_rule(&table(), "missing", &Rule::new().drop().comment("lost"));
        let Err(Error::Kernel(error)) = nft.commit(batch) else { panic!("the batch was applied") };
        assert_eq!((error.errno, error.others), (Errno::ENOENT, 1));
        assert!(error.operation.contains("delete from set m of ip test"), "{error}");
        assert_eq!(contents(&mut nft), BTreeSet::new());
        assert_eq!(nft.generation().unwrap(), generation);
        // The connection still works.
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &[entry(1, 80)]);
        nft.commit(batch).unwrap();
        assert_eq!(contents(&mut nft), BTreeSet::from([entry(1, 80)]));
    });
}

#[test]
fn new_data_for_existing_key_needs_deletion_first() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &[entry(1, 80)]);
        nft.commit(batch.clone()).unwrap();
        nft.commit(batch).unwrap();
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &[entry(1, 81)]);
        let refused = nft.commit(batch);
        assert!(matches!(&refused, Err(Error::Kernel(r)) if r.errno == Errno::EEXIST), "{refused:?}");
        let mut batch = Batch::new();
        batch.delete_elements(&table(), "m", &[entry(1, 80)]).add_elements(&table(), "m", &[entry(1, 81)]);
        nft.commit(batch).unwrap();
        assert_eq!(contents(&mut nft), BTreeSet::from([entry(1, 81)]));
    });
}

#[test]
fn stale_generation_fails_commit_and_transaction_retries() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let old = nft.generation().unwrap();
        let foreign = || {
            let mut batch = Batch::new();
            batch.add_table(&Table::new(Family::Ip, "foreign"), None);
            batch.add_chain(&Table::new(Family::Ip, "foreign"), &Chain::regular("c"));
            batch.delete_table(&Table::new(Family::Ip, "foreign"));
            Nft::open().unwrap().commit(batch).unwrap();
        };
        foreign();
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &[entry(1, 80)]);
        assert!(matches!(nft.commit_at(batch.clone(), old), Err(Error::StaleGeneration)));
        assert_eq!(contents(&mut nft), BTreeSet::new());

        let mut tries = 0;
        nft.transact(|_| {
            tries += 1;
            if tries < 3 {
                foreign();
            }
            Ok::<_, Error>(batch.clone())
        })
        .unwrap();
        assert_eq!(tries, 3);
        assert_eq!(contents(&mut nft).len(), 1);
        let overtaken = nft.transact(|_| {
            foreign();
            Ok::<_, Error>(batch.clone())
        });
        assert!(matches!(overtaken, Err(Error::StaleGeneration)));
    });
}

#[test]
fn large_batch_is_split_and_applied_completely() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let elements: Vec<_> = (0..100_000).map(|n| entry(n, 80)).collect();
        let mut batch = Batch::new();
        batch.add_elements(&table(), "m", &elements);
        assert!(batch.len() > 2 << 20);
        nft.commit(batch).unwrap();
        assert_eq!(contents(&mut nft), elements.iter().cloned().collect());
        let mut batch = Batch::new();
        batch.delete_elements(&table(), "m", &elements);
        nft.commit(batch).unwrap();
        assert!(contents(&mut nft).is_empty());
    });
}

#[test]
fn destroy_table_accepts_missing_table() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        for _ in 0..2 {
            let mut batch = Batch::new();
            batch.destroy_table(&table());
            nft.commit(batch).unwrap();
            assert_eq!(nft.tables(Family::Ip).unwrap(), []);
        }
        assert!(nft.elements(&table(), "m").unwrap_err().is_not_found());
    });
}

#[test]
fn timeouts_ranges_and_verdicts_are_listed() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let pair = [DataType::Ipv4Addr, DataType::InetService];
        let mut batch = Batch::new();
        batch
            .add_set(&table(), &Set::new("expiring", &[DataType::Mark]).expiring(None))
            .add_set(&table(), &Set::new("ranges", &pair).interval())
            .add_set(&table(), &Set::new("verdicts", &[DataType::Mark]).maps_to_verdict());
        let short = Element::key(concat(&[Field::Number(1)])).expires(Duration::from_millis(200));
        let long = Element::key(concat(&[Field::Number(2)]));
        let ends = |address: [u8; 4], port| concat(&[Field::V4(address.into()), Field::Port(port)]);
        let range = Element::range(ends([10, 0, 0, 0], 80), ends([10, 0, 0, 255], 80));
        let verdict = Element::verdict(concat(&[Field::Number(5)]), Verdict::Goto("c".to_owned()));
        batch.add_elements(&table(), "expiring", &[short, long.clone()]);
        batch.add_elements(&table(), "ranges", std::slice::from_ref(&range));
        batch.add_elements(&table(), "verdicts", std::slice::from_ref(&verdict));
        nft.commit(batch).unwrap();
        assert_eq!(nft.elements(&table(), "ranges").unwrap(), [range]);
        assert_eq!(nft.elements(&table(), "verdicts").unwrap(), [verdict]);
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(nft.elements(&table(), "expiring").unwrap(), [long]);
    });
}

#[test]
fn kernel_rejects_rule_that_exceeds_registers() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut nft = loaded();
        let wide = vec![Expression::daddr(Family::Ip6); 5];
        let mut batch = Batch::new();
        batch.add_rule(&table(), "c", &Rule::new().load(&wide).drop());
        assert!(matches!(nft.commit(batch), Err(Error::Kernel(_))));
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn incremental_updates_equal_full_load(
        states in proptest::collection::vec(proptest::collection::btree_map(0_u32..40, 1_u16..4, 0..40), 1..8)
    ) {
        requires!(Ok(()); NetworkNamespace);
        in_new_netns(|| {
            let mut nft = loaded();
            let mut now: BTreeMap<u32, u16> = BTreeMap::new();
            for next in &states {
                let elements = |of: &BTreeMap<u32, u16>, other: &BTreeMap<u32, u16>| {
                    let differs = |(key, value): &(&u32, &u16)| other.get(key) != Some(value);
                    of.iter().filter(differs).map(|(key, value)| entry(*key, *value)).collect::<Vec<_>>()
                };
                let mut batch = Batch::new();
                batch
                    .delete_elements(&table(), "m", &elements(&now, next))
                    .add_elements(&table(), "m", &elements(next, &now));
                nft.commit(batch).unwrap();
                now.clone_from(next);
            }
            let wanted: BTreeSet<_> = now.iter().map(|(key, value)| entry(*key, *value)).collect();
            assert_eq!(contents(&mut nft), wanted);
        });
    }
}

#[test]
fn elements_are_read_by_their_keys() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let table = Table::new(Family::Ip, "ours");
        let set = Set::new("map", &[DataType::Mark, DataType::Mark]).maps_to(&[DataType::Mark]);
        let shape = set.row_shape();
        // Runs of elements that exist, and of others, also longer than one request.
        let exists = |n: u32| n < 3000 || (n < 4000 && n.is_multiple_of(3)) || n == 7999;
        let mut rows = Rows::new(shape);
        for n in (0..8000).filter(|n| exists(*n)) {
            rows.push_entry(&[Field::Number(n), Field::Number(1)], &[Field::Number(n + 1)]);
        }
        rows.sort();
        let mut batch = Batch::new();
        batch.add_table(&table, None).add_set(&table, &set).add_rows(&table, "map", rows.iter());
        let mut nft = Nft::open().unwrap();
        nft.commit(batch).unwrap();
        let keys = |range: std::ops::Range<u32>| {
            range.map(|n| concat(&[Field::Number(n), Field::Number(1)])).collect::<Vec<_>>()
        };
        assert_eq!(nft.rows_at(&table, "map", shape, keys(0..8000)).unwrap(), rows);
        assert_eq!(nft.rows_at(&table, "map", shape, keys(2990..3010)).unwrap().len(), 10 + 4);
        assert!(nft.rows_at(&table, "map", shape, keys(5000..5003)).unwrap().is_empty());
        assert!(nft.rows_at(&table, "map", shape, Vec::<Vec<u8>>::new()).unwrap().is_empty());
        assert!(nft.rows_at(&table, "none", shape, keys(0..2)).unwrap().is_empty());
        // The connection is not confused by what it did not read.
        assert_eq!(nft.rows(&table, "map", shape).unwrap(), rows);
    });
}
