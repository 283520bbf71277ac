// SPDX-License-Identifier: Apache-2.0
//! What Services share: health checks of nodes, and the firewall rules that admit them. They exist as long as a Service needs them. A Service
//! says that it needs them before it looks for them, and they are deleted under the same lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::config::Config;
use crate::known::{Claim, Content, KnownShared};
use crate::marks;
use crate::object::{Id, Kind};
use crate::observe::Inventory;
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::step::Step;
use crate::tree::Tree;

/// After this time a deletion is tried again that failed.
const FAILED_WAIT: Duration = Duration::from_mins(1);

/// A list that is older is read again before anything is deleted.
const OLD_LIST: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Users {
    by_service: BTreeMap<Key, BTreeSet<Id>>,
    /// The Services whose load balancers may still refer to something else than they need now. Until they do not, no list shows that it
    /// is not needed.
    moving: BTreeSet<Key>,
    /// Since when something may not be needed any more.
    dirty_since: Option<Instant>,
    /// What the deletion goes by: a list, without what was deleted since.
    list: Option<Arc<Inventory>>,
    /// What is being deleted.
    deleting: BTreeSet<Id>,
    /// The deletions that have not ended.
    state: ServiceState,
    /// When the last deletion failed.
    failed_at: Option<Instant>,
}

/// Who needs what.
#[derive(Debug)]
pub(crate) struct Shared {
    users: Mutex<Users>,
    known: KnownShared,
}

impl Users {
    fn is_deleting(&self, ids: &BTreeSet<Id>) -> bool {
        self.state.pending.iter().any(|pending| ids.contains(pending.step.id()))
    }
}

impl Default for Shared {
    /// A process that ended may have left something.
    fn default() -> Self {
        let users = Users {
            by_service: BTreeMap::new(),
            moving: BTreeSet::new(),
            dirty_since: Some(Instant::now()),
            list: None,
            deleting: BTreeSet::new(),
            state: ServiceState::default(),
            failed_at: None,
        };
        Self { users: Mutex::new(users), known: KnownShared::default() }
    }
}

/// How far what nobody needs is deleted.
pub(crate) enum Cleaned {
    Done,
    /// Operations have not ended.
    Pending,
    /// It failed. It can be tried again after this time.
    Later(Duration),
}

/// The owner of what has none, in logs.
fn nobody() -> Owner {
    Owner { service: Key::new("", ""), uid: String::new() }
}

impl Shared {
    /// The Service needs these from now on. False while one of them is being deleted: it waits for no other deletion.
    pub(crate) async fn begin_use(&self, gce: &Gce, service: &Key, ids: BTreeSet<Id>) -> bool {
        let mut users = self.users.lock().await;
        if users.is_deleting(&ids) {
            match gce.settle_known(&mut users.state).await {
                Ok(_) => users.note_deleted(&self.known),
                Err(error) => {
                    tracing::warn!(%error, "operation that deletes a shared health check not read; retrying");
                    users.abandon(&self.known);
                }
            }
            if users.is_deleting(&ids) {
                return false;
            }
        }
        let before = users.by_service.insert(service.clone(), ids.clone());
        if before.is_some_and(|before| before != ids) {
            users.moving.insert(service.clone());
        }
        true
    }

    /// The Service's load balancer refers to something that the Service does not need any more.
    pub(crate) async fn note_moving(&self, service: &Key) {
        self.users.lock().await.moving.insert(service.clone());
    }

    /// The Service's load balancer refers only to what the Service needs.
    pub(crate) async fn end_moving(&self, service: &Key) {
        let mut users = self.users.lock().await;
        if users.moving.remove(service) {
            users.note_dirty();
        }
    }

    /// The Service needs nothing any more, and nothing in place refers to what it needed.
    pub(crate) async fn end_use(&self, service: &Key) {
        let mut users = self.users.lock().await;
        let before = users.by_service.remove(service);
        let was_moving = users.moving.remove(service);
        let is_needed = |id: &Id| users.by_service.values().any(|ids| ids.contains(id));
        // What a Service used is not known if it was not applied by this process.
        if was_moving || before.is_none_or(|before| !before.iter().all(is_needed)) {
            users.note_dirty();
        }
    }

    /// What an earlier Service of a name used may not be needed any more: nothing of it is left.
    pub(crate) async fn end_earlier(&self) {
        self.users.lock().await.note_dirty();
    }

    /// Whether something may not be needed any more.
    pub(crate) async fn is_dirty(&self) -> bool {
        self.users.lock().await.dirty_since.is_some()
    }

    /// Deletes what nobody needs. False if that has not ended. `recent` is a list that the caller has read.
    pub(crate) async fn clean(&self, gce: &Gce, recent: Option<&Arc<Inventory>>) -> Result<bool, Error> {
        self.users.lock().await.clean(gce, recent).await
    }

    /// Content of a shared resource, that a request of this process made or found.
    pub(crate) fn note_known(&self, id: &Id, content: Option<Value>) {
        self.known.note(id, content);
    }

    /// Its content, if it is known newer than by the list that began to be read then.
    pub(crate) fn content(&self, id: &Id, listed: Option<Instant>) -> Option<Content> {
        self.known.content(id, listed)
    }

    /// What came of a change of it is not known.
    pub(crate) fn forget_known(&self, id: &Id) {
        self.known.forget(id);
    }

    /// The Service is about to make it, unless another one does.
    pub(crate) fn claim(&self, id: &Id, service: &Key) -> Claim {
        self.known.claim(id, service)
    }

    /// The same for a Service that is complete: a failure is not its own, so it is logged, and tried again after a while. That GCE has too
    /// many requests concerns all.
    pub(crate) async fn clean_later(&self, gce: &Gce) -> Result<Cleaned, Error> {
        let mut users = self.users.lock().await;
        if users.failed_at.is_some_and(|at| at.elapsed() < FAILED_WAIT) {
            return Ok(Cleaned::Later(FAILED_WAIT));
        }
        users.failed_at = None;
        match users.clean(gce, None).await {
            Ok(true) => Ok(Cleaned::Done),
            Ok(false) => Ok(Cleaned::Pending),
            Err(error @ Error::Throttled { .. }) => Err(error),
            Err(error) => {
                tracing::warn!(%error, "shared health checks that nothing needs are not deleted; retrying");
                users.note_dirty();
                users.failed_at = Some(Instant::now());
                Ok(Cleaned::Later(FAILED_WAIT))
            }
        }
    }
}

impl Users {
    fn note_dirty(&mut self) {
        self.dirty_since = Some(Instant::now());
    }

    /// Which deletions succeeded is not known: all is read again.
    fn abandon(&mut self, known: &KnownShared) {
        self.list = None;
        for id in std::mem::take(&mut self.deleting) {
            known.forget(&id);
        }
    }

    async fn clean(&mut self, gce: &Gce, recent: Option<&Arc<Inventory>>) -> Result<bool, Error> {
        let cleaned = self.try_clean(gce, recent).await;
        if cleaned.is_err() {
            self.abandon(&gce.shared.known);
        }
        cleaned
    }

    async fn try_clean(&mut self, gce: &Gce, recent: Option<&Arc<Inventory>>) -> Result<bool, Error> {
        let users = self;
        let is_settled = gce.settle_known(&mut users.state).await?;
        users.note_deleted(&gce.shared.known);
        if !is_settled {
            return Ok(false);
        }
        // What the credentials may not delete is left alone until it can be tried again: no other Service waits for it.
        if users.state.denied.expire() {
            users.note_dirty();
        }
        // What somebody uses after all: it is left alone, and the others are deleted one by one.
        let mut in_use = BTreeSet::new();
        let mut is_one_by_one = false;
        while let Some(since) = users.dirty_since {
            let list = users.list_since(gce, since, recent).await?;
            let mut steps = unneeded(gce, &users.by_service, &list.found);
            steps.retain(|step| !users.state.denied.has(step));
            steps.retain(|step| !in_use.contains(step.id()));
            if is_one_by_one {
                steps.truncate(1);
            }
            if steps.is_empty() {
                users.dirty_since = None;
                users.abandon(&gce.shared.known);
                break;
            }
            if list.began.elapsed() >= OLD_LIST
                && users.list.as_ref().is_none_or(|known| known.began != list.began)
            {
                users.list = Some(shared_list(gce).await?);
                continue;
            }
            users.list = Some(list);
            if steps.iter().all(|step| users.state.is_changing(step.id())) {
                return Err(unended(&steps, &gce.config));
            }
            users.deleting.extend(steps.iter().map(|step| step.id().clone()));
            let sent = gce.send_all(&nobody(), &steps, &mut users.state).await;
            match sent {
                Ok(true) => users.note_deleted(&gce.shared.known),
                Ok(false) => return Ok(false),
                Err(Error::Unavailable(message))
                    if message.contains("InUse") || message.contains("IN_USE") =>
                {
                    if let [step] = &steps[..] {
                        in_use.insert(step.id().clone());
                    }
                    is_one_by_one = true;
                    users.abandon(&gce.shared.known);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// A list that has all that there was at this time. What came later is of Services that say that they need it.
    async fn list_since(
        &self,
        gce: &Gce,
        since: Instant,
        recent: Option<&Arc<Inventory>>,
    ) -> Result<Arc<Inventory>, Error> {
        let inventory = gce.inventory.last();
        let known = [self.list.as_ref(), recent, inventory.as_ref()];
        match known.into_iter().flatten().find(|list| list.has_shared && list.began >= since) {
            Some(list) => Ok(Arc::clone(list)),
            None => shared_list(gce).await,
        }
    }

    /// Takes what was deleted off the list.
    fn note_deleted(&mut self, known: &KnownShared) {
        let is_gone = |id: &Id| !self.state.is_changing(id) && !self.state.denied.has_change_of(id);
        let gone: BTreeSet<Id> = self.deleting.iter().filter(|id| is_gone(id)).cloned().collect();
        if gone.is_empty() {
            return;
        }
        self.deleting.retain(|id| !gone.contains(id));
        for id in &gone {
            known.note(id, None);
        }
        if let Some(list) = &mut self.list {
            let found = list.found.iter().filter(|(id, _)| !gone.contains(id)).cloned().collect();
            *list = Arc::new(Inventory { found, ..**list });
        }
    }
}

fn unended(steps: &[Step], config: &Config) -> Error {
    let names: Vec<String> = steps.iter().map(|step| step.id().to_string()).collect();
    // With a Shared VPC, firewall rules are in the host project.
    let project = |step: &Step| {
        if step.id().kind == Kind::Firewall { config.network_project() } else { config.project.as_str() }
    };
    let projects: BTreeSet<&str> = steps.iter().map(project).collect();
    let commands: Vec<String> = projects
        .iter()
        .map(|project| format!("`gcloud compute operations list --project={project} --filter='status!=DONE AND operationType=delete'`"))
        .collect();
    Error::Unavailable(format!(
        "GCE does not end the deletion of what no Service needs: {}. Steerage asks again. Look for the operation: {}. If it does not end, ask Google's support.",
        names.join(", "),
        commands.join(" and ")
    ))
}

/// What the deletion of shared resources has to know, as it is now.
async fn shared_list(gce: &Gce) -> Result<Arc<Inventory>, Error> {
    let began = Instant::now();
    let kinds = [Kind::HealthCheck, Kind::BackendService, Kind::Firewall].map(|kind| async move {
        match gce.list_kind(kind, None).await {
            Err(failure) if kind == Kind::Firewall && failure.is_denied() => Ok(Vec::new()),
            other => other,
        }
    });
    let found = futures::future::try_join_all(kinds).await?;
    Ok(Arc::new(Inventory { began, has_shared: true, found: found.into_iter().flatten().collect() }))
}

fn unneeded(gce: &Gce, users: &BTreeMap<Key, BTreeSet<Id>>, list: &[(Id, Value)]) -> Vec<Step> {
    let cluster = &gce.config.cluster;
    let of_kind = |kind| list.iter().filter(move |(id, _)| id.kind == kind);
    let used: BTreeSet<String> =
        of_kind(Kind::BackendService).flat_map(|(_, found)| Tree::checks(found)).collect();
    let is_wanted = |id: &Id| users.values().any(|ids| ids.contains(id));
    let shared = |found: &Value| marks::is_shared(cluster, found);
    let checks: Vec<&(Id, Value)> = of_kind(Kind::HealthCheck).filter(|(_, found)| shared(found)).collect();
    let old: Vec<Step> = checks
        .iter()
        .filter(|(id, _)| !is_wanted(id) && !used.contains(&id.path(&gce.config)))
        .map(|(id, _)| Step::Delete { id: id.clone() })
        .collect();
    if !old.is_empty() {
        return old;
    }
    // The rules of a check go after it.
    let ports: BTreeSet<String> = checks.iter().filter_map(|(_, check)| port_of_check(check)).collect();
    let old = of_kind(Kind::Firewall).filter(|(id, found)| {
        let port = found.pointer("/allowed/0/ports/0").and_then(Value::as_str).unwrap_or_default();
        shared(found) && !is_wanted(id) && !ports.contains(port)
    });
    old.map(|(id, _)| Step::Delete { id: id.clone() }).collect()
}

fn port_of_check(check: &Value) -> Option<String> {
    let probe = check.get("httpHealthCheck").or_else(|| check.get("tcpHealthCheck"))?;
    probe.get("port").and_then(Value::as_u64).map(|port| port.to_string())
}

#[cfg(test)]
mod tests;
