// SPDX-License-Identifier: Apache-2.0

use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use http::Response;
use serde_json::json;
use tokio::time::advance;

use super::*;

/// Operations that end so many seconds after the start of the test. A request takes no time.
struct Api {
    began: Instant,
    ends: BTreeMap<String, u64>,
    /// What a list is refused with.
    list_status: Option<u16>,
    calls: Mutex<Vec<String>>,
}

impl Api {
    fn of(ends: &[(&str, u64)]) -> Self {
        let ends = ends.iter().map(|(path, seconds)| ((*path).to_owned(), *seconds)).collect();
        Self { began: Instant::now(), ends, list_status: None, calls: Mutex::default() }
    }

    fn operation(&self, path: &str) -> Option<Value> {
        let end = *self.ends.get(path)?;
        let mut operation =
            json!({ "selfLink": format!("https://x/compute/v1/{path}"), "status": "RUNNING" });
        if self.began.elapsed().as_secs() >= end {
            operation["status"] = "DONE".into();
            operation["insertTime"] = "2026-01-01T00:00:00.000-08:00".into();
            operation["endTime"] = format!("2026-01-01T00:00:{end:02}.000-08:00").into();
        }
        Some(operation)
    }

    /// The methods that were called since the last question.
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

fn status(action: &'static str, status: u16) -> CallError {
    CallError::answered(action, &Response::builder().status(status).body("").unwrap())
}

#[async_trait]
impl Calls for Api {
    async fn send(&self, call: Call) -> Result<Value> {
        self.calls.lock().unwrap().push(call.action.to_owned());
        if call.action != "globalOperations.aggregatedList" {
            return self.operation(&call.path).ok_or_else(|| status(call.action, 404));
        }
        if let Some(refusal) = self.list_status {
            return Err(status(call.action, refusal));
        }
        let (_, filter) = &call.query[0];
        let names = filter.strip_prefix("name eq '").unwrap().strip_suffix('\'').unwrap();
        let names: Vec<&str> = names.split('|').collect();
        let wanted = self.ends.keys().filter(|path| names.contains(&crate::object::last(path)));
        let found: Vec<Value> = wanted.filter_map(|path| self.operation(path)).collect();
        Ok(json!({ "items": { "global": { "operations": found } } }))
    }
}

fn path(name: &str) -> String {
    format!("projects/p/regions/r/operations/{name}")
}

const LEAST: Duration = Duration::from_millis(500);
const LIST: &str = "globalOperations.aggregatedList";

#[tokio::test(start_paused = true)]
async fn one_request_answers_all_who_follow_an_operation() {
    let names: Vec<String> = (0..20).map(|number| path(&format!("o{number}"))).collect();
    let ends: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 0)).collect();
    let api = Api::of(&ends);
    let operations = Operations::new(LEAST);
    for name in &names {
        operations.begin(name, "addresses.insert");
    }
    let first = operations.ask(&api, &names[..1]).await;
    assert_eq!(first[&names[0]], Ok(Progress::Running), "it cannot have ended yet");
    assert!(api.calls().is_empty());
    advance(LEAST).await;
    let asked = join_all(names.iter().map(|name| operations.ask(&api, std::slice::from_ref(name)))).await;
    assert!(asked.iter().flat_map(BTreeMap::values).all(|found| matches!(found, Ok(Progress::Ended(_)))));
    assert_eq!(api.calls(), [LIST]);
    // What has ended is not asked for again, until it is forgotten.
    operations.ask(&api, &names).await;
    assert!(api.calls().is_empty());
    operations.forget(&names[0]);
    operations.ask(&api, &names[..1]).await;
    assert_eq!(api.calls(), ["regionOperations.get"]);
}

/// The seconds at which an operation is asked for that ends after so many.
async fn asked_at(operations: &Operations, seconds: u64) -> Vec<f32> {
    let name = path("slow");
    let api = Api::of(&[(&name, seconds)]);
    operations.begin(&name, "forwardingRules.delete");
    let mut at = Vec::new();
    loop {
        let wait = operations.due_in([&name].into_iter());
        advance(wait).await;
        let answers = operations.ask(&api, std::slice::from_ref(&name)).await;
        at.extend(api.calls().iter().map(|_| api.began.elapsed().as_secs_f32()));
        if answers[&name] != Ok(Progress::Running) {
            operations.forget(&name);
            return at;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn operation_is_first_asked_for_when_those_before_it_had_ended() {
    let operations = Operations::new(LEAST);
    assert_eq!(asked_at(&operations, 4).await, [0.5, 1.0, 1.5, 2.25, 3.375, 5.0625]);
    assert_eq!(asked_at(&operations, 4).await, [4.0]);
    // They become quicker, and slower again.
    for _ in 0..20 {
        asked_at(&operations, 1).await;
    }
    let quick = asked_at(&operations, 1).await;
    assert!(quick.len() == 1 && quick[0] < 1.1, "{quick:?}");
    assert_eq!(asked_at(&operations, 3).await.len(), 4);
    assert_eq!(asked_at(&operations, 3).await, [3.0]);
    // Nobody waits for long for the first question.
    asked_at(&operations, 50).await;
    let slow = asked_at(&operations, 50).await;
    assert_eq!(slow[..3], [10.0, 15.0, 20.0]);
    for _ in 0..4 {
        asked_at(&operations, 1).await;
    }
    assert!(asked_at(&operations, 1).await[0] < 2.0, "one that took long is soon forgotten");
}

#[tokio::test(start_paused = true)]
async fn refused_list_and_operation_that_nobody_knows_are_read_alone() {
    let names = ["a", "b", "gone"].map(path);
    let mut api = Api::of(&[(&names[0], 0), (&names[1], 100)]);
    let operations = Operations::new(Duration::ZERO);
    let found = operations.ask(&api, &names).await;
    assert!(matches!(found[&names[0]], Ok(Progress::Ended(_))));
    assert_eq!((&found[&names[1]], &found[&names[2]]), (&Ok(Progress::Running), &Ok(Progress::Unknown)));
    assert_eq!(api.calls(), [LIST, "regionOperations.get"]);
    for (status, calls, is_answered) in [(400, 3, true), (403, 3, true), (503, 3, true), (429, 1, false)] {
        api.list_status = Some(status);
        let operations = Operations::new(Duration::ZERO);
        operations.begin(&names[1], "addresses.insert");
        let found = operations.ask(&api, &[names[0].clone(), names[1].clone()]).await;
        assert_eq!((api.calls().len(), found[&names[0]].is_ok()), (calls, is_answered), "{status}");
    }
}

/// Firewall rules of a Shared VPC are another project's.
#[tokio::test(start_paused = true)]
async fn each_project_has_its_list() {
    let names = [path("a"), path("b"), "projects/host/global/operations/c".to_owned()];
    let api = Api::of(&[(&names[0], 0), (&names[1], 0), (&names[2], 0)]);
    let found = Operations::new(Duration::ZERO).ask(&api, &names).await;
    assert!(found.values().all(|found| matches!(found, Ok(Progress::Ended(_)))));
    assert_eq!(api.calls(), [LIST, "globalOperations.get"]);
}
