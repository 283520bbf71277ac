// SPDX-License-Identifier: Apache-2.0
//! kube-proxy's configuration file, `KubeProxyConfiguration` of `kubeproxy.config.k8s.io/v1alpha1` as of Kubernetes 1.36: its fields,
//! and what each means for the agent. `--config` and `steerage-agent check --config` use it.
//!
//! Pure but for [`read`]. A field that kube-proxy does not know is an error, as it is there.

mod conntrack;
mod fields;
mod modes;
mod report;
mod traffic;
mod translate;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

pub use conntrack::SETTINGS as SYSCTLS;
pub use fields::KubeProxyConfiguration;
pub use translate::translate;

use crate::health::HealthAddress;
use crate::settings::{DetectLocal, NodePortAddresses};

/// Why a file is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is unreadable.
    #[error("cannot read {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// It is no YAML, or has unknown fields, or values of another type.
    #[error("not a KubeProxyConfiguration: {0}")]
    Malformed(String),
    /// It is another kind of object.
    #[error("kind {kind} of {api_version} is not KubeProxyConfiguration of {API_VERSION}")]
    OtherKind {
        /// Its kind.
        kind: String,
        /// Its API version.
        api_version: String,
    },
    /// A value that kube-proxy refuses, too.
    #[error("{field}: `{value}` is {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// The only version of the file's format.
pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

/// What the file says that the agent has a setting for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSettings {
    /// `--node-name`.
    pub node_name: Option<String>,
    /// `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// `--bind-address`.
    pub bind_address: Option<IpAddr>,
    /// `--healthz-port`, without the agent's own port.
    pub healthz: HealthAddress,
    /// `--metrics-bind-address`.
    pub metrics_bind_address: SocketAddr,
    /// `--nodeport-addresses`.
    pub node_port_addresses: NodePortAddresses,
    /// `--detect-local-mode` and the flags that belong to it.
    pub detect_local: DetectLocal,
    /// `--masquerade-all`.
    pub masquerade_all: bool,
    /// `--deny-service-external-ips`.
    pub deny_external_ips: bool,
}

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Treatment {
    /// The agent takes it over.
    Applied,
    /// The agent does the same anyway.
    Same,
    /// It has no meaning for the agent, nor for traffic.
    Unused,
    /// The agent does something else.
    Differs,
}

impl fmt::Display for Treatment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Applied => "applied",
            Self::Same => "same",
            Self::Unused => "unused",
            Self::Differs => "differs",
        })
    }
}

/// A field of the file, and what the agent does about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// How the agent treats it.
    pub treatment: Treatment,
    /// Its path in the file.
    pub field: String,
    /// Its value, or kube-proxy's default.
    pub value: String,
    /// What the agent does.
    pub text: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8}{} {}: {}", self.treatment, self.field, self.value, self.text)
    }
}

/// What a translation depends on besides the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostSettings {
    /// The number of processors, by which kube-proxy sizes conntrack.
    pub processors: usize,
    /// Kernel settings by name, of those that could be read.
    pub settings: Vec<(&'static str, u64)>,
}

/// Reads a file.
pub fn read(path: &Path) -> Result<KubeProxyConfiguration, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    parse(&text)
}

/// Parses the text of a file: YAML, of which JSON is a part.
pub fn parse(text: &str) -> Result<KubeProxyConfiguration, ConfigError> {
    let parsed = serde_saphyr::from_str::<KubeProxyConfiguration>(text);
    let config = parsed.map_err(|error| ConfigError::Malformed(error.to_string()))?;
    let (kind, api_version) = (config.kind.as_str(), config.api_version.as_str());
    if (kind, api_version) != ("KubeProxyConfiguration", API_VERSION) {
        let (kind, api_version) = (kind.to_owned(), api_version.to_owned());
        return Err(ConfigError::OtherKind { kind, api_version });
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
