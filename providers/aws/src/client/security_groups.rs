// SPDX-License-Identifier: Apache-2.0
//! Calls about security groups, to EC2.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use ipnet::IpNet;
use steerage_ec2 as ec2;
use steerage_ec2::{Filter, IpPermission, IpRange, Ipv6Range, PrefixListId, Tag};

use super::{CallError, Client, Result, SecurityGroupCalls, Tags, ec2_tags, empty};
use crate::named_groups::NameAndId;
use crate::security_group::{
    NewSecurityGroup, PATH_MTU, PATH_MTU_V6, RULE_DESCRIPTION, Rule, SecurityGroup, Source,
};
use crate::subnets::NAME_TAG;

/// For ICMP, EC2 has the type in place of the first port, and the code in place of the last.
const PATH_MTU_CODE: i32 = 4;
/// Code of [`PATH_MTU_V6`].
const PATH_MTU_V6_CODE: i32 = 0;

#[async_trait]
impl SecurityGroupCalls for Client {
    async fn security_groups(&self, tags: &Tags) -> Result<Vec<SecurityGroup>> {
        let filters: Vec<Filter> = tags.iter().map(|(key, value)| tag_filter(key, value)).collect();
        let all = self.ec2.describe_security_groups(&filters).await;
        let all = all.map_err(CallError::of_ec2("DescribeSecurityGroups"))?;
        Ok(all.into_iter().map(security_group).collect())
    }

    async fn security_groups_named(&self, vpc: &str, names: &[String]) -> Result<Vec<NameAndId>> {
        let values = names.iter().map(|name| exactly(name)).collect();
        let names = Filter { name: format!("tag:{NAME_TAG}"), values };
        let all = self.ec2.describe_security_groups(&[names, Filter::new("vpc-id", vpc)]).await;
        let all = all.map_err(CallError::of_ec2("DescribeSecurityGroups"))?;
        let named = |mut group: SecurityGroup| Some((group.tags.remove(NAME_TAG)?, group.id));
        Ok(all.into_iter().map(security_group).filter_map(named).collect())
    }

    async fn create_security_group(&self, wanted: &NewSecurityGroup, tags: &Tags) -> Result<String> {
        let tags = tags.iter().map(|(key, value)| Tag { key: key.clone(), value: value.clone() }).collect();
        let NewSecurityGroup { name, description, vpc } = wanted;
        let group = ec2::NewSecurityGroup { name, description, vpc, tags };
        let made = self.ec2.create_security_group(&group).await;
        let made = made.map_err(CallError::of_ec2("CreateSecurityGroup"))?;
        made.ok_or_else(|| empty("CreateSecurityGroup"))
    }

    async fn authorize(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let permissions = permissions(rules, Some(RULE_DESCRIPTION));
        let answer = self.ec2.authorize_security_group_ingress(group, &permissions).await;
        answer.map_err(CallError::of_ec2("AuthorizeSecurityGroupIngress"))
    }

    async fn revoke(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let answer = self.ec2.revoke_security_group_ingress(group, &permissions(rules, None)).await;
        answer.map_err(CallError::of_ec2("RevokeSecurityGroupIngress"))
    }

    async fn delete_security_group(&self, group: &str) -> Result<bool> {
        let answer = self.ec2.delete_security_group(group).await;
        match answer.map_err(CallError::of_ec2("DeleteSecurityGroup")) {
            Ok(()) => Ok(true),
            Err(failure) if failure.is("InvalidGroup.NotFound") => Ok(true),
            Err(failure) if failure.is("DependencyViolation") || failure.is("InvalidGroup.InUse") => {
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }
}

/// A filter for a tag with exactly this value.
fn tag_filter(key: &str, value: &str) -> Filter {
    Filter::new(format!("tag:{key}"), exactly(value))
}

/// The value of a filter that matches this text alone: EC2 takes `*` and `?` as wildcards.
fn exactly(value: &str) -> String {
    let mut exact = String::with_capacity(value.len());
    for c in value.chars() {
        if matches!(c, '\\' | '*' | '?') {
            exact.push('\\');
        }
        exact.push(c);
    }
    exact
}

/// The sources of one port.
#[derive(Default)]
struct Sources {
    ranges: Vec<IpRange>,
    v6_ranges: Vec<Ipv6Range>,
    lists: Vec<PrefixListId>,
}

/// The rules as EC2 takes them: the sources of each port together. EC2 finds rules to remove whatever their description.
fn permissions(rules: &BTreeSet<Rule>, description: Option<&str>) -> Vec<IpPermission> {
    let mut ports: BTreeMap<(&'static str, u16), Sources> = BTreeMap::new();
    let description = description.map(str::to_owned);
    for rule in rules {
        let Sources { ranges, v6_ranges, lists } = ports.entry((rule.protocol, rule.port)).or_default();
        match &rule.source {
            Source::Range(IpNet::V4(range)) => {
                ranges.push(IpRange { cidr_ip: range.to_string(), description: description.clone() });
            }
            Source::Range(IpNet::V6(range)) => {
                let description = description.clone();
                v6_ranges.push(Ipv6Range { cidr_ipv6: range.to_string(), description });
            }
            Source::PrefixList(id) => {
                lists.push(PrefixListId { prefix_list_id: id.clone(), description: description.clone() });
            }
        }
    }
    let permission = |(port, Sources { ranges, v6_ranges, lists }): ((&'static str, u16), Sources)| {
        let (protocol, first) = port;
        let last = match port {
            PATH_MTU => PATH_MTU_CODE,
            PATH_MTU_V6 => PATH_MTU_V6_CODE,
            (_, port) => port.into(),
        };
        IpPermission {
            ip_protocol: protocol.to_owned(),
            from_port: Some(first.into()),
            to_port: Some(last),
            ip_ranges: ranges,
            ipv6_ranges: v6_ranges,
            prefix_list_ids: lists,
        }
    };
    ports.into_iter().map(permission).collect()
}

fn security_group(found: ec2::SecurityGroup) -> SecurityGroup {
    let (mut own, mut others, mut has_more) = (BTreeSet::new(), BTreeSet::new(), false);
    for permission in found.ip_permissions {
        let Some((protocol, port)) = single_port(&permission) else {
            has_more = true;
            continue;
        };
        let ranges = permission.ip_ranges.into_iter();
        let ranges = ranges.map(|range| (range.cidr_ip, range.description));
        let v6 = permission.ipv6_ranges.into_iter().map(|range| (range.cidr_ipv6, range.description));
        let range =
            |(range, description): (String, _)| Some((Source::Range(range.parse().ok()?), description));
        let ranges = ranges.chain(v6).filter_map(range);
        let lists = permission.prefix_list_ids.into_iter();
        let lists = lists.map(|list| (Source::PrefixList(list.prefix_list_id), list.description));
        let sources: Vec<(Source, Option<String>)> = ranges.chain(lists).collect();
        // Its sources are of another kind, such as a security group.
        has_more |= sources.is_empty();
        for (source, description) in sources {
            let is_own = description.as_deref() == Some(RULE_DESCRIPTION);
            let rules = if is_own { &mut own } else { &mut others };
            rules.insert(Rule { protocol, port, source });
        }
    }
    SecurityGroup {
        id: found.group_id,
        name: found.group_name,
        vpc: found.vpc_id,
        tags: ec2_tags(found.tags),
        own,
        others,
        has_more,
        doubtful: BTreeSet::new(),
    }
}

/// Protocol and port of a rule, if it is for a single port of TCP or UDP, or for messages about a smaller MTU.
fn single_port(permission: &IpPermission) -> Option<(&'static str, u16)> {
    let ports = (permission.from_port, permission.to_port);
    for (message, code) in [(PATH_MTU, PATH_MTU_CODE), (PATH_MTU_V6, PATH_MTU_V6_CODE)] {
        let (protocol, kind) = message;
        if permission.ip_protocol == protocol && ports == (Some(kind.into()), Some(code)) {
            return Some(message);
        }
    }
    let protocol = ["tcp", "udp"].into_iter().find(|known| permission.ip_protocol == *known)?;
    let port = permission.from_port.filter(|from| permission.to_port == Some(*from))?;
    Some((protocol, u16::try_from(port).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(protocol: &'static str, port: u16, source: &str) -> Rule {
        let range = |source: &str| Source::Range(source.parse().unwrap());
        let source =
            if source.starts_with("pl-") { Source::PrefixList(source.to_owned()) } else { range(source) };
        Rule { protocol, port, source }
    }

    fn range(source: &str, description: Option<&str>) -> IpRange {
        IpRange { cidr_ip: source.to_owned(), description: description.map(str::to_owned) }
    }

    fn permission(protocol: &str, (from, to): (i32, i32), ip_ranges: Vec<IpRange>) -> IpPermission {
        let (from_port, to_port) = (Some(from), Some(to));
        let ip_protocol = protocol.to_owned();
        IpPermission { ip_protocol, from_port, to_port, ip_ranges, ..IpPermission::default() }
    }

    fn prefix_list(id: &str, description: Option<&str>) -> PrefixListId {
        PrefixListId { prefix_list_id: id.to_owned(), description: description.map(str::to_owned) }
    }

    #[test]
    fn filter_matches_the_value_alone() {
        for (value, exact) in [("shop/web", "shop/web"), ("a*b?", "a\\*b\\?"), ("\\", "\\\\")] {
            let filter = tag_filter("steerage.dev/cluster", value);
            assert_eq!(filter, Filter::new("tag:steerage.dev/cluster", exact));
        }
    }

    #[test]
    fn sources_of_one_port_share_a_permission() {
        let rules = BTreeSet::from([
            rule("tcp", 443, "0.0.0.0/0"),
            rule("tcp", 80, "10.0.0.0/8"),
            rule("tcp", 80, "192.0.2.0/24"),
            rule("udp", 80, "10.0.0.0/8"),
            rule("icmp", 3, "10.0.0.0/8"),
            rule("tcp", 80, "pl-1"),
        ]);
        for description in [Some(RULE_DESCRIPTION), None] {
            let of = |source| range(source, description);
            let wanted = [
                permission("icmp", (3, 4), vec![of("10.0.0.0/8")]),
                IpPermission {
                    prefix_list_ids: vec![prefix_list("pl-1", description)],
                    ..permission("tcp", (80, 80), vec![of("10.0.0.0/8"), of("192.0.2.0/24")])
                },
                permission("tcp", (443, 443), vec![of("0.0.0.0/0")]),
                permission("udp", (80, 80), vec![of("10.0.0.0/8")]),
            ];
            assert_eq!(permissions(&rules, description), wanted);
        }
    }

    #[test]
    fn rules_of_other_forms_are_left_out() {
        let own = Some(RULE_DESCRIPTION);
        let of_80 = vec![
            range("10.0.0.0/8", own),
            range("192.0.2.0/24", None),
            range("198.51.100.0/24", Some("office")),
            range("not a network", own),
        ];
        let one = || vec![range("10.0.0.0/8", own)];
        let found = ec2::SecurityGroup {
            group_id: "sg-1".to_owned(),
            group_name: "st-shop".to_owned(),
            vpc_id: "vpc-1".to_owned(),
            tags: vec![Tag { key: "steerage.dev/cluster".to_owned(), value: "shop".to_owned() }],
            ip_permissions: vec![
                permission("tcp", (80, 80), of_80),
                permission("udp", (53, 53), one()),
                permission("tcp", (80, 90), one()),
                permission("icmp", (3, 4), one()),
                permission("icmp", (3, 3), one()),
                permission("icmp", (-1, -1), one()),
                permission("tcp", (-1, -1), one()),
                IpPermission {
                    prefix_list_ids: vec![prefix_list("pl-1", own), prefix_list("pl-2", None)],
                    ..permission("tcp", (443, 443), Vec::new())
                },
                IpPermission { ip_protocol: "-1".to_owned(), ..IpPermission::default() },
                // Of sources of other kinds, such as IPv6.
                permission("tcp", (80, 80), Vec::new()),
            ],
        };
        let wanted = SecurityGroup {
            id: "sg-1".to_owned(),
            name: "st-shop".to_owned(),
            vpc: "vpc-1".to_owned(),
            tags: Tags::from([("steerage.dev/cluster".to_owned(), "shop".to_owned())]),
            own: BTreeSet::from([
                rule("icmp", 3, "10.0.0.0/8"),
                rule("tcp", 80, "10.0.0.0/8"),
                rule("tcp", 443, "pl-1"),
                rule("udp", 53, "10.0.0.0/8"),
            ]),
            others: BTreeSet::from([
                rule("tcp", 80, "192.0.2.0/24"),
                rule("tcp", 80, "198.51.100.0/24"),
                rule("tcp", 443, "pl-2"),
            ]),
            has_more: true,
            doubtful: BTreeSet::new(),
        };
        assert_eq!(security_group(found), wanted);
    }
}
