// SPDX-License-Identifier: Apache-2.0
//! Deletes everything of an owner: its floating IP, then the load balancer with all that is in it.

use http::Method;
use steerage_provider_api::{Error, Owner, Progress};

use crate::client::Call;
use crate::error::CallError;
use crate::marks;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::types::Balancer;

impl OpenStack {
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Progress, Error> {
        entry.note_being_deleted(owner);
        if let Some(id) = entry.leaving.clone() {
            let balancer = self.balancer(&id).await?;
            if let Some(balancer) = balancer.filter(|balancer| balancer.provisioning_status.is_pending()) {
                return self.wait_to_leave(&balancer, entry).map(Progress::Again);
            }
            entry.leaving = None;
            // A port that is free now: what follows may fail for long.
            self.reconcile_waiting(owner, entry);
        }
        let all = self.balancers_of(&owner.service).await?;
        let mine: Vec<Balancer> =
            all.into_iter().filter(|(of, _)| of == owner).map(|(_, balancer)| balancer).collect();
        if mine.is_empty() {
            // Also of a load balancer that somebody else deleted.
            self.release(
                Some(&owner.service),
                &self.own_floating_ips(&marks::floating(&self.config.cluster, owner)).await?,
            )
            .await?;
            if let Some(wait) = self.leave_shared(owner, entry).await? {
                return Ok(Progress::Again(wait));
            }
            self.delete_rules(owner).await?;
            if entry.known(owner).is_some() {
                entry.forget();
            }
            return Ok(Progress::Done);
        }
        entry.had_own = true;
        for balancer in &mine {
            self.remove(owner, balancer, true).await?;
            entry.note_deletion(balancer)?;
        }
        entry.changing.get_or_insert_with(tokio::time::Instant::now);
        match mine.iter().find(|balancer| balancer.provisioning_status.is_pending()) {
            Some(pending) => entry.note_pending(pending)?,
            None => entry.note_settled(),
        }
        Ok(Progress::Again(entry.poll(self.config.poll)))
    }

    /// Begins to delete a load balancer, if it can be deleted now. If it is the owner's last one, its floating IPs go first: without the
    /// load balancer, nothing would say whose they were.
    pub(crate) async fn remove(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        is_last: bool,
    ) -> Result<(), Error> {
        if balancer.provisioning_status.is_pending() {
            return Ok(());
        }
        if is_last {
            self.release(
                Some(&owner.service),
                &self.own_floating_ips(&marks::floating(&self.config.cluster, owner)).await?,
            )
            .await?;
            self.release(Some(&owner.service), &self.adopted_ips(owner, balancer).await?).await?;
        }
        tracing::info!(service = %owner.service, id = balancer.id, "deleting load balancer");
        self.delete_balancer(&balancer.id).await?;
        Ok(())
    }

    /// Begins to delete a load balancer with all that is in it. False if another change has begun.
    pub(crate) async fn delete_balancer(&self, id: &str) -> Result<bool, CallError> {
        let path = format!("loadbalancers/{id}?cascade=true");
        let call = Call::octavia(Method::DELETE, "DELETE loadbalancers", &path, None);
        match self.calls.send(call).await {
            Ok(_) => Ok(true),
            Err(failure) if failure.is_not_found() => Ok(true),
            Err(failure) if failure.is_busy() => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}
