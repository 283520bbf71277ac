// SPDX-License-Identifier: Apache-2.0
//! A vendor's cloud in the simulated world: the calls of the real provider over the world's network, and what an empty account would
//! have if a provider without faults brought everything into place.

use std::sync::Arc;

use async_trait::async_trait;
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider};
use steerage_provider_conformance::Snapshot;
use steerage_provider_conformance::simulated::{
    AtCloud, CallFault, CarriedCall, Direct, Network, SimulatedCloud,
};
use tokio::time::{Duration, sleep};

use super::invariants::{self, LoadBalancers};
use super::link::{self, Failed, Link};
use super::world::{ProcessId, SharedWorld};

/// The clouds whose real providers can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vendor {
    Aws,
    #[cfg(feature = "azure")]
    Azure,
    #[cfg(feature = "gce")]
    Gce,
    #[cfg(feature = "openstack")]
    OpenStack,
}

impl Vendor {
    pub(super) const ALL: &[Self] = &[
        Self::Aws,
        #[cfg(feature = "azure")]
        Self::Azure,
        #[cfg(feature = "openstack")]
        Self::OpenStack,
        #[cfg(feature = "gce")]
        Self::Gce,
    ];

    pub(super) fn cloud(self, seed: u64) -> Arc<dyn SimulatedCloud> {
        match self {
            Self::Aws => Arc::new(steerage_provider_aws::SimulatedAws::new(seed)),
            #[cfg(feature = "azure")]
            Self::Azure => Arc::new(steerage_provider_azure::SimulatedAzure::new()),
            #[cfg(feature = "gce")]
            Self::Gce => Arc::new(steerage_provider_gce::SimulatedGce::new()),
            #[cfg(feature = "openstack")]
            Self::OpenStack => Arc::new(steerage_provider_openstack::SimulatedOpenStack::new()),
        }
    }
}

/// The network between a process and the cloud.
pub(super) struct CloudLink {
    pub(super) world: SharedWorld,
    pub(super) process: ProcessId,
}

#[async_trait]
impl Network for CloudLink {
    async fn carry(&self, call: CarriedCall, at_cloud: AtCloud) -> Result<(), CallFault> {
        let process = self.process;
        let effect = move |world: &SharedWorld| {
            let world = &mut *world.lock();
            let details = format!("{} {}", world.identity(process), call.name);
            if !call.is_write {
                world.record("cloud read", &details);
                world.cloud.reads += 1;
                return at_cloud();
            }
            world.record("cloud changed", &details);
            world.cloud.writes += 1;
            let before = LoadBalancers::of(world);
            at_cloud();
            invariants::on_write(world, process, call.name, &before);
        };
        link::call(&self.world, process, Link::Cloud, effect).await.map_err(|failed| match failed {
            Failed::Refused => CallFault::Throttled,
            Failed::Broken => CallFault::Broken,
        })
    }
}

/// What an empty account has after a provider without faults has brought these into place. `None` without a vendor.
pub(super) async fn expected(shared: &SharedWorld) -> Result<Option<Snapshot>, String> {
    let Some(cloud) = shared.lock().vendor.as_ref().map(|cloud| cloud.empty()) else { return Ok(None) };
    let provider = cloud.provider(Arc::new(Direct));
    let wanted = invariants::wanted(&shared.lock());
    for wanted in wanted.iter().filter(|wanted| !wanted.is_rejected) {
        for _ in 0..2 {
            bring(&*provider, &wanted.lb).await?;
        }
    }
    Ok(Some(cloud.snapshot()))
}

async fn bring(provider: &dyn Provider, lb: &LoadBalancer) -> Result<(), String> {
    let mut last = String::new();
    for _ in 0..500 {
        let pause = match provider.apply(lb, Compare::InPlace).await {
            Ok(outcome) => match outcome.progress {
                Progress::Done => return Ok(()),
                Progress::Again(after) => after,
            },
            Err(error) => {
                last = error.to_string();
                Duration::from_secs(5)
            }
        };
        sleep(pause).await;
    }
    Err(format!("{} is not done in an empty account: {last}", lb.owner))
}
