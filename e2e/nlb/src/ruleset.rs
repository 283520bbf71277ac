// SPDX-License-Identifier: Apache-2.0
//! The kernel's rules for a state of the account: each listener's new flows go to one of its group's receivers, by a hash of the flow.
//! Pure.
//!
//! Rules decide about new flows only. Connection tracking keeps established ones where they are, and brings replies back through the
//! load balancer's address. The client's address stays, unless the group says otherwise.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};

use ipnet::Ipv4Net;

use crate::addresses::Addresses;
use crate::cloud::{Cloud, Ended, Transport};
use crate::health::{Health, Released};

/// The table of all rules.
pub const TABLE: &str = "steerage_nlb";
/// Without a fixed seed, each new version of the rules would hash differently.
const SEED: u32 = 0x5eed;

/// What becomes of the flows to one port of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The load balancer's address.
    pub address: Ipv4Addr,
    /// The clients' port.
    pub port: u16,
    /// The protocol.
    pub transport: Transport,
    /// The ARN of the target group.
    pub group: String,
    /// Where new flows go.
    pub receivers: Vec<SocketAddr>,
    /// Whether a client's flows all go to the same one.
    pub is_sticky: bool,
    /// Whether targets see the client's address, or else the load balancer's.
    pub keeps_client_address: bool,
    /// The sources that may open flows; `None` means all.
    pub sources: Option<Vec<Ipv4Net>>,
}

/// The routes of all listeners, in order.
pub fn routes(cloud: &Cloud, health: &Health, addresses: &Addresses) -> Vec<Route> {
    let mut routes = Vec::new();
    for balancer in &cloud.balancers {
        let Some(address) = addresses.of(&balancer.hostname) else { continue };
        for listener in &balancer.listeners {
            let Some(group) = cloud.groups.get(&listener.group) else { continue };
            routes.extend(listener.transports.iter().map(|transport| Route {
                address,
                port: listener.port,
                transport: *transport,
                group: listener.group.clone(),
                receivers: health.receivers(&listener.group),
                is_sticky: group.attributes.is_sticky,
                keeps_client_address: group.attributes.keeps_client_address,
                sources: balancer.sources(*transport, listener.port),
            }));
        }
    }
    routes.sort_by_key(|route| (route.address, route.port, route.transport));
    routes
}

/// The flows of listeners that are there no longer, and those to released targets.
pub fn ended(before: &[Route], after: &[Route], released: &[Released]) -> Vec<Ended> {
    let flows = |route: &Route, target| {
        let Route { address, port, transport, .. } = *route;
        Ended { address, port, transport, target }
    };
    let present: Vec<_> = after.iter().map(|route| flows(route, None)).collect();
    let mut ended: Vec<_> = before.iter().map(|route| flows(route, None)).collect();
    ended.retain(|gone| !present.contains(gone));
    for Released { group, target } in released {
        let of_group = after.iter().filter(|route| route.group == *group);
        ended.extend(of_group.map(|route| flows(route, Some(*target))));
    }
    ended
}

/// The whole table, in place of its former content, as `nft -f` takes it: at once or not at all.
pub fn ruleset(subnet: Ipv4Net, routes: &[Route]) -> String {
    // A base chain stays, and only its rules change: no packet meets the time in between.
    let chains = [
        ("gate", "filter hook prerouting priority -150", gate(subnet)),
        ("prerouting", "nat hook prerouting priority -100", all(routes, fence) + &all(routes, forward)),
        ("postrouting", "nat hook postrouting priority 100", all(routes, hide_client)),
        ("forward", "filter hook forward priority 0", format!("\t\tip daddr {subnet} drop\n")),
    ];
    let mut text = format!("table ip {TABLE} {{\n");
    for (name, hook, _) in &chains {
        let _ = writeln!(text, "\tchain {name} {{ type {hook}; policy accept; }}");
    }
    let _ = writeln!(text, "}}\nflush table ip {TABLE}\ntable ip {TABLE} {{");
    for (name, _, rules) in &chains {
        let _ = writeln!(text, "\tchain {name} {{\n{rules}\t}}");
    }
    text.push_str("}\n");
    text
}

/// A TCP packet in the middle of a flow that the load balancer does not know, or no longer, is answered by a reset.
fn gate(subnet: Ipv4Net) -> String {
    let flags = "tcp flags & (fin | syn | rst | ack)";
    format!(
        "\t\tip daddr {subnet} ct state new {flags} == rst drop\n\
         \t\tip daddr {subnet} ct state new {flags} != syn reject with tcp reset\n"
    )
}

fn all(routes: &[Route], rule: fn(&Route) -> Option<String>) -> String {
    routes.iter().filter_map(rule).fold(String::new(), |mut text, rule| {
        let _ = writeln!(text, "\t\t{rule}");
        text
    })
}

/// Established flows never come to this chain: they outlive the rule of the security group that admitted them.
fn fence(route: &Route) -> Option<String> {
    let Route { address, port, transport, sources, .. } = route;
    let sources: Vec<_> = sources.as_ref()?.iter().map(ToString::to_string).collect();
    let others =
        if sources.is_empty() { String::new() } else { format!("ip saddr != {{ {} }} ", sources.join(", ")) };
    Some(format!("ip daddr {address} {} dport {port} {others}drop", transport.as_str()))
}

/// Without receivers the packet remains as it is, and is dropped.
fn forward(route: &Route) -> Option<String> {
    let Route { address, port, transport, receivers, is_sticky, .. } = route;
    let transport = transport.as_str();
    let of = if *is_sticky {
        "ip saddr".to_owned()
    } else {
        format!("ip saddr . {transport} sport . ip daddr . {transport} dport")
    };
    let slots =
        receivers.iter().enumerate().map(|(slot, to)| format!("{slot} : {} . {}", to.ip(), to.port()));
    let slots: Vec<_> = slots.collect();
    (!slots.is_empty()).then(|| {
        format!(
            "ip daddr {address} {transport} dport {port} dnat ip to jhash {of} mod {} seed {SEED:#x} map {{ {} }}",
            slots.len(),
            slots.join(", ")
        )
    })
}

fn hide_client(route: &Route) -> Option<String> {
    let Route { address, port, transport, keeps_client_address, .. } = route;
    (!keeps_client_address).then(|| {
        let transport = transport.as_str();
        format!(
            "meta l4proto {transport} ct original ip daddr {address} ct original proto-dst {port} masquerade"
        )
    })
}

#[cfg(test)]
mod tests;
