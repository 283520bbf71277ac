// SPDX-License-Identifier: Apache-2.0
//! The elements that a plan comes to, and the difference between two states of them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use steerage_model::Family;
use steerage_nft::{Element, Field, concat};

use super::hash::endpoint_hash;
use super::layout::{LOCAL_OFFSET, SetId};
use super::slots;
use crate::plan::{Action, Desired, Frontend, Masquerade, Touched};

/// Elements by set and key.
pub type Elements = BTreeMap<(SetId, Vec<u8>), Element>;

/// What to write so that one state becomes another. Elements whose data change are in both lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// To delete, by set.
    pub delete: BTreeMap<SetId, Vec<Element>>,
    /// To add, by set.
    pub add: BTreeMap<SetId, Vec<Element>>,
}

impl Changes {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.add.is_empty()
    }

    /// How many elements are written.
    pub fn count(&self) -> usize {
        self.delete.values().chain(self.add.values()).map(Vec::len).sum()
    }
}

/// The difference from `old` to `new`.
pub fn difference(old: &Elements, new: &Elements) -> Changes {
    let mut changes = Changes::default();
    for (id, element) in old {
        if new.get(id) != Some(element) {
            changes.delete.entry(id.0).or_default().push(element.clone());
        }
    }
    for (id, element) in new {
        if old.get(id) != Some(element) {
            changes.add.entry(id.0).or_default().push(element.clone());
        }
    }
    changes
}

/// All elements of one family for the things named in `touched`, as they are desired now.
pub fn touched_elements(desired: &Desired, touched: &Touched, family: Family) -> Elements {
    let mut elements = Elements::new();
    for frontend in touched.frontends.iter().filter(|frontend| frontend.family() == family) {
        if let Some(action) = desired.action(frontend) {
            elements_of(frontend, action, &mut elements);
        }
    }
    let of_family = |addr: &&IpAddr| Family::of(**addr) == family;
    for addr in touched.cluster_addresses.iter().filter(of_family) {
        if desired.is_cluster_address(addr) {
            insert(&mut elements, SetId::ClusterAddresses, Element::key(concat(&[(*addr).into()])));
        }
    }
    for addr in touched.hairpins.iter().filter(of_family) {
        if desired.is_hairpin(addr) {
            let key = concat(&[(*addr).into(), (*addr).into()]);
            insert(&mut elements, SetId::Hairpins, Element::key(key));
        }
    }
    elements
}

/// The elements of one frontend.
pub fn elements_of(frontend: &Frontend, action: &Action, out: &mut Elements) {
    let fields = [frontend.addr.into(), Field::Proto(frontend.protocol.number()), Field::Port(frontend.port)];
    let [a, b, c] = fields;
    let key = concat(&fields);
    let mut member = |id: SetId| insert(out, id, Element::key(key.clone()));
    member(SetId::Frontends);
    if action.reject {
        member(SetId::Rejected);
    }
    if action.local.is_some() {
        member(SetId::Split);
    }
    match action.masquerade {
        Masquerade::All => member(SetId::Masqueraded),
        Masquerade::NotPods => member(SetId::ClusterPorts),
        Masquerade::Host => {}
    }
    if let Some(seconds) = action.affinity {
        member(SetId::Affine);
        member(SetId::AffineFor(seconds));
    }
    if let Some(sources) = &action.sources {
        member(SetId::Restricted);
        for net in sources.iter() {
            let (first, last) = bounds(*net);
            let end = |addr: IpAddr| concat(&[a, b, c, addr.into()]);
            insert(out, SetId::Sources, Element::range(end(first), end(last)));
        }
    }
    let lists = [
        (0, SetId::Sticky, Some(&action.targets)),
        (LOCAL_OFFSET, SetId::StickyLocal, action.local.as_ref()),
    ];
    for (offset, sticky, targets) in lists {
        let Some(targets) = targets else { continue };
        let class = SetId::Slots(slots::class(targets.len()));
        for (slot, target) in (offset..).zip(slots::table(targets)) {
            let key = concat(&[a, b, c, Field::Number(slot)]);
            insert(out, class, Element::entry(key, end(target)));
        }
        if action.affinity.is_some() {
            for target in targets.iter() {
                let key = concat(&[Field::Number(endpoint_hash(target.ip())), a, b, c]);
                insert(out, sticky, Element::entry(key, end(*target)));
            }
        }
    }
}

fn insert(out: &mut Elements, id: SetId, element: Element) {
    out.insert((id, element.key.clone()), element);
}

fn end(target: SocketAddr) -> Vec<u8> {
    concat(&[target.ip().into(), Field::Port(target.port())])
}

/// First and last address of a network.
fn bounds(net: IpNet) -> (IpAddr, IpAddr) {
    match net {
        IpNet::V4(net) => {
            let host = !u32::from(net.netmask());
            (net.network().into(), Ipv4Addr::from(u32::from(net.network()) | host).into())
        }
        IpNet::V6(net) => {
            let host = !u128::from(net.netmask());
            (net.network().into(), Ipv6Addr::from(u128::from(net.network()) | host).into())
        }
    }
}
