// SPDX-License-Identifier: Apache-2.0
//! Services that are refused a port of a shared load balancer, because another one has it. The controller reconciles them when something
//! left the load balancer: nothing else tells them. No I/O.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::Owner;
use steerage_provider_cloud::ToReconcile;

/// The name of the load balancer for which each waits, and those that wait no more.
#[derive(Debug, Default)]
pub(crate) struct PortWaiters {
    waiting: Mutex<BTreeMap<Owner, String>>,
    pub(crate) to_reconcile: ToReconcile,
}

impl PortWaiters {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Owner, String>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service is about to ask for ports there, and waits if it is refused one.
    pub(crate) fn wait_for(&self, owner: &Owner, shared: &str) {
        self.lock().insert(owner.clone(), shared.to_owned());
    }

    pub(crate) fn stop_waiting(&self, owner: &Owner) {
        self.lock().remove(owner);
    }

    /// This Service freed a port of the load balancer.
    pub(crate) fn port_freed(&self, shared: &str, by: &Owner) {
        self.lock().retain(|owner, waits_for| {
            let waits = waits_for != shared || owner == by;
            if !waits {
                self.to_reconcile.add(owner.clone());
            }
            waits
        });
    }
}
