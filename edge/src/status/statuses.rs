// SPDX-License-Identifier: Apache-2.0
//! The statuses of all load balancers, as a value that is cheap to copy and to change: `engine` changes some of them all the time,
//! while the writer still reads an earlier copy. Pure.
//!
//! Copies share their parts until one of them is changed, and then copy that part alone. What differs between two copies is found
//! in the parts that they do not share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::hash;
use crate::plan::LoadBalancerStatus;

/// With 10,000 load balancers a part has about 40, and a copy costs as much as this many counters.
const PARTS: usize = 256;

type Part = BTreeMap<String, LoadBalancerStatus>;

/// By name of the load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statuses {
    parts: Arc<[Arc<Part>]>,
    len: usize,
    with_problem: usize,
}

impl Default for Statuses {
    fn default() -> Self {
        let empty = Arc::<Part>::default();
        Self { parts: (0..PARTS).map(|_| Arc::clone(&empty)).collect(), len: 0, with_problem: 0 }
    }
}

impl FromIterator<(String, LoadBalancerStatus)> for Statuses {
    fn from_iter<I: IntoIterator<Item = (String, LoadBalancerStatus)>>(statuses: I) -> Self {
        let mut all = Self::default();
        for (name, status) in statuses {
            all.set(&name, Some(status));
        }
        all
    }
}

fn has_problem(status: &LoadBalancerStatus) -> bool {
    !status.problem.is_empty()
}

impl Statuses {
    fn place(name: &str) -> usize {
        usize::try_from(hash::bytes(name.as_bytes())).unwrap_or(0) % PARTS
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The number of load balancers with a problem.
    pub(crate) fn with_problem(&self) -> usize {
        self.with_problem
    }

    pub(crate) fn get(&self, name: &str) -> Option<&LoadBalancerStatus> {
        self.parts.get(Self::place(name))?.get(name)
    }

    /// Sets or removes one.
    pub(crate) fn set(&mut self, name: &str, status: Option<LoadBalancerStatus>) {
        let Some(part) = Arc::make_mut(&mut self.parts).get_mut(Self::place(name)) else { return };
        let part = Arc::make_mut(part);
        let new = status.as_ref().map(has_problem);
        let old = match status {
            Some(status) => part.insert(name.to_owned(), status),
            None => part.remove(name),
        };
        let old = old.as_ref().map(has_problem);
        self.len = self.len + usize::from(new.is_some()) - usize::from(old.is_some());
        self.with_problem =
            self.with_problem + usize::from(new == Some(true)) - usize::from(old == Some(true));
    }

    /// Changes one, if it is there.
    pub(crate) fn change(&mut self, name: &str, change: impl FnOnce(&mut LoadBalancerStatus)) {
        let Some(part) = Arc::make_mut(&mut self.parts).get_mut(Self::place(name)) else { return };
        let Some(status) = Arc::make_mut(part).get_mut(name) else { return };
        let before = usize::from(has_problem(status));
        change(status);
        self.with_problem = self.with_problem + usize::from(has_problem(status)) - before;
    }

    /// All, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &LoadBalancerStatus)> {
        self.parts.iter().flat_map(|part| part.iter())
    }

    /// The names of all that differ from those of another copy.
    pub(crate) fn differing<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let mut names = Vec::new();
        if Arc::ptr_eq(&self.parts, &other.parts) {
            return names;
        }
        for (one, other) in self.parts.iter().zip(other.parts.iter()) {
            if Arc::ptr_eq(one, other) {
                continue;
            }
            let changed = one.iter().filter(|(name, status)| other.get(*name) != Some(*status));
            let removed = other.keys().filter(|name| !one.contains_key(*name));
            names.extend(changed.map(|(name, _)| name.as_str()).chain(removed.map(String::as_str)));
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn status(generation: i64) -> LoadBalancerStatus {
        let problem = if generation % 2 == 0 { "" } else { "in use" }.to_owned();
        LoadBalancerStatus {
            uid: String::new(),
            generation,
            problem,
            vips: Vec::new(),
            served: Vec::new(),
            targets: Vec::new(),
            node_set_uid: None,
        }
    }

    proptest! {
        #[test]
        fn is_a_map_and_finds_what_differs(
            first in prop::collection::btree_map(0..40_u16, 0..4_i64, 0..40),
            changes in prop::collection::vec((0..40_u16, prop::option::of(0..4_i64), any::<bool>()), 0..40),
        ) {
            let name = |number: &u16| format!("lb{number}");
            let before: Statuses = first.iter().map(|(number, value)| (name(number), status(*value))).collect();
            let (mut after, mut truth) = (before.clone(), first.clone());
            for (number, value, is_changed) in changes {
                match value {
                    Some(value) if is_changed => {
                        after.change(&name(&number), |one| *one = status(value));
                        truth.entry(number).and_modify(|one| *one = value);
                    }
                    Some(value) => {
                        after.set(&name(&number), Some(status(value)));
                        truth.insert(number, value);
                    }
                    None => {
                        after.set(&name(&number), None);
                        truth.remove(&number);
                    }
                }
            }
            let of = |statuses: &Statuses| -> BTreeMap<String, i64> {
                statuses.iter().map(|(name, status)| (name.clone(), status.generation)).collect()
            };
            let named = |map: &BTreeMap<u16, i64>| map.iter().map(|(number, value)| (name(number), *value)).collect::<BTreeMap<_, _>>();
            prop_assert_eq!(of(&after), named(&truth));
            prop_assert_eq!(of(&before), named(&first), "the copy stays");
            prop_assert_eq!(after.len(), truth.len());
            prop_assert_eq!(after.with_problem(), truth.values().filter(|value| **value % 2 == 1).count());
            let differing: BTreeSet<_> = after.differing(&before).into_iter().map(str::to_owned).collect();
            let expected: BTreeSet<_> = first.keys().chain(truth.keys()).filter(|number| first.get(number) != truth.get(number)).map(name).collect();
            prop_assert_eq!(differing, expected);
        }
    }
}
