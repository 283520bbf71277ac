// SPDX-License-Identifier: Apache-2.0
//! What the kube-proxy metrics need to know between a change and the write that contains it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use steerage_model::{Family, Key};

use super::KubeProxyMetrics;
use crate::plan::{LocalGaps, ServicePlan};

/// Changes that are measured at once. A Service that changes all the time may wait for long.
const MAX_TRIGGERS: usize = 32_768;

/// Collected until the next successful write.
#[derive(Debug, Default)]
pub struct PendingMetrics {
    /// Changed slices: the Service, the family, and when the change behind it began.
    triggers: Vec<(Key, Family, SystemTime)>,
    /// Services of a policy Local that have endpoints, but none on this node.
    without_local_endpoints: BTreeMap<Key, LocalGaps>,
}

impl PendingMetrics {
    /// A slice of the Service changed, because of something at this time.
    pub fn triggered(&mut self, service: &Key, family: Family, at: SystemTime) {
        if self.triggers.len() < MAX_TRIGGERS {
            self.triggers.push((service.clone(), family, at));
        }
    }

    /// Notes the plans of changed Services.
    pub fn note(&mut self, updates: &BTreeMap<Key, ServicePlan>, is_waiting: impl Fn(&Key) -> bool) {
        // Services that this agent does not serve are not counted. The plan of one that waits only reserves something.
        self.triggers.retain(|(service, ..)| {
            updates.get(service).is_none_or(|plan| !plan.frontends.is_empty()) || is_waiting(service)
        });
        for (key, plan) in updates {
            let gaps = plan.local_gaps();
            if gaps.is_empty() {
                self.without_local_endpoints.remove(key);
            } else {
                self.without_local_endpoints.insert(key.clone(), gaps);
            }
        }
    }

    /// Everything noted is in the kernel, of these families, except for changes of Services that wait.
    pub fn written(
        &mut self,
        metrics: &KubeProxyMetrics,
        families: &[Family],
        is_waiting: impl Fn(&Key) -> bool,
    ) {
        let synced = self.triggers.extract_if(.., |(service, ..)| !is_waiting(service));
        metrics.synced(families, synced.map(|(_, family, at)| (family, at)));
        metrics.without_local_endpoints(families, &self.without_local_endpoints);
    }
}
