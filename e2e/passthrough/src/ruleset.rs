// SPDX-License-Identifier: Apache-2.0
//! The kernel's rules for a state of the cloud: each new flow to a VIP gets the mark of a target. Pure.
//!
//! No packet is changed. The mark of a flow, which connection tracking keeps, chooses the route of its packets. Filters decide about new
//! flows only.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use ipnet::IpNet;
use steerage_nlb::cloud::Transport;
use steerage_nlb::health::{Health, Key, Released};

use crate::cloud::{Affinity, Cloud, Filter};
use crate::marks::Marks;

/// The table of all rules.
pub const TABLE: &str = "steerage_passthrough";
/// Without a fixed seed, each new version of the rules would hash differently.
const SEED: u32 = 0x5eed;

/// Where new flows to a VIP go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The VIP.
    pub vip: IpAddr,
    /// The protocol.
    pub transport: Transport,
    /// The ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// The name of the pool.
    pub pool: String,
    /// By what the target of a flow is chosen.
    pub affinity: Affinity,
    /// The marks of the targets, each with its weight, which is not 0.
    pub targets: Vec<(u32, u32)>,
}

/// Flows that end: their entries in connection tracking are deleted. The next packet of one is like that of a new flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The VIP.
    pub vip: IpAddr,
    /// The protocol.
    pub transport: Transport,
    /// The ports whose flows stay.
    pub kept: Vec<RangeInclusive<u16>>,
    /// Only flows with this mark end; `None` means all.
    pub mark: Option<u32>,
}

/// The routes of all rules, in order.
pub fn routes(cloud: &Cloud, health: &Health, weights: &BTreeMap<Key, u32>, marks: &mut Marks) -> Vec<Route> {
    let mut routes = Vec::new();
    for rule in &cloud.rules {
        let receivers =
            if rule.fails_open { health.receivers(&rule.pool) } else { health.healthy(&rule.pool) };
        let weight = |target: &SocketAddr| {
            if !rule.is_weighted {
                return 1;
            }
            let ids = cloud.pools.get(&rule.pool).into_iter().flat_map(|pool| &pool.group.targets);
            let id = ids.into_iter().find(|(_, address)| *address == target).map(|(id, _)| id.clone());
            id.and_then(|id| weights.get(&(rule.pool.clone(), id))).copied().unwrap_or(0)
        };
        let weighed: Vec<_> = receivers.iter().map(|to| (weight(to), to.ip())).collect();
        // If all weigh nothing, they are equal.
        let is_equal = weighed.iter().all(|(weight, _)| *weight == 0);
        let weighed = weighed.into_iter().map(|(weight, to)| (if is_equal { 1 } else { weight }, to));
        let targets = weighed.filter(|(weight, _)| *weight > 0).map(|(weight, to)| (marks.of(to), weight));
        routes.push(Route {
            vip: rule.vip,
            transport: rule.transport,
            ports: rule.ports.clone(),
            pool: rule.pool.clone(),
            affinity: rule.affinity,
            targets: targets.collect(),
        });
    }
    routes.sort_by_key(|route| (route.vip, route.transport, route.ports.first().map(|range| *range.start())));
    routes
}

/// The flows to ports that are no longer forwarded, and those to released targets.
pub fn ended(before: &[Route], after: &[Route], released: &[Released], marks: &mut Marks) -> Vec<Ended> {
    let mut ended = Vec::new();
    for route in before {
        let Route { vip, transport, .. } = *route;
        let same = || after.iter().filter(move |other| other.vip == vip && other.transport == transport);
        let kept: Vec<_> = same().flat_map(|other| other.ports.iter().cloned()).collect();
        let all = Ended { vip, transport, kept, mark: None };
        let is_kept = |range: &RangeInclusive<u16>| {
            all.kept.iter().any(|kept| kept.contains(range.start()) && kept.contains(range.end()))
        };
        if !route.ports.iter().all(is_kept) && !ended.contains(&all) {
            ended.push(all);
        }
    }
    for Released { group, target } in released {
        let mark = Some(marks.of(target.ip()));
        for Route { vip, transport, .. } in after.iter().filter(|route| route.pool == *group) {
            let flows = Ended { vip: *vip, transport: *transport, kept: Vec::new(), mark };
            if !ended.contains(&flows) {
                ended.push(flows);
            }
        }
    }
    ended
}

/// The whole table, in place of its former content, as `nft -f` takes it: at once or not at all. `vips` are all addresses that load
/// balancers may have; from `inside`, the interface of the nodes, none is reached.
pub fn ruleset(vips: &[IpNet], inside: &str, filters: &[Filter], routes: &[Route]) -> String {
    let vips: Vec<_> = [true, false].map(|is_v4| destination(vips, is_v4)).into_iter().flatten().collect();
    // What has no mark is dropped before a route is looked for: there is none, and the client would be told.
    let outside = format!("\t\tiifname != \"{inside}\"");
    let steer = vips.iter().fold(
        format!(
            "{outside} ct state new ct mark 0 jump balance\n\
             {outside} ct direction original ct mark != 0 meta mark set ct mark\n"
        ),
        |text, vips| text + &format!("\t\t{vips} meta mark 0 drop\n"),
    );
    let mut balance = String::new();
    for vip in unique(routes) {
        let _ = writeln!(balance, "\t\t{} daddr {vip} jump admit", family(vip.is_ipv4()));
    }
    for rule in routes.iter().filter_map(forward) {
        let _ = writeln!(balance, "\t\t{rule}");
    }
    let mut admit = filters.iter().flat_map(verdicts).fold(String::new(), |mut text, rule| {
        let _ = writeln!(text, "\t\t{rule}");
        text
    });
    admit.push_str("\t\tdrop\n");
    let chains = [
        ("admit", String::new(), admit),
        ("balance", String::new(), balance),
        ("steer", "type filter hook prerouting priority -150; policy accept;".to_owned(), steer),
    ];
    // A base chain stays, and only its rules change: no packet meets the time in between.
    let mut text = format!("table inet {TABLE} {{\n");
    for (name, hook, _) in &chains {
        let _ = writeln!(text, "\tchain {name} {{ {hook} }}");
    }
    let _ = writeln!(text, "}}\nflush table inet {TABLE}\ntable inet {TABLE} {{");
    for (name, _, rules) in &chains {
        let _ = writeln!(text, "\tchain {name} {{\n{rules}\t}}");
    }
    text.push_str("}\n");
    text
}

fn unique(routes: &[Route]) -> Vec<IpAddr> {
    let mut vips: Vec<_> = routes.iter().map(|route| route.vip).collect();
    vips.dedup();
    vips
}

fn family(is_v4: bool) -> &'static str {
    if is_v4 { "ip" } else { "ip6" }
}

fn set<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    format!("{{ {} }}", items.join(", "))
}

fn ports(ranges: &[RangeInclusive<u16>]) -> String {
    set(ranges.iter().map(|range| match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    }))
}

fn of_family(nets: &[IpNet], is_v4: bool) -> Vec<IpNet> {
    let mut nets: Vec<_> =
        nets.iter().filter(|net| net.addr().is_ipv4() == is_v4).map(IpNet::trunc).collect();
    nets = IpNet::aggregate(&nets);
    nets
}

fn destination(nets: &[IpNet], is_v4: bool) -> Option<String> {
    let nets = of_family(nets, is_v4);
    (!nets.is_empty()).then(|| format!("{} daddr {}", family(is_v4), set(nets)))
}

/// A rule for each IP family that a filter may match.
fn verdicts(filter: &Filter) -> Vec<String> {
    let Filter { allows, sources, destinations, transport, ports: ranges } = filter;
    let verdict = if *allows { "return" } else { "drop" };
    let of_transport = match (transport, ranges.is_empty()) {
        (Some(transport), true) => format!("meta l4proto {} ", transport.as_str()),
        (Some(transport), false) => format!("{} dport {} ", transport.as_str(), ports(ranges)),
        (None, true) => String::new(),
        (None, false) => format!("meta l4proto {{ tcp, udp }} th dport {} ", ports(ranges)),
    };
    let of = |is_v4: bool| {
        let part = |field: &str, nets: &[IpNet]| {
            let own = of_family(nets, is_v4);
            match (nets.is_empty(), own.is_empty()) {
                (true, _) => Some(String::new()),
                (false, true) => None,
                (false, false) => Some(format!("{} {field} {} ", family(is_v4), set(own))),
            }
        };
        let addresses = format!("{}{}", part("saddr", sources)?, part("daddr", destinations)?);
        let protocol = if is_v4 { "ipv4" } else { "ipv6" };
        Some(format!("meta nfproto {protocol} {addresses}{of_transport}{verdict}"))
    };
    [true, false].into_iter().filter_map(of).collect()
}

/// Without targets the packet gets no mark, and is dropped.
fn forward(route: &Route) -> Option<String> {
    let Route { vip, transport, ports: ranges, affinity, targets, .. } = route;
    let (family, transport) = (family(vip.is_ipv4()), transport.as_str());
    let of = match affinity {
        Affinity::Client => format!("{family} saddr"),
        Affinity::Flow => {
            format!("{family} saddr . {transport} sport . {family} daddr . {transport} dport")
        }
    };
    let mut total = 0;
    let mut slots = Vec::new();
    for (mark, weight) in targets {
        let last = total + weight - 1;
        let range = if total == last { total.to_string() } else { format!("{total}-{last}") };
        slots.push(format!("{range} : {mark}"));
        total += weight;
    }
    (total > 0).then(|| {
        format!(
            "{family} daddr {vip} {transport} dport {} ct mark set jhash {of} mod {total} seed {SEED:#x} map {{ {} }}",
            ports(ranges),
            slots.join(", ")
        )
    })
}

#[cfg(test)]
mod tests;
