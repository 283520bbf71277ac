// SPDX-License-Identifier: Apache-2.0
//! Which VIPs of a load balancer can be served, and what is wrong with the others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::PlanInputs;
use super::room::{Served, refuse_what_has_no_room};
use super::targets::Targets;
use crate::host::HostNetwork;
use crate::index::LoadBalancer;
use crate::link::mac::display_mac;

/// A load balancer, as far as it can be served.
pub(super) struct Accepted<'a> {
    pub(super) object: &'a LoadBalancer,
    /// Its own targets, or those of its node set, if that exists.
    pub(super) targets: Option<Targets>,
    pub(super) vips: Vec<IpAddr>,
    pub(super) source_ranges: Vec<IpNet>,
    pub(super) problems: Vec<String>,
}

pub(super) fn accept_all<'a>(inputs: &PlanInputs<'a>, served: &Served) -> Vec<Accepted<'a>> {
    let mut owners = BTreeMap::new();
    for object in inputs.index.load_balancers() {
        for vip in &object.spec.addresses {
            owners.entry(*vip).or_insert(object.name.as_str());
        }
    }
    let mut accepted: Vec<_> =
        inputs.index.load_balancers().map(|object| accept(inputs, &owners, object)).collect();
    refuse_what_has_no_room(&mut accepted, inputs.room, served);
    accepted
}

fn accept<'a>(
    inputs: &PlanInputs<'a>,
    owners: &BTreeMap<IpAddr, &str>,
    object: &'a LoadBalancer,
) -> Accepted<'a> {
    let spec = &object.spec;
    let mut problems = Vec::new();
    let targets = match &spec.node_set {
        None => Some(Targets::Own(Arc::clone(spec))),
        Some(name) => {
            let set = inputs.index.node_set(name);
            if set.is_none() {
                problems.push(format!(
                    "EdgeNodeSet {name} does not exist. The load balancer keeps its last targets; a new one has none. The controller creates the EdgeNodeSet."
                ));
            }
            set.map(|set| Targets::OfNodeSet(Arc::clone(&set.spec)))
        }
    };
    let (source_ranges, unreadable) = parse_ranges(&spec.source_ranges);
    problems.extend(unreadable);
    let mut vips = Vec::new();
    for vip in spec.addresses.iter().copied() {
        if let Some(problem) = refuse(inputs.host, owners, &object.name, vip) {
            problems.push(problem);
            continue;
        }
        problems.extend(inputs.host.conflicts.get(&vip).map(|mac| {
            format!(
                "Address {vip} is in use on the link by {}. This host does not answer for it. Free it there, or remove it from the address pool.",
                display_mac(*mac)
            )
        }));
        vips.push(vip);
    }
    Accepted { object, targets, vips, source_ranges, problems }
}

/// Why an address cannot be served at all.
fn refuse(host: &HostNetwork, owners: &BTreeMap<IpAddr, &str>, name: &str, vip: IpAddr) -> Option<String> {
    let owner = owners.get(&vip).copied().unwrap_or(name);
    if owner != name {
        return Some(format!(
            "Address {vip} belongs to the load balancer {owner}. It is not served here. Request another."
        ));
    }
    if vip.is_loopback() || vip.is_multicast() || vip.is_unspecified() {
        return Some(format!(
            "Address {vip} cannot be a VIP. It is not served. Remove it from the address pool."
        ));
    }
    let is_of_peer = host.peers.iter().any(|peer| peer.addresses.contains(&vip));
    (host.is_local(vip) || is_of_peer)
        .then(|| format!("Address {vip} is the own address of an edge host. It is not served. Remove it from the address pool."))
}

/// The ranges that are used, and what is wrong with the others.
fn parse_ranges(texts: &[String]) -> (Vec<IpNet>, Option<String>) {
    let parsed: Vec<_> = texts.iter().map(|text| (text, text.trim().parse::<IpNet>())).collect();
    let bad: Vec<_> = parsed.iter().filter(|(_, net)| net.is_err()).map(|(text, _)| text.as_str()).collect();
    let problem = (!bad.is_empty())
        .then(|| format!("Source ranges {} are invalid. They are ignored. Write CIDRs.", bad.join(", ")));
    // Fewer ranges cost less memory in the kernel.
    let merged =
        IpNet::aggregate(&parsed.into_iter().filter_map(|(_, net)| Some(net.ok()?.trunc())).collect());
    (merged, problem)
}
