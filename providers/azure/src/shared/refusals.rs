// SPDX-License-Identifier: Apache-2.0
//! What follows from a refusal of a shared resource: who waits, who is left out, and what to do where Azure names no Service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::Error;
use tokio::time::Instant;

use super::repair::Broken;
use super::{
    DocumentState, FIRST_WAIT, LONGEST_REST, LONGEST_UNREADY, LONGEST_WAIT, MOST_WAIT, Rejection, Shared,
    UNREADY, WAIT_FOR_EACH,
};
use crate::document::Document;
use crate::error::{CallError, NOT_READY};
use crate::named_in_refusal::{RefusedItems, Words, has_path, refused_items};
use crate::reasons;

/// The longest wait where so many Services are refused. Who grants a right waits for the effect.
fn longest_wait(refused: usize, error: &Error) -> Duration {
    if matches!(error, Error::Denied(_)) {
        return LONGEST_WAIT;
    }
    let refused = u32::try_from(refused).unwrap_or(u32::MAX);
    WAIT_FOR_EACH.saturating_mul(refused).clamp(LONGEST_WAIT, MOST_WAIT)
}

impl<D: Document> Shared<D> {
    /// Azure changes something else meanwhile: when to call again. `None` if a Service is left out instead.
    pub(super) fn rest(
        &self,
        state: &mut DocumentState<D>,
        changed: &[(Key, D::Wanted)],
        before: Option<&D::Body>,
        failure: &CallError,
    ) -> Option<Duration> {
        let mut longest = LONGEST_REST;
        if failure.is_code(NOT_READY) {
            longest = LONGEST_UNREADY;
            let words = Words::of(&failure.text());
            let referred = before.map(|before| self.document.referred(before)).unwrap_or_default();
            let name = |path: &String| path.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
            let named: Vec<String> = referred.into_iter().filter(|path| words.has(&name(path))).collect();
            let told = Error::from(failure.clone()).to_string();
            // Where it is in place already, the others cannot be written without it either.
            let is_in_place = !named.is_empty();
            // The Service that has it may not have changed: nothing else makes the controller look at it.
            if state.unready >= UNREADY
                && let Some(before) = before
            {
                let is_new = |path: &&String| state.told.insert(path.to_ascii_lowercase());
                let new: Vec<String> = named.iter().filter(is_new).cloned().collect();
                self.document.note_not_ready(before, &new);
            }
            state.not_ready.extend(named.into_iter().map(|path| (path.to_ascii_lowercase(), told.clone())));
            let names =
                changed.iter().map(|(key, wanted)| (key.clone(), self.document.names(wanted))).collect();
            if !is_in_place && let RefusedItems::Services(named) = refused_items(&failure.text(), &names, &[])
            {
                self.wait_alone(state, changed, named, failure);
                return None;
            }
        }
        let answers = state.unready;
        state.unready = answers.saturating_add(1);
        let wait = self.poll.saturating_mul(1 << answers.min(8)).min(longest.max(self.poll));
        let wait = failure.after().map_or(wait, |after| after.min(longest));
        state.rest = Some(Instant::now() + wait);
        Some(wait)
    }

    /// What these Services refer to is not ready: they wait, and the others go on. They are refused if it does not get ready.
    pub(super) fn wait_alone(
        &self,
        state: &mut DocumentState<D>,
        changed: &[(Key, D::Wanted)],
        named: BTreeSet<Key>,
        failure: &CallError,
    ) {
        let mut refused = BTreeSet::new();
        for service in named {
            let (answers, _) = state.waiting.get(&service).copied().unwrap_or((0, Instant::now()));
            if answers >= UNREADY {
                refused.insert(service);
            } else {
                let until = Instant::now() + self.poll.saturating_mul(1 << answers);
                state.waiting.insert(service, (answers + 1, until));
            }
        }
        self.reject(state, changed, &refused, failure);
    }

    /// Notes the public IPs that are in place and that the identity may not use, or a policy forbids: with them, Azure takes no change of
    /// any Service. False if it names none.
    fn note_forbidden(
        &self,
        state: &mut DocumentState<D>,
        before: Option<&D::Body>,
        failure: &CallError,
    ) -> bool {
        let (error, text) = (Error::from(failure.clone()), failure.text());
        if !matches!(error, Error::Denied(_)) && error.reason() != reasons::OPERATION_NOT_PERMITTED {
            return false;
        }
        let referred = before.map(|before| self.document.referred(before)).unwrap_or_default();
        let named: Vec<String> = referred.into_iter().filter(|path| has_path(&text, path)).collect();
        let is_named = !named.is_empty();
        let at = Instant::now();
        state.forbidden.extend(named.iter().map(|path| (path.to_ascii_lowercase(), (at, error.clone()))));
        is_named
    }

    /// Finds the Services or the nodes that Azure refuses, and leaves them out. False if it names none.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] if it refuses what is in place already.
    pub(super) fn leave_out_refused(
        &self,
        state: &mut DocumentState<D>,
        changed: &[(Key, D::Wanted)],
        before: Option<&D::Body>,
        failure: &CallError,
    ) -> Result<bool, Error> {
        let wanted: BTreeMap<Key, D::Wanted> = changed.iter().cloned().collect();
        let mut nodes: Vec<IpAddr> = self.document.nodes(None);
        nodes.extend(wanted.values().flat_map(|wanted| self.document.nodes(Some(wanted))));
        nodes.retain(|address| !state.refused.must_wait(address));
        let names = wanted.iter().map(|(key, wanted)| (key.clone(), self.document.names(wanted))).collect();
        let mut refused = match refused_items(&failure.text(), &names, &nodes) {
            RefusedItems::Nodes(nodes) => {
                let error = Error::from(failure.clone()).to_string();
                for address in nodes {
                    state.refused.add(address, &error);
                }
                return Ok(true);
            }
            RefusedItems::Services(services) => services,
            RefusedItems::Unknown => {
                if self.note_forbidden(state, before, failure) && !changed.is_empty() {
                    let title = self.document.title();
                    tracing::warn!(resource = title, error = %failure.text(), "change refused because of what is in place; retrying");
                    return Err(Error::Denied(format!(
                        "Azure refuses every change of the {title}, because of a public IP that is in it already: the conditions of the \
                         Service that uses it say why. Steerage retries."
                    )));
                }
                BTreeSet::new()
            }
        };
        if refused.is_empty() && changed.len() == 1 {
            refused.extend(wanted.keys().cloned());
        }
        if refused.is_empty() {
            if let Some(limit) = state.limit().filter(|_| changed.len() > 1) {
                *limit = changed.len() / 2;
            }
            return Ok(changed.len() > 1);
        }
        self.reject(state, changed, &refused, failure);
        Ok(true)
    }

    /// The last change failed, as the state of the resource says, and Azure's words about it could not be read. It counts as a refusal that
    /// names nobody: without that, the same would be written again and again.
    pub(super) fn note_lost_failure(&self, state: &mut DocumentState<D>) -> Result<(), Error> {
        let Some(change) = state.failed.as_ref().filter(|_| !state.sent.is_repair()) else {
            state.note_broken_without_words();
            return Ok(());
        };
        let (services, before) = (change.services.clone(), change.before.clone());
        let failure = CallError::without_result(self.document.actions().put);
        self.leave_out_refused(state, &services, before.as_ref(), &failure).map(drop)
    }

    /// Leaves these Services out until each may try again.
    pub(super) fn reject(
        &self,
        state: &mut DocumentState<D>,
        changed: &[(Key, D::Wanted)],
        refused: &BTreeSet<Key>,
        failure: &CallError,
    ) {
        let error = Error::from(failure.clone());
        let longest = longest_wait(state.rejections.len(), &error);
        for (service, wanted) in changed.iter().filter(|(service, _)| refused.contains(service)) {
            let before = state.rejections.get(service);
            let wait = before.map_or(FIRST_WAIT, |before| before.wait.saturating_mul(2).min(longest));
            let until = Instant::now() + wait;
            tracing::warn!(%service, resource = self.document.title(), %error, "change refused; writing the resource without this Service");
            let mut error = error.clone();
            if failure.is_stale() {
                error = Error::invalid(reasons::REJECTED_BY_PROVIDER, error.to_string());
            }
            if let Some(words) = state.broken.as_ref().map(Broken::last_words) {
                let told = format!(
                    "The {} is in the state Failed, and Azure refuses it as it is: correct that there first. {words} It refused this \
                     Service's change, too. {error}",
                    self.document.title()
                );
                error = Error::invalid(reasons::LOAD_BALANCER_FAILED, told);
            }
            let rejection = Rejection { wanted: wanted.clone(), error, until, wait };
            state.rejections.insert(service.clone(), rejection);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_wait_is_short_where_few_are_refused() {
        let wrong = Error::invalid("Wrong", "wrong");
        for (refused, mins) in [(0, 5), (1, 5), (10, 5), (20, 10), (1000, 60)] {
            assert_eq!(longest_wait(refused, &wrong), Duration::from_mins(mins), "{refused}");
            assert_eq!(longest_wait(refused, &Error::denied("no")), Duration::from_mins(5));
        }
    }
}
