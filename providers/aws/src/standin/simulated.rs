// SPDX-License-Identifier: Apache-2.0
//! The stand-in for the controller's simulation: one account, the provider of each process on it, and a look from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use steerage_provider_api::{Owner, Provider};
use steerage_provider_cloud::{ApiMetrics, ClusterId, marks};
use steerage_provider_conformance::Snapshot;
use steerage_provider_conformance::simulated::{Network, SeenLoadBalancer, SimulatedCloud};
use tokio::time::Instant;

use super::balancers::hostname;
use super::cloud::{Cloud, Forward, Group, Instance, NetworkLb, Registration};
use super::linked::Linked;
use super::snapshot::snapshot;
use super::{Delays, StandIn};
use crate::client::{NewBalancer, Tags};
use crate::config::{Config, Scheme};
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::IpAddressType;
use crate::paced::Paced;
use crate::security_group::{Rule, SecurityGroup, Source};
use crate::source_nat::SourceNat;
use crate::subnets::Subnet;
use crate::{Aws, annotations};

/// Tag of what others made.
const FOREIGN: &str = "team-of-others";
/// A machine that is no node.
const BY_HAND: &str = "i-by-hand";

/// An account of AWS for the controller's simulation.
pub struct SimulatedAws {
    cloud: Arc<StandIn>,
    seed: u64,
}

fn config() -> Config {
    Config {
        cluster: ClusterId { name: "simulated".to_owned(), uid: "cluster-1".to_owned() },
        vpc: "vpc-1".to_owned(),
        subnets: vec!["subnet-a".to_owned()],
        backend_security_group: None,
        region: None,
        endpoint: None,
        ec2_endpoint: None,
        scheme: Scheme::Internal,
        shared_load_balancers: BTreeMap::new(),
        adopt: BTreeSet::new(),
        settle: Duration::from_secs(10),
        activation_poll: Duration::from_secs(10),
        target_group_release: Duration::from_secs(5),
        security_group_release: Duration::from_secs(10),
    }
}

fn instance_of(node: &str) -> String {
    node.replacen("node-", "i-", 1)
}

fn node_of(instance: &str) -> String {
    if instance == BY_HAND { "by-hand".to_owned() } else { instance.replacen("i-", "node-", 1) }
}

fn owner_of(tags: &Tags) -> Option<Owner> {
    match marks::ownership(&config().cluster, tags) {
        marks::Ownership::Ours(owner) => Some(owner),
        _ => None,
    }
}

/// What others have in the account: a load balancer under the prefix of this cluster's names, with a listener, a target group and a
/// security group.
fn plant(cloud: &mut Cloud) {
    cloud.subnets = vec![Subnet {
        id: "subnet-a".to_owned(),
        zone: "us-east-1a".to_owned(),
        tags: Tags::new(),
        free: 200,
        has_ipv6: true,
        is_on_outpost: false,
    }];
    let now = Instant::now();
    let machine = Instance { running: true, passes: (true, now) };
    cloud.instances.insert(BY_HAND.to_owned(), machine);
    let tags = Tags::from([(FOREIGN.to_owned(), "else".to_owned())]);
    let name = format!("{}other", crate::names::prefix(&config().cluster));
    let security_group = SecurityGroup {
        id: "sg-of-others".to_owned(),
        name: "of-others".to_owned(),
        vpc: "vpc-1".to_owned(),
        tags: tags.clone(),
        ..SecurityGroup::default()
    };
    let made = NewBalancer {
        name: name.clone(),
        ip_address_type: IpAddressType::Ipv4,
        source_nat: SourceNat::Off,
        scheme: Scheme::Internal,
        subnets: vec![("subnet-a".to_owned(), None)],
        security_groups: BTreeSet::from([security_group.id.clone()]),
    };
    cloud.security_groups.insert(security_group.id.clone(), security_group);
    let (balancer, group) = (cloud.arn("loadbalancer/net", &name), cloud.arn("targetgroup", &name));
    cloud.balancers.insert(balancer.clone(), NetworkLb::new(made, tags.clone(), now));
    let registration = Registration { since: now, draining: None };
    let made = Group {
        name,
        protocol: "TCP".to_owned(),
        port: 30080,
        has_pods: false,
        is_ipv6: false,
        vpc: "vpc-1".to_owned(),
        health: HealthCheckSettings::default(),
        attributes: BTreeMap::new(),
        tags: tags.clone(),
        targets: BTreeMap::from([((BY_HAND.to_owned(), 30080), registration)]),
        used: Some(now),
        held_until: None,
        served: Some((balancer.clone(), 80)),
    };
    cloud.groups.insert(group.clone(), made);
    let forward = Forward { balancer, port: 80, protocol: "TCP".to_owned(), group, tags, tls: None };
    let listener = cloud.arn("listener/net", "others");
    cloud.listeners.insert(listener, forward);
}

impl SimulatedAws {
    /// An account with nothing of the cluster. Calls take the time of the simulation's network, everything else that of AWS.
    pub fn new(seed: u64) -> Self {
        let cloud = StandIn::new(Delays { call: Duration::ZERO, ..Delays::real() }, seed);
        cloud.change(plant);
        Self { cloud: Arc::new(cloud), seed }
    }

    fn owned_groups(cloud: &Cloud) -> Vec<String> {
        cloud
            .groups
            .iter()
            .filter(|(_, found)| owner_of(&found.tags).is_some())
            .map(|(arn, _)| arn.clone())
            .collect()
    }
}

fn seen(cloud: &Cloud, arn: &str, found: &NetworkLb) -> SeenLoadBalancer {
    let listeners = cloud.listeners.values().filter(|listener| listener.balancer == arn);
    let nodes = |listener: &Forward| {
        let group = cloud.groups.get(&listener.group);
        group.into_iter().flat_map(Group::registered).map(|id| node_of(id)).collect()
    };
    let groups = found.security_groups.iter().filter_map(|id| cloud.security_groups.get(id));
    let range = |rule: &Rule| match &rule.source {
        Source::Range(range) => Some(*range),
        Source::PrefixList(_) => None,
    };
    let mut sources: BTreeSet<IpNet> =
        groups.flat_map(|group| group.own.union(&group.others)).filter_map(range).collect();
    if found.security_groups.is_empty() {
        sources.insert(IpNet::V4(Ipv4Net::default()));
    }
    let is_active = Instant::now() >= found.created + Delays::real().provisioning;
    SeenLoadBalancer {
        listeners: listeners.map(|listener| (listener.port, nodes(listener))).collect(),
        sources,
        address: if is_active { hostname(&found.made.name) } else { String::new() },
    }
}

impl SimulatedCloud for SimulatedAws {
    fn provider(&self, network: Arc<dyn Network>) -> Arc<dyn Provider> {
        let calls = Arc::new(Linked { cloud: Arc::clone(&self.cloud), network });
        Arc::new(Aws::over(config(), Arc::new(Paced::new(calls, ApiMetrics::default()))))
    }

    fn provider_id(&self, node: &str) -> String {
        format!("aws:///us-east-1a/{}", instance_of(node))
    }

    fn set_machine(&self, node: &str, runs: bool) {
        self.cloud.change(|cloud| {
            let passes = (true, Instant::now());
            let machine = Instance { running: runs, passes };
            cloud.instances.entry(instance_of(node)).or_insert(machine).running = runs;
        });
    }

    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[
            (annotations::CROSS_ZONE, "true"),
            (annotations::GROUP_ATTRIBUTES, "deregistration_delay.timeout_seconds=60"),
            (annotations::TAGS, "team=shop,stage=test"),
            (annotations::TAGS, "team=web"),
        ]
    }

    fn refused(&self) -> (&'static str, &'static str) {
        (annotations::SCHEME, "sideways")
    }

    fn load_balancers(&self) -> BTreeMap<Owner, SeenLoadBalancer> {
        let cloud = self.cloud.cloud();
        let owned =
            |(arn, found): (&String, &NetworkLb)| Some((owner_of(&found.tags)?, seen(&cloud, arn, found)));
        cloud.balancers.iter().filter_map(owned).collect()
    }

    fn snapshot(&self) -> Snapshot {
        snapshot(&self.cloud.cloud())
    }

    fn foreign(&self) -> Snapshot {
        let mut all = self.snapshot();
        all.retain(|_, content| content.contains(FOREIGN));
        all
    }

    fn empty(&self) -> Arc<dyn SimulatedCloud> {
        let empty = Self::new(self.seed);
        let machines = self.cloud.cloud().instances;
        empty.cloud.change(|cloud| cloud.instances = machines);
        empty.cloud.set_unlimited();
        Arc::new(empty)
    }

    fn change_by_hand(&self, number: u64) -> Option<String> {
        let mut what = None;
        self.cloud.change(|cloud| {
            let mut number = usize::try_from(number % 1_000_000).unwrap_or_default();
            let mut choose = |from: &[String]| {
                let chosen = from.get(number % from.len().max(1)).cloned();
                number /= from.len().max(1);
                chosen
            };
            let kind =
                choose(&["target", "gone target", "health check", "listener", "rule"].map(str::to_owned));
            let groups = Self::owned_groups(cloud);
            what = match kind.as_deref() {
                Some("rule") => {
                    let owned =
                        cloud.security_groups.iter().filter(|(_, found)| owner_of(&found.tags).is_some());
                    let ids: Vec<String> = owned.map(|(id, _)| id.clone()).collect();
                    let found = choose(&ids).and_then(|id| cloud.security_groups.get_mut(&id));
                    found.map(|found| {
                        let range = Ipv4Net::new_assert([192, 0, 2, 0].into(), 24);
                        let source = Source::Range(IpNet::V4(range));
                        found.own.insert(Rule { protocol: "tcp", port: 80, source });
                        format!("a rule in {}", found.name)
                    })
                }
                Some("listener") => {
                    let owned = cloud.listeners.iter().filter(|(_, found)| owner_of(&found.tags).is_some());
                    let arns: Vec<String> = owned.map(|(arn, _)| arn.clone()).collect();
                    let gone = choose(&arns).and_then(|arn| cloud.listeners.remove(&arn));
                    cloud.note_use(Instant::now());
                    gone.map(|found| format!("no listener of port {}", found.port))
                }
                kind => choose(&groups).and_then(|arn| cloud.groups.get_mut(&arn)).map(|found| match kind {
                    Some("target") => {
                        let registration = Registration { since: Instant::now(), draining: None };
                        found.targets.insert((BY_HAND.to_owned(), found.port), registration);
                        format!("a target in {}", found.name)
                    }
                    Some("gone target") => {
                        // Without times: equal seeds have equal histories.
                        match found.targets.pop_first() {
                            Some(((instance, port), _)) => format!("no {instance}:{port} in {}", found.name),
                            None => format!("no target in {} to remove", found.name),
                        }
                    }
                    _ => {
                        found.health.healthy = 9;
                        format!("the health check of {}", found.name)
                    }
                }),
            };
        });
        what
    }
}
