// SPDX-License-Identifier: Apache-2.0
//! The OpenStack of a lab with `--cloud openstack`: Keystone, Neutron and Octavia on the router, and an amphora, which forwards, on a host
//! of its own. `e2e/openstack` has the programs.
//!
//! They know nothing of Kubernetes. This module gives the chart the credentials and the networks.

use std::env;
use std::fs;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::addresses::{FLOATING_IPV4, NODES_IPV4, Plan};
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::install::NAMESPACE;
use crate::progress::wait;
use crate::state::{Lab, write};
use crate::up::apply;

/// The process of the APIs, its log and its folder.
const APIS: &str = "openstack";
/// The process of the load balancers, its log and its folder.
const AMPHORA: &str = "amphora";
/// The provider driver of Octavia.
const DRIVER: &str = "amphora-lab";
/// The Secret with the credentials.
const SECRET: &str = "steerage-openstack";
/// The TCP port of the APIs, on the router.
const API_PORT: u16 = 5000;
/// The TCP port of the amphora.
const AMPHORA_PORT: u16 = 9443;
/// What Octavia may give load balancers of the nodes' subnet: others have addresses there, of which Neutron knows nothing.
const VIPS: &str = "10.77.200.1-10.77.200.254";
/// Seconds until Octavia carries out a change. Real amphorae take one to three.
const DELAY: &str = "0.3";
/// Maximum time until the APIs answer and the networks exist.
const READY_WITHIN: Duration = Duration::from_mins(5);

/// What the cluster's project has.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Access {
    /// The URL of Keystone.
    pub auth_url: String,
    /// The secret of the application credential.
    pub secret: String,
    /// The ID of the application credential.
    pub application_credential_id: String,
    /// The subnet of nodes and VIPs.
    pub subnet_id: String,
    /// The network of floating IPs.
    pub floating_network_id: String,
}

impl Access {
    /// That of a running lab.
    pub fn open(lab: &Lab) -> Result<Self> {
        let file = access(lab);
        let text = fs::read(&file).doing(|| format!("reading {}", file.display()))?;
        serde_json::from_slice(&text)
            .map_err(|source| Error::Json { path: file.display().to_string(), source })
    }

    /// The values of the chart under `openstack`.
    pub fn chart_values(&self, plan: &Plan) -> Value {
        json!({
            "clusterName": plan.name,
            "cloudsSecret": SECRET,
            "subnetId": self.subnet_id,
            "floatingNetworkId": self.floating_network_id,
            "provider": DRIVER,
        })
    }

    /// A `clouds.yaml`, in JSON, which is YAML, too.
    fn clouds(&self) -> Value {
        json!({ "clouds": { "openstack": {
            "auth_type": "v3applicationcredential",
            "auth": {
                "auth_url": self.auth_url,
                "application_credential_id": self.application_credential_id,
                "application_credential_secret": self.secret,
            },
            "region_name": "RegionOne",
        } } })
    }
}

/// The address of the APIs, as every host and pod sees it.
pub fn api(plan: &Plan) -> SocketAddrV4 {
    SocketAddrV4::new(plan.control_plane().gateways().0, API_PORT)
}

/// The file with the credentials.
pub fn clouds(lab: &Lab) -> PathBuf {
    lab.credential("clouds.yaml")
}

/// Starts the programs. The caller waits by [`wait_for_access`].
pub fn start(lab: &Lab) -> Result<()> {
    let python = lab.cache().join("openstack/bin/python");
    if !python.exists() {
        return Err(Error::Refused(format!("{} is missing: run hack/prepare openstack", python.display())));
    }
    let programs = programs(lab)?;
    let Some(host) = lab.plan.amphora() else { return Ok(()) };
    let listen = format!("{}:{AMPHORA_PORT}", host.ipv4);
    let folder = lab.folder().join(AMPHORA);
    let command = |program: &str, flags: &[&str]| {
        let script = programs.join(program);
        let mut words = vec![python.display().to_string(), "-B".to_owned(), script.display().to_string()];
        words.extend(flags.iter().map(ToString::to_string));
        words
    };
    let shown = folder.display().to_string();
    let flags = ["--listen", &listen, "--folder", &shown, "--interface", "eth0"];
    daemon::spawn(lab, AMPHORA, &host.netns, &command("amphora.py", &flags))?;
    let (address, port) = (api(&lab.plan).ip().to_string(), API_PORT.to_string());
    let state = lab.folder().join(APIS).display().to_string();
    let flags = [
        ["--listen", &address],
        ["--port", &port],
        ["--delay", DELAY],
        ["--state", &state],
        ["--subnet", NODES_IPV4],
        ["--vips", VIPS],
        ["--floating", FLOATING_IPV4],
        ["--amphora", &listen],
        ["--amphora-folder", &shown],
        ["--inside", host.bridge()],
    ];
    daemon::spawn(lab, APIS, &lab.plan.router(), &command("server.py", flags.as_flattened())).map(drop)
}

/// Waits until the networks exist, and writes the credentials.
pub fn wait_for_access(lab: &Lab) -> Result<()> {
    let see = || format!("see {}", lab.log(APIS).display());
    wait("OpenStack's APIs", READY_WITHIN, see, || {
        for component in [APIS, AMPHORA] {
            if daemon::find(lab, component).is_none() {
                let log = lab.log(component);
                return Err(Error::Refused(format!("{component} has ended: see {}", log.display())));
            }
        }
        Ok(access(lab).exists())
    })?;
    write(&clouds(lab), &format!("{:#}\n", Access::open(lab)?.clouds()))
}

/// Makes the Secret that the chart mounts.
pub fn make_secret(lab: &Lab, access: &Access) -> Result<()> {
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": SECRET, "namespace": NAMESPACE },
            "stringData": { "clouds.yaml": access.clouds().to_string() },
        },
    ] });
    apply(lab, &objects)
}

/// The folder of `amphora.py` and `server.py`, copied so that a lab keeps what it runs.
fn programs(lab: &Lab) -> Result<PathBuf> {
    let root = env::var_os("STEERAGE_ROOT").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let (from, to) = (root.join("e2e/openstack"), lab.folder().join("programs"));
    fs::create_dir_all(&to).doing(|| format!("making {}", to.display()))?;
    let entries = fs::read_dir(&from).doing(|| format!("reading {}: set STEERAGE_ROOT", from.display()))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "py") {
            let copy = to.join(path.file_name().unwrap_or_default());
            fs::copy(&path, &copy).doing(|| format!("copying {}", path.display()))?;
        }
    }
    Ok(to)
}

fn access(lab: &Lab) -> PathBuf {
    Path::join(&lab.folder(), "openstack/access.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_and_credentials_have_what_the_project_has() {
        let access: Access = serde_json::from_value(json!({
            "auth_url": "http://10.77.0.1:5000/identity/v3",
            "secret": "s",
            "application_credential_id": "c",
            "subnet_id": "inside",
            "floating_network_id": "outside",
        }))
        .unwrap();
        let plan = Plan {
            name: "lab".into(),
            workers: 1,
            edges: 0,
            service_proxy: crate::addresses::ServiceProxy::KubeProxy,
            cloud: Some(crate::addresses::Cloud::OpenStack),
            node_monitor_grace_period: "50s".to_owned(),
        };
        let values = access.chart_values(&plan);
        assert_eq!(
            (&values["subnetId"], &values["floatingNetworkId"]),
            (&json!("inside"), &json!("outside"))
        );
        assert_eq!(access.clouds()["clouds"]["openstack"]["auth"]["application_credential_id"], "c");
        assert_eq!(api(&plan).to_string(), "10.77.0.1:5000");
    }
}
