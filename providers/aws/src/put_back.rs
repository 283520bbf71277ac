// SPDX-License-Identifier: Apache-2.0
//! What leaves to make room at AWS's limits, or because nothing else lets its successor come, and comes back if AWS refuses what takes its
//! place. `apply` calls it. A listener or a certificate that is put back was missing for a moment; without that, it would be missing until
//! AWS accepts the other. Calls may fail between, so listeners are remembered until they are replaced or there again.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::{Compare, Error, Owner};
use steerage_provider_cloud::failure::is_of_credentials;
use tokio::time::Instant;

use crate::client::{Balancer, Tags};
use crate::desired::Desired;
use crate::diff::{ObservedListener, Step};
use crate::ip_address_type::IpAddressType;
use crate::observe::Resources;
use crate::provider::Aws;
use crate::reasons;
use crate::refused_listeners::has_port;
use crate::source_nat_sync::has_udp;
use crate::state::ServiceState;
use crate::targets::{self, SharedRefusals};
use crate::tls::Tls;
use crate::wanted_targets::WantedTargets;

/// What the steps remove for others.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// The listener that leaves for the one of a port, by ARN.
    listeners: BTreeMap<u16, String>,
}

/// Whether AWS refused a step.
pub(crate) fn is_refused(done: &Result<(), Error>) -> bool {
    done.as_ref().is_err_and(is_refusal)
}

/// Whether the error is AWS's answer to one step. That it does not accept the credentials says nothing of any.
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Invalid { .. } | Error::Denied(_)) && !is_of_credentials(error)
}

/// Listeners that left for others which are not there yet.
#[derive(Debug, Default)]
pub(crate) struct LeftListeners {
    /// The change for which they left.
    wanted: Option<Desired>,
    /// By the port of the listener for which each left.
    all: BTreeMap<u16, ObservedListener>,
}

impl LeftListeners {
    /// This listener is about to leave for the one of a port.
    pub(crate) fn note(&mut self, wanted: &Desired, port: u16, listener: ObservedListener) {
        self.wanted = Some(wanted.clone());
        self.all.insert(port, listener);
    }

    /// Whether none has left.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether they left for another change than this one.
    fn are_of_other(&self, wanted: &Desired) -> bool {
        self.wanted.as_ref().is_some_and(|before| before != wanted)
    }

    /// Whether the target group must stay for one of them.
    pub(crate) fn need(&self, group: &str) -> bool {
        self.all.values().any(|listener| listener.group_arn.as_deref() == Some(group))
    }

    /// Drops those that are replaced or there again, or that AWS could not take back: its load balancer has changed since.
    fn drop_settled(&mut self, resources: &Resources) {
        let is_dual_stack = resources
            .balancer
            .as_ref()
            .is_some_and(|found| found.ip_address_type == IpAddressType::DualStack);
        let is_possible = |listener: &ObservedListener| {
            let group =
                resources.groups.values().find(|group| listener.group_arn.as_ref() == Some(&group.arn));
            group.is_some_and(|group| {
                if is_dual_stack { group.is_ipv6 || !has_udp(&listener.protocol) } else { !group.is_ipv6 }
            })
        };
        let is_taken = |port: u16| {
            has_port(resources, port) || resources.foreign_listeners.iter().any(|found| found.port == port)
        };
        self.all.retain(|port, left| !is_taken(*port) && !is_taken(left.port) && is_possible(left));
    }
}

/// Certificates that left their listeners for others, until those are there.
#[derive(Debug, Default)]
pub(crate) struct LeftCertificates {
    /// By ARN of the listener.
    all: BTreeMap<String, BTreeSet<String>>,
    /// Listeners which have no room for them, or for which a permission is missing. Nobody knows when that changes.
    refused: BTreeSet<String>,
}

/// The certificates of a listener beside its default one.
fn others_of<'a>(resources: &'a Resources, listener: &str) -> Option<&'a BTreeSet<String>> {
    let found = resources.listeners.iter().find(|found| found.arn == listener)?;
    found.tls.as_ref().map(|tls| &tls.others)
}

fn adds_to(listener: &str) -> impl Fn(&Step) -> bool {
    move |step| matches!(step, Step::AddCertificates { arn, .. } if arn == listener)
}

impl LeftCertificates {
    /// Whether one left that AWS may take back with the next try.
    pub(crate) fn is_missing(&self) -> bool {
        self.all.keys().any(|listener| !self.refused.contains(listener))
    }

    /// A try to make these steps begins. Keeps those that are missing in the place of others that still come.
    pub(crate) fn begin(&mut self, steps: &[Step], resources: &Resources) {
        self.all.retain(|listener, left| {
            let Some(present) = others_of(resources, listener) else { return false };
            left.retain(|certificate| !present.contains(certificate));
            !left.is_empty() && steps.iter().any(adds_to(listener))
        });
        self.refused.retain(|listener| self.all.contains_key(listener));
    }

    /// A step ended, which may have been made in part. `before` are the certificates of its listener before it. Of those that it removed, and
    /// may have removed, this keeps what made room for another: the rest is not wanted any more.
    pub(crate) fn note_removed(
        &mut self,
        step: &Step,
        before: &BTreeSet<String>,
        done: &Result<(), Error>,
        steps: &[Step],
        resources: &Resources,
    ) {
        let Step::RemoveCertificates { arn, certificates } = step else { return };
        if !steps.iter().skip_while(|other| *other != step).any(adds_to(arn)) {
            return;
        }
        let is_open = done.is_err() && !is_refused(done);
        let present = others_of(resources, arn);
        let is_gone = |certificate: &&String| {
            is_open || before.contains(*certificate) && present.is_some_and(|all| !all.contains(*certificate))
        };
        let gone: BTreeSet<String> = certificates.iter().filter(is_gone).cloned().collect();
        if !gone.is_empty() {
            self.all.entry(arn.clone()).or_default().extend(gone);
            self.refused.remove(arn);
        }
    }

    /// The step, which adds certificates, is made: those in whose place they came do not return.
    pub(crate) fn note_added(&mut self, step: &Step) {
        if let Step::AddCertificates { arn, .. } = step {
            self.all.remove(arn);
        }
    }

    /// Those that left for the ones that the step adds, with their listener.
    pub(crate) fn of(&self, step: &Step) -> Option<(&String, &BTreeSet<String>)> {
        let Step::AddCertificates { arn, .. } = step else { return None };
        self.all.get_key_value(arn)
    }

    /// AWS refused to take these back. Those that it does not know, or not for this listener, are given up. Returns whether that is new.
    fn note_refused(&mut self, listener: String, error: &Error) -> bool {
        let may_pass = matches!(error, Error::Denied(_)) || error.reason() == reasons::QUOTA_EXCEEDED;
        if may_pass { self.refused.insert(listener) } else { self.all.remove(&listener).is_some() }
    }
}

/// The certificates of the step's listener, if it removes some.
pub(crate) fn before_removal(step: &Step, resources: &Resources) -> BTreeSet<String> {
    let Step::RemoveCertificates { arn, .. } = step else { return BTreeSet::new() };
    others_of(resources, arn).cloned().unwrap_or_default()
}

impl Room {
    pub(crate) fn of(steps: &[Step]) -> Self {
        let listeners = steps.windows(2).filter_map(|pair| match pair {
            [Step::DeleteListener { arn }, Step::CreateListener { port, .. }] => Some((*port, arn.clone())),
            _ => None,
        });
        Self { listeners: listeners.collect() }
    }

    /// Whether the step deletes a listener that leaves only when the other is tried.
    pub(crate) fn holds(&self, step: &Step) -> bool {
        matches!(step, Step::DeleteListener { arn } if self.listeners.values().any(|held| held == arn))
    }

    /// The listener that must leave before the step.
    pub(crate) fn before<'a>(&self, step: &Step, resources: &'a Resources) -> Option<&'a ObservedListener> {
        let Step::CreateListener { port, .. } = step else { return None };
        let arn = self.listeners.get(port)?;
        resources.listeners.iter().find(|listener| listener.arn == *arn)
    }

    /// The listeners that leave for others and are still there, by the port of the other.
    pub(crate) fn all_before(&self, resources: &Resources) -> Vec<(u16, ObservedListener)> {
        let found = |(port, arn): (&u16, &String)| {
            let listener = resources.listeners.iter().find(|listener| listener.arn == *arn)?;
            Some((*port, listener.clone()))
        };
        self.listeners.iter().filter_map(found).collect()
    }
}

impl Aws {
    /// Adds the certificates again that left for those of a step that AWS refuses, or that must wait. AWS may refuse some.
    pub(crate) async fn put_back_certificates(
        &self,
        step: &Step,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some((listener, left)) = entry.left_certificates.of(step) else { return Ok(()) };
        let (listener, left) = (listener.clone(), left.clone());
        let done = self.add_certificates(&listener, left.clone(), resources, entry).await;
        let Err(error) = &done else { return Ok(()) };
        if !is_refusal(error) {
            return done;
        }
        let present = others_of(resources, &listener).cloned().unwrap_or_default();
        if entry.left_certificates.note_refused(listener.clone(), error) {
            let certificates = &left - &present;
            tracing::warn!(
                listener, ?certificates, %error,
                "certificates that left for others not put back; continuing without them"
            );
        }
        Ok(())
    }

    /// Creates the listeners again that left for another change than this one, before anything else: it may be refused as a whole.
    pub(crate) async fn put_back_of_other_change(
        &self,
        owner: &Owner,
        (wanted, targets): (&Desired, &WantedTargets),
        tags: &Tags,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some(balancer) = resources.balancer.clone().filter(|_| entry.left.are_of_other(wanted)) else {
            return Ok(());
        };
        let limits = self.limits(entry, Compare::Remembered);
        let groups: Vec<_> =
            resources.groups.iter().filter(|(_, group)| entry.left.need(&group.arn)).collect();
        for (name, group) in groups {
            let Some(targets) = targets.of(name, group) else { continue };
            let (known, refused) = (&mut entry.registered, SharedRefusals::new(&mut entry.refused_targets));
            targets::converge(&*self.client, &group.arn, known, targets, &refused, limits).await?;
        }
        let done = self.put_back_all(owner, (&balancer, tags), resources, entry).await;
        // It is tried again after the change.
        if is_refused(&done) { Ok(()) } else { done }
    }

    /// Creates all listeners again that left.
    pub(crate) async fn put_back_all(
        &self,
        owner: &Owner,
        of: (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let ports: Vec<u16> = entry.left.all.keys().copied().collect();
        let mut refused = Ok(());
        for port in ports {
            let done = self.put_back(owner, port, of, resources, entry).await;
            if is_refused(&done) {
                refused = done;
            } else {
                done?;
            }
        }
        refused
    }

    /// Creates the listener again that left for the one of this port.
    pub(crate) async fn put_back(
        &self,
        owner: &Owner,
        port: u16,
        of: (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        entry.left.drop_settled(resources);
        let Some(left) = entry.left.all.get(&port).cloned() else { return Ok(()) };
        let limits = self.limits(entry, Compare::Remembered);
        if let Some(arn) = &left.group_arn
            && targets::known(&*self.client, arn, &mut entry.registered, limits).await?.is_empty()
        {
            // It would serve nobody.
            return Ok(());
        }
        let done = self.put_back_listener(owner, left, of, resources, entry).await;
        entry.left.drop_settled(resources);
        done
    }

    /// Creates a listener again as it was, in the place of one that AWS refused.
    async fn put_back_listener(
        &self,
        owner: &Owner,
        was: ObservedListener,
        (balancer, tags): (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some(group) = &was.group_arn else { return Ok(()) };
        tracing::info!(service = %owner.service, port = was.port, "creating listener again, because AWS refuses the one in its place");
        self.note_change();
        entry.written = Some(Instant::now());
        let tags: Tags =
            was.tags.iter().chain(tags).map(|(key, value)| (key.clone(), value.clone())).collect();
        let asked = (was.port, was.protocol.as_str());
        let made = self.client.create_listener(&balancer.arn, asked, was.tls.as_ref(), group, &tags).await?;
        entry.freed.retain(|(arn, _)| *arn != was.arn);
        let others = was.tls.as_ref().map(|tls| tls.others.clone()).unwrap_or_default();
        let tls = was.tls.clone().map(|tls| Tls { others: BTreeSet::new(), ..tls });
        let arn = made.arn.clone();
        resources.listeners.push(ObservedListener { arn: made.arn, tls, tags, ..was });
        if others.is_empty() { Ok(()) } else { self.add_certificates(&arn, others, resources, entry).await }
    }
}
