// SPDX-License-Identifier: Apache-2.0
//! Metrics with kube-proxy 1.36's names, labels and meaning, so that its dashboards and alerts keep working. docs/agent.md lists
//! differences.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use steerage_model::{Family as IpFamily, Key};
use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use steerage_process::prometheus_client::registry::{Registry, Unit};

use crate::kernel::{FamilyWalk, FamilyWrite};
use crate::plan::LocalGaps;

/// The label `ip_family`.
type FamilyLabel = [(&'static str, &'static str); 1];
/// The labels `traffic_policy` and `ip_family`.
type PolicyLabels = [(&'static str, &'static str); 2];
/// The label `code`.
type CodeLabel = [(&'static str, u16); 1];
/// A histogram per family of addresses.
type Times = Family<FamilyLabel, Histogram, fn() -> Histogram>;

/// kube-proxy's values of the label `ip_family` are those of `spec.ipFamilies`.
fn of(family: IpFamily) -> FamilyLabel {
    let name = match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    };
    [("ip_family", name)]
}

/// kube-proxy's buckets, from 1 ms to 16 s, and finer ones below.
fn sync_times() -> Histogram {
    Histogram::new(exponential_buckets(0.000_062_5, 2.0, 19))
}

/// kube-proxy's buckets (0.25 s and 0.5 s; then steps of 1 s to one minute, 5 s to two, 30 s to five), and finer ones below.
fn programming_times() -> Histogram {
    let fine = [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1];
    let steps = |from: u32, step: u32, count: u32| (0..count).map(move |n| f64::from(from + n * step));
    let coarse = steps(1, 1, 59).chain(steps(60, 5, 12)).chain(steps(120, 30, 7));
    Histogram::new(fine.into_iter().chain([0.25, 0.5]).chain(coarse))
}

/// The metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct KubeProxyMetrics {
    network_programming: Times,
    sync: Times,
    full_sync: Times,
    partial_sync: Times,
    conntrack: Times,
    conntrack_deleted: Family<FamilyLabel, Counter>,
    last_sync: Family<FamilyLabel, Gauge>,
    last_queued: Family<FamilyLabel, Gauge>,
    endpoint_changes: Counter,
    endpoint_changes_pending: Gauge,
    service_changes: Counter,
    service_changes_pending: Gauge,
    failures: Family<FamilyLabel, Counter>,
    cleanup_failures: Family<FamilyLabel, Counter>,
    no_local_endpoints: Family<PolicyLabels, Gauge>,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
}

impl Default for KubeProxyMetrics {
    fn default() -> Self {
        let times = || Times::new_with_constructor(sync_times);
        Self {
            network_programming: Times::new_with_constructor(programming_times),
            sync: times(),
            full_sync: times(),
            partial_sync: times(),
            conntrack: times(),
            conntrack_deleted: Family::default(),
            last_sync: Family::default(),
            last_queued: Family::default(),
            endpoint_changes: Counter::default(),
            endpoint_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            failures: Family::default(),
            cleanup_failures: Family::default(),
            no_local_endpoints: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
        }
    }
}

impl KubeProxyMetrics {
    /// Registers them; the registry gives the prefix `kubeproxy_`.
    pub fn register(&self, registry: &mut Registry) {
        self.register_times(registry);
        self.register_changes(registry);
        let failures = [
            ("sync_proxy_rules_nftables_sync_failures", "Writes that failed", &self.failures),
            (
                "sync_proxy_rules_nftables_cleanup_failures",
                "Replaced tables whose predecessor's last chains were not deleted",
                &self.cleanup_failures,
            ),
            (
                "conntrack_reconciler_deleted_entries",
                "Conntrack entries deleted because the rules no longer lead where they lead",
                &self.conntrack_deleted,
            ),
        ];
        for (name, help, counter) in failures {
            registry.register(name, help, counter.clone());
        }
        // A gauge, whatever its name says; kube-proxy's.
        registry.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Ports of Services of a policy Local that have endpoints, but none on this node",
            self.no_local_endpoints.clone(),
        );
        registry.register("proxy_healthz", "Answers of the node's /healthz", self.healthz.clone());
        registry.register("proxy_livez", "Answers of the node's /livez", self.livez.clone());
    }

    fn register_times(&self, registry: &mut Registry) {
        let times = [
            (
                "network_programming_duration",
                "From a change of endpoints to the rules in the kernel",
                &self.network_programming,
            ),
            ("sync_proxy_rules_duration", "Time of a write to the family's table", &self.sync),
            (
                "sync_full_proxy_rules_duration",
                "Time of a write to the family's table that compared all rules",
                &self.full_sync,
            ),
            (
                "sync_partial_proxy_rules_duration",
                "Time of a write of differences to the family's table",
                &self.partial_sync,
            ),
            (
                "conntrack_reconciler_sync_duration",
                "Time of a search of conntrack for stale flows of the family",
                &self.conntrack,
            ),
        ];
        for (name, help, histogram) in times {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let stamps = [
            (
                "sync_proxy_rules_last_timestamp",
                "Unix time of the last successful write, whichever family it changed",
                &self.last_sync,
            ),
            (
                "sync_proxy_rules_last_queued_timestamp",
                "Unix time when a change last waited for a write",
                &self.last_queued,
            ),
        ];
        for (name, help, gauge) in stamps {
            registry.register_with_unit(name, help, Unit::Seconds, gauge.clone());
        }
    }

    fn register_changes(&self, registry: &mut Registry) {
        let pending = [
            (
                "sync_proxy_rules_endpoint_changes_pending",
                "Changes of slices not yet written",
                &self.endpoint_changes_pending,
            ),
            (
                "sync_proxy_rules_service_changes_pending",
                "Changes of Services not yet written",
                &self.service_changes_pending,
            ),
        ];
        for (name, help, gauge) in pending {
            registry.register(name, help, gauge.clone());
        }
        let counts = [
            ("sync_proxy_rules_endpoint_changes", "Changes of slices", &self.endpoint_changes),
            ("sync_proxy_rules_service_changes", "Changes of Services", &self.service_changes),
        ];
        for (name, help, counter) in counts {
            registry.register(name, help, counter.clone());
        }
    }

    /// Shows the counters and histograms of these families from the start, so that the first event is an increase.
    pub fn show(&self, families: &[IpFamily]) {
        for family in families.iter().map(|family| of(*family)) {
            for times in
                [&self.network_programming, &self.sync, &self.full_sync, &self.partial_sync, &self.conntrack]
            {
                drop(times.get_or_create(&family));
            }
            for counter in [&self.conntrack_deleted, &self.failures, &self.cleanup_failures] {
                drop(counter.get_or_create(&family));
            }
        }
    }

    /// `/healthz` of the node was answered with this status code.
    pub fn count_healthz(&self, code: u16) {
        self.healthz.get_or_create(&[("code", code)]).inc();
    }

    /// `/livez` of the node was answered with this status code.
    pub fn count_livez(&self, code: u16) {
        self.livez.get_or_create(&[("code", code)]).inc();
    }

    /// A Service changed.
    pub fn service_changed(&self) {
        self.service_changes.inc();
        self.service_changes_pending.inc();
    }

    /// A slice changed.
    pub fn endpoints_changed(&self) {
        self.endpoint_changes.inc();
        self.endpoint_changes_pending.inc();
    }

    /// A write of these families begins, as far as they differ.
    pub fn queued(&self, families: &[IpFamily]) {
        stamp(&self.last_queued, families);
    }

    /// A table was written, or not.
    pub fn wrote(&self, write: &FamilyWrite) {
        let FamilyWrite { family, full, took, worked, cleaned_up } = *write;
        let family = of(family);
        if !cleaned_up {
            self.cleanup_failures.get_or_create(&family).inc();
        }
        if !worked {
            self.failures.get_or_create(&family).inc();
            return;
        }
        for times in [&self.sync, if full { &self.full_sync } else { &self.partial_sync }] {
            times.get_or_create(&family).observe(took.as_secs_f64());
        }
    }

    /// Everything that was pending is in the kernel: changes of slices of a family that began at these times.
    pub fn synced(&self, families: &[IpFamily], triggers: impl IntoIterator<Item = (IpFamily, SystemTime)>) {
        let now = SystemTime::now();
        for (family, trigger) in triggers {
            // The clock of the endpoint slice controller may be ahead.
            let elapsed = now.duration_since(trigger).unwrap_or_default();
            self.network_programming.get_or_create(&of(family)).observe(elapsed.as_secs_f64());
        }
        stamp(&self.last_sync, families);
        self.settled();
    }

    /// Nothing is pending: all is written, or nothing had to be.
    pub fn settled(&self) {
        self.endpoint_changes_pending.set(0);
        self.service_changes_pending.set(0);
    }

    /// How many ports of Services of a policy Local have endpoints, but none on this node.
    pub fn without_local_endpoints(&self, families: &[IpFamily], gaps: &BTreeMap<Key, LocalGaps>) {
        for family in families {
            let [(_, ip_family)] = of(*family);
            let counts = gaps.values().map(|gaps| gaps.count(*family));
            let (internal, external) = counts.fold((0, 0), |sum, (i, e)| (sum.0 + i, sum.1 + e));
            for (policy, count) in [("internal", internal), ("external", external)] {
                let labels = [("traffic_policy", policy), ("ip_family", ip_family)];
                self.no_local_endpoints.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
            }
        }
    }

    /// Conntrack was searched for stale flows of a family.
    pub fn searched(&self, walk: &FamilyWalk) {
        let family = of(walk.family);
        self.conntrack.get_or_create(&family).observe(walk.took.as_secs_f64());
        self.conntrack_deleted.get_or_create(&family).inc_by(u64::try_from(walk.deleted).unwrap_or(u64::MAX));
    }
}

fn stamp(times: &Family<FamilyLabel, Gauge>, families: &[IpFamily]) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs);
    for family in families {
        times.get_or_create(&of(*family)).set(i64::try_from(now).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests;
