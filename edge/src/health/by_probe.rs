// SPDX-License-Identifier: Apache-2.0
//! What is known of the health of all targets. `engine` inserts what `prober` finds, and the plan reads it. Pure.
//!
//! Most nodes have no endpoint of most Services, and say so. That is held once for each node, as the set of the ports that it states,
//! and which nodes state the same share it. Only what differs from "no local endpoint" has a value of its own.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_api::{HealthCheck, HealthCheckProtocol, TargetState};
use steerage_model::TunnelReceiver;

use super::{Probe, TargetHealth};
use crate::checks::{CheckSet, Checks, urgency};
use crate::port_set::PortSet;

/// What a probe asks an address. Checks that differ in their times and thresholds ask the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProbeRequest {
    protocol: HealthCheckProtocol,
    port: u16,
    path: Option<String>,
}

impl From<&HealthCheck> for ProbeRequest {
    fn from(check: &HealthCheck) -> Self {
        Self { protocol: check.protocol, port: check.port, path: check.path.clone() }
    }
}

/// Of every probe that was tried at least once, answered or not, or that a node's statement decides. A new probe that asks the same
/// as another one begins with its health: an edited interval or threshold says nothing about the target.
#[derive(Clone, Debug)]
pub(crate) struct HealthByProbe {
    by_address: HashMap<IpAddr, OfAddress>,
    /// The addresses that have values for checks of a port.
    by_port: HashMap<u16, HashSet<IpAddr>>,
    /// The addresses that state the same ports, each set once.
    stating: Vec<(Arc<PortSet>, HashSet<IpAddr>)>,
    /// The number of probes whose target is healthy.
    healthy: usize,
    without_endpoint: TargetHealth,
}

impl Default for HealthByProbe {
    fn default() -> Self {
        Self {
            by_address: HashMap::new(),
            by_port: HashMap::new(),
            stating: Vec::new(),
            healthy: 0,
            without_endpoint: TargetHealth::without_endpoint(),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct OfAddress {
    by_check: HashMap<HealthCheck, TargetHealth>,
    /// The last change of any probe that asks this.
    by_request: HashMap<ProbeRequest, TargetHealth>,
    /// The ports that the node states, or stated last.
    stated: Option<Arc<PortSet>>,
    /// What the node states of its end of the tunnel.
    tunnel_receiver: Option<TunnelReceiver>,
}

impl OfAddress {
    /// The ports of checks with a value.
    fn ports(&self) -> HashSet<u16> {
        self.by_check.keys().map(|check| check.port).collect()
    }

    fn has_value_at(&self, port: u16) -> bool {
        self.by_check.keys().any(|check| check.port == port)
    }

    fn healthy(&self) -> usize {
        self.by_check.values().filter(|health| health.is_healthy()).count()
    }

    fn value(&self, check: &HealthCheck) -> Option<&TargetHealth> {
        self.by_check.get(check).or_else(|| self.by_request.get(&check.into()))
    }
}

impl HealthByProbe {
    pub(crate) fn get(&self, probe: &Probe) -> Option<&TargetHealth> {
        let of_address = self.by_address.get(&probe.address)?;
        let is_stated = || states(of_address, &probe.check);
        of_address.value(&probe.check).or_else(|| is_stated().then_some(&self.without_endpoint))
    }

    /// Whether there is a value for this probe, or one that asks the same. Otherwise all that can be known is that there is no endpoint.
    pub(crate) fn has_value(&self, probe: &Probe) -> bool {
        self.by_address.get(&probe.address).is_some_and(|of_address| of_address.value(&probe.check).is_some())
    }

    /// Whether this is what was inserted last for the probe, or what its node states.
    pub(crate) fn is_known(&self, probe: &Probe, health: &TargetHealth) -> bool {
        let Some(of_address) = self.by_address.get(&probe.address) else { return false };
        match of_address.by_check.get(&probe.check) {
            Some(known) => known == health,
            None => lacks_endpoint(health) && states(of_address, &probe.check),
        }
    }

    pub(crate) fn insert(&mut self, probe: Probe, health: TargetHealth) {
        let Probe { address, check } = probe;
        let of_address = self.by_address.entry(address).or_default();
        self.healthy += usize::from(health.is_healthy());
        of_address.by_request.insert((&check).into(), health.clone());
        self.by_port.entry(check.port).or_default().insert(address);
        let before = of_address.by_check.insert(check.clone(), health);
        self.healthy -= usize::from(before.as_ref().is_some_and(TargetHealth::is_healthy));
        self.drop_stated(address, &[check]);
    }

    /// The node at this address states these ports: of those without a value it has no local endpoint. Returns the ports that it states
    /// now and did not, or no longer; `None` if it stated nothing before.
    pub(crate) fn set_stated(&mut self, address: IpAddr, ports: Arc<PortSet>) -> Option<Vec<u16>> {
        let before = self.forget_stated(address);
        let differing = |before: Arc<PortSet>| before.without(&ports).chain(ports.without(&before)).collect();
        let changed = before.map(differing);
        match self.stating.iter_mut().find(|(set, _)| Arc::ptr_eq(set, &ports)) {
            Some((_, addresses)) => _ = addresses.insert(address),
            None => self.stating.push((Arc::clone(&ports), [address].into())),
        }
        let of_address = self.by_address.entry(address).or_default();
        of_address.stated = Some(ports);
        let checks: Vec<_> = of_address.by_check.keys().cloned().collect();
        self.drop_stated(address, &checks);
        changed
    }

    fn forget_stated(&mut self, address: IpAddr) -> Option<Arc<PortSet>> {
        let before = self.by_address.get_mut(&address).and_then(|of_address| of_address.stated.take());
        self.stating.retain_mut(|(set, addresses)| {
            if before.as_ref().is_some_and(|before| Arc::ptr_eq(set, before)) {
                addresses.remove(&address);
            }
            !addresses.is_empty()
        });
        before
    }

    /// Drops the values of these checks that the node's statement says as well.
    fn drop_stated(&mut self, address: IpAddr, checks: &[HealthCheck]) {
        let Some(of_address) = self.by_address.get_mut(&address) else { return };
        for check in checks {
            let health = of_address.by_check.get(check);
            if !states(of_address, check) || !health.is_some_and(lacks_endpoint) {
                continue;
            }
            of_address.by_check.remove(check);
            of_address.by_request.remove(&check.into());
            if !of_address.has_value_at(check.port) {
                forget_port(&mut self.by_port, check.port, address);
            }
        }
    }

    /// Forgets all but these checks, which are followed from now on. New ones begin with what is known.
    pub(crate) fn set_checks(&mut self, checks: &Checks) {
        let addresses: Vec<_> = self.by_address.keys().copied().collect();
        for address in addresses {
            self.set_checks_of(address, checks.of(address));
        }
    }

    /// The same for the checks of one address.
    pub(crate) fn set_checks_of(&mut self, address: IpAddr, sets: &[Arc<CheckSet>]) {
        let Some(of_address) = self.by_address.get_mut(&address) else { return };
        let before = of_address.ports();
        self.healthy -= of_address.healthy();
        let OfAddress { by_check, by_request, .. } = of_address;
        for (request, health) in &*by_request {
            for check in sets.iter().flat_map(|set| set.at(request.port)) {
                if ProbeRequest::from(check) == *request && !by_check.contains_key(check) {
                    by_check.insert(check.clone(), health.clone());
                }
            }
        }
        by_check.retain(|check, _| urgency(sets, check).is_some());
        let asked: HashSet<ProbeRequest> = by_check.keys().map(ProbeRequest::from).collect();
        by_request.retain(|request, _| asked.contains(request));
        self.healthy += of_address.healthy();
        let now = of_address.ports();
        for port in before.difference(&now) {
            forget_port(&mut self.by_port, *port, address);
        }
        for port in now.difference(&before) {
            self.by_port.entry(*port).or_default().insert(address);
        }
        if sets.is_empty() {
            self.forget_stated(address);
            self.by_address.remove(&address);
        }
    }

    /// The number of probes whose target is healthy.
    pub(crate) fn healthy(&self) -> usize {
        self.healthy
    }

    /// Whether the node at this address states ports, or did.
    pub(crate) fn is_stating(&self, address: IpAddr) -> bool {
        self.by_address.get(&address).is_some_and(|of_address| of_address.stated.is_some())
    }

    /// What the node at this address states of its end of the tunnel, or stated last.
    pub(crate) fn tunnel_receiver(&self, address: IpAddr) -> Option<TunnelReceiver> {
        self.by_address.get(&address)?.tunnel_receiver
    }

    /// The node states this, or nothing any more. Returns what it stated before.
    pub(crate) fn set_tunnel_receiver(
        &mut self,
        address: IpAddr,
        receiver: Option<TunnelReceiver>,
    ) -> Option<TunnelReceiver> {
        std::mem::replace(&mut self.by_address.entry(address).or_default().tunnel_receiver, receiver)
    }

    /// The addresses of which more may be known for checks of this port than that they have no endpoint: those with a value, and those
    /// that state other ports. Those that state nothing are not among them.
    pub(crate) fn differing(&self, port: u16) -> impl Iterator<Item = IpAddr> {
        let others = self.stating.iter().filter(move |(set, _)| !set.contains(port));
        let others = others.flat_map(|(_, addresses)| addresses);
        self.by_port.get(&port).into_iter().flatten().chain(others).copied()
    }

    /// The number of values.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_address.values().map(|of_address| of_address.by_check.len()).sum()
    }
}

fn forget_port(by_port: &mut HashMap<u16, HashSet<IpAddr>>, port: u16, address: IpAddr) {
    if let Some(addresses) = by_port.get_mut(&port) {
        addresses.remove(&address);
        if addresses.is_empty() {
            by_port.remove(&port);
        }
    }
}

/// Whether the statement of the node decides this check unless there is a value.
fn states(of_address: &OfAddress, check: &HealthCheck) -> bool {
    check.protocol == HealthCheckProtocol::Http
        && of_address.stated.as_ref().is_some_and(|stated| stated.contains(check.port))
}

fn lacks_endpoint(health: &TargetHealth) -> bool {
    health.state == TargetState::Unhealthy && health.lacks_endpoint
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy, prop_assert_eq, proptest};
    use std::collections::{BTreeMap, BTreeSet};

    fn check() -> HealthCheck {
        HealthCheck {
            protocol: HealthCheckProtocol::Http,
            port: 1,
            path: None,
            interval_milliseconds: 1000,
            timeout_milliseconds: 1000,
            healthy_threshold: 1,
            unhealthy_threshold: 2,
        }
    }

    fn probe(number: u8, port: u16) -> Probe {
        Probe { address: [10, 0, 0, number].into(), check: HealthCheck { port, ..check() } }
    }

    fn healthy() -> TargetHealth {
        TargetHealth { state: TargetState::Healthy, reason: String::new(), ..TargetHealth::default() }
    }

    fn followed(probes: &[&Probe]) -> Checks {
        Checks::of_probes(&probes.iter().copied().cloned().collect(), &HashSet::new())
    }

    #[test]
    fn health_is_inherited_by_a_probe_that_asks_the_same() {
        let changed = |change: fn(&mut HealthCheck)| {
            let mut changed = probe(1, 1);
            change(&mut changed.check);
            changed
        };
        let (old, slower) = (probe(1, 1), changed(|check| check.interval_milliseconds = 5000));
        let mut health = HealthByProbe::default();
        health.insert(old.clone(), healthy());
        for other in [
            changed(|check| check.port = 2),
            changed(|check| check.path = Some("/x".to_owned())),
            changed(|check| check.protocol = HealthCheckProtocol::Tcp),
            probe(2, 1),
        ] {
            assert_eq!(health.get(&other), None, "{other:?}");
        }
        assert_eq!(health.get(&slower), Some(&healthy()));
        health.set_checks(&followed(&[&slower]));
        assert_eq!((health.len(), health.get(&slower)), (1, Some(&healthy())));
        health.set_checks(&Checks::default());
        assert_eq!((health.len(), health.get(&old)), (0, None));
    }

    #[test]
    fn stated_port_has_a_value_while_it_has_an_endpoint() {
        let (one, tcp) = (
            probe(1, 1),
            Probe { check: HealthCheck { protocol: HealthCheckProtocol::Tcp, ..check() }, ..probe(1, 1) },
        );
        let mut health = HealthByProbe::default();
        let address = one.address;
        let stated = |ports: &[u16]| Arc::new(ports.iter().copied().collect::<PortSet>());
        assert_eq!(health.get(&one), None);
        health.set_stated(address, stated(&[1, 2]));
        let without = TargetHealth::without_endpoint();
        assert_eq!((health.get(&one), health.get(&tcp)), (Some(&without), None));
        assert_eq!(health.differing(1).count(), 0);
        assert_eq!(health.differing(3).collect::<Vec<_>>(), [address], "it does not state this one");
        health.insert(one.clone(), healthy());
        assert_eq!((health.get(&one), health.healthy()), (Some(&healthy()), 1));
        assert_eq!(health.differing(1).collect::<Vec<_>>(), [address]);
        let lost = TargetHealth { weight: Some(3), ..without.clone() };
        health.insert(one.clone(), lost);
        assert_eq!((health.get(&one), health.len(), health.healthy()), (Some(&without), 0, 0));
        let failed = TargetHealth { lacks_endpoint: false, ..without.clone() };
        health.insert(one.clone(), failed.clone());
        health.set_stated(address, stated(&[2]));
        assert_eq!((health.get(&one), health.get(&probe(1, 2))), (Some(&failed), Some(&without)));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u8, u16, u8),
        Stated(u8, BTreeSet<u16>),
        Follow(BTreeSet<(u8, u16)>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let ports = || proptest::collection::btree_set(0_u16..3, 0..3);
        let step = proptest::prop_oneof![
            (0_u8..3, 0_u16..3, 0_u8..3).prop_map(|(node, port, state)| Step::Insert(node, port, state)),
            (0_u8..3, ports()).prop_map(|(node, ports)| Step::Stated(node, ports)),
            proptest::collection::btree_set((0_u8..3, 0_u16..3), 0..9).prop_map(Step::Follow),
        ];
        proptest::collection::vec(step, 0..30)
    }

    proptest! {
        /// As if each target had a value.
        #[test]
        fn holds_what_a_value_for_each_target_would(steps in steps()) {
            let (mut health, mut values, mut stated) = (HealthByProbe::default(), BTreeMap::new(), BTreeMap::new());
            let mut shared = crate::port_set::PortSetPool::default();
            for step in steps {
                match step {
                    Step::Insert(node, port, state) => {
                        let value = match state {
                            0 => TargetHealth::without_endpoint(),
                            1 => healthy(),
                            _ => TargetHealth { lacks_endpoint: false, ..TargetHealth::without_endpoint() },
                        };
                        health.insert(probe(node, port), value.clone());
                        let ports = stated.get(&node);
                        if value.lacks_endpoint && ports.is_some_and(|ports: &BTreeSet<u16>| ports.contains(&port)) {
                            values.remove(&(node, port));
                        } else {
                            values.insert((node, port), value);
                        }
                    }
                    Step::Stated(node, ports) => {
                        let set = shared.share(&Arc::new(ports.iter().copied().collect()));
                        health.set_stated(probe(node, 0).address, set);
                        stated.insert(node, ports);
                        let is_stated = |node: &u8, port: &u16| {
                            stated.get(node).is_some_and(|ports: &BTreeSet<u16>| ports.contains(port))
                        };
                        values.retain(|(node, port), value| !value.lacks_endpoint || !is_stated(node, port));
                    }
                    Step::Follow(probes) => {
                        let all: Vec<_> = probes.iter().map(|(node, port)| probe(*node, *port)).collect();
                        health.set_checks(&followed(&all.iter().collect::<Vec<_>>()));
                        values.retain(|key, _| probes.contains(key));
                        stated.retain(|node, _| probes.iter().any(|(other, _)| other == node));
                    }
                }
                for (node, port) in (0..3).flat_map(|node| (0..3).map(move |port| (node, port))) {
                    let ports = stated.get(&node);
                    let is_stated = ports.is_some_and(|ports| ports.contains(&port));
                    let without = is_stated.then(TargetHealth::without_endpoint);
                    let known = values.get(&(node, port)).cloned().or(without);
                    prop_assert_eq!(health.get(&probe(node, port)).cloned(), known);
                    let differs = health.differing(port).any(|address| address == probe(node, port).address);
                    let has_value = health.has_value(&probe(node, port));
                    prop_assert_eq!(has_value, values.contains_key(&(node, port)));
                    proptest::prop_assert!(differs || !has_value && (ports.is_none() || is_stated));
                }
                prop_assert_eq!(health.healthy(), values.values().filter(|value| value.is_healthy()).count());
            }
        }
    }
}
