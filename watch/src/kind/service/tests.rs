// SPDX-License-Identifier: Apache-2.0
use super::*;
use serde_json::{Value, json};

fn project(json: &Value) -> (Service, Vec<String>) {
    let mut notes = Vec::new();
    let service = Services::project(&json.to_string(), &mut notes).expect("readable").expect("projected");
    (service, notes)
}

fn with_spec(spec: &Value) -> (Service, Vec<String>) {
    project(&json!({ "metadata": { "namespace": "a", "name": "b" }, "spec": spec }))
}

/// What an API server of 1.36 writes for a dual-stack Service, here with everything that is used.
#[test]
fn service_is_projected_completely() {
    let (service, notes) = project(&json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": "web", "namespace": "shop", "uid": "0-1", "resourceVersion": "77", "generation": 3,
            "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
            "labels": { "app": "web", "service.kubernetes.io/service-proxy-name": "steerage" },
            "annotations": {
                "steerage.dev/steering": "api",
                "steerage.io/paused": "true",
                "service.kubernetes.io/load-balancer-source-ranges": "10.0.0.0/8",
                "service.kubernetes.io/topology-mode": "Auto",
                "service.beta.kubernetes.io/external-traffic": "OnlyLocal",
                "service.alpha.kubernetes.io/healthcheck-nodeport": "31000",
                "kubectl.kubernetes.io/last-applied-configuration": "{\"long\": true}"
            },
            "finalizers": ["steerage.dev/load-balancer"],
            "managedFields": [{ "manager": "kubectl", "fieldsV1": { "f:spec": {} } }]
        },
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00::9"],
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "PreferDualStack",
            "ports": [
                { "name": "http", "protocol": "TCP", "port": 80, "targetPort": "web", "nodePort": 30080 },
                { "name": "dns", "protocol": "UDP", "port": 53, "targetPort": 53, "nodePort": 0 }
            ],
            "externalIPs": ["192.0.2.7"], "selector": { "app": "web" },
            "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local",
            "healthCheckNodePort": 31001, "allocateLoadBalancerNodePorts": false,
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 60 } },
            "loadBalancerClass": "steerage.dev/edge", "loadBalancerIP": "203.0.113.5",
            "loadBalancerSourceRanges": [" 198.51.100.7/24 ", "2001:db8::/32"]
        },
        "status": {
            "loadBalancer": { "ingress": [
                { "ip": "203.0.113.5", "ipMode": "VIP" }, { "ip": "203.0.113.6", "ipMode": "Proxy" },
                { "hostname": "lb.example" }, { "ip": "2001:db8::5" }
            ] },
            "conditions": [{ "type": "steerage.dev/Programmed", "status": "True", "reason": "Programmed",
                "message": "done", "observedGeneration": 3, "lastTransitionTime": "2026-01-01T00:00:00Z" }]
        }
    }));
    assert!(notes.is_empty(), "{notes:?}");
    let ip = |text: &str| text.parse::<IpAddr>().expect("address");
    let mut want = Service::new(Key::new("shop", "web"));
    want.uid = "0-1".into();
    want.kind = ServiceKind::LoadBalancer;
    want.cluster_ips = vec![ip("10.96.0.9"), ip("fd00::9")];
    want.external_ips = vec![ip("192.0.2.7")];
    let mut http = ServicePort::new("http", steerage_model::Protocol::Tcp, 80, Some(30080));
    http.target_port = TargetPort::Name("web".to_owned());
    want.ports = vec![http, ServicePort::new("dns", steerage_model::Protocol::Udp, 53, None)];
    want.external_policy = TrafficPolicy::Local;
    want.internal_policy = TrafficPolicy::Local;
    want.affinity = Some(Affinity { timeout: Duration::from_mins(1) });
    want.health_check_node_port = Some(31001);
    want.source_ranges = ["198.51.100.0/24", "2001:db8::/32"].map(|r| r.parse().expect("range")).to_vec();
    want.class = Some("steerage.dev/edge".into());
    want.load_balancer_ip = Some("203.0.113.5".into());
    want.families = vec![Family::V4, Family::V6];
    want.allocate_node_ports = false;
    want.annotations = [
        // Nothing reads these two; their author is told.
        ("steerage.io/paused", "true"),
        ("service.kubernetes.io/load-balancer-source-ranges", "10.0.0.0/8"),
        ("steerage.dev/steering", "api"),
        ("service.beta.kubernetes.io/external-traffic", "OnlyLocal"),
        ("service.alpha.kubernetes.io/healthcheck-nodeport", "31000"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    let labels = [("app", "web"), ("service.kubernetes.io/service-proxy-name", "steerage")];
    want.labels = Arc::new(labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    want.proxy_name = Some("steerage".into());
    want.finalizers = vec!["steerage.dev/load-balancer".into()];
    want.deleting = true;
    want.generation = Some(3);
    want.created = 1_767_225_600;
    let entry =
        |ip, hostname: Option<&str>, ip_mode| Ingress { ip, hostname: hostname.map(str::to_owned), ip_mode };
    want.ingress = vec![
        entry(Some(ip("203.0.113.5")), None, Some(IpMode::Vip)),
        entry(Some(ip("203.0.113.6")), None, Some(IpMode::Proxy)),
        entry(None, Some("lb.example"), None),
        entry(Some(ip("2001:db8::5")), None, None),
    ];
    want.conditions = vec![Condition {
        kind: "steerage.dev/Programmed".into(),
        status: "True".into(),
        reason: "Programmed".into(),
        message: "done".into(),
        observed_generation: Some(3),
    }];
    assert_eq!(service, want);
}

#[test]
fn absent_fields_have_the_apis_defaults() {
    for spec in [json!({}), json!(null), json!({ "ports": null, "selector": null, "clusterIPs": null })] {
        let (service, notes) = with_spec(&spec);
        let mut want = Service::new(Key::new("a", "b"));
        want.has_selector = false;
        assert_eq!((service, notes.len()), (want, 0), "{spec}");
    }
}

#[test]
fn defaults_within_fields() {
    let (service, _) = with_spec(&json!({ "ports": [{ "port": 80 }], "sessionAffinity": "ClientIP" }));
    assert_eq!(service.ports[0].protocol, steerage_model::Protocol::Tcp);
    assert_eq!((service.ports[0].name.as_str(), service.ports[0].node_port), ("", None));
    assert_eq!(service.affinity.expect("affinity").timeout, Duration::from_hours(3));
}

#[test]
fn headless_services_have_no_address() {
    let (service, notes) = with_spec(&json!({ "clusterIP": "None", "clusterIPs": ["None"] }));
    assert!(service.cluster_ips.is_empty() && notes.is_empty());
    let (service, _) = with_spec(&json!({ "clusterIP": "10.96.0.1" }));
    assert_eq!(service.cluster_ips.len(), 1, "an object from before dual-stack");
    let labels = json!({ "service.kubernetes.io/headless": "" });
    let (service, _) = project(&json!({ "metadata": { "namespace": "a", "name": "b", "labels": labels } }));
    assert!(service.headless_label);
}

#[test]
fn parts_that_cannot_be_read_are_left_out_and_named() {
    for (spec, field) in [
        (json!({ "loadBalancerSourceRanges": ["10.0.0.0/8", "10.0.0.0/33"] }), "loadBalancerSourceRanges"),
        (json!({ "loadBalancerSourceRanges": ["any", "10.0.0.0/8"] }), "loadBalancerSourceRanges"),
        (json!({ "externalIPs": ["192.0.2.300"] }), "externalIPs"),
        (json!({ "clusterIPs": ["10.96.0.9.1"] }), "clusterIPs"),
        (json!({ "ports": [{ "port": 1, "protocol": "QUIC" }, { "port": 2 }] }), "ports"),
        (json!({ "externalTrafficPolicy": "Zonal" }), "externalTrafficPolicy"),
        (json!({ "ipFamilies": ["IPv5"] }), "ipFamilies"),
    ] {
        let (service, notes) = with_spec(&spec);
        assert_eq!(notes.len(), 1, "{spec}: {notes:?}");
        assert!(notes[0].contains(field), "{notes:?}");
        assert!(service.source_ranges.len() <= 1 && service.ports.len() <= 1, "{service:?}");
    }
}

/// An empty list would admit everybody.
#[test]
fn unreadable_source_ranges_admit_nobody() {
    let read = |ranges: &[&str]| with_spec(&json!({ "loadBalancerSourceRanges": ranges }));
    let text = |service: &Service| service.source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (service, notes) = read(&["any", "10.0.0.0/33"]);
    assert_eq!((text(&service), notes.len()), (vec!["0.0.0.0/32".to_owned(), "::/128".to_owned()], 3));
    let (service, notes) = read(&["010.001.000.00/16", "0.0.0.0/0"]);
    assert_eq!(text(&service), ["10.1.0.0/16", "0.0.0.0/0"]);
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!(text(&read(&["10..0.0/8", "::ffff:0.0.0.0/96"]).0), ["::ffff:0.0.0.0/96"]);
    assert!(read(&[]).0.source_ranges.is_empty());
}

#[test]
fn an_unknown_ip_mode_is_not_taken_from_the_load_balancer() {
    let status = json!({ "loadBalancer": { "ingress": [{ "ip": "192.0.2.1", "ipMode": "Later" }, {}] } });
    let (service, _) = project(&json!({ "metadata": { "namespace": "a", "name": "b" }, "status": status }));
    assert_eq!(service.ingress.len(), 1);
    assert_eq!(service.vips().count(), 0);
}

#[test]
fn objects_of_another_shape_are_malformed() {
    let meta = json!({ "namespace": "a", "name": "b" });
    for json in [
        json!({ "metadata": meta, "spec": { "type": "Teleport" } }),
        json!({ "metadata": meta, "spec": { "sessionAffinity": "Cookie" } }),
        json!({ "metadata": meta, "spec": { "ports": [{ "port": 70_000 }] } }),
        json!({ "metadata": meta, "spec": { "ports": "80" } }),
        json!({ "metadata": { "namespace": "a" } }),
        json!({}),
    ] {
        Services::project(&json.to_string(), &mut Vec::new()).expect_err("malformed");
    }
}
