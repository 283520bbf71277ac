// SPDX-License-Identifier: Apache-2.0
//! The plans of all Services together: which Service owns a frontend that several have, and how many Services still need a
//! shared address or timeout. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::Key;

use super::{
    Action, Frontend, HealthPort, HealthPorts, Omitted, Reduced, ReducedService, Refusal, RefusedExternalIp,
    Role, ServicePlan,
};

/// Services that a frontend's owner leaves without it, and that are named.
const NAMED: usize = 8;

/// What the node should do, updated Service by Service.
#[derive(Debug, Clone, Default)]
pub struct Desired {
    services: BTreeMap<Key, ServiceRecord>,
    /// The Services with a frontend, sorted by role, age and key, each with its action. The first one owns it: all nodes agree.
    owners: BTreeMap<Frontend, Vec<(Key, Action)>>,
    /// Where no external IP is served, with the Services whose health-check port or assigned frontend is there.
    reserved: BTreeMap<Frontend, Vec<Key>>,
    /// What [`Desired::take_shadowed`] will return.
    shadowed: BTreeSet<Shadowed>,
    shadowed_count: usize,
    /// What [`Desired::take_refused`] will return.
    refused: BTreeSet<RefusedExternalIp>,
    refused_count: usize,
    /// What [`Desired::take_reduced`] will return.
    reduced: BTreeSet<ReducedService>,
    reduced_count: usize,
    cluster_addresses: Counted<IpAddr>,
    hairpins: Counted<IpAddr>,
}

/// A Service's plan without the actions, which are stored once, with the frontends.
#[derive(Debug, Clone)]
struct ServiceRecord {
    frontends: Box<[Frontend]>,
    cluster_addresses: Box<[IpAddr]>,
    hairpins: Box<[IpAddr]>,
    health: Option<HealthPort>,
    reserved: Box<[Frontend]>,
    refused: Box<[(IpAddr, Refusal)]>,
    reduced: Option<Reduced>,
}

/// A Service that is not served at one of its frontends, because another Service owns it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shadowed {
    /// The Service that is not served.
    pub service: Key,
    /// The owner.
    pub by: Key,
    /// The first such frontend.
    pub frontend: Frontend,
}

/// What an update may change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affected {
    /// Frontends.
    pub frontends: BTreeSet<Frontend>,
    /// Cluster addresses.
    pub cluster_addresses: BTreeSet<IpAddr>,
    /// Endpoints on this node.
    pub hairpins: BTreeSet<IpAddr>,
    /// Services whose endpoints may change.
    pub services: BTreeSet<Key>,
}

impl Desired {
    /// The frontends of the old and the new plans of these Services; one may come twice.
    pub fn frontends_of<'a>(
        &'a self,
        updates: &'a BTreeMap<Key, ServicePlan>,
    ) -> impl Iterator<Item = Frontend> + 'a {
        updates.iter().flat_map(|(key, new)| {
            let old = self.services.get(key).into_iter();
            old.flat_map(|old| old.frontends.iter().chain(&old.reserved))
                .copied()
                .chain(new.frontends.iter().map(|(frontend, _)| *frontend))
                .chain(new.reserved.iter().copied())
        })
    }

    /// The frontends of a Service.
    pub fn frontends(&self, service: &Key) -> &[Frontend] {
        self.services.get(service).map_or(&[], |record| &record.frontends)
    }

    /// The plan of a Service as it is, without what it omits; an empty one if there is none.
    pub fn plan(&self, service: &Key) -> ServicePlan {
        let Some(record) = self.services.get(service) else { return ServicePlan::default() };
        let action = |frontend: &Frontend| {
            let (_, action) = self.owners.get(frontend)?.iter().find(|(owner, _)| owner == service)?;
            Some((*frontend, action.clone()))
        };
        ServicePlan {
            frontends: record.frontends.iter().filter_map(action).collect(),
            cluster_addresses: record.cluster_addresses.to_vec(),
            hairpins: record.hairpins.to_vec(),
            health: record.health.clone(),
            reserved: record.reserved.to_vec(),
            refused: record.refused.to_vec(),
            omitted: Omitted::default(),
            reduced: record.reduced,
        }
    }

    /// Everything whose elements [`Desired::update`] with the same plans may change.
    pub fn affected_by(&self, updates: &BTreeMap<Key, ServicePlan>) -> Affected {
        let mut affected = Affected {
            frontends: self.frontends_of(updates).collect(),
            services: updates.keys().cloned().collect(),
            ..Affected::default()
        };
        for (key, new) in updates {
            if let Some(old) = self.services.get(key) {
                affected.cluster_addresses.extend(&old.cluster_addresses);
                affected.hairpins.extend(&old.hairpins);
            }
            affected.cluster_addresses.extend(&new.cluster_addresses);
            affected.hairpins.extend(&new.hairpins);
        }
        affected
    }

    /// Replaces the plans of some Services. An empty plan removes the Service.
    pub fn update(&mut self, updates: BTreeMap<Key, ServicePlan>) {
        let frontends: BTreeSet<Frontend> = self.frontends_of(&updates).collect();
        let before = self.shadowed_at(&frontends);
        self.shadowed_count -= self.unserved_claims(&frontends);
        self.replace(updates);
        self.shadowed_count += self.unserved_claims(&frontends);
        let new = self.shadowed_at(&frontends).into_iter().filter(|(pair, _)| !before.contains_key(pair));
        let shadowed = new.map(|((service, by), frontend)| Shadowed { service, by, frontend });
        self.shadowed.extend(shadowed);
    }

    /// The Services that an update left without a frontend of theirs since the last call, each pair of Services once.
    pub fn take_shadowed(&mut self) -> BTreeSet<Shadowed> {
        std::mem::take(&mut self.shadowed)
    }

    /// The number of frontends of Services that are not served, because another Service is served there.
    pub fn shadowed_count(&self) -> usize {
        self.shadowed_count
    }

    fn unserved_claims(&self, frontends: &BTreeSet<Frontend>) -> usize {
        let unserved = |frontend: &Frontend| {
            let claims = self.owners.get(frontend)?;
            Some(claims.len() - usize::from(self.served(frontend, claims).is_some()))
        };
        frontends.iter().filter_map(unserved).sum()
    }

    /// The external IPs that updates refused since the last call.
    pub fn take_refused(&mut self) -> BTreeSet<RefusedExternalIp> {
        std::mem::take(&mut self.refused)
    }

    /// The Services that updates reduced, or reduced otherwise, since the last call.
    pub fn take_reduced(&mut self) -> BTreeSet<ReducedService> {
        std::mem::take(&mut self.reduced)
    }

    /// The number of Services that are reduced.
    pub fn reduced_count(&self) -> usize {
        self.reduced_count
    }

    /// How a Service is reduced.
    pub fn reduced(&self, key: &Key) -> Option<Reduced> {
        self.services.get(key)?.reduced
    }

    /// The number of external IPs that are refused.
    pub fn refused_count(&self) -> usize {
        self.refused_count
    }

    /// The Services that are not served at one of these frontends and their owners, each pair with its first frontend. Only the first
    /// few of a frontend: thousands may name one address.
    fn shadowed_at(&self, frontends: &BTreeSet<Frontend>) -> BTreeMap<(Key, Key), Frontend> {
        let mut found = BTreeMap::new();
        for frontend in frontends {
            let Some(claims) = self.owners.get(frontend) else { continue };
            let reserved_by = self.reserved_by(frontend, claims);
            let (by, losers) = match (reserved_by, claims.split_first()) {
                (Some(by), _) => (by, claims.as_slice()),
                (None, Some(((by, _), losers))) => (by, losers),
                (None, None) => continue,
            };
            for (loser, _) in losers.iter().take(NAMED) {
                found.entry((loser.clone(), by.clone())).or_insert(*frontend);
            }
        }
        found
    }

    /// The Service whose health checks or traffic would get lost if these claims to a frontend were served. A Service's own external
    /// IP does the same harm as that of another.
    fn reserved_by(&self, frontend: &Frontend, claims: &[(Key, Action)]) -> Option<&Key> {
        let (_, first) = claims.first()?;
        if first.role != Role::ExternalIp {
            return None;
        }
        self.reserved.get(frontend)?.first()
    }

    fn replace(&mut self, updates: BTreeMap<Key, ServicePlan>) {
        for (key, new) in updates {
            let old = self.services.remove(&key);
            if let Some(old) = &old {
                self.refused_count -= old.refused.len();
                self.reduced_count -= usize::from(old.reduced.is_some());
                old.frontends.iter().for_each(|frontend| self.remove_owner(frontend, &key));
                old.cluster_addresses.iter().for_each(|addr| self.cluster_addresses.remove(addr));
                old.hairpins.iter().for_each(|addr| self.hairpins.remove(addr));
                old.reserved.iter().for_each(|frontend| self.remove_reserved(frontend, &key));
            }
            if new == ServicePlan::default() {
                continue;
            }
            let record = ServiceRecord {
                frontends: new.frontends.iter().map(|(frontend, _)| *frontend).collect(),
                cluster_addresses: new.cluster_addresses.into(),
                hairpins: new.hairpins.into(),
                health: new.health,
                reserved: new.reserved.into(),
                refused: new.refused.into(),
                reduced: new.reduced,
            };
            let (before, old_reduced) = old.map(|old| (old.refused, old.reduced)).unwrap_or_default();
            self.reduced_count += usize::from(record.reduced.is_some());
            if let Some(reduced) = record.reduced.filter(|reduced| old_reduced.as_ref() != Some(reduced)) {
                self.reduced.insert(ReducedService { service: key.clone(), reduced });
            }
            let refused = record.refused.iter().filter(|refused| !before.contains(refused));
            self.refused.extend(refused.map(|(addr, refusal)| RefusedExternalIp {
                service: key.clone(),
                addr: *addr,
                refusal: *refusal,
            }));
            self.refused_count += record.refused.len();
            for (frontend, action) in new.frontends {
                self.add_owner(frontend, &key, action);
            }
            record.cluster_addresses.iter().for_each(|addr| self.cluster_addresses.add(*addr));
            record.hairpins.iter().for_each(|addr| self.hairpins.add(*addr));
            for frontend in &record.reserved {
                self.reserved.entry(*frontend).or_default().push(key.clone());
            }
            self.services.insert(key, record);
        }
    }

    fn add_owner(&mut self, frontend: Frontend, by: &Key, action: Action) {
        let owners = self.owners.entry(frontend).or_insert_with(|| Vec::with_capacity(1));
        let at = owners.partition_point(|(owner, other)| {
            (other.role, other.created, owner) < (action.role, action.created, by)
        });
        owners.insert(at, (by.clone(), action));
    }

    fn remove_reserved(&mut self, frontend: &Frontend, by: &Key) {
        let Some(keys) = self.reserved.get_mut(frontend) else { return };
        keys.retain(|key| key != by);
        if keys.is_empty() {
            self.reserved.remove(frontend);
        }
    }

    fn remove_owner(&mut self, frontend: &Frontend, by: &Key) {
        let Some(owners) = self.owners.get_mut(frontend) else { return };
        if let Some(at) = owners.iter().position(|(owner, _)| owner == by) {
            owners.remove(at);
        }
        if owners.is_empty() {
            self.owners.remove(frontend);
        }
    }

    /// What happens to packets to a frontend.
    pub fn action(&self, frontend: &Frontend) -> Option<&Action> {
        self.served_at(frontend).map(|(_, action)| action)
    }

    /// The Service that is served at a frontend, and what happens to packets to it.
    pub fn served_at(&self, frontend: &Frontend) -> Option<&(Key, Action)> {
        self.served(frontend, self.owners.get(frontend)?)
    }

    /// The claim that is served, if any may be.
    fn served<'a>(&self, frontend: &Frontend, claims: &'a [(Key, Action)]) -> Option<&'a (Key, Action)> {
        claims.first().filter(|_| self.reserved_by(frontend, claims).is_none())
    }

    /// The Service whose health-check port or assigned frontend is here, in place of an external IP.
    pub fn reserved_at(&self, frontend: &Frontend) -> Option<&Key> {
        self.reserved.get(frontend)?.first()
    }

    /// The Services with this frontend; the first one owns it.
    pub fn owners(&self, frontend: &Frontend) -> impl Iterator<Item = &Key> {
        self.owners.get(frontend).into_iter().flatten().map(|(key, _)| key)
    }

    /// The number of frontends.
    pub fn frontend_count(&self) -> usize {
        self.owners.len()
    }

    /// All frontends in order, each with its Service and action.
    pub fn actions(&self) -> impl Iterator<Item = (&Frontend, &(Key, Action))> {
        self.owners.iter().filter_map(|(frontend, claims)| Some((frontend, self.served(frontend, claims)?)))
    }

    /// All cluster addresses.
    pub fn cluster_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.cluster_addresses.all()
    }

    /// The addresses of all endpoints on this node.
    pub fn hairpins(&self) -> impl Iterator<Item = IpAddr> {
        self.hairpins.all()
    }

    /// Whether any Service has this cluster address.
    pub fn is_cluster_address(&self, addr: &IpAddr) -> bool {
        self.cluster_addresses.contains(addr)
    }

    /// Whether this is the address of an endpoint on this node.
    pub fn is_hairpin(&self, addr: &IpAddr) -> bool {
        self.hairpins.contains(addr)
    }

    /// All Services, by key.
    pub fn services(&self) -> impl Iterator<Item = &Key> {
        self.services.keys()
    }

    /// The health-check port of a Service.
    pub fn health(&self, key: &Key) -> Option<&HealthPort> {
        self.services.get(key)?.health.as_ref()
    }

    /// All health-check ports.
    pub fn health_ports(&self) -> HealthPorts {
        let with_port = |(key, record): (&Key, &ServiceRecord)| Some((key.clone(), record.health.clone()?));
        self.services.iter().filter_map(with_port).collect()
    }
}

/// Values with the number of Services that need each.
#[derive(Debug, Clone)]
struct Counted<T>(BTreeMap<T, usize>);

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord + Copy> Counted<T> {
    fn add(&mut self, value: T) {
        *self.0.entry(value).or_default() += 1;
    }

    fn remove(&mut self, value: &T) {
        if let Some(count) = self.0.get_mut(value) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(value);
            }
        }
    }

    fn contains(&self, value: &T) -> bool {
        self.0.contains_key(value)
    }

    fn all(&self) -> impl Iterator<Item = T> {
        self.0.keys().copied()
    }
}
