// SPDX-License-Identifier: Apache-2.0
//! The sets of address ranges, each with the chain of the rules that look into it. Pure, called by `rules` and `writer`.
//!
//! To delete a range the kernel takes time in proportion to all ranges of the set: some milliseconds of 5,000, without a pause in
//! the whole transaction. To add all of them takes less than to delete ten. So a set that loses several ranges is replaced: another
//! one takes over under another name, in the transaction that makes the rules look into it.

use std::collections::BTreeSet;

use steerage_nft::{Batch, Chain, DataType, Element, Expression, Rule, Set};

use super::rules::{IP_FAMILIES, IpFamily, mac, table};

/// A set that loses so many ranges at once is replaced.
pub(crate) const REPLACED_FROM: usize = 4;

/// What a set contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// The source ranges of VIPs.
    Ranges,
    /// The source addresses that frames of nodes and edge hosts may carry.
    Sources,
}

/// One of the sets.
#[derive(Clone, Copy)]
pub(crate) struct IntervalSet {
    ip: IpFamily,
    content: Content,
}

/// All of the sets.
pub(crate) fn interval_sets() -> impl Iterator<Item = IntervalSet> {
    let both = |ip| [Content::Ranges, Content::Sources].map(|content| IntervalSet { ip, content });
    IP_FAMILIES.into_iter().flat_map(both)
}

impl IntervalSet {
    /// The set with this [`IntervalSet::name`].
    pub(crate) fn named(name: &str) -> Option<Self> {
        interval_sets().find(|set| set.name() == name)
    }

    /// The first of its two names.
    pub(crate) fn name(self) -> String {
        self.ip.name(match self.content {
            Content::Ranges => "ranges",
            Content::Sources => "sources",
        })
    }

    fn other_name(self) -> String {
        format!("other_{}", self.name())
    }

    /// The chain with the rules that look into it.
    pub(crate) fn chain(self) -> String {
        format!("check_{}", self.name())
    }

    fn definition(self, name: String) -> Set {
        let first = match self.content {
            Content::Ranges => self.ip.address,
            Content::Sources => DataType::EtherAddr,
        };
        Set::new(name, &[first, self.ip.address]).interval()
    }

    /// The rules that look into the set of this name.
    fn rules(self, set: &str) -> Vec<Rule> {
        let (saddr, daddr) = (Expression::saddr(self.ip.family), Expression::daddr(self.ip.family));
        match self.content {
            Content::Ranges => {
                vec![Rule::new().not_in_set(set, &[daddr, saddr]).drop().comment("outside the source ranges")]
            }
            // A packet that an edge host has forwarded once is not forwarded again.
            Content::Sources => vec![
                Rule::new()
                    .in_set("peers", &[mac()])
                    .not_in_set(set, &[mac(), saddr.clone()])
                    .in_set(&self.ip.name("local"), &[daddr])
                    .accept()
                    .comment("forwarded here by another edge host"),
                Rule::new()
                    .in_set("peers", &[mac()])
                    .not_in_set(set, &[mac(), saddr.clone()])
                    .drop()
                    .comment("already forwarded by an edge host"),
                Rule::new()
                    .in_set("nodes", &[mac()])
                    .not_in_set(set, &[mac(), saddr])
                    .drop()
                    .comment("returned by a node"),
            ],
        }
    }

    /// The set as a new table has it.
    pub(crate) fn first_definition(self) -> Set {
        self.definition(self.name())
    }

    /// The rules as a new table has them.
    pub(crate) fn first_rules(self) -> Vec<Rule> {
        self.rules(&self.name())
    }

    /// Adds the chain without its rules.
    pub(crate) fn add_chain(self, batch: &mut Batch) {
        batch.add_chain(&table(), &Chain::regular(self.chain()));
    }
}

/// Which of its two names each set has in the kernel.
#[derive(Clone, Debug, Default)]
pub(crate) struct IntervalNames {
    /// The first names of those that have the other one.
    other: BTreeSet<String>,
}

impl IntervalNames {
    /// The names as these sets of the kernel's table have them.
    pub(crate) fn of(sets: &[String]) -> Self {
        let has_other = |set: &IntervalSet| sets.contains(&set.other_name());
        Self { other: interval_sets().filter(has_other).map(IntervalSet::name).collect() }
    }

    /// The name that a set has in the kernel; any other set's is its own.
    pub(crate) fn current(&self, name: &str) -> String {
        match IntervalSet::named(name) {
            Some(set) if self.other.contains(name) => set.other_name(),
            _ => name.to_owned(),
        }
    }

    /// Replaces a set by one that has exactly these ranges.
    pub(crate) fn replace(&mut self, batch: &mut Batch, set: IntervalSet, ranges: &[Element]) {
        let (table, old) = (table(), self.current(&set.name()));
        if !self.other.remove(&set.name()) {
            self.other.insert(set.name());
        }
        let new = self.current(&set.name());
        batch.add_set(&table, &set.definition(new.clone())).add_elements(&table, &new, ranges);
        batch.flush_chain(&table, &set.chain());
        for rule in set.rules(&new) {
            batch.add_rule(&table, &set.chain(), &rule);
        }
        batch.delete_set(&table, &old);
    }
}
