// SPDX-License-Identifier: Apache-2.0
//! The forwarder's loop: reads the account, checks targets, and brings rules, flows and reported health in line. It decides nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use steerage_testmoto::{Moto, TargetStates};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::account::publish;
use crate::addresses::Addresses;
use crate::apply;
use crate::cloud::{Cloud, Ended};
use crate::health::{Health, Key, Released};
use crate::probe::{self, Prober};
use crate::read::Reader;
use crate::ruleset::{self, Route, routes, ruleset};

/// Between two reads of the account. AWS takes seconds to minutes to bring a change to its load balancers.
const READ_EVERY: Duration = Duration::from_millis(500);
/// Between two looks at which checks are due.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Forwards until the process is killed. Fails only if the kernel refuses the first rules.
pub async fn forward(moto: &Moto, addresses: Addresses, hosts: &Path) -> Result<()> {
    let mut reader = Reader::connect(moto.addr()).await;
    let mut forwarder = Forwarder::new(*moto, addresses, hosts)?;
    let (results, mut passed) = mpsc::unbounded_channel::<(Key, bool)>();
    let [mut reads, mut looks] = [READ_EVERY, LOOK_EVERY].map(interval);
    for ticks in [&mut reads, &mut looks] {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    loop {
        let released = tokio::select! {
            _ = reads.tick() => match reader.read().await {
                Ok(cloud) => forwarder.take(cloud),
                Err(error) => {
                    eprintln!("reading the account failed; the rules stay: {error:#}");
                    continue;
                }
            },
            Some((key, has_passed)) = passed.recv() => forwarder.judge(&key, has_passed),
            _ = looks.tick() => {
                for order in forwarder.health.due(&forwarder.cloud.used_groups(), forwarder.start.elapsed()) {
                    let results = results.clone();
                    tokio::spawn(async move {
                        let has_passed = probe::ask(&order.check, order.address, &Prober::ELB).await.is_some();
                        // The receiver lives as long as this loop.
                        let _ = results.send((order.key, has_passed));
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
    moto: Moto,
    hosts: &'a Path,
    cloud: Cloud,
    health: Health,
    addresses: Addresses,
    routes: Vec<Route>,
    /// Targets whose flows must end after the rules are written.
    released: Vec<Released>,
    /// Flows that must end and have not yet.
    ended: Vec<Ended>,
    reported: TargetStates,
    published: String,
}

impl<'a> Forwarder<'a> {
    fn new(moto: Moto, addresses: Addresses, hosts: &'a Path) -> Result<Self> {
        apply::write(&ruleset(addresses.subnet(), &[]))?;
        apply::forget_reset_flows()?;
        moto.set_health(&TargetStates::new())?;
        Ok(Self {
            start: Instant::now(),
            moto,
            hosts,
            cloud: Cloud::default(),
            health: Health::default(),
            addresses,
            routes: Vec::new(),
            released: Vec::new(),
            ended: Vec::new(),
            reported: TargetStates::new(),
            published: String::new(),
        })
    }

    fn judge(&mut self, key: &Key, has_passed: bool) -> Vec<Released> {
        let now = self.start.elapsed();
        self.health.record(&self.cloud.used_groups(), key, has_passed, now);
        self.health.sync(&self.cloud.used_groups(), now)
    }

    fn take(&mut self, cloud: Cloud) -> Vec<Released> {
        self.addresses.update(cloud.balancers.iter().map(|balancer| balancer.hostname.as_str()));
        let released = self.health.sync(&cloud.used_groups(), self.start.elapsed());
        self.cloud = cloud;
        released
    }

    /// Rules first: a target is reported healthy when it gets flows, and an address is published when it answers.
    fn converge(&mut self, released: Vec<Released>) -> Result<()> {
        self.released.extend(released);
        let routes = routes(&self.cloud, &self.health, &self.addresses);
        if routes != self.routes {
            apply::write(&ruleset(self.addresses.subnet(), &routes))?;
        }
        self.ended.extend(ruleset::ended(&self.routes, &routes, &self.released));
        self.released.clear();
        self.routes = routes;
        let flows = apply::end(&self.ended)?;
        if flows > 0 {
            eprintln!("{flows} flows ended: {:?}", self.ended);
        }
        self.ended.clear();
        let states = self.health.states(&self.cloud);
        if states != self.reported {
            self.moto.set_health(&states)?;
            self.reported = states;
        }
        let published = self.addresses.hosts();
        if published != self.published {
            publish(self.hosts, &published)?;
            self.published = published;
        }
        Ok(())
    }
}
