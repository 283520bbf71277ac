// SPDX-License-Identifier: Apache-2.0
//! Services whose external policy has just changed from Cluster to Local. Pure: the caller passes the time.
//!
//! The load balancer still sends to every node until enough probes of the health-check port have failed. During that time a node
//! without local endpoints serves clients from outside as under Cluster, and drops nothing (kube-proxy drops). A Service without
//! a load balancer changes at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steerage_model::{Key, Service, ServiceKind, TrafficPolicy};

use super::{Masquerade, ServicePlan};

/// The time for a load balancer to notice a change of policy.
pub const POLICY_GRACE_PERIOD: Duration = Duration::from_secs(20);

/// Whether the Service has a load balancer with an address or name.
pub fn has_load_balancer(service: &Service) -> bool {
    service.kind == ServiceKind::LoadBalancer && !service.ingress.is_empty()
}

/// Services in transition, whose load balancers may still send to every node.
#[derive(Debug, Default)]
pub struct PolicyTransitions {
    /// The last observed policy of each Service with a load balancer.
    policies: BTreeMap<Key, TrafficPolicy>,
    until: BTreeMap<Key, Instant>,
}

impl PolicyTransitions {
    /// Notes the current state of a Service.
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

    /// Whether the Service is in transition.
    pub fn contains(&self, key: &Key) -> bool {
        self.until.contains_key(key)
    }

    /// When the next transition ends.
    pub fn next(&self) -> Option<Instant> {
        self.until.values().min().copied()
    }

    /// Ends transitions that are over, and returns their Services.
    pub fn expire(&mut self, now: Instant) -> BTreeSet<Key> {
        let over = self.until.iter().filter(|(_, until)| **until <= now).map(|(key, _)| key.clone());
        let over: BTreeSet<_> = over.collect();
        self.until.retain(|key, _| !over.contains(key));
        over
    }
}

impl ServicePlan {
    /// Serves clients from outside as under policy Cluster where this node has no local endpoint.
    pub fn fall_back_to_cluster_policy(&mut self) {
        for (_, action) in &mut self.frontends {
            if action.local.as_ref().is_some_and(|local| local.is_empty()) {
                (action.local, action.peers) = (None, None);
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
    fn policy_change_to_local_has_a_grace_period() {
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
    fn reverted_or_deleted_service_has_no_transition() {
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
