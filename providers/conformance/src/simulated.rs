// SPDX-License-Identifier: Apache-2.0
//! What the controller's simulation needs of a cloud that lives in its process: the real provider on it, its calls carried by the
//! simulation's network, and a look at the result from outside.
//!
//! A provider's crate implements [`SimulatedCloud`] over its stand-in, behind a feature that only tests enable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use ipnet::IpNet;
use steerage_provider_api::{Capabilities, Owner, Provider};

use crate::Snapshot;

/// What went wrong with a call on its way to the cloud and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFault {
    /// The cloud refused it: too many calls. It had no effect.
    Throttled,
    /// The connection broke. The call may have had its effect.
    Broken,
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub struct CarriedCall {
    /// The vendor's name of it.
    pub name: &'static str,
    /// Whether it may change something.
    pub is_write: bool,
}

/// A call as it happens at the cloud: at one moment. Whoever carries it may let it happen twice, or after the caller has gone.
pub type AtCloud = Box<dyn Fn() + Send>;

/// What carries calls to a simulated cloud.
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// Makes a call.
    async fn carry(&self, call: CarriedCall, at_cloud: AtCloud) -> Result<(), CallFault>;
}

/// Makes a call whose effect returns something: the last answer, if it happens twice.
pub async fn carry<T: Send + 'static>(
    network: &dyn Network,
    call: CarriedCall,
    at_cloud: impl Fn() -> T + Send + 'static,
) -> Result<T, CallFault> {
    let answer = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&answer);
    let effect = Box::new(move || {
        let value = at_cloud();
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    });
    network.carry(call, effect).await?;
    let value = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
    value.ok_or(CallFault::Broken)
}

/// A network without faults and without time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Direct;

#[async_trait]
impl Network for Direct {
    async fn carry(&self, _: CarriedCall, at_cloud: AtCloud) -> Result<(), CallFault> {
        at_cloud();
        Ok(())
    }
}

/// A Service's load balancer as the cloud has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenLoadBalancer {
    /// The nodes to which each listener sends, by the listener's port. Nodes that no Node of the cluster is are `by-hand`.
    pub listeners: BTreeMap<u16, BTreeSet<String>>,
    /// Who may connect to any of them.
    pub sources: BTreeSet<IpNet>,
    /// What the Service should publish: an address or a host name. Empty as long as there is none.
    pub address: String,
}

/// A cloud in this process, on tokio's clock.
pub trait SimulatedCloud: Send + Sync + 'static {
    /// What its provider supports.
    fn capabilities(&self) -> Capabilities {
        self.provider(Arc::new(Direct)).capabilities()
    }

    /// The real provider of a new process.
    fn provider(&self, network: Arc<dyn Network>) -> Arc<dyn Provider>;

    /// `spec.providerID` of this node.
    fn provider_id(&self, node: &str) -> String;

    /// The machine of a node runs, or is gone. Clouds that do not look at machines do nothing.
    fn set_machine(&self, _node: &str, _runs: bool) {}

    /// Annotations that a Service may have. Those of one name replace each other.
    fn options(&self) -> &'static [(&'static str, &'static str)];

    /// An annotation that the provider refuses.
    fn refused(&self) -> (&'static str, &'static str);

    /// Whether the provider refuses a Service with these annotations, which are among [`SimulatedCloud::options`] and
    /// [`SimulatedCloud::refused`].
    fn is_refused(&self, annotations: &BTreeMap<String, String>) -> bool {
        let (name, value) = self.refused();
        annotations.get(name).is_some_and(|found| found == value)
    }

    /// Whether a change of a Service's ports replaces all of its listeners, because the cloud has no other way.
    fn replaces_listeners(&self) -> bool {
        false
    }

    /// The load balancers of the cluster's Services.
    fn load_balancers(&self) -> BTreeMap<Owner, SeenLoadBalancer>;

    /// Everything that is there, one entry for each resource or part, without what depends on history such as IDs. The entry of a
    /// Service's resource contains its UID.
    fn snapshot(&self) -> Snapshot;

    /// The part of the snapshot that others made.
    fn foreign(&self) -> Snapshot;

    /// Another such cloud, with the same machines and the same resources of others, and nothing of the cluster.
    fn empty(&self) -> Arc<dyn SimulatedCloud>;

    /// Somebody changes or deletes what the provider made. Returns what, if there was something. `number` is random.
    fn change_by_hand(&self, number: u64) -> Option<String>;
}
