// SPDX-License-Identifier: Apache-2.0
//! The provider: remembers the resources of each Service and reconciles them. The controller calls it. It never waits until Octavia
//! finishes a change; the controller calls again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use http::Method;
use ipnet::IpNet;
use serde_json::Value;
use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, RequestedSources, Steering, TargetSet,
};
use steerage_provider_cloud::shared::LoadBalancerUse;
use steerage_provider_cloud::{ApiMetrics, Keyed};
use tokio::time::Instant;

use crate::address::Used;
use crate::adoption::is_part;
use crate::apply::{Present, again, kept_in_error, refusals};
use crate::client::{Api, Call, Calls, Client};
use crate::config::{Config, Driver};
use crate::credentials::{Credentials, CredentialsError};
use crate::desired::{Members, Nodes, desired, members};
use crate::diff::{after, diff, member_step};
use crate::health::HEALTH_POLL_UNDECIDED;
use crate::node_rules_sync::{RulesState, SharedNeeds};
use crate::paced::Paced;
use crate::port_waiters::PortWaiters;
use crate::reads::Reads;
use crate::reasons;
use crate::replacement::preference;
use crate::replacement_turns::ReplacementTurns;
use crate::restrict::Restricted;
use crate::shared_users::SharedUsers;
use crate::state::{ServiceState, Tree};
use crate::types::{Balancer, Provisioning};
use crate::{marks, observe};

/// The oldest version of Octavia's API with all that Steerage needs: HTTP monitors of UDP pools came last.
const OLDEST_VERSION: (u32, u32) = (2, 16);

/// The OpenStack provider.
pub struct OpenStack {
    pub(crate) config: Config,
    pub(crate) calls: Arc<dyn Calls>,
    services: Keyed<Key, ServiceState>,
    /// The newest version of Octavia's API, once it was read.
    version: OnceLock<(u32, u32)>,
    /// One for each shared load balancer: its Services change it one after the other.
    pub(crate) shared_locks: Keyed<String, ()>,
    /// When the creation of a shared load balancer was sent that has no answer.
    pub(crate) shared_creations: Mutex<BTreeMap<String, Instant>>,
    pub(crate) shared_users: SharedUsers,
    port_waiters: PortWaiters,
    /// The addresses of subnets, which do not change.
    pub(crate) cidrs: tokio::sync::Mutex<BTreeMap<String, IpNet>>,
    /// Held while rules of the nodes' security group are removed.
    pub(crate) shared_needs: tokio::sync::Mutex<SharedNeeds>,
    /// Which Service's load balancer is replaced.
    replacement_turns: Mutex<ReplacementTurns>,
    pub(crate) reads: Reads,
}

impl OpenStack {
    /// Notes the shared load balancer that the Service uses, or is to use. The address of the one before may have to go.
    fn set_shared(&self, owner: &Owner, shared: Option<&str>, entry: &mut ServiceState) {
        if let Some(left) = self.shared_users.set(&owner.service, shared) {
            entry.left_shared.get_or_insert(left);
            entry.complete = None;
        }
        if shared.is_some() && entry.shared() == shared {
            self.shared_users.note_accepted(&owner.service);
        }
    }

    /// Has the Services reconciled that wait for a port which this one had.
    pub(crate) fn reconcile_waiting(&self, owner: &Owner, entry: &mut ServiceState) {
        if let Some(shared) = entry.freed_port_of.take() {
            self.port_waiters.port_freed(&shared, owner);
        }
    }

    /// A provider that keeps to the rate which the cloud takes.
    ///
    /// # Errors
    ///
    /// If the file with the authority's certificates cannot be used.
    pub fn connect(
        config: Config,
        credentials: Credentials,
        metrics: ApiMetrics,
    ) -> Result<Self, CredentialsError> {
        let client = Client::new(credentials, metrics.clone())?;
        Ok(Self::over(config, Arc::new(Paced::new(Arc::new(client), metrics))))
    }

    /// A provider that limits no rate, for tests.
    ///
    /// # Errors
    ///
    /// If the file with the authority's certificates cannot be used.
    pub fn unlimited(
        config: Config,
        credentials: Credentials,
        metrics: ApiMetrics,
    ) -> Result<Self, CredentialsError> {
        Ok(Self::over(config, Arc::new(Client::new(credentials, metrics)?)))
    }

    pub(crate) fn over(config: Config, calls: Arc<dyn Calls>) -> Self {
        Self {
            config,
            calls,
            services: Keyed::default(),
            version: OnceLock::new(),
            shared_locks: Keyed::default(),
            shared_creations: Mutex::default(),
            shared_users: SharedUsers::default(),
            port_waiters: PortWaiters::default(),
            cidrs: tokio::sync::Mutex::default(),
            shared_needs: tokio::sync::Mutex::default(),
            replacement_turns: Mutex::default(),
            reads: Reads::default(),
        }
    }

    /// Logs in and reads the version of Octavia. [`Error::Denied`] if Keystone does not accept the credentials, [`Error::Invalid`] if
    /// Octavia is too old: then nothing would work.
    pub async fn check(&self) -> Result<(), Error> {
        let newest = self.version().await?;
        if newest.is_some_and(|newest| newest < OLDEST_VERSION) {
            let ((major, minor), (at_least, and)) = (newest.unwrap_or_default(), OLDEST_VERSION);
            let message = format!(
                "Octavia has API version {major}.{minor}; Steerage needs {at_least}.{and}. Upgrade Octavia."
            );
            return Err(Error::invalid(crate::reasons::REJECTED_BY_PROVIDER, message));
        }
        // The right to read load balancers is another one.
        observe::balancers(&*self.calls, &self.config.cluster, Some(&Key::new("", ""))).await?;
        Ok(())
    }

    /// The newest version of Octavia's API, read once.
    pub(crate) async fn version(&self) -> Result<Option<(u32, u32)>, Error> {
        if let Some(known) = self.version.get() {
            return Ok(Some(*known));
        }
        let (api, action) = (Api::LoadBalancer, "GET versions");
        let call =
            Call { api, action, method: Method::GET, path: "/".to_owned(), body: None, if_match: None };
        let newest = newest_version(&self.calls.send(call).await?);
        Ok(newest.map(|newest| *self.version.get_or_init(|| newest)))
    }

    /// Whether this Service's load balancer may be replaced. If many are in `ERROR`, the cloud has a problem that new ones have too.
    pub(crate) fn may_replace(&self, service: &Key) -> bool {
        self.replacement_turns.lock().unwrap_or_else(PoisonError::into_inner).may_begin(service)
    }

    /// The Service must not replace its load balancer now.
    pub(crate) fn forgo_replacement(&self, service: &Key) {
        self.replacement_turns.lock().unwrap_or_else(PoisonError::into_inner).forgo(service);
    }

    /// The Service's load balancer is complete, or gone.
    pub(crate) fn end_replacement(&self, service: &Key) {
        self.replacement_turns.lock().unwrap_or_else(PoisonError::into_inner).end(service);
    }

    async fn entry(&self, service: &Key) -> tokio::sync::OwnedMutexGuard<ServiceState> {
        self.services.lock(service, ServiceState::default).await
    }

    /// The members that the pools in place should have, by ID, and the nodes that cannot be members.
    fn wanted_members(
        &self,
        owner: &Owner,
        tree: &Tree,
        nodes: &TargetSet,
    ) -> (BTreeMap<String, Members>, Vec<(String, String)>) {
        let families = tree.balancer.families();
        let count = if self.config.driver() == Driver::Ovn { families.len() } else { 1 };
        let (mut pools, mut refused) = (BTreeMap::new(), BTreeMap::new());
        for pool in tree.pools.iter().filter(|pool| is_part(owner, &tree.balancer, &pool.name, &pool.tags)) {
            let Some(ports) = marks::pool_ports(&pool.tags) else { continue };
            let subnet = |family: Family| {
                let mut of_family = pool.members.iter().filter(|member| Family::of(member.address) == family);
                let subnet = of_family.find_map(|member| member.subnet_id.as_deref());
                subnet.unwrap_or_else(|| self.config.nodes_subnet(family))
            };
            // In a shared load balancer, the Service's first family may be another one than the first VIP's.
            let present =
                pool.members.first().map(|member| Family::of(member.address)).filter(|_| count == 1);
            let families = present.map_or_else(|| families.clone(), |family| vec![family]);
            let reached: Vec<(Family, &str)> =
                families.iter().take(count).map(|family| (*family, subnet(*family))).collect();
            let members = members(nodes, ports, &reached, self.config.driver(), &mut refused);
            pools.insert(pool.id.clone(), members);
        }
        (pools, refused.into_iter().collect())
    }

    async fn follow(
        &self,
        owner: &Owner,
        targets: &GroupTargets,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        if entry.is_old() && entry.changing.is_none() {
            // While the structure is refused, nothing else looks at it.
            entry.forget();
        }
        let tree = match self.present(owner, entry, None).await? {
            Present::Nothing => return Ok(Outcome::done()),
            Present::Busy => return Ok(again(entry, self)),
            Present::Broken(balancer) => return Err(kept_in_error(&balancer, "members")),
            Present::Ready(tree) => tree,
        };
        let Some(nodes) = &targets.nodes else { return Ok(Outcome::done()) };
        let (wanted, refused) = self.wanted_members(owner, &tree, nodes);
        let names: Nodes = wanted
            .values()
            .flat_map(Members::values)
            .map(|member| (member.address, member.name.clone()))
            .collect();
        entry.refused.retain(|address| names.contains_key(address));
        let last = entry.last_pool.clone();
        loop {
            let mut pools = after(&tree.pools, last.as_deref(), |pool| &pool.name);
            let next = pools.find_map(|pool| {
                let mut members = wanted.get(&pool.id)?.clone();
                members.retain(|(address, _), _| !entry.refused.must_wait(address));
                let step = member_step(pool, &members)?;
                Some(if entry.is_at_member_quota() { step.without_others(&members) } else { step })
            });
            let Some(step) = next else {
                if !self.is_carried_out(owner, &tree.balancer.id, entry).await? {
                    return Ok(again(entry, self));
                }
                self.reconcile_waiting(owner, entry);
                return Ok(refusals(&names, refused, entry));
            };
            if self.make(&step, entry, &names).await? {
                return Ok(again(entry, self));
            }
        }
    }
}

/// The newest version in the answer of an API's root.
fn newest_version(answer: &Value) -> Option<(u32, u32)> {
    let versions = answer.get("versions")?.as_array()?;
    let read = |version: &Value| {
        let (major, minor) = version.get("id")?.as_str()?.strip_prefix('v')?.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    versions.iter().filter_map(read).max()
}

/// What was known may be wrong after a failure, unless the cloud only had too many requests.
fn noted<T>(result: Result<T, Error>, entry: &mut ServiceState) -> Result<T, Error> {
    if let Err(error) = &result
        && !matches!(error, Error::Throttled { .. })
    {
        entry.forget();
        entry.rules = RulesState::Unknown;
    }
    result
}

#[async_trait]
impl Provider for OpenStack {
    fn name(&self) -> &'static str {
        "openstack"
    }

    fn capabilities(&self) -> Capabilities {
        let is_proxy = self.config.driver() == Driver::Amphora;
        Capabilities {
            // OVN cannot ask a node for HTTP status.
            steerings: if is_proxy { &[Steering::Api, Steering::HealthCheck] } else { &[Steering::Api] },
            protocols: &[Protocol::Tcp, Protocol::Udp],
            addressing: Addressing::NodePort,
            pod_targets: None,
            node_labels: Some(crate::annotations::NODE_SELECTOR),
            shared_load_balancers: true,
            address_pools: false,
            ipv6: true,
            // OVN translates addresses within a family.
            one_target_family: is_proxy,
            weights: is_proxy,
            shared_sets: false,
            affinity: is_proxy,
            // Amphorae refuse connections then, and OVN drops them.
            fails_open: false,
            health_interval: (Duration::from_secs(3), Duration::from_mins(5)),
        }
    }

    /// The Service without its UID: a Service that is created again replaces what the old one left.
    fn serialization_key(&self, owner: &Owner) -> String {
        owner.service.to_string()
    }

    fn source_annotations(&self) -> &'static [&'static str] {
        &[crate::annotations::SOURCE_RANGES]
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let wanted = desired(lb, &self.config)?;
        let mut entry = self.entry(&lb.owner.service).await;
        let result = if let Some(shared) = wanted.shared.clone() {
            self.set_shared(&lb.owner, Some(&shared), &mut entry);
            // Before it is refused: the port may become free in the same moment.
            self.port_waiters.wait_for(&lb.owner, &shared);
            let applied = self.apply_shared(&shared, lb, wanted, &mut entry, compare).await;
            if entry.shared() != Some(shared.as_str()) && matches!(applied, Err(Error::Invalid { .. })) {
                let used = entry.shared().map(ToOwned::to_owned);
                self.set_shared(&lb.owner, used.as_deref(), &mut entry);
                // Whoever deleted the load balancer meanwhile left the address to this Service, which may stay refused.
                self.try_release_left(&lb.owner, used.as_deref(), &mut entry).await;
            }
            if !applied.as_ref().is_err_and(|error| error.reason() == reasons::PORT_IN_USE) {
                self.port_waiters.stop_waiting(&lb.owner);
            }
            applied
        } else {
            if entry.shared().is_some() {
                entry.usage = LoadBalancerUse::Own;
                entry.forget();
            }
            self.port_waiters.stop_waiting(&lb.owner);
            let applied = self.apply_wanted(lb, wanted, &mut entry, compare).await;
            if applied.is_ok() {
                // Only now: with ports in a shared load balancer the Service would have been refused.
                self.set_shared(&lb.owner, None, &mut entry);
            }
            applied
        };
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
            Restricted::Again => Err(Error::Busy("The load balancer is being changed".to_owned())),
        }
    }

    async fn target_health(&self, owner: &Owner) -> Result<Health, Error> {
        let entry = self.entry(&owner.service).await;
        let mut health = self.read_health(owner, &entry).await?;
        // A load balancer that is not there now will be.
        health.due.get_or_insert(HEALTH_POLL_UNDECIDED);
        Ok(health)
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        let mut entry = self.entry(&owner.service).await;
        self.port_waiters.stop_waiting(owner);
        if let Some(shared) = self.shared_users.set(&owner.service, None) {
            entry.left_shared.get_or_insert(shared);
        }
        let result = self.delete_all(owner, &mut entry).await;
        let result = noted(result, &mut entry);
        if matches!(result, Ok(Progress::Done)) {
            self.end_replacement(&owner.service);
        }
        if matches!(result, Ok(Progress::Done)) && entry.tree.is_none() {
            self.services.remove(&owner.service);
        }
        result
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        let cluster = &self.config.cluster;
        let balancers = observe::balancers(&*self.calls, cluster, None).await?;
        let mut owners: BTreeSet<Owner> = balancers.into_iter().map(|(owner, _)| owner).collect();
        let ips = self.floating_ips(&[]).await?;
        owners.extend(ips.iter().filter_map(|ip| marks::floating_owner(cluster, &ip.description)));
        owners.extend(self.rule_owners().await?);
        owners.extend(self.part_owners().await?);
        Ok(owners.into_iter().collect())
    }

    async fn preview(&self, lb: &LoadBalancer) -> Result<Option<Vec<String>>, Error> {
        let wanted = desired(lb, &self.config)?;
        let all = match &wanted.shared {
            Some(shared) => {
                let found = self.shared_by_preference(shared).await?;
                found.into_iter().take(1).map(|balancer| (lb.owner.clone(), balancer)).collect()
            }
            None => self.balancers_of(&lb.owner.service).await?,
        };
        let (mine, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(owner, _)| *owner == lb.owner);
        let mut lines: Vec<String> = others
            .iter()
            .map(|(_, old)| format!("load balancer {} of an earlier Service: deleted", old.id))
            .collect();
        let mark = self.floating_mark(&lb.owner, wanted.shared.as_deref());
        let mut ours = self.own_floating_ips(&mark).await?;
        let mut mine: Vec<Balancer> = mine.into_iter().map(|(_, balancer)| balancer).collect();
        mine.sort_by_key(|balancer| preference(balancer, &lb.published, &ours));
        let mut mine = mine.into_iter();
        let Some(balancer) = mine.next() else {
            return Ok(self.preview_adoption(lb, &wanted).await?.map(|line| vec![line]));
        };
        ours.extend(self.adopted_ips(&lb.owner, &balancer).await?);
        let others: Vec<Balancer> = mine.collect();
        lines.extend(others.iter().map(|other| format!("load balancer {}, a second one: deleted", other.id)));
        match balancer.provisioning_status {
            Provisioning::Pending | Provisioning::Deleting => return Ok(None),
            Provisioning::Error => lines.push(format!("load balancer {} in ERROR: replaced", balancer.id)),
            Provisioning::Active => {
                let tree = self.tree(&lb.owner, balancer.clone()).await?;
                let wanted = wanted.clone().for_families(&balancer.families());
                lines.extend(diff(&lb.owner, &tree, &wanted, None)?.iter().map(ToString::to_string));
            }
        }
        let plan = self.plan_address(lb, &wanted, &balancer, ours, &others, None).await?;
        match plan.used {
            Used::New { .. } => lines.push("floating IP: created".to_owned()),
            Used::Existing(ip) if ip.port_id.as_deref() != Some(balancer.floating_port()) => {
                lines.push(format!("floating IP {}: attached", ip.address));
            }
            Used::Vip | Used::Existing(_) => {}
        }
        lines.extend(plan.dropped.iter().map(|ip| format!("floating IP {}: deleted", ip.address)));
        Ok(Some(lines))
    }

    /// Octavia notifies nobody: these are Services that another one of this process calls.
    fn changes(&self) -> BoxStream<'static, Owner> {
        self.port_waiters.to_reconcile.stream()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    #[test]
    fn newest_version_is_the_highest() {
        let answer =
            json!({ "versions": [{ "id": "v1" }, { "id": "v2.9" }, { "id": "v2.30" }, { "id": "v2.4" }] });
        assert_eq!(newest_version(&answer), Some((2, 30)));
        assert_eq!(newest_version(&json!({})), None);
    }

    /// Each change finds the endpoints moved again: all ports have their turn.
    #[tokio::test(start_paused = true)]
    async fn targets_of_all_ports_follow() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let ports = [(Protocol::Tcp, 80, 30080), (Protocol::Tcp, 443, 30443), (Protocol::Tcp, 81, 30081)];
        settle(&provider, &planned(&ports, &[1])).await.unwrap();
        for by_apply in [true, false] {
            let mut changed = BTreeSet::new();
            for round in 0..3_u8 {
                let lb = planned(&ports, &[1, 10 + round + u8::from(by_apply)]);
                let before = cloud.all("pools");
                while cloud.all("pools") == before {
                    if by_apply {
                        provider.apply(&lb, Compare::Remembered).await.unwrap();
                    } else {
                        let targets = GroupTargets::of_nodes(lb.nodes().clone());
                        provider.set_targets(&lb.owner, &targets).await.unwrap();
                    }
                }
                let after = cloud.all("pools");
                let differing = before.iter().zip(&after).filter(|(one, other)| one != other);
                changed.extend(differing.map(|(_, pool)| pool["name"].to_string()));
            }
            assert_eq!(changed.len(), 3, "{changed:?}");
        }
    }

    /// The controller gives a call up after a while.
    #[tokio::test(start_paused = true)]
    async fn abandoned_call_is_not_remembered_as_if_it_had_not_been() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let ports = [(Protocol::Tcp, 80, 30080)];
        let (before, changed) = (planned(&ports, &[1, 2]), planned(&ports, &[1]));
        settle(&provider, &before).await.unwrap();
        cloud.hang("PUT members");
        let abandoned = provider.apply(&changed, Compare::Remembered);
        assert!(tokio::time::timeout(Duration::from_mins(1), abandoned).await.is_err());
        settle(&provider, &before).await.unwrap();
        assert_eq!(cloud.all("pools")[0]["members"].as_array().unwrap().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_others_change_is_repaired_also_where_only_targets_follow() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let ports = [(Protocol::Tcp, 80, 30080)];
        let lb = planned(&ports, &[1, 2]);
        settle(&provider, &planned(&ports, &[1])).await.unwrap();
        let follow = async || {
            let targets = GroupTargets::of_nodes(lb.nodes().clone());
            while provider.set_targets(&lb.owner, &targets).await.unwrap().progress != Progress::Done {}
        };
        follow().await;
        let pool = cloud.all("pools")[0].clone();
        let spoil = |changes: serde_json::Value| {
            cloud.set("pools", ("id", pool["id"].as_str().unwrap()), &changes);
        };
        spoil(json!({ "members": [] }));
        cloud.calls();
        follow().await;
        assert!(cloud.calls().is_empty(), "not at once");
        tokio::time::advance(Duration::from_mins(10)).await;
        follow().await;
        assert_eq!(cloud.all("pools")[0]["members"].as_array().unwrap().len(), 2);
        // The next resync looks at all, although the last change was of targets alone.
        spoil(json!({ "lb_algorithm": "SOURCE_IP" }));
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        settle(&provider, &lb).await.unwrap();
        assert_eq!(cloud.all("pools")[0]["lb_algorithm"], json!("ROUND_ROBIN"));
    }

    #[tokio::test(start_paused = true)]
    async fn sources_are_taken_away_from_what_there_is() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let ports = [(Protocol::Tcp, 80, 30080), (Protocol::Tcp, 443, 30443)];
        let lb = planned(&ports, &[1]);
        settle(&provider, &lb).await.unwrap();
        let read =
            provider.source_annotations().iter().map(|name| ((*name).to_owned(), "10.0.0.0/8".to_owned()));
        let requested = RequestedSources { ranges: Vec::new(), annotations: read.collect() };
        // Somebody deletes a listener, and nobody told.
        let gone = cloud.all("listeners")[0]["id"].as_str().unwrap().to_owned();
        cloud.remove("listeners", &gone);
        let restrict = async || {
            for _ in 0..10 {
                match provider.restrict_sources(&lb.owner, &requested).await {
                    Err(Error::Busy(_)) => {}
                    result => return result.unwrap(),
                }
            }
            panic!("it does not end");
        };
        let only = Some(AdmittedSources::Only(["10.0.0.0/8".to_owned()].into()));
        assert_eq!(restrict().await, only);
        // Somebody admits everybody.
        let kept = cloud.all("listeners")[0]["id"].as_str().unwrap().to_owned();
        cloud.set("listeners", ("id", &kept), &json!({ "allowed_cidrs": null }));
        cloud.writes();
        assert_eq!(restrict().await, only);
        assert_eq!(cloud.writes(), ["PUT listeners"]);
    }

    /// An administrator's credentials show the load balancers of all projects.
    #[tokio::test(start_paused = true)]
    async fn other_projects_are_out_of_reach() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        settle(&provider, &lb).await.unwrap();
        assert_eq!(provider.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
        for kind in ["loadbalancers", "floatingips"] {
            cloud.set(kind, ("project_id", "p1"), &json!({ "project_id": "p2" }));
        }
        cloud.writes();
        let restarted = cloud.provider();
        assert_eq!(restarted.owned().await.unwrap(), []);
        assert_eq!(restarted.delete(&lb.owner).await.unwrap(), Progress::Done);
        assert!(cloud.writes().is_empty());
    }
}
