// SPDX-License-Identifier: Apache-2.0
//! A kind cluster of `hack/kind` as a [`Cluster`]: nodes are containers, clients and the edge host are namespaces beside them.
//!
//! `hack/kind/test` runs the suite with the environment that this needs: `STEERAGE_CACHE`, and `DOCKER_HOST` where the daemon is that of
//! `hack/kind/docker`.

use std::env;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::{Cluster, Host, output};

const MANIFEST: &str = "/etc/kubernetes/manifests/kube-apiserver.yaml";
const PARKED: &str = "/etc/kubernetes/kube-apiserver.yaml";
/// Health of kube-proxy, or of the agent that replaces it.
const PROXY_HEALTH: &str = "http://127.0.0.1:10256/healthz";

/// A running kind cluster.
pub struct Kind {
    name: String,
    folder: PathBuf,
    nodes: Vec<Host>,
}

impl Kind {
    /// Opens a cluster that `hack/kind/up` and `hack/kind/install` made.
    pub fn open(name: &str) -> Result<Self> {
        let cache = env::var_os("STEERAGE_CACHE").context("STEERAGE_CACHE is not set: source hack/env")?;
        let folder = PathBuf::from(cache).join("kind").join(name);
        let listed = output(Command::new("kind").args(["get", "nodes", "--name", name]))?;
        // The control plane carries the label that keeps it out of load balancers.
        let mut workers: Vec<_> = listed.lines().filter(|node| node.contains("-worker")).collect();
        workers.sort_unstable();
        ensure!(!workers.is_empty(), "kind cluster {name} has no workers: make it with hack/kind/up");
        let nodes = workers.into_iter().map(|worker| inspect(name, worker)).collect::<Result<_>>()?;
        Ok(Self { name: name.to_owned(), folder, nodes })
    }

    fn control_plane(&self) -> String {
        format!("{}-control-plane", self.name)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(Command::new("kubectl").arg("--kubeconfig").arg(self.kubeconfig()).args(arguments))
    }

    /// A host that `hack/kind/up` connected beside the nodes.
    fn beside(&self, name: &str, ipv4: [u8; 4], ipv6: [u16; 8]) -> Host {
        Host {
            name: name.to_owned(),
            netns: format!("{}-{name}", self.name),
            ipv4: Ipv4Addr::from(ipv4),
            ipv6: Ipv6Addr::from(ipv6),
        }
    }

    /// When the node's kubelet last renewed its Lease.
    fn last_renewal(&self, node: &str) -> Result<String> {
        self.kubectl(&["get", "lease", node, "-n", "kube-node-lease", "-o", "jsonpath={.spec.renewTime}"])
    }

    /// One of the scripts that `hack/kind/install` wrote.
    fn script(&self, name: &str, arguments: &[&str]) -> Result<()> {
        output(Command::new(self.folder.join(name)).args(arguments)).map(drop)
    }
}

/// A node's addresses on the cluster's network. Its namespace is named after its container.
fn inspect(network: &str, container: &str) -> Result<Host> {
    let format = format!(
        "{{{{with index .NetworkSettings.Networks \"{network}\"}}}}{{{{.IPAddress}}}} {{{{.GlobalIPv6Address}}}}{{{{end}}}}"
    );
    let text = output(Command::new("docker").args(["inspect", "-f", &format, container]))?;
    let (ipv4, ipv6) =
        text.trim().split_once(' ').with_context(|| format!("{container} has no addresses: {text}"))?;
    Ok(Host {
        name: container.to_owned(),
        netns: container.to_owned(),
        ipv4: ipv4.parse()?,
        ipv6: ipv6.parse()?,
    })
}

fn wait(what: &str, mut there: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !there() {
        ensure!(start.elapsed() < Duration::from_mins(3), "{what} did not happen within 3 minutes");
        sleep(Duration::from_millis(500));
    }
    Ok(())
}

impl Cluster for Kind {
    fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    fn clients(&self) -> [Host; 2] {
        [1, 2]
            .map(|i| self.beside(&format!("client{i}"), [10, 78, 1, i], [0xfd78, 0, 0, 0, 0, 0, 1, i.into()]))
    }

    fn nodes(&self) -> Vec<Host> {
        self.nodes.clone()
    }

    fn edges(&self) -> Vec<Host> {
        vec![self.beside("edge1", [10, 77, 2, 1], [0xfd77, 0, 0, 0, 0, 0, 2, 1])]
    }

    fn exec(&self, host: &str, command: &[&str]) -> Result<String> {
        match self.edges().iter().find(|edge| edge.name == host) {
            Some(edge) => output(Command::new("ip").args(["netns", "exec", &edge.netns]).args(command)),
            None => output(Command::new("docker").args(["exec", host]).args(command)),
        }
    }

    fn kill_node(&self, node: &str) -> Result<()> {
        output(Command::new("docker").args(["kill", "--signal", "KILL", node])).map(drop)
    }

    fn start_node(&self, node: &str) -> Result<()> {
        // A readiness that an earlier boot reported does not count.
        let before = self.last_renewal(node)?;
        output(Command::new("docker").args(["start", node]))?;
        // A new container process has a new namespace, without the settings that `up` made.
        self.script("attach", &[node])?;
        wait(&format!("the readiness of {node}"), || {
            self.last_renewal(node).is_ok_and(|last| last != before)
                && self
                    .kubectl(&["wait", "--for=condition=Ready", "--timeout=1s", &format!("node/{node}")])
                    .is_ok()
        })?;
        wait(&format!("a service proxy on {node}"), || {
            self.exec(node, &["curl", "-sf", "-m", "2", "-o", "/dev/null", PROXY_HEALTH]).is_ok()
        })
    }

    fn stop_api_server(&self) -> Result<()> {
        // Without its manifest the kubelet does not start it again.
        self.exec(&self.control_plane(), &["mv", MANIFEST, PARKED])?;
        self.exec(&self.control_plane(), &["pkill", "-9", "-x", "kube-apiserver"]).map(drop)
    }

    fn start_api_server(&self) -> Result<()> {
        self.exec(&self.control_plane(), &["mv", PARKED, MANIFEST])?;
        wait("an answer of the API server", || self.kubectl(&["get", "--raw", "/readyz"]).is_ok())
    }

    fn kill_edge(&self, edge: &str) -> Result<()> {
        let pid = std::fs::read_to_string(self.folder.join(format!("{edge}.pid")))?;
        output(Command::new("kill").args(["-9", pid.trim()])).map(drop)
    }

    fn start_edge(&self, edge: &str) -> Result<()> {
        self.script(&format!("start-{edge}"), &[])
    }

    fn stop_edge(&self, edge: &str) -> Result<()> {
        let pid = std::fs::read_to_string(self.folder.join(format!("{edge}.pid")))?;
        output(Command::new("kill").arg(pid.trim()))?;
        wait(&format!("the end of {edge}"), || {
            Command::new("kill").args(["-0", pid.trim()]).status().is_ok_and(|status| !status.success())
        })
    }

    fn clean_edge(&self, node: &str) -> Result<()> {
        bail!("the edge's program stays on {node}: kind's nodes have no steerage-edge to remove it")
    }

    fn is_changeable(&self) -> bool {
        false
    }

    fn install(&self, values: &[&str]) -> Result<()> {
        bail!("the suite cannot change chart values on kind; run hack/kind/install --set: {values:?}")
    }

    fn logs(&self) -> Vec<PathBuf> {
        vec![self.folder.join("edge1.log")]
    }
}
