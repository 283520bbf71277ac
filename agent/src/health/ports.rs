// SPDX-License-Identifier: Apache-2.0
//! The state of health-check ports and of the node. The agent's loop writes it; the health servers read it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use steerage_model::{Family, Key};

use crate::plan::{HealthPort, POLICY_GRACE_PERIOD};

/// A change that waits this long for the kernel, or its plan, means a stuck data plane (twice kube-proxy's sync period).
const STUCK: Duration = Duration::from_mins(1);

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

/// Whether load balancers may rely on this node. Clones share it.
#[derive(Clone, Default)]
pub struct ProxyHealth(Arc<Mutex<ProxyHealthInner>>);

/// Measures the longest silence of a watch.
type Silence = Box<dyn Fn() -> Option<Duration> + Send>;

#[derive(Default)]
struct ProxyHealthInner {
    /// Since when a change waits for the kernel.
    pending: Option<Instant>,
    /// When the round of the loop began.
    round: Option<Instant>,
    /// The longest silence that is healthy, and its measurement.
    silence: Option<(Duration, Silence)>,
    updated: Option<Timestamp>,
    eligible: bool,
}

impl std::fmt::Debug for ProxyHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyHealth").field("is_current", &self.is_current()).finish_non_exhaustive()
    }
}

impl ProxyHealth {
    /// A round of the loop begins: it plans what has changed, and writes it.
    pub fn round_begun(&self) {
        self.lock().round = Some(Instant::now());
    }

    /// The round has ended. What it could not write still waits.
    pub fn round_ended(&self) {
        self.lock().round = None;
    }

    /// A change waits for the kernel, since this round began.
    pub fn queued(&self) {
        let mut state = self.lock();
        let since = state.round.unwrap_or_else(Instant::now);
        state.pending.get_or_insert(since);
    }

    /// All planned changes are in the kernel. Others may wait for their turn: a tenant who changes very many Services makes no node
    /// unhealthy.
    pub fn updated(&self) {
        let mut state = self.lock();
        state.pending = None;
        state.updated = Some(Timestamp::now());
    }

    /// Sets whether load balancers may use the node: it exists, is not being deleted, and is not about to be.
    pub fn set_eligible(&self, eligible: bool) {
        self.lock().eligible = eligible;
    }

    /// Makes the node unhealthy while `silence`, the longest silence of a watch, exceeds the limit.
    pub fn limit_watch_silence(
        &self,
        limit: Duration,
        silence: impl Fn() -> Option<Duration> + Send + 'static,
    ) {
        self.lock().silence = Some((limit, Box::new(silence)));
    }

    /// Whether load balancers may rely on this node: the data plane is current, and no watch is silent for too long.
    pub fn is_healthy(&self) -> bool {
        let heard = |(limit, silence): &(Duration, Silence)| silence().is_none_or(|silent| silent <= *limit);
        self.is_current() && self.lock().silence.as_ref().is_none_or(heard)
    }

    /// Whether the data plane is current: no change waits for too long, and nothing is planned for too long.
    pub fn is_current(&self) -> bool {
        self.is_current_at(Instant::now())
    }

    fn is_current_at(&self, now: Instant) -> bool {
        self.busy_at(now) < STUCK
    }

    /// How long a change waits for the kernel, or the loop plans and writes.
    pub fn busy_for(&self) -> Duration {
        self.busy_at(Instant::now())
    }

    fn busy_at(&self, now: Instant) -> Duration {
        let state = self.lock();
        let since = state.pending.into_iter().chain(state.round).min();
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// See [`ProxyHealth::set_eligible`].
    pub fn is_eligible(&self) -> bool {
        self.lock().eligible
    }

    /// When all changes were in the kernel last.
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
    fn stuck_data_plane_is_unhealthy_until_a_write_succeeds() {
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
    fn planning_that_takes_too_long_is_unhealthy() {
        let proxy_health = ProxyHealth::default();
        proxy_health.round_begun();
        let start = Instant::now();
        assert!(proxy_health.is_current_at(start + STUCK / 2));
        assert!(!proxy_health.is_current_at(start + STUCK));
        // What was planned waits since then.
        std::thread::sleep(Duration::from_millis(2));
        proxy_health.queued();
        proxy_health.round_ended();
        assert!(!proxy_health.is_current_at(start + STUCK));
        proxy_health.updated();
        assert!(proxy_health.is_current_at(start + STUCK));
        // Nothing had to be written.
        proxy_health.round_begun();
        proxy_health.round_ended();
        assert_eq!(proxy_health.busy_for(), Duration::ZERO);
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
