// SPDX-License-Identifier: Apache-2.0
//! What the kube-proxy metrics need to know between a change and the write that contains it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use steerage_model::Key;

use super::KubeProxyMetrics;
use crate::plan::ServicePlan;

/// Collected until the next successful write.
#[derive(Debug, Default)]
pub struct PendingMetrics {
    /// Changed slices: the Service, and when the change behind it began.
    triggers: Vec<(Key, SystemTime)>,
    /// Services of internal, and of external, policy Local that have endpoints, but none on this node.
    without_local_endpoints: [BTreeSet<Key>; 2],
}

impl PendingMetrics {
    /// A slice of the Service changed, because of something at this time.
    pub fn triggered(&mut self, service: &Key, at: SystemTime) {
        self.triggers.push((service.clone(), at));
    }

    /// Notes the plans of changed Services.
    pub fn note(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        // Services that this agent does not serve are not counted.
        self.triggers
            .retain(|(service, _)| updates.get(service).is_none_or(|plan| !plan.frontends.is_empty()));
        for (key, plan) in updates {
            for (set, lacks) in self.without_local_endpoints.iter_mut().zip(plan.lacks_local()) {
                if lacks {
                    set.insert(key.clone());
                } else {
                    set.remove(key);
                }
            }
        }
    }

    /// Everything noted is in the kernel.
    pub fn written(&mut self, metrics: &KubeProxyMetrics, full: bool, took: Duration) {
        let triggers = std::mem::take(&mut self.triggers).into_iter().map(|(_, at)| at);
        metrics.synced(full, took, triggers);
        let [internal, external] = &self.without_local_endpoints;
        metrics.without_local_endpoints(internal.len(), external.len());
    }
}
