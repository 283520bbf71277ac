// SPDX-License-Identifier: Apache-2.0
//! Waiting Services that claim what others leave: a VIP that moves is served in between only if both plans are in one write. Pure.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use steerage_model::{Key, Service};
use steerage_watch::Index;

use super::turns::Turns;
use crate::local_node::LocalNode;
use crate::plan::{Desired, Frontend, ServicePlan, role_at};

/// Services that are planned before their turn, in each round. A tenant may move very many addresses at once.
const MOST: usize = 8;
/// Ports of waiting Services that are compared in each round.
const MOST_LOOKS: usize = 1 << 20;

/// The Services that wait at the beginning of a round, by what they claim.
#[derive(Debug)]
pub(super) struct Claimants<'d> {
    desired: &'d Desired,
    found: Option<Claims>,
    /// Services that may still be planned before their turn.
    left: usize,
    /// Ports that may still be compared.
    looks: usize,
}

#[derive(Debug, Default)]
struct Claims {
    addresses: HashMap<IpAddr, Vec<Key>>,
    node_ports: HashMap<u16, Vec<Key>>,
}

impl Claims {
    fn new<'a>(services: impl Iterator<Item = &'a Service>) -> Self {
        let mut claims = Self::default();
        for service in services {
            let addresses = service.cluster_ips.iter().chain(&service.external_ips).copied();
            for addr in addresses.chain(service.vips()) {
                claims.addresses.entry(addr).or_default().push(service.key.clone());
            }
            for port in service.ports.iter().filter_map(|port| port.node_port) {
                claims.node_ports.entry(port).or_default().push(service.key.clone());
            }
        }
        claims
    }

    fn at(&self, frontend: &Frontend) -> impl Iterator<Item = &Key> {
        let at_address = self.addresses.get(&frontend.addr);
        [at_address, self.node_ports.get(&frontend.port)].into_iter().flatten().flatten()
    }
}

impl<'d> Claimants<'d> {
    /// For a round before which `desired` was planned.
    pub(super) fn new(desired: &'d Desired) -> Self {
        Self { desired, found: None, left: MOST, looks: MOST_LOOKS }
    }

    /// The waiting Services that are served, of those that wait, where `service` is not any more by its new plan.
    pub(super) fn of(
        &mut self,
        service: &Key,
        plan: &ServicePlan,
        turns: &Turns,
        index: &Index,
        local_node: &LocalNode,
    ) -> Vec<Key> {
        let mut claimants = Vec::new();
        let before = self.desired.frontends(service);
        if before.is_empty() || self.left == 0 || turns.is_empty() {
            return claimants;
        }
        let kept: BTreeSet<_> = plan.frontends.iter().map(|(frontend, _)| *frontend).collect();
        for frontend in before.iter().filter(|frontend| !kept.contains(frontend)) {
            if self.left == 0 || self.looks == 0 {
                break;
            }
            let waiting = || turns.all().filter_map(|key| index.service(key));
            let claims = self.found.get_or_insert_with(|| Claims::new(waiting()));
            let looks = &mut self.looks;
            let rank = |key: &Key| {
                let service = index.service(key).filter(|_| *looks > 0 && turns.contains(key))?;
                *looks = looks.saturating_sub(1 + service.ports.len());
                Some((role_at(service, frontend, local_node)?, service.created, key.clone()))
            };
            let first = claims.at(frontend).filter_map(rank).min();
            if let Some((_, _, key)) = first.filter(|(_, _, key)| !claimants.contains(key)) {
                claimants.push(key);
                self.left -= 1;
            }
        }
        claimants
    }
}
