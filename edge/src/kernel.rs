// SPDX-License-Identifier: Apache-2.0
//! The kernel's side of the engine: writes the maps, keeps the program attached and the multicast groups joined, and knows what of it
//! has failed. `engine` owns the one [`Kernel`] and decides what the maps should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::bail;
use steerage_edge_dataplane::{Dataplane, Error, State, StateChange};
use steerage_model::chain;

use crate::host::HostNetwork;
use crate::leftovers;
use crate::link::groups::Groups;
use crate::link::mac::Mac;
use crate::link::route::{Addresses, Link, RouteChanges, RouteError, Rtnetlink};
use crate::logged_problem::LoggedProblem;
use crate::metrics::Metrics;
use crate::peers::FlowExchange;
use crate::plan::Room;
use crate::reach::{RouteTable, Tunnel};
use crate::tunnel::TunnelKeeper;
use crate::vips::change_set;

mod route_reads;

use route_reads::RouteReads;

const NOT_WRITTEN: &str = "maps not written; the kernel forwards by the last ones; retrying";

#[derive(Debug)]
pub(crate) struct Kernel {
    netlink: Rtnetlink,
    route_changes: RouteChanges,
    route_reads: RouteReads,
    dataplane: Dataplane,
    groups: Groups,
    exchange: FlowExchange,
    /// `None` without a tunnel.
    tunnel: Option<TunnelKeeper>,
    metrics: Metrics,
    /// The VIPs of the last plan.
    planned_vips: Option<BTreeSet<IpAddr>>,
    /// The maps hold what the program needs: all of a state, which the attached program has, or this process has written.
    may_attach: bool,
    /// Whether packets pass by this process's program.
    is_attached: bool,
    /// Whether the maps hold the last state, and the program runs.
    is_programmed: bool,
    /// Rules and addresses of an earlier version may be there.
    has_leftovers: bool,
    leftovers_problem: LoggedProblem,
    /// Why not, if a write has failed.
    error: Option<String>,
}

impl Kernel {
    /// Reads, and changes nothing.
    pub(crate) fn new(
        dataplane: Dataplane,
        exchange: FlowExchange,
        tunnel: Option<TunnelKeeper>,
        metrics: Metrics,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            netlink: Rtnetlink::open()?,
            route_changes: RouteChanges::open()?,
            route_reads: RouteReads::default(),
            may_attach: dataplane.is_in_use(),
            dataplane,
            groups: Groups::default(),
            exchange,
            tunnel,
            metrics,
            planned_vips: None,
            is_attached: false,
            is_programmed: false,
            has_leftovers: true,
            leftovers_problem: LoggedProblem::default(),
            error: None,
        })
    }

    /// What an earlier process has left in the maps.
    pub(crate) fn adopted(&self) -> State {
        self.dataplane.written().cloned().unwrap_or_default()
    }

    pub(crate) fn room(&self) -> anyhow::Result<Room> {
        let sizes = self.dataplane.sizes()?;
        Ok(Room {
            listeners: sizes.services.saturating_sub(1).into(),
            prefixes: (sizes.prefixes / 2).into(),
            slots: (sizes.slots / 2).into(),
            members: (sizes.members / 2).into(),
        })
    }

    pub(crate) fn is_programmed(&self) -> bool {
        self.is_programmed
    }

    /// Why the kernel does not have the last change.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// The interface as it is now.
    pub(crate) fn link(&mut self, known: &Link) -> anyhow::Result<Link> {
        let link = match self.netlink.link(&known.name) {
            Err(error) if error.is_interrupted() => return Ok(known.clone()),
            link => link?,
        };
        match link {
            Some(link) if link.index == known.index => Ok(link),
            Some(_) => bail!("the interface {} was replaced while the edge was running", known.name),
            None => bail!("the interface {} is gone", known.name),
        }
    }

    /// The link's own address, with which the program answers.
    pub(crate) fn set_mac(&mut self, mac: Mac) {
        self.dataplane.set_mac(mac);
    }

    /// Reads the host's network. While it changes too fast to be read, it is as it is known.
    pub(crate) fn network(&mut self, known: &HostNetwork) -> Result<HostNetwork, RouteError> {
        match self.read_network(known) {
            Err(error) if error.is_interrupted() && !known.addresses.is_empty() => Ok(known.clone()),
            result => result,
        }
    }

    fn read_network(&mut self, known: &HostNetwork) -> Result<HostNetwork, RouteError> {
        let Addresses { own, groups } = self.netlink.addresses(known.index)?;
        self.groups.observe(groups);
        let routes = self.routes(&known.routes)?;
        let mtus = if self.tunnel.is_some() { self.mtus(known.index, &routes)? } else { BTreeMap::new() };
        Ok(HostNetwork {
            addresses: own,
            routes,
            mtus,
            tunnel: self.keep_tunnel(),
            neighbours: self.netlink.neighbours(known.index)?.into_iter().collect(),
            ..known.clone()
        })
    }

    /// The routes of the main table. They are read when something has changed on which they depend.
    fn routes(&mut self, known: &RouteTable) -> Result<RouteTable, RouteError> {
        if self.route_changes.take()? {
            self.route_reads.on_change();
        }
        let began = Instant::now();
        if !self.route_reads.is_due(began) {
            return Ok(known.clone());
        }
        let routes = known.updated(self.netlink.routes()?);
        self.route_reads.on_read(began, Instant::now());
        Ok(routes)
    }

    /// The MTUs of this interface and of those that routes lead to.
    fn mtus(&mut self, own: u32, routes: &RouteTable) -> Result<BTreeMap<u32, u32>, RouteError> {
        let mut mtus: BTreeMap<_, _> = self.netlink.mtus()?.into_iter().collect();
        mtus.retain(|index, _| *index == own || routes.devices().contains(index));
        Ok(mtus)
    }

    /// Makes the tunnel's device again if it is missing, and tells the program another index.
    fn keep_tunnel(&mut self) -> Tunnel {
        let Some(keeper) = &mut self.tunnel else { return Tunnel::Off };
        if keeper.keep() {
            self.dataplane.set_tunnel(keeper.index());
        }
        keeper.show(&self.metrics);
        keeper.state()
    }

    /// The number of packets that were forwarded to the target with this number.
    pub(crate) fn packets_to(&self, number: u32) -> Result<u64, Error> {
        Ok(self.dataplane.counts().target(number)?.packets)
    }

    /// The VIPs whose neighbour solicitations the interface has to receive: before it announces new ones.
    pub(crate) fn set_planned_vips(&mut self, link: &Link, vips: BTreeSet<IpAddr>) {
        if self.planned_vips.as_ref() != Some(&vips) {
            self.planned_vips = Some(vips);
            self.sync_groups(link);
        }
    }

    /// Whether the last plan has this VIP.
    pub(crate) fn is_planned(&self, vip: IpAddr) -> bool {
        self.planned_vips.as_ref().is_some_and(|planned| planned.contains(&vip))
    }

    /// As [`set_planned_vips`](Self::set_planned_vips) where these alone have changed.
    pub(crate) fn change_planned_vips(&mut self, link: &Link, changed: &BTreeMap<IpAddr, bool>) {
        let has_changed = self.planned_vips.as_mut().is_some_and(|planned| change_set(planned, changed));
        if has_changed && changed.keys().any(IpAddr::is_ipv6) {
            self.sync_groups(link);
        }
    }

    fn sync_groups(&mut self, link: &Link) {
        if let Some(vips) = &self.planned_vips
            && !self.groups.sync(&mut self.netlink, link.index, vips.iter())
        {
            self.metrics.failures.inc();
        }
    }

    /// Repairs what is not as it should be. Whether the maps must be written again.
    pub(crate) fn repair(&mut self, link: &Link) -> bool {
        self.sync_groups(link);
        if self.is_attached {
            match self.dataplane.is_attached() {
                Ok(is_attached) => self.is_attached = is_attached,
                Err(error) => {
                    self.on_error(&error, "not known whether the eBPF program is attached; retrying");
                }
            }
            if !self.is_attached {
                tracing::warn!(
                    interface = link.name,
                    "another program has removed the edge's eBPF program; attaching it again"
                );
            }
        }
        if self.may_attach && !self.is_attached {
            self.attach(link);
        }
        if self.is_programmed && self.has_leftovers {
            self.remove_leftovers();
        }
        self.error.is_some()
    }

    /// Writes the maps. Whether the kernel has all of it, by this process's program.
    pub(crate) fn write(&mut self, link: &Link, state: State) -> bool {
        if let Err(error) = self.change(|dataplane| dataplane.write(state)) {
            self.on_error(&error, NOT_WRITTEN);
            return false;
        }
        self.may_attach = true;
        self.is_programmed = self.is_attached || self.attach(link);
        if self.is_programmed {
            self.error = None;
        }
        self.is_programmed
    }

    /// Writes this alone. A failure shows in [`Kernel::error`], and then all is to be written again.
    pub(crate) fn write_change(&mut self, change: StateChange) {
        if change.is_empty() {
            return;
        }
        if let Err(error) = self.change(|dataplane| dataplane.write_change(change)) {
            self.on_error(&error, NOT_WRITTEN);
        }
    }

    /// Flows may have other slots than before, which other hosts have to know.
    fn change(&mut self, change: impl FnOnce(&mut Dataplane) -> Result<(), Error>) -> Result<(), Error> {
        let before = self.dataplane.changes();
        let result = change(&mut self.dataplane);
        if self.dataplane.changes() != before {
            self.exchange.tables_changed();
        }
        result
    }

    /// Tells the other hosts, of which there are so many, what they need to continue this host's flows. What it returns waits until
    /// they have it, or for `limit`.
    pub(crate) fn flush_flows(
        &self,
        hosts: usize,
        limit: Duration,
    ) -> impl Future<Output = ()> + Send + use<> {
        let flush = self.exchange.flush(limit);
        async move {
            match flush.await {
                Some(informed) if informed < hosts => tracing::warn!(
                    informed,
                    hosts,
                    "some edge hosts do not have this host's flow exceptions; connections whose slots have moved break there; leaving"
                ),
                Some(informed) if hosts > 0 => {
                    tracing::info!(informed, hosts, "the other edge hosts have this host's flow exceptions");
                }
                // Alone, or without the exchange, as the log said at the start.
                _ => {}
            }
        }
    }

    /// Lets packets pass by this process's program.
    fn attach(&mut self, link: &Link) -> bool {
        match self.dataplane.attach() {
            Ok(hook) => {
                self.is_attached = true;
                tracing::info!(interface = link.name, ?hook, "the eBPF program is attached");
            }
            Err(error) => self.on_error(&error, "the eBPF program is not attached; retrying"),
        }
        self.is_attached
    }

    /// Once this program forwards: the earlier version's rules would drop what they do not know.
    fn remove_leftovers(&mut self) {
        match leftovers::remove(&mut self.netlink) {
            Ok(()) => self.has_leftovers = false,
            Err(error) => {
                let error = format!("{error:#}");
                if self.leftovers_problem.set(Some(error.clone())) {
                    tracing::warn!(
                        error,
                        "the nftables table and VIP addresses of an earlier version are not removed; retrying"
                    );
                }
            }
        }
    }

    /// Logs an error when it is new: what failed is repeated every second.
    fn on_error(&mut self, error: &Error, message: &str) {
        let error = chain(error);
        self.metrics.failures.inc();
        if self.error.as_ref() != Some(&error) {
            tracing::error!(error, "{message}");
        }
        self.error = Some(error);
        self.is_programmed = false;
    }
}
