// SPDX-License-Identifier: Apache-2.0
//! A node from outside: configures, starts and kills it, and runs commands in it.
//!
//! A node is a network namespace, and in it a process namespace with its own mounts and host name, whose first
//! process is `steerage-lab node-init` (see [`crate::node_init`]). Killing that kills the node, as a power failure does.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::addresses::{Host, Role, ServiceProxy};
use crate::archive;
use crate::cgroup;
use crate::command::run;
use crate::config;
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::netns::{self, in_netns};
use crate::probe::is_well;
use crate::progress::wait;
use crate::state::{Lab, PATH, write};
use crate::topology;

/// Maximum time until a node is ready.
pub const READY_WITHIN: Duration = Duration::from_mins(3);

/// The health port of kube-proxy, and of the agent that replaces it.
const PROXY_HEALTH: u16 = 10256;

/// Writes the configuration of a node's components.
pub fn configure(lab: &Lab, host: &Host) -> Result<()> {
    let Role::Node(number) = host.role else { return Ok(()) };
    let folder = lab.node_folder(&host.name);
    for part in ["cni", "lib/containerd", "lib/kubelet", "lib/cni", "log/pods", "log/containers"] {
        let part = folder.join(part);
        fs::create_dir_all(&part).doing(|| format!("making {}", part.display()))?;
    }
    let pause = archive::name_of(lab, "pause")?;
    write(&folder.join("containerd.toml"), &config::containerd(&pause, &folder.join("cni")))?;
    write(&folder.join("cni/10-lab.conflist"), &json_text(&config::cni(number)))?;
    // Pods that use the node's resolver get none: no packet leaves the lab.
    write(&folder.join("resolv.conf"), "options attempts:1\n")?;
    let kubelet = config::Kubelet {
        authority: &lab.credential("ca.crt"),
        certificate: &lab.credential(&format!("{}-kubelet.crt", host.name)),
        key: &lab.credential(&format!("{}-kubelet.key", host.name)),
        resolv_conf: &folder.join("resolv.conf"),
    };
    write(&folder.join("kubelet.json"), &json_text(&config::kubelet(&kubelet)))?;
    write(
        &folder.join("kube-proxy.json"),
        &json_text(&config::kube_proxy(host, &lab.kubeconfig("kube-proxy"), lab.plan.cloud)),
    )
}

/// Starts a node's processes in its namespace, which must exist.
pub fn start(lab: &Lab, host: &Host) -> Result<()> {
    // Not `ip netns exec`, whose fresh /sys hides the cgroups from the kubelet.
    let unshare = ["unshare", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc"];
    let mut command: Vec<_> = unshare.map(str::to_owned).to_vec();
    command.push(lab.executable().display().to_string());
    command.extend(["node-init", "--name", &lab.plan.name, &host.name].map(str::to_owned));
    daemon::spawn(lab, &host.name, &host.netns, &command).map(drop)
}

/// Kills a node like a power failure: its processes, links and addresses go.
pub fn kill(lab: &Lab, host: &Host) -> Result<()> {
    if !running(lab, host) {
        return Err(Error::Refused(format!(
            "{0} does not run: `hack/lab start-node {0}` starts it",
            host.name
        )));
    }
    daemon::stop(lab, &host.name, Signal::SIGKILL)?;
    let limit = Duration::from_secs(20);
    let hint = || format!("processes of {} still run", host.netns);
    let inode = netns::inode(&host.netns).into_iter().collect();
    wait("the end of the node's processes", limit, hint, || Ok(daemon::in_namespaces(&inode).is_empty()))?;
    topology::detach(&lab.plan, host)?;
    cgroup::remove(&lab.cgroup(), Some(&host.name))
}

/// Starts a killed node, and waits until Kubernetes has its heartbeat and its Services work.
pub fn revive(lab: &Lab, host: &Host) -> Result<()> {
    if running(lab, host) {
        return Err(Error::Refused(format!("{} is already running", host.name)));
    }
    // Left by a `kill-node` that was interrupted.
    topology::detach(&lab.plan, host)?;
    cgroup::remove(&lab.cgroup(), Some(&host.name))?;
    // A readiness that an earlier boot reported does not count.
    let _ = fs::remove_file(boot_id(lab, host));
    topology::attach(&lab.plan, host)?;
    start(lab, host)?;
    let hint = || format!("see {}", lab.log(&format!("{}-kubelet", host.name)).display());
    wait(&format!("a ready {}", host.name), READY_WITHIN, hint, || Ok(ready_since_boot(lab, host)))?;
    if lab.plan.service_proxy == ServiceProxy::Agent && !lab.has_edge() {
        return Ok(());
    }
    let hint = || format!("see `hack/lab status`, and the logs of what serves Services on {}", host.name);
    wait(&format!("a service proxy on {}", host.name), READY_WITHIN, hint, || {
        in_netns(&host.netns, || is_well(PROXY_HEALTH, "/healthz"))
    })
}

/// Waits until the containerd of every node answers.
pub fn wait_for_containerd(lab: &Lab, nodes: &[Host]) -> Result<()> {
    for host in nodes {
        let hint = || format!("see {}", lab.log(&format!("{}-containerd", host.name)).display());
        wait(&format!("containerd on {}", host.name), Duration::from_mins(1), hint, || {
            let pid = first_process(lab, host)?;
            Ok(UnixStream::connect(format!("/proc/{pid}/root{}", config::CONTAINERD_SOCKET)).is_ok())
        })?;
    }
    Ok(())
}

/// Whether the node's first process runs.
pub fn running(lab: &Lab, host: &Host) -> bool {
    daemon::find(lab, &host.name).is_some()
}

/// The running nodes.
pub fn all_running(lab: &Lab) -> Vec<Host> {
    lab.plan.nodes().into_iter().filter(|host| running(lab, host)).collect()
}

/// A program inside all namespaces of the node.
pub fn command(lab: &Lab, host: &Host, program: &Path) -> Result<Command> {
    let init = first_process(lab, host)?;
    let mut command = Command::new("nsenter");
    command.args(["-t", &init.to_string(), "-m", "-u", "-n", "-p", "--"]).arg(program);
    command.env_clear().env("PATH", PATH).env("HOME", "/root");
    Ok(command)
}

/// The id, in the machine's PID namespace, of the node's first process.
pub fn first_process(lab: &Lab, host: &Host) -> Result<i32> {
    let off = || {
        Error::Refused(format!(
            "{0} does not run: `hack/lab start-node {0}` starts it, `status` says more",
            host.name
        ))
    };
    let parent = daemon::find(lab, &host.name).ok_or_else(off)?.pid;
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).ok_or_else(off)
}

/// The file with the id of a node's present boot.
pub fn boot_id(lab: &Lab, host: &Host) -> PathBuf {
    lab.node_folder(&host.name).join("boot_id")
}

/// Whether a kubelet of the node's present boot has reported Ready; an older report proves nothing.
fn ready_since_boot(lab: &Lab, host: &Host) -> bool {
    let Ok(boot) = fs::read_to_string(boot_id(lab, host)) else { return false };
    let Ok(text) = run(lab.kubectl().args(["get", "node", &host.name, "-o", "json"])) else { return false };
    serde_json::from_str::<Value>(&text).is_ok_and(|node| {
        let status = &node["status"];
        let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        status["nodeInfo"]["bootID"] == boot.trim()
            && status["conditions"].as_array().is_some_and(|conditions| conditions.iter().any(ready))
    })
}

fn json_text(value: &Value) -> String {
    format!("{value:#}\n")
}
