// SPDX-License-Identifier: Apache-2.0
//! Reads what exists. By tags, never by names: names are for people, and Octavia's are not unique.

use http::Method;
use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_cloud::ClusterId;

use crate::client::{Call, Calls, list, list_of_project, object};
use crate::error::Result;
use crate::marks;
use crate::state::Tree;
use crate::types::{Balancer, FloatingIp, Listener, Member, Monitor, Pool, Subnet};

/// The cluster's load balancers, or those of one Service with all its incarnations, the oldest first.
pub(crate) async fn balancers(
    calls: &dyn Calls,
    cluster: &ClusterId,
    service: Option<&Key>,
) -> Result<Vec<(Owner, Balancer)>> {
    let call = Call::octavia(Method::GET, "GET loadbalancers", "loadbalancers", None);
    let tags = marks::filter(cluster, service);
    let found: Vec<Balancer> = list_of_project(calls, call, "loadbalancers", &[("tags", &tags)]).await?;
    let owned = found.into_iter().filter_map(|balancer| Some((marks::owner(cluster, &balancer)?, balancer)));
    let mut owned: Vec<_> = owned.collect();
    owned.sort_by(|(_, one), (_, other)| (&one.created_at, &one.id).cmp(&(&other.created_at, &other.id)));
    Ok(owned)
}

/// One load balancer; `None` if it is gone.
pub(crate) async fn balancer(calls: &dyn Calls, id: &str) -> Result<Option<Balancer>> {
    let call = Call::octavia(Method::GET, "GET loadbalancers", &format!("loadbalancers/{id}"), None);
    let name = call.name();
    match calls.send(call).await {
        Ok(answer) => object(&name, answer, "loadbalancer").map(Some),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Everything in a load balancer.
pub(crate) async fn tree(calls: &dyn Calls, owner: &Owner, balancer: Balancer) -> Result<Tree> {
    let of = [("loadbalancer_id", balancer.id.as_str())];
    let call = Call::octavia(Method::GET, "GET listeners", "listeners", None);
    let listeners: Vec<Listener> = list(calls, call, "listeners", &of).await?;
    let call = Call::octavia(Method::GET, "GET pools", "pools", None);
    let mut pools: Vec<Pool> = list(calls, call, "pools", &of).await?;
    let mut monitors: Vec<Monitor> = Vec::new();
    if pools.iter().any(|pool| pool.healthmonitor_id.is_some()) {
        // There is no filter for the load balancer.
        let tags = marks::of_part(owner).join(",");
        let call = Call::octavia(Method::GET, "GET healthmonitors", "healthmonitors", None);
        monitors = list(calls, call, "healthmonitors", &[("tags", &tags)]).await?;
    }
    for pool in &mut pools {
        let path = format!("pools/{}/members", pool.id);
        let call = Call::octavia(Method::GET, "GET members", &path, None);
        pool.members = list::<Member>(calls, call, "members", &[]).await?;
        let is_its = |monitor: &&Monitor| monitor.pools.iter().any(|of| of.id == pool.id);
        pool.monitor = match (&pool.healthmonitor_id, monitors.iter().find(is_its)) {
            (None, _) => None,
            (Some(_), Some(found)) => Some(found.clone()),
            // Somebody removed its tag.
            (Some(id), None) => {
                let path = format!("healthmonitors/{id}");
                let call = Call::octavia(Method::GET, "GET healthmonitors", &path, None);
                let name = call.name();
                Some(object(&name, calls.send(call).await?, "healthmonitor")?)
            }
        };
    }
    Ok(Tree { balancer, listeners, pools })
}

/// The floating IPs that pass a filter.
pub(crate) async fn floating_ips(calls: &dyn Calls, filter: &[(&str, &str)]) -> Result<Vec<FloatingIp>> {
    let call = Call::neutron(Method::GET, "GET floatingips", "floatingips", None);
    list_of_project(calls, call, "floatingips", filter).await
}

/// A subnet; `None` if there is none.
pub(crate) async fn subnet(calls: &dyn Calls, id: &str) -> Result<Option<Subnet>> {
    let call = Call::neutron(Method::GET, "GET subnets", &format!("subnets/{id}"), None);
    let name = call.name();
    match calls.send(call).await {
        Ok(answer) => object(&name, answer, "subnet").map(Some),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure),
    }
}
