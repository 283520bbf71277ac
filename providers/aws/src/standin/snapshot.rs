// SPDX-License-Identifier: Apache-2.0
//! The stand-in's resources as text, to compare two histories.

use std::collections::BTreeSet;

use steerage_provider_conformance::Snapshot;

use super::cloud::{Cloud, Group};
use crate::client::NewBalancer;
use crate::security_group::SecurityGroup;
use crate::source_nat::SourceNat;
use crate::tls::Tls;

/// One line for each object, without ARNs, generated IDs and times.
pub(crate) fn snapshot(cloud: &Cloud) -> Snapshot {
    let name = |arn: &String| cloud.groups.get(arn).map_or("nothing", |group| &group.name).to_owned();
    let balancer =
        |arn: &String| cloud.balancers.get(arn).map_or("none", |found| &found.made.name).to_owned();
    let security_group =
        |id: &String| cloud.security_groups.get(id).map_or("none", |found| &found.name).to_owned();
    let balancers = cloud.balancers.values().map(|found| {
        // All of it may have changed since.
        let made =
            NewBalancer { security_groups: BTreeSet::new(), subnets: Vec::new(), ..found.made.clone() };
        // Prefixes may be AWS's choice.
        let (ip_address_type, source_nat) = (found.ip_address_type, SourceNat::Off);
        let made = NewBalancer { ip_address_type, source_nat, ..made };
        let nat = found.source_nat.as_str();
        let attached: BTreeSet<String> = found.security_groups.iter().map(security_group).collect();
        let content =
            format!("{made:?} {nat} {:?} {attached:?} {:?} {:?}", found.placed, found.attributes, found.tags);
        (format!("load balancer {}", made.name), content)
    });
    let listeners = cloud.listeners.values().map(|found| {
        let tls = found.tls.clone().map(Tls::without_default);
        let content = format!("{} {} {tls:?} {:?}", found.protocol, name(&found.group), found.tags);
        (format!("listener {}:{}", balancer(&found.balancer), found.port), content)
    });
    let groups = cloud.groups.values().map(|found| {
        let Group { protocol, port, vpc, health, attributes, tags, .. } = found;
        let targets: BTreeSet<&String> = found.registered().collect();
        let content = format!("{protocol} {port} {vpc} {health:?} {attributes:?} {tags:?} {targets:?}");
        (format!("target group {}", found.name), content)
    });
    let security_groups = cloud.security_groups.values().map(|found| {
        let SecurityGroup { vpc, tags, own, others, .. } = found;
        (format!("security group {}", found.name), format!("{vpc} {tags:?} {own:?} {others:?}"))
    });
    balancers.chain(listeners).chain(groups).chain(security_groups).collect()
}
