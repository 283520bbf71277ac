// SPDX-License-Identifier: Apache-2.0
//! A Service that is not to be served any more: its load balancer goes, then its status, then our finalizer.

use steerage_model::Service;
use steerage_provider_api::{Owner, Progress};

use super::{ReconcileOutcome, Reconciler};
use crate::applied::AppliedState;
use crate::{plan, reasons, status};

impl Reconciler {
    /// Deletes what the Service has of ours. `held` says that the provider has something for it for certain.
    pub(super) async fn release(
        &self,
        service: &Service,
        owner: &Owner,
        state: &mut AppliedState,
        held: bool,
    ) -> Result<ReconcileOutcome, ReconcileOutcome> {
        let finalizers = plan::owned_finalizers(service, &self.config.classes);
        if finalizers.is_empty() && !held {
            return Ok(ReconcileOutcome::Done);
        }
        if self.is_left_to_others(service) {
            tracing::warn!(
                service = %service.key,
                "a load balancer of ours stays as it is, for Services without a class are not served (--serve-unset-class)"
            );
            return Ok(ReconcileOutcome::Done);
        }
        let events = self.events(service);
        let why = (reasons::DELETING, "deleting the load balancer".to_owned());
        if state.is_news("Delete", Some(&why)) {
            events.normal("Delete", why.0, &why.1);
        }
        match self.provider.delete(owner).await {
            Ok(Progress::Done) => {}
            Ok(Progress::Again(after)) => return Ok(ReconcileOutcome::Again(after)),
            Err(error) => {
                let why = (error.reason(), format!("cannot delete the load balancer: {error}"));
                if state.is_news("DeleteFailed", Some(&why)) {
                    events.warning("Delete", why.0, &why.1);
                }
                return Err(ReconcileOutcome::Provider(error));
            }
        }
        // A Service that is another's by now has the other's ingress and conditions.
        if (service.class.is_none() || plan::has_managed_class(service, &self.config.classes))
            && let Some(patch) = status::clearing_patch(service, true)
        {
            self.writer.patch_status(&service.key, patch).await?;
        }
        if !finalizers.is_empty() || service.annotations.contains_key(plan::PROVIDER) {
            self.writer.remove_finalizers(service, &finalizers).await?;
        }
        events.normal("Delete", reasons::DELETED, "the load balancer is gone");
        Ok(ReconcileOutcome::Done)
    }
}
