// SPDX-License-Identifier: Apache-2.0
//! What is known of the resource group's public IPs: a list for all Services, and which of it may be wrong. Only what may be wrong is read
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_provider_api::call_namespace;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{GET, by_name};
use crate::client::{Calls, read};
use crate::config::Config;
use crate::error::CallError;
use crate::types::PublicIp;

/// More are read by a list.
const MAX_SINGLE_READS: usize = 4;

type Listed = (Instant, Arc<BTreeMap<String, PublicIp>>);

#[derive(Default)]
pub(super) struct KnownPublicIps {
    listed: Mutex<Option<Listed>>,
    /// The names of those of which the list may be wrong.
    to_read_again: std::sync::Mutex<BTreeSet<String>>,
}

/// Until an answer is noted, what is known of this public IP may be wrong. Dropped without one, also because who waited for it has gone, it
/// makes [`KnownPublicIps::all`] read the public IP again.
pub(super) struct ExpectedAnswer<'a> {
    known: &'a KnownPublicIps,
    name: Option<String>,
}

impl Drop for ExpectedAnswer<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            self.known.to_read_again().insert(name);
        }
    }
}

impl ExpectedAnswer<'_> {
    /// Notes what the answer says; `None` if it is gone.
    pub(super) async fn note_answer(mut self, ip: Option<PublicIp>) {
        let mut listed = self.known.listed.lock().await;
        if let (Some((_, all)), Some(name)) = (&mut *listed, self.name.take()) {
            note(all, name, ip);
        }
    }
}

impl KnownPublicIps {
    /// All by name, from a list that is at most so old. Those that may be wrong are read first, one by one.
    pub(super) async fn all(
        &self,
        calls: &dyn Calls,
        config: &Config,
        age: Duration,
    ) -> Result<Arc<BTreeMap<String, PublicIp>>, CallError> {
        let mut listed = self.listed.lock().await;
        if let Some((at, all)) = &mut *listed
            && at.elapsed() < age
            && self.to_read_again().len() <= MAX_SINGLE_READS
        {
            loop {
                let Some(name) = self.to_read_again().pop_first() else { return Ok(Arc::clone(all)) };
                let mut expected = self.expect_answer(&name);
                let path = config.public_ip_path(None, &name);
                match call_namespace::for_all(read(calls, GET, &path)).await {
                    Ok(ip) => {
                        expected.name = None;
                        note(all, name, ip);
                    }
                    // One that cannot be read is no reason to know nothing of the others.
                    Err(_) => break,
                }
            }
        }
        *listed = None;
        self.to_read_again().clear();
        let all = Arc::new(call_namespace::for_all(by_name(calls, config, None)).await?);
        *listed = Some((Instant::now(), Arc::clone(&all)));
        Ok(all)
    }

    /// One that is about to be changed or read.
    pub(super) fn expect_answer(&self, name: &str) -> ExpectedAnswer<'_> {
        ExpectedAnswer { known: self, name: Some(name.to_owned()) }
    }

    /// What was known of one may be wrong.
    pub(super) fn read_again(&self, name: &str) {
        drop(self.expect_answer(name));
    }

    /// What was known of all may be wrong.
    pub(super) async fn forget(&self) {
        *self.listed.lock().await = None;
    }

    fn to_read_again(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.to_read_again.lock().unwrap_or_else(PoisonError::into_inner)
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
        drop(known.expect_answer("a"));
        assert_eq!(names().await, ["b"]);
        assert_eq!(cloud.targets(), [path("a")]);
        // One that cannot be read does not hide the others.
        cloud.break_path(&path("b"), 503);
        known.read_again("b");
        assert_eq!(names().await, ["b"]);
        assert_eq!(cloud.targets(), [path("b"), path("").trim_end_matches('/').to_owned()]);
        for name in ["c", "d", "e", "f", "g"] {
            known.read_again(name);
        }
        assert_eq!(names().await, ["b"]);
        assert_eq!(cloud.targets().len(), 1, "only a few are read one by one");
        known.expect_answer("b").note_answer(None).await;
        assert!(names().await.is_empty() && cloud.targets().is_empty());
    }
}
