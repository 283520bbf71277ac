// SPDX-License-Identifier: Apache-2.0
//! Calls about subnets, to EC2.

use async_trait::async_trait;
use steerage_ec2::Filter;

use super::{CallError, Client, Result, SubnetCalls, ec2_tags};
use crate::subnets::Subnet;

#[async_trait]
impl SubnetCalls for Client {
    async fn subnets(&self, vpc: &str) -> Result<Vec<Subnet>> {
        let all = self.ec2.describe_subnets(&[Filter::new("vpc-id", vpc)]).await;
        Ok(all.map_err(CallError::of_ec2("DescribeSubnets"))?.into_iter().map(subnet).collect())
    }
}

fn subnet(found: steerage_ec2::Subnet) -> Subnet {
    Subnet {
        id: found.subnet_id,
        zone: found.availability_zone,
        tags: ec2_tags(found.tags),
        free: found.available_ip_address_count,
        has_ipv6: found.ipv6_ranges.iter().any(steerage_ec2::Ipv6Association::is_associated),
        is_on_outpost: found.outpost_arn.is_some(),
    }
}
