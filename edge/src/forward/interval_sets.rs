// SPDX-License-Identifier: Apache-2.0
//! The sets of address ranges, each with the chain of the rules that look into it. Pure, called by `rules` and `writer`.
//!
//! To delete a range the kernel takes time in proportion to all ranges of the set: some milliseconds if it has 5,000, without a
//! pause in the whole transaction. To add all of them takes less than to delete ten. So a set that loses several ranges is replaced
//! by another one of another name, in two transactions: the first one adds it, and the second one makes the rules look into it.

use std::collections::BTreeSet;

use steerage_nft::{Batch, Chain, DataType, Element, Expression, Rule, Set};

use super::rules::{IP_FAMILIES, IpFamily, mac, table};

/// A set that loses so many ranges at once is replaced.
pub(crate) const REPLACED_FROM: usize = 4;

/// What a set contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntervalContent {
    /// The source ranges of VIPs.
    Ranges,
    /// The source addresses that frames of nodes and edge hosts may carry.
    Sources,
}

/// One of the sets.
#[derive(Clone, Copy)]
pub(crate) struct IntervalSet {
    ip: IpFamily,
    content: IntervalContent,
}

/// All of the sets.
pub(crate) fn interval_sets() -> impl Iterator<Item = IntervalSet> {
    let of_family =
        |ip| [IntervalContent::Ranges, IntervalContent::Sources].map(|content| IntervalSet { ip, content });
    IP_FAMILIES.into_iter().flat_map(of_family)
}

impl IntervalSet {
    /// The set with this [`IntervalSet::name`].
    pub(crate) fn named(name: &str) -> Option<Self> {
        interval_sets().find(|set| set.name() == name)
    }

    /// The first of its two names.
    pub(crate) fn name(self) -> String {
        self.ip.name(match self.content {
            IntervalContent::Ranges => "ranges",
            IntervalContent::Sources => "sources",
        })
    }

    fn second_name(self) -> String {
        format!("other_{}", self.name())
    }

    /// The chain with the rules that look into it.
    pub(crate) fn chain(self) -> String {
        format!("check_{}", self.name())
    }

    fn definition(self, name: String) -> Set {
        let first = match self.content {
            IntervalContent::Ranges => self.ip.address,
            IntervalContent::Sources => DataType::EtherAddr,
        };
        Set::new(name, &[first, self.ip.address]).interval()
    }

    /// The rules that look into the set of this name.
    fn rules(self, set: &str) -> Vec<Rule> {
        let (saddr, daddr) = (Expression::saddr(self.ip.family), Expression::daddr(self.ip.family));
        match self.content {
            IntervalContent::Ranges => {
                vec![Rule::new().not_in_set(set, &[daddr, saddr]).drop().comment("outside the source ranges")]
            }
            // A packet that an edge host has forwarded once is not forwarded again.
            IntervalContent::Sources => vec![
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
    /// The first names of the sets into whose second one the rules look.
    second: BTreeSet<String>,
    /// Sets into which no rule looks: a replacement ended in the middle.
    left_over: Vec<String>,
}

impl IntervalNames {
    /// The names as the kernel has them: all sets of the table, and those into which the rules of a chain look.
    pub(crate) fn of(sets: &[String], looked_up: impl Fn(&str) -> Vec<String>) -> Self {
        let mut names = Self::default();
        for set in interval_sets() {
            let used = looked_up(&set.chain());
            if used.contains(&set.second_name()) {
                names.second.insert(set.name());
            }
            let unused = [set.name(), set.second_name()].into_iter().filter(|name| !used.contains(name));
            names.left_over.extend(unused.filter(|name| sets.contains(name)));
        }
        names
    }

    /// The name that a set has in the kernel; any other set's is its own.
    pub(crate) fn current(&self, name: &str) -> String {
        match IntervalSet::named(name) {
            Some(set) if self.second.contains(name) => set.second_name(),
            _ => name.to_owned(),
        }
    }

    /// Deletes the sets into which no rule looks.
    pub(crate) fn delete_left_over(&mut self, batch: &mut Batch) {
        for set in self.left_over.drain(..) {
            batch.delete_set(&table(), &set);
        }
    }

    /// Replaces a set by one that has exactly these ranges. `before` must be committed first: the kernel lets packets find ranges of
    /// a set of ranges only at the end of the transaction that adds them, after that transaction's rules are in force.
    pub(crate) fn replace(
        &mut self,
        before: &mut Batch,
        batch: &mut Batch,
        set: IntervalSet,
        ranges: &[Element],
    ) {
        let (table, old) = (table(), self.current(&set.name()));
        if !self.second.remove(&set.name()) {
            self.second.insert(set.name());
        }
        let new = self.current(&set.name());
        before.add_set(&table, &set.definition(new.clone())).add_elements(&table, &new, ranges);
        batch.flush_chain(&table, &set.chain());
        for rule in set.rules(&new) {
            batch.add_rule(&table, &set.chain(), &rule);
        }
        batch.delete_set(&table, &old);
    }
}
