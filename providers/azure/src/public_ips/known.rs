// SPDX-License-Identifier: Apache-2.0
//! What is known of the resource group's public IPs: a list for all Services, and which of it may be wrong. Only what may be wrong is read
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{GET, by_name};
use crate::client::{Calls, read};
use crate::config::Config;
use crate::error::CallError;
use crate::types::PublicIp;

type Listed = (Instant, Arc<BTreeMap<String, PublicIp>>);

#[derive(Default)]
pub(super) struct KnownPublicIps {
    listed: Mutex<Option<Listed>>,
    /// The names of those of which the list may be wrong.
    doubtful: std::sync::Mutex<BTreeSet<String>>,
}

/// What is known of a public IP may be wrong from now on, unless an answer says how it is: whoever waits for that may go away.
pub(super) struct Unanswered<'a> {
    known: &'a KnownPublicIps,
    name: Option<String>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            self.known.doubtful().insert(name);
        }
    }
}

impl Unanswered<'_> {
    /// Notes what the answer says; `None` if it is gone.
    pub(super) async fn answered(mut self, ip: Option<PublicIp>) {
        let mut listed = self.known.listed.lock().await;
        if let (Some((_, all)), Some(name)) = (&mut *listed, self.name.take()) {
            note(all, name, ip);
        }
    }
}

impl KnownPublicIps {
    /// All by name, as they are, or were at most so long ago.
    pub(super) async fn all(
        &self,
        calls: &dyn Calls,
        config: &Config,
        age: Duration,
    ) -> Result<Arc<BTreeMap<String, PublicIp>>, CallError> {
        let mut listed = self.listed.lock().await;
        if let Some((at, all)) = &mut *listed
            && at.elapsed() < age
        {
            while let Some(name) = self.next_doubtful() {
                let mut unanswered = self.change(&name);
                let ip = read(calls, GET, &config.public_ip_path(None, &name)).await?;
                unanswered.name = None;
                note(all, name, ip);
            }
            return Ok(Arc::clone(all));
        }
        *listed = None;
        self.doubtful().clear();
        let all = Arc::new(by_name(calls, config.public_ip_path(None, "").trim_end_matches('/')).await?);
        *listed = Some((Instant::now(), Arc::clone(&all)));
        Ok(all)
    }

    /// One that is about to be changed or read.
    pub(super) fn change(&self, name: &str) -> Unanswered<'_> {
        Unanswered { known: self, name: Some(name.to_owned()) }
    }

    /// What was known of one may be wrong.
    pub(super) fn doubt(&self, name: &str) {
        drop(self.change(name));
    }

    /// What was known of all may be wrong.
    pub(super) async fn forget(&self) {
        *self.listed.lock().await = None;
    }

    fn doubtful(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.doubtful.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_doubtful(&self) -> Option<String> {
        self.doubtful().pop_first()
    }
}

fn note(all: &mut Arc<BTreeMap<String, PublicIp>>, name: String, ip: Option<PublicIp>) {
    let all = Arc::make_mut(all);
    match ip {
        Some(ip) => drop(all.insert(name, ip)),
        None => drop(all.remove(&name)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::config;
    use crate::scripted::Scripted;

    const EVER: Duration = Duration::MAX;

    /// Nobody knows what a change without an answer did.
    #[tokio::test(start_paused = true)]
    async fn only_a_public_ip_whose_change_has_no_answer_is_read_again() {
        let (cloud, known, config) = (Scripted::new(), KnownPublicIps::default(), config());
        let path = |name| config.public_ip_path(None, name);
        for name in ["a", "b"] {
            cloud.put(&path(name), json!({ "properties": { "ipAddress": "192.0.2.1" } }));
        }
        let names = async || -> Vec<String> {
            let all = known.all(&cloud, &config, EVER).await.unwrap();
            all.keys().cloned().collect()
        };
        assert_eq!(names().await, ["a", "b"]);
        assert_eq!(cloud.targets().len(), 1, "the list");
        cloud.remove(&path("a"));
        drop(known.change("a"));
        // The read fails, too.
        cloud.break_path(&path("a"), 503);
        assert!(known.all(&cloud, &config, EVER).await.is_err());
        cloud.mend_path(&path("a"));
        cloud.targets();
        assert_eq!(names().await, ["b"]);
        assert_eq!(cloud.targets(), [path("a")]);
        known.change("b").answered(None).await;
        assert!(names().await.is_empty() && cloud.targets().is_empty());
    }
}
