// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;
use steerage_model::Protocol;

use super::*;
use crate::annotations::SECURITY_GROUPS;
use crate::desired::tests::{config, planned};
use crate::ip_address_type::IpAddressType;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn rule(port: u16, source: &str) -> Rule {
    Rule { protocol: "tcp", port, source: Source::Range(net(source)) }
}

fn group(own: &[Rule], others: &[Rule]) -> SecurityGroup {
    let (own, others) = (own.iter().cloned().collect(), others.iter().cloned().collect());
    SecurityGroup { own, others, ..SecurityGroup::default() }
}

/// Source ranges, annotations, and the expected rules or reason.
fn of(ranges: &[&str], annotations: &[(&str, &str)]) -> Result<Vec<String>, &'static str> {
    of_type(IpAddressType::Ipv4, ranges, annotations)
}

fn of_type(
    ip_address_type: IpAddressType,
    ranges: &[&str],
    annotations: &[(&str, &str)],
) -> Result<Vec<String>, &'static str> {
    let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
    lb.source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
    lb.annotations = annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    match security(&lb, [(80, "TCP_UDP"), (443, "TLS")].into_iter(), ip_address_type, None) {
        Ok(Security::Rules(rules)) => {
            Ok(rules.iter().map(|r| format!("{} {} {}", r.protocol, r.port, r.source)).collect())
        }
        Ok(Security::Named(named)) => Ok(named.names().cloned().collect()),
        Ok(Security::Open) => Ok(Vec::new()),
        Err(error) => Err(error.reason()),
    }
}

#[test]
fn rules_follow_listeners_and_source_ranges() {
    let everybody = ["tcp 80 0.0.0.0/0", "tcp 443 0.0.0.0/0", "udp 80 0.0.0.0/0"].map(str::to_owned);
    let example = ["tcp 80 192.0.2.0/24", "tcp 443 192.0.2.0/24", "udp 80 192.0.2.0/24"].map(str::to_owned);
    let off = (DISABLE_SECURITY_GROUP, "true");
    assert_eq!(of(&[], &[]).unwrap(), everybody);
    assert_eq!(of(&["192.0.2.7/24"], &[]).unwrap(), example, "host bits do not matter");
    assert_eq!(of(&["192.0.2.0/24", "2001:db8::/32"], &[]).unwrap(), example);
    assert_eq!(of(&[], &[(SOURCE_RANGES, " 192.0.2.0/24 ")]).unwrap(), example);
    assert_eq!(of(&[], &[(SOURCE_RANGES, ",")]), Err("InvalidAnnotation"), "it would admit everybody");
    assert_eq!(of(&["0.0.0.0/32"], &[]).unwrap(), Vec::<String>::new(), "nobody");
    assert_eq!(of(&["192.0.2.0/24"], &[(SOURCE_RANGES, "10.0.0.0/8")]).unwrap(), example, "the field wins");
    assert_eq!(of(&[], &[(SOURCE_RANGES, " ")]).unwrap(), everybody);
    assert_eq!(of(&[], &[off]).unwrap(), Vec::<String>::new());
    assert_eq!(of(&[], &[(DISABLE_SECURITY_GROUP, "false")]).unwrap(), everybody);
    assert_eq!(of(&[], &[(DISABLE_SECURITY_GROUP, "yes")]), Err("InvalidAnnotation"));
    let with_icmp = of(&["192.0.2.0/24"], &[(ICMP_FOR_PATH_MTU, "on")]).unwrap();
    assert_eq!((with_icmp[0].as_str(), &with_icmp[1..]), ("icmp 3 192.0.2.0/24", &example[..]));
    assert_eq!(of(&["192.0.2.0/24"], &[(ICMP_FOR_PATH_MTU, "off")]).unwrap(), example);
    assert_eq!(of(&[], &[(ICMP_FOR_PATH_MTU, "true")]), Err("InvalidAnnotation"));
    let lists = of(&[], &[(PREFIX_LISTS, "pl-1, pl-2")]).unwrap();
    assert_eq!(
        (lists.len(), lists[0].as_str(), lists[5].as_str()),
        (6, "tcp 80 pl-1", "udp 80 pl-2"),
        "no range"
    );
    assert_eq!(of(&["192.0.2.0/24"], &[(PREFIX_LISTS, "pl-1")]).unwrap().len(), 6, "beside ranges");
    assert_eq!(of(&[], &[off, (PREFIX_LISTS, "pl-1")]), Err("ConflictingAnnotations"));
    for wrong in ["", "pl-1,", "office"] {
        assert_eq!(of(&[], &[(PREFIX_LISTS, wrong)]), Err("InvalidAnnotation"), "{wrong}");
    }
    assert_eq!(of(&["192.0.2.0/24"], &[off]), Err("ConflictingAnnotations"));
    assert_eq!(of(&[], &[off, (SOURCE_RANGES, "192.0.2.0/24")]), Err("ConflictingAnnotations"));
    let named = (SECURITY_GROUPS, "front end");
    assert_eq!(of(&[], &[named]).unwrap(), ["front end"]);
    for other in [(SOURCE_RANGES, "192.0.2.0/24"), (PREFIX_LISTS, "pl-1"), (ICMP_FOR_PATH_MTU, "on"), off] {
        assert_eq!(of(&[], &[named, other]), Err("ConflictingAnnotations"), "{other:?}");
    }
    assert_eq!(of(&["0.0.0.0/0"], &[named]), Err("ConflictingAnnotations"));
    assert_eq!(of(&["2001:db8::/32"], &[]), Err("ConflictingAnnotations"), "nobody could connect");
    assert_eq!(of(&[], &[(SOURCE_RANGES, "192.0.2.0/33")]), Err("InvalidAnnotation"));
}

#[test]
fn rules_of_ipv6_are_only_for_load_balancers_that_have_it() {
    let dual = |ranges: &[&str], annotations: &[(&str, &str)]| {
        let found = of_type(IpAddressType::DualStack, ranges, annotations).unwrap();
        found.into_iter().filter(|rule| !rule.contains(" 443 ")).collect::<Vec<_>>()
    };
    assert_eq!(dual(&[], &[]), ["tcp 80 0.0.0.0/0", "tcp 80 ::/0", "udp 80 0.0.0.0/0", "udp 80 ::/0"]);
    assert_eq!(dual(&["2001:db8::1/32"], &[]), ["tcp 80 2001:db8::/32", "udp 80 2001:db8::/32"]);
    assert_eq!(dual(&["192.0.2.0/24", "::/128"], &[]), ["tcp 80 192.0.2.0/24", "udp 80 192.0.2.0/24"]);
    let with_icmp = dual(&["192.0.2.0/24", "2001:db8::/32"], &[(ICMP_FOR_PATH_MTU, "on")]);
    assert_eq!(with_icmp[..2], ["icmp 3 192.0.2.0/24", "icmpv6 2 2001:db8::/32"]);
    assert_eq!(with_icmp.len(), 6);
    let lists = dual(&[], &[(ICMP_FOR_PATH_MTU, "on"), (PREFIX_LISTS, "pl-1")]);
    assert_eq!(lists, ["icmp 3 pl-1", "tcp 80 pl-1", "udp 80 pl-1"], "the family of a list is not known");
}

#[test]
fn only_unrestricted_services_work_without_group() {
    let rules = |source| Security::Rules([rule(80, source)].into());
    let (v4, dual) = (IpAddressType::Ipv4, IpAddressType::DualStack);
    assert!(Security::Open.is_open_to_all(v4) && rules("0.0.0.0/0").is_open_to_all(v4));
    assert!(!rules("10.0.0.0/8").is_open_to_all(v4) && !Security::Rules(BTreeSet::new()).is_open_to_all(v4));
    for one in ["0.0.0.0/0", "::/0"] {
        assert!(!rules(one).is_open_to_all(dual), "the other family would come in");
    }
    assert!(Security::Rules([rule(80, "0.0.0.0/0"), rule(80, "::/0")].into()).is_open_to_all(dual));
}

#[test]
fn names_and_description_fit_aws() {
    let owner =
        |name: String| Owner { service: steerage_model::Key::new("n".repeat(63), name), uid: "u".to_owned() };
    let made = new_security_group(&config(), &owner("s".repeat(253)));
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ._-:/".contains(c);
    assert!(made.description.len() <= 255 && made.description.chars().all(is_plain), "{}", made.description);
    assert!(made.name.len() <= 32 && !made.name.starts_with("sg-"), "{}", made.name);
    let again = Owner { uid: "v".to_owned(), ..owner("s".repeat(253)) };
    assert_ne!(made.name, new_security_group(&config(), &again).name, "of a Service that was created again");
}

#[test]
fn first_rules_of_ports_come_first() {
    let wanted = BTreeSet::from([rule(80, "10.0.0.0/8"), rule(80, "11.0.0.0/8"), rule(443, "10.0.0.0/8")]);
    let first = [rule(80, "10.0.0.0/8"), rule(443, "10.0.0.0/8"), rule(80, "11.0.0.0/8")];
    assert_eq!(group(&[], &[]).missing(&wanted), first);
    let half = group(&[rule(80, "10.0.0.0/8")], &[]);
    assert_eq!(half.missing(&wanted), [rule(443, "10.0.0.0/8"), rule(80, "11.0.0.0/8")]);
}

#[test]
fn rules_of_others_count_and_stay() {
    let wanted = BTreeSet::from([rule(80, "10.0.0.0/8")]);
    let same = group(&[], &[rule(80, "10.0.0.0/8"), rule(22, "192.0.2.1/32")]);
    assert!(
        same.has_exactly(&wanted) && same.missing(&wanted).is_empty() && same.removable(&wanted).is_empty()
    );
}

#[test]
fn last_rule_of_wanted_port_stays_until_replaced() {
    let wanted = BTreeSet::from([rule(80, "10.0.0.0/8"), rule(443, "10.0.0.0/8")]);
    let before = group(&[rule(80, "0.0.0.0/0"), rule(443, "0.0.0.0/0"), rule(22, "0.0.0.0/0")], &[]);
    assert_eq!(before.removable(&wanted), [rule(22, "0.0.0.0/0")].into());
    let half = group(&[rule(80, "0.0.0.0/0"), rule(80, "10.0.0.0/8"), rule(443, "0.0.0.0/0")], &[]);
    assert_eq!(half.removable(&wanted), [rule(80, "0.0.0.0/0")].into());
    assert_eq!(half.rule_to_replace(&wanted, &rule(443, "10.0.0.0/8")), Some(rule(80, "0.0.0.0/0")));
    let last = group(&[rule(80, "10.0.0.0/8"), rule(443, "0.0.0.0/0")], &[]);
    assert_eq!(last.rule_to_replace(&wanted, &rule(443, "10.0.0.0/8")), Some(rule(443, "0.0.0.0/0")));
    assert_eq!(
        group(&[rule(80, "10.0.0.0/8")], &[]).rule_to_replace(&wanted, &rule(443, "10.0.0.0/8")),
        None
    );
}

fn rules() -> impl Strategy<Value = BTreeSet<Rule>> {
    let one = (80_u16..83, 0_u8..4).prop_map(|(port, net)| rule(port, &format!("10.{net}.0.0/16")));
    proptest::collection::btree_set(one, 0..8)
}

#[test]
fn more_rules_than_aws_has_are_refused_before_they_are_built() {
    let ranges: Vec<String> =
        (0..=255_u8).flat_map(|a| (0..200_u8).map(move |b| format!("10.{a}.{b}.0/24"))).collect();
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    assert_eq!(of(&ranges, &[]), Err("TooManySourceRanges"));
    assert_eq!(of(&ranges[..333], &[]).unwrap().len(), 999);
}

#[test]
fn ports_that_are_still_served_admit_the_wanted_sources() {
    let wanted = BTreeSet::from([rule(443, "10.0.0.0/8")]);
    let kept = with_kept_ports(&wanted, &group(&[rule(80, "0.0.0.0/0")], &[rule(22, "0.0.0.0/0")]), |_| true);
    assert_eq!(kept, [rule(80, "10.0.0.0/8"), rule(443, "10.0.0.0/8")].into());
}

/// Whatever is wanted after an answer was lost, the rules of that call are sent again.
#[test]
fn doubtful_rules_are_neither_there_nor_gone() {
    let (a, b) = (|| rule(80, "10.0.0.0/8"), || rule(80, "0.0.0.0/0"));
    let mut known = group(&[a()], &[]);
    known.doubtful.insert(b());
    assert!(!known.has_exactly(&[a()].into()) && !known.has_exactly(&[a(), b()].into()));
    assert_eq!(
        (known.missing(&[a(), b()].into()), known.removable(&[a()].into())),
        (vec![b()], [b()].into())
    );
    known.doubtful = [a()].into();
    assert_eq!((known.missing(&[a()].into()), known.removable(&[b()].into())), (vec![a()], BTreeSet::new()));
    known.removed(&a());
    assert!(known.has_exactly(&BTreeSet::new()));
}

proptest! {
    /// As `sync_rules` changes a group that has room for this many more rules, one at a time.
    #[test]
    fn rules_converge_and_ports_stay_open_while_there_is_room(own in rules(), wanted in rules(), room in 0_usize..4) {
        let mut group = SecurityGroup { own, ..SecurityGroup::default() };
        let quota = group.own.len().max(wanted.len()) + room;
        let ports = |rules: &BTreeSet<Rule>| rules.iter().map(|r| r.port).collect::<BTreeSet<u16>>();
        let open: BTreeSet<u16> = &ports(&group.own) & &ports(&wanted);
        let (mut closed, mut has_made_room) = (0, false);
        for rule in group.missing(&wanted) {
            while group.own.len() >= quota {
                let spare = group.spare(&wanted, false);
                let gone = if has_made_room || spare.is_empty() {
                    group.rule_to_replace(&wanted, &rule).into_iter().collect()
                } else {
                    spare
                };
                has_made_room = true;
                prop_assert!(!gone.is_empty(), "{group:?} {wanted:?}");
                for rule in &gone {
                    group.removed(rule);
                }
                closed += usize::from(!open.is_subset(&ports(&group.own)));
            }
            group.added(rule);
        }
        prop_assert!(closed == 0 || room == 0, "a port was closed although there was room");
        for rule in group.removable(&wanted) {
            group.removed(&rule);
        }
        prop_assert!(group.has_exactly(&wanted), "{group:?} {wanted:?}");
    }
}

/// Counted, not made: they would take a gigabyte.
#[test]
fn product_of_many_ports_and_ranges_is_refused_with_its_count() {
    let range = |i: u32| IpNet::new(Ipv4Addr::from(i << 8).into(), 24).unwrap();
    let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
    lb.source_ranges = (1..=25_600).map(range).collect();
    lb.annotations.insert(ICMP_FOR_PATH_MTU.to_owned(), "on".to_owned());
    let listeners = (1..=50).map(|port| (port, "TCP_UDP"));
    let refused = security(&lb, listeners, IpAddressType::Ipv4, None).unwrap_err();
    assert_eq!(refused.reason(), "TooManySourceRanges");
    assert!(refused.to_string().contains("needs 2585600 rules"), "{refused}");
}
