// SPDX-License-Identifier: Apache-2.0
//! Waiting Services that were assigned what others leave, or take as an external IP: a VIP that moves is served in between only if both
//! plans are in one write. Where the new owner has to wait all the same, nobody's external IP is served in its place. Pure.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;

use steerage_model::{Key, Service};

use crate::local_node::LocalNode;
use crate::plan::{Action, Desired, Frontend, Role, ServicePlan, assigned};

/// Services that are planned before their turn, in each round: others wait for that.
const MOST: usize = 8;
/// Of one namespace.
const MOST_OF_NAMESPACE: usize = 2;

/// The frontends that waiting Services may have been assigned.
#[derive(Debug, Default)]
pub(super) struct Contested(BTreeSet<Frontend>);

impl Contested {
    /// Adds those where this plan ends what is served, or begins to serve an external IP.
    pub(super) fn note(&mut self, service: &Key, plan: &ServicePlan, desired: &Desired) {
        let before: HashSet<_> = desired.frontends(service).iter().copied().collect();
        let after: HashSet<_> = plan.frontends.iter().map(|(frontend, _)| *frontend).collect();
        let is_served = |at: &Frontend| desired.served_at(at).is_some_and(|(owner, _)| owner == service);
        self.0.extend(before.difference(&after).filter(|at| is_served(at)));
        let is_new =
            |(at, action): &&(Frontend, Action)| action.role == Role::ExternalIp && !before.contains(at);
        self.0.extend(plan.frontends.iter().filter(is_new).map(|(at, _)| *at));
    }

    /// Takes those of them that were assigned to these Services, by Service.
    pub(super) fn take<'s>(
        &mut self,
        waiting: impl Iterator<Item = &'s Service>,
        local_node: &LocalNode,
    ) -> BTreeMap<Key, Vec<Frontend>> {
        let contested = std::mem::take(&mut self.0);
        let addresses: HashSet<IpAddr> = contested.iter().map(|frontend| frontend.addr).collect();
        if addresses.is_empty() {
            return BTreeMap::new();
        }
        let claims = waiting.filter_map(|service| {
            let mut at = assigned(service, local_node, |addr| addresses.contains(addr));
            at.retain(|frontend| contested.contains(frontend));
            (!at.is_empty()).then(|| (service.key.clone(), at))
        });
        claims.collect()
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// How many Services were planned before their turn in a round.
#[derive(Debug, Default)]
pub(super) struct Jumps {
    namespaces: BTreeMap<String, usize>,
    all: usize,
}

impl Jumps {
    /// Whether one more may be, which counts then.
    pub(super) fn take(&mut self, service: &Key) -> bool {
        let of_namespace = self.namespaces.entry(service.namespace().to_owned()).or_default();
        let may = self.all < MOST && *of_namespace < MOST_OF_NAMESPACE;
        self.all += usize::from(may);
        *of_namespace += usize::from(may);
        may
    }
}
