// SPDX-License-Identifier: Apache-2.0
//! The controller beside an API server in memory: Services, nodes and endpoints of any number, and what a start, a change of nodes
//! and moving endpoints cost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::memory::{MemoryServer, ProviderCall};
use super::objects;
use super::program::{Program, Programs};
use super::results::{NodeChange, Start};
use crate::who::Who;

/// How long the last provider call may take.
const LIMIT: Duration = Duration::from_secs(30);
/// The shared set of all eligible nodes.
const NODE_SET: &str = "eligible";

/// How many objects of each kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) services: u32,
    pub(super) nodes: u32,
    pub(super) endpoints: u32,
}

/// A cluster in memory.
pub(super) struct Cell {
    server: MemoryServer,
    size: Size,
    programs: Programs,
    /// Distinguishes the processes.
    started: usize,
    /// Endpoints that have moved.
    moved: u32,
}

/// What moving endpoints cost.
pub(super) struct Moves {
    pub(super) per_second: f64,
    /// From the event of each change to the provider call with its targets.
    pub(super) delays: Vec<Duration>,
    /// CPU seconds per second.
    pub(super) cpu: f64,
    /// While one Service's provider calls hang: what a node cost that joined.
    pub(super) node_joins: Option<NodeChange>,
}

impl Cell {
    /// `number` of the first process; each needs another one.
    pub(super) fn new(programs: &Programs, size: Size, number: usize) -> Result<Self> {
        let server = MemoryServer::start(&programs.folder)?;
        for number in 0..size.nodes {
            server.put("nodes", &objects::node_name(number), objects::whole_node(number));
        }
        for number in 0..size.services {
            let name = objects::service_name(number);
            server.put("services", &name, objects::allocated_service(number));
            let nodes = objects::endpoint_nodes(number, 0, size.endpoints, size.nodes);
            server.put("endpointslices", &name, objects::named_slice(number, &nodes));
        }
        server.put("addresspools", "bench", objects::pool());
        Ok(Self { server, size, programs: programs.clone(), started: number, moved: 0 })
    }

    /// Starts a controller, and waits until it has planned everything.
    pub(super) fn start(&mut self) -> Result<(Program, Start)> {
        self.started += 1;
        let before = self.server.writes();
        let program = self.programs.start(Who::Ours, self.server.kubeconfig(), self.started)?;
        program.wait_done(self.size.services)?;
        let done = Instant::now();
        let listed = self.server.last_list().context("nothing was listed")?;
        let (cpu, rest) = (program.cpu_seconds(), program.rest());
        let balancers = self.server.count("edgeloadbalancers");
        ensure!(balancers == self.size.services as usize, "{balancers} load balancers");
        let start = Start {
            planned: done.saturating_duration_since(listed),
            cpu,
            rest,
            peak_mebibytes: program.peak_mebibytes(),
            writes: self.server.writes().since(before),
        };
        Ok((program, start))
    }

    /// Adds one node.
    pub(super) fn add_node(&mut self, program: &Program) -> Result<NodeChange> {
        let number = self.size.nodes;
        self.size.nodes += 1;
        self.change_node(program, |server| {
            server.put("nodes", &objects::node_name(number), objects::whole_node(number));
        })
    }

    /// Removes the node that was added last.
    pub(super) fn remove_node(&mut self, program: &Program) -> Result<NodeChange> {
        self.size.nodes -= 1;
        let number = self.size.nodes;
        self.change_node(program, |server| server.delete("nodes", &objects::node_name(number)))
    }

    fn change_node(&self, program: &Program, change: impl FnOnce(&MemoryServer)) -> Result<NodeChange> {
        let (writes, made) = (self.server.writes(), self.server.provider_calls_made());
        let cpu = program.cpu_seconds();
        let mut calls = self.server.provider_calls();
        let begun = Instant::now();
        change(&self.server);
        let nodes = self.size.nodes as usize;
        let is_it = |call: &ProviderCall| call.name == NODE_SET && target_nodes(&call.spec).len() == nodes;
        let find = async {
            while let Some(call) = calls.recv().await {
                if is_it(&call) {
                    return Some(call);
                }
            }
            None
        };
        let call = self.server.runtime.block_on(async { timeout(LIMIT, find).await });
        let call = call.ok().flatten().context("the shared set was not written")?;
        program.rest();
        Ok(NodeChange {
            reached: call.at.saturating_duration_since(begun),
            cpu: program.cpu_seconds() - cpu,
            writes: self.server.writes().since(writes),
            provider_calls: self.server.provider_calls_made() - made,
        })
    }

    /// Moves the endpoints of one Service with api steering after the other. With `one_hangs` the provider does not answer for the
    /// first of them, only the others count, and a node joins at the end.
    pub(super) fn move_endpoints(
        &mut self,
        program: &Program,
        rate: u32,
        period: Duration,
        one_hangs: bool,
    ) -> Result<Moves> {
        let hanging = one_hangs.then(|| balancer_name(0));
        self.server.hang(hanging.clone());
        let (begun, cpu) = (Instant::now(), program.cpu_seconds());
        let pending = Pending::default();
        let calls = self.server.provider_calls();
        let seen = self.server.runtime.spawn(receive(calls, Arc::clone(&pending)));
        let count = self.server.runtime.block_on(self.send(&pending, rate, period, hanging.as_deref()));
        let per_second = f64::from(count) / begun.elapsed().as_secs_f64();
        let cpu = (program.cpu_seconds() - cpu) / begun.elapsed().as_secs_f64();
        self.moved += count;
        self.server.runtime.block_on(async {
            let all_seen = async {
                while !lock(&pending).wanted.is_empty() {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(LIMIT, all_seen).await.context("some targets never followed")
        })?;
        seen.abort();
        let node_joins = one_hangs.then(|| self.add_node(program)).transpose()?;
        self.server.hang(None);
        let delays = std::mem::take(&mut lock(&pending).delays);
        ensure!(!delays.is_empty(), "no change was seen");
        Ok(Moves { per_second, delays, cpu, node_joins })
    }

    /// Sends the events of changed slices at an even pace. Returns how many.
    async fn send(&self, pending: &Pending, rate: u32, period: Duration, hanging: Option<&str>) -> u32 {
        let by_api = self.size.services.div_ceil(2);
        let mut ticks = interval(Duration::from_millis(1));
        // What a late tick has missed is sent with it: the pace is kept.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (begun, mut sent) = (Instant::now(), 0);
        while begun.elapsed() < period {
            ticks.tick().await;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^32 for days")]
            let due = (begun.elapsed().as_secs_f64() * f64::from(rate)) as u32;
            while sent < due {
                let count = self.moved + sent;
                let (service, round) = (count % by_api * 2, 1 + count / by_api);
                let nodes = objects::endpoint_nodes(service, round, self.size.endpoints, self.size.nodes);
                let slice = objects::named_slice(service, &nodes);
                let balancer = balancer_name(service);
                if hanging != Some(&*balancer) {
                    lock(pending).wanted.insert(balancer, (nodes, Instant::now()));
                }
                self.server.put("endpointslices", &objects::service_name(service), slice);
                sent += 1;
            }
        }
        sent
    }
}

/// Changes whose provider call has not come.
type Pending = Arc<Mutex<Changes>>;

#[derive(Default)]
struct Changes {
    /// By load balancer: the wanted nodes, and when the event was sent. A Service that moves again before counts from the last time.
    wanted: HashMap<String, (Vec<String>, Instant)>,
    delays: Vec<Duration>,
}

async fn receive(mut calls: UnboundedReceiver<ProviderCall>, pending: Pending) {
    while let Some(call) = calls.recv().await {
        let mut changes = lock(&pending);
        let is_wanted = |(nodes, _): &(Vec<String>, Instant)| *nodes == target_nodes(&call.spec);
        if changes.wanted.get(&call.name).is_some_and(is_wanted)
            && let Some((_, sent)) = changes.wanted.remove(&call.name)
        {
            changes.delays.push(call.at.saturating_duration_since(sent));
        }
    }
}

fn target_nodes(spec: &Value) -> Vec<&str> {
    let targets = spec["targets"].as_array().into_iter().flatten();
    targets.filter_map(|target| target["node"].as_str()).collect()
}

/// The object that the provider writes for a Service.
fn balancer_name(service: u32) -> String {
    format!("lb-{}", objects::service_uid(service))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
