// SPDX-License-Identifier: Apache-2.0
//! The OpenStack of a lab, read past its APIs: which nodes are members, which of them pass their checks, what was written. Blocking.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use steerage_lab::Plan;
use steerage_lab::openstack::api;
use steerage_testopenstack::beside;

use crate::cluster::Host;

/// The OpenStack of a lab.
pub struct OpenStack {
    api: SocketAddr,
    amphora: Host,
}

impl OpenStack {
    /// That of this lab, if it has one.
    pub fn new(plan: &Plan) -> Option<Self> {
        let amphora = plan.amphora()?.into();
        Some(Self { api: api(plan).into(), amphora })
    }

    /// The host of the load balancers.
    pub fn amphora(&self) -> &Host {
        &self.amphora
    }

    /// The address from which load balancers connect to members.
    pub fn address_of_load_balancers(&self) -> IpAddr {
        self.amphora.ipv4.into()
    }

    /// The nodes that are members of every pool of a Service, by its UID.
    pub fn targets(&self, uid: &str) -> Result<BTreeSet<String>> {
        let pools: BTreeMap<String, BTreeSet<String>> = self.read(&format!("targets/{uid}"))?;
        let mut sets = pools.values();
        let first = sets.next().context("no pool")?;
        ensure!(sets.all(|set| set == first), "different members: {pools:?}");
        Ok(first.clone())
    }

    /// The nodes in each operating status, for each pool of a Service.
    pub fn health(&self, uid: &str) -> Result<Vec<BTreeMap<String, BTreeSet<String>>>> {
        let pools: Vec<_> = self.read(&format!("health/{uid}"))?;
        ensure!(!pools.is_empty(), "no pool");
        Ok(pools)
    }

    /// How many requests that may change something Neutron and Octavia have got.
    pub fn writes(&self) -> Result<u64> {
        self.read("writes")
    }

    /// All load balancers with their parts, VIP ports and floating IPs, as text; empty if there are none.
    pub fn snapshot(&self) -> Result<String> {
        let shown: BTreeMap<String, String> = self.read("snapshot")?;
        let lines: Vec<_> = shown.iter().map(|(name, content)| format!("{name}: {content}")).collect();
        Ok(lines.join("\n"))
    }

    /// Lets Octavia's API answer 503, or no longer. Its load balancers go on.
    pub fn set_octavia(&self, up: bool) -> Result<()> {
        let verb = if up { "up" } else { "down" };
        beside(self.api, "PUT", &format!("{verb}/load-balancer")).map(drop)
    }

    fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        serde_json::from_value(beside(self.api, "GET", path)?).context("another answer than expected")
    }
}
