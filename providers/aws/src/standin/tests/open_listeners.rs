// SPDX-License-Identifier: Apache-2.0
//! A new Service of which AWS fails with some listeners, or does not answer. The others are served meanwhile.

use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::{Compare, Error, Owner, Provider as _};

use super::driver::{apply, changes, provider, standin, wanted};
use super::refused_listeners::served;
use crate::standin::faults::{Fault, Faults};

/// Three that fail are enough for one try. The next one begins with those that were not tried.
#[tokio::test(start_paused = true)]
async fn listeners_that_fail_keep_no_other_from_being_tried() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Each("CreateListener", "1", Fault::Code("ServiceUnavailable")));
    let ports = [81, 91, 101, 111, 120, 130];
    let lb = wanted(&ports.map(|port| (port, 30_000 + port)), &[0]);
    let mut tried = 0;
    while tried == 0 {
        let _ = aws.apply(&lb, Compare::Remembered).await;
        tried = changes(&cloud).iter().filter(|name| **name == "CreateListener").count();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(tried, 3);
    let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(!outcome.ingress.is_empty());
    let (reason, message) = outcome.incomplete.unwrap();
    assert_eq!(reason, Error::UNAVAILABLE);
    assert!(message.contains("Not served: ports 81, 91, 101, 111."), "{message}");
    assert_eq!(served(&cloud).into_keys().collect::<Vec<_>>(), [120, 130]);
}

/// It stays published while its listener waits for its turn among changes that hang.
#[tokio::test(start_paused = true)]
async fn listener_that_hangs_waits_at_the_gate_beside_a_published_one() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Each("CreateListener", " 81", Fault::Hang));
    let lb = wanted(&[(80, 30_080), (81, 30_081)], &[0]);
    while !aws.apply(&lb, Compare::Remembered).await.is_ok_and(|outcome| outcome.incomplete.is_some()) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let owner = |number: usize| Owner {
        service: Key::new("shop", format!("other-{number}")),
        uid: number.to_string(),
    };
    let begun: Vec<_> = (0..20).filter_map(|number| aws.changes.enter(&owner(number), false).ok()).collect();
    assert_eq!(begun.len(), 4, "a listener hung");
    let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(!outcome.ingress.is_empty());
    changes(&cloud);
    tokio::time::sleep(outcome.retry_refused.unwrap()).await;
    let waiting = aws.apply(&lb, Compare::Remembered).await.unwrap();
    assert_eq!((waiting.ingress, changes(&cloud)), (outcome.ingress, Vec::new()));
    drop(begun);
    cloud.set_faults(Faults::None);
    tokio::time::sleep(Duration::from_mins(6)).await;
    assert_eq!(apply(&aws, &lb, Compare::Remembered).await.unwrap().incomplete, None);
    assert_eq!(served(&cloud).len(), 2);
}
