// SPDX-License-Identifier: Apache-2.0
//! Waiting Services that were assigned what others leave, or take as an external IP: a VIP that moves is served in between only if both
//! plans are in one write. Where the new owner has to wait all the same, nobody's external IP is served in its place. Likewise Services
//! that have as an external IP what others leave, or left before: nothing is reserved for them. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_model::{Key, Protocol, Service};

use crate::local_node::LocalNode;
use crate::plan::{Action, Desired, Frontend, Role, ServicePlan, assigned};

/// Services that are planned before their turn, in each round: others wait for that.
const MOST: usize = 8;
/// Of one namespace.
const MOST_OF_NAMESPACE: usize = 2;
/// Frontends of external IPs that are remembered after their Service has left them.
const MOST_LEFT: usize = 256;
/// And so long: the changes of both Services come soon after each other, and to look for Services that may take them costs time.
const REMEMBERED: Duration = Duration::from_secs(10);

/// What waiting Services may have, too.
#[derive(Debug, Default)]
pub(super) struct Contested {
    /// The frontends that they may have been assigned.
    frontends: BTreeSet<Frontend>,
    /// Those that nobody is served at, so that an external IP may be.
    left: BTreeSet<Frontend>,
}

/// A Service that is to be planned before its turn.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) service: Key,
    /// What it was assigned.
    pub(super) assigned: Vec<Frontend>,
}

impl Contested {
    /// Begins with what was left before.
    pub(super) fn new(vacant: &Vacant, desired: &Desired) -> Self {
        let left = vacant.0.iter().map(|(at, _)| *at).filter(|at| desired.served_at(at).is_none()).collect();
        Self { frontends: BTreeSet::new(), left }
    }

    /// Adds those where this plan ends what is served, or begins to serve an external IP.
    pub(super) fn note(&mut self, service: &Key, plan: &ServicePlan, desired: &Desired) {
        let before: HashSet<_> = desired.frontends(service).iter().copied().collect();
        let after: HashSet<_> = plan.frontends.iter().map(|(frontend, _)| *frontend).collect();
        let is_served = |at: &Frontend| desired.served_at(at).is_some_and(|(owner, _)| owner == service);
        let left = || before.difference(&after).filter(|at| is_served(at));
        self.frontends.extend(left());
        self.left.extend(left());
        // Also where it was a VIP of the Service before, and is an external IP now.
        let had_another_role = |at: &Frontend| {
            desired.served_at(at).is_some_and(|(owner, was)| owner == service && was.role != Role::ExternalIp)
        };
        let is_new = |(at, action): &&(Frontend, Action)| {
            action.role == Role::ExternalIp && (!before.contains(at) || had_another_role(at))
        };
        self.frontends.extend(plan.frontends.iter().filter(is_new).map(|(at, _)| *at));
    }

    /// Adds what was assigned to a Service that waits, where another one's external IP is served.
    pub(super) fn note_waiting(&mut self, service: &Service, local_node: &LocalNode, desired: &Desired) {
        let is_taken = |at: &Frontend| {
            let by = desired.served_at(at);
            by.is_some_and(|(owner, action)| *owner != service.key && action.role == Role::ExternalIp)
        };
        self.frontends.extend(assigned(service, local_node, |_| true).into_iter().filter(is_taken));
    }

    /// Takes the Services that were assigned some of them, and then those that have an external IP there.
    pub(super) fn take<'s>(
        &mut self,
        waiting: impl Iterator<Item = &'s Service>,
        local_node: &LocalNode,
    ) -> Vec<Claim> {
        let Self { frontends, left } = std::mem::take(self);
        let addresses: HashSet<IpAddr> = frontends.iter().chain(&left).map(|at| at.addr).collect();
        if addresses.is_empty() {
            return Vec::new();
        }
        let left = LeftFrontends::new(&left);
        let (mut claims, mut external) = (BTreeMap::new(), BTreeSet::new());
        for service in waiting {
            let mut assigned = assigned(service, local_node, |addr| addresses.contains(addr));
            assigned.retain(|at| frontends.contains(at));
            if !assigned.is_empty() {
                claims.insert(service.key.clone(), assigned);
            } else if left.has_external_ip_of(service) {
                external.insert(service.key.clone());
            }
        }
        let external = external.into_iter().map(|service| (service, Vec::new()));
        claims.into_iter().chain(external).map(|(service, assigned)| Claim { service, assigned }).collect()
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.frontends.is_empty() && self.left.is_empty()
    }
}

/// The ports that were left at each address. Prepared once for all waiting Services: both may be thousands.
struct LeftFrontends(HashMap<IpAddr, BTreeSet<(Protocol, u16)>>);

impl LeftFrontends {
    fn new(frontends: &BTreeSet<Frontend>) -> Self {
        let mut ports: HashMap<_, BTreeSet<_>> = HashMap::new();
        for at in frontends {
            ports.entry(at.addr).or_default().insert((at.protocol, at.port));
        }
        Self(ports)
    }

    /// Whether a Service has an external IP and a port that make one of the frontends. At each address the fewer ports are looked at, its
    /// own or those that were left: a Service may have thousands of addresses and of ports.
    fn has_external_ip_of(&self, service: &Service) -> bool {
        let mut found = service.external_ips.iter().filter_map(|addr| self.0.get(addr)).peekable();
        if found.peek().is_none() {
            return false;
        }
        let own: BTreeSet<_> = service.ports.iter().map(|port| (port.protocol, port.port)).collect();
        found.any(|left| {
            let (fewer, more) = if left.len() < own.len() { (left, &own) } else { (&own, left) };
            fewer.iter().any(|port| more.contains(port))
        })
    }
}

/// Frontends of external IPs that a Service has left, the last ones: the change of another one that takes them may come later, and does
/// not have to wait for its turn.
#[derive(Debug, Default)]
pub(super) struct Vacant(VecDeque<(Frontend, Instant)>);

impl Vacant {
    /// Adds those that this plan leaves, before it is in `desired`.
    pub(super) fn note(&mut self, service: &Key, plan: &ServicePlan, desired: &Desired, now: Instant) {
        let after: HashSet<_> = plan.frontends.iter().map(|(frontend, _)| frontend).collect();
        let is_external = |at: &&Frontend| {
            desired
                .served_at(at)
                .is_some_and(|(owner, action)| owner == service && action.role == Role::ExternalIp)
        };
        let left = desired.frontends(service).iter().filter(|at| !after.contains(at)).filter(is_external);
        self.0.extend(left.map(|at| (*at, now)));
    }

    /// Forgets those at which somebody is served, old ones, and the oldest ones of too many.
    pub(super) fn tidy(&mut self, desired: &Desired, now: Instant) {
        let is_recent = |since: &Instant| now.saturating_duration_since(*since) < REMEMBERED;
        self.0.retain(|(at, since)| is_recent(since) && desired.served_at(at).is_none());
        self.0.drain(..self.0.len().saturating_sub(MOST_LEFT));
    }
}

/// How many Services were planned before their turn in a round.
#[derive(Debug, Default)]
pub(super) struct Jumps {
    namespaces: BTreeMap<String, usize>,
    all: usize,
}

impl Jumps {
    /// Whether one more may be, which counts then.
    pub(super) fn take(&mut self, service: &Key) -> bool {
        let of_namespace = self.namespaces.entry(service.namespace().to_owned()).or_default();
        let may = self.all < MOST && *of_namespace < MOST_OF_NAMESPACE;
        self.all += usize::from(may);
        *of_namespace += usize::from(may);
        may
    }
}
