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
        if plan::is_unmanaged_by_flag(service, &self.config.classes) {
            tracing::warn!(
                service = %service.key,
                class = service.class,
                "keeping existing load balancer: Services of this class are not managed any more; set --serve-classes to manage it, \
                 or --serve-unset-class if it has no class"
            );
            return Ok(Progress::Done);
        }
        let events = self.events(service);
        let deleting = (
            reasons::DELETING,
            "Deleting the load balancer, or the Service's part of a shared one.".to_owned(),
        );
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
        // With another class, the ingress belongs to the other controller. Steerage's conditions describe the load balancer that is gone.
        let has_own_ingress =
            service.class.is_none() || plan::has_managed_class(service, &self.config.classes);
        if let Some(patch) = status::clearing_patch(service, has_own_ingress) {
            self.writer.patch_status(&service.key, patch).await?;
        }
        if !finalizers.is_empty() || service.annotations.contains_key(annotations::PROVIDER) {
            self.writer.remove_finalizers(service, &finalizers).await?;
        }
        events.normal(
            "Delete",
            reasons::DELETED,
            "Deleted the load balancer, or the Service's part of a shared one.",
        );
        Ok(Progress::Done)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use steerage_model::{Condition, Ingress, names};

    use crate::applied::AppliedState;
    use crate::cluster_index::owner_of;
    use crate::cluster_index::tests::service;
    use crate::reconcile::tests::{Silent, reconciler, recording};

    /// The status that is written when the load balancer of a Service with this class was deleted.
    async fn written_status(class: Option<&str>) -> Value {
        let (client, bodies) = recording();
        let condition = |kind: &str| Condition {
            kind: kind.to_owned(),
            status: "True".to_owned(),
            reason: "Programmed".to_owned(),
            message: String::new(),
            observed_generation: None,
        };
        let mut service = service();
        service.class = class.map(str::to_owned);
        service.conditions = vec![condition(names::PROGRAMMED), condition("example.com/Theirs")];
        service.ingress = vec![Ingress { ip: "10.9.0.1".parse().ok(), hostname: None, ip_mode: None }];
        let reconciler = reconciler(Arc::new(Silent::default()), client);
        let (owner, mut applied) = (owner_of(&service), AppliedState::default());
        reconciler.tear_down(&service, &owner, &mut applied, true).await.expect("deleted");
        let bodies = bodies.lock().expect("lock");
        bodies.iter().find_map(|body| body.get("status").cloned()).unwrap_or_default()
    }

    #[tokio::test]
    async fn steerages_conditions_go_with_its_load_balancer_and_a_foreign_ingress_stays() {
        let gone = json!([{"$patch": "delete", "type": names::PROGRAMMED}]);
        let foreign = written_status(Some("example.com/other")).await;
        assert_eq!(foreign, json!({"conditions": gone}));
        let own = written_status(Some("steerage.dev/edge")).await;
        assert_eq!(own, json!({"conditions": gone, "loadBalancer": {"ingress": null}}));
    }
}
