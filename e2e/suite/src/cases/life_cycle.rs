// SPDX-License-Identifier: Apache-2.0
//! Load balancers are made, changed and deleted with their Services, also when a process was down meanwhile.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use steerage_edge_api::EdgeLoadBalancer;
use steerage_model::Family::{V4, V6};
use steerage_model::names;

use crate::edge;
use crate::net;
use crate::services::{CLASS, PORT, ServiceBuilder, Vips, conditions, published};
use crate::suite::ECHO;
use crate::system;
use crate::test_context::{TestContext, has_address};
use crate::wait::{TIMEOUT, until};

pub(super) async fn load_balancer_follows_its_service_until_deletion(test: Arc<TestContext>) -> Result<()> {
    let start = Instant::now();
    let (service, vips) = test.expose(&ServiceBuilder::new("cycle", ECHO)).await?;
    let published_after = start.elapsed();
    until("a first answer", TIMEOUT, async || net::page(vips.at(V4, PORT), "/hostname").await).await?;
    let row = [published_after, start.elapsed()].map(crate::report::ms).to_vec();
    test.suite.report.row("From a new Service to its client", &["address ms", "first answer ms"], row);
    test.wait_answers(vips, PORT).await?;
    ensure!(test.service("cycle").await?.finalizers().contains(&names::FINALIZER.to_owned()), "no finalizer");

    // Change the ports.
    let tcp = json!({ "name": "tcp", "protocol": "TCP", "port": 81, "targetPort": 8080 });
    let udp = json!({ "name": "udp", "protocol": "UDP", "port": 81, "targetPort": 8081 });
    test.patch("cycle", json!({ "spec": { "ports": [tcp, udp] } })).await?;
    test.wait_answers(vips, 81).await?;
    wait_silence(vips, PORT).await?;

    // Change the type, and change it back.
    let away =
        json!({ "spec": { "type": "ClusterIP", "loadBalancerClass": null, "externalTrafficPolicy": null } });
    test.patch("cycle", away).await?;
    test.wait_gone_from_edge("cycle").await?;
    until("a Service without traces of a load balancer", TIMEOUT, async || -> Result<()> {
        let now = test.service("cycle").await?;
        ensure!(now.finalizers().is_empty(), "finalizers {:?}", now.finalizers());
        ensure!(published(&now).is_empty(), "addresses {:?}", published(&now));
        ensure!(!conditions(&now).contains(names::PREFIX), "{}", conditions(&now));
        Ok(())
    })
    .await?;
    wait_silence(vips, 81).await?;
    let back = json!({
        "spec": { "type": "LoadBalancer", "loadBalancerClass": CLASS, "externalTrafficPolicy": "Local" },
    });
    test.patch("cycle", back).await?;
    let again = test.wait_vips("cycle").await?;
    test.wait_answers(again, 81).await?;

    test.delete(&service.name_any()).await?;
    test.wait_deleted("cycle").await?;
    test.wait_gone_from_edge("cycle").await?;
    wait_silence(again, 81).await?;
    wait_no_trace(&test, &[vips, again]).await
}

/// Waits until neither family answers any more.
async fn wait_silence(vips: Vips, port: u16) -> Result<()> {
    for family in [V4, V6] {
        let to = vips.at(family, port);
        until(format!("silence at {to}"), TIMEOUT, async || match net::page(to, "/hostname").await {
            Ok(answer) => Err(answer),
            Err(_) => Ok(()),
        })
        .await?;
    }
    Ok(())
}

/// Waits until no rule and no interface of a node or an edge host has these addresses. Flow entries of the edge expire within a minute
/// and are ignored.
async fn wait_no_trace(test: &TestContext, vips: &[Vips]) -> Result<()> {
    let hosts = test.suite.cluster(|cluster| [cluster.nodes(), cluster.edges()].concat());
    let vips: Vec<_> = vips.iter().flat_map(|vips| vips.both()).collect();
    for host in hosts {
        for command in [["nft", "list", "ruleset"], ["ip", "-o", "address"]] {
            until(
                format!("no trace in `{}` of {}", command.join(" "), host.name),
                TIMEOUT,
                async || -> Result<()> {
                    let text = test.suite.cluster(|cluster| cluster.exec(&host.name, &command))?;
                    let found = text
                        .lines()
                        .filter(|line| !line.contains(" expires "))
                        .find(|line| vips.iter().any(|vip| has_address(line, *vip)));
                    ensure!(found.is_none(), "{found:?}");
                    Ok(())
                },
            )
            .await?;
        }
    }
    Ok(())
}

pub(super) async fn service_deleted_while_controller_is_down_is_cleaned_up(
    test: Arc<TestContext>,
) -> Result<()> {
    let (_, vips) = test.serve(&ServiceBuilder::new("orphan", ECHO)).await?;
    let replicas = system::replicas(&test.suite).await?;
    system::scale(&test.suite, 0).await?;
    let deleted = test.delete("orphan").await;
    let held = test.service("orphan").await;
    let serves = net::only_page(vips.at(V4, PORT), "/hostname").await;
    system::scale(&test.suite, replicas).await?;
    deleted?;
    held.context("the Service had no finalizer while its load balancer existed")?;
    serves.context("the load balancer stopped with the controller")?;
    test.wait_deleted("orphan").await?;
    test.wait_gone_from_edge("orphan").await?;
    wait_no_trace(&test, &[vips]).await
}

/// A cloud-controller-manager removes upstream's finalizer from every Service that is being deleted, of any class. With a class our own
/// finalizer remains; without one the controller finds the load balancer among the edge's objects.
pub(super) async fn stripped_finalizer_leaks_nothing(test: Arc<TestContext>) -> Result<()> {
    let (_, with_class) = test.serve(&ServiceBuilder::new("stripped", ECHO)).await?;
    let unset = ServiceBuilder::new("unset", ECHO).with("loadBalancerClass", serde_json::Value::Null);
    let (_, without_class) = test.serve(&unset).await?;
    let replicas = system::replicas(&test.suite).await?;
    system::scale(&test.suite, 0).await?;
    let outcome = strip(&test).await;
    let still = edge::of(test.client(), &test.namespace, "unset").await;
    system::scale(&test.suite, replicas).await?;
    outcome?;
    ensure!(!still?.is_empty(), "the load balancer was deleted while no controller ran");
    for name in ["stripped", "unset"] {
        test.wait_deleted(name).await?;
        test.wait_gone_from_edge(name).await?;
    }
    wait_no_trace(&test, &[with_class, without_class]).await
}

/// Deletes the Services and removes upstream's finalizer, as a cloud-controller-manager does.
async fn strip(test: &TestContext) -> Result<()> {
    for name in ["stripped", "unset"] {
        test.delete(name).await?;
        let service = test.service(name).await?;
        let left: Vec<_> =
            service.finalizers().iter().filter(|finalizer| *finalizer != names::UPSTREAM_FINALIZER).collect();
        test.patch(name, json!({ "metadata": { "finalizers": left } })).await?;
    }
    let services: Api<Service> = test.api();
    ensure!(
        services.get_opt("stripped").await?.is_some(),
        "the Service with our class had no finalizer of ours"
    );
    ensure!(services.get_opt("unset").await?.is_none(), "the Service without class still exists");
    Ok(())
}

pub(super) async fn second_controller_takes_over_from_killed_lease_holder(
    test: Arc<TestContext>,
) -> Result<()> {
    let replicas = system::replicas(&test.suite).await?;
    system::scale(&test.suite, 2).await?;
    let outcome = kill_until_taken_over(&test).await;
    system::scale(&test.suite, replicas).await?;
    outcome
}

async fn kill_until_taken_over(test: &TestContext) -> Result<()> {
    let leader = until("a leader", TIMEOUT, async || system::lease_holder(&test.suite).await).await?;
    let pods = system::pods(&test.suite, system::CONTROLLER).await?;
    let pod = pods
        .iter()
        .find(|pod| leader.contains(&pod.name_any()))
        .context("the lease holder is no pod of the chart")?;
    let start = Instant::now();
    system::kill_container(&test.suite, pod)?;
    // The kubelet restarts the container at once, and it may renew its own Lease: kill it until the other pod holds the Lease.
    until("another leader", TIMEOUT * 2, async || -> Result<()> {
        if !system::lease_holder(&test.suite).await?.contains(&pod.name_any()) {
            return Ok(());
        }
        let pods = system::pods(&test.suite, system::CONTROLLER).await?;
        let now = pods.iter().find(|now| now.name_any() == pod.name_any()).context("the pod is gone")?;
        // Fails while the container is not running.
        let _ = system::kill_container(&test.suite, now);
        bail!("it is {leader}")
    })
    .await?;
    test.serve(&ServiceBuilder::new("after-takeover", ECHO)).await?;
    let took = crate::report::ms(start.elapsed());
    test.suite.report.row(
        "From the kill of a lease holder to a new Service's answers over every protocol",
        &["ms"],
        vec![took],
    );
    system::wait_restarted(&test.suite, system::CONTROLLER, pod).await?;
    test.delete("after-takeover").await?;
    test.wait_deleted("after-takeover").await
}

/// The last case: after all others the edge has no load balancer, and no host has an address or a rule of one.
pub(super) async fn nothing_is_left_after_all_cases(test: Arc<TestContext>) -> Result<()> {
    let all: Api<EdgeLoadBalancer> = Api::all(test.client().clone());
    until("an edge without load balancers", TIMEOUT * 2, async || -> Result<()> {
        let left = all.list(&kube::api::ListParams::default()).await?.items;
        let names: Vec<_> = left.iter().map(|lb| &lb.spec.service).collect();
        ensure!(names.is_empty(), "{names:?}");
        Ok(())
    })
    .await?;
    let vips = test.suite.recorded_vips();
    wait_no_trace(&test, &vips).await
}
