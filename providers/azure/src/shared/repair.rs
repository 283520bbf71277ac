// SPDX-License-Identifier: Apache-2.0
//! Ends the state `Failed` of a shared resource, whose failed change this process did not make: nobody knows what was there before. It is
//! written as it is, without what is given up already. If Azure refuses that and names Services, they are left out, but only when others
//! wait: what serves them may be in place.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::Error;
use tokio::time::Instant;

use super::{DocumentState, Sent, Shared};
use crate::client::Calls;
use crate::document::Document;
use crate::named_in_refusal::{RefusedItems, refused_items};
use crate::reasons;

/// Until a resource that Azure refuses as it is, is written so again.
const BROKEN: Duration = Duration::from_mins(5);
/// So long the Services that Azure names have for a correction of their own, before they are left out.
const CORRECTION: Duration = Duration::from_mins(2);

/// A resource that Azure refuses as it is.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    since: Instant,
    /// When it was written as it is.
    at: Instant,
    /// Azure's words about it as it is, and then about it without the Services that the words before name.
    words: Vec<String>,
    /// Whether they may name a Service that is wrong: a missing right or a lock is nobody's here.
    may_name: bool,
}

impl Broken {
    pub(super) fn last_words(&self) -> &str {
        self.words.last().map_or("", String::as_str)
    }
}

impl<D: Document> DocumentState<D> {
    /// Azure refused the resource as it is, or without some of its Services.
    pub(super) fn note_broken(&mut self, error: Option<&Error>) {
        let now = Instant::now();
        let broken =
            self.broken.get_or_insert(Broken { since: now, at: now, words: Vec::new(), may_name: true });
        if self.sent != Sent::LeavingOut {
            broken.at = now;
            broken.words.clear();
        }
        broken.words.extend(error.map(Error::to_string));
        let is_nobodys = |error: &Error| {
            let others = [reasons::OPERATION_NOT_PERMITTED, reasons::QUOTA_EXCEEDED];
            !matches!(error, Error::Invalid { .. }) || others.contains(&error.reason())
        };
        broken.may_name = !error.is_some_and(is_nobodys);
    }

    /// Nobody can say why Azure refused it, and so whom to leave out next.
    pub(super) fn note_broken_without_words(&mut self) {
        self.note_broken(None);
        if let Some(broken) = self.broken.as_mut().filter(|_| self.sent == Sent::LeavingOut) {
            broken.may_name = false;
        }
    }

    /// Whether it is time to write the resource as it is.
    pub(super) fn is_repair_due(&self) -> bool {
        self.broken.as_ref().is_none_or(|broken| broken.at.elapsed() >= BROKEN)
    }
}

/// How often Azure refused the resource since it was written as it is.
fn broken_words<D: Document>(state: &DocumentState<D>) -> usize {
    state.broken.as_ref().map_or(0, |broken| broken.words.len())
}

impl<D: Document> Shared<D> {
    /// Writes the resource as it is, without what is given up: that ends its state `Failed`, unless something in it is wrong that nobody
    /// here knows.
    pub(super) async fn repair(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        present: Option<D::Body>,
        stale: &mut u32,
    ) -> Result<Option<Duration>, Error> {
        state.sent = Sent::AsItIs;
        let mut body = present.clone();
        if let Some(body) = &mut body {
            self.document.leave_out(body);
        }
        self.send_repair(calls, state, (present, body), stale).await
    }

    async fn send_repair(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        bodies: (Option<D::Body>, Option<D::Body>),
        stale: &mut u32,
    ) -> Result<Option<Duration>, Error> {
        let sent = self.send(calls, state, bodies, Vec::new(), stale).await;
        if let Err(error @ (Error::Invalid { .. } | Error::Denied(_))) = &sent {
            state.note_broken(Some(error));
            return Ok(None);
        }
        let is_failed = |body: &D::Body| self.document.provisioning(body).is_failed();
        if sent.as_ref().is_ok_and(Option::is_none)
            && state.known.as_ref().is_some_and(|(body, _)| body.as_ref().is_some_and(is_failed))
        {
            // It was refused because of a node, which the next change leaves out.
            state.note_broken(None);
        }
        sent
    }

    /// Writes a resource that Azure refuses as it is without the Services that it names, for the change of another one. `None` if it names
    /// none, or refuses it without them, too; `Some(None)` if the resource has to be looked at again.
    pub(super) async fn leave_out_named(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        present: Option<&D::Body>,
        own: Option<(&Key, &D::Wanted)>,
        stale: &mut u32,
    ) -> Result<Option<Option<Duration>>, Error> {
        let Some(broken) = state.broken.as_ref().filter(|broken| broken.may_name) else { return Ok(None) };
        // What it wants itself may be the correction.
        let is_own = own.is_some_and(|own| broken.words.iter().any(|words| self.is_named(words, own)));
        let (Some(present), Some((_, before))) = (present, broken.words.split_last()) else {
            return Ok(None);
        };
        let (mut without, mut last) = (present.clone(), present.clone());
        let services = self.document.leave_out_named(&mut without, &broken.words);
        self.document.leave_out_named(&mut last, before);
        if is_own || without == last {
            return Ok(None);
        }
        let wait = CORRECTION.saturating_sub(broken.since.elapsed());
        if !wait.is_zero() {
            return Ok(Some(Some(wait)));
        }
        self.document.leave_out(&mut without);
        state.sent = Sent::LeavingOut;
        let refusals = broken_words(state);
        let sent = self.send_repair(calls, state, (Some(present.clone()), Some(without)), stale).await?;
        if broken_words(state) == refusals {
            self.document.note_left_out(&services);
        }
        Ok(Some(sent))
    }

    /// What to tell a Service that Azure names in its words about the resource as it is.
    pub(super) fn check_named(
        &self,
        state: &DocumentState<D>,
        own: Option<(&Key, &D::Wanted)>,
    ) -> Result<(), Error> {
        let (Some(broken), Some(own)) = (&state.broken, own) else { return Ok(()) };
        let words = broken.last_words();
        if !self.is_named(words, own) {
            return Ok(());
        }
        let title = self.document.title();
        let message = format!("The {title} is in the state Failed, and Azure names this Service. {words}");
        Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, message))
    }

    fn is_named(&self, words: &str, (service, wanted): (&Key, &D::Wanted)) -> bool {
        let names = BTreeMap::from([(service.clone(), self.document.names(wanted))]);
        refused_items(words, &names, &[]) != RefusedItems::Unknown
    }
}
