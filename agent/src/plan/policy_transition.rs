// SPDX-License-Identifier: Apache-2.0
//! Load balancers that have yet to follow a change of external policy. Pure: it is told the time.
//!
//! After Cluster became Local, the load balancer goes on sending to every node until it probes the health-check port and has
//! seen enough failures there. So long a node without local endpoints serves what comes from outside as under Cluster, and drops
//! nothing. (kube-proxy drops it.) A Service that no load balancer stands before follows at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steerage_model::{Key, Service, ServiceKind, TrafficPolicy};

use super::{Masquerade, ServicePlan};

/// The time that a load balancer has to follow.
pub const POLICY_GRACE_PERIOD: Duration = Duration::from_secs(20);

/// Whether a load balancer stands before the Service.
pub fn has_load_balancer(service: &Service) -> bool {
    service.kind == ServiceKind::LoadBalancer && !service.ingress.is_empty()
}

/// The Services whose load balancers may be late.
#[derive(Debug, Default)]
pub struct PolicyTransitions {
    /// The policies of all Services with a load balancer, as last seen.
    policies: BTreeMap<Key, TrafficPolicy>,
    until: BTreeMap<Key, Instant>,
}

impl PolicyTransitions {
    /// Takes in what a Service is now.
    pub fn observe(&mut self, key: &Key, service: Option<&Service>, now: Instant) {
        let Some(service) = service.filter(|service| has_load_balancer(service)) else {
            self.policies.remove(key);
            self.until.remove(key);
            return;
        };
        let old = self.policies.insert(key.clone(), service.external_policy);
        match (old, service.external_policy) {
            (Some(TrafficPolicy::Cluster), TrafficPolicy::Local) => {
                self.until.insert(key.clone(), now + POLICY_GRACE_PERIOD);
            }
            (_, TrafficPolicy::Local) => {}
            (_, TrafficPolicy::Cluster) => {
                self.until.remove(key);
            }
        }
    }

    /// Whether the Service's load balancer may still send everywhere.
    pub fn contains(&self, key: &Key) -> bool {
        self.until.contains_key(key)
    }

    /// When the first of them must have followed.
    pub fn next(&self) -> Option<Instant> {
        self.until.values().min().copied()
    }

    /// Takes out those whose time is over.
    pub fn expire(&mut self, now: Instant) -> BTreeSet<Key> {
        let over = self.until.iter().filter(|(_, until)| **until <= now).map(|(key, _)| key.clone());
        let over: BTreeSet<_> = over.collect();
        self.until.retain(|key, _| !over.contains(key));
        over
    }
}

impl ServicePlan {
    /// Serves a load balancer that still sends everywhere: where this node has no endpoint of its own, as under Cluster.
    pub fn fall_back_to_cluster_policy(&mut self) {
        for (_, action) in &mut self.frontends {
            if action.local.as_ref().is_some_and(|local| local.is_empty()) {
                action.local = None;
                action.masquerade = Masquerade::All;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Ingress;

    use super::*;

    fn service(policy: TrafficPolicy) -> Service {
        Service {
            kind: ServiceKind::LoadBalancer,
            external_policy: policy,
            ingress: vec![Ingress { ip: None, hostname: Some("lb.example".to_owned()), ip_mode: None }],
            ..Service::new(Key::new("shop", "web"))
        }
    }

    #[test]
    fn a_load_balancer_has_twenty_seconds_to_follow_to_local() {
        let (cluster, local) = (service(TrafficPolicy::Cluster), service(TrafficPolicy::Local));
        let key = cluster.key.clone();
        let start = Instant::now();
        let mut transitions = PolicyTransitions::default();
        transitions.observe(&key, Some(&local), start);
        assert!(!transitions.contains(&key), "it was Local from the first");
        transitions.observe(&key, Some(&cluster), start);
        assert!(!transitions.contains(&key), "Cluster serves everybody");
        transitions.observe(&key, Some(&local), start);
        transitions.observe(&key, Some(&local), start + POLICY_GRACE_PERIOD / 2);
        assert_eq!(transitions.next(), Some(start + POLICY_GRACE_PERIOD), "no later for being seen again");
        assert_eq!(transitions.expire(start + POLICY_GRACE_PERIOD / 2), BTreeSet::new());
        assert_eq!(transitions.expire(start + POLICY_GRACE_PERIOD), BTreeSet::from([key.clone()]));
        assert!(!transitions.contains(&key) && transitions.next().is_none());
    }

    #[test]
    fn a_service_that_goes_back_is_gone_or_has_no_load_balancer_waits_for_nobody() {
        let (cluster, local) = (service(TrafficPolicy::Cluster), service(TrafficPolicy::Local));
        let key = cluster.key.clone();
        let bare = |policy| Service { ingress: Vec::new(), ..service(policy) };
        for end in [Some(&cluster), None, Some(&bare(TrafficPolicy::Local))] {
            let mut transitions = PolicyTransitions::default();
            for service in [Some(&cluster), Some(&local), end] {
                transitions.observe(&key, service, Instant::now());
            }
            assert!(!transitions.contains(&key), "{end:?}");
        }
        let mut transitions = PolicyTransitions::default();
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            transitions.observe(&key, Some(&bare(policy)), Instant::now());
        }
        assert!(!transitions.contains(&key));
    }
}
