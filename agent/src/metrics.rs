// SPDX-License-Identifier: Apache-2.0
//! The agent's metrics. Names have the prefix `steerage_agent_`, except those of kube-proxy.

mod foreign;
mod host;
mod kubeproxy;
mod packets;
mod pending;
mod statements;

pub use foreign::{ForeignChanges, ForeignTables};
pub use host::HostMetrics;
pub use kubeproxy::KubeProxyMetrics;
pub use packets::{register_counted_packets, register_sample_counted_packets};
pub use pending::PendingMetrics;
pub use statements::{StatementKind, StatementMetrics};

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::metrics::histogram::Histogram;
use steerage_process::prometheus_client::registry::{Registry, Unit};

use crate::kernel::FlowWalk;

/// The agent's metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Changes written to the kernel.
    pub writes: Counter,
    /// Writes that compared everything.
    pub full_writes: Counter,
    /// Writes that failed.
    pub failures: Counter,
    /// Elements written.
    pub elements: Counter,
    /// Time of a write.
    pub write_duration: Histogram,
    /// Changes of the agent's tables by other programs.
    pub foreign_changes: ForeignChanges,
    /// Tables of other programs that harm Services, or may.
    pub foreign_tables: ForeignTables,
    /// Conntrack entries deleted.
    pub flows: Counter,
    /// Searches of conntrack, and those that failed.
    pub flow_walks: [Counter; 2],
    /// Frontends served.
    pub frontends: Gauge,
    /// External IPs that are not served.
    pub refused_external_ips: Gauge,
    /// Frontends of Services that are not served, because another Service is served there.
    pub shadowed_frontends: Gauge,
    /// Services that need more elements than they may have.
    pub reduced_services: Gauge,
    /// Nodes to which no packet can be forwarded.
    pub unreachable_peers: Gauge,
    /// Health-check ports.
    pub health_ports: Gauge,
    /// Statements of the node.
    pub statements: StatementMetrics,
    /// Time of the last successful write, in seconds since 1970.
    pub last_write: Gauge,
    /// What is known of the host.
    pub host: HostMetrics,
    /// kube-proxy's metrics; registered separately.
    pub kube_proxy: KubeProxyMetrics,
}

impl Metrics {
    /// Registers them.
    pub fn new(registry: &mut Registry) -> Self {
        // 50 µs to 26 s.
        let times =
            steerage_process::prometheus_client::metrics::histogram::exponential_buckets(0.000_05, 2.0, 20);
        let metrics = Self {
            writes: Counter::default(),
            full_writes: Counter::default(),
            failures: Counter::default(),
            elements: Counter::default(),
            write_duration: Histogram::new(times),
            foreign_changes: ForeignChanges::default(),
            foreign_tables: ForeignTables::default(),
            flows: Counter::default(),
            flow_walks: Default::default(),
            frontends: Gauge::default(),
            refused_external_ips: Gauge::default(),
            shadowed_frontends: Gauge::default(),
            reduced_services: Gauge::default(),
            unreachable_peers: Gauge::default(),
            health_ports: Gauge::default(),
            statements: StatementMetrics::default(),
            last_write: Gauge::default(),
            host: HostMetrics::default(),
            kube_proxy: KubeProxyMetrics::default(),
        };
        let Self {
            writes,
            full_writes,
            failures,
            elements,
            write_duration,
            foreign_changes,
            foreign_tables,
            flows,
            flow_walks: [walks, failed_walks],
            frontends,
            refused_external_ips,
            shadowed_frontends,
            reduced_services,
            unreachable_peers,
            health_ports,
            statements,
            last_write,
            host,
            kube_proxy: _,
        } = metrics.clone();
        registry.register("writes", "Writes to nftables", writes);
        registry.register("full_writes", "Writes that compared all rules with the kernel's", full_writes);
        registry.register("write_failures", "Failed writes to nftables", failures);
        registry.register("elements_written", "Elements of nftables sets and maps written", elements);
        registry.register_with_unit(
            "write_duration",
            "Time of a write to nftables",
            Unit::Seconds,
            write_duration,
        );
        foreign_changes.register(registry);
        foreign_tables.register(registry);
        registry.register(
            "stale_flows_deleted",
            "Conntrack entries deleted: UDP flows whose endpoint is gone, handshakes that passed without rules for them, and connections that a changed table may have admitted",
            flows,
        );
        registry.register("conntrack_walks", "Searches of conntrack for stale flows", walks);
        registry.register(
            "conntrack_walk_failures",
            "Failed searches of conntrack, which are repeated",
            failed_walks,
        );
        registry.register("frontends", "Addresses with protocol and port that are served", frontends);
        registry.register(
            "refused_external_ips",
            "External IPs that are not served at one port of their Service or more, because they are reserved or denied",
            refused_external_ips,
        );
        registry.register(
            "shadowed_frontends",
            "Addresses with protocol and port of Services that are not served, because another Service is served there",
            shadowed_frontends,
        );
        registry.register(
            "reduced_services",
            "Services of which only a part of the endpoints is served, because they need more elements than they may have, or a list has no more endpoints",
            reduced_services,
        );
        registry.register(
            "unreachable_peer_nodes",
            "Nodes to which this one cannot forward packets that find no local endpoint: neither on the link nor behind one of --forward-tunnel-devices",
            unreachable_peers,
        );
        registry.register("health_ports", "Health-check node ports that are open", health_ports);
        statements.register(registry);
        registry.register_with_unit(
            "last_write_timestamp",
            "Unix time of the last successful write",
            Unit::Seconds,
            last_write,
        );
        host.register(registry);
        metrics
    }

    /// Counts a search of conntrack.
    pub fn walked(&self, walk: FlowWalk) {
        let [walks, failed] = &self.flow_walks;
        walks.inc();
        match walk {
            FlowWalk::Done(families) => {
                for family in families {
                    self.flows.inc_by(u64::try_from(family.deleted).unwrap_or(u64::MAX));
                    self.kube_proxy.searched(&family);
                }
            }
            FlowWalk::Failed => {
                failed.inc();
            }
        }
    }
}
