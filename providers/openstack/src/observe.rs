// SPDX-License-Identifier: Apache-2.0
//! Reads what exists: what is Steerage's by tags, never by names, because Octavia's are not unique. Candidates for an adoption, and a load
//! balancer that lost its tags, are found by name, VIP or port, and judged by `adoption` and `adopt`.

use http::Method;
use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_cloud::ClusterId;

use crate::adoption::is_part;
use crate::client::{Call, Calls, list, list_of_project, object};
use crate::error::Result;
use crate::marks;
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
    Ok(owned(cluster, found))
}

/// Those of the cluster's Services, the oldest first.
pub(crate) fn owned(
    cluster: &ClusterId,
    found: impl IntoIterator<Item = Balancer>,
) -> Vec<(Owner, Balancer)> {
    let owner = |balancer: Balancer| Some((marks::owner(cluster, &balancer)?, balancer));
    let mut owned: Vec<_> = found.into_iter().filter_map(owner).collect();
    owned.sort_by(|(_, one), (_, other)| (&one.created_at, &one.id).cmp(&(&other.created_at, &other.id)));
    owned
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

/// The listeners of a load balancer.
pub(crate) async fn listeners(calls: &dyn Calls, balancer: &str) -> Result<Vec<Listener>> {
    let call = Call::octavia(Method::GET, "GET listeners", "listeners", None);
    list(calls, call, "listeners", &[("loadbalancer_id", balancer)]).await
}

/// The pools of a load balancer, without members and monitors.
pub(crate) async fn pools(calls: &dyn Calls, balancer: &str) -> Result<Vec<Pool>> {
    let call = Call::octavia(Method::GET, "GET pools", "pools", None);
    list(calls, call, "pools", &[("loadbalancer_id", balancer)]).await
}

/// The health monitors of an owner. There is no filter for the load balancer.
pub(crate) async fn monitors(calls: &dyn Calls, owner: &Owner) -> Result<Vec<Monitor>> {
    let tags = marks::of_part(owner).join(",");
    let call = Call::octavia(Method::GET, "GET healthmonitors", "healthmonitors", None);
    list(calls, call, "healthmonitors", &[("tags", &tags)]).await
}

/// Reads the members of the owner's pools, and gives these their monitors, of which most are known. What is in the pools of others is of
/// no interest.
pub(crate) async fn fill(
    calls: &dyn Calls,
    owner: &Owner,
    balancer: &Balancer,
    pools: &mut [Pool],
    monitors: &[Monitor],
) -> Result<()> {
    let is_ours = |pool: &&mut Pool| is_part(owner, balancer, &pool.name, &pool.tags);
    for pool in pools.iter_mut().filter(is_ours) {
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
    Ok(())
}

/// The floating IPs that pass a filter.
pub(crate) async fn floating_ips(calls: &dyn Calls, filter: &[(&str, &str)]) -> Result<Vec<FloatingIp>> {
    let call = Call::neutron(Method::GET, "GET floatingips", "floatingips", None);
    list_of_project(calls, call, "floatingips", filter).await
}

/// The subnets of a network.
pub(crate) async fn subnets_of(calls: &dyn Calls, network: &str) -> Result<Vec<Subnet>> {
    let call = Call::neutron(Method::GET, "GET subnets", "subnets", None);
    list(calls, call, "subnets", &[("network_id", network)]).await
}

/// The load balancers of the project with this value of a field, whoever made them.
pub(crate) async fn balancers_with(calls: &dyn Calls, field: &str, value: &str) -> Result<Vec<Balancer>> {
    let call = Call::octavia(Method::GET, "GET loadbalancers", "loadbalancers", None);
    list_of_project(calls, call, "loadbalancers", &[(field, value)]).await
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
