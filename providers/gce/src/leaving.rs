// SPDX-License-Identifier: Apache-2.0
//! Endpoints that leave, and those that have to be there then.

use std::collections::BTreeSet;
use std::iter::once;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};

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

/// The endpoints that stay, by group.
fn staying<'a>(
    steps: &'a [Step],
    tree: &'a Tree,
) -> impl Iterator<Item = (&'a Id, BTreeSet<&'a Endpoint>)> + use<'a> {
    let leaving = |id: &Id| -> BTreeSet<&'a Endpoint> {
        let of_group = steps.iter().filter_map(|step| match step {
            Step::Detach { id: of, endpoints } if of == id => Some(endpoints),
            _ => None,
        });
        of_group.flatten().collect()
    };
    tree.members.iter().map(move |(id, members)| {
        let leaving = leaving(id);
        (id, members.iter().filter(|member| !leaving.contains(member)).collect())
    })
}

/// Leaves the last endpoints where they are while VMs of wanted nodes cannot be endpoints yet: their zone could not be read, the flags do not
/// fit them, or GCE refuses them. Returns whether any stays for that.
pub(crate) fn keep_last(steps: &mut Vec<Step>, tree: &Tree, placed: &Placed, entry: &ServiceState) -> bool {
    let before = steps.len();
    let is_short = !placed.kept.is_empty() || placed.nodes.keys().any(|name| entry.refused.must_wait(name));
    if is_short && staying(steps, tree).all(|(_, members)| members.is_empty()) {
        steps.retain(|step| !matches!(step, Step::Detach { .. }));
    }
    steps.len() < before
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
        let is_leaving = |step: &Step| matches!(step, Step::Detach { .. });
        let Some(tree) = entry.known(owner) else { return Ok(true) };
        if !steps.iter().any(is_leaving) || entry.has_looked_within(RECENTLY) {
            return Ok(true);
        }
        let staying: Vec<_> = staying(steps, tree).collect();
        if staying.iter().map(|(_, members)| members.len()).sum::<usize>() > MAX_LOOKED_AT {
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
