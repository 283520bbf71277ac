// SPDX-License-Identifier: Apache-2.0
//! A paused Service: nothing of it is changed or deleted, and its status says so.

use steerage_model::Service;
use steerage_provider_api::Progress;

use super::{ReconcileResult, Reconciler};
use crate::applied::AppliedState;
use crate::condition_metrics::ConditionStatuses;
use crate::{reasons, status};

impl Reconciler {
    /// Reports the pause. When it ends, everything is compared: somebody may have changed the load balancer by hand.
    pub(super) async fn pause(&self, service: &Service, applied: &mut AppliedState) -> ReconcileResult {
        applied.pause();
        let message = "Annotation steerage.dev/paused is true. The load balancer and its own targets are neither \
                       created, changed nor deleted. Remove the annotation to resume.";
        let paused = (reasons::PAUSED, message.to_owned());
        if applied.is_new_event("Pause", Some(&paused)) {
            self.events(service).warning("Pause", paused.0, &paused.1);
        }
        let desired = status::paused(paused, service.generation);
        applied.conditions = Some(ConditionStatuses::new(service, &desired.conditions));
        if let Some(patch) = applied.status_patch(service, &desired) {
            self.writer.patch_status(&service.key, patch).await?;
            applied.set_status_written(service, desired);
        }
        Ok(Progress::Done)
    }
}
