// SPDX-License-Identifier: Apache-2.0
//! What a tenant may write into a Service takes nothing from others.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use serde_json::{Value, json};

use crate::events;
use crate::pods::{dial, dial_once};
use crate::services::{PORT, ServiceBuilder};
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

const THIEF: &str = "aaa-thief";
const VICTIM: &str = "victim";
/// External IPs that are nobody's (RFC 5737, RFC 3849).
const FREE: [&str; 2] = ["192.0.2.77", "2001:db8::77"];
const DNS: u16 = 53;
const HTTPS: u16 = 443;

/// A Service names as its external IPs the addresses of the cluster's DNS, of the API server, of another Service and of a node.
pub(super) async fn external_ips_take_nothing_from_others(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    test.backend(THIEF, THIEF, &nodes[0].name, true, 0).await?;
    // The victim is the younger one, and its name comes later: neither may matter.
    let theirs = [
        cluster_ips(&test, "kube-system", "kube-dns").await?,
        cluster_ips(&test, "default", "kubernetes").await?,
    ];
    create_thief(&test, theirs.iter().flatten().map(|address| json!(address)).collect()).await?;
    test.backend(VICTIM, VICTIM, &nodes[1].name, true, 0).await?;
    let (victim, vips) = test.serve(&ServiceBuilder::new(VICTIM, VICTIM).cluster()).await?;
    let victims: Vec<IpAddr> = addresses(&victim)?.into_iter().chain([vips.ipv4, vips.ipv6]).collect();
    let named = theirs.iter().flatten().chain(&victims).copied().chain([nodes[1].ipv4.into()]);
    let free = FREE.map(|address| json!(address));
    let named: Vec<Value> = named.map(|address| json!(address)).chain(free).collect();
    test.patch(THIEF, json!({ "spec": { "externalIPs": named } })).await?;

    let pods = test.suite.backends().await?;
    for pod in pods {
        // An address of the last change: what follows asks the rules with all of them.
        for address in FREE {
            let to = SocketAddr::new(address.parse()?, PORT);
            let what = format!("the thief's answer at {to}");
            until(what, TIMEOUT, async || is_thief(&dial(pod, "http", to, "hostname").await?)).await?;
        }
        let of_victim = victims.iter().map(|address| (*address, PORT));
        let of_others = theirs.iter().zip([DNS, HTTPS]);
        let of_others = of_others.flat_map(|(all, port)| all.iter().map(move |address| (*address, port)));
        // Also from pods of other nodes.
        let of_others = of_others.chain([(nodes[1].ipv4.into(), PORT)]);
        // Neither DNS, the API server nor the node answers such a request by a name.
        let silent: Vec<_> =
            of_others.map(|(address, port)| (SocketAddr::new(address, port), false)).collect();
        let asked = of_victim.map(|(address, port)| (SocketAddr::new(address, port), true)).chain(silent);
        for (to, answers) in asked {
            for protocol in ["http", "udp"] {
                let name = if answers {
                    dial_once(pod, protocol, to, "hostname").await
                } else {
                    dial(pod, protocol, to, "hostname").await
                };
                ensure!(name.is_ok() || !answers, "{to} does not answer over {protocol}: {name:?}");
                ensure!(!name.is_ok_and(|name| name == THIEF), "{THIEF} answers at {to} over {protocol}");
            }
        }
    }
    events::wait(test.client(), &test.namespace, THIEF, "an external IP is refused", |event| {
        event.reason == "ExternalIPNotServed" && event.kind == "Warning"
    })
    .await
    .map(drop)
}

fn is_thief(name: &str) -> Result<()> {
    ensure!(name == THIEF, "{name} answers");
    Ok(())
}

/// A cluster IP with the ports of everything that it wants to take.
async fn create_thief(test: &TestContext, external_ips: Vec<Value>) -> Result<()> {
    let port = |name: &str, protocol: &str, port: u16, target: u16| json!({ "name": name, "protocol": protocol, "port": port, "targetPort": target });
    let ports = [
        port("http", "TCP", PORT, 8080),
        port("http-udp", "UDP", PORT, 8081),
        port("dns", "TCP", DNS, 8080),
        port("dns-udp", "UDP", DNS, 8081),
        port("https", "TCP", HTTPS, 8080),
    ];
    let spec = ServiceBuilder::new(THIEF, THIEF)
        .with("type", "ClusterIP")
        .with("loadBalancerClass", Value::Null)
        .with("externalTrafficPolicy", Value::Null)
        .with("ports", ports.to_vec())
        .with("externalIPs", external_ips);
    test.create(&spec).await.map(drop)
}

async fn cluster_ips(test: &TestContext, namespace: &str, name: &str) -> Result<Vec<IpAddr>> {
    let services: Api<Service> = Api::namespaced(test.client().clone(), namespace);
    addresses(&services.get(name).await.with_context(|| format!("Service {namespace}/{name}"))?)
}

/// All cluster IPs of a Service.
fn addresses(service: &Service) -> Result<Vec<IpAddr>> {
    let addresses =
        service.spec.as_ref().and_then(|spec| spec.cluster_ips.as_ref()).context("no ClusterIPs")?;
    addresses.iter().map(|address| Ok(address.parse()?)).collect()
}
