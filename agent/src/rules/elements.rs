// SPDX-License-Identifier: Apache-2.0
//! The elements of sets and maps for desired frontends, and the difference between two sets of elements. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use steerage_model::{Family, Key};
use steerage_nft::{Field, Rows};

use super::layout::{LOCAL_OFFSET, SetId, Side, long_class};
use super::long_lists::{LongList, LongLists};
use super::namespaces::Namespaces;
use super::source_lists::{Networks, SourceLists, kernel_networks};
use crate::hash::endpoint_hash;
use crate::plan::{Action, Affected, Desired, Frontend, Masquerade, Role};

/// Elements of one family, by set, each set in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elements {
    family: Family,
    sets: BTreeMap<SetId, Rows>,
}

impl Elements {
    /// No elements.
    pub fn new(family: Family) -> Self {
        Self { family, sets: BTreeMap::new() }
    }

    /// Their address family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Adds the elements of one set as the kernel lists them.
    pub fn listed(&mut self, id: SetId, rows: Rows) {
        if !rows.is_empty() {
            self.sets.insert(id, rows);
        }
    }

    /// The elements of a set, if it has any.
    pub fn of_set(&self, id: SetId) -> Option<&Rows> {
        self.sets.get(&id)
    }

    /// Set by set.
    pub fn sets(&self) -> impl Iterator<Item = (&SetId, &Rows)> {
        self.sets.iter()
    }

    /// Those of these sets.
    #[must_use]
    pub fn only(mut self, ids: &[SetId]) -> Self {
        self.sets.retain(|id, _| ids.contains(id));
        self
    }

    /// Without the elements for whose set and key this says so.
    #[must_use]
    pub(super) fn without(&self, is_left_out: impl Fn(SetId, &[u8]) -> bool) -> Self {
        let mut others = Self::new(self.family);
        for (id, rows) in &self.sets {
            let mut kept = Rows::new(rows.shape());
            rows.iter().filter(|row| !is_left_out(*id, row.key)).for_each(|row| kept.push_row(row));
            others.listed(*id, kept);
        }
        others
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.sets.values().map(Rows::len).sum()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    fn of(&mut self, id: SetId) -> &mut Rows {
        self.sets.entry(id).or_insert_with(|| Rows::new(id.row_shape(self.family)))
    }

    fn sorted(mut self) -> Self {
        self.sets.values_mut().for_each(Rows::sort);
        self
    }
}

/// Elements to delete and to add. One whose data changes is in both lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// To delete, by set.
    pub delete: BTreeMap<SetId, Rows>,
    /// To add, by set.
    pub add: BTreeMap<SetId, Rows>,
}

impl Changes {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.add.is_empty()
    }

    /// Whether a frontend with affinity loses an endpoint, as far as can be told.
    pub fn removes_endpoints_with_affinity(&self) -> bool {
        Side::ALL.into_iter().any(|side| self.delete.contains_key(&SetId::Sticky(side)))
    }

    /// The number of elements to write.
    pub fn count(&self) -> usize {
        self.delete.values().chain(self.add.values()).map(Rows::len).sum()
    }
}

/// What several frontends share.
#[derive(Debug, Clone, Default)]
pub(super) struct Lists {
    pub(super) endpoints: LongLists,
    pub(super) sources: SourceLists,
    pub(super) namespaces: Namespaces,
}

/// What frontends share, with the numbers of lists of sources that were asked for: thousands of ports have one list of thousands of
/// networks, which is found by comparing them.
struct SharedLists<'l> {
    lists: &'l Lists,
    numbers: HashMap<*const IpNet, Option<u32>>,
}

impl<'l> SharedLists<'l> {
    fn new(lists: &'l Lists) -> Self {
        Self { lists, numbers: HashMap::new() }
    }

    fn number_of_sources(&mut self, networks: &Networks) -> Option<u32> {
        let find = || self.lists.sources.number(networks);
        *self.numbers.entry(networks.as_ptr()).or_insert_with(find)
    }
}

/// The difference from `old` to `new`, which are of one family.
pub fn difference(old: &Elements, new: &Elements) -> Changes {
    let mut changes = Changes::default();
    let ids: BTreeSet<SetId> = old.sets.keys().chain(new.sets.keys()).copied().collect();
    for id in ids {
        let none = Rows::new(id.row_shape(old.family));
        let (old, new) = (old.sets.get(&id).unwrap_or(&none), new.sets.get(&id).unwrap_or(&none));
        let (delete, add) = old.difference(new);
        for (changes, rows) in [(&mut changes.delete, delete), (&mut changes.add, add)] {
            if !rows.is_empty() {
                changes.insert(id, rows);
            }
        }
    }
    changes
}

/// All elements of one family for the things named in `affected`, as they are desired now.
pub(super) fn affected_elements(
    desired: &Desired,
    lists: &Lists,
    affected: &Affected,
    networks: &BTreeSet<Networks>,
    family: Family,
) -> Elements {
    let (mut elements, mut shared) = (Elements::new(family), SharedLists::new(lists));
    for frontend in affected.frontends.iter().filter(|frontend| frontend.family() == family) {
        if let Some((service, action)) = desired.served_at(frontend) {
            elements_of(frontend, service, action, &mut shared, &mut elements);
        }
    }
    for list in affected.services.iter().flat_map(|service| lists.endpoints.of(service, family)) {
        elements_of_list(list, &mut elements);
    }
    for networks in networks {
        if let Some(number) = lists.sources.number(networks) {
            elements_of_sources(number, networks, &mut elements);
        }
    }
    elements_of_namespaces(lists.namespaces.shares_of(affected.services.iter()), &mut elements);
    let addresses = affected.cluster_addresses.iter().filter(|addr| desired.is_cluster_address(addr));
    let hairpins = affected.hairpins.iter().filter(|addr| desired.is_hairpin(addr));
    shared_elements(addresses.copied(), hairpins.copied(), &mut elements);
    elements.sorted()
}

/// All elements of one family.
pub(super) fn all_elements(desired: &Desired, lists: &Lists, family: Family) -> Elements {
    let (mut elements, mut shared) = (Elements::new(family), SharedLists::new(lists));
    let actions = desired.actions().filter(|(frontend, _)| frontend.family() == family);
    for (frontend, (service, action)) in actions {
        elements_of(frontend, service, action, &mut shared, &mut elements);
    }
    for list in lists.endpoints.all(family) {
        elements_of_list(list, &mut elements);
    }
    for (number, networks) in lists.sources.all() {
        elements_of_sources(number, networks, &mut elements);
    }
    elements_of_namespaces(lists.namespaces.shares(), &mut elements);
    shared_elements(desired.cluster_addresses(), desired.hairpins(), &mut elements);
    elements.sorted()
}

fn shared_elements(
    addresses: impl Iterator<Item = IpAddr>,
    hairpins: impl Iterator<Item = IpAddr>,
    out: &mut Elements,
) {
    let family = out.family;
    let of_family = |addr: &IpAddr| Family::of(*addr) == family;
    for addr in addresses.filter(of_family) {
        out.of(SetId::ClusterAddresses).push_key(&[addr.into()]);
    }
    for addr in hairpins.filter(of_family) {
        out.of(SetId::Hairpins).push_key(&[addr.into(), addr.into()]);
    }
}

/// The elements of namespaces whose Services have affinity.
fn elements_of_namespaces(namespaces: BTreeSet<(u32, u32)>, out: &mut Elements) {
    for (number, shares) in namespaces {
        out.of(SetId::Shares(shares)).push_key(&[Field::Number(number)]);
    }
}

/// The endpoints of long lists.
pub(super) fn endpoint_rows<'a>(lists: impl Iterator<Item = &'a LongList>, family: Family) -> Rows {
    let mut elements = Elements::new(family);
    for list in lists {
        elements_of_list(list, &mut elements);
    }
    let endpoints = elements.sorted().sets.remove(&SetId::Endpoints);
    endpoints.unwrap_or_else(|| Rows::new(SetId::Endpoints.row_shape(family)))
}

/// The elements of a long list, in order, and its digest.
fn elements_of_list(list: &LongList, out: &mut Elements) {
    let endpoints = out.of(SetId::Endpoints);
    for (slot, target) in (0..).zip(&list.slots) {
        endpoints.push_entry(&[Field::Number(list.number), Field::Number(slot)], &end(*target));
    }
    out.of(SetId::Digests).push_entry(&[Field::Number(list.number)], &list.digest.fields());
}

/// The elements of a list of sources, if it is of the family of `out`.
fn elements_of_sources(number: u32, networks: &[IpNet], out: &mut Elements) {
    let family = out.family;
    let of_family = networks.iter().filter(|net| Family::of(net.addr()) == family);
    for net in of_family.copied().flat_map(kernel_networks) {
        out.of(SetId::Sources(net.prefix_len())).push_key(&[Field::Number(number), net.network().into()]);
    }
}

/// The elements of one frontend of a Service, unordered.
fn elements_of(
    frontend: &Frontend,
    service: &Key,
    action: &Action,
    shared: &mut SharedLists<'_>,
    out: &mut Elements,
) {
    let key = [frontend.addr.into(), Field::Proto(frontend.protocol.number()), Field::Port(frontend.port)];
    let [a, b, c] = key;
    let mut member = |id: SetId| out.of(id).push_key(&key);
    // Frontends of cluster addresses are found by their addresses.
    let on_cluster_address = action.role == Role::ClusterIp;
    if !on_cluster_address {
        member(SetId::ExternalFrontends);
    }
    if on_cluster_address && action.targets.is_empty() && !action.reject {
        member(SetId::DroppedClusterFrontends);
    }
    if action.reject {
        member(SetId::Rejected);
    }
    if action.local.is_some() {
        member(SetId::Split);
    }
    match action.masquerade {
        Masquerade::All => member(SetId::Masqueraded),
        // Matched by address.
        Masquerade::AllButLocalPods | Masquerade::HostOnly => {}
    }
    if let Some(seconds) = action.affinity {
        member(SetId::Affine);
        member(SetId::AffineFor(seconds));
        if let Some(number) = shared.lists.namespaces.number(service.namespace()) {
            out.of(SetId::Namespaces).push_entry(&key, &[Field::Number(number)]);
        }
    }
    if let Some(number) = action.sources.as_ref().and_then(|networks| shared.number_of_sources(networks)) {
        out.of(SetId::Restricted).push_entry(&key, &[Field::Number(number)]);
    }
    if let Some(peers) = &action.peers {
        out.of(SetId::WithoutLocal).push_key(&key);
        let slots = out.of(SetId::Peers);
        for (slot, peer) in (0..).zip(peers.iter()) {
            slots.push_entry(&[a, b, c, Field::Number(slot)], &[(*peer).into()]);
        }
    }
    let sides =
        [(Side::Cluster, 0, Some(&action.targets)), (Side::Local, LOCAL_OFFSET, action.local.as_ref())];
    for (side, offset, targets) in sides {
        let Some(targets) = targets.filter(|targets| !targets.is_empty()) else { continue };
        if let Some(list) = shared.lists.endpoints.get(service, frontend, action, targets) {
            out.of(SetId::Lists(side)).push_entry(&key, &[Field::Number(list.number)]);
            out.of(SetId::Long(side, long_class(list.slots.len()))).push_key(&key);
        } else {
            let count = u32::try_from(targets.len()).unwrap_or(u32::MAX);
            let slots = out.of(SetId::Slots(count));
            for (slot, target) in (offset..).zip(targets.iter()) {
                slots.push_entry(&[a, b, c, Field::Number(slot)], &end(*target));
            }
        }
        if action.affinity.is_some() {
            for target in targets.iter() {
                let hash = Field::Number(endpoint_hash(*target));
                out.of(SetId::Sticky(side)).push_entry(&[hash, a, b, c], &end(*target));
            }
        }
    }
}

fn end(target: SocketAddr) -> [Field; 2] {
    [target.ip().into(), Field::Port(target.port())]
}
