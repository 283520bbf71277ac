// SPDX-License-Identifier: Apache-2.0
//! What the kernel should hold: the frontends of all Services and the configuration of the chains. Pure. The agent's loop owns
//! it; `crate::kernel` writes it; `explain` and `dump` read it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Protocol};
use steerage_nft::Rows;

use super::elements::{Lists, affected_elements, all_elements, endpoint_rows};
use super::list_digests::ListDigest;
use super::long_lists::KernelLists;
use super::source_lists::Networks;
use super::{Changes, Elements, Features, RulesetConfig, StaleFlows, difference};
use crate::local_node::LocalPods;
use crate::plan::{
    Action, Affected, Desired, Frontend, ReducedService, RefusedExternalIp, ServicePlan, Shadowed,
};

/// What is known of the kernel's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelState {
    /// They hold what was written last.
    InSync,
    /// Nothing was written yet, a write failed, another program wrote, or the configuration changed.
    Unknown,
}

/// What to write after an update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// These elements, of IPv4 and of IPv6; the chains stay.
    Elements([Changes; 2]),
    /// Everything has to be compared with the kernel.
    Full,
}

impl Difference {
    /// The changes of one family, where they are known.
    pub fn of(&self, family: Family) -> Option<&Changes> {
        match (self, family) {
            (Self::Elements([v4, _]), Family::V4) => Some(v4),
            (Self::Elements([_, v6]), Family::V6) => Some(v6),
            (Self::Full, _) => None,
        }
    }
}

/// The wanted content of the tables of both families.
#[derive(Debug, Clone, Default)]
pub struct Ruleset {
    desired: Desired,
    lists: Lists,
    config: RulesetConfig,
    /// UDP frontends whose action changed since [`Ruleset::take_stale_flows`].
    changed_udp: BTreeSet<Frontend>,
    /// Frontends of TCP and SCTP that nobody was served at before: a handshake may have gone on untranslated, to an address that nobody
    /// has, and each packet that repeats it would go there, too.
    new_frontends: BTreeSet<Frontend>,
}

impl Ruleset {
    /// What the node should do.
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// What the chains depend on.
    pub fn config(&self) -> &RulesetConfig {
        &self.config
    }

    /// Sets how local pods are recognised. Returns whether that changed: then everything has to be compared.
    pub fn set_pods(&mut self, pods: &LocalPods) -> bool {
        let changed = self.config.pods != *pods;
        if changed {
            self.config.pods = pods.clone();
        }
        changed
    }

    /// Sets the seed of the hashes of flows, before the first write.
    pub fn set_seed(&mut self, seed: u32) {
        self.config.seed = seed;
    }

    /// Sets what the kernel has, before the first write.
    pub fn set_features(&mut self, features: Features) {
        self.config.features = features;
    }

    /// Has forwarded packets dropped that connection tracking cannot place, from the first write on.
    pub fn set_drop_invalid(&mut self, drop_invalid: bool) {
        self.config.drop_invalid = drop_invalid;
    }

    /// Has packets that find no local endpoint forwarded to other nodes, from the first write on.
    pub fn set_forward_to_peers(&mut self, forward_to_peers: bool) {
        self.config.forward_to_peers = forward_to_peers;
    }

    /// Sets the networks in which only frontends may be reached. Returns whether they changed: then everything has to be
    /// compared.
    pub fn set_unassigned(&mut self, networks: Vec<IpNet>) -> bool {
        let changed = self.config.unassigned != networks;
        self.config.unassigned = networks;
        changed
    }

    /// Takes in plans before the first write: no difference is computed.
    pub fn stage(&mut self, updates: BTreeMap<Key, ServicePlan>) {
        let udp: Vec<_> = self.desired.frontends_of(&updates).filter(is_udp).collect();
        self.update_lists(&updates);
        self.desired.update(updates);
        // Flows to a frontend that is merely reserved are those of another service proxy.
        self.changed_udp.extend(udp.into_iter().filter(|at| self.desired.action(at).is_some()));
    }

    /// Takes over the order of endpoints that the kernel's long lists have: then the first write need not change it.
    pub fn adopt(&mut self, family: Family, lists: &KernelLists) {
        self.lists.endpoints.adopt(family, lists);
    }

    /// What the long lists of a family hold, by their numbers.
    pub fn list_digests(&self, family: Family) -> BTreeMap<u32, ListDigest> {
        self.lists.endpoints.all(family).map(|list| (list.number, list.digest)).collect()
    }

    /// The numbers of the long lists of some Services.
    pub fn lists_of<'a>(&self, services: impl IntoIterator<Item = &'a Key>, family: Family) -> BTreeSet<u32> {
        let lists = services.into_iter().flat_map(|service| self.lists.endpoints.of(service, family));
        lists.map(|list| list.number).collect()
    }

    /// The long lists of some Services by number, with the number of slots that packets look at.
    pub fn list_sizes<'a>(
        &self,
        services: impl IntoIterator<Item = &'a Key>,
        family: Family,
    ) -> impl Iterator<Item = (u32, u32)> {
        let lists = services.into_iter().flat_map(move |service| self.lists.endpoints.of(service, family));
        lists.map(|list| (list.number, list.digest.slots()))
    }

    /// The numbers of the long lists whose endpoints these plans change.
    pub fn lists_changed_by(&self, updates: &BTreeMap<Key, ServicePlan>, family: Family) -> BTreeSet<u32> {
        self.lists.endpoints.changed_by(updates, family)
    }

    /// The endpoints of some long lists, as elements of [`SetId::Endpoints`](super::SetId::Endpoints).
    pub fn endpoints_of(&self, family: Family, lists: &BTreeSet<u32>) -> Rows {
        let wanted = self.lists.endpoints.all(family).filter(|list| lists.contains(&list.number));
        endpoint_rows(wanted, family)
    }

    /// All elements of a family.
    pub fn all_elements(&self, family: Family) -> Elements {
        all_elements(&self.desired, &self.lists, family)
    }

    /// Replaces the plans of some Services, and says what to write. No difference is computed while the kernel's state is
    /// unknown.
    #[must_use]
    pub fn update(&mut self, updates: BTreeMap<Key, ServicePlan>, kernel: KernelState) -> Difference {
        let affected = (kernel == KernelState::InSync)
            .then(|| (self.desired.affected_by(&updates), self.lists.sources.affected_by(&updates)));
        let old = affected.as_ref().map(|affected| self.elements(affected));
        let old_udp: BTreeMap<_, _> = self
            .desired
            .frontends_of(&updates)
            .filter(is_udp)
            .map(|frontend| (frontend, self.desired.action(&frontend).cloned()))
            .collect();
        let is_new = |at: &Frontend| !is_udp(at) && self.desired.action(at).is_none();
        let new: Vec<_> = self.desired.frontends_of(&updates).filter(is_new).collect();
        self.new_frontends.extend(new);
        self.update_lists(&updates);
        self.desired.update(updates);
        let changed = |(frontend, old): (Frontend, Option<Action>)| {
            (self.desired.action(&frontend) != old.as_ref()).then_some(frontend)
        };
        self.changed_udp.extend(old_udp.into_iter().filter_map(changed));

        let (Some(affected), Some([old_v4, old_v6])) = (affected, old) else { return Difference::Full };
        let [new_v4, new_v6] = self.elements(&affected);
        Difference::Elements([difference(&old_v4, &new_v4), difference(&old_v6, &new_v6)])
    }

    /// Notes frontends whose elements a write deleted, with or without a plan.
    pub fn note_deleted(&mut self, frontends: BTreeSet<Frontend>) {
        self.changed_udp.extend(frontends.into_iter().filter(is_udp));
    }

    /// The UDP frontends that changed since the last call, each with the endpoints whose flows may stay, and the others that are new. Call
    /// it once the change is in the kernel.
    pub fn take_stale_flows(&mut self) -> StaleFlows {
        let serving = |frontend: Frontend| {
            let action = self.desired.action(&frontend);
            (frontend, action.map(|action| Arc::clone(&action.serving)).unwrap_or_default())
        };
        let udp = std::mem::take(&mut self.changed_udp).into_iter().map(serving).collect();
        let mut handshakes = std::mem::take(&mut self.new_frontends);
        handshakes.retain(|at| self.desired.action(at).is_some_and(|action| !action.reject));
        StaleFlows { udp, handshakes, sources: BTreeMap::new() }
    }

    /// The same after a write that compared everything: the rules may have been missing, and any connection may have passed.
    pub fn take_all_stale_flows(&mut self) -> StaleFlows {
        let mut stale = self.take_stale_flows();
        for (frontend, (_, action)) in self.desired.actions() {
            if is_udp(frontend) {
                stale.udp.insert(*frontend, Arc::clone(&action.serving));
            } else if !action.reject {
                stale.handshakes.insert(*frontend);
            }
        }
        stale
    }

    /// The frontends with source ranges.
    pub fn source_ranges(&self) -> BTreeMap<Frontend, Arc<[IpNet]>> {
        let of = |(frontend, sources): (&Frontend, &Arc<[IpNet]>)| (*frontend, Arc::clone(sources));
        let actions = self.desired.actions();
        actions.filter_map(|(at, (_, action))| Some((at, action.sources.as_ref()?))).map(of).collect()
    }

    /// The Services that lost a frontend to another one since the last call.
    pub fn take_shadowed(&mut self) -> BTreeSet<Shadowed> {
        self.desired.take_shadowed()
    }

    /// The Services that were reduced since the last call.
    pub fn take_reduced(&mut self) -> BTreeSet<ReducedService> {
        self.desired.take_reduced()
    }

    /// The external IPs that were refused since the last call.
    pub fn take_refused(&mut self) -> BTreeSet<RefusedExternalIp> {
        self.desired.take_refused()
    }

    fn update_lists(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        self.lists.endpoints.update(updates);
        self.lists.sources.update(updates);
        self.lists.namespaces.update(updates);
        self.config.used.add(updates);
    }

    fn elements(&self, (affected, networks): &(Affected, BTreeSet<Networks>)) -> [Elements; 2] {
        [Family::V4, Family::V6]
            .map(|family| affected_elements(&self.desired, &self.lists, affected, networks, family))
    }
}

fn is_udp(frontend: &Frontend) -> bool {
    frontend.protocol == Protocol::Udp
}
