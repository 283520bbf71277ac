// SPDX-License-Identifier: Apache-2.0
//! What leaves to make room at AWS's limits, and comes back if AWS refuses what takes its place. `apply` calls it. A listener or a
//! certificate that is put back was missing for a moment; without that, it would be missing until AWS accepts the other.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::{Balancer, Tags};
use crate::diff::{ObservedListener, Step};
use crate::observe::Resources;
use crate::provider::Aws;
use crate::state::ServiceState;
use crate::tls::Tls;

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
    matches!(done, Err(Error::Invalid { .. } | Error::Denied(_)))
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
    /// Creates a listener again as it was, in the place of one that AWS refused.
    pub(crate) async fn put_back_listener(
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
