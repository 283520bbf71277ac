// SPDX-License-Identifier: Apache-2.0
//! Whose changes a write of a shared resource has.

use std::collections::BTreeMap;
use std::net::IpAddr;

use steerage_model::Key;

use super::{DocumentState, FORGOTTEN, Sent, Shared};
use crate::document::Document;

/// The resource with changes, whose they are, and what they are.
pub(super) type Gathered<D> = (Option<<D as Document>::Body>, Vec<(Key, <D as Document>::Wanted)>, Sent);

impl<D: Document> Shared<D> {
    /// The next write: of one Service, if one has to go alone; otherwise of all, or as many as the last refusals allow. After a refusal
    /// that names nobody, changes that cannot be wrong in themselves go first: who serves does not wait until the refused one is found.
    pub(super) fn gather(
        &self,
        state: &DocumentState<D>,
        present: Option<&D::Body>,
        alone: Option<(&Key, &D::Wanted)>,
    ) -> Gathered<D> {
        let is_refused = |address: &IpAddr| state.refused.must_wait(address);
        if let Some((service, wanted)) = alone {
            let mut body = present.cloned();
            let changes = self.document.apply(&mut body, wanted, &is_refused).unwrap_or_default();
            let changed = changes.then(|| (service.clone(), wanted.clone()));
            return (body, changed.into_iter().collect(), Sent::Alone);
        }
        let mut all = self.turns(state);
        all.retain(|(service, wanted)| {
            let is_rejected =
                state.rejections.get(service).is_some_and(|rejection| rejection.wanted == *wanted);
            !is_rejected && state.must_wait(service).is_none()
        });
        // Another wish of a Service that was refused goes alone, with its own call.
        let is_doubtful = |service: &Key| state.rejections.contains_key(service);
        let some = |limit: usize, is_minor: bool| {
            let (mut body, mut changed) = (present.cloned(), Vec::new());
            for (service, wanted) in &all {
                if changed.len() >= limit {
                    break;
                }
                let before = (is_minor || is_doubtful(service)).then(|| body.clone());
                // One that cannot be beside the others is told so by its own call.
                let changes = self.document.apply(&mut body, wanted, &is_refused).unwrap_or_default();
                match before {
                    Some(before) if changes && !self.document.is_minor(before.as_ref(), body.as_ref()) => {
                        body = before;
                    }
                    _ if changes => changed.push((service.clone(), wanted.clone())),
                    _ => {}
                }
            }
            (body, changed)
        };
        if state.limit.min(state.minor_limit) < usize::MAX {
            let (body, changed) = some(state.minor_limit, true);
            if !changed.is_empty() {
                return (body, changed, Sent::Minor);
            }
        }
        let (body, changed) = some(state.limit, false);
        (body, changed, Sent::All)
    }

    /// What Services want, those of a namespace after each other's first, beginning after the namespace that was last.
    fn turns(&self, state: &DocumentState<D>) -> Vec<(Key, D::Wanted)> {
        let mut pending = self.pending();
        pending.retain(|_, pending| pending.at.elapsed() < FORGOTTEN);
        let mut place: BTreeMap<&str, usize> = BTreeMap::new();
        let mut all: Vec<_> = pending
            .iter()
            .map(|(service, pending)| {
                let namespace = service.namespace();
                let place = place.entry(namespace).or_default();
                *place += 1;
                ((*place, namespace <= state.last.as_str(), namespace.to_owned()), service, pending)
            })
            .collect();
        all.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        all.into_iter().map(|(_, service, pending)| (service.clone(), pending.wanted.clone())).collect()
    }
}
