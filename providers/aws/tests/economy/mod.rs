// SPDX-License-Identifier: Apache-2.0
//! The number of calls, counted by the proxy in front of moto. `docs/providers/aws-api-calls.md` has the same numbers.

use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{Compare, LoadBalancer, Owner, Progress, Provider as _};
use steerage_provider_aws::Aws;
use steerage_provider_conformance::{Harness as _, fixture};
use steerage_requirements::requires;

use crate::listener;
use crate::moto::Moto;

/// The stand-in counts for a hundred, in paused time.
const SERVICES: usize = 20;

/// Calls `apply` when the provider asks for it, as the controller does.
async fn apply(aws: &Aws, lb: &LoadBalancer) {
    while let Progress::Again(after) = aws.apply(lb, Compare::Remembered).await.unwrap().progress {
        tokio::time::sleep(after).await;
    }
}

async fn delete(aws: &Aws, owner: &Owner) {
    while let Progress::Again(after) = aws.delete(owner).await.unwrap() {
        tokio::time::sleep(after).await;
    }
}

/// The names of the calls since the last time.
fn take(moto: &Moto) -> Vec<String> {
    let names = moto.proxy().calls().into_iter().map(|call| call.name).collect();
    moto.proxy().reset();
    names
}

fn wanted(moto: &Moto, name: &str, ports: u16, targets: &[usize]) -> LoadBalancer {
    let listeners = (0..ports).map(|i| listener(Protocol::Tcp, 80 + i, 30080 + i)).collect();
    let lb = fixture::with_listeners(fixture::first(moto, &fixture::owner(name, 1)), listeners);
    fixture::with_targets(moto, &lb, targets)
}

/// Operation, number of calls with one port and with two, and the bounds.
type Row = (&'static str, [usize; 2], [usize; 2]);

#[tokio::test]
async fn calls_of_one_service_are_within_bounds() {
    requires!(Moto);
    let moto = Moto::start(6).await.unwrap();
    let aws = moto.fresh().await.unwrap();
    // The list of the start is not of one Service.
    aws.owned().await.unwrap();
    let mut rows: [Row; 6] = [
        ("create", [0; 2], [10, 14]),
        ("nothing changed", [0; 2], [0, 0]),
        ("node out", [0; 2], [1, 2]),
        ("node back", [0; 2], [1, 2]),
        ("compare", [0; 2], [3, 3]),
        ("delete", [0; 2], [5, 6]),
    ];
    for (column, ports) in [1, 2].into_iter().enumerate() {
        let of = |targets: &[usize]| wanted(&moto, &format!("web-{ports}"), ports, targets);
        take(&moto);
        for (row, targets) in [&[0, 1, 2][..], &[0, 1, 2], &[0, 1], &[0, 1, 2]].into_iter().enumerate() {
            apply(&aws, &of(targets)).await;
            let calls = take(&moto);
            eprintln!("{}, {ports} ports: {calls:?}", rows[row].0);
            rows[row].1[column] = calls.len();
            // As the controller does once a minute; health is counted apart.
            aws.target_health(&of(&[]).owner).await.unwrap();
            take(&moto);
        }
        aws.apply(&of(&[0, 1, 2]), Compare::InPlace).await.unwrap();
        rows[4].1[column] = take(&moto).len();
        delete(&aws, &of(&[]).owner).await;
        rows[5].1[column] = take(&moto).len();
    }
    for (what, counted, bounds) in rows {
        eprintln!("{what}: {counted:?}, bounds {bounds:?}");
        assert!(counted[0] <= bounds[0] && counted[1] <= bounds[1], "{what}: {counted:?}, not {bounds:?}");
    }
}

#[tokio::test]
async fn calls_of_many_services_are_within_bounds() {
    requires!(Moto);
    let moto = Moto::start(6).await.unwrap();
    let aws = moto.fresh().await.unwrap();
    let of = |index: usize, targets: &[usize]| wanted(&moto, &format!("web-{index}"), 1, targets);
    // moto needs two looks until a load balancer is active.
    for _ in 0..3 {
        for index in 0..SERVICES {
            aws.apply(&of(index, &[0, 1, 2]), Compare::Remembered).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    for index in 0..SERVICES {
        aws.target_health(&of(index, &[]).owner).await.unwrap();
    }
    take(&moto);
    for index in 0..SERVICES {
        apply(&aws, &of(index, &[0, 1, 3])).await;
    }
    let replaced = take(&moto);
    eprintln!("one node of {SERVICES} Services replaced: {}", replaced.len());
    assert_eq!(replaced.iter().filter(|name| *name == "RegisterTargets").count(), SERVICES);
    assert!(replaced.len() <= 2 * SERVICES, "{}", replaced.len());

    let restarted = moto.fresh().await.unwrap();
    assert_eq!(restarted.owned().await.unwrap().len(), SERVICES);
    for index in 0..SERVICES {
        let lb = of(index, &[0, 1, 3]);
        let outcome = restarted.apply(&lb, Compare::InPlace).await.unwrap();
        assert_eq!((outcome.progress, outcome.ingress.len()), (Progress::Done, 1));
        restarted.target_health(&lb.owner).await.unwrap();
    }
    assert!(moto.proxy().writes().is_empty());
    let calls = take(&moto);
    eprintln!("restart with {SERVICES} Services: {}", calls.len());
    // Three lists, the tags of two resources for each Service, 20 with each call, and the targets of each group.
    assert_eq!(calls.len(), 3 + (2 * SERVICES).div_ceil(20) + SERVICES);
}
