// SPDX-License-Identifier: Apache-2.0
//! Operations of which nothing is remembered: those of a process that ended, and of requests whose answer was lost. Until they end, what is
//! read is not what will be in place. So they are looked for at the first call of a process and after a lost answer, and all changes wait
//! until they have ended, for a minute at most.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::try_join;
use serde_json::Value;
use steerage_provider_api::Error;
use steerage_provider_cloud::names;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::client::{Call, items, list};
use crate::error::CallError;
use crate::object::{last, relative};
use crate::operations::Progress;
use crate::provider::Gce;

/// What has not ended.
const RUNNING: &str = "status ne 'DONE'";
/// Others wait no longer for an operation.
const LONGEST: Duration = Duration::from_mins(1);

/// The operations.
#[derive(Debug)]
pub(crate) struct Unknown {
    must_list: AtomicBool,
    /// Paths, and since when each is known. One that others do not wait for any more stays, so that they do not begin again.
    pending: Mutex<BTreeMap<String, Instant>>,
}

impl Default for Unknown {
    fn default() -> Self {
        Self { must_list: AtomicBool::new(true), pending: Mutex::default() }
    }
}

impl Unknown {
    /// A request may have started an operation of which nothing is known.
    pub(crate) fn note(&self) {
        self.must_list.store(true, Ordering::Relaxed);
    }

    /// Notes that, unless the answers come.
    pub(crate) fn expect_answers(&self) -> ExpectedAnswers<'_> {
        ExpectedAnswers(Some(self))
    }
}

/// Requests whose answers are not there yet.
pub(crate) struct ExpectedAnswers<'a>(Option<&'a Unknown>);

impl ExpectedAnswers<'_> {
    /// The answers are there.
    pub(crate) fn received(mut self) {
        self.0 = None;
    }
}

impl Drop for ExpectedAnswers<'_> {
    /// The call was abandoned.
    fn drop(&mut self) {
        if let Some(unknown) = self.0 {
            unknown.note();
        }
    }
}

/// All that run, and those that a list may not show yet. Each keeps the time since which it is known.
fn note_found(pending: &mut BTreeMap<String, Instant>, found: Vec<String>, now: Instant) {
    let known = std::mem::take(pending);
    pending.extend(found.into_iter().map(|path| {
        let since = known.get(&path).copied().unwrap_or(now);
        (path, since)
    }));
    pending.extend(known.into_iter().filter(|(_, since)| must_wait(*since)));
}

fn must_wait(since: Instant) -> bool {
    since.elapsed() < LONGEST
}

impl Gce {
    /// False while there are such operations.
    pub(crate) async fn settle_unknown(&self) -> Result<bool, Error> {
        let mut pending = self.unknown.pending.lock().await;
        if self.unknown.must_list.swap(false, Ordering::Relaxed) {
            let expected = self.unknown.expect_answers();
            let found = self.running_operations().await?;
            expected.received();
            for path in &found {
                // It ran a moment ago.
                self.operations.begin(path, "");
            }
            let now = Instant::now();
            note_found(&mut pending, found, now);
        }
        for (path, _) in pending.iter().filter(|(_, since)| !must_wait(**since)) {
            self.operations.forget_found(path);
        }
        let waiting: Vec<String> =
            pending.iter().filter(|(_, since)| must_wait(**since)).map(|(path, _)| path.clone()).collect();
        for (path, progress) in self.operations.ask(&*self.calls, &waiting).await {
            if progress? != Progress::Running {
                pending.remove(&path);
                self.operations.forget_found(&path);
            }
        }
        Ok(!pending.values().any(|since| must_wait(*since)))
    }

    /// The paths of the operations on the cluster's resources that run.
    async fn running_operations(&self) -> Result<Vec<String>, Error> {
        let path = format!("projects/{}/aggregated/operations", self.config.project);
        let everywhere = Call::get("globalOperations.aggregatedList", path).with_filter(RUNNING.to_owned());
        let in_host = async {
            if !self.config.is_shared_vpc() {
                return Ok(Vec::new());
            }
            let path = format!("projects/{}/global/operations", self.config.network_project());
            let call = Call::get("globalOperations.list", path).with_filter(RUNNING.to_owned());
            match list(&*self.calls, call, items).await {
                // Firewall rules of a Shared VPC may be somebody else's.
                Err(failure) if failure.is_denied() => Ok(Vec::new()),
                other => other,
            }
        };
        let (found, in_host) = try_join(self.list_places(everywhere, "operations"), in_host)
            .await
            .map_err(|failure: CallError| Error::from(failure))?;
        let prefix = names::prefix(&self.config.cluster);
        let text = |operation: &Value, field: &str| operation.get(field)?.as_str().map(str::to_owned);
        let all = found.into_iter().map(|(_, operation)| operation).chain(in_host);
        let ours = all.filter(|operation| {
            text(operation, "targetLink").is_some_and(|target| last(&target).starts_with(&prefix))
        });
        Ok(ours.filter_map(|operation| Some(relative(&text(&operation, "selfLink")?).to_owned())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stuck_operation_is_waited_for_once() {
        let mut pending = BTreeMap::new();
        let waits = |pending: &BTreeMap<String, Instant>| pending.values().any(|since| must_wait(*since));
        note_found(&mut pending, vec!["stuck".to_owned()], Instant::now());
        assert!(waits(&pending));
        tokio::time::advance(LONGEST).await;
        assert!(!waits(&pending));
        // Another answer is lost.
        note_found(&mut pending, vec!["stuck".to_owned()], Instant::now());
        assert!(!waits(&pending));
        note_found(&mut pending, vec!["stuck".to_owned(), "new".to_owned()], Instant::now());
        assert!(waits(&pending));
        note_found(&mut pending, Vec::new(), Instant::now());
        assert_eq!(pending.keys().collect::<Vec<_>>(), ["new"], "the other one ended");
    }
}
