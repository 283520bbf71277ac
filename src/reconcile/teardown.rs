// SPDX-License-Identifier: Apache-2.0
//! Removes the load balancer of a Service that is no longer managed: first at the provider, then its status, then the finalizer.

use steerage_model::{Service, annotations};
use steerage_provider_api::{Owner, Progress};

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::AppliedState;
use crate::{plan, reasons, status};

impl Reconciler {
    /// Deletes a load balancer whose Service is gone. The API server must confirm that: the watch of a new lease holder may lag,
    /// and a list skips a Service that is unreadable. If the Service still exists, the watch will deliver it.
    pub(super) async fn delete_orphan(&self, owner: &Owner) -> ReconcileResult {
        if self.reader.get(&owner.service).await?.is_some_and(|service| service.uid == owner.uid) {
            return Err(ReconcileError::MissedByWatch);
        }
        tracing::info!(service = %owner.service, uid = owner.uid, "Service is gone; deleting its load balancer");
        Ok(self.provider.delete(owner).await?)
    }

    /// `exists`: the provider has resources for the Service, even without a finalizer.
    pub(super) async fn tear_down(
        &self,
        service: &Service,
        owner: &Owner,
        applied: &mut AppliedState,
        exists: bool,
    ) -> ReconcileResult {
        let finalizers = plan::owned_finalizers(service, &self.config.classes);
        if finalizers.is_empty() && !exists {
            return Ok(Progress::Done);
        }
        if self.is_unmanaged_by_flag(service) {
            tracing::warn!(
                service = %service.key,
                "keeping existing load balancer: Services without loadBalancerClass are not managed; \
                 set --serve-unset-class to manage it"
            );
            return Ok(Progress::Done);
        }
        let events = self.events(service);
        let deleting = (reasons::DELETING, "Deleting the load balancer.".to_owned());
        if applied.is_new_event("Delete", Some(&deleting)) {
            events.normal("Delete", deleting.0, &deleting.1);
        }
        match self.provider.delete(owner).await {
            Ok(Progress::Done) => {}
            Ok(progress) => return Ok(progress),
            Err(error) => {
                let note = format!("The load balancer is not deleted, and the finalizer stays. {error}");
                let failed = (error.reason(), note);
                if applied.is_new_event("DeleteFailed", Some(&failed)) {
                    events.warning("Delete", failed.0, &failed.1);
                }
                return Err(error.into());
            }
        }
        // With another class, ingress and conditions belong to the other controller.
        if (service.class.is_none() || plan::has_managed_class(service, &self.config.classes))
            && let Some(patch) = status::clearing_patch(service, true)
        {
            self.writer.patch_status(&service.key, patch).await?;
        }
        if !finalizers.is_empty() || service.annotations.contains_key(annotations::PROVIDER) {
            self.writer.remove_finalizers(service, &finalizers).await?;
        }
        events.normal("Delete", reasons::DELETED, "Deleted the load balancer.");
        Ok(Progress::Done)
    }
}
