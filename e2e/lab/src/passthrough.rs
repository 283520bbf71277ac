// SPDX-License-Identifier: Apache-2.0
//! The GCE or Azure of a lab with `--cloud gce` or `--cloud azure`: the program `steerage-passthrough` on the router, which is API and
//! load balancers.
//!
//! It knows nothing of Kubernetes. This module tells the nodes their virtual machines, and the chart the project or subscription.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::addresses::{Cloud, EXTERNAL_IPV6, FLOATING_IPV4, Host, Plan, Role};
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::progress::wait;
use crate::state::Lab;

/// The process, its log and its folder.
const NAME: &str = "passthrough";
/// The TCP port of the API, on the router.
const API_PORT: u16 = 4580;
/// Seconds of an operation. Real ones take some seconds.
const DELAY: f64 = 0.5;
/// Maximum time until the API answers and its load balancers are read.
const READY_WITHIN: Duration = Duration::from_mins(1);
/// The project in GCE.
const PROJECT: &str = "lab-project";
/// The region in GCE.
pub const GCE_REGION: &str = "us-central1";
/// The subscription in Azure.
const SUBSCRIPTION: &str = "00000000-0000-0000-0000-000000000001";
/// The resource group in Azure.
const RESOURCE_GROUP: &str = "cluster";
/// The region in Azure.
pub const AZURE_REGION: &str = "westeurope";

/// What the load balancers do for one VIP and protocol, as `view.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Forwarded {
    /// The VIP.
    pub vip: IpAddr,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The first and the last port of each range.
    pub ports: Vec<(u16, u16)>,
    /// The addresses of targets, each with whether it is healthy.
    pub targets: BTreeMap<IpAddr, bool>,
}

/// What the load balancers of a running lab do.
pub fn forwarded(lab: &Lab) -> Result<Vec<Forwarded>> {
    let file = view(lab);
    let text = fs::read(&file).doing(|| format!("reading {}", file.display()))?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path: file.display().to_string(), source })
}

/// Whether the cloud is one of these.
pub fn is_of(cloud: Cloud) -> bool {
    matches!(cloud, Cloud::Gce | Cloud::Azure)
}

/// The address of the API, as every host and pod sees it.
pub fn api(plan: &Plan) -> SocketAddrV4 {
    SocketAddrV4::new(plan.control_plane().gateways().0, API_PORT)
}

/// The `spec.providerID` of a node.
pub fn provider_id(cloud: Cloud, host: &Host) -> Option<String> {
    match cloud {
        Cloud::Gce => Some(format!("gce://{PROJECT}/{}/{}", zone(cloud, host), host.name)),
        Cloud::Azure => Some(format!(
            "azure:///subscriptions/{SUBSCRIPTION}/resourceGroups/{RESOURCE_GROUP}/providers/Microsoft.Compute/virtualMachines/{}",
            host.name
        )),
        Cloud::Aws | Cloud::OpenStack => None,
    }
}

/// The values of the chart: the name of the cloud's part, that part, and flags of the controller.
pub fn chart_values(cloud: Cloud, plan: &Plan) -> (&'static str, Value, String) {
    let api = api(plan);
    // To a plain http:// endpoint requests go without a token, which the stand-in does not ask for.
    if cloud == Cloud::Azure {
        let values = json!({
            "clusterName": plan.name,
            "subscriptionId": SUBSCRIPTION,
            "resourceGroup": RESOURCE_GROUP,
            "location": AZURE_REGION,
            "virtualNetwork": "lab",
            "subnet": "nodes",
            "networkSecurityGroup": "nodes",
        });
        return ("azure", values, format!("--azure-resource-manager=http://{api}"));
    }
    let values = json!({
        "clusterName": plan.name,
        "project": PROJECT,
        "region": GCE_REGION,
        "network": "default",
        "subnetwork": "nodes",
        "nodeTags": ["node"],
    });
    ("gce", values, format!("--gce-api-endpoint=http://{api}"))
}

/// Starts the program. The caller waits by [`wait_until_ready`].
pub fn start(lab: &Lab, cloud: Cloud, program: &Path) -> Result<()> {
    let folder = lab.folder().join(NAME);
    fs::create_dir_all(&folder).doing(|| format!("making {}", folder.display()))?;
    let own = folder.join("steerage-passthrough");
    fs::copy(program, &own).doing(|| format!("copying {}: build it with hack/lab", program.display()))?;
    let mut command = vec![own.display().to_string()];
    command.extend(flags(&lab.plan, cloud));
    command.push(format!("--folder={}", folder.display()));
    daemon::spawn(lab, NAME, &lab.plan.router(), &command).map(drop)
}

fn flags(plan: &Plan, cloud: Cloud) -> Vec<String> {
    let settings = match cloud {
        Cloud::Azure => json!({
            "subscription": SUBSCRIPTION,
            "resource_group": RESOURCE_GROUP,
            "location": AZURE_REGION,
            "public_range": FLOATING_IPV4,
            "public_range_v6": EXTERNAL_IPV6,
            "anonymous": true,
            "delay": DELAY,
        }),
        _ => json!({
            "project": PROJECT,
            "region": GCE_REGION,
            "external_range": FLOATING_IPV4,
            "unprobed": "UNHEALTHY",
            "anonymous": true,
            "delay": DELAY,
        }),
    };
    let mut flags = vec![
        format!("--cloud={cloud}"),
        format!("--listen={}", api(plan)),
        format!("--settings={settings}"),
        format!("--vips={FLOATING_IPV4}"),
        format!("--vips={EXTERNAL_IPV6}"),
    ];
    flags.extend(plan.nodes().iter().map(|node| {
        let zone = zone(cloud, node);
        format!("--node={}={},{},{zone},{}", node.name, node.ipv4, node.ipv6, node.netns)
    }));
    flags
}

/// The zone of a node's machine: three in turn.
fn zone(cloud: Cloud, host: &Host) -> String {
    let number = match host.role {
        Role::Node(number) => usize::from(number.saturating_sub(1) % 3),
        _ => 0,
    };
    match cloud {
        Cloud::Azure => (number + 1).to_string(),
        _ => format!("{GCE_REGION}-{}", ["a", "b", "c"][number]),
    }
}

/// Waits until the API answers and its load balancers were read once.
pub fn wait_until_ready(lab: &Lab) -> Result<()> {
    let log = lab.log(NAME);
    let see = || format!("see {}", log.display());
    wait("the cloud's API", READY_WITHIN, see, || {
        if daemon::find(lab, NAME).is_none() {
            return Err(Error::Refused(format!("the cloud of lab {} has ended: {}", lab.plan.name, see())));
        }
        Ok(view(lab).exists())
    })
}

fn view(lab: &Lab) -> PathBuf {
    lab.folder().join(NAME).join("view.json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::ServiceProxy;

    fn plan(cloud: Cloud) -> Plan {
        Plan {
            name: "lab".into(),
            workers: 2,
            edges: 0,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: Some(cloud),
            node_monitor_grace_period: "50s".to_owned(),
        }
    }

    #[test]
    fn every_node_gets_a_machine_in_a_zone() {
        let plan = plan(Cloud::Gce);
        let flags = flags(&plan, Cloud::Gce);
        assert_eq!(flags[..2], ["--cloud=gce", "--listen=10.77.0.1:4580"]);
        assert_eq!(flags[6], "--node=node2=10.77.1.2,fd77::1:2,us-central1-b,lab-node2");
        let id = provider_id(Cloud::Gce, &plan.nodes()[1]);
        assert_eq!(id.as_deref(), Some("gce://lab-project/us-central1-b/node2"));
    }

    #[test]
    fn chart_speaks_to_the_stand_in() {
        let (name, values, flag) = chart_values(Cloud::Azure, &plan(Cloud::Azure));
        assert_eq!((name, values["virtualNetwork"].as_str()), ("azure", Some("lab")));
        assert_eq!(flag, "--azure-resource-manager=http://10.77.0.1:4580");
        let (name, values, flag) = chart_values(Cloud::Gce, &plan(Cloud::Gce));
        assert_eq!((name, values["nodeTags"][0].as_str()), ("gce", Some("node")));
        assert_eq!(flag, "--gce-api-endpoint=http://10.77.0.1:4580");
    }

    #[test]
    fn view_is_read() {
        let text =
            r#"[{"vip": "fd79::1", "protocol": "tcp", "ports": [[80, 80]], "targets": {"fd77::1:1": true}}]"#;
        let view: Vec<Forwarded> = serde_json::from_str(text).unwrap();
        assert_eq!(view[0].ports, [(80, 80)]);
        assert!(view[0].targets.values().all(|is_healthy| *is_healthy));
    }
}
