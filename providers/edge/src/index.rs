// SPDX-License-Identifier: Apache-2.0
//! What the objects in a cache refer to, so that no call looks at all of them. Pure; the cache keeps it current.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_model::Key;
use steerage_provider_api::Owner;

use crate::AddressSet;
use crate::entry::Entry;
use crate::sharing::Sharing;

/// The references of an object besides its owner.
pub(crate) trait References: Eq + Sized {
    /// The addresses that it has, also if this version cannot fully read it.
    fn addresses(_: &Entry<Self>) -> Vec<IpAddr> {
        Vec::new()
    }

    /// How it shares its addresses, also if this version cannot fully read it.
    fn sharing(_: &Entry<Self>) -> Option<Sharing> {
        None
    }

    /// The shared node set that it uses.
    fn node_set(&self) -> Option<&str> {
        None
    }
}

/// An object that has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) name: String,
    /// How it shares the address. Objects have at most two addresses.
    pub(crate) sharing: Option<Arc<Sharing>>,
}

/// The references of all objects.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// The owners of objects by Service: several if it was deleted and created again.
    owners: BTreeMap<Key, Vec<Owner>>,
    /// The objects that have an address: several if they share it, or if another program wrote it into an object.
    holders: BTreeMap<IpAddr, Vec<Holder>>,
    used: AddressSet,
    /// The addresses of objects with a key, as often as there are objects.
    keys: BTreeMap<String, Vec<IpAddr>>,
    /// The addresses of the objects of each namespace's Services, as often as there are objects.
    namespaces: BTreeMap<String, Vec<IpAddr>>,
    /// The number of objects that use a shared node set.
    node_sets: BTreeMap<String, usize>,
}

impl Index {
    /// Takes in that an object changed, appeared or is gone.
    pub(crate) fn change<S: References>(&mut self, old: Option<&Entry<S>>, new: Option<&Entry<S>>) {
        if let Some(old) = old {
            self.remove(old);
        }
        if let Some(new) = new {
            self.add(new);
        }
    }

    /// The owners of objects of this Service.
    pub(crate) fn owners_of(&self, service: &Key) -> &[Owner] {
        self.owners.get(service).map_or(&[], Vec::as_slice)
    }

    /// The objects other than `name` that have the address.
    pub(crate) fn other_holders(&self, address: IpAddr, name: &str) -> impl Iterator<Item = &Holder> {
        let holders = self.holders.get(&address).into_iter().flatten();
        holders.filter(move |holder| holder.name != name)
    }

    /// The addresses of objects with this key.
    pub(crate) fn of_key(&self, key: &str) -> impl Iterator<Item = IpAddr> {
        self.keys.get(key).into_iter().flatten().copied()
    }

    /// The addresses of the objects of this namespace's Services, but once `except`, which one of them has.
    pub(crate) fn of_namespace(&self, namespace: &str, except: &[IpAddr]) -> BTreeSet<IpAddr> {
        let mut all = self.namespaces.get(namespace).cloned().unwrap_or_default();
        for address in except {
            if let Some(place) = all.iter().position(|held| held == address) {
                all.swap_remove(place);
            }
        }
        all.into_iter().collect()
    }

    /// The addresses of all objects.
    pub(crate) fn used(&self) -> &AddressSet {
        &self.used
    }

    /// Whether an object uses the shared node set.
    pub(crate) fn uses(&self, node_set: &str) -> bool {
        self.node_sets.contains_key(node_set)
    }

    fn add<S: References>(&mut self, new: &Entry<S>) {
        if let Some(owner) = &new.owner {
            self.owners.entry(owner.service.clone()).or_default().push(owner.clone());
        }
        let sharing = S::sharing(new).map(Arc::new);
        for address in S::addresses(new) {
            if let Some(sharing) = &sharing {
                self.keys.entry(sharing.key.clone()).or_default().push(address);
            }
            let holder = Holder { name: new.name.clone(), sharing: sharing.clone() };
            self.holders.entry(address).or_default().push(holder);
            self.used.insert(address);
            if let Some(owner) = &new.owner {
                self.namespaces.entry(owner.service.namespace().to_owned()).or_default().push(address);
            }
        }
        if let Some(set) = new.content.as_ref().ok().and_then(S::node_set) {
            *self.node_sets.entry(set.to_owned()).or_default() += 1;
        }
    }

    fn remove<S: References>(&mut self, old: &Entry<S>) {
        if let Some(owner) = &old.owner {
            remove_one(&mut self.owners, &owner.service, owner);
        }
        let sharing = S::sharing(old).map(Arc::new);
        for address in S::addresses(old) {
            if let Some(sharing) = &sharing {
                remove_one(&mut self.keys, &sharing.key, &address);
            }
            let holder = Holder { name: old.name.clone(), sharing: sharing.clone() };
            if remove_one(&mut self.holders, &address, &holder) {
                self.used.remove(address);
            }
            if let Some(owner) = &old.owner {
                remove_one(&mut self.namespaces, &owner.service.namespace().to_owned(), &address);
            }
        }
        if let Some(set) = old.content.as_ref().ok().and_then(S::node_set)
            && let Some(count) = self.node_sets.get_mut(set)
        {
            *count -= 1;
            if *count == 0 {
                self.node_sets.remove(set);
            }
        }
    }
}

/// Removes one of the equal values of a key, because two objects may refer to it. Returns whether it was the key's last.
fn remove_one<K: Ord, V: PartialEq>(values: &mut BTreeMap<K, Vec<V>>, key: &K, value: &V) -> bool {
    let Some(of_key) = values.get_mut(key) else { return false };
    if let Some(place) = of_key.iter().position(|known| known == value) {
        of_key.swap_remove(place);
    }
    let is_last = of_key.is_empty();
    if is_last {
        values.remove(key);
    }
    is_last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sharing::tests::sharing;

    /// The addresses of a load balancer in these tests.
    type Addresses = Vec<u8>;

    impl References for Addresses {
        fn addresses(entry: &Entry<Self>) -> Vec<IpAddr> {
            let content = entry.content.as_ref();
            content
                .map(|list| list.iter().map(|n| IpAddr::from([10, 0, 0, *n])).collect())
                .unwrap_or_default()
        }

        fn sharing(entry: &Entry<Self>) -> Option<Sharing> {
            let first = *entry.content.as_ref().ok()?.first()?;
            Some(sharing("shop", if first % 2 == 0 { "even" } else { "odd" }, &[u16::from(first)]))
        }

        fn node_set(&self) -> Option<&str> {
            (self.len() > 1).then_some("set")
        }
    }

    fn entry(name: u8, addresses: &[u8]) -> Entry<Addresses> {
        let service = Key::new("shop", format!("{}", name / 2));
        Entry {
            name: format!("lb-{name}"),
            uid: String::new(),
            version: String::new(),
            owner: Some(Owner { service, uid: "u".to_owned() }),
            managed: true,
            deleting: false,
            content: Ok(addresses.to_vec()),
        }
    }

    proptest! {
        /// The index after any changes is that of the objects that are left.
        #[test]
        fn index_follows_the_objects(
            changes in prop::collection::vec((0..4_u8, prop::option::of(prop::collection::vec(0..6_u8, 0..3))), 0..40),
        ) {
            let (mut index, mut objects) = (Index::default(), BTreeMap::new());
            for (name, addresses) in changes {
                let new = addresses.map(|addresses| entry(name, &addresses));
                index.change(objects.get(&name), new.as_ref());
                match new {
                    Some(new) => drop(objects.insert(name, new)),
                    None => drop(objects.remove(&name)),
                }
                let mut expected = Index::default();
                for entry in objects.values() {
                    expected.change(None, Some(entry));
                }
                prop_assert_eq!(&index.used, &expected.used);
                prop_assert_eq!(&index.node_sets, &expected.node_sets);
                prop_assert_eq!(index.of_namespace("shop", &[]), expected.of_namespace("shop", &[]));
                for key in ["even", "odd"] {
                    let sorted = |index: &Index| index.of_key(key).collect::<BTreeSet<_>>();
                    prop_assert_eq!(sorted(&index), sorted(&expected));
                    prop_assert_eq!(index.keys.contains_key(key), expected.keys.contains_key(key));
                }
                prop_assert_eq!(index.owners.keys().collect::<Vec<_>>(), expected.owners.keys().collect::<Vec<_>>());
                for n in 0..6 {
                    let address = IpAddr::from([10, 0, 0, n]);
                    for name in 0..4_u8 {
                        let others = objects.iter().filter(|(other, _)| **other != name);
                        let is_used = others.into_iter().any(|(_, entry)| Addresses::addresses(entry).contains(&address));
                        prop_assert_eq!(index.other_holders(address, &format!("lb-{name}")).next().is_some(), is_used);
                    }
                }
            }
        }
    }
}
