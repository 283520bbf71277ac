// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and the settings from them. The controller flattens [`AwsArgs`] into its own flags.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use steerage_provider_cloud::ClusterId;

use crate::shared::{self, SharedLoadBalancers};

/// Whether a load balancer is reached from the Internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, ValueEnum)]
pub enum Scheme {
    /// Reachable from the VPC and connected networks
    #[default]
    Internal,
    /// Reachable from the Internet
    InternetFacing,
}

impl Scheme {
    /// Name in `ELBv2` and in the annotation.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Internal => "internal",
            Self::InternetFacing => "internet-facing",
        }
    }

    /// The scheme with this name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Internal, Self::InternetFacing].into_iter().find(|s| s.as_str() == text)
    }
}

/// Another controller, whose load balancers Steerage can adopt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Peer {
    /// AWS's cloud controller manager
    CloudProviderAws,
    /// The AWS Load Balancer Controller
    AwsLoadBalancerController,
}

/// The AWS provider's flags.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "AWS")]
pub struct AwsArgs {
    /// Tag all AWS resources with this name of the cluster, unique in account and region. The controller changes only resources
    /// with this tag and the cluster's UID; after a change, existing load balancers are no longer managed. Required with --provider aws
    #[arg(long, env = "STEERAGE_AWS_CLUSTER_NAME", value_name = "NAME")]
    pub aws_cluster_name: Option<String>,

    /// Create target groups and security groups in this VPC, the VPC of the nodes and of the subnets [default: that of the instance on which the controller runs]
    #[arg(long, env = "STEERAGE_AWS_VPC_ID", value_name = "ID")]
    pub aws_vpc_id: Option<String>,

    /// Create load balancers in these subnets, one for each availability zone that has nodes; an existing load balancer gets those in
    /// zones where it has none, and loses none [default: subnets tagged `kubernetes.io/role/elb` or `kubernetes.io/role/internal-elb`, one for each zone]
    #[arg(long, env = "STEERAGE_AWS_SUBNETS", value_name = "ID,…", value_delimiter = ',')]
    pub aws_subnets: Vec<String>,

    /// Attach this security group of the VPC to every load balancer, beside its own. Rules of the nodes' security group with this
    /// group as their source then admit all load balancers. It must have no inbound rule: whom it admits can connect to all of them
    #[arg(long, env = "STEERAGE_AWS_BACKEND_SECURITY_GROUP", value_name = "ID")]
    pub aws_backend_security_group: Option<String>,

    /// Use this AWS region [default: from the environment, the profile or the instance]
    #[arg(long, env = "STEERAGE_AWS_REGION", value_name = "REGION")]
    pub aws_region: Option<String>,

    /// Send `ELBv2` requests to this URL, for VPC endpoints and tests [default: the region's endpoint]
    #[arg(long, env = "STEERAGE_AWS_ELBV2_ENDPOINT", value_name = "URL")]
    pub aws_elbv2_endpoint: Option<String>,

    /// Send EC2 requests to this URL, for VPC endpoints and tests [default: the region's endpoint]
    #[arg(long, env = "STEERAGE_AWS_EC2_ENDPOINT", value_name = "URL")]
    pub aws_ec2_endpoint: Option<String>,

    /// Use this scheme for Services without the annotation `service.beta.kubernetes.io/aws-load-balancer-scheme`
    #[arg(long, env = "STEERAGE_AWS_SCHEME", value_enum, default_value = "internal", value_name = "SCHEME")]
    pub aws_scheme: Scheme,

    /// Let Services share the load balancers that this JSON file lists, by the annotation `steerage.dev/shared-load-balancer`. The file
    /// names each with the namespaces that may use it, and the annotations of the load balancer as a whole. Read once, when the controller starts [default: none]
    #[arg(long, env = "STEERAGE_AWS_SHARED_LOAD_BALANCERS", value_name = "FILE")]
    pub aws_shared_load_balancers: Option<PathBuf>,

    /// Take over the load balancers that these controllers created for this cluster; --aws-cluster-name must be the name in their
    /// tags. Only for a migration: stop these controllers first, and grant the further permissions [default: none]
    #[arg(long, env = "STEERAGE_AWS_ADOPT", value_enum, value_name = "CONTROLLER,…", value_delimiter = ',')]
    pub aws_adopt: Vec<Peer>,
}

/// Validated settings of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster whose resources the provider changes.
    pub cluster: ClusterId,
    /// VPC of the nodes.
    pub vpc: String,
    /// Subnets of load balancers whose Service names none, sorted. If there are none, tags of the subnets decide.
    pub subnets: Vec<String>,
    /// ID of a security group that every load balancer gets beside its own, so that nodes can admit them all by its ID.
    pub backend_security_group: Option<String>,
    /// Region; `None` means the SDK's default.
    pub region: Option<String>,
    /// URL of `ELBv2`; `None` means the region's endpoint.
    pub endpoint: Option<String>,
    /// URL of EC2; `None` means the region's endpoint.
    pub ec2_endpoint: Option<String>,
    /// Scheme for Services without the annotation.
    pub scheme: Scheme,
    /// The load balancers that Services can share.
    pub shared_load_balancers: SharedLoadBalancers,
    /// The controllers whose load balancers are adopted.
    pub adopt: BTreeSet<Peer>,
    /// Time after which every read shows a change. AWS promises none.
    pub settle: Duration,
    /// Time between two questions whether a new load balancer is active.
    pub activation_poll: Duration,
    /// Shortest time between the deletion of a load balancer and the first try to delete its target groups, and between two tries.
    pub target_group_release: Duration,
    /// The same for its security group.
    pub security_group_release: Duration,
}

/// `ELBv2` usually shows a change within a second.
const SETTLE: Duration = Duration::from_secs(10);
/// A new load balancer takes minutes.
const ACTIVATION_POLL: Duration = Duration::from_secs(10);
/// Earlier, AWS would refuse.
const TARGET_GROUP_RELEASE: Duration = Duration::from_secs(5);
/// The same.
const SECURITY_GROUP_RELEASE: Duration = Duration::from_secs(10);

/// A missing or invalid flag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A required flag is missing.
    #[error("the provider aws needs the flag {0}")]
    Missing(&'static str),
    /// Neither the flag nor the instance names the VPC.
    #[error(
        "--aws-vpc-id is not set, and the instance's metadata do not name the VPC: {0}. Set the flag, or let the metadata (IMDSv2) answer \
         pods by a hop limit of 2"
    )]
    NoVpc(String),
    /// The cluster's name exceeds the limit of a tag's value.
    #[error("--aws-cluster-name has more than 256 characters, the limit of an AWS tag")]
    ClusterTooLong,
    /// The backend security group is not given by its ID.
    #[error("--aws-backend-security-group has the value `{0}`; use the ID of a security group, sg-…")]
    NoSecurityGroup(String),
    /// The file of shared load balancers cannot be used.
    #[error("--aws-shared-load-balancers: {}: {problem}", file.display())]
    SharedLoadBalancers {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl Config {
    /// Checks the flags. `cluster_uid` is the UID of the namespace `kube-system`.
    ///
    /// # Errors
    ///
    /// If a required flag is missing, or a value is wrong. Reads the file of shared load balancers.
    pub fn new(args: AwsArgs, cluster_uid: String) -> Result<Self, ConfigError> {
        let AwsArgs {
            aws_cluster_name,
            aws_vpc_id,
            mut aws_subnets,
            aws_backend_security_group,
            aws_region,
            aws_elbv2_endpoint,
            aws_ec2_endpoint,
            aws_scheme,
            aws_shared_load_balancers,
            aws_adopt,
        } = args;
        let name =
            aws_cluster_name.filter(|c| !c.is_empty()).ok_or(ConfigError::Missing("--aws-cluster-name"))?;
        if name.chars().count() > 256 {
            return Err(ConfigError::ClusterTooLong);
        }
        let backend = aws_backend_security_group.filter(|group| !group.is_empty());
        if let Some(group) = backend.as_ref().filter(|group| !group.starts_with("sg-")) {
            return Err(ConfigError::NoSecurityGroup(group.clone()));
        }
        aws_subnets.retain(|s| !s.is_empty());
        aws_subnets.sort();
        aws_subnets.dedup();
        let config = Self {
            cluster: ClusterId { name, uid: cluster_uid },
            vpc: aws_vpc_id.filter(|v| !v.is_empty()).ok_or(ConfigError::Missing("--aws-vpc-id"))?,
            subnets: aws_subnets,
            backend_security_group: backend,
            region: aws_region,
            endpoint: aws_elbv2_endpoint,
            ec2_endpoint: aws_ec2_endpoint,
            scheme: aws_scheme,
            shared_load_balancers: SharedLoadBalancers::new(),
            adopt: aws_adopt.into_iter().collect(),
            settle: SETTLE,
            activation_poll: ACTIVATION_POLL,
            target_group_release: TARGET_GROUP_RELEASE,
            security_group_release: SECURITY_GROUP_RELEASE,
        };
        let Some(file) = aws_shared_load_balancers.filter(|file| !file.as_os_str().is_empty()) else {
            return Ok(config);
        };
        let text = std::fs::read_to_string(&file).map_err(|error| error.to_string());
        match text.and_then(|text| shared::read(&text, &config)) {
            Ok(shared_load_balancers) => Ok(Self { shared_load_balancers, ..config }),
            Err(problem) => Err(ConfigError::SharedLoadBalancers { file, problem }),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(line: &[&str]) -> Result<Config, ConfigError> {
        let command = AwsArgs::augment_args(clap::Command::new("test"));
        let matches = command.try_get_matches_from(std::iter::once(&"test").chain(line)).unwrap();
        Config::new(AwsArgs::from_arg_matches(&matches).unwrap(), "uid-1".to_owned())
    }

    #[test]
    fn flags_set_config() {
        let config = parse(&[
            "--aws-cluster-name=c",
            "--aws-vpc-id=vpc-1",
            "--aws-subnets=subnet-b,subnet-a,subnet-b",
        ])
        .unwrap();
        assert_eq!(config.subnets, ["subnet-a", "subnet-b"]);
        assert_eq!(config.scheme, Scheme::Internal);
        assert_eq!(config.cluster, ClusterId { name: "c".to_owned(), uid: "uid-1".to_owned() });
        let config = parse(&[
            "--aws-cluster-name=c",
            "--aws-vpc-id=vpc-1",
            "--aws-subnets=subnet-a",
            "--aws-scheme=internet-facing",
        ]);
        assert_eq!(config.unwrap().scheme, Scheme::InternetFacing);
    }

    #[test]
    fn missing_flag_is_named() {
        assert_eq!(parse(&[]), Err(ConfigError::Missing("--aws-cluster-name")));
        assert_eq!(parse(&["--aws-cluster-name=c"]), Err(ConfigError::Missing("--aws-vpc-id")));
        let by_tags = parse(&["--aws-cluster-name=c", "--aws-vpc-id=vpc-1"]).unwrap();
        assert!(by_tags.subnets.is_empty());
    }

    #[test]
    fn backend_security_group_is_an_id() {
        let with = |value: &str| {
            let flag = format!("--aws-backend-security-group={value}");
            parse(&["--aws-cluster-name=c", "--aws-vpc-id=vpc-1", &flag])
        };
        assert_eq!(with("sg-1").unwrap().backend_security_group.as_deref(), Some("sg-1"));
        assert_eq!(with("").unwrap().backend_security_group, None);
        assert_eq!(with("nodes"), Err(ConfigError::NoSecurityGroup("nodes".to_owned())));
    }
}
