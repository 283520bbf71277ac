// SPDX-License-Identifier: Apache-2.0
//! A Service that is not to be served any more: its load balancer goes, then its status, then our finalizer.

use steerage_model::Service;
use steerage_provider_api::{Owner, Progress};

use super::{Reconciler, Went};
use crate::state::State;
use crate::{plan, reasons, status};

impl Reconciler {
    /// Deletes what the Service has of ours. `held` says that the provider has something for it for certain.
    pub(super) async fn release(
        &self,
        service: &Service,
        owner: &Owner,
        state: &mut State,
        held: bool,
    ) -> Result<Went, Went> {
        let finalizers = plan::is_ours(service, &self.config.classes);
        if finalizers.is_empty() && !held {
            return Ok(Went::Done);
        }
        if self.is_left_to_others(service) {
            tracing::warn!(
                service = %service.key,
                "a load balancer of ours stays as it is, for Services without a class are not served (--serve-unset-class)"
            );
            return Ok(Went::Done);
        }
        let events = self.events(service);
        let why = (reasons::DELETING, "deleting the load balancer".to_owned());
        if state.news("Delete", Some(&why)) {
            events.normal("Delete", why.0, &why.1);
        }
        match self.provider.delete(owner).await {
            Ok(Progress::Done) => {}
            Ok(Progress::Again(after)) => return Ok(Went::Again(after)),
            Err(error) => {
                let why = (error.reason(), format!("cannot delete the load balancer: {error}"));
                if state.news("DeleteFailed", Some(&why)) {
                    events.warning("Delete", why.0, &why.1);
                }
                return Err(Went::Provider(error));
            }
        }
        // A Service that is another's by now has the other's ingress and conditions.
        if (service.class.is_none() || plan::is_of_class(service, &self.config.classes))
            && let Some(patch) = status::clearing_patch(service, true)
        {
            self.writer.status(&service.key, patch).await?;
        }
        if !finalizers.is_empty() || service.annotations.contains_key(plan::PROVIDER) {
            self.writer.release(service, &finalizers).await?;
        }
        events.normal("Delete", reasons::DELETED, "the load balancer is gone");
        Ok(Went::Done)
    }
}
