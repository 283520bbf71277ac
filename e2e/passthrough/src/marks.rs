// SPDX-License-Identifier: Apache-2.0
//! A number for each target. Flows carry it as their mark, and the router's rules send packets by it. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// The mark of each target. No mark is used again, so that no flow follows an earlier target's mark to a later one.
#[derive(Debug, Default)]
pub struct Marks {
    assigned: BTreeMap<IpAddr, u32>,
}

impl Marks {
    /// The mark of a target.
    pub fn of(&mut self, target: IpAddr) -> u32 {
        let next = u32::try_from(self.assigned.len()).unwrap_or(u32::MAX - 1) + 1;
        *self.assigned.entry(target).or_insert(next)
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (IpAddr, u32)> {
        self.assigned.iter().map(|(target, mark)| (*target, *mark))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_keeps_its_mark_and_none_is_zero() {
        let mut marks = Marks::default();
        let addresses: [IpAddr; 2] = ["10.77.1.2".parse().unwrap(), "fd77::1:1".parse().unwrap()];
        assert_eq!(addresses.map(|address| marks.of(address)), [1, 2]);
        assert_eq!(marks.of([10, 77, 1, 1].into()), 3);
        assert_eq!(marks.of(addresses[0]), 1);
        assert_eq!(marks.all().count(), 3);
    }
}
