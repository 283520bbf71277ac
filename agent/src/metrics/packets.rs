// SPDX-License-Identifier: Apache-2.0
//! The packets that the rules dropped, rejected or forwarded to other nodes, read from the kernel at each scrape.

use std::fmt;

use steerage_model::Family;
use steerage_nft::Error;
use steerage_process::prometheus_client::collector::Collector;
use steerage_process::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use steerage_process::prometheus_client::metrics::MetricType;
use steerage_process::prometheus_client::metrics::counter::ConstCounter;
use steerage_process::prometheus_client::registry::Registry;

use crate::kernel::{CountedPackets, DroppedPackets, counted_packets};
use crate::rules::DropReason;

/// Reads the counters.
type Read = fn() -> Result<CountedPackets, Error>;

/// Registers the metrics.
pub fn register_counted_packets(registry: &mut Registry) {
    registry.register_collector(Box::new(Counted { read: counted_packets }));
}

/// Registers the metrics with one sample each: the reference page shows them without a kernel.
pub fn register_sample_counted_packets(registry: &mut Registry) {
    let read = || {
        let reason = DropReason::NoLocalEndpoint;
        Ok(CountedPackets {
            dropped: vec![DroppedPackets { family: Family::V4, reason, packets: 0 }],
            forwarded: vec![(Family::V4, 0)],
            affinity_limited: vec![(Family::V4, 0)],
        })
    };
    registry.register_collector(Box::new(Counted { read }));
}

#[derive(Debug)]
struct Counted {
    read: Read,
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counted = (self.read)().unwrap_or_else(|error| {
            tracing::warn!(%error, "counters of packets not read; leaving them out of the metrics");
            CountedPackets::default()
        });
        let help = "Packets to a load balancer's address that were forwarded to a node with an endpoint, because this one had none; starts anew when the tables are replaced";
        encode_families(&mut encoder, "forwarded_packets", help, &counted.forwarded)?;
        let help = "Packets of connections to Services with session affinity whose client was not remembered, because its namespace had added too many clients; starts anew when the tables are replaced";
        encode_families(&mut encoder, "affinity_limited_packets", help, &counted.affinity_limited)?;
        if counted.dropped.is_empty() {
            return Ok(());
        }
        let help = "First packets of connections, and packets of no known connection, that the rules dropped or rejected; starts anew when the tables are replaced";
        let mut packets = encoder.encode_descriptor("dropped_packets", help, None, MetricType::Counter)?;
        for DroppedPackets { family, reason, packets: count } in counted.dropped {
            let labels = [("ip_family", family.to_string()), ("reason", reason.name().to_owned())];
            ConstCounter::new(count).encode(packets.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// A counter by family, unless there is none: a descriptor without a value is no metric.
fn encode_families(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    counts: &[(Family, u64)],
) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    let mut packets = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (family, count) in counts {
        let labels = [("ip_family", family.to_string())];
        ConstCounter::new(*count).encode(packets.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use steerage_process::prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn each_reason_has_a_counter_and_errors_none() {
        let text = |read: Read| {
            let mut registry = Registry::default();
            registry.register_collector(Box::new(Counted { read }));
            let mut text = String::new();
            encode(&mut text, &registry).expect("writable");
            text
        };
        let read = || {
            Ok(CountedPackets {
                dropped: vec![DroppedPackets { family: Family::V6, reason: DropReason::Invalid, packets: 3 }],
                forwarded: vec![(Family::V4, 5)],
                affinity_limited: vec![(Family::V6, 7)],
            })
        };
        for sample in [
            "dropped_packets_total{ip_family=\"IPv6\",reason=\"invalid\"} 3",
            "forwarded_packets_total{ip_family=\"IPv4\"} 5",
            "affinity_limited_packets_total{ip_family=\"IPv6\"} 7",
        ] {
            assert!(text(read).contains(sample), "{}", text(read));
        }
        let none = || Ok(CountedPackets::default());
        assert_eq!(text(none), "# EOF\n");
        assert_eq!(text(|| Err(Error::StaleGeneration)), "# EOF\n");
    }
}
