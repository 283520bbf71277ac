// SPDX-License-Identifier: Apache-2.0
//! Plans of a namespace keep to its budget, whichever way they come.

use std::net::Ipv4Addr;

use steerage_model::{Endpoint, EndpointPort, Family, Ingress, Protocol, ServiceKind, ServicePort};

use super::*;
use crate::plan::{ElementLimits, FRONTEND_ELEMENTS, Frontend};

const LIMITS: ElementLimits = ElementLimits { service: 2_500, namespace: 10_000 };

/// A Service of ten ports with 200 endpoints.
fn add(planner: &mut Planner, number: u8) -> Key {
    add_large(planner, number, 10, 200)
}

fn add_large(planner: &mut Planner, number: u8, ports: u16, endpoints: u32) -> Key {
    let key = Key::new("tenant", number.to_string());
    let port = |n: u16| ServicePort::new(n.to_string(), Protocol::Tcp, n, None);
    let ports: Vec<_> = (1..=ports).map(port).collect();
    let slice_port = |port: &ServicePort| EndpointPort {
        name: port.name.clone(),
        protocol: Protocol::Tcp,
        port: port.port,
    };
    let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(0x0af4_0000 + n).into(), "there");
    planner.index.apply_slice(Event::Apply(EndpointSlice {
        ports: ports.iter().map(slice_port).collect(),
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..EndpointSlice::new(Key::new("tenant", format!("{number}-1")), key.clone(), Family::V4)
    }));
    planner.index.apply_service(Event::Apply(Service {
        cluster_ips: vec![IpAddr::from([10, 96, 0, number])],
        ports,
        ..Service::new(key.clone())
    }));
    key
}

fn local_node() -> LocalNode {
    LocalNode { kube_proxy_replacement: true, element_limits: LIMITS, ..LocalNode::default() }
}

impl Planner {
    fn plan_all(&mut self, keys: impl IntoIterator<Item = Key>) -> BTreeMap<Key, ServicePlan> {
        self.turns.extend(keys);
        self.plan_round(&local_node(), &Desired::default(), || false)
    }

    fn plan_one_turn(&mut self) -> BTreeMap<Key, ServicePlan> {
        self.plan_round(&local_node(), &Desired::default(), || true)
    }

    fn plan_round(
        &mut self,
        local_node: &LocalNode,
        desired: &Desired,
        is_over: impl FnMut() -> bool,
    ) -> BTreeMap<Key, ServicePlan> {
        let round = Round { local_node, seed: 0, now: Instant::now(), desired };
        self.plan_in_turns(&round, BTreeMap::new(), is_over)
    }
}

fn needs(plans: &BTreeMap<Key, ServicePlan>) -> usize {
    plans.values().map(ServicePlan::cost).sum()
}

/// What the plans have, without what they lack.
fn elements(plans: &BTreeMap<Key, ServicePlan>) -> usize {
    let omitted = |plan: &ServicePlan| plan.omitted.endpoints + plan.omitted.frontends * FRONTEND_ELEMENTS;
    plans.values().map(|plan| plan.cost() - omitted(plan)).sum()
}

#[test]
fn plans_of_a_namespace_are_reduced_whether_they_come_together_or_not() {
    let mut together = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: BTreeSet<_> = (0..20).map(|number| add(&mut together, number)).collect();
    let plans = together.plan_all(keys);
    assert_eq!(plans.len(), 20);
    assert!((LIMITS.namespace / 2..=LIMITS.namespace).contains(&needs(&plans)), "{}", needs(&plans));

    let mut one_by_one = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let mut last: BTreeMap<Key, ServicePlan> = BTreeMap::new();
    for number in 0..20 {
        let key = add(&mut one_by_one, number);
        last.extend(one_by_one.plan_all([key]));
        assert!(needs(&last) <= LIMITS.namespace, "{}", needs(&last));
    }
    assert_eq!(last, plans);

    // All have changed, and the loop writes after each.
    let mut in_turns = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..20).map(|number| add(&mut in_turns, number)).collect();
    in_turns.turns.extend(keys.iter().cloned());
    last.clear();
    while in_turns.has_waiting() {
        let some = in_turns.plan_one_turn();
        assert!(some.len() <= 1, "{}", some.len());
        last.extend(some);
        assert!(needs(&last) <= LIMITS.namespace, "{}", needs(&last));
    }
    assert_eq!(last, plans);
    assert!(in_turns.planned.is_empty() && in_turns.later.is_empty() && in_turns.settled.is_empty());
}

/// One Service grows and another one shrinks in the same round: the namespace never needs too much, whatever the order of its turns.
#[test]
fn budget_is_settled_when_all_changes_of_a_namespace_are_known() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..5).map(|number| add(&mut planner, number)).collect();
    let service = |planner: &Planner, key: &Key| planner.index.service(key).unwrap().clone();
    let delete = |key: &Key| Event::Delete { key: key.clone(), version: String::new() };
    let (small, large) = (&keys[3], &keys[4]);
    let whole = service(&planner, small);
    planner.index.apply_service(delete(small));
    let before = planner.plan_all(keys.iter().cloned());
    assert!(before.values().all(|plan| plan.reduced.is_none()));
    planner.index.apply_service(Event::Apply(whole));
    planner.index.apply_service(delete(large));
    planner.turns.extend([small.clone(), large.clone()]);
    while planner.has_waiting() {
        let plans = planner.plan_one_turn();
        assert!(plans.values().all(|plan| plan.reduced.is_none()));
    }
    assert_eq!(planner.next(Instant::now()), None, "no limit has fallen, which would rise later");
}

/// Of Services that are too large in any case, as many are planned twice as the namespace's budget has room for.
#[test]
fn services_that_are_too_large_are_planned_once() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..20).map(|number| add_large(&mut planner, number, 10, 300)).collect();
    let plans = planner.plan_all(keys);
    assert_eq!((plans.len(), planner.made.get()), (20, 24));
    assert!((LIMITS.namespace / 2..=LIMITS.namespace).contains(&elements(&plans)), "{}", elements(&plans));
}

/// A tenant changes very many Services at once.
#[test]
fn services_of_other_namespaces_need_not_wait() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let tenant: Vec<_> = (0..20).map(|number| add(&mut planner, number)).collect();
    let mut rounds = 0;
    let mut round = |planner: &mut Planner| {
        rounds += 1;
        planner.plan_one_turn()
    };
    planner.turns.extend(tenant);
    round(&mut planner);
    let other = Key::new("ztenant", "other");
    planner.turns.extend([other.clone()]);
    assert!(planner.is_waiting(&other));
    let plans = [round(&mut planner), round(&mut planner)];
    assert!(plans.iter().any(|plans| plans.contains_key(&other)), "within two rounds");
    assert!(!planner.is_waiting(&other) && planner.has_waiting());
    while planner.has_waiting() {
        round(&mut planner);
    }
    assert!(rounds > 20, "{rounds}");
}

/// A tenant changes large Services again and again, so that some of the namespace always wait.
#[test]
fn services_that_are_deleted_or_need_no_more_wait_for_no_budget() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..6).map(|number| add(&mut planner, number)).collect();
    planner.plan_all(keys.iter().cloned());
    let round = |planner: &mut Planner| {
        planner.turns.extend(keys[..2].iter().cloned());
        planner.plan_one_turn()
    };
    for _ in 0..10 {
        round(&mut planner);
    }
    let (changed, deleted) = (&keys[2], &keys[3]);
    planner.turns.extend([changed.clone(), deleted.clone()]);
    assert!((0..4).any(|_| round(&mut planner).contains_key(changed)), "within its turn");

    planner.index.apply_service(Event::Delete { key: deleted.clone(), version: String::new() });
    let plans = planner.plan_deleted(vec![deleted.clone()]);
    assert_eq!(plans.get(deleted), Some(&ServicePlan::default()));
    assert!(!planner.is_waiting(deleted) && planner.has_waiting());
}

/// A tenant changes all its large Services again before the needs of all are known.
#[test]
fn services_that_change_again_keep_to_the_budget() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..20).map(|number| add(&mut planner, number)).collect();
    let mut last: BTreeMap<Key, ServicePlan> = BTreeMap::new();
    for _ in 0..100 {
        planner.turns.extend(keys.iter().cloned());
        last.extend(planner.plan_one_turn());
        assert!(needs(&last) <= LIMITS.namespace, "{}", needs(&last));
    }
    while planner.has_waiting() {
        last.extend(planner.plan_one_turn());
        assert!(needs(&last) <= LIMITS.namespace, "{}", needs(&last));
    }
    assert_eq!(last.len(), keys.len());
}

/// A VIP.
const MOVED: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

impl Planner {
    fn set_vips(&mut self, key: &Key, vips: impl IntoIterator<Item = IpAddr>) {
        let service = self.index.service(key).unwrap().clone();
        let vip = |ip| Ingress { ip: Some(ip), hostname: None, ip_mode: None };
        let (kind, ingress) = (ServiceKind::LoadBalancer, vips.into_iter().map(vip).collect());
        self.index.apply_service(Event::Apply(Service { kind, ingress, ..service }));
    }

    fn set_external_ips(&mut self, key: &Key, external_ips: impl IntoIterator<Item = IpAddr>) {
        let service = self.index.service(key).unwrap().clone();
        let external_ips = external_ips.into_iter().collect();
        self.index.apply_service(Event::Apply(Service { external_ips, ..service }));
    }

    fn delete(&mut self, key: &Key) -> BTreeMap<Key, ServicePlan> {
        self.index.apply_service(Event::Delete { key: key.clone(), version: String::new() });
        self.plan_deleted(vec![key.clone()])
    }

    fn plan_one_turn_after(
        &mut self,
        deleted: BTreeMap<Key, ServicePlan>,
        desired: &Desired,
    ) -> BTreeMap<Key, ServicePlan> {
        let local_node = local_node();
        let round = Round { local_node: &local_node, seed: 0, now: Instant::now(), desired };
        self.plan_in_turns(&round, deleted, || true)
    }
}

fn at(addr: IpAddr) -> Frontend {
    Frontend { addr, protocol: Protocol::Tcp, port: 1 }
}

fn served<'d>(desired: &'d Desired, frontend: &Frontend) -> Option<&'d Key> {
    desired.served_at(frontend).map(|(owner, _)| owner)
}

/// A VIP moves between two Services of a namespace of which others wait: both plans are in one round, and as few others as possible.
#[test]
fn frontend_that_moves_is_planned_in_one_round() {
    for is_deleted in [true, false] {
        let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
        let keys: Vec<_> = (0..20).map(|number| add_large(&mut planner, number, 2, 3)).collect();
        // In the order of turns, which is that of names.
        let (old, new) = (&keys[1], &keys[3]);
        planner.set_vips(old, [MOVED]);
        let mut desired = Desired::default();
        desired.update(planner.plan_all(keys.iter().cloned()));
        planner.set_vips(new, [MOVED]);
        let mut deleted = BTreeMap::new();
        if is_deleted {
            deleted = planner.delete(old);
        } else {
            planner.set_vips(old, []);
        }
        planner.turns.extend(keys.iter().filter(|key| !is_deleted || *key != old).cloned());
        let mut rounds = 0;
        while served(&desired, &at(MOVED)) == Some(old) {
            let updates = planner.plan_one_turn_after(std::mem::take(&mut deleted), &desired);
            assert!(updates.len() <= 3, "{}", updates.len());
            desired.update(updates);
            rounds += 1;
        }
        assert_eq!(served(&desired, &at(MOVED)), Some(new), "{is_deleted}");
        assert_eq!(rounds, if is_deleted { 1 } else { 2 }, "it does not come before its turn");
        assert!(planner.has_waiting());
    }
}

/// An external IP moves between two Services of a namespace of which others wait. If the change of the new one comes with that of the old
/// one, both plans are in one round; if it comes later, it does not wait for its turn.
#[test]
fn external_ip_that_moves_waits_for_no_turn() {
    for (is_later, is_deleted) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
        let keys: Vec<_> = (0..20).map(|number| add_large(&mut planner, number, 2, 3)).collect();
        let (old, new) = (&keys[1], &keys[9]);
        planner.set_external_ips(old, [MOVED]);
        let mut desired = Desired::default();
        desired.update(planner.plan_all(keys.iter().cloned()));
        assert_eq!(served(&desired, &at(MOVED)), Some(old));
        let mut deleted = BTreeMap::new();
        if is_deleted {
            deleted = planner.delete(old);
        } else {
            planner.set_external_ips(old, []);
        }
        if !is_later {
            planner.set_external_ips(new, [MOVED]);
        }
        let waits = |key: &&Key| (!is_deleted || *key != old) && (!is_later || *key != new);
        planner.turns.extend(keys.iter().filter(waits).cloned());
        let mut unserved = 0;
        while served(&desired, &at(MOVED)) != Some(new) {
            desired.update(planner.plan_one_turn_after(std::mem::take(&mut deleted), &desired));
            let is_unserved = served(&desired, &at(MOVED)).is_none();
            unserved += usize::from(is_unserved);
            if is_later && unserved == 1 && is_unserved {
                planner.set_external_ips(new, [MOVED]);
                planner.turns.extend([new.clone()]);
            }
            assert!(unserved < 20, "later: {is_later}, deleted: {is_deleted}");
        }
        assert_eq!(unserved, usize::from(is_later), "deleted: {is_deleted}");
        assert!(planner.has_waiting(), "others wait for their turns");
    }
}

/// Very many VIPs move at once, some of them to Services of another namespace: few Services come before their turn, each round takes a
/// turn, and nobody's external IP is served in place of a VIP whose Service waits.
#[test]
fn external_ips_take_no_vip_of_a_service_that_waits() {
    let mut planner = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: Vec<_> = (0..40).map(|number| add_large(&mut planner, number, 2, 3)).collect();
    let vip = |n: u8| IpAddr::from([192, 0, 2, n]);
    planner.set_vips(&keys[0], (1..40).map(vip));
    let thief = Key::new("attacker", "thief");
    planner.index.apply_service(Event::Apply(Service {
        cluster_ips: vec![IpAddr::from([10, 96, 1, 1])],
        ports: vec![ServicePort::new("1", Protocol::Tcp, 1, None)],
        external_ips: (1..=40).map(vip).collect(),
        ..Service::new(thief.clone())
    }));
    let mut desired = Desired::default();
    desired.update(planner.plan_all(keys.iter().cloned().chain([thief.clone()])));
    assert_eq!(served(&desired, &at(vip(40))), Some(&thief), "an external IP");
    for (n, key) in (1..).zip(&keys[1..]) {
        planner.set_vips(key, [vip(n)]);
    }
    let mut deleted = planner.delete(&keys[0]);
    // What never waited, and needs its turn.
    let other = Key::new("ztenant", "other");
    planner.turns.extend(keys[1..].iter().cloned().chain([other.clone()]));
    let mut rounds = 0;
    while planner.has_waiting() {
        rounds += 1;
        let updates = planner.plan_one_turn_after(std::mem::take(&mut deleted), &desired);
        let is_planned = |(key, plan): &(&Key, &ServicePlan)| {
            plan.frontends.iter().any(|(frontend, _)| {
                keys.iter().zip(0..).any(|(of, n)| of == *key && frontend.addr == vip(n))
            })
        };
        assert!(updates.iter().filter(is_planned).count() <= 3);
        desired.update(updates);
        let stolen: Vec<_> =
            (1..40).map(vip).filter(|vip| served(&desired, &at(*vip)) == Some(&thief)).collect();
        assert_eq!(stolen, Vec::<IpAddr>::new());
        assert!(rounds > 2 || planner.turns.contains(&other) == (rounds < 2), "each round takes a turn");
    }
    for (n, key) in (1..).zip(&keys[1..]) {
        assert_eq!(served(&desired, &at(vip(n))), Some(key));
    }
    // Nothing stays reserved.
    for key in &keys[1..] {
        planner.set_vips(key, []);
    }
    desired.update(planner.plan_all(keys[1..].iter().cloned()));
    assert_eq!(served(&desired, &at(vip(7))), Some(&thief));
}

/// Adds a Service of another namespace with the external IP that also moves.
fn add_thief(planner: &mut Planner) -> Key {
    let thief = Key::new("attacker", "thief");
    planner.index.apply_service(Event::Apply(Service {
        cluster_ips: vec![IpAddr::from([10, 96, 1, 1])],
        ports: vec![ServicePort::new("1", Protocol::Tcp, 1, None)],
        external_ips: vec![MOVED],
        ..Service::new(thief.clone())
    }));
    thief
}

/// Plans one turn after the other while a condition holds. Others, in whose namespace a Service waits, go on changing.
fn plan_while(
    planner: &mut Planner,
    desired: &mut Desired,
    others: &[Key],
    condition: impl Fn(&Planner) -> bool,
) {
    while condition(planner) {
        planner.turns.extend(others.iter().cloned());
        desired.update(planner.plan_one_turn_after(BTreeMap::new(), desired));
    }
}

/// Services of a namespace, of which the last one is assigned the address that moves, and waits for the namespace's budget.
fn add_waiting(planner: &mut Planner, desired: &mut Desired) -> Vec<Key> {
    let keys: Vec<_> = (0..6).map(|number| add(planner, number)).collect();
    planner.set_vips(&keys[5], [MOVED]);
    planner.turns.extend(keys.iter().cloned());
    plan_while(planner, desired, &keys[..1], |planner| !planner.later.contains(&keys[5]));
    keys
}

/// A Service waits for its namespace's budget, and another one takes its new VIP as an external IP meanwhile.
#[test]
fn external_ips_take_no_vip_of_a_service_that_waits_for_its_budget() {
    let (mut planner, mut desired) = (Planner::new(Vec::new(), Budgets::new(LIMITS)), Desired::default());
    let keys = add_waiting(&mut planner, &mut desired);
    let thief = add_thief(&mut planner);
    planner.turns.extend([thief.clone()]);
    plan_while(&mut planner, &mut desired, &keys[..2], |planner| planner.turns.contains(&thief));
    assert_eq!(served(&desired, &at(MOVED)), None);
    plan_while(&mut planner, &mut desired, &[], Planner::has_waiting);
    assert_eq!(served(&desired, &at(MOVED)), Some(&keys[5]));
}

/// The external IP was served before the VIP was assigned to a Service that waits for its budget: it is not served in that one's place
/// any more.
#[test]
fn external_ip_leaves_when_a_waiting_service_gets_it_as_vip() {
    let (mut planner, mut desired) = (Planner::new(Vec::new(), Budgets::new(LIMITS)), Desired::default());
    let thief = add_thief(&mut planner);
    planner.turns.extend([thief.clone()]);
    plan_while(&mut planner, &mut desired, &[], Planner::has_waiting);
    assert_eq!(served(&desired, &at(MOVED)), Some(&thief));
    let keys = add_waiting(&mut planner, &mut desired);
    assert_eq!(served(&desired, &at(MOVED)), None);
    plan_while(&mut planner, &mut desired, &[], Planner::has_waiting);
    assert_eq!(served(&desired, &at(MOVED)), Some(&keys[5]));
}

/// A VIP moves to a Service that waits for its budget, and the one that had it names it as an external IP, too.
#[test]
fn vip_that_moves_does_not_stay_as_an_external_ip() {
    let (mut planner, mut desired) = (Planner::new(Vec::new(), Budgets::new(LIMITS)), Desired::default());
    let old = add_thief(&mut planner);
    planner.set_vips(&old, [MOVED]);
    planner.turns.extend([old.clone()]);
    plan_while(&mut planner, &mut desired, &[], Planner::has_waiting);
    let keys = add_waiting(&mut planner, &mut desired);
    assert_eq!(served(&desired, &at(MOVED)), Some(&old), "it has both");
    planner.set_vips(&old, []);
    planner.turns.extend([old.clone()]);
    plan_while(&mut planner, &mut desired, &keys[..2], |planner| planner.turns.contains(&old));
    assert_eq!(served(&desired, &at(MOVED)), None);
}

/// `cargo test -p steerage-agent … -- --ignored --nocapture` prints the times; docs/known-limits.md has some.
#[test]
#[ignore = "measures, and decides nothing"]
fn time_to_plan_large_services() {
    for (services, ports, endpoints) in
        [(1, 15_000, 70), (20, 15_000, 70), (20, 1_000, 1_000), (20, 15_000, 1_000), (50, 3, 1_000)]
    {
        let mut planner = Planner::new(Vec::new(), Budgets::default());
        let keys: Vec<_> = (0..services).map(|n| add_large(&mut planner, n, ports, endpoints)).collect();
        let local_node = LocalNode { element_limits: ElementLimits::default(), ..local_node() };
        planner.turns.extend(keys);
        let begun = Instant::now();
        let plans = planner.plan_round(&local_node, &Desired::default(), || false);
        let took = begun.elapsed();
        println!(
            "{services} Services of {ports} ports and {endpoints} endpoints: {took:?}, {} elements",
            elements(&plans)
        );
    }
}
