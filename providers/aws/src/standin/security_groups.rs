// SPDX-License-Identifier: Apache-2.0
//! Security groups. A load balancer uses its groups, also some seconds after its deletion. Calls by ID do not find a new group at once.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::cloud::Cloud;
use super::{Kind, StandIn};
use crate::client::{CallError, Result, SecurityGroupCalls, Tags};
use crate::named_groups::NameAndId;
use crate::security_group::{NewSecurityGroup, Rule, SecurityGroup};

/// Characters of names and descriptions besides letters, digits and spaces.
const SIGNS: &str = "._-:/()#,@[]+=&;{}!$*";

fn is_text(text: &str) -> bool {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || c == ' ' || SIGNS.contains(c);
    !text.is_empty() && text.len() <= 255 && text.chars().all(is_valid)
}

/// The group, if calls by its ID find it, for a change of these rules.
fn found<'a>(
    cloud: &'a mut Cloud,
    (action, id): (&'static str, &str),
    rules: &BTreeSet<Rule>,
    now: Instant,
) -> Result<&'a mut SecurityGroup> {
    if rules.is_empty() {
        return Err(CallError::made_up(action, "MissingParameter", "no rules"));
    }
    let message = format!("The security group '{id}' does not exist");
    let missing = CallError::made_up(action, "InvalidGroup.NotFound", message);
    if !cloud.knows_security_group(id, now) {
        return Err(missing);
    }
    cloud.security_groups.get_mut(id).ok_or(missing)
}

impl StandIn {
    /// How long calls by ID do not find a new group: half of the groups at once, the others after a part of `lag`.
    fn unknown_for(&self) -> Duration {
        let share = self.inner().random.f64();
        self.delays.lag.mul_f64((2.0 * share - 1.0).max(0.0))
    }
}

#[async_trait]
impl SecurityGroupCalls for StandIn {
    async fn security_groups(&self, tags: &Tags) -> Result<Vec<SecurityGroup>> {
        let has_tags =
            |group: &SecurityGroup| tags.iter().all(|(key, value)| group.tags.get(key) == Some(value));
        let count = self.cloud().security_groups.values().filter(|group| has_tags(group)).count();
        let pages = count.div_ceil(1000).max(1);
        self.read_of(Kind::Ec2Read, "DescribeSecurityGroups", pages, String::new(), |cloud, _| {
            Ok(cloud.security_groups.values().filter(|group| has_tags(group)).cloned().collect())
        })
        .await
    }

    async fn security_groups_named(&self, vpc: &str, names: &[String]) -> Result<Vec<NameAndId>> {
        self.read_of(Kind::Ec2Read, "DescribeSecurityGroups", 1, String::new(), |cloud, _| {
            let of_vpc = cloud.security_groups.values().filter(|group| group.vpc == vpc);
            let named = of_vpc.filter_map(|group| Some((group.tags.get("Name")?.clone(), group.id.clone())));
            Ok(named.filter(|(name, _)| names.contains(name)).collect())
        })
        .await
    }

    async fn create_security_group(&self, wanted: &NewSecurityGroup, tags: &Tags) -> Result<String> {
        let (action, unknown_for) = ("CreateSecurityGroup", self.unknown_for());
        self.write(action, Kind::Ec2Write, wanted.name.clone(), |cloud, now| {
            let NewSecurityGroup { name, description, vpc } = wanted;
            let refuse = |code: &str, message: String| Err(CallError::made_up(action, code, message));
            if !is_text(name) || !is_text(description) || name.starts_with("sg-") {
                return refuse("InvalidParameterValue", format!("'{name}' with description '{description}'"));
            }
            if cloud.security_groups.values().any(|other| other.name == *name && other.vpc == *vpc) {
                let message = format!("The security group '{name}' already exists for VPC '{vpc}'");
                return refuse("InvalidGroup.Duplicate", message);
            }
            if cloud.security_groups.len() >= self.quotas.security_groups {
                return refuse("SecurityGroupLimitExceeded", "quota".to_owned());
            }
            let id = cloud.security_group_id();
            let made = SecurityGroup {
                id: id.clone(),
                name: name.clone(),
                vpc: vpc.clone(),
                tags: tags.clone(),
                own: BTreeSet::new(),
                others: BTreeSet::new(),
                has_more: false,
                doubtful: BTreeSet::new(),
            };
            cloud.security_groups.insert(id.clone(), made);
            cloud.security_group_known_from.insert(id.clone(), now + unknown_for);
            Ok(id)
        })
        .await
    }

    async fn authorize(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        let action = "AuthorizeSecurityGroupIngress";
        self.write(action, Kind::Ec2Write, group.to_owned(), |cloud, now| {
            let found = found(cloud, (action, group), rules, now)?;
            if let Some(rule) =
                rules.iter().find(|rule| found.own.contains(*rule) || found.others.contains(*rule))
            {
                let message = format!("the specified rule \"{rule:?}\" already exists");
                return Err(CallError::made_up(action, "InvalidPermission.Duplicate", message));
            }
            found.own.extend(rules.iter().cloned());
            let all = || found.own.iter().chain(&found.others);
            let v6 = all().filter(|rule| rule.source.is_ipv6()).count();
            if v6.max(all().count() - v6) > self.quotas.rules {
                return Err(CallError::made_up(action, "RulesPerSecurityGroupLimitExceeded", "quota"));
            }
            Ok(())
        })
        .await
    }

    async fn revoke(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()> {
        let action = "RevokeSecurityGroupIngress";
        self.write(action, Kind::Ec2Write, group.to_owned(), |cloud, now| {
            let found = found(cloud, (action, group), rules, now)?;
            for rule in rules {
                let (own, other) = (found.own.remove(rule), found.others.remove(rule));
                if !own && !other {
                    let message =
                        format!("The specified rule {rule:?} does not exist in this security group");
                    return Err(CallError::made_up(action, "InvalidPermission.NotFound", message));
                }
            }
            Ok(())
        })
        .await
    }

    async fn delete_security_group(&self, group: &str) -> Result<bool> {
        self.write("DeleteSecurityGroup", Kind::Ec2Write, group.to_owned(), |cloud, now| {
            // Also for a group that it does not know yet.
            if !cloud.knows_security_group(group, now) {
                return Ok(true);
            }
            if cloud.uses_security_group(group, now) {
                return Ok(false);
            }
            cloud.security_groups.remove(group);
            Ok(true)
        })
        .await
    }
}
