// SPDX-License-Identifier: Apache-2.0
//! The calls of a read of one Service's resources that AWS takes one by one: for each group and each listener. AWS may throttle them halfway,
//! and together they may need longer than a call may take. The next try continues: `observe` makes these calls through a [`Reader`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::{CallError, Calls};
use crate::diff::ObservedGroup;

/// A read begins again if AWS answered nothing for so long: something else may have changed meanwhile.
const MAX_PAUSE: Duration = Duration::from_mins(2);
/// It also begins again if it has taken so long. A read of a hundred groups in an account that throttles needs tries over many minutes: it
/// must be possible to end.
const MAX_AGE: Duration = Duration::from_mins(30);

/// What a read that was not completed has read so far.
#[derive(Debug, Default)]
pub(crate) struct PartialRead {
    /// When the read began, and when AWS last answered.
    started: Option<(Instant, Instant)>,
    /// By name. One that did not exist may by the next try.
    groups: BTreeMap<String, ObservedGroup>,
    /// Of target groups, by ARN.
    attributes: BTreeMap<String, BTreeMap<String, String>>,
    /// Beside the default one, by ARN of the listener.
    certificates: BTreeMap<String, BTreeSet<String>>,
}

/// Reads, and continues what was read so far.
pub(crate) struct Reader<'a> {
    pub(crate) client: &'a dyn Calls,
    read: &'a mut PartialRead,
    until: Instant,
}

impl<'a> Reader<'a> {
    /// Makes calls until this time. What was read before this process's last change counts no more.
    pub(crate) fn new(
        client: &'a dyn Calls,
        read: &'a mut PartialRead,
        written: Option<Instant>,
        until: Instant,
    ) -> Self {
        let is_old = |(began, answered): (Instant, Instant)| {
            let is_over = answered.elapsed() > MAX_PAUSE || began.elapsed() > MAX_AGE;
            is_over || written.is_some_and(|written| written >= began)
        };
        if read.started.is_none_or(is_old) {
            let now = Instant::now();
            *read = PartialRead { started: Some((now, now)), ..PartialRead::default() };
        }
        Self { client, read, until }
    }

    /// The read is complete.
    pub(crate) fn finish(&mut self) {
        *self.read = PartialRead::default();
    }

    pub(crate) async fn group_named(&mut self, name: &str) -> Result<Option<ObservedGroup>, CallError> {
        if let Some(known) = self.read.groups.get(name) {
            return Ok(Some(known.clone()));
        }
        self.check_time()?;
        let found = self.client.group_named(name).await?;
        self.note_answer();
        self.read.groups.extend(found.clone().map(|group| (name.to_owned(), group)));
        Ok(found)
    }

    /// The attributes of a target group.
    pub(crate) async fn attributes(&mut self, group: &str) -> Result<BTreeMap<String, String>, CallError> {
        if let Some(known) = self.read.attributes.get(group) {
            return Ok(known.clone());
        }
        self.check_time()?;
        let found = self.client.attributes(group).await?;
        self.note_answer();
        self.read.attributes.insert(group.to_owned(), found.clone());
        Ok(found)
    }

    pub(crate) async fn other_certificates(&mut self, listener: &str) -> Result<BTreeSet<String>, CallError> {
        if let Some(known) = self.read.certificates.get(listener) {
            return Ok(known.clone());
        }
        self.check_time()?;
        let found = self.client.other_certificates(listener).await?;
        self.note_answer();
        self.read.certificates.insert(listener.to_owned(), found.clone());
        Ok(found)
    }

    fn check_time(&self) -> Result<(), CallError> {
        if Instant::now() < self.until { Ok(()) } else { Err(CallError::out_of_time()) }
    }

    fn note_answer(&mut self) {
        if let Some((_, answered)) = &mut self.read.started {
            *answered = Instant::now();
        }
    }
}
