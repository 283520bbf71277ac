// SPDX-License-Identifier: Apache-2.0
//! The provider's flags and what they mean. Read once at start; the controller flattens [`AwsArgs`] into its own flags.

use clap::{Args, ValueEnum};

/// Whether a load balancer is reached from the Internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, ValueEnum)]
pub enum Scheme {
    /// Only from within the VPC and what is joined to it.
    #[default]
    Internal,
    /// From everywhere.
    InternetFacing,
}

impl Scheme {
    /// As `ELBv2` and the annotation write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Internal => "internal",
            Self::InternetFacing => "internet-facing",
        }
    }

    /// The scheme of that name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Internal, Self::InternetFacing].into_iter().find(|s| s.as_str() == text)
    }
}

/// The AWS provider's flags.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "AWS")]
pub struct AwsArgs {
    /// Name of this cluster, unique in the AWS account and region: load balancers are tagged with it, and only those tagged with it
    /// are touched. Can't be changed while there are load balancers
    #[arg(long, env = "STEERAGE_AWS_CLUSTER_NAME", value_name = "NAME")]
    pub aws_cluster_name: Option<String>,

    /// VPC of the nodes
    #[arg(long, env = "STEERAGE_AWS_VPC_ID", value_name = "ID")]
    pub aws_vpc_id: Option<String>,

    /// Subnets to put load balancers in, one in each availability zone that has nodes
    #[arg(long, env = "STEERAGE_AWS_SUBNETS", value_name = "ID,…", value_delimiter = ',')]
    pub aws_subnets: Vec<String>,

    /// Region; by default that of the environment, the profile or the instance
    #[arg(long, env = "STEERAGE_AWS_REGION", value_name = "REGION")]
    pub aws_region: Option<String>,

    /// URL to send `ELBv2` requests to instead of the region's own endpoint
    #[arg(long, env = "STEERAGE_AWS_ENDPOINT", value_name = "URL")]
    pub aws_endpoint: Option<String>,

    /// Scheme of load balancers whose Service has no annotation `service.beta.kubernetes.io/aws-load-balancer-scheme`
    #[arg(long, env = "STEERAGE_AWS_SCHEME", value_enum, default_value = "internal")]
    pub aws_scheme: Scheme,
}

/// What the provider needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster's name.
    pub cluster: String,
    /// The nodes' VPC.
    pub vpc: String,
    /// The load balancers' subnets, sorted.
    pub subnets: Vec<String>,
    /// The region, where one is set.
    pub region: Option<String>,
    /// Where to send requests, where that is set.
    pub endpoint: Option<String>,
    /// The scheme where a Service does not choose.
    pub scheme: Scheme,
}

/// A flag that is missing or wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The provider can't work without it.
    #[error("the aws provider needs {0}")]
    Missing(&'static str),
    /// It is longer than a tag's value may be.
    #[error("--aws-cluster-name is longer than 256 characters")]
    ClusterTooLong,
}

impl TryFrom<AwsArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: AwsArgs) -> Result<Self, ConfigError> {
        let AwsArgs { aws_cluster_name, aws_vpc_id, mut aws_subnets, aws_region, aws_endpoint, aws_scheme } =
            args;
        let cluster =
            aws_cluster_name.filter(|c| !c.is_empty()).ok_or(ConfigError::Missing("--aws-cluster-name"))?;
        if cluster.chars().count() > 256 {
            return Err(ConfigError::ClusterTooLong);
        }
        aws_subnets.retain(|s| !s.is_empty());
        aws_subnets.sort();
        aws_subnets.dedup();
        if aws_subnets.is_empty() {
            return Err(ConfigError::Missing("--aws-subnets"));
        }
        Ok(Self {
            cluster,
            vpc: aws_vpc_id.filter(|v| !v.is_empty()).ok_or(ConfigError::Missing("--aws-vpc-id"))?,
            subnets: aws_subnets,
            region: aws_region,
            endpoint: aws_endpoint,
            scheme: aws_scheme,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(line: &[&str]) -> Result<Config, ConfigError> {
        let command = AwsArgs::augment_args(clap::Command::new("test"));
        let matches = command.try_get_matches_from(std::iter::once(&"test").chain(line)).unwrap();
        AwsArgs::from_arg_matches(&matches).unwrap().try_into()
    }

    #[test]
    fn flags_become_a_configuration() {
        let config = parse(&[
            "--aws-cluster-name=c",
            "--aws-vpc-id=vpc-1",
            "--aws-subnets=subnet-b,subnet-a,subnet-b",
        ])
        .unwrap();
        assert_eq!(config.subnets, ["subnet-a", "subnet-b"]);
        assert_eq!(config.scheme, Scheme::Internal);
        let config = parse(&[
            "--aws-cluster-name=c",
            "--aws-vpc-id=vpc-1",
            "--aws-subnets=subnet-a",
            "--aws-scheme=internet-facing",
        ]);
        assert_eq!(config.unwrap().scheme, Scheme::InternetFacing);
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(parse(&[]), Err(ConfigError::Missing("--aws-cluster-name")));
        assert_eq!(parse(&["--aws-cluster-name=c"]), Err(ConfigError::Missing("--aws-subnets")));
        let no_vpc = parse(&["--aws-cluster-name=c", "--aws-subnets=subnet-a"]);
        assert_eq!(no_vpc, Err(ConfigError::Missing("--aws-vpc-id")));
    }
}
