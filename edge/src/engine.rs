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

use crate::forward::{Mac, NftWriter};
use crate::health::{HealthByProbe, Probe, TargetHealth};
use crate::host::{EdgePeer, HostNetwork};
use crate::index::{Event, Index};
use crate::link::conflicts::AddressConflicts;
use crate::link::membership::Membership;
use crate::link::route::{Link, Rtnetlink};
use crate::metrics::Metrics;
use crate::plan::{Plan, Planner};
use crate::prober::Prober;
use crate::status::HostStatus;

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
    pub(crate) health: mpsc::UnboundedReceiver<(Probe, TargetHealth)>,
    /// Who else is there.
    pub(crate) membership: watch::Receiver<Membership>,
    /// Which addresses are somebody else's.
    pub(crate) conflicts: watch::Receiver<AddressConflicts>,
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
    pub(crate) peers: watch::Sender<Vec<EdgePeer>>,
    /// Virtual addresses that should be free.
    pub(crate) wanted: watch::Sender<BTreeSet<IpAddr>>,
    /// Virtual addresses that this host has.
    pub(crate) held: watch::Sender<BTreeSet<IpAddr>>,
    /// Virtual addresses to announce now.
    pub(crate) announce: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    /// What to report.
    pub(crate) reports: watch::Sender<HostStatus>,
    /// That this host wants to leave.
    pub(crate) leave: watch::Sender<bool>,
}

/// What `/readyz` waits for.
#[derive(Debug)]
pub(crate) struct ReadinessGates {
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
    netlink: Rtnetlink,
    kernel: NftWriter,
    planner: Planner,
    prober: Prober,
    metrics: Metrics,
    outputs: Outputs,
    gates: ReadinessGates,
    index: Index,
    health: HealthByProbe,
    host: HostNetwork,
    membership: Membership,
    conflicts: AddressConflicts,
    held: BTreeSet<IpAddr>,
    /// When the API was listed.
    listed_at: Option<Instant>,
    warm: bool,
    defended: Option<Instant>,
    /// When the table was last compared element by element.
    inspected: Option<Instant>,
    /// Why the kernel does not hold the plan.
    kernel_error: String,
    /// The process is ending: addresses stay until it is certain that another host has them.
    leaving: bool,
}

impl Engine {
    /// An engine for an interface; looks at what is there and changes nothing.
    pub(crate) fn new(
        link: Link,
        mut netlink: Rtnetlink,
        kernel: NftWriter,
        prober: Prober,
        metrics: Metrics,
        outputs: Outputs,
        gates: ReadinessGates,
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
            host: HostNetwork {
                interface: link.name.clone(),
                index: link.index,
                mac: link.mac,
                ..HostNetwork::default()
            },
            link,
            netlink,
            kernel,
            planner,
            prober,
            metrics,
            outputs,
            gates,
            index: Index::default(),
            health: HealthByProbe::new(),
            membership: Membership::default(),
            conflicts: AddressConflicts::default(),
            held: held.into_iter().collect(),
            listed_at: None,
            warm: !adopted,
            defended: None,
            inspected: None,
            kernel_error: String::new(),
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
                    self.index.apply(event);
                    while let Ok(event) = inputs.events.try_recv() {
                        self.index.apply(event);
                    }
                }
                Some((probe, seen)) = inputs.health.recv() => {
                    self.on_probe_result(probe, seen);
                    while let Ok((probe, seen)) = inputs.health.try_recv() {
                        self.on_probe_result(probe, seen);
                    }
                }
                Ok(()) = inputs.membership.changed() => {
                    let next = inputs.membership.borrow_and_update().clone();
                    self.update_membership(next);
                }
                Ok(()) = inputs.conflicts.changed() => self.conflicts = inputs.conflicts.borrow_and_update().clone(),
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
            tokio::task::block_in_place(|| self.reconcile());
            if let Some(last) = &mut deadline {
                if self.held.is_empty() {
                    break;
                }
                if self.membership.other_active {
                    *last = (*last).min(tokio::time::Instant::now() + OVERLAP);
                }
            }
        }
        self.end();
        Ok(())
    }

    fn on_probe_result(&mut self, probe: Probe, seen: TargetHealth) {
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
    fn update_membership(&mut self, next: Membership) {
        let before = std::mem::replace(&mut self.membership, next);
        if self.membership.active != before.active {
            tracing::info!(active = self.membership.active, peers = self.membership.live, "role changed");
            if self.membership.active {
                self.metrics.takeovers.inc();
            }
        }
        let announce =
            (self.membership.active && !before.active) || self.membership.departures != before.departures;
        if announce && self.membership.active {
            let _ = self.outputs.announce.send(self.held.clone());
        }
        self.metrics.active.set(self.membership.active.into());
        self.metrics.peers.set(i64::try_from(self.membership.live).unwrap_or(i64::MAX));
        self.outputs.peers.send_if_modified(|peers| {
            let modified = *peers != self.membership.peers;
            peers.clone_from(&self.membership.peers);
            modified
        });
        if self.membership.settled {
            pass(&mut self.gates.settled);
        }
    }

    /// Somebody who is no edge host says that an address of ours is theirs.
    fn defend(&mut self, vip: IpAddr, mac: Mac) {
        let now = Instant::now();
        let due = self.defended.is_none_or(|last| now.duration_since(last) >= DEFENCE);
        if due && self.membership.active && self.held.contains(&vip) {
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
        let host = HostNetwork {
            addresses: own,
            routes: self.netlink.routes()?,
            neighbours: self.netlink.neighbours(index)?.into_iter().collect(),
            ..self.host.clone()
        };
        let thorough = self.inspected.is_none_or(|last| last.elapsed() >= INSPECTION);
        if thorough {
            self.inspected = Some(Instant::now());
        }
        let out_of_sync =
            self.kernel.is_out_of_sync(thorough).context("cannot look at the kernel's table")?;
        if out_of_sync {
            tracing::warn!("somebody else has changed the table netdev steerage-edge; writing it again");
        }
        let changed = host != self.host || ours != self.held || out_of_sync || !self.kernel_error.is_empty();
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
    fn reconcile(&mut self) {
        self.host.peers.clone_from(&self.membership.peers);
        self.host.taken.clone_from(&self.conflicts.taken);
        if !self.index.has_synced() {
            // The kernel goes on as it was left; only who answers can be decided without the API.
            let keep = self.held.clone();
            self.sync_vips(&keep);
            return;
        }
        pass(&mut self.gates.listed);
        let now = Instant::now();
        let listed_at = *self.listed_at.get_or_insert(now);
        let mut plan = self.planner.plan(&self.index, &self.host, &self.health, now);
        self.health.retain(|probe, _| plan.probes.contains(probe));
        let host = &self.host;
        self.prober.set(&plan.probes, |target| host.source_for(target));
        if self.membership.settled {
            // Not before: another edge host that is not known yet would be taken for a stranger.
            self.outputs.wanted.send_if_modified(|wanted| {
                let modified = *wanted != plan.wanted;
                wanted.clone_from(&plan.wanted);
                modified
            });
        }
        self.warm |= self.health.len() == plan.probes.len() || now.duration_since(listed_at) >= WARM_UP;
        if !self.warm {
            let keep = self.held.clone();
            self.sync_vips(&keep);
            return;
        }
        let vips = plan
            .vips
            .iter()
            .filter(|vip| self.conflicts.free.contains(vip) || self.held.contains(vip))
            .copied()
            .collect();
        self.write(&plan, &vips);
        self.update_metrics(&plan);
        if !self.kernel_error.is_empty() {
            for status in plan.statuses.values_mut() {
                status.problem.clone_from(&self.kernel_error);
            }
        }
        self.outputs.reports.send_replace(HostStatus {
            interface: self.link.name.clone(),
            addresses: self.host.addresses.iter().map(ipnet::IpNet::addr).collect(),
            active: self.membership.active,
            load_balancers: plan.statuses,
        });
    }

    /// The table first where addresses come, the addresses first where they go.
    fn write(&mut self, plan: &Plan, vips: &BTreeSet<IpAddr>) {
        let gone: BTreeSet<_> = self.held.intersection(vips).copied().collect();
        self.sync_vips(&gone);
        match self.kernel.apply(&plan.forwarding) {
            Ok(elements) => {
                if elements > 0 {
                    tracing::debug!(elements, "wrote to the kernel");
                }
                self.metrics.elements.inc_by(u64::try_from(elements).unwrap_or(0));
                self.kernel_error.clear();
                pass(&mut self.gates.programmed);
            }
            Err(error) => {
                self.metrics.failures.inc();
                tracing::error!(%error, "the kernel does not take the plan; trying again");
                self.kernel_error = format!("the kernel of the edge host does not take it: {error}");
                return;
            }
        }
        self.sync_vips(vips);
    }

    /// Has exactly these addresses if this host is the active one, none if another is, and changes nothing while that is unclear.
    fn sync_vips(&mut self, vips: &BTreeSet<IpAddr>) {
        if !self.membership.settled {
            return;
        }
        let target = match (self.membership.active, self.membership.other_active) {
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
                Err(error) => self.vip_failed(vip, &error),
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
                Err(error) => self.vip_failed(vip, &error),
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

    fn vip_failed(&self, vip: IpAddr, error: &crate::link::route::RouteError) {
        self.metrics.failures.inc();
        let error = anyhow::Error::msg(error.to_string());
        tracing::error!(%vip, %error, "cannot change an address of the interface");
    }

    fn update_metrics(&self, plan: &Plan) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let healthy = |seen: &&TargetHealth| seen.state == steerage_edge_api::TargetState::Healthy;
        self.metrics.load_balancers.set(number(plan.statuses.len()));
        let problems = plan.statuses.values().filter(|status| !status.problem.is_empty()).count();
        self.metrics.problems.set(number(problems));
        self.metrics.probes.set(number(plan.probes.len()));
        self.metrics.healthy.set(number(self.health.values().filter(healthy).count()));
    }

    /// Gives the addresses up if somebody else has them now.
    fn end(mut self) {
        if self.membership.other_active {
            self.membership.active = false;
            self.leaving = false;
            self.sync_vips(&BTreeSet::new());
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
