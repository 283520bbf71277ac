// SPDX-License-Identifier: Apache-2.0
//! VIPs whose targets change, plan after plan.

use super::*;

/// Plans one after the other, as the engine does.
pub(super) struct Planner {
    pub(super) health: HealthByProbe,
    pub(super) now: Instant,
    pub(super) plan: Plan,
}

impl Planner {
    pub(super) fn new() -> Self {
        Self { health: HealthByProbe::default(), now: Instant::now(), plan: Plan::default() }
    }

    pub(super) fn plan(&mut self, index: &Index) -> &Plan {
        self.plan = plan_next(index, &host(), &self.health, self.now, &self.plan.assignments);
        self.health.set_checks(&self.plan.checks);
        &self.plan
    }

    /// Completes the probes of this port at these addresses, and plans.
    pub(super) fn probed(&mut self, index: &Index, port: u16, healthy: &[u8], unhealthy: &[u8]) -> &Plan {
        for probe in probes(&self.plan).iter().filter(|probe| probe.check.port == port) {
            let is = |numbers: &[u8]| {
                numbers.iter().any(|number| probe.address == ip(&format!("10.0.0.{number}")))
            };
            let state = match (is(healthy), is(unhealthy)) {
                (true, _) => TargetState::Healthy,
                (_, true) => TargetState::Unhealthy,
                _ => continue,
            };
            self.health.insert(
                probe.clone(),
                TargetHealth { state, reason: String::new(), ..TargetHealth::default() },
            );
        }
        self.plan(index)
    }

    /// These nodes say that they have no local endpoint.
    pub(super) fn without_endpoint(&mut self, index: &Index, nodes: &[u8]) -> &Plan {
        let is_one = |probe: &&Probe| nodes.iter().any(|node| probe.address == ip(&format!("10.0.0.{node}")));
        for probe in probes(&self.plan).iter().filter(is_one) {
            let (state, lacks_endpoint) = (TargetState::Unhealthy, true);
            let health = TargetHealth { state, lacks_endpoint, ..TargetHealth::default() };
            self.health.insert(probe.clone(), health);
        }
        self.plan(index)
    }

    pub(super) fn reached(&self) -> Vec<u8> {
        let octet = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets()[3],
            IpAddr::V6(_) => 0,
        };
        reached(&self.plan, VIP, 6, 80).into_iter().map(octet).collect()
    }
}

pub(super) const VIP: &str = "10.0.0.100";

/// `load_balancer` with a check of this port.
pub(super) fn checked(targets: &[Value], port: u16) -> Value {
    let mut load_balancer = load_balancer("a", VIP, targets);
    load_balancer["spec"]["healthCheck"]["port"] = json!(port);
    load_balancer
}

/// The same with the targets of the node set.
pub(super) fn of_node_set(port: u16) -> Value {
    let mut load_balancer = checked(&[], port);
    load_balancer["spec"]["nodeSet"] = json!("eligible");
    load_balancer
}

fn set_nodes(index: &mut Index, targets: &[Value]) {
    let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": targets}});
    let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
    let set = NodeSet { name: set.name_any(), uid: "set".into(), spec: set.spec.into() };
    apply(index, IndexEvent::NodeSet(Event::Apply(set)));
}

fn delete_nodes(index: &mut Index) {
    apply(index, IndexEvent::NodeSet(Event::Delete { key: "eligible".to_owned(), version: String::new() }));
}

pub(super) fn of_three_nodes(load_balancer: Value) -> Index {
    let mut index = index(&[load_balancer]);
    set_nodes(&mut index, &[target(1, 1), target(2, 1), target(3, 1)]);
    index
}

/// A planner whose VIP uses node 1 alone, by health checks of the node set at port 31000.
fn steered_by_health_checks() -> (Planner, Index) {
    let (mut planner, index) = (Planner::new(), of_three_nodes(of_node_set(31000)));
    planner.plan(&index);
    planner.probed(&index, 31000, &[1], &[2, 3]);
    assert_eq!(planner.reached(), [1]);
    (planner, index)
}

#[test]
fn change_of_steering_uses_no_node_without_an_endpoint() {
    let mut planner = Planner::new();
    let by_api = of_three_nodes(checked(&[target(1, 1)], 10256));
    planner.plan(&by_api);
    planner.probed(&by_api, 10256, &[1], &[]);
    // The provider's two writes: the check, and the targets.
    let checked = of_three_nodes(checked(&[target(1, 1)], 31000));
    planner.plan(&checked);
    assert_eq!(planner.reached(), [1]);
    planner.probed(&checked, 31000, &[1], &[]);
    let by_health_check = of_three_nodes(of_node_set(31000));
    assert!(planner.plan(&by_health_check).is_waiting);
    assert_eq!(planner.reached(), [1], "two probes have not completed");
    assert!(planner.probed(&by_health_check, 31000, &[], &[3]).is_waiting);
    assert!(!planner.probed(&by_health_check, 31000, &[], &[2]).is_waiting);
    assert_eq!(planner.reached(), [1]);
    assert_eq!(planner.plan.assignments.tables.len(), 1, "that of the last targets is forgotten");
    // And back: the targets, and the check.
    for back in [&checked, &by_api] {
        planner.plan(back);
        assert_eq!(planner.reached(), [1]);
    }
}

#[test]
fn first_healthy_target_does_not_get_all_connections() {
    let (mut planner, _) = steered_by_health_checks();
    let slower = of_three_nodes(of_node_set(32000));
    planner.plan(&slower);
    planner.probed(&slower, 32000, &[2], &[]);
    assert_eq!(planner.reached(), [1], "the last targets");
    planner.probed(&slower, 32000, &[3], &[1]);
    assert_eq!(planner.reached(), [2, 3]);
}

#[test]
fn wait_for_probes_is_limited() {
    let (mut planner, _) = steered_by_health_checks();
    let hanging = of_three_nodes(of_node_set(32000));
    planner.plan(&hanging);
    planner.now += select::MAX_WAIT / 2;
    assert!(planner.plan(&hanging).is_waiting);
    // A further change does not begin the wait again.
    let hanging = of_three_nodes(of_node_set(33000));
    planner.plan(&hanging);
    assert_eq!(planner.reached(), [1]);
    planner.now += select::MAX_WAIT / 2;
    assert!(planner.plan(&hanging).is_waiting);
    assert_eq!(planner.reached(), [1], "the only target that is known to be healthy");
    planner.now += select::MAX_WAIT_FOR_HEALTHY;
    assert!(!planner.plan(&hanging).is_waiting);
    assert_eq!(planner.reached(), [1, 2, 3], "fail open");
}

#[test]
fn long_wait_ends_when_a_new_target_is_healthy_or_no_last_one_is() {
    let slower = || of_three_nodes(of_node_set(32000));
    let waiting = || {
        let (mut planner, last) = steered_by_health_checks();
        planner.plan(&slower());
        planner.now += select::MAX_WAIT;
        planner.plan(&slower());
        assert_eq!(planner.reached(), [1]);
        (planner, last)
    };
    let (mut planner, _) = waiting();
    planner.probed(&slower(), 32000, &[2], &[]);
    assert_eq!(planner.reached(), [2]);
    let (mut planner, _) = waiting();
    planner.probed(&slower(), 31000, &[], &[1]);
    assert_eq!(planner.reached(), [1, 2, 3], "fail open");
}

#[test]
fn edited_times_and_thresholds_change_nothing() {
    let (mut planner, _) = steered_by_health_checks();
    let mut edited = of_node_set(31000);
    let check = &mut edited["spec"]["healthCheck"];
    for (field, value) in
        [("intervalMilliseconds", 30_000), ("timeoutMilliseconds", 5000), ("unhealthyThreshold", 5)]
    {
        check[field] = json!(value);
    }
    let edited = of_three_nodes(edited);
    assert!(!planner.plan(&edited).is_waiting);
    assert_eq!(planner.reached(), [1]);
    let states = |planner: &Planner| -> Vec<_> {
        planner.plan.statuses["a"].targets[0].targets.iter().map(|target| target.state).collect()
    };
    let known = [TargetState::Healthy, TargetState::Unhealthy, TargetState::Unhealthy];
    assert_eq!(states(&planner), known);
    planner.plan(&edited);
    assert_eq!(states(&planner), known, "also once the old probes are forgotten");
}

#[test]
fn change_that_is_taken_back_before_it_is_probed_changes_nothing() {
    let (mut planner, index) = steered_by_health_checks();
    planner.plan(&of_three_nodes(of_node_set(32000)));
    planner.plan(&index);
    assert_eq!(planner.reached(), [1]);
}

#[test]
fn deleted_node_set_keeps_its_last_targets_probed_and_guarded() {
    let (mut planner, mut index) = steered_by_health_checks();
    let nodes = planner.plan.state.senders.clone();
    delete_nodes(&mut index);
    planner.plan(&index);
    assert_eq!(planner.reached(), [1]);
    assert_eq!(planner.plan.state.senders, nodes, "frames of the nodes to the VIP are dropped");
    assert!(planner.plan.statuses["a"].problem.contains("EdgeNodeSet eligible does not exist"));
    planner.probed(&index, 31000, &[2], &[1]);
    assert_eq!(planner.reached(), [2], "still probed");
    set_nodes(&mut index, &[target(1, 1), target(2, 1), target(3, 1)]);
    planner.plan(&index);
    assert_eq!(planner.reached(), [2], "the recreated set does not begin without health");
}

#[test]
fn new_owner_of_an_address_never_gets_the_targets_of_the_last_one() {
    for (name, uid) in [("a", "another"), ("b", "uid-a")] {
        let mut planner = Planner::new();
        let first = index(&[load_balancer("a", VIP, &[target(1, 1)])]);
        planner.plan(&first);
        planner.probed(&first, 10256, &[1], &[]);
        let mut successor = load_balancer(name, VIP, &[target(2, 1)]);
        successor["metadata"]["uid"] = json!(uid);
        planner.plan(&index(&[successor]));
        assert_eq!(planner.reached(), [2], "{name} {uid}");
    }
}

/// These nodes refuse their first probes of this port.
fn refuse(planner: &mut Planner, index: &Index, port: u16, refusing: &[u8]) {
    let is_refusing =
        |probe: &&Probe| refusing.iter().any(|number| probe.address == ip(&format!("10.0.0.{number}")));
    for probe in probes(&planner.plan).iter().filter(|probe| probe.check.port == port).filter(is_refusing) {
        planner.health.insert(
            probe.clone(),
            TargetHealth { reason: "connection refused".to_owned(), ..TargetHealth::default() },
        );
    }
    planner.plan(index);
}

#[test]
fn one_refusing_node_does_not_make_a_vip_wait() {
    let (mut planner, _) = steered_by_health_checks();
    let next = of_three_nodes(of_node_set(32000));
    planner.plan(&next);
    refuse(&mut planner, &next, 32000, &[3]);
    planner.probed(&next, 32000, &[], &[1]);
    assert!(planner.plan.is_waiting, "node 2 was not tried");
    planner.probed(&next, 32000, &[2], &[]);
    assert!(!planner.plan.is_waiting);
    assert_eq!(planner.reached(), [2]);
    assert_eq!(planner.plan.statuses["a"].targets[0].targets[2].reason, "connection refused");
}

#[test]
fn vip_waits_while_all_new_targets_refuse() {
    let (mut planner, _) = steered_by_health_checks();
    let next = of_three_nodes(of_node_set(32000));
    planner.plan(&next);
    refuse(&mut planner, &next, 32000, &[1, 2, 3]);
    assert!(planner.plan.is_waiting, "their ports may open a moment later");
    assert_eq!(planner.reached(), [1]);
    planner.probed(&next, 32000, &[], &[1]);
    assert!(planner.plan.is_waiting, "nodes 2 and 3 may still open theirs");
    planner.probed(&next, 32000, &[], &[2, 3]);
    assert_eq!(planner.reached(), [1, 2, 3], "fail open");
}

#[test]
fn last_group_without_a_target_is_not_kept() {
    let mut planner = Planner::new();
    let empty = of_three_nodes(checked(&[], 10256));
    planner.plan(&empty);
    let next = of_three_nodes(of_node_set(31000));
    assert!(!planner.plan(&next).is_waiting);
    assert_eq!(planner.reached(), [1, 2, 3]);
    assert_eq!(probes(&planner.plan).len(), 3);
}

#[test]
fn last_group_without_a_healthy_target_is_kept_until_a_new_target_is_healthy() {
    let (mut planner, last) = steered_by_health_checks();
    planner.probed(&last, 31000, &[], &[1]);
    let next = of_three_nodes(of_node_set(32000));
    planner.plan(&next);
    assert!(planner.plan.is_waiting, "no group is known to be better");
    planner.probed(&next, 32000, &[2], &[]);
    assert!(!planner.plan.is_waiting);
    assert_eq!(planner.reached(), [2]);
    assert!(
        probes(&planner.plan).iter().all(|probe| probe.check.port == 32000),
        "the last group is forgotten"
    );
}

#[test]
fn probes_are_urgent_while_no_target_of_the_group_is_healthy() {
    let index = of_three_nodes(of_node_set(31000));
    let mut planner = Planner::new();
    planner.plan(&index);
    assert_eq!(urgent_probes(&planner.plan), probes(&planner.plan));
    planner.probed(&index, 31000, &[], &[1, 2, 3]);
    assert_eq!(urgent_probes(&planner.plan).len(), 3);
    planner.probed(&index, 31000, &[2], &[]);
    assert!(urgent_probes(&planner.plan).is_empty());
}
