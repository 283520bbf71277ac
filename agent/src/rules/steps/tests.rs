// SPDX-License-Identifier: Apache-2.0
//! Whatever changes, between two of its steps the tables serve each frontend as before or as after.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use proptest::prelude::*;
use steerage_model::{Family, Key, Protocol};

use super::super::layout::Side;
use super::super::{Difference, Elements, KernelState, Ruleset, list_of_frontend};
use super::*;
use crate::plan::{Action, Endpoints, Frontend, Masquerade, Role, Selection, ServicePlan};

/// A Service.
#[derive(Debug, Clone)]
struct Spec {
    first: u8,
    endpoints: u8,
    local: bool,
    /// The numbers of its frontends, which other Services may have in other worlds.
    frontends: BTreeSet<u8>,
    is_cluster_ip: bool,
    sources: &'static [&'static str],
    affinity: Option<u32>,
}

type World = BTreeMap<u8, Spec>;

fn plan(spec: &Spec) -> ServicePlan {
    let list = |count: u8| -> Arc<[SocketAddr]> {
        (spec.first..).take(count.into()).map(|n| ([10, 244, 0, n], 80).into()).collect()
    };
    let local = spec.local.then(|| Endpoints { selection: Selection::Local, list: list(spec.endpoints / 2) });
    let sources: Vec<IpNet> = spec.sources.iter().map(|net| net.parse().unwrap()).collect();
    let action = Action {
        role: if spec.is_cluster_ip { Role::ClusterIp } else { Role::Vip },
        created: 0,
        port: 80,
        targets: Endpoints { selection: Selection::Cluster, list: list(spec.endpoints) },
        local,
        peers: None,
        reject: spec.endpoints == 0,
        masquerade: Masquerade::AllButLocalPods,
        sources: (!sources.is_empty()).then(|| sources.into()),
        affinity: spec.affinity,
        serving: list(0),
    };
    let address = |n: &u8| IpAddr::from([10, 96, u8::from(spec.is_cluster_ip), n / 2]);
    let frontend =
        |n: &u8| Frontend { addr: address(n), protocol: Protocol::Tcp, port: 80 + u16::from(n % 2) };
    let cluster_addresses: BTreeSet<_> = spec.frontends.iter().map(address).collect();
    ServicePlan {
        frontends: spec.frontends.iter().map(|n| (frontend(n), action.clone())).collect(),
        cluster_addresses: cluster_addresses.into_iter().filter(|_| spec.is_cluster_ip).collect(),
        hairpins: list(spec.endpoints / 2).iter().map(SocketAddr::ip).collect(),
        ..ServicePlan::default()
    }
}

fn plans(world: &World, gone: &World) -> BTreeMap<Key, ServicePlan> {
    let key = |n: &u8| Key::new("n", n.to_string());
    let gone = gone.keys().map(|n| (key(n), ServicePlan::default()));
    gone.chain(world.iter().map(|(n, spec)| (key(n), plan(spec)))).collect()
}

fn worlds() -> impl Strategy<Value = World> {
    let count =
        prop_oneof![Just(0_u8), Just(1), Just(3), Just(9), Just(12), Just(16), Just(17), Just(40), Just(70)];
    let frontends = proptest::collection::btree_set(0_u8..8, 1..4);
    let sources = prop_oneof![
        2 => Just(&[][..]),
        1 => Just(&["192.0.2.0/24"][..]),
        1 => Just(&["192.0.2.0/26", "198.51.100.0/24", "203.0.113.9/32"][..]),
    ];
    let affinity = prop_oneof![2 => Just(None), 1 => Just(Some(30)), 1 => Just(Some(60))];
    let spec = (0_u8..9, count, any::<bool>(), frontends, any::<bool>(), sources, affinity);
    let spec = spec.prop_map(|(first, endpoints, local, frontends, is_cluster_ip, sources, affinity)| Spec {
        first: first * 5,
        endpoints,
        local,
        frontends,
        is_cluster_ip,
        sources,
        affinity,
    });
    proptest::collection::btree_map(0_u8..4, spec, 0..4)
}

/// Elements of a frontend.
type OfFrontend<'t> = BTreeMap<(SetId, &'t Vec<u8>), &'t Vec<u8>>;

/// What a table holds.
#[derive(Debug, Clone, Default, PartialEq)]
struct Tables(BTreeMap<SetId, BTreeMap<Vec<u8>, Vec<u8>>>);

impl Tables {
    fn of(elements: &Elements) -> Self {
        let mut tables = Self::default();
        for (id, rows) in elements.sets() {
            for row in rows.iter() {
                tables.add(*id, row);
            }
        }
        tables
    }

    fn add(&mut self, id: SetId, row: Row<'_>) {
        let old =
            self.0.entry(id).or_default().insert(row.key.to_vec(), row.data.unwrap_or_default().to_vec());
        assert_eq!(old, None, "the kernel rejects what exists, {id:?}");
    }

    fn apply(&mut self, step: &Changes) {
        for (op, id, _, row) in all(step) {
            if op == Op::Add {
                self.add(id, row);
                continue;
            }
            let set = self.0.entry(id).or_default();
            assert!(set.remove(row.key).is_some(), "the kernel rejects what is gone, {id:?}");
            if set.is_empty() {
                self.0.remove(&id);
            }
        }
    }

    fn set(&self, id: SetId) -> impl Iterator<Item = (&Vec<u8>, &Vec<u8>)> {
        self.0.get(&id).into_iter().flatten()
    }

    fn keys(&self, id: SetId) -> BTreeSet<&Vec<u8>> {
        self.set(id).map(|(key, _)| key).collect()
    }

    /// The elements of each frontend, without what its clients remember.
    fn frontends(&self) -> BTreeMap<&[u8], OfFrontend<'_>> {
        let mut found: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (id, set) in self.0.iter().filter(|(id, _)| !matches!(id, SetId::Sticky(_))) {
            for (key, data) in set {
                if let Some(frontend) = id.frontend_of_key(key) {
                    found.entry(frontend).or_default().insert((*id, key), data);
                }
            }
        }
        found
    }

    fn of_list(&self, number: u32) -> BTreeMap<&Vec<u8>, &Vec<u8>> {
        self.set(SetId::Endpoints).filter(|(key, _)| list_of_key(key) == Some(number)).collect()
    }

    fn of_sources(&self, number: u32) -> BTreeSet<(SetId, &Vec<u8>)> {
        let sets = self.0.iter().filter(|(id, _)| matches!(id, SetId::Sources(_)));
        let elements = sets.flat_map(|(id, set)| set.keys().map(move |key| (*id, key)));
        elements.filter(|(_, key)| list_of_key(key) == Some(number)).collect()
    }
}

/// Between two steps of a change from `old` to `new`.
fn check(now: &Tables, old: &Tables, new: &Tables) {
    let (frontends, before, after) = (now.frontends(), old.frontends(), new.frontends());
    let known: BTreeSet<&[u8]> = before.keys().chain(after.keys()).copied().collect();
    for frontend in &known {
        let found = frontends.get(frontend);
        assert!(found == before.get(frontend) || found == after.get(frontend), "half of {frontend:?}");
    }
    for side in Side::ALL {
        for (frontend, data) in now.set(SetId::Lists(side)) {
            let number = list_of_frontend(data).unwrap();
            let list = now.of_list(number);
            assert!(list == old.of_list(number) || list == new.of_list(number), "half of a list");
            let classes = super::super::layout::LONG;
            let class =
                classes.into_iter().find(|class| now.keys(SetId::Long(side, *class)).contains(frontend));
            let class = class.expect("a frontend with a list has a class") as usize;
            // Slots have no gaps, and the last try looks at the first quarter.
            assert!(list.len() >= class / 4, "{} of {class}", list.len());
        }
    }
    let digests: BTreeSet<_> = now.set(SetId::Digests).filter_map(|(key, _)| list_of_key(key)).collect();
    for number in now.set(SetId::Endpoints).filter_map(|(key, _)| list_of_key(key)) {
        assert!(digests.contains(&number), "a list without a digest is lost if the process ends");
    }
    for (_, data) in now.set(SetId::Restricted) {
        let number = list_of_frontend(data).unwrap();
        let wanted = [new, old].map(|tables| tables.of_sources(number));
        let wanted = wanted.into_iter().find(|sources| !sources.is_empty()).expect("a list of sources");
        assert_eq!(now.of_sources(number), wanted);
    }
    // Other ports of an address of the cluster are rejected.
    for address in now.keys(SetId::ClusterAddresses) {
        let missing =
            |frontend: &&&[u8]| frontend.starts_with(address) && !frontends.contains_key(**frontend);
        for frontend in known.iter().filter(missing) {
            let is_rejected = |tables: &Tables, of: &BTreeMap<&[u8], _>| {
                tables.keys(SetId::ClusterAddresses).contains(address) && !of.contains_key(frontend)
            };
            assert!(is_rejected(old, &before) || is_rejected(new, &after), "{frontend:?} is rejected");
        }
    }
    let in_both = |id| old.keys(id).intersection(&new.keys(id)).copied().collect::<BTreeSet<_>>();
    for id in [SetId::ClusterAddresses, SetId::Hairpins] {
        assert!(now.keys(id).is_superset(&in_both(id)), "{id:?}");
    }
    if frontends != before {
        assert!(now.keys(SetId::Hairpins).is_superset(&new.keys(SetId::Hairpins)));
    }
    if frontends != after {
        assert!(now.keys(SetId::Hairpins).is_superset(&old.keys(SetId::Hairpins)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_step_leaves_every_frontend_whole(from in worlds(), to in worlds(), largest in 1_usize..60) {
        let mut ruleset = Ruleset::default();
        // Rules for affinity are there from the beginning.
        let affine = Spec {
            first: 0, endpoints: 1, local: false, frontends: [0].into(), is_cluster_ip: false, sources: &[], affinity: Some(30),
        };
        let all = World::from([(0, affine)]);
        let _ = ruleset.update(plans(&all, &World::new()), KernelState::Unknown);
        let _ = ruleset.update(plans(&from, &all), KernelState::InSync);
        let old = Tables::of(&ruleset.all_elements(Family::V4));
        let Difference::Elements([changes, _]) = ruleset.update(plans(&to, &from), KernelState::InSync) else {
            panic!("chains do not change");
        };
        let new = Tables::of(&ruleset.all_elements(Family::V4));
        let mut now = old.clone();
        let steps = steps(&changes, largest);
        for step in &steps {
            now.apply(step);
            check(&now, &old, &new);
            prop_assert!(step.count() > 0 || changes.count() == 0);
        }
        prop_assert_eq!(now, new);
    }
}

/// Between two steps of a repair: a frontend leads to what its list held before the repair, or to what is wanted, and to the first only
/// if it did so before.
fn check_lists(now: &Tables, old: &Tables, new: &Tables) {
    for id in Side::ALL.map(SetId::Lists).into_iter().chain([SetId::Restricted]) {
        let [before, after] = [old, new].map(|tables| tables.set(id).collect::<BTreeMap<_, _>>());
        for (frontend, data) in now.set(id) {
            let number = list_of_frontend(data).unwrap();
            let (was, will_be) = (before.get(frontend) == Some(&data), after.get(frontend) == Some(&data));
            let content = |tables: &Tables| -> BTreeSet<(SetId, Vec<u8>, Vec<u8>)> {
                let sources =
                    tables.of_sources(number).into_iter().map(|(of, key)| (of, key.clone(), Vec::new()));
                let of_list = tables.of_list(number);
                let endpoints =
                    of_list.iter().map(|(key, data)| (SetId::Endpoints, (*key).clone(), (*data).clone()));
                if id == SetId::Restricted { sources.collect() } else { endpoints.collect() }
            };
            let [found, before, after] = [now, old, new].map(content);
            if was && will_be {
                // New sources come one by one, before old ones go.
                assert!(found.is_subset(&(&before | &after)) && found.is_superset(&(&before & &after)));
            } else {
                assert_eq!(found, if was { before } else { after }, "{id:?}, list {number}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Another program deleted or exchanged elements, or a write ended in the middle: any table becomes what is wanted, and each frontend
    /// changes at once.
    #[test]
    fn repair_in_steps_changes_frontends_at_once(
        from in worlds(), to in worlds(), is_same: bool, largest in 1_usize..60, keep in 1_usize..5, exchange in 2_usize..9,
    ) {
        let from = if is_same { to.clone() } else { from };
        let elements = |world| {
            let mut ruleset = Ruleset::default();
            ruleset.stage(plans(world, &World::new()));
            ruleset.all_elements(Family::V4)
        };
        let (kernel, wanted) = (elements(&from), elements(&to));
        let mut damaged = Elements::new(Family::V4);
        for (id, rows) in kernel.sets() {
            let mut left = Rows::new(rows.shape());
            for (at, row) in rows.iter().enumerate().filter(|(at, _)| at % keep != keep - 1 || keep == 1) {
                let other = |bytes: &[u8]| bytes.iter().map(|byte| byte ^ 1).collect::<Vec<_>>();
                let is_other = at % exchange == 1;
                let has_other_data = is_other && matches!(id, SetId::Endpoints | SetId::Slots(_));
                let data = row.data.map(|data| if has_other_data { other(data) } else { data.to_vec() });
                // What another program, or a Service that is gone, left in a list.
                let (number, net) = row.key.split_at(4);
                let has_other_key = is_other && matches!(id, SetId::Sources(_));
                let key = if has_other_key { [number, &other(net)].concat() } else { row.key.to_vec() };
                left.push_row(Row { key: &key, end: row.end, data: data.as_deref() });
            }
            damaged.listed(*id, left);
        }
        let changes = super::super::difference(&damaged, &wanted);
        let (old, new) = (Tables::of(&damaged), Tables::of(&wanted));
        let (mut now, before, after) = (old.clone(), old.frontends(), new.frontends());
        for step in repair_steps(&changes, largest) {
            now.apply(&step);
            let found = now.frontends();
            for frontend in before.keys().chain(after.keys()) {
                let found = found.get(frontend);
                prop_assert!(found == before.get(frontend) || found == after.get(frontend));
            }
            check_lists(&now, &old, &new);
        }
        prop_assert_eq!(now, new);
    }
}

/// The kernel's frontends lead to the numbers of lists that other Services have now.
#[test]
fn repair_that_exchanges_numbers_is_one_transaction() {
    let with = |has_frontend: bool, first: u8, number: u8, source: &str| {
        let mut elements = Elements::new(Family::V4);
        let row = |id: SetId, key: &[u8], data: &[u8]| {
            let mut rows = Rows::new(id.row_shape(Family::V4));
            let data = (!data.is_empty()).then_some(data);
            rows.push_row(Row { key, end: None, data });
            (id, rows)
        };
        let frontend = [10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0];
        let number = [number, 0, 0, 0];
        let endpoint = [10, 244, 0, first, 0, 80, 0, 0];
        let net: [u8; 4] = source.parse::<std::net::Ipv4Addr>().unwrap().octets();
        for (id, rows) in [
            row(SetId::Lists(Side::Cluster), &frontend, &number),
            row(SetId::Endpoints, [[7, 0, 0, 0], [0; 4]].as_flattened(), &endpoint),
            row(SetId::Restricted, &frontend, &number),
            row(SetId::Sources(24), [[7, 0, 0, 0], net].as_flattened(), &[]),
        ] {
            assert_eq!(rows.len(), 1, "{id:?}");
            if has_frontend || matches!(id, SetId::Endpoints | SetId::Sources(_)) {
                elements.listed(id, rows);
            }
        }
        elements
    };
    let elements = |first, number, source| with(true, first, number, source);
    let steps = |old: &Elements, new: &Elements| repair_steps(&super::super::difference(old, new), 1).len();
    let old = elements(1, 7, "192.0.2.0");
    assert_eq!(steps(&old, &elements(1, 7, "192.0.2.0")), 1);
    assert_eq!(steps(&old, &elements(2, 8, "192.0.2.0")), 1, "endpoints of another Service");
    assert_eq!(steps(&old, &elements(1, 8, "198.51.100.0")), 1, "sources of another Service");
    assert!(steps(&old, &elements(2, 7, "198.51.100.0")) > 1, "the frontend keeps its lists");
    let stale = with(false, 1, 7, "192.0.2.0");
    assert!(steps(&stale, &elements(2, 7, "192.0.2.0")) > 1, "endpoints that a Service left go first");
    assert_eq!(steps(&stale, &elements(1, 7, "198.51.100.0")), 1, "sources that a Service left");
}

/// The first of these that has the hash of an earlier one, after that one.
fn colliding<T: Clone>(all: impl Iterator<Item = T>, name: impl Fn(&T) -> String) -> [T; 2] {
    let mut seen: BTreeMap<u32, T> = BTreeMap::new();
    for thing in all {
        if let Some(first) = seen.insert(crate::hash::jhash(name(&thing).as_bytes(), 0), thing.clone()) {
            return [first, thing];
        }
    }
    panic!("no two have one hash");
}

/// Names can be chosen to collide. If a list got the number of one that goes at the same time, the frontends of one would lead to the
/// endpoints of the other between two steps.
#[test]
fn change_gives_no_number_to_another_list() {
    let spec = |n: u8| Spec {
        first: 0,
        endpoints: 12,
        local: false,
        frontends: [n].into(),
        is_cluster_ip: false,
        sources: &[],
        affinity: None,
    };
    let id = "ListId { family: V4, protocol: Tcp, port: 80, selection: Cluster }";
    let keys = (0..1_000_000).map(|n| Key::new("n", n.to_string()));
    let keys = colliding(keys, |key| format!("{key} {id}"));
    let nets = (0..1_000_000_u32).map(|n| [IpNet::from(IpAddr::from(n.to_be_bytes()))]);
    let nets = colliding(nets, |net| format!("{net:?}"));
    let with = |n: u8| {
        let mut plan = plan(&spec(n));
        plan.frontends[0].1.sources = Some(nets[usize::from(n)].into());
        plan
    };
    let [first, second] = keys;
    let number = |ruleset: &Ruleset, id: SetId| {
        let rows = ruleset.all_elements(Family::V4).of_set(id).expect("a list").clone();
        rows.iter().map(|row| list_of_frontend(row.data.unwrap()).unwrap()).collect::<Vec<_>>()
    };
    let mut ruleset = Ruleset::default();
    ruleset.stage([(first.clone(), with(0))].into());
    let numbers =
        |ruleset: &Ruleset| [SetId::Lists(Side::Cluster), SetId::Restricted].map(|id| number(ruleset, id));
    let old = numbers(&ruleset);
    ruleset.stage([(first.clone(), ServicePlan::default()), (second.clone(), with(1))].into());
    for (old, new) in old.iter().zip(numbers(&ruleset)) {
        assert_eq!(new, [old[0].wrapping_add(1)], "the next one, because that of its name was taken");
    }
    ruleset.stage([(second, ServicePlan::default())].into());
    ruleset.stage([(first, with(0))].into());
    assert_eq!(numbers(&ruleset), old);
}

/// Elements that need not change together fill the steps.
#[test]
fn steps_are_as_large_as_they_may_be() {
    let spec = |n: u8| Spec {
        first: 0,
        endpoints: 3,
        local: false,
        frontends: [n].into(),
        is_cluster_ip: false,
        sources: &[],
        affinity: None,
    };
    let world: World = (0..200).map(|n| (n, spec(n))).collect();
    let mut ruleset = Ruleset::default();
    let Difference::Elements([changes, _]) =
        ruleset.update(plans(&world, &World::new()), KernelState::InSync)
    else {
        panic!("chains do not change");
    };
    // A frontend and three slots each, and a hairpin for all.
    assert_eq!(changes.count(), 801);
    let counts = |largest| steps(&changes, largest).iter().map(|step| step.count()).collect::<Vec<_>>();
    assert_eq!(counts(801), [801]);
    assert_eq!(counts(400), [397, 400, 4]);
    assert_eq!(counts(5)[..2], [5, 4]);
    assert_eq!(counts(1).len(), 201, "what belongs together stays together");
}
