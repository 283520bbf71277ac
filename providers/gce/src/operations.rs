// SPDX-License-Identifier: Apache-2.0
//! Follows operations until they end, with few requests. An operation is asked for when it has probably ended, as the ones before it say,
//! and then less and less often. Whoever asks reads the operations of all Services with one list. That an operation has ended is known until
//! its Service has noted it. Nothing waits here for an operation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use jiff::Timestamp;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use crate::client::{Call, Calls, by_scope, list};
use crate::error::{CallError, Result};
use crate::object::relative;

/// The longest time between two questions for an operation.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The longest time until the first question.
const LONGEST_FIRST: Duration = Duration::from_secs(10);
/// The same for changes of endpoints: until they have ended, no other change of endpoints is sent.
const LONGEST_FIRST_OF_ENDPOINTS: Duration = Duration::from_secs(3);
/// Operations of one list: their names are in its URL.
const AT_ONCE: usize = 50;
/// Who waits longer for the list of another one asks alone.
const PATIENCE: Duration = Duration::from_secs(5);
/// Older ones are asked for by their own Service only.
const OLD: Duration = Duration::from_mins(5);

/// What is known of an operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Progress {
    Running,
    /// It has ended, as it says.
    Ended(Value),
    /// Google does not know it.
    Unknown,
}

#[derive(Debug)]
struct Followed {
    /// The method that started it; empty if that is not known.
    action: &'static str,
    since: Instant,
    /// When it has probably ended.
    first: Instant,
    /// When to ask for it.
    due: Instant,
    /// How it ended.
    end: Option<Progress>,
}

#[derive(Debug, Default)]
struct Known {
    by_path: BTreeMap<String, Followed>,
    /// How long the operations of a method take.
    usual: BTreeMap<&'static str, Duration>,
}

/// The operations that somebody follows, by path.
#[derive(Debug)]
pub(crate) struct Operations {
    /// The shortest time between two questions for an operation.
    least: Duration,
    known: Mutex<Known>,
    /// Held by who reads.
    reading: tokio::sync::Mutex<()>,
}

impl Known {
    fn begin(&mut self, path: &str, action: &'static str, least: Duration) {
        let usual = self.usual.get(action).copied().unwrap_or_default();
        let since = Instant::now();
        let first = since + usual.max(least);
        let followed = Followed { action, since, first, due: first, end: None };
        // Another one may follow it already.
        self.by_path.entry(path.to_owned()).or_insert(followed);
    }

    fn note(&mut self, path: &str, operation: Value, least: Duration) {
        let Some(followed) = self.by_path.get_mut(path) else { return };
        if operation.get("status").and_then(Value::as_str) == Some("DONE") {
            let took = took(&operation).unwrap_or_else(|| followed.since.elapsed());
            if !followed.action.is_empty() {
                // Rather late than twice. Of one that takes long, little is left after a few that do not.
                let took = took.min(longest_first(followed.action));
                let usual = self.usual.entry(followed.action).or_default();
                *usual = took.max((*usual + took) / 2);
            }
            followed.end = Some(Progress::Ended(operation));
            return;
        }
        let now = Instant::now();
        let pause = (followed.since.elapsed() / 2).clamp(least, LONGEST_PAUSE.max(least));
        followed.due = if followed.first > now { followed.first } else { now + pause };
    }

    /// It could not be asked for.
    fn postpone(&mut self, path: &str, least: Duration) {
        if let Some(followed) = self.by_path.get_mut(path) {
            followed.due = Instant::now() + least;
        }
    }

    fn is_due(&self, path: &str) -> bool {
        self.by_path.get(path).is_some_and(|known| known.end.is_none() && known.due <= Instant::now())
    }

    /// These, and the others of their projects that have not ended: those that are due first come first.
    fn batch(&self, own: &[String]) -> BTreeMap<String, Vec<String>> {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for path in own {
            all.entry(project(path).to_owned()).or_default().push(path.clone());
        }
        let mut others: Vec<(&Instant, &String)> = self
            .by_path
            .iter()
            .filter(|(path, known)| known.end.is_none() && known.since.elapsed() < OLD && !own.contains(path))
            .map(|(path, known)| (&known.due, path))
            .collect();
        others.sort();
        for (_, path) in others {
            if let Some(of_project) = all.get_mut(project(path)).filter(|all| all.len() < AT_ONCE) {
                of_project.push(path.clone());
            }
        }
        all
    }
}

impl Operations {
    pub(crate) fn new(least: Duration) -> Self {
        Self { least, known: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation was started by this method.
    pub(crate) fn begin(&self, path: &str, action: &'static str) {
        self.lock().begin(path, action, self.least);
    }

    /// Nobody follows the operation any more.
    pub(crate) fn forget(&self, path: &str) {
        self.lock().by_path.remove(path);
    }

    /// The same for one that was found running. Who started it may follow it still.
    pub(crate) fn forget_found(&self, path: &str) {
        let mut known = self.lock();
        if known.by_path.get(path).is_some_and(|followed| followed.action.is_empty()) {
            known.by_path.remove(path);
        }
    }

    /// When to ask for one of these.
    pub(crate) fn due_in<'a>(&self, paths: impl Iterator<Item = &'a String>) -> Duration {
        let known = self.lock();
        let now = Instant::now();
        let due = paths.filter_map(|path| known.by_path.get(path));
        let due = due.map(|known| if known.end.is_some() { now } else { known.due });
        due.min().map_or(self.least, |due| due.saturating_duration_since(now).max(self.least))
    }

    /// What is known of these operations. Asks for all of them if one is due.
    pub(crate) async fn ask(
        &self,
        calls: &dyn Calls,
        paths: &[String],
    ) -> BTreeMap<String, Result<Progress>> {
        let mut failed = BTreeMap::new();
        if self.is_due(paths) {
            let turn = timeout(PATIENCE, self.reading.lock()).await;
            // Somebody may have asked meanwhile.
            if self.is_due(paths) {
                failed = self.read(calls, paths).await;
            }
            drop(turn);
        }
        let known = self.lock();
        let progress = |path: &String| {
            let end = known.by_path.get(path).and_then(|known| known.end.clone());
            end.unwrap_or(Progress::Running)
        };
        let answers = paths.iter().map(|path| {
            let answer = failed.remove(path).map_or_else(|| Ok(progress(path)), Err);
            (path.clone(), answer)
        });
        answers.collect()
    }

    fn is_due(&self, paths: &[String]) -> bool {
        let mut known = self.lock();
        for path in paths {
            if !known.by_path.contains_key(path) {
                known.begin(path, "", Duration::ZERO);
            }
        }
        paths.iter().any(|path| known.is_due(path))
    }

    /// Reads these, and others with the same request. Returns the failures.
    async fn read(&self, calls: &dyn Calls, own: &[String]) -> BTreeMap<String, CallError> {
        let own: Vec<String> = {
            let known = self.lock();
            let is_running = |path: &&String| known.by_path.get(*path).is_some_and(|op| op.end.is_none());
            own.iter().filter(is_running).cloned().collect()
        };
        let batch = self.lock().batch(&own);
        let mut alone: BTreeSet<String> = own.iter().cloned().collect();
        let mut failed = BTreeMap::new();
        let lists = batch.iter().filter(|(_, paths)| paths.len() > 1).flat_map(|(project, paths)| {
            paths
                .chunks(AT_ONCE)
                .map(move |paths| async move { (paths, listed(calls, project, paths).await) })
        });
        for (paths, listed) in join_all(lists).await {
            match listed {
                Ok(operations) => {
                    for (path, operation) in operations {
                        alone.remove(&path);
                        self.lock().note(&path, operation, self.least);
                    }
                }
                // Each can be read without a list, which fails where any place of the project does.
                Err(failure) if !failure.is_throttled() => {}
                Err(failure) => {
                    for path in paths.iter().filter(|path| alone.remove(*path)) {
                        failed.insert(path.clone(), failure.clone());
                    }
                }
            }
        }
        // What no list has, or is alone.
        let reads = alone.into_iter().map(|path| async move {
            let answer = calls.send(Call::get(operation_get(&path), path.clone())).await;
            (path, answer)
        });
        for (path, answer) in join_all(reads).await {
            match answer {
                Ok(operation) => self.lock().note(&path, operation, self.least),
                Err(failure) if failure.is_not_found() => {
                    if let Some(known) = self.lock().by_path.get_mut(&path) {
                        known.end = Some(Progress::Unknown);
                    }
                }
                Err(failure) => {
                    failed.insert(path, failure);
                }
            }
        }
        for path in failed.keys() {
            self.lock().postpone(path, self.least);
        }
        failed
    }
}

fn longest_first(action: &str) -> Duration {
    let is_of_endpoints =
        action.starts_with("networkEndpointGroups.") && action.ends_with("NetworkEndpoints");
    if is_of_endpoints { LONGEST_FIRST_OF_ENDPOINTS } else { LONGEST_FIRST }
}

/// The operations of a project with these paths, wherever they are.
async fn listed(calls: &dyn Calls, project: &str, paths: &[String]) -> Result<Vec<(String, Value)>> {
    let names: Vec<&str> = paths.iter().map(|path| crate::object::last(path)).collect();
    let call = Call::get("globalOperations.aggregatedList", format!("{project}/aggregated/operations"));
    let call = call.with_filter(format!("name eq '{}'", names.join("|")));
    // Which places cannot be read is no matter: what is missing is read alone.
    let found = list(calls, call, |answer| Ok(by_scope(answer, "operations").found)).await?;
    let named = found.into_iter().filter_map(|(_, operation)| {
        let path = relative(operation.get("selfLink")?.as_str()?).to_owned();
        paths.contains(&path).then_some((path, operation))
    });
    Ok(named.collect())
}

/// `projects/P` of a path.
fn project(path: &str) -> &str {
    let end = path.match_indices('/').nth(1).map_or(path.len(), |(at, _)| at);
    path.get(..end).unwrap_or(path)
}

/// How long an operation took, by Google's clock.
fn took(operation: &Value) -> Option<Duration> {
    let at = |field: &str| operation.get(field)?.as_str()?.parse::<Timestamp>().ok();
    Duration::try_from(at("endTime")?.duration_since(at("insertTime")?)).ok()
}

/// The method that reads the operation of a path.
fn operation_get(path: &str) -> &'static str {
    match path {
        path if path.contains("/zones/") => "zoneOperations.get",
        path if path.contains("/regions/") => "regionOperations.get",
        _ => "globalOperations.get",
    }
}

#[cfg(test)]
mod tests;
