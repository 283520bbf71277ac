// SPDX-License-Identifier: Apache-2.0
//! A set of ports as a bitmap: 8 KiB, whatever is in it. `prober` and `health` hold one for all nodes that state the same ports. Pure.

#[cfg(test)]
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Weak};

use crate::hash::mix64;

const WORDS: usize = (u16::MAX as usize + 1) / 64;

/// Two sets are compared by a hash first, which follows each change.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PortSet {
    hash: u64,
    len: usize,
    words: Box<[u64]>,
}

impl Default for PortSet {
    fn default() -> Self {
        Self { hash: 0, len: 0, words: vec![0; WORDS].into() }
    }
}

fn place(port: u16) -> (usize, u64) {
    (usize::from(port / 64), 1 << (port % 64))
}

impl PortSet {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn contains(&self, port: u16) -> bool {
        let (word, bit) = place(port);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    pub(crate) fn insert(&mut self, port: u16) {
        if !self.contains(port) {
            self.flip(port);
            self.len += 1;
        }
    }

    pub(crate) fn remove(&mut self, port: u16) {
        if self.contains(port) {
            self.flip(port);
            self.len -= 1;
        }
    }

    fn flip(&mut self, port: u16) {
        let (word, bit) = place(port);
        if let Some(word) = self.words.get_mut(word) {
            *word ^= bit;
            self.hash ^= mix64(port.into());
        }
    }

    /// In order, those that are not in `other`.
    pub(crate) fn without<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u16> + 'a {
        let words = (0_u16..).zip(self.words.iter().zip(&other.words));
        words
            .filter_map(|(index, (word, other))| Some((index, word & !other)).filter(|(_, rest)| *rest != 0))
            .flat_map(|(index, rest)| {
                std::iter::successors(Some(rest), |rest| Some(rest & rest.wrapping_sub(1)))
                    .take_while(|rest| *rest != 0)
                    .map(move |rest| index * 64 + u16::try_from(rest.trailing_zeros()).unwrap_or(0))
            })
    }
}

impl FromIterator<u16> for PortSet {
    fn from_iter<I: IntoIterator<Item = u16>>(ports: I) -> Self {
        let mut set = Self::default();
        ports.into_iter().for_each(|port| set.insert(port));
        set
    }
}

impl fmt::Debug for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.without(&Self::default())).finish()
    }
}

/// Lets holders of equal sets share one.
#[derive(Debug, Default)]
pub(crate) struct PortSetPool(Vec<Weak<PortSet>>);

impl PortSetPool {
    /// The set that others hold, if there is an equal one.
    pub(crate) fn share(&mut self, set: &Arc<PortSet>) -> Arc<PortSet> {
        let is_equal = |held: &Arc<PortSet>| Arc::ptr_eq(held, set) || held == set;
        if let Some(held) = self.0.iter().filter_map(Weak::upgrade).find(is_equal) {
            return held;
        }
        self.0.retain(|held| held.strong_count() > 0);
        self.0.push(Arc::downgrade(set));
        Arc::clone(set)
    }

    /// The number of different sets that somebody holds.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.iter().filter_map(Weak::upgrade).map(|set| Arc::as_ptr(&set)).collect::<HashSet<_>>().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop_assert_eq, proptest};
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn is_the_set_that_was_written(steps in proptest::collection::vec((any::<bool>(), 0_u16..200), 0..100), other in proptest::collection::btree_set(0_u16..200, 0..50)) {
            let (mut set, mut truth) = (PortSet::default(), BTreeSet::new());
            for (is_in, port) in steps {
                // Both ends of the range.
                let port = if port < 100 { port } else { u16::MAX - port };
                if is_in {
                    set.insert(port);
                    truth.insert(port);
                } else {
                    set.remove(port);
                    truth.remove(&port);
                }
            }
            prop_assert_eq!((set.len(), set.is_empty()), (truth.len(), truth.is_empty()));
            prop_assert_eq!(&set, &truth.iter().copied().collect::<PortSet>(), "whatever the order");
            let rest = set.without(&other.iter().copied().collect()).collect::<Vec<_>>();
            prop_assert_eq!(rest, truth.difference(&other).copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn equal_sets_are_held_once() {
        let set = |ports: &[u16]| Arc::new(ports.iter().copied().collect::<PortSet>());
        let mut shared = PortSetPool::default();
        let one = shared.share(&set(&[1, 2]));
        assert!(Arc::ptr_eq(&one, &shared.share(&set(&[2, 1]))));
        let other = shared.share(&set(&[1]));
        assert!(!Arc::ptr_eq(&one, &other));
        assert_eq!(shared.len(), 2);
        drop(other);
        assert_eq!(shared.len(), 1, "what nobody holds is forgotten");
    }
}
