// SPDX-License-Identifier: Apache-2.0
//! The forwarder's loop: reads the cloud, checks targets, and brings routes, rules, flows and reported health in line. It decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ipnet::{IpNet, Ipv6Net};
use nix::net::if_::if_nametoindex;
use serde_json::{Value, json};
use steerage_nlb::account::publish;
use steerage_nlb::cloud::Transport;
use steerage_nlb::health::{Health, Key, Order, Released};
use steerage_nlb::probe::{self, Passed, Prober};
use steerage_testclouds::StandIn;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::apply::{self, Guests};
use crate::cloud::Cloud;
use crate::marks::Marks;
use crate::ruleset::{self, Ended, Route, routes, ruleset};
use crate::{azure, gce};

/// Between the end of a read of the cloud and the next one. A real cloud takes seconds to bring a change to its load balancers.
const READ_EVERY: Duration = Duration::from_millis(500);
/// Between two looks at which checks are due.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A cloud that the lab can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Compute Engine.
    Gce,
    /// Azure.
    Azure,
}

impl Kind {
    fn read(self, api: &StandIn) -> Result<Cloud> {
        match self {
            Self::Gce => gce::Answers::read(api).map(|answers| answers.cloud()),
            Self::Azure => azure::Answers::read(api).map(|answers| answers.cloud()),
        }
    }

    fn prober(self) -> Prober {
        match self {
            Self::Gce => gce::PROBER,
            Self::Azure => azure::PROBER,
        }
    }

    fn probers(self) -> &'static [&'static str] {
        match self {
            Self::Gce => &gce::PROBERS,
            Self::Azure => &azure::PROBERS,
        }
    }

    /// The length of the IPv6 range that a load balancer has.
    fn vip_length(self) -> u8 {
        match self {
            Self::Gce => 96,
            Self::Azure => 128,
        }
    }
}

/// Where the forwarder is.
#[derive(Debug)]
pub struct Place {
    /// The cloud.
    pub kind: Kind,
    /// The ranges of all VIPs.
    pub vips: Vec<IpNet>,
    /// The interface of the nodes' network.
    pub inside: String,
    /// The network namespaces of the nodes.
    pub guests: Vec<String>,
    /// For `view.json`: what is forwarded, and the targets' health.
    pub folder: PathBuf,
}

/// Forwards until the process is killed. Fails only if the kernel refuses the first rules.
pub async fn forward(api: &StandIn, place: Place) -> Result<()> {
    let mut forwarder = Forwarder::new(api, place)?;
    let (results, mut passed) = mpsc::unbounded_channel::<(Key, Option<Passed>)>();
    let (reads, mut read) = mpsc::channel(1);
    // On a thread of its own, as reading blocks.
    let (reader, kind) = (api.clone(), forwarder.place.kind);
    std::thread::spawn(move || {
        while reads.blocking_send(kind.read(&reader)).is_ok() {
            std::thread::sleep(READ_EVERY);
        }
    });
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let released = tokio::select! {
            Some(cloud) = read.recv() => match cloud {
                Ok(cloud) => forwarder.take(cloud),
                Err(error) => {
                    eprintln!("reading the cloud failed; the rules stay: {error:#}");
                    continue;
                }
            },
            Some((key, passed)) = passed.recv() => forwarder.judge(&key, passed),
            _ = looks.tick() => {
                for (order, prober) in forwarder.due() {
                    let results = results.clone();
                    tokio::spawn(async move {
                        let passed = match prober {
                            Some(prober) => probe::ask(&order.check, order.address, &prober).await,
                            // A firewall drops it.
                            None => None,
                        };
                        // The receiver lives as long as this loop.
                        let _ = results.send((order.key, passed));
                    });
                }
                continue;
            }
        };
        if let Err(error) = forwarder.converge(released) {
            eprintln!("bringing the rules in line failed; trying again: {error:#}");
        }
    }
}

/// What is known, and what was last written where.
struct Forwarder<'a> {
    start: Instant,
    api: &'a StandIn,
    place: Place,
    /// The index of the nodes' interface.
    scope: u32,
    cloud: Cloud,
    health: Health,
    /// What targets that passed their check answered.
    weights: BTreeMap<Key, u32>,
    marks: Marks,
    /// The marks that have a route.
    routed: BTreeSet<u32>,
    guests: Guests,
    written: Option<String>,
    routes: Vec<Route>,
    /// Targets whose flows must end after the rules are written.
    released: Vec<Released>,
    /// Flows that must end and have not yet.
    ended: Vec<Ended>,
    reported: BTreeMap<String, Value>,
    published: String,
}

impl<'a> Forwarder<'a> {
    fn new(api: &'a StandIn, place: Place) -> Result<Self> {
        let scope = if_nametoindex(place.inside.as_str()).with_context(|| place.inside.clone())?;
        for address in place.kind.probers() {
            apply::add_prober(address.parse()?, &place.inside)?;
        }
        steerage_nlb::apply::write(&ruleset(&place.vips, &place.inside, &[], &[]))?;
        steerage_nlb::apply::forget_reset_flows()?;
        Ok(Self {
            start: Instant::now(),
            api,
            scope,
            guests: Guests::new(place.guests.clone()),
            place,
            cloud: Cloud::default(),
            health: Health::default(),
            weights: BTreeMap::new(),
            marks: Marks::default(),
            routed: BTreeSet::new(),
            written: None,
            routes: Vec::new(),
            released: Vec::new(),
            ended: Vec::new(),
            reported: BTreeMap::new(),
            published: String::new(),
        })
    }

    /// The checks to make now, each with its prober; `None` where a firewall does not admit it.
    fn due(&mut self) -> Vec<(Order, Option<Prober>)> {
        let orders = self.health.due(&self.cloud.groups(), self.start.elapsed());
        orders.into_iter().filter_map(|order| self.addressed(order)).collect()
    }

    fn addressed(&mut self, mut order: Order) -> Option<(Order, Option<Prober>)> {
        let pool = self.cloud.pools.get(&order.key.0)?;
        let target = order.address;
        if let Some(vip) = pool.checked_at {
            order.address = SocketAddr::new(vip, target.port());
        }
        let is_admitted = self.cloud.admits(pool.prober, order.address, Transport::Tcp);
        let prober = is_admitted.then(|| Prober {
            source: Some(source(pool.prober, self.scope)),
            mark: pool.checked_at.map_or(0, |_| self.marks.of(target.ip())),
            ..self.place.kind.prober()
        });
        Some((order, prober))
    }

    fn judge(&mut self, key: &Key, passed: Option<Passed>) -> Vec<Released> {
        let now = self.start.elapsed();
        if let Some(weight) = passed.and_then(|passed| passed.weight) {
            self.weights.insert(key.clone(), weight);
        }
        self.health.record(&self.cloud.groups(), key, passed.is_some(), now);
        self.health.sync(&self.cloud.groups(), now)
    }

    fn take(&mut self, cloud: Cloud) -> Vec<Released> {
        let released = self.health.sync(&cloud.groups(), self.start.elapsed());
        self.weights.retain(|(pool, id), _| {
            cloud.pools.get(pool).is_some_and(|pool| pool.group.targets.contains_key(id))
        });
        self.cloud = cloud;
        released
    }

    /// Rules first: a target is reported healthy when it gets flows.
    fn converge(&mut self, released: Vec<Released>) -> Result<()> {
        self.released.extend(released);
        let vips = self.cloud.rules.iter().map(|rule| self.range(rule.vip));
        self.guests.sync(&vips.collect())?;
        let routes = routes(&self.cloud, &self.health, &self.weights, &mut self.marks);
        for target in self.cloud.pools.values().flat_map(|pool| pool.group.targets.values()) {
            self.marks.of(target.ip());
        }
        for (target, mark) in self.marks.all() {
            if !self.routed.contains(&mark) {
                apply::add_route(mark, target)?;
                self.routed.insert(mark);
            }
        }
        let text = ruleset(&self.place.vips, &self.place.inside, &self.cloud.filters, &routes);
        if self.written.as_ref() != Some(&text) {
            steerage_nlb::apply::write(&text)?;
            self.written = Some(text);
        }
        self.ended.extend(ruleset::ended(&self.routes, &routes, &self.released, &mut self.marks));
        self.released.clear();
        self.routes = routes;
        if !self.ended.is_empty() {
            let flows = apply::end(&self.ended)?;
            if flows > 0 {
                eprintln!("{flows} flows ended: {:?}", self.ended);
            }
            self.ended.clear();
        }
        self.report()
    }

    fn report(&mut self) -> Result<()> {
        let mut found = BTreeMap::new();
        let mut view = Vec::new();
        for rule in &self.cloud.rules {
            let Some(pool) = self.cloud.pools.get(&rule.pool) else { continue };
            let healthy = self.health.healthy(&rule.pool);
            let mut targets = serde_json::Map::new();
            for (id, address) in &pool.group.targets {
                let is_healthy = healthy.contains(address);
                let mut state = json!({ "state": if is_healthy { "HEALTHY" } else { "UNHEALTHY" } });
                if let Some(weight) = self.weights.get(&(rule.pool.clone(), id.clone())) {
                    state["weight"] = (*weight).into();
                }
                found.insert(format!("{}/{id}", rule.pool), state);
                targets.insert(address.ip().to_string(), is_healthy.into());
            }
            let ports: Vec<_> = rule.ports.iter().map(|range| [*range.start(), *range.end()]).collect();
            let protocol = rule.transport.as_str();
            view.push(json!({ "vip": rule.vip, "protocol": protocol, "ports": ports, "targets": targets }));
        }
        if self.place.kind == Kind::Gce && found != self.reported {
            gce::report(self.api, &found)?;
            self.reported = found;
        }
        let view = format!("{:#}\n", Value::from(view));
        if view != self.published {
            publish(&self.place.folder.join("view.json"), &view)?;
            self.published = view;
        }
        Ok(())
    }

    fn range(&self, vip: IpAddr) -> IpNet {
        let IpAddr::V6(address) = vip else { return vip.into() };
        Ipv6Net::new(address, self.place.kind.vip_length()).map_or(vip.into(), |range| range.trunc().into())
    }
}

fn source(address: IpAddr, scope: u32) -> SocketAddr {
    match address {
        IpAddr::V6(address) if address.is_unicast_link_local() => {
            SocketAddrV6::new(address, 0, 0, scope).into()
        }
        other => (other, 0).into(),
    }
}
