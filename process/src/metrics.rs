// SPDX-License-Identifier: Apache-2.0
//! The registry of the process's metrics.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

mod usage;

/// All metrics of the process. Clones share one registry.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// A registry with the metrics of every process: its build and its resource usage.
    pub fn new(component: &'static str, version: &'static str) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(usage::Usage));
        registry.sub_registry_with_prefix(PREFIX).register(
            "build",
            "The program and its version",
            Info::new(vec![("component", component), ("version", version)]),
        );
        Self { registry: Arc::new(Mutex::new(registry)) }
    }

    /// Calls `fill` to register metrics, at any time. Names get the prefixes `steerage_` and `part`, which may be empty.
    pub fn register<T>(&self, part: &str, fill: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let ours = registry.sub_registry_with_prefix(PREFIX);
        if part.is_empty() { fill(ours) } else { fill(ours.sub_registry_with_prefix(part)) }
    }

    /// Calls `fill` to register metrics under another program's names, with the prefix `program`.
    pub fn register_as<T>(&self, program: &str, fill: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        fill(registry.sub_registry_with_prefix(program))
    }

    /// The metrics as `OpenMetrics` text.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(text)
    }
}

const PREFIX: &str = "steerage";

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    #[test]
    fn metrics_have_their_prefixes_and_an_end_mark() {
        let metrics = Metrics::new("controller", "1.2.3");
        let calls = Counter::<u64>::default();
        metrics.register("provider", |registry| registry.register("calls", "Calls made", calls.clone()));
        calls.inc_by(3);
        metrics
            .register_as("other", |registry| registry.register("syncs", "Syncs", Counter::<u64>::default()));
        let text = metrics.text().expect("text");
        assert!(text.contains("\nsteerage_provider_calls_total 3\n"), "{text}");
        assert!(text.contains("\nother_syncs_total 0\n"), "{text}");
        assert!(
            text.contains("steerage_build_info{component=\"controller\",version=\"1.2.3\"} 1\n"),
            "{text}"
        );
        assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
