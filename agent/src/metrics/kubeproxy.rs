// SPDX-License-Identifier: Apache-2.0
//! Metrics with kube-proxy's names and meaning, so that its dashboards and alerts keep working. docs/agent.md lists differences.

use std::time::{Duration, SystemTime};

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use steerage_process::prometheus_client::registry::{Registry, Unit};

/// The label `traffic_policy`.
type PolicyLabel = [(&'static str, &'static str); 1];
/// The label `code`.
type CodeLabel = [(&'static str, u16); 1];

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
    network_programming: Histogram,
    sync: Histogram,
    full_sync: Histogram,
    partial_sync: Histogram,
    last_sync: Gauge,
    last_queued: Gauge,
    endpoint_changes: Counter,
    endpoint_changes_pending: Gauge,
    service_changes: Counter,
    service_changes_pending: Gauge,
    failures: Counter,
    no_local_endpoints: Family<PolicyLabel, Gauge>,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
}

impl Default for KubeProxyMetrics {
    fn default() -> Self {
        Self {
            network_programming: programming_times(),
            sync: sync_times(),
            full_sync: sync_times(),
            partial_sync: sync_times(),
            last_sync: Gauge::default(),
            last_queued: Gauge::default(),
            endpoint_changes: Counter::default(),
            endpoint_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            failures: Counter::default(),
            no_local_endpoints: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
        }
    }
}

impl KubeProxyMetrics {
    /// Registers them; the registry gives the prefix `kubeproxy_`.
    pub fn register(&self, registry: &mut Registry) {
        let times = [
            (
                "network_programming_duration",
                "From a change of endpoints to the rules in the kernel",
                &self.network_programming,
            ),
            ("sync_proxy_rules_duration", "Time of a write to the kernel", &self.sync),
            ("sync_full_proxy_rules_duration", "Time of a write that compared all rules", &self.full_sync),
            ("sync_partial_proxy_rules_duration", "Time of a write of differences", &self.partial_sync),
        ];
        for (name, help, histogram) in times {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let stamps = [
            ("sync_proxy_rules_last_timestamp", "Unix time of the last successful write", &self.last_sync),
            (
                "sync_proxy_rules_last_queued_timestamp",
                "Unix time when a change last waited for a write",
                &self.last_queued,
            ),
        ];
        for (name, help, gauge) in stamps {
            registry.register_with_unit(name, help, Unit::Seconds, gauge.clone());
        }
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
            ("sync_proxy_rules_nftables_sync_failures", "Writes that failed", &self.failures),
        ];
        for (name, help, counter) in counts {
            registry.register(name, help, counter.clone());
        }
        registry.register(
            "sync_proxy_rules_no_local_endpoints",
            "Services of a policy Local that have endpoints, but none on this node",
            self.no_local_endpoints.clone(),
        );
        registry.register("proxy_healthz", "Answers of the node's /healthz", self.healthz.clone());
        registry.register("proxy_livez", "Answers of the node's /livez", self.livez.clone());
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

    /// A write begins.
    pub fn queued(&self) {
        self.last_queued.set(seconds_since_1970(SystemTime::now()));
    }

    /// A write failed.
    pub fn failed(&self) {
        self.failures.inc();
    }

    /// Everything that was pending is in the kernel: changes that began at `triggers`, after a write of `took`.
    pub fn synced(&self, full: bool, took: Duration, triggers: impl IntoIterator<Item = SystemTime>) {
        let now = SystemTime::now();
        for histogram in [&self.sync, if full { &self.full_sync } else { &self.partial_sync }] {
            histogram.observe(took.as_secs_f64());
        }
        for trigger in triggers {
            // The clock of the endpoint slice controller may be ahead.
            self.network_programming.observe(now.duration_since(trigger).unwrap_or_default().as_secs_f64());
        }
        self.last_sync.set(seconds_since_1970(now));
        self.settled();
    }

    /// Nothing is pending: all is written, or nothing had to be.
    pub fn settled(&self) {
        self.endpoint_changes_pending.set(0);
        self.service_changes_pending.set(0);
    }

    /// How many Services of a policy Local have endpoints, but none on this node.
    pub fn without_local_endpoints(&self, internal: usize, external: usize) {
        for (policy, count) in [("internal", internal), ("external", external)] {
            self.no_local_endpoints
                .get_or_create(&[("traffic_policy", policy)])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}

fn seconds_since_1970(time: SystemTime) -> i64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use steerage_process::prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn names_and_values_are_kube_proxys() {
        let metrics = KubeProxyMetrics::default();
        let mut registry = Registry::with_prefix("kubeproxy");
        metrics.register(&mut registry);
        metrics.service_changed();
        metrics.endpoints_changed();
        metrics.endpoints_changed();
        metrics.queued();
        metrics.without_local_endpoints(1, 2);
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        let before = text(&registry);
        let ago = SystemTime::now() - Duration::from_secs(3);
        let ahead = SystemTime::now() + Duration::from_hours(1);
        metrics.synced(false, Duration::from_millis(3), [ago, ahead]);
        metrics.failed();
        metrics.count_healthz(200);
        metrics.count_healthz(503);
        metrics.count_livez(200);
        let after = text(&registry);
        for (text, line) in [
            (&before, "sync_proxy_rules_endpoint_changes_pending 2"),
            (&before, "sync_proxy_rules_service_changes_pending 1"),
            (&after, "sync_proxy_rules_endpoint_changes_pending 0"),
            (&after, "sync_proxy_rules_endpoint_changes_total 2"),
            (&after, "sync_proxy_rules_service_changes_total 1"),
            (&after, "sync_proxy_rules_no_local_endpoints{traffic_policy=\"internal\"} 1"),
            (&after, "sync_proxy_rules_no_local_endpoints{traffic_policy=\"external\"} 2"),
            (&after, "sync_proxy_rules_nftables_sync_failures_total 1"),
            (&after, "sync_proxy_rules_duration_seconds_count 1"),
            (&after, "sync_partial_proxy_rules_duration_seconds_count 1"),
            (&after, "sync_full_proxy_rules_duration_seconds_count 0"),
            (&after, "network_programming_duration_seconds_count 2"),
            (&after, "proxy_healthz_total{code=\"200\"} 1"),
            (&after, "proxy_healthz_total{code=\"503\"} 1"),
            (&after, "proxy_livez_total{code=\"200\"} 1"),
            (&after, "network_programming_duration_seconds_bucket{le=\"2.0\"} 1"),
            (&after, "network_programming_duration_seconds_bucket{le=\"5.0\"} 2"),
        ] {
            assert!(text.contains(&format!("\nkubeproxy_{line}\n")), "no {line} in {text}");
        }
        let stamp = |name: &str| {
            let line = after.lines().find_map(|line| line.strip_prefix(&format!("kubeproxy_{name} ")));
            line.unwrap().parse::<i64>().unwrap()
        };
        assert!(stamp("sync_proxy_rules_last_timestamp_seconds") > 1_700_000_000);
        assert!(stamp("sync_proxy_rules_last_queued_timestamp_seconds") > 1_700_000_000);
    }
}
