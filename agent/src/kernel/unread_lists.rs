// SPDX-License-Identifier: Apache-2.0
//! The long lists that a comparison did not read, because it believed their digests: which ones are read next, and
//! what is done about those that are not what they should be. [`super::Dataplane`] has them read, some at once or before a change.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use steerage_model::{Family, Key};
use steerage_nft::{Error, Rows};

use super::FamilyTable;
use crate::foreign::ForeignChange;
use crate::plan::ServicePlan;
use crate::rules::{Elements, Ruleset, SetId, difference, differing_lists, kernel_lists};

/// Slots of long lists that are read at once. The kernel looks them up in a few ms.
const SLOTS_AT_ONCE: u32 = 2048;

/// Long lists by family and number.
pub(super) type ListNumbers = BTreeSet<(Family, u32)>;

/// Lists whose order, and whose elements if another program wrote them, are not known.
#[derive(Debug, Default)]
pub(super) struct UnreadLists {
    lists: ListNumbers,
    /// The last one of [`UnreadLists::next`]. Each comparison that believes digests adds all lists again: reading goes on after it, and not from the
    /// first one, or a program that keeps on changing the tables would keep the last ones from being read.
    last_read: Option<(Family, u32)>,
    /// What others changed in lists while nobody watched them.
    found: ForeignChange,
}

impl UnreadLists {
    pub(super) fn is_empty(&self) -> bool {
        self.lists.is_empty()
    }

    /// Whether there are some of a family.
    pub(super) fn are_of(&self, family: Family) -> bool {
        self.lists.iter().any(|(of, _)| *of == family)
    }

    /// All of them are going to be read.
    pub(super) fn clear(&mut self) {
        self.lists.clear();
    }

    pub(super) fn extend(&mut self, lists: ListNumbers) {
        self.lists.extend(lists);
    }

    pub(super) fn add(&mut self, family: Family, lists: BTreeSet<u32>) {
        self.lists.extend(lists.into_iter().map(|list| (family, list)));
    }

    /// What others changed in lists while nobody watched them, as far as it was found since the last call.
    pub(super) fn take_found(&mut self) -> ForeignChange {
        std::mem::take(&mut self.found)
    }

    pub(super) fn all(&self) -> ListNumbers {
        self.lists.clone()
    }

    /// As many as are read at once.
    pub(super) fn next(&mut self, ruleset: &Ruleset) -> ListNumbers {
        let next = self.after_last_read(ruleset);
        self.last_read = next.last().copied().or(self.last_read);
        next
    }

    fn after_last_read(&self, ruleset: &Ruleset) -> ListNumbers {
        let from = match self.last_read {
            Some(last) => (Bound::Excluded(last), Bound::Unbounded),
            None => (Bound::Unbounded, Bound::Unbounded),
        };
        let mut following = self.lists.range(from).peekable();
        let mut from_first = self.lists.iter().peekable();
        let lists: &mut dyn Iterator<Item = &(Family, u32)> =
            if following.peek().is_some() { &mut following } else { &mut from_first };
        let mut lists = lists.copied().peekable();
        let Some((first, _)) = lists.peek().copied() else { return ListNumbers::new() };
        let digests = ruleset.list_digests(first);
        let mut slots = 0;
        let fits = |(family, list): &(Family, u32)| {
            let fits = *family == first && slots < SLOTS_AT_ONCE;
            slots += digests.get(list).map_or(0, |digest| digest.slots());
            fits
        };
        lists.take_while(fits).collect()
    }

    /// Those whose endpoints change, and that do not end. Others of the same Services stay believed: a change of the node may concern all Services.
    pub(super) fn changed_by(&self, updates: &BTreeMap<Key, ServicePlan>, ruleset: &Ruleset) -> ListNumbers {
        if self.is_empty() {
            return ListNumbers::new();
        }
        let of_family = |family| {
            let lists = ruleset.lists_changed_by(updates, family);
            lists.into_iter().map(move |list| (family, list))
        };
        let all = [Family::V4, Family::V6].into_iter().flat_map(of_family);
        all.filter(|list| self.lists.contains(list)).collect()
    }

    /// Has `ruleset` take over the order of some lists, and repairs those that differ. Returns their number.
    pub(super) fn read(
        &mut self,
        lists: &ListNumbers,
        tables: &mut [FamilyTable],
        ruleset: &mut Ruleset,
    ) -> Result<usize, Error> {
        let mut wrong = 0;
        for table in tables.iter_mut().filter(|table| lists.iter().any(|(of, _)| *of == table.model())) {
            let family = table.model();
            let mut digests = ruleset.list_digests(family);
            digests.retain(|list, _| lists.contains(&(family, *list)));
            let kernel = table.read_lists(&digests)?;
            ruleset.adopt(family, &kernel_lists(&kernel));
            let wanted = ruleset.endpoints_of(family, &digests.into_keys().collect());
            let differing = differing_lists(&kernel, &wanted).len();
            if differing > 0 {
                wrong += differing;
                self.repair(table, kernel, wanted)?;
            }
        }
        self.lists.retain(|list| !lists.contains(list));
        Ok(wrong)
    }

    fn repair(&mut self, table: &mut FamilyTable, kernel: Rows, wanted: Rows) -> Result<(), Error> {
        let of = |rows| {
            let mut elements = Elements::new(table.model());
            elements.listed(SetId::Endpoints, rows);
            elements
        };
        let changes = difference(&of(kernel), &of(wanted));
        table.write(&changes)?;
        // A table that is gone altogether is the monitor's to report.
        self.found.add_elements(table.table().clone(), SetId::Endpoints.name(), changes.count());
        Ok(())
    }
}
