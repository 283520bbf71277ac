// SPDX-License-Identifier: Apache-2.0
//! The provider: caches the resources of each Service and reconciles them. The controller calls it. It never waits until AWS
//! finishes a change; the controller calls again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use futures::stream::BoxStream;
use steerage_model::{Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, RequestedSources, Steering, TargetsAnnotation,
};
use steerage_provider_cloud::failure::is_unexpected_answer;
use steerage_provider_cloud::{ApiMetrics, Keyed, Lines, Recent, ToReconcile};
use tokio::time::Instant;

use crate::apply::check_kept;
use crate::change_gate::ChangeGate;
use crate::client::{CallError, Calls, Client};
use crate::config::Config;
use crate::desired::{Desired, desired};
use crate::entry::Entry;
use crate::finish::SetTargets;
use crate::first_look::first_look;
use crate::inventory::{Inventory, Reading};
use crate::ip_address_type::IpAddressType;
use crate::lookup::{self, KnownGroupNames};
use crate::new_balancers::NewBalancers;
use crate::observe::{self, Observation};
use crate::paced::Paced;
use crate::partial_read::Reader;
use crate::refused_listeners::Refused;
use crate::security_group::{SecurityGroup, new_security_group, requested_of, requested_sources};
use crate::security_group_sync::again_after;
use crate::shared::LoadBalancerUse;
use crate::shared_sync::again;
use crate::shared_use::SharedUse;
use crate::state::{Complete, FirstLook, KnownSecurityGroup, ServiceState};
use crate::subnets::Subnet;
use crate::targets::Limits;
use crate::wanted_targets::WantedTargets;
use crate::{adoption, annotations, names};

/// Try again after this time to delete target groups, which a deleted load balancer still uses for seconds.
pub(crate) const RELEASE_POLL: Duration = Duration::from_secs(5);
/// When the provider starts, one list serves the first comparisons and `owned` for this time.
const LIST_AGE: Duration = Duration::from_secs(30);

/// The AWS provider.
pub struct Aws {
    pub(crate) config: Config,
    pub(crate) client: Arc<dyn Calls>,
    services: Keyed<Key, ServiceState>,
    /// What existed when this process started. Each Service's part is taken out by its first call.
    inventory: Mutex<Option<Inventory>>,
    /// The list that is being read. It is not needed for what the inventory knows.
    reading: tokio::sync::Mutex<Reading>,
    pub(crate) subnets: Recent<[Subnet], CallError>,
    pub(crate) group_names: Mutex<KnownGroupNames>,
    pub(crate) new_balancers: NewBalancers,
    pub(crate) changes: ChangeGate,
    /// One for each shared load balancer: its Services change it one after the other.
    pub(crate) shared_uses: Keyed<String, SharedUse>,
    /// Services that wait for their turn to change a shared load balancer.
    pub(crate) shared_lines: Lines<String, Owner>,
    /// When this process was first asked for something: until then, another one may have changed what reads do not show yet.
    pub(crate) first_call: OnceLock<Instant>,
    /// Where the last list of AWS shows the resources of owners that share a load balancer.
    listed_uses: Mutex<HashMap<Owner, LoadBalancerUse>>,
    /// Shared load balancers that no target group uses, by ARN, and since when lists show that.
    pub(crate) unused_since: Mutex<HashMap<String, Instant>>,
    /// Owners for [`Provider::changes`].
    pub(crate) to_reconcile: ToReconcile,
    /// Whether this process created or deleted anything.
    is_changed: AtomicBool,
    /// When the next Service may read what its first comparison left out.
    pub(crate) next_verify: Mutex<Instant>,
}

impl Aws {
    /// A provider with the credentials of the environment, the profile or the instance.
    pub async fn connect(config: Config, metrics: ApiMetrics) -> Self {
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(Duration::from_secs(5))
            .operation_timeout(Duration::from_secs(30))
            .build();
        let mut loader = aws_config::defaults(BehaviorVersion::latest()).timeout_config(timeouts);
        if let Some(region) = &config.region {
            loader = loader.region(Region::new(region.clone()));
        }
        let sdk = loader.load().await;
        let client = Self::client(&config, &sdk, metrics.clone());
        Self::over(config, Arc::new(Paced::new(Arc::new(client), metrics)))
    }

    /// Makes one read of each API. [`Error::Denied`] if AWS does not accept the credentials, or does not let them read load balancers:
    /// then nothing would work. Without EC2, load balancers follow their Services, so that it fails is only logged.
    pub async fn check(&self) -> Result<(), Error> {
        let name = names::prefix(&self.config.cluster);
        self.client.balancer_named(&name).await?;
        if let Err(failure) = self.client.subnets(&self.config.vpc).await {
            let error = Error::from(failure);
            tracing::warn!(%error, "EC2 subnets not readable; Services without subnet IDs get no load balancer until they are");
        }
        Ok(())
    }

    fn client(config: &Config, sdk: &SdkConfig, metrics: ApiMetrics) -> Client {
        Client::new(sdk, config.endpoint.as_deref(), config.ec2_endpoint.as_deref(), metrics)
    }

    /// A provider with the credentials, region and HTTP client of `sdk`, for a simulation that limits no rate.
    pub fn new(config: Config, sdk: &SdkConfig, metrics: ApiMetrics) -> Self {
        let client = Self::client(&config, sdk, metrics);
        Self::over(config, Arc::new(client))
    }

    /// A provider that makes its calls through `client`.
    pub(crate) fn over(config: Config, client: Arc<dyn Calls>) -> Self {
        Self {
            new_balancers: NewBalancers::new(config.activation_poll),
            config,
            client,
            to_reconcile: ToReconcile::default(),
            services: Keyed::default(),
            inventory: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            subnets: Recent::new(lookup::AGE),
            group_names: Mutex::default(),
            changes: ChangeGate::default(),
            shared_uses: Keyed::default(),
            shared_lines: Lines::default(),
            first_call: OnceLock::new(),
            listed_uses: Mutex::default(),
            unused_since: Mutex::default(),
            is_changed: AtomicBool::default(),
            next_verify: Mutex::new(Instant::now()),
        }
    }

    /// Something is about to be created, changed or deleted.
    pub(crate) fn note_change(&self) {
        self.is_changed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn services_known(&self) -> usize {
        self.services.len()
    }

    async fn entry(&self, service: &Key) -> Result<Entry, Error> {
        let began = Instant::now();
        let mut entry = Entry::new(self.services.lock(service, ServiceState::default).await, began);
        self.first_call.get_or_init(Instant::now);
        if !entry.initialized {
            self.ensure_inventory().await?;
            let balancer = names::load_balancer(&self.config.cluster, service);
            let found = match &mut *self.inventory() {
                Some(inventory) => first_look(inventory, service, &balancer),
                None => return Err(Error::Unavailable("the list of the start is missing".to_owned())),
            };
            for (owner, groups) in found.security_groups {
                let wanted = new_security_group(&self.config, &owner);
                let known = SecurityGroup::choose(groups, &wanted, &found.attached);
                entry
                    .security_groups
                    .extend(known.map(|group| (owner, KnownSecurityGroup::from_read(group))));
            }
            (entry.first_look, entry.names, entry.adopted) = (found.look, found.names, found.adopted);
            entry.uses = found.uses;
            // Another process may have ended in a change that hangs.
            entry.targets_first = matches!(entry.first_look, FirstLook::Owned(..));
            entry.initialized = true;
        }
        entry.grant_time();
        Ok(entry)
    }

    fn inventory(&self) -> MutexGuard<'_, Option<Inventory>> {
        self.inventory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the list of the start. Later lists, which take long, hold up nobody.
    async fn ensure_inventory(&self) -> Result<(), Error> {
        if self.inventory().is_some() {
            return Ok(());
        }
        let asked = Instant::now();
        let mut reading = self.reading.lock().await;
        if self.inventory().is_none() {
            let read = reading.complete_for(asked, &*self.client, &self.config).await?;
            *self.inventory() = Some(read);
        }
        Ok(())
    }

    fn listed_use(&self, owner: &Owner) -> Option<LoadBalancerUse> {
        self.listed_uses.lock().unwrap_or_else(PoisonError::into_inner).get(owner).cloned()
    }

    /// The owners of everything at AWS, and the list that says so if it was read for this.
    async fn list_owned(&self) -> Result<(Vec<Owner>, Option<Inventory>), Error> {
        let asked = Instant::now();
        let mut reading = self.reading.lock().await;
        let is_first = self.inventory().is_none();
        if !is_first
            && !self.is_changed.load(Ordering::Relaxed)
            && let Some(inventory) = self.inventory().as_mut().filter(|i| i.read.elapsed() < LIST_AGE)
            && let Some(owners) = inventory.owners.take()
        {
            return Ok((owners, None));
        }
        let mut read = reading.complete_for(asked, &*self.client, &self.config).await?;
        let owners = read.owners.take().unwrap_or_default();
        *self.listed_uses.lock().unwrap_or_else(PoisonError::into_inner) = read.shared_uses();
        if is_first {
            *self.inventory() = Some(read);
            return Ok((owners, None));
        }
        Ok((owners, Some(read)))
    }

    /// Brings the load balancer, its targets and its security in place.
    pub(crate) async fn apply_wanted(
        &self,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let targets = WantedTargets::new(&self.config, &lb.owner.service, &lb.targets());
        entry.freed.clear();
        let has_v6 = wanted.ip_address_type == IpAddressType::DualStack;
        // Until the load balancer surely can be what is wanted, nobody is admitted who was not: also if this call is abandoned.
        entry.restricted = Some((lb.owner.clone(), requested_of(lb)?));
        let previous = entry.wanted.replace((lb.owner.clone(), wanted.clone()));
        // EC2 and `ELBv2` fail independently, and neither waits for the other.
        let leaving = entry.leaving_sources(&lb.owner, &wanted);
        let removed = self.remove_sources(leaving);
        let brought = self.bring_structure(lb, wanted, (previous, &targets), entry, compare);
        let (removed, brought) = futures::join!(removed, brought);
        let removed = removed.and_then(|known| entry.note_removed(&lb.owner, known).err());
        let (is_in_place, finished, compare_rules) = brought?;
        let mut outcome = finished.as_ref().cloned().unwrap_or_else(|_| Outcome::done());
        let owner = &lb.owner;
        let is_finished = is_in_place && finished.is_ok();
        let refused = entry.complete.as_ref().filter(|_| is_finished).and_then(|known| known.refused.clone());
        if is_finished && !has_v6 {
            // Clients keep their rules as long as they are told the addresses.
            self.sync_ip_address_type(owner, entry, compare_rules, &mut outcome).await;
        }
        // Sources that must not connect any more wait neither for ELBv2, as targets do not wait for EC2, nor for a change of the structure.
        let failure = entry.open_failure(owner).map(str::to_owned);
        if finished.is_err() || entry.is_known(owner) || failure.is_some() {
            self.secure_after(removed, owner, entry, compare_rules, &mut outcome).await;
        }
        if is_finished {
            self.sync_subnets(owner, entry, compare_rules, &mut outcome).await;
        }
        if is_finished && has_v6 && outcome.incomplete.is_none() {
            // Clients learn of IPv6 when it serves.
            self.sync_ip_address_type(owner, entry, compare_rules, &mut outcome).await;
        }
        if is_finished && has_v6 {
            self.sync_source_nat(owner, entry, compare_rules, &mut outcome).await;
        }
        entry.report_failing(owner, &mut outcome);
        if let Some(refused) = refused.or(failure.map(Refused::unavailable)) {
            refused.report(&mut outcome);
        }
        finished.map(|_| outcome)
    }

    /// Brings the load balancer and its targets in place. Returns whether the structure is, what the rest said, and what of the rules to
    /// compare.
    async fn bring_structure(
        &self,
        lb: &LoadBalancer,
        wanted: Desired,
        (previous, targets): (Option<(Owner, Desired)>, &WantedTargets),
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<(bool, Result<Outcome, Error>, Compare), Error> {
        let mut limits = self.limits(entry, compare);
        let mut compare_rules = compare;
        let comes_again = |complete: &Complete| complete.retry.is_some() || complete.verify.is_some();
        if entry.waits_at_gate.take().is_some()
            && !entry.has_change_to_try(&lb.owner, &wanted, compare)
            && !entry.complete.as_ref().is_some_and(comes_again)
        {
            self.changes.leave(&lb.owner);
        }
        let structured = if self.compare_with_list(&lb.owner, &wanted, entry) {
            // The list has the rules too.
            (limits.compare, compare_rules) = (Compare::Remembered, Compare::Remembered);
            Ok(None)
        } else if !entry.has_change_to_try(&lb.owner, &wanted, compare) {
            Ok(None)
        } else {
            self.try_change(lb, &wanted, targets, entry, compare).await
        };
        entry.targets_first |= matches!(structured, Err(Error::Throttled { .. } | Error::Unavailable(_)));
        let is_in_place = matches!(structured, Ok(None));
        if is_in_place {
            (entry.failed_changes, entry.failed_change) = (0, None);
        }
        if let Some(known) = entry.balancer(&lb.owner).cloned() {
            entry.last_balancer = Some((lb.owner.clone(), known));
        }
        // A failure may leave it unknown. What is checked hardly ever changes.
        let last = entry.last_balancer.as_ref().filter(|(of, _)| *of == lb.owner);
        let can_be_kept = |(_, wanted): &(Owner, Desired)| {
            last.is_some_and(|(_, balancer)| check_kept(wanted, balancer).is_ok())
        };
        if is_in_place || entry.wanted.as_ref().is_some_and(can_be_kept) {
            entry.restricted = None;
        } else {
            entry.wanted = previous;
            let is_refused = matches!(structured, Err(Error::Invalid { .. }));
            if let Some((_, requested)) = &mut entry.restricted {
                requested.keeps_ports &= !is_refused;
            }
        }
        let finished = match structured {
            Ok(None) => self.finish(entry, targets, limits).await,
            // A target that finds no room now says nothing about the structure, which goes on.
            Ok(Some(wait)) => {
                self.follow_meanwhile(&lb.owner, entry, (targets, Some(&wanted))).await;
                let incomplete = entry.incomplete_meanwhile();
                Ok(Outcome { incomplete, ..again(wait) })
            }
            // The targets are set next, apart from the structure, and so are the rules.
            Err(error @ Error::Invalid { .. }) => return Err(error),
            Err(error @ (Error::Throttled { .. } | Error::Denied(_) | Error::Unavailable(_))) => {
                self.follow_meanwhile(&lb.owner, entry, (targets, Some(&wanted))).await;
                // The targets follow, so the caller comes back when reads show what AWS has made, and not after a backoff.
                let is_left = entry.follows_last_known(&lb.owner)
                    || is_unexpected_answer(&error) && entry.is_known(&lb.owner);
                let is_of_change = entry.written >= entry.began && is_left;
                match error {
                    // Each try reads all that the Service has, in a budget that the account shares.
                    Error::Unavailable(failure) if is_of_change => {
                        let settle = self.config.settle;
                        Ok(again(entry.wait_after_failed_change(&lb.owner, (wanted, failure), settle)))
                    }
                    error => Err(error),
                }
            }
            Err(error @ (Error::Conflict(_) | Error::Busy(_))) => {
                self.follow_meanwhile(&lb.owner, entry, (targets, Some(&wanted))).await;
                Err(error)
            }
        };
        Ok((is_in_place, finished, compare_rules))
    }

    /// What a call may do with target groups.
    pub(crate) fn limits(&self, entry: &ServiceState, compare: Compare) -> Limits {
        Limits { compare, settle: self.config.settle, may_hold: false, until: entry.must_end() }
    }

    /// Reads the resources of an owner, unless they are known.
    pub(crate) async fn ensure_known(&self, owner: &Owner, entry: &mut ServiceState) -> Result<(), Error> {
        entry.adopt_list(owner);
        let is_early = entry.unsettled(self.config.settle).is_some();
        if !entry.is_known(owner) || entry.is_read_early && !is_early {
            let seen = self.read(owner, entry).await?;
            entry.know(owner, seen.mine);
            (entry.complete, entry.is_read_early) = (None, is_early);
            entry.unproven.clear();
            if !is_early {
                entry.open_checks.clear();
            }
        }
        Ok(())
    }

    /// Reads all resources of the owner. A try that fails leaves what it has read for the next one.
    pub(crate) async fn read(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Observation, Error> {
        let (written, until) = (entry.written, entry.must_end());
        let usage = entry.uses.get(owner).unwrap_or(&LoadBalancerUse::Own);
        let adopted = entry.adopted.as_deref().filter(|_| *usage == LoadBalancerUse::Own);
        // Others may have the names that are wanted.
        let wanted = entry.wanted.iter().filter(|(of, _)| of == owner).flat_map(|(_, wanted)| &wanted.groups);
        let names = wanted.map(|group| &group.name).chain(&entry.names).cloned().collect();
        let mut reader = Reader::new(&*self.client, &mut entry.reading, written, until);
        let read = observe::read_all(&mut reader, &self.config.cluster, owner, &names, usage, adopted).await;
        if matches!(read, Err(Error::Conflict(_))) {
            // Something that was read a moment ago is gone.
            reader.finish();
        }
        read
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
            pod_targets: Some(TargetsAnnotation {
                name: annotations::TARGET_TYPE,
                nodes: "instance",
                pods: "ip",
            }),
            node_labels: Some(annotations::TARGET_NODE_LABELS),
            shared_load_balancers: true,
            address_pools: false,
            ipv6: true,
            one_target_family: true,
            weights: false,
            shared_sets: false,
            affinity: true,
            fails_open: true,
            health_interval: (Duration::from_secs(5), Duration::from_mins(5)),
        }
    }

    /// The Service without its UID: all UIDs of a Service share the names at AWS.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    fn replaced_finalizers(&self) -> &'static [&'static str] {
        adoption::finalizers(&self.config)
    }

    fn source_annotations(&self) -> &'static [&'static str] {
        &[annotations::SOURCE_RANGES, annotations::PREFIX_LISTS]
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let wanted = desired(&self.config, lb)?;
        let mut entry = self.entry(&lb.owner.service).await?;
        let Some(shared) = wanted.shared.clone() else {
            if let Some(wait) = self.check_use(&lb.owner, LoadBalancerUse::Own, &mut entry).await? {
                return Ok(again(wait));
            }
            return self.apply_wanted(lb, wanted, &mut entry, compare).await;
        };
        self.apply_shared(&shared, lb, wanted, &mut entry, compare).await
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        let mut guard = self.entry(&owner.service).await?;
        let entry = &mut *guard;
        self.leave_line(owner, entry);
        let targets = WantedTargets::new(&self.config, &owner.service, targets);
        if let Err(error) = self.ensure_known(owner, entry).await {
            self.follow_meanwhile(owner, entry, (&targets, None)).await;
            return Err(error);
        }
        let limits = self.limits(entry, Compare::Remembered);
        entry.unfollowed = entry.idle_groups();
        let converged = self.converge_targets(entry, &targets, limits).await;
        let rejected = entry.retry_rejected.map(|at| at.saturating_duration_since(Instant::now()));
        let retry_refused = entry.retry_refused().into_iter().chain(rejected).min();
        let mut outcome = Outcome { retry_refused, ..Outcome::done() };
        // Also where the structure is refused, and where targets wait, a source may have to go.
        self.secure(owner, entry, Compare::Remembered, &mut outcome).await;
        if let Some(refused) = entry.complete.as_ref().and_then(|known| known.refused.as_ref()) {
            refused.report(&mut outcome);
        }
        let SetTargets { refused, held, exceeded } = converged?;
        entry.report_failing(owner, &mut outcome);
        if let Some(exceeded) = exceeded {
            exceeded.report(&mut outcome);
        }
        let again = entry.unsettled(self.config.settle).filter(|_| entry.is_read_early);
        for wait in held.into_iter().chain(again) {
            again_after(&mut outcome, wait);
        }
        self.publish_kept(owner, entry, &mut outcome).await;
        Ok(Outcome { refused, ..outcome })
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        let requested = requested_sources(requested)?;
        let mut guard = self.entry(&owner.service).await?;
        self.restrict(owner, requested, &mut guard).await
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        let mut guard = self.entry(&owner.service).await?;
        self.read_health(owner, &mut guard).await
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut guard = self.entry(&owner.service).await?;
        guard.last_known.take_if(|last| last.owner == *owner);
        if let Some(usage) = self.listed_use(owner) {
            guard.uses.entry(owner.clone()).or_insert(usage);
        }
        let wait = match guard.uses.get(owner).cloned() {
            Some(LoadBalancerUse::Shared(shared)) => self.leave_shared(owner, &shared, &mut guard).await?,
            Some(LoadBalancerUse::Own) | None => self.delete_all(owner, &mut guard).await?,
        };
        if let Some(wait) = wait {
            return Ok(Progress::Again(wait));
        }
        (guard.left_shared, _) = (None, guard.uses.remove(owner));
        if guard.resources.is_none() && guard.names.is_empty() && guard.uses.is_empty() {
            // Another Service of this name starts from nothing.
            self.services.remove(&owner.service);
        }
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        let (owners, read) = self.list_owned().await?;
        if let Some(read) = read {
            self.delete_unused_shared(&read).await;
        }
        Ok(owners)
    }

    async fn preview_owned(&self) -> Result<Vec<Owner>, Error> {
        Ok(self.list_owned().await?.0)
    }

    /// Only what is refused without a call is known, and what would be adopted.
    async fn preview(&self, lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        let wanted = desired(&self.config, lb)?;
        let published = &lb.published_hostnames;
        if published.is_empty() || wanted.shared.is_some() {
            return Ok(None);
        }
        let entry = self.entry(&lb.owner.service).await?;
        if matches!(&entry.first_look, FirstLook::Owned(_, listed) if listed.balancer.is_some()) {
            return Ok(None);
        }
        if self.config.adopt.is_empty() {
            self.check_unadopted(&lb.owner, published).await?;
            return Ok(None);
        }
        let adopted = self.preview_adoption(&lb.owner, &wanted, published).await?;
        Ok(adopted.map(|adopted| vec![adopted]))
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        // AWS sends no notifications; the controller's resync finds changes.
        self.to_reconcile.stream()
    }
}
