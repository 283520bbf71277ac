// SPDX-License-Identifier: Apache-2.0
//! What follows from which inputs, and that nothing is written that stands there already.

use steerage_model::Key;

use super::*;

fn facts() -> StatusInputs {
    StatusInputs {
        ingress: Some(vec![vip("10.0.0.1")]),
        usable_endpoint: true,
        has_selector: true,
        targets: 2,
        health: Some(health(&[HealthState::Unhealthy, HealthState::Healthy])),
        ..StatusInputs::default()
    }
}

fn vip(ip: &str) -> Ingress {
    Ingress { ip: Some(ip.parse().expect("ip")), hostname: None, ip_mode: Some(IpMode::Vip) }
}

fn health(applied: &[HealthState]) -> HealthSummary {
    let target = |(i, state): (usize, &HealthState)| TargetHealth {
        node: format!("node-{i}"),
        family: None,
        state: *state,
        reason: "why".to_owned(),
    };
    HealthSummary::of(&applied.iter().enumerate().map(target).collect::<Vec<_>>())
}

fn applied(inputs: &StatusInputs) -> String {
    let list: Vec<String> =
        desired(inputs, None).conditions.iter().map(|c| format!("{}={}", c.status, c.reason)).collect();
    list.join(" ")
}

#[test]
fn conditions_follow_from_the_facts() {
    let unprogrammed = Some((reasons::NO_PORTS, "add one".to_owned()));
    let degraded =
        vec![(reasons::TARGETS_FROZEN, "a".to_owned()), (reasons::TARGETS_REFUSED, "b".to_owned())];
    let only = |applied: &[HealthState]| StatusInputs { health: Some(health(applied)), ..facts() };
    for (inputs, expected) in [
        (facts(), "True=Programmed True=TargetsHealthy False=AsExpected"),
        (StatusInputs { unprogrammed, ..facts() }, "False=NoPorts True=TargetsHealthy False=AsExpected"),
        (StatusInputs { degraded, ..facts() }, "True=Programmed True=TargetsHealthy True=TargetsFrozen"),
        (
            StatusInputs { usable_endpoint: false, ..facts() },
            "True=Programmed False=NoEndpoints False=AsExpected",
        ),
        (StatusInputs { targets: 0, ..facts() }, "True=Programmed False=NoTargets False=AsExpected"),
        (StatusInputs { health: None, ..facts() }, "True=Programmed Unknown=HealthUnknown False=AsExpected"),
        (only(&[]), "True=Programmed Unknown=HealthUnknown False=AsExpected"),
        (
            only(&[HealthState::Unhealthy, HealthState::Initial]),
            "True=Programmed Unknown=HealthUnknown False=AsExpected",
        ),
        (only(&[HealthState::Unhealthy]), "True=Programmed False=TargetsUnhealthy False=AsExpected"),
    ] {
        assert_eq!(applied(&inputs), expected, "{inputs:?}");
    }
}

/// A Service whose status says just what is desired.
fn in_place(desired: &DesiredStatus) -> Service {
    let mut service = Service::new(Key::new("default", "web"));
    service.ingress = desired.ingress.clone().unwrap_or_default();
    service.conditions = desired.conditions.clone();
    service
}

#[test]
fn only_what_differs_is_written() {
    let wanted = desired(&facts(), Some(3));
    let mut service = in_place(&wanted);
    let foreign = Condition {
        kind: "example.com/Theirs".to_owned(),
        status: "True".to_owned(),
        reason: "R".to_owned(),
        message: String::new(),
        observed_generation: None,
    };
    service.conditions.push(foreign);
    assert_eq!(patch(&service, &wanted, Timestamp::UNIX_EPOCH), None);
    service.ingress[0].ip_mode = None;
    assert_eq!(patch(&service, &wanted, Timestamp::UNIX_EPOCH), None, "the API server's default");
    let changed = desired(&StatusInputs { usable_endpoint: false, ..facts() }, Some(3));
    let patch = patch(&service, &changed, Timestamp::UNIX_EPOCH).expect("differs");
    let conditions = patch["status"]["conditions"].as_array().expect("conditions");
    assert_eq!(conditions.len(), 1);
    assert_eq!(conditions[0]["reason"], "NoEndpoints");
    assert_eq!(conditions[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
    assert_eq!(patch["status"].get("loadBalancer"), None);
}

#[test]
fn a_new_reason_under_the_same_status_is_no_transition() {
    let service = in_place(&desired(&StatusInputs { usable_endpoint: false, ..facts() }, None));
    let other = desired(&StatusInputs { targets: 0, ..facts() }, None);
    let patch = patch(&service, &other, Timestamp::UNIX_EPOCH).expect("differs");
    assert_eq!(patch["status"]["conditions"][0].get("lastTransitionTime"), None);
}

#[test]
fn clearing_takes_ours_and_nothing_else() {
    let mut service = in_place(&desired(&facts(), None));
    service.conditions[2].kind = "example.com/Theirs".to_owned();
    let patch = clearing_patch(&service, true).expect("something is left");
    assert_eq!(patch["status"]["loadBalancer"], json!({"ingress": null}));
    let kinds: Vec<_> =
        patch["status"]["conditions"].as_array().expect("list").iter().map(|c| &c["type"]).collect();
    assert_eq!(kinds, [names::PROGRAMMED, names::SERVING]);
    let kept = clearing_patch(&service, false).expect("conditions are left");
    assert_eq!(kept["status"].get("loadBalancer"), None, "somebody else's");
    service.conditions.drain(..2);
    service.ingress.clear();
    assert_eq!(clearing_patch(&service, true), None);
}

#[test]
fn unusable_targets_are_told_in_short() {
    let at_once = [("a".to_owned(), "no address".to_owned())];
    assert_eq!(refused(&[], Some(&health(&[HealthState::Healthy]))), None);
    let (reason, message) = refused(&at_once, Some(&health(&[HealthState::Unused; 9]))).expect("some");
    assert_eq!(reason, "TargetsRefused");
    assert!(
        message.starts_with("a: no address; node-0: why; ") && message.ends_with("; and 5 more"),
        "{message}"
    );
}
