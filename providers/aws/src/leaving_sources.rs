// SPDX-License-Identifier: Apache-2.0
//! Removes sources that a Service no longer admits while its structure changes: EC2 may answer while `ELBv2` does not. `provider` calls it
//! beside the structure, and `security_group_sync` does the rest afterwards.
//!
//! Only a port whose wanted rules are all there loses others, so nobody is admitted, and nobody who is wanted is cut off.

use std::collections::BTreeSet;

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::desired::Desired;
use crate::provider::Aws;
use crate::security_group::{Rule, Security};
use crate::state::{KnownSecurityGroup, ServiceState};

/// The group, taken from the Service's state, and its rules that leave. It is read again if the call is abandoned.
pub(crate) type Leaving = (KnownSecurityGroup, BTreeSet<Rule>);

/// Rules of ports whose wanted rules are all there, that are none of them.
fn leaving(present: &BTreeSet<Rule>, wanted: &BTreeSet<Rule>) -> BTreeSet<Rule> {
    let port = |rule: &Rule| (rule.protocol, rule.port);
    let ports: BTreeSet<_> = wanted.iter().map(port).collect();
    let lacking: BTreeSet<_> = wanted.difference(present).map(port).collect();
    let leaves = |rule: &&Rule| ports.contains(&port(rule)) && !lacking.contains(&port(rule));
    present.difference(wanted).filter(leaves).cloned().collect()
}

impl Aws {
    /// Removes the rules. Returns the group with what became of it.
    pub(crate) async fn remove_sources(
        &self,
        leaving: Option<Leaving>,
    ) -> Option<(KnownSecurityGroup, Result<(), Error>)> {
        let (mut known, rules) = leaving?;
        tracing::info!(security_group = known.group.id, "removing sources that the Service no longer admits");
        self.note_change();
        let done = self.revoke(&mut known.group, &rules).await;
        known.written = Some(Instant::now());
        Some((known, done.map_err(Error::from)))
    }
}

impl ServiceState {
    /// What to remove while the structure changes; `None` if nothing is.
    pub(crate) fn leaving_sources(&mut self, owner: &Owner, wanted: &Desired) -> Option<Leaving> {
        // A group that lost its tags may be another's now.
        if self.security_group_taken.is_some() {
            return None;
        }
        let Security::Rules(rules) = wanted.security_of(self.balancer(owner)?) else { return None };
        let group = &self.security_groups.get(owner)?.group;
        let rules = leaving(&group.own, rules);
        if rules.is_empty() || !group.doubtful.is_empty() {
            return None;
        }
        self.security_groups.remove(owner).map(|known| (known, rules))
    }

    /// Puts the group back. One that EC2 does not know as it was is read again.
    pub(crate) fn note_removed(
        &mut self,
        owner: &Owner,
        (known, done): (KnownSecurityGroup, Result<(), Error>),
    ) -> Result<(), Error> {
        if !matches!(done, Err(Error::Conflict(_))) {
            self.security_groups.entry(owner.clone()).or_insert(known);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security_group::Source;

    #[test]
    fn sources_leave_only_where_all_others_are_there() {
        let of = |rules: &[(u16, &str)]| -> BTreeSet<Rule> {
            let rule = |(port, text): &(u16, &str)| {
                let source =
                    text.parse().map_or_else(|_| Source::PrefixList((*text).to_owned()), Source::Range);
                Rule { protocol: "tcp", port: *port, source }
            };
            rules.iter().map(rule).collect()
        };
        let (a, b, c) = ("10.0.0.0/8", "192.0.2.0/24", "pl-1");
        for (present, wanted, gone) in [
            (&[(80, a), (80, b)][..], &[(80, b)][..], &[(80, a)][..]),
            (&[(80, a)], &[(80, b)], &[]),
            (&[(80, a), (80, b)], &[(80, b), (80, c)], &[]),
            (&[(80, a), (80, c)], &[(80, a)], &[(80, c)]),
            (&[(80, a), (80, b), (81, a)], &[(80, b), (81, b)], &[(80, a)]),
            (&[(80, a), (81, a)], &[(80, a)], &[]),
            (&[(80, a)], &[], &[]),
        ] {
            assert_eq!(leaving(&of(present), &of(wanted)), of(gone), "{present:?} {wanted:?}");
        }
    }
}
