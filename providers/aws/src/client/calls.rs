// SPDX-License-Identifier: Apache-2.0
//! What the provider needs of AWS: one method for each call, in this crate's own types. [`Client`](super::Client) makes the
//! calls; tests also have a stand-in that behaves as AWS does over time. Implementations decide nothing and remember nothing.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;

use super::{Balancer, ListedGroup, NewBalancer, RegisteredTarget, Result, Tags};
use crate::attributes::Values;
use crate::desired::DesiredGroup;
use crate::diff::{ObservedGroup, ObservedListener};
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::IpAddressType;
use crate::named_groups::NameAndId;
use crate::placement::Placed;
use crate::security_group::{NewSecurityGroup, Rule, SecurityGroup};
use crate::source_nat::SourceNat;
use crate::subnets::Subnet;
use crate::target_id::TargetId;
use crate::tls::Tls;

/// All calls.
pub(crate) trait Calls:
    BalancerCalls + ListenerCalls + GroupCalls + TargetCalls + SecurityGroupCalls + SubnetCalls
{
}

impl<T> Calls for T where
    T: BalancerCalls + ListenerCalls + GroupCalls + TargetCalls + SecurityGroupCalls + SubnetCalls
{
}

/// Calls about load balancers, and about the tags of all resources.
#[async_trait]
pub(crate) trait BalancerCalls: Send + Sync + 'static {
    async fn balancer_named(&self, name: &str) -> Result<Option<Balancer>>;
    async fn balancer_at(&self, arn: &str) -> Result<Option<Balancer>>;
    /// At most [`BALANCERS_BATCH`](super::BALANCERS_BATCH) load balancers. Fails as a whole if one of them does not exist.
    async fn balancers_at(&self, arns: &[String]) -> Result<Vec<Balancer>>;
    /// All load balancers in the region, 400 with each call.
    async fn all_balancers(&self) -> Result<Vec<Balancer>>;
    /// AWS returns an existing one of the same name and settings, whoever made it.
    async fn create_balancer(&self, wanted: &NewBalancer, tags: &Tags) -> Result<Balancer>;
    async fn delete_balancer(&self, arn: &str) -> Result<()>;
    /// Replaces the security groups. AWS refuses it for a load balancer that has none.
    async fn set_security_groups(&self, arn: &str, groups: &[String]) -> Result<()>;
    /// Replaces the subnets, each with the address that was requested for it. AWS adds and removes zones, but changes no address, and no
    /// zone takes another subnet in the call that removes the present one. AWS takes source NAT only with IPv6, and turns it off where it is
    /// left out, unless a listener has UDP. Returns what it is then.
    async fn set_subnets(
        &self,
        arn: &str,
        subnets: &Placed,
        source_nat: Option<&SourceNat>,
    ) -> Result<SourceNat>;
    /// Changes over which IP families clients reach it. AWS refuses IPv4 alone while a target group has IPv6.
    async fn set_ip_address_type(&self, arn: &str, kind: IpAddressType) -> Result<()>;
    async fn balancer_attributes(&self, arn: &str) -> Result<BTreeMap<String, String>>;
    async fn set_balancer_attributes(&self, arn: &str, attributes: &Values) -> Result<()>;
    /// The tags of at most [`TAGS_BATCH`](super::TAGS_BATCH) resources, by ARN. Fails as a whole if one of them does not exist.
    async fn tags(&self, arns: &[String]) -> Result<BTreeMap<String, Tags>>;
    async fn add_tags(&self, arn: &str, tags: &Tags) -> Result<()>;
    /// Those that are not there are no error.
    async fn remove_tags(&self, arn: &str, keys: &[String]) -> Result<()>;
}

/// Calls about listeners.
#[async_trait]
pub(crate) trait ListenerCalls: Send + Sync + 'static {
    /// The listeners of a load balancer, of TLS listeners only the default certificate; `None` if it does not exist.
    async fn listeners(&self, balancer: &str) -> Result<Option<Vec<ObservedListener>>>;
    async fn create_listener(
        &self,
        balancer: &str,
        at: (u16, &str),
        tls: Option<&Tls>,
        group: &str,
        tags: &Tags,
    ) -> Result<ObservedListener>;
    /// Sends the protocol only if it changes.
    async fn modify_listener(
        &self,
        arn: &str,
        protocol: Option<&str>,
        tls: Option<&Tls>,
        group: &str,
    ) -> Result<()>;
    /// The certificates of a TLS listener, except the default one.
    async fn other_certificates(&self, listener: &str) -> Result<BTreeSet<String>>;
    /// One that the list already has is no error. AWS takes one in a call, also to remove it.
    async fn add_certificate(&self, listener: &str, arn: &str) -> Result<()>;
    /// AWS refuses to remove the default one.
    async fn remove_certificate(&self, listener: &str, arn: &str) -> Result<()>;
    async fn delete_listener(&self, arn: &str) -> Result<()>;
}

/// Calls about target groups. Only [`attributes`](Self::attributes) reads their attributes.
#[async_trait]
pub(crate) trait GroupCalls: Send + Sync + 'static {
    async fn group_named(&self, name: &str) -> Result<Option<ObservedGroup>>;
    /// The target groups that a load balancer uses, by name.
    async fn groups_of(&self, balancer: &str) -> Result<BTreeMap<String, ObservedGroup>>;
    /// All target groups in the region, 400 with each call.
    async fn all_groups(&self) -> Result<Vec<ListedGroup>>;
    async fn attributes(&self, group: &str) -> Result<BTreeMap<String, String>>;
    /// AWS returns an existing one of the same name and settings, whoever made it.
    async fn create_group(&self, wanted: &DesiredGroup, vpc: &str, tags: &Tags) -> Result<ObservedGroup>;
    async fn modify_health(&self, group: &str, health: &HealthCheckSettings) -> Result<()>;
    async fn set_attributes(&self, group: &str, attributes: &Values) -> Result<()>;
    /// Returns whether the group no longer exists; false while a load balancer still uses it.
    async fn delete_group(&self, arn: &str) -> Result<bool>;
}

/// Calls about targets. Instances are on the port of their group.
#[async_trait]
pub(crate) trait TargetCalls: Send + Sync + 'static {
    async fn targets(&self, group: &str) -> Result<Vec<RegisteredTarget>>;
    /// Registers all of them or, with `InvalidTarget`, none.
    async fn register(&self, group: &str, ids: &[TargetId]) -> Result<()>;
    async fn deregister(&self, group: &str, ids: &[TargetId]) -> Result<()>;
}

/// Calls about subnets, to EC2.
#[async_trait]
pub(crate) trait SubnetCalls: Send + Sync + 'static {
    /// The subnets of a VPC.
    async fn subnets(&self, vpc: &str) -> Result<Vec<Subnet>>;
}

/// Calls about security groups, to EC2, which shows changes some seconds late.
#[async_trait]
pub(crate) trait SecurityGroupCalls: Send + Sync + 'static {
    /// The security groups that carry all of these tags, with their inbound rules.
    async fn security_groups(&self, tags: &Tags) -> Result<Vec<SecurityGroup>>;
    /// Name and ID of each security group of a VPC whose tag `Name` is one of these.
    async fn security_groups_named(&self, vpc: &str, names: &[String]) -> Result<Vec<NameAndId>>;
    /// Returns its ID. AWS refuses a name that the VPC has, whoever made it (`InvalidGroup.Duplicate`).
    async fn create_security_group(&self, wanted: &NewSecurityGroup, tags: &Tags) -> Result<String>;
    /// Adds all of these inbound rules or, with an error, none: one may be there already (`InvalidPermission.Duplicate`), or there is
    /// room for fewer (a quota).
    async fn authorize(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()>;
    /// Removes all of these inbound rules or, with an error, none: one may be gone already (`InvalidPermission.NotFound`).
    async fn revoke(&self, group: &str, rules: &BTreeSet<Rule>) -> Result<()>;
    /// Returns whether the group no longer exists; false while something uses it.
    async fn delete_security_group(&self, group: &str) -> Result<bool>;
}
