// SPDX-License-Identifier: Apache-2.0
//! What follows from changed load balancers without a plan is what a plan says.

use super::host_network::host_with_tunnel;
use super::retargeting::follow_all;
use super::*;
use crate::index::LoadBalancer;
use crate::plan::retarget::ChangedStatus;
use steerage_edge_dataplane::StateChange;

const VIPS: [&str; 6] = ["10.0.0.100", "10.0.0.101", "10.0.0.102", "fd00::100", "fd00::101", "10.0.0.9"];
const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];

/// One load balancer, of few kinds of everything, so that several have the same.
#[derive(Clone, Debug)]
struct Form {
    vips: Vec<usize>,
    targets: Vec<(u8, u32)>,
    draining: Vec<u8>,
    is_of_node_set: bool,
    listed: Option<Vec<u8>>,
    ports: Vec<u16>,
    check: usize,
    sharing: Option<bool>,
    ranges: Vec<usize>,
    has_affinity: bool,
}

impl Form {
    fn object(&self, name: &str) -> Value {
        let targets: Vec<_> = self.targets.iter().map(|(number, weight)| target(*number, *weight)).collect();
        let mut object = load_balancer(name, "", if self.is_of_node_set { &[] } else { &targets });
        let spec = &mut object["spec"];
        spec["addresses"] = self.vips.iter().map(|vip| VIPS[*vip]).collect();
        spec["listeners"] = self.ports.iter().map(|port| json!({"protocol": "TCP", "port": port})).collect();
        spec["sourceRanges"] = self
            .ranges
            .iter()
            .map(|range| ["10.1.0.0/16", "10.2.0.0/16", "nonsense", "fd01::/16"][*range])
            .collect();
        if self.is_of_node_set {
            spec["nodeSet"] = json!("eligible");
        } else {
            spec["draining"] = self.draining.iter().map(|number| target(*number, 1)).collect();
        }
        let listed =
            |numbers: &Vec<u8>| numbers.iter().map(|number| format!("node{number}")).collect::<Vec<_>>();
        spec["endpointNodes"] = self.listed.as_ref().map(listed).into();
        match self.check {
            0 => {}
            1 => spec["healthCheck"]["port"] = json!(30_001),
            2 => spec["healthCheck"]["intervalMilliseconds"] = json!(5000),
            3 => spec["panicThresholdPercent"] = json!(50),
            _ => spec["slowStartMilliseconds"] = json!(10_000),
        }
        if let Some(is_web) = self.sharing {
            spec["sharingKey"] = json!(if is_web { "web" } else { "dns" });
        }
        if self.has_affinity {
            spec["affinity"] = json!({"timeoutSeconds": 10_800});
        }
        object
    }
}

fn any_form() -> impl Strategy<Value = Form> {
    let some = |number: std::ops::Range<u8>, most: usize| prop::collection::btree_set(number, 0..most);
    let list = |set: BTreeSet<u8>| set.into_iter().collect::<Vec<_>>();
    let vips = prop::sample::subsequence((0..VIPS.len()).collect::<Vec<_>>(), 0..3);
    // 5 is this host.
    let targets = prop::collection::btree_map(1..7_u8, prop_oneof![3 => Just(1_u32), 1 => 2..4_u32], 0..4);
    let ports = prop::sample::subsequence(vec![80_u16, 443, 8080], 1..3);
    let ranges = prop::sample::subsequence(vec![0_usize, 1, 2, 3], 0..3);
    let check = prop_oneof![4 => Just(0_usize), 2 => 1..5_usize];
    let others = (prop::option::of(any::<bool>()), ranges, any::<bool>(), check);
    let of_nodes = (any::<bool>(), prop::option::weighted(0.3, some(1..5, 4)), some(6..8, 2));
    (vips, targets, ports, others, of_nodes).prop_map(move |(vips, targets, ports, others, of_nodes)| {
        let (sharing, ranges, has_affinity, check) = others;
        let (is_of_node_set, listed, draining) = of_nodes;
        Form {
            vips,
            targets: targets.into_iter().collect(),
            draining: list(draining),
            is_of_node_set,
            listed: listed.map(list),
            ports,
            check,
            sharing,
            ranges,
            has_affinity,
        }
    })
}

#[derive(Clone, Debug)]
enum Step {
    /// Some load balancers are added, changed or deleted at once.
    Change(Vec<(usize, Option<Form>)>),
    /// Health of some targets.
    Health(Vec<(usize, u8)>),
    /// The set of all nodes has so many.
    Nodes(u8),
    /// Whether node 3, which is off the link, receives from the tunnel.
    Tunnel(bool),
    Time(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let change = (0..NAMES.len(), prop::option::weighted(0.8, any_form()));
    prop_oneof![
        6 => prop::collection::vec(change, 1..3).prop_map(Step::Change),
        3 => prop::collection::vec((0..64_usize, 0..4_u8), 1..6).prop_map(Step::Health),
        1 => (2..6_u8).prop_map(Step::Nodes),
        1 => any::<bool>().prop_map(Step::Tunnel),
        1 => prop_oneof![1..4_u64, 1..70_u64, Just(90_000_u64)].prop_map(Step::Time),
    ]
}

/// It is node 3.
fn with_node_off_the_link() -> HostNetwork {
    let host = host_with_tunnel();
    let route =
        |net: &str| Route { net: net.parse().expect("net"), device: Some(2), gateway: true, next_hop: None };
    let routes: Vec<_> =
        host.routes.iter().cloned().chain(["10.0.0.3/32", "fd00::3/128"].map(route)).collect();
    HostNetwork { routes: routes.into(), ..host }
}

/// What the engine does, with a plan for everything that needs one.
struct Follower {
    index: Index,
    host: HostNetwork,
    health: HealthByProbe,
    endpoints: EndpointNodes,
    now: Instant,
    plan: Plan,
    checks: HashMap<Probe, bool>,
    amended: usize,
    planned: usize,
}

pub(super) fn parsed(object: &Value) -> LoadBalancer {
    index(std::slice::from_ref(object)).load_balancers().next().expect("one").clone()
}

impl Follower {
    fn new(load_balancers: &[Value]) -> Self {
        let mut follower = Self {
            index: index(load_balancers),
            host: HostNetwork { peers: vec![peer(9, PeerLiveness::Live)], ..with_node_off_the_link() },
            health: HealthByProbe::default(),
            endpoints: EndpointNodes::default(),
            now: Instant::now(),
            plan: Plan::default(),
            checks: HashMap::new(),
            amended: 0,
            planned: 0,
        };
        follower.set_nodes(4);
        follower
    }

    fn inputs(&self) -> PlanInputs<'_> {
        let Self { index, host, health, endpoints, now, .. } = self;
        PlanInputs { index, host, health, endpoints, room: ROOM, now: *now }
    }

    fn set_nodes(&mut self, number: u8) {
        let targets: Vec<_> = (1..=number).map(|number| target(number, 1)).collect();
        let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": targets}});
        let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
        let set = NodeSet { name: set.name_any(), uid: "set-uid".into(), spec: set.spec.into() };
        apply(&mut self.index, IndexEvent::NodeSet(Event::Apply(set)));
        self.plan_all();
    }

    /// A plan follows where the health of the node is followed.
    fn set_tunnel(&mut self, receives: bool) {
        let receiver =
            if receives { TunnelReceiver::Receives { vni: 7, port: 10_361 } } else { TunnelReceiver::Off };
        for address in ["10.0.0.3", "fd00::3"].map(ip) {
            if self.checks.keys().any(|probe| probe.address == address) {
                self.health.set_tunnel_receiver(address, Some(receiver));
            }
        }
        self.plan_all();
    }

    fn plan_all(&mut self) {
        self.endpoints.sync(&self.index, self.now);
        self.plan = super::super::plan(&self.inputs(), &self.plan.assignments);
        self.health.set_checks(&self.plan.checks);
        self.checks = self.plan.checks.probes();
        self.planned += 1;
    }

    /// Follows what time alone, or these probes, have changed.
    fn retarget(&mut self, probes: &[Probe], ports: &[u16]) -> bool {
        let (health, endpoints, now) = (&self.health, &self.endpoints, self.now);
        let inputs = HealthInputs { health, endpoints, room: ROOM, now };
        let mut urgent: HashSet<Probe> =
            self.checks.iter().filter(|(_, is_urgent)| **is_urgent).map(|(probe, _)| probe.clone()).collect();
        let is_followed =
            follow_all(&mut self.plan, &mut urgent, inputs, Changed { probes, ports, lists: &[] });
        for (probe, is_urgent) in &mut self.checks {
            *is_urgent = urgent.contains(probe);
        }
        is_followed
    }

    fn amend(&mut self, changed: &BTreeSet<String>) -> bool {
        for name in changed {
            match self.index.load_balancer(name) {
                Some(object) => drop(self.endpoints.update(object, self.now)),
                None => self.endpoints.remove(name),
            }
        }
        if !self.retarget(&[], &[]) {
            return false;
        }
        let Self { index, host, health, endpoints, now, plan, .. } = self;
        let inputs = PlanInputs { index, host, health, endpoints, room: ROOM, now: *now };
        let Some(amended) = plan.groups.amend(&inputs, &mut plan.assignments, changed) else { return false };
        let Amended { state, statuses, reports } = amended;
        let checks = plan.groups.take_changed_checks();
        state.apply_to(&mut plan.state);
        for (name, status) in statuses {
            match status {
                Some(status) => drop(plan.statuses.insert(name, status)),
                None => drop(plan.statuses.remove(&name)),
            }
        }
        for ChangedStatus { load_balancer, position, targets } in reports {
            plan.statuses.get_mut(&load_balancer).expect("a load balancer").targets[position] = targets;
        }
        self.checks.retain(|probe, _| !checks.contains_key(&probe.address));
        for (address, sets) in &checks {
            health.set_checks_of(*address, sets);
        }
        let changed: crate::checks::Checks = checks.into_iter().collect();
        self.checks.extend(changed.probes());
        self.amended += 1;
        true
    }

    fn change(&mut self, objects: &[(&str, Option<Value>)]) {
        let mut change = IndexChange::default();
        for (name, object) in objects {
            let event = match object {
                Some(object) => Event::Apply(parsed(object)),
                None => Event::Delete { key: (*name).to_owned(), version: String::new() },
            };
            self.index.apply(IndexEvent::LoadBalancer(event), &mut change);
        }
        let names: BTreeSet<_> = objects.iter().map(|(name, _)| (*name).to_owned()).collect();
        let before = self.plan.assignments.clone();
        if !self.amend(&names) {
            self.plan_all();
            return;
        }
        let planned = super::super::plan(&self.inputs(), &before);
        assert_eq!(meaning(&self.plan.state), meaning(&planned.state));
        self.check();
    }

    fn set_health(&mut self, changes: &[(usize, u8)]) {
        let mut probes: Vec<_> = self.checks.keys().cloned().collect();
        probes.sort_by_key(|probe| (probe.address, probe.check.port, probe.check.interval_milliseconds));
        let mut changed = Vec::new();
        for (at, state) in changes.iter().filter(|_| !probes.is_empty()) {
            let probe = probes[at % probes.len()].clone();
            let of =
                [TargetState::Healthy, TargetState::Unhealthy, TargetState::Healthy, TargetState::Unhealthy];
            let health = TargetHealth {
                state: of[usize::from(*state)],
                reason: String::new(),
                lacks_endpoint: *state == 3,
                ..TargetHealth::default()
            };
            self.health.insert(probe.clone(), health);
            changed.push(probe);
        }
        if !self.retarget(&changed, &[]) {
            self.plan_all();
            return;
        }
        self.check();
    }

    /// A plan finds nothing to do.
    fn check(&self) {
        let next = super::super::plan(&self.inputs(), &self.plan.assignments);
        assert_eq!(next.state, self.plan.state);
        assert_eq!(next.statuses, self.plan.statuses);
        assert_eq!(next.checks.probes(), self.checks);
        assert_eq!(next.groups.healthy_vips(), self.plan.groups.healthy_vips());
        assert_eq!(next.groups.draining(), self.plan.groups.draining());
    }
}

/// Without numbers, which follow from the order of changes.
fn meaning(state: &State) -> impl PartialEq + std::fmt::Debug {
    let address = |number: &u32| state.targets[number].address;
    let listener = |(key, listener): (&ListenerKey, &Listener)| {
        let slots: Vec<_> = state.tables[&listener.table].slots.iter().map(address).collect();
        (*key, (listener.has_affinity, listener.ranges.clone(), slots))
    };
    let listeners: BTreeMap<_, _> = state.listeners.iter().map(listener).collect();
    let targets: BTreeMap<_, _> = state
        .targets
        .values()
        .map(|target| (target.address, target.path))
        .map(|(address, path)| (address, format!("{path:?}")))
        .collect();
    (listeners, targets, state.vips.clone(), state.senders.clone(), state.tables.len())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn amending_comes_to_what_a_plan_comes_to(steps in prop::collection::vec(any_step(), 1..20)) {
        let mut follower = Follower::new(&[]);
        for step in steps {
            match step {
                Step::Change(changes) => {
                    let objects: Vec<_> = changes
                        .iter()
                        .map(|(name, form)| (NAMES[*name], form.as_ref().map(|form| form.object(NAMES[*name]))))
                        .collect();
                    follower.change(&objects);
                }
                Step::Health(changes) => follower.set_health(&changes),
                Step::Nodes(number) => follower.set_nodes(number),
                Step::Tunnel(receives) => follower.set_tunnel(receives),
                Step::Time(seconds) => {
                    follower.now += Duration::from_secs(seconds);
                    // Numbers of removed targets expire by plans alone.
                    if seconds >= 3600 || follower.plan.is_waiting || !follower.retarget(&[], &[]) {
                        follower.plan_all();
                    }
                }
            }
        }
    }
}

fn plain(name: &str, vip: &str, numbers: &[u8]) -> Value {
    load_balancer(name, vip, &numbers.iter().map(|number| target(*number, 1)).collect::<Vec<_>>())
}

/// Nothing of this needs a plan.
#[test]
fn usual_changes_need_no_plan() {
    let first = [plain("a", VIPS[0], &[1, 2]), plain("b", VIPS[1], &[2, 3])];
    let mut follower = Follower::new(&first);
    follower.set_health(&(0..8).map(|at| (at, 0)).collect::<Vec<_>>());
    let planned = follower.planned;
    let mut of_set = plain("c", VIPS[2], &[]);
    of_set["spec"]["nodeSet"] = json!("eligible");
    let mut ranged = plain("a", VIPS[0], &[1, 2]);
    ranged["spec"]["sourceRanges"] = json!(["10.1.0.0/16"]);
    let mut sharing = [plain("d", VIPS[3], &[1]), plain("e", VIPS[3], &[2])];
    for one in &mut sharing {
        one["spec"]["sharingKey"] = json!("web");
    }
    let [d, e] = sharing;
    let changes: [(&str, Option<Value>); 12] = [
        ("c", Some(of_set)),
        ("a", Some(ranged)),
        ("a", Some(plain("a", VIPS[0], &[1, 2, 3, 4]))),
        ("a", Some(load_balancer("a", VIPS[0], &[target(1, 1), target(2, 3)]))),
        ("b", Some(plain("b", VIPS[4], &[6]))),
        // Another one has the address, and then it is free.
        ("f", Some(plain("f", VIPS[0], &[4]))),
        ("a", None),
        ("d", Some(d)),
        ("e", Some(e)),
        ("d", None),
        ("c", None),
        ("f", None),
    ];
    let number = changes.len();
    for (name, object) in changes {
        follower.change(&[(name, object)]);
    }
    assert_eq!((follower.planned, follower.amended), (planned, number));
}

#[test]
fn what_needs_more_than_there_is_room_for_needs_a_plan() {
    let mut follower = Follower::new(&[plain("a", VIPS[0], &[1, 2])]);
    let mut large = plain("b", VIPS[1], &[1]);
    large["spec"]["listeners"] = (1..=40_000).map(|port| json!({"protocol": "TCP", "port": port})).collect();
    follower.change(&[("b", Some(large.clone()))]);
    assert_eq!(follower.amended, 1);
    large["spec"]["addresses"] = json!([VIPS[1], VIPS[2]]);
    follower.change(&[("b", Some(large))]);
    assert!(follower.plan.statuses["b"].problem.contains("no room"));
    follower.change(&[("c", Some(plain("c", VIPS[3], &[1])))]);
    assert_eq!(follower.amended, 1, "who gets room depends on all");
}

/// A health check of another port has to be tried first.
#[test]
fn vip_that_waits_for_probes_needs_a_plan() {
    let mut follower = Follower::new(&[plain("a", VIPS[0], &[1, 2])]);
    follower.set_health(&[(0, 0), (1, 0)]);
    let mut other = plain("a", VIPS[0], &[1, 2]);
    other["spec"]["healthCheck"]["port"] = json!(30_001);
    follower.change(&[("a", Some(other))]);
    assert!(follower.plan.is_waiting && follower.amended == 0);
}

#[test]
fn ports_that_a_node_begins_or_ends_to_state_need_no_plan() {
    let mut of_set = plain("a", VIPS[0], &[]);
    of_set["spec"]["nodeSet"] = json!("eligible");
    let mut other = of_set.clone();
    (other["metadata"]["name"], other["spec"]["addresses"]) = (json!("b"), json!([VIPS[1]]));
    other["spec"]["healthCheck"]["port"] = json!(30_001);
    let mut follower = Follower::new(&[of_set, other]);
    let node = |number: u8| ip(&format!("10.0.0.{number}"));
    let ports = |ports: &[u16]| Arc::new(ports.iter().copied().collect::<crate::port_set::PortSet>());
    for number in 1..=4 {
        assert_eq!(follower.health.set_stated(node(number), ports(&[10_256, 30_001])), None);
    }
    follower.plan_all();
    let all = follower.plan.statuses["b"].targets[0].counts.clone();
    assert_eq!((all.without_endpoint, all.initial), (4, 0));
    for (number, stated, changed, initial) in [
        (1, &[10_256][..], &[30_001][..], 1),
        (2, &[30_001], &[10_256], 1),
        (1, &[10_256, 30_001, 7], &[7, 30_001], 0),
    ] {
        let news = follower.health.set_stated(node(number), ports(stated));
        assert_eq!(news.as_deref(), Some(changed));
        assert!(follower.retarget(&[], changed));
        follower.check();
        assert_eq!(follower.plan.statuses["b"].targets[0].counts.initial, initial);
    }
}

#[test]
fn plan_of_an_hour_ago_needs_another_one() {
    let mut follower = Follower::new(&[plain("a", VIPS[0], &[1, 2])]);
    follower.now += Duration::from_hours(2);
    follower.change(&[("b", Some(plain("b", VIPS[1], &[1])))]);
    assert_eq!(follower.amended, 0, "numbers of removed targets expire");
    follower.change(&[("b", Some(plain("b", VIPS[1], &[2])))]);
    assert_eq!(follower.amended, 1);
}

#[test]
fn state_change_of_nothing_is_empty() {
    let mut follower = Follower::new(&[plain("a", VIPS[0], &[1, 2])]);
    let Follower { index, host, health, endpoints, now, plan, .. } = &mut follower;
    let inputs = PlanInputs { index, host, health, endpoints, room: ROOM, now: *now };
    let amended = plan.groups.amend(&inputs, &mut plan.assignments, &["none".to_owned()].into());
    assert_eq!(amended.expect("no plan").state, StateChange::default());
}
