// SPDX-License-Identifier: Apache-2.0
//! Calls about subnets, to EC2.

use async_trait::async_trait;
use ec2::types::Filter;

use super::{CallError, Client, Result, SubnetCalls, ec2};
use crate::subnets::Subnet;

/// Subnets in one answer: the limit of EC2.
const PAGE: i32 = 1000;

#[async_trait]
impl SubnetCalls for Client {
    async fn subnets(&self, vpc: &str) -> Result<Vec<Subnet>> {
        let filter = Filter::builder().name("vpc-id").values(vpc).build();
        let call = self.ec2.describe_subnets().filters(filter).max_results(PAGE);
        let all = call.into_paginator().items().send().try_collect().await;
        Ok(all.map_err(CallError::of("DescribeSubnets"))?.into_iter().map(subnet).collect())
    }
}

fn subnet(found: ec2::types::Subnet) -> Subnet {
    let tags = found.tags.unwrap_or_default().into_iter();
    Subnet {
        id: found.subnet_id.unwrap_or_default(),
        zone: found.availability_zone.unwrap_or_default(),
        tags: tags.filter_map(|tag| Some((tag.key?, tag.value.unwrap_or_default()))).collect(),
        free: found
            .available_ip_address_count
            .and_then(|count| u32::try_from(count).ok())
            .unwrap_or_default(),
        is_on_outpost: found.outpost_arn.is_some(),
    }
}
