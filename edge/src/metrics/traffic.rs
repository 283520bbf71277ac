// SPDX-License-Identifier: Apache-2.0
//! The packets that the kernel's program has forwarded, dropped and answered, read from its counters at each scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use steerage_edge_dataplane::counters::add;
use steerage_edge_dataplane::packet::maps::{Counters, Event, ListenerKey};
use steerage_edge_dataplane::{Counts, Error};
use steerage_process::prometheus_client::collector::Collector;
use steerage_process::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use steerage_process::prometheus_client::metrics::MetricType;
use steerage_process::prometheus_client::metrics::counter::ConstCounter;
use steerage_process::prometheus_client::registry::Registry;

use crate::logged_problem::LoggedProblem;

/// What was counted.
#[derive(Clone, Debug, Default)]
struct Traffic {
    vips: BTreeMap<IpAddr, Counters>,
    targets: BTreeMap<IpAddr, Counters>,
    events: BTreeMap<Event, u64>,
}

/// What listeners have counted, and what those had that are gone: the sum of a VIP must not fall when it loses one.
#[derive(Debug, Default)]
struct Totals {
    last: BTreeMap<ListenerKey, Counters>,
    gone: BTreeMap<IpAddr, Counters>,
}

impl Totals {
    /// The sums of the VIPs that have a listener.
    fn update(&mut self, listeners: BTreeMap<ListenerKey, Counters>) -> BTreeMap<IpAddr, Counters> {
        for (key, last) in &self.last {
            // One that was added again counts from zero.
            if listeners.get(key).is_none_or(|counted| counted.packets < last.packets) {
                add(self.gone.entry(key.vip.into()).or_default(), last);
            }
        }
        let mut vips = BTreeMap::<IpAddr, Counters>::new();
        for (key, counted) in &listeners {
            add(vips.entry(key.vip.into()).or_default(), counted);
        }
        self.gone.retain(|vip, _| vips.contains_key(vip));
        for (vip, gone) in &self.gone {
            add(vips.entry(*vip).or_default(), gone);
        }
        self.last = listeners;
        vips
    }
}

fn read(counts: &Counts, totals: &Mutex<Totals>) -> Result<Traffic, Error> {
    let listeners = counts.listeners()?;
    let vips = totals.lock().unwrap_or_else(PoisonError::into_inner).update(listeners);
    Ok(Traffic { vips, targets: counts.targets()?, events: counts.events()? })
}

/// One of the counters.
type Value = fn(&Counters) -> u64;
type Read = Box<dyn Fn() -> Result<Traffic, Error> + Send + Sync>;

/// Registers the metrics of a data plane.
pub(crate) fn register_traffic(registry: &mut Registry, counts: Counts) {
    let totals = Mutex::new(Totals::default());
    register(registry, Box::new(move || read(&counts, &totals)));
}

/// Registers the metrics with a sample each: the reference page shows them without a kernel.
#[cfg(test)]
pub(crate) fn register_sample_traffic(registry: &mut Registry) {
    register(registry, Box::new(|| Ok(sample())));
}

#[cfg(test)]
fn sample() -> Traffic {
    let counted = Counters { packets: 3, bytes: 180, flows: 2, drops: 1 };
    Traffic {
        vips: [(IpAddr::from([10, 0, 0, 100]), counted)].into(),
        targets: [(IpAddr::from([10, 0, 0, 1]), counted)].into(),
        events: Event::ALL.map(|event| (event, 7)).into(),
    }
}

fn register(registry: &mut Registry, read: Read) {
    registry.register_collector(Box::new(TrafficCollector { read, problem: Mutex::default() }));
}

struct TrafficCollector {
    read: Read,
    problem: Mutex<LoggedProblem>,
}

impl fmt::Debug for TrafficCollector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TrafficCollector").finish_non_exhaustive()
    }
}

impl Collector for TrafficCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let result = (self.read)();
        let problem = result.as_ref().err().map(|error| steerage_model::chain(error));
        let is_news = self.problem.lock().unwrap_or_else(PoisonError::into_inner).set(problem.clone());
        if let Some(error) = problem.filter(|_| is_news) {
            tracing::warn!(error, "counters of packets not read; leaving them out of the metrics");
        }
        let traffic = result.unwrap_or_default();
        encode_counters(&mut encoder, "vip", "to the VIP", &traffic.vips)?;
        encode_counters(&mut encoder, "target", "to the target", &traffic.targets)?;
        let (dropped, answered): (Vec<_>, Vec<_>) =
            traffic.events.into_iter().partition(|(event, _)| event.is_drop());
        let help = "Packets to VIPs that this host dropped, by reason: malformed, no_listener, outside_source_ranges, no_target, foreign_source, unknown_fragment, hop_limit, too_big or unknown_icmp";
        encode_events(&mut encoder, "dropped_packets", help, "reason", &dropped)?;
        let help = "Requests on the link for VIPs that this host answered, by kind, and requests that it did not answer: its lease has ended, or another machine may have the VIP (lease_ended)";
        encode_events(&mut encoder, "link_requests", help, "kind", &answered)
    }
}

fn encode_counters(
    encoder: &mut DescriptorEncoder<'_>,
    label: &'static str,
    of: &str,
    counted: &BTreeMap<IpAddr, Counters>,
) -> fmt::Result {
    let mut metrics: Vec<(&str, String, Value)> = vec![
        ("packets", format!("Packets {of} that were forwarded"), |counters| counters.packets),
        ("bytes", format!("Bytes {of} that were forwarded, with link-layer headers"), |counters| {
            counters.bytes
        }),
    ];
    if label == "vip" {
        let help = format!("Connections and exchanges of datagrams {of} that began");
        metrics.push(("flows", help, |counters| counters.flows));
        let help = "Packets to the VIP's listeners that were dropped: outside source ranges, foreign source, or no target";
        metrics.push(("drops", help.to_owned(), |counters| counters.drops));
    }
    // A descriptor without a value is no metric.
    if counted.is_empty() {
        return Ok(());
    }
    for (name, help, value) in metrics {
        let name = format!("{label}_{name}");
        let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
        for (address, counters) in counted {
            let labels = [(label, address.to_string())];
            ConstCounter::new(value(counters)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_events(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    events: &[(Event, u64)],
) -> fmt::Result {
    if events.is_empty() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (event, count) in events {
        ConstCounter::new(*count).encode(family.encode_family(&[(label, event_name(*event))])?)?;
    }
    Ok(())
}

fn event_name(event: Event) -> &'static str {
    match event {
        Event::Malformed => "malformed",
        Event::NoListener => "no_listener",
        Event::OutsideSourceRanges => "outside_source_ranges",
        Event::NoTarget => "no_target",
        Event::ForeignSource => "foreign_source",
        Event::UnknownFragment => "unknown_fragment",
        Event::HopLimit => "hop_limit",
        Event::TooBig => "too_big",
        Event::UnknownIcmp => "unknown_icmp",
        Event::Arp => "arp",
        Event::Neighbour => "neighbour_solicitation",
        Event::Echo => "echo",
        Event::LeaseEnded => "lease_ended",
    }
}

#[cfg(test)]
mod tests {
    use steerage_process::prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn sum_of_a_vip_does_not_fall_when_it_loses_a_listener() {
        let vip = IpAddr::from([10, 0, 0, 100]);
        let of = |listeners: &[(u16, u64)]| {
            let counted = |packets| Counters { packets, ..Counters::default() };
            listeners
                .iter()
                .map(|(port, packets)| (ListenerKey::new(vip, 6, *port), counted(*packets)))
                .collect()
        };
        let mut totals = Totals::default();
        let mut packets =
            |listeners: &[(u16, u64)]| totals.update(of(listeners)).get(&vip).map(|sum| sum.packets);
        assert_eq!(packets(&[(80, 100), (443, 10)]), Some(110));
        assert_eq!(packets(&[(80, 150)]), Some(160), "443 is gone");
        assert_eq!(packets(&[(80, 150), (443, 1)]), Some(161), "and counts anew");
        assert_eq!(packets(&[(80, 3), (443, 1)]), Some(164), "80 was added again between two scrapes");
        assert_eq!(packets(&[]), None);
        assert_eq!(packets(&[(80, 5)]), Some(5), "the VIP is another load balancer's");
    }

    #[test]
    fn vips_targets_and_reasons_have_counters_and_errors_none() {
        let text = |read: Read| {
            let mut registry = Registry::default();
            register(&mut registry, read);
            let mut text = String::new();
            encode(&mut text, &registry).expect("writable");
            text
        };
        let shown = text(Box::new(|| Ok(sample())));
        for line in [
            "vip_packets_total{vip=\"10.0.0.100\"} 3",
            "vip_bytes_total{vip=\"10.0.0.100\"} 180",
            "vip_drops_total{vip=\"10.0.0.100\"} 1",
            "target_packets_total{target=\"10.0.0.1\"} 3",
            "dropped_packets_total{reason=\"no_listener\"} 7",
            "link_requests_total{kind=\"arp\"} 7",
            "link_requests_total{kind=\"lease_ended\"} 7",
        ] {
            assert!(shown.contains(line), "{line} in {shown}");
        }
        assert!(!text(Box::new(|| Err(Error::Missing("map")))).contains("total"));
    }
}
