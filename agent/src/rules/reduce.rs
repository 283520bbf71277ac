// SPDX-License-Identifier: Apache-2.0
//! What a plan costs in elements of the kernel's sets and maps, and how it is served with fewer. Pure; the agent's planner calls it
//! with the limits of [`crate::plan::Budgets`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::hash::endpoint_hash;
use super::layout::{LONGEST, SHORT};
use super::source_lists::kernel_networks;
use crate::plan::{Action, Endpoints, Reduced, ServicePlan};

/// Elements of a frontend besides its endpoints, at most: it is in so many sets.
const FRONTEND: usize = 8;
/// Elements of a frontend whose packets are forwarded to other nodes.
const PEERS: usize = 9;
/// Elements of a frontend for each long list that it shares.
const SHARED: usize = 2;
/// Elements of a long list besides its endpoints: its digest.
const DIGEST: usize = 1;
/// The part of the limit that a Service's endpoints on this node, and each list of its sources, may take.
const PART: usize = 4;

/// What a plan costs, by the length of its lists.
struct Cost {
    /// Without frontends and endpoints.
    fixed: usize,
    /// Of the frontends.
    frontends: usize,
    lists: BTreeMap<*const SocketAddr, ListCost>,
}

#[derive(Default)]
struct ListCost {
    length: usize,
    /// Frontends that lead to it.
    users: usize,
    /// Those with affinity.
    affine_users: usize,
}

impl Cost {
    fn of(plan: &ServicePlan) -> Self {
        let frontend = |(_, action): &(_, Action)| FRONTEND + if action.peers.is_some() { PEERS } else { 0 };
        let mut cost = Self {
            fixed: plan.cluster_addresses.len() + plan.hairpins.len(),
            frontends: plan.frontends.iter().map(frontend).sum(),
            lists: BTreeMap::new(),
        };
        let mut sources = BTreeMap::new();
        for (_, action) in &plan.frontends {
            sources
                .extend(action.sources.iter().map(|networks| (networks.as_ptr(), source_elements(networks))));
            for list in lists(action) {
                let of_list = cost.lists.entry(list.as_ptr()).or_default();
                of_list.length = list.len();
                of_list.users += 1;
                of_list.affine_users += usize::from(action.affinity.is_some());
            }
        }
        cost.fixed += sources.values().sum::<usize>();
        cost
    }

    /// The number of elements if no list has more than `most` endpoints.
    fn elements(&self, most: usize) -> usize {
        let most = most.min(longest());
        let short = usize::try_from(SHORT).unwrap_or(usize::MAX);
        let of = |list: &ListCost| {
            let length = list.length.min(most);
            let own =
                if length > short { length + DIGEST + SHARED * list.users } else { length * list.users };
            own + length * list.affine_users
        };
        self.fixed + self.frontends + self.lists.values().map(of).sum::<usize>()
    }

    fn longest(&self) -> Option<usize> {
        self.lists.values().map(|list| list.length).max()
    }

    /// The most endpoints of each list with which the plan needs at most `limit` elements.
    fn most_endpoints(&self, limit: usize) -> Option<usize> {
        let short = usize::try_from(SHORT).unwrap_or(usize::MAX);
        let longest = self.longest()?.min(longest());
        // More endpoints cost more in each of two ranges: those of long lists, and those of short ones.
        [(short + 1, longest), (1, short.min(longest))].into_iter().find_map(|(first, last)| {
            let counts: Vec<usize> = (first..=last).collect();
            let fitting = counts.partition_point(|most| self.elements(*most) <= limit);
            fitting.checked_sub(1).and_then(|at| counts.get(at)).copied()
        })
    }
}

impl ServicePlan {
    /// The number of elements that the plan needs, or a few more.
    pub fn cost(&self) -> usize {
        Cost::of(self).elements(usize::MAX)
    }

    /// Has the plan need at most `limit` elements, and lists that are not too long: each list keeps as many endpoints as fit, other ones on
    /// each node, and one at least. If that is still too much, the last frontends are left out. Returns what was left out, if anything was.
    pub fn reduce(&mut self, limit: usize, seed: u32) -> Option<Reduced> {
        let cost = Cost::of(self);
        let needs = cost.elements(usize::MAX);
        if needs <= limit {
            cost.longest().filter(|endpoints| *endpoints > longest())?;
            self.keep_endpoints(longest(), seed);
            return Some(Reduced { needs, limit, endpoints: longest(), frontends: 0 });
        }
        // Further endpoints on this node cannot reach themselves.
        self.hairpins.truncate(limit / PART);
        self.keep_sources(limit / PART);
        let cost = Cost::of(self);
        let endpoints = cost.most_endpoints(limit);
        self.keep_endpoints(endpoints.unwrap_or(1), seed);
        let before = self.frontends.len();
        if endpoints.is_none() {
            let peers =
                if self.frontends.iter().any(|(_, action)| action.peers.is_some()) { PEERS } else { 0 };
            // Each with one endpoint in each of two lists, remembered and not.
            self.frontends.truncate(limit.saturating_sub(cost.fixed) / (FRONTEND + peers + 4));
        }
        let frontends = before - self.frontends.len();
        Some(Reduced { needs, limit, endpoints: endpoints.unwrap_or(1), frontends })
    }

    /// Clients in further networks are not admitted: the alternative is to admit everybody.
    fn keep_sources(&mut self, most: usize) {
        let mut kept: BTreeMap<*const IpNet, Arc<[IpNet]>> = BTreeMap::new();
        for (_, action) in &mut self.frontends {
            if let Some(networks) =
                action.sources.as_mut().filter(|networks| source_elements(networks) > most)
            {
                let mut elements = 0;
                let mut fits = |net: &&IpNet| {
                    elements += kernel_networks(**net).count();
                    elements <= most
                };
                let first = || networks.iter().take_while(|net| fits(net)).copied().collect();
                *networks = Arc::clone(kept.entry(networks.as_ptr()).or_insert_with(first));
            }
        }
    }

    fn keep_endpoints(&mut self, most: usize, seed: u32) {
        let mut kept: BTreeMap<*const SocketAddr, Arc<[SocketAddr]>> = BTreeMap::new();
        for (_, action) in &mut self.frontends {
            let Action { targets, local, .. } = action;
            for list in [Some(targets), local.as_mut()].into_iter().flatten().filter(|list| list.len() > most)
            {
                let some = kept.entry(list.as_ptr()).or_insert_with(|| sample(list, most, seed));
                list.list = Arc::clone(some);
            }
        }
    }
}

/// The endpoints of the longest list.
fn longest() -> usize {
    usize::try_from(LONGEST).unwrap_or(usize::MAX)
}

fn source_elements(networks: &[IpNet]) -> usize {
    networks.iter().map(|net| kernel_networks(*net).count()).sum()
}

fn lists(action: &Action) -> impl Iterator<Item = &Endpoints> {
    [Some(&action.targets), action.local.as_ref()].into_iter().flatten()
}

/// Some endpoints, in their order: mostly the same ones when others come and go, and other ones on a node with another seed.
fn sample(endpoints: &[SocketAddr], most: usize, seed: u32) -> Arc<[SocketAddr]> {
    let rank = |endpoint: &SocketAddr| (endpoint_hash(*endpoint) ^ seed).wrapping_mul(0x9e37_79b1);
    let mut ranked: Vec<_> = endpoints.iter().map(|endpoint| (rank(endpoint), *endpoint)).collect();
    ranked.sort_unstable();
    let kept: BTreeSet<_> = ranked.into_iter().take(most).map(|(_, endpoint)| endpoint).collect();
    endpoints.iter().filter(|endpoint| kept.contains(endpoint)).copied().collect()
}

#[cfg(test)]
mod tests;
