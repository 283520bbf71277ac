// SPDX-License-Identifier: Apache-2.0
//! What tests of the GCE provider need of its stand-in.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};

use crate::StandIn;

/// Virtual machines to have. See `Seeds.instance` in `gce/seeds.py` for all fields.
pub fn instance(name: &str, zone: &str, address: IpAddr, tags: &[&str]) -> Value {
    json!({ "name": name, "zone": zone, "address": address, "tags": tags })
}

impl StandIn {
    /// Makes virtual machines: those of [`instance`].
    pub fn add_instances(&self, instances: &[Value]) -> anyhow::Result<()> {
        self.control("POST", "instances", Some(&Value::Array(instances.to_vec()))).map(drop)
    }

    /// Removes a virtual machine, and with it its endpoints.
    pub fn remove_instance(&self, zone: &str, name: &str) -> anyhow::Result<()> {
        self.control("DELETE", &format!("instances/{zone}/{name}"), None).map(drop)
    }

    /// What a load balancer's probes say of a virtual machine: `HEALTHY` or `UNHEALTHY`, and the weight that it answers. Healthy without.
    pub fn set_gce_health(
        &self,
        zone: &str,
        name: &str,
        state: &str,
        weight: Option<u32>,
    ) -> anyhow::Result<()> {
        let mut health = json!({ "state": state });
        if let Some(weight) = weight {
            health["weight"] = weight.into();
        }
        let node = format!("{zone}/{name}");
        self.control("POST", "health", Some(&json!({ node: health }))).map(drop)
    }

    /// A token of the metadata server.
    pub fn gce_token(&self) -> anyhow::Result<String> {
        let path = "/computeMetadata/v1/instance/service-accounts/default/token";
        let (status, answer) = self.send("GET", path, &[("Metadata-Flavor", "Google")], None)?;
        ensure!(status == 200, "{path}: {status} {answer}");
        Ok(answer["access_token"].as_str().context("no token")?.to_owned())
    }

    /// Makes a call of the API in the stand-in's project, such as `GET regions/us-central1/addresses`, and waits for the operation that it
    /// starts. Returns the answer, or the operation.
    pub fn compute(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let token = format!("Bearer {}", self.gce_token()?);
        let headers = [("Authorization", token.as_str())];
        let path = format!("/compute/v1/projects/{}/{path}", self.setting("project"));
        let (status, mut answer) = self.send(method, &path, &headers, body)?;
        ensure!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        while answer["kind"] == "compute#operation" && answer["status"] != "DONE" {
            std::thread::sleep(Duration::from_millis(5));
            let link = answer["selfLink"].as_str().context("no link")?;
            let path = link.trim_start_matches("https://www.googleapis.com").to_owned();
            answer = self.send("GET", &path, &headers, None)?.1;
        }
        ensure!(answer.get("error").is_none() || answer["kind"] != "compute#operation", "{answer}");
        Ok(answer)
    }
}

/// The kind of a request: its method, and the collection or the action that its path names. Tokens are not counted.
pub fn classify(request: &Request) -> CallKind {
    let path = request.uri().path();
    let Some(path) = path.strip_prefix("/compute/v1/projects/") else {
        return CallKind::Background;
    };
    let parts: Vec<_> = path.split('/').skip(1).collect();
    let place = if matches!(parts.first(), Some(&("global" | "aggregated"))) { 1 } else { 2 };
    let (kind, action) = (parts.get(place).copied().unwrap_or("places"), parts.get(place + 2));
    let name = match action {
        Some(action) => format!("{action} {kind}"),
        None => format!("{} {kind}", request.method()),
    };
    let reads = ["listNetworkEndpoints", "getHealth", "wait"];
    if request.method() == "GET" || action.is_some_and(|action| reads.contains(action)) {
        CallKind::Read(name)
    } else {
        CallKind::Write(name)
    }
}
