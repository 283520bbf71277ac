// SPDX-License-Identifier: Apache-2.0
//! What an earlier process freed is not known at the start.

use steerage_provider_cloud::AfterFailure;

use super::*;
use crate::provider::INVENTORY_AGE;

#[tokio::test(start_paused = true)]
async fn only_published_services_go_first_at_the_start() {
    let wanted = desired(&web(), &config()).unwrap();
    for (is_published, expected) in [(true, 1), (false, 0)] {
        let mut quota = RuleQuota::default();
        quota.look(&key("good"), is_published, &wanted, &Tree::default());
        assert_eq!(held(&mut quota, "evil", &["x"]), expected);
        quota.note_list(Instant::now(), || BTreeSet::from([key("unseen")]));
        assert_eq!(held(&mut quota, "evil", &["x"]), 1);
        advance(START).await;
        assert_eq!(held(&mut quota, "evil", &["x"]), 0);
    }
}

/// The first looks at thousands of Services take minutes, and the one that lost its rules may be the last.
#[tokio::test(start_paused = true)]
async fn start_lasts_while_services_get_their_first_look() {
    let wanted = desired(&web(), &config()).unwrap();
    let is_held = |quota: &mut RuleQuota| {
        quota.note_list(Instant::now(), || BTreeSet::from([key("unseen")]));
        held(quota, "evil", &["x"]) == 1
    };
    let mut quota = RuleQuota::default();
    for number in 0..20 {
        quota.look(&key(&format!("other-{number}")), true, &wanted, &unruled_tree());
        quota.forget(&key(&format!("other-{number}")));
        advance(START * 9 / 10).await;
        assert!(is_held(&mut quota), "{number}");
    }
    quota.look(&key("good"), true, &wanted, &unruled_tree());
    advance(Duration::from_secs(10)).await;
    assert_eq!(held(&mut quota, "evil", &["x"]), 1, "good has its claim");
    quota.forget(&key("good"));
    // Nobody waits for a Service that gets no look, whatever else is new.
    advance(START / 2).await;
    quota.look(&key("new"), false, &wanted, &Tree::default());
    advance(START / 2).await;
    assert!(!is_held(&mut quota));

    let mut quota = RuleQuota::default();
    for number in 0..100 {
        quota.look(&key(&format!("other-{number}")), false, &wanted, &unruled_tree());
        advance(Duration::from_secs(10)).await;
    }
    assert!(!is_held(&mut quota), "no start is so long");

    let mut quota = RuleQuota::default();
    quota.look(&key("other"), false, &wanted, &unruled_tree());
    assert!(is_held(&mut quota));
    quota.note_invalid(&key("unseen"));
    assert!(!is_held(&mut quota), "it is refused, and makes no rules");
}

/// What a deletion leaves for a moment looks like a Service that lost its rules.
#[tokio::test(start_paused = true)]
async fn nobody_waits_for_a_service_that_is_deleted() {
    let cloud = Full::new();
    let earlier = cloud.provider();
    settle(&earlier, &good(&[(Protocol::Tcp, 80)])).await;
    let rule = cloud.cloud.resources().into_iter().find(|(_, found)| found.kind == Kind::ForwardingRule);
    assert!(cloud.cloud.change(&rule.unwrap().0, |_| None));
    let gce = cloud.provider();
    assert_eq!(gce.owned().await.unwrap(), [good(&[]).owner]);
    let mut waits = false;
    for _ in 0..50 {
        let outcome = gce.apply(&evil(), Compare::Remembered).await.unwrap();
        waits = outcome.incomplete.is_some_and(|(reason, _)| reason == "QuotaExceeded");
        sleep(Duration::from_millis(200)).await;
    }
    assert!(waits, "the rule may be about to be replaced");
    let owner = good(&[]).owner;
    let began = tokio::time::Instant::now();
    while !matches!(gce.delete(&owner).await.unwrap(), Progress::Done) {
        drop(gce.apply(&evil(), Compare::Remembered).await.unwrap());
        sleep(Duration::from_millis(200)).await;
    }
    settle(&gce, &evil()).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// A start does not know which of the missing rules an earlier process deleted.
#[tokio::test(start_paused = true)]
async fn rule_that_never_existed_is_no_lost_one() {
    let cloud = Full::new();
    let changed = full(&cloud, &cloud.provider()).await;
    let lb = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 80), (Protocol::Udp, 53)]), ..changed };
    let gce = cloud.provider();
    let began = Instant::now();
    let error = loop {
        match gce.apply(&lb, Compare::Remembered).await {
            Ok(outcome) => {
                let (_, message) = outcome.incomplete.unwrap_or_default();
                assert!(!message.contains("deleted"), "{message}");
            }
            Err(error) => break error,
        }
        assert!(began.elapsed() < CLAIM * 2, "it is tried as if it were lost");
        sleep(Duration::from_secs(1)).await;
    };
    assert_eq!(error.reason(), "QuotaExceeded");
}

/// `good` lost its rule in an earlier process, and is not looked at yet.
async fn lost_before_the_start() -> Full {
    let cloud = Full::new();
    full(&cloud, &cloud.provider()).await;
    let rule = cloud.cloud.resources().into_iter().find(|(_, found)| found.kind == Kind::ForwardingRule);
    assert!(cloud.cloud.change(&rule.unwrap().0, |_| None));
    cloud
}

#[tokio::test(start_paused = true)]
async fn start_protects_while_the_inventory_is_read_again() {
    for fails in [false, true] {
        let cloud = lost_before_the_start().await;
        let gce = cloud.provider();
        assert_eq!(gce.owned().await.unwrap().len(), 2);
        sleep(INVENTORY_AGE * 2 / 3).await;
        for _ in 0..20 {
            drop(gce.apply(&evil(), Compare::Remembered).await.unwrap());
            sleep(Duration::from_millis(200)).await;
        }
        sleep(INVENTORY_AGE / 3).await;
        let read = async {
            if !fails {
                std::future::pending::<()>().await;
            }
            Err(steerage_provider_api::Error::Unavailable("GCE does not answer".to_owned()))
        };
        let mut read = Box::pin(gce.inventory.get(AfterFailure::Retry, read));
        assert_eq!(futures::poll!(&mut read).is_ready(), fails);
        assert!(gce.inventory.last().is_none());
        for _ in 0..20 {
            drop(gce.apply(&evil(), Compare::Remembered).await.unwrap());
            sleep(Duration::from_millis(200)).await;
        }
        assert!(cloud.rules().is_empty(), "{:?}", cloud.rules());
    }
}

#[tokio::test(start_paused = true)]
async fn start_leaves_nothing_behind() {
    let wanted = desired(&web(), &config()).unwrap();
    let mut quota = RuleQuota::default();
    quota.note_invalid(&key("invalid"));
    quota.look(&key("good"), false, &wanted, &Tree::default());
    assert!(!quota.looked_at.is_empty() && !quota.without_rules.is_empty());
    advance(START).await;
    quota.look(&key("other"), true, &wanted, &Tree::default());
    quota.note_invalid(&key("invalid"));
    assert!(quota.looked_at.is_empty() && quota.without_rules.is_empty() && quota.claims.is_empty());
}
