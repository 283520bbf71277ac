// SPDX-License-Identifier: Apache-2.0
//! Who may connect to a Service, as rules of the nodes' network security group. Packets arrive with the load balancer's address as their
//! destination, so a rule names it. Services with equal sources, protocols and ports share a rule. Rules of others stay. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use steerage_model::Family;
use steerage_provider_api::{AdmittedSources, Error, intersection};
use steerage_provider_cloud::names;

use crate::config::Config;
use crate::desired::WantedRule;
use crate::limits;
use crate::marks;
use crate::options::Sources;
use crate::reasons;
use crate::types::{Part, SecurityGroup, SecurityRule};

/// Azure's limits for a group.
const MOST_RULES: usize = 1000;
pub(crate) const MOST_ADDRESSES: usize = 4000;
/// Of the thousand priority numbers, the last ones are of rules that deny.
pub(crate) const ALLOWING: u32 = 900;
const NUMBERS: u32 = 1000;

/// The source of a rule that admits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// A service tag; `Internet` admits everybody.
    Tag(String),
    /// Ranges of one family.
    Ranges(BTreeSet<String>),
}

/// The tag of everybody outside of the virtual network.
const INTERNET: &str = "Internet";

/// A rule that admits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Allow {
    pub(crate) family: Family,
    pub(crate) protocol: String,
    pub(crate) source: Source,
    pub(crate) ports: BTreeSet<u16>,
}

/// Who may connect to a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Admission {
    /// The Service's namespace, which has its share of the group; `None` if nothing is added.
    pub(crate) namespace: Option<String>,
    /// Its addresses.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// Addresses that it had.
    pub(crate) gone: BTreeSet<IpAddr>,
    pub(crate) allows: BTreeSet<Allow>,
    /// Whether all others are denied.
    pub(crate) denies: bool,
}

impl Admission {
    /// The rules that a Service with these ports needs.
    pub(crate) fn new(
        vips: BTreeSet<IpAddr>,
        gone: &BTreeSet<IpAddr>,
        rules: &[WantedRule],
        sources: &Sources,
        is_internal: bool,
    ) -> Self {
        let mut ports: BTreeMap<&str, BTreeSet<u16>> = BTreeMap::new();
        for rule in rules {
            ports.entry(rule.protocol).or_default().insert(rule.port);
        }
        let denies = !sources.is_everybody();
        let mut allows = BTreeSet::new();
        let families: BTreeSet<Family> = vips.iter().map(|vip| Family::of(*vip)).collect();
        for family in families {
            let mut all: Vec<Source> = sources.tags.iter().cloned().map(Source::Tag).collect();
            all.extend(widest(&sources.ranges, family).map(Source::Ranges));
            if !denies && !is_internal {
                // The virtual network is admitted by Azure's own rule.
                all.push(Source::Tag(INTERNET.to_owned()));
            }
            for source in all {
                for (protocol, ports) in &ports {
                    let (protocol, source) = ((*protocol).to_owned(), source.clone());
                    allows.insert(Allow { family, protocol, source, ports: ports.clone() });
                }
            }
        }
        Self { namespace: None, gone: gone - &vips, vips, allows, denies }
    }

    /// The same of a Service of this namespace.
    pub(crate) fn of(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    /// Nothing is left of a Service with these addresses.
    pub(crate) fn none(vips: BTreeSet<IpAddr>) -> Self {
        Self { gone: vips, ..Self::default() }
    }
}

/// Ranges of a family, without those that others contain, which Azure refuses beside each other. `None` if there are none.
fn widest(ranges: &BTreeSet<IpNet>, family: Family) -> Option<BTreeSet<String>> {
    // A range sorts before what it contains.
    let mut kept: Vec<IpNet> = Vec::new();
    for range in ranges.iter().filter(|range| Family::of(range.addr()) == family) {
        if !kept.last().is_some_and(|last| last.contains(range)) {
            kept.push(*range);
        }
    }
    let kept: BTreeSet<String> = kept.iter().map(ToString::to_string).collect();
    (!kept.is_empty()).then_some(kept)
}

/// The network security group of the nodes.
#[derive(Clone, Debug)]
pub(crate) struct SecurityGroupDocument {
    pub(crate) config: Config,
    pub(crate) path: String,
    /// The namespaces of addresses, as far as this process knows.
    known: Arc<Mutex<BTreeMap<IpAddr, String>>>,
}

impl SecurityGroupDocument {
    pub(crate) fn new(config: Config, path: String) -> Self {
        Self { config, path, known: Arc::default() }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<IpAddr, String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prefix(&self) -> String {
        format!("{}rule-", names::prefix(&self.config.cluster))
    }

    fn is_ours(&self, rule: &Part<SecurityRule>) -> bool {
        rule.name.starts_with(&self.prefix())
    }

    fn allow_name(&self, allow: &Allow) -> String {
        let Allow { family, protocol, source, ports } = allow;
        let sources = match source {
            Source::Tag(tag) => tag.clone(),
            Source::Ranges(ranges) => ranges.iter().cloned().collect::<Vec<_>>().join(","),
        };
        let ports = ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let digest = names::digest(&[marks::suffix(*family), protocol, &sources, &ports]);
        format!("{}allow-{}-{digest}", self.prefix(), marks::suffix(*family))
    }

    fn deny_name(&self, family: Family) -> String {
        format!("{}deny-{}", self.prefix(), marks::suffix(family))
    }

    /// Makes the group admit whom it should. Whether that changed anything. After an error it is as it was.
    pub(crate) fn apply(&self, group: &mut SecurityGroup, admission: &Admission) -> Result<bool, Error> {
        let Admission { namespace, vips, gone, allows, denies } = admission;
        self.known().retain(|vip, _| !gone.contains(vip));
        if let Some(namespace) = namespace {
            self.known().extend(vips.iter().map(|vip| (*vip, namespace.clone())));
        }
        let mut wanted: BTreeMap<String, (SecurityRule, BTreeSet<IpAddr>)> = BTreeMap::new();
        for allow in allows {
            let of_family = vips.iter().copied().filter(|vip| Family::of(*vip) == allow.family).collect();
            wanted.insert(self.allow_name(allow), (allow_rule(allow), of_family));
        }
        if *denies {
            for family in [Family::V4, Family::V6] {
                let of_family: BTreeSet<IpAddr> =
                    vips.iter().copied().filter(|vip| Family::of(*vip) == family).collect();
                if !of_family.is_empty() {
                    wanted.insert(self.deny_name(family), (deny_rule(), of_family));
                }
            }
        }
        let own: BTreeSet<IpAddr> = vips | gone;
        let before = &group.properties.security_rules;
        let mut rules: Vec<Part<SecurityRule>> = Vec::with_capacity(before.len() + wanted.len());
        for rule in before {
            if !self.is_ours(rule) {
                rules.push(rule.clone());
                continue;
            }
            let has = destinations(&rule.properties);
            let (fields, added) = match wanted.remove(&rule.name) {
                Some((fields, added)) => (Some(fields), added),
                None => (None, BTreeSet::new()),
            };
            let kept: BTreeSet<IpAddr> = &(&has - &own) | &added;
            if kept.is_empty() {
                continue;
            }
            let mut rule = rule.clone();
            if kept != has {
                set_destinations(&mut rule.properties, &kept);
            }
            if let Some(fields) = fields {
                correct(&mut rule.properties, fields);
            }
            rules.push(rule);
        }
        for (name, (fields, vips)) in wanted {
            let is_denying = fields.access == "Deny";
            let mut properties = SecurityRule { priority: self.free(&rules, is_denying)?, ..fields };
            set_destinations(&mut properties, &vips);
            rules.push(Part::new(name, properties));
        }
        if rules == *before {
            return Ok(false);
        }
        self.check_room(before, &rules)?;
        if let Some(namespace) = namespace {
            limits::check_rules(namespace, [before, &rules].map(|rules| self.share(rules, namespace)))?;
        }
        group.properties.security_rules = rules;
        Ok(true)
    }

    /// Makes the cluster's rules those of an earlier state of the group.
    pub(crate) fn take_rules_back(&self, group: &mut SecurityGroup, before: &SecurityGroup) {
        let rules = &mut group.properties.security_rules;
        rules.retain(|rule| !self.is_ours(rule));
        rules.extend(before.properties.security_rules.iter().filter(|rule| self.is_ours(rule)).cloned());
    }

    /// A priority number that no inbound rule has.
    fn free(&self, rules: &[Part<SecurityRule>], is_denying: bool) -> Result<u32, Error> {
        let inbound = rules.iter().filter(|rule| !rule.properties.direction.eq_ignore_ascii_case("Outbound"));
        let used: BTreeSet<u32> = inbound.map(|rule| rule.properties.priority).collect();
        let from = self.config.priority;
        let is_free = |number: &u32| !used.contains(number);
        let found = if is_denying {
            (from + ALLOWING..from + NUMBERS).rev().find(is_free)
        } else {
            (from..from + ALLOWING).find(is_free)
        };
        found.ok_or_else(|| {
            self.full(&format!("no free priority number from {from} to {}", from + NUMBERS - 1))
        })
    }

    fn full(&self, problem: &str) -> Error {
        let message = format!(
            "The network security group {} has {problem}. No rule is added, so clients of the Service are admitted as before. Use fewer \
             different source ranges and ports, or delete rules.",
            self.path
        );
        Error::invalid(reasons::QUOTA_EXCEEDED, message)
    }

    /// A change that grows the group beyond Azure's limits is refused before Azure refuses all others with it.
    fn check_room(&self, before: &[Part<SecurityRule>], after: &[Part<SecurityRule>]) -> Result<(), Error> {
        let count = |rules: &[Part<SecurityRule>]| {
            let of = |list: fn(&SecurityRule) -> usize| rules.iter().map(|rule| list(&rule.properties)).sum();
            let sources: usize = of(|rule| rule.source_address_prefixes.len().max(1));
            let destinations: usize = of(|rule| rule.destination_address_prefixes.len().max(1));
            (rules.len(), sources, destinations)
        };
        let (was, now) = (count(before), count(after));
        for (what, was, now, most) in [
            ("rules", was.0, now.0, MOST_RULES),
            ("sources in its rules", was.1, now.1, MOST_ADDRESSES),
            ("destinations in its rules", was.2, now.2, MOST_ADDRESSES),
        ] {
            if now > most && now > was {
                return Err(self.full(&format!(
                    "{was} {what}; with the Service they would be {now}, and Azure allows {most}"
                )));
            }
        }
        Ok(())
    }

    /// What a namespace has of these rules: those that are about no other one, their sources, and its addresses in all.
    fn share(&self, rules: &[Part<SecurityRule>], namespace: &str) -> [usize; 3] {
        let known = self.known();
        let [mut own, mut sources, mut addresses] = [0; 3];
        for rule in rules.iter().filter(|rule| self.is_ours(rule)).map(|rule| &rule.properties) {
            let all = destinations(rule);
            let of_it = all.iter().filter(|vip| known.get(vip).is_some_and(|of| of == namespace)).count();
            addresses += of_it;
            if of_it == all.len() {
                own += 1;
                sources += rule.source_address_prefixes.len().max(1);
            }
        }
        [own, sources, addresses]
    }

    /// The rules for these addresses, as they are.
    pub(crate) fn present(&self, group: &SecurityGroup, vips: &BTreeSet<IpAddr>) -> Admission {
        let mut admission = Admission { vips: vips.clone(), ..Admission::default() };
        let ours = group.properties.security_rules.iter().filter(|rule| self.is_ours(rule));
        for rule in ours.map(|rule| &rule.properties) {
            let Some(family) = (&destinations(rule) & vips).first().map(|vip| Family::of(*vip)) else {
                continue;
            };
            if rule.access == "Deny" {
                admission.denies = true;
                continue;
            }
            let source = match rule.source_address_prefix.as_ref().filter(|tag| !tag.is_empty()) {
                Some(tag) => Source::Tag(tag.clone()),
                None => Source::Ranges(rule.source_address_prefixes.iter().cloned().collect()),
            };
            let ports = rule.destination_port_ranges.iter().chain(&rule.destination_port_range);
            let ports = ports.filter_map(|port| port.parse().ok()).collect();
            admission.allows.insert(Allow { family, protocol: rule.protocol.clone(), source, ports });
        }
        admission
    }
}

/// The part of what is admitted that is requested. Nobody is admitted who was not.
pub(crate) fn narrowed(present: &Admission, requested: &Sources) -> Admission {
    if requested.is_everybody() {
        return present.clone();
    }
    let mut allows = BTreeSet::new();
    for allow in &present.allows {
        let sources: Vec<Source> = match &allow.source {
            // Service tags of Azure are parts of the Internet.
            Source::Tag(tag) if tag == INTERNET => {
                let ranges = widest(&requested.ranges, allow.family).map(Source::Ranges);
                ranges.into_iter().chain(requested.tags.iter().cloned().map(Source::Tag)).collect()
            }
            Source::Tag(tag) => {
                requested.tags.contains(tag).then(|| allow.source.clone()).into_iter().collect()
            }
            Source::Ranges(ranges) => {
                let has: Vec<IpNet> = ranges.iter().filter_map(|range| range.parse().ok()).collect();
                let wants: Vec<IpNet> = requested.ranges.iter().copied().collect();
                let both = intersection(&has, &wants);
                widest(&both, allow.family).map(Source::Ranges).into_iter().collect()
            }
        };
        allows.extend(sources.into_iter().map(|source| Allow { source, ..allow.clone() }));
    }
    Admission { allows, denies: true, ..present.clone() }
}

impl Admission {
    /// For users.
    pub(crate) fn admitted(&self) -> AdmittedSources {
        let mut all = BTreeSet::new();
        for allow in &self.allows {
            match &allow.source {
                Source::Tag(tag) if tag == INTERNET => return AdmittedSources::Everybody,
                Source::Tag(tag) => drop(all.insert(tag.clone())),
                Source::Ranges(ranges) => all.extend(ranges.iter().cloned()),
            }
        }
        if self.denies { AdmittedSources::Only(all) } else { AdmittedSources::WithOthers(all) }
    }
}

fn allow_rule(allow: &Allow) -> SecurityRule {
    let (tag, ranges) = match &allow.source {
        Source::Tag(tag) => (Some(tag.clone()), Vec::new()),
        Source::Ranges(ranges) => (None, ranges.iter().cloned().collect()),
    };
    SecurityRule {
        protocol: allow.protocol.clone(),
        access: "Allow".to_owned(),
        direction: "Inbound".to_owned(),
        source_port_range: Some("*".to_owned()),
        source_address_prefix: tag,
        source_address_prefixes: ranges,
        destination_port_ranges: allow.ports.iter().map(ToString::to_string).collect(),
        ..SecurityRule::default()
    }
}

fn deny_rule() -> SecurityRule {
    SecurityRule {
        protocol: "*".to_owned(),
        access: "Deny".to_owned(),
        direction: "Inbound".to_owned(),
        source_port_range: Some("*".to_owned()),
        source_address_prefix: Some("*".to_owned()),
        destination_port_range: Some("*".to_owned()),
        ..SecurityRule::default()
    }
}

/// Repairs the fields of a rule that its name stands for. Azure may list in another order.
fn correct(present: &mut SecurityRule, wanted: SecurityRule) {
    let sorted = |list: &[String]| list.iter().cloned().collect::<BTreeSet<_>>();
    let some = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    let is_same = present.protocol.eq_ignore_ascii_case(&wanted.protocol)
        && present.access == wanted.access
        && present.direction == wanted.direction
        && some(&present.source_port_range) == wanted.source_port_range
        && some(&present.source_address_prefix) == wanted.source_address_prefix
        && sorted(&present.source_address_prefixes) == sorted(&wanted.source_address_prefixes)
        && some(&present.destination_port_range) == wanted.destination_port_range
        && sorted(&present.destination_port_ranges) == sorted(&wanted.destination_port_ranges);
    if !is_same {
        *present = SecurityRule {
            priority: present.priority,
            destination_address_prefixes: std::mem::take(&mut present.destination_address_prefixes),
            ..wanted
        };
    }
}

/// The addresses to which a rule applies.
fn destinations(rule: &SecurityRule) -> BTreeSet<IpAddr> {
    let all = rule.destination_address_prefixes.iter().chain(&rule.destination_address_prefix);
    all.filter_map(|text| text.split('/').next()?.parse().ok()).collect()
}

fn set_destinations(rule: &mut SecurityRule, vips: &BTreeSet<IpAddr>) {
    rule.destination_address_prefix = None;
    rule.destination_address_prefixes = vips.iter().map(ToString::to_string).collect();
}

#[cfg(test)]
mod tests;
