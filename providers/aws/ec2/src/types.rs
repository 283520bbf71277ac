// SPDX-License-Identifier: Apache-2.0
//! What requests and answers carry, named as in EC2's reference. Other fields of EC2 are left out.

use serde::Deserialize;

use crate::answer::{Items, listed};
use crate::form::Form;

/// Selects what has one of these values. `*` and `?` are wildcards, `\` is before one that is meant as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// What is compared, such as `vpc-id` or `tag:Name`.
    pub name: String,
    /// At least one.
    pub values: Vec<String>,
}

impl Filter {
    /// A filter for one value.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), values: vec![value.into()] }
    }
}

/// A tag of a resource.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Tag {
    /// Its key.
    pub key: String,
    /// Its value.
    #[serde(default)]
    pub value: String,
}

/// A security group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SecurityGroup {
    /// Its ID.
    pub group_id: String,
    /// Its name, which is unique in a VPC and never changes.
    pub group_name: String,
    /// ID of its VPC.
    pub vpc_id: String,
    /// Its tags.
    #[serde(rename = "tagSet", deserialize_with = "listed")]
    pub tags: Vec<Tag>,
    /// What it admits.
    #[serde(deserialize_with = "listed")]
    pub ip_permissions: Vec<IpPermission>,
}

/// What a new security group has from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSecurityGroup<'a> {
    /// Its name, unique in the VPC.
    pub name: &'a str,
    /// Its description.
    pub description: &'a str,
    /// ID of its VPC.
    pub vpc: &'a str,
    /// Its tags.
    pub tags: Vec<Tag>,
}

/// Sources that are admitted to a range of ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IpPermission {
    /// `tcp`, `udp`, `icmp`, another protocol's number, or `-1` for all.
    pub ip_protocol: String,
    /// The first port, or the type of ICMP; -1 for all types. None for all protocols.
    pub from_port: Option<i32>,
    /// The last port, or the code of ICMP; -1 for all codes.
    pub to_port: Option<i32>,
    /// IPv4 ranges.
    #[serde(deserialize_with = "listed")]
    pub ip_ranges: Vec<IpRange>,
    /// IPv6 ranges.
    #[serde(deserialize_with = "listed")]
    pub ipv6_ranges: Vec<Ipv6Range>,
    /// Prefix lists.
    #[serde(deserialize_with = "listed")]
    pub prefix_list_ids: Vec<PrefixListId>,
}

/// An IPv4 range as a source.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IpRange {
    /// The range, such as `192.0.2.0/24`.
    pub cidr_ip: String,
    /// The description of the rule.
    pub description: Option<String>,
}

/// An IPv6 range as a source.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ipv6Range {
    /// The range, such as `2001:db8::/32`.
    pub cidr_ipv6: String,
    /// The description of the rule.
    pub description: Option<String>,
}

/// A prefix list as a source.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrefixListId {
    /// Its ID.
    pub prefix_list_id: String,
    /// The description of the rule.
    pub description: Option<String>,
}

/// A subnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Subnet {
    /// Its ID.
    pub subnet_id: String,
    /// Name of its zone.
    pub availability_zone: String,
    /// IPv4 addresses that nothing uses.
    pub available_ip_address_count: u32,
    /// The outpost that it is on.
    pub outpost_arn: Option<String>,
    /// Its IPv6 ranges.
    #[serde(rename = "ipv6CidrBlockAssociationSet", deserialize_with = "listed")]
    pub ipv6_ranges: Vec<Ipv6Association>,
    /// Its tags.
    #[serde(rename = "tagSet", deserialize_with = "listed")]
    pub tags: Vec<Tag>,
}

/// An IPv6 range of a subnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Ipv6Association {
    /// The range.
    pub ipv6_cidr_block: String,
    /// Whether the subnet has it, or will, or had it.
    pub ipv6_cidr_block_state: AssociationState,
}

impl Ipv6Association {
    /// Whether the subnet has the range.
    pub fn is_associated(&self) -> bool {
        self.ipv6_cidr_block_state.state == "associated"
    }
}

/// The state of a range of a subnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AssociationState {
    /// Such as `associated` or `disassociated`.
    pub state: String,
}

/// An instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Instance {
    /// Its ID.
    pub instance_id: String,
    /// Its first private address, absent when it is terminated.
    pub private_ip_address: Option<String>,
}

/// Instances that were started together.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Reservation {
    pub(crate) instances_set: Items<Instance>,
}

/// Adds tags as `CreateTags` takes them, and below `TagSpecification.1` as `Create…` does.
pub(crate) fn write_tags(form: &mut Form, before: &str, tags: &[Tag]) {
    for (index, tag) in (1..).zip(tags) {
        form.put(format!("{before}Tag.{index}.Key"), &tag.key);
        form.put(format!("{before}Tag.{index}.Value"), &tag.value);
    }
}

pub(crate) fn write_filters(form: &mut Form, filters: &[Filter]) {
    for (index, filter) in (1..).zip(filters) {
        form.put(format!("Filter.{index}.Name"), &filter.name);
        form.put_list(&format!("Filter.{index}.Value"), &filter.values);
    }
}

pub(crate) fn write_permissions(form: &mut Form, permissions: &[IpPermission]) {
    for (index, permission) in (1..).zip(permissions) {
        let at = format!("IpPermissions.{index}");
        form.put(format!("{at}.IpProtocol"), &permission.ip_protocol);
        for (field, port) in [("FromPort", permission.from_port), ("ToPort", permission.to_port)] {
            if let Some(port) = port {
                form.put(format!("{at}.{field}"), &port.to_string());
            }
        }
        for (index, range) in (1..).zip(&permission.ip_ranges) {
            let at = format!("{at}.IpRanges.{index}");
            form.put(format!("{at}.CidrIp"), &range.cidr_ip);
            form.put_option(format!("{at}.Description"), range.description.as_deref());
        }
        for (index, range) in (1..).zip(&permission.ipv6_ranges) {
            let at = format!("{at}.Ipv6Ranges.{index}");
            form.put(format!("{at}.CidrIpv6"), &range.cidr_ipv6);
            form.put_option(format!("{at}.Description"), range.description.as_deref());
        }
        for (index, list) in (1..).zip(&permission.prefix_list_ids) {
            let at = format!("{at}.PrefixListIds.{index}");
            form.put(format!("{at}.PrefixListId"), &list.prefix_list_id);
            form.put_option(format!("{at}.Description"), list.description.as_deref());
        }
    }
}
