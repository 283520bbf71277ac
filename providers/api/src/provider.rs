// SPDX-License-Identifier: Apache-2.0
//! The trait of providers. `steerage-provider-conformance` tests every implementation.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use steerage_model::Ingress;

use crate::{
    AdmittedSources, Capabilities, Error, GroupTargets, HealthState, LoadBalancer, Owner, PartHealth,
    ProviderNotice, RequestedSources, TargetHealth, TargetSet,
};

/// Whether a change is complete. Providers never wait: if the cloud needs time, they return when to call again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The change is complete.
    Done,
    /// Call again with the same arguments after this time. Other calls may come before.
    Again(Duration),
}

/// What [`Provider::target_health`] read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The health of each target, except of [`Health::omitted`] ones.
    pub targets: Vec<TargetHealth>,
    /// How many targets in each state are not in `targets`: of thousands, a provider may name only those that matter.
    pub omitted: BTreeMap<HealthState, usize>,
    /// The health of each part whose targets are checked apart from those of the others; empty if there is only one.
    pub parts: Vec<PartHealth>,
    /// When to read it again; `None` if the provider notifies of changes.
    pub due: Option<Duration>,
}

/// What a provider compares with what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// What it remembers, where its last call succeeded. Nothing is read for what did not change.
    Remembered,
    /// What is in place: somebody may have changed it.
    InPlace,
}

/// The result of [`Provider::apply`] and [`Provider::set_targets`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the change is complete.
    pub progress: Progress,
    /// The addresses or host names to publish in the Service's status; empty until they are final, and if none are known.
    pub ingress: Vec<Ingress>,
    /// Targets that the provider refused, named as in [`TargetHealth`], each with the reason and what to do. The others are in place.
    pub refused: Vec<(String, String)>,
    /// When to call again although the change is complete: what was refused may be accepted by then.
    pub retry_refused: Option<Duration>,
    /// Why a part is not in place on which neither targets nor addresses depend, such as who may connect, or one of several ports: a
    /// reason, and a message.
    /// `progress` or `retry_refused` say when it is tried again; neither does if only another change of the Service helps.
    pub incomplete: Option<(&'static str, String)>,
}

impl Outcome {
    /// A complete change with nothing to report.
    pub fn done() -> Self {
        Self {
            progress: Progress::Done,
            ingress: Vec::new(),
            refused: Vec::new(),
            retry_refused: None,
            incomplete: None,
        }
    }
}

/// A provider of load balancers: a cloud, or `steerage-edge`.
///
/// Every method converges from any partial state, writes nothing if nothing differs, and touches only what it owns. Calls with the
/// same [`Provider::serialization_key`] never overlap; others do. A call for an owner is made [for it](crate::call_namespace::for_owner).
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// The name; the class is `steerage.dev/<name>`.
    fn name(&self) -> &'static str;

    /// What the provider supports.
    fn capabilities(&self) -> Capabilities;

    /// The controller makes one call at a time for all owners with the same key. Owners that share a resource share a key.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.uid.clone()
    }

    /// Finalizers of other controllers whose load balancers [`Provider::apply`] takes over. They leave a Service whose load balancer is
    /// complete.
    fn replaced_finalizers(&self) -> &'static [&'static str] {
        &[]
    }

    /// Annotations that say who may connect: all that [`Provider::restrict_sources`] reads of a Service beside its field.
    fn source_annotations(&self) -> &'static [&'static str] {
        &[]
    }

    /// Creates or updates the load balancer with its targets. The provider orders the steps so that clients are served after each:
    /// targets are added before a listener needs them, and before others are removed. It sends only the difference, and continues
    /// when one target is refused. Deletes what an earlier Service of the same name left.
    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error>;

    /// Updates only the targets of the load balancer as it is: the structure that its Service requests cannot be planned, or was
    /// [rejected](Error::Invalid). Does nothing if there is none.
    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error>;

    /// Takes away the clients that a Service no longer admits while its structure is refused. Never admits a client that could not
    /// connect: what it admits besides comes with [`Provider::apply`]. Returns who may connect then; `None` if there is no load balancer
    /// of this owner. [`Error::Busy`] until that is in place, [`Error::Invalid`] if what the Service requests cannot be read: then nothing
    /// changes.
    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error>;

    /// Replaces a shared set for all load balancers that use it; an older value than the last one changes nothing. Only called with
    /// the capability [`shared_sets`](Capabilities::shared_sets). [`Provider::apply`] contains the set too, for the first load
    /// balancer that uses it.
    async fn set_shared(&self, _set: &TargetSet) -> Result<(), Error> {
        Ok(())
    }

    /// Whether [`Provider::target_health`] reports targets. If not, it returns none.
    fn reports_health(&self) -> bool {
        true
    }

    /// Reads the health of the targets.
    async fn target_health(&self, owner: &Owner) -> Result<Health, Error>;

    /// Deletes everything of `owner`. Succeeds if there is nothing.
    async fn delete(&self, owner: &Owner) -> Result<Progress, Error>;

    /// The owners of everything at the provider, to find what outlived its Service.
    async fn owned(&self) -> Result<Vec<Owner>, Error>;

    /// What [`Provider::apply`] would change of the load balancer, in words for an operator; empty if nothing. Also of another
    /// controller's that it would take over. `None` if there is none, or if reading cannot tell. [`Error::Invalid`] if it would be refused, as far as that can be known without a write, also of a
    /// load balancer that does not exist yet. Writes nothing, also beside another controller that writes.
    async fn preview(&self, _lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        Ok(None)
    }

    /// The same as [`Provider::owned`], and writes nothing, also beside another controller that writes.
    async fn preview_owned(&self) -> Result<Vec<Owner>, Error> {
        self.owned().await
    }

    /// Owners to reconcile because something changed at the provider. Never ends; yields nothing if the provider has no
    /// notifications.
    fn changes(&self) -> BoxStream<'static, Owner>;

    /// What to tell users by events, besides the results of calls. Never ends; yields nothing if the provider has nothing to tell.
    fn notices(&self) -> BoxStream<'static, ProviderNotice> {
        Box::pin(futures::stream::pending())
    }
}
