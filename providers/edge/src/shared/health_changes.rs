// SPDX-License-Identifier: Apache-2.0
//! The health of load balancers' targets, and whom a change of it concerns.
//!
//! Thousands of load balancers can refer to one report, which changes with each node: their owners are notified only if something can be
//! said of them that was not said before.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use steerage_edge_api::{EdgeTargetHealthSpec, Shard};
use steerage_provider_api::Health;

use super::Shared;
use crate::drained;
use crate::entry::{Change, Entry};
use crate::health::{self, ActiveHosts, ReportSummary};
use crate::objects::{HealthContent, HostContent, LoadBalancerContent, addresses};

impl Shared {
    fn active_hosts(&self) -> ActiveHosts {
        self.hosts.cache.read(|rows| ActiveHosts::new(rows))
    }

    /// The health of the targets of the load balancer of this name.
    pub(crate) fn health(&self, name: &str) -> Health {
        let addresses = self.balancers.cache.get(name).map(|entry| addresses(&entry)).unwrap_or_default();
        let hosts = self.active_hosts();
        // Reports are named after the load balancer and the host.
        self.health.cache.read_prefix(&format!("{name}."), |rows, all| {
            let reports =
                rows.filter_map(spec).filter(|report| report.load_balancer.as_deref() == Some(name));
            health::health(&addresses, &hosts, reports, |shared| spec(all.get(&shared.to_owned())?))
        })
    }

    /// A host's report changed.
    pub(crate) fn on_health(&self, change: &Change<HealthContent>) {
        let (old, new) = (change.old.as_ref().and_then(spec), change.new.as_ref().and_then(spec));
        if old.map(ReportSummary::of) == new.map(ReportSummary::of) {
            return;
        }
        let (Some(entry), Some(report)) = (change.new.as_ref().or(change.old.as_ref()), new.or(old)) else {
            return;
        };
        let names = match &report.load_balancer {
            Some(name) => BTreeSet::from([name.clone()]),
            None => self.referring_to(&entry.name),
        };
        let hosts = self.active_hosts();
        let was_active = [old, new].into_iter().flatten().any(|report| report.active == Some(true));
        for entry in names.iter().filter_map(|name| self.balancers.cache.get(name)) {
            let has_address =
                addresses(&entry).iter().any(|address| hosts.of(*address) == Some(&report.host));
            if let Some(owner) = entry.owner.filter(|_| has_address || was_active) {
                self.notifier.send(&owner);
            }
        }
    }

    /// The load balancers whose reports refer to this one.
    fn referring_to(&self, shared: &str) -> BTreeSet<String> {
        self.health.cache.read(|rows| {
            let referring = rows
                .filter_map(spec)
                .filter(|report| report.shared_reports.iter().any(|name| name == shared));
            referring.filter_map(|report| report.load_balancer.clone()).collect()
        })
    }

    /// Sends the event `Drained` of each drained node for which it was not sent. Without a subscriber it is not sent, but by a later call.
    pub(crate) fn tell_of_drained_nodes(&self) {
        // Of some hosts alone nobody knows who answers for which addresses.
        if !self.hosts.cache.is_listed() {
            return;
        }
        let hosts = self.active_hosts();
        let mut now = self.hosts.cache.read(|rows| drained::drained(&hosts, rows));
        let mut told = self.drained.lock().unwrap_or_else(PoisonError::into_inner);
        now.retain(|node| told.contains(node) || self.notices.send(&drained::notice(node)));
        *told = now;
    }

    /// What a host says of itself changed: of some addresses the report of another host may count from now on.
    pub(crate) fn on_host(&self, change: &Change<HostContent>) {
        let Some(entry) = change.new.as_ref().or(change.old.as_ref()) else { return };
        self.tell_of_drained_nodes();
        let now = self.active_hosts();
        let before = now.clone().with(&entry.name, change.old.as_ref());
        let changed = now.with(&entry.name, change.new.as_ref()).differences(&before);
        if changed.is_empty() {
            return;
        }
        let is_concerned = |entry: &&Entry<LoadBalancerContent>| {
            addresses(entry).iter().any(|address| changed.contains(Shard::of(*address)))
        };
        let owners: Vec<_> = self
            .balancers
            .cache
            .read(|rows| rows.filter(is_concerned).filter_map(|entry| entry.owner.clone()).collect());
        self.notify(&owners);
    }
}

fn spec(entry: &Entry<HealthContent>) -> Option<&EdgeTargetHealthSpec> {
    entry.content.as_ref().ok().map(|content| &content.spec)
}
