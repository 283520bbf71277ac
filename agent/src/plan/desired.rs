// SPDX-License-Identifier: Apache-2.0
//! All Services together: who owns a frontend that several claim, and which shared things are still needed by anybody.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::Key;

use super::{Action, Frontend, HealthPort, HealthPorts, ServicePlan};

/// What the node should do, kept up to date Service by Service.
#[derive(Debug, Clone, Default)]
pub struct Desired {
    services: BTreeMap<Key, Held>,
    /// What the Services that want a frontend would do with it, sorted by their names. The first has it: any rule that all nodes
    /// follow will do.
    claims: BTreeMap<Frontend, Vec<(Key, Action)>>,
    cluster_addresses: Counted<IpAddr>,
    hairpins: Counted<IpAddr>,
    timeouts: Counted<u32>,
}

/// What a Service's plan holds, but for the actions, which lie with the frontends.
#[derive(Debug, Clone)]
struct Held {
    frontends: Box<[Frontend]>,
    cluster_addresses: Box<[IpAddr]>,
    hairpins: Box<[IpAddr]>,
    health: Option<HealthPort>,
}

/// What an update touched; what it is now, [`Desired`] says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Frontends.
    pub frontends: BTreeSet<Frontend>,
    /// Cluster addresses.
    pub cluster_addresses: BTreeSet<IpAddr>,
    /// Endpoints on this node.
    pub hairpins: BTreeSet<IpAddr>,
}

impl Desired {
    /// What `update` with the same plans would touch: the claimed things of the Services' old and new plans.
    pub fn touched(&self, updates: &BTreeMap<Key, ServicePlan>) -> Touched {
        let mut touched = Touched::default();
        for (key, new) in updates {
            if let Some(old) = self.services.get(key) {
                touched.frontends.extend(&old.frontends);
                touched.cluster_addresses.extend(&old.cluster_addresses);
                touched.hairpins.extend(&old.hairpins);
            }
            touched.frontends.extend(new.frontends.iter().map(|(frontend, _)| *frontend));
            touched.cluster_addresses.extend(&new.cluster_addresses);
            touched.hairpins.extend(&new.hairpins);
        }
        touched
    }

    /// Replaces the plans of some Services. An empty plan takes the Service out.
    pub fn update(&mut self, updates: BTreeMap<Key, ServicePlan>) {
        for (key, new) in updates {
            if let Some(old) = self.services.remove(&key) {
                old.frontends.iter().for_each(|frontend| self.withdraw(frontend, &key));
                old.cluster_addresses.iter().for_each(|addr| self.cluster_addresses.remove(addr));
                old.hairpins.iter().for_each(|addr| self.hairpins.remove(addr));
            }
            if new == ServicePlan::default() {
                continue;
            }
            let held = Held {
                frontends: new.frontends.iter().map(|(frontend, _)| *frontend).collect(),
                cluster_addresses: new.cluster_addresses.into(),
                hairpins: new.hairpins.into(),
                health: new.health,
            };
            for (frontend, action) in new.frontends {
                self.claim(frontend, &key, action);
            }
            held.cluster_addresses.iter().for_each(|addr| self.cluster_addresses.add(*addr));
            held.hairpins.iter().for_each(|addr| self.hairpins.add(*addr));
            self.services.insert(key, held);
        }
    }

    fn claim(&mut self, frontend: Frontend, by: &Key, action: Action) {
        action.affinity.into_iter().for_each(|seconds| self.timeouts.add(seconds));
        let claims = self.claims.entry(frontend).or_insert_with(|| Vec::with_capacity(1));
        claims.insert(claims.partition_point(|(claim, _)| claim < by), (by.clone(), action));
    }

    fn withdraw(&mut self, frontend: &Frontend, by: &Key) {
        let Some(claims) = self.claims.get_mut(frontend) else { return };
        if let Some(at) = claims.iter().position(|(claim, _)| claim == by) {
            let (_, action) = claims.remove(at);
            action.affinity.iter().for_each(|seconds| self.timeouts.remove(seconds));
        }
        if claims.is_empty() {
            self.claims.remove(frontend);
        }
    }

    /// What becomes of packets to a frontend.
    pub fn action(&self, frontend: &Frontend) -> Option<&Action> {
        self.claims.get(frontend)?.first().map(|(_, action)| action)
    }

    /// The Services that want a frontend; the first one has it.
    pub fn owners(&self, frontend: &Frontend) -> impl Iterator<Item = &Key> {
        self.claims.get(frontend).into_iter().flatten().map(|(key, _)| key)
    }

    /// How many frontends there are.
    pub fn frontend_count(&self) -> usize {
        self.claims.len()
    }

    /// All frontends, in order, each with what becomes of its packets.
    pub fn actions(&self) -> impl Iterator<Item = (&Frontend, &Action)> {
        self.claims.iter().filter_map(|(frontend, claims)| Some((frontend, &claims.first()?.1)))
    }

    /// All cluster addresses.
    pub fn cluster_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.cluster_addresses.all()
    }

    /// All endpoints on this node.
    pub fn hairpins(&self) -> impl Iterator<Item = IpAddr> {
        self.hairpins.all()
    }

    /// Whether any Service has this cluster address.
    pub fn is_cluster_address(&self, addr: &IpAddr) -> bool {
        self.cluster_addresses.has(addr)
    }

    /// Whether this is an endpoint on this node.
    pub fn is_hairpin(&self, addr: &IpAddr) -> bool {
        self.hairpins.has(addr)
    }

    /// The Services known, by key.
    pub fn services(&self) -> impl Iterator<Item = &Key> {
        self.services.keys()
    }

    /// The health-check port of a Service.
    pub fn health(&self, key: &Key) -> Option<&HealthPort> {
        self.services.get(key)?.health.as_ref()
    }

    /// All health-check ports.
    pub fn health_ports(&self) -> HealthPorts {
        let with_port = |(key, held): (&Key, &Held)| Some((key.clone(), held.health.clone()?));
        self.services.iter().filter_map(with_port).collect()
    }

    /// The affinity timeouts in use, in seconds.
    pub fn timeouts(&self) -> BTreeSet<u32> {
        self.timeouts.all().collect()
    }
}

/// Things, each with how many Services need it.
#[derive(Debug, Clone)]
struct Counted<T>(BTreeMap<T, usize>);

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord + Copy> Counted<T> {
    fn add(&mut self, thing: T) {
        *self.0.entry(thing).or_default() += 1;
    }

    fn remove(&mut self, thing: &T) {
        if let Some(count) = self.0.get_mut(thing) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(thing);
            }
        }
    }

    fn has(&self, thing: &T) -> bool {
        self.0.contains_key(thing)
    }

    fn all(&self) -> impl Iterator<Item = T> {
        self.0.keys().copied()
    }
}
