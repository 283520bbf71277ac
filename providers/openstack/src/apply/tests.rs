// SPDX-License-Identifier: Apache-2.0

use serde_json::json;
use steerage_model::Protocol;
use steerage_provider_api::Provider as _;

use super::*;
use crate::desired::tests::planned;
use crate::scripted::{Scripted, ids, settle};

const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

#[tokio::test(start_paused = true)]
async fn change_that_failed_is_made_when_octavia_works_again() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
    let changed = planned(&[WEB], &[1, 2]);
    for _ in 0..4 {
        cloud.fail("PUT members", 500, "oops");
        assert_eq!(settle(&provider, &changed).await.unwrap_err().reason(), "ProviderUnavailable");
    }
    settle(&provider, &changed).await.unwrap();
    assert_eq!(cloud.all("pools")[0]["members"].as_array().unwrap().len(), 2);
}

#[test]
fn addresses_are_found_in_messages() {
    let found = |text: &str| addresses(text).map(|ip| ip.to_string()).collect::<Vec<_>>();
    assert_eq!(found("169.254.169.254 is not a valid option for member address"), ["169.254.169.254"]);
    assert_eq!(found("IP address 2001:db8::1, not 10.0.0.7. It"), ["2001:db8::1", "10.0.0.7"]);
    assert!(found("Listener 45e25bcb-83b0-404c-ba45-c68e4b97fbec: port 80").is_empty());
}

/// Its flow fails each time.
#[tokio::test(start_paused = true)]
async fn deletion_that_ends_in_error_is_told() {
    for is_earlier in [false, true] {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let mut lb = planned(&[WEB], &[1]);
        settle(&provider, &lb).await.unwrap();
        let id = ids(&cloud)[0].clone();
        if is_earlier {
            "u2".clone_into(&mut lb.owner.uid);
        }
        cloud.break_worker(Some("DELETE loadbalancers"));
        let mut told = None;
        for _ in 0..10 {
            let result = if is_earlier {
                provider.apply(&lb, Compare::Remembered).await.map(drop)
            } else {
                provider.delete(&lb.owner).await.map(drop)
            };
            told = told.or(result.err());
        }
        let told = told.unwrap().to_string();
        assert!(told.contains(&id) && told.contains("failed the deletion"), "{told}");
        cloud.break_worker(None);
        let _ = provider.delete(&lb.owner).await;
        settle(&provider, &lb).await.unwrap();
        assert_ne!(ids(&cloud), [id]);
    }
}

#[tokio::test(start_paused = true)]
async fn load_balancer_that_stays_pending_is_told() {
    for (is_earlier, is_deleting) in [(false, false), (false, true), (true, false)] {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let mut lb = planned(&[WEB], &[1]);
        settle(&provider, &lb).await.unwrap();
        let id = ids(&cloud)[0].clone();
        cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "PENDING_UPDATE" }));
        if is_earlier {
            "u2".clone_into(&mut lb.owner.uid);
        }
        let provider = cloud.provider();
        let mut waits = Vec::new();
        let error = loop {
            let wait = if is_deleting {
                provider.delete(&lb.owner).await
            } else {
                provider.apply(&lb, Compare::Remembered).await.map(|outcome| outcome.progress)
            };
            match wait {
                Ok(Progress::Again(wait)) => waits.push(wait.max(Duration::from_millis(500))),
                Ok(Progress::Done) => panic!("it is done"),
                Err(error) => break error,
            }
            assert!(waits.len() < 200, "it is never told");
            tokio::time::advance(*waits.last().unwrap()).await;
        };
        assert!(error.to_string().contains(&id), "{error}");
        assert!(waits.iter().sum::<Duration>() >= Duration::from_mins(10), "{waits:?}");
        assert!(waits.len() < 60 && waits[waits.len() - 1] > Duration::from_secs(30), "{waits:?}");
        // The next question has the same answer.
        assert!(provider.apply(&lb, Compare::Remembered).await.is_err());
        cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "ACTIVE" }));
        settle(&provider, &lb).await.unwrap();
    }
}

fn members(cloud: &Scripted) -> Vec<String> {
    let all = cloud.all("pools")[0]["members"].as_array().unwrap().clone();
    all.iter().map(|member| member["name"].as_str().unwrap().to_owned()).collect()
}

/// The worker sets the part to ERROR, and the load balancer back to ACTIVE.
#[tokio::test(start_paused = true)]
async fn change_that_octavia_s_worker_fails_is_made_again() {
    for by_apply in [true, false] {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
        let changed = planned(&[WEB], &[2]);
        let once = async || {
            if by_apply {
                provider.apply(&changed, Compare::Remembered).await
            } else {
                provider.set_targets(&changed.owner, &changed.targets()).await
            }
        };
        cloud.break_worker(Some("PUT members"));
        let mut told = None;
        for _ in 0..20 {
            match once().await {
                Ok(outcome) => assert_ne!(outcome.progress, Progress::Done, "it was not done"),
                Err(error) => told = told.or_else(|| Some(error.to_string())),
            }
        }
        let told = told.unwrap();
        assert!(told.contains("members of pool") && told.contains("in ERROR"), "{told}");
        cloud.break_worker(None);
        tokio::time::advance(Duration::from_mins(5)).await;
        let mut is_done = false;
        for _ in 0..10 {
            // The first look finds what failed before.
            is_done |= once().await.is_ok_and(|outcome| outcome.progress == Progress::Done);
        }
        assert!(is_done);
        assert_eq!(members(&cloud).len(), 1);
        let all = cloud.all("pools")[0]["members"].clone();
        assert!(!all.to_string().contains("ERROR"), "{all}");
    }
}

/// Octavia counts what comes less what goes, so the final set is taken where both sets at once are not.
#[tokio::test(start_paused = true)]
async fn targets_move_also_at_the_quota_of_members() {
    for by_apply in [true, false] {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
        let moved = planned(&[WEB], &[2]);
        cloud.fail("PUT members", 403, "Quota has been met for resources: Member");
        for _ in 0..5 {
            if by_apply {
                provider.apply(&moved, Compare::Remembered).await.unwrap();
            } else {
                provider.set_targets(&moved.owner, &moved.targets()).await.unwrap();
            }
        }
        let members = cloud.all("pools")[0]["members"].clone();
        assert_eq!(members.as_array().unwrap().len(), 1, "{members}");
        assert_eq!(members[0]["address"], json!(moved.nodes().targets[0].addresses[0]));
        // More members than the quota allows are refused.
        for _ in 0..2 {
            cloud.fail("PUT members", 403, "Quota has been met for resources: Member");
        }
        let error = settle(&provider, &planned(&[WEB], &[2, 3])).await.unwrap_err();
        assert_eq!(error.reason(), "QuotaExceeded");
    }
}

/// One request when all changes are made, and none where nothing changes.
#[tokio::test(start_paused = true)]
async fn complete_changes_cost_one_question() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    settle(&provider, &planned(&[WEB], &[1, 2])).await.unwrap();
    cloud.calls();
    settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
    let calls = cloud.calls();
    assert_eq!(calls, ["PUT members", "GET loadbalancers", "GET status", "GET floatingips"]);
    settle(&provider, &planned(&[WEB], &[1])).await.unwrap();
    assert!(cloud.calls().is_empty());
    // A new port is several changes.
    settle(&provider, &planned(&[WEB, (Protocol::Tcp, 81, 30081)], &[1])).await.unwrap();
    let calls = cloud.calls();
    assert_eq!(calls.iter().filter(|call| *call == "GET status").count(), 1, "{calls:?}");
    assert!(calls.iter().filter(|call| !call.starts_with("GET")).count() > 1, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn subnet_of_present_members_that_does_not_exist_is_refused() {
    let cloud = Scripted::new();
    settle(&cloud.provider(), &planned(&[WEB], &[1])).await.unwrap();
    let provider = cloud.provider_with(|config| "nowhere".clone_into(&mut config.member_subnet));
    cloud.writes();
    let lb = planned(&[WEB], &[1]);
    let error = settle(&provider, &lb).await.unwrap_err();
    assert!(error.to_string().contains("--openstack-member-subnet-id"), "{error}");
    assert!(cloud.writes().is_empty());
    // Targets follow in the subnet that they have.
    let moved = planned(&[WEB], &[1, 2]);
    while provider.set_targets(&lb.owner, &moved.targets()).await.unwrap().progress != Progress::Done {}
    assert_eq!(members(&cloud).len(), 2);
}

/// Its driver may make the parts of a creation one by one, after the load balancer is `ACTIVE`.
#[tokio::test(start_paused = true)]
async fn part_of_a_creation_that_ovn_fails_is_made_again() {
    let cloud = Scripted::new();
    let provider = cloud.provider_with(|config| "ovn".clone_into(&mut config.provider));
    let lb = planned(&[WEB], &[1]);
    provider.apply(&lb, Compare::Remembered).await.unwrap();
    let id = cloud.all("listeners")[0]["id"].as_str().unwrap().to_owned();
    cloud.set("listeners", ("id", &id), &json!({ "provisioning_status": "ERROR" }));
    settle(&provider, &lb).await.unwrap();
    assert_eq!(cloud.all("listeners")[0]["provisioning_status"], "ACTIVE");
}

/// The sequence of writes of a change from policy Local to Cluster, and what is made of it where a quota is used up.
#[tokio::test(start_paused = true)]
async fn checks_move_by_another_pool_or_without_quota_in_the_present_one() {
    let local = planned(&[WEB], &[1, 2]);
    let mut cluster = local.clone();
    cluster.groups[0].health_check.port = Some(10256);
    let by_pool = ["POST pools", "POST healthmonitors", "PUT members", "PUT listeners", "DELETE pools"];
    let in_place = ["PUT pools", "PUT members", "PUT members", "PUT members", "PUT members"];
    for (full, tried, rest) in [
        (None, 0, &by_pool[..]),
        (Some("POST pools"), 1, &in_place),
        (Some("POST healthmonitors"), 2, &in_place),
        (Some("PUT members"), 4, &in_place),
    ] {
        let cloud = Scripted::new();
        settle(&cloud.provider(), &local).await.unwrap();
        let old = cloud.all("pools")[0]["id"].clone();
        cloud.writes();
        let provider = cloud.provider();
        // The quota of members refuses twice: at first a smaller set might do.
        for _ in 0..full.map_or(0, |action| if action == "PUT members" { 2 } else { 1 }) {
            cloud.fail(full.unwrap(), 403, "Quota has been met for resources: pool.");
        }
        settle(&provider, &cluster).await.unwrap();
        let writes = cloud.writes();
        let rest: Vec<_> = if tried > 1 { [rest, &["DELETE pools"]].concat() } else { rest.to_vec() };
        assert_eq!(writes[tried..], rest, "{full:?}: {writes:?}");
        let pools = cloud.all("pools");
        assert_eq!(pools.len(), 1, "{full:?}");
        assert_eq!(pools[0]["id"] == old, full.is_some());
        assert_eq!(cloud.all("listeners")[0]["default_pool_id"], pools[0]["id"]);
        assert!(pools[0]["members"].as_array().unwrap().iter().all(|member| member["monitor_port"] == 10256));
        // The next controller has nothing to do.
        settle(&cloud.provider(), &cluster).await.unwrap();
        assert!(cloud.writes().is_empty());
    }
}

/// A Service that is refused in the middle of the change: each of the two pools, which have one name, keeps its port.
#[tokio::test(start_paused = true)]
async fn targets_follow_in_both_pools_while_checks_move() {
    let cloud = Scripted::new();
    let local = planned(&[WEB], &[1, 2]);
    let mut cluster = local.clone();
    cluster.groups[0].health_check.port = Some(10256);
    let provider = cloud.provider();
    settle(&provider, &local).await.unwrap();
    while cloud.all("pools").last().unwrap()["members"]
        .as_array()
        .is_none_or(|of| of[0]["monitor_port"] != 10256)
    {
        provider.apply(&cluster, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(cloud.all("pools").len(), 2);
    let moved = planned(&[WEB], &[2, 3]);
    for provider in [provider, cloud.provider()] {
        while provider.set_targets(&moved.owner, &moved.targets()).await.unwrap().progress != Progress::Done {
        }
    }
    let checked = cloud.all("pools").into_iter().map(|pool| {
        let members = pool["members"].as_array().unwrap().iter();
        members.map(|member| format!("{} {}", member["name"], member["monitor_port"])).collect::<Vec<_>>()
    });
    let expected = ["32000", "10256"].map(|port| ["2", "3"].map(|node| format!("\"node-{node}\" {port}")));
    assert_eq!(checked.collect::<Vec<_>>(), expected);
}
