// SPDX-License-Identifier: Apache-2.0
//! Tables and properties of the decision.

use proptest::prelude::*;
use steerage_model::PodGate;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn pod(reason: Option<&str>) -> Pod {
    Pod {
        key: Key::new("shop", "web-1"),
        uid: "u".to_owned(),
        addresses: vec![[10, 0, 0, 1].into()],
        can_serve: true,
        gate: reason.map(|reason| PodGate { is_met: false, reason: reason.to_owned() }),
    }
}

fn address(port: u16) -> SocketAddr {
    ([10, 0, 0, 1], port).into()
}

fn health(states: &[(u16, HealthState)], at: Instant) -> ReadHealth {
    let target = |(port, state): &(u16, HealthState)| TargetHealth {
        target: address(*port).to_string(),
        family: None,
        state: *state,
        reason: "Target.Reason".to_owned(),
    };
    ReadHealth::new(&states.iter().map(target).collect::<Vec<_>>(), at)
}

/// The decision for a pod with one port in each of the Services with this health, as status and reason.
fn decided(
    known: Option<&str>,
    services: &[Option<&[(u16, HealthState)]>],
    waited: Duration,
) -> Option<(bool, &'static str)> {
    let since = Instant::now();
    let (key, addresses) = (Key::new("shop", "web"), BTreeSet::from([address(80)]));
    let read: Vec<_> = services.iter().map(|states| states.map(|states| health(states, since))).collect();
    let services: Vec<_> = read
        .iter()
        .map(|health| PodService { key: &key, addresses: &addresses, health: health.as_ref() })
        .collect();
    decide(&pod(known), &services, SERVICE_GRACE, since, since + waited, true)
        .map(|found| (found.is_met, found.reason))
}

#[test]
fn pod_waits_until_all_its_load_balancers_find_it_healthy() {
    use HealthState::{Draining, Healthy, Initial, Unhealthy, Unused};
    let early = SECOND;
    for (services, wanted) in [
        (&[Some(&[(80, Healthy)][..])][..], Some((true, reasons::TARGET_HEALTHY))),
        (&[Some(&[(80, Initial)])], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Unhealthy)])], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Draining)])], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Unused)])], Some((false, reasons::REGISTERING))),
        (&[Some(&[(81, Healthy)])], Some((false, reasons::REGISTERING))),
        (&[None], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Healthy)]), Some(&[(80, Initial)])], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Healthy)]), None], Some((false, reasons::REGISTERING))),
        (&[Some(&[(80, Healthy)]), Some(&[(80, Healthy)])], Some((true, reasons::TARGET_HEALTHY))),
        (&[], None),
    ] {
        assert_eq!(decided(None, services, early), wanted, "{services:?}");
    }
}

#[test]
fn reasons_follow_the_time() {
    use HealthState::Unhealthy;
    let unhealthy: &[Option<&[(u16, HealthState)]>] = &[Some(&[(80, Unhealthy)])];
    let missing: &[Option<&[(u16, HealthState)]>] = &[Some(&[])];
    let registering = Some(reasons::REGISTERING);
    let not_healthy = Some((false, reasons::TARGET_NOT_HEALTHY));
    let timed_out = Some((true, reasons::GATE_TIMED_OUT));
    let none = Some((true, reasons::NO_LOAD_BALANCER));
    for (known, services, waited, wanted) in [
        (None, &[][..], Duration::from_secs(9), None),
        (None, &[], SERVICE_GRACE, none),
        (registering, unhealthy, Duration::from_secs(59), None),
        (registering, unhealthy, UNHEALTHY_AFTER, not_healthy),
        (None, unhealthy, UNHEALTHY_AFTER, not_healthy),
        (registering, missing, UNHEALTHY_AFTER, None),
        (Some(reasons::TARGET_NOT_HEALTHY), unhealthy, UNHEALTHY_AFTER, None),
        // As after a restart.
        (Some(reasons::TARGET_NOT_HEALTHY), unhealthy, SECOND, None),
        (Some(reasons::TARGET_NOT_HEALTHY), unhealthy, GATE_TIMEOUT, timed_out),
        (registering, missing, GATE_TIMEOUT, timed_out),
    ] {
        assert_eq!(decided(known, services, waited), wanted, "{known:?} {services:?} {waited:?}");
    }
}

#[test]
fn stale_view_does_not_say_that_no_service_has_the_pod() {
    let since = Instant::now();
    let at = |waited| {
        decide(&pod(None), &[], SERVICE_GRACE, since, since + waited, false).map(|found| found.reason)
    };
    assert_eq!([at(SERVICE_GRACE), at(GATE_TIMEOUT)], [None, Some(reasons::NO_LOAD_BALANCER)]);
}

#[test]
fn health_from_before_the_pod_is_that_of_an_earlier_one() {
    let since = Instant::now();
    let (key, addresses) = (Key::new("shop", "web"), BTreeSet::from([address(80)]));
    let old = health(&[(80, HealthState::Healthy)], since);
    let service = PodService { key: &key, addresses: &addresses, health: Some(&old) };
    let found = decide(&pod(None), &[service], SERVICE_GRACE, since + SECOND, since + SECOND, true)
        .expect("a decision");
    assert!(!found.is_met, "{found:?}");
}

#[test]
fn message_names_services_and_what_the_provider_says() {
    let since = Instant::now();
    let (key, addresses) = (Key::new("shop", "web"), BTreeSet::from([address(80), address(81)]));
    let read = health(&[(80, HealthState::Unhealthy)], since);
    let service = PodService { key: &key, addresses: &addresses, health: Some(&read) };
    let found =
        decide(&pod(None), &[service], SERVICE_GRACE, since, since + GATE_TIMEOUT, true).expect("a decision");
    let wanted =
        "10.0.0.1:80 of Service shop/web (Target.Reason), 10.0.0.1:81 of Service shop/web (not registered)";
    assert!(found.message.contains(wanted), "{}", found.message);
    assert!(found.message.contains("after 10m"), "{}", found.message);
}

fn state() -> impl Strategy<Value = HealthState> {
    use HealthState::{Draining, Healthy, Initial, Unhealthy, Unused};
    prop_oneof![3 => Just(Healthy), 1 => Just(Initial), 1 => Just(Unhealthy), 1 => Just(Draining), 1 => Just(Unused)]
}

/// The ports that a Service needs, the read health, and how long after the pod began to wait the read began.
fn of_service() -> impl Strategy<Value = (BTreeSet<u16>, BTreeMap<u16, HealthState>, i64)> {
    let ports = proptest::collection::btree_set(80u16..83, 1..3);
    (ports, proptest::collection::btree_map(80u16..83, state(), 0..4), -1i64..2)
}

proptest! {
    #[test]
    fn gate_is_met_only_with_a_reason_and_is_settled_after_one_write(
        services in proptest::collection::vec(of_service(), 0..4),
        waited in 0u64..700,
        known in proptest::option::of(0usize..3),
    ) {
        let begin = Instant::now();
        let (since, waited) = (begin + SECOND, Duration::from_secs(waited));
        let known = known.map(|i| [reasons::REGISTERING, reasons::TARGET_NOT_HEALTHY, "Other"][i]);
        let key = Key::new("shop", "web");
        let built: Vec<_> = services
            .iter()
            .map(|(ports, states, at)| {
                let states: Vec<_> = states.iter().map(|(port, state)| (*port, *state)).collect();
                let at = begin + Duration::from_secs(u64::try_from(at + 1).expect("positive"));
                (ports.iter().map(|port| address(*port)).collect::<BTreeSet<_>>(), health(&states, at))
            })
            .collect();
        let given: Vec<_> = built
            .iter()
            .map(|(addresses, health)| PodService { key: &key, addresses, health: Some(health) })
            .collect();
        let is_healthy = services.iter().all(|(ports, states, at)| {
            *at >= 0 && ports.iter().all(|port| states.get(port) == Some(&HealthState::Healthy))
        });
        let found = decide(&pod(known), &given, SERVICE_GRACE, since, since + waited, true);
        let is_met = found.as_ref().is_some_and(|found| found.is_met);
        let expected =
            if services.is_empty() { waited >= SERVICE_GRACE } else { is_healthy || waited >= GATE_TIMEOUT };
        prop_assert_eq!(is_met, expected);
        if let Some(found) = found.filter(|found| !found.is_met) {
            prop_assert!(known != Some(reasons::TARGET_NOT_HEALTHY), "taken back: {:?}", found);
            prop_assert_eq!(decide(&pod(Some(found.reason)), &given, SERVICE_GRACE, since, since + waited, true), None);
        }
    }
}
