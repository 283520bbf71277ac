// SPDX-License-Identifier: Apache-2.0
//! Endpoints that leave, and those that have to be there then.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::once;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};

use crate::config::Config;
use crate::diff::has;
use crate::instances::Placed;
use crate::object::Id;
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::step::{Endpoint, Step};
use crate::tree::Tree;

/// What was seen so long ago has to be looked at before others leave.
const RECENTLY: Duration = Duration::from_secs(15);
/// Where more endpoints stay, they are not looked at: that all of them are gone and nobody knows it is less likely than that many Services
/// wait for these requests while a node leaves.
const MAX_LOOKED_AT: usize = 3;

/// The endpoints to which packets go, by group. Those of a group that no backend service has get none.
fn serving<'a>(tree: &'a Tree, config: &'a Config) -> impl Iterator<Item = (&'a Id, &'a BTreeSet<Endpoint>)> {
    tree.members.iter().filter(|(id, _)| tree.is_used(id, config))
}

/// Those of them that stay after these changes, by group.
fn staying<'a>(
    steps: &'a [Step],
    tree: &'a Tree,
    config: &'a Config,
) -> impl Iterator<Item = (&'a Id, BTreeSet<&'a Endpoint>)> {
    // All of a group leave with it.
    let is_dropped = move |id: &Id| {
        steps.iter().any(|step| match step {
            Step::Patch { changes, .. } if changes.get("backends").is_some() => {
                !Tree::backends(changes).contains(&id.path(config))
            }
            _ => false,
        })
    };
    let is_detached = move |id: &Id, endpoint: &Endpoint| {
        steps.iter().any(|step| match step {
            Step::Detach { id: of, endpoints } => of == id && endpoints.contains(endpoint),
            _ => false,
        })
    };
    let left = serving(tree, config).filter(move |(id, _)| !is_dropped(id));
    left.map(move |(id, members)| {
        (id, members.iter().filter(|endpoint| !is_detached(id, endpoint)).collect())
    })
}

/// The last endpoints, if they have to stay where they are: none of them is wanted, and VMs of wanted nodes cannot be endpoints yet. Their
/// zone could not be read, the flags do not fit them, or GCE refuses them.
pub(crate) fn last_endpoints<'a, 'w>(
    wanted: impl Iterator<Item = (&'w Id, &'w BTreeSet<Endpoint>)>,
    tree: &'a Tree,
    placed: &Placed,
    entry: &ServiceState,
    config: &'a Config,
) -> Vec<(&'a Id, &'a Endpoint)> {
    let is_short = !placed.kept.is_empty() || placed.nodes.keys().any(|name| entry.refused.must_wait(name));
    if !is_short {
        return Vec::new();
    }
    let wanted: BTreeMap<&Id, &BTreeSet<Endpoint>> = wanted.collect();
    let all = serving(tree, config).flat_map(|(id, members)| members.iter().map(move |member| (id, member)));
    let all: Vec<_> = all.collect();
    let is_wanted = |(id, endpoint): &(&Id, &Endpoint)| wanted.get(id).is_some_and(|all| has(all, endpoint));
    if all.iter().any(is_wanted) { Vec::new() } else { all }
}

impl Gce {
    /// Before endpoints leave and few stay, one request shows that another one is there, unless that was seen lately: somebody may have
    /// detached it, or deleted its VM. Returns false, and forgets what was read, if it is not.
    pub(crate) async fn others_stay(
        &self,
        owner: &Owner,
        steps: &[Step],
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        let Some(tree) = entry.known(owner) else { return Ok(true) };
        let staying: Vec<_> = staying(steps, tree, &self.config).collect();
        let stay: usize = staying.iter().map(|(_, members)| members.len()).sum();
        let serve: usize = serving(tree, &self.config).map(|(_, members)| members.len()).sum();
        if stay == serve || stay > MAX_LOOKED_AT || entry.has_looked_within(RECENTLY) {
            return Ok(true);
        }
        let most = staying.into_iter().max_by_key(|(_, members)| members.len());
        let Some((id, members)) = most.filter(|(_, members)| !members.is_empty()) else { return Ok(true) };
        let began = tokio::time::Instant::now();
        let found = self.read_members(once(id)).await?;
        let is_there = found.values().flatten().any(|endpoint| members.contains(endpoint));
        if is_there {
            entry.note_looked(began);
        } else {
            entry.forget();
        }
        Ok(is_there)
    }
}

#[cfg(test)]
mod tests;
