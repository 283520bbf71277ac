// SPDX-License-Identifier: Apache-2.0
//! Specification and status of the edge's load balancers, read from its API objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context as _, Result};
use kube::api::{ListParams, ObjectList};
use kube::{Api, ResourceExt as _};
use steerage_edge_api::{
    EdgeHost, EdgeLoadBalancer, EdgeNodeSet, EdgeTargetHealth, Shard, Shards, TargetStatus,
};

/// The load balancers of a Service; more than one only while one replaces another.
pub async fn of(client: &kube::Client, namespace: &str, name: &str) -> Result<Vec<EdgeLoadBalancer>> {
    let all: Api<EdgeLoadBalancer> = Api::all(client.clone());
    let found = all.list(&ListParams::default()).await?.into_iter();
    Ok(found.filter(|lb| lb.spec.service.namespace == namespace && lb.spec.service.name == name).collect())
}

/// The load balancer of a Service.
pub async fn one(client: &kube::Client, namespace: &str, name: &str) -> Result<EdgeLoadBalancer> {
    let found = of(client, namespace, name).await?;
    found.into_iter().next().with_context(|| format!("{namespace}/{name} has no EdgeLoadBalancer"))
}

/// The nodes that a load balancer may send to, its node set resolved.
pub async fn targets(client: &kube::Client, lb: &EdgeLoadBalancer) -> Result<BTreeSet<String>> {
    let shared = match &lb.spec.node_set {
        Some(name) => {
            let sets: Api<EdgeNodeSet> = Api::namespaced(client.clone(), &lb.namespace().unwrap_or_default());
            sets.get(name).await?.spec.targets
        }
        None => Vec::new(),
    };
    Ok(lb.spec.targets.iter().chain(&shared).map(|target| target.node.clone()).collect())
}

/// The health of a load balancer's targets, as far as the edge hosts list them that answer for its addresses.
pub async fn health(client: &kube::Client, lb: &EdgeLoadBalancer) -> Result<Vec<TargetStatus>> {
    let namespace = lb.namespace().unwrap_or_default();
    let hosts: Api<EdgeHost> = Api::namespaced(client.clone(), &namespace);
    let hosts = hosts.list(&ListParams::default()).await?;
    let reports: Api<EdgeTargetHealth> = Api::namespaced(client.clone(), &namespace);
    let reports = reports.list(&ListParams::default()).await?;
    let find = |name: &str| reports.iter().find(|report| report.name_any() == name);
    let mut targets = Vec::new();
    for address in &lb.spec.addresses {
        let host = active_host(hosts.iter(), *address)
            .with_context(|| format!("no edge host says that it answers for {address}"))?;
        let report = find(&format!("{}.{host}", lb.name_any()))
            .with_context(|| format!("{host} does not report the health of {}", lb.name_any()))?;
        let shared = report.spec.shared_reports.iter().filter_map(|name| find(name));
        let listed = std::iter::once(report).chain(shared).flat_map(|report| &report.spec.targets);
        targets.extend(listed.filter(|target| target.address.is_ipv6() == address.is_ipv6()).cloned());
    }
    Ok(targets)
}

/// The shards that each edge host says it answers for.
pub async fn active_shards(client: &kube::Client) -> Result<Vec<(String, Shards)>> {
    Ok(all_hosts(client).await?.iter().map(|host| (host.name_any(), shards_of(host))).collect())
}

/// The host of each of these addresses that has one.
pub async fn active_hosts(client: &kube::Client, addresses: &[IpAddr]) -> Result<BTreeMap<IpAddr, String>> {
    let hosts = all_hosts(client).await?;
    let with_host = |address: &IpAddr| Some((*address, active_host(hosts.iter(), *address)?));
    Ok(addresses.iter().filter_map(with_host).collect())
}

async fn all_hosts(client: &kube::Client) -> Result<ObjectList<EdgeHost>> {
    Ok(Api::all(client.clone()).list(&ListParams::default()).await?)
}

fn shards_of(host: &EdgeHost) -> Shards {
    let shards = host.spec.active_shards.as_deref().and_then(|shards| shards.parse().ok());
    shards.unwrap_or(Shards::NONE)
}

/// The host that was the last one to say that it answers for the address.
fn active_host<'a>(hosts: impl Iterator<Item = &'a EdgeHost>, address: IpAddr) -> Option<String> {
    let is_active = |host: &&EdgeHost| shards_of(host).contains(Shard::of(address));
    let version = |host: &&EdgeHost| host.resource_version().and_then(|version| version.parse::<u64>().ok());
    hosts.filter(is_active).max_by_key(version).map(kube::ResourceExt::name_any)
}

/// How many requests that could change the edge's specifications the API server has answered, by the API server's own metrics.
pub async fn writes(client: &kube::Client) -> Result<u64> {
    let request = http::Request::get("/metrics").body(Vec::new())?;
    Ok(count_writes(&client.request_text(request).await?))
}

fn count_writes(metrics: &str) -> u64 {
    let writes = metrics.lines().filter(|line| {
        line.starts_with("apiserver_request_total{")
            // Not of whole collections: so a namespace controller empties every namespace that goes, those of tests too.
            && line.contains("scope=\"resource\"")
            && ["edgeloadbalancers", "edgenodesets"]
                .iter()
                .any(|name| line.contains(&format!("resource=\"{name}\"")))
            && !["GET", "LIST", "WATCH"].iter().any(|verb| line.contains(&format!("verb=\"{verb}\"")))
    });
    writes.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writes_to_the_edges_specs_are_counted() {
        let metrics = "\
apiserver_request_total{code=\"200\",scope=\"resource\",resource=\"edgeloadbalancers\",verb=\"PATCH\"} 3
apiserver_request_total{code=\"409\",scope=\"resource\",resource=\"edgenodesets\",verb=\"PUT\"} 2
apiserver_request_total{code=\"200\",scope=\"resource\",resource=\"edgeloadbalancers\",verb=\"WATCH\"} 50
apiserver_request_total{code=\"200\",scope=\"resource\",resource=\"edgetargethealths\",verb=\"PATCH\"} 7
apiserver_request_total{code=\"200\",scope=\"namespace\",resource=\"edgeloadbalancers\",verb=\"DELETE\"} 9
";
        assert_eq!(count_writes(metrics), 5);
    }
}
