// SPDX-License-Identifier: Apache-2.0
//! Which Services and nodes Azure names when it refuses a change. Users choose some of its words, such as names of subnets and requested
//! addresses; what one of them chose says nothing about others. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::merge::FrontendAddress;

/// Words of a text: addresses, names, and the segments of paths, all in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Words(BTreeSet<String>);

impl Words {
    pub(crate) fn add(&mut self, text: &str) {
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '-' | '_');
        let words = text.split(|c| !is_part(c)).map(|word| word.trim_matches(['.', ':'])).map(|word| {
            word.parse::<IpAddr>().map_or_else(|_| word.to_ascii_lowercase(), |address| address.to_string())
        });
        self.0.extend(words.filter(|word| !word.is_empty()));
    }

    /// Whether a name, in lower case, is one of them.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    pub(crate) fn of(text: &str) -> Self {
        let mut words = Self::default();
        words.add(text);
        words
    }
}

/// Whether a text has the whole of this path. A part of it may be any word, because users choose names.
pub(crate) fn has_path(text: &str, path: &str) -> bool {
    let is_around = |c: char| c.is_whitespace() || matches!(c, '\'' | '"' | '`' | ',' | ';' | '[' | ']');
    let mut words = text.split(is_around).map(|word| word.trim_matches(['.', ':', '(', ')']));
    words.any(|word| word.eq_ignore_ascii_case(path))
}

/// What names a Service.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// The start of the names of its parts, in lower case.
    pub(crate) mark: Option<String>,
    /// What only it has.
    pub(crate) own: Words,
    /// What its users can choose.
    pub(crate) chosen: Words,
}

impl Names {
    /// The address of a frontend names its Service.
    pub(crate) fn add_address(&mut self, address: &FrontendAddress) {
        match address {
            FrontendAddress::Public(id) => {
                self.own.add(id.rsplit('/').next().unwrap_or_default());
                self.chosen.add(id);
            }
            FrontendAddress::Private { subnet, address } => {
                let address = address.map(|address| address.to_string()).unwrap_or_default();
                self.own.add(&address);
                self.chosen.add(&address);
                self.chosen.add(subnet);
            }
        }
    }
}

/// What a refusal is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RefusedItems<K> {
    Services(BTreeSet<K>),
    Nodes(BTreeSet<IpAddr>),
    /// Azure names none that is known here.
    Unknown,
}

/// Whom Azure's words name, of the Services that a change is of and the nodes in its pools.
pub(crate) fn refused_items<K: Clone + Ord>(
    text: &str,
    services: &BTreeMap<K, Names>,
    nodes: &[IpAddr],
) -> RefusedItems<K> {
    let Words(words) = Words::of(text);
    let mut choosers: BTreeMap<&str, usize> = BTreeMap::new();
    for word in services.values().flat_map(|names| &names.chosen.0) {
        *choosers.entry(word).or_default() += 1;
    }
    let chosen = |word: &str| choosers.get(word).copied().unwrap_or_default();
    let is_others = |names: &Names, word: &str| chosen(word) > usize::from(names.chosen.0.contains(word));
    let (mut by_part, mut by_pool, mut by_own) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (service, names) in services {
        for word in words.iter().filter(|word| !is_others(names, word)) {
            match names.mark.as_ref().and_then(|mark| word.strip_prefix(mark.as_str())) {
                Some(part) if part.starts_with("pool-") => by_pool.insert(service.clone()),
                Some(_) => by_part.insert(service.clone()),
                None => names.own.0.contains(word) && by_own.insert(service.clone()),
            };
        }
    }
    let is_named = |node: &&IpAddr| words.contains(&node.to_string()) && chosen(&node.to_string()) == 0;
    let nodes: BTreeSet<IpAddr> = nodes.iter().filter(is_named).copied().collect();
    // A pool is wrong because of a node in it.
    if by_part.is_empty() && !nodes.is_empty() {
        return RefusedItems::Nodes(nodes);
    }
    let named = [by_part, by_pool, by_own].into_iter().find(|named| !named.is_empty());
    named.map_or(RefusedItems::Unknown, RefusedItems::Services)
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    fn names(mark: &str, own: &str, chosen: &str) -> (Key, Names) {
        let names = Names { mark: Some(format!("{mark}_")), own: Words::of(own), chosen: Words::of(chosen) };
        (Key::new("shop", mark), names)
    }

    fn services(named: &[&str]) -> RefusedItems<Key> {
        RefusedItems::Services(named.iter().map(|name| Key::new("shop", *name)).collect())
    }

    #[test]
    fn words_name_services_and_nodes_as_a_whole() {
        let all = BTreeMap::from([names("a", "10.0.5.1", "10.0.5.1"), names("b", "mine", "mine")]);
        let nodes = ["10.0.0.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        let told = |text: &str| refused_items(text, &all, &nodes);
        assert_eq!(told("IP 10.0.0.1, in pool."), RefusedItems::Nodes([nodes[0]].into()));
        assert_eq!(told("'2001:DB8:0::1'."), RefusedItems::Nodes([nodes[1]].into()));
        assert_eq!(told("10.0.0.10 and 110.0.0.1, minestone, x-a_v4"), RefusedItems::Unknown);
        assert_eq!(
            told("10.0.0.1 in /backendAddressPools/A_pool-v4/x"),
            RefusedItems::Nodes([nodes[0]].into())
        );
        assert_eq!(told("/backendAddressPools/a_pool-v4/x"), services(&["a"]));
        assert_eq!(told("rule /lb/b_tcp-80 with 10.0.0.1"), services(&["b"]));
        assert_eq!(told("10.0.5.1 is in use"), services(&["a"]));
        assert_eq!(told("/publicIPAddresses/MINE"), services(&["b"]));
    }

    #[test]
    fn path_is_found_as_a_whole() {
        let path = "/subscriptions/s/resourceGroups/g/providers/x/publicIPAddresses/web";
        for (text, is_found) in [
            (format!("the linked scope(s) '{}' or", path.to_uppercase()), true),
            (format!("for {path}."), true),
            (format!("for {path}-2"), false),
            ("web".to_owned(), false),
        ] {
            assert_eq!(has_path(&text, path), is_found, "{text}");
        }
    }

    #[test]
    fn what_a_user_chose_names_nobody_else() {
        let nodes = ["10.0.0.1".parse().unwrap()];
        for chosen in ["/subnets/10.0.0.1", "/subnets/a_v4", "/subnets/10.0.5.1"] {
            let all = BTreeMap::from([names("a", "10.0.5.1", "10.0.5.1"), names("b", "", chosen)]);
            assert_eq!(
                refused_items(&format!("{chosen} was not found"), &all, &nodes),
                RefusedItems::Unknown,
                "{chosen}"
            );
        }
    }
}
