// SPDX-License-Identifier: Apache-2.0
//! The calls to AWS at the rate that AWS takes. AWS has a limit for each kind of action, for all programs of an account and region
//! together: changes must not use up what registrations need. `client` makes the calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use steerage_provider_api::call_namespace;
use steerage_provider_cloud::{ApiMetrics, MeteredBudget, Rate};

use crate::attributes::Values;
use crate::call_clock;
use crate::client::{
    Balancer, BalancerCalls, CallError, Calls, GroupCalls, ListedGroup, ListenerCalls, NewBalancer,
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

/// The kinds of actions, with the limits that AWS documents or its other controllers keep: name in metrics, burst, and calls per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Registration,
    Change,
    Ec2Read,
    Ec2Change,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Read, Self::Registration, Self::Change, Self::Ec2Read, Self::Ec2Change];

    fn name(self) -> &'static str {
        match self {
            Self::Read => "elbv2_read",
            Self::Registration => "elbv2_registration",
            Self::Change => "elbv2_change",
            Self::Ec2Read => "ec2_read",
            Self::Ec2Change => "ec2_change",
        }
    }

    /// For users.
    fn title(self) -> &'static str {
        match self {
            Self::Read => "reads of ELBv2",
            Self::Registration => "registrations at ELBv2",
            Self::Change => "changes of ELBv2",
            Self::Ec2Read => "reads of EC2",
            Self::Ec2Change => "changes of EC2",
        }
    }

    fn documented(self) -> Rate {
        let (burst, per_second) = match self {
            Self::Read => (40, 10.0),
            Self::Registration => (20, 4.0),
            Self::Change => (20, 3.0),
            Self::Ec2Read => (50, 10.0),
            Self::Ec2Change => (50, 5.0),
        };
        Rate { burst, per_second }
    }
}

/// The budgets by their names in metrics, with the rates with which they begin.
pub(crate) fn initial_rates() -> [(&'static str, Rate); Kind::ALL.len()] {
    Kind::ALL.map(|kind| (kind.name(), kind.documented()))
}

/// So long a registration waits for its answer, which mostly comes within a second: the Service's other targets do not change meanwhile.
/// Whether AWS made one that had none is open, as after a connection that broke.
const REGISTRATION_TIME: Duration = Duration::from_secs(10);
/// The same for a change of a listener or a target group, which mostly takes less than a second. Reads show later whether AWS made it.
const CHANGE_TIME: Duration = Duration::from_secs(10);
/// The kind's name in messages.
const REGISTRATIONS: &str = "RegisterTargets or DeregisterTargets";
const CHANGES: &str = "change of a listener or a target group";

/// Other calls are given up by the client, after half a minute.
const NEVER: Option<(&str, Duration)> = None;

/// Calls that wait for their budget.
#[derive(Debug)]
pub(crate) struct Paced<C> {
    inner: Arc<C>,
    budgets: [MeteredBudget; Kind::ALL.len()],
}

impl<C> Paced<C> {
    pub(crate) fn new(inner: Arc<C>, metrics: ApiMetrics) -> Self {
        let budget = move |kind: Kind| MeteredBudget::new(kind.name(), kind.documented(), metrics.clone());
        Self { inner, budgets: Kind::ALL.map(budget) }
    }

    /// As if AWS had refused calls for some time.
    #[cfg(test)]
    pub(crate) fn slow_down(&self) {
        for budget in &self.budgets {
            budget.slow_down();
        }
    }

    async fn ask<T>(
        &self,
        kind: Kind,
        limit: Option<(&'static str, Duration)>,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let timed = async {
            // After its turn: a wait for the budget is no sign that AWS hangs.
            let running = call_clock::begin();
            let answer = match limit {
                Some((what, time)) => {
                    let answer = tokio::time::timeout(time, call).await;
                    answer.unwrap_or_else(|_| Err(CallError::unanswered(what, time)))
                }
                None => call.await,
            };
            running.end(answer.is_err());
            answer
        };
        let used_up = |used_up| CallError::used_up(kind.title(), used_up);
        self.budgets[kind as usize]
            .send(&call_namespace::current(), timed, used_up, CallError::is_throttled)
            .await
    }
}

/// Implements a trait of calls: each waits for the budget of its kind, and is made by `inner`. Of
/// some traits, calls that change something are given up after a time.
macro_rules! paced {
    ($calls:ident, $limit:expr; { $($kind:ident $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)* }) => {
        #[async_trait]
        impl<C: Calls> $calls for Paced<C> {
            $(
                async fn $name(&self, $($argument: $type),*) -> Result<$answer> {
                    let limit = $limit.filter(|_| Kind::$kind != Kind::Read);
                    self.ask(Kind::$kind, limit, self.inner.$name($($argument),*)).await
                }
            )*
        }
    };
}

paced!(BalancerCalls, NEVER; {
    Read balancer_named(name: &str) -> Option<Balancer>;
    Read balancer_at(arn: &str) -> Option<Balancer>;
    Read balancers_at(arns: &[String]) -> Vec<Balancer>;
    Read all_balancers() -> Vec<Balancer>;
    Change create_balancer(wanted: &NewBalancer, tags: &Tags) -> Balancer;
    Change delete_balancer(arn: &str) -> ();
    Change set_security_groups(arn: &str, groups: &[String]) -> ();
    Change set_subnets(arn: &str, subnets: &Placed, source_nat: Option<&SourceNat>) -> SourceNat;
    Change set_ip_address_type(arn: &str, kind: IpAddressType) -> ();
    Read balancer_attributes(arn: &str) -> BTreeMap<String, String>;
    Change set_balancer_attributes(arn: &str, attributes: &Values) -> ();
    Read tags(arns: &[String]) -> BTreeMap<String, Tags>;
    Change add_tags(arn: &str, tags: &Tags) -> ();
    Change remove_tags(arn: &str, keys: &[String]) -> ();
});

paced!(ListenerCalls, Some((CHANGES, CHANGE_TIME)); {
    Read listeners(balancer: &str) -> Option<Vec<ObservedListener>>;
    Change create_listener(balancer: &str, at: (u16, &str), tls: Option<&Tls>, group: &str, tags: &Tags) -> ObservedListener;
    Change modify_listener(arn: &str, protocol: Option<&str>, tls: Option<&Tls>, group: &str) -> ();
    Read other_certificates(listener: &str) -> BTreeSet<String>;
    Change add_certificate(listener: &str, arn: &str) -> ();
    Change remove_certificate(listener: &str, arn: &str) -> ();
    Change delete_listener(arn: &str) -> ();
});

paced!(GroupCalls, Some((CHANGES, CHANGE_TIME)); {
    Read group_named(name: &str) -> Option<ObservedGroup>;
    Read groups_of(balancer: &str) -> BTreeMap<String, ObservedGroup>;
    Read all_groups() -> Vec<ListedGroup>;
    Read attributes(group: &str) -> BTreeMap<String, String>;
    Change create_group(wanted: &DesiredGroup, vpc: &str, tags: &Tags) -> ObservedGroup;
    Change modify_health(group: &str, health: &HealthCheckSettings) -> ();
    Change set_attributes(group: &str, attributes: &Values) -> ();
    Change delete_group(arn: &str) -> bool;
});

paced!(TargetCalls, Some((REGISTRATIONS, REGISTRATION_TIME)); {
    Read targets(group: &str) -> Vec<RegisteredTarget>;
    Registration register(group: &str, ids: &[TargetId]) -> ();
    Registration deregister(group: &str, ids: &[TargetId]) -> ();
});

paced!(SubnetCalls, NEVER; {
    Ec2Read subnets(vpc: &str) -> Vec<Subnet>;
});

paced!(SecurityGroupCalls, NEVER; {
    Ec2Read security_groups(tags: &Tags) -> Vec<SecurityGroup>;
    Ec2Read security_groups_named(vpc: &str, names: &[String]) -> Vec<NameAndId>;
    Ec2Change create_security_group(wanted: &NewSecurityGroup, tags: &Tags) -> String;
    Ec2Change authorize(group: &str, rules: &BTreeSet<Rule>) -> ();
    Ec2Change revoke(group: &str, rules: &BTreeSet<Rule>) -> ();
    Ec2Change delete_security_group(group: &str) -> bool;
});
