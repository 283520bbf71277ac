// SPDX-License-Identifier: Apache-2.0
//! Changes that Azure accepts and fails later: the load balancer shows them nevertheless.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _};
use tokio::time::Instant;

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, named};
use crate::marks::Mark;
use crate::merge::Layout;
use crate::provider::Azure;
use crate::scripted::{Scripted, gone, parts, settle};

/// Fails the first change that takes these parts out of a load balancer, after it was accepted.
fn fail_first_without(cloud: &Scripted, is_internal: bool, part: String, words: String) {
    let (balancer, was) = (Layout { config: config(), is_internal }.name(), AtomicBool::new(false));
    cloud.refuse(true, move |body: &Value| {
        let is_it = body["name"] == *balancer && !body["properties"].to_string().contains(&part);
        (is_it && !was.swap(true, Ordering::Relaxed)).then(|| ("SomethingWrong", words.clone()))
    });
}

/// Of which Services a load balancer has parts.
fn has(cloud: &Scripted, lb: &LoadBalancer) -> bool {
    let part = Mark::new(&config().cluster, &lb.owner).part("");
    cloud.all("loadBalancers").iter().any(|body| body["properties"].to_string().contains(&part))
}

/// Moves a Service's endpoints. Nobody may be refused meanwhile.
async fn moves(provider: &Azure, lb: &LoadBalancer) {
    settle(provider, lb).await.unwrap();
}

/// A deletion whose write fails late, alone or with a change of another Service, is written again.
#[tokio::test(start_paused = true)]
async fn deletion_that_fails_late_is_written_again() {
    for is_internal in [false, true] {
        for (is_together, is_named) in [(false, false), (true, false), (true, true)] {
            let cloud = Scripted::new();
            let provider = cloud.provider();
            let of = |name: &str, nodes: &[u8]| {
                let lb = named(name, &[80], nodes);
                if is_internal { annotated(lb, annotations::INTERNAL, "true") } else { lb }
            };
            let [gone_one, other, third] = ["gone", "other", "third"].map(|name| of(name, &[1]));
            for lb in [&gone_one, &other, &third] {
                settle(&provider, lb).await.unwrap();
            }
            let mark = |lb: &LoadBalancer| Mark::new(&config().cluster, &lb.owner).part("");
            let words = if is_named { format!("{}v4 is wrong", mark(&other)) } else { "no".to_owned() };
            fail_first_without(&cloud, is_internal, mark(&gone_one), words);
            let wrong = annotated(of("other", &[1]), annotations::IDLE_TIMEOUT, "9");
            for _ in 0..200 {
                // The change of another Service waits for the same write.
                let deleted = provider.delete(&gone_one.owner).await;
                if is_together {
                    let _ = provider.apply(&wrong, Compare::Remembered).await;
                }
                if matches!(deleted, Ok(Progress::Done)) {
                    break;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            assert!(!has(&cloud, &gone_one), "it is in the load balancer");
            let case = format!("internal {is_internal}, together {is_together}, named {is_named}");
            moves(&provider, &of("third", &[2])).await;
            assert!(!has(&cloud, &gone_one), "{case}: it came back");
            tokio::time::sleep(Duration::from_mins(2)).await;
            moves(&provider, &of("other", &[2])).await;
            assert!(!has(&cloud, &gone_one), "{case}: it came back");
            let left = provider.owned().await.unwrap();
            assert_eq!(left.len(), 2, "{case}: {left:?}");
            let states: Vec<Value> = cloud.all("loadBalancers");
            assert_eq!(states[0]["properties"]["provisioningState"], "Succeeded", "{case}");
        }
    }
}

/// The same where a Service leaves the load balancer because its scheme changes.
#[tokio::test(start_paused = true)]
async fn scheme_whose_change_fails_late_is_written_again() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let [moved, other] = ["moved", "other"].map(|name| named(name, &[80], &[1]));
    for lb in [&moved, &other] {
        settle(&provider, lb).await.unwrap();
    }
    let part = Mark::new(&config().cluster, &moved.owner).part("");
    fail_first_without(&cloud, false, part.clone(), "no".to_owned());
    let internal = annotated(moved.clone(), annotations::INTERNAL, "true");
    for _ in 0..200 {
        if settle(&provider, &internal).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    moves(&provider, &named("other", &[80], &[2])).await;
    let external = cloud.get(&Layout { config: config(), is_internal: false }.path()).unwrap();
    assert!(!external["properties"].to_string().contains(&part), "it came back");
    assert_eq!(external["properties"]["provisioningState"], "Succeeded");
    assert_eq!(cloud.all("publicIPAddresses").len(), 1);
    for lb in [&moved, &other] {
        gone(&provider, &lb.owner).await.unwrap();
    }
    assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
}

/// Azure forgets each operation at once, so only the load balancer says that a change failed.
#[tokio::test(start_paused = true)]
async fn change_whose_failure_cannot_be_read_stops_nobody_else() {
    for is_together in [false, true] {
        let cloud = Scripted::new();
        let azure = cloud.provider_with(|config| config.poll = Duration::from_secs(1));
        let [a, b] = ["a", "b"].map(|name| named(name, &[80], &[1]));
        for lb in [&a, &b] {
            settle(&azure, lb).await.unwrap();
        }
        cloud.block("GET operations", 404);
        let path = Layout { config: config(), is_internal: false }.path();
        let timeouts = |body: &Value| -> Vec<Value> {
            let rules = parts(body, "loadBalancingRules");
            rules.map(|rule| rule["properties"]["idleTimeoutInMinutes"].clone()).collect()
        };
        cloud.refuse(true, move |body| {
            timeouts(body).contains(&Value::from(9)).then(|| ("Wrong", "something".to_owned()))
        });
        let wrong = annotated(b.clone(), annotations::IDLE_TIMEOUT, "9");
        let moved = named("a", &[80], &[2]);
        let (began, mut told) = (Instant::now(), String::new());
        loop {
            if let Err(error) = azure.apply(&wrong, Compare::Remembered).await {
                told = error.to_string();
            }
            let is_its_turn = is_together || began.elapsed() > Duration::from_mins(1);
            if is_its_turn
                && azure
                    .apply(&moved, Compare::Remembered)
                    .await
                    .is_ok_and(|of| of.progress == Progress::Done)
            {
                break;
            }
            assert!(began.elapsed() < Duration::from_mins(5), "{is_together}: it is never done");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let body = cloud.get(&path).unwrap();
        assert!(body.to_string().contains("10.0.0.2"), "{is_together}: {body}");
        assert!(told.contains("could not be read"), "{is_together}: {told}");
        cloud.refuse(true, |_| None);
        // A try of before may have failed meanwhile.
        let began = Instant::now();
        while settle(&azure, &wrong).await.is_err() {
            assert!(began.elapsed() < Duration::from_mins(10), "{is_together}: it is never tried again");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let body = cloud.get(&path).unwrap();
        assert_eq!(body["properties"]["provisioningState"], "Succeeded", "{is_together}");
    }
}

/// The same of the write that shall end the state `Failed`.
#[tokio::test(start_paused = true)]
async fn repair_whose_failure_cannot_be_read_comes_to_an_end() {
    let cloud = Scripted::new();
    let a = named("a", &[80], &[1]);
    settle(&cloud.provider(), &a).await.unwrap();
    let path = Layout { config: config(), is_internal: false }.path();
    cloud.change(&path, |body| body["tags"]["wrong"] = "yes".into());
    cloud.fail_state(&path);
    cloud.refuse(true, |body| {
        (body["tags"]["wrong"] == "yes").then(|| ("Wrong", "something is wrong".to_owned()))
    });
    cloud.block("GET operations", 404);
    let azure = cloud.provider_with(|config| config.poll = Duration::from_secs(1));
    cloud.calls();
    let (began, mut done) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_mins(14) {
        let outcome = azure.apply(&a, Compare::InPlace).await;
        done += u32::from(outcome.is_ok_and(|outcome| outcome.progress == Progress::Done));
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    // At once, and after 5 and 10 minutes.
    assert_eq!(cloud.writes().len(), 3);
    assert!(done > 70, "{done}");
    // Who changes something is told.
    let moved = named("a", &[80], &[2]);
    let error = settle(&azure, &moved).await.unwrap_err();
    assert_eq!(error.reason(), "LoadBalancerFailed", "{error}");
}
