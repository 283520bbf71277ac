// SPDX-License-Identifier: Apache-2.0
//! What follows from a refusal of a shared resource: who waits, who is left out, and what to do where Azure names no Service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::Error;
use tokio::time::Instant;

use super::{
    DocumentState, FIRST_WAIT, LONGEST_DENIED, LONGEST_REST, LONGEST_UNREADY, LONGEST_WAIT, Rejection, Sent,
    Shared, UNREADY,
};
use crate::client::Calls;
use crate::document::Document;
use crate::error::{CallError, NOT_READY};
use crate::named_in_refusal::{RefusedItems, Words, has_path, refused_items};
use crate::reasons;

impl<D: Document> Shared<D> {
    /// Writes the resource as it is: that ends its state `Failed`, unless something in it is wrong of which nobody here knows.
    pub(super) async fn repair(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        present: Option<D::Body>,
        stale: &mut u32,
    ) -> Result<Option<Duration>, Error> {
        state.sent = Sent::AsItIs;
        let sent = self.send(calls, state, (present.clone(), present), Vec::new(), stale).await;
        if let Err(error @ (Error::Invalid { .. } | Error::Denied(_))) = &sent {
            state.broken = Some((Instant::now(), error.to_string()));
            return Ok(None);
        }
        let is_failed = |body: &D::Body| self.document.provisioning(body).is_failed();
        if sent.as_ref().is_ok_and(Option::is_none)
            && state.known.as_ref().is_some_and(|(body, _)| body.as_ref().is_some_and(is_failed))
        {
            // It was refused because of a node, which the next change leaves out.
            state.broken = Some((Instant::now(), String::new()));
        }
        sent
    }

    /// What to tell a Service that Azure names in its words about the resource as it is.
    pub(super) fn check_named(
        &self,
        state: &DocumentState<D>,
        own: Option<(&Key, &D::Wanted)>,
    ) -> Result<(), Error> {
        let (Some((_, words)), Some((service, wanted))) = (&state.broken, own) else { return Ok(()) };
        let names = BTreeMap::from([(service.clone(), self.document.names(wanted))]);
        if refused_items(words, &names, &[]) == RefusedItems::Unknown {
            return Ok(());
        }
        let title = self.document.title();
        let message = format!("The {title} is in the state Failed, and Azure names this Service. {words}");
        Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, message))
    }

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

    /// Leaves these Services out until each may try again.
    pub(super) fn reject(
        &self,
        state: &mut DocumentState<D>,
        changed: &[(Key, D::Wanted)],
        refused: &BTreeSet<Key>,
        failure: &CallError,
    ) {
        let error = Error::from(failure.clone());
        let longest = if matches!(error, Error::Denied(_)) { LONGEST_DENIED } else { LONGEST_WAIT };
        for (service, wanted) in changed.iter().filter(|(service, _)| refused.contains(service)) {
            let before = state.rejections.get(service);
            let wait = before.map_or(FIRST_WAIT, |before| before.wait.saturating_mul(2).min(longest));
            let until = Instant::now() + wait;
            tracing::warn!(%service, resource = self.document.title(), %error, "change refused; writing the resource without this Service");
            let mut error = error.clone();
            if failure.is_stale() {
                error = Error::invalid(reasons::REJECTED_BY_PROVIDER, error.to_string());
            }
            if let Some((_, words)) = &state.broken {
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
