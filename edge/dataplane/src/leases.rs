// SPDX-License-Identifier: Apache-2.0
//! Until when the program answers ARP requests and neighbour solicitations for VIPs. A lease is one
//! word of shared memory, so any task may write it, whatever the data plane's owner does meanwhile.

use std::sync::Arc;
use std::time::Duration;

use crate::maps::Maps;

/// The leases of a data plane. Clones are the same.
#[derive(Clone, Debug)]
pub struct Leases(Arc<Maps>);

impl Leases {
    pub(crate) fn new(maps: Arc<Maps>) -> Self {
        Self(maps)
    }

    /// Answers for the VIPs of this lease until then: a time since the start of the kernel, with
    /// suspended time (`CLOCK_BOOTTIME`). [`Duration::ZERO`] ends the lease, [`Duration::MAX`] never
    /// ends it. Returns whether there is such a lease.
    pub fn set(&self, lease: u32, until: Duration) -> bool {
        self.0.leases.set(lease, &u64::try_from(until.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Until when a lease lasts; [`Duration::MAX`] if it never ends.
    pub fn get(&self, lease: u32) -> Duration {
        match self.0.leases.get(lease).unwrap_or(0) {
            u64::MAX => Duration::MAX,
            until => Duration::from_nanos(until),
        }
    }
}
