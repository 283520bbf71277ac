// SPDX-License-Identifier: Apache-2.0
//! Fills flags that are not set: from the metadata server, and from the VM on which the controller runs.

use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use steerage_provider_cloud::ApiMetrics;
use steerage_provider_cloud::http::{Http, TransportError};

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
        if self.missing().next().is_none() {
            return Ok(self);
        }
        // Google's libraries read the same variable.
        let host = std::env::var("GCE_METADATA_HOST").unwrap_or_else(|_| "169.254.169.254".to_owned());
        let http = Http::new(None).map_err(|error| ConfigError::Credentials(error.to_string()))?;
        let metadata = Metadata { http, host };
        let endpoint = self.gce_api_endpoint.clone();
        let connect = || Client::new(&endpoint, ApiMetrics::default());
        discover(self, &metadata, connect).await
    }
}

struct Metadata {
    http: Http,
    host: String,
}

impl Metadata {
    /// What the path says. The error names the flag that makes the question unnecessary.
    async fn get(&self, flag: &'static str, path: &str) -> Result<String, ConfigError> {
        let url = format!("http://{}/computeMetadata/v1/{path}", self.host);
        let problem = |problem: String| {
            let text = format!("the metadata server does not say it ({problem}). Set the flag");
            ConfigError::Unknown(flag, text)
        };
        let request = http::Request::builder()
            .uri(&url)
            .header("metadata-flavor", "Google")
            .body(Bytes::new())
            .map_err(|error| problem(error.to_string()))?;
        let answer = tokio::time::timeout(TIMEOUT, self.http.send(request)).await;
        match answer.unwrap_or(Err(TransportError::Timeout)) {
            Ok(answer) if answer.status().is_success() => {
                Ok(String::from_utf8_lossy(answer.body()).trim().to_owned())
            }
            Ok(answer) => Err(problem(format!("{url}: {}", answer.status()))),
            Err(TransportError::Timeout) => Err(problem(format!("{url}: no answer"))),
            Err(TransportError::Connection(text)) => Err(problem(format!("{url}: {text}"))),
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
        args.gce_project = Some(metadata.get("--gce-project", "project/project-id").await?);
    }
    if is_missing("--gce-region") {
        let zone = metadata.get("--gce-region", "instance/zone").await?;
        args.gce_region = last(&zone).rsplit_once('-').map(|(region, _)| region.to_owned());
    }
    if is_missing("--gce-node-tags") {
        let tags = metadata.get("--gce-node-tags", "instance/tags").await?;
        let tags: Value = serde_json::from_str(&tags).unwrap_or_default();
        let tags = tags.as_array().into_iter().flatten().filter_map(Value::as_str);
        args.gce_node_tags = tags.map(str::to_owned).collect();
        if args.gce_node_tags.is_empty() {
            let problem = "the controller's VM has no network tag. Give all nodes one, and set the flag";
            return Err(ConfigError::Unknown("--gce-node-tags", problem.to_owned()));
        }
    }
    if let Some(&flag) = missing.iter().find(|flag| ["--gce-network", "--gce-subnetwork"].contains(flag)) {
        let zone = metadata.get(flag, "instance/zone").await?;
        let name = metadata.get(flag, "instance/name").await?;
        let project = args.gce_project.clone().unwrap_or_default();
        let path = format!("projects/{project}/zones/{}/instances/{name}", last(&zone));
        let found = connect()?.send(Call::get("instances.get", path)).await;
        let unknown =
            |why: String| ConfigError::Unknown(flag, format!("the controller's VM is unknown: {why}"));
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
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    /// As on the VM that the stand-in's metadata server describes.
    #[tokio::test(flavor = "multi_thread")]
    async fn flags_that_are_not_set_are_discovered() {
        steerage_requirements::requires!(Clouds);
        let settings = json!({ "anonymous": true });
        let server = steerage_testclouds::Server::start(steerage_testclouds::Cloud::Gce, &settings).unwrap();
        let metadata = Metadata { http: Http::new(None).unwrap(), host: server.addr().unwrap().to_string() };
        let connect = || Client::new(server.url(), ApiMetrics::default());
        let zone = metadata.get("", "instance/zone").await.unwrap();
        let name = metadata.get("", "instance/name").await.unwrap();
        let vm = steerage_testclouds::gce::instance(&name, last(&zone), [10, 128, 0, 2].into(), &["node"]);
        server.add_instances(&[vm]).unwrap();
        let args = GceArgs { gce_cluster_name: Some("prod".to_owned()), ..GceArgs::default() };
        let found = discover(args, &metadata, connect).await.unwrap();
        let config = Config::new(found, String::new()).unwrap();
        assert_eq!(config.node_tags, ["node"]);
        assert_eq!((config.project.as_str(), config.region.as_str()), ("test-project", "us-central1"));
        assert_eq!(config.network, "projects/test-project/global/networks/default");
        assert_eq!(config.subnetwork, "projects/test-project/regions/us-central1/subnetworks/default");
    }

    /// A metadata server that does not know this path.
    fn server_without(unknown: &'static str) -> Metadata {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut request = String::new();
                let _ = BufReader::new(&stream).read_line(&mut request);
                let known = [
                    ("project/project-id", "p"),
                    ("instance/zone", "projects/1/zones/europe-west1-b"),
                    ("instance/tags", r#"["node"]"#),
                    ("instance/name", "vm"),
                ];
                let found = known.iter().find(|(path, _)| *path != unknown && request.contains(path));
                let (status, body) = found.map_or(("404 Not Found", ""), |(_, value)| ("200 OK", *value));
                let length = body.len();
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
                );
            }
        });
        Metadata { http: Http::new(None).unwrap(), host }
    }

    /// Setting it helps; setting another one does not.
    #[tokio::test(flavor = "multi_thread")]
    async fn error_names_the_flag_for_which_the_metadata_server_was_asked() {
        let with_network = GceArgs { gce_network: Some("default".to_owned()), ..GceArgs::default() };
        for (args, unknown, flag) in [
            (GceArgs::default(), "project/project-id", "--gce-project"),
            (GceArgs::default(), "instance/zone", "--gce-region"),
            (GceArgs::default(), "instance/tags", "--gce-node-tags"),
            (GceArgs::default(), "instance/name", "--gce-network"),
            (with_network.clone(), "instance/name", "--gce-subnetwork"),
            // The API does not answer either.
            (GceArgs::default(), "", "--gce-network"),
            (with_network, "", "--gce-subnetwork"),
        ] {
            let connect = || Client::new("http://127.0.0.1:1", ApiMetrics::default());
            let error = discover(args, &server_without(unknown), connect).await.unwrap_err().to_string();
            assert!(error.starts_with(&format!("{flag} is not set")), "{unknown}: {error}");
        }
    }
}
