// SPDX-License-Identifier: Apache-2.0
//! What clients lose while the load balancer lags behind the endpoints, with the agent's `--forward-without-local-endpoints` and without
//! it, at several intervals of health checks. Runs only where it is requested: it takes a quarter of an hour.
//!
//! Steering is `health-check`: nothing but failed checks tells the edge that a node has no endpoint any more. Backends exit one second
//! after SIGTERM, so that they are gone long before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::DeleteParams;
use serde_json::json;
use steerage_model::Family::{V4, V6};
use steerage_model::names;
use tokio::time::{sleep, timeout};

use super::deployments;
use super::under_load::measured_under_load;
use crate::client::Client;
use crate::net;
use crate::pods::{End, has_condition};
use crate::services::{PORT, ServiceBuilder};
use crate::system;
use crate::test_context::TestContext;
use steerage_meter::client::Target;
use steerage_meter::loss::LossKind;

const FLAG: &str = "--forward-without-local-endpoints";
/// Intervals of health checks, in seconds.
const INTERVALS: [u64; 3] = [1, 5, 10];
/// Failed checks that take a target out, the default.
const THRESHOLD: u64 = 2;
/// While the Service is set up. The controller's annotation is changed afterwards.
const QUICK: &str = "250ms";
/// Seconds for which a backend serves after SIGTERM.
const LINGER: u32 = 1;
/// Between two requests for the client's address, and how long each may take.
const EVERY: Duration = Duration::from_millis(50);

#[derive(Clone, Copy)]
enum Event {
    RollingUpdate,
    ScaleDown,
}

pub(super) async fn rolling_update_with_and_without_is_measured(test: Arc<TestContext>) -> Result<()> {
    measure(&test, Event::RollingUpdate).await
}

pub(super) async fn scale_down_with_and_without_is_measured(test: Arc<TestContext>) -> Result<()> {
    measure(&test, Event::ScaleDown).await
}

async fn measure(test: &TestContext, event: Event) -> Result<()> {
    for forwards in [false, true] {
        system::set_agent_argument(&test.suite, FLAG, forwards).await?;
        for interval in INTERVALS {
            measure_one(test, event, forwards, interval).await?;
        }
    }
    system::set_agent_argument(&test.suite, FLAG, false).await
}

async fn measure_one(test: &TestContext, event: Event, forwards: bool, interval: u64) -> Result<()> {
    static NEXT: AtomicU8 = AtomicU8::new(0x90);
    let last = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("every-{interval}s-{last}");
    deployments::make(test, &[&name], 3, End::Unready(LINGER)).await?;
    let spec = ServiceBuilder::new(&name, &name)
        .steered("health-check")
        .annotated("steerage.dev/health-check-interval", QUICK)
        .annotated(names::ADDRESSES, &format!("10.77.200.{last},fd77::c8{last:02x}"));
    let (_, vips) = test.expose(&spec).await?;
    test.wait_programmed(&name, &vips.both()).await?;
    test.wait_answers(vips, PORT).await?;
    let pods = test.pods(&name).await?;
    let ready = pods.iter().filter(|pod| has_condition(pod, "Ready"));
    let nodes: BTreeSet<_> = ready.filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
    test.wait_healthy(&name, &nodes.into_iter().collect::<Vec<_>>()).await?;
    let slow = json!({ "metadata": { "annotations": { "steerage.dev/health-check-interval": format!("{interval}s") } } });
    test.patch(&name, slow).await?;
    let lag = Duration::from_secs((THRESHOLD + 1) * interval);
    // The last quick check is over, and the first slow one.
    sleep(Duration::from_secs(interval + 3)).await;

    let clients = [V4, V6].into_iter().zip(test.suite.clients()).map(|(family, host)| {
        let address = vips.at(family, PORT);
        let to = Target { address, datagrams: address, backends: format!("{name}-") };
        Client { host, to, what: family.to_string() }
    });
    let what = match event {
        Event::RollingUpdate => "rolling update of 3 pods",
        Event::ScaleDown => "scale down from 3 pods to 1",
    };
    let (asked, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let happen = async || {
        let change = async {
            match event {
                Event::RollingUpdate => deployments::update(test, &[&name]).await?,
                Event::ScaleDown => deployments::scale(test, &name, 1).await?,
            }
            sleep(lag + Duration::from_secs(LINGER.into())).await;
            anyhow::Ok(())
        };
        // From the first client by IPv6: its load is IPv4, and the meter must not meet other connections between the same ports.
        let own = test.suite.clients()[0].address(V6);
        let addresses = async {
            loop {
                let to = vips.at(V6, PORT);
                if let Ok(Ok(seen)) = timeout(EVERY * 10, net::only_page(to, "/clientip")).await {
                    asked.fetch_add(1, Ordering::Relaxed);
                    let is_own = seen.parse::<std::net::SocketAddr>().is_ok_and(|seen| seen.ip() == own);
                    wrong.fetch_add(usize::from(!is_own), Ordering::Relaxed);
                }
                sleep(EVERY).await;
            }
        };
        tokio::select! {
            done = change => done,
            () = addresses => Ok(()),
        }
    };
    let label =
        format!("{what}, checks every {interval}s, {}", if forwards { "forwarding" } else { "dropping" });
    let measurements = measured_under_load(test, &label, clients.collect(), happen).await?;
    for (client, measured) in measurements {
        let counts: BTreeMap<LossKind, usize> = measured.counts();
        let of =
            |kinds: &[LossKind]| kinds.iter().filter_map(|kind| counts.get(kind)).sum::<usize>().to_string();
        let row = vec![
            what.to_owned(),
            interval.to_string(),
            (THRESHOLD * interval).to_string(),
            if forwards { "on" } else { "off" }.to_owned(),
            client,
            measured.connections.to_string(),
            of(&[LossKind::SynUnanswered, LossKind::SynRetransmitted]),
            of(&[LossKind::ConnectionRefused]),
            measured.failed.len().to_string(),
            measured.datagrams.to_string(),
            of(&[LossKind::DatagramUnanswered]),
            asked.load(Ordering::Relaxed).to_string(),
            wrong.load(Ordering::Relaxed).to_string(),
        ];
        let columns = [
            "event",
            "interval s",
            "threshold × interval s",
            "forwarding",
            "client",
            "connections",
            "SYNs lost",
            "connections refused",
            "connections failed",
            "datagrams",
            "datagrams lost",
            "client addresses asked",
            "of them wrong",
        ];
        test.suite.report.row("Loss while the load balancer lags", &columns, row);
    }
    test.delete(&name).await?;
    test.api::<Deployment>().delete(&name, &DeleteParams::default()).await?;
    Ok(())
}
