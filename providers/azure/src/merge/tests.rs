// SPDX-License-Identifier: Apache-2.0
//! Differences between what a Service should have and what is in the load balancer.

use serde_json::json;

use super::*;
use crate::config::tests::config;
use crate::desired::tests::{named, planned};
use crate::desired::{Desired, desired};

fn layout() -> Layout {
    Layout { config: config(), is_internal: false }
}

fn fragment(all: &Desired, public_ip: &str) -> Fragment {
    let part = |front: &crate::desired::WantedFrontend| FrontendPart {
        family: front.family,
        address: FrontendAddress::Public(format!("/ips/{public_ip}-{}", marks::suffix(front.family))),
        pool: front.pool.clone(),
    };
    Fragment {
        service: all.service.clone(),
        mark: all.mark.clone(),
        is_listed: false,
        frontends: all.frontends.iter().map(part).collect(),
        rules: all.rules.clone(),
        probe: all.probe.clone(),
        others: Others::Gone,
    }
}

fn web(ports: &[u16], nodes: &[u8]) -> Fragment {
    fragment(&desired(&planned(ports, nodes), &config()).unwrap(), "web")
}

fn other() -> Fragment {
    fragment(&desired(&named("other", &[80], &[1]), &config()).unwrap(), "other")
}

fn put(balancer: &mut Balancer, fragment: Fragment) -> Result<bool, Error> {
    let changed = layout().apply(balancer, &Intent::Present(fragment), &|_| false)?;
    Ok(layout().tidy(balancer, &Sets::new(), &|_| false) || changed)
}

fn addresses(balancer: &Balancer) -> Vec<String> {
    let all = balancer.properties.pools.iter().flat_map(|pool| &pool.properties.addresses);
    all.filter_map(|part| part.properties.ip_address).map(|ip| ip.to_string()).collect()
}

#[test]
fn service_comes_changes_and_goes_without_a_trace() {
    let mut balancer = layout().empty();
    assert!(put(&mut balancer, other()).unwrap());
    let alone = balancer.clone();
    assert!(put(&mut balancer, web(&[80, 443], &[1, 2])).unwrap());
    // Azure adds what it reports.
    balancer.properties.probes[0].properties.rest.insert("provisioningState".into(), json!("Succeeded"));
    balancer.properties.rules[0].properties.rest.insert("provisioningState".into(), json!("Succeeded"));
    assert!(!put(&mut balancer, web(&[80, 443], &[1, 2])).unwrap(), "nothing differs");
    balancer.properties.probes[0].properties.rest.clear();
    balancer.properties.rules[0].properties.rest.clear();
    let all = &balancer.properties;
    assert_eq!((all.frontends.len(), all.rules.len(), all.pools.len()), (2, 3, 2));
    assert_eq!(all.probes.len(), 1, "equal probes are one");
    let rule = all.rules.iter().find(|rule| rule.name == web(&[], &[]).mark.part("tcp-80-v4")).unwrap();
    let rule = &rule.properties;
    assert_eq!((rule.floating_ip, rule.backend_port, rule.frontend_port), (Some(true), Some(80), 80));
    assert!(rule.frontend.id.is_in(&layout().path()));

    assert!(put(&mut balancer, web(&[80], &[2, 3])).unwrap());
    assert_eq!(balancer.properties.rules.len(), 2);
    assert_eq!(addresses(&balancer), ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);

    let gone = Intent::Absent(web(&[], &[]).mark, Key::new("shop", "web"));
    assert!(layout().apply(&mut balancer, &gone, &|_| false).unwrap());
    layout().tidy(&mut balancer, &Sets::new(), &|_| false);
    assert_eq!(balancer, alone);
    assert!(!layout().apply(&mut balancer, &gone, &|_| false).unwrap());
}

#[test]
fn what_others_have_in_the_load_balancer_stays() {
    let foreign = json!({
        "name": "st", "location": "westeurope", "tags": marks::of_balancer(&config().cluster),
        "properties": {
            "frontendIPConfigurations": [{ "name": "theirs", "properties": { "publicIPAddress": { "id": "/ips/a" } }, "zones": ["1"] }],
            "backendAddressPools": [{ "name": "theirs", "properties": {} }],
            "loadBalancingRules": [{ "name": "theirs", "properties": {
                "frontendIPConfiguration": { "id": "f" }, "protocol": "Tcp", "frontendPort": 1, "backendAddressPools": [{ "id": "p" }] } }],
            "probes": [{ "name": "theirs", "properties": { "protocol": "Tcp", "port": 1, "intervalInSeconds": 5 } }],
            "outboundRules": [{ "name": "out" }],
        },
    });
    let mut balancer: Balancer = serde_json::from_value(foreign).unwrap();
    let before = balancer.clone();
    put(&mut balancer, web(&[80], &[1])).unwrap();
    // Somebody adds to what is ours.
    let at = balancer.properties.rules.len() - 1;
    balancer.properties.rules[at].properties.disable_outbound_snat = Some(true);
    balancer.properties.pools[1].properties.addresses[0]
        .properties
        .rest
        .insert("adminState".into(), json!("Down"));
    balancer.tags.insert("team".into(), "a".into());
    put(&mut balancer, web(&[80], &[1, 2])).unwrap();
    assert_eq!(balancer.properties.rules[at].properties.disable_outbound_snat, Some(true));
    let kept = &balancer.properties.pools[1].properties.addresses[0].properties.rest;
    assert_eq!(kept["adminState"], "Down");
    let gone = Intent::Absent(web(&[], &[]).mark, Key::new("shop", "web"));
    layout().apply(&mut balancer, &gone, &|_| false).unwrap();
    layout().tidy(&mut balancer, &Sets::new(), &|_| false);
    assert_eq!(balancer.tags.remove("team").as_deref(), Some("a"));
    assert_eq!(balancer, before);
    assert!(!Layout::is_empty(&balancer));
}

#[test]
fn drift_of_every_managed_field_is_repaired() {
    let mut wanted = layout().empty();
    put(&mut wanted, web(&[80], &[1, 2])).unwrap();
    let spoil: [fn(&mut BalancerProperties); 12] = [
        |all| all.frontends.clear(),
        |all| all.frontends[0].properties.public_ip = Some(Ref::to("/ips/x")),
        |all| all.pools.clear(),
        |all| drop(all.pools[0].properties.addresses.pop()),
        |all| all.rules.clear(),
        |all| all.rules[0].properties.backend_port = Some(81),
        |all| all.rules[0].properties.floating_ip = Some(false),
        |all| all.rules[0].properties.idle_timeout_in_minutes = Some(30),
        |all| all.rules[0].properties.probe = None,
        |all| all.probes.clear(),
        |all| all.probes[0].properties.request_path = Some("/".to_owned()),
        |all| {
            let twice = all.pools[0].properties.addresses[0].clone();
            all.pools[0].properties.addresses.push(twice);
        },
    ];
    for (index, spoil) in spoil.into_iter().enumerate() {
        let mut balancer = wanted.clone();
        spoil(&mut balancer.properties);
        assert_ne!(balancer, wanted, "{index}");
        assert!(put(&mut balancer, web(&[80], &[1, 2])).unwrap(), "{index}");
        assert!(!put(&mut balancer, web(&[80], &[1, 2])).unwrap(), "{index}");
        // A frontend with another address has another name.
        let plain = |balancer: &Balancer| {
            let rule = balancer.properties.rules[0].properties.clone();
            (balancer.properties.rules.len(), Rule { frontend: Ref::default(), ..rule })
        };
        assert_eq!(plain(&balancer), plain(&wanted), "{index}");
        let fronts = |balancer: &Balancer| {
            balancer.properties.frontends.iter().map(|part| part.properties.clone()).collect::<Vec<_>>()
        };
        assert_eq!(fronts(&balancer), fronts(&wanted), "{index}");
        assert_eq!(addresses(&balancer), addresses(&wanted), "{index}");
    }
}

#[test]
fn recreated_service_replaces_the_earlier_one_and_a_late_deletion_does_not() {
    let mut balancer = layout().empty();
    put(&mut balancer, web(&[80], &[1])).unwrap();
    let old = web(&[], &[]).mark;
    let mut recreated = web(&[80], &[1]);
    "00000000000040008000000000000002".clone_into(&mut recreated.mark.uid);
    put(&mut balancer, recreated.clone()).unwrap();
    let all = &balancer.properties;
    assert_eq!((all.frontends.len(), all.rules.len(), all.pools.len()), (1, 1, 1));
    assert_eq!(layout().marks(&balancer), [recreated.mark.clone()].into());
    let late = Intent::Absent(old, Key::new("shop", "web"));
    assert!(!layout().apply(&mut balancer, &late, &|_| false).unwrap());
}

#[test]
fn shared_pools_follow_their_sets_and_go_with_the_last_rule() {
    let mut balancer = layout().empty();
    let shared = |fragment: &Fragment| {
        let mut fragment = fragment.clone();
        fragment.frontends[0].pool = WantedPool::Shared(SharedSet::Eligible);
        fragment
    };
    let nodes = |count: u8| {
        let nodes = (1..=count).map(|i| (IpAddr::from([10, 0, 0, i]), format!("n{i}"))).collect();
        Sets::from([(SharedSet::Eligible, BTreeMap::from([(Family::V4, nodes)]))])
    };
    put(&mut balancer, web(&[80], &[1])).unwrap();
    put(&mut balancer, shared(&web(&[80], &[1]))).unwrap();
    put(&mut balancer, shared(&other())).unwrap();
    assert_eq!(balancer.properties.pools.len(), 1, "the own pool is gone");
    assert!(layout().tidy(&mut balancer, &nodes(3), &|_| false));
    assert!(!layout().tidy(&mut balancer, &nodes(3), &|_| false));
    assert_eq!(addresses(&balancer).len(), 3);
    assert!(layout().tidy(&mut balancer, &nodes(3), &|ip| ip.to_string() == "10.0.0.2"), "Azure refuses one");
    assert_eq!(addresses(&balancer), ["10.0.0.1", "10.0.0.3"]);
    // The controller hands over nodes for a structure that it cannot plan.
    let own = WantedPool::Own([("10.0.0.9".parse().unwrap(), "n9".to_owned())].into());
    let targets = Intent::Targets(web(&[], &[]).mark, [(Family::V4, own)].into());
    assert!(layout().apply(&mut balancer, &targets, &|_| false).unwrap());
    assert!(!layout().apply(&mut balancer, &targets, &|_| false).unwrap());
    assert!(addresses(&balancer).contains(&"10.0.0.9".to_owned()) && balancer.properties.pools.len() == 2);
    for fragment in [web(&[], &[]), other()] {
        let gone = Intent::Absent(fragment.mark, fragment.service);
        layout().apply(&mut balancer, &gone, &|_| false).unwrap();
    }
    layout().tidy(&mut balancer, &nodes(3), &|_| false);
    assert!(Layout::is_empty(&balancer), "{balancer:?}");
}

/// A Service that is refused before it has a rule keeps its frontend, and its nodes are handed over again and again.
#[test]
fn nodes_of_a_frontend_without_rules_change_nothing() {
    let mut balancer = layout().empty();
    put(&mut balancer, web(&[80], &[1])).unwrap();
    let withdrawn = Intent::Withdrawn(web(&[], &[]).mark);
    assert!(layout().apply(&mut balancer, &withdrawn, &|_| false).unwrap());
    layout().tidy(&mut balancer, &Sets::new(), &|_| false);
    let shared = [(Family::V4, WantedPool::Shared(SharedSet::Eligible))];
    let own = [(Family::V4, WantedPool::Own([("10.0.0.9".parse().unwrap(), "n9".to_owned())].into()))];
    for pools in [shared, own] {
        let targets = Intent::Targets(web(&[], &[]).mark, pools.into());
        // A pool of its own may be left of a time with rules.
        layout().apply(&mut balancer, &targets, &|_| false).unwrap();
        layout().tidy(&mut balancer, &Sets::new(), &|_| false);
        assert!(!layout().apply(&mut balancer, &targets, &|_| false).unwrap());
        assert!(!layout().tidy(&mut balancer, &Sets::new(), &|_| false));
    }
}

#[test]
fn what_cannot_be_beside_the_others_is_refused_and_changes_nothing() {
    let mut balancer = layout().empty();
    put(&mut balancer, other()).unwrap();
    let before = balancer.clone();
    let mut same = web(&[80], &[1]);
    same.frontends[0].address = FrontendAddress::Public("/IPS/other-v4".to_owned());
    let error = put(&mut balancer, same).unwrap_err();
    assert!(error.reason() == "AddressNotAvailable" && error.to_string().contains("other-v4"), "{error}");
    let mut many = web(&[80], &[1]);
    many.rules = (1..=1500).map(|port| WantedRule { port, ..many.rules[0].clone() }).collect();
    assert_eq!(put(&mut balancer, many.clone()).unwrap_err().reason(), "QuotaExceeded");
    assert_eq!(balancer, before);
    many.rules.pop();
    assert!(put(&mut balancer, many).is_ok());
}

#[test]
fn private_addresses_are_kept_and_services_without_public_ip_listed() {
    let layout = Layout { is_internal: true, ..layout() };
    let mut balancer = layout.empty();
    let mut fragment = web(&[80], &[1]);
    fragment.is_listed = true;
    let private = |subnet: &str, address: Option<&str>| FrontendAddress::Private {
        subnet: subnet.to_owned(),
        address: address.map(|address| address.parse().unwrap()),
    };
    let mut apply = |address: FrontendAddress, balancer: &mut Balancer| {
        fragment.frontends[0].address = address;
        layout.apply(balancer, &Intent::Present(fragment.clone()), &|_| false).unwrap()
    };
    assert!(apply(private("/s", None), &mut balancer));
    assert_eq!(marks::listed(&balancer.tags), [Key::new("shop", "web")].into());
    // Azure chooses one.
    let given = Some("10.0.0.77".parse().unwrap());
    balancer.properties.frontends[0].properties.private_ip = given;
    assert!(!apply(private("/s", None), &mut balancer));
    assert!(apply(private("/s", Some("10.0.0.9")), &mut balancer));
    assert!(!apply(private("/s", None), &mut balancer), "no request is no reason to change it");
    assert!(apply(private("/other", None), &mut balancer));
    let frontend = &balancer.properties.frontends[0].properties;
    assert_eq!((frontend.private_ip, frontend.allocation.as_deref()), (None, Some("Dynamic")));
    let gone = Intent::Absent(web(&[], &[]).mark, Key::new("shop", "web"));
    layout.apply(&mut balancer, &gone, &|_| false).unwrap();
    assert!(marks::listed(&balancer.tags).is_empty());
}

#[test]
fn what_azure_reports_is_not_sent_back() {
    let mut balancer = layout().empty();
    put(&mut balancer, web(&[80], &[1])).unwrap();
    let clean = balancer.clone();
    let all = &mut balancer.properties;
    all.frontends[0].properties.rest.insert("loadBalancingRules".into(), json!([{ "id": "gone" }]));
    all.probes[0].properties.rest.insert("provisioningState".into(), json!("Succeeded"));
    all.provisioning_state = Some(crate::types::Provisioning::Succeeded);
    assert_eq!(writable(balancer), clean);
}

/// A cluster that was set up again meets the load balancer of the one before, which may serve.
#[test]
fn nobody_is_told_to_delete_the_load_balancer_of_another_cluster() {
    let mut before = config();
    "c2".clone_into(&mut before.cluster.uid);
    let theirs = Layout { config: before, is_internal: false }.empty();
    let error = layout().check(&theirs).unwrap_err();
    assert_eq!(error.reason(), "ObjectNotOwned");
    let own = format!("steerage.dev_cluster-uid with the value `{}`", config().cluster.uid);
    for part in [own.as_str(), "set another --azure-cluster-name", "Delete it only if nothing uses it."] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// The tags that list Services are shared, too.
#[test]
fn namespace_has_half_of_the_tags_that_list_services() {
    let layout = Layout { is_internal: true, ..layout() };
    let mut balancer = layout.empty();
    let mut apply = |service: Key, index: u8| {
        let mut fragment = web(&[80], &[1]);
        (fragment.is_listed, fragment.mark.uid) = (true, format!("u{service}"));
        fragment.mark.base = format!("{}{index}", fragment.mark.base);
        fragment.frontends[0].address = FrontendAddress::Private { subnet: "/s".to_owned(), address: None };
        fragment.service = service;
        layout.apply(&mut balancer, &Intent::Present(fragment), &|_| false)
    };
    let long = |index: u8| Key::new("n".repeat(63), format!("{index:063}"));
    for index in 0..40 {
        assert!(apply(long(index), index).unwrap());
    }
    let error = apply(long(40), 40).unwrap_err();
    assert!(error.reason() == "NamespaceLimitExceeded" && error.to_string().contains("nnn"), "{error}");
    assert!(apply(Key::new("zoo", "other"), 41).unwrap());
}
