// SPDX-License-Identifier: Apache-2.0
//! The provider: remembers the resources of each Service and reconciles them. The controller calls it. It never waits for an operation;
//! the controller calls again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::future::join_all;
use futures::stream::{self, BoxStream};
use serde_json::Value;
use steerage_model::{Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, RequestedSources, Steering, TargetSet,
};
use steerage_provider_cloud::{AddressOwners, AfterFailure, ApiMetrics, Joined, Keyed, Recent};
use tokio::time::{Instant, timeout};

use crate::annotations;
use crate::apply::{kept, refusals};
use crate::client::{Call, Calls, Client, items, list};
use crate::config::{Config, ConfigError};
use crate::diff::{Diff, attached, detached};
use crate::error::CallError;
use crate::instances::{Instance, Instances, Limit, unknown_zones};
use crate::leaving::last_endpoints;
use crate::leftovers::Leftovers;
use crate::marks;
use crate::object::{Id, Kind, last, relative};
use crate::observe::{Inventory, JoinedKinds};
use crate::operations::Operations;
use crate::paced::Paced;
use crate::restrict::Restricted;
use crate::rule_quota::RuleQuota;
use crate::shared::Shared;
use crate::state::{Pending, ServiceState};
use crate::step::Step;
use crate::unended::check_unended;
use crate::unknown::Unknown;

/// VMs are read again after this time, because a VM can change under its name.
const INSTANCES_AGE: Duration = Duration::from_mins(10);
/// The shortest time between two reads of a zone that does not have a node's VM.
const INSTANCES_PAUSE: Duration = Duration::from_secs(10);
/// The longest wait for the read of another Service.
const INSTANCES_PATIENCE: Duration = Duration::from_secs(5);
/// How long a list of everything serves the first looks at Services.
pub(crate) const INVENTORY_AGE: Duration = Duration::from_secs(30);

/// The provider for GCE.
pub struct Gce {
    pub(crate) config: Config,
    pub(crate) calls: Arc<dyn Calls>,
    services: Keyed<Key, ServiceState>,
    pub(crate) address_owners: AddressOwners,
    /// Whether firewall rules could not be read last: those of a Shared VPC may be out of reach.
    pub(crate) lacks_firewalls: AtomicBool,
    pub(crate) shared: Shared,
    pub(crate) unknown: Unknown,
    rule_quota: Mutex<RuleQuota>,
    zones: Recent<Vec<String>, Error>,
    /// The VMs by zone, and when each zone was read.
    instances: Mutex<(Instances, BTreeMap<String, Instant>)>,
    /// Held by who reads them: one read serves all Services that need it.
    reading_instances: tokio::sync::Mutex<()>,
    pub(crate) inventory: Recent<Inventory, Error>,
    /// Whether this process changed nothing yet, and did not list the owners.
    pub(crate) is_new: AtomicBool,
    pub(crate) operations: Operations,
    /// Reads of what Services have.
    pub(crate) joined: Joined<(Id, Value), CallError>,
    pub(crate) joined_kinds: JoinedKinds,
    /// Lists that show what deletions left.
    pub(crate) leftovers: Leftovers,
    /// When the last deletions were complete: the list for first looks may be older.
    ended: Mutex<BTreeMap<Key, Instant>>,
}

impl Gce {
    /// A provider that keeps to the rate which Google takes.
    ///
    /// # Errors
    ///
    /// If there are no usable credentials.
    pub fn connect(config: Config, metrics: ApiMetrics) -> Result<Self, ConfigError> {
        let client = Client::new(&config.endpoint, metrics.clone())?;
        Ok(Self::over(config, Arc::new(Paced::new(Arc::new(client), metrics))))
    }

    /// A provider that limits no rate, for tests.
    ///
    /// # Errors
    ///
    /// If there are no usable credentials.
    pub fn unlimited(config: Config, metrics: ApiMetrics) -> Result<Self, ConfigError> {
        let client = Client::new(&config.endpoint, metrics)?;
        Ok(Self::over(config, Arc::new(client)))
    }

    pub(crate) fn over(config: Config, calls: Arc<dyn Calls>) -> Self {
        Self {
            operations: Operations::new(config.poll),
            config,
            calls,
            services: Keyed::default(),
            address_owners: AddressOwners::default(),
            lacks_firewalls: AtomicBool::new(false),
            shared: Shared::default(),
            unknown: Unknown::default(),
            rule_quota: Mutex::default(),
            zones: Recent::new(Duration::from_hours(24)),
            instances: Mutex::default(),
            reading_instances: tokio::sync::Mutex::default(),
            inventory: Recent::new(INVENTORY_AGE),
            is_new: AtomicBool::new(true),
            joined: Joined::default(),
            joined_kinds: JoinedKinds::default(),
            leftovers: Leftovers::default(),
            ended: Mutex::default(),
        }
    }

    /// Reads the region and the cluster's backend services. [`Error::Denied`] if the credentials are not accepted or lack the rights:
    /// then nothing would work.
    pub async fn check(&self) -> Result<(), Error> {
        self.zones().await?;
        self.list_kind(Kind::BackendService, None).await?;
        Ok(())
    }

    /// The zones with groups.
    pub(crate) async fn zones(&self) -> Result<Arc<Vec<String>>, Error> {
        if !self.config.zones.is_empty() {
            return Ok(Arc::new(self.config.zones.clone()));
        }
        let path = format!("projects/{}/regions/{}", self.config.project, self.config.region);
        let read = async {
            let region = self.calls.send(Call::get("regions.get", path)).await?;
            let zones = region.get("zones").and_then(Value::as_array).into_iter().flatten();
            let mut zones: Vec<String> =
                zones.filter_map(Value::as_str).map(|url| last(url).to_owned()).collect();
            zones.sort();
            Ok(Arc::new(zones))
        };
        self.zones.get(AfterFailure::Retry, read).await
    }

    fn known_instances(&self) -> MutexGuard<'_, (Instances, BTreeMap<String, Instant>)> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VMs of a zone may be others by now.
    pub(crate) fn forget_instances(&self, zone: Option<&str>) {
        self.known_instances().1.retain(|known, _| Some(known.as_str()) != zone);
    }

    /// The VMs, as far as the nodes need them. Reads the zones of unknown ones, and if `refresh`, those that were read long ago.
    pub(crate) async fn instances(&self, nodes: &TargetSet, refresh: bool) -> Result<Instances, Error> {
        if self.zones_to_read(nodes, refresh).is_empty() {
            return Ok(self.known_instances().0.clone());
        }
        // Who waits for long for another one reads alone.
        let _turn = timeout(INSTANCES_PATIENCE, self.reading_instances.lock()).await;
        let zones = self.zones_to_read(nodes, refresh);
        let read = zones.iter().map(|zone| async move {
            let path = format!("projects/{}/zones/{zone}/instances", self.config.project);
            let mut call = Call::get("instances.list", path);
            let fields =
                "items(name,networkInterfaces(network,networkIP,subnetwork),tags/items),nextPageToken";
            call.query.push(("fields", fields.to_owned()));
            let found = list(&*self.calls, call, items).await?;
            let named = found.iter().filter_map(|vm| Instance::read(vm, &self.config)).collect();
            Ok::<(String, BTreeMap<String, Instance>), Error>((zone.clone(), named))
        });
        let (mut found, mut failed) = (Vec::new(), BTreeMap::new());
        for (zone, answer) in zones.iter().zip(join_all(read).await) {
            match answer {
                Ok(vms) => found.push(vms),
                Err(error @ Error::Throttled { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(zone, %error, "VMs of a zone not read; retrying");
                    failed.insert(zone, error);
                }
            }
        }
        let mut known = self.known_instances();
        for (zone, vms) in found {
            known.1.insert(zone.clone(), Instant::now());
            known.0.insert(zone, vms);
        }
        // Nothing changes in a zone that cannot be read.
        let mut readable = known.0.clone();
        readable.retain(|zone, _| !failed.contains_key(zone));
        match failed.into_values().next() {
            Some(error) if readable.is_empty() => Err(error),
            _ => Ok(readable),
        }
    }

    /// The zones of VMs that are not known, and if `refresh`, those that were read long ago.
    fn zones_to_read(&self, nodes: &TargetSet, refresh: bool) -> Vec<String> {
        let known = self.known_instances();
        let (instances, read_at) = &*known;
        let since = |zone: &String| read_at.get(zone).map(Instant::elapsed);
        let mut zones = unknown_zones(nodes, instances, &self.config);
        zones.retain(|zone| since(zone).is_none_or(|age| age >= INSTANCES_PAUSE));
        let old = |zone: &&String| since(zone).is_none_or(|age| age >= INSTANCES_AGE);
        // Or that are known to be others by now.
        let is_due = |zone: &&String| refresh || !read_at.contains_key(*zone);
        zones.extend(instances.keys().filter(is_due).filter(old).cloned());
        zones.into_iter().collect()
    }

    fn note_ended(&self, service: &Key) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.retain(|_, at| at.elapsed() < INVENTORY_AGE);
        ended.insert(service.clone(), Instant::now());
    }

    /// Whether the list for first looks may show what was deleted of the Service since.
    pub(crate) fn has_just_ended(&self, service: &Key) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.get(service).is_some_and(|at| at.elapsed() < INVENTORY_AGE)
    }

    /// Held for no call.
    pub(crate) fn rule_quota(&self) -> MutexGuard<'_, RuleQuota> {
        self.rule_quota.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn entry(&self, service: &Key) -> tokio::sync::OwnedMutexGuard<ServiceState> {
        self.services.lock(service, ServiceState::default).await
    }

    async fn follow(
        &self,
        owner: &Owner,
        targets: &GroupTargets,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        if !self.settle(entry).await? {
            return Ok(self.again(entry));
        }
        entry.denied.expire();
        // What `apply` completed is not in place any more.
        entry.complete = None;
        if entry.is_old() {
            // While the structure is refused, nothing else looks at it.
            entry.forget();
        }
        let Some(nodes) = &targets.nodes else { return Ok(Outcome::done()) };
        entry.is_seen = true;
        self.read_all(owner, entry).await?;
        // After a change that GCE refused, `apply` did not know what is in place.
        self.release_claims(owner, entry);
        let Some(tree) = entry.known(owner).cloned() else { return Ok(Outcome::done()) };
        let Some((_, service)) = tree.of_kind(Kind::BackendService).next() else {
            return Ok(Outcome::done());
        };
        // No packet comes, and `apply` puts the endpoints in place before one does. It may want others: then each try of a Service that is
        // refused would attach them, and this one detach them.
        if tree.of_kind(Kind::ForwardingRule).next().is_none() {
            let is_rule = |pending: &Pending| pending.step.id().kind == Kind::ForwardingRule;
            return Ok(if entry.pending.iter().any(is_rule) { self.again(entry) } else { Outcome::done() });
        }
        let is_internal = service.get("loadBalancingScheme").and_then(Value::as_str) == Some("INTERNAL");
        let limit = Limit { is_internal, needs_all: false, uid: &owner.uid };
        let placed = self.placed(nodes, limit, false).await?;
        entry.refused.retain(|name| placed.nodes.contains_key(name));
        entry.nodes.clone_from(&placed.nodes);
        // Only the groups in place.
        let groups = tree.of_kind(Kind::Group).filter_map(|(id, group)| {
            let subnet = relative(group.get("subnetwork")?.as_str()?).to_owned();
            let place = (id.zone.clone()?, subnet);
            let mut endpoints = placed.endpoints.get(&place).cloned().unwrap_or_default();
            endpoints.retain(|endpoint| !entry.refused.must_wait(&endpoint.instance));
            Some((id.clone(), endpoints))
        });
        let mut wanted: BTreeMap<Id, BTreeSet<_>> = groups.collect();
        for (id, endpoint) in placed.kept_of(&tree) {
            wanted.entry(id.clone()).or_default().insert(endpoint.clone());
        }
        for (id, endpoint) in last_endpoints(wanted.iter(), &tree, &placed, entry, &self.config) {
            wanted.entry(id.clone()).or_default().insert(endpoint.clone());
        }
        let mut steps: Vec<Step> = attached(wanted.iter(), &tree);
        if steps.is_empty() {
            steps = detached(wanted.iter(), &tree);
        }
        if steps.is_empty() {
            return Ok(Outcome { ingress: kept(&tree, entry), ..refusals(&placed, entry) });
        }
        if self.others_stay(owner, &steps, entry).await? {
            self.send_all(owner, &steps, entry).await?;
        }
        Ok(self.again(entry))
    }
}

/// What was known may be wrong after a failure, unless Google only had too many requests.
fn noted<T>(result: Result<T, Error>, entry: &mut ServiceState) -> Result<T, Error> {
    if let Err(error) = &result
        && !matches!(error, Error::Throttled { .. })
    {
        entry.forget();
    }
    result
}

#[async_trait]
impl Provider for Gce {
    fn name(&self) -> &'static str {
        "gce"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            steerings: &[Steering::Api, Steering::HealthCheck],
            protocols: &[Protocol::Tcp, Protocol::Udp],
            addressing: Addressing::Vip,
            pod_targets: None,
            node_labels: None,
            shared_load_balancers: false,
            address_pools: false,
            ipv6: true,
            one_target_family: false,
            // Weights come from health checks, not from the controller.
            weights: false,
            shared_sets: false,
            affinity: true,
            fails_open: true,
            health_interval: (Duration::from_secs(1), Duration::from_mins(5)),
        }
    }

    /// The Service without its UID: a Service that is created again replaces what the old one left.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    fn source_annotations(&self) -> &'static [&'static str] {
        &[annotations::SOURCE_RANGES]
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let mut entry = self.entry(&lb.owner.service).await;
        let result = self.apply_wanted(lb, &mut entry, compare).await;
        let result = self.told_of_lost_rule(lb, result, &entry);
        if matches!(result, Err(Error::Invalid { .. })) {
            self.rule_quota().note_invalid(&lb.owner.service);
        }
        if matches!(result, Err(Error::Invalid { .. } | Error::Denied(_))) {
            self.release_claims(&lb.owner, &entry);
        }
        noted(result, &mut entry)
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        let mut entry = self.entry(&owner.service).await;
        let result = self.follow(owner, targets, &mut entry).await;
        noted(result, &mut entry)
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        let mut entry = self.entry(&owner.service).await;
        let result = self.restrict(owner, requested, &mut entry).await;
        match noted(result, &mut entry)? {
            Restricted::To(admitted) => Ok(admitted),
            Restricted::Again => Err(Error::Busy("The firewall rule is being changed".to_owned())),
        }
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        let mut entry = self.entry(&owner.service).await;
        self.read_health(owner, &mut entry).await
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut entry = self.entry(&owner.service).await;
        let result = self.delete_all(owner, &mut entry).await;
        let result = result.and_then(|progress| check_unended(progress, &entry, &self.config));
        let result = noted(result, &mut entry);
        if matches!(result, Ok(Progress::Done)) {
            self.address_owners.forget(owner);
        }
        if matches!(result, Ok(Progress::Done)) && entry.tree.is_none() && entry.pending.is_empty() {
            self.note_ended(&owner.service);
            self.services.remove(&owner.service);
        }
        result
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        // The first looks at Services use this list, so no operation may still make what it lacks.
        let is_new = self.is_new.load(Ordering::Relaxed) && self.settle_unknown().await?;
        let all = if is_new {
            self.inventory().await?
        } else {
            let began = Instant::now();
            Arc::new(Inventory { began, has_shared: true, found: self.list_all(None).await? })
        };
        self.is_new.store(false, Ordering::Relaxed);
        let owners: BTreeSet<Owner> =
            all.found.iter().filter_map(|(_, found)| marks::owner(&self.config.cluster, found)).collect();
        Ok(owners.into_iter().collect())
    }

    async fn preview(&self, lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        let (wanted, placed) = self.wanted(lb, false).await?;
        let mut entry = ServiceState::default();
        entry.is_seen = true;
        self.read_all(&lb.owner, &mut entry).await?;
        let mut lines = Vec::new();
        for (_, tree) in &entry.earlier {
            lines.extend(tree.own.keys().map(|id| format!("{id} of an earlier Service: deleted")));
        }
        self.look_for(&wanted, &lb.owner, &mut entry).await?;
        let Some(tree) = entry.known(&lb.owner) else { return Ok(None) };
        let wanted = placed.with_kept(wanted, tree);
        let diff = Diff { config: &self.config, tree, denied: &entry.denied, published: &lb.published };
        let steps = diff.towards(&wanted)?;
        if tree.own.is_empty() {
            return Ok(None);
        }
        lines.extend(steps.iter().map(ToString::to_string));
        Ok(Some(lines))
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        stream::pending().boxed()
    }
}
