// SPDX-License-Identifier: Apache-2.0
//! Keeps one route in the kernel for each VIP that this host serves, which a routing daemon exports. So routers spread the clients of a
//! VIP over all hosts that can serve, whoever answers ARP for it.
//!
//! A task beside `engine`, which reads what other tasks publish, and speaks no routing protocol. Routes have a lifetime, as the leases
//! of VIPs have: a second process removes them (`fence`) if this one does not renew them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_model::chain;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::link::ability::AbilityReport;
use crate::link::mac::Mac;
use crate::link::membership::Membership;
use crate::link::route::{RouteError, Rtnetlink};
use crate::metrics::Metrics;
use crate::vips::{VipLeases, boot_time};

mod export;
mod fence;
mod fence_process;
mod reads;

use export::{ExportRole, Learning, lacks_flows};
use fence::Expiry;
#[cfg(test)]
pub(crate) use fence::TAKEN as EXIT_TABLE_TAKEN;
pub(crate) use fence::run as run_fence;
use fence_process::{FenceError, FenceProcess};
use reads::TableReads;

/// How often the lifetime is renewed.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);

const NOT_WRITTEN: &str = "routes of the VIPs not written; retrying";
const NOT_GUARDED: &str = "routes of the VIPs not guarded; they stay if this process is killed; retrying";
const TAKEN: &str = "another steerage-edge has this routing table; no routes of VIPs are kept; use another --route-table; retrying";

/// What the exporter follows.
#[derive(Clone, Debug)]
pub(crate) struct RouteInputs {
    /// The VIPs that the kernel's maps serve, without those that another machine on the link has.
    pub(crate) vips: watch::Receiver<BTreeSet<IpAddr>>,
    pub(crate) membership: watch::Receiver<Membership>,
    pub(crate) abilities: watch::Receiver<AbilityReport>,
    /// Of the engine.
    pub(crate) leaving: watch::Receiver<bool>,
    /// The hosts whose flow exceptions this host has. Without an exchange its sender is gone.
    pub(crate) heard: watch::Receiver<BTreeSet<Mac>>,
}

#[derive(Debug)]
pub(crate) struct RouteExporter {
    table: u32,
    /// How long the process waits once it has removed its routes at shutdown.
    withdraw_wait: Duration,
    /// The routes' lifetime while another host can serve.
    lifetime: Duration,
    inputs: RouteInputs,
    metrics: Metrics,
    netlink: Rtnetlink,
    leases: VipLeases,
    fence: Option<FenceProcess>,
    expiry: Duration,
    /// When another host could serve last.
    standby_at: Option<Instant>,
    /// Whether the VIPs are those of a plan of this process.
    is_known: bool,
    learning: Learning,
    /// The VIPs that have a route.
    present: BTreeSet<IpAddr>,
    reads: TableReads,
    /// What was logged last, so that it is logged once.
    problem: Option<String>,
}

impl RouteInputs {
    pub(crate) fn new(
        vips: &watch::Sender<BTreeSet<IpAddr>>,
        membership: &watch::Receiver<Membership>,
        abilities: &watch::Sender<AbilityReport>,
        leaving: &watch::Sender<bool>,
        heard: watch::Receiver<BTreeSet<Mac>>,
    ) -> Self {
        Self {
            vips: vips.subscribe(),
            membership: membership.clone(),
            abilities: abilities.subscribe(),
            leaving: leaving.subscribe(),
            heard,
        }
    }
}

impl RouteExporter {
    /// `lifetime`: that of the leases of VIPs while another host can serve.
    pub(crate) fn new(
        table: u32,
        withdraw_wait: Duration,
        lifetime: Duration,
        inputs: RouteInputs,
        leases: VipLeases,
        metrics: Metrics,
    ) -> Result<Self, RouteError> {
        let mut netlink = Rtnetlink::open()?;
        warn_of_other_tables(&mut netlink, Some(table))?;
        Ok(Self {
            table,
            withdraw_wait,
            lifetime,
            inputs,
            metrics,
            netlink,
            leases,
            fence: None,
            expiry: boot_time() + lifetime,
            standby_at: None,
            is_known: false,
            learning: Learning::default(),
            present: BTreeSet::new(),
            reads: TableReads::default(),
            problem: None,
        })
    }

    /// Runs until the process ends.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(RENEWAL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut is_leaving = false;
        let mut withdrawn_at = None;
        loop {
            tokio::select! {
                changed = self.inputs.leaving.changed(), if !is_leaving => match changed {
                    Ok(()) => is_leaving = *self.inputs.leaving.borrow_and_update(),
                    // The engine has failed, and the next process follows. The fence goes by the lifetime.
                    Err(_) => return Ok(()),
                },
                Ok(()) = self.inputs.vips.changed() => {}
                Ok(()) = self.inputs.membership.changed() => {}
                Ok(()) = self.inputs.heard.changed() => {}
                _ = ticks.tick() => {}
            }
            let had_routes = !self.present.is_empty();
            let role = tokio::task::block_in_place(|| self.update(is_leaving));
            if !is_leaving {
                continue;
            }
            if role == ExportRole::Withdrawing && had_routes && withdrawn_at.is_none() {
                tracing::info!("routes of the VIPs removed; waiting for the routers");
                withdrawn_at = Some(Instant::now());
                ticks.reset_after(self.withdraw_wait);
            }
            let is_over = |at: Instant| at.elapsed() >= self.withdraw_wait;
            if role != ExportRole::Withdrawing || withdrawn_at.is_none_or(is_over) {
                if !self.present.is_empty() {
                    self.leases.remain();
                }
                return Ok(());
            }
        }
    }

    fn update(&mut self, is_leaving: bool) -> ExportRole {
        let report = *self.inputs.abilities.borrow();
        let can_serve = report.ability(Instant::now()).can_serve;
        self.is_known |= report.is_programmed;
        let has_exchange = self.inputs.heard.has_changed().is_ok();
        let (role, has_standby) = {
            let membership = self.inputs.membership.borrow_and_update();
            let heard = self.inputs.heard.borrow_and_update();
            let lacks_flows = has_exchange && lacks_flows(&membership, &heard);
            let role = ExportRole::new(&membership, can_serve, is_leaving);
            if role == ExportRole::Serving && self.is_known {
                self.learning.update(lacks_flows, Instant::now());
            }
            (role, membership.has_standby)
        };
        if has_standby {
            self.standby_at = Some(Instant::now());
        }
        if matches!(role, ExportRole::Serving | ExportRole::Remaining) && !has_standby {
            // Before routers send packets: the engine may have ended, and with it the program's time, while others still could serve.
            self.leases.remain();
        }
        let guarded = self.guard(role, has_standby);
        // Routes that are not guarded are better than none, or than those of VIPs that are gone.
        let is_taken = matches!(guarded, Err(FenceError::Taken));
        let written = if is_taken { Ok(()) } else { self.sync(role, has_standby) };
        let failed = match (guarded, written) {
            (Ok(()), Ok(())) => None,
            (_, Err(error)) => Some((chain(&error), NOT_WRITTEN)),
            (Err(error @ FenceError::Taken), _) => Some((chain(&error), TAKEN)),
            (Err(error), _) => Some((chain(&error), NOT_GUARDED)),
        };
        if let Some((problem, effect)) = failed {
            self.metrics.failures.inc();
            if self.problem.as_ref() != Some(&problem) {
                tracing::error!(table = self.table, error = problem, "{effect}");
            }
            self.problem = Some(problem);
        } else if self.problem.take().is_some() {
            tracing::info!(table = self.table, "routes of the VIPs written and guarded again");
        }
        self.metrics.routes.set(i64::try_from(self.present.len()).unwrap_or(i64::MAX));
        role
    }

    /// Renews the lifetime, before a route is added that it has to guard.
    fn guard(&mut self, role: ExportRole, has_standby: bool) -> Result<(), FenceError> {
        let started = if self.fence.is_none() { self.start_fence() } else { Ok(()) };
        if matches!(started, Err(FenceError::Taken)) {
            // Its routes are not this process's.
            self.present.clear();
            self.reads = TableReads::default();
            return started;
        }
        let now = boot_time();
        if self.expiry <= now {
            // The fence has removed them, or is about to.
            self.reads.on_expiry(Instant::now());
        }
        let since_standby = self.standby_at.map(|at| at.elapsed());
        let since_standby = if has_standby { Some(Duration::ZERO) } else { since_standby };
        self.expiry = role.expiry(self.expiry, now, self.lifetime, since_standby);
        let Some(fence) = &mut self.fence else { return started };
        let renewed = fence.renew(Expiry { until: self.expiry, may_withdraw: has_standby });
        if renewed.is_err() {
            self.fence = None;
        }
        renewed
    }

    fn start_fence(&mut self) -> Result<(), FenceError> {
        let (fence, inherited) = FenceProcess::start()?;
        self.fence = Some(fence);
        if let (Some(inherited), None) = (inherited, self.reads.last()) {
            self.expiry = inherited.until;
        }
        Ok(())
    }

    fn sync(&mut self, role: ExportRole, has_standby: bool) -> Result<(), RouteError> {
        let now = Instant::now();
        if self.reads.is_due(now) {
            let own = self.netlink.exported()?.into_iter().filter(|(table, _)| *table == self.table);
            let is_first = self.reads.last().is_none();
            self.reads.on_read(now);
            self.present = own.map(|(_, vip)| vip).collect();
            if is_first && !self.present.is_empty() {
                tracing::info!(table = self.table, routes = self.present.len(), "adopted routes of VIPs");
            }
        }
        let lasts = self.expiry > boot_time();
        let vips = self.inputs.vips.borrow_and_update().clone();
        let wanted = role.wanted(lasts, self.is_known, &vips, &self.present);
        // New routes draw flows from other hosts.
        let may_add = self.learning.may_add(has_standby);
        let wanted = if may_add { wanted } else { &wanted & &self.present };
        let (is_changed, result) = write(&mut self.netlink, self.table, &wanted, &mut self.present);
        if is_changed {
            tracing::info!(
                table = self.table,
                routes = self.present.len(),
                ?role,
                "routes of the VIPs changed"
            );
        }
        result
    }
}

/// Makes `present`, the routes of the table, those that are wanted, as far as it can. Returns whether any was written.
fn write(
    netlink: &mut Rtnetlink,
    table: u32,
    wanted: &BTreeSet<IpAddr>,
    present: &mut BTreeSet<IpAddr>,
) -> (bool, Result<(), RouteError>) {
    let gone: Vec<_> = present.difference(wanted).copied().collect();
    let new: Vec<_> = wanted.difference(present).copied().collect();
    let (mut is_changed, mut failed) = (false, None);
    for vip in gone {
        match netlink.withdraw(table, vip) {
            Ok(()) => is_changed |= present.remove(&vip),
            Err(error) => failed = Some(error),
        }
    }
    for vip in new {
        match netlink.export(table, vip) {
            Ok(()) => is_changed |= present.insert(vip),
            Err(error) => failed = Some(error),
        }
    }
    (is_changed, failed.map_or(Ok(()), Err))
}

/// Removes the routes of all tables.
pub(crate) fn remove_all(netlink: &mut Rtnetlink) -> Result<(), RouteError> {
    for (table, vip) in netlink.exported()? {
        netlink.withdraw(table, vip)?;
    }
    Ok(())
}

/// Logs tables with routes that this process does not keep: routers send it traffic for as long as these are there.
pub(crate) fn warn_of_other_tables(netlink: &mut Rtnetlink, own: Option<u32>) -> Result<(), RouteError> {
    let tables: BTreeSet<_> = netlink.exported()?.into_iter().map(|(table, _)| table).collect();
    for table in tables.into_iter().filter(|table| Some(*table) != own) {
        tracing::warn!(
            table,
            "routes of VIPs that this process does not keep are in a table; unless another steerage-edge runs here, remove them: \
             ip route flush table {table} proto 83; ip -6 route flush table {table} proto 83"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    /// Each attempt fails, once a second.
    #[test]
    fn route_of_another_program_is_no_change() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let route = ["route", "add", "blackhole", "10.0.0.101/32", "table", "83", "proto", "static"];
            assert!(Command::new("ip").args(route).status().expect("ip").success());
            let mut netlink = Rtnetlink::open().expect("open");
            let wanted: BTreeSet<IpAddr> = [[10, 0, 0, 100], [10, 0, 0, 101]].map(IpAddr::from).into();
            let mut present = BTreeSet::new();
            for is_first in [true, false] {
                let (is_changed, result) = write(&mut netlink, 83, &wanted, &mut present);
                assert_eq!((is_changed, result.is_err(), present.len()), (is_first, true, 1));
            }
        });
    }
}
