// SPDX-License-Identifier: Apache-2.0
//! What a plan costs in elements of the kernel's sets and maps, and how it is served with fewer. Pure; the agent's planner calls it
//! with the limits of [`crate::plan::Budgets`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::layout::SHORT;
use super::source_lists::kernel_networks;
use crate::plan::{
    Action, Endpoints, FRONTEND_ELEMENTS, MOST_ENDPOINTS, Omitted, Reduced, ServicePlan, Used, sample,
    sample_serving,
};

/// Elements of a frontend whose packets are forwarded to other nodes.
const PEERS: usize = 9;
/// Elements of a frontend for each long list that it shares.
const SHARED: usize = 2;
/// Elements of a long list besides its endpoints: its digest.
const DIGEST: usize = 1;
/// The part of the limit that each list of a Service's sources may take, if there is no room for all with one endpoint of each port.
const PART: usize = 4;

/// What a plan costs, by the length of its lists.
struct Cost {
    /// Without frontends and endpoints.
    fixed: usize,
    /// Of the frontends.
    frontends: usize,
    /// Addresses of endpoints on this node. Each is in a list, or is left out with its endpoints.
    hairpins: usize,
    /// The elements of each list of sources.
    sources: BTreeMap<*const IpNet, usize>,
    lists: BTreeMap<*const SocketAddr, ListCost>,
    /// Endpoints that no packet is sent to, and whose flows stay, of each list: they are no elements, but take memory.
    others: BTreeMap<*const SocketAddr, usize>,
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
        let frontend =
            |(_, action): &(_, Action)| FRONTEND_ELEMENTS + if action.peers.is_some() { PEERS } else { 0 };
        let mut cost = Self {
            fixed: plan.cluster_addresses.len(),
            frontends: plan.frontends.iter().map(frontend).sum(),
            hairpins: plan.hairpins.len(),
            sources: BTreeMap::new(),
            lists: BTreeMap::new(),
            others: BTreeMap::new(),
        };
        let mut others_of = BTreeMap::new();
        for (_, action) in &plan.frontends {
            if let Some(networks) = &action.sources {
                cost.sources.entry(networks.as_ptr()).or_insert_with(|| source_elements(networks));
            }
            let others = others_of.entry(pointers(action)).or_insert_with(|| others(action));
            let least = cost.others.entry(action.serving.as_ptr()).or_insert(*others);
            *least = (*least).min(*others);
            for list in lists(action) {
                let of_list = cost.lists.entry(list.as_ptr()).or_default();
                of_list.length = list.len();
                of_list.users += 1;
                of_list.affine_users += usize::from(action.affinity.is_some());
            }
        }
        cost.fixed += cost.sources.values().sum::<usize>();
        cost
    }

    /// The number of elements if no list has more than `most` endpoints.
    fn elements(&self, most: usize) -> usize {
        let short = usize::try_from(SHORT).unwrap_or(usize::MAX);
        let of = |list: &ListCost| {
            let length = list.length.min(most);
            let own =
                if length > short { length + DIGEST + SHARED * list.users } else { length * list.users };
            own + length * list.affine_users
        };
        let others = self.others.values().map(|others| *others.min(&most));
        let endpoints = self.lists.values().map(|list| list.length.min(most)).sum::<usize>();
        // All endpoints on this node, while no list is cut.
        let is_whole = self.lists.values().all(|list| list.length <= most);
        let hairpins = if is_whole { self.hairpins } else { self.hairpins.min(endpoints) };
        self.fixed
            + self.frontends
            + hairpins
            + self.lists.values().map(of).sum::<usize>()
            + others.sum::<usize>()
    }

    /// The most endpoints of each list with which the plan needs at most `limit` elements.
    fn most_endpoints(&self, limit: usize) -> Option<usize> {
        let short = usize::try_from(SHORT).unwrap_or(usize::MAX);
        let others = self.others.values().copied();
        let longest = self.lists.values().map(|list| list.length).chain(others).max()?;
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
        let Omitted { endpoints, frontends, .. } = self.omitted;
        Cost::of(self).elements(usize::MAX) + endpoints + frontends * FRONTEND_ELEMENTS
    }

    /// Has the plan need at most `limit` elements: each list keeps as many endpoints as fit, other ones on each node, and one at least.
    /// If that is still too much, the last frontends are left out. Returns what was left out, if anything was: also where there is no
    /// limit, but a list was too long.
    pub fn reduce(&mut self, limit: usize, seed: u32) -> Option<Reduced> {
        let needs = self.cost();
        if needs <= limit {
            let reduced = Reduced { needs, limit, endpoints: MOST_ENDPOINTS, sources: 0, frontends: 0 };
            return self.omitted.has_full_list.then_some(reduced);
        }
        let mut cost = Cost::of(self);
        let mut endpoints = cost.most_endpoints(limit);
        let mut sources = 0;
        if endpoints.is_none() && !cost.sources.is_empty() {
            let others = cost.elements(1) - cost.sources.values().sum::<usize>();
            let room = limit.saturating_sub(others) / cost.sources.len();
            sources = self.keep_sources(room.max(limit / PART));
            cost = Cost::of(self);
            endpoints = cost.most_endpoints(limit);
        }
        self.keep_endpoints(endpoints.unwrap_or(1), seed);
        let before = self.frontends.len();
        if endpoints.is_none() {
            let has_peers = self.frontends.iter().any(|(_, action)| action.peers.is_some());
            let frontend = FRONTEND_ELEMENTS + if has_peers { PEERS } else { 0 };
            // Each with one endpoint in each of two lists, which may be on this node, remembered and not.
            self.frontends.truncate(limit.saturating_sub(cost.fixed) / (frontend + 6));
        }
        self.keep_hairpins();
        let frontends = self.omitted.frontends + before - self.frontends.len();
        Some(Reduced { needs, limit, endpoints: endpoints.unwrap_or(1), sources, frontends })
    }

    /// Only the endpoints in the lists may have to reach themselves.
    fn keep_hairpins(&mut self) {
        let mut seen = BTreeSet::new();
        let mut used = BTreeSet::new();
        for list in self.frontends.iter().flat_map(|(_, action)| lists(action)) {
            if seen.insert(list.as_ptr()) {
                used.extend(list.iter().map(SocketAddr::ip));
            }
        }
        self.hairpins.retain(|addr| used.contains(addr));
    }

    /// Clients in further networks are not admitted: the alternative is to admit everybody. Returns the number of these networks.
    fn keep_sources(&mut self, most: usize) -> usize {
        let mut left_out = 0;
        let mut kept: BTreeMap<*const IpNet, Arc<[IpNet]>> = BTreeMap::new();
        for (_, action) in &mut self.frontends {
            let Some(networks) = &mut action.sources else { continue };
            let some = kept.entry(networks.as_ptr()).or_insert_with(|| {
                let mut elements = 0;
                let mut fits = |net: &&IpNet| {
                    elements += kernel_networks(**net).count();
                    elements <= most
                };
                let some: Arc<[IpNet]> = networks.iter().take_while(|net| fits(net)).copied().collect();
                left_out += networks.len() - some.len();
                if some.len() == networks.len() { Arc::clone(networks) } else { some }
            });
            *networks = Arc::clone(some);
        }
        left_out
    }

    fn keep_endpoints(&mut self, most: usize, seed: u32) {
        let mut kept: BTreeMap<*const SocketAddr, Arc<[SocketAddr]>> = BTreeMap::new();
        let mut kept_serving: BTreeMap<[*const SocketAddr; 3], Arc<[SocketAddr]>> = BTreeMap::new();
        for (_, action) in &mut self.frontends {
            if lists(action).all(|list| list.len() <= most) && others(action) <= most {
                continue;
            }
            let old = action.clone();
            let Action { targets, local, .. } = action;
            for list in [Some(targets), local.as_mut()].into_iter().flatten().filter(|list| list.len() > most)
            {
                let some = kept.entry(list.as_ptr()).or_insert_with(|| sample(list, most, seed));
                list.list = Arc::clone(some);
            }
            if !old.serving.is_empty() {
                let some = || sample_serving(&old.serving, &used(&old), &used(action), most, seed);
                action.serving = Arc::clone(kept_serving.entry(pointers(&old)).or_insert_with(some));
            }
        }
    }
}

/// The number of endpoints that no packet is sent to, and whose flows stay.
fn others(action: &Action) -> usize {
    used(action).others(&action.serving).count()
}

/// Identifies the lists of an action, which frontends share.
fn pointers(action: &Action) -> [*const SocketAddr; 3] {
    let Used { targets, local } = used(action);
    [&*action.serving, targets, local].map(<[_]>::as_ptr)
}

fn used(action: &Action) -> Used<'_> {
    Used { targets: &action.targets, local: action.local.as_deref().unwrap_or_default() }
}

fn source_elements(networks: &[IpNet]) -> usize {
    networks.iter().map(|net| kernel_networks(*net).count()).sum()
}

fn lists(action: &Action) -> impl Iterator<Item = &Endpoints> {
    [Some(&action.targets), action.local.as_ref()].into_iter().flatten()
}

#[cfg(test)]
mod tests;
