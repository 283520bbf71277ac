// SPDX-License-Identifier: Apache-2.0
//! The provider. The controller calls it. It never waits until Azure finishes a change; the controller calls again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, RequestedSources, Steering, TargetSet,
};
use steerage_provider_cloud::{AddressOwners, ApiMetrics, Keyed};

use crate::admission::{SecurityGroupDocument, narrowed};
use crate::annotations;
use crate::client::{Calls, Client, read};
use crate::config::Config;
use crate::credentials::{Credentials, CredentialsError};
use crate::desired::{WantedPool, desired, nodes};
use crate::document::{BalancerDocument, Document as _};
use crate::marks::{self, Mark};
use crate::merge::{Intent, Layout};
use crate::options::Sources;
use crate::paced::Paced;
use crate::public_ips::{FailureExtent, PublicIps};
use crate::reasons;
use crate::service_state::ServiceState;
use crate::shared::{Shared, Written};
use crate::types::{Balancer, Frontend, Part};

/// A comparison takes what was read at most so long ago: one read serves all Services of a resync.
pub(crate) const RECENT: Duration = Duration::from_secs(5);
/// The same of public IPs where no comparison is asked for.
pub(crate) const KNOWN: Duration = Duration::from_mins(1);
/// The longest wait until a shared set is in place, which has no progress to report.
const SET_PATIENCE: Duration = Duration::from_secs(20);

/// The load balancers: external, then internal.
pub(crate) type Balancers = [Shared<BalancerDocument>; 2];

/// The Azure provider.
pub struct Azure {
    pub(crate) config: Config,
    pub(crate) calls: Arc<dyn Calls>,
    pub(crate) balancers: Balancers,
    /// The nodes' network security group, if a flag names it.
    pub(crate) security_group: Option<Shared<SecurityGroupDocument>>,
    pub(crate) public_ips: PublicIps,
    pub(crate) address_owners: AddressOwners,
    services: Keyed<Key, ServiceState>,
}

impl Azure {
    /// A provider that keeps to the rate which Azure takes.
    ///
    /// # Errors
    ///
    /// If the system's certificates cannot be used.
    pub fn connect(
        config: Config,
        credentials: Credentials,
        metrics: ApiMetrics,
    ) -> Result<Self, CredentialsError> {
        let client = Client::new(&config.endpoint, credentials, metrics.clone())?;
        Ok(Self::over(config, Arc::new(Paced::new(Arc::new(client), metrics))))
    }

    /// A provider that limits no rate, for tests.
    ///
    /// # Errors
    ///
    /// If the system's certificates cannot be used.
    pub fn unlimited(
        config: Config,
        credentials: Credentials,
        metrics: ApiMetrics,
    ) -> Result<Self, CredentialsError> {
        let client = Client::new(&config.endpoint, credentials, metrics)?;
        Ok(Self::over(config, Arc::new(client)))
    }

    pub(crate) fn over(config: Config, calls: Arc<dyn Calls>) -> Self {
        let balancers = [false, true].map(|is_internal| {
            let layout = Layout { config: config.clone(), is_internal };
            Shared::new(BalancerDocument::new(layout), config.poll)
        });
        let security_group = config.security_group.clone();
        let security_group = security_group
            .map(|path| Shared::new(SecurityGroupDocument::new(config.clone(), path), config.poll));
        let public_ips = PublicIps::new(config.clone());
        let address_owners = AddressOwners::default();
        Self {
            balancers,
            security_group,
            public_ips,
            address_owners,
            services: Keyed::default(),
            config,
            calls,
        }
    }

    /// Reads what the controller needs. [`Error::Denied`] if Azure does not accept the credentials or they may not read; [`Error::Invalid`]
    /// if a flag names what does not exist: then nothing would work.
    pub async fn check(&self) -> Result<(), Error> {
        self.public_ips.all(&*self.calls, KNOWN).await?;
        if let Some(security_group) = &self.security_group
            && let Written::Done(None) = security_group.read(&*self.calls, KNOWN).await?
        {
            return Err(Error::invalid(
                reasons::NO_SECURITY_GROUP,
                format!(
                    "The network security group {} does not exist. Correct --azure-network-security-group.",
                    security_group.document.path
                ),
            ));
        }
        Ok(())
    }

    async fn entry(&self, service: &Key) -> tokio::sync::OwnedMutexGuard<ServiceState> {
        self.services.lock(service, ServiceState::default).await
    }

    pub(crate) fn mark(&self, owner: &Owner) -> Mark {
        Mark::new(&self.config.cluster, owner)
    }

    /// The load balancer of a scheme as it was read last; `Err` with a time if it changes and never was.
    pub(crate) async fn balancer(
        &self,
        balancer: &Shared<BalancerDocument>,
        age: Duration,
    ) -> Result<Result<Option<Balancer>, Duration>, Error> {
        Ok(match balancer.look_past(&*self.calls, age).await? {
            Written::Again(wait) => Err(wait),
            Written::Done(body) => Ok(body),
        })
    }

    /// Takes back what the Service wants in a load balancer and nobody has written, then reads it. `Err` with a time while a write of it
    /// runs, or as [`Self::balancer`].
    pub(crate) async fn withdraw_and_read(
        &self,
        balancer: &Shared<BalancerDocument>,
        service: &Key,
        age: Duration,
    ) -> Result<Result<Option<Balancer>, Duration>, Error> {
        match balancer.withdraw(&*self.calls, service, age).await? {
            Some(wait) => Ok(Err(wait)),
            None => self.balancer(balancer, age).await,
        }
    }

    /// Whether a load balancer that cannot be used, because its tags are not the cluster's, has such parts all the same: somebody replaced
    /// its tags.
    pub(crate) async fn has_parts(
        &self,
        balancer: &Shared<BalancerDocument>,
        is_such: impl Fn(&Mark) -> bool,
    ) -> Result<bool, Error> {
        let layout = &balancer.document.layout;
        let body: Option<Balancer> =
            read(&*self.calls, balancer.document.actions().get, &layout.path()).await?;
        Ok(body.is_some_and(|body| layout.marks(&body).iter().any(is_such)))
    }

    /// Brings in place what a Service wants in a load balancer. Azure takes no change while a public IP in it is not ready: those of
    /// Steerage's are written again, and left out if that does not help.
    pub(crate) async fn write(
        &self,
        balancer: &Shared<BalancerDocument>,
        service: &Key,
        wanted: Intent,
        age: Duration,
    ) -> Result<Written<Balancer>, Error> {
        let written = balancer.write(&*self.calls, service, wanted, age).await;
        if matches!(written, Ok(Written::Done(_))) {
            return written;
        }
        let mut is_lasting = false;
        for path in balancer.not_ready().await.into_keys() {
            match self.public_ips.repair(&*self.calls, &path).await {
                Ok((FailureExtent::GivenUp, Some(owner))) => balancer.document.give_up(&path, &owner),
                Ok((FailureExtent::Lasting, _)) => is_lasting = true,
                Ok(_) => {}
                // What Azure said of the Service's own change matters more.
                Err(error) => return written.and(Err(error)),
            }
        }
        if is_lasting {
            // Whose it is says the condition of that Service.
            return written.and(Err(Error::Unavailable(format!(
                "Azure takes no change of the {}, because the last change of a public IP in it failed. Steerage writes that public IP again, \
                 and after some minutes the load balancer without it. The change of this Service follows then. The condition of the Service \
                 with that public IP has Azure's words.",
                balancer.document.title()
            ))));
        }
        written
    }

    /// The addresses of a Service in a load balancer.
    pub(crate) async fn vips(
        &self,
        balancer: &Shared<BalancerDocument>,
        body: Option<&Balancer>,
        mark: &Mark,
    ) -> Result<BTreeSet<IpAddr>, Error> {
        self.addresses_of(balancer.document.layout.frontends_of(body, mark).into_iter(), RECENT).await
    }

    /// Also returns the frontends that serve.
    async fn follow(
        &self,
        owner: &Owner,
        targets: &GroupTargets,
    ) -> Result<(Outcome, Vec<Part<Frontend>>), Error> {
        let (mut serving, mut place) = (Vec::new(), None);
        let Some(set) = &targets.nodes else { return Ok((Outcome::done(), serving)) };
        let (mark, mut outcome) = (self.mark(owner), Outcome::done());
        let (mut again, mut trouble): (Option<Duration>, Option<Error>) = (None, None);
        for balancer in &self.balancers {
            balancer.document.note_set(set);
            let present = match self.balancer(balancer, Duration::MAX).await {
                Ok(Ok(present)) => present,
                Ok(Err(wait)) => {
                    again = Some(wait);
                    continue;
                }
                // Another one has its name: nothing in it is Steerage's.
                Err(Error::Invalid { .. }) if !self.has_parts(balancer, |of| *of == mark).await? => continue,
                Err(error) => {
                    trouble = trouble.or(Some(error));
                    continue;
                }
            };
            let parts = present.as_ref().map(|body| balancer.document.layout.frontends(body, &mark));
            if parts.is_none_or(|parts| parts.is_empty()) {
                continue;
            }
            balancer.document.note_service(&mark, &owner.service);
            place = place.or(Some(balancer));
            let body = present.iter();
            serving.extend(body.flat_map(|body| balancer.document.layout.serving(body, &mark)));
            let (mut pools, mut without) = (BTreeMap::new(), BTreeMap::new());
            for family in [Family::V4, Family::V6] {
                let own = nodes(set, family, &mut without);
                let pool = set.shared.map_or_else(|| WantedPool::Own(own), WantedPool::Shared);
                pools.insert(family, pool);
            }
            let intent = Intent::Targets(mark.clone(), pools);
            match self.write(balancer, &owner.service, intent, Duration::MAX).await {
                Ok(Written::Again(wait)) => again = Some(wait),
                Ok(Written::Done(_)) => outcome = self.refusals(balancer, set, Vec::new()).await,
                Err(error) => trouble = trouble.or(Some(error)),
            }
        }
        if let Some(error) = trouble {
            return Err(error);
        }
        if let Some(balancer) = place.filter(|_| serving.is_empty()) {
            outcome.incomplete = Some((reasons::REJECTED_BY_PROVIDER, without_rules(balancer)));
        }
        Ok(match again {
            Some(wait) => (Outcome { progress: Progress::Again(wait), ..Outcome::done() }, serving),
            None => (outcome, serving),
        })
    }

    /// A complete outcome with the nodes that cannot be targets, and those that Azure refuses.
    pub(crate) async fn refusals(
        &self,
        balancer: &Shared<BalancerDocument>,
        set: &TargetSet,
        mut refused: Vec<(String, String)>,
    ) -> Outcome {
        let of_azure = balancer.refused(set.targets.iter().flat_map(|target| target.addresses.clone())).await;
        let mut retry_refused = None;
        for target in &*set.targets {
            if let Some(why) = target.addresses.iter().find_map(|address| of_azure.get(address)) {
                refused.push((target.node.clone(), why.clone()));
                retry_refused = Some(steerage_provider_cloud::Refusals::<IpAddr>::FIRST_WAIT);
            }
        }
        Outcome { refused, retry_refused, ..Outcome::done() }
    }

    /// Narrows who may connect. `Err(Busy)` until that is in place.
    async fn restrict(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        let requested = Sources::read(&requested.ranges, &requested.annotations)?;
        let mark = self.mark(owner);
        let (mut vips, mut trouble) = (BTreeSet::new(), None);
        for balancer in &self.balancers {
            let found = match self.balancer(balancer, RECENT).await {
                Ok(Ok(body)) => self.vips(balancer, body.as_ref(), &mark).await,
                Ok(Err(_)) => Err(busy()),
                // Another one has its name: nothing in it is Steerage's.
                Err(Error::Invalid { .. }) if !self.has_parts(balancer, |of| *of == mark).await? => continue,
                Err(error) => Err(error),
            };
            match found {
                Ok(found) => vips.extend(found),
                Err(error) => trouble = trouble.or(Some(error)),
            }
        }
        if vips.is_empty() {
            return trouble.map_or(Ok(None), Err);
        }
        let Some(security_group) = &self.security_group else { return Ok(Some(AdmittedSources::Foreign)) };
        let present = match security_group.read(&*self.calls, Duration::ZERO).await? {
            Written::Again(_) => return Err(busy()),
            Written::Done(body) => body.unwrap_or_default(),
        };
        let wanted = narrowed(&security_group.document.present(&present, &vips), &requested);
        let admitted = wanted.admitted();
        match security_group.write(&*self.calls, &owner.service, wanted, Duration::MAX).await? {
            Written::Again(_) => Err(busy()),
            // The rest of its addresses is not known.
            Written::Done(_) => trouble.map_or(Ok(Some(admitted)), Err),
        }
    }
}

/// The condition of a Service that has addresses, and to which no packet comes.
fn without_rules(balancer: &Shared<BalancerDocument>) -> String {
    format!(
        "The Service has an address and no rules in the {}, so it has no traffic. Azure may have refused the load balancer because of this \
         Service, so that no other one could be changed. It has rules when what refuses it now is corrected.",
        balancer.document.title()
    )
}

fn busy() -> Error {
    Error::Busy("The load balancer is being changed".to_owned())
}

#[async_trait]
impl Provider for Azure {
    fn name(&self) -> &'static str {
        "azure"
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
            weights: false,
            shared_sets: true,
            affinity: true,
            // New connections get no node then.
            fails_open: false,
            health_interval: (Duration::from_secs(5), Duration::from_mins(1)),
        }
    }

    /// The Service without its UID: a Service that is created again replaces what the old one left.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    fn source_annotations(&self) -> &'static [&'static str] {
        &[annotations::ALLOWED_IP_RANGES, annotations::ALLOWED_SERVICE_TAGS, annotations::SOURCE_RANGES]
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let mut entry = self.entry(&lb.owner.service).await;
        let result = match desired(lb, &self.config) {
            Ok(wanted) => {
                entry.kept = None;
                let applied = self.apply_wanted(lb, wanted, &mut entry, compare).await;
                if applied.is_err() {
                    entry.complete = None;
                }
                applied
            }
            Err(error) => Err(error),
        };
        if matches!(result, Err(Error::Invalid { .. } | Error::Denied(_))) {
            self.release(&lb.owner).await;
        }
        result
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        let mut entry = self.entry(&owner.service).await;
        entry.forget_complete();
        let (mut outcome, serving) = self.follow(owner, targets).await?;
        self.publish_kept(owner, &serving, &mut entry, &mut outcome).await;
        Ok(outcome)
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        let mut entry = self.entry(&owner.service).await;
        entry.forget_complete();
        self.restrict(owner, requested).await
    }

    async fn set_shared(&self, set: &TargetSet) -> Result<(), Error> {
        for balancer in &self.balancers {
            balancer.document.note_set(set);
        }
        let (began, mut trouble) = (tokio::time::Instant::now(), None);
        for balancer in &self.balancers {
            loop {
                match balancer.write_common(&*self.calls).await {
                    Ok(Written::Done(_)) => break,
                    // Of another one with its name, no pool is Steerage's.
                    Err(Error::Invalid { .. }) if !self.has_parts(balancer, |_| true).await? => break,
                    Ok(Written::Again(wait)) if began.elapsed() + wait < SET_PATIENCE => {
                        tokio::time::sleep(wait).await;
                    }
                    Ok(Written::Again(_)) => {
                        trouble = trouble.or_else(|| Some(busy()));
                        break;
                    }
                    Err(error) => {
                        trouble = trouble.or(Some(error));
                        break;
                    }
                }
            }
        }
        trouble.map_or(Ok(()), Err)
    }

    /// Azure reports no node's health without metrics.
    fn reports_health(&self) -> bool {
        false
    }

    async fn target_health(&self, _: &Owner) -> Result<Health, Error> {
        Ok(Health::default())
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut entry = self.entry(&owner.service).await;
        entry.kept = None;
        let result = self.delete_all(owner, &mut entry).await;
        // Another incarnation may have changes that run.
        let is_empty = entry.complete.is_none() && entry.operations.is_empty();
        if matches!(result, Ok(Progress::Done)) && is_empty {
            self.services.remove(&owner.service);
        }
        result
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        let mut owners = self.public_ips.owners(&*self.calls).await?;
        for balancer in &self.balancers {
            let body = match balancer.read(&*self.calls, Duration::ZERO).await {
                Ok(Written::Done(Some(body))) => body,
                Ok(Written::Again(_)) => {
                    return Err(busy());
                }
                Ok(Written::Done(None)) => continue,
                // Another one has its name: nothing in it is Steerage's.
                Err(Error::Invalid { .. }) if !self.has_parts(balancer, |_| true).await? => continue,
                Err(error) => return Err(error),
            };
            let listed = marks::listed(&body.tags);
            for mark in balancer.document.layout.marks(&body) {
                owners.extend(listed.iter().filter_map(|service| mark.owner(&self.config.cluster, service)));
            }
        }
        Ok(owners.into_iter().collect())
    }

    /// Only whether it would be refused: what a change is depends on what other Services want.
    async fn preview(&self, lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        desired(lb, &self.config).map(|_| None)
    }

    /// Azure notifies nobody: these are Services that the calls of others left out, or that hold them up.
    fn changes(&self) -> BoxStream<'static, Owner> {
        let all = self.balancers.iter().map(|balancer| balancer.document.to_reconcile.stream());
        stream::select_all(all).boxed()
    }
}
