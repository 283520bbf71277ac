// SPDX-License-Identifier: Apache-2.0
//! What tests of the Azure provider need of its stand-in.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};

use crate::StandIn;

/// The version of the API that tests call.
const VERSION: &str = "2025-05-01";

impl StandIn {
    /// Makes a resource past the API, such as a `publicIPPrefixes` or a `networkInterfaces`.
    pub fn add_resource(&self, kind: &str, name: &str, properties: &Value) -> anyhow::Result<()> {
        let body = json!({ "type": kind, "name": name, "properties": properties });
        self.control("POST", "resources", Some(&body)).map(drop)
    }

    /// A token of the metadata service.
    pub fn azure_token(&self) -> anyhow::Result<String> {
        let path =
            "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://management.azure.com/";
        let (status, answer) = self.send("GET", path, &[("Metadata", "true")], None)?;
        ensure!(status == 200, "{path}: {status} {answer}");
        Ok(answer["access_token"].as_str().context("no token")?.to_owned())
    }

    /// The identifier of a resource of Microsoft.Network in the stand-in's resource group, such as `loadBalancers/web`.
    pub fn azure_id(&self, resource: &str) -> String {
        let (subscription, group) = (self.setting("subscription"), self.setting("resource_group"));
        format!("/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Network/{resource}")
    }

    /// Makes a call about a resource, such as `GET loadBalancers/web`, and waits until no operation changes it. Returns what it is then, or
    /// null if it does not exist.
    pub fn network(&self, method: &str, resource: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let token = format!("Bearer {}", self.azure_token()?);
        let headers = [("Authorization", token.as_str())];
        let path = format!("{}?api-version={VERSION}", self.azure_id(resource));
        let (status, answer) = self.send(method, &path, &headers, body)?;
        ensure!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        loop {
            let (status, answer) = self.send("GET", &path, &headers, None)?;
            let state = answer["properties"]["provisioningState"].as_str().unwrap_or_default();
            match (status, state) {
                (404, _) => return Ok(Value::Null),
                (200, "Updating" | "Deleting") => std::thread::sleep(Duration::from_millis(5)),
                (200, "Failed") => anyhow::bail!("{resource} failed: {answer}"),
                (200, _) => return Ok(answer),
                _ => anyhow::bail!("GET {path}: {status} {answer}"),
            }
        }
    }
}

/// The kind of a request: its method, and the kind of resource that its path names last. Tokens are not counted.
pub fn classify(request: &Request) -> CallKind {
    let path = request.uri().path();
    let Some((_, path)) = path.split_once("/providers/Microsoft.") else {
        return CallKind::Background;
    };
    let parts: Vec<_> = path.split('/').skip(1).collect();
    // Kinds and names alternate.
    let kind = parts.iter().step_by(2).next_back().copied().unwrap_or_default();
    let kind = if parts.first() == Some(&"locations") { "operations" } else { kind };
    let name = format!("{} {kind}", request.method());
    if request.method() == "GET" { CallKind::Read(name) } else { CallKind::Write(name) }
}
