// SPDX-License-Identifier: Apache-2.0
//! Until when the program answers ARP requests and neighbour solicitations for VIPs, and until when it
//! forwards. Each is one word of shared memory, so any task may write it, whatever the data plane's
//! owner does meanwhile.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_edge_packet::maps::FORWARDING;

use crate::maps::{self, Maps};
use crate::shared::SharedArray;

/// A time that never comes.
const ENDLESS: u64 = u64::MAX;

/// The leases of a data plane. Clones are the same.
#[derive(Clone, Debug)]
pub struct Leases {
    maps: Arc<Maps>,
    earlier: EarlierLeases,
}

impl Leases {
    pub(crate) fn new(maps: Arc<Maps>, earlier: EarlierLeases) -> Self {
        Self { maps, earlier }
    }

    /// Answers for the VIPs of this lease until then: a time since the start of the kernel, with
    /// suspended time (`CLOCK_BOOTTIME`). [`Duration::ZERO`] ends the lease, [`Duration::MAX`] never
    /// ends it. Returns whether there is such a lease.
    pub fn set(&self, lease: u32, until: Duration) -> bool {
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        lease != FORWARDING && self.write(lease, until)
    }

    /// Lets the program forward until then: a time since the start of the kernel, without suspended time
    /// (`CLOCK_MONOTONIC`). After that it leaves all packets to the kernel, as if it were not attached.
    /// [`Duration::MAX`] has no end. It should be later than the end of each lease.
    pub fn set_forwarding(&self, until: Duration) {
        let until = u64::try_from(until.as_nanos()).unwrap_or(ENDLESS);
        // Zero would have no end.
        self.write(FORWARDING, if until == ENDLESS { 0 } else { until.max(1) });
    }

    /// Until when the program forwards; [`Duration::MAX`] without end.
    pub fn forwarding(&self) -> Duration {
        match self.maps.leases.get(FORWARDING).unwrap_or(0) {
            0 => Duration::MAX,
            until => Duration::from_nanos(until),
        }
    }

    fn write(&self, element: u32, until: u64) -> bool {
        for leases in self.earlier.lock().iter() {
            leases.set(element, &until);
        }
        self.maps.leases.set(element, &until)
    }

    /// Until when a lease lasts; [`Duration::MAX`] if it never ends.
    pub fn get(&self, lease: u32) -> Duration {
        match self.maps.leases.get(lease).unwrap_or(0) {
            ENDLESS => Duration::MAX,
            until => Duration::from_nanos(until),
        }
    }
}

/// The leases of maps of other layouts: until this process attaches its program, an earlier one may
/// answer by them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlierLeases(Arc<Mutex<Vec<SharedArray<u64>>>>);

impl EarlierLeases {
    /// In these folders of maps.
    pub(crate) fn open(folders: Vec<PathBuf>) -> Self {
        let open = |folder: PathBuf| match maps::open_leases(&folder) {
            Ok(leases) => Some(leases),
            Err(error) => {
                let folder = folder.display();
                tracing::debug!(%folder, %error, "no leases of an earlier data plane; skipped");
                None
            }
        };
        Self(Arc::new(Mutex::new(folders.into_iter().filter_map(open).collect())))
    }

    /// New maps continue with the leases that the earlier program answers by.
    pub(crate) fn copy_to(&self, maps: &Maps) {
        let earlier = self.lock();
        for lease in 0..maps.leases.len() {
            let found = earlier.iter().filter_map(|leases| leases.get(lease));
            // Zero is a lease that has ended, but no end of forwarding.
            let latest = if lease == FORWARDING {
                found.max_by_key(|until| until.wrapping_sub(1))
            } else {
                found.max()
            };
            if let Some(until) = latest {
                maps.leases.set(lease, &until);
            }
        }
    }

    /// No program answers by them any more.
    pub(crate) fn close(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SharedArray<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
