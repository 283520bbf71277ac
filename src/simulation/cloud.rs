// SPDX-License-Identifier: Apache-2.0
//! The simulated cloud, and the provider of one process for it: one load balancer for each Service name, changed in several calls.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use ipnet::{IpNet, Ipv4Net};
use steerage_model::{Ingress, IpMode, Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, HealthCheck,
    HealthState, Listener, LoadBalancer, Outcome, Owner, Progress, Provider, RequestedSources, SharedSet,
    Steering, TargetHealth, TargetSet, intersection,
};
use tokio::time::{Duration, Instant};

use super::invariants::{self, LoadBalancers};
use super::link::{self, Failed, Link};
use super::world::{ProcessId, ProviderKind, SharedWorld, World};

/// A Service with this annotation is rejected.
pub(super) const UNSUPPORTED: &str = "steerage.dev/unsupported-by-simulation";

/// Where a load balancer has its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoredTargets {
    Own(BTreeSet<String>),
    Shared(SharedSet),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Balancer {
    pub(super) owner: Owner,
    pub(super) listeners: Vec<Listener>,
    pub(super) health_check: Option<HealthCheck>,
    pub(super) targets: StoredTargets,
    /// Nobody may connect if there are none.
    pub(super) sources: BTreeSet<IpNet>,
    pub(super) address: IpAddr,
    /// The address is final from then on.
    active_at: Instant,
}

#[derive(Default)]
pub(super) struct Cloud {
    /// Names are unique: an earlier Service's load balancer is in the way of the next one's.
    pub(super) balancers: BTreeMap<Key, Balancer>,
    pub(super) sets: BTreeMap<SharedSet, BTreeSet<String>>,
    made: u8,
    /// Calls that changed something.
    pub(super) writes: u64,
    pub(super) reads: u64,
}

impl Cloud {
    /// The nodes that a load balancer sends to.
    pub(super) fn targets_of(&self, balancer: &Balancer) -> BTreeSet<String> {
        match &balancer.targets {
            StoredTargets::Own(targets) => targets.clone(),
            StoredTargets::Shared(set) => self.sets.get(set).cloned().unwrap_or_default(),
        }
    }
}

/// The provider of one process.
pub(super) struct SimulatedProvider {
    world: SharedWorld,
    process: ProcessId,
    shared_sets: bool,
    remembered: Mutex<BTreeMap<Owner, LoadBalancer>>,
    /// The generation of each shared set that was written last.
    generations: tokio::sync::Mutex<BTreeMap<SharedSet, u64>>,
}

impl SimulatedProvider {
    pub(super) fn new(world: &SharedWorld, process: ProcessId) -> Self {
        let shared_sets = world.lock().provider == ProviderKind::Shared;
        let (remembered, generations) = Default::default();
        Self { world: world.clone(), process, shared_sets, remembered, generations }
    }

    async fn read<T: Send + 'static>(&self, read: impl Fn(&Cloud) -> T + Send + 'static) -> Result<T, Error> {
        let effect = move |world: &SharedWorld| {
            let mut world = world.lock();
            world.cloud.reads += 1;
            read(&world.cloud)
        };
        link::call(&self.world, self.process, Link::Cloud, effect).await.map_err(error)
    }

    /// Changes the load balancer of this owner, if it exists.
    async fn change(
        &self,
        owner: &Owner,
        what: &'static str,
        change: impl Fn(&mut Balancer) + Send + 'static,
    ) -> Result<(), Error> {
        let owner = owner.clone();
        self.write(what, owner.to_string(), move |cloud| {
            if let Some(balancer) =
                cloud.balancers.get_mut(&owner.service).filter(|found| found.owner == owner)
            {
                change(balancer);
            }
        })
        .await
    }

    async fn write(
        &self,
        what: &'static str,
        details: String,
        change: impl Fn(&mut Cloud) + Send + 'static,
    ) -> Result<(), Error> {
        let process = self.process;
        let effect = move |world: &SharedWorld| {
            let world = &mut *world.lock();
            let identity = world.identity(process).to_owned();
            world.record(what, &format!("{identity} {details}"));
            world.cloud.writes += 1;
            let before = LoadBalancers::of(world);
            change(&mut world.cloud);
            invariants::on_write(world, process, "changes the cloud", &before);
        };
        link::call(&self.world, self.process, Link::Cloud, effect).await.map_err(error)
    }

    async fn balancer(&self, service: &Key) -> Result<Option<Balancer>, Error> {
        let service = service.clone();
        self.read(move |cloud| cloud.balancers.get(&service).cloned()).await
    }

    async fn delete_balancer(&self, owner: &Owner) -> Result<(), Error> {
        let owner = owner.clone();
        self.write("load balancer deleted", owner.to_string(), move |cloud| {
            if cloud.balancers.get(&owner.service).is_some_and(|found| found.owner == owner) {
                cloud.balancers.remove(&owner.service);
            }
        })
        .await
    }

    /// Adds targets; then `between`; then removes the others.
    async fn put_targets(
        &self,
        owner: &Owner,
        found: &Balancer,
        set: &TargetSet,
        compare: Compare,
        between: impl Future<Output = Result<(), Error>> + Send,
    ) -> Result<(), Error> {
        if let Some(shared) = set.shared.filter(|_| self.shared_sets) {
            self.write_set(set, compare).await?;
            if found.targets != StoredTargets::Shared(shared) {
                self.change(owner, "targets shared", move |found| {
                    found.targets = StoredTargets::Shared(shared);
                })
                .await?;
            }
            return between.await;
        }
        let wanted: BTreeSet<String> = set.targets.iter().map(|target| target.node.clone()).collect();
        let present = match &found.targets {
            StoredTargets::Own(present) => present.clone(),
            StoredTargets::Shared(_) => BTreeSet::new(),
        };
        if !wanted.is_subset(&present) || matches!(found.targets, StoredTargets::Shared(_)) {
            let all: BTreeSet<String> = wanted.union(&present).cloned().collect();
            self.change(owner, "targets added", move |found| found.targets = StoredTargets::Own(all.clone()))
                .await?;
        }
        between.await?;
        if !present.is_subset(&wanted) {
            self.change(owner, "targets removed", move |found| {
                found.targets = StoredTargets::Own(wanted.clone());
            })
            .await?;
        }
        Ok(())
    }

    /// Writes a shared set, unless a newer one was written.
    async fn write_set(&self, set: &TargetSet, compare: Compare) -> Result<(), Error> {
        let Some(shared) = set.shared else { return Ok(()) };
        // One writer at a time. What an earlier one sent, and no longer waits for, meets another value than it read.
        let mut generations = self.generations.lock().await;
        let is_old = |known: &u64| match compare {
            Compare::Remembered => *known >= set.generation,
            Compare::InPlace => *known > set.generation,
        };
        if generations.get(&shared).is_some_and(is_old) {
            return Ok(());
        }
        let nodes: BTreeSet<String> = set.targets.iter().map(|target| target.node.clone()).collect();
        let read = self.read(move |cloud| cloud.sets.get(&shared).cloned()).await?;
        if read.as_ref() != Some(&nodes) {
            let details = format!("{} {nodes:?}", shared.as_str());
            let change = move |cloud: &mut Cloud| {
                if cloud.sets.get(&shared) == read.as_ref() {
                    cloud.sets.insert(shared, nodes.clone());
                }
            };
            self.write("shared set written", details, change).await?;
        }
        generations.insert(shared, set.generation);
        Ok(())
    }

    fn remember(&self, owner: &Owner, lb: Option<&LoadBalancer>) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        match lb {
            Some(lb) => drop(remembered.insert(owner.clone(), lb.clone())),
            None => drop(remembered.remove(owner)),
        }
    }

    fn outcome(balancer: &Balancer) -> Outcome {
        let wait = balancer.active_at.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            let ingress = Ingress { ip: Some(balancer.address), hostname: None, ip_mode: Some(IpMode::Vip) };
            return Outcome { ingress: vec![ingress], ..Outcome::done() };
        }
        Outcome { progress: Progress::Again(wait.min(Duration::from_secs(10))), ..Outcome::done() }
    }
}

pub(super) fn capabilities(shared_sets: bool) -> Capabilities {
    Capabilities {
        steerings: &[Steering::Api, Steering::HealthCheck],
        protocols: &[Protocol::Tcp],
        addressing: Addressing::NodePort,
        pod_targets: None,
        node_labels: None,
        shared_load_balancers: false,
        address_pools: false,
        ipv6: false,
        one_target_family: false,
        weights: false,
        shared_sets,
        affinity: true,
        fails_open: true,
        health_interval: (Duration::from_secs(1), Duration::from_mins(1)),
    }
}

/// Who may connect where a Service has these ranges.
pub(super) fn sources(ranges: &[IpNet]) -> BTreeSet<IpNet> {
    if ranges.is_empty() {
        return BTreeSet::from([IpNet::V4(Ipv4Net::default())]);
    }
    ranges.iter().copied().collect()
}

fn error(failed: Failed) -> Error {
    match failed {
        Failed::Refused => Error::Throttled { after: None, message: "simulated".to_owned() },
        Failed::Broken => Error::Unavailable("simulated".to_owned()),
    }
}

#[async_trait]
impl Provider for SimulatedProvider {
    fn name(&self) -> &'static str {
        "edge"
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(self.shared_sets)
    }

    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        if lb.annotations.contains_key(UNSUPPORTED) {
            return Err(Error::invalid("Unsupported", "The simulation does not support it."));
        }
        let owner = &lb.owner;
        let remembered = {
            let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
            remembered
                .get(owner)
                .is_some_and(|known| known.has_structure_of(lb) && known.targets() == lb.targets())
        };
        if !(remembered && compare == Compare::Remembered) {
            self.remember(owner, None);
        }
        let mut found = self.balancer(&owner.service).await?;
        if remembered && compare == Compare::Remembered {
            return Ok(found.as_ref().map_or_else(Outcome::done, Self::outcome));
        }
        if let Some(earlier) = found.take_if(|found| found.owner != *owner) {
            self.delete_balancer(&earlier.owner).await?;
        }
        let found = match found {
            Some(found) => found,
            None => self.create(owner).await?,
        };
        let check = lb.groups.first().map(|group| group.health_check.clone());
        let listeners = lb.listeners.clone();
        let sources = sources(&lb.source_ranges);
        let is_same = found.listeners == listeners && found.health_check == check && found.sources == sources;
        let structure = async {
            if is_same {
                return Ok(());
            }
            self.change(owner, "structure changed", move |found| {
                (found.listeners, found.health_check, found.sources) =
                    (listeners.clone(), check.clone(), sources.clone());
            })
            .await
        };
        self.put_targets(owner, &found, &lb.nodes(), compare, structure).await?;
        self.remember(owner, Some(lb));
        Ok(Self::outcome(&found))
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        self.remember(owner, None);
        let Some(found) = self.balancer(&owner.service).await?.filter(|found| found.owner == *owner) else {
            return Ok(Outcome::done());
        };
        let set = targets.nodes.clone().unwrap_or_default();
        self.put_targets(owner, &found, &set, Compare::InPlace, async { Ok(()) }).await?;
        Ok(Self::outcome(&found))
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        let Some(found) = self.balancer(&owner.service).await?.filter(|found| found.owner == *owner) else {
            return Ok(None);
        };
        let requested: Vec<IpNet> = sources(&requested.ranges).into_iter().collect();
        let left = intersection(&found.sources.iter().copied().collect::<Vec<_>>(), &requested);
        if left != found.sources {
            self.remember(owner, None);
            let left = left.clone();
            self.change(owner, "sources removed", move |found| found.sources = left.clone()).await?;
        }
        Ok(Some(AdmittedSources::Only(left.iter().map(ToString::to_string).collect())))
    }

    async fn set_shared(&self, set: &TargetSet) -> Result<(), Error> {
        self.write_set(set, Compare::Remembered).await
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        let service = owner.service.clone();
        let targets = self
            .read(move |cloud| cloud.balancers.get(&service).map(|found| cloud.targets_of(found)))
            .await?
            .unwrap_or_default();
        let health = |target| TargetHealth {
            target,
            family: None,
            state: HealthState::Healthy,
            reason: String::new(),
        };
        let due = (!self.shared_sets).then_some(Duration::from_mins(1));
        Ok(Health { targets: targets.into_iter().map(health).collect(), due, ..Health::default() })
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        self.remember(owner, None);
        if self.balancer(&owner.service).await?.is_some_and(|found| found.owner == *owner) {
            self.delete_balancer(owner).await?;
        }
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        self.read(|cloud| cloud.balancers.values().map(|found| found.owner.clone()).collect()).await
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        futures::stream::pending().boxed()
    }
}

impl SimulatedProvider {
    async fn create(&self, owner: &Owner) -> Result<Balancer, Error> {
        let wait = {
            let mut world = self.world.lock();
            if world.rng.bool() { Duration::ZERO } else { world.millis(1000..120_000) }
        };
        let made = owner.clone();
        self.write("load balancer created", owner.to_string(), move |cloud| {
            if cloud.balancers.contains_key(&made.service) {
                return;
            }
            cloud.made = cloud.made.wrapping_add(1);
            let balancer = Balancer {
                owner: made.clone(),
                listeners: Vec::new(),
                health_check: None,
                targets: StoredTargets::Own(BTreeSet::new()),
                sources: BTreeSet::new(),
                address: Ipv4Addr::new(198, 51, 100, cloud.made).into(),
                active_at: Instant::now() + wait,
            };
            cloud.balancers.insert(made.service.clone(), balancer);
        })
        .await?;
        let created = self.balancer(&owner.service).await?.filter(|found| found.owner == *owner);
        created.ok_or_else(|| Error::Conflict("another load balancer has the name".to_owned()))
    }
}

/// Something changes a load balancer by hand.
pub(super) fn drift(world: &mut World, service: &Key) {
    let node = "by-hand".to_owned();
    if let Some(balancer) = world.cloud.balancers.get_mut(service) {
        match &mut balancer.targets {
            StoredTargets::Own(targets) => drop(targets.insert(node)),
            StoredTargets::Shared(_) => balancer.listeners.clear(),
        }
        world.record("change by hand", &service.to_string());
    }
}
