// SPDX-License-Identifier: Apache-2.0
//! Azure: the stand-in of Azure Resource Manager, and the cloud-controller-manager of cloud-provider-azure. Both make rules in one Standard
//! load balancer for all Services, with floating IP. The other's pools are of nodes' addresses, as Steerage's.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};
use steerage_testclouds::azure::classify;
use steerage_testclouds::{Cloud as StandIn, Server};
use tokio::runtime::Runtime;

use super::cloud::{Cloud, Member, Start, Wanted};
use super::objects::CLUSTER;
use super::recorder::{Action, Recorder};
use super::tls::Terminator;
use crate::who::Who;

const NETWORK: &str = "cluster";
const SUBNET: &str = "nodes";
const GROUP: &str = "nodes";
/// Until an operation is complete. Most take some seconds.
const DELAY: Duration = Duration::from_millis(250);

/// The stand-in behind a proxy.
pub(super) struct Azure {
    recorder: Recorder,
    server: Server,
    /// In front of both: the other program sends nothing without TLS.
    tls: OnceCell<Terminator>,
}

impl Azure {
    pub(super) fn start(runtime: &Runtime) -> Result<Self> {
        // Credentials are never sent over plain HTTP.
        let server = Server::start(StandIn::Azure, &json!({ "anonymous": true }))?;
        server.set_delay(DELAY)?;
        let recorder = Recorder::start(runtime, server.addr()?, action)?;
        Ok(Self { recorder, server, tls: OnceCell::new() })
    }

    /// Resources of a kind.
    fn all(&self, kind: &str) -> Result<Vec<Value>> {
        let all = self.server.snapshot()?;
        let of_kind = all.into_iter().filter(|(path, _)| path.starts_with(&format!("{kind}/")));
        Ok(of_kind.map(|(_, resource)| resource).collect())
    }
}

/// The parts of a load balancer of a kind.
fn parts<'a>(balancer: &'a Value, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    balancer["properties"].get(kind).and_then(Value::as_array).into_iter().flatten()
}

impl Cloud for Azure {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn member(&self, number: usize) -> Result<Member> {
        let name = format!("node-{number}");
        let address = Ipv4Addr::new(10, 240, 0, u8::try_from(10 + number)?);
        let (subscription, group) =
            (self.server.setting("subscription"), self.server.setting("resource_group"));
        let provider_id = format!(
            "azure:///subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{name}"
        );
        Ok(Member { id: address.to_string(), name, provider_id, address })
    }

    fn annotations(&self) -> Value {
        json!({})
    }

    fn add_to_controller(&self, command: &mut Command, _: &Start<'_>) -> Result<()> {
        command
            .args(["--provider", "azure", "--default-steering", "api", "--azure-cluster-name", CLUSTER])
            .args(["--azure-subscription-id", self.server.setting("subscription")])
            .args(["--azure-resource-group", self.server.setting("resource_group")])
            .args(["--azure-location", self.server.setting("location")])
            .args(["--azure-virtual-network", NETWORK, "--azure-subnet", SUBNET])
            .args(["--azure-network-security-group", GROUP])
            .args(["--azure-resource-manager", &format!("http://{}", self.recorder.addr())]);
        Ok(())
    }

    fn add_to_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        if self.tls.get().is_none() {
            let _ = self.tls.set(Terminator::start(start.folder, self.recorder.addr(), self.server.addr()?)?);
        }
        let tls = self.tls.get().context("no TLS")?;
        let (file, environment) = (start.folder.join("azure.json"), start.folder.join("environment.json"));
        let url = tls.url();
        // That of a cloud of one's own names all endpoints.
        let endpoints = json!({
            "name": "AzureStackCloud",
            "resourceManagerEndpoint": url,
            "activeDirectoryEndpoint": format!("{url}/"),
            "tokenAudience": "https://management.azure.com",
            "serviceManagementEndpoint": "https://management.azure.com",
        });
        fs::write(&environment, endpoints.to_string())?;
        let group = self.server.setting("resource_group");
        let config = json!({
            "cloud": "AzureStackCloud",
            "tenantId": self.server.setting("tenant"),
            "subscriptionId": self.server.setting("subscription"),
            // Clients with a secret ask Microsoft first whether the authority is known.
            "useManagedIdentityExtension": true,
            "resourceGroup": group,
            "location": self.server.setting("location"),
            "vnetName": NETWORK,
            "vnetResourceGroup": group,
            "subnetName": SUBNET,
            "securityGroupName": GROUP,
            "securityGroupResourceGroup": group,
            "loadBalancerSku": "standard",
            "loadBalancerBackendPoolConfigurationType": "nodeIP",
            "vmType": "standard",
            "useInstanceMetadata": false,
        });
        fs::write(&file, config.to_string())?;
        command
            .env("SSL_CERT_FILE", tls.certificate())
            // As in App Service: the address of a VM's metadata service cannot be set.
            .env("IDENTITY_ENDPOINT", tls.identity_endpoint())
            .env("IDENTITY_HEADER", "secret")
            .env("AZURE_ENVIRONMENT_FILEPATH", environment)
            .arg("--cloud-provider=azure")
            .arg(format!("--cloud-config={}", file.display()));
        Ok(())
    }

    /// Steerage's pools have the nodes with an endpoint, the other's all eligible nodes.
    fn missing(&self, who: Who, wanted: &Wanted<'_>) -> Result<Option<String>> {
        let members: BTreeSet<&str> = match who {
            Who::Ours => BTreeSet::from([wanted.endpoints]),
            Who::Peer => wanted.eligible.iter().copied().collect(),
        };
        let balancers = self.all("loadBalancers")?;
        let rules: Vec<&Value> =
            balancers.iter().flat_map(|balancer| parts(balancer, "loadBalancingRules")).collect();
        let ips = self.all("publicIPAddresses")?.len();
        if [rules.len(), ips] != [wanted.services as usize; 2] {
            return Ok(Some(format!("{} rules and {ips} public IPs", rules.len())));
        }
        let has_port = |rule: &&&Value| rule["properties"]["frontendPort"] == wanted.port;
        if let Some(other) = rules.iter().find(|rule| !has_port(rule)) {
            return Ok(Some(format!("not port {}: {other}", wanted.port)));
        }
        let pools = balancers.iter().flat_map(|balancer| parts(balancer, "backendAddressPools"));
        for pool in pools {
            let addresses = parts(pool, "loadBalancerBackendAddresses");
            let has: BTreeSet<&str> =
                addresses.filter_map(|address| address["properties"]["ipAddress"].as_str()).collect();
            if has != members {
                return Ok(Some(format!("{has:?} instead of {members:?}")));
            }
        }
        Ok(None)
    }

    fn left_over(&self) -> Result<usize> {
        let groups = self.all("networkSecurityGroups")?;
        let rules = groups.iter().map(|group| parts(group, "securityRules").count()).sum::<usize>();
        Ok(self.all("loadBalancers")?.len() + self.all("publicIPAddresses")?.len() + rules)
    }
}

fn action(request: &Request) -> Option<Action> {
    let (name, is_read) = match classify(request) {
        CallKind::Read(name) => (name, true),
        CallKind::Write(name) => (name, false),
        CallKind::Background => return None,
    };
    Some(Action { api: "network", is_read, tells_of_work: true, name })
}
