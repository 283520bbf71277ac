// SPDX-License-Identifier: Apache-2.0
//! The state of health-check ports. The agent's loop writes it; the health servers read it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use steerage_model::{Family, Key};

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
pub struct HealthCheckPorts(Arc<Mutex<PortTable>>);

#[derive(Debug, Default)]
struct PortTable {
    open: BTreeMap<u16, OpenPort>,
    /// The ports of each Service: its current one, and lingering ones.
    of_service: BTreeMap<Key, BTreeSet<u16>>,
    /// Lingering ports, by the time when they close.
    lingering: BTreeSet<(Instant, u16)>,
    /// Increases when a port opens, closes, or gets another Service or other VIPs.
    version: u64,
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
    }

    fn close(&mut self, port: u16) {
        self.version += u64::from(self.take(port).is_some());
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
}

impl HealthCheckPorts {
    /// Call it before a change is in the kernel: counts fall and none rises; a new port opens with 0. A port that ends with policy
    /// Local lingers for [`POLICY_GRACE_PERIOD`] if a load balancer still probes it.
    pub fn withdraw(&self, service: &Key, desired: Option<&HealthPort>, still_balanced: bool) {
        let mut table = self.lock();
        let now = Instant::now();
        let ports = table.of_service.get(service).cloned().unwrap_or_default();
        for port in ports.into_iter().filter(|port| desired.is_none_or(|desired| desired.port != *port)) {
            if still_balanced && desired.is_none() {
                // Under policy Cluster every node serves: healthy stays healthy.
                table.linger(port, now + POLICY_GRACE_PERIOD);
            } else {
                table.close(port);
            }
        }
        let Some(desired) = desired else { return };
        let fallen = |old: Option<usize>, new: Option<usize>| new.map(|new| new.min(old.unwrap_or(0)));
        let old = table.open.get(&desired.port).filter(|open| open.answer.service == *service);
        let old = old.map(|open| &open.answer);
        let answer = PortStatus {
            service: service.clone(),
            v4: fallen(old.and_then(|old| old.v4), desired.v4),
            v6: fallen(old.and_then(|old| old.v6), desired.v6),
            vips: Arc::clone(&desired.vips),
        };
        table.insert(desired.port, answer);
    }

    /// Call it once a change is in the kernel: counts become what is desired.
    pub fn publish(&self, desired: &BTreeMap<Key, HealthPort>) {
        let mut table = self.lock();
        for (service, health) in desired {
            let HealthPort { port: _, v4, v6, vips } = health;
            let answer = PortStatus { service: service.clone(), v4: *v4, v6: *v6, vips: Arc::clone(vips) };
            table.insert(health.port, answer);
        }
    }

    /// Closes ports that have lingered long enough.
    pub fn expire(&self) {
        self.expire_at(Instant::now());
    }

    fn expire_at(&self, now: Instant) {
        let mut table = self.lock();
        while let Some((_, port)) = table.lingering.first().copied().filter(|(until, _)| *until <= now) {
            table.close(port);
        }
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

    fn lock(&self) -> MutexGuard<'_, PortTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
