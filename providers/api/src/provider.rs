// SPDX-License-Identifier: Apache-2.0
//! The trait that every provider implements, and that the conformance suite holds it to.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use steerage_model::Ingress;

use crate::{Capabilities, Error, LoadBalancer, Owner, TargetHealth, TargetSet};

/// Whether a mutation is complete. Providers never wait: where the cloud needs time, they say when to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All is as asked.
    Done,
    /// Call again with the same arguments after this time.
    Again(Duration),
}

/// What came of [`Provider::ensure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnsureOutcome {
    /// How far it got.
    pub progress: Progress,
    /// What to publish in the Service's status; empty until it is final.
    pub ingress: Vec<Ingress>,
}

/// What came of [`Provider::set_targets`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetTargetsOutcome {
    /// How far it got.
    pub progress: Progress,
    /// Targets that could not be used, by node name, each with what to do about it. The others are in place.
    pub refused: Vec<(String, String)>,
}

/// A cloud, or our own edge.
///
/// Every method converges from whatever partial state it finds, writes nothing when all is as asked, and touches only what it
/// owns. Calls for one [`Provider::serialization_key`] never overlap; calls for different units do.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// The name: the class is `steerage.dev/<name>`.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// The unit of change that a Service's load balancer belongs to: the controller serialises calls by it.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.uid.clone()
    }

    /// Makes the load balancer's structure as asked, all but the targets. What an older `owner` of the same Service name left is
    /// deleted.
    async fn ensure(&self, lb: &LoadBalancer) -> Result<EnsureOutcome, Error>;

    /// Makes the targets of all the load balancer's target groups as asked: adds before it removes, sends only the difference,
    /// and does what it can where one target is refused. Called after a first successful `ensure`.
    async fn set_targets(&self, lb: &LoadBalancer, set: &TargetSet) -> Result<SetTargetsOutcome, Error>;

    /// Reads the health of the targets.
    async fn target_health(&self, owner: &Owner) -> Result<Vec<TargetHealth>, Error>;

    /// Deletes all that belongs to `owner`; that nothing is left is success.
    async fn delete(&self, owner: &Owner) -> Result<Progress, Error>;

    /// Everybody who owns something at the provider, to find what outlived its Service.
    async fn owned(&self) -> Result<Vec<Owner>, Error>;

    /// Owners to look at again because something changed at the provider's side. Never ends; never yields for a provider
    /// that cannot tell.
    fn changes(&self) -> BoxStream<'static, Owner>;
}
