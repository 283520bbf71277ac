// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and the settings from them. The controller flattens [`OpenStackArgs`] into its own flags.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use steerage_model::Family;
use steerage_provider_cloud::ClusterId;
use steerage_provider_cloud::shared::SharedLoadBalancers;

use crate::shared;

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

    /// Create IPv6 VIPs in this subnet, of the same network as the other one [default: --openstack-subnet-id, for Services with IPv6 alone]
    #[arg(long, env = "STEERAGE_OPENSTACK_IPV6_SUBNET_ID", value_name = "ID")]
    pub openstack_ipv6_subnet_id: Option<String>,

    /// Reach nodes over IPv6 through this subnet [default: that of IPv6 VIPs]
    #[arg(long, env = "STEERAGE_OPENSTACK_IPV6_MEMBER_SUBNET_ID", value_name = "ID")]
    pub openstack_ipv6_member_subnet_id: Option<String>,

    /// Manage rules of this security group, which all nodes have, so that they admit load balancers [default: none; rules are yours]
    #[arg(long, env = "STEERAGE_OPENSTACK_NODE_SECURITY_GROUP_ID", value_name = "ID")]
    pub openstack_node_security_group_id: Option<String>,

    /// Admit amphorae to this range of node ports, that of the API server's --service-node-port-range
    #[arg(
        long,
        env = "STEERAGE_OPENSTACK_NODE_PORTS",
        default_value = "30000-32767",
        value_name = "FIRST-LAST"
    )]
    pub openstack_node_ports: String,

    /// Give load balancers a floating IP of this external network, unless their Service is internal [default: none; all are internal]
    #[arg(long, env = "STEERAGE_OPENSTACK_FLOATING_NETWORK_ID", value_name = "ID")]
    pub openstack_floating_network_id: Option<String>,

    /// Let Services share the load balancers that this JSON file lists, by the annotation `steerage.dev/shared-load-balancer`. The file
    /// names each with the `namespaces` that may use it, and the `annotations` of the load balancer as a whole. Read once, when the
    /// controller starts [default: none]
    #[arg(long, env = "STEERAGE_OPENSTACK_SHARED_LOAD_BALANCERS", value_name = "FILE")]
    pub openstack_shared_load_balancers: Option<PathBuf>,

    /// Take over the load balancers that cloud-provider-openstack created for this cluster; the value is its --cluster-name. Only for a
    /// migration: stop that controller first [default: none]
    #[arg(long, env = "STEERAGE_OPENSTACK_ADOPT", value_name = "CLUSTER")]
    pub openstack_adopt: Option<String>,

    /// Create load balancers with this provider driver of Octavia. `ovn` needs --default-steering api, and Services that request what it
    /// lacks are refused; every other driver is treated as `amphora`
    #[arg(long, env = "STEERAGE_OPENSTACK_PROVIDER", default_value = "amphora", value_name = "NAME")]
    pub openstack_provider: String,
}

/// The name of OVN's provider driver.
pub(crate) const OVN: &str = "ovn";

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
    /// Subnet of IPv6 VIPs, if it is another one.
    pub ipv6_subnet: Option<String>,
    /// Subnet of the nodes for IPv6, if it is another one.
    pub ipv6_member_subnet: Option<String>,
    /// Security group of the nodes whose rules are managed.
    pub security_group: Option<String>,
    /// The range of node ports.
    pub node_ports: RangeInclusive<u16>,
    /// External network of floating IPs; without one, load balancers are internal.
    pub floating_network: Option<String>,
    /// The load balancers that Services can share.
    pub shared_load_balancers: SharedLoadBalancers,
    /// The cluster's name for cloud-provider-openstack, whose load balancers are adopted.
    pub adopt: Option<String>,
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
    /// The file of shared load balancers cannot be used.
    #[error("--openstack-shared-load-balancers: {}: {problem}", file.display())]
    SharedLoadBalancers {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The range of node ports cannot be read.
    #[error("--openstack-node-ports must be a range such as 30000-32767, not `{0}`")]
    NodePorts(String),
}

fn node_ports(text: &str) -> Result<RangeInclusive<u16>, ConfigError> {
    let text = if text.is_empty() { "30000-32767" } else { text };
    let range = text
        .split_once('-')
        .and_then(|(first, last)| Some(first.trim().parse().ok()?..=last.trim().parse().ok()?));
    range
        .filter(|range| *range.start() > 0 && !range.is_empty())
        .ok_or_else(|| ConfigError::NodePorts(text.to_owned()))
}

impl Config {
    /// Checks the flags. `cluster_uid` is the UID of the namespace `kube-system`.
    ///
    /// # Errors
    ///
    /// If a required flag is missing, or a value is wrong. Reads the file of shared load balancers.
    pub fn new(args: OpenStackArgs, cluster_uid: String) -> Result<Self, ConfigError> {
        let OpenStackArgs {
            openstack_cluster_name,
            openstack_cloud: _,
            openstack_subnet_id,
            openstack_member_subnet_id,
            openstack_ipv6_subnet_id,
            openstack_ipv6_member_subnet_id,
            openstack_node_security_group_id,
            openstack_node_ports,
            openstack_floating_network_id,
            openstack_shared_load_balancers,
            openstack_adopt,
            openstack_provider,
        } = args;
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        let name = set(openstack_cluster_name).ok_or(ConfigError::Missing("--openstack-cluster-name"))?;
        // Octavia's tags have up to 255 characters, and commas separate them in a filter.
        if name.chars().count() > 200 || name.contains(',') {
            return Err(ConfigError::ClusterName);
        }
        let subnet = set(openstack_subnet_id).ok_or(ConfigError::Missing("--openstack-subnet-id"))?;
        let ipv6_subnet = set(openstack_ipv6_subnet_id);
        let config = Self {
            cluster: ClusterId { name, uid: cluster_uid },
            member_subnet: set(openstack_member_subnet_id).unwrap_or_else(|| subnet.clone()),
            subnet,
            ipv6_member_subnet: set(openstack_ipv6_member_subnet_id).or_else(|| ipv6_subnet.clone()),
            ipv6_subnet,
            security_group: set(openstack_node_security_group_id),
            node_ports: node_ports(&openstack_node_ports)?,
            shared_load_balancers: SharedLoadBalancers::new(),
            adopt: set(openstack_adopt),
            floating_network: set(openstack_floating_network_id),
            provider: set(Some(openstack_provider)).unwrap_or_else(|| "amphora".to_owned()),
            poll: POLL,
        };
        let Some(file) = openstack_shared_load_balancers.filter(|file| !file.as_os_str().is_empty()) else {
            return Ok(config);
        };
        let text = std::fs::read_to_string(&file).map_err(|error| error.to_string());
        match text.and_then(|text| shared::read(&text, &config)) {
            Ok(shared_load_balancers) => Ok(Self { shared_load_balancers, ..config }),
            Err(problem) => Err(ConfigError::SharedLoadBalancers { file, problem }),
        }
    }

    /// The subnet of VIPs of this family, for a Service whose first family is `first`; `None` if none is known.
    pub(crate) fn vip_subnet(&self, family: Family, first: Family) -> Option<&str> {
        match (family, &self.ipv6_subnet) {
            (Family::V6, Some(subnet)) => Some(subnet),
            (Family::V4, Some(_)) => Some(&self.subnet),
            // Of one subnet the family is not known: it is the Service's.
            (family, None) => (family == first).then_some(self.subnet.as_str()),
        }
    }

    /// The subnet of the nodes for this family.
    pub(crate) fn nodes_subnet(&self, family: Family) -> &str {
        let ipv6 = self.ipv6_member_subnet.as_ref().filter(|_| family == Family::V6);
        ipv6.unwrap_or(&self.member_subnet)
    }

    pub(crate) fn driver(&self) -> Driver {
        if self.provider == OVN { Driver::Ovn } else { Driver::Amphora }
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
            "--openstack-ipv6-subnet-id=s6",
            "--openstack-floating-network-id=f",
            "--openstack-provider=ovn",
        ])
        .unwrap();
        assert_eq!((config.member_subnet.as_str(), config.floating_network.as_deref()), ("m", Some("f")));
        assert_eq!(config.driver(), Driver::Ovn);
        assert_eq!(
            (config.ipv6_subnet.as_deref(), config.ipv6_member_subnet.as_deref()),
            (Some("s6"), Some("s6"))
        );
    }

    #[test]
    fn subnet_is_that_of_the_family() {
        use Family::{V4, V6};
        let one = ["--openstack-cluster-name=c", "--openstack-subnet-id=s", "--openstack-member-subnet-id=m"];
        let config = parse(&one).unwrap();
        assert_eq!((config.vip_subnet(V6, V6), config.nodes_subnet(V6)), (Some("s"), "m"));
        assert_eq!((config.vip_subnet(V6, V4), config.vip_subnet(V4, V6)), (None, None));
        let config = parse(&[&one[..], &["--openstack-ipv6-subnet-id=s6"]].concat()).unwrap();
        for first in [V4, V6] {
            assert_eq!((config.vip_subnet(V4, first), config.vip_subnet(V6, first)), (Some("s"), Some("s6")));
        }
        assert_eq!((config.nodes_subnet(V4), config.nodes_subnet(V6)), ("m", "s6"));
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
        for wrong in ["1", "2-1", "a-b", "0-5", "1-70000"] {
            let ports = format!("--openstack-node-ports={wrong}");
            let refused = parse(&["--openstack-cluster-name=c", "--openstack-subnet-id=s", &ports]);
            assert_eq!(refused, Err(ConfigError::NodePorts(wrong.to_owned())));
        }
    }
}
