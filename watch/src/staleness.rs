// SPDX-License-Identifier: Apache-2.0
//! The age of each watch's last data, so that its user knows when the store is no longer trustworthy.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::time::Instant;

/// When each watch last brought a response, an event or a bookmark. Clones share it.
///
/// API servers send a bookmark about once a minute: a limit on staleness must be longer.
#[derive(Clone, Debug, Default)]
pub struct Staleness {
    last: Arc<Mutex<BTreeMap<&'static str, Instant>>>,
}

impl Staleness {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Instant>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The watch of `kind` brought data now, or starts.
    pub fn record(&self, kind: &'static str) {
        self.lock().insert(kind, Instant::now());
    }

    /// When the watch of `kind` (its plural, such as `services`) last brought data, or started. `None` without such a watch.
    pub fn last_data(&self, kind: &str) -> Option<Instant> {
        self.lock().get(kind).copied()
    }

    /// The watch with the oldest data, and the age of that. `None` without a watch.
    pub fn longest(&self) -> Option<(&'static str, Duration)> {
        let now = Instant::now();
        let oldest = self.lock().iter().map(|(kind, at)| (*at, *kind)).min();
        oldest.map(|(at, kind)| (kind, now.saturating_duration_since(at)))
    }
}

/// The age of each watch's data, as it is at a scrape.
impl Collector for Staleness {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let last = self.lock().clone();
        // A descriptor without a value is no metric.
        if last.is_empty() {
            return Ok(());
        }
        let help = "Time since the watch last brought a list, an event or a bookmark. In a quiet cluster it grows to about a minute, then a bookmark comes";
        let mut ages = encoder.encode_descriptor("data_age_seconds", help, None, MetricType::Gauge)?;
        for (kind, at) in last {
            ConstGauge::new(at.elapsed().as_secs_f64()).encode(ages.encode_family(&[("kind", kind)])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn oldest_watch_is_reported() {
        let staleness = Staleness::default();
        assert_eq!(staleness.longest(), None);
        staleness.record("services");
        tokio::time::advance(Duration::from_secs(30)).await;
        staleness.record("nodes");
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(staleness.longest(), Some(("services", Duration::from_secs(35))));
        staleness.record("services");
        assert_eq!(staleness.longest(), Some(("nodes", Duration::from_secs(5))));
        assert_eq!(staleness.last_data("services"), Some(Instant::now()));
        assert_eq!(staleness.last_data("pods"), None);
        let (mut registry, mut text) = (Registry::with_prefix("watch"), String::new());
        registry.register_collector(Box::new(staleness));
        encode(&mut text, &registry).expect("text");
        assert!(text.contains("watch_data_age_seconds{kind=\"nodes\"} 5.0\n"), "{text}");
        assert!(text.contains("watch_data_age_seconds{kind=\"services\"} 0.0\n"), "{text}");
    }
}
