// SPDX-License-Identifier: Apache-2.0
//! The AWS of a lab with `--cloud aws`: the program `steerage-nlb` on the router, and what it publishes about the account.
//!
//! It knows nothing of Kubernetes. This module tells the nodes their instances, and the chart the account.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::addresses::{INSTANCES_IPV4, NODES_IPV4, PODS_IPV4, Plan, VIPS_IPV4};
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::progress::wait;
use crate::state::Lab;

/// The process, its log and its folder.
const NAME: &str = "aws";
/// The load balancer that all Services may share.
pub const SHARED: &str = "lab";
/// The TCP port of the API, on the router.
const API_PORT: u16 = 4566;
/// Maximum time until the API answers and the account exists.
const READY_WITHIN: Duration = Duration::from_mins(1);

/// The account.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Account {
    /// The region.
    pub region: String,
    /// The availability zone of all instances.
    pub zone: String,
    /// The id of the VPC.
    pub vpc: String,
    /// The id of each node's instance.
    pub instances: BTreeMap<String, String>,
}

impl Account {
    /// The account of a running lab.
    pub fn open(lab: &Lab) -> Result<Self> {
        let file = folder(lab).join("account.json");
        let text = fs::read(&file).doing(|| format!("reading {}", file.display()))?;
        serde_json::from_slice(&text)
            .map_err(|source| Error::Json { path: file.display().to_string(), source })
    }

    /// The `spec.providerID` of a node.
    pub fn provider_id(&self, node: &str) -> Option<String> {
        self.instances.get(node).map(|instance| format!("aws:///{}/{instance}", self.zone))
    }

    /// The values of the chart under `aws`.
    pub fn chart_values(&self, plan: &Plan) -> Value {
        let api = format!("http://{}", api(plan));
        json!({
            "clusterName": plan.name,
            "vpcId": self.vpc,
            "region": self.region,
            "elbv2Endpoint": api,
            "ec2Endpoint": api,
            "sharedLoadBalancers": {
                SHARED: {
                    "namespaces": ["*"],
                    "annotations": { "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true" },
                },
            },
        })
    }
}

/// The address of the API, as every host and pod sees it.
pub fn api(plan: &Plan) -> SocketAddrV4 {
    SocketAddrV4::new(plan.control_plane().gateways().0, API_PORT)
}

/// Where a host name of a load balancer leads to; `None` as long as it leads nowhere.
pub fn resolve(lab: &Lab, hostname: &str) -> Result<Option<Ipv4Addr>> {
    let file = hosts(lab);
    let text = fs::read_to_string(&file).doing(|| format!("reading {}", file.display()))?;
    Ok(find(&text, hostname))
}

/// The file with the addresses of all load balancers, in the format of hosts(5).
pub fn hosts(lab: &Lab) -> PathBuf {
    folder(lab).join("hosts")
}

/// Starts the program. The caller waits for the account by [`wait_for_account`].
pub fn start(lab: &Lab, program: &Path) -> Result<()> {
    let folder = folder(lab);
    fs::create_dir_all(&folder).doing(|| format!("making {}", folder.display()))?;
    let own = folder.join("steerage-nlb");
    fs::copy(program, &own).doing(|| format!("copying {}: build it with hack/lab", program.display()))?;
    let mut command = vec![own.display().to_string()];
    command.extend(flags(&lab.plan));
    command.push(format!("--folder={}", folder.display()));
    daemon::spawn(lab, NAME, &lab.plan.router(), &command).map(drop)
}

fn flags(plan: &Plan) -> Vec<String> {
    let mut flags = vec![
        format!("--listen={}", api(plan)),
        format!("--vpc={NODES_IPV4}"),
        format!("--node-subnet={INSTANCES_IPV4}"),
        format!("--pod-subnet={PODS_IPV4}"),
        format!("--balancer-subnet={VIPS_IPV4}"),
    ];
    flags.extend(plan.nodes().iter().map(|node| format!("--node={}={}", node.name, node.ipv4)));
    flags
}

/// Waits until the account exists.
pub fn wait_for_account(lab: &Lab) -> Result<Account> {
    let log = lab.log(NAME);
    let see = || format!("see {}", log.display());
    wait("the account in AWS", READY_WITHIN, see, || {
        if daemon::find(lab, NAME).is_none() {
            return Err(Error::Refused(format!("the AWS of lab {} has ended: {}", lab.plan.name, see())));
        }
        Ok(folder(lab).join("account.json").exists())
    })?;
    Account::open(lab)
}

fn folder(lab: &Lab) -> PathBuf {
    lab.folder().join(NAME)
}

fn find(hosts: &str, hostname: &str) -> Option<Ipv4Addr> {
    let mut lines = hosts.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(_, name)| *name == hostname)?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::Cloud;

    fn plan() -> Plan {
        Plan { edges: 0, cloud: Some(Cloud::Aws), ..Plan::example() }
    }

    #[test]
    fn every_node_gets_an_instance_at_its_address() {
        let flags = flags(&plan());
        assert_eq!(flags[0], "--listen=10.77.0.1:4566");
        assert_eq!(flags[5..], ["--node=node1=10.77.1.1", "--node=node2=10.77.1.2"]);
    }

    #[test]
    fn node_is_found_by_its_instance() {
        let account = Account {
            region: "us-east-1".into(),
            zone: "us-east-1a".into(),
            vpc: "vpc-1".into(),
            instances: [("node1".to_owned(), "i-7".to_owned())].into(),
        };
        assert_eq!(account.provider_id("node1").as_deref(), Some("aws:///us-east-1a/i-7"));
        assert_eq!(account.provider_id("node2"), None);
        assert_eq!(account.chart_values(&plan())["ec2Endpoint"], "http://10.77.0.1:4566");
    }

    #[test]
    fn host_name_is_found_whole() {
        let hosts = "10.77.200.4 web.elb.amazonaws.com\n10.77.200.5 b\n";
        assert_eq!(find(hosts, "b"), Some([10, 77, 200, 5].into()));
        assert_eq!(find(hosts, "web"), None);
    }
}
