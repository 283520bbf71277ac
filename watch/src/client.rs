// SPDX-License-Identifier: Apache-2.0
//! The client of the API server that all programs use.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use http::header::{HeaderValue, InvalidHeaderValue, USER_AGENT};
use http::uri::{Authority, InvalidUriParts, PathAndQuery, Scheme};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// How to reach the API server.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API")]
pub struct ClientArgs {
    /// Address of the API server, in place of the one that the kubeconfig or the pod's environment names
    #[arg(long, env = "STEERAGE_API_SERVER", value_name = "HOST:PORT")]
    pub api_server: Option<Authority>,
    /// Kubeconfig to use; without one, the pod's service account
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error("not in a pod with a service account; give --kubeconfig")]
    InCluster(#[source] InClusterError),
    /// The address of the API server is none.
    #[error("`{address}` is not the address of an API server")]
    Address {
        /// The address.
        address: Authority,
        /// What is wrong with it.
        source: InvalidUriParts,
    },
    /// The program's name is not fit for a header.
    #[error("unusable user agent")]
    UserAgent(#[from] InvalidHeaderValue),
    /// The client could not be built.
    #[error("cannot build the client")]
    Build(#[source] Box<kube::Error>),
}

/// A new connection must stand within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection must take what is written within this time.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest silence on a connection that waits for an answer. A net under the deadlines that callers set for each call, so it
/// must exceed the longest of them, a watch's.
const READ_TIMEOUT: Duration = Duration::from_mins(3);
/// A name in every API server's certificate: pods rely on it.
const IN_CLUSTER_NAME: &str = "kubernetes.default.svc";

/// A client that calls itself `steerage-<component>/<version>`.
///
/// It never retries by itself: whoever calls has a deadline, and knows better whether the call is still worth making.
pub async fn client(component: &str, version: &str, args: &ClientArgs) -> Result<Client, ClientError> {
    // Fails when one is installed already, which is as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = config(component, version, args).await?;
    Client::try_from(config).map_err(|error| ClientError::Build(Box::new(error)))
}

async fn config(component: &str, version: &str, args: &ClientArgs) -> Result<Config, ClientError> {
    let ClientArgs { api_server, kubeconfig } = args;
    let mut config = match kubeconfig {
        Some(path) => from_file(path)
            .await
            .map_err(|source| ClientError::Kubeconfig { path: path.clone(), source: Box::new(source) })?,
        // With an address of its own the program also starts where the environment names none.
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
        // A bare address need not be in the certificate. A name is left alone: proxies choose the server by it.
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
    async fn a_kubeconfig_is_used_and_calls_are_bounded() {
        let args = args("plain", None);
        let config = config("agent", "1.2.3", &args).await.expect("config");
        std::fs::remove_file(args.kubeconfig.expect("path")).expect("remove");
        assert_eq!(config.cluster_url, "https://plane.example:6443/prefix");
        assert_eq!(config.headers, [(USER_AGENT, HeaderValue::from_static("steerage-agent/1.2.3"))]);
        assert!(!config.default_retry && config.read_timeout.is_some() && config.connect_timeout.is_some());
    }

    #[tokio::test]
    async fn the_address_can_be_overridden() {
        let args = args("override", Some("[2001:db8::1]:443"));
        let config = config("agent", "1.2.3", &args).await.expect("config");
        std::fs::remove_file(args.kubeconfig.expect("path")).expect("remove");
        assert_eq!(config.cluster_url, "https://[2001:db8::1]:443/prefix");
        assert_eq!(config.tls_server_name, None, "a kubeconfig says itself which name to expect");
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_is_named() {
        let args = ClientArgs { api_server: None, kubeconfig: Some("/nonexistent/config".into()) };
        let error = config("agent", "1", &args).await.expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/config"), "{error}");
    }

    #[test]
    fn addresses_are_told_from_names() {
        assert!(is_ip("10.0.0.1") && is_ip("[::1]") && !is_ip("plane.example"));
    }
}
