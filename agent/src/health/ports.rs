// SPDX-License-Identifier: Apache-2.0
//! The state of health-check ports. The agent's loop writes it; the health servers read it, and wait for changes of what is stated.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use steerage_model::{Family, Key};
use tokio::sync::watch;

use super::stated_ports::{PerFamily, StatedDelta, StatedPorts};
use crate::plan::{HealthPort, POLICY_GRACE_PERIOD};

/// The state of one port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStatus {
    /// The Service.
    pub service: Key,
    /// Its ready IPv4 endpoints on this node; `None`: it has no such family.
    pub v4: Option<usize>,
    /// The same for IPv6.
    pub v6: Option<usize>,
    /// The addresses of its load balancer, at which the port answers, too.
    pub vips: Arc<[IpAddr]>,
}

impl PortStatus {
    /// The count at one family's address. A load balancer may probe a dual-stack node at either address: where the Service lacks
    /// the family, the other one's count is used.
    pub fn count(&self, family: Family) -> Option<usize> {
        match family {
            Family::V4 => self.v4.or(self.v6),
            Family::V6 => self.v6.or(self.v4),
        }
    }
}

#[derive(Debug)]
struct OpenPort {
    answer: PortStatus,
    until: Option<Instant>,
}

/// The open ports. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct HealthCheckPorts(Arc<SharedPorts>);

#[derive(Debug)]
struct SharedPorts {
    /// Differs from that of any other process, whose numbers of changes mean nothing here.
    instance: u64,
    table: Mutex<PortTable>,
    /// The number of the last change of what is stated.
    changes: watch::Sender<PerFamily<u64>>,
}

impl Default for SharedPorts {
    fn default() -> Self {
        // The keys of a hasher come from the kernel's random numbers.
        let instance = RandomState::new().hash_one(());
        Self { instance, table: Mutex::default(), changes: watch::Sender::default() }
    }
}

#[derive(Debug, Default)]
struct PortTable {
    open: BTreeMap<u16, OpenPort>,
    /// The ports of each Service: its current one, and lingering ones.
    of_service: BTreeMap<Key, BTreeSet<u16>>,
    /// Lingering ports, by the time when they close.
    lingering: BTreeSet<(Instant, u16)>,
    /// Increases when a port opens, closes, or gets another Service or other VIPs.
    version: u64,
    /// Ports on which the agent cannot listen at an address of the node; `None` before it has tried for the first time.
    unserved: Option<BTreeSet<(Family, u16)>>,
    stated: PerFamily<StatedPorts>,
}

impl PortTable {
    fn insert(&mut self, port: u16, answer: PortStatus) {
        let who = |answer: &PortStatus| {
            let PortStatus { service, v4, v6, vips } = answer;
            (service.clone(), v4.is_some(), v6.is_some(), Arc::clone(vips))
        };
        let new = who(&answer);
        let service = answer.service.clone();
        let old = self.take(port);
        self.version += u64::from(old.is_none_or(|old| who(&old) != new));
        self.open.insert(port, OpenPort { answer, until: None });
        self.of_service.entry(service).or_default().insert(port);
        self.restate(port);
    }

    fn close(&mut self, port: u16) {
        self.version += u64::from(self.take(port).is_some());
        self.restate(port);
    }

    /// States what the port's servers answer.
    fn restate(&mut self, port: u16) {
        for family in [Family::V4, Family::V6] {
            let is_unserved = |unserved: &BTreeSet<_>| unserved.contains(&(family, port));
            let open = self.open.get(&port).filter(|_| !self.unserved.as_ref().is_some_and(is_unserved));
            let count = open.and_then(|open| open.answer.count(family));
            let count = count.map(|count| u32::try_from(count).unwrap_or(u32::MAX));
            self.stated.get_mut(family).set(port, count);
        }
    }

    fn take(&mut self, port: u16) -> Option<PortStatus> {
        let OpenPort { answer, until } = self.open.remove(&port)?;
        if let Some(until) = until {
            self.lingering.remove(&(until, port));
        }
        if let Some(ports) = self.of_service.get_mut(&answer.service) {
            ports.remove(&port);
            if ports.is_empty() {
                self.of_service.remove(&answer.service);
            }
        }
        Some(answer)
    }

    /// Closes a port at this time, or earlier if that is planned already.
    fn linger(&mut self, port: u16, until: Instant) {
        if let Some(open) = self.open.get_mut(&port).filter(|open| open.until.is_none()) {
            open.until = Some(until);
            self.lingering.insert((until, port));
        }
    }

    fn withdraw(&mut self, service: &Key, desired: Option<&HealthPort>, still_balanced: bool) {
        let now = Instant::now();
        let ports = self.of_service.get(service).cloned().unwrap_or_default();
        for port in ports.into_iter().filter(|port| desired.is_none_or(|desired| desired.port != *port)) {
            if still_balanced && desired.is_none() {
                // Under policy Cluster every node serves: healthy stays healthy.
                self.linger(port, now + POLICY_GRACE_PERIOD);
            } else {
                self.close(port);
            }
        }
        let Some(desired) = desired else { return };
        let fallen = |old: Option<usize>, new: Option<usize>| new.map(|new| new.min(old.unwrap_or(0)));
        let old = self.open.get(&desired.port).filter(|open| open.answer.service == *service);
        let old = old.map(|open| &open.answer);
        let answer = PortStatus {
            service: service.clone(),
            v4: fallen(old.and_then(|old| old.v4), desired.v4),
            v6: fallen(old.and_then(|old| old.v6), desired.v6),
            vips: Arc::clone(&desired.vips),
        };
        self.insert(desired.port, answer);
    }
}

impl HealthCheckPorts {
    /// Call it before a change is in the kernel: counts fall and none rises; a new port opens with 0. A port that ends with policy
    /// Local lingers for [`POLICY_GRACE_PERIOD`] if a load balancer still probes it.
    pub fn withdraw(&self, service: &Key, desired: Option<&HealthPort>, still_balanced: bool) {
        self.change(|table| table.withdraw(service, desired, still_balanced));
    }

    /// Call it once a change is in the kernel: counts become what is desired.
    pub fn publish(&self, desired: &BTreeMap<Key, HealthPort>) {
        self.change(|table| {
            for (service, health) in desired {
                let HealthPort { port: _, v4, v6, vips } = health;
                let answer =
                    PortStatus { service: service.clone(), v4: *v4, v6: *v6, vips: Arc::clone(vips) };
                table.insert(health.port, answer);
            }
        });
    }

    /// Closes ports that have lingered long enough.
    pub fn expire(&self) {
        self.expire_at(Instant::now());
    }

    fn expire_at(&self, now: Instant) {
        self.change(|table| {
            while let Some((_, port)) = table.lingering.first().copied().filter(|(until, _)| *until <= now) {
                table.close(port);
            }
        });
    }

    /// Call it when servers were opened, with the ports that have none at an address of the node: a load balancer that probes does not
    /// find the agent there, so they are not stated. Before the first call nothing is.
    pub(super) fn set_unserved(&self, unserved: BTreeSet<(Family, u16)>) {
        self.change(|table| {
            let old = table.unserved.take().unwrap_or_default();
            let changed: Vec<_> = old.symmetric_difference(&unserved).map(|(_, port)| *port).collect();
            table.unserved = Some(unserved);
            for port in changed {
                table.restate(port);
            }
        });
    }

    /// When the next lingering port closes.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.lock().lingering.first().map(|(until, _)| *until)
    }

    /// Changes whenever the set of open ports, their Services or VIPs change.
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// The number of open ports.
    pub fn count(&self) -> usize {
        self.lock().open.len()
    }

    /// The state of a port; `None` if it is not open.
    pub fn answer(&self, port: u16) -> Option<PortStatus> {
        self.lock().open.get(&port).map(|open| open.answer.clone())
    }

    /// All open ports.
    pub fn all(&self) -> BTreeMap<u16, PortStatus> {
        self.lock().open.iter().map(|(port, open)| (*port, open.answer.clone())).collect()
    }

    /// Says from which process numbers of changes are.
    pub(super) fn instance(&self) -> u64 {
        self.0.instance
    }

    /// What is stated at addresses of this family to a client that knows this change. `None` before servers were opened for the first
    /// time: ports may be missing then.
    pub(super) fn stated_since(&self, family: Family, known: Option<u64>) -> Option<StatedDelta> {
        let table = self.lock();
        table.unserved.as_ref()?;
        Some(table.stated.get(family).since(known))
    }

    /// Waits for a change of what is stated at addresses of this family, after this change.
    pub(super) async fn changed_since(&self, family: Family, known: u64) {
        let mut changes = self.0.changes.subscribe();
        // The sender lives as long as `self`.
        let _ = changes.wait_for(|changes| *changes.get(family) > known).await;
    }

    /// Changes the table, and wakes those that wait if what is stated has changed.
    fn change(&self, change: impl FnOnce(&mut PortTable)) {
        let mut table = self.lock();
        change(&mut table);
        let latest = table.stated.map(StatedPorts::change);
        self.0.changes.send_if_modified(|known| std::mem::replace(known, latest) != latest);
    }

    fn lock(&self) -> MutexGuard<'_, PortTable> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key() -> Key {
        Key::new("shop", "web")
    }

    fn health(port: u16, v4: usize) -> HealthPort {
        HealthPort { port, v4: Some(v4), v6: None, vips: Arc::default() }
    }

    fn count(ports: &HealthCheckPorts, port: u16) -> Option<usize> {
        ports.answer(port).and_then(|answer| answer.v4)
    }

    #[test]
    fn counts_fall_at_once_and_rise_with_the_rules() {
        let ports = HealthCheckPorts::default();
        ports.withdraw(&key(), Some(&health(31000, 2)), true);
        assert_eq!(count(&ports, 31000), Some(0), "open, but no rules yet");
        ports.publish(&[(key(), health(31000, 2))].into());
        assert_eq!(count(&ports, 31000), Some(2));
        ports.withdraw(&key(), Some(&health(31000, 3)), true);
        assert_eq!(count(&ports, 31000), Some(2));
        ports.withdraw(&key(), Some(&health(31000, 0)), true);
        assert_eq!(count(&ports, 31000), Some(0));
    }

    #[test]
    fn another_port_closes_the_old_one_and_starts_from_nothing() {
        let ports = HealthCheckPorts::default();
        ports.publish(&[(key(), health(31000, 2))].into());
        ports.withdraw(&key(), Some(&health(31001, 2)), true);
        assert_eq!((count(&ports, 31000), count(&ports, 31001)), (None, Some(0)));
    }

    #[test]
    fn health_port_outlives_policy_change_but_not_deletion() {
        let ports = HealthCheckPorts::default();
        ports.publish(&[(key(), health(31000, 2))].into());
        ports.withdraw(&key(), None, true);
        let end = ports.next_expiry().unwrap();
        ports.expire_at(end.checked_sub(Duration::from_secs(1)).unwrap());
        assert_eq!(count(&ports, 31000), Some(2));
        // Another Service gets the port.
        let other = Key::new("shop", "other");
        ports.withdraw(&other, Some(&health(31000, 1)), true);
        assert_eq!(count(&ports, 31000), Some(0));
        ports.publish(&[(other.clone(), health(31000, 1))].into());
        ports.withdraw(&other, None, false);
        assert_eq!(count(&ports, 31000), None);
        // A port whose time is over closes.
        ports.publish(&[(key(), health(31000, 2))].into());
        ports.withdraw(&key(), None, true);
        let end = ports.next_expiry().unwrap();
        ports.expire_at(end);
        assert_eq!((count(&ports, 31000), ports.next_expiry()), (None, None));
    }
}
