// SPDX-License-Identifier: Apache-2.0
//! Load balancers come, change and go with their Services, whoever is down meanwhile.

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
use crate::scene::Scene;
use crate::services::{CLASS, PORT, Spec, Vips, conditions, published};
use crate::suite::ECHO;
use crate::system;
use crate::wait::{SOON, until};

pub(super) async fn created_changed_and_deleted(scene: Arc<Scene>) -> Result<()> {
    let start = Instant::now();
    let (service, vips) = scene.expose(&Spec::new("cycle", ECHO)).await?;
    let published_after = start.elapsed();
    until("a first answer", SOON, async || net::page(vips.at(V4, PORT), "/hostname").await).await?;
    let row = [published_after, start.elapsed()].map(crate::report::ms).to_vec();
    scene.suite.report.row("From a new Service to its client", &["address ms", "first answer ms"], row);
    scene.answers(vips, PORT).await?;
    ensure!(
        scene.service("cycle").await?.finalizers().contains(&names::FINALIZER.to_owned()),
        "no finalizer"
    );

    // Other ports.
    let tcp = json!({ "name": "tcp", "protocol": "TCP", "port": 81, "targetPort": 8080 });
    let udp = json!({ "name": "udp", "protocol": "UDP", "port": 81, "targetPort": 8081 });
    scene.patch("cycle", json!({ "spec": { "ports": [tcp, udp] } })).await?;
    scene.answers(vips, 81).await?;
    silent(vips, PORT).await?;

    // Away and back.
    let away =
        json!({ "spec": { "type": "ClusterIP", "loadBalancerClass": null, "externalTrafficPolicy": null } });
    scene.patch("cycle", away).await?;
    scene.gone_from_edge("cycle").await?;
    until("a Service without traces of a load balancer", SOON, async || -> Result<()> {
        let now = scene.service("cycle").await?;
        ensure!(now.finalizers().is_empty(), "finalizers {:?}", now.finalizers());
        ensure!(published(&now).is_empty(), "addresses {:?}", published(&now));
        ensure!(!conditions(&now).contains(names::PREFIX), "{}", conditions(&now));
        Ok(())
    })
    .await?;
    silent(vips, 81).await?;
    let back = json!({
        "spec": { "type": "LoadBalancer", "loadBalancerClass": CLASS, "externalTrafficPolicy": "Local" },
    });
    scene.patch("cycle", back).await?;
    let again = scene.vips("cycle").await?;
    scene.answers(again, 81).await?;

    scene.delete(&service.name_any()).await?;
    scene.gone("cycle").await?;
    scene.gone_from_edge("cycle").await?;
    silent(again, 81).await?;
    nothing_names(&scene, &[vips, again]).await
}

/// Returns when neither family answers any more.
async fn silent(vips: Vips, port: u16) -> Result<()> {
    for family in [V4, V6] {
        let to = vips.at(family, port);
        until(format!("silence at {to}"), SOON, async || match net::page(to, "/hostname").await {
            Ok(answer) => Err(answer),
            Err(_) => Ok(()),
        })
        .await?;
    }
    Ok(())
}

/// Returns when no node and no edge host has a rule or an address with these addresses in it. What the edge remembers of flows ends
/// by itself within a minute, and is not waited for.
async fn nothing_names(scene: &Scene, vips: &[Vips]) -> Result<()> {
    let hosts = scene.suite.cluster(|cluster| [cluster.nodes(), cluster.edges()].concat());
    let words: Vec<_> = vips.iter().flat_map(|vips| [vips.ipv4.to_string(), vips.ipv6.to_string()]).collect();
    for host in hosts {
        for command in [["nft", "list", "ruleset"], ["ip", "-o", "address"]] {
            until(
                format!("no trace in `{}` of {}", command.join(" "), host.name),
                SOON,
                async || -> Result<()> {
                    let text = scene.suite.cluster(|cluster| cluster.exec(&host.name, &command))?;
                    let whole = |c: char| !c.is_ascii_hexdigit() && c != '.' && c != ':';
                    let found = text
                        .lines()
                        .filter(|line| !line.contains(" expires "))
                        .find(|line| line.split(whole).any(|word| words.iter().any(|vip| vip == word)));
                    ensure!(found.is_none(), "{found:?}");
                    Ok(())
                },
            )
            .await?;
        }
    }
    Ok(())
}

pub(super) async fn deleted_while_the_controller_is_down(scene: Arc<Scene>) -> Result<()> {
    let (_, vips) = scene.serve(&Spec::new("orphan", ECHO)).await?;
    let replicas = system::replicas(&scene.suite).await?;
    system::scale(&scene.suite, 0).await?;
    let deleted = scene.delete("orphan").await;
    let held = scene.service("orphan").await;
    let serves = net::page(vips.at(V4, PORT), "/hostname").await;
    system::scale(&scene.suite, replicas).await?;
    deleted?;
    held.context("nothing held the Service while its load balancer was there")?;
    serves.context("the load balancer stopped with the controller")?;
    scene.gone("orphan").await?;
    scene.gone_from_edge("orphan").await?;
    nothing_names(&scene, &[vips]).await
}

/// A cloud-controller-manager takes upstream's finalizer off every Service that is being deleted, whatever its class. With a class
/// ours holds the Service; without one the load balancer is found by what the edge has.
pub(super) async fn a_stripped_finalizer_leaks_nothing(scene: Arc<Scene>) -> Result<()> {
    let (_, with_class) = scene.serve(&Spec::new("stripped", ECHO)).await?;
    let unset = Spec::new("unset", ECHO).with("loadBalancerClass", serde_json::Value::Null);
    let (_, without_class) = scene.serve(&unset).await?;
    let replicas = system::replicas(&scene.suite).await?;
    system::scale(&scene.suite, 0).await?;
    let outcome = strip(&scene).await;
    let still = edge::of(scene.client(), &scene.namespace, "unset").await;
    system::scale(&scene.suite, replicas).await?;
    outcome?;
    ensure!(!still?.is_empty(), "the load balancer went although nobody was there to delete it");
    for name in ["stripped", "unset"] {
        scene.gone(name).await?;
        scene.gone_from_edge(name).await?;
    }
    nothing_names(&scene, &[with_class, without_class]).await
}

/// What a cloud-controller-manager does.
async fn strip(scene: &Scene) -> Result<()> {
    for name in ["stripped", "unset"] {
        scene.delete(name).await?;
        let service = scene.service(name).await?;
        let left: Vec<_> =
            service.finalizers().iter().filter(|finalizer| *finalizer != names::UPSTREAM_FINALIZER).collect();
        scene.patch(name, json!({ "metadata": { "finalizers": left } })).await?;
    }
    let services: Api<Service> = scene.api();
    ensure!(services.get_opt("stripped").await?.is_some(), "nothing of ours held the Service with our class");
    ensure!(services.get_opt("unset").await?.is_none(), "a Service without class should be gone by now");
    Ok(())
}

pub(super) async fn the_second_controller_takes_over_from_a_killed_leader(scene: Arc<Scene>) -> Result<()> {
    let replicas = system::replicas(&scene.suite).await?;
    system::scale(&scene.suite, 2).await?;
    let outcome = take_over(&scene).await;
    system::scale(&scene.suite, replicas).await?;
    outcome
}

async fn take_over(scene: &Scene) -> Result<()> {
    let leader = until("a leader", SOON, async || system::leader(&scene.suite).await).await?;
    let pods = system::pods(&scene.suite, system::CONTROLLER).await?;
    let pod =
        pods.iter().find(|pod| leader.contains(&pod.name_any())).context("the leader is no pod of ours")?;
    let start = Instant::now();
    system::kill(&scene.suite, pod)?;
    // The kubelet starts it again at once, and it may get its own Lease back: it is killed until the other one has it.
    until("another leader", SOON * 2, async || -> Result<()> {
        if !system::leader(&scene.suite).await?.contains(&pod.name_any()) {
            return Ok(());
        }
        let pods = system::pods(&scene.suite, system::CONTROLLER).await?;
        let now = pods.iter().find(|now| now.name_any() == pod.name_any()).context("the pod is gone")?;
        // Between two deaths there is nothing to kill.
        let _ = system::kill(&scene.suite, now);
        bail!("it is {leader}")
    })
    .await?;
    scene.serve(&Spec::new("after-the-king", ECHO)).await?;
    let took = crate::report::ms(start.elapsed());
    scene.suite.report.row(
        "From a leader's death to a new Service's answers on every way, by the second controller",
        &["ms"],
        vec![took],
    );
    system::recovered(&scene.suite, system::CONTROLLER, pod).await?;
    scene.delete("after-the-king").await?;
    scene.gone("after-the-king").await
}

/// The last test: after all others, the edge has nothing, and gives out nothing.
pub(super) async fn nothing_is_left(scene: Arc<Scene>) -> Result<()> {
    let all: Api<EdgeLoadBalancer> = Api::all(scene.client().clone());
    until("an edge without load balancers", SOON * 2, async || -> Result<()> {
        let left = all.list(&kube::api::ListParams::default()).await?.items;
        let names: Vec<_> = left.iter().map(|lb| &lb.spec.service).collect();
        ensure!(names.is_empty(), "{names:?}");
        Ok(())
    })
    .await?;
    let vips = scene.suite.seen_vips();
    nothing_names(&scene, &vips).await
}
