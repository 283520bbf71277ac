// SPDX-License-Identifier: Apache-2.0
//! Listeners that AWS refuses, or whose target group it refuses or cannot fill yet, while the others of the Service become what is wanted.
//! `apply` notes the refusals here, and asks which steps must wait for them. No I/O.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Error, Outcome};

use crate::apply::Stepped;
use crate::desired::Desired;
use crate::diff::{ObservedGroup, ObservedListener, Step, Tagged};
use crate::failing_groups::Failures;
use crate::observe::Resources;
use crate::put_back::is_refusal;
use crate::reasons;
use crate::wanted_targets::WantedTargets;

/// A permission or a quota may change at any time: the first wait before another try, which doubles.
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// The longest one.
const MAX_RETRY: Duration = Duration::from_mins(5);

/// A part of a structure that AWS refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// Whether AWS may accept it although the Service does not change.
    pub(crate) may_pass: bool,
    /// Whether listeners wait until AWS takes the targets of their groups again.
    pub(crate) awaits_targets: bool,
}

/// When to try again what AWS may accept later, after so many refused tries in a row before this one.
pub(crate) fn retry_after(tries: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1 << tries.min(8)).min(MAX_RETRY)
}

impl Refused {
    /// What may pass, for users.
    pub(crate) fn told(reason: &'static str, message: String) -> Self {
        Self { reason, message, may_pass: true, awaits_targets: false }
    }

    /// AWS did not answer, or failed.
    pub(crate) fn unavailable(message: String) -> Self {
        Self::told(Error::UNAVAILABLE, message)
    }

    /// AWS has no room for some targets. The others are set.
    pub(crate) fn of_targets(error: &Error) -> Self {
        let message = format!("Some targets are not registered, and the others are. {error}");
        Self::told(error.reason(), message)
    }

    /// When to try again after so many refused tries in a row before this one.
    pub(crate) fn retry(&self, tries: u32) -> Option<Duration> {
        self.may_pass.then(|| retry_after(tries))
    }

    /// Whether AWS may have made a listener, or may take it at any time.
    pub(crate) fn is_of_open_listener(&self) -> bool {
        self.reason == Error::UNAVAILABLE && !self.awaits_targets
    }

    /// Puts it before what else is not in place.
    pub(crate) fn report(&self, outcome: &mut Outcome) {
        let others = outcome.incomplete.iter().map(|(_, other)| other.as_str());
        let all: Vec<&str> = std::iter::once(self.message.as_str()).chain(others).collect();
        outcome.incomplete = Some((self.reason, all.join(" ")));
    }
}

/// What AWS refused in one try.
#[derive(Debug, Default)]
pub(crate) struct RefusedListeners {
    /// The first refusal, and what it is of.
    first: Option<(String, Error)>,
    ports: BTreeSet<u16>,
    /// Ports whose new target group has no target yet.
    waiting: BTreeSet<u16>,
    /// Target groups that AWS refused, by name.
    groups: BTreeSet<String>,
    /// Whether a refusal may pass although the Service does not change.
    may_pass: bool,
    /// Whether one of them has no listener.
    lacks_listener: bool,
    /// Whether AWS fails with the targets of some.
    is_failing: bool,
    /// New listeners that AWS did not take, without refusing them.
    open: usize,
}

/// The present listener that the step changes.
pub(crate) fn listener_of<'a>(step: &Step, resources: &'a Resources) -> Option<&'a ObservedListener> {
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
pub(crate) fn named(ports: &[u16]) -> String {
    let numbers: Vec<String> = ports.iter().map(u16::to_string).collect();
    format!("{} {}", if ports.len() == 1 { "port" } else { "ports" }, numbers.join(", "))
}

impl RefusedListeners {
    /// Whether the step must wait: its listener stays as it is, because a step before was refused. Or it deletes the listener of a port
    /// that may have become another one, which was refused: some port is better than none.
    pub(crate) fn holds(&self, step: &Step, resources: &Resources) -> bool {
        if let Step::CreateListener { port, .. } = step {
            return self.has(*port);
        }
        let Some(listener) = listener_of(step, resources) else { return false };
        self.ports.contains(&listener.port)
            || self.waiting.contains(&listener.port)
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
        let Some(port) = port else { return Err(error) };
        // Where it exists, only its further certificates were refused.
        self.lacks_listener |= matches!(step, Step::CreateListener { .. }) && !has_port(resources, port);
        self.keep(port, "listener", error)
    }

    /// Keeps a refusal of a target group, for all listeners that shall use it. Any other error is returned.
    pub(crate) fn note_group(
        &mut self,
        name: &str,
        wanted: &Desired,
        resources: &Resources,
        error: Error,
    ) -> Result<(), Error> {
        if !is_refusal(&error) {
            return Err(error);
        }
        self.groups.insert(name.to_owned());
        for listener in wanted.listeners.iter().filter(|listener| listener.group == *name) {
            self.lacks_listener |= !has_port(resources, listener.port);
            self.keep(listener.port, "target group", error.clone())?;
        }
        Ok(())
    }

    /// AWS failed with a new listener, or did not answer, and may have made it.
    pub(crate) fn note_open(&mut self, port: u16, error: Error) {
        self.open += 1;
        self.lacks_listener = true;
        self.hold(port, "listener", error, true);
    }

    /// New listeners with which AWS failed in this try.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Leaves a new listener to the next try, because AWS failed with others.
    pub(crate) fn leave_open(&mut self, port: u16) {
        self.lacks_listener = true;
        self.ports.insert(port);
    }

    /// AWS refuses all targets to which the listener of this port would forward.
    pub(crate) fn note_targets(&mut self, port: u16, error: Error) -> Result<(), Error> {
        self.keep(port, "targets", error)
    }

    fn keep(&mut self, port: u16, what: &str, error: Error) -> Result<(), Error> {
        let may_pass = match &error {
            Error::Invalid { reason, .. } => {
                [reasons::QUOTA_EXCEEDED, reasons::ALL_TARGETS_REFUSED].contains(reason)
            }
            // A permission may be missing for this protocol only.
            Error::Denied(_) if is_refusal(&error) => true,
            _ => return Err(error),
        };
        self.hold(port, what, error, may_pass);
        Ok(())
    }

    fn hold(&mut self, port: u16, what: &str, error: Error, may_pass: bool) {
        self.may_pass |= may_pass;
        self.ports.insert(port);
        self.first.get_or_insert((format!("{what} of port {port}"), error));
    }

    /// The target group to which the listener of this port is to switch has no target yet.
    pub(crate) fn wait_for_targets(&mut self, port: u16) {
        self.waiting.insert(port);
    }

    /// Holds the listeners that are to lead to a group whose targets AWS fails to change, or that a pass left out after some failures. One
    /// that leads there already changes like any other.
    pub(crate) fn hold_failing(
        &mut self,
        wanted: &Desired,
        resources: &Resources,
        failures: &Failures,
    ) -> Result<(), Error> {
        for listener in &wanted.listeners {
            let Some(group) = resources.groups.get(&listener.group) else { continue };
            let leads_there = |found: &ObservedListener| {
                found.port == listener.port && found.group_arn.as_ref() == Some(&group.arn)
            };
            if resources.listeners.iter().any(leads_there) {
                continue;
            }
            if let Some(failure) = failures.groups().get(&listener.group) {
                self.lacks_listener |= !has_port(resources, listener.port);
                self.is_failing = true;
                match Error::from(failure.clone()) {
                    error @ Error::Unavailable(_) => self.hold(listener.port, "targets", error, true),
                    error => self.keep(listener.port, "targets", error)?,
                }
            }
        }
        Ok(())
    }

    /// Whether a refused port has no listener.
    pub(crate) fn lacks_listener(&self) -> bool {
        self.lacks_listener
    }

    /// Whether the listener of this port stays as it is.
    pub(crate) fn has(&self, port: u16) -> bool {
        self.ports.contains(&port) || self.waiting.contains(&port)
    }

    /// The same as [`conclude`](Self::conclude), where no listener was changed.
    pub(crate) fn conclude_as_a_whole(
        self,
        wanted: &Desired,
        targets: &WantedTargets,
        resources: &Resources,
    ) -> Result<Stepped, Error> {
        let is_failing = self.is_failing;
        let is_denied = !is_failing && matches!(self.first, Some((_, Error::Denied(_))));
        match self.conclude(wanted, targets, resources)? {
            Stepped::Done(Some(Refused { message, .. })) if is_denied => Err(Error::Denied(message)),
            Stepped::Done(Some(refused)) if is_failing => Ok(Stepped::Empty(Vec::new(), Some(refused))),
            Stepped::Done(Some(Refused { reason, message, .. })) => Err(Error::invalid(reason, message)),
            waiting => Ok(waiting),
        }
    }

    /// Whether the step is one of a target group that AWS refused.
    pub(crate) fn lacks_group(&self, step: &Step) -> bool {
        let name = match step {
            Step::CreateGroup(group) => &group.name,
            Step::SetAttributes { group, .. } => group,
            Step::AddTags { of: Tagged::Group(name), .. }
            | Step::RemoveTags { of: Tagged::Group(name), .. } => name,
            _ => return false,
        };
        self.groups.contains(name)
    }

    /// What users are told, when all steps were tried. An error if the Service as a whole is refused: none of its ports has a listener, or
    /// one keeps a target group for which the wanted targets are not right. While a port waits for targets, nothing is refused as a whole:
    /// its listener must switch as soon as there are some.
    pub(crate) fn conclude(
        self,
        wanted: &Desired,
        targets: &WantedTargets,
        resources: &Resources,
    ) -> Result<Stepped, Error> {
        let waiting: Vec<u16> = self.waiting.iter().copied().collect();
        let stepped = |refused| {
            if waiting.is_empty() { Stepped::Done(refused) } else { Stepped::Empty(waiting.clone(), refused) }
        };
        let Some((what, error)) = self.first else { return Ok(stepped(None)) };
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
        let rejects = if matches!(error, Error::Unavailable(_)) { "does not take" } else { "rejects" };
        let message = format!("AWS {rejects} the {what}. {} {error}", states.join(" "));
        let mut groups = resources.listeners.iter().filter_map(|listener| group_of(listener, resources));
        let are_followed = groups.all(|(name, group)| is_followed(name, group, wanted, targets));
        let (may_pass, awaits_targets) = (self.may_pass, self.is_failing);
        let refused = Refused { reason: error.reason(), message, may_pass, awaits_targets };
        if !waiting.is_empty() || !resources.listeners.is_empty() && are_followed {
            return Ok(stepped(Some(refused)));
        }
        if self.is_failing {
            // It may pass soon, and is tried with the targets.
            return Ok(Stepped::Empty(waiting, Some(refused)));
        }
        let message = refused.message;
        Err(match error {
            Error::Unavailable(_) => Error::Unavailable(message),
            Error::Denied(_) => Error::Denied(message),
            _ => Error::invalid(error.reason(), message),
        })
    }
}
