// SPDX-License-Identifier: Apache-2.0
//! The life of targets: initial, healthy, unhealthy, draining, gone. Which are due for a check, which may get new flows, and which flows
//! end. Pure: time is given, and checks happen elsewhere.
//!
//! As AWS documents it: a target of a group that no listener uses is not checked. A new target takes part once it has passed one check.
//! Later it changes sides after as many consecutive results as the thresholds say. If no target of a group is healthy, all registered
//! ones get flows. An established flow stays with its target, also if that fails its checks or is deregistered, unless the attributes
//! of the group say otherwise. AWS's delays are left out, such as the minutes before the first check of a new target.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use steerage_testmoto::TargetStates;

use crate::cloud::{Check, Cloud, Groups};

/// The ARN of a target group, and the id of a target in it.
pub type Key = (String, String);

/// A target of a group whose flows end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// The ARN of the target group.
    pub group: String,
    /// The target.
    pub target: SocketAddr,
}

/// A check to make now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The target.
    pub key: Key,
    /// Where it is checked.
    pub address: SocketAddr,
    /// How.
    pub check: Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetState {
    Initial,
    Healthy,
    /// Its flows end at this time, or never.
    Unhealthy {
        flows_end: Option<Duration>,
    },
    Draining {
        until: Duration,
    },
}

#[derive(Clone, Debug)]
struct Target {
    address: SocketAddr,
    state: TargetState,
    /// Consecutive results that contradict the state.
    contradictions: u32,
    next_check: Duration,
}

impl Target {
    fn is_draining(&self) -> bool {
        matches!(self.state, TargetState::Draining { .. })
    }
}

/// The targets of all groups in use. Times are since any fixed moment.
#[derive(Debug, Default)]
pub struct Health {
    targets: BTreeMap<Key, Target>,
}

impl Health {
    /// Takes over what is registered now. Returns the targets whose flows end.
    pub fn sync(&mut self, used: &Groups<'_>, now: Duration) -> Vec<Released> {
        let mut released = Vec::new();
        self.targets.retain(|(arn, id), target| {
            let Some(group) = used.get(arn.as_str()) else {
                return false;
            };
            if group.targets.contains_key(id) {
                if let TargetState::Unhealthy { flows_end: Some(at) } = target.state
                    && at <= now
                {
                    target.state = TargetState::Unhealthy { flows_end: None };
                    released.push(Released { group: arn.clone(), target: target.address });
                }
                return true;
            }
            match target.state {
                TargetState::Draining { until } if until <= now => {
                    if group.attributes.ends_flows_after_delay {
                        released.push(Released { group: arn.clone(), target: target.address });
                    }
                    false
                }
                TargetState::Draining { .. } => true,
                _ => {
                    target.state =
                        TargetState::Draining { until: now + group.attributes.deregistration_delay };
                    true
                }
            }
        });
        for (arn, group) in used {
            for (id, address) in &group.targets {
                let key = ((*arn).to_owned(), id.clone());
                if let Some(known) = self.targets.get_mut(&key).filter(|known| !known.is_draining()) {
                    known.address = *address;
                    continue;
                }
                let (state, contradictions) = (TargetState::Initial, 0);
                self.targets
                    .insert(key, Target { address: *address, state, contradictions, next_check: now });
            }
        }
        released
    }

    /// The checks that are due; each counts as made.
    pub fn due(&mut self, used: &Groups<'_>, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        for (key, target) in &mut self.targets {
            let Some(group) = used.get(key.0.as_str()) else { continue };
            if target.is_draining() || target.next_check > now {
                continue;
            }
            target.next_check = now + group.check.interval;
            let address = group.check.address(target.address);
            orders.push(Order { key: key.clone(), address, check: group.check.clone() });
        }
        orders
    }

    /// Takes over the result of a check. What ends by it, the next [`Health::sync`] returns.
    pub fn record(&mut self, used: &Groups<'_>, key: &Key, has_passed: bool, now: Duration) {
        let (Some(target), Some(group)) = (self.targets.get_mut(key), used.get(key.0.as_str())) else {
            return;
        };
        let Check { healthy_threshold, unhealthy_threshold, .. } = group.check;
        let flows_end = group.attributes.unhealthy_flows_end_after.map(|after| now + after);
        let unhealthy = TargetState::Unhealthy { flows_end };
        let (contradicts, limit, next) = match target.state {
            TargetState::Draining { .. } => return,
            TargetState::Initial if has_passed => (true, 1, TargetState::Healthy),
            TargetState::Initial => (true, unhealthy_threshold, unhealthy),
            TargetState::Healthy => (!has_passed, unhealthy_threshold, unhealthy),
            TargetState::Unhealthy { .. } => (has_passed, healthy_threshold, TargetState::Healthy),
        };
        target.contradictions = if contradicts { target.contradictions + 1 } else { 0 };
        if target.contradictions >= limit {
            (target.state, target.contradictions) = (next, 0);
        }
    }

    /// The targets of a group that get new flows: without a healthy one, all.
    pub fn receivers(&self, group: &str) -> Vec<SocketAddr> {
        let healthy = self.healthy(group);
        let any = || self.registered(group).map(|target| target.address).collect();
        if healthy.is_empty() { any() } else { healthy }
    }

    /// The healthy targets of a group.
    pub fn healthy(&self, group: &str) -> Vec<SocketAddr> {
        let healthy = self.registered(group).filter(|target| target.state == TargetState::Healthy);
        healthy.map(|target| target.address).collect()
    }

    fn registered(&self, group: &str) -> impl Iterator<Item = &Target> {
        let of_group = self.targets.iter().filter(move |((arn, _), _)| arn == group);
        of_group.map(|(_, target)| target).filter(|target| !target.is_draining())
    }

    /// The states as AWS names them.
    pub fn states(&self, cloud: &Cloud) -> TargetStates {
        let mut states = TargetStates::new();
        let mut set = |arn: &str, id: &str, state: &str, reason: &str| {
            let of_group = states.entry(arn.to_owned()).or_default();
            of_group.insert(id.to_owned(), (state.to_owned(), reason.to_owned()));
        };
        for (arn, group) in &cloud.groups {
            group.targets.keys().for_each(|id| set(arn, id, "unused", "Target.NotInUse"));
        }
        for ((arn, id), target) in &self.targets {
            let (state, reason) = match target.state {
                TargetState::Initial => ("initial", "Elb.InitialHealthChecking"),
                TargetState::Healthy => ("healthy", ""),
                TargetState::Unhealthy { flows_end: Some(_) } => {
                    ("unhealthy.draining", "Target.FailedHealthChecks")
                }
                TargetState::Unhealthy { .. } => ("unhealthy", "Target.FailedHealthChecks"),
                TargetState::Draining { .. } => ("draining", "Target.DeregistrationInProgress"),
            };
            set(arn, id, state, reason);
        }
        states
    }
}

#[cfg(test)]
mod tests;
