// SPDX-License-Identifier: Apache-2.0
//! The task that asks one node for its statements, again and again, each time on a new connection. The node holds a request until
//! something changes. It reports every result to `Prober`, and decides nothing about health.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_model::MAX_STATEMENT_WAIT;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;

use super::node_statement::StatementResult;
use super::statement_request::{Turn, ask, unless_another_port_answers};
use super::statement_schedule::StatementSchedule;
use super::{MIN_INTERVAL, spread};

/// Bounds of the time beyond `wait`. A tenant chooses the timeouts of its checks, and the requests serve all.
const MIN_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_TIMEOUT: Duration = Duration::from_secs(10);
/// Probes wait for the first answer: a node whose packets to this port are dropped must not delay them for long.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a request that this host could not make.
const LOCAL_FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// The first requests to all nodes begin within this time, or one part of it for each node if that is longer: all nodes answer them with
/// complete statements.
const FIRST_SPREAD: Duration = Duration::from_millis(250);
const FIRST_SPREAD_OF_EACH: Duration = Duration::from_micros(500);

/// The time within which the first requests of so many tasks begin that are spawned together.
pub(super) fn first_spread(tasks: usize) -> Duration {
    FIRST_SPREAD.max(FIRST_SPREAD_OF_EACH.saturating_mul(u32::try_from(tasks).unwrap_or(u32::MAX)))
}

/// How a node is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestSettings {
    pub(super) source: Option<IpAddr>,
    /// How long the node may hold a request.
    interval: Duration,
    /// The time for an answer beyond that.
    timeout: Duration,
    /// A health-check port of the node, which tells a silent node from a port to which packets are dropped.
    other_port: u16,
}

impl RequestSettings {
    /// `interval` and `timeout` are the smallest of the node's checks.
    pub(super) fn new(
        source: Option<IpAddr>,
        interval: Duration,
        timeout: Duration,
        other_port: u16,
    ) -> Self {
        let interval = interval.clamp(MIN_INTERVAL, Duration::from_millis(MAX_STATEMENT_WAIT));
        Self { source, interval, timeout: timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT), other_port }
    }
}

/// A request of the task with this number has ended.
#[derive(Debug)]
pub(crate) struct StatementReport {
    pub(super) address: IpAddr,
    pub(super) task: u64,
    pub(super) result: StatementResult,
    /// When the request began.
    pub(super) begun: Instant,
}

#[derive(Debug)]
pub(super) struct StatementTask {
    pub(super) number: u64,
    handle: JoinHandle<()>,
    settings: watch::Sender<RequestSettings>,
}

impl Drop for StatementTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl StatementTask {
    pub(super) fn spawn(
        number: u64,
        to: SocketAddr,
        settings: RequestSettings,
        reports: mpsc::Sender<StatementReport>,
        turns: Arc<Semaphore>,
        first_spread: Duration,
    ) -> Self {
        let (sender, receiver) = watch::channel(settings);
        let handle = tokio::spawn(async move {
            tokio::time::sleep(first_spread.mul_f64(spread(to))).await;
            run(number, to, receiver, reports, turns).await;
        });
        Self { number, handle, settings: sender }
    }

    /// From the next request on.
    pub(super) fn set(&self, settings: RequestSettings) {
        self.settings.send_if_modified(|current| std::mem::replace(current, settings) != settings);
    }
}

async fn run(
    number: u64,
    to: SocketAddr,
    settings: watch::Receiver<RequestSettings>,
    reports: mpsc::Sender<StatementReport>,
    turns: Arc<Semaphore>,
) {
    let mut schedule = StatementSchedule::default();
    let mut timeout_limit = FIRST_TIMEOUT;
    loop {
        let RequestSettings { source, interval, timeout, other_port } = *settings.borrow();
        let wait = schedule.wait(interval);
        let timeout = timeout.min(timeout_limit);
        timeout_limit = MAX_TIMEOUT;
        let begun = Instant::now();
        let other = SocketAddr::new(to.ip(), other_port);
        let mut turn = Turn::new(&turns);
        let request = ask(to, source, schedule.after(), wait, timeout, &mut turn);
        let Some(result) = unless_another_port_answers(request, other, source, wait, timeout).await else {
            tokio::time::sleep(LOCAL_FAILURE_PAUSE).await;
            continue;
        };
        let due = schedule.record(&result, interval, begun, Instant::now());
        let report = StatementReport { address: to.ip(), task: number, result, begun };
        // The next request waits until the engine takes this result.
        if reports.send(report).await.is_err() {
            return;
        }
        drop(turn);
        tokio::time::sleep_until(due.into()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_requests_to_many_nodes_take_longer() {
        assert_eq!([0, 500, 10_000].map(|tasks| first_spread(tasks).as_millis()), [250, 250, 5000]);
    }

    #[test]
    fn settings_are_bounded_whatever_the_checks_say() {
        let milliseconds = Duration::from_millis;
        for (interval, timeout, expected) in
            [(0, 0, (100, 500)), (1000, 800, (1000, 800)), (3_600_000, 3_600_000, (10_000, 10_000))]
        {
            let settings = RequestSettings::new(None, milliseconds(interval), milliseconds(timeout), 30_000);
            let (interval, timeout) = expected;
            assert_eq!(
                (settings.interval, settings.timeout),
                (milliseconds(interval), milliseconds(timeout))
            );
        }
    }
}
