// SPDX-License-Identifier: Apache-2.0
//! The one writer: gathers what the API, the link, the peers and the probes say, plans, and makes the kernel follow.
//!
//! It changes only the table and the addresses that are ours, writes differences only, and takes nothing away on its way out
//! unless another host has taken over: losing this process must not take traffic down.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use steerage_process::Pending;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::forward::{Kernel, Mac};
use crate::health::{Health, Probe, Seen};
use crate::host::{Host, Neighbour};
use crate::link::claims::Claims;
use crate::link::peers::Cluster;
use crate::link::route::{Link, Netlink};
use crate::metrics::Metrics;
use crate::plan::{Plan, Planner};
use crate::prober::Prober;
use crate::report::Reports;
use crate::world::{Event, World};

/// How often the host's own network is looked at.
const REFRESH: Duration = Duration::from_secs(1);
/// How often the table is compared element by element, where others commit to nftables.
const INSPECTION: Duration = Duration::from_mins(1);
/// How long a process that has adopted a table waits for the first probes, so that it does not take all targets for unknown.
const WARM_UP: Duration = Duration::from_secs(3);
/// How long a host that leaves waits for its successor.
const HAND_OVER: Duration = Duration::from_millis(1500);
/// How long it still answers once there is one: both forward alike, and the other has just begun.
const OVERLAP: Duration = Duration::from_millis(500);
/// How often an address that somebody else claims is announced again.
const DEFENCE: Duration = Duration::from_secs(5);

/// What the engine hears.
#[derive(Debug)]
pub(crate) struct Inputs {
    /// What the API says.
    pub(crate) events: mpsc::Receiver<Event>,
    /// What probes have found.
    pub(crate) health: mpsc::UnboundedReceiver<(Probe, Seen)>,
    /// Who else is there.
    pub(crate) cluster: watch::Receiver<Cluster>,
    /// Which addresses are somebody else's.
    pub(crate) claims: watch::Receiver<Claims>,
    /// Claims to addresses that this host may have.
    pub(crate) contested: mpsc::UnboundedReceiver<(IpAddr, Mac)>,
    /// Asks the process to end.
    pub(crate) shutdown: CancellationToken,
}

/// Whom the engine tells.
#[derive(Debug)]
pub(crate) struct Outputs {
    /// The host's own addresses.
    pub(crate) addresses: watch::Sender<Vec<IpAddr>>,
    /// Other edge hosts.
    pub(crate) peers: watch::Sender<Vec<Neighbour>>,
    /// Virtual addresses that should be free.
    pub(crate) wanted: watch::Sender<BTreeSet<IpAddr>>,
    /// Virtual addresses that this host has.
    pub(crate) held: watch::Sender<BTreeSet<IpAddr>>,
    /// Virtual addresses to announce now.
    pub(crate) announce: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    /// What to report.
    pub(crate) reports: watch::Sender<Reports>,
    /// That this host wants to leave.
    pub(crate) leave: watch::Sender<bool>,
}

/// What `/readyz` waits for.
#[derive(Debug)]
pub(crate) struct Milestones {
    /// The API has been listed.
    pub(crate) listed: Option<Pending>,
    /// The kernel holds the first plan.
    pub(crate) programmed: Option<Pending>,
    /// It is known who else is there.
    pub(crate) settled: Option<Pending>,
}

/// The engine.
#[derive(Debug)]
pub(crate) struct Engine {
    link: Link,
    netlink: Netlink,
    kernel: Kernel,
    planner: Planner,
    prober: Prober,
    metrics: Metrics,
    outputs: Outputs,
    milestones: Milestones,
    world: World,
    health: Health,
    host: Host,
    cluster: Cluster,
    claims: Claims,
    held: BTreeSet<IpAddr>,
    /// When the API was listed.
    whole_since: Option<Instant>,
    warm: bool,
    defended: Option<Instant>,
    /// When the table was last compared element by element.
    inspected: Option<Instant>,
    /// Why the kernel does not hold the plan.
    trouble: String,
    /// The process is ending: addresses stay until it is certain that another host has them.
    leaving: bool,
}

impl Engine {
    /// An engine for an interface; looks at what is there and changes nothing.
    pub(crate) fn new(
        link: Link,
        mut netlink: Netlink,
        kernel: Kernel,
        prober: Prober,
        metrics: Metrics,
        outputs: Outputs,
        milestones: Milestones,
    ) -> anyhow::Result<Self> {
        let (_, held) = netlink.addresses(link.index)?;
        let adopted = kernel.is_built();
        tracing::info!(
            interface = link.name,
            adopted,
            addresses = held.len(),
            listeners = kernel.written().listeners.len(),
            "looked at what is there"
        );
        let planner = Planner::adopt(kernel.written());
        let mut engine = Self {
            host: Host { interface: link.name.clone(), index: link.index, mac: link.mac, ..Host::default() },
            link,
            netlink,
            kernel,
            planner,
            prober,
            metrics,
            outputs,
            milestones,
            world: World::default(),
            health: Health::new(),
            cluster: Cluster::default(),
            claims: Claims::default(),
            held: held.into_iter().collect(),
            whole_since: None,
            warm: !adopted,
            defended: None,
            inspected: None,
            trouble: String::new(),
            leaving: false,
        };
        engine.refresh()?;
        Ok(engine)
    }

    /// Runs until asked to end.
    pub(crate) async fn run(mut self, mut inputs: Inputs) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(REFRESH);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut deadline = None;
        loop {
            tokio::select! {
                () = inputs.shutdown.cancelled(), if deadline.is_none() => {
                    deadline = Some(tokio::time::Instant::now() + HAND_OVER);
                    self.leaving = true;
                    self.outputs.leave.send_replace(true);
                }
                () = sleep_until(deadline), if deadline.is_some() => break,
                Some(event) = inputs.events.recv() => {
                    self.world.take(event);
                    while let Ok(event) = inputs.events.try_recv() {
                        self.world.take(event);
                    }
                }
                Some((probe, seen)) = inputs.health.recv() => {
                    self.learn(probe, seen);
                    while let Ok((probe, seen)) = inputs.health.try_recv() {
                        self.learn(probe, seen);
                    }
                }
                Ok(()) = inputs.cluster.changed() => {
                    let next = inputs.cluster.borrow_and_update().clone();
                    self.meet(next);
                }
                Ok(()) = inputs.claims.changed() => self.claims = inputs.claims.borrow_and_update().clone(),
                Some((vip, mac)) = inputs.contested.recv() => {
                    self.defend(vip, mac);
                    continue;
                }
                _ = ticks.tick() => {
                    let refreshed = tokio::task::block_in_place(|| self.refresh())?;
                    if !refreshed && self.warm {
                        continue;
                    }
                }
            }
            tokio::task::block_in_place(|| self.step());
            if let Some(last) = &mut deadline {
                if self.held.is_empty() {
                    break;
                }
                if self.cluster.other_active {
                    *last = (*last).min(tokio::time::Instant::now() + OVERLAP);
                }
            }
        }
        self.end();
        Ok(())
    }

    fn learn(&mut self, probe: Probe, seen: Seen) {
        tracing::info!(
            target_address = %probe.address,
            port = probe.check.port,
            state = ?seen.state,
            weight = seen.weight,
            reason = seen.reason,
            "health changed"
        );
        self.health.insert(probe, seen);
    }

    /// Takes in who else is there.
    fn meet(&mut self, next: Cluster) {
        let before = std::mem::replace(&mut self.cluster, next);
        if self.cluster.active != before.active {
            tracing::info!(active = self.cluster.active, peers = self.cluster.live, "role changed");
            if self.cluster.active {
                self.metrics.takeovers.inc();
            }
        }
        let announce = (self.cluster.active && !before.active) || self.cluster.contests != before.contests;
        if announce && self.cluster.active {
            let _ = self.outputs.announce.send(self.held.clone());
        }
        self.metrics.active.set(self.cluster.active.into());
        self.metrics.peers.set(i64::try_from(self.cluster.live).unwrap_or(i64::MAX));
        self.outputs.peers.send_if_modified(|peers| {
            let modified = *peers != self.cluster.peers;
            peers.clone_from(&self.cluster.peers);
            modified
        });
        if self.cluster.settled {
            pass(&mut self.milestones.settled);
        }
    }

    /// Somebody who is no edge host says that an address of ours is theirs.
    fn defend(&mut self, vip: IpAddr, mac: Mac) {
        let now = Instant::now();
        let due = self.defended.is_none_or(|last| now.duration_since(last) >= DEFENCE);
        if due && self.cluster.active && self.held.contains(&vip) {
            self.defended = Some(now);
            tracing::warn!(%vip, by = ?mac, "somebody else on the link claims a virtual address; announcing it again");
            let _ = self.outputs.announce.send([vip].into());
        }
    }

    /// Looks at the host's network and at the table; whether anything differs from what is known.
    fn refresh(&mut self) -> anyhow::Result<bool> {
        let name = &self.link.name;
        match self.netlink.link(name)? {
            Some(link) if link.index == self.link.index && link.mac == self.link.mac => {}
            Some(_) => bail!("the interface {name} is another one than at the start"),
            None => bail!("the interface {name} has gone"),
        }
        let index = self.link.index;
        let (own, ours) = self.netlink.addresses(index)?;
        let ours: BTreeSet<_> = ours.into_iter().collect();
        let host = Host {
            addresses: own,
            routes: self.netlink.routes()?,
            neighbours: self.netlink.neighbours(index)?.into_iter().collect(),
            ..self.host.clone()
        };
        let thorough = self.inspected.is_none_or(|last| last.elapsed() >= INSPECTION);
        if thorough {
            self.inspected = Some(Instant::now());
        }
        let disturbed = self.kernel.was_disturbed(thorough).context("cannot look at the kernel's table")?;
        if disturbed {
            tracing::warn!("somebody else has changed the table netdev steerage-edge; writing it again");
        }
        let changed = host != self.host || ours != self.held || disturbed || !self.trouble.is_empty();
        self.outputs.addresses.send_if_modified(|told| {
            let addresses: Vec<_> = host.addresses.iter().map(ipnet::IpNet::addr).collect();
            let modified = *told != addresses;
            *told = addresses;
            modified
        });
        self.host = host;
        self.held = ours;
        Ok(changed)
    }

    /// Plans and writes.
    fn step(&mut self) {
        self.host.peers.clone_from(&self.cluster.peers);
        self.host.taken.clone_from(&self.claims.taken);
        if !self.world.is_whole() {
            // The kernel goes on as it was left; only who answers can be decided without the API.
            let keep = self.held.clone();
            self.answer(&keep);
            return;
        }
        pass(&mut self.milestones.listed);
        let now = Instant::now();
        let whole_since = *self.whole_since.get_or_insert(now);
        let mut plan = self.planner.plan(&self.world, &self.host, &self.health, now);
        self.health.retain(|probe, _| plan.probes.contains(probe));
        let host = &self.host;
        self.prober.set(&plan.probes, |target| host.source_for(target));
        if self.cluster.settled {
            // Not before: another edge host that is not known yet would be taken for a stranger.
            self.outputs.wanted.send_if_modified(|wanted| {
                let modified = *wanted != plan.wanted;
                wanted.clone_from(&plan.wanted);
                modified
            });
        }
        self.warm |= self.health.len() == plan.probes.len() || now.duration_since(whole_since) >= WARM_UP;
        if !self.warm {
            let keep = self.held.clone();
            self.answer(&keep);
            return;
        }
        let vips = plan
            .vips
            .iter()
            .filter(|vip| self.claims.free.contains(vip) || self.held.contains(vip))
            .copied()
            .collect();
        self.write(&plan, &vips);
        self.count(&plan);
        if !self.trouble.is_empty() {
            for finding in plan.reports.values_mut() {
                finding.problem.clone_from(&self.trouble);
            }
        }
        self.outputs.reports.send_replace(Reports {
            interface: self.link.name.clone(),
            addresses: self.host.addresses.iter().map(ipnet::IpNet::addr).collect(),
            active: self.cluster.active,
            findings: plan.reports,
        });
    }

    /// The table first where addresses come, the addresses first where they go.
    fn write(&mut self, plan: &Plan, vips: &BTreeSet<IpAddr>) {
        let gone: BTreeSet<_> = self.held.intersection(vips).copied().collect();
        self.answer(&gone);
        match self.kernel.apply(&plan.state) {
            Ok(elements) => {
                if elements > 0 {
                    tracing::debug!(elements, "wrote to the kernel");
                }
                self.metrics.elements.inc_by(u64::try_from(elements).unwrap_or(0));
                self.trouble.clear();
                pass(&mut self.milestones.programmed);
            }
            Err(error) => {
                self.metrics.failures.inc();
                tracing::error!(%error, "the kernel does not take the plan; trying again");
                self.trouble = format!("the kernel of the edge host does not take it: {error}");
                return;
            }
        }
        self.answer(vips);
    }

    /// Has exactly these addresses if this host is the active one, none if another is, and changes nothing while that is unclear.
    fn answer(&mut self, vips: &BTreeSet<IpAddr>) {
        if !self.cluster.settled {
            return;
        }
        let target = match (self.cluster.active, self.cluster.other_active) {
            (true, _) => vips.clone(),
            (false, true) if !self.leaving => BTreeSet::new(),
            (false, _) => self.held.intersection(vips).copied().collect(),
        };
        let gone: Vec<_> = self.held.difference(&target).copied().collect();
        let come: BTreeSet<_> = target.difference(&self.held).copied().collect();
        for vip in gone {
            match self.netlink.remove_vip(self.link.index, vip) {
                Ok(()) => {
                    tracing::info!(%vip, "no longer answers for an address");
                    self.held.remove(&vip);
                }
                Err(error) => self.complain(vip, &error),
            }
        }
        let mut taken = BTreeSet::new();
        for vip in come {
            match self.netlink.add_vip(self.link.index, vip) {
                Ok(()) => {
                    tracing::info!(%vip, "answers for an address");
                    self.held.insert(vip);
                    taken.insert(vip);
                }
                Err(error) => self.complain(vip, &error),
            }
        }
        self.outputs.held.send_if_modified(|held| {
            let modified = *held != self.held;
            held.clone_from(&self.held);
            modified
        });
        if !taken.is_empty() {
            let _ = self.outputs.announce.send(taken);
        }
    }

    fn complain(&self, vip: IpAddr, error: &crate::link::route::RouteError) {
        self.metrics.failures.inc();
        let error = anyhow::Error::msg(error.to_string());
        tracing::error!(%vip, %error, "cannot change an address of the interface");
    }

    fn count(&self, plan: &Plan) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let healthy = |seen: &&Seen| seen.state == steerage_edge_api::TargetState::Healthy;
        self.metrics.balancers.set(number(plan.reports.len()));
        let problems = plan.reports.values().filter(|finding| !finding.problem.is_empty()).count();
        self.metrics.problems.set(number(problems));
        self.metrics.probes.set(number(plan.probes.len()));
        self.metrics.healthy.set(number(self.health.values().filter(healthy).count()));
    }

    /// Gives the addresses up if somebody else has them now.
    fn end(mut self) {
        if self.cluster.other_active {
            self.cluster.active = false;
            self.leaving = false;
            self.answer(&BTreeSet::new());
            tracing::info!("another edge host has taken over");
        } else {
            tracing::info!(addresses = self.held.len(), "nobody takes over: the kernel goes on forwarding");
        }
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn pass(milestone: &mut Option<Pending>) {
    if let Some(pending) = milestone.take() {
        pending.done();
    }
}
