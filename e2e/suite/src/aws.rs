// SPDX-License-Identifier: Apache-2.0
//! The simulated AWS of a lab, read past its API: which nodes or pods are registered, which of them are healthy, what was written. Blocking.

mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use steerage_lab::Lab;
use steerage_lab::aws::{Account, api, resolve};
use steerage_testmoto::Moto;

use crate::cluster::output;

/// The AWS of a lab.
pub struct Aws {
    lab: Lab,
    moto: Moto,
}

impl Aws {
    /// That of this lab.
    pub fn new(lab: Lab) -> Self {
        let moto = Moto::at(api(&lab.plan).into());
        Self { lab, moto }
    }

    /// The address from which load balancers check targets, and hide clients where a Service asks for it.
    pub fn address_of_load_balancers(&self) -> IpAddr {
        self.moto.addr().ip()
    }

    /// Where a host name of a load balancer leads to.
    pub fn resolve(&self, hostname: &str) -> Result<IpAddr> {
        let found = resolve(&self.lab, hostname)?;
        found.map(IpAddr::from).with_context(|| format!("{hostname} leads nowhere"))
    }

    /// The nodes, or the addresses of pods, that are registered with every target group of a Service, by its UID.
    pub fn targets(&self, uid: &str) -> Result<BTreeSet<String>> {
        let nodes = self.nodes()?;
        let groups = self.moto.targets(uid)?;
        let mut sets = groups.values();
        let first = sets.next().context("no target group")?;
        ensure!(sets.all(|set| set == first), "different targets: {groups:?}");
        Ok(first
            .iter()
            .map(|instance| nodes.get(instance).cloned().unwrap_or_else(|| instance.clone()))
            .collect())
    }

    /// The nodes, or the addresses of pods, in each state, for each target group of a Service.
    pub fn health(&self, uid: &str) -> Result<Vec<BTreeMap<String, BTreeSet<String>>>> {
        let nodes = self.nodes()?;
        let groups = self.moto.targets(uid)?;
        let mut all = Vec::new();
        for (arn, targets) in self.moto.health()? {
            // arn:aws:elasticloadbalancing:us-east-1:…:targetgroup/NAME/…
            if !arn.split('/').nth(1).is_some_and(|name| groups.contains_key(name)) {
                continue;
            }
            let mut states: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for (instance, (state, _)) in targets {
                let node = nodes.get(&instance).cloned().unwrap_or(instance);
                states.entry(state).or_default().insert(node);
            }
            all.push(states);
        }
        ensure!(!all.is_empty(), "no target group has targets");
        Ok(all)
    }

    /// How many calls that may change something AWS has answered.
    pub fn writes(&self) -> Result<u64> {
        self.moto.writes()
    }

    /// All load balancers, listeners, target groups and security groups, as text; empty if there are none.
    pub fn snapshot(&self) -> Result<String> {
        self.moto.snapshot()
    }

    /// Everything, by name, for diagnostics.
    pub fn describe(&self) -> [(&'static str, Result<String>); 4] {
        let run = |program: &str, arguments: &[&str]| {
            steerage_lab::in_netns(&self.lab.plan.router(), || output(Command::new(program).args(arguments)))?
        };
        [
            ("resources", self.snapshot()),
            ("health", self.moto.health().map(|health| format!("{health:#?}"))),
            ("rules", run("nft", &["list", "ruleset"])),
            ("connections", run("conntrack", &["-L"])),
        ]
    }

    /// The names of nodes by the ids of their instances.
    fn nodes(&self) -> Result<BTreeMap<String, String>> {
        let account = Account::open(&self.lab)?;
        Ok(account.instances.into_iter().map(|(node, instance)| (instance, node)).collect())
    }
}
