// SPDX-License-Identifier: Apache-2.0
//! What the node should do, as plain values: which frontends exist, where each leads, which health-check ports answer what.
//!
//! Pure: from the model's index and this node's place in the cluster. `crate::rules` turns it into elements of kernel maps.

mod desired;
mod policy_transition;
mod service;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Protocol};

pub use desired::{Affected, Desired};
pub use policy_transition::{POLICY_GRACE_PERIOD, PolicyTransitions, has_load_balancer};
pub use service::{plan_service, serves};

/// Where clients send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frontend {
    /// The address.
    pub addr: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

impl Frontend {
    /// The family of its address.
    pub fn family(&self) -> Family {
        Family::of(self.addr)
    }
}

/// Whose source address is replaced by the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masquerade {
    /// Everybody's: external traffic under policy Cluster.
    All,
    /// That of all but this node's pods: `ClusterIP`.
    NotPods,
    /// Only this host's own: external traffic under policy Local keeps the client's address.
    Host,
}

/// What becomes of the packets to one frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// Where they lead; empty: to nowhere, they are dropped.
    pub targets: Arc<[SocketAddr]>,
    /// Under external policy Local, where those lead that come from outside this node: to this node's endpoints.
    pub local: Option<Arc<[SocketAddr]>>,
    /// There is no usable endpoint in the whole cluster: senders are told.
    pub reject: bool,
    /// Whose source address is replaced.
    pub masquerade: Masquerade,
    /// Who may use it: these networks; `None`: everybody.
    pub sources: Option<Arc<[IpNet]>>,
    /// Seconds for which a client keeps its endpoint.
    pub affinity: Option<u32>,
    /// UDP: the endpoints whose flows are left alone, in whatever list they are.
    pub serving: Arc<[SocketAddr]>,
}

/// A health-check node port and what it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthPort {
    /// The port.
    pub port: u16,
    /// Ready endpoints on this node by IPv4 and IPv6 address; `None`: the Service does not have the family.
    pub v4: Option<usize>,
    /// See `v4`.
    pub v6: Option<usize>,
}

/// All that one Service asks of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// Its frontends, each once.
    pub frontends: Vec<(Frontend, Action)>,
    /// Its cluster addresses; ports of theirs that are no frontend are rejected.
    pub cluster_addresses: Vec<IpAddr>,
    /// Its endpoints on this node, which may meet themselves.
    pub hairpins: Vec<IpAddr>,
    /// Its health-check port.
    pub health: Option<HealthPort>,
}

impl ServicePlan {
    /// Whether it has endpoints but, of its policy Local, none on this node: for what is internal, and for what is external.
    pub fn lacks_local(&self) -> [bool; 2] {
        let any = |lacks: fn(&Action) -> bool| {
            self.frontends.iter().any(|(_, action)| !action.reject && lacks(action))
        };
        [
            any(|action| action.targets.is_empty()),
            any(|action| action.local.as_ref().is_some_and(|l| l.is_empty())),
        ]
    }
}

/// A health-check port together with its Service.
pub type HealthPorts = std::collections::BTreeMap<Key, HealthPort>;

#[cfg(test)]
mod tests;
