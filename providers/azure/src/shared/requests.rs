// SPDX-License-Identifier: Apache-2.0
//! The requests for a shared resource: reads it, writes it, and asks how far a write is. The writer in `shared` calls them, under its lock.
//! What to write, and what follows from a refusal, is decided elsewhere.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::{Error, call_namespace};
use tokio::time::Instant;

use super::{Change, DocumentState, LastRead, MOST_STALE, Shared, Written, shown};
use crate::client::{Call, Calls, object, read};
use crate::document::Document;
use crate::operation::{Operation, Running, STUCK};

impl<D: Document> Shared<D> {
    /// Asks whether the last change is complete. `None` if none runs.
    pub(super) async fn ask(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
    ) -> Result<Option<Duration>, Error> {
        let Some((operation, change)) = &mut state.operation else { return Ok(None) };
        let changed = change.services.len();
        match call_namespace::for_all(operation.ask(calls, self.poll)).await? {
            Running::For(wait) => Ok(Some(wait)),
            Running::Lost => {
                // What somebody else changes is only read.
                let (since, is_own) = (operation.began(), operation.action() != self.document.actions().get);
                let change = state.operation.take().map(|(_, change)| change);
                state.known = None;
                state.busy.get_or_insert(since);
                if is_own {
                    state.is_lost = true;
                    if !state.sent.is_repair() {
                        state.failed = change.filter(|change| !change.services.is_empty());
                    }
                }
                Ok(None)
            }
            Running::Succeeded => {
                state.refused.retain(|address| !change.members.contains(address));
                state.unready = 0;
                state.waiting.retain(|service, _| change.services.iter().all(|(of, _)| of != service));
                (state.operation, state.known) = (None, None);
                state.forget_troubles();
                state.widen(changed);
                Ok(None)
            }
            Running::Failed(failure) => {
                state.known = None;
                let change = state.operation.take().map(|(_, change)| change);
                let services = change.as_ref().map(|change| change.services.clone()).unwrap_or_default();
                let before = change.as_ref().and_then(|change| change.before.clone());
                if failure.is_stale() {
                    if !state.sent.is_repair() {
                        state.failed = change;
                    }
                    return Ok(self.rest(state, &services, before.as_ref(), &failure));
                }
                if state.sent.is_repair() {
                    state.note_broken(Some(&Error::from(failure)));
                    return Ok(None);
                }
                state.failed = change;
                if failure.is_rejected()
                    && self.leave_out_refused(state, &services, before.as_ref(), &failure)?
                {
                    return Ok(None);
                }
                Err(failure.into())
            }
        }
    }

    fn stuck(&self) -> Error {
        Error::Unavailable(format!(
            "The {} has been changing for more than {} minutes, and Azure takes no other change meanwhile. Steerage asks again. Look at its \
             activity log.",
            self.document.title(),
            STUCK.as_secs() / 60
        ))
    }

    /// Reads the resource, if what is known is older. One whose last change failed shows what was wanted, and not what is in place: the
    /// Services of the change have there what they had before.
    pub(super) async fn look(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        age: Duration,
    ) -> Result<Written<D::Body>, Error> {
        if let Some((body, at)) = &state.known
            && (at.elapsed() < age || age == Duration::MAX)
        {
            return Ok(Written::Done(body.clone()));
        }
        state.known = None;
        let get = self.document.actions().get;
        let mut body: Option<D::Body> =
            call_namespace::for_all(read(calls, get, &self.document.path())).await?;
        let is_busy = body.as_ref().is_some_and(|body| self.document.provisioning(body).is_busy());
        if is_busy {
            let since = *state.busy.get_or_insert_with(Instant::now);
            if since.elapsed() >= STUCK {
                return Err(self.stuck());
            }
            let operation = Operation::unknown(get, since, self.poll);
            state.operation =
                Some((operation, Change { services: Vec::new(), before: None, members: BTreeSet::new() }));
            return Ok(Written::Again(self.poll));
        }
        state.busy = None;
        if let Some(body) = &mut body {
            self.document.check(body)?;
            if let Some(change) =
                state.failed.as_ref().filter(|_| self.document.provisioning(body).is_failed())
            {
                for (_, wanted) in &change.services {
                    self.document.take_back(body, change.before.as_ref(), wanted);
                }
            }
        }
        state.known = Some((body.clone(), Instant::now()));
        state.seen = Some(LastRead(body.clone()));
        Ok(Written::Done(body))
    }

    /// Writes the resource. `None` if it has to be looked at again.
    pub(super) async fn send(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        (present, body): (Option<D::Body>, Option<D::Body>),
        changed: Vec<(Key, D::Wanted)>,
        stale: &mut u32,
    ) -> Result<Option<Duration>, Error> {
        let etag = present.as_ref().and_then(|body| self.document.etag(body));
        let (actions, path) = (self.document.actions(), self.document.path());
        let Some(body) = body else { return Ok(None) };
        let members = self.document.members(&body);
        let (call, is_deletion) = if present.is_some() && self.document.is_empty(&body) {
            (Call::delete(actions.delete, path, etag), true)
        } else if present.is_some() {
            (Call::put(actions.put, path, etag, self.document.written(body)), false)
        } else {
            // That it does not exist may have been read long ago: one that somebody made since is kept.
            if call_namespace::for_all(read::<D::Body>(calls, actions.get, &path)).await?.is_some() {
                state.known = None;
                return Ok(None);
            }
            (Call::create(actions.put, path, self.document.written(body)), false)
        };
        let action = call.action;
        // The call may be abandoned before its answer comes.
        let known = state.known.take();
        let failure = match call_namespace::for_all(calls.send(call)).await {
            Ok(answer) => {
                let services = shown(&changed);
                tracing::info!(resource = self.document.title(), services, action, "shared resource changed");
                let body: Option<D::Body> =
                    if is_deletion { None } else { Some(object(action, answer.body.clone())?) };
                let is_busy = body.as_ref().is_some_and(|body| self.document.provisioning(body).is_busy());
                if answer.operation.is_none() && !is_busy && !answer.is_accepted {
                    state.widen(changed.len());
                    state.refused.retain(|address| !members.contains(address));
                    state.waiting.retain(|service, _| changed.iter().all(|(of, _)| of != service));
                    state.unready = 0;
                    state.forget_troubles();
                    state.seen = Some(LastRead(body.clone()));
                    state.known = Some((body, Instant::now()));
                    return Ok(None);
                }
                let operation = Operation::begun(action, &answer, self.poll);
                state.operation = Some((operation, Change { services: changed, before: present, members }));
                return Ok(Some(answer.after.unwrap_or(self.poll)));
            }
            Err(failure) => failure,
        };
        if is_deletion && failure.is_not_found() {
            return Ok(None);
        }
        if failure.is_changed() && *stale < MOST_STALE {
            *stale += 1;
            return Ok(None);
        }
        if failure.is_stale() {
            return Ok(self.rest(state, &changed, present.as_ref(), &failure));
        }
        if failure.is_rejected() && self.leave_out_refused(state, &changed, present.as_ref(), &failure)? {
            // Nothing was changed.
            state.known = known;
            return Ok(None);
        }
        if failure.is_throttled() {
            state.known = known;
        }
        Err(failure.into())
    }
}
