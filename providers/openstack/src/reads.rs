// SPDX-License-Identifier: Apache-2.0
//! What Services ask about their own load balancers again and again: whether a change is complete, and, after a start, everything. Many of
//! them asking at once are answered by lists of the project. [`observe`] has the reads themselves.

use http::Method;
use serde::Deserialize;
use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_cloud::Joined;

use crate::client::{Call, list_of_project};
use crate::error::{CallError, Result};
use crate::provider::OpenStack;
use crate::state::Tree;
use crate::types::{Balancer, FloatingIp, Listener, Monitor, Pool, Reference};
use crate::{marks, observe};

/// The reads that are joined.
#[derive(Default)]
pub(crate) struct Reads {
    balancers: Joined<Balancer, CallError>,
    listeners: Joined<PartOf<Listener>, CallError>,
    pools: Joined<PartOf<Pool>, CallError>,
    monitors: Joined<Monitor, CallError>,
    floating_ips: Joined<FloatingIp, CallError>,
}

/// A listener or pool of any load balancer.
#[derive(Clone, Debug, Deserialize)]
struct PartOf<T> {
    #[serde(default)]
    loadbalancers: Vec<Reference>,
    #[serde(flatten)]
    part: T,
}

/// Those of one load balancer.
fn parts<T: Clone>(listed: &[PartOf<T>], balancer: &str) -> Vec<T> {
    let of = |part: &&PartOf<T>| part.loadbalancers.iter().any(|balancers| balancers.id == balancer);
    listed.iter().filter(of).map(|part| part.part.clone()).collect()
}

impl OpenStack {
    /// One load balancer; `None` if it is gone.
    pub(crate) async fn balancer(&self, id: &str) -> Result<Option<Balancer>> {
        let one = observe::balancer(&*self.calls, id);
        let find = |listed: &[Balancer]| listed.iter().find(|found| found.id == id).cloned().map(Some);
        self.reads.balancers.read(one, self.all_balancers(), find).await
    }

    /// The load balancers of a Service with all its incarnations, the oldest first.
    pub(crate) async fn balancers_of(&self, service: &Key) -> Result<Vec<(Owner, Balancer)>> {
        let cluster = &self.config.cluster;
        let one = observe::balancers(&*self.calls, cluster, Some(service));
        let find = |listed: &[Balancer]| {
            let mut owned = observe::owned(cluster, listed.iter().cloned());
            owned.retain(|(owner, _)| owner.service == *service);
            Some(owned)
        };
        self.reads.balancers.read(one, self.all_balancers(), find).await
    }

    async fn all_balancers(&self) -> Result<Vec<Balancer>> {
        let tags = marks::filter(&self.config.cluster, None);
        observe::balancers_with(&*self.calls, "tags", &tags).await
    }

    /// Everything in a load balancer.
    pub(crate) async fn tree(&self, owner: &Owner, balancer: Balancer) -> Result<Tree> {
        let (calls, id) = (&*self.calls, balancer.id.as_str());
        let listeners = self.reads.listeners.read(
            observe::listeners(calls, id),
            list_of_project(
                calls,
                Call::octavia(Method::GET, "GET listeners", "listeners", None),
                "listeners",
                &[],
            ),
            |listed| Some(parts(listed, id)),
        );
        let listeners = listeners.await?;
        let pools = self.reads.pools.read(
            observe::pools(calls, id),
            list_of_project(calls, Call::octavia(Method::GET, "GET pools", "pools", None), "pools", &[]),
            |listed| Some(parts(listed, id)),
        );
        let mut pools = pools.await?;
        let mut monitors = Vec::new();
        if pools.iter().any(|pool| pool.healthmonitor_id.is_some()) {
            let call = Call::octavia(Method::GET, "GET healthmonitors", "healthmonitors", None);
            let find = |listed: &[Monitor]| {
                let of = |monitor: &&Monitor| marks::is_part(&monitor.tags, owner);
                Some(listed.iter().filter(of).cloned().collect())
            };
            let all = list_of_project(calls, call, "healthmonitors", &[]);
            monitors = self.reads.monitors.read(observe::monitors(calls, owner), all, find).await?;
        }
        observe::fill(calls, owner, &balancer, &mut pools, &monitors).await?;
        Ok(Tree { balancer, listeners, pools })
    }

    /// The floating IPs that Steerage created with this description.
    pub(crate) async fn own_floating_ips(&self, description: &str) -> Result<Vec<FloatingIp>> {
        let filter = [("description", description)];
        let one = self.floating_ips(&filter);
        let find = |listed: &[FloatingIp]| Some(listed.to_vec());
        let mut found = self.reads.floating_ips.read(one, self.floating_ips(&[]), find).await?;
        found.retain(|ip| ip.description == description);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use steerage_model::Protocol;
    use steerage_provider_api::LoadBalancer;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    fn services(count: u8) -> Vec<LoadBalancer> {
        let service = |index: u8| {
            let port = u16::from(index);
            let lb =
                planned(&[(Protocol::Tcp, 80, 30_000 + port), (Protocol::Udp, 53, 31_000 + port)], &[index]);
            let owner =
                Owner { service: Key::new("default", format!("web-{index}")), uid: format!("uid-{index}") };
            LoadBalancer { owner, ..lb }
        };
        (1..=count).map(service).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn restart_lists_what_many_services_have() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let services = services(20);
        for lb in &services {
            settle(&provider, lb).await.unwrap();
        }
        cloud.writes();
        cloud.calls();
        let restarted = cloud.provider();
        for outcome in join_all(services.iter().map(|lb| settle(&restarted, lb))).await {
            outcome.unwrap();
        }
        // Each Service has its own resources.
        assert!(cloud.writes().is_empty());
        let calls = cloud.calls();
        let members = calls.iter().filter(|call| *call == "GET members").count();
        assert_eq!(members, 40, "there is no list of them");
        assert!(calls.len() - members <= 20, "{calls:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_in_no_list_is_read_alone() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let services = services(4);
        for lb in &services {
            settle(&provider, lb).await.unwrap();
        }
        let all = cloud.all("loadbalancers");
        let ids: Vec<&str> = all.iter().map(|found| found["id"].as_str().unwrap()).collect();
        // Somebody removes the tags of one.
        cloud.set("loadbalancers", ("id", ids[2]), &serde_json::json!({ "tags": [] }));
        cloud.remove("loadbalancers", ids[3]);
        let found = join_all(ids.iter().map(|id| provider.balancer(id))).await;
        let is_there: Vec<bool> = found.into_iter().map(|found| found.unwrap().is_some()).collect();
        assert_eq!(is_there, [true, true, true, false]);
    }
}
