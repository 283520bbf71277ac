// SPDX-License-Identifier: Apache-2.0
//! Calls about security groups, to EC2.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use ec2::types::{Filter, IpPermission, IpRange, PrefixListId, ResourceType, Tag, TagSpecification};
use ipnet::Ipv4Net;

use super::{CallError, Client, Result, SecurityGroupCalls, Tags, ec2, empty, unless_not_found};
use crate::named_groups::NameAndId;
use crate::security_group::{NewSecurityGroup, PATH_MTU, RULE_DESCRIPTION, Rule, SecurityGroup, Source};
use crate::subnets::NAME_TAG;

/// Security groups in one answer: the limit of EC2.
const PAGE: i32 = 1000;
/// For ICMP, EC2 has the type in place of the first port, and the code in place of the last.
const PATH_MTU_CODE: i32 = 4;

#[async_trait]
impl SecurityGroupCalls for Client {
    async fn security_groups(&self, tags: &Tags) -> Result<Vec<SecurityGroup>> {
        let filters = tags.iter().map(|(key, value)| tag_filter(key, value)).collect();
        let call = self.ec2.describe_security_groups().set_filters(Some(filters)).max_results(PAGE);
        let all = call.into_paginator().items().send().try_collect().await;
        let all = all.map_err(CallError::of("DescribeSecurityGroups"))?;
        Ok(all.into_iter().map(security_group).collect())
    }

    async fn security_groups_named(&self, vpc: &str, names: &[String]) -> Result<Vec<NameAndId>> {
        let values = names.iter().map(|name| exactly(name)).collect();
        let names = Filter::builder().name(format!("tag:{NAME_TAG}")).set_values(Some(values)).build();
        let of_vpc = Filter::builder().name("vpc-id").values(vpc).build();
        let call = self.ec2.describe_security_groups().filters(names).filters(of_vpc).max_results(PAGE);
        let all = call.into_paginator().items().send().try_collect().await;
        let all = all.map_err(CallError::of("DescribeSecurityGroups"))?;
        let named = |mut group: SecurityGroup| Some((group.tags.remove(NAME_TAG)?, group.id));
        Ok(all.into_iter().map(security_group).filter_map(named).collect())
    }

    async fn create_security_group(&self, wanted: &NewSecurityGroup, tags: &Tags) -> Result<String> {
        let tags = tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect();
        let tags =
            TagSpecification::builder().resource_type(ResourceType::SecurityGroup).set_tags(Some(tags));
        let call = self
            .ec2
            .create_security_group()
            .group_name(&wanted.name)
            .description(&wanted.description)
            .vpc_id(&wanted.vpc)
            .tag_specifications(tags.build());
        let made = call.send().await.map_err(CallError::of("CreateSecurityGroup"))?;
        made.group_id.ok_or_else(|| empty("CreateSecurityGroup"))
    }

    async fn authorize(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let call = self.ec2.authorize_security_group_ingress().group_id(group);
        let answer = call.set_ip_permissions(Some(permissions(rules, Some(RULE_DESCRIPTION)))).send().await;
        answer.map(drop).map_err(CallError::of("AuthorizeSecurityGroupIngress"))
    }

    async fn revoke(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let call = self.ec2.revoke_security_group_ingress().group_id(group);
        let answer = call.set_ip_permissions(Some(permissions(rules, None))).send().await;
        answer.map(drop).map_err(CallError::of("RevokeSecurityGroupIngress"))
    }

    async fn delete_security_group(&self, group: &str) -> Result<bool> {
        let answer = self.ec2.delete_security_group().group_id(group).send().await;
        match unless_not_found("DeleteSecurityGroup", "InvalidGroup.NotFound", answer) {
            Ok(_) => Ok(true),
            Err(failure) if failure.is("DependencyViolation") || failure.is("InvalidGroup.InUse") => {
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }
}

/// A filter for a tag with exactly this value.
fn tag_filter(key: &str, value: &str) -> Filter {
    Filter::builder().name(format!("tag:{key}")).values(exactly(value)).build()
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
    lists: Vec<PrefixListId>,
}

/// The rules as EC2 takes them: the sources of each port together. EC2 finds rules to remove whatever their description.
fn permissions(rules: &BTreeSet<Rule>, description: Option<&str>) -> Vec<IpPermission> {
    let mut ports: BTreeMap<(&'static str, u16), Sources> = BTreeMap::new();
    let description = description.map(str::to_owned);
    for rule in rules {
        let Sources { ranges, lists } = ports.entry((rule.protocol, rule.port)).or_default();
        match &rule.source {
            Source::Range(range) => {
                let range = IpRange::builder().cidr_ip(range.to_string());
                ranges.push(range.set_description(description.clone()).build());
            }
            Source::PrefixList(id) => {
                let list = PrefixListId::builder().prefix_list_id(id);
                lists.push(list.set_description(description.clone()).build());
            }
        }
    }
    let permission = |(port, Sources { ranges, lists }): ((&'static str, u16), Sources)| {
        let (protocol, first) = port;
        IpPermission::builder()
            .ip_protocol(protocol)
            .from_port(first.into())
            .to_port(if port == PATH_MTU { PATH_MTU_CODE } else { first.into() })
            .set_ip_ranges((!ranges.is_empty()).then_some(ranges))
            .set_prefix_list_ids((!lists.is_empty()).then_some(lists))
            .build()
    };
    ports.into_iter().map(permission).collect()
}

fn security_group(found: ec2::types::SecurityGroup) -> SecurityGroup {
    let (mut own, mut others) = (BTreeSet::new(), BTreeSet::new());
    for permission in found.ip_permissions.unwrap_or_default() {
        let Some((protocol, port)) = single_port(&permission) else { continue };
        let ranges = permission.ip_ranges.unwrap_or_default().into_iter().filter_map(|range| {
            let source = range.cidr_ip()?.parse::<Ipv4Net>().ok()?;
            Some((Source::Range(source), range.description))
        });
        let lists = permission.prefix_list_ids.unwrap_or_default().into_iter();
        let lists =
            lists.filter_map(|list| Some((Source::PrefixList(list.prefix_list_id?), list.description)));
        for (source, description) in ranges.chain(lists) {
            let is_own = description.as_deref() == Some(RULE_DESCRIPTION);
            let rules = if is_own { &mut own } else { &mut others };
            rules.insert(Rule { protocol, port, source });
        }
    }
    let tags = found.tags.unwrap_or_default().into_iter();
    SecurityGroup {
        id: found.group_id.unwrap_or_default(),
        name: found.group_name.unwrap_or_default(),
        vpc: found.vpc_id.unwrap_or_default(),
        tags: tags.filter_map(|tag| Some((tag.key?, tag.value.unwrap_or_default()))).collect(),
        own,
        others,
        doubtful: BTreeSet::new(),
    }
}

/// Protocol and port of a rule, if it is for a single port of TCP or UDP, or for messages about a smaller MTU.
fn single_port(permission: &IpPermission) -> Option<(&'static str, u16)> {
    let (protocol, kind) = PATH_MTU;
    if permission.ip_protocol() == Some(protocol)
        && (permission.from_port(), permission.to_port()) == (Some(kind.into()), Some(PATH_MTU_CODE))
    {
        return Some(PATH_MTU);
    }
    let protocol = ["tcp", "udp"].into_iter().find(|known| permission.ip_protocol() == Some(*known))?;
    let port = permission.from_port().filter(|from| permission.to_port() == Some(*from))?;
    Some((protocol, u16::try_from(port).ok()?))
}

#[cfg(test)]
mod tests {
    use ec2::types::Ipv6Range;

    use super::*;

    fn rule(protocol: &'static str, port: u16, source: &str) -> Rule {
        let range = |source: &str| Source::Range(source.parse().unwrap());
        let source =
            if source.starts_with("pl-") { Source::PrefixList(source.to_owned()) } else { range(source) };
        Rule { protocol, port, source }
    }

    fn range(source: &str, description: Option<&str>) -> IpRange {
        IpRange::builder().cidr_ip(source).set_description(description.map(str::to_owned)).build()
    }

    fn permission(protocol: &str, (from, to): (i32, i32), sources: Vec<IpRange>) -> IpPermission {
        let ports = IpPermission::builder().ip_protocol(protocol).from_port(from).to_port(to);
        ports.set_ip_ranges(Some(sources)).build()
    }

    fn prefix_list(id: &str, description: Option<&str>) -> PrefixListId {
        PrefixListId::builder().prefix_list_id(id).set_description(description.map(str::to_owned)).build()
    }

    #[test]
    fn filter_matches_the_value_alone() {
        for (value, exact) in [("shop/web", "shop/web"), ("a*b?", "a\\*b\\?"), ("\\", "\\\\")] {
            let filter = tag_filter("steerage.dev/cluster", value);
            assert_eq!(filter.name(), Some("tag:steerage.dev/cluster"));
            assert_eq!(filter.values(), [exact]);
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
                IpPermission::builder()
                    .ip_protocol("tcp")
                    .from_port(80)
                    .to_port(80)
                    .set_ip_ranges(Some(vec![of("10.0.0.0/8"), of("192.0.2.0/24")]))
                    .prefix_list_ids(prefix_list("pl-1", description))
                    .build(),
                permission("tcp", (443, 443), vec![of("0.0.0.0/0")]),
                permission("udp", (80, 80), vec![of("10.0.0.0/8")]),
            ];
            assert_eq!(permissions(&rules, description), wanted);
        }
    }

    #[test]
    fn rules_of_other_forms_are_left_out() {
        let own = Some(RULE_DESCRIPTION);
        let ipv6 = Ipv6Range::builder().cidr_ipv6("::/0").build();
        let found = ec2::types::SecurityGroup::builder()
            .group_id("sg-1")
            .group_name("st-shop")
            .vpc_id("vpc-1")
            .tags(Tag::builder().key("steerage.dev/cluster").value("shop").build())
            .ip_permissions(permission(
                "tcp",
                (80, 80),
                vec![
                    range("10.0.0.0/8", own),
                    range("192.0.2.0/24", None),
                    range("198.51.100.0/24", Some("office")),
                    range("not a network", own),
                ],
            ))
            .ip_permissions(permission("udp", (53, 53), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(permission("tcp", (80, 90), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(permission("icmp", (3, 4), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(permission("icmp", (3, 3), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(permission("icmp", (-1, -1), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(permission("tcp", (-1, -1), vec![range("10.0.0.0/8", own)]))
            .ip_permissions(
                IpPermission::builder()
                    .ip_protocol("tcp")
                    .from_port(443)
                    .to_port(443)
                    .prefix_list_ids(prefix_list("pl-1", own))
                    .prefix_list_ids(prefix_list("pl-2", None))
                    .build(),
            )
            .ip_permissions(IpPermission::builder().ip_protocol("-1").build())
            .ip_permissions(
                IpPermission::builder()
                    .ip_protocol("tcp")
                    .from_port(80)
                    .to_port(80)
                    .ipv6_ranges(ipv6)
                    .build(),
            )
            .build();
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
            doubtful: BTreeSet::new(),
        };
        assert_eq!(security_group(found), wanted);
    }
}
