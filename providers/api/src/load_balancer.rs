// SPDX-License-Identifier: Apache-2.0
//! The planned load balancer.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Protocol};

use crate::{GroupKey, GroupTargets, TargetGroup, TargetSet, Targets};

/// The owner of a load balancer. The UID distinguishes a Service from one created again under the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The Service.
    pub service: Key,
    /// Its UID.
    pub uid: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.service, self.uid)
    }
}

/// One port that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Listener {
    /// The Service port's name; empty if it has none.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// The target group to which it forwards, one of the load balancer's.
    pub group: GroupKey,
}

/// A load balancer as it should be: its structure, and the targets of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// The Service.
    pub owner: Owner,
    /// The IP families, in the Service's order.
    pub families: Vec<Family>,
    /// The listeners, in the Service's order.
    pub listeners: Vec<Listener>,
    /// The target groups to which listeners forward, each with its own key.
    pub groups: Vec<TargetGroup>,
    /// The addresses that the user requested; if empty, the provider chooses.
    pub requested_addresses: Vec<IpAddr>,
    /// The address pool that the user requested.
    pub pool: Option<String>,
    /// The addresses in the Service's status, which the provider keeps if possible.
    pub published: Vec<IpAddr>,
    /// The host names in the Service's status. Another controller may have written them, or a user: they prove nothing.
    pub published_hostnames: Vec<String>,
    /// Source addresses that are admitted; empty admits all.
    pub source_ranges: Vec<IpNet>,
    /// The Service's labels, if addresses come from pools.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The Service's annotations; each provider reads its own.
    pub annotations: BTreeMap<String, String>,
}

impl LoadBalancer {
    /// Whether both request the same structure: all but the targets. The published addresses are a result, not a request.
    pub fn has_structure_of(&self, other: &Self) -> bool {
        let Self {
            owner,
            families,
            listeners,
            groups,
            requested_addresses,
            pool,
            published: _,
            published_hostnames: _,
            source_ranges,
            labels,
            annotations,
        } = self;
        *owner == other.owner
            && *families == other.families
            && *listeners == other.listeners
            && groups.len() == other.groups.len()
            && groups.iter().zip(&other.groups).all(|(own, other)| own.has_structure_of(other))
            && *requested_addresses == other.requested_addresses
            && *pool == other.pool
            && *source_ranges == other.source_ranges
            && *labels == other.labels
            && *annotations == other.annotations
    }

    /// The target group of this key.
    pub fn group(&self, key: &GroupKey) -> Option<&TargetGroup> {
        self.groups.iter().find(|group| group.key == *key)
    }

    /// The same load balancer with other targets. A group that `targets` lacks has none.
    #[must_use]
    pub fn with_targets(mut self, targets: &GroupTargets) -> Self {
        for group in &mut self.groups {
            group.targets = match &group.key {
                GroupKey::Vip | GroupKey::NodePort(_) => {
                    Targets::Nodes(targets.nodes.clone().unwrap_or_default())
                }
                GroupKey::Pods(port) => Targets::Pods(targets.pods.get(port).cloned().unwrap_or_default()),
            };
        }
        self
    }

    /// The same load balancer with these nodes in every group of nodes.
    #[must_use]
    pub fn with_nodes(self, nodes: TargetSet) -> Self {
        self.with_targets(&GroupTargets::of_nodes(nodes))
    }

    /// The nodes that are targets; none if pods are.
    pub fn nodes(&self) -> TargetSet {
        self.targets().nodes.unwrap_or_default()
    }

    /// The targets of all groups.
    pub fn targets(&self) -> GroupTargets {
        let mut all = GroupTargets::default();
        for group in &self.groups {
            match (&group.key, &group.targets) {
                (_, Targets::Nodes(nodes)) => all.nodes = Some(nodes.clone()),
                (GroupKey::Pods(port), Targets::Pods(pods)) => {
                    all.pods.insert(port.clone(), pods.clone());
                }
                (GroupKey::Vip | GroupKey::NodePort(_), Targets::Pods(_)) => {}
            }
        }
        all
    }
}
