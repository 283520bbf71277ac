// SPDX-License-Identifier: Apache-2.0
//! Changes over which IP families clients reach an existing load balancer. `ip_address_type` decides, `provider` calls it after all that
//! clients need besides: AWS may refuse IPv6, for example because of a subnet, and everything else must follow all the same.

use steerage_provider_api::{Compare, Error, Outcome, Owner};
use steerage_provider_cloud::LastAttempt;
use tokio::time::Instant;

use crate::client::Balancer;
use crate::ip_address_type::IpAddressType;
use crate::provider::Aws;
use crate::security_group_sync::{again_after, retry_wait};
use crate::source_nat::{Prefixes, SourceNatWish};
use crate::state::ServiceState;

/// What is known of a load balancer's IP address type.
#[derive(Default)]
pub(crate) struct KnownIpAddressType {
    /// The wish that was last tried, and the type that the load balancer had then.
    tried: Option<LastAttempt<IpAddressType, IpAddressType>>,
    /// Calls in a row that failed.
    failures: u32,
}

impl Aws {
    /// Makes the type the wanted one. A failure becomes a part of the outcome.
    pub(crate) async fn sync_ip_address_type(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
        compare: Compare,
        outcome: &mut Outcome,
    ) {
        let wanted = entry.wanted.as_ref().filter(|(of, _)| of == owner);
        let Some(wanted) = wanted.map(|(_, wanted)| wanted.ip_address_type) else { return };
        let Some(mut balancer) = entry.balancer(owner).cloned() else { return };
        let present = balancer.ip_address_type;
        if present == wanted {
            entry.ip_address_type = KnownIpAddressType::default();
            return;
        }
        let known = entry.ip_address_type.tried.as_ref().filter(|_| compare == Compare::Remembered);
        let result = match known.and_then(|known| known.result(&wanted, &present)) {
            Some(result) => result,
            None => self.set_ip_address_type(owner, &mut balancer, wanted, entry).await,
        };
        if let Some(known) = entry.balancer_mut(owner) {
            *known = balancer;
        }
        let known = &mut entry.ip_address_type;
        known.tried = LastAttempt::new(wanted, present, result.as_ref().err());
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
            // The load balancer is gone: the next call reads everything.
            (entry.resources, entry.complete) = (None, None);
        } else {
            outcome.incomplete.get_or_insert_with(|| (error.reason(), error.to_string()));
        }
    }

    /// Sends the change. Source NAT, which needs IPv6, ends before.
    pub(crate) async fn set_ip_address_type(
        &self,
        owner: &Owner,
        balancer: &mut Balancer,
        kind: IpAddressType,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if kind == IpAddressType::Ipv4 {
            let wish = SourceNatWish::Off;
            self.change_source_nat(owner, &wish, &Prefixes::new(), balancer, entry).await?;
        }
        tracing::info!(service = %owner.service, ip_address_type = kind.as_str(), "changing the IP address type of the load balancer");
        self.note_change();
        entry.written = Some(Instant::now());
        match self.client.set_ip_address_type(&balancer.arn, kind).await {
            Ok(()) => {
                balancer.ip_address_type = kind;
                Ok(())
            }
            Err(failure) => Err(self.name_lacking_ipv6(failure.into(), kind, &balancer.placed).await),
        }
    }
}
