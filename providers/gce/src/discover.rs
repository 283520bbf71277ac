// SPDX-License-Identifier: Apache-2.0
//! Fills flags that are not set: from the metadata server, and from the VM on which the controller runs.

use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use steerage_provider_cloud::ApiMetrics;
use steerage_provider_cloud::http::{Http, NoAnswer};

use crate::client::{Call, Calls, Client};
use crate::config::{Config, ConfigError, GceArgs};
use crate::instances::Instance;
use crate::object::last;

/// The metadata server answers from the same machine.
const TIMEOUT: Duration = Duration::from_secs(5);

impl GceArgs {
    /// The same flags with those that are not set. Asks nobody if all are.
    ///
    /// # Errors
    ///
    /// If the metadata server or the API does not say what is missing.
    pub async fn discovered(self) -> Result<Self, ConfigError> {
        let Some(flag) = self.missing().next() else { return Ok(self) };
        // Google's libraries read the same variable.
        let host = std::env::var("GCE_METADATA_HOST").unwrap_or_else(|_| "169.254.169.254".to_owned());
        let http = Http::new(None).map_err(|error| ConfigError::Credentials(error.to_string()))?;
        let metadata = Metadata { http, host, flag };
        let endpoint = self.gce_api_endpoint.clone();
        let connect = || Client::new(&endpoint, ApiMetrics::default());
        discover(self, &metadata, connect).await
    }
}

struct Metadata {
    http: Http,
    host: String,
    flag: &'static str,
}

impl Metadata {
    async fn get(&self, path: &str) -> Result<String, ConfigError> {
        let url = format!("http://{}/computeMetadata/v1/{path}", self.host);
        let problem = |problem: String| {
            let text = format!("the metadata server does not say it ({problem}). Set the flag");
            ConfigError::Unknown(self.flag, text)
        };
        let request = http::Request::builder()
            .uri(&url)
            .header("metadata-flavor", "Google")
            .body(Bytes::new())
            .map_err(|error| problem(error.to_string()))?;
        let answer = tokio::time::timeout(TIMEOUT, self.http.send(request)).await;
        match answer.unwrap_or(Err(NoAnswer::Timeout)) {
            Ok(answer) if answer.status().is_success() => {
                Ok(String::from_utf8_lossy(answer.body()).trim().to_owned())
            }
            Ok(answer) => Err(problem(format!("{url}: {}", answer.status()))),
            Err(NoAnswer::Timeout) => Err(problem(format!("{url}: no answer"))),
            Err(NoAnswer::Connection(text)) => Err(problem(format!("{url}: {text}"))),
        }
    }
}

async fn discover(
    mut args: GceArgs,
    metadata: &Metadata,
    connect: impl Fn() -> Result<Client, ConfigError>,
) -> Result<GceArgs, ConfigError> {
    let missing: Vec<&'static str> = args.missing().collect();
    let is_missing = |flag: &str| missing.contains(&flag);
    if is_missing("--gce-project") {
        args.gce_project = Some(metadata.get("project/project-id").await?);
    }
    if is_missing("--gce-region") {
        let zone = metadata.get("instance/zone").await?;
        args.gce_region = last(&zone).rsplit_once('-').map(|(region, _)| region.to_owned());
    }
    if is_missing("--gce-node-tags") {
        let tags: Value = serde_json::from_str(&metadata.get("instance/tags").await?).unwrap_or_default();
        let tags = tags.as_array().into_iter().flatten().filter_map(Value::as_str);
        args.gce_node_tags = tags.map(str::to_owned).collect();
        if args.gce_node_tags.is_empty() {
            let problem = "the controller's VM has no network tag. Give all nodes one, and set the flag";
            return Err(ConfigError::Unknown("--gce-node-tags", problem.to_owned()));
        }
    }
    if is_missing("--gce-network") || is_missing("--gce-subnetwork") {
        let (zone, name) = (metadata.get("instance/zone").await?, metadata.get("instance/name").await?);
        let project = args.gce_project.clone().unwrap_or_default();
        let path = format!("projects/{project}/zones/{}/instances/{name}", last(&zone));
        let found = connect()?.send(Call::get("instances.get", path)).await;
        let unknown = |why: String| {
            ConfigError::Unknown("--gce-network", format!("the controller's VM is unknown: {why}"))
        };
        let found =
            found.map_err(|failure| unknown(steerage_provider_api::Error::from(failure).to_string()))?;
        let interface = found.pointer("/networkInterfaces/0/network").and_then(Value::as_str);
        let network = interface.map(|url| crate::object::relative(url).to_owned());
        if is_missing("--gce-network") {
            args.gce_network = network;
        }
        if is_missing("--gce-subnetwork") {
            let placeholder = GceArgs {
                gce_cluster_name: Some("any".to_owned()),
                gce_subnetwork: Some("any".to_owned()),
                ..args.clone()
            };
            let config = Config::new(placeholder, String::new())?;
            let instance = Instance::read(&found, &config);
            args.gce_subnetwork =
                instance.and_then(|(_, instance)| instance.first_subnet().map(str::to_owned));
        }
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// As on the VM that the stand-in's metadata server describes.
    #[tokio::test(flavor = "multi_thread")]
    async fn flags_that_are_not_set_are_discovered() {
        steerage_requirements::requires!(Clouds);
        let settings = json!({ "anonymous": true });
        let server = steerage_testclouds::Server::start(steerage_testclouds::Cloud::Gce, &settings).unwrap();
        let metadata = Metadata {
            http: Http::new(None).unwrap(),
            host: server.addr().unwrap().to_string(),
            flag: "--gce-project",
        };
        let connect = || Client::new(server.url(), ApiMetrics::default());
        let zone = metadata.get("instance/zone").await.unwrap();
        let name = metadata.get("instance/name").await.unwrap();
        let vm = steerage_testclouds::gce::instance(&name, last(&zone), [10, 128, 0, 2].into(), &["node"]);
        server.add_instances(&[vm]).unwrap();
        let args = GceArgs { gce_cluster_name: Some("prod".to_owned()), ..GceArgs::default() };
        let found = discover(args.clone(), &metadata, connect).await.unwrap();
        let config = Config::new(found, String::new()).unwrap();
        assert_eq!(config.node_tags, ["node"]);
        assert_eq!((config.project.as_str(), config.region.as_str()), ("test-project", "us-central1"));
        assert_eq!(config.network, "projects/test-project/global/networks/default");
        assert_eq!(config.subnetwork, "projects/test-project/regions/us-central1/subnetworks/default");
        let nowhere = Metadata { host: "127.0.0.1:1".to_owned(), http: Http::new(None).unwrap(), ..metadata };
        let error = discover(args, &nowhere, connect).await.unwrap_err();
        assert!(error.to_string().starts_with("--gce-project is not set"), "{error}");
    }
}
