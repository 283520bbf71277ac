// SPDX-License-Identifier: Apache-2.0
//! The security group of a load balancer: which inbound rules are wanted, and which change comes first. Pure.
//!
//! A rule that somebody else added to the group stays. No order of changes leaves a wanted port without any rule, except where the quota
//! has no room for one more.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use steerage_model::shown;
use steerage_provider_api::{Error, LoadBalancer, Owner, RequestedSources};
use steerage_provider_cloud::annotation;

use crate::annotations::{
    DISABLE_SECURITY_GROUP, ICMP_FOR_PATH_MTU, MANAGE_BACKEND_RULES, PREFIX_LISTS, SOURCE_RANGES,
};
use crate::client::Tags;
use crate::config::Config;
use crate::ip_address_type::IpAddressType;
use crate::named_groups::{self, NamedGroups, OtherWishes};
use crate::{names, reasons};

/// The description of each rule of Steerage. A rule without it is not removed.
pub(crate) const RULE_DESCRIPTION: &str = "Managed by Steerage";

/// Protocol, and type in place of the port, of the ICMP message that a packet is too big. Its code is 4 (RFC 1191).
pub(crate) const PATH_MTU: (&str, u16) = ("icmp", 3);
/// The same for IPv6. Its code is 0 (RFC 4443).
pub(crate) const PATH_MTU_V6: (&str, u16) = ("icmpv6", 2);

/// An inbound rule: who may connect to a port of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rule {
    /// `tcp`, `udp`, or that of [`PATH_MTU`] or [`PATH_MTU_V6`].
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    pub(crate) source: Source,
}

/// Which clients a rule admits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Range(IpNet),
    /// The ID of a prefix list, whose ranges AWS or the account keeps.
    PrefixList(String),
}

impl Source {
    /// Whether AWS counts its rules as those of IPv6, which have a quota of their own.
    pub(crate) fn is_ipv6(&self) -> bool {
        matches!(self, Self::Range(IpNet::V6(_)))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(range) => range.fmt(f),
            Self::PrefixList(id) => id.fmt(f),
        }
    }
}

/// The clients that a Service admits, for a load balancer whose rules only leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Requested {
    /// Empty admits all.
    pub(crate) sources: BTreeSet<Source>,
    /// Whether prefix lists that the load balancer has stay: which ones the Service names cannot be read.
    pub(crate) keeps_lists: bool,
    /// Whether a port whose sources would all leave keeps them: the Service may be accepted, and others are then added first.
    pub(crate) keeps_ports: bool,
}

impl Requested {
    pub(crate) fn has(&self, source: &Source) -> bool {
        self.sources.contains(source) || self.keeps_lists && matches!(source, Source::PrefixList(_))
    }
}

/// A security group as AWS shows it. Rules of other forms, such as those for a range of ports, are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SecurityGroup {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) vpc: String,
    pub(crate) tags: Tags,
    /// Inbound rules with the description of Steerage.
    pub(crate) own: BTreeSet<Rule>,
    /// Inbound rules of others.
    pub(crate) others: BTreeSet<Rule>,
    /// Whether it has inbound rules of other forms, which are all of others.
    pub(crate) has_more: bool,
    /// Rules that were sent for a change, whose answer was lost: whether they are there is unknown.
    pub(crate) doubtful: BTreeSet<Rule>,
}

/// A security group to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewSecurityGroup {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) vpc: String,
}

/// What a load balancer needs for its security.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Security {
    /// A security group with these rules.
    Rules(BTreeSet<Rule>),
    /// Security groups of others, which an annotation names.
    Named(NamedGroups),
    /// No security group: an annotation wants none. Every client that reaches the load balancer may connect.
    Open,
}

impl Security {
    /// Whether a load balancer of this type serves as well without a security group.
    pub(crate) fn is_open_to_all(&self, ip_address_type: IpAddressType) -> bool {
        let everybody = match ip_address_type {
            IpAddressType::Ipv4 => BTreeSet::from([&ANY_IPV4]),
            IpAddressType::DualStack => BTreeSet::from([&ANY_IPV4, &ANY_IPV6]),
        };
        match self {
            Self::Rules(rules) => rules.iter().map(|rule| &rule.source).collect::<BTreeSet<_>>() == everybody,
            Self::Named(_) => false,
            Self::Open => true,
        }
    }
}

pub(crate) const ANY_IPV4: Source = Source::Range(IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)));
pub(crate) const ANY_IPV6: Source = Source::Range(IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)));
/// The ranges that no client has. They need no rule.
pub(crate) const NOBODY: [Source; 2] = [
    Source::Range(IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 32))),
    Source::Range(IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128))),
];
/// AWS's limit for all groups of a network interface. Its quota is lower, unless it is raised.
pub(crate) const MAX_RULES: usize = 1000;

/// The security of a load balancer with these listeners: port and protocol of each. `backend` is the group that nodes admit.
pub(crate) fn security<'a>(
    lb: &LoadBalancer,
    listeners: impl Iterator<Item = (u16, &'a str)>,
    ip_address_type: IpAddressType,
    backend: Option<&str>,
) -> Result<Security, Error> {
    let sources = sources(lb, ip_address_type)?;
    let backend =
        switch(lb, MANAGE_BACKEND_RULES, ("true", "false"))?.then(|| backend.ok_or_else(no_backend));
    let others = OtherWishes {
        has_sources: !sources.is_empty(),
        is_disabled: is_disabled(lb)?,
        has_path_mtu: switch(lb, ICMP_FOR_PATH_MTU, ("on", "off"))?,
    };
    let backend = backend.transpose()?;
    if others.is_disabled && backend.is_some() {
        let problem = format!(
            "Annotation {MANAGE_BACKEND_RULES} requests that nodes admit the load balancer by its security group, but annotation \
             {DISABLE_SECURITY_GROUP} requests none."
        );
        return Err(annotation::conflict(&problem, "Remove one of them."));
    }
    if let Some(named) = named_groups::read(lb, others)? {
        return Ok(Security::Named(named.with(backend)));
    }
    if others.is_disabled {
        if sources.is_empty() {
            return Ok(Security::Open);
        }
        let problem = format!(
            "The Service restricts its sources, but annotation {DISABLE_SECURITY_GROUP} requests a load balancer without a security \
             group, which restricts nothing."
        );
        return Err(annotation::conflict(&problem, "Remove the annotation, or the source ranges."));
    }
    let mut sources = match ip_address_type {
        _ if !sources.is_empty() => sources,
        IpAddressType::Ipv4 => BTreeSet::from([ANY_IPV4]),
        IpAddressType::DualStack => BTreeSet::from([ANY_IPV4, ANY_IPV6]),
    };
    sources.retain(|source| !NOBODY.contains(source));
    let ports: Vec<(u16, &str)> = listeners.collect();
    let protocols = ports.iter().flat_map(|(port, protocol)| {
        let protocols: &[&str] = match *protocol {
            "UDP" => &["udp"],
            "TCP_UDP" => &["tcp", "udp"],
            _ => &["tcp"],
        };
        protocols.iter().map(|protocol| (*protocol, *port))
    });
    let path_mtu = if others.has_path_mtu { &[PATH_MTU, PATH_MTU_V6][..] } else { &[] };
    let protocols: Vec<(&'static str, u16)> = protocols.chain(path_mtu.iter().copied()).collect();
    // Counted before they are made: ranges may be tens of thousands, and ports too many to multiply them with.
    let count: usize = protocols
        .iter()
        .map(|(protocol, _)| sources.iter().filter(|source| can_have(protocol, source)).count())
        .sum();
    if count > MAX_RULES {
        let message = format!(
            "The Service needs {count} rules in a security group, one for each port, protocol and source range, but AWS allows \
             {MAX_RULES} at most. No load balancer is created or changed. Merge source ranges, or split the Service."
        );
        return Err(Error::invalid(reasons::TOO_MANY_SOURCE_RANGES, message));
    }
    Ok(Security::Rules(rules(&protocols, &sources.iter().collect())))
}

/// Whether there can be a rule: the messages of ICMP have a protocol for each family.
fn can_have(protocol: &str, source: &Source) -> bool {
    match source {
        Source::Range(IpNet::V6(_)) => protocol != PATH_MTU.0,
        Source::Range(IpNet::V4(_)) | Source::PrefixList(_) => protocol != PATH_MTU_V6.0,
    }
}

/// A rule for each protocol with port and each source, if there can be one.
fn rules(protocols: &[(&'static str, u16)], sources: &BTreeSet<&Source>) -> BTreeSet<Rule> {
    let of = |&(protocol, port): &(&'static str, u16)| {
        let sources = sources.iter().filter(move |source| can_have(protocol, source));
        sources.map(move |&source| Rule { protocol, port, source: source.clone() })
    };
    protocols.iter().flat_map(of).collect()
}

/// Nodes would not admit a load balancer of which its annotations say that they do.
fn no_backend() -> Error {
    let message = format!(
        "Annotation {MANAGE_BACKEND_RULES} is true, but Steerage changes no security group of nodes, and has no group that nodes admit: \
         its flag --aws-backend-security-group is not set. No load balancer is created or changed. Remove the annotation, or ask the \
         operator of Steerage for the flag."
    );
    Error::invalid(reasons::ANNOTATION_NOT_SUPPORTED, message)
}

fn is_disabled(lb: &LoadBalancer) -> Result<bool, Error> {
    switch(lb, DISABLE_SECURITY_GROUP, ("true", "false"))
}

/// Whether an annotation has the first value. Without it, it has the second.
fn switch(lb: &LoadBalancer, name: &str, (on, off): (&str, &str)) -> Result<bool, Error> {
    match lb.annotations.get(name).map(|text| text.trim()) {
        Some(text) if text == on => Ok(true),
        Some(text) if text != off => {
            let problem = format!("has the wrong value `{}`", shown(text));
            Err(annotation::invalid(name, &problem, &format!("Use {on} or {off}.")))
        }
        _ => Ok(false),
    }
}

/// The source ranges of the field or, without it, of the annotation, and the prefix lists. Empty admits all. A range of a family that no
/// client can use needs no rule.
fn sources(lb: &LoadBalancer, ip_address_type: IpAddressType) -> Result<BTreeSet<Source>, Error> {
    let (ranges, origin) = if lb.source_ranges.is_empty() {
        (annotation::source_ranges(&lb.annotations)?, SOURCE_RANGES)
    } else {
        (lb.source_ranges.clone(), "spec.loadBalancerSourceRanges")
    };
    let has_v6 = ip_address_type == IpAddressType::DualStack;
    let reachable = ranges.iter().filter(|range| has_v6 || matches!(range, IpNet::V4(_)));
    let mut found: BTreeSet<Source> = reachable.map(|range| Source::Range(range.trunc())).collect();
    if found.is_empty() && !ranges.is_empty() {
        // No rule would mean no client, a rule for everybody the opposite of the wish.
        let problem = format!("The load balancer has IPv4 only, and {origin} has no IPv4 range.");
        return Err(annotation::conflict(&problem, "Add an IPv4 range, or remove the ranges."));
    }
    found.extend(prefix_lists(&lb.annotations)?.into_iter().map(Source::PrefixList));
    Ok(found)
}

/// The same of a Service that is refused, whatever its load balancer has. Ranges count also where the annotation of prefix lists beside
/// them cannot be read.
pub(crate) fn requested_sources(requested: &RequestedSources) -> Result<Requested, Error> {
    let RequestedSources { ranges, annotations } = requested;
    requested_from(ranges, annotations)
}

/// The same of a Service that may be accepted.
pub(crate) fn requested_of(lb: &LoadBalancer) -> Result<Requested, Error> {
    Ok(Requested { keeps_ports: true, ..requested_from(&lb.source_ranges, &lb.annotations)? })
}

fn requested_from(ranges: &[IpNet], annotations: &BTreeMap<String, String>) -> Result<Requested, Error> {
    let of_annotation = if ranges.is_empty() { annotation::source_ranges(annotations)? } else { Vec::new() };
    let ranges = ranges.iter().chain(&of_annotation).map(|range| Source::Range(range.trunc()));
    let mut sources: BTreeSet<Source> = ranges.collect();
    let lists = prefix_lists(annotations);
    if lists.is_err() && !sources.is_empty() {
        return Ok(Requested { sources, keeps_lists: true, keeps_ports: false });
    }
    sources.extend(lists?.into_iter().map(Source::PrefixList));
    Ok(Requested { sources, keeps_lists: false, keeps_ports: false })
}

fn prefix_lists(annotations: &BTreeMap<String, String>) -> Result<Vec<String>, Error> {
    let Some(text) = annotations.get(PREFIX_LISTS) else { return Ok(Vec::new()) };
    let id = |item: &str| {
        if item.starts_with("pl-") {
            return Ok(item.to_owned());
        }
        let problem = format!("has the wrong value `{}`", shown(item));
        Err(annotation::invalid(
            PREFIX_LISTS,
            &problem,
            "Use IDs of prefix lists, pl-…, separated by commas.",
        ))
    };
    let ids = text.split(',').map(|item| id(item.trim()));
    ids.collect()
}

/// The security group of an owner's load balancer. Each UID of a Service has its own: one that AWS releases late is in nobody's way.
pub(crate) fn new_security_group(config: &Config, owner: &Owner) -> NewSecurityGroup {
    // AWS takes 255 characters; the text before has 50.
    let shown: String = owner.service.to_string().chars().take(150).collect();
    NewSecurityGroup {
        name: names::security_group(&config.cluster, owner),
        description: format!("Steerage: clients of the load balancer of Service {shown}"),
        vpc: config.vpc.clone(),
    }
}

impl SecurityGroup {
    /// The one of an owner's groups that its load balancer has or gets. After a hand-over to another Service, its name is another
    /// than that of a new one.
    pub(crate) fn choose(
        groups: Vec<Self>,
        wanted: &NewSecurityGroup,
        attached: &BTreeSet<String>,
    ) -> Option<Self> {
        let in_vpc = groups.into_iter().filter(|group| group.vpc == wanted.vpc);
        in_vpc.max_by_key(|group| (attached.contains(&group.id), group.name == wanted.name))
    }

    fn has(&self, rule: &Rule) -> bool {
        !self.doubtful.contains(rule) && (self.own.contains(rule) || self.others.contains(rule))
    }

    /// The wanted rules that are missing. Those of a port without any come first.
    pub(crate) fn missing(&self, wanted: &BTreeSet<Rule>) -> Vec<Rule> {
        let mut served: BTreeSet<(&str, u16)> =
            wanted.iter().filter(|rule| self.has(rule)).map(|rule| (rule.protocol, rule.port)).collect();
        let mut ranked: Vec<(bool, Rule)> = Vec::new();
        for rule in wanted.iter().filter(|rule| !self.has(rule)) {
            ranked.push((!served.insert((rule.protocol, rule.port)), rule.clone()));
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, rule)| rule).collect()
    }

    /// Rules of Steerage that are not wanted.
    pub(crate) fn surplus(&self, wanted: &BTreeSet<Rule>) -> impl Iterator<Item = &Rule> {
        self.own.union(&self.doubtful).filter(|rule| !wanted.contains(rule))
    }

    /// Whether every wanted rule is there, and no other of Steerage.
    pub(crate) fn has_exactly(&self, wanted: &BTreeSet<Rule>) -> bool {
        wanted.iter().all(|rule| self.has(rule)) && self.surplus(wanted).next().is_none()
    }

    /// The wanted ports without a wanted rule: adding theirs failed, or comes later.
    fn unserved(&self, wanted: &BTreeSet<Rule>) -> BTreeSet<(&'static str, u16)> {
        let mut ports: BTreeSet<_> = wanted.iter().map(|rule| (rule.protocol, rule.port)).collect();
        for rule in wanted.iter().filter(|rule| self.has(rule)) {
            ports.remove(&(rule.protocol, rule.port));
        }
        ports
    }

    /// The rules to remove: none of a wanted port that has no wanted rule yet.
    pub(crate) fn removable(&self, wanted: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        let unserved = self.unserved(wanted);
        self.surplus(wanted).filter(|rule| !unserved.contains(&(rule.protocol, rule.port))).cloned().collect()
    }

    /// The rules to remove first where the quota of a family has no room: all of it that are not wanted, but one of each port that has
    /// no wanted rule.
    pub(crate) fn spare(&self, wanted: &BTreeSet<Rule>, is_ipv6: bool) -> BTreeSet<Rule> {
        let mut unserved = self.unserved(wanted);
        let of_family = self.surplus(wanted).filter(|rule| rule.source.is_ipv6() == is_ipv6);
        of_family.filter(|rule| !unserved.remove(&(rule.protocol, rule.port))).cloned().collect()
    }

    /// A rule that gives its room to `rule`, after the spare ones are gone: one of the same port, or any of the family.
    pub(crate) fn rule_to_replace(&self, wanted: &BTreeSet<Rule>, rule: &Rule) -> Option<Rule> {
        let is_of_family = |old: &&Rule| old.source.is_ipv6() == rule.source.is_ipv6();
        let surplus = || self.surplus(wanted).filter(is_of_family);
        let same = surplus().find(|old| (old.protocol, old.port) == (rule.protocol, rule.port));
        let removable = self.removable(wanted);
        removable.iter().find(is_of_family).or(same).or_else(|| surplus().next()).cloned()
    }

    /// The rule is there.
    pub(crate) fn added(&mut self, rule: Rule) {
        self.doubtful.remove(&rule);
        self.own.insert(rule);
    }

    /// The rule is gone.
    pub(crate) fn removed(&mut self, rule: &Rule) {
        self.doubtful.remove(rule);
        self.own.remove(rule);
        self.others.remove(rule);
    }
}

#[cfg(test)]
mod tests;
