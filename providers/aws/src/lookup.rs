// SPDX-License-Identifier: Apache-2.0
//! Finds the IDs of the subnets that a load balancer gets. One read of the VPC serves all Services for a minute: subnets hardly change.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::Error;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::desired::Desired;
use crate::placement::Placement;
use crate::provider::Aws;
use crate::subnets::Subnet;

/// A read is used for this time.
const AGE: Duration = Duration::from_mins(1);

/// The subnets of the VPC, and when they were read.
pub(crate) struct KnownSubnets {
    read: Instant,
    all: Arc<[Subnet]>,
}

impl Aws {
    /// Where a new load balancer goes.
    pub(crate) async fn resolved(&self, wanted: &Desired) -> Result<Placement, Error> {
        if !wanted.placement.needs_lookup(true) {
            return Ok(wanted.placement.clone());
        }
        wanted.placement.resolved(&self.config, &self.all_subnets().await?)
    }

    /// Refuses a change of what an existing load balancer has.
    pub(crate) async fn check_placement(&self, wanted: &Desired, balancer: &Balancer) -> Result<(), Error> {
        if !wanted.placement.needs_lookup(false) {
            return wanted.placement.check(&balancer.placed);
        }
        match self.all_subnets().await {
            Ok(all) => wanted.placement.resolved(&self.config, &all)?.check(&balancer.placed),
            // Nothing is changed here. So the rest does not wait for EC2: a later comparison checks the names.
            Err(error) => {
                tracing::warn!(name = balancer.name, %error, "cannot compare the names of subnets");
                wanted.placement.check(&balancer.placed)
            }
        }
    }

    async fn all_subnets(&self) -> Result<Arc<[Subnet]>, Error> {
        let mut known = self.subnets.lock().await;
        if let Some(known) = known.as_ref().filter(|known| known.read.elapsed() < AGE) {
            return Ok(Arc::clone(&known.all));
        }
        let all: Arc<[Subnet]> = self.client.subnets(&self.config.vpc).await?.into();
        *known = Some(KnownSubnets { read: Instant::now(), all: Arc::clone(&all) });
        Ok(all)
    }
}
