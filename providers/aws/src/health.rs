// SPDX-License-Identifier: Apache-2.0
//! The health of the targets, and how often AWS is asked for it.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_provider_api::{Error, Health, HealthState, Owner, TargetHealth};
use tokio::time::Instant;

use crate::client::RegisteredTarget;
use crate::health_parts;
use crate::provider::Aws;
use crate::registered::RegisteredIds;
use crate::state::ServiceState;
use crate::targets;

/// Read health again after this time, because AWS does not notify.
const HEALTH_POLL: Duration = Duration::from_mins(1);
/// The same while no target is healthy.
const HEALTH_POLL_UNDECIDED: Duration = Duration::from_secs(15);
/// All Services together read the health of at most one target group in this time. AWS refills the calls that only read at about
/// ten a second.
const HEALTH_READ_SHARE: Duration = Duration::from_millis(500);
/// AWS's reason for a target that no load balancer uses, or whose zone the load balancer lacks.
const NOT_IN_USE: &str = "Target.NotInUse";
/// A load balancer whose targets stay unused is compared once more after this time.
const COMPARE_UNUSED: Duration = Duration::from_mins(30);

/// Whether AWS says of all targets of a group that nothing uses them.
fn are_unused(targets: &[RegisteredTarget]) -> bool {
    let mut stay = targets.iter().filter(|target| target.state != HealthState::Draining).peekable();
    stay.peek().is_some()
        && stay.all(|target| target.state == HealthState::Unused && target.reason.starts_with(NOT_IN_USE))
}

impl Aws {
    pub(crate) async fn read_health(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Health, Error> {
        entry.adopt_list(owner);
        let groups: Vec<String> = match &entry.resources {
            Some((known, resources)) if known == owner => {
                // Old instances or pods are no news while their group waits to be deleted.
                let stays = |name: &String| !entry.leaving.contains_key(name);
                // AWS checks no target of another group, such as one whose listener it refused: that says nothing about health.
                let is_used = |arn: &String| {
                    let mut forwarding = resources.listeners.iter().map(|listener| &listener.group_arn);
                    resources.listeners.is_empty() || forwarding.any(|group| group.as_ref() == Some(arn))
                };
                let groups =
                    resources.groups.iter().filter(|(name, group)| stays(name) && is_used(&group.arn));
                groups.map(|(_, group)| group.arn.clone()).collect()
            }
            _ => self.read(owner, entry).await?.mine.groups.into_values().map(|g| g.arn).collect(),
        };
        let read = groups.len();
        let shares = std::mem::take(&mut entry.shares_health);
        let mut worst: BTreeMap<String, TargetHealth> = BTreeMap::new();
        let mut parts = Vec::new();
        let mut has_unused = false;
        for arn in groups {
            let targets = self.health_of(&arn, entry, shares).await?;
            has_unused |= are_unused(&targets);
            let settle = self.config.settle;
            let is_settled = entry.registered.get(&arn).is_none_or(|known| known.is_settled(settle));
            parts.extend(health_parts::part(owner, &arn, &targets, entry, is_settled));
            for target in targets {
                let name =
                    entry.target_names.get(&target.id).cloned().unwrap_or_else(|| target.id.to_string());
                let found = TargetHealth {
                    target: name.clone(),
                    family: None,
                    state: target.state,
                    reason: target.reason,
                };
                match worst.get(&name) {
                    Some(known) if !found.state.is_worse_than(known.state) => {}
                    _ => drop(worst.insert(name, found)),
                }
            }
        }
        self.compare_unused(owner, entry, has_unused);
        let targets: Vec<TargetHealth> = worst.into_values().collect();
        let is_steady = targets.iter().any(|target| target.state == HealthState::Healthy);
        let base = if is_steady { HEALTH_POLL } else { HEALTH_POLL_UNDECIDED };
        let reads = u32::try_from(self.services_known() * read).unwrap_or(u32::MAX);
        Ok(Health {
            targets,
            omitted: BTreeMap::new(),
            parts,
            due: Some(base.max(HEALTH_READ_SHARE.saturating_mul(reads))),
        })
    }

    /// Has the load balancer compared that should use its targets and, as AWS says, does not: somebody deleted it or a listener. Where all
    /// targets are in zones that the load balancer lacks, that stays so: it is compared once, and seldom again. Each such comparison follows a
    /// read of health, of which there are few at a time.
    fn compare_unused(&self, owner: &Owner, entry: &mut ServiceState, has_unused: bool) {
        if !has_unused {
            entry.compared_unused = None;
            return;
        }
        // Reads may show the structure as it was before a change.
        let is_in_place = entry.complete.as_ref().is_some_and(|complete| complete.refused.is_none());
        if !is_in_place || !entry.is_known(owner) || entry.unsettled(self.config.settle).is_some() {
            return;
        }
        if entry.compared_unused.is_none_or(|at| at.elapsed() >= COMPARE_UNUSED) {
            entry.compared_unused = Some(Instant::now());
            tracing::warn!(service = %owner.service, reason = NOT_IN_USE, "no load balancer uses the targets of the Service; comparing the load balancer");
            self.to_reconcile.add(owner.clone());
        }
    }

    /// The targets of a group. If `shares`, those that the first comparison read a moment ago.
    async fn health_of(
        &self,
        arn: &str,
        entry: &mut ServiceState,
        shares: bool,
    ) -> Result<Vec<RegisteredTarget>, Error> {
        if shares && let Some(known) = entry.registered.get(arn).and_then(RegisteredIds::just_read) {
            return Ok(known);
        }
        let targets = match entry.registered.get(arn) {
            Some(known) => targets::listing(&*self.client, arn, known, self.config.settle).await?,
            None => self.client.targets(arn).await?,
        };
        match entry.registered.get_mut(arn) {
            Some(known) => known.refresh(&targets, self.config.settle),
            None => drop(entry.registered.insert(arn.to_owned(), RegisteredIds::of(&targets))),
        }
        Ok(targets)
    }
}
