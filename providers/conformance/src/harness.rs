// SPDX-License-Identifier: Apache-2.0
//! What a provider's tests tell the suite about its backend.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use steerage_provider_api::{LoadBalancer, Owner, Provider, Target};

use crate::{Answer, Call, Proxy};

/// The whole state of a backend: the name of every object, foreign ones too, with its content. What differs between two
/// equal histories (identifiers that the backend draws, times, versions) is left out or replaced. A difference of two snapshots is
/// shown to people, so the content is best one line a field.
pub type Snapshot = BTreeMap<String, String>;

/// A provider and its backend under test.
///
/// Everything but [`Harness::fresh`]'s provider reaches the backend past the proxy, so that the harness's own calls are not
/// counted and meet no fault.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The provider under test.
    type Provider: Provider;

    /// A new instance that reaches the backend only through the proxy and remembers nothing. Its own retries are off, or it
    /// would hide the faults; what it does on its own (a watch) is [`crate::CallKind::Background`].
    async fn fresh(&self) -> anyhow::Result<Self::Provider>;

    /// The proxy between the two.
    fn proxy(&self) -> &Proxy;

    /// The whole state of the backend.
    async fn snapshot(&self) -> anyhow::Result<Snapshot>;

    /// The names of the nodes in each target group of the owner's load balancer, as the backend has them now; no group where
    /// there is no load balancer.
    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>>;

    /// The `index`-th of at least four targets that the backend takes, sorted by node name.
    fn target(&self, index: usize) -> Target;

    /// A target that can't be used; its node name sorts between those of the targets 0 and 1.
    fn bad_target(&self) -> Target;

    /// How the backend says that it is called too often.
    fn throttle(&self) -> Answer;

    /// Makes objects that carry the names that the provider would give to this load balancer's, and objects that look like
    /// its kin, as somebody else would have made them: without its marks of ownership.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()>;

    /// Removes all that [`Harness::plant_foreign`] made.
    async fn remove_foreign(&self) -> anyhow::Result<()>;

    /// Adds to objects that the provider made for `owner` what only somebody else knows: a foreign tag, an unknown field.
    async fn mark(&self, owner: &Owner) -> anyhow::Result<()>;

    /// Whether all that [`Harness::mark`] added is still there.
    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool>;

    /// Changes the suite's load balancers to what the provider can serve, for example by its annotations.
    fn adapt(&self, _lb: &mut LoadBalancer) {}

    /// The nodes that a call adds or removes, for a backend whose calls carry a difference; `None` for other calls, and for all
    /// where a call carries the whole set.
    fn nodes_in(&self, _call: &Call) -> Option<BTreeSet<String>> {
        None
    }

    /// How many reads one more `ensure` and `set_targets` may make when nothing has changed.
    fn steady_reads(&self) -> usize {
        2
    }
}
