// SPDX-License-Identifier: Apache-2.0
//! Calls the provider as the controller does: again when it asks for it, and after errors with a backoff.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::{
    Compare, Error, LoadBalancer, Outcome, Owner, Progress, Provider as _, SharedSet, TargetSet,
};

use crate::Aws;
use crate::desired::tests::{config, planned};
use crate::standin::harness::{start_instances, target};
use crate::standin::{Delays, Quotas, StandIn};
use steerage_model::Protocol;

/// Calls before a test gives up: far more than the minutes of a new load balancer need.
const ROUNDS: u32 = 500;
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

pub(super) fn standin(seed: u64) -> Arc<StandIn> {
    standin_with(seed, Quotas::default())
}

pub(super) fn standin_with(seed: u64, quotas: Quotas) -> Arc<StandIn> {
    let cloud = Arc::new(StandIn { quotas, ..StandIn::new(Delays::real(), seed) });
    start_instances(&cloud, 6);
    cloud
}

pub(super) fn provider(cloud: &Arc<StandIn>) -> Aws {
    Aws::over(config(), Arc::clone(cloud) as _)
}

/// The names of the changes since the last time.
pub(super) fn changes(cloud: &StandIn) -> Vec<&'static str> {
    let calls = cloud.take_calls();
    calls.iter().filter(|call| call.kind.is_write()).map(|call| call.name).collect()
}

/// A Service `web` with these TCP ports, and the instances with these numbers as targets.
pub(super) fn wanted(ports: &[(u16, u16)], targets: &[usize]) -> LoadBalancer {
    let ports: Vec<_> = ports.iter().map(|(port, node)| (Protocol::Tcp, *port, *node)).collect();
    planned(&ports).with_nodes(set(targets))
}

/// As under the policy Cluster: all eligible nodes.
pub(super) fn set(targets: &[usize]) -> TargetSet {
    TargetSet { shared: Some(SharedSet::Eligible), ..own_set(targets) }
}

/// As under the policy Local and `api` steering: the nodes with an endpoint.
pub(super) fn own_set(targets: &[usize]) -> TargetSet {
    TargetSet::own(targets.iter().map(|index| target(*index)).collect::<Vec<_>>())
}

/// Waits before the next call; `None` if the error is final.
fn wait(error: &Error, failures: &mut u32) -> Option<Duration> {
    *failures += 1;
    match error {
        Error::Invalid { .. } => None,
        _ => Some(BACKOFF.0.saturating_mul(1 << (*failures).min(10)).min(BACKOFF.1)),
    }
}

/// Calls `apply` until it is done.
pub(super) async fn apply(aws: &Aws, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
    let mut failures = 0;
    for _ in 0..ROUNDS {
        let pause = match aws.apply(lb, compare).await {
            Ok(outcome) => match outcome.progress {
                Progress::Done => return Ok(outcome),
                Progress::Again(after) => after,
            },
            Err(error) => match wait(&error, &mut failures) {
                Some(pause) => pause,
                None => return Err(error),
            },
        };
        tokio::time::sleep(pause).await;
    }
    Err(Error::Unavailable(format!("not done after {ROUNDS} rounds")))
}

/// Calls `apply` until nothing but minutes are missing.
pub(super) async fn apply_now(aws: &Aws, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
    const MOMENT: Duration = Duration::from_secs(5);
    for _ in 0..ROUNDS {
        match aws.apply(lb, compare).await {
            Ok(Outcome { progress: Progress::Again(after), .. }) if after < MOMENT => {
                tokio::time::sleep(after).await;
            }
            Err(Error::Conflict(_) | Error::Throttled { .. }) => tokio::time::sleep(MOMENT).await,
            answer => return answer,
        }
    }
    Err(Error::Unavailable(format!("not there after {ROUNDS} rounds")))
}

/// Until AWS shows everything that was changed.
pub(super) async fn pause() {
    tokio::time::sleep(Duration::from_mins(1)).await;
}

/// Calls `delete` until it is done.
pub(super) async fn delete(aws: &Aws, owner: &Owner) -> Result<(), Error> {
    let mut failures = 0;
    for _ in 0..ROUNDS {
        let pause = match aws.delete(owner).await {
            Ok(Progress::Done) => return Ok(()),
            Ok(Progress::Again(after)) => after,
            Err(error) => match wait(&error, &mut failures) {
                Some(pause) => pause,
                None => return Err(error),
            },
        };
        tokio::time::sleep(pause).await;
    }
    Err(Error::Unavailable(format!("not deleted after {ROUNDS} rounds")))
}
