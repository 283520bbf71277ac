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
        Ok(Arc::new(Inventory { began, found }))
    }
}
