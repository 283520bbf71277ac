// SPDX-License-Identifier: Apache-2.0
//! The [`Provider`]: each method compares the wanted state with the caches, and writes the difference.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use kube::Client;
use kube::api::ObjectMeta;
use prometheus_client::registry::Registry;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use steerage_edge_api::{EdgeLoadBalancerSpec, EdgeTarget};
use steerage_model::{Family, Ingress, IpMode, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, ProviderNotice, RequestedSources, SharedSet, Steering, TargetSet,
};
use steerage_watch::Watches;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::allocation::AssignedAddresses;
use crate::cache::follow;
use crate::entry::{Change, Entry};
use crate::index::References;
use crate::namespaces::NamespaceKind;
use crate::objects::{LoadBalancerContent, NodeSetContent, Objects};
use crate::shared::Shared;
use crate::sharing::Sharing;
use crate::{pool_metrics, preview, sources, spec};

/// An object of the required name exists and is not managed by Steerage.
pub const OBJECT_NOT_OWNED: &str = "ObjectNotOwned";

/// What the edge supports.
pub fn capabilities() -> Capabilities {
    Capabilities {
        steerings: &[Steering::Api, Steering::HealthCheck, Steering::Fused],
        protocols: &[Protocol::Tcp, Protocol::Udp],
        addressing: Addressing::Vip,
        pod_targets: None,
        node_labels: None,
        shared_load_balancers: false,
        address_pools: true,
        ipv6: true,
        one_target_family: false,
        weights: true,
        shared_sets: true,
        affinity: true,
        fails_open: true,
        health_interval: (Duration::from_millis(100), Duration::from_hours(1)),
    }
}

/// Retry interval while a finalizer of another program holds a deleted object.
const DELETION_RETRY: Duration = Duration::from_secs(2);

/// The provider for Steerage's own edge. Its watches run until it is dropped.
#[derive(Debug)]
pub struct EdgeProvider {
    shared: Arc<Shared>,
    _stop: DropGuard,
}

impl EdgeProvider {
    /// A provider that keeps its objects in `namespace`. Starts its watches, so it must be called on a runtime. `watches` must have
    /// no other watch of the edge's kinds.
    pub fn new(client: &Client, watches: &Watches, namespace: &str) -> Self {
        let shared = Arc::new(Shared::new(client, namespace));
        let stop = CancellationToken::new();
        spawn_watches(&shared, watches, &stop);
        Self { shared, _stop: stop.drop_guard() }
    }

    /// Registers the metrics of the address pools. They end with the provider.
    pub fn register_metrics(&self, registry: &mut Registry) {
        pool_metrics::register(&self.shared, registry);
    }

    /// Returns when all kinds have been listed, so that the first call need not wait.
    pub async fn listed(&self) {
        self.shared.listed().await;
    }

    /// The object of this owner, if there is one. Fails if an object of another owner has its name.
    async fn owned_entry(&self, owner: &Owner) -> Result<Option<Entry<LoadBalancerContent>>, Error> {
        let name = spec::object_name(owner);
        let balancers = &self.shared.balancers;
        let is_foreign = |entry: &Entry<LoadBalancerContent>| entry.owner.as_ref() != Some(owner);
        let mut entry = self.shared.balancer(&name).await?;
        if entry.as_ref().is_some_and(is_foreign) {
            // The user may have deleted it.
            entry = balancers.reread(&name).await?;
        }
        match entry {
            Some(entry) if is_foreign(&entry) => {
                let message = format!(
                    "The labels of EdgeLoadBalancer {name} do not name this Service. It is not changed. Restore {}={}, {}={}, \
                     {}={} and {}={}, or delete it.",
                    spec::MANAGED_BY,
                    spec::MANAGER,
                    spec::SERVICE_NAMESPACE,
                    owner.service.namespace(),
                    spec::SERVICE_NAME,
                    owner.service.name(),
                    spec::SERVICE_UID,
                    owner.uid,
                );
                Err(Error::invalid(OBJECT_NOT_OWNED, message))
            }
            entry => Ok(entry),
        }
    }

    /// Patches an existing object to `wanted` with at most one write. Returns whether it wrote.
    async fn change(
        &self,
        owner: &Owner,
        entry: &Entry<LoadBalancerContent>,
        wanted: &EdgeLoadBalancerSpec,
    ) -> Result<bool, Error> {
        let current = match &entry.content {
            Ok(content) if content.spec == *wanted => return Ok(false),
            Ok(content) => to_value(&content.spec)?,
            // Unreadable for this version: write all known fields, and keep unknown ones.
            Err(_) => Value::Object(serde_json::Map::new()),
        };
        let Some(patch) = spec::merge_patch(&current, &to_value(wanted)?) else { return Ok(false) };
        let name = spec::object_name(owner);
        let own = self.shared.begin_write(&name, wanted);
        own.end(self.shared.balancers.patch(&name, entry, json!({"spec": patch})).await)?;
        Ok(true)
    }

    /// Ends the reservation of an owner whose object is as wanted, unless an earlier write without an answer may have changed it since
    /// `entry` was read. Every write names the version that it changes, so that one with an answer settles all earlier ones.
    async fn settle(
        &self,
        owner: &Owner,
        entry: Option<&Entry<LoadBalancerContent>>,
        has_written: bool,
    ) -> Result<Progress, Error> {
        let name = spec::object_name(owner);
        if !has_written && self.shared.is_reserved(&name) {
            if let Some(left) = self.shared.unsettled(&name) {
                return Ok(Progress::Again(left));
            }
            if self.shared.balancers.reread(&name).await?.as_ref() != entry {
                return Ok(Progress::Again(Duration::ZERO));
            }
        }
        self.shared.end_reservation(owner);
        Ok(Progress::Done)
    }

    /// Writes a shared node set if it differs. Fails if an object of that name is not Steerage's.
    async fn write_shared(&self, which: SharedSet, set: &TargetSet) -> Result<(), Error> {
        let _one_at_a_time = self.shared.node_set_lock.lock().await;
        let sets = &self.shared.node_sets;
        let name = which.as_str();
        let wanted = self.shared.offer_set(which, set);
        self.shared.want_set(name, Some(Arc::clone(&wanted)));
        let is_same = |entry: &Entry<NodeSetContent>| {
            entry.managed && entry.content.as_ref().is_ok_and(|content| content.spec == *wanted)
        };
        // Thousands of load balancers ask for the same value of the same object: it is compared once.
        let look = |entry: &Entry<NodeSetContent>| {
            let is_known = self.shared.is_known_set(name, &entry.version, &wanted);
            (entry.version.clone(), entry.managed && (is_known || is_same(entry)))
        };
        let found = sets.cache.read(|rows| rows.filter(|entry| entry.name == name).map(look).last());
        if let Some((version, true)) = found {
            self.shared.set_known(name, version, wanted);
            return Ok(());
        }
        let known = match sets.cache.get(name) {
            Some(entry) if !entry.managed => {
                let new = sets.reread(name).await?;
                if new.as_ref() != Some(&entry) {
                    // The watch will not report what the response revealed.
                    self.shared.on_node_set(&Change { old: Some(entry), new: new.clone() });
                }
                new
            }
            known => known,
        };
        match known {
            None => {
                let labels = [(spec::MANAGED_BY.to_owned(), spec::MANAGER.to_owned())].into();
                let metadata =
                    ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..Default::default() };
                match sets.create(metadata, &*wanted).await {
                    Err(failure) if failure.code() == Some(409) => {
                        sets.reread(name).await?;
                        Err(failure.into())
                    }
                    other => Ok(other?),
                }
            }
            Some(entry) if !entry.managed => {
                let message = format!(
                    "EdgeNodeSet {name} exists but lacks the label {}={}. It is not changed. Restore the label, or delete \
                     it.",
                    spec::MANAGED_BY,
                    spec::MANAGER,
                );
                Err(Error::invalid(OBJECT_NOT_OWNED, message))
            }
            Some(entry) if is_same(&entry) => Ok(()),
            Some(entry) => {
                let patch = json!({"spec": to_value(&*wanted)?});
                Ok(sets.patch(name, &entry, patch).await?)
            }
        }
    }

    /// Deletes a shared set of Steerage that no load balancer uses.
    async fn drop_unused(&self, which: &str) -> Result<(), Error> {
        let _one_at_a_time = self.shared.node_set_lock.lock().await;
        let entry: Option<Entry<NodeSetContent>> = self.shared.node_sets.cache.get(which);
        match entry {
            Some(entry) if entry.managed && !self.shared.is_used(which) => {
                self.shared.want_set(which, None);
                Ok(self.shared.node_sets.delete(which, &entry).await.map(|_| ())?)
            }
            _ => Ok(()),
        }
    }

    /// The targets as the object has them, and the refused ones. A shared set is written first, and stays at least as long as the last
    /// value.
    async fn targets(
        &self,
        owner: &Owner,
        families: &[Family],
        set: &TargetSet,
    ) -> Result<(ObjectTargets, Vec<(String, String)>), Error> {
        let endpoint_nodes = spec::endpoint_nodes(set);
        let Some(which) = set.shared else {
            let own = spec::targets(families, set);
            let draining = spec::draining(families, set);
            let targets = ObjectTargets { node_set: None, own, draining, endpoint_nodes };
            return Ok((targets, spec::refused(families, set)));
        };
        self.shared.about_to_use(spec::object_name(owner), which.as_str());
        self.write_shared(which, set).await?;
        let node_set = Some(which.as_str().to_owned());
        let targets = ObjectTargets { node_set, own: Vec::new(), draining: Vec::new(), endpoint_nodes };
        Ok((targets, self.shared.refused(which, families, set)))
    }

    /// Deletes the shared set that a load balancer used until now, if no other does.
    async fn drop_left(&self, left: Option<String>, now: &EdgeLoadBalancerSpec) -> Result<(), Error> {
        match left.filter(|left| now.node_set.as_ref() != Some(left)) {
            Some(left) => self.drop_unused(&left).await,
            None => Ok(()),
        }
    }

    /// The owners of objects of earlier Services with the same name.
    fn predecessors(&self, owner: &Owner) -> Vec<Owner> {
        let mut owners = self.shared.balancers.cache.index(|index| index.owners_of(&owner.service).to_vec());
        owners.retain(|other| other.uid != owner.uid);
        owners
    }
}

#[async_trait]
impl Provider for EdgeProvider {
    fn name(&self) -> &'static str {
        "edge"
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn source_annotations(&self) -> &'static [&'static str] {
        sources::READ
    }

    /// One write: the edge compares the whole object, and keeps the last targets until probes have decided about new ones.
    async fn apply(&self, lb: &LoadBalancer, _: Compare) -> Result<Outcome, Error> {
        self.shared.activate().await?;
        for predecessor in self.predecessors(&lb.owner) {
            self.delete(&predecessor).await?;
        }
        let entry = self.owned_entry(&lb.owner).await?;
        if entry.as_ref().is_some_and(|entry| entry.deleting) {
            // Its addresses stay reserved until it is deleted; then a new object is created.
            return Ok(Outcome { progress: Progress::Again(DELETION_RETRY), ..Outcome::done() });
        }
        let structure = spec::structure(lb, Vec::new());
        if structure.is_err() && entry.is_none() && lb.published.is_empty() {
            // It has no address, and reserves none.
            return structure.map(|_| Outcome::done());
        }
        let structure = EdgeLoadBalancerSpec { addresses: self.shared.allocate(lb)?, ..structure? };
        let (targets, refused) = self.targets(&lb.owner, &lb.families, &lb.nodes()).await?;
        let wanted = targets.put_into(structure);
        let current =
            entry.as_ref().and_then(|entry| entry.content.as_ref().ok()).map(|content| &content.spec);
        let before = entry.as_ref().filter(|_| current.is_some()).map(AssignedAddresses::of);
        let left = current.and_then(|spec| spec.node_set.clone());
        let mut has_written = true;
        if let Some(entry) = &entry {
            has_written = self.change(&lb.owner, entry, &wanted).await?;
        } else {
            let (balancers, name) = (&self.shared.balancers, spec::object_name(&lb.owner));
            let own = self.shared.begin_write(&name, &wanted);
            if let Err(failure) = own.end(balancers.create(spec::metadata(&lb.owner), &wanted).await) {
                if failure.code() == Some(409) {
                    // Created by an earlier call whose response was lost: the retry finds it.
                    balancers.reread(&name).await?;
                }
                return Err(failure.into());
            }
        }
        let mut progress = self.settle(&lb.owner, entry.as_ref(), has_written).await?;
        if progress == Progress::Done
            && let Some(left) = self.shared.disputed_for(&spec::object_name(&lb.owner))
        {
            // Nothing else reminds of it: neither object changes.
            progress = Progress::Again(left);
        }
        let now = AssignedAddresses { addresses: wanted.addresses.clone(), sharing: Sharing::wanted(lb)? };
        if before.as_ref() != Some(&now) {
            self.shared.on_release(Some(&lb.owner.service), &before.unwrap_or_default(), &now);
            self.shared.pools_are_stale();
        }
        self.drop_left(left, &wanted).await?;
        Ok(Outcome { ingress: ingress(&wanted), refused, progress, ..Outcome::done() })
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        let Some(set) = &targets.nodes else { return Ok(Outcome::done()) };
        self.shared.activate().await?;
        let Some(entry) = self.owned_entry(owner).await? else {
            // A creation without an answer may still have an effect.
            let progress = self.settle(owner, None, false).await?;
            return Ok(Outcome { progress, ..Outcome::done() });
        };
        if entry.deleting {
            return Ok(Outcome::done());
        }
        let Ok(content) = &entry.content else {
            return Err(Error::Unavailable(format!(
                "EdgeLoadBalancer {} cannot be read by this version. Its targets stay as they are.",
                spec::object_name(owner)
            )));
        };
        let families: Vec<Family> = content.spec.addresses.iter().map(|ip| Family::of(*ip)).collect();
        let (targets, refused) = self.targets(owner, &families, set).await?;
        let wanted = targets.put_into(content.spec.clone());
        let has_written = self.change(owner, &entry, &wanted).await?;
        let progress = self.settle(owner, Some(&entry), has_written).await?;
        self.drop_left(content.spec.node_set.clone(), &wanted).await?;
        Ok(Outcome { ingress: ingress(&wanted), refused, progress, ..Outcome::done() })
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        self.shared.activate().await?;
        let Some(entry) = self.owned_entry(owner).await?.filter(|entry| !entry.deleting) else {
            return Ok(None);
        };
        let Ok(content) = &entry.content else {
            return Err(Error::Unavailable(format!(
                "EdgeLoadBalancer {} cannot be read by this version. Its source ranges stay as they are.",
                spec::object_name(owner)
            )));
        };
        let ranges = sources::requested(&requested.ranges, &requested.annotations)?;
        let (source_ranges, admitted) = sources::restricted(&content.spec.source_ranges, &ranges);
        let wanted = EdgeLoadBalancerSpec { source_ranges, ..content.spec.clone() };
        self.change(owner, &entry, &wanted).await?;
        Ok(Some(admitted))
    }

    async fn set_shared(&self, set: &TargetSet) -> Result<(), Error> {
        self.shared.activate().await?;
        let Some(which) = set.shared else { return Ok(()) };
        // Also while nobody uses the set: an older value that comes later must not count.
        self.shared.offer_set(which, set);
        if self.shared.is_used(which.as_str()) {
            self.write_shared(which, set).await?;
        }
        Ok(())
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        self.shared.activate().await?;
        Ok(self.shared.health(&spec::object_name(owner)))
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        self.shared.activate().await?;
        self.shared.forget(owner);
        let name = spec::object_name(owner);
        let mut entry = self.shared.balancers.cache.get(&name);
        if entry.is_none() && self.shared.is_reserved(&name) {
            let left = self.shared.unsettled(&name);
            entry = self.shared.balancers.reread(&name).await?;
            if let Some(left) = left.filter(|_| entry.is_none()) {
                // The object may still appear, with its addresses.
                return Ok(Progress::Again(left));
            }
        }
        entry = entry.filter(|entry| entry.owner.as_ref() == Some(owner));
        let node_set = entry.as_ref().and_then(|entry| entry.content.as_ref().ok()?.spec.node_set.clone());
        if let Some(entry) = entry {
            let released = AssignedAddresses::of(&entry);
            if !self.shared.balancers.delete(&name, &entry).await? {
                return Ok(Progress::Again(DELETION_RETRY));
            }
            self.shared.on_release(Some(&owner.service), &released, &AssignedAddresses::default());
            self.shared.pools_are_stale();
        }
        self.shared.end_reservation(owner);
        // Also when an earlier call deleted the object and then failed.
        for which in node_set.iter().map(String::as_str).chain(SharedSet::ALL.map(SharedSet::as_str)) {
            self.drop_unused(which).await?;
        }
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        self.shared.activate().await?;
        self.shared.pools_are_stale();
        Ok(self.shared.balancers.cache.read(|rows| rows.filter_map(|entry| entry.owner.clone()).collect()))
    }

    async fn preview(&self, lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        self.shared.wait_for_lists().await?;
        let entry = self.owned_entry(&lb.owner).await?;
        let Some(Ok(content)) = entry.map(|entry| entry.content) else { return Ok(None) };
        let mut changes = Vec::new();
        let nodes = lb.nodes();
        let structure = EdgeLoadBalancerSpec {
            endpoint_nodes: spec::endpoint_nodes(&nodes),
            ..spec::structure(lb, content.spec.addresses.clone())?
        };
        let wanted = match nodes.shared {
            None => EdgeLoadBalancerSpec {
                targets: spec::targets(&lb.families, &nodes),
                draining: spec::draining(&lb.families, &nodes),
                ..structure
            },
            Some(which) => {
                let set = self.shared.node_sets.cache.get(which.as_str());
                let current = set.as_ref().and_then(|entry| entry.content.as_ref().ok());
                let current = current.map(|content| &content.spec);
                changes.extend(preview::of_set(which.as_str(), current, &spec::shared_set(&nodes)));
                EdgeLoadBalancerSpec { node_set: Some(which.as_str().to_owned()), ..structure }
            }
        };
        changes.extend(preview::of_object(&content.spec, &wanted));
        let requested = &lb.requested_addresses;
        if !requested.is_empty() && requested.iter().any(|address| !content.spec.addresses.contains(address))
        {
            let list: Vec<String> = requested.iter().map(ToString::to_string).collect();
            changes.push(format!("requests the addresses {}", list.join(", ")));
        }
        Ok(Some(changes))
    }

    async fn preview_owned(&self) -> Result<Vec<Owner>, Error> {
        self.shared.wait_for_lists().await?;
        Ok(self.shared.balancers.cache.read(|rows| rows.filter_map(|entry| entry.owner.clone()).collect()))
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        self.shared.notifier.subscribe()
    }

    fn notices(&self) -> BoxStream<'static, ProviderNotice> {
        let notices = self.shared.notices.subscribe();
        self.shared.tell_of_drained_nodes();
        notices
    }
}

/// The targets in an object: a shared set, or its own; and the nodes that have an endpoint, under `fused` steering.
struct ObjectTargets {
    node_set: Option<String>,
    own: Vec<EdgeTarget>,
    draining: Vec<EdgeTarget>,
    endpoint_nodes: Option<Vec<String>>,
}

impl ObjectTargets {
    fn put_into(self, spec: EdgeLoadBalancerSpec) -> EdgeLoadBalancerSpec {
        let Self { node_set, own: targets, draining, endpoint_nodes } = self;
        EdgeLoadBalancerSpec { node_set, targets, draining, endpoint_nodes, ..spec }
    }
}

fn ingress(spec: &EdgeLoadBalancerSpec) -> Vec<Ingress> {
    let entry = |ip: &IpAddr| Ingress { ip: Some(*ip), hostname: None, ip_mode: Some(IpMode::Vip) };
    spec.addresses.iter().map(entry).collect()
}

fn to_value(spec: &impl serde::Serialize) -> Result<Value, Error> {
    serde_json::to_value(spec)
        .map_err(|error| Error::Unavailable(format!("cannot be written as JSON: {error}")))
}

fn spawn_watches(shared: &Arc<Shared>, watches: &Watches, stop: &CancellationToken) {
    spawn_watch(shared, watches, stop, |shared| &shared.balancers, |shared, c| shared.on_balancer(&c));
    spawn_watch(shared, watches, stop, |shared| &shared.health, |shared, c| shared.on_health(&c));
    spawn_watch(shared, watches, stop, |shared| &shared.hosts, |shared, c| shared.on_host(&c));
    spawn_watch(shared, watches, stop, |shared| &shared.node_sets, |shared, c| shared.on_node_set(&c));
    spawn_watch(shared, watches, stop, |shared| &shared.pools, |shared, c| shared.on_pool(&c));
    let (own, ended) = (Arc::clone(shared), stop.clone());
    // The end of the first list is no change of a host.
    tokio::spawn(async move {
        if ended.run_until_cancelled(own.hosts.cache.listed()).await.is_some() {
            own.tell_of_drained_nodes();
        }
    });
    let (own, ended, watches) = (Arc::clone(shared), stop.clone(), watches.dispensable());
    tokio::spawn(async move { ended.run_until_cancelled(watch_namespaces(&own, &watches)).await });
    let (shared, stop) = (Arc::clone(shared), stop.clone());
    tokio::spawn(async move { stop.run_until_cancelled(shared.keep_pool_statuses()).await });
}

/// Follows the labels of namespaces from the first pool on that needs them.
async fn watch_namespaces(shared: &Shared, watches: &Watches) {
    shared.namespaces.needed.notified().await;
    let mut events = watches.watch(NamespaceKind);
    while let Some(event) = events.next().await {
        shared.on_namespace(event);
    }
}

fn spawn_watch<S: Clone + DeserializeOwned + References + Send + 'static>(
    shared: &Arc<Shared>,
    watches: &Watches,
    stop: &CancellationToken,
    objects: fn(&Shared) -> &Objects<S>,
    mut on_change: impl FnMut(&Shared, Change<S>) + Send + 'static,
) {
    let events = watches.watch(objects(shared).kind.clone());
    let (shared, stop) = (Arc::clone(shared), stop.clone());
    tokio::spawn(async move {
        follow(events, &objects(&shared).cache, stop, |change| on_change(&shared, change)).await;
    });
}

#[cfg(test)]
mod tests;
