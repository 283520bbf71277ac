// SPDX-License-Identifier: Apache-2.0
//! The targets of one target group: which instances they are, and how one set becomes another.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steerage_provider_api::{HealthState, Target, TargetSet};

use crate::client::{Client, Failure, Registered};

/// How many targets one call takes. AWS documents no number, and was seen to reject large ones now and then.
const BATCH: usize = 100;
/// After this time what AWS has is read again, so that what somebody else changed is repaired.
const TRUSTED: Duration = Duration::from_mins(10);
/// How long a refused target is not tried again.
const REFUSED: Duration = Duration::from_mins(1);

/// What a group is known to have.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    ids: BTreeSet<String>,
    read: Instant,
}

impl Known {
    /// From a reading: what is draining is registered no more.
    pub(crate) fn of(targets: &[Registered]) -> Self {
        let there = targets.iter().filter(|t| t.state != HealthState::Draining);
        Self { ids: there.map(|t| t.id.clone()).collect(), read: Instant::now() }
    }

    fn is_trusted(&self) -> bool {
        self.read.elapsed() < TRUSTED
    }
}

/// Targets that AWS refused lately, by instance.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusals {
    told: BTreeMap<String, (String, Instant)>,
}

impl Refusals {
    fn add(&mut self, id: &str, why: &str) {
        self.told.insert(id.to_owned(), (why.to_owned(), Instant::now()));
    }

    fn holds(&self, id: &str) -> bool {
        self.told.get(id).is_some_and(|(_, when)| when.elapsed() < REFUSED)
    }

    /// Why the instance was refused.
    pub(crate) fn reason(&self, id: &str) -> Option<&str> {
        self.told.get(id).map(|(why, _)| why.as_str())
    }

    /// Forgets all but these.
    pub(crate) fn retain(&mut self, ids: &BTreeMap<String, String>) {
        self.told.retain(|id, _| ids.contains_key(id));
    }
}

/// The instances of a set, by instance the node's name, and the nodes that are none, each with what to do.
pub(crate) fn instances(set: &TargetSet) -> (BTreeMap<String, String>, Vec<(String, String)>) {
    let (mut instances, mut refused) = (BTreeMap::new(), Vec::new());
    for target in &set.targets {
        match instance(target) {
            Ok(id) => drop(instances.insert(id, target.node.clone())),
            Err(why) => refused.push((target.node.clone(), why)),
        }
    }
    (instances, refused)
}

/// `aws:///<zone>/<instance>`, as the cloud controller manager and kubelet write it.
fn instance(target: &Target) -> Result<String, String> {
    let Some(id) = target.provider_id.as_deref().filter(|id| !id.is_empty()) else {
        return Err("the node has no spec.providerID: a cloud controller manager, or kubelet's --provider-id, sets it".to_owned());
    };
    let last = id.strip_prefix("aws://").and_then(|path| path.rsplit('/').next());
    match last {
        Some(instance) if instance.starts_with("i-") && instance.len() > 2 => Ok(instance.to_owned()),
        _ => Err(format!("spec.providerID {id:?} names no EC2 instance (aws:///<zone>/i-…)")),
    }
}

/// Makes the group's targets those of `wanted`, which may be used; adds before it removes.
pub(crate) async fn converge(
    client: &Client,
    group: &str,
    known: &mut Option<Known>,
    wanted: &BTreeMap<String, String>,
    refusals: &mut Refusals,
) -> Result<(), Failure> {
    // Taken out first: after an error nobody knows what the group has.
    let mut now = match known.take().filter(Known::is_trusted) {
        Some(now) => now,
        None => Known::of(&client.targets(group).await?),
    };
    let add: Vec<String> =
        wanted.keys().filter(|id| !now.ids.contains(*id) && !refusals.holds(id)).cloned().collect();
    now.ids.extend(register(client, group, &add, refusals).await?);
    let remove: Vec<String> = now.ids.iter().filter(|id| !wanted.contains_key(*id)).cloned().collect();
    for batch in remove.chunks(BATCH) {
        tracing::info!(group, targets = ?batch, "deregistering targets");
        client.deregister(group, batch).await?;
    }
    now.ids.retain(|id| wanted.contains_key(id));
    *known = Some(now);
    Ok(())
}

/// Registers in `to` what `from` has and it has not.
pub(crate) async fn copy(
    client: &Client,
    from: &str,
    to: &str,
    refusals: &mut Refusals,
) -> Result<(), Failure> {
    let mut missing = Known::of(&client.targets(from).await?).ids;
    for id in Known::of(&client.targets(to).await?).ids {
        missing.remove(&id);
    }
    let missing: Vec<String> = missing.into_iter().collect();
    register(client, to, &missing, refusals).await.map(drop)
}

/// Registers what can be, and says what was. AWS refuses a whole call for one bad target; its message mostly names it, else the call is
/// halved until the bad one is alone.
async fn register(
    client: &Client,
    group: &str,
    ids: &[String],
    refusals: &mut Refusals,
) -> Result<Vec<String>, Failure> {
    let mut batches: Vec<Vec<String>> = ids.chunks(BATCH).map(<[String]>::to_vec).collect();
    let mut done = Vec::new();
    while let Some(batch) = batches.pop() {
        tracing::info!(group, targets = ?batch, "registering targets");
        let failure = match client.register(group, &batch).await {
            Ok(()) => {
                refusals.told.retain(|id, _| !batch.contains(id));
                done.extend(batch);
                continue;
            }
            Err(failure) if failure.is("InvalidTarget") => failure,
            Err(failure) => return Err(failure),
        };
        let (bad, rest) = blame(&batch, failure.message());
        for id in bad {
            refusals.add(&id, failure.message());
        }
        batches.extend(rest);
    }
    Ok(done)
}

/// Which targets of a refused batch are bad for certain, and in which batches the others are to be tried.
fn blame(batch: &[String], message: &str) -> (Vec<String>, Vec<Vec<String>>) {
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
    fn instances_are_found_by_provider_id() {
        let set = TargetSet {
            shared: None,
            targets: vec![
                target("a", Some("aws:///eu-west-1a/i-0abc")),
                target("b", None),
                target("c", Some("aws:///eu-west-1a/fargate-ip-10-0-0-1")),
                target("d", Some("gce://project/zone/i-0abc")),
                target("e", Some("aws:///i-0def")),
            ],
        };
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
    fn the_bad_one_is_named_or_found_by_halving() {
        let batch = ids(&["i-1", "i-12", "i-3"]);
        let message = "The following targets are not in a running state and cannot be registered: 'i-12'";
        assert_eq!(blame(&batch, message), (ids(&["i-12"]), vec![ids(&["i-1", "i-3"])]));
        assert_eq!(blame(&batch, "no"), (vec![], vec![ids(&["i-1"]), ids(&["i-12", "i-3"])]));
        assert_eq!(blame(&ids(&["i-3"]), "no"), (ids(&["i-3"]), vec![]));
        assert_eq!(blame(&batch, "i-1, i-12 and i-3"), (batch.clone(), vec![]));
    }
}
