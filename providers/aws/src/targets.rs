// SPDX-License-Identifier: Apache-2.0
//! The targets of a target group: their instances, and the calls that change them.
//!
//! AWS refuses a whole call because of one bad target. Usually its message names the target. Otherwise the call is halved until the
//! bad target is alone.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use steerage_provider_api::{Compare, Target, TargetSet};
use tokio::time::Instant;

use crate::client::{CallError, Calls, RegisteredTarget};
use crate::registered::RegisteredIds;

/// Targets in one call. AWS documents no limit, but sometimes rejects large calls.
const BATCH: usize = 100;
/// Wait before a refused target is tried again.
pub(crate) const RETRY_REFUSED_AFTER: Duration = Duration::from_mins(1);

/// Targets that AWS refused recently.
#[derive(Clone, Debug, Default)]
pub(crate) struct RefusedTargets {
    /// By instance: AWS's message, and the time.
    refused: BTreeMap<String, (String, Instant)>,
}

impl RefusedTargets {
    fn add(&mut self, id: &str, why: &str) {
        self.refused.insert(id.to_owned(), (why.to_owned(), Instant::now()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.refused.is_empty()
    }

    fn must_wait(&self, id: &str) -> bool {
        self.refused.get(id).is_some_and(|(_, when)| when.elapsed() < RETRY_REFUSED_AFTER)
    }

    /// AWS's message about the instance, if it was refused.
    pub(crate) fn reason(&self, id: &str) -> Option<&str> {
        self.refused.get(id).map(|(why, _)| why.as_str())
    }

    /// Forgets all other instances.
    pub(crate) fn retain(&mut self, ids: &BTreeMap<String, String>) {
        self.refused.retain(|id, _| ids.contains_key(id));
    }
}

/// The node names by instance, and the nodes that have no instance, each with a message.
pub(crate) fn instances(set: &TargetSet) -> (BTreeMap<String, String>, Vec<(String, String)>) {
    let (mut instances, mut refused) = (BTreeMap::new(), Vec::new());
    for target in set.targets.iter() {
        match instance(target) {
            Ok(id) => drop(instances.insert(id, target.node.clone())),
            Err(why) => refused.push((target.node.clone(), why)),
        }
    }
    (instances, refused)
}

/// The instance in a provider ID `aws:///<zone>/<instance>`.
fn instance(target: &Target) -> Result<String, String> {
    let Some(id) = target.provider_id.as_deref().filter(|id| !id.is_empty()) else {
        return Err("The node has no spec.providerID. Set it by a cloud controller manager or by kubelet's --provider-id.".to_owned());
    };
    let last = id.strip_prefix("aws://").and_then(|path| path.rsplit('/').next());
    match last {
        Some(instance) if instance.starts_with("i-") && instance.len() > 2 => Ok(instance.to_owned()),
        _ => Err(format!("spec.providerID `{id}` names no EC2 instance. Use the form aws:///<zone>/i-<id>.")),
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
}

impl Limits {
    /// Only a node of a shared set may wait: it still serves. One that left a set of its own has no endpoint any more, which its health
    /// check does not tell: new connections to it would fail.
    pub(crate) fn new(compare: Compare, settle: Duration, set: &TargetSet) -> Self {
        Self { compare, settle, may_hold: set.shared.is_some() }
    }
}

/// Registers the wanted instances.
pub(crate) async fn add(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    wanted: &BTreeMap<String, String>,
    refused_targets: &mut RefusedTargets,
    limits: Limits,
) -> Result<(), CallError> {
    let known = match registered.entry(group.to_owned()) {
        Entry::Occupied(known) if known.get().is_reliable(limits) => known.into_mut(),
        known => known.insert_entry(RegisteredIds::of(&client.targets(group).await?)).into_mut(),
    };
    let add: Vec<String> =
        wanted.keys().filter(|id| !known.has(id) && !refused_targets.must_wait(id)).cloned().collect();
    let mut batches: Vec<Vec<String>> = add.chunks(BATCH).map(<[String]>::to_vec).collect();
    while let Some(batch) = batches.pop() {
        tracing::info!(group, targets = ?batch, "registering targets");
        let before = known.doubt(&batch);
        match client.register(group, &batch).await {
            Ok(()) => {
                known.set_registered(&batch);
                refused_targets.refused.retain(|id, _| !batch.contains(id));
            }
            Err(failure) => {
                known.restore(before, &failure);
                if failure.is_quota() && batch.len() > 1 {
                    let (left, right) = batch.split_at(batch.len() / 2);
                    batches.extend([left.to_vec(), right.to_vec()]);
                    continue;
                }
                if !failure.is("InvalidTarget") {
                    return Err(failure);
                }
                let (bad, rest) = split_refused(&batch, failure.message());
                for id in bad {
                    refused_targets.add(&id, failure.message());
                }
                batches.extend(rest);
            }
        }
    }
    Ok(())
}

/// Registers the wanted instances, then deregisters all others. Returns when to call again if it waits with the latter. Where the
/// quota has no room for both, others leave first, but the last one only after a wanted one is registered.
pub(crate) async fn converge(
    client: &dyn Calls,
    group: &str,
    registered: &mut HashMap<String, RegisteredIds>,
    wanted: &BTreeMap<String, String>,
    refused_targets: &mut RefusedTargets,
    limits: Limits,
) -> Result<Option<Duration>, CallError> {
    while let Err(failure) = add(client, group, registered, wanted, refused_targets, limits).await {
        let leave = match registered.get(group) {
            Some(known) if failure.is_quota() => known.replaceable(wanted),
            _ => return Err(failure),
        };
        if leave.is_empty() {
            return Err(failure);
        }
        remove(client, group, registered, &leave).await?;
    }
    let Some(known) = registered.get_mut(group) else { return Ok(None) };
    let others = known.others(wanted);
    if limits.may_hold && !others.is_empty() {
        if known.needs_look(wanted) {
            known.look(&listing(client, group, known, limits.settle).await?);
        }
        if let Some(wait) = known.hold(wanted) {
            return Ok(Some(wait));
        }
    }
    known.release();
    remove(client, group, registered, &others).await?;
    Ok(None)
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
    ids: &[String],
) -> Result<(), CallError> {
    let Some(known) = registered.get_mut(group) else { return Ok(()) };
    for batch in ids.chunks(BATCH) {
        tracing::info!(group, targets = ?batch, "deregistering targets");
        let before = known.doubt(batch);
        if let Err(failure) = client.deregister(group, batch).await {
            known.restore(before, &failure);
            return Err(failure);
        }
        known.set_deregistered(batch);
    }
    Ok(())
}

/// The targets of a refused batch that are certainly bad, and the batches in which to try the others.
fn split_refused(batch: &[String], message: &str) -> (Vec<String>, Vec<Vec<String>>) {
    if let [only] = batch {
        return (vec![only.clone()], Vec::new());
    }
    let words: BTreeSet<&str> = message.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
    let (bad, good): (Vec<_>, Vec<_>) = batch.iter().cloned().partition(|id| words.contains(id.as_str()));
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

    fn target(node: &str, provider_id: Option<&str>) -> Target {
        Target {
            node: node.to_owned(),
            addresses: Vec::new(),
            provider_id: provider_id.map(str::to_owned),
            zone: None,
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    }

    #[test]
    fn provider_id_names_instance() {
        let set = TargetSet::own([
            target("a", Some("aws:///eu-west-1a/i-0abc")),
            target("b", None),
            target("c", Some("aws:///eu-west-1a/fargate-ip-10-0-0-1")),
            target("d", Some("gce://project/zone/i-0abc")),
            target("e", Some("aws:///i-0def")),
        ]);
        let (found, refused) = instances(&set);
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("i-0abc".to_owned(), "a".to_owned()), ("i-0def".to_owned(), "e".to_owned())]
        );
        assert_eq!(refused.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>(), ["b", "c", "d"]);
        assert!(refused.iter().all(|(_, why)| why.contains("providerID")));
    }

    fn ids(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn refused_target_is_named_or_found_by_halving() {
        let batch = ids(&["i-1", "i-12", "i-3"]);
        let message = "The following targets are not in a running state and cannot be registered: 'i-12'";
        assert_eq!(split_refused(&batch, message), (ids(&["i-12"]), vec![ids(&["i-1", "i-3"])]));
        assert_eq!(split_refused(&batch, "no"), (vec![], vec![ids(&["i-1"]), ids(&["i-12", "i-3"])]));
        assert_eq!(split_refused(&ids(&["i-3"]), "no"), (ids(&["i-3"]), vec![]));
        assert_eq!(split_refused(&batch, "i-1, i-12 and i-3"), (batch.clone(), vec![]));
    }
}
