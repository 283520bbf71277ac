// SPDX-License-Identifier: Apache-2.0
//! The metrics of the host: its kernel, and the watches of its addresses and routes.

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::registry::Registry;

use crate::rules::{Feature, Features};

/// The metrics of the host. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct HostMetrics {
    features: Family<[(&'static str, &'static str); 1], Gauge>,
    watch_restarts: Family<[(&'static str, &'static str); 1], Counter>,
    /// Whether this node receives through the edge's tunnel.
    pub edge_tunnel_ready: Gauge,
    /// Whether it should, and does not.
    pub edge_tunnel_failed: Gauge,
}

impl HostMetrics {
    /// Notes what the kernel has.
    pub fn set_features(&self, found: &Features) {
        for feature in Feature::ALL {
            self.features.get_or_create(&[("feature", feature.name())]).set(i64::from(found.has(feature)));
        }
    }

    /// The counter of a watch of the host. It begins with 0 then.
    pub fn watch_restarts(&self, what: &'static str) -> Counter {
        self.watch_restarts.get_or_create(&[("watch", what)]).clone()
    }

    /// Registers them.
    pub fn register(self, registry: &mut Registry) {
        let help = "Whether the kernel has what the rules use, as found out at start";
        registry.register("kernel_feature", help, self.features);
        registry.register(
            "edge_tunnel_ready",
            "Whether this node receives what edge hosts off its link send (1): devices and tables of --edge-tunnel-vni exist; or not (0)",
            self.edge_tunnel_ready,
        );
        registry.register(
            "edge_tunnel_failed",
            "Whether this node should receive what edge hosts off its link send, and does not (1): the log says why; or not (0). 0 also \
             without --edge-tunnel-vni, and where the edge host that runs on the node has the port",
            self.edge_tunnel_failed,
        );
        registry.register(
            "host_watch_restarts",
            "Failures of watches of the host's `addresses` or `routes`, after which they are opened anew; only where the agent has such a watch",
            self.watch_restarts,
        );
    }
}
