// SPDX-License-Identifier: Apache-2.0
//! Turns the source NAT of an existing load balancer on and off, and changes its prefixes. `source_nat` decides. `apply` calls it before
//! the first listener with UDP, `provider` after everything else: off comes when the last such listener is gone.
//!
//! The call replaces the subnets too. So it names those that AWS shows at that moment, and never takes a zone away.

use steerage_provider_api::{Compare, Error, Outcome, Owner};
use steerage_provider_cloud::LastAttempt;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::desired::Desired;
use crate::diff::{ObservedListener, Step};
use crate::ip_address_type::IpAddressType;
use crate::observe::Resources;
use crate::provider::Aws;
use crate::security_group_sync::{again_after, compare_soon, retry_wait};
use crate::source_nat::{Prefixes, SourceNat, SourceNatWish};
use crate::state::ServiceState;

/// What is known of a load balancer's source NAT.
#[derive(Default)]
pub(crate) struct KnownSourceNat {
    /// The wish that was last tried, and what the load balancer had then.
    pub(crate) tried: Option<LastAttempt<SourceNatWish, SourceNat>>,
    /// Calls in a row that failed.
    failures: u32,
    /// Whether AWS refused a listener with UDP: the load balancer may have another source NAT than is known.
    pub(crate) must_read: bool,
}

/// Whether listeners of this protocol take UDP.
pub(crate) fn has_udp(protocol: &str) -> bool {
    protocol.ends_with("UDP")
}

/// Whether the step makes a listener take UDP.
pub(crate) fn brings_udp(step: &Step) -> bool {
    match step {
        Step::CreateListener { protocol, .. } => has_udp(protocol),
        Step::SwitchListener { protocol, .. } => protocol.is_some_and(has_udp),
        _ => false,
    }
}

/// The listeners that have UDP, or shall have it, and whose targets have the other IP family than is wanted. No type of load balancer would
/// do for both what they are and what they become, so they go before the type changes.
pub(crate) fn udp_of_other_family<'a>(
    wanted: &'a Desired,
    resources: &'a Resources,
) -> impl Iterator<Item = &'a ObservedListener> {
    let family = wanted.groups.first().map(|group| group.family);
    let gets_udp = |listener: &ObservedListener| {
        let mut next = wanted.listeners.iter().filter(|next| next.port == listener.port);
        next.any(|next| has_udp(next.protocol))
    };
    let has_other = move |listener: &ObservedListener| {
        let mut groups = resources.groups.iter();
        let group = groups.find(|(_, group)| listener.group_arn.as_ref() == Some(&group.arn));
        // The name of a group says its family too.
        let replaced = group.filter(|(name, _)| wanted.groups.iter().all(|group| group.name != **name));
        replaced.is_some_and(|(_, group)| family.is_some_and(|family| family != group.family()))
    };
    let is_other = move |listener: &&ObservedListener| {
        (has_udp(&listener.protocol) || gets_udp(listener)) && has_other(listener)
    };
    resources.listeners.iter().filter(is_other)
}

/// The steps of listeners in an order in which AWS takes them. UDP for targets with IPv4 needs a load balancer without IPv6, which it can
/// become only when no other listener has targets with IPv6 any more.
pub(crate) fn in_order<'a>(
    steps: &'a [Step],
    wanted: &Desired,
    balancer: &Balancer,
) -> impl Iterator<Item = &'a Step> {
    use IpAddressType::{DualStack, Ipv4};
    let is_later = (balancer.ip_address_type, wanted.ip_address_type) == (DualStack, Ipv4);
    let (last, first): (Vec<_>, Vec<_>) = steps.iter().partition(|step| is_later && brings_udp(step));
    first.into_iter().chain(last)
}

impl Aws {
    /// Turns source NAT on where a listener with UDP needs it next.
    pub(crate) async fn enable_source_nat(
        &self,
        owner: &Owner,
        wanted: &Desired,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let Some(balancer) = &mut resources.balancer else { return Ok(()) };
        entry.source_nat.must_read = self.read_doubtful(owner, balancer, entry).await?;
        if balancer.source_nat.is_on() {
            return Ok(());
        }
        let prefixes = self.given_prefixes(wanted).await?;
        self.change_source_nat(owner, &wanted.source_nat, &prefixes, balancer, entry).await
    }

    /// Makes it the wanted one at a load balancer with IPv6. A failure becomes a part of the outcome.
    pub(crate) async fn sync_source_nat(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
        outcome: &mut Outcome,
    ) {
        let Some((_, wanted)) = entry.wanted.as_ref().filter(|(of, _)| of == owner) else { return };
        let wish = wanted.source_nat.clone();
        let has_v6 = |found: &&Balancer| found.ip_address_type == IpAddressType::DualStack;
        let Some(mut balancer) = entry.balancer(owner).filter(has_v6).cloned() else { return };
        let (read, must_read) = match self.read_doubtful(owner, &mut balancer, entry).await {
            Ok(must_read) => (Ok(()), must_read),
            Err(error) => (Err(error), true),
        };
        if wish == SourceNatWish::Off && balancer.source_nat.is_on() && entry.may_have_udp(owner) {
            // Of somebody else, whose listener AWS would not leave without it; or the listeners were not read yet.
            entry.source_nat.tried = LastAttempt::new(wish, balancer.source_nat, None);
            return;
        }
        let known = entry.source_nat.tried.as_ref().filter(|_| compare == Compare::Remembered);
        let result = match known.and_then(|known| known.result(&wish, &balancer.source_nat)) {
            _ if read.is_err() => read,
            Some(result) => result,
            None if entry.is_just_changed(owner, self.config.settle) => {
                if wish.change(&balancer.source_nat, &balancer.placed, &Prefixes::new()).is_some() {
                    again_after(outcome, self.config.settle);
                }
                entry.source_nat.tried = None;
                return compare_soon(outcome, self.config.settle);
            }
            None => match self.given_prefixes(wanted).await {
                Ok(prefixes) => self.change_source_nat(owner, &wish, &prefixes, &mut balancer, entry).await,
                Err(error) => Err(error),
            },
        };
        let known = &mut entry.source_nat;
        known.must_read = must_read;
        known.tried = LastAttempt::new(wish, balancer.source_nat.clone(), result.as_ref().err());
        if let Some(known) = entry.balancer_mut(owner) {
            (known.placed, known.source_nat) = (balancer.placed, balancer.source_nat);
        }
        let known = &mut entry.source_nat;
        let Err(error) = result else {
            known.failures = 0;
            return;
        };
        if matches!(error, Error::Invalid { .. }) {
            known.failures = 0;
        } else {
            again_after(outcome, retry_wait(known.failures));
            known.failures += 1;
        }
        if matches!(error, Error::Conflict(_)) {
            // It is gone, or another Service changed it: the next call reads everything.
            (entry.resources, entry.complete) = (None, None);
        } else {
            outcome.incomplete.get_or_insert_with(|| (error.reason(), error.to_string()));
        }
    }

    /// Reads it after AWS refused a listener with UDP. True if a read must wait.
    async fn read_doubtful(
        &self,
        owner: &Owner,
        balancer: &mut Balancer,
        entry: &ServiceState,
    ) -> Result<bool, Error> {
        // Right after a change of another Service, it would show an old state.
        if !entry.source_nat.must_read || entry.is_just_changed(owner, self.config.settle) {
            return Ok(entry.source_nat.must_read);
        }
        self.reread_subnets(owner, balancer, entry).await?;
        Ok(false)
    }

    /// The prefixes that the Service gives, by subnet.
    pub(crate) async fn given_prefixes(&self, wanted: &Desired) -> Result<Prefixes, Error> {
        if !wanted.source_nat.has_prefixes() {
            return Ok(Prefixes::new());
        }
        Ok(wanted.source_nat.prefixes(self.resolved(wanted).await?.ids()))
    }

    /// Sends the change, if there is one, with the subnets that the load balancer has.
    pub(crate) async fn change_source_nat(
        &self,
        owner: &Owner,
        wish: &SourceNatWish,
        prefixes: &Prefixes,
        balancer: &mut Balancer,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if wish.change(&balancer.source_nat, &balancer.placed, prefixes).is_none() {
            return Ok(());
        }
        self.reread_subnets(owner, balancer, entry).await?;
        let Some(to) = wish.change(&balancer.source_nat, &balancer.placed, prefixes) else { return Ok(()) };
        tracing::info!(service = %owner.service, source_nat = to.as_str(), "changing the source NAT of the load balancer");
        self.note_change();
        (entry.written, entry.subnets.written) = (Some(Instant::now()), Some(Instant::now()));
        balancer.source_nat = self.client.set_subnets(&balancer.arn, &balancer.placed, Some(&to)).await?;
        Ok(())
    }

    /// Reads the subnets and prefixes of a load balancer, which others may have changed, unless what is known is newer than a read.
    pub(crate) async fn reread_subnets(
        &self,
        owner: &Owner,
        balancer: &mut Balancer,
        entry: &ServiceState,
    ) -> Result<(), Error> {
        if entry.is_just_changed(owner, self.config.settle) {
            let message = "another Service changed the shared load balancer a moment ago";
            return Err(Error::Conflict(message.to_owned()));
        }
        if entry.subnets.written.is_some_and(|at| at.elapsed() < self.config.settle) {
            return Ok(());
        }
        let now = self.client.balancer_at(&balancer.arn).await?;
        let now = now.ok_or_else(|| Error::Conflict("the load balancer no longer exists".to_owned()))?;
        (balancer.placed, balancer.source_nat) = (now.placed, now.source_nat);
        Ok(())
    }
}
