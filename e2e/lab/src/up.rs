// SPDX-License-Identifier: Apache-2.0
//! `up`: makes a cluster and waits until its nodes are ready.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::addresses::{Cloud, Host, Plan, ServiceProxy};
use crate::archive;
use crate::aws;
use crate::command::{run, run_with};
use crate::control_plane;
use crate::credentials;
use crate::error::{Doing, Error, Result};
use crate::images;
use crate::manifests;
use crate::netns;
use crate::node;
use crate::openstack;
use crate::passthrough;
use crate::progress::Progress;
use crate::state::{self, Lab, PATH};
use crate::topology;

/// Programs that the distribution's packages bring.
const PROGRAMS: [&str; 9] =
    ["containerd", "ctr", "runc", "/usr/lib/cni/ptp", "ip", "nft", "nsenter", "unshare", "setsid"];

/// Programs that `hack/prepare` builds.
const BINARIES: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
];

/// Makes a lab, and waits until its nodes are ready and, with kube-proxy, its DNS answers.
pub fn up(plan: Plan) -> Result<Lab> {
    let progress = Progress::start();
    state::require_root()?;
    plan.check()?;
    let _lock = state::lock(&plan.name)?;
    refuse_existing(&plan.name)?;
    let executable = executable()?;
    let lab = Lab::plan(plan)?;
    check_programs(&lab)?;
    let archives = images::common(&lab)?;
    lab.create()?;
    fs::copy(&executable, lab.executable()).doing(|| format!("copying {}", executable.display()))?;
    credentials::create(&lab)?;
    topology::build(&lab.plan)?;
    progress.say(format!("network: {} hosts and a router", lab.plan.hosts().len()));

    match lab.plan.cloud {
        Some(Cloud::Aws) => aws::start(&lab, &executable.with_file_name("steerage-nlb"))?,
        Some(Cloud::OpenStack) => openstack::start(&lab)?,
        Some(cloud @ (Cloud::Azure | Cloud::Gce)) => {
            passthrough::start(&lab, cloud, &executable.with_file_name("steerage-passthrough"))?;
        }
        None => {}
    }
    control_plane::start_store(&lab)?;
    let nodes = lab.plan.nodes();
    for host in &nodes {
        node::configure(&lab, host)?;
        node::start(&lab, host)?;
    }
    control_plane::wait_until_ready(&lab)?;
    progress.say("API server is ready");
    control_plane::start_controllers(&lab)?;
    let account = match lab.plan.cloud {
        Some(Cloud::Aws) => Some(aws::wait_for_account(&lab)?),
        _ => None,
    };
    let provider_id = |host: &Host| match lab.plan.cloud {
        Some(Cloud::Aws) => account.as_ref()?.provider_id(&host.name),
        cloud => passthrough::provider_id(cloud?, host),
    };
    apply(&lab, &manifests::nodes(&lab.plan, provider_id))?;
    node::wait_for_containerd(&lab, &nodes)?;
    images::load(&lab, &nodes, &archives)?;
    progress.say(format!("{} images are on every node", archives.len()));
    let seconds = node::READY_WITHIN.as_secs();
    run(lab.kubectl().args([
        "wait",
        "--for=condition=Ready",
        "node",
        "--all",
        &format!("--timeout={seconds}s"),
    ]))?;
    progress.say(format!("{} nodes are ready", nodes.len()));
    apply(&lab, &manifests::dns(&archive::name_of(&lab, "coredns")?))?;
    if lab.plan.service_proxy == ServiceProxy::KubeProxy {
        wait_for_dns(&lab)?;
        progress.say("cluster DNS is ready");
    } else {
        progress.say("no service proxy runs: `hack/lab install` starts the agent, which makes DNS reachable");
    }
    if lab.plan.cloud == Some(Cloud::OpenStack) {
        openstack::wait_for_access(&lab)?;
        progress.say("OpenStack's APIs are ready");
    }
    if lab.plan.cloud.is_some_and(passthrough::is_of) {
        passthrough::wait_until_ready(&lab)?;
        progress.say("the cloud's API is ready");
    }
    progress.say(format!("lab {} is up", lab.plan.name));
    Ok(lab)
}

/// Applies objects as administrator; server-side, so that an object that a component made first is completed.
pub fn apply(lab: &Lab, objects: &serde_json::Value) -> Result<()> {
    let mut kubectl = lab.kubectl();
    kubectl.args(["apply", "--server-side", "--force-conflicts", "--field-manager=lab", "-f", "-"]);
    run_with(&mut kubectl, &objects.to_string()).map(drop)
}

/// Waits until every replica of cluster DNS is available.
pub fn wait_for_dns(lab: &Lab) -> Result<()> {
    run(lab.kubectl().args([
        "rollout",
        "status",
        "deployment/coredns",
        "-n",
        "kube-system",
        "--timeout=120s",
    ]))
    .map(drop)
}

fn refuse_existing(name: &str) -> Result<()> {
    if state::folder(name)?.exists() || !netns::of_lab(name).is_empty() {
        return Err(Error::Refused(format!(
            "lab {name} exists: end it first with `hack/lab down --name {name}`"
        )));
    }
    Ok(())
}

fn check_programs(lab: &Lab) -> Result<()> {
    let built = BINARIES.into_iter().filter(|name| !lab.bin(name).exists());
    let on_path = |name: &str| PATH.split(':').any(|folder| Path::new(folder).join(name).exists());
    let of_cloud = (lab.plan.cloud == Some(Cloud::OpenStack)).then_some("haproxy");
    let debian =
        PROGRAMS.into_iter().chain(of_cloud).filter(|name| !Path::new(name).exists() && !on_path(name));
    let missing: Vec<_> = built.chain(debian).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Refused(format!("missing: {}; run hack/prepare", missing.join(", "))))
}

/// The program `steerage-lab`, which nodes run. Other users of this library name it in `STEERAGE_LAB`.
fn executable() -> Result<PathBuf> {
    if let Some(path) = env::var_os("STEERAGE_LAB") {
        return Ok(path.into());
    }
    let own = env::current_exe().doing(|| "finding the lab's own binary".to_owned())?;
    if own.file_name().is_some_and(|name| name == "steerage-lab") {
        return Ok(own);
    }
    Err(Error::Refused("set STEERAGE_LAB to the path of the program steerage-lab".into()))
}
