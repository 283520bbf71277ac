// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and the settings from them. The controller flattens [`GceArgs`] into its own flags.

use std::time::Duration;

use clap::Args;
use steerage_provider_cloud::ClusterId;

/// The GCE provider's flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "GCE")]
pub struct GceArgs {
    /// Mark all resources with this name of the cluster. Names of resources depend on it; the cluster's UID says whose they are. After a
    /// change, existing load balancers are no longer managed. Required with --provider gce
    #[arg(long, env = "STEERAGE_GCE_CLUSTER_NAME", value_name = "NAME")]
    pub gce_cluster_name: Option<String>,

    /// Create load balancers in this project [default: that of the metadata server]
    #[arg(long, env = "STEERAGE_GCE_PROJECT", value_name = "ID")]
    pub gce_project: Option<String>,

    /// Create load balancers in this region [default: that of the metadata server]
    #[arg(long, env = "STEERAGE_GCE_REGION", value_name = "NAME")]
    pub gce_region: Option<String>,

    /// Use this VPC network: a name, or projects/PROJECT/global/networks/NAME of a Shared VPC [default: that of the controller's VM]
    #[arg(long, env = "STEERAGE_GCE_NETWORK", value_name = "NETWORK")]
    pub gce_network: Option<String>,

    /// Use this subnet of the nodes, for the addresses of internal load balancers, too: a name, or projects/PROJECT/regions/REGION/subnetworks/NAME
    /// of a Shared VPC [default: that of the controller's VM]
    #[arg(long, env = "STEERAGE_GCE_SUBNETWORK", value_name = "SUBNET")]
    pub gce_subnetwork: Option<String>,

    /// Admit clients and health checks to VMs with one of these network tags [default: those of the controller's VM]
    #[arg(long, env = "STEERAGE_GCE_NODE_TAGS", value_name = "TAG,…", value_delimiter = ',')]
    pub gce_node_tags: Vec<String>,

    /// Create endpoint groups in these zones [default: all of the region]
    #[arg(long, env = "STEERAGE_GCE_ZONES", value_name = "ZONE,…", value_delimiter = ',')]
    pub gce_zones: Vec<String>,

    /// Send requests to this endpoint, such as that of Private Service Connect. To a plain http:// one they go without credentials
    #[arg(
        long,
        env = "STEERAGE_GCE_API_ENDPOINT",
        value_name = "URL",
        default_value = "https://compute.googleapis.com"
    )]
    pub gce_api_endpoint: String,
}

/// Validated settings of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster whose resources the provider changes.
    pub cluster: ClusterId,
    /// Project of the load balancers and nodes.
    pub project: String,
    /// Region.
    pub region: String,
    /// Path of the network.
    pub network: String,
    /// Path of the nodes' subnet.
    pub subnetwork: String,
    /// Network tags of nodes.
    pub node_tags: Vec<String>,
    /// Zones with groups; all of the region if there are none.
    pub zones: Vec<String>,
    /// URL of the API, without version.
    pub endpoint: String,
    /// Shortest time between two questions whether a change is complete.
    pub poll: Duration,
}

/// Most operations end within some seconds.
const POLL: Duration = Duration::from_millis(500);

/// A missing or invalid flag, or no credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A required flag is missing.
    #[error("the provider gce needs the flag {0}")]
    Missing(&'static str),
    /// A flag has a value that cannot be right.
    #[error("{0} has the wrong value `{1}`: {2}")]
    Wrong(&'static str, String, &'static str),
    /// The metadata server does not say what a flag leaves out.
    #[error("{0} is not set, and {1}")]
    Unknown(&'static str, String),
    /// No usable credentials.
    #[error("no usable credentials for GCE: {0}")]
    Credentials(String),
}

/// The flags that the metadata server and the controller's VM can replace, in the order in which they are looked for.
pub(crate) const DISCOVERED: [&str; 5] =
    ["--gce-project", "--gce-region", "--gce-node-tags", "--gce-network", "--gce-subnetwork"];

impl GceArgs {
    /// The discovered flags that are not set.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &'static str> {
        let is_set = |value: &Option<String>| value.as_ref().is_some_and(|value| !value.is_empty());
        let set = [
            is_set(&self.gce_project),
            is_set(&self.gce_region),
            !self.gce_node_tags.is_empty(),
            is_set(&self.gce_network),
            is_set(&self.gce_subnetwork),
        ];
        DISCOVERED.into_iter().zip(set).filter(|(_, is_set)| !is_set).map(|(flag, _)| flag)
    }
}

impl Config {
    /// Checks the flags. `cluster_uid` is the UID of the namespace `kube-system`.
    ///
    /// # Errors
    ///
    /// If a required flag is missing, or a value is wrong.
    pub fn new(args: GceArgs, cluster_uid: String) -> Result<Self, ConfigError> {
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        let cluster = set(args.gce_cluster_name.clone()).ok_or(ConfigError::Missing("--gce-cluster-name"))?;
        if cluster.chars().count() > 200 {
            return Err(ConfigError::Wrong("--gce-cluster-name", cluster, "use at most 200 characters"));
        }
        if let Some(flag) = args.missing().next() {
            return Err(ConfigError::Missing(flag));
        }
        let (project, region) = (set(args.gce_project), set(args.gce_region));
        let project = named("--gce-project", project.unwrap_or_default())?;
        let region = named("--gce-region", region.unwrap_or_default())?;
        let path = |flag, value: Option<String>, scope: &str| {
            let value = value.unwrap_or_default();
            let value = crate::object::relative(&value).to_owned();
            if value.starts_with("projects/") {
                return Ok(value);
            }
            named(flag, value).map(|name| format!("projects/{project}/{scope}/{name}"))
        };
        let network = path("--gce-network", set(args.gce_network), "global/networks")?;
        let subnets = format!("regions/{region}/subnetworks");
        let subnetwork = path("--gce-subnetwork", set(args.gce_subnetwork), &subnets)?;
        let all = |flag, values: Vec<String>| -> Result<Vec<String>, ConfigError> {
            let mut all: Vec<String> = values.into_iter().filter(|value| !value.is_empty()).collect();
            all.sort();
            all.dedup();
            all.into_iter().map(|value| named(flag, value)).collect()
        };
        Ok(Self {
            cluster: ClusterId { name: cluster, uid: cluster_uid },
            node_tags: all("--gce-node-tags", args.gce_node_tags)?,
            zones: all("--gce-zones", args.gce_zones)?,
            endpoint: args.gce_api_endpoint,
            project,
            region,
            network,
            subnetwork,
            poll: POLL,
        })
    }

    /// The project of the network, which is another one in a Shared VPC. Firewall rules lie there.
    pub(crate) fn network_project(&self) -> &str {
        self.network.split('/').nth(1).unwrap_or(&self.project)
    }

    /// Whether the network is another project's.
    pub(crate) fn is_shared_vpc(&self) -> bool {
        self.network_project() != self.project
    }
}

/// A value that is a part of a path.
fn named(flag: &'static str, value: String) -> Result<String, ConfigError> {
    // Projects of a domain have a colon.
    let is_name = (1..=100).contains(&value.len())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':'));
    if is_name {
        return Ok(value);
    }
    Err(ConfigError::Wrong(flag, value, "use a name of letters, digits and hyphens"))
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        gce: GceArgs,
    }

    fn parse(flags: &[&str]) -> Result<Config, ConfigError> {
        let line = std::iter::once("steerage").chain(flags.iter().copied());
        Config::new(Line::try_parse_from(line).unwrap().gce, "c1".to_owned())
    }

    pub(crate) fn config() -> Config {
        let config = parse(&[
            "--gce-cluster-name=prod",
            "--gce-project=p",
            "--gce-region=r",
            "--gce-network=n",
            "--gce-subnetwork=s",
            "--gce-node-tags=node",
            "--gce-zones=r-a,r-b",
        ]);
        Config { poll: Duration::ZERO, ..config.unwrap() }
    }

    #[test]
    fn names_become_paths_and_paths_stay() {
        let config = config();
        assert_eq!(config.network, "projects/p/global/networks/n");
        assert_eq!(config.subnetwork, "projects/p/regions/r/subnetworks/s");
        assert!(!config.is_shared_vpc());
        let shared = parse(&[
            "--gce-cluster-name=prod",
            "--gce-project=p",
            "--gce-region=r",
            "--gce-network=https://www.googleapis.com/compute/v1/projects/host/global/networks/n",
            "--gce-subnetwork=projects/host/regions/r/subnetworks/s",
            "--gce-node-tags=node",
        ])
        .unwrap();
        assert_eq!(shared.network_project(), "host");
        assert!(shared.is_shared_vpc() && shared.zones.is_empty());
    }

    #[test]
    fn missing_and_wrong_flags_are_named() {
        assert_eq!(parse(&[]), Err(ConfigError::Missing("--gce-cluster-name")));
        assert_eq!(parse(&["--gce-cluster-name=c"]), Err(ConfigError::Missing("--gce-project")));
        let wrong = parse(&[
            "--gce-cluster-name=c",
            "--gce-project=a/../b",
            "--gce-region=r",
            "--gce-network=n",
            "--gce-subnetwork=s",
            "--gce-node-tags=t",
        ]);
        assert!(matches!(wrong, Err(ConfigError::Wrong("--gce-project", ..))), "{wrong:?}");
    }
}
