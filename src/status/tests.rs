// SPDX-License-Identifier: Apache-2.0
//! Conditions follow from the inputs, and patches contain only differences.

use steerage_model::Key;
use steerage_provider_api::TargetHealth;

use super::*;

fn inputs() -> StatusInputs {
    StatusInputs {
        ingress: Some(vec![vip("10.0.0.1")]),
        is_published: true,
        has_usable_endpoint: true,
        has_selector: true,
        targets: 2,
        health: Some(health(&[HealthState::Unhealthy, HealthState::Healthy])),
        ..StatusInputs::default()
    }
}

fn vip(ip: &str) -> Ingress {
    Ingress { ip: Some(ip.parse().expect("ip")), hostname: None, ip_mode: Some(IpMode::Vip) }
}

fn health(states: &[HealthState]) -> HealthSummary {
    let target = |(i, state): (usize, &HealthState)| TargetHealth {
        target: format!("node-{i}"),
        family: None,
        state: *state,
        reason: "why".to_owned(),
    };
    let targets = states.iter().enumerate().map(target).collect();
    HealthSummary::new(&Health { targets, ..Health::default() })
}

/// Of ports that are served, not served, or undecided. Each target has the worst state of its ports.
fn partial(ports: &[(u16, Option<bool>)], state: HealthState) -> HealthSummary {
    let part =
        |(port, is_served): &(u16, _)| PartHealth { name: format!("port {port}"), is_served: *is_served };
    let target = TargetHealth { target: "node".to_owned(), family: None, state, reason: String::new() };
    let (targets, parts) = (vec![target], ports.iter().map(part).collect());
    HealthSummary::new(&Health { targets, parts, ..Health::default() })
}

#[test]
fn changed_addresses_are_named_in_any_order_and_the_first_ones_are_no_change() {
    let changed = |old: &[&str], new: Option<&[&str]>| {
        let ingress = |list: &[&str]| list.iter().map(|ip| vip(ip)).collect::<Vec<_>>();
        let service = Service { ingress: ingress(old), ..Service::new(Key::new("a", "b")) };
        let desired = DesiredStatus { ingress: new.map(ingress), conditions: Vec::new() };
        changed_addresses(&service, &desired).map(|(_, message)| message)
    };
    let both = ["192.0.2.1", "2001:db8::1"];
    let message = changed(&both, Some(&["192.0.2.9", "2001:db8::1"])).expect("changed");
    assert_eq!(
        message,
        "The published addresses are 192.0.2.9, 2001:db8::1 now. Before, they were 192.0.2.1, 2001:db8::1."
    );
    assert_eq!(changed(&both, Some(&[both[1], both[0]])), None);
    assert_eq!(changed(&[], Some(&both)), None);
    assert_eq!(changed(&both, None), None);
}

/// An annotation or a cloud's answer may have what a terminal obeys.
#[test]
fn control_characters_are_escaped_in_conditions() {
    let why: ReasonMessage = ("UnknownSteering", "The value `\u{1b}[31mapi`\nis unknown.".to_owned());
    let refused = StatusInputs { unprogrammed: Some(why.clone()), degraded: vec![why.clone()], ..inputs() };
    let DesiredStatus { mut conditions, .. } = desired(&refused, None);
    conditions.extend(paused(why.clone(), None).conditions);
    let messages: Vec<&str> = conditions.iter().map(|condition| condition.message.as_str()).collect();
    assert!(messages.iter().all(|text| !text.contains(char::is_control)), "{messages:?}");
    assert!(messages[0].contains("`\\u{1b}[31mapi` is unknown"), "{messages:?}");
    let service = Service { conditions, ..Service::new(Key::new("a", "b")) };
    assert!(has(&service, &why), "it is not reported again");
}

/// The node fails the check of one port, and passes that of the other.
#[test]
fn parts_without_a_healthy_target_are_named() {
    let inputs = |ports: &[(u16, Option<bool>)]| StatusInputs {
        health: Some(partial(ports, HealthState::Unhealthy)),
        ..inputs()
    };
    let served = inputs(&[(80, Some(true)), (443, Some(false)), (53, None)]);
    let serving = &desired(&served, None).conditions[1];
    assert_eq!((serving.status.as_str(), serving.reason.as_str()), ("True", "TargetsHealthy"));
    assert!(serving.message.ends_with("but none for port 443."), "{}", serving.message);
    let (reason, message) = served.health.and_then(|health| health.unserved_parts()).expect("a part");
    assert!(reason == "PartlyUnhealthy" && message.contains("for port 443. The other ports"), "{message}");
    let none = inputs(&[(80, Some(false)), (443, Some(false))]);
    assert_eq!(conditions(&none), "True=Programmed False=TargetsUnhealthy False=AsExpected");
    assert_eq!(none.health.and_then(|health| health.unserved_parts()), None, "Serving says it");
    let undecided = inputs(&[(80, Some(false)), (443, None)]);
    assert_eq!(conditions(&undecided), "True=Programmed Unknown=HealthUnknown False=AsExpected");
    let many: Vec<_> = (1..15).map(|port| (port, Some(port == 1))).collect();
    let (_, message) = partial(&many, HealthState::Healthy).unserved_parts().expect("parts");
    assert!(message.contains("port 11, and 3 more. "), "{message}");
}

fn conditions(inputs: &StatusInputs) -> String {
    let list: Vec<String> =
        desired(inputs, None).conditions.iter().map(|c| format!("{}={}", c.status, c.reason)).collect();
    list.join(" ")
}

#[test]
fn conditions_follow_from_the_inputs() {
    let unprogrammed = Some((reasons::NO_PORTS, "add one".to_owned()));
    let progressing = Some((reasons::PROGRESSING, "not yet".to_owned()));
    let degraded =
        vec![(reasons::TARGETS_FROZEN, "a".to_owned()), (reasons::TARGETS_REFUSED, "b".to_owned())];
    let only = |states: &[HealthState]| StatusInputs { health: Some(health(states)), ..inputs() };
    for (inputs, expected) in [
        (inputs(), "True=Programmed True=TargetsHealthy False=AsExpected"),
        (
            StatusInputs { unprogrammed: unprogrammed.clone(), ..inputs() },
            "False=NoPorts True=TargetsHealthy False=AsExpected",
        ),
        (
            StatusInputs {
                unprogrammed: unprogrammed.clone(),
                is_published: false,
                health: None,
                ..inputs()
            },
            "False=NoPorts False=NotProgrammed False=AsExpected",
        ),
        (
            StatusInputs { unprogrammed: progressing, is_published: false, health: None, ..inputs() },
            "False=Progressing Unknown=HealthUnknown False=AsExpected",
        ),
        (StatusInputs { degraded, ..inputs() }, "True=Programmed True=TargetsHealthy True=TargetsFrozen"),
        (
            StatusInputs { has_usable_endpoint: false, ..inputs() },
            "True=Programmed False=NoEndpoints False=AsExpected",
        ),
        (StatusInputs { targets: 0, ..inputs() }, "True=Programmed False=NoTargets False=AsExpected"),
        (StatusInputs { health: None, ..inputs() }, "True=Programmed Unknown=HealthUnknown False=AsExpected"),
        (only(&[]), "True=Programmed Unknown=HealthUnknown False=AsExpected"),
        (
            only(&[HealthState::Unhealthy, HealthState::Initial]),
            "True=Programmed Unknown=HealthUnknown False=AsExpected",
        ),
        (only(&[HealthState::Unhealthy]), "True=Programmed False=TargetsUnhealthy False=AsExpected"),
    ] {
        assert_eq!(conditions(&inputs), expected, "{inputs:?}");
    }
}

/// A Service with the desired status.
fn in_place(desired: &DesiredStatus) -> Service {
    let mut service = Service::new(Key::new("default", "web"));
    service.ingress = desired.ingress.clone().unwrap_or_default();
    service.conditions = desired.conditions.clone();
    service
}

#[test]
fn a_patch_contains_only_differences() {
    let wanted = desired(&inputs(), Some(3));
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
    let changed = desired(&StatusInputs { has_usable_endpoint: false, ..inputs() }, Some(3));
    let patch = patch(&service, &changed, Timestamp::UNIX_EPOCH).expect("differs");
    let conditions = patch["status"]["conditions"].as_array().expect("conditions");
    assert_eq!(conditions.len(), 1);
    assert_eq!(conditions[0]["reason"], "NoEndpoints");
    assert_eq!(conditions[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
    assert_eq!(patch["status"].get("loadBalancer"), None);
}

#[test]
fn a_new_reason_with_the_same_status_is_no_transition() {
    let service = in_place(&desired(&StatusInputs { has_usable_endpoint: false, ..inputs() }, None));
    let other = desired(&StatusInputs { targets: 0, ..inputs() }, None);
    let patch = patch(&service, &other, Timestamp::UNIX_EPOCH).expect("differs");
    assert_eq!(patch["status"]["conditions"][0].get("lastTransitionTime"), None);
}

#[test]
fn clearing_removes_only_steerages_conditions() {
    let mut service = in_place(&desired(&inputs(), None));
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
fn unusable_targets_are_summarised() {
    let at_once = [("a".to_owned(), "no address".to_owned())];
    assert_eq!(refused_targets(&[], Some(&health(&[HealthState::Healthy]))), None);
    let (reason, message) =
        refused_targets(&at_once, Some(&health(&[HealthState::Unused; 9]))).expect("some");
    assert_eq!(reason, "TargetsRefused");
    assert!(
        message.starts_with("Not used as targets: a: no address; node-0: why; ")
            && message.contains("; and 5 more. The others are used. "),
        "{message}"
    );
}

/// A provider names few of thousands of targets, and counts the others.
#[test]
fn omitted_targets_count() {
    let of = |named: &[HealthState], omitted: &[(HealthState, usize)]| {
        let target = |state: &HealthState| TargetHealth {
            target: "node".to_owned(),
            family: None,
            state: *state,
            reason: "why".to_owned(),
        };
        let targets = named.iter().map(target).collect();
        let omitted = omitted.iter().copied().collect();
        HealthSummary::new(&Health { targets, omitted, ..Health::default() })
    };
    for (named, omitted, expected) in [
        (&[][..], &[(HealthState::Healthy, 1)][..], "True=TargetsHealthy"),
        (&[HealthState::Unhealthy], &[(HealthState::Healthy, 4900)], "True=TargetsHealthy"),
        (&[HealthState::Unhealthy], &[(HealthState::Unhealthy, 4900)], "False=TargetsUnhealthy"),
        (&[], &[(HealthState::Unhealthy, 1)], "False=TargetsUnhealthy"),
        (&[HealthState::Unhealthy], &[(HealthState::Initial, 1)], "Unknown=HealthUnknown"),
        (&[], &[], "Unknown=HealthUnknown"),
    ] {
        let inputs = StatusInputs { health: Some(of(named, omitted)), ..inputs() };
        let expected = format!("True=Programmed {expected} False=AsExpected");
        assert_eq!(conditions(&inputs), expected, "{named:?} {omitted:?}");
    }
    let message = |named: &[HealthState], omitted| {
        refused_targets(&[], Some(&of(named, &[(HealthState::Unused, omitted)]))).expect("some").1
    };
    assert!(
        message(&[HealthState::Unused], 6).starts_with("Not used as targets: node: why; and 6 more. The")
    );
    assert!(message(&[HealthState::Healthy], 6).starts_with("Not used as targets: 6 targets. The others"));
}

/// Of thousands of nodes one or another fails all the time.
#[test]
fn number_of_healthy_targets_changes_no_condition() {
    let of = |healthy, unhealthy| {
        let omitted = [(HealthState::Healthy, healthy), (HealthState::Unhealthy, unhealthy)].into();
        let summary = HealthSummary::new(&Health { omitted, ..Health::default() });
        desired(&StatusInputs { health: Some(summary), ..inputs() }, Some(3))
    };
    let service = in_place(&of(5000, 0));
    assert_eq!(patch(&service, &of(4999, 1), Timestamp::UNIX_EPOCH), None);
    assert_eq!(patch(&service, &of(1, 4999), Timestamp::UNIX_EPOCH), None);
    assert_ne!(patch(&service, &of(0, 5000), Timestamp::UNIX_EPOCH), None);
}

#[test]
fn unknown_health_says_whether_the_provider_ever_reports_it() {
    for (reports_no_health, part) in
        [(true, "does not report the health of targets."), (false, "has not reported the health")]
    {
        let (status, (reason, message)) =
            serving(&StatusInputs { reports_no_health, health: None, ..inputs() });
        assert_eq!((status, reason), ("Unknown", reasons::HEALTH_UNKNOWN));
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn unhealthy_targets_get_nothing_where_the_provider_fails_closed() {
    for (fails_closed, part) in [(false, "The provider may use all targets."), (true, "Connections fail.")] {
        let health = Some(health(&[HealthState::Unhealthy]));
        let (status, (reason, message)) = serving(&StatusInputs { fails_closed, health, ..inputs() });
        assert_eq!((status, reason), ("False", reasons::TARGETS_UNHEALTHY));
        assert!(message.contains(part), "{message}");
    }
}
