// SPDX-License-Identifier: Apache-2.0
//! Endpoints that leave, and those that have to be there then. Pure.

use std::collections::BTreeSet;

use crate::instances::Placed;
use crate::object::Id;
use crate::state::ServiceState;
use crate::step::{Endpoint, Step};
use crate::tree::Tree;

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

/// Leaves the last endpoints where they are while nodes that are wanted cannot be endpoints: their zone could not be read, or GCE refuses
/// their VMs.
pub(crate) fn keep_last(steps: &mut Vec<Step>, tree: &Tree, placed: &Placed, entry: &ServiceState) {
    let is_short =
        !placed.refused.is_empty() || placed.nodes.keys().any(|name| entry.refused.must_wait(name));
    if is_short && staying(steps, tree).all(|(_, members)| members.is_empty()) {
        steps.retain(|step| !matches!(step, Step::Detach { .. }));
    }
}

#[cfg(test)]
mod tests;
