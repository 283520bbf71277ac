// SPDX-License-Identifier: Apache-2.0
//! Brings the subnets of an existing load balancer in place, after everything else: neither ports nor targets depend on them. `zones`
//! decides, `lookup` reads the subnets of the VPC. It changes no address.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, Outcome, Owner};
use steerage_provider_cloud::LastAttempt;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::desired::Desired;
use crate::ip_address_type::IpAddressType;
use crate::placement::{Placed, Placement};
use crate::provider::Aws;
use crate::registered::MAX_HOLD;
use crate::security_group_sync::{again_after, compare_soon, retry_wait};
use crate::shared::LoadBalancerUse;
use crate::state::ServiceState;
use crate::zones::{self, ZoneChange};

/// What is known of a load balancer's subnets.
#[derive(Default)]
pub(crate) struct KnownPlacement {
    /// The wish that was last tried, and the subnets afterwards.
    pub(crate) tried: Option<LastAttempt<Placement, Placed>>,
    /// When a zone was last added: AWS needs minutes until it serves.
    pub(crate) added: Option<Instant>,
    /// When a call last changed them, or the prefixes for source NAT: a read may show an older state for a while.
    pub(crate) written: Option<Instant>,
    /// Calls in a row that failed.
    failures: u32,
}

impl Aws {
    /// Brings the subnets in place. A failure becomes a part of the outcome.
    pub(crate) async fn sync_subnets(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
        outcome: &mut Outcome,
    ) {
        let wanted = entry.wanted.as_ref().filter(|(of, _)| of == owner);
        let Some(all_wanted) = wanted.map(|(_, wanted)| wanted.clone()) else { return };
        let wanted = all_wanted.placement.clone();
        let Some(balancer) = entry.balancer(owner).cloned() else { return };
        // What no annotation names is compared with the rest that the lists of the start do not show.
        if !wanted.is_named() && entry.complete.as_ref().is_some_and(|complete| complete.verify.is_some()) {
            return;
        }
        let known = entry.subnets.tried.as_ref().filter(|_| compare == Compare::Remembered);
        let result = match known.and_then(|known| known.result(&wanted, &balancer.placed)) {
            Some(result) => result.map(|()| None),
            None if wanted.may_differ(&balancer.placed)
                && entry.is_just_changed(owner, self.config.settle) =>
            {
                if !wanted.needs_lookup() {
                    again_after(outcome, self.config.settle);
                }
                entry.subnets.tried = None;
                return compare_soon(outcome, self.config.settle);
            }
            None => self.place(owner, &all_wanted, balancer, entry).await,
        };
        let placed = entry.balancer(owner).map(|balancer| balancer.placed.clone()).unwrap_or_default();
        let known = &mut entry.subnets;
        known.tried = LastAttempt::new(wanted, placed, result.as_ref().err());
        match &result {
            Ok(None) | Err(Error::Invalid { .. }) => known.failures = 0,
            Ok(Some(wait)) => {
                // Not at its end yet.
                (known.tried, known.failures) = (None, 0);
                again_after(outcome, *wait);
            }
            Err(_) => {
                again_after(outcome, retry_wait(known.failures));
                known.failures += 1;
            }
        }
        if let Err(Error::Conflict(_)) = result {
            // The load balancer is gone: the next call reads everything.
            (entry.resources, entry.complete) = (None, None);
        } else if let Err(error) = result {
            outcome.incomplete.get_or_insert_with(|| (error.reason(), error.to_string()));
        }
    }

    /// Makes the subnets the wanted ones. Returns when to call again before one leaves.
    async fn place(
        &self,
        owner: &Owner,
        all_wanted: &Desired,
        mut balancer: Balancer,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let wanted = &all_wanted.placement;
        if !wanted.may_differ(&balancer.placed) {
            return Ok(None);
        }
        if matches!(entry.uses.get(owner), Some(LoadBalancerUse::Shared(_))) {
            // Another Service may have changed the zones.
            self.reread_subnets(owner, &mut balancer, entry).await?;
            remember(owner, entry, &balancer);
        }
        let all = match self.subnets_to_compare().await {
            Ok(all) => all,
            // Nobody asked for a change. A later comparison finds new zones.
            Err(error) if !wanted.is_named() => {
                tracing::debug!(service = %owner.service, %error, "subnets not read; looking for new zones later");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        while let Some(change) = zones::next(&self.config, wanted, &balancer.placed, &all)? {
            let placed = match change {
                ZoneChange::Add(placed) => {
                    entry.subnets.added = Some(Instant::now());
                    placed
                }
                ZoneChange::Remove(placed) => {
                    if let Some(wait) = self.hold_zones(owner, &balancer, entry).await? {
                        return Ok(Some(wait));
                    }
                    placed
                }
            };
            let subnets: Vec<&String> = placed.keys().collect();
            tracing::info!(service = %owner.service, ?subnets, "changing the subnets of the load balancer");
            let prefixes = self.given_prefixes(all_wanted).await?;
            let source_nat = balancer.source_nat.with_subnets(&placed, &prefixes);
            let has_v6 = balancer.ip_address_type == IpAddressType::DualStack;
            self.note_change();
            (entry.written, entry.subnets.written) = (Some(Instant::now()), Some(Instant::now()));
            let changed =
                self.client.set_subnets(&balancer.arn, &placed, has_v6.then_some(&source_nat)).await?;
            (balancer.placed, balancer.source_nat) = (placed, changed);
            remember(owner, entry, &balancer);
        }
        Ok(None)
    }

    /// When to call again before zones may leave: those that came last must serve first, and all must be as they are known, because AWS
    /// ends the connections of a zone that leaves.
    async fn hold_zones(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<Option<Duration>, Error> {
        let since = entry.subnets.added.map_or(MAX_HOLD, |added| added.elapsed());
        if since < MAX_HOLD {
            return Ok(Some(MAX_HOLD.saturating_sub(since)));
        }
        let now = self.client.balancer_at(&balancer.arn).await?;
        let Some(now) = now else {
            return Err(Error::Conflict("the load balancer no longer exists".to_owned()));
        };
        if now.active && now.placed == balancer.placed {
            return Ok(None);
        }
        let Balancer { placed, source_nat, .. } = now;
        remember(owner, entry, &Balancer { placed, source_nat, ..balancer.clone() });
        Ok(Some(self.config.activation_poll))
    }
}

fn remember(owner: &Owner, entry: &mut ServiceState, balancer: &Balancer) {
    if let Some(known) = entry.balancer_mut(owner) {
        known.placed.clone_from(&balancer.placed);
        known.source_nat.clone_from(&balancer.source_nat);
    }
}
