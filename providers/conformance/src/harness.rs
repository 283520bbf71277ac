// SPDX-License-Identifier: Apache-2.0
//! The interface between the suite and the tests of a provider.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use steerage_provider_api::{LoadBalancer, Owner, Provider, Target};

use crate::{Call, CannedResponse, Proxy};

/// The whole state of a backend: the names and contents of all objects, including foreign ones. It leaves out or replaces
/// what differs between equal histories: generated identifiers, times, versions. Errors show the difference of two
/// snapshots, so the content should have one line per field.
pub type Snapshot = BTreeMap<String, String>;

/// A provider and its backend under test.
///
/// Only the provider of [`Harness::fresh`] uses the proxy. The harness's own calls go directly to the backend, so they are not
/// counted and meet no faults.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The provider under test.
    type Provider: Provider;

    /// A new instance without state that reaches the backend only through the proxy. It must not retry by itself, which would
    /// hide faults. Calls that it makes unasked, such as a watch, are [`crate::CallKind::Background`].
    async fn fresh(&self) -> anyhow::Result<Self::Provider>;

    /// The proxy between provider and backend.
    fn proxy(&self) -> &Proxy;

    /// The whole state of the backend.
    async fn snapshot(&self) -> anyhow::Result<Snapshot>;

    /// The current node names in each target group of the owner's load balancer. Empty if there is no load balancer.
    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>>;

    /// One of at least four targets that the backend accepts, sorted by node name.
    fn target(&self, index: usize) -> Target;

    /// A target that the backend refuses. Its node name sorts between those of targets 0 and 1.
    fn bad_target(&self) -> Target;

    /// The backend's response to too many calls.
    fn throttle(&self) -> CannedResponse;

    /// Creates objects with the names that the provider would use for this load balancer, and objects with similar names, but
    /// without the provider's marks of ownership.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()>;

    /// Removes everything that [`Harness::plant_foreign`] created.
    async fn remove_foreign(&self) -> anyhow::Result<()>;

    /// Adds foreign data to the owner's objects, such as a tag or an unknown field.
    async fn mark(&self, owner: &Owner) -> anyhow::Result<()>;

    /// Whether everything that [`Harness::mark`] added still exists.
    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool>;

    /// Adapts the suite's load balancers to the provider, for example by annotations.
    fn adapt(&self, _lb: &mut LoadBalancer) {}

    /// The nodes that a call adds or removes, if calls of the backend carry a difference. `None` for other calls, and always if
    /// calls carry the whole set.
    fn nodes_in(&self, _call: &Call) -> Option<BTreeSet<String>> {
        None
    }

    /// The allowed number of reads for one comparison of what is in place, when nothing has changed.
    fn steady_reads(&self) -> usize {
        2
    }

    /// How many histories of several Services are tried: few where the backend is slow.
    fn seeds(&self) -> u64 {
        6
    }
}
