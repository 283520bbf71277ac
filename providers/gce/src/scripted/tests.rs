// SPDX-License-Identifier: Apache-2.0

use steerage_provider_api::{Compare, Outcome, Progress, Provider as _};
use tokio::time::sleep;

use super::*;
use crate::config::Config;
use crate::config::tests::config;
use crate::desired::tests::web;
use crate::provider::Gce;

/// Until what a request began has ended.
const LONG: Duration = Duration::from_secs(3);

fn call(method: Method, action: &'static str, path: &str, body: Value) -> Call {
    Call::new(method, action, format!("{PROJECT}/{path}")).with_body(body)
}

fn check(name: &str) -> Value {
    let probe = json!({ "port": 10256, "portSpecification": "USE_FIXED_PORT" });
    json!({
        "name": name, "type": "TCP", "checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 1, "unhealthyThreshold": 1,
        "tcpHealthCheck": probe,
    })
}

fn service(check: &str) -> Value {
    let check = url(&format!("{REGION}/healthChecks/{check}"));
    json!({ "name": "s", "loadBalancingScheme": "EXTERNAL", "protocol": "UNSPECIFIED", "healthChecks": [check] })
}

fn insert(cloud: &Scripted, action: &'static str, path: &str, body: Value) -> Result<Value> {
    cloud.at_once(&call(Method::POST, action, path, body))
}

fn get(cloud: &Scripted, action: &'static str, path: &str) -> Result<Value> {
    cloud.at_once(&Call::get(action, format!("{PROJECT}/{path}")))
}

#[tokio::test(start_paused = true)]
async fn what_is_made_has_its_name_at_once_and_is_used_when_its_operation_has_ended() {
    let cloud = Scripted::new();
    let checks = "regions/r/healthChecks";
    let operation = insert(&cloud, "regionHealthChecks.insert", checks, check("c")).unwrap();
    assert_eq!(operation["status"], "PENDING");
    let exists = insert(&cloud, "regionHealthChecks.insert", checks, check("c")).unwrap_err();
    assert!(exists.is_existing());
    assert!(get(&cloud, "regionHealthChecks.get", "regions/r/healthChecks/c").unwrap_err().is_not_found());
    sleep(Duration::from_millis(300)).await;
    assert!(get(&cloud, "regionHealthChecks.get", "regions/r/healthChecks/c").is_ok());
    let early = insert(&cloud, "regionBackendServices.insert", "regions/r/backendServices", service("c"));
    assert!(early.unwrap_err().is_stale());
    sleep(LONG).await;
    let path = format!("regions/r/operations/{}", operation["name"].as_str().unwrap());
    assert_eq!(get(&cloud, "regionOperations.get", &path).unwrap()["status"], "DONE");
    assert!(
        insert(&cloud, "regionBackendServices.insert", "regions/r/backendServices", service("c")).is_ok()
    );
    assert!(cloud.wrong().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_used_cannot_be_deleted_and_old_fingerprints_are_refused() {
    let cloud = Scripted::new();
    for name in ["c", "d"] {
        insert(&cloud, "regionHealthChecks.insert", "regions/r/healthChecks", check(name)).unwrap();
    }
    sleep(LONG).await;
    insert(&cloud, "regionBackendServices.insert", "regions/r/backendServices", service("c")).unwrap();
    sleep(LONG).await;
    let delete = |name: &str| {
        Call::new(Method::DELETE, "regionHealthChecks.delete", format!("{REGION}/healthChecks/{name}"))
    };
    assert!(cloud.at_once(&delete("c")).unwrap_err().is_in_use());
    let path = "regions/r/backendServices/s";
    let old = get(&cloud, "regionBackendServices.get", path).unwrap()["fingerprint"].clone();
    let patch = |check: &str| {
        let changes = json!({ "fingerprint": old, "healthChecks": service(check)["healthChecks"] });
        cloud.at_once(&call(Method::PATCH, "regionBackendServices.patch", path, changes))
    };
    // The one is deleted while the other operation runs that begins to use it.
    cloud.at_once(&delete("d")).unwrap();
    assert!(patch("d").unwrap_err().is_stale(), "it is leaving");
    patch("c").unwrap();
    assert!(patch("c").unwrap_err().is_stale(), "it changes");
    sleep(LONG).await;
    assert!(get(&cloud, "regionHealthChecks.get", "regions/r/healthChecks/d").unwrap_err().is_not_found());
    let changes = json!({ "sessionAffinity": "CLIENT_IP" });
    cloud.at_once(&call(Method::PATCH, "regionBackendServices.patch", path, changes)).unwrap();
    sleep(LONG).await;
    assert!(patch("c").unwrap_err().is_stale(), "the fingerprint is old");
}

#[tokio::test(start_paused = true)]
async fn requests_that_no_client_should_make_are_noted() {
    let cloud = Scripted::new();
    let with = |field: &str, value: Value| {
        let mut body = check("c");
        body[field] = value;
        body
    };
    for (action, path, body) in [
        ("regionHealthChecks.insert", "regions/r/healthChecks", with("colour", json!("red"))),
        ("regionHealthChecks.insert", "regions/r/healthChecks", with("timeoutSec", json!("5"))),
        ("regionHealthChecks.insert", "regions/r/healthChecks", with("name", json!("C"))),
        ("regionHealthChecks.insert", "zones/r-a/healthChecks", check("c")),
        ("addresses.insert", "regions/r/healthChecks", check("c")),
    ] {
        let before = cloud.wrong().len();
        assert!(insert(&cloud, action, path, body.clone()).is_err(), "{path} {body}");
        assert_eq!(cloud.wrong().len(), before + 1, "{path} {body}");
    }
}

/// The whole of the provider, as in the simulation.
#[tokio::test(start_paused = true)]
async fn load_balancer_comes_and_goes() {
    let cloud = Scripted::new();
    let gce = Gce::over(Config { poll: Duration::from_millis(500), ..config() }, Arc::new(cloud.clone()));
    let lb = web();
    let mut outcome = Outcome::done();
    for _ in 0..50 {
        outcome = gce.apply(&lb, Compare::Remembered).await.unwrap();
        match outcome.progress {
            Progress::Done => break,
            Progress::Again(after) => sleep(after).await,
        }
    }
    assert_eq!(outcome.ingress.len(), 1, "{outcome:?}");
    assert!(cloud.resources().values().any(|found| found.kind == Kind::ForwardingRule && found.is_ready));
    for _ in 0..50 {
        match gce.delete(&lb.owner).await.unwrap() {
            Progress::Done => break,
            Progress::Again(after) => sleep(after).await,
        }
    }
    assert_eq!(cloud.resources().into_keys().collect::<Vec<_>>(), Vec::<String>::new());
    assert_eq!(cloud.wrong(), Vec::<String>::new());
}
