// SPDX-License-Identifier: Apache-2.0
//! The GCE or Azure of a lab, read past its API: which nodes are targets, which of them pass their checks, what was written. Blocking.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use steerage_lab::passthrough::{Forwarded, api, forwarded};
use steerage_lab::{Cloud, Lab};
use steerage_testclouds::StandIn;

use crate::cluster::output;

/// Names of calls of an API that change nothing end so.
const READS: [&str; 8] =
    ["get", "list", "aggregatedList", "getHealth", "listNetworkEndpoints", "getXpnHost", "wait", "token"];

/// The GCE or Azure of a lab.
pub struct Passthrough {
    lab: Lab,
    /// Which of the two.
    pub cloud: Cloud,
}

impl Passthrough {
    /// That of this lab, if it has one.
    pub fn new(lab: &Lab) -> Option<Self> {
        let cloud = lab.plan.cloud.filter(|cloud| steerage_lab::passthrough::is_of(*cloud))?;
        Some(Self { lab: lab.clone(), cloud })
    }

    /// The stand-in of the API.
    pub fn api(&self) -> Result<StandIn> {
        StandIn::at(api(&self.lab.plan).into())
    }

    /// The nodes that are targets of a VIP, for every port alike.
    pub fn targets(&self, vip: IpAddr) -> Result<BTreeSet<String>> {
        self.nodes_of(vip, |_| true)
    }

    /// Those that are healthy.
    pub fn healthy(&self, vip: IpAddr) -> Result<BTreeSet<String>> {
        self.nodes_of(vip, |is_healthy| is_healthy)
    }

    fn nodes_of(&self, vip: IpAddr, fits: impl Fn(bool) -> bool) -> Result<BTreeSet<String>> {
        let all = forwarded(&self.lab)?;
        let mut sets = all.iter().filter(|rule| rule.vip == vip).map(|rule| self.nodes(rule, &fits));
        let first = sets.next().with_context(|| format!("nothing forwards {vip}"))?;
        ensure!(sets.all(|set| set == first), "different targets: {all:?}");
        Ok(first)
    }

    fn nodes(&self, rule: &Forwarded, fits: impl Fn(bool) -> bool) -> BTreeSet<String> {
        let chosen = rule.targets.iter().filter(|(_, is_healthy)| fits(**is_healthy));
        let nodes = self.lab.plan.nodes();
        let name = |address: &IpAddr| {
            let found = nodes.iter().find(|node| *address == node.ipv4 || *address == node.ipv6);
            found.map_or_else(|| address.to_string(), |node| node.name.clone())
        };
        chosen.map(|(address, _)| name(address)).collect()
    }

    /// How many calls that may change something the API has answered.
    pub fn writes(&self) -> Result<u64> {
        Ok(writes(&self.api()?.calls()?))
    }

    /// All that was made through the API, as text; empty if there is nothing.
    pub fn snapshot(&self) -> Result<String> {
        let shown = self.api()?.snapshot()?;
        let made = shown.iter().filter(|(_, content)| !is_bare_group(content));
        Ok(made.map(|(name, content)| format!("{name}: {content}")).collect::<Vec<_>>().join("\n"))
    }

    /// The rules and connections of the load balancers, and what they forward, for diagnostics.
    pub fn rules(&self) -> Result<String> {
        let run = |program: &str, words: &[&str]| output(Command::new(program).args(words));
        let inside = || {
            let rules = run("nft", &["list", "ruleset"])?;
            let routes = run("ip", &["rule"])?;
            Ok(format!("{rules}\n{routes}\n{}", run("conntrack", &["-L"])?))
        };
        let seen: Result<String> = steerage_lab::in_netns(&self.lab.plan.router(), inside)?;
        Ok(format!("{:#?}\n{}", forwarded(&self.lab)?, seen?))
    }

    /// Lets the API answer 503, or no longer. Load balancers go on.
    pub fn set_api(&self, is_up: bool) -> Result<()> {
        let api = self.api()?;
        if is_up {
            return api.clear_faults();
        }
        api.inject(&json!({ "times": 0, "status": 503, "reason": "backendError" }))
    }
}

fn writes(counts: &BTreeMap<String, u64>) -> u64 {
    let is_write = |name: &str| name.rsplit_once('.').is_some_and(|(_, verb)| !READS.contains(&verb));
    counts.iter().filter(|(name, _)| is_write(name)).map(|(_, count)| count).sum()
}

/// The security group of the nodes is the lab's. Its rules are not.
fn is_bare_group(content: &Value) -> bool {
    content["properties"]["securityRules"].as_array().is_some_and(Vec::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_calls_that_change_something() {
        let counts = [
            ("compute.forwardingRules.list", 1),
            ("compute.regionBackendServices.getHealth", 2),
            ("compute.forwardingRules.insert", 4),
            ("compute.networkEndpointGroups.attachNetworkEndpoints", 8),
            ("compute.networkEndpointGroups.listNetworkEndpoints", 16),
            ("metadata.token", 32),
            ("loadBalancers.createOrUpdate", 64),
            ("loadBalancers.get", 128),
            ("unknown", 256),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count)).into();
        assert_eq!(writes(&counts), 4 + 8 + 64);
    }

    #[test]
    fn group_without_rules_is_not_left_behind() {
        let group = |rules: Value| json!({ "properties": { "securityRules": rules } });
        assert!(is_bare_group(&group(json!([]))));
        assert!(!is_bare_group(&group(json!([{ "name": "web" }]))));
        assert!(!is_bare_group(&json!({ "properties": { "frontendIPConfigurations": [] } })));
    }
}
