// SPDX-License-Identifier: Apache-2.0
//! `install`: installs Steerage by its chart, with this lab's values. A second run applies only changes.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::addresses::{API_PORT, Cloud, Plan, ServiceProxy, VIPS_IPV4, VIPS_IPV6};
use crate::archive;
use crate::aws::Account;
use crate::command::run;
use crate::edge;
use crate::error::{Doing, Error, Result};
use crate::images;
use crate::node;
use crate::openstack::{self, Access};
use crate::passthrough;
use crate::progress::Progress;
use crate::state::{Lab, write};
use crate::up::wait_for_dns;

/// The namespace of the chart's objects.
pub const NAMESPACE: &str = "steerage-system";

/// The ServiceAccount of edges outside the cluster.
const EDGE_ACCOUNT: &str = "steerage-edge";

/// Maximum time until the chart's pods are ready.
const READY_WITHIN: &str = "--timeout=180s";

/// The caller's choices.
#[derive(Debug, Clone)]
pub struct Options {
    /// The checkout, with the chart and hack/images.
    pub root: PathBuf,
    /// Chart values beside the lab's own, as `helm --set` takes them.
    pub set: Vec<String>,
    /// Build the images first.
    pub build: bool,
}

/// Installs or upgrades Steerage, and waits until it and cluster DNS are ready.
pub fn install(lab: &Lab, options: &Options) -> Result<()> {
    let progress = Progress::start();
    if options.build {
        progress.say("building images");
        build(&options.root)?;
        progress.say("images are built");
    }
    let archives = images::own(lab)?;
    if archives.is_empty() {
        return Err(Error::Refused(format!(
            "no images of Steerage in {}: run hack/images",
            lab.images().display()
        )));
    }
    progress.say("loading images into the nodes");
    let loads = images::load(lab, &node::all_running(lab), &archives)?;
    progress.say(format!("images are on every node ({loads} loads)"));
    let values = lab.folder().join("config/values.json");
    let version = |stem: &str| archive::version(&lab.images().join(format!("{stem}.tar")));
    let mut chosen = chart_values(&lab.plan, &version("steerage-controller")?, &version("steerage-agent")?);
    match lab.plan.cloud {
        Some(Cloud::Aws) => add_aws(&mut chosen, &lab.plan, &Account::open(lab)?),
        Some(Cloud::OpenStack) => {
            let access = Access::open(lab)?;
            openstack::make_secret(lab, &access)?;
            add_openstack(&mut chosen, &lab.plan, &access);
        }
        Some(cloud @ (Cloud::Azure | Cloud::Gce)) => add_passthrough(&mut chosen, cloud, &lab.plan),
        None => add_edge(&mut chosen),
    }
    write(&values, &format!("{chosen:#}\n"))?;
    progress.say("installing the chart, and waiting until its pods are ready");
    run(&mut helm(lab, &options.root.join("charts/steerage"), &values, &options.set))?;
    progress.say("the chart is installed");
    if lab.plan.cloud.is_none() {
        let token = ["create", "token", EDGE_ACCOUNT, "-n", NAMESPACE, "--duration=8760h"];
        edge::install(lab, run(lab.kubectl().args(token))?.trim())?;
        progress.say(format!("{} edges are ready", lab.plan.edges));
    }
    progress.say("waiting for controller and agents");
    wait_for_pods(lab)?;
    progress.say("controller and agents are ready");
    if lab.plan.service_proxy == ServiceProxy::Agent && !has_dns(lab)? {
        // Its back-off has grown while no service proxy served the API server's ClusterIP.
        run(lab.kubectl().args(["delete", "pods", "-n", "kube-system", "-l", "k8s-app=kube-dns", "--now"]))?;
    }
    wait_for_dns(lab)?;
    progress.say("cluster DNS is ready");
    Ok(())
}

/// Builds the images, and shows the output.
fn build(root: &Path) -> Result<()> {
    let script = root.join("hack/images");
    let doing = || format!("running {}", script.display());
    let status = Command::new(&script).stdout(io::stderr()).status().doing(doing)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Refused(format!("{} failed: see above", script.display())))
}

fn has_dns(lab: &Lab) -> Result<bool> {
    let available =
        ["get", "deployment/coredns", "-n", "kube-system", "-o", "jsonpath={.status.availableReplicas}"];
    Ok(!run(lab.kubectl().args(available))?.is_empty())
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
    // Without it helm may create the address pools before the API server serves their kind.
    helm.args(["--wait", "--timeout", "3m"]);
    helm.arg("--values").arg(values);
    for pair in set {
        helm.args(["--set", pair]);
    }
    helm
}

/// The chart's values for a lab. Pods carry the version of their image, so that a new image under an old tag
/// restarts them, and nothing else does.
fn chart_values(plan: &Plan, controller: &str, agent: &str) -> Value {
    let annotations = |version: &str| json!({ "lab.steerage.dev/image": version });
    let mut agent = json!({ "kubeProxyReplacement": false, "podAnnotations": annotations(agent) });
    if plan.service_proxy == ServiceProxy::Agent {
        agent["kubeProxyReplacement"] = true.into();
        agent["apiServer"] = format!("{}:{API_PORT}", plan.control_plane().ipv4).into();
    }
    json!({
        "controller": {
            "serveUnsetClass": true,
            "podAnnotations": annotations(controller),
            // Tests wait for the deletion of orphans: found twice, but not ten minutes apart.
            "extraArgs": ["--orphan-grace-period=2s"],
        },
        "agent": agent,
    })
}

fn add_edge(values: &mut Value) {
    let pool = json!({ "name": "lab", "addresses": [VIPS_IPV4, VIPS_IPV6], "autoAssign": true });
    values["edge"] = json!({ "addressPools": [pool] });
}

/// The credentials are of nobody: moto takes any. Without the last variable the SDK would look for an instance's.
fn add_aws(values: &mut Value, plan: &Plan, account: &Account) {
    let environment = [
        ("AWS_ACCESS_KEY_ID", "lab"),
        ("AWS_SECRET_ACCESS_KEY", "lab"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ];
    let environment = environment.map(|(name, value)| json!({ "name": name, "value": value }));
    values["controller"]["provider"] = "aws".into();
    values["controller"]["extraEnv"] = environment.to_vec().into();
    values["aws"] = account.chart_values(plan);
    values["controller"]["podReadinessGates"] = true.into();
}

fn add_openstack(values: &mut Value, plan: &Plan, access: &Access) {
    values["controller"]["provider"] = "openstack".into();
    values["openstack"] = access.chart_values(plan);
}

fn add_passthrough(values: &mut Value, cloud: Cloud, plan: &Plan) {
    let (name, own, flag) = passthrough::chart_values(cloud, plan);
    values["controller"]["provider"] = name.into();
    values[name] = own;
    if let Some(flags) = values["controller"]["extraArgs"].as_array_mut() {
        flags.push(flag.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kube_proxy_replacement_is_set_only_without_kube_proxy() {
        let mut plan = Plan {
            name: "lab".into(),
            workers: 1,
            edges: 1,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        };
        let beside = chart_values(&plan, "1", "2");
        assert_eq!(beside["agent"]["kubeProxyReplacement"], false);
        assert_eq!(beside["agent"].get("apiServer"), None);
        assert_eq!(beside["agent"]["podAnnotations"]["lab.steerage.dev/image"], "2");
        plan.service_proxy = ServiceProxy::Agent;
        assert_eq!(chart_values(&plan, "1", "2")["agent"]["apiServer"], "10.77.0.2:6443");
        let mut in_gce = chart_values(&plan, "1", "2");
        add_passthrough(&mut in_gce, Cloud::Gce, &plan);
        assert_eq!(in_gce["controller"]["provider"], "gce");
        assert_eq!(in_gce["controller"]["extraArgs"][1], "--gce-api-endpoint=http://10.77.0.1:4580");
    }
}
