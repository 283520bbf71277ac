// SPDX-License-Identifier: Apache-2.0
//! Listeners that AWS refuses, while the others of the Service become what is wanted. `apply` notes the refusals here, and asks which steps
//! must wait for them. No I/O.

use std::collections::BTreeSet;

use steerage_provider_api::Error;

use crate::desired::Desired;
use crate::diff::{ObservedGroup, ObservedListener, Step, Tagged};
use crate::observe::Resources;
use crate::reasons;
use crate::tls::Tls;

/// What AWS refused in one try.
#[derive(Debug, Default)]
pub(crate) struct RefusedListeners {
    /// The first refusal.
    first: Option<(u16, Error)>,
    ports: BTreeSet<u16>,
    /// Whether one of them has no listener.
    lacks_listener: bool,
    /// With what TLS listeners were rejected, and AWS's words.
    tls: Vec<(Tls, String)>,
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

fn has_port(resources: &Resources, port: u16) -> bool {
    resources.listeners.iter().any(|listener| listener.port == port)
}

/// The target group of a listener, if it is one of this Service.
fn group_of<'a>(listener: &ObservedListener, resources: &'a Resources) -> Option<&'a ObservedGroup> {
    resources.groups.values().find(|group| listener.group_arn.as_ref() == Some(&group.arn))
}

/// Whether the targets that are wanted now are right for this group too: AWS checks them in the same way.
fn is_followed(group: &ObservedGroup, wanted: &Desired) -> bool {
    wanted.groups.iter().any(|wanted| {
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

    /// What AWS would answer to this step: it has rejected two listeners with the same certificate and policies, in the same words. A
    /// Service has up to 50 ports, and each resync tries again.
    pub(crate) fn expected(&self, step: &Step) -> Option<Error> {
        let (Step::CreateListener { tls: Some(tls), .. } | Step::SwitchListener { tls: Some(tls), .. }) =
            step
        else {
            return None;
        };
        let mut answers = self.tls.iter().filter(|(of, _)| tls.is_set_as(of)).map(|(_, answer)| answer);
        let (one, other) = (answers.next()?, answers.next()?);
        (one == other).then(|| Error::invalid(reasons::REJECTED_BY_PROVIDER, one))
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
        let (Some(port), Error::Invalid { reason, message }) = (port, &error) else { return Err(error) };
        match step {
            // Only its further certificates were refused.
            Step::CreateListener { .. } if has_port(resources, port) => {}
            Step::CreateListener { tls, .. } => {
                self.lacks_listener = true;
                self.note_tls(tls.as_ref(), reason, message);
            }
            Step::SwitchListener { tls, .. } => self.note_tls(tls.as_ref(), reason, message),
            _ => {}
        }
        self.ports.insert(port);
        self.first.get_or_insert((port, error));
        Ok(())
    }

    fn note_tls(&mut self, tls: Option<&Tls>, reason: &'static str, message: &str) {
        // At a quota, another listener may still have room.
        if let Some(tls) = tls.filter(|_| reason == reasons::REJECTED_BY_PROVIDER) {
            self.tls.push((tls.clone(), message.to_owned()));
        }
    }

    /// What users are told, when all steps were tried. An error if the Service as a whole is refused: none of its ports has a listener, or
    /// one keeps a target group for which the wanted targets are not right.
    pub(crate) fn conclude(
        self,
        wanted: &Desired,
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
            ("Not requested any more, but served until then", left.into_iter().collect()),
        ];
        let states = states.into_iter().filter(|(_, ports)| !ports.is_empty());
        let states: Vec<String> =
            states.map(|(state, ports)| format!("{state}: {}.", named(&ports))).collect();
        let message = format!("AWS refuses the listener of port {port}. {} {error}", states.join(" "));
        let mut groups = resources.listeners.iter().filter_map(|listener| group_of(listener, resources));
        if !resources.listeners.is_empty() && groups.all(|group| is_followed(group, wanted)) {
            return Ok(Some((error.reason(), message)));
        }
        Err(Error::invalid(error.reason(), message))
    }
}
