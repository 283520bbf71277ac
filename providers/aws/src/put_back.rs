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
    /// The certificates that left each listener, by its ARN.
    certificates: BTreeMap<String, BTreeSet<String>>,
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

/// Certificates that left their listeners, by ARN, for others of the same change, which a failure may have kept away.
#[derive(Debug, Default)]
pub(crate) struct LeftCertificates {
    wanted: Option<Desired>,
    all: BTreeMap<String, BTreeSet<String>>,
}

impl LeftCertificates {
    /// A try to make this change begins. Nothing is known of another one.
    pub(crate) fn begin(&mut self, wanted: &Desired, room: &mut Room) {
        if self.wanted.as_ref() == Some(wanted) {
            room.certificates.clone_from(&self.all);
        } else {
            *self = Self::default();
        }
    }

    /// The step of the change is made. Of what it removes, this keeps what made room for another: the rest is not wanted any more.
    pub(crate) fn note(&mut self, wanted: &Desired, step: &Step, steps: &[Step]) {
        let Step::RemoveCertificates { arn, certificates } = step else { return };
        let is_added = |step: &Step| matches!(step, Step::AddCertificates { arn: to, .. } if to == arn);
        if steps.iter().skip_while(|other| *other != step).any(is_added) {
            self.wanted = Some(wanted.clone());
            self.all.entry(arn.clone()).or_default().extend(certificates.iter().cloned());
        }
    }
}

impl Room {
    pub(crate) fn of(steps: &[Step]) -> Self {
        let listeners = steps.windows(2).filter_map(|pair| match pair {
            [Step::DeleteListener { arn }, Step::CreateListener { port, .. }] => Some((*port, arn.clone())),
            _ => None,
        });
        Self { listeners: listeners.collect(), certificates: BTreeMap::new() }
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

    /// Notes certificates that left.
    pub(crate) fn note(&mut self, step: &Step) {
        if let Step::RemoveCertificates { arn, certificates } = step {
            self.certificates.entry(arn.clone()).or_default().extend(certificates.iter().cloned());
        }
    }

    /// The certificates that left for those that the step adds, with their listener.
    pub(crate) fn certificates(&self, step: &Step) -> Option<(&String, &BTreeSet<String>)> {
        let Step::AddCertificates { arn, .. } = step else { return None };
        self.certificates.get_key_value(arn)
    }
}

impl Aws {
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
