// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and the settings from them. The controller flattens [`AzureArgs`] into its own flags.

use std::time::Duration;

use clap::Args;
use steerage_provider_cloud::ClusterId;

/// The Azure provider's flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Azure")]
pub struct AzureArgs {
    /// Tag all resources with this name of the cluster. Names of resources depend on it; the cluster's UID says whose they are. After a
    /// change, existing load balancers are no longer managed. Required with --provider azure
    #[arg(long, env = "STEERAGE_AZURE_CLUSTER_NAME", value_name = "NAME")]
    pub azure_cluster_name: Option<String>,

    /// Use this subscription. Required with --provider azure
    #[arg(long, env = "STEERAGE_AZURE_SUBSCRIPTION_ID", value_name = "ID")]
    pub azure_subscription_id: Option<String>,

    /// Create load balancers and public IPs in this resource group. Required with --provider azure
    #[arg(long, env = "STEERAGE_AZURE_RESOURCE_GROUP", value_name = "NAME")]
    pub azure_resource_group: Option<String>,

    /// Create load balancers and public IPs in this region. Required with --provider azure
    #[arg(long, env = "STEERAGE_AZURE_LOCATION", value_name = "REGION")]
    pub azure_location: Option<String>,

    /// Reach nodes in this virtual network: a name, or /subscriptions/…/virtualNetworks/NAME of another resource group. Required with
    /// --provider azure
    #[arg(long, env = "STEERAGE_AZURE_VIRTUAL_NETWORK", value_name = "NETWORK")]
    pub azure_virtual_network: Option<String>,

    /// Take private addresses of internal load balancers from this subnet of the virtual network [default: none; the annotation of an
    /// internal Service must name one]
    #[arg(long, env = "STEERAGE_AZURE_SUBNET", value_name = "NAME")]
    pub azure_subnet: Option<String>,

    /// Write rules that admit clients into this network security group of the nodes: a name, or /subscriptions/…/networkSecurityGroups/NAME
    /// of another resource group [default: none; its owner writes them, and Services with source ranges are refused]
    #[arg(long, env = "STEERAGE_AZURE_NETWORK_SECURITY_GROUP", value_name = "GROUP")]
    pub azure_network_security_group: Option<String>,

    /// Write security rules with priorities from this number on; 1000 numbers are used
    #[arg(long, env = "STEERAGE_AZURE_SECURITY_RULE_PRIORITY", value_name = "NUMBER", default_value_t = 2000,
          value_parser = clap::value_parser!(u32).range(100..=3097))]
    pub azure_security_rule_priority: u32,

    /// Create public IPs in these availability zones [default: none; Azure then spreads them over all zones in regions that have zones]
    #[arg(long, env = "STEERAGE_AZURE_ZONES", value_name = "ZONE,…", value_delimiter = ',')]
    pub azure_zones: Vec<String>,

    /// Use the managed identity with this client ID [default: the only one of the controller's VM]. With a federated token or a client
    /// secret, `AZURE_CLIENT_ID` names the application
    #[arg(long, env = "STEERAGE_AZURE_IDENTITY_CLIENT_ID", value_name = "ID")]
    pub azure_identity_client_id: Option<String>,

    /// Send requests to this endpoint, such as that of a sovereign cloud. To a plain http:// one they go without credentials
    #[arg(
        long,
        env = "STEERAGE_AZURE_RESOURCE_MANAGER",
        value_name = "URL",
        default_value = "https://management.azure.com"
    )]
    pub azure_resource_manager: String,
}

/// Validated settings of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster whose resources the provider changes.
    pub cluster: ClusterId,
    /// Subscription of load balancers and public IPs.
    pub subscription: String,
    /// Resource group of load balancers and public IPs.
    pub resource_group: String,
    /// Region.
    pub location: String,
    /// Path of the virtual network.
    pub network: String,
    /// Name of the subnet of private addresses.
    pub subnet: Option<String>,
    /// Path of the network security group.
    pub security_group: Option<String>,
    /// Lowest priority number of security rules.
    pub priority: u32,
    /// Zones of public IPs.
    pub zones: Vec<String>,
    /// URL of Azure Resource Manager.
    pub endpoint: String,
    /// Shortest time between two questions whether a change is complete.
    pub poll: Duration,
}

/// Most changes end within some seconds.
const POLL: Duration = Duration::from_secs(1);

/// A missing or invalid flag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A required flag is missing.
    #[error("the provider azure needs the flag {0}")]
    Missing(&'static str),
    /// A flag has a value that cannot be right.
    #[error("{0} has the wrong value `{1}`: {2}")]
    Wrong(&'static str, String, &'static str),
}

impl Config {
    /// Checks the flags. `cluster_uid` is the UID of the namespace `kube-system`.
    ///
    /// # Errors
    ///
    /// If a required flag is missing, or a value is wrong.
    pub fn new(args: AzureArgs, cluster_uid: String) -> Result<Self, ConfigError> {
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        let required = |flag, value: Option<String>| set(value).ok_or(ConfigError::Missing(flag));
        let name = required("--azure-cluster-name", args.azure_cluster_name)?;
        // A tag's value has at most 256 characters.
        if name.chars().count() > 200 {
            return Err(ConfigError::Wrong("--azure-cluster-name", name, "use at most 200 characters"));
        }
        let named = |flag, value: String| {
            if is_name(&value) { Ok(value) } else { Err(ConfigError::Wrong(flag, value, NAME)) }
        };
        let required =
            |flag, value: Option<String>| required(flag, value).and_then(|value| named(flag, value));
        let subscription = required("--azure-subscription-id", args.azure_subscription_id)?;
        let resource_group = required("--azure-resource-group", args.azure_resource_group)?;
        let location = required("--azure-location", args.azure_location)?;
        let path = |flag, value: String, kind: &str| {
            if value.starts_with('/') {
                return if is_path(&value, kind) {
                    Ok(value)
                } else {
                    Err(ConfigError::Wrong(flag, value, "use a name or a resource ID"))
                };
            }
            let name = named(flag, value)?;
            Ok(network_path(&subscription, &resource_group, kind, &name))
        };
        let network =
            set(args.azure_virtual_network).ok_or(ConfigError::Missing("--azure-virtual-network"))?;
        let network = path("--azure-virtual-network", network, "virtualNetworks")?;
        let group = set(args.azure_network_security_group);
        let flag = "--azure-network-security-group";
        let security_group = group.map(|group| path(flag, group, "networkSecurityGroups")).transpose()?;
        let mut zones: Vec<String> = args.azure_zones.into_iter().filter(|zone| !zone.is_empty()).collect();
        zones.sort();
        Ok(Self {
            cluster: ClusterId { name, uid: cluster_uid },
            subnet: set(args.azure_subnet).map(|subnet| named("--azure-subnet", subnet)).transpose()?,
            priority: args.azure_security_rule_priority,
            endpoint: args.azure_resource_manager.trim_end_matches('/').to_owned(),
            poll: POLL,
            subscription,
            resource_group,
            location,
            network,
            security_group,
            zones,
        })
    }

    /// Path of a load balancer of the resource group.
    pub(crate) fn balancer_path(&self, name: &str) -> String {
        network_path(&self.subscription, &self.resource_group, "loadBalancers", name)
    }

    /// Path of a public IP.
    pub(crate) fn public_ip_path(&self, group: Option<&str>, name: &str) -> String {
        let group = group.unwrap_or(&self.resource_group);
        network_path(&self.subscription, group, "publicIPAddresses", name)
    }
}

fn group_path(subscription: &str, group: &str) -> String {
    format!("/subscriptions/{subscription}/resourceGroups/{group}")
}

fn network_path(subscription: &str, group: &str, kind: &str, name: &str) -> String {
    format!("{}/providers/Microsoft.Network/{kind}/{name}", group_path(subscription, group))
}

const NAME: &str = "use a name of letters, digits, hyphens, underscores, periods and parentheses";

/// Whether a value can be a name of Azure: it becomes part of a path.
pub(crate) fn is_name(value: &str) -> bool {
    (1..=90).contains(&value.len())
        && value.chars().any(|c| c.is_ascii_alphanumeric())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '(' | ')'))
}

/// Whether a value is the ID of a network resource of a kind.
pub(crate) fn is_path(value: &str, kind: &str) -> bool {
    let parts: Vec<&str> = value.split('/').collect();
    let ["", subscriptions, subscription, groups, group, providers, network, of, name] = parts.as_slice()
    else {
        return false;
    };
    [(*subscriptions, "subscriptions"), (groups, "resourceGroups"), (providers, "providers")]
        .into_iter()
        .chain([(*network, "Microsoft.Network"), (of, kind)])
        .all(|(found, expected)| found.eq_ignore_ascii_case(expected))
        && [subscription, group, name].into_iter().all(|name| is_name(name))
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        azure: AzureArgs,
    }

    fn parse(flags: &[&str]) -> Result<Config, ConfigError> {
        let line = std::iter::once("steerage").chain(flags.iter().copied());
        Config::new(Line::try_parse_from(line).unwrap().azure, "c1".to_owned())
    }

    const ALL: [&str; 5] = [
        "--azure-cluster-name=prod",
        "--azure-subscription-id=sub",
        "--azure-resource-group=rg",
        "--azure-location=westeurope",
        "--azure-virtual-network=vnet",
    ];

    /// With a subnet, without a security group.
    pub(crate) fn config() -> Config {
        let mut config = parse(&ALL).unwrap();
        (config.poll, config.subnet) = (Duration::ZERO, Some("nodes".to_owned()));
        config
    }

    #[test]
    fn names_become_paths_and_paths_stay() {
        let config = config();
        assert_eq!(
            config.network,
            "/subscriptions/sub/resourceGroups/rg/providers/Microsoft.Network/virtualNetworks/vnet"
        );
        assert_eq!((config.security_group.as_ref(), config.priority), (None, 2000));
        let group =
            "/subscriptions/s2/resourcegroups/net/providers/Microsoft.Network/networkSecurityGroups/nodes";
        let flag = format!("--azure-network-security-group={group}");
        let config = parse(&[&ALL[..], &[&flag, "--azure-zones=2,1"]].concat()).unwrap();
        assert_eq!((config.security_group.as_deref(), config.zones.concat()), (Some(group), "12".to_owned()));
    }

    #[test]
    fn missing_and_wrong_flags_are_named() {
        for count in 0..ALL.len() {
            let flag = ALL[count].split('=').next().unwrap();
            assert_eq!(parse(&ALL[..count]), Err(ConfigError::Missing(flag)));
        }
        for wrong in [
            "--azure-network-security-group=/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n",
            "--azure-network-security-group=a/../b",
            "--azure-subnet=a?b",
            "--azure-subnet=..",
        ] {
            let flag = wrong.split('=').next().unwrap();
            let got = parse(&[&ALL[..], &[wrong]].concat());
            assert!(matches!(&got, Err(ConfigError::Wrong(of, ..)) if *of == flag), "{got:?}");
        }
    }
}
