// SPDX-License-Identifier: Apache-2.0
//! The moves of all Services at the same time, and their measured times.
//!
//! A move gives the other node an endpoint, waits until it gets packets and for a random part of an interval more, and takes the
//! endpoint of the first node away: at no time is the Service without an endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::time::{Instant, sleep};

use super::cell::{Cell, Signal};
use super::objects::put_endpoints;
use super::probed::Answers;
use super::seen::{Seen, now};
use super::sender::Sender;
use crate::controller::memory::MemoryServer;
use crate::edge_nodes::nodes::Nodes;

/// Between two looks at a node's last packet.
const LOOK: Duration = Duration::from_millis(1);
/// So many datagrams in a row without one to a node: half of them went to each, so one move in a billion is taken for ended that is
/// not.
const SILENT: u32 = 30;
/// And no sooner than this: the machine is shared, and packets may be held up.
const LEAST_SILENCE: Duration = Duration::from_millis(200);
/// Beyond the interval times the threshold, how long a node may take to join or leave.
const LIMIT: Duration = Duration::from_secs(30);
/// Before the endpoint leaves: for what else the first change set off.
const SETTLE: Duration = Duration::from_millis(200);

/// After the period, a Service without a measured move makes so many at most.
const ATTEMPTS: usize = 10;

/// What makes moves, and sees them.
pub(super) struct Mover {
    pub(super) agents: Nodes,
    pub(super) answers: Answers,
    pub(super) server: MemoryServer,
    pub(super) seen: Seen,
    pub(super) sender: Sender,
    /// Moves whose first node got no packets any more before it lost the endpoint.
    pub(super) unmeasured: AtomicU64,
}

/// The times of one move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MoveTimes {
    /// From the change to the last packet at the node that lost the endpoint; zero if none came after it.
    pub(super) left: Duration,
    /// From the change to a packet at the node that got one, as seen each millisecond.
    pub(super) joined: Duration,
}

impl Mover {
    /// Whether packets of a Service arrive.
    pub(super) fn is_served(&self, cell: &Cell) -> bool {
        cell.nodes().iter().any(|node| !self.seen.last(*node).is_zero())
    }

    /// A node gets or loses the endpoint; `others` have one.
    fn change(&self, cell: Cell, node: u32, has_endpoint: bool, others: &[u32]) {
        if cell.signal == Signal::Statements {
            self.agents.set_endpoint(node, cell.service, has_endpoint);
        }
        self.answers.set(node, has_endpoint);
        let mut nodes = others.to_vec();
        nodes.extend(has_endpoint.then_some(node));
        put_endpoints(&self.server, cell, &nodes);
    }

    /// `None` if the node got no packets before: its checks failed while it had the endpoint, as on a machine without a free core.
    async fn make_move(&self, cell: Cell, [from, to]: [u32; 2], wait: Duration) -> Result<Option<MoveTimes>> {
        let limit = cell.interval * (cell.threshold + 2) + LIMIT;
        let (begun, changed) = (Instant::now(), now());
        self.change(cell, to, true, &[from]);
        while self.seen.last(to) < changed {
            ensure!(begun.elapsed() < limit, "node {to} gets no packets");
            sleep(LOOK).await;
        }
        let joined = now().saturating_sub(changed);
        sleep(SETTLE + wait).await;
        let gap = cell.measured_gap();
        self.sender.set_gap(cell.service, gap);
        // The meter proves that it sees the node's packets.
        sleep(cell.gap() + gap * SILENT).await;
        let (begun, changed) = (Instant::now(), now());
        let is_seen = self.seen.last(from) + gap * SILENT + LEAST_SILENCE > changed;
        self.change(cell, from, false, &[to]);
        if !is_seen {
            self.sender.set_gap(cell.service, cell.gap());
            self.unmeasured.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        let silence = (gap * SILENT).max(LEAST_SILENCE);
        loop {
            sleep(LOOK).await;
            let last = self.seen.last(from).max(changed);
            // Without packets to the other node, silence may be the client's: the machine is shared.
            if self.seen.last(to).saturating_sub(last) > silence {
                self.sender.set_gap(cell.service, cell.gap());
                return Ok(Some(MoveTimes { left: last.saturating_sub(changed), joined }));
            }
            ensure!(begun.elapsed() < limit, "node {from} still gets packets");
        }
    }
}

/// Lets the endpoints of all Services move for so long. The times of each cell's moves, in their order.
pub(super) fn run(mover: &Arc<Mover>, cells: &[Cell], period: Duration) -> Result<Vec<Vec<MoveTimes>>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let end = Instant::now() + period;
    let tasks: Vec<_> = cells
        .iter()
        .map(|cell| {
            let (mover, cell) = (Arc::clone(mover), *cell);
            runtime.spawn(async move {
                let (mut times, mut nodes, mut number) = (Vec::new(), cell.nodes(), 0);
                while (times.is_empty() && number < ATTEMPTS) || Instant::now() < end {
                    let wait = cell.interval.mul_f64(part(cell.service, number));
                    number += 1;
                    let context = || format!("Service {}, {:?}", cell.service, cell.signal);
                    times.extend(mover.make_move(cell, nodes, wait).await.with_context(context)?);
                    nodes.reverse();
                }
                ensure!(!times.is_empty(), "no move of Service {} could be measured", cell.service);
                anyhow::Ok(times)
            })
        })
        .collect();
    runtime.block_on(async {
        let mut all = Vec::new();
        for task in tasks {
            all.push(task.await.context("a task of a Service")??);
        }
        Ok(all)
    })
}

/// From 0 to 1, evenly spread (the golden ratio's multiples), so that changes come at all times between two probes.
fn part(service: u32, number: usize) -> f64 {
    let number = f64::from(service) * 7.0 + number as f64;
    (number * 0.618_033_988_749_894_9).fract()
}
