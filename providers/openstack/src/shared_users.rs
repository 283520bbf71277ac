// SPDX-License-Identifier: Apache-2.0
//! Which Services name which shared load balancer, as far as this process has seen. A load balancer that somebody else is deleting does not
//! show who used it, and its address is deleted only with its last Service. No I/O.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_model::Key;

/// The shared load balancer that each Service names.
#[derive(Debug, Default)]
pub(crate) struct SharedUsers(Mutex<BTreeMap<Key, String>>);

impl SharedUsers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service uses this one, or is to use it, and no other one; `None` if it uses none. Returns another one that it used before.
    pub(crate) fn set(&self, service: &Key, shared: Option<&str>) -> Option<String> {
        let before = match shared {
            Some(shared) => self.lock().insert(service.clone(), shared.to_owned()),
            None => self.lock().remove(service),
        };
        before.filter(|before| Some(before.as_str()) != shared)
    }

    /// Whether a Service uses this one.
    pub(crate) fn has_user(&self, shared: &str) -> bool {
        self.lock().values().any(|used| used == shared)
    }
}
