// SPDX-License-Identifier: Apache-2.0
//! What the Services of a shared load balancer must know of each other, behind its lock: what changed a moment ago, which reads of AWS
//! do not show yet, and who waits for a port. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_provider_api::Owner;
use tokio::time::Instant;

/// Longer than any read shows an old state.
const MEMORY: Duration = Duration::from_mins(10);

/// The state of one shared load balancer.
#[derive(Debug)]
pub(crate) struct SharedUse {
    /// When a Service last changed something, or may have.
    pub(crate) written: Instant,
    /// When a zone was last added, or may have been.
    pub(crate) zone_added: Instant,
    /// The listeners that were deleted, by ARN: their ports, and when.
    deleted: BTreeMap<String, (u16, Instant)>,
    /// Services that were refused a port of another one, by port.
    waiting: BTreeMap<u16, BTreeSet<Owner>>,
}

impl SharedUse {
    /// Nothing is known but that another process may have changed everything until then.
    pub(crate) fn unknown_before(start: Instant) -> Self {
        Self { written: start, zone_added: start, deleted: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// The rest of the time after the last change.
    pub(crate) fn unsettled(&self, settle: Duration) -> Option<Duration> {
        let rest = (self.written + settle).saturating_duration_since(Instant::now());
        (!rest.is_zero()).then_some(rest)
    }

    /// A listener was deleted. Returns who waits for its port.
    pub(crate) fn deleted(&mut self, arn: String, port: u16) -> BTreeSet<Owner> {
        self.deleted.retain(|_, (_, at)| at.elapsed() < MEMORY);
        self.deleted.insert(arn, (port, Instant::now()));
        self.waiting.remove(&port).unwrap_or_default()
    }

    pub(crate) fn is_deleted(&self, arn: &str) -> bool {
        self.deleted.contains_key(arn)
    }

    /// Whether one of the ports became free within this time, which reads may not show yet.
    pub(crate) fn was_freed(&self, ports: &BTreeSet<u16>, within: Duration) -> bool {
        self.deleted.values().any(|(port, at)| ports.contains(port) && at.elapsed() < within)
    }

    /// The owner waits for these ports, and no others.
    pub(crate) fn wait_for(&mut self, owner: &Owner, ports: BTreeSet<u16>) {
        self.waiting.retain(|_, owners| {
            owners.remove(owner);
            !owners.is_empty()
        });
        for port in ports {
            self.waiting.entry(port).or_default().insert(owner.clone());
        }
    }
}
