// SPDX-License-Identifier: Apache-2.0
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use http::{Method, Response};
use serde_json::json;
use steerage_provider_api::{Compare, Error, LoadBalancer, Progress, Provider as _};

use super::*;
use crate::client::{Call, Calls};
use crate::config::tests::config;
use crate::denied::DENIED_WAIT;
use crate::desired::tests::{local, web};
use crate::error::CallError;
use crate::scripted::Scripted;
use crate::state::Pending;

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
    let config = Config { network: "projects/host/global/networks/n".to_owned(), ..config() };
    for (kind, resource, project) in
        [(Kind::HealthCheck, "health check old.", "p"), (Kind::Firewall, "firewall rule old.", "host")]
    {
        let told = unended(&[Step::Delete { id: Id::new(kind, "old") }], &config).to_string();
        assert!(told.contains(resource), "{told}");
        let command = format!("`gcloud compute operations list --project={project} --filter=");
        assert!(told.contains(&command), "{told}");
    }
}

#[tokio::test]
async fn failed_cleaning_is_not_the_failure_of_a_service_that_is_complete() {
    let gce = Gce::over(config(), Arc::new(Down));
    assert!(matches!(gce.shared.clean_later(&gce).await, Ok(Cleaned::Later(FAILED_WAIT))));
    assert!(gce.shared.is_dirty().await, "it is tried again");
    assert!(gce.shared.clean(&gce, None).await.is_err(), "the last Service waits for it");
}

#[async_trait]
impl Calls for Denying {
    async fn send(&self, call: Call) -> crate::error::Result<Value> {
        if call.method == Method::DELETE {
            // The test ends also if it is sent without a pause.
            assert!(self.deletions.fetch_add(1, Ordering::Relaxed) < 20);
            return Err(CallError::answered(call.action, &Response::builder().status(403).body("").unwrap()));
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
            assert!(gce.shared.clean(&gce, None).await.unwrap(), "nobody waits for it");
            assert_eq!(calls.deletions.load(Ordering::Relaxed), expected);
        }
        tokio::time::advance(DENIED_WAIT).await;
    }
    let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
    let (gce, calls) = denying(marks::of_owner(&config().cluster, &owner));
    for expected in 1..4 {
        let error = gce.delete(&owner).await.unwrap_err();
        assert!(matches!(error, Error::Denied(_)), "{error}");
        for _ in 0..3 {
            assert!(matches!(gce.delete(&owner).await, Ok(Progress::Again(_))));
            assert_eq!(calls.deletions.load(Ordering::Relaxed), expected);
        }
        tokio::time::advance(DENIED_WAIT).await;
    }
}

/// Otherwise each deletion of many Services would look for what it need not find.
#[tokio::test(start_paused = true)]
async fn end_of_a_service_matters_only_if_it_was_the_last_one_or_is_not_known() {
    let (gce, _) = denying(String::new());
    assert!(gce.shared.is_dirty().await, "a process that ended may have left something");
    assert!(gce.shared.clean(&gce, None).await.unwrap() && !gce.shared.is_dirty().await);
    let [a, b, unknown] = ["a", "b", "c"].map(|name| Key::new("shop", name));
    for service in [&a, &b] {
        let check = BTreeSet::from([Id::new(Kind::HealthCheck, "check")]);
        assert!(gce.shared.begin_use(&gce, service, check).await);
    }
    gce.shared.end_use(&a).await;
    assert!(!gce.shared.is_dirty().await);
    gce.shared.end_use(&b).await;
    assert!(gce.shared.is_dirty().await);
    assert!(gce.shared.clean(&gce, None).await.unwrap() && !gce.shared.is_dirty().await);
    gce.shared.end_use(&unknown).await;
    assert!(gce.shared.is_dirty().await);
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
    gce.shared.users.lock().await.state.note_pending(pending);
    let [mine, other] = ["a", "b"].map(|name| Key::new("shop", name));
    assert!(gce.shared.begin_use(&gce, &mine, BTreeSet::from([needed])).await);
    assert!(!gce.shared.begin_use(&gce, &other, BTreeSet::from([old])).await);
}

/// A health check `a`, which a Service's backend service uses, and one `b`.
struct Checks {
    /// What the backend service refers to.
    used: Mutex<Option<&'static str>>,
    /// What a list shows of that.
    listed: Mutex<Option<&'static str>>,
    /// These deletions are cut off.
    cut: Mutex<BTreeSet<&'static str>>,
    present: Mutex<BTreeSet<&'static str>>,
}

#[async_trait]
impl Calls for Checks {
    async fn send(&self, call: Call) -> crate::error::Result<Value> {
        let config = config();
        let path = |name: &str| Id::new(Kind::HealthCheck, name).path(&config);
        if call.method == Method::DELETE {
            let present = self.present.lock().unwrap().clone();
            let name = present.into_iter().find(|name| call.path == path(name)).unwrap();
            if *self.used.lock().unwrap() == Some(name) {
                let body = r#"{"error":{"errors":[{"reason":"resourceInUseByAnotherResource"}]}}"#;
                let answer = Response::builder().status(400).body(body).unwrap();
                return Err(CallError::answered(call.action, &answer));
            }
            if self.cut.lock().unwrap().remove(name) {
                return Err(CallError::unusable(call.action, "cut"));
            }
            self.present.lock().unwrap().remove(name);
            return Ok(json!({ "status": "DONE" }));
        }
        let items = match call.action {
            "regionHealthChecks.list" => {
                let description = marks::of_shared(&config.cluster);
                let present = self.present.lock().unwrap();
                present.iter().map(|name| json!({ "name": name, "description": description })).collect()
            }
            "regionBackendServices.list" => {
                let used = *self.listed.lock().unwrap();
                let checks: Vec<String> = used.into_iter().map(path).collect();
                vec![json!({ "name": "web", "healthChecks": checks })]
            }
            _ => Vec::new(),
        };
        Ok(json!({ "items": items }))
    }
}

fn checks(used: Option<&'static str>, listed: Option<&'static str>) -> (Gce, Arc<Checks>) {
    let calls = Arc::new(Checks {
        used: Mutex::new(used),
        listed: Mutex::new(listed),
        cut: Mutex::default(),
        present: Mutex::new(BTreeSet::from(["a", "b"])),
    });
    (Gce::over(config(), calls.clone()), calls)
}

/// While a load balancer moves to another health check, other Services look for what nobody needs, and find the old one in use.
#[tokio::test(start_paused = true)]
async fn health_check_that_a_load_balancer_leaves_is_deleted_also_if_others_looked_meanwhile() {
    let service = Key::new("shop", "web");
    for is_restarted in [false, true] {
        let (gce, calls) = checks(Some("a"), Some("a"));
        let [old, new] = ["a", "b"].map(|name| BTreeSet::from([Id::new(Kind::HealthCheck, name)]));
        if !is_restarted {
            assert!(gce.shared.begin_use(&gce, &service, old).await);
        }
        assert!(gce.shared.begin_use(&gce, &service, new).await);
        if is_restarted {
            gce.shared.note_moving(&service).await;
        }
        assert!(gce.shared.clean(&gce, None).await.unwrap());
        assert!(!gce.shared.is_dirty().await, "it is looked for once");
        assert_eq!(calls.present.lock().unwrap().len(), 2);
        for place in [&calls.used, &calls.listed] {
            *place.lock().unwrap() = Some("b");
        }
        gce.shared.end_moving(&service).await;
        assert!(gce.shared.clean(&gce, None).await.unwrap());
        assert_eq!(*calls.present.lock().unwrap(), BTreeSet::from(["b"]), "restarted: {is_restarted}");
    }
}

/// The list does not show who uses it.
#[tokio::test(start_paused = true)]
async fn health_check_in_use_does_not_keep_others_from_their_deletion() {
    let (gce, calls) = checks(Some("a"), None);
    calls.cut.lock().unwrap().insert("b");
    assert!(gce.shared.clean(&gce, None).await.unwrap());
    assert_eq!(*calls.present.lock().unwrap(), BTreeSet::from(["a"]));
}

#[tokio::test(start_paused = true)]
async fn list_of_one_service_does_not_show_what_nobody_needs() {
    let (gce, calls) = checks(None, None);
    let of_one = Arc::new(Inventory { began: Instant::now(), has_shared: false, found: Vec::new() });
    assert!(gce.shared.clean(&gce, Some(&of_one)).await.unwrap());
    assert!(calls.present.lock().unwrap().is_empty());
}

/// The list for the first look at the later Service shows that the earlier one used the check.
#[tokio::test(start_paused = true)]
async fn what_an_earlier_service_used_is_deleted_after_it() {
    let cloud = Scripted::new();
    let settings = Config { poll: Duration::from_millis(500), ..config() };
    let has_shared = || {
        let all = cloud.resources();
        all.into_values().any(|found| marks::is_shared(&settings.cluster, &Value::from(found.data)))
    };
    let earlier = web();
    let later = Owner { uid: "u2".to_owned(), ..earlier.owner.clone() };
    for (lb, is_shared) in [(earlier.clone(), true), (LoadBalancer { owner: later, ..local(web()) }, false)] {
        let gce = Gce::over(settings.clone(), Arc::new(cloud.clone()));
        let mut is_done = false;
        for _ in 0..60 {
            match gce.apply(&lb, Compare::Remembered).await.unwrap().progress {
                Progress::Done => is_done = true,
                Progress::Again(after) => tokio::time::sleep(after).await,
            }
            if is_done {
                break;
            }
        }
        assert_eq!((is_done, has_shared()), (true, is_shared), "{}", lb.owner);
    }
}
