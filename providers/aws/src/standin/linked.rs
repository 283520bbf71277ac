// SPDX-License-Identifier: Apache-2.0
//! The calls to the stand-in over a simulation's network, where they may have their effect twice, or when their caller has gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt as _;
use steerage_provider_conformance::simulated::{CallFault, CarriedCall, Network, carry};

use super::{Kind, StandIn};
use crate::attributes::Values;
use crate::client::{
    Balancer, BalancerCalls, CallError, GroupCalls, ListedGroup, ListenerCalls, NewBalancer,
    RegisteredTarget, Result, SecurityGroupCalls, SubnetCalls, Tags, TargetCalls,
};
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

/// The calls of one process.
pub(super) struct Linked {
    pub(super) cloud: Arc<StandIn>,
    pub(super) network: Arc<dyn Network>,
}

impl Linked {
    /// Makes a call, of which `at_cloud` is what the stand-in does, without waiting.
    async fn call<T: Send + 'static>(
        &self,
        kind: Kind,
        name: &'static str,
        at_cloud: impl Fn(&StandIn) -> Option<Result<T>> + Send + 'static,
    ) -> Result<T> {
        let cloud = Arc::clone(&self.cloud);
        let call = CarriedCall { name, is_write: kind.is_write() };
        let unanswered = || CallError::made_up(name, "", "connection closed");
        match carry(&*self.network, call, move || at_cloud(&cloud)).await {
            Ok(answer) => answer.unwrap_or_else(|| Err(unanswered())),
            Err(CallFault::Throttled) => Err(CallError::made_up(name, kind.throttled(), "Rate exceeded")),
            Err(CallFault::Broken) => Err(unanswered()),
        }
    }
}

/// Implements a trait of calls, whose arguments are references.
macro_rules! linked {
    ($calls:ident; { $($kind:ident $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)* } $($rest:item)*) => {
        #[async_trait]
        impl $calls for Linked {
            $(
                async fn $name(&self, $($argument: &$type),*) -> Result<$answer> {
                    $(let $argument = $argument.to_owned();)*
                    let at_cloud = move |cloud: &StandIn| $calls::$name(cloud, $(&$argument),*).now_or_never();
                    self.call(Kind::$kind, stringify!($name), at_cloud).await
                }
            )*
            $($rest)*
        }
    };
}

linked!(BalancerCalls; {
    Read balancer_named(name: str) -> Option<Balancer>;
    Read balancer_at(arn: str) -> Option<Balancer>;
    Read balancers_at(arns: [String]) -> Vec<Balancer>;
    Read all_balancers() -> Vec<Balancer>;
    Mutation create_balancer(wanted: NewBalancer, tags: Tags) -> Balancer;
    Mutation delete_balancer(arn: str) -> ();
    Mutation set_security_groups(arn: str, groups: [String]) -> ();
    Read balancer_attributes(arn: str) -> BTreeMap<String, String>;
    Mutation set_balancer_attributes(arn: str, attributes: Values) -> ();
    Read tags(arns: [String]) -> BTreeMap<String, Tags>;
    Mutation add_tags(arn: str, tags: Tags) -> ();
    Mutation remove_tags(arn: str, keys: [String]) -> ();
}
    async fn set_subnets(
        &self,
        arn: &str,
        subnets: &Placed,
        source_nat: Option<&SourceNat>,
    ) -> Result<SourceNat> {
        let (arn, subnets, source_nat) = (arn.to_owned(), subnets.clone(), source_nat.cloned());
        let at_cloud =
            move |cloud: &StandIn| cloud.set_subnets(&arn, &subnets, source_nat.as_ref()).now_or_never();
        self.call(Kind::Mutation, "set_subnets", at_cloud).await
    }

    async fn set_ip_address_type(&self, arn: &str, kind: IpAddressType) -> Result<()> {
        let arn = arn.to_owned();
        let at_cloud = move |cloud: &StandIn| cloud.set_ip_address_type(&arn, kind).now_or_never();
        self.call(Kind::Mutation, "set_ip_address_type", at_cloud).await
    }
);

linked!(ListenerCalls; {
    Read listeners(balancer: str) -> Option<Vec<ObservedListener>>;
    Read other_certificates(listener: str) -> BTreeSet<String>;
    Mutation add_certificate(listener: str, arn: str) -> ();
    Mutation remove_certificate(listener: str, arn: str) -> ();
    Mutation delete_listener(arn: str) -> ();
}
    async fn create_listener(
        &self,
        balancer: &str,
        (port, protocol): (u16, &str),
        tls: Option<&Tls>,
        group: &str,
        tags: &Tags,
    ) -> Result<ObservedListener> {
        let (balancer, protocol, group) = (balancer.to_owned(), protocol.to_owned(), group.to_owned());
        let (tls, tags) = (tls.cloned(), tags.clone());
        let at_cloud = move |cloud: &StandIn| {
            let made = cloud.create_listener(&balancer, (port, &protocol), tls.as_ref(), &group, &tags);
            made.now_or_never()
        };
        self.call(Kind::Mutation, "create_listener", at_cloud).await
    }

    async fn modify_listener(
        &self,
        arn: &str,
        protocol: Option<&str>,
        tls: Option<&Tls>,
        group: &str,
    ) -> Result<()> {
        let (arn, protocol) = (arn.to_owned(), protocol.map(str::to_owned));
        let (tls, group) = (tls.cloned(), group.to_owned());
        let at_cloud = move |cloud: &StandIn| {
            cloud.modify_listener(&arn, protocol.as_deref(), tls.as_ref(), &group).now_or_never()
        };
        self.call(Kind::Mutation, "modify_listener", at_cloud).await
    }
);

linked!(GroupCalls; {
    Read group_named(name: str) -> Option<ObservedGroup>;
    Read groups_of(balancer: str) -> BTreeMap<String, ObservedGroup>;
    Read all_groups() -> Vec<ListedGroup>;
    Read attributes(group: str) -> BTreeMap<String, String>;
    Mutation create_group(wanted: DesiredGroup, vpc: str, tags: Tags) -> ObservedGroup;
    Mutation modify_health(group: str, health: HealthCheckSettings) -> ();
    Mutation set_attributes(group: str, attributes: Values) -> ();
    Mutation delete_group(arn: str) -> bool;
});

linked!(TargetCalls; {
    Read targets(group: str) -> Vec<RegisteredTarget>;
    Registration register(group: str, ids: [TargetId]) -> ();
    Registration deregister(group: str, ids: [TargetId]) -> ();
});

linked!(SubnetCalls; {
    Ec2Read subnets(vpc: str) -> Vec<Subnet>;
});

linked!(SecurityGroupCalls; {
    Ec2Read security_groups(tags: Tags) -> Vec<SecurityGroup>;
    Ec2Read security_groups_named(vpc: str, names: [String]) -> Vec<NameAndId>;
    Ec2Write create_security_group(wanted: NewSecurityGroup, tags: Tags) -> String;
    Ec2Write authorize(group: str, rules: BTreeSet<Rule>) -> ();
    Ec2Write revoke(group: str, rules: BTreeSet<Rule>) -> ();
    Ec2Write delete_security_group(group: str) -> bool;
});
