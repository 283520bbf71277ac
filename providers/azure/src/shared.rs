// SPDX-License-Identifier: Apache-2.0
//! Writes a resource that many Services share. Each call says what its Service wants, and whoever has the lock writes what all of them
//! want, in one request for the version that was read. All wait for its requests, so these take turns as a namespace of their own. What
//! Azure refuses because of one Service is written without it. Nothing waits: calls come again until what their Service wants is in place.
//! `turns` says whose changes a write has, `requests` sends it, `refusals` says what follows from a refusal, `repair`
//! ends the state `Failed`.

mod refusals;
mod repair;
mod requests;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::Error;
use steerage_provider_cloud::Refusals;
use tokio::time::Instant;

use self::repair::Broken;
use crate::client::Calls;
use crate::document::Document;
use crate::operation::Operation;

/// Services that the log of a write names.
const SHOWN: usize = 10;
/// What nobody asks for any more is not written by others.
const FORGOTTEN: Duration = Duration::from_mins(2);
/// Requests that one call makes: others change the resource meanwhile, or Azure refuses it because of several Services.
const MOST_WRITES: usize = 12;
/// Of these, for another version than the one that was read.
const MOST_STALE: u32 = 3;
/// The longest wait after an answer that something else is being changed.
const LONGEST_REST: Duration = Duration::from_mins(1);
/// The same where what a change refers to is not ready: that takes seconds, or it is written again meanwhile.
const LONGEST_UNREADY: Duration = Duration::from_secs(5);
/// So often may Azure say that what a change refers to is not ready, until the Service is left out that it names.
const UNREADY: u32 = 3;
/// Of the Services whose change was refused, until each may try again. It doubles after each further refusal, up to this.
const FIRST_WAIT: Duration = Duration::from_mins(1);
const LONGEST_WAIT: Duration = Duration::from_mins(5);
/// Each such try holds up the changes of all Services: where many are refused, they wait so long for each of them, up to the most.
const WAIT_FOR_EACH: Duration = Duration::from_secs(30);
const MOST_WAIT: Duration = Duration::from_hours(1);
/// What Azure forbids to use is told so long after its last refusal: nobody may change anything after that.
const FORBIDDEN: Duration = Duration::from_mins(10);

/// How far a Service is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Written<B> {
    /// Call again after this time.
    Again(Duration),
    /// What it wants is in place: the resource as it was read, if it exists.
    Done(Option<B>),
}

/// What a Service wants, and since when.
#[derive(Clone, Debug)]
struct Pending<W> {
    wanted: W,
    at: Instant,
}

/// What Azure refuses.
#[derive(Clone, Debug)]
struct Rejection<W> {
    wanted: W,
    error: Error,
    until: Instant,
    wait: Duration,
}

impl<W> Rejection<W> {
    /// The error, until it may be tried again.
    fn check(&self) -> Result<(), Error> {
        if Instant::now() < self.until { Err(self.error.clone()) } else { Ok(()) }
    }
}

/// What was read; nothing if there is no such resource.
struct LastRead<D: Document>(Option<D::Body>);

/// What a write changes.
struct Change<D: Document> {
    services: Vec<(Key, D::Wanted)>,
    /// The resource before.
    before: Option<D::Body>,
    /// The addresses that are in pools when it is complete.
    members: BTreeSet<IpAddr>,
}

/// What a request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// All that is wanted.
    All,
    /// Changes that cannot be wrong in themselves, such as moved endpoints.
    Minor,
    /// One Service.
    Alone,
    /// No change.
    AsItIs,
    /// No change but that Services are left out, whom Azure names in its refusal of the resource as it is.
    LeavingOut,
}

impl Sent {
    /// Whether it was to end the state `Failed`, for no Service.
    fn is_repair(self) -> bool {
        matches!(self, Self::AsItIs | Self::LeavingOut)
    }
}

/// What is known of the resource.
struct DocumentState<D: Document> {
    /// As it was read, and when.
    known: Option<(Option<D::Body>, Instant)>,
    /// As it was read last, although it changes since.
    seen: Option<LastRead<D>>,
    operation: Option<(Operation, Change<D>)>,
    /// A change that failed after Azure had accepted it: the resource shows it nevertheless.
    failed: Option<Change<D>>,
    /// Nobody could say how the last change of this process ended: the state of the resource says whether it failed.
    is_lost: bool,
    /// Since when somebody else changes it.
    busy: Option<Instant>,
    /// Azure refuses it as it is, because of something that nobody here wants.
    broken: Option<Broken>,
    /// What the last request was for.
    sent: Sent,
    /// Answers in a row that something else is being changed, and until when nothing is sent because of them.
    unready: u32,
    rest: Option<Instant>,
    /// Most Services that one write changes: fewer after Azure refused one without the name of a Service.
    limit: usize,
    /// The same of writes of minor changes only.
    minor_limit: usize,
    rejections: BTreeMap<Key, Rejection<D::Wanted>>,
    /// Services that refer to what is not ready: how often Azure said so, and until when they wait alone.
    waiting: BTreeMap<Key, (u32, Instant)>,
    /// Resources to which it refers already, and which Azure says are not ready, by path in lower case, with its words: until then Azure
    /// takes no change.
    not_ready: BTreeMap<String, String>,
    /// Those of them whose Services the controller was told to look at.
    told: BTreeSet<String>,
    /// Those that Azure does not let the identity use, or that a policy forbids, and when it said so last.
    forbidden: BTreeMap<String, (Instant, Error)>,
    refused: Refusals<IpAddr>,
    /// The namespace that had its turn last.
    last: String,
}

impl<D: Document> DocumentState<D> {
    /// For how long the Service waits alone.
    fn must_wait(&self, service: &Key) -> Option<Duration> {
        let (_, until) = self.waiting.get(service)?;
        until.checked_duration_since(Instant::now()).filter(|wait| !wait.is_zero())
    }

    /// The most Services of a write like the last one.
    fn limit(&mut self) -> Option<&mut usize> {
        match self.sent {
            Sent::All => Some(&mut self.limit),
            Sent::Minor => Some(&mut self.minor_limit),
            Sent::Alone | Sent::AsItIs | Sent::LeavingOut => None,
        }
    }

    /// A write of so many Services was accepted: the next one may have more, and as many as there are if nobody was left out.
    fn widen(&mut self, changed: usize) {
        if let Some(limit) = self.limit() {
            *limit = if changed >= *limit { limit.saturating_mul(2) } else { usize::MAX };
        }
    }

    /// The refusal of exactly this.
    fn rejection(&self, service: &Key, wanted: &D::Wanted) -> Option<&Rejection<D::Wanted>> {
        self.rejections.get(service).filter(|rejection| rejection.wanted == *wanted)
    }

    /// Forgets refusals that nobody met for long, such as those of Services that are gone.
    fn forget_old(&mut self) {
        let is_recent = |until: Instant| Instant::now() < until + MOST_WAIT;
        self.rejections.retain(|_, rejection| is_recent(rejection.until));
        self.waiting.retain(|_, (_, until)| is_recent(*until));
    }

    /// A change was accepted: what it refers to is as it should be.
    fn forget_troubles(&mut self) {
        self.not_ready.clear();
        self.told.clear();
        self.forbidden.clear();
    }
}

/// A resource that many Services share.
pub(crate) struct Shared<D: Document> {
    pub(crate) document: D,
    poll: Duration,
    pending: Mutex<BTreeMap<Key, Pending<D::Wanted>>>,
    state: tokio::sync::Mutex<DocumentState<D>>,
}

/// The Services of a write, for logs.
fn shown<W>(changed: &[(Key, W)]) -> String {
    let mut names: Vec<String> = changed.iter().take(SHOWN).map(|(service, _)| service.to_string()).collect();
    if let Some(more) = changed.len().checked_sub(SHOWN).filter(|more| *more > 0) {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

impl<D: Document> Shared<D> {
    pub(crate) fn new(document: D, poll: Duration) -> Self {
        let state = DocumentState {
            known: None,
            seen: None,
            operation: None,
            failed: None,
            is_lost: false,
            busy: None,
            broken: None,
            sent: Sent::All,
            unready: 0,
            rest: None,
            limit: usize::MAX,
            minor_limit: usize::MAX,
            rejections: BTreeMap::new(),
            waiting: BTreeMap::new(),
            not_ready: BTreeMap::new(),
            told: BTreeSet::new(),
            forbidden: BTreeMap::new(),
            refused: Refusals::default(),
            last: String::new(),
        };
        Self { document, poll, pending: Mutex::default(), state: tokio::sync::Mutex::new(state) }
    }

    fn pending(&self) -> MutexGuard<'_, BTreeMap<Key, Pending<D::Wanted>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings in place what a Service wants. What is known of the resource may be of this age.
    pub(crate) async fn write(
        &self,
        calls: &dyn Calls,
        service: &Key,
        wanted: D::Wanted,
        age: Duration,
    ) -> Result<Written<D::Body>, Error> {
        let pending = Pending { wanted: wanted.clone(), at: Instant::now() };
        self.pending().insert(service.clone(), pending);
        let mut state = self.state.lock().await;
        let result = self.advance(calls, &mut state, Some((service, &wanted)), age).await;
        // What is refused must not be part of the writes of others, until its own call tries it again.
        if matches!(result, Ok(Written::Done(_)) | Err(Error::Invalid { .. } | Error::Denied(_))) {
            self.pending().remove(service);
        }
        result
    }

    /// The error of a Service whose change was refused, until it may try again. What only prepares the change need not be done before.
    pub(crate) async fn check_rejected(&self, service: &Key, wanted: &D::Wanted) -> Result<(), Error> {
        self.state.lock().await.rejection(service, wanted).map_or(Ok(()), Rejection::check)
    }

    /// Brings in place what no single Service owns.
    pub(crate) async fn write_common(&self, calls: &dyn Calls) -> Result<Written<D::Body>, Error> {
        let mut state = self.state.lock().await;
        self.advance(calls, &mut state, None, Duration::MAX).await
    }

    /// The resource as it is, or was at most so long ago; `Again` while it is being changed.
    pub(crate) async fn read(&self, calls: &dyn Calls, age: Duration) -> Result<Written<D::Body>, Error> {
        let mut state = self.state.lock().await;
        if let Some(wait) = self.ask(calls, &mut state).await? {
            return Ok(Written::Again(wait));
        }
        self.look(calls, &mut state, age).await
    }

    /// The same, or what was there before it began to change. Only what this process writes of a Service can have changed for it, so its
    /// next write is planned, and is part of the next one for all.
    pub(crate) async fn look_past(
        &self,
        calls: &dyn Calls,
        age: Duration,
    ) -> Result<Written<D::Body>, Error> {
        match self.read(calls, age).await? {
            Written::Again(wait) => {
                let state = self.state.lock().await;
                Ok(state.seen.as_ref().map_or(Written::Again(wait), |seen| Written::Done(seen.0.clone())))
            }
            done @ Written::Done(_) => Ok(done),
        }
    }

    /// Takes back what a Service wanted and nobody has written. When to call again; `None` if nothing that is under way can bring it in place.
    pub(crate) async fn withdraw(
        &self,
        calls: &dyn Calls,
        service: &Key,
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        self.pending().remove(service);
        let mut state = self.state.lock().await;
        if let Some((_, change)) = &state.operation {
            // Whose a change is that somebody else began, or whose answer was lost, is not known.
            let is_its = |(of, _): &(Key, D::Wanted)| of == service;
            if !change.services.is_empty() && !change.services.iter().any(is_its) {
                if let Some(LastRead(seen)) = &state.seen {
                    self.document.forget(service, seen.as_ref());
                }
                return Ok(None);
            }
            if let Some(wait) = self.ask(calls, &mut state).await? {
                return Ok(Some(wait));
            }
        }
        Ok(match self.look(calls, &mut state, age).await? {
            Written::Again(wait) => Some(wait),
            Written::Done(body) => {
                self.document.forget(service, body.as_ref());
                None
            }
        })
    }

    /// The addresses of nodes that Azure refuses, with its words.
    pub(crate) async fn refused(&self, nodes: impl Iterator<Item = IpAddr>) -> BTreeMap<IpAddr, String> {
        let state = self.state.lock().await;
        let of = |address: IpAddr| {
            let why = state.refused.reason(&address).filter(|_| state.refused.must_wait(&address))?;
            Some((address, why.to_owned()))
        };
        nodes.filter_map(of).collect()
    }

    /// What it refers to and is not ready, by path in lower case, with Azure's words.
    pub(crate) async fn not_ready(&self) -> BTreeMap<String, String> {
        self.state.lock().await.not_ready.clone()
    }

    /// What it refers to and Azure refused lately, by path in lower case: with it, Azure takes no change.
    pub(crate) async fn forbidden(&self) -> BTreeMap<String, Error> {
        let state = self.state.lock().await;
        let recent = state.forbidden.iter().filter(|(_, (at, _))| at.elapsed() < FORBIDDEN);
        recent.map(|(path, (_, error))| (path.clone(), error.clone())).collect()
    }

    /// Refuses what has no place in the resource, before anything is prepared for it. When to call again, if it is being changed and may
    /// have room then; `None` if it has, as far as is known.
    pub(crate) async fn check_place(
        &self,
        calls: &dyn Calls,
        wanted: &D::Wanted,
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        let read = self.read(calls, age).await?;
        let state = self.state.lock().await;
        let mut body = match (&read, &state.seen) {
            (Written::Done(body), _) | (Written::Again(_), Some(LastRead(body))) => body.clone(),
            (Written::Again(_), None) => return Ok(None),
        };
        let is_refused = |address: &IpAddr| state.refused.must_wait(address);
        match (self.document.apply(&mut body, wanted, &is_refused), read) {
            (Ok(_), _) => Ok(None),
            (Err(_), Written::Again(wait)) => Ok(Some(wait)),
            (Err(error), Written::Done(_)) => Err(error),
        }
    }

    async fn advance(
        &self,
        calls: &dyn Calls,
        state: &mut DocumentState<D>,
        own: Option<(&Key, &D::Wanted)>,
        age: Duration,
    ) -> Result<Written<D::Body>, Error> {
        let mut stale = 0;
        state.forget_old();
        for _ in 0..MOST_WRITES {
            if let Some(wait) = state.rest.and_then(|rest| rest.checked_duration_since(Instant::now()))
                && !wait.is_zero()
            {
                return Ok(Written::Again(wait));
            }
            if let Some(wait) = self.ask(calls, state).await? {
                let in_place = if age == Duration::MAX { self.in_place(state, own) } else { None };
                return Ok(in_place.unwrap_or(Written::Again(wait)));
            }
            let present = match self.look(calls, state, age).await? {
                Written::Again(wait) => return Ok(Written::Again(wait)),
                Written::Done(present) => present,
            };
            let is_failed = present.as_ref().is_some_and(|body| self.document.provisioning(body).is_failed());
            if !is_failed {
                state.failed = None;
                state.broken = None;
            }
            if std::mem::take(&mut state.is_lost) && is_failed {
                self.note_lost_failure(state)?;
            }
            // Azure refuses it as it is, and there is nothing to write without what is given up.
            let is_given_up = present.as_ref().is_some_and(|body| self.document.is_given_up(body));
            if is_failed && !is_given_up && state.failed.is_none() && state.is_repair_due() {
                match self.repair(calls, state, present, &mut stale).await? {
                    Some(wait) => return Ok(Written::Again(wait)),
                    None => continue,
                }
            }
            let is_broken = state.broken.is_some();
            let rejection = own.and_then(|(service, wanted)| state.rejection(service, wanted));
            rejection.map_or(Ok(()), Rejection::check)?;
            if let Some((service, _)) = own
                && let Some(wait) = state.must_wait(service)
            {
                return Ok(Written::Again(wait));
            }
            let is_tried_again = rejection.is_some();
            let is_doubtful = own.is_some_and(|(service, _)| state.rejections.contains_key(service));
            // What it wants may be part of what was refused, such as moved endpoints.
            let is_over = own.is_some_and(|(_, wanted)| is_tried_again || self.document.is_whole(wanted));
            let mut with_own = present.clone();
            let is_refused = |address: &IpAddr| state.refused.must_wait(address);
            let mut changes = match own {
                Some((_, wanted)) => self.document.apply(&mut with_own, wanted, &is_refused)?,
                None => false,
            };
            changes |= self.document.tidy(&mut with_own, &is_refused);
            // What one adds, the other may remove.
            changes &= with_own != present;
            if !changes && (!is_failed || is_broken || is_given_up) {
                if let (Some((service, _)), true) = (own, is_over) {
                    state.rejections.remove(service);
                }
                if is_failed {
                    self.check_named(state, own)?;
                }
                return Ok(Written::Done(present));
            }
            if is_broken
                && let Some(wait) =
                    self.leave_out_named(calls, state, present.as_ref(), own, &mut stale).await?
            {
                match wait {
                    Some(wait) => return Ok(Written::Again(wait)),
                    None => continue,
                }
            }
            // What was refused goes alone, and what its Service wants instead: nobody else waits for another refusal. So it goes where each
            // change is likely to be refused.
            let is_alone =
                is_tried_again || is_doubtful && !self.document.is_minor(present.as_ref(), with_own.as_ref());
            let alone = own.filter(|_| is_alone || is_broken);
            let (mut body, changed, sent) = self.gather(state, present.as_ref(), alone);
            self.document.tidy(&mut body, &|address| state.refused.must_wait(address));
            if let Some((last, _)) = changed.last() {
                last.namespace().clone_into(&mut state.last);
            }
            state.sent = sent;
            if let Some(wait) = self.send(calls, state, (present, body), changed, &mut stale).await? {
                return Ok(Written::Again(wait));
            }
        }
        Err(Error::Busy(format!("The {} is being changed", self.document.title())))
    }

    /// The resource before a change that is only of others and runs, if what a Service wants was in place then.
    fn in_place(
        &self,
        state: &DocumentState<D>,
        own: Option<(&Key, &D::Wanted)>,
    ) -> Option<Written<D::Body>> {
        let ((service, wanted), (_, change), LastRead(seen)) =
            (own?, state.operation.as_ref()?, state.seen.as_ref()?);
        // Whose a change is that somebody else began, or whose answer was lost, is not known.
        if change.services.is_empty() || change.services.iter().any(|(of, _)| of == service) {
            return None;
        }
        if seen.as_ref().is_some_and(|body| self.document.provisioning(body).is_failed()) {
            return None;
        }
        let is_refused = |address: &IpAddr| state.refused.must_wait(address);
        let mut body = seen.clone();
        let changes = self.document.apply(&mut body, wanted, &is_refused).ok()?;
        (!changes && !self.document.tidy(&mut body, &is_refused)).then(|| Written::Done(seen.clone()))
    }
}

#[cfg(test)]
mod tests;
