// SPDX-License-Identifier: Apache-2.0
//! Numbers for what the kernel's maps refer to. Pure.

use std::collections::BTreeSet;

use crate::hash::jhash;

/// Numbers in use. No two things have one number: the rules could not tell them apart, and names may be chosen to collide.
#[derive(Debug, Clone, Default)]
pub(super) struct Numbers(BTreeSet<u32>);

impl Numbers {
    /// The number of nothing.
    pub(super) const NONE: u32 = u32::MAX;

    /// A free number, except [`Numbers::NONE`]. It depends on the name alone, except where two names have the same hash: a new process finds the numbers of its
    /// predecessor.
    pub(super) fn take(&mut self, name: &str) -> u32 {
        let mut number = jhash(name.as_bytes(), 0);
        while number == Self::NONE || !self.0.insert(number) {
            number = number.wrapping_add(1);
        }
        number
    }

    /// Frees a number.
    pub(super) fn give_back(&mut self, number: u32) {
        self.0.remove(&number);
    }
}
