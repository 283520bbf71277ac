// SPDX-License-Identifier: Apache-2.0
//! Listeners that AWS refuses, while the others of the Service become what is wanted. `apply` notes the refusals here, and asks which steps
//! must wait for them. No I/O.

use std::collections::BTreeSet;

use steerage_provider_api::Error;

use crate::desired::Desired;
use crate::diff::{ObservedGroup, ObservedListener, Step, Tagged};
use crate::observe::Resources;
use crate::wanted_targets::WantedTargets;

/// What AWS refused in one try.
#[derive(Debug, Default)]
pub(crate) struct RefusedListeners {
    /// The first refusal.
    first: Option<(u16, Error)>,
    ports: BTreeSet<u16>,
    /// Whether one of them has no listener.
    lacks_listener: bool,
}

/// The present listener that the step changes.
fn listener_of<'a>(step: &Step, resources: &'a Resources) -> Option<&'a ObservedListener> {
    let (Step::SwitchListener { arn, .. }
    | Step::AddCertificates { arn, .. }
    | Step::RemoveCertificates { arn, .. }
    | Step::DeleteListener { arn }
    | Step::AddTags { of: Tagged::Listener(arn), .. }
    | Step::RemoveTags { of: Tagged::Listener(arn), .. }) = step
    else {
        return None;
    };
    resources.listeners.iter().find(|listener| listener.arn == *arn)
}

pub(crate) fn has_port(resources: &Resources, port: u16) -> bool {
    resources.listeners.iter().any(|listener| listener.port == port)
}

/// The target group of a listener with its name, if it is one of this Service.
fn group_of<'a>(
    listener: &ObservedListener,
    resources: &'a Resources,
) -> Option<(&'a String, &'a ObservedGroup)> {
    resources.groups.iter().find(|(_, group)| listener.group_arn.as_ref() == Some(&group.arn))
}

/// Whether there are targets for this group, and those that are wanted now are right for it: AWS checks them in the same way. A port of
/// pods that is no longer requested has none.
fn is_followed(name: &str, group: &ObservedGroup, wanted: &Desired, targets: &WantedTargets) -> bool {
    targets.of(name, group).is_some()
        && wanted.groups.iter().any(|wanted| {
            let is_same_kind = (wanted.has_pods(), wanted.family) == (group.has_pods, group.family());
            is_same_kind && wanted.health == group.health
        })
}

/// `port 80` or `ports 80, 81`.
fn named(ports: &[u16]) -> String {
    let numbers: Vec<String> = ports.iter().map(u16::to_string).collect();
    format!("{} {}", if ports.len() == 1 { "port" } else { "ports" }, numbers.join(", "))
}

impl RefusedListeners {
    /// Whether the step must wait: its listener stays as it is, because a step before was refused. Or it deletes the listener of a port
    /// that may have become another one, which was refused: some port is better than none.
    pub(crate) fn holds(&self, step: &Step, resources: &Resources) -> bool {
        let Some(listener) = listener_of(step, resources) else { return false };
        self.ports.contains(&listener.port)
            || matches!(step, Step::DeleteListener { .. }) && self.lacks_listener
    }

    /// Keeps a refusal of the listener's step. Any other error is returned.
    pub(crate) fn note(
        &mut self,
        step: &Step,
        resources: &Resources,
        done: Result<(), Error>,
    ) -> Result<(), Error> {
        let Err(error) = done else { return Ok(()) };
        let port = match step {
            Step::CreateListener { port, .. } => Some(*port),
            Step::DeleteListener { .. } => None,
            _ => listener_of(step, resources).map(|listener| listener.port),
        };
        let (Some(port), Error::Invalid { .. }) = (port, &error) else { return Err(error) };
        // Where it exists, only its further certificates were refused.
        self.lacks_listener |= matches!(step, Step::CreateListener { .. }) && !has_port(resources, port);
        self.ports.insert(port);
        self.first.get_or_insert((port, error));
        Ok(())
    }

    /// What users are told, when all steps were tried. An error if the Service as a whole is refused: none of its ports has a listener, or
    /// one keeps a target group for which the wanted targets are not right.
    pub(crate) fn conclude(
        self,
        wanted: &Desired,
        targets: &WantedTargets,
        resources: &Resources,
    ) -> Result<Option<(&'static str, String)>, Error> {
        let Some((port, error)) = self.first else { return Ok(None) };
        let (kept, missing): (Vec<u16>, Vec<u16>) =
            self.ports.iter().partition(|port| has_port(resources, **port));
        let is_wanted = |port: u16| wanted.listeners.iter().any(|wanted| wanted.port == port);
        let all = resources.listeners.iter().map(|listener| listener.port);
        let left: BTreeSet<u16> = all.filter(|port| !is_wanted(*port)).collect();
        let states = [
            ("Not served", missing),
            ("Served, but not as requested", kept),
            ("Not requested any more, but served until AWS accepts the others", left.into_iter().collect()),
        ];
        let states = states.into_iter().filter(|(_, ports)| !ports.is_empty());
        let states: Vec<String> =
            states.map(|(state, ports)| format!("{state}: {}.", named(&ports))).collect();
        let message = format!("AWS rejects the listener of port {port}. {} {error}", states.join(" "));
        let mut groups = resources.listeners.iter().filter_map(|listener| group_of(listener, resources));
        let are_followed = groups.all(|(name, group)| is_followed(name, group, wanted, targets));
        if !resources.listeners.is_empty() && are_followed {
            return Ok(Some((error.reason(), message)));
        }
        Err(Error::invalid(error.reason(), message))
    }
}
