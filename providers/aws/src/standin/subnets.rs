// SPDX-License-Identifier: Apache-2.0
//! Subnets. Nobody changes them here but tests.

use async_trait::async_trait;

use super::{Kind, StandIn};
use crate::client::{Result, SubnetCalls};
use crate::subnets::Subnet;

#[async_trait]
impl SubnetCalls for StandIn {
    async fn subnets(&self, _vpc: &str) -> Result<Vec<Subnet>> {
        let see = |cloud: &super::Cloud, _| Ok(cloud.subnets.clone());
        self.read_of(Kind::Ec2Read, "DescribeSubnets", 1, String::new(), see).await
    }
}
