// SPDX-License-Identifier: Apache-2.0
//! Lists that show what deletions left. Each deletion needs a list that begins after its last change. The first one reads it at once; those
//! who need one during the next seconds come again, and have one together.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::Error;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::observe::Inventory;
use crate::provider::Gce;

/// Times between two lists, in times of the shortest poll: 2s.
const PAUSE: u32 = 4;
/// Who waits longer for the list of another one reads alone.
const PATIENCE: Duration = Duration::from_secs(5);

/// The last list, and who waits for the next one.
#[derive(Debug, Default)]
pub(crate) struct Leftovers(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    last: Option<Arc<Inventory>>,
    /// When the last list was begun, whatever came of it.
    began: Option<Instant>,
    waiting: BTreeSet<Key>,
}

impl Gce {
    /// All that the Service has, read after this time; with `needs_all`, all that the cluster has. `None` if the caller has to come again.
    pub(crate) async fn list_since(
        &self,
        service: &Key,
        since: Instant,
        needs_all: bool,
    ) -> Result<Option<Arc<Inventory>>, Error> {
        let Ok(mut lists) = timeout(PATIENCE, self.leftovers.0.lock()).await else {
            return Ok(Some(self.list_now(service, needs_all).await?));
        };
        if let Some(last) = lists.last.as_ref().filter(|last| last.began >= since) {
            return Ok(Some(Arc::clone(last)));
        }
        if lists.began.is_some_and(|began| began.elapsed() < self.config.poll * PAUSE) {
            lists.waiting.insert(service.clone());
            return Ok(None);
        }
        lists.waiting.remove(service);
        let is_for_all = needs_all || !lists.waiting.is_empty();
        lists.began = Some(Instant::now());
        let list = self.list_now(service, is_for_all).await?;
        if is_for_all {
            lists.waiting.clear();
            lists.last = Some(Arc::clone(&list));
        }
        Ok(Some(list))
    }

    async fn list_now(&self, service: &Key, is_for_all: bool) -> Result<Arc<Inventory>, Error> {
        let began = Instant::now();
        let found = self.list_all((!is_for_all).then_some(service)).await?;
        Ok(Arc::new(Inventory { began, has_shared: is_for_all, found }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use serde_json::{Value, json};

    use super::*;
    use crate::client::{Call, Calls};
    use crate::config::Config;
    use crate::config::tests::config;

    /// Nothing is there. Notes the filters of lists.
    #[derive(Default)]
    struct Empty(Mutex<Vec<String>>);

    #[async_trait]
    impl Calls for Empty {
        async fn send(&self, call: Call) -> crate::error::Result<Value> {
            self.0.lock().unwrap().push(call.query[0].1.clone());
            Ok(json!({}))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn first_deletion_reads_at_once_and_those_of_the_next_seconds_have_one_list() {
        let calls = Arc::new(Empty::default());
        let gce = Gce::over(Config { poll: Duration::from_millis(500), ..config() }, calls.clone());
        // The Services of whose resources lists were made.
        let listed = || {
            let filters = std::mem::take(&mut *calls.0.lock().unwrap());
            (filters.len(), filters.iter().filter(|filter| filter.contains("shop/")).count())
        };
        let [a, b, c] = ["a", "b", "c"].map(|name| Key::new("shop", name));
        let start = Instant::now();
        assert!(gce.list_since(&a, start, false).await.unwrap().is_some());
        assert_eq!(listed(), (6, 6), "its own");
        for service in [&b, &c] {
            assert!(gce.list_since(service, Instant::now(), false).await.unwrap().is_none());
        }
        let asked = Instant::now();
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(gce.list_since(&b, asked, false).await.unwrap().is_some());
        assert!(gce.list_since(&c, asked, false).await.unwrap().is_some());
        assert_eq!(listed(), (6, 0), "one of all for both");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(gce.list_since(&c, Instant::now(), true).await.unwrap().is_none(), "that list is too old");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(gce.list_since(&a, Instant::now(), true).await.unwrap().is_some());
        assert_eq!(listed(), (6, 0), "one that needs all lists all");
    }
}
