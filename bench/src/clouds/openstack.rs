// SPDX-License-Identifier: Apache-2.0
//! OpenStack: the real Keystone, Neutron and Octavia with a provider driver of the tests, and cloud-provider-openstack. Both programs make
//! load balancers with a floating IP and a health monitor.

use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};
use steerage_testopenstack::{Server, classify};
use tokio::runtime::Runtime;

use super::cloud::{Cloud, Member, Start, Wanted};
use super::objects::CLUSTER;
use super::recorder::{Action, Recorder};
use crate::who::Who;

/// The driver of the tests that accepts everything.
const DRIVER: &str = "amphora-test";
/// Until a change is complete. Amphorae take seconds for a change, and a minute or more to be created.
const DELAY: Duration = Duration::from_millis(250);
/// Read by Steerage all the time: the health of targets.
const HEALTH: &str = "GET status";
const LBAAS: &str = "/load-balancer/v2.0/lbaas";

/// The services behind a proxy, which their catalog names.
pub(super) struct OpenStack {
    recorder: Recorder,
    server: Server,
}

impl OpenStack {
    pub(super) fn start(runtime: &Runtime) -> Result<Self> {
        let server = Server::start(DELAY, &[])?;
        let recorder = Recorder::start(runtime, server.addr()?, action)?;
        server.set_catalog(recorder.addr())?;
        Ok(Self { recorder, server })
    }

    fn list(&self, path: &str, kind: &str) -> Result<Vec<Value>> {
        let listed = self.server.call("GET", path, None)?;
        Ok(listed[kind].as_array().with_context(|| format!("no {kind}"))?.clone())
    }
}

impl Cloud for OpenStack {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Octavia knows addresses only.
    fn member(&self, number: usize) -> Result<Member> {
        let address = Ipv4Addr::new(10, 0, 0, u8::try_from(10 + number)?);
        let provider_id = format!("openstack:///00000000-0000-4000-8000-{number:012}");
        Ok(Member { name: format!("node-{number}"), id: address.to_string(), provider_id, address })
    }

    /// Without a monitor, cloud-provider-openstack's members are all nodes also under policy Local, and nothing says which of them serve.
    fn annotations(&self) -> Value {
        json!({"loadbalancer.openstack.org/enable-health-monitor": "true"})
    }

    fn add_to_controller(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        let access = self.server.access();
        let file = start.folder.join("clouds.yaml");
        // JSON is YAML.
        let clouds = json!({"clouds": {"openstack": {
            "auth_type": "v3applicationcredential",
            "auth": {
                "auth_url": access.auth_url,
                "application_credential_id": access.application_credential_id,
                "application_credential_secret": access.secret,
            },
            "region_name": "RegionOne",
        }}});
        fs::write(&file, clouds.to_string())?;
        command
            .env("OS_CLIENT_CONFIG_FILE", file)
            .args(["--provider", "openstack", "--default-steering", "api", "--openstack-cloud", "openstack"])
            .args(["--openstack-cluster-name", CLUSTER, "--openstack-provider", DRIVER])
            .args(["--openstack-subnet-id", &access.subnet_id])
            .args(["--openstack-floating-network-id", &access.floating_network_id]);
        Ok(())
    }

    fn add_to_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        let access = self.server.access();
        let file = start.folder.join("cloud.conf");
        let config = format!(
            "[Global]\nauth-url={}\nregion=RegionOne\napplication-credential-id={}\n\
             application-credential-secret={}\n\n\
             [LoadBalancer]\nlb-provider={DRIVER}\nsubnet-id={}\nfloating-network-id={}\n",
            access.auth_url,
            access.application_credential_id,
            access.secret,
            access.subnet_id,
            access.floating_network_id
        );
        fs::write(&file, config)?;
        command.arg("--cloud-provider=openstack").arg(format!("--cloud-config={}", file.display()));
        Ok(())
    }

    /// Steerage's members are the nodes with an endpoint, the other's all eligible nodes.
    fn missing(&self, who: Who, wanted: &Wanted<'_>) -> Result<Option<String>> {
        let mut members = match who {
            Who::Ours => vec![wanted.endpoints],
            Who::Peer => wanted.eligible.clone(),
        };
        members.sort_unstable();
        let balancers = self.list(&format!("{LBAAS}/loadbalancers"), "loadbalancers")?;
        let listeners = self.list(&format!("{LBAAS}/listeners"), "listeners")?;
        let floating = self.list("/network/v2.0/floatingips", "floatingips")?;
        let found = [balancers.len(), listeners.len(), floating.len()];
        if found != [wanted.services as usize; 3] {
            return Ok(Some(format!("{found:?} load balancers, listeners and floating IPs")));
        }
        for listener in &listeners {
            let (port, pool) = (&listener["protocol_port"], listener["default_pool_id"].as_str());
            let pool = pool.context("a listener without a pool")?;
            let has = self.list(&format!("{LBAAS}/pools/{pool}/members"), "members")?;
            let mut has: Vec<_> = has.iter().filter_map(|member| member["address"].as_str()).collect();
            has.sort_unstable();
            if *port != wanted.port || has != members {
                return Ok(Some(format!("port {port} has {has:?} instead of {members:?}")));
            }
        }
        let is_active = |of: &&Value| of["provisioning_status"] == "ACTIVE";
        let active = balancers.iter().filter(is_active).count();
        Ok((active < balancers.len()).then(|| format!("{active} of {} are ACTIVE", balancers.len())))
    }

    fn left_over(&self) -> Result<usize> {
        let balancers = self.list(&format!("{LBAAS}/loadbalancers"), "loadbalancers")?;
        Ok(balancers.len() + self.list("/network/v2.0/floatingips", "floatingips")?.len())
    }
}

fn action(request: &Request) -> Option<Action> {
    let (name, is_read) = match classify(request) {
        CallKind::Read(name) => (name, true),
        CallKind::Write(name) => (name, false),
        CallKind::Background => return None,
    };
    let api = if request.uri().path().starts_with("/network") { "network" } else { "load-balancer" };
    Some(Action { api, is_read, tells_of_work: name != HEALTH, name })
}
