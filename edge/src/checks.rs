// SPDX-License-Identifier: Apache-2.0
//! Which health checks are followed at which addresses. The plan makes them, and `prober` and `health` follow them.
//!
//! Under `health-check` steering each node is a target of each Service. So load balancers with the same targets share a set of
//! checks, and no value is for one target with one check. Pure.

use std::collections::HashMap;
#[cfg(test)]
use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_api::{HealthCheck, HealthCheckProtocol};

#[cfg(test)]
use crate::health::Probe;
use crate::port_set::PortSet;

/// From so many checks on, a set has a bitmap of their ports, and its addresses share it.
pub(crate) const MIN_FOR_BITMAP: usize = 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct Checks {
    by_address: HashMap<IpAddr, Vec<Arc<CheckSet>>>,
}

/// The checks of some addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct CheckSet {
    /// Whether each is urgent: a group that it is for has no healthy target.
    urgency: HashMap<HealthCheck, bool>,
    by_port: HashMap<u16, Vec<HealthCheck>>,
    /// The ports of HTTP checks, if they are many.
    http_ports: Option<PortSet>,
    /// The ports of other checks.
    other_ports: Vec<u16>,
    http: Option<HttpChecks>,
}

/// What requests to a node for its statement follow from: the least of each, of all HTTP checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HttpChecks {
    pub(crate) interval_milliseconds: u32,
    pub(crate) timeout_milliseconds: u32,
    pub(crate) port: u16,
}

impl HttpChecks {
    pub(crate) fn least(self, other: Self) -> Self {
        Self {
            interval_milliseconds: self.interval_milliseconds.min(other.interval_milliseconds),
            timeout_milliseconds: self.timeout_milliseconds.min(other.timeout_milliseconds),
            port: self.port.min(other.port),
        }
    }
}

impl FromIterator<(HealthCheck, bool)> for CheckSet {
    /// A check that is there twice is urgent if it is so once.
    fn from_iter<I: IntoIterator<Item = (HealthCheck, bool)>>(checks: I) -> Self {
        let mut set = Self::default();
        for (check, is_urgent) in checks {
            if let Some(urgency) = set.urgency.get_mut(&check) {
                *urgency |= is_urgent;
            } else {
                set.by_port.entry(check.port).or_default().push(check.clone());
                set.urgency.insert(check, is_urgent);
            }
        }
        let is_http = |check: &&HealthCheck| check.protocol == HealthCheckProtocol::Http;
        let http = || set.urgency.keys().filter(is_http);
        let least = http().map(|check| HttpChecks {
            interval_milliseconds: check.interval_milliseconds,
            timeout_milliseconds: check.timeout_milliseconds,
            port: check.port,
        });
        let least = least.reduce(HttpChecks::least);
        let ports = (set.len() >= MIN_FOR_BITMAP).then(|| http().map(|check| check.port).collect());
        let others = set.by_port.iter().filter(|(_, checks)| !checks.iter().all(|check| is_http(&check)));
        let others = others.map(|(port, _)| *port).collect();
        (set.http, set.http_ports, set.other_ports) = (least, ports, others);
        set
    }
}

impl CheckSet {
    pub(crate) fn len(&self) -> usize {
        self.urgency.len()
    }

    /// The checks of a port.
    pub(crate) fn at(&self, port: u16) -> &[HealthCheck] {
        self.by_port.get(&port).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = u16> {
        self.by_port.keys().copied()
    }

    /// The ports of checks that are not HTTP.
    pub(crate) fn other_ports(&self) -> &[u16] {
        &self.other_ports
    }

    /// The ports of checks that a node which states these ports does not decide by that.
    pub(crate) fn undecided_ports(&self, stated: &PortSet) -> Vec<u16> {
        let mut ports = self.other_ports.clone();
        match &self.http_ports {
            Some(http) => ports.extend(http.without(stated)),
            None => ports.extend(self.ports().filter(|port| !stated.contains(*port))),
        }
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    pub(crate) fn http(&self) -> Option<HttpChecks> {
        self.http
    }
}

impl FromIterator<(IpAddr, Vec<Arc<CheckSet>>)> for Checks {
    fn from_iter<I: IntoIterator<Item = (IpAddr, Vec<Arc<CheckSet>>)>>(sets: I) -> Self {
        Self { by_address: sets.into_iter().collect() }
    }
}

impl Checks {
    /// All addresses, and the sets of each.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, &[Arc<CheckSet>])> + Clone {
        self.by_address.iter().map(|(address, sets)| (*address, sets.as_slice()))
    }

    /// The sets of an address.
    pub(crate) fn of(&self, address: IpAddr) -> &[Arc<CheckSet>] {
        self.by_address.get(&address).map_or(&[], Vec::as_slice)
    }
}

/// Counts the checks of addresses, which share lists of large sets. The sets must be there as long as this value.
#[derive(Debug, Default)]
pub(crate) struct CheckCounts(HashMap<Vec<*const CheckSet>, usize>);

impl CheckCounts {
    /// The number of checks in these sets of an address together.
    pub(crate) fn of(&mut self, sets: &[Arc<CheckSet>]) -> usize {
        let (mut sets, small): (Vec<_>, Vec<_>) =
            sets.iter().cloned().partition(|set| set.len() >= MIN_FOR_BITMAP);
        let large = sets.len();
        let list = sets.iter().map(Arc::as_ptr).collect();
        let many = *self.0.entry(list).or_insert_with(|| (0..large).map(|at| new_in(&sets, at)).sum());
        sets.extend(small);
        many + (large..sets.len()).map(|at| new_in(&sets, at)).sum::<usize>()
    }
}

/// The number of checks of this set that none before it has.
fn new_in(sets: &[Arc<CheckSet>], at: usize) -> usize {
    match (sets.get(..at), sets.get(at)) {
        (Some([]), Some(set)) => set.len(),
        (Some(before), Some(set)) => {
            set.urgency.keys().filter(|check| urgency(before, check).is_none()).count()
        }
        _ => 0,
    }
}

/// Whether the check is urgent in one of the sets of an address; `None` if it is in none.
pub(crate) fn urgency(sets: &[Arc<CheckSet>], check: &HealthCheck) -> Option<bool> {
    sets.iter().filter_map(|set| set.urgency.get(check).copied()).reduce(|one, other| one || other)
}

#[cfg(test)]
impl Checks {
    /// Of single probes.
    pub(crate) fn of_probes(probes: &HashSet<Probe>, urgent: &HashSet<Probe>) -> Self {
        let mut of_addresses = HashMap::<IpAddr, Vec<_>>::new();
        for probe in probes {
            let check = (probe.check.clone(), urgent.contains(probe));
            of_addresses.entry(probe.address).or_default().push(check);
        }
        let set = |(address, checks): (_, Vec<_>)| (address, vec![Arc::new(checks.into_iter().collect())]);
        of_addresses.into_iter().map(set).collect()
    }

    /// Every probe, and whether it is urgent.
    pub(crate) fn probes(&self) -> HashMap<Probe, bool> {
        let mut probes = HashMap::new();
        for (address, sets) in self.iter() {
            for (check, is_urgent) in sets.iter().flat_map(|set| &set.urgency) {
                *probes.entry(Probe { address, check: check.clone() }).or_insert(false) |= *is_urgent;
            }
        }
        probes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(port: u16, protocol: HealthCheckProtocol) -> HealthCheck {
        HealthCheck {
            protocol,
            port,
            path: None,
            interval_milliseconds: u32::from(port) * 10,
            timeout_milliseconds: 1000 - u32::from(port),
            healthy_threshold: 1,
            unhealthy_threshold: 2,
        }
    }

    #[test]
    fn undecided_are_other_checks_and_ports_that_are_not_stated() {
        for count in [10, 300] {
            let http = (1..=count).map(|port| (check(port, HealthCheckProtocol::Http), false));
            let tcp =
                [(check(2, HealthCheckProtocol::Tcp), false), (check(900, HealthCheckProtocol::Tcp), false)];
            let set: CheckSet = http.chain(tcp).collect();
            assert_eq!(set.http_ports.is_some(), count == 300);
            let stated = (1..count).chain([900]).collect();
            assert_eq!(set.undecided_ports(&stated), [2, count, 900]);
            let least = HttpChecks {
                interval_milliseconds: 10,
                timeout_milliseconds: 1000 - u32::from(count),
                port: 1,
            };
            assert_eq!(set.http(), Some(least));
        }
    }

    #[test]
    fn check_of_two_sets_is_urgent_if_one_says_so() {
        let http = || check(1, HealthCheckProtocol::Http);
        let set =
            |is_urgent| Arc::new([(http(), is_urgent), (http(), false)].into_iter().collect::<CheckSet>());
        let address = |number: u8| IpAddr::from([10, 0, 0, number]);
        let sets = [(address(1), vec![set(false)]), (address(2), vec![set(false), set(true)])];
        let checks: Checks = sets.into_iter().collect();
        let of = |number| urgency(checks.of(address(number)), &http());
        assert_eq!([of(1), of(2), of(3)], [Some(false), Some(true), None]);
    }

    #[test]
    fn check_of_several_sets_of_an_address_counts_once() {
        let of = |ports: std::ops::Range<u16>| {
            let set = ports.map(|port| (check(port, HealthCheckProtocol::Http), false));
            Arc::new(set.collect::<CheckSet>())
        };
        let (one, other, small) = (of(1..101), of(51..151), of(149..153));
        let mut counts = CheckCounts::default();
        for (sets, wanted) in [
            (vec![], 0),
            (vec![small.clone()], 4),
            (vec![small.clone(), small.clone()], 4),
            (vec![one.clone(), other.clone()], 150),
            (vec![small.clone(), one.clone(), other.clone()], 152),
            (vec![other, small], 102),
        ] {
            assert_eq!((counts.of(&sets), counts.of(&sets)), (wanted, wanted));
        }
    }
}
