// SPDX-License-Identifier: Apache-2.0
//! Which VIPs and listeners of a load balancer can be served, and what is wrong with the others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_api::{Listener, ListenerProtocol};
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::packet::protocol;

use super::PlanInputs;
use super::room::{Served, refuse_what_has_no_room};
use super::targets::Targets;
use crate::host::{HostNetwork, PeerLiveness};
use crate::index::LoadBalancer;
use crate::link::mac::display_mac;

/// A load balancer, as far as it can be served.
pub(super) struct Accepted<'a> {
    pub(super) object: &'a LoadBalancer,
    /// Its own targets, or those of its node set, if that exists.
    pub(super) targets: Option<Targets>,
    pub(super) vips: Vec<IpAddr>,
    /// Those of its listeners that another load balancer with the same VIP has.
    lost: BTreeSet<ListenerKey>,
    pub(super) source_ranges: Vec<IpNet>,
    pub(super) problems: Vec<String>,
}

impl Accepted<'_> {
    /// The listeners that are served at this VIP.
    pub(super) fn listeners(&self, vip: IpAddr) -> impl Iterator<Item = ListenerKey> {
        self.object
            .spec
            .listeners
            .iter()
            .map(move |listener| key(vip, listener))
            .filter(|key| !self.lost.contains(key))
    }
}

fn key(vip: IpAddr, listener: &Listener) -> ListenerKey {
    let protocol = match listener.protocol {
        ListenerProtocol::Tcp => protocol::TCP,
        ListenerProtocol::Udp => protocol::UDP,
    };
    ListenerKey::new(vip, protocol, listener.port)
}

/// Of which load balancers VIPs and listeners are. Several with one key may have a VIP, others may not: then it is the first one's by
/// name, as a listener is.
#[derive(Default)]
struct Owners<'a> {
    /// The first load balancer of each VIP.
    vips: BTreeMap<IpAddr, &'a LoadBalancer>,
    /// The load balancers of the listeners of those with a key.
    listeners: BTreeMap<ListenerKey, &'a str>,
}

impl<'a> Owners<'a> {
    fn new(load_balancers: impl Iterator<Item = &'a LoadBalancer>) -> Self {
        let mut owners = Self::default();
        for object in load_balancers {
            for vip in object.spec.addresses.iter().copied() {
                let first = owners.vips.entry(vip).or_insert(object);
                if object.spec.sharing_key.is_some() && may_share(first, object) {
                    for listener in &object.spec.listeners {
                        owners.listeners.entry(key(vip, listener)).or_insert(&object.name);
                    }
                }
            }
        }
        owners
    }

    /// The load balancer that has the VIP instead.
    fn instead(&self, object: &LoadBalancer, vip: IpAddr) -> Option<&'a str> {
        let first = self.vips.get(&vip).copied().filter(|first| !may_share(first, object))?;
        Some(&first.name)
    }

    /// The load balancer that has the listener instead.
    fn of_listener(&self, object: &LoadBalancer, key: &ListenerKey) -> Option<&'a str> {
        self.listeners.get(key).copied().filter(|owner| *owner != object.name)
    }
}

/// Whether both may have one VIP.
fn may_share(first: &LoadBalancer, other: &LoadBalancer) -> bool {
    first.name == other.name
        || first.spec.sharing_key.is_some() && first.spec.sharing_key == other.spec.sharing_key
}

/// All load balancers, and whether there is room for all.
pub(super) fn accept_all<'a>(inputs: &PlanInputs<'a>, served: &Served) -> (Vec<Accepted<'a>>, bool) {
    let mut accepted = accept_these(inputs, &inputs.index.load_balancers().collect::<Vec<_>>());
    let has_room = refuse_what_has_no_room(&mut accepted, inputs.room, served);
    (accepted, has_room)
}

/// These, sorted by name, among which are all that name an address of theirs.
pub(super) fn accept_these<'a>(inputs: &PlanInputs<'a>, objects: &[&'a LoadBalancer]) -> Vec<Accepted<'a>> {
    let owners = Owners::new(objects.iter().copied());
    objects.iter().map(|object| accept(inputs, &owners, object)).collect()
}

fn accept<'a>(inputs: &PlanInputs<'a>, owners: &Owners<'_>, object: &'a LoadBalancer) -> Accepted<'a> {
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
    let (mut vips, mut lost) = (Vec::new(), BTreeSet::new());
    for vip in spec.addresses.iter().copied() {
        if let Some(problem) = refuse(inputs.host, owners, object, vip) {
            problems.push(problem);
            continue;
        }
        problems.extend(inputs.host.conflicts.get(&vip).map(|mac| {
            format!(
                "Address {vip} is in use on the link by {}. This host does not answer for it. Free it there (if that was an edge host: \
                 `steerage-edge cleanup`), or remove it from the address pool.",
                display_mac(*mac)
            )
        }));
        for listener in &spec.listeners {
            let key = key(vip, listener);
            let Some(owner) = owners.of_listener(object, &key) else { continue };
            problems.push(format!(
                "Port {} {} of address {vip} belongs to the load balancer {owner}. It is not served here. Use another port.",
                listener.protocol, listener.port
            ));
            lost.insert(key);
        }
        vips.push(vip);
    }
    Accepted { object, targets, vips, lost, source_ranges, problems }
}

/// Why an address cannot be served at all.
fn refuse(host: &HostNetwork, owners: &Owners<'_>, object: &LoadBalancer, vip: IpAddr) -> Option<String> {
    if let Some(owner) = owners.instead(object, vip) {
        return Some(format!(
            "Address {vip} belongs to the load balancer {owner}. It is not served here. Request another."
        ));
    }
    if vip.is_loopback() || vip.is_multicast() || vip.is_unspecified() {
        return Some(format!(
            "Address {vip} cannot be a VIP. It is not served. Remove it from the address pool."
        ));
    }
    // Of a dead one the address may be free. If it is not, the conflict detection finds out.
    let mut present = host.peers.iter().filter(|peer| peer.liveness != PeerLiveness::Dead);
    let is_of_peer = present.any(|peer| peer.addresses.contains(&vip));
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
