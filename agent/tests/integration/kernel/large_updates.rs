// SPDX-License-Identifier: Apache-2.0
//! Updates of more elements than one transaction should have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use steerage_agent::kernel::{Noticed, Written};
use steerage_agent::local_node::LocalNode;
use steerage_agent::plan::{ElementLimits, ServicePlan, plan_service};
use steerage_agent::rules::{LARGEST_STEP, Ruleset, SetId, TABLE};
use steerage_model::{
    Endpoint, EndpointPort, EndpointSlice, Family, Key, Protocol, Service, ServicePort, names,
};
use steerage_nft::{
    Batch, Element, Errno, Error, Field, Monitor, Nft, Notification, ObjectKind, Rows, Table, concat,
};
use steerage_requirements::{in_new_netns, requires};
use steerage_watch::{Event, Index};

use crate::kernel::cluster::{Proxy, pod_networks};

fn key() -> Key {
    Key::new("shop", "large")
}

/// A Service of so many ports and endpoints, whose addresses are counted from `first` on.
fn large(ports: u16, first: u32, endpoints: u32) -> BTreeMap<Key, ServicePlan> {
    large_of(Protocol::Tcp, ports, first, endpoints)
}

fn large_of(protocol: Protocol, ports: u16, first: u32, endpoints: u32) -> BTreeMap<Key, ServicePlan> {
    let service = Service {
        cluster_ips: vec![IpAddr::from([10, 96, 0, 1])],
        ports: (1..=ports).map(|port| ServicePort::new(port.to_string(), protocol, port, None)).collect(),
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(key())
    };
    let port = |port: u16| EndpointPort { name: port.to_string(), protocol, port: 8000 + port };
    let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(0x0af4_0000 + n).into(), "other");
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    index.apply_slice(Event::Apply(EndpointSlice {
        ports: (1..=ports).map(port).collect(),
        endpoints: (first..first + endpoints).map(endpoint).collect(),
        ..EndpointSlice::new(Key::new("shop", "large-1"), key(), Family::V4)
    }));
    let limits = ElementLimits { service: 1_000_000, namespace: 1_000_000 };
    let place = LocalNode { node: "node".to_owned(), element_limits: limits, ..LocalNode::default() };
    [(key(), plan_service(&service, &index, &place))].into()
}

/// A writer whose tables exist, with somebody who listens.
fn open() -> Proxy {
    let mut proxy = Proxy::open();
    proxy.dataplane.watch_foreign(|noticed| !matches!(noticed, Noticed::Change(_)));
    for _ in 0..2 {
        // The first comparison believes digests.
        proxy.dataplane.mark_out_of_sync();
        write(&mut proxy, BTreeMap::new()).unwrap();
    }
    proxy
}

fn write(proxy: &mut Proxy, plans: BTreeMap<Key, ServicePlan>) -> Result<Written, Error> {
    proxy.write(plans, &pod_networks())
}

/// How often others could have committed, and the longest time for which a commit of another program waited.
fn beside<T>(work: impl FnOnce() -> T) -> (T, u32, Duration) {
    beside_from(0, work)
}

/// The same, of commits after the first one of `work` where `skip` is 1: what somebody else writes while everything is compared has it
/// compared again.
fn beside_from<T>(skip: u32, work: impl FnOnce() -> T) -> (T, u32, Duration) {
    let (stop, mut nft) = (AtomicBool::new(false), Nft::open().unwrap());
    let (before, mut own) = (nft.generation().unwrap(), 0);
    let (result, longest) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let (mut nft, table) = (Nft::open().unwrap(), Table::new(steerage_nft::Family::Ip, "other"));
            let (mut longest, mut own) = (Duration::ZERO, 0);
            while !stop.load(Ordering::Relaxed) && nft.generation().unwrap() < before + skip {
                std::thread::sleep(Duration::from_millis(1));
            }
            while !stop.load(Ordering::Relaxed) {
                let mut batch = Batch::new();
                batch.destroy_table(&table);
                let begun = Instant::now();
                nft.commit(batch).unwrap();
                longest = longest.max(begun.elapsed());
                own += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            (longest, own)
        });
        let result = work();
        stop.store(true, Ordering::Relaxed);
        let (longest, count) = other.join().unwrap();
        own = count;
        (result, longest)
    });
    (result, nft.generation().unwrap() - before - own, longest)
}

/// `cargo test … large_updates -- --nocapture` prints the times; docs/performance.md has some.
#[test]
fn large_update_is_written_in_steps() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut proxy = open();
        let (ports, endpoints) = (50, 5_000);
        for (what, plans) in [
            ("added", large(ports, 0, endpoints)),
            ("exchanged", large(ports, 10_000, endpoints)),
            ("halved", large(ports, 10_000, endpoints / 2)),
            ("deleted", [(key(), ServicePlan::default())].into()),
        ] {
            let begun = Instant::now();
            let (written, transactions, longest) = beside(|| write(&mut proxy, plans).unwrap());
            let took = begun.elapsed();
            println!(
                "{what}: {} elements in {transactions} transactions, {took:?}; another program waited {longest:?}",
                written.elements
            );
            assert!(!written.full && written.elements > 7 * LARGEST_STEP, "{written:?}");
            let least =
                if what == "exchanged" { ports.into() } else { written.elements.div_ceil(LARGEST_STEP) };
            // A list whose endpoints are all replaced is one transaction.
            let most = if what == "exchanged" { ports.into() } else { least + 4 };
            assert!((least..=most).contains(&(transactions as usize)), "{transactions}, not {least}");
        }
        write(&mut proxy, large(ports, 0, endpoints)).unwrap();
        // Another program changed something else, which is repaired: lists are read afterwards, in parts.
        for is_repaired in [true, false] {
            proxy.dataplane.foreign_change_noticed(is_repaired);
            let begun = Instant::now();
            assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0);
            let compared = begun.elapsed();
            let (mut reads, mut longest) = (0, Duration::ZERO);
            while proxy.dataplane.has_unread_lists() {
                let begun = Instant::now();
                assert_eq!(proxy.dataplane.read_some_lists(&mut proxy.ruleset), 0);
                (reads, longest) = (reads + 1, longest.max(begun.elapsed()));
            }
            println!(
                "compared in {compared:?}, then {reads} reads of at most {longest:?}; repaired: {is_repaired}"
            );
            assert_eq!(reads > 0, is_repaired);
        }
        // The kernel holds what is wanted.
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0);
    });
}

/// What a start costs that finds a large table as it should be: the rules are compared with those of a table without elements.
#[test]
fn start_at_a_large_table_writes_nothing_to_it() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let plans = large(50, 0, 5_000);
        write(&mut open(), plans.clone()).unwrap();
        let table = Table::new(steerage_nft::Family::Ip, TABLE);
        let mut nft = Nft::open().unwrap();
        let rules = nft.rules(&table).unwrap();
        let mut proxy = Proxy::open();
        proxy.dataplane.watch_foreign(|noticed| !matches!(noticed, Noticed::Change(_)));
        let begun = Instant::now();
        let written = write(&mut proxy, plans).unwrap();
        println!("started in {:?}: {:?}", begun.elapsed(), proxy.dataplane.writes());
        assert_eq!(written, Written { full: true, ..Written::default() });
        assert_eq!(nft.rules(&table).unwrap(), rules, "with the same handles");
        assert!(proxy.dataplane.has_unread_lists(), "no list is read");
        assert_eq!(nft.tables(steerage_nft::Family::Ip).unwrap().len(), 1, "the trial is over");
    });
}

/// Another program emptied a map, and deleted a chain's rules.
#[test]
fn large_repair_is_written_in_steps_unless_rules_are_missing() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut proxy = open();
        write(&mut proxy, large(20, 0, 2_500)).unwrap();
        let (table, endpoints) = (Table::new(steerage_nft::Family::Ip, TABLE), SetId::Endpoints.name());
        for harm in ["elements", "elements and rules"] {
            let mut batch = Batch::new();
            batch.flush_set(&table, &endpoints);
            if harm != "elements" {
                let chains = Nft::open().unwrap().chains(&table).unwrap();
                batch.flush_chain(&table, chains.first().unwrap());
            }
            Nft::open().unwrap().commit(batch).unwrap();
            proxy.dataplane.mark_out_of_sync();
            let (written, transactions, longest) =
                beside_from(1, || write(&mut proxy, BTreeMap::new()).unwrap());
            println!("{harm}: {transactions} transactions; another program waited {longest:?}");
            assert!(written.full && written.elements >= 20 * 2_500, "{harm}: {written:?}");
            let least = if harm == "elements" { 50_000 / LARGEST_STEP } else { 1 };
            assert!((least..least + 4).contains(&(transactions as usize)), "{harm}: {transactions}");
            proxy.dataplane.mark_out_of_sync();
            assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0, "{harm}");
        }
    });
}

/// A step in the middle is refused. Those before it stay, and the next write makes it good.
#[test]
fn refused_step_is_repaired() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut proxy = open();
        write(&mut proxy, large(10, 0, 2_000)).unwrap();
        let table = Table::new(steerage_nft::Family::Ip, TABLE);
        let [list, ..] =
            proxy.ruleset.lists_of([&key()], Family::V4).into_iter().rev().collect::<Vec<_>>()[..]
        else {
            panic!("no long list")
        };
        let slot = concat(&[Field::Number(list), Field::Number(3)]);
        let mut batch = Batch::new();
        batch.delete_elements(&table, &SetId::Endpoints.name(), &[Element::key(slot)]);
        Nft::open().unwrap().commit(batch).unwrap();
        let refused = write(&mut proxy, large(10, 5_000, 2_000));
        assert!(matches!(&refused, Err(Error::Kernel(error)) if error.errno == Errno::ENOENT), "{refused:?}");
        let repaired = write(&mut proxy, BTreeMap::new()).unwrap();
        assert!(repaired.full && repaired.elements > 0, "{repaired:?}");
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0);
    });
}

/// A Service is deleted while no agent runs, and the repair that deletes its elements fails halfway: its UDP flows end all the same.
#[test]
fn udp_frontends_of_a_repair_that_fails_halfway_are_known() {
    requires!(NetworkNamespace);
    let is_met = || {
        in_new_netns(|| {
            let mut proxy = open();
            let ports = 20;
            write(&mut proxy, large_of(Protocol::Udp, ports, 0, 2_500)).unwrap();
            proxy.ruleset = Ruleset::default();
            proxy.dataplane.mark_out_of_sync();
            let before = Nft::open().unwrap().generation().unwrap();
            let is_over = AtomicBool::new(false);
            let refused = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut nft, table) =
                        (Nft::open().unwrap(), Table::new(steerage_nft::Family::Ip, TABLE));
                    while nft.generation().unwrap() == before && !is_over.load(Ordering::Relaxed) {}
                    let mut batch = Batch::new();
                    batch.flush_set(&table, &SetId::Endpoints.name());
                    nft.commit(batch).unwrap();
                });
                let written = write(&mut proxy, BTreeMap::new());
                is_over.store(true, Ordering::Relaxed);
                written
            });
            // All was deleted before the other thread had a core.
            if refused.is_ok() {
                return false;
            }
            assert!(
                matches!(&refused, Err(Error::Kernel(error)) if error.errno == Errno::ENOENT),
                "{refused:?}"
            );
            let repaired = write(&mut proxy, BTreeMap::new()).unwrap();
            assert!(repaired.full, "{repaired:?}");
            assert_eq!(proxy.ruleset.take_stale_flows().udp.len(), usize::from(ports));
            true
        })
    };
    assert!((0..100).any(|_| is_met()), "no repair failed halfway");
}

/// Each of the changes has all lists read again: none waits for the end of the changes.
#[test]
fn all_lists_are_read_while_another_program_goes_on_changing_the_tables() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let ports = 20;
        let mut proxy = open();
        write(&mut proxy, large(ports, 0, 2_500)).unwrap();
        let mut nft = Nft::open().unwrap();
        let last = rows(&mut nft, SetId::Endpoints).unwrap().iter().last().map(|row| row.key.to_vec());
        let table = Table::new(steerage_nft::Family::Ip, TABLE);
        let mut batch = Batch::new();
        batch.delete_elements(&table, &SetId::Endpoints.name(), &[Element::key(last.unwrap())]);
        nft.commit(batch).unwrap();
        let found = (0..=ports).find(|_| {
            proxy.dataplane.foreign_change_noticed(true);
            write(&mut proxy, BTreeMap::new()).unwrap();
            proxy.dataplane.read_some_lists(&mut proxy.ruleset) > 0
        });
        assert!(found.is_some(), "the last list is never read");
        assert_eq!(count(&mut nft, SetId::Endpoints), usize::from(ports) * 2_500);
    });
}

/// The rows of a set.
fn rows(nft: &mut Nft, id: SetId) -> Result<Rows, Error> {
    nft.rows(&Table::new(steerage_nft::Family::Ip, TABLE), &id.name(), id.row_shape(Family::V4))
}

/// Their number.
fn count(nft: &mut Nft, id: SetId) -> usize {
    rows(nft, id).map_or(0, |rows| rows.len())
}

/// A Service with two endpoints at another address, beside the large one.
fn with_small(mut plans: BTreeMap<Key, ServicePlan>) -> BTreeMap<Key, ServicePlan> {
    let mut small = large(1, 0, 2).remove(&key()).unwrap();
    for (frontend, _) in &mut small.frontends {
        frontend.addr = IpAddr::from([10, 96, 0, 2]);
    }
    small.cluster_addresses = vec![IpAddr::from([10, 96, 0, 2])];
    plans.insert(Key::new("shop", "small"), small);
    plans
}

/// What one transaction added, by table and set, and whether packets saw the table's rules from then on.
#[derive(Debug, Default)]
struct Added {
    elements: BTreeMap<(steerage_nft::Family, String), usize>,
    served: BTreeSet<steerage_nft::Family>,
}

impl Added {
    fn count(&self, family: steerage_nft::Family, set: SetId) -> usize {
        self.elements.get(&(family, set.name())).copied().unwrap_or_default()
    }
}

/// The transactions of `work`, in order. The kernel keeps all their notifications, as long as they are not many more than those of
/// 20,000 elements.
fn transactions(work: impl FnOnce()) -> Vec<Added> {
    let mut monitor = Monitor::open().unwrap();
    work();
    let (mut all, mut running) = (Vec::new(), Added::default());
    while let Some(notifications) = monitor.receive().unwrap() {
        for notification in notifications {
            match notification {
                Notification::Commit(_) => all.push(std::mem::take(&mut running)),
                Notification::Change(change) if change.deleted || change.table.name != TABLE => {}
                Notification::Change(change) => match (change.object, change.name) {
                    (ObjectKind::Elements, Some(set)) => {
                        *running.elements.entry((change.table.family, set)).or_default() += 1;
                    }
                    (ObjectKind::Chain, Some(chain)) if chain == "prerouting" => {
                        running.served.insert(change.table.family);
                    }
                    _ => {}
                },
            }
        }
    }
    all
}

/// Nothing was there, as after `nft flush ruleset`: the small Service is served before the large one is loaded.
#[test]
fn small_services_are_loaded_first() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        let ip = steerage_nft::Family::Ip;
        let all = transactions(|| {
            write(&mut proxy, with_small(large(20, 0, 1_000))).unwrap();
        });
        let first = all.iter().position(|added| added.served.contains(&ip)).expect("packets see the rules");
        let count = |of: &[Added], set| of.iter().map(|added| added.count(ip, set)).sum::<usize>();
        let (until, after) = all.split_at(first + 1);
        assert_eq!(count(until, SetId::ClusterAddresses), 1, "of the small one: {all:?}");
        assert_eq!(count(after, SetId::ClusterAddresses), 1, "of the large one: {all:?}");
        assert!(count(after, SetId::Endpoints) >= 20 * 1_000, "{all:?}");
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0);
    });
}

/// A Service of IPv6 with two endpoints.
fn small_of_ipv6() -> (Key, ServicePlan) {
    let key = Key::new("shop", "small6");
    let service = Service {
        cluster_ips: vec!["fd00:96::1".parse().unwrap()],
        ports: vec![ServicePort::new("1", Protocol::Tcp, 1, None)],
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(key.clone())
    };
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    index.apply_slice(Event::Apply(EndpointSlice {
        ports: vec![EndpointPort { name: "1".to_owned(), protocol: Protocol::Tcp, port: 8001 }].into(),
        endpoints: ["fd00:244::1", "fd00:244::2"]
            .map(|at| Endpoint::ready(at.parse().unwrap(), "other"))
            .into(),
        ..EndpointSlice::new(Key::new("shop", "small6-1"), key.clone(), Family::V6)
    }));
    let place = LocalNode { node: "node".to_owned(), ..LocalNode::default() };
    let plan = plan_service(&service, &index, &place);
    assert!(plan.frontends.iter().all(|(_, action)| action.targets.len() == 2));
    (key, plan)
}

/// Each family has a table. The Services with few endpoints of the second one do not wait for the long lists of the first either.
#[test]
fn small_services_of_both_families_are_loaded_first() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut proxy = Proxy::open();
        let (ip, ip6) = (steerage_nft::Family::Ip, steerage_nft::Family::Ip6);
        let all = transactions(|| {
            let mut plans = large(20, 0, 1_000);
            plans.extend([small_of_ipv6()]);
            write(&mut proxy, plans).unwrap();
        });
        let first = all.iter().position(|added| added.served.contains(&ip6)).expect("packets see the rules");
        let (until, after) = all.split_at(first + 1);
        assert!(until.iter().any(|added| added.count(ip6, SetId::ClusterAddresses) == 1), "{all:?}");
        let late: usize = after.iter().map(|added| added.count(ip, SetId::Endpoints)).sum();
        assert!(late >= 20 * 1_000, "{all:?}");
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(write(&mut proxy, BTreeMap::new()).unwrap().elements, 0);
    });
}

/// The process ended while it loaded the large Service. What the next one makes of that is what a single load makes, also of a Service
/// that was deleted meanwhile.
#[test]
fn load_that_ended_halfway_is_completed() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let plans = with_small(large(20, 0, 2_500));
        let mut proxy = Proxy::open();
        // The lists of the process that ends are not in the order of their endpoints.
        write(&mut proxy, with_small(large(20, 1_000, 2_500))).unwrap();
        write(&mut proxy, plans.clone()).unwrap();
        let table = Table::new(steerage_nft::Family::Ip, TABLE);
        let mut nft = Nft::open().unwrap();
        let [digests, rows] = [SetId::Digests, SetId::Endpoints].map(|id| rows(&mut nft, id).unwrap());
        drop(proxy);
        let lengths = [0, 7_000, rows.len()];
        for (loaded, is_gone) in lengths.into_iter().flat_map(|loaded| [(loaded, false), (loaded, true)]) {
            // Only what the first transactions of the rest had written: all digests, some endpoints, no frontend.
            let mut alone = Proxy::open();
            write(&mut alone, with_small(BTreeMap::new())).unwrap();
            let mut batch = Batch::new();
            assert_eq!([SetId::Digests, SetId::Endpoints].map(|id| count(&mut nft, id)), [0, 0]);
            batch.add_rows(&table, &SetId::Digests.name(), digests.iter());
            batch.add_rows(&table, &SetId::Endpoints.name(), rows.iter().take(loaded));
            nft.commit(batch).unwrap();
            drop(alone);
            let mut next = Proxy::open();
            let wanted = if is_gone { with_small(BTreeMap::new()) } else { plans.clone() };
            write(&mut next, wanted).unwrap();
            next.dataplane.read_all_lists(&mut next.ruleset);
            let left = if is_gone { 0 } else { rows.len() };
            assert_eq!(count(&mut nft, SetId::Endpoints), left, "{loaded}");
            next.dataplane.mark_out_of_sync();
            assert_eq!(write(&mut next, BTreeMap::new()).unwrap().elements, 0, "{loaded}");
        }
    });
}
