// SPDX-License-Identifier: Apache-2.0
//! The number of addresses of each pool, and how many are assigned. Counted at each scrape from the caches' index, which holds
//! ranges: no load balancer is looked at. A pool that is deleted has no series any more.

use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use steerage_model::Family;

use crate::pools::PoolUsage;
use crate::shared::Shared;

/// Registers the metrics of these pools. Does not keep `shared` alive.
pub(crate) fn register(shared: &Arc<Shared>, registry: &mut Registry) {
    registry.register_collector(Box::new(PoolMetrics { shared: Arc::downgrade(shared) }));
}

/// Registers the metrics with a sample of each, for the generated reference: without a pool there are none.
pub fn register_sample_metrics(registry: &mut Registry) {
    registry.register_collector(Box::new(Sample));
}

#[derive(Debug)]
struct PoolMetrics {
    shared: Weak<Shared>,
}

impl Collector for PoolMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode(encoder, &self.shared.upgrade().map(|shared| shared.pool_usages()).unwrap_or_default())
    }
}

#[derive(Debug)]
struct Sample;

impl Collector for Sample {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let usage = PoolUsage { family: Family::V4, addresses: 1, assigned: 0 };
        encode(encoder, &[("default".to_owned(), usage)])
    }
}

fn encode(mut encoder: DescriptorEncoder<'_>, usages: &[(String, PoolUsage)]) -> fmt::Result {
    // A descriptor without a value is no metric.
    if usages.is_empty() {
        return Ok(());
    }
    let mut gauge = |name: &str, help: &str, value: fn(&PoolUsage) -> u64| {
        let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (pool, usage) in usages {
            let family = usage.family.to_string();
            let labels = [("pool", pool.as_str()), ("family", family.as_str())];
            ConstGauge::new(value(usage)).encode(gauges.encode_family(&labels)?)?;
        }
        Ok(())
    };
    gauge(
        "address_pool_addresses",
        "Addresses of each AddressPool, by pool and family (IPv4 or IPv6)",
        |usage| usage.addresses,
    )?;
    gauge(
        "address_pool_addresses_assigned",
        "Addresses of each AddressPool that load balancers have, by pool and family",
        |usage| usage.assigned,
    )
}

#[cfg(test)]
mod tests {
    use std::io;

    use kube::Client;
    use kube::client::Body;
    use prometheus_client::encoding::text;
    use serde_json::{Value, json};
    use steerage_watch::Event;

    use super::*;
    use crate::entry::Entry;
    use crate::index::References;
    use crate::objects::Objects;

    fn list<S: Clone + References + serde::de::DeserializeOwned>(
        objects: &Objects<S>,
        all: &[(&str, Value)],
    ) {
        let entry = |(name, spec): &(&str, Value)| {
            let metadata = json!({"name": name, "namespace": "system", "uid": name, "resourceVersion": "1"});
            let object = json!({"metadata": metadata, "spec": spec});
            Entry::parse(&object.to_string()).expect("an object")
        };
        objects.cache.apply(Event::Init);
        for object in all {
            objects.cache.apply(Event::InitApply(entry(object)));
        }
        objects.cache.apply(Event::InitDone);
    }

    fn scrape(registry: &Registry) -> Vec<String> {
        let mut text = String::new();
        text::encode(&mut text, registry).expect("text");
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[tokio::test]
    async fn pools_show_their_addresses_from_the_first_list_until_they_are_deleted() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            Err::<http::Response<Body>, _>(io::Error::other("no call is made"))
        });
        let shared = Arc::new(Shared::new(&Client::new(service, "default"), "system"));
        let mut registry = Registry::default();
        register(&shared, &mut registry);
        let both = json!({"addresses": ["10.9.0.1-10.9.0.20", "fd00::1-fd00::4"]});
        list(&shared.pools, &[("lab", both), ("own", json!({"addresses": ["10.8.0.1"]}))]);
        assert_eq!(scrape(&registry), [""; 0], "without the load balancers, all addresses seem free");
        list(
            &shared.balancers,
            &[
                ("lb-a", json!({"addresses": ["10.9.0.1", "fd00::1"]})),
                ("lb-b", json!({"addresses": ["10.9.0.7"]})),
                ("lb-c", json!({"addresses": ["10.7.0.7"]})),
            ],
        );
        let expected = [
            "address_pool_addresses{pool=\"lab\",family=\"IPv4\"} 20",
            "address_pool_addresses{pool=\"lab\",family=\"IPv6\"} 4",
            "address_pool_addresses{pool=\"own\",family=\"IPv4\"} 1",
            "address_pool_addresses_assigned{pool=\"lab\",family=\"IPv4\"} 2",
            "address_pool_addresses_assigned{pool=\"lab\",family=\"IPv6\"} 1",
            "address_pool_addresses_assigned{pool=\"own\",family=\"IPv4\"} 0",
        ];
        assert_eq!(scrape(&registry), expected);
        let gone = Event::Delete { key: "lab".to_owned(), version: "2".to_owned() };
        shared.pools.cache.apply(gone);
        assert_eq!(scrape(&registry), [expected[2], expected[5]]);
        drop(shared);
        assert_eq!(scrape(&registry), [""; 0]);
    }
}
