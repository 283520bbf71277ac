// SPDX-License-Identifier: Apache-2.0
//! The provider: caches the resources of each Service and reconciles them. The controller calls it. It never waits until AWS
//! finishes a change; the controller calls again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use steerage_model::{Ingress, Key, Protocol};
use steerage_provider_api::{
    Addressing, Capabilities, Compare, Error, Health, HealthState, LoadBalancer, Outcome, Owner, Progress,
    Provider, Steering, TargetHealth, TargetSet,
};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::client::{Client, Elbv2};
use crate::config::Config;
use crate::desired::{Desired, desired};
use crate::inventory::Inventory;
use crate::observe::{self, Observation, Resources};
use crate::targets::{self, RefusedTargets, RegisteredIds};
use crate::{names, reasons};

/// Check again after this time whether a new load balancer is active, which takes minutes.
const ACTIVE_POLL: Duration = Duration::from_secs(10);
/// Try again after this time to delete target groups, which a deleted load balancer still uses for seconds.
const RELEASE_POLL: Duration = Duration::from_secs(5);
/// Read health again after this time, because AWS does not notify.
const HEALTH_POLL: Duration = Duration::from_mins(1);
/// The same while no target is healthy.
const HEALTH_POLL_UNDECIDED: Duration = Duration::from_secs(15);
/// All Services together read the health of at most one target group in this time. AWS refills the calls that only read at about
/// ten a second.
const HEALTH_READ_SHARE: Duration = Duration::from_millis(500);

/// The AWS provider.
pub struct Aws {
    pub(crate) config: Config,
    pub(crate) client: Arc<dyn Elbv2>,
    services: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<ServiceState>>>>,
    /// Names of each Service's resources when this process started.
    inventory: OnceCell<BTreeMap<Key, BTreeSet<String>>>,
}

/// The cached state of one Service.
#[derive(Default)]
pub(crate) struct ServiceState {
    initialized: bool,
    /// Names of target groups that may exist.
    names: BTreeSet<String>,
    /// The owner's resources; `None` before everything was read, and after every error.
    resources: Option<(Owner, Resources)>,
    /// Registered targets by ARN of the group.
    pub(crate) registered: HashMap<String, RegisteredIds>,
    pub(crate) refused_targets: RefusedTargets,
    /// Node names by instance, from the last call with targets.
    nodes: BTreeMap<String, String>,
    /// The structure that `resources` has; `None` while a change of it is not complete.
    complete: Option<Complete>,
}

/// A structure that is in place at AWS.
struct Complete {
    structure: Desired,
    /// What is published; `None` until the load balancer is active.
    ingress: Option<Vec<Ingress>>,
    /// When AWS was last asked whether it is active.
    asked: Instant,
}

impl ServiceState {
    /// Whether the owner's load balancer is known to have this structure.
    fn is_complete(&self, owner: &Owner, wanted: &Desired) -> bool {
        self.resources.as_ref().is_some_and(|(known, _)| known == owner)
            && self.complete.as_ref().is_some_and(|complete| complete.structure == *wanted)
    }
}

impl Aws {
    /// A provider with the credentials of the environment, the profile or the instance.
    pub async fn connect(config: Config) -> Self {
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(Duration::from_secs(5))
            .operation_timeout(Duration::from_secs(30))
            .build();
        let mut loader = aws_config::defaults(BehaviorVersion::latest()).timeout_config(timeouts);
        if let Some(region) = &config.region {
            loader = loader.region(Region::new(region.clone()));
        }
        let sdk = loader.load().await;
        Self::new(config, &sdk)
    }

    /// A provider with the credentials, region and HTTP client of `sdk`.
    pub fn new(config: Config, sdk: &SdkConfig) -> Self {
        let client = Client::new(sdk, config.endpoint.as_deref());
        Self::over(config, Arc::new(client))
    }

    /// A provider that makes its calls through `client`.
    pub(crate) fn over(config: Config, client: Arc<dyn Elbv2>) -> Self {
        Self { config, client, services: Mutex::default(), inventory: OnceCell::new() }
    }

    async fn entry(&self, service: &Key) -> Result<tokio::sync::OwnedMutexGuard<ServiceState>, Error> {
        let inventory = self.inventory.get_or_try_init(|| async {
            Inventory::read(&*self.client, &self.config.cluster).await.map(Inventory::by_service)
        });
        let inventory = inventory.await?;
        let entry = {
            let mut services = self.services.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(services.entry(service.clone()).or_default())
        };
        let mut entry = entry.lock_owned().await;
        if !entry.initialized {
            entry.initialized = true;
            entry.names = inventory.get(service).cloned().unwrap_or_default();
            entry.names.remove(&names::load_balancer(&self.config.cluster, service));
        }
        Ok(entry)
    }

    async fn read(&self, owner: &Owner, entry: &ServiceState) -> Result<Observation, Error> {
        observe::read_all(&*self.client, &self.config.cluster, owner, &entry.names).await
    }

    /// The owner's current resources. Deletes resources of the same Service with another UID first, and returns `None` while
    /// their deletion is not complete.
    async fn observe(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Option<Resources>, Error> {
        if let Some((known_owner, known)) = entry.resources.take()
            && known_owner == *owner
            && let Some(resources) = observe::refresh(&*self.client, &known).await?
        {
            return Ok(Some(resources));
        }
        entry.registered.clear();
        let seen = self.read(owner, entry).await?;
        if let Some(message) = seen.foreign.first() {
            return Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message));
        }
        if !self.delete_resources(owner, &seen.stale, entry).await? {
            return Ok(None);
        }
        Ok(Some(seen.mine))
    }

    /// Deletes resources. Returns false while a target group is still in use and so still exists.
    async fn delete_resources(
        &self,
        owner: &Owner,
        resources: &Resources,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        if let Some(balancer) = &resources.balancer {
            tracing::info!(service = %owner.service, name = balancer.name, "deleting load balancer");
            self.client.delete_balancer(&balancer.arn).await?;
        }
        let mut gone = true;
        for (name, group) in &resources.groups {
            tracing::info!(service = %owner.service, name, "deleting target group");
            entry.registered.remove(&group.arn);
            gone &= self.client.delete_group(&group.arn).await?;
        }
        Ok(gone)
    }

    /// Makes the targets of all target groups the wanted ones. Returns the refused nodes, each with the reason.
    async fn converge_targets(
        &self,
        entry: &mut ServiceState,
        set: &TargetSet,
    ) -> Result<Vec<(String, String)>, Error> {
        let (instances, mut refused) = targets::instances(set);
        entry.refused_targets.retain(&instances);
        let groups = entry.resources.iter().flat_map(|(_, resources)| resources.groups.values());
        let arns: Vec<String> = groups.map(|group| group.arn.clone()).collect();
        for arn in arns {
            let mut known = entry.registered.remove(&arn);
            let outcome =
                targets::converge(&*self.client, &arn, &mut known, &instances, &mut entry.refused_targets)
                    .await;
            if let Some(known) = known {
                entry.registered.insert(arn, known);
            }
            if let Err(failure) = outcome {
                // The group may be gone, so the next call reads everything.
                entry.resources = None;
                return Err(failure.into());
            }
        }
        for (id, node) in &instances {
            if let Some(why) = entry.refused_targets.reason(id) {
                refused.push((node.clone(), format!("AWS refuses instance {id}: {why}")));
            }
        }
        refused.sort();
        entry.nodes = instances;
        Ok(refused)
    }

    /// Sets the targets of a load balancer whose structure is in place, and asks whether it is active.
    async fn finish(&self, entry: &mut ServiceState, set: &TargetSet) -> Result<Outcome, Error> {
        let refused = self.converge_targets(entry, set).await?;
        let outcome = Outcome { retry_refused: retry(entry), refused, ..Outcome::done() };
        let (Some(complete), Some((_, resources))) = (&mut entry.complete, &mut entry.resources) else {
            return Ok(Outcome { progress: Progress::Again(RELEASE_POLL), ..outcome });
        };
        let asked = complete.asked.elapsed();
        if complete.ingress.is_none() && asked >= ACTIVE_POLL {
            complete.asked = Instant::now();
            complete.ingress = self.ingress(resources).await?;
        }
        Ok(match &complete.ingress {
            Some(ingress) => Outcome { ingress: ingress.clone(), ..outcome },
            None => Outcome {
                progress: Progress::Again(ACTIVE_POLL.saturating_sub(complete.asked.elapsed())),
                ..outcome
            },
        })
    }

    /// The hostname to publish; `None` until the load balancer is active, because resolvers cache for long that a name does not
    /// exist.
    async fn ingress(&self, resources: &mut Resources) -> Result<Option<Vec<Ingress>>, Error> {
        let Some(known) = &resources.balancer else { return Ok(None) };
        if !known.active {
            let Some(now) = self.client.balancer_at(&known.arn).await? else { return Ok(None) };
            if let Some(why) = &now.failed {
                let message = format!(
                    "AWS could not create the load balancer {}: {why}. It stays unusable. Re-create the Service.",
                    now.name
                );
                return Err(Error::invalid(reasons::LOAD_BALANCER_FAILED, message));
            }
            resources.balancer = Some(now);
        }
        let active = resources.balancer.as_ref().filter(|b| b.active);
        Ok(active.map(|b| vec![Ingress { ip: None, hostname: Some(b.hostname.clone()), ip_mode: None }]))
    }
}

#[async_trait]
impl Provider for Aws {
    fn name(&self) -> &'static str {
        "aws"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            steerings: &[Steering::Api, Steering::HealthCheck],
            protocols: &[Protocol::Tcp, Protocol::Udp],
            addressing: Addressing::NodePort,
            ip_mode: None,
            ipv6: false,
            weights: false,
            shared_sets: false,
            affinity: true,
            health_interval: (Duration::from_secs(5), Duration::from_mins(5)),
        }
    }

    /// The Service without its UID: all UIDs of a Service share the names at AWS.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let wanted = desired(&self.config, lb)?;
        let mut guard = self.entry(&lb.owner.service).await?;
        let entry = &mut *guard;
        if compare == Compare::Remembered && entry.is_complete(&lb.owner, &wanted) {
            return self.finish(entry, &lb.targets).await;
        }
        entry.complete = None;
        let wanted_names: BTreeSet<String> = wanted.groups.iter().map(|g| g.name.clone()).collect();
        entry.names.extend(wanted_names.iter().cloned());
        // After an error the next call reads everything.
        let Some(mut resources) = self.observe(&lb.owner, entry).await? else {
            return Ok(Outcome { progress: Progress::Again(RELEASE_POLL), ..Outcome::done() });
        };
        let (instances, _) = targets::instances(&lb.targets);
        let released = self.apply_steps(&lb.owner, &wanted, &instances, &mut resources, entry).await?;
        let ingress = self.ingress(&mut resources).await?;
        entry.resources = Some((lb.owner.clone(), resources));
        if !released {
            // An old target group is still in use, perhaps by another program's listener, and for long. Targets follow meanwhile.
            let refused = self.converge_targets(entry, &lb.targets).await?;
            let progress = Progress::Again(RELEASE_POLL);
            return Ok(Outcome {
                progress,
                ingress: ingress.unwrap_or_default(),
                refused,
                ..Outcome::done()
            });
        }
        entry.names = wanted_names;
        entry.complete = Some(Complete { structure: wanted, ingress, asked: Instant::now() });
        self.finish(entry, &lb.targets).await
    }

    async fn set_targets(&self, owner: &Owner, set: &TargetSet) -> Result<Outcome, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        if entry.resources.as_ref().is_none_or(|(known, _)| known != owner) {
            entry.registered.clear();
            let seen = self.read(owner, entry).await?;
            entry.resources = Some((owner.clone(), seen.mine));
        }
        let refused = self.converge_targets(entry, set).await?;
        Ok(Outcome { retry_refused: retry(entry), refused, ..Outcome::done() })
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        let groups: Vec<String> = match &entry.resources {
            Some((known, resources)) if known == owner => {
                resources.groups.values().map(|g| g.arn.clone()).collect()
            }
            _ => self.read(owner, entry).await?.mine.groups.into_values().map(|g| g.arn).collect(),
        };
        let read = groups.len();
        let mut worst: BTreeMap<String, TargetHealth> = BTreeMap::new();
        for arn in groups {
            let targets = self.client.targets(&arn).await?;
            entry.registered.insert(arn, RegisteredIds::of(&targets));
            for target in targets {
                let node = entry.nodes.get(&target.id).cloned().unwrap_or(target.id);
                let found = TargetHealth {
                    node: node.clone(),
                    family: None,
                    state: target.state,
                    reason: target.reason,
                };
                match worst.get(&node) {
                    Some(known) if rank(known.state) >= rank(found.state) => {}
                    _ => drop(worst.insert(node, found)),
                }
            }
        }
        let targets: Vec<TargetHealth> = worst.into_values().collect();
        let is_steady = targets.iter().any(|target| target.state == HealthState::Healthy);
        let base = if is_steady { HEALTH_POLL } else { HEALTH_POLL_UNDECIDED };
        let services = self.services.lock().unwrap_or_else(PoisonError::into_inner).len();
        let reads = u32::try_from(services * read).unwrap_or(u32::MAX);
        Ok(Health { targets, due: Some(base.max(HEALTH_READ_SHARE.saturating_mul(reads))) })
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        if entry.resources.as_ref().is_some_and(|(known, _)| known == owner) {
            entry.resources = None;
        }
        let seen = self.read(owner, entry).await?;
        if !self.delete_resources(owner, &seen.mine, entry).await? {
            return Ok(Progress::Again(RELEASE_POLL));
        }
        entry.names.retain(|name| !seen.mine.groups.contains_key(name));
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        Ok(Inventory::read(&*self.client, &self.config.cluster).await?.owners())
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        // AWS sends no notifications; the controller's resync finds changes.
        futures::stream::pending().boxed()
    }
}

/// When to try refused targets again.
fn retry(entry: &ServiceState) -> Option<Duration> {
    (!entry.refused_targets.is_empty()).then_some(targets::RETRY_REFUSED_AFTER)
}

/// Order of health states: a node has the worst state of its ports.
fn rank(state: HealthState) -> u8 {
    match state {
        HealthState::Healthy => 0,
        HealthState::Initial => 1,
        HealthState::Draining => 2,
        HealthState::Unused => 3,
        HealthState::Unhealthy => 4,
    }
}
