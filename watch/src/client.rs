// SPDX-License-Identifier: Apache-2.0
//! The API server's client of all programs.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use http::header::{HeaderValue, InvalidHeaderValue, USER_AGENT};
use http::uri::{Authority, InvalidUriParts, PathAndQuery, Scheme};
use http::{Request, Response};
use kube::client::{Body, ClientBuilder, DynBody};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use tower::BoxError;
use tower::util::BoxService;

mod requests;

pub use requests::RequestMetrics;

/// What sends the requests of a client.
type Sender = BoxService<Request<Body>, Response<Box<DynBody>>, BoxError>;

/// Flags of the connection to the API server.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API")]
pub struct ClientArgs {
    /// Connect to the API server at this address instead of the one in the kubeconfig or in the pod's environment
    #[arg(long, env = "STEERAGE_API_SERVER", value_name = "HOST:PORT")]
    pub api_server: Option<Authority>,
    /// Use this kubeconfig [default: the pod's service account]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Why the client could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig is invalid or unreadable.
    #[error("cannot use the kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<KubeconfigError>,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error("not in a pod with a service account; give --kubeconfig")]
    InCluster(#[source] InClusterError),
    /// The address of the API server is invalid.
    #[error("`{address}` is not the address of an API server")]
    Address {
        /// The address.
        address: Authority,
        /// The cause.
        source: InvalidUriParts,
    },
    /// The program's name is invalid in a header.
    #[error("unusable user agent")]
    UserAgent(#[from] InvalidHeaderValue),
    /// The configuration has no usable client, for example for its TLS data.
    #[error("cannot build the client")]
    Build(#[source] Box<kube::Error>),
}

/// Timeout of a new connection, with its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout of a read. A fallback for the deadlines of the calls, so it must exceed the longest of them, that of a watch.
const READ_TIMEOUT: Duration = Duration::from_mins(3);
/// A name in every API server's certificate.
const IN_CLUSTER_NAME: &str = "kubernetes.default.svc";

/// A client with the user agent `steerage-<component>/<version>`.
///
/// It never retries: callers have deadlines and backoffs of their own.
pub async fn client(component: &str, version: &str, args: &ClientArgs) -> Result<Client, ClientError> {
    let (builder, _) = builder(component, version, args).await?;
    Ok(builder.build())
}

/// The same client, whose requests `metrics` count.
pub async fn counted_client(
    component: &str,
    version: &str,
    args: &ClientArgs,
    metrics: &RequestMetrics,
) -> Result<Client, ClientError> {
    let (builder, host) = builder(component, version, args).await?;
    Ok(builder.with_layer(&metrics.layer(&host)).build())
}

/// The builder of a client, and the API server's host and port.
async fn builder(
    component: &str,
    version: &str,
    args: &ClientArgs,
) -> Result<(ClientBuilder<Sender>, String), ClientError> {
    // Fails when a provider is already installed, which is equally good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = config(component, version, args).await?;
    let host = config.cluster_url.authority().map_or("none", Authority::as_str).to_owned();
    let builder = ClientBuilder::try_from(config).map_err(|error| ClientError::Build(Box::new(error)))?;
    Ok((builder, host))
}

async fn config(component: &str, version: &str, args: &ClientArgs) -> Result<Config, ClientError> {
    let ClientArgs { api_server, kubeconfig } = args;
    let mut config = match kubeconfig {
        Some(path) => from_file(path)
            .await
            .map_err(|source| ClientError::Kubeconfig { path: path.clone(), source: Box::new(source) })?,
        // With --api-server the program also starts where the environment names no API server.
        None if api_server.is_some() => Config::incluster_dns().map_err(ClientError::InCluster)?,
        None => Config::incluster_env().map_err(ClientError::InCluster)?,
    };
    if let Some(address) = api_server {
        let mut parts = config.cluster_url.clone().into_parts();
        parts.scheme.get_or_insert(Scheme::HTTPS);
        parts.authority = Some(address.clone());
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        config.cluster_url =
            parts.try_into().map_err(|source| ClientError::Address { address: address.clone(), source })?;
        // An IP address may be missing in the certificate. A name is kept: proxies select the server by it.
        if kubeconfig.is_none() && is_ip(address.host()) {
            config.tls_server_name = Some(IN_CLUSTER_NAME.to_owned());
        }
    }
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    let agent = HeaderValue::try_from(format!("steerage-{component}/{version}"))?;
    config.headers.push((USER_AGENT, agent));
    Ok(config)
}

async fn from_file(path: &PathBuf) -> Result<Config, KubeconfigError> {
    let kubeconfig = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
}

fn is_ip(host: &str) -> bool {
    host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": "https://plane.example:6443/prefix"}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}"#;

    fn args(name: &str, api_server: Option<&'static str>) -> ClientArgs {
        let path = std::env::temp_dir().join(format!("steerage-kubeconfig-{name}-{}", std::process::id()));
        std::fs::write(&path, KUBECONFIG).expect("write");
        ClientArgs { api_server: api_server.map(Authority::from_static), kubeconfig: Some(path) }
    }

    #[tokio::test]
    async fn kubeconfig_is_used_and_calls_have_timeouts() {
        let args = args("plain", None);
        let config = config("agent", "1.2.3", &args).await.expect("config");
        std::fs::remove_file(args.kubeconfig.expect("path")).expect("remove");
        assert_eq!(config.cluster_url, "https://plane.example:6443/prefix");
        assert_eq!(config.headers, [(USER_AGENT, HeaderValue::from_static("steerage-agent/1.2.3"))]);
        assert!(!config.default_retry && config.read_timeout.is_some() && config.connect_timeout.is_some());
    }

    #[tokio::test]
    async fn api_server_flag_overrides_the_kubeconfig() {
        let args = args("override", Some("[2001:db8::1]:443"));
        let config = config("agent", "1.2.3", &args).await.expect("config");
        std::fs::remove_file(args.kubeconfig.expect("path")).expect("remove");
        assert_eq!(config.cluster_url, "https://[2001:db8::1]:443/prefix");
        assert_eq!(config.tls_server_name, None, "a kubeconfig sets the expected name itself");
    }

    #[tokio::test]
    async fn missing_kubeconfig_is_named() {
        let args = ClientArgs { api_server: None, kubeconfig: Some("/nonexistent/config".into()) };
        let error = config("agent", "1", &args).await.expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/config"), "{error}");
    }

    #[test]
    fn addresses_and_names_are_distinguished() {
        assert!(is_ip("10.0.0.1") && is_ip("[::1]") && !is_ip("plane.example"));
    }
}
