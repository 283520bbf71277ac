// SPDX-License-Identifier: Apache-2.0
//! Changes of public IPs that Azure accepts and that fail then, and changes that follow one another too soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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
use crate::scripted::{GROUP, Scripted, gone, parts, settle};

const LABEL: &str = "taken";

fn provider(cloud: &Scripted) -> Azure {
    cloud.provider_with(|config| config.poll = Duration::from_secs(1))
}

fn balancer(cloud: &Scripted) -> Value {
    cloud.get(&Layout { config: config(), is_internal: false }.path()).unwrap()
}

fn ip_name(lb: &LoadBalancer) -> String {
    Mark::new(&config().cluster, &lb.owner).part("v4")
}

fn label(body: &Value) -> Option<&str> {
    body["properties"]["dnsSettings"]["domainNameLabel"].as_str()
}

/// The label is in use, so often.
fn refuse_label(cloud: &Scripted, times: usize) {
    let left = std::sync::Mutex::new(times);
    cloud.refuse(true, move |body| {
        let mut left = left.lock().unwrap();
        (label(body) == Some(LABEL) && *left > 0).then(|| {
            *left -= 1;
            ("DnsRecordInUse", "DNS record taken is already used by another public IP.".to_owned())
        })
    });
}

/// Calls for each in turn until the last one is done, and returns how long that took. Others may be refused.
async fn until_done(provider: &Azure, all: &[&LoadBalancer]) -> Duration {
    let began = Instant::now();
    loop {
        for lb in all {
            let done = provider.apply(lb, Compare::Remembered).await;
            if std::ptr::eq(*lb, all[all.len() - 1]) && done.is_ok_and(|done| done.progress == Progress::Done)
            {
                return began.elapsed();
            }
        }
        assert!(began.elapsed() < Duration::from_mins(10), "it is never done");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The label fails once, or each time, and nobody calls for its Service again, or the process begins anew.
#[tokio::test(start_paused = true)]
async fn failed_dns_label_stops_no_other_service() {
    for (times, is_restarted) in [(1, false), (usize::MAX, false), (usize::MAX, true)] {
        let cloud = Scripted::new();
        let mut azure = provider(&cloud);
        let [a, bad] = ["a", "bad"].map(|name| named(name, &[80], &[1]));
        settle(&azure, &a).await.unwrap();
        let address = settle(&azure, &bad).await.unwrap().ingress;
        let path = config().public_ip_path(None, &ip_name(&bad));
        refuse_label(&cloud, times);
        let labelled = annotated(bad.clone(), annotations::DNS_LABEL, LABEL);
        while cloud.get(&path).unwrap()["properties"]["provisioningState"] != "Failed" {
            azure.apply(&labelled, Compare::Remembered).await.unwrap();
            // The operation ends, and its Service is not told yet.
            tokio::time::sleep(Duration::from_millis(500)).await;
            cloud.end_operations();
        }
        if is_restarted {
            azure = provider(&cloud);
        }
        let took = until_done(&azure, &[&named("new", &[80], &[1])]).await;
        assert!(took < Duration::from_secs(30), "{took:?}, {times} times");
        assert_eq!(label(&cloud.get(&path).unwrap()), None);
        // Its own Service is served, and told.
        let outcome = settle(&azure, &labelled).await.unwrap();
        assert_eq!(outcome.ingress, address);
        let (_, message) = outcome.incomplete.unwrap();
        assert!(message.contains("DnsRecordInUse") || message.contains("already used"), "{message}");
        assert!(outcome.retry_refused.is_some());
        // What it wants besides is in place, and the others go on while it tries again.
        let ports = annotated(named("bad", &[80, 443], &[1]), annotations::DNS_LABEL, LABEL);
        settle(&azure, &ports).await.unwrap();
        for round in 0..3 {
            tokio::time::sleep(Duration::from_mins(3)).await;
            let moved = named("a", &[80], &[2 + round]);
            let took = until_done(&azure, &[&ports, &moved]).await;
            assert!(took < Duration::from_secs(30), "{took:?}, round {round}");
        }
        let outcome = settle(&azure, &ports).await.unwrap();
        assert_eq!(outcome.incomplete.is_none(), times == 1, "{outcome:?}");
        assert_eq!(label(&cloud.get(&path).unwrap()).is_some(), times == 1);
        // Without the annotation nothing is wrong.
        let outcome = settle(&azure, &named("bad", &[80], &[1])).await.unwrap();
        assert_eq!((outcome.ingress, outcome.incomplete), (address, None));
        gone(&azure, &bad.owner).await.unwrap();
    }
}

/// Azure fails each write of the public IP, whatever is in it.
#[tokio::test(start_paused = true)]
async fn load_balancer_is_written_without_a_public_ip_that_stays_failed() {
    let cloud = Scripted::new();
    let azure = provider(&cloud);
    let [a, bad] = ["a", "bad"].map(|name| named(name, &[80], &[1]));
    settle(&azure, &a).await.unwrap();
    let address = settle(&azure, &bad).await.unwrap().ingress;
    let (name, fronts) =
        (ip_name(&bad), |cloud: &Scripted| parts(&balancer(cloud), "frontendIPConfigurations").count());
    let of = name.clone();
    cloud.refuse(true, move |body| (body["name"] == *of).then(|| ("DnsRecordInUse", "in use".to_owned())));
    let labelled = annotated(bad.clone(), annotations::DNS_LABEL, LABEL);
    let new = named("new", &[80], &[1]);
    azure.apply(&labelled, Compare::Remembered).await.unwrap();
    cloud.end_operations();
    azure.apply(&labelled, Compare::Remembered).await.unwrap();
    let (began, mut told) = (Instant::now(), String::new());
    while !match azure.apply(&new, Compare::Remembered).await {
        Ok(done) => done.progress == Progress::Done,
        Err(error) => {
            told = error.to_string();
            false
        }
    } {
        // So it is never in between when somebody looks.
        cloud.end_operations();
        assert!(began.elapsed() < Duration::from_mins(10), "it is never done");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // The others are told, and not whose it is.
    assert!(told.contains("a public IP in it failed") && !told.contains(&name), "{told}");
    let took = began.elapsed();
    assert!(took > Duration::from_mins(2) && took < Duration::from_mins(3), "{took:?}");
    assert_eq!(fronts(&cloud), 2);
    let error = settle(&azure, &labelled).await.unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("in use"), "{error}");
    let took = until_done(&azure, &[&labelled, &named("a", &[80], &[2])]).await;
    assert!(took < Duration::from_secs(20), "{took:?}");
    // Azure writes it again.
    cloud.refuse(true, |_| None);
    let took = until_done(&azure, &[&bad]).await;
    assert!(took < Duration::from_secs(40), "{took:?}");
    let outcome = settle(&azure, &bad).await.unwrap();
    assert_eq!((outcome.ingress, outcome.incomplete, fronts(&cloud)), (address, None, 3));
}

/// Only the tags wait for a minute, not who may connect, the ports and the targets.
#[tokio::test(start_paused = true)]
async fn second_change_of_tags_holds_up_nothing_else() {
    let cloud = Scripted::new();
    let azure = cloud.with_group();
    let tagged = |lb, round| annotated(lb, annotations::PIP_TAGS, round);
    let path = config().public_ip_path(None, &ip_name(&named("a", &[80], &[1])));
    for round in ["round=0", "round=1"] {
        settle(&azure, &tagged(named("a", &[80], &[1]), round)).await.unwrap();
    }
    let narrow = annotated(named("a", &[80, 443], &[2]), annotations::ALLOWED_IP_RANGES, "198.51.100.0/24");
    let last = tagged(narrow, "round=2");
    let began = Instant::now();
    let mut ingress = Vec::new();
    while began.elapsed() < Duration::from_secs(5) {
        ingress = azure.apply(&last, Compare::Remembered).await.unwrap().ingress;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(ingress.len(), 1);
    let body = balancer(&cloud);
    assert_eq!(parts(&body, "loadBalancingRules").count(), 2);
    assert!(body.to_string().contains("10.0.0.2"), "{body}");
    assert!(cloud.get(GROUP).unwrap().to_string().contains("198.51.100.0/24"));
    assert_eq!(cloud.get(&path).unwrap()["tags"]["round"], "1");
    let took = until_done(&azure, &[&last]).await;
    assert!(took > Duration::from_secs(40) && took < Duration::from_secs(70), "{took:?}");
    assert_eq!(cloud.get(&path).unwrap()["tags"]["round"], "2");
    assert_eq!(settle(&azure, &last).await.unwrap().incomplete, None);
}

/// Whoever sets a label that fails and takes it away again, again and again, stops the writes of all no more often than who leaves it.
#[tokio::test(start_paused = true)]
async fn label_that_fails_is_not_tried_sooner_because_others_are_set_in_between() {
    let cloud = Scripted::new();
    let azure = provider(&cloud);
    let [a, bad] = ["a", "bad"].map(|name| named(name, &[80], &[1]));
    for lb in [&a, &bad] {
        settle(&azure, lb).await.unwrap();
    }
    let failures = count_refused_labels(&cloud);
    let wishes = [
        annotated(bad.clone(), annotations::DNS_LABEL, LABEL),
        annotated(bad.clone(), annotations::PIP_TAGS, "round=1"),
        annotated(bad.clone(), annotations::DNS_LABEL, &format!("{LABEL}-2")),
        bad.clone(),
    ];
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    for round in 0..60_u8 {
        let (wish, since) = (&wishes[usize::from(round) % 4], Instant::now());
        // Its annotations change twice a minute, and then less often than its public IP may be written.
        let moved = named("a", &[80], &[1 + round % 5]);
        slowest = slowest.max(until_done(&azure, &[wish, &moved]).await);
        while since.elapsed() < Duration::from_secs(if round % 20 < 10 { 30 } else { 75 }) {
            azure.apply(wish, Compare::Remembered).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    assert!(slowest < Duration::from_secs(30), "{slowest:?}");
    // Two labels for an hour: after 1, 2, 4, 8, 16 and 32 minutes.
    let failures = failures.load(Ordering::Relaxed);
    assert!(began.elapsed() > Duration::from_mins(50) && (4..=14).contains(&failures), "{failures}");
}

/// Counts the failures of labels that begin with [`LABEL`]: each makes the load balancer wait.
fn count_refused_labels(cloud: &Scripted) -> Arc<AtomicUsize> {
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&failures);
    cloud.refuse(true, move |body| {
        label(body).is_some_and(|label| label.starts_with(LABEL)).then(|| {
            counted.fetch_add(1, Ordering::Relaxed);
            ("DnsRecordInUse", "DNS record taken is already used by another public IP.".to_owned())
        })
    });
    failures
}

/// Whoever sets another label each minute stops the writes of all no more often than who leaves one that fails.
#[tokio::test(start_paused = true)]
async fn many_labels_that_fail_are_tried_no_more_often_than_one() {
    // In between there is none, or one that Azure takes.
    for (labels, between) in
        [(usize::MAX, None), (9, None), (usize::MAX, Some("")), (usize::MAX, Some("free"))]
    {
        let cloud = Scripted::new();
        let azure = provider(&cloud);
        let bad = named("bad", &[80], &[1]);
        settle(&azure, &bad).await.unwrap();
        let failures = count_refused_labels(&cloud);
        for round in 0..60_usize {
            let label = match between {
                Some(between) if round % 2 == 1 => between.to_owned(),
                _ => format!("{LABEL}-{}", round % labels),
            };
            let wish = match label.as_str() {
                "" => bad.clone(),
                label => annotated(bad.clone(), annotations::DNS_LABEL, label),
            };
            let since = Instant::now();
            while since.elapsed() < Duration::from_mins(1) {
                azure.apply(&wish, Compare::Remembered).await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
        // After 1, 2, 4, 8, 16 and 32 minutes.
        let failures = failures.load(Ordering::Relaxed);
        assert!((4..=7).contains(&failures), "{failures} of {labels}, {between:?}");
    }
}

/// Who corrects a label that has failed for long does not wait as long as the wrong one would.
#[tokio::test(start_paused = true)]
async fn corrected_label_is_written_within_a_minute_and_a_half() {
    let cloud = Scripted::new();
    let azure = provider(&cloud);
    let bad = named("bad", &[80], &[1]);
    settle(&azure, &bad).await.unwrap();
    let path = config().public_ip_path(None, &ip_name(&bad));
    let failures = count_refused_labels(&cloud);
    let wrong = annotated(bad.clone(), annotations::DNS_LABEL, LABEL);
    while failures.load(Ordering::Relaxed) < 6 {
        azure.apply(&wrong, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let corrected = annotated(bad, annotations::DNS_LABEL, "free");
    let began = Instant::now();
    let mut told = String::new();
    while label(&cloud.get(&path).unwrap()) != Some("free") {
        let outcome = azure.apply(&corrected, Compare::Remembered).await.unwrap();
        if let Some((_, message)) = outcome.incomplete {
            told = message;
        }
        assert!(began.elapsed() < Duration::from_secs(90), "it is never written");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(told.contains("not written yet") && told.contains("already used"), "{told}");
    assert_eq!(settle(&azure, &corrected).await.unwrap().incomplete, None);
}

/// The second change comes while the first one runs.
#[tokio::test(start_paused = true)]
async fn second_change_of_tags_is_written_after_the_first_one_that_runs() {
    for is_last_the_first in [false, true] {
        let cloud = Scripted::new();
        let azure = provider(&cloud);
        let tagged = |round| annotated(named("a", &[80], &[1]), annotations::PIP_TAGS, round);
        let path = config().public_ip_path(None, &ip_name(&tagged("round=0")));
        let tag = |cloud: &Scripted| cloud.get(&path).unwrap()["tags"]["round"].clone();
        settle(&azure, &tagged("round=0")).await.unwrap();
        azure.apply(&tagged("round=1"), Compare::Remembered).await.unwrap();
        assert_eq!(cloud.get(&path).unwrap()["properties"]["provisioningState"], "Updating");
        let mut last = "2";
        azure.apply(&tagged("round=2"), Compare::Remembered).await.unwrap();
        if is_last_the_first {
            last = "0";
        }
        let wish = tagged(&format!("round={last}"));
        // Others wait for the change that runs, and not for the next one.
        let took = until_done(&azure, &[&wish, &named("b", &[80], &[1])]).await;
        assert!(took < Duration::from_secs(15), "{took:?}");
        let took = until_done(&azure, &[&wish]).await;
        assert!(took < Duration::from_secs(70) && tag(&cloud) == last, "{took:?} {}", tag(&cloud));
    }
}
