// SPDX-License-Identifier: Apache-2.0
//! What is answered on which health-check port, and whether the data plane follows. Shared between the loop that applies plans,
//! which writes, and the servers, which read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use steerage_model::{Family, Key};

use crate::plan::{HealthPort, POLICY_GRACE_PERIOD};

/// A change that has not reached the kernel for so long means that the data plane is stuck (twice kube-proxy's sync period).
const STUCK: Duration = Duration::from_mins(1);

/// What one port answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStatus {
    /// The Service.
    pub service: Key,
    /// Its ready endpoints on this node, by IPv4 and IPv6; `None`: it has no such family.
    pub v4: Option<usize>,
    /// See `v4`.
    pub v6: Option<usize>,
}

impl PortStatus {
    /// What is answered by one family. A load balancer may ask a node of both families by either of its addresses, whatever
    /// family the Service has: for the one that it has not, the other answers.
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

/// The open ports. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct HealthCheckPorts(Arc<Mutex<PortTable>>);

#[derive(Debug, Default)]
struct PortTable {
    open: BTreeMap<u16, OpenPort>,
    /// The ports of each Service: the one that it has, and those that linger.
    of_service: BTreeMap<Key, BTreeSet<u16>>,
    /// Those that linger, by when they close.
    lingering: BTreeSet<(Instant, u16)>,
    /// Counts up when a port opens, closes or gets another Service.
    version: u64,
}

impl PortTable {
    fn insert(&mut self, port: u16, answer: PortStatus) {
        let who = |answer: &PortStatus| (answer.service.clone(), answer.v4.is_some(), answer.v6.is_some());
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

    /// Closes a port at some time, unless it is to be closed sooner already.
    fn linger(&mut self, port: u16, until: Instant) {
        if let Some(open) = self.open.get_mut(&port).filter(|open| open.until.is_none()) {
            open.until = Some(until);
            self.lingering.insert((until, port));
        }
    }
}

impl HealthCheckPorts {
    /// Takes in what is desired before it is in the kernel: counts fall, none rises, and a new port opens with nothing. A port that
    /// goes with policy Local is answered for a while where a load balancer, which still probes it, stands before the Service.
    pub fn withdraw(&self, service: &Key, desired: Option<&HealthPort>, still_balanced: bool) {
        let mut table = self.lock();
        let now = Instant::now();
        let ports = table.of_service.get(service).cloned().unwrap_or_default();
        for port in ports.into_iter().filter(|port| desired.is_none_or(|desired| desired.port != *port)) {
            if still_balanced && desired.is_none() {
                // The rules of policy Cluster serve on every node: what was healthy goes on being so for a while.
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
        };
        table.insert(desired.port, answer);
    }

    /// Takes in what is in the kernel now.
    pub fn publish(&self, desired: &BTreeMap<Key, HealthPort>) {
        let mut table = self.lock();
        for (service, health) in desired {
            let answer = PortStatus { service: service.clone(), v4: health.v4, v6: health.v6 };
            table.insert(health.port, answer);
        }
    }

    /// Closes the ports that have lingered until their load balancers had to follow.
    pub fn expire(&self) {
        self.expire_at(Instant::now());
    }

    fn expire_at(&self, now: Instant) {
        let mut table = self.lock();
        while let Some((_, port)) = table.lingering.first().copied().filter(|(until, _)| *until <= now) {
            table.close(port);
        }
    }

    /// When the first of those closes.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.lock().lingering.first().map(|(until, _)| *until)
    }

    /// Changes when other ports are open, or for other Services, than before.
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// How many ports are open.
    pub fn count(&self) -> usize {
        self.lock().open.len()
    }

    /// What a port answers; `None` when it is not one.
    pub fn answer(&self, port: u16) -> Option<PortStatus> {
        self.lock().open.get(&port).map(|open| open.answer.clone())
    }

    /// All ports with their Services.
    pub fn all(&self) -> BTreeMap<u16, PortStatus> {
        self.lock().open.iter().map(|(port, open)| (*port, open.answer.clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, PortTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the data plane follows, and whether the node is fit for load balancers. Clones are the same.
#[derive(Clone, Default)]
pub struct ProxyHealth(Arc<Mutex<ProxyHealthInner>>);

/// Says for how long the longest silent watch has been silent.
type Silence = Box<dyn Fn() -> Option<Duration> + Send>;

#[derive(Default)]
struct ProxyHealthInner {
    pending: Option<Instant>,
    /// The silence of the API server that is borne, and what measures it.
    silence: Option<(Duration, Silence)>,
    updated: Option<Timestamp>,
    eligible: bool,
}

impl std::fmt::Debug for ProxyHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyHealth").field("follows", &self.is_current()).finish_non_exhaustive()
    }
}

impl ProxyHealth {
    /// Something changed that is not in the kernel yet.
    pub fn queued(&self) {
        self.lock().pending.get_or_insert_with(Instant::now);
    }

    /// All changes are in the kernel.
    pub fn updated(&self) {
        let mut state = self.lock();
        state.pending = None;
        state.updated = Some(Timestamp::now());
    }

    /// Whether the node is fit for load balancers: known, not being deleted, not about to be.
    pub fn set_eligible(&self, eligible: bool) {
        self.lock().eligible = eligible;
    }

    /// Takes the node for unhealthy while a watch of the API server has been silent for longer than the limit, as `silence` tells.
    pub fn limit_watch_silence(
        &self,
        limit: Duration,
        silence: impl Fn() -> Option<Duration> + Send + 'static,
    ) {
        self.lock().silence = Some((limit, Box::new(silence)));
    }

    /// Whether load balancers may rely on this node: the data plane follows, and the API server is heard where that is asked for.
    pub fn is_healthy(&self) -> bool {
        let heard = |(limit, silence): &(Duration, Silence)| silence().is_none_or(|silent| silent <= *limit);
        self.is_current() && self.lock().silence.as_ref().is_none_or(heard)
    }

    /// Whether the data plane follows.
    pub fn is_current(&self) -> bool {
        self.is_current_at(Instant::now())
    }

    fn is_current_at(&self, now: Instant) -> bool {
        self.lock().pending.is_none_or(|since| now.saturating_duration_since(since) < STUCK)
    }

    /// See [`ProxyHealth::set_eligible`].
    pub fn is_eligible(&self) -> bool {
        self.lock().eligible
    }

    /// When all changes were last in the kernel.
    pub fn last_updated(&self) -> Option<Timestamp> {
        self.lock().updated
    }

    fn lock(&self) -> MutexGuard<'_, ProxyHealthInner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key::new("shop", "web")
    }

    fn health(port: u16, v4: usize) -> HealthPort {
        HealthPort { port, v4: Some(v4), v6: None }
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
    fn a_stuck_data_plane_is_unhealthy_until_it_follows_again() {
        let proxy_health = ProxyHealth::default();
        assert!(proxy_health.is_current_at(Instant::now() + STUCK * 2), "nothing is pending");
        proxy_health.queued();
        let start = Instant::now();
        assert!(proxy_health.is_current_at(start + STUCK / 2));
        // Further changes do not start the clock again.
        proxy_health.queued();
        assert!(!proxy_health.is_current_at(start + STUCK));
        proxy_health.updated();
        assert!(proxy_health.is_current_at(start + STUCK));
    }

    #[test]
    fn another_port_closes_the_old_one_and_starts_from_nothing() {
        let ports = HealthCheckPorts::default();
        ports.publish(&[(key(), health(31000, 2))].into());
        ports.withdraw(&key(), Some(&health(31001, 2)), true);
        assert_eq!((count(&ports, 31000), count(&ports, 31001)), (None, Some(0)));
    }

    #[test]
    fn after_a_flip_of_policy_the_port_lingers_and_after_deletion_it_does_not() {
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
