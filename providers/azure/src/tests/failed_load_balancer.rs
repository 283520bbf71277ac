// SPDX-License-Identifier: Apache-2.0
//! A load balancer that another process left in the state `Failed`: what Azure refuses in it is left out, so that the others go on.

use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};
use steerage_provider_api::{Compare, GroupTargets, LoadBalancer, Progress, Provider as _};
use tokio::time::Instant;

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, named};
use crate::marks::Mark;
use crate::merge::Layout;
use crate::provider::Azure;
use crate::scripted::{Scripted, parts, settle};
use crate::tests::together::put_theirs;

/// Azure's code for a rule that it refuses.
const WRONG: &str = "\"idleTimeoutInMinutes\":99";

fn provider(cloud: &Scripted) -> Azure {
    cloud.provider_with(|config| config.poll = Duration::from_secs(1))
}

fn path(is_internal: bool) -> String {
    Layout { config: config(), is_internal }.path()
}

fn part(lb: &LoadBalancer, name: &str) -> String {
    Mark::new(&config().cluster, &lb.owner).part(name)
}

/// The load balancer is `Failed` because of this rule, whose timeout Azure refuses by its name.
fn fail_by_rule(cloud: &Scripted, is_internal: bool, is_late: bool, rule: String) {
    cloud.change(&path(is_internal), |body| {
        for part in body["properties"]["loadBalancingRules"].as_array_mut().unwrap() {
            if part["name"] == *rule {
                part["properties"]["idleTimeoutInMinutes"] = json!(99);
            }
        }
    });
    cloud.fail_state(&path(is_internal));
    cloud.refuse(is_late, move |body| {
        let is_wrong = body["properties"].to_string().contains(WRONG);
        is_wrong.then(|| ("InvalidTimeout", format!("{rule} is wrong")))
    });
}

/// How many frontends and rules of a Service there are.
fn has(cloud: &Scripted, lb: &LoadBalancer) -> [usize; 2] {
    ["frontendIPConfigurations", "loadBalancingRules"].map(|kind| {
        let is_its = |found: &&Value| found["name"].as_str().unwrap().starts_with(&part(lb, ""));
        cloud.all("loadBalancers").iter().map(|body| parts(body, kind).filter(is_its).count()).sum()
    })
}

/// Calls for each in turn until the last one is done. Others may be refused.
async fn until_done(provider: &Azure, all: &[&LoadBalancer]) -> Duration {
    let began = Instant::now();
    loop {
        for (index, lb) in all.iter().enumerate() {
            let done = provider.apply(lb, Compare::Remembered).await;
            if index + 1 == all.len() && done.is_ok_and(|done| done.progress == Progress::Done) {
                return began.elapsed();
            }
        }
        assert!(began.elapsed() < Duration::from_mins(15), "it is never done");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The public IP of a Service stays `Failed`: the load balancer cannot be repaired as long as it refers to that.
#[tokio::test(start_paused = true)]
async fn failed_load_balancer_is_repaired_without_a_public_ip_that_stays_failed() {
    for others in [0, 2] {
        let cloud = Scripted::new();
        let bad = named("bad", &[80], &[1]);
        let all: Vec<_> = (0..others).map(|i| named(&format!("a-{i}"), &[80], &[1])).collect();
        for lb in all.iter().chain([&bad]) {
            settle(&provider(&cloud), lb).await.unwrap();
        }
        let name = part(&bad, "v4");
        cloud.fail_state(&config().public_ip_path(None, &name));
        cloud.fail_state(&path(false));
        cloud.refuse(true, move |body| {
            (body["name"] == *name).then(|| ("DnsRecordInUse", "in use".to_owned()))
        });
        let azure = provider(&cloud);
        let took = until_done(&azure, &[&named("new", &[80], &[1])]).await;
        assert!(took > Duration::from_mins(2) && took < Duration::from_mins(4), "{took:?}");
        assert_eq!(has(&cloud, &bad), [0, 0]);
        if let Some(lb) = all.first() {
            let took = until_done(&azure, &[&named(lb.owner.service.name(), &[80], &[2])]).await;
            assert!(took < Duration::from_secs(20), "{took:?}");
        }
        // It comes back with the public IP.
        cloud.refuse(true, |_| None);
        let took = until_done(&azure, &[&bad]).await;
        assert!(took < Duration::from_mins(1) && has(&cloud, &bad) == [1, 1], "{took:?}");
    }
}

/// The controller is told to look at a Service that is left out, and puts it back when its public IP is usable again.
#[tokio::test(start_paused = true)]
async fn service_that_is_left_out_is_looked_at_again() {
    let cloud = Scripted::new();
    let azure = provider(&cloud);
    let mut changes = azure.changes();
    let [a, bad] = ["a", "bad"].map(|name| named(name, &[80], &[1]));
    for lb in [&a, &bad] {
        settle(&azure, lb).await.unwrap();
    }
    let name = part(&bad, "v4");
    let ip = config().public_ip_path(None, &name);
    cloud.fail_state(&ip);
    cloud.refuse(true, move |body| (body["name"] == *name).then(|| ("DnsRecordInUse", "in use".to_owned())));
    assert!(changes.next().now_or_never().is_none());
    until_done(&azure, &[&named("a", &[80], &[2])]).await;
    assert_eq!(has(&cloud, &bad), [0, 0]);
    // While the public IP is written again, and when it is given up.
    for _ in 0..2 {
        assert_eq!(changes.next().now_or_never().flatten(), Some(bad.owner.clone()));
    }
    // It waits for Azure, and is tried again as anything that may pass.
    for _ in 0..5 {
        let error = settle(&azure, &bad).await.unwrap_err();
        assert_eq!(error.reason(), "ProviderUnavailable", "{error}");
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    assert!(changes.next().now_or_never().is_none(), "it is told at once only");
    // Somebody writes the public IP.
    cloud.refuse(true, |_| None);
    cloud.change(&ip, |_| {});
    settle(&azure, &bad).await.unwrap();
    assert_eq!(has(&cloud, &bad), [1, 1]);
}

/// A change of an earlier process failed after Azure had accepted it, and what was there before is not known any more.
#[tokio::test(start_paused = true)]
async fn service_that_azure_names_in_a_failed_load_balancer_is_left_out_for_the_others() {
    for (is_late, is_internal, is_alone) in [
        (false, false, false),
        (true, false, false),
        (false, true, false),
        (true, true, false),
        (false, false, true),
        (true, true, true),
    ] {
        let case = format!("late {is_late}, internal {is_internal}, alone {is_alone}");
        let of = |name: &str, nodes: &[u8]| {
            let lb = named(name, &[80], nodes);
            if is_internal { annotated(lb, annotations::INTERNAL, "true") } else { lb }
        };
        let cloud = Scripted::new();
        let [a, bad, new] = ["a", "bad", "new"].map(|name| of(name, &[1]));
        let mut address = Vec::new();
        for lb in [&a, &bad].into_iter().skip(usize::from(is_alone)) {
            address = settle(&provider(&cloud), lb).await.unwrap().ingress;
        }
        fail_by_rule(&cloud, is_internal, is_late, part(&bad, "tcp-80-v4"));
        let wrong = annotated(bad.clone(), annotations::IDLE_TIMEOUT, "99");
        let azure = provider(&cloud);
        let mut changes = azure.changes();
        // It serves, as far as anybody knows, and nobody waits.
        let error = settle(&azure, &wrong).await.unwrap_err();
        assert!(error.to_string().contains("names this Service"), "{case}: {error}");
        tokio::time::sleep(Duration::from_mins(20)).await;
        assert!(settle(&azure, &wrong).await.is_err());
        assert_eq!(has(&cloud, &bad), [1, 1], "{case}");
        // Somebody waits.
        let moved = if is_alone { new.clone() } else { of("a", &[2]) };
        let took = until_done(&azure, &[&wrong, &moved]).await;
        assert!(took < Duration::from_mins(3), "{case}: {took:?}");
        assert_eq!(has(&cloud, &bad), [1, 0], "{case}");
        assert_eq!(changes.next().now_or_never().flatten(), Some(bad.owner.clone()), "{case}");
        let error = settle(&azure, &wrong).await.unwrap_err();
        assert!(
            error.reason() == "RejectedByProvider" && error.to_string().contains("is wrong"),
            "{case}: {error}"
        );
        let took = until_done(&azure, &[&wrong, &new]).await;
        assert!(took < Duration::from_secs(30), "{case}: {took:?}");
        // Corrected, it has the address that it had.
        let outcome = settle(&azure, &bad).await.unwrap();
        assert_eq!(outcome.ingress, address, "{case}");
        assert_eq!(cloud.get(&path(is_internal)).unwrap()["properties"]["provisioningState"], "Succeeded");
    }
}

/// Since the restart, the Service that Azure names is refused before it writes anything: only its targets follow.
#[tokio::test(start_paused = true)]
async fn service_that_is_left_out_is_looked_at_and_told_also_while_it_is_refused() {
    let cloud = Scripted::new();
    let [a, bad] = ["a", "bad"].map(|name| named(name, &[80], &[1]));
    for lb in [&a, &bad] {
        settle(&provider(&cloud), lb).await.unwrap();
    }
    fail_by_rule(&cloud, false, false, part(&bad, "tcp-80-v4"));
    let azure = provider(&cloud);
    let mut changes = azure.changes();
    let refused = annotated(bad.clone(), annotations::INTERNAL, "maybe");
    let targets = GroupTargets::of_nodes(bad.nodes());
    let moved = named("a", &[80], &[2]);
    let began = Instant::now();
    loop {
        assert!(azure.apply(&refused, Compare::Remembered).await.is_err());
        // It serves at first, as far as anybody knows.
        if let Ok(outcome) = azure.set_targets(&bad.owner, &targets).await {
            assert!(outcome.incomplete.is_none() || began.elapsed() > Duration::from_mins(1), "{outcome:?}");
        }
        if azure.apply(&moved, Compare::Remembered).await.is_ok_and(|done| done.progress == Progress::Done) {
            break;
        }
        assert!(began.elapsed() < Duration::from_mins(5), "it is never done");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(has(&cloud, &bad), [1, 0]);
    assert_eq!(changes.next().now_or_never().flatten(), Some(bad.owner.clone()));
    let outcome = azure.set_targets(&bad.owner, &targets).await.unwrap();
    let (reason, message) = outcome.incomplete.unwrap();
    assert!(reason == "RejectedByProvider" && message.contains("no rules"), "{message}");
    // What refuses it is corrected.
    settle(&azure, &bad).await.unwrap();
    assert_eq!(has(&cloud, &bad), [1, 1]);
    assert_eq!(azure.set_targets(&bad.owner, &targets).await.unwrap().incomplete, None);
}

/// A public IP of the user's holds up all Services: the controller looks at its Service at once, whose condition says what to do.
#[tokio::test(start_paused = true)]
async fn service_whose_own_public_ip_holds_up_the_others_is_looked_at() {
    let cloud = Scripted::new();
    let ip = put_theirs(&cloud);
    let azure = provider(&cloud);
    let mut changes = azure.changes();
    let a = named("a", &[80], &[1]);
    let bad = annotated(named("bad", &[80], &[1]), annotations::PIP_NAME, "theirs");
    for lb in [&a, &bad] {
        settle(&azure, lb).await.unwrap();
    }
    for round in 2..4 {
        cloud.fail_state(&ip);
        let moved = named("a", &[80], &[round]);
        for _ in 0..60 {
            let outcome = azure.apply(&moved, Compare::Remembered).await.unwrap();
            assert_ne!(outcome.progress, Progress::Done);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(changes.next().now_or_never().flatten(), Some(bad.owner.clone()), "round {round}");
        assert!(changes.next().now_or_never().is_none(), "it is told once");
        let error = azure.apply(&bad, Compare::InPlace).await.unwrap_err();
        assert_eq!(error.reason(), "PublicIPNotReady", "{error}");
        cloud.change(&ip, |_| {});
        let took = until_done(&azure, &[&moved]).await;
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}

/// The same where Azure has said something else in between, or names another one later.
#[tokio::test(start_paused = true)]
async fn each_service_whose_own_public_ip_holds_up_the_others_is_looked_at() {
    // The answer that is another one.
    for odd in 0..5 {
        let cloud = Scripted::new();
        let ips = ["theirs", "more"].map(|name| config().public_ip_path(None, name));
        put_theirs(&cloud);
        let mut more = cloud.get(&ips[0]).unwrap();
        more["properties"]["ipAddress"] = json!("203.0.113.8");
        cloud.put(&ips[1], more);
        let azure = provider(&cloud);
        let mut changes = azure.changes();
        let [first, second] = ["first", "second"].map(|name| named(name, &[80], &[1]));
        let first = annotated(first, annotations::PIP_NAME, "theirs");
        let second = annotated(second, annotations::PIP_NAME, "more");
        for lb in [&named("a", &[80], &[1]), &first, &second] {
            settle(&azure, lb).await.unwrap();
        }
        let moved = named("a", &[80], &[2]);
        cloud.fail_state(&ips[0]);
        cloud.calls();
        let mut writes = 0;
        for _ in 0..60 {
            if writes == odd {
                cloud.fail("PUT loadBalancers", 409, "AnotherOperationInProgress", false);
                writes += 1;
            }
            azure.apply(&moved, Compare::Remembered).await.unwrap();
            writes += cloud.writes().len();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(changes.next().now_or_never().flatten(), Some(first.owner.clone()), "{odd}");
        // Its owner corrects it, and the other one fails, before anybody writes.
        cloud.change(&ips[0], |_| {});
        cloud.fail_state(&ips[1]);
        for _ in 0..60 {
            azure.apply(&moved, Compare::Remembered).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(changes.next().now_or_never().flatten(), Some(second.owner.clone()), "{odd}");
        assert!(changes.next().now_or_never().is_none(), "each is told once");
    }
}
