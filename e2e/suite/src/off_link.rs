// SPDX-License-Identifier: Apache-2.0
//! A lab's node off the link of the edge hosts, and the routes by which they reach it. Blocking.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use steerage_lab::off_link::{Gateway, gateways, put_back, routing, take_off};
use steerage_lab::{Host, Lab, edge};

use crate::cluster::output;

/// Moves nodes of a lab off the link of its edge hosts.
pub struct OffLink {
    lab: Lab,
}

impl OffLink {
    /// That of this lab.
    pub fn new(lab: &Lab) -> Self {
        Self { lab: lab.clone() }
    }

    /// Both gateways that lead to a node off the link, the preferred one first.
    pub fn gateways(&self) -> [Gateway; 2] {
        gateways(&self.lab.plan)
    }

    /// Moves a node behind the gateways, and returns when the edge hosts have routes to it.
    pub fn take_off(&self, node: &str) -> Result<()> {
        Ok(take_off(&self.lab, &self.host(node)?)?)
    }

    /// Moves a node back to the link.
    pub fn put_back(&self, node: &str) -> Result<()> {
        Ok(put_back(&self.lab, &self.host(node)?)?)
    }

    /// Starts the edge process of a host with flags.
    pub fn start_edge(&self, edge: &str, flags: &[&str]) -> Result<()> {
        let flags: Vec<_> = flags.iter().map(ToString::to_string).collect();
        Ok(edge::start(&self.lab, &self.host(edge)?, &flags)?)
    }

    /// Removes the device of the tunnel from an edge host, whose edge has no tunnel any more.
    pub fn delete_device(&self, edge: &str) -> Result<()> {
        let netns = self.host(edge)?.netns;
        output(Command::new("ip").args(["-n", &netns, "link", "delete", "steerage-vx"])).map(drop)
    }

    /// Ends or begins the routing sessions of an edge host with a gateway.
    pub fn set_session(&self, edge: &str, gateway: &Gateway, is_up: bool) -> Result<()> {
        Ok(routing::set_session(&self.lab, &self.host(edge)?, gateway, is_up)?)
    }

    /// Kills the routing daemon of an edge host, whose routes stay.
    pub fn kill_daemon(&self, edge: &str) -> Result<()> {
        Ok(routing::kill(&self.lab, &self.host(edge)?)?)
    }

    /// Starts the routing daemon of an edge host again; it leaves the routes to the node in the kernel until it has learned them.
    pub fn start_daemon(&self, edge: &str) -> Result<()> {
        Ok(routing::restart(&self.lab, &self.host(edge)?, true)?)
    }

    /// Fails unless all sessions of the edge host's routing daemon are established.
    pub fn check_sessions(&self, edge: &str) -> Result<()> {
        let has_all = routing::has_all_sessions(&self.lab, &self.host(edge)?)?;
        ensure!(has_all, "the routing daemon of {edge} lacks a session");
        Ok(())
    }

    /// Fails unless the edge host's routes of both families lead to the node by this gateway.
    pub fn check_routes(&self, edge: &str, node: &str, gateway: &Gateway) -> Result<()> {
        let [ipv4, ipv6] = routing::learned(&self.host(edge)?, &self.host(node)?)?;
        // The next hop of IPv6 is an address that only the gateway's interface has.
        let addresses =
            output(Command::new("ip").args(["-n", &gateway.netns, "-o", "-6", "address", "show", "eth0"]))?;
        let has = |route: &str| {
            let hop = route.split_whitespace().skip_while(|word| *word != "via").nth(1);
            hop.is_some_and(|hop| hop == gateway.ipv4.to_string() || addresses.contains(&format!(" {hop}/")))
        };
        ensure!(has(&ipv4) && has(&ipv6), "{edge} has other routes to {node}: {ipv4}{ipv6}");
        Ok(())
    }

    fn host(&self, name: &str) -> Result<Host> {
        self.lab.plan.find(name).with_context(|| format!("{name} is no host"))
    }
}
