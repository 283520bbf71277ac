// SPDX-License-Identifier: Apache-2.0
//! The manifests in `examples/`, applied as their reader applies them: with kubectl, into the namespace `default`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::Value;
use steerage_model::{Family, names};
use tokio::task::block_in_place;

use crate::net;
use crate::services::published;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// The namespace of kubectl's default context, where the application and the Services go.
const NAMESPACE: &str = "default";
/// The application behind the other examples.
const APPLICATION: &str = "echo.yaml";

pub(super) async fn every_manifest_is_programmed_and_answers(test: Arc<TestContext>) -> Result<()> {
    let default = TestContext { suite: Arc::clone(&test.suite), namespace: NAMESPACE.to_owned() };
    let files = manifests()?;
    let (application, others): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.ends_with(APPLICATION));
    ensure!(application.len() == 1 && others.len() >= 10, "the examples were not found: {files:?}");
    kubectl(&default, "apply", application[0], &[])?;
    let outcome = all(&default, application[0], &others).await;
    kubectl(&default, "delete", application[0], &["--ignore-not-found"])?;
    outcome
}

async fn all(test: &TestContext, application: &Path, others: &[&PathBuf]) -> Result<()> {
    kubectl(test, "wait", application, &["--for=condition=Available", "--timeout=90s"])?;
    for file in others {
        kubectl(test, "apply", file, &[])?;
        let outcome = answers(test, file).await.with_context(|| file.display().to_string());
        kubectl(test, "delete", file, &["--ignore-not-found"])?;
        outcome?;
    }
    Ok(())
}

/// Checks every Service of a manifest: programmed, with the addresses that it asks for, reachable on every port, and under
/// policy Local with the client's own address.
async fn answers(test: &TestContext, file: &Path) -> Result<()> {
    let applied: Value = serde_json::from_str(&kubectl(test, "get", file, &["-o", "json"])?)?;
    let objects = applied["items"].as_array().cloned().unwrap_or_else(|| vec![applied.clone()]);
    let services = objects.into_iter().filter(|object| object["kind"] == "Service");
    let services: Vec<Service> = services.map(serde_json::from_value).collect::<Result<_, _>>()?;
    ensure!(!services.is_empty(), "no Service in it");
    for service in services {
        let name = service.name_any();
        test.wait_condition(&name, names::PROGRAMMED, "True").await?;
        let families = service.spec.as_ref().and_then(|spec| spec.ip_families.clone()).unwrap_or_default();
        let addresses = until(format!("addresses of {name}"), TIMEOUT, async || -> Result<_> {
            let found = published(&test.service(&name).await?);
            ensure!(found.len() == families.len(), "it publishes {found:?} for {families:?}");
            Ok(found)
        })
        .await?;
        if let Some(requested) = service.annotations().get(names::ADDRESSES) {
            let requested: Vec<IpAddr> = requested.split(',').map(str::parse).collect::<Result<_, _>>()?;
            ensure!(addresses == requested, "{name} has {addresses:?}, not {requested:?}");
        }
        for address in addresses {
            reach(test, &service, address).await.with_context(|| name.clone())?;
        }
    }
    Ok(())
}

async fn reach(test: &TestContext, service: &Service, address: IpAddr) -> Result<()> {
    let spec = service.spec.as_ref().context("no spec")?;
    let [client, _] = test.suite.clients();
    for port in spec.ports.iter().flatten() {
        let to = SocketAddr::new(address, u16::try_from(port.port)?);
        let udp = port.protocol.as_deref() == Some("UDP");
        let ask = async || {
            if udp { net::ask(to, "clientip").await } else { net::page(to, "/clientip").await }
        };
        let text = until(format!("an answer of {to}"), TIMEOUT, ask).await?;
        let seen: SocketAddr = text.trim().parse().with_context(|| format!("{to} answers {text:?}"))?;
        if spec.external_traffic_policy.as_deref() == Some("Local") {
            let own = client.address(Family::of(address));
            ensure!(seen.ip() == own, "the client {own} is seen as {seen}");
        }
    }
    Ok(())
}

/// The manifests, in the order of their names.
fn manifests() -> Result<Vec<PathBuf>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        files.push(entry?.path());
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    Ok(files)
}

/// Runs `kubectl VERB -f FILE` as administrator, in the namespace `default` where the file names none.
fn kubectl(test: &TestContext, verb: &str, file: &Path, options: &[&str]) -> Result<String> {
    let kubeconfig = test.suite.cluster(|cluster| cluster.kubeconfig());
    let mut command = Command::new("kubectl");
    command.arg("--kubeconfig").arg(kubeconfig).args([verb, "-f"]).arg(file).args(options);
    let output = block_in_place(|| command.output()).with_context(|| format!("running {command:?}"))?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "kubectl {verb} -f {} failed: {stdout}{stderr}", file.display());
    Ok(stdout.into_owned())
}
