// SPDX-License-Identifier: Apache-2.0
//! etcd, API server, controller manager and scheduler, in the control plane's namespace.

use std::net::TcpStream;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use crate::addresses::{API_PORT, SERVICES_IPV4, SERVICES_IPV6};
use crate::command::run;
use crate::daemon;
use crate::error::Result;
use crate::netns::in_netns;
use crate::progress::wait;
use crate::state::{Lab, write};

const ETCD: &str = "etcd";
const API_SERVER: &str = "kube-apiserver";
const CONTROLLER_MANAGER: &str = "kube-controller-manager";
const SCHEDULER: &str = "kube-scheduler";

/// Maximum time until the API server is ready.
const READY_WITHIN: Duration = Duration::from_mins(2);

/// Starts etcd and the API server, side by side.
pub fn start_store(lab: &Lab) -> Result<()> {
    write(&lab.folder().join("config/audit.json"), &format!("{:#}\n", audit_policy()))?;
    start(lab, ETCD, etcd(lab))?;
    start(lab, API_SERVER, api_server(lab))
}

/// Starts the components that need the API server.
pub fn start_controllers(lab: &Lab) -> Result<()> {
    start(lab, CONTROLLER_MANAGER, controller_manager(lab))?;
    start(lab, SCHEDULER, scheduler(lab))
}

/// Starts the API server again and returns when it answers.
pub fn start_api_server(lab: &Lab) -> Result<()> {
    start(lab, API_SERVER, api_server(lab))?;
    wait_until_ready(lab)
}

/// Kills the API server; its connections are reset.
pub fn stop_api_server(lab: &Lab) -> Result<()> {
    daemon::stop(lab, API_SERVER, Signal::SIGKILL)
}

/// Waits until the API server is ready.
pub fn wait_until_ready(lab: &Lab) -> Result<()> {
    let hint = || format!("see {} and {}", lab.log(API_SERVER).display(), lab.log(ETCD).display());
    let netns = lab.plan.control_plane().netns;
    wait("a ready API server", READY_WITHIN, hint, || {
        // Probing the port is cheap, running kubectl is not.
        let open = in_netns(&netns, || TcpStream::connect(("127.0.0.1", API_PORT)).is_ok())?;
        Ok(open && run(lab.kubectl().args(["get", "--raw", "/readyz"])).is_ok())
    })
}

fn start(lab: &Lab, component: &str, mut flags: Vec<String>) -> Result<()> {
    flags.insert(0, lab.bin(component).display().to_string());
    daemon::spawn(lab, component, &lab.plan.control_plane().netns, &flags).map(drop)
}

/// The audit policy logs writes to Steerage's objects, so that a test can count them outside the product.
fn audit_policy() -> serde_json::Value {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {
                "level": "Request",
                "verbs": ["create", "update", "patch", "delete", "deletecollection"],
                "resources": [{ "group": "steerage.dev" }],
            },
            { "level": "None" },
        ],
    })
}

fn etcd(lab: &Lab) -> Vec<String> {
    let clients = "http://127.0.0.1:2379";
    let peers = "http://127.0.0.1:2380";
    flags(&[
        ("data-dir", lab.folder().join("etcd").display().to_string()),
        ("listen-client-urls", clients.into()),
        ("advertise-client-urls", clients.into()),
        ("listen-peer-urls", peers.into()),
        ("initial-advertise-peer-urls", peers.into()),
        ("initial-cluster", format!("default={peers}")),
        // A lab need not survive a power failure of the machine.
        ("unsafe-no-fsync", "true".into()),
    ])
}

fn api_server(lab: &Lab) -> Vec<String> {
    let file = |name: &str| lab.credential(name).display().to_string();
    flags(&[
        ("etcd-servers", "http://127.0.0.1:2379".into()),
        ("bind-address", "::".into()),
        ("secure-port", API_PORT.to_string()),
        ("advertise-address", lab.plan.control_plane().ipv4.to_string()),
        ("service-cluster-ip-range", format!("{SERVICES_IPV4},{SERVICES_IPV6}")),
        ("tls-cert-file", file("apiserver.crt")),
        ("tls-private-key-file", file("apiserver.key")),
        ("client-ca-file", file("ca.crt")),
        ("service-account-issuer", "https://kubernetes.default.svc.cluster.local".into()),
        ("service-account-key-file", file("service-accounts.pub")),
        ("service-account-signing-key-file", file("service-accounts.key")),
        ("kubelet-certificate-authority", file("ca.crt")),
        ("kubelet-client-certificate", file("apiserver-kubelet-client.crt")),
        ("kubelet-client-key", file("apiserver-kubelet-client.key")),
        ("kubelet-preferred-address-types", "InternalIP".into()),
        ("authorization-mode", "Node,RBAC".into()),
        ("enable-admission-plugins", "NodeRestriction".into()),
        ("allow-privileged", "true".into()),
        // ClusterIPs are not reachable from the control plane's host.
        ("enable-aggregator-routing", "true".into()),
        ("audit-policy-file", lab.folder().join("config/audit.json").display().to_string()),
        ("audit-log-path", lab.log("audit").display().to_string()),
    ])
}

fn controller_manager(lab: &Lab) -> Vec<String> {
    let file = |name: &str| lab.credential(name).display().to_string();
    let kubeconfig = lab.kubeconfig(CONTROLLER_MANAGER).display().to_string();
    flags(&[
        ("kubeconfig", kubeconfig.clone()),
        ("authentication-kubeconfig", kubeconfig.clone()),
        ("authorization-kubeconfig", kubeconfig),
        ("bind-address", "127.0.0.1".into()),
        ("root-ca-file", file("ca.crt")),
        ("cluster-signing-cert-file", file("ca.crt")),
        ("cluster-signing-key-file", file("ca.key")),
        ("service-account-private-key-file", file("service-accounts.key")),
        ("use-service-account-credentials", "true".into()),
        ("service-cluster-ip-range", format!("{SERVICES_IPV4},{SERVICES_IPV6}")),
        // The lab derives each node's pod networks from its number.
        ("allocate-node-cidrs", "false".into()),
        ("node-monitor-grace-period", lab.plan.node_monitor_grace_period.clone()),
        ("leader-elect", "false".into()),
    ])
}

fn scheduler(lab: &Lab) -> Vec<String> {
    let kubeconfig = lab.kubeconfig(SCHEDULER).display().to_string();
    flags(&[
        ("kubeconfig", kubeconfig.clone()),
        ("authentication-kubeconfig", kubeconfig.clone()),
        ("authorization-kubeconfig", kubeconfig),
        ("bind-address", "127.0.0.1".into()),
        ("leader-elect", "false".into()),
    ])
}

fn flags(pairs: &[(&str, String)]) -> Vec<String> {
    pairs.iter().map(|(name, value)| format!("--{name}={value}")).collect()
}
