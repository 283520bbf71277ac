// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and the settings from them. The controller flattens [`OpenStackArgs`] into its own flags.

use std::time::Duration;

use clap::Args;
use steerage_provider_cloud::ClusterId;

/// The OpenStack provider's flags.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "OpenStack")]
pub struct OpenStackArgs {
    /// Tag all load balancers with this name of the cluster. Names of resources depend on it; the cluster's UID says whose they are.
    /// After a change, existing load balancers are no longer managed. Required with --provider openstack
    #[arg(long, env = "STEERAGE_OPENSTACK_CLUSTER_NAME", value_name = "NAME")]
    pub openstack_cluster_name: Option<String>,

    /// Log in with the settings of this cloud in clouds.yaml [default: that of `OS_CLOUD`; without it, the variables `OS_…`]
    #[arg(long, env = "STEERAGE_OPENSTACK_CLOUD", value_name = "NAME")]
    pub openstack_cloud: Option<String>,

    /// Create VIPs in this subnet. Required with --provider openstack
    #[arg(long, env = "STEERAGE_OPENSTACK_SUBNET_ID", value_name = "ID")]
    pub openstack_subnet_id: Option<String>,

    /// Reach nodes through this subnet [default: the VIP's]
    #[arg(long, env = "STEERAGE_OPENSTACK_MEMBER_SUBNET_ID", value_name = "ID")]
    pub openstack_member_subnet_id: Option<String>,

    /// Give load balancers a floating IP of this external network, unless their Service is internal [default: none; all are internal]
    #[arg(long, env = "STEERAGE_OPENSTACK_FLOATING_NETWORK_ID", value_name = "ID")]
    pub openstack_floating_network_id: Option<String>,

    /// Create load balancers with this provider driver of Octavia. With `ovn`, Services have what that driver has; all others count as
    /// `amphora`
    #[arg(long, env = "STEERAGE_OPENSTACK_PROVIDER", default_value = "amphora", value_name = "NAME")]
    pub openstack_provider: String,
}

/// What a provider driver of Octavia can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// A proxy, with all that Octavia has.
    Amphora,
    /// Addresses are translated in OVN: no HTTP monitors, source ranges, weights or PROXY protocol, and one algorithm.
    Ovn,
}

/// Validated settings of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster whose resources the provider changes.
    pub cluster: ClusterId,
    /// Subnet of VIPs.
    pub subnet: String,
    /// Subnet of the nodes.
    pub member_subnet: String,
    /// External network of floating IPs; without one, load balancers are internal.
    pub floating_network: Option<String>,
    /// Octavia's provider driver.
    pub provider: String,
    /// Shortest time between two questions whether a change is complete.
    pub poll: Duration,
}

/// A change of an amphora takes some seconds.
const POLL: Duration = Duration::from_millis(500);

/// A missing or invalid flag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A required flag is missing.
    #[error("the provider openstack needs the flag {0}")]
    Missing(&'static str),
    /// The cluster's name does not fit into a tag.
    #[error("--openstack-cluster-name must have at most 200 characters, and no comma")]
    ClusterName,
}

impl Config {
    /// Checks the flags. `cluster_uid` is the UID of the namespace `kube-system`.
    ///
    /// # Errors
    ///
    /// If a required flag is missing, or a value is wrong.
    pub fn new(args: OpenStackArgs, cluster_uid: String) -> Result<Self, ConfigError> {
        let OpenStackArgs {
            openstack_cluster_name,
            openstack_cloud: _,
            openstack_subnet_id,
            openstack_member_subnet_id,
            openstack_floating_network_id,
            openstack_provider,
        } = args;
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        let name = set(openstack_cluster_name).ok_or(ConfigError::Missing("--openstack-cluster-name"))?;
        // Octavia's tags have up to 255 characters, and commas separate them in a filter.
        if name.chars().count() > 200 || name.contains(',') {
            return Err(ConfigError::ClusterName);
        }
        let subnet = set(openstack_subnet_id).ok_or(ConfigError::Missing("--openstack-subnet-id"))?;
        Ok(Self {
            cluster: ClusterId { name, uid: cluster_uid },
            member_subnet: set(openstack_member_subnet_id).unwrap_or_else(|| subnet.clone()),
            subnet,
            floating_network: set(openstack_floating_network_id),
            provider: set(Some(openstack_provider)).unwrap_or_else(|| "amphora".to_owned()),
            poll: POLL,
        })
    }

    pub(crate) fn driver(&self) -> Driver {
        if self.provider == "ovn" { Driver::Ovn } else { Driver::Amphora }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(line: &[&str]) -> Result<Config, ConfigError> {
        let command = OpenStackArgs::augment_args(clap::Command::new("test"));
        let matches = command.try_get_matches_from(std::iter::once(&"test").chain(line)).unwrap();
        Config::new(OpenStackArgs::from_arg_matches(&matches).unwrap(), "uid-1".to_owned())
    }

    #[test]
    fn flags_set_config() {
        let config = parse(&["--openstack-cluster-name=c", "--openstack-subnet-id=s"]).unwrap();
        assert_eq!((config.member_subnet.as_str(), config.floating_network.as_ref()), ("s", None));
        assert_eq!((config.provider.as_str(), config.driver()), ("amphora", Driver::Amphora));
        let config = parse(&[
            "--openstack-cluster-name=c",
            "--openstack-subnet-id=s",
            "--openstack-member-subnet-id=m",
            "--openstack-floating-network-id=f",
            "--openstack-provider=ovn",
        ])
        .unwrap();
        assert_eq!((config.member_subnet.as_str(), config.floating_network.as_deref()), ("m", Some("f")));
        assert_eq!(config.driver(), Driver::Ovn);
    }

    #[test]
    fn missing_and_wrong_flags_are_named() {
        assert_eq!(parse(&[]), Err(ConfigError::Missing("--openstack-cluster-name")));
        assert_eq!(
            parse(&["--openstack-cluster-name=c"]),
            Err(ConfigError::Missing("--openstack-subnet-id"))
        );
        let comma = parse(&["--openstack-cluster-name=a,b", "--openstack-subnet-id=s"]);
        assert_eq!(comma, Err(ConfigError::ClusterName));
    }
}
