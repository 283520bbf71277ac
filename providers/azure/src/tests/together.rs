// SPDX-License-Identifier: Apache-2.0
//! Many Services that share a load balancer.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use steerage_model::Key;
use steerage_provider_api::{
    Compare, Error, GroupTargets, LoadBalancer, Outcome, Progress, Provider as _, TargetSet,
};

use crate::config::tests::config;
use crate::desired::tests::{annotated, named};
use crate::merge::Layout;
use crate::provider::Azure;
use crate::scripted::{GROUP, Scripted};
use crate::{annotations, marks};

fn path() -> String {
    Layout { config: config(), is_internal: false }.path()
}

fn services(count: usize) -> Vec<LoadBalancer> {
    (0..count).map(|i| named(&format!("web-{i:02}"), &[80], &[1, 2])).collect()
}

/// Calls for each that is not done, again and again, as the controller's workers do.
async fn settle_all(provider: &Azure, all: &[LoadBalancer]) -> Vec<Result<Outcome, Error>> {
    let mut results: Vec<Option<Result<Outcome, Error>>> = vec![None; all.len()];
    for _ in 0..1500 {
        for (lb, result) in all.iter().zip(&mut results).filter(|(_, result)| result.is_none()) {
            match provider.apply(lb, Compare::Remembered).await {
                Ok(outcome) if outcome.progress != Progress::Done => {}
                Err(Error::Conflict(_) | Error::Busy(_)) => {}
                other => *result = Some(other),
            }
        }
        if results.iter().all(Option::is_some) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    results.into_iter().map(|result| result.expect("it is never done")).collect()
}

/// With the security group. A change is asked for once a second, while all Services call more often.
fn slow(cloud: &Scripted) -> Azure {
    cloud.provider_with(|config| {
        config.security_group = Some(GROUP.to_owned());
        config.poll = Duration::from_secs(1);
    })
}

fn count(calls: &[String], action: &str) -> usize {
    calls.iter().filter(|call| *call == action).count()
}

#[tokio::test(start_paused = true)]
async fn many_services_are_few_writes_of_the_load_balancer_and_of_the_group() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let all = services(50);
    let results = settle_all(&provider, &all).await;
    let addresses: BTreeSet<_> =
        results.iter().map(|result| result.as_ref().unwrap().ingress[0].ip).collect();
    assert_eq!(addresses.len(), 50);
    let calls = cloud.calls();
    assert_eq!(count(&calls, "PUT publicIPAddresses"), 50);
    let writes = [count(&calls, "PUT loadBalancers"), count(&calls, "PUT networkSecurityGroups")];
    assert!(writes.iter().all(|writes| *writes <= 3), "{writes:?}");
    // Each moves its endpoints.
    let moved: Vec<LoadBalancer> = (0..50).map(|i| named(&format!("web-{i:02}"), &[80], &[2, 3])).collect();
    settle_all(&provider, &moved).await.into_iter().for_each(|result| drop(result.unwrap()));
    let calls = cloud.calls();
    assert!(count(&calls, "PUT loadBalancers") <= 2, "{calls:?}");
    assert_eq!(count(&calls, "PUT publicIPAddresses") + count(&calls, "PUT networkSecurityGroups"), 0);
    for round in 0..100 {
        let mut is_done = true;
        for lb in &all {
            is_done &= provider.delete(&lb.owner).await.unwrap() == Progress::Done;
        }
        if is_done {
            break;
        }
        assert!(round < 99, "it is never gone");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let calls = cloud.calls();
    let writes = ["PUT loadBalancers", "DELETE loadBalancers", "PUT networkSecurityGroups"]
        .map(|of| count(&calls, of));
    assert!(writes.iter().sum::<usize>() <= 8, "{writes:?}");
    // One list, whatever else changes meanwhile; the operation says when each is gone.
    assert_eq!(count(&calls, "DELETE publicIPAddresses"), 50);
    let reads = count(&calls, "GET publicIPAddresses");
    assert!(reads <= 3, "{reads}");
    assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
}

/// Azure refuses the load balancer as long as one Service is in it, and may say so late, without the name of the Service.
#[tokio::test(start_paused = true)]
async fn one_service_that_azure_refuses_does_not_block_the_others() {
    for (late, is_named) in [(false, false), (false, true), (true, false), (true, true)] {
        let cloud = Scripted::new();
        let provider = slow(&cloud);
        let mut all = services(20);
        all[7] = annotated(all[7].clone(), annotations::IDLE_TIMEOUT, "99");
        let base = marks::Mark::new(&config().cluster, &all[7].owner).part("");
        cloud.refuse(late, move |body: &Value| {
            let rules = body["properties"]["loadBalancingRules"].as_array()?;
            let is_wrong = rules.iter().any(|rule| rule["properties"]["idleTimeoutInMinutes"] == json!(99));
            let message =
                if is_named { format!("{base}tcp-80-v4 is wrong") } else { "something is wrong".to_owned() };
            is_wrong.then_some(("InvalidTimeout", message))
        });
        let results = settle_all(&provider, &all).await;
        for (index, result) in results.iter().enumerate() {
            match result {
                Ok(outcome) => assert!(index != 7 && !outcome.ingress.is_empty()),
                Err(error) => {
                    assert!(index == 7 && error.reason() == "RejectedByProvider", "{index} {error}");
                    assert!(error.to_string().contains("is wrong"), "{error}");
                }
            }
        }
        let writes = count(&cloud.calls(), "PUT loadBalancers");
        let most = if is_named { 6 } else { 16 };
        assert!(writes <= most, "late {late}, named {is_named}: {writes}");
        // It is refused without a request until it changes.
        assert!(provider.apply(&all[7], Compare::Remembered).await.is_err());
        assert!(cloud.writes().is_empty());
        all[7].annotations.clear();
        assert!(settle_all(&provider, &all).await.iter().all(Result::is_ok));
    }
}

/// A public IP of the user, by path.
pub(super) fn put_theirs(cloud: &Scripted) -> String {
    let ip = config().public_ip_path(None, "theirs");
    let public_ip = json!({ "location": "westeurope", "sku": { "name": "Standard" },
        "properties": { "ipAddress": "203.0.113.7", "publicIPAllocationMethod": "Static" } });
    cloud.put(&ip, public_ip);
    ip
}

/// Azure lets the identity use the public IP of the user no more.
pub(super) fn forbid_theirs(cloud: &Scripted, ip: String, late: bool) {
    cloud.refuse(late, move |body: &Value| {
        let is_in = body["properties"]["frontendIPConfigurations"].to_string().contains("/theirs");
        is_in.then(|| ("LinkedAuthorizationFailed", format!("no permission for '{ip}'.")))
    });
}

/// The right to use what serves already is taken away: whoever changes something has no part in that.
#[tokio::test(start_paused = true)]
async fn what_is_in_place_and_forbidden_is_told_to_its_service_and_rejects_nobody() {
    for (late, is_granted) in [(false, false), (false, true), (true, false), (true, true)] {
        let cloud = Scripted::new();
        let provider = slow(&cloud);
        let ip = put_theirs(&cloud);
        let [bad, fresh] = ["bad", "fresh"].map(|name| named(name, &[80], &[1]));
        let bad = annotated(bad, annotations::PIP_NAME, "theirs");
        settle_all(&provider, std::slice::from_ref(&bad)).await[0].as_ref().unwrap();
        forbid_theirs(&cloud, ip, late);
        for _ in 0..3 {
            let error = settle_all(&provider, std::slice::from_ref(&fresh)).await[0].clone().unwrap_err();
            let told = error.to_string();
            assert!(matches!(error, Error::Denied(_)) && !told.contains("theirs"), "{told}");
            let (reason, told) =
                provider.apply(&bad, Compare::Remembered).await.unwrap().incomplete.expect("it is told");
            assert!(reason == "ProviderDenied" && told.contains("no permission for"), "{told}");
        }
        if is_granted {
            cloud.refuse(false, |_| None);
        } else {
            crate::scripted::gone(&provider, &bad.owner).await.unwrap();
        }
        let began = tokio::time::Instant::now();
        settle_all(&provider, std::slice::from_ref(&fresh)).await[0].as_ref().unwrap();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        if is_granted {
            assert_eq!(provider.apply(&bad, Compare::Remembered).await.unwrap().incomplete, None);
        }
    }
}

/// The identity may read a public IP and not use it. Azure says so of the load balancer, whose other Services are not concerned.
#[tokio::test(start_paused = true)]
async fn what_the_identity_may_not_use_blocks_its_service_only() {
    for (late, is_named) in [(false, false), (false, true), (true, false), (true, true)] {
        let cloud = Scripted::new();
        let provider = slow(&cloud);
        let ip = put_theirs(&cloud);
        let good = named("good", &[80], &[1, 2]);
        settle_all(&provider, std::slice::from_ref(&good)).await[0].as_ref().unwrap();
        let bad = annotated(named("bad", &[80], &[1, 2]), annotations::PIP_NAME, "theirs");
        cloud.refuse(late, move |body: &Value| {
            let is_in = body["properties"]["frontendIPConfigurations"].to_string().contains("/theirs");
            let scope = if is_named { &ip } else { "a linked scope" };
            is_in.then(|| ("LinkedAuthorizationFailed", format!("no permission for {scope}")))
        });
        for round in 1..4 {
            let error = settle_all(&provider, std::slice::from_ref(&bad)).await[0].clone().unwrap_err();
            assert!(error.to_string().contains("LinkedAuthorizationFailed"), "{error}");
            // Its endpoints move while the other one is tried again and again.
            let moved = named("good", &[80], &[round, round + 1]);
            settle_all(&provider, &[bad.clone(), moved]).await[1].as_ref().unwrap();
        }
        // A minute, two, four, and five minutes from then on, until the permission is there.
        cloud.refuse(false, |_| None);
        tokio::time::sleep(Duration::from_mins(5)).await;
        settle_all(&provider, std::slice::from_ref(&bad)).await[0].as_ref().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn change_by_others_is_read_again_and_kept() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let [first, second] = [0, 1].map(|i| services(2)[i].clone());
    settle_all(&provider, std::slice::from_ref(&first)).await[0].as_ref().unwrap();
    cloud.change(&path(), |body| {
        body["tags"]["team"] = json!("a");
        let theirs = json!({ "name": "theirs", "properties": { "subnet": { "id": "/s" } } });
        body["properties"]["frontendIPConfigurations"].as_array_mut().unwrap().push(theirs);
    });
    cloud.calls();
    settle_all(&provider, &[first.clone(), second.clone()]).await[1].as_ref().unwrap();
    assert_eq!(count(&cloud.calls(), "PUT loadBalancers"), 2, "refused once, then made for what was read");
    let body = cloud.get(&path()).unwrap();
    assert_eq!(body["tags"]["team"], "a");
    assert_eq!(body["properties"]["frontendIPConfigurations"].as_array().unwrap().len(), 3);
    // A deletion meets another change, too, and leaves nothing of the Service.
    for lb in [&first, &second] {
        cloud.change(&path(), |body| body["tags"]["team"] = json!(lb.owner.uid));
        crate::scripted::gone(&provider, &lb.owner).await.unwrap();
    }
    assert!(cloud.all("publicIPAddresses").is_empty());
    let body = cloud.get(&path()).unwrap();
    assert_eq!(body["properties"]["frontendIPConfigurations"].as_array().unwrap().len(), 1, "theirs stays");
    assert_eq!(body["properties"]["loadBalancingRules"].as_array().unwrap().len(), 0);
}

/// One namespace with many Services does not keep that of another one back.
#[tokio::test(start_paused = true)]
async fn namespaces_take_turns_where_writes_are_small() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let mut all = services(20);
    let mut other = named("alone", &[80], &[1]);
    other.owner.service = Key::new("zoo", "alone");
    all.push(other.clone());
    for lb in &mut all[..10] {
        *lb = annotated(lb.clone(), annotations::IDLE_TIMEOUT, "99");
    }
    cloud.refuse(false, |body: &Value| {
        let rules = body["properties"]["loadBalancingRules"].as_array()?;
        let is_wrong = rules.iter().any(|rule| rule["properties"]["idleTimeoutInMinutes"] == json!(99));
        is_wrong.then(|| ("InvalidTimeout", "something".to_owned()))
    });
    let results = settle_all(&provider, &all).await;
    assert!(
        results[20].is_ok()
            && results[..10].iter().all(Result::is_err)
            && results[10..].iter().all(Result::is_ok)
    );
}

/// The name of a subnet is a word of Azure's refusal, and a user chose it.
#[tokio::test(start_paused = true)]
async fn names_that_users_choose_take_no_node_out_of_pools() {
    for (chosen, address) in [("10.0.0.1", None), ("missing", Some("10.0.0.1"))] {
        let cloud = Scripted::new();
        let provider = slow(&cloud);
        let is_internal = |lb| annotated(lb, annotations::INTERNAL, "true");
        let good = is_internal(named("good", &[80], &[1]));
        let mut bad = annotated(is_internal(named("bad", &[80], &[1, 2])), annotations::SUBNET, chosen);
        bad.requested_addresses = address.into_iter().map(|ip| ip.parse().unwrap()).collect();
        cloud.refuse(false, move |body: &Value| {
            let fronts = body["properties"]["frontendIPConfigurations"].as_array()?;
            let text = json!(fronts).to_string();
            let is_wrong = text.contains(&format!("/subnets/{chosen}\""));
            let message = format!("{chosen} {} was not found", address.unwrap_or_default());
            is_wrong.then_some(("InvalidResourceReference", message))
        });
        let results = settle_all(&provider, &[good.clone(), bad]).await;
        assert!(results[0].is_ok(), "{results:?}");
        let again = settle_all(&provider, &[good]).await;
        assert!(again[0].as_ref().is_ok_and(|outcome| outcome.refused.is_empty()), "{again:?}");
        let reason = results[1].as_ref().unwrap_err().reason();
        assert_eq!(reason, if address.is_some() { "AddressNotAvailable" } else { "RejectedByProvider" });
        let pools = cloud.all("loadBalancers")[0]["properties"]["backendAddressPools"].to_string();
        assert!(pools.contains("10.0.0.1"), "{pools}");
    }
}

/// Azure says that something is being changed: only a changed version is worth another request at once.
#[tokio::test(start_paused = true)]
async fn busy_answers_are_waited_for_and_changed_versions_read_again() {
    for (status, code) in
        [(409, "AnotherOperationInProgress"), (429, "RetryableError"), (412, "PreconditionFailed")]
    {
        let cloud = Scripted::new();
        let provider = cloud.provider_with(|config| config.poll = Duration::from_secs(1));
        let lb = named("web", &[80], &[1]);
        settle_all(&provider, std::slice::from_ref(&lb)).await.pop().unwrap().unwrap();
        cloud.calls();
        for _ in 0..8 {
            cloud.fail("PUT loadBalancers", status, code, false);
        }
        let moved = named("web", &[80], &[2]);
        let first = provider.apply(&moved, Compare::Remembered).await.unwrap();
        assert!(matches!(first.progress, Progress::Again(_)), "{code}");
        let writes = count(&cloud.calls(), "PUT loadBalancers");
        assert_eq!(writes, if status == 412 { 4 } else { 1 }, "{code}");
        // Calls in between send nothing, and waits grow.
        let began = tokio::time::Instant::now();
        settle_all(&provider, &[moved]).await.pop().unwrap().unwrap();
        assert!(count(&cloud.calls(), "PUT loadBalancers") <= 9, "{code}");
        assert!(status == 412 || began.elapsed() > Duration::from_mins(2), "{code} {:?}", began.elapsed());
    }
}

/// What one Service refers to is never ready: the others do not wait for it.
#[tokio::test(start_paused = true)]
async fn service_whose_public_ip_is_never_ready_is_left_out() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let all = services(3);
    let bad = marks::Mark::new(&config().cluster, &all[1].owner).part("v4");
    cloud.refuse(false, move |body: &Value| {
        let fronts = body["properties"]["frontendIPConfigurations"].as_array()?;
        let id = format!("/publicIPAddresses/{bad}");
        let is_wrong = json!(fronts).to_string().contains(&id);
        is_wrong.then(|| ("ReferencedResourceNotProvisioned", format!("{id} is not in Succeeded state")))
    });
    let results = settle_all(&provider, &all).await;
    assert!(results[0].is_ok() && results[2].is_ok(), "{results:?}");
    assert_eq!(results[1].as_ref().unwrap_err().reason(), "RejectedByProvider");
}

/// What is done may be another thing than what was refused.
#[tokio::test(start_paused = true)]
async fn refused_change_is_not_sent_again_because_endpoints_move() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let lb = named("web", &[80], &[1]);
    settle_all(&provider, std::slice::from_ref(&lb)).await.pop().unwrap().unwrap();
    cloud.refuse(false, |body: &Value| {
        let is_wrong = body["properties"].to_string().contains("\"idleTimeoutInMinutes\":99");
        is_wrong.then(|| ("InvalidTimeout", "something".to_owned()))
    });
    let wrong = [annotated(lb.clone(), annotations::IDLE_TIMEOUT, "99")];
    assert!(settle_all(&provider, &wrong).await[0].is_err());
    let moved = GroupTargets::of_nodes(TargetSet::own([crate::desired::tests::node(2)]));
    while provider.set_targets(&lb.owner, &moved).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    cloud.calls();
    assert!(settle_all(&provider, &wrong).await[0].is_err());
    assert_eq!(count(&cloud.calls(), "PUT loadBalancers"), 0);
}

/// Somebody makes a load balancer of the name after Steerage saw that there is none.
#[tokio::test(start_paused = true)]
async fn creation_replaces_nothing() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let lb = named("web", &[80], &[1]);
    assert_eq!(provider.delete(&lb.owner).await.unwrap(), Progress::Done);
    cloud.put(&path(), json!({ "location": "westeurope", "properties": {}, "tags": { "team": "a" } }));
    let results = settle_all(&provider, &[lb]).await;
    assert_eq!(results[0].as_ref().unwrap_err().reason(), "ObjectNotOwned");
    assert_eq!(cloud.get(&path()).unwrap()["tags"], json!({ "team": "a" }));
}

/// The other load balancer's name is taken, or it cannot be read or written.
#[tokio::test(start_paused = true)]
async fn trouble_of_one_load_balancer_does_not_stop_the_other() {
    let cloud = Scripted::new();
    let other = Layout { config: config(), is_internal: true }.path();
    cloud.put(&other, json!({ "location": "westeurope", "properties": {}, "tags": { "team": "a" } }));
    let external = Layout { config: config(), is_internal: false }.path();
    let (provider, lb) = (cloud.with_group(), named("web", &[80], &[1]));
    let set = |generation, nodes: &[u8]| TargetSet {
        shared: Some(steerage_provider_api::SharedSet::Eligible),
        generation,
        ..TargetSet::own(nodes.iter().map(|i| crate::desired::tests::node(*i)))
    };
    let shared = lb.clone().with_nodes(set(1, &[1]));
    assert!(settle_all(&provider, std::slice::from_ref(&shared)).await[0].is_ok());
    provider.set_shared(&set(2, &[1, 2])).await.unwrap();
    let moved = GroupTargets::of_nodes(TargetSet::own([crate::desired::tests::node(2)]));
    while provider.set_targets(&lb.owner, &moved).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let requested = steerage_provider_api::RequestedSources {
        ranges: vec!["10.0.0.0/8".parse().unwrap()],
        ..Default::default()
    };
    while let Err(error) = provider.restrict_sources(&lb.owner, &requested).await {
        assert!(matches!(error, Error::Busy(_)), "{error}");
    }
    assert!(cloud.get(&external).unwrap()["properties"].to_string().contains("10.0.0.2"));
    crate::scripted::gone(&provider, &lb.owner).await.unwrap();
    assert_eq!(cloud.all("loadBalancers").len(), 1, "theirs");
}

/// Whoever waits for a public IP waits alone, also at each later try.
#[tokio::test(start_paused = true)]
async fn public_ip_that_is_never_ready_delays_nobody_else() {
    for is_late in [false, true] {
        let cloud = Scripted::new();
        let provider = slow(&cloud);
        let all = services(3);
        let bad = marks::Mark::new(&config().cluster, &all[1].owner).part("v4");
        cloud.refuse(is_late, move |body: &Value| {
            let fronts = body["properties"]["frontendIPConfigurations"].as_array()?;
            let id = format!("/publicIPAddresses/{bad}");
            let is_wrong = json!(fronts).to_string().contains(&id);
            is_wrong.then(|| ("ReferencedResourceNotProvisioned", format!("{id} is not in Succeeded state")))
        });
        settle_all(&provider, &[all[0].clone(), all[2].clone()]).await;
        let mut slowest = Duration::ZERO;
        let (mut tries, began) = (0, tokio::time::Instant::now());
        for round in 0..40 {
            // Everybody calls at once.
            let moved = named("web-00", &[80], &[1 + round % 5]);
            let since = tokio::time::Instant::now();
            loop {
                assert!(since.elapsed() < Duration::from_mins(5), "late {is_late}: it is never done");
                tries += usize::from(provider.apply(&all[1], Compare::Remembered).await.is_err());
                match provider.apply(&moved, Compare::Remembered).await {
                    Ok(outcome) if outcome.progress == Progress::Done => break,
                    Ok(_) | Err(Error::Conflict(_) | Error::Busy(_)) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            slowest = slowest.max(since.elapsed());
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        assert!(tries > 0 && began.elapsed() > Duration::from_mins(6));
        // A write takes two or three seconds here; at most a refused one comes before.
        assert!(slowest <= Duration::from_secs(9), "late {is_late}: {slowest:?}");
    }
}

/// Azure does not say which of many new Services is wrong. One that serves already moves its endpoints meanwhile.
#[tokio::test(start_paused = true)]
async fn moved_endpoints_do_not_wait_until_a_refused_service_is_found() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let served = named("zzz", &[80], &[1, 2]);
    settle_all(&provider, std::slice::from_ref(&served)).await.pop().unwrap().unwrap();
    let mut all = services(16);
    all[7] = annotated(all[7].clone(), annotations::IDLE_TIMEOUT, "99");
    cloud.refuse(true, |body: &Value| {
        let is_wrong = body["properties"].to_string().contains("\"idleTimeoutInMinutes\":99");
        is_wrong.then(|| ("InvalidTimeout", "something is wrong".to_owned()))
    });
    // Until the first refusal.
    let count = |cloud: &Scripted| {
        cloud.all("loadBalancers")[0]["properties"]["loadBalancingRules"].as_array().unwrap().len()
    };
    for _ in 0..200 {
        for lb in &all {
            let _ = provider.apply(lb, Compare::Remembered).await;
        }
        if count(&cloud) > 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let moved = named("zzz", &[80], &[3]);
    let began = tokio::time::Instant::now();
    loop {
        match provider.apply(&moved, Compare::Remembered).await {
            Ok(outcome) if outcome.progress == Progress::Done => break,
            Ok(_) | Err(Error::Conflict(_) | Error::Busy(_)) => {}
            Err(error) => panic!("{error}"),
        }
        for lb in &all {
            let _ = provider.apply(lb, Compare::Remembered).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The refused write ends, and its own one.
    assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
    let results = settle_all(&provider, &all).await;
    assert!(results.iter().enumerate().all(|(index, result)| result.is_ok() == (index != 7)), "{results:?}");
}

/// Whoever edits a Service that is refused makes nobody else wait: it goes alone, but for endpoints that move.
#[tokio::test(start_paused = true)]
async fn edited_service_that_was_refused_goes_alone() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    settle_all(&provider, &services(8)).await.into_iter().for_each(|result| drop(result.unwrap()));
    let wrong = |round: usize| {
        annotated(named("web-07", &[80], &[1, 2]), annotations::IDLE_TIMEOUT, &format!("{}", 30 + round))
    };
    let refusals = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&refusals);
    cloud.refuse(false, move |body: &Value| {
        let is_wrong = body["properties"].to_string().contains("\"idleTimeoutInMinutes\":3");
        counted.fetch_add(usize::from(is_wrong), std::sync::atomic::Ordering::Relaxed);
        is_wrong.then(|| ("InvalidTimeout", "something is wrong".to_owned()))
    });
    assert!(settle_all(&provider, &[wrong(0)]).await[0].is_err());
    for round in 1..4 {
        let port = u16::try_from(9000 + round).unwrap();
        let mut round_of: Vec<_> = (0..7).map(|i| named(&format!("web-{i:02}"), &[port], &[1, 2])).collect();
        round_of.push(wrong(round));
        for lb in &round_of {
            let _ = provider.apply(lb, Compare::Remembered).await;
        }
        let results = settle_all(&provider, &round_of).await;
        assert!(results[..7].iter().all(Result::is_ok) && results[7].is_err(), "{results:?}");
        let refused = refusals.swap(0, std::sync::atomic::Ordering::Relaxed);
        assert!(refused <= if round == 1 { 2 } else { 1 }, "round {round}: {refused}");
    }
    // Its endpoints move with those of the others, and a good wish is done.
    let moved = GroupTargets::of_nodes(TargetSet::own([crate::desired::tests::node(3)]));
    while provider.set_targets(&wrong(0).owner, &moved).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    settle_all(&provider, &[named("web-07", &[80, 81], &[3])]).await.pop().unwrap().unwrap();
}

/// What was wrong for hours is tried again within minutes.
#[tokio::test(start_paused = true)]
async fn refused_service_is_tried_again_after_five_minutes_at_the_latest() {
    let cloud = Scripted::new();
    let provider = slow(&cloud);
    let bad = annotated(named("bad", &[80], &[1]), annotations::IDLE_TIMEOUT, "99");
    cloud.refuse(false, |body: &Value| {
        let is_wrong = body["properties"].to_string().contains("\"idleTimeoutInMinutes\":99");
        is_wrong.then(|| ("InvalidTimeout", "something is wrong".to_owned()))
    });
    let began = tokio::time::Instant::now();
    while began.elapsed() < Duration::from_hours(2) {
        assert!(settle_all(&provider, std::slice::from_ref(&bad)).await[0].is_err());
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    // A minute, two, four, and five minutes from then on.
    let writes = count(&cloud.calls(), "PUT loadBalancers");
    assert!((20..=28).contains(&writes), "{writes}");
    cloud.refuse(false, |_| None);
    tokio::time::sleep(Duration::from_mins(5)).await;
    settle_all(&provider, std::slice::from_ref(&bad)).await[0].as_ref().unwrap();
}
