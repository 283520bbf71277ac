// SPDX-License-Identifier: Apache-2.0
//! The provider: remembers what each Service has, and applies steps. The controller calls it; it never waits for AWS to get ready.

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
    Addressing, Capabilities, EnsureOutcome, Error, HealthState, LoadBalancer, Owner, Progress, Provider,
    SetTargetsOutcome, Steering, TargetHealth, TargetSet,
};
use tokio::sync::OnceCell;

use crate::client::{Balancer, Client};
use crate::config::Config;
use crate::desired::{Desired, SCHEME_ANNOTATION, desired};
use crate::diff::{SeenFront, SeenGroup, Step, steps};
use crate::inventory::Inventory;
use crate::names;
use crate::observe::{self, Seen, View};
use crate::targets::{self, Known, Refusals};

/// A new network load balancer takes minutes to become active.
const UNTIL_ACTIVE: Duration = Duration::from_secs(10);
/// A deleted load balancer lets go of its target groups after seconds.
const UNTIL_RELEASED: Duration = Duration::from_secs(5);

/// The AWS provider.
pub struct Aws {
    config: Config,
    client: Client,
    entries: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<Entry>>>>,
    /// Names that belonged to each Service when this instance began.
    inventory: OnceCell<BTreeMap<Key, BTreeSet<String>>>,
}

/// What is known of one Service.
#[derive(Default)]
struct Entry {
    begun: bool,
    /// Names under which it may have target groups.
    names: BTreeSet<String>,
    /// What this owner has; `None` until read in full, and after every error.
    view: Option<(Owner, View)>,
    /// The targets of each group, by ARN.
    sets: HashMap<String, Known>,
    refusals: Refusals,
    /// Node names by instance, as last asked for.
    nodes: BTreeMap<String, String>,
}

impl Aws {
    /// A provider with the credentials that the environment, the profile or the instance gives.
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
        Self { config, client, entries: Mutex::default(), inventory: OnceCell::new() }
    }

    async fn entry(&self, service: &Key) -> Result<tokio::sync::OwnedMutexGuard<Entry>, Error> {
        let inventory = self.inventory.get_or_try_init(|| async {
            Inventory::read(&self.client, &self.config.cluster).await.map(Inventory::by_service)
        });
        let inventory = inventory.await?;
        let entry = {
            let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(entries.entry(service.clone()).or_default())
        };
        let mut entry = entry.lock_owned().await;
        if !entry.begun {
            entry.begun = true;
            entry.names = inventory.get(service).cloned().unwrap_or_default();
            entry.names.remove(&names::load_balancer(&self.config.cluster, service));
        }
        Ok(entry)
    }

    async fn read(&self, owner: &Owner, entry: &Entry) -> Result<Seen, Error> {
        observe::full(&self.client, &self.config.cluster, owner, &entry.names).await
    }

    /// What the owner has now: read shortly where it is known, else in full, earlier lives removed. `None` while those are still
    /// being let go.
    async fn view(&self, owner: &Owner, entry: &mut Entry) -> Result<Option<View>, Error> {
        if let Some((known_owner, known)) = entry.view.take()
            && known_owner == *owner
            && let Some(view) = observe::again(&self.client, &known).await?
        {
            return Ok(Some(view));
        }
        entry.sets.clear();
        let seen = self.read(owner, entry).await?;
        if let Some(name) = seen.foreign.first() {
            let message = format!(
                "{name} exists, but is not tagged as this Service's, and nothing is adopted by its name: delete it, or give the cluster another --aws-cluster-name"
            );
            return Err(Error::invalid("NameTaken", message));
        }
        if !self.remove(owner, &seen.stale, entry).await? {
            return Ok(None);
        }
        Ok(Some(seen.mine))
    }

    /// Deletes all of a view; false while something is not yet let go.
    async fn remove(&self, owner: &Owner, view: &View, entry: &mut Entry) -> Result<bool, Error> {
        if let Some(balancer) = &view.balancer {
            tracing::info!(service = %owner.service, name = balancer.name, "deleting the load balancer");
            self.client.delete_balancer(&balancer.arn).await?;
        }
        let mut gone = true;
        for (name, group) in &view.groups {
            tracing::info!(service = %owner.service, name, "deleting a target group");
            entry.sets.remove(&group.arn);
            gone &= self.client.delete_group(&group.arn).await?;
        }
        Ok(gone)
    }

    /// Applies the steps; false while a group to be deleted is not yet let go.
    async fn apply(
        &self,
        owner: &Owner,
        wanted: &Desired,
        view: &mut View,
        entry: &mut Entry,
    ) -> Result<bool, Error> {
        let tags = names::tags(&self.config.cluster, owner);
        let balancer = self.balancer(owner, wanted, view, &tags).await?;
        if let Some(taken) =
            view.foreign_fronts.iter().find(|f| wanted.fronts.iter().any(|w| w.port == f.port))
        {
            let message = format!(
                "somebody else added a listener on port {} to {}: delete it",
                taken.port, balancer.name
            );
            return Err(Error::invalid("ListenerTaken", message));
        }
        let mut released = true;
        for step in steps(wanted, &view.groups, &view.fronts) {
            tracing::info!(service = %owner.service, ?step, "changing the load balancer");
            released &= self.step(step, &balancer, &tags, view, entry).await?;
        }
        Ok(released)
    }

    async fn balancer(
        &self,
        owner: &Owner,
        wanted: &Desired,
        view: &mut View,
        tags: &BTreeMap<String, String>,
    ) -> Result<Balancer, Error> {
        let Some(balancer) = &view.balancer else {
            tracing::info!(service = %owner.service, name = wanted.name, scheme = wanted.scheme.as_str(), "creating a load balancer");
            let Config { subnets, .. } = &self.config;
            let made = self.client.create_balancer(&wanted.name, wanted.scheme, subnets, tags).await?;
            view.balancer = Some(made.clone());
            return Ok(made);
        };
        if balancer.scheme != Some(wanted.scheme) {
            let message = format!(
                "the load balancer's scheme can't be changed to {}: make the Service anew, or set {SCHEME_ANNOTATION} back",
                wanted.scheme.as_str()
            );
            return Err(Error::invalid("SchemeFixed", message));
        }
        Ok(balancer.clone())
    }

    async fn step(
        &self,
        step: Step,
        balancer: &Balancer,
        tags: &BTreeMap<String, String>,
        view: &mut View,
        entry: &mut Entry,
    ) -> Result<bool, Error> {
        let arn_of = |view: &View, group: &str| {
            let group = view.groups.get(group).map(|g| g.arn.clone());
            group.ok_or_else(|| Error::Conflict("a target group vanished".to_owned()))
        };
        match step {
            Step::CreateGroup(group) => {
                let made = self.client.create_group(&group, &self.config.vpc, tags).await?;
                let health = group.health;
                view.groups.insert(group.name, SeenGroup { health, strict: true, ..made });
            }
            Step::ModifyHealth { arn, health } => {
                self.client.modify_health(&arn, &health).await?;
                if let Some(group) = view.groups.values_mut().find(|g| g.arn == arn) {
                    (group.health, group.strict) = (health, true);
                }
            }
            Step::SetAttributes { group, attributes } => {
                self.client.set_attributes(&arn_of(view, &group)?, &attributes).await?;
                if let Some(group) = view.groups.get_mut(&group) {
                    group.attributes.extend(attributes.into_iter().map(|(k, v)| (k.to_owned(), v)));
                }
            }
            Step::CreateFront { port, protocol, group } => {
                let group = arn_of(view, &group)?;
                let made = self.client.create_listener(&balancer.arn, port, protocol, &group, tags).await?;
                let group_arn = Some(group);
                view.fronts.push(SeenFront { port, protocol: protocol.to_owned(), group_arn, ..made });
            }
            Step::SwitchFront { arn, protocol, group, from_arn } => {
                let group = arn_of(view, &group)?;
                if let Some(from) = from_arn.filter(|from| *from != group) {
                    entry.sets.remove(&group);
                    targets::copy(&self.client, &from, &group, &mut entry.refusals).await?;
                }
                self.client.modify_listener(&arn, protocol, &group).await?;
                if let Some(front) = view.fronts.iter_mut().find(|f| f.arn == arn) {
                    front.protocol = protocol.map_or_else(|| front.protocol.clone(), str::to_owned);
                    front.group_arn = Some(group);
                }
            }
            Step::DeleteFront { arn } => {
                self.client.delete_listener(&arn).await?;
                view.fronts.retain(|f| f.arn != arn);
            }
            Step::DeleteGroup { name, arn } => {
                entry.sets.remove(&arn);
                if !self.client.delete_group(&arn).await? {
                    return Ok(false);
                }
                view.groups.remove(&name);
            }
        }
        Ok(true)
    }

    /// What to publish, once it may be: resolvers remember for long that a name does not exist yet.
    async fn ingress(&self, view: &mut View) -> Result<Option<Vec<Ingress>>, Error> {
        let Some(known) = &view.balancer else { return Ok(None) };
        if !known.active {
            let Some(now) = self.client.balancer_at(&known.arn).await? else { return Ok(None) };
            if let Some(why) = &now.failed {
                let message = format!("AWS could not make {}: {why}; make the Service anew", now.name);
                return Err(Error::invalid("LoadBalancerFailed", message));
            }
            view.balancer = Some(now);
        }
        let active = view.balancer.as_ref().filter(|b| b.active);
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
            affinity: true,
            health_interval: (Duration::from_secs(5), Duration::from_mins(5)),
        }
    }

    /// The Service's name: its earlier lives have the same names at AWS.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    async fn ensure(&self, lb: &LoadBalancer) -> Result<EnsureOutcome, Error> {
        let wanted = desired(&self.config, lb)?;
        let mut entry = self.entry(&lb.owner.service).await?;
        let wanted_names: BTreeSet<String> = wanted.groups.iter().map(|g| g.name.clone()).collect();
        entry.names.extend(wanted_names.iter().cloned());
        // Every way out but the last leaves no view behind, so that the next call reads in full.
        let waiting = |after| Ok(EnsureOutcome { progress: Progress::Again(after), ingress: Vec::new() });
        let Some(mut view) = self.view(&lb.owner, &mut entry).await? else { return waiting(UNTIL_RELEASED) };
        if !self.apply(&lb.owner, &wanted, &mut view, &mut entry).await? {
            return waiting(UNTIL_RELEASED);
        }
        entry.names = wanted_names;
        let ingress = self.ingress(&mut view).await?;
        entry.view = Some((lb.owner.clone(), view));
        match ingress {
            Some(ingress) => Ok(EnsureOutcome { progress: Progress::Done, ingress }),
            None => waiting(UNTIL_ACTIVE),
        }
    }

    async fn set_targets(&self, lb: &LoadBalancer, set: &TargetSet) -> Result<SetTargetsOutcome, Error> {
        let wanted = desired(&self.config, lb)?;
        let mut guard = self.entry(&lb.owner.service).await?;
        let entry = &mut *guard;
        let (instances, mut refused) = targets::instances(set);
        entry.refusals.retain(&instances);
        if entry.view.as_ref().is_none_or(|(owner, _)| *owner != lb.owner) {
            entry.names.extend(wanted.groups.iter().map(|g| g.name.clone()));
            entry.sets.clear();
            let seen = observe::full(&self.client, &self.config.cluster, &lb.owner, &entry.names).await?;
            entry.view = Some((lb.owner.clone(), seen.mine));
        }
        let groups = entry.view.as_ref().map(|(_, view)| view.groups.clone()).unwrap_or_default();
        let mut progress = Progress::Done;
        for group in &wanted.groups {
            let Some(seen) = groups.get(&group.name) else {
                // Made by `ensure`, which has not got that far.
                progress = Progress::Again(UNTIL_RELEASED);
                continue;
            };
            let mut known = entry.sets.remove(&seen.arn);
            let outcome =
                targets::converge(&self.client, &seen.arn, &mut known, &instances, &mut entry.refusals).await;
            if let Some(known) = known {
                entry.sets.insert(seen.arn.clone(), known);
            }
            if let Err(failure) = outcome {
                // It may be that the group is gone: let the next call look.
                entry.view = None;
                return Err(failure.into());
            }
        }
        for (id, node) in &instances {
            if let Some(why) = entry.refusals.reason(id) {
                refused.push((node.clone(), format!("AWS refuses {id}: {why}")));
            }
        }
        refused.sort();
        entry.nodes = instances;
        Ok(SetTargetsOutcome { progress, refused })
    }

    async fn target_health(&self, owner: &Owner) -> Result<Vec<TargetHealth>, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        let groups: Vec<String> = match &entry.view {
            Some((known, view)) if known == owner => view.groups.values().map(|g| g.arn.clone()).collect(),
            _ => self.read(owner, entry).await?.mine.groups.into_values().map(|g| g.arn).collect(),
        };
        let mut worst: BTreeMap<String, TargetHealth> = BTreeMap::new();
        for arn in groups {
            let targets = self.client.targets(&arn).await?;
            entry.sets.insert(arn, Known::of(&targets));
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
        Ok(worst.into_values().collect())
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        if entry.view.as_ref().is_some_and(|(known, _)| known == owner) {
            entry.view = None;
        }
        let seen = self.read(owner, entry).await?;
        if !self.remove(owner, &seen.mine, entry).await? {
            return Ok(Progress::Again(UNTIL_RELEASED));
        }
        entry.names.retain(|name| !seen.mine.groups.contains_key(name));
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        Ok(Inventory::read(&self.client, &self.config.cluster).await?.owners())
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        // AWS tells nobody; the controller's own schedule looks.
        futures::stream::pending().boxed()
    }
}

/// A node is as well as the worst of its ports.
fn rank(state: HealthState) -> u8 {
    match state {
        HealthState::Healthy => 0,
        HealthState::Initial => 1,
        HealthState::Draining => 2,
        HealthState::Unused => 3,
        HealthState::Unhealthy => 4,
    }
}
