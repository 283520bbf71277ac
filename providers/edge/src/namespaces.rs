// SPDX-License-Identifier: Apache-2.0
//! The labels of namespaces, for pools with a `namespaceSelector`. They are watched from the first such pool on: without one, nothing
//! is read of Namespaces.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use steerage_edge_api::Labels;
use steerage_model::Key;
use steerage_watch::{Event, Kind, Malformed, Object, Store};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Timeout of the first list. Without it, pools with a `namespaceSelector` are for nobody new.
const LISTED_WITHIN: Duration = Duration::from_secs(10);

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    name: String,
    labels: Labels,
}

impl Object for Namespace {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

/// All namespaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamespaceKind;

impl Kind for NamespaceKind {
    type Object = Namespace;

    fn name(&self) -> &'static str {
        "namespaces"
    }

    fn path(&self) -> String {
        "/api/v1/namespaces".to_owned()
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, _: &mut Vec<String>) -> Result<Option<Namespace>, Malformed> {
        let Wire { metadata } = serde_json::from_str(json)?;
        Ok(Some(Namespace { name: metadata.name, labels: metadata.labels.unwrap_or_default() }))
    }
}

#[derive(Deserialize)]
struct Wire {
    metadata: Meta,
}

#[derive(Deserialize)]
struct Meta {
    name: String,
    labels: Option<Labels>,
}

/// The last known labels.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    store: Mutex<Store<Namespace>>,
    listed: Notify,
    /// Whether a pool needs them.
    pub(crate) needed: Notify,
    needed_since: Mutex<Option<Instant>>,
}

impl Namespaces {
    /// A pool selects namespaces by their labels.
    pub(crate) fn need(&self) {
        let mut since = self.needed_since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.is_none() {
            *since = Some(Instant::now());
            self.needed.notify_one();
        }
    }

    /// Waits for the first list, if a pool needs it, but not long after it did so first.
    pub(crate) async fn settled(&self) {
        let since = *self.needed_since.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(since) = since else { return };
        let listed = async {
            loop {
                let listed = self.listed.notified();
                if self.lock().has_synced() {
                    return;
                }
                listed.await;
            }
        };
        // Late, or forbidden: the pools' statuses say so.
        let _ = timeout_at(since + LISTED_WITHIN, listed).await;
    }

    /// The labels of a namespace; `None` if they are not known.
    pub(crate) fn labels(&self, name: &str) -> Option<Labels> {
        self.lock().get(&name.to_owned()).map(|namespace| namespace.labels.clone())
    }

    /// Whether a pool needs the labels, and they are not listed.
    pub(crate) fn is_missing(&self) -> bool {
        let is_needed = self.needed_since.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        is_needed && !self.lock().has_synced()
    }

    /// Takes in an event of the watch. Returns whether labels changed, or all are known now.
    pub(crate) fn apply(&self, event: Event<Namespace>) -> bool {
        let mut store = self.lock();
        let (was_listed, mut has_changed) = (store.has_synced(), false);
        store.apply(event, |old, new| has_changed |= old != new);
        let is_listed = store.has_synced();
        drop(store);
        self.listed.notify_waiters();
        is_listed && (has_changed || !was_listed)
    }

    fn lock(&self) -> MutexGuard<'_, Store<Namespace>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn namespace(name: &str, value: &str) -> Namespace {
        let json = format!(r#"{{"metadata": {{"name": "{name}", "labels": {{"team": "{value}"}}}}}}"#);
        NamespaceKind::project(&json, &mut Vec::new()).expect("JSON").expect("a namespace")
    }

    #[tokio::test(start_paused = true)]
    async fn first_list_is_awaited_but_not_for_ever() {
        let namespaces = Namespaces::default();
        assert!(namespaces.settled().now_or_never().is_some(), "no pool needs it");
        namespaces.need();
        assert!(namespaces.settled().now_or_never().is_none() && namespaces.is_missing());
        let begun = Instant::now();
        namespaces.settled().await;
        assert_eq!(begun.elapsed(), LISTED_WITHIN);
        assert!(namespaces.settled().now_or_never().is_some(), "nobody waits again");
        assert!(
            !namespaces.apply(Event::Init) && !namespaces.apply(Event::InitApply(namespace("shop", "a")))
        );
        assert!(namespaces.apply(Event::InitDone), "all are known now");
        assert!(!namespaces.is_missing());
        let labels = namespaces.labels("shop").expect("known");
        assert_eq!(labels.get("team").map(String::as_str), Some("a"));
        assert!(!namespaces.apply(Event::Apply(namespace("shop", "a"))), "the same labels");
        assert!(namespaces.apply(Event::Apply(namespace("shop", "b"))));
        assert_eq!(namespaces.labels("other"), None);
    }
}
