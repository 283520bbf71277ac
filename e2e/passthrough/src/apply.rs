// SPDX-License-Identifier: Apache-2.0
//! Addresses, routes and connection tracking in the network namespace of the calling thread, and what guests do on nodes. Decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use steerage_nft::{Conntrack, ConntrackEntry, Family};

use crate::ruleset::Ended;

/// Routing tables, and the priorities of the rules that lead to them, begin after this number.
const BASE: u32 = 1000;
/// Routes of the guest agent have this protocol, as those of Google's agent.
const PROTOCOL: &str = "66";

/// Gives this host the address of a prober. A link-local one is of the nodes' interface.
pub fn add_prober(address: IpAddr, inside: &str) -> Result<()> {
    let is_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    let (device, length) = match address {
        IpAddr::V4(_) => ("lo", 32),
        IpAddr::V6(_) if is_local => (inside, 64),
        IpAddr::V6(_) => ("lo", 128),
    };
    let prefix = format!("{address}/{length}");
    let mut words = vec!["addr", "replace", &prefix, "dev", device];
    if address.is_ipv6() {
        words.push("nodad");
    }
    ip(&words)
}

/// Sends packets with this mark to a target, whatever their destination.
pub fn add_route(mark: u32, target: IpAddr) -> Result<()> {
    let family = if target.is_ipv4() { "-4" } else { "-6" };
    let (mark, number, target) = (mark.to_string(), (BASE + mark).to_string(), target.to_string());
    ip(&[family, "route", "replace", "default", "via", &target, "table", &number])?;
    // An earlier process may have left it.
    let _ = ip(&[family, "rule", "del", "pref", &number]);
    ip(&[family, "rule", "add", "pref", &number, "fwmark", &mark, "lookup", &number])
}

/// Ends flows. Returns how many there were.
pub fn end(ended: &[Ended]) -> Result<usize> {
    let mut conntrack = Conntrack::open()?;
    let mut count = 0;
    for (family, is_v4) in [(Family::Ip, true), (Family::Ip6, false)] {
        let of_family: Vec<_> = ended.iter().filter(|ended| ended.vip.is_ipv4() == is_v4).collect();
        if of_family.is_empty() {
            continue;
        }
        let entries = conntrack.entries(family, |entry| of_family.iter().any(|ended| is_of(entry, ended)))?;
        count += conntrack.delete(&entries)?;
    }
    Ok(count)
}

fn is_of(entry: &ConntrackEntry, ended: &Ended) -> bool {
    let to = entry.original.destination;
    entry.original.protocol == ended.transport.number()
        && to.ip() == ended.vip
        && !ended.kept.iter().any(|range| range.contains(&to.port()))
        && ended.mark.is_none_or(|mark| entry.mark == mark)
}

/// What a cloud's agent on each node does: packets to the VIPs of load balancers that use the node are the node's own.
#[derive(Debug)]
pub struct Guests {
    /// The network namespaces of nodes, by name.
    nodes: Vec<String>,
    /// The VIPs of each node, with the namespace as it was then.
    known: BTreeMap<String, (u64, BTreeSet<IpNet>)>,
}

impl Guests {
    /// The agents of these nodes, by the names of their network namespaces.
    pub fn new(nodes: Vec<String>) -> Self {
        Self { nodes, known: BTreeMap::new() }
    }

    /// Brings all nodes in line. A node that is off is left alone.
    pub fn sync(&mut self, vips: &BTreeSet<IpNet>) -> Result<()> {
        for node in &self.nodes {
            let path = format!("/run/netns/{node}");
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let (inode, had) = self.known.entry(node.clone()).or_default();
            if *inode != metadata.ino() {
                // It was switched on again, without any routes.
                (*inode, *had) = (metadata.ino(), BTreeSet::new());
            }
            for (verb, vip) in had
                .difference(vips)
                .map(|vip| ("del", *vip))
                .chain(vips.difference(had).map(|vip| ("replace", *vip)))
                .collect::<Vec<_>>()
            {
                let family = if vip.addr().is_ipv4() { "-4" } else { "-6" };
                let prefix = vip.to_string();
                let words = [family, "route", verb, "local", &prefix, "dev", "eth0", "proto", PROTOCOL];
                let mut command = Command::new("nsenter");
                command.arg(format!("--net={path}")).args(["--", "ip"]).args(words);
                run(&mut command)?;
                if verb == "del" {
                    had.remove(&vip)
                } else {
                    had.insert(vip)
                };
            }
        }
        Ok(())
    }
}

fn ip(words: &[&str]) -> Result<()> {
    run(Command::new("ip").args(words))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(())
}
