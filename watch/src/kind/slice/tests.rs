// SPDX-License-Identifier: Apache-2.0
use super::*;
use serde_json::{Value, json};
use steerage_model::Protocol;

fn slice(address_type: &str, labels: &Value, endpoints: &Value) -> Value {
    json!({
        "metadata": { "namespace": "shop", "name": "web-x1", "labels": labels },
        "addressType": address_type, "endpoints": endpoints,
        "ports": [{ "name": "http", "protocol": "TCP", "port": 8080 }, { "name": "", "port": 53, "protocol": "UDP" },
            { "port": null }, { "name": "all" }]
    })
}

fn project(json: &Value) -> (Option<EndpointSlice>, Vec<String>) {
    let mut notes = Vec::new();
    let slice = EndpointSlices::project(&json.to_string(), &mut notes).expect("readable");
    (slice, notes)
}

fn of_web() -> Value {
    json!({ "kubernetes.io/service-name": "web" })
}

#[test]
fn slice_is_projected_completely() {
    let (slice, notes) = project(&slice(
        "IPv6",
        &of_web(),
        &json!([{
            "addresses": ["fd00::5", "fd00::6"], "nodeName": "n1", "zone": "z1",
            "conditions": { "ready": false, "serving": true, "terminating": true },
            "hints": { "forZones": [{ "name": "z1" }, { "name": "z2" }], "forNodes": [{ "name": "n1" }] },
            "targetRef": { "kind": "Pod", "name": "web-1" }
        }]),
    ));
    assert!(notes.is_empty(), "{notes:?}");
    let port = |name: &str, protocol, port| EndpointPort { name: name.into(), protocol, port };
    let want = EndpointSlice {
        ports: [port("http", Protocol::Tcp, 8080), port("", Protocol::Udp, 53)].into(),
        endpoints: vec![Endpoint {
            addr: "fd00::5".parse().expect("address"),
            node: Some("n1".into()),
            zone: Some("z1".into()),
            ready: false,
            serving: true,
            terminating: true,
            hints: Some(Box::new(Hints { nodes: vec!["n1".into()], zones: vec!["z1".into(), "z2".into()] })),
            unready_pod: None,
        }],
        ..EndpointSlice::new(Key::new("shop", "web-x1"), Key::new("shop", "web"), Family::V6)
    };
    assert_eq!(slice, Some(want));
}

#[test]
fn conditions_default_as_the_api_says() {
    for (conditions, want) in [
        (json!(null), (true, true, false)),
        (json!({}), (true, true, false)),
        (json!({ "ready": null }), (true, true, false)),
        (json!({ "ready": true }), (true, true, false)),
        (json!({ "ready": false }), (false, false, false)),
        (json!({ "ready": false, "serving": true }), (false, true, false)),
        (json!({ "ready": false, "terminating": true }), (false, false, true)),
    ] {
        let endpoints = json!([{ "addresses": ["10.0.0.1"], "conditions": conditions }]);
        let (slice, _) = project(&slice("IPv4", &of_web(), &endpoints));
        let endpoint = &slice.expect("slice").endpoints[0];
        assert_eq!((endpoint.ready, endpoint.serving, endpoint.terminating), want, "{conditions}");
        assert_eq!((&endpoint.node, &endpoint.zone, &endpoint.hints), (&None, &None, &None));
    }
}

#[test]
fn lists_may_be_null() {
    let mut json = slice("IPv4", &of_web(), &json!(null));
    json["ports"] = json!(null);
    let (slice, _) = project(&json);
    let slice = slice.expect("slice");
    assert!(slice.ports.is_empty() && slice.endpoints.is_empty());
}

#[test]
fn slices_of_unserved_services_are_ignored() {
    for (address_type, labels) in [
        ("FQDN", of_web()),
        ("IPv4", json!(null)),
        ("IPv4", json!({ "kubernetes.io/service-name": "" })),
        ("IPv4", json!({ "kubernetes.io/service-name": "web", "service.kubernetes.io/headless": "" })),
    ] {
        assert_eq!(project(&slice(address_type, &labels, &json!([]))).0, None, "{address_type} {labels}");
    }
}

#[test]
fn endpoints_that_cannot_be_used_are_left_out_and_named() {
    let endpoints = json!([
        { "addresses": ["10.0.0.999"] }, { "addresses": ["fd00::1"] }, { "addresses": [] },
        { "addresses": ["10.0.0.1"] }
    ]);
    let (slice, notes) = project(&slice("IPv4", &of_web(), &endpoints));
    assert_eq!(slice.expect("slice").endpoints.len(), 1);
    assert_eq!(notes.len(), 3, "{notes:?}");
}

#[test]
fn an_unknown_address_type_is_malformed() {
    let json = slice("IPv5", &of_web(), &json!([])).to_string();
    EndpointSlices::project(&json, &mut Vec::new()).expect_err("malformed");
}

#[test]
fn the_time_of_the_change_is_read_where_it_is_one() {
    for (text, want) in [("2026-08-01T10:00:00.5Z", Some(1_785_578_400_500)), ("yesterday", None)] {
        let mut json = slice("IPv4", &of_web(), &json!([]));
        json["metadata"]["annotations"] = json!({ "endpoints.kubernetes.io/last-change-trigger-time": text });
        let (slice, notes) = project(&json);
        let time = slice.expect("a slice").last_change_trigger;
        let time = time.and_then(|time| time.duration_since(std::time::SystemTime::UNIX_EPOCH).ok());
        assert_eq!((time.map(|time| time.as_millis()), notes), (want, Vec::new()));
    }
}

#[test]
fn pod_is_named_only_while_it_neither_serves_nor_terminates() {
    let of = |conditions: &serde_json::Value, kind: &str| {
        let target = json!({ "kind": kind, "name": "web-1", "uid": "u" });
        let endpoint = json!([{ "addresses": ["10.0.0.1"], "conditions": conditions, "targetRef": target }]);
        let (found, _) = project(&slice("IPv4", &of_web(), &endpoint));
        found.expect("a slice").endpoints.remove(0).unready_pod.map(|pod| (pod.name, pod.uid))
    };
    let named = Some(("web-1".to_owned(), "u".to_owned()));
    let unready = json!({ "ready": false, "serving": false });
    assert_eq!(of(&unready, "Pod"), named);
    assert_eq!(of(&json!({ "ready": false }), "Pod"), named);
    assert_eq!(of(&json!({ "ready": true, "serving": false }), "Pod"), named, "publishNotReadyAddresses");
    assert_eq!(of(&unready, "Node"), None);
    for conditions in [
        json!({}),
        json!({ "ready": false, "serving": true, "terminating": true }),
        json!({ "ready": false, "serving": false, "terminating": true }),
    ] {
        assert_eq!(of(&conditions, "Pod"), None, "{conditions}");
    }
}

/// `cargo test -p steerage-watch --lib … -- --ignored --nocapture` prints it; docs/known-limits.md has it.
#[test]
#[ignore = "measures, and decides nothing"]
fn memory_of_large_slices() {
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS").to_owned();
        line.split_whitespace().nth(1).expect("kB").parse::<usize>().expect("a number")
    };
    let slice = |number: u32| {
        let port = |n: u32| json!({ "name": format!("p{number}-{n}"), "port": n % 60_000 + 1 });
        let ports: Vec<_> = (0..17_500).map(port).collect();
        let metadata =
            json!({ "namespace": "tenant", "name": format!("large-{number}"), "labels": of_web() });
        project(&json!({ "metadata": metadata, "addressType": "IPv4", "endpoints": [], "ports": ports })).0
    };
    let before = (slice(0), resident()).1;
    let slices: Vec<_> = (0..62).map(slice).collect();
    let took = (resident() - before) * 1024;
    println!("{} ports: {took} bytes, {} each", slices.len() * 17_500, took / (slices.len() * 17_500));
}
