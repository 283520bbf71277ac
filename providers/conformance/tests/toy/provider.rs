// SPDX-License-Identifier: Apache-2.0
//! A correct provider for the toy cloud, with an optional bug.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use hyper::{Method, StatusCode};
use ipnet::IpNet;
use steerage_model::{Ingress, Key, Protocol};
use steerage_provider_api::{
    Addressing, AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome,
    Owner, Progress, Provider, RequestedSources, Steering, TargetSet, intersection,
};

use super::server::{Fields, Objects, call, line, parse};

/// A violation of one guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    AlwaysWrites,
    ReadsTooMuch,
    RemovesFirst,
    SendsAll,
    OneBadStopsAll,
    KeepsTheLast,
    DeletesBlindly,
    RemembersOwners,
    IgnoresUid,
    DropsFields,
    AdoptsByName,
    SwallowsThrottling,
    CreatesUntracked,
    TrustsItsCache,
    ReplacesInPlace,
    DeletesTheOwnerFirst,
    ForgetsWhatItDid,
    RemembersForEver,
    SetsTargetsOfNothing,
    ReplacesSources,
    RemovesStrangers,
}

pub(crate) struct Toy {
    addr: SocketAddr,
    bug: Option<Bug>,
    made: Mutex<Vec<Owner>>,
    asked: Mutex<Option<LoadBalancer>>,
    /// What the last call completed, and its result.
    complete: Mutex<Option<(LoadBalancer, Outcome)>>,
}

static DRAWN: AtomicU32 = AtomicU32::new(0);

fn lb_name(key: &Key) -> String {
    format!("lb/{}.{}", key.namespace(), key.name())
}

fn target_prefix(key: &Key) -> String {
    format!("target/{}.{}/", key.namespace(), key.name())
}

fn sources<'a>(ranges: impl IntoIterator<Item = &'a IpNet>) -> String {
    ranges.into_iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn wanted(lb: &LoadBalancer) -> Fields {
    let listeners: Vec<_> =
        lb.listeners.iter().map(|l| format!("{}:{}:{:?}", l.protocol, l.port, l.group)).collect();
    [
        ("owner", lb.owner.uid.clone()),
        ("listeners", listeners.join(",")),
        ("sources", sources(&lb.source_ranges)),
        ("interval", lb.groups[0].health_check.interval.as_secs().to_string()),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .into()
}

impl Toy {
    pub(crate) fn new(addr: SocketAddr, bug: Option<Bug>) -> Self {
        Self { addr, bug, made: Mutex::default(), asked: Mutex::default(), complete: Mutex::default() }
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    async fn call(&self, method: Method, name: &str, body: String) -> Result<(StatusCode, String), Error> {
        let (status, body) = call(self.addr, method, name, body).await.map_err(Error::Unavailable)?;
        if status == StatusCode::TOO_MANY_REQUESTS {
            if self.is(Bug::SwallowsThrottling) {
                return Err(Error::Unavailable("429".to_owned()));
            }
            return Err(Error::Throttled { after: Some(Duration::from_secs(1)), message: name.to_owned() });
        }
        Ok((status, body))
    }

    async fn list(&self) -> Result<Objects, Error> {
        Ok(parse(&self.call(Method::GET, "", String::new()).await?.1))
    }

    async fn remove(&self, name: &str) -> Result<(), Error> {
        self.call(Method::DELETE, name, String::new()).await.map(drop)
    }

    /// Another call changes what the last `apply` completed.
    fn forget(&self) {
        if !self.is(Bug::RemembersForEver) {
            *self.complete.lock().unwrap() = None;
        }
    }

    fn owns(&self, fields: &Fields, uid: &str) -> bool {
        self.is(Bug::IgnoresUid) || fields.get("owner").is_some_and(|o| o == uid)
    }

    async fn remove_all(&self, objects: &Objects, key: &Key, uid: &str) -> Result<(), Error> {
        let lb = objects.get(&lb_name(key)).filter(|f| self.owns(f, uid));
        if self.is(Bug::DeletesTheOwnerFirst) {
            if lb.is_none() {
                return Ok(());
            }
            self.remove(&lb_name(key)).await?;
        }
        for (name, fields) in objects {
            if name.starts_with(&target_prefix(key)) && self.owns(fields, uid) {
                self.remove(name).await?;
            }
        }
        if lb.is_some() && !self.is(Bug::DeletesTheOwnerFirst) {
            self.remove(&lb_name(key)).await?;
        }
        Ok(())
    }

    /// Takes what this process has not made for orphans.
    async fn remove_strangers(&self) -> Result<(), Error> {
        let made: Vec<String> =
            self.made.lock().unwrap().iter().map(|owner| lb_name(&owner.service)).collect();
        for name in self.list().await?.keys().filter(|name| name.starts_with("lb/") && !made.contains(name)) {
            self.remove(name).await?;
        }
        Ok(())
    }

    async fn make(&self, lb: &LoadBalancer) -> Result<(), Error> {
        let key = &lb.owner.service;
        let name = lb_name(key);
        let mut objects = self.list().await?;
        if self.is(Bug::ReadsTooMuch) {
            self.list().await?;
        }
        let mut old: BTreeSet<String> = BTreeSet::new();
        for (name, fields) in &objects {
            if let Some(uid) = fields.get("owner").filter(|o| **o != lb.owner.uid)
                && (name.starts_with(&target_prefix(key)) || *name == lb_name(key))
            {
                old.insert(uid.clone());
            }
        }
        if !self.is(Bug::IgnoresUid) && !self.is(Bug::ReplacesInPlace) {
            for uid in old {
                self.remove_all(&objects, key, &uid).await?;
                objects.retain(|_, f| f.get("owner") != Some(&uid));
            }
        }
        let wanted = wanted(lb);
        let Some(found) = objects.get(&name) else {
            if self.is(Bug::CreatesUntracked) {
                let drawn = DRAWN.fetch_add(1, Ordering::Relaxed);
                self.call(Method::POST, &format!("part/{drawn}"), "x=y".to_owned()).await?;
                self.remove(&format!("part/{drawn}")).await?;
            }
            return self.call(Method::POST, &name, line(&wanted)).await.map(drop);
        };
        if !found.contains_key("owner") && !self.is(Bug::AdoptsByName) {
            return Err(Error::invalid("NameTaken", format!("{name} has another owner; delete it")));
        }
        let mut merged = found.clone();
        if self.is(Bug::DropsFields) {
            merged.clear();
        }
        merged.extend(wanted);
        if merged != *found || self.is(Bug::AlwaysWrites) {
            self.call(Method::PUT, &name, line(&merged)).await?;
        }
        if self.is(Bug::ReplacesInPlace) {
            let leftovers = objects.iter().filter(|(n, _)| n.starts_with(&target_prefix(key)));
            for (name, _) in
                leftovers.filter(|(_, f)| found["owner"] != lb.owner.uid && f["owner"] == found["owner"])
            {
                self.remove(name).await?;
            }
        }
        Ok(())
    }

    /// Returns the refused targets.
    async fn put_targets(&self, owner: &Owner, set: &TargetSet) -> Result<Vec<(String, String)>, Error> {
        let objects = self.list().await?;
        let prefix = target_prefix(&owner.service);
        let has = |name: &String| objects.get(name).is_some_and(|f| self.owns(f, &owner.uid));
        let name_of = |node: &str| format!("{prefix}{node}");
        let wanted: BTreeSet<String> = set.targets.iter().map(|t| name_of(&t.node)).collect();
        let mut gone: Vec<&String> =
            objects.keys().filter(|n| n.starts_with(&prefix) && has(n) && !wanted.contains(*n)).collect();
        if self.is(Bug::KeepsTheLast) && wanted.is_empty() {
            gone.pop();
        }
        let changed = !gone.is_empty() || wanted.iter().any(|n| !has(n));
        if self.is(Bug::RemovesFirst) {
            for name in gone.drain(..) {
                self.remove(name).await?;
            }
        }
        let mut refused = Vec::new();
        for target in set.targets.iter() {
            let name = name_of(&target.node);
            let method = match (has(&name), self.is(Bug::SendsAll) && changed) {
                (true, false) => continue,
                (true, true) => Method::PUT,
                (false, _) => Method::POST,
            };
            let address = target.provider_id.as_deref().unwrap_or("bad");
            let body = format!("owner={};addr={address}", owner.uid);
            let (status, _) = self.call(method, &name, body).await?;
            if status == StatusCode::UNPROCESSABLE_ENTITY {
                if self.is(Bug::OneBadStopsAll) {
                    return Err(Error::Unavailable(format!("{name} is bad")));
                }
                refused.push((target.node.clone(), "it has no address".to_owned()));
            }
        }
        for name in gone {
            self.remove(name).await?;
        }
        Ok(refused)
    }
}

#[async_trait]
impl Provider for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            steerings: &[Steering::Api],
            protocols: &[Protocol::Tcp, Protocol::Udp],
            addressing: Addressing::NodePort,
            pod_targets: None,
            node_labels: None,
            shared_load_balancers: false,
            address_pools: false,
            one_target_family: false,
            ipv6: false,
            weights: false,
            shared_sets: false,
            affinity: false,
            fails_open: true,
            health_interval: (Duration::from_secs(1), Duration::from_mins(1)),
        }
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        let outcome = |refused| {
            let hostname = Some(format!("{}.toy", lb.owner.service.name()));
            let ingress = vec![Ingress { ip: None, hostname, ip_mode: None }];
            Outcome { ingress, refused, ..Outcome::done() }
        };
        let asked = self.asked.lock().unwrap().replace(lb.clone());
        let known = if self.is(Bug::ForgetsWhatItDid) { None } else { self.complete.lock().unwrap().take() };
        let known = known.filter(|_| compare == Compare::Remembered);
        if let Some((known, outcome)) = known.as_ref().filter(|(known, _)| known == lb) {
            *self.complete.lock().unwrap() = Some((known.clone(), outcome.clone()));
            return Ok(outcome.clone());
        }
        let known = if self.is(Bug::TrustsItsCache) { asked } else { known.map(|(known, _)| known) };
        if !known.is_some_and(|known| known.has_structure_of(lb)) {
            self.make(lb).await?;
        }
        self.made.lock().unwrap().push(lb.owner.clone());
        if self.is(Bug::RemovesStrangers) {
            self.remove_strangers().await?;
        }
        let outcome = outcome(self.put_targets(&lb.owner, &lb.nodes()).await?);
        *self.complete.lock().unwrap() = Some((lb.clone(), outcome.clone()));
        Ok(outcome)
    }

    async fn set_targets(&self, owner: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        self.forget();
        let exists =
            self.list().await?.get(&lb_name(&owner.service)).is_some_and(|f| self.owns(f, &owner.uid));
        let refused = if exists || self.is(Bug::SetsTargetsOfNothing) {
            self.put_targets(owner, &targets.nodes.clone().unwrap_or_default()).await?
        } else {
            Vec::new()
        };
        Ok(Outcome { refused, ..Outcome::done() })
    }

    async fn restrict_sources(
        &self,
        owner: &Owner,
        requested: &RequestedSources,
    ) -> Result<Option<AdmittedSources>, Error> {
        self.forget();
        let name = lb_name(&owner.service);
        let objects = self.list().await?;
        let Some(found) = objects.get(&name).filter(|found| self.owns(found, &owner.uid)) else {
            return Ok(None);
        };
        let present: Vec<IpNet> =
            found["sources"].split(',').filter_map(|range| range.parse().ok()).collect();
        let mut left = intersection(&present, &requested.ranges);
        if self.is(Bug::ReplacesSources) {
            left = requested.ranges.iter().copied().collect();
        }
        let mut changed = found.clone();
        changed.insert("sources".to_owned(), sources(&left));
        if changed != *found {
            self.call(Method::PUT, &name, line(&changed)).await?;
        }
        Ok(Some(AdmittedSources::Only(left.iter().map(ToString::to_string).collect())))
    }

    async fn target_health(&self, _owner: &Owner) -> Result<Health, Error> {
        Ok(Health::default())
    }

    async fn delete(&self, owner: &Owner) -> Result<Progress, Error> {
        self.forget();
        if self.is(Bug::DeletesBlindly) {
            self.remove(&lb_name(&owner.service)).await?;
        }
        self.remove_all(&self.list().await?, &owner.service, &owner.uid).await?;
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        if self.is(Bug::RemembersOwners) {
            return Ok(self.made.lock().unwrap().clone());
        }
        let mut owners: Vec<Owner> = Vec::new();
        for (name, fields) in self.list().await? {
            let key = name.split('/').nth(1).and_then(|n| n.split_once('.'));
            let (Some((namespace, name)), Some(uid)) = (key, fields.get("owner")) else { continue };
            owners.push(Owner { service: Key::new(namespace, name), uid: uid.clone() });
        }
        owners.sort();
        owners.dedup();
        Ok(owners)
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        futures::stream::pending().boxed()
    }
}
