// SPDX-License-Identifier: Apache-2.0
//! What this process remembers of each load balancer, so that it asks the provider only for what changed. Lost at a restart, when
//! everything is asked for once more.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use steerage_model::{Condition, Ingress, Key, Service};
use steerage_provider_api::{LoadBalancer, Owner, Steering};

use crate::status::{DesiredStatus, HealthSummary, ReasonMessage};

/// What is remembered of one load balancer.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppliedState {
    /// What the Service asked for when it was last looked at.
    pub(crate) fingerprint: Option<u64>,
    /// The fingerprint of the Service for which following its old annotations was refused.
    pub(crate) unmigrated: Option<u64>,
    /// The structure that is in place, and the steering that it was planned for.
    pub(crate) applied: Option<(LoadBalancer, Steering)>,
    /// What the provider said to publish for it.
    pub(crate) ingress: Vec<Ingress>,
    /// The digest of the targets that are in place.
    pub(crate) targets: Option<u64>,
    /// Targets that the provider refused, with what to do about it.
    pub(crate) refused: Vec<(String, String)>,
    /// The targets' health when it was last read.
    pub(crate) health: Option<HealthSummary>,
    /// The finalizer was set, and the index has not shown it yet.
    pub(crate) holding: bool,
    /// The status that was written last, over which one.
    written: Option<Written>,
    /// What was last told by events, by action.
    told: BTreeMap<&'static str, ReasonMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    desired: DesiredStatus,
    over: (Vec<Ingress>, Vec<Condition>),
}

impl AppliedState {
    /// Whether `desired` was written already and the index only does not show it yet.
    pub(crate) fn is_written(&self, service: &Service, desired: &DesiredStatus) -> bool {
        let written = Written { desired: desired.clone(), over: over(service) };
        self.written.as_ref() == Some(&written)
    }

    /// `desired` was written.
    pub(crate) fn wrote(&mut self, service: &Service, desired: DesiredStatus) {
        self.written = Some(Written { desired, over: over(service) });
    }

    /// Whether there is something new to tell about `action`; `None` when all is well again.
    pub(crate) fn is_news(&mut self, action: &'static str, why: Option<&ReasonMessage>) -> bool {
        match why {
            None => {
                self.told.remove(action);
                false
            }
            Some(why) => self.told.insert(action, why.clone()).as_ref() != Some(why),
        }
    }

    /// Forgets what could hide a difference, so that all is compared once more.
    pub(crate) fn invalidate(&mut self) {
        self.written = None;
        self.holding = false;
    }
}

fn over(service: &Service) -> (Vec<Ingress>, Vec<Condition>) {
    (service.ingress.clone(), service.conditions.clone())
}

/// The applied of all load balancers. A worker takes one out and puts it back: there is at most one task for each.
#[derive(Debug, Default)]
pub(crate) struct AppliedStates {
    of: Mutex<BTreeMap<Owner, AppliedState>>,
}

impl AppliedStates {
    /// A copy of what is remembered, if anything is.
    pub(crate) fn get(&self, owner: &Owner) -> Option<AppliedState> {
        self.lock(|applied| applied.get(owner).cloned())
    }

    /// Remembers.
    pub(crate) fn put(&self, owner: &Owner, state: AppliedState) {
        self.lock(|applied| applied.insert(owner.clone(), state));
    }

    /// Forgets.
    pub(crate) fn remove(&self, owner: &Owner) {
        self.lock(|applied| applied.remove(owner));
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.lock(|applied| applied.len())
    }

    /// All owners.
    pub(crate) fn owners(&self) -> Vec<Owner> {
        self.lock(|applied| applied.keys().cloned().collect())
    }

    /// The owners of this Service's name: more than one when it was deleted and made anew.
    pub(crate) fn owners_of(&self, service: &Key) -> Vec<Owner> {
        let from = Owner { service: service.clone(), uid: String::new() };
        self.lock(|applied| {
            applied
                .range(from..)
                .map(|(owner, _)| owner)
                .take_while(|o| o.service == *service)
                .cloned()
                .collect()
        })
    }

    fn lock<T>(&self, with: impl FnOnce(&mut BTreeMap<Owner, AppliedState>) -> T) -> T {
        with(&mut self.of.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
