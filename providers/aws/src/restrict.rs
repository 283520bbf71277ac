// SPDX-License-Identifier: Apache-2.0
//! Takes away the sources that a Service no longer admits while it is refused. `provider` calls it; `security_group_sync` keeps to it until
//! the Service is accepted.

use std::collections::BTreeSet;

use ipnet::IpNet;
use steerage_provider_api::{AdmittedSources, Compare, Error, Owner, intersection};

use crate::ip_address_type::IpAddressType;
use crate::provider::Aws;
use crate::security_group::{ANY_IPV4, ANY_IPV6, NOBODY, Rule, Source};
use crate::state::{KnownSecurityGroup, ServiceState};

impl Aws {
    /// Admits no other sources than the requested ones, and of these only those that the load balancer admits already. Returns who may
    /// connect then; `None` without a load balancer.
    pub(crate) async fn restrict(
        &self,
        owner: &Owner,
        requested: BTreeSet<Source>,
        entry: &mut ServiceState,
    ) -> Result<Option<AdmittedSources>, Error> {
        self.ensure_known(owner, entry).await?;
        let Some(balancer) = entry.balancer(owner).cloned() else { return Ok(None) };
        entry.restricted = Some((owner.clone(), requested));
        self.sync_security_group(owner, entry, Compare::Remembered).await?;
        if balancer.security_groups.is_empty() {
            return Ok(Some(AdmittedSources::Everybody));
        }
        let own = entry.security_groups.get(owner).map(|known| &known.group);
        let Some(own) = own.filter(|group| balancer.security_groups.contains(&group.id)) else {
            return Ok(Some(AdmittedSources::Foreign));
        };
        let sources: BTreeSet<&Source> = own.own.iter().map(|rule| &rule.source).collect();
        let has_v6 = balancer.ip_address_type == IpAddressType::DualStack;
        if sources.contains(&ANY_IPV4) && (!has_v6 || sources.contains(&ANY_IPV6)) {
            return Ok(Some(AdmittedSources::Everybody));
        }
        Ok(Some(AdmittedSources::Only(sources.iter().map(ToString::to_string).collect())))
    }

    /// The same where this process does not know which rules an accepted Service had: those that the group has.
    pub(crate) async fn restrict_present(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let is_restricted = entry.restricted.as_ref().is_some_and(|(of, _)| of == owner);
        let Some(balancer) = entry.balancer(owner).cloned().filter(|_| is_restricted) else { return Ok(()) };
        if !entry.security_groups.contains_key(owner) && !balancer.security_groups.is_empty() {
            let found = self.find_security_group(owner, &balancer.security_groups).await?;
            let found = found.map(|group| (owner.clone(), KnownSecurityGroup::from_read(group)));
            entry.security_groups.extend(found);
        }
        let Some(known) = entry.security_groups.get(owner) else { return Ok(()) };
        if !balancer.security_groups.contains(&known.group.id) {
            return Ok(());
        }
        let left = entry.restricted(owner, &known.group.own);
        self.sync_rules(owner, &left, entry).await
    }
}

impl ServiceState {
    /// The rules without those of sources that the owner, which is refused, no longer admits.
    pub(crate) fn restricted(&self, owner: &Owner, rules: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        match &self.restricted {
            Some((of, requested)) if of == owner => restricted(rules, requested),
            _ => rules.clone(),
        }
    }
}

/// The rules that both lists admit. What a prefix list contains is unknown: only rules for everybody contain it.
fn restricted(rules: &BTreeSet<Rule>, requested: &BTreeSet<Source>) -> BTreeSet<Rule> {
    if requested.is_empty() {
        return rules.clone();
    }
    let ranges: Vec<IpNet> = requested.iter().filter_map(range).collect();
    let mut left = BTreeSet::new();
    for rule in rules {
        if requested.contains(&rule.source) {
            left.insert(rule.clone());
        }
        let Some(present) = range(&rule.source) else { continue };
        let both = intersection(&[present], &ranges).into_iter().map(Source::Range);
        let lists =
            requested.iter().filter(|source| range(source).is_none() && is_for_everybody(rule, rules));
        let sources = both.chain(lists.cloned()).filter(|source| !NOBODY.contains(source));
        left.extend(sources.map(|source| Rule { source, ..rule.clone() }));
    }
    left
}

fn range(source: &Source) -> Option<IpNet> {
    match source {
        Source::Range(range) => Some(*range),
        Source::PrefixList(_) => None,
    }
}

/// Whether this rule, with another one for the other family if the port has any of it, admits everybody to its port.
fn is_for_everybody(rule: &Rule, rules: &BTreeSet<Rule>) -> bool {
    let of_v6 = rules.iter().filter(|other| other.source.is_ipv6()).collect::<Vec<_>>();
    rule.source == ANY_IPV4 && (of_v6.is_empty() || of_v6.iter().any(|other| other.source == ANY_IPV6))
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
            (&["10.0.0.0/8"], &[], &["10.0.0.0/8"]),
            (&["0.0.0.0/0"], &["0.0.0.0/32"], &[]),
            (&["0.0.0.0/0"], &["0.0.0.0/0"], &["0.0.0.0/0"]),
        ] {
            let requested: BTreeSet<Source> = requested.iter().map(|text| source(text)).collect();
            assert_eq!(restricted(&rules(present), &requested), rules(left), "{present:?} {requested:?}");
        }
    }
}
