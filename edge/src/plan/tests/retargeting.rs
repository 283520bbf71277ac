// SPDX-License-Identifier: Apache-2.0
//! What follows from changed health without a plan is what a plan says.

use super::*;
use crate::plan::retarget::ChangedStatus;

/// Of load balancers whose targets overlap, some with equal checks, with two VIPs of a family, or of both families.
fn load_balancers() -> Vec<Value> {
    let some = |numbers: &[u8]| numbers.iter().map(|number| target(*number, 1)).collect::<Vec<_>>();
    let mut shared = load_balancer("shared", "10.0.0.100", &some(&[1, 2, 3]));
    shared["spec"]["addresses"] = json!(["10.0.0.100", "fd00::100"]);
    let mut two = load_balancer("two", "10.0.0.101", &some(&[2, 3, 4]));
    two["spec"]["addresses"] = json!(["10.0.0.101", "10.0.0.102"]);
    let mut own_check = load_balancer("own-check", "10.0.0.103", &some(&[1, 2, 3, 4]));
    own_check["spec"]["healthCheck"]["port"] = json!(30_001);
    let mut other_interval = load_balancer("other-interval", "10.0.0.104", &some(&[1, 2]));
    other_interval["spec"]["healthCheck"]["intervalMilliseconds"] = json!(5000);
    let mut rules = load_balancer("rules", "10.0.0.106", &some(&[1, 2, 3, 4]));
    rules["spec"]["panicThresholdPercent"] = json!(50);
    rules["spec"]["slowStartMilliseconds"] = json!(10_000);
    rules["spec"]["draining"] = json!([target(5, 1), target(6, 1)]);
    vec![rules, shared, two, own_check, other_interval, load_balancer("without-targets", "10.0.0.105", &[])]
}

fn set(health: &mut HealthByProbe, probe: &Probe, state: TargetState, weight: Option<u32>) {
    set_endpoint(health, probe, state, weight, false);
}

fn set_endpoint(
    health: &mut HealthByProbe,
    probe: &Probe,
    state: TargetState,
    weight: Option<u32>,
    lacks_endpoint: bool,
) {
    let reason = if state == TargetState::Healthy { "" } else { "refused" };
    health.insert(
        probe.clone(),
        TargetHealth { state, reason: reason.to_owned(), weight, lacks_endpoint, is_stated: false },
    );
}

fn sorted(plan: &Plan) -> Vec<Probe> {
    let mut probes: Vec<_> = super::probes(plan).into_iter().collect();
    probes.sort_by_key(|probe| (probe.address, probe.check.port, probe.check.interval_milliseconds));
    probes
}

/// Follows the change without a plan.
fn follow(plan: &mut Plan, health: &HealthByProbe, changed: &[Probe], room: Room, now: Instant) -> bool {
    follow_urgency(plan, &mut HashSet::new(), health, changed, room, now)
}

/// The same, and which probes are urgent.
fn follow_urgency(
    plan: &mut Plan,
    urgent: &mut HashSet<Probe>,
    health: &HealthByProbe,
    changed: &[Probe],
    room: Room,
    now: Instant,
) -> bool {
    let endpoints = EndpointNodes::default();
    let inputs = HealthInputs { health, endpoints: &endpoints, room, now };
    follow_all(plan, urgent, inputs, Changed { probes: changed, ..Changed::default() })
}

pub(super) fn follow_all(
    plan: &mut Plan,
    urgent: &mut HashSet<Probe>,
    inputs: HealthInputs<'_>,
    changed: Changed<'_>,
) -> bool {
    let Some(result) = plan.groups.retarget(inputs, &mut plan.assignments, changed) else { return false };
    plan.state.tables.extend(result.tables);
    for ChangedStatus { load_balancer, position, targets } in result.statuses {
        plan.statuses.get_mut(&load_balancer).expect("a load balancer").targets[position] = targets;
    }
    for (probe, is_urgent) in result.urgent {
        if is_urgent {
            urgent.insert(probe)
        } else {
            urgent.remove(&probe)
        };
    }
    true
}

proptest! {
    #[test]
    fn retargeting_comes_to_what_a_plan_comes_to(
        changes in prop::collection::vec(prop::collection::vec((0..64_usize, 0..4_u8, prop::option::of(1..4_u32)), 0..4), 1..12),
        seconds in prop::collection::vec(prop_oneof![Just(0_u64), 1..4_u64, 1..70_u64], 12),
    ) {
        let (index, host, mut now) = (index(&load_balancers()), host(), Instant::now());
        let first = plan_next(&index, &host, &HealthByProbe::default(), now, &Assignments::default());
        let mut health = health(&first, &[]);
        let mut followed = plan_next(&index, &host, &health, now, &first.assignments);
        let (probes, mut urgent) = (sorted(&followed), urgent_probes(&followed));
        for (change, seconds) in changes.into_iter().zip(seconds) {
            now += Duration::from_secs(seconds);
            let mut changed = Vec::new();
            for (at, state, weight) in change {
                let probe = &probes[at % probes.len()];
                let states = [TargetState::Healthy, TargetState::Unhealthy, TargetState::Initial, TargetState::Unhealthy];
                set_endpoint(&mut health, probe, states[usize::from(state)], weight, state == 3);
                changed.push(probe.clone());
            }
            let before = followed.assignments.clone();
            prop_assert!(follow_urgency(&mut followed, &mut urgent, &health, &changed, ROOM, now));
            let planned = plan_next(&index, &host, &health, now, &before);
            prop_assert_eq!(&followed.state, &planned.state);
            prop_assert_eq!(&followed.statuses, &planned.statuses);
            prop_assert_eq!(&urgent, &urgent_probes(&planned));
            for probe in &probes {
                prop_assert_eq!(followed.groups.urgency(probe), Some(urgent.contains(probe)));
            }
            prop_assert_eq!(followed.groups.healthy_vips(), planned.groups.healthy_vips());
            // The next plan finds nothing to do.
            let next = plan_next(&index, &host, &health, now, &followed.assignments);
            prop_assert_eq!(&next.state, &followed.state);
        }
    }
}

#[test]
fn another_check_that_asks_the_same_is_followed_until_its_own_probe_has_ended() {
    let mut other = load_balancer("b", "10.0.0.101", &[target(1, 1), target(2, 1)]);
    other["spec"]["healthCheck"]["intervalMilliseconds"] = json!(5000);
    let index = index(&[load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)]), other]);
    let (host, now) = (host(), Instant::now());
    let mut followed = plan_next(&index, &host, &HealthByProbe::default(), now, &Assignments::default());
    let asked: Vec<_> =
        sorted(&followed).into_iter().filter(|probe| probe.check.interval_milliseconds == 1000).collect();
    let mut health = HealthByProbe::default();
    set(&mut health, &asked[0], TargetState::Healthy, None);
    set(&mut health, &asked[1], TargetState::Unhealthy, None);
    assert!(follow(&mut followed, &health, &asked, ROOM, now));
    for vip in ["10.0.0.100", "10.0.0.101"] {
        assert_eq!(reached(&followed, vip, 6, 80), [ip("10.0.0.1")].into(), "{vip}");
    }
}

#[test]
fn target_that_was_in_no_table_for_long_still_has_its_number() {
    let index = index(&[load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])]);
    let (host, begun) = (host(), Instant::now());
    let first = plan_next(&index, &host, &HealthByProbe::default(), begun, &Assignments::default());
    let mut health = health(&first, &["10.0.0.2"]);
    let second = plan_next(&index, &host, &health, begun, &first.assignments);
    let later = begun + Duration::from_hours(25);
    let mut followed = plan_next(&index, &host, &health, later, &second.assignments);
    let probe = sorted(&followed).into_iter().find(|probe| probe.address == ip("10.0.0.2")).expect("a probe");
    set(&mut health, &probe, TargetState::Healthy, None);
    assert!(follow(&mut followed, &health, &[probe], ROOM, later));
    assert_eq!(reached(&followed, "10.0.0.100", 6, 80), [ip("10.0.0.1"), ip("10.0.0.2")].into());
}

#[test]
fn vips_that_wait_need_a_plan() {
    let (host, now) = (host(), Instant::now());
    let before = [load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])];
    let first = plan_next(&index(&before), &host, &HealthByProbe::default(), now, &Assignments::default());
    let mut health = health(&first, &[]);
    let first = plan_next(&index(&before), &host, &health, now, &first.assignments);
    let mut after = before;
    after[0]["spec"]["healthCheck"]["port"] = json!(30_001);
    let mut waiting = plan_next(&index(&after), &host, &health, now, &first.assignments);
    assert!(waiting.is_waiting);
    let probe = sorted(&waiting).into_iter().find(|probe| probe.check.port == 30_001).expect("a new probe");
    set(&mut health, &probe, TargetState::Healthy, None);
    assert!(!follow(&mut waiting, &health, &[probe], ROOM, now));
}

#[test]
fn tables_that_no_longer_fit_need_a_plan() {
    let some: Vec<_> = (1..=8).map(|number| target(number, 1)).collect();
    let index = index(&[load_balancer("a", "10.0.0.100", &some)]);
    let (host, now) = (host(), Instant::now());
    let first = plan_next(&index, &host, &HealthByProbe::default(), now, &Assignments::default());
    let all: Vec<_> = sorted(&first);
    let few: Vec<_> = all.iter().skip(1).map(|probe| probe.address.to_string()).collect();
    let mut health = health(&first, &few.iter().map(String::as_str).collect::<Vec<_>>());
    let room = Room { slots: 256, ..ROOM };
    let endpoints = EndpointNodes::default();
    let inputs = PlanInputs { index: &index, host: &host, health: &health, endpoints: &endpoints, room, now };
    let mut small = super::super::plan(&inputs, &first.assignments);
    set(&mut health, &all[1], TargetState::Healthy, None);
    assert!(follow(&mut small, &health, &all[1..2], room, now));
    for probe in &all[2..] {
        set(&mut health, probe, TargetState::Healthy, None);
    }
    assert!(!follow(&mut small, &health, &all[2..], room, now), "8 targets want 509 slots");
}
