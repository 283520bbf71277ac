// SPDX-License-Identifier: Apache-2.0
//! What Services share: health checks of nodes, and the firewall rules that admit them. They exist as long as a Service needs them. A Service
//! says that it needs them before it looks for them, and they are deleted under the same lock.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::marks;
use crate::object::{Id, Kind};
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::step::Step;
use crate::tree::Tree;

/// After this time a deletion is tried again that failed.
const FAILED_WAIT: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Users {
    by_service: BTreeMap<Key, BTreeSet<Id>>,
    /// Something may not be needed any more.
    is_dirty: bool,
    /// The deletions that have not ended.
    state: ServiceState,
    /// When the last deletion failed.
    failed_at: Option<Instant>,
}

/// Who needs what.
#[derive(Debug)]
pub(crate) struct Shared(Mutex<Users>);

impl Users {
    fn is_deleting(&self, ids: &BTreeSet<Id>) -> bool {
        self.state.pending.iter().any(|pending| ids.contains(pending.step.id()))
    }
}

impl Default for Shared {
    /// A process that ended may have left something.
    fn default() -> Self {
        let (by_service, state) = (BTreeMap::new(), ServiceState::default());
        Self(Mutex::new(Users { by_service, is_dirty: true, state, failed_at: None }))
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
        let mut users = self.0.lock().await;
        if users.is_deleting(&ids) {
            if let Err(error) = gce.settle_known(&mut users.state).await {
                tracing::warn!(%error, "deletion of a shared health check not followed; retrying");
            }
            if users.is_deleting(&ids) {
                return false;
            }
        }
        let before = users.by_service.insert(service.clone(), ids.clone());
        users.is_dirty |= before.is_some_and(|before| before != ids);
        true
    }

    /// The Service needs nothing any more.
    pub(crate) async fn end_use(&self, service: &Key) {
        let mut users = self.0.lock().await;
        users.by_service.remove(service);
        users.is_dirty = true;
    }

    /// Deletes what nobody needs. False if that has not ended.
    pub(crate) async fn clean(&self, gce: &Gce) -> Result<bool, Error> {
        self.0.lock().await.clean(gce).await
    }

    /// The same for a Service that is complete: a failure is not its own, so it is logged, and tried again after a while. That GCE has too
    /// many requests concerns all.
    pub(crate) async fn clean_later(&self, gce: &Gce) -> Result<Cleaned, Error> {
        let mut users = self.0.lock().await;
        if users.failed_at.is_some_and(|at| at.elapsed() < FAILED_WAIT) {
            return Ok(Cleaned::Later(FAILED_WAIT));
        }
        users.failed_at = None;
        match users.clean(gce).await {
            Ok(true) => Ok(Cleaned::Done),
            Ok(false) => Ok(Cleaned::Pending),
            Err(error @ Error::Throttled { .. }) => Err(error),
            Err(error) => {
                tracing::warn!(%error, "shared health checks that nothing needs are not deleted; retrying");
                users.is_dirty = true;
                users.failed_at = Some(Instant::now());
                Ok(Cleaned::Later(FAILED_WAIT))
            }
        }
    }
}

impl Users {
    async fn clean(&mut self, gce: &Gce) -> Result<bool, Error> {
        let users = self;
        if !gce.settle_known(&mut users.state).await? {
            return Ok(false);
        }
        // What the credentials may not delete is left alone until it can be tried again: no other Service waits for it.
        users.is_dirty |= users.state.expire_denied();
        while users.is_dirty {
            let mut steps = unneeded(gce, &users.by_service).await?;
            steps.retain(|step| step.id().kind != Kind::Firewall || !users.state.leaves_firewalls());
            if steps.is_empty() {
                users.is_dirty = false;
                break;
            }
            if steps.iter().all(|step| users.state.is_changing(step.id())) {
                return Err(unended(&steps, &gce.config.project));
            }
            match gce.send_all(&nobody(), &steps, &mut users.state).await {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // Somebody uses it after all.
                Err(Error::Unavailable(message))
                    if message.contains("InUse") || message.contains("IN_USE") =>
                {
                    users.is_dirty = false;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn unended(steps: &[Step], project: &str) -> Error {
    let names: Vec<String> = steps.iter().map(|step| step.id().to_string()).collect();
    Error::Unavailable(format!(
        "GCE does not end the deletion of what no Service needs: {}. Steerage asks again. Look for the operation: gcloud compute operations \
         list --project={project}.",
        names.join(", ")
    ))
}

async fn unneeded(gce: &Gce, users: &BTreeMap<Key, BTreeSet<Id>>) -> Result<Vec<Step>, Error> {
    let cluster = &gce.config.cluster;
    let (checks, services, firewalls) = futures::try_join!(
        gce.list_kind(Kind::HealthCheck, None),
        gce.list_kind(Kind::BackendService, None),
        async {
            match gce.list_kind(Kind::Firewall, None).await {
                Err(failure) if failure.is_denied() => Ok(Vec::new()),
                other => other,
            }
        },
    )?;
    let used: BTreeSet<String> = services.iter().flat_map(|(_, found)| Tree::checks(found)).collect();
    let is_wanted = |id: &Id| users.values().any(|ids| ids.contains(id));
    let shared = |found: &Value| marks::is_shared(cluster, found);
    let checks: Vec<(Id, Value)> = checks.into_iter().filter(|(_, found)| shared(found)).collect();
    let old: Vec<Step> = checks
        .iter()
        .filter(|(id, _)| !is_wanted(id) && !used.contains(&id.path(&gce.config)))
        .map(|(id, _)| Step::Delete { id: id.clone() })
        .collect();
    if !old.is_empty() {
        return Ok(old);
    }
    // The rules of a check go after it.
    let ports: BTreeSet<String> = checks.iter().filter_map(|(_, check)| port_of_check(check)).collect();
    let old = firewalls.into_iter().filter(|(id, found)| {
        let port = found.pointer("/allowed/0/ports/0").and_then(Value::as_str).unwrap_or_default();
        shared(found) && !is_wanted(id) && !ports.contains(port)
    });
    Ok(old.map(|(id, _)| Step::Delete { id }).collect())
}

fn port_of_check(check: &Value) -> Option<String> {
    let probe = check.get("httpHealthCheck").or_else(|| check.get("tcpHealthCheck"))?;
    probe.get("port").and_then(Value::as_u64).map(|port| port.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use http::{Method, Response};
    use serde_json::json;
    use steerage_provider_api::{Error, Provider as _};

    use super::*;
    use crate::client::{Call, Calls};
    use crate::config::tests::config;
    use crate::error::CallError;
    use crate::state::{DENIED_WAIT, Pending};

    /// A network with one firewall rule, which the credentials may not delete.
    struct Denying {
        description: String,
        deletions: AtomicUsize,
    }

    /// An API that does not answer.
    struct Down;

    #[async_trait]
    impl Calls for Down {
        async fn send(&self, call: Call) -> crate::error::Result<Value> {
            Err(CallError::unusable(call.action, "down"))
        }
    }

    #[test]
    fn endless_deletion_names_the_resource_and_the_command() {
        let told = unended(&[Step::Delete { id: Id::new(Kind::HealthCheck, "old") }], "p").to_string();
        assert!(told.contains("health check old."), "{told}");
        assert!(told.contains("gcloud compute operations list --project=p"), "{told}");
    }

    #[tokio::test]
    async fn failed_cleaning_is_not_the_failure_of_a_service_that_is_complete() {
        let gce = Gce::over(config(), Arc::new(Down));
        assert!(matches!(gce.shared.clean_later(&gce).await, Ok(Cleaned::Later(FAILED_WAIT))));
        assert!(gce.shared.0.lock().await.is_dirty, "it is tried again");
        assert!(gce.shared.clean(&gce).await.is_err(), "the last Service waits for it");
    }

    #[async_trait]
    impl Calls for Denying {
        async fn send(&self, call: Call) -> crate::error::Result<Value> {
            if call.method == Method::DELETE {
                // The test ends also if it is sent without a pause.
                assert!(self.deletions.fetch_add(1, Ordering::Relaxed) < 20);
                return Err(CallError::answered(
                    call.action,
                    &Response::builder().status(403).body("").unwrap(),
                ));
            }
            let rule = json!({ "name": "st-rule", "description": self.description });
            Ok(if call.action == "firewalls.list" { json!({ "items": [rule] }) } else { json!({}) })
        }
    }

    fn denying(description: String) -> (Gce, Arc<Denying>) {
        let calls = Arc::new(Denying { description, deletions: AtomicUsize::new(0) });
        (Gce::over(config(), calls.clone()), calls)
    }

    #[tokio::test(start_paused = true)]
    async fn denied_deletion_is_one_request_after_each_wait() {
        let (gce, calls) = denying(marks::of_shared(&config().cluster));
        for expected in 1..4 {
            for _ in 0..3 {
                assert!(gce.shared.clean(&gce).await.unwrap(), "nobody waits for it");
                assert_eq!(calls.deletions.load(Ordering::Relaxed), expected);
            }
            tokio::time::advance(DENIED_WAIT).await;
        }
        let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let (gce, calls) = denying(marks::of_owner(&config().cluster, &owner));
        for expected in 1..4 {
            for _ in 0..3 {
                let error = gce.delete(&owner).await.unwrap_err();
                assert!(matches!(error, Error::Denied(_)), "{error}");
                assert_eq!(calls.deletions.load(Ordering::Relaxed), expected);
            }
            tokio::time::advance(DENIED_WAIT).await;
        }
    }

    /// The deletion of one that it does not need runs, and fails.
    #[tokio::test(start_paused = true)]
    async fn service_waits_only_for_the_deletion_of_what_it_needs() {
        let (gce, _) = denying(marks::of_shared(&config().cluster));
        let [old, needed] = ["old", "needed"].map(|name| Id::new(Kind::HealthCheck, name));
        let pending = Pending {
            owner: nobody(),
            step: Step::Delete { id: old.clone() },
            is_shared: true,
            // It is answered as one that runs.
            operation: "projects/p/regions/r/operations/o".to_owned(),
            since: Instant::now(),
        };
        gce.shared.0.lock().await.state.note_pending(pending);
        let [mine, other] = ["a", "b"].map(|name| Key::new("shop", name));
        assert!(gce.shared.begin_use(&gce, &mine, BTreeSet::from([needed])).await);
        assert!(!gce.shared.begin_use(&gce, &other, BTreeSet::from([old])).await);
    }
}
