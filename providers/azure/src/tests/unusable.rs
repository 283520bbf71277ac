// SPDX-License-Identifier: Apache-2.0
//! Shared resources that cannot be read or changed, and public IPs that fail, or that others change.

use std::time::Duration;

use serde_json::json;
use steerage_provider_api::{
    Compare, GroupTargets, Progress, Provider as _, RequestedSources, SharedSet, TargetSet,
};

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, named, node, planned};
use crate::marks::Mark;
use crate::merge::Layout;
use crate::scripted::{GROUP, Scripted, gone, settle};
use crate::tests::together::{forbid_theirs, put_theirs};

fn path(is_internal: bool) -> String {
    Layout { config: config(), is_internal }.path()
}

/// The Service is served and says what is not known; what it had in the other load balancer goes when that can be read.
#[tokio::test(start_paused = true)]
async fn service_is_published_while_the_other_load_balancer_cannot_be_read() {
    for is_internal in [false, true] {
        let cloud = Scripted::new();
        let mut lb = planned(&[80], &[1]);
        if is_internal {
            lb = annotated(lb, annotations::INTERNAL, "true");
        }
        cloud.break_path(&path(!is_internal), 500);
        let provider = cloud.with_group();
        let outcome = settle(&provider, &lb).await.unwrap();
        assert_eq!(outcome.ingress.len(), 1);
        let (reason, message) = outcome.incomplete.unwrap();
        assert_eq!((reason, outcome.retry_refused.is_some()), ("ProviderUnavailable", true), "{message}");
        assert!(message.contains(path(!is_internal).rsplit('/').next().unwrap()), "{message}");
        cloud.fix_path(&path(!is_internal));
        assert_eq!(settle(&provider, &lb).await.unwrap().incomplete, None);
        // Now it is known that nothing is there.
        cloud.break_path(&path(!is_internal), 500);
        tokio::time::sleep(Duration::from_mins(10)).await;
        let outcome = loop {
            let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
            if outcome.progress == Progress::Done {
                break outcome;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert_eq!((outcome.ingress.len(), outcome.incomplete), (1, None));
        gone(&provider, &lb.owner).await.unwrap();
        assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
    }
}

/// Where it moved, the old address stays as long as its load balancer cannot be read.
#[tokio::test(start_paused = true)]
async fn moved_service_keeps_what_cannot_be_read() {
    let cloud = Scripted::new();
    let lb = planned(&[80], &[1]);
    settle(&cloud.with_group(), &lb).await.unwrap();
    cloud.break_path(&path(false), 500);
    let internal = annotated(lb.clone(), annotations::INTERNAL, "true");
    let provider = cloud.with_group();
    let outcome = settle(&provider, &internal).await.unwrap();
    assert!(outcome.ingress.len() == 1 && outcome.incomplete.is_some(), "{outcome:?}");
    assert_eq!((cloud.all("loadBalancers").len(), cloud.all("publicIPAddresses").len()), (2, 1));
    // A deletion cannot know what is left there.
    assert!(gone(&provider, &lb.owner).await.is_err());
    cloud.fix_path(&path(false));
    assert_eq!(settle(&provider, &internal).await.unwrap().incomplete, None);
    assert_eq!((cloud.all("loadBalancers").len(), cloud.all("publicIPAddresses").len()), (1, 0));
}

/// The security group says nothing of a Service without an address.
#[tokio::test(start_paused = true)]
async fn service_without_an_address_is_deleted_without_the_security_group() {
    let cloud = Scripted::new();
    cloud.break_path(GROUP, 500);
    let (provider, lb) = (cloud.with_group(), planned(&[80], &[1]));
    gone(&provider, &lb.owner).await.unwrap();
    cloud.fix_path(GROUP);
    settle(&provider, &lb).await.unwrap();
    cloud.break_path(GROUP, 500);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(gone(&provider, &lb.owner).await.is_err(), "its rules would stay");
}

/// Something that is not Steerage's makes Azure refuse the load balancer as it is.
#[tokio::test(start_paused = true)]
async fn failed_load_balancer_stops_nobody_who_does_not_change() {
    for (is_late, is_named) in [(false, false), (true, false), (false, true), (true, true)] {
        let cloud = Scripted::new();
        let all = ["a", "b"].map(|name| named(name, &[80], &[1]));
        for lb in &all {
            settle(&cloud.with_group(), lb).await.unwrap();
        }
        cloud.change(&path(false), |body| body["tags"]["wrong"] = json!("yes"));
        cloud.fail_state(&path(false));
        let base = Mark::new(&config().cluster, &all[0].owner).part("");
        cloud.refuse(is_late, move |body| {
            let words =
                if is_named { format!("{base}tcp-80-v4 is wrong") } else { "something is wrong".to_owned() };
            (body["tags"]["wrong"] == "yes").then_some(("InvalidResourceReference", words))
        });
        let provider = cloud.with_group();
        cloud.calls();
        for (index, lb) in all.iter().enumerate() {
            match settle(&provider, lb).await {
                Ok(outcome) => assert!(outcome.ingress.len() == 1 && !(is_named && index == 0)),
                Err(error) => {
                    assert!(
                        is_named && index == 0 && error.to_string().contains("names this Service"),
                        "{error}"
                    );
                }
            }
        }
        let writes = cloud.writes();
        assert_eq!(writes, ["PUT loadBalancers"], "one try to repair it, {is_late}");
        let fresh = named("c", &[80], &[1]);
        let began = tokio::time::Instant::now();
        let error = loop {
            match provider.apply(&fresh, Compare::Remembered).await {
                Err(error) => break error,
                Ok(outcome) => assert_ne!(outcome.progress, Progress::Done),
            }
            assert!(began.elapsed() < Duration::from_mins(3), "it is never told");
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        // It waits only if there is a Service that can be left out.
        assert_eq!(began.elapsed() > Duration::from_mins(1), is_named, "{:?}", began.elapsed());
        assert_eq!(error.reason(), "LoadBalancerFailed", "{error}");
        assert!(error.to_string().contains("in the state Failed"), "{error}");
        let moved = named("a", &[80], &[2]);
        assert!(settle(&provider, &moved).await.is_err());
        assert!(settle(&provider, &all[1]).await.is_ok());
        // Somebody corrects it.
        cloud.change(&path(false), |body| drop(body["tags"].as_object_mut().unwrap().remove("wrong")));
        tokio::time::sleep(Duration::from_mins(10)).await;
        for lb in [&fresh, &moved, &all[1]] {
            settle(&provider, lb).await.unwrap();
        }
        assert_eq!(cloud.get(&path(false)).unwrap()["properties"]["provisioningState"], "Succeeded");
    }
}

/// What the identity may not use any more goes with its Service.
#[tokio::test(start_paused = true)]
async fn deletion_repairs_a_failed_load_balancer_whose_public_ip_is_forbidden() {
    let cloud = Scripted::new();
    let ip = put_theirs(&cloud);
    let bad = annotated(named("bad", &[80], &[1]), annotations::PIP_NAME, "theirs");
    for lb in [&named("good", &[80], &[1]), &bad] {
        settle(&cloud.provider(), lb).await.unwrap();
    }
    cloud.fail_state(&path(false));
    forbid_theirs(&cloud, ip, false);
    let provider = cloud.provider();
    let moved = named("good", &[80], &[2]);
    assert!(settle(&provider, &moved).await.is_err());
    gone(&provider, &bad.owner).await.unwrap();
    settle(&provider, &moved).await.unwrap();
}

/// Azure takes no change of a load balancer that refers to a public IP whose last change failed. Nobody changes the IP's Service.
#[tokio::test(start_paused = true)]
async fn failed_public_ip_in_use_is_written_again_and_its_service_is_told() {
    let cloud = Scripted::new();
    let provider = cloud.provider_with(|config| config.poll = Duration::from_secs(1));
    let all = ["a", "b"].map(|name| named(name, &[80], &[1]));
    for lb in &all {
        settle(&provider, lb).await.unwrap();
    }
    let name = Mark::new(&config().cluster, &all[0].owner).part("v4");
    let ip = config().public_ip_path(None, &name);
    cloud.fail_state(&ip);
    cloud.block("PUT publicIPAddresses", 500);
    let moved = named("b", &[80], &[2]);
    assert_ne!(provider.apply(&moved, Compare::Remembered).await.unwrap().progress, Progress::Done);
    // Its own Service says what is wrong.
    let outcome = provider.apply(&all[0], Compare::Remembered).await.unwrap();
    let (reason, message) = outcome.incomplete.unwrap();
    assert!(reason == "PublicIPNotReady" && message.contains(&name), "{message}");
    cloud.unblock("PUT publicIPAddresses");
    let began = tokio::time::Instant::now();
    while !provider.apply(&moved, Compare::Remembered).await.is_ok_and(|done| done.progress == Progress::Done)
    {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(began.elapsed() < Duration::from_mins(2), "it is never done");
    }
    assert_eq!(cloud.get(&ip).unwrap()["properties"]["provisioningState"], "Succeeded");
    assert_eq!(provider.apply(&all[0], Compare::Remembered).await.unwrap().incomplete, None);
    // The next time nobody stands in the way.
    tokio::time::sleep(Duration::from_mins(2)).await;
    cloud.fail_state(&ip);
    let began = tokio::time::Instant::now();
    settle(&provider, &named("b", &[80], &[3])).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
}

/// Whoever changes the tags of a public IP again and again would stop the writes of all.
#[tokio::test(start_paused = true)]
async fn public_ip_in_use_is_written_once_a_minute() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let began = tokio::time::Instant::now();
    for round in 0..4 {
        let lb = annotated(named("a", &[80], &[1]), annotations::PIP_TAGS, &format!("round={round}"));
        while provider.apply(&lb, Compare::Remembered).await.unwrap().progress != Progress::Done {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    assert!(began.elapsed() > Duration::from_secs(110), "{:?}", began.elapsed());
}

/// What Steerage may not change any more is not reported as done.
#[tokio::test(start_paused = true)]
async fn load_balancer_whose_tags_were_replaced_is_told() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let lb = planned(&[80], &[1]);
    settle(&provider, &lb).await.unwrap();
    let tags = cloud.get(&path(false)).unwrap()["tags"].clone();
    cloud.change(&path(false), |body| body["tags"] = json!({ "team": "a" }));
    tokio::time::sleep(Duration::from_mins(1)).await;
    for provider in [&provider, &cloud.with_group()] {
        assert_eq!(gone(provider, &lb.owner).await.unwrap_err().reason(), "ObjectNotOwned");
        assert!(provider.owned().await.is_err());
        let set = TargetSet { shared: Some(SharedSet::Eligible), ..TargetSet::own([node(2)]) };
        assert_eq!(provider.set_shared(&set).await.unwrap_err().reason(), "ObjectNotOwned");
        let moved = GroupTargets::of_nodes(TargetSet::own([node(2)]));
        assert_eq!(provider.set_targets(&lb.owner, &moved).await.unwrap_err().reason(), "ObjectNotOwned");
        assert!(provider.restrict_sources(&lb.owner, &RequestedSources::default()).await.is_err());
        // A move into the other load balancer leaves the old address, and says so.
        let internal = annotated(lb.clone(), annotations::INTERNAL, "true");
        let incomplete = settle(provider, &internal).await.unwrap().incomplete.unwrap();
        assert_eq!(incomplete.0, "ObjectNotOwned");
    }
    cloud.change(&path(false), |body| body["tags"] = tags);
    tokio::time::sleep(Duration::from_mins(1)).await;
    gone(&provider, &lb.owner).await.unwrap();
    assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
}

/// Somebody uses a public IP of Steerage's elsewhere.
#[tokio::test(start_paused = true)]
async fn public_ip_that_is_used_elsewhere_is_told_on_deletion() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let lb = planned(&[80], &[1]);
    settle(&provider, &lb).await.unwrap();
    let ip = cloud.all("publicIPAddresses")[0]["id"].as_str().unwrap().to_owned();
    let theirs = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/nic/ipConfigurations/a";
    cloud.change(&ip, |ip| ip["properties"]["ipConfiguration"] = json!({ "id": theirs }));
    let (began, mut told) = (tokio::time::Instant::now(), None);
    while told.is_none() && began.elapsed() < Duration::from_mins(5) {
        told = provider.delete(&lb.owner).await.err().map(|error| error.to_string());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(told.is_some_and(|told| told.contains(theirs)) && began.elapsed() > Duration::from_secs(50));
    cloud.change(&ip, |ip| drop(ip["properties"].as_object_mut().unwrap().remove("ipConfiguration")));
    gone(&provider, &lb.owner).await.unwrap();
    assert!(cloud.all("publicIPAddresses").is_empty());
}
