// SPDX-License-Identifier: Apache-2.0
//! For which ports a step is, so that users see what a failure concerns. `apply` asks. No I/O.

use std::collections::BTreeSet;

use steerage_provider_api::Error;
use steerage_provider_cloud::failure::is_of_credentials;

use crate::desired::Desired;
use crate::diff::{Step, Tagged};
use crate::observe::Resources;
use crate::refused_listeners::{listener_of, named};

/// The name of the target group that the step changes.
fn group_of<'a>(step: &'a Step, resources: &'a Resources) -> Option<&'a String> {
    match step {
        Step::CreateGroup(group) => Some(&group.name),
        Step::SetAttributes { group, .. } => Some(group),
        Step::AddTags { of: Tagged::Group(name), .. } | Step::RemoveTags { of: Tagged::Group(name), .. } => {
            Some(name)
        }
        Step::ModifyHealth { arn, .. } => {
            let found = resources.groups.iter().find(|(_, group)| group.arn == *arn);
            found.map(|(name, _)| name)
        }
        _ => None,
    }
}

/// The ports of the step, as far as it concerns some and not all.
pub(crate) fn ports_of(step: &Step, wanted: Option<&Desired>, resources: &Resources) -> BTreeSet<u16> {
    if let Step::CreateListener { port, .. } = step {
        return [*port].into();
    }
    if let Some(listener) = listener_of(step, resources) {
        return [listener.port].into();
    }
    let Some(name) = group_of(step, resources) else { return BTreeSet::new() };
    let lead = wanted.into_iter().flat_map(|wanted| &wanted.listeners);
    lead.filter(|listener| listener.group == *name).map(|listener| listener.port).collect()
}

/// The error of a step with its ports. A refusal that is kept for a port names it anyway.
pub(crate) fn name_ports(error: Error, ports: &BTreeSet<u16>, is_kept: bool) -> Error {
    let ports: Vec<u16> = ports.iter().copied().collect();
    if ports.is_empty() || is_of_credentials(&error) {
        return error;
    }
    let told = |message: &str| format!("{message} The call was for {}.", named(&ports));
    match error {
        Error::Unavailable(message) => Error::Unavailable(told(&message)),
        Error::Denied(message) if !is_kept => Error::Denied(told(&message)),
        other => other,
    }
}
