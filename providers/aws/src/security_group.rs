// SPDX-License-Identifier: Apache-2.0
//! The security group of a load balancer: which inbound rules are wanted, and which change comes first. Pure.
//!
//! A rule that somebody else added to the group stays. No order of changes leaves a wanted port without any rule, except where the quota
//! has no room for one more.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};
use steerage_provider_api::{Error, LoadBalancer, Owner};

use crate::annotations::{
    DISABLE_SECURITY_GROUP, ICMP_FOR_PATH_MTU, MANAGE_BACKEND_RULES, PREFIX_LISTS, SOURCE_RANGES,
};
use crate::client::Tags;
use crate::config::Config;
use crate::named_groups::{self, NamedGroups, OtherWishes};
use crate::{list, names, reasons};

/// The description of each rule of Steerage. A rule without it is not removed.
pub(crate) const RULE_DESCRIPTION: &str = "Managed by Steerage";

/// Protocol, and type in place of the port, of the ICMP message that a packet is too big. Its code is 4 (RFC 1191).
pub(crate) const PATH_MTU: (&str, u16) = ("icmp", 3);

/// An inbound rule: who may connect to a port of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rule {
    /// `tcp`, `udp`, or [`PATH_MTU`]'s.
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    pub(crate) source: Source,
}

/// Which clients a rule admits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Range(Ipv4Net),
    /// The ID of a prefix list, whose ranges AWS or the account keeps.
    PrefixList(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(range) => range.fmt(f),
            Self::PrefixList(id) => id.fmt(f),
        }
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
    /// Whether a load balancer without a security group serves as well.
    pub(crate) fn is_open_to_all(&self) -> bool {
        match self {
            Self::Rules(rules) => !rules.is_empty() && rules.iter().all(|rule| rule.source == ANY_IPV4),
            Self::Named(_) => false,
            Self::Open => true,
        }
    }
}

const ANY_IPV4: Source = Source::Range(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));
/// The range that no client has. It needs no rule.
const NOBODY: Source = Source::Range(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 32));
/// AWS's limit for all groups of a network interface. Its quota is lower, unless it is raised.
const MAX_RULES: usize = 1000;

/// The security of a load balancer with these listeners: port and protocol of each. `backend` is the group that nodes admit.
pub(crate) fn security<'a>(
    lb: &LoadBalancer,
    listeners: impl Iterator<Item = (u16, &'a str)>,
    backend: Option<&str>,
) -> Result<Security, Error> {
    let sources = sources(lb)?;
    let backend =
        switch(lb, MANAGE_BACKEND_RULES, ("true", "false"))?.then(|| backend.ok_or_else(no_backend));
    let others = OtherWishes {
        has_sources: !sources.is_empty(),
        is_disabled: is_disabled(lb)?,
        has_path_mtu: path_mtu(lb)?.is_some(),
    };
    let backend = backend.transpose()?;
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
        return Err(list::conflict(&problem, "Remove the annotation, or the source ranges."));
    }
    let mut sources = if sources.is_empty() { BTreeSet::from([ANY_IPV4]) } else { sources };
    sources.remove(&NOBODY);
    let ports: Vec<(u16, &str)> = listeners.collect();
    let protocols = ports.iter().flat_map(|(port, protocol)| {
        let protocols: &[&str] = match *protocol {
            "UDP" => &["udp"],
            "TCP_UDP" => &["tcp", "udp"],
            _ => &["tcp"],
        };
        protocols.iter().map(|protocol| (*protocol, *port))
    });
    let protocols: Vec<(&'static str, u16)> = protocols.chain(path_mtu(lb)?).collect();
    let count = protocols.len().saturating_mul(sources.len());
    if count > MAX_RULES {
        let message = format!(
            "The Service needs {count} rules in a security group, one for each port, protocol and source range, but AWS allows \
             {MAX_RULES} at most. No load balancer is created or changed. Merge source ranges, or split the Service."
        );
        return Err(Error::invalid(reasons::TOO_MANY_SOURCE_RANGES, message));
    }
    let of = |(protocol, port): &(&'static str, u16)| {
        let (protocol, port) = (*protocol, *port);
        let rule = move |source: &Source| Rule { protocol, port, source: source.clone() };
        sources.iter().map(rule).collect::<Vec<_>>()
    };
    Ok(Security::Rules(protocols.iter().flat_map(of).collect()))
}

/// Nodes would not admit a load balancer of which its annotations say that they do.
fn no_backend() -> Error {
    let message = format!(
        "Annotation {MANAGE_BACKEND_RULES} is true, but Steerage changes no security group of nodes, and has no group that nodes admit: \
         its flag --aws-backend-security-group is not set. No load balancer is created or changed. Remove the annotation, or ask who \
         runs Steerage for the flag."
    );
    Error::invalid(reasons::ANNOTATION_NOT_SUPPORTED, message)
}

/// What to keep while the listeners are not the wanted ones yet: a port of the group that is no longer wanted may still be served, and
/// admits the sources of the others.
pub(crate) fn with_kept_ports(wanted: &BTreeSet<Rule>, group: &SecurityGroup) -> BTreeSet<Rule> {
    let sources: BTreeSet<&Source> = wanted.iter().map(|rule| &rule.source).collect();
    let kept: BTreeSet<(&'static str, u16)> =
        group.own.iter().map(|rule| (rule.protocol, rule.port)).collect();
    let of = |(protocol, port): (&'static str, u16)| {
        let rule = move |source: &&Source| Rule { protocol, port, source: (*source).clone() };
        sources.iter().map(rule).collect::<Vec<_>>()
    };
    wanted.iter().cloned().chain(kept.into_iter().flat_map(of)).collect()
}

fn is_disabled(lb: &LoadBalancer) -> Result<bool, Error> {
    switch(lb, DISABLE_SECURITY_GROUP, ("true", "false"))
}

/// The messages about a smaller MTU, if the annotation admits them.
fn path_mtu(lb: &LoadBalancer) -> Result<Option<(&'static str, u16)>, Error> {
    Ok(switch(lb, ICMP_FOR_PATH_MTU, ("on", "off"))?.then_some(PATH_MTU))
}

/// Whether an annotation has the first value. Without it, it has the second.
fn switch(lb: &LoadBalancer, name: &str, (on, off): (&str, &str)) -> Result<bool, Error> {
    match lb.annotations.get(name).map(|text| text.trim()) {
        Some(text) if text == on => Ok(true),
        Some(text) if text != off => {
            let problem = format!("has the wrong value `{text}`");
            Err(list::invalid(name, &problem, &format!("Use {on} or {off}.")))
        }
        _ => Ok(false),
    }
}

/// The source ranges of the field or, without it, of the annotation, and the prefix lists. Empty admits all.
fn sources(lb: &LoadBalancer) -> Result<BTreeSet<Source>, Error> {
    let (ranges, origin) = if lb.source_ranges.is_empty() {
        (annotation_ranges(lb)?, SOURCE_RANGES)
    } else {
        (lb.source_ranges.clone(), "spec.loadBalancerSourceRanges")
    };
    let mut found: BTreeSet<Source> = ranges
        .iter()
        .filter_map(|range| match range {
            IpNet::V4(range) => Some(Source::Range(range.trunc())),
            IpNet::V6(_) => None,
        })
        .collect();
    if found.is_empty() && !ranges.is_empty() {
        // No rule would mean no client, a rule for everybody the opposite of the wish.
        let problem = format!("The load balancer has IPv4 only, and {origin} has no IPv4 range.");
        return Err(list::conflict(&problem, "Add an IPv4 range, or remove the ranges."));
    }
    found.extend(prefix_lists(lb)?.into_iter().map(Source::PrefixList));
    Ok(found)
}

fn prefix_lists(lb: &LoadBalancer) -> Result<Vec<String>, Error> {
    let Some(text) = lb.annotations.get(PREFIX_LISTS) else { return Ok(Vec::new()) };
    let id = |item: &str| {
        if item.starts_with("pl-") {
            return Ok(item.to_owned());
        }
        let problem = format!("has the wrong value `{item}`");
        Err(list::invalid(PREFIX_LISTS, &problem, "Use IDs of prefix lists, pl-…, separated by commas."))
    };
    let ids = text.split(',').map(|item| id(item.trim()));
    ids.collect()
}

fn annotation_ranges(lb: &LoadBalancer) -> Result<Vec<IpNet>, Error> {
    let Some(text) = lb.annotations.get(SOURCE_RANGES) else { return Ok(Vec::new()) };
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    // An empty item is no range: a list of them would admit everybody.
    let parsed = |item: &str| {
        item.trim().parse().map_err(|_| {
            let problem = format!("has the wrong value `{item}`");
            list::invalid(SOURCE_RANGES, &problem, "Use ranges such as 192.0.2.0/24, separated by commas.")
        })
    };
    text.split(',').map(parsed).collect()
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
    fn surplus(&self, wanted: &BTreeSet<Rule>) -> impl Iterator<Item = &Rule> {
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

    /// The rules to remove first where the quota has no room: all that are not wanted, but one of each port that has no wanted rule.
    pub(crate) fn spare(&self, wanted: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        let mut unserved = self.unserved(wanted);
        self.surplus(wanted).filter(|rule| !unserved.remove(&(rule.protocol, rule.port))).cloned().collect()
    }

    /// A rule that gives its room to `rule`, after the spare ones are gone: one of the same port, or any.
    pub(crate) fn rule_to_replace(&self, wanted: &BTreeSet<Rule>, rule: &Rule) -> Option<Rule> {
        let same = self.surplus(wanted).find(|old| (old.protocol, old.port) == (rule.protocol, rule.port));
        self.removable(wanted).first().or(same).or_else(|| self.surplus(wanted).next()).cloned()
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
