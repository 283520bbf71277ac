// SPDX-License-Identifier: Apache-2.0
//! Changes the rules of a load balancer's security group, the missing first. `security_group` decides, `security_group_sync` calls it.
//!
//! A rule that EC2 calls a duplicate is there, and one that it does not find is gone. A change whose answer is lost leaves its rules
//! doubtful: they are sent again, whatever is wanted by then.

use std::collections::BTreeSet;

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::CallError;
use crate::provider::Aws;
use crate::reasons;
use crate::restrict::Restricted;
use crate::security_group::{Rule, SecurityGroup};
use crate::state::ServiceState;

/// AWS's code for a rule that is there already.
const DUPLICATE_RULE: &str = "InvalidPermission.Duplicate";
/// AWS's code for a rule that is gone already.
const NO_RULE: &str = "InvalidPermission.NotFound";

impl Aws {
    /// Makes the rules the wanted ones. What is not wanted goes also if an addition fails.
    pub(crate) async fn sync_rules(
        &self,
        owner: &Owner,
        wanted: &BTreeSet<Rule>,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some(known) = entry.security_groups.get_mut(owner) else { return Ok(()) };
        if known.group.has_exactly(wanted) {
            return Ok(());
        }
        if let Some((_, message)) = known.full.as_ref().filter(|(rules, _)| rules == wanted) {
            return Err(Error::invalid(reasons::QUOTA_EXCEEDED, message));
        }
        tracing::info!(service = %owner.service, security_group = known.group.id, "changing the rules of the security group");
        self.note_change();
        known.written = Some(Instant::now());
        let group = &mut known.group;
        let done = match self.add_rules(group, wanted).await {
            Err(failure) if failure.is_quota() => {
                let removed = self.remove_rules(group, wanted).await;
                let message = no_room(group, wanted, &failure);
                known.full = Some((wanted.clone(), message.clone()));
                removed.map_err(Error::from).and(Err(Error::invalid(reasons::QUOTA_EXCEEDED, message)))
            }
            // EC2 does not know the group, or does not answer: another call would not help.
            Err(failure) if failure.is_not_found() || failure.leaves_open() => Err(failure.into()),
            Err(failure) => {
                // The first failure says more.
                drop(self.remove_rules(group, wanted).await);
                Err(failure.into())
            }
            Ok(()) => self.remove_rules(group, wanted).await.map_err(Error::from),
        };
        known.written = Some(Instant::now());
        if matches!(&done, Err(Error::Conflict(_))) && entry.has_settled_security_groups(self.config.settle) {
            // It is gone, or another than what is known: the next call reads it.
            entry.security_groups.remove(owner);
        }
        done
    }

    /// Makes the rules of a refused Service the narrow ones, or, where there are none or no room for them, those that are kept. Nobody who
    /// is requested loses access, and nobody gains it.
    pub(crate) async fn narrow_rules(
        &self,
        owner: &Owner,
        narrow: Option<BTreeSet<Rule>>,
        kept: &BTreeSet<Rule>,
        entry: &mut ServiceState,
    ) -> Result<Restricted, Error> {
        let Some(known) = entry.security_groups.get_mut(owner) else { return Ok(Restricted::Foreign) };
        let narrow = narrow.filter(|rules| known.no_room_for.as_ref() != Some(rules));
        let mut is_narrow = narrow.is_some();
        if known.group.has_exactly(narrow.as_ref().unwrap_or(kept)) {
            return Ok(if is_narrow { Restricted::Exactly } else { Restricted::Roughly });
        }
        tracing::info!(service = %owner.service, security_group = known.group.id, "removing sources of a refused Service");
        self.note_change();
        known.written = Some(Instant::now());
        let mut done = self.revoke_surplus(&mut known.group, kept).await;
        if let (Ok(()), Some(narrow)) = (&done, &narrow) {
            match self.narrow_group(&mut known.group, narrow, kept).await {
                Ok(fits) => is_narrow = fits,
                Err(failure) => done = Err(failure),
            }
            known.no_room_for = (!is_narrow).then(|| narrow.clone());
        }
        known.written = Some(Instant::now());
        let done = done.map_err(Error::from);
        if matches!(&done, Err(Error::Conflict(_))) && entry.has_settled_security_groups(self.config.settle) {
            // It is gone, or another than what is known: the next call reads it.
            entry.security_groups.remove(owner);
        }
        done.map(|()| if is_narrow { Restricted::Exactly } else { Restricted::Roughly })
    }

    /// Replaces the rules that are kept by the narrow ones, which are added first. False, and nothing changes, if both together find no
    /// room.
    async fn narrow_group(
        &self,
        group: &mut SecurityGroup,
        narrow: &BTreeSet<Rule>,
        kept: &BTreeSet<Rule>,
    ) -> Result<bool, CallError> {
        let mut batches: Vec<Vec<Rule>> =
            Some(group.missing(narrow)).filter(|m| !m.is_empty()).into_iter().collect();
        while let Some(batch) = batches.pop() {
            match self.authorize(group, &batch).await {
                Ok(()) => {}
                Err(failure) if failure.is(DUPLICATE_RULE) => note_duplicate(group, batch, &mut batches),
                Err(failure) if failure.is_quota() => {
                    let count = |rules: &BTreeSet<Rule>, v6| {
                        rules.iter().filter(|r| r.source.is_ipv6() == v6).count()
                    };
                    if [false, true].iter().all(|v6| count(narrow, *v6) <= count(kept, *v6)) {
                        // They fit in the place of the others.
                        self.add_rules(group, narrow).await?;
                        break;
                    }
                    self.revoke_surplus(group, kept).await?;
                    return Ok(false);
                }
                Err(failure) => return Err(failure),
            }
        }
        self.revoke_surplus(group, narrow).await.map(|()| true)
    }

    /// Removes Steerage's rules that are not among these, also the last of a port.
    async fn revoke_surplus(
        &self,
        group: &mut SecurityGroup,
        left: &BTreeSet<Rule>,
    ) -> Result<(), CallError> {
        let rest: BTreeSet<Rule> = group.surplus(left).cloned().collect();
        if rest.is_empty() { Ok(()) } else { self.revoke(group, &rest).await }
    }

    async fn add_rules(&self, group: &mut SecurityGroup, wanted: &BTreeSet<Rule>) -> Result<(), CallError> {
        let missing = group.missing(wanted);
        if missing.is_empty() {
            return Ok(());
        }
        // Each family has a quota of its own.
        let (v6, others): (Vec<Rule>, Vec<Rule>) =
            missing.into_iter().partition(|rule| rule.source.is_ipv6());
        let others = self.add_rules_of_family(group, others, wanted).await;
        match others {
            Err(failure) if !failure.is_quota() => Err(failure),
            others => self.add_rules_of_family(group, v6, wanted).await.and(others),
        }
    }

    /// The same for missing rules of one family.
    async fn add_rules_of_family(
        &self,
        group: &mut SecurityGroup,
        missing: Vec<Rule>,
        wanted: &BTreeSet<Rule>,
    ) -> Result<(), CallError> {
        let Some(first) = missing.first() else { return Ok(()) };
        let is_ipv6 = first.source.is_ipv6();
        let mut batches = vec![missing];
        let mut has_made_room = false;
        while let Some(batch) = batches.pop() {
            match self.authorize(group, &batch).await {
                Ok(()) => {}
                Err(failure) if failure.is(DUPLICATE_RULE) => note_duplicate(group, batch, &mut batches),
                Err(failure) if failure.is_quota() => {
                    let spare = group.spare(wanted, is_ipv6);
                    if !has_made_room && !spare.is_empty() {
                        self.revoke(group, &spare).await?;
                        batches.push(batch);
                    } else if let [rule] = batch.as_slice() {
                        let Some(old) = group.rule_to_replace(wanted, rule) else { return Err(failure) };
                        self.revoke(group, &BTreeSet::from([old])).await?;
                        batches.push(batch);
                    } else {
                        halve(batch, &mut batches);
                    }
                    has_made_room = true;
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    async fn authorize(&self, group: &mut SecurityGroup, rules: &[Rule]) -> Result<(), CallError> {
        let before = group.doubtful.clone();
        group.doubtful.extend(rules.iter().cloned());
        let done = self.client.authorize(&group.id, &rules.iter().cloned().collect()).await;
        match &done {
            Ok(()) => rules.iter().for_each(|rule| group.added(rule.clone())),
            Err(failure) if failure.leaves_open() => {}
            Err(_) => group.doubtful = before,
        }
        done
    }

    async fn remove_rules(
        &self,
        group: &mut SecurityGroup,
        wanted: &BTreeSet<Rule>,
    ) -> Result<(), CallError> {
        let rest = group.removable(wanted);
        if rest.is_empty() { Ok(()) } else { self.revoke(group, &rest).await }
    }

    /// Removes all of these rules.
    pub(crate) async fn revoke(
        &self,
        group: &mut SecurityGroup,
        rules: &BTreeSet<Rule>,
    ) -> Result<(), CallError> {
        let mut batches = vec![rules.iter().cloned().collect::<Vec<_>>()];
        while let Some(batch) = batches.pop() {
            let before = group.doubtful.clone();
            group.doubtful.extend(batch.iter().cloned());
            match self.client.revoke(&group.id, &batch.iter().cloned().collect()).await {
                Ok(()) => batch.iter().for_each(|rule| group.removed(rule)),
                Err(failure) if failure.is(NO_RULE) => {
                    if let [rule] = batch.as_slice() {
                        group.removed(rule);
                    } else {
                        group.doubtful = before;
                        halve(batch, &mut batches);
                    }
                }
                Err(failure) => {
                    if !failure.leaves_open() {
                        group.doubtful = before;
                    }
                    return Err(failure);
                }
            }
        }
        Ok(())
    }
}

/// Notes that AWS has a rule of the batch: the only one, or one of either half.
fn note_duplicate(group: &mut SecurityGroup, batch: Vec<Rule>, batches: &mut Vec<Vec<Rule>>) {
    match batch.as_slice() {
        // Another may have added it, so it is not removed later, unless it was sent before.
        [rule] if group.doubtful.contains(rule) => group.added(rule.clone()),
        [rule] => drop(group.others.insert(rule.clone())),
        _ => halve(batch, batches),
    }
}

/// Puts both halves of a batch on the stack, so that its first half comes next.
fn halve(mut batch: Vec<Rule>, batches: &mut Vec<Vec<Rule>>) {
    let second = batch.split_off(batch.len() / 2);
    batches.extend([second, batch]);
}

/// Says that the quota leaves no room for all rules.
fn no_room(group: &SecurityGroup, wanted: &BTreeSet<Rule>, failure: &CallError) -> String {
    format!(
        "Security group {} has no room for {} of the {} rules that the Service needs, one for each port and source range: {}. Clients \
         without a rule cannot connect. Merge source ranges, or raise the quota of inbound rules per security group.",
        group.id,
        group.missing(wanted).len(),
        wanted.len(),
        failure.message().trim_end_matches('.')
    )
}
