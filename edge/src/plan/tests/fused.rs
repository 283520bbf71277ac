// SPDX-License-Identifier: Apache-2.0
//! Plans of load balancers under `fused` steering, on nodes that make no statements unless a test says so.

use super::retargeting::follow_all;
use super::*;
use crate::endpoint_nodes::{ListChange, MASKED_FOR};

const CHECK: u16 = 30_001;

/// All nodes are targets. `listed` is the list of nodes with an endpoint, if there is one.
fn fused(name: &str, vip: &str, listed: Option<&[u8]>) -> Value {
    let mut one = load_balancer(name, vip, &[]);
    one["spec"]["nodeSet"] = json!("eligible");
    one["spec"]["healthCheck"]["port"] = json!(CHECK);
    let names = |numbers: &[u8]| numbers.iter().map(|number| format!("node{number}")).collect::<Vec<_>>();
    one["spec"]["endpointNodes"] = listed.map(names).into();
    one
}

/// The load balancers, the health of their targets, and what follows from each change.
struct World {
    index: Index,
    health: HealthByProbe,
    endpoints: EndpointNodes,
    now: Instant,
    plan: Plan,
}

impl World {
    /// With four nodes. The first two pass the check, the others say that they have no endpoint.
    fn new(load_balancers: &[Value]) -> Self {
        let mut index = index(load_balancers);
        let targets: Vec<_> = (1..=4).map(|number| target(number, 1)).collect();
        let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": targets}});
        let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
        let set = NodeSet { name: set.name_any(), uid: "set-uid".into(), spec: set.spec.into() };
        apply(&mut index, IndexEvent::NodeSet(Event::Apply(set)));
        let (health, endpoints) = (HealthByProbe::default(), EndpointNodes::default());
        let mut world = Self { index, health, endpoints, now: Instant::now(), plan: Plan::default() };
        world.plan();
        for node in 1..=4 {
            world.set(node, node <= 2);
        }
        world.plan();
        world
    }

    fn plan(&mut self) -> Vec<ListChange> {
        let lists = self.endpoints.sync(&self.index, self.now);
        let Self { index, health, endpoints, now, plan } = self;
        *plan = plan_fused(index, &host(), health, endpoints, *now, &plan.assignments);
        health.set_checks(&plan.checks);
        lists
    }

    fn probe(&self, node: u8) -> Probe {
        let is = |probe: &Probe| probe.address == ip(&format!("10.0.0.{node}"));
        probes(&self.plan).into_iter().find(is).expect("a probe")
    }

    fn set(&mut self, node: u8, has_endpoint: bool) {
        let health = TargetHealth { is_stated: false, ..TargetHealth::without_endpoint() };
        let healthy =
            TargetHealth { state: TargetState::Healthy, reason: String::new(), ..TargetHealth::default() };
        self.health.insert(self.probe(node), if has_endpoint { healthy } else { health });
    }

    /// The list of a load balancer is another one: follows it without a plan, which comes to the same.
    fn list(&mut self, load_balancer: &Value) -> ListChange {
        let next = index(std::slice::from_ref(load_balancer));
        let next = next.load_balancers().next().expect("one").clone();
        let mut change = IndexChange::default();
        self.index.apply(IndexEvent::LoadBalancer(Event::Apply(next.clone())), &mut change);
        assert!(change.is_of_endpoints());
        let list = self.endpoints.update(&next, self.now).expect("a change");
        let before = self.plan.assignments.clone();
        self.follow(std::slice::from_ref(&list));
        let planned = plan_fused(&self.index, &host(), &self.health, &self.endpoints, self.now, &before);
        assert_eq!(self.plan.state, planned.state);
        list
    }

    fn follow(&mut self, lists: &[ListChange]) {
        let Self { health, endpoints, now, plan, .. } = self;
        let inputs = HealthInputs { health, endpoints, room: ROOM, now: *now };
        assert!(follow_all(plan, &mut HashSet::new(), inputs, Changed { lists, ..Changed::default() }));
    }

    fn reached(&self, vip: &str) -> Vec<IpAddr> {
        reached(&self.plan, vip, 6, 80).into_iter().collect()
    }

    fn reason(&self, load_balancer: &str, node: u8) -> Option<String> {
        let report = &self.plan.statuses[load_balancer].targets[0];
        let mut targets = report.targets.iter();
        Some(targets.find(|target| target.address == ip(&format!("10.0.0.{node}")))?.reason.clone())
    }
}

fn nodes(numbers: &[u8]) -> Vec<IpAddr> {
    numbers.iter().map(|number| ip(&format!("10.0.0.{number}"))).collect()
}

const VIP: &str = "10.0.0.100";

#[test]
fn node_that_leaves_the_list_is_not_used_for_a_time_and_one_that_joins_until_it_passes() {
    let mut world = World::new(&[fused("a", VIP, Some(&[1]))]);
    assert_eq!(world.reached(VIP), nodes(&[1, 2]), "the first list is no news");
    world.list(&fused("a", VIP, Some(&[1, 2, 3])));
    assert_eq!(world.reached(VIP), nodes(&[1, 2]), "the third one does not pass yet");
    let left = world.list(&fused("a", VIP, Some(&[1, 3])));
    assert_eq!((left.joined, left.left), (vec![], vec!["node2".to_owned()]));
    assert_eq!(world.reached(VIP), nodes(&[1]));
    world.list(&fused("a", VIP, Some(&[1, 2])));
    assert_eq!(world.reached(VIP), nodes(&[1, 2]), "it is back");
    world.list(&fused("a", VIP, Some(&[1])));
    let until = world.now + MASKED_FOR;
    world.now = until.checked_sub(Duration::from_millis(1)).expect("later");
    assert!(!world.plan.groups.is_due(world.now));
    world.plan();
    assert_eq!(world.reached(VIP), nodes(&[1]));
    world.now = until;
    assert!(world.plan.groups.is_due(world.now));
    world.follow(&[]);
    assert_eq!(world.reached(VIP), nodes(&[1, 2]), "its own answers decide again");
}

#[test]
fn last_target_that_leaves_the_list_is_used_until_another_one_passes() {
    let mut world = World::new(&[fused("a", VIP, Some(&[1, 2]))]);
    world.set(2, false);
    world.plan();
    assert_eq!(world.reached(VIP), nodes(&[1]));
    world.now += Duration::from_secs(10);
    world.list(&fused("a", VIP, Some(&[3])));
    assert_eq!(world.reached(VIP), nodes(&[1]), "the last good one");
    assert_eq!(world.reason("a", 1).as_deref(), Some("no endpoint by EndpointSlices"));
    world.set(3, true);
    world.plan();
    assert_eq!(world.reached(VIP), nodes(&[3]));
    world.now += Duration::from_secs(2);
    world.set(3, false);
    world.plan();
    assert_eq!(world.reached(VIP), nodes(&[3]), "not the one that had lost its endpoint before");
}

#[test]
fn statement_decides_whatever_the_list_says() {
    let mut world = World::new(&[fused("a", VIP, Some(&[1, 2]))]);
    let stated =
        TargetHealth { is_stated: true, ..world.health.get(&world.probe(2)).cloned().expect("known") };
    world.health.insert(world.probe(2), stated);
    world.plan();
    world.list(&fused("a", VIP, Some(&[3])));
    assert_eq!(world.reached(VIP), nodes(&[2]), "the one that states nothing is masked");
}

/// With the same check and the same nodes they would share a group, and share the probes.
#[test]
fn list_counts_for_its_own_load_balancer_alone() {
    let (other, plain) = ("10.0.0.101", "10.0.0.102");
    let mut world = World::new(&[
        fused("a", VIP, Some(&[1, 2])),
        fused("b", other, Some(&[1, 2])),
        fused("c", plain, None),
    ]);
    let list = world.list(&fused("a", VIP, Some(&[1, 3])));
    assert_eq!(world.reached(VIP), nodes(&[1]));
    assert_eq!((world.reached(other), world.reached(plain)), (nodes(&[1, 2]), nodes(&[1, 2])));
    assert_eq!(world.plan.groups.expected(&list), [], "the probes are those of others, too");
    let mut alone = World::new(&[fused("a", VIP, Some(&[1, 2]))]);
    let list = alone.list(&fused("a", VIP, Some(&[1, 3])));
    let expected = [(alone.probe(3), Some(alone.now)), (alone.probe(2), None)];
    assert_eq!(alone.plan.groups.expected(&list), expected);
}

#[test]
fn change_between_health_check_and_fused_steering_moves_nothing() {
    let mut world = World::new(&[fused("a", VIP, None)]);
    for node in [1, 2] {
        world.set(node, false);
        world.now += Duration::from_secs(5);
        world.plan();
    }
    assert_eq!(world.reached(VIP), nodes(&[2]), "the last good one");
    for listed in [Some(&[3][..]), None, Some(&[])] {
        let before = slots(&world.plan, VIP, 6, 80);
        let next = index(&[fused("a", VIP, listed)]);
        let next = next.load_balancers().next().expect("one").clone();
        apply(&mut world.index, IndexEvent::LoadBalancer(Event::Apply(next)));
        assert_eq!(world.plan(), []);
        assert_eq!(slots(&world.plan, VIP, 6, 80), before, "{listed:?}");
    }
}

#[test]
fn reports_of_load_balancers_with_lists_are_their_own() {
    let world = World::new(&[fused("a", VIP, Some(&[1])), fused("b", "10.0.0.101", None)]);
    let is_shared = |name: &str| world.plan.statuses[name].targets[0].shared.is_some();
    assert_eq!([is_shared("a"), is_shared("b")], [false, true]);
}

proptest! {
    /// Lists and health change in any order: what follows without a plan is what a plan says.
    #[test]
    fn following_lists_comes_to_what_a_plan_comes_to(
        steps in prop::collection::vec((0..3_usize, 0..16_u8, 1..5_u8, any::<bool>(), prop_oneof![Just(0_u64), 1..40_u64]), 1..20),
    ) {
        let names = [("a", VIP), ("b", "10.0.0.101")];
        let mut world = World::new(&names.map(|(name, vip)| fused(name, vip, Some(&[1, 2]))));
        for (which, bits, node, passes, seconds) in steps {
            world.now += Duration::from_secs(seconds);
            let before = world.plan.assignments.clone();
            let Some((name, vip)) = names.get(which).copied() else {
                world.set(node, passes);
                let probe = world.probe(node);
                let World { health, endpoints, now, plan, .. } = &mut world;
                let inputs = HealthInputs { health, endpoints, room: ROOM, now: *now };
                let changed = Changed { probes: std::slice::from_ref(&probe), ..Changed::default() };
                prop_assert!(follow_all(plan, &mut HashSet::new(), inputs, changed));
                let planned = plan_fused(&world.index, &host(), &world.health, &world.endpoints, world.now, &before);
                prop_assert_eq!(&world.plan.state, &planned.state);
                prop_assert_eq!(&world.plan.statuses, &planned.statuses);
                continue;
            };
            let listed: Vec<u8> = (1..=4).filter(|node| bits & (1 << (node - 1)) != 0).collect();
            let next = index(&[fused(name, vip, Some(&listed))]);
            let next = next.load_balancers().next().expect("one").clone();
            apply(&mut world.index, IndexEvent::LoadBalancer(Event::Apply(next.clone())));
            let list = world.endpoints.update(&next, world.now);
            world.follow(list.as_slice());
            let planned = plan_fused(&world.index, &host(), &world.health, &world.endpoints, world.now, &before);
            prop_assert_eq!(&world.plan.state, &planned.state);
            prop_assert_eq!(&world.plan.statuses, &planned.statuses);
            // A target that neither its node nor the list says to have an endpoint is not used while another one serves.
            let healthy = |node: u8| world.health.get(&world.probe(node)).is_some_and(TargetHealth::is_healthy);
            let list = world.endpoints.of(name).expect("a list");
            let is_masked = |node: u8| list.masked_until(&format!("node{node}"), world.now).is_some();
            let serving: Vec<u8> = (1..=4).filter(|node| healthy(*node) && !is_masked(*node)).collect();
            if !serving.is_empty() {
                prop_assert_eq!(world.reached(vip), nodes(&serving));
            }
        }
    }
}
