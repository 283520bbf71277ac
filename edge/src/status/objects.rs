// SPDX-License-Identifier: Apache-2.0
//! The objects that follow from a host's status. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;
use steerage_edge_api::{
    EdgeHost, EdgeHostSpec, EdgeLoadBalancer, EdgeNodeSet, EdgeTargetHealth, EdgeTargetHealthSpec, HOST_LABEL,
};

use super::HostStatus;
use crate::plan::{GroupReport, LoadBalancerStatus, SharedGroup};
use crate::shards::Shard;

/// Which object of this host it is. Those that others refer to come first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum ObjectKey {
    Host,
    /// By the name of the [`SharedGroup`].
    Shared(String),
    /// By name.
    LoadBalancer(String),
}

impl ObjectKey {
    pub(super) fn object_name(&self, host: &str) -> String {
        match self {
            Self::Host => host.to_owned(),
            Self::Shared(name) | Self::LoadBalancer(name) => format!("{name}.{host}"),
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Host => "EdgeHost",
            Self::Shared(_) | Self::LoadBalancer(_) => "EdgeTargetHealth",
        }
    }
}

/// One object to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StatusObject {
    Host(EdgeHostSpec),
    /// What several load balancers share, and the UID of its node set.
    Shared(Arc<SharedGroup>, Arc<GroupReport>, Arc<str>),
    LoadBalancer(LoadBalancerObject),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoadBalancerObject {
    name: String,
    uid: String,
    generation: i64,
    problem: String,
    vips: Vec<IpAddr>,
    /// One for each family.
    reports: Vec<FamilyReport>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FamilyReport {
    Own(Arc<GroupReport>),
    /// In an object that other load balancers refer to as well.
    Shared(Arc<SharedGroup>),
}

pub(super) type WantedObjects = BTreeMap<ObjectKey, StatusObject>;

impl StatusObject {
    /// The less, the sooner it is written. Objects that change all the time must not keep others from being written.
    pub(super) fn rank(&self, has_waited_long: bool, is_written: bool) -> u8 {
        match self {
            Self::Host(_) => 0,
            _ if has_waited_long => 1,
            // Others refer to it.
            Self::Shared(..) if !is_written => 2,
            Self::Shared(_, report, _) if report.is_unserved() => 3,
            Self::LoadBalancer(object) if object.has_problem() => 3,
            Self::Shared(..) | Self::LoadBalancer(_) => 4,
        }
    }

    /// The names of the reports that it refers to.
    pub(super) fn shared_reports(&self, host: &str) -> impl Iterator<Item = String> {
        let reports = match self {
            Self::LoadBalancer(object) => object.reports.as_slice(),
            Self::Host(_) | Self::Shared(..) => &[],
        };
        reports.iter().filter_map(move |report| match report {
            FamilyReport::Shared(group) => Some(report_name(group, host)),
            FamilyReport::Own(_) => None,
        })
    }

    /// The object as the API has it, except an `EdgeHost`.
    pub(super) fn target_health(&self, host: &str) -> Option<EdgeTargetHealth> {
        match self {
            Self::Host(_) => None,
            Self::Shared(group, report, uid) => Some(shared_health(host, group, report, uid)),
            Self::LoadBalancer(object) => Some(object.health(host)),
        }
    }

    /// The object as the API has it, if it is an `EdgeHost`.
    pub(super) fn edge_host(&self, host: &str) -> Option<EdgeHost> {
        match self {
            Self::Host(spec) => Some(EdgeHost::new(host, spec.clone())),
            Self::Shared(..) | Self::LoadBalancer(_) => None,
        }
    }
}

/// This host's own object.
pub(super) fn host(status: &HostStatus) -> StatusObject {
    StatusObject::Host(EdgeHostSpec {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        interface: status.interface.clone(),
        addresses: status.addresses.clone(),
        active: !status.active.is_empty(),
        shards: status.active.len(),
        active_shards: Some(status.active.to_string()),
        draining_nodes: Some(status.draining.clone()),
    })
}

/// The object of a load balancer, and those of shared targets to which it refers.
pub(super) fn of_load_balancer(
    name: &str,
    status: &LoadBalancerStatus,
    is_shared: impl Fn(&SharedGroup) -> bool,
) -> (StatusObject, Vec<(ObjectKey, StatusObject)>) {
    let (mut reports, mut referred) = (Vec::new(), Vec::new());
    for report in of_families(status) {
        match shared(status, report).filter(|(group, _)| is_shared(group)) {
            Some((group, uid)) => {
                let object = StatusObject::Shared(Arc::clone(group), Arc::clone(report), Arc::clone(uid));
                referred.push((ObjectKey::Shared(group.name.clone()), object));
                reports.push(FamilyReport::Shared(Arc::clone(group)));
            }
            None => reports.push(FamilyReport::Own(Arc::clone(report))),
        }
    }
    let object = LoadBalancerObject {
        name: name.to_owned(),
        uid: status.uid.clone(),
        generation: status.generation,
        problem: status.problem.clone(),
        vips: status.vips.clone(),
        reports,
    };
    (StatusObject::LoadBalancer(object), referred)
}

/// The targets that the load balancer may share.
pub(super) fn sharable(status: &LoadBalancerStatus) -> impl Iterator<Item = &Arc<SharedGroup>> {
    of_families(status).filter_map(|report| shared(status, report)).map(|(group, _)| group)
}

fn report_name(group: &SharedGroup, host: &str) -> String {
    ObjectKey::Shared(group.name.clone()).object_name(host)
}

/// The first report of each family: all VIPs of a family have the same.
fn of_families(status: &LoadBalancerStatus) -> impl Iterator<Item = &Arc<GroupReport>> {
    status.targets.iter().enumerate().filter_map(|(at, report)| {
        let mut earlier = status.targets.iter().take(at);
        let is_first = !earlier.any(|earlier| earlier.counts.family == report.counts.family);
        is_first.then_some(report)
    })
}

/// What the load balancer may share, and the UID of its node set.
fn shared<'a>(
    status: &'a LoadBalancerStatus,
    report: &'a GroupReport,
) -> Option<(&'a Arc<SharedGroup>, &'a Arc<str>)> {
    report.shared.as_ref().zip(status.node_set_uid.as_ref())
}

impl LoadBalancerObject {
    fn has_problem(&self) -> bool {
        let is_unserved = |report: &FamilyReport| match report {
            FamilyReport::Own(report) => report.is_unserved(),
            FamilyReport::Shared(_) => false,
        };
        !self.problem.is_empty() || self.reports.iter().any(is_unserved)
    }

    /// Owned by the load balancer, and so deleted with it.
    fn health(&self, host: &str) -> EdgeTargetHealth {
        let (mut shared_reports, mut counts, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for report in &self.reports {
            match report {
                FamilyReport::Own(report) => {
                    counts.push(report.counts.clone());
                    targets.extend(report.targets.iter().cloned());
                }
                FamilyReport::Shared(group) => {
                    shared_reports.push(report_name(group, host));
                }
            }
        }
        targets.sort_by(|a, b| (&a.node, a.address).cmp(&(&b.node, b.address)));
        let shard = |vip: &IpAddr| u32::try_from(Shard::of(*vip).index()).unwrap_or(u32::MAX);
        let spec = EdgeTargetHealthSpec {
            load_balancer: Some(self.name.clone()),
            host: host.to_owned(),
            shared: None,
            addresses: self.vips.clone(),
            shards: self.vips.iter().map(shard).collect(),
            observed_generation: self.generation,
            problem: self.problem.clone(),
            shared_reports,
            counts,
            targets,
            active: None,
        };
        let key = ObjectKey::LoadBalancer(self.name.clone());
        health_of::<EdgeLoadBalancer>(host, &key, spec, &self.name, &self.uid)
    }
}

fn shared_health(host: &str, group: &SharedGroup, report: &GroupReport, uid: &str) -> EdgeTargetHealth {
    let spec = EdgeTargetHealthSpec {
        load_balancer: None,
        host: host.to_owned(),
        shared: Some(group.targets.clone()),
        addresses: Vec::new(),
        shards: Vec::new(),
        observed_generation: 0,
        problem: String::new(),
        shared_reports: Vec::new(),
        counts: vec![report.counts.clone()],
        targets: report.targets.clone(),
        active: None,
    };
    let key = ObjectKey::Shared(group.name.clone());
    health_of::<EdgeNodeSet>(host, &key, spec, &group.targets.node_set, uid)
}

fn health_of<Owner: Resource<DynamicType = ()>>(
    host: &str,
    key: &ObjectKey,
    spec: EdgeTargetHealthSpec,
    owner: &str,
    uid: &str,
) -> EdgeTargetHealth {
    let mut object = EdgeTargetHealth::new(&key.object_name(host), spec);
    object.metadata.labels = Some([(HOST_LABEL.to_owned(), host.to_owned())].into());
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: Owner::api_version(&()).into_owned(),
        kind: Owner::kind(&()).into_owned(),
        name: owner.to_owned(),
        uid: uid.to_owned(),
        ..OwnerReference::default()
    }]);
    object
}
