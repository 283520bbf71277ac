// SPDX-License-Identifier: Apache-2.0
//! Which Services name which shared load balancer, as far as this process has seen. A load balancer that somebody else is deleting does not
//! show who used it, and its address is deleted only with its last Service. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_model::Key;

/// The shared load balancer that each Service names.
#[derive(Debug, Default)]
pub(crate) struct SharedUsers(Mutex<Named>);

#[derive(Debug, Default)]
struct Named {
    /// By Service, and whether it was accepted there. One that was not may know nothing of those that use it.
    by_service: BTreeMap<Key, (String, bool)>,
    /// Those whose last user went while a Service still named them, which may not have been accepted: their addresses are still there.
    unreleased: BTreeSet<String>,
}

impl SharedUsers {
    fn lock(&self) -> MutexGuard<'_, Named> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service uses this one, or is to use it, and no other one; `None` if it uses none. Returns another one that it used before, or
    /// only named when the last user went: its address may have to go.
    pub(crate) fn set(&self, service: &Key, shared: Option<&str>) -> Option<String> {
        let mut named = self.lock();
        let before = named.by_service.remove(service);
        let was_accepted =
            |shared: &str| before.as_ref().is_some_and(|(of, accepted)| of == shared && *accepted);
        if let Some(shared) = shared {
            named.by_service.insert(service.clone(), (shared.to_owned(), was_accepted(shared)));
        }
        let (left, is_user) = before.filter(|(before, _)| Some(before.as_str()) != shared)?;
        (is_user || named.unreleased.contains(&left)).then_some(left)
    }

    /// The Service may have its ports in the one that it names.
    pub(crate) fn note_accepted(&self, service: &Key) {
        if let Some((_, is_user)) = self.lock().by_service.get_mut(service) {
            *is_user = true;
        }
    }

    /// Whether a Service names this one, whose address is about to be deleted. Then it is deleted when that Service leaves.
    pub(crate) fn keeps(&self, shared: &str) -> bool {
        let mut named = self.lock();
        let is_named = named.by_service.values().any(|(of, _)| of == shared);
        if is_named {
            named.unreleased.insert(shared.to_owned());
        }
        is_named
    }

    /// Nothing is left of its address to delete.
    pub(crate) fn note_released(&self, shared: &str) {
        self.lock().unreleased.remove(shared);
    }
}
