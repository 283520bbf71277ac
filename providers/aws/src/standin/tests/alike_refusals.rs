// SPDX-License-Identifier: Apache-2.0
//! Many listeners that AWS refuses for the same cause, each of which costs a call of a budget that all Services share.

use steerage_provider_api::{Compare, LoadBalancer, Provider as _};

use super::driver::{apply, apply_now, changes, provider, standin, standin_with, wanted};
use super::refused_listeners::{GOOD, MISSING, refusal, served, with_tls};
use crate::reasons;
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Quotas, StandIn};

/// A Service with twenty ports.
fn many() -> LoadBalancer {
    let ports: Vec<_> = (0..20).map(|i| (443 + i, 30_443 + i)).collect();
    wanted(&ports, &[0])
}

fn count(cloud: &StandIn, name: &str) -> usize {
    changes(cloud).iter().filter(|call| **call == name).count()
}

/// A listener does not wait for it, nor do the certificates that AWS knows.
#[tokio::test(start_paused = true)]
async fn unknown_further_certificate_is_tried_twice() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let known = ["arn:aws:acm:::b".to_owned(), "arn:aws:acm:::z".to_owned()];
    let all = with_tls(many(), "*", &format!("{GOOD},{},{MISSING},{}", known[0], known[1]));
    let outcome = apply(&provider(&cloud), &all, Compare::Remembered).await.unwrap();
    assert!(refusal(&outcome).1.contains("443, 444, 445"), "{outcome:?}");
    assert_eq!(count(&cloud, "AddListenerCertificates"), 20 * known.len() + 2);
    for listener in cloud.cloud().listeners.into_values() {
        assert_eq!(listener.tls.unwrap().others, known.clone().into());
    }
}

#[tokio::test(start_paused = true)]
async fn ports_beyond_a_quota_are_tried_twice() {
    let cloud = standin_with(1, Quotas { listeners: 3, ..Quotas::default() });
    let aws = provider(&cloud);
    apply_now(&aws, &many(), Compare::Remembered).await.unwrap();
    assert_eq!((count(&cloud, "CreateListener"), served(&cloud).len()), (5, 3));
    let outcome = apply(&aws, &many(), Compare::Remembered).await.unwrap();
    let (reason, message) = refusal(&outcome);
    assert!(reason == reasons::QUOTA_EXCEEDED && message.contains("461, 462."), "{message}");
}

/// What AWS refused before stays known until the change is made.
#[tokio::test(start_paused = true)]
async fn throttled_change_does_not_repeat_what_aws_refused() {
    let refused: Vec<_> = (444..463).map(|port: u16| port.to_string()).collect();
    for number in 0.. {
        let cloud = standin(number as u64);
        cloud.set_faults(Faults::Nth(number, Fault::Code("Throttling")));
        let all = with_tls(many(), &refused.join(","), MISSING);
        let outcome = apply(&provider(&cloud), &all, Compare::Remembered).await.unwrap();
        assert_eq!(refusal(&outcome).0, reasons::REJECTED_BY_PROVIDER);
        let is_over = cloud.has_faults();
        // The accepted one, two that are refused, and one that is throttled.
        let tried = count(&cloud, "CreateListener");
        assert!(tried <= 4, "{tried} tries if call {number} is throttled");
        if is_over {
            break;
        }
    }
}

/// IAM's answer names the resource, so no two are equal.
#[tokio::test(start_paused = true)]
async fn missing_permission_is_tried_twice() {
    for call in ["CreateListener", "CreateTargetGroup"] {
        let cloud = standin(1);
        cloud.set_faults(Faults::Each(call, "", Fault::Code("AccessDenied")));
        apply_now(&provider(&cloud), &many(), Compare::Remembered).await.unwrap_err();
        assert_eq!(count(&cloud, call), 2);
    }
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    apply(&aws, &many(), Compare::Remembered).await.unwrap();
    let mut tagged = many();
    tagged.annotations.insert(crate::annotations::TAGS.to_owned(), "a=1".to_owned());
    apply(&aws, &tagged, Compare::Remembered).await.unwrap();
    // Somebody takes them away.
    cloud.change(|cloud| {
        for listener in cloud.listeners.values_mut() {
            listener.tags.remove("a");
        }
    });
    tokio::time::sleep(std::time::Duration::from_mins(1)).await;
    // A new process reads them at its second comparison.
    let aws = provider(&cloud);
    aws.apply(&tagged, Compare::InPlace).await.unwrap();
    count(&cloud, "");
    cloud.set_faults(Faults::Each("AddTags", "", Fault::Code("AccessDenied")));
    let outcome = apply_now(&aws, &tagged, Compare::InPlace).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "ProviderDenied");
    assert_eq!(count(&cloud, "AddTags"), 2);
}
