// SPDX-License-Identifier: Apache-2.0
//! The packets that the rules dropped or rejected, read from the kernel at each scrape.

use std::fmt;

use steerage_model::Family;
use steerage_nft::Error;
use steerage_process::prometheus_client::collector::Collector;
use steerage_process::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use steerage_process::prometheus_client::metrics::MetricType;
use steerage_process::prometheus_client::metrics::counter::ConstCounter;
use steerage_process::prometheus_client::registry::Registry;

use crate::kernel::{DroppedPackets, dropped_packets};
use crate::rules::DropReason;

/// Reads the counters.
type Read = fn() -> Result<Vec<DroppedPackets>, Error>;

/// Registers the metric.
pub fn register_dropped_packets(registry: &mut Registry) {
    registry.register_collector(Box::new(Dropped { read: dropped_packets }));
}

/// Registers the metric with one sample: the reference page shows it without a kernel.
pub fn register_sample_dropped_packets(registry: &mut Registry) {
    let read =
        || Ok(vec![DroppedPackets { family: Family::V4, reason: DropReason::NoLocalEndpoint, packets: 0 }]);
    registry.register_collector(Box::new(Dropped { read }));
}

#[derive(Debug)]
struct Dropped {
    read: Read,
}

impl Collector for Dropped {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counted = (self.read)().unwrap_or_else(|error| {
            tracing::warn!(%error, "counters of dropped packets not read; leaving them out of the metrics");
            Vec::new()
        });
        // A descriptor without a value is no metric.
        if counted.is_empty() {
            return Ok(());
        }
        let help = "First packets of connections, and packets of no known connection, that the rules dropped or rejected; starts anew when the tables are replaced";
        let mut packets = encoder.encode_descriptor("dropped_packets", help, None, MetricType::Counter)?;
        for DroppedPackets { family, reason, packets: count } in counted {
            let labels = [("ip_family", family.to_string()), ("reason", reason.name().to_owned())];
            ConstCounter::new(count).encode(packets.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use steerage_process::prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn each_reason_has_a_counter_and_errors_none() {
        let text = |read: Read| {
            let mut registry = Registry::default();
            registry.register_collector(Box::new(Dropped { read }));
            let mut text = String::new();
            encode(&mut text, &registry).expect("writable");
            text
        };
        let read =
            || Ok(vec![DroppedPackets { family: Family::V6, reason: DropReason::Invalid, packets: 3 }]);
        assert!(
            text(read).contains("dropped_packets_total{ip_family=\"IPv6\",reason=\"invalid\"} 3"),
            "{}",
            text(read)
        );
        assert_eq!(text(|| Err(Error::StaleGeneration)), "# EOF\n");
    }
}
