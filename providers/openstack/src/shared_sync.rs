// SPDX-License-Identifier: Apache-2.0
//! Looks after load balancers that several Services share: lets one Service at a time change one, finds what a Service has there, removes
//! it, and deletes a load balancer that nobody uses. `shared` decides what is wanted.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use steerage_provider_cloud::shared::{LoadBalancerUse, immutable};
use tokio::sync::OwnedMutexGuard;

use crate::adoption::is_part;
use crate::client::{Call, list_of_project};
use crate::desired::Desired;
use crate::error::CallError;
use crate::marks;
use crate::observe;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::step::Step;
use crate::types::{Balancer, Provisioning, Reference};

/// A Service waits for this time while another one changes the load balancer, and then makes room for others.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// A Service that gets no turn comes again after this time.
const BUSY_POLL: Duration = Duration::from_millis(500);

/// A listener or pool of a Service in a shared load balancer.
#[derive(Clone, Debug, Deserialize)]
struct Part {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    loadbalancers: Vec<Reference>,
}

/// Listeners, then pools.
struct Parts {
    listeners: Vec<Part>,
    pools: Vec<Part>,
}

impl Parts {
    fn all(&self) -> impl Iterator<Item = &Part> {
        self.listeners.iter().chain(&self.pools)
    }

    /// The load balancers that they are in.
    fn balancers(&self) -> BTreeSet<&str> {
        self.all().flat_map(|part| &part.loadbalancers).map(|of| of.id.as_str()).collect()
    }
}

fn later(after: Duration) -> Outcome {
    Outcome { progress: Progress::Again(after), ..Outcome::done() }
}

impl OpenStack {
    async fn parts(&self, filter: (&str, &str)) -> Result<Parts, CallError> {
        let call = |action, path| Call::octavia(Method::GET, action, path, None);
        let calls = &*self.calls;
        Ok(Parts {
            listeners: list_of_project(calls, call("GET listeners", "listeners"), "listeners", &[filter])
                .await?,
            pools: list_of_project(calls, call("GET pools", "pools"), "pools", &[filter]).await?,
        })
    }

    /// What an owner has in shared load balancers.
    async fn parts_of(&self, owner: &Owner) -> Result<Parts, CallError> {
        let tags = marks::of_balancer(&self.config.cluster, owner).join(",");
        self.parts(("tags", &tags)).await
    }

    /// The owners of listeners and pools in shared load balancers.
    pub(crate) async fn part_owners(&self) -> Result<BTreeSet<Owner>, CallError> {
        let tags = marks::shared_filter(&self.config.cluster, None);
        let parts = self.parts(("tags", &tags)).await?;
        Ok(parts.all().filter_map(|part| marks::part_owner(&self.config.cluster, &part.tags)).collect())
    }

    /// The load balancers that are shared under a name, or all shared ones, the oldest first.
    pub(crate) async fn shared_balancers(&self, shared: Option<&str>) -> Result<Vec<Balancer>, CallError> {
        let tags = marks::shared_filter(&self.config.cluster, shared);
        let mut found = observe::balancers_with(&*self.calls, "tags", &tags).await?;
        let is_it = |balancer: &Balancer| {
            let name = marks::shared_name(&self.config.cluster, &balancer.tags);
            name.is_some_and(|name| shared.is_none_or(|shared| shared == name))
        };
        found.retain(is_it);
        found.sort_by(|one, other| (&one.created_at, &one.id).cmp(&(&other.created_at, &other.id)));
        Ok(found)
    }

    /// The shared load balancer in which the owner has something, with its name.
    pub(crate) async fn shared_balancer_of(
        &self,
        owner: &Owner,
    ) -> Result<Option<(String, Balancer)>, CallError> {
        for id in self.parts_of(owner).await?.balancers() {
            let Some(balancer) = self.balancer(id).await? else { continue };
            if let Some(name) = marks::shared_name(&self.config.cluster, &balancer.tags) {
                return Ok(Some((name, balancer)));
            }
        }
        Ok(None)
    }

    /// The names of the owner's listeners in shared load balancers.
    pub(crate) async fn shared_listeners(&self, owner: &Owner) -> Result<BTreeSet<String>, CallError> {
        Ok(self.parts_of(owner).await?.listeners.into_iter().map(|part| part.name).collect())
    }

    /// Waits a moment until no other Service changes the load balancer.
    async fn lock_shared(&self, shared: &str) -> Option<OwnedMutexGuard<()>> {
        self.shared_locks.lock_within(LOCK_TIMEOUT, &shared.to_owned(), || ()).await
    }

    /// Brings a Service in place at a shared load balancer.
    pub(crate) async fn apply_shared(
        &self,
        shared: &str,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let is_known = entry.complete.as_ref().is_some_and(|complete| {
            let reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
            complete.owner == lb.owner && complete.wanted == reduced
        });
        if compare == Compare::Remembered && is_known {
            // Nothing changes, so nobody is in the way.
            return self.apply_wanted(lb, wanted, entry, compare).await;
        }
        let Some(_lock) = self.lock_shared(shared).await else { return Ok(later(BUSY_POLL)) };
        let usage = LoadBalancerUse::Shared(shared.to_owned());
        if entry.usage != usage {
            entry.forget();
            self.check_use(&lb.owner, &usage).await?;
            entry.usage = usage;
        }
        self.apply_wanted(lb, wanted, entry, compare).await
    }

    /// Refuses a Service that has something at another load balancer than it requests.
    pub(crate) async fn check_use(&self, owner: &Owner, wanted: &LoadBalancerUse) -> Result<(), Error> {
        let present = self.shared_balancer_of(owner).await?.map(|(name, _)| LoadBalancerUse::Shared(name));
        if let Some(present) = present.filter(|present| present != wanted) {
            return Err(immutable(&present, wanted, "address"));
        }
        if *wanted != LoadBalancerUse::Own {
            let all = self.balancers_of(&owner.service).await?;
            if all.iter().any(|(of, _)| of == owner) {
                return Err(immutable(&LoadBalancerUse::Own, wanted, "address"));
            }
        }
        Ok(())
    }

    /// Removes what a Service has in shared load balancers, and those that nobody uses. Returns when to call again; `None` if nothing is
    /// left.
    pub(crate) async fn leave_shared(&self, owner: &Owner) -> Result<Option<Duration>, Error> {
        let parts = self.parts_of(owner).await?;
        for id in parts.balancers() {
            let Some(balancer) = self.balancer(id).await? else { continue };
            let Some(shared) = marks::shared_name(&self.config.cluster, &balancer.tags) else { continue };
            let Some(_lock) = self.lock_shared(&shared).await else { return Ok(Some(BUSY_POLL)) };
            if balancer.provisioning_status.is_pending() {
                return Ok(Some(BUSY_POLL));
            }
            let all = self.parts(("loadbalancer_id", id)).await?;
            let is_mine = |part: &Part| is_part(owner, &balancer, &part.name, &part.tags);
            if all.all().all(is_mine) {
                self.delete_shared(&shared, &balancer).await?;
                return Ok(Some(self.config.poll.max(BUSY_POLL)));
            }
            if balancer.provisioning_status == Provisioning::Error {
                return Err(Error::Unavailable(format!(
                    "Octavia reports ERROR for the shared load balancer {id}, and lets nobody change it. The Service's ports are removed \
                     when it is repaired: openstack loadbalancer failover {id}."
                )));
            }
            let step = match (
                all.listeners.iter().find(|part| is_mine(part)),
                all.pools.iter().find(|part| is_mine(part)),
            ) {
                (Some(listener), _) => {
                    Step::DeleteListener { id: listener.id.clone(), port: listener.name.clone() }
                }
                (None, Some(pool)) => Step::DeletePool { id: pool.id.clone(), name: pool.name.clone() },
                (None, None) => continue,
            };
            match self.calls.send(step.call()).await {
                Ok(_) => {
                    tracing::info!(service = %owner.service, shared, change = %step, "shared load balancer changed");
                }
                Err(failure) if failure.is_busy() || failure.is_not_found() => {}
                Err(failure) => return Err(failure.into()),
            }
            return Ok(Some(self.config.poll));
        }
        // A crash may have left one without any port.
        for balancer in self.shared_balancers(None).await? {
            let Some(shared) = marks::shared_name(&self.config.cluster, &balancer.tags) else { continue };
            let Some(_lock) = self.lock_shared(&shared).await else { continue };
            if !balancer.provisioning_status.is_pending()
                && self.parts(("loadbalancer_id", &balancer.id)).await?.all().next().is_none()
            {
                self.delete_shared(&shared, &balancer).await?;
            }
        }
        Ok(None)
    }

    /// Its floating IP goes first, as with other load balancers.
    async fn delete_shared(&self, shared: &str, balancer: &Balancer) -> Result<(), Error> {
        tracing::info!(shared, id = balancer.id, "deleting shared load balancer, which no Service uses");
        let mark = marks::shared_floating(&self.config.cluster, shared);
        self.release(None, &self.own_floating_ips(&mark).await?).await?;
        Ok(self.delete_balancer(&balancer.id).await?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steerage_model::Protocol;
    use steerage_model::annotations::SHARED_LOAD_BALANCER;
    use steerage_provider_api::Provider as _;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, deleted, settle};

    /// The operator removed the name from the file before the Services went.
    #[tokio::test(start_paused = true)]
    async fn shared_load_balancer_goes_when_the_file_does_not_name_it_any_more() {
        let cloud = Scripted::new();
        let file = r#"{"web": {"namespaces": ["*"]}}"#;
        let provider = cloud.provider_with(|config| {
            config.shared_load_balancers = serde_json::from_str(file).unwrap_or_default();
        });
        let annotations = BTreeMap::from([(SHARED_LOAD_BALANCER.to_owned(), "web".to_owned())]);
        let lb = LoadBalancer { annotations, ..planned(&[(Protocol::Tcp, 80, 30080)], &[1]) };
        settle(&provider, &lb).await.unwrap();
        // The cloud of tests does not show this by itself.
        let of = serde_json::json!({ "loadbalancers": [{ "id": cloud.all("loadbalancers")[0]["id"] }] });
        for kind in ["listeners", "pools"] {
            for part in cloud.all(kind) {
                cloud.set(kind, ("id", part["id"].as_str().unwrap()), &of);
            }
        }
        let without = cloud.provider();
        assert_eq!(without.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
        deleted(&without, &lb.owner).await;
        assert!(cloud.all("loadbalancers").is_empty() && cloud.all("floatingips").is_empty());
    }
}
