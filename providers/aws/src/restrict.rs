// SPDX-License-Identifier: Apache-2.0
//! Takes away the sources that a Service no longer admits while it is refused. `provider` calls it; `security_group_sync` keeps to it until
//! the Service is accepted. `security_group_rules` changes the rules.

use std::collections::BTreeSet;

use ipnet::IpNet;
use steerage_provider_api::{AdmittedSources, Error, Owner, Ranges};

use crate::client::Balancer;
use crate::ip_address_type::IpAddressType;
use crate::provider::Aws;
use crate::security_group::{ANY_IPV4, ANY_IPV6, MAX_RULES, NOBODY, Requested, Rule, Source};
use crate::security_group_sync::MAX_RESENT;
use crate::state::{KnownSecurityGroup, ServiceState};

/// What the rules of a refused Service are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restricted {
    /// They admit nobody whom the Service does not.
    Exactly,
    /// Some admit more: there is no room for narrower ones.
    Roughly,
    /// None is Steerage's.
    Foreign,
}

impl Aws {
    /// Admits no other sources than the requested ones, and of these only those that the load balancer admits already. Returns who may
    /// connect then; `None` without a load balancer.
    pub(crate) async fn restrict(
        &self,
        owner: &Owner,
        requested: Requested,
        entry: &mut ServiceState,
    ) -> Result<Option<AdmittedSources>, Error> {
        self.ensure_known(owner, entry).await?;
        let Some(balancer) = entry.balancer(owner).cloned() else { return Ok(None) };
        entry.restricted = Some((owner.clone(), requested));
        if balancer.security_groups.is_empty() {
            return Ok(Some(AdmittedSources::Everybody));
        }
        // Called at the first refusal, at a change of the sources and at a full comparison: somebody may have changed rules.
        self.read_present(owner, &balancer.security_groups, entry).await?;
        let restricted = self.restrict_present(owner, entry).await?;
        let Some(own) = entry.security_groups.get(owner).map(|known| &known.group) else {
            return Ok(Some(AdmittedSources::Foreign));
        };
        if restricted == Restricted::Foreign {
            return Ok(Some(AdmittedSources::Foreign));
        }
        let sources: BTreeSet<&Source> = own.own.iter().map(|rule| &rule.source).collect();
        let has_v6 = balancer.ip_address_type == IpAddressType::DualStack;
        if sources.contains(&ANY_IPV4) && (!has_v6 || sources.contains(&ANY_IPV6)) {
            return Ok(Some(AdmittedSources::Everybody));
        }
        let sources = sources.iter().map(ToString::to_string).collect();
        let backend = self.config.backend_security_group.as_ref();
        let has_others =
            balancer.security_groups.iter().any(|id| *id != own.id && Some(id) != backend) || own.has_more;
        Ok(Some(match restricted {
            _ if has_others || !own.others.is_empty() => AdmittedSources::WithOthers(sources),
            Restricted::Roughly => AdmittedSources::Wider(sources),
            Restricted::Exactly | Restricted::Foreign => AdmittedSources::Only(sources),
        }))
    }

    /// Reads the owner's group among those that its load balancer has, as soon as reads show what this process did. Forgets one that is no
    /// longer marked as the owner's.
    async fn read_present(
        &self,
        owner: &Owner,
        attached: &BTreeSet<String>,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let settle = self.config.settle;
        let written = entry.security_groups.get(owner).and_then(|known| known.written);
        let is_settled =
            written.is_none_or(|at| at.elapsed() >= settle) && entry.has_settled_security_groups(settle);
        if !is_settled {
            return Ok(());
        }
        match self.find_security_group(owner, attached).await? {
            Some(group) => {
                entry.security_groups.insert(owner.clone(), KnownSecurityGroup::from_read(group));
            }
            None => drop(entry.security_groups.remove(owner)),
        }
        Ok(())
    }

    /// Keeps the rules that the owner's group has to what a refused Service still admits.
    pub(crate) async fn restrict_present(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Restricted, Error> {
        if !entry.is_restricted(owner) {
            return Ok(Restricted::Foreign);
        }
        let attached = entry.balancer(owner).map(|balancer| balancer.security_groups.clone());
        let is_clear = |known: &KnownSecurityGroup| known.group.doubtful.is_empty();
        if let Some(attached) = attached.as_ref().filter(|attached| !attached.is_empty())
            && !entry.security_groups.get(owner).is_some_and(is_clear)
        {
            self.read_present(owner, attached, entry).await?;
        }
        // Where the load balancer is unknown after a failure, its rules may still go.
        let Some(known) = entry.security_groups.get(owner) else { return Ok(Restricted::Foreign) };
        if attached.is_some_and(|attached| !attached.contains(&known.group.id)) {
            return Ok(Restricted::Foreign);
        }
        if known.group.doubtful.len() > MAX_RESENT {
            return Err(Error::Unavailable(
                "AWS gave no answer to a change of the security group. Steerage reads it.".to_owned(),
            ));
        }
        // Rules that somebody takes away, or whose removal had no answer, do not come back.
        let present = &known.group.own - &known.group.doubtful;
        let requested = entry.restricted.as_ref().map(|(_, requested)| requested);
        let Some(requested) = requested.filter(|requested| !requested.sources.is_empty()) else {
            return Ok(Restricted::Exactly);
        };
        let (mut narrow, mut kept) = (narrowed(&present, requested), overlapping(&present, requested));
        if requested.keeps_ports {
            let of = |rule: &Rule| (rule.protocol, rule.port);
            let served: BTreeSet<_> = kept.iter().map(of).collect();
            let others: BTreeSet<Rule> =
                present.iter().filter(|rule| !served.contains(&of(rule))).cloned().collect();
            kept.extend(others.iter().cloned());
            if let Some(narrow) = &mut narrow {
                narrow.extend(others.iter().cloned());
            }
        }
        self.narrow_rules(owner, narrow, &kept, entry).await
    }
}

impl ServiceState {
    /// Whether the owner is refused, so that sources only leave.
    pub(crate) fn is_restricted(&self, owner: &Owner) -> bool {
        self.restricted.as_ref().is_some_and(|(of, _)| of == owner)
    }

    /// Whether clients may use Steerage's group.
    pub(crate) fn may_be_attached(&self, owner: &Owner, balancer: Option<&Balancer>) -> bool {
        let known = self.security_groups.get(owner);
        known.is_some_and(|known| balancer.is_none_or(|has| has.security_groups.contains(&known.group.id)))
    }

    /// The rules that were accepted last, for a group that no client uses yet, without sources that the owner no longer admits.
    pub(crate) fn restricted(&self, owner: &Owner, rules: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        match &self.restricted {
            Some((of, requested)) if of == owner && !requested.sources.is_empty() => {
                narrowed(rules, requested).unwrap_or_else(|| overlapping(rules, requested))
            }
            _ => rules.clone(),
        }
    }
}

/// What to keep while the listeners are not the wanted ones yet: a port of the group that is no longer wanted may still be served. Of its
/// clients, those stay whom the other ports admit, and nobody new comes: who removes a port and then admits more did not mean that port.
pub(crate) fn with_kept_ports(
    wanted: &BTreeSet<Rule>,
    present: &BTreeSet<Rule>,
    is_kept: impl Fn(u16) -> bool,
) -> BTreeSet<Rule> {
    let requested: BTreeSet<(&str, u16)> = wanted.iter().map(|rule| (rule.protocol, rule.port)).collect();
    let is_left = |rule: &&Rule| is_kept(rule.port) && !requested.contains(&(rule.protocol, rule.port));
    let left: BTreeSet<Rule> = present.iter().filter(is_left).cloned().collect();
    let sources = wanted.iter().map(|rule| rule.source.clone()).collect();
    let sources = Requested { sources, keeps_lists: false, keeps_ports: false };
    let kept = narrowed(&left, &sources).unwrap_or_else(|| overlapping(&left, &sources));
    wanted.iter().cloned().chain(kept).collect()
}

/// Which of the rules' sources are requested.
struct Lookup<'a> {
    ranges: Ranges,
    /// What a prefix list contains is unknown: only rules for everybody contain it.
    lists: Vec<&'a Source>,
}

impl<'a> Lookup<'a> {
    fn new(rules: &BTreeSet<Rule>, requested: &'a Requested) -> Self {
        let somebody = requested.sources.iter().filter(|source| !NOBODY.contains(source));
        let lists = somebody.clone().filter(|source| range(source).is_none()).collect();
        let of_v6 = || rules.iter().map(|rule| &rule.source).filter(|source| source.is_ipv6());
        let has_any = |any: &Source| rules.iter().any(|rule| rule.source == *any);
        let is_open = has_any(&ANY_IPV4) && (of_v6().next().is_none() || has_any(&ANY_IPV6));
        Self { ranges: somebody.filter_map(range).collect(), lists: if is_open { lists } else { Vec::new() } }
    }

    /// The lists that a rule of this source contains.
    fn lists(&self, source: &Source) -> &[&'a Source] {
        if *source == ANY_IPV4 { &self.lists } else { &[] }
    }
}

/// The rules that both lists admit; `None` if they are more than a group can have.
fn narrowed(rules: &BTreeSet<Rule>, requested: &Requested) -> Option<BTreeSet<Rule>> {
    let lookup = Lookup::new(rules, requested);
    let mut left = BTreeSet::new();
    for rule in rules {
        if requested.has(&rule.source) {
            left.insert(rule.clone());
        }
        let Some(present) = range(&rule.source) else { continue };
        let both = lookup.ranges.within(&present).iter().copied().map(Source::Range);
        let lists = lookup.lists(&rule.source).iter().copied().cloned();
        for source in both.chain(lists) {
            left.insert(Rule { source, ..rule.clone() });
            if left.len() > MAX_RULES {
                return None;
            }
        }
    }
    Some(left)
}

/// The rules that admit anybody who is requested, as they are.
fn overlapping(rules: &BTreeSet<Rule>, requested: &Requested) -> BTreeSet<Rule> {
    let lookup = Lookup::new(rules, requested);
    let overlaps = |rule: &&Rule| {
        let is_within = |present: IpNet| !lookup.ranges.within(&present).is_empty();
        requested.has(&rule.source)
            || !lookup.lists(&rule.source).is_empty()
            || range(&rule.source).is_some_and(is_within)
    };
    rules.iter().filter(overlaps).cloned().collect()
}

fn range(source: &Source) -> Option<IpNet> {
    match source {
        Source::Range(range) => Some(*range),
        Source::PrefixList(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        text.parse().map_or_else(|_| Source::PrefixList(text.to_owned()), Source::Range)
    }

    fn rules(sources: &[&str]) -> BTreeSet<Rule> {
        let rule = |text: &&str| Rule { protocol: "tcp", port: 80, source: source(text) };
        sources.iter().map(rule).collect()
    }

    fn wish(sources: BTreeSet<Source>) -> Requested {
        Requested { sources, keeps_lists: false, keeps_ports: false }
    }

    #[test]
    fn rules_of_a_refused_service_only_leave() {
        for (present, requested, left) in [
            (&["10.0.0.0/8", "192.0.2.0/24"][..], &["192.0.2.0/24"][..], &["192.0.2.0/24"][..]),
            (&["192.0.2.0/24"], &["192.0.2.0/24", "10.0.0.0/8"], &["192.0.2.0/24"]),
            (&["10.0.0.0/8"], &["10.1.0.0/16"], &["10.1.0.0/16"]),
            (&["0.0.0.0/0"], &["10.1.0.0/16", "pl-1"], &["10.1.0.0/16", "pl-1"]),
            (&["0.0.0.0/0", "::/0"], &["2001:db8::/32", "pl-1"], &["2001:db8::/32", "pl-1"]),
            (&["0.0.0.0/0", "2001:db8::/32"], &["pl-1"], &[]),
            (&["pl-1", "pl-2", "10.0.0.0/8"], &["pl-1"], &["pl-1"]),
            (&["pl-1"], &["10.0.0.0/8"], &[]),
            (&["0.0.0.0/0"], &["0.0.0.0/32"], &[]),
            (&["0.0.0.0/0"], &["0.0.0.0/0"], &["0.0.0.0/0"]),
        ] {
            let requested: BTreeSet<Source> = requested.iter().map(|text| source(text)).collect();
            let found = narrowed(&rules(present), &wish(requested.clone()));
            assert_eq!(found, Some(rules(left)), "{present:?} {requested:?}");
        }
    }

    #[test]
    fn ports_that_are_still_served_keep_clients_and_admit_nobody_new() {
        let of = |port, text: &str| Rule { protocol: "tcp", port, source: source(text) };
        for (wanted, present, kept) in [
            ("10.0.0.0/8", "0.0.0.0/0", Some("10.0.0.0/8")),
            ("0.0.0.0/0", "10.0.0.0/8", Some("10.0.0.0/8")),
            ("192.0.2.0/24", "10.0.0.0/8", None),
            ("pl-1", "0.0.0.0/0", Some("pl-1")),
        ] {
            let (wanted, present) =
                (BTreeSet::from([of(443, wanted)]), BTreeSet::from([of(443, present), of(80, present)]));
            let kept: BTreeSet<Rule> =
                kept.into_iter().map(|text| of(80, text)).chain(wanted.clone()).collect();
            assert_eq!(with_kept_ports(&wanted, &present, |_| true), kept);
            assert_eq!(with_kept_ports(&wanted, &present, |port| port != 80), wanted);
        }
    }

    #[test]
    fn rules_that_cannot_become_narrower_stay_if_they_overlap() {
        let many: BTreeSet<Source> =
            (0..1001_u32).map(|i| source(&format!("10.{}.{}.0/24", i / 256, i % 256))).collect();
        let present = rules(&["0.0.0.0/0", "192.0.2.0/24", "10.0.0.0/8", "2001:db8::/32", "pl-1"]);
        assert_eq!(narrowed(&present, &wish(many.clone())), None);
        assert_eq!(overlapping(&present, &wish(many)), rules(&["0.0.0.0/0", "10.0.0.0/8"]));
        let lists = BTreeSet::from([source("pl-1"), source("0.0.0.0/32")]);
        assert_eq!(overlapping(&present, &wish(lists.clone())), rules(&["pl-1"]), "IPv6 is not open");
        assert_eq!(overlapping(&rules(&["0.0.0.0/0"]), &wish(lists)), rules(&["0.0.0.0/0"]));
    }

    /// Ports and ranges of a tenant: their product would be a million rules.
    #[test]
    fn no_more_rules_are_made_than_a_group_can_have() {
        let many: BTreeSet<Source> =
            (0..25_600_u32).map(|i| source(&format!("10.{}.{}.0/24", i / 256, i % 256))).collect();
        let rule = |port| Rule { protocol: "tcp", port, source: ANY_IPV4 };
        let present: BTreeSet<Rule> = (1..=50).map(rule).collect();
        assert_eq!(narrowed(&present, &wish(many.clone())), None);
        assert_eq!(overlapping(&present, &wish(many)), present);
    }
}
