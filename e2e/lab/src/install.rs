// SPDX-License-Identifier: Apache-2.0
//! `install`: Steerage as a user installs it, with this lab's values. Run again, it changes only what changed.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::addresses::{API_PORT, ServiceProxy, VIPS_IPV4, VIPS_IPV6};
use crate::command::run;
use crate::edge;
use crate::error::{Error, Result};
use crate::images;
use crate::node;
use crate::progress::Progress;
use crate::state::{Lab, write};
use crate::up::wait_for_dns;

/// Where the chart puts everything.
pub const NAMESPACE: &str = "steerage-system";

/// The ServiceAccount of edges outside of the cluster.
const EDGE_ACCOUNT: &str = "steerage-edge";

/// How long the chart's pods may take.
const READY_WITHIN: &str = "--timeout=180s";

/// What a caller may choose.
#[derive(Debug, Clone)]
pub struct Options {
    /// The checkout, with the chart and hack/images.
    pub root: PathBuf,
    /// Values for the chart beside the lab's own, as `helm --set` takes them.
    pub set: Vec<String>,
    /// Builds the images first.
    pub build: bool,
}

/// Installs or upgrades Steerage and returns when all of it, and cluster DNS, is ready.
pub fn install(lab: &Lab, options: &Options) -> Result<()> {
    let progress = Progress::start();
    if options.build {
        run(&mut Command::new(options.root.join("hack/images")))?;
        progress.say("images are built");
    }
    let archives = images::own(lab)?;
    if archives.is_empty() {
        return Err(Error::Refused(format!(
            "no images of Steerage in {}: run hack/images",
            lab.images().display()
        )));
    }
    let loads = images::load(lab, &node::all_running(lab), &archives)?;
    progress.say(format!("images are on every node ({loads} loads)"));
    let versions: Result<Vec<_>> = archives.iter().map(|archive| images::version(archive)).collect();
    let values = lab.folder().join("config/values.json");
    write(&values, &format!("{:#}\n", chart_values(lab, &versions?.join(" "))))?;
    run(&mut helm(lab, &options.root.join("charts/steerage"), &values, &options.set))?;
    progress.say("the chart is installed");
    let token = ["create", "token", EDGE_ACCOUNT, "-n", NAMESPACE, "--duration=8760h"];
    edge::install(lab, run(lab.kubectl().args(token))?.trim())?;
    progress.say(format!("{} edges are ready", lab.plan.edges));
    wait_for_pods(lab)?;
    progress.say("controller and agents are ready");
    wait_for_dns(lab)?;
    progress.say("cluster DNS is ready");
    Ok(())
}

/// Returns when every Deployment and DaemonSet of the chart has rolled out.
pub fn wait_for_pods(lab: &Lab) -> Result<()> {
    let names = run(lab.kubectl().args(["get", "deployments,daemonsets", "-n", NAMESPACE, "-o", "name"]))?;
    for name in names.lines() {
        run(lab.kubectl().args(["rollout", "status", name, "-n", NAMESPACE, READY_WITHIN]))?;
    }
    Ok(())
}

fn helm(lab: &Lab, chart: &Path, values: &Path, set: &[String]) -> Command {
    let mut helm = lab.command_in(&lab.plan.control_plane().netns, &lab.bin("helm"));
    helm.arg("--kubeconfig").arg(lab.kubeconfig("admin"));
    helm.args(["upgrade", "--install", "steerage"]).arg(chart).args(["-n", NAMESPACE, "--create-namespace"]);
    helm.arg("--values").arg(values);
    for pair in set {
        helm.args(["--set", pair]);
    }
    helm
}

/// The chart's values for this lab. Pods carry the version of the images, so that new images under an old tag
/// restart them, and nothing else does.
fn chart_values(lab: &Lab, images: &str) -> Value {
    let annotations = json!({ "lab.steerage.dev/images": images });
    let agent = match lab.plan.service_proxy {
        ServiceProxy::KubeProxy => json!({ "services": "labelled", "podAnnotations": annotations }),
        ServiceProxy::Steerage => json!({
            "services": "all",
            "apiServer": format!("{}:{API_PORT}", lab.plan.control_plane().ipv4),
            "podAnnotations": annotations,
        }),
    };
    json!({
        "controller": { "serveUnsetClass": true, "podAnnotations": annotations },
        "agent": agent,
        "edge": {
            "addressPools": [{ "name": "lab", "addresses": [VIPS_IPV4, VIPS_IPV6], "autoAssign": true }],
        },
    })
}
