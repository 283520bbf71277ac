// SPDX-License-Identifier: Apache-2.0
//! The network between a replica and the API server or the cloud: a call takes time, and may be refused, lost, have its effect
//! without an answer, or twice: a proxy sends a request again of which it has seen no answer.

use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::{Duration, Instant, sleep, sleep_until};

use super::world::{ProcessId, SharedWorld};

/// An effect comes at most this long after its caller gave up: between the deadline of the Lease and its takeover lie five seconds.
/// What a cloud does later than that, no client can prevent.
const LATEST_EFFECT: Duration = Duration::from_millis(4500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Api,
    Cloud,
}

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// The remote side refused it: too many calls.
    Refused,
    /// The connection broke. It may have had its effect.
    Broken,
}

/// Since when the caller no longer waits.
#[derive(Clone, Default)]
struct GivenUp(Arc<Mutex<Option<Instant>>>);

impl GivenUp {
    fn is_long_ago(&self) -> bool {
        let at = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        at.is_some_and(|at| at.elapsed() > LATEST_EFFECT)
    }

    fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Marks the call as given up when the caller drops it.
struct Waiting(GivenUp);

impl Drop for Waiting {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

struct Fate {
    request: Duration,
    answer: Duration,
    failed: Option<(Failed, bool)>,
    /// When the same request arrives again, if it does.
    repeated: Option<Duration>,
}

/// Makes a call: `effect` happens at the remote side at one moment, or at two, also if the caller drops this future shortly before.
pub(super) async fn call<T: Send + 'static>(
    world: &SharedWorld,
    process: ProcessId,
    link: Link,
    effect: impl Fn(&SharedWorld) -> T + Send + 'static,
) -> Result<T, Failed> {
    let given_up = GivenUp::default();
    let waiting = Waiting(given_up.clone());
    let world = world.clone();
    let task = tokio::spawn(async move {
        let Fate { request, answer, failed, repeated } = fate(&world, link);
        sleep(request).await;
        // A request that is under way arrives also when its caller is dead.
        is_reachable(&world, process, link).await;
        if given_up.is_long_ago() {
            return pending().await;
        }
        if let Some((failed, false)) = failed {
            return Err(failed);
        }
        if given_up.is_set() {
            world.lock().record("late effect", "");
        }
        let mut value = effect(&world);
        if let Some(after) = repeated {
            sleep(after).await;
            if given_up.is_long_ago() {
                return pending().await;
            }
            world.lock().record("request repeated", "");
            // The caller gets the second answer.
            value = effect(&world);
        }
        {
            let mut world = world.lock();
            let chance = world.faults.crash;
            if link == Link::Cloud && world.chance(chance) && world.processes[process].is_alive {
                world.record("crash after a call", "");
                world.processes[process].is_alive = false;
                world.crashing.push(process);
                world.wake.notify_one();
            }
        }
        sleep(answer).await;
        if !is_reachable(&world, process, link).await {
            return pending().await;
        }
        match failed {
            Some((failed, true)) => Err(failed),
            _ => Ok(value),
        }
    });
    let result = match task.await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    drop(waiting);
    result
}

fn fate(world: &SharedWorld, link: Link) -> Fate {
    let mut world = world.lock();
    let faults = world.faults;
    let (mut request, mut answer) = (world.millis(1..30), world.millis(1..30));
    if world.chance(faults.slow) {
        world.record("call slow", "");
        let late = world.millis(500..30_000);
        if world.rng.bool() { request += late } else { answer += late }
    }
    let failed = if world.chance(faults.refuse) {
        world.record("call refused", if link == Link::Api { "API" } else { "cloud" });
        Some((Failed::Refused, false))
    } else if world.chance(faults.lose_request) {
        world.record("request lost", "");
        Some((Failed::Broken, false))
    } else if world.chance(faults.lose_answer) {
        world.record("answer lost", "");
        Some((Failed::Broken, true))
    } else {
        None
    };
    let is_repeated = world.chance(faults.repeat);
    let repeated = is_repeated.then(|| world.millis(1..2000));
    Fate { request, answer, failed, repeated }
}

/// Waits while the process is parted from the remote side. Returns whether it is alive.
pub(super) async fn is_reachable(world: &SharedWorld, process: ProcessId, link: Link) -> bool {
    loop {
        let until = {
            let world = world.lock();
            let state = &world.processes[process];
            if !state.is_alive {
                return false;
            }
            if link == Link::Api { state.api_cut } else { state.cloud_cut }
        };
        if until <= Instant::now() {
            return true;
        }
        sleep_until(until).await;
    }
}
