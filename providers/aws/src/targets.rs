// SPDX-License-Identifier: Apache-2.0
//! The targets of a target group, and the calls that change them.
//!
//! AWS refuses a whole call because of one bad target. Usually its message names the target. Otherwise the call is halved until the
//! bad target is alone.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_provider_api::Compare;
use steerage_provider_cloud::Refusals;
use tokio::time::Instant;

use crate::client::{CallError, Calls, RegisteredTarget};
use crate::registered::RegisteredIds;
use crate::target_id::{TargetId, TargetNames};

/// Targets in one call. AWS documents no limit, but sometimes rejects large calls.
const BATCH: usize = 100;
/// Refused calls for one group in one try: AWS names one target in each, and a try with many of them holds a worker that others wait for.
/// The next one goes on soon.
const MAX_REFUSALS: usize = 4;
/// With so many refused targets of a group it goes on when these are tried again: what one Service requests must not use up the rate of all.
const MAX_REFUSED: usize = 20;

/// Targets that AWS refused.
pub(crate) type RefusedTargets = Refusals<TargetId>;

/// The same for tasks that register the targets of several groups at a time.
pub(crate) struct SharedRefusals<'a>(Mutex<&'a mut RefusedTargets>);

impl<'a> SharedRefusals<'a> {
    pub(crate) fn new(refused: &'a mut RefusedTargets) -> Self {
        Self(Mutex::new(refused))
    }

    fn lock(&self) -> MutexGuard<'_, &'a mut RefusedTargets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one call may do with a target group.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Whether changes by others are looked for.
    pub(crate) compare: Compare,
    /// Time after which every read shows a change.
    pub(crate) settle: Duration,
    /// Whether targets that must leave may wait for the health of others.
    pub(crate) may_hold: bool,
    /// When the call must end: it continues in the next one.
    pub(crate) until: Instant,
}

impl Limits {
    fn check_time(self) -> Result<(), CallError> {
        if Instant::now() < self.until { Ok(()) } else { Err(CallError::out_of_time()) }
    }
}

/// The registered targets of a group, read unless they are known.
pub(crate) async fn known<'a>(
    client: &dyn Calls,
    group: &str,
    registered: &'a mut HashMap<String, RegisteredIds>,
    limits: Limits,
) -> Result<&'a mut RegisteredIds, CallError> {
    Ok(match registered.entry(group.to_owned()) {
        Entry::Occupied(known) if known.get().is_reliable(limits) => known.into_mut(),
        known => known.insert_entry(RegisteredIds::of(&client.targets(group).await?)).into_mut(),
    })
}

/// Registers the wanted targets.
pub(crate) async fn add(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    wanted: &TargetNames,
    refused_targets: &SharedRefusals<'_>,
    limits: Limits,
) -> Result<(), CallError> {
    limits.check_time()?;
    let known = known(client, group, registered, limits).await?;
    let must_wait = |id: &TargetId| refused_targets.lock().must_wait(id);
    let add: Vec<TargetId> = wanted.keys().filter(|id| !known.has(id) && !must_wait(id)).cloned().collect();
    let mut batches: Vec<Vec<TargetId>> = add.chunks(BATCH).map(<[TargetId]>::to_vec).collect();
    let mut refusals = 0;
    while let Some(batch) = batches.pop() {
        if refusals >= MAX_REFUSALS {
            let untried = batch.len() + batches.iter().map(Vec::len).sum::<usize>();
            tracing::warn!(
                group_arn = group,
                refused = refusals,
                untried,
                "AWS refuses many targets of the group; trying the others later"
            );
            let refused = wanted.keys().filter(|id| must_wait(id)).count();
            return if refused < MAX_REFUSED { Err(CallError::out_of_time()) } else { Ok(()) };
        }
        limits.check_time()?;
        tracing::info!(group_arn = group, targets = ?batch, "registering targets");
        let before = known.mark_unconfirmed(&batch);
        match client.register(group, &batch).await {
            Ok(()) => {
                known.set_registered(&batch);
                refused_targets.lock().retain(|id| !batch.contains(id));
            }
            Err(failure) => {
                known.restore(before, &failure);
                if failure.is_quota() && batch.len() > 1 {
                    let (left, right) = batch.split_at(batch.len() / 2);
                    batches.extend([left.to_vec(), right.to_vec()]);
                    continue;
                }
                let is_of_target =
                    failure.is("InvalidTarget") || failure.is("ValidationError") && has_pods(&batch);
                if !is_of_target {
                    return Err(failure);
                }
                refusals += 1;
                let (bad, rest) = split_refused(&batch, failure.message());
                for id in bad {
                    refused_targets.lock().add(id, failure.message());
                }
                batches.extend(rest);
            }
        }
    }
    Ok(())
}

/// Registers the wanted targets, then deregisters all others. Returns when to call again if it waits with the latter. Where the
/// quota has no room for both, others leave first, but the last one only after a wanted one is registered.
pub(crate) async fn converge(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    wanted: &TargetNames,
    refused_targets: &SharedRefusals<'_>,
    limits: Limits,
) -> Result<Option<Duration>, CallError> {
    add_or_replace(client, group, registered, wanted, refused_targets, limits).await?;
    let Some(known) = registered.get_mut(group) else { return Ok(None) };
    if limits.may_hold && !known.others(wanted).is_empty() && known.needs_look(wanted) {
        let listing = listing(client, group, known, limits.settle).await?;
        known.refresh(&listing, limits.settle);
        // Somebody else may have taken away those without which the others must not leave.
        add_or_replace(client, group, registered, wanted, refused_targets, limits).await?;
    }
    let Some(known) = registered.get_mut(group) else { return Ok(None) };
    let others = known.others(wanted);
    if limits.may_hold
        && !others.is_empty()
        && let Some(wait) = known.hold(wanted)
    {
        return Ok(Some(wait));
    }
    known.release();
    remove(client, group, registered, &others, limits).await?;
    Ok(None)
}

/// Registers the wanted targets. Where the quota has no room for them, others leave first.
async fn add_or_replace(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    wanted: &TargetNames,
    refused_targets: &SharedRefusals<'_>,
    limits: Limits,
) -> Result<(), CallError> {
    while let Err(failure) = add(client, group, registered, wanted, refused_targets, limits).await {
        let leave = match registered.get(group) {
            Some(known) if failure.is_quota() => known.replaceable(wanted),
            _ => return Err(failure),
        };
        if leave.is_empty() {
            return Err(failure);
        }
        remove(client, group, registered, &leave, limits).await?;
    }
    Ok(())
}

/// The targets of a group. AWS may not show a new group yet, which has none that are healthy.
pub(crate) async fn listing(
    client: &dyn Calls,
    group: &str,
    known: &RegisteredIds,
    settle: Duration,
) -> Result<Vec<RegisteredTarget>, CallError> {
    match client.targets(group).await {
        Err(failure) if failure.is_not_found() && !known.is_settled(settle) => Ok(Vec::new()),
        other => other,
    }
}

async fn remove(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    ids: &[TargetId],
    limits: Limits,
) -> Result<(), CallError> {
    let Some(known) = registered.get_mut(group) else { return Ok(()) };
    for batch in ids.chunks(BATCH) {
        limits.check_time()?;
        tracing::info!(group_arn = group, targets = ?batch, "deregistering targets");
        let before = known.mark_unconfirmed(batch);
        if let Err(failure) = client.deregister(group, batch).await {
            known.restore(before, &failure);
            return Err(failure);
        }
        known.set_deregistered(batch);
    }
    Ok(())
}

/// Whether the targets are pods, whose addresses AWS may refuse: those outside the VPC.
fn has_pods(batch: &[TargetId]) -> bool {
    batch.iter().any(|id| matches!(id, TargetId::Pod(_)))
}

/// The targets of a refused batch that are certainly bad, and the batches in which to try the others.
fn split_refused(batch: &[TargetId], message: &str) -> (Vec<TargetId>, Vec<Vec<TargetId>>) {
    if let [only] = batch {
        return (vec![only.clone()], Vec::new());
    }
    let words = message.split(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '-' | '.' | ':'));
    let words: BTreeSet<&str> = words.map(|word| word.trim_end_matches(['.', ':'])).collect();
    let (bad, good): (Vec<_>, Vec<_>) =
        batch.iter().cloned().partition(|id| words.contains(id.id().as_str()));
    if bad.is_empty() {
        let (left, right) = batch.split_at(batch.len() / 2);
        return (bad, vec![left.to_vec(), right.to_vec()]);
    }
    let rest = if good.is_empty() { Vec::new() } else { vec![good] };
    (bad, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(names: &[&str]) -> Vec<TargetId> {
        names.iter().map(|name| TargetId::of(name, Some(80))).collect()
    }

    #[test]
    fn refused_target_is_named_or_found_by_halving() {
        let batch = ids(&["i-1", "i-12", "i-3"]);
        let message = "The following targets are not in a running state and cannot be registered: 'i-12'";
        assert_eq!(split_refused(&batch, message), (ids(&["i-12"]), vec![ids(&["i-1", "i-3"])]));
        assert_eq!(split_refused(&batch, "no"), (vec![], vec![ids(&["i-1"]), ids(&["i-12", "i-3"])]));
        assert_eq!(split_refused(&ids(&["i-3"]), "no"), (ids(&["i-3"]), vec![]));
        assert_eq!(split_refused(&batch, "i-1, i-12 and i-3"), (batch.clone(), vec![]));
        let pods = ids(&["10.0.0.1", "10.0.0.11"]);
        let message = "The IP address 10.0.0.11 is not in the VPC: 10.0.0.0/28.";
        assert_eq!(split_refused(&pods, message), (ids(&["10.0.0.11"]), vec![ids(&["10.0.0.1"])]));
    }
}
