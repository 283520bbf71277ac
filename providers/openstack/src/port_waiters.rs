// SPDX-License-Identifier: Apache-2.0
//! Services that are refused a port of a shared load balancer, because another one has it. They are called again when something left the
//! load balancer: nothing else tells them. No I/O.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::Owner;
use steerage_provider_cloud::ToReconcile;

/// The name of the load balancer for which each waits, and those that are to be called.
#[derive(Debug, Default)]
pub(crate) struct PortWaiters {
    waiting: Mutex<BTreeMap<Owner, String>>,
    pub(crate) called: ToReconcile,
}

impl PortWaiters {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Owner, String>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service is about to ask for ports there, and waits if it is refused one; `None` if it does not wait any more.
    pub(crate) fn set(&self, owner: &Owner, shared: Option<&str>) {
        match shared {
            Some(shared) => drop(self.lock().insert(owner.clone(), shared.to_owned())),
            None => drop(self.lock().remove(owner)),
        }
    }

    /// This Service freed a port of the load balancer.
    pub(crate) fn call(&self, shared: &str, by: &Owner) {
        self.lock().retain(|owner, waits_for| {
            let is_called = waits_for == shared && owner != by;
            if is_called {
                self.called.add(owner.clone());
            }
            !is_called
        });
    }
}
