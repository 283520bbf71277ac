// SPDX-License-Identifier: Apache-2.0
//! GCE: the stand-in of Compute Engine, and glbc, Google's controller. Both programs make external passthrough load balancers with a
//! regional backend service and zonal groups of VM addresses, in which policy Local keeps the nodes with endpoints only.

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};
use steerage_testclouds::gce::{classify, instance};
use steerage_testclouds::{Cloud as StandIn, Server};
use tokio::runtime::Runtime;

use super::cloud::{Cloud, Member, Start, Wanted};
use super::objects::CLUSTER;
use super::recorder::{Action, Recorder};
use crate::who::Who;

const TAG: &str = "node";
/// Until an operation is complete. Most take some seconds.
const DELAY: Duration = Duration::from_millis(250);
/// Read by Steerage all the time: the health of targets.
const HEALTH: &str = "getHealth backendServices";

/// The stand-in behind a proxy.
pub(super) struct Gce {
    recorder: Recorder,
    server: Server,
    zones: Vec<String>,
}

impl Gce {
    pub(super) fn start(runtime: &Runtime) -> Result<Self> {
        let zones = ["a", "b"].map(|zone| format!("us-central1-{zone}"));
        // Credentials are never sent over plain HTTP.
        let server = Server::start(StandIn::Gce, &json!({ "zones": zones, "anonymous": true }))?;
        server.set_delay(DELAY)?;
        let recorder = Recorder::start(runtime, server.addr()?, action)?;
        Ok(Self { recorder, server, zones: zones.to_vec() })
    }

    fn list(&self, path: &str) -> Result<Vec<Value>> {
        let listed = self.server.compute("GET", path, None)?;
        Ok(listed["items"].as_array().cloned().unwrap_or_default())
    }

    fn region(&self, kind: &str) -> String {
        format!("regions/{}/{kind}", self.server.setting("region"))
    }

    /// The machines in all groups with this name.
    fn members(&self, group: &str) -> Result<BTreeSet<String>> {
        let mut members = BTreeSet::new();
        for zone in &self.zones {
            let path = format!("zones/{zone}/networkEndpointGroups");
            let all = self.list(&path)?;
            if !all.iter().any(|of| of["name"] == group) {
                continue;
            }
            let path = format!("{path}/{group}/listNetworkEndpoints");
            let listed = self.server.compute("POST", &path, Some(&json!({})))?;
            for item in listed["items"].as_array().into_iter().flatten() {
                let instance = item["networkEndpoint"]["instance"].as_str().context("no instance")?;
                members.extend(instance.rsplit('/').next().map(str::to_owned));
            }
        }
        Ok(members)
    }
}

impl Cloud for Gce {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn member(&self, number: usize) -> Result<Member> {
        let (name, zone) = (format!("node-{number}"), &self.zones[number % self.zones.len()]);
        let address = Ipv4Addr::new(10, 128, 0, u8::try_from(10 + number)?);
        self.server.add_instances(&[instance(&name, zone, address.into(), &[TAG])])?;
        let provider_id = format!("gce://{}/{zone}/{name}", self.server.setting("project"));
        Ok(Member { id: name.clone(), name, provider_id, address })
    }

    fn annotations(&self) -> Value {
        json!({"cloud.google.com/l4-rbs": "enabled"})
    }

    fn add_to_controller(&self, command: &mut Command, _: &Start<'_>) -> Result<()> {
        let addr = self.recorder.addr();
        command
            .env("GCE_METADATA_HOST", addr.to_string())
            .args(["--provider", "gce", "--default-steering", "api", "--gce-cluster-name", CLUSTER])
            .args(["--gce-project", self.server.setting("project")])
            .args(["--gce-region", self.server.setting("region"), "--gce-node-tags", TAG])
            .args(["--gce-network", "default", "--gce-subnetwork", "default"])
            .args(["--gce-api-endpoint", &format!("http://{addr}")]);
        Ok(())
    }

    /// Only what concerns these Services; by default it uses groups of instances.
    fn add_to_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        let addr = self.recorder.addr();
        let file = start.folder.join("gce.conf");
        let project = self.server.setting("project");
        let config = format!(
            "[global]\nproject-id = {project}\nnetwork-project-id = {project}\nnetwork-name = default\n\
             subnetwork-name = default\nnode-tags = {TAG}\nlocal-zone = {}\napi-endpoint = http://{addr}/compute/v1/\n",
            self.zones[0]
        );
        fs::write(&file, config)?;
        command
            .env("GCE_METADATA_HOST", addr.to_string())
            .arg(format!("--config-file-path={}", file.display()))
            .arg(format!("--override-compute-api-endpoint=http://{addr}/compute/v1/"))
            .args(["--run-ingress-controller=false", "--run-l4-netlb-controller", "--enable-l4-netlb-neg"])
            .args(["--enable-l4-netlb-neg-default", "--enable-ig-controller=false", "--enable-pinhole"])
            .arg(format!("--gke-cluster-name={CLUSTER}"));
        Ok(())
    }

    fn missing(&self, _: Who, wanted: &Wanted<'_>) -> Result<Option<String>> {
        let rules = self.list(&self.region("forwardingRules"))?;
        let services = self.list(&self.region("backendServices"))?;
        let found = [rules.len(), services.len()];
        if found != [wanted.services as usize; 2] {
            return Ok(Some(format!("{found:?} forwarding rules and backend services")));
        }
        let port = wanted.port.to_string();
        let has_port =
            |rule: &Value| rule["ports"] == json!([port]) || rule["portRange"] == format!("{port}-{port}");
        if let Some(other) = rules.iter().find(|rule| !has_port(rule)) {
            return Ok(Some(format!("not port {port}: {other}")));
        }
        let endpoints = BTreeSet::from([wanted.endpoints.to_owned()]);
        for service in &services {
            let mut members = BTreeSet::new();
            for backend in service["backends"].as_array().into_iter().flatten() {
                let group = backend["group"].as_str().and_then(|group| group.rsplit('/').next());
                members.append(&mut self.members(group.context("no group")?)?);
            }
            if members != endpoints {
                return Ok(Some(format!("{members:?} instead of {endpoints:?}")));
            }
        }
        Ok(None)
    }

    fn left_over(&self) -> Result<usize> {
        let mut left = 0;
        for kind in ["forwardingRules", "backendServices", "healthChecks", "addresses"] {
            left += self.list(&self.region(kind))?.len();
        }
        for zone in &self.zones {
            left += self.list(&format!("zones/{zone}/networkEndpointGroups"))?.len();
        }
        Ok(left + self.list("global/firewalls")?.len())
    }
}

fn action(request: &Request) -> Option<Action> {
    let (name, is_read) = match classify(request) {
        CallKind::Read(name) => (name, true),
        CallKind::Write(name) => (name, false),
        CallKind::Background => return None,
    };
    Some(Action { api: "compute", is_read, tells_of_work: name != HEALTH, name })
}
