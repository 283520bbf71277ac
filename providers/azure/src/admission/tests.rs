// SPDX-License-Identifier: Apache-2.0
//! Rules of the security group for what Services admit.

use serde_json::json;

use super::*;
use crate::config::tests::config;

fn security_group() -> SecurityGroupDocument {
    SecurityGroupDocument::new(config(), "/nsg".to_owned())
}

fn vips(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn sources(ranges: &[&str]) -> Sources {
    Sources { ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(), ..Sources::default() }
}

fn admission(vip: &[&str], ports: &[u16], ranges: &[&str]) -> Admission {
    let rule = |port: &u16| WantedRule {
        protocol: "Tcp",
        port: *port,
        idle_minutes: 4,
        has_tcp_reset: true,
        distribution: "Default",
    };
    let rules: Vec<WantedRule> = ports.iter().map(rule).collect();
    Admission::new(vips(vip), &BTreeSet::new(), &rules, &sources(ranges), false)
}

fn apply(group: &mut SecurityGroup, admission: &Admission) -> bool {
    security_group().apply(group, admission).unwrap()
}

fn shown(group: &SecurityGroup) -> Vec<String> {
    let text = |rule: &Part<SecurityRule>| {
        let of = &rule.properties;
        let sources = of.source_address_prefixes.iter().chain(&of.source_address_prefix);
        let ports = of.destination_port_ranges.iter().chain(&of.destination_port_range);
        format!(
            "{} {} {} {} > {} {}",
            of.priority,
            of.access,
            of.protocol,
            sources.cloned().collect::<Vec<_>>().join(","),
            of.destination_address_prefixes.join(","),
            ports.cloned().collect::<Vec<_>>().join(",")
        )
    };
    let mut all: Vec<String> = group.properties.security_rules.iter().map(text).collect();
    all.sort();
    all
}

#[test]
fn equal_rules_are_shared_and_leave_with_the_last_address() {
    let mut group = SecurityGroup::default();
    assert!(apply(&mut group, &admission(&["192.0.2.1"], &[80, 443], &[])));
    assert!(apply(&mut group, &admission(&["192.0.2.2"], &[80, 443], &[])));
    assert!(!apply(&mut group, &admission(&["192.0.2.2"], &[80, 443], &[])));
    assert_eq!(shown(&group), ["2000 Allow Tcp Internet > 192.0.2.1,192.0.2.2 80,443"]);
    // One of the two gets ranges, and the other keeps its rule.
    assert!(apply(&mut group, &admission(&["192.0.2.2"], &[80, 443], &["10.0.0.0/8", "10.1.0.0/16"])));
    assert_eq!(
        shown(&group),
        [
            "2000 Allow Tcp Internet > 192.0.2.1 80,443",
            "2001 Allow Tcp 10.0.0.0/8 > 192.0.2.2 80,443",
            "2999 Deny * * > 192.0.2.2 *",
        ]
    );
    // Deny rules of two Services are one, and stay for the other one.
    assert!(apply(&mut group, &admission(&["192.0.2.3"], &[80], &["10.0.0.0/8"])));
    assert!(apply(&mut group, &Admission::none(vips(&["192.0.2.2"]))));
    assert_eq!(
        shown(&group),
        [
            "2000 Allow Tcp Internet > 192.0.2.1 80,443",
            "2002 Allow Tcp 10.0.0.0/8 > 192.0.2.3 80",
            "2999 Deny * * > 192.0.2.3 *",
        ]
    );
    assert!(apply(&mut group, &Admission::none(vips(&["192.0.2.1", "192.0.2.3"]))));
    assert!(group.properties.security_rules.is_empty());
}

#[test]
fn rules_of_others_stay_and_keep_their_numbers() {
    let theirs = json!({ "properties": { "securityRules": [
        { "name": "theirs", "properties": { "priority": 2000, "access": "Deny", "direction": "Inbound", "protocol": "*",
          "sourceApplicationSecurityGroups": [{ "id": "/asg" }], "destinationAddressPrefixes": ["192.0.2.1"] } },
        { "name": "out", "properties": { "priority": 2001, "access": "Deny", "direction": "Outbound", "protocol": "*" } },
    ] } });
    let mut group: SecurityGroup = serde_json::from_value(theirs).unwrap();
    let before = group.clone();
    apply(&mut group, &admission(&["192.0.2.1"], &[80], &[]));
    assert_eq!(group.properties.security_rules[2].properties.priority, 2001);
    apply(&mut group, &Admission::none(vips(&["192.0.2.1"])));
    assert_eq!(group, before);
}

#[test]
fn changed_address_leaves_and_drift_is_repaired() {
    let mut group = SecurityGroup::default();
    apply(&mut group, &admission(&["192.0.2.1"], &[80], &["10.0.0.0/8"]));
    let mut moved = admission(&["192.0.2.9"], &[80], &["10.0.0.0/8"]);
    moved.gone = vips(&["192.0.2.1"]);
    assert!(apply(&mut group, &moved));
    assert!(shown(&group).iter().all(|rule| rule.contains("> 192.0.2.9 ")), "{:?}", shown(&group));
    let wanted = shown(&group);
    for spoil in [
        (|rule| rule.source_address_prefixes = vec!["0.0.0.0/0".to_owned()]) as fn(&mut SecurityRule),
        |rule| rule.access = "Allow".to_owned(),
        |rule| rule.direction = "Outbound".to_owned(),
        |rule| rule.destination_address_prefixes.clear(),
    ] {
        for index in 0..2 {
            let mut spoiled = group.clone();
            spoil(&mut spoiled.properties.security_rules[index].properties);
            let differs = spoiled != group;
            assert_eq!(apply(&mut spoiled, &moved), differs);
            assert_eq!(shown(&spoiled), wanted);
        }
    }
}

#[test]
fn families_tags_and_internal_services_have_rules_of_their_own() {
    let rules = [WantedRule {
        protocol: "Udp",
        port: 53,
        idle_minutes: 4,
        has_tcp_reset: false,
        distribution: "Default",
    }];
    let mut wanted = sources(&["10.0.0.0/8", "2001:db8::/32"]);
    wanted.tags.insert("AzureCloud".to_owned());
    let both = Admission::new(vips(&["192.0.2.1", "2001:db8::1"]), &BTreeSet::new(), &rules, &wanted, false);
    let mut group = SecurityGroup::default();
    apply(&mut group, &both);
    assert_eq!(
        shown(&group).iter().map(|rule| rule.split_once(' ').unwrap().1).collect::<BTreeSet<_>>(),
        [
            "Allow Udp 10.0.0.0/8 > 192.0.2.1 53",
            "Allow Udp 2001:db8::/32 > 2001:db8::1 53",
            "Allow Udp AzureCloud > 192.0.2.1 53",
            "Allow Udp AzureCloud > 2001:db8::1 53",
            "Deny * * > 192.0.2.1 *",
            "Deny * * > 2001:db8::1 *",
        ]
        .into()
    );
    let internal = Admission::new(vips(&["10.0.0.9"]), &BTreeSet::new(), &rules, &Sources::default(), true);
    assert!(internal.allows.is_empty() && !internal.denies, "Azure admits the virtual network");
}

#[test]
fn limits_are_refused_before_azure_meets_them() {
    let mut group = SecurityGroup::default();
    let many: Vec<String> = (0..3990).map(|i: u32| format!("10.{}.{}.0/24", i / 256, i % 256)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    apply(&mut group, &admission(&["192.0.2.1"], &[80], &many));
    let before = group.clone();
    let error = security_group().apply(&mut group, &admission(&["192.0.2.2"], &[81], &many)).unwrap_err();
    assert!(error.reason() == "QuotaExceeded" && error.to_string().contains("4000"), "{error}");
    assert_eq!(group, before);
    // The priority numbers end before Azure's thousand rules.
    let mut group = SecurityGroup::default();
    for priority in 2000..2895 {
        let theirs = SecurityRule { priority, ..SecurityRule::default() };
        group.properties.security_rules.push(Part::new(format!("theirs-{priority}"), theirs));
    }
    let mut refused = 0;
    for port in 1..=10 {
        let wanted = admission(&["192.0.2.1"], &[port], &[]);
        let other = IpAddr::from([10, 0, 0, u8::try_from(port).unwrap()]);
        let wanted = Admission { vips: [other].into(), ..wanted };
        refused += usize::from(security_group().apply(&mut group, &wanted).is_err());
    }
    assert_eq!((group.properties.security_rules.len(), refused), (900, 5));
}

#[test]
fn nobody_is_admitted_who_was_not() {
    let mut group = SecurityGroup::default();
    let all = |group: &SecurityGroup| security_group().present(group, &vips(&["192.0.2.1"]));
    apply(&mut group, &admission(&["192.0.2.1"], &[80], &[]));
    assert_eq!(all(&group).admitted(), AdmittedSources::Everybody);
    assert_eq!(narrowed(&all(&group), &Sources::default()), all(&group));
    let mut requested = sources(&["10.0.0.0/8"]);
    requested.tags.insert("AzureCloud".to_owned());
    let first = narrowed(&all(&group), &requested);
    assert!(apply(&mut group, &first));
    let only =
        |ranges: &[&str]| AdmittedSources::Only(ranges.iter().map(|&range| range.to_owned()).collect());
    assert_eq!(all(&group).admitted(), only(&["10.0.0.0/8", "AzureCloud"]));
    let second = narrowed(&all(&group), &sources(&["10.1.0.0/16", "192.0.2.0/24"]));
    assert!(apply(&mut group, &second));
    assert_eq!(all(&group).admitted(), only(&["10.1.0.0/16"]));
    let third = narrowed(&all(&group), &sources(&["192.0.2.0/24"]));
    apply(&mut group, &third);
    assert_eq!(all(&group).admitted(), only(&[]));
}

/// A namespace with many different rules leaves room for others, and what it has goes on.
#[test]
fn namespace_has_half_of_the_group() {
    let (security_group, mut group) = (security_group(), SecurityGroup::default());
    let wanted = |vip: u16, port: u16, ranges: &[&str], namespace: &str| {
        admission(&[&format!("192.0.{}.{}", vip / 250, vip % 250)], &[port], ranges).of(namespace)
    };
    for vip in 1..=450 {
        assert!(security_group.apply(&mut group, &wanted(vip, 1000 + vip, &[], "many")).unwrap(), "{vip}");
    }
    let error = security_group.apply(&mut group, &wanted(451, 9, &[], "many")).unwrap_err();
    assert!(
        error.reason() == "NamespaceLimitExceeded" && error.to_string().contains("namespace many"),
        "{error}"
    );
    assert!(security_group.apply(&mut group, &wanted(452, 9, &[], "other")).unwrap());
    assert!(
        security_group.apply(&mut group, &wanted(453, 9, &[], "many")).unwrap(),
        "a rule that another one has"
    );
    assert!(
        security_group.apply(&mut group, &wanted(1, 99, &[], "many")).unwrap(),
        "one in place of another one"
    );
    assert!(security_group.apply(&mut group, &Admission::none(vips(&["192.0.0.2"]))).unwrap());
    assert!(security_group.apply(&mut group, &wanted(451, 10, &[], "many")).unwrap());

    let (security_group, mut group) = (self::security_group(), SecurityGroup::default());
    let many: Vec<String> = (0..1999).map(|i: u32| format!("10.{}.{}.0/24", i / 256, i % 256)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    security_group.apply(&mut group, &wanted(1, 80, &many, "many")).unwrap();
    assert!(security_group.apply(&mut group, &wanted(2, 81, &many[..9], "many")).is_err());
    assert!(security_group.apply(&mut group, &wanted(2, 81, &many[..9], "other")).unwrap());
}
